// The host side of the Hopper forward kernel: which entry of the tile table a problem runs in, the arguments, the launch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../../../../core/integer.h"
#include "../../../../core/philox.h"
#include "../../../hw/launch.h"
#include "../../common/tile_list.cuh"
#include "../../kernels.h"
#include "../../large_rows/score_levels.cuh"
#include "../tma_tensor.cuh"
#include "kernel.cuh"
#include "supported.h"

namespace flash_online::cuda {

inline ScoreArguments make_score_arguments(const AttentionProblem& p) {
  constexpr double kToBase2 = 1.4426950408889634;
  ScoreArguments a{.scale = p.softcap > 0 ? 1 : static_cast<float>(p.scale * kToBase2),
                   .bias_scale = static_cast<float>(p.softcap > 0 ? kToBase2 : 1 / p.scale),
                   .lowest = lowest_product(p.softcap > 0 ? 1 : static_cast<float>(p.scale * kToBase2)),
                   .lowest_score = 0,
                   .softcap = static_cast<float>(p.softcap * kToBase2),
                   .softcap_scale = p.softcap > 0 ? static_cast<float>(2 * kToBase2 * p.scale / p.softcap) : 0,
                   .sinks = static_cast<const float*>(p.sinks),
                   .alibi_slopes = static_cast<const float*>(p.alibi_slopes),
                   .alibi_stride = {p.alibi_stride[0], p.alibi_stride[1]}};
  a.lowest_score = a.lowest * a.scale;
  if (p.softcap > 0) {
    const double step = double{a.softcap_scale} * a.softcap_scale;
    double term = double{a.softcap} * a.softcap_scale;
    for (int i = 0; i < kTanhTerms; ++i, term *= step) a.softcap_term[i] = static_cast<float>(kTanhTerm[i] * term);
    // The terms of a tiny softcap do not fit a float.
    if (p.softcap > 1e-3 * std::abs(p.scale)) a.small_squares = static_cast<float>(kToBase2 * kToBase2 / step);
  }
  return a;
}

inline MaskSource mask_source_of(const AttentionProblem& p) {
  if (!p.mask.data) return MaskSource::kNone;
  if (p.mask_dtype == DType::kBool) return MaskSource::kBits;
  return p.mask_dtype == DType::kFloat16 ? MaskSource::kTmaFloat16 : MaskSource::kTmaBFloat16;
}
inline bool has_float_mask(const AttentionProblem& p) { return p.mask.data && p.mask_dtype != DType::kBool; }

inline MaskArguments make_mask_arguments(const AttentionProblem& p, const MaskTables& tables, int box_rows) {
  const auto step = [](const int64_t (&size)[4], int i, int64_t n) { return size[i] == 1 ? int64_t{0} : n; };
  const auto &map = tables.map.size, &bits = tables.bits.size;
  const int64_t bits_row_step = bits[3] * kWarpSize;
  return {.box_rows = p.mask.stride[2] == 0 ? 1 : box_rows,
          .map = {.kinds = tables.map.data,
                  .batch_step = step(map, 0, map[1] * map[2] * map[3]),
                  .head_step = step(map, 1, map[2] * map[3]),
                  .row_step = static_cast<int>(step(map, 2, map[3])),
                  .column_step = static_cast<int>(step(map, 3, 1))},
          .bits = {.words = tables.bits.data,
                   .batch_step = step(bits, 0, bits[1] * bits[2] * bits_row_step),
                   .head_step = step(bits, 1, bits[2] * bits_row_step),
                   .row_step = bits_row_step,
                   .last_row = static_cast<int>(bits[2]) - 1,
                   .last_block = static_cast<int>(bits[3]) - 1}};
}

inline DropoutArguments make_dropout_arguments(const AttentionProblem& p) {
  return {.rng = p.dropout > 0 ? p.rng : nullptr,
          .threshold = drop_threshold(p.dropout),
          .batch_begin = p.batch_begin,
          .keep_scale = p.dropout < 1 ? static_cast<float>(1 / (1 - p.dropout)) : 0.0f};  // dropout of 1 drops all weights
}

inline VarlenTileList make_varlen_tile_list(const AttentionProblem& p, int q_heads_per_key_head, unsigned* tile_counter) {
  const int max_keys = static_cast<int>(p.keys);
  return {.query_starts = p.query_starts,
          .key_starts = p.key_starts,
          .sequences = static_cast<int>(p.batch),
          .total_queries = static_cast<int>(p.total_queries),
          .total_keys = static_cast<int>(p.total_keys),
          .max_queries = static_cast<int>(p.queries),
          .max_keys = max_keys,
          .heads = static_cast<int>(p.heads),
          .q_heads_per_key_head = q_heads_per_key_head,
          .level_keys = tile_counter ? max_keys / kWarpSize + 1 : 0,
          .tile_counter = tile_counter};
}

// A problem's tensors as the kernel's TMA reads and writes them.
struct ForwardSm90Tensors {
  TmaTensor query, key, value;
  CUtensorMap out = {};  // where results are staged
};

template <class Kernel, class T>
ForwardSm90Tensors tensors_of(const AttentionProblem& p) {
  ForwardSm90Tensors tensors{.query = tma_tensor_of<T>(p, p.query, false, p.heads, p.head_dim, Kernel::kRowsPerWarpgroup),
                             .key = tma_tensor_of<T>(p, p.key, true, p.key_heads, p.head_dim, Kernel::kKeys),
                             .value = tma_tensor_of<T>(p, p.value, true, p.value_heads, p.head_dim_v, Kernel::kKeys)};
  if constexpr (Kernel::kTile.staged_out) {
    const ConstView4 out{p.out.data, {p.out.stride[0], p.out.stride[1], p.out.stride[2], p.out.stride[3]}};
    tensors.out = tma_tensor_of<T>(p, out, false, p.heads, p.head_dim_v, Kernel::kRowsPerWarp).map;
  }
  return tensors;
}

// Fills the arguments that kernels without options need too, but for the order of work tiles.
inline ForwardSm90Arguments make_arguments(const AttentionProblem& p, const ForwardSm90Tensors& tensors) {
  return {
      .query_tma = tensors.query.map,
      .key_tma = tensors.key.map,
      .value_tma = tensors.value.map,
      .out_tma = tensors.out,
      .q_heads_per_query_head = tensors.query.q_heads_per_head,
      .q_heads_per_key_head = tensors.key.q_heads_per_head,
      .q_heads_per_value_head = tensors.value.q_heads_per_head,
      .query_batch_step = tensors.query.batch_step,
      .key_batch_step = tensors.key.batch_step,
      .value_batch_step = tensors.value.batch_step,
      .batch = static_cast<int>(p.query_starts ? std::min(p.batch, int64_t{1}) : p.batch),  // 0 if there are padding rows only
      .heads = static_cast<int>(p.heads),
      .queries = static_cast<int>(p.queries),
      .keys = static_cast<int>(p.keys),
      .head_dim_v = static_cast<int>(p.head_dim_v),
      .visible = p.visible,
      .scores = make_score_arguments(p),
      .out = p.out.data,
      .out_stride = {p.out.stride[0], p.out.stride[1], p.out.stride[2]},
      .has_score_mod = score_mods(p) != 0,
      .lse = static_cast<float*>(p.lse),
      .lse_low = static_cast<float*>(p.lse_low),
      .lse_stride = {p.lse_stride[0], p.lse_stride[1]},
      .max_logit = p.max_logit,
      .natural_scale = static_cast<float>(p.scale),
      .lower_right = p.lower_right,
  };
}

template <class Kernel>
void set_order(ForwardSm90Arguments& a, const AttentionProblem& p, int64_t element_bytes, int64_t ctas,
               unsigned* tile_counter) {
  constexpr ForwardSm90Tile kTile = Kernel::kTile;
  const int64_t row_tiles = TileList::of(p, false, p.heads, kTile.queries()).blocks;
  if constexpr (Kernel::kPacked) {
    a.schedule.row_tiles = static_cast<int>(row_tiles);
    a.packed = make_varlen_tile_list(p, a.q_heads_per_key_head, tile_counter);
  } else {
    a.schedule =
        TileSchedule::make(p, row_tiles, kTile.queries(), kTile.section_rounds, a.q_heads_per_key_head, element_bytes, ctas);
  }
}

// Fills what kernels with options need in addition.
template <class Kernel, class T>
void add_options(ForwardSm90Arguments& a, const AttentionProblem& p, const MaskTables& tables) {
  a.dropout = make_dropout_arguments(p);
  a.mask_source = mask_source_of(p);
  a.mask = make_mask_arguments(p, tables, Kernel::kRowsPerWarpgroup);
  if (!has_float_mask(p)) return;
  a.schedule.batch_innermost = p.mask.stride[0] == 0 && p.mask.stride[1] != 0;
  a.mask_batch_step = p.mask.stride[0] != 0;
  a.mask_head_step = p.mask.stride[1] != 0;
  constexpr TmaElement kElement = std::is_same_v<T, __half> ? TmaElement::kHalf : TmaElement::kBFloat16;
  a.mask_tma = make_tma_tensor(p.mask, kElement, p.batch, p.heads, p.heads, p.mask.stride[2] == 0 ? 1 : p.queries, p.keys,
                               a.mask.box_rows)
                   .map;
}

// What is made of a mask or of sparsity before the kernel runs.
struct ForwardSm90Tables {
  MaskTables mask;
  SpanTables spans;
};

template <class T, class Variant>
void launch_forward_sm90(const AttentionProblem& p, const ForwardSm90Tables& tables, unsigned* tile_counter,
                         cudaStream_t stream) {
  using Kernel = ForwardSm90Kernel<T, Variant>;
  const int64_t max_ctas = int64_t{sm_count()} * Kernel::kTile.ctas_per_sm;
  ForwardSm90Arguments a = make_arguments(p, tensors_of<Kernel, T>(p));
  set_order<Kernel>(a, p, sizeof(T), max_ctas, tile_counter);
  if constexpr (Variant::kHasOptions) add_options<Kernel, T>(a, p, tables.mask);
  if constexpr (Variant::kSparse)
    a.sparsity = {.queries = p.query_spans,
                  .keys = p.key_spans,
                  .tiles = p.tiles,
                  .tile_keys = p.tile_keys,
                  .tables = tables.spans,
                  .tile_counter = tile_counter};
  if (Variant::kPacked && tile_counter)
    check(cudaMemsetAsync(tile_counter, 0, sizeof(*tile_counter), stream), "cudaMemsetAsync");
  const int64_t tiles = int64_t{a.batch} * a.heads * a.schedule.row_tiles;
  launch<attention_forward_sm90<T, Variant>>(a, std::clamp(tiles, int64_t{1}, max_ctas), Kernel::kTile.threads(),
                                             Kernel::kSharedBytes, stream, Variant::kSparse);
}

inline bool has_options(const AttentionProblem& p) { return score_mods(p) != 0 || p.mask.data || p.dropout != 0; }

// True if an entry for little work is the better one; otherwise tiles have `tile_queries` queries.
inline bool has_little_work(const AttentionProblem& p, const ForwardSm90Tile& tile, int tile_queries) {
  if (p.queries <= tile.max_queries) return true;
  if (p.query_starts) return false;
  const Visibility& v = p.visible;
  const bool narrow = v.left >= 0 && v.right >= 0 && v.left <= tile.max_window && v.left + v.right <= tile.max_window;
  return narrow || 2 * p.batch * p.heads * (ceil_div(p.queries, tile_queries)) <= sm_count();
}

// Where kSparse has blocks of more keys.
template <ForwardSm90Tile kPlainTile>
constexpr bool kHasNarrowSparseTile = forward_sm90_variant(kForwardSm90Packed, kPlainTile).keys > 64;

template <class T, int kEntry, bool kPacked>
void forward_sm90_in_entry(const AttentionProblem& problem, const ForwardSm90Tables& tables, unsigned* tile_counter,
                           cudaStream_t stream) {
  using Features = ForwardSm90Features;
  constexpr ForwardSm90Tile kTile = kForwardSm90Plain[kEntry];
  if constexpr (kTile.max_queries == 0 && kTile.head_dim <= kForwardSm90MaxOptionsHeadDim) {
    if constexpr (!kPacked)
      if (has_float_mask(problem))
        return launch_forward_sm90<T, ForwardSm90Variant<kEntry, Features::kOptionsFloatMask, false>>(problem, tables,
                                                                                                      tile_counter, stream);
    if constexpr (!kPacked && kHasNarrowSparseTile<kTile>)
      if (problem.tiles.data && problem.tile_keys == 64)
        return launch_forward_sm90<T, ForwardSm90Variant<kEntry, Features::kSparseNarrow, false>>(problem, tables, tile_counter,
                                                                                                  stream);
    if constexpr (!kPacked)
      if (problem.is_sparse())
        return launch_forward_sm90<T, ForwardSm90Variant<kEntry, Features::kSparse, false>>(problem, tables, tile_counter,
                                                                                            stream);
    if (problem.max_logit)
      return launch_forward_sm90<T, ForwardSm90Variant<kEntry, Features::kMaxLogit, kPacked>>(problem, tables, tile_counter,
                                                                                              stream);
    if (has_options(problem))
      return launch_forward_sm90<T, ForwardSm90Variant<kEntry, Features::kOptions, kPacked>>(problem, tables, tile_counter,
                                                                                             stream);
  }
  launch_forward_sm90<T, ForwardSm90Variant<kEntry, Features::kPlain, kPacked>>(problem, tables, tile_counter, stream);
}

// In the first entry for this head dim that is made for the problem, from kEntry on.
template <int kHeadDim, int kEntry = 0>
void forward_sm90_from_entry(const AttentionProblem& problem, const ForwardSm90Tables& tables, unsigned* tile_counter,
                             cudaStream_t stream) {
  static_assert(kEntry < kForwardSm90Entries, "no entry for this head dim in kForwardSm90Plain");
  constexpr ForwardSm90Tile kTile = kForwardSm90Plain[kEntry];
  if constexpr (kTile.head_dim != kHeadDim) {
    forward_sm90_from_entry<kHeadDim, kEntry + 1>(problem, tables, tile_counter, stream);
  } else {
    if constexpr (kTile.head_dim_v < kHeadDim)
      if (problem.head_dim_v > kTile.head_dim_v)
        return forward_sm90_from_entry<kHeadDim, kEntry + 1>(problem, tables, tile_counter, stream);
    if constexpr (kTile.max_queries > 0)
      if (has_options(problem) || problem.is_sparse() || problem.max_logit ||
          !has_little_work(problem, kTile, kForwardSm90Plain[kEntry + 1].queries()))
        return forward_sm90_from_entry<kHeadDim, kEntry + 1>(problem, tables, tile_counter, stream);
    const auto visit = [&]<class T>(T) {
      if constexpr (kHeadDim <= kForwardSm90MaxPackedHeadDim)
        if (problem.query_starts) return forward_sm90_in_entry<T, kEntry, true>(problem, tables, tile_counter, stream);
      forward_sm90_in_entry<T, kEntry, false>(problem, tables, tile_counter, stream);
    };
    problem.dtype == DType::kFloat16 ? visit(__half{}) : visit(__nv_bfloat16{});
  }
}

constexpr int64_t kTileCounterBytesForwardSm90 = 16;

template <int kHeadDim>
const char* AttentionForwardSm90<kHeadDim>::refusal(const ForwardPass& pass, const Gpu& gpu) {
  return forward_sm90_refusal(pass.problem, gpu, kHeadDim);
}

// A word for the tile counter of dynamic scheduling, and the tables of a mask or of spans.
template <int kHeadDim>
int64_t AttentionForwardSm90<kHeadDim>::workspace_bytes(const ForwardPass& pass) {
  const int64_t counter_bytes = forward_sm90_is_dynamic(pass.problem) ? kTileCounterBytesForwardSm90 : 0;
  return counter_bytes + mask_tables_of(pass.problem, nullptr).bytes() + span_tables_of(pass.problem, nullptr).bytes();
}

template <int kHeadDim>
void AttentionForwardSm90<kHeadDim>::run(const ForwardPass& pass, void* workspace, CUstream_st* stream) {
  unsigned* const tile_counter = forward_sm90_is_dynamic(pass.problem) ? static_cast<unsigned*>(workspace) : nullptr;
  // There is a mask or there is sparsity, never both.
  void* const at = tile_counter ? static_cast<char*>(workspace) + kTileCounterBytesForwardSm90 : workspace;
  const ForwardSm90Tables tables{mask_tables_of(pass.problem, at), span_tables_of(pass.problem, at)};
  fill_mask_tables(pass.problem, tables.mask, stream);
  fill_span_tables(pass.problem, tables.spans, stream, pass.problem.is_sparse() ? tile_counter : nullptr);
  forward_sm90_from_entry<kHeadDim>(pass.problem, tables, tile_counter, stream);
}

}  // namespace flash_online::cuda
