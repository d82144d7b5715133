// csrc/cuda/hw/special_functions.cuh on the host.
#pragma once

#include <cmath>
#include <limits>

namespace flash_online::cuda {

inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float exp2_flushed(float x) { return flushed(std::exp2(flushed(x))); }
inline float log2_flushed(float x) { return std::log2(flushed(x)); }
inline float reciprocal(float x) { return flushed(1 / flushed(x)); }
inline float max_or_nan(float a, float b) {
  return a != a || b != b ? std::numeric_limits<float>::quiet_NaN() : std::fmax(a, b);
}

}  // namespace flash_online::cuda
