// Rows that are adjacent in memory, such as rows over the channels of an image. Strips of them are copied into a tile, widened,
// with a vector per class and a row per lane. Classes may be far apart in memory; every access to a tensor then reaches another
// page and the same few sets of a cache. So each is read or written once, in runs of several vectors.
#pragma once

#include "row_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

// Vectors of rows per strip: few enough that a tile of two tensors fits the L1 cache (the L2 cache for many classes), but
// enough to read memory in runs of several lines.
FLASH_ONLINE_INLINE int64_t strip_vectors(int64_t classes) {
  if (classes > kChunk / 2) return 2;
  const int64_t in_first_level = 512 / classes;
  return in_first_level < 4 ? 4 : in_first_level > 32 ? 32 : in_first_level;
}
FLASH_ONLINE_INLINE int64_t strip_tile_bytes(int64_t classes) { return 2 * strip_vectors(classes) * classes * kVectorBytes; }

// The number of adjacent rows: along inner, or along outer where inner is 1.
FLASH_ONLINE_INLINE int64_t rows_side_by_side(const RowProblem& problem) {
  return problem.inner == 1 ? problem.outer : problem.inner;
}
// Returns whether each row of these tensors begins one element after the previous row.
template <class... Views>
FLASH_ONLINE_INLINE bool lie_side_by_side(const RowProblem& problem, const Views&... views) {
  return ((row_stride(problem, views) == 1) && ...);
}
// Returns whether strips are used for this problem and these tensors.
template <class... Views>
FLASH_ONLINE_INLINE bool lie_in_strips(const RowProblem& problem, const Views&... views) {
  return problem.classes > 16 && problem.classes <= kChunk && rows_side_by_side(problem) >= kLanes<float> &&
         lie_side_by_side(problem, views...) && ((views.stride[1] != 1) && ...);
}

struct RowStrip {
  int64_t outer, inner, rows;

  // Leaves out the first `count` rows.
  void skip(const RowProblem& problem, int64_t count) {
    (problem.inner == 1 ? outer : inner) += count;
    rows -= count;
  }

  template <class E, class View>
  FLASH_ONLINE_INLINE auto address(const View& view) const {
    using Element = std::conditional_t<std::is_same_v<View, ConstView3>, const E, E>;
    return static_cast<Element*>(view.data) + outer * view.stride[0] + inner * view.stride[2];
  }
};

// Calls body(strip, scratch) in parallel, for strips that cover every row once.
template <class T, class Body>
FLASH_ONLINE_INLINE void for_each_row_strip(const RowProblem& problem, const Executor& executor, const Body& body) {
  const int64_t side = rows_side_by_side(problem), width = strip_vectors(problem.classes) * kLanes<T>;
  const int64_t per_group = ceil_div(side, width), strips = (problem.inner == 1 ? 1 : problem.outer) * per_group;
  const int64_t per_item = ceil_div(row_grain(problem), width * problem.classes);
  for_each_independent_item(executor, ceil_div(strips, per_item), [&](int64_t item, std::byte* scratch) {
    const int64_t last = (item + 1) * per_item < strips ? (item + 1) * per_item : strips;
    for (int64_t s = item * per_item; s < last; ++s) {
      const int64_t first = s % per_group * width, rows = side - first < width ? side - first : width;
      body(problem.inner == 1 ? RowStrip{first, 0, rows} : RowStrip{s / per_group, first, rows}, scratch);
    }
  });
}

// Copies a strip of a tensor to tile[vectors, classes]. Lanes without a row hold 0.
template <class E, class T = Accumulator<E>>
__attribute__((noinline)) void load_strip(const RowProblem& problem, const ConstView3& view, const RowStrip& strip,
                                          Vector<T>* tile) {
  constexpr int64_t kWidth = kLanes<T>;
  const E* from = strip.address<E>(view);
  const int64_t whole = strip.rows / kWidth, rest = strip.rows % kWidth;
  for (int64_t c = 0; c < problem.classes; ++c, from += view.stride[1]) {
    for (int64_t v = 0; v < whole; ++v) {
      __builtin_prefetch(from + view.stride[1] + v * kWidth);
      tile[v * problem.classes + c] = load_widened(from + v * kWidth);
    }
    if (rest == 0) continue;
    E padded[kWidth] = {};
    std::copy_n(from + whole * kWidth, rest, padded);
    tile[whole * problem.classes + c] = load_widened(padded);
  }
}

