// Spans as kernels read them. Before scores are computed, one small kernel writes the least and largest bounds of every 64
// rows: by them a tile of scores is hidden, clear or mixed, whatever its size and without reading its rows. In mixed tiles the
// bounds of each row decide.
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
// their spans.
struct SpanTable {
  TileList list = {0, 0, 0};
  int intervals = 0;  // 0: there are no spans
  SpanBounds* data = nullptr;  // [list.count()][intervals]

  int64_t count() const { return list.count() * intervals; }
  // Those of a head's rows, from the sequence's first row on; null without spans. `starts`: packed, of the sequences in `total`
  // rows.
  __device__ __forceinline__ const SpanBounds* of(const int32_t* starts, int64_t total, int64_t sequence, int64_t head) const {
    if (intervals == 0) return nullptr;
    const int64_t own_head = list.heads == 1 ? 0 : head;
    const int64_t first = starts ? own_head * list.blocks + clamp(starts[sequence], 0, total) / kMaskMapTile + sequence
                                 : ((list.sequences == 1 ? 0 : sequence) * list.heads + own_head) * list.blocks;
    return data + first * intervals;
  }
};

struct SpanTables {
  SpanTable queries, keys;
  FLASH_ONLINE_HD bool exist() const { return queries.intervals > 0 || keys.intervals > 0; }
  int64_t bytes() const { return (queries.count() + keys.count()) * static_cast<int64_t>(sizeof(SpanBounds)); }
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

// ---- words of bits, as MaskBits and TransposedMaskBits have them

// How many of the 64 places from `first` on lie before `place`, which may be any number.
__device__ __forceinline__ int places_before(int place, int first) {
  return min(max(place, first), first + kMaskMapTile) - first;
}

// The bits of the columns before `place`, of a tile of 64 columns from `first` on: bit 4 j + e for the lane's columns 8 j + 2 *
// (lane % 4) + e.
__device__ __forceinline__ unsigned lane_columns_before(int place, int first, int lane) {
  const int column = places_before(place, first), bit = column / 8 * 4 + min(max(column % 8 - lane % 4 * 2, 0), 2);
  return static_cast<unsigned>((uint64_t{1} << bit) - 1) & 0x33333333u;
}
__device__ __forceinline__ unsigned lane_columns_in(const RowSpans& spans, int first, int lane) {
  const auto between = [&](int n) {
    return lane_columns_before(spans.end[n], first, lane) & ~lane_columns_before(spans.begin[n], first, lane);
  };
  return between(0) | between(1);
}

// One interval of each of 64 rows of spans, two rows per lane of a warp. The warps that use it have few registers, so that
// loops are rolled.
struct LaneSpans {
  int begin[2], length[2];

  // Of the rows from `first` on; those past `last` are like it. Bounds are clamped to [0, places].
  __device__ __forceinline__ LaneSpans(const int32_t* rows, int64_t stride, int interval, int first, int last, int places,
                                       int lane) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int32_t* const at = rows + min(first + lane + n * kWarpSize, last) * stride + 2 * interval;
      begin[n] = min(max(__ldg(at), 0), places);
      length[n] = min(max(__ldg(at + 1), begin[n]), places) - begin[n];
    }
  }

  // The interval of row 8 j + 2 * (lane % 4) + e, from any lane's.
  struct Interval {
    int begin, length;
    __device__ __forceinline__ unsigned has(int place) const {
      return static_cast<unsigned>(place - begin) < static_cast<unsigned>(length);
    }
  };
  __device__ __forceinline__ Interval of(int j, int e, int lane) const {
    const int from = 8 * j % kWarpSize + lane % 4 * 2 + e;
    const bool second = j >= kWarpSize / 8;
    return {__shfl_sync(~0u, second ? begin[1] : begin[0], from), __shfl_sync(~0u, second ? length[1] : length[0], from)};
  }
};

// The words of MaskBits that a lane has of the 16 queries from query + kStep * n on, n < kGroups, and the keys [key, key + 64).
// Rows past `queries` and `keys` have any bits.
template <int kStep, int kGroups>
__device__ __forceinline__ void mask_bits_of_spans(unsigned (&words)[kGroups], const HeadSpans& spans, int query, int queries,
                                                   int key, int keys, int lane) {
  const int first_query = query + lane / 4;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    words[n] = ~0u;
    if (!spans.queries) continue;
    const int own = first_query + kStep * n;
    words[n] = lane_columns_in(spans.of_query(min(own, queries - 1)), key, lane) |
               lane_columns_in(spans.of_query(min(own + 8, queries - 1)), key, lane) << 2;
  }
  if (!spans.keys) return;
  unsigned by_key[kGroups] = {};
#pragma unroll 1
  for (int interval = 0; interval < spans.key_intervals; ++interval) {
    const LaneSpans columns(spans.keys, spans.key_stride, interval, key, keys - 1, queries, lane);
    unsigned shown[kGroups] = {};
#pragma unroll 1
    for (int j = kMaskMapTile / 8 - 1; j >= 0; --j) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) shown[n] <<= 4;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const LaneSpans::Interval column = columns.of(j, e, lane);
#pragma unroll
        for (int n = 0; n < kGroups; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half) shown[n] |= column.has(first_query + kStep * n + 8 * half) << (2 * half + e);
      }
    }
#pragma unroll
    for (int n = 0; n < kGroups; ++n) by_key[n] |= shown[n];
  }
#pragma unroll
  for (int n = 0; n < kGroups; ++n) words[n] &= by_key[n];
}

// The words of TransposedMaskBits that a lane has of the queries [query, query + 64) and the 16 keys from key + 16 * n on, n <
// kGroups.
template <int kGroups>
__device__ __forceinline__ void transposed_bits_of_spans(unsigned (&words)[kGroups], const HeadSpans& spans, int query,
                                                         int queries, int key, int keys, int lane) {
  const int first_query = query + lane % 4 * 2, first_key = key + lane / 4;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    words[n] = ~0u;
    if (!spans.keys) continue;
    words[n] = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowSpans own = spans.of_key(min(first_key + 16 * n + 8 * half, keys - 1));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        // The upper bits of a byte belong to the first of the lane's queries of this parity.
        const auto before = [&](int place) {
          return 0xff & ~(0xff >> min((places_before(place, first_query) - e + 7) >> 3, 8));
        };
        const int bits = (before(own.end[0]) & ~before(own.begin[0])) | (before(own.end[1]) & ~before(own.begin[1]));
        words[n] |= static_cast<unsigned>(bits) << (16 * e + 8 * half);
      }
    }
  }
  if (!spans.queries) return;
  unsigned by_query[kGroups] = {};
#pragma unroll 1
  for (int interval = 0; interval < spans.query_intervals; ++interval) {
    const LaneSpans columns(spans.queries, spans.query_stride, interval, query, queries - 1, keys, lane);
    unsigned shown[kGroups] = {};
    // Bits move up as TransposedMaskBits::place() has them: the first query's is the highest of its byte.
#pragma unroll 1
    for (int j = 0; j < kMaskMapTile / 8; ++j) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n) shown[n] <<= 1;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const LaneSpans::Interval column = columns.of(j, e, lane);
#pragma unroll
        for (int n = 0; n < kGroups; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half) shown[n] |= column.has(first_key + 16 * n + 8 * half) << (16 * e + 8 * half);
      }
    }
#pragma unroll
    for (int n = 0; n < kGroups; ++n) by_query[n] |= shown[n];
  }
#pragma unroll
  for (int n = 0; n < kGroups; ++n) words[n] &= by_query[n];
}

}  // namespace flash_online::cuda
