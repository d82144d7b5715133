// Copies from global into shared memory that pass by the registers (cp.async).
#pragma once

#include <cuda_pipeline.h>

namespace flash_online::cuda {

// 16 bytes, both ends aligned to 16.
__device__ __forceinline__ void copy_async(uint4* shared, const void* global) {
  __pipeline_memcpy_async(shared, global, sizeof(uint4));
}
// Until all that the thread copied is there.
__device__ __forceinline__ void wait_for_copies() {
  __pipeline_commit();
  __pipeline_wait_prior(0);
}

}  // namespace flash_online::cuda
