// The warps of the Hopper backward kernel that do not compute gradients: the producer warp, which loads queries, keys, values
// and masks; the bit warps; the dropout warps; and the warp that waits for the dQ semaphore.
#pragma once

#include <cstdint>

#include "../../../../core/philox.h"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/prmt.cuh"
#include "../../../hw/semaphore.cuh"
#include "../../masks/sparse_bits.cuh"
#include "config.cuh"

namespace flash_online::cuda {

// ---- which blocks of queries there are

// Iterates over those blocks of a head's queries to which the mask or sparsity shows some of the work tile's keys, or of those
// of the cluster's other CTA. A whole warp calls it, and all lanes get the same answers.
template <class T, class Config>
class BackwardSm90Kernel<T, Config>::MaskedBlockIterator {
 public:
  __device__ MaskedBlockIterator(const BackwardSm90Arguments& a, const BackwardWorkTile& tile, int head)
      : a_(a), tile_(tile), head_(head), next_(tile.begin), end_(tile.end) {
    if constexpr (kSparse) {
      const TileSparsity sparsity(a.problem, a.space.tiles.spans, tile.batch, head);
      const int key = tile.key - rank() * kKeys;
      const int last_key = min(key + kClusterKeys, tile.keys);
      TileSparsity::narrow<kQueries>(sparsity.keys, sparsity.key_intervals, key, last_key, next_, end_);
      a.space.tiles.spans.queries.template narrow<kQueries>(tile.batch, head, key, last_key, next_, end_);
    }
    known_end_ = next_;
    const MaskMap& map = a.space.tiles.map;
    if (!map.data) return;
    kinds_ = map.row(tile.batch, head, 0);
    row_step_ = map.size[2] == 1 ? 0 : static_cast<int>(map.size[3]);
    rows_ = (tile.queries + kMaskMapTile - 1) / kMaskMapTile;
    const int key = tile.key - rank() * kKeys;
    first_column_ = map.size[3] == 1 ? 0 : key / kMaskMapTile;
    second_column_ = kClusterKeys == kWarpgroupKeys || key + kWarpgroupKeys >= tile.keys ? -1 : map.size[3] == 1 ? 0 : 1;
  }
  // The number of the next block, tile.end if there is none; sets its QueryBlock::mask_flags.
  __device__ __forceinline__ int next(int& mask_flags) {
    if (!kSparse && !kinds_) {
      mask_flags = kBothVisible | (a_.problem.mask.data ? kEitherMixed : 0);
      return next_ < end_ ? next_++ : end_;
    }
    while (next_ < end_) {
      if (next_ >= known_end_) read_kinds();
      const unsigned left = (visible_[0] | visible_[1]) >> (kWarpSize - (known_end_ - next_));
      next_ = left ? next_ + __ffs(left) - 1 : known_end_;
      if (next_ < known_end_) {
        const int bit = kWarpSize - (known_end_ - next_);
        mask_flags = 0;
#pragma unroll
        for (int warpgroup = 0; warpgroup < 2; ++warpgroup)
          mask_flags |= ((visible_[warpgroup] >> bit & 1) * kVisible | (mixed_[warpgroup] >> bit & 1) * kMixed) << warpgroup;
        return next_++;
      }
    }
    return kSparse ? tile_.end : end_;
  }

