// A block of threads owns some neighbouring tiles of 64 x 64 of the mask. For each it makes the gradients of all scores that
// the tile was added to, one block of scores after another, in one order: softmax's part of the backward pass, two matrix
// products a block. The head dim passes by in chunks, so that one kernel serves them all; while one chunk is worked on the next
// one arrives, be it of another tile.
#include <algorithm>

#include "../common/mask_grad.h"
#include "../common/scores.cuh"
#include "load.cuh"

namespace flash_online::cuda {

namespace {

constexpr int kMaskTile = 64, kMaskWarps = 4, kMaskThreads = kMaskWarps * kWarpSize;

// What a tile of the mask is broadcast over: an extent of 1 where it is not.
struct Extents {
  int batch, heads, queries, keys;  // the latter two in blocks
  FLASH_ONLINE_HD int64_t count() const { return int64_t{batch} * heads * queries * keys; }

  Extents(const AttentionProblem& problem, const AttentionGradients& gradients)
      : batch(gradients.mask_size[0] == 1 ? static_cast<int>(problem.batch) : 1),
        heads(gradients.mask_size[1] == 1 ? static_cast<int>(problem.heads) : 1),
        queries(gradients.mask_size[2] == 1 ? static_cast<int>((problem.queries + kMaskTile - 1) / kMaskTile) : 1),
        keys(gradients.mask_size[3] == 1 ? static_cast<int>((problem.keys + kMaskTile - 1) / kMaskTile) : 1) {}
};

struct MaskGradientArguments {
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardWorkspace space;
  ScoreMod rule;
  float keep_scale;  // of dropout: 1 / (1 - p)
  Extents extents;
  int splits;  // of the sum over them
  int row_tiles, column_tiles;
  int columns_a_block;  // tiles, side by side
  int column_blocks;
};

template <class Element>
struct MaskGradient {
  // Of floats one product's operands are in shared memory at a time: scores are weights before the other product begins.
  static constexpr bool kByTurns = Fragments<Element>::kPieces > 1;
  static constexpr int kTiles = kByTurns ? 2 : 4, kChunk = kByTurns ? 32 : 64;  // of a stage; of the head dim
  using Tile = SharedTile<Element, kChunk>;
  using Sums = Accumulator<1, kMaskTile / 8>;
  using Rest = CompensatedAccumulator<Element, 1, kMaskTile / 8>;
  static constexpr int kTileBytes = Tile::bytes(kMaskTile), kStageBytes = kTiles * kTileBytes, kStages = 2;
  static constexpr int kSumBytes = kMaskWarps * kMaskTile * static_cast<int>(sizeof(float));
  static constexpr int kBytes = kStages * kStageBytes + kSumBytes;

  __device__ static void run(const MaskGradientArguments& arguments);

 private:
  // The sums of a tile into the gradient, or its part of the workspace. `column_sums` is shared memory of kSumBytes.
  __device__ static void finish(const MaskGradientArguments& arguments, Sums& sum, float* column_sums, int64_t split,
                                int64_t batch, int64_t head, int row_tile, int column_tile);
};

template <class Element>
__device__ __forceinline__ void MaskGradient<Element>::finish(const MaskGradientArguments& arguments, Sums& sum,
                                                              float* column_sums, int64_t split, int64_t batch, int64_t head,
                                                              int row_tile, int column_tile) {
  const AttentionGradients& gradients = arguments.gradients;
  const int64_t* const size = gradients.mask_size;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  bool mine = true;  // whether the thread has anything to write
  if (size[2] == 1) {  // over rows: sixteen of a warp, then the warps'
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
    __syncthreads();  // they have been read
    mine = warp == 0 && quad() == 0;
  }
  if (size[3] == 1) {  // over columns
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = 0;
#pragma unroll
      for (int j = 0; j < kMaskTile / 8; ++j) x += sum[0][j][2 * half] + sum[0][j][2 * half + 1];
      x += __shfl_xor_sync(~0u, x, 1);
      sum[0][0][2 * half] = x + __shfl_xor_sync(~0u, x, 2);
    }
    mine &= lane_in_quad() == 0;
  }
  if (!mine) return;

