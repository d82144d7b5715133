// The algebra of online softmax: the one place where a partial sum of exponentials is moved to a new maximum.
//
// A partial result over a set of scores is (max, sum): the largest score and the sum of exp(score - max). Two partial results
// over disjoint sets merge into the partial result of their union. The merge is associative and commutative up to rounding, and
// the empty set (-inf, 0) is its identity. See Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv
// 1805.02867, sections 3 and 3.1. Attention accumulates its output row along with the sum, as in FlashAttention (arXiv
// 2205.14135).
//
// The entropy of a softmax takes a third number (OnlineEntropy): the sum of exp(score - max) (score - max), which moves to a
// new maximum together with the sum.
//
// Conventions, kept by every kernel:
//  * The empty row has max -inf and sum 0. Its lse is -inf. As a row of attention its result is 0; as a softmax, and as an
//    entropy, it is NaN.
//  * NaN is never a maximum; it reaches the result through the sum. +inf may be a maximum; it makes the sum NaN.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "config.h"

namespace flash_online {

// The base of the exponentials. Scores in natural units use Natural. A kernel that folds log2(e) into its scale uses Binary,
// since exp2 is one instruction on a GPU.
struct Natural {
  template <class T>
  FLASH_ONLINE_HD static T exp(T x) {
    return ::exp(x);
  }
  FLASH_ONLINE_HD static float exp(float x) { return ::expf(x); }
  template <class T>
  FLASH_ONLINE_HD static T log(T x) {
    return ::log(x);
  }
  FLASH_ONLINE_HD static float log(float x) { return ::logf(x); }
};

struct Binary {
  template <class T>
  FLASH_ONLINE_HD static T exp(T x) {
    return ::exp2(x);
  }
  FLASH_ONLINE_HD static float exp(float x) { return ::exp2f(x); }
  template <class T>
  FLASH_ONLINE_HD static T log(T x) {
    return ::log2(x);
  }
  FLASH_ONLINE_HD static float log(float x) { return ::log2f(x); }
};

// -infinity; all lanes are -infinity if T is a vector of GCC's vector extension.
template <class T>
FLASH_ONLINE_HD T lowest() {
  if constexpr (std::is_arithmetic_v<T>)
    return -std::numeric_limits<T>::infinity();
  else
    return T{} - std::numeric_limits<std::remove_reference_t<decltype(T{}[0])>>::infinity();
}

template <class T>
FLASH_ONLINE_HD T maximum(T a, T b) {
  return b > a ? b : a;  // a NaN in b is not taken: see the conventions above
}

// The number from which exponents are measured: the maximum, but 0 for the empty row. There exp(-inf - 0) is 0, as it must be,
// whereas exp(-inf - -inf) would be NaN.
template <class T>
FLASH_ONLINE_HD T pivot(T max) {
  return max == lowest<T>() ? T{} : max;
}

// The partial result of a row. T is the type of sums and weights. Max may be wider than T if the scores are. T may also be a
// vector, which holds the states of several rows side by side.
template <class T, class Base = Natural, class Max = T>
struct OnlineSoftmax {
  Max max = lowest<Max>();
  T sum = T{};

  // The factor that converts a quantity measured from the maximum `from` to one measured from `to` >= `from`.
  FLASH_ONLINE_HD static T rescale(Max from, Max to) { return Base::exp(static_cast<T>(from - pivot(to))); }

  // The weight of a score in this state: exp(score - max). A score wider than T is rounded only after the subtraction.
  template <class Score>
  FLASH_ONLINE_HD T weight(Score score) const {
    return Base::exp(static_cast<T>(score - pivot(max)));
  }

  // The weight of the score a * b, without rounding the product before the subtraction.
  template <class Factor>
  FLASH_ONLINE_HD T weight_of_product(Factor a, Factor b) const {
    return Base::exp(static_cast<T>(a * b - pivot(max)));
  }
  // The weight of the score (a + low) * b, where `low` is too small for the sum a + low to hold all of its digits.
  template <class Factor>
  FLASH_ONLINE_HD T weight_of_product(Factor a, Factor low, Factor b) const {
    return Base::exp(static_cast<T>(low * b + (a * b - pivot(max))));
  }

  // Step 1 of absorbing a block: raises the maximum to cover the block's. Returns the factor by which everything else that was
  // accumulated with the old weights (the output row of attention) must be multiplied.
  FLASH_ONLINE_HD T raise_max(Max block_max) {
    const Max old = max;
    max = maximum(old, block_max);
    const T factor = rescale(old, max);
    sum *= factor;
    return factor;
  }

  // The lazy variant of raise_max: keeps the old maximum unless the block's exceeds it by more than `threshold`, which saves
  // rescaling the output row. Weights stay below exp(threshold). The algebra holds for any reference; the largest score is
  // needed only to avoid overflow.
  template <class Threshold>
  FLASH_ONLINE_HD T raise_max_lazily(Threshold threshold, Max block_max) {
    const Max old = max;
    max = block_max > old + threshold ? block_max : old;
    const T factor = rescale(old, max);
    sum *= factor;
    return factor;
  }

