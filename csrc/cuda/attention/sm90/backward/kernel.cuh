// Attention backward on Hopper: TMA loads, wgmma products. docs/design/backward_sm90.md draws it.
//
// A CTA owns a tile of 128 keys and values, 64 per math warpgroup, and loops over blocks of queries of all heads that share
// them (the mainloop); a producer warp loads these. Scores are computed again, transposed: [key][query]. So weights and dS are
// left operands of the products dV = P^T dO and dK = dS^T Q straight from registers, and dV and dK stay in registers to the end
// (the epilogue stores them). dS also goes through shared memory, for dQ = dS K: each warpgroup computes its chunk of a block's
// dQ over all 128 keys, one block late, so that neither waits for the other, and adds it to the dQ accumulator in global
// memory, which convert_dq_accum makes the gradient of.
//
// schedule_own_keys.cuh:    these two warpgroups; or one with 64 keys, where a mask hides one half of many tiles of 128 keys
// schedule_all_options.cuh: two warpgroups, with whatever a problem may have
// schedule_pipeline.cuh:    64 keys and a pipeline of three warpgroups, over head dim 128; two CTAs share dQ
#pragma once

#include <cstdint>

#include "../../../hw/mbarrier.cuh"
#include "../../../hw/pdl.cuh"
#include "../../../hw/setmaxnreg.cuh"
#include "../../common/store_rows.cuh"
#include "producer.cuh"
#include "schedule_all_options.cuh"
#include "schedule_own_keys.cuh"
#include "schedule_pipeline.cuh"

namespace flash_online::cuda {

// Writes zeros into the gradients of padding rows of keys. Mostly there are none, which all threads find out together.
template <class T, class Config>
__device__ void BackwardSm90Kernel<T, Config>::clear_padding(const BackwardSm90Arguments& a) {
  const AttentionProblem& problem = a.problem;
  const int64_t heads = a.tile_list.heads, count = heads * (problem.batch + 1), step = gridDim.x;
  const auto rows_of = [&](int64_t n) {
    return padding_rows(problem.key_starts, problem.batch, n / heads, problem.keys, problem.total_keys);
  };
  for (int64_t first = blockIdx.x; first < count; first += step * kThreads) {
    const int64_t mine = first + threadIdx.x * step;
    if (!__syncthreads_or(mine < count && rows_of(mine).count > 0)) continue;
    for (int64_t n = first; n < min(count, first + step * kThreads); n += step) {
      const Rows rows = rows_of(n);
      clear_rows<T, kThreads>(a.gradients.grad_key, n % heads, problem.head_dim, rows);
      clear_rows<T, kThreads>(a.gradients.grad_value, n % heads, problem.head_dim_v, rows);
    }
  }
}

// True if CTAs of 64 keys work on these keys, and not one of 128 (kMayUseNarrowTile). A whole warp calls it.
template <class T, class Config>
__device__ bool BackwardSm90Kernel<T, Config>::use_narrow_tile(const BackwardSm90Arguments& a, int64_t batch, int first_head,
                                                               int q_heads_per_kv_grad_head, int key) {
  // The gain of CTAs of 64 keys on a block with one visible half of the keys, roughly, in units of their loss on a block with
  // both halves visible.
  constexpr int kGain = 4;
  constexpr int kLoadsAtOnce = 4;  // the latency of a load is most of what it takes to return
  const MaskMap& map = a.space.tiles.map;
  const int rows = static_cast<int>(map.size[2]), columns = static_cast<int>(map.size[3]),
            heads = map.size[1] == 1 ? 1 : q_heads_per_kv_grad_head, column = key / kMaskMapTile / 2 * 2;
  int one = 0, both = 0;  // blocks with one visible half of the keys, and with both
  for (int head = first_head; head < first_head + heads; ++head) {
    const uint8_t* const kinds = map.row(batch, head, 0) + column;
    for (int first = 0; first < rows; first += kLoadsAtOnce * kWarpSize) {
      bool visible[kLoadsAtOnce][2];
#pragma unroll
      for (int i = 0; i < kLoadsAtOnce; ++i)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int row = first + i * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize;
          visible[i][n] =
              row < rows && column + n < columns && map.kind(__ldg(kinds + int64_t{row} * columns + n)) != MaskKind::kHidden;
        }
#pragma unroll
      for (int i = 0; i < kLoadsAtOnce; ++i) {
        const unsigned left = __ballot_sync(~0u, visible[i][0]), right = __ballot_sync(~0u, visible[i][1]);
        one += __popc(left ^ right);
        both += __popc(left & right);
      }
    }
  }
  return kGain * one > both;
}

