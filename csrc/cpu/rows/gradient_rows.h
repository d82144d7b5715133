// The gradient of a softmax or log-softmax, row by row where the classes of a row are contiguous: sums over a row, and the row
// of gradients. A chunk of a row has the same bits whichever of these functions computes it: which lane a class is added to,
// and the order in which lanes are added, follow from its index in the chunk and from the chunk's length.
#pragma once

#include "row_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

// The grad and the output of a row, or of a chunk of it, read unit by unit. A unit of one vector is `a` of a pair. kLoose: the
// last unit is read and written whole, since later elements of the same tensors follow, and are written afterwards. Without
// AVX-512 an exact end can take longer than the row.
template <class R, bool kLoose = false>
struct GradientRow {
  using T = Accumulator<R>;
  using UnitBits = Vector<Bits<R>>;
  const R *grad, *output;
  int64_t count;
  UnitBits end;  // mask of the last unit's elements that belong to the row

  FLASH_ONLINE_INLINE GradientRow(const R* grad, const R* output, int64_t count) : grad(grad), output(output), count(count) {
    UnitBits index;
    for (int i = 0; i < kUnit<R>; ++i) index[i] = static_cast<Bits<R>>(i);
    end = reinterpret_cast<UnitBits>(index < UnitBits{} + static_cast<Bits<R>>(count_in_last_unit()));
  }
  FLASH_ONLINE_INLINE GradientRow<R> part(int64_t first, int64_t n) const { return {grad + first, output + first, n}; }
  FLASH_ONLINE_INLINE int64_t count_in_last_unit() const { return (count - 1) % kUnit<R> + 1; }
  // Loads the unit at `from`. If it is cut by the row's end, elements after the end are 0.
  template <bool kCut>
  FLASH_ONLINE_INLINE Pair<T> load(const R* from, std::bool_constant<kCut>) const {
    if constexpr (kCut && !kLoose) return load_pair(from, count_in_last_unit(), T(0));
    UnitBits bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    if (kCut) bits &= end;
    if constexpr (kParts<R> == 2)
      return decode(R{}, bits);
    else
      return {reinterpret_cast<Vector<T>>(bits), Vector<T>{}};
  }
};

// Calls f(slot, i, cut) for all units of `count` elements: the slot of the unit at i, and whether the end cuts the unit.
template <class R, class F>
FLASH_ONLINE_INLINE void for_each_unit(int64_t count, const F& f) {
  int64_t i = 0;
  for (; i + kSlots<R> * kUnit<R> <= count; i += kSlots<R> * kUnit<R>)
    for (int s = 0; s < kSlots<R>; ++s) f(s, i + s * kUnit<R>, std::false_type{});
#pragma GCC unroll 4
  for (int s = 0; s < kSlots<R> && i < count; ++s, i += kUnit<R>)
    i + kUnit<R> <= count ? f(s, i, std::false_type{}) : f(s, i, std::true_type{});
}

// The sums of term(grad, output) over a row, lane by lane.
template <class V>
struct SlotSums {
  V slot[4] = {};
  FLASH_ONLINE_INLINE V total() const { return (slot[0] + slot[1]) + (slot[2] + slot[3]); }
};
template <class R, bool kLoose, class Term, class V = Vector<Accumulator<R>>>
FLASH_ONLINE_INLINE auto sum_terms(const GradientRow<R, kLoose>& row, const Term& term) {
  SlotSums<decltype(term(V{}, V{}))> sums;
  for_each_unit<R>(row.count, [&](int s, int64_t i, auto cut) FLASH_ONLINE_LAMBDA_INLINE {
    const Pair<Accumulator<R>> g = row.load(row.grad + i, cut), y = row.load(row.output + i, cut);
    auto* const slot = sums.slot + s * kParts<R>;
    slot[0] = slot[0] + term(g.a, y.a);
    if constexpr (kParts<R> == 2) slot[1] = slot[1] + term(g.b, y.b);
  });
  return sums;
}

// Softmax: with s = sum(grad * y), grad_input = (grad - s) y. Log-softmax: with s = sum(grad), grad_input = grad - s exp(y).
// Where y is rounded to float32, s is the mean of grad by the weights y: grad - s keeps its digits where one y is nearly 1.
template <class R, bool kLog>
constexpr bool kTakesMean = !kLog && std::is_same_v<R, float>;
template <bool kLog>
constexpr auto kSummand = [](auto g, auto y) FLASH_ONLINE_LAMBDA_INLINE { return kLog ? g : g * y; };
constexpr auto kWeight = [](auto, auto y) FLASH_ONLINE_LAMBDA_INLINE { return y; };
// The type of sums: the terms may cancel, but for 16-bit elements float does: products are exact, and a chunk is short.
template <class R, bool kLog>
using SumOf = std::conditional_t<sizeof(R) == 2 || kTakesMean<R, kLog>, float, double>;

// The number that the writing pass subtracts from a row's grad, as a sum of two; for log-softmax, the factor of exp(y).
template <class T>
struct Subtrahend {
  T high = {}, low = {};
};

