// Softmax, log-softmax and logsumexp on the CPU, and the table of all row kernels of an instruction set. Each kernel reads a
// row once for its maximum and sum (online softmax, core/online_softmax.h), and once more for its result.
#include "../kernels.h"
#include "short_rows.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

namespace {

int64_t scratch(const RowProblem& problem) {
  const Cut cut(problem, 1);
  if (problem.input.data == nullptr && problem.grad.data == nullptr) {  // a question of how much it is at most
    const int64_t buffer = kLine * (kChunk + kPitchExtra);  // of a line's worth of rows
    return cut.rows * Arena::bytes<std::byte>(topk_storage(problem)) + 2 * buffer + kKept +
           Arena::bytes<double>(kKept / 4 / kChunk + kTileRows);
  }
  int64_t bytes = shared_scratch(problem, topk_storage(problem)) + cut.rows * Arena::bytes<std::byte>(topk_storage(problem));
  // Buffers for rows whose classes do not lie side by side.
  const auto add = [&](const auto& view, DType dtype) {
    if (view.data != nullptr && !is_direct(problem, view))
      bytes += Arena::bytes<std::byte>(cut.rows * buffer_pitch(problem) * size_of(dtype));
  };
  add(problem.input, problem.dtype);
  add(problem.target_probabilities, problem.dtype);
  add(problem.grad_input, problem.dtype);
  add(problem.grad_target, problem.dtype);
  if (problem.k == 0) {
    add(problem.result, problem.result_dtype);
    add(problem.grad, problem.result_dtype);
    add(problem.output, problem.result_dtype);
  }
  // Weights for the second pass of what begins with a first.
  const bool softmax_backward = problem.input.data == nullptr;
  const bool softmax = problem.result.data != nullptr && problem.k == 0 && !problem.log;
  if (softmax || (problem.grad_input.data != nullptr && !softmax_backward)) {
    int64_t rows = cut.rows;  // fewer of them are in a tile where there are many threads
    while (rows > 1 && !may_keep(problem, rows)) rows /= 2;
    if (may_keep(problem, rows)) {
      const int64_t numbers = kept_numbers(problem, rows);
      bytes += Arena::bytes<std::byte>(numbers * (problem.dtype == DType::kFloat64 ? 8 : 4));
      bytes += Arena::bytes<double>(numbers / kChunk + cut.rows);
    }
  }
  return bytes;
}

template <class T>
struct StatePartial {
  RowState<T> state;
};

// Writes the weights of a tile, times factor(r), to `out`.
template <class R, class E, Weighing weighing, class State, class Factor>
FLASH_ONLINE_INLINE void write_weights(Weights<E, weighing>& weights, int64_t begin, int64_t end, Chunks<R, void*>& out,
                                       const State& state, const Factor& factor) {
  weights.write(
      begin, end, state, factor, [&](int64_t first) { out.start(first); },
      [&](int64_t r, int64_t, int64_t count, const auto& f) { write_chunk<E>(count, out.row(r), f); },
      [&](int64_t count) { out.finish(count); });
}

template <class E, class R>
struct SoftmaxOp : RowOp {
  using T = Accumulator<E>;
  using Partial = StatePartial<T>;
  static constexpr bool kSecond = true;
  static constexpr Weighing kWeighing = sizeof(R) == 2 ? Weighing::kRounded : Weighing::kExact;

  Weights<E, kWeighing> weights;
  Chunks<R, void*> result;

  SoftmaxOp(const RowProblem& problem, const Tile& tile, Arena& arena, bool keep)
      : weights(problem, tile, arena, keep), result(problem, problem.result, tile, arena) {}
  void first(int64_t begin, int64_t end, Partial* partial) {
    weights.absorb(begin, end, [&](int64_t r) -> auto& { return partial[r].state; }, nothing_also, result);
  }
  static void merge(Partial& partial, const Partial& other) { join(partial.state, other.state); }
  void finish(Partial*) {}
  void second(int64_t begin, int64_t end, const Partial* partial) {
    write_weights(
        weights, begin, end, result, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r) { return partial[r].state.inverse_sum(); });
  }
};

template <class E, class R>
struct LogSoftmaxOp : RowOp {
  using T = Accumulator<E>;
  using Partial = StatePartial<T>;
  static constexpr bool kSecond = true;

  Weights<E, Weighing::kSum> weights;
  Chunks<R, void*> result;
  const Tile tile;

  LogSoftmaxOp(const RowProblem& problem, const Tile& tile, Arena& arena, bool)
      : weights(problem, tile, arena, false), result(problem, problem.result, tile, arena), tile(tile) {}
  void first(int64_t begin, int64_t end, Partial* partial) {
    weights.absorb(begin, end, [&](int64_t r) -> auto& { return partial[r].state; }, nothing_also, result);
  }
  static void merge(Partial& partial, const Partial& other) { join(partial.state, other.state); }
  void finish(Partial*) {}
  void second(int64_t begin, int64_t end, const Partial* partial) {
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      weights.input().read(first, count);
      result.start(first);
      for (int64_t r = 0; r < tile.rows; ++r) {
        const E* x = weights.input().row(r);
        // x - max is exact where it matters, near the maximum; the logarithm of the sum is small beside a large maximum.
        const auto& state = partial[r].state;
        const Vector<T> max = broadcast(static_cast<T>(pivot(state.max)));
        const Vector<T> log_sum = broadcast(static_cast<T>(FastNatural::log(static_cast<double>(state.sum))));
        write_chunk<E>(count, result.row(r), [=](int64_t i, int64_t n) __attribute__((always_inline)) {
          const Pair<T> pair = load_some(x + i, n, T(0));
          return Pair<T>{(pair.a - max) - log_sum, (pair.b - max) - log_sum};
        });
      }
      result.finish(count);
    });
  }
};