 private:
  __device__ __forceinline__ void set_known(int warpgroup, bool visible, bool clear) {
    visible_[warpgroup] = __ballot_sync(~0u, visible);
    mixed_[warpgroup] = __ballot_sync(~0u, visible && !clear);
  }
  // Finds the kinds of the next 32 blocks, one block per lane.
  __device__ void read_kinds() {
    if constexpr (kSparse)
      read_sparsity();
    else
      read_map();
    known_end_ = next_ + kWarpSize;
  }
  __device__ __forceinline__ void read_sparsity() {
    const int block = next_ + static_cast<int>(threadIdx.x) % kWarpSize, first = block * kQueries,
              end = min(first + kQueries, tile_.queries);
    const TileSparsity sparsity(a_.problem, a_.space.tiles.spans, tile_.batch, head_);
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
      const int key = tile_.key - rank() * kKeys + warpgroup * kWarpgroupKeys;
      MaskKind kind = MaskKind::kHidden;
      if (block < end_ && key < tile_.keys) kind = sparsity.kind(first, end, key, min(key + kWarpgroupKeys, tile_.keys));
      visible_[0] = visible_[1], mixed_[0] = mixed_[1];  // no register has an index at run time
      set_known(1, kind != MaskKind::kHidden, kind == MaskKind::kClear);
    }
  }
  __device__ __forceinline__ void read_map() {
    const int block = next_ + static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
    for (int warpgroup = 0; warpgroup < 2; ++warpgroup) {
      bool visible = false, clear = true;
      if (block < end_ && (warpgroup == 0 || second_column_ >= 0))
        for (int row = block * (kQueries / kMaskMapTile); row < min((block + 1) * (kQueries / kMaskMapTile), rows_); ++row) {
          const MaskKind kind =
              a_.space.tiles.map.kind(kinds_[int64_t{row} * row_step_ + first_column_ + (warpgroup == 0 ? 0 : second_column_)]);
          visible |= kind != MaskKind::kHidden;
          clear &= kind == MaskKind::kClear;
        }
      set_known(warpgroup, visible, clear);
    }
  }

  const BackwardSm90Arguments& a_;
  const BackwardWorkTile& tile_;
  int head_;
  const uint8_t* kinds_ = nullptr;  // null: no map
  int row_step_ = 0, rows_ = 0, first_column_ = 0;
  int second_column_ = 0;  // the second warpgroup's, from first_column_ on; -1: it has no keys
  int next_, end_, known_end_;
  unsigned visible_[2] = {}, mixed_[2] = {};  // per warpgroup; bit n: block known_end_ - 32 + n
};

// ---- the producer warp

template <class T, class Config>
struct BackwardSm90Kernel<T, Config>::Producer {
  // Calls f(count, head, block, mask_flags) for each block of a work tile; returns how many there are. A whole warp calls it.
  template <class F>
  __device__ __forceinline__ static int for_each_block(const BackwardSm90Arguments& a, const BackwardWorkTile& tile, F&& f) {
    int count = 0;
    for (int head = tile.first_head; head < tile.first_head + tile.q_heads_per_kv_grad_head; ++head) {
      MaskedBlockIterator blocks(a, tile, head);
      int mask_flags = 0;
      for (int block; (block = blocks.next(mask_flags)) < tile.end; ++count) f(count, head, block, mask_flags);
    }
    return count;
  }

  // True if by position alone the queries [query, query + kQueries) see all keys of the tile, and all of these exist.
  __device__ static bool all_visible(const BackwardWorkTile& tile, int query) {
    const int position = query + tile.offset;
    return query + kQueries <= tile.queries && tile.key + kKeys <= tile.keys &&
           position + kQueries - 1 - tile.left <= tile.key && tile.key + kKeys - 1 <= position + tile.right;
  }

  // One thread calls the following functions, unless noted otherwise.
  template <int kCount>
  __device__ static void load_keys(TmaTile<kCount, kKeys>& to, const TmaTensor& from, const BackwardWorkTile& tile,
                                   uint64_t* full) {
    arrive_expect_tx(full, sizeof(to));
#pragma unroll
    for (int box = 0; box < kCount; ++box)
      tma_load(to.box[box], from.map, from.at(tile.batch, tile.first_head, tile.first_key, box), full);
  }
  __device__ static void load_peer_keys(const BackwardSm90Arguments& a, Shared& shared, const BackwardWorkTile& tile) {
    const int from = tile.first_key + (rank() == 0 ? kKeys : -kKeys);
    arrive_expect_tx(&shared.key_full[0], sizeof(shared.peer.key));
#pragma unroll
    for (int box = 0; box < kPeerBoxes; ++box)
      tma_load(shared.peer.key.box[box], a.key.map, a.key.at(tile.batch, tile.first_head, from, first_peer_box() + box),
               &shared.key_full[0]);
  }
  template <int kCount>
  __device__ static void load_queries(TmaTile<kCount, kQueries>& to, const TmaTensor& from, TmaCoord at, uint64_t* full) {
#pragma unroll
    for (int box = 0; box < kCount; ++box) {
      at.column = box * kBoxColumns;
      tma_load(to.box[box], from.map, at, full);
    }
  }

