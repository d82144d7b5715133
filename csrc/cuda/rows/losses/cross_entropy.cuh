// The row operators of cross-entropy on CUDA: their work on one row. cross_entropy.cu launches them, entropy.cu those with an
// entropy.
//
// A row's loss is the sum over c of a_c * -log p_c with a_c = weight_c t_c, where p is the softmax of the row and t its target
// smoothed by e: (1 - e) target + e / classes. Hence the gradient of the input is grad_loss (A p_c - a_c) + grad_lse p_c, where
// A is the sum of a_c. The entropy of a row's softmax adds -grad_entropy p_c (log p_c + entropy).
//
// Without smoothing an index target needs only the row's maximum and sum. Smoothing and probabilities need a second sum, of
// a_c * -log p_c.
#pragma once

#include "../dispatch.cuh"
#include "../rows.h"

namespace flash_online::cuda {

// ---- targets

// The coefficients a_c.
struct ClassCoefficients {
  const float* weight;  // null: ones
  float confidence = 1, smoothing = 0;  // 1 - e and e / classes
  // kSmooth: whether e may be other than 0. It is a double: making floats of it takes up to a tenth of the time of few classes.
  template <bool kSmooth = true>
  __device__ static ClassCoefficients of(const RowProblem& problem) {
    ClassCoefficients coefficients{static_cast<const float*>(problem.weight)};
    if (kSmooth && problem.label_smoothing != 0) {
      coefficients.confidence = static_cast<float>(1 - problem.label_smoothing);
      coefficients.smoothing = static_cast<float>(problem.label_smoothing / static_cast<double>(problem.classes));
    }
    return coefficients;
  }
  __device__ __forceinline__ float weight_of(int64_t c) const { return weight == nullptr ? 1.0f : weight[c]; }
  // a_c of a class with target probability t.
  __device__ __forceinline__ float operator()(int64_t c, float t) const { return weight_of(c) * (confidence * t + smoothing); }
};

constexpr int64_t kIgnored = -1;

// A row's target as the caller gave it, and the class it means: kIgnored, or an index that has been checked.
template <class Reader>
__device__ __forceinline__ int64_t read_target(const RowProblem& problem, const Reader& reader) {
  return reader.coord.exists ? row_scalar<int64_t>(reader, problem.target) : problem.ignore_index;
}
inline RowScalars target_scalars(const RowProblem& problem) { return {problem.target, sizeof(int64_t)}; }
__device__ __forceinline__ int64_t checked_class(const RowProblem& problem, int64_t target) {
  if (target == problem.ignore_index) return kIgnored;
  assert(target >= 0 && target < problem.classes && "cross_entropy: target is out of bounds");
  return target;
}

// -log p_c of a row, from the score of class c.
struct NegativeLogProb {
  float max, log_sum;
  __device__ explicit NegativeLogProb(const RowState& state) : max(pivot(state.max)), log_sum(FastNatural::log(state.sum)) {}
  __device__ __forceinline__ float operator()(float x) const { return log_sum - (x - max); }
  // The same times a coefficient, with what the differences and the product lose.
  __device__ __forceinline__ TwoFloats times(float coefficient, float x) const {
    float distance_low, low, product_low;
    const float distance = two_sum(max, -x, distance_low), high = two_sum(log_sum, distance, low);
    const float product = two_product(coefficient, high, product_low);
    return {product, fmaf(coefficient, distance_low + low, product_low)};
  }
};

// ---- forward

// Writes the results of a row, or adds them to the reader's sums. `resolved`: the row's state after resolve_infinity, for lse.
template <class Reader>
__device__ __forceinline__ void write_loss(const RowProblem& problem, const Reader& reader, int64_t row, float loss,
                                           float weight, RowState resolved) {
  if constexpr (requires { reader.losses; }) {
    if (problem.loss_sums != nullptr) {
      reader.losses.loss.add(loss);
      reader.losses.weight.add(weight);
      return;
    }
  }
  static_cast<float*>(problem.loss)[row] = loss;
  static_cast<float*>(problem.row_weight)[row] = weight;
  if (problem.lse != nullptr) static_cast<float*>(problem.lse)[row] = resolved.lse();
}

// Writes the results of a row with an index target. `score`: the target class's. `smooth_sum`: the sum over c of
// weight_c * -log p_c.
template <bool kSmooth, class Reader>
__device__ __forceinline__ void write_index_loss(const RowProblem& problem, const Reader& reader, int64_t row, int64_t target,
                                                 float score, const RowState& state, const RowState& resolved,
                                                 float smooth_sum) {
  const auto coefficients = ClassCoefficients::of<kSmooth>(problem);
  float loss = 0, weight = 0;
  if (target != kIgnored) {
    weight = coefficients.weight_of(target);
    loss = coefficients.confidence * (weight * -state.log_probability(score));
    if (coefficients.smoothing != 0) loss += coefficients.smoothing * smooth_sum;
  }
  write_loss(problem, reader, row, loss, weight, resolved);
}

__device__ __forceinline__ void write_entropy(const RowProblem& problem, int64_t row, const RowState& state, float products) {
  static_cast<float*>(problem.entropy)[row] = FastNatural::log(state.sum) - products / state.sum;
}

// All threads of the row call this; the one that holds the target's score writes.
template <bool kSmooth, class Reader, class Row>
__device__ __forceinline__ void write_index_loss_by_owner(const RowProblem& problem, const Reader& reader, const Row& row,
                                                          int64_t target, const RowState& state, float smooth_sum) {
  const RowState resolved = problem.lse == nullptr ? state : resolve_infinity(row, state);
  if (row.owns(target == kIgnored ? 0 : target))
    write_index_loss<kSmooth>(problem, reader, row.coord().index, target, target == kIgnored ? 0.0f : row[target], state,
                              resolved, smooth_sum);
}

// Stores a multi-CTA row's second sum, of term(class, element), after the Partials of all rows' first sums.
template <class Row, class F>
__device__ __forceinline__ void store_second_sum(const RowProblem& problem, const Row& row, const F& term) {
  row.store_sum(row, problem.outer * problem.inner * row.slices_per_row(),
                [&](int64_t c, float x, float) { return term(c, x); });
}

// A row that is read no more.
struct FinishedRow {
  RowCoord coord;
};

// kEntropy: it writes the row's entropy as well; without smoothing, which needs a second sum of its own.
template <bool kSmooth, bool kEntropy = false>
struct IndexLoss : std::conditional_t<kEntropy, EntropyOp, OneTensorOp> {
  static_assert(!kSmooth || !kEntropy);
  using State = std::conditional_t<kEntropy, RowEntropyState, RowState>;
  static constexpr bool kReduces = true, kSecondSum = kSmooth, kRare = kSmooth, kRowScalars = true, kTargets = true,
                        kSumsLosses = true;
  static RowScalars scalars(const RowProblem& problem) { return target_scalars(problem); }
  template <class Result, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    auto row = reader.read(problem.input);
    // Loaded after the row: loading it first was measured to cost 10 %, and it is not needed before the state is known.
    const int64_t given = read_target(problem, reader);
    const State state = row.template state<typename Reader::Element, State>();
    if constexpr (kEntropy)
      if (row.is_leader()) static_cast<float*>(problem.entropy)[row.coord().index] = state.entropy();
    const int64_t target = checked_class(problem, given);
    float smooth_sum = 0;
    if constexpr (kSmooth) {
      const auto coefficients = ClassCoefficients::of(problem);
      const NegativeLogProb negative_log_prob(state);
      const auto term = [&](int64_t c, float x) { return coefficients.weight_of(c) * negative_log_prob(x); };
      if constexpr (Reader::kMultiCta) {
        store_second_sum(problem, row, term);
        return;
      } else {
        smooth_sum = row.sum(term);
      }
    }
    write_index_loss_by_owner<kSmooth>(problem, reader, row, target, state, smooth_sum);
  }
  template <class T>
  __device__ static void finish(const RowProblem& problem, const RowCoord& coord, const MergedSlices& merged, float sum) {
    const FinishedRow row{coord};
    const int64_t target = checked_class(problem, read_target(problem, row));
    const float score = target == kIgnored ? 0.0f : row_of<const T>(problem.input, coord)[target];
    write_index_loss<kSmooth>(problem, row, coord.index, target, score, merged.state, merged.resolve_infinity(), sum);
    if constexpr (kEntropy) write_entropy(problem, coord.index, merged.state, merged.extra);
  }
};

