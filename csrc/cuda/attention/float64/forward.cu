// Attention forward in float64: FlashAttention-2's organisation on the tensor cores' double products.
// docs/design/attention_float64.md draws it.
#include "../../hw/launch.h"
#include "../common/max_logit.cuh"
#include "../common/tile_list.cuh"
#include "../kernels.h"
#include "tile.cuh"

namespace flash_online::cuda {

namespace float64 {
namespace {

struct ForwardArguments {
  AttentionProblem problem;
  TileList list;  // of queries
  TileTables tiles;
  double keep_scale;  // 1 / (1 - dropout)
};

// Clears the padding rows of one head around a packed sequence: out is 0 there, lse is -inf.
__device__ __forceinline__ void clear_padding(const AttentionProblem& problem, const TileCoord& tile) {
  const auto clear_before = [&](int64_t n) {
    const Rows rows = padding_rows(problem.query_starts, problem.batch, n, problem.queries, problem.total_queries);
    clear_rows(problem.out, tile.head, problem.head_dim_v, rows);
    for (int64_t r = threadIdx.x; problem.lse && r < rows.count; r += blockDim.x) {
      const int64_t index = tile.head * problem.lse_stride[1] + rows.begin + r;
      static_cast<double*>(problem.lse)[index] = lowest<double>();
      if (problem.lse_low) static_cast<double*>(problem.lse_low)[index] = 0;
    }
  };
  clear_before(tile.sequence);
  if (tile.sequence == problem.batch - 1) clear_before(problem.batch);
}

// Makes weights of a block's scores and adds their sums to the states of the lane's two rows. Where a maximum was raised, the
// outputs so far are rescaled.
__device__ __forceinline__ void softmax_step(Scores& scores, Outputs& out, State (&states)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    double block_max = lowest<double>();
#pragma unroll
    for (int j = 0; j < kBlock / 8; ++j)
      block_max = ::fmax(block_max, ::fmax(scores[0][j][2 * half], scores[0][j][2 * half + 1]));
    block_max = ::fmax(block_max, __shfl_xor_sync(~0u, block_max, 1));
    block_max = ::fmax(block_max, __shfl_xor_sync(~0u, block_max, 2));
    State& state = states[half];
    const double factor = state.raise_max_lazily(kRescaleThreshold, block_max);
    if (__any_sync(~0u, factor != 1)) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) out[0][j][2 * half] *= factor, out[0][j][2 * half + 1] *= factor;
    }
    double sum = 0;
#pragma unroll
    for (int j = 0; j < kBlock / 8; ++j)
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) sum += scores[0][j][e] = state.weight(scores[0][j][e]);
    state.add(sum);
  }
}

// Stores out and lse.
__device__ __forceinline__ void store_results(const ForwardArguments& arguments, const WorkTile& tile, int query,
                                              int first_column, const Outputs& out, State (&states)[2], double* stages) {
  const AttentionProblem& problem = arguments.problem;
  double factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    State& state = states[half];
    state.sum += __shfl_xor_sync(~0u, state.sum, 1);
    state.sum += __shfl_xor_sync(~0u, state.sum, 2);
    const double factor = problem.sinks ? state.absorb(static_cast<const double*>(problem.sinks)[tile.head]) : 1.0;
    factors[half] = factor * state.inverse_sum_or_zero() * arguments.keep_scale;
    const int row = query + warp_row() + 8 * half + quad();
    if (!problem.lse || first_column > 0 || lane_in_quad() > 0 || row >= tile.queries) continue;
    const int64_t index =
        tile.batch * problem.lse_stride[0] + tile.head * problem.lse_stride[1] + tile.sequence.queries.begin + row;
    static_cast<double*>(problem.lse)[index] = state.lse();
    if (problem.lse_low) static_cast<double*>(problem.lse_low)[index] = state.lse_low();
  }
  ResultRows(problem.out, tile.batch, tile.head, tile.sequence.queries.begin, problem.head_dim_v, first_column)
      .store(out, factors, query, tile.queries, stages);
}

