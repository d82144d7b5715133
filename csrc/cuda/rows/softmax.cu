// Softmax, log-softmax and logsumexp on CUDA, forward and backward. Each operator says what it computes of one row;
// dispatch.cuh chooses how rows of a length and strides are read.
#include "dispatch.cuh"
#include "one_class.cuh"
#include "rows.h"

namespace flash_online::cuda {

namespace {

// exp(x - max) / sum, or its logarithm.
struct Softmax : OneTensorOp {
  __host__ __device__ static const MutableView3& result(const RowProblem& problem) { return problem.result; }
  template <class Result, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    auto row = reader.read(problem.input);
    const RowState state = row.template state<Result>();
    if (problem.log) {
      const float max = pivot(state.max), log_sum = FastNatural::log(state.sum);
      row.template write<Result>(problem.result, [&](int64_t, float x) { return (x - max) - log_sum; });
    } else {
      visit_probabilities<decltype(row), Result>(
          state, [&](const auto& p) { row.template write<Result>(problem.result, [&](int64_t, float x) { return p(x); }); });
    }
  }
};

// With y the result of the forward pass: of softmax, grad_input = (grad - s) y with s = sum(grad * y); of log-softmax,
// grad_input = grad - s exp(y) with s = sum(grad). Where y is close to 1, s is close to grad, and little is left of float32's
// digits: there s is a mean in two floats.
struct SoftmaxBackward {
  static constexpr int kTensors = 2;
  static constexpr bool kReduces = false, kSecondSum = false, kRare = false, kNumbers = false;
  static constexpr bool kTargets = false, kSumsLosses = false;
  __host__ __device__ static const ConstView3& tensor(const RowProblem& problem, int i) {
    return i == 0 ? problem.grad : problem.output;
  }
  __host__ __device__ static const MutableView3& result(const RowProblem& problem) { return problem.grad_input; }
  struct Term {
    bool log;
    __device__ float operator()(int64_t, float grad, float y) const { return log ? grad : grad * y; }
  };
  template <class Reader>
  __device__ static constexpr bool takes_mean(const RowProblem& problem) {
    return std::is_same_v<typename Reader::Element, float> && !problem.log;
  }
  template <class Reader>
  __device__ static void part(const RowProblem& problem, const Reader& reader) {
    if (takes_mean<Reader>(problem))
      reader.read(problem.grad).store_mean_by(reader.template read<1>(problem.output));
    else
      reader.read(problem.grad).store_sum(reader.template read<1>(problem.output), 0, Term{problem.log});
  }
  // The sum of float32's gradients may cancel, and be multiplied by a probability close to 1. Split rows compensate theirs.
  template <class Reader, class Row>
  __device__ __forceinline__ static float sum_of(const RowProblem& problem, const Row& grad, const Row& output) {
    if constexpr (std::is_same_v<typename Reader::Element, float> && !Reader::kSplit)
      return grad.template precise_sum<0>([](int64_t, float g) { return TwoFloats{g}; }).value();
    else
      return grad.template sum_with<0>(output, Term{problem.log});
  }
  template <class Input, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    const auto grad = reader.template read<0>(problem.grad);
    const auto output = reader.template read<1>(problem.output);
    if (takes_mean<Reader>(problem)) {
      const TwoFloats mean = grad.template mean_by<0>(output).value();
      return grad.template write_with<Input>(output, problem.grad_input,
                                             [&](int64_t, float g, float y) { return ((g - mean.high) - mean.low) * y; });
    }
    const float sum = sum_of<Reader>(problem, grad, output);
    if (problem.log)
      grad.template write_with<Input>(output, problem.grad_input,
                                      [&](int64_t, float g, float y) { return g - FastNatural::exp(y) * sum; });
    else
      grad.template write_with<Input>(output, problem.grad_input, [&](int64_t, float g, float y) { return (g - sum) * y; });
  }
};

constexpr float kLn2 = 0.693147181f;

