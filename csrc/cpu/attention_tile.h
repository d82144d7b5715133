// What attention's passes share: scratch, tiles of the inputs, and the scores of a tile, forward and backward the same to the
// last bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../core/mask.h"
#include "../core/philox.h"
#include "../core/visit.h"
#include "executor.h"
#include "simd.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

constexpr int64_t kQueries = 64, kKeys = 64;
constexpr int64_t kPartial = 16;  // sums and maxima run in this many lanes in every instruction set

// Hands out pieces of a worker's scratch; over a null base it only counts bytes.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

template <class A, class F>
FLASH_ONLINE_INLINE A reduce(int64_t count, A start, const F& step) {
  A lane[kPartial];
  for (int64_t l = 0; l < kPartial; ++l) lane[l] = start;
  for (int64_t j = 0; j < count; j += kPartial)
    for (int64_t l = 0; l < kPartial; ++l) lane[l] = step(lane[l], j + l);
  for (int64_t width = kPartial / 2; width > 0; width /= 2)
    for (int64_t l = 0; l < width; ++l) lane[l] = step.join(lane[l], lane[l + width]);
  return lane[0];
}

template <class A>
struct MaximumOf {
  const A* x;
  FLASH_ONLINE_INLINE A operator()(A so_far, int64_t j) const { return maximum(so_far, x[j]); }
  FLASH_ONLINE_INLINE A join(A a, A b) const { return maximum(a, b); }
};

template <class A>
struct MagnitudeOf {
  const A* x;
  FLASH_ONLINE_INLINE A operator()(A so_far, int64_t j) const { return maximum(so_far, x[j] < 0 ? -x[j] : x[j]); }
  FLASH_ONLINE_INLINE A join(A a, A b) const { return maximum(a, b); }
};

template <class Sum, class A = Sum>
struct SumOf {
  const A* x;
  FLASH_ONLINE_INLINE Sum operator()(Sum so_far, int64_t j) const { return so_far + x[j]; }
  FLASH_ONLINE_INLINE Sum join(Sum a, Sum b) const { return a + b; }
};

// tile[rows, padded(columns)] = a piece of a matrix, widened; 0 in the padding.
template <class E, class A, class Pointer>
void load_rows(const View4<Pointer>& view, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t columns, A* tile) {
  const E* base = static_cast<const E*>(view.data) + batch * view.stride[0] + head * view.stride[1] + first * view.stride[2];
  const int64_t pitch = padded(columns);
  for (int64_t i = 0; i < rows; ++i) {
    const E* row = base + i * view.stride[2];
    A* to = tile + i * pitch;
    if (view.stride[3] == 1)
      for (int64_t e = 0; e < columns; ++e) to[e] = widen(row[e]);
    else
      for (int64_t e = 0; e < columns; ++e) to[e] = widen(row[e * view.stride[3]]);
    for (int64_t e = columns; e < pitch; ++e) to[e] = A(0);
  }
}

// tile[columns, kKeys] = the transpose of tile[rows, padded(columns)], rows <= kKeys; 0 in the padding.
template <class A>
void transpose(const A* from, int64_t rows, int64_t columns, A* to) {
  const int64_t pitch = padded(columns), used = padded(rows);
  for (int64_t e = 0; e < columns; ++e) {
    for (int64_t j = 0; j < rows; ++j) to[e * kKeys + j] = from[j * pitch + e];
    for (int64_t j = rows; j < used; ++j) to[e * kKeys + j] = A(0);
  }
}

template <class E, class A>
void store_rows(const A* tile, const MutableView4& view, int64_t batch, int64_t head, int64_t first, int64_t rows,
                int64_t columns) {
  E* base = static_cast<E*>(view.data) + batch * view.stride[0] + head * view.stride[1] + first * view.stride[2];
  const int64_t pitch = padded(columns);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t e = 0; e < columns; ++e) base[i * view.stride[2] + e * view.stride[3]] = narrow<E>(tile[i * pitch + e]);
}

