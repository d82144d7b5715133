// The byte permutation (prmt) in its sign mode, which repeats a byte's top bit.
#pragma once

namespace flash_online::cuda {

// Each 16-bit half becomes all ones if it is negative, else zeros. (__byte_perm masks off the bit that selects sign mode.)
__device__ __forceinline__ unsigned sign_mask_16x2(unsigned x) {
  unsigned signs;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(x));
  return signs;
}

}  // namespace flash_online::cuda
