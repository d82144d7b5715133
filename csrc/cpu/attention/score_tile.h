// Code shared by all passes of attention: scratch, tiles of the inputs, and the scores of a tile, which are equal to the last
// bit in the forward and the backward pass.
//
// A tile of scores is [keys, queries]. The queries are in the lanes of vectors, so that maxima, sums and rescaling work vector
// by vector, and the matmuls read keys and values in their memory layout.
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
#include "score_mod.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

// Keys or values of one head as a matmul's left operand: in the tensor itself where possible, else in a copy.
template <class F>
struct RowMatrix {
  const F* data;
  int64_t pitch;
};

// The pitch of a left operand's rows, padded to whole steps of a matmul's depth.
template <class F>
constexpr int64_t operand_pitch(int64_t head_dim) {
  return round_up(head_dim, kDepthStep<F>);
}

// Returns whether a matmul can read rows of the tensor in place.
template <class E>
bool is_usable_in_place(const ConstView4& view, int64_t rows, int64_t head_dim) {
  using F = Operand<E>;
  return std::is_same_v<E, F> && view.stride[3] == 1 && head_dim % kDepthStep<F> == 0 && rows % kRowStep<F> == 0 &&
         (!kPaired<F> || view.stride[2] % 2 == 0);
}

// Rows [first, first + rows) of a head, copied only where necessary; `copy` has room for round_up(rows, kRowStep) rows.
template <class E>
RowMatrix<Operand<E>> rows_or_copy(const ConstView4& view, int64_t batch, int64_t head, int64_t first, int64_t rows,
                                   int64_t head_dim, Operand<E>* copy) {
  using F = Operand<E>;
  const auto from = matrix_of<E>(view, batch, head, first);
  if constexpr (std::is_same_v<E, F>)
    if (is_usable_in_place<E>(view, rows, head_dim)) return {from.data, from.row_stride};
  const int64_t pitch = operand_pitch<F>(head_dim);
  load_rows<E>(from, rows, head_dim, copy, round_up(rows, kRowStep<F>), pitch);
  return {copy, pitch};
}

// Loads rows of a head as a matmul's right operand, to[operand_pitch(head_dim), kQueries], with the queries in the lanes. Only
// pairs need `row_buffer`, of kQueries rows.
template <class E>
void load_query_lanes(const ConstView4& view, const QueryTile& query, int64_t head_dim, Operand<E>* to,
                      Operand<E>* row_buffer) {
  using F = Operand<E>;
  const auto from = matrix_of<E>(view, query.batch, query.head, query.first);
  if constexpr (kPaired<F>) {
    load_rows<E>(from, query.rows, head_dim, row_buffer, query.lanes, operand_pitch<F>(head_dim));
    const int64_t words = operand_pitch<F>(head_dim) / 2;  // neighbours in a row are a pair
    transpose_pairs(row_buffer, words * kBf16Digits<F>, query.lanes, words, to, kQueries * kBf16Digits<F>);
  } else {
    load_transposed<E>(from, query.rows, head_dim, to, kQueries);
  }
}

// x where the query of each lane sees key k of the tile, else -inf.
template <class A>
FLASH_ONLINE_INLINE Vector<A> seen_only(const MaskTile<A>& mask, int64_t k, int64_t l, Vector<A> x) {
  if (mask.has_hidden) x = hide<A>(x, mask.visible[k] >> l);
  if (mask.has_bias) x = load_vector(mask.bias + k * kQueries + l) == lowest<Vector<A>>() ? lowest<Vector<A>>() : x;
  return x;
}

// The scores of a tile and their inputs. The exponential turns the absolute error of a score, which grows with the score, into
// the relative error of a weight. Large scores of float inputs are therefore computed in double, query by query; the names of
// that path begin with double_.
template <class E>
struct ScoreTile {
  using A = Accumulator<E>;
  using F = Operand<E>;
  static constexpr bool kMayUseDouble = std::is_same_v<E, float>;
  // With 16-bit inputs the last digit of a score is lost anyway, so their scaling may be deferred to the exponential.
  static constexpr bool kDefersScale = sizeof(E) == 2;