// Finds the work tile of that number. A warp or more call it, and their first thread writes the tile; false: there is none.
template <class T, class Config>
__device__ bool BackwardSm90Kernel<T, Config>::find_work_tile(const BackwardSm90Arguments& a, unsigned index,
                                                              BackwardWorkTile& tile) {
  const AttentionProblem& problem = a.problem;
  if constexpr (kCutsTiles) {
    const TilePart part = a.kv_grad_partials.cuts.part_of(index);
    index = part.tile;
    // The part stays in shared memory until the tile's blocks are known: the producer warp has few registers.
    if (threadIdx.x == 0) tile.first_block = part.number, tile.blocks = part.count, tile.slot = part.slot;
  }
  TileList list = a.tile_list;
  if constexpr (kHasScheduler) {
    index = static_cast<unsigned>(tile_index_after_first_tiles(list, index));
    list.sections.in_list_order = true;
  }
  const TileCoord at = tile_coord(problem, list, index, true, kClusterKeys, !kHasScheduler && a.kv_grad_partials.reversed);
  int64_t batch = at.sequence;
  int kv_grad_head = at.head;
  if (kTransposed && a.batch_innermost) {
    const int n = static_cast<int>(at.sequence * a.tile_list.heads) + at.head,
              sequences = static_cast<int>(a.tile_list.sequences);
    batch = n % sequences;
    kv_grad_head = n / sequences;
  }
  const Sequence sequence = sequence_of(problem, batch);
  // The second CTA of a cluster may have no keys: it still runs, for its columns of dQ.
  const int cluster_key = static_cast<int>(at.block) * kClusterKeys, key = cluster_key + rank() * kKeys,
            keys = static_cast<int>(sequence.keys.count), queries = static_cast<int>(sequence.queries.count);
  if (at.block < 0 || cluster_key >= keys) return false;
  const int heads = a.q_heads_per_kv_grad_head;
  if constexpr (kMayUseNarrowTile)
    if (a.may_use_narrow_tile && use_narrow_tile(a, batch, kv_grad_head * heads, heads, key) != kSingleWarpgroup) return false;
  if (threadIdx.x != 0) return true;
  tile.batch = static_cast<int>(batch);
  tile.kv_grad_head = kv_grad_head;
  tile.queries = queries;
  tile.keys = keys;
  tile.key = key;
  tile.first_query = static_cast<int>(sequence.queries.begin);
  tile.first_key = static_cast<int>(sequence.keys.begin) + key;
  tile.q_heads_per_kv_grad_head = heads;
  tile.first_head = kv_grad_head * heads;
  tile.last_key = min(key + kKeys, keys);
  if constexpr (kAllOptions) tile.visible = sequence.visible;
  const auto bound = [](int64_t x) { return x < 0 ? kUnbounded : static_cast<int>(min(x, int64_t{kUnbounded})); };
  const int offset = static_cast<int>(sequence.visible.offset), left = bound(problem.visible.left),
            right = bound(problem.visible.right);
  tile.offset = offset;
  tile.left = left;
  tile.right = right;
  // queries_of_any, in 32 bits: the producer warp has few registers.
  const int from = cluster_key - offset, to = min(cluster_key + kClusterKeys, keys) - offset;
  const int begin = right >= from ? 0 : min(from - right, queries), end = left >= queries - to ? queries : to + left;
  tile.begin = begin / kQueries;
  tile.end = end > begin ? (end + kQueries - 1) / kQueries : 0;
  if constexpr (!kHasMaskMap) {
    const int number = tile.first_block, parts = kCutsTiles ? tile.blocks : 1;
    tile.first_block = tile.begin;
    tile.blocks = heads * max(tile.end - tile.begin, 0);
    if (parts > 1) {  // all queries see all keys
      const TilePart part{0, static_cast<unsigned>(number), static_cast<unsigned>(parts), 0};
      const unsigned blocks = static_cast<unsigned>(tile.blocks), first = part.begin(blocks),
                     per_head = static_cast<unsigned>(tile.end);
      tile.first_head += static_cast<int>(first / per_head);
      tile.first_block = static_cast<int>(first % per_head);
      tile.blocks = static_cast<int>(part.length(blocks));
    } else {
      tile.slot = -1;
    }
  }
  return true;
}

