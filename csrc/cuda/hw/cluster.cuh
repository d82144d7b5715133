// Clusters: blocks that run side by side and write into each other's shared memory. Below compute capability 9.0 a block is
// its own cluster of one.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "mbarrier.cuh"

namespace flash_online::cuda {

constexpr int kLargestCluster = 16;  // blocks; more than 8 need the kernel's non-portable attribute

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ int cluster_rank() { return static_cast<int>(cooperative_groups::this_cluster().block_rank()); }
__device__ __forceinline__ int cluster_size() { return static_cast<int>(cooperative_groups::this_cluster().num_blocks()); }

// Every thread of the cluster arrives, then waits: what was written before the one, also into another block's shared memory,
// is seen after the other. A block must not write into one that may not have started, nor leave before it was written into.
__device__ __forceinline__ void cluster_arrive() { cooperative_groups::this_cluster().barrier_arrive(); }
__device__ __forceinline__ void cluster_wait() { cooperative_groups::this_cluster().barrier_wait(); }

// The same shared variable in another block of the cluster.
template <class T>
__device__ __forceinline__ T* in_block(T* shared, int rank) {
  return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
}

// Messages into another block's shared memory, counted by a barrier (mbarrier) that lies there: who waits for them waits for
// nothing else, where a cluster's barrier waits for all that its threads wrote, to global memory too. A place and its barrier
// serve once.

// By one thread of each block, before the cluster's threads meet to learn that all have begun.
__device__ __forceinline__ void open_mailbox(uint64_t* barrier) {
  mbarrier_init(barrier, 1);
  fence_barrier_init();
}
// That all have begun: nothing that was written before is shown by it but mailboxes.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// By one thread of each block: how much it is going to get. Messages may be there already.
__device__ __forceinline__ void expect_messages(uint64_t* barrier, unsigned bytes) { arrive_expect_tx(barrier, bytes); }
__device__ __forceinline__ void wait_for_messages(uint64_t* barrier) { wait(barrier, 0); }

// 4 or 8 bytes to where `to` is in block `rank`.
template <class T>
__device__ __forceinline__ void send_message(T* to, const T& message, uint64_t* barrier, int rank) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  unsigned there, counted;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(to)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"(shared_address(barrier)), "r"(rank));
  if constexpr (sizeof(T) == 4)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there),
                 "r"(__builtin_bit_cast(unsigned, message)), "r"(counted)
                 : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(there),
                 "l"(__builtin_bit_cast(unsigned long long, message)), "r"(counted)
                 : "memory");
}

#else

__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() { __syncthreads(); }
template <class T>
__device__ __forceinline__ T* in_block(T* shared, int) {
  return shared;
}
__device__ __forceinline__ void open_mailbox(uint64_t*) {}
__device__ __forceinline__ void cluster_arrive_relaxed() {}
__device__ __forceinline__ void expect_messages(uint64_t*, unsigned) {}
__device__ __forceinline__ void wait_for_messages(uint64_t*) {}
template <class T>
__device__ __forceinline__ void send_message(T*, const T&, uint64_t*, int) {}

#endif

}  // namespace flash_online::cuda
