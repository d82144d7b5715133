// The gradients of softmax and log-softmax on the CPU. Rows of contiguous classes are computed from one end to the other: rows
// of at most a chunk in batches, longer rows chunk by chunk. Adjacent rows are computed in strips, one row per lane
// (row_strips.h). Rows that threads share, and rows of other strides, are computed in tiles (row_tile.h), or one per lane if
// very short (short_rows.h).
#include "gradient_rows.h"
#include "row_strips.h"
#include "short_rows.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

namespace {

// Results too large for any cache to hold until they are read are stored past the caches: the memory is not read before it is
// written. The next reader finds smaller results in a cache.
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
      return classes <= kChunk ? subtrahend_of_chunk() : in_two_parts(value());  // one chunk: as in a batch
    }
    static FLASH_ONLINE_INLINE Subtrahend<T> in_two_parts(double mean) {
      const TwoParts<T> parts(mean);
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

  static __attribute__((noinline)) void add_chunk(const R* g, const R* y, int64_t count, Partial& to) {
    const GradientRow<R> row(g, y, count);
    if constexpr (kTakesMean<R, kLog>) {
      const ChunkProduct product = product_of_chunk(row);
      to.merge({product.needs_no_pivot ? WeightedMean{0, product.sum, sum_of_lanes<float>(weight_lanes<0>(row))}
                                       : about_pivot(row, product.sum)});
    } else {
      to.merge({sum_of_lanes<SumOf<R, kLog>>(sum_lanes<0, kLog>(row))});
    }
  }
  static __attribute__((noinline)) void write(const GradientRow<R>& row, const Subtrahend<T>& subtrahend, E* to, bool stream) {
    const GradientWriter<E, kLog, R> writer(subtrahend);
    if (stream)
      writer.write_streaming(row, to, NoneAhead{});
    else
      writer.template write<0>(row, to);
  }
};

// Rows of contiguous classes, each in one chunk, with gradients one after another. A batch of rows is summed and then written.
// Rows of few classes go four at a time, since adding up the lanes of four vectors costs little more than the lanes of one;
// longer rows go one at a time.
template <class E, class R, bool kLog>
struct ContiguousRows {
  using T = Accumulator<R>;
  using S = SumOf<R, kLog>;
  // A mean takes two sums per row.
  static constexpr int kBatchRows = std::min(4, kLanes<S> / (kTakesMean<R, kLog> ? 2 : 1));
  template <int kUnits>
  static constexpr bool kUnrolls = kTakesMean<R, kLog> || (kUnits > 0 && !kLog);  // else the code per row is large

  const RowProblem& problem;
  const int64_t count = problem.classes;
  const bool stream = may_stream();

  int64_t rows_per_batch() const { return count <= 128 ? kBatchRows : 1; }
  void rows(int64_t first, int64_t last) const {
    int64_t row = first;
    if (rows_per_batch() > 1) row = batches_of_few<kSlots<R>>(std::is_same_v<E, R> ? ceil_div(count, kUnit<R>) : 0, row, last);
    batches_with_ends<0, 1>(row, last);
    if (stream) finish_streaming();
  }

 private:
  // Short rows stream only if they are whole vectors: a line of memory is streamed in one piece.
  bool may_stream() const {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(E));
    return std::is_same_v<E, R> && streams<E>(problem) && (bytes % kVectorBytes == 0 || bytes >= 8 * kVectorBytes);
  }
  // The number of rows that must follow a row with a loose end, so that whole-vector accesses past its end are safe.
  int64_t rows_behind_loose() const {
    const int64_t beyond = round_up(count, kUnit<R>) - count,
                  stride = std::min({problem.grad.stride[0], problem.output.stride[0], count});
    return stride < 1 ? problem.outer : ceil_div(beyond, stride);
  }
  // Calls f(r, row) for the rows of a batch; if unrolled, the sums stay in registers.
  template <int kRows, RowEnd kEnd, bool kUnrolled = false, class F>
  FLASH_ONLINE_INLINE void for_each_row(int64_t first, const F& f) const {
    GradientRow<R, kEnd> row(static_cast<const R*>(problem.grad.data) + first * problem.grad.stride[0],
                             static_cast<const R*>(problem.output.data) + first * problem.output.stride[0], count);
    const auto each = [&](int r) FLASH_ONLINE_LAMBDA_INLINE {
      f(r, row);
      row.grad += problem.grad.stride[0], row.output += problem.output.stride[0];
    };
    if constexpr (kUnrolled)
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) each(r);
    else
