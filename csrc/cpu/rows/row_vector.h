// The vectors of the row kernels: pairs of registers read from and written to elements of any type, tails, sums, transposition.
#pragma once

#include <algorithm>
#include <utility>

#include "../simd.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

// kPair neighbouring elements of a row, in two registers of their accumulator's type. The element type decides which lane holds
// which element. Pairs of one element type correspond lane by lane, and a sum over all lanes does not depend on the order.
template <class T>
struct Pair {
  Vector<T> a, b;
};
template <class E>
constexpr int64_t kPair = 2 * kLanes<Accumulator<E>>;

// Two BFloat16 in 32 bits become two floats by a shift and an AND: a holds the elements of even index, b those of odd index.
template <class E>
constexpr bool kInterleaved = std::is_same_v<E, BFloat16>;

// The index, within its pair, of the element in a lane, where lanes are counted through both vectors; and the indices of all
// lanes.
template <class E>
constexpr int element_in_lane(int lane) {
  constexpr int kWidth = kLanes<Accumulator<E>>;
  return !kInterleaved<E> ? lane : lane < kWidth ? 2 * lane : 2 * (lane - kWidth) + 1;
}
template <class E>
FLASH_ONLINE_INLINE Pair<Accumulator<E>> lane_elements() {
  constexpr int kWidth = kLanes<Accumulator<E>>;
  Pair<Accumulator<E>> elements{};
  for (int l = 0; l < kWidth; ++l) {
    elements.a[l] = static_cast<Accumulator<E>>(element_in_lane<E>(l));
    elements.b[l] = static_cast<Accumulator<E>>(element_in_lane<E>(kWidth + l));
  }
  return elements;
}

// Converts a register of 16-bit elements to the pair of registers that holds them as floats, and back.
FLASH_ONLINE_INLINE Pair<float> decode(BFloat16, Vector<uint16_t> x) {
  const auto words = reinterpret_cast<Vector<uint32_t>>(x);
  return {reinterpret_cast<Vector<float>>(words << 16), reinterpret_cast<Vector<float>>(words & 0xffff0000u)};
}
FLASH_ONLINE_INLINE Pair<float> decode(Float16, Vector<uint16_t> x) {
#if defined(__AVX512F__)
  const __m512i bits = reinterpret_cast<__m512i>(x);
  const auto widened = [](__m256i half) FLASH_ONLINE_LAMBDA_INLINE {
    return reinterpret_cast<Vector<float>>(_mm512_maskz_cvtph_ps(0xffff, half));
  };
  return {widened(__builtin_shufflevector(bits, bits, 0, 1, 2, 3)), widened(__builtin_shufflevector(bits, bits, 4, 5, 6, 7))};
#else
  Float16 elements[kPair<Float16>];
  __builtin_memcpy(elements, &x, sizeof x);
  return {load_widened(elements), load_widened(elements + kLanes<float>)};
#endif
}
FLASH_ONLINE_INLINE Vector<uint16_t> encode(BFloat16, Pair<float> x) {
#if defined(__AVX512BF16__)
  const Vector<uint16_t> order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512bh packed = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(x.b), reinterpret_cast<__m512>(x.a));
  return reinterpret_cast<Vector<uint16_t>>(
      _mm512_maskz_permutexvar_epi16(~__mmask32{}, reinterpret_cast<__m512i>(order), reinterpret_cast<__m512i>(packed)));
#else
  return reinterpret_cast<Vector<uint16_t>>((rounded_to_bfloat16(x.a) >> 16) | (rounded_to_bfloat16(x.b) & 0xffff0000u));
#endif
}
FLASH_ONLINE_INLINE Vector<uint16_t> encode(Float16, Pair<float> x) {
#if defined(__AVX512F__)
  const auto narrowed = [](Vector<float> half) FLASH_ONLINE_LAMBDA_INLINE {
    return _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(half), 0);
  };
  return reinterpret_cast<Vector<uint16_t>>(__builtin_shufflevector(narrowed(x.a), narrowed(x.b), 0, 1, 2, 3, 4, 5, 6, 7));
