// Bits spread over the bytes they lead: the byte permutation's other mode.
#pragma once

namespace flash_online::cuda {

// Each 16 bits all ones where they were negative as a number, else zeros. (__byte_perm drops what asks for signs.)
__device__ __forceinline__ unsigned sign_mask_16x2(unsigned x) {
  unsigned signs;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(x));
  return signs;
}

}  // namespace flash_online::cuda
