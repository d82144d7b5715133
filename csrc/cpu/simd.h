// Element types, conversions, vectors and exp of the CPU kernels, written so that one source vectorises for whichever
// instruction set the file is compiled for. All of it is in the namespace of that set (see kernels.h).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../core/integer.h"
#include "../core/online_softmax.h"
#include "../core/problem.h"

#ifndef FLASH_ONLINE_ISA
#error "compile once an instruction set, with FLASH_ONLINE_ISA naming it"
#endif

#define FLASH_ONLINE_INLINE inline __attribute__((always_inline))
#define FLASH_ONLINE_LAMBDA_INLINE __attribute__((always_inline))

namespace flash_online::cpu::FLASH_ONLINE_ISA {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
// Float8 types, in caches only: four bits of exponent and no infinity, or five.
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

// The type in which sums over elements of type T are kept.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

FLASH_ONLINE_INLINE float widen(float x) { return x; }
FLASH_ONLINE_INLINE double widen(double x) { return x; }
FLASH_ONLINE_INLINE float widen(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
FLASH_ONLINE_INLINE float widen(Float16 x) {
  // A multiplication by 2^112 moves the exponent and also makes subnormals normal; infinities and NaN get their exponent back.
  const uint32_t magnitude = x.bits & 0x7fffu, sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
  return std::bit_cast<float>((magnitude >= 0x7c00u ? scaled | 0x7f800000u : scaled) | sign);
}
FLASH_ONLINE_INLINE float widen(Float8E5M2 x) { return widen(Float16{static_cast<uint16_t>(x.bits << 8)}); }
FLASH_ONLINE_INLINE float widen(Float8E4M3 x) {
  // As for Float16, but only the largest magnitude is NaN.
  const uint32_t magnitude = x.bits & 0x7fu, sign = static_cast<uint32_t>(x.bits & 0x80u) << 24;
  const uint32_t scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 20) * 0x1p120f);
  return std::bit_cast<float>((magnitude == 0x7fu ? 0x7fc00000u : scaled) | sign);
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
  } else if constexpr (sizeof(T) == 1) {
    // Saturates. Numbers below the smallest normal one count in units of the last digit of `subnormal_unit`.
    constexpr bool kFourBits = std::is_same_v<T, Float8E4M3>;
    constexpr int kDropped = kFourBits ? 20 : 21, kBias = kFourBits ? 120 << 3 : 112 << 2;
    constexpr float kLargest = kFourBits ? 448.f : 57344.f, kSmallest = kFourBits ? 0x1p-6f : 0x1p-14f,
                    kSubnormalUnit = kFourBits ? 0x1p14f : 0x1p7f;
    const uint32_t all = std::bit_cast<uint32_t>(x), sign = all >> 24 & 0x80u;
    const float size = std::bit_cast<float>(all & 0x7fffffffu);
    if (size != size) return {static_cast<uint8_t>(0x7fu | sign)};
    const float kept = size > kLargest ? kLargest : size;
    const uint32_t bits = std::bit_cast<uint32_t>(kept);
    const uint32_t normal = ((bits + (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1u)) >> kDropped) - kBias;
    const uint32_t subnormal = std::bit_cast<uint32_t>(kept + kSubnormalUnit) - std::bit_cast<uint32_t>(kSubnormalUnit);
    return {static_cast<uint8_t>((kept < kSmallest ? subnormal : normal) | sign)};
  } else {
    return x;
  }
}

// One vector register of elements of type T, loaded and stored at any alignment of T.
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
using Vector = typename VectorOf<T>::type;
template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
FLASH_ONLINE_INLINE Vector<T> load_vector(const T* from) {
  return *reinterpret_cast<const typename VectorOf<T>::unaligned*>(from);
}
template <class T>
FLASH_ONLINE_INLINE void store_vector(T* to, Vector<T> x) {
  *reinterpret_cast<typename VectorOf<T>::unaligned*>(to) = x;
}
// Stores a vector at a multiple of its size, past the caches where the instruction set can. finish_streaming() comes after such
// stores, before another thread may read.
template <class T, class V>
FLASH_ONLINE_INLINE void stream_vector(T* to, V x) {
  static_assert(sizeof x == kVectorBytes);
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), reinterpret_cast<__m512i>(x));
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(x));
#elif defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<__m128i>(x));
#else
  __builtin_memcpy(to, &x, sizeof x);
#endif
}
FLASH_ONLINE_INLINE void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <class T>
FLASH_ONLINE_INLINE Vector<T> broadcast(T x) {
  return x - Vector<T>{};  // x + {} would turn -0 into 0
}

// Loads one element into all lanes. This is one instruction without arithmetic, since a float here may be the bits of a pair of
// 16-bit numbers.
template <class T>
FLASH_ONLINE_INLINE Vector<T> broadcast_from(const T* from) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return reinterpret_cast<Vector<T>>(_mm512_set1_ps(*reinterpret_cast<const float*>(from)));
  else
    return reinterpret_cast<Vector<T>>(_mm512_set1_pd(*reinterpret_cast<const double*>(from)));
