// The gradients of softmax and log-softmax on the CPU. Rows of contiguous classes that fill at most a chunk are computed in
// batches, from one end to the other; rows that lie side by side in strips, one per lane (row_strips.h); longer rows, rows that
// threads share and rows of other strides by tiles (row_tile.h), very short ones of them one per lane (short_rows.h).
#include "gradient_rows.h"
#include "row_strips.h"
#include "short_rows.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

namespace {

// Results that no cache holds until they are read go past the caches: the memory is not read before it is written. Below that
// size, whoever reads them next finds them in a cache.
constexpr int64_t kLeastStreamedBytes = int64_t{12} << 20;

template <class E>
FLASH_ONLINE_INLINE bool streams(const RowProblem& problem) {
  return problem.outer * problem.classes * problem.inner * static_cast<int64_t>(sizeof(E)) >= kLeastStreamedBytes;
}

template <class E, class R, bool kLog>
struct SoftmaxBackwardOp : RowOp {
  using T = Accumulator<E>;
  static constexpr bool kHasSecondPass = true;
  struct Sum {
    double sum = 0;
    FLASH_ONLINE_INLINE void merge(const Sum& other) { sum += other.sum; }
    FLASH_ONLINE_INLINE Subtrahend<T> subtrahend(int64_t) const { return {static_cast<T>(sum), T(0)}; }
  };
  struct Mean : WeightedMean {
    FLASH_ONLINE_INLINE void merge(const Mean& other) {
      if (pivot == 0 && deviation == 0 && weight == 0)
        *this = other;
      else
        WeightedMean::merge(other);
    }
    FLASH_ONLINE_INLINE Subtrahend<T> subtrahend(int64_t classes) const {
      if (classes <= kChunk) {  // as it is in a batch
        const float divisor = static_cast<float>(weight == 0 ? 1 : weight);
        return {static_cast<T>(pivot), static_cast<T>(static_cast<float>(deviation) / divisor)};
      }
      const TwoParts<T> parts(value());
      return {parts.high, parts.low};
    }
  };
  using Partial = std::conditional_t<kTakesMean<R, kLog>, Mean, Sum>;

  const RowProblem& problem;
  Chunks<R, const void*> grad, output;
  Chunks<E, void*> grad_input;
  const RowTile tile;

  SoftmaxBackwardOp(const RowProblem& problem, const RowTile& tile, ScratchAllocator& allocator, bool)
      : problem(problem),
        grad(problem, problem.grad, tile, allocator),
        output(problem, problem.output, tile, allocator),
        grad_input(problem, problem.grad_input, tile, allocator),
        tile(tile) {}
  void first_pass(int64_t begin, int64_t end, Partial* partial) {
    Partial segment[kMaxTileRows];  // each segment is summed by itself, as where threads share the row
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      grad.read(first, count);
      if (!kLog) output.read(first, count);
      for (int64_t r = 0; r < tile.rows; ++r) {
        grad_input.prefetch_strided_share(r, first, count);
        add_chunk(grad.row(r), kLog ? nullptr : output.row(r), count, segment[r]);
      }
    });
    for (int64_t r = 0; r < tile.rows; ++r) merge(partial[r], segment[r]);
  }
  static void merge(Partial& partial, const Partial& other) { partial.merge(other); }
  void finish(Partial*) {}
  void second_pass(int64_t begin, int64_t end, const Partial* partial) {
    const bool stream = std::is_same_v<E, R> && grad_input.is_contiguous() && streams<E>(problem);
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      grad.read(first, count);
      output.read(first, count);
      grad_input.begin_write(first);
      for (int64_t r = 0; r < tile.rows; ++r)
        write(GradientRow<R>(grad.row(r), output.row(r), count), partial[r].subtrahend(problem.classes), grad_input.row(r),
              stream);
      grad_input.finish_write(count);
    });
    if (stream) finish_streaming();
  }

 private:
  static __attribute__((noinline)) void add_chunk(const R* g, const R* y, int64_t count, Partial& to) {
    const GradientRow<R> row(g, y, count);
    Partial chunk;
    if constexpr (kTakesMean<R, kLog>) {
      const auto sum = [](Vector<float> x) FLASH_ONLINE_LAMBDA_INLINE { return broadcast(sum_of_lanes<float>(x)); };
      const MeanLanes lanes = mean_lanes<0, true>(row), sums{sum(lanes.product), sum(lanes.weight), sum(lanes.magnitude)};
      const Pivots pivots(sums, count);
      chunk.weight = sums.weight[0];
      if (pivots.near_zero[0]) {
        chunk.deviation = pivots.product[0];
      } else {
        const Vector<float> pivot = pivots.pivots();
        chunk.pivot = pivot[0];
        chunk.deviation = sum(deviation_lanes<0>(row, pivot, Ahead<true, true>{kChunk, kChunk}))[0];
      }
    } else {
      chunk.sum = sum_of_lanes<SumOf<R, kLog>>(sum_lanes<0, kLog>(row));
    }
    to.merge(chunk);
  }
  static __attribute__((noinline)) void write(const GradientRow<R>& row, const Subtrahend<T>& subtrahend, E* to, bool stream) {
    const GradientWriter<E, kLog, R> writer(subtrahend);
    if (stream)
      writer.write_streaming(row, to, Ahead<false, false>{});
    else
      writer.template write<0>(row, to, false, Ahead<false, false>{});
  }
};