// The mean of values with weights >= 0: sum(weight * value) / sum(weight). It is subtracted from values that may be close to
// it, so it is kept as `pivot` + `deviation` / `weight`: a float near the mean, and the deviation of the values from that
// float. Sums in float then have enough digits, since neither is much larger than the difference needed. With pivot 0 the
// deviation is the sum itself, and a plain sum has weight 0 too. T is a number, or a vector with a mean in each lane.
template <class T>
struct Mean {
  T pivot = {}, deviation = {}, weight = {};

  static FLASH_ONLINE_INLINE T quotient(T a, T weight) { return a / (weight == 0 ? T{} + 1.f : weight); }
  // `sum` is the sum of weight * value; sum_of(term) adds up term(value, weight). A pivot is 0 instead of infinite or NaN.
  static FLASH_ONLINE_INLINE Mean about_pivot(T sum, const auto& sum_of) {
    const T weight = sum_of(kWeight), mean = quotient(sum, weight), pivot = mean - mean == 0 ? mean : T{};
    return {pivot, sum_of([=](auto g, auto y) FLASH_ONLINE_LAMBDA_INLINE { return (g - pivot) * y; }), weight};
  }
  FLASH_ONLINE_INLINE void merge(const auto& other) {
    const bool moves = weight == 0 || other.weight > weight;  // so that only the smaller weight's deviation is recomputed
    deviation += other.deviation;
    if (pivot != other.pivot) deviation += moves ? (pivot - other.pivot) * weight : (other.pivot - pivot) * other.weight;
    if (moves) pivot = other.pivot;
    weight += other.weight;
  }
  // The subtrahend of a row of one chunk, and of any row. One chunk has the bits of a batch of rows.
  FLASH_ONLINE_INLINE Subtrahend<T> subtrahend() const {
    return {pivot == 0 ? deviation : pivot, pivot == 0 ? T{} : quotient(deviation, weight)};
  }
  template <class R, bool kLog, class S = Accumulator<R>>
  FLASH_ONLINE_INLINE Subtrahend<S> subtrahend_of_row(int64_t classes) const {
    if (kTakesMean<R, kLog> && classes <= kChunk)
      return Mean<S>{static_cast<S>(pivot), static_cast<S>(deviation), static_cast<S>(weight)}.subtrahend();
    const TwoParts<S> sum(pivot == 0 ? deviation : pivot + quotient(deviation, weight));
    return {sum.high, sum.low};
  }
};

// Returns whether the sum of grad * y of a chunk, or of a chunk per lane, is as accurate as a mean with a pivot: |grad| y adds
// up to at most eight times the sum of the deviations from the mean. This saves most chunks two passes. `magnitudes` is at most
// the sum of |grad| y, so |product| <= 7/8 magnitudes suffices. False for NaN.
FLASH_ONLINE_INLINE Vector<float> magnitude(Vector<float> x) {
  return reinterpret_cast<Vector<float>>(reinterpret_cast<Vector<uint32_t>>(x) & 0x7fffffffu);
}
FLASH_ONLINE_INLINE Vector<int32_t> needs_no_pivot(Vector<float> product, Vector<float> magnitudes) {
  return 8 * magnitude(product) <= 7 * magnitudes;
}

// The sums of a chunk, lane by lane. For a mean also the sums of |sum| over two slots, and of the weights, which cost nothing
// in the same pass and are needed where other chunks have a pivot.
template <class S>
struct ChunkLanes {
  Vector<S> sum = {}, magnitudes = {}, weight = {};
  FLASH_ONLINE_INLINE ChunkLanes operator+(const ChunkLanes& other) const {
    return {sum + other.sum, magnitudes + other.magnitudes, weight + other.weight};
  }
};
template <bool kLog, class R, bool kLoose, class S = SumOf<R, kLog>>
FLASH_ONLINE_INLINE ChunkLanes<S> sum_lanes(const GradientRow<R, kLoose>& row) {
  if constexpr (kTakesMean<R, kLog>) {
    const auto term = [](auto g, auto y) FLASH_ONLINE_LAMBDA_INLINE { return ChunkLanes<S>{.sum = g * y, .weight = y}; };
    const auto [slot] = sum_terms(row, term);
    ChunkLanes<S> first = slot[0] + slot[1], second = slot[2] + slot[3];
    first.magnitudes = magnitude(first.sum), second.magnitudes = magnitude(second.sum);
    return first + second;
  } else if constexpr (!std::is_same_v<R, float>) {
    return {.sum = sum_terms(row, kSummand<kLog>).total()};
  } else {
    // Four terms are added in float, with roundings as small as those of a single term; the sums of four are added in double.
    SlotSums<Vector<float>> four;
    DoubleSum sum;
    for_each_unit<R>(row.count, [&](int s, int64_t i, auto cut) FLASH_ONLINE_LAMBDA_INLINE {
      four.slot[s] = row.load(row.grad + i, cut).a;
      if (s < kSlots<R> - 1) return;
      sum.add(four.total());
      for (Vector<float>& slot : four.slot) slot = Vector<float>{};
    });
    if (row.count % (kSlots<R> * kUnit<R>) != 0) sum.add(four.total());
    return {.sum = sum.low + sum.high};
  }
}

