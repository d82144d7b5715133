// Shared by all row kernels: the state of a softmax, the coordinates of a row, and the merge of threads' results.
//
// An operator (dispatch.cuh) needs a row twice: to find its maximum and sum, then to compute results from its elements. The
// kinds of row differ in where the row stays between these two passes. All have the same members, so that an operator is
// written once. A vector is 16 bytes; lengths count the vectors of all tensors that the operator reads. ../choice.h chooses.
//
//   kind           file               where the row stays              chosen for
//   StridedRow     strided_row.cuh    global memory, read twice        rows of classes that are not contiguous
//   block row      block_row.cuh      shared memory, with other rows   up to 16 vectors (256 bytes), and some of up to 256
//   RegisterRow    register_row.cuh   registers                        up to 512 vectors; up to 2048 for operators that only
//                                                                      reduce and for 4-byte elements dealt by words
//   SharedRow      shared_row.cuh     shared memory of a CTA, or of    longer, as far as the largest cluster's shared memory
//                                     the CTAs of a cluster            reaches, if results are as long as the row
//   (pipelined)    pipelined_row.cuh  nowhere: chunks pass through a   longer, if the operator needs one pass and only reduces
//                                     pipeline in shared memory        (compute capability 9.0 and up)
//   MultiCtaRow    multi_cta_row.cuh  global memory: one kernel        all other contiguous rows
//                                     reduces slices, one uses them
//
// The order in which results are merged is fixed, and all threads of a row get the same bits. A row's result is therefore the
// same in every run and does not depend on the other rows.
#pragma once

#include "../../../core/integer.h"
#include "../../../core/online_softmax.h"
#include "../../../core/row_problem.h"
#include "../../../core/visit.h"
#include "../../hw/cluster.cuh"
#include "../../hw/launch.h"
#include "../../hw/math.cuh"
#include "../../hw/vector.cuh"

namespace flash_online::cuda {

// ---- the softmax of a row

// The base of exponentials for scores in natural units. The difference of two scores is rounded first, then scaled by log2(e)
// for the hardware's exp2, so that large scores lose nothing. Two structs have the same role elsewhere: FastBinary
// (attention/common/scores.cuh) takes scores that are already in base 2, and FastNatural of the CPU (cpu/simd.h) evaluates a
// polynomial in vector registers.
struct FastNatural {
  FLASH_ONLINE_HD static float exp(float x) {
#ifdef __CUDA_ARCH__
    return exp2_flushed(x * kLog2E);
#else
    return ::expf(x);
#endif
  }
  FLASH_ONLINE_HD static float log(float x) { return ::logf(x); }
};

using RowState = OnlineSoftmax<float, FastNatural>;
using RowEntropyState = OnlineEntropy<float, FastNatural>;

// A thread raises its running maximum only when a score exceeds it by more than this (natural units). Each raise rounds the sum
// again, and an ascending row would have hundreds of them.
constexpr float kRescaleThreshold = 4;

// True if rows of T take FusedWeights. Rows of floats have half as many elements per byte, so that one instruction more per
// weight is free, and the largest weight is 1 without a correction: equal scores get equal probabilities to the last bit.
template <class T>
constexpr bool kFusesWeights = sizeof(T) < sizeof(float);

// True if a kind of row takes FusedWeights. In rows of a few classes, their cost per row is more than they save.
template <class Row, class T>
constexpr bool kFusesRowWeights = kFusesWeights<T> && !requires { Row::kIsFewClasses; };

// A thread's sums for an entropy: of weights, and of weights times their logarithms.
struct EntropySums {
  float sum = 0, products = 0;
};

// The weights exp(x - max), each by one fused multiply-add and one exp2: 2^(x log2(e) - c) with c = max log2(e), rounded once.
// Rounding c puts the same factor on every weight: the weight of the maximum, which would be 1. Sums are multiplied by its
// inverse, and so is what multiplies these weights. The product of that factor and its inverse rounds to 1 (tested for every
// float that the factor may be). Hence a row in which all other weights vanish has the sum 1, and its maximum the
// probability 1.
class FusedWeights {
 public:
  static constexpr float kLn2 = 0.693147181f;
  // True if the factor is so close to 1, within 2^-13.5, that this holds.
  __device__ __forceinline__ static bool is_accurate_for(float max) { return fabsf(pivot(max)) <= 2048; }
  __device__ __forceinline__ explicit FusedWeights(float max) : pivot_(pivot(max)), c_(pivot_ * kLog2E) {}
  __device__ __forceinline__ float operator()(float x) const { return exp2_flushed(exponent(x)); }
  // The weight's binary logarithm, before it is rounded as the weight is.
  __device__ __forceinline__ float exponent(float x) const { return fmaf(x, kLog2E, -c_); }
  // Turns a sum of these weights into one of RowState::weight(). It also turns 1 / (a sum of RowState::weight()) into the
  // factor that makes these weights probabilities.
  __device__ __forceinline__ float corrected(float sum) const { return sum * inverse_factor(); }
  // What turns sums of these weights, and of these weights times their exponents, into those of RowState::weight() and of
  // RowState::weight() times the natural logarithm.
  __device__ __forceinline__ EntropySums corrected(const EntropySums& sums) const {
    const float factor = inverse_factor();
    return {sums.sum * factor, kLn2 * fmaf(-exponent(pivot_), sums.sum, sums.products) * factor};
  }

