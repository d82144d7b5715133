// dQ by itself, for results that repeat bit for bit: a CTA takes a tile of queries, its mainloop passes over blocks of keys,
// and no sum leaves the registers before it is whole.
#pragma once

#include "../../../core/visit.h"
#include "../../hw/launch.h"
#include "../../mma/gemm.cuh"
#include "../common/backward_workspace.cuh"
#include "../common/dropout.cuh"
#include "../common/scores.cuh"
#include "../common/store_rows.cuh"
#include "../common/tile_list.cuh"
#include "../common/visit_element.cuh"
#include "../kernels.h"
#include "load.cuh"
#include "tiles.h"
#include "variants.cuh"

namespace flash_online::cuda {

struct BackwardDqSm80Arguments {
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardWorkspace space;
  TileList list;  // of queries
  ScoreMod score_mod;
  float keep_scale;  // 1 / (1 - dropout)
};

// A CTA's pass. Members that run on the device stand in the order in which they are called.
template <class Element, int kHeadDim, Variant kVariant>
class BackwardDqSm80Kernel {
 public:
  static constexpr BackwardDqSm80Tile kTile = backward_dq_sm80_tile(kDigitsBytes<Element>, kHeadDim, kVariant);
  static constexpr int kThreads = kTile.threads(), kQueries = kTile.queries(), kKeys = kTile.keys, kColumns = kTile.columns;

  static int shared_bytes(const AttentionProblem& problem) {
    const int rows = !problem.mask.data ? 0 : problem.mask.stride[2] == 0 ? 1 : kQueries;
    return kTile.shared_bytes() + rows * mask_pitch(kKeys, static_cast<int>(size_of(problem.mask_dtype)));
  }

  __device__ __forceinline__ static void run(const BackwardDqSm80Arguments& arguments) {
    extern __shared__ __align__(16) char shared[];
    const AttentionProblem& problem = arguments.problem;
    // CTAs are an outer list of panels of dQ's columns, each with the list of tiles.
    const int64_t tiles = arguments.list.count(), panel = blockIdx.x / tiles;
    const WorkTile tile(problem,
                        tile_coord(problem, arguments.list, blockIdx.x % tiles, false, kQueries, problem.visible.right >= 0));
    if (tile.block < 0 || tile.block * kQueries >= tile.queries) return;
    BackwardDqSm80Kernel kernel(arguments, tile, static_cast<int>(panel) * kColumns, shared);
    // Accumulators are not members: the compiler would keep the other members in memory until loops are unrolled.
    DqAccumulator grad_query;
    kernel.mainloop(grad_query);
    kernel.epilogue(grad_query);
  }

 private:
  using Digit = typename Digits<Element>::Digit;
  using WideTile = SharedTile<Element, kHeadDim>;
  using DqAccumulator = Accumulator<1, kColumns / 8>;
  using Scores = Accumulator<1, kKeys / 8>;
  using Compensation = CompensatedAccumulator<Element, 1, kKeys / 8>;
  static constexpr int kQueryBytes = WideTile::bytes(kQueries), kKeyBytes = WideTile::bytes(kKeys);
  static constexpr int kBytes = 2 * kQueryBytes + 2 * kKeyBytes;
  static_assert(kBytes == kTile.shared_bytes());

  // ---- what a CTA works on -------------------------------------------------------------------------------------------------
  const BackwardDqSm80Arguments& arguments;
  const AttentionProblem& problem;
  const AttentionGradients& gradients;
  const int64_t batch, head;
  const Sequence sequence;
  const int queries, keys;  // the sequence's
  const int query, last_query;  // the tile's
  const int column;  // the first of dQ's

  const WideTile query_tile, grad_out_tile, key_tile, value_tile;
  MaskTile<kQueries, kKeys, kThreads> mask_tile;
  const HeadRows<Element> key_rows, value_rows;
  const HeadMask mask;
  const HeadScoreMod<Element> score_mod;
  const Dropout dropout;
  const int row;  // the warp's first in the tile

  const KeyRange range;
  const int end;
  KeyBlocks<kKeys> key_blocks;
  bool mask_is_clear;
  int block;

