// Attention on the CPU, forward, backward and merge. Scores exist a tile at a time (kQueries x kKeys), so that memory beyond
// the results is O(length). FlashAttention (arXiv 2205.14135), with the outer loops of FlashAttention-2 (arXiv 2307.08691).
//
// Compiled once an instruction set. Work items: forward, a tile of queries of one head; backward, the heads that share keys
// and values; mask gradient, a tile of the mask. An item writes its own results alone, so that they do not depend on threads.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "../core/mask.h"
#include "../core/philox.h"
#include "../core/visit.h"
#include "kernels.h"
#include "simd.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {
namespace {

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

template <class A>
struct SumOf {
  const A* x;
  FLASH_ONLINE_INLINE A operator()(A so_far, int64_t j) const { return so_far + x[j]; }
  FLASH_ONLINE_INLINE A join(A a, A b) const { return a + b; }
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
// grows with the score, into the relative one of a weight: where scores of float32 inputs are large, they are made in double, and
// stay in wide_score until the maximum has been subtracted. By query, so that a result does not depend on its neighbours.
template <class E, class A>
void compute_scores(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t begin,
                    int64_t count, const ScoreTile<A>& tile, A* score, A* slope) {
  constexpr bool kMayBeWide = std::is_same_v<E, float>;
  constexpr A kLarge = 16, kLowest = -std::numeric_limits<A>::infinity();
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
    if (!any) return;
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
}

// Multiplies by 0 or 1 / (1 - dropout), key by key from `begin`, a multiple of 4.
template <class A>
void drop(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t query, int64_t begin, int64_t count, A* x,
          A* y) {
  const Philox philox(problem.rng[0], problem.rng[1]);
  const uint64_t threshold = drop_threshold(problem.dropout);
  const A survivor = problem.dropout < 1 ? A(1) / static_cast<A>(1 - problem.dropout) : A(0);
  for (int64_t j = 0; j < count; j += 4) {
    uint32_t word[4];
    philox.words(problem.batch_begin + batch, head, query, (begin + j) / 4, word);
    for (int64_t l = 0; l < 4 && j + l < count; ++l) {
      const A factor = word[l] >= threshold ? survivor : A(0);
      x[j + l] *= factor;
      if (y) y[j + l] *= factor;
    }
  }
}

void dropout_mask(const DropoutProblem& problem, const Executor& executor) {
  const Philox philox(problem.rng[0], problem.rng[1]);
  const uint64_t threshold = drop_threshold(problem.dropout);
  for_each_item(executor, problem.batch * problem.heads * problem.queries, [&](int64_t row, std::byte*) {
    const int64_t plane = row / problem.queries, query = problem.query_begin + row % problem.queries;
    for (int64_t j = 0; j < problem.keys; j += 4) {
      uint32_t word[4];
      philox.words(plane / problem.heads, plane % problem.heads, query, j / 4, word);
      for (int64_t l = 0; l < 4 && j + l < problem.keys; ++l) problem.keep[row * problem.keys + j + l] = word[l] >= threshold;
    }
  });
}

int64_t tiles_of(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

// ---- forward ----

// The state of a query: its maximum is as wide as its scores may be.
template <class E>
using QueryState =
    OnlineSoftmax<Accumulator<E>, FastNatural, std::conditional_t<std::is_same_v<E, float>, double, Accumulator<E>>>;

template <class E, class A = Accumulator<E>>
struct ForwardScratch : ScoreTile<A> {
  A *value, *score, *out;
  QueryState<E>* state;

  ForwardScratch(const AttentionProblem& problem, Carver& carver) : ScoreTile<A>(problem, carver) {
    const int64_t value_width = padded(problem.value_width);
    value = carver.take<A>(kKeys * value_width);
    score = carver.take<A>(kQueries * kKeys);
    out = carver.take<A>(kQueries * value_width);
    state = carver.take<QueryState<E>>(kQueries);
  }
};

template <class E>
void forward_tile(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t first, std::byte* scratch) {
  using A = Accumulator<E>;
  Carver carver(scratch);
  const ForwardScratch<E> tile(problem, carver);
  const int64_t rows = std::min(kQueries, problem.queries - first), last = first + rows;
  const int64_t key_head = head / (problem.heads / problem.key_heads),
                value_head = head / (problem.heads / problem.value_heads);
  const int64_t value_width = padded(problem.value_width);

  load_rows<E>(problem.query, batch, head, first, rows, problem.width, tile.query);
  std::fill_n(tile.out, rows * value_width, A(0));
  for (int64_t i = 0; i < rows; ++i) {
    tile.state[i] = {};
    if (problem.sinks) tile.state[i].absorb(static_cast<const A*>(problem.sinks)[head]);
  }

  const KeyRange range = keys_of_any(problem.visible, first, last, problem.keys);
  for (int64_t begin = range.begin / kKeys * kKeys; begin < range.end; begin += kKeys) {
    const int64_t count = std::min(kKeys, problem.keys - begin);
    load_rows<E>(problem.key, batch, key_head, begin, count, problem.width, tile.key);
    transpose(tile.key, count, problem.width, tile.key_transposed);
    load_rows<E>(problem.value, batch, value_head, begin, count, problem.value_width, tile.value);

    compute_scores<E, A>(problem, batch, head, first, rows, begin, count, tile, tile.score, nullptr);
    for (int64_t i = 0; i < rows; ++i) {
      A* score = tile.score + i * kKeys;
      QueryState<E> state = tile.state[i];  // a copy: through the reference it might alias the scores, and no loop vectorise
      const A factor = state.raise(tile.block_max[i]);
      const OnlineSoftmax<A, FastNatural> narrow_state{static_cast<A>(state.max)};
      if (tile.is_wide[i])
        for (int64_t j = 0; j < padded(count); ++j) score[j] = state.weight(tile.wide_score[i * kKeys + j]);
      else if (narrow_state.max == state.max)  // the common case, and the faster loop
        for (int64_t j = 0; j < padded(count); ++j) score[j] = narrow_state.weight(score[j]);
      else
        for (int64_t j = 0; j < padded(count); ++j) score[j] = state.weight(score[j]);
      state.add(reduce(padded(count), A(0), SumOf<A>{score}));
      tile.state[i] = state;
      if (factor != A(1)) {
        A* out = tile.out + i * value_width;
        for (int64_t e = 0; e < value_width; ++e) out[e] *= factor;
      }
      if (problem.dropout > 0) drop<A>(problem, batch, head, first + i, begin, count, score, nullptr);
    }
    multiply(rows, value_width, count, tile.score, kKeys, 1, tile.value, value_width, tile.out, value_width);
  }

  const int64_t row = (batch * problem.heads + head) * problem.queries + first;
  for (int64_t i = 0; i < rows; ++i) {
    const A inverse = tile.state[i].inverse_sum_or_zero();
    A* out = tile.out + i * value_width;
    for (int64_t e = 0; e < value_width; ++e) out[e] *= inverse;
    static_cast<A*>(problem.lse)[row + i] = tile.state[i].lse();
    static_cast<A*>(problem.lse_low)[row + i] = tile.state[i].lse_low();
  }
  store_rows<E>(tile.out, problem.out, batch, head, first, rows, problem.value_width);
}

int64_t forward_scratch(const AttentionProblem& problem) {
  Carver carver(nullptr);
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) { ForwardScratch<E>(problem, carver); });
  return carver.used();
}

void forward(const AttentionProblem& problem, const Executor& executor) {
  const int64_t tiles = tiles_of(problem.queries, kQueries);
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) {
    for_each_item(executor, problem.batch * problem.heads * tiles, [&](int64_t item, std::byte* scratch) {
      // Late tiles first: under causal visibility they are the longest.
      const int64_t tile = tiles - 1 - item / (problem.batch * problem.heads), rest = item % (problem.batch * problem.heads);
      forward_tile<E>(problem, rest / problem.heads, rest % problem.heads, tile * kQueries, scratch);
    });
  });
}