  __device__ __forceinline__ static bool reads_mask_bits(const BackwardSm90Arguments& a) {
    return !kSparse && a.transposed_mask == TransposedMask::kBits;
  }
  __device__ static void load_mask_bits(const BackwardSm90Arguments& a, Shared& shared, int stage, int head, int query) {
    const BackwardWorkTile& tile = shared.tile[0];
    const TransposedMaskBits& bits = a.mask_bits;
    const auto index = [&](int i, int64_t n) { return bits.size[i] == 1 ? int64_t{0} : min(n, bits.size[i] - 1); };
    const int64_t first = index(0, tile.batch) * bits.size[1] + index(1, head);
#pragma unroll
    for (int n = 0; n < kQueries / kMaskMapTile; ++n)
#pragma unroll
      for (int warpgroup = 0; warpgroup < kKeys / kMaskMapTile; ++warpgroup)
        bulk_load(mask_bits(shared, stage).word[n][4 * warpgroup],
                  bits.data + ((first * bits.size[2] + index(2, query / kMaskMapTile + n)) * bits.size[3] +
                               index(3, tile.key / kMaskMapTile + warpgroup)) *
                                  TransposedMaskBits::kWords,
                  TransposedMaskBits::kWords * sizeof(unsigned), &shared.query_full[stage]);
  }
  __device__ static void load_mask_boxes(const BackwardSm90Arguments& a, Shared& shared, int count, int head, int query,
                                         int mask_flags) {
    const BackwardWorkTile& tile = shared.tile[0];
    wait(&shared.mask.empty, count % 2 ^ 1);
    arrive_expect_tx(&shared.mask.full, __popc(mask_flags & kEitherMixed) * sizeof(MaskBox));
#pragma unroll
    for (int warpgroup = 0; warpgroup < 2; ++warpgroup)
      if (mask_flags & kMixed << warpgroup) {
        TmaCoord at = a.mask.at(tile.batch, head, query, 0);
        at.column = tile.key + warpgroup * kWarpgroupKeys;
        tma_load(mask_box(shared, warpgroup).value, a.mask.map, at, &shared.mask.full);
      }
  }

  // Announces a block of queries, the CTA's `count`-th.
  __device__ __forceinline__ static void announce_block(const BackwardSm90Arguments& a, Shared& shared,
                                                        const BackwardWorkTile& tile, int count, int head, int number,
                                                        int mask_flags, int first_row_block, bool last, bool third) {
    const int query = number * kQueries;
    QueryBlock& block = shared.query_block[count % kQueryBlocks];
    block.head = head;
    block.query = query;
    block.all_visible = all_visible(tile, query) && !(kHasScheduler && mask_flags);
    block.dq_offset = (first_row_block + int64_t{number} * (kQueries / kStatsRows)) * (kStatsRows * dq_accum_width(a.space));
    if constexpr (kHasMaskMap) block.mask_flags = mask_flags;
    if constexpr (kPersistent) block.last = last, block.third = third;
  }

