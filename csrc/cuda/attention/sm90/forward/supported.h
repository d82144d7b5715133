// The problems that the Hopper forward kernel takes, and the reason why it refuses another.
#pragma once

#include "../../attention.h"
#include "../tma_tensor.cuh"
#include "tiles.h"

namespace flash_online::cuda {

// The reason why forward_sm90 does not take a problem in the tile of this head dim; null: it does.
inline const char* forward_sm90_refusal(const AttentionProblem& p, const Gpu& gpu, int head_dim) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (gpu.major != 9) return "the GPU's compute capability is not 9.0";
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return "the dtype is not float16 or bfloat16";
  if (p.head_dim == 0 || p.head_dim_v == 0) return "a head dim of 0";
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return "a head dim that is no multiple of 8";
  if (p.keys == 0 || (p.query_starts && p.total_keys == 0)) return "there are no keys";
  if (p.query_starts && (p.mask.data || p.is_sparse())) return "a mask or spans over packed sequences";
  if (p.is_sparse() && (p.mask.data || score_mods(p) != 0 || p.dropout != 0))
    return "spans or a list of blocks with a mask, ALiBi, a softcap or dropout";
  if (p.query_starts && head_dim > kForwardSm90MaxPackedHeadDim) return "packed sequences with a head dim over 256";
  const int64_t batch = p.query_starts ? 1 : p.batch, queries = p.query_starts ? p.total_queries : p.queries,
                keys = p.query_starts ? p.total_keys : p.keys, tiles = queries / 64 + (p.query_starts ? p.batch : 1);
  if (queries > kMost || keys > kMost || p.queries > kMost || p.keys > kMost || batch * p.heads > kMost ||
      batch * p.heads * tiles > kMost)
    return "a size beyond 32-bit indices";
  if (!(p.scale > 1e-6 && p.scale < 1e30)) return "a scale that is not between 1e-6 and 1e30";
  if ((score_mods(p) != 0 || p.mask.data || p.is_sparse()) && head_dim > kForwardSm90MaxOptionsHeadDim)
    return "ALiBi, a softcap, a mask, spans or a list of blocks with a head dim over 256";
  if (p.max_logit && head_dim > kForwardSm90MaxOptionsHeadDim) return "the maximum logit with a head dim over 256";
  if (p.max_logit && (score_mods(p) != 0 || p.mask.data || p.is_sparse() || p.dropout != 0))
    return "the maximum logit with ALiBi, a softcap, a mask, spans, a list of blocks or dropout";
  if (score_mods(p) & ~(kSoftcap | kAlibi)) return "a score modification other than a softcap or ALiBi";
  if (p.dropout != 0 && head_dim > kForwardSm90MaxDropoutHeadDim) return "dropout with a head dim over 192";
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

// True if the CTAs of forward_sm90 claim their tiles one by one from a counter in global memory: for packed sequences and with
// sparsity, where tiles differ so much in work that a static order leaves some CTAs idle.
inline bool forward_sm90_is_dynamic(const AttentionProblem& p) {
  constexpr int64_t kFewKeys = 512;  // per sequence: then every tile is short, and so is the tail of the launch
  return p.is_sparse() || (p.query_starts && p.keys > kFewKeys);
}

}  // namespace flash_online::cuda
