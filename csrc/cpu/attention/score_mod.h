// The score modification, applied between the matmul and the softmax like FlexAttention's score_mod: softcap, then ALiBi. The
// forward pass takes its value; the backward pass also takes its derivative.
#pragma once

#include <algorithm>
#include <cmath>

#include "mask_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

// Returns whether any query of the vector at lane l is among the `chosen`; null: all are.
template <class T>
FLASH_ONLINE_INLINE bool any_chosen(const bool* chosen, int64_t l) {
  return !chosen || std::find(chosen + l, chosen + l + kLanes<T>, true) != chosen + l + kLanes<T>;
}
// Calls f(vector, key, lane) for every vector of a tile with chosen queries, one column of vectors after another, and stores
// the results.
template <class T, class F>
FLASH_ONLINE_INLINE void for_each_vector(T* tile, int64_t count, int64_t lanes, const F& f, const bool* chosen = nullptr) {
  for (int64_t l = 0; l < lanes; l += kLanes<T>)
    if (any_chosen<T>(chosen, l))
      for (int64_t k = 0; k < count; ++k) store_vector(tile + k * kQueries + l, f(load_vector(tile + k * kQueries + l), k, l));
}

// tanh within 2 ulp: an odd polynomial near 0 (the minimax one of Cephes' tanhf), an exponential elsewhere.
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

// A new modification is written here alone: is_identity, its value in apply and, unless it only adds to the score, its
// derivative. Each modification is a separate pass over the tile, so that its result is rounded when it is stored: a compiler
// that contracted two modifications into one operation would round the same score differently in the two passes.
struct ScoreMod {
  static bool is_identity(const AttentionProblem& problem) { return problem.softcap <= 0 && !problem.alibi_slopes; }

  // Returns whether the derivative differs from 1; ALiBi only adds to a score.
  static bool has_derivative(const AttentionProblem& problem) { return problem.softcap > 0; }

  // Modifies a tile of scores [count, kQueries] in place, at least those of the `chosen` queries (null: all queries).
  // `derivative`, unless it is null, receives their derivatives.
  template <class A, class Score>
  static FLASH_ONLINE_INLINE void apply(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count,
                                        Score* score, A* derivative, const bool* chosen) {
    if (problem.softcap > 0) {
      const Score cap = static_cast<Score>(problem.softcap);
      for_each_vector(
          score, count, query.lanes,
          [&](Vector<Score> x, int64_t k, int64_t l) {
            const Vector<Score> tanh_x = hyperbolic_tangent(x / cap);
            if (derivative)
              for (int i = 0; i < kLanes<Score>; ++i)
                if (!chosen || chosen[l + i]) derivative[k * kQueries + l + i] = static_cast<A>(1 - tanh_x[i] * tanh_x[i]);
            return cap * tanh_x;
          },
          chosen);
    }
    if (problem.alibi_slopes) {
      const Score slope = static_cast<const A*>(
          problem.alibi_slopes)[query.batch * problem.alibi_stride[0] + query.head * problem.alibi_stride[1]];
      const int64_t first_distance = query.first + problem.visible.offset - begin;  // from the first key to the first query
      Vector<Score> lane;
      for (int i = 0; i < kLanes<Score>; ++i) lane[i] = static_cast<Score>(i);
      for_each_vector(
          score, count, query.lanes,
          [&](Vector<Score> x, int64_t k, int64_t l) {
            const Vector<Score> distance = lane + static_cast<Score>(first_distance + l - k);
            return x - slope * (distance < 0 ? -distance : distance);
          },
          chosen);
    }
  }

  // Turns the gradients of modified scores [count, kQueries] into the gradients of unmodified scores.
  template <class A>
  static FLASH_ONLINE_INLINE void chain(const AttentionProblem& problem, const QueryTile& query, int64_t count, A* grad,
                                        const A* derivative) {
    if (!has_derivative(problem)) return;
    for_each_vector(grad, count, query.lanes,
                    [&](Vector<A> x, int64_t k, int64_t l) { return x * load_vector(derivative + k * kQueries + l); });
  }
};

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