  F *query, *row_buffer;  // [operand_pitch(head_dim), kQueries]; the buffer of load_query_lanes
  A* score;  // [kKeys, kQueries]
  A* block_max;  // [kQueries]: a query's largest score in this block of keys, unless its scores are in double
  MaskTile<A> mask;
  A* deferred_scale;  // [kQueries]: the factor that a query's scores still need
  bool* is_double;  // [kQueries]: whether a query's scores are in double_score instead (other columns are undefined)
  double *double_query, *double_key;  // [head_dim, kQueries], [kKeys, head_dim]
  double *double_score, *double_block_max;  // [kKeys, kQueries], [kQueries]

  // `tiles`: the number of tiles of scores to allocate; `score` is the first.
  ScoreTile(const AttentionProblem& problem, ScratchAllocator& allocator, int64_t tiles = 1) {
    query = allocator.take<F>(operand_pitch<F>(problem.head_dim) * kQueries);
    row_buffer =
        allocator.take<F>(kPaired<F> ? kQueries * operand_pitch<F>(std::max(problem.head_dim, problem.head_dim_v)) : 0);
    score = allocator.take<A>(tiles * kKeys * kQueries);
    block_max = allocator.take<A>(kQueries);
    deferred_scale = allocator.take<A>(kQueries);
    mask.visible = allocator.take<uint64_t>(kKeys);
    const bool has_bias = problem.mask.data && problem.mask_dtype != DType::kBool;
    mask.bias = allocator.take<A>(has_bias ? kKeys * kQueries : 0);
    is_double = allocator.take<bool>(kQueries);
    double_query = allocator.take<double>(kMayUseDouble ? problem.head_dim * kQueries : 0);
    double_key = allocator.take<double>(kMayUseDouble ? problem.head_dim * kKeys : 0);
    double_score = allocator.take<double>(kMayUseDouble ? kKeys * kQueries : 0);
    double_block_max = allocator.take<double>(kMayUseDouble ? kQueries : 0);
  }
};

// Sets hidden scores to the infinity that becomes -inf when multiplied by `deferred_scale`, which is not 0.
template <class Score, class A>
FLASH_ONLINE_INLINE void hide_scores(const MaskTile<A>& mask, int64_t count, int64_t lanes, Score* score, Score deferred_scale,
                                     const bool* chosen = nullptr) {
  const Vector<Score> hidden = deferred_scale < 0 ? -lowest<Vector<Score>>() : lowest<Vector<Score>>();
  for_each_vector(
      score, count, lanes, [&](Vector<Score> x, int64_t k, int64_t l) { return hide<Score>(x, mask.visible[k] >> l, hidden); },
      chosen);
}

// Turns scale * query . key, in place, into the scores that the exponential takes, for all queries or at least the chosen ones:
// applies the score modification, adds a float mask, and sets hidden scores to -inf. `derivative`, unless it is null, receives
// the derivative of the score modification.
template <class A, class Score>
void apply_score_mod_and_mask(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count,
                              const MaskTile<A>& mask, Score* score, A* derivative, const bool* chosen = nullptr) {
  ScoreMod::apply(problem, query, begin, count, score, derivative, chosen);
  if (mask.has_bias)
    for_each_vector(
        score, count, query.lanes,
        [&](Vector<Score> x, int64_t k, int64_t l) {
          const A* bias = mask.bias + k * kQueries + l;
          if constexpr (std::is_same_v<A, Score>)
            x += load_vector(bias);
          else
            for (int i = 0; i < kLanes<Score>; ++i) x[i] += bias[i];
          return x;
        },
        chosen);
  if (mask.has_hidden) hide_scores(mask, count, query.lanes, score, Score(1), chosen);
}

template <class T>
FLASH_ONLINE_INLINE Vector<T> max_ignoring_nan(Vector<T> a, Vector<T> b) {
  if constexpr (std::is_same_v<T, float>)
    return vector_max(b, a);
  else
    return maximum(a, b);
}

