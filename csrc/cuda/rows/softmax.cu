// Softmax and log-softmax on CUDA, forward and backward: one read for the maximum and the sum (online softmax), one more for
// the result.
#include "row_reduce.cuh"
#include "rows.h"

namespace flash_online::cuda {

namespace {

constexpr int kUnroll = 4;            // classes that a thread reads before it raises its maximum
constexpr int64_t kLongRow = 1024;    // classes from which a row gets a block

template <class Team, class Input, class Result>
__global__ void __launch_bounds__(Team::kThreads) softmax_kernel(const __grid_constant__ RowProblem problem) {
  const RowGrid grid(problem);
  const int64_t units = grid.units<Team>(), stride = int64_t{gridDim.x} * Team::kUnitsPerBlock;
  for (int64_t unit = int64_t{blockIdx.x} * Team::kUnitsPerBlock + Team::unit(); unit < units; unit += stride) {
    const RowPlace place = place_of<Team>(problem, grid, unit);
    const int64_t classes = place.exists ? problem.classes : 0;
    const Row<const Input> input = row_of<const Input>(problem.input, place.outer, place.inner);

    RowState state;
    Compensation compensation;
    for (int64_t c = Team::first(); c < classes; c += Team::kStep * kUnroll) {
      float x[kUnroll], max = -INFINITY, sum = 0;
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t at = c + i * Team::kStep;
        x[i] = at < classes ? input[at] : -INFINITY;
        max = maximum(max, x[i]);
      }
      compensation.rescale(state.raise(max));
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) sum += state.weight(x[i]);
      compensation.add(state, sum);
    }
    state = Team::merge(state);

    const Row<Result> result = row_of<Result>(problem.result, place.outer, place.inner);
    if (problem.log) {
      const float max = pivot(state.max), log_sum = Natural::log(state.sum);
      for (int64_t c = Team::first(); c < classes; c += Team::kStep) result.set(c, (input[c] - max) - log_sum);
    } else {
      const float scale = state.inverse_sum();
      for (int64_t c = Team::first(); c < classes; c += Team::kStep) result.set(c, state.weight(input[c]) * scale);
    }
  }
}

// With s = sum(grad * y), grad_input = (grad - s) y; of the logarithm, with s = sum(grad), grad - s exp(y).
template <class Team, class Input, class Result>
__global__ void __launch_bounds__(Team::kThreads) softmax_backward_kernel(const __grid_constant__ RowProblem problem) {
  const RowGrid grid(problem);
  const int64_t units = grid.units<Team>(), stride = int64_t{gridDim.x} * Team::kUnitsPerBlock;
  for (int64_t unit = int64_t{blockIdx.x} * Team::kUnitsPerBlock + Team::unit(); unit < units; unit += stride) {
    const RowPlace place = place_of<Team>(problem, grid, unit);
    const int64_t classes = place.exists ? problem.classes : 0;
    const Row<const Result> grad = row_of<const Result>(problem.grad, place.outer, place.inner);
    const Row<const Result> output = row_of<const Result>(problem.output, place.outer, place.inner);

    Sum sum;
    Compensation compensation;
    for (int64_t c = Team::first(); c < classes; c += Team::kStep * kUnroll) {
      float part = 0;
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t at = c + i * Team::kStep;
        if (at < classes) part += problem.log ? grad[at] : grad[at] * output[at];
      }
      compensation.add(sum, part);
    }
    sum = Team::merge(sum);

    const Row<Input> grad_input = row_of<Input>(problem.grad_input, place.outer, place.inner);
    if (problem.log)
      for (int64_t c = Team::first(); c < classes; c += Team::kStep)
        grad_input.set(c, grad[c] - Natural::exp(output[c]) * sum.value);
    else
      for (int64_t c = Team::first(); c < classes; c += Team::kStep) grad_input.set(c, (grad[c] - sum.value) * output[c]);
  }
}

// Calls f(Type<Input>, Type<Result>).
template <class F>
void visit_types(const RowProblem& problem, const F& f) {
  const bool same = problem.dtype == problem.result_dtype;
  if (problem.dtype == DType::kFloat32 && same)
    f(Type<float>{}, Type<float>{});
  else if (problem.dtype == DType::kFloat16)
    same ? f(Type<__half>{}, Type<__half>{}) : f(Type<__half>{}, Type<float>{});
  else if (problem.dtype == DType::kBFloat16)
    same ? f(Type<__nv_bfloat16>{}, Type<__nv_bfloat16>{}) : f(Type<__nv_bfloat16>{}, Type<float>{});
  else
    throw std::runtime_error("softmax on CUDA: dtype must be float16, bfloat16 or float32");
}

// Calls f(Team) with the team for rows of this length, of which the first is read through `view`. Nothing else decides, so
// that a row's result does not depend on how many rows there are.
template <class F>
void visit_team(const RowProblem& problem, const ConstView3& view, const F& f) {
  const int64_t run = RowGrid(problem).run, row_stride = problem.inner == 1 ? view.stride[0] : view.stride[2];
  if (run > 1 && row_stride < view.stride[1])
    f(LanePerRow{});
  else if (problem.classes < kLongRow)
    f(WarpPerRow{});
  else
    f(BlockPerRow{});
}

template <class Team>
unsigned blocks_of(const RowProblem& problem) {
  constexpr int kWaves = 4, kResident = 2048 / Team::kThreads;
  const int64_t units = RowGrid(problem).units<Team>();
  return grid_for((units + Team::kUnitsPerBlock - 1) / Team::kUnitsPerBlock, kWaves * kResident);
}

bool is_empty(const RowProblem& problem) { return problem.outer == 0 || problem.classes == 0 || problem.inner == 0; }

}  // namespace

void softmax(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  visit_types(problem, [&]<class Input, class Result>(Type<Input>, Type<Result>) {
    visit_team(problem, problem.input, [&]<class Team>(Team) {
      softmax_kernel<Team, Input, Result><<<blocks_of<Team>(problem), Team::kThreads, 0, stream>>>(problem);
    });
  });
  check_launch("softmax");
}

void softmax_backward(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  visit_types(problem, [&]<class Input, class Result>(Type<Input>, Type<Result>) {
    visit_team(problem, problem.grad, [&]<class Team>(Team) {
      softmax_backward_kernel<Team, Input, Result><<<blocks_of<Team>(problem), Team::kThreads, 0, stream>>>(problem);
    });
  });
  check_launch("softmax_backward");
}

}  // namespace flash_online::cuda