#else
  Float16 elements[kPair<Float16>];
  store_narrowed(elements, x.a);
  store_narrowed(elements + kLanes<float>, x.b);
  Vector<uint16_t> bits;
  __builtin_memcpy(&bits, elements, sizeof bits);
  return bits;
#endif
}

template <class E>
FLASH_ONLINE_INLINE Pair<Accumulator<E>> load_pair(const E* from) {
  if constexpr (std::is_same_v<E, BFloat16>) {
    Vector<uint16_t> bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    return decode(E{}, bits);
  } else {
    return {load_widened(from), load_widened(from + kPair<E> / 2)};
  }
}
template <class E>
FLASH_ONLINE_INLINE void store_pair(E* to, Pair<Accumulator<E>> x) {
  if constexpr (std::is_same_v<E, BFloat16>) {
    const Vector<uint16_t> bits = encode(E{}, x);
    __builtin_memcpy(to, &bits, sizeof bits);
  } else {
    store_narrowed(to, x.a);
    store_narrowed(to + kPair<E> / 2, x.b);
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Returns a mask with all bits of the first `count` lanes set.
FLASH_ONLINE_INLINE Vector<int32_t> first_lanes(int64_t count) {
  return Vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7} < static_cast<int32_t>(count);
}
#endif

// Loads the first `count` of kPair elements of 16 bits; later elements are `fill`, and memory past the end is not touched.
template <class E>
FLASH_ONLINE_INLINE Vector<uint16_t> load_bits(const E* from, int64_t count, float fill) {
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask32>((uint64_t{1} << count) - 1);
  const __m512i filled = reinterpret_cast<__m512i>(Vector<uint16_t>{} + narrow<E>(fill).bits);
  return reinterpret_cast<Vector<uint16_t>>(_mm512_mask_loadu_epi16(filled, mask, from));
#else
  Vector<uint16_t> bits = Vector<uint16_t>{} + narrow<E>(fill).bits;
  for (int64_t i = 0; i < count; ++i) bits[i] = from[i].bits;
  return bits;
#endif
}

// load_pair and store_pair for the first `count` elements of a pair.
template <class E>
FLASH_ONLINE_INLINE Pair<Accumulator<E>> load_pair(const E* from, int64_t count, Accumulator<E> fill) {
  if constexpr (sizeof(E) == 2) {
    return decode(E{}, load_bits(from, count, fill));
  } else {
#if defined(__AVX512F__)
    const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << count) - 1);
    if constexpr (sizeof(E) == 4) {
      const auto filled = reinterpret_cast<__m512>(broadcast(fill));
      return {reinterpret_cast<Vector<float>>(_mm512_mask_loadu_ps(filled, static_cast<__mmask16>(mask), from)),
              reinterpret_cast<Vector<float>>(_mm512_mask_loadu_ps(filled, static_cast<__mmask16>(mask >> 16), from + 16))};
    } else {
      const auto filled = reinterpret_cast<__m512d>(broadcast(fill));
      return {reinterpret_cast<Vector<double>>(_mm512_mask_loadu_pd(filled, static_cast<__mmask8>(mask), from)),
              reinterpret_cast<Vector<double>>(_mm512_mask_loadu_pd(filled, static_cast<__mmask8>(mask >> 8), from + 8))};
    }
#else
#if defined(__AVX2__)
    if constexpr (sizeof(E) == 4) {
      const auto filled = broadcast(fill);
      const auto half = [&](int64_t first) FLASH_ONLINE_LAMBDA_INLINE {
        const Vector<int32_t> present = first_lanes(count - first);
        const __m256 x = _mm256_maskload_ps(from + first, reinterpret_cast<__m256i>(present));
        return present ? reinterpret_cast<Vector<float>>(x) : filled;
      };
      return {half(0), half(8)};
    }
#endif
    E buffer[kPair<E>];
    for (int64_t i = 0; i < kPair<E>; ++i) buffer[i] = i < count ? from[i] : fill;
    return load_pair(buffer);
#endif
  }
}
template <class E>
FLASH_ONLINE_INLINE void store_pair(E* to, int64_t count, Pair<Accumulator<E>> x) {
#if defined(__AVX512F__)
  const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << count) - 1);
  if constexpr (sizeof(E) == 2) {
    _mm512_mask_storeu_epi16(to, mask, reinterpret_cast<__m512i>(encode(E{}, x)));
  } else if constexpr (sizeof(E) == 4) {
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>(mask), reinterpret_cast<__m512>(x.a));
    _mm512_mask_storeu_ps(to + 16, static_cast<__mmask16>(mask >> 16), reinterpret_cast<__m512>(x.b));
  } else {
    _mm512_mask_storeu_pd(to, static_cast<__mmask8>(mask), reinterpret_cast<__m512d>(x.a));
    _mm512_mask_storeu_pd(to + 8, static_cast<__mmask8>(mask >> 8), reinterpret_cast<__m512d>(x.b));
  }