#pragma GCC unroll 1
      for (int r = 0; r < kRows; ++r) each(r);
  }
  template <int kRows, bool kOneTerm>
  __attribute__((noinline)) void write_streaming(int64_t first, const Subtrahend<T>* subtrahend) const {
    E* to = static_cast<E*>(problem.grad_input.data) + first * count;
    const Ahead ahead{kRows * problem.grad.stride[0], kRows * problem.output.stride[0]};
    for_each_row<kRows, RowEnd::kExact>(first, [&](int r, const auto& row) FLASH_ONLINE_LAMBDA_INLINE {
      GradientWriter<E, kLog, R, kOneTerm>(subtrahend[r]).write_streaming(row, to + r * count, ahead);
    });
  }
  template <int kUnits, int kRows, RowEnd kEnd, bool kOneTerm>
  FLASH_ONLINE_INLINE void write(int64_t first, const Subtrahend<T>* subtrahend) const {
    if (stream) return write_streaming<kRows, kOneTerm>(first, subtrahend);
    E* to = static_cast<E*>(problem.grad_input.data) + first * count;
    for_each_row<kRows, kEnd, kUnrolls<kUnits>>(first, [&](int r, const auto& row) FLASH_ONLINE_LAMBDA_INLINE {
      GradientWriter<E, kLog, R, kOneTerm>(subtrahend[r]).template write<kUnits>(row, to + r * count);
    });
  }
  // Computes the batches from `row` on that end at or before `last`. These functions return the first row not computed.
  template <int kUnits, int kRows, RowEnd kEnd>
  __attribute__((noinline)) int64_t batches(int64_t row, int64_t last) const {
    for (; row + kRows <= last; row += kRows) batch<kUnits, kRows, kEnd>(row);
    return row;
  }
  template <int kUnits, int kRows>
  FLASH_ONLINE_INLINE int64_t batches_with_ends(int64_t row, int64_t last) const {
    if constexpr (kTakesMean<R, kLog>)  // other rows gain little from a separate end
      if (count % kUnit<R> == 0) return batches<kUnits, kRows, RowEnd::kNone>(row, last);
    row = batches<kUnits, kRows, RowEnd::kLoose>(row, last - rows_behind_loose());
    return batches<0, kRows, RowEnd::kExact>(row, last);
  }
  // Computes batches of rows of `units` units, with a separate function for each count up to kUnits.
  template <int kUnits>
  FLASH_ONLINE_INLINE int64_t batches_of_few(int64_t units, int64_t row, int64_t last) const {
    if constexpr (kUnits > 0)
      if (units != kUnits) return batches_of_few<kUnits - 1>(units, row, last);
    return batches_with_ends<kUnits, kBatchRows>(row, last);
  }
  template <int kUnits, int kRows, RowEnd kEnd>
  FLASH_ONLINE_INLINE void batch(int64_t first) const {
    constexpr bool kMean = kTakesMean<R, kLog>;
    constexpr int kSums = kMean ? 2 * kRows : kRows;
    Vector<S> sums[kSums];
    for_each_row<kRows, kEnd, kUnrolls<kUnits>>(first, [&](int r, const auto& row) FLASH_ONLINE_LAMBDA_INLINE {
      if constexpr (kMean) {
        const ProductLanes lanes = product_lanes<kUnits>(row);
        sums[r] = lanes.product, sums[kRows + r] = lanes.magnitude;
      } else {
        sums[r] = sum_lanes<kUnits, kLog>(row);
      }
    });
    const Vector<S> total = sums_of_rows<kSums, kLanes<S> / 2>(sums);
    constexpr int kGroup = kLanes<S> / kSums;  // lanes that hold the same sum
    Subtrahend<T> subtrahend[kRows];
    S sum[kLanes<S>];
    store_vector(sum, total);
    if constexpr (!kMean) {
      for (int r = 0; r < kRows; ++r) subtrahend[r] = {static_cast<T>(sum[r * kGroup]), T(0)};
    } else {
      for (int r = 0; r < kRows; ++r) subtrahend[r] = {T(0), sum[r * kGroup]};
      // The magnitudes are in the upper half of the lanes.
      const uint32_t near_zero =
          lane_bits(needs_no_pivot({total, lanes_from<kLanes<S> / 2>(total, std::make_index_sequence<kLanes<S>>())}));
      constexpr uint32_t kProducts = (uint32_t{1} << kLanes<S> / 2) - 1;
      if ((near_zero & kProducts) == kProducts) return write<kUnits, kRows, kEnd, true>(first, subtrahend);
      for_each_row<kRows, kEnd>(first, [&](int r, const auto& row) FLASH_ONLINE_LAMBDA_INLINE {
        if ((near_zero >> r * kGroup & 1) == 0) subtrahend[r] = about_pivot(row, subtrahend[r].low).subtrahend_of_chunk();
      });
    }
    write<kUnits, kRows, kEnd, false>(first, subtrahend);
  }
};