// Rows of contiguous classes, each in one chunk, whose gradients lie one after another. kRows rows at a time are summed, and
// then written.
template <class E, class R, bool kLog>
struct ContiguousRows {
  using T = Accumulator<R>;
  using S = SumOf<R, kLog>;
  static constexpr int kMostRows = kLanes<S>;

  const RowProblem& problem;
  const int64_t count = problem.classes;
  const bool stream = may_stream();

  // The rows at a time: as many as have a lane of a vector of sums where rows are short, and one where summing up lanes costs
  // little beside the rest.
  int64_t rows_at_a_time() const { return count <= 4 * kUnit<float> ? kMostRows : count <= 256 && kMostRows > 4 ? 4 : 1; }
  void rows(int64_t first, int64_t last) const {
    const int64_t most = rows_at_a_time();
    int64_t row = first;
    const auto run = [&](auto units, auto rows) {
      if (most < rows || row + rows > last) return;
      const Loose loose = loose_of(rows);
      for (; row + rows <= last; row += rows) batch<units, rows>(row, loose);
    };
    using std::integral_constant;
    constexpr integral_constant<int, kMostRows> kAll;
    if (count <= kUnit<R>)
      run(integral_constant<int, 1>(), kAll);
    else if (count <= 2 * kUnit<R>)
      run(integral_constant<int, 2>(), kAll);
    else
      run(integral_constant<int, 0>(), kAll);
    if constexpr (kMostRows > 4) run(integral_constant<int, 0>(), integral_constant<int, 4>());
    run(integral_constant<int, 0>(), integral_constant<int, 1>());
    if (stream) finish_streaming();
  }

