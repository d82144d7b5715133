#include "../../../core/mask.h"
#include "../../../core/scratch.h"
#include "../../hw/launch.h"
#include "../../hw/pdl.cuh"
#include "span_bounds.cuh"

namespace flash_online::cuda {

namespace {

constexpr int kBoundsWarps = SpanTable::kGroupTiles;

struct SpanBoundsArguments {
  AttentionProblem problem;
  SpanTables tables;
  unsigned* counter;
};

// Writes the bounds of one tile of a table, by a warp, whose first lane puts them into `own` too.
__device__ __forceinline__ void write_bounds(const AttentionProblem& problem, const SpanView& view, const SpanTable& table,
                                             int64_t index, bool over_keys, int4 (&own)[2]) {
  const TileCoord tile = tile_coord(problem, table.list, index, over_keys, kMaskMapTile, false);
  const Sequence sequence = sequence_of(problem, tile.sequence);
  const Rows& rows = over_keys ? sequence.keys : sequence.queries;
  const int64_t first = tile.block * kMaskMapTile;
  const int count = tile.block < 0 ? 0 : static_cast<int>(min(rows.count - first, int64_t{kMaskMapTile})),
            lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int32_t* const from =
      view.data + tile.sequence * view.stride[0] + tile.head * view.stride[1] + (rows.begin + first) * view.stride[2];
  for (int n = 0; n < table.intervals; ++n) {
    SpanBounds bounds;
    for (int row = lane; row < count; row += kWarpSize) {
      const int32_t* const at = from + row * view.stride[2] + 2 * n;
      const int begin = at[0], end = at[1];
      if (end <= begin) {
        bounds.add(begin, end);
        continue;
      }
      // What the row sees by its position: a causal tile on the diagonal is clear if spans hide nothing else of it.
      const int64_t place = first + row;
      int64_t seen_begin, seen_end;
      if (over_keys) {
        const QueryRange seen = queries_of_any(sequence.visible, place, place + 1, sequence.queries.count);
        seen_begin = seen.begin, seen_end = min(seen.end, sequence.queries.count);
      } else {
        const KeyRange seen = keys_of(sequence.visible, place, sequence.keys.count);
        seen_begin = seen.begin, seen_end = min(seen.end, sequence.keys.count);
      }
      bounds.add(begin <= seen_begin ? INT_MIN : begin, end >= seen_end ? INT_MAX : end);
    }
    bounds.least_begin = __reduce_min_sync(~0u, bounds.least_begin);
    bounds.most_begin = __reduce_max_sync(~0u, bounds.most_begin);
    bounds.least_end = __reduce_min_sync(~0u, bounds.least_end);
    bounds.most_end = __reduce_max_sync(~0u, bounds.most_end);
    if (lane == 0) {
      table.data[index * table.intervals + n] = bounds;
      own[n] = {bounds.least_begin, bounds.most_begin, bounds.least_end, bounds.most_end};
    }
  }
}

// How many CTAs write a table.
__host__ __device__ __forceinline__ int64_t launched_groups(const SpanTable& table) {
  if (table.intervals == 0) return 0;
  return table.packed ? ceil_div(table.list.count(), int64_t{SpanTable::kGroupTiles}) : table.groups();
}

// The bounds of the tiles of a group, each by a warp, and those of the group.
__device__ __forceinline__ void write_group(const AttentionProblem& problem, const SpanView& view, const SpanTable& table,
                                            int64_t group, bool over_keys) {
  __shared__ int4 of_tiles[kBoundsWarps][2];  // SpanBounds, which have a constructor
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize, lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t per_head = table.groups_per_head(), plane = table.packed ? 0 : group / per_head,
                tile = (table.packed ? group : group % per_head) * SpanTable::kGroupTiles + warp;
  const bool exists = tile < (table.packed ? table.list.count() : table.list.blocks);
  if (exists) write_bounds(problem, view, table, plane * table.list.blocks + tile, over_keys, of_tiles[warp]);
  if (table.packed) return;
  if (!exists && lane < 2) {
    const SpanBounds none;
    of_tiles[warp][lane] = {none.least_begin, none.most_begin, none.least_end, none.most_end};
  }
  __syncthreads();
  if (warp < table.intervals) {
    const int4 x = of_tiles[lane][warp];
    SpanBounds bounds;
    bounds.least_begin = __reduce_min_sync(~0u, x.x);
    bounds.most_begin = __reduce_max_sync(~0u, x.y);
    bounds.least_end = __reduce_min_sync(~0u, x.z);
    bounds.most_end = __reduce_max_sync(~0u, x.w);
    if (lane == 0) table.group_data[group * table.intervals + warp] = bounds;
  }
}

__global__ void __launch_bounds__(kBoundsWarps* kWarpSize)
    span_bounds_kernel(const __grid_constant__ SpanBoundsArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const auto& [queries, keys] = arguments.tables;
  if (arguments.counter && blockIdx.x == 0 && threadIdx.x == 0) *arguments.counter = 0;
  launch_dependents();
  const int64_t of_queries = launched_groups(queries);
  if (blockIdx.x < of_queries)
    write_group(problem, problem.query_spans, queries, blockIdx.x, false);
  else if (keys.intervals > 0)
    write_group(problem, problem.key_spans, keys, blockIdx.x - of_queries, true);
}

SpanTable span_table_of(const AttentionProblem& problem, const SpanView& view, bool over_keys) {
  if (!view.data) return {};
  SpanTable table;
  table.list = TileList::of(problem, over_keys, view.stride[1] == 0 ? 1 : problem.heads, kMaskMapTile);
  if (!problem.query_starts && view.stride[0] == 0) table.list.sequences = std::min(problem.batch, int64_t{1});
  table.packed = problem.query_starts;
  table.intervals = view.intervals;
  return table;
}

}  // namespace

SpanTables span_tables_of(const AttentionProblem& problem, void* workspace) {
  SpanTables tables{.queries = span_table_of(problem, problem.query_spans, false),
                    .keys = span_table_of(problem, problem.key_spans, true)};
  ScratchAllocator scratch(workspace);
  for (SpanTable* const table : {&tables.queries, &tables.keys}) {
    table->data = scratch.take<SpanBounds>(table->count());
    table->group_data = scratch.take<SpanBounds>(table->group_count());
  }
  return tables;
}

void fill_span_tables(const AttentionProblem& problem, const SpanTables& tables, CUstream_st* stream, unsigned* counter) {
  const int64_t ctas = std::max(launched_groups(tables.queries) + launched_groups(tables.keys), int64_t{counter != nullptr});
  if (ctas > 0)
    launch<span_bounds_kernel>(SpanBoundsArguments{.problem = problem, .tables = tables, .counter = counter}, ctas,
                               kBoundsWarps * kWarpSize, 0, stream);
}

}  // namespace flash_online::cuda
