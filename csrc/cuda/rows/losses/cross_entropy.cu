// Cross-entropy on CUDA, forward and backward: one loss per row, against class indices or class probabilities. No table of
// probabilities is written. cross_entropy.cuh has the work on one row; dispatch.cuh chooses the kind of row by length and
// strides.
#include "../../hw/check.cuh"
#include "cross_entropy.cuh"
#include "entropy.h"

namespace flash_online::cuda {

namespace {

// ---- the reduction of the losses to one number

constexpr int kReduceThreads = 512;
constexpr int64_t kPairStride = sizeof(LossAndWeight) / sizeof(float);
// The least rows that are worth a CTA, and the most CTAs: the second launch reduces one result per CTA. Up to kFewLosses one
// CTA takes them all: a second launch costs the host more than the rows cost the CTA.
constexpr int64_t kReduceRowsPerCta = 2048, kReduceMaxCtas = kReduceThreads;

struct LossReduction {
  const float *loss, *weight;
  int64_t stride, rows, rows_per_cta;
  LossAndWeight* partial;  // one per CTA; null: there is one CTA, which writes the results
  DType dtype;
  bool mean;
  void* result;
  float* divisor;
};

__global__ void __launch_bounds__(kReduceThreads) reduce_kernel(const __grid_constant__ LossReduction reduction) {
  using Group = RegisterRowGroup<kReduceThreads, kReduceThreads>;
  const int64_t begin = blockIdx.x * reduction.rows_per_cta, end = min(begin + reduction.rows_per_cta, reduction.rows);
  Sum loss, weight;
  launch_dependents();
  grid_dependency_wait();
  constexpr int kUnroll = 8;  // loads of a thread in flight
  for (int64_t i = begin + threadIdx.x; i < end; i += kUnroll * kReduceThreads) {
    float losses[kUnroll], weights[kUnroll];
#pragma unroll
    for (int n = 0; n < kUnroll; ++n) {
      const int64_t at = i + n * kReduceThreads;
      losses[n] = at < end ? reduction.loss[at * reduction.stride] : 0.0f;
      weights[n] = at < end ? reduction.weight[at * reduction.stride] : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kUnroll; ++n) loss.add(losses[n]), weight.add(weights[n]);
  }
  loss = Group::merge_warps<0>(merge_lanes<kWarpSize>(loss));
  weight = Group::merge_warps<1>(merge_lanes<kWarpSize>(weight));
  if (threadIdx.x != 0) return;
  if (reduction.partial != nullptr) {
    reduction.partial[blockIdx.x] = {loss.value, weight.value};
    return;
  }
  const float divisor = reduction.mean ? weight.value : 1.0f, result = loss.value / divisor;
  *reduction.divisor = divisor;
  if (reduction.dtype == DType::kFloat16)
    *static_cast<__half*>(reduction.result) = narrow<__half>(result);
  else if (reduction.dtype == DType::kBFloat16)
    *static_cast<__nv_bfloat16*>(reduction.result) = narrow<__nv_bfloat16>(result);
  else
    *static_cast<float*>(reduction.result) = result;
}

int64_t reduce_ctas(int64_t rows) {
  return rows <= kFewLosses ? 1 : std::min(ceil_div(rows, kReduceRowsPerCta), kReduceMaxCtas);
}

bool has_loss_sums(const RowProblem& problem) { return problem.loss_sums != nullptr && *problem.loss_sum_count != 0; }
// The number of losses, of rows or of blocks of rows.
int64_t reduced_losses(const RowProblem& problem) {
  return has_loss_sums(problem) ? *problem.loss_sum_count : problem.outer * problem.inner;
}

template <class IndexOp, class SmoothIndexOp, class ProbabilityOp, class T>
void launch(const RowProblem& problem, bool contiguous, cudaStream_t stream, const char* name) {
  if (problem.target == nullptr)
    launch_rows<ProbabilityOp, T, T>(problem, contiguous, stream, name);
  else if (problem.label_smoothing == 0)
    launch_rows<IndexOp, T, T>(problem, contiguous, stream, name);
  else
    launch_rows<SmoothIndexOp, T, T>(problem, contiguous, stream, name);
}

}  // namespace

void cross_entropy(const RowProblem& problem, CUstream_st* stream) {
  if (problem.outer == 0 || problem.inner == 0) return;  // a row of no classes has a loss
  const bool contiguous = classes_are_contiguous(problem, {problem.input.stride[1]});
  if (problem.entropy != nullptr && try_loss_and_entropy(problem, contiguous, stream)) return;
  visit_type(problem, "cross_entropy", [&]<class T>(Type<T>) {
    launch<IndexLoss<false>, IndexLoss<true>, ProbabilityLoss, T>(problem, contiguous, stream, "cross_entropy");
  });
  if (problem.entropy != nullptr) entropy(problem, contiguous, stream);
}

void cross_entropy_backward(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const bool contiguous =
      classes_are_contiguous(problem, {problem.input.stride[1], problem.grad_input.stride[1],
                                       problem.grad_target.data == nullptr ? 1 : problem.grad_target.stride[1]});
  if (problem.grad_entropy != nullptr) return loss_and_entropy_backward(problem, contiguous, stream);
  visit_type(problem, "cross_entropy", [&]<class T>(Type<T>) {
    launch<IndexLossBackward<false>, IndexLossBackward<true>, ProbabilityLossBackward<>, T>(problem, contiguous, stream,
                                                                                            "cross_entropy_backward");
  });
}

int64_t reduce_losses_workspace(int64_t rows) {
  const int64_t ctas = reduce_ctas(rows);
  return ctas > 1 ? ctas * static_cast<int64_t>(sizeof(LossAndWeight)) : 0;
}

void reduce_losses(const RowProblem& problem, bool mean, void* result, void* divisor, void* workspace, CUstream_st* stream) {
  const int64_t losses = reduced_losses(problem), ctas = reduce_ctas(losses);
  const LossAndWeight* const sums = has_loss_sums(problem) ? static_cast<const LossAndWeight*>(problem.loss_sums) : nullptr;
  LossReduction reduction{.loss = sums != nullptr ? &sums->loss : static_cast<const float*>(problem.loss),
                          .weight = sums != nullptr ? &sums->weight : static_cast<const float*>(problem.row_weight),
                          .stride = sums != nullptr ? kPairStride : 1,
                          .rows = losses,
                          .rows_per_cta = ceil_div(losses, ctas),
                          .partial = ctas > 1 ? static_cast<LossAndWeight*>(workspace) : nullptr,
                          .dtype = problem.result_dtype,
                          .mean = mean,
                          .result = result,
                          .divisor = static_cast<float*>(divisor)};
  launch_dependent(reduce_kernel, reduction, static_cast<unsigned>(ctas), kReduceThreads, stream);
  if (ctas == 1) return;
  // A second launch of one CTA reduces the first launch's results.
  const LossAndWeight* partial = reduction.partial;
  reduction.loss = &partial->loss;
  reduction.weight = &partial->weight;
  reduction.stride = kPairStride;
  reduction.rows = reduction.rows_per_cta = ctas;
  reduction.partial = nullptr;
  launch_dependent(reduce_kernel, reduction, 1, kReduceThreads, stream);
}

}  // namespace flash_online::cuda
