// What the kernels of float64 attention share: how a CTA walks over blocks of rows in chunks of columns, products on the tensor
// cores, and scores. docs/design/attention_float64.md draws it.
#pragma once

#include <algorithm>

#include "../../../core/online_softmax.h"
#include "../../hw/launch.h"
#include "../../mma/fragments.cuh"
#include "../common/dropout.cuh"
#include "../common/scores.cuh"
#include "../common/tile_list.cuh"
#include "../masks/visible_blocks.cuh"
#include "../sm80/load.cuh"

namespace flash_online::cuda::float64 {

// A warp owns 16 rows of its CTA's tile, and up to kColumns columns of its results. What it multiplies them by arrives in steps
// of kBlock rows by kChunk columns.
constexpr int kWarpRows = 16, kMostWarps = 8, kMostRows = kMostWarps * kWarpRows, kMostThreads = kMostWarps * kWarpSize;
constexpr int kColumns = 128, kBlock = 32, kChunk = 32, kStages = 3;

// Distances of rows in shared memory, in doubles: without conflicts of banks where a lane reads two neighbours of a row, as the
// operands of scores do, and where it reads one number of each of two neighbouring rows.
constexpr int kPairPitch = kChunk + 8, kColumnPitch = kChunk + 2;
constexpr int kStageDoubles = kBlock * kPairPitch;

using Scores = Accumulator<1, kBlock / 8, double>;
using Outputs = Accumulator<1, kColumns / 8, double>;

FLASH_ONLINE_HD constexpr int chunks_of(int64_t columns) {
  return columns <= kChunk ? 1 : static_cast<int>(ceil_div(columns, int64_t{kChunk}));
}
FLASH_ONLINE_HD constexpr int row_tile_pitch(int64_t columns) { return chunks_of(columns) * kChunk + 8; }
constexpr int row_tile_bytes(int rows, int64_t columns) {
  return rows * row_tile_pitch(columns) * static_cast<int>(sizeof(double));
}

__device__ __forceinline__ int warp_row() { return static_cast<int>(threadIdx.x) / kWarpSize * kWarpRows; }
__device__ __forceinline__ int tile_rows() { return static_cast<int>(blockDim.x) / kWarpSize * kWarpRows; }

// ---- loads -----------------------------------------------------------------------------------------------------------------

// Starts copying `count` rows from `row` on, kChunk columns each from `column` on; zeros where rows or columns end.
__device__ __forceinline__ void load_chunk(double* to, int pitch, int count, const HeadRows<double>& from, int row, int rows,
                                           int column) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x), left = rows - row,
            columns = from.columns - column;
  const double* const data = from.data + row * from.row_stride + column * from.column_stride;
  if (from.vectors) {
    constexpr int kVectors = kChunk / 2;
#pragma unroll 1
    for (int i = thread; i < count * kVectors; i += threads) {
      const int r = i / kVectors, c = i % kVectors * 2;
      const int bytes = r < left ? min(max(columns - c, 0), 2) * static_cast<int>(sizeof(double)) : 0;
      cp_async(reinterpret_cast<uint4*>(to + r * pitch + c), bytes > 0 ? data + r * from.row_stride + c : from.data, bytes);
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < count * kChunk; i += threads) {
      const int r = i / kChunk, c = i % kChunk;
      const bool exists = r < left && c < columns;
      cp_async_8(to + r * pitch + c, exists ? data + r * from.row_stride + c * from.column_stride : from.data, exists);
    }
  }
}

// Starts copying a CTA's tile of rows, all chunks of columns side by side.
__device__ __forceinline__ void load_row_tile(double* to, const HeadRows<double>& from, int row, int rows) {
  const int pitch = row_tile_pitch(from.columns);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks_of(from.columns); ++chunk)
    load_chunk(to + chunk * kChunk, pitch, tile_rows(), from, row, rows, chunk * kChunk);
}

// Takes a CTA through its items, which are blocks of rows, and through the steps of each item. There are `steps` of them, at
// least two, and each needs one chunk in shared memory: load(item, step, stage) starts its copy, kStages - 1 steps ahead.
template <class Items, class Load>
class Walk {
 public:
  using Item = typename Items::Item;

