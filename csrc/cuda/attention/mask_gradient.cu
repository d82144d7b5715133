// A block of threads owns a tile of 64 x 64 of the mask, and makes the gradients of all scores that it was added to, one block of
// scores after another, in one order: softmax's part of the backward pass, two matrix products a block. The head dim passes by in
// chunks, so that one kernel serves them all.
#include "mask_gradient.cuh"

#include "load.cuh"
#include "scores.cuh"

namespace flash_online::cuda {

namespace {

constexpr int kMaskTile = 64, kMaskWarps = 4, kMaskThreads = kMaskWarps * kWarp, kChunk = 64;

struct MaskGradientArguments {
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardSpace space;
  ScoreRule rule;
  float keep_scale;  // of dropout: 1 / (1 - p)
  int64_t splits;
};

int64_t tiles_of(int64_t size) { return (size + kMaskTile - 1) / kMaskTile; }

// What a tile of the mask is broadcast over: an extent of 1 where it is not.
struct Extents {
  int64_t batch, heads, queries, keys;  // the latter two in blocks
  FLASH_ONLINE_HD int64_t count() const { return batch * heads * queries * keys; }

  FLASH_ONLINE_HD Extents(const AttentionProblem& problem, const AttentionGradients& gradients)
      : batch(gradients.mask_size[0] == 1 ? problem.batch : 1),
        heads(gradients.mask_size[1] == 1 ? problem.heads : 1),
        queries(gradients.mask_size[2] == 1 ? (problem.queries + kMaskTile - 1) / kMaskTile : 1),
        keys(gradients.mask_size[3] == 1 ? (problem.keys + kMaskTile - 1) / kMaskTile : 1) {}
};

int64_t mask_tiles(const AttentionGradients& gradients) {
  const int64_t* size = gradients.mask_size;
  return size[0] * size[1] * tiles_of(size[2]) * tiles_of(size[3]);
}

__device__ void store_mask(const AttentionGradients& gradients, int64_t offset, float x) {
  visit_mask(gradients.grad_mask_dtype, [&]<class T>(T) {
    if constexpr (!std::is_same_v<T, bool>) {
      T* const at = static_cast<T*>(gradients.grad_mask.data) + offset;
      *at = narrow<T>(gradients.add_to_grad_mask ? widen(*at) + x : x);
    }
  });
}

template <class Kind>
struct MaskGradient {
  using Element = typename ElementOf<Kind>::type;
  using Tile = SharedTile<Kind, kChunk>;
  static constexpr int kTileBytes = Tile::bytes(kMaskTile), kStageBytes = 4 * kTileBytes, kStages = 2;
  static constexpr int kBytes = kStages * kStageBytes, kSumPitch = kMaskTile + 1;
  static_assert(kMaskTile * kSumPitch * static_cast<int>(sizeof(float)) <= kBytes);

