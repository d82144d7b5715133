// The forward and backward pass of an attention call on a device, shared by our operators and torch's.
#pragma once

#include <limits>

#include "../../core/cache.h"
#include "../../cpu/kernels.h"
#include "../../cuda/attention/attention.h"
#include "../cuda_call.h"
#include "call.h"

namespace flash_online::ops {

inline int64_t count_of(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count;
}

// The view of a tensor of four dimensions.
template <class View>
void set_view(const Tensor& tensor, View& view) {
  view.data = tensor.data_ptr();
  for (int i = 0; i < 4; ++i) view.stride[i] = tensor.size(i) == 1 ? 0 : tensor.stride(i);
}

// Checks query [batch, heads, length, width] and key with as many or fewer heads, of one dtype.
inline void check_query_and_key(const Tensor& query, const Tensor& key) {
  check(query.dim() == 4, "query: expected [batch, heads, length, width], got ", shape_of(query));
  check(key.dim() == 4 && key.size(0) == query.size(0) && key.size(3) == query.size(3),
        "key: expected query's batch and width, got ", shape_of(key), " for ", shape_of(query));
  check(key.scalar_type() == query.scalar_type(), "key: expected query's dtype, ", NameOfDtype{query}, ", got ",
        NameOfDtype{key});
  const int64_t heads = query.size(1), key_heads = key.size(1);
  check(heads == 0 ? key_heads == 0 : key_heads > 0 && heads % key_heads == 0,
        "key: expected a number of heads that divides query's, ", heads, ", got ", key_heads);
}

// ---- Devices ---------------------------------------------------------------------------------------------------------------

struct AttentionOnCpu : Cpu {
  template <class Call>
  static void run_forward(const Call& call, const PassTensors& tensors) {
    const cpu::AttentionKernels& kernels = cpu::kernels().attention;
    std::optional<CpuExecutor> executor;  // one for all problems: they differ only in their pointers
    call.for_each_problem(tensors, [&](const AttentionProblem& problem, const AttentionGradients&) {
      const int64_t kv_splits = kernels.few_rows_kv_splits(problem), rows = count_of(call.lse_sizes());
      if (kv_splits > 0) {
        const AttentionProblem cached = as_cached(problem, kv_splits);
        if (!executor) executor.emplace(rows * kv_splits, kernels.cached_memory(cached), call.inputs().query);
        kernels.cached(cached, *executor);
      } else {
        if (!executor) executor.emplace(rows, kernels.forward_memory(problem), call.inputs().query);
        kernels.forward(problem, *executor);
      }
    });
  }

  template <class Call>
  static void run_backward(const Call& call, PassTensors tensors, bool /*deterministic*/) {
    const Tensor& query = call.inputs().query;
    const Tensor delta = empty(call.lse_sizes(), accumulator_of(query.scalar_type()), query);
    tensors.delta = &delta;
    std::optional<Tensor> wide_delta;
    if (query.scalar_type() == ScalarType::Float)
      tensors.wide_delta = &wide_delta.emplace(empty(call.lse_sizes(), ScalarType::Double, query));
    const cpu::AttentionKernels& kernels = cpu::kernels().attention;
    const int64_t max_tiles = std::max(count_of(call.lse_sizes()), tensors.grad_mask ? tensors.grad_mask->numel() : 0);
    std::optional<CpuExecutor> executor;
    call.for_each_problem(tensors, [&](const AttentionProblem& problem, const AttentionGradients& gradients) {
      if (!executor) executor.emplace(max_tiles, kernels.backward_memory(problem, gradients), query);
      kernels.backward(problem, gradients, *executor);
    });
  }

  static void run_dropout_mask(const DropoutProblem& problem, const Tensor& like) {
    cpu::kernels().attention.dropout_mask(problem, CpuExecutor(problem.batch * problem.heads * problem.queries, {}, like));
  }
};

// The tensor that a CUDA kernel writes dK or dV to: the gradient itself if it has kv_grad_heads heads, else a buffer of
// kv_grad_heads heads that sum_into_gradient() reduces to the gradient.
class KvGradient {
 public:
  KvGradient(const Tensor& gradient, int64_t heads_dim, int64_t kv_grad_heads) : gradient_(gradient), heads_dim_(heads_dim) {
    std::vector<int64_t> sizes = sizes_of(gradient);
    if (sizes[heads_dim] == kv_grad_heads) return;
    sizes[heads_dim] = kv_grad_heads;
    buffer_ = empty(sizes, gradient.scalar_type(), gradient);
  }
  const Tensor* written() const { return buffer_ ? &*buffer_ : &gradient_; }
  void sum_into_gradient() {
    if (!buffer_) return;
    std::vector<int64_t> sizes = sizes_of(gradient_);
    sizes.insert(sizes.begin() + heads_dim_ + 1, buffer_->size(heads_dim_) / std::max<int64_t>(sizes[heads_dim_], 1));
    const std::vector<int64_t> summed_dims{heads_dim_ + 1};
    torch::stable::copy_(gradient_, torch::stable::sum(torch::stable::view(*buffer_, sizes), summed_dims));
  }

