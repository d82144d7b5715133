// What the passes of attention's backward share: weights made again and the gradients of a tile of scores.
#pragma once

#include "score_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

// The tiles that every pass recomputes scores with.
template <class E>
struct GradientScratch : ScoreTile<E> {
  using A = Accumulator<E>;
  using F = Factor<E>;
  F* grad_out;  // [pitch_of(value_width), kQueries]
  F *key_copy, *value_copy;  // [kKeys, pitch_of(width)], [kKeys, pitch_of(value_width)], for rows_of
  A *grad, *slope, *kept;  // [kKeys, kQueries]: the weights' gradients, then the scores'; of softcap; of dropout
  A *lse, *lse_low, *delta, *shift;  // [kQueries]
  double *wide_grad_out, *wide_value, *wide_grad, *wide_delta;

  GradientScratch(const AttentionProblem& problem, Carver& carver) : ScoreTile<E>(problem, carver) {
    grad_out = carver.take<F>(pitch_of<F>(problem.head_dim_v) * kQueries);
    key_copy = carver.take<F>(kKeys * pitch_of<F>(problem.head_dim));
    value_copy = carver.take<F>(kKeys * pitch_of<F>(problem.head_dim_v));
    grad = carver.take<A>(kKeys * kQueries);
    slope = carver.take<A>(problem.softcap > 0 ? kKeys * kQueries : 0);
    kept = carver.take<A>(problem.dropout > 0 ? kKeys * kQueries : 0);
    lse = carver.take<A>(kQueries);
    lse_low = carver.take<A>(kQueries);
    delta = carver.take<A>(kQueries);
    shift = carver.take<A>(kQueries);
    constexpr bool may_be_wide = ScoreTile<E>::kMayBeWide;
    wide_grad_out = carver.take<double>(may_be_wide ? problem.head_dim_v * kQueries : 0);
    wide_value = carver.take<double>(may_be_wide ? problem.head_dim_v * kKeys : 0);
    wide_grad = carver.take<double>(may_be_wide ? kKeys * kQueries : 0);
    wide_delta = carver.take<double>(kQueries);
  }
};

template <class E>
RowsOf<Factor<E>> key_rows_of(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t begin, int64_t count,
                              Factor<E>* copy) {
  return rows_of<E>(problem.key, batch, head / (problem.heads / problem.key_heads), begin, count, problem.head_dim, copy);
}

template <class E>
RowsOf<Factor<E>> value_rows_of(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t begin, int64_t count,
                                Factor<E>* copy) {
  return rows_of<E>(problem.value, batch, head / (problem.heads / problem.value_heads), begin, count, problem.head_dim_v, copy);
}

// A tile's queries, the gradients of their results, and delta: the part of a score's gradient that its whole row shares, the
// sum over keys of weight * grad_weight - grad_lse; see fill_delta.
template <class E>
void load_queries(const AttentionProblem& problem, const AttentionGradients& gradients, const QueryTile& query,
                  const GradientScratch<E>& tile) {
  using A = Accumulator<E>;
  load_lanes<E>(problem.query, query, problem.head_dim, tile.query, tile.rows_copy);
  load_lanes<E>(gradients.grad_out, query, problem.head_dim_v, tile.grad_out, tile.rows_copy);
  const int64_t number = query.number(problem);
  for (int64_t i = 0; i < query.columns; ++i) {
    const bool there = i < query.rows;
    tile.lse[i] = there ? pivot(static_cast<const A*>(problem.lse)[number + i]) : A(0);
    tile.lse_low[i] = there ? static_cast<const A*>(problem.lse_low)[number + i] : A(0);
    tile.delta[i] = there ? static_cast<const A*>(gradients.delta)[number + i] : A(0);
    tile.wide_delta[i] = there && gradients.wide_delta ? gradients.wide_delta[number + i] : 0;
  }
}

// score = the (dropped) attention weights of a tile; grad = the gradient of the scores that the exponential took. weight_sum,
// if any, is increased by the sum of each query's weights before dropout. False if the tile is hidden: nothing has been made
// then.
template <class E, class A = Accumulator<E>, class F = Factor<E>>
bool score_gradients(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count, RowsOf<F> key,
                     RowsOf<F> value, GradientScratch<E>& tile, double* weight_sum = nullptr) {
  if (!load_mask(problem, query, begin, count, tile.mask)) return false;
  const bool any_wide =
      compute_scores(problem, query, begin, count, key, tile, tile.lse, problem.softcap > 0 ? tile.slope : nullptr);
  product(Into::kReplace, round_up(count, kRowStep<F>), query.columns, pitch_of<F>(problem.head_dim_v), value.data, value.pitch,
          1, tile.grad_out, kQueries, tile.grad, kQueries);
  if (problem.dropout > 0) draw_dropout(problem, query, begin, count, tile.kept);

  std::copy_n(tile.lse, query.columns, tile.shift);
  A shared[kQueries];
  std::copy_n(tile.delta, query.columns, shared);
  if constexpr (ScoreTile<E>::kMayBeWide) {
    if (any_wide) {
      // Large scores mostly leave one weight near 1, whose gradient and delta nearly cancel: these, too, in double.
      for (int64_t i = 0; i < problem.head_dim_v * kQueries; ++i) tile.wide_grad_out[i] = tile.grad_out[i];
      load_rows<A>(Matrix<const A>{value.data, value.pitch, 1}, count, problem.head_dim_v, tile.wide_value, count,
                   problem.head_dim_v);
      product(Into::kReplace, count, query.columns, problem.head_dim_v, tile.wide_value, problem.head_dim_v, 1,
              tile.wide_grad_out, kQueries, tile.wide_grad, kQueries);
      for (int64_t i = 0; i < query.rows; ++i) {
        if (!tile.is_wide[i]) continue;
        settle_scores(i, count, tile, tile.lse[i]);
        tile.shift[i] = A(0);
        for (int64_t k = 0; k < count; ++k) {
          const int64_t place = k * kQueries + i;
          const double factor = problem.dropout > 0 ? tile.kept[place] : 1;
          tile.grad[place] = static_cast<A>(tile.wide_grad[place] * factor - tile.wide_delta[i]);
        }
        shared[i] = A(0);
      }
    }
  }

  const A late_scale = tile.late_scale;
  for (int64_t l = 0; l < query.columns; l += kLanes<A>) {
    // score - lse is exact where it matters, near 0; lse_low then restores what rounding took from lse.
    const Vector<A> lse = load_vector(tile.shift + l), low = load_vector(tile.lse_low + l), delta = load_vector(shared + l);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t place = k * kQueries + l;
      Vector<A> weight = FastNatural::exp((load_vector(tile.score + place) * late_scale - lse) - low),
                grad = load_vector(tile.grad + place);
      if (weight_sum)
        for (int i = 0; i < kLanes<A>; ++i) weight_sum[l + i] += weight[i];
      if (problem.dropout > 0) {
        const Vector<A> kept = load_vector(tile.kept + place);
        if (any_wide)
          for (int i = 0; i < kLanes<A>; ++i) grad[i] *= tile.is_wide[l + i] ? A(1) : kept[i];
        else
          grad *= kept;
        grad = weight * (grad - delta);
        weight *= kept;
      } else {
        grad = weight * (grad - delta);
      }
      store_vector(tile.score + place, weight);
      store_vector(tile.grad + place, grad);
    }
  }
  for (int64_t k = 0; query.rows < query.columns && k < count; ++k)  // the padding, where products run over queries
    for (int64_t i = query.rows; i < query.columns; ++i) tile.score[k * kQueries + i] = tile.grad[k * kQueries + i] = A(0);
  return true;
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