// Returns the mean of a chunk that needs a pivot; `product` is the sum of grad * y.
template <class Row>
__attribute__((noinline)) Mean<float> about_pivot(const Row& row, float product) {
  return Mean<float>::about_pivot(
      product, [&](const auto& term) FLASH_ONLINE_LAMBDA_INLINE { return sum_of_lanes<float>(sum_terms(row, term).total()); });
}
template <bool kLog, class R, class S = SumOf<R, kLog>>
__attribute__((noinline)) void add_chunk(const GradientRow<R>& row, Mean<double>& to) {
  const ChunkLanes<S> lanes = sum_lanes<kLog>(row);
  const S sum = sum_of_lanes<S>(lanes.sum);
  if constexpr (kTakesMean<R, kLog>)
    if (needs_no_pivot(broadcast(sum), broadcast(sum_of_lanes<S>(lanes.magnitudes)))[0] == 0)
      return to.merge(about_pivot(row, sum));
  to.merge(Mean<S>{0, sum, sum_of_lanes<S>(lanes.weight)});
}

// Adds up the lanes of each of kRows vectors, in the order of sum_of_lanes: the sum of vector r is in all of the lanes r * s to
// r * s + s - 1 of the result, where s is the number of lanes divided by kRows.
template <int kRows, int kStep, class V>
FLASH_ONLINE_INLINE V sums_of_rows(V* rows) {
  constexpr int kJoined = kRows > 1 ? kRows / 2 : 1;
#pragma GCC unroll 16
  for (int i = 0; i < kJoined; ++i) {
    V other = rows[(i + kJoined) % kRows];
    exchange<kStep>(rows[i], other, std::make_index_sequence<sizeof(V) / sizeof(rows[0][0])>());
    rows[i] += other;
  }
  if constexpr (kStep > 1) return sums_of_rows<kJoined, kStep / 2>(rows);
  return rows[0];
}

// Writes gradients, into the caches or past them.
template <class E, class R, bool kLog>
struct GradientWriter {
  using T = Accumulator<R>;
  using V = Vector<T>;
  Subtrahend<V> subtrahend;
  explicit FLASH_ONLINE_INLINE GradientWriter(const Subtrahend<T>& of) : subtrahend{broadcast(of.high), broadcast(of.low)} {}

  // Results too large for any cache to hold until they are read are streamed, that is, stored past the caches: the memory is
  // not read before it is written. The next reader finds smaller results in a cache.
  static FLASH_ONLINE_INLINE bool streams(const RowProblem& problem) {
    return std::is_same_v<E, R> && problem.outer * problem.classes * problem.inner * size_of(problem.dtype) >= 12 << 20;
  }
  static FLASH_ONLINE_INLINE V gradient(V g, V y, const Subtrahend<V>& of) {
    if constexpr (kLog) return minus_product(g, exp_rounded_to<E>(y), of.high);
    return (kTakesMean<R, kLog> ? (g - of.high) - of.low : g - of.high) * y;
  }
  FLASH_ONLINE_INLINE Pair<T> gradients(const auto& row, int64_t i, auto cut) const {
    const Pair<T> g = row.load(row.grad + i, cut), y = row.load(row.output + i, cut);
    return {gradient(g.a, y.a, subtrahend), gradient(g.b, y.b, subtrahend)};
  }
  static FLASH_ONLINE_INLINE void store(E* to, const Pair<T>& x, int64_t n = kUnit<R>) {
    E unit[kUnit<R>];
    E* const whole = n == kUnit<R> ? to : unit;
    kParts<R> == 2 ? store_pair(whole, x) : store_narrowed(whole, x.a);
    if (n < kUnit<R>) std::copy_n(unit, n, to);
  }
  template <bool kLoose>
  FLASH_ONLINE_INLINE void write(const GradientRow<R, kLoose>& row, E* to) const {
    for_each_unit<R>(row.count, [&](int, int64_t i, auto cut) FLASH_ONLINE_LAMBDA_INLINE {
      store(to + i, gradients(row, i, cut), cut && !kLoose ? row.count_in_last_unit() : kUnit<R>);
    });
  }
  // Prefetches elements at these distances, for a pass that would leave the memory idle.
  FLASH_ONLINE_INLINE void stream(const GradientRow<R>& row, E* to, int64_t grad_ahead = 0, int64_t output_ahead = 0) const {
    int64_t i = std::min(static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % kVectorBytes / sizeof(E)), row.count);
    if (i > 0) write(row.part(0, i), to);
    for (; i + kUnit<R> <= row.count; i += kUnit<R>) {
      __builtin_prefetch(row.grad + i + grad_ahead), __builtin_prefetch(row.output + i + output_ahead);
      const Pair<T> x = gradients(row, i, std::false_type{});
      if constexpr (kParts<R> == 2)
        stream_vector(to + i, encode(E{}, x));
      else
        stream_vector(to + i, x.a);
    }
    if (i < row.count) write(row.part(i, row.count - i), to + i);
  }
};

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
