// The warp of the Hopper kernel of e4m3 attention that loads queries, keys and values. It also decides which blocks of keys a
// tile visits, and for which warpgroups some of their scores are hidden; it says so in shared memory, next to each block.
#pragma once

#include "../../../hw/mbarrier.cuh"
#include "config.cuh"

namespace flash_online::cuda {

template <class Out, class Variant>
struct Float8Sm90Kernel<Out, Variant>::Loader {
  const Float8Arguments& a;
  Shared& shared;
  int lane;
  PipelineState<kQueryStages> query;
  PipelineState<kStages> stage;

  __device__ __forceinline__ TileSparsity sparsity_of(const WorkTile& tile) const {
    TileSparsity sparsity;
    if constexpr (kOptions) {
      const auto& [queries, keys] = a.tables;
      sparsity.queries = queries.of(nullptr, 0, tile.batch, tile.head), sparsity.query_intervals = queries.intervals;
      sparsity.keys = keys.of(nullptr, 0, tile.batch, tile.head), sparsity.key_intervals = keys.intervals;
    }
    return sparsity;
  }

  __device__ __forceinline__ void load_block(const WorkTile& tile, const Block& block) {
    wait(&shared.key_empty[stage.stage], stage.parity ^ 1);
    if (lane == 0) {
      shared.block[stage.stage] = block;
      arrive_expect_tx(&shared.key_full[stage.stage], sizeof(KeyBuffer));
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        TmaCoord at = a.key.at(tile.batch, tile.head, block.key, 0);
        at.column = box * kBoxBytes;
        tma_load(shared.key[stage.stage].box[box], a.key.map, at, &shared.key_full[stage.stage]);
      }
    }
    wait(&shared.value_empty[stage.stage], stage.parity ^ 1);
    if (lane == 0) {
      arrive_expect_tx(&shared.value_full[stage.stage], sizeof(ValueBuffer));
      TmaCoord at = a.value.at(tile.batch, tile.head, 0, 0);
      at.column = block.key;
      tma_load(shared.value[stage.stage].box, a.value.map, at, &shared.value_full[stage.stage]);
    }
    stage.advance();
  }

  // All blocks of a tile. What a lane finds out is about one of 32 blocks.
  __device__ __forceinline__ void load_blocks(const WorkTile& tile) {
    const int queries = static_cast<int>(a.problem.queries), keys = static_cast<int>(a.problem.keys),
              last_query = min(tile.first_query + kRows, queries);
    const KeyRange any = keys_of_any(a.problem.visible, tile.first_query, last_query, keys);
    int begin = static_cast<int>(any.begin) / kKeys, end = (static_cast<int>(any.end) + kKeys - 1) / kKeys;
    const TileSparsity sparsity = sparsity_of(tile);
    if constexpr (kOptions) {
      TileSparsity::narrow<kKeys>(sparsity.queries, sparsity.query_intervals, tile.first_query, last_query, begin, end);
      a.tables.keys.template narrow<kKeys>(tile.batch, tile.head, tile.first_query, last_query, begin, end);
    }
#pragma unroll 1
    for (; begin < end; begin += kWarpSize) {
      const int key = (begin + lane) * kKeys, last_key = min(key + kKeys, keys);
      bool hidden = begin + lane >= end, clear = key + kKeys <= keys;
      if (kOptions && !hidden && sparsity.exists()) {
        const MaskKind kind = sparsity.kind(tile.first_query, last_query, key, last_key);
        hidden = kind == MaskKind::kHidden, clear &= kind == MaskKind::kClear;
      }
      unsigned hidden_from = 0, mixed_for = 0;
#pragma unroll
      for (int i = 0; i < kWarpgroups; ++i) {
        const int first = tile.first_query + i * kRowsPerWarpgroup, last = min(first + kRowsPerWarpgroup, queries);
        const KeyRange seen = keys_of_any(a.problem.visible, first, last, keys);
        const bool sees_none = first >= last || key >= seen.end || last_key <= seen.begin,
                   sees_all = clear && all_see(a.problem.visible, first, last, key, last_key, keys);
        hidden_from |= unsigned{sees_none} << i, mixed_for |= unsigned{!sees_all} << i;
      }
#pragma unroll 1
      for (unsigned left = __ballot_sync(~0u, !hidden); left; left &= left - 1) {
        const int n = __ffs(left) - 1;
        load_block(tile, {(begin + n) * kKeys, static_cast<uint8_t>(__shfl_sync(~0u, hidden_from, n)),
                          static_cast<uint8_t>(__shfl_sync(~0u, mixed_for, n))});
      }
    }
    wait(&shared.key_empty[stage.stage], stage.parity ^ 1);
    if (lane == 0) {
      shared.block[stage.stage] = {-1, 0, 0};
      arrive(&shared.key_full[stage.stage]);
    }
    // The stage's values are none, and its barriers keep in step.
    wait(&shared.value_empty[stage.stage], stage.parity ^ 1);
    if (lane == 0) arrive(&shared.value_full[stage.stage]);
    stage.advance();
  }

  template <class Next>
  __device__ __forceinline__ void load_tiles(const Next& next) {
    while (true) {
      const WorkTileCoord coord = next();
      const WorkTile tile{coord.batch, coord.head, coord.row_tile * kRows};
      wait(&shared.query_empty[query.stage], query.parity ^ 1);
      if (lane == 0) {
        shared.tile[query.stage] = tile;
        if (tile.batch < 0) {
          arrive(&shared.query_full[query.stage]);
        } else {
          arrive_expect_tx(&shared.query_full[query.stage], sizeof(QueryBuffer));
#pragma unroll
          for (int box = 0; box < kBoxes; ++box) {
            TmaCoord at = a.query.at(tile.batch, tile.head, tile.first_query, 0);
            at.column = box * kBoxBytes;
            tma_load(shared.query[query.stage].box[box], a.query.map, at, &shared.query_full[query.stage]);
          }
        }
      }
      if (tile.batch < 0) return;
      query.advance();
      load_blocks(tile);
    }
  }
  __device__ __forceinline__ void run() {
    if constexpr (kOptions) {
      if (a.tile_counter) {
        ClaimingTileScheduler scheduler;
        return load_tiles([&] { return scheduler.next(a, a.tile_counter, lane); });
      }
    }
    TileScheduler scheduler;
    load_tiles([&] { return scheduler.next(a); });
  }
};

}  // namespace flash_online::cuda
