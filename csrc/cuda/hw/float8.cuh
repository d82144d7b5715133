// float8 elements: as halves, which hold them exactly, and from floats.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace flash_online::cuda {

// e4m3 elements in the upper bytes of two halves, as halves. Below compute capability 8.9, which has no instruction for it.
__device__ __forceinline__ unsigned widen_e4m3(unsigned pair) {
  const unsigned magnitudes = pair & 0x7f007f00, bits = (pair & 0x80008000) | magnitudes >> 1;
  const __half2 scaled = __hmul2(reinterpret_cast<const __half2&>(bits), __half2half2(__float2half(256)));  // the biases differ
  const unsigned nan = ((magnitudes + 0x01000100) >> 15 & 0x00010001) * 0x7fff;
  return reinterpret_cast<const unsigned&>(scaled) | nan;
}

// The four elements of a word as halves: the first two in x, the last two in y. `kind` should be a constant.
__device__ __forceinline__ uint2 widen_float8_to_halves(unsigned elements, __nv_fp8_interpretation_t kind) {
  uint2 halves;
#if __CUDA_ARCH__ >= 890
  // One instruction each, which can take the upper half of a register; the intrinsic would shift the word.
  if (kind == __NV_E4M3)
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(elements));
  else
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e5m2x2 %0, low; cvt.rn.f16x2.e5m2x2 %1, high;}"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(elements));
#else
  halves = {__byte_perm(elements, 0, 0x1404), __byte_perm(elements, 0, 0x3424)};  // the upper byte of a half is an e5m2
  if (kind == __NV_E4M3) halves = {widen_e4m3(halves.x), widen_e4m3(halves.y)};
#endif
  return halves;
}

// Two floats as e4m3, to the nearest and saturating, the first in the lower byte. From compute capability 8.9 on.
__device__ __forceinline__ uint16_t e4m3_pair(float x, float y) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(x), "f"(y));
  return pair;
}

// A word of two pairs that is made where this is called, not as soon as the pairs are there: it may be the operand of products
// that still run.
__device__ __forceinline__ unsigned join_pairs_here(uint16_t low, uint16_t high) {
  unsigned word;
  asm volatile("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(low), "h"(high));
  return word;
}

}  // namespace flash_online::cuda
