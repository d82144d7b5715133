// The gradient of a float mask: a CTA takes some neighbouring 64 x 64 tiles of the mask. For each it makes the gradients of all
// scores that the tile was added to, one block of scores after another, in one order: softmax's step of the backward pass, two
// matrix products per block. The head dim passes by in chunks, so that one kernel serves all head dims; while one chunk is
// worked on the next arrives, which may belong to another tile.
#include <algorithm>

#include "../../hw/launch.h"
#include "../../mma/gemm.cuh"
#include "../common/dropout.cuh"
#include "../common/scores.cuh"
#include "../common/visit_element.cuh"
#include "../masks/mask_grad.h"
#include "load.cuh"

namespace flash_online::cuda {

namespace {

constexpr int kMaskTile = 64, kMaskWarps = 4, kMaskThreads = kMaskWarps * kWarpSize;

// The numbers of batches, heads and blocks of queries and keys that a mask tile is broadcast over; 1 where it is not.
struct Extents {
  int batch, heads, queries, keys;  // queries and keys in blocks
  FLASH_ONLINE_HD int64_t count() const { return int64_t{batch} * heads * queries * keys; }

  Extents(const AttentionProblem& problem, const AttentionGradients& gradients)
      : batch(gradients.mask_size[0] == 1 ? static_cast<int>(problem.batch) : 1),
        heads(gradients.mask_size[1] == 1 ? static_cast<int>(problem.heads) : 1),
        queries(gradients.mask_size[2] == 1 ? static_cast<int>((problem.queries + kMaskTile - 1) / kMaskTile) : 1),
        keys(gradients.mask_size[3] == 1 ? static_cast<int>((problem.keys + kMaskTile - 1) / kMaskTile) : 1) {}
};

struct MaskGradSm80Arguments {
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardWorkspace space;
  ScoreMod score_mod;
  float keep_scale;  // 1 / (1 - dropout)
  Extents extents;
  int shares;  // CTAs that share the sum over the extents
  int row_tiles, column_tiles;  // of the mask
  int columns_per_cta;  // tiles, side by side
  int column_blocks;  // column_tiles / columns_per_cta, rounded up
};

// A block of scores: of the mask's tile `tile`, number `item` of what the tile is broadcast over.
struct TileStep {
  int tile;
  int64_t item;
  int batch, head, query, key;
};

// The tiles of the mask that a CTA has, its share of what they are broadcast over, and the order of its blocks of scores.
struct TileSteps {
  const AttentionProblem& problem;
  const TileTables& tables;
  const Extents& extents;
  int queries, keys;
  int first_tile, last_tile;  // along the mask's columns
  int row_tile, mask_head, mask_batch, share;
  int64_t first_item, last_item;

  __device__ __forceinline__ explicit TileSteps(const MaskGradSm80Arguments& arguments)
      : problem(arguments.problem),
        tables(arguments.space.tiles),
        extents(arguments.extents),
        queries(static_cast<int>(problem.queries)),
        keys(static_cast<int>(problem.keys)) {
    unsigned left = blockIdx.x;
    const auto digit = [&](int64_t base) {
      const unsigned value = left % static_cast<unsigned>(base);
      left /= static_cast<unsigned>(base);
      return static_cast<int>(value);
    };
    first_tile = digit(arguments.column_blocks) * arguments.columns_per_cta;
    last_tile = min(first_tile + arguments.columns_per_cta, arguments.column_tiles);
    row_tile = digit(arguments.row_tiles);
    mask_head = digit(arguments.gradients.mask_size[1]);
    mask_batch = digit(arguments.gradients.mask_size[0]);
    share = static_cast<int>(left);
    first_item = extents.count() * share / arguments.shares;
    last_item = extents.count() * (share + 1) / arguments.shares;
  }