// What the scores of a tile are made from.
template <class A>
struct ScoreTile {
  A *query, *key, *key_transposed;  // [kQueries, width], [kKeys, width], [width, kKeys]
  double* block_max;                // [kQueries], of a query's finished scores in this block of keys
  bool* is_wide;                    // [kQueries], whether wide_score holds them instead
  double *wide_query, *wide_key_transposed, *wide_score;

  ScoreTile(const AttentionProblem& problem, Carver& carver) {
    const int64_t width = padded(problem.width);
    query = carver.take<A>(kQueries * width);
    key = carver.take<A>(kKeys * width);
    key_transposed = carver.take<A>(problem.width * kKeys);
    block_max = carver.take<double>(kQueries);
    is_wide = carver.take<bool>(kQueries);
    wide_query = carver.take<double>(problem.dtype == DType::kFloat32 ? kQueries * width : 0);
    wide_key_transposed = carver.take<double>(problem.dtype == DType::kFloat32 ? problem.width * kKeys : 0);
    wide_score = carver.take<double>(problem.dtype == DType::kFloat32 ? kQueries * kKeys : 0);
  }
};

// One query's scores over keys [begin, begin + count), in place from scale * query . key to what the exponential takes; -inf in
// the padding. With a softcap, `slope` (if any) receives its derivative.
template <class A, class Score>
void finish_scores(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t query, int64_t begin, int64_t count,
                   bool whole, Score* score, A* slope) {
  constexpr Score kHidden = -std::numeric_limits<Score>::infinity();
  if (problem.softcap > 0) {
    const Score cap = static_cast<Score>(problem.softcap);
    for (int64_t j = 0; j < count; ++j) {
      const Score bent = std::tanh(score[j] / cap);
      score[j] = cap * bent;
      if (slope) slope[j] = static_cast<A>(Score(1) - bent * bent);
    }
  }
  if (problem.alibi_slopes) {
    const Score steepness =
        static_cast<const A*>(problem.alibi_slopes)[batch * problem.alibi_stride[0] + head * problem.alibi_stride[1]];
    const int64_t position = query + problem.visible.offset;
    for (int64_t j = 0; j < count; ++j) score[j] -= steepness * static_cast<Score>(std::abs(position - (begin + j)));
  }
  if (problem.mask.data) {
    const int64_t* stride = problem.mask.stride;
    const int64_t start = batch * stride[0] + head * stride[1] + query * stride[2] + begin * stride[3], step = stride[3];
    if (problem.mask_dtype == DType::kBool) {
      const bool* take = static_cast<const bool*>(problem.mask.data) + start;
      for (int64_t j = 0; j < count; ++j) score[j] = take[j * step] ? score[j] : kHidden;
    } else {
      visit_floating<Float16, BFloat16>(problem.mask_dtype, [&]<class M>(Type<M>) {
        const M* bias = static_cast<const M*>(problem.mask.data) + start;
        for (int64_t j = 0; j < count; ++j) score[j] += static_cast<Score>(widen(bias[j * step]));
      });
    }
  }
  if (!whole) {
    const KeyRange sees = keys_of(problem.visible, query, problem.keys);
    for (int64_t j = 0; j < count; ++j) score[j] = begin + j >= sees.begin && begin + j < sees.end ? score[j] : kHidden;
  }
  for (int64_t j = count; j < padded(count); ++j) score[j] = kHidden;
}

