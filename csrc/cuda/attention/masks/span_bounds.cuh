// Spans as kernels read them. Before scores are computed, one small kernel writes the least and largest bounds of every 64
// rows: by them a tile of scores is hidden, clear or mixed, whatever its size and without reading its rows. In mixed tiles the
// bounds of each row decide (span_bits.cuh).
#pragma once

#include <climits>

#include "../../../core/config.h"
#include "../../../core/problem.h"
#include "../../hw/warp.h"
#include "../common/tile_list.cuh"
#include "mask_map.cuh"

namespace flash_online::cuda {

// ---- tiles

// The least and largest bounds of one interval over a block of rows. A row with an empty interval leaves least_begin and
// most_end as they are, and keeps the tile from being clear. A bound beyond what a row sees by its position counts as none.
struct alignas(16) SpanBounds {
  int least_begin = INT_MAX, most_begin = INT_MIN, least_end = INT_MAX, most_end = INT_MIN;

  FLASH_ONLINE_HD void add(int begin, int end) {
    const bool empty = end <= begin;
    least_begin = empty || least_begin < begin ? least_begin : begin;
    most_end = empty || most_end > end ? most_end : end;
    most_begin = empty ? INT_MAX : most_begin > begin ? most_begin : begin;
    least_end = empty ? INT_MIN : least_end < end ? least_end : end;
  }
  // Whether no row's interval has any place of [first, last), or every row's has all of them.
  FLASH_ONLINE_HD bool hides(int first, int last) const { return most_end <= first || least_begin >= last; }
  FLASH_ONLINE_HD bool clears(int first, int last) const { return most_begin <= first && least_end >= last; }
};

// The bounds of query_spans or key_spans. A list of tiles of kMaskMapTile rows, with one head, or one sequence, where all share
// their spans. For dense sequences there are also the bounds of groups of kGroupTiles tiles: far rows are passed over by them.
struct SpanTable {
  static constexpr int kGroupTiles = kWarpSize, kGroupRows = kGroupTiles * kMaskMapTile;
  TileList list = {0, 0, 0};
  bool packed = false;
  int intervals = 0;  // 0: there are no spans
  SpanBounds* data = nullptr;  // [list.count()][intervals]
  SpanBounds* group_data = nullptr;  // [groups()][intervals], unless packed

  FLASH_ONLINE_HD int64_t groups_per_head() const { return ceil_div(list.blocks, int64_t{kGroupTiles}); }
  FLASH_ONLINE_HD int64_t groups() const { return groups_per_head() * list.heads * list.sequences; }
  int64_t count() const { return list.count() * intervals; }
  int64_t group_count() const { return packed ? 0 : groups() * intervals; }
  // Those of a head's rows, from the sequence's first row on; null without spans. `starts`: packed, of the sequences in `total`
  // rows.
  __device__ __forceinline__ const SpanBounds* of(const int32_t* starts, int64_t total, int64_t sequence, int64_t head) const {
    if (intervals == 0) return nullptr;
    const int64_t own_head = list.heads == 1 ? 0 : head;
    const int64_t first = starts ? own_head * list.blocks + clamp(starts[sequence], 0, total) / kMaskMapTile + sequence
                                 : ((list.sequences == 1 ? 0 : sequence) * list.heads + own_head) * list.blocks;
    return data + first * intervals;
  }
  // Narrows the range [begin, end) of blocks of kSize rows to those between the first and the last group with an interval that
  // reaches any of the places [first, last). A whole warp calls it, and all lanes get the same range.
  template <int kSize>
  __device__ __forceinline__ void narrow(int64_t sequence, int64_t head, int first, int last, int& begin, int& end) const {
    if (intervals == 0 || packed || begin >= end) return;
    const int64_t plane = (list.sequences == 1 ? 0 : sequence) * list.heads + (list.heads == 1 ? 0 : head);
    const SpanBounds* const bounds = group_data + plane * groups_per_head() * intervals;
    const int end_group = (end * kSize - 1) / kGroupRows + 1, groups = static_cast<int>(groups_per_head());
    int from = INT_MAX, to = -1;
#pragma unroll 1
    for (int group = begin * kSize / kGroupRows; group < end_group; group += kWarpSize) {
      const int own = group + static_cast<int>(threadIdx.x) % kWarpSize;
      bool reaches = false;
      if (own < min(end_group, groups))
        for (int n = 0; n < intervals; ++n) {
          const int4 x = __ldg(reinterpret_cast<const int4*>(bounds + own * intervals + n));
          reaches |= !SpanBounds{x.x, x.y, x.z, x.w}.hides(first, last);
        }
      const unsigned all = __ballot_sync(~0u, reaches);
      if (all) from = min(from, group + __ffs(all) - 1), to = group + 31 - __clz(all);
    }
    if (to < 0) {
      end = begin;
    } else {
      begin = max(begin, from * kGroupRows / kSize);
      end = min(end, ((to + 1) * kGroupRows + kSize - 1) / kSize);
    }
  }
};

struct SpanTables {
  SpanTable queries, keys;
  FLASH_ONLINE_HD bool exist() const { return queries.intervals > 0 || keys.intervals > 0; }
  int64_t bytes() const {
    return (queries.count() + queries.group_count() + keys.count() + keys.group_count()) *
           static_cast<int64_t>(sizeof(SpanBounds));
  }
};

// The tables of a problem, dense or packed, in a workspace of bytes() bytes, or their sizes alone if it is null.
SpanTables span_tables_of(const AttentionProblem& problem, void* workspace);
// `counter`: set to 0 unless it is null.
void fill_span_tables(const AttentionProblem& problem, const SpanTables& tables, CUstream_st* stream,
                      unsigned* counter = nullptr);

// What spans say of the tiles of one head of a sequence.
struct TileSpans {
  const SpanBounds *queries = nullptr, *keys = nullptr;  // from the sequence's first rows on; null: there are none
  int query_intervals = 0, key_intervals = 0;

