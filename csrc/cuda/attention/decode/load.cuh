// Loads of cached keys and values by a warp: tile after tile of its share, ahead of its computations, into its own ring of
// buffers. No other warp reads them, so that a warp waits for its own copies only.
#pragma once

#include "../../hw/compiler.cuh"
#include "../../hw/cp_async.cuh"
#include "../../hw/vector.cuh"
#include "line.cuh"

namespace flash_online::cuda {

// The rows of the pool's keys, or values. Strides count vectors of 16 bytes, and 32 bits hold the vectors of a head.
struct DecodePool {
  const char* data;
  int64_t head_bytes;
  unsigned block_vectors, row_vectors;
  int row_bytes;
};

// The byte offset of chunk `chunk` of row `row` in a box (tiles.h).
__device__ __forceinline__ unsigned box_offset(int row, int chunk) { return row * 128 + (chunk ^ (row % 8)) * kVectorBytes; }

// Waits until at most `pending` of the groups of copies that this thread has closed are on their way.
__device__ __forceinline__ void wait_for_groups(int pending) {
  static_assert(kDecodeMostStages == 4);
  cp_async_wait_if<2>(pending == 2);
  cp_async_wait_if<1>(pending == 1);
  cp_async_wait_if<0>(pending == 0);
}

// The threads that load a tile together. In a warp, each lane finds one row. In a CTA, eight threads share a row. In a
// warpgroup, each warp takes a quarter of the rows.
enum class DecodeLoaders { kWarp, kCta, kWarpgroup };

// The first tile of a warp in a part, and how many it leaves to other teams after a unit (DecodeShape::teams).
template <bool kTeams>
__device__ __forceinline__ int first_tile_of_warp(const DecodeShape& shape, int tile) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  return tile + warp + (kTeams ? (warp >> shape.warps_log2) * (shape.unit_tiles() - shape.warps()) : 0);
}
__device__ __forceinline__ int tiles_of_other_teams(const DecodeShape& shape) { return (shape.teams - 1) * shape.unit_tiles(); }

// The tiles of kTile keys that they load, one after the other, and where the rows of the next one lie.
// kDense: of a dense call, which has one block of keys per sequence, and perhaps teams.
template <int kTile, DecodeLoaders kLoaders, bool kDense = false>
class DecodeTiles {
 public:
  __device__ __forceinline__ DecodeTiles(const AttentionProblem& problem, const KvSplits& kv_splits, const DecodeShape& shape,
                                         bool whole_items)
      : problem_(problem), kv_splits_(kv_splits), shape_(shape), whole_items_(whole_items) {}

  // `walk` has reached the first part.
  __device__ __forceinline__ void begin(const DecodeWalk& walk) {
    walk_ = walk;
    if (walk_.done()) return;
    enter_part();
    find_tile();
  }

 protected:
  __device__ __forceinline__ bool done() const { return walk_.done(); }
  __device__ __forceinline__ void next_tile() {
    tile_ += kLoaders == DecodeLoaders::kWarp ? shape_.warps() : 1;
    if (kDense && ++step_ == shape_.unit_steps) {
      step_ = 0;
      tile_ += tiles_of_other_teams(shape_);
    }
    find_tile();
  }
  // The lane's row in a tile.
  __device__ __forceinline__ static int own_row() {
    const int thread = static_cast<int>(threadIdx.x);
    if constexpr (kLoaders == DecodeLoaders::kCta) return thread / 8;
    constexpr int kRows = kLoaders == DecodeLoaders::kWarp ? kTile : kTile / 4;
    return (kLoaders == DecodeLoaders::kWarp ? 0 : thread / kWarpSize % 4 * kRows) + thread % kRows;
  }
  // Of a dense call: the next tile's first row, and which of its rows some query sees.
  __device__ __forceinline__ unsigned first_row() const { return static_cast<unsigned>(walk_.s.keys_begin + tile_ * kTile); }
  __device__ __forceinline__ unsigned rows_there() const {
    const int begin = max(walk_.s.seen_begin - tile_ * kTile, 0), end = min(walk_.s.seen_end - tile_ * kTile, kTile);
    return ~0u >> (32 - end) & ~0u << begin;  // the tile has such rows
  }
  // Checks the table's entry: the lane's row is outside of the pool unless the pool has its block.
  __device__ __forceinline__ void check_block() { block_ = static_cast<int>(checked_block(problem_.cache, block_)); }
  // The offset of the lane's row from the first row of its head, in vectors of 16 bytes; 0 for a row outside of the pool, which
  // is not read.
  __device__ __forceinline__ unsigned vectors_before(const DecodePool& pool) const {
    return block_ < 0 ? 0 : static_cast<unsigned>(block_) * pool.block_vectors + static_cast<unsigned>(row_) * pool.row_vectors;
  }

