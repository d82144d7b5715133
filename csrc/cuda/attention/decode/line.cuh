// The line of work of a decoding step, and how CTAs share it.
//
// An item is work that one CTA could do by itself: one tile of rows of a key head of a sequence, over all keys that they see,
// or over one kv_split of them if num_splits is given. The items of all sequences follow one another on a line, measured in
// steps: in a step, each warp of a CTA takes a tile of keys. Every CTA takes an equal share of the line. An item that spans
// several shares is cut, and the partials of its parts are merged. Only the device knows the lengths of sequences, so each warp
// sums them itself.
//
// All numbers have 32 bits: decode.cuh refuses longer lines.
#pragma once

#include <algorithm>
#include <bit>

#include "../../../core/cache.h"
#include "../../../core/mask.h"
#include "../../hw/warp.h"
#include "../cache/kv_splits.cuh"
#include "tiles.h"

namespace flash_online::cuda {

// The cut of a call's rows and keys.
struct DecodeShape {
  int group;  // query heads per key head: a key head's rows are these heads interleaved, query by query
  int tile_rows, row_tiles;  // row_tiles: of the longest sequence, per key head; 1 if row tiles run abreast
  int key_heads;  // divided by heads_abreast
  int tile_keys_log2, warps_log2;
  int window_left, window_right;  // below 0: no bound
  int least_share = 1;  // units: shares are no smaller, even if CTAs are then idle
  int unit_steps = 1;  // steps per unit of the line: shares begin and end between units
  int teams = 1;  // of warps() warps each, in a CTA of a dense call: they take the units of a part by turns
  // Neighbouring key heads, and row tiles of a key head, that run abreast: that many CTAs take the same share, each for one
  // head and row tile. They read the same keys at a time, or adjacent ones in a cache that has a token's heads together.
  int heads_abreast = 1, row_tiles_abreast = 1;

  // `group`: how many query heads lie side by side in a tile.
  static DecodeShape of(const AttentionProblem& problem, int64_t group, int tile_rows, int tile_keys, int warps,
                        int heads_abreast = 1, bool rows_abreast = false) {
    constexpr int64_t kFar = 1 << 29;
    const auto bound = [](int64_t window) { return static_cast<int>(window < kFar ? window : -1); };
    const auto log2 = [](int power) { return std::countr_zero(static_cast<unsigned>(power)); };
    const int row_tiles = static_cast<int>(std::max<int64_t>(ceil_div(group * problem.queries, int64_t{tile_rows}), 1));
    return {.group = static_cast<int>(group),
            .tile_rows = tile_rows,
            .row_tiles = rows_abreast ? 1 : row_tiles,
            .key_heads = static_cast<int>(problem.heads / group / heads_abreast),
            .tile_keys_log2 = log2(tile_keys),
            .warps_log2 = log2(warps),
            .window_left = bound(problem.visible.left),
            .window_right = bound(problem.visible.right),
            .heads_abreast = heads_abreast,
            .row_tiles_abreast = rows_abreast ? row_tiles : 1};
  }
  __host__ __device__ constexpr int abreast() const { return heads_abreast * row_tiles_abreast; }
  // The tile of rows and the key head of the `which`-th CTA of a share, from those on the line.
  __device__ __forceinline__ int2 of_abreast(int2 tile_and_head, int which) const {
    const int head = static_cast<int>(static_cast<unsigned>(which) / static_cast<unsigned>(row_tiles_abreast));
    return {tile_and_head.x + which - head * row_tiles_abreast, tile_and_head.y * heads_abreast + head};
  }
  // The most steps of an item, over all of its keys or those in the windows of all queries; and the most units of the line, per
  // head and row tile that run abreast.
  int64_t most_steps(const AttentionProblem& problem) const {
    const int64_t tile = int64_t{1} << tile_keys_log2;
    int64_t tiles = ceil_div(capacity_of(problem.cache), tile);
    if (window_left >= 0 && window_right >= 0) {
      const int64_t seen = problem.queries + window_left + window_right;  // keys, which may begin anywhere in a tile
      tiles = std::min(tiles, (seen + tile - 2) / tile + 1);
    }
    return std::max<int64_t>(ceil_div(tiles, int64_t{1} << warps_log2), 1);
  }
  int64_t most_units(const AttentionProblem& problem) const {
    return problem.batch * key_heads * row_tiles * (most_steps(problem) + std::max<int64_t>(problem.cache.kv_splits, 1) - 1);
  }

