// float8 elements of a cache, widened without rounding.
#pragma once

#include <cuda_fp8.h>

#include "../../../core/problem.h"
#include "../../mma/fragments.cuh"

namespace flash_online::cuda {

constexpr bool is_float8(DType dtype) { return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2; }

// The two elements in the lower half of a word, as two 16-bit elements in a word.
template <class Element>
__device__ __forceinline__ unsigned widen_float8_pair(unsigned elements, __nv_fp8_interpretation_t kind) {
  const __half2 pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(elements), kind);
  if constexpr (std::is_same_v<Element, __half>) {
    return reinterpret_cast<const unsigned&>(pair);
  } else {
    const float2 x = __half22float2(pair);
    return Fragments<Element>::pair(x.x, x.y);
  }
}

// Eight elements.
template <class Element>
__device__ __forceinline__ uint4 widen_float8(uint2 elements, __nv_fp8_interpretation_t kind) {
  return {widen_float8_pair<Element>(elements.x & 0xffff, kind), widen_float8_pair<Element>(elements.x >> 16, kind),
          widen_float8_pair<Element>(elements.y & 0xffff, kind), widen_float8_pair<Element>(elements.y >> 16, kind)};
}

}  // namespace flash_online::cuda