// ---- backward ----

// The tiles that both backward passes recompute scores with.
template <class A>
struct GradientScratch : ScoreTile<A> {
  A *grad_out, *out, *value, *value_transposed, *weight, *grad_score, *slope, *delta;

  GradientScratch(const AttentionProblem& problem, Carver& carver) : ScoreTile<A>(problem, carver) {
    const int64_t value_width = padded(problem.value_width);
    grad_out = carver.take<A>(kQueries * value_width);
    out = carver.take<A>(kQueries * value_width);
    value = carver.take<A>(kKeys * value_width);
    value_transposed = carver.take<A>(problem.value_width * kKeys);
    weight = carver.take<A>(kQueries * kKeys);
    grad_score = carver.take<A>(kQueries * kKeys);
    slope = carver.take<A>(kQueries * kKeys);
    delta = carver.take<A>(kQueries);
  }
};

template <class E, class A>
void load_keys(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t begin, int64_t count,
               const GradientScratch<A>& tile) {
  load_rows<E>(problem.key, batch, head / (problem.heads / problem.key_heads), begin, count, problem.width, tile.key);
  transpose(tile.key, count, problem.width, tile.key_transposed);
  load_rows<E>(problem.value, batch, head / (problem.heads / problem.value_heads), begin, count, problem.value_width,
               tile.value);
  transpose(tile.value, count, problem.value_width, tile.value_transposed);
}

