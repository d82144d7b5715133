// torch's own flash attention operators, aten::_scaled_dot_product_flash_attention and its relatives, run by our kernels on
// CUDA while torch_sdpa_register has them active. torch's autograd, its fake tensors and everything built on these operators
// stay as they are. The public API is flash_online/integrations/torch_sdpa.py.
//
// Properties of torch's kernels that a caller may rely on: the causal triangle and windows are aligned at the lower right; lse
// is float32, [batch, heads, queries] or, packed, [heads, total queries]; results and gradients have the strides of empty_like;
// rng_state is uint64[2] and `unused` uint64[]. Our rng_state holds the (seed, offset) of our own dropout. A query that sees no
// key has lse -inf, which marks an empty partial for a merge of partial results. The backward pass may get out and lse of more
// keys than it is given: torch's ring of context_parallel calls it once per shard of the keys with the merged out and lse.
#include <dlfcn.h>

#include <array>
#include <limits>
#include <memory>

#include "cached.h"
#include "pass.h"

namespace flash_online::ops {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::StableLibrary;
using torch::stable::detail::to;

// ---- torch operators that the stable ABI has no function for ---------------------------------------------------------------

template <class... Arguments>
Tensor call_torch(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{from(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return to<Tensor>(stack[0]);
}

Tensor view_as_dtype(const Tensor& tensor, ScalarType type) { return call_torch("aten::view", "dtype", tensor, type); }

// The (seed, offset) of dropout: one draw per call from torch's default generator, as draw_rng in flash_online/attention.py.
Tensor draw_rng(const Tensor& like) {
  using Limits = std::numeric_limits<int64_t>;
  return call_torch("aten::random_", "from", empty({2}, ScalarType::Long, like), Limits::min(),
                    std::optional<int64_t>(Limits::max()), std::optional<int64_t>());
}

Tensor undefined() {
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_uninitialized_tensor(&handle));
  return Tensor(handle);
}

// torch.are_deterministic_algorithms_enabled(). The stable ABI has no function for it, so libtorch's own are looked up by name.
// If this torch does not have them, every backward pass is deterministic: slower, never wrong.
bool deterministic_algorithms() {
  using Context = const void* (*)();
  using Getter = bool (*)(const void* context);
  static const auto symbol = [](const char* name) { return dlsym(RTLD_DEFAULT, name); };
  static const auto context = reinterpret_cast<Context>(symbol("_ZN2at13globalContextEv"));
  static const auto get = reinterpret_cast<Getter>(symbol("_ZNK2at7Context23deterministicAlgorithmsEv"));
  return !context || !get || get(context());
}

// ---- calls -----------------------------------------------------------------------------------------------------------------

struct FlashOptions {
  double dropout_p;
  bool causal;
  std::optional<double> scale;
  std::optional<int64_t> window_left = std::nullopt, window_right = std::nullopt;
};

AttentionOptions options_of(const FlashOptions& options) {
  return {.window_left = options.window_left.value_or(-1),
          .window_right = options.causal ? 0 : options.window_right.value_or(-1),
          .lower_right = true,
          .scale = options.scale,
          .dropout_p = options.dropout_p};
}

// Packed sequences, if cu_seqlens_q is given.
struct Packing {
  std::optional<Tensor> cu_seqlens_q, cu_seqlens_k;
  int64_t max_q = 0, max_k = 0;
};

// Calls run(call) with the DenseCall or PackedCall. Dense tensors are [batch, heads, length, head_dim].
template <class Run>
auto with_call(const AttentionInputs& in, const FlashOptions& options, const Packing& packing, const Run& run) {
  const AttentionOptions ours = options_of(options);
  if (!packing.cu_seqlens_q) return run(DenseCall(in, ours));
  check(packing.cu_seqlens_k.has_value(), "cum_seq_k: expected a tensor with cum_seq_q, got none");
  return run(PackedCall(in, *packing.cu_seqlens_q, *packing.cu_seqlens_k, packing.max_q, packing.max_k, ours));
}

struct ForwardResults {
  Tensor out, lse, rng_state;
};

// `out`: the tensor for the output, if it exists already.
ForwardResults run_forward(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& slopes,
                           const FlashOptions& options, const Packing& packing, std::optional<Tensor> out = std::nullopt) {
  const std::optional<Tensor> none;
  std::optional<Tensor> rng;
  if (options.dropout_p > 0) rng = draw_rng(query);
  const AttentionInputs in{query, key, value, none, slopes, none, rng};
  return with_call(in, options, packing, [&](const auto& call) -> ForwardResults {
    if (!out) out = empty_out<AttentionOnCuda>(call);
    Tensor lse = empty(call.lse_sizes(), ScalarType::Float, query);
    AttentionOnCuda::run_forward(call, {.out = *out, .lse = &lse});
    return {*out, lse, rng ? view_as_dtype(*rng, ScalarType::UInt64) : empty({2}, ScalarType::UInt64, query)};
  });
}

std::array<Tensor, 3> run_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
                                   const Tensor& out, const Tensor& lse, const Tensor& rng_state, const FlashOptions& options,
                                   const Packing& packing) {
  const std::optional<Tensor> none;
  std::optional<Tensor> rng;
  if (options.dropout_p > 0) rng = view_as_dtype(rng_state, ScalarType::Long);
  const AttentionInputs in{query, key, value, none, none, none, rng};
  const Tensor whole_lse = as_contiguous(lse);
  return with_call(in, options, packing, [&](const auto& call) -> std::array<Tensor, 3> {
    auto [grad_query, grad_key, grad_value, grad_mask, grad_sinks] =
        backward<AttentionOnCuda>(call, {grad_out, none, out, whole_lse, nullptr}, false, deterministic_algorithms());
    return {grad_query, grad_key, grad_value};
  });
}

// ---- torch's operators, boxed: their number of arguments depends on torch's version -----------------------------------------

// Takes an argument off the stack, which must be done once for each.
template <class T>
T take(StableIValue& argument) {
  return to<T>(argument);
}
bool is_given(StableIValue optional) { return optional != from(std::nullopt); }

// Calls torch's own kernel, which torch_sdpa.py has kept under this name, for features that ours lack.
void call_kept(const char* name, StableIValue* stack) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION));
}

