// What the kernels for compute capability 9.0 do not take.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../attention.h"
#include "tiles.h"

namespace flash_online::cuda {

// Whether the copy engine can walk a tensor [batch, heads, rows, width] of 16-bit elements.
inline bool is_tma_compatible(const void* data, const int64_t (&stride)[4], int64_t batch, int64_t heads, int64_t rows,
                              int64_t width) {
  constexpr int64_t kFar = int64_t{1} << 39;  // elements: 2^40 bytes
  const auto walkable = [](int64_t step, int64_t size) { return size == 1 || (step % 8 == 0 && step >= 0 && step < kFar); };
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && walkable(stride[0], batch) && walkable(stride[1], heads) &&
         walkable(stride[2], rows) && (rows == 1 || stride[2] > 0) && (stride[3] == 1 || width == 1);
}

// Why forward_sm90 does not take a problem in the tile of this head dim; null: it does.
inline const char* forward_sm90_refusal(const AttentionProblem& p, const Gpu& gpu, int head_dim) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (gpu.major != 9) return "the GPU's compute capability is not 9.0";
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return "the dtype is not float16 or bfloat16";
  if (p.head_dim == 0 || p.head_dim_v == 0) return "a head dim of 0";
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return "a head dim that is no multiple of 8";
  if (p.keys == 0 || (p.query_starts && p.total_keys == 0)) return "there are no keys";
  if (p.query_starts && p.mask.data) return "a mask over packed sequences";
  if (p.query_starts && head_dim > kWidestPackedSm90) return "packed sequences with a head dim over 256";
  const int64_t batch = p.query_starts ? 1 : p.batch, queries = p.query_starts ? p.total_queries : p.queries,
                keys = p.query_starts ? p.total_keys : p.keys, tiles = queries / 64 + (p.query_starts ? p.batch : 1);
  if (queries > kMost || keys > kMost || p.queries > kMost || p.keys > kMost || batch * p.heads > kMost ||
      batch * p.heads * tiles > kMost)
    return "a size beyond 32-bit indices";
  if (!(p.scale > 1e-6 && p.scale < 1e30)) return "a scale that is not between 1e-6 and 1e30";
  if ((p.alibi_slopes || p.softcap != 0 || p.mask.data || p.dropout != 0) && head_dim > kWidestEverythingSm90)
    return "ALiBi, a softcap, a mask or dropout with a head dim over 192";
  if (p.mask.data && p.mask_dtype == DType::kFloat32) return "a mask of float32";
  if (p.mask.data && p.mask_dtype != DType::kBool &&
      !is_tma_compatible(p.mask.data, p.mask.stride, p.batch, p.heads, p.mask.stride[2] == 0 ? 1 : p.queries, p.keys))
    return "the mask's rows are not whole multiples of 16 bytes apart";
  if (!is_tma_compatible(p.query.data, p.query.stride, batch, p.heads, queries, p.head_dim))
    return "query's rows are not whole multiples of 16 bytes apart";
  if (!is_tma_compatible(p.key.data, p.key.stride, batch, p.key_heads, keys, p.head_dim))
    return "key's rows are not whole multiples of 16 bytes apart";
  if (!is_tma_compatible(p.value.data, p.value.stride, batch, p.value_heads, keys, p.head_dim_v))
    return "value's rows are not whole multiples of 16 bytes apart";
  if (!is_tma_compatible(p.out.data, p.out.stride, batch, p.heads, queries, p.head_dim_v))
    return "the result's rows are not whole multiples of 16 bytes apart";
  return nullptr;
}

// Whether forward_sm90's blocks of threads take their tiles one by one, from a counter: where tiles differ so much in work that
// dealing them out in turn leaves some blocks without. It is packed sequences that do, and they have no mask.
inline bool forward_sm90_takes_tiles(const AttentionProblem& p) {
  constexpr int64_t kFewKeys = 512;  // of a sequence: whatever the tiles, the end of the work is not far
  return p.query_starts && p.keys > kFewKeys;
}

constexpr int kLongestBackwardSm90 = 1 << 28;  // queries and keys
constexpr int kShortBackwardRowsSm90 = 64;  // keys of a sequence at most, and queries of a block

// Whether backward_short_sm90.cuh takes a problem that backward_sm90 does, which is `plain`: no mask, dropout, bent scores.
inline bool is_short_backward_sm90(const AttentionProblem& p, const AttentionGradients& g, bool plain) {
  constexpr int64_t kMostQueries = 128;  // of a sequence: a block of threads takes all of them in turn
  return plain && std::max(p.head_dim, p.head_dim_v) <= 128 && p.keys <= kShortBackwardRowsSm90 && p.queries <= kMostQueries &&
         !g.grad_sinks && p.head_dim_v % 8 == 0 &&
         is_tma_compatible(p.out.data, p.out.stride, p.batch, p.heads, p.query_starts ? p.total_queries : p.queries,
                           p.head_dim_v);
}

// Why backward_sm90 does not take a problem; null: it does. Gradients that are not there yet are no reason.
inline const char* backward_sm90_refusal(const AttentionProblem& p, const Gpu& gpu, const AttentionGradients& g,
                                         bool deterministic) {
  const int64_t queries = p.query_starts ? p.total_queries : p.queries, keys = p.query_starts ? p.total_keys : p.keys;
  if (gpu.major != 9) return "the GPU's compute capability is not 9.0";
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return "the dtype is not float16 or bfloat16";
  if (deterministic && p.mask.data) return "deterministic with a mask: blocks that it hides have no turn";
  if (std::max(p.head_dim, p.head_dim_v) > kWidestEverythingBackwardSm90) {
    if (p.alibi_slopes || p.softcap != 0 || p.mask.data || p.dropout != 0)
      return "ALiBi, a softcap, a mask or dropout with a head dim over 128";
    if (!(static_cast<float>(p.scale) > 0 && p.scale < 1e29)) return "a scale that is not positive with a head dim over 128";
  }
  if (p.batch == 0 || p.heads == 0 || queries == 0 || keys == 0 || p.head_dim == 0 || p.head_dim_v == 0) return "a size of 0";
  if (queries > kLongestBackwardSm90 || keys > kLongestBackwardSm90) return "a length over 2^28";
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
