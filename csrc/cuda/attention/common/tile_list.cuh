// Which block of which head of which sequence a block of threads works on: one list for dense and packed calls.
//
// Packed sequences have lengths that the device alone knows, so the host counts an upper bound: with sequence n given the
// blocks from start / size + n on, no two sequences share one (start / size grows by the length / size, rounded either way, and
// n makes up for the rounding), and all of them fit into total / size + sequences. A block that no sequence has is left at
// once. Of no sequences there is a block a head all the same, for the rows that are nobody's.
#pragma once

#include "../../../core/mask.h"
#include "../../../core/sequence.h"
#include "../../hw/launch.h"

namespace flash_online::cuda {

// Blocks of `size` rows in one head of all sequences; for packed sequences at most.
struct TileList {
  int64_t blocks;  // of a dense sequence; of all packed ones
  int64_t sequences;  // dense
  int64_t heads;
  FLASH_ONLINE_HD int64_t count() const { return blocks * heads * sequences; }

  static TileList of(const AttentionProblem& problem, bool over_keys, int64_t heads, int64_t size) {
    if (!problem.query_starts) {
      const int64_t rows = over_keys ? problem.keys : problem.queries;
      return {(rows + size - 1) / size, problem.batch, heads};
    }
    return {(over_keys ? problem.total_keys : problem.total_queries) / size + (problem.batch > 0 ? problem.batch : 1), 1,
            heads};
  }
};

struct TileCoord {
  int64_t sequence;
  int head;
  int64_t block;  // within the sequence; may be past its end
};

// The last of `count` sequences with starts[n] / size + n <= block: 31 candidates a step, by a whole warp.
__device__ __forceinline__ int64_t sequence_at(const int32_t* starts, int64_t count, int64_t total, int64_t size,
                                               int64_t block) {
  int64_t low = 0, high = count;  // the answer is in [low, high)
  while (high - low > 1) {
    const int64_t step = (high - low + kWarpSize - 1) / kWarpSize, candidate = low + step * (threadIdx.x % kWarpSize);
    const bool before = candidate < high && clamp(starts[candidate], 0, total) / size + candidate <= block;
    const int last = 31 - __clz(__ballot_sync(~0u, before) | 1u);
    low += step * last;
    high = min(high, low + step);
  }
  return low;
}

// For tile_coord, of a dense or a packed list: the number of block `index` where `section` heads at a time go block by block,
// and not head by head.
__device__ __forceinline__ int64_t side_by_side(const TileList& list, unsigned index, unsigned section) {
  const unsigned blocks = static_cast<unsigned>(list.blocks), heads = static_cast<unsigned>(list.heads * list.sequences),
                 first = index / (section * blocks) * section, count = min(section, heads - first),
                 rest = index - first * blocks;
  return (first + rest % count) * blocks + rest / count;
}

// `reversed`: the last blocks first, where later rows have more to do.
__device__ __forceinline__ TileCoord tile_coord(const AttentionProblem& problem, const TileList& list, int64_t index,
                                                bool over_keys, int64_t size, bool reversed) {
  // A grid has less than 2^31 blocks: divisions of 32 bits, which take a fraction of the time.
  const unsigned number = static_cast<unsigned>(index), blocks = static_cast<unsigned>(list.blocks),
                 heads = static_cast<unsigned>(list.heads);
  const int64_t of_head = number % blocks;
  const unsigned rest = number / blocks;
  const int64_t block = reversed ? list.blocks - 1 - of_head : of_head;
  TileCoord place{rest / heads, static_cast<int>(rest % heads), block};
  if (!problem.query_starts) return place;
  const int32_t* const starts = over_keys ? problem.key_starts : problem.query_starts;
  const int64_t total = over_keys ? problem.total_keys : problem.total_queries;
  place.sequence = sequence_at(starts, problem.batch, total, size, block);
  place.block = block - (clamp(starts[place.sequence], 0, total) / size + place.sequence);
  return place;
}

}  // namespace flash_online::cuda