  // Loads a block of queries, the CTA's `count`-th; without a scheduler it also announces it.
  __device__ static void load_block(const BackwardSm90Arguments& a, Shared& shared, const BackwardWorkTile& tile, int count,
                                    int head, int number, int mask_flags, bool last = false, bool third = false) {
    // Where this CTA's keys are all hidden and the other CTA's are not, the block is not skipped: its bits hide it.
    if constexpr (kPipelined && kHasMaskMap) mask_flags = (mask_flags >> rank() & (kVisible | kMixed)) == kVisible ? 0 : kMixed;
    const int stage = count % 2, query = number * kQueries, row = tile.first_query + query, batch = tile.batch,
              first_row_block = static_cast<int>(cuda::first_row_block(a.problem, a.space.list, tile.batch, head));
    // Once the stage is free, the math warpgroups wait for the loads. Divisions and reads of shared memory, slow while products
    // run, therefore come before.
    const TmaCoord query_at = a.query.at_own_head(batch, head, row, 0),
                   grad_out_at = a.grad_out.at_own_head(batch, head, row, 0);
    // For rows past the sequence's last block, the row statistics of the last block will do: their queries are hidden.
    int stats_block[kQueries / kStatsRows];
#pragma unroll
    for (int n = 0; n < kQueries / kStatsRows; ++n)
      stats_block[n] = first_row_block + min(query / kStatsRows + n, (tile.queries - 1) / kStatsRows);
    if constexpr (!kHasScheduler)
      announce_block(a, shared, tile, count, head, number, mask_flags, first_row_block, last, third);
    unsigned bytes = sizeof(QueryTile) + sizeof(shared.row_stats[stage]);
    if constexpr (kTransposed) {
      if (a.problem.alibi_slopes)
        shared.query_block[count % kQueryBlocks].slope =
            a.bias_scale *
            static_cast<const float*>(
                a.problem.alibi_slopes)[tile.batch * a.problem.alibi_stride[0] + head * a.problem.alibi_stride[1]];
      if (reads_mask_bits(a) && (mask_flags & kEitherMixed)) bytes += sizeof(BlockBits);
    }
    if constexpr (kSparse && !kHasScheduler) arrive(&shared.sparse.announced[count % SparseBarriers::kCount]);
    wait(&shared.stage_empty[stage], count / 2 % 2 ^ 1);
    arrive_expect_tx(&shared.query_full[stage], bytes);
    load_queries(shared.stage[stage].query, a.query, query_at, &shared.query_full[stage]);
#pragma unroll
    for (int n = 0; n < kQueries / kStatsRows; ++n) {
      if constexpr (kSubtractsByProducts) {
        bulk_load(&shared.row_stats[stage][n], a.space.stats_operand + stats_block[n], sizeof(StatsOperand),
                  &shared.query_full[stage]);
      } else {
        const float* const stats = a.space.row_stats + int64_t{stats_block[n]} * kRowStats;
        constexpr int kCopies = kLseLowInStaging ? 2 : 1;  // two: lse, and delta; lse's low query_group stands between them
#pragma unroll
        for (int copy = 0; copy < kCopies; ++copy)
          bulk_load(&shared.row_stats[stage][n][copy * kStatsRows], stats + copy * 2 * kStatsRows,
                    sizeof(shared.row_stats[stage][n]) / kCopies, &shared.query_full[stage]);
      }
    }
    if constexpr (kTransposed)
      if (reads_mask_bits(a) && (mask_flags & kEitherMixed)) load_mask_bits(a, shared, stage, head, query);
    if (!kPersistent && count == 0) load_keys(shared.value, a.value, tile, &shared.value_full);
    uint64_t* const grad_out_full = &shared.grad_out_full[stage % kGradOutStages];
    if constexpr (kPipelined) wait(&shared.hand_over.grad_out_empty[stage % kGradOutStages], count / kGradOutStages % 2 ^ 1);
    arrive_expect_tx(grad_out_full, sizeof(GradOutTile));
    load_queries(grad_out_tile(shared, stage), a.grad_out, grad_out_at, grad_out_full);
    if constexpr (kTransposed && kHasMaskBarriers)
      if (a.transposed_mask == TransposedMask::kTma) load_mask_boxes(a, shared, count, head, query, mask_flags);
  }