struct ProbabilityLoss : OneTensorOp {
  static constexpr bool kReduces = true, kSecondSum = true, kRare = true, kSumsLosses = true;
  template <class T, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    auto row = reader.read(problem.input);
    const Row<const T> target = row_of<const T>(problem.target_probabilities, row.coord());
    const RowState state = row.state();
    const auto coefficients = ClassCoefficients::of(problem);
    const NegativeLogProb negative_log_prob(state);
    const auto term = [&](int64_t c, float x) { return coefficients(c, target[c]) * negative_log_prob(x); };
    if constexpr (Reader::kMultiCta) {
      store_second_sum(problem, row, term);
    } else {
      float loss;
      if constexpr (std::is_same_v<T, float>)  // the terms have either sign, and may cancel
        loss =
            row.precise_sum([&](int64_t c, float x) { return negative_log_prob.times(coefficients(c, target[c]), x); }).value();
      else
        loss = row.sum(term);
      const RowState resolved = resolve_infinity(row, state);
      if (row.is_leader()) write_loss(problem, reader, row.coord().index, loss, 1, resolved);
    }
  }
  template <class T>
  __device__ static void finish(const RowProblem& problem, const RowCoord& coord, const MergedSlices& merged, float sum) {
    write_loss(problem, FinishedRow{coord}, coord.index, sum, 1, merged.resolve_infinity());
  }
};

