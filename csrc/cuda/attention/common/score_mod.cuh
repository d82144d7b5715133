// The score modification, between the product of a query and a key and the mask: a scale or a softcap, then ALiBi. Each
// modification is one struct, for float scores in base 2 and for natural ones in double:
//   kNeedsDistance     its value depends on how far the query's position is from the key's
//   kHasDerivative     false: it only adds to a score
//   operator()(x, distance)   the modified score, and its derivative; a derivative that is constant in a head is left to the
//                             scale that the gradients of queries and keys get
// ScoreMod applies them in order. The Hopper loops for 16 bits (sm90/forward/consumer.cuh, sm90/backward/warpgroup.cuh) compute
// the softcap in fewer instructions; problem.h names the modifications, so that kernels can refuse one that they lack.
#pragma once

#include <type_traits>

#include "../../../core/problem.h"
#include "../../hw/math.cuh"
#include "../../mma/compensated_accumulator.cuh"
#include "../large_rows/score_levels.cuh"

namespace flash_online::cuda {

constexpr double kLog2EInDouble = 1.4426950408889634074;

// ---- the modifications

template <class V>
struct Modified {
  V value, derivative;
};

__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
// A call, so that kernels hold its code once.
static __device__ __noinline__ double tanh_of(double x) { return ::tanh(x); }
// Rounded: no fma may subtract a maximum, or lse, from what is more exact than these are made of.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

template <class V>
struct Scale {
  static constexpr bool kNeedsDistance = false, kHasDerivative = false;
  V scale;
  __device__ __forceinline__ Modified<V> operator()(V product, V) const { return {rounded_product(product, scale), 1}; }
};

// In place of Scale: `scale` is of the tangent's argument. The score is at most `cap` from 0, whatever the product.
template <class V>
struct Softcap {
  static constexpr bool kNeedsDistance = false, kHasDerivative = true;
  V scale, cap;
  __device__ __forceinline__ Modified<V> operator()(V product, V) const {
    const V capped = tanh_of(product * scale);
    return {rounded_product(cap, capped), 1 - capped * capped};
  }
};

template <class V>
struct Alibi {
  static constexpr bool kNeedsDistance = true, kHasDerivative = false;
  V slope;
  __device__ __forceinline__ Modified<V> operator()(V x, V distance) const { return {::fma(-slope, distance, x), 1}; }
  // The slope of a head, in natural units; T is its type in memory.
  template <class T>
  __device__ static T slope_of(const AttentionProblem& problem, int64_t batch, int64_t head) {
    if (!problem.alibi_slopes) return 0;
    return static_cast<const T*>(problem.alibi_slopes)[batch * problem.alibi_stride[0] + head * problem.alibi_stride[1]];
  }
};

// ---- the modifications of a problem

// Natural scores in double, of a head.
struct DoubleScoreMod {
  double scale;  // what a product is multiplied by: the scale, or scale / softcap
  double cap;  // 0: none
  double slope;  // 0: none

  // T: the type of the slopes in memory.
  template <class T>
  __device__ static DoubleScoreMod of(const AttentionProblem& problem, int64_t batch, int64_t head) {
    return {problem.softcap > 0 ? problem.scale / problem.softcap : problem.scale, problem.softcap,
            Alibi<double>::slope_of<T>(problem, batch, head)};
  }
  // Calls f(modification) for each one, in order.
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) const {
    cap > 0 ? f(Softcap<double>{scale, cap}) : f(Scale<double>{scale});
    if (slope != 0) f(Alibi<double>{slope});
  }
};

// Float scores in base 2.
struct ScoreMod {
  float scale;  // what a product is multiplied by: scale * log2(e), or scale / softcap
  float cap;  // softcap * log2(e); 0: none
  float slope;  // of a head: ALiBi's slope * log2(e); 0: none
  bool has_score_mod;  // false: products stand for scores, and the exponential multiplies them by `scale` > 0
  float lowest_product, lowest_score;  // where the mask is floating; the latter in base 2

  // The members that all heads share. The host computes them, in double.
  explicit ScoreMod(const AttentionProblem& problem)
      : scale(static_cast<float>(problem.softcap > 0 ? problem.scale / problem.softcap : problem.scale * kLog2EInDouble)),
        cap(static_cast<float>(problem.softcap * kLog2EInDouble)),
        slope(0),
        // A product's order is its score's only under a scale above 0.
        has_score_mod(score_mods(problem) != 0 || (problem.mask.data && problem.mask_dtype != DType::kBool) ||
                      !(scale > 0 && scale < 1e30f)) {
    const bool scores_are_products = problem.softcap == 0 && scale > 0 && scale < 1e30f;
    lowest_product = cuda::lowest_product(scores_are_products ? scale : 1);
    lowest_score = lowest_product * (scores_are_products ? scale : 1);
  }

