#include "../../../core/mask.h"
#include "../../../core/scratch.h"
#include "../../hw/launch.h"
#include "span_bounds.cuh"

namespace flash_online::cuda {

namespace {

constexpr int kBoundsWarps = 4;

struct SpanBoundsArguments {
  AttentionProblem problem;
  SpanTables tables;
  unsigned* counter;
};

// The bounds of one tile of `list`, by a warp.
__device__ __forceinline__ void write_bounds(const AttentionProblem& problem, const SpanView& view, const SpanTable& table,
                                             int64_t index, bool over_keys) {
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
    if (lane == 0) table.data[index * table.intervals + n] = bounds;
  }
}

__global__ void __launch_bounds__(kBoundsWarps* kWarpSize)
    span_bounds_kernel(const __grid_constant__ SpanBoundsArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const SpanTables& tables = arguments.tables;
  if (arguments.counter && blockIdx.x == 0 && threadIdx.x == 0) *arguments.counter = 0;
  const int64_t index = int64_t{blockIdx.x} * kBoundsWarps + threadIdx.x / kWarpSize, of_queries = tables.queries.list.count();
  if (index < of_queries)
    write_bounds(problem, problem.query_spans, tables.queries, index, false);
  else if (index - of_queries < tables.keys.list.count())
    write_bounds(problem, problem.key_spans, tables.keys, index - of_queries, true);
}

SpanTable span_table_of(const AttentionProblem& problem, const SpanView& view, bool over_keys) {
  if (!view.data) return {};
  SpanTable table;
  table.list = TileList::of(problem, over_keys, view.stride[1] == 0 ? 1 : problem.heads, kMaskMapTile);
  if (!problem.query_starts && view.stride[0] == 0) table.list.sequences = std::min(problem.batch, int64_t{1});
  table.intervals = view.intervals;
  return table;
}

}  // namespace

SpanTables span_tables_of(const AttentionProblem& problem, void* workspace) {
  SpanTables tables{.queries = span_table_of(problem, problem.query_spans, false),
                    .keys = span_table_of(problem, problem.key_spans, true)};
  ScratchAllocator scratch(workspace);
  tables.queries.data = scratch.take<SpanBounds>(tables.queries.count());
  tables.keys.data = scratch.take<SpanBounds>(tables.keys.count());
  return tables;
}

void fill_span_tables(const AttentionProblem& problem, const SpanTables& tables, CUstream_st* stream, unsigned* counter) {
  const int64_t tiles = tables.queries.list.count() + tables.keys.list.count();
  if (tiles > 0)
    launch<span_bounds_kernel>(SpanBoundsArguments{.problem = problem, .tables = tables, .counter = counter},
                               ceil_div(tiles, int64_t{kBoundsWarps}), kBoundsWarps * kWarpSize, 0, stream);
}

}  // namespace flash_online::cuda