  const int64_t first_row = int64_t{row_tile} * kMaskTile, first_column = int64_t{column_tile} * kMaskTile;
  const int rows = static_cast<int>(min(size[2] - first_row, int64_t{kMaskTile})),
            columns = static_cast<int>(min(size[3] - first_column, int64_t{kMaskTile}));
  const int row = warp * 16 + quad(), column = 2 * lane_in_quad();
  const auto store = [&]<class T>(T* data, int64_t row_stride, int64_t column_stride, bool add) {
    const bool pairs =
        !add && column_stride == 1 && row_stride % 2 == 0 && reinterpret_cast<uintptr_t>(data) % (2 * sizeof(T)) == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= rows) break;
      T* const to = data + (row + 8 * half) * row_stride;
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
  };
  if (arguments.splits > 1) {
    float* const part = arguments.space.mask_parts +
                        (((split * size[0] + batch) * size[1] + head) * size[2] + first_row) * size[3] + first_column;
    return store(part, size[3], 1, false);
  }
  const MutableView4& to = gradients.grad_mask;
  const int64_t offset = batch * to.stride[0] + head * to.stride[1] + first_row * to.stride[2] + first_column * to.stride[3];
  visit_mask(gradients.grad_mask_dtype, [&]<class T>(T) {
    if constexpr (!std::is_same_v<T, bool>)
      store(static_cast<T*>(to.data) + offset, to.stride[2], to.stride[3], gradients.add_to_grad_mask);
  });
}

