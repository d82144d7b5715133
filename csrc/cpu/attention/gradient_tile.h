// Code shared by the phases of the backward pass: recomputed weights and the gradients of a tile of scores.
#pragma once

#include "score_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

// The buffers with which every phase recomputes scores.
template <class E>
struct GradientScratch : ScoreTile<E> {
  using A = Accumulator<E>;
  using F = Operand<E>;
  F* grad_out;  // [operand_pitch(head_dim_v), kQueries]
  F *key_buffer, *value_buffer;  // copies of rows: [kKeys, operand_pitch(head_dim)], [kKeys, operand_pitch(head_dim_v)]
  // [kKeys, kQueries]: gradients of weights, then of scores; derivatives of the score modification; factors of dropout
  A *grad, *derivative, *dropout_factor;
  A *lse, *lse_low, *delta, *shift;  // [kQueries]; shift: the number subtracted from the scores
  double* double_shift;  // [kQueries]: the same for scores in double
  A* row_sum;  // [kQueries]: the sum over keys of the gradients of the modified scores
  double *double_grad_out, *double_value, *double_grad, *double_delta;

  // `tiles`: the number of tiles that score, grad, derivative and dropout_factor have room for.
  GradientScratch(const AttentionProblem& problem, ScratchAllocator& allocator, int64_t tiles = 1)
      : ScoreTile<E>(problem, allocator, tiles) {
    grad_out = allocator.take<F>(operand_pitch<F>(problem.head_dim_v) * kQueries);
    key_buffer = allocator.take<F>(kKeys * operand_pitch<F>(problem.head_dim));
    value_buffer = allocator.take<F>(kKeys * operand_pitch<F>(problem.head_dim_v));
    grad = allocator.take<A>(tiles * kKeys * kQueries);
    derivative = allocator.take<A>(ScoreMod::has_derivative(problem) ? tiles * kKeys * kQueries : 0);
    dropout_factor = allocator.take<A>(problem.dropout > 0 ? tiles * kKeys * kQueries : 0);
    lse = allocator.take<A>(kQueries);
    lse_low = allocator.take<A>(kQueries);
    delta = allocator.take<A>(kQueries);
    shift = allocator.take<A>(kQueries);
    row_sum = allocator.take<A>(kQueries);
    constexpr bool may_use_double = ScoreTile<E>::kMayUseDouble;
    double_grad_out = allocator.take<double>(may_use_double ? problem.head_dim_v * kQueries : 0);
    double_value = allocator.take<double>(may_use_double ? problem.head_dim_v * kKeys : 0);
    double_grad = allocator.take<double>(may_use_double ? kKeys * kQueries : 0);
    double_delta = allocator.take<double>(kQueries);
    double_shift = allocator.take<double>(kQueries);
  }

  // Returns the scratch for tile n; all other buffers are shared.
  GradientScratch at_tile(int64_t n) const {
    GradientScratch other = *this;
    const int64_t size = n * kKeys * kQueries;
    other.score += size, other.grad += size, other.derivative += size, other.dropout_factor += size;
    return other;
  }
};

// Returns whether lse and lse_low together have too few digits for a row with scores in double: they have 48, and a weight
// needs the digits after the binary point. fill_row_statistics then recomputes the row's maximum and the rest of its lse.
FLASH_ONLINE_INLINE bool has_row_statistics(double lse) {
  constexpr double kLarge = 0x1p22;
  return std::abs(lse) > kLarge && std::abs(lse) < -lowest<double>();
}

template <class E>
RowMatrix<Operand<E>> key_rows_or_copy(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t begin,
                                       int64_t count, Operand<E>* copy) {
  return rows_or_copy<E>(problem.key, batch, head / (problem.heads / problem.key_heads), begin, count, problem.head_dim, copy);
}

template <class E>
RowMatrix<Operand<E>> value_rows_or_copy(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t begin,
                                         int64_t count, Operand<E>* copy) {
  return rows_or_copy<E>(problem.value, batch, head / (problem.heads / problem.value_heads), begin, count, problem.head_dim_v,
                         copy);
}