// Computes each query's largest score, times `scale`, for all queries or at least the chosen ones.
template <class Score, class A>
FLASH_ONLINE_INLINE void block_maxima(const Score* score, int64_t count, int64_t lanes, A* block_max, Score scale = 1,
                                      const bool* chosen = nullptr) {
  for (int64_t l = 0; l < lanes; l += kLanes<Score>) {
    if (!any_chosen<Score>(chosen, l)) continue;
    Vector<Score> partial_max[4];  // four, so that no maximum waits for its own previous step
    for (auto& x : partial_max) x = lowest<Vector<Score>>();
    int64_t k = 0;
    for (; k + 4 <= count; k += 4)
      for (int64_t i = 0; i < 4; ++i)
        partial_max[i] = max_ignoring_nan<Score>(partial_max[i], load_vector(score + (k + i) * kQueries + l) * scale);
    for (; k < count; ++k)
      partial_max[0] = max_ignoring_nan<Score>(partial_max[0], load_vector(score + k * kQueries + l) * scale);
    const Vector<Score> block_max_lanes = max_ignoring_nan<Score>(max_ignoring_nan<Score>(partial_max[0], partial_max[1]),
                                                                  max_ignoring_nan<Score>(partial_max[2], partial_max[3]));
    for (int i = 0; i < kLanes<Score>; ++i) block_max[l + i] = static_cast<A>(block_max_lanes[i]);
  }
}

// Scales a tile's products and takes the maximum of the products that a query sees and, unless scores are never in double, of
// their negatives. With `finishes` there is no score modification: the mask is applied as well, and block_max is the maximum of
// the scores. Several vectors of queries are interleaved, so that no maximum waits for the previous one.
template <class E, class A = Accumulator<E>>
__attribute__((noinline)) void scale_products(const QueryTile& query, int64_t count, A scale, bool finishes,
                                              const ScoreTile<E>& tile, A* max_scaled, A* max_negated) {
  const MaskTile<A>& mask = tile.mask;
  const auto columns = [&](int64_t l, auto number, auto masked) FLASH_ONLINE_LAMBDA_INLINE {
    constexpr int kColumns = number;
    constexpr bool kMasked = masked;
    Vector<A> high[kColumns], low[kColumns], top[kColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) high[c] = low[c] = top[c] = lowest<Vector<A>>();
    // Scores are stored before anything is added to them: contracted into one operation, the same score would round differently
    // elsewhere.
    for (int64_t k = 0; k < count; ++k)
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        const int64_t lane = l + c * kLanes<A>;
        A* const score = tile.score + k * kQueries + lane;
        const Vector<A> scaled = load_vector(score) * scale;
        store_vector(score, scaled);
        if constexpr (ScoreTile<E>::kMayUseDouble) {
          high[c] = max_ignoring_nan<A>(high[c], kMasked ? seen_only(mask, k, lane, scaled) : scaled);
          low[c] = max_ignoring_nan<A>(low[c], kMasked ? seen_only(mask, k, lane, -scaled) : -scaled);
        } else if constexpr (!kMasked) {
          high[c] = max_ignoring_nan<A>(high[c], scaled);
        }
      }
    const auto finish = [&](auto has_bias, auto has_hidden) FLASH_ONLINE_LAMBDA_INLINE {
      for (int64_t k = 0; k < count; ++k)
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
          const int64_t lane = l + c * kLanes<A>;
          A* const score = tile.score + k * kQueries + lane;
          Vector<A> finished = load_vector(score);
          if (has_bias) finished += load_vector(mask.bias + k * kQueries + lane);
          if (has_hidden) finished = hide<A>(finished, mask.visible[k] >> lane);
          store_vector(score, finished);
          top[c] = max_ignoring_nan<A>(top[c], finished);
        }
    };
    if (kMasked && finishes)
      visit_bool(mask.has_bias,
                 [&](auto has_bias) { visit_bool(mask.has_hidden, [&](auto has_hidden) { finish(has_bias, has_hidden); }); });
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      const int64_t lane = l + c * kLanes<A>;
      store_vector(max_scaled + lane, high[c]);
      if constexpr (ScoreTile<E>::kMayUseDouble) store_vector(max_negated + lane, low[c]);
      if (finishes) store_vector(tile.block_max + lane, kMasked ? top[c] : high[c]);
    }
  };
  const auto all = [&](auto masked) FLASH_ONLINE_LAMBDA_INLINE {
    constexpr int kSideBySide = 4;
    int64_t l = 0;
    for (; l + kSideBySide * kLanes<A> <= query.lanes; l += kSideBySide * kLanes<A>)
      columns(l, std::integral_constant<int, kSideBySide>(), masked);
    for (; l < query.lanes; l += kLanes<A>) columns(l, std::integral_constant<int, 1>(), masked);
  };
  mask.has_bias || mask.has_hidden ? all(std::true_type()) : all(std::false_type());
}

