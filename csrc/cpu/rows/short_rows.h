// Kernels for rows too short to fill a vector: each lane holds one row. Nothing is summed across lanes, and all lanes are busy
// however short the rows are and whatever their strides.
#pragma once

#include "row_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

constexpr int64_t kMaxShortClasses = 32;

// Kernels that move more than two tensors into and out of lanes set a lower `max_classes`: they gain only with fewer classes.
FLASH_ONLINE_INLINE bool is_short(const RowProblem& problem, int64_t max_classes = kMaxShortClasses) {
  return problem.classes > 0 && problem.classes <= max_classes;
}

// At most kLanes adjacent rows, along inner, or along outer where inner is 1.
struct RowBlock {
  int64_t outer, inner, first_row, rows;
};

// Loads the block's rows of a tensor, widened, one vector per class. Lanes without a row hold 0.
template <class E>
FLASH_ONLINE_INLINE void load_block(const RowProblem& problem, const ConstView3& view, const RowBlock& block,
                                    Vector<Accumulator<E>>* x) {
  constexpr int kWidth = kLanes<Accumulator<E>>;
  const int64_t row = row_stride(problem, view), step = view.stride[1];
  const E* from = static_cast<const E*>(view.data) + block.outer * view.stride[0] + block.inner * view.stride[2];
  if (row == 1 && block.rows == kWidth) {
    for (int64_t c = 0; c < problem.classes; ++c) x[c] = load_widened(from + c * step);
    return;
  }
  E staged[kMaxShortClasses * kWidth];
  if (step == 1 && block.rows == kWidth) {
    transpose(from, row, block.rows, problem.classes, staged, kWidth);
  } else {
    for (int64_t r = 0; r < block.rows; ++r)
      for (int64_t c = 0; c < problem.classes; ++c) staged[c * kWidth + r] = from[r * row + c * step];
    for (int64_t r = block.rows; r < kWidth; ++r)
      for (int64_t c = 0; c < problem.classes; ++c) staged[c * kWidth + r] = E{};
  }
  for (int64_t c = 0; c < problem.classes; ++c) x[c] = load_widened(staged + c * kWidth);
}

template <class E>
FLASH_ONLINE_INLINE void store_block(const RowProblem& problem, const MutableView3& view, const RowBlock& block,
                                     const Vector<Accumulator<E>>* x) {
  constexpr int kWidth = kLanes<Accumulator<E>>;
  const int64_t row = row_stride(problem, view), step = view.stride[1];
  E* to = static_cast<E*>(view.data) + block.outer * view.stride[0] + block.inner * view.stride[2];
  if (row == 1 && block.rows == kWidth) {
    for (int64_t c = 0; c < problem.classes; ++c) store_narrowed(to + c * step, x[c]);
    return;
  }
  E staged[kMaxShortClasses * kWidth];
  for (int64_t c = 0; c < problem.classes; ++c) store_narrowed(staged + c * kWidth, x[c]);
  if (step == 1 && block.rows == kWidth) return transpose(staged, kWidth, problem.classes, block.rows, to, row);
  for (int64_t r = 0; r < block.rows; ++r)
    for (int64_t c = 0; c < problem.classes; ++c) to[r * row + c * step] = staged[c * kWidth + r];
}

// Loads and stores arrays of row scalars, one per row of the problem.
template <class T>
FLASH_ONLINE_INLINE Vector<T> load_per_row(const void* array, const RowBlock& block) {
  Vector<T> x = {};
  __builtin_memcpy(&x, static_cast<const T*>(array) + block.first_row, block.rows * sizeof(T));
  return x;
}
template <class T>
FLASH_ONLINE_INLINE void store_per_row(void* array, const RowBlock& block, Vector<T> x) {
  __builtin_memcpy(static_cast<T*>(array) + block.first_row, &x, block.rows * sizeof(T));
}

// Returns the states of a block's rows, one per lane. If kKeep is set, the weights replace x.
template <class E, ExpAccuracy accuracy, bool kKeep>
FLASH_ONLINE_INLINE auto absorb_block(int64_t classes, Vector<Accumulator<E>>* x) {
  using T = Accumulator<E>;
  OnlineSoftmax<Vector<T>, BaseFor<T, E, accuracy>> state;
  for (int64_t c = 0; c < classes; ++c) state.max = vector_max(x[c], state.max);
  Vector<T> sum = {};
  for (int64_t c = 0; c < classes; ++c) {
    const Vector<T> weight = state.weight(x[c]);
    sum += weight;
    if (kKeep) x[c] = weight;
  }
  state.add(sum);
  return state;
}

// max + log(sum), or infinity where a row holds +inf and no NaN.
template <class T>
FLASH_ONLINE_INLINE Vector<T> lse_of(int64_t classes, const Vector<T>* x, Vector<T> max, const double* log_sum) {
  Vector<T> lse;
  for (int l = 0; l < kLanes<T>; ++l) {
    lse[l] = static_cast<T>(max[l] + log_sum[l]);
    if (max[l] != std::numeric_limits<T>::infinity()) continue;
    bool nan = false;
    for (int64_t c = 0; c < classes; ++c) nan |= x[c][l] != x[c][l];
    if (!nan) lse[l] = max[l];
  }
  return lse;
}

// Calls body(block) in parallel, for blocks that cover every row once.
template <class T, class Body>
FLASH_ONLINE_INLINE void for_each_row_block(const RowProblem& problem, const Executor& executor, const Body& body) {
  constexpr int64_t kWidth = kLanes<T>;
  const int64_t groups = problem.inner == 1 ? 1 : problem.outer, run = problem.inner == 1 ? problem.outer : problem.inner;
  const int64_t blocks_per_group = ceil_div(run, kWidth), blocks = groups * blocks_per_group;
  const int64_t blocks_per_item = ceil_div(row_grain(problem), kWidth * problem.classes);
  for_each_independent_item(executor, ceil_div(blocks, blocks_per_item), [&](int64_t item, std::byte*) {
    const int64_t first = item * blocks_per_item, last = first + blocks_per_item < blocks ? first + blocks_per_item : blocks;
    for (int64_t b = first; b < last; ++b) {
      const int64_t group = b / blocks_per_group, row = b % blocks_per_group * kWidth, left = run - row;
      RowBlock block{group, row, group * run + row, left < kWidth ? left : kWidth};
      if (problem.inner == 1) block.outer = row, block.inner = 0;
      body(block);
    }
  });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
