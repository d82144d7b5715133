// Attention backward in float64: dQ by CTAs that own queries, dK and dV by CTAs that own keys. No sum leaves its CTA before it
// is whole, so that results repeat bit for bit. docs/design/attention_float64.md draws it.
#include "../../hw/launch.h"
#include "../kernels.h"
#include "backward.cuh"

namespace flash_online::cuda {

namespace float64 {
namespace {

// ---- row statistics and the gradient of sinks ------------------------------------------------------------------------------

constexpr int kRowThreads = 256;

// A warp per query.
__global__ void __launch_bounds__(kRowThreads) row_stats(const __grid_constant__ BackwardArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const AttentionGradients& gradients = arguments.gradients;
  const int64_t rows = Workspace::rows_per_head(problem);
  const int64_t at = (blockIdx.x * int64_t{kRowThreads} + threadIdx.x) / kWarpSize;
  if (at >= (problem.query_starts ? 1 : problem.batch) * problem.heads * rows) return;
  const int64_t row = at % rows, head = at / rows % problem.heads, batch = at / rows / problem.heads;
  const auto row_of = [&](const auto& view) {
    return static_cast<const double*>(view.data) + batch * view.stride[0] + head * view.stride[1] + row * view.stride[2];
  };
  const double *const out = row_of(problem.out), *const grad_out = row_of(gradients.grad_out);
  double sum = 0;
  for (int64_t c = lane(); c < problem.head_dim_v; c += kWarpSize)
    sum += out[c * problem.out.stride[3]] * grad_out[c * gradients.grad_out.stride[3]];
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane() > 0) return;
  const int64_t index = batch * problem.lse_stride[0] + head * problem.lse_stride[1] + row;
  const double lse = static_cast<const double*>(problem.lse)[index];
  const bool is_empty = lse == lowest<double>();
  arguments.space.lse[at] = is_empty ? -lse : lse;
  arguments.space.lse_low[at] = problem.lse_low ? static_cast<const double*>(problem.lse_low)[index] : 0;
  if (gradients.grad_lse) sum -= static_cast<const double*>(gradients.grad_lse)[index];
  arguments.space.delta[at] = is_empty ? 0 : sum;
}

// A CTA per head of a sequence sums over its queries, in a fixed order.
__global__ void __launch_bounds__(kRowThreads) sink_gradient(const __grid_constant__ BackwardArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const int64_t batch = blockIdx.x / problem.heads, head = blockIdx.x % problem.heads;
  const Sequence sequence = sequence_of(problem, batch);
  const int64_t first = Workspace::first_query(problem, batch, head, sequence);
  const double sink = static_cast<const double*>(problem.sinks)[head];
  double sum = 0;
  for (int64_t n = threadIdx.x; n < sequence.queries.count; n += kRowThreads) {
    const RowStats stats(arguments.space, first + n, true);
    sum -= stats.weight(sink) * stats.delta;
  }
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  __shared__ double partials[kRowThreads / kWarpSize];
  if (lane() == 0) partials[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  sum = 0;
  for (const double partial : partials) sum += partial;
  static_cast<double*>(arguments.gradients.grad_sinks)[blockIdx.x] = sum;
}

// ---- a tile's own rows -----------------------------------------------------------------------------------------------------

// The location of a tile's own rows: all of them in shared memory from `rows` to `end`; or, if the CTA streams them, one chunk
// of columns in each pipeline stage, after the block's chunk.
struct OwnRows {
  double *rows, *end;
  int pitch;
  bool streams;
  __device__ __forceinline__ OwnRows(double* from, bool streams_rows, int64_t columns)
      : rows(from),
        end(from + (streams_rows ? 0 : tile_rows() * row_tile_pitch(columns))),
        pitch(streams_rows ? kPairPitch : row_tile_pitch(columns)),
        streams(streams_rows) {}
  // The warp's rows, columns of chunk `chunk`.
  __device__ __forceinline__ const double* chunk(int chunk, const double* stage) const {
    return (streams ? stage + kStageDoubles : rows + chunk * kChunk) + warp_row() * pitch;
  }
};
__device__ __forceinline__ int stage_doubles(const BackwardArguments& arguments) {
  return kStageDoubles + (arguments.streams_rows ? tile_rows() * kPairPitch : 0);
}

// ---- dQ --------------------------------------------------------------------------------------------------------------------

// CTAs are an outer list of panels of dQ's columns, with the list of tiles of queries.
__global__ void __launch_bounds__(kMostThreads) query_gradient(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(16) double shared[];
  const AttentionProblem& problem = arguments.problem;
  const AttentionGradients& gradients = arguments.gradients;
  const int64_t tiles = arguments.list.count();
  const int first_column = static_cast<int>(blockIdx.x / tiles) * kColumns, rows = tile_rows();
  const TileCoord coord = tile_coord(problem, arguments.list, blockIdx.x % tiles, false, rows, problem.visible.right >= 0);
  if (problem.query_starts && coord.block == 0 && first_column == 0) {
    const auto clear_before = [&](int64_t n) {
      clear_rows(gradients.grad_query, coord.head, problem.head_dim,
                 padding_rows(problem.query_starts, problem.batch, n, problem.queries, problem.total_queries));
    };
    clear_before(coord.sequence);
    if (coord.sequence == problem.batch - 1) clear_before(problem.batch);
  }
  const WorkTile tile(problem, coord);
  if (tile.block < 0 || tile.block * rows >= tile.queries) return;
  const int query = static_cast<int>(tile.block) * rows, last_query = min(query + rows, tile.queries);
  const Visibility& visible = tile.sequence.visible;

  const int64_t key_head = tile.head / (problem.heads / problem.key_heads),
                value_head = tile.head / (problem.heads / problem.value_heads), first_key = tile.sequence.keys.begin;
  const HeadRows<double> key_rows(problem.key, tile.batch, key_head, first_key, problem.head_dim),
      value_rows(problem.value, tile.batch, value_head, first_key, problem.head_dim_v),
      query_rows(problem.query, tile.batch, tile.head, tile.sequence.queries.begin, problem.head_dim),
      grad_rows(gradients.grad_out, tile.batch, tile.head, tile.sequence.queries.begin, problem.head_dim_v);
  const int score_chunks = chunks_of(problem.head_dim), grad_chunks = chunks_of(problem.head_dim_v),
            out_chunks = min(score_chunks - first_column / kChunk, kColumns / kChunk), steps = score_chunks + grad_chunks;
  const auto load = [&](const KeyItems::Item& item, int step, double* stage) {
    const bool is_value = step >= score_chunks && step < steps;
    const int column = step < score_chunks ? step * kChunk
                       : is_value          ? (step - score_chunks) * kChunk
                                           : first_column + (step - steps) * kChunk;
    load_chunk(stage, step < steps ? kPairPitch : kColumnPitch, kBlock, is_value ? value_rows : key_rows, item.key, tile.keys,
               column);
    if (arguments.streams_rows && step < steps)
      load_chunk(stage + kStageDoubles, kPairPitch, rows, is_value ? grad_rows : query_rows, query, tile.queries, column);
  };
  const OwnRows query_tile(shared, arguments.streams_rows, problem.head_dim),
      grad_tile(query_tile.end, arguments.streams_rows, problem.head_dim_v);
  double* const stages = grad_tile.end;
  Walk walk(stages, stage_doubles(arguments), KeyItems(problem, arguments.space.tiles, tile, query, last_query),
            steps + out_chunks, load);
  if (!arguments.streams_rows) {
    load_row_tile(query_tile.rows, query_rows, query, tile.queries);
    load_row_tile(grad_tile.rows, grad_rows, query, tile.queries);
  }
  walk.start();

  const DoubleScoreMod score_mod = DoubleScoreMod::of<double>(problem, tile.batch, tile.head);
  const HeadMasks masks(problem, tile.sequence, tile.batch, tile.head);
  const Dropout dropout(problem, tile.batch, tile.head);
  const int row = query + warp_row() + quad();
  const int64_t first_query = Workspace::first_query(problem, tile.batch, tile.head, tile.sequence);
  const RowStats stats[2] = {{arguments.space, first_query + row, row < tile.queries},
                             {arguments.space, first_query + row + 8, row + 8 < tile.queries}};
  Outputs out;
  clear(out);
  while (walk.item().exists) {
    const KeyItems::Item item = walk.item();
    Scores scores, grads;
    clear(scores);
    clear(grads);
#pragma unroll 1
    for (int step = 0; step < steps + out_chunks; ++step) {
      const double* const stage = walk.next_stage();
      if (step < score_chunks) {
        multiply_rows(scores, query_tile.chunk(step, stage), query_tile.pitch, stage);
        continue;
      }
      if (step >= steps) {
        multiply_columns(out, step - steps, grads, stage);
        continue;
      }
      multiply_rows(grads, grad_tile.chunk(step - score_chunks, stage), grad_tile.pitch, stage);
      if (step + 1 < steps) continue;
      const ScoreBlock here{query, item.key, tile.queries, tile.keys,
                            all_see(visible, query, last_query, item.key, item.key + kBlock, tile.keys)};
      if (dropout) drop_gradients(grads, kept_scores<false>(warp_row(), dropout, here), arguments.keep_scale);
      for_each(grads, [&](double& x, int, int, int e) { x -= stats[e / 2].delta; });
      make_scores<false>(scores, warp_row(), score_mod, masks, item.clear, here, visible,
                         [&](int i, int j, int e, double x) { grads[i][j][e] *= x; });
      for_each(grads, [&](double& x, int i, int j, int e) { x *= stats[e / 2].weight(scores[i][j][e]); });
    }
  }
  cp_async_wait();
  __syncthreads();  // all have done with the stages
  const double factors[2] = {problem.scale, problem.scale};
  ResultRows(gradients.grad_query, tile.batch, tile.head, tile.sequence.queries.begin, problem.head_dim, first_column)
      .store(out, factors, query, tile.queries, stages);
}

// ---- dK and dV -------------------------------------------------------------------------------------------------------------

// One of dK (kKey) and dV. CTAs are an outer list of panels of its columns, with the list of tiles of keys. Scores are
// transposed, [key][query].
template <bool kKey>
__global__ void __launch_bounds__(kMostThreads) key_gradient(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(16) double shared[];
  const AttentionProblem& problem = arguments.problem;
  const AttentionGradients& gradients = arguments.gradients;
  const MutableView4& result = kKey ? gradients.grad_key : gradients.grad_value;
  const int64_t tiles = arguments.list.count(), columns = kKey ? problem.head_dim : problem.head_dim_v;
  const int first_column = static_cast<int>(blockIdx.x / tiles) * kColumns, rows = tile_rows();
  const TileCoord coord = tile_coord(problem, arguments.list, blockIdx.x % tiles, true, rows, problem.visible.right < 0);
  if (problem.query_starts && coord.block == 0 && first_column == 0) {
    const auto clear_before = [&](int64_t n) {
      clear_rows(result, coord.head, columns,
                 padding_rows(problem.key_starts, problem.batch, n, problem.keys, problem.total_keys));
    };
    clear_before(coord.sequence);
    if (coord.sequence == problem.batch - 1) clear_before(problem.batch);
  }
  const WorkTile tile(problem, coord);  // its head is one of kv_grad_heads
  if (tile.block < 0 || tile.block * rows >= tile.keys) return;
  const int key = static_cast<int>(tile.block) * rows, last_key = min(key + rows, tile.keys);
  const Visibility& visible = tile.sequence.visible;
  const int heads = static_cast<int>(problem.heads / gradients.kv_grad_heads);
  const int64_t first_head = tile.head * heads, first_row = tile.sequence.queries.begin, first_key = tile.sequence.keys.begin;
  const HeadRows<double> key_rows(problem.key, tile.batch, first_head / (problem.heads / problem.key_heads), first_key,
                                  problem.head_dim),
      value_rows(problem.value, tile.batch, first_head / (problem.heads / problem.value_heads), first_key, problem.head_dim_v);

  const int score_chunks = chunks_of(problem.head_dim), grad_chunks = kKey ? chunks_of(problem.head_dim_v) : 0,
            steps = score_chunks + grad_chunks, out_chunks = min(chunks_of(columns) - first_column / kChunk, kColumns / kChunk);
  const auto load = [&](const QueryItems::Item& item, int step, double* stage) {
    const bool is_grad = kKey ? step >= score_chunks && step < steps : step >= steps;
    const int column = step < score_chunks ? step * kChunk
                       : step < steps      ? (step - score_chunks) * kChunk
                                           : first_column + (step - steps) * kChunk;
    const HeadRows<double> from(is_grad ? gradients.grad_out : problem.query, tile.batch, first_head + item.head, first_row,
                                is_grad ? problem.head_dim_v : problem.head_dim);
    load_chunk(stage, step < steps ? kPairPitch : kColumnPitch, kBlock, from, item.query, tile.queries, column);
    if (arguments.streams_rows && step < steps)
      load_chunk(stage + kStageDoubles, kPairPitch, rows, is_grad ? value_rows : key_rows, key, tile.keys, column);
  };
  const OwnRows key_tile(shared, arguments.streams_rows, problem.head_dim),
      value_tile(key_tile.end, arguments.streams_rows || !kKey, problem.head_dim_v);  // dV needs no values
  double* const stages = value_tile.end;
  Walk walk(stages, stage_doubles(arguments),
            QueryItems(problem, arguments.space.tiles, tile, first_head, heads, key, last_key,
                       queries_of_any(visible, key, last_key, tile.queries)),
            steps + out_chunks, load);
  if (!arguments.streams_rows) {
    load_row_tile(key_tile.rows, key_rows, key, tile.keys);
    if (kKey) load_row_tile(value_tile.rows, value_rows, key, tile.keys);
  }
  walk.start();
  Outputs out;
  clear(out);
  while (walk.item().exists) {
    const QueryItems::Item item = walk.item();
    const int64_t head = first_head + item.head;
    Scores scores, grads;
    clear(scores);
    if (kKey) clear(grads);
#pragma unroll 1
    for (int step = 0; step < steps + out_chunks; ++step) {
      const double* const stage = walk.next_stage();
      if (step >= steps) {
        multiply_columns(out, step - steps, scores, stage);
        continue;
      }
      if (step < score_chunks)
        multiply_rows(scores, key_tile.chunk(step, stage), key_tile.pitch, stage);
      else
        multiply_rows(grads, value_tile.chunk(step - score_chunks, stage), value_tile.pitch, stage);
      if (step + 1 < steps) continue;
      const Dropout dropout(problem, tile.batch, head);
      const ScoreBlock here{
          item.query, key, tile.queries, tile.keys,
          item.query + kBlock <= tile.queries && all_see(visible, item.query, item.query + kBlock, key, last_key, tile.keys)};
      const unsigned kept = dropout ? kept_scores<true>(warp_row(), dropout, here) : ~0u;
      const int64_t first_query = Workspace::first_query(problem, tile.batch, head, tile.sequence) + item.query;
      const auto exists = [&](int query) { return item.query + query < tile.queries; };
      if constexpr (kKey) {
        if (dropout) drop_gradients(grads, kept, arguments.keep_scale);
        for_each_score<true>(grads, 0, [&](int i, int j, int e, int query, int) {
          if (exists(query)) grads[i][j][e] -= arguments.space.delta[first_query + query];
        });
      }
      make_scores<true>(scores, warp_row(), DoubleScoreMod::of<double>(problem, tile.batch, head),
                        HeadMasks(problem, tile.sequence, tile.batch, head), item.clear, here, visible,
                        [&](int i, int j, int e, double x) {
                          if constexpr (kKey) grads[i][j][e] *= x;
                        });
      for_each_score<true>(scores, 0, [&](int i, int j, int e, int query, int) {
        const double weight = RowStats(arguments.space, first_query + query, exists(query)).weight(scores[i][j][e]);
        scores[i][j][e] = kKey ? weight * grads[i][j][e] : is_kept(kept, j, e) ? weight : 0;
      });
    }
  }
  cp_async_wait();
  __syncthreads();  // all have done with the stages
  const double factor = kKey ? problem.scale : arguments.keep_scale, factors[2] = {factor, factor};
  ResultRows(result, tile.batch, tile.head, first_key, columns, first_column).store(out, factors, key, tile.keys, stages);
}

// ---- launches --------------------------------------------------------------------------------------------------------------

// Bytes of a streamed row: a chunk of it in each pipeline stage.
constexpr int kStreamedRowBytes = kStages * kPairPitch * static_cast<int>(sizeof(double));

// Launches a general kernel. Its tile takes `row_bytes` bytes per row if it stays in shared memory, and it does if that leaves
// room for as many warps.
template <auto kKernel>
void launch_one(BackwardArguments arguments, bool over_keys, int64_t heads, int64_t columns, int row_bytes,
                CUstream_st* stream) {
  const int shared_bytes = shared_bytes_per_cta();
  const int64_t rows = over_keys ? arguments.problem.keys : arguments.problem.queries;
  arguments.streams_rows = shared_bytes_of(1, row_bytes) > shared_bytes ||
                           warps_for(rows, kStreamedRowBytes, shared_bytes) > warps_for(rows, row_bytes, shared_bytes);
  launch_tiles<kKernel>(arguments, over_keys, heads, columns, arguments.streams_rows ? kStreamedRowBytes : row_bytes, stream);
}

void launch_gradients(const BackwardArguments& arguments, CUstream_st* stream) {
  const AttentionProblem& problem = arguments.problem;
  const int64_t heads = arguments.gradients.kv_grad_heads;
  const int narrow = row_tile_bytes(1, problem.head_dim), wide = narrow + row_tile_bytes(1, problem.head_dim_v);
  launch_one<query_gradient>(arguments, false, problem.heads, problem.head_dim, wide, stream);
  launch_one<key_gradient<true>>(arguments, true, heads, problem.head_dim, wide, stream);
  launch_one<key_gradient<false>>(arguments, true, heads, problem.head_dim_v, narrow, stream);
}

}  // namespace
}  // namespace float64

template <int kHeadDim>
const char* AttentionBackwardFloat64<kHeadDim>::refusal(const BackwardPass&, const Gpu& gpu) {
  return float64::shared_bytes_of(1, float64::kStreamedRowBytes) > gpu.shared_bytes ? "the GPU has too little shared memory"
                                                                                    : nullptr;
}

template <int kHeadDim>
int64_t AttentionBackwardFloat64<kHeadDim>::workspace_bytes(const BackwardPass& pass) {
  return float64::Workspace(pass.problem, float64::mask_grad_partials(pass.problem, pass.gradients), nullptr).bytes;
}

template <int kHeadDim>
void AttentionBackwardFloat64<kHeadDim>::run(const BackwardPass& pass, void* workspace, CUstream_st* stream) {
  using namespace float64;
  const AttentionProblem& problem = pass.problem;
  const AttentionGradients& gradients = pass.gradients;
  const BackwardArguments arguments{.problem = problem,
                                    .gradients = gradients,
                                    .space = Workspace(problem, mask_grad_partials(problem, gradients), workspace),
                                    .list = {},
                                    .streams_rows = false,
                                    .keep_scale = keep_scale(problem)};
  fill_tile_tables(problem, arguments.space.tiles, stream);
  const int64_t queries = Workspace::query_count(problem);
  if (queries > 0) launch<row_stats>(arguments, ceil_div(queries, int64_t{kRowThreads / kWarpSize}), kRowThreads, 0, stream);
  launch_gradients(arguments, stream);
  if (gradients.grad_sinks && problem.batch * problem.heads > 0)
    launch<sink_gradient>(arguments, problem.batch * problem.heads, kRowThreads, 0, stream);
  if (gradients.grad_mask.data) mask_gradient(arguments, stream);
}

template struct AttentionBackwardFloat64<kFloat64HeadDim>;

}  // namespace flash_online::cuda