// Rows of contiguous classes, of several chunks each, that no threads share. The sums equal SoftmaxBackwardOp's.
template <class E, class R, bool kLog>
struct LongContiguousRows {
  using Op = SoftmaxBackwardOp<E, R, kLog>;
  using T = Accumulator<R>;

  const RowProblem& problem;
  const int64_t count = problem.classes;
  const bool stream = std::is_same_v<E, R> && streams<E>(problem);

  void rows(int64_t first, int64_t last) const {
    for (int64_t row = first; row < last; ++row) {
      const R* const grad = static_cast<const R*>(problem.grad.data) + row * problem.grad.stride[0];
      const R* const output = static_cast<const R*>(problem.output.data) + row * problem.output.stride[0];
      write(grad, output, subtrahend_of_row(grad, output), static_cast<E*>(problem.grad_input.data) + row * count);
    }
    if (stream) finish_streaming();
  }

 private:
  Subtrahend<T> subtrahend_of_row(const R* grad, const R* output) const {
    if constexpr (kTakesMean<R, kLog>) {  // where no chunk needs a pivot, no weight is needed either
      double product = 0;
      if (add_products(grad, output, product)) return Op::Mean::in_two_parts(product);
    }
    typename Op::Partial sum;
    for_each_segment([&](int64_t begin, int64_t end) {
      typename Op::Partial of_segment;
      for_each_chunk(begin, end, [&](int64_t i, int64_t n) { Op::add_chunk(grad + i, output + i, n, of_segment); });
      sum.merge(of_segment);
    });
    return sum.subtrahend(count);
  }
  // Returns whether no chunk needs a pivot.
  bool add_products(const R* grad, const R* output, double& to) const {
    bool none_needs = true;
    for_each_segment([&](int64_t begin, int64_t end) {
      double of_segment = 0;
      for (int64_t i = begin; i < end && none_needs; i += kChunk) {
        const ChunkProduct product = product_of_chunk(GradientRow<R>(grad + i, output + i, std::min(end - i, kChunk)));
        none_needs = product.needs_no_pivot;
        of_segment += product.sum;
      }
      to += of_segment;
    });
    return none_needs;
  }
  void write(const R* grad, const R* output, const Subtrahend<T>& subtrahend, E* to) const {
    for_each_chunk(0, count, [&](int64_t i, int64_t n) {
      Op::write(GradientRow<R>(grad + i, output + i, n), subtrahend, to + i, stream);
    });
  }
  template <class F>
  void for_each_segment(const F& f) const {
    for (int64_t begin = 0; begin < count; begin += kSegment) f(begin, std::min(begin + kSegment, count));
  }
};

// Hands out the rows of a kernel for contiguous classes, whole batches to a thread.
template <class Rows>
void run_contiguous(const RowProblem& problem, const Executor& executor, const Rows& kernel, int64_t rows_per_batch) {
  const int64_t rows = problem.outer,
                rows_per_item = ceil_div(row_grain(problem), rows_per_batch * problem.classes) * rows_per_batch;
  for_each_independent_item(executor, ceil_div(rows, rows_per_item), [&](int64_t item, std::byte*) {
    const int64_t first = item * rows_per_item;
    kernel.rows(first, first + rows_per_item < rows ? first + rows_per_item : rows);
  });
}