  __device__ __forceinline__ void decode(TileStep& step) const {
    int64_t left = step.item;
    const int key_block = static_cast<int>(left % extents.keys),
              query_block = static_cast<int>((left /= extents.keys) % extents.queries);
    step.key = (key_block + step.tile) * kMaskTile;
    step.query = (query_block + row_tile) * kMaskTile;
    step.head = static_cast<int>((left /= extents.queries) % extents.heads) + mask_head;
    step.batch = static_cast<int>(left / extents.heads) + mask_batch;
  }

  // True if position, the mask map and sparsity leave a score visible.
  __device__ __forceinline__ bool is_visible(const TileStep& step) const {
    const KeyRange range = keys_of_any(problem.visible, step.query, min(step.query + kMaskTile, queries), keys);
    if (range.end <= range.begin || range.end <= step.key || range.begin >= step.key + kMaskTile) return false;
    const MaskMap& map = tables.map;
    if (map.data &&
        static_cast<MaskKind>(map.row(
            step.batch, step.head, step.query / kMaskTile)[map.size[3] == 1 ? 0 : step.key / kMaskTile]) == MaskKind::kHidden)
      return false;
    const TileSparsity sparsity(problem, tables.spans, step.batch, step.head);
    return sparsity.kind(step.query, min(step.query + kMaskTile, queries), step.key, min(step.key + kMaskTile, keys)) !=
           MaskKind::kHidden;
  }

  // Moves on to the first visible block from `step` on; past the last tile if there is none.
  __device__ __forceinline__ void advance_to_visible(TileStep& step) const {
    for (; step.tile < last_tile; ++step.tile, step.item = first_item)
      for (; step.item < last_item; ++step.item) {
        decode(step);
        if (is_visible(step)) return;
      }
  }
};

// A CTA's pass: run() calls the phases in the order in which they stand.
template <class Element>
class MaskGradSm80Kernel {
 public:
  // Floats leave room for the operands of one product: scores become weights before the other product begins.
  static constexpr bool kSequentialProducts = Fragments<Element>::kDigits > 1;
  static constexpr int kTiles = kSequentialProducts ? 2 : 4;  // of a stage
  static constexpr int kChunk = kSequentialProducts ? 32 : 64;  // of the head dim
  using Tile = SharedTile<Element, kChunk>;
  static constexpr int kTileBytes = Tile::bytes(kMaskTile), kStageBytes = kTiles * kTileBytes, kStages = 2;
  static constexpr int kSumBytes = kMaskWarps * kMaskTile * static_cast<int>(sizeof(float));
  static constexpr int kBytes = kStages * kStageBytes + kSumBytes;

  __device__ static void run(const MaskGradSm80Arguments& arguments);

 private:
  // [query][key] of one tile.
  using Scores = Accumulator<1, kMaskTile / 8>;
  using Compensation = CompensatedAccumulator<Element, 1, kMaskTile / 8>;

  __device__ __forceinline__ static int chunks_of(int64_t width) {
    return max(1, static_cast<int>((width + kChunk - 1) / kChunk));
  }
  __device__ __forceinline__ static bool has_chunk(int chunk, int64_t width) {
    return (!kSequentialProducts || chunk >= 0) && chunk * kChunk < width;
  }
  __device__ __forceinline__ static Tile tile(char* shared, int stage, int n) {
    return {reinterpret_cast<typename Tile::Digit*>(shared + stage * kStageBytes + n * kTileBytes)};
  }

  // Copies of chunks of the head dims. Without kSequentialProducts a chunk of queries and keys comes with one of gradients of
  // outputs and values, otherwise the latter follow all of the former.
  struct ChunkLoader {
    const MaskGradSm80Arguments& arguments;
    char* shared;
    int queries, keys, score_chunks, heads_per_key_head, heads_per_value_head;

    __device__ __forceinline__ int grad_chunk(int chunk) const { return kSequentialProducts ? chunk - score_chunks : chunk; }

