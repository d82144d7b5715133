// The gradients of softmax and log-softmax on the CPU. Rows of contiguous classes are read from one end to the other, those of
// few classes in batches. Adjacent rows are computed in strips, one row per lane (row_strips.h). Rows that threads share, and
// rows of other strides, are computed in tiles (row_tile.h), or one per lane if very short (short_rows.h).
#include <array>

#include "gradient_rows.h"
#include "row_strips.h"
#include "short_rows.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

namespace {

template <class E, class R, bool kLog>
struct SoftmaxBackwardOp : RowOp {
  using Partial = Mean<double>;
  static constexpr bool kHasSecondPass = true;

  const RowProblem& problem;
  const RowTile tile;
  ScratchAllocator& allocator;
  Chunks<R, const void*> grad{problem, problem.grad, tile, allocator}, output{problem, problem.output, tile, allocator};
  Chunks<E, void*> grad_input{problem, problem.grad_input, tile, allocator};

  SoftmaxBackwardOp(const RowProblem& problem, const RowTile& tile, ScratchAllocator& allocator, bool)
      : problem(problem), tile(tile), allocator(allocator) {}
  void first_pass(int64_t begin, int64_t end, Partial* partial) {
    Partial segment[kMaxTileRows];  // each segment is summed by itself, as where threads share the row
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      grad.read(first, count);
      if (!kLog) output.read(first, count);
      for (int64_t r = 0; r < tile.rows; ++r) {
        grad_input.prefetch_strided_share(r, first, count);
        add_chunk<kLog>(GradientRow<R>(grad.row(r), output.row(r), count), segment[r]);
      }
    });
    for (int64_t r = 0; r < tile.rows; ++r) partial[r].merge(segment[r]);
  }
  static void merge(Partial& partial, const Partial& other) { partial.merge(other); }
  void finish(Partial*) {}
  void second_pass(int64_t begin, int64_t end, const Partial* partial) {
    const bool stream = grad_input.is_contiguous() && GradientWriter<E, R, kLog>::streams(problem);
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      grad.read(first, count);
      output.read(first, count);
      grad_input.begin_write(first);
      for (int64_t r = 0; r < tile.rows; ++r) {
        const GradientWriter<E, R, kLog> writer(partial[r].template subtrahend_of_row<R, kLog>(problem.classes));
        const GradientRow<R> row(grad.row(r), output.row(r), count);
        stream ? writer.stream(row, grad_input.row(r)) : writer.write(row, grad_input.row(r));
      }
      grad_input.finish_write(count);
    });
    if (stream) finish_streaming();
  }
};

// Rows of contiguous classes that no threads share, with gradients one after another. Their sums equal SoftmaxBackwardOp's.
template <class E, class R, bool kLog>
struct ContiguousRows {
  using T = Accumulator<R>;
  using S = SumOf<R, kLog>;
  using Writer = GradientWriter<E, R, kLog>;
  static constexpr bool kMean = kTakesMean<R, kLog>;

  const RowProblem& problem;
  const int64_t count = problem.classes, grad_stride = problem.grad.stride[0], output_stride = problem.output.stride[0];
  // Short rows stream only if they are whole vectors: a line of memory is streamed in one piece.
  const bool stream = Writer::streams(problem) && (count % kUnit<R> == 0 || count * size_of(problem.dtype) >= 8 * kVectorBytes);

  void run(const Executor& executor) const {
    const int64_t rows = problem.outer, per_item = ceil_div(row_grain(problem), count);
    for_each_independent_item(executor, ceil_div(rows, per_item), [&](int64_t item, std::byte*) {
      run_rows(item * per_item, std::min((item + 1) * per_item, rows));
    });
  }

