// Kernel launches: error checks, properties of the current device, sizes of grids.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "../../core/integer.h"
#include "warp.h"

namespace flash_online::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

// To be called right after a launch. The library links its own copy of the runtime, so this does not see errors of torch's
// launches.
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

constexpr int kMaxDevices = 64;  // properties of devices from this number on are not cached

inline int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// An attribute of the current device; its value must not be 0. The runtime is asked once per device.
template <cudaDeviceAttr kAttribute>
int device_attribute() {
  static std::atomic<int> cache[kMaxDevices];
  const int device = current_device();
  int value = 0;
  if (device < kMaxDevices && (value = cache[device].load(std::memory_order_relaxed)) != 0) return value;
  check(cudaDeviceGetAttribute(&value, kAttribute, device), "cudaDeviceGetAttribute");
  if (device < kMaxDevices) cache[device].store(value, std::memory_order_relaxed);
  return value;
}

// Bytes of shared memory that a CTA can have on the current device. FLASH_ONLINE_SHARED_MEMORY, in KiB and read once per
// process, lowers it: for tests of what kernels do on GPUs that have less.
inline int shared_bytes_per_cta() {
  static const int most = [] {
    const char* const text = std::getenv("FLASH_ONLINE_SHARED_MEMORY");
    if (text == nullptr) return INT_MAX;
    const int kibibytes = std::atoi(text);
    if (kibibytes < 48 || kibibytes > 1024)
      throw std::runtime_error(std::string("FLASH_ONLINE_SHARED_MEMORY: expected KiB from 48 to 1024, got ") + text);
    return kibibytes * 1024;
  }();
  return std::min(most, device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>());
}

inline int sm_count() { return device_attribute<cudaDevAttrMultiProcessorCount>(); }

// The largest cluster of the current device in CTAs, 1 if it has no clusters. Sizes over 8 are not portable (allow_cluster).
inline int largest_cluster() {
  const int major = device_attribute<cudaDevAttrComputeCapabilityMajor>();
  return major < 9 ? 1 : major < 12 ? 16 : 8;
}

// The configuration of a launch in clusters of `cluster` CTAs, a power of two. The caller sets the grid's size.
struct ClusterConfig {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  ClusterConfig(int cluster, unsigned threads, unsigned shared_bytes, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned>(cluster));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (cluster == 1) return;
    cudaLaunchAttribute& dimension = attributes[config.numAttrs++];
    dimension.id = cudaLaunchAttributeClusterDimension;
    dimension.val.clusterDim.x = static_cast<unsigned>(cluster);
    dimension.val.clusterDim.y = dimension.val.clusterDim.z = 1;
  }
  ClusterConfig(const ClusterConfig&) = delete;

  // Makes the launch a programmatic dependent one (pdl.cuh): its CTAs may start once all CTAs of the preceding kernel in the
  // stream have exited or called launch_dependents(). They must call grid_dependency_wait() before they touch any tensor.
  void allow_early_start() {
    if (device_attribute<cudaDevAttrComputeCapabilityMajor>() < 9) return;
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
};

// To be called before a kernel is first launched in clusters of this size on a device.
template <class Kernel>
void allow_cluster(Kernel kernel, int cluster) {
  if (cluster > 8)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
}

// Queues kernel(problem) as a dependent launch, which hides the cost of the launch while the preceding kernel runs.
template <class Problem>
void launch_dependent(void (*kernel)(Problem), const Problem& problem, dim3 ctas, unsigned threads, cudaStream_t stream,
                      unsigned shared_bytes = 0, int cluster = 1) {
  ClusterConfig setup(cluster, threads, shared_bytes, stream);
  setup.config.gridDim = ctas;
  setup.allow_early_start();
  check(cudaLaunchKernelEx(&setup.config, kernel, problem), "cudaLaunchKernelEx");
}

