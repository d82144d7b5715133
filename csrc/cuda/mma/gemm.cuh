// Products of tiles in shared memory. Each warp computes some rows and columns of the result.
#pragma once

#include "compensated_accumulator.cuh"
#include "fragments.cuh"
#include "shared_tile.cuh"

namespace flash_online::cuda {

struct GemmOptions {
  bool transposed = false;  // of floats: gives the bits that the transposed product has
  // For 16-bit elements: the tensor cores, which truncate sums, sum only kMostSteps steps; float adders, which round, sum these
  // partials. For long sums, which otherwise lose several units in the last place.
  bool rounded = false;
};
constexpr int kMostSteps = 8;  // as of head dim 128

// The most steps, up to kMostSteps, that divide all of them.
constexpr int most_steps(int steps) {
  int most = kMostSteps;
  while (steps % most != 0) --most;
  return most;
}

// One step of a product of 16-bit elements, for kCount columns from `column` of d on.
template <class Element, int kRows, int kColumns, int kCount>
__device__ __forceinline__ void multiply(Accumulator<kRows, kColumns>& d, const typename Fragments<Element>::Left (&a)[kRows],
                                         const typename Fragments<Element>::Right (&b)[kCount], int column) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kCount; ++j) mma_16x8x16<Element>(d[i][column + j], a[i].words[0], b[j].words[0][0], b[j].words[0][1]);
}

struct NothingBetween {
  __device__ __forceinline__ void operator()(int) const {}
};

// d[m][n] += sum over k of left[m][k] right[n][k] over the tiles' width: 16 * kRows rows from m on, all of d's columns from
// row 0 of `right` on. Of floats the low sums stay apart, to be added to d in the end (add_low): how k is cut up among calls
// changes no bit of them. Calls between(step) before each step.
template <GemmOptions kOptions = GemmOptions{}, class Element, int kRows, int kColumns, int kWidth,
          class Between = NothingBetween>
__device__ __forceinline__ void multiply_rows_partial(Accumulator<kRows, kColumns>& d,
                                                      CompensatedAccumulator<Element, kRows, kColumns>& compensation,
                                                      SharedTile<Element, kWidth> left, int m,
                                                      SharedTile<Element, kWidth> right, const Between& between = {}) {
  using F = Fragments<Element>;
  constexpr int kSteps = kWidth / F::kDepth, kCount = kColumns == 1 ? 1 : 2;
  static_assert(kColumns % kCount == 0);
  // Calls f(left fragments, right fragments, column) for the fragments of a step.
  const auto multiply_step = [&](int step, auto&& f) {
    between(step);
    typename F::Left a[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) F::left_rows(a[i], left, m + 16 * i, step * F::kDepth);
#pragma unroll
    for (int j = 0; j < kColumns; j += kCount) {
      typename F::Right b[kCount];
      F::right_rows(b, right, 8 * j, step * F::kDepth);
      f(a, b, j);
    }
  };
  if constexpr (F::kDigits == 1 && kOptions.rounded) {
    constexpr int kStepsAtOnce = most_steps(kSteps);
    const auto add_steps = [&](int first, Accumulator<kRows, kColumns>& to) __attribute__((always_inline)) {
#pragma unroll
      for (int step = 0; step < kStepsAtOnce; ++step)
        multiply_step(first + step, [&](const auto& a, const auto& b, int j) { multiply<Element>(to, a, b, j); });
    };
    add_steps(0, d);
#pragma unroll
    for (int first = kStepsAtOnce; first < kSteps; first += kStepsAtOnce) {
      Accumulator<kRows, kColumns> partial;
      clear(partial);
      add_steps(first, partial);
      for_each(partial, [&](float x, int i, int column, int e) { d[i][column][e] += x; });
    }
  } else if constexpr (F::kDigits == 1) {
#pragma unroll(kSteps > 16 ? 4 : kSteps)
    for (int step = 0; step < kSteps; ++step)
      multiply_step(step, [&](const auto& a, const auto& b, int j) { multiply<Element>(d, a, b, j); });
  } else {
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step)
      multiply_step(step, [&](const auto& a, const auto& b, int j) {
        compensation.template multiply<kOptions.transposed>(d, j, a, b, j);
      });
  }
}

// A whole product in one call: d is the result, or its leading part where results are compensated.
template <GemmOptions kOptions = GemmOptions{}, class Element, int kRows, int kColumns, int kWidth,
          class Between = NothingBetween>
__device__ __forceinline__ void multiply_rows(Accumulator<kRows, kColumns>& d,
                                              CompensatedAccumulator<Element, kRows, kColumns>& compensation,
                                              SharedTile<Element, kWidth> left, int m, SharedTile<Element, kWidth> right,
                                              const Between& between = {}) {
  multiply_rows_partial<kOptions>(d, compensation, left, m, right, between);
  add_low_unless_compensated(d, compensation);
}