  __device__ __forceinline__ Walk(double* stages, int stage_doubles, const Items& items, int steps, const Load& load)
      : stages_(stages), items_(items), load_(load), doubles_(stage_doubles), steps_(steps) {
    ahead_ = items_.next();
  }
  // To be called once, after which the caller's own copies have been waited for with the first stage.
  __device__ __forceinline__ void start() {
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) load_next(stages_ + stage * doubles_);
  }
  // The item that begins with the next step, if it exists; after start(), that of the step that is copied next.
  __device__ __forceinline__ const Item& item() const { return ahead_; }
  // The stage of the next step.
  __device__ __forceinline__ const double* next_stage() {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // the chunk is there, and all have done with the stage before
    load_next(stages_ + (at_ == 0 ? kStages - 1 : at_ - 1) * doubles_);
    const double* const stage = stages_ + at_ * doubles_;
    at_ = at_ == kStages - 1 ? 0 : at_ + 1;
    return stage;
  }

 private:
  __device__ __forceinline__ void load_next(double* stage) {
    if (step_ == steps_) ahead_ = items_.next(), step_ = 0;
    if (ahead_.exists) load_(ahead_, step_++, stage);
    cp_async_commit();
  }

  double* stages_;
  Items items_;
  Load load_;
  int doubles_, steps_, step_ = 0, at_ = 0;  // at_: the stage of the next step
  Item ahead_;
};

// The blocks of kBlock keys that a tile of queries may see.
struct KeyItems {
  struct Item {
    int key;  // the first
    bool clear;  // the mask and sparsity hide and add nothing here
    bool exists;
  };
  KeyBlocks<kBlock> blocks;
  int end;
  __device__ __forceinline__ KeyItems(const AttentionProblem& problem, const TileTables& tables, const WorkTile& tile,
                                      int query, int last_query)
      : KeyItems(problem, tables, tile, query, last_query, keys_of_any(tile.sequence.visible, query, last_query, tile.keys)) {}
  __device__ __forceinline__ Item next() {
    bool clear;
    const int block = blocks.next(clear);
    return {block * kBlock, clear, block < end};
  }

 private:
  __device__ __forceinline__ KeyItems(const AttentionProblem& problem, const TileTables& tables, const WorkTile& tile,
                                      int query, int last_query, const KeyRange& range)
      : blocks(problem, &tables, tile.batch, tile.head, query, last_query, tile.keys, static_cast<int>(range.begin / kBlock),
               range.end > range.begin ? static_cast<int>(ceil_div(range.end, int64_t{kBlock})) : 0),
        end(range.end > range.begin ? static_cast<int>(ceil_div(range.end, int64_t{kBlock})) : 0) {}
};

// ---- products --------------------------------------------------------------------------------------------------------------

// d += a b^T over one chunk: `rows` are the warp's, in a tile of rows, `stage` has kBlock rows kPairPitch apart. The sum over a
// chunk's columns takes them in an order in which a lane reads neighbours.
__device__ __forceinline__ void multiply_rows(Scores& d, const double* rows, int pitch, const double* stage) {
  const double* const upper = rows + quad() * pitch + 2 * lane_in_quad();
  const double* const right = stage + quad() * kPairPitch + 2 * lane_in_quad();
#pragma unroll
  for (int k = 0; k < kChunk; k += 8) {
    const double2 high = *reinterpret_cast<const double2*>(upper + k),
                  low = *reinterpret_cast<const double2*>(upper + 8 * pitch + k);
    const double a[4] = {high.x, low.x, high.y, low.y};
#pragma unroll
    for (int j = 0; j < kBlock / 8; ++j) {
      const double2 b = *reinterpret_cast<const double2*>(right + 8 * j * kPairPitch + k);
      mma_16x8x8(d[0][j], a, b.x, b.y);
    }
  }
}