// The entropy of a row's softmax, next to a loss that needs a second sum itself. It is an operator of its own, which reads the
// rows once more.
struct RowEntropy : OneTensorOp {
  static constexpr bool kReduces = true, kSecondSum = true, kRare = true;
  template <class T, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    auto row = reader.read(problem.input);
    const RowState state = row.state();
    const float max = pivot(state.max);
    const auto term = [&](int64_t, float x) { return state.weight(x) * distance_below(x - max); };
    if constexpr (Reader::kMultiCta) {
      store_second_sum(problem, row, term);
    } else {
      const float products = row.sum(term);
      if (row.is_leader()) write_entropy(problem, row.coord().index, state, products);
    }
  }
  template <class T>
  __device__ static void finish(const RowProblem& problem, const RowCoord& coord, const MergedSlices& merged, float products) {
    write_entropy(problem, coord.index, merged.state, products);
  }
};

// ---- backward

// A row's scalar of a float tensor of row scalars; null: zeros.
__device__ __forceinline__ float row_value(const void* tensor, const RowCoord& coord) {
  return tensor == nullptr || !coord.exists ? 0.0f : static_cast<const float*>(tensor)[coord.index];
}
__device__ __forceinline__ float read_scalar(const void* scalar, DType dtype) {
  if (dtype == DType::kFloat16) return widen(*static_cast<const __half*>(scalar));
  if (dtype == DType::kBFloat16) return widen(*static_cast<const __nv_bfloat16*>(scalar));
  return *static_cast<const float*>(scalar);
}
// The gradient of a row's loss if all rows have the same: that of the reduced loss, divided by what the reduction divided by.
__device__ __forceinline__ float grad_of_losses(const RowProblem& problem) {
  if (problem.divisor == nullptr) return 0;
  return read_scalar(problem.grad_loss, problem.result_dtype) / *static_cast<const float*>(problem.divisor);
}
// The gradient of a row's loss.
template <class Reader>
__device__ __forceinline__ float grad_loss_of(const RowProblem& problem, const Reader& reader) {
  if (problem.divisor == nullptr) return row_value(problem.grad_loss, reader.coord);
  if constexpr (requires { reader.once; })
    return reader.once;
  else
    return grad_of_losses(problem);
}

