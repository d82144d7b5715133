// Launches: errors and the properties of the current device.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace flash_online::cuda {

constexpr int kWarp = 32;  // threads

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

// To be called right after a launch. Asks this library's own copy of the runtime, so errors of torch's launches are not seen.
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

// An attribute of the current device, which must not be 0; asked for once a device.
template <cudaDeviceAttr kAttribute>
int device_attribute() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device < kDevices && (value = known[device].load(std::memory_order_relaxed)) != 0) return value;
  check(cudaDeviceGetAttribute(&value, kAttribute, device), "cudaDeviceGetAttribute");
  if (device < kDevices) known[device].store(value, std::memory_order_relaxed);
  return value;
}

inline int multiprocessors() { return device_attribute<cudaDevAttrMultiProcessorCount>(); }

// The most blocks of a cluster on the current device; 1 where there are no clusters. More than 8 are not portable.
inline int largest_cluster() {
  const int major = device_attribute<cudaDevAttrComputeCapabilityMajor>();
  return major < 9 ? 1 : major < 12 ? 16 : 8;
}

// Queues kernel(problem) with dynamic shared memory, in clusters of `cluster` blocks, of which `blocks` is a multiple.
template <class Problem>
void launch_shared(void (*kernel)(Problem), const Problem& problem, unsigned blocks, unsigned threads, unsigned shared_bytes,
                   unsigned cluster, cudaStream_t stream) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        "cudaFuncSetAttribute");
  if (cluster > 8)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, problem), "cudaLaunchKernelEx");
}

// Queues kKernel(arguments) with dynamic shared memory, whose limit is raised where a launch first asks for more.
template <auto kKernel, class Arguments>
void launch(const Arguments& arguments, int64_t blocks, int threads, int shared_bytes, cudaStream_t stream) {
  constexpr int kDevices = 64, kAlwaysAllowed = 48 << 10;
  static std::atomic<int> allowed[kDevices];
  if (shared_bytes > kAlwaysAllowed) {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    if (device >= kDevices || allowed[device].load(std::memory_order_relaxed) < shared_bytes) {
      check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "cudaFuncSetAttribute");
      if (device < kDevices) allowed[device].store(shared_bytes, std::memory_order_relaxed);
    }
  }
  if (blocks > 0x7fffffff) throw std::runtime_error("CUDA: a grid has at most 2^31 - 1 blocks, got " + std::to_string(blocks));
  kKernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(arguments);
  check_launch("launch");
}

// Blocks for work that each of them takes by striding over the grid: as many as there is work for, a few for each place on
// the device, and never more than a grid may have.
inline unsigned grid_for(int64_t work, int blocks_a_multiprocessor) {
  const int64_t most = int64_t{multiprocessors()} * blocks_a_multiprocessor;
  return static_cast<unsigned>(work < most ? work : most);
}

}  // namespace flash_online::cuda