// Scales a query's scores here, not in the exponential, if the largest is large. The exponential contracts the product with the
// subtraction of the maximum: the product is exact, but the maximum was rounded. From 2^24 on the two differ by more than 1,
// from 2^32 on by more than a float's exponential can hold. The decision is per query and the same in both passes, as its
// visible scores and their blocks are the same.
template <class A>
FLASH_ONLINE_INLINE void scale_large_scores(int64_t count, int64_t lanes, const A* block_max, A* score, A* deferred_scale) {
  constexpr A kLarge = 0x1p24f;
  const auto is_large = [&](int64_t l) FLASH_ONLINE_LAMBDA_INLINE {
    const Vector<A> max = load_vector(block_max + l);
    return (max > kLarge) | ((max < -kLarge) & (max > lowest<A>()));
  };
  auto any = is_large(0);
  for (int64_t l = kLanes<A>; l < lanes; l += kLanes<A>) any |= is_large(l);
  if (!reduce(any, [](auto a, auto b) FLASH_ONLINE_LAMBDA_INLINE { return a | b; })) [[likely]]
    return;
  for (int64_t l = 0; l < lanes; l += kLanes<A>) {
    const auto large = is_large(l);
    const Vector<A> scale = load_vector(deferred_scale + l);
    for (int64_t k = 0; k < count; ++k) {
      const Vector<A> x = load_vector(score + k * kQueries + l);
      store_vector(score + k * kQueries + l, large ? x * scale : x);
    }
    store_vector(deferred_scale + l, large ? broadcast(A(1)) : scale);
  }
}

// Returns whether the exponential scales the scores. The problem alone decides: a product that is rounded before the maximum is
// subtracted differs in its last bit from a product that is not, and a query's result must not depend on whether its neighbours
// in the tile have hidden scores.
template <class E>
bool defers_scale(const AttentionProblem& problem) {
  const bool has_bias = problem.mask.data && problem.mask_dtype != DType::kBool;
  return ScoreTile<E>::kDefersScale && ScoreMod::is_identity(problem) && !has_bias && problem.scale != 0;
}

// A score in double that float does not hold is infinite, as in torch. The product of query and key alone may be larger.
FLASH_ONLINE_INLINE Vector<double> as_float_overflows(Vector<double> x) {
  constexpr double kMax = std::numeric_limits<float>::max();
  return x > kMax ? -lowest<Vector<double>>() : x < -kMax ? lowest<Vector<double>>() : x;
}

// Computes product[rows, kQueries] = left right, in double, for the chosen columns of right[depth, kQueries]; the other columns
// of the product are undefined. right_buffer starts with the chosen columns, so that a few cost little. A column is the same to
// the last bit for any choice of other columns.
template <class A>
void multiply_in_double(int64_t rows, int64_t depth, const double* left, const A* right, const bool* chosen,
                        double* right_buffer, double* product) {
  int64_t column[kQueries], columns = 0;
  for (int64_t i = 0; i < kQueries; ++i)
    if (chosen[i]) column[columns++] = i;
  for (int64_t e = 0; e < depth; ++e) {
    double* const to = right_buffer + e * kQueries;
    for (int64_t n = 0; n < columns; ++n) to[n] = right[e * kQueries + column[n]];
    for (int64_t n = columns; n < round_up(columns, kLanes<double>); ++n) to[n] = 0;
  }
  matmul(Accumulate::kOverwrite, rows, round_up(columns, kLanes<double>), depth, left, depth, 1, right_buffer, kQueries,
         product, kQueries);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = columns - 1; n >= 0; --n) product[r * kQueries + column[n]] = product[r * kQueries + n];
}