    // Starts copying chunk `chunk` of all.
    __device__ __forceinline__ void load(int stage, const TileStep& step, int chunk) const {
      const AttentionProblem& problem = arguments.problem;
      const auto load_tile = [&](int n, const ConstView4& view, int head, int row, int rows, int64_t width, int at,
                                 float factor) {
        if (has_chunk(at, width))
          load_values<kMaskTile, kMaskThreads>(
              tile(shared, stage, n), HeadRows<Element>(view, step.batch, head, 0, width, at * kChunk), row, rows, factor);
      };
      const int at = grad_chunk(chunk);
      load_tile(0, problem.query, step.head, step.query, queries, problem.head_dim, chunk, 1);
      load_tile(1, problem.key, step.head / heads_per_key_head, step.key, keys, problem.head_dim, chunk, 1);
      load_tile(kTiles - 2, arguments.gradients.grad_out, step.head, step.query, queries, problem.head_dim_v, at, 1);
      load_tile(kTiles - 1, problem.value, step.head / heads_per_value_head, step.key, keys, problem.head_dim_v, at,
                arguments.keep_scale);
    }
  };

  // The row statistics of the lane's two queries.
  struct RowStats {
    float lse[2], lse_low[2], delta[2], delta_low[2] = {};
  };
  __device__ __forceinline__ static void read_row_stats(const MaskGradSm80Arguments& arguments, const TileStep& step, int row,
                                                        RowStats& stats) {
    const BackwardWorkspace& space = arguments.space;
    const int64_t first_block = first_row_block(arguments.problem, space.list, step.batch, step.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = step.query + row + 8 * half + quad();
      const float* const from = space.row_stats + (first_block + at / kStatsRows) * kRowStats + at % kStatsRows;
      stats.lse[half] = from[0], stats.lse_low[half] = from[kStatsRows], stats.delta[half] = from[2 * kStatsRows];
      if (Compensation::kCompensated) stats.delta_low[half] = space.delta_low(first_block + at / kStatsRows)[at % kStatsRows];
    }
  }

  __device__ __forceinline__ static ScoreBlock score_block(const AttentionProblem& problem, const TileStep& step, int queries,
                                                           int keys) {
    return {step.query, step.key, queries, keys,
            step.query + kMaskTile <= queries &&
                all_see(problem.visible, step.query, step.query + kMaskTile, step.key, step.key + kMaskTile, keys)};
  }

  // Weights of products: score modification, mask, visibility, exponential.
  template <class Mask>
  __device__ __forceinline__ static void make_weights(const MaskGradSm80Arguments& arguments, Scores& scores,
                                                      Compensation& compensation, const TileStep& step, const ScoreBlock& block,
                                                      int row, DType dtype, const Mask& mask, const RowStats& stats) {
    const AttentionProblem& problem = arguments.problem;
    add_low_unless_compensated(scores, compensation);
    const auto score_mod = score_mod_of_head<Element>(arguments.score_mod, problem, step.batch, step.head);
    apply_score_mod<false>(scores, row, score_mod, block, problem.visible, NoDerivative{}, &compensation);
    mask_scores<false>(
        scores, row, dtype, score_mod.lowest_score, mask, [&] { return fminf(stats.lse[0], stats.lse[1]); }, &compensation);
    renormalize(scores, compensation);
    if (problem.is_sparse())
      hide_by_sparsity<false>(scores, row, HeadSparsity(problem, sequence_of(problem, step.batch), step.batch, step.head),
                              block);
    if (!block.whole) hide_scores<false>(scores, row, block, problem.visible);
    for_each(scores, [&](float& x, int, int j, int e) {
      x = FastBinary::exp(exponent_of<Compensation>(x, compensation.low[0][j][e], 1, stats.lse[e / 2], stats.lse_low[e / 2]));
    });
  }

  // Gradients of weights, after dropout, of products.
  __device__ __forceinline__ static void finish_grads(const MaskGradSm80Arguments& arguments, Scores& grads,
                                                      Compensation& compensation, const TileStep& step, const ScoreBlock& block,
                                                      int row) {
    add_low_unless_compensated(grads, compensation);
    const Dropout dropout(arguments.problem, step.batch, step.head);
    if (dropout)
      drop_gradients<Element>(grads, compensation, draw_weights<false, 1, kMaskTile / 8>(row, dropout, block),
                              arguments.keep_scale);
    clear_low_if_infinite(grads, compensation);
  }