// max + log(sum).
struct LogSumExp : OneTensorOp {
  static constexpr bool kReduces = true;
  // Whether lse is in float, and not in T.
  template <class T>
  __device__ __forceinline__ static bool is_wide(const RowProblem& problem) {
    return sizeof(T) == sizeof(float) || problem.result_dtype == DType::kFloat32;
  }
  // Sixteen bits are within reach of the hardware's logarithm.
  template <class T>
  __device__ __forceinline__ static float lse_of(const RowProblem& problem, const RowState& state) {
    return is_wide<T>(problem) ? state.lse() : fmaf(log2_flushed(state.sum), kLn2, state.max);
  }
  // Writes the numbers of kRows rows from `row` on.
  template <class T, int kRows>
  __device__ __forceinline__ static void write_numbers(const RowProblem& problem, int64_t row, const float (&lse)[kRows]) {
    if (is_wide<T>(problem))
      store_together(static_cast<float*>(problem.lse) + row, lse);
    else
      store_together(static_cast<T*>(problem.lse) + row, lse);
  }
  template <class Result, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    auto row = reader.read(problem.input);
    const RowState state = resolve_infinity(row, row.state());
    using T = typename Reader::Element;
    const float lse[1] = {lse_of<T>(problem, state)};
    if constexpr (requires { reader.set_number(lse[0]); })
      reader.set_number(lse[0]);
    else if (row.is_leader())
      write_numbers<T>(problem, row.coord().index, lse);
  }
  template <class T>
  __device__ static void finish(const RowProblem& problem, const RowCoord& coord, const MergedPieces& merged, float) {
    const float lse[1] = {lse_of<T>(problem, merged.resolve_infinity())};
    write_numbers<T>(problem, coord.index, lse);
  }
};

// grad_input = grad_lse * softmax(x).
struct LogSumExpBackward : OneTensorOp {
  static constexpr bool kNumbers = true;
  static RowNumbers numbers(const RowProblem& problem) {
    return {problem.grad_lse, static_cast<unsigned>(size_of(problem.result_dtype))};
  }
  // The gradient of lse, in float or in T as result_dtype says.
  template <class T, class Reader>
  __device__ __forceinline__ static float grad_of(const RowProblem& problem, const Reader& reader) {
    if (!reader.coord.exists) return 0;
    if (sizeof(T) == sizeof(float) || problem.result_dtype == DType::kFloat32)
      return row_number<float>(reader, problem.grad_lse);
    return widen(row_number<T>(reader, problem.grad_lse));
  }
  template <class Result, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    // Loaded before the row: after it, the load would have to wait until the row has arrived.
    const float grad = grad_of<typename Reader::Element>(problem, reader);
    auto row = reader.read(problem.input);
    const RowState state = resolve_infinity(row, row.template state<Result>());
    visit_weights<decltype(row), Result>(state, grad * state.inverse_sum(), [&](const auto& w) {
      row.template write<Result>(problem.grad_input, [&](int64_t, float x) { return w(x); });
    });
  }
};

// ---- rows of one class, by their elements (one_class.cuh). Softmax of one class is 1, or 0 as a logarithm, logsumexp the
// element; and NaN where a number is not finite.

struct OneClass {
  bool log;
  __device__ __forceinline__ float operator()(int64_t, float x, float) const { return (x - x) + (log ? 0.0f : 1.0f); }
};
// In float32 the mean is grad itself, unless its weight is 0.
template <bool kTakesMean>
struct OneClassBackward {
  bool log;
  __device__ __forceinline__ float operator()(int64_t, float grad, float y) const {
    if (!log && kTakesMean) return (y == 0 ? grad : grad - grad) * y;
    const float sum = 0.0f + (log ? grad : __fmul_rn(grad, y));
    return log ? grad - FastNatural::exp(y) * sum : (grad - sum) * y;
  }
};
struct OneClassLogSumExp {
  __device__ __forceinline__ float operator()(int64_t, float x, float) const { return x + 0.0f; }
};
struct OneClassLogSumExpBackward {
  __device__ __forceinline__ float operator()(int64_t, float x, float grad) const { return ((x - x) + 1.0f) * grad; }
};

