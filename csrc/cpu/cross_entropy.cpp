// Cross-entropy on the CPU, one loss a row, against class indices or probabilities.
//
// Both are the sum over c of a_c * -log p_c, with a_c = weight_c t_c and t the smoothed target, (1 - e) t + e / classes. Hence
// the gradient of the input is grad_loss (A p_c - a_c) with A the sum of a_c, and that of the lse is grad_lse p_c.
#include "row_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

namespace {

template <class T>
struct Classes {
  const T* weight;   // null: ones
  T keep, spread;    // 1 - e and e / classes: how much of the target stays, and what every class gets
  explicit Classes(const RowProblem& problem)
      : weight(static_cast<const T*>(problem.weight)),
        keep(static_cast<T>(1 - problem.label_smoothing)),
        spread(problem.label_smoothing == 0 ? T(0)
                                            : static_cast<T>(problem.label_smoothing / static_cast<double>(problem.classes))) {}
  FLASH_ONLINE_INLINE T weight_of(int64_t c) const { return weight == nullptr ? T(1) : weight[c]; }
  // a_c for a class of target probability t.
  FLASH_ONLINE_INLINE T share(int64_t c, T t) const { return weight_of(c) * (keep * t + spread); }
};

template <class T>
double sum_of_weights(const RowProblem& problem) {
  const T* weight = static_cast<const T*>(problem.weight);
  double sum = weight == nullptr ? static_cast<double>(problem.classes) : 0;
  for (int64_t c = 0; weight != nullptr && c < problem.classes; ++c) sum += weight[c];
  return sum;
}

constexpr int64_t kIgnored = -1;

// The row's class, or kIgnored, also for one that is out of range, which is reported.
FLASH_ONLINE_INLINE int64_t class_of(const RowProblem& problem, int64_t row) {
  const int64_t target = problem.target[row];
  if (target == problem.ignore_index) return kIgnored;
  if (target >= 0 && target < problem.classes) return target;
  report_bad_row(problem, row);
  return kIgnored;
}

template <class T>
void forward_indices(const RowProblem& problem, const Tile& tile, T* buffer) {
  const Classes<T> classes(problem);
  Reader<T> input(problem, problem.dtype, problem.input, tile, buffer);
  Softmax<T> state[kTileRows];
  absorb_rows(problem, input, tile.rows, state);

  double smooth[kTileRows] = {};  // sum of weight_c * -log p_c
  if (classes.spread != T(0)) {
    for_each_chunk(problem, [&](int64_t begin, int64_t count) {
      input.read(begin, count);
      for (int64_t r = 0; r < tile.rows; ++r) {
        const T* x = input.row(r);
        const T max = pivot(state[r].max), log_sum = FastNatural::log(state[r].sum);
        smooth[r] +=
            sum_over<double>(count, [&](int64_t c) { return classes.weight_of(begin + c) * (log_sum - (x[c] - max)); });
      }
    });
  }

  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t row = tile.number + r, target = class_of(problem, row);
    T loss = T(0), weight = T(0);
    if (target != kIgnored) {
      weight = classes.weight_of(target);
      const T x = load_one<T>(problem, problem.dtype, problem.input, tile, r, target);
      loss = classes.keep * (weight * -state[r].log_probability(x));
      if (classes.spread != T(0)) loss += classes.spread * static_cast<T>(smooth[r]);
    }
    settle_infinite(problem, input, r, state[r]);
    static_cast<T*>(problem.loss)[row] = loss;
    static_cast<T*>(problem.row_weight)[row] = weight;
    static_cast<T*>(problem.lse)[row] = state[r].lse();
  }
}

template <class T>
void forward_probabilities(const RowProblem& problem, const Tile& tile, T* buffer) {
  const Classes<T> classes(problem);
  Reader<T> input(problem, problem.dtype, problem.input, tile, buffer);
  Reader<T> target(problem, problem.dtype, problem.target_probabilities, tile, buffer + kTileRows * kChunk);
  Softmax<T> state[kTileRows];
  absorb_rows(problem, input, tile.rows, state);

  double loss[kTileRows] = {};
  for_each_chunk(problem, [&](int64_t begin, int64_t count) {
    input.read(begin, count);
    target.read(begin, count);
    for (int64_t r = 0; r < tile.rows; ++r) {
      const T *x = input.row(r), *t = target.row(r);
      const T max = pivot(state[r].max), log_sum = FastNatural::log(state[r].sum);
      loss[r] += sum_over<double>(count, [&](int64_t c) { return classes.share(begin + c, t[c]) * (log_sum - (x[c] - max)); });
    }
  });

  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t row = tile.number + r;
    settle_infinite(problem, input, r, state[r]);
    static_cast<T*>(problem.loss)[row] = static_cast<T>(loss[r]);
    static_cast<T*>(problem.row_weight)[row] = T(1);
    static_cast<T*>(problem.lse)[row] = state[r].lse();
  }
}

// What the gradient of a row's input is made of: grad_input_c = scale p_c - spread weight_c, and less `direct` at the target.
template <class T>
struct RowGradient {
  T scale = T(0), spread = T(0), direct = T(0);
  int64_t target = kIgnored;
};

template <class T>
FLASH_ONLINE_INLINE T grad_lse_of(const RowProblem& problem, int64_t row) {
  return problem.grad_lse == nullptr ? T(0) : static_cast<const T*>(problem.grad_lse)[row];
}

