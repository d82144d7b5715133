// Softmax, log-softmax and logsumexp on CUDA, forward and backward. Each operator says what it computes of one row;
// dispatch.cuh chooses how rows of a length and strides are read.
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
  static constexpr bool kReduces = false, kSecondSum = false, kRare = false;
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

// ---- rows of one class: 1, or 0 as a logarithm, and NaN where a number is not finite. Where they are 16-bit elements side by
// side, they are vectors of independent elements; a lane per row would spend too many instructions per byte.

struct OneClass {
  bool log;
  __device__ __forceinline__ float operator()(float x, float) const { return (x - x) + (log ? 0.0f : 1.0f); }
};
struct OneClassBackward {
  bool log;
  __device__ __forceinline__ float operator()(float grad, float y) const {
    const float sum = 0.0f + (log ? grad : __fmul_rn(grad, y));
    return log ? grad - FastNatural::exp(y) * sum : (grad - sum) * y;
  }
};

constexpr int kOneClassThreads = 256;

template <class F, class T>
__global__ void __launch_bounds__(kOneClassThreads) one_class_kernel(const T* a, const T* b, T* result, int64_t count, F f) {
  constexpr int kElements = kPerVector<T>;
  const int64_t first = (int64_t{blockIdx.x} * kOneClassThreads + threadIdx.x) * kElements;
  if (first >= count) return;
  if (first + kElements > count) {
    for (int64_t i = first; i < count; ++i) result[i] = narrow<T>(f(widen(a[i]), widen(b[i])));
    return;
  }
  float x[kElements], y[kElements];
  unpack<T>(load_streaming(a + first), x);
  unpack<T>(load_streaming(b + first), y);
#pragma unroll
  for (int e = 0; e < kElements; ++e) x[e] = f(x[e], y[e]);
  store_streaming(result + first, pack<T>(x));
}

// Queues the kernel for rows of one class; false if they are not 16-bit elements side by side that begin at 16 bytes.
template <class T, class R, class F>
bool launch_one_class(const RowProblem& problem, const ConstView3& a, const ConstView3& b, const MutableView3& result, F f,
                      cudaStream_t stream) {
  if constexpr (sizeof(T) == 2 && std::is_same_v<T, R>) {
    const auto is_plain = [](const auto& view) { return view.stride[0] == 1 && misalignment(view.data) == 0; };
    const int64_t ctas = ceil_div(problem.outer, int64_t{kOneClassThreads} * kPerVector<T>);
    if (problem.classes != 1 || problem.inner != 1 || ctas > 0x7fffffff) return false;
    if (!is_plain(a) || !is_plain(b) || !is_plain(result)) return false;
    one_class_kernel<F, T><<<static_cast<unsigned>(ctas), kOneClassThreads, 0, stream>>>(
        static_cast<const T*>(a.data), static_cast<const T*>(b.data), static_cast<T*>(result.data), problem.outer, f);
    check_launch("softmax");
    return true;
  }
  return false;
}

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
    const OneClass one_class{problem.log};
    if (!launch_one_class<Input, Result>(problem, problem.input, problem.input, problem.result, one_class, stream))
      launch_rows<Softmax, Input, Result>(problem, contiguous, stream, "softmax");
  });
}

void softmax_backward(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const bool contiguous =
      classes_are_contiguous(problem, {problem.grad.stride[1], problem.output.stride[1], problem.grad_input.stride[1]});
  visit_types(problem, "softmax", [&]<class Input, class Result>(Type<Input>, Type<Result>) {
    const OneClassBackward one_class{problem.log};
    if (!launch_one_class<Result, Input>(problem, problem.grad, problem.output, problem.grad_input, one_class, stream))
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
