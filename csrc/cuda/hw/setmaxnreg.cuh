// Moves registers between the warpgroups of a running CTA (setmaxnreg). Counts are per thread and multiples of 8; the
// warpgroups' counts together must not exceed what the CTA was launched with. Every warp of a warpgroup must execute it.
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

}  // namespace flash_online::cuda
