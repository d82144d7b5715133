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

// How many multiprocessors the current device has; asked for once a device.
inline int multiprocessors() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device < kDevices && (count = known[device].load(std::memory_order_relaxed)) != 0) return count;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  if (device < kDevices) known[device].store(count, std::memory_order_relaxed);
  return count;
}

// Blocks for work that each of them takes by striding over the grid: as many as there is work for, a few for each place on
// the device, and never more than a grid may have.
inline unsigned grid_for(int64_t work, int blocks_a_multiprocessor) {
  const int64_t most = int64_t{multiprocessors()} * blocks_a_multiprocessor;
  return static_cast<unsigned>(work < most ? work : most);
}

}  // namespace flash_online::cuda
