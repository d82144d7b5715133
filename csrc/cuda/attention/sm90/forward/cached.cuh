// Attention over cached keys on Hopper: the kernel of kernel.cuh, whose keys and values come from the pages of a pool.
#pragma once

#include <numeric>

#include "launch.cuh"

namespace flash_online::cuda {

// The query heads that share keys become rows of a tile, query by query, as many as a power of two allows: 2^shift of them.
// They must lie side by side in a box, and ALiBi is one head's.
inline int cached_group_shift(const AttentionProblem& p) {
  constexpr int kMost = 6;  // 64 rows, those of a warpgroup
  if (p.alibi_slopes || p.query.stride[1] == 0) return 0;
  const int64_t group = p.heads / p.key_heads;
  int shift = 0;
  while (shift < kMost && group % (int64_t{2} << shift) == 0) ++shift;
  return shift;
}

// The tiles of `rows` rows, at most, of a call.
inline TileList cached_sm90_tiles(const AttentionProblem& p, int rows) {
  const int shift = cached_group_shift(p);
  return TileList::of(p, false, p.heads >> shift, rows >> shift);
}

// The keys of a TMA box: a box lies in one page, and begins at a multiple of its size.
inline int64_t cached_box_rows(const CacheView& cache, int64_t keys) { return cache.table ? std::gcd(cache.page, keys) : keys; }

// The index in kForwardSm90Plain of the entry for problems of this head dim, from `entry` on.
constexpr int cached_sm90_entry(int head_dim, int entry = 0) {
  while (kForwardSm90Plain[entry].head_dim != head_dim || kForwardSm90Plain[entry].max_queries > 0) ++entry;
  return entry;
}

// Why the Hopper kernel leaves a problem to the general one, which cuts keys into pieces: there are too few tiles for the GPU.
// One that has few rows of queries for each key has nothing to do but load keys, and pieces pay sooner. Where one piece is
// asked for, the choice depends on neither the queries nor the batch: a row has the bits that it has in any other call.
inline const char* too_few_tiles(const AttentionProblem& p, int tile_rows) {
  constexpr int64_t kFewRows = 32, kManyKeys = 2048;
  if (p.cache.splits == 1) return nullptr;
  const bool few_rows = p.queries * (p.heads / p.key_heads) <= kFewRows;
  if (!few_rows && p.keys < kManyKeys) return nullptr;
  const int64_t tiles = cached_sm90_tiles(p, tile_rows).count(), enough = sm_count() / (few_rows ? 2 : 6);
  return tiles < enough ? "few queries: the general kernel cuts keys into pieces" : nullptr;
}

inline const char* cached_sm90_refusal(const AttentionProblem& p, const Gpu& gpu, int head_dim) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const CacheView& cache = p.cache;
  if (gpu.major != 9) return "the GPU's compute capability is not 9.0";
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return "the dtype is not float16 or bfloat16";
  if (cache.dtype != p.dtype) return "a cache of float8";
  if (cache.key_scale || cache.value_scale) return "scales of keys or values";
  if (p.head_dim == 0 || p.head_dim_v == 0) return "a head dim of 0";
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return "a head dim that is no multiple of 8";
  if (p.keys == 0 || cache.blocks == 0) return "there are no keys";
  if (cache.splits > 1) return "num_splits: the general kernel cuts keys into pieces";
  if (cache.table && cache.page % 8 != 0) return "pages that are no multiple of 8 keys";
  if (cache.table && cache.left) return "leftpad beside a block_table";
  const int64_t batch = p.query_starts ? 1 : p.batch, queries = p.query_starts ? p.total_queries : p.queries,
                tiles = (p.query_starts ? 1 : batch) * (queries / 64 + 1) + p.batch;
  if (queries > kMost || p.keys > kMost || cache.page > kMost || cache.blocks > kMost || p.batch > kMost ||
      p.heads * tiles > kMost)
    return "a size beyond 32-bit indices";
  if (!(p.scale > 1e-6 && p.scale < 1e30)) return "a scale that is not between 1e-6 and 1e30";
  if ((p.alibi_slopes || p.softcap != 0) && head_dim > kForwardSm90MaxOptionsHeadDim)
    return "ALiBi or a softcap with a head dim over 192";
  if (!is_tma_compatible(p.query.data, p.query.stride, batch, p.heads, queries, p.head_dim))
    return "query's rows are not whole multiples of 16 bytes apart";
  if (!is_tma_compatible(p.key.data, p.key.stride, cache.blocks, p.key_heads, cache.page, p.head_dim))
    return "key_cache's rows are not whole multiples of 16 bytes apart";
  if (!is_tma_compatible(p.value.data, p.value.stride, cache.blocks, p.value_heads, cache.page, p.head_dim_v))
    return "value_cache's rows are not whole multiples of 16 bytes apart";
  if (!is_tma_compatible(p.out.data, p.out.stride, batch, p.heads, queries, p.head_dim_v))
    return "the result's rows are not whole multiples of 16 bytes apart";
  return too_few_tiles(p, kForwardSm90Plain[cached_sm90_entry(head_dim)].queries());
}

// Whether CTAs claim their tiles from a counter: see forward_sm90_is_dynamic().
inline bool cached_sm90_is_dynamic(const AttentionProblem& p) {
  constexpr int64_t kFewKeys = 512;
  return p.keys > kFewKeys;
}

