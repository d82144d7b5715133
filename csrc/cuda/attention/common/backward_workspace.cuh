// The workspace of the attention backward passes, and the pre-pass and the post-passes that fill and read it. The pre-pass
// computes the row statistics; the post-passes convert the dQ accumulator to dQ and reduce the gradient of the sinks.
#pragma once

#include "../../../core/scratch.h"
#include "../large_rows/large_rows.cuh"
#include "../masks/visible_blocks.cuh"
#include "../sm90/tile_cuts.h"
#include "tile_list.cuh"

namespace flash_online::cuda {

constexpr int kStatsRows = 64;  // queries per tile of row statistics

// Floats per tile of row statistics: three rows of kStatsRows. The first two are lse in base 2 as a sum of two floats, +inf for
// a query that sees no key, does not exist or is left to LargeRows, so that its weights are 0. The third is delta.
constexpr int kRowStats = 3 * kStatsRows;

// A tile's row statistics as the right operand of a product that subtracts them from scores or from dP (sm90/backward). Its
// numbers are -lse, in the units of the scores' product, and -delta, each as a sum of bf16 digits in as many rows of k:
// four for lse, which hold what two floats do, and two for delta, since the output that it is made of has 16 bits. The left
// operand is 1 in one statistic's rows and 0 in others. As 0 times infinity is NaN, an infinite lse is stored as a large
// number, and a product reads delta's rows only if it subtracts them.
struct StatsOperand {
  static constexpr int kDelta = 0, kDeltaDigits = 2, kLse = 2, kLseDigits = 4, kRows = 10;  // rows of k; the last four are 0
  static constexpr int kColumns = 8, kRowBytes = 16, kGroupBytes = kRows * kRowBytes;
  uint16_t bits[kStatsRows / kColumns][kRows][kColumns];
};

struct BackwardWorkspace {
  TileList list;  // tiles of kStatsRows queries
  float* row_stats = nullptr;  // [list.count()][kRowStats]; for float32 followed by [list.count()][kStatsRows]: delta_low
  StatsOperand* stats_operand = nullptr;  // [list.count()], in place of row_stats
  float* dq_accum = nullptr;  // [list.count()][kStatsRows * head_dim], in tiles of 16 x 8; null: not wanted
  double* sink_partials = nullptr;  // [list.count()], each tile's share of the gradient of its head's sink; null: not wanted
  float* mask_grad_partials = nullptr;  // see mask_grad.h
  LargeRows large_rows;
  TileTables tiles;
  int64_t head_dim = 0;  // of dq_accum: the kernel's, not the problem's
  int64_t bytes = 0;

  // workspace: memory of `bytes` bytes, aligned to 16, or null to compute `bytes`.
  BackwardWorkspace(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t tile_head_dim,
                    bool with_dq_accum, int64_t mask_grad_partial_count, void* workspace, bool stats_as_operand = false)
      : list(TileList::of(problem, false, problem.heads, kStatsRows)), head_dim(tile_head_dim) {
    ScratchAllocator scratch(workspace);
    if (stats_as_operand)
      stats_operand = scratch.take<StatsOperand>(list.count());
    else
      row_stats = scratch.take<float>(list.count() * (kRowStats + (problem.dtype == DType::kFloat32 ? kStatsRows : 0)));
    dq_accum = scratch.take<float>(with_dq_accum ? list.count() * kStatsRows * head_dim : 0);
    sink_partials = scratch.take<double>(gradients.grad_sinks ? list.count() : 0);
    mask_grad_partials = scratch.take<float>(mask_grad_partial_count);
    large_rows = LargeRows(scratch, list.count());
    tiles = tile_tables_of(problem, scratch.take<char>(tile_tables_of(problem, nullptr).bytes()));
    bytes = scratch.bytes();
  }

  // float32 problems only: the rounding error of delta in float, for the kStatsRows queries of a tile.
  FLASH_ONLINE_HD float* delta_low(int64_t tile) const { return row_stats + list.count() * kRowStats + tile * kStatsRows; }
};

// dK and dV of work tiles of keys that are cut into parts (tile_cuts.h). Each part has a slot for its float32 sums, its
// partial. These are added in the order of the parts, so that dK and dV repeat bit for bit.
struct KvGradPartials {
  TileList list = {};  // of keys; its heads are the kv_grad_heads
  bool reversed = false;  // tile_coord's
  TileCuts cuts;
  int keys = 0;  // per tile
  int head_dim = 0, head_dim_v = 0;  // of a slot: the kernel's, not the problem's
  float* data = nullptr;  // [cuts.parts()][slot_size()]: dK, then dV, in tiles of 16 x 8 as dq_accum

  FLASH_ONLINE_HD int64_t slot_size() const { return int64_t{keys} * (head_dim + head_dim_v); }
  FLASH_ONLINE_HD int64_t count() const { return cuts.parts() * slot_size(); }
};

__device__ __forceinline__ ConstView4 as_const(const MutableView4& view) {
  return {view.data, {view.stride[0], view.stride[1], view.stride[2], view.stride[3]}};
}

// The index in a list of tiles of kStatsRows queries of the first tile of a sequence and head.
__device__ __forceinline__ int64_t first_row_block(const AttentionProblem& problem, const TileList& list, int64_t sequence,
                                                   int64_t head) {
  if (!problem.query_starts) return (sequence * list.heads + head) * list.blocks;
  return head * list.blocks + clamp(problem.query_starts[sequence], 0, problem.total_queries) / kStatsRows + sequence;
}

// The pre-pass: computes space.row_stats or space.stats_operand, and space.sink_partials; marks space.large_rows; zeros
// space.dq_accum, the padding rows of grad_query, and `counter` unless it is null. A dependent launch (pdl.cuh) may follow it.
// scaled_weights: the statistics are for weights that dropout has scaled by 1 / (1 - p): log2(1 - p) is added to lse, and delta
// is multiplied by 1 - p, since dS of a dropped weight is -weight * delta without that scale.
void prepare_backward(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                      CUstream_st* stream, unsigned* counter = nullptr, bool scaled_weights = false);
// Writes space.dq_accum, times the scale of the scores, to grad_query; and the sums of `partials` to grad_key and grad_value.
void convert_dq_accum(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                      CUstream_st* stream, const KvGradPartials& partials = {});
// Sums space.sink_partials to grad_sinks.
void reduce_sink_partials(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                          CUstream_st* stream);

}  // namespace flash_online::cuda
