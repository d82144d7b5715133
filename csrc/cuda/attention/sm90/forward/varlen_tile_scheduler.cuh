// The tiles of packed sequences in the order in which the CTAs of a launch take them. Only the device knows the lengths: one
// warp of each CTA computes the order as it goes, from the starts of the sequences: no other kernel has to run first.
//
// Sequences come in chunks, and within a chunk by their number of keys, the longest first, so that the tiles at the end are
// cheap. The heads of a sequence come in groups of about as many tiles as there are CTAs: tiles that run at the same time then
// read the same keys. Within a group the last rows come first, which see the most keys under a causal mask.
#pragma once

#include <cstdint>

#include "../../../../core/cache.h"
#include "../../../../core/sequence.h"
#include "../../../hw/warp.h"
#include "tile_scheduler.cuh"

namespace flash_online::cuda {

struct VarlenTileList {
  const int32_t *query_starts, *key_starts;
  int sequences, total_queries, total_keys;
  int max_queries, max_keys;  // per sequence
  int heads, q_heads_per_key_head;
  int level_keys;  // sequences are ordered by length in levels of this many keys; 0: they keep their order
  // The number of tiles claimed beyond the first one of each CTA; null: the order is static.
  unsigned* tile_counter;

  // The rows of sequence n in tiles, and its keys.
  __device__ __forceinline__ int rows(int n) const {
    return static_cast<int>(packed_rows(query_starts, n, max_queries, total_queries).count);
  }
  __device__ __forceinline__ int keys(int n) const {
    return static_cast<int>(packed_rows(key_starts, n, max_keys, total_keys).count);
  }
};

// The tile list over cached keys. The query heads that share keys count as rows, 2^group_shift of them for each query; `heads`
// is divided by that.
struct CachedTileList : VarlenTileList {
  AttentionProblem problem;
  int group_shift;
  unsigned page, blocks;  // of the pool
  int boxes, box_rows;  // a block of keys comes in so many TMA boxes of so many keys each

  __device__ __forceinline__ int rows(int n) const {
    return static_cast<int>(cached_sequence(problem, n).queries.count) << group_shift;
  }
  __device__ __forceinline__ int keys(int n) const { return static_cast<int>(cached_sequence(problem, n).keys.count); }
};

// For tiles of kTileRows rows. All lanes of a warp call it, and get the same answers. List: one of the above.
template <int kTileRows, class List = VarlenTileList>
class VarlenTileScheduler {
 public:
  static constexpr int kChunk = 4 * kWarpSize;  // sequences

  struct Shared {
    int end[kChunk];  // in the order of tiles: tiles per head of the chunk's sequences up to and including this one
    int level[kWarpSize];
    uint8_t order[kChunk];  // index of the sequence within the chunk
  };

  __device__ VarlenTileScheduler(const List& list, Shared& shared)
      : list_(list), shared_(shared), lane_(static_cast<int>(threadIdx.x) % kWarpSize), index_(blockIdx.x) {}

  // The batch of the tile is the sequence.
  __device__ WorkTileCoord next() {
    const unsigned index = index_, heads = static_cast<unsigned>(list_.heads);
    const int tile = static_cast<int>(index / heads);  // as if there were one head
    while (tile >= tiles_before_ + chunk_tiles_) {
      if (first_sequence_ + kChunk >= list_.sequences) return {-1, 0, 0};
      load_chunk();
    }
    while (true) {
      const int n = position_ + lane_;
      const unsigned found = __ballot_sync(~0u, n >= kChunk || tiles_before_ + shared_.end[n] > tile);
      position_ += found ? __ffs(found) - 1 : kWarpSize;
      if (found) break;
    }
    const int begin = position_ > 0 ? shared_.end[position_ - 1] : 0;
    const unsigned tiles = static_cast<unsigned>(shared_.end[position_] - begin);
    unsigned rest = index - static_cast<unsigned>(tiles_before_ + begin) * heads;
    // Heads of the same keys stay together.
    const unsigned q_heads = static_cast<unsigned>(list_.q_heads_per_key_head), key_heads = heads / q_heads;
    const unsigned head_groups = min((heads * tiles + gridDim.x - 1) / gridDim.x, key_heads),
                   group_heads = (key_heads + head_groups - 1) / head_groups * q_heads;
    const unsigned head_group = rest / (group_heads * tiles), heads_here = min(group_heads, heads - head_group * group_heads);
    rest -= head_group * group_heads * tiles;
    const unsigned row = rest / heads_here;
    return {first_sequence_ + shared_.order[position_], static_cast<int>(head_group * group_heads + rest - row * heads_here),
            static_cast<int>(tiles - 1 - row)};
  }

