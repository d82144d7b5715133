// Fences for the compiler: empty assembler statements that hide a value's origin, or pin the place where it is computed. They
// cost no instruction.
#pragma once

#include <cstdint>

namespace flash_online::cuda {

// The compiler forgets what it knows of x, so that expressions of x are computed where they are used, instead of once and then
// kept in registers.
__device__ __forceinline__ void make_opaque(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void make_opaque(float& x) { asm volatile("" : "+f"(x)); }

// Makes the compiler compute a value that is not used.
__device__ __forceinline__ void keep(unsigned x) { asm volatile("" ::"r"(x)); }

// Returns a copy of the value and hides its origin from the compiler. From a wgmma descriptor that does not change within a
// loop, the compiler would otherwise derive one descriptor per step and keep them all in registers.
__device__ __forceinline__ uint64_t opaque(uint64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}
__device__ __forceinline__ unsigned opaque(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The registers have their values here: the compiler moves no definition of them to after this place and no use of them to
// before it. wgmma needs the latter, since the compiler does not know that a product in flight still writes its accumulators.
template <int kRegisters>
__device__ __forceinline__ void fence_registers(float (&x)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kRows>
__device__ __forceinline__ void fence_registers(unsigned (&x)[kRows][4]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(x[i][e])::"memory");
}

}  // namespace flash_online::cuda
