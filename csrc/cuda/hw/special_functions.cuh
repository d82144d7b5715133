// Special functions of floats that are one instruction each.
#pragma once

namespace flash_online::cuda {

// 2^x within 2 ulp; results below 2^-126 are flushed to 0. One instruction, where exp2f adds three for denormal results.
__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x) within 2^-22, near 1 absolutely, elsewhere of the result; denormal numbers are taken for 0. One instruction.
__device__ __forceinline__ float log2_flushed(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x within 1 ulp; denormal numbers are flushed to 0. One instruction.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger one; NaN if either is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

}  // namespace flash_online::cuda
