// csrc/cuda/hw/named_barrier.cuh on the host, where only whole CTAs wait for one another.
#pragma once

#include <stdexcept>

namespace flash_online::cuda {

inline void sync_named(int, int) { throw std::logic_error("sync_named"); }

}  // namespace flash_online::cuda
