// csrc/cuda/hw/launch.h on the host: a launch runs one CTA after another, each in shared memory full of NaN; the CTAs of a
// cluster wait for each other at its barrier. The GPU has three SMs, unless a test says otherwise.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../core/integer.h"
#include "cp_async.cuh"
#include "warp.h"

namespace flash_online::cuda {

inline int sm_count() { return device_on_host::sms; }
inline int shared_bytes_per_cta() {
  if (device_on_host::room == 0) throw std::runtime_error("there is no GPU");
  return device_on_host::room;
}
inline void check(int status, const char* what) {
  if (status != 0) throw std::runtime_error(what);
}

inline int largest_cluster() { return 8; }

// One CTA, and what is its own while another one of its cluster runs.
struct RunningCta {
  device_on_host::Cta cta;
  std::vector<char> memory;
  std::map<int, PendingCopies> copies;
  bool ended = false;

  explicit RunningCta(int threads) : cta(threads) {}
  void start(Index3 index, const std::function<void(int)>& thread) {
    memory.assign(device_on_host::kSharedBytes, char{-1});
    copies.clear();
    cta.start(index, thread);
  }
  void resume() {
    std::memcpy(device_on_host::shared_memory, memory.data(), memory.size());
    pending_copies.swap(copies);
    ended = cta.resume();
    if (ended)
      for (const auto& [thread, own] : pending_copies)
        if (!own.none()) throw std::runtime_error("a thread has ended and has not waited for its copies");
    std::memcpy(memory.data(), device_on_host::shared_memory, memory.size());
    pending_copies.swap(copies);
  }
};

template <class Kernel, class Arguments>
void launch_on_host(Kernel kernel, const Arguments& arguments, dim3 grid, int threads, int shared_bytes, int cluster) {
  if (shared_bytes > device_on_host::room) throw std::runtime_error("too much shared memory");
  gridDim = {grid.x, grid.y, grid.z};
  blockDim.x = static_cast<unsigned>(threads);
  pending_copies.clear();  // an error may have left some
  std::vector<std::unique_ptr<RunningCta>> ctas;  // of a cluster, and then of the next one
  for (int rank = 0; rank < cluster; ++rank) ctas.push_back(std::make_unique<RunningCta>(threads));
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned first = 0; first < grid.x; first += static_cast<unsigned>(cluster)) {
        for (unsigned rank = 0; rank < ctas.size(); ++rank)
          ctas[rank]->start({first + rank, y, z}, [&](int) { kernel(arguments); });
        for (bool ended = false; !ended;) {
          for (const auto& one : ctas) one->resume();
          ended = ctas[0]->ended;
          for (const auto& one : ctas)
            if (one->ended != ended) throw std::runtime_error("a CTA has ended, and others of its cluster wait for it");
        }
      }
}

template <auto kKernel, class Arguments>
void launch(const Arguments& arguments, int64_t ctas, int threads, int shared_bytes, void*, bool = false, int cluster = 1) {
  launch_on_host(kKernel, arguments, dim3(static_cast<unsigned>(ctas)), threads, shared_bytes, cluster);
}
template <class Arguments>
void launch_dependent(void (*kernel)(Arguments), const Arguments& arguments, dim3 grid, unsigned threads, void*) {
  launch_on_host(kernel, arguments, grid, static_cast<int>(threads), 0, 1);
}
inline unsigned grid_for(int64_t items, int ctas_per_sm) {
  return static_cast<unsigned>(std::min<int64_t>(items, int64_t{sm_count()} * ctas_per_sm));
}

}  // namespace flash_online::cuda

template <class Kernel>
int cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return 0;
}
template <class Kernel>
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, Kernel*, int, size_t) {
  *ctas = 1;
  return 0;
}
