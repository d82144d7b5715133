// Arithmetic by sums of two floats, and special functions made of the hardware's approximations.
#pragma once

#include "special_functions.cuh"

namespace flash_online::cuda {

constexpr float kLog2E = 1.44269504f, kLog2ELow = 1.92596299e-8f;  // log2(e), and what its rounding to float drops

// a + b and a * b exactly, as the sum of the returned float and `low` (Knuth's two-sum; an fma).
__device__ __forceinline__ float two_sum(float a, float b, float& low) {
  const float sum = __fadd_rn(a, b), added = __fsub_rn(sum, a);
  low = __fadd_rn(__fsub_rn(a, __fsub_rn(sum, added)), __fsub_rn(b, added));
  return sum;
}
__device__ __forceinline__ float two_product(float a, float b, float& low) {
  const float product = __fmul_rn(a, b);
  low = fmaf(a, b, -product);
  return product;
}

// x * factor / by within 1 ulp, by one Newton step from the approximate `inverse` of `by`.
__device__ __forceinline__ float divide(float x, float factor, float by, float inverse) {
  float low;
  const float product = two_product(x, factor, low), near = product * inverse, error = fmaf(-near, by, product) + low;
  return fabsf(near) < INFINITY ? fmaf(error, inverse, near) : near;
}

// tanh(x) / u for u = 2 x log2(e) and |u| < log2(e), as a polynomial in u^2 of least relative error, 2^-26.
constexpr int kTanhTerms = 5;
constexpr float kTanhTerm[kTanhTerms] = {0.346573591f, -0.0138759175f, 0.000666250184f, -3.18221755e-05f, 1.2360706e-06f};

__device__ __forceinline__ float polynomial(const float (&term)[kTanhTerms], float x) {
  float sum = term[kTanhTerms - 1];
#pragma unroll
  for (int i = kTanhTerms - 2; i >= 0; --i) sum = fmaf(sum, x, term[i]);
  return sum;
}

// tanh(x) within 3 ulp, given u = 2 x log2(e): 1 - 2 / (1 + 2^u), and the polynomial near 0, where that formula cancels.
__device__ __forceinline__ float large_tanh_of_exponent(float u) { return fmaf(-2, reciprocal(1 + exp2_flushed(u)), 1); }
__device__ __forceinline__ float tanh_of_exponent(float u) {
  constexpr float kTerm[kTanhTerms] = {kTanhTerm[0], kTanhTerm[1], kTanhTerm[2], kTanhTerm[3], kTanhTerm[4]};
  return fabsf(u) < kLog2E ? u * polynomial(kTerm, u * u) : large_tanh_of_exponent(u);
}

}  // namespace flash_online::cuda
