// Products of floats in bf16 digits, summed in two floats, so that float32's precision survives the tensor cores:
// bf16_digits.cuh.
#pragma once

#include "../hw/mma.cuh"
#include "fragments.cuh"

namespace flash_online::cuda {

// Sums of products of floats, kept apart by size. A leading part, which is not here, sums the products of the leading digits
// and is rounded each time that one is added, unless less precision is asked for; `low` sums the other products, which are so
// small that what the tensor cores cut off of their sum does not count. 16-bit elements have no low part.
template <class Element, int kRows, int kColumns>
struct CompensatedAccumulator {
  using F = Fragments<Element>;
  // True if a result stays the sum of two floats: rounding it to one float would be most of its error.
  static constexpr bool kCompensated = F::kDigits == 3;
  Accumulator<kRows, kColumns> low;

  __device__ __forceinline__ CompensatedAccumulator() {
    if constexpr (F::kDigits > 1) clear(low);
  }

  // One step of a product, for kCount columns from `column` of `low` and from `to` of `leading` on. It makes one product of
  // digits for all accumulators before the next, so that none waits for the one before. With kTransposed the result has the
  // bits that the transposed product has.
  template <bool kTransposed = false, int kCount, int kLeading>
  __device__ __forceinline__ void multiply(Accumulator<kRows, kLeading>& leading, int to, const typename F::Left (&a)[kRows],
                                           const typename F::Right (&b)[kCount], int column) {
#pragma unroll
    for (int order = F::kDigits - 1; order >= 0; --order)  // the smallest first
#pragma unroll
      for (int digit = 0; digit <= order; ++digit)
#pragma unroll
        for (int j = 0; j < kCount; ++j)
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            float (&sum)[4] = order == 0 ? leading[i][to + j] : low[i][column + j];
            const int left = kTransposed ? order - digit : digit;
            const unsigned (&words)[2] = b[j].words[order - left];
            if (order == 0 && F::kDigits == 3)
              mma_16x8x16_rounded(sum, a[i].words[left], words[0], words[1]);
            else
              mma_16x8x16<typename F::Digit>(sum, a[i].words[left], words[0], words[1]);
          }
  }
};

// Stands in for a CompensatedAccumulator where results are one float each.
struct NotCompensated {
  static constexpr bool kCompensated = false;
};

// An infinity or NaN among the operands has made the products of the leading digits what they must be, and NaN of the others.
__device__ __forceinline__ float add_if_finite(float leading, float low) {
  return fabsf(leading) < INFINITY ? leading + low : leading;
}

// Adds the low part to d, which is the whole result then.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void add_low(Accumulator<kRows, kColumns>& d,
                                        const CompensatedAccumulator<Element, kRows, kColumns>& compensation) {
  if constexpr (Fragments<Element>::kDigits > 1)
    for_each(d, [&](float& x, int i, int j, int e) { x = add_if_finite(x, compensation.low[i][j][e]); });
}

// Adds the low part if each result is one float. Compensated results stay in two floats; for infinities among them the caller
// must call clear_low_if_infinite or renormalize.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void add_low_unless_compensated(
    Accumulator<kRows, kColumns>& d, const CompensatedAccumulator<Element, kRows, kColumns>& compensation) {
  if constexpr (!CompensatedAccumulator<Element, kRows, kColumns>::kCompensated) add_low(d, compensation);
}

// Makes the low part of compensated results 0 where d is infinite or NaN.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void clear_low_if_infinite(const Accumulator<kRows, kColumns>& d,
                                                      CompensatedAccumulator<Element, kRows, kColumns>& compensation) {
  if constexpr (CompensatedAccumulator<Element, kRows, kColumns>::kCompensated)
    for_each(compensation.low, [&](float& x, int i, int j, int e) { x = fabsf(d[i][j][e]) < INFINITY ? x : 0; });
}

// Makes d of compensated results the sum of both floats rounded to float, and the low part what that rounding leaves, 0 where
// d is infinite or NaN.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ void renormalize(Accumulator<kRows, kColumns>& d,
                                            CompensatedAccumulator<Element, kRows, kColumns>& compensation) {
  if constexpr (CompensatedAccumulator<Element, kRows, kColumns>::kCompensated)
    for_each(d, [&](float& x, int i, int j, int e) {
      float& low = compensation.low[i][j][e];
      const bool finite = fabsf(x) < INFINITY;
      const float sum = x + (finite ? low : 0);
      low = finite ? low - (sum - x) : 0;
      x = sum;
    });
}

}  // namespace flash_online::cuda
