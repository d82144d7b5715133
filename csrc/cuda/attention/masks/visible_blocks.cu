#include "../../../core/scratch.h"
#include "visible_blocks.cuh"

namespace flash_online::cuda {

TileTables tile_tables_of(const AttentionProblem& problem, void* workspace) {
  TileTables tables{.map = mask_map_of(problem), .spans = {}};
  ScratchAllocator scratch(workspace);
  tables.map.data = scratch.take<uint8_t>(tables.map.count());
  tables.spans = span_tables_of(problem, workspace ? static_cast<char*>(workspace) + scratch.bytes() : nullptr);
  return tables;
}

void fill_tile_tables(const AttentionProblem& problem, const TileTables& tables, CUstream_st* stream) {
  fill_mask_map(problem, tables.map, stream);
  fill_span_tables(problem, tables.spans, stream);
}

}  // namespace flash_online::cuda