template <class Element>
__device__ __forceinline__ void MaskGradient<Element>::run(const MaskGradientArguments& arguments) {
  extern __shared__ __align__(16) char shared[];
  const AttentionProblem& problem = arguments.problem;
  const AttentionGradients& gradients = arguments.gradients;
  const MaskMap& map = arguments.space.map;
  const Extents& extents = arguments.extents;
  const int queries = static_cast<int>(problem.queries), keys = static_cast<int>(problem.keys);

  // Which tiles, and which part of what they are broadcast over.
  unsigned rest = blockIdx.x;
  const auto digit = [&](int64_t base) {
    const unsigned value = rest % static_cast<unsigned>(base);
    rest /= static_cast<unsigned>(base);
    return static_cast<int>(value);
  };
  const int first_tile = digit(arguments.column_blocks) * arguments.columns_a_block,
            last_tile = min(first_tile + arguments.columns_a_block, arguments.column_tiles);
  const int row_tile = digit(arguments.row_tiles), mask_head = digit(gradients.mask_size[1]),
            mask_batch = digit(gradients.mask_size[0]), split = static_cast<int>(rest);
  const int64_t first_item = extents.count() * split / arguments.splits,
                last_item = extents.count() * (split + 1) / arguments.splits;

  // A block of scores: of tile `tile`, number `item` of what that is broadcast over.
  struct Step {
    int tile;
    int64_t item;
    int batch, head, query, key;
  };
  const auto decode = [&](Step& step) {
    int64_t of = step.item;
    const int key_block = static_cast<int>(of % extents.keys),
              query_block = static_cast<int>((of /= extents.keys) % extents.queries);
    step.key = (key_block + step.tile) * kMaskTile;
    step.query = (query_block + row_tile) * kMaskTile;
    step.head = static_cast<int>((of /= extents.queries) % extents.heads) + mask_head;
    step.batch = static_cast<int>(of / extents.heads) + mask_batch;
  };
  // Whether arithmetic and the map leave something to see.
  const auto visible = [&](const Step& step) {
    const KeyRange range = keys_of_any(problem.visible, step.query, min(step.query + kMaskTile, queries), keys);
    if (range.end <= range.begin || range.end <= step.key || range.begin >= step.key + kMaskTile) return false;
    return !map.data || static_cast<MaskKind>(map.row(step.batch, step.head,
                                                      step.query / kMaskTile)[map.size[3] == 1 ? 0 : step.key / kMaskTile]) !=
                            MaskKind::kHidden;
  };
  // The first from `step` on that is visible; past the last tile if there is none.
  const auto fence_registers = [&](Step& step) {
    for (; step.tile < last_tile; ++step.tile, step.item = first_item)
      for (; step.item < last_item; ++step.item) {
        decode(step);
        if (visible(step)) return;
      }
  };

  const auto tile = [&](int stage, int n) {
    return Tile{reinterpret_cast<typename Tile::Piece*>(shared + stage * kStageBytes + n * kTileBytes)};
  };
  const auto chunks_of = [](int64_t width) { return max(1, static_cast<int>((width + kChunk - 1) / kChunk)); };
  const int score_chunks = chunks_of(problem.head_dim), grad_chunks = chunks_of(problem.head_dim_v),
            chunks = kByTurns ? score_chunks + grad_chunks : max(score_chunks, grad_chunks);
  // The chunk of gradients of outputs and of values that is loaded with that of queries and keys, or behind all of those.
  const auto grad_chunk = [&](int chunk) { return kByTurns ? chunk - score_chunks : chunk; };
  const auto has_chunk = [](int chunk, int64_t width) { return (!kByTurns || chunk >= 0) && chunk * kChunk < width; };
  // Starts copying a chunk.
  const int key_share = static_cast<int>(problem.heads) / static_cast<int>(problem.key_heads),
            value_share = static_cast<int>(problem.heads) / static_cast<int>(problem.value_heads);
  const auto load_chunk = [&](int stage, const Step& step, int chunk) {
    const auto one = [&](int n, const ConstView4& view, int head, int row, int rows, int64_t width, int of, float factor) {
      if (has_chunk(of, width))
        load_values<kMaskTile, kMaskThreads>(tile(stage, n), HeadRows<Element>(view, step.batch, head, 0, width, of * kChunk),
                                             row, rows, factor);
    };
    const int of = grad_chunk(chunk);
    one(0, problem.query, step.head, step.query, queries, problem.head_dim, chunk, 1);
    one(1, problem.key, step.head / key_share, step.key, keys, problem.head_dim, chunk, 1);
    one(kTiles - 2, gradients.grad_out, step.head, step.query, queries, problem.head_dim_v, of, 1);
    one(kTiles - 1, problem.value, step.head / value_share, step.key, keys, problem.head_dim_v, of, arguments.keep_scale);
  };

  // All that a tile is broadcast over sees the same values of the mask; the first block along a dimension has as many as any.
  const HeadMask mask(problem, mask_batch, mask_head);
  const int mask_bytes = (mask.row_stride == 0 ? 1 : kMaskTile) * mask_pitch(kMaskTile, mask.bytes);
  // Two buffers; the values lie alike in both, as a tile's width is a multiple of 16 bytes.
  MaskTile<kMaskTile, kMaskTile, kMaskThreads> mask_tile(shared + kBytes);
  const auto load_mask = [&](int buffer, int of_tile) {
    mask_tile = mask_tile.moved_to(shared + kBytes + buffer * mask_bytes);
    mask_tile.load(mask, row_tile * kMaskTile, queries, of_tile * kMaskTile, keys);
  };

  const int row = static_cast<int>(threadIdx.x) / kWarpSize * 16;
  Step step{first_tile, first_item, 0, 0, 0, 0};
  fence_registers(step);
  int stage = 0, buffer = 0;
  if (step.tile < last_tile) {
    load_mask(0, step.tile);
    load_chunk(0, step, 0);
  }
  cp_async_commit();

  for (int now = first_tile; now < last_tile; ++now) {
    Sums sum;
    clear(sum);
    while (step.tile == now) {
      Step next = step;
      ++next.item;
      fence_registers(next);
      const int64_t first_block = first_row_block(problem, arguments.space.list, step.batch, step.head);
      float high[2], low[2], delta[2], delta_low[2] = {};  // of the lane's two queries
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = step.query + row + 8 * half + quad();
        const float* const numbers = arguments.space.rows + (first_block + at / kStatsRows) * kRowStats + at % kStatsRows;
        high[half] = numbers[0], low[half] = numbers[kStatsRows], delta[half] = numbers[2 * kStatsRows];
        if (Rest::kCompensated) delta_low[half] = arguments.space.rest_of_delta(first_block + at / kStatsRows)[at % kStatsRows];
      }
      const auto for_chunks = [&](int begin, int end, auto&& multiply) {
        for (int chunk = begin; chunk < end; ++chunk, stage ^= 1) {
          cp_async_wait();
          __syncthreads();  // this chunk is there, and all have done with the one before
          if (chunk + 1 < chunks) {
            load_chunk(stage ^ 1, step, chunk + 1);
          } else if (next.tile < last_tile) {
            if (next.tile != now) load_mask(buffer ^ 1, next.tile);
            load_chunk(stage ^ 1, next, 0);
          }
          cp_async_commit();
          multiply(chunk);
        }
      };
      Sums scores, grads;
      const auto add_scores = [&](int chunk, Rest& rest) {
        if (has_chunk(chunk, problem.head_dim))
          multiply_rows_apart<Element, kChunk>(scores, rest, tile(stage, 0), row, tile(stage, 1));
      };
      const auto add_grads = [&](int chunk, Rest& rest) {
        if (has_chunk(grad_chunk(chunk), problem.head_dim_v))
          // delta is of values by gradients
          multiply_rows_apart<Element, kChunk, true>(grads, rest, tile(stage, kTiles - 2), row, tile(stage, kTiles - 1));
      };
      const auto here = [&] {
        return ScoreBlock{step.query, step.key, queries, keys,
                          step.query + kMaskTile <= queries && all_see(problem.visible, step.query, step.query + kMaskTile,
                                                                       step.key, step.key + kMaskTile, keys)};
      };
      const auto weigh = [&](Rest& rest, const ScoreBlock& block) {
        add_rest_unless_kept(scores, rest);
        const auto rule = score_mod_of_head<Element>(arguments.rule, problem, step.batch, step.head);
        apply_score_mod<false>(scores, row, rule, block, problem.visible, nullptr, &rest);
        mask_scores<false>(scores, row, mask.dtype, mask_tile.moved_to(shared + kBytes + buffer * mask_bytes), &rest);
        round_to_sum(scores, rest);
        if (!block.whole) hide_scores<false>(scores, row, block, problem.visible);
        for_each(scores, [&](float& x, int, int j, int e) {
          x = FastBinary::exp(exponent_of<Rest>(x, rest.sums[0][j][e], 1, high[e / 2], low[e / 2]));
        });
      };
      Rest grads_rest;
      const auto drop = [&](const ScoreBlock& block) {
        add_rest_unless_kept(grads, grads_rest);
        const Dropout dropout(problem, step.batch, step.head);
        if (dropout)
          drop_gradients<Element>(grads, grads_rest, draw_weights<false, 1, kMaskTile / 8>(row, dropout, block),
                                  arguments.keep_scale);
        without_infinite(grads, grads_rest);
      };
      clear(scores);
      clear(grads);
      if constexpr (kByTurns) {
        Rest scores_rest;
        for_chunks(0, score_chunks, [&](int chunk) { add_scores(chunk, scores_rest); });
        weigh(scores_rest, here());
        for_chunks(score_chunks, chunks, [&](int chunk) { add_grads(chunk, grads_rest); });
        drop(here());
      } else {
        for_chunks(0, chunks, [&](int chunk) { add_scores(chunk, grads_rest), add_grads(chunk, grads_rest); });
        const ScoreBlock block = here();
        drop(block);
        weigh(grads_rest, block);
      }
      for_each(sum, [&](float& x, int, int j, int e) {
        const float grad =
            scores[0][j][e] * less_delta<Rest>(grads[0][j][e], grads_rest.sums[0][j][e], delta[e / 2], delta_low[e / 2]);
        // What a row past the end holds may be NaN.
        x += step.query + row + e / 2 * 8 + quad() < queries ? grad : 0;
      });
      if (next.tile != now) buffer ^= 1;
      step = next;
    }
    finish(arguments, sum, reinterpret_cast<float*>(shared + kStages * kStageBytes), split, mask_batch, mask_head, row_tile,
           now);
  }
}

