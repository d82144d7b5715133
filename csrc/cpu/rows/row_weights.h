// The softmax weights of a chunk of a row: the chunk's maximum, exp(score - max) as accurately as its use requires, and their
// sum.
#pragma once

#include <limits>

#include "row_vector.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

// The largest of `count` elements, ignoring NaN; -inf if there is none.
template <class E>
FLASH_ONLINE_INLINE Accumulator<E> max_of_floats(const E* x, int64_t count) {
  using T = Accumulator<E>;
  constexpr int kPairs = 2;
  Vector<T> max[2 * kPairs];
  for (auto& lanes : max) lanes = lowest<Vector<T>>();
  const auto take = [&](int p, Pair<T> pair) __attribute__((always_inline)) {
    max[2 * p] = vector_max(pair.a, max[2 * p]);
    max[2 * p + 1] = vector_max(pair.b, max[2 * p + 1]);
  };
  int64_t i = 0;
  for (; i + kPairs * kPair<E> <= count; i += kPairs * kPair<E>)
    for (int p = 0; p < kPairs; ++p) take(p, load_pair(x + i + p * kPair<E>));
  for (; i + kPair<E> <= count; i += kPair<E>) take(0, load_pair(x + i));
  if (i < count) take(1, load_pair(x + i, count - i, lowest<T>()));
  return reduce(vector_max(vector_max(max[0], max[1]), vector_max(max[2], max[3])),
                [](auto a, auto b) __attribute__((always_inline)) { return b > a ? b : a; });
}

// max_of_floats, with a shortcut for 16-bit elements: positive ones are ordered as integers are, and the largest of a chunk is
// mostly positive.
template <class E>
FLASH_ONLINE_INLINE Accumulator<E> max_of(const E* x, int64_t count) {
  if constexpr (sizeof(E) == 2) {
    using Bits = Vector<int16_t>;
    constexpr int kVectors = 4;
    Bits max[kVectors];
    for (auto& lanes : max) lanes = Bits{} + std::numeric_limits<int16_t>::min();
    const auto take = [&](int v, Bits bits) __attribute__((always_inline)) { max[v] = bits > max[v] ? bits : max[v]; };
    const auto load = [](const E* from) __attribute__((always_inline)) {
      Bits bits;
      __builtin_memcpy(&bits, from, sizeof bits);
      return bits;
    };
    int64_t i = 0;
    for (; i + kVectors * kPair<E> <= count; i += kVectors * kPair<E>)
      for (int v = 0; v < kVectors; ++v) take(v, load(x + i + v * kPair<E>));
    for (; i + kPair<E> <= count; i += kPair<E>) take(0, load(x + i));
    if (i < count) take(1, reinterpret_cast<Bits>(load_bits(x + i, count - i, lowest<float>())));
    for (int v = 1; v < kVectors; ++v) take(0, max[v]);
    const int16_t largest = reduce(max[0], [](auto a, auto b) __attribute__((always_inline)) { return b > a ? b : a; });
    const uint16_t bits = static_cast<uint16_t>(largest);
    if (bits < narrow<E>(-lowest<float>()).bits) return widen(E{bits});  // 0 or more, and neither infinity nor NaN
  }
  return max_of_floats(x, count);
}

// The accuracy of weights. kExact: within 1 ulp of exp(score - max), or 1.2 without FMA. kSum: the smaller a weight, the larger
// its relative error, by as much as the rounding of the difference causes. kRounded: within 3e-6 of kSum, for results that are
// rounded to 16 bits. In all of them the largest weight is exactly 1: if all other weights of a row vanish, its probability is
// 1, and a gradient that cancels there is 0.
enum class ExpAccuracy { kExact, kSum, kRounded };

#if defined(__AVX512F__)
// 2^x = 2^floor(x) 2^f, by instructions that extract f and scale by 2^floor(x), for any x: 0 at -inf, inf at inf, NaN at NaN.
// 2^f is a minimax polynomial on [0, 1) among those that are exactly 1 at 0. Its error is 2e-9 for degree 6, 8e-8 for degree 5
// and 3e-6 for degree 4.
template <int kDegree>
FLASH_ONLINE_INLINE Vector<float> power_of_2(Vector<float> x) {
  constexpr int kFloor = 9;
  const auto f = reinterpret_cast<Vector<float>>(_mm512_maskz_reduce_ps(0xffff, reinterpret_cast<__m512>(x), kFloor));
  Vector<float> p;
  if constexpr (kDegree == 6) {
    p = 0.000216129149f * f + 0.0012467847f;
    p = p * f + 0.00967545155f;
    p = p * f + 0.0554852821f;
    p = p * f + 0.240229309f;
    p = p * f + 0.693147063f;
    p = p * f + 1.f;
  } else if constexpr (kDegree == 5) {
    p = 0.00186713005f * f + 0.00901703071f;
    p = p * f + 0.0557999127f;
    p = p * f + 0.240164444f;
    p = p * f + 0.693151295f;
    p = p * f + 1.f;
  } else {
    static_assert(kDegree == 4);
    p = 0.0134266848f * f + 0.0522424728f;
    p = p * f + 0.241280198f;
    p = p * f + 0.693044841f;
    p = p * f + 1.f;
  }
  return reinterpret_cast<Vector<float>>(
      _mm512_maskz_scalef_ps(0xffff, reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(x)));
}