  // Adds gradients of scores, dS = P (dP - delta); `row` is the first of the warp's sixteen in the sequence.
  __device__ __forceinline__ static void add_grad_scores(Scores& sum, const Scores& weights, const Scores& grads,
                                                         const Compensation& compensation, const RowStats& stats, int row,
                                                         int queries) {
    for_each(sum, [&](float& x, int, int j, int e) {
      const float grad = weights[0][j][e] * subtract_delta<Compensation>(grads[0][j][e], compensation.low[0][j][e],
                                                                         stats.delta[e / 2], stats.delta_low[e / 2]);
      // A row past the end may hold NaN.
      x += row + e / 2 * 8 + quad() < queries ? grad : 0;
    });
  }

  // ---- epilogue of a tile: its sums into the gradient, or into their slot of the workspace ---------------------------------
  __device__ __forceinline__ static void finish_tile(const MaskGradSm80Arguments& arguments, Scores& sum, float* column_sums,
                                                     int64_t share, int64_t batch, int64_t head, int row_tile,
                                                     int column_tile) {
    const AttentionGradients& gradients = arguments.gradients;
    const int64_t* const size = gradients.mask_size;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    bool writes = true;  // whether the thread has a sum to write
    if (size[2] == 1) {
      sum_rows(sum, column_sums, warp);
      writes = warp == 0 && quad() == 0;
    }
    if (size[3] == 1) {
      sum_columns(sum);
      writes &= lane_in_quad() == 0;
    }
    if (!writes) return;

    const int64_t first_row = int64_t{row_tile} * kMaskTile, first_column = int64_t{column_tile} * kMaskTile;
    const int rows = static_cast<int>(min(size[2] - first_row, int64_t{kMaskTile})),
              columns = static_cast<int>(min(size[3] - first_column, int64_t{kMaskTile}));
    if (arguments.shares > 1) {
      float* const partial = arguments.space.mask_grad_partials +
                             (((share * size[0] + batch) * size[1] + head) * size[2] + first_row) * size[3] + first_column;
      return store_tile(sum, partial, size[3], 1, rows, columns, false);
    }
    const MutableView4& to = gradients.grad_mask;
    const int64_t offset = batch * to.stride[0] + head * to.stride[1] + first_row * to.stride[2] + first_column * to.stride[3];
    visit_mask(gradients.grad_mask_dtype, [&]<class T>(T) {
      if constexpr (!std::is_same_v<T, bool>)
        store_tile(sum, static_cast<T*>(to.data) + offset, to.stride[2], to.stride[3], rows, columns,
                   gradients.add_to_grad_mask);
    });
  }

  // For a mask of one row: sums a warp's sixteen rows, then those of all warps.
  __device__ __forceinline__ static void sum_rows(Scores& sum, float* column_sums, int warp) {
#pragma unroll
    for (int j = 0; j < kMaskTile / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x = sum[0][j][e] + sum[0][j][e + 2];
#pragma unroll
        for (int step = 4; step < kWarpSize; step *= 2) x += __shfl_xor_sync(~0u, x, step);
        if (quad() == 0) column_sums[warp * kMaskTile + 8 * j + 2 * lane_in_quad() + e] = x;
      }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kMaskTile / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x = 0;
        for (int w = 0; w < kMaskWarps; ++w) x += column_sums[w * kMaskTile + 8 * j + 2 * lane_in_quad() + e];
        sum[0][j][e] = x;
      }
    __syncthreads();  // the sums have been read
  }

