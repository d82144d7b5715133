// logsumexp on CUDA, forward and backward: one scalar per row. As in softmax.cu, an operator says what it computes of one row.
#include "dispatch.cuh"
#include "rows.h"

namespace flash_online::cuda {

namespace {

constexpr float kLn2 = 0.693147181f;

// max + log(sum).
struct LogSumExp : OneTensorOp {
  static constexpr bool kReduces = true;
  // True if lse is in float, not in T.
  template <class T>
  __device__ __forceinline__ static bool is_wide(const RowProblem& problem) {
    return sizeof(T) == sizeof(float) || problem.result_dtype == DType::kFloat32;
  }
  // Sixteen bits are within reach of the hardware's logarithm.
  template <class T>
  __device__ __forceinline__ static float lse_of(const RowProblem& problem, const RowState& state) {
    return is_wide<T>(problem) ? state.lse() : fmaf(log2_flushed(state.sum), kLn2, state.max);
  }
  template <class T>
  __device__ __forceinline__ static void write_lse(const RowProblem& problem, int64_t row, const RowState& state) {
    const float lse = lse_of<T>(problem, state);
    if (is_wide<T>(problem))
      static_cast<float*>(problem.lse)[row] = lse;
    else
      static_cast<T*>(problem.lse)[row] = narrow<T>(lse);
  }
  template <class Result, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    auto row = reader.read(problem.input);
    const RowState state = resolve_infinity(row, row.state());
    using T = typename Reader::Element;
    if (row.is_leader()) write_lse<T>(problem, row.coord().index, state);
  }
  template <class T>
  __device__ static void finish(const RowProblem& problem, const RowCoord& coord, const MergedSlices& merged, float) {
    write_lse<T>(problem, coord.index, merged.resolve_infinity());
  }
};

// grad_input = grad_lse * softmax(x).
struct LogSumExpBackward : OneTensorOp {
  static constexpr bool kRowScalars = true;
  static RowScalars scalars(const RowProblem& problem) {
    return {problem.grad_lse, static_cast<unsigned>(size_of(problem.result_dtype))};
  }
  // The gradient of lse, in float or in T as result_dtype says.
  template <class T, class Reader>
  __device__ __forceinline__ static float grad_of(const RowProblem& problem, const Reader& reader) {
    if (!reader.coord.exists) return 0;
    if (sizeof(T) == sizeof(float) || problem.result_dtype == DType::kFloat32)
      return row_scalar<float>(reader, problem.grad_lse);
    return widen(row_scalar<T>(reader, problem.grad_lse));
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

}  // namespace

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

int64_t reduce_workspace(const RowProblem& problem) {
  const int64_t multi_cta = workspace_of_rows(problem, problem.dtype, 1, true);
  if (multi_cta == 0) return 0;
  const SlicedProblem sliced = problem.dtype == DType::kFloat32 ? pipelined_row_slices(problem, Type<float>{})
                                                                : pipelined_row_slices(problem, Type<__half>{});
  return std::max(multi_cta, sliced.total_slices * static_cast<int64_t>(sizeof(Partial)));
}

}  // namespace flash_online::cuda
