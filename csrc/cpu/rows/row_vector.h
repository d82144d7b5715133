// The vectors of a row: pairs of registers read from and written to elements of any type, their tails, sums, transposition.
#pragma once

#include <utility>

#include "../simd.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

// kPair neighbouring elements of a row in two registers of their accumulator's type. Which lane holds which element is the
// element type's business: pairs of one type meet lane by lane, and what is summed over all lanes does not care.
template <class T>
struct Pair {
  Vector<T> a, b;
};
template <class E>
constexpr int64_t kPair = 2 * kLanes<Accumulator<E>>;

// Two BFloat16 in 32 bits become two floats by a shift and an AND: a holds the elements of even index, b those of odd index.
template <class E>
constexpr bool kInterleaved = std::is_same_v<E, BFloat16>;

// The index in its pair of the element that a lane holds; lanes are counted through both vectors. And of all lanes.
template <class E>
constexpr int element_in_lane(int lane) {
  constexpr int kWidth = kLanes<Accumulator<E>>;
  return !kInterleaved<E> ? lane : lane < kWidth ? 2 * lane : 2 * (lane - kWidth) + 1;
}
template <class E>
FLASH_ONLINE_INLINE Pair<Accumulator<E>> lane_numbers() {
  constexpr int kWidth = kLanes<Accumulator<E>>;
  Pair<Accumulator<E>> numbers{};
  for (int l = 0; l < kWidth; ++l) {
    numbers.a[l] = static_cast<Accumulator<E>>(element_in_lane<E>(l));
    numbers.b[l] = static_cast<Accumulator<E>>(element_in_lane<E>(kWidth + l));
  }
  return numbers;
}

// A register of 16-bit elements, and the pair that they are.
FLASH_ONLINE_INLINE Pair<float> decode(BFloat16, Vector<uint16_t> x) {
  const auto words = reinterpret_cast<Vector<uint32_t>>(x);
  return {reinterpret_cast<Vector<float>>(words << 16), reinterpret_cast<Vector<float>>(words & 0xffff0000u)};
}
FLASH_ONLINE_INLINE Pair<float> decode(Float16, Vector<uint16_t> x) {
  Float16 half[kPair<Float16>];
  __builtin_memcpy(half, &x, sizeof x);
  return {load_widened(half), load_widened(half + kLanes<float>)};
}
FLASH_ONLINE_INLINE Vector<uint16_t> encode(BFloat16, Pair<float> x) {
#if defined(__AVX512BF16__)
  const Vector<uint16_t> order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512bh packed = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(x.b), reinterpret_cast<__m512>(x.a));
  return reinterpret_cast<Vector<uint16_t>>(
      _mm512_maskz_permutexvar_epi16(~__mmask32{}, reinterpret_cast<__m512i>(order), reinterpret_cast<__m512i>(packed)));
#else
  const auto rounded = [](Vector<float> number) __attribute__((always_inline)) {  // the upper half is the result
    const auto bits = reinterpret_cast<Vector<uint32_t>>(number);
    const Vector<uint32_t> result = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (bits & 0x7fffffffu) > 0x7f800000u ? Vector<uint32_t>{} + 0x7fc00000u : result;
  };
  return reinterpret_cast<Vector<uint16_t>>((rounded(x.a) >> 16) | (rounded(x.b) & 0xffff0000u));