  // For a mask of one column: sums the columns.
  __device__ __forceinline__ static void sum_columns(Scores& sum) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = 0;
#pragma unroll
      for (int j = 0; j < kMaskTile / 8; ++j) x += sum[0][j][2 * half] + sum[0][j][2 * half + 1];
      x += __shfl_xor_sync(~0u, x, 1);
      sum[0][0][2 * half] = x + __shfl_xor_sync(~0u, x, 2);
    }
  }

  // Stores rows and columns of a tile that exist, or adds them to what is there.
  template <class T>
  __device__ __forceinline__ static void store_tile(const Scores& sum, T* data, int64_t row_stride, int64_t column_stride,
                                                    int rows, int columns, bool add) {
    const int first = static_cast<int>(threadIdx.x) / kWarpSize * 16 + quad(), column = 2 * lane_in_quad();
    const bool pairs =
        !add && column_stride == 1 && row_stride % 2 == 0 && reinterpret_cast<uintptr_t>(data) % (2 * sizeof(T)) == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (first + 8 * half >= rows) break;
      T* const to = data + (first + 8 * half) * row_stride;
#pragma unroll
      for (int j = 0; j < kMaskTile / 8; ++j) {
        const int c = column + 8 * j;
        const float x = sum[0][j][2 * half], y = sum[0][j][2 * half + 1];
        if (pairs && c + 1 < columns) {
          if constexpr (sizeof(T) == 2)
            *reinterpret_cast<unsigned*>(to + c) = Fragments<T>::pair(x, y);
          else
            *reinterpret_cast<float2*>(to + c) = make_float2(x, y);
        } else {
          if (c < columns) to[c * column_stride] = narrow<T>(add ? widen(to[c * column_stride]) + x : x);
          if (c + 1 < columns) to[(c + 1) * column_stride] = narrow<T>(add ? widen(to[(c + 1) * column_stride]) + y : y);
        }
      }
    }
  }
};

