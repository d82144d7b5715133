// Softmax, log-softmax and logsumexp on the CPU, and the table of all row kernels of an instruction set. Each kernel reads a
// row once for its maximum and sum (online softmax, core/online_softmax.h), and once more for its result.
#include "../kernels.h"
#include "short_rows.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

namespace {

int64_t scratch(const RowProblem& problem) {
  const RowPartition partition(problem, 1);
  if (problem.input.data == nullptr && problem.grad.data == nullptr) {  // no tensors: the caller asks for the upper bound
    const int64_t buffer = kCacheLineBytes * (kChunk + kPitchExtra);  // as many rows as share a cache line
    return partition.rows_per_tile * ScratchAllocator::bytes_of<std::byte>(topk_row_bytes(problem)) + 2 * buffer +
           kMaxStoredWeightBytes + ScratchAllocator::bytes_of<double>(kMaxStoredWeightBytes / 4 / kChunk + kMaxTileRows);
  }
  int64_t bytes = split_scratch_bytes(problem, topk_row_bytes(problem)) +
                  partition.rows_per_tile * ScratchAllocator::bytes_of<std::byte>(topk_row_bytes(problem));
  // Buffers for rows whose classes are not contiguous.
  const auto add = [&](const auto& view, DType dtype) {
    if (view.data != nullptr && !has_contiguous_classes(problem, view))
      bytes += ScratchAllocator::bytes_of<std::byte>(partition.rows_per_tile * buffer_pitch(problem) * size_of(dtype));
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
  // Weights that the first pass stores for the second.
  const bool softmax_backward = problem.input.data == nullptr;
  const bool softmax = problem.result.data != nullptr && problem.k == 0 && !problem.log;
  if (softmax || (problem.grad_input.data != nullptr && !softmax_backward)) {
    int64_t rows = partition.rows_per_tile;  // tiles have fewer rows where there are many threads
    while (rows > 1 && !can_store_weights(problem, rows)) rows /= 2;
    if (can_store_weights(problem, rows)) {
      const int64_t weights = stored_weight_count(problem, rows);
      bytes += ScratchAllocator::bytes_of<std::byte>(weights * (problem.dtype == DType::kFloat64 ? 8 : 4));
      bytes += ScratchAllocator::bytes_of<double>(weights / kChunk + partition.rows_per_tile);
    }
  }
  return bytes;
}

template <class T>
struct StatePartial {
  RowState<T> state;
};

// Writes the weights of a tile, times factor(r), to `out`.
template <class R, class E, ExpAccuracy accuracy, class State, class Factor>
FLASH_ONLINE_INLINE void write_weights(RowWeights<E, accuracy>& weights, int64_t begin, int64_t end, Chunks<R, void*>& out,
                                       const State& state, const Factor& factor) {
  weights.write(
      begin, end, state, factor, [&](int64_t first) { out.begin_write(first); },
      [&](int64_t r, int64_t, int64_t count, const auto& f) { write_chunk<E>(count, out.row(r), f); },
      [&](int64_t count) { out.finish_write(count); });
}

template <class E, class R>
struct SoftmaxOp : RowOp {
  using T = Accumulator<E>;
  using Partial = StatePartial<T>;
  static constexpr bool kHasSecondPass = true;
  static constexpr ExpAccuracy kAccuracy = sizeof(R) == 2 ? ExpAccuracy::kRounded : ExpAccuracy::kExact;

  RowWeights<E, kAccuracy> weights;
  Chunks<R, void*> result;

  SoftmaxOp(const RowProblem& problem, const RowTile& tile, ScratchAllocator& allocator, bool keep)
      : weights(problem, tile, allocator, keep), result(problem, problem.result, tile, allocator) {}
  void first_pass(int64_t begin, int64_t end, Partial* partial) {
    weights.absorb(begin, end, [&](int64_t r) -> auto& { return partial[r].state; }, no_chunk_hook, result);
  }
  static void merge(Partial& partial, const Partial& other) { merge_states(partial.state, other.state); }
  void finish(Partial*) {}
  void second_pass(int64_t begin, int64_t end, const Partial* partial) {
    write_weights(
        weights, begin, end, result, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r) { return partial[r].state.inverse_sum(); });
  }
};

template <class E, class R>
struct LogSoftmaxOp : RowOp {
  using T = Accumulator<E>;
  using Partial = StatePartial<T>;
  static constexpr bool kHasSecondPass = true;

