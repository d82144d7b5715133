// float8 elements of a cache, widened without rounding.
#pragma once

#include "../../../core/problem.h"
#include "../../hw/float8.cuh"
#include "../../mma/fragments.cuh"

namespace flash_online::cuda {

constexpr bool is_float8(DType dtype) { return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2; }

// The four elements of a word, as two words of two 16-bit elements.
template <class Element>
__device__ __forceinline__ uint2 widen_float8_word(unsigned elements, __nv_fp8_interpretation_t kind) {
  const uint2 halves = widen_float8_to_halves(elements, kind);
  if constexpr (std::is_same_v<Element, __half>) {
    return halves;
  } else {
    const float2 x = __half22float2(reinterpret_cast<const __half2&>(halves.x)),
                 y = __half22float2(reinterpret_cast<const __half2&>(halves.y));
    return {Fragments<Element>::pair(x.x, x.y), Fragments<Element>::pair(y.x, y.y)};
  }
}

// Eight elements.
template <class Element>
__device__ __forceinline__ uint4 widen_float8(uint2 elements, __nv_fp8_interpretation_t kind) {
  const uint2 first = widen_float8_word<Element>(elements.x, kind), second = widen_float8_word<Element>(elements.y, kind);
  return {first.x, first.y, second.x, second.y};
}

// Calls f(kind) with a constant: each format has code of its own.
template <class F>
__device__ __forceinline__ void visit_float8(__nv_fp8_interpretation_t kind, F&& f) {
  if (kind == __NV_E4M3)
    f(__NV_E4M3);
  else
    f(__NV_E5M2);
}

// bfloat16 queries as halves, so that float8 keys, which become halves in one instruction, need not become bfloat16 in three
// more. for_each_word(f) calls f(pair of elements) for all that the lane has of a warp's queries. All are multiplied by the
// power of two that brings the largest to just below 2^16, and the function returns the factor that makes up for it in the
// products. It returns 0, and leaves the elements alone, where halves would not hold all of their digits: where an element is
// smaller than another by more than 2^32, or the largest is not in [2^-25, 2^16).
template <class ForEachWord>
__device__ __forceinline__ float bfloat16_to_halves(ForEachWord&& for_each_word) {
  // The largest magnitude, and the smallest less 1, which makes 0 the largest. 2^15 is subtracted to get signed 16-bit numbers.
  unsigned most = 0x80008000, least = 0x7fff7fff;
  for_each_word([&](unsigned& pair) {
    const unsigned magnitudes = pair | 0x80008000;
    most = __vmaxs2(most, magnitudes);
    least = __vmins2(least, magnitudes - 0x00010001);  // the halves of the word borrow nothing from each other
  });
  const auto low = [](unsigned pair) { return static_cast<int>(static_cast<int16_t>(pair & 0xffff)); };
  const auto high = [](unsigned pair) { return static_cast<int>(pair) >> 16; };
  // Their exponents, with bfloat16's bias of 127; those of NaN and infinities are 255.
  const int largest = (__reduce_max_sync(~0u, max(low(most), high(most))) + 0x8000) >> 7,
            smallest = (__reduce_min_sync(~0u, min(low(least), high(least))) + 0x8001) >> 7;
  if (smallest > 0xff) return 1;  // nothing but 0
  // A half's last digit is 2^-24, and an element's is 2^-7 of the power of its exponent.
  const int shift = 127 + 15 - largest;
  if (shift < 0 || shift > 40 || smallest + shift < 127 - 17) return 0;
  const float factor = __int_as_float((127 + shift) << 23);
  for_each_word([&](unsigned& pair) {
    pair = Fragments<__half>::pair(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xffff0000) * factor);
  });
  return __int_as_float((127 - shift) << 23);
}

}  // namespace flash_online::cuda
