// CUDA's headers and then warp.h, with further functions that the kernels' headers use.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <string>

#include "warp.h"

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return static_cast<unsigned>((low | uint64_t{high} << 32) >> (bits & 31));
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = low | uint64_t{high} << 32;
  unsigned chosen = 0;
  for (int n = 0; n < 4; ++n) {
    const unsigned at = selector >> 4 * n & 15;
    if (at > 7) throw std::logic_error("__byte_perm: a sign");
    chosen |= static_cast<unsigned>(bytes >> 8 * at & 255) << 8 * n;
  }
  return chosen;
}
template <class Choose>
unsigned of_halves(unsigned a, unsigned b, Choose choose) {
  const auto half = [&](int n) {
    return static_cast<unsigned>(
        static_cast<uint16_t>(choose(static_cast<int16_t>(a >> 16 * n), static_cast<int16_t>(b >> 16 * n))));
  };
  return half(0) | half(1) << 16;
}
inline unsigned __vmaxs2(unsigned a, unsigned b) {
  return of_halves(a, b, [](int16_t x, int16_t y) { return max(x, y); });
}
inline unsigned __vmins2(unsigned a, unsigned b) {
  return of_halves(a, b, [](int16_t x, int16_t y) { return min(x, y); });
}
inline unsigned __vcmpne4(unsigned a, unsigned b) {
  unsigned differ = 0;
  for (int n = 0; n < 4; ++n) differ |= ((a ^ b) >> 8 * n & 255 ? 255u : 0u) << 8 * n;
  return differ;
}
inline uint4 __ldcs(const uint4* at) { return *at; }
inline void __stcs(uint4* at, const uint4& v) { *at = v; }
inline float2 __ldcg(const float2* at) { return *at; }
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == ~0u; }

#define __CUDACC__  // from here on headers have what they have for kernels