// Bytes of workspace for split rows of `tensors` tensors of a dtype; 0 for rows that stay on the chip.
int64_t workspace_for(const RowProblem& problem, DType dtype, int tensors, bool reduces) {
  if (ceil_div(problem.classes, kVectorBytes / size_of(dtype)) * tensors <= max_on_chip_vectors(reduces)) return 0;
  const SplitPieces pieces = dtype == DType::kFloat32 ? SplitPieces::of(problem.classes, Type<float>{})
                                                      : SplitPieces::of(problem.classes, Type<__half>{});
  return split_workspace(problem.outer * problem.inner, pieces.pieces_per_row);
}

}  // namespace

void softmax(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const bool contiguous = classes_are_contiguous(problem, {problem.input.stride[1], problem.result.stride[1]});
  visit_types(problem, "softmax", [&]<class Input, class Result>(Type<Input>, Type<Result>) {
    const auto x = rows_of<Input>(problem.input);
    if (!launch_one_class(problem, x, x, rows_of<Result>(problem.result), OneClass{problem.log}, stream))
      launch_rows<Softmax, Input, Result>(problem, contiguous, stream, "softmax");
  });
}

void softmax_backward(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const bool contiguous =
      classes_are_contiguous(problem, {problem.grad.stride[1], problem.output.stride[1], problem.grad_input.stride[1]});
  visit_types(problem, "softmax", [&]<class Input, class Result>(Type<Input>, Type<Result>) {
    const OneClassBackward<std::is_same_v<Result, float>> one_class{problem.log};
    if (!launch_one_class(problem, rows_of<Result>(problem.grad), rows_of<Result>(problem.output),
                          rows_of<Input>(problem.grad_input), one_class, stream))
      launch_rows<SoftmaxBackward, Result, Input>(problem, contiguous, stream, "softmax_backward");
  });
}

void logsumexp(const RowProblem& problem, CUstream_st* stream) {
  if (problem.outer == 0 || problem.inner == 0) return;  // a row of no classes has a result: -inf
  const bool contiguous = classes_are_contiguous(problem, {problem.input.stride[1]});
  visit_types(problem, "logsumexp", [&]<class T, class Lse>(Type<T>, Type<Lse>) {
    const auto x = rows_of<T>(problem.input);
    if (!launch_one_class(problem, x, x, OneClassRows<Lse>{static_cast<Lse*>(problem.lse)}, OneClassLogSumExp{}, stream))
      launch_rows<LogSumExp, T, T>(problem, contiguous, stream, "logsumexp");
  });
}

void logsumexp_backward(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const bool contiguous = classes_are_contiguous(problem, {problem.input.stride[1], problem.grad_input.stride[1]});
  visit_types(problem, "logsumexp", [&]<class T, class Lse>(Type<T>, Type<Lse>) {
    const OneClassRows<const Lse> grad{static_cast<const Lse*>(problem.grad_lse)};
    if (!launch_one_class(problem, rows_of<T>(problem.input), grad, rows_of<T>(problem.grad_input), OneClassLogSumExpBackward{},
                          stream))
      launch_rows<LogSumExpBackward, T, T>(problem, contiguous, stream, "logsumexp_backward");
  });
}

int64_t rows_workspace(const RowProblem& problem) { return workspace_for(problem, problem.dtype, 1, false); }
int64_t reduce_workspace(const RowProblem& problem) {
  const int64_t split = workspace_for(problem, problem.dtype, 1, true);
  if (split == 0) return 0;
  const PiecedProblem pieced = problem.dtype == DType::kFloat32 ? pipelined_row_pieces(problem, Type<float>{})
                                                                : pipelined_row_pieces(problem, Type<__half>{});
  return std::max(split, pieced.total_pieces * static_cast<int64_t>(sizeof(Partial)));
}
int64_t softmax_backward_workspace(const RowProblem& problem) { return workspace_for(problem, problem.result_dtype, 2, false); }

}  // namespace flash_online::cuda