  // A CTA's only work tile, by the whole warp.
  __device__ static void run(const BackwardSm90Arguments& a, Shared& shared) {
    const BackwardWorkTile& tile = shared.tile[0];
    const bool leads = threadIdx.x == 0;
    if (leads) {
      load_keys(shared.key[0], a.key, tile, &shared.key_full[0]);
      if constexpr (kPipelined) load_peer_keys(a, shared, tile);
    }
    int count = 0;
    if constexpr (kHasMaskMap) {
      count = for_each_block(a, tile, [&](int n, int head, int block, int mask_flags) {
        if (leads) load_block(a, shared, tile, n, head, block, mask_flags);
        __syncwarp();
      });
    } else if (leads) {
      int block = tile.first_block;
      for (int head = tile.first_head; count < tile.blocks; ++head, block = tile.begin)
        for (const int end = min(tile.end, block + tile.blocks - count); block < end; ++block, ++count)
          load_block(a, shared, tile, count, head, block, kBothVisible);
    }
    if (leads) {
      wait(&shared.stage_empty[count % 2], count / 2 % 2 ^ 1);
      shared.query_block[count % kQueryBlocks].query = -1;
      if constexpr (kSparse) arrive(&shared.sparse.announced[count % SparseBarriers::kCount]);
      arrive(&shared.query_full[count % 2]);
    }
  }

  // A persistent kernel's work tiles, one after another, by the whole warp. A tile takes an even number of stages, and two at
  // least: for blocks that it lacks, empty stages are passed on. So each tile begins with the first stage; and since the end of
  // a tile needs the second stage once more, that end is over before the tile after next is written.
  __device__ static void run_persistent(const BackwardSm90Arguments& a, Shared& shared) {
    // Counters lie in shared memory, as does whatever else can: this warp has few registers.
    int &count = shared.producer_blocks, &tile_count = shared.producer_tiles;
    if (threadIdx.x == 0) count = tile_count = 0;
    while (true) {
      __syncwarp();
      const bool more = take_work_tile(a, shared);
      if (threadIdx.x != 0) {
        if (!more) return;
        continue;
      }
      const BackwardWorkTile& tile = shared.tile[tile_count % 2];
      const int blocks = more ? tile.blocks : 0;
      int n = 0;
      do {
        if (n < blocks) {
          int head = tile.first_head, number = tile.first_block;
          if (n > 0) {
            const QueryBlock& before = shared.query_block[(count - 1) % kQueryBlocks];
            head = before.head, number = before.query / kQueries + 1;
            if (number == tile.end) number = tile.begin, ++head;
          }
          load_block(a, shared, tile, count++, head, number, kBothVisible, n == blocks - 1, n >= 2);
        }
        if (n == 0) {
          load_work_tile(a, shared, tile_count, more);
          if (!more) return;
        }
      } while (++n < blocks);
      for (n = blocks; n < 2 || n % 2 != 0; ++n, ++count) pass_on_empty_stage(shared, count);
      ++tile_count;
    }
  }
  // The keys and values of a work tile; without more of them the math warpgroups are told.
  __device__ __forceinline__ static void load_work_tile(const BackwardSm90Arguments& a, Shared& shared, int tile_count,
                                                        bool more) {
    const BackwardWorkTile& tile = shared.tile[tile_count % kWorkTiles];
    const int buffer = tile_count % kKeyBuffers;
    wait(&shared.key_empty[buffer], tile_count / kKeyBuffers % 2 ^ 1);
    if (!more) {
      arrive(&shared.key_full[buffer]);
      return;
    }
    load_keys(shared.key[buffer], a.key, tile, &shared.key_full[buffer]);
    wait(&shared.value_empty, tile_count % 2 ^ 1);
    load_keys(shared.value, a.value, tile, &shared.value_full);
  }
  __device__ __forceinline__ static void pass_on_empty_stage(Shared& shared, int count) {
    wait(&shared.stage_empty[count % 2], count / 2 % 2 ^ 1);
    arrive(&shared.query_full[count % 2]);
    arrive(&shared.grad_out_full[count % 2]);
  }