#else
#if defined(__AVX2__)
  if constexpr (sizeof(E) == 4) {
    _mm256_maskstore_ps(to, reinterpret_cast<__m256i>(first_lanes(count)), reinterpret_cast<__m256>(x.a));
    return _mm256_maskstore_ps(to + 8, reinterpret_cast<__m256i>(first_lanes(count - 8)), reinterpret_cast<__m256>(x.b));
  }
#endif
  E buffer[kPair<E>];
  store_pair(buffer, x);
  for (int64_t i = 0; i < count; ++i) to[i] = buffer[i];
#endif
}

// load_pair and store_pair for a whole pair or for its first `count` elements.
template <class E>
FLASH_ONLINE_INLINE Pair<Accumulator<E>> load_partial(const E* from, int64_t count, Accumulator<E> fill) {
  return count == kPair<E> ? load_pair(from) : load_pair(from, count, fill);
}
template <class E>
FLASH_ONLINE_INLINE void store_partial(E* to, int64_t count, Pair<Accumulator<E>> x) {
  if (count == kPair<E>)
    store_pair(to, x);
  else
    store_pair(to, count, x);
}

// Clears the lanes of the elements from `count` on.
template <class E>
FLASH_ONLINE_INLINE Pair<Accumulator<E>> first_lanes(Pair<Accumulator<E>> x, int64_t count) {
  if (count == kPair<E>) return x;
  const Pair<Accumulator<E>> lane = lane_elements<E>();
  const auto end = static_cast<Accumulator<E>>(count);
  return {lane.a < end ? x.a : Vector<Accumulator<E>>{}, lane.b < end ? x.b : Vector<Accumulator<E>>{}};
}

// Moves a pair from the lane order of From's elements to that of To's.
template <class From, class To>
FLASH_ONLINE_INLINE Pair<Accumulator<From>> relayout_lanes(Pair<Accumulator<From>> x) {
  using T = Accumulator<From>;
  if constexpr (kInterleaved<From> != kInterleaved<To>) {
    constexpr int kWidth = kLanes<T>;
    T in[2 * kWidth], out[2 * kWidth];
    store_vector(in, x.a);
    store_vector(in + kWidth, x.b);
    for (int l = 0; l < kWidth; ++l) {
      out[kInterleaved<From> ? 2 * l : l] = in[kInterleaved<From> ? l : 2 * l];
      out[kInterleaved<From> ? 2 * l + 1 : kWidth + l] = in[kInterleaved<From> ? kWidth + l : 2 * l + 1];
    }
    return {load_vector(out), load_vector(out + kWidth)};
  } else {
    return x;
  }
}

FLASH_ONLINE_INLINE Vector<double> vector_max(Vector<double> a, Vector<double> b) { return a > b ? a : b; }

