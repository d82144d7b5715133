// The gradient of a softmax or log-softmax, row by row where the classes of a row are contiguous: sums over a row, and the row
// of gradients. A chunk of a row has the same bits whichever of these functions computes it: which lane a class is added to,
// and the order in which lanes are added, follow from its index in the chunk and from the chunk's length.
#pragma once

#include "row_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

template <class R>
struct Unit {
  Vector<Accumulator<R>> part[kParts<R>];
};
template <class R>
using UnitBits = Vector<Bits<R>>;

template <class R>
FLASH_ONLINE_INLINE Unit<R> unit_of(UnitBits<R> bits) {
  if constexpr (sizeof(R) == 2) {
    const Pair<float> pair = decode(R{}, bits);
    return {pair.a, pair.b};
  } else {
    return {reinterpret_cast<Vector<R>>(bits)};
  }
}
// Returns a mask with all bits of the first n elements set.
template <class R>
FLASH_ONLINE_INLINE UnitBits<R> first_elements(int64_t n) {
  UnitBits<R> index;
  for (int64_t i = 0; i < kUnit<R>; ++i) index[i] = static_cast<Bits<R>>(i);
  return reinterpret_cast<UnitBits<R>>(index < UnitBits<R>{} + static_cast<Bits<R>>(n));
}

// Access to the last unit of a row, if the unit extends past the row's end.
enum class RowEnd {
  kNone,  // all units are whole
  kLoose,  // read and written whole: later elements of the same tensors follow, and are written afterwards
  kExact
};

// The grad and the output of a row, or of a chunk of it.
template <class R, RowEnd kRowEnd = RowEnd::kExact>
struct GradientRow {
  static constexpr RowEnd kEnd = kRowEnd;
  const R *grad, *output;
  int64_t count;
  UnitBits<R> end;  // mask of the last unit's elements that belong to the row

  FLASH_ONLINE_INLINE GradientRow(const R* grad, const R* output, int64_t count)
      : grad(grad), output(output), count(count), end(first_elements<R>(left())) {}
  // The number of elements of the last unit.
  FLASH_ONLINE_INLINE int64_t left() const { return (count - 1) % kUnit<R> + 1; }
  // Loads the unit at `from`; in the last unit, elements after the row's end are 0. A masked load would do, but on AMD's
  // processors masked loads neither start the prefetcher nor overlap when they miss the caches: rows of 16 classes took four
  // times as long.
  template <bool kAtEnd>
  FLASH_ONLINE_INLINE Unit<R> load(const R* from, std::bool_constant<kAtEnd>) const {
    constexpr bool kWhole = !kAtEnd || kRowEnd == RowEnd::kNone;
    if constexpr (kWhole && sizeof(R) >= 4) {
      return {load_vector(from)};
    } else if constexpr (kWhole || kRowEnd == RowEnd::kLoose) {
      UnitBits<R> bits;
      __builtin_memcpy(&bits, from, sizeof bits);
      return unit_of<R>(kWhole ? bits : bits & end);
    } else if constexpr (sizeof(R) == 2) {
      return unit_of<R>(load_bits(from, left(), 0.f));
    } else {
      return unit_of<R>(reinterpret_cast<UnitBits<R>>(load_row(from, left())));
    }
  }
};