  // Loads what BlockScheduler announces.
  __device__ static void run_scheduled(const BackwardSm90Arguments& a, Shared& shared) {
    int tiles = 0;  // whose keys and values are loaded
    for (int count = 0;; ++count) {
      const int slot = count % SparseBarriers::kCount;
      wait(&shared.sparse.announced[slot], count / SparseBarriers::kCount % 2);
      const QueryBlock& block = shared.query_block[count % kQueryBlocks];
      const int query = block.query, tile = block.tile;
      if (query >= 0) load_block(a, shared, shared.tile[tile % kWorkTiles], count, block.head, query / kQueries, 0);
      if (tile == tiles) load_work_tile(a, shared, tiles++, query != kNoMoreBlocks);
      if (query == kNoMoreBlocks) return;
      if (query == kEmptyStage) pass_on_empty_stage(shared, count);
      arrive(&shared.sparse.taken[slot]);
    }
  }
};

// ---- the scheduler warp

// Takes the work tiles of a persistent kernel with sparsity, and announces their visible blocks of queries and empty stages
// (see Producer::run_persistent) to the warps that load them and make their bits. It may be SparseBarriers::kCount blocks ahead
// of these, so that the search for visible blocks takes none of their time.
template <class T, class Config>
struct BackwardSm90Kernel<T, Config>::BlockScheduler {
  const BackwardSm90Arguments& a;
  Shared& shared;
  int count = 0, tile_count = 0;

  // A block's place is free when the block of kCount before it has been loaded: then the math warpgroups are done with all
  // blocks before that one's predecessor in the same stage. For the same reason four work tiles, of two stages at least each,
  // are enough.
  __device__ __forceinline__ void wait_for_place() {
    wait(&shared.sparse.taken[count % SparseBarriers::kCount], count / SparseBarriers::kCount % 2 ^ 1);
  }
  // describe(): by one thread.
  template <class F>
  __device__ __forceinline__ void announce(F&& describe) {
    wait_for_place();
    if (threadIdx.x == 0) {
      QueryBlock& block = shared.query_block[count % kQueryBlocks];
      block.tile = tile_count;
      describe(block);
      arrive(&shared.sparse.announced[count % SparseBarriers::kCount]);
    }
    ++count;
  }
  __device__ __forceinline__ void announce_block(int n, int head, int number, int mask_flags, bool last) {
    int mixed = 0;  // what is hidden from one warpgroup alone is not skipped: its bits hide it
#pragma unroll
    for (int warpgroup = 0; warpgroup < 2; ++warpgroup)
      if ((mask_flags >> warpgroup & (kVisible | kMixed)) != kVisible) mixed |= kMixed << warpgroup;
    announce([&](QueryBlock&) {
      BackwardWorkTile& tile = shared.tile[tile_count % kWorkTiles];
      const int first = static_cast<int>(first_row_block(a.problem, a.space.list, tile.batch, head));
      if (n == 0 || last) tile.blocks = n + 1;  // until the last one they count whether there is any
      Producer::announce_block(a, shared, tile, count, head, number, mixed, first, last, n >= 2);
    });
  }

  __device__ __forceinline__ void announce_tile() {
    BackwardWorkTile& tile = shared.tile[tile_count % kWorkTiles];
    if (threadIdx.x == 0) tile.blocks = 0;
    int blocks = 0, head_before = 0, number_before = -1, flags_before = 0;
    for (int head = tile.first_head; head < tile.first_head + tile.q_heads_per_kv_grad_head; ++head) {
      MaskedBlockIterator iterator(a, tile, head);
      int flags = 0;
      for (int number; (number = iterator.next(flags)) < tile.end;
           head_before = head, number_before = number, flags_before = flags)
        if (number_before >= 0) announce_block(blocks++, head_before, number_before, flags_before, false);
    }
    if (number_before >= 0) announce_block(blocks++, head_before, number_before, flags_before, true);
    for (int n = blocks; n < 2 || n % 2 != 0; ++n) announce([&](QueryBlock& block) { block.query = kEmptyStage; });
  }

  // By a whole warp, the first one.
  __device__ void run() {
    if (threadIdx.x == 0) shared.producer_tiles = 0;
    while (true) {
      wait_for_place();
      __syncwarp();
      if (!take_work_tile(a, shared)) break;
      __syncwarp();
      announce_tile();
      ++tile_count;
      if (threadIdx.x == 0) shared.producer_tiles = tile_count;
    }
    announce([&](QueryBlock& block) { block.query = kNoMoreBlocks; });
  }
};

