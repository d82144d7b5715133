// The gradients of queries by themselves, for results that repeat bit for bit: a block of threads owns a block of queries, the
// keys pass by, and no sum leaves the registers until it is whole.
#pragma once

#include "../../../core/visit.h"
#include "../common/backward_workspace.cuh"
#include "../common/scores.cuh"
#include "load.cuh"
#include "tiles.h"

namespace flash_online::cuda {

struct BackwardQueriesArguments {
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardWorkspace space;
  TileList list;    // of queries
  ScoreMod rule;
  float keep_scale;  // of dropout: 1 / (1 - p)
};

template <class Element, int kHeadDim>
struct BackwardQueriesOnSm80 {
  static constexpr BackwardQueriesSm80 kTile = backward_queries_sm80_tile(kSplitBytes<Element>, kHeadDim);
  static constexpr int kThreads = 32 * kTile.warps, kQueries = 16 * kTile.warps, kKeys = kTile.keys, kColumns = kTile.columns;
  using Piece = typename Split<Element>::Piece;
  using WideTile = SharedTile<Element, kHeadDim>;
  static constexpr int kQueryBytes = WideTile::bytes(kQueries), kKeyBytes = WideTile::bytes(kKeys);
  static constexpr int kBytes = 2 * kQueryBytes + 2 * kKeyBytes;

  static int shared_bytes(const AttentionProblem& problem) {
    const int rows = !problem.mask.data ? 0 : problem.mask.stride[2] == 0 ? 1 : kQueries;
    return kBytes + rows * mask_pitch(kKeys, static_cast<int>(size_of(problem.mask_dtype)));
  }

  __device__ static void run(const BackwardQueriesArguments& arguments);
};

template <class Element, int kHeadDim>
__device__ __forceinline__ void BackwardQueriesOnSm80<Element, kHeadDim>::run(const BackwardQueriesArguments& arguments) {
  extern __shared__ __align__(16) char shared[];
  const AttentionProblem& problem = arguments.problem;
  const AttentionGradients& gradients = arguments.gradients;

  // Where: an outer list of pieces of the columns, each with the list of blocks.
  const int64_t blocks = arguments.list.count(), piece = blockIdx.x / blocks;
  const TileCoord place = tile_coord(problem, arguments.list, blockIdx.x % blocks, false, kQueries, problem.visible.right >= 0);
  const int64_t batch = place.sequence, head = place.head;
  const Sequence sequence = sequence_of(problem, batch);
  const int queries = static_cast<int>(sequence.queries.count), keys = static_cast<int>(sequence.keys.count);
  if (place.block < 0 || place.block * kQueries >= queries) return;
  const int query = static_cast<int>(place.block) * kQueries, last_query = min(query + kQueries, queries);
  const int column = static_cast<int>(piece) * kColumns;

  const WideTile query_tile{reinterpret_cast<Piece*>(shared)}, grad_out_tile{reinterpret_cast<Piece*>(shared + kQueryBytes)},
      key_tile{reinterpret_cast<Piece*>(shared + 2 * kQueryBytes)},
      value_tile{reinterpret_cast<Piece*>(shared + 2 * kQueryBytes + kKeyBytes)};
  MaskTile<kQueries, kKeys, kThreads> mask_tile(shared + kBytes);

  const HeadRows<Element> key_rows(problem.key, batch, head / (problem.heads / problem.key_heads), sequence.keys.begin,
                                   problem.head_dim);
  const HeadRows<Element> value_rows(problem.value, batch, head / (problem.heads / problem.value_heads), sequence.keys.begin,
                                     problem.head_dim_v);
  const HeadMask mask(problem, batch, head);
  const auto rule = score_mod_of_head<Element>(arguments.rule, problem, batch, head);
  const Dropout dropout(problem, batch, head);
  const int row = static_cast<int>(threadIdx.x) / kWarpSize * 16;  // the warp's first, in the block

  const KeyRange range = keys_of_any(sequence.visible, query, last_query, keys);
  const int end = range.end > range.begin ? static_cast<int>((range.end + kKeys - 1) / kKeys) : 0;
  KeyBlocks<kQueries, kKeys> key_blocks(arguments.space.map, batch, head, query, queries, static_cast<int>(range.begin / kKeys),
                                        end);
  bool nothing_hidden;
  int block = key_blocks.next(nothing_hidden);
  const auto load_block = [&] {
    if (block < end) {
      load<kKeys, kThreads>(key_tile, key_rows, block * kKeys, keys);
      load_values<kKeys, kThreads>(value_tile, value_rows, block * kKeys, keys, arguments.keep_scale);
      if (mask.data && !nothing_hidden) mask_tile.load(mask, query, queries, block * kKeys, keys);
    }
    cp_async_commit();
  };
  load<kQueries, kThreads>(query_tile, HeadRows<Element>(problem.query, batch, head, sequence.queries.begin, problem.head_dim),
                           query, queries);
  load<kQueries, kThreads>(grad_out_tile,
                           HeadRows<Element>(gradients.grad_out, batch, head, sequence.queries.begin, problem.head_dim_v),
                           query, queries);
  load_block();

  using Rest = CompensatedAccumulator<Element, 1, kKeys / 8>;
  float high[2], low[2], delta[2], delta_low[2] = {};  // of the lane's two queries
  const int64_t first_block = first_row_block(problem, arguments.space.list, batch, head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = query + row + 8 * half + quad();
    const float* const numbers = arguments.space.rows + (first_block + at / kStatsRows) * kRowStats + at % kStatsRows;
    high[half] = numbers[0], low[half] = numbers[kStatsRows], delta[half] = numbers[2 * kStatsRows];
    if (Rest::kCompensated) delta_low[half] = arguments.space.rest_of_delta(first_block + at / kStatsRows)[at % kStatsRows];
  }
  Accumulator<1, kColumns / 8> grad_query;
  clear(grad_query);

  while (block < end) {
    const int key = block * kKeys;
    cp_async_wait();
    __syncthreads();  // the block is there
    Accumulator<1, kKeys / 8> scores, grads;
    Rest scores_rest, grads_rest;
    clear(scores);
    multiply_rows<Element, kHeadDim>(scores, scores_rest, query_tile, row, key_tile);
    clear(grads);
    multiply_rows<Element, kHeadDim, true>(grads, grads_rest, grad_out_tile, row,
                                           value_tile);  // delta is of values by gradients

    const ScoreBlock here{query, key, queries, keys, all_see(sequence.visible, query, last_query, key, key + kKeys, keys)};
    if (dropout)
      drop_gradients<Element>(grads, grads_rest, draw_weights<false, 1, kKeys / 8>(row, dropout, here), arguments.keep_scale);
    without_infinite(grads, grads_rest);
    for_each(grads, [&](float& x, int, int j, int e) {
      x = less_delta<Rest>(x, grads_rest.sums[0][j][e], delta[e / 2], delta_low[e / 2]);
    });
    if (rule.has_score_mod) apply_score_mod<false>(scores, row, rule, here, sequence.visible, &grads, &scores_rest);
    if (mask.data && !nothing_hidden) mask_scores<false>(scores, row, mask.dtype, mask_tile, &scores_rest);
    round_to_sum(scores, scores_rest);
    if (!here.whole) hide_scores<false>(scores, row, here, sequence.visible);
    const float factor = rule.remaining_scale();
    for_each(grads, [&](float& x, int, int j, int e) {
      x *= FastBinary::exp(exponent_of<Rest>(scores[0][j][e], scores_rest.sums[0][j][e], factor, high[e / 2], low[e / 2]));
    });
    multiply_accumulators<Element>(grad_query, grads, key_tile, column);
    __syncthreads();  // all have done with the block
    block = key_blocks.next(nothing_hidden);
    load_block();
  }
  cp_async_wait();
  __syncthreads();  // the queries are there, if no key was: the gradients take their place

  const float scale = static_cast<float>(problem.scale);
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) grad_query[0][j][e] *= scale;
  const MutableView4& view = gradients.grad_query;
  store_rows<Element>(grad_query, query_tile, 0, row,
                      static_cast<Element*>(view.data) + batch * view.stride[0] + head * view.stride[1] +
                          (sequence.queries.begin + query) * view.stride[2] + column * view.stride[3],
                      view.stride[2], view.stride[3], last_query - query, static_cast<int>(problem.head_dim) - column);
}