  __device__ static void run(const MaskGradientArguments& arguments);
};

template <class Kind>
__device__ __forceinline__ void MaskGradient<Kind>::run(const MaskGradientArguments& arguments) {
  extern __shared__ __align__(16) char shared[];
  const AttentionProblem& problem = arguments.problem;
  const AttentionGradients& gradients = arguments.gradients;
  const BlockMap& map = arguments.space.map;
  const int64_t* const size = gradients.mask_size;
  const int queries = static_cast<int>(problem.queries), keys = static_cast<int>(problem.keys);

  // Which tile, and which part of what it is broadcast over.
  int64_t rest = blockIdx.x;
  const int64_t column_blocks = (size[3] + kMaskTile - 1) / kMaskTile, row_blocks = (size[2] + kMaskTile - 1) / kMaskTile;
  const int64_t mask_column = rest % column_blocks, mask_row = (rest /= column_blocks) % row_blocks,
                mask_head = (rest /= row_blocks) % size[1], mask_batch = (rest /= size[1]) % size[0], split = rest / size[0];
  const Extents extents(problem, gradients);
  const int64_t first_item = extents.count() * split / arguments.splits, last_item = extents.count() * (split + 1) / arguments.splits;

  struct Item {
    int64_t index, batch;
    int head, query, key;
  };
  // The first from `index` on that arithmetic and the map leave something to see in.
  const auto item_from = [&](int64_t index) {
    for (; index < last_item; ++index) {
      int64_t of = index;
      const int64_t key_block = of % extents.keys + mask_column, query_block = (of /= extents.keys) % extents.queries + mask_row;
      const int64_t head = (of /= extents.queries) % extents.heads + mask_head, batch = of / extents.heads + mask_batch;
      const int query = static_cast<int>(query_block) * kMaskTile, key = static_cast<int>(key_block) * kMaskTile;
      const KeyRange range = keys_of_any(problem.visible, query, min(query + kMaskTile, queries), keys);
      if (range.end <= range.begin || range.end <= key || range.begin >= key + kMaskTile) continue;
      if (map.data && static_cast<MaskKind>(map.row(batch, head, query_block)[map.size[3] == 1 ? 0 : key_block]) == MaskKind::kHidden)
        continue;
      return Item{index, batch, static_cast<int>(head), query, key};
    }
    return Item{last_item, 0, 0, 0, 0};
  };

  const auto tile = [&](int stage, int n) {
    return Tile{reinterpret_cast<Element*>(shared + stage * kStageBytes + n * kTileBytes)};
  };
  // Starts copying a chunk of queries, keys, gradients of outputs, values.
  const auto load_chunk = [&](int stage, const Item& item, int chunk) {
    const auto one = [&](int n, const ConstView4& view, int64_t heads, int row, int rows, int64_t width) {
      if (chunk * kChunk >= width) return;
      load<kMaskTile, kMaskThreads>(
          tile(stage, n),
          HeadRows<Element>(view, item.batch, item.head / (problem.heads / heads), 0, width, chunk * kChunk), row, rows);
    };
    one(0, problem.query, problem.heads, item.query, queries, problem.width);
    one(1, problem.key, problem.key_heads, item.key, keys, problem.width);
    one(2, gradients.grad_out, problem.heads, item.query, queries, problem.value_width);
    one(3, problem.value, problem.value_heads, item.key, keys, problem.value_width);
  };

  // All items see the same values of the mask; the first block along a dimension has as many as any.
  MaskBlock<kMaskTile, kMaskTile, kMaskThreads> mask_block(shared + kBytes);
  const HeadMask mask(problem, mask_batch, mask_head);
  mask_block.load(mask, static_cast<int>(mask_row) * kMaskTile, queries, static_cast<int>(mask_column) * kMaskTile, keys);

  const int chunks = max(1, static_cast<int>((max(problem.width, problem.value_width) + kChunk - 1) / kChunk));
  const int row = static_cast<int>(threadIdx.x) / kWarp * 16;
  Accumulator<1, kMaskTile / 8> sum;
  clear(sum);
  Item item = item_from(first_item);
  if (item.index < last_item) load_chunk(0, item, 0);
  commit_copies();

  int stage = 0;
  while (item.index < last_item) {
    const Item next = item_from(item.index + 1);
    const int64_t first_block = first_row_block(problem, arguments.space.list, item.batch, item.head);
    float high[2], low[2], delta[2];  // of the lane's two queries
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = item.query + row + 8 * half + lane_group();
      const float* const numbers = arguments.space.rows + (first_block + at / kRowBlock) * kRowNumbers + at % kRowBlock;
      high[half] = numbers[0], low[half] = numbers[kRowBlock], delta[half] = numbers[2 * kRowBlock];
    }
    Accumulator<1, kMaskTile / 8> scores, grads;
    clear(scores);
    clear(grads);
    for (int chunk = 0; chunk < chunks; ++chunk, stage ^= 1) {
      wait_for_copies();
      __syncthreads();  // this chunk is there, and all have done with the one before
      if (chunk + 1 < chunks)
        load_chunk(stage ^ 1, item, chunk + 1);
      else if (next.index < last_item)
        load_chunk(stage ^ 1, next, 0);
      commit_copies();
      if (chunk * kChunk < problem.width) multiply_rows<Kind, kChunk>(scores, tile(stage, 0), row, tile(stage, 1));
      if (chunk * kChunk < problem.value_width) multiply_rows<Kind, kChunk>(grads, tile(stage, 2), row, tile(stage, 3));
    }

    const ScoreRule rule = arguments.rule.of_head(problem, item.batch, item.head);
    const Dropout dropout(problem, item.batch, item.head);
    const ScoreBlock here{item.query, item.key, queries, keys,
                          item.query + kMaskTile <= queries && all_see(problem.visible, item.query, item.query + kMaskTile,
                                                                       item.key, item.key + kMaskTile, keys)};
    if (dropout)
      draw_weights<false, 1, kMaskTile / 8>(row, dropout, here, [&](int i, int j, unsigned kept) {
#pragma unroll
        for (int e = 0; e < 4; ++e) grads[i][j][e] = kept >> e & 1 ? grads[i][j][e] * arguments.keep_scale : 0;
      });
    bend_scores<false>(scores, row, rule, here, problem.visible);
    mask_scores<false>(scores, row, mask.dtype, mask_block);
    if (!here.whole) hide_scores<false>(scores, row, here, problem.visible);
#pragma unroll
    for (int j = 0; j < kMaskTile / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight = FastBinary::exp((scores[0][j][e] - high[e / 2]) - low[e / 2]);
        const float grad = weight * (grads[0][j][e] - delta[e / 2]);
        // What no query sees of a row past the end may be NaN.
        sum[0][j][e] += here.whole || item.query + row + e / 2 * 8 + lane_group() < queries ? grad : 0;
      }
    item = next;
  }
  wait_for_copies();
  __syncthreads();  // all have done with shared memory

