// The tiles of packed sequences, whose lengths the device alone knows, in the order in which a launch's blocks of threads take
// them. A warp of each finds that order out for itself, as it goes, from the sequences' starts: no kernel before this one.
//
// Sequences come in chunks, and within a chunk by their number of keys, the longest first, so that what is left for the end is
// cheap. A sequence's heads come in parts of about as many tiles as there are blocks of threads: those at work together then
// read the same keys. Within a part the last rows come first, which see the most under a causal mask.
#pragma once

#include <cstdint>

#include "../../../../core/sequence.h"
#include "../../../hw/launch.h"

namespace flash_online::cuda {

struct PackedList {
  const int32_t *query_starts, *key_starts;
  int sequences, total_queries, total_keys;
  int queries, keys;  // of a sequence at most
  int heads, heads_a_key;
  int level_keys;  // sequences are ordered by length in steps of so many keys; 0: they come as they are
  // How many tiles have been taken beyond the first of each block of threads; null: they are dealt out in turn.
  unsigned* taken;
};

// Of tiles of kTileRows queries. All of a warp's lanes call it, and get the same answers.
template <int kTileRows>
class PackedWalk {
 public:
  static constexpr int kChunk = 4 * kWarpSize;  // sequences

  struct Shared {
    int end[kChunk];  // in the order of tiles: those of a head up to and with each sequence's
    int level[kWarpSize];
    uint8_t order[kChunk];  // which sequence of the chunk
  };
  struct Place {
    int sequence, head, row_tile;  // sequence -1: no more
  };

  __device__ PackedWalk(const PackedList& list, Shared& shared)
      : list_(list), shared_(shared), lane_(static_cast<int>(threadIdx.x) % kWarpSize), number_(blockIdx.x) {}

  __device__ Place next() {
    const unsigned number = number_, heads = static_cast<unsigned>(list_.heads);
    const int tile = static_cast<int>(number / heads);  // were there one head
    while (tile >= before_ + of_chunk_) {
      if (first_ + kChunk >= list_.sequences) return {-1, 0, 0};
      load_chunk();
    }
    while (true) {
      const int n = at_ + lane_;
      const unsigned found = __ballot_sync(~0u, n >= kChunk || before_ + shared_.end[n] > tile);
      at_ += found ? __ffs(found) - 1 : kWarpSize;
      if (found) break;
    }
    const int begin = at_ > 0 ? shared_.end[at_ - 1] : 0;
    const unsigned tiles = static_cast<unsigned>(shared_.end[at_] - begin);
    unsigned rest = number - static_cast<unsigned>(before_ + begin) * heads;
    // Heads of the same keys stay together.
    const unsigned together = static_cast<unsigned>(list_.heads_a_key), groups = heads / together;
    const unsigned parts = min((heads * tiles + gridDim.x - 1) / gridDim.x, groups),
                   wide = (groups + parts - 1) / parts * together;
    const unsigned part = rest / (wide * tiles), width = min(wide, heads - part * wide);
    rest -= part * wide * tiles;
    const unsigned level = rest / width;
    return {first_ + shared_.order[at_], static_cast<int>(part * wide + rest - level * width),
            static_cast<int>(tiles - 1 - level)};
  }

  // Behind each next(); the block of threads has this tile then, whenever it gets to it.
  __device__ void take() {
    if (!list_.taken) {
      number_ += gridDim.x;
      return;
    }
    unsigned taken = 0;
    if (lane_ == 0) taken = atomicAdd(list_.taken, 1u);
    number_ = gridDim.x + __shfl_sync(~0u, taken, 0);
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

  // Tiles of a head of the chunk's sequence n, and its level: the longest sequences' is 0.
  __device__ void look(int n, int& tiles, int& level) const {
    n += first_;
    tiles = level = 0;
    if (n < list_.sequences)
      tiles = (static_cast<int>(packed_rows(list_.query_starts, n, list_.queries, list_.total_queries).count) + kTileRows - 1) /
              kTileRows;
    if (list_.level_keys == 0) return;
    level = kWarpSize - 1;
    if (tiles > 0)
      level -= static_cast<int>(packed_rows(list_.key_starts, n, list_.keys, list_.total_keys).count) / list_.level_keys;
  }

  // Counts the warp's sequences, one a lane, in their levels; returns a lane's number among those of its level so far.
  __device__ int count(int level) {
    const unsigned same = __match_any_sync(~0u, level), earlier = same & ((1u << lane_) - 1);
    const int number = shared_.level[level] + __popc(earlier);
    __syncwarp();
    if (earlier == 0) shared_.level[level] += __popc(same);
    __syncwarp();
    return number;
  }

  __device__ void load_chunk() {
    __syncwarp();  // all have read the chunk before
    before_ += of_chunk_;
    first_ += kChunk;
    at_ = 0;
    const int of_this = min(list_.sequences - first_, kChunk);
    int tiles, level;
    if (list_.level_keys != 0) {
      shared_.level[lane_] = 0;
      __syncwarp();
#pragma unroll 1
      for (int n = lane_; n - lane_ < of_this; n += kWarpSize) look(n, tiles, level), count(level);
      const int of_level = shared_.level[lane_];
      shared_.level[lane_] = inclusive_sum(of_level, lane_) - of_level;
      __syncwarp();
    }
#pragma unroll 1
    for (int n = lane_; n - lane_ < of_this; n += kWarpSize) {
      look(n, tiles, level);
      const int place = list_.level_keys != 0 ? count(level) : n;
      shared_.order[place] = static_cast<uint8_t>(n);
      shared_.end[place] = tiles;
    }
    __syncwarp();
    of_chunk_ = 0;
#pragma unroll 1
    for (int n = lane_; n - lane_ < of_this; n += kWarpSize) {
      const int end = of_chunk_ + inclusive_sum(n < of_this ? shared_.end[n] : 0, lane_);
      shared_.end[n] = end;
      of_chunk_ = __shfl_sync(~0u, end, kWarpSize - 1);
    }
    __syncwarp();
  }

  const PackedList& list_;
  Shared& shared_;
  int lane_;
  unsigned number_;  // of the next tile, among those of all heads
  int first_ = -kChunk;  // sequence of the chunk
  int before_ = 0, of_chunk_ = 0;  // tiles of a head: of earlier chunks, and of this one
  int at_ = 0;  // place in the chunk's order
};

}  // namespace flash_online::cuda
