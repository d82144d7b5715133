// The gradient of the k largest probabilities of a softmax on CUDA.
//
// If the k probabilities are those of the whole softmax, then grad_input_c = p_c (grad_c - s) with s = sum over the k of
// grad_j p_j, where grad_c is 0 for classes that are not among the k. If they were renormalised, then the k are a softmax of
// their own, and the other classes get 0; the p, which the forward pass rounded to the result's dtype, are normalised once more
// so that they add up to 1.
//
// The first kernel writes every class as if its grad_c were 0; the second overwrites the k classes.
#include "../hw/check.cuh"
#include "dispatch.cuh"
#include "rows.h"

namespace flash_online::cuda {

namespace {

// A row's k gradients and probabilities.
template <class R>
struct TopK {
  const RowProblem& problem;
  Row<const R> grad, output;
  __device__ TopK(const RowProblem& p, const RowCoord& coord)
      : problem(p), grad(row_of<const R>(p.grad, coord)), output(row_of<const R>(p.output, coord)) {}
  // The sum over the k of p_j, and of grad_j p_j; all lanes of a warp call this.
  __device__ __forceinline__ WeightedMean mean() const {
    WeightedMean mean;
    for (int64_t j = threadIdx.x % kWarpSize; j < problem.k; j += kWarpSize) mean.add(grad[j], output[j]);
    return merge_lanes<kWarpSize>(mean);
  }
};

// The first kernel: -s p_c for every class, or 0 if renormalised.
template <class R>
struct AllClassesBackward : OneTensorOp {
  static constexpr bool kRare = true;
  template <class T, class Reader>
  __device__ static void run(const RowProblem& problem, const Reader& reader) {
    auto row = reader.read(problem.input);
    const RowCoord coord = row.coord();
    float sum = 0;
    if (coord.exists) {  // every thread computes the sum for itself: k is small
      const TopK<R> top(problem, coord);
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
      return zero ? sum - sum : -sum * (state.weight(x) * scale);  // sum - sum: NaN where the row's softmax is NaN
    });
  }
};

constexpr int kBackwardThreads = 256;

// The second kernel: a warp per row writes the k classes.
template <class T, class R>
__global__ void __launch_bounds__(kBackwardThreads) topk_backward_kernel(const __grid_constant__ RowProblem problem) {
  const int warp = threadIdx.x / kWarpSize, warps = kBackwardThreads / kWarpSize;
  for (int64_t row = int64_t{blockIdx.x} * warps + warp; row < problem.outer * problem.inner;
       row += int64_t{gridDim.x} * warps) {
    const RowCoord coord = row_coord_by_division(problem, row);
    const TopK<R> top(problem, coord);
    const WeightedMean mean = top.mean();
    const TwoFloats sum = problem.renormalize ? mean.value() : two_floats_of(mean.product);
    const float norm = problem.renormalize ? static_cast<float>(1 / mean.weight) : 1.0f;
    const View3<int64_t*>& indices = problem.indices;
    const int64_t* row_indices = indices.data + coord.outer * indices.stride[0] + coord.inner * indices.stride[2];
    const Row<T> grad_input = row_of<T>(problem.grad_input, coord);
    for (int64_t j = threadIdx.x % kWarpSize; j < problem.k; j += kWarpSize) {
      const int64_t c = row_indices[j * indices.stride[1]];
      assert(c >= 0 && c < problem.classes && "topk_softmax: an index is out of bounds");
      grad_input.set(c, ((top.grad[j] - sum.high) - sum.low) * (top.output[j] * norm));
    }
  }
}

}  // namespace

void topk_softmax_backward(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const char* name = "topk_softmax_backward";
  const bool contiguous = classes_are_contiguous(problem, {problem.input.stride[1], problem.grad_input.stride[1]});
  visit_types(problem, name, [&]<class T, class R>(Type<T>, Type<R>) {
    launch_rows<AllClassesBackward<R>, T, T>(problem, contiguous, stream, name);
    if (problem.k == 0) return;
    const int64_t ctas = ceil_div(problem.outer * problem.inner, kBackwardThreads / kWarpSize);
    topk_backward_kernel<T, R><<<grid_for(ctas, 32), kBackwardThreads, 0, stream>>>(problem);
    check_launch(name);
  });
}

}  // namespace flash_online::cuda
