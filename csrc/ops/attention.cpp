// attention_forward, attention_varlen_forward, their backward passes and dropout's mask on the CPU.
#include "../cpu/kernels.h"
#include "attention_call.h"

namespace flash_online::ops {
namespace {

template <class Call>
std::tuple<Tensor, Tensor, Tensor> forward_cpu(const Call& call) {
  const Tensor& query = call.inputs().query;
  const ScalarType accumulator = accumulator_of(query.scalar_type());
  Tensor out = empty_in_order(call.out_sizes(), query.scalar_type(), query);
  Tensor lse = empty(call.lse_sizes(), accumulator, query), lse_low = empty(call.lse_sizes(), accumulator, query);
  const cpu::AttentionKernels& kernels = cpu::kernels().attention;
  std::optional<CpuExecutor> executor;  // one for all problems, which differ in their pointers alone
  call.for_each_problem({out, lse, lse_low}, [&](const AttentionProblem& problem, const AttentionGradients&) {
    if (!executor) executor.emplace(lse.numel(), kernels.forward_memory(problem), query);
    kernels.forward(problem, *executor);
  });
  return {out, lse, lse_low};
}

template <class Call>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward_cpu(const Call& call, const Tensor& grad_out,
                                                                const std::optional<Tensor>& grad_lse, const Tensor& out,
                                                                const Tensor& lse, const Tensor& lse_low, bool mask_grad) {
  const auto& [query, key, value, mask, alibi_slopes, sinks, rng] = call.inputs();
  const ScalarType type = query.scalar_type(), accumulator = accumulator_of(type);
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

  const Tensor delta = empty(call.lse_sizes(), accumulator, query);
  std::optional<Tensor> wide_delta;
  if (type == ScalarType::Float) wide_delta = empty(call.lse_sizes(), ScalarType::Double, query);
  int64_t planes = 1;
  for (const int64_t size : sink_sizes) planes *= size;
  if (planes == 0 && mask_grad) torch::stable::zero_(grad_mask);  // the one gradient with elements that no work item reaches
  const cpu::AttentionKernels& kernels = cpu::kernels().attention;
  const int64_t tiles_at_most = std::max(lse.numel(), grad_mask.numel());
  std::optional<CpuExecutor> executor;
  call.for_each_problem({.out = out,
                         .lse = lse,
                         .lse_low = lse_low,
                         .grad_out = &grad_out,
                         .grad_lse = lse_cotangent ? &*lse_cotangent : nullptr,
                         .grad_query = &grad_query,
                         .grad_key = &grad_key,
                         .grad_value = &grad_value,
                         .grad_mask = mask_grad ? &grad_mask : nullptr,
                         .grad_sinks = sinks ? &head_sinks : nullptr,
                         .delta = &delta,
                         .wide_delta = wide_delta ? &*wide_delta : nullptr},
                        [&](const AttentionProblem& problem, const AttentionGradients& gradients) {
                          if (!executor) executor.emplace(tiles_at_most, kernels.backward_memory(problem, gradients), query);
                          kernels.backward(problem, gradients, *executor);
                        });
  if (!sinks) return {grad_query, grad_key, grad_value, grad_mask, head_sinks};
  std::vector<int64_t> sequences;
  for (size_t i = 0; i + 1 < sink_sizes.size(); ++i) sequences.push_back(static_cast<int64_t>(i));
  return {grad_query, grad_key, grad_value, grad_mask, torch::stable::sum(head_sinks, sequences)};
}

std::tuple<Tensor, Tensor, Tensor> attention_forward_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                                         const std::optional<Tensor>& mask,
                                                         const std::optional<Tensor>& alibi_slopes,
                                                         const std::optional<Tensor>& sinks, const std::optional<Tensor>& rng,
                                                         int64_t window_left, int64_t window_right, bool lower_right,
                                                         double scale, double softcap, double dropout_p) {
  const Inputs in{query, key, value, mask, alibi_slopes, sinks, rng};
  return forward_cpu(DenseCall(in, {window_left, window_right, lower_right, scale, softcap, dropout_p}));
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward_cpu(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& rng, const Tensor& out, const Tensor& lse, const Tensor& lse_low, int64_t window_left,
    int64_t window_right, bool lower_right, double scale, double softcap, double dropout_p, bool mask_grad,
    bool /*deterministic: every CPU kernel is*/) {
  const Inputs in{query, key, value, mask, alibi_slopes, sinks, rng};
  const DenseCall call(in, {window_left, window_right, lower_right, scale, softcap, dropout_p});
  return backward_cpu(call, grad_out, grad_lse, out, lse, lse_low, mask_grad);
}

std::tuple<Tensor, Tensor, Tensor> attention_varlen_forward_cpu(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks, const std::optional<Tensor>& rng,
    int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t window_left, int64_t window_right, bool lower_right, double scale,
    double softcap, double dropout_p) {
  const std::optional<Tensor> mask;
  const Inputs in{query, key, value, mask, alibi_slopes, sinks, rng};
  return forward_cpu(PackedCall(in, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                {window_left, window_right, lower_right, scale, softcap, dropout_p}));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_varlen_backward_cpu(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const std::optional<Tensor>& alibi_slopes,
    const std::optional<Tensor>& sinks, const std::optional<Tensor>& rng, const Tensor& out, const Tensor& lse,
    const Tensor& lse_low, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t window_left, int64_t window_right,
    bool lower_right, double scale, double softcap, double dropout_p, bool /*deterministic: every CPU kernel is*/) {
  const std::optional<Tensor> mask;
  const Inputs in{query, key, value, mask, alibi_slopes, sinks, rng};
  const PackedCall call(in, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                        {window_left, window_right, lower_right, scale, softcap, dropout_p});
  auto [grad_query, grad_key, grad_value, grad_mask, grad_sinks] =
      backward_cpu(call, grad_out, grad_lse, out, lse, lse_low, false);
  return {grad_query, grad_key, grad_value, grad_sinks};
}

Tensor attention_dropout_mask_cpu(const Tensor& rng, int64_t batch_begin, int64_t batch, int64_t heads, int64_t query_begin,
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
  cpu::kernels().attention.dropout_mask(problem, CpuExecutor(batch * heads * queries, {}, rng));
  return keep;
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&flash_online::ops::attention_forward_cpu));
  m.impl("attention_backward", TORCH_BOX(&flash_online::ops::attention_backward_cpu));
  m.impl("attention_varlen_forward", TORCH_BOX(&flash_online::ops::attention_varlen_forward_cpu));
  m.impl("attention_varlen_backward", TORCH_BOX(&flash_online::ops::attention_varlen_backward_cpu));
  m.impl("attention_dropout_mask", TORCH_BOX(&flash_online::ops::attention_dropout_mask_cpu));
}