  const AttentionProblem& problem_;
  const KvSplits& kv_splits_;
  const DecodeShape& shape_;
  int key_head_ = 0;  // of the next tile
  int block_ = -1, row_ = 0;  // of the lane's row of that tile, as the table has them
  DecodeWalk walk_;

 private:
  __device__ __forceinline__ void enter_part() {
    const int2 tile_and_head = walk_.s.tile_and_head(shape_, walk_.item);
    key_head_ = tile_and_head.y;
    const CacheView& cache = problem_.cache;
    const int64_t row = cache_row(cache, walk_.n);
    const bool has_row = !cache.table || (row >= 0 && row < cache.table_rows);
    table_row_ = cache.table && has_row ? cache.table + row * cache.table_stride : nullptr;
    only_block_ = has_row && !cache.table ? static_cast<int>(row) : -1;
    // A shorter sequence than the longest may have no such rows.
    tile_ = tile_and_head.x * shape_.tile_rows < walk_.s.queries * shape_.group
                ? kLoaders == DecodeLoaders::kWarp ? first_tile_of_warp<kDense>(shape_, walk_.tile) : walk_.tile
                : walk_.end;
    step_ = 0;
  }

  // Finds the next tile, and asks the table where its rows lie: one row per lane. No instruction looks at the answer
  // before check_block().
  __device__ __forceinline__ void find_tile() {
#pragma unroll 1
    while (tile_ >= walk_.end) {
      walk_.next(problem_, kv_splits_, shape_, whole_items_);
      if (walk_.done()) return;
      enter_part();
    }
    if constexpr (kDense) return;
    const CacheView& cache = problem_.cache;
    const int key = tile_ * kTile + own_row();
    const unsigned place = static_cast<unsigned>(walk_.s.keys_begin + key), page = static_cast<unsigned>(cache.page);
    const unsigned entry = cache.entries == 1 ? 0 : place / page;
    row_ = static_cast<int>(place - entry * page);
    block_ = -1;
    if (key >= walk_.s.seen_begin && key < walk_.s.seen_end) block_ = table_row_ ? table_row_[entry] : only_block_;
  }

  bool whole_items_;
  int tile_ = 0;  // the next one
  int step_ = 0;  // of its unit
  const int32_t* table_row_ = nullptr;  // the sequence's; null: all of its keys are in one block
  int only_block_ = -1;
};

// kBoxes: of keys, and of values, per tile of kTile keys.
template <int kBoxes, int kTile, bool kDense = false>
class DecodeLoads : public DecodeTiles<kTile, DecodeLoaders::kWarp, kDense> {
  using Tiles = DecodeTiles<kTile, DecodeLoaders::kWarp, kDense>;

 public:
  static_assert(kTile <= kWarpSize);
  static constexpr int kBoxBytes = kTile * 128, kStageBytes = 2 * kBoxes * kBoxBytes;

  __device__ __forceinline__ DecodeLoads(const AttentionProblem& problem, const KvSplits& kv_splits, const DecodeShape& shape,
                                         const DecodePool& keys, const DecodePool& values, bool whole_items, char* ring,
                                         int stages)
      : Tiles(problem, kv_splits, shape, whole_items),
        keys_(keys),
        values_(values),
        stages_(stages),
        ring_(opaque(shared_address(ring))) {}

  // The stage that is filled next, and that waits until then: how far from the ring's first byte.
  __device__ __forceinline__ int next_stage() const { return next_ * kStageBytes; }