// The bits of kLanes neighbouring elements of any type, which become one vector when they are widened.
template <class E>
using Bits = std::conditional_t<sizeof(E) == 2, uint16_t, std::conditional_t<sizeof(E) == 4, uint32_t, uint64_t>>;
template <class E>
struct RowBitsOf {
  typedef Bits<E> type __attribute__((vector_size(kLanes<Accumulator<E>> * sizeof(E))));
};
template <class E>
using RowBits = typename RowBitsOf<E>::type;

template <class E>
FLASH_ONLINE_INLINE RowBits<E> load_row(const E* from, int64_t count) {
  RowBits<E> row = {};
  if (count == kLanes<Accumulator<E>>) {
    __builtin_memcpy(&row, from, sizeof row);
    return row;
  }
#if defined(__AVX512F__)
  const auto mask = (uint32_t{1} << count) - 1;
  if constexpr (sizeof(E) == 2)
    return reinterpret_cast<RowBits<E>>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), from));
  else if constexpr (sizeof(E) == 4)
    return reinterpret_cast<RowBits<E>>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), from));
  else
    return reinterpret_cast<RowBits<E>>(_mm512_maskz_loadu_epi64(static_cast<__mmask8>(mask), from));
#else
  E buffer[kLanes<Accumulator<E>>] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = from[i];
  __builtin_memcpy(&row, buffer, sizeof row);
  return row;
#endif
}
template <class E>
FLASH_ONLINE_INLINE void store_row(E* to, int64_t count, RowBits<E> row) {
  if (count == kLanes<Accumulator<E>>) {
    __builtin_memcpy(to, &row, sizeof row);
    return;
  }
#if defined(__AVX512F__)
  const auto mask = (uint32_t{1} << count) - 1;
  if constexpr (sizeof(E) == 2)
    _mm256_mask_storeu_epi16(to, static_cast<__mmask16>(mask), reinterpret_cast<__m256i>(row));
  else if constexpr (sizeof(E) == 4)
    _mm512_mask_storeu_epi32(to, static_cast<__mmask16>(mask), reinterpret_cast<__m512i>(row));
  else
    _mm512_mask_storeu_epi64(to, static_cast<__mmask8>(mask), reinterpret_cast<__m512i>(row));
#else
  E buffer[kLanes<Accumulator<E>>];
  __builtin_memcpy(buffer, &row, sizeof row);
  for (int64_t i = 0; i < count; ++i) to[i] = buffer[i];
#endif
}

// In a square of blocks of kStep elements, exchanges the two blocks off the diagonal.
template <int kStep, class V, size_t... Lane>
FLASH_ONLINE_INLINE void exchange(V& a, V& b, std::index_sequence<Lane...>) {
  constexpr size_t kWidth = sizeof...(Lane);
  const V upper = __builtin_shufflevector(a, b, ((Lane & kStep) != 0 ? kWidth + Lane - kStep : Lane)...);
  b = __builtin_shufflevector(a, b, ((Lane & kStep) != 0 ? kWidth + Lane : Lane + kStep)...);
  a = upper;
}
template <int kStep, class V>
FLASH_ONLINE_INLINE void transpose_steps(V* rows) {
  constexpr int kWidth = sizeof(V) / sizeof(rows[0][0]);
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i)
    if ((i & kStep) == 0) exchange<kStep>(rows[i], rows[i + kStep], std::make_index_sequence<kWidth>());
  if constexpr (kStep > 1) transpose_steps<kStep / 2>(rows);
}

