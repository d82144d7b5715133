// Attention's forward pass on Hopper (compute capability 9.0): TMA loads and wgmma products; docs/design/forward_sm90.md draws
// it. The kernel is persistent: its CTAs take one tile of queries after another. In a CTA one warp schedules the tiles, one
// loads, and one to three math warpgroups compute, of 64 queries each or, with kVByColumns, of the same 64.
#pragma once

#include "../../../hw/mbarrier.cuh"
#include "../../../hw/pdl.cuh"
#include "../../../hw/setmaxnreg.cuh"
#include "../../../hw/shared_memory.cuh"
#include "cached/producer.cuh"
#include "consumer.cuh"
#include "epilogue.cuh"
#include "producer.cuh"

namespace flash_online::cuda {

template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::init_barriers(const Arguments& a, Shared& shared) {
  constexpr int kMathWarps = 4 * kTile.warpgroups;
  // Warps that wait for the tiles in addition to the math warps: dropout or bit warps, the producer, and a second producer
  // (kVByColumns) or the warp that clears tails (packed), or both (cached keys).
  const int dropout_warps = kHasDropout && a.dropout.rng ? kTile.dropout_warps : 0;
  for (int i = 0; i < kWorkTiles; ++i) {
    mbarrier_init(&shared.tile_full[i], 1);
    mbarrier_init(&shared.tile_empty[i], kMathWarps + dropout_warps + kBitWarps +
                                             (kCached                  ? 3
                                              : kPacked || kVByColumns ? 2
                                                                       : 1));
  }
  for (int i = 0; i < kQueryStages; ++i) {
    mbarrier_init(&shared.query_full[i], 1);
    mbarrier_init(&shared.query_empty[i], kMathWarps / kRowBlocks);
  }
  for (int i = 0; i < kKeyStages; ++i) {
    mbarrier_init(&shared.key_full[i], 1 + dropout_warps + kBitWarps);
    mbarrier_init(&shared.key_empty[i], kMathWarps);
  }
  for (int i = 0; i < kStages; ++i) {
    mbarrier_init(&shared.value_full[i], 1);
    mbarrier_init(&shared.value_empty[i], kMathWarps);
    if constexpr (kPacked) mbarrier_init(&shared.packed.value_loaded[i], 1);
  }
  if constexpr (kPacked) mbarrier_init(&shared.packed.tile_wanted, 1);
  if constexpr (kSparse) mbarrier_init(&shared.sparse.tile_wanted, 1);
  fence_barrier_init();
}

template <class T, class Variant>
__device__ void ForwardSm90Kernel<T, Variant>::run(const Arguments& a, Shared& shared) {
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) init_barriers(a, shared);
  if constexpr (kKvSplit || kSparse) grid_dependency_wait();
  if constexpr (kKvSplit) launch_dependents();  // what follows may rely on all before this kernel having ended
  __syncthreads();
  // Warp 0 loads, warp 1 schedules, warps 2 and 3 have what packed sequences, cached keys, sparsity and kVByColumns need; then
  // come the math warpgroups, and after them the dropout warps.
  constexpr int kFirstDropoutWarp = 4 * (1 + kTile.warpgroups);
  if (warp < 4) {
    reg_dealloc<kTile.producer_registers>();
    if constexpr (kCached) {
      if (warp == 0) CachedProducer{a, shared, lane}.run();
    } else {
      if (threadIdx.x == 0) Producer{a, shared}.run();
    }
    if (warp == 1) schedule_tiles(a, shared, lane);
    if constexpr (kVByColumns)
      if (warp == 2 && lane == 0) load_values(a, shared);
    if constexpr (kSparse)
      if (warp >= 2) make_sparse_bits(a, shared, warp - 2, lane);
    if constexpr (kCached) {
      if (warp == 2) clear_unseen_values(shared, lane);
      if (warp == 3) {
        clear_unused_rows(a, lane);
        load_cached_values(a, shared, lane);
      }
    } else if constexpr (kPacked) {
      if (warp == 2) clear_value_tails(shared, lane);
      if (warp == 3) clear_padding_rows(a, lane);
    }
  } else if (warp < kFirstDropoutWarp) {
    reg_alloc<kTile.registers>();
    const int index = warp / 4 - 1;
    MathWarpgroup warpgroup{a, shared, kVByColumns ? 0 : index, kVByColumns ? index : 0, warp % 4, lane};
    warpgroup.run();
  } else if constexpr (kHasDropout) {
    reg_dealloc<kTile.dropout_registers>();
    generate_dropout(a, shared, warp - kFirstDropoutWarp, lane);
  }
}

template <class T, class Variant>
__global__ void __launch_bounds__(Variant::kTile.threads(), Variant::kTile.ctas_per_sm)
    attention_forward_sm90(const __grid_constant__ typename ForwardSm90Kernel<T, Variant>::Arguments a) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // in code for another GPU it is empty, and never launched
  using Kernel = ForwardSm90Kernel<T, Variant>;
  extern __shared__ unsigned char dynamic[];
  const unsigned base = shared_address(dynamic), skip = (kBoxAlignment - base % kBoxAlignment) % kBoxAlignment;
  Kernel::run(a, *reinterpret_cast<typename Kernel::Shared*>(dynamic + skip));
#endif
}

}  // namespace flash_online::cuda