// With s = sum(grad * y), grad_input = (grad - s) y; of the logarithm, with s = sum(grad), grad - s exp(y).
template <class E, class R, bool kLog>
struct SoftmaxBackwardOp : RowOp {
  using T = Accumulator<E>;
  static constexpr bool kSecond = true;
  struct Partial {
    double sum = 0;
  };

  Chunks<R, const void*> grad, output;
  Chunks<E, void*> grad_input;
  const Tile tile;

  SoftmaxBackwardOp(const RowProblem& problem, const Tile& tile, Arena& arena, bool)
      : grad(problem, problem.grad, tile, arena),
        output(problem, problem.output, tile, arena),
        grad_input(problem, problem.grad_input, tile, arena),
        tile(tile) {}
  void first(int64_t begin, int64_t end, Partial* partial) {
    Partial segment[kTileRows];  // summed apart, as where threads share the row
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      grad.read(first, count);
      if (!kLog) output.read(first, count);
      for (int64_t r = 0; r < tile.rows; ++r) {
        grad_input.fetch(r, first, count);
        segment[r].sum += sum_of(grad.row(r), kLog ? nullptr : output.row(r), count);
      }
    });
    for (int64_t r = 0; r < tile.rows; ++r) merge(partial[r], segment[r]);
  }
  static void merge(Partial& partial, const Partial& other) { partial.sum += other.sum; }
  void finish(Partial*) {}
  void second(int64_t begin, int64_t end, const Partial* partial) {
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      grad.read(first, count);
      output.read(first, count);
      grad_input.start(first);
      for (int64_t r = 0; r < tile.rows; ++r) write(grad.row(r), output.row(r), count, partial[r].sum, grad_input.row(r));
      grad_input.finish(count);
    });
  }

 private:
  static __attribute__((noinline)) double sum_of(const R* g, const R* y, int64_t count) { return sum_wide<!kLog>(g, y, count); }
  static __attribute__((noinline)) void write(const R* g, const R* y, int64_t count, double sum, E* to) {
    const Vector<T> total = broadcast(static_cast<T>(sum));
    write_chunk<R>(count, to, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
      const Pair<T> grads = load_some(g + i, n, T(0)), outputs = load_some(y + i, n, T(0));
      if constexpr (kLog)
        return Pair<T>{grads.a - exp_rounded_to<E>(outputs.a) * total, grads.b - exp_rounded_to<E>(outputs.b) * total};
      else
        return Pair<T>{(grads.a - total) * outputs.a, (grads.b - total) * outputs.b};
    });
  }
};

template <class E>
struct LogSumExpOp : RowOp {
  using T = Accumulator<E>;
  using Partial = StatePartial<T>;

  const RowProblem& problem;
  const Tile tile;
  Weights<E, Weighing::kSum> weights;

  LogSumExpOp(const RowProblem& problem, const Tile& tile, Arena& arena, bool)
      : problem(problem), tile(tile), weights(problem, tile, arena, false) {}
  void first(int64_t begin, int64_t end, Partial* partial) {
    weights.absorb(begin, end, [&](int64_t r) -> auto& { return partial[r].state; }, nothing_also, NoResult());
  }
  static void merge(Partial& partial, const Partial& other) { join(partial.state, other.state); }
  void finish(Partial* partial) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      settle_infinite<E>(problem, tile, r, partial[r].state);
      static_cast<T*>(problem.lse)[tile.number + r] = partial[r].state.lse();
    }
  }
};

template <class E>
struct LogSumExpBackwardOp : RowOp {
  using T = Accumulator<E>;
  using Partial = StatePartial<T>;
  static constexpr bool kSecond = true;
  static constexpr Weighing kWeighing = sizeof(E) == 2 ? Weighing::kRounded : Weighing::kExact;

  const RowProblem& problem;
  const Tile tile;
  Weights<E, kWeighing> weights;
  Chunks<E, void*> grad_input;

  LogSumExpBackwardOp(const RowProblem& problem, const Tile& tile, Arena& arena, bool keep)
      : problem(problem),
        tile(tile),
        weights(problem, tile, arena, keep),
        grad_input(problem, problem.grad_input, tile, arena) {}
  void first(int64_t begin, int64_t end, Partial* partial) {
    weights.absorb(begin, end, [&](int64_t r) -> auto& { return partial[r].state; }, nothing_also, grad_input);
  }
  static void merge(Partial& partial, const Partial& other) { join(partial.state, other.state); }
  void finish(Partial* partial) {
    for (int64_t r = 0; r < tile.rows; ++r) settle_infinite<E>(problem, tile, r, partial[r].state);
  }
  void second(int64_t begin, int64_t end, const Partial* partial) {
    write_weights(
        weights, begin, end, grad_input, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r) { return static_cast<const T*>(problem.grad_lse)[tile.number + r] * partial[r].state.inverse_sum(); });
  }
};

