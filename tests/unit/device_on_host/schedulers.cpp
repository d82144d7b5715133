// The tile schedulers and block lists of the CUDA kernels, compiled from csrc/cuda for ctypes.
// test_attention_schedulers.py compiles this file after warp.h and calls its functions. A function returns the number of rows
// written to `out`, or -1 after an error, with a text in last_error().
#include <random>
#include <string>

struct int4 {
  int x, y, z, w;
};

#include "core/batches.h"
#include "cuda/attention/common/tile_list.cuh"
#include "cuda/attention/masks/sparse_bits.cuh"
#include "cuda/attention/masks/visible_blocks.cuh"
#include "cuda/attention/sm90/forward/tile_scheduler.cuh"
#include "cuda/attention/sm90/forward/varlen_tile_scheduler.cuh"
#include "cuda/attention/sm90/tile_cuts.h"
#include "guarded.h"

using namespace flash_online;
using namespace flash_online::cuda;
using device_on_host::kLanes;

namespace {

class Rows4 {
 public:
  Rows4(int64_t* out, int64_t capacity) : out_(out), capacity_(capacity) {}
  void add(int64_t a, int64_t b, int64_t c, int64_t d) {
    if (count == capacity_) throw std::runtime_error("more rows than expected");
    int64_t* const to = out_ + 4 * count++;
    to[0] = a, to[1] = b, to[2] = c, to[3] = d;
  }
  int64_t count = 0;

 private:
  int64_t *out_, capacity_;
};

// All lanes must have got the same tile.
void require_equal(const WorkTileCoord (&of_lane)[kLanes]) {
  for (const WorkTileCoord& one : of_lane)
    if (one.batch != of_lane[0].batch ||
        (one.batch >= 0 && (one.head != of_lane[0].head || one.row_tile != of_lane[0].row_tile)))
      throw std::runtime_error("the lanes of a warp got different tiles");
}

// Calls next(cta, rows) for CTAs in a random order until it has returned false for all of them.
template <class F>
void run_ctas(int ctas, unsigned seed, F&& next) {
  std::mt19937 random(seed);
  std::vector<int> left(static_cast<size_t>(ctas));
  for (int n = 0; n < ctas; ++n) left[static_cast<size_t>(n)] = n;
  while (!left.empty()) {
    const size_t at = random() % left.size();
    if (next(left[at])) continue;
    left[at] = left.back();
    left.pop_back();
  }
}

}  // namespace

