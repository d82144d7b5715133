// Programmatic dependent launch: a kernel starts while the one before it in the stream still runs, and waits for its results
// inside. Below compute capability 9.0 kernels follow each other.
#pragma once

#include <cuda_device_runtime_api.h>

namespace flash_online::cuda {

// From when all blocks have called this, or are gone, those of the next kernel may take free places.
__device__ __forceinline__ void launch_dependents() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Until the kernel before has ended and all it wrote is seen.
__device__ __forceinline__ void grid_dependency_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

}  // namespace flash_online::cuda
