// The gradient of a float mask in float64: a CTA takes a tile of the mask, and makes the gradients of all scores that the tile
// was added to, one block after another, in one order. Rows and columns of a block's operands pass by in chunks.
#include <algorithm>

#include "../../hw/launch.h"
#include "backward.cuh"

namespace flash_online::cuda::float64 {

namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarpSize, kRows = kWarps * kWarpRows;  // a tile: kRows queries, kBlock keys
constexpr int kMaskStageDoubles = (kRows + kBlock) * kPairPitch;  // a chunk of the queries, then one of the keys
constexpr int kSharedBytes = kStages * kMaskStageDoubles * static_cast<int>(sizeof(double));

// How many batches, heads and blocks of queries and keys a tile of the mask is broadcast over; 1 where it is not.
struct Extents {
  int batch, heads, queries, keys;
  FLASH_ONLINE_HD int64_t count() const { return int64_t{batch} * heads * queries * keys; }
  Extents(const AttentionProblem& problem, const AttentionGradients& gradients)
      : batch(gradients.mask_size[0] == 1 ? static_cast<int>(problem.batch) : 1),
        heads(gradients.mask_size[1] == 1 ? static_cast<int>(problem.heads) : 1),
        queries(gradients.mask_size[2] == 1 ? static_cast<int>(ceil_div(problem.queries, int64_t{kRows})) : 1),
        keys(gradients.mask_size[3] == 1 ? static_cast<int>(ceil_div(problem.keys, int64_t{kBlock})) : 1) {}
};

struct MaskGradArguments {
  BackwardArguments all;
  Extents extents;
  int row_tiles, column_tiles;  // of the mask
  int shares;  // CTAs that share the sum over the extents
};

// The blocks of scores that a tile of the mask was added to, those of the CTA's share.
struct TileItems {
  struct Item {
    int batch, head, query, key;
    bool exists;
  };
  const MaskGradArguments& arguments;
  int row_tile, column_tile, mask_head, mask_batch, share;
  int64_t at, last;

