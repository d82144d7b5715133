// The warps of the Hopper forward kernel that differ where keys are cached: two producer warps, which ask the table where keys
// and values lie, and the one that clears values.
#pragma once

#include "../producer.cuh"

namespace flash_online::cuda {

// A block of keys comes in boxes, each of which lies in one block of the pool. Lane n knows the place of box n, and reads the
// table one block of keys ahead.
template <class T, class Variant>
struct ForwardSm90Kernel<T, Variant>::CachedBlocks {
  const Arguments& a;
  int lane;
  const int32_t* entries;  // the sequence's row of the table; null: there is none
  int only_block;  // of the pool, without a table

  __device__ __forceinline__ CachedBlocks(const Arguments& arguments, int sequence, int own_lane)
      : a(arguments), lane(own_lane) {
    const CacheView& cache = a.cached.problem.cache;
    const int row = cache.rows ? cache.rows[sequence] : sequence;
    const bool exists = cache.table && row >= 0 && row < cache.table_rows;
    entries = exists ? cache.table + row * cache.table_stride : nullptr;
    only_block = cache.table ? -1 : row;
  }

  // The table's block, which may lie outside the pool, and the row within the page.
  struct Place {
    int block, row;
  };

  // The place of the lane's box in a block of keys. An entry of keys that no query sees is not read.
  __device__ __forceinline__ Place locate(const ForwardWorkTile& tile, int block) const {
    const int key_of_box = block * kKeys + lane * a.cached.box_rows;
    if (lane >= a.cached.boxes || key_of_box + a.cached.box_rows <= tile.seen.begin || key_of_box >= tile.seen.end)
      return {-1, 0};
    const unsigned place = static_cast<unsigned>(key_begin(tile) + key_of_box), page = a.cached.page, entry = place / page;
    return {entries ? entries[entry] : only_block, static_cast<int>(place - entry * page)};
  }

  // A block of keys or values. Each lane starts the copies of its box: one lane for all of them would ask the others for their
  // places, which takes longer than the copies. A box that is nowhere has coordinates outside of the pool, and arrives as
  // zeros.
  template <class Buffer>
  __device__ __forceinline__ void load(Buffer& buffer, const CUtensorMap& map, int head, int batch_step, const Place& place,
                                       uint64_t* barrier) const {
    const bool exists = static_cast<unsigned>(place.block) < a.cached.blocks;
    const int block = exists ? place.block * batch_step : -1;
    if (lane == 0) arrive_expect_tx(barrier, sizeof(Buffer));
    __syncwarp();
    if (lane < a.cached.boxes) {
      constexpr int kBoxes = std::extent_v<decltype(Buffer::box)>;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const TmaCoord at{box * kBoxColumns, place.row, head, block};
        if constexpr (kKvSplit)
          tma_load_once(buffer.box[box][lane * a.cached.box_rows], map, at, barrier);
        else
          tma_load(buffer.box[box][lane * a.cached.box_rows], map, at, barrier);
      }
    }
    __syncwarp();
  }
};

// Warp 0: queries and keys.
template <class T, class Variant>
struct ForwardSm90Kernel<T, Variant>::CachedProducer {
  const Arguments& a;
  Shared& shared;
  int lane;
  PipelineState<kWorkTiles> next_tile;
  PipelineState<kQueryStages> query;
  PipelineState<kStages> key;
  // The tile of the queries that are loaded or being loaded:
  int batch, head, first_query, begin, end, tile_stage;
  int row_block;  // the first one without loaded queries

  __device__ __forceinline__ bool is_complete(uint64_t* barrier, unsigned parity) const {
    return __shfl_sync(~0u, test_wait(barrier, parity), 0);
  }

  __device__ __forceinline__ void fetch_tile() {
    wait(&shared.tile_full[next_tile.stage], next_tile.parity);
    const ForwardWorkTile& tile = shared.tile[next_tile.stage];
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
                   cached_row_at(box, (head + head_in_group(a, row_block * kRowsPerWarpgroup)) / a.q_heads_per_query_head,
                                 first_query + query_of_row(a, row_block * kRowsPerWarpgroup), batch * a.query_batch_step),
                   &shared.query_full[query.stage]);
      }
      query.advance();
    }
  }

  __device__ __forceinline__ void run() {
    fetch_tile();
    while (batch >= 0) load_tile();
  }

  // As in Producer, but for the values.
  __device__ __forceinline__ void load_tile() {
    const int key_head = head / a.q_heads_per_key_head, first_block = begin, end_block = end, stage = tile_stage;
    const ForwardWorkTile& tile = shared.tile[stage];
    const CachedBlocks blocks(a, batch, lane);
    auto next = blocks.locate(tile, first_block);
    int claim_at = end_block;
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) claim_at = min(claim_at, tile.row_block[i].end);
    claim_at = max(claim_at - kClaimAhead, first_block);
