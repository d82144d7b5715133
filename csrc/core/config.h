// What every file of the library shares: the function attribute for code that runs on host and device.
#pragma once

// Always inlined: the same template is compiled for several instruction sets into one library, and an out-of-line copy
// would let the linker pick one set's code for all of them.
#if defined(__CUDACC__)
#define FLASH_ONLINE_HD __host__ __device__ __forceinline__
#else
#define FLASH_ONLINE_HD inline __attribute__((always_inline))
#endif