  RowWeights<E, ExpAccuracy::kSum> weights;
  Chunks<R, void*> result;
  const RowTile tile;

  LogSoftmaxOp(const RowProblem& problem, const RowTile& tile, ScratchAllocator& allocator, bool)
      : weights(problem, tile, allocator, false), result(problem, problem.result, tile, allocator), tile(tile) {}
  void first_pass(int64_t begin, int64_t end, Partial* partial) {
    weights.absorb(begin, end, [&](int64_t r) -> auto& { return partial[r].state; }, no_chunk_hook, result);
  }
  static void merge(Partial& partial, const Partial& other) { merge_states(partial.state, other.state); }
  void finish(Partial*) {}
  void second_pass(int64_t begin, int64_t end, const Partial* partial) {
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      weights.input().read(first, count);
      result.begin_write(first);
      for (int64_t r = 0; r < tile.rows; ++r) {
        const E* x = weights.input().row(r);
        // x - max is exact where it matters, near the maximum; the logarithm of the sum is small beside a large maximum.
        const auto& state = partial[r].state;
        const Vector<T> max = broadcast(static_cast<T>(pivot(state.max)));
        const Vector<T> log_sum = broadcast(static_cast<T>(FastNatural::log(static_cast<double>(state.sum))));
        write_chunk<E>(count, result.row(r), [=](int64_t i, int64_t n) __attribute__((always_inline)) {
          const Pair<T> pair = load_partial(x + i, n, T(0));
          return Pair<T>{(pair.a - max) - log_sum, (pair.b - max) - log_sum};
        });
      }
      result.finish_write(count);
    });
  }
};

// Softmax: with s = sum(grad * y), grad_input = (grad - s) y. Log-softmax: with s = sum(grad), grad_input = grad - s exp(y).
// Where y is rounded to float32, s is the mean of grad by the weights y: grad - s keeps its digits where one y is nearly 1.
template <class E, class R, bool kLog>
struct SoftmaxBackwardOp : RowOp {
  using T = Accumulator<E>;
  static constexpr bool kHasSecondPass = true;
  static constexpr bool kTakesMean = !kLog && std::is_same_v<R, float>;
  struct Sum {
    double sum = 0;
    FLASH_ONLINE_INLINE void merge(const Sum& other) { sum += other.sum; }
    FLASH_ONLINE_INLINE double value() const { return sum; }
  };
  using Partial = std::conditional_t<kTakesMean, WeightedMean, Sum>;

  Chunks<R, const void*> grad, output;
  Chunks<E, void*> grad_input;
  const RowTile tile;