// Two products of 16-bit elements with the same left rows: d0 of the rows of right0, and d1 of those of right1.
template <class Element, int kRows, int kColumns, int kWidth>
__device__ __forceinline__ void multiply_rows_twice(Accumulator<kRows, kColumns>& d0, Accumulator<kRows, kColumns>& d1,
                                                    SharedTile<Element, kWidth> left, int m, SharedTile<Element, kWidth> right0,
                                                    SharedTile<Element, kWidth> right1) {
  using F = Fragments<Element>;
  static_assert(F::kDigits == 1 && kColumns % 2 == 0);
#pragma unroll
  for (int step = 0; step < kWidth / F::kDepth; ++step) {
    typename F::Left a[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) F::left_rows(a[i], left, m + 16 * i, step * F::kDepth);
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      typename F::Right b0[2], b1[2];
      F::right_rows(b0, right0, 8 * j, step * F::kDepth);
      F::right_rows(b1, right1, 8 * j, step * F::kDepth);
      multiply<Element>(d0, a, b0, j);
      multiply<Element>(d1, a, b1, j);
    }
  }
}

// d[m][n] += sum over k of left[m][k] right[k][n], k up to kSteps * Fragments::kDepth, n from column `n` of `right` on.
// left(a, i, step) sets `a` to the left operand's fragment of the i-th sixteen rows.
template <int kSteps, class Element, int kRows, int kColumns, int kWidth, class Left>
__device__ __forceinline__ void multiply_by_columns(Accumulator<kRows, kColumns>& d, const Left& left,
                                                    SharedTile<Element, kWidth> right, int n) {
  using F = Fragments<Element>;
  static_assert(kColumns % 2 == 0);
  if constexpr (F::kDigits == 1) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      typename F::Left a[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) left(a[i], i, step);
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) {
        typename F::Right b[2];
        F::right_columns(b, right, n + 8 * j, step * F::kDepth);
        multiply<Element>(d, a, b, j);
      }
    }
  } else {
    constexpr int kCount = kColumns % 4 == 0 && kRows == 1 ? 4 : 2;
    // Steps that are summed before the sum is added to d.
    constexpr int kGroup = kSteps % 4 == 0 ? 4 : kSteps % 3 == 0 ? 3 : kSteps % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int first = 0; first < kSteps; first += kGroup) {
      typename F::Left a[kGroup][kRows];
#pragma unroll
      for (int step = 0; step < kGroup; ++step)
#pragma unroll
        for (int i = 0; i < kRows; ++i) left(a[step][i], i, first + step);
#pragma unroll
      for (int j = 0; j < kColumns; j += kCount) {
        Accumulator<kRows, kCount> leading;
        CompensatedAccumulator<Element, kRows, kCount> compensation;
        clear(leading);
#pragma unroll
        for (int step = 0; step < kGroup; ++step) {
          typename F::Right b[kCount];
          F::right_columns(b, right, n + 8 * j, (first + step) * F::kDepth);
          compensation.multiply(leading, 0, a[step], b, 0);
        }
        for_each(leading, [&](float x, int i, int column, int e) {
          d[i][j + column][e] += add_if_finite(x, compensation.low[i][column][e]);
        });
      }
    }
  }
}

// The left operand is in registers, and k runs over its 8 * kLeft columns.
template <class Element, int kRows, int kColumns, int kLeft, int kWidth>
__device__ __forceinline__ void multiply_operand(Accumulator<kRows, kColumns>& d,
                                                 const LeftOperand<Element, kRows, kLeft>& left,
                                                 SharedTile<Element, kWidth> right, int n = 0) {
  using F = Fragments<Element>;
  multiply_by_columns<kLeft * 8 / F::kDepth>(
      d, [&](typename F::Left& a, int i, int step) { left.fragment(a, i, step); }, right, n);
}
template <class Element, int kRows, int kColumns, int kLeft, int kWidth>
__device__ __forceinline__ void multiply_accumulators(Accumulator<kRows, kColumns>& d, const Accumulator<kRows, kLeft>& left,
                                                      SharedTile<Element, kWidth> right, int n = 0) {
  multiply_operand(d, LeftOperand<Element, kRows, kLeft>(left), right, n);
}

// The left operand's rows are in shared memory: 16 * kRows of them from m on, k up to kDepth.
template <int kDepth, class Element, int kRows, int kColumns, int kWidthLeft, int kWidthRight>
__device__ __forceinline__ void multiply_rows_by_columns(Accumulator<kRows, kColumns>& d, SharedTile<Element, kWidthLeft> left,
                                                         int m, SharedTile<Element, kWidthRight> right, int n) {
  using F = Fragments<Element>;
  multiply_by_columns<kDepth / F::kDepth>(
      d, [&](typename F::Left& a, int i, int step) { F::left_rows(a, left, m + 16 * i, step * F::kDepth); }, right, n);
}

// The left operand's columns are in shared memory, left[k][m]: 16 * kRows of them from m on, k up to kDepth.
template <int kDepth, class Element, int kRows, int kColumns, int kWidthLeft, int kWidthRight>
__device__ __forceinline__ void multiply_columns(Accumulator<kRows, kColumns>& d, SharedTile<Element, kWidthLeft> left, int m,
                                                 SharedTile<Element, kWidthRight> right, int n) {
  using F = Fragments<Element>;
  multiply_by_columns<kDepth / F::kDepth>(
      d, [&](typename F::Left& a, int i, int step) { F::left_columns(a, left, m + 16 * i, step * F::kDepth); }, right, n);
}

}  // namespace flash_online::cuda
