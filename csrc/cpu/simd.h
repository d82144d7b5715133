// Element types, conversions, exp and the matrix product of the CPU kernels, written so that one source vectorises for
// whichever instruction set the file is compiled for. Everything lives in that set's own namespace (see kernels.h).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "../core/online_softmax.h"
#include "../core/problem.h"

#ifndef FLASH_ONLINE_ISA
#error "compile once an instruction set, with FLASH_ONLINE_ISA naming it"
#endif

#define FLASH_ONLINE_INLINE inline __attribute__((always_inline))

namespace flash_online::cpu::FLASH_ONLINE_ISA {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// What sums over elements of type T are kept in.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

FLASH_ONLINE_INLINE float widen(float x) { return x; }
FLASH_ONLINE_INLINE double widen(double x) { return x; }
FLASH_ONLINE_INLINE float widen(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
FLASH_ONLINE_INLINE float widen(Float16 x) {
  // The exponent is moved by a product with 2^112, which also makes subnormals normal; infinities and NaN get theirs back.
  const uint32_t magnitude = x.bits & 0x7fffu, sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
  return std::bit_cast<float>((magnitude >= 0x7c00u ? scaled | 0x7f800000u : scaled) | sign);
}

// Rounds to nearest, ties to even.
template <class T>
FLASH_ONLINE_INLINE T narrow(Accumulator<T> x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
  } else if constexpr (std::is_same_v<T, Float16>) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 a Float16 counts in units of 2^-24, which is the last digit of a float in [0.5, 1).
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const uint32_t result = magnitude > 0x7f800000u ? 0x7e00u : magnitude >= 0x477ff000u ? 0x7c00u : finite;
    return {static_cast<uint16_t>(result | sign)};
  } else {
    return x;
  }
}

// A base of exponentials whose float exp has no branch and no call, so that a loop over it vectorises. exp(x) = 2^n e^r with
// n = round(x log2 e), |r| <= ln 2 / 2, e^r by its Taylor series to r^7: within 1 ulp, tested over all exponents. Results
// under 2^-126 are rounded as subnormals; exp(-inf) = 0, exp(inf) = inf, NaN stays.
struct FastNatural {
  static FLASH_ONLINE_INLINE float exp(float x) {
    const float clamped = x < -110.f ? -110.f : x > 100.f ? 100.f : x;  // NaN fails both and passes through
    const float shifted = clamped * 1.44269504f + 12582912.f;           // 1.5 * 2^23: the last digit counts ones
    const float n = shifted - 12582912.f;
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts; n * the first is exact
    float series = 1.f / 5040;
    series = series * r + 1.f / 720;
    series = series * r + 1.f / 120;
    series = series * r + 1.f / 24;
    series = series * r + 1.f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.f;
    series = series * r + 1.f;
    // 2^n in two factors, as n reaches from -159 to 144 and a float's exponent does not.
    const int32_t exponent = static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) - 0x4b400000u), half = exponent >> 1;
    const auto power = [](int32_t e) { return std::bit_cast<float>(static_cast<uint32_t>(e + 127) << 23); };
    return series * power(half) * power(exponent - half);
  }
  static FLASH_ONLINE_INLINE double exp(double x) { return std::exp(x); }
  template <class T>
  static FLASH_ONLINE_INLINE T log(T x) {
    return std::log(x);
  }
};

template <class T>
using Softmax = OnlineSoftmax<T, FastNatural>;

// One vector register's worth of T, loaded and stored at any alignment of T.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef T unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
};
template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

// A length rounded up to whole vectors of the widest set, so that scratch has the same shape in every set.
constexpr int64_t padded(int64_t length) { return (length + 15) / 16 * 16; }

// c[Rows, Vectors * lanes] += a[Rows, depth] b[depth, Vectors * lanes], summed in registers. The sum starts at 0 and meets c
// once, at its end: a long row of products added to c one by one would lose digits with every tile.
template <int Rows, int Vectors, class T>
FLASH_ONLINE_INLINE void multiply_tile(int64_t depth, const T* a, int64_t a_row, int64_t a_column, const T* b, int64_t b_row,
                                       T* c, int64_t c_row) {
  using Vector = typename VectorOf<T>::type;
  using Unaligned = typename VectorOf<T>::unaligned;
  Vector sum[Rows][Vectors];
  for (int i = 0; i < Rows; ++i)
    for (int v = 0; v < Vectors; ++v) sum[i][v] = Vector{};
  for (int64_t k = 0; k < depth; ++k) {
    Vector row[Vectors];
    for (int v = 0; v < Vectors; ++v) row[v] = *reinterpret_cast<const Unaligned*>(b + k * b_row + v * kLanes<T>);
    for (int i = 0; i < Rows; ++i)
      for (int v = 0; v < Vectors; ++v) sum[i][v] += a[i * a_row + k * a_column] * row[v];
  }
  for (int i = 0; i < Rows; ++i)
    for (int v = 0; v < Vectors; ++v) *reinterpret_cast<Unaligned*>(c + i * c_row + v * kLanes<T>) += sum[i][v];
}

template <int Vectors, class T>
FLASH_ONLINE_INLINE void multiply_columns(int64_t rows, int64_t depth, const T* a, int64_t a_row, int64_t a_column, const T* b,
                                          int64_t b_row, T* c, int64_t c_row) {
  constexpr int kRows = 6;  // with the widest Vectors below, 12 (16 registers) or 24 (32 registers) hold sums
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows)
    multiply_tile<kRows, Vectors>(depth, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row);
  for (; i < rows; ++i) multiply_tile<1, Vectors>(depth, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row);
}

// c[rows, columns] += a[rows, depth] b[depth, columns]; a has any strides, b and c have contiguous rows; columns is padded().
template <class T>
__attribute__((noinline)) void multiply(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t a_row,
                                        int64_t a_column, const T* b, int64_t b_row, T* c, int64_t c_row) {
  constexpr int kWide = kVectorBytes == 64 ? 4 : 2;
  int64_t j = 0;
  for (; j + kWide * kLanes<T> <= columns; j += kWide * kLanes<T>)
    multiply_columns<kWide>(rows, depth, a, a_row, a_column, b + j, b_row, c + j, c_row);
  for (; j < columns; j += kLanes<T>) multiply_columns<1>(rows, depth, a, a_row, a_column, b + j, b_row, c + j, c_row);
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