  __device__ __forceinline__ TileSpans() {}
  __device__ __forceinline__ TileSpans(const AttentionProblem& problem, const SpanTables& tables, int64_t sequence,
                                       int64_t head)
      : queries(tables.queries.of(problem.query_starts, problem.total_queries, sequence, head)),
        keys(tables.keys.of(problem.key_starts, problem.total_keys, sequence, head)),
        query_intervals(tables.queries.intervals),
        key_intervals(tables.keys.intervals) {}

  __device__ __forceinline__ bool exist() const { return queries || keys; }

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

  // Of the tile of queries [query, last_query) and keys [key, last_key), all of which exist.
  __device__ __forceinline__ MaskKind kind(int query, int last_query, int key, int last_key) const {
    bool hidden = false, clear = true;
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

// The spans of one head of a sequence.
struct HeadSpans {
  const int32_t *queries = nullptr, *keys = nullptr;  // of the sequence's first rows; null: there are none
  int64_t query_stride = 0, key_stride = 0;
  int64_t head_stride = 0;  // of queries
  int query_intervals = 0, key_intervals = 0;

  __device__ __forceinline__ HeadSpans(const AttentionProblem& problem, const Sequence& sequence, int64_t batch, int64_t head)
      : HeadSpans(problem.query_spans, problem.key_spans, sequence, batch, head) {}
  __device__ __forceinline__ HeadSpans(const SpanView& query_spans, const SpanView& key_spans, const Sequence& sequence,
                                       int64_t batch, int64_t head) {
    const auto rows_of = [&](const SpanView& view, int64_t first) -> const int32_t* {
      return view.data ? view.data + batch * view.stride[0] + head * view.stride[1] + first * view.stride[2] : nullptr;
    };
    queries = rows_of(query_spans, sequence.queries.begin), keys = rows_of(key_spans, sequence.keys.begin);
    query_stride = query_spans.stride[2], key_stride = key_spans.stride[2];
    head_stride = query_spans.stride[1];
    query_intervals = query_spans.intervals, key_intervals = key_spans.intervals;
  }
  // `head` counts from this one on.
  __device__ __forceinline__ RowSpans of_query(int query, int head = 0) const {
    return {queries + head * head_stride + query * query_stride, query_intervals};
  }
  __device__ __forceinline__ RowSpans of_key(int key) const { return {keys + key * key_stride, key_intervals}; }
  // Whether a query may see a key, both of which exist.
  __device__ __forceinline__ bool show(int query, int key) const {
    return (!queries || of_query(query).has(key)) && (!keys || of_key(key).has(query));
  }
};

}  // namespace flash_online::cuda
