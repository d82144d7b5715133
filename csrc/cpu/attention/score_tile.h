// What attention's passes share: scratch, tiles of the inputs, and the scores of a tile, forward and backward the same to the
// last bit.
//
// A tile of scores is [keys, queries]: the queries are the lanes of its vectors, so that a maximum, a sum and a rescaling are
// vector by vector, and keys and values enter the products as they lie in memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "../../core/mask.h"
#include "../../core/philox.h"
#include "../../core/visit.h"
#include "../executor.h"
#include "../simd.h"
#include "layout.h"
#include "mask_tile.h"
#include "matmul.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

// Hands out pieces of scratch; over a null base it only counts bytes.
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
  bool counts() const { return base_ == nullptr; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

// Keys or values of one head as rows that a product takes: in the tensor itself where it can be, else a copy.
template <class F>
struct RowsOf {
  const F* data;
  int64_t pitch;
};

// The pitch of rows of a width, as products read them.
template <class F>
constexpr int64_t pitch_of(int64_t width) {
  return round_up(width, kDepthStep<F>);
}

// Whether a product can take rows of the tensor where they lie.
template <class E>
bool lies_as_rows(const ConstView4& view, int64_t rows, int64_t width) {
  using F = Factor<E>;
  return std::is_same_v<E, F> && view.stride[3] == 1 && width % kDepthStep<F> == 0 && rows % kRowStep<F> == 0 &&
         (!kPaired<F> || view.stride[2] % 2 == 0);
}

// Rows [first, first + rows) of a head, copied only if they must be; `copy` holds round_up(rows, kRowStep) of them.
template <class E>
RowsOf<Factor<E>> rows_of(const ConstView4& view, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t width,
                          Factor<E>* copy) {
  using F = Factor<E>;
  const auto from = matrix_of<E>(view, batch, head, first);
  if constexpr (std::is_same_v<E, F>)
    if (lies_as_rows<E>(view, rows, width)) return {from.data, from.row_stride};
  const int64_t pitch = pitch_of<F>(width);
  load_rows<E>(from, rows, width, copy, round_up(rows, kRowStep<F>), pitch);
  return {copy, pitch};
}

// Rows of a head as the right factor of a product, to[pitch_of(width), kQueries]: the queries in the lanes. `rows_copy`, of
// kQueries rows, is for pairs alone.
template <class E>
void load_lanes(const ConstView4& view, const QueryTile& query, int64_t width, Factor<E>* to, Factor<E>* rows_copy) {
  using F = Factor<E>;
  const auto from = matrix_of<E>(view, query.batch, query.head, query.first);
  if constexpr (kPaired<F>) {
    load_rows<E>(from, query.rows, width, rows_copy, query.columns, pitch_of<F>(width));
    pair_columns(rows_copy, query.columns, pitch_of<F>(width), to, kQueries);
  } else {
    load_columns<E>(from, query.rows, width, to, kQueries);
  }
}

// What the scores of a tile are made from, and they.
template <class E>
struct ScoreTile {
  using A = Accumulator<E>;
  using F = Factor<E>;
  static constexpr bool kMayBeWide = std::is_same_v<E, float>;
  // The last digit of a score is lost on 16-bit inputs: they may leave its scaling to the exponential.
  static constexpr bool kScalesLate = sizeof(E) == 2;

  F *query, *rows_copy;   // [pitch_of(width), kQueries]; for load_lanes
  A* score;               // [kKeys, kQueries]
  A* block_max;           // [kQueries], of a query's finished scores in this block of keys, unless they are wide
  MaskTile<A> mask;
  A late_scale = 1;       // what the scores have still to be multiplied by
  bool* is_wide;          // [kQueries], whether wide_score holds a query's scores instead
  double *wide_query, *wide_key, *wide_score,
      *wide_block_max;  // [width, kQueries], [kKeys, width], [kKeys, kQueries], [kQueries]

  ScoreTile(const AttentionProblem& problem, Carver& carver) {
    query = carver.take<F>(pitch_of<F>(problem.head_dim) * kQueries);
    rows_copy = carver.take<F>(kPaired<F> ? kQueries * pitch_of<F>(std::max(problem.head_dim, problem.head_dim_v)) : 0);
    score = carver.take<A>(kKeys * kQueries);
    block_max = carver.take<A>(kQueries);
    mask.seen = carver.take<uint64_t>(kKeys);
    const bool biased = problem.mask.data && problem.mask_dtype != DType::kBool;
    mask.bias = carver.take<A>(biased ? kKeys * kQueries : 0);
    is_wide = carver.take<bool>(kQueries);
    wide_query = carver.take<double>(kMayBeWide ? problem.head_dim * kQueries : 0);
    wide_key = carver.take<double>(kMayBeWide ? problem.head_dim * kKeys : 0);
    wide_score = carver.take<double>(kMayBeWide ? kKeys * kQueries : 0);
    wide_block_max = carver.take<double>(kMayBeWide ? kQueries : 0);
  }
};

// Calls f(vector, key, lane) for every vector of a tile, a column of vectors at a time, and stores what it returns.
template <class T, class F>
FLASH_ONLINE_INLINE void for_each_vector(T* tile, int64_t count, int64_t columns, const F& f) {
  for (int64_t l = 0; l < columns; l += kLanes<T>)
    for (int64_t k = 0; k < count; ++k) store_vector(tile + k * kQueries + l, f(load_vector(tile + k * kQueries + l), k, l));
}

// tanh, within 2 ulp: odd polynomial near 0 (the minimax of Cephes' tanhf), by an exponential elsewhere.
FLASH_ONLINE_INLINE Vector<float> hyperbolic_tangent(Vector<float> x) {
  const Vector<float> size = x < 0.f ? -x : x, bounded = size > 20.f ? broadcast(20.f) : size, square = x * x;
  Vector<float> p = -5.70498872745e-3f * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vector<float> far = 1.f - 2.f / (FastNatural::exp(bounded + bounded) + 1.f);
  return size < 0.625f ? p * square * x + x : (x < 0.f ? -far : far);
}
FLASH_ONLINE_INLINE Vector<double> hyperbolic_tangent(Vector<double> x) {
  for (int l = 0; l < kLanes<double>; ++l) x[l] = std::tanh(x[l]);
  return x;
}

// A tile's scores, in place, from scale * query . key to what the exponential takes; hidden ones become -inf. With a softcap,
// `slope` (if any) receives its derivative, for all queries or the chosen ones.
template <class A, class Score>
void finish_scores(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count,
                   const MaskTile<A>& mask, Score* score, A* slope, const bool* chosen = nullptr) {
  if (problem.softcap > 0) {
    const Score cap = static_cast<Score>(problem.softcap);
    for_each_vector(score, count, query.columns, [&](Vector<Score> x, int64_t k, int64_t l) {
      const Vector<Score> bent = hyperbolic_tangent(x / cap);
      if (slope)
        for (int i = 0; i < kLanes<Score>; ++i)
          if (!chosen || chosen[l + i]) slope[k * kQueries + l + i] = static_cast<A>(1 - bent[i] * bent[i]);
      return cap * bent;
    });
  }
  if (problem.alibi_slopes) {
    const Score steepness = static_cast<const A*>(
        problem.alibi_slopes)[query.batch * problem.alibi_stride[0] + query.head * problem.alibi_stride[1]];
    const int64_t ahead = query.first + problem.visible.offset - begin;  // of the first query, beyond the first key
    Vector<Score> lane;
    for (int i = 0; i < kLanes<Score>; ++i) lane[i] = static_cast<Score>(i);
    for_each_vector(score, count, query.columns, [&](Vector<Score> x, int64_t k, int64_t l) {
      const Vector<Score> distance = lane + static_cast<Score>(ahead + l - k);
      return x - steepness * (distance < 0 ? -distance : distance);
    });
  }
  if (mask.biased)
    for_each_vector(score, count, query.columns, [&](Vector<Score> x, int64_t k, int64_t l) {
      const A* bias = mask.bias + k * kQueries + l;
      if constexpr (std::is_same_v<A, Score>)
        x += load_vector(bias);
      else
        for (int i = 0; i < kLanes<Score>; ++i) x[i] += bias[i];
      return x;
    });
  if (mask.hides)
    for_each_vector(score, count, query.columns,
                    [&](Vector<Score> x, int64_t k, int64_t l) { return hide<Score>(x, mask.seen[k] >> l); });
}

template <class T>
FLASH_ONLINE_INLINE Vector<T> largest_of(Vector<T> a, Vector<T> b) {
  if constexpr (std::is_same_v<T, float>)
    return largest(b, a);
  else
    return maximum(a, b);
}

// The largest of each query's scores, times `scale`.
template <class Score, class A>
FLASH_ONLINE_INLINE void maxima(const Score* score, int64_t count, int64_t columns, A* block_max, Score scale = 1) {
  for (int64_t l = 0; l < columns; l += kLanes<Score>) {
    Vector<Score> most[4];  // four, so that none waits for its own last step
    for (auto& x : most) x = lowest<Vector<Score>>();
    int64_t k = 0;
    for (; k + 4 <= count; k += 4)
      for (int64_t i = 0; i < 4; ++i) most[i] = largest_of<Score>(most[i], load_vector(score + (k + i) * kQueries + l) * scale);
    for (; k < count; ++k) most[0] = largest_of<Score>(most[0], load_vector(score + k * kQueries + l) * scale);
    const Vector<Score> all = largest_of<Score>(largest_of<Score>(most[0], most[1]), largest_of<Score>(most[2], most[3]));
    for (int i = 0; i < kLanes<Score>; ++i) block_max[l + i] = static_cast<A>(all[i]);
  }
}

// A tile's finished scores and their maxima, for keys [begin, begin + count), whose rows are `key`, after load_mask. The
// exponential turns the absolute error of a score, which grows with the score, into the relative one of a weight: where scores
// of float inputs are large, they are made in double, and stay in wide_score until the maximum has been subtracted. By query,
// so that a result does not depend on its neighbours. Returns whether any query's are.
template <class E, class A = Accumulator<E>, class F = Factor<E>>
bool compute_scores(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count, RowsOf<F> key,
                    ScoreTile<E>& tile, const A* reference, A* slope) {
  constexpr A kLarge = 8;
  const bool plain = problem.softcap <= 0 && !problem.alibi_slopes && !tile.mask.biased && !tile.mask.hides;
  const A scale = static_cast<A>(problem.scale);
  product(Into::kReplace, round_up(count, kRowStep<F>), query.columns, pitch_of<F>(problem.head_dim), key.data, key.pitch, 1,
          tile.query, kQueries, tile.score, kQueries);

  if constexpr (ScoreTile<E>::kScalesLate) {
    tile.late_scale = plain ? scale : A(1);
    if (plain) {
      maxima(tile.score, count, query.columns, tile.block_max, scale);
      return false;
    }
  }
  A most[kQueries], least[kQueries];  // of the products alone
  for (int64_t l = 0; l < query.columns; l += kLanes<A>) {
    Vector<A> high = lowest<Vector<A>>(), low = high;
    A* score = tile.score + l;
    for (int64_t k = 0; k < count; ++k, score += kQueries) {
      // Stored before anything is subtracted: contracted into one operation, the same score would round differently elsewhere.
      const Vector<A> scaled = load_vector(score) * scale;
      high = largest_of<A>(high, scaled);
      if constexpr (ScoreTile<E>::kMayBeWide) low = largest_of<A>(low, -scaled);
      store_vector(score, scaled);
    }
    store_vector(most + l, high);
    if constexpr (ScoreTile<E>::kMayBeWide) store_vector(least + l, low);
  }
  if (plain) {
    std::copy_n(most, query.columns, tile.block_max);
  } else {
    finish_scores<A>(problem, query, begin, count, tile.mask, tile.score, slope);
    maxima(tile.score, count, query.columns, tile.block_max);
  }

  bool any = false;
  if constexpr (ScoreTile<E>::kMayBeWide) {
    A weight[kQueries];  // the block's largest
    for (int64_t l = 0; l < query.columns; l += kLanes<A>) {
      const Vector<A> above = load_vector(tile.block_max + l) - load_vector(reference + l);
      store_vector(weight + l, FastNatural::exp(above < 0 ? above : Vector<A>{}));
    }
    for (int64_t i = 0; i < query.columns; ++i) {
      const A largest = most[i] > least[i] ? most[i] : least[i], top = std::abs(tile.block_max[i]);
      // A score that overflows float is infinite, as in torch, and not a large one.
      const bool large = (largest * weight[i] > kLarge) | ((top * weight[i] > kLarge) & (top < -lowest<A>()));
      tile.is_wide[i] = large & (largest < -lowest<A>()) & (i < query.rows);
      any |= tile.is_wide[i];
    }
    if (!any) return false;
    for (int64_t i = 0; i < problem.head_dim * kQueries; ++i) tile.wide_query[i] = tile.query[i];
    load_rows<A>(Matrix<const A>{key.data, key.pitch, 1}, count, problem.head_dim, tile.wide_key, count, problem.head_dim);
    product(Into::kReplace, count, query.columns, problem.head_dim, tile.wide_key, problem.head_dim, 1, tile.wide_query,
            kQueries, tile.wide_score, kQueries);
    for_each_vector(tile.wide_score, count, query.columns,
                    [&](Vector<double> x, int64_t, int64_t) { return x * problem.scale; });
    finish_scores<A>(problem, query, begin, count, tile.mask, tile.wide_score, slope, tile.is_wide);
    maxima(tile.wide_score, count, query.columns, tile.wide_block_max);
  }
  return any;
}

// Moves the scores of query i, if they are wide, into the tile's scores, less what the exponential would subtract.
template <class E>
void settle_scores(int64_t i, int64_t count, const ScoreTile<E>& tile, double subtract) {
  for (int64_t k = 0; k < count; ++k) {
    const int64_t place = k * kQueries + i;
    tile.score[place] = static_cast<Accumulator<E>>((tile.is_wide[i] ? tile.wide_score[place] : tile.score[place]) - subtract);
  }
}

// factor[count, kQueries] = 0 where dropout drops the key's weight, 1 / (1 - dropout) where it does not. begin is a multiple of
// Philox::kKeys, which share a draw; as many may be written behind the last.
template <class A>
__attribute__((noinline)) void draw_dropout(const AttentionProblem& problem, const QueryTile& query, int64_t begin,
                                            int64_t count, A* factor) {
  const Philox philox(problem.rng[0], problem.rng[1]);
  const uint32_t threshold = drop_threshold(problem.dropout);
  const int64_t batch = problem.batch_begin + query.batch;
  Philox::OfQuery of_query[kQueries];
  for (int64_t i = 0; i < query.columns; ++i) of_query[i] = philox.of_query(batch, query.head, query.first + i);
  const A survivor = problem.dropout < 1 ? A(1) / static_cast<A>(1 - problem.dropout) : A(0);
  for (int64_t k = 0; k < count; k += Philox::kKeys) {
    const Philox::OfGroup group = philox.of_group(batch, query.head, (begin + k) / Philox::kKeys);
    for (int64_t i = 0; i < query.columns; ++i) {
      unsigned kept = 0;
      philox.add_kept(of_query[i], group, threshold, 0, kept);
      for (int64_t j = 0; j < Philox::kKeys; ++j) factor[(k + j) * kQueries + i] = kept >> j & 1 ? survivor : A(0);
    }
  }
}

inline int64_t tiles_of(int64_t length, int64_t tile) { return (length + tile - 1) / tile; }

// Calls f(begin, count) for the blocks of the keys [range.begin, range.end) within [first, last), which are cut at multiples of
// kKeys: the block of the key `near` and those before it, backwards, then those after it.
template <class F>
FLASH_ONLINE_INLINE void for_each_block(KeyRange range, int64_t first, int64_t last, int64_t near, const F& f) {
  const int64_t begin = std::max(range.begin / kKeyStep * kKeyStep, first), end = std::min(range.end, last);
  if (begin >= end) return;
  const auto block = [&](int64_t n) {
    const int64_t from = std::max(n * kKeys, begin);
    f(from, std::min((n + 1) * kKeys, end) - from);
  };
  const int64_t start = std::clamp(near, begin, end - 1) / kKeys;
  for (int64_t n = start; n >= begin / kKeys; --n) block(n);
  for (int64_t n = start + 1; n <= (end - 1) / kKeys; ++n) block(n);
}

// The kernels of attention_backward.cpp and merge.cpp, which attention.cpp puts into the table of the instruction set.
Memory backward_memory(const AttentionProblem& problem, const AttentionGradients& gradients);
void backward(const AttentionProblem& problem, const AttentionGradients& gradients, const Executor& executor);
void merge(const MergeProblem& problem, const Executor& executor);
void merge_backward(const MergeProblem& problem, const MergeGradients& gradients, const Executor& executor);

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