// Queries [first, first + rows) and the gradients of their results. delta is the part of a score's gradient that its whole row
// shares, the sum over keys of weight * grad_weight - grad_lse; see fill_delta.
template <class E, class A>
void load_queries(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t batch, int64_t head,
                  int64_t first, int64_t rows, const GradientScratch<A>& tile) {
  load_rows<E>(problem.query, batch, head, first, rows, problem.width, tile.query);
  load_rows<E>(gradients.grad_out, batch, head, first, rows, problem.value_width, tile.grad_out);
  std::copy_n(static_cast<const A*>(gradients.delta) + (batch * problem.heads + head) * problem.queries + first, rows,
              tile.delta);
}

// weight = the (dropped) attention weights of a tile; grad_score = the gradient of the scores that the exponential took, times,
// if `of_product`, that of query . key.
template <class E, class A>
void score_gradients(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t begin,
                     int64_t count, bool of_product, const GradientScratch<A>& tile) {
  const int64_t row = (batch * problem.heads + head) * problem.queries + first;
  compute_scores<E, A>(problem, batch, head, first, rows, begin, count, tile, tile.weight, tile.slope);
  std::fill_n(tile.grad_score, rows * kKeys, A(0));
  multiply(rows, padded(count), problem.value_width, tile.grad_out, padded(problem.value_width), 1, tile.value_transposed,
           kKeys, tile.grad_score, kKeys);
  for (int64_t i = 0; i < rows; ++i) {
    A *weight = tile.weight + i * kKeys, *grad = tile.grad_score + i * kKeys;
    const A lse = pivot(static_cast<const A*>(problem.lse)[row + i]), low = static_cast<const A*>(problem.lse_low)[row + i];
    // score - lse is exact where it matters, near 0; lse_low then restores what rounding took from lse.
    if (tile.is_wide[i])
      for (int64_t j = 0; j < padded(count); ++j)
        weight[j] = FastNatural::exp(static_cast<A>((tile.wide_score[i * kKeys + j] - lse) - low));
    else
      for (int64_t j = 0; j < padded(count); ++j) weight[j] = FastNatural::exp((weight[j] - lse) - low);
    const A delta = tile.delta[i];
    if (problem.dropout > 0) {
      A kept[kKeys];
      std::fill_n(kept, count, A(1));
      drop<A>(problem, batch, head, first + i, begin, count, kept, grad);
      for (int64_t j = 0; j < count; ++j) grad[j] = weight[j] * (grad[j] - delta);
      for (int64_t j = 0; j < count; ++j) weight[j] *= kept[j];
    } else {
      for (int64_t j = 0; j < padded(count); ++j) grad[j] = weight[j] * (grad[j] - delta);
    }
    if (!of_product) continue;
    const A scale = static_cast<A>(problem.scale);
    if (problem.softcap > 0)
      for (int64_t j = 0; j < count; ++j) grad[j] *= tile.slope[i * kKeys + j];
    for (int64_t j = 0; j < count; ++j) grad[j] *= scale;
  }
}