template <size_t kCount>
void put(StableIValue* stack, uint64_t outputs, const std::array<StableIValue, kCount>& results) {
  check(outputs == kCount, "torch_sdpa: expected ", kCount, " results of an operator, got ", outputs, " in this torch");
  std::copy(results.begin(), results.end(), stack);
}

Tensor with_heads_first(const Tensor& tensor) { return torch::stable::transpose(tensor, 1, 2); }

// (query, key, value, dropout_p, is_causal, return_debug_mask, *, scale) -> (output, logsumexp, cum_seq_q, cum_seq_k, max_q,
// max_k, rng_state, unused, debug_attn_mask); tensors are [batch, heads, length, head_dim].
void scaled_dot_product_flash_attention(StableIValue* stack, uint64_t /*inputs*/, uint64_t outputs) {
  enum { kQuery, kKey, kValue, kDropout, kCausal, kDebugMask, kScale };
  const Tensor query = take<Tensor>(stack[kQuery]), key = take<Tensor>(stack[kKey]);
  std::array<StableIValue, 5> tensors;  // output, logsumexp, rng_state, unused, debug_attn_mask
  if (to<bool>(stack[kDebugMask])) {
    stack[kQuery] = from(query);
    stack[kKey] = from(key);
    call_kept("flash_online::kept_scaled_dot_product_flash_attention", stack);
    std::copy_n(stack, tensors.size(), tensors.begin());
  } else {
    const Tensor value = take<Tensor>(stack[kValue]);
    const FlashOptions options{.dropout_p = take<double>(stack[kDropout]),
                               .causal = take<bool>(stack[kCausal]),
                               .scale = take<std::optional<double>>(stack[kScale])};
    const ForwardResults results = run_forward(query, key, value, std::nullopt, options, {});
    tensors = {from(results.out), from(results.lse), from(results.rng_state), from(empty({}, ScalarType::UInt64, query)),
               from(empty({0}, query.scalar_type(), query))};
  }
  put(stack, outputs,
      std::array{tensors[0], tensors[1], from(undefined()), from(undefined()), from(query.size(2)), from(key.size(2)),
                 tensors[2], tensors[3], tensors[4]});
}