  __device__ __forceinline__ BackwardDqSm80Kernel(const BackwardDqSm80Arguments& arguments_, const WorkTile& tile, int column_,
                                                  char* shared)
      : arguments(arguments_),
        problem(arguments.problem),
        gradients(arguments.gradients),
        batch(tile.batch),
        head(tile.head),
        sequence(tile.sequence),
        queries(tile.queries),
        keys(tile.keys),
        query(static_cast<int>(tile.block) * kQueries),
        last_query(min(query + kQueries, queries)),
        column(column_),
        query_tile{reinterpret_cast<Digit*>(shared)},
        grad_out_tile{reinterpret_cast<Digit*>(shared + kQueryBytes)},
        key_tile{reinterpret_cast<Digit*>(shared + 2 * kQueryBytes)},
        value_tile{reinterpret_cast<Digit*>(shared + 2 * kQueryBytes + kKeyBytes)},
        mask_tile(shared + kBytes),
        key_rows(problem.key, batch, head / (problem.heads / problem.key_heads), sequence.keys.begin, problem.head_dim),
        value_rows(problem.value, batch, head / (problem.heads / problem.value_heads), sequence.keys.begin, problem.head_dim_v),
        mask(problem, batch, head),
        score_mod(score_mod_of_head<Element>(arguments.score_mod, problem, batch, head)),
        dropout(problem, batch, head),
        row(static_cast<int>(threadIdx.x) / kWarpSize * 16),
        range(keys_of_any(sequence.visible, query, last_query, keys)),
        end(range.end > range.begin ? static_cast<int>((range.end + kKeys - 1) / kKeys) : 0),
        key_blocks(problem, &arguments.space.tiles, batch, head, query, last_query, keys, static_cast<int>(range.begin / kKeys),
                   end),
        block(key_blocks.next(mask_is_clear)) {}

  // ---- loads ---------------------------------------------------------------------------------------------------------------
  __device__ __forceinline__ void load_queries() const {
    load<kQueries, kThreads>(
        query_tile, HeadRows<Element>(problem.query, batch, head, sequence.queries.begin, problem.head_dim), query, queries);
    load<kQueries, kThreads>(grad_out_tile,
                             HeadRows<Element>(gradients.grad_out, batch, head, sequence.queries.begin, problem.head_dim_v),
                             query, queries);
  }

  __device__ __forceinline__ void load_block() {
    if (block < end) {
      load<kKeys, kThreads>(key_tile, key_rows, block * kKeys, keys);
      load_values<kKeys, kThreads>(value_tile, value_rows, block * kKeys, keys, arguments.keep_scale);
      if (mask.data && !mask_is_clear) mask_tile.load(mask, query, queries, block * kKeys, keys);
    }
    cp_async_commit();
  }

  // The row statistics of the lane's two queries.
  struct RowStats {
    float lse[2], lse_low[2], delta[2], delta_low[2] = {};
  };
  __device__ __forceinline__ void read_row_stats(RowStats& stats) const {
    const int64_t first_block = first_row_block(problem, arguments.space.list, batch, head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = query + row + 8 * half + quad();
      const float* const from = arguments.space.row_stats + (first_block + at / kStatsRows) * kRowStats + at % kStatsRows;
      stats.lse[half] = from[0], stats.lse_low[half] = from[kStatsRows], stats.delta[half] = from[2 * kStatsRows];
      if (Compensation::kCompensated)
        stats.delta_low[half] = arguments.space.delta_low(first_block + at / kStatsRows)[at % kStatsRows];
    }
  }

  // ---- mainloop over blocks of keys ----------------------------------------------------------------------------------------
  __device__ __forceinline__ void mainloop(DqAccumulator& grad_query) {
    load_queries();
    load_block();
    RowStats stats;
    read_row_stats(stats);
    clear(grad_query);
    while (block < end) {
      const int key = block * kKeys;
      cp_async_wait();
      __syncthreads();  // the block is there
      Scores scores, grads;
      Compensation score_compensation, grad_compensation;
      clear(scores);
      multiply_rows(scores, score_compensation, query_tile, row, key_tile);
      clear(grads);
      multiply_rows<GemmOptions{.transposed = true}>(grads, grad_compensation, grad_out_tile, row,
                                                     value_tile);  // as delta's products are made: values by gradients
      const ScoreBlock here{query, key, queries, keys, all_see(sequence.visible, query, last_query, key, key + kKeys, keys)};
      subtract_deltas(grads, grad_compensation, here, stats);
      make_scores(scores, score_compensation, grads, here, stats);
      const float scale = score_mod.remaining_scale();
      for_each(grads, [&](float& x, int, int j, int e) {
        x *= FastBinary::exp(exponent_of<Compensation>(scores[0][j][e], score_compensation.low[0][j][e], scale,
                                                       stats.lse[e / 2], stats.lse_low[e / 2]));
      });
      multiply_accumulators(grad_query, grads, key_tile, column);
      __syncthreads();  // all have done with the block
      block = key_blocks.next(mask_is_clear);
      load_block();
    }
  }

  // Gradients of weights, dP, less delta.
  __device__ __forceinline__ void subtract_deltas(Scores& grads, Compensation& compensation, const ScoreBlock& here,
                                                  const RowStats& stats) const {
    if (dropout)
      drop_gradients<Element>(grads, compensation, draw_weights<false, 1, kKeys / 8>(row, dropout, here), arguments.keep_scale);
    clear_low_if_infinite(grads, compensation);
    for_each(grads, [&](float& x, int, int j, int e) {
      x = subtract_delta<Compensation>(x, compensation.low[0][j][e], stats.delta[e / 2], stats.delta_low[e / 2]);
    });
  }