// The gradient of a row's entropy as a factor of p_c: grad (mean - (x_c - max)), where mean is that of x - max under p.
// It is made before the row is read: after it, the loads would have to wait until the row has arrived.
template <bool kEntropy>
struct EntropyGradient {
  float grad = 0, mean = 0, max = 0;
  __device__ __forceinline__ EntropyGradient(const RowProblem& problem, const RowCoord& coord) {
    if constexpr (kEntropy) grad = row_value(problem.grad_entropy, coord), mean = -row_value(problem.row_entropy, coord);
  }
  __device__ __forceinline__ void set_state(const RowState& state) {
    if constexpr (kEntropy) mean += FastNatural::log(state.sum), max = pivot(state.max);
  }
  // Calls f(g), where g(x) is p_c times its factor, for the score x; `scale` is the factor without this gradient. Results have
  // the type T, in a row of type Row. The logarithm of p_c, in which the factor is linear, is the exponent's argument.
  template <class Row, class T, class F>
  __device__ __forceinline__ void visit_gradients(const RowState& state, float scale, const F& f) const {
    const float at_max = fmaf(grad, mean, scale), inverse = state.inverse_sum();
    if constexpr (kFusesRowWeights<Row, T>) {
      if (FusedWeights::is_accurate_for(state.max)) {
        const FusedWeights weights(state.max);
        const float factor = weights.corrected(inverse), slope = -grad * FusedWeights::kLn2 * factor, first = at_max * factor;
        f([&](float x) {
          const float exponent = weights.exponent(x);
          return exp2_flushed(exponent) * fmaf(slope, distance_below(exponent), first);
        });
        return;
      }
    }
    const float slope = -grad * inverse, first = at_max * inverse;
    f([&](float x) {
      const float distance = x - max;
      return FastNatural::exp(distance) * fmaf(slope, distance_below(distance), first);
    });
  }
  // The factor of p_c with this gradient.
  __device__ __forceinline__ float added_to(float scale, float x) const {
    return kEntropy ? fmaf(grad, mean - distance_below(x - max), scale) : scale;
  }
};

// Without smoothing and with problem.loss this also writes what IndexLoss writes, in the same pass; the gradient may then
// overwrite the row.
template <bool kSmooth, bool kEntropy = false>
struct IndexLossBackward : OneTensorOp {
  static constexpr bool kRare = kSmooth, kRowScalars = true, kTargets = true;
  static RowScalars scalars(const RowProblem& problem) { return target_scalars(problem); }
  __device__ static float once(const RowProblem& problem) { return grad_of_losses(problem); }
  // True if A, the sum of a_c, has to be summed; else the target class or the number of classes determine it.
  __device__ static bool sums_weights(const RowProblem& problem) { return kSmooth && problem.weight != nullptr; }
  template <class Reader>
  __device__ static void store_partial(const RowProblem& problem, const Reader& reader) {
    if (sums_weights(problem)) {
      const auto coefficients = ClassCoefficients::of(problem);
      reader.read(problem.input).store_partial([&](int64_t c, float) { return coefficients.weight_of(c); });
    } else {
      reader.read(problem.input).store_partial(NoExtra{});
    }
  }
  template <class T, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    const RowCoord coord = reader.coord;
    const auto coefficients = ClassCoefficients::of<kSmooth>(problem);
    // Loaded before the row: after it, these loads would have to wait until the row has arrived.
    const int64_t given = read_target(problem, reader);
    const float grad_lse = row_value(problem.grad_lse, coord), grad_loss = grad_loss_of(problem, reader);
    EntropyGradient<kEntropy> of_entropy(problem, coord);
    auto row = reader.read(problem.input);
    const int64_t target = checked_class(problem, given);
    const RowState state = row.state();
    if constexpr (!kSmooth)
      if (problem.loss != nullptr) write_index_loss_by_owner<kSmooth>(problem, reader, row, target, state, 0);
    // grad_input_c = scale p_c - (uniform_grad weight_c + target_grad in the target class). The scale is the sum of what is in
    // parentheses over all classes, and of grad_lse. The loss of one class is 0 whatever the logit: what is left is lse's.
    float scale = grad_lse, target_grad = 0, uniform_grad = 0;
    float weight_sum = static_cast<float>(problem.classes);
    if (sums_weights(problem)) weight_sum = row.sum([&](int64_t c, float) { return coefficients.weight_of(c); });
    if (target != kIgnored && problem.classes == 1) {
      scale += grad_loss - grad_loss;  // NaN stays NaN
    } else if (target != kIgnored) {
      target_grad = grad_loss * (coefficients.confidence * coefficients.weight_of(target));
      scale += target_grad;
      if (kSmooth) {
        uniform_grad = grad_loss * coefficients.smoothing;
        scale = fmaf(uniform_grad, weight_sum, scale);
      }
    }
    of_entropy.set_state(state);
    // 0, not 0 * p: the logits of an ignored row may be inf or NaN
    if (target == kIgnored && scale == 0 && of_entropy.grad == 0) {
      row.template write<T>(problem.grad_input, [](int64_t, float) { return 0.0f; });
      return;
    }
    const float inverse = state.inverse_sum(), factor = scale * inverse;
    // The subtrahend cancels most of the target's probability if that is close to 1. It is therefore subtracted from the weight
    // before the division: the difference is rounded once.
    const auto difference = [&](float x, float amount) {
      return fmaf(-amount, state.sum, of_entropy.added_to(scale, x) * state.weight(x)) * inverse;
    };
    if constexpr (!kSmooth && kEntropy)
      of_entropy.template visit_gradients<decltype(row), T>(state, scale, [&](const auto& g) {
        row.template write_except<T>(
            problem.grad_input, target, [&](int64_t, float x) { return g(x); },
            [&](int64_t, float x) { return of_entropy.added_to(scale, x) * (state.weight(x) * inverse); },
            [&](float x) { return difference(x, target_grad); });
      });
    else if constexpr (!kSmooth)
      visit_weights<decltype(row), T>(state, factor, [&](const auto& w) {
        row.template write_except<T>(
            problem.grad_input, target, [&](int64_t, float x) { return w(x); },
            [&](int64_t, float x) { return state.weight(x) * factor; }, [&](float x) { return difference(x, target_grad); });
      });
    else
      row.template write<T>(problem.grad_input, [&](int64_t c, float x) {
        const float weight = c < problem.classes ? coefficients.weight_of(c) : 0.0f;
        return difference(x, fmaf(uniform_grad, weight, c == target ? target_grad : 0.0f));
      });
  }
};