extern "C" {

// (row tiles, those that are even, heads per section, the last section) of the schedule of a dense problem.
int64_t dense_schedule(int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t head_dim, int64_t left,
                       int64_t right, int64_t offset, int64_t tile_rows, int section_rounds, int q_heads_per_key_head,
                       int64_t ctas, int64_t* out) {
  return guarded([&] {
    AttentionProblem problem;
    problem.batch = batch, problem.heads = heads, problem.queries = queries, problem.keys = keys;
    problem.head_dim = problem.head_dim_v = head_dim;
    problem.visible = {left, right, offset};
    const TileSchedule schedule =
        TileSchedule::make(problem, ceil_div(queries, tile_rows), tile_rows, section_rounds, q_heads_per_key_head, 2, ctas);
    Rows4(out, 1).add(schedule.row_tiles, schedule.even_row_tiles, schedule.sections.heads, schedule.sections.last);
    return int64_t{1};
  });
}

// Rows of (CTA, batch, head, row tile), in the order of each CTA.
int64_t dense_tiles(int batch, int heads, int row_tiles, int even_row_tiles, int section_heads, int last_section,
                    int batch_innermost, int ctas, int64_t* out, int64_t capacity) {
  struct Arguments {
    TileSchedule schedule;
    int batch, heads;
  };
  return guarded([&] {
    const Arguments arguments{{row_tiles, even_row_tiles, batch_innermost != 0, {section_heads, last_section}}, batch, heads};
    Rows4 rows(out, capacity);
    gridDim.x = static_cast<unsigned>(ctas);
    for (int cta = 0; cta < ctas; ++cta) {
      blockIdx.x = static_cast<unsigned>(cta);
      TileScheduler scheduler;
      for (WorkTileCoord tile = scheduler.next(arguments); tile.batch >= 0; tile = scheduler.next(arguments))
        rows.add(cta, tile.batch, tile.head, tile.row_tile);
    }
    return rows.count;
  });
}

// Rows of (CTA, sequence, head, row tile) of 128 queries, in the order in which CTAs that take turns at random claim them.
int64_t varlen_tiles(const int32_t* query_starts, const int32_t* key_starts, int sequences, int total_queries, int total_keys,
                     int max_queries, int max_keys, int heads, int q_heads_per_key_head, int level_keys, int dynamic, int ctas,
                     unsigned seed, int64_t* out, int64_t capacity) {
  using Scheduler = VarlenTileScheduler<128>;
  struct Cta {
    device_on_host::Cta warp;
    Scheduler::Shared shared;
    std::vector<Scheduler> lane;
  };
  return guarded([&] {
    unsigned counter = 0;
    const VarlenTileList list{query_starts,
                              key_starts,
                              sequences,
                              total_queries,
                              total_keys,
                              max_queries,
                              max_keys,
                              heads,
                              q_heads_per_key_head,
                              level_keys,
                              dynamic ? &counter : nullptr};
    Rows4 rows(out, capacity);
    gridDim.x = static_cast<unsigned>(ctas);
    std::vector<std::unique_ptr<Cta>> all;
    for (int n = 0; n < ctas; ++n) {
      blockIdx.x = static_cast<unsigned>(n);
      all.push_back(std::make_unique<Cta>());
      for (threadIdx.x = 0; threadIdx.x < kLanes; ++threadIdx.x) all.back()->lane.emplace_back(list, all.back()->shared);
    }
    run_ctas(ctas, seed, [&](int n) {
      Cta& cta = *all[static_cast<size_t>(n)];
      WorkTileCoord tile[kLanes];
      cta.warp.run(static_cast<unsigned>(n), [&](int lane) {
        tile[lane] = cta.lane[static_cast<size_t>(lane)].next();
        cta.lane[static_cast<size_t>(lane)].claim();
      });
      require_equal(tile);
      if (tile[0].batch < 0) return false;
      rows.add(n, tile[0].batch, tile[0].head, tile[0].row_tile);
      return true;
    });
    return rows.count;
  });
}

// Rows of (index, sequence, head, block) of every tile of a list; starts: null if dense.
int64_t listed_tiles(int64_t batch, int64_t heads, int64_t rows_per_sequence, const int32_t* starts, int64_t total,
                     int64_t size, int reversed, int64_t* out, int64_t capacity) {
  return guarded([&] {
    AttentionProblem problem;
    problem.batch = batch, problem.heads = heads, problem.queries = rows_per_sequence;
    problem.query_starts = problem.key_starts = starts;
    problem.total_queries = total;
    const TileList list = TileList::of(problem, false, heads, size);
    Rows4 rows(out, capacity);
    device_on_host::Cta warp;
    for (int64_t index = 0; index < list.count(); ++index) {
      TileCoord found[kLanes];
      warp.run(0, [&](int lane) { found[lane] = tile_coord(problem, list, index, false, size, reversed != 0); });
      for (const TileCoord& one : found)
        if (one.sequence != found[0].sequence || one.head != found[0].head || one.block != found[0].block)
          throw std::runtime_error("the lanes of a warp got different tiles");
      rows.add(index, found[0].sequence, found[0].head, found[0].block);
    }
    return rows.count;
  });
}

// Rows of (launched, index of the tile, its index if first tiles go first, 0).
int64_t tiles_in_sections(int64_t blocks, int64_t sequences, int64_t heads, int section, int last_section, int64_t* out,
                          int64_t capacity) {
  return guarded([&] {
    const TileList list{blocks, sequences, heads, {section, last_section}};
    Rows4 rows(out, capacity);
    for (int64_t n = 0; n < list.count(); ++n)
      rows.add(n, tile_index_in_sections(list, static_cast<unsigned>(n)),
               tile_index_after_first_tiles(list, static_cast<unsigned>(n)), 0);
    return rows.count;
  });
}

// Rows of (tile, its first block, blocks, slot or -1), one per item of a launch in which the last tiles are cut.
int64_t tile_cuts(int64_t tiles, int64_t blocks, int64_t sms, int64_t tile_cost, int64_t least_part, int64_t parts_per_block,
                  int64_t* out, int64_t capacity) {
  return guarded([&] {
    const TileCosts costs{static_cast<int>(tile_cost), static_cast<int>(least_part), static_cast<int>(parts_per_block)};
    const TileCuts cuts = TileCuts::choose(tiles, blocks, sms, costs);
    Rows4 rows(out, capacity);
    const unsigned all = static_cast<unsigned>(blocks);
    for (unsigned item = 0; item < cuts.items(); ++item) {
      const TilePart part = cuts.part_of(item);
      rows.add(part.tile, part.begin(all), part.length(all), part.count > 1 ? static_cast<int64_t>(part.slot) : -1);
    }
    for (int n = 0; n < cuts.cut_tiles(); ++n) {
      const TilePart first = cuts.first_part(n), same = cuts.part_of(static_cast<unsigned>(cuts.whole) + first.slot);
      if (first.tile != same.tile || first.count != same.count || first.slot != same.slot || same.number != 0)
        throw std::runtime_error("first_part and part_of differ");
    }
    return rows.count;
  });
}

// Rows of (batch, head, row tile, 0), in the order in which tiles are claimed.
int64_t claimed_tiles(int batch, int heads, int row_tiles, int even_row_tiles, int section_heads, int last_section,
                      int64_t* out, int64_t capacity) {
  struct Arguments {
    TileSchedule schedule;
    int batch, heads;
  };
  return guarded([&] {
    const Arguments arguments{{row_tiles, even_row_tiles, false, {section_heads, last_section}}, batch, heads};
    Rows4 rows(out, capacity);
    unsigned counter = 0;
    gridDim = {1, 1, 1};
    device_on_host::Cta warp;
    warp.run(0, [&](int lane) {
      ClaimingTileScheduler scheduler;
      for (WorkTileCoord tile; (tile = scheduler.next(arguments, &counter, lane)).batch >= 0;)
        if (lane == 0) rows.add(tile.batch, tile.head, tile.row_tile, 0);
    });
    return rows.count;
  });
}

// The words of bits that the Hopper kernels make of spans, of one head's rows of 2 * intervals bounds (intervals 0: none), and
// of tiles [.., keys / tile_keys] of a list (tile_keys 0: none). Rows of (group, lane, word, 0): forward, groups of 16 queries
// and 64 keys; transposed, of 64 queries and groups of 16 keys.
int64_t sparse_words(const int32_t* query_spans, int query_intervals, int queries, const int32_t* key_spans, int key_intervals,
                     int keys, const uint8_t* tiles, int tile_keys, int query, int key, int transposed, int64_t* out,
                     int64_t capacity) {
  return guarded([&] {
    const auto view = [](const int32_t* data, int intervals) {
      return SpanView{intervals > 0 ? data : nullptr, {0, 0, 2 * intervals}, intervals};
    };
    View4<const uint8_t*> listed;
    if (tile_keys > 0) listed = {tiles, {0, 0, (keys + tile_keys - 1) / tile_keys, 1}};
    const HeadSparsity sparsity(view(query_spans, query_intervals), view(key_spans, key_intervals), listed, tile_keys,
                                {{0, queries}, {0, keys}, {}}, 0, 0);
    constexpr int kGroups = 4;
    unsigned words[kLanes][kGroups];
    device_on_host::Cta warp;
    warp.run(0, [&](int lane) {
      transposed ? transposed_bits_of(words[lane], sparsity, query, queries, key, keys, lane)
                 : mask_bits_of(words[lane], sparsity, query, queries, key, keys, lane);
    });
    Rows4 rows(out, capacity);
    for (int group = 0; group < kGroups; ++group)
      for (int lane = 0; lane < kLanes; ++lane) rows.add(group, lane, words[lane][group], 0);
    return rows.count;
  });
}

// One row (begin, end, 0, 0): the range [begin, end) of blocks of `size` rows without the far ones. bounds: of the groups of
// rows of a dense sequence, [groups][intervals].
int64_t narrowed_blocks(const int32_t* bounds, int64_t groups, int intervals, int size, int first, int last, int begin, int end,
                        int64_t* out, int64_t capacity) {
  return guarded([&] {
    std::vector<SpanBounds> group_data;
    for (int64_t n = 0; n < groups * intervals; ++n, bounds += 4)
      group_data.push_back({bounds[0], bounds[1], bounds[2], bounds[3]});
    SpanTable table;
    table.list = {groups * SpanTable::kGroupTiles, 1, 1};
    table.intervals = intervals, table.group_data = group_data.data();
    int begins[kLanes], ends[kLanes];
    device_on_host::Cta warp;
    warp.run(0, [&](int lane) {
      begins[lane] = begin, ends[lane] = end;
      const auto narrow = [&]<int kSize>(std::integral_constant<int, kSize>) {
        if (size == kSize) table.narrow<kSize>(0, 0, first, last, begins[lane], ends[lane]);
      };
      narrow(std::integral_constant<int, 64>{});
      narrow(std::integral_constant<int, 96>{});
      narrow(std::integral_constant<int, 128>{});
    });
    for (int lane = 1; lane < kLanes; ++lane)
      if (begins[lane] != begins[0] || ends[lane] != ends[0])
        throw std::runtime_error("the lanes of a warp got different ranges");
    Rows4 rows(out, capacity);
    rows.add(begins[0], ends[0], 0, 0);
    return rows.count;
  });
}

// Rows of (block, whether it is clear, 0, 0): the blocks of `size` keys (along_keys) or queries of one CTA's walk. Its other
// side is the rows [from, last). kinds: [queries / 64 or 1, keys / 64 or 1].
int64_t visible_blocks(const uint8_t* kinds, int64_t query_tiles, int64_t key_tiles, int along_keys, int size, int from,
                       int last, int begin, int end, int64_t* out, int64_t capacity) {
  return guarded([&] {
    const AttentionProblem problem;
    TileTables tables;
    MaskMap& map = tables.map;
    map.data = const_cast<uint8_t*>(kinds);
    map.size[0] = map.size[1] = 1, map.size[2] = query_tiles, map.size[3] = key_tiles;
    Rows4 rows(out, capacity);
    device_on_host::Cta warp;
    const auto walk = [&]<class Blocks>(std::type_identity<Blocks>) {
      std::vector<int64_t> of_lane[kLanes];
      warp.run(0, [&](int lane) {
        Blocks blocks(problem, &tables, 0, 0, from, last, end * size, begin, end);
        bool clear;
        int block;
        while ((block = blocks.next(clear)) < end) of_lane[lane].push_back(2 * block + clear);
        if (block != end) throw std::runtime_error("a block past the end");
      });
      for (const auto& one : of_lane)
        if (one != of_lane[0]) throw std::runtime_error("the lanes of a warp got different blocks");
      for (const int64_t one : of_lane[0]) rows.add(one / 2, one % 2, 0, 0);
    };
    const auto with = [&]<int kSize>(std::integral_constant<int, kSize>) {
      if (size != kSize) return;
      if (along_keys)
        walk(std::type_identity<KeyBlocks<kSize>>{});
      else
        walk(std::type_identity<QueryBlocks<kSize>>{});
    };
    with(std::integral_constant<int, 64>{});
    with(std::integral_constant<int, 32>{});
    with(std::integral_constant<int, 16>{});
    return rows.count;
  });
}

// Fuses batch dimensions. sizes, strides: [tensors][dims]. Rows of (outer index, tensor, offset, first visit), after a first
// row (inner size, outer count, 0, 0) and one row (inner stride, 0, 0, 0) per tensor.
int64_t fused_batches(int64_t tensors, int64_t dims, const int64_t* call_sizes, const int64_t* sizes, const int64_t* strides,
                      int64_t* out, int64_t capacity) {
  struct Tensor {
    const int64_t *sizes, *strides;
    int64_t size(size_t i) const { return sizes[i]; }
    int64_t stride(size_t i) const { return strides[i]; }
  };
  return guarded([&] {
    std::vector<Tensor> all;
    for (int64_t n = 0; n < tensors; ++n) all.push_back({sizes + n * dims, strides + n * dims});
    std::vector<const Tensor*> pointers;
    for (const Tensor& one : all) pointers.push_back(&one);
    const Batches batches(std::span<const Tensor* const>(pointers), std::vector<int64_t>(call_sizes, call_sizes + dims));
    Rows4 rows(out, capacity);
    rows.add(batches.inner_size(), batches.outer_count(), 0, 0);
    for (int64_t n = 0; n < tensors; ++n) rows.add(batches.inner_stride(n), 0, 0, 0);
    for (int64_t index = 0; index < batches.outer_count(); ++index)
      for (int64_t n = 0; n < tensors; ++n) rows.add(index, n, batches.outer_offset(n, index), batches.first_visit(n, index));
    return rows.count;
  });
}

}  // extern "C"
