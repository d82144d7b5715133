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
  Float16 elements[kPair<Float16>];
  __builtin_memcpy(elements, &x, sizeof x);
  return {load_widened(elements), load_widened(elements + kLanes<float>)};
}
FLASH_ONLINE_INLINE Vector<uint16_t> encode(BFloat16, Pair<float> x) {
#if defined(__AVX512BF16__)
  const Vector<uint16_t> order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512bh packed = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(x.b), reinterpret_cast<__m512>(x.a));
  return reinterpret_cast<Vector<uint16_t>>(
      _mm512_maskz_permutexvar_epi16(~__mmask32{}, reinterpret_cast<__m512i>(order), reinterpret_cast<__m512i>(packed)));
#else
  const auto rounded = [](Vector<float> number) __attribute__((always_inline)) {  // the result is the upper half
    const auto bits = reinterpret_cast<Vector<uint32_t>>(number);
    const Vector<uint32_t> result = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (bits & 0x7fffffffu) > 0x7f800000u ? Vector<uint32_t>{} + 0x7fc00000u : result;
  };
  return reinterpret_cast<Vector<uint16_t>>((rounded(x.a) >> 16) | (rounded(x.b) & 0xffff0000u));
#endif
}
FLASH_ONLINE_INLINE Vector<uint16_t> encode(Float16, Pair<float> x) {
  Float16 elements[kPair<Float16>];
  store_narrowed(elements, x.a);
  store_narrowed(elements + kLanes<float>, x.b);
  Vector<uint16_t> bits;
  __builtin_memcpy(&bits, elements, sizeof bits);
  return bits;
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

// Loads the first `count` of kPair elements of 16 bits; the others are `fill`, and memory past the end is not touched.
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
  FLASH_ONLINE_INLINE double total() const { return sum_of_lanes<double>(low + high); }
  // The sum of one lane of vectors of float.
  FLASH_ONLINE_INLINE double lane(int l) const { return l < kLanes<double> ? low[l] : high[l - kLanes<double>]; }

  template <int kHalf>
  static FLASH_ONLINE_INLINE Vector<double> widened_half(Vector<float> x) {
    const auto lanes = std::make_index_sequence<kLanes<double>>();
    return __builtin_convertvector(lanes_from<kHalf * kLanes<double>>(x, lanes), Vector<double>);
  }
};

// The value x, which a compiler would otherwise not have rounded where it contracts x, a product, with an addition to one
// operation. Where two equal products cancel, their difference is to be 0 and not what the rounding of one of them dropped.
template <class V>
FLASH_ONLINE_INLINE V rounded_product(V x) {
#if defined(__has_builtin) && __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(x);
#else
  return x;  // clang contracts within a single expression alone
#endif
}