bool meet(const Visibility& visible, int64_t first, int64_t last, int64_t begin, int64_t end, int64_t keys) {
  const KeyRange range = keys_of_any(visible, first, last, keys);
  return range.begin < end && begin < range.end;
}

// delta of a tile of queries, by grad_out . out, which equals the sum over keys but for the rounding of out. The gradients of a
// mask and of sinks add up whole rows, where that rounding does not average out (the sum over a row's scores is 0 without
// sinks): for them the sum is taken over the keys themselves, two matrix products more.
template <class E>
void fill_delta(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t batch, int64_t head,
                int64_t first, std::byte* scratch) {
  using A = Accumulator<E>;
  Carver carver(scratch);
  const GradientScratch<A> tile(problem, carver);
  const int64_t rows = std::min(kQueries, problem.queries - first), value_width = padded(problem.value_width);
  const int64_t row = (batch * problem.heads + head) * problem.queries + first;
  A* delta = static_cast<A*>(gradients.delta) + row;
  for (int64_t i = 0; i < rows; ++i) delta[i] = A(0);
  if (gradients.grad_mask.data || gradients.grad_sinks) {
    load_queries<E>(problem, gradients, batch, head, first, rows, tile);
    const KeyRange range = keys_of_any(problem.visible, first, first + rows, problem.keys);
    for (int64_t begin = range.begin / kKeys * kKeys; begin < range.end; begin += kKeys) {
      const int64_t count = std::min(kKeys, problem.keys - begin);
      load_keys<E>(problem, batch, head, begin, count, tile);
      score_gradients<E, A>(problem, batch, head, first, rows, begin, count, false, tile);
      for (int64_t i = 0; i < rows; ++i) delta[i] += reduce(padded(count), A(0), SumOf<A>{tile.grad_score + i * kKeys});
    }
  } else {
    load_rows<E>(gradients.grad_out, batch, head, first, rows, problem.value_width, tile.grad_out);
    load_rows<E>(problem.out, batch, head, first, rows, problem.value_width, tile.out);
    // In the order of multiply(): where a query sees one key alone, delta is then the gradient of its weight to the last bit, and
    // their difference 0.
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t e = 0; e < value_width; ++e) delta[i] += tile.grad_out[i * value_width + e] * tile.out[i * value_width + e];
  }
  if (gradients.grad_lse)
    for (int64_t i = 0; i < rows; ++i) delta[i] -= static_cast<const A*>(gradients.grad_lse)[row + i];
}

// The heads that share keys or values form a group: one work item, which owns the gradients of its keys and values.
int64_t groups_of(const AttentionProblem& problem) { return std::gcd(problem.key_heads, problem.value_heads); }

template <class A>
struct BackwardScratch : GradientScratch<A> {
  A *grad_query, *grad_key, *grad_value;  // [queries, width] of a head; [heads of the group, keys, width]

  BackwardScratch(const AttentionProblem& problem, Carver& carver) : GradientScratch<A>(problem, carver) {
    const int64_t groups = groups_of(problem);
    grad_query = carver.take<A>(problem.queries * padded(problem.width));
    grad_key = carver.take<A>(problem.key_heads / groups * problem.keys * padded(problem.width));
    grad_value = carver.take<A>(problem.value_heads / groups * problem.keys * padded(problem.value_width));
  }
};

