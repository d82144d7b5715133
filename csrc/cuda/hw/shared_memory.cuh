// Addresses in shared memory, as PTX instructions take them: 32 bits, counted from the start of the shared window.
#pragma once

namespace flash_online::cuda {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

}  // namespace flash_online::cuda