#pragma unroll 1
    for (int block = first_block; block < end_block; ++block) {
      const auto place = next;
      wait(&shared.key_empty[key.stage], key.parity ^ 1);
      blocks.load(shared.key[key.stage], a.key_tma, key_head, a.key_batch_step, place, &shared.key_full[key.stage]);
      next = blocks.locate(tile, block + 1);
      if (block == first_block)
        load_queries(true);
      else if (tile_stage != stage)
        load_queries(false);
      if (block == claim_at && lane == 0) arrive(&shared.packed.tile_wanted);
      key.advance();
      if (tile_stage == stage && (block + 1 == end_block || is_complete(&shared.tile_full[next_tile.stage], next_tile.parity)))
        fetch_tile();
    }
    __syncwarp();
    if (lane == 0) arrive(&shared.tile_empty[stage]);
  }
};

// Warp 3: values. To start the copies of a block in small pages takes a warp half of the time of the block's products.
template <class T, class Variant>
__device__ void ForwardSm90Kernel<T, Variant>::load_cached_values(const Arguments& a, Shared& shared, int lane) {
  PipelineState<kWorkTiles> next_tile;
  PipelineState<kStages> value;
  while (true) {
    wait(&shared.tile_full[next_tile.stage], next_tile.parity);
    const ForwardWorkTile& tile = shared.tile[next_tile.stage];
    if (tile.batch < 0) return;
    const int head = first_head(a, tile) / a.q_heads_per_value_head, end = tile.end;
    const CachedBlocks blocks(a, tile.batch, lane);
    auto next = blocks.locate(tile, tile.begin);
#pragma unroll 1
    for (int block = tile.begin; block < end; ++block) {
      const auto place = next;
      wait(&shared.value_empty[value.stage], value.parity ^ 1);
      blocks.load(
          shared.value[value.stage], a.value_tma, head, a.value_batch_step, place,
          has_unseen_keys(tile.seen, block) ? &shared.packed.value_loaded[value.stage] : &shared.value_full[value.stage]);
      next = blocks.locate(tile, block + 1);
      value.advance();
    }
    __syncwarp();
    if (lane == 0) arrive(&shared.tile_empty[next_tile.stage]);
    next_tile.advance();
  }
}

// Values of keys that no query of the sequence sees may be anything, in the first and in the last block of a tile. Their
// weights are 0, but 0 times infinity or NaN is not.
template <class T, class Variant>
__device__ void ForwardSm90Kernel<T, Variant>::clear_unseen_values(Shared& shared, int lane) {
  PipelineState<kWorkTiles> next_tile;
  int blocks = 0;  // loaded so far, before this tile
  unsigned parities = 0;  // of value_loaded, one bit per stage
  while (true) {
    wait(&shared.tile_full[next_tile.stage], next_tile.parity);
    const ForwardWorkTile& tile = shared.tile[next_tile.stage];
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
      const int seen_begin = min(seen.begin - first, kKeys) * kChunks, seen_end = max(seen.end - first, 0) * kChunks;
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

// Rows of packed queries that belong to no sequence, or that do not count, get a result of 0 and an lse of -inf. There may be
// many such rows after the last sequence: all CTAs share them.
template <class T, class Variant>
__device__ void ForwardSm90Kernel<T, Variant>::clear_unused_rows(const Arguments& a, int lane) {
  const AttentionProblem& problem = a.cached.problem;
  if (!problem.query_starts) return;
  const Rows last = padding_rows(problem.query_starts, problem.batch, problem.batch, problem.queries, problem.total_queries);
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < last.count; row += gridDim.x) clear_rows(a, {last.begin + row, 1}, lane);
#pragma unroll 1
  for (int n = static_cast<int>(blockIdx.x); n <= problem.batch; n += static_cast<int>(gridDim.x)) {
    if (n < problem.batch)
      clear_rows(a, padding_rows(problem.query_starts, problem.batch, n, problem.queries, problem.total_queries), lane);
    if (problem.cache.query_lengths) clear_rows(a, unused_queries(problem, n), lane);
  }
}

}  // namespace flash_online::cuda