template <class E, class T = Accumulator<E>>
__attribute__((noinline)) void store_strip(const RowProblem& problem, const MutableView3& view, const RowStrip& strip,
                                           const Vector<T>* tile) {
  constexpr int64_t kWidth = kLanes<T>;
  E* to = strip.address<E>(view);
  const int64_t whole = strip.rows / kWidth, rest = strip.rows % kWidth;
  for (int64_t c = 0; c < problem.classes; ++c, to += view.stride[1]) {
    for (int64_t v = 0; v < whole; ++v) {
      __builtin_prefetch(to + view.stride[1] + v * kWidth, 1);
      store_narrowed(to + v * kWidth, tile[v * problem.classes + c]);
    }
    if (rest == 0) continue;
    E padded[kWidth];
    store_narrowed(padded, tile[whole * problem.classes + c]);
    std::copy_n(padded, rest, to + whole * kWidth);
  }
}

// GCC does not see that only the written elements of `lanes` are read. Clearing all of them costs short rows a third of their
// time.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

// Sums term(c), which has a row in each lane, over all classes, at most kMost. The order is the order for a row of contiguous
// classes: four sums (slots) per lane; then the slots, 0 and 1 first or, without kNeighboursFirst, 0 and 2 first; then lane by
// lane. Slots and lanes without a class are skipped: adding a 0 there would change no bit of a sum that began with 0. S is the
// type of sums. of_two(sum) is added up for each sum of two slots.
template <class R, class S, int64_t kMost, bool kNeighboursFirst, class Term, class OfTwo = std::identity>
FLASH_ONLINE_INLINE auto sum_of_classes(int64_t classes, const Term& term, const OfTwo& of_two = {}) {
  using T = Accumulator<R>;
  using V = decltype(term(int64_t{0}));
  constexpr int64_t kWidth = kLanes<T>, kGroup = kSlots<R> * kUnit<R>;
  constexpr bool kInDouble = !std::is_same_v<S, T>;
  constexpr bool kOneTerm = kInDouble || kGroup >= kMost;  // in each slot of a lane
  if (classes < 1 || classes > kMost) __builtin_unreachable();
  struct InDouble {
    Vector<double> low, high;  // as in DoubleSum, but uninitialised
  };
  std::conditional_t<kInDouble, InDouble, V> lanes[kWidth];
  const int64_t in_use = kInterleaved<R> ? ceil_div(classes, 2) : classes;
  int64_t count = in_use < kWidth ? in_use : kWidth;
#pragma GCC unroll 16
  for (int64_t l = 0; l < count; ++l) {
    [[maybe_unused]] DoubleSum in_double;
    for (int64_t first = 0; first + l < classes; first += kInDouble ? kGroup : classes) {
      const auto begin = [&](int i) FLASH_ONLINE_LAMBDA_INLINE {
        const int part = i % kParts<R>;
        return first + i / kParts<R> * kUnit<R> + (kInterleaved<R> ? 2 * l + part : part * kWidth + l);
      };
      const auto sum = [&](int i) FLASH_ONLINE_LAMBDA_INLINE {
        V sum = {};
        sum += term(begin(i));
        if constexpr (!kOneTerm)
          for (int64_t c = begin(i) + kGroup; c < classes; c += kGroup) sum += term(c);
        return sum;
      };
      constexpr int kSecond = kNeighboursFirst ? 1 : 2, kThird = 3 - kSecond;
      V total = sum(0);
      if (begin(kSecond) < classes) total += sum(kSecond);
      total = of_two(total);
      if (begin(kThird) < classes) {
        V other = sum(kThird);
        if (begin(3) < classes) other += sum(3);
        total += of_two(other);
      }
      if constexpr (kInDouble)
        in_double.add(total);
      else
        lanes[l] = total;
    }
    if constexpr (kInDouble) lanes[l] = {in_double.low, in_double.high};
  }
  for (int64_t step = kWidth / 2; step > 0; step /= 2) {
    for (int64_t l = 0; l + step < count; ++l)
      if constexpr (kInDouble)
        lanes[l].low += lanes[l + step].low, lanes[l].high += lanes[l + step].high;
      else
        lanes[l] += lanes[l + step];
    count = count < step ? count : step;
  }
  if constexpr (kInDouble)
    return DoubleSum{lanes[0].low, lanes[0].high};
  else
    return lanes[0];
}

#pragma GCC diagnostic pop

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