 private:
  Tensor gradient_;
  int64_t heads_dim_;
  std::optional<Tensor> buffer_;
};

struct AttentionOnCuda : Cuda {
  template <class Call>
  static void run_forward(const Call& call, const PassTensors& tensors) {
    CudaCall on_cuda(call.inputs().query);
    call.for_each_problem(tensors, [&](const AttentionProblem& problem, const AttentionGradients&) {
      const cuda::Plan<cuda::ForwardPass> plan = cuda::plan_forward(problem);
      plan.run(on_cuda.workspace(plan.workspace_bytes), on_cuda.stream());
    });
  }

  template <class Call>
  static void run_backward(const Call& call, PassTensors tensors, bool deterministic) {
    const Tensor& like = call.inputs().query;
    AttentionProblem whole = call.problem();  // as if all batch dimensions were one
    const int64_t rows = count_of(call.lse_sizes());
    if (rows == 0 && (whole.key_heads == 0 || tensors.grad_key->size(call.dims().rows) == 0)) {
      // There is nothing to launch: no query, and no key with a gradient that a kernel would set to 0.
      for (const Tensor* empty_sum : {tensors.grad_mask, tensors.grad_sinks})
        if (Tensor zero = empty_sum ? *empty_sum : like; empty_sum) torch::stable::zero_(zero);
      return;
    }
    if (whole.heads > 0 && !whole.query_starts) whole.batch = rows / whole.heads / std::max<int64_t>(whole.queries, 1);
    CudaCall on_cuda(like);
    const int64_t kv_grad_heads = whole.heads > 0 ? cuda::attention_kv_grad_heads(whole, deterministic) : 0;
    KvGradient grad_key(*tensors.grad_key, call.dims().heads, kv_grad_heads),
        grad_value(*tensors.grad_value, call.dims().heads, kv_grad_heads);
    tensors.grad_key = grad_key.written();
    tensors.grad_value = grad_value.written();
    call.for_each_problem(tensors, [&](const AttentionProblem& problem, AttentionGradients gradients) {
      gradients.kv_grad_heads = kv_grad_heads;
      const cuda::Plan<cuda::BackwardPass> plan = cuda::plan_backward(problem, gradients, deterministic);
      plan.run(on_cuda.workspace(plan.workspace_bytes), on_cuda.stream());
    });
    grad_key.sum_into_gradient();
    grad_value.sum_into_gradient();
  }