#else
  return broadcast(*from);
#endif
}

// The bits of kLanes<float> elements of 16 bits.
struct Vector16BitOf {
  typedef uint16_t type __attribute__((vector_size(kVectorBytes / 2)));
  typedef uint16_t unaligned __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));
};

// load_widened and store_narrowed move one vector of the accumulator's type, from and to elements of any type; rounding is to
// nearest, ties to even.
FLASH_ONLINE_INLINE Vector<float> load_widened(const float* from) { return load_vector(from); }
FLASH_ONLINE_INLINE Vector<double> load_widened(const double* from) { return load_vector(from); }
FLASH_ONLINE_INLINE Vector<float> load_widened(const BFloat16* from) {
  // The intrinsics are here because GCC's own conversion splits the 16-bit vector in two.
#if defined(__AVX512F__)
  const __m512i bits = _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return reinterpret_cast<Vector<float>>(reinterpret_cast<Vector<uint32_t>>(bits) << 16);
#elif defined(__AVX2__)
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return reinterpret_cast<Vector<float>>(reinterpret_cast<Vector<uint32_t>>(bits) << 16);
#else
  const Vector16BitOf::type bits = *reinterpret_cast<const Vector16BitOf::unaligned*>(from);
  return reinterpret_cast<Vector<float>>(__builtin_convertvector(bits, Vector<uint32_t>) << 16);
#endif
}
FLASH_ONLINE_INLINE Vector<float> load_widened(const Float16* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector<float>>(
      _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  return reinterpret_cast<Vector<float>>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Vector<float> wide;
  for (int l = 0; l < kLanes<float>; ++l) wide[l] = widen(from[l]);
  return wide;
#endif
}
template <class T>
  requires(sizeof(T) == 1)
FLASH_ONLINE_INLINE Vector<float> load_widened(const T* from) {
  Vector<float> wide;
  for (int l = 0; l < kLanes<float>; ++l) wide[l] = widen(from[l]);
  return wide;
}
FLASH_ONLINE_INLINE void store_narrowed(float* to, Vector<float> x) { store_vector(to, x); }
FLASH_ONLINE_INLINE void store_narrowed(double* to, Vector<double> x) { store_vector(to, x); }
// Returns x rounded to bfloat16, in the upper halves of words.
FLASH_ONLINE_INLINE Vector<uint32_t> rounded_to_bfloat16(Vector<float> x) {
  const Vector<uint32_t> bits = reinterpret_cast<Vector<uint32_t>>(x);
  const Vector<uint32_t> rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (bits & 0x7fffffffu) > 0x7f800000u ? Vector<uint32_t>{} + 0x7fc00000u : rounded;
}
FLASH_ONLINE_INLINE void store_narrowed(BFloat16* to, Vector<float> x) {
#if defined(__AVX512BF16__)
  // The processor's conversion takes subnormal numbers for 0. A test for them costs row functions in the caches 2 to 11 %.
  const __m256bh half = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
  __builtin_memcpy(to, &half, sizeof half);
#else
  const Vector<uint32_t> result = rounded_to_bfloat16(x) >> 16;
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(result)));
#else
  *reinterpret_cast<Vector16BitOf::unaligned*>(to) = __builtin_convertvector(result, Vector16BitOf::type);
#endif
#endif
}
FLASH_ONLINE_INLINE void store_narrowed(Float16* to, Vector<float> x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(x), 0));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(reinterpret_cast<__m256>(x), 0));
#else
  for (int l = 0; l < kLanes<float>; ++l) to[l] = narrow<Float16>(x[l]);
#endif
}

// Reduces all lanes by f, halving the vector at each step.
template <size_t kFirst, class V, size_t... Lane>
FLASH_ONLINE_INLINE auto lanes_from(V x, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(x, x, (kFirst + Lane)...);
}
template <class V, class F>
FLASH_ONLINE_INLINE auto reduce(V x, const F& f) {
  constexpr size_t kWidth = sizeof(x) / sizeof(x[0]);
  if constexpr (kWidth == 2) {
    return f(x[0], x[1]);
  } else {
    const auto half = std::make_index_sequence<kWidth / 2>();
    return reduce(f(lanes_from<0>(x, half), lanes_from<kWidth / 2>(x, half)), f);
  }
}
template <class T>
FLASH_ONLINE_INLINE T sum_of_lanes(Vector<T> x) {
  return reduce(x, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}

// Bit i is the sign of lane i.
FLASH_ONLINE_INLINE uint32_t lane_bits(Vector<int32_t> x) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(x));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(x)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(reinterpret_cast<__m128>(x)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes<float>; ++i) bits |= static_cast<uint32_t>(x[i] < 0) << i;
  return bits;
#endif
}

