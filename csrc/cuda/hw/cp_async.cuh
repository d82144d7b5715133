// Copies from global into shared memory that pass by the registers (cp.async).
#pragma once

#include "mma.cuh"

namespace flash_online::cuda {

// 16 bytes, both ends aligned to 16.
__device__ __forceinline__ void cp_async(uint4* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
// The first `bytes` of the 16, and zeros behind them; what is not copied is not read. (The intrinsic of cuda_pipeline.h is a
// tree of branches where `bytes` is no constant.)
__device__ __forceinline__ void cp_async(uint4* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last kPending groups that the thread has committed are there.
template <int kPending = 0>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flash_online::cuda