 private:
  // 1 / (1 + d) = 1 - d + d^2. Rounded upwards, 1 - d is right for a d of -2^-24 as well, halfway between two floats.
  __device__ __forceinline__ float inverse_factor() const {
    const float d = operator()(pivot_) - 1;
    return fmaf(d, d, __fsub_ru(1, d));
  }
  float pivot_, c_;
};

// Replaces elements of -inf by a finite one whose weight is 0 as well, if the row's maximum is not as low; two at once.
template <class T>
__device__ __forceinline__ uint4 without_infinite(const uint4& v) {
  const unsigned low = std::is_same_v<T, __half> ? 0xfbfffbff : 0xf180f180;  // -65504; -2^100
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const auto raise = [&](unsigned word) {
    const Pair raised = __hmax2_nan(reinterpret_cast<const Pair&>(word), reinterpret_cast<const Pair&>(low));
    return reinterpret_cast<const unsigned&>(raised);
  };
  return {raise(v.x), raise(v.y), raise(v.z), raise(v.w)};
}

// The sums over the vectors of a row of T with which visit(f) calls f, measured from `max`.
template <class T, class Visit>
__device__ __forceinline__ EntropySums entropy_sums(float max, const Visit& visit) {
  EntropySums sums;
  const auto add_elements = [&](const uint4& v, const auto& logarithm, const auto& exp, const auto& bounded) {
    float x[kPerVector<T>];
    unpack<T>(v, x);
    EntropySums own;
#pragma unroll
    for (const float element : x) {
      const float distance = logarithm(element), weight = exp(distance);
      own.sum += weight;
      own.products = fmaf(weight, bounded(distance), own.products);
    }
    sums.sum += own.sum;
    sums.products += own.products;
  };
  if constexpr (kFusesWeights<T>) {
    if (FusedWeights::is_accurate_for(max)) {
      const FusedWeights weights(max);
      visit([&](const uint4& v) {
        add_elements(
            without_infinite<T>(v), [&](float x) { return weights.exponent(x); }, exp2_flushed, [](float x) { return x; });
      });
      return weights.corrected(sums);
    }
  }
  const float from = pivot(max);
  visit([&](const uint4& v) { add_elements(v, [&](float x) { return x - from; }, FastNatural::exp, distance_below<float>); });
  return sums;
}

// Calls f(w), where w(x) is the weight of score x in this state, times `factor`, for results of type T in a row of type Row.
// Where the weight is 1 and T has 16 bits, that may differ from `factor` in the last digit, unless `factor` is a power of 2.
template <class Row, class T, class F>
__device__ __forceinline__ void visit_weights(const RowState& state, float factor, const F& f) {
  if constexpr (kFusesRowWeights<Row, T>) {
    if (FusedWeights::is_accurate_for(state.max)) {
      const FusedWeights weights(state.max);
      const float scale = weights.corrected(factor);
      f([&](float x) { return weights(x) * scale; });
      return;
    }
  }
  f([&](float x) { return state.weight(x) * factor; });
}

// Calls f(p), where p(x) is the probability of score x, for results of type Result. For a 16-bit Result the division by the sum
// may move into the exponent: the error is below a 16-bit result's last digit, but not below float32's.
template <class Row, class Result, class F>
__device__ __forceinline__ void visit_probabilities(const RowState& state, const F& f) {
  if constexpr (sizeof(Result) < sizeof(float)) {
    constexpr float kMost = 512;  // a float of this size has an error of 2^-15
    const float c = fmaf(pivot(state.max), kLog2E, log2f(state.sum));
    if (fabsf(c) <= kMost) {
      f([&](float x) { return exp2_flushed(fmaf(x, kLog2E, -c)); });
      return;
    }
  }
  visit_weights<Row, Result>(state, state.inverse_sum(), f);
}

// ---- rows of a tensor

// One row of a tensor.
template <class T>
struct Row {
  T* data;
  int64_t stride;
  __device__ __forceinline__ float operator[](int64_t c) const { return widen(data[c * stride]); }
  __device__ __forceinline__ void set(int64_t c, float x) const { data[c * stride] = narrow<T>(x); }
};

// A thread's row of [outer, classes, inner]. `index` is the row's position in tensors of row scalars, one per row.
// A thread beyond the last row has exists == false and must not read or write.
struct RowCoord {
  int64_t outer, inner, index;
  bool exists;
};

// The coordinates of row `index`; no division where inner is 1.
__device__ __forceinline__ RowCoord row_coord(const RowProblem& problem, int64_t index) {
  const bool exists = index < problem.outer * problem.inner;
  if (problem.inner == 1) return {index, 0, index, exists};
  return {index / problem.inner, index % problem.inner, index, exists};
}
// Gives the same coordinates, always by division.
__device__ __forceinline__ RowCoord row_coord_by_division(const RowProblem& problem, int64_t index) {
  return {index / problem.inner, index % problem.inner, index, index < problem.outer * problem.inner};
}

template <class T, class Pointer>
__device__ __forceinline__ Row<T> row_of(const View3<Pointer>& view, const RowCoord& coord) {
  return {static_cast<T*>(view.data) + coord.outer * view.stride[0] + coord.inner * view.stride[2], view.stride[1]};
}

// An array of row scalars, one per row, and the bytes of a scalar.
struct RowScalars {
  const void* data;
  unsigned bytes;
};

// The row's scalar in the array that the operator names (dispatch.cuh); the row must exist. A reader may have it at hand.
template <class V, class Reader>
__device__ __forceinline__ V row_scalar(const Reader& reader, const void* array) {
  if constexpr (requires { reader.template staged_scalar<V>(); })
    return reader.template staged_scalar<V>();
  else
    return static_cast<const V*>(array)[reader.coord.index];
}

// The operator's value that depends on the problem alone (`once` in dispatch.cuh); 0 if it has none.
template <class Op>
__device__ __forceinline__ float value_of_once(const RowProblem& problem) {
  if constexpr (requires { Op::once(problem); })
    return Op::once(problem);
  else
    return 0;
}

// ---- sums

// A thread's share of a sum, merged with other threads' shares like a RowState.
struct Sum {
  float value = 0;
  __device__ __forceinline__ void add(float x) { value += x; }
  __device__ __forceinline__ void merge(const Sum& other) { value += other.value; }
};

// The sums of a thread's rows' losses and weights.
struct LossSums {
  Sum loss, weight;
};
// The same of a block of rows, in memory.
struct LossAndWeight {
  float loss, weight;
};

// A sum in two floats, which has twice the digits of one.
struct TwoFloats {
  float high = 0, low = 0;
  __device__ __forceinline__ void add(float x, float x_low = 0) {
    float rounded;
    high = two_sum(high, x, rounded);
    low += rounded + x_low;
  }
  __device__ __forceinline__ void merge(const TwoFloats& other) { add(other.high, other.low); }
  // Rounded to one float. An infinity or NaN is in `high`.
  __device__ __forceinline__ float value() const { return low - low == 0 ? high + low : high; }
};

// A number as the sum of two floats, of which the second is 0 where the first is infinite or NaN.
__device__ __forceinline__ TwoFloats two_floats_of(double x) {
  const float high = static_cast<float>(x), low = static_cast<float>(x - high);
  return {high, low - low == 0 ? low : 0};
}

// The mean of values by weights that should sum to 1: sum(weight * value) / sum(weight). It has more digits than a float, since
// what is wanted is the difference from a value that it may be close to; and the rounding that all weights share leaves it
// alone. A product of two floats is exact in double. The loops wait for memory even where a GPU has few units for double.
struct WeightedMean {
  double product = 0, weight = 0;