#endif
}
FLASH_ONLINE_INLINE Vector<uint16_t> encode(Float16, Pair<float> x) {
  Float16 half[kPair<Float16>];
  store_narrowed(half, x.a);
  store_narrowed(half + kLanes<float>, x.b);
  Vector<uint16_t> bits;
  __builtin_memcpy(&bits, half, sizeof bits);
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

// The first `count` of kPair elements of 16 bits; the others are `fill`, and memory past the end is not touched.
template <class E>
FLASH_ONLINE_INLINE Vector<uint16_t> load_bits(const E* from, int64_t count, float fill) {
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask32>((uint64_t{1} << count) - 1);
  const __m512i rest = reinterpret_cast<__m512i>(Vector<uint16_t>{} + narrow<E>(fill).bits);
  return reinterpret_cast<Vector<uint16_t>>(_mm512_mask_loadu_epi16(rest, mask, from));
#else
  Vector<uint16_t> bits = Vector<uint16_t>{} + narrow<E>(fill).bits;
  for (int64_t i = 0; i < count; ++i) bits[i] = from[i].bits;
  return bits;
#endif
}

// load_pair and store_pair of the first `count` elements of a pair, likewise.
template <class E>
FLASH_ONLINE_INLINE Pair<Accumulator<E>> load_pair(const E* from, int64_t count, Accumulator<E> fill) {
  if constexpr (sizeof(E) == 2) {
    return decode(E{}, load_bits(from, count, fill));
  } else {
#if defined(__AVX512F__)
    const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << count) - 1);
    if constexpr (sizeof(E) == 4) {
      const auto rest = reinterpret_cast<__m512>(broadcast(fill));
      return {reinterpret_cast<Vector<float>>(_mm512_mask_loadu_ps(rest, static_cast<__mmask16>(mask), from)),
              reinterpret_cast<Vector<float>>(_mm512_mask_loadu_ps(rest, static_cast<__mmask16>(mask >> 16), from + 16))};
    } else {
      const auto rest = reinterpret_cast<__m512d>(broadcast(fill));
      return {reinterpret_cast<Vector<double>>(_mm512_mask_loadu_pd(rest, static_cast<__mmask8>(mask), from)),
              reinterpret_cast<Vector<double>>(_mm512_mask_loadu_pd(rest, static_cast<__mmask8>(mask >> 8), from + 8))};
    }
#else
    E whole[kPair<E>];
    for (int64_t i = 0; i < kPair<E>; ++i) whole[i] = i < count ? from[i] : fill;
    return load_pair(whole);
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
  E whole[kPair<E>];
  store_pair(whole, x);
  for (int64_t i = 0; i < count; ++i) to[i] = whole[i];
#endif
}

// Both, of a pair or a part of it.
template <class E>
FLASH_ONLINE_INLINE Pair<Accumulator<E>> load_some(const E* from, int64_t count, Accumulator<E> fill) {
  return count == kPair<E> ? load_pair(from) : load_pair(from, count, fill);
}
template <class E>
FLASH_ONLINE_INLINE void store_some(E* to, int64_t count, Pair<Accumulator<E>> x) {
  if (count == kPair<E>)
    store_pair(to, x);
  else
    store_pair(to, count, x);
}

// A pair whose lanes of the elements from `count` on are 0.
template <class E>
FLASH_ONLINE_INLINE Pair<Accumulator<E>> first_lanes(Pair<Accumulator<E>> x, int64_t count) {
  if (count == kPair<E>) return x;
  const Pair<Accumulator<E>> lane = lane_numbers<E>();
  const auto end = static_cast<Accumulator<E>>(count);
  return {lane.a < end ? x.a : Vector<Accumulator<E>>{}, lane.b < end ? x.b : Vector<Accumulator<E>>{}};
}

// A pair in the lanes of From's elements, in those of To's.
template <class From, class To>
FLASH_ONLINE_INLINE Pair<Accumulator<From>> relay(Pair<Accumulator<From>> x) {
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

// f(f(.., ..), f(.., ..)) over all lanes, halving the vector.
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

FLASH_ONLINE_INLINE Vector<double> largest(Vector<double> a, Vector<double> b) { return a > b ? a : b; }

// kLanes neighbouring elements of any type, as bits: a vector's worth where they are widened.
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
  E whole[kLanes<Accumulator<E>>] = {};
  for (int64_t i = 0; i < count; ++i) whole[i] = from[i];
  __builtin_memcpy(&row, whole, sizeof row);
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
  E whole[kLanes<Accumulator<E>>];
  __builtin_memcpy(whole, &row, sizeof row);
  for (int64_t i = 0; i < count; ++i) to[i] = whole[i];
#endif
}

// Of a square of blocks of kStep elements, exchanges the two off the diagonal.
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

// to[c * to_pitch + r] = from[r * from_pitch + c] for r < rows and c < columns, both at most kLanes.
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

// Sums in double of vectors of either type.
struct WideSum {
  Vector<double> low = {}, high = {};

  FLASH_ONLINE_INLINE void add(Vector<double> x) { low += x; }
  FLASH_ONLINE_INLINE void add(Vector<float> x) {
    low += half<0>(x);
    high += half<1>(x);
  }
  FLASH_ONLINE_INLINE void add_product(Vector<double> x, Vector<double> y) { low += x * y; }
  FLASH_ONLINE_INLINE void add_product(Vector<float> x, Vector<float> y) {
    low += half<0>(x) * half<0>(y);
    high += half<1>(x) * half<1>(y);
  }
  FLASH_ONLINE_INLINE double total() const { return sum_of_lanes<double>(low + high); }
  // The sums of each lane of vectors of float.
  FLASH_ONLINE_INLINE Vector<float> narrowed() const {
    Vector<float> sums;
    for (int l = 0; l < kLanes<float>; ++l)
      sums[l] = static_cast<float>(l < kLanes<double> ? low[l] : high[l - kLanes<double>]);
    return sums;
  }

