// Programmatic dependent launch (PDL): a kernel may start while its predecessor in the stream still runs, and waits inside for
// the predecessor's results. Below compute capability 9.0 kernels run one after the other, and these functions do nothing.
// launch.h has the host's side.
#pragma once

#include <cuda_device_runtime_api.h>

namespace flash_online::cuda {

// Once every CTA has called this or has exited, CTAs of the next kernel may start where there is room.
__device__ __forceinline__ void launch_dependents() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Waits until the preceding kernel has ended and all of its writes are visible.
__device__ __forceinline__ void grid_dependency_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

}  // namespace flash_online::cuda
