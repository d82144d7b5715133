// Values that all lanes of a warp have alike, and that the compiler cannot know to be so.
#pragma once

#include <cstdint>

namespace flash_online::cuda {

// The first lane's value. The compiler keeps it in a register of the warp, of which there are plenty, instead of one per lane;
// all lanes must call it.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
template <class T>
__device__ __forceinline__ T* uniform(T* x) {
  const auto bits = reinterpret_cast<uint64_t>(x);
  const uint64_t low = __shfl_sync(~0u, static_cast<unsigned>(bits), 0),
                 high = __shfl_sync(~0u, static_cast<unsigned>(bits >> 32), 0);
  return reinterpret_cast<T*>(high << 32 | low);
}

}  // namespace flash_online::cuda