// The columns of chunk `chunk` of d += a b. `a` is a warp's accumulators: they have a left operand's layout if the sum takes
// the even rows of b before the odd ones. `stage` has kBlock rows kColumnPitch apart.
__device__ __forceinline__ void multiply_columns(Outputs& d, int chunk, const Scores& a, const double* stage) {
  const double* const right = stage + 2 * lane_in_quad() * kColumnPitch + quad();
#pragma unroll
  for (int c = 0; c < kColumns / kChunk; ++c) {  // registers have no index at run time
    if (c != chunk) continue;
#pragma unroll
    for (int k = 0; k < kBlock / 8; ++k) {
      const double left[4] = {a[0][k][0], a[0][k][2], a[0][k][1], a[0][k][3]};
#pragma unroll
      for (int j = 0; j < kChunk / 8; ++j) {
        const double* const b = right + 8 * k * kColumnPitch + 8 * j;
        mma_16x8x8(d[0][c * (kChunk / 8) + j], left, b[0], b[kColumnPitch]);
      }
    }
  }
}

// ---- scores ----------------------------------------------------------------------------------------------------------------

using State = OnlineSoftmax<double>;  // of a row; scores are natural, so that a mask's lowest number stays a number
constexpr double kRescaleThreshold = 8;  // how far above the running maximum a block's may be before outputs are rescaled

// Adds a float mask, or hides the scores that a bool mask does not show. Values are read where the mask lies.
template <bool kTransposed>
__device__ __forceinline__ void apply_mask(Scores& d, int row, const HeadMask& mask, const ScoreBlock& block) {
  const int queries = block.queries - block.query, keys = block.keys - block.key;
  const char* const data = mask.data + block.query * mask.row_stride + block.key * mask.column_stride;
  visit_any_mask(mask.dtype, [&]<class T>(T) {
    for_each_score<kTransposed>(d, row, [&](int i, int j, int e, int query, int key) {
      if (query >= queries || key >= keys) return;
      const T value = *reinterpret_cast<const T*>(data + query * mask.row_stride + key * mask.column_stride);
      double& x = d[i][j][e];
      if constexpr (std::is_same_v<T, bool>)
        x = value ? x : lowest<double>();
      else if constexpr (std::is_same_v<T, double>)
        x += value;
      else
        x += static_cast<double>(widen(value));
    });
  });
}

// What hides a head's keys from its queries, but for their positions.
struct HeadMasks {
  HeadMask mask;
  HeadSparsity sparsity;
  __device__ __forceinline__ HeadMasks(const AttentionProblem& problem, const Sequence& sequence, int64_t batch, int64_t head)
      : mask(problem, batch, head), sparsity(problem, sequence, batch, head) {}
};

// Scores of products: score modification, mask, sparsity, visibility. d: a warp's, from row `row` of the block on. is_clear:
// the mask and sparsity hide and add nothing.
template <bool kTransposed, class Derivative = NoDerivative>
__device__ __forceinline__ void make_scores(Scores& d, int row, const DoubleScoreMod& score_mod, const HeadMasks& masks,
                                            bool is_clear, const ScoreBlock& block, const Visibility& visible,
                                            Derivative&& derivative = {}) {
  apply_score_mod<kTransposed>(d, row, score_mod, block, visible, derivative);
  if (masks.mask.data && !is_clear) apply_mask<kTransposed>(d, row, masks.mask, block);
  if (masks.sparsity.exists() && !is_clear) hide_by_sparsity<kTransposed>(d, row, masks.sparsity, block);
  if (!block.whole) hide_scores<kTransposed>(d, row, block, visible);
}

// Which weights dropout keeps, as draw_weights() says it.
template <bool kTransposed>
__device__ __forceinline__ unsigned kept_scores(int row, const Dropout& dropout, const ScoreBlock& block) {
  return draw_weights<kTransposed, 1, kBlock / 8>(row, dropout, block);
}
__device__ __forceinline__ bool is_kept(unsigned kept, int j, int e) { return kept >> (4 * j + e) & 1; }

// ---- results ---------------------------------------------------------------------------------------------------------------

// A tensor's rows of one head and sequence, and the columns that a CTA writes.
struct ResultRows {
  double* data;  // column `first_column` of the sequence's first row
  int64_t row_stride, column_stride;
  int columns;  // from there on

  __device__ __forceinline__ ResultRows(const MutableView4& view, int64_t batch, int64_t head, int64_t first_row,
                                        int64_t all_columns, int first_column)
      : data(static_cast<double*>(view.data) + batch * view.stride[0] + head * view.stride[1] + first_row * view.stride[2] +
             first_column * view.stride[3]),
        row_stride(view.stride[2]),
        column_stride(view.stride[3]),
        columns(min(static_cast<int>(all_columns) - first_column, kColumns)) {}