// A tile's finished scores, score[rows, kKeys], and their maxima. The exponential turns the absolute error of a score, which
// grows with the score, into the relative one of a weight: where scores of float32 inputs are large, they are made in double,
// and stay in wide_score until the maximum has been subtracted. By query, so that a result does not depend on its neighbours.
// Returns whether any query's are.
template <class E, class A>
bool compute_scores(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t begin,
                    int64_t count, const ScoreTile<A>& tile, A* score, A* slope) {
  constexpr bool kMayBeWide = std::is_same_v<E, float>;
  constexpr A kLarge = 8, kLowest = -std::numeric_limits<A>::infinity();
  const bool whole = all_see(problem.visible, first, first + rows, begin, begin + count, problem.keys);
  const int64_t width = padded(problem.width), columns = padded(count);
  const A scale = static_cast<A>(problem.scale);
  std::fill_n(score, rows * kKeys, A(0));
  multiply(rows, columns, problem.width, tile.query, width, 1, tile.key_transposed, kKeys, score, kKeys);
  bool any = false;
  for (int64_t i = 0; i < rows; ++i) {
    A *row = score + i * kKeys, *row_slope = slope ? slope + i * kKeys : nullptr;
    for (int64_t j = 0; j < columns; ++j) row[j] *= scale;
    const A largest = kMayBeWide ? reduce(columns, A(0), MagnitudeOf<A>{row}) : A(0);
    finish_scores<A>(problem, batch, head, first + i, begin, count, whole, row, row_slope);
    tile.block_max[i] = reduce(columns, kLowest, MaximumOf<A>{row});
    // A score that overflows float32 is infinite, as in torch, and not a large one.
    const double top = std::abs(tile.block_max[i]);
    tile.is_wide[i] = kMayBeWide && (largest > kLarge || (top > kLarge && top < -kLowest)) && largest < -kLowest;
    any = any || tile.is_wide[i];
  }
  if constexpr (kMayBeWide) {
    if (!any) return false;
    std::copy_n(tile.query, rows * width, tile.wide_query);
    std::copy_n(tile.key_transposed, problem.width * kKeys, tile.wide_key_transposed);
    std::fill_n(tile.wide_score, rows * kKeys, 0.0);
    multiply(rows, columns, problem.width, tile.wide_query, width, 1, tile.wide_key_transposed, kKeys, tile.wide_score, kKeys);
    for (int64_t i = 0; i < rows; ++i) {
      if (!tile.is_wide[i]) continue;
      double* row = tile.wide_score + i * kKeys;
      for (int64_t j = 0; j < columns; ++j) row[j] *= problem.scale;
      finish_scores<A>(problem, batch, head, first + i, begin, count, whole, row, slope ? slope + i * kKeys : nullptr);
      tile.block_max[i] = reduce(columns, -std::numeric_limits<double>::infinity(), MaximumOf<double>{row});
    }
  }
  return any;
}

// Calls weight(j, kept) for the keys begin + j, 0 <= j < count, of a query; begin is a multiple of 4.
template <class Weight>
FLASH_ONLINE_INLINE void for_each_kept(const int64_t* rng, double dropout, int64_t batch, int64_t head, int64_t query,
                                       int64_t begin, int64_t count, const Weight& weight) {
  const Philox philox(rng[0], rng[1]);
  const uint64_t threshold = drop_threshold(dropout);
  for (int64_t j = 0; j < count; j += 4) {
    uint32_t word[4];
    philox.words(batch, head, query, (begin + j) / 4, word);
    for (int64_t l = 0; l < 4 && j + l < count; ++l) weight(j + l, word[l] >= threshold);
  }
}

// Multiplies a query's weights by 0 or 1 / (1 - dropout).
template <class A>
void drop(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t query, int64_t begin, int64_t count, A* x) {
  const A survivor = problem.dropout < 1 ? A(1) / static_cast<A>(1 - problem.dropout) : A(0);
  for_each_kept(problem.rng, problem.dropout, problem.batch_begin + batch, head, query, begin, count,
                [&](int64_t j, bool kept) { x[j] *= kept ? survivor : A(0); });
}

inline int64_t tiles_of(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

// The kernels of attention_backward.cpp and merge.cpp, which attention.cpp puts into the table of the instruction set.
int64_t backward_scratch(const AttentionProblem& problem);
void backward(const AttentionProblem& problem, const AttentionGradients& gradients, const Executor& executor);
void merge(const MergeProblem& problem, const Executor& executor);
void merge_backward(const MergeProblem& problem, const MergeGradients& gradients, const Executor& executor);

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
