// The exponential of many doubles at a time, within a warp.
#pragma once

#include "../../mma/fragments.cuh"

namespace flash_online::cuda::float64 {

// exp(x) = 2^(n / 32) exp(r), where n is the integer nearest to 32 x / ln 2, so that |r| is at most ln 2 / 64 (Tang, 1989).
// Each lane holds one of the 32 powers of two; exp(r) is its Taylor series up to the sixth degree. All lanes of a warp have to
// call apply() together. It takes kCount numbers through each step side by side: a step that waits for the one before also
// waits for a product of the other warp, since both use the tensor cores' unit.
class Exponential {
 public:
  __device__ __forceinline__ Exponential() : power_(::exp2(lane() / 32.0)) {}

  template <int kCount>
  __device__ __forceinline__ void apply(double (&x)[kCount]) const {
    // Added to a number, kRound leaves the nearest integer in the sum's low bits.
    constexpr double kRound = 0x1.8p52, k32OverLn2 = 0x1.71547652b82fep5, kLn2Over32 = 0x1.62e42fefa39efp-6,
                     kLn2Over32Low = 0x1.abc9e3b39803fp-61;
    constexpr double kTerms[] = {1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5};
    double n[kCount], sum[kCount];
    int high[kCount], low[kCount];
    const auto each = [](auto&& f) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) f(i);
    };
    each([&](int i) { n[i] = ::fma(x[i], k32OverLn2, kRound); });
    each([&](int i) { high[i] = __double2hiint(x[i]), low[i] = __double2loint(n[i]); });
    each([&](int i) { n[i] -= kRound; });
    each([&](int i) { x[i] = ::fma(n[i], -kLn2Over32, x[i]); });
    each([&](int i) { x[i] = ::fma(n[i], -kLn2Over32Low, x[i]); });
    each([&](int i) { sum[i] = kTerms[0]; });
#pragma unroll
    for (int term = 1; term < 5; ++term) each([&](int i) { sum[i] = ::fma(sum[i], x[i], kTerms[term]); });
    each([&](int i) { n[i] = x[i] * x[i]; });
    each([&](int i) { sum[i] = ::fma(sum[i], n[i], x[i]); });  // exp(r) - 1
    each([&](int i) {
      const double power = __shfl_sync(~0u, power_, low[i]);
      n[i] = __hiloint2double(__double2hiint(power) + ((low[i] & ~31) << 15), __double2loint(power));
    });
    each([&](int i) { x[i] = ::fma(sum[i], n[i], n[i]); });
    each([&](int i) {  // 0 below -708, infinity above 708; NaN stays
      const unsigned size = high[i] & 0x7fffffff;
      if (size > 0x40862000 && size <= 0x7ff00000) x[i] = __hiloint2double(high[i] < 0 ? 0 : 0x7ff00000, 0);
    });
  }

 private:
  double power_;  // 2^(lane / 32)
};

}  // namespace flash_online::cuda::float64