// Computes a tile's scores and their maxima for keys [begin, begin + count) with rows `key`, after load_mask. Large scores of
// float inputs are computed in double and stay in double_score until the maximum has been subtracted. The decision is per
// query, by the scores that it sees, so that a result depends neither on neighbours nor on hidden keys: `reference` is the
// maximum that is subtracted so far. Returns whether any query's scores are in double.
template <class E, class A = Accumulator<E>, class F = Operand<E>>
bool compute_scores(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count, RowMatrix<F> key,
                    ScoreTile<E>& tile, const A* reference, A* derivative) {
  // The forward pass subtracts the maximum so far, the backward pass lse. If the two decide differently about a block, its
  // scores differ in the last digits, so its weights must be negligible.
  // The error of a product, a sum of many terms, grows with the product. A mask adds one rounding, which is the same for all
  // scores from 4 to 8. A block is negligible if its weights stay below 1e-4, whatever rounding did to its largest score: the
  // terms of a product may be thousands of times as large as their sum.
  constexpr A kLargeProduct = 5, kLargeScore = 8, kLogNegligible = -9.21034037f, kRoundingOfScore = 0x1p-10f;
  const A scale = static_cast<A>(problem.scale);
  matmul(Accumulate::kOverwrite, round_up(count, kRowStep<F>), query.lanes, operand_pitch<F>(problem.head_dim), key.data,
         key.pitch, 1, tile.query, kQueries, tile.score, kQueries);

  if constexpr (ScoreTile<E>::kDefersScale) {
    if (defers_scale<E>(problem)) {
      std::fill_n(tile.deferred_scale, query.lanes, scale);
      if (tile.mask.has_hidden) hide_scores(tile.mask, count, query.lanes, tile.score, scale);
      block_maxima(tile.score, count, query.lanes, tile.block_max, scale);
      scale_large_scores(count, query.lanes, tile.block_max, tile.score, tile.deferred_scale);
      return false;
    }
  }
  std::fill_n(tile.deferred_scale, query.lanes, A(1));
  A max_scaled[kQueries], max_negated[kQueries];  // of the visible scaled products, before modification and mask
  const bool is_modified = !ScoreMod::is_identity(problem);
  scale_products(query, count, scale, !is_modified, tile, max_scaled, max_negated);
  if (is_modified) {
    apply_score_mod_and_mask<A>(problem, query, begin, count, tile.mask, tile.score, derivative);
    block_maxima(tile.score, count, query.lanes, tile.block_max);
  }

  bool any = false;
  if constexpr (ScoreTile<E>::kMayUseDouble) {
    std::fill_n(tile.is_double, kQueries, false);
    A above[kQueries];  // the largest of the block, less the reference
    Vector<int32_t> maybe = {};  // whether any score is large; else the loop over queries is skipped
    for (int64_t l = 0; l < query.lanes; l += kLanes<A>) {
      const Vector<A> block_max = load_vector(tile.block_max + l);
      store_vector(above + l, block_max - load_vector(reference + l));
      maybe |= (load_vector(max_scaled + l) > kLargeProduct) | (load_vector(max_negated + l) > kLargeProduct) |
               (block_max > kLargeScore) | (block_max < -kLargeScore);
    }
    if (!reduce(maybe, [](auto a, auto b) FLASH_ONLINE_LAMBDA_INLINE { return a | b; })) return false;
    for (int64_t i = 0; i < query.lanes; ++i) {
      const A largest = max_scaled[i] > max_negated[i] ? max_scaled[i] : max_negated[i], top = std::abs(tile.block_max[i]);
      const bool large = (largest > kLargeProduct) | ((top > kLargeScore) & (top < -lowest<A>()));
      const A rounding = kRoundingOfScore * (largest > std::abs(reference[i]) ? largest : std::abs(reference[i]));
      // Without a reference, and for NaN, nothing is negligible.
      tile.is_double[i] = large & !(above[i] < kLogNegligible - rounding) & (i < query.rows);
      any |= tile.is_double[i];
    }
    if (!any) return false;
    load_rows<A>(Matrix<const A>{key.data, key.pitch, 1}, count, problem.head_dim, tile.double_key, count, problem.head_dim);
    multiply_in_double(count, problem.head_dim, tile.double_key, tile.query, tile.is_double, tile.double_query,
                       tile.double_score);
    for_each_vector(
        tile.double_score, count, query.lanes,
        [&](Vector<double> x, int64_t, int64_t) { return as_float_overflows(x * problem.scale); }, tile.is_double);
    apply_score_mod_and_mask<A>(problem, query, begin, count, tile.mask, tile.double_score, derivative, tile.is_double);
    block_maxima(tile.double_score, count, query.lanes, tile.double_block_max, 1.0, tile.is_double);
  }
  return any;
}