// ---- the bit warps

// Makes the bits of mixed blocks: each warp those of one warpgroup's keys, or in the pipeline those of every other
// block. A buffer is free when the block that its bits were of has left its stage, for the block two before this one.
template <class T, class Config>
__device__ void BackwardSm90Kernel<T, Config>::make_sparse_bits(const BackwardSm90Arguments& a, Shared& shared, int part) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll 1
  for (int count = 0;; ++count) {
    const int stage = count % 2;
    wait(&shared.sparse.announced[count % SparseBarriers::kCount], count / SparseBarriers::kCount % 2);
    const QueryBlock& block = shared.query_block[count % kQueryBlocks];
    const int query = block.query;
    if (kHasScheduler && query == kNoMoreBlocks) return;
    if (query >= 0 && (kPipelined ? part == count % 2 && block.mask_flags : block.mask_flags & kMixed << part)) {
      int work_tile = 0;
      if constexpr (kHasScheduler) work_tile = block.tile;
      const BackwardWorkTile& tile = shared.tile[work_tile % kWorkTiles];
      const Sequence sequence{{tile.first_query, tile.queries}, {tile.first_key - tile.key, tile.keys}, {}};
      const HeadSparsity sparsity(a.problem, sequence, tile.batch, block.head);
      const int warpgroup = kPipelined ? 0 : part;
#pragma unroll 1
      for (int n = 0; n < kQueries / kStatsRows; ++n) {
        unsigned words[4];
        transposed_bits_of(words, sparsity, query + n * kStatsRows, tile.queries, tile.key + warpgroup * kWarpgroupKeys,
                           tile.keys, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) mask_bits(shared, count % kMaskBitsBuffers).word[n][4 * warpgroup + i][lane] = words[i];
      }
    }
    wait(&shared.stage_empty[stage], count / 2 % 2 ^ 1);  // or the arrival would count for the block before in this stage
    __syncwarp();
    if (lane == 0) {
      arrive(&shared.query_full[stage]);
      if constexpr (kHasScheduler) arrive(&shared.sparse.taken[count % SparseBarriers::kCount]);
    }
    if (query == kNoMoreBlocks) return;
  }
}

// ---- the dropout warps

// Generates the bits that say which weights dropout keeps, a quarter of each block's queries per warp. A lane has eight keys
// that share one draw of random words, for an eighth of the block's queries: the even or the odd ones of those that one of four
// neighbouring lanes holds in an accumulator (wgmma.cuh).
template <class T, class Config>
__device__ void BackwardSm90Kernel<T, Config>::generate_dropout(const BackwardSm90Arguments& a, Shared& shared, int quarter) {
  const BackwardWorkTile& tile = shared.tile[0];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, odd = lane / 16, upper = lane % 2;
  // The shuffle tells the compiler that all lanes have the same value: what follows from it is then computed once per warp.
  const auto uniform = [](auto x) { return __shfl_sync(~0u, x, 0); };
  const Philox random(uniform(a.problem.rng[0]), uniform(a.problem.rng[1]));
  const int64_t batch = a.problem.batch_begin + uniform(tile.batch);
  // Adding this to a random word carries if the weight is kept.
  const uint32_t above = 0u - drop_threshold(a.problem.dropout);
  constexpr int kQueryGroups = kQueries / kStatsRows, kAtOnce = 2;
  // `query_group` counts kStatsRows queries, of one block after another.
#pragma unroll 1
  for (int query_group = 0;; ++query_group) {
    const int count = query_group / kQueryGroups, stage = count % 2;
    wait(&shared.query_full[stage], count / 2 % 2);  // by then the bits of the block before in this stage have been read
    const int first = uniform(shared.query_block[count % kQueryBlocks].query),
              head = uniform(shared.query_block[count % kQueryBlocks].head);
    if (first < 0) return;
    const Philox::OfGroup group = random.of_group(batch, head, tile.key / Philox::kKeys + lane % 16);
    unsigned kept[Philox::kKeys] = {};
#pragma unroll 1
    for (int n = 0; n < kStatsRows / 8; n += kAtOnce) {
      uint32_t words[kAtOnce][Philox::kKeys / 2];
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m)
        random.words(
            random.of_query(batch, head, first + query_group % kQueryGroups * kStatsRows + 8 * (n + m) + 2 * quarter + odd),
            group, words[m]);
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          push_carry(kept[i], words[m][i], above);
          push_carry(kept[4 + i], Philox::again(words[m][i]), above);
        }
    }
    // A word of BlockBits has two keys that are eight apart, which two neighbouring lanes hold, and queries of both parities.
    // Four lanes exchange these, and each writes two words.
    unsigned four[4], two[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned other = __shfl_xor_sync(~0u, odd ? kept[i] : kept[4 + i], 16);
      four[i] = odd ? other | kept[4 + i] << 16 : kept[i] | other << 16;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned other = __shfl_xor_sync(~0u, upper ? four[i] : four[2 + i], 1);
      two[i] = upper ? other | four[2 + i] << 8 : four[i] | other << 8;
    }
    unsigned (&words)[kWarpSize] = dropout_bits(a, shared, stage).word[query_group % kQueryGroups][lane % 16 / 2];
