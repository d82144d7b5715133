// Registers moved between the warpgroups of a running block (setmaxnreg): multiples of 8, and never more in all than the block
// was launched with. Every warp of a warpgroup asks for the same.
#pragma once

namespace flash_online::cuda {

template <int kRegisters>
__device__ __forceinline__ void reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The compiler forgets what it knows of x: what follows from it is computed where it is used, and not kept in registers from
// before.
__device__ __forceinline__ void make_opaque(int& x) { asm volatile("" : "+r"(x)); }
// The words have their values here, and not later.
template <int kRows>
__device__ __forceinline__ void fence_registers(unsigned (&x)[kRows][4]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(x[i][e])::"memory");
}

}  // namespace flash_online::cuda