template <class E>
void backward_group(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t batch, int64_t group,
                    std::byte* scratch) {
  using A = Accumulator<E>;
  Carver carver(scratch);
  const BackwardScratch<A> tile(problem, carver);
  const int64_t groups = groups_of(problem), heads = problem.heads / groups;
  const int64_t key_heads = problem.key_heads / groups, value_heads = problem.value_heads / groups;
  const int64_t width = padded(problem.width), value_width = padded(problem.value_width);
  std::fill_n(tile.grad_key, key_heads * problem.keys * width, A(0));
  std::fill_n(tile.grad_value, value_heads * problem.keys * value_width, A(0));

  for (int64_t member = 0; member < heads; ++member) {
    const int64_t head = group * heads + member;
    A* grad_key = tile.grad_key + member / (heads / key_heads) * problem.keys * width;
    A* grad_value = tile.grad_value + member / (heads / value_heads) * problem.keys * value_width;
    std::fill_n(tile.grad_query, problem.queries * width, A(0));
    for (int64_t begin = 0; begin < problem.keys; begin += kKeys) {
      const int64_t count = std::min(kKeys, problem.keys - begin);
      load_keys<E>(problem, batch, head, begin, count, tile);
      for (int64_t first = 0; first < problem.queries; first += kQueries) {
        const int64_t rows = std::min(kQueries, problem.queries - first);
        if (!meet(problem.visible, first, first + rows, begin, begin + count, problem.keys)) continue;
        load_queries<E>(problem, gradients, batch, head, first, rows, tile);
        score_gradients<E, A>(problem, batch, head, first, rows, begin, count, true, tile);
        multiply(count, value_width, rows, tile.weight, 1, kKeys, tile.grad_out, value_width, grad_value + begin * value_width,
                 value_width);
        multiply(count, width, rows, tile.grad_score, 1, kKeys, tile.query, width, grad_key + begin * width, width);
        multiply(rows, width, count, tile.grad_score, kKeys, 1, tile.key, width, tile.grad_query + first * width, width);
      }
    }
    store_rows<E>(tile.grad_query, gradients.grad_query, batch, head, 0, problem.queries, problem.width);
  }
  for (int64_t h = 0; h < key_heads; ++h)
    store_rows<E>(tile.grad_key + h * problem.keys * width, gradients.grad_key, batch, group * key_heads + h, 0, problem.keys,
                  problem.width);
  for (int64_t h = 0; h < value_heads; ++h)
    store_rows<E>(tile.grad_value + h * problem.keys * value_width, gradients.grad_value, batch, group * value_heads + h, 0,
                  problem.keys, problem.value_width);
}

// A sink joins the denominator alone: its gradient is the sum over queries of exp(sink - lse) (grad_lse - grad_out . out).
template <class A>
void sink_gradient(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t batch, int64_t head) {
  const A sink = static_cast<const A*>(problem.sinks)[head];
  const int64_t row = (batch * problem.heads + head) * problem.queries;
  A sum = 0;
  for (int64_t i = row; i < row + problem.queries; ++i) {
    const A lse = pivot(static_cast<const A*>(problem.lse)[i]), low = static_cast<const A*>(problem.lse_low)[i];
    sum -= FastNatural::exp((sink - lse) - low) * static_cast<const A*>(gradients.delta)[i];
  }
  static_cast<A*>(gradients.grad_sinks)[batch * problem.heads + head] = sum;
}

// One tile of the mask's gradient: the gradients of all scores that its elements were added to, summed in registers' reach
// instead of in a tensor of all scores. Costs two matrix products more, needs no memory but the gradient itself.
template <class A>
struct MaskScratch : GradientScratch<A> {
  A* sum;

  MaskScratch(const AttentionProblem& problem, Carver& carver) : GradientScratch<A>(problem, carver) {
    sum = carver.take<A>(kQueries * kKeys);
  }
};

