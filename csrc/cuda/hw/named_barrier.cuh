// Barriers for some of a CTA's warps, numbered 1 to 15; number 0 is __syncthreads.
#pragma once

namespace flash_online::cuda {

// Waits until `threads` threads of the CTA, the callers included, have called sync_named or arrive_named.
__device__ __forceinline__ void sync_named(int barrier, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_named(int barrier, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Waits as sync_named does, and returns whether any of the threads passed true.
__device__ __forceinline__ bool any_named(int barrier, int threads, bool value) {
  int any;
  asm volatile(
      "{.reg .pred value, any;\n"
      "setp.ne.b32 value, %3, 0;\n"
      "barrier.cta.red.or.pred.aligned any, %1, %2, value;\n"
      "selp.b32 %0, 1, 0, any;}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<int>(value))
      : "memory");
  return __any_sync(~0u, any);  // tells the compiler that the result is uniform in a warp
}

}  // namespace flash_online::cuda