  __host__ __device__ constexpr int warps() const { return 1 << warps_log2; }
  __host__ __device__ constexpr int unit_tiles() const { return unit_steps << warps_log2; }
  // The tiles of rows per key head of a sequence of `queries` queries, at least one.
  __device__ __forceinline__ int row_tiles_of(int queries) const {
    if (row_tiles == 1) return 1;
    return static_cast<int>(static_cast<unsigned>(queries * group + tile_rows - 1) / static_cast<unsigned>(tile_rows));
  }
  // The first tile of a range of keys, and one past the last tile.
  __device__ __forceinline__ int first_tile(int begin) const { return begin >> tile_keys_log2; }
  __device__ __forceinline__ int end_tile(int end) const { return (end + (1 << tile_keys_log2) - 1) >> tile_keys_log2; }
  // The first key that a query at a position sees, and one past the last key.
  __device__ __forceinline__ int begin_of(int position) const { return window_left < 0 ? 0 : max(position - window_left, 0); }
  __device__ __forceinline__ int end_of(int position, int keys) const {
    return window_right < 0 ? keys : min(position + window_right + 1, keys);
  }
};

// A sequence on the line.
struct DecodeSequence {
  int queries_begin, queries;
  int keys_begin, keys;  // by their place in the cache
  int offset;  // of the queries' positions
  int seen_begin, seen_end;  // the keys that some query sees; one empty range stands for all
  int kv_splits;
  int weight;  // units per item, at least 1: an item that sees nothing has a result too

  // Per kv_split: tiles of rows of all key heads.
  __device__ __forceinline__ int items(const DecodeShape& shape) const { return shape.key_heads * shape.row_tiles_of(queries); }
  __device__ __forceinline__ int length(const DecodeShape& shape) const {
    return queries > 0 ? kv_splits * items(shape) * weight : 0;
  }
  // An item's tile of rows, and its key head.
  __device__ __forceinline__ int2 tile_and_head(const DecodeShape& shape, int item) const {
    if (shape.row_tiles == 1) return {0, item};
    const int row_tiles = shape.row_tiles_of(queries);
    const int head = static_cast<int>(static_cast<unsigned>(item) / static_cast<unsigned>(row_tiles));
    return {item - head * row_tiles, head};
  }
};

__device__ __forceinline__ DecodeSequence decode_sequence(const AttentionProblem& problem, const KvSplits& kv_splits,
                                                          const DecodeShape& shape, int n) {
  const Sequence sequence = cached_sequence<int>(problem, n);
  DecodeSequence s;
  s.queries_begin = static_cast<int>(sequence.queries.begin);
  s.queries = static_cast<int>(sequence.queries.count);
  s.keys_begin = static_cast<int>(sequence.keys.begin);
  s.keys = static_cast<int>(sequence.keys.count);
  s.offset = static_cast<int>(sequence.visible.offset);
  s.seen_begin = shape.begin_of(s.offset);
  s.seen_end = shape.end_of(s.queries - 1 + s.offset, s.keys);
  if (s.seen_end <= s.seen_begin) s.seen_begin = s.seen_end = 0;
  int tiles = shape.end_tile(s.seen_end) - shape.first_tile(s.seen_begin);
  s.kv_splits = 1;
  if (kv_splits.most > 1) {
    s.kv_splits = static_cast<int>(kv_splits.count_of<unsigned>(sequence));
    tiles = static_cast<int>(static_cast<unsigned>(tiles + s.kv_splits - 1) / static_cast<unsigned>(s.kv_splits));
  }
  s.weight = max(tiles + shape.warps() - 1, shape.warps()) >> shape.warps_log2;
  if (shape.unit_steps > 1)
    s.weight =
        static_cast<int>(static_cast<unsigned>(s.weight + shape.unit_steps - 1) / static_cast<unsigned>(shape.unit_steps));
  return s;
}

// The units [begin, end) of the line that a CTA takes, and the sequence in which they begin.
struct DecodeShare {
  int begin, end;  // equal: nothing
  int size;  // of all shares but the last
  int sequence, sequence_begin;
  DecodeSequence s;  // that sequence

