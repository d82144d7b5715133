// The score modification, applied between the matmul and the softmax like FlexAttention's score_mod: softcap, then ALiBi. The
// forward pass takes its value; the backward pass also takes its derivative. csrc/cuda/attention/common/score_mod.cuh is
// CUDA's.
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

// The modifications of a score in natural units, each a struct for a vector of scores:
//   kNeedsDistance     its value depends on how far the query's position is from the key's
//   kHasDerivative     false: it only adds to a score
//   operator()(x, distance)   the modified scores, and their derivatives
template <class Score>
struct Modified {
  Vector<Score> value, derivative;
};

template <class Score>
struct Softcap {
  static constexpr bool kNeedsDistance = false, kHasDerivative = true;
  Score cap;
  FLASH_ONLINE_INLINE Modified<Score> operator()(Vector<Score> x, Vector<Score>) const {
    const Vector<Score> tanh_x = hyperbolic_tangent(x / cap);
    return {cap * tanh_x, 1 - tanh_x * tanh_x};
  }
};

template <class Score>
struct Alibi {
  static constexpr bool kNeedsDistance = true, kHasDerivative = false;
  Score slope;
  FLASH_ONLINE_INLINE Modified<Score> operator()(Vector<Score> x, Vector<Score> distance) const {
    return {x - slope * distance, broadcast(Score(1))};
  }
};

// The modifications of a problem. Each is a separate pass over a tile, so that its result is rounded when it is stored: a
// compiler that contracted two modifications into one operation would round the same score differently in the two passes.
struct ScoreMod {
  static bool is_identity(const AttentionProblem& problem) { return score_mods(problem) == 0; }

  // Returns whether the derivative differs from 1.
  static bool has_derivative(const AttentionProblem& problem) { return (score_mods(problem) & ~kAlibi) != 0; }

  // Calls f(modification) for each modification of a head, in order. A: the type of parameters in memory.
  template <class A, class Score, class F>
  static FLASH_ONLINE_INLINE void for_each(const AttentionProblem& problem, int64_t batch, int64_t head, const F& f) {
    if (problem.softcap > 0) f(Softcap<Score>{static_cast<Score>(problem.softcap)});
    if (problem.alibi_slopes)
      f(Alibi<Score>{
          static_cast<const A*>(problem.alibi_slopes)[batch * problem.alibi_stride[0] + head * problem.alibi_stride[1]]});
  }

  // Modifies a tile of scores [count, kQueries] in place, at least those of the `chosen` queries (null: all queries).
  // `derivative`, unless it is null, receives their derivatives.
  template <class A, class Score>
  static FLASH_ONLINE_INLINE void apply(const AttentionProblem& problem, const QueryTile& query, int64_t begin, int64_t count,
                                        Score* score, A* derivative, const bool* chosen) {
    const int64_t first_distance = query.first + problem.visible.offset - begin;  // from the first key to the first query
    Vector<Score> lane;
    for (int i = 0; i < kLanes<Score>; ++i) lane[i] = static_cast<Score>(i);
    bool is_first = true;  // of the modifications with a derivative
    for_each<A, Score>(problem, query.batch, query.head, [&]<class One>(const One& modification) {
      for_each_vector(
          score, count, query.lanes,
          [&](Vector<Score> x, int64_t k, int64_t l) {
            Vector<Score> distance{};
            if constexpr (One::kNeedsDistance) {
              distance = lane + static_cast<Score>(first_distance + l - k);
              distance = distance < 0 ? -distance : distance;
            }
            const Modified<Score> result = modification(x, distance);
            if constexpr (One::kHasDerivative)
              if (derivative)
                for (int i = 0; i < kLanes<Score>; ++i)
                  if (A& d = derivative[k * kQueries + l + i]; !chosen || chosen[l + i])
                    d = static_cast<A>(is_first ? result.derivative[i] : d * result.derivative[i]);
            return result.value;
          },
          chosen);
      is_first &= !One::kHasDerivative;
    });
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
