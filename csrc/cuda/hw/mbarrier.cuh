// Barriers in shared memory that count arrivals and bytes of asynchronous copies (mbarrier). A barrier goes through phases. A
// waiter names a phase by its parity, so it may lag by at most one phase.
#pragma once

#include <cstdint>

#include "shared_memory.cuh"

namespace flash_online::cuda {

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA and to the cluster: to be called after the last mbarrier_init and before the
// __syncthreads after which other threads use them.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more of asynchronous copies.
__device__ __forceinline__ void arrive_expect_tx(uint64_t* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Waits until the phase of this parity is complete. On a new barrier, the phase that precedes the first counts as complete;
// its parity is 1.
__device__ __forceinline__ void wait(uint64_t* barrier, unsigned parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// True if the phase of this parity is complete. Does not wait.
__device__ __forceinline__ bool test_wait(uint64_t* barrier, unsigned parity) {
  unsigned complete;
  asm volatile(
      "{.reg .pred complete;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
      "selp.b32 %0, 1, 0, complete;}"
      : "=r"(complete)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return complete != 0;
}

// The pipeline stage that a thread has reached in a circular queue of kStages buffers, and the parity of its barriers' phase.
template <int kStages>
struct PipelineState {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  // By n <= kStages stages.
  __device__ __forceinline__ void advance(int n) {
    stage += n;
    if (stage >= kStages) stage -= kStages, parity ^= 1;
  }
};

}  // namespace flash_online::cuda