// (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
// philox_offset, *, scale) -> (grad_query, grad_key, grad_value)
void scaled_dot_product_flash_attention_backward(StableIValue* stack, uint64_t /*inputs*/, uint64_t outputs) {
  enum {
    kGradOut,
    kQuery,
    kKey,
    kValue,
    kOut,
    kLse,
    kStartsQ,
    kStartsK,
    kMaxQ,
    kMaxK,
    kDropout,
    kCausal,
    kSeed,
    kOffset,
    kScale
  };
  std::array<Tensor, kLse + 1> in;
  for (int i = kGradOut; i <= kLse; ++i) in[i] = take<Tensor>(stack[i]);
  const Tensor starts_q = take<Tensor>(stack[kStartsQ]), starts_k = take<Tensor>(stack[kStartsK]);
  const Tensor seed = take<Tensor>(stack[kSeed]), offset = take<Tensor>(stack[kOffset]);
  const FlashOptions options{.dropout_p = take<double>(stack[kDropout]),
                             .causal = take<bool>(stack[kCausal]),
                             .scale = take<std::optional<double>>(stack[kScale])};
  const auto grads = run_backward(in[kGradOut], in[kQuery], in[kKey], in[kValue], in[kOut], in[kLse], seed, options, {});
  put(stack, outputs, std::array{from(grads[0]), from(grads[1]), from(grads[2])});
}

// The arguments that _flash_attention_forward and _flash_attention_forward_no_dropout_inplace share: (query, key, value,
// cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale, window_size_left, window_size_right,
// seqused_k, alibi_slopes) and, from torch 2.12 on, block_table and num_splits. Tensors are [batch, length, heads, head_dim]
// or, with cum_seq_q, [total, heads, head_dim].
enum {
  kQuery,
  kKey,
  kValue,
  kStartsQ,
  kStartsK,
  kMaxQ,
  kMaxK,
  kDropout,
  kCausal,
  kDebugMask,
  kScale,
  kWindowLeft,
  kWindowRight,
  kUsedK,
  kSlopes,
  kBlockTable,
  kNumSplits
};

bool has_pages(const StableIValue* stack, uint64_t inputs) {
  return inputs > kNumSplits && is_given(stack[kBlockTable]) && is_given(stack[kUsedK]) && is_given(stack[kStartsQ]) &&
         to<double>(stack[kDropout]) == 0;
}
bool needs_kept(const StableIValue* stack, uint64_t inputs) {
  const bool is_cached = is_given(stack[kUsedK]) || (inputs > kBlockTable && is_given(stack[kBlockTable]));
  return to<bool>(stack[kDebugMask]) || (is_cached && !has_pages(stack, inputs));
}

// Returns slopes per sequence and head, for any shape that they have.
std::optional<Tensor> slopes_of(const std::optional<Tensor>& slopes, int64_t sequences) {
  if (!slopes || slopes->dim() != 1) return slopes;
  return call_torch("aten::expand", "", *slopes, std::vector<int64_t>{sequences, slopes->size(0)}, false);
}