 private:
  // Rows of few classes go four at a time, since adding up the lanes of four vectors costs little more than the lanes of one; a
  // mean takes two sums per row. A constant number of units, up to four, saves up to a third of the time. A row has a loose end
  // if rows of as many elements follow.
  void run_rows(int64_t row, int64_t last) const {
    constexpr int kRows = std::min(4, kLanes<S> / (kMean ? 2 : 1));
    const int64_t beyond = round_up(count, kUnit<R>) - count, stride = std::min({grad_stride, output_stride, count}),
                  last_loose = stride < 1 ? row : last - ceil_div(beyond, stride);
    constexpr int64_t kFewClasses = sizeof(R) == 2 ? 256 : 128;  // float32 rows are slower in fours from there on
    if (count <= kFewClasses)
      visit_up_to<4>(ceil_div(count, kUnit<R>), [&](auto units) { row = batches<kRows, units, true>(row, last_loose); });
    row = batches<1, 0, true>(row, last_loose);
    batches<1, 0, false>(row, last);
    if (stream) finish_streaming();
  }
  // Computes whole batches of kRows rows before `last`, and returns the first row not computed. With kUnits, a row has that
  // many units. Rows are local variables, since stores of vectors may alias members.
  template <int kRows, int kUnits, bool kLoose>
  __attribute__((noinline)) int64_t batches(int64_t row, int64_t last) const {
    GradientRow<R, kLoose> first(static_cast<const R*>(problem.grad.data), static_cast<const R*>(problem.output.data), count);
    E* to = static_cast<E*>(problem.grad_input.data) + row * count;
    for (advance(first, row); row + kRows <= last; row += kRows, advance(first, kRows), to += kRows * first.count) {
      if (kUnits > 0 && ceil_div(first.count, kUnit<R>) != kUnits) __builtin_unreachable();
      const std::array<Subtrahend<T>, kRows> subtrahend = subtrahends<kRows>(first);
      if (stream)
        stream_batch<kRows>(first.grad, first.output, to, subtrahend);
      else
        for_each_row<kRows>(first, [&](int r, const auto& row)
                                       FLASH_ONLINE_LAMBDA_INLINE { Writer(subtrahend[r]).write(row, to + r * row.count); });
    }
    return row;
  }
  template <int kRows>
  __attribute__((noinline)) void stream_batch(const R* grad, const R* output, E* to, auto subtrahend) const {
    // Long rows of a softmax come from memory in this pass too, and leave it no time for the next row.
    const int64_t ahead = kLog || count <= kChunk ? kRows : 0;
    for (int r = 0; r < kRows; ++r)
      Writer(subtrahend[r])
          .stream(GradientRow<R>(grad + r * grad_stride, output + r * output_stride, count), to + r * count,
                  ahead * grad_stride, ahead * output_stride);
  }
  FLASH_ONLINE_INLINE void advance(auto& row, int64_t rows) const {
    row.grad += rows * grad_stride, row.output += rows * output_stride;
  }
  template <int kRows>
  FLASH_ONLINE_INLINE void for_each_row(auto row, const auto& f) const {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r, advance(row, 1)) f(r, row);
  }
  template <int kRows>
  FLASH_ONLINE_INLINE std::array<Subtrahend<T>, kRows> subtrahends(const auto& first) const {
    if (kRows == 1 && first.count > kChunk) {
      Mean<double> sum;
      for (int64_t begin = 0; begin < first.count; begin += kSegment) {
        Mean<double> segment;
        for_each_chunk(begin, std::min(begin + kSegment, first.count),
                       [&](int64_t i, int64_t n) { add_chunk<kLog>(first.part(i, n), segment); });
        sum.merge(segment);
      }
      return {sum.template subtrahend_of_row<R, kLog>(first.count)};
    }
    constexpr int kSums = kRows * (kMean ? 2 : 1), kGroup = kLanes<S> / kSums;  // lanes that hold the same sum
    Vector<S> sums[kSums];
    for_each_row<kRows>(first, [&](int r, const auto& row) FLASH_ONLINE_LAMBDA_INLINE {
      const ChunkLanes<S> lanes = sum_lanes<kLog>(row);
      sums[r] = lanes.sum;
      if (kMean) sums[kRows + r] = lanes.magnitudes;
    });
    const Vector<S> total = sums_of_rows<kSums, kLanes<S> / 2>(sums);
    S sum[kLanes<S>];
    store_vector(sum, total);
    std::array<Subtrahend<T>, kRows> subtrahend;
    for (int r = 0; r < kRows; ++r) subtrahend[r] = {static_cast<T>(sum[r * kGroup])};
    if constexpr (kMean) {
      const auto upper = lanes_from<kLanes<S> / 2>(total, std::make_index_sequence<kLanes<S>>());  // the magnitudes
      const uint32_t pivots = lane_bits(~needs_no_pivot(total, upper)) & ((uint32_t{1} << kLanes<S> / 2) - 1);
      if (pivots != 0)
        for_each_row<kRows>(first, [&](int r, const auto& row) FLASH_ONLINE_LAMBDA_INLINE {
          if ((pivots >> r * kGroup & 1) != 0) subtrahend[r] = about_pivot(row, sum[r * kGroup]).subtrahend();
        });
    }
    return subtrahend;
  }
};