  // Writes a warp's sixteen rows, from `row` on, of `rows`. `factors`: what the lane's two rows are multiplied by. `staged`:
  // the warp's kStagedDoubles in shared memory.
  template <int kTiles>
  __device__ __forceinline__ void store(const double (&d)[kTiles][4], const double (&factors)[2], int row, int rows,
                                        double* staged) const {
    const int left = min(rows - row, kWarpRows);
    double* const to = data + row * row_stride;
#pragma unroll
    for (int first = 0; first < kTiles * 8; first += kStagedColumns) {
      if (first >= columns) break;
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kStagedColumns / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const double* const x = d[first / 8 + j] + 2 * half;
          *reinterpret_cast<double2*>(staged + (quad() + 8 * half) * kStagedPitch + 8 * j + 2 * lane_in_quad()) =
              make_double2(x[0] * factors[half], x[1] * factors[half]);
        }
      __syncwarp();
#pragma unroll 1
      for (int i = lane(); i < left * kStagedColumns; i += kWarpSize) {
        const int r = i / kStagedColumns, c = i % kStagedColumns;
        if (first + c < columns) to[r * row_stride + (first + c) * column_stride] = staged[r * kStagedPitch + c];
      }
    }
  }
  // Stores the rows of a CTA's tile from `row` on, sixteen per warp. `stages`: the CTA's shared memory, no longer read.
  __device__ __forceinline__ void store(const Outputs& d, const double (&factors)[2], int row, int rows, double* stages) const {
    static_assert(kMostWarps * kStagedDoubles <= kStages * kStageDoubles);
    store(d[0], factors, row + warp_row(), rows, stages + warp_row() / kWarpRows * kStagedDoubles);
  }

  static constexpr int kStagedColumns = 16, kStagedPitch = kStagedColumns + 2,
                       kStagedDoubles = kWarpRows * kStagedPitch;  // columns at a time
};

// Zeros rows of one head.
__device__ __forceinline__ void clear_rows(const MutableView4& to, int64_t head, int64_t columns, const Rows& rows) {
  double* const data = static_cast<double*>(to.data) + head * to.stride[1];
  for (int64_t n = threadIdx.x; n < rows.count * columns; n += blockDim.x)
    data[(rows.begin + n / columns) * to.stride[2] + n % columns * to.stride[3]] = 0;
}

// ---- launches --------------------------------------------------------------------------------------------------------------

inline double keep_scale(const AttentionProblem& problem) { return problem.dropout < 1 ? 1 / (1 - problem.dropout) : 0; }

// Bytes of shared memory of a CTA of `warps` warps, if a row of its tile takes `row_bytes` bytes.
inline int shared_bytes_of(int warps, int row_bytes) {
  return warps * kWarpRows * row_bytes + kStages * kStageDoubles * static_cast<int>(sizeof(double));
}
// Warps of a CTA for a tile of at most `rows` rows: as many as there is shared memory for.
inline int warps_for(int64_t rows, int row_bytes, int shared_bytes) {
  int warps = kMostWarps;
  while (warps > 1 && (shared_bytes_of(warps, row_bytes) > shared_bytes || (warps / 2) * kWarpRows >= rows)) warps /= 2;
  return warps;
}

// Launches a kernel with a CTA per panel of the result's columns and tile of queries, or of keys. Sets arguments.list.
template <auto kKernel, class Arguments>
void launch_tiles(Arguments arguments, bool over_keys, int64_t heads, int64_t columns, int row_bytes, CUstream_st* stream) {
  const AttentionProblem& problem = arguments.problem;
  const int warps = warps_for(over_keys ? problem.keys : problem.queries, row_bytes, shared_bytes_per_cta());
  arguments.list = TileList::of(problem, over_keys, heads, warps * kWarpRows).by_length(problem.visible, sm_count());
  const int64_t panels = std::max<int64_t>(ceil_div(columns, int64_t{kColumns}), 1);
  if (arguments.list.count() > 0)
    launch<kKernel>(arguments, arguments.list.count() * panels, warps * kWarpSize, shared_bytes_of(warps, row_bytes), stream);
}

}  // namespace flash_online::cuda::float64
