// Copies from global into shared memory that pass by the registers (cp.async).
#pragma once

#include <cuda_pipeline.h>

namespace flash_online::cuda {

// 16 bytes, both ends aligned to 16; there after the thread's next commit and wait.
__device__ __forceinline__ void copy_async(uint4* shared, const void* global) {
  __pipeline_memcpy_async(shared, global, sizeof(uint4));
}
// The first `bytes` of the 16, and zeros behind them; what is not copied is not read.
__device__ __forceinline__ void copy_async(uint4* shared, const void* global, int bytes) {
  __pipeline_memcpy_async(shared, global, sizeof(uint4), sizeof(uint4) - static_cast<size_t>(bytes));
}
__device__ __forceinline__ void commit_copies() { __pipeline_commit(); }
// All but the last kPending groups that the thread has committed are there.
template <int kPending = 0>
__device__ __forceinline__ void wait_for_copies() {
  __pipeline_wait_prior(kPending);
}

}  // namespace flash_online::cuda