// Writes to[c * to_pitch + r] = from[r * from_pitch + c] for r < rows and c < columns, both at most kLanes.
template <class E>
__attribute__((noinline)) void transpose_tile(const E* from, int64_t from_pitch, int64_t rows, int64_t columns, E* to,
                                              int64_t to_pitch) {
  constexpr int kWidth = kLanes<Accumulator<E>>;
  RowBits<E> tile[kWidth];
#pragma GCC unroll 16
  for (int r = 0; r < kWidth; ++r) tile[r] = r < rows ? load_row(from + r * from_pitch, columns) : RowBits<E>{};
  transpose_steps<kWidth / 2>(tile);
#pragma GCC unroll 16
  for (int c = 0; c < kWidth; ++c)
    if (c < columns) store_row(to + c * to_pitch, rows, tile[c]);
}
template <class E>
FLASH_ONLINE_INLINE void transpose(const E* from, int64_t from_pitch, int64_t rows, int64_t columns, E* to, int64_t to_pitch) {
  constexpr int64_t kWidth = kLanes<Accumulator<E>>;
  for (int64_t r = 0; r < rows; r += kWidth)
    for (int64_t c = 0; c < columns; c += kWidth)
      transpose_tile(from + r * from_pitch + c, from_pitch, rows - r < kWidth ? rows - r : kWidth,
                     columns - c < kWidth ? columns - c : kWidth, to + c * to_pitch + r, to_pitch);
}

// A unit is as many elements as fill a vector register, widened: one vector, or two of 16-bit elements. A row is added up in
// four sums per lane, so that additions do not wait for one another: unit number u goes to slot u % kSlots.
template <class R>
constexpr int kParts = sizeof(R) == 2 ? 2 : 1;
template <class R>
constexpr int64_t kUnit = kParts<R> * kLanes<Accumulator<R>>;
template <class R>
constexpr int kSlots = 4 / kParts<R>;

// Sums in double, of vectors of float or of double.
struct DoubleSum {
  Vector<double> low = {}, high = {};

  FLASH_ONLINE_INLINE void add(Vector<double> x) { low += x; }
  FLASH_ONLINE_INLINE void add(Vector<float> x) {
    low += widened_half<0>(x);
    high += widened_half<1>(x);
  }
  FLASH_ONLINE_INLINE void add_product(Vector<double> x, Vector<double> y) { low += x * y; }
  FLASH_ONLINE_INLINE void add_product(Vector<float> x, Vector<float> y) {
    low += widened_half<0>(x) * widened_half<0>(y);
    high += widened_half<1>(x) * widened_half<1>(y);
  }
  // The products x (y - base).
  FLASH_ONLINE_INLINE void add_product(Vector<double> x, Vector<double> y, double base) { low += x * (y - base); }
  FLASH_ONLINE_INLINE void add_product(Vector<float> x, Vector<float> y, double base) {
    low += widened_half<0>(x) * (widened_half<0>(y) - base);
    high += widened_half<1>(x) * (widened_half<1>(y) - base);
  }
  FLASH_ONLINE_INLINE double total() const { return sum_of_lanes<double>(low + high); }
  // The sum of one lane of vectors of float.
  FLASH_ONLINE_INLINE double lane(int l) const { return l < kLanes<double> ? low[l] : high[l - kLanes<double>]; }

  template <int kHalf>
  static FLASH_ONLINE_INLINE Vector<double> widened_half(Vector<float> x) {
    const auto lanes = std::make_index_sequence<kLanes<double>>();
    return __builtin_convertvector(lanes_from<kHalf * kLanes<double>>(x, lanes), Vector<double>);
  }
};

// log(2^n m) = n log 2 + 2 atanh((m - 1) / (m + 1)) with m from sqrt(1/2) to sqrt(2), within 1e-11, for finite x >= 1.
FLASH_ONLINE_INLINE Vector<double> log_of_sum(Vector<double> x) {
  using Words = Vector<uint64_t>;
  constexpr uint64_t kRootOfHalf = 0x3fe6a09e667f3bcd, kTwoTo52 = 0x4330000000000000;  // as the bits of a double
  const Words bits = reinterpret_cast<Words>(x), n = (bits - kRootOfHalf) >> 52;
  const Vector<double> m = reinterpret_cast<Vector<double>>(bits - (n << 52)), s = (m - 1) / (m + 1), z = s * s;
  Vector<double> p = z * (2. / 13) + 2. / 11;
  p = p * z + 2. / 9;
  p = p * z + 2. / 7;
  p = p * z + 2. / 5;
  p = p * z + 2. / 3;
  p = p * z + 2.;
  return (reinterpret_cast<Vector<double>>(n | kTwoTo52) - 0x1p52) * 0.69314718055994530942 + p * s;
}

