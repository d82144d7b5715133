// What attention's backward passes need of a row of queries beside its elements, and the workspace that holds it: made once,
// ahead of the passes. At the end of them, the sums that are the gradients of queries, and of sinks.
#pragma once

#include "mask_map.cuh"
#include "tile_list.cuh"

namespace flash_online::cuda {

constexpr int kStatsRows = 64;  // queries, whose numbers lie together

// [list.count()] blocks of three rows of kStatsRows numbers: a query's lse in base 2 as the sum of two floats, +inf (so that
// weights are 0) for one that sees nothing or does not exist; and what its scores' gradients have in common.
constexpr int kRowStats = 3 * kStatsRows;

// The workspace of a backward pass. Its pieces begin at multiples of 16 bytes.
struct BackwardWorkspace {
  TileList list;          // of all queries
  float* rows = nullptr;   // [list.count()][kRowStats]; of float32 [list.count()][kStatsRows] behind them: rest_of_delta
  float* sums =
      nullptr;  // [list.count()][kStatsRows * head_dim], in tiles of 16 x 8; null: nobody adds to gradients of queries
  double* sinks = nullptr;  // [list.count()]: parts of the gradient of sinks; null: not wanted
  float* mask_parts = nullptr;  // of the mask's gradient
  MaskMap map;
  int64_t head_dim = 0;  // of a tile
  int64_t bytes = 0;

  BackwardWorkspace(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t tile_head_dim, bool with_sums,
                    int64_t mask_part_count, void* workspace)
      : list(TileList::of(problem, false, problem.heads, kStatsRows)), map(mask_map_of(problem)), head_dim(tile_head_dim) {
    const auto carve = [&]<class T>(T*& pointer, int64_t count) {
      pointer = count > 0 ? reinterpret_cast<T*>(static_cast<char*>(workspace) + bytes) : nullptr;
      bytes += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    };
    carve(rows, list.count() * (kRowStats + (problem.dtype == DType::kFloat32 ? kStatsRows : 0)));
    carve(sums, with_sums ? list.count() * kStatsRows * head_dim : 0);
    carve(sinks, gradients.grad_sinks ? list.count() : 0);
    carve(mask_parts, mask_part_count);
    carve(map.data, map.count());
  }

  // What the queries of a block have in common, less the float of it that is in `rows`.
  FLASH_ONLINE_HD float* rest_of_delta(int64_t block) const { return rows + list.count() * kRowStats + block * kStatsRows; }
};

// The number of a sequence's first block in one head's part of a list of all queries' blocks.
__device__ __forceinline__ int64_t first_row_block(const AttentionProblem& problem, const TileList& list, int64_t sequence,
                                                   int64_t head) {
  if (!problem.query_starts) return (sequence * list.heads + head) * list.blocks;
  return head * list.blocks + clamp(problem.query_starts[sequence], 0, problem.total_queries) / kStatsRows + sequence;
}

// Fills space.rows and space.sinks, clears space.sums, the gradients of queries that no sequence owns, and the counter if there
// is one. The kernel behind may start before its end (launch, stream_order.cuh).
void prepare_backward(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                      CUstream_st* stream, unsigned* counter = nullptr);
// space.sums into the gradients of queries.
void finish_queries(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                    CUstream_st* stream);
// space.sinks into the gradients of sinks.
void finish_sinks(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                  CUstream_st* stream);

}  // namespace flash_online::cuda