  __device__ __forceinline__ void add(float value, float of) {
    product = fma(static_cast<double>(value), static_cast<double>(of), product);
    weight += of;
  }
  __device__ __forceinline__ void merge(const WeightedMean& other) {
    product += other.product;
    weight += other.weight;
  }
  __device__ __forceinline__ TwoFloats value() const { return two_floats_of(weight == 0 ? product : product / weight); }
};

// Kahan's compensated summation, which adds as if the sum had twice its digits. A thread of a long row adds some 10^5 numbers.
class Compensation {
 public:
  __device__ __forceinline__ void add(Sum& sum, float x) { add(sum, sum.value, x); }
  __device__ __forceinline__ void add(RowState& state, float x) { add(state, state.sum, x); }
  __device__ __forceinline__ void add_product(RowEntropyState& state, float x) {
    const float wanted = x - error_, before = state.products;
    state.products += wanted;
    error_ = (state.products - before) - wanted;
  }
  __device__ __forceinline__ void rescale(float factor) { error_ *= factor; }

 private:
  template <class State>
  __device__ __forceinline__ void add(State& state, const float& sum, float x) {
    const float wanted = x - error_, before = sum;
    state.add(wanted);
    error_ = (sum - before) - wanted;
  }
  float error_ = 0;
};

// ---- merging the lanes of a warp, or of an aligned subset of a warp; all lanes of the warp call these together

// Butterfly reductions. They give every lane the same bits, because a maximum is exact and a sum of two commutes.
template <int kLanes>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
template <int kLanes>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

template <int kLanes>
__device__ __forceinline__ RowState merge_lanes(RowState state) {
  state.raise_max(lanes_max<kLanes>(state.max));
  state.sum = lanes_sum<kLanes>(state.sum);
  return state;
}
template <int kLanes>
__device__ __forceinline__ RowEntropyState merge_lanes(RowEntropyState state) {
  state.raise_max(lanes_max<kLanes>(state.max));
  state.sum = lanes_sum<kLanes>(state.sum);
  state.products = lanes_sum<kLanes>(state.products);
  return state;
}
template <int kLanes>
__device__ __forceinline__ Sum merge_lanes(Sum sum) {
  return {lanes_sum<kLanes>(sum.value)};
}

template <int kLanes>
__device__ __forceinline__ TwoFloats merge_lanes(TwoFloats sum) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2)
    sum.add(__shfl_xor_sync(~0u, sum.high, step), __shfl_xor_sync(~0u, sum.low, step));
  return sum;
}
template <int kLanes>
__device__ __forceinline__ WeightedMean merge_lanes(WeightedMean mean) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2)
    mean.merge({__shfl_xor_sync(~0u, mean.product, step), __shfl_xor_sync(~0u, mean.weight, step)});
  return mean;
}