  SoftmaxBackwardOp(const RowProblem& problem, const RowTile& tile, ScratchAllocator& allocator, bool)
      : grad(problem, problem.grad, tile, allocator),
        output(problem, problem.output, tile, allocator),
        grad_input(problem, problem.grad_input, tile, allocator),
        tile(tile) {}
  void first_pass(int64_t begin, int64_t end, Partial* partial) {
    Partial segment[kMaxTileRows];  // each segment is summed by itself, as where threads share the row
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      grad.read(first, count);
      if (!kLog) output.read(first, count);
      for (int64_t r = 0; r < tile.rows; ++r) {
        grad_input.prefetch(r, first, count);
        segment[r].merge(part_of(grad.row(r), kLog ? nullptr : output.row(r), count));
      }
    });
    for (int64_t r = 0; r < tile.rows; ++r) merge(partial[r], segment[r]);
  }
  static void merge(Partial& partial, const Partial& other) { partial.merge(other); }
  void finish(Partial*) {}
  void second_pass(int64_t begin, int64_t end, const Partial* partial) {
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      grad.read(first, count);
      output.read(first, count);
      grad_input.begin_write(first);
      for (int64_t r = 0; r < tile.rows; ++r) write(grad.row(r), output.row(r), count, partial[r].value(), grad_input.row(r));
      grad_input.finish_write(count);
    });
  }

 private:
  static __attribute__((noinline)) Partial part_of(const R* g, const R* y, int64_t count) {
    if constexpr (kTakesMean)
      return weighted_mean(g, y, count);
    else
      return {sum_in_double<!kLog>(g, y, count)};
  }
  static __attribute__((noinline)) void write(const R* g, const R* y, int64_t count, double sum, E* to) {
    const TwoParts<T> parts(sum);
    const Vector<T> total = broadcast(parts.high), rest = broadcast(parts.low);
    write_chunk<R>(count, to, [=](int64_t i, int64_t n) __attribute__((always_inline)) {
      const Pair<T> grads = load_partial(g + i, n, T(0)), outputs = load_partial(y + i, n, T(0));
      if constexpr (kLog)
        return Pair<T>{grads.a - exp_rounded_to<E>(outputs.a) * total, grads.b - exp_rounded_to<E>(outputs.b) * total};
      else if constexpr (kTakesMean)
        return Pair<T>{((grads.a - total) - rest) * outputs.a, ((grads.b - total) - rest) * outputs.b};
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
  const RowTile tile;
  RowWeights<E, ExpAccuracy::kSum> weights;

  LogSumExpOp(const RowProblem& problem, const RowTile& tile, ScratchAllocator& allocator, bool)
      : problem(problem), tile(tile), weights(problem, tile, allocator, false) {}
  void first_pass(int64_t begin, int64_t end, Partial* partial) {
    weights.absorb(begin, end, [&](int64_t r) -> auto& { return partial[r].state; }, no_chunk_hook, NoResult());
  }
  static void merge(Partial& partial, const Partial& other) { merge_states(partial.state, other.state); }
  void finish(Partial* partial) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      resolve_infinity<E>(problem, tile, r, partial[r].state);
      static_cast<T*>(problem.lse)[tile.first_row + r] = partial[r].state.lse();
    }
  }
};

template <class E>
struct LogSumExpBackwardOp : RowOp {
  using T = Accumulator<E>;
  using Partial = StatePartial<T>;
  static constexpr bool kHasSecondPass = true;
  static constexpr ExpAccuracy kAccuracy = sizeof(E) == 2 ? ExpAccuracy::kRounded : ExpAccuracy::kExact;

  const RowProblem& problem;
  const RowTile tile;
  RowWeights<E, kAccuracy> weights;
  Chunks<E, void*> grad_input;

  LogSumExpBackwardOp(const RowProblem& problem, const RowTile& tile, ScratchAllocator& allocator, bool keep)
      : problem(problem),
        tile(tile),
        weights(problem, tile, allocator, keep),
        grad_input(problem, problem.grad_input, tile, allocator) {}
  void first_pass(int64_t begin, int64_t end, Partial* partial) {
    weights.absorb(begin, end, [&](int64_t r) -> auto& { return partial[r].state; }, no_chunk_hook, grad_input);
  }
  static void merge(Partial& partial, const Partial& other) { merge_states(partial.state, other.state); }
  void finish(Partial* partial) {
    for (int64_t r = 0; r < tile.rows; ++r) resolve_infinity<E>(problem, tile, r, partial[r].state);
  }
  void second_pass(int64_t begin, int64_t end, const Partial* partial) {
    write_weights(
        weights, begin, end, grad_input, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r) {
          return static_cast<const T*>(problem.grad_lse)[tile.first_row + r] * partial[r].state.inverse_sum();
        });
  }
};