template <class T>
void backward_indices(const RowProblem& problem, const Tile& tile, T weight_sum, T* buffer) {
  const Classes<T> classes(problem);
  RowGradient<T> gradient[kTileRows];
  bool anything = false;
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t row = tile.number + r, target = class_of(problem, row);
    const T grad_lse = grad_lse_of<T>(problem, row);
    RowGradient<T>& g = gradient[r] = {.scale = grad_lse, .target = target};
    if (target != kIgnored) {
      const T grad_loss = static_cast<const T*>(problem.grad_loss)[row];
      g.direct = grad_loss * (classes.keep * classes.weight_of(target));
      g.scale += g.direct;
      if (classes.spread != T(0)) {  // not 0 * an infinite grad_loss
        g.spread = grad_loss * classes.spread;
        g.scale += g.spread * weight_sum;
      }
    }
    anything |= target != kIgnored || grad_lse != T(0);
  }

  Reader<T> input(problem, problem.dtype, problem.input, tile, buffer);
  T* result = buffer + kTileRows * kChunk;
  Softmax<T> state[kTileRows];
  if (anything) absorb_rows(problem, input, tile.rows, state);
  for_each_chunk(problem, [&](int64_t begin, int64_t count) {
    if (anything) input.read(begin, count);
    for (int64_t r = 0; r < tile.rows; ++r) {
      const auto [scale, spread, direct, target] = gradient[r];
      T* g = result + r * kChunk;
      if (target == kIgnored && scale == T(0)) {  // not 0 * p: the logits of an ignored row may hold anything
        for (int64_t c = 0; c < count; ++c) g[c] = T(0);
        continue;
      }
      const Softmax<T> row = state[r];
      const T* x = input.row(r);
      const T inverse = row.inverse_sum();
      for (int64_t c = 0; c < count; ++c) g[c] = scale * (row.weight(x[c]) * inverse);
      if (spread != T(0))
        for (int64_t c = 0; c < count; ++c) g[c] -= spread * classes.weight_of(begin + c);
      if (target >= begin && target < begin + count) g[target - begin] -= direct;
    }
    store(problem, problem.dtype, problem.grad_input, tile, begin, count, result);
  });
}

template <class T>
void backward_probabilities(const RowProblem& problem, const Tile& tile, T* buffer) {
  const Classes<T> classes(problem);
  Reader<T> input(problem, problem.dtype, problem.input, tile, buffer);
  Reader<T> target(problem, problem.dtype, problem.target_probabilities, tile, buffer + kTileRows * kChunk);
  Softmax<T> state[kTileRows];
  absorb_rows(problem, input, tile.rows, state);
  double share_sum[kTileRows] = {};
  for_each_chunk(problem, [&](int64_t begin, int64_t count) {
    target.read(begin, count);
    for (int64_t r = 0; r < tile.rows; ++r) {
      const T* t = target.row(r);
      share_sum[r] += sum_over<double>(count, [&](int64_t c) { return classes.share(begin + c, t[c]); });
    }
  });

  for_each_chunk(problem, [&](int64_t begin, int64_t count) {
    input.read(begin, count);
    target.read(begin, count);
    for (int64_t r = 0; r < tile.rows; ++r) {
      const int64_t index = tile.number + r;
      const Softmax<T> row = state[r];
      const T grad_loss = static_cast<const T*>(problem.grad_loss)[index], inverse = row.inverse_sum();
      const T scale = grad_loss * static_cast<T>(share_sum[r]) + grad_lse_of<T>(problem, index);
      const T max = pivot(row.max), log_sum = FastNatural::log(row.sum);
      T *x = buffer + r * kChunk, *t = buffer + (kTileRows + r) * kChunk;  // overwritten by the two gradients
      for (int64_t c = 0; c < count; ++c) {
        const T score = x[c];
        x[c] = scale * (row.weight(score) * inverse) - grad_loss * classes.share(begin + c, t[c]);
        t[c] = grad_loss * (classes.keep * classes.weight_of(begin + c)) * (log_sum - (score - max));
      }
    }
    store(problem, problem.dtype, problem.grad_input, tile, begin, count, buffer);
    if (problem.grad_target.data != nullptr)
      store(problem, problem.dtype, problem.grad_target, tile, begin, count, buffer + kTileRows * kChunk);
  });
}

}  // namespace

void cross_entropy(const RowProblem& problem, const Executor& executor) {
  for_each_tile(problem, executor, [&](const Tile& tile, auto* buffer) {
    if (problem.target != nullptr)
      forward_indices(problem, tile, buffer);
    else
      forward_probabilities(problem, tile, buffer);
  });
}

void cross_entropy_backward(const RowProblem& problem, const Executor& executor) {
  const double weight_sum = problem.dtype == DType::kFloat64 ? sum_of_weights<double>(problem) : sum_of_weights<float>(problem);
  for_each_tile(problem, executor, [&](const Tile& tile, auto* buffer) {
    using T = std::remove_pointer_t<decltype(buffer)>;
    if (problem.target != nullptr)
      backward_indices(problem, tile, static_cast<T>(weight_sum), buffer);
    else
      backward_probabilities(problem, tile, buffer);
  });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
