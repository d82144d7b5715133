// The algebra of online softmax: the one place where a partial sum of exponentials is moved to a new maximum.
//
// A partial result over a set of scores is (max, sum): the largest score and the sum of exp(score - max). Two partial
// results over disjoint sets merge into that of their union; the merge is associative and commutative up to rounding, and
// the empty set (-inf, 0) is its identity. Milakov and Gimelshein, "Online normalizer calculation for softmax",
// arXiv 1805.02867, sections 3 and 3.1; the output row of attention rides along as in FlashAttention (arXiv 2205.14135).
//
// Conventions, kept by every kernel:
//  * The empty row has max -inf and sum 0. Its lse is -inf; as a row of attention it is 0, as a softmax it is NaN (0 / 0).
//  * NaN is not a maximum: it reaches the result through the sum. +inf is: exp(inf - inf) makes the sum NaN.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "config.h"

namespace flash_online {

// The base of the exponentials. Scores in natural units use Natural; a kernel that folds log2(e) into its scale uses
// Binary, since exp2 is one instruction on a GPU.
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

// -infinity; in every lane, if T is a vector of numbers (of GCC's vector extension).
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

// The point that exponents are measured from: the maximum, but 0 for the empty row, where exp(-inf - 0) is 0 as it must be
// and exp(-inf - -inf) would be NaN.
template <class T>
FLASH_ONLINE_HD T pivot(T max) {
  return max == lowest<T>() ? T{} : max;
}

// T is the type of sums and weights. Max may be wider: the maximum of scores that are themselves wider. T may also be a vector
// of numbers: as many states, side by side.
template <class T, class Base = Natural, class Max = T>
struct OnlineSoftmax {
  Max max = lowest<Max>();
  T sum = T{};

  // What a quantity measured from the maximum `from` is multiplied by to be measured from `to` >= `from`.
  FLASH_ONLINE_HD static T rescale(Max from, Max to) { return Base::exp(static_cast<T>(from - pivot(to))); }

  // The weight of a score in this state: exp(score - max). A score of a wider type is rounded after the difference alone.
  template <class Score>
  FLASH_ONLINE_HD T weight(Score score) const {
    return Base::exp(static_cast<T>(score - pivot(max)));
  }

  // The same of the score a * b, which is not rounded by itself.
  template <class Factor>
  FLASH_ONLINE_HD T weight_of_product(Factor a, Factor b) const {
    return Base::exp(static_cast<T>(a * b - pivot(max)));
  }
  // And of (a + rest) * b, where `rest` is too small for the sum to hold all of its digits.
  template <class Factor>
  FLASH_ONLINE_HD T weight_of_product(Factor a, Factor rest, Factor b) const {
    return Base::exp(static_cast<T>(rest * b + (a * b - pivot(max))));
  }

  // Step 1 of absorbing a block: raises the maximum to cover the block's. Returns the factor that whatever else was
  // accumulated with the old weights (the output row of attention) must be multiplied by.
  FLASH_ONLINE_HD T raise_max(Max block_max) {
    const Max old = max;
    max = maximum(old, block_max);
    const T factor = rescale(old, max);
    sum *= factor;
    return factor;
  }

  // The same where the factor is dear to apply: a block's maximum that is above by no more than `threshold` is let be, and
  // weights reach exp(threshold). The algebra holds for any point of reference; only overflow asks for the largest score.
  template <class Threshold>
  FLASH_ONLINE_HD T raise_max_lazily(Threshold threshold, Max block_max) {
    const Max old = max;
    max = block_max > old + threshold ? block_max : old;
    const T factor = rescale(old, max);
    sum *= factor;
    return factor;
  }

  // Step 2: adds the block's sum of weight(score), taken after raise_max().
  FLASH_ONLINE_HD void add(T block_sum) { sum += block_sum; }

  // Both steps for a single score; returns the factor of raise_max().
  FLASH_ONLINE_HD T absorb(Max score) {
    const T factor = raise_max(score);
    add(weight(score));
    return factor;
  }

  // The partial result over the union of two disjoint sets.
  FLASH_ONLINE_HD void merge(const OnlineSoftmax& other) {
    raise_max(other.max);
    add(other.sum * rescale(other.max, max));
  }

  // 1 / sum; for the empty row, infinity (softmax, 0 * inf: NaN) or 0 (attention: nothing to attend to gives 0).
  FLASH_ONLINE_HD T inverse_sum() const { return 1 / sum; }
  FLASH_ONLINE_HD T inverse_sum_or_zero() const { return sum == T{} ? T{} : 1 / sum; }

  // log of a score's probability: score - lse, but without the rounding of a large lse.
  FLASH_ONLINE_HD T log_probability(T score) const { return (score - pivot(max)) - Base::log(sum); }

  // log(sum of exp(score)), in units of the base; -inf for the empty row.
  FLASH_ONLINE_HD T lse() const { return static_cast<T>(max + Base::log(Max(sum))); }

  // What rounding lse() to T dropped: lse() + lse_low() is the logarithm to twice T's precision, so that a backward pass
  // gets exp(score - lse) right for scores far from 0. 0 where lse is not finite.
  FLASH_ONLINE_HD T lse_low() const {
    const Max log_sum = Base::log(Max(sum)), total = max + log_sum;
    const Max part = total - max;  // two-sum (Knuth): the rounding of total itself, all there is to it where Max is T
    const Max rest = (max - (total - part)) + (log_sum - part);
    const T low = static_cast<T>((total - Max(static_cast<T>(total))) + rest);
    return low - low == T(0) ? low : T(0);
  }
};

}  // namespace flash_online
