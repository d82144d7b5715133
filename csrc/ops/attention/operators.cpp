// attention_forward, attention_inference, attention_inference_with_options, attention_training, attention_varlen_forward, those
// with the maximum logit, their backward passes and attention_dropout_mask, on the CPU and on CUDA.
#include "../operators.h"

#include "pass.h"

namespace flash_online::ops {
namespace {

const Tensor* pointer_to(const std::optional<Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

// forward() or forward_with_max_logit().
template <class Device, bool kMaxLogit, class Call>
auto forward_of(const Call& call) {
  if constexpr (kMaxLogit)
    return forward_with_max_logit<Device>(call);
  else
    return forward<Device>(call);
}

template <class Device, bool kMaxLogit>
auto attention_forward(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                       const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks,
                       const std::optional<Tensor>& rng, int64_t window_left, int64_t window_right, bool lower_right,
                       std::optional<double> scale, double softcap, double dropout_p, bool tf32,
                       std::optional<bool> /*deterministic*/, const std::optional<Tensor>& query_spans,
                       const std::optional<Tensor>& key_spans, const std::optional<Tensor>& tiles) {
  const AttentionInputs in{
      query, key, value, mask, alibi_slopes, sinks, rng, pointer_to(query_spans), pointer_to(key_spans), pointer_to(tiles)};
  return forward_of<Device, kMaxLogit>(
      DenseCall(in, {window_left, window_right, lower_right, scale, softcap, dropout_p, tf32}));
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& rng, const Tensor& out, const Tensor& lse, const Tensor& lse_low, int64_t window_left,
    int64_t window_right, bool lower_right, std::optional<double> scale, double softcap, double dropout_p, bool mask_grad,
    bool deterministic, bool tf32, const std::optional<Tensor>& query_spans, const std::optional<Tensor>& key_spans,
    const std::optional<Tensor>& tiles) {
  const AttentionInputs in{
      query, key, value, mask, alibi_slopes, sinks, rng, pointer_to(query_spans), pointer_to(key_spans), pointer_to(tiles)};
  const DenseCall call(in, {window_left, window_right, lower_right, scale, softcap, dropout_p, tf32});
  return backward<Device>(call, {grad_out, grad_lse, out, lse, &lse_low}, mask_grad, deterministic);
}

// A call without options but `causal` and `scale`.
AttentionInputs plain_inputs(const Tensor& query, const Tensor& key, const Tensor& value) {
  static const std::optional<Tensor> none;
  return {query, key, value, none, none, none, none};
}

AttentionOptions plain_options(bool causal, std::optional<double> scale, bool tf32) {
  return {.window_left = -1, .window_right = causal ? 0 : -1, .scale = scale, .tf32 = tf32};
}

template <class Device>
Tensor attention_inference(const Tensor& query, const Tensor& key, const Tensor& value, bool causal,
                           std::optional<double> scale, bool tf32) {
  const AttentionInputs in = plain_inputs(query, key, value);
  const DenseCall call(in, plain_options(causal, scale, tf32));
  Tensor out = empty_out<Device>(call);
  Device::run_forward(call, {.out = out});
  return out;
}

template <class Device>
std::tuple<Tensor, Tensor> attention_inference_with_options(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
    const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks, int64_t window_left, int64_t window_right,
    bool lower_right, std::optional<double> scale, double softcap, bool tf32, const std::optional<Tensor>& query_spans,
    const std::optional<Tensor>& key_spans, const std::optional<Tensor>& tiles, bool return_lse) {
  const std::optional<Tensor> rng;
  const AttentionInputs in{
      query, key, value, mask, alibi_slopes, sinks, rng, pointer_to(query_spans), pointer_to(key_spans), pointer_to(tiles)};
  const DenseCall call(in, {.window_left = window_left,
                            .window_right = window_right,
                            .lower_right = lower_right,
                            .scale = scale,
                            .softcap = softcap,
                            .tf32 = tf32});
  Tensor out = empty_out<Device>(call);
  Tensor lse = empty(return_lse ? call.lse_sizes() : std::vector<int64_t>{0}, accumulator_of(query.scalar_type()), query);
  Device::run_forward(call, {.out = out, .lse = return_lse ? &lse : nullptr});
  return {out, lse};
}

template <class Device>
std::tuple<Tensor, Tensor> attention_training(const Tensor& query, const Tensor& key, const Tensor& value, bool causal,
                                              std::optional<double> scale, bool tf32) {
  const AttentionInputs in = plain_inputs(query, key, value);
  const DenseCall call(in, plain_options(causal, scale, tf32));
  Tensor out = empty_out<Device>(call);
  Tensor stats = empty(call.stats_sizes(), accumulator_of(query.scalar_type()), query);
  Device::run_forward(call, {.out = out, .lse = &stats, .lse_low = &stats, .lse_low_begin = stats.numel() / 2});
  return {out, stats};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> attention_training_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                                               const Tensor& value, const Tensor& out, const Tensor& stats,
                                                               bool causal, std::optional<double> scale, bool deterministic,
                                                               bool tf32) {
  const AttentionInputs in = plain_inputs(query, key, value);
  const DenseCall call(in, plain_options(causal, scale, tf32));
  const ScalarType type = query.scalar_type();
  check_out(call, grad_out, out);
  check_device(stats, "stats", query, "query");
  check(sizes_of(stats) == call.stats_sizes() && stats.is_contiguous() && stats.scalar_type() == accumulator_of(type),
        "stats: expected the forward's, got ", shape_of(stats));
  const auto like = [&](const Tensor& tensor) { return empty_in_order(sizes_of(tensor), type, tensor); };
  const Tensor grad_query = like(query), grad_key = like(key), grad_value = like(value);
  Device::run_backward(call,
                       {.out = out,
                        .lse = &stats,
                        .lse_low = &stats,
                        .lse_low_begin = stats.numel() / 2,
                        .grad_out = &grad_out,
                        .grad_query = &grad_query,
                        .grad_key = &grad_key,
                        .grad_value = &grad_value},
                       deterministic);
  return {grad_query, grad_key, grad_value};
}

template <class Device, bool kMaxLogit>
auto attention_varlen_forward(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q,
                              const Tensor& cu_seqlens_k, const std::optional<Tensor>& alibi_slopes,
                              const std::optional<Tensor>& sinks, const std::optional<Tensor>& rng, int64_t max_seqlen_q,
                              int64_t max_seqlen_k, int64_t window_left, int64_t window_right, bool lower_right,
                              std::optional<double> scale, double softcap, double dropout_p, bool tf32,
                              std::optional<bool> /*deterministic*/, const std::optional<Tensor>& query_spans,
                              const std::optional<Tensor>& key_spans) {
  const std::optional<Tensor> mask;
  const AttentionInputs in{query, key, value, mask, alibi_slopes, sinks, rng, pointer_to(query_spans), pointer_to(key_spans)};
  return forward_of<Device, kMaxLogit>(PackedCall(in, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                                  {window_left, window_right, lower_right, scale, softcap, dropout_p, tf32}));
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_varlen_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const std::optional<Tensor>& alibi_slopes,
    const std::optional<Tensor>& sinks, const std::optional<Tensor>& rng, const Tensor& out, const Tensor& lse,
    const Tensor& lse_low, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t window_left, int64_t window_right,
    bool lower_right, std::optional<double> scale, double softcap, double dropout_p, bool deterministic, bool tf32,
    const std::optional<Tensor>& query_spans, const std::optional<Tensor>& key_spans) {
  const std::optional<Tensor> mask;
  const AttentionInputs in{query, key, value, mask, alibi_slopes, sinks, rng, pointer_to(query_spans), pointer_to(key_spans)};
  const PackedCall call(in, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                        {window_left, window_right, lower_right, scale, softcap, dropout_p, tf32});
  auto [grad_query, grad_key, grad_value, grad_mask, grad_sinks] =
      backward<Device>(call, {grad_out, grad_lse, out, lse, &lse_low}, /*mask_grad=*/false, deterministic);
  return {grad_query, grad_key, grad_value, grad_sinks};
}

template <class Device>
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
  Device::run_dropout_mask(problem, rng);
  return keep;
}

template <class Device, class Library>
void add_attention(Library& m) {
  implement(m, "attention_forward", TORCH_BOX((&attention_forward<Device, false>)));
  implement(m, "attention_forward_with_max_logit", TORCH_BOX((&attention_forward<Device, true>)));
  implement(m, "attention_inference", TORCH_BOX(&attention_inference<Device>));
  implement(m, "attention_inference_with_options", TORCH_BOX(&attention_inference_with_options<Device>));
  implement(m, "attention_training", TORCH_BOX(&attention_training<Device>));
  implement(m, "attention_training_backward", TORCH_BOX(&attention_training_backward<Device>));
  implement(m, "attention_backward", TORCH_BOX(&attention_backward<Device>));
  implement(m, "attention_varlen_forward", TORCH_BOX((&attention_varlen_forward<Device, false>)));
  implement(m, "attention_varlen_forward_with_max_logit", TORCH_BOX((&attention_varlen_forward<Device, true>)));
  implement(m, "attention_varlen_backward", TORCH_BOX(&attention_varlen_backward<Device>));
  implement(m, "attention_dropout_mask", TORCH_BOX(&attention_dropout_mask<Device>));
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) { flash_online::ops::add_attention<flash_online::ops::AttentionOnCpu>(m); }

STABLE_TORCH_LIBRARY_IMPL(flash_online, CUDA, m) {
  if constexpr (flash_online::ops::kBuiltWithCuda) flash_online::ops::add_attention<flash_online::ops::AttentionOnCuda>(m);
}