template <class E, class R, bool kLog>
void contiguous_softmax_backward(const RowProblem& problem, const Executor& executor) {
  if (problem.classes > kChunk) return run_contiguous(problem, executor, LongContiguousRows<E, R, kLog>{problem}, 1);
  const ContiguousRows<E, R, kLog> kernel{problem};
  run_contiguous(problem, executor, kernel, kernel.rows_per_batch());
}

// The subtrahends of the rows in the lanes. products(of_two), weights() and deviations(pivot) are sums over their classes.
template <class Products, class Weights, class Deviations>
FLASH_ONLINE_INLINE Subtrahend<Vector<float>> mean_of_lanes(const Products& products, const Weights& weights,
                                                            const Deviations& deviations) {
  const Vector<float> product = products(std::identity()), magnitudes = products(magnitude);
  const Vector<int32_t> near_zero = needs_no_pivot({product, magnitudes});
  if (lane_bits(~near_zero) == 0) return {.low = product};
  const Vector<float> weight = weights(), pivot = near_zero ? Vector<float>{} : pivot_of(product, weight);
  return subtrahend_of(pivot, pivot == 0 ? product : deviations(pivot), weight);
}

// Turns g[classes] into the gradients of the rows in its lanes; y is the output.
template <class E, class R, bool kLog, int64_t kMost, class T = Accumulator<E>>
FLASH_ONLINE_INLINE void gradients_of_lanes(int64_t classes, Vector<T>* g, const Vector<T>* y) {
  const auto sum = [&](const auto& term, const auto&... of_two) __attribute__((always_inline)) {
    return sum_of_classes<R, SumOf<R, kLog>, kMost, true>(classes, term, of_two...);
  };
  if constexpr (kTakesMean<R, kLog>) {
    const Subtrahend<Vector<float>> mean = mean_of_lanes(
        [&](const auto& of_two) FLASH_ONLINE_LAMBDA_INLINE {
          return sum([&](int64_t c) FLASH_ONLINE_LAMBDA_INLINE { return g[c] * y[c]; }, of_two);
        },
        [&]() FLASH_ONLINE_LAMBDA_INLINE { return sum([&](int64_t c) FLASH_ONLINE_LAMBDA_INLINE { return y[c]; }); },
        [&](Vector<float> pivot) FLASH_ONLINE_LAMBDA_INLINE {
          return sum([&](int64_t c) FLASH_ONLINE_LAMBDA_INLINE { return (g[c] - pivot) * y[c]; });
        });
#pragma GCC unroll 16
    for (int64_t c = 0; c < classes; ++c) g[c] = ((g[c] - mean.high) - mean.low) * y[c];
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

// Computes a whole block of rows, one per lane, in registers, if it has at most kClasses classes. Returns whether it did.
template <int kClasses>
FLASH_ONLINE_INLINE bool gradients_of_few(const RowProblem& problem, const RowBlock& block) {
  if constexpr (kClasses > 0) {
    if (problem.classes != kClasses) return gradients_of_few<kClasses - 1>(problem, block);
    const RowStrip strip{block.outer, block.inner, block.rows};
    const float* const grad = strip.address<float>(problem.grad);
    const float* const output = strip.address<float>(problem.output);
    float* const to = strip.address<float>(problem.grad_input);
    Vector<float> g[kClasses], y[kClasses];
#pragma GCC unroll 16
    for (int64_t c = 0; c < kClasses; ++c) {
      g[c] = load_vector(grad + c * problem.grad.stride[1]);
      y[c] = load_vector(output + c * problem.output.stride[1]);
    }
    gradients_of_lanes<float, float, false, kClasses>(kClasses, g, y);
#pragma GCC unroll 16
    for (int64_t c = 0; c < kClasses; ++c) store_vector(to + c * problem.grad_input.stride[1], g[c]);
  }
  return kClasses > 0;
}

template <class E, class R, bool kLog>
void short_softmax_backward(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  const bool side_by_side = lie_side_by_side(problem, problem.grad, problem.output, problem.grad_input);
  for_each_row_block<T>(problem, executor, [&](const RowBlock& block) {
    if constexpr (kTakesMean<R, kLog> && std::is_same_v<E, R>)
      if (side_by_side && block.rows == kLanes<T> && gradients_of_few<16>(problem, block)) return;
    Vector<T> g[kMaxShortClasses], y[kMaxShortClasses];
    load_block<R>(problem, problem.grad, block, g);
    load_block<R>(problem, problem.output, block, y);
    gradients_of_lanes<E, R, kLog, kMaxShortClasses>(problem.classes, g, y);
    store_block<E>(problem, problem.grad_input, block, g);
  });
}

// Computes the gradients of kVectors vectors of adjacent rows, with a mean. Sums go class by class, in memory order: each slot
// of sum_of_classes is a separate vector.
template <class E, int kVectors>
__attribute__((noinline)) void gradients_side_by_side(const RowProblem& problem, const RowStrip& strip) {
  using V = Vector<float>;
  constexpr int64_t kSlotsOfRow = kSlots<float> * kUnit<float>;
  const int64_t classes = problem.classes, grad_step = problem.grad.stride[1], output_step = problem.output.stride[1],
                step = problem.grad_input.stride[1];
  const float* const grad = strip.address<float>(problem.grad);
  const float* const output = strip.address<float>(problem.output);
  E* to = strip.address<E>(problem.grad_input);
  V slots[kVectors][kSlotsOfRow];
  const auto fill_slots = [&](int first, int last, const auto& term) FLASH_ONLINE_LAMBDA_INLINE {
    const float *g = grad, *y = output;
    for (int64_t c = 0; c < classes; ++c, g += grad_step, y += output_step)
      for (int v = first; v < last; ++v) {
        V& slot = slots[v][c % kSlotsOfRow];
        if (c < kSlotsOfRow) slot = V{};
        term(slot, load_vector(g + v * kLanes<float>), load_vector(y + v * kLanes<float>));
      }
  };
  const auto sum_of_slots = [&](int v, const auto&... of_two) FLASH_ONLINE_LAMBDA_INLINE {
    return sum_of_classes<float, float, kSlotsOfRow, true>(
        std::min(classes, kSlotsOfRow), [&](int64_t c) FLASH_ONLINE_LAMBDA_INLINE { return slots[v][c]; }, of_two...);
  };
  fill_slots(0, kVectors, [](V& slot, V g, V y) FLASH_ONLINE_LAMBDA_INLINE { slot += g * y; });
  Subtrahend<V> mean[kVectors];
  for (int v = 0; v < kVectors; ++v)
    mean[v] =
        mean_of_lanes([&](const auto& of_two) FLASH_ONLINE_LAMBDA_INLINE { return sum_of_slots(v, of_two); },
                      [&]() FLASH_ONLINE_LAMBDA_INLINE {
                        fill_slots(v, v + 1, [](V& slot, V, V y) FLASH_ONLINE_LAMBDA_INLINE { slot += y; });
                        return sum_of_slots(v);
                      },
                      [&](V pivot) FLASH_ONLINE_LAMBDA_INLINE {
                        fill_slots(v, v + 1, [&](V& slot, V g, V y) FLASH_ONLINE_LAMBDA_INLINE { slot += (g - pivot) * y; });
                        return sum_of_slots(v);
                      });
  const float *g = grad, *y = output;
  for (int64_t c = 0; c < classes; ++c, g += grad_step, y += output_step, to += step)
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = v * kLanes<float>;
      store_narrowed(to + at, ((load_vector(g + at) - mean[v].high) - mean[v].low) * load_vector(y + at));
    }
}

template <class E, class R, bool kLog>
void strip_softmax_backward(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  const int64_t classes = problem.classes;
  for_each_row_strip<T>(problem, executor, [&](RowStrip strip, std::byte* scratch) {
    if constexpr (kTakesMean<R, kLog>) {
      const auto run = [&](auto vectors) FLASH_ONLINE_LAMBDA_INLINE {
        constexpr int64_t kRows = vectors * kLanes<T>;
        for (; strip.rows >= kRows; strip.skip(problem, kRows)) gradients_side_by_side<E, vectors>(problem, strip);
      };
      run(std::integral_constant<int, 4>());
      run(std::integral_constant<int, 1>());
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
      if (problem.classes > 1 && has_contiguous_rows(problem) &&
          !shares_rows(problem, RowPartition(problem, executor.workers), executor.workers))
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
