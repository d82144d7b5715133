// attention_weight_sums: per key the sum over the queries of its weights exp(score - lse).
//
// The sum of a key is a row statistic of the transposed problem, in which keys attend to queries: with -lse as a mask over its
// columns, the row's lse is the logarithm of the sum. So every forward kernel can compute it, with values of no columns. A
// kernel of its own (cuda/attention/sm90/weight_sums.cuh) needs no mask and no rescaling.
#include <cmath>

#include "../../core/online_softmax.h"
#include "../operators.h"
#include "pass.h"

namespace flash_online::ops {
namespace {

struct WeightSumsOnCpu : Cpu {
  static bool try_kernel(const AttentionProblem&, float*, const Tensor&) { return false; }
  template <class T>
  static void make_mask(const T* lse, int64_t count, T* mask, const Tensor&) {
    for (int64_t i = 0; i < count; ++i) mask[i] = hidden_or_negative(lse[i]);
  }
  static void run(const AttentionProblem& problem, const Tensor& like) {
    const cpu::AttentionKernels& kernels = cpu::kernels().attention;
    kernels.forward(problem,
                    CpuExecutor(problem.batch * problem.heads * problem.queries, kernels.forward_memory(problem), like));
  }
  template <class T>
  static void make_sums(const T* lse, const T* low, int64_t count, float* sums, const Tensor&) {
    for (int64_t i = 0; i < count; ++i) {
      const T sum = std::exp(lse[i]);
      sums[i] = static_cast<float>(std::fma(sum, low[i], sum));
    }
  }
};

struct WeightSumsOnCuda : Cuda {
  static bool try_kernel(const AttentionProblem& problem, float* sums, const Tensor& like) {
    CudaCall on_cuda(like);
    const auto plan = cuda::plan_weight_sums(problem, sums);
    if (!plan.launch) return false;
    plan.run(on_cuda.workspace(plan.workspace_bytes), on_cuda.stream());
    return true;
  }
  template <class T>
  static void make_mask(const T* lse, int64_t count, T* mask, const Tensor& like) {
    cuda::weight_sums_mask(dtype_of(like), lse, count, mask, CudaCall(like).stream());
  }
  static void run(const AttentionProblem& problem, const Tensor& like) {
    CudaCall on_cuda(like);
    const auto plan = cuda::plan_forward(problem);
    plan.run(on_cuda.workspace(plan.workspace_bytes), on_cuda.stream());
  }
  template <class T>
  static void make_sums(const T* lse, const T* low, int64_t count, float* sums, const Tensor& like) {
    cuda::weight_sums_of_lse(dtype_of(like), lse, low, count, sums, CudaCall(like).stream());
  }
};

// Sequence n of the transposed problem. The heads that share keys are its heads, and the key heads its batch: a key's rows
// then have the stride 0 along the heads. `mask`, `lse` and `low` are [batch, heads, rows], contiguous.
template <class T>
AttentionProblem transposed(const AttentionProblem& problem, int64_t n, const T* mask, T* lse, T* low) {
  const int64_t group = problem.heads / problem.key_heads, first = n * problem.heads;
  AttentionProblem keys = problem;
  keys.batch = problem.key_heads;
  keys.heads = keys.key_heads = keys.value_heads = group;
  keys.queries = problem.keys, keys.keys = problem.queries;
  const auto at = [](const ConstView4& view, int64_t offset, int64_t element_bytes) {
    return static_cast<const void*>(static_cast<const std::byte*>(view.data) + offset * element_bytes);
  };
  const int64_t bytes = size_of(problem.dtype);
  const auto &q = problem.query.stride, &k = problem.key.stride;
  keys.query = {at(problem.key, n * k[0], bytes), {k[1], 0, k[2], k[3]}};
  keys.key = {at(problem.query, n * q[0], bytes), {group * q[1], q[1], q[2], q[3]}};
  keys.value = keys.key;
  keys.head_dim_v = 0;
  keys.mask = {mask + first * problem.queries, {group * problem.queries, problem.queries, 0, 1}};
  keys.mask_dtype = problem.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  keys.visible = {problem.visible.right, problem.visible.left, -problem.visible.offset};
  keys.out = {lse, {}};  // of no columns
  keys.lse = lse + first * problem.keys, keys.lse_low = low + first * problem.keys;
  keys.lse_stride[0] = group * problem.keys, keys.lse_stride[1] = problem.keys;
  return keys;
}

template <class Device, class T>
void sums_by_row_statistics(const AttentionProblem& problem, const Tensor& like, float* sums) {
  const int64_t rows = problem.batch * problem.heads * problem.queries, keys = problem.batch * problem.heads * problem.keys;
  const ScalarType type = accumulator_of(like.scalar_type());
  const Tensor mask = empty({rows}, type, like), lse = empty({keys}, type, like), low = empty({keys}, type, like);
  T *const mask_data = mask.mutable_data_ptr<T>(), *const lse_data = lse.mutable_data_ptr<T>(),
           *const low_data = low.mutable_data_ptr<T>();
  Device::make_mask(static_cast<const T*>(problem.lse), rows, mask_data, like);
  for (int64_t n = 0; n < problem.batch; ++n) Device::run(transposed(problem, n, mask_data, lse_data, low_data), like);
  Device::make_sums(lse_data, low_data, keys, sums, like);
}

template <class Device>
Tensor attention_weight_sums(const Tensor& every_query, const Tensor& key, const Tensor& every_lse, int64_t window_left,
                             int64_t window_right, bool lower_right, int64_t last, std::optional<double> scale,
                             double softcap) {
  check_floating(every_query, "query");
  check_device(key, "key", every_query, "query");
  check_device(every_lse, "lse", every_query, "query");
  check_query_and_key(every_query, key);
  const int64_t heads = every_query.size(1), key_heads = key.size(1), length = every_query.size(2);
  check(every_lse.scalar_type() == accumulator_of(every_query.scalar_type()),
        "lse: expected dtype float32 (float64 for float64), got ", NameOfDtype{every_lse});
  const std::vector<int64_t> rows{every_query.size(0), heads, length};
  check(sizes_of(every_lse) == rows, "lse: expected ", Sizes{rows}, ", got ", shape_of(every_lse));
  check(softcap >= 0, "softcap: expected 0 (none) or more, got ", softcap);
  Tensor query = every_query, lse = every_lse;
  const int64_t first = last < 0 || last > length ? 0 : length - last;
  if (first > 0) {
    query = narrow(query, 2, first, last);
    lse = narrow(lse, 2, first, last);
  }

  Tensor sums = empty({query.size(0), heads, key.size(2)}, ScalarType::Float, query);
  if (sums.numel() == 0) return sums;
  if (lse.numel() == 0) return torch::stable::zero_(sums);
  const Tensor own_lse = as_contiguous(lse);
  AttentionProblem problem;
  problem.dtype = dtype_of(query);
  problem.batch = query.size(0), problem.heads = heads, problem.key_heads = problem.value_heads = key_heads;
  problem.queries = query.size(2), problem.keys = key.size(2);
  problem.head_dim = query.size(3);
  set_view(query, problem.query);
  set_view(key, problem.key);
  problem.visible = {window_left, window_right, first + (lower_right ? problem.keys - length : 0)};
  problem.scale = scale_of(scale, problem.head_dim);
  problem.softcap = softcap;
  problem.lse = own_lse.data_ptr();
  problem.lse_stride[0] = heads * problem.queries, problem.lse_stride[1] = problem.queries;
  float* const data = sums.mutable_data_ptr<float>();
  if (Device::try_kernel(problem, data, query)) return sums;
  if (problem.dtype == DType::kFloat64)
    sums_by_row_statistics<Device, double>(problem, query, data);
  else
    sums_by_row_statistics<Device, float>(problem, query, data);
  return sums;
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) {
  using namespace flash_online::ops;
  implement(m, "attention_weight_sums", TORCH_BOX(&attention_weight_sums<WeightSumsOnCpu>));
}

STABLE_TORCH_LIBRARY_IMPL(flash_online, CUDA, m) {
  using namespace flash_online::ops;
  if constexpr (kBuiltWithCuda) implement(m, "attention_weight_sums", TORCH_BOX(&attention_weight_sums<WeightSumsOnCuda>));
}