// Packed queries over pages: key and value are [pages, rows, heads, head_dim], and seqused_k says how many keys each sequence
// has.
ForwardResults run_paged(StableIValue* stack, std::optional<Tensor> out) {
  const Tensor query = take<Tensor>(stack[kQuery]), keys = with_heads_first(take<Tensor>(stack[kKey])),
               values = with_heads_first(take<Tensor>(stack[kValue]));
  const std::optional<Tensor> none,
      starts = take<std::optional<Tensor>>(stack[kStartsQ]), unused_starts = take<std::optional<Tensor>>(stack[kStartsK]),
      lengths = take<std::optional<Tensor>>(stack[kUsedK]), table = take<std::optional<Tensor>>(stack[kBlockTable]),
      slopes = slopes_of(take<std::optional<Tensor>>(stack[kSlopes]), starts->size(0) - 1);
  const FlashOptions options{.dropout_p = 0,
                             .causal = take<bool>(stack[kCausal]),
                             .scale = take<std::optional<double>>(stack[kScale]),
                             .window_left = take<std::optional<int64_t>>(stack[kWindowLeft]),
                             .window_right = take<std::optional<int64_t>>(stack[kWindowRight])};
  const AttentionOptions ours = options_of(options);
  const CachedInputs in{query, keys, values, lengths, none, none, table, starts, none, none, slopes, none, none, none};
  const CachedOptions cached{.new_keys = 0,
                             .max_queries = take<int64_t>(stack[kMaxQ]),
                             .window_left = ours.window_left,
                             .window_right = ours.window_right,
                             .lower_right = true,
                             .scale = ours.scale,
                             .softcap = 0,
                             .splits = take<std::optional<int64_t>>(stack[kNumSplits]).value_or(0)};
  check_cached<Cuda>(in, cached);
  if (!out) out = empty_in_order(cached_out_sizes(in), query.scalar_type(), query);
  const Tensor lse = empty(cached_lse_sizes(in), ScalarType::Float, query);
  const AttentionProblem problem = cached_problem<Cuda>(in, cached, *out, &lse);
  if (problem.heads > 0) {
    CudaCall call(query);
    const cuda::Plan<cuda::ForwardPass> plan = cuda::plan_cached(problem);
    plan.run(call.workspace(plan.workspace_bytes), call.stream());
  }
  return {*out, lse, empty({2}, ScalarType::UInt64, query)};
}

ForwardResults run_flash_attention_forward(StableIValue* stack, uint64_t inputs, std::optional<Tensor> out) {
  if (has_pages(stack, inputs)) return run_paged(stack, out);
  Tensor query = take<Tensor>(stack[kQuery]), key = take<Tensor>(stack[kKey]), value = take<Tensor>(stack[kValue]);
  const Packing packing{.cu_seqlens_q = take<std::optional<Tensor>>(stack[kStartsQ]),
                        .cu_seqlens_k = take<std::optional<Tensor>>(stack[kStartsK]),
                        .max_q = take<int64_t>(stack[kMaxQ]),
                        .max_k = take<int64_t>(stack[kMaxK])};
  const FlashOptions options{.dropout_p = take<double>(stack[kDropout]),
                             .causal = take<bool>(stack[kCausal]),
                             .scale = take<std::optional<double>>(stack[kScale]),
                             .window_left = take<std::optional<int64_t>>(stack[kWindowLeft]),
                             .window_right = take<std::optional<int64_t>>(stack[kWindowRight])};
  if (inputs > kNumSplits)
    take<std::optional<int64_t>>(stack[kNumSplits]);  // keys are never cut into kv_splits here: no result depends on it
  const bool dense = !packing.cu_seqlens_q;
  const std::optional<Tensor> slopes =
      slopes_of(take<std::optional<Tensor>>(stack[kSlopes]), dense ? query.size(0) : packing.cu_seqlens_q->size(0) - 1);
  if (dense)
    for (Tensor* tensor : {&query, &key, &value, out ? &*out : nullptr})
      if (tensor) *tensor = with_heads_first(*tensor);
  ForwardResults results = run_forward(query, key, value, slopes, options, packing, out);
  if (dense) results.out = with_heads_first(results.out);
  return results;
}

