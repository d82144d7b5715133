// What float masks of very low numbers, by which callers hide keys, make of scores.
#pragma once

#include <cfloat>
#include <cmath>

#include "../../../core/problem.h"

namespace flash_online::cuda {

// Callers hide keys by the lowest finite number of the mask's dtype. Its product with log2(e) is infinite, and yet a row that
// has nothing else must give its keys equal weights, as it does where scores are natural: so lower scores are raised to this
// one, in units of products, which `scale` turns into scores in base 2. It is a power of two: the product is exact, and the
// exponents of equal scores are 0.
inline float lowest_product(float scale) { return scale <= 1 ? -0x1p126f : -std::ldexp(1.0f, 125 - std::ilogb(scale)); }

// The least bound of a score that the mask's `value` is part of: lowest_product, but -inf beside a value of -inf.
__device__ __forceinline__ float lower_bound(float value, float lowest) { return fmaf(value, 0x1p-120f, lowest); }

// The lse of a row that sees nothing but lowest scores is that of the mask's lowest number: the scores themselves are beneath
// its last digit. All finite lse from this one down are of such rows.
constexpr float kLowestBFloat16 = -0x1.fep127f;
__host__ __device__ __forceinline__ float lowest_lse(DType mask_dtype) {
  return mask_dtype == DType::kBFloat16 ? kLowestBFloat16 : -FLT_MAX;
}

}  // namespace flash_online::cuda
