// Spans as kernels read them. Before scores are computed, one small kernel writes the least and largest bounds of every 64
// rows: by them a tile of scores is hidden, clear or mixed, whatever its size and without reading its rows. In mixed tiles the
// bounds of each row decide (sparsity.cuh).
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
// `counter`: set to 0 unless it is null. The next kernel may be a dependent launch (pdl.cuh).
void fill_span_tables(const AttentionProblem& problem, const SpanTables& tables, CUstream_st* stream,
                      unsigned* counter = nullptr);

}  // namespace flash_online::cuda
