// Numbers the tiles of a launch, and finds the tile of a CTA by its index: one list for dense and packed calls.
//
// Only the device knows the lengths of packed sequences, so the host counts an upper bound: sequence n owns the tiles from
// starts[n] / size + n on. No two sequences share a tile, since from one sequence to the next starts[n] / size grows by the
// length / size, rounded either way, and n makes up for the rounding. All tiles fit into total / size + sequences. The CTA of a
// tile that no sequence has exits at once. With zero sequences we still launch one CTA per head, to zero the padding rows.
#pragma once

#include <algorithm>

#include "../../../core/integer.h"
#include "../../../core/mask.h"
#include "../../../core/sequence.h"
#include "../../hw/warp.h"

namespace flash_online::cuda {

// Heads in sections of `heads` each; the last section has all that are left.
struct HeadSections {
  int heads, last;  // last: that section's number
  bool in_list_order = false;  // every head is a section of its own
};

// Tiles of `size` queries or keys: first those of one head of one sequence, then its next head, then the next sequence.
struct TileList {
  int64_t blocks;  // tiles per head: of one dense sequence, or of all packed ones
  int64_t sequences;  // 1 if packed
  int64_t heads;
  HeadSections sections = {.heads = 1, .last = 0, .in_list_order = true};  // the order in which a launch takes the tiles
  FLASH_ONLINE_HD int64_t count() const { return blocks * heads * sequences; }

  static TileList of(const AttentionProblem& problem, bool over_keys, int64_t heads, int64_t size) {
    if (!problem.query_starts) return {ceil_div(over_keys ? problem.keys : problem.queries, size), problem.batch, heads};
    return {(over_keys ? problem.total_keys : problem.total_queries) / size + (problem.batch > 0 ? problem.batch : 1), 1,
            heads};
  }

  // The same tiles in an order in which a launch ends evenly. Where tiles see different numbers of rows, those of as many heads
  // as run at once (`tiles_at_once`) are launched by length, the longest first, and not head by head, so that the last ones to
  // run are short. Heads that are left over join the last sections: in a section of one head, its longest tile would be among
  // the last to run (28 % of the time idle at 45 heads of 12 tiles). `least`: the least number of heads per section.
  TileList by_length(const Visibility& visible, int64_t tiles_at_once, int64_t least = 1) const {
    const bool bounded = visible.left >= 0 || visible.right >= 0;
    const int64_t all = heads * sequences, at_once = bounded ? tiles_at_once / std::max(blocks, int64_t{1}) : 1,
                  section = std::clamp(std::max(at_once, least), int64_t{1}, std::max(all, int64_t{1})),
                  joined = bounded ? 2 : 1;  // full sections that the last one is made of, with what is left
    TileList ordered = *this;
    ordered.sections = {.heads = static_cast<int>(section),
                        .last = static_cast<int>(std::max(all / section - joined, int64_t{0})),
                        .in_list_order = section == 1 && joined == 1};
    return ordered;
  }
};

struct TileCoord {
  int64_t sequence;
  int head;
  int64_t block;  // the tile's number within its sequence and head; of a packed sequence possibly past its end
};

// The packed sequence that owns a tile: the last n of `count` with starts[n] / size + n <= block. A whole warp searches, and
// tests 31 candidates per step.
__device__ __forceinline__ int64_t sequence_of_tile(const int32_t* starts, int64_t count, int64_t total, int64_t size,
                                                    int64_t block) {
  int64_t low = 0, high = count;  // the answer is in [low, high)
  while (high - low > 1) {
    const int64_t step = ceil_div(high - low, kWarpSize), candidate = low + step * (threadIdx.x % kWarpSize);
    const bool before = candidate < high && clamp(starts[candidate], 0, total) / size + candidate <= block;
    const int last = 31 - __clz(__ballot_sync(~0u, before) | 1u);
    low += step * last;
    high = min(high, low + step);
  }
  return low;
}

// The index in the list of the tile that is launched as number `launched`, where tiles are launched section by section: within
// a section, the first tiles of all its heads, then the second tiles of all its heads, and so on.
FLASH_ONLINE_HD int64_t tile_index_in_sections(const TileList& list, unsigned launched) {
  const unsigned tiles = static_cast<unsigned>(list.blocks), size = static_cast<unsigned>(list.sections.heads),
                 last = static_cast<unsigned>(list.sections.last), section = launched / (size * tiles),
                 first_head = (section < last ? section : last) * size,
                 section_heads = section < last ? size : static_cast<unsigned>(list.heads * list.sequences) - first_head,
                 within_section = launched - first_head * tiles;
  return (first_head + within_section % section_heads) * tiles + within_section / section_heads;
}

// The same where the first tile of each head is taken before all others: attention sinks and global tokens are there, and many
// more rows may see them than see other tiles.
FLASH_ONLINE_HD int64_t tile_index_after_first_tiles(const TileList& list, unsigned taken) {
  const unsigned tiles = static_cast<unsigned>(list.blocks), planes = static_cast<unsigned>(list.heads * list.sequences);
  if (taken < planes) return int64_t{taken} * tiles;
  TileList others = list;
  others.blocks = tiles - 1;
  taken -= planes;
  const unsigned index = list.sections.in_list_order ? taken : static_cast<unsigned>(tile_index_in_sections(others, taken)),
                 plane = index / (tiles - 1);
  return int64_t{plane} * tiles + index % (tiles - 1) + 1;
}

// The coordinates of the tile that a list has at `index` in its order. `reversed` numbers a head's tiles from the last to the
// first, so that the longest ones start first where later rows have more to do.
__device__ __forceinline__ TileCoord tile_coord(const AttentionProblem& problem, const TileList& list, int64_t index,
                                                bool over_keys, int64_t size, bool reversed) {
  if (!list.sections.in_list_order) index = tile_index_in_sections(list, static_cast<unsigned>(index));
  // A grid has less than 2^31 CTAs: 32-bit divisions suffice, and take a fraction of the time of 64-bit ones.
  const unsigned index32 = static_cast<unsigned>(index), tiles = static_cast<unsigned>(list.blocks),
                 heads = static_cast<unsigned>(list.heads);
  const int64_t within_head = index32 % tiles;
  const unsigned plane = index32 / tiles;
  const int64_t block = reversed ? list.blocks - 1 - within_head : within_head;
  TileCoord coord{plane / heads, static_cast<int>(plane % heads), block};
  if (!problem.query_starts) return coord;
  const int32_t* const starts = over_keys ? problem.key_starts : problem.query_starts;
  const int64_t total = over_keys ? problem.total_keys : problem.total_queries;
  coord.sequence = sequence_of_tile(starts, problem.batch, total, size, block);
  coord.block = block - (clamp(starts[coord.sequence], 0, total) / size + coord.sequence);
  return coord;
}

// A tile of queries or of keys of one head, and its sequence.
struct WorkTile {
  int64_t batch, head, block;  // block: the tile's number in the sequence; may be past its end
  Sequence sequence;
  int queries, keys;  // the sequence's

  __device__ __forceinline__ WorkTile(const AttentionProblem& problem, const TileCoord& coord)
      : batch(coord.sequence),
        head(coord.head),
        block(coord.block),
        sequence(sequence_of(problem, batch)),
        queries(static_cast<int>(sequence.queries.count)),
        keys(static_cast<int>(sequence.keys.count)) {}
};

}  // namespace flash_online::cuda