template <class Element>
__device__ __forceinline__ void MaskGradSm80Kernel<Element>::run(const MaskGradSm80Arguments& arguments) {
  extern __shared__ __align__(16) char shared[];
  const AttentionProblem& problem = arguments.problem;
  const TileSteps steps(arguments);
  const int queries = steps.queries, keys = steps.keys, last_tile = steps.last_tile;
  const int score_chunks = chunks_of(problem.head_dim), grad_chunks = chunks_of(problem.head_dim_v),
            chunks = kSequentialProducts ? score_chunks + grad_chunks : max(score_chunks, grad_chunks);
  const int heads_per_key_head = static_cast<int>(problem.heads) / static_cast<int>(problem.key_heads),
            heads_per_value_head = static_cast<int>(problem.heads) / static_cast<int>(problem.value_heads);
  const ChunkLoader chunk_loader{arguments, shared, queries, keys, score_chunks, heads_per_key_head, heads_per_value_head};

  // All that a tile is broadcast over sees the same values of the mask; the first block along a dimension has as many as any.
  // The values lie alike in both buffers, as a tile's width is a multiple of 16 bytes.
  const HeadMask mask(problem, steps.mask_batch, steps.mask_head);
  const int mask_bytes = (mask.row_stride == 0 ? 1 : kMaskTile) * mask_pitch(kMaskTile, mask.bytes);
  MaskTile<kMaskTile, kMaskTile, kMaskThreads> mask_tile(shared + kBytes);
  const auto load_mask = [&](int buffer, int of_tile) {
    mask_tile = mask_tile.moved_to(shared + kBytes + buffer * mask_bytes);
    mask_tile.load(mask, steps.row_tile * kMaskTile, queries, of_tile * kMaskTile, keys);
  };

  const int row = static_cast<int>(threadIdx.x) / kWarpSize * 16;
  TileStep step{steps.first_tile, steps.first_item, 0, 0, 0, 0};
  steps.advance_to_visible(step);
  int stage = 0, buffer = 0;
  if (step.tile < last_tile) {
    load_mask(0, step.tile);
    chunk_loader.load(0, step, 0);
  }
  cp_async_commit();

  for (int now = steps.first_tile; now < last_tile; ++now) {
    Scores sum;
    clear(sum);
    while (step.tile == now) {
      TileStep next = step;
      ++next.item;
      steps.advance_to_visible(next);
      RowStats stats;
      read_row_stats(arguments, step, row, stats);
      // Calls multiply(chunk) for the chunks [begin, end), each while the next one, of this block or the next, is loaded.
      const auto for_chunks = [&](int begin, int end, auto&& multiply) {
        for (int chunk = begin; chunk < end; ++chunk, stage ^= 1) {
          cp_async_wait();
          __syncthreads();  // this chunk is there, and all have done with the one before
          if (chunk + 1 < chunks) {
            chunk_loader.load(stage ^ 1, step, chunk + 1);
          } else if (next.tile < last_tile) {
            if (next.tile != now) load_mask(buffer ^ 1, next.tile);
            chunk_loader.load(stage ^ 1, next, 0);
          }
          cp_async_commit();
          multiply(chunk);
        }
      };
      Scores scores, grads;
      const auto add_scores = [&](int chunk, Compensation& compensation) {
        if (has_chunk(chunk, problem.head_dim))
          multiply_rows_partial(scores, compensation, tile(shared, stage, 0), row, tile(shared, stage, 1));
      };
      // The gradients of weights are made as delta's products are: values by gradients.
      const auto add_grads = [&](int chunk, Compensation& compensation) {
        if (has_chunk(chunk_loader.grad_chunk(chunk), problem.head_dim_v))
          multiply_rows_partial<GemmOptions{.transposed = true}>(grads, compensation, tile(shared, stage, kTiles - 2), row,
                                                                 tile(shared, stage, kTiles - 1));
      };
      const auto here = [&] { return score_block(problem, step, queries, keys); };
      const auto exp_scores = [&](Compensation& compensation, const ScoreBlock& block) {
        make_weights(arguments, scores, compensation, step, block, row, mask.dtype,
                     mask_tile.moved_to(shared + kBytes + buffer * mask_bytes), stats);
      };
      Compensation grad_compensation;
      clear(scores);
      clear(grads);
      if constexpr (kSequentialProducts) {
        Compensation score_compensation;
        for_chunks(0, score_chunks, [&](int chunk) { add_scores(chunk, score_compensation); });
        exp_scores(score_compensation, here());
        for_chunks(score_chunks, chunks, [&](int chunk) { add_grads(chunk, grad_compensation); });
        finish_grads(arguments, grads, grad_compensation, step, here(), row);
      } else {
        for_chunks(0, chunks, [&](int chunk) { add_scores(chunk, grad_compensation), add_grads(chunk, grad_compensation); });
        const ScoreBlock block = here();
        finish_grads(arguments, grads, grad_compensation, step, block, row);
        exp_scores(grad_compensation, block);
      }
      add_grad_scores(sum, scores, grads, grad_compensation, stats, step.query + row, queries);
      if (next.tile != now) buffer ^= 1;
      step = next;
    }
    finish_tile(arguments, sum, reinterpret_cast<float*>(shared + kStages * kStageBytes), steps.share, steps.mask_batch,
                steps.mask_head, steps.row_tile, now);
  }
}

template <class Element>
__global__ void __launch_bounds__(kMaskThreads, sizeof(Element) == 2 ? 2 : 1)
    mask_grad_sm80(const __grid_constant__ MaskGradSm80Arguments arguments) {
  MaskGradSm80Kernel<Element>::run(arguments);
}

__global__ void __launch_bounds__(256) sum_mask_grad_partials(const __grid_constant__ MaskGradSm80Arguments arguments) {
  const AttentionGradients& gradients = arguments.gradients;
  const int64_t* const size = gradients.mask_size;
  const int64_t count = size[0] * size[1] * size[2] * size[3], index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (index >= count) return;
  float sum = 0;
  for (int64_t share = 0; share < arguments.shares; ++share) sum += arguments.space.mask_grad_partials[share * count + index];
  int64_t left = index, offset = 0;
  for (int i = 3; i >= 0; --i) {
    offset += left % size[i] * gradients.grad_mask.stride[i];
    left /= size[i];
  }
  visit_mask(gradients.grad_mask_dtype, [&]<class T>(T) {
    if constexpr (!std::is_same_v<T, bool>) {
      T* const at = static_cast<T*>(gradients.grad_mask.data) + offset;
      *at = narrow<T>(gradients.add_to_grad_mask ? widen(*at) + sum : sum);
    }
  });
}