 private:
  // Short rows stream only if they are whole vectors: a line of memory is streamed in one piece.
  bool may_stream() const {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(E));
    return std::is_same_v<E, R> && streams<E>(problem) && (bytes % kVectorBytes == 0 || bytes >= 8 * kVectorBytes);
  }
  // Of `rows` rows, how many may be read or written with whole units and stay within those rows.
  int64_t loose_rows(int64_t rows, int64_t stride) const {
    const int64_t beyond = round_up(count, kUnit<R>) - count;
    return beyond == 0 ? rows : stride < 1 ? 0 : rows - ceil_div(beyond, stride);
  }
  struct Loose {
    int64_t read, written;  // rows of a batch, see loose_rows
  };
  Loose loose_of(int64_t rows) const {
    const int64_t grad = loose_rows(rows, problem.grad.stride[0]), output = loose_rows(rows, problem.output.stride[0]);
    return {grad < output ? grad : output, loose_rows(rows, count)};
  }
  template <int kUnits, int kRows>
  __attribute__((noinline)) void batch(int64_t first, const Loose& loose) const {
    constexpr int kGroup = kLanes<S> / kRows;
    const int64_t grad_stride = problem.grad.stride[0], output_stride = problem.output.stride[0];
    const R* grad = static_cast<const R*>(problem.grad.data) + first * grad_stride;
    const R* output = static_cast<const R*>(problem.output.data) + first * output_stride;
    E* to = static_cast<E*>(problem.grad_input.data) + first * count;
    const GradientRow<R> end(grad, output, count);
    const auto row = [&](int r) __attribute__((always_inline)) {
      return end.at(grad + r * grad_stride, output + r * output_stride, r < loose.read);
    };
    const int64_t next_grad = kRows * grad_stride, next_output = kRows * output_stride;
    [[maybe_unused]] const Ahead<(kRows > 4), (kRows > 4)> after_sums{next_grad, next_output};
    const Ahead<kRows == 1, kRows == 1> after_streams{next_grad, next_output};
    Vector<S> sums[kRows];
    T high[kLanes<S>], low[kLanes<S>];
    [[maybe_unused]] bool one_term = false;  // all of `high` are 0
    if constexpr (kTakesMean<R, kLog>) {
      const auto total = [](Vector<S>* rows) FLASH_ONLINE_LAMBDA_INLINE { return sums_of_rows<kRows, kLanes<S> / 2>(rows); };
      constexpr bool kAsks = kRows < kMostRows;  // as rows are few otherwise
      Vector<float> magnitudes[kRows], weights[kRows];
      for (int r = 0; r < kRows; ++r) {
        const MeanLanes lanes = mean_lanes<kUnits, kAsks>(row(r));
        sums[r] = lanes.product, magnitudes[r] = lanes.magnitude, weights[r] = lanes.weight;
      }
      const Pivots pivots({total(sums), total(weights), kAsks ? total(magnitudes) : Vector<float>{}}, kAsks ? count : 0);
      Vector<float> deviations = pivots.product, pivot = {};
      one_term = kAsks && pivots.are_zero();
      if (!one_term) {
        pivot = pivots.pivots();
        store_vector(high, pivot);
        for (int r = 0; r < kRows; ++r)
          sums[r] = deviation_lanes<kUnits>(row(r), broadcast_from(high + r * kGroup), after_sums);
        deviations = pivots.deviations(total(sums));
      }
      store_vector(high, pivot);
      store_vector(low, deviations / pivots.divisor);
    } else {
      for (int r = 0; r < kRows; ++r) sums[r] = sum_lanes<kUnits, kLog>(row(r));
      const Vector<S> total = sums_of_rows<kRows, kLanes<S> / 2>(sums);
      for (int l = 0; l < kLanes<S>; ++l) high[l] = static_cast<T>(total[l]), low[l] = T(0);
    }
    const auto write = [&](auto one_term) __attribute__((always_inline)) {
      for (int r = 0; r < kRows; ++r) {
        const GradientWriter<E, kLog, R, one_term> writer({high[r * kGroup], low[r * kGroup]});
        if (stream)
          writer.write_streaming(row(r), to + r * count, after_streams);
        else
          writer.template write<kUnits>(row(r), to + r * count, r < loose.written, after_streams);
      }
    };
    if constexpr (kTakesMean<R, kLog>)
      if (one_term) return write(std::true_type());
    write(std::false_type());
  }
};

template <class E, class R, bool kLog>
void contiguous_softmax_backward(const RowProblem& problem, const Executor& executor) {
  const ContiguousRows<E, R, kLog> kernel{problem};
  const int64_t rows = problem.outer, at_a_time = kernel.rows_at_a_time(),
                rows_per_item = ceil_div(row_grain(problem), at_a_time * problem.classes) * at_a_time;
  for_each_independent_item(executor, ceil_div(rows, rows_per_item), [&](int64_t item, std::byte*) {
    const int64_t first = item * rows_per_item;
    kernel.rows(first, first + rows_per_item < rows ? first + rows_per_item : rows);
  });
}

