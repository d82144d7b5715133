// csrc/cuda/hw/cluster.cuh on the host: the cluster's barrier. A CTA may not look into another one's shared memory.
#pragma once

namespace flash_online::cuda {

constexpr int kLargestCluster = 16;

inline void cluster_arrive() {}
inline void cluster_wait() { device_on_host::Cta::wait_for_cluster(); }

}  // namespace flash_online::cuda