  // Turns products into scores: score modification (its derivative multiplies `grads`), mask and visibility.
  __device__ __forceinline__ void make_scores(Scores& scores, Compensation& compensation, Scores& grads, const ScoreBlock& here,
                                              const RowStats& stats) const {
    if (score_mod.has_score_mod)
      apply_score_mod<false>(scores, row, score_mod, here, sequence.visible, TimesDerivative{grads}, &compensation);
    if (mask.data && !mask_is_clear)
      mask_scores<false>(
          scores, row, mask.dtype, score_mod.lowest_score, mask_tile, [&] { return fminf(stats.lse[0], stats.lse[1]); },
          &compensation);
    renormalize(scores, compensation);
    if (problem.is_sparse() && !mask_is_clear)
      hide_by_sparsity<false>(scores, row, HeadSparsity(problem, sequence, batch, head), here);
    if (!here.whole) hide_scores<false>(scores, row, here, sequence.visible);
  }

  // ---- epilogue ------------------------------------------------------------------------------------------------------------
  __device__ __forceinline__ void epilogue(DqAccumulator& grad_query) const {
    cp_async_wait();
    __syncthreads();  // the queries are there, if no key was: the gradients take their place
    const float scale = static_cast<float>(problem.scale);
    for_each(grad_query, [&](float& x, int, int, int) { x *= scale; });
    const MutableView4& view = gradients.grad_query;
    store_rows<Element>(grad_query, query_tile, 0, row,
                        static_cast<Element*>(view.data) + batch * view.stride[0] + head * view.stride[1] +
                            (sequence.queries.begin + query) * view.stride[2] + column * view.stride[3],
                        view.stride[2], view.stride[3], last_query - query, static_cast<int>(problem.head_dim) - column);
  }
};

template <class Element, int kHeadDim, Variant kVariant, class Kernel = BackwardDqSm80Kernel<Element, kHeadDim, kVariant>>
__global__ void __launch_bounds__(Kernel::kThreads)
    attention_backward_dq_sm80(const __grid_constant__ BackwardDqSm80Arguments arguments) {
  Kernel::run(arguments);
}

// Calls f(Type<Element>, VariantConstant) with the variant that fits into `room` bytes of shared memory per CTA, or the last.
template <int kHeadDim, class F>
void visit_backward_dq_sm80(const AttentionProblem& problem, F&& f, int room = shared_bytes_per_cta()) {
  visit_element(problem.dtype, [&]<class Element>(Type<Element> element) {
    if constexpr (has_backward_dq_sm80_tile(kDigitsBytes<Element>, kHeadDim, kSmall))
      if (BackwardDqSm80Kernel<Element, kHeadDim, kAll>::shared_bytes(problem) > room)
        return f(element, VariantConstant<kSmall>{});
    f(element, VariantConstant<kAll>{});
  });
}

template <int kHeadDim>
bool AttentionBackwardDqSm80<kHeadDim>::fits(const AttentionProblem& problem, const Gpu& gpu) {
  bool fits = false;
  visit_backward_dq_sm80<kHeadDim>(
      problem,
      [&]<class Element, Variant kVariant>(Type<Element>, VariantConstant<kVariant>) {
        fits = BackwardDqSm80Kernel<Element, kHeadDim, kVariant>::shared_bytes(problem) <= gpu.shared_bytes;
      },
      gpu.shared_bytes);
  return fits;
}

template <int kHeadDim>
void AttentionBackwardDqSm80<kHeadDim>::run(const BackwardPass& pass, const BackwardWorkspace& space, CUstream_st* stream) {
  const AttentionProblem& problem = pass.problem;
  visit_backward_dq_sm80<kHeadDim>(problem, [&]<class Element, Variant kVariant>(Type<Element>, VariantConstant<kVariant>) {
    using Kernel = BackwardDqSm80Kernel<Element, kHeadDim, kVariant>;
    const BackwardDqSm80Arguments arguments{
        .problem = problem,
        .gradients = pass.gradients,
        .space = space,
        .list = TileList::of(problem, false, problem.heads, Kernel::kQueries).by_length(problem.visible, sm_count()),
        .score_mod = ScoreMod(problem),
        .keep_scale = problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f,
    };
    const int64_t panels = (problem.head_dim + Kernel::kColumns - 1) / Kernel::kColumns;
    if (arguments.list.count() * panels == 0) return;
    launch<attention_backward_dq_sm80<Element, kHeadDim, kVariant>>(arguments, arguments.list.count() * panels,
                                                                    Kernel::kThreads, Kernel::shared_bytes(problem), stream);
  });
}

}  // namespace flash_online::cuda
