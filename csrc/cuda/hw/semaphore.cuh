// A semaphore in global memory: a counter by which CTAs wait for each other, so that they act in a fixed order.
#pragma once

namespace flash_online::cuda {

// Returns the counter. What its last writer had done before semaphore_release() is visible from here on.
__device__ __forceinline__ int semaphore_read(const int* counter) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Sets the counter, and publishes what this thread has written or seen.
__device__ __forceinline__ void semaphore_release(int* counter, int to) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(counter), "r"(to) : "memory");
}

}  // namespace flash_online::cuda
