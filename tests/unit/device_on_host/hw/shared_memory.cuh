// csrc/cuda/hw/shared_memory.cuh on the host: addresses count from the start of the CTA's shared memory.
#pragma once

#include <stdexcept>

namespace flash_online::cuda {

inline unsigned shared_address(const void* pointer) {
  const auto offset = static_cast<const char*>(pointer) - device_on_host::shared_memory;
  if (offset < 0 || offset >= device_on_host::kSharedBytes) throw std::runtime_error("an address outside shared memory");
  return static_cast<unsigned>(offset);
}

}  // namespace flash_online::cuda