  // Starts the copies of the next tile, if there is one.
  __device__ __forceinline__ void start() {
    if (!done()) {
      start_rows();
      next_tile();
    }
    cp_async_commit();
    next_ = next_ + 1 == stages_ ? 0 : next_ + 1;
  }

  // Waits for the oldest tile that was not waited for, and returns the address of its stage.
  __device__ __forceinline__ unsigned wait() {
    wait_for_groups(stages_ - 2);
    __syncwarp();  // the lanes' copies are there, and all have read the stage that is filled next
    const unsigned stage = ring_ + oldest_ * kStageBytes;
    oldest_ = oldest_ + 1 == stages_ ? 0 : oldest_ + 1;
    return stage;
  }

 private:
  using Tiles::block_, Tiles::key_head_, Tiles::walk_, Tiles::check_block, Tiles::done, Tiles::first_row, Tiles::next_tile,
      Tiles::rows_there, Tiles::vectors_before;

  // The loads of a warp should be whole lines of 128 bytes, with eight lanes per line.
  static constexpr int kLanes = 8, kRowsAtOnce = kWarpSize / kLanes;

  // Copies row `first + own` of the tile from from(first).
  template <class From>
  __device__ __forceinline__ void copy_rows(const DecodePool& pool, unsigned there, unsigned chunk, unsigned to,
                                            const From& from) {
    // A lane's rows differ in bit 2 and above it, since own < 4; bit 2 is one of the chunk as well (box_offset).
    const unsigned to_row[2] = {opaque(to), opaque(to ^ 4 * kVectorBytes)};
    unsigned with_box[kBoxes];  // `there`, unless the rows end before the lane's chunk of a box
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      with_box[box] = pool.row_bytes > box * 128 + static_cast<int>(chunk) * kVectorBytes ? there : 0;
#pragma unroll
    for (int first = 0; first < kTile; first += kRowsAtOnce) {
      const char* const row = from(first);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
        cp_async_if(with_box[box] & 1u << first, to_row[first / 4 % 2] + first * 128 + box * kBoxBytes, row + box * 128);
    }
  }
  __device__ __forceinline__ void start_rows() {
    const unsigned lane = threadIdx.x % kWarpSize, chunk = lane % kLanes, own = lane / kLanes;
    const unsigned to = ring_ + next_stage() + box_offset(static_cast<int>(own), static_cast<int>(chunk));
    if constexpr (kDense) {
      // The rows follow one another in the only block.
      const unsigned there = rows_there() >> own;
      const auto start = [&](const DecodePool& pool, unsigned to) __attribute__((always_inline)) {
        const unsigned before = static_cast<unsigned>(walk_.n) * pool.block_vectors + (first_row() + own) * pool.row_vectors;
        const char* const data = pool.data + key_head_ * pool.head_bytes + (uint64_t{before} + chunk) * kVectorBytes;
        copy_rows(pool, there, chunk, to, [&](int first) { return data + uint64_t{first * pool.row_vectors} * kVectorBytes; });
      };
      start(keys_, to);
      start(values_, to + kBoxes * kBoxBytes);
    } else {
      check_block();
      // Bit `first` is of the row from which the lane copies.
      const unsigned there = __ballot_sync(~0u, block_ >= 0) >> own;
      const auto start = [&](const DecodePool& pool, unsigned to) __attribute__((always_inline)) {
        const unsigned before = vectors_before(pool);
        // Terms that all rows share are added once; the compiler would add some of them per row.
        const uint64_t data =
            opaque(reinterpret_cast<uint64_t>(pool.data + key_head_ * pool.head_bytes) + chunk * kVectorBytes);
        copy_rows(pool, there, chunk, to, [&](int first) {
          return reinterpret_cast<const char*>(data + uint64_t{__shfl_sync(~0u, before, first + own)} * kVectorBytes);
        });
      };
      start(keys_, to);
      start(values_, to + kBoxes * kBoxBytes);
    }
  }

  const DecodePool &keys_, &values_;
  int stages_;
  int next_ = 0, oldest_ = 0;  // stages
  unsigned ring_;  // an address in shared memory; as a pointer it would be found again and again
};

}  // namespace flash_online::cuda
