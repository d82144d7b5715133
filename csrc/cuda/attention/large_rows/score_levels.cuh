// Scores far from 0. What float masks of very low numbers, by which callers hide keys, make of scores; and scores so large that
// a float has few digits left for the differences that weights are made of. docs/design/large_scores.md says why.
#pragma once

#include <cfloat>
#include <cmath>

#include "../../../core/problem.h"
#include "../../hw/math.cuh"

namespace flash_online::cuda {

// ---- the lowest score

// Callers hide keys by the lowest finite number of the mask's dtype. Its product with log2(e) is infinite, and yet a row that
// has nothing else must give its keys equal weights, as it does where scores are natural: so lower scores are raised to this
// one, in units of products, which `scale` turns into scores in base 2. It is a power of two: the product is exact, and the
// exponents of equal scores are 0.
inline float lowest_product(float scale) { return scale <= 1 ? -0x1p126f : -std::ldexp(1.0f, 125 - std::ilogb(scale)); }

// The least bound of a score that has the mask's `value` added: lowest_product, but -inf where the value is -inf.
__device__ __forceinline__ float lower_bound(float value, float lowest) { return fmaf(value, 0x1p-120f, lowest); }

// The lse of a row that sees nothing but lowest scores is that of the mask's lowest number: the scores themselves are beneath
// its last digit. All finite lse from this one down are of such rows.
constexpr float kLowestBFloat16 = -0x1.fep127f;
__host__ __device__ __forceinline__ float lowest_lse(DType mask_dtype) {
  return mask_dtype == DType::kBFloat16 ? kLowestBFloat16 : -FLT_MAX;
}

// ---- large scores

// A row's maximum, in base 2, is a product times the scale, rounded to float. Below this bound an fma subtracts it from the
// exact scores: the largest one is up to 2 off, which all weights of the row and their sum share. From here on scores are
// rounded, as the maximum is, before it is subtracted: the largest one's exponent is 0, whatever its size, and equal scores
// stay equal, where the maximum's rounding would have been the exponent.
constexpr float kLargeScore = 0x1p26f;
__device__ __forceinline__ bool is_large_score(float x) { return fabsf(x) >= kLargeScore; }  // or a maximum of nothing: -inf

// The same of compensated scores: what is left of the largest one after the maximum, in a second float, is 1 at this bound.
__device__ __forceinline__ bool is_rounding_large(float x) { return fabsf(x) >= 0x1p24f; }

// The exponent product * scale - pivot.
__device__ __forceinline__ float exponent_below(float product, float scale, float pivot) {
  return is_large_score(pivot) ? __fsub_rn(__fmul_rn(product, scale), pivot) : fmaf(product, scale, -pivot);
}

// From this lse in base 2 on, large_rows.cu computes a row's contribution to the gradients. Hopper's 16-bit backward kernels
// subtract lse in the float sums of the scores; at the lower bound a float's last digit is 2^-9. The float32 kernels keep more
// digits.
template <class Element>
constexpr double kLargeLse = sizeof(Element) == 2 ? 0x1p15 : 0x1p20;

}  // namespace flash_online::cuda