  // Whether raise_max_lazily would raise the maximum.
  template <class Threshold>
  FLASH_ONLINE_HD bool exceeds(Threshold threshold, Max block_max) const {
    return block_max > max + threshold;
  }

  // Step 2 of absorbing a block: adds the block's sum of weight(score), computed after raise_max().
  FLASH_ONLINE_HD void add(T block_sum) { sum += block_sum; }

  // Absorbs a single score; returns the factor of raise_max().
  FLASH_ONLINE_HD T absorb(Max score) {
    const T factor = raise_max(score);
    add(weight(score));
    return factor;
  }

  // Merges the partial result of a disjoint set into this one.
  FLASH_ONLINE_HD void merge(const OnlineSoftmax& other) {
    raise_max(other.max);
    add(other.sum * rescale(other.max, max));
  }

  // 1 / sum. For the empty row the first is infinity (softmax: 0 * inf is NaN), the second 0 (attention: no keys give 0).
  FLASH_ONLINE_HD T inverse_sum() const { return 1 / sum; }
  FLASH_ONLINE_HD T inverse_sum_or_zero() const { return sum == T{} ? T{} : 1 / sum; }

  // The logarithm of a score's probability, score - lse, but without the rounding of a large lse.
  FLASH_ONLINE_HD T log_probability(T score) const { return (score - pivot(max)) - Base::log(sum); }

  // log(sum of exp(score)), in units of the base; -inf for the empty row.
  FLASH_ONLINE_HD T lse() const { return static_cast<T>(max + Base::log(Max(sum))); }

  // The rounding error of lse() in T; 0 if lse is not finite. lse() + lse_low() has twice T's precision, from which a
  // backward pass computes exp(score - lse) correctly even for scores far from 0.
  FLASH_ONLINE_HD T lse_low() const {
    const Max log_sum = Base::log(Max(sum)), total = max + log_sum;
    // Two-sum (Knuth): `error` is the rounding of `total`, and all that lse_low() returns where Max is T
    const Max added = total - max;
    const Max error = (max - (total - added)) + (log_sum - added);
    const T low = static_cast<T>((total - Max(static_cast<T>(total))) + error);
    return low - low == T(0) ? low : T(0);
  }
};

// The distance of a score below the maximum, as a factor of its weight. It is cut off where weights are 0 in every type, so
// that a score of -inf has the product 0 and not 0 * inf.
template <class T>
FLASH_ONLINE_HD T distance_below(T distance) {
  return maximum(T{} - 10000, distance);
}

// What a row's lse subtracts from its scores, as a mask: -lse, or -inf for a row that sees nothing.
template <class T>
FLASH_ONLINE_HD T hidden_or_negative(T lse) {
  return lse == lowest<T>() ? lse : -lse;
}

// The partial result of a row whose entropy is wanted. `products` is the sum of weight(score) * (score - max) over the scores.
// The entropy of the softmax is log(sum) - products / sum. T is the type of both sums.
template <class T, class Base = Natural, class Max = T>
struct OnlineEntropy : OnlineSoftmax<T, Base, Max> {
  using State = OnlineSoftmax<T, Base, Max>;
  T products = T{};

  // score - max, as a factor of weight(score).
  template <class Score>
  FLASH_ONLINE_HD T distance(Score score) const {
    return distance_below(static_cast<T>(score - pivot(this->max)));
  }

  // As OnlineSoftmax's. Every score is farther below the new maximum by the same distance, so that `products` changes by the
  // old sum times this distance before it is rescaled.
  FLASH_ONLINE_HD T raise_max(Max block_max) {
    const Max old = this->max;
    const T old_sum = this->sum, factor = State::raise_max(block_max);
    products = (products + old_sum * distance(old)) * factor;
    return factor;
  }
  template <class Threshold>
  FLASH_ONLINE_HD T raise_max_lazily(Threshold threshold, Max block_max) {
    const Max old = this->max;
    const T old_sum = this->sum, factor = State::raise_max_lazily(threshold, block_max);
    products = (products + old_sum * distance(old)) * factor;
    return factor;
  }
  FLASH_ONLINE_HD void add(T block_sum, T block_products) {
    State::add(block_sum);
    products += block_products;
  }
  FLASH_ONLINE_HD T absorb(Max score) {
    const T factor = raise_max(score), weight = State::weight(score);
    add(weight, weight * distance(score));
    return factor;
  }
  FLASH_ONLINE_HD void merge(const OnlineEntropy& other) {
    raise_max(other.max);
    const T factor = State::rescale(other.max, this->max);
    add(other.sum * factor, (other.products + other.sum * distance(other.max)) * factor);
  }

  // In units of the base.
  FLASH_ONLINE_HD T entropy() const { return Base::log(this->sum) - products / this->sum; }
};

}  // namespace flash_online