  // Share `cta` of `ctas` of a line of `length` units, of at least `least` each, without its sequence.
  __device__ __forceinline__ static DecodeShare of_line(int length, int least, int ctas, int cta) {
    DecodeShare share{};
    share.size = max(static_cast<int>(static_cast<unsigned>(length + ctas - 1) / static_cast<unsigned>(ctas)), least);
    share.begin = min(cta * share.size, length);
    share.end = min(share.begin + share.size, length);
    return share;
  }
};

// Finds the share of CTA `cta` of `ctas`. The warp goes over the sequences in chunks; each lane looks at kPerLane sequences of
// a chunk, so that the loads of their lengths overlap. A whole warp calls it, and all lanes get the same.
template <int kPerLane>
__device__ __forceinline__ DecodeShare find_share_by_chunks(const AttentionProblem& problem, const KvSplits& kv_splits,
                                                            const DecodeShape& shape, int ctas, int cta) {
  constexpr int kChunk = kPerLane * kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, sequences = static_cast<int>(problem.batch);
  DecodeShare share{};
  int before = 0;  // the line before the chunk of sequences
  // Over all sequences: first how long the line is, then where the share begins. One chunk does for both.
#pragma unroll 1
  for (int chunk = 0;;) {
    const int first = chunk + kPerLane * lane;
    int length[kPerLane], own = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      length[i] = first + i < sequences ? decode_sequence(problem, kv_splits, shape, first + i).length(shape) : 0;
      own += length[i];
    }
    int end = own;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    const int all = before + __shfl_sync(~0u, end, kWarpSize - 1);
    if (share.size == 0 && chunk + kChunk >= sequences) {
      share = DecodeShare::of_line(all, shape.least_share, ctas, cta);
      if (share.begin == share.end) break;
      if (chunk > 0) {
        chunk = before = 0;
        continue;
      }
    }
    if (share.size > 0) {
      const unsigned after = __ballot_sync(~0u, before + end > share.begin);
      if (after != 0) {
        const int owner = __ffs(static_cast<int>(after)) - 1;
        int begin = before + end - own, n = first;
#pragma unroll
        for (int i = 0; i + 1 < kPerLane; ++i)
          if (n == first + i && begin + length[i] <= share.begin) begin += length[i], ++n;
        share.sequence = __shfl_sync(~0u, n, owner);
        share.sequence_begin = __shfl_sync(~0u, begin, owner);
        share.s = decode_sequence(problem, kv_splits, shape, share.sequence);
        break;
      }
    }
    before = all;
    chunk += kChunk;
  }
  return share;
}

__device__ __forceinline__ DecodeShare find_share(const AttentionProblem& problem, const KvSplits& kv_splits,
                                                  const DecodeShape& shape, int ctas, int cta) {
  if (problem.batch > kWarpSize) return find_share_by_chunks<4>(problem, kv_splits, shape, ctas, cta);
  if (problem.batch > 1) return find_share_by_chunks<1>(problem, kv_splits, shape, ctas, cta);
  const DecodeSequence s = decode_sequence(problem, kv_splits, shape, 0);
  DecodeShare share = DecodeShare::of_line(s.length(shape), shape.least_share, ctas, cta);
  share.s = s;
  return share;
}

// A walk over the parts of items that a share consists of.
struct DecodeWalk {
  int n;  // the sequence
  int item, kv_split;  // of the sequence
  int tile, end;  // the part's tiles of keys
  int first_unit;  // of the item
  bool begins_item, ends_item;
  DecodeSequence s;
  int left, units;  // of the share, this part counted; of the part

  __device__ __forceinline__ DecodeWalk() {}
  // Before the first part: next() goes to it.
  __device__ __forceinline__ explicit DecodeWalk(const DecodeShare& share)
      : n(share.sequence), s(share.s), left(share.end - share.begin), units(0), begin_(share.begin - share.sequence_begin) {}

  __device__ __forceinline__ bool done() const { return left <= 0; }
  __device__ __forceinline__ void next(const AttentionProblem& problem, const KvSplits& kv_splits, const DecodeShape& shape,
                                       bool whole_items) {
#pragma unroll 1
    for (;;) {
      left -= units;
      if (left <= 0) return;
      const bool seeks = begin_ >= 0;
      bool is_new = false;
      if (!seeks && ++item == s.items(shape)) {
        item = 0;
        if (++kv_split == s.kv_splits) kv_split = 0, ++n, is_new = true;
      }
      while (is_new) {
        s = decode_sequence(problem, kv_splits, shape, n);
        if (s.queries > 0) break;
        ++n;
      }
      int skip = 0;
      if (seeks) {
        item = static_cast<int>(static_cast<unsigned>(begin_) / static_cast<unsigned>(s.weight));
        skip = begin_ - item * s.weight;
        for (kv_split = 0; item >= s.items(shape); ++kv_split) item -= s.items(shape);
        begin_ = -1;
      }
      if (!whole_items || skip == 0) return enter(shape, skip, whole_items);
      units = s.weight - skip;  // an item belongs to the share in which it begins
    }
  }

 private:
  __device__ __forceinline__ void enter(const DecodeShape& shape, int skip, bool whole_items) {
    int begin = s.seen_begin, last = s.seen_end;
    if (s.kv_splits > 1) {
      const Rows own = kv_split_of<unsigned>(s.keys, s.kv_splits, kv_split);
      begin = max(begin, static_cast<int>(own.begin));
      last = min(last, static_cast<int>(own.begin + own.count));
      if (last <= begin) begin = last = 0;
    }
    units = whole_items ? s.weight : min(left, s.weight - skip);
    begins_item = skip == 0;
    ends_item = whole_items || skip + units == s.weight;
    first_unit = skip;
    tile = shape.first_tile(begin) + skip * shape.unit_tiles();
    end = whole_items ? shape.end_tile(last) : min(tile + units * shape.unit_tiles(), shape.end_tile(last));
  }

  int begin_;  // of the share in its first sequence; -1 once the walk has begun
};

}  // namespace flash_online::cuda
