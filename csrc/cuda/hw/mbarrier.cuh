// Barriers in shared memory on which arrivals and bytes of bulk copies are counted (mbarrier). A barrier runs through phases;
// waiting names a phase by its parity, so a waiter may be at most one phase behind.
#pragma once

#include <cstdint>

#include "mma.cuh"

namespace flash_online::cuda {

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// After the last mbarrier_init, and before the block's barrier that lets others use them: shows them to the copy engine.
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and lets the phase last until `bytes` more have been copied.
__device__ __forceinline__ void arrive_expect_tx(uint64_t* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Until the phase of this parity is over. Of a new barrier, the phase before the first counts as over: its parity is 1.
__device__ __forceinline__ void wait(uint64_t* barrier, unsigned parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Whether the phase of this parity is over, without waiting.
__device__ __forceinline__ bool test_wait(uint64_t* barrier, unsigned parity) {
  unsigned over;
  asm volatile(
      "{.reg .pred over;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      "selp.b32 %0, 1, 0, over;}"
      : "=r"(over)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return over != 0;
}

// The place in a ring of kStages buffers, each with its barriers.
template <int kStages>
struct PipelineState {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  // By `n` <= kStages.
  __device__ __forceinline__ void advance(int n) {
    stage += n;
    if (stage >= kStages) stage -= kStages, parity ^= 1;
  }
};

}  // namespace flash_online::cuda
