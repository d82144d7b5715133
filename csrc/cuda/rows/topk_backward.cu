// The gradient of the k largest probabilities of a softmax on CUDA.
//
// Of the whole softmax, with s = sum over the k of grad_j p_j: grad_input_c = p_c (grad_c - s), where grad_c is 0 outside the
// k. Renormalised, the k are a softmax of their own and the other classes get 0; its p, rounded to the result's dtype, are
// made to add up to 1 again. The first kernel writes what all classes get, the second, behind it, what the k get.
#include "../hw/check.cuh"
#include "dispatch.cuh"
#include "rows.h"

namespace flash_online::cuda {

namespace {

template <class R>
struct TopK {
  const RowProblem& problem;
  Row<const R> grad, output;
  __device__ TopK(const RowProblem& p, const RowPlace& place)
      : problem(p), grad(row_of<const R>(p.grad, place)), output(row_of<const R>(p.output, place)) {}
  // Sums over the k, by a warp.
  __device__ __forceinline__ float sum(bool of_grad) const {
    Sum sum;
    Compensation compensation;
    for (int64_t j = threadIdx.x % kWarpSize; j < problem.k; j += kWarpSize)
      compensation.add(sum, of_grad ? grad[j] * output[j] : output[j]);
    return lanes_sum<kWarpSize>(sum.value);
  }
};

constexpr int kBackwardThreads = 256;

template <class T, class R>
__global__ void __launch_bounds__(kBackwardThreads) topk_backward_kernel(const __grid_constant__ RowProblem problem) {
  const int warp = threadIdx.x / kWarpSize, warps = kBackwardThreads / kWarpSize;
  for (int64_t number = int64_t{blockIdx.x} * warps + warp; number < problem.outer * problem.inner;
       number += int64_t{gridDim.x} * warps) {
    const RowPlace place = place_at(problem, number);
    const TopK<R> top(problem, place);
    const float dot = top.sum(true);
    const float norm = problem.renormalize && problem.k > 0 ? 1 / top.sum(false) : 1.0f;
    const float sum = problem.renormalize ? dot * norm : dot;
    const View3<int64_t*>& indices = problem.indices;
    const int64_t* at = indices.data + place.outer * indices.stride[0] + place.inner * indices.stride[2];
    const Row<T> grad_input = row_of<T>(problem.grad_input, place);
    for (int64_t j = threadIdx.x % kWarpSize; j < problem.k; j += kWarpSize) {
      const int64_t c = at[j * indices.stride[1]];
      assert(c >= 0 && c < problem.classes && "topk_softmax: an index is out of bounds");
      grad_input.set(c, (top.grad[j] - sum) * (top.output[j] * norm));
    }
  }
}

template <class R>
struct Rest {
  static constexpr int kTensors = 1;
  static constexpr bool kReduces = false, kSumsAgain = false;
  __host__ __device__ static const ConstView3& tensor(const RowProblem& problem, int) { return problem.input; }
  template <class Rows>
  __device__ static void part(const RowProblem& problem, const Rows& rows) {
    rows.read(problem.input).leave_part(NoExtra{});
  }
  template <class T, class Rows>
  __device__ static void run(const RowProblem& problem, const Rows& rows) {
    auto row = rows.read(problem.input);
    const RowPlace place = row.place();
    float sum = 0;
    if (place.exists) {  // by each thread for itself: k is small
      const TopK<R> top(problem, place);
      float norm = 0;
      for (int64_t j = 0; j < problem.k; ++j) {
        sum += top.grad[j] * top.output[j];
        norm += top.output[j];
      }
      if (problem.renormalize && problem.k > 0) sum /= norm;
    }
    const RowState state = row.state();
    const float scale = state.inverse_sum();
    const bool zero = problem.renormalize;
    row.template write<T>(problem.grad_input, [&](int64_t, float x) {
      return zero ? sum - sum : -sum * (state.weight(x) * scale);  // 0, or NaN where the row's softmax is NaN
    });
  }
};

}  // namespace

void topk_softmax_backward(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const char* name = "topk_softmax_backward";
  const bool together = classes_together(problem, {problem.input.stride[1], problem.grad_input.stride[1]});
  visit_types(problem, name, [&]<class T, class R>(Type<T>, Type<R>) {
    launch_rows<Rest<R>, T, T>(problem, together, stream, name);
    if (problem.k == 0) return;
    constexpr int kRows = kBackwardThreads / kWarpSize;
    topk_backward_kernel<T, R>
        <<<grid_for((problem.outer * problem.inner + kRows - 1) / kRows, 32), kBackwardThreads, 0, stream>>>(problem);
    check_launch(name);
  });
}

}  // namespace flash_online::cuda
