// csrc/cuda/hw/launch.h on the host: a launch runs one CTA after another, each in shared memory full of NaN. The GPU has three
// SMs, and each holds one CTA.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

#include "../../core/integer.h"
#include "cp_async.cuh"
#include "warp.h"

namespace flash_online::cuda {

inline int sm_count() { return 3; }
inline int shared_bytes_per_cta() {
  if (device_on_host::room == 0) throw std::runtime_error("there is no GPU");
  return device_on_host::room;
}
inline void check(int status, const char* what) {
  if (status != 0) throw std::runtime_error(what);
}

template <auto kKernel, class Arguments>
void launch(const Arguments& arguments, int64_t ctas, int threads, int shared_bytes, void*, bool = false) {
  if (shared_bytes > device_on_host::room) throw std::runtime_error("too much shared memory");
  gridDim.x = static_cast<unsigned>(ctas);
  device_on_host::Cta cta(threads);
  for (int64_t n = 0; n < ctas; ++n) {
    std::memset(device_on_host::shared_memory, 0xff, device_on_host::kSharedBytes);
    pending_copies.clear();  // an error may have left some
    cta.run(static_cast<unsigned>(n), [&](int) { kKernel(arguments); });
    for (const auto& [thread, copies] : pending_copies)
      if (!copies.started.empty() || !copies.committed.empty())
        throw std::runtime_error("a thread has ended and has not waited for its copies");
  }
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