// Turns g[classes] into the gradients of the rows in its lanes; y is the output.
template <class E, class R, bool kLog, int64_t kMost, class T = Accumulator<E>>
FLASH_ONLINE_INLINE void gradients_of_lanes(int64_t classes, Vector<T>* g, const Vector<T>* y) {
  const auto sum = [&](const auto& term)
                       __attribute__((always_inline)) { return sum_of_classes<R, SumOf<R, kLog>, kMost, true>(classes, term); };
  if constexpr (kTakesMean<R, kLog>) {
    const bool asks = kMost > kFewClasses && classes > kFewClasses;
    const Pivots pivots(sum([&](int64_t c) FLASH_ONLINE_LAMBDA_INLINE { return MeanLanes{g[c] * y[c], y[c]}; }), classes);
    Vector<float> deviations = pivots.product, pivot = {};
    if (!asks || !pivots.are_zero()) {
      pivot = pivots.pivots();
      deviations = pivots.deviations(sum([&](int64_t c) FLASH_ONLINE_LAMBDA_INLINE { return (g[c] - pivot) * y[c]; }));
    }
    const Vector<float> rest = deviations / pivots.divisor;
    for (int64_t c = 0; c < classes; ++c) g[c] = ((g[c] - pivot) - rest) * y[c];
  } else if constexpr (kLog) {
    const auto sums = sum([&](int64_t c) FLASH_ONLINE_LAMBDA_INLINE { return g[c]; });
    Vector<T> total;
    if constexpr (std::is_same_v<R, float>)
      for (int l = 0; l < kLanes<T>; ++l) total[l] = static_cast<T>(sums.lane(l));
    else
      total = sums;
    for (int64_t c = 0; c < classes; ++c) g[c] = minus_product(g[c], exp_rounded_to<E>(y[c]), total);
  } else {
    const Vector<T> total = sum([&](int64_t c) FLASH_ONLINE_LAMBDA_INLINE { return g[c] * y[c]; });
    for (int64_t c = 0; c < classes; ++c) g[c] = (g[c] - total) * y[c];
  }
}

template <class E, class R, bool kLog>
void short_softmax_backward(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  for_each_row_block<T>(problem, executor, [&](const RowBlock& block) {
    Vector<T> g[kMaxShortClasses], y[kMaxShortClasses];
    load_block<R>(problem, problem.grad, block, g);
    load_block<R>(problem, problem.output, block, y);
    gradients_of_lanes<E, R, kLog, kMaxShortClasses>(problem.classes, g, y);
    store_block<E>(problem, problem.grad_input, block, g);
  });
}

template <class E, class R, bool kLog>
void strip_softmax_backward(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  const int64_t classes = problem.classes;
  for_each_row_strip<T>(problem, executor, [&](const RowStrip& strip, std::byte* scratch) {
    Vector<T>* const g = reinterpret_cast<Vector<T>*>(scratch);
    Vector<T>* const y = g + strip_vectors(classes) * classes;
    load_strip<R>(problem, problem.grad, strip, g);
    load_strip<R>(problem, problem.output, strip, y);
    for (int64_t at = 0; at * kLanes<T> < strip.rows * classes; at += classes)
      gradients_of_lanes<E, R, kLog, kChunk>(classes, g + at, y + at);
    store_strip<E>(problem, problem.grad_input, strip, g);
  });
}

bool has_contiguous_rows(const RowProblem& problem) {
  return problem.inner == 1 && problem.grad.stride[1] == 1 && problem.output.stride[1] == 1 &&
         problem.grad_input.stride[1] == 1 && problem.grad_input.stride[0] == problem.classes;
}

}  // namespace

void softmax_backward(const RowProblem& problem, const Executor& executor) {
  visit_row_types(problem, [&](auto e, auto r) {
    visit_bool(problem.log, [&](auto log) {
      using E = decltype(e);
      using R = decltype(r);
      constexpr bool kLog = decltype(log)::value;
      if (problem.classes > 1 && problem.classes <= kChunk && has_contiguous_rows(problem))
        contiguous_softmax_backward<E, R, kLog>(problem, executor);
      else if (lie_in_strips(problem, problem.grad, problem.output, problem.grad_input))
        strip_softmax_backward<E, R, kLog>(problem, executor);
      else if (is_short(problem, kMaxShortClasses * 3 / 4))
        short_softmax_backward<E, R, kLog>(problem, executor);
      else
        run_rows<SoftmaxBackwardOp<E, R, kLog>>(problem, executor);
    });
  });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
