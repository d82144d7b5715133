// What float64's backward kernels share: the workspace, and its row statistics.
#pragma once

#include "../../../core/scratch.h"
#include "../common/tile_list.cuh"
#include "tile.cuh"

namespace flash_online::cuda::float64 {

struct Workspace {
  // One number per query, [heads, rows] of each batch index. lse is +inf for a query that sees no key, so that its weights are
  // 0; delta is the sum of grad_out * out, less the gradient of lse.
  double *lse = nullptr, *lse_low = nullptr, *delta = nullptr;
  double* mask_grad_partials = nullptr;  // see mask_grad_partials()
  TileTables tiles;
  int64_t bytes = 0;

  // memory: null to compute `bytes`.
  Workspace(const AttentionProblem& problem, int64_t mask_grad_partial_count, void* memory) {
    ScratchAllocator scratch(memory);
    const int64_t count = query_count(problem);
    lse = scratch.take<double>(count);
    lse_low = scratch.take<double>(count);
    delta = scratch.take<double>(count);
    mask_grad_partials = scratch.take<double>(mask_grad_partial_count);
    tiles = tile_tables_of(problem, scratch.take<char>(tile_tables_of(problem, nullptr).bytes()));
    bytes = scratch.bytes();
  }

  FLASH_ONLINE_HD static int64_t rows_per_head(const AttentionProblem& problem) {
    return problem.query_starts ? problem.total_queries : problem.queries;
  }
  static int64_t query_count(const AttentionProblem& problem) {
    return (problem.query_starts ? 1 : problem.batch) * problem.heads * rows_per_head(problem);
  }
  // Where a sequence's first query of a head is.
  __device__ __forceinline__ static int64_t first_query(const AttentionProblem& problem, int64_t batch, int64_t head,
                                                        const Sequence& sequence) {
    return ((problem.query_starts ? 0 : batch) * problem.heads + head) * rows_per_head(problem) + sequence.queries.begin;
  }
};

struct BackwardArguments {
  AttentionProblem problem;
  AttentionGradients gradients;
  Workspace space;
  TileList list;  // of queries or of keys
  bool streams_rows;  // whether a tile's own rows come in chunks, too, since shared memory has no room for all
  double keep_scale;  // 1 / (1 - dropout)
};

// The statistics of one query; of one that does not exist, such that its weights are 0.
struct RowStats {
  double lse = -lowest<double>(), lse_low = 0, delta = 0;
  __device__ __forceinline__ RowStats(const Workspace& space, int64_t at, bool exists) {
    if (exists) lse = space.lse[at], lse_low = space.lse_low[at], delta = space.delta[at];
  }
  __device__ __forceinline__ double weight(double score) const { return Natural::exp((score - lse) - lse_low); }
};

// Gradients of all weights, of those after dropout.
__device__ __forceinline__ void drop_gradients(Scores& grads, unsigned kept, double keep_scale) {
  for_each(grads, [&](double& x, int, int j, int e) { x = is_kept(kept, j, e) ? x * keep_scale : 0; });
}

// The blocks of kBlock queries that may see a tile of keys, of each head that shares it.
struct QueryItems {
  struct Item {
    int head;  // counts from the first
    int query;  // the first
    bool clear;  // the mask and sparsity hide and add nothing here
    bool exists;
  };
  using Blocks = QueryBlocks<kBlock>;
  const AttentionProblem& problem;
  const TileTables& tables;
  int64_t batch, first_head;
  int key, last_key, queries, begin, end, heads, head = 0;
  Blocks blocks;

  __device__ __forceinline__ QueryItems(const AttentionProblem& problem_, const TileTables& tables_, const WorkTile& tile,
                                        int64_t first_head_, int heads_, int key_, int last_key_, const QueryRange& range)
      : problem(problem_),
        tables(tables_),
        batch(tile.batch),
        first_head(first_head_),
        key(key_),
        last_key(last_key_),
        queries(tile.queries),
        begin(static_cast<int>(range.begin / kBlock)),
        end(range.end > range.begin ? static_cast<int>(ceil_div(min(range.end, int64_t{tile.queries}), int64_t{kBlock})) : 0),
        heads(heads_),
        blocks(problem, &tables, batch, first_head, key, last_key, queries, begin, end) {}
  __device__ __forceinline__ Item next() {
    for (;;) {
      bool clear;
      const int block = blocks.next(clear);
      if (block < end) return {head, block * kBlock, clear, true};
      if (head + 1 >= heads) return {head, 0, false, false};
      ++head;
      blocks = Blocks(problem, &tables, batch, first_head + head, key, last_key, queries, begin, end);
    }
  }
};

// The gradient of a float mask.
int64_t mask_grad_partials(const AttentionProblem& problem, const AttentionGradients& gradients);
void mask_gradient(const BackwardArguments& arguments, CUstream_st* stream);

}  // namespace flash_online::cuda::float64
