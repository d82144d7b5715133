// Bits by single instructions: the byte permutation (prmt) in its sign mode, which repeats a byte's top bit, and carries.
#pragma once

namespace flash_online::cuda {

// Each 16-bit half becomes all ones if it is negative, else zeros. (__byte_perm masks off the bit that selects sign mode.)
__device__ __forceinline__ unsigned sign_mask_16x2(unsigned x) {
  unsigned signs;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(x));
  return signs;
}

// sign_mask_16x2() of x << 8.
__device__ __forceinline__ unsigned sign_mask_16x2_below(unsigned x) {
  unsigned signs;
  asm("prmt.b32 %0, %1, 0, 0xaa88;" : "=r"(signs) : "r"(x));
  return signs;
}

// Shifts the carry of x + y into `bits` from below: two instructions. Of the same sum in 64 bits the compiler makes three.
__device__ __forceinline__ void push_carry(unsigned& bits, unsigned x, unsigned y) {
  asm("{\n  .reg .u32 sum;\n  add.cc.u32 sum, %1, %2;\n  addc.u32 %0, %0, %0;\n}" : "+r"(bits) : "r"(x), "r"(y));
}

}  // namespace flash_online::cuda