  __device__ __forceinline__ explicit TileItems(const MaskGradArguments& arguments_) : arguments(arguments_) {
    unsigned left = blockIdx.x;
    const auto digit = [&](int64_t base) {
      const unsigned value = left % static_cast<unsigned>(base);
      left /= static_cast<unsigned>(base);
      return static_cast<int>(value);
    };
    column_tile = digit(arguments.column_tiles);
    row_tile = digit(arguments.row_tiles);
    mask_head = digit(arguments.all.gradients.mask_size[1]);
    mask_batch = digit(arguments.all.gradients.mask_size[0]);
    share = static_cast<int>(left);
    const int64_t count = arguments.extents.count();
    at = count * share / arguments.shares;
    last = count * (share + 1) / arguments.shares;
  }
  __device__ __forceinline__ Item next() {
    const AttentionProblem& problem = arguments.all.problem;
    const Extents& extents = arguments.extents;
    for (; at < last; ++at) {
      int64_t left = at;
      Item item{0, 0, 0, 0, true};
      item.key = (static_cast<int>(left % extents.keys) + column_tile) * kBlock;
      item.query = (static_cast<int>((left /= extents.keys) % extents.queries) + row_tile) * kRows;
      item.head = static_cast<int>((left /= extents.queries) % extents.heads) + mask_head;
      item.batch = static_cast<int>(left / extents.heads) + mask_batch;
      const KeyRange range =
          keys_of_any(problem.visible, item.query, min(int64_t{item.query} + kRows, problem.queries), problem.keys);
      if (range.end > range.begin && range.end > item.key && range.begin < item.key + kBlock) return ++at, item;
    }
    return {0, 0, 0, 0, false};
  }
};

// Sets an element of the mask's gradient, or adds to it.
__device__ __forceinline__ void add_to_mask_gradient(const AttentionGradients& gradients, int64_t offset, double x) {
  visit_any_mask(gradients.grad_mask_dtype, [&]<class T>(T) {
    if constexpr (!std::is_same_v<T, bool>) {
      T* const at = static_cast<T*>(gradients.grad_mask.data) + offset;
      if constexpr (std::is_same_v<T, double>)
        *at = gradients.add_to_grad_mask ? *at + x : x;
      else
        *at = narrow<T>(static_cast<float>(gradients.add_to_grad_mask ? widen(*at) + x : x));
    }
  });
}

// Writes the sums of the CTA's tile: to its slot of the workspace, or to the gradient.
__device__ __forceinline__ void store_sums(const MaskGradArguments& arguments, const TileItems& items, Scores& sum,
                                           double* shared) {
  const AttentionGradients& gradients = arguments.all.gradients;
  const int64_t* const size = gradients.mask_size;
  double* const tile = shared;  // [kRows][kBlock]
  for_each_score<false>(sum, warp_row(),
                        [&](int i, int j, int e, int query, int key) { tile[query * kBlock + key] = sum[i][j][e]; });
  __syncthreads();
  const int rows = size[2] == 1 ? 1 : kRows, columns = size[3] == 1 ? 1 : kBlock;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < rows * columns; n += kThreads) {
    const int r = n / columns, c = n % columns;
    double x = 0;
    for (int query = r; query < (rows == 1 ? kRows : r + 1); ++query)
      for (int key = c; key < (columns == 1 ? kBlock : c + 1); ++key) x += tile[query * kBlock + key];
    const int64_t row = int64_t{items.row_tile} * kRows + r, column = int64_t{items.column_tile} * kBlock + c;
    if (row >= size[2] || column >= size[3]) continue;
    if (arguments.shares > 1) {
      arguments.all.space.mask_grad_partials
          [(((items.share * size[0] + items.mask_batch) * size[1] + items.mask_head) * size[2] + row) * size[3] + column] = x;
      continue;
    }
    const MutableView4& to = gradients.grad_mask;
    const int64_t offset =
        items.mask_batch * to.stride[0] + items.mask_head * to.stride[1] + row * to.stride[2] + column * to.stride[3];
    add_to_mask_gradient(gradients, offset, x);
  }
}

__global__ void __launch_bounds__(kThreads) mask_grad(const __grid_constant__ MaskGradArguments arguments) {
  extern __shared__ __align__(16) double shared[];
  const AttentionProblem& problem = arguments.all.problem;
  const AttentionGradients& gradients = arguments.all.gradients;
  const Workspace& space = arguments.all.space;
  const int queries = static_cast<int>(problem.queries), keys = static_cast<int>(problem.keys);
  const int score_chunks = chunks_of(problem.head_dim), steps = score_chunks + chunks_of(problem.head_dim_v);
  const TileItems items(arguments);
  const auto load = [&](const TileItems::Item& item, int step, double* stage) {
    const bool is_grad = step >= score_chunks;
    const int column = (is_grad ? step - score_chunks : step) * kChunk;
    const int64_t columns = is_grad ? problem.head_dim_v : problem.head_dim;
    const int64_t heads = problem.heads / (is_grad ? problem.value_heads : problem.key_heads);
    load_chunk(stage, kPairPitch, kRows,
               HeadRows<double>(is_grad ? gradients.grad_out : problem.query, item.batch, item.head, 0, columns), item.query,
               queries, column);
    load_chunk(stage + kRows * kPairPitch, kPairPitch, kBlock,
               HeadRows<double>(is_grad ? problem.value : problem.key, item.batch, item.head / heads, 0, columns), item.key,
               keys, column);
  };
  Walk walk(shared, kMaskStageDoubles, items, steps, load);
  walk.start();
  Scores sum;
  clear(sum);
  while (walk.item().exists) {
    const TileItems::Item item = walk.item();
    Scores scores, grads;
    clear(scores);
    clear(grads);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const double* const stage = walk.next_stage();
      const double *const rows = stage + warp_row() * kPairPitch, *const columns = stage + kRows * kPairPitch;
      if (step < score_chunks)
        multiply_rows(scores, rows, kPairPitch, columns);
      else
        multiply_rows(grads, rows, kPairPitch, columns);
    }
    const ScoreBlock here{item.query, item.key, queries, keys, false};
    const Dropout dropout(problem, item.batch, item.head);
    if (dropout) drop_gradients(grads, kept_scores<false>(warp_row(), dropout, here), arguments.all.keep_scale);
    make_scores<false>(scores, warp_row(), DoubleScoreMod::of<double>(problem, item.batch, item.head),
                       HeadMasks(problem, sequence_of(problem, item.batch), item.batch, item.head), false, here,
                       problem.visible);
    const int row = item.query + warp_row() + quad();
    const int64_t first = Workspace::first_query(problem, item.batch, item.head, sequence_of(problem, item.batch));
    const RowStats stats[2] = {{space, first + row, row < queries}, {space, first + row + 8, row + 8 < queries}};
    for_each(sum, [&](double& x, int i, int j, int e) {
      // A row past the end has the weight 0.
      x += stats[e / 2].weight(scores[i][j][e]) * (grads[i][j][e] - stats[e / 2].delta);
    });
  }
  cp_async_wait();
  __syncthreads();  // all have done with the stages
  store_sums(arguments, items, sum, shared);
}