  template <int kHalf>
  static FLASH_ONLINE_INLINE Vector<double> half(Vector<float> x) {
    const auto lanes = std::make_index_sequence<kLanes<double>>();
    return __builtin_convertvector(lanes_from<kHalf * kLanes<double>>(x, lanes), Vector<double>);
  }
};

// The sum of g, or of g * y, whose terms may cancel: in double. Products and sums of 16-bit numbers are as good in float: a
// product is exact, and the chunks that are added up so are short.
template <bool kProduct, class E>
FLASH_ONLINE_INLINE double sum_wide(const E* g, const E* y, int64_t count) {
  using T = Accumulator<E>;
  if constexpr (sizeof(E) == 2) {
    constexpr int kPairs = 2;
    Vector<float> sum[2 * kPairs] = {};
    const auto take = [&](int p, int64_t i, int64_t n) __attribute__((always_inline)) {
      const Pair<float> a = load_some(g + i, n, 0.f);
      if constexpr (kProduct) {
        const Pair<float> b = load_some(y + i, n, 0.f);
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
    WideSum total;
    for (const auto& lanes : sum) total.add(lanes);
    return total.total();
  } else if constexpr (sizeof(E) == 4) {
    // Four terms in a row in float, whose roundings are those of a single term; what is summed far is summed in double.
    constexpr int kSums = 4, kWidth = kLanes<float>, kRow = 4;
    WideSum sum[kSums];
    const auto take = [&](int64_t i) __attribute__((always_inline)) {
      if constexpr (kProduct)
        return load_vector(g + i) * load_vector(y + i);
      else
        return load_vector(g + i);
    };
    int64_t i = 0;
    for (; i + kSums * kRow * kWidth <= count; i += kSums * kRow * kWidth)
      for (int v = 0; v < kSums; ++v) {
        const int64_t at = i + v * kRow * kWidth;
        sum[v].add((take(at) + take(at + kWidth)) + (take(at + 2 * kWidth) + take(at + 3 * kWidth)));
      }
    for (; i + kWidth <= count; i += kWidth) sum[0].add(take(i));
    if (i < count) {
      T last[2][kWidth] = {};
      std::copy(g + i, g + count, last[0]);
      if constexpr (kProduct) std::copy(y + i, y + count, last[1]);
      sum[1].add(kProduct ? load_vector(last[0]) * load_vector(last[1]) : load_vector(last[0]));
    }
    return (sum[0].total() + sum[1].total()) + (sum[2].total() + sum[3].total());
  } else {
    // Widened straight from memory, half a register at a time: shuffles would be what limits it.
    typedef T Half __attribute__((vector_size(kLanes<double> * sizeof(T)), aligned(alignof(T)), may_alias));
    constexpr int kSums = 4, kWidth = kLanes<double>;
    Vector<double> sum[kSums] = {};
    const auto wide = [](const T* from) __attribute__((always_inline)) {
      return __builtin_convertvector(*reinterpret_cast<const Half*>(from), Vector<double>);
    };
    int64_t i = 0;
    for (; i + kSums * kWidth <= count; i += kSums * kWidth)
      for (int v = 0; v < kSums; ++v) {
        const Vector<double> x = wide(g + i + v * kWidth);
        if constexpr (kProduct)
          sum[v] += x * wide(y + i + v * kWidth);
        else
          sum[v] += x;
      }
    T last[2][kSums * kWidth] = {};
    for (int64_t rest = 0; i + rest < count; ++rest) {
      last[0][rest] = g[i + rest];
      if constexpr (kProduct) last[1][rest] = y[i + rest];
    }
    if (i < count)
      for (int v = 0; v < kSums; ++v)
        sum[v] += kProduct ? wide(last[0] + v * kWidth) * wide(last[1] + v * kWidth) : wide(last[0] + v * kWidth);
    return sum_of_lanes<double>((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
}

// f(index, count, weights of the pair): what a kernel makes of a chunk, pair by pair, the last one with count < kPair. L is the
// element type whose lanes f's pairs have.
template <class L, class R, class F>
FLASH_ONLINE_INLINE void write_chunk(int64_t count, R* to, const F& f) {
  int64_t i = 0;
  for (; i + kPair<L> <= count; i += kPair<L>) store_pair(to + i, relay<L, R>(f(i, kPair<L>)));
  if (i < count) store_pair(to + i, count - i, relay<L, R>(f(i, count - i)));
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