// The subtrahends of the rows in the lanes. sum_of(term) adds up term(grad, y); `sum` and `magnitudes` are as in ChunkLanes.
FLASH_ONLINE_INLINE Subtrahend<Vector<float>> mean_of_lanes(Vector<float> sum, Vector<float> magnitudes, const auto& sum_of) {
  const Vector<int32_t> near_zero = needs_no_pivot(sum, magnitudes);
  if (lane_bits(~near_zero) == 0) return {sum};
  const Subtrahend<Vector<float>> mean = Mean<Vector<float>>::about_pivot(sum, sum_of).subtrahend();
  return {near_zero ? sum : mean.high, near_zero ? Vector<float>{} : mean.low};
}

// Turns g[classes] into the gradients of the rows in its lanes; y is the output.
template <class E, class R, bool kLog, int64_t kMost, class T = Accumulator<E>>
FLASH_ONLINE_INLINE void gradients_of_lanes(int64_t classes, Vector<T>* g, const Vector<T>* y) {
  const auto sum_of = [&](const auto& term, const auto&... of_two) FLASH_ONLINE_LAMBDA_INLINE {
    return sum_of_classes<R, SumOf<R, kLog>, kMost, true>(
        classes, [&](int64_t c) FLASH_ONLINE_LAMBDA_INLINE { return term(g[c], y[c]); }, of_two...);
  };
  const auto sum = sum_of(kSummand<kLog>);
  Subtrahend<Vector<T>> subtrahend;
  if constexpr (kTakesMean<R, kLog>)
    subtrahend = mean_of_lanes(sum, sum_of(kSummand<kLog>, magnitude), sum_of);
  else if constexpr (std::is_same_v<R, float>)
    for (int l = 0; l < kLanes<T>; ++l) subtrahend.high[l] = static_cast<T>(sum.lane(l));
  else
    subtrahend.high = sum;
#pragma GCC unroll 16
  for (int64_t c = 0; c < classes; ++c) g[c] = GradientWriter<E, R, kLog>::gradient(g[c], y[c], subtrahend);
}

template <class E, class R, bool kLog>
void short_softmax_backward(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  const bool adjacent = lie_side_by_side(problem, problem.grad, problem.output, problem.grad_input);
  for_each_row_block<T>(problem, executor, [&](const RowBlock& block) {
    const int64_t few = adjacent && block.rows == kLanes<T> ? problem.classes : 0;
    // A constant number of classes stays in registers: a fifth to two thirds of the time.
    visit_up_to<kTakesMean<R, kLog> ? 16 : 0>(few, [&](auto constant) FLASH_ONLINE_LAMBDA_INLINE {
      constexpr int64_t kMost = constant > 0 ? constant : kMaxShortClasses;
      Vector<T> g[kMost], y[kMost];
      if constexpr (constant > 0) {
        const RowStrip strip{block.outer, block.inner, block.rows};
        const RowProblem local = problem;  // not reloaded after stores of vectors, which may alias it
#pragma GCC unroll 16
        for (int64_t c = 0; c < kMost; ++c) {
          g[c] = load_widened(strip.address<R>(local.grad) + c * local.grad.stride[1]);
          y[c] = load_widened(strip.address<R>(local.output) + c * local.output.stride[1]);
        }
        gradients_of_lanes<E, R, kLog, kMost>(kMost, g, y);
#pragma GCC unroll 16
        for (int64_t c = 0; c < kMost; ++c)
          store_narrowed(strip.address<E>(local.grad_input) + c * local.grad_input.stride[1], g[c]);
      } else {
        load_block<R>(problem, problem.grad, block, g);
        load_block<R>(problem, problem.output, block, y);
        gradients_of_lanes<E, R, kLog, kMost>(problem.classes, g, y);
        store_block<E>(problem, problem.grad_input, block, g);
      }
    });
  });
}