// Loads a tile's queries, the gradients of their results, lse and delta. delta is the term of a score's gradient that its whole
// row shares: the sum over keys of weight * grad_weight, less grad_lse; see fill_delta. If a row has row statistics, its
// maximum is subtracted from scores in double, and lse_low is lse less that maximum.
template <class E>
void load_queries(const AttentionProblem& problem, const AttentionGradients& gradients, const QueryTile& query,
                  const GradientScratch<E>& tile) {
  using A = Accumulator<E>;
  load_query_lanes<E>(problem.query, query, problem.head_dim, tile.query, tile.row_buffer);
  load_query_lanes<E>(gradients.grad_out, query, problem.head_dim_v, tile.grad_out, tile.row_buffer);
  const int64_t offset = query.lse_offset(problem);
  for (int64_t i = 0; i < query.lanes; ++i) {
    const bool is_present = i < query.rows;
    tile.lse[i] = is_present ? pivot(static_cast<const A*>(problem.lse)[offset + i]) : A(0);
    tile.lse_low[i] = is_present ? static_cast<const A*>(problem.lse_low)[offset + i] : A(0);
    tile.delta[i] = is_present ? static_cast<const A*>(gradients.delta)[offset + i] : A(0);
    tile.double_delta[i] = is_present && gradients.wide_delta ? gradients.wide_delta[offset + i] : 0;
    tile.double_shift[i] = tile.lse[i];
    if (!is_present || !gradients.row_max || !has_row_statistics(tile.lse[i])) continue;
    tile.double_shift[i] = gradients.row_max[offset + i];
    tile.lse_low[i] = static_cast<A>(gradients.row_log_sum[offset + i]);
  }
}

// Computes score, the attention weights of a tile after dropout, and grad, the gradients of the modified scores; adds the row
// sums of grad to row_sum. With dropout, dropout_factor then holds the weights before dropout. weight_sum, unless it is null,
// is increased by the sum of each query's weights before dropout. Returns false, and computes nothing, if the tile is hidden.
template <class E, class A = Accumulator<E>, class F = Operand<E>>
bool compute_score_gradients(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count,
                             RowMatrix<F> key, RowMatrix<F> value, GradientScratch<E>& tile, double* weight_sum = nullptr) {
  if (!load_mask(problem, query, begin, count, tile.mask)) return false;
  const bool any_double = compute_scores(problem, query, begin, count, key, tile, tile.lse,
                                         ScoreMod::has_derivative(problem) ? tile.derivative : nullptr);
  matmul(Accumulate::kOverwrite, round_up(count, kRowStep<F>), query.lanes, operand_pitch<F>(problem.head_dim_v), value.data,
         value.pitch, 1, tile.grad_out, kQueries, tile.grad, kQueries);
  if (problem.dropout > 0) make_dropout_factors(problem, query, begin, count, tile.dropout_factor);

  std::copy_n(tile.lse, query.lanes, tile.shift);
  A pending_delta[kQueries];
  std::copy_n(tile.delta, query.lanes, pending_delta);
  if constexpr (ScoreTile<E>::kMayUseDouble) {
    if (any_double) {
      // With large scores, one weight is mostly near 1, and its gradient and delta nearly cancel: they, too, are computed in
      // double.
      load_rows<A>(Matrix<const A>{value.data, value.pitch, 1}, count, problem.head_dim_v, tile.double_value, count,
                   problem.head_dim_v);
      multiply_in_double(count, problem.head_dim_v, tile.double_value, tile.grad_out, tile.is_double, tile.double_grad_out,
                         tile.double_grad);
      for (int64_t i = 0; i < query.rows; ++i) {
        if (!tile.is_double[i]) continue;
        narrow_double_scores(i, count, tile, tile.double_shift[i]);
        tile.shift[i] = A(0);
        for (int64_t k = 0; k < count; ++k) {
          const int64_t index = k * kQueries + i;
          const double factor = problem.dropout > 0 ? tile.dropout_factor[index] : 1;
          tile.grad[index] = static_cast<A>(tile.double_grad[index] * factor - tile.double_delta[i]);
        }
        pending_delta[i] = A(0);
      }
    }
  }

  for (int64_t l = 0; l < query.lanes; l += kLanes<A>) {
    // score - lse is exact where it matters, near 0; subtracting lse_low then restores what rounding took from lse.
    const Vector<A> lse = load_vector(tile.shift + l), low = load_vector(tile.lse_low + l),
                    delta = load_vector(pending_delta + l), deferred_scale = load_vector(tile.deferred_scale + l);
    Vector<A> partial_sum[4] = {};  // of gradients; four, since one long sum loses digits that row_sum needs
    const auto at_key = [&](int64_t k, int lane) FLASH_ONLINE_LAMBDA_INLINE {
      const int64_t index = k * kQueries + l;
      Vector<A> weight = FastNatural::exp((load_vector(tile.score + index) * deferred_scale - lse) - low),
                grad = load_vector(tile.grad + index);
      if (weight_sum)
        for (int i = 0; i < kLanes<A>; ++i) weight_sum[l + i] += weight[i];
      if (problem.dropout > 0) {
        const Vector<A> dropout_factor = load_vector(tile.dropout_factor + index);
        if (any_double)
          for (int i = 0; i < kLanes<A>; ++i) grad[i] *= tile.is_double[l + i] ? A(1) : dropout_factor[i];
        else
          grad *= dropout_factor;
        grad = weight * (grad - delta);
        store_vector(tile.dropout_factor + index, weight);
        weight *= dropout_factor;
      } else {
        grad = weight * (grad - delta);
      }
      partial_sum[lane] += grad;
      store_vector(tile.score + index, weight);
      store_vector(tile.grad + index, grad);
    };
    int64_t k = 0;
    for (; k + 4 <= count; k += 4)
      for (int lane = 0; lane < 4; ++lane) at_key(k + lane, lane);
    for (; k < count; ++k) at_key(k, 0);
    store_vector(tile.row_sum + l,
                 load_vector(tile.row_sum + l) + ((partial_sum[0] + partial_sum[1]) + (partial_sum[2] + partial_sum[3])));
  }
  // Padding rows of queries are set to 0, since matmuls run over queries. Before, they may be infinite or NaN: a padding row
  // sees keys that no query of the tile sees, and has a mask's value if all queries share it.
  std::fill(tile.row_sum + query.rows, tile.row_sum + query.lanes, A(0));
  for (int64_t k = 0; query.rows < query.lanes && k < count; ++k)
    for (int64_t i = k * kQueries + query.rows; i < k * kQueries + query.lanes; ++i) {
      tile.score[i] = tile.grad[i] = A(0);
      if (problem.dropout > 0) tile.dropout_factor[i] = A(0);
    }
  return true;
}

