// Softmax, log-softmax and logsumexp on the CPU, and the table of all row kernels of an instruction set; softmax_backward.cpp
// has the gradients of the first two. Each kernel reads a row once for its maximum and sum (online softmax,
// core/online_softmax.h), and once more for its result.
#include "../kernels.h"
#include "row_strips.h"
#include "short_rows.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

namespace {

// Returns whether softmax is computed in strips: if a vector has eight lanes or more, where exp_scores has four sums.
bool softmax_in_strips(const RowProblem& problem) {
  const int lanes = kVectorBytes / (problem.dtype == DType::kFloat64 ? 8 : 4);
  return lanes >= 8 && problem.classes > kMaxShortClasses && lie_in_strips(problem, problem.input, problem.result);
}

int64_t scratch(const RowProblem& problem) {
  const RowPartition partition(problem, 1);
  if (problem.input.data == nullptr && problem.grad.data == nullptr) {  // no tensors: the caller asks for the upper bound
    const int64_t buffer = kCacheLineBytes * (kChunk + kPitchExtra);  // as many rows as share a cache line
    const int64_t tiles = partition.rows_per_tile * ScratchAllocator::bytes_of<std::byte>(topk_row_bytes(problem)) +
                          2 * buffer + kMaxStoredWeightBytes +
                          ScratchAllocator::bytes_of<double>(kMaxStoredWeightBytes / 4 / kChunk + kMaxTileRows);
    return std::max(tiles, strip_tile_bytes(kChunk));
  }
  const bool softmax_backward = problem.input.data == nullptr;
  const bool strips = softmax_backward ? lie_in_strips(problem, problem.grad, problem.output, problem.grad_input)
                                       : problem.result.data != nullptr && softmax_in_strips(problem);
  if (strips && problem.k == 0) return strip_tile_bytes(problem.classes);
  int64_t bytes = shared_row_scratch_bytes(problem, topk_row_bytes(problem)) +
                  partition.rows_per_tile * ScratchAllocator::bytes_of<std::byte>(topk_row_bytes(problem));
  // Buffers for rows without contiguous classes.
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
    double logs[kMaxTileRows];
    for (int64_t first = 0; first < tile.rows; first += kLanes<T>) {
      Vector<T> sums = broadcast(T(1));
      for (int64_t l = 0; l < kLanes<T> && first + l < tile.rows; ++l) sums[l] = partial[first + l].state.sum;
      log_sums<T>(sums, logs + first);
    }
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      weights.input().read(first, count);
      result.begin_write(first);
      for (int64_t r = 0; r < tile.rows; ++r) {
        const E* x = weights.input().row(r);
        // x - max is exact where it matters, near the maximum; the logarithm of the sum is small compared with a large maximum.
        const auto& state = partial[r].state;
        const Vector<T> max = broadcast(static_cast<T>(pivot(state.max)));
        const Vector<T> log_of_row = broadcast(static_cast<T>(logs[r]));
        write_chunk<E>(count, result.row(r), [=](int64_t i, int64_t n) __attribute__((always_inline)) {
          const Pair<T> pair = load_partial(x + i, n, T(0));
          return Pair<T>{(pair.a - max) - log_of_row, (pair.b - max) - log_of_row};
        });
      }
      result.finish_write(count);
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
      const Vector<T> logs = log_sums<T>(state.sum);
      for (int64_t c = 0; c < problem.classes; ++c) x[c] = (x[c] - max) - logs;
    } else {
      constexpr ExpAccuracy kAccuracy = sizeof(R) == 2 ? ExpAccuracy::kRounded : ExpAccuracy::kExact;
      const Vector<T> scale = absorb_block<E, kAccuracy, true>(problem.classes, x).inverse_sum();
      for (int64_t c = 0; c < problem.classes; ++c) x[c] *= scale;
    }
    store_block<R>(problem, problem.result, block, x);
  });
}

// Turns x[classes] into the results of the rows in its lanes, as SoftmaxOp and LogSoftmaxOp do with a chunk.
template <class E, class R>
FLASH_ONLINE_INLINE void softmax_of_lanes(int64_t classes, bool log, Vector<Accumulator<E>>* x) {
  using T = Accumulator<E>;
  Vector<T> max = lowest<Vector<T>>();
  for (int64_t c = 0; c < classes; ++c) max = vector_max(x[c], max);
  const auto sum = [&](const auto& term)
                       FLASH_ONLINE_LAMBDA_INLINE { return sum_of_classes<E, T, kChunk, false>(classes, term); };
  if (log) {
    const OnlineSoftmax<Vector<T>, BaseFor<T, E, ExpAccuracy::kSum>> state{.max = max};
    const Vector<T> total = sum([&](int64_t c) FLASH_ONLINE_LAMBDA_INLINE { return state.weight(x[c]); });
    const Vector<T> logs = log_sums<T>(total);
    max = pivot(max);
    for (int64_t c = 0; c < classes; ++c) x[c] = (x[c] - max) - logs;
  } else {
    constexpr ExpAccuracy kAccuracy = sizeof(R) == 2 ? ExpAccuracy::kRounded : ExpAccuracy::kExact;
    const OnlineSoftmax<Vector<T>, BaseFor<T, E, kAccuracy>> state{.max = max};
    for (int64_t c = 0; c < classes; ++c) x[c] = state.weight(x[c]);
    const Vector<T> scale = 1 / sum([&](int64_t c) FLASH_ONLINE_LAMBDA_INLINE { return x[c]; });
    for (int64_t c = 0; c < classes; ++c) x[c] *= scale;
  }
}

template <class E, class R>
void strip_softmax(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  const int64_t classes = problem.classes;
  for_each_row_strip<T>(problem, executor, [&](const RowStrip& strip, std::byte* scratch) {
    Vector<T>* const x = reinterpret_cast<Vector<T>*>(scratch);
    load_strip<E>(problem, problem.input, strip, x);
    for (int64_t at = 0; at * kLanes<T> < strip.rows * classes; at += classes)
      softmax_of_lanes<E, R>(classes, problem.log, x + at);
    store_strip<R>(problem, problem.result, strip, x);
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
    if (softmax_in_strips(problem)) return strip_softmax<E, R>(problem, executor);
    if (problem.log)
      run_rows<LogSoftmaxOp<E, R>>(problem, executor);
    else
      run_rows<SoftmaxOp<E, R>>(problem, executor);
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
