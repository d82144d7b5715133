// The function attribute of code that runs on host and device.
#pragma once

// Functions are always inlined: the same template is compiled for several instruction sets into one library, and the linker
// would pick one set's out-of-line copy for all of them.
#if defined(__CUDACC__)
#define FLASH_ONLINE_HD __host__ __device__ __forceinline__
#else
#define FLASH_ONLINE_HD inline __attribute__((always_inline))
#endif