// Computes the gradients of adjacent rows with a mean, kVectors vectors of rows at a time, and leaves them out of the strip.
// Sums go class by class, in memory order: each slot of sum_of_classes is a separate vector.
template <class E, int kVectors>
__attribute__((noinline)) void gradients_side_by_side(const RowProblem& problem, RowStrip& strip) {
  using V = Vector<float>;
  constexpr int64_t kSlotsOfRow = kSlots<float> * kUnit<float>, kRows = kVectors * kLanes<float>;
  const RowProblem local = problem;  // not reloaded after stores of vectors, which may alias it
  for (; strip.rows >= kRows; strip.skip(problem, kRows)) {
    E* const to = strip.address<E>(problem.grad_input);
    const auto for_each_vector = [&, here = strip](int first, int last, const auto& f) FLASH_ONLINE_LAMBDA_INLINE {
      for (int64_t c = 0; c < local.classes; ++c)
        for (int v = first; v < last; ++v)
          f(c, v, load_vector(here.address<float>(local.grad) + c * local.grad.stride[1] + v * kLanes<float>),
            load_vector(here.address<float>(local.output) + c * local.output.stride[1] + v * kLanes<float>));
    };
    V slots[kVectors][kSlotsOfRow];
    const auto fill_slots = [&](int first, int last, const auto& term) FLASH_ONLINE_LAMBDA_INLINE {
      for_each_vector(first, last, [&](int64_t c, int v, V g, V y) FLASH_ONLINE_LAMBDA_INLINE {
        V& slot = slots[v][c % kSlotsOfRow];
        slot = (c < kSlotsOfRow ? V{} : slot) + term(g, y);
      });
    };
    const auto sum_of_slots = [&](int v, const auto&... of_two) FLASH_ONLINE_LAMBDA_INLINE {
      return sum_of_classes<float, float, kSlotsOfRow, true>(
          std::min(local.classes, kSlotsOfRow), [&](int64_t c) FLASH_ONLINE_LAMBDA_INLINE { return slots[v][c]; }, of_two...);
    };
    fill_slots(0, kVectors, kSummand<false>);
    Subtrahend<V> mean[kVectors];
    for (int v = 0; v < kVectors; ++v)
      mean[v] = mean_of_lanes(sum_of_slots(v), sum_of_slots(v, magnitude), [&](const auto& term) FLASH_ONLINE_LAMBDA_INLINE {
        fill_slots(v, v + 1, term);
        return sum_of_slots(v);
      });
    for_each_vector(0, kVectors, [&](int64_t c, int v, V g, V y) FLASH_ONLINE_LAMBDA_INLINE {
      store_narrowed(to + c * local.grad_input.stride[1] + v * kLanes<float>,
                     GradientWriter<E, float, false>::gradient(g, y, mean[v]));
    });
  }
}

template <class E, class R, bool kLog>
void strip_softmax_backward(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  const int64_t classes = problem.classes;
  for_each_row_strip<T>(problem, executor, [&](RowStrip strip, std::byte* scratch) {
    if constexpr (kTakesMean<R, kLog>) {
      gradients_side_by_side<E, 4>(problem, strip);
      gradients_side_by_side<E, 1>(problem, strip);
      if (strip.rows == 0) return;
    }
    Vector<T>* const g = reinterpret_cast<Vector<T>*>(scratch);
    Vector<T>* const y = g + strip_vectors(classes) * classes;
    load_strip<R>(problem, problem.grad, strip, g);
    load_strip<R>(problem, problem.output, strip, y);
    for (int64_t at = 0; at * kLanes<T> < strip.rows * classes; at += classes)
      gradients_of_lanes<E, R, kLog, kChunk>(classes, g + at, y + at);
    store_strip<E>(problem, problem.grad_input, strip, g);
  });
}

}  // namespace

void softmax_backward(const RowProblem& problem, const Executor& executor) {
  const bool contiguous = problem.classes > 1 && problem.inner == 1 && problem.grad.stride[1] == 1 &&
                          problem.output.stride[1] == 1 && problem.grad_input.stride[1] == 1 &&
                          problem.grad_input.stride[0] == problem.classes &&
                          !shares_rows(problem, RowPartition(problem, executor.workers), executor.workers);
  visit_row_types(problem, [&](auto e, auto r) {
    visit_bool(problem.log, [&](auto log) {
      if (contiguous)
        ContiguousRows<decltype(e), decltype(r), log>{problem}.run(executor);
      else if (lie_in_strips(problem, problem.grad, problem.output, problem.grad_input))
        strip_softmax_backward<decltype(e), decltype(r), log>(problem, executor);
      else if (is_short(problem, kMaxShortClasses * 3 / 4))
        short_softmax_backward<decltype(e), decltype(r), log>(problem, executor);
      else
        run_rows<SoftmaxBackwardOp<decltype(e), decltype(r), log>>(problem, executor);
    });
  });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
