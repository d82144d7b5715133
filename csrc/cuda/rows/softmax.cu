// Softmax, log-softmax and logsumexp on CUDA, forward and backward. Each operator says what it computes of one row;
// dispatch.cuh chooses how rows of a length and strides are read.
#include "dispatch.cuh"
#include "rows.h"

namespace flash_online::cuda {

namespace {

// exp(x - max) / sum, or its logarithm.
struct Softmax : OneTensorOp {
  template <class Result, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    auto row = reader.read(problem.input);
    const RowState state = row.template state<Result>();
    if (problem.log) {
      const float max = pivot(state.max), log_sum = FastNatural::log(state.sum);
      row.template write<Result>(problem.result, [&](int64_t, float x) { return (x - max) - log_sum; });
    } else {
      visit_probabilities<Result>(
          state, [&](const auto& p) { row.template write<Result>(problem.result, [&](int64_t, float x) { return p(x); }); });
    }
  }
};

// With y the result of the forward pass: of softmax, grad_input = (grad - s) y with s = sum(grad * y); of log-softmax,
// grad_input = grad - s exp(y) with s = sum(grad). Where y is close to 1, s is close to grad, and little is left of float32's
// digits: there s is a mean in two floats.
struct SoftmaxBackward {
  static constexpr int kTensors = 2;
  static constexpr bool kReduces = false, kSecondSum = false;
  __host__ __device__ static const ConstView3& tensor(const RowProblem& problem, int i) {
    return i == 0 ? problem.grad : problem.output;
  }
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
  template <class Input, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    const auto grad = reader.template read<0>(problem.grad);
    const auto output = reader.template read<1>(problem.output);
    if (takes_mean<Reader>(problem)) {
      const TwoFloats mean = grad.template mean_by<0>(output).value();
      return grad.template write_with<Input>(output, problem.grad_input,
                                             [&](int64_t, float g, float y) { return ((g - mean.high) - mean.low) * y; });
    }
    const float sum = grad.template sum_with<0>(output, Term{problem.log});
    if (problem.log)
      grad.template write_with<Input>(output, problem.grad_input,
                                      [&](int64_t, float g, float y) { return g - FastNatural::exp(y) * sum; });
    else
      grad.template write_with<Input>(output, problem.grad_input, [&](int64_t, float g, float y) { return (g - sum) * y; });
  }
};

// max + log(sum).
struct LogSumExp : OneTensorOp {
  static constexpr bool kReduces = true;
  template <class Result, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    auto row = reader.read(problem.input);
    const RowState state = resolve_infinity(row, row.state());
    if (row.is_leader()) static_cast<float*>(problem.lse)[row.coord().index] = state.lse();
  }
  template <class T>
  __device__ static void finish(const RowProblem& problem, const RowCoord& coord, const MergedPieces& merged, float) {
    static_cast<float*>(problem.lse)[coord.index] = merged.resolve_infinity().lse();
  }
};

// grad_input = grad_lse * softmax(x).
struct LogSumExpBackward : OneTensorOp {
  template <class Result, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    auto row = reader.read(problem.input);
    const RowState state = resolve_infinity(row, row.state());
    const float grad = row.coord().exists ? static_cast<const float*>(problem.grad_lse)[row.coord().index] : 0.0f;
    const float factor = grad * state.inverse_sum();
    row.template write<Result>(problem.grad_input, [&](int64_t, float x) { return state.weight(x) * factor; });
  }
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
    launch_rows<Softmax, Input, Result>(problem, contiguous, stream, "softmax");
  });
}

void softmax_backward(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const bool contiguous =
      classes_are_contiguous(problem, {problem.grad.stride[1], problem.output.stride[1], problem.grad_input.stride[1]});
  visit_types(problem, "softmax", [&]<class Input, class Result>(Type<Input>, Type<Result>) {
    launch_rows<SoftmaxBackward, Result, Input>(problem, contiguous, stream, "softmax_backward");
  });
}

void logsumexp(const RowProblem& problem, CUstream_st* stream) {
  if (problem.outer == 0 || problem.inner == 0) return;  // a row of no classes has a result: -inf
  const bool contiguous = classes_are_contiguous(problem, {problem.input.stride[1]});
  visit_type(problem, "logsumexp",
             [&]<class T>(Type<T>) { launch_rows<LogSumExp, T, T>(problem, contiguous, stream, "logsumexp"); });
}

void logsumexp_backward(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const bool contiguous = classes_are_contiguous(problem, {problem.input.stride[1], problem.grad_input.stride[1]});
  visit_type(problem, "logsumexp", [&]<class T>(Type<T>) {
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