// A persistent kernel: each CTA processes several work items. There is one static object per kernel.
template <class Problem>
class PersistentKernel {
 public:
  PersistentKernel(void (*kernel)(Problem), unsigned threads, unsigned shared_bytes)
      : kernel_(kernel), threads_(threads), shared_bytes_(shared_bytes) {}

  // Queues kernel(problem) with one CTA per work item, but no more than the device can hold at once. `dependent`: see
  // allow_early_start.
  void launch_all(const Problem& problem, int64_t items, bool dependent, cudaStream_t stream) {
    ClusterConfig setup(1, threads_, shared_bytes_, stream);
    setup.config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(items, resident_ctas())));
    if (dependent) setup.allow_early_start();
    check(cudaLaunchKernelEx(&setup.config, kernel_, problem), "cudaLaunchKernelEx");
  }

 private:
  // The number of CTAs that the current device can hold at once. The runtime is asked once per device.
  int resident_ctas() {
    const int device = current_device();
    std::atomic<int>* cached = device < kMaxDevices ? &cache_[device] : nullptr;
    int ctas = cached == nullptr ? 0 : cached->load(std::memory_order_relaxed);
    if (ctas > 0) return ctas;
    check(cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes_)),
          "cudaFuncSetAttribute");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel_, static_cast<int>(threads_), shared_bytes_),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    ctas *= sm_count();
    if (ctas == 0) throw std::runtime_error("CUDA: this device has no room for a kernel's block");
    if (cached != nullptr) cached->store(ctas, std::memory_order_relaxed);
    return ctas;
  }

  void (*kernel_)(Problem);
  unsigned threads_, shared_bytes_;
  std::atomic<int> cache_[kMaxDevices] = {};
};

// Queues kKernel(arguments) with dynamic shared memory; raises the kernel's limit of it when a launch first needs more.
// `dependent`: see launch_dependent. `cluster`: CTAs per cluster, a power of two.
template <auto kKernel, class Arguments>
void launch(const Arguments& arguments, int64_t ctas, int threads, int shared_bytes, cudaStream_t stream,
            bool dependent = false, int cluster = 1) {
  constexpr int kAlwaysAllowed = 32 << 10;  // 48 KiB less what kernels have of static shared memory
  static std::atomic<int> allowed[kMaxDevices];
  if (shared_bytes > kAlwaysAllowed) {
    const int device = current_device();
    if (device >= kMaxDevices || allowed[device].load(std::memory_order_relaxed) < shared_bytes) {
      check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "cudaFuncSetAttribute");
      if (device < kMaxDevices) allowed[device].store(shared_bytes, std::memory_order_relaxed);
    }
  }
  if (ctas > 0x7fffffff) throw std::runtime_error("CUDA: a grid has at most 2^31 - 1 blocks, got " + std::to_string(ctas));
  if (cluster > 8) {
    static std::atomic<bool> is_allowed[kMaxDevices];
    const int device = current_device();
    if (device >= kMaxDevices || !is_allowed[device].load(std::memory_order_relaxed)) {
      allow_cluster(kKernel, cluster);
      if (device < kMaxDevices) is_allowed[device].store(true, std::memory_order_relaxed);
    }
  }
  ClusterConfig setup(cluster, static_cast<unsigned>(threads), static_cast<unsigned>(shared_bytes), stream);
  setup.config.gridDim = dim3(static_cast<unsigned>(ctas));
  if (dependent) setup.allow_early_start();
  check(cudaLaunchKernelEx(&setup.config, kKernel, arguments), "cudaLaunchKernelEx");
}

// The CTAs of a kernel that loops over `items` in steps of its grid: one CTA per item, and at most ctas_per_sm per SM.
inline unsigned grid_for(int64_t items, int ctas_per_sm) {
  return static_cast<unsigned>(std::min<int64_t>(items, int64_t{sm_count()} * ctas_per_sm));
}

}  // namespace flash_online::cuda
