// Clusters: blocks that run side by side and write into each other's shared memory. Below compute capability 9.0 a block is
// its own cluster of one.
#pragma once

#include <cooperative_groups.h>

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

#else

__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() { __syncthreads(); }
template <class T>
__device__ __forceinline__ T* in_block(T* shared, int) {
  return shared;
}

#endif

}  // namespace flash_online::cuda
