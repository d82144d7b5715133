// csrc/cuda/hw/pdl.cuh on the host, where a kernel has ended before the next one starts.
#pragma once

namespace flash_online::cuda {

inline void launch_dependents() {}
inline void grid_dependency_wait() {}

}  // namespace flash_online::cuda