  static void run_dropout_mask(const DropoutProblem& problem, const Tensor& like) {
    cuda::attention_dropout_mask(problem, CudaCall(like).stream());
  }
};

// ---- Forward pass ----------------------------------------------------------------------------------------------------------

template <class Device, class Call>
Tensor empty_out(const Call& call) {
  const Tensor& query = call.inputs().query;
  check_floating(query, "query");
  return empty_in_order(call.out_sizes(), query.scalar_type(), query);
}

// `max_logit`: raised to the heads' largest scores; null: not wanted.
template <class Device, class Call>
std::tuple<Tensor, Tensor, Tensor> forward(const Call& call, const Tensor* max_logit = nullptr) {
  const Tensor& query = call.inputs().query;
  const ScalarType accumulator = accumulator_of(query.scalar_type());
  Tensor out = empty_out<Device>(call);
  Tensor lse = empty(call.lse_sizes(), accumulator, query), lse_low = empty(call.lse_sizes(), accumulator, query);
  Device::run_forward(call, {.out = out, .lse = &lse, .lse_low = &lse_low, .max_logit = max_logit});
  return {out, lse, lse_low};
}

// forward() and the maximum logit of each head.
template <class Device, class Call>
std::tuple<Tensor, Tensor, Tensor, Tensor> forward_with_max_logit(const Call& call) {
  const Tensor& query = call.inputs().query;
  Tensor max_logit = empty(call.sink_sizes(), ScalarType::Float, query);
  torch::stable::fill_(max_logit, -std::numeric_limits<double>::infinity());
  auto [out, lse, lse_low] = forward<Device>(call, &max_logit);
  return {out, lse, lse_low, max_logit};
}

// ---- Backward pass ---------------------------------------------------------------------------------------------------------

// The tensors that the backward pass reads in addition to the inputs: gradients of the results, and the forward pass's results.
struct BackwardInputs {
  const Tensor& grad_out;
  const std::optional<Tensor>& grad_lse;
  const Tensor &out, &lse;
  const Tensor* lse_low;  // null, only on CUDA: zeros
};

template <class Call>
void check_out(const Call& call, const Tensor& grad_out, const Tensor& out) {
  const Tensor& query = call.inputs().query;
  const ScalarType type = query.scalar_type();
  check_device(grad_out, "grad_out", query, "query");
  check_device(out, "out", query, "query");
  const std::vector<int64_t> sizes = sizes_of(out);
  check(sizes_of(grad_out) == sizes && grad_out.scalar_type() == type, "grad_out: expected out's shape ", shape_of(out),
        " and dtype, got ", shape_of(grad_out));
  check(sizes == call.out_sizes() && out.scalar_type() == type, "out: expected the forward's, got ", shape_of(out));
}

template <class Device, class Call>
void check_backward(const Call& call, const BackwardInputs& in, bool mask_grad) {
  const auto& [grad_out, grad_lse, out, lse, lse_low] = in;
  const Tensor& query = call.inputs().query;
  const std::optional<Tensor>& mask = call.inputs().mask;
  const ScalarType accumulator = accumulator_of(query.scalar_type());
  check_out(call, grad_out, out);
  check_device(grad_lse, "grad_lse", query, "query");
  check_device(lse, "lse", query, "query");
  if (lse_low) check_device(*lse_low, "lse_low", query, "query");
  for (const Tensor* given : {&lse, lse_low})
    check(!given || (sizes_of(*given) == call.lse_sizes() && given->is_contiguous() && given->scalar_type() == accumulator),
          "lse: expected the forward's, got ", shape_of(given ? *given : lse));
  if (grad_lse)
    check(sizes_of(*grad_lse) == call.lse_sizes() && grad_lse->scalar_type() == accumulator, "grad_lse: expected lse's shape ",
          shape_of(lse), " and dtype, got ", shape_of(*grad_lse));
  check(!mask_grad || (mask && mask->scalar_type() != ScalarType::Bool),
        "mask_grad: expected False without a float mask, got True");
}

// The gradients of query, key, value, mask and sinks.
template <class Device, class Call>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Call& call, const BackwardInputs& in, bool mask_grad,
                                                            bool deterministic) {
  check_backward<Device>(call, in, mask_grad);
  const auto& [query, key, value, mask, alibi_slopes, sinks, rng, query_spans, key_spans, tiles] = call.inputs();
  const ScalarType type = query.scalar_type(), accumulator = accumulator_of(type);
  std::optional<Tensor> grad_lse;
  if (in.grad_lse) grad_lse = as_contiguous(*in.grad_lse);

  Tensor grad_query = empty_in_order(sizes_of(query), type, query);
  Tensor grad_key = empty_in_order(sizes_of(key), type, key);
  Tensor grad_value = empty_in_order(sizes_of(value), type, value);
  Tensor grad_mask = mask_grad ? empty_in_order(sizes_of(*mask), mask->scalar_type(), *mask) : empty({0}, type, query);
  const std::vector<int64_t> sink_sizes = call.sink_sizes();
  Tensor sequence_grad_sinks = empty(sinks ? sink_sizes : std::vector<int64_t>{0}, accumulator, query);
  if (count_of(sink_sizes) == 0 && mask_grad)
    torch::stable::zero_(grad_mask);  // the only gradient that can have elements which no problem of the call reaches

  const PassTensors tensors{.out = in.out,
                            .lse = &in.lse,
                            .lse_low = in.lse_low,
                            .grad_out = &in.grad_out,
                            .grad_lse = grad_lse ? &*grad_lse : nullptr,
                            .grad_query = &grad_query,
                            .grad_key = &grad_key,
                            .grad_value = &grad_value,
                            .grad_mask = mask_grad ? &grad_mask : nullptr,
                            .grad_sinks = sinks ? &sequence_grad_sinks : nullptr};
  Device::run_backward(call, tensors, deterministic);
  if (!sinks) return {grad_query, grad_key, grad_value, grad_mask, sequence_grad_sinks};
  std::vector<int64_t> sequence_dims;
  for (size_t i = 0; i + 1 < sink_sizes.size(); ++i) sequence_dims.push_back(static_cast<int64_t>(i));
  return {grad_query, grad_key, grad_value, grad_mask, torch::stable::sum(sequence_grad_sinks, sequence_dims)};
}

}  // namespace flash_online::ops