template <class E>
void mask_gradient_tile(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t mask_batch,
                        int64_t mask_head, int64_t first_tile, int64_t first_block, std::byte* scratch) {
  using A = Accumulator<E>;
  Carver carver(scratch);
  const MaskScratch<A> tile(problem, carver);
  const int64_t* size = gradients.mask_size;
  const bool every_batch = size[0] == 1, every_head = size[1] == 1, every_query = size[2] == 1, every_key = size[3] == 1;
  std::fill_n(tile.sum, kQueries * kKeys, A(0));

  for (int64_t batch = every_batch ? 0 : mask_batch; batch < (every_batch ? problem.batch : mask_batch + 1); ++batch)
    for (int64_t head = every_head ? 0 : mask_head; head < (every_head ? problem.heads : mask_head + 1); ++head)
      for (int64_t begin = every_key ? 0 : first_block * kKeys;
           begin < (every_key ? problem.keys : std::min(problem.keys, (first_block + 1) * kKeys)); begin += kKeys) {
        const int64_t count = std::min(kKeys, problem.keys - begin);
        load_keys<E>(problem, batch, head, begin, count, tile);
        for (int64_t first = every_query ? 0 : first_tile * kQueries;
             first < (every_query ? problem.queries : std::min(problem.queries, (first_tile + 1) * kQueries));
             first += kQueries) {
          const int64_t rows = std::min(kQueries, problem.queries - first);
          if (!meet(problem.visible, first, first + rows, begin, begin + count, problem.keys)) continue;
          load_queries<E>(problem, gradients, batch, head, first, rows, tile);
          score_gradients<E, A>(problem, batch, head, first, rows, begin, count, false, tile);
          for (int64_t i = 0; i < rows; ++i) {
            A* sum = tile.sum + (every_query ? 0 : i * kKeys);
            const A* grad = tile.grad_score + i * kKeys;
            if (every_key)
              sum[0] += reduce(padded(count), A(0), SumOf<A>{grad});
            else
              for (int64_t j = 0; j < count; ++j) sum[j] += grad[j];
          }
        }
      }

  const MutableView4& to = gradients.grad_mask;
  const int64_t rows = every_query ? 1 : std::min(kQueries, problem.queries - first_tile * kQueries);
  const int64_t columns = every_key ? 1 : std::min(kKeys, problem.keys - first_block * kKeys);
  visit_floating<Float16, BFloat16>(gradients.grad_mask_dtype, [&]<class M>(Type<M>) {
    M* base = static_cast<M*>(to.data) + mask_batch * to.stride[0] + mask_head * to.stride[1] +
              first_tile * kQueries * to.stride[2] + first_block * kKeys * to.stride[3];
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        M& element = base[i * to.stride[2] + j * to.stride[3]];
        const auto before = gradients.add_to_grad_mask ? widen(element) : Accumulator<M>(0);
        element = narrow<M>(before + static_cast<Accumulator<M>>(tile.sum[i * kKeys + j]));
      }
  });
}

int64_t backward_scratch(const AttentionProblem& problem) {
  int64_t bytes = 0;
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) {
    Carver backward(nullptr), mask(nullptr);
    BackwardScratch<Accumulator<E>>(problem, backward);
    MaskScratch<Accumulator<E>>(problem, mask);
    bytes = std::max(backward.used(), mask.used());
  });
  return bytes;
}

void backward(const AttentionProblem& problem, const AttentionGradients& gradients, const Executor& executor) {
  const int64_t groups = groups_of(problem), planes = problem.batch * problem.heads,
                query_tiles = tiles_of(problem.queries, kQueries);
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) {
    for_each_item(executor, planes * query_tiles, [&](int64_t item, std::byte* scratch) {
      const int64_t plane = item / query_tiles;
      fill_delta<E>(problem, gradients, plane / problem.heads, plane % problem.heads, item % query_tiles * kQueries, scratch);
    });
    for_each_item(executor, problem.batch * groups, [&](int64_t item, std::byte* scratch) {
      backward_group<E>(problem, gradients, item / groups, item % groups, scratch);
    });
    if (gradients.grad_sinks)
      for_each_item(executor, planes, [&](int64_t item, std::byte*) {
        sink_gradient<Accumulator<E>>(problem, gradients, item / problem.heads, item % problem.heads);
      });
    if (gradients.grad_mask.data) {
      const int64_t* size = gradients.mask_size;
      const int64_t tiles = size[2] == 1 ? 1 : tiles_of(size[2], kQueries),
                    blocks = size[3] == 1 ? 1 : tiles_of(size[3], kKeys);
      for_each_item(executor, size[0] * size[1] * tiles * blocks, [&](int64_t item, std::byte* scratch) {
        const int64_t plane = item / (tiles * blocks), rest = item % (tiles * blocks);
        mask_gradient_tile<E>(problem, gradients, plane / size[1], plane % size[1], rest / blocks, rest % blocks, scratch);
      });
    }
  });
}

