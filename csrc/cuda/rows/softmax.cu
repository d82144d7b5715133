// Softmax, log-softmax and logsumexp on CUDA, forward and backward.
#include "dispatch.cuh"
#include "rows.h"

namespace flash_online::cuda {

namespace {

struct Softmax {
  static constexpr int kTensors = 1;
  static constexpr bool kReduces = false, kSumsAgain = false;
  __host__ __device__ static const ConstView3& tensor(const RowProblem& problem, int) { return problem.input; }
  template <class Rows>
  __device__ static void part(const RowProblem& problem, const Rows& rows) {
    rows.read(problem.input).leave_part(NoExtra{});
  }
  template <class Result, class Rows>
  __device__ static void run(const RowProblem& problem, const Rows& rows) {
    auto row = rows.read(problem.input);
    const RowState state = row.state();
    if (problem.log) {
      const float max = pivot(state.max), log_sum = FastNatural::log(state.sum);
      row.template write<Result>(problem.result, [&](int64_t, float x) { return (x - max) - log_sum; });
    } else {
      visit_probabilities<Result>(
          state, [&](const auto& p) { row.template write<Result>(problem.result, [&](int64_t, float x) { return p(x); }); });
    }
  }
};

// With s = sum(grad * y), grad_input = (grad - s) y; of the logarithm, with s = sum(grad), grad - s exp(y).
struct SoftmaxBackward {
  static constexpr int kTensors = 2;
  static constexpr bool kReduces = false, kSumsAgain = false;
  __host__ __device__ static const ConstView3& tensor(const RowProblem& problem, int i) {
    return i == 0 ? problem.grad : problem.output;
  }
  struct Term {
    bool log;
    __device__ float operator()(int64_t, float grad, float y) const { return log ? grad : grad * y; }
  };
  template <class Rows>
  __device__ static void part(const RowProblem& problem, const Rows& rows) {
    rows.read(problem.grad).leave_sum(rows.template read<1>(problem.output), 0, Term{problem.log});
  }
  template <class Input, class Rows>
  __device__ static void run(const RowProblem& problem, const Rows& rows) {
    const auto grad = rows.template read<0>(problem.grad);
    const auto output = rows.template read<1>(problem.output);
    const float sum = grad.template sum_with<0>(output, Term{problem.log});
    if (problem.log)
      grad.template write_with<Input>(output, problem.grad_input,
                                      [&](int64_t, float g, float y) { return g - FastNatural::exp(y) * sum; });
    else
      grad.template write_with<Input>(output, problem.grad_input, [&](int64_t, float g, float y) { return (g - sum) * y; });
  }
};

struct LogSumExp {
  static constexpr int kTensors = 1;
  static constexpr bool kReduces = true, kSumsAgain = false;
  __host__ __device__ static const ConstView3& tensor(const RowProblem& problem, int) { return problem.input; }
  template <class Rows>
  __device__ static void part(const RowProblem& problem, const Rows& rows) {
    rows.read(problem.input).leave_part(NoExtra{});
  }
  template <class Result, class Rows>
  __device__ static void run(const RowProblem& problem, const Rows& rows) {
    auto row = rows.read(problem.input);
    const RowState state = settled(row, row.state());
    if (row.leads()) static_cast<float*>(problem.lse)[row.place().number] = state.lse();
  }
  template <class T>
  __device__ static void finish(const RowProblem& problem, const RowPlace& place, const Whole& whole, float) {
    static_cast<float*>(problem.lse)[place.number] = whole.settled().lse();
  }
};

struct LogSumExpBackward {
  static constexpr int kTensors = 1;
  static constexpr bool kReduces = false, kSumsAgain = false;
  __host__ __device__ static const ConstView3& tensor(const RowProblem& problem, int) { return problem.input; }
  template <class Rows>
  __device__ static void part(const RowProblem& problem, const Rows& rows) {
    rows.read(problem.input).leave_part(NoExtra{});
  }
  template <class Result, class Rows>
  __device__ static void run(const RowProblem& problem, const Rows& rows) {
    auto row = rows.read(problem.input);
    const RowState state = settled(row, row.state());
    const float grad = row.place().exists ? static_cast<const float*>(problem.grad_lse)[row.place().number] : 0.0f;
    visit_weights(state, grad * state.inverse_sum(), [&](const auto& w) {
      row.template write<Result>(problem.grad_input, [&](int64_t, float x) { return w(x); });
    });
  }
};

// Bytes for rows that are too long to be held, of so many tensors of a dtype.
int64_t workspace_for(const RowProblem& problem, DType dtype, int tensors, bool reduces) {
  const int64_t elements = kVectorBytes / size_of(dtype);
  if ((problem.classes + elements - 1) / elements * tensors <= most_held_vectors(reduces)) return 0;
  const Pieces pieces =
      dtype == DType::kFloat32 ? Pieces::of(problem.classes, Type<float>{}) : Pieces::of(problem.classes, Type<__half>{});
  return split_workspace(problem.outer * problem.inner, pieces.count);
}

}  // namespace

void softmax(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const bool together = classes_together(problem, {problem.input.stride[1], problem.result.stride[1]});
  visit_types(problem, "softmax", [&]<class Input, class Result>(Type<Input>, Type<Result>) {
    launch_rows<Softmax, Input, Result>(problem, together, stream, "softmax");
  });
}

void softmax_backward(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const bool together =
      classes_together(problem, {problem.grad.stride[1], problem.output.stride[1], problem.grad_input.stride[1]});
  visit_types(problem, "softmax", [&]<class Input, class Result>(Type<Input>, Type<Result>) {
    launch_rows<SoftmaxBackward, Result, Input>(problem, together, stream, "softmax_backward");
  });
}

void logsumexp(const RowProblem& problem, CUstream_st* stream) {
  if (problem.outer == 0 || problem.inner == 0) return;  // but rows of no classes have a result
  visit_type(problem, "logsumexp", [&]<class T>(Type<T>) {
    launch_rows<LogSumExp, T, T>(problem, classes_together(problem, {problem.input.stride[1]}), stream, "logsumexp");
  });
}

void logsumexp_backward(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const bool together = classes_together(problem, {problem.input.stride[1], problem.grad_input.stride[1]});
  visit_type(problem, "logsumexp",
             [&]<class T>(Type<T>) { launch_rows<LogSumExpBackward, T, T>(problem, together, stream, "logsumexp_backward"); });
}

int64_t rows_workspace(const RowProblem& problem) { return workspace_for(problem, problem.dtype, 1, false); }
int64_t reduce_workspace(const RowProblem& problem) {
  const int64_t split = workspace_for(problem, problem.dtype, 1, true);
  if (split == 0) return 0;
  const PiecedRows pieces =
      problem.dtype == DType::kFloat32 ? row_pieces(problem, Type<float>{}) : row_pieces(problem, Type<__half>{});
  return std::max(split, pieces.all_pieces * static_cast<int64_t>(sizeof(Partial)));
}
int64_t softmax_backward_workspace(const RowProblem& problem) { return workspace_for(problem, problem.result_dtype, 2, false); }

}  // namespace flash_online::cuda
