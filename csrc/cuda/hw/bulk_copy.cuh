// Bulk copies of contiguous bytes (cp.async.bulk): one thread starts a copy, the TMA unit carries it out.
#pragma once

#include <cstdint>

#include "shared_memory.cuh"

namespace flash_online::cuda {

// True if the GPU has bulk copies.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kHasBulkCopy = true;
#else
constexpr bool kHasBulkCopy = false;
#endif

// Copies into shared memory. `bytes` and both addresses are multiples of 16; the mbarrier counts the bytes as they arrive.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, unsigned bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Copies from shared to global memory. `bytes` and both addresses are multiples of 16. tma_store_commit() and what follows it
// (tma.cuh) count these.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}

// Adds floats in shared memory to those in global memory. `bytes` and both addresses are multiples of 16. tma_store_commit()
// and what follows it (tma.cuh) count these as they count stores.
__device__ __forceinline__ void bulk_reduce_add(float* global, const void* shared, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

}  // namespace flash_online::cuda
