// What the tests of the general attention kernels share: CUDA on the host, and the functions for ctypes that a library of such
// kernels needs, whatever they are. tests/kernels_on_host.py compiles the .cpp files with a copy of csrc in which hw/ has the
// headers of device_on_host/hw, and with -DHEAD_DIM.
#pragma once

#include "cuda_on_host.h"
#include "guarded.h"

namespace flash_online::cuda {
alignas(128) thread_local char shared[device_on_host::kSharedBytes];  // the kernels' `extern __shared__`
}
[[maybe_unused]] const bool kIsSet = (device_on_host::shared_memory = flash_online::cuda::shared, true);

#include "core/problem.h"
#include "cuda/attention/sm80/tiles.h"

// PLAIN, ALL_OPTIONS or SMALL_TILE of tests/kernels_on_host.py.
constexpr int kind_of(flash_online::cuda::Variant variant) {
  return variant == flash_online::cuda::kSmall ? 2 : variant == flash_online::cuda::kAll ? 1 : 0;
}

extern "C" {

int64_t size_of_problem() { return sizeof(flash_online::AttentionProblem); }
void set_shared_bytes(int bytes) { device_on_host::room = bytes; }
}