  float* const sums = reinterpret_cast<float*>(shared);
  for_each_score<false>(sum, row, [&](float& x, int query, int key) { sums[query * kSumPitch + key] = x; });
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  if (size[2] == 1) {
    if (thread < kMaskTile) {
      float of_column = 0;
      for (int r = 0; r < kMaskTile; ++r) of_column += sums[r * kSumPitch + thread];
      sums[thread] = of_column;
    }
    __syncthreads();
  }
  const int rows = size[2] == 1 ? 1 : static_cast<int>(min(size[2] - mask_row * kMaskTile, int64_t{kMaskTile}));
  if (size[3] == 1) {
    if (thread < rows) {
      float of_row = 0;
      for (int c = 0; c < kMaskTile; ++c) of_row += sums[thread * kSumPitch + c];
      sums[thread * kSumPitch] = of_row;
    }
    __syncthreads();
  }
  const int columns = size[3] == 1 ? 1 : static_cast<int>(min(size[3] - mask_column * kMaskTile, int64_t{kMaskTile}));
  const int64_t plane = mask_batch * size[1] + mask_head, first_row = mask_row * kMaskTile, first_column = mask_column * kMaskTile;
  const MutableView4& to = gradients.grad_mask;
  for (int n = thread; n < rows * kMaskTile; n += kMaskThreads) {
    const int r = n / kMaskTile, c = n % kMaskTile;
    if (c >= columns) continue;
    const float x = sums[r * kSumPitch + c];
    if (arguments.splits > 1)
      arguments.space.mask_parts[((split * size[0] * size[1] + plane) * size[2] + first_row + r) * size[3] + first_column + c] = x;
    else
      store_mask(gradients, mask_batch * to.stride[0] + mask_head * to.stride[1] + (first_row + r) * to.stride[2] +
                                (first_column + c) * to.stride[3],
                 x);
  }
}

template <class Kind>
__global__ void __launch_bounds__(kMaskThreads, sizeof(typename ElementOf<Kind>::type) == 2 ? 2 : 1)
    mask_gradient_tiles(const __grid_constant__ MaskGradientArguments arguments) {
  MaskGradient<Kind>::run(arguments);
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
  store_mask(gradients, offset, sum);
}

}  // namespace

int64_t mask_gradient_splits(const AttentionProblem& problem, const AttentionGradients& gradients) {
  const int64_t tiles = mask_tiles(gradients), wanted = 4 * int64_t{multiprocessors()}, items = Extents(problem, gradients).count();
  if (tiles == 0 || items == 0) return 1;
  const int64_t splits = 2 * tiles > wanted ? 1 : wanted / tiles;
  return splits < items ? splits : items;
}

int64_t mask_gradient_parts(const AttentionProblem& problem, const AttentionGradients& gradients) {
  if (!gradients.grad_mask.data) return 0;
  const int64_t splits = mask_gradient_splits(problem, gradients), *size = gradients.mask_size;
  return splits > 1 ? splits * size[0] * size[1] * size[2] * size[3] : 0;
}

void mask_gradient(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardSpace& space,
                   CUstream_st* stream) {
  const int64_t tiles = mask_tiles(gradients);
  if (tiles == 0) return;
  const MaskGradientArguments arguments{problem,
                                        gradients,
                                        space,
                                        ScoreRule(problem),
                                        problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f,
                                        mask_gradient_splits(problem, gradients)};
  const int mask_rows = problem.mask.stride[2] == 0 ? 1 : kMaskTile;
  const int mask_bytes = mask_rows * mask_pitch(kMaskTile, static_cast<int>(size_of(problem.mask_dtype)));
  const auto run = [&]<class Kind>(Kind) {
    launch<mask_gradient_tiles<Kind>>(arguments, tiles * arguments.splits, kMaskThreads, MaskGradient<Kind>::kBytes + mask_bytes,
                                      stream);
  };
  switch (problem.dtype) {
    case DType::kFloat16: run(__half{}); break;
    case DType::kBFloat16: run(__nv_bfloat16{}); break;
    default: run(float{});
  }
  if (arguments.splits > 1) {
    const int64_t *size = gradients.mask_size, count = size[0] * size[1] * size[2] * size[3];
    launch<sum_mask_parts>(arguments, (count + 255) / 256, 256, 0, stream);
  }
}

}  // namespace flash_online::cuda