// Subtracts `subtract` from the scores of query i and stores the results in the tile's scores; scores in double are subtracted
// in double.
template <class E>
void narrow_double_scores(int64_t i, int64_t count, const ScoreTile<E>& tile, double subtract) {
  for (int64_t k = 0; k < count; ++k) {
    const int64_t index = k * kQueries + i;
    tile.score[index] =
        static_cast<Accumulator<E>>((tile.is_double[i] ? tile.double_score[index] : tile.score[index]) - subtract);
  }
}

// Sets factor[count, kQueries] to 0 where dropout drops the weight of a key, and to 1 / (1 - dropout) elsewhere. `begin` is a
// multiple of Philox::kKeys, the keys that share a draw; up to kKeys - 1 rows beyond `count` are written.
template <class A>
__attribute__((noinline)) void make_dropout_factors(const AttentionProblem& problem, const QueryTile& query, int64_t begin,
                                                    int64_t count, A* factor) {
  const Philox philox(problem.rng[0], problem.rng[1]);
  const uint32_t threshold = drop_threshold(problem.dropout);
  const int64_t batch = problem.batch_begin + query.batch;
  Philox::OfQuery query_state[kQueries];
  for (int64_t i = 0; i < query.lanes; ++i) query_state[i] = philox.of_query(batch, query.head, query.first + i);
  const A keep_factor = problem.dropout < 1 ? A(1) / static_cast<A>(1 - problem.dropout) : A(0);
  for (int64_t k = 0; k < count; k += Philox::kKeys) {
    const Philox::OfGroup group_state = philox.of_group(batch, query.head, (begin + k) / Philox::kKeys);
    for (int64_t i = 0; i < query.lanes; ++i) {
      unsigned kept = 0;
      philox.add_kept(query_state[i], group_state, threshold, 0, kept);
      for (int64_t j = 0; j < Philox::kKeys; ++j) factor[(k + j) * kQueries + i] = kept >> j & 1 ? keep_factor : A(0);
    }
  }
}

// Calls f(begin, count) for the blocks of the keys [range.begin, range.end) within [first, last), which are cut at multiples of
// kKeys: first for the block of the key `start_key` and the blocks before it, backwards, then for the blocks after it.
template <class F>
FLASH_ONLINE_INLINE void for_each_key_block(KeyRange range, int64_t first, int64_t last, int64_t start_key, const F& f) {
  const int64_t begin = std::max(range.begin / kKeyStep * kKeyStep, first), end = std::min(range.end, last);
  if (begin >= end) return;
  const auto block = [&](int64_t n) {
    const int64_t from = std::max(n * kKeys, begin);
    f(from, std::min((n + 1) * kKeys, end) - from);
  };
  const int64_t start = std::clamp(start_key, begin, end - 1) / kKeys;
  for (int64_t n = start; n >= begin / kKeys; --n) block(n);
  for (int64_t n = start + 1; n <= (end - 1) / kKeys; ++n) block(n);
}

// The kernels of the other files, which forward.cpp puts into the table of the instruction set.
Memory cached_memory(const AttentionProblem& problem);
int64_t few_rows_kv_splits(const AttentionProblem& problem);
void cached(const AttentionProblem& problem, const Executor& executor);
void append(const AppendProblem& problem, const Executor& executor);
Memory float8_memory(const Float8Problem& problem);
void float8(const Float8Problem& problem, const Executor& executor);
Memory backward_memory(const AttentionProblem& problem, const AttentionGradients& gradients);
void backward(const AttentionProblem& problem, const AttentionGradients& gradients, const Executor& executor);
void merge(const MergeProblem& problem, const Executor& executor);
void merge_backward(const MergeProblem& problem, const MergeGradients& gradients, const Executor& executor);

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
