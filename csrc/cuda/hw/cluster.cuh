// Clusters: CTAs that run at the same time and can write into each other's shared memory. Below compute capability 9.0 every
// CTA is a cluster of one.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "mbarrier.cuh"
#include "shared_memory.cuh"

namespace flash_online::cuda {

constexpr int kLargestCluster = 16;  // CTAs; more than 8 need the kernel's attribute for non-portable sizes

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ int cluster_rank() { return static_cast<int>(cooperative_groups::this_cluster().block_rank()); }
__device__ __forceinline__ int cluster_size() { return static_cast<int>(cooperative_groups::this_cluster().num_blocks()); }

// A barrier of all threads of the cluster. What a thread wrote before it arrived, also into another CTA's shared memory, is
// visible to all once they have waited. A CTA must not write into one that may not have started yet, nor exit while others may
// still write into it.
__device__ __forceinline__ void cluster_arrive() { cooperative_groups::this_cluster().barrier_arrive(); }
__device__ __forceinline__ void cluster_wait() { cooperative_groups::this_cluster().barrier_wait(); }

// The address of what lies at the place of `shared` in the shared memory of CTA `rank`.
__device__ __forceinline__ unsigned cluster_address(const void* shared, int rank) {
  unsigned address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
  return address;
}

// Arrives at the mbarrier that lies at the place of `barrier` in CTA `rank`, to say that something has been read. What was
// written before is not published to that CTA: a release at the cluster's scope also waits for the thread's reductions in
// global memory.
__device__ __forceinline__ void arrive_at(uint64_t* barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank)) : "memory");
}

// Copies `bytes` of this CTA's shared memory into that of CTA `rank`, where the mbarrier at the place of `barrier` counts them
// (cp.async.bulk). `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_copy_to(void* to, const void* from, unsigned bytes, uint64_t* barrier, int rank) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cluster_address(to, rank)),
               "r"(shared_address(from)), "r"(bytes), "r"(cluster_address(barrier, rank))
               : "memory");
}

// Messages into another CTA's shared memory, which an mbarrier there counts. Waiting for messages is cheaper than the cluster's
// barrier, which waits for all writes of its threads, to global memory too. A message's memory and its mbarrier are used once.

// Prepares the mbarrier: to be called by one thread of each CTA, before the cluster's first barrier.
__device__ __forceinline__ void open_mailbox(uint64_t* barrier) {
  mbarrier_init(barrier, 1);
  fence_barrier_init();
}
// Arrives at the cluster's barrier only to say that this CTA has started: of what was written before, it publishes nothing but
// mbarriers (fence_barrier_init).
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// Says how many bytes this CTA is going to receive: to be called by one of its threads. Messages may have arrived before.
__device__ __forceinline__ void expect_messages(uint64_t* barrier, unsigned bytes) { arrive_expect_tx(barrier, bytes); }
__device__ __forceinline__ void wait_for_messages(uint64_t* barrier) { wait(barrier, 0); }

// Writes 4, 8 or 16 bytes to `to` and counts them on `barrier`, both in the shared memory of CTA `rank`.
template <class T>
__device__ __forceinline__ void send_message(T* to, const T& message, uint64_t* barrier, int rank) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
  if constexpr (sizeof(T) == 16) {
    const uint4 words = __builtin_bit_cast(uint4, message);
    uint2* const halves = reinterpret_cast<uint2*>(to);
    send_message(&halves[0], uint2{words.x, words.y}, barrier, rank);
    send_message(&halves[1], uint2{words.z, words.w}, barrier, rank);
    return;
  }
  const unsigned remote_to = cluster_address(to, rank), remote_barrier = cluster_address(barrier, rank);
  if constexpr (sizeof(T) == 4)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote_to),
                 "r"(__builtin_bit_cast(unsigned, message)), "r"(remote_barrier)
                 : "memory");
  else if constexpr (sizeof(T) == 8)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(remote_to),
                 "l"(__builtin_bit_cast(unsigned long long, message)), "r"(remote_barrier)
                 : "memory");
}

#else

__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() { __syncthreads(); }
__device__ __forceinline__ void open_mailbox(uint64_t*) {}
__device__ __forceinline__ void arrive_at(uint64_t*, int) {}
__device__ __forceinline__ void bulk_copy_to(void*, const void*, unsigned, uint64_t*, int) {}
__device__ __forceinline__ void cluster_arrive_relaxed() {}
__device__ __forceinline__ void expect_messages(uint64_t*, unsigned) {}
__device__ __forceinline__ void wait_for_messages(uint64_t*) {}
template <class T>
__device__ __forceinline__ void send_message(T*, const T&, uint64_t*, int) {}

#endif

}  // namespace flash_online::cuda