int64_t tiles_of(int64_t size) { return (size + kMaskTile - 1) / kMaskTile; }

int64_t mask_tiles(const AttentionGradients& gradients) {
  const int64_t* size = gradients.mask_size;
  return size[0] * size[1] * tiles_of(size[2]) * tiles_of(size[3]);
}

// CTAs per tile: they share the sum over the broadcast dimensions, so that there is work for the whole device.
int64_t shares_of(const AttentionProblem& problem, const AttentionGradients& gradients) {
  const int64_t tiles = mask_tiles(gradients), wanted = 4 * int64_t{sm_count()}, items = Extents(problem, gradients).count();
  if (tiles == 0 || items == 0) return 1;
  const int64_t shares = 2 * tiles > wanted ? 1 : wanted / tiles;
  return shares < items ? shares : items;
}

}  // namespace

int64_t mask_gradient_partials(const AttentionProblem& problem, const AttentionGradients& gradients) {
  if (!gradients.grad_mask.data) return 0;
  const int64_t shares = shares_of(problem, gradients), *size = gradients.mask_size;
  return shares > 1 ? shares * size[0] * size[1] * size[2] * size[3] : 0;
}

void mask_gradient(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                   CUstream_st* stream) {
  const int64_t tiles = mask_tiles(gradients), *size = gradients.mask_size;
  if (tiles == 0) return;
  const int row_tiles = static_cast<int>(tiles_of(size[2])), column_tiles = static_cast<int>(tiles_of(size[3]));
  const int mask_rows = problem.mask.stride[2] == 0 ? 1 : kMaskTile;
  const int mask_bytes = mask_rows * mask_pitch(kMaskTile, static_cast<int>(size_of(problem.mask_dtype)));
  const auto run = [&]<class Element>(Type<Element>) {
    // A CTA takes as many tiles as leave 16 CTAs per SM; one, if shared memory has no room for two buffers of the mask.
    constexpr int64_t kMostTiles = 16;
    const bool room = MaskGradSm80Kernel<Element>::kBytes + 2 * mask_bytes <= shared_bytes_per_cta();
    const int64_t spare = tiles / (16 * int64_t{sm_count()}),
                  columns = room ? std::clamp<int64_t>(std::min<int64_t>(spare, column_tiles), 1, kMostTiles) : 1,
                  column_blocks = (column_tiles + columns - 1) / columns;
    const MaskGradSm80Arguments arguments{
        .problem = problem,
        .gradients = gradients,
        .space = space,
        .score_mod = ScoreMod(problem),
        .keep_scale = problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f,
        .extents = Extents(problem, gradients),
        .shares = static_cast<int>(shares_of(problem, gradients)),
        .row_tiles = row_tiles,
        .column_tiles = column_tiles,
        .columns_per_cta = static_cast<int>(columns),
        .column_blocks = static_cast<int>(column_blocks),
    };
    launch<mask_grad_sm80<Element>>(arguments, size[0] * size[1] * row_tiles * column_blocks * arguments.shares, kMaskThreads,
                                    MaskGradSm80Kernel<Element>::kBytes + (columns > 1 ? 2 : 1) * mask_bytes, stream);
    if (arguments.shares > 1) {
      const int64_t count = size[0] * size[1] * size[2] * size[3];
      launch<sum_mask_grad_partials>(arguments, (count + 255) / 256, 256, 0, stream);
    }
  };
  visit_element(problem.dtype, run);
}

}  // namespace flash_online::cuda