// Returns the weight of a head's sink among the scores of the query with lse at index `row`.
template <class A>
A sink_weight(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t head, int64_t row) {
  const A lse = pivot(static_cast<const A*>(problem.lse)[row]), low = static_cast<const A*>(problem.lse_low)[row],
          sink = static_cast<const A*>(problem.sinks)[head];
  if (gradients.row_max && has_row_statistics(lse))
    return FastNatural::exp(static_cast<A>((sink - gradients.row_max[row]) - gradients.row_log_sum[row]));
  return FastNatural::exp((sink - lse) - low);
}

// Sets excess[kQueries] to `row_sum`, the sum of each query's score gradients, less the sum that exact arithmetic would give.
// With weights p and gradients dp of the weights, score gradients are p (dp - delta), delta = sum of p dp, less grad_lse.
// Without sinks and grad_lse they sum to exactly 0. The excess comes from the rounding of `out`, from which delta was computed,
// and from scores that are large or differ from the forward pass's; it is also the error of delta.
template <class A>
void excess_of_row_sums(const AttentionProblem& problem, const AttentionGradients& gradients, const QueryTile& query,
                        const A* row_sum, A* excess) {
  const int64_t offset = query.lse_offset(problem);
  std::copy_n(row_sum, query.lanes, excess);
  if (!problem.sinks && !gradients.grad_lse) return;
  for (int64_t i = 0; i < query.rows; ++i) {
    const int64_t row = offset + i;
    if (static_cast<const A*>(problem.lse)[row] == lowest<A>()) continue;  // nothing is visible
    const double grad_lse = gradients.grad_lse ? static_cast<const A*>(gradients.grad_lse)[row] : 0.0;
    const double delta = gradients.wide_delta ? gradients.wide_delta[row] : static_cast<const A*>(gradients.delta)[row];
    const double sink = problem.sinks ? sink_weight<A>(problem, gradients, query.head, row) : 0.0;
    excess[i] = static_cast<A>(excess[i] - (grad_lse + sink * delta));
  }
}

// Corrects the gradients of a tile of scores for the error of delta, `excess`.
template <class E, class A = Accumulator<E>>
void correct_delta(const AttentionProblem& problem, const QueryTile& query, int64_t count, const A* excess,
                   const GradientScratch<E>& tile) {
  const A* weight = problem.dropout > 0 ? tile.dropout_factor : tile.score;
  for_each_vector(tile.grad, count, query.lanes, [&](Vector<A> x, int64_t k, int64_t l) {
    return x - load_vector(weight + k * kQueries + l) * load_vector(excess + l);
  });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
