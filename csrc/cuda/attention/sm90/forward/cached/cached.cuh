// Attention over cached keys on Hopper: the kernel of kernel.cuh with keys and values from the pages of a pool.
#pragma once

#include <numeric>

#include "../launch.cuh"
#include "rows.h"

namespace flash_online::cuda {

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

// Returns whether shares of CTAs cut a call's tiles, and which tiles. `tile_rows`: the rows of tiles that stay whole. Only the
// device knows the lengths.
inline ForwardSm90KvSplit cached_sm90_kv_split(const AttentionProblem& p, int tile_rows) {
  constexpr int kSmallRows = 64;
  constexpr int64_t kSmallKeys = 64, kFewBlocks = 16, kLeastKeys = 1024, kMostNumbers = 1 << 29;
  if (p.cache.kv_splits == 1 || has_options(p)) return ForwardSm90KvSplit::kNone;
  const int64_t small = cached_tiles_per_key(p, kSmallRows), blocks = ceil_div(capacity_of(p.cache), kSmallKeys);
  if (capacity_of(p.cache) >= kMostNumbers || p.heads / p.key_heads * p.queries >= kMostNumbers ||
      p.batch * p.key_heads * small >= kMostNumbers / blocks)
    return ForwardSm90KvSplit::kNone;
  // All rows that share keys are in one small tile, or in no fewer large ones; or keys are so few that they may be read twice.
  if (small <= cached_tiles_per_key(p, tile_rows) || p.batch * p.key_heads * small * blocks <= kFewBlocks * sm_count())
    return ForwardSm90KvSplit::kSmallTiles;
  if (p.keys < kLeastKeys) return ForwardSm90KvSplit::kNone;
  // Tiles leave SMs idle at the end of the last round, or in the one round that there is where lengths may differ.
  const int64_t tiles = cached_sm90_tiles(p, tile_rows).count(), room = ceil_div(tiles, int64_t{sm_count()}) * sm_count();
  const bool differ = p.batch > 1 && tiles <= sm_count(), idle = tiles <= 2 * sm_count() && (room - tiles) * 5 > room;
  return differ || idle ? ForwardSm90KvSplit::kTiles : ForwardSm90KvSplit::kNone;
}

// The line of work of a call, if shares of CTAs cut the keys of its tiles.
struct CachedSm90Line {
  int group_shift;
  int ctas;  // per head and row tile that run abreast
  DecodeShape shape;
  DecodePartials partials;

