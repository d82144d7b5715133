// Sparsity as kernels ask for it: what spans and a list of blocks hide, of tiles of scores, and of single scores in mixed
// tiles.
#pragma once

#include <climits>

#include "../../../core/config.h"
#include "../../../core/problem.h"
#include "span_bounds.cuh"

namespace flash_online::cuda {

// ---- tiles

// The list of blocks of one head: a number per tile of 64 queries and 64 or 128 keys, 0 where the tile is not listed.
struct ListedTiles {
  const uint8_t* data = nullptr;  // null: there is no list, and every tile is visible
  int64_t query_step = 0, key_step = 0;
  int key_shift = 0;  // a tile has 2^key_shift keys

  __device__ __forceinline__ ListedTiles() {}
  __device__ __forceinline__ ListedTiles(const View4<const uint8_t*>& tiles, int tile_keys, int64_t batch, int64_t head)
      : data(tiles.data ? tiles.data + batch * tiles.stride[0] + head * tiles.stride[1] : nullptr),
        query_step(tiles.stride[2]),
        key_step(tiles.stride[3]),
        key_shift(tile_keys == 64 ? 6 : 7) {}

  // Whether the list has the tile of this query and this key.
  __device__ __forceinline__ bool has(int query, int key) const {
    return __ldg(data + query / kMaskMapTile * query_step + (key >> key_shift) * key_step) != 0;
  }
  // The kind of queries [query, last_query) and keys [key, last_key), which lie in at most two tiles each way.
  __device__ __forceinline__ MaskKind kind(int query, int last_query, int key, int last_key) const {
    const bool x[4] = {has(query, key), has(query, last_key - 1), has(last_query - 1, key), has(last_query - 1, last_key - 1)};
    return kind(x[0] || x[1] || x[2] || x[3], x[0] && x[1] && x[2] && x[3]);
  }
  // The same for the 64 queries of one tile.
  __device__ __forceinline__ MaskKind kind(int query, int key, int last_key) const {
    const bool first = has(query, key), last = has(query, last_key - 1);
    return kind(first || last, first && last);
  }

 private:
  __device__ __forceinline__ static MaskKind kind(bool any, bool all) {
    return !any ? MaskKind::kHidden : all ? MaskKind::kClear : MaskKind::kMixed;
  }
};

// What spans and a list of blocks say of the tiles of one head of a sequence.
struct TileSparsity {
  const SpanBounds *queries = nullptr, *keys = nullptr;  // from the sequence's first rows on; null: there are none
  int query_intervals = 0, key_intervals = 0;
  ListedTiles listed;

  __device__ __forceinline__ TileSparsity() {}
  __device__ __forceinline__ TileSparsity(const AttentionProblem& problem, const SpanTables& tables, int64_t sequence,
                                          int64_t head)
      : queries(tables.queries.of(problem.query_starts, problem.total_queries, sequence, head)),
        keys(tables.keys.of(problem.key_starts, problem.total_keys, sequence, head)),
        query_intervals(tables.queries.intervals),
        key_intervals(tables.keys.intervals),
        listed(problem.tiles, problem.tile_keys, sequence, head) {}

  __device__ __forceinline__ bool exists() const { return queries || keys || listed.data; }

  // Those of interval `interval` of the rows [row, last_row), at most kRows.
  template <int kRows>
  __device__ __forceinline__ static SpanBounds bounds_of(const SpanBounds* bounds, int intervals, int interval, int row,
                                                         int last_row) {
    constexpr int kBlocks = (kRows + kMaskMapTile - 1) / kMaskMapTile + (kRows % kMaskMapTile != 0);
    const int first = row / kMaskMapTile, last = (last_row - 1) / kMaskMapTile;
    SpanBounds all;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {  // a block twice changes nothing
      const int4 x = __ldg(reinterpret_cast<const int4*>(bounds + min(first + n, last) * intervals + interval));
      all = {min(all.least_begin, x.x), max(all.most_begin, x.y), min(all.least_end, x.z), max(all.most_end, x.w)};
    }
    return all;
  }

  // Narrows the range [begin, end) of blocks of kSize places to those that the intervals of rows [row, last_row) reach.
  template <int kSize>
  __device__ __forceinline__ static void narrow(const SpanBounds* bounds, int intervals, int row, int last_row, int& begin,
                                                int& end) {
    if (!bounds) return;
    int first = INT_MAX, last = INT_MIN;
    for (int block = row / kMaskMapTile; block * kMaskMapTile < last_row; ++block)
      for (int n = 0; n < intervals; ++n) {
        const int4 x = __ldg(reinterpret_cast<const int4*>(bounds + block * intervals + n));
        first = min(first, x.x), last = max(last, x.w);
      }
    begin = max(begin, first / kSize), end = last <= 0 ? begin : min(end, (last - 1) / kSize + 1);
  }