// The logarithms of rows' sums of weights. A row's logarithm has the same bits whatever the other lanes hold.
template <class T>
FLASH_ONLINE_INLINE void log_sums(Vector<T> sum, double* logs) {
  if constexpr (std::is_same_v<T, float>) {
    store_vector(logs, log_of_sum(DoubleSum::widened_half<0>(sum)));
    store_vector(logs + kLanes<double>, log_of_sum(DoubleSum::widened_half<1>(sum)));
    const auto joined = (sum >= 1.f) & (sum < std::numeric_limits<float>::infinity());
    if (reduce(joined, [](auto a, auto b) __attribute__((always_inline)) { return a & b; }) != 0) return;
    for (int l = 0; l < kLanes<T>; ++l)
      if (joined[l] == 0) logs[l] = FastNatural::log(static_cast<double>(sum[l]));
  } else {
    for (int l = 0; l < kLanes<T>; ++l) logs[l] = FastNatural::log(static_cast<double>(sum[l]));
  }
}
template <class T>
FLASH_ONLINE_INLINE Vector<T> log_sums(Vector<T> sum) {
  double logs[kLanes<T>];
  log_sums<T>(sum, logs);
  Vector<T> narrow;
  for (int l = 0; l < kLanes<T>; ++l) narrow[l] = static_cast<T>(logs[l]);
  return narrow;
}

// Returns the product x, rounded: a compiler would otherwise contract it with an addition into one operation. Where two equal
// products cancel, their difference must be 0, not the rounding error of one of them.
template <class V>
FLASH_ONLINE_INLINE V rounded_product(V x) {
#if defined(__has_builtin) && __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(x);
#else
  return x;  // clang contracts only within a single expression
#endif
}

// a - b * c, with one rounding where the instruction set can. A compiler's own contraction depends on the code around the
// expression, and the same element must have the same bits wherever it is computed.
template <class V>
FLASH_ONLINE_INLINE V minus_product(V a, V b, V c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(a[0]) == 4)
    return reinterpret_cast<V>(
        _mm512_fnmadd_ps(reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c), reinterpret_cast<__m512>(a)));
  else
    return reinterpret_cast<V>(
        _mm512_fnmadd_pd(reinterpret_cast<__m512d>(b), reinterpret_cast<__m512d>(c), reinterpret_cast<__m512d>(a)));
#elif defined(__FMA__)
  if constexpr (sizeof(a[0]) == 4)
    return reinterpret_cast<V>(
        _mm256_fnmadd_ps(reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c), reinterpret_cast<__m256>(a)));
  else
    return reinterpret_cast<V>(
        _mm256_fnmadd_pd(reinterpret_cast<__m256d>(b), reinterpret_cast<__m256d>(c), reinterpret_cast<__m256d>(a)));
#else
  return a - rounded_product(b * c);
#endif
}

// A number of twice the digits of T: a sum of two; the second is 0 where the first is infinite or NaN.
template <class T>
struct TwoParts {
  T high, low;
  explicit FLASH_ONLINE_INLINE TwoParts(double x) : high(static_cast<T>(x)), low(0) {
    const double rest = x - static_cast<double>(high);
    if (rest - rest == 0) low = static_cast<T>(rest);
  }
};

// Writes a chunk pair by pair: f(index, count) returns the pair of results from `index` on; the last pair may have fewer than
// kPair elements. f's pairs have the lane order of element type L.
template <class L, class R, class F>
FLASH_ONLINE_INLINE void write_chunk(int64_t count, R* to, const F& f) {
  int64_t i = 0;
  for (; i + kPair<L> <= count; i += kPair<L>) store_pair(to + i, relayout_lanes<L, R>(f(i, kPair<L>)));
  if (i < count) store_pair(to + i, count - i, relayout_lanes<L, R>(f(i, count - i)));
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
