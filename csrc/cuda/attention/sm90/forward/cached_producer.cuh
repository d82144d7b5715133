// The warps of the Hopper forward kernel that differ where keys are cached: the producer warp, which asks the table where keys
// lie, and the two that clear memory.
#pragma once

#include "producer.cuh"

namespace flash_online::cuda {

// A block of keys comes in boxes, each of which lies in one block of the pool. Lane n knows the place of box n, and reads the
// table one block of keys ahead; the first lane starts the copies.
template <class T, class Variant>
struct ForwardSm90Kernel<T, Variant>::CachedProducer {
  const Arguments& a;
  Shared& shared;
  int lane;
  PipelineState<kWorkTiles> next_tile;
  PipelineState<kQueryStages> query;
  PipelineState<kStages> key;  // and values
  // Of the tile whose queries are loaded or being loaded:
  int batch, head, first_query, begin, end, tile_stage;
  int row_block;  // the first whose queries are not loaded yet

  // Where a sequence's entries are: in a row of the table, or without a table in one block of the pool.
  struct Entries {
    const int32_t* row;
    int block;
  };
  // What the table says, which may lie outside the pool, and the row within the page.
  struct Place {
    int block, row;
  };

  __device__ __forceinline__ bool is_complete(uint64_t* barrier, unsigned parity) const {
    return __shfl_sync(~0u, test_wait(barrier, parity), 0);
  }
  __device__ __forceinline__ void arrive_once(uint64_t* barrier) const {
    if (lane == 0) arrive(barrier);
  }

  __device__ __forceinline__ void fetch_tile() {
    wait(&shared.tile_full[next_tile.stage], next_tile.parity);
    const WorkTile& tile = shared.tile[next_tile.stage];
    batch = tile.batch;
    head = first_head(a, tile);
    first_query = query_begin(tile) + tile.first_query;
    begin = tile.begin;
    end = tile.end;
    tile_stage = next_tile.stage;
    next_tile.advance();
    row_block = batch < 0 ? kRowBlocks : 0;
  }

  // Loads the queries of the tile: all of them, or as many as find a free buffer.
  __device__ __forceinline__ void load_queries(bool all) {
#pragma unroll 1
    for (; row_block < kRowBlocks; ++row_block) {
      if (!all && !is_complete(&shared.query_empty[query.stage], query.parity ^ 1)) return;
      wait(&shared.query_empty[query.stage], query.parity ^ 1);
      if (lane == 0) {
        arrive_expect_tx(&shared.query_full[query.stage], sizeof(QueryBuffer));
#pragma unroll
        for (int box = 0; box < kHeadDimBoxes; ++box)
          tma_load(shared.query[query.stage].box[box], a.query_tma,
                   cached_row_at(box, head / a.q_heads_per_query_head,
                                 first_query + query_of_row(a, row_block * kRowsPerWarpgroup), batch * a.query_batch_step),
                   &shared.query_full[query.stage]);
      }
      query.advance();
    }
  }

  __device__ __forceinline__ Entries entries_of_sequence() const {
    const CacheView& cache = a.cached.problem.cache;
    const int row = cache.rows ? cache.rows[batch] : batch;
    if (!cache.table) return {nullptr, row};
    return {row >= 0 && row < cache.table_rows ? cache.table + row * cache.table_stride : nullptr, -1};
  }

  // The place of the lane's box in a block of keys. An entry of keys that no query sees is not read.
  __device__ __forceinline__ Place locate(const Entries& entries, const WorkTile& tile, int block) const {
    const int key_of_box = block * kKeys + lane * a.cached.box_rows;
    if (lane >= a.cached.boxes || key_of_box + a.cached.box_rows <= tile.seen.begin || key_of_box >= tile.seen.end)
      return {-1, 0};
    const unsigned place = static_cast<unsigned>(key_begin(tile) + key_of_box), page = a.cached.page, entry = place / page;
    return {entries.row ? entries.row[entry] : entries.block, static_cast<int>(place - entry * page)};
  }