  // The kind of the tile of queries [query, last_query) and keys [key, last_key). All of these rows exist.
  __device__ __forceinline__ MaskKind kind(int query, int last_query, int key, int last_key) const {
    bool hidden = false, clear = true;
    if (listed.data) {
      const MaskKind kind = listed.kind(query, last_query, key, last_key);
      hidden = kind == MaskKind::kHidden, clear = kind == MaskKind::kClear;
    }
    if (queries) add(queries, query_intervals, query, last_query, key, last_key, hidden, clear);
    if (keys) add(keys, key_intervals, key, last_key, query, last_query, hidden, clear);
    return hidden ? MaskKind::kHidden : clear ? MaskKind::kClear : MaskKind::kMixed;
  }

 private:
  // Rows [row, last_row) and places [first, last).
  __device__ __forceinline__ static void add(const SpanBounds* bounds, int intervals, int row, int last_row, int first,
                                             int last, bool& hidden, bool& clear) {
    bool all_hidden = true;
#pragma unroll 1
    for (int block = row / kMaskMapTile; block * kMaskMapTile < last_row; ++block) {
      bool block_clear = false;
      for (int n = 0; n < intervals; ++n) {
        const int4 x = __ldg(reinterpret_cast<const int4*>(bounds + block * intervals + n));
        const SpanBounds interval{x.x, x.y, x.z, x.w};
        all_hidden &= interval.hides(first, last);
        block_clear |= interval.clears(first, last);
      }
      clear &= block_clear;
    }
    hidden |= all_hidden;
  }
};

// ---- rows

// The one or two intervals of a row.
struct RowSpans {
  int begin[2], end[2] = {};

  __device__ __forceinline__ RowSpans(const int32_t* bounds, int intervals) {
    begin[0] = __ldg(bounds), end[0] = __ldg(bounds + 1), begin[1] = 0;
    if (intervals > 1) begin[1] = __ldg(bounds + 2), end[1] = __ldg(bounds + 3);
  }
  __device__ __forceinline__ bool has(int place) const {
    return (place >= begin[0] && place < end[0]) || (place >= begin[1] && place < end[1]);
  }
};

// What hides the scores of one head of a sequence.
struct HeadSparsity {
  const int32_t *queries = nullptr, *keys = nullptr;  // of the sequence's first rows; null: there are none
  int64_t query_stride = 0, key_stride = 0;
  int64_t head_stride = 0;  // of queries
  int query_intervals = 0, key_intervals = 0;
  ListedTiles listed;

  __device__ __forceinline__ HeadSparsity(const AttentionProblem& problem, const Sequence& sequence, int64_t batch,
                                          int64_t head)
      : HeadSparsity(problem.query_spans, problem.key_spans, problem.tiles, problem.tile_keys, sequence, batch, head) {}
  __device__ __forceinline__ HeadSparsity(const SpanView& query_spans, const SpanView& key_spans,
                                          const View4<const uint8_t*>& tiles, int tile_keys, const Sequence& sequence,
                                          int64_t batch, int64_t head)
      : listed(tiles, tile_keys, batch, head) {
    const auto rows_of = [&](const SpanView& view, int64_t first) -> const int32_t* {
      return view.data ? view.data + batch * view.stride[0] + head * view.stride[1] + first * view.stride[2] : nullptr;
    };
    queries = rows_of(query_spans, sequence.queries.begin), keys = rows_of(key_spans, sequence.keys.begin);
    query_stride = query_spans.stride[2], key_stride = key_spans.stride[2];
    head_stride = query_spans.stride[1];
    query_intervals = query_spans.intervals, key_intervals = key_spans.intervals;
  }
  __device__ __forceinline__ bool exists() const { return queries || keys || listed.data; }
  // `head` counts from this one on.
  __device__ __forceinline__ RowSpans of_query(int query, int head = 0) const {
    return {queries + head * head_stride + query * query_stride, query_intervals};
  }
  __device__ __forceinline__ RowSpans of_key(int key) const { return {keys + key * key_stride, key_intervals}; }
  // Whether a query may see a key. Both rows exist.
  __device__ __forceinline__ bool show(int query, int key) const {
    return (!listed.data || listed.has(query, key)) && (!queries || of_query(query).has(key)) &&
           (!keys || of_key(key).has(query));
  }
};

}  // namespace flash_online::cuda