// Calls f(slot, i, at_end) for all units of `count` elements: the slot of the unit at i, and whether it may be the last unit.
// With kUnits, there are that many units, at most kSlots.
template <int kSlot, class R, class F>
FLASH_ONLINE_INLINE void for_last_units(int64_t i, int64_t count, const F& f) {
  if (i + kUnit<R> <= count) {
    f(kSlot, i, std::false_type{});
    if constexpr (kSlot + 1 < kSlots<R>) for_last_units<kSlot + 1, R>(i + kUnit<R>, count, f);
  } else if (i < count) {
    f(kSlot, i, std::true_type{});
  }
}
template <int kUnits, class R, class F>
FLASH_ONLINE_INLINE void for_each_unit(int64_t count, const F& f) {
  static_assert(kUnits <= 4 && kUnits <= kSlots<R>);
  if constexpr (kUnits > 1) f(0, 0, std::false_type{});
  if constexpr (kUnits > 2) f(1, kUnit<R>, std::false_type{});
  if constexpr (kUnits > 3) f(2, 2 * kUnit<R>, std::false_type{});
  if constexpr (kUnits > 0) return f(kUnits - 1, (kUnits - 1) * kUnit<R>, std::true_type{});
  int64_t i = 0;
  for (; i + kSlots<R> * kUnit<R> <= count; i += kSlots<R> * kUnit<R>)
    for (int s = 0; s < kSlots<R>; ++s) f(s, i + s * kUnit<R>, std::false_type{});
  for_last_units<0, R>(i, count, f);
}
template <class V, size_t kCount>
FLASH_ONLINE_INLINE V total_of_slots(const V (&sums)[kCount]) {
  static_assert(kCount == 4);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Softmax: with s = sum(grad * y), grad_input = (grad - s) y. Log-softmax: with s = sum(grad), grad_input = grad - s exp(y).
// Where y is rounded to float32, s is the mean of grad by the weights y: grad - s keeps its digits where one y is nearly 1.
template <class R, bool kLog>
constexpr bool kTakesMean = !kLog && std::is_same_v<R, float>;
// The type of sums: the terms may cancel, but for 16-bit elements float does: products are exact, and a chunk is short.
template <class R, bool kLog>
using SumOf = std::conditional_t<sizeof(R) == 2 || kTakesMean<R, kLog>, float, double>;

// The number that the writing pass subtracts from a row's grad, as a sum of two; for log-softmax, the factor of exp(y).
template <class T>
struct Subtrahend {
  T high = {}, low = {};
};

// The mean of a chunk, or of a chunk per lane (T is float or a vector): `product` is the sum of grad * y. The pivot is product
// / weight, but 0 where that is infinite or NaN. A weight of 0 counts as 1.
template <class T>
FLASH_ONLINE_INLINE T divisor_of(T weight) {
  return weight == 0 ? T{} + 1.f : weight;
}
template <class T>
FLASH_ONLINE_INLINE T pivot_of(T product, T weight) {
  const T mean = product / divisor_of(weight);
  return mean - mean == 0 ? mean : T{};
}
// The subtrahend of a row of one chunk. With pivot 0 it is the sum itself.
template <class T>
FLASH_ONLINE_INLINE Subtrahend<T> subtrahend_of(T pivot, T deviation, T weight) {
  return {pivot, pivot == 0 ? deviation : deviation / divisor_of(weight)};
}

// The mean of values with weights >= 0: sum(weight * value) / sum(weight). It is subtracted from values that may be close to
// it, so it is kept as `pivot` + `deviation` / `weight`: a float near the mean, and the deviation of the values from that
// float. Sums in float then have enough digits, since neither is much larger than the difference needed.
struct WeightedMean {
  double pivot = 0, deviation = 0, weight = 0;

  FLASH_ONLINE_INLINE void merge(const WeightedMean& other) {
    const bool moves = other.weight > weight;  // so that only the smaller weight's deviation is recomputed
    deviation += other.deviation;
    if (pivot != other.pivot) deviation += moves ? (pivot - other.pivot) * weight : (other.pivot - pivot) * other.weight;
    if (moves) pivot = other.pivot;
    weight += other.weight;
  }
  // The subtrahend of a row of one chunk, in floats.
  FLASH_ONLINE_INLINE Subtrahend<float> subtrahend_of_chunk() const {
    return subtrahend_of(static_cast<float>(pivot), static_cast<float>(deviation), static_cast<float>(weight));
  }
  FLASH_ONLINE_INLINE double value() const { return pivot == 0 ? deviation : pivot + deviation / divisor_of(weight); }
};

// The sums of a row's grad, or of grad * y, lane by lane.
template <int kUnits, bool kLog, class R, RowEnd kRowEnd>
FLASH_ONLINE_INLINE Vector<SumOf<R, kLog>> sum_lanes(const GradientRow<R, kRowEnd>& row) {
  if constexpr (std::is_same_v<R, float>) {
    static_assert(kLog, "ProductLanes has more digits");
    // Four terms are added in float, with roundings as small as those of a single term; the sums of four are added in double.
    Vector<float> four[kSlots<R>] = {};
    DoubleSum sum;
    int last = -1;
    for_each_unit<kUnits, R>(row.count, [&](int s, int64_t i, auto at_end) FLASH_ONLINE_LAMBDA_INLINE {
      four[s] = row.load(row.grad + i, at_end).part[0];
      last = s;
      if (s == kSlots<R> - 1) {
        sum.add(total_of_slots(four));
        four[0] = four[1] = four[2] = four[3] = Vector<float>{};
      }
    });
    if (last != kSlots<R> - 1) sum.add(total_of_slots(four));
    return sum.low + sum.high;
  } else {
    Vector<Accumulator<R>> sums[4] = {};
    for_each_unit<kUnits, R>(row.count, [&](int s, int64_t i, auto at_end) FLASH_ONLINE_LAMBDA_INLINE {
      const Unit<R> g = row.load(row.grad + i, at_end);
      if constexpr (kLog) {
        for (int p = 0; p < kParts<R>; ++p) sums[s * kParts<R> + p] += g.part[p];
      } else {
        const Unit<R> y = row.load(row.output + i, at_end);
        for (int p = 0; p < kParts<R>; ++p) sums[s * kParts<R> + p] += g.part[p] * y.part[p];
      }
    });
    return total_of_slots(sums);
  }
}
FLASH_ONLINE_INLINE Vector<float> magnitude(Vector<float> x) {
  return reinterpret_cast<Vector<float>>(reinterpret_cast<Vector<uint32_t>>(x) & 0x7fffffffu);
}
// Sums of grad * y, and of |sums| over two slots of a lane, which add up to at most the sum of |grad| y.
struct ProductLanes {
  Vector<float> product, magnitude;
};
template <int kUnits, class Row>
FLASH_ONLINE_INLINE ProductLanes product_lanes(const Row& row) {
  Vector<float> products[4] = {};
  for_each_unit<kUnits, float>(row.count, [&](int s, int64_t i, auto at_end) FLASH_ONLINE_LAMBDA_INLINE {
    products[s] += row.load(row.grad + i, at_end).part[0] * row.load(row.output + i, at_end).part[0];
  });
  const Vector<float> first = products[0] + products[1], second = products[2] + products[3];
  return {first + second, magnitude(first) + magnitude(second)};
}
template <int kUnits, class Row>
FLASH_ONLINE_INLINE Vector<float> weight_lanes(const Row& row) {
  Vector<float> weights[4] = {};
  for_each_unit<kUnits, float>(row.count, [&](int s, int64_t i, auto at_end) FLASH_ONLINE_LAMBDA_INLINE {
    weights[s] += row.load(row.output + i, at_end).part[0];
  });
  return total_of_slots(weights);
}

// Prefetches elements at these distances from a row, in a pass that finds the row in the L1 cache and would leave the memory
// idle. Only for streamed results: if results stay in the caches, so do the inputs, and a prefetch only costs its instruction.
struct Ahead {
  int64_t grad = 0, output = 0;
  template <class Row>
  FLASH_ONLINE_INLINE void prefetch(const Row& row, int64_t i) const {
    __builtin_prefetch(row.grad + i + grad);
    __builtin_prefetch(row.output + i + output);
  }
};
struct NoneAhead {
  template <class Row>
  FLASH_ONLINE_INLINE void prefetch(const Row&, int64_t) const {}
};

// The deviations from the pivot (see WeightedMean).
template <int kUnits, class Row>
FLASH_ONLINE_INLINE Vector<float> deviation_lanes(const Row& row, Vector<float> pivot) {
  Vector<float> deviations[4] = {};
  for_each_unit<kUnits, float>(row.count, [&](int s, int64_t i, auto at_end) FLASH_ONLINE_LAMBDA_INLINE {
    const Vector<float> g = row.load(row.grad + i, at_end).part[0], y = row.load(row.output + i, at_end).part[0];
    deviations[s] += (g - pivot) * y;
  });
  return total_of_slots(deviations);
}
// Returns whether the sum of grad * y of a chunk, or of a chunk per lane, is as accurate as a mean with a pivot: |grad| y adds
// up to at most eight times the sum of the deviations from the mean. This saves most chunks two passes. `magnitude` is at most
// the sum of |grad| y, so |product| <= 7/8 magnitude suffices. False for NaN.
FLASH_ONLINE_INLINE Vector<int32_t> needs_no_pivot(const ProductLanes& sums) {
  return 8 * magnitude(sums.product) <= 7 * sums.magnitude;
}
// A chunk's sum of grad * y, and whether it is as accurate as a mean with a pivot.
struct ChunkProduct {
  float sum;
  bool needs_no_pivot;
};
template <class Row>
FLASH_ONLINE_INLINE ChunkProduct product_of_chunk(const Row& row) {
  const ProductLanes lanes = product_lanes<0>(row);
  const float product = sum_of_lanes<float>(lanes.product), magnitude = sum_of_lanes<float>(lanes.magnitude);
  return {product, needs_no_pivot({broadcast(product), broadcast(magnitude)})[0] != 0};
}
// Returns the mean of a chunk that needs a pivot; `product` is the sum of grad * y.
template <class Row>
__attribute__((noinline)) WeightedMean about_pivot(const Row& row, float product) {
  const float weight = sum_of_lanes<float>(weight_lanes<0>(row)), pivot = pivot_of(product, weight);
  return {pivot, sum_of_lanes<float>(deviation_lanes<0>(row, broadcast(pivot))), weight};
}

// Adds up the lanes of each of kRows vectors, in the order of sum_of_lanes: the sum of vector r is in all of the lanes r * s to
// r * s + s - 1 of the result, where s is the number of lanes divided by kRows.
template <int kRows, int kStep, class V>
FLASH_ONLINE_INLINE V sums_of_rows(V* rows) {
  constexpr size_t kWidth = sizeof(V) / sizeof(rows[0][0]);
  constexpr int kJoined = kRows * kStep / static_cast<int>(kWidth);  // pairs of vectors that become one
  if constexpr (kJoined > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kJoined; ++i) {
      exchange<kStep>(rows[i], rows[i + kJoined], std::make_index_sequence<kWidth>());
      rows[i] += rows[i + kJoined];
    }
  } else {
    V lower = rows[0], upper = rows[0];
    exchange<kStep>(lower, upper, std::make_index_sequence<kWidth>());
    rows[0] = lower + upper;
  }
  if constexpr (kStep > 1)
    return sums_of_rows<kRows, kStep / 2>(rows);
  else
    return rows[0];
}