template <int kDegree>
struct ApproximateNatural {
  static FLASH_ONLINE_INLINE Vector<float> exp(Vector<float> x) { return power_of_2<kDegree>(x * FastNatural::kLog2e); }
};
#else
// For numbers that are at most 0, or NaN: without AVX-512, 2^n is made of its bits and takes one factor.
struct NaturalUpToZero : FastNatural {
  using FastNatural::exp;
  static FLASH_ONLINE_INLINE Vector<float> exp(Vector<float> x) { return FastNatural::exp<true>(x); }
};
#endif

// The base of exponentials for scores of type E with accumulator T, and an accuracy.
template <class T, class E, ExpAccuracy accuracy>
struct BaseForAccuracy {
  using type = FastNatural;
};
#if defined(__AVX512F__)
template <class E>
struct BaseForAccuracy<float, E, ExpAccuracy::kSum> {
  using type = ApproximateNatural<sizeof(E) == 2 ? 5 : 6>;
};
template <class E>
struct BaseForAccuracy<float, E, ExpAccuracy::kRounded> {
  using type = ApproximateNatural<4>;
};
#else
template <class E, ExpAccuracy accuracy>
struct BaseForAccuracy<float, E, accuracy> {
  using type = NaturalUpToZero;  // a score less its chunk's maximum
};
#endif
template <class T, class E, ExpAccuracy accuracy>
using BaseFor = typename BaseForAccuracy<T, E, accuracy>::type;

// exp for a result that is rounded to type R.
template <class R, class V>
FLASH_ONLINE_INLINE V exp_rounded_to(V x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(R) == 2) return ApproximateNatural<4>::exp(x);
#endif
  return FastNatural::exp(x);
}

// Computes the weights exp(score - max) of a chunk of scores with maximum `max`. The difference is taken in natural units,
// before it is scaled for a base of 2: it is 0 for the largest score, whatever its value.
template <class T, class Base>
struct ScoreExp {
  OnlineSoftmax<Vector<T>, Base> state;
  T max;
  explicit FLASH_ONLINE_INLINE ScoreExp(T chunk_max) : state{.max = broadcast(chunk_max)}, max(chunk_max) {}
  FLASH_ONLINE_INLINE Vector<T> operator()(Vector<T> score) const { return state.weight(score); }
};

// Calls body(score_exp) with the ScoreExp of a chunk of scores.
template <ExpAccuracy accuracy, class E, class Body>
FLASH_ONLINE_INLINE void with_score_exp(const E* x, int64_t count, const Body& body) {
  using T = Accumulator<E>;
  const T max = max_of(x, count);
  body(ScoreExp<T, BaseFor<T, E, accuracy>>(max));
}

// The memory to which results will be written, `size` bytes per element that is read; null if prefetching is not worth it.
struct PrefetchTarget {
  char* data = nullptr;
  int64_t size = 0;
  // Makes the pages of new memory exist: a prefetch from a page that does not exist is slow and has no effect.
  FLASH_ONLINE_INLINE void touch(int64_t count) const {
    constexpr int64_t kPage = 4096;
    if (data == nullptr) return;
    for (int64_t offset = 0; offset < count * size; offset += kPage) *static_cast<volatile char*>(data + offset) = 0;
  }
  FLASH_ONLINE_INLINE void prefetch(int64_t index, int64_t count) const {
    if (data == nullptr) return;
    for (int64_t line = 0; line < count * size; line += 64) __builtin_prefetch(data + index * size + line, 1, 2);
  }
};

// Returns the sum of a chunk's weights and, if kKeep is set, stores them in `keep` as pairs. Meanwhile it prefetches the memory
// of the chunk's result, as the pass that writes the result would do little else than wait for it.
template <bool kKeep, class E, class W>
FLASH_ONLINE_INLINE Accumulator<E> exp_scores(const E* x, int64_t count, const W& weight, Accumulator<E>* keep,
                                              PrefetchTarget prefetch_target) {
  using T = Accumulator<E>;
  constexpr int kPairs = kLanes<T> >= 8 ? 2 : 4;  // many sums of few terms each lose no digit
  Vector<T> sum[2 * kPairs] = {};
  const auto take = [&](int p, int64_t i, Pair<T> pair) __attribute__((always_inline)) {
    pair.a = weight(pair.a);
    pair.b = weight(pair.b);
    if (kKeep) store_pair(keep + i, pair);
    sum[2 * p] += pair.a;
    sum[2 * p + 1] += pair.b;
  };
  prefetch_target.touch(count);
  int64_t i = 0;
  for (; i + kPairs * kPair<E> <= count; i += kPairs * kPair<E>) {
    prefetch_target.prefetch(i, kPairs * kPair<E>);
    for (int p = 0; p < kPairs; ++p) take(p, i + p * kPair<E>, load_pair(x + i + p * kPair<E>));
  }
  for (; i + kPair<E> <= count; i += kPair<E>) take(0, i, load_pair(x + i));
  if (i < count) {
    const Pair<T> last = load_pair(x + i, count - i, lowest<T>());
    if (kPairs == 2 && i / kPair<E> % 2 == 0)
      take(0, i, last);  // where a whole pair would be added, as in sum_of_classes
    else
      take(1, i, last);
  }
  for (int width = kPairs; width > 0; width /= 2)
    for (int v = 0; v < width; ++v) sum[v] += sum[v + width];
  return sum_of_lanes<T>(sum[0]);
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