// ---- merge ----

// The state whose weight(lse_n) * inverse_sum_or_zero() is what part n's row counts for in the merged row.
template <class A>
FLASH_ONLINE_INLINE Softmax<A> state_of(const MergeProblem& problem, int64_t row) {
  Softmax<A> state;
  for (int64_t n = 0; n < problem.parts; ++n) state.absorb(static_cast<const A*>(problem.part[n].lse)[row]);
  return state;
}

void merge(const MergeProblem& problem, const Executor& executor) {
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) {
    using A = Accumulator<E>;
    for_each_item(executor, problem.rows, [&](int64_t row, std::byte*) {
      const Softmax<A> state = state_of<A>(problem, row);
      const A inverse = state.inverse_sum_or_zero();
      static_cast<A*>(problem.lse)[row] = state.lse();
      for (int64_t e = 0; e < problem.width; ++e) {
        A sum = 0;
        for (int64_t n = 0; n < problem.parts; ++n) {
          const MergePart& part = problem.part[n];
          const A share = state.weight(static_cast<const A*>(part.lse)[row]) * inverse;
          // An empty part counts for nothing, whatever its row holds.
          const A value =
              static_cast<A>(widen(static_cast<const E*>(part.out)[row * part.row_stride + e * part.column_stride]));
          if (share != A(0)) sum += share * value;
        }
        static_cast<E*>(problem.out)[row * problem.width + e] = narrow<E>(sum);
      }
    });
  });
}

// out = sum of s_n out_n, lse = log of the sum of exp(lse_n), s_n = exp(lse_n - lse): grad_out_n = s_n grad_out and
// grad_lse_n = s_n (grad_out . (out_n - out) + grad_lse).
void merge_backward(const MergeProblem& problem, const MergeGradients& gradients, const Executor& executor) {
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) {
    using A = Accumulator<E>;
    for_each_item(executor, problem.rows, [&](int64_t row, std::byte*) {
      const Softmax<A> state = state_of<A>(problem, row);
      const auto share_of = [&, inverse = state.inverse_sum_or_zero()](const MergePart& part) {
        return state.weight(static_cast<const A*>(part.lse)[row]) * inverse;
      };
      const E* grad_out = static_cast<const E*>(gradients.grad_out) + row * problem.width;
      const auto product = [&](const MergePart& part) {
        A sum = 0;
        for (int64_t e = 0; e < problem.width; ++e)
          sum += static_cast<A>(widen(grad_out[e])) *
                 static_cast<A>(widen(static_cast<const E*>(part.out)[row * part.row_stride + e * part.column_stride]));
        return sum;
      };
      A whole = 0;  // grad_out . out
      for (int64_t n = 0; n < problem.parts; ++n) {
        const A share = share_of(problem.part[n]);
        if (share != A(0)) whole += share * product(problem.part[n]);
      }
      for (int64_t n = 0; n < problem.parts; ++n) {
        const MergePart& part = problem.part[n];
        const A share = share_of(part);
        for (int64_t e = 0; e < problem.width; ++e)
          static_cast<E*>(part.grad_out)[row * problem.width + e] =
              narrow<E>(share != A(0) ? share * static_cast<A>(widen(grad_out[e])) : A(0));
        static_cast<A*>(part.grad_lse)[row] =
            share != A(0) ? share * (product(part) - whole + static_cast<const A*>(gradients.grad_lse)[row]) : A(0);
      }
    });
  });
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {
    .forward_scratch = forward_scratch,
    .backward_scratch = backward_scratch,
    .forward = forward,
    .backward = backward,
    .dropout_mask = dropout_mask,
    .merge = merge,
    .merge_backward = merge_backward,
};

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
