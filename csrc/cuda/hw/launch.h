// Launches: errors and the properties of the current device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace flash_online::cuda {

constexpr int kWarpSize = 32;  // threads

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

// To be called right after a launch. Asks this library's own copy of the runtime, so errors of torch's launches are not seen.
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

// The current device; those from kDevices on are not remembered anything about.
constexpr int kDevices = 64;
inline int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// An attribute of the current device, which must not be 0; asked for once a device.
template <cudaDeviceAttr kAttribute>
int device_attribute() {
  static std::atomic<int> known[kDevices];
  const int device = current_device();
  int value = 0;
  if (device < kDevices && (value = known[device].load(std::memory_order_relaxed)) != 0) return value;
  check(cudaDeviceGetAttribute(&value, kAttribute, device), "cudaDeviceGetAttribute");
  if (device < kDevices) known[device].store(value, std::memory_order_relaxed);
  return value;
}

inline int sm_count() { return device_attribute<cudaDevAttrMultiProcessorCount>(); }

// The most blocks of a cluster on the current device; 1 where there are no clusters. More than 8 are not portable.
inline int largest_cluster() {
  const int major = device_attribute<cudaDevAttrComputeCapabilityMajor>();
  return major < 9 ? 1 : major < 12 ? 16 : 8;
}

// A launch in clusters of blocks, a power of two; to be completed by the grid's size.
struct ClusterConfig {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};
  ClusterConfig(int cluster, unsigned threads, unsigned shared_bytes, cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = dim3(static_cast<unsigned>(cluster));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = cluster > 1 ? 1 : 0;
  }
  ClusterConfig(const ClusterConfig&) = delete;
};

// To be called before a kernel is first launched in such clusters on a device.
template <class Kernel>
void allow_cluster(Kernel kernel, int cluster) {
  if (cluster > 8)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
}

// The attribute of a launch whose blocks may start once those of the kernel before it in the stream are gone or have all
// called launch_dependents(); they call grid_dependency_wait() (stream_order.cuh) before they touch any tensor.
inline void allow_early_start(cudaLaunchConfig_t& config, cudaLaunchAttribute& attribute) {
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = device_attribute<cudaDevAttrComputeCapabilityMajor>() >= 9 ? 1 : 0;
}

// Queues kernel(problem), which starts early: its launch does not show behind another kernel.
template <class Problem>
void launch_dependent(void (*kernel)(Problem), const Problem& problem, unsigned blocks, unsigned threads, cudaStream_t stream,
                      unsigned shared_bytes = 0) {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  allow_early_start(config, attribute);
  check(cudaLaunchKernelEx(&config, kernel, problem), "cudaLaunchKernelEx");
}

// A kernel whose clusters of blocks stay for several pieces of work each. One static object a kernel.
template <class Problem>
class PersistentKernel {
 public:
  PersistentKernel(void (*kernel)(Problem), unsigned threads, unsigned shared_bytes)
      : kernel_(kernel), threads_(threads), shared_bytes_(shared_bytes) {}

  // Queues kernel(problem) with a block for each piece of the work, as far as all are on the device at once. `early`: see
  // allow_early_start.
  void launch_all(const Problem& problem, int64_t work, bool early, cudaStream_t stream) {
    ClusterConfig made(1, threads_, shared_bytes_, stream);
    made.config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(work, resident(made.config, 1))));
    if (early) allow_early_start(made.config, made.attribute);
    check(cudaLaunchKernelEx(&made.config, kernel_, problem), "cudaLaunchKernelEx");
  }

  // Queues kernel(problem) with clusters of so many blocks, a power of two. A cluster gets as little as one piece of the work
  // if all find room on the device, and at most `most`, so that who is late holds up few.
  void launch(const Problem& problem, int64_t work, int cluster, int64_t most, cudaStream_t stream) {
    ClusterConfig made(cluster, threads_, shared_bytes_, stream);
    const int64_t room = resident(made.config, cluster), each = std::min((work + room - 1) / room, most);
    made.config.gridDim = dim3(static_cast<unsigned>((work + each - 1) / each * cluster));
    check(cudaLaunchKernelEx(&made.config, kernel_, problem), "cudaLaunchKernelEx");
  }

 private:
  // How many clusters run at once, asked for once a device.
  int resident(const cudaLaunchConfig_t& config, int cluster) {
    const int device = current_device();
    int size = 0;
    while (1 << size < cluster) ++size;
    std::atomic<int>* known = device < kDevices ? &known_[device][size] : nullptr;
    int clusters = known == nullptr ? 0 : known->load(std::memory_order_relaxed);
    if (clusters > 0) return clusters;
    check(cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes_)),
          "cudaFuncSetAttribute");
    allow_cluster(kernel_, cluster);
    if (cluster > 1) {
      check(cudaOccupancyMaxActiveClusters(&clusters, kernel_, &config), "cudaOccupancyMaxActiveClusters");
    } else {
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&clusters, kernel_, static_cast<int>(threads_), shared_bytes_),
            "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
      clusters *= sm_count();
    }
    if (clusters == 0) throw std::runtime_error("CUDA: this device has no room for a kernel's cluster of blocks");
    if (known != nullptr) known->store(clusters, std::memory_order_relaxed);
    return clusters;
  }

  static constexpr int kClusterSizes = 5;  // 1 to 16
  void (*kernel_)(Problem);
  unsigned threads_, shared_bytes_;
  std::atomic<int> known_[kDevices][kClusterSizes] = {};
};

// Queues kKernel(arguments) with dynamic shared memory, whose limit is raised where a launch first asks for more. `behind`: as
// launch_dependent does.
template <auto kKernel, class Arguments>
void launch(const Arguments& arguments, int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
            bool behind = false) {
  constexpr int kAlwaysAllowed = 48 << 10;
  static std::atomic<int> allowed[kDevices];
  if (shared_bytes > kAlwaysAllowed) {
    const int device = current_device();
    if (device >= kDevices || allowed[device].load(std::memory_order_relaxed) < shared_bytes) {
      check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "cudaFuncSetAttribute");
      if (device < kDevices) allowed[device].store(shared_bytes, std::memory_order_relaxed);
    }
  }
  if (blocks > 0x7fffffff) throw std::runtime_error("CUDA: a grid has at most 2^31 - 1 blocks, got " + std::to_string(blocks));
  if (behind)
    return launch_dependent(kKernel, arguments, static_cast<unsigned>(blocks), static_cast<unsigned>(threads), stream,
                            static_cast<unsigned>(shared_bytes));
  kKernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(arguments);
  check_launch("launch");
}

// Blocks for work that each of them takes by striding over the grid: as many as there is work for, a few for each place on
// the device, and never more than a grid may have.
inline unsigned grid_for(int64_t work, int ctas_per_sm) {
  const int64_t most = int64_t{sm_count()} * ctas_per_sm;
  return static_cast<unsigned>(work < most ? work : most);
}

}  // namespace flash_online::cuda