// Queries or results [batch, heads, rows, width], in boxes of `rows` rows of a tile.
template <class T>
TmaTensor cached_rows_tensor(const AttentionProblem& p, const ConstView4& view, int64_t width, int rows) {
  constexpr TmaElement kElement = std::is_same_v<T, __half> ? TmaElement::kHalf : TmaElement::kBFloat16;
  // Rows are what make_tma_tensor() calls heads, and the other way round.
  const ConstView4 swapped{view.data, {view.stride[0], view.stride[2], view.stride[1], view.stride[3]}};
  const int64_t queries = p.query_starts ? p.total_queries : p.queries, heads = view.stride[1] == 0 ? 1 : p.heads;
  const int box_heads = std::min(1 << cached_group_shift(p), rows);
  TmaTensor tensor = make_tma_tensor(swapped, kElement, p.batch, queries, queries, heads, width, box_heads, rows / box_heads);
  tensor.q_heads_per_head = static_cast<int>(p.heads / heads);
  return tensor;
}

template <class Kernel, class T>
ForwardSm90Tensors cached_tensors_of(const AttentionProblem& p) {
  constexpr TmaElement kElement = std::is_same_v<T, __half> ? TmaElement::kHalf : TmaElement::kBFloat16;
  const auto pool = [&](const ConstView4& view, int64_t heads, int64_t width) {
    return make_tma_tensor(view, kElement, p.cache.blocks, p.heads, heads, p.cache.page, width,
                           static_cast<int>(cached_box_rows(p.cache, Kernel::kKeys)));
  };
  ForwardSm90Tensors tensors{.query = cached_rows_tensor<T>(p, p.query, p.head_dim, Kernel::kRowsPerWarpgroup),
                             .key = pool(p.key, p.key_heads, p.head_dim),
                             .value = pool(p.value, p.value_heads, p.head_dim_v)};
  if constexpr (Kernel::kTile.staged_out) {
    const ConstView4 out{p.out.data, {p.out.stride[0], p.out.stride[1], p.out.stride[2], p.out.stride[3]}};
    tensors.out = cached_rows_tensor<T>(p, out, p.head_dim_v, Kernel::kRowsPerWarp).map;
  }
  return tensors;
}

template <class T, class Variant>
void launch_cached_sm90(const AttentionProblem& p, unsigned* tile_counter, cudaStream_t stream) {
  using Kernel = ForwardSm90Kernel<T, Variant>;
  CachedSm90Arguments a{make_arguments(p, cached_tensors_of<Kernel, T>(p)), {}};
  const int shift = cached_group_shift(p);
  static_cast<VarlenTileList&>(a.cached) = make_varlen_tile_list(p, a.q_heads_per_key_head >> shift, tile_counter);
  a.cached.heads >>= shift;
  a.cached.problem = p;
  a.cached.group_shift = shift;
  a.cached.page = static_cast<unsigned>(p.cache.page);
  a.cached.blocks = static_cast<unsigned>(p.cache.blocks);
  a.cached.box_rows = static_cast<int>(cached_box_rows(p.cache, Kernel::kKeys));
  a.cached.boxes = Kernel::kKeys / a.cached.box_rows;
  a.packed.tile_counter = tile_counter;
  if (tile_counter) check(cudaMemsetAsync(tile_counter, 0, sizeof(*tile_counter), stream), "cudaMemsetAsync");
  const int64_t max_ctas = int64_t{sm_count()} * Kernel::kTile.ctas_per_sm,
                tiles = cached_sm90_tiles(p, Kernel::kTile.queries()).count();
  launch<attention_forward_sm90<T, Variant>>(a, std::clamp(tiles, int64_t{1}, max_ctas), Kernel::kTile.threads(),
                                             Kernel::kSharedBytes, stream);
}

template <class T, int kEntry>
void cached_sm90_in_entry(const AttentionProblem& p, unsigned* tile_counter, cudaStream_t stream) {
  using Features = ForwardSm90Features;
  constexpr ForwardSm90Tile kTile = kForwardSm90Plain[kEntry];
  // Values of up to that width have an entry of their own.
  constexpr int kNext = kEntry + 1 < kForwardSm90Entries ? kEntry + 1 : kEntry;
  if constexpr (kTile.head_dim_v < kTile.head_dim)
    if (p.head_dim_v > kTile.head_dim_v)
      return cached_sm90_in_entry<T, cached_sm90_entry(kTile.head_dim, kNext)>(p, tile_counter, stream);
  if constexpr (kTile.head_dim <= kForwardSm90MaxOptionsHeadDim)
    if (has_options(p))
      return launch_cached_sm90<T, ForwardSm90Variant<kEntry, Features::kOptions, true, true>>(p, tile_counter, stream);
  launch_cached_sm90<T, ForwardSm90Variant<kEntry, Features::kPlain, true, true>>(p, tile_counter, stream);
}

template <int kHeadDim>
const char* AttentionCachedSm90<kHeadDim>::refusal(const ForwardPass& pass, const Gpu& gpu) {
  return cached_sm90_refusal(pass.problem, gpu, kHeadDim);
}

// A word for the tile counter of dynamic scheduling.
template <int kHeadDim>
int64_t AttentionCachedSm90<kHeadDim>::workspace_bytes(const ForwardPass& pass) {
  return cached_sm90_is_dynamic(pass.problem) ? sizeof(unsigned) : 0;
}

template <int kHeadDim>
void AttentionCachedSm90<kHeadDim>::run(const ForwardPass& pass, void* workspace, CUstream_st* stream) {
  const AttentionProblem& p = pass.problem;
  unsigned* const tile_counter = cached_sm90_is_dynamic(p) ? static_cast<unsigned*>(workspace) : nullptr;
  constexpr int kEntry = cached_sm90_entry(kHeadDim);
  if (p.dtype == DType::kFloat16)
    cached_sm90_in_entry<__half, kEntry>(p, tile_counter, stream);
  else
    cached_sm90_in_entry<__nv_bfloat16, kEntry>(p, tile_counter, stream);
}

}  // namespace flash_online::cuda