template <class Element>
__global__ void __launch_bounds__(kMaskThreads, sizeof(Element) == 2 ? 2 : 1)
    mask_gradient_tiles(const __grid_constant__ MaskGradientArguments arguments) {
  MaskGradient<Element>::run(arguments);
}

__global__ void __launch_bounds__(256) sum_mask_parts(const __grid_constant__ MaskGradientArguments arguments) {
  const AttentionGradients& gradients = arguments.gradients;
  const int64_t* const size = gradients.mask_size;
  const int64_t count = size[0] * size[1] * size[2] * size[3], index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (index >= count) return;
  float sum = 0;
  for (int64_t split = 0; split < arguments.splits; ++split) sum += arguments.space.mask_parts[split * count + index];
  int64_t rest = index, offset = 0;
  for (int i = 3; i >= 0; --i) {
    offset += rest % size[i] * gradients.grad_mask.stride[i];
    rest /= size[i];
  }
  visit_mask(gradients.grad_mask_dtype, [&]<class T>(T) {
    if constexpr (!std::is_same_v<T, bool>) {
      T* const at = static_cast<T*>(gradients.grad_mask.data) + offset;
      *at = narrow<T>(gradients.add_to_grad_mask ? widen(*at) + sum : sum);
    }
  });
}

}  // namespace