template <class E, class R>
void short_softmax(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  for_each_row_block<T>(problem, executor, [&](const RowBlock& block) {
    Vector<T> x[kMaxShortClasses];
    load_block<E>(problem, problem.input, block, x);
    if (problem.log) {
      const auto state = absorb_block<E, ExpAccuracy::kSum, false>(problem.classes, x);
      const Vector<T> max = pivot(state.max);
      double logs[kLanes<T>];
      log_sums<T>(state.sum, logs);
      Vector<T> log_sum;
      for (int l = 0; l < kLanes<T>; ++l) log_sum[l] = static_cast<T>(logs[l]);
      for (int64_t c = 0; c < problem.classes; ++c) x[c] = (x[c] - max) - log_sum;
    } else {
      constexpr ExpAccuracy kAccuracy = sizeof(R) == 2 ? ExpAccuracy::kRounded : ExpAccuracy::kExact;
      const Vector<T> scale = absorb_block<E, kAccuracy, true>(problem.classes, x).inverse_sum();
      for (int64_t c = 0; c < problem.classes; ++c) x[c] *= scale;
    }
    store_block<R>(problem, problem.result, block, x);
  });
}

template <class E, class R>
void short_softmax_backward(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  for_each_row_block<T>(problem, executor, [&](const RowBlock& block) {
    Vector<T> g[kMaxShortClasses], y[kMaxShortClasses];
    load_block<R>(problem, problem.grad, block, g);
    load_block<R>(problem, problem.output, block, y);
    if constexpr (std::is_same_v<R, float>) {
      if (problem.log) {
        DoubleSum sum;
        for (int64_t c = 0; c < problem.classes; ++c) sum.add(g[c]);
        Vector<float> total;
        for (int l = 0; l < kLanes<float>; ++l) total[l] = static_cast<float>(sum.lane(l));
        for (int64_t c = 0; c < problem.classes; ++c) g[c] -= exp_rounded_to<E>(y[c]) * total;
      } else {  // WeightedMean, lane by lane
        Vector<float> product = {}, weight = {}, deviation = {};
        for (int64_t c = 0; c < problem.classes; ++c) product += g[c] * y[c], weight += y[c];
        const Vector<float> divisor = weight == 0 ? broadcast(1.f) : weight, mean = product / divisor,
                            pivot = mean - mean == 0 ? mean : broadcast(0.f);
        for (int64_t c = 0; c < problem.classes; ++c) deviation += (g[c] - pivot) * y[c];
        const Vector<float> rest = deviation / divisor;
        for (int64_t c = 0; c < problem.classes; ++c) g[c] = ((g[c] - pivot) - rest) * y[c];
      }
    } else {
      Vector<T> sum = {};
      for (int64_t c = 0; c < problem.classes; ++c) sum += problem.log ? g[c] : g[c] * y[c];
      for (int64_t c = 0; c < problem.classes; ++c)
        g[c] = problem.log ? g[c] - exp_rounded_to<E>(y[c]) * sum : (g[c] - sum) * y[c];
    }
    store_block<E>(problem, problem.grad_input, block, g);
  });
}

template <class E>
void short_logsumexp(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  for_each_row_block<T>(problem, executor, [&](const RowBlock& block) {
    Vector<T> x[kMaxShortClasses];
    load_block<E>(problem, problem.input, block, x);
    const auto state = absorb_block<E, ExpAccuracy::kSum, false>(problem.classes, x);
    double logs[kLanes<T>];
    log_sums<T>(state.sum, logs);
    store_per_row<T>(problem.lse, block, lse_of<T>(problem.classes, x, state.max, logs));
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
    if (is_short(problem, kMaxShortClasses * 3 / 4)) return short_softmax_backward<E, R>(problem, executor);
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