// CTAs are an outer list of panels of the values' columns, kColumns each, with the list of tiles.
__global__ void __launch_bounds__(kMostThreads) attention_forward(const __grid_constant__ ForwardArguments arguments) {
  extern __shared__ __align__(16) double shared[];
  const AttentionProblem& problem = arguments.problem;
  const int64_t tiles = arguments.list.count();
  const int first_column = static_cast<int>(blockIdx.x / tiles) * kColumns, rows = tile_rows();
  const TileCoord coord = tile_coord(problem, arguments.list, blockIdx.x % tiles, false, rows, problem.visible.right >= 0);
  if (problem.query_starts && coord.block == 0 && first_column == 0) clear_padding(problem, coord);
  const WorkTile tile(problem, coord);
  if (tile.block < 0 || tile.block * rows >= tile.queries) return;
  const int query = static_cast<int>(tile.block) * rows, last_query = min(query + rows, tile.queries);
  const Visibility& visible = tile.sequence.visible;

  const HeadRows<double> query_rows(problem.query, tile.batch, tile.head, tile.sequence.queries.begin, problem.head_dim),
      key_rows(problem.key, tile.batch, tile.head / (problem.heads / problem.key_heads), tile.sequence.keys.begin,
               problem.head_dim),
      value_rows(problem.value, tile.batch, tile.head / (problem.heads / problem.value_heads), tile.sequence.keys.begin,
                 problem.head_dim_v, first_column);
  const int key_chunks = chunks_of(problem.head_dim), value_chunks = min(chunks_of(value_rows.columns), kColumns / kChunk);
  const auto load = [&](const KeyItems::Item& item, int step, double* stage) {
    if (step < key_chunks)
      load_chunk(stage, kPairPitch, kBlock, key_rows, item.key, tile.keys, step * kChunk);
    else
      load_chunk(stage, kColumnPitch, kBlock, value_rows, item.key, tile.keys, (step - key_chunks) * kChunk);
  };
  double* const query_tile = shared;
  const int pitch = row_tile_pitch(problem.head_dim);
  Walk walk(shared + rows * pitch, kStageDoubles, KeyItems(problem, arguments.tiles, tile, query, last_query),
            key_chunks + value_chunks, load);
  load_row_tile(query_tile, query_rows, query, tile.queries);
  walk.start();

  const DoubleScoreMod score_mod = DoubleScoreMod::of<double>(problem, tile.batch, tile.head);
  const HeadMasks masks(problem, tile.sequence, tile.batch, tile.head);
  const Dropout dropout(problem, tile.batch, tile.head);
  Outputs out;
  clear(out);
  State states[2];
  double largest = lowest<double>();  // score of the lane, if the maximum logit is wanted
  while (walk.item().exists) {
    const KeyItems::Item item = walk.item();
    Scores scores;
    clear(scores);
#pragma unroll 1
    for (int step = 0; step < key_chunks + value_chunks; ++step) {
      const double* const stage = walk.next_stage();
      if (step >= key_chunks) {
        multiply_columns(out, step - key_chunks, scores, stage);
        continue;
      }
      multiply_rows(scores, query_tile + warp_row() * pitch + step * kChunk, pitch, stage);
      if (step + 1 < key_chunks) continue;
      const ScoreBlock here{query, item.key, tile.queries, tile.keys,
                            all_see(visible, query, last_query, item.key, item.key + kBlock, tile.keys)};
      make_scores<false>(scores, warp_row(), score_mod, masks, item.clear, here, visible);
      if (problem.max_logit)
        for_each(scores, [&](double& x, int, int, int e) {
          const bool exists = query + warp_row() + e / 2 * 8 + quad() < tile.queries;
          if (exists && !(x <= largest) && largest == largest) largest = x;  // a NaN stays
        });
      softmax_step(scores, out, states);
      if (dropout) {
        const unsigned kept = kept_scores<false>(warp_row(), dropout, here);
        for_each(scores, [&](double& x, int, int j, int e) { x = is_kept(kept, j, e) ? x : 0; });
      }
    }
  }
  if (problem.max_logit)
    raise_max_logit(problem.max_logit + tile.batch * problem.heads + tile.head, static_cast<float>(largest));
  cp_async_wait();
  __syncthreads();  // all have done with the stages
  store_results(arguments, tile, query, first_column, out, states, shared + rows * pitch);
}

int row_bytes(const AttentionProblem& problem) { return row_tile_bytes(1, problem.head_dim); }

}  // namespace
}  // namespace float64

template <int kHeadDim>
const char* AttentionForwardFloat64<kHeadDim>::refusal(const ForwardPass& pass, const Gpu& gpu) {
  return float64::shared_bytes_of(1, float64::row_bytes(pass.problem)) > gpu.shared_bytes
             ? "the GPU has too little shared memory for this head dim"
             : nullptr;
}

template <int kHeadDim>
int64_t AttentionForwardFloat64<kHeadDim>::workspace_bytes(const ForwardPass& pass) {
  return tile_tables_of(pass.problem, nullptr).bytes();
}

template <int kHeadDim>
void AttentionForwardFloat64<kHeadDim>::run(const ForwardPass& pass, void* workspace, CUstream_st* stream) {
  const TileTables tiles = tile_tables_of(pass.problem, workspace);
  fill_tile_tables(pass.problem, tiles, stream);
  const float64::ForwardArguments arguments{
      .problem = pass.problem, .list = {}, .tiles = tiles, .keep_scale = float64::keep_scale(pass.problem)};
  float64::launch_tiles<float64::attention_forward>(arguments, false, pass.problem.heads, pass.problem.head_dim_v,
                                                    float64::row_bytes(pass.problem), stream);
}

template struct AttentionForwardFloat64<kFloat64HeadDim>;

}  // namespace flash_online::cuda
