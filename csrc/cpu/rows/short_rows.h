// Rows too short to fill a vector: a row a lane, so that nothing is summed across lanes and the lanes are busy however short
// the rows are and however they lie in memory.
#pragma once

#include "row_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

constexpr int64_t kShort = 32;  // classes, at most

// A kernel with more than two tensors to move into lanes and out of them gains from fewer classes only.
FLASH_ONLINE_INLINE bool is_short(const RowProblem& problem, int64_t most = kShort) {
  return problem.classes > 0 && problem.classes <= most;
}

// A block of rows, `rows` <= kLanes of them side by side along inner, or along outer where inner is 1.
struct Block {
  int64_t outer, inner, number, rows;
};

// The block's rows of a tensor, widened, a vector for each class. Lanes without a row hold 0.
template <class E>
FLASH_ONLINE_INLINE void load_block(const RowProblem& problem, const ConstView3& view, const Block& block,
                                    Vector<Accumulator<E>>* x) {
  constexpr int kWidth = kLanes<Accumulator<E>>;
  const int64_t row = row_stride(problem, view), step = view.stride[1];
  const E* from = static_cast<const E*>(view.data) + block.outer * view.stride[0] + block.inner * view.stride[2];
  if (row == 1 && block.rows == kWidth) {
    for (int64_t c = 0; c < problem.classes; ++c) x[c] = load_widened(from + c * step);
    return;
  }
  E staged[kShort * kWidth];
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
FLASH_ONLINE_INLINE void store_block(const RowProblem& problem, const MutableView3& view, const Block& block,
                                     const Vector<Accumulator<E>>* x) {
  constexpr int kWidth = kLanes<Accumulator<E>>;
  const int64_t row = row_stride(problem, view), step = view.stride[1];
  E* to = static_cast<E*>(view.data) + block.outer * view.stride[0] + block.inner * view.stride[2];
  if (row == 1 && block.rows == kWidth) {
    for (int64_t c = 0; c < problem.classes; ++c) store_narrowed(to + c * step, x[c]);
    return;
  }
  E staged[kShort * kWidth];
  for (int64_t c = 0; c < problem.classes; ++c) store_narrowed(staged + c * kWidth, x[c]);
  if (step == 1 && block.rows == kWidth) return transpose(staged, kWidth, problem.classes, block.rows, to, row);
  for (int64_t r = 0; r < block.rows; ++r)
    for (int64_t c = 0; c < problem.classes; ++c) to[r * row + c * step] = staged[c * kWidth + r];
}

// One number a row, from an array that has one for every row of the problem.
template <class T>
FLASH_ONLINE_INLINE Vector<T> load_numbers(const void* numbers, const Block& block) {
  Vector<T> x = {};
  __builtin_memcpy(&x, static_cast<const T*>(numbers) + block.number, block.rows * sizeof(T));
  return x;
}
template <class T>
FLASH_ONLINE_INLINE void store_numbers(void* numbers, const Block& block, Vector<T> x) {
  __builtin_memcpy(static_cast<T*>(numbers) + block.number, &x, block.rows * sizeof(T));
}

// The base of exponentials for a use of the weights.
template <class T, class E, Weighing weighing>
struct BaseFor {
  using type = FastNatural;
};
#if defined(__AVX512F__)
template <class E>
struct BaseFor<float, E, Weighing::kSum> {
  using type = BriefNatural<sizeof(E) == 2 ? 5 : 6>;
};
template <class E>
struct BaseFor<float, E, Weighing::kRounded> {
  using type = BriefNatural<4>;
};
#endif

// (max, sum) of a block's rows, side by side. The weights replace x where they are to be kept.
template <class E, Weighing weighing, bool kKeep>
FLASH_ONLINE_INLINE auto absorb_block(int64_t classes, Vector<Accumulator<E>>* x) {
  using T = Accumulator<E>;
  OnlineSoftmax<Vector<T>, typename BaseFor<T, E, weighing>::type> state;
  for (int64_t c = 0; c < classes; ++c) state.max = largest(x[c], state.max);
  Vector<T> sum = {};
  for (int64_t c = 0; c < classes; ++c) {
    const Vector<T> weight = state.weight(x[c]);
    sum += weight;
    if (kKeep) x[c] = weight;
  }
  state.add(sum);
  return state;
}

// log(2^n m) = n log 2 + 2 atanh((m - 1) / (m + 1)) with m from sqrt(1/2) to sqrt(2), within 1e-11; for finite x >= 1.
FLASH_ONLINE_INLINE Vector<double> log_of_sum(Vector<double> x) {
  using Words = Vector<uint64_t>;
  constexpr uint64_t kRootOfHalf = 0x3fe6a09e667f3bcd, kTwoTo52 = 0x4330000000000000;  // as bits of a double
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

// The logarithm of each lane of the rows' sums.
template <class T>
FLASH_ONLINE_INLINE void log_sums(Vector<T> sum, double* logs) {
  if constexpr (std::is_same_v<T, float>) {
    const auto known = (sum >= 1.f) & (sum < std::numeric_limits<float>::infinity());
    if (reduce(known, [](auto a, auto b) __attribute__((always_inline)) { return a & b; }) != 0) {
      store_vector(logs, log_of_sum(WideSum::half<0>(sum)));
      store_vector(logs + kLanes<double>, log_of_sum(WideSum::half<1>(sum)));
      return;
    }
  }
  for (int l = 0; l < kLanes<T>; ++l) logs[l] = FastNatural::log(static_cast<double>(sum[l]));
}

// max + log(sum), and infinity where a row holds +inf and no NaN.
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

// Calls body(block) for blocks that cover every row once, in parallel.
template <class T, class Body>
FLASH_ONLINE_INLINE void for_each_block(const RowProblem& problem, const Executor& executor, const Body& body) {
  constexpr int64_t kWidth = kLanes<T>;
  const int64_t groups = problem.inner == 1 ? 1 : problem.outer, run = problem.inner == 1 ? problem.outer : problem.inner;
  const int64_t blocks_a_group = (run + kWidth - 1) / kWidth, blocks = groups * blocks_a_group;
  const int64_t blocks_an_item = (kRowGrain + kWidth * problem.classes - 1) / (kWidth * problem.classes);
  for_each_item(executor, (blocks + blocks_an_item - 1) / blocks_an_item, [&](int64_t item, std::byte*) {
    const int64_t first = item * blocks_an_item, last = first + blocks_an_item < blocks ? first + blocks_an_item : blocks;
    for (int64_t b = first; b < last; ++b) {
      const int64_t group = b / blocks_a_group, row = b % blocks_a_group * kWidth, left = run - row;
      Block block{group, row, group * run + row, left < kWidth ? left : kWidth};
      if (problem.inner == 1) block.outer = row, block.inner = 0;
      body(block);
    }
  });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
