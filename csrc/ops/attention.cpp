// attention_forward, attention_inference, attention_varlen_forward, their backward passes and dropout's mask, on the CPU and on
// CUDA.
#include "../cpu/kernels.h"
#include "attention_call.h"
#ifdef FLASH_ONLINE_CUDA
#include "../cuda/attention/attention.h"
#include "cuda_call.h"
#endif

namespace flash_online::ops {
namespace {

#ifdef FLASH_ONLINE_CUDA
void forward_on_cuda(const AttentionProblem& problem, const Tensor& like) {
  CudaCall call(like);
  void* const workspace = call.workspace(cuda::attention_forward_workspace(problem));
  cuda::attention_forward(problem, workspace, call.stream());
}
#endif

#ifdef FLASH_ONLINE_CUDA
// Gradients of more heads than a tensor has, and their sum into it.
class Partial {
 public:
  Partial(const Tensor& gradient, int64_t heads_dim, int64_t kv_grad_heads) : gradient_(gradient), heads_dim_(heads_dim) {
    std::vector<int64_t> sizes = sizes_of(gradient);
    if (sizes[heads_dim] == kv_grad_heads) return;
    sizes[heads_dim] = kv_grad_heads;
    partial_ = empty(sizes, gradient.scalar_type(), gradient);
  }
  const Tensor* tensor() const { return partial_ ? &*partial_ : &gradient_; }
  void sum() {
    if (!partial_) return;
    std::vector<int64_t> sizes = sizes_of(gradient_);
    sizes.insert(sizes.begin() + heads_dim_ + 1, partial_->size(heads_dim_) / std::max<int64_t>(sizes[heads_dim_], 1));
    const std::vector<int64_t> within{heads_dim_ + 1};
    torch::stable::copy_(gradient_, torch::stable::sum(torch::stable::view(*partial_, sizes), within));
  }