  static CachedSm90Line of(const AttentionProblem& p, const ForwardSm90Tile& tile) {
    constexpr int kMostHeads = 8, kLeastRounds = 3;
    constexpr int kLeastKeys = 512;  // of a share: with fewer, the additional partials take longer than the keys
    const int shift = cached_group_shift_of(p, tile.queries()), heads = static_cast<int>(p.heads >> shift);
    const int least_blocks = kLeastKeys / tile.keys, room = sm_count() * tile.ctas_per_sm;
    int heads_abreast = std::min(heads, kMostHeads);
    while (heads % heads_abreast != 0) --heads_abreast;
    // Packed sequences differ in their tiles of rows.
    const int64_t row_tiles = std::max<int64_t>(ceil_div(p.queries << shift, int64_t{tile.queries()}), 1);
    const bool rows_abreast = !p.query_starts && heads_abreast * row_tiles * kLeastRounds <= room;
    CachedSm90Line line{
        shift, 0, DecodeShape::of(p, int64_t{1} << shift, tile.queries(), tile.keys, 1, heads_abreast, rows_abreast), {}};
    line.shape.least_share = least_blocks;
    // Rows are whole sectors of memory.
    line.partials = {nullptr, static_cast<int>(std::min<int64_t>(p.queries << shift, tile.queries())),
                     round_up(static_cast<int>(p.head_dim_v), 8) + 8};
    line.ctas = static_cast<int>(
        std::clamp<int64_t>(ceil_div(line.shape.most_units(p), int64_t{least_blocks}), 1, room / line.shape.abreast()));
    return line;
  }
  int64_t bytes() const { return partials.bytes(int64_t{ctas} * shape.abreast()); }
};

// The reason to leave a problem without cut tiles to the general kernel, which cuts keys into kv_splits: too few tiles for the
// GPU. Otherwise null. A problem with few rows of queries per key only loads keys, and kv_splits pay sooner. If num_splits is
// 1, the choice depends on neither the queries nor the batch: a row gets the same bits in every call.
inline const char* too_few_tiles(const AttentionProblem& p, int tile_rows) {
  constexpr int64_t kFewRows = 32, kManyKeys = 2048;
  if (p.cache.kv_splits == 1 || cached_sm90_kv_split(p, tile_rows) != ForwardSm90KvSplit::kNone) return nullptr;
  const bool few_rows = p.queries * (p.heads / p.key_heads) <= kFewRows;
  if (!few_rows && p.keys < kManyKeys) return nullptr;
  const int64_t tiles = cached_sm90_tiles(p, tile_rows).count(), enough = sm_count() / (few_rows ? 2 : 6);
  return tiles < enough ? "few queries: the general kernel cuts keys into kv_splits" : nullptr;
}

inline const char* cached_sm90_refusal(const AttentionProblem& p, const Gpu& gpu, int head_dim) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const CacheView& cache = p.cache;
  if (gpu.major != 9) return "the GPU's compute capability is not 9.0";
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return "the dtype is not float16 or bfloat16";
  if (p.has_spans()) return "spans";
  if (cache.dtype != p.dtype) return "a cache of float8";
  if (cache.key_scale || cache.value_scale) return "scales of keys or values";
  if (p.head_dim == 0 || p.head_dim_v == 0) return "a head dim of 0";
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return "a head dim that is no multiple of 8";
  if (p.keys == 0 || cache.blocks == 0) return "there are no keys";
  if (cache.kv_splits > 1) return "num_splits: the general kernel cuts keys into kv_splits";
  if (cache.table && cache.page % 8 != 0) return "pages that are no multiple of 8 keys";
  if (cache.table && cache.left) return "leftpad together with a block_table";
  const int64_t batch = p.query_starts ? 1 : p.batch, queries = p.query_starts ? p.total_queries : p.queries,
                tiles = (p.query_starts ? 1 : batch) * (queries / 64 + 1) + p.batch;
  if (queries > kMost || p.keys > kMost || cache.page > kMost || cache.blocks > kMost || p.batch > kMost ||
      p.heads * tiles > kMost)
    return "a size beyond 32-bit indices";
  if (!(p.scale > 1e-6 && p.scale < 1e30)) return "a scale that is not between 1e-6 and 1e30";
  if (score_mods(p) != 0 && head_dim > kForwardSm90MaxOptionsHeadDim) return "ALiBi or a softcap with a head dim over 256";
  if (score_mods(p) & ~(kSoftcap | kAlibi)) return "a score modification other than a softcap or ALiBi";
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

// True if CTAs claim their tiles from a counter: see forward_sm90_is_dynamic().
inline bool cached_sm90_is_dynamic(const AttentionProblem& p) {
  constexpr int64_t kFewKeys = 512;
  return p.keys > kFewKeys;
}

// Queries or results [batch, heads, rows, width], in boxes of `rows` rows of a tile.
template <class T>
TmaTensor cached_rows_tensor(const AttentionProblem& p, const ConstView4& view, int64_t width, int rows, int group_shift) {
  constexpr TmaElement kElement = std::is_same_v<T, __half> ? TmaElement::kHalf : TmaElement::kBFloat16;
  // Rows are what make_tma_tensor() calls heads, and the other way round.
  const ConstView4 swapped{view.data, {view.stride[0], view.stride[2], view.stride[1], view.stride[3]}};
  const int64_t queries = p.query_starts ? p.total_queries : p.queries, heads = view.stride[1] == 0 ? 1 : p.heads;
  const int box_heads = std::min(1 << group_shift, rows);
  TmaTensor tensor = make_tma_tensor(swapped, kElement, p.batch, queries, queries, heads, width, box_heads, rows / box_heads);
  tensor.q_heads_per_head = static_cast<int>(p.heads / heads);
  return tensor;
}

template <class Kernel, class T>
ForwardSm90Tensors cached_tensors_of(const AttentionProblem& p, int group_shift) {
  constexpr TmaElement kElement = std::is_same_v<T, __half> ? TmaElement::kHalf : TmaElement::kBFloat16;
  const auto pool = [&](const ConstView4& view, int64_t heads, int64_t width) {
    return make_tma_tensor(view, kElement, p.cache.blocks, p.heads, heads, p.cache.page, width,
                           static_cast<int>(cached_box_rows(p.cache, Kernel::kKeys)));
  };
  ForwardSm90Tensors tensors{.query = cached_rows_tensor<T>(p, p.query, p.head_dim, Kernel::kRowsPerWarpgroup, group_shift),
                             .key = pool(p.key, p.key_heads, p.head_dim),
                             .value = pool(p.value, p.value_heads, p.head_dim_v)};
  if constexpr (Kernel::kTile.staged_out) {
    const ConstView4 out{p.out.data, {p.out.stride[0], p.out.stride[1], p.out.stride[2], p.out.stride[3]}};
    tensors.out = cached_rows_tensor<T>(p, out, p.head_dim_v, Kernel::kRowsPerWarp, group_shift).map;
  }
  return tensors;
}

template <class Kernel, class T>
CachedSm90Arguments cached_arguments(const AttentionProblem& p, int group_shift, unsigned* tile_counter) {
  CachedSm90Arguments a{make_arguments(p, cached_tensors_of<Kernel, T>(p, group_shift)), {}};
  static_cast<VarlenTileList&>(a.cached) = make_varlen_tile_list(p, a.q_heads_per_key_head >> group_shift, tile_counter);
  a.cached.heads >>= group_shift;
  a.cached.problem = p;
  a.cached.group_shift = group_shift;
  a.cached.page = static_cast<unsigned>(p.cache.page);
  a.cached.blocks = static_cast<unsigned>(p.cache.blocks);
  a.cached.box_rows = static_cast<int>(cached_box_rows(p.cache, Kernel::kKeys));
  a.cached.boxes = Kernel::kKeys / a.cached.box_rows;
  a.packed.tile_counter = tile_counter;
  return a;
}

template <class T, class Variant>
void launch_cached_sm90(const AttentionProblem& p, unsigned* tile_counter, cudaStream_t stream) {
  using Kernel = ForwardSm90Kernel<T, Variant>;
  const CachedSm90Arguments a = cached_arguments<Kernel, T>(p, cached_group_shift(p), tile_counter);
  if (tile_counter) check(cudaMemsetAsync(tile_counter, 0, sizeof(*tile_counter), stream), "cudaMemsetAsync");
  const int64_t max_ctas = int64_t{sm_count()} * Kernel::kTile.ctas_per_sm,
                tiles = cached_sm90_tiles(p, Kernel::kTile.queries()).count();
  launch<attention_forward_sm90<T, Variant>>(a, std::clamp(tiles, int64_t{1}, max_ctas), Kernel::kTile.threads(),
                                             Kernel::kSharedBytes, stream);
}

template <class T, class Variant>
void launch_kv_split_sm90(const AttentionProblem& p, void* workspace, cudaStream_t stream) {
  using Kernel = ForwardSm90Kernel<T, Variant>;
  const CachedSm90Line line = CachedSm90Line::of(p, Kernel::kTile);
  KvSplitSm90Arguments a{cached_arguments<Kernel, T>(p, line.group_shift, nullptr), {line.shape, line.partials}};
  a.line.partials.data = static_cast<float*>(workspace);
  launch<attention_forward_sm90<T, Variant>>(a, int64_t{line.ctas} * line.shape.abreast(), Kernel::kTile.threads(),
                                             Kernel::kSharedBytes, stream, true);
  if (line.shape.most_steps(p) > 1)  // a step is never cut
    merge_partials(p, line.shape, a.line.partials, line.ctas, stream);
}

// Calls f(integral_constant<entry>) with the entry for a problem's head dims, from kEntry on.
template <int kEntry, class F>
decltype(auto) visit_cached_entry(const AttentionProblem& p, F&& f) {
  constexpr ForwardSm90Tile kTile = kForwardSm90Plain[kEntry];
  // Values of up to that width have an entry of their own.
  constexpr int kNext = kEntry + 1 < kForwardSm90Entries ? kEntry + 1 : kEntry;
  if constexpr (kTile.head_dim_v < kTile.head_dim)
    if (p.head_dim_v > kTile.head_dim_v)
      return visit_cached_entry<cached_sm90_entry(kTile.head_dim, kNext)>(p, std::forward<F>(f));
  return f(std::integral_constant<int, kEntry>{});
}

template <int kEntry, ForwardSm90KvSplit kKvSplit>
using CachedKvSplitVariant = ForwardSm90Variant<kEntry, ForwardSm90Features::kPlain, true, true, kKvSplit>;

template <class T, int kEntry>
void cached_sm90_in_entry(const AttentionProblem& p, void* workspace, cudaStream_t stream) {
  using Features = ForwardSm90Features;
  constexpr ForwardSm90Tile kTile = kForwardSm90Plain[kEntry];
  switch (cached_sm90_kv_split(p, kTile.queries())) {
    case ForwardSm90KvSplit::kSmallTiles:
      return launch_kv_split_sm90<T, CachedKvSplitVariant<kEntry, ForwardSm90KvSplit::kSmallTiles>>(p, workspace, stream);
    case ForwardSm90KvSplit::kTiles:
      return launch_kv_split_sm90<T, CachedKvSplitVariant<kEntry, ForwardSm90KvSplit::kTiles>>(p, workspace, stream);
    case ForwardSm90KvSplit::kNone: break;
  }
  unsigned* const tile_counter = cached_sm90_is_dynamic(p) ? static_cast<unsigned*>(workspace) : nullptr;
  if constexpr (kTile.head_dim <= kForwardSm90MaxOptionsHeadDim)
    if (has_options(p))
      return launch_cached_sm90<T, ForwardSm90Variant<kEntry, Features::kOptions, true, true>>(p, tile_counter, stream);
  launch_cached_sm90<T, ForwardSm90Variant<kEntry, Features::kPlain, true, true>>(p, tile_counter, stream);
}

template <int kHeadDim>
const char* AttentionCachedSm90<kHeadDim>::refusal(const ForwardPass& pass, const Gpu& gpu) {
  return cached_sm90_refusal(pass.problem, gpu, kHeadDim);
}

// The partial results of tiles that shares cut, or a word for the tile counter of dynamic scheduling.
template <int kHeadDim>
int64_t AttentionCachedSm90<kHeadDim>::workspace_bytes(const ForwardPass& pass) {
  const AttentionProblem& p = pass.problem;
  return visit_cached_entry<cached_sm90_entry(kHeadDim)>(p, [&]<int kEntry>(std::integral_constant<int, kEntry>) -> int64_t {
    switch (cached_sm90_kv_split(p, kForwardSm90Plain[kEntry].queries())) {
      case ForwardSm90KvSplit::kSmallTiles:
        return CachedSm90Line::of(p, CachedKvSplitVariant<kEntry, ForwardSm90KvSplit::kSmallTiles>::kTile).bytes();
      case ForwardSm90KvSplit::kTiles:
        return CachedSm90Line::of(p, CachedKvSplitVariant<kEntry, ForwardSm90KvSplit::kTiles>::kTile).bytes();
      case ForwardSm90KvSplit::kNone: break;
    }
    return cached_sm90_is_dynamic(p) ? sizeof(unsigned) : 0;
  });
}

template <int kHeadDim>
void AttentionCachedSm90<kHeadDim>::run(const ForwardPass& pass, void* workspace, CUstream_st* stream) {
  const AttentionProblem& p = pass.problem;
  visit_cached_entry<cached_sm90_entry(kHeadDim)>(p, [&]<int kEntry>(std::integral_constant<int, kEntry>) {
    if (p.dtype == DType::kFloat16)
      cached_sm90_in_entry<__half, kEntry>(p, workspace, stream);
    else
      cached_sm90_in_entry<__nv_bfloat16, kEntry>(p, workspace, stream);
  });
}

}  // namespace flash_online::cuda