template <class E, class R>
void short_softmax(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  for_each_block<T>(problem, executor, [&](const Block& block) {
    Vector<T> x[kShort];
    load_block<E>(problem, problem.input, block, x);
    if (problem.log) {
      const auto state = absorb_block<E, Weighing::kSum, false>(problem.classes, x);
      const Vector<T> max = pivot(state.max);
      double logs[kLanes<T>];
      log_sums<T>(state.sum, logs);
      Vector<T> log_sum;
      for (int l = 0; l < kLanes<T>; ++l) log_sum[l] = static_cast<T>(logs[l]);
      for (int64_t c = 0; c < problem.classes; ++c) x[c] = (x[c] - max) - log_sum;
    } else {
      constexpr Weighing kWeighing = sizeof(R) == 2 ? Weighing::kRounded : Weighing::kExact;
      const Vector<T> scale = absorb_block<E, kWeighing, true>(problem.classes, x).inverse_sum();
      for (int64_t c = 0; c < problem.classes; ++c) x[c] *= scale;
    }
    store_block<R>(problem, problem.result, block, x);
  });
}

template <class E, class R>
void short_softmax_backward(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  for_each_block<T>(problem, executor, [&](const Block& block) {
    Vector<T> g[kShort], y[kShort];
    load_block<R>(problem, problem.grad, block, g);
    load_block<R>(problem, problem.output, block, y);
    Vector<T> sum = {};
    if constexpr (sizeof(R) == 4) {  // terms that cancel, as in sum_wide
      WideSum wide;
      for (int64_t c = 0; c < problem.classes; ++c) problem.log ? wide.add(g[c]) : wide.add_product(g[c], y[c]);
      sum = wide.narrowed();
    } else {
      for (int64_t c = 0; c < problem.classes; ++c) sum += problem.log ? g[c] : g[c] * y[c];
    }
    for (int64_t c = 0; c < problem.classes; ++c)
      g[c] = problem.log ? g[c] - exp_rounded_to<E>(y[c]) * sum : (g[c] - sum) * y[c];
    store_block<E>(problem, problem.grad_input, block, g);
  });
}

template <class E>
void short_logsumexp(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  for_each_block<T>(problem, executor, [&](const Block& block) {
    Vector<T> x[kShort];
    load_block<E>(problem, problem.input, block, x);
    const auto state = absorb_block<E, Weighing::kSum, false>(problem.classes, x);
    double logs[kLanes<T>];
    log_sums<T>(state.sum, logs);
    store_numbers<T>(problem.lse, block, lse_of<T>(problem.classes, x, state.max, logs));
  });
}

void softmax(const RowProblem& problem, const Executor& executor) {
  visit_row_types(problem, [&](auto e, auto r) {
    using E = decltype(e);
    using R = decltype(r);
    if (is_short(problem)) return short_softmax<E, R>(problem, executor);
    if (problem.log)
      run_rows<LogSoftmaxOp<E, R>>(problem, executor);
    else
      run_rows<SoftmaxOp<E, R>>(problem, executor);
  });
}

void softmax_backward(const RowProblem& problem, const Executor& executor) {
  visit_row_types(problem, [&](auto e, auto r) {
    using E = decltype(e);
    using R = decltype(r);
    if (is_short(problem, kShort * 3 / 4)) return short_softmax_backward<E, R>(problem, executor);
    if (problem.log)
      run_rows<SoftmaxBackwardOp<E, R, true>>(problem, executor);
    else
      run_rows<SoftmaxBackwardOp<E, R, false>>(problem, executor);
  });
}

void logsumexp(const RowProblem& problem, const Executor& executor) {
  visit_floating<Float16, BFloat16>(problem.dtype, [&](auto type) {
    using E = typename decltype(type)::type;
    if (is_short(problem)) return short_logsumexp<E>(problem, executor);
    run_rows<LogSumExpOp<E>>(problem, executor);
  });
}

void logsumexp_backward(const RowProblem& problem, const Executor& executor) {
  visit_floating<Float16, BFloat16>(
      problem.dtype, [&](auto type) { run_rows<LogSumExpBackwardOp<typename decltype(type)::type>>(problem, executor); });
}

}  // namespace

extern const RowKernels row_kernels;
const RowKernels row_kernels = {
    .scratch = scratch,
    .softmax = softmax,
    .softmax_backward = softmax_backward,
    .logsumexp = logsumexp,
    .logsumexp_backward = logsumexp_backward,
    .cross_entropy = cross_entropy,
    .cross_entropy_backward = cross_entropy_backward,
    .topk_softmax = topk_softmax,
    .topk_softmax_backward = topk_softmax_backward,
};

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
