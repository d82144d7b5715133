// Registers moved between the warpgroups of a running block (setmaxnreg): multiples of 8, and never more in all than the block
// was launched with. Every warp of a warpgroup asks for the same.
#pragma once

namespace flash_online::cuda {

template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flash_online::cuda