  __device__ ScoreMod of_head(const AttentionProblem& problem, int64_t batch, int64_t head) const {
    ScoreMod score_mod = *this;
    if (problem.alibi_slopes) score_mod.slope = kLog2E * Alibi<float>::slope_of<float>(problem, batch, head);
    return score_mod;
  }

  // Makes scores of products that are multiplied by `factor` first; has_score_mod must be set.
  __device__ void multiply(float factor) { scale *= factor; }

  // The factor of scores that is left to the exponential.
  __device__ float remaining_scale() const { return has_score_mod ? 1.0f : scale; }

  // Calls f(modification) for the ones that all heads share, in order; then for the ones of a head.
  template <class F>
  __device__ __forceinline__ void for_each_shared(F&& f) const {
    cap > 0 ? f(Softcap<float>{scale, cap}) : f(Scale<float>{scale});
  }
  template <class F>
  __device__ __forceinline__ void for_each_of_head(F&& f) const {
    if (slope != 0) f(Alibi<float>{slope});
  }
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) const {
    for_each_shared(f);
    for_each_of_head(f);
  }
};

// x + low += bias * (factor + factor_low)
__device__ __forceinline__ void add_in_two_floats(float& x, float& low, float bias, float factor, float factor_low) {
  float product_low, sum_low;
  x = two_sum(x, two_product(bias, factor, product_low), sum_low);
  low += sum_low + fmaf(bias, factor_low, product_low);
}

// ---- compensated scores, which are two floats each: with what rounding the factors to float leaves of them. The modifications
// have an operator()(x, low, distance) that changes both floats; one without it, such as Softcap, gets their sum.

template <class Modification>
constexpr bool kTakesTwoFloats = std::is_invocable_v<const Modification&, float&, float&, float>;

struct PreciseScale {
  static constexpr bool kNeedsDistance = false, kHasDerivative = false;
  float scale, scale_low;
  __device__ __forceinline__ void operator()(float& x, float& low, float) const {
    const float leading = x;
    float rounded;
    x = two_product(x, scale, rounded);
    low = rounded + fmaf(low, scale, leading * scale_low);
  }
};

struct PreciseAlibi {
  static constexpr bool kNeedsDistance = true, kHasDerivative = false;
  float slope, slope_low;
  __device__ __forceinline__ void operator()(float& x, float& low, float distance) const {
    add_in_two_floats(x, low, distance, -slope, -slope_low);
  }
};

struct PreciseScoreMod : ScoreMod {
  float scale_low, slope_low = 0;

  __device__ PreciseScoreMod(const ScoreMod& score_mod, const AttentionProblem& problem, int64_t batch, int64_t head)
      : ScoreMod(score_mod.of_head(problem, batch, head)),
        scale_low(static_cast<float>(problem.scale * kLog2EInDouble - static_cast<double>(scale))) {
    if (!problem.alibi_slopes) return;
    const float natural = Alibi<float>::slope_of<float>(problem, batch, head);
    slope = two_product(kLog2E, natural, slope_low);
    slope_low = fmaf(kLog2ELow, natural, slope_low);
  }

  __device__ void multiply(float factor) {
    float low;
    scale = two_product(scale, factor, low);
    scale_low = fmaf(scale_low, factor, low);
  }

  template <class F>
  __device__ __forceinline__ void for_each(F&& f) const {
    cap > 0 ? f(Softcap<float>{scale, cap}) : f(PreciseScale{scale, scale_low});
    if (slope != 0) f(PreciseAlibi{slope, slope_low});
  }
};

// A head's ScoreMod, in the precision that the elements' scores have.
template <class Element>
using HeadScoreMod = std::conditional_t<CompensatedAccumulator<Element, 1, 1>::kCompensated, PreciseScoreMod, ScoreMod>;

template <class Element>
__device__ __forceinline__ HeadScoreMod<Element> score_mod_of_head(const ScoreMod& score_mod, const AttentionProblem& problem,
                                                                   int64_t batch, int64_t head) {
  if constexpr (CompensatedAccumulator<Element, 1, 1>::kCompensated)
    return PreciseScoreMod(score_mod, problem, batch, head);
  else
    return score_mod.of_head(problem, batch, head);
}

}  // namespace flash_online::cuda