#pragma unroll
    for (int i = 0; i < 2; ++i) words[(4 * odd + 2 * upper + i) * 4 + quarter] = two[i];
    __syncwarp();
    if (lane == 0 && query_group % kQueryGroups == kQueryGroups - 1) arrive(&shared.mask.dropout_full[stage]);
  }
}

// ---- the warp that waits for the dQ semaphore, one thread of it

// In deterministic mode, the CTAs add to a block's dQ in the order of their keys, the last keys first. The CTA of these keys
// precedes in the grid those that wait for it; under a causal mask it also reaches the queries sooner. CTAs that share dQ have
// a semaphore each, for their columns.
template <class T, class Config>
__device__ void BackwardSm90Kernel<T, Config>::order_dq_adds(const BackwardSm90Arguments& a, Shared& shared,
                                                             const BackwardWorkTile& tile, int& count) {
  for (int head = tile.first_head; head < tile.first_head + tile.q_heads_per_kv_grad_head; ++head) {
    int* semaphore = a.dq_semaphore + rank() * a.space.list.count() +
                     first_row_block(a.problem, a.space.list, tile.batch, head) + tile.begin * (kQueries / kStatsRows);
    for (int block = tile.begin; block < tile.end; ++block, ++count, semaphore += kQueries / kStatsRows) {
      const int last_query = min((block + 1) * kQueries, tile.queries) - 1,
                keys = min(tile.keys, last_query + tile.offset + tile.right + 1),
                before = (keys - 1) / kClusterKeys - tile.key / kClusterKeys;  // how many CTAs add before this one
      while (semaphore_read(semaphore) != before) continue;
      arrive(&shared.dq_may_add[count % 2]);
      wait(&shared.dq_added[count % 2], count / 2 % 2);
      semaphore_release(semaphore, before + 1);
    }
  }
}

// For a persistent kernel.
template <class T, class Config>
__device__ void BackwardSm90Kernel<T, Config>::order_dq_adds_of_all_tiles(const BackwardSm90Arguments& a, Shared& shared) {
  int count = 0;
  for (int tile_count = 0;; ++tile_count) {
    wait(&shared.key_full[tile_count % kKeyBuffers], tile_count / kKeyBuffers % 2);
    const BackwardWorkTile& tile = shared.tile[tile_count % 2];
    if (tile.begin < 0) return;
    const int first = count;
    order_dq_adds(a, shared, tile, count);
    for (; count < first + 2 || count % 2 != 0; ++count) arrive(&shared.dq_may_add[count % 2]);
    arrive(&shared.key_empty[tile_count % kKeyBuffers]);
  }
}

}  // namespace flash_online::cuda