 private:
  Tensor gradient_;
  int64_t heads_dim_;
  std::optional<Tensor> partial_;
};

template <class Call>
void backward_on_cuda(const Call& call, Results results, bool deterministic) {
  const Tensor& like = call.inputs().query;
  AttentionProblem shape = call.shape();
  if (results.lse->numel() == 0 && (shape.key_heads == 0 || results.grad_key->size(call.dims().rows) == 0)) {
    for (const Tensor* sum_of_none : {results.grad_mask, results.grad_sinks})
      if (Tensor zero = sum_of_none ? *sum_of_none : like; sum_of_none) torch::stable::zero_(zero);
    return;
  }
  if (shape.heads > 0 && !shape.query_starts)
    shape.batch = results.lse->numel() / shape.heads / std::max<int64_t>(shape.queries, 1);
  CudaCall on_device(like);
  const int64_t kv_grad_heads = shape.heads > 0 ? cuda::attention_kv_grad_heads(shape) : 0;
  Partial keys(*results.grad_key, call.dims().heads, kv_grad_heads),
      values(*results.grad_value, call.dims().heads, kv_grad_heads);
  results.grad_key = keys.tensor();
  results.grad_value = values.tensor();
  call.for_each_problem(results, [&](const AttentionProblem& problem, AttentionGradients gradients) {
    gradients.kv_grad_heads = kv_grad_heads;
    void* const workspace = on_device.workspace(cuda::attention_backward_workspace(problem, gradients, deterministic));
    cuda::attention_backward(problem, gradients, deterministic, workspace, on_device.stream());
  });
  keys.sum();
  values.sum();
}
#endif

int64_t count_of(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count;
}

// For float64 on CUDA there is no kernel.
void check_cuda_dtype(const Tensor& query) {
  check(!query.is_cuda() || query.scalar_type() != ScalarType::Double,
        "query: dtype must be float16, bfloat16 or float32 on CUDA, got float64");
}

// The results' lse is there or not.
template <class Call>
void forward(const Call& call, const Results& results) {
  const Tensor& query = call.inputs().query;
  const cpu::AttentionKernels& kernels = cpu::kernels().attention;
  std::optional<CpuExecutor> executor;  // one for all problems, which differ in their pointers alone
  call.for_each_problem(results, [&](const AttentionProblem& problem, const AttentionGradients&) {
#ifdef FLASH_ONLINE_CUDA
    if (query.is_cuda()) return forward_on_cuda(problem, query);
#endif
    if (!executor) executor.emplace(count_of(call.lse_sizes()), kernels.forward_memory(problem), query);
    kernels.forward(problem, *executor);
  });
}

template <class Call>
Tensor empty_out(const Call& call) {
  const Tensor& query = call.inputs().query;
  check_cuda_dtype(query);
  return empty_in_order(call.out_sizes(), query.scalar_type(), query);
}

template <class Call>
std::tuple<Tensor, Tensor, Tensor> forward(const Call& call) {
  const Tensor& query = call.inputs().query;
  const ScalarType accumulator = accumulator_of(query.scalar_type());
  Tensor out = empty_out(call);
  Tensor lse = empty(call.lse_sizes(), accumulator, query), lse_low = empty(call.lse_sizes(), accumulator, query);
  forward(call, {.out = out, .lse = &lse, .lse_low = &lse_low});
  return {out, lse, lse_low};
}

template <class Call>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(const Call& call, const Tensor& grad_out,
                                                            const std::optional<Tensor>& grad_lse, const Tensor& out,
                                                            const Tensor& lse, const Tensor& lse_low, bool mask_grad,
                                                            [[maybe_unused]] bool deterministic) {
  const auto& [query, key, value, mask, alibi_slopes, sinks, rng] = call.inputs();
  const ScalarType type = query.scalar_type(), accumulator = accumulator_of(type);
  check_cuda_dtype(query);
  check(sizes_of(grad_out) == sizes_of(out) && grad_out.scalar_type() == type, "grad_out: expected out's shape ", shape_of(out),
        " and dtype, got ", shape_of(grad_out));
  check(sizes_of(out) == call.out_sizes() && out.scalar_type() == type, "out: expected the forward's, got ", shape_of(out));
  check(sizes_of(lse) == call.lse_sizes() && sizes_of(lse_low) == call.lse_sizes() && lse.is_contiguous() &&
            lse_low.is_contiguous() && lse.scalar_type() == accumulator && lse_low.scalar_type() == accumulator,
        "lse: expected the forward's, got ", shape_of(lse));
  std::optional<Tensor> lse_cotangent;
  if (grad_lse) {
    check(sizes_of(*grad_lse) == call.lse_sizes() && grad_lse->scalar_type() == accumulator, "grad_lse: expected lse's shape ",
          shape_of(lse), " and dtype, got ", shape_of(*grad_lse));
    lse_cotangent = torch::stable::contiguous(*grad_lse);
  }
  check(!mask_grad || (mask && mask->scalar_type() != ScalarType::Bool), "mask_grad: wanted, but there is no float mask");

  Tensor grad_query = empty_in_order(sizes_of(query), type, query);
  Tensor grad_key = empty_in_order(sizes_of(key), type, key);
  Tensor grad_value = empty_in_order(sizes_of(value), type, value);
  Tensor grad_mask = mask_grad ? empty_in_order(sizes_of(*mask), mask->scalar_type(), *mask) : empty({0}, type, query);
  const std::vector<int64_t> sink_sizes = call.sink_sizes();
  Tensor head_sinks = empty(sinks ? sink_sizes : std::vector<int64_t>{0}, accumulator, query);

  if (count_of(sink_sizes) == 0 && mask_grad)
    torch::stable::zero_(grad_mask);  // the one gradient with elements that no work item reaches
  Results results{.out = out,
                  .lse = &lse,
                  .lse_low = &lse_low,
                  .grad_out = &grad_out,
                  .grad_lse = lse_cotangent ? &*lse_cotangent : nullptr,
                  .grad_query = &grad_query,
                  .grad_key = &grad_key,
                  .grad_value = &grad_value,
                  .grad_mask = mask_grad ? &grad_mask : nullptr,
                  .grad_sinks = sinks ? &head_sinks : nullptr};
#ifdef FLASH_ONLINE_CUDA
  if (query.is_cuda()) {
    backward_on_cuda(call, results, deterministic);
  } else
#endif
  {
    const Tensor delta = empty(call.lse_sizes(), accumulator, query);
    results.delta = &delta;
    std::optional<Tensor> wide_delta;
    if (type == ScalarType::Float) results.wide_delta = &wide_delta.emplace(empty(call.lse_sizes(), ScalarType::Double, query));
    const cpu::AttentionKernels& kernels = cpu::kernels().attention;
    const int64_t tiles_at_most = std::max(lse.numel(), grad_mask.numel());
    std::optional<CpuExecutor> executor;
    call.for_each_problem(results, [&](const AttentionProblem& problem, const AttentionGradients& gradients) {
      if (!executor) executor.emplace(tiles_at_most, kernels.backward_memory(problem, gradients), query);
      kernels.backward(problem, gradients, *executor);
    });
  }
  if (!sinks) return {grad_query, grad_key, grad_value, grad_mask, head_sinks};
  std::vector<int64_t> sequences;
  for (size_t i = 0; i + 1 < sink_sizes.size(); ++i) sequences.push_back(static_cast<int64_t>(i));
  return {grad_query, grad_key, grad_value, grad_mask, torch::stable::sum(head_sinks, sequences)};
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                                     const std::optional<Tensor>& mask,
                                                     const std::optional<Tensor>& alibi_slopes,
                                                     const std::optional<Tensor>& sinks, const std::optional<Tensor>& rng,
                                                     int64_t window_left, int64_t window_right, bool lower_right, double scale,
                                                     double softcap, double dropout_p, bool tf32) {
  const Inputs in{query, key, value, mask, alibi_slopes, sinks, rng};
  return forward(DenseCall(in, {window_left, window_right, lower_right, scale, softcap, dropout_p, tf32}));
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& rng, const Tensor& out, const Tensor& lse, const Tensor& lse_low, int64_t window_left,
    int64_t window_right, bool lower_right, double scale, double softcap, double dropout_p, bool mask_grad, bool deterministic,
    bool tf32) {
  const Inputs in{query, key, value, mask, alibi_slopes, sinks, rng};
  const DenseCall call(in, {window_left, window_right, lower_right, scale, softcap, dropout_p, tf32});
  return backward(call, grad_out, grad_lse, out, lse, lse_low, mask_grad, deterministic);
}

Tensor attention_inference(const Tensor& query, const Tensor& key, const Tensor& value, bool causal, double scale, bool tf32) {
  const std::optional<Tensor> none;
  const Inputs in{query, key, value, none, none, none, none};
  const DenseCall call(in, {.window_left = -1, .window_right = causal ? 0 : -1, .scale = scale, .tf32 = tf32});
  Tensor out = empty_out(call);
  forward(call, {.out = out});
  return out;
}

std::tuple<Tensor, Tensor, Tensor> attention_varlen_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks, const std::optional<Tensor>& rng,
    int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t window_left, int64_t window_right, bool lower_right, double scale,
    double softcap, double dropout_p, bool tf32) {
  const std::optional<Tensor> mask;
  const Inputs in{query, key, value, mask, alibi_slopes, sinks, rng};
  return forward(PackedCall(in, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                            {window_left, window_right, lower_right, scale, softcap, dropout_p, tf32}));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_varlen_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const std::optional<Tensor>& alibi_slopes,
    const std::optional<Tensor>& sinks, const std::optional<Tensor>& rng, const Tensor& out, const Tensor& lse,
    const Tensor& lse_low, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t window_left, int64_t window_right,
    bool lower_right, double scale, double softcap, double dropout_p, bool deterministic, bool tf32) {
  const std::optional<Tensor> mask;
  const Inputs in{query, key, value, mask, alibi_slopes, sinks, rng};
  const PackedCall call(in, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                        {window_left, window_right, lower_right, scale, softcap, dropout_p, tf32});
  auto [grad_query, grad_key, grad_value, grad_mask, grad_sinks] =
      backward(call, grad_out, grad_lse, out, lse, lse_low, false, deterministic);
  return {grad_query, grad_key, grad_value, grad_sinks};
}

Tensor attention_dropout_mask(const Tensor& rng, int64_t batch_begin, int64_t batch, int64_t heads, int64_t query_begin,
                              int64_t queries, int64_t keys, double dropout_p) {
  check(rng.scalar_type() == ScalarType::Long && rng.numel() == 2 && rng.is_contiguous(), "rng: expected int64[2], got ",
        shape_of(rng));
  Tensor keep = empty({batch, heads, queries, keys}, ScalarType::Bool, rng);
  const DropoutProblem problem{.rng = rng.const_data_ptr<int64_t>(),
                               .batch_begin = batch_begin,
                               .batch = batch,
                               .heads = heads,
                               .query_begin = query_begin,
                               .queries = queries,
                               .keys = keys,
                               .dropout = dropout_p,
                               .keep = keep.mutable_data_ptr<bool>()};
#ifdef FLASH_ONLINE_CUDA
  if (rng.is_cuda()) {
    cuda::attention_dropout_mask(problem, CudaCall(rng).stream());
    return keep;
  }
#endif
  cpu::kernels().attention.dropout_mask(problem, CpuExecutor(batch * heads * queries, {}, rng));
  return keep;
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&flash_online::ops::attention_forward));
  m.impl("attention_inference", TORCH_BOX(&flash_online::ops::attention_inference));
  m.impl("attention_backward", TORCH_BOX(&flash_online::ops::attention_backward));
  m.impl("attention_varlen_forward", TORCH_BOX(&flash_online::ops::attention_varlen_forward));
  m.impl("attention_varlen_backward", TORCH_BOX(&flash_online::ops::attention_varlen_backward));
  m.impl("attention_dropout_mask", TORCH_BOX(&flash_online::ops::attention_dropout_mask));
}

#ifdef FLASH_ONLINE_CUDA
STABLE_TORCH_LIBRARY_IMPL(flash_online, CUDA, m) {
  m.impl("attention_forward", TORCH_BOX(&flash_online::ops::attention_forward));
  m.impl("attention_inference", TORCH_BOX(&flash_online::ops::attention_inference));
  m.impl("attention_backward", TORCH_BOX(&flash_online::ops::attention_backward));
  m.impl("attention_varlen_forward", TORCH_BOX(&flash_online::ops::attention_varlen_forward));
  m.impl("attention_varlen_backward", TORCH_BOX(&flash_online::ops::attention_varlen_backward));
  m.impl("attention_dropout_mask", TORCH_BOX(&flash_online::ops::attention_dropout_mask));
}
#endif