template <class Element, int kHeadDim, class Body = BackwardQueriesOnSm80<Element, kHeadDim>>
__global__ void __launch_bounds__(Body::kThreads)
    attention_backward_queries_sm80(const __grid_constant__ BackwardQueriesArguments arguments) {
  Body::run(arguments);
}

template <int kHeadDim, class F>
void visit_backward_queries_sm80(const AttentionProblem& problem, F&& f) {
  switch (problem.dtype) {
    case DType::kFloat16: return f(Type<__half>{});
    case DType::kBFloat16: return f(Type<__nv_bfloat16>{});
    default: f(Type<float>{});
  }
}

template <int kHeadDim>
void backward_queries_sm80(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                           CUstream_st* stream) {
  visit_backward_queries_sm80<kHeadDim>(problem, [&]<class Element>(Type<Element>) {
    using Body = BackwardQueriesOnSm80<Element, kHeadDim>;
    const BackwardQueriesArguments arguments{problem,
                                             gradients,
                                             space,
                                             TileList::of(problem, false, problem.heads, Body::kQueries),
                                             ScoreMod(problem),
                                             problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f};
    const int64_t pieces = (problem.head_dim + Body::kColumns - 1) / Body::kColumns;
    if (arguments.list.count() * pieces == 0) return;
    launch<attention_backward_queries_sm80<Element, kHeadDim>>(arguments, arguments.list.count() * pieces, Body::kThreads,
                                                               Body::shared_bytes(problem), stream);
  });
}

template <int kHeadDim>
int backward_queries_sm80_shared_bytes(const AttentionProblem& problem) {
  int bytes = 0;
  visit_backward_queries_sm80<kHeadDim>(
      problem, [&]<class Element>(Type<Element>) { bytes = BackwardQueriesOnSm80<Element, kHeadDim>::shared_bytes(problem); });
  return bytes;
}

}  // namespace flash_online::cuda