// The sum of g, or of g * y, in double, as the terms may cancel. For 16-bit elements float does as well: a product is exact,
// and a chunk is short.
template <bool kProduct, class E>
FLASH_ONLINE_INLINE double sum_in_double(const E* g, const E* y, int64_t count) {
  using T = Accumulator<E>;
  if constexpr (sizeof(E) == 2) {
    constexpr int kPairs = 2;
    Vector<float> sum[2 * kPairs] = {};
    const auto take = [&](int p, int64_t i, int64_t n) __attribute__((always_inline)) {
      const Pair<float> a = load_partial(g + i, n, 0.f);
      if constexpr (kProduct) {
        const Pair<float> b = load_partial(y + i, n, 0.f);
        sum[2 * p] += a.a * b.a;
        sum[2 * p + 1] += a.b * b.b;
      } else {
        sum[2 * p] += a.a;
        sum[2 * p + 1] += a.b;
      }
    };
    int64_t i = 0;
    for (; i + kPairs * kPair<E> <= count; i += kPairs * kPair<E>)
      for (int p = 0; p < kPairs; ++p) take(p, i + p * kPair<E>, kPair<E>);
    for (; i + kPair<E> <= count; i += kPair<E>) take(0, i, kPair<E>);
    if (i < count) take(1, i, count - i);
    DoubleSum total;
    for (const auto& lanes : sum) total.add(lanes);
    return total.total();
  } else if constexpr (sizeof(E) == 4) {
    static_assert(!kProduct, "weighted_mean has more digits");
    // Four terms are added in float, with roundings as small as those of a single term; the sums of four are added in double.
    constexpr int kSums = 4, kWidth = kLanes<float>, kRow = 4;
    DoubleSum sum[kSums];
    int64_t i = 0;
    for (; i + kSums * kRow * kWidth <= count; i += kSums * kRow * kWidth)
      for (int v = 0; v < kSums; ++v) {
        const E* const at = g + i + v * kRow * kWidth;
        sum[v].add((load_vector(at) + load_vector(at + kWidth)) +
                   (load_vector(at + 2 * kWidth) + load_vector(at + 3 * kWidth)));
      }
    for (; i + kWidth <= count; i += kWidth) sum[0].add(load_vector(g + i));
    if (i < count) {
      T last[kWidth] = {};
      std::copy(g + i, g + count, last);
      sum[1].add(load_vector(last));
    }
    return (sum[0].total() + sum[1].total()) + (sum[2].total() + sum[3].total());
  } else {
    constexpr int kSums = 4, kWidth = kLanes<double>;
    Vector<double> sum[kSums] = {};
    int64_t i = 0;
    for (; i + kSums * kWidth <= count; i += kSums * kWidth)
      for (int v = 0; v < kSums; ++v) {
        const Vector<double> x = load_vector(g + i + v * kWidth);
        if constexpr (kProduct)
          sum[v] += x * load_vector(y + i + v * kWidth);
        else
          sum[v] += x;
      }
    T last[2][kSums * kWidth] = {};
    for (int64_t tail = 0; i + tail < count; ++tail) {
      last[0][tail] = g[i + tail];
      if constexpr (kProduct) last[1][tail] = y[i + tail];
    }
    if (i < count)
      for (int v = 0; v < kSums; ++v)
        sum[v] += kProduct ? load_vector(last[0] + v * kWidth) * load_vector(last[1] + v * kWidth)
                           : load_vector(last[0] + v * kWidth);
    return sum_of_lanes<double>((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
}

// The mean of values by weights that are not negative: sum(weight * value) / sum(weight). What is wanted is its difference from
// a value that it may be close to, so it is kept as a float near it and the values' deviation from that: `pivot` + `deviation`
// / `weight`. Sums of float then have digits enough, since neither sum is much larger than what is wanted of it.
struct WeightedMean {
  double pivot = 0, deviation = 0, weight = 0;

  FLASH_ONLINE_INLINE void merge(const WeightedMean& other) {
    const bool moves = other.weight > weight;  // so that only the smaller weight's deviation is measured anew
    deviation += other.deviation + (moves ? (pivot - other.pivot) * weight : (other.pivot - pivot) * other.weight);
    if (moves) pivot = other.pivot;
    weight += other.weight;
  }
  FLASH_ONLINE_INLINE double value() const { return pivot + (weight == 0 ? deviation : deviation / weight); }
};

// The part of at most kChunk floats. An infinite or NaN sum has no pivot, and is the deviation from 0.
FLASH_ONLINE_INLINE WeightedMean weighted_mean(const float* value, const float* weight, int64_t count) {
  constexpr int kSums = 4, kWidth = kLanes<float>;
  using Sums = Vector<float>[kSums];
  // Calls f(v, value, weight) for all vectors, with zeros behind the end, and sum number v in turn.
  const auto for_each_vector = [&](const auto& f) __attribute__((always_inline)) {
    int64_t i = 0;
    for (; i + kSums * kWidth <= count; i += kSums * kWidth)
      for (int v = 0; v < kSums; ++v) f(v, load_vector(value + i + v * kWidth), load_vector(weight + i + v * kWidth));
    for (; i + kWidth <= count; i += kWidth) f(0, load_vector(value + i), load_vector(weight + i));
    if (i < count) {
      float last[2][kWidth] = {};
      std::copy(value + i, value + count, last[0]);
      std::copy(weight + i, weight + count, last[1]);
      f(1, load_vector(last[0]), load_vector(last[1]));
    }
  };
  const auto total = [](const Sums& sums) { return sum_of_lanes<float>((sums[0] + sums[1]) + (sums[2] + sums[3])); };
  Sums products = {}, weights = {}, deviations = {};
  for_each_vector([&](int v, Vector<float> x, Vector<float> by) __attribute__((always_inline)) {
    products[v] += x * by;
    weights[v] += by;
  });
  const float product = total(products), sum = total(weights);
  if (product - product != 0) return {0, product, sum};
  const float pivot = sum == 0 ? 0 : product / sum;
  for_each_vector([&, center = broadcast(pivot)](int v, Vector<float> x, Vector<float> by)
                      __attribute__((always_inline)) { deviations[v] += (x - center) * by; });
  return {pivot, total(deviations), sum};
}

// A number of twice the digits of T: a sum of two, of which the second is 0 where the first is infinite or NaN.
template <class T>
struct TwoParts {
  T high, low;
  explicit FLASH_ONLINE_INLINE TwoParts(double x) : high(static_cast<T>(x)), low(0) {
    const double rest = x - static_cast<double>(high);
    if (rest - rest == 0) low = static_cast<T>(rest);
  }
};

// Writes a chunk pair by pair: f(index, count) returns the pair of results from `index` on; the last pair may have fewer
// than kPair elements. L is the element type whose lane order f's pairs have.
template <class L, class R, class F>
FLASH_ONLINE_INLINE void write_chunk(int64_t count, R* to, const F& f) {
  int64_t i = 0;
  for (; i + kPair<L> <= count; i += kPair<L>) store_pair(to + i, relayout_lanes<L, R>(f(i, kPair<L>)));
  if (i < count) store_pair(to + i, count - i, relayout_lanes<L, R>(f(i, count - i)));
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