// Takes the next work tile from the counter in global memory, by a warp; false: there are no more. CTAs begin their tiles in
// the order of the counter, which order_dq_adds relies on.
template <class T, class Config>
__device__ bool BackwardSm90Kernel<T, Config>::take_work_tile(const BackwardSm90Arguments& a, Shared& shared) {
  while (true) {
    unsigned index = 0;
    if (threadIdx.x == 0) index = atomicAdd(a.tile_counter, 1u);
    index = __shfl_sync(~0u, index, 0);
    if (index >= static_cast<unsigned>(a.kv_grad_partials.cuts.items())) {
      if (threadIdx.x == 0) shared.tile[shared.producer_tiles % kWorkTiles].begin = -1;
      return false;
    }
    if (find_work_tile(a, index, shared.tile[threadIdx.x == 0 && kPersistent ? shared.producer_tiles % kWorkTiles : 0]))
      return true;
  }
}

// By one thread.
template <class T, class Config>
__device__ void BackwardSm90Kernel<T, Config>::init_barriers(const BackwardSm90Arguments& a, Shared& shared) {
  for (int i = 0; i < kKeyBuffers; ++i) {
    mbarrier_init(&shared.key_full[i], kCluster);  // the CTA's own keys, and those of the other CTA
    mbarrier_init(&shared.key_empty[i], kMathWarps + (a.dq_semaphore ? 1 : 0));
  }
  mbarrier_init(&shared.value_full, 1);
  mbarrier_init(&shared.value_empty, kMathWarps);
  for (int i = 0; i < kStages; ++i) {
    mbarrier_init(&shared.query_full[i], kSparse ? 1 + kBitWarps : 1);
    mbarrier_init(&shared.grad_out_full[i], 1);
    mbarrier_init(&shared.stage_empty[i], kMathWarps);
    if constexpr (kPipelined) mbarrier_init(&shared.hand_over.grad_out_empty[i % kGradOutStages], kMathWarps);
  }
  for (int i = 0; i < 2; ++i) {
    mbarrier_init(&shared.ds_full[i], kPipelined ? 4 : kMathWarps);
    mbarrier_init(&shared.ds_empty[i], kCluster * kDqWarps);
    mbarrier_init(&shared.dq_may_add[i], 1);
    mbarrier_init(&shared.dq_added[i], kDqWarps);
    if constexpr (kHasDropout) mbarrier_init(&shared.mask.dropout_full[i], kTile.dropout_warps);
  }
  if constexpr (kPipelined)
    for (int i = 0; i < kDsBuffers; ++i) {
      mbarrier_init(&shared.hand_over.weights_full[i], 4);
      mbarrier_init(&shared.peer.ds_full[i], 1);
    }
  if constexpr (kSparse)
    for (int i = 0; i < SparseBarriers::kCount; ++i) {
      mbarrier_init(&shared.sparse.announced[i], 1);
      mbarrier_init(&shared.sparse.taken[i], 1 + kBitWarps);
    }
  if constexpr (kHasMaskBarriers) {
    mbarrier_init(&shared.mask.full, 1);
    mbarrier_init(&shared.mask.empty, kMathWarps);
  }
  fence_barrier_init();
  if constexpr (kPipelined)  // for the first blocks; for those after them wait_for_peer_ds does it
    for (int i = 0; i < kDsBuffers; ++i) arrive_expect_tx(&shared.peer.ds_full[i], sizeof(DsTile));
}