template <bool kEntropy = false>
struct ProbabilityLossBackward : OneTensorOp {
  static constexpr bool kRare = true;
  __device__ static float once(const RowProblem& problem) { return grad_of_losses(problem); }
  // a_c of a row.
  template <class T>
  struct RowCoefficients {
    ClassCoefficients coefficients;
    Row<const T> target;
    __device__ float operator()(int64_t c, float) const { return coefficients(c, target[c]); }
  };
  template <class Reader>
  __device__ static void store_partial(const RowProblem& problem, const Reader& reader) {
    auto row = reader.read(problem.input);
    using T = typename decltype(row)::Element;
    row.store_partial(
        RowCoefficients<T>{ClassCoefficients::of(problem), row_of<const T>(problem.target_probabilities, row.coord())});
  }
  template <class T, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    EntropyGradient<kEntropy> of_entropy(problem, reader.coord);
    auto row = reader.read(problem.input);
    const RowCoord coord = row.coord();
    const RowCoefficients<T> a{ClassCoefficients::of(problem), row_of<const T>(problem.target_probabilities, coord)};
    const RowState state = row.state();
    const float a_sum = row.sum(a);
    const float grad_loss = grad_loss_of(problem, reader);
    const float loss_scale = problem.classes == 1 ? grad_loss - grad_loss : grad_loss;  // as for one target
    const float scale = loss_scale * a_sum + row_value(problem.grad_lse, coord), inverse = state.inverse_sum();
    of_entropy.set_state(state);
    if (problem.grad_target.data != nullptr) {
      const NegativeLogProb negative_log_prob(state);
      row.template write<T>(problem.grad_target, [&](int64_t c, float x) {
        return grad_loss * (a.coefficients.confidence * (c < problem.classes ? a.coefficients.weight_of(c) : 0.0f)) *
               negative_log_prob(x);
      });
    }
    row.template write<T>(problem.grad_input, [&](int64_t c, float x) {
      // The product is rounded like the scale, which it cancels where p_c is 1 and a_c the whole sum.
      return of_entropy.added_to(scale, x) * (state.weight(x) * inverse) -
             (c < problem.classes ? __fmul_rn(loss_scale, a(c, x)) : 0.0f);
    });
  }
};

}  // namespace flash_online::cuda