namespace {

int64_t tiles_of(int64_t size) { return (size + kMaskTile - 1) / kMaskTile; }

int64_t mask_tiles(const AttentionGradients& gradients) {
  const int64_t* size = gradients.mask_size;
  return size[0] * size[1] * tiles_of(size[2]) * tiles_of(size[3]);
}

// How many parts the sum over all that the mask is broadcast along is cut into, so that there is work for the whole device.
int64_t splits_of(const AttentionProblem& problem, const AttentionGradients& gradients) {
  const int64_t tiles = mask_tiles(gradients), wanted = 4 * int64_t{sm_count()}, items = Extents(problem, gradients).count();
  if (tiles == 0 || items == 0) return 1;
  const int64_t splits = 2 * tiles > wanted ? 1 : wanted / tiles;
  return splits < items ? splits : items;
}

}  // namespace

int64_t mask_gradient_parts(const AttentionProblem& problem, const AttentionGradients& gradients) {
  if (!gradients.grad_mask.data) return 0;
  const int64_t splits = splits_of(problem, gradients), *size = gradients.mask_size;
  return splits > 1 ? splits * size[0] * size[1] * size[2] * size[3] : 0;
}

void mask_gradient(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                   CUstream_st* stream) {
  const int64_t tiles = mask_tiles(gradients), *size = gradients.mask_size;
  if (tiles == 0) return;
  const int row_tiles = static_cast<int>(tiles_of(size[2])), column_tiles = static_cast<int>(tiles_of(size[3]));
  const int mask_rows = problem.mask.stride[2] == 0 ? 1 : kMaskTile;
  const int mask_bytes = mask_rows * mask_pitch(kMaskTile, static_cast<int>(size_of(problem.mask_dtype)));
  const auto run = [&]<class Element>(Element) {
    // As many tiles a block of threads as leave enough blocks for the device, several times; one, if there is no room for two.
    constexpr int64_t kMostTiles = 16;
    const bool room =
        MaskGradient<Element>::kBytes + 2 * mask_bytes <= device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>();
    const int64_t spare = tiles / (16 * int64_t{sm_count()}),
                  columns = room ? std::clamp<int64_t>(std::min<int64_t>(spare, column_tiles), 1, kMostTiles) : 1,
                  column_blocks = (column_tiles + columns - 1) / columns;
    const MaskGradientArguments arguments{problem,
                                          gradients,
                                          space,
                                          ScoreMod(problem),
                                          problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f,
                                          Extents(problem, gradients),
                                          static_cast<int>(splits_of(problem, gradients)),
                                          row_tiles,
                                          column_tiles,
                                          static_cast<int>(columns),
                                          static_cast<int>(column_blocks)};
    launch<mask_gradient_tiles<Element>>(arguments, size[0] * size[1] * row_tiles * column_blocks * arguments.splits,
                                         kMaskThreads, MaskGradient<Element>::kBytes + (columns > 1 ? 2 : 1) * mask_bytes,
                                         stream);
    if (arguments.splits > 1) {
      const int64_t count = size[0] * size[1] * size[2] * size[3];
      launch<sum_mask_parts>(arguments, (count + 255) / 256, 256, 0, stream);
    }
  };
  switch (problem.dtype) {
    case DType::kFloat16: run(__half{}); break;
    case DType::kBFloat16: run(__nv_bfloat16{}); break;
    default: run(float{});
  }
}

}  // namespace flash_online::cuda