// The larger of each pair of lanes, and b's lane where either is NaN. This is one instruction; GCC does not make one of ?:.
FLASH_ONLINE_INLINE Vector<float> vector_max(Vector<float> a, Vector<float> b) {
#if defined(__AVX512F__)
  // The masked intrinsics avoid a warning of GCC 12 about the undefined operand of the plain ones.
  return reinterpret_cast<Vector<float>>(_mm512_maskz_max_ps(0xffff, reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Vector<float>>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#elif defined(__SSE2__)
  return reinterpret_cast<Vector<float>>(_mm_max_ps(reinterpret_cast<__m128>(a), reinterpret_cast<__m128>(b)));
#else
  return a > b ? a : b;
#endif
}

// A base of exponentials (see online_softmax.h) with an exp for float that has no branch and no call. exp(x) = 2^n e^r with n =
// round(x log2 e), |r| <= ln 2 / 2 and e^r = 1 + r + r^2 q(r). q is a minimax polynomial of degree 4 with an error of 3e-9, so
// that only rounding is left: the result is within 1 ulp (1.2 in an instruction set without FMA), tested over all exponents.
// The scalar exp rounds results under 2^-126 as subnormals. exp(-inf) is 0 and NaN stays NaN. exp(inf) is inf for a scalar but
// NaN in a vector, where it never occurs: a score minus its maximum is never inf.
struct FastNatural {
  // Beyond these arguments a result is 0 or inf. The 0 comes from a multiplication by 0, because a result that underflows takes
  // the processor a hundred times as long.
  static constexpr float kMinArgument = -176.f, kMaxArgument = 100.f;
  static constexpr float kLogMinNormal = -87.3365447f;  // the logarithm of 2^-126
  static constexpr float kLog2e = 1.44269504f, kRoundToInteger = 12582912.f;  // 1.5 * 2^23: the last digit counts ones
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // n * kLn2High is exact

  template <class V>
  static FLASH_ONLINE_INLINE V exp_of_remainder(V r) {
    V q = 0.001381454f * r + 0.008368745f;
    q = q * r + 0.04166839f;
    q = q * r + 0.16666521f;
    q = q * r + 0.49999994f;
    q = q * r + 1.f;
    return q * r + 1.f;
  }
  static FLASH_ONLINE_INLINE float exp(float x) {
    const float clamped = x < kMinArgument   ? kMinArgument
                          : x > kMaxArgument ? kMaxArgument
                                             : x;  // NaN fails both comparisons and passes through
    const float shifted = clamped * kLog2e + kRoundToInteger, n = shifted - kRoundToInteger;
    // 2^n is applied in two factors, as n reaches from -254 to 144 and a float's exponent does not.
    const int32_t exponent = static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) - 0x4b400000u), half = exponent >> 1;
    const auto power = [](int32_t e) { return std::bit_cast<float>(static_cast<uint32_t>(e + 127) << 23); };
    return exp_of_remainder((clamped - n * kLn2High) - n * kLn2Low) * power(half) * power(exponent - half);
  }
  // In a vector, results under 2^-126 become 0: a lane with a subnormal result would cost the processor a hundred cycles, and
  // every hidden score would have one. kUpToZero: x is at most 0, or NaN, and then 2^n takes one factor, with the same bits.
  template <bool kUpToZero = false>
  static FLASH_ONLINE_INLINE Vector<float> exp(Vector<float> x) {
    const Vector<float> shifted = x * kLog2e + kRoundToInteger, n = shifted - kRoundToInteger;
    const Vector<float> scaled = exp_of_remainder((x - n * kLn2High) - n * kLn2Low);
#if defined(__AVX512F__)
    const __mmask16 normal = _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_set1_ps(kLogMinNormal), _CMP_NLT_UQ);
    return reinterpret_cast<Vector<float>>(
        _mm512_maskz_scalef_ps(normal, reinterpret_cast<__m512>(scaled), reinterpret_cast<__m512>(n)));
#else
    const auto tiny = x < kLogMinNormal;
    const Vector<int32_t> exponent = (reinterpret_cast<Vector<int32_t>>(shifted) - 0x4b400000) & ~tiny;
    const auto power = [](Vector<int32_t> e) { return reinterpret_cast<Vector<float>>((e + 127) << 23); };
    const Vector<int32_t> half = kUpToZero ? exponent : exponent >> 1;
    Vector<float> result = scaled * power(half);
    if (!kUpToZero) result *= power(exponent - half);
    return reinterpret_cast<Vector<float>>(reinterpret_cast<Vector<int32_t>>(result) & ~tiny);
#endif
  }
  static FLASH_ONLINE_INLINE double exp(double x) { return std::exp(x); }
  static FLASH_ONLINE_INLINE Vector<double> exp(Vector<double> x) {
    for (int l = 0; l < kLanes<double>; ++l) x[l] = std::exp(x[l]);
    return x;
  }
  template <class T>
  static FLASH_ONLINE_INLINE T log(T x) {
    return std::log(x);
  }
};

template <class T>
using Softmax = OnlineSoftmax<T, FastNatural>;

// A length rounded up to whole vectors of the widest instruction set, so that scratch has the same shape in every set.
constexpr int64_t padded(int64_t length) { return round_up(length, 16); }

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