  // A block of keys or values. A box that is nowhere has coordinates outside of the pool, and arrives as zeros.
  template <class Buffer>
  __device__ __forceinline__ void load_block(Buffer& buffer, const CUtensorMap& map, int box_head, int batch_step,
                                             const Place& place, uint64_t* barrier) const {
    const bool exists = static_cast<unsigned>(place.block) < a.cached.blocks;
    const int block = exists ? place.block * batch_step : -1;
    if (lane == 0) arrive_expect_tx(barrier, sizeof(Buffer));
#pragma unroll 1
    for (int n = 0; n < a.cached.boxes; ++n) {
      const int block_of_box = __shfl_sync(~0u, block, n), row = __shfl_sync(~0u, place.row, n);
      if (lane == 0)
#pragma unroll
        for (int box = 0; box < static_cast<int>(std::extent_v<decltype(Buffer::box)>); ++box)
          tma_load(buffer.box[box][n * a.cached.box_rows], map, {box * kBoxColumns, row, box_head, block_of_box}, barrier);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void run() {
    fetch_tile();
    while (batch >= 0) load_tile();
  }

  // As in Producer.
  __device__ __forceinline__ void load_tile() {
    const int key_head = head / a.q_heads_per_key_head, value_head = head / a.q_heads_per_value_head;
    const int first_block = begin, end_block = end, stage = tile_stage;
    const WorkTile& tile = shared.tile[stage];
    const Entries entries = entries_of_sequence();
    Place next = locate(entries, tile, first_block);
    int claim_at = end_block;
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) claim_at = min(claim_at, tile.row_block[i].end);
    claim_at = max(claim_at - kClaimAhead, first_block);
#pragma unroll 1
    for (int block = first_block; block < end_block; ++block) {
      const Place place = next;
      wait(&shared.key_empty[key.stage], key.parity ^ 1);
      load_block(shared.key[key.stage], a.key_tma, key_head, a.key_batch_step, place, &shared.key_full[key.stage]);
      next = locate(entries, tile, block + 1);
      if (block == first_block)
        load_queries(true);
      else if (tile_stage != stage)
        load_queries(false);
      if (block == claim_at) arrive_once(&shared.packed.tile_wanted);
      wait(&shared.value_empty[key.stage], key.parity ^ 1);
      load_block(shared.value[key.stage], a.value_tma, value_head, a.value_batch_step, place,
                 has_unseen_keys(tile.seen, block) ? &shared.packed.value_loaded[key.stage]
                                                       : &shared.value_full[key.stage]);
      key.advance();
      if (tile_stage == stage &&
          (block + 1 == end_block || is_complete(&shared.tile_full[next_tile.stage], next_tile.parity)))
        fetch_tile();
    }
    __syncwarp();
    arrive_once(&shared.tile_empty[stage]);
  }
};

// Values of keys that no query of the sequence sees may be anything, in the first and in the last block of a tile. Their weights
// are 0, but 0 times infinity or NaN is not.
template <class T, class Variant>
__device__ void ForwardSm90Kernel<T, Variant>::clear_unseen_values(Shared& shared, int lane) {
  PipelineState<kWorkTiles> next_tile;
  int blocks = 0;  // loaded so far, before this tile
  unsigned parities = 0;  // of value_loaded, one bit per stage
  while (true) {
    wait(&shared.tile_full[next_tile.stage], next_tile.parity);
    const WorkTile& tile = shared.tile[next_tile.stage];
    if (tile.batch < 0) return;
    const SeenKeys seen = tile.seen;
    const int begin = tile.begin, count = tile.end - begin;
    __syncwarp();
    if (lane == 0) arrive(&shared.tile_empty[next_tile.stage]);
    next_tile.advance();
#pragma unroll 1
    for (int n = 0; n < count; n += max(count - 1, 1)) {
      if (!has_unseen_keys(seen, begin + n)) continue;
      const int stage = (blocks + n) % kStages, first = (begin + n) * kKeys;
      wait(&shared.packed.value_loaded[stage], parities >> stage & 1);
      parities ^= 1u << stage;
      constexpr int kChunks = static_cast<int>(kBoxRowBytes) / kVectorBytes;
      const int seen_begin = min(seen.begin - first, kKeys) * kChunks,
                seen_end = max(seen.end - first, 0) * kChunks;
#pragma unroll 1
      for (int box = 0; box < kHeadDimVBoxes; ++box) {
        uint4* const chunks = reinterpret_cast<uint4*>(shared.value[stage].box[box]);
        for (int i = lane; i < seen_begin; i += kWarpSize) chunks[i] = {};
        for (int i = seen_end + lane; i < kKeys * kChunks; i += kWarpSize) chunks[i] = {};
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) arrive(&shared.value_full[stage]);
    }
    blocks += count;
  }
}

// Rows of packed queries that belong to no sequence, or that do not count, get a result of 0 and an lse of -inf.
template <class T, class Variant>
__device__ void ForwardSm90Kernel<T, Variant>::clear_unused_rows(const Arguments& a, int lane) {
  const AttentionProblem& problem = a.cached.problem;
  if (!problem.query_starts) return;
#pragma unroll 1
  for (int n = static_cast<int>(blockIdx.x); n <= problem.batch; n += static_cast<int>(gridDim.x)) {
    clear_rows(a, padding_rows(problem.query_starts, problem.batch, n, problem.queries, problem.total_queries), lane);
    if (problem.cache.query_lengths) clear_rows(a, unused_queries(problem, n), lane);
  }
}

}  // namespace flash_online::cuda