// -> (output, softmax_logsumexp, rng_state, unused, debug_attn_mask)
void flash_attention_forward(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  if (needs_kept(stack, inputs)) return call_kept("flash_online::kept_flash_attention_forward", stack);
  const ForwardResults results = run_flash_attention_forward(stack, inputs, std::nullopt);
  put(stack, outputs,
      std::array{from(results.out), from(results.lse), from(results.rng_state),
                 from(empty({}, ScalarType::UInt64, results.out)), from(empty({0}, results.out.scalar_type(), results.out))});
}

// (out!, the arguments above) -> softmax_logsumexp
void flash_attention_forward_inplace(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  if (needs_kept(stack + 1, inputs - 1))
    return call_kept("flash_online::kept_flash_attention_forward_no_dropout_inplace", stack);
  const Tensor out = take<Tensor>(stack[0]);
  put(stack, outputs, std::array{from(run_flash_attention_forward(stack + 1, inputs - 1, out).lse)});
}

// (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
// scale, window_size_left, window_size_right) -> (grad_query, grad_key, grad_value)
void flash_attention_backward(StableIValue* stack, uint64_t /*inputs*/, uint64_t outputs) {
  enum {
    kGradOut,
    kQuery,
    kKey,
    kValue,
    kOut,
    kLse,
    kStartsQ,
    kStartsK,
    kMaxQ,
    kMaxK,
    kDropout,
    kCausal,
    kRng,
    kUnused,
    kScale,
    kWindowLeft,
    kWindowRight
  };
  std::array<Tensor, kOut + 1> in;
  for (int i = kGradOut; i <= kOut; ++i) in[i] = take<Tensor>(stack[i]);
  const Tensor lse = take<Tensor>(stack[kLse]), starts_q = take<Tensor>(stack[kStartsQ]),
               starts_k = take<Tensor>(stack[kStartsK]), rng_state = take<Tensor>(stack[kRng]),
               unused = take<Tensor>(stack[kUnused]);
  Packing packing;
  if (starts_q.defined()) packing = {starts_q, starts_k, take<int64_t>(stack[kMaxQ]), take<int64_t>(stack[kMaxK])};
  const FlashOptions options{.dropout_p = take<double>(stack[kDropout]),
                             .causal = take<bool>(stack[kCausal]),
                             .scale = take<std::optional<double>>(stack[kScale]),
                             .window_left = take<std::optional<int64_t>>(stack[kWindowLeft]),
                             .window_right = take<std::optional<int64_t>>(stack[kWindowRight])};
  const bool dense = !packing.cu_seqlens_q;
  if (dense)
    for (Tensor& tensor : in) tensor = with_heads_first(tensor);
  auto grads = run_backward(in[kGradOut], in[kQuery], in[kKey], in[kValue], in[kOut], lse, rng_state, options, packing);
  if (dense)
    for (Tensor& grad : grads) grad = with_heads_first(grad);
  put(stack, outputs, std::array{from(grads[0]), from(grads[1]), from(grads[2])});
}

// ---- the switch ------------------------------------------------------------------------------------------------------------

// `active`: torch's operators run our kernels from now on; else torch's kernels again. `inplace`: this torch has
// _flash_attention_forward_no_dropout_inplace.
void torch_sdpa_register(bool active, bool inplace) {
  static std::unique_ptr<StableLibrary> registered;
  registered.reset();
  if (!active) return;
  registered = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CUDA", __FILE__, __LINE__);
  registered->impl("_scaled_dot_product_flash_attention", &scaled_dot_product_flash_attention);
  registered->impl("_scaled_dot_product_flash_attention_backward", &scaled_dot_product_flash_attention_backward);
  registered->impl("_flash_attention_forward", &flash_attention_forward);
  registered->impl("_flash_attention_backward", &flash_attention_backward);
  if (inplace) registered->impl("_flash_attention_forward_no_dropout_inplace", &flash_attention_forward_inplace);
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CompositeExplicitAutograd, m) {
  m.impl("torch_sdpa_register", TORCH_BOX(&flash_online::ops::torch_sdpa_register));
}