// Warps 0 to 3 are the producer warpgroup: warp 0 loads, warp 1 waits for the dQ semaphore, the others are the bit warps where
// there is sparsity; with a scheduler that is warp 0, and warp 1 loads. The dropout warps follow, then the math warpgroups.
template <class T, class Config>
__device__ void BackwardSm90Kernel<T, Config>::run(const BackwardSm90Arguments& a, Shared& shared) {
  launch_dependents();
  // In parallel with the search for a work tile: these warps would only repeat the search.
  if (threadIdx.x == kWarpgroupThreads) init_barriers(a, shared);
  if (threadIdx.x == kWarpgroupThreads + kWarpSize)
    for (const TmaTensor* tensor : {&a.query, &a.key, &a.value, &a.grad_out}) tma_prefetch(tensor->map);
  if (a.problem.query_starts) clear_padding(a);
  if (!kPersistent && !find_work_tile(a, blockIdx.x / kCluster, shared.tile[0])) {
    grid_dependency_wait();  // the next kernel waits for this one alone, and all of its CTAs may return here
    return;
  }
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  grid_dependency_wait();
  __syncthreads();
  if constexpr (kPipelined) {
    cluster_arrive_relaxed();
    cluster_wait();
  }
  if (warp < 4) {
    reg_dealloc<kTile.producer_registers>();
    if constexpr (kHasScheduler) {
      if (warp == 0) BlockScheduler{a, shared}.run();
      if (threadIdx.x == kWarpSize) Producer::run_scheduled(a, shared);
      if (warp >= 2) make_sparse_bits(a, shared, warp - 2);
    } else if constexpr (kPersistent) {
      if (warp == 0) Producer::run_persistent(a, shared);
      if (a.dq_semaphore && threadIdx.x == kWarpSize) order_dq_adds_of_all_tiles(a, shared);
    } else {
      if (warp == 0) Producer::run(a, shared);
      if constexpr (kSparse)
        if (warp >= 2) make_sparse_bits(a, shared, warp - 2);
      int count = 0;
      if (a.dq_semaphore && threadIdx.x == kWarpSize) order_dq_adds(a, shared, shared.tile[0], count);
    }
  } else if (warp < 4 + kTile.dropout_warps) {
    if constexpr (kHasDropout) {
      reg_dealloc<kTile.aux_registers>();
      generate_dropout(a, shared, warp - 4);
    }
  } else if (kPipelined && warp >= 12) {
    if constexpr (kPipelined) {
      reg_dealloc<kTile.aux_registers>();
      MathWarpgroup{a, shared, static_cast<int>(threadIdx.x) - 128}.run_dq();
    }
  } else {
    reg_alloc<kTile.math_registers>();
    MathWarpgroup warpgroup{a, shared, static_cast<int>(threadIdx.x) - 128 - kWarpSize * kTile.dropout_warps};
    if constexpr (kPipelined)
      warp < 8 ? warpgroup.run_weights_and_dv() : warpgroup.run_ds_and_dk();
    else if constexpr (kAllOptions)
      warpgroup.run_all_options();
    else
      warpgroup.run_own_keys();
  }
}

template <class T, int kHeadDim, int kHeadDimV, BackwardSm90Features kFeatures>
__global__ void __launch_bounds__(backward_sm90_tile(kHeadDim, kHeadDimV, kFeatures).threads(),
                                  backward_sm90_tile(kHeadDim, kHeadDimV, kFeatures).ctas_per_sm)
    attention_backward_sm90(const __grid_constant__ BackwardSm90Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Kernel = BackwardSm90Kernel<T, BackwardSm90Config<kHeadDim, kHeadDimV, kFeatures>>;
  extern __shared__ __align__(kBoxAlignment) char shared_boxes[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::Shared*>(shared_boxes));
#endif
}

}  // namespace flash_online::cuda
