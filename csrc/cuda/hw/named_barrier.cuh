// Barriers for a part of a block's threads, by number from 1 to 15: 0 is __syncthreads.
#pragma once

namespace flash_online::cuda {

// Waits until `threads` of the block, the callers among them, have come here or to arrive_named.
__device__ __forceinline__ void sync_named(int barrier, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_named(int barrier, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// As sync_named: whether any of the threads says so.
__device__ __forceinline__ bool any_named(int barrier, int threads, bool said) {
  int any;
  asm volatile(
      "{.reg .pred said, any;\n"
      "setp.ne.b32 said, %3, 0;\n"
      "barrier.cta.red.or.pred.aligned any, %1, %2, said;\n"
      "selp.b32 %0, 1, 0, any;}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<int>(said))
      : "memory");
  return __any_sync(~0u, any);  // one for the warp in the compiler's eyes too
}

}  // namespace flash_online::cuda