__global__ void __launch_bounds__(256) sum_partials(const __grid_constant__ MaskGradArguments arguments) {
  const AttentionGradients& gradients = arguments.all.gradients;
  const int64_t* const size = gradients.mask_size;
  const int64_t count = size[0] * size[1] * size[2] * size[3], index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (index >= count) return;
  double sum = 0;
  for (int64_t share = 0; share < arguments.shares; ++share)
    sum += arguments.all.space.mask_grad_partials[share * count + index];
  int64_t left = index, offset = 0;
  for (int i = 3; i >= 0; --i) {
    offset += left % size[i] * gradients.grad_mask.stride[i];
    left /= size[i];
  }
  add_to_mask_gradient(gradients, offset, sum);
}

int64_t tiles_of(const AttentionGradients& gradients) {
  const int64_t* size = gradients.mask_size;
  return size[0] * size[1] * ceil_div(size[2], int64_t{kRows}) * ceil_div(size[3], int64_t{kBlock});
}

// How many CTAs share the sum over what a tile is broadcast over, so that there is work for the whole device.
int64_t shares_of(const AttentionProblem& problem, const AttentionGradients& gradients) {
  const int64_t tiles = tiles_of(gradients), wanted = 2 * int64_t{sm_count()}, items = Extents(problem, gradients).count();
  if (tiles == 0 || items == 0) return 1;
  return std::clamp<int64_t>(wanted / tiles, 1, items);
}

}  // namespace

int64_t mask_grad_partials(const AttentionProblem& problem, const AttentionGradients& gradients) {
  if (!gradients.grad_mask.data) return 0;
  const int64_t shares = shares_of(problem, gradients), *size = gradients.mask_size;
  return shares > 1 ? shares * size[0] * size[1] * size[2] * size[3] : 0;
}

void mask_gradient(const BackwardArguments& all, CUstream_st* stream) {
  const int64_t* const size = all.gradients.mask_size;
  const int64_t tiles = tiles_of(all.gradients), count = size[0] * size[1] * size[2] * size[3];
  if (tiles == 0) return;
  const MaskGradArguments arguments{.all = all,
                                    .extents = Extents(all.problem, all.gradients),
                                    .row_tiles = static_cast<int>(ceil_div(size[2], int64_t{kRows})),
                                    .column_tiles = static_cast<int>(ceil_div(size[3], int64_t{kBlock})),
                                    .shares = static_cast<int>(shares_of(all.problem, all.gradients))};
  launch<mask_grad>(arguments, tiles * arguments.shares, kThreads, kSharedBytes, stream);
  if (arguments.shares > 1) launch<sum_partials>(arguments, ceil_div(count, int64_t{256}), 256, 0, stream);
}

}  // namespace flash_online::cuda::float64
