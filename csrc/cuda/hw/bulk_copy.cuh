// Copies of many bytes in a row by the copy engine (cp.async.bulk): one thread starts them, a barrier counts their bytes.
#pragma once

#include <cstdint>

#include "mma.cuh"

namespace flash_online::cuda {

// Whether the chip has them.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kHasBulkCopy = true;
#else
constexpr bool kHasBulkCopy = false;
#endif

// `bytes`, a multiple of 16 as both ends are, into shared memory; they count on the barrier.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, unsigned bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

}  // namespace flash_online::cuda
