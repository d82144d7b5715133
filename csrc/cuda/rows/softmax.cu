// Softmax and log-softmax on CUDA, forward and backward. Each operator says what it computes of one row; dispatch.cuh chooses
// how rows of a length and strides are read.
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

// ---- rows of one class, by their elements (one_class.cuh). Softmax of one class is 1, or 0 as a logarithm, and NaN where a
// number is not finite.

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

int64_t rows_workspace(const RowProblem& problem) { return workspace_of_rows(problem, problem.dtype, 1, false); }
int64_t softmax_backward_workspace(const RowProblem& problem) {
  return workspace_of_rows(problem, problem.result_dtype, 2, false);
}

}  // namespace flash_online::cuda
