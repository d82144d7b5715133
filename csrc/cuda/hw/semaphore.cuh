// Blocks of threads that take turns: a counter in global memory says whose it is.
#pragma once

namespace flash_online::cuda {

// What the counter says; what its last writer's block had done before is seen from here on.
__device__ __forceinline__ int semaphore_read(const int* counter) {
  int turn;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(turn) : "l"(counter) : "memory");
  return turn;
}

// Passes the turn on, with all that this thread has done or seen done.
__device__ __forceinline__ void semaphore_release(int* counter, int to) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(counter), "r"(to) : "memory");
}

}  // namespace flash_online::cuda
