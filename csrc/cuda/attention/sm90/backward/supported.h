// The problems that the Hopper backward kernels take, and the reason why they refuse another.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../attention.h"
#include "../tma_tensor.cuh"
#include "tiles.h"

namespace flash_online::cuda {

constexpr int kShortBackwardRowsSm90 = 64;  // short_backward.cuh: keys per sequence at most, and queries per block

// True if short_backward.cuh takes a problem that backward_sm90 takes. `plain`: no mask, no dropout, no score modification. The
// kernel sums delta over its keys, which must be all keys that a query sees: an lse without lse_low may be of more keys (ring
// attention).
inline bool is_short_backward_sm90(const AttentionProblem& p, const AttentionGradients& g, bool plain) {
  constexpr int64_t kMaxQueries = 128;  // per sequence: one CTA takes all of them, block after block
  const bool has_all_keys = !p.lse || p.lse_low;
  return plain && has_all_keys && std::max(p.head_dim, p.head_dim_v) <= 128 && p.keys <= kShortBackwardRowsSm90 &&
         p.queries <= kMaxQueries && !g.grad_sinks;
}

// The reason why backward_sm90 refuses a problem; null: it takes it. Gradients need not be allocated yet.
inline const char* backward_sm90_refusal(const AttentionProblem& p, const Gpu& gpu, const AttentionGradients& g,
                                         bool deterministic) {
  const int64_t queries = p.query_starts ? p.total_queries : p.queries, keys = p.query_starts ? p.total_keys : p.keys;
  if (gpu.major != 9) return "the GPU's compute capability is not 9.0";
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return "the dtype is not float16 or bfloat16";
  if (deterministic && (p.mask.data || p.is_sparse()))
    return "deterministic mode with a mask, spans or a list of blocks: hidden blocks break the order of dQ additions";
  if (p.is_sparse() && (p.mask.data || p.dropout != 0 || score_mods(p) || !(p.scale >= 1e-6 && p.scale < 1e29)))
    return "spans or a list of blocks with a mask, dropout, a score modification or a scale that is not between 1e-6 and 1e29";
  if (std::max(p.head_dim, p.head_dim_v) > kMaxOptionsHeadDimBackwardSm90) {
    if (p.dropout != 0) return "dropout with a head dim over 128";
    if (p.mask.data && p.mask_dtype != DType::kBool) return "a float mask with a head dim over 128";
    if (score_mods(p) == (kSoftcap | kAlibi)) return "ALiBi and a softcap with a head dim over 128";
    if (score_mods(p) & ~(kSoftcap | kAlibi)) return "a score modification other than a softcap or ALiBi";
    if (p.alibi_slopes && p.scale < 1e-6) return "ALiBi and a scale under 1e-6 with a head dim over 128";
    if (!(static_cast<float>(p.scale) > 0 && p.scale < 1e29)) return "a scale that is not positive with a head dim over 128";
  }
  if (p.batch == 0 || p.heads == 0 || queries == 0 || keys == 0 || p.head_dim == 0 || p.head_dim_v == 0) return "a size of 0";
  if (queries > kMaxLengthBackwardSm90 || keys > kMaxLengthBackwardSm90) return "a length over 2^28";
  if (!is_tma_compatible(p.query.data, p.query.stride, p.batch, p.heads, queries, p.head_dim))
    return "query's rows are not whole multiples of 16 bytes apart";
  if (!is_tma_compatible(p.key.data, p.key.stride, p.batch, p.key_heads, keys, p.head_dim))
    return "key's rows are not whole multiples of 16 bytes apart";
  if (!is_tma_compatible(p.value.data, p.value.stride, p.batch, p.value_heads, keys, p.head_dim_v))
    return "value's rows are not whole multiples of 16 bytes apart";
  if (g.grad_out.data && !is_tma_compatible(g.grad_out.data, g.grad_out.stride, p.batch, p.heads, queries, p.head_dim_v))
    return "grad_out's rows are not whole multiples of 16 bytes apart";
  return nullptr;
}

}  // namespace flash_online::cuda
