// Special functions as the hardware has them.
#pragma once

namespace flash_online::cuda {

constexpr float kLog2E = 1.44269504f;

// 2^x within 2 ulp, with results below 2^-126 flushed to 0: one instruction, where exp2f adds three for the denormal ones.
__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x within 1 ulp, flushing denormal numbers: one instruction.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x) within 3 ulp, of u = 2 x log2(e): 1 - 2 / (1 + 2^u), and near 0, where that has lost its digits, u times a polynomial
// in u^2 (least relative error, 2^-26).
__device__ __forceinline__ float tanh_of_exponent(float u) {
  const float square = u * u;
  float factor = fmaf(1.2360706e-06f, square, -3.18221755e-05f);
  factor = fmaf(factor, square, 0.000666250184f);
  factor = fmaf(factor, square, -0.0138759175f);
  factor = fmaf(factor, square, 0.346573591f);
  return fabsf(u) < kLog2E ? u * factor : fmaf(-2, reciprocal(1 + exp2_flushed(u)), 1);
}

}  // namespace flash_online::cuda