  // Called after each next(): from then on the CTA owns the following tile, whenever it gets to it.
  __device__ void claim() {
    if (!list_.tile_counter) {
      index_ += gridDim.x;
      return;
    }
    unsigned claimed = 0;
    if (lane_ == 0) claimed = atomicAdd(list_.tile_counter, 1u);
    index_ = gridDim.x + __shfl_sync(~0u, claimed, 0);
  }

 private:
  __device__ static int inclusive_sum(int x, int lane) {
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int other = __shfl_up_sync(~0u, x, step);
      if (lane >= step) x += other;
    }
    return x;
  }

  // The tiles per head of sequence n of the chunk, and its level: 0 for the longest sequences.
  __device__ void measure(int n, int& tiles, int& level) const {
    n += first_sequence_;
    tiles = level = 0;
    if (n < list_.sequences) tiles = (list_.rows(n) + kTileRows - 1) / kTileRows;
    if (list_.level_keys == 0) return;
    level = kWarpSize - 1;
    if (tiles > 0) level -= list_.keys(n) / list_.level_keys;
  }

  // Counts the sequences of the warp, one per lane, in their levels; returns how many of the lane's level were counted before
  // the lane's own.
  __device__ int count(int level) {
    const unsigned same = __match_any_sync(~0u, level), earlier = same & ((1u << lane_) - 1);
    const int before = shared_.level[level] + __popc(earlier);
    __syncwarp();
    if (earlier == 0) shared_.level[level] += __popc(same);
    __syncwarp();
    return before;
  }

  // A counting sort of the next chunk by level, and the running sum of its tiles.
  __device__ void load_chunk() {
    __syncwarp();  // all lanes have read the chunk before
    tiles_before_ += chunk_tiles_;
    first_sequence_ += kChunk;
    position_ = 0;
    const int sequences = min(list_.sequences - first_sequence_, kChunk);
    int tiles, level;
    if (list_.level_keys != 0) {
      shared_.level[lane_] = 0;
      __syncwarp();
#pragma unroll 1
      for (int n = lane_; n - lane_ < sequences; n += kWarpSize) measure(n, tiles, level), count(level);
      const int in_level = shared_.level[lane_];
      shared_.level[lane_] = inclusive_sum(in_level, lane_) - in_level;
      __syncwarp();
    }
#pragma unroll 1
    for (int n = lane_; n - lane_ < sequences; n += kWarpSize) {
      measure(n, tiles, level);
      const int position = list_.level_keys != 0 ? count(level) : n;
      shared_.order[position] = static_cast<uint8_t>(n);
      shared_.end[position] = tiles;
    }
    __syncwarp();
    chunk_tiles_ = 0;
#pragma unroll 1
    for (int n = lane_; n - lane_ < sequences; n += kWarpSize) {
      const int end = chunk_tiles_ + inclusive_sum(n < sequences ? shared_.end[n] : 0, lane_);
      shared_.end[n] = end;
      chunk_tiles_ = __shfl_sync(~0u, end, kWarpSize - 1);
    }
    __syncwarp();
  }

  const List& list_;
  Shared& shared_;
  int lane_;
  unsigned index_;  // of the next tile, among those of all heads
  int first_sequence_ = -kChunk;  // of the chunk
  int tiles_before_ = 0, chunk_tiles_ = 0;  // tiles per head: of earlier chunks, and of this one
  int position_ = 0;  // in the order of the chunk
};

}  // namespace flash_online::cuda
