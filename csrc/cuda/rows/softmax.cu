// Softmax and log-softmax on CUDA, forward and backward. Each operator says what it computes of one row; dispatch.cuh chooses
// how rows of a length and strides are read.
#include "dispatch.cuh"
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
  static constexpr bool kReduces = false, kSecondSum = false, kRare = false, kRowScalars = false;
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
  __device__ static void store_partial(const RowProblem& problem, const Reader& reader) {
    if (takes_mean<Reader>(problem))
      reader.read(problem.grad).store_mean_by(reader.template read<1>(problem.output));
    else
      reader.read(problem.grad).store_sum(reader.template read<1>(problem.output), 0, Term{problem.log});
  }
  // The sum of float32's gradients may cancel, and be multiplied by a probability close to 1. Multi-CTA rows compensate theirs.
  template <class Reader, class Row>
  __device__ __forceinline__ static float sum_of(const RowProblem& problem, const Row& grad, const Row& output) {
    if constexpr (std::is_same_v<typename Reader::Element, float> && !Reader::kMultiCta)
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

// ---- one class: softmax is 1, or 0 as a logarithm, whatever the score, and NaN where the score is not finite

constexpr int kOneClassThreads = 512;

template <class Input, class Result>
__global__ void __launch_bounds__(kOneClassThreads)
    one_class_kernel(const Input* x, Result* result, int64_t count, float constant) {
  constexpr int kElements = kPerVector<Input>;
  const int64_t first = int64_t{blockIdx.x} * kOneClassThreads + threadIdx.x, step = int64_t{gridDim.x} * kOneClassThreads;
  const auto of = [&](float score) { return (score - score) + constant; };
  int64_t vectors = 0;
  if constexpr (sizeof(Input) == sizeof(Result)) {
    vectors = (misalignment(x) | misalignment(result)) == 0 ? count / kElements : 0;
    for (int64_t i = first; i < vectors; i += step) {
      float scores[kElements];
      unpack<Input>(load_streaming(x + i * kElements), scores);
#pragma unroll
      for (int e = 0; e < kElements; ++e) scores[e] = of(scores[e]);
      store_streaming(result + i * kElements, pack<Result>(scores));
    }
  }
  for (int64_t i = vectors * kElements + first; i < count; i += step) result[i] = narrow<Result>(of(widen(x[i])));
}

// Queues that kernel; false if there are more classes, or if rows have gaps.
template <class Input, class Result>
bool launch_one_class(const RowProblem& problem, cudaStream_t stream) {
  const auto is_dense = [&](const auto& view) { return problem.outer == 1 || view.stride[0] == 1; };
  if (problem.classes != 1 || problem.inner != 1 || !is_dense(problem.input) || !is_dense(problem.result)) return false;
  constexpr int kCtasPerSm = 2048 / kOneClassThreads;
  const int64_t ctas = problem.outer / kPerVector<Input> / kOneClassThreads + 1;
  one_class_kernel<Input, Result><<<grid_for(ctas, 2 * kCtasPerSm), kOneClassThreads, 0, stream>>>(
      static_cast<const Input*>(problem.input.data), static_cast<Result*>(problem.result.data), problem.outer,
      problem.log ? 0.0f : 1.0f);
  check_launch("softmax");
  return true;
}

}  // namespace

void softmax(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const bool contiguous = classes_are_contiguous(problem, {problem.input.stride[1], problem.result.stride[1]});
  visit_types(problem, "softmax", [&]<class Input, class Result>(Type<Input>, Type<Result>) {
    if (!launch_one_class<Input, Result>(problem, stream))
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

int64_t rows_workspace(const RowProblem& problem) { return workspace_of_rows(problem, problem.dtype, 1, false); }
int64_t softmax_backward_workspace(const RowProblem& problem) {
  return workspace_of_rows(problem, problem.result_dtype, 2, false);
}

}  // namespace flash_online::cuda