// Writes gradients, into the caches or past them. kOneTerm: the subtrahend's `high` is 0.
template <class E, bool kLog, class R, bool kOneTerm = false>
struct GradientWriter {
  using T = Accumulator<R>;
  static constexpr bool kMayStream = std::is_same_v<E, R>;
  Vector<T> high, low;
  explicit FLASH_ONLINE_INLINE GradientWriter(const Subtrahend<T>& of) : high(broadcast(of.high)), low(broadcast(of.low)) {}

  template <RowEnd kRowEnd, class AtEnd>
  FLASH_ONLINE_INLINE Unit<R> gradients(const GradientRow<R, kRowEnd>& row, int64_t i, AtEnd) const {
    constexpr std::bool_constant<AtEnd::value && kRowEnd == RowEnd::kExact> kCut;
    const Unit<R> g = row.load(row.grad + i, kCut), y = row.load(row.output + i, kCut);
    Unit<R> to;
    for (int p = 0; p < kParts<R>; ++p)
      if constexpr (kLog)
        to.part[p] = minus_product(g.part[p], exp_rounded_to<E>(y.part[p]), high);
      else if constexpr (kTakesMean<R, kLog>)
        to.part[p] = ((kOneTerm ? g.part[p] : g.part[p] - high) - low) * y.part[p];
      else
        to.part[p] = (g.part[p] - high) * y.part[p];
    return to;
  }
  static FLASH_ONLINE_INLINE void store(E* to, const Unit<R>& x) {
    if constexpr (sizeof(R) == 2)
      store_pair(to, Pair<float>{x.part[0], x.part[1]});
    else
      store_narrowed(to, x.part[0]);
  }
  static FLASH_ONLINE_INLINE void store(E* to, int64_t n, const Unit<R>& x) {
    if constexpr (sizeof(R) == 2) {
      store_pair(to, n, Pair<float>{x.part[0], x.part[1]});
    } else {
      E narrowed[kUnit<R>];
      store_narrowed(narrowed, x.part[0]);
      RowBits<E> bits;
      __builtin_memcpy(&bits, narrowed, sizeof bits);
      store_row(to, n, bits);
    }
  }
  static FLASH_ONLINE_INLINE void stream(E* to, const Unit<R>& x) {
    if constexpr (sizeof(R) == 2)
      stream_vector(to, encode(E{}, Pair<float>{x.part[0], x.part[1]}));
    else if constexpr (kMayStream)
      stream_vector(to, x.part[0]);
  }
  template <int kUnits, class Row>
  FLASH_ONLINE_INLINE void write(const Row& row, E* to) const {
    for_each_unit<kUnits, R>(row.count, [&](int, int64_t i, auto at_end) FLASH_ONLINE_LAMBDA_INLINE {
      const Unit<R> x = gradients(row, i, at_end);
      if constexpr (at_end && Row::kEnd == RowEnd::kExact)
        store(to + i, row.left(), x);
      else
        store(to + i, x);
    });
  }
  template <class Next>
  FLASH_ONLINE_INLINE void write_streaming(const GradientRow<R>& row, E* to, const Next& ahead) const {
    const auto store_part = [&](int64_t begin, int64_t end) {
      if (begin == end) return;
      const GradientRow<R> part(row.grad + begin, row.output + begin, end - begin);
      store(to + begin, end - begin, gradients(part, 0, std::true_type{}));
    };
    int64_t i = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % kVectorBytes / sizeof(E));
    i = i < row.count ? i : row.count;
    store_part(0, i);
    for (; i + kUnit<R> <= row.count; i += kUnit<R>) {
      ahead.prefetch(row, i);
      stream(to + i, gradients(row, i, std::false_type{}));
    }
    store_part(i, row.count);
  }
};

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