// kCount states in shared memory. Raw bytes, because shared variables cannot have constructors.
template <class State, int kCount>
struct SharedStates {
  alignas(State) unsigned char bytes[kCount * sizeof(State)];
  __device__ __forceinline__ State& operator[](int i) { return reinterpret_cast<State*>(bytes)[i]; }
};

// ---- weights of vectors

// The sum of f(element) over a thread's vectors.
template <class T, int kVectors, class F>
__device__ __forceinline__ float sum_of(const uint4 (&v)[kVectors], const F& f) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float x[kPerVector<T>], vector_sum = 0;
    unpack<T>(v[i], x);
#pragma unroll
    for (int e = 0; e < kPerVector<T>; ++e) vector_sum += f(x[e]);
    sum += vector_sum;
  }
  return sum;
}

// Adds the weights of a thread's vectors to a state; its maximum must already cover them, up to kRescaleThreshold.
template <class T, int kVectors>
__device__ __forceinline__ void add_weights(RowState& state, const uint4 (&v)[kVectors]) {
  if constexpr (kFusesWeights<T>) {
    if (FusedWeights::is_accurate_for(state.max)) {
      const FusedWeights weights(state.max);
      state.add(weights.corrected(sum_of<T>(v, [&](float x) { return weights(x); })));
      return;
    }
  }
  state.add(sum_of<T>(v, [&](float x) { return state.weight(x); }));
}
template <class T, int kVectors>
__device__ __forceinline__ void add_weights(RowEntropyState& state, const uint4 (&v)[kVectors]) {
  const EntropySums sums = entropy_sums<T>(state.max, [&](const auto& add) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) add(v[i]);
  });
  state.add(sums.sum, sums.products);
}

}  // namespace flash_online::cuda
