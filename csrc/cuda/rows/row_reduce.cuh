// Rows on CUDA: elements as floats, and who works on which row. The order in which the threads of a row join their results is
// fixed and all of them get the same, so that a row's result is the same in every run and beside any other rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../core/online_softmax.h"
#include "../../core/rows.h"
#include "../../core/visit.h"
#include "../hw/launch.h"

namespace flash_online::cuda {

using RowState = OnlineSoftmax<float>;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T narrow(float x) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(x);
  else
    return x;
}

// One row of a tensor.
template <class T>
struct Row {
  T* data;
  int64_t stride;
  __device__ __forceinline__ float operator[](int64_t c) const { return widen(data[c * stride]); }
  __device__ __forceinline__ void set(int64_t c, float x) const { data[c * stride] = narrow<T>(x); }
};

template <class T, class Pointer>
__device__ __forceinline__ Row<T> row_of(const View3<Pointer>& view, int64_t outer, int64_t inner) {
  return {static_cast<T*>(view.data) + outer * view.stride[0] + inner * view.stride[2], view.stride[1]};
}

// A thread's share of a sum, which joins other threads' like a RowState.
struct Sum {
  float value = 0;
  __device__ __forceinline__ void add(float x) { value += x; }
  __device__ __forceinline__ void merge(const Sum& other) { value += other.value; }
};

// Adds many numbers to a sum as if to one of twice its digits (Kahan): a thread of a long row adds some 10^5 of them.
class Compensation {
 public:
  __device__ __forceinline__ void add(Sum& sum, float x) { add(sum, sum.value, x); }
  __device__ __forceinline__ void add(RowState& state, float x) { add(state, state.sum, x); }
  __device__ __forceinline__ void rescale(float factor) { lost_ *= factor; }

 private:
  template <class State>
  __device__ __forceinline__ void add(State& state, const float& sum, float x) {
    const float wanted = x - lost_, before = sum;
    state.add(wanted);
    lost_ = (sum - before) - wanted;
  }
  float lost_ = 0;
};

__device__ __forceinline__ RowState shuffle_down(const RowState& x, int delta) {
  return {__shfl_down_sync(~0u, x.max, delta), __shfl_down_sync(~0u, x.sum, delta)};
}
__device__ __forceinline__ RowState shuffle(const RowState& x, int lane) {
  return {__shfl_sync(~0u, x.max, lane), __shfl_sync(~0u, x.sum, lane)};
}
__device__ __forceinline__ Sum shuffle_down(const Sum& x, int delta) { return {__shfl_down_sync(~0u, x.value, delta)}; }
__device__ __forceinline__ Sum shuffle(const Sum& x, int lane) { return {__shfl_sync(~0u, x.value, lane)}; }

// All threads of the warp take part. Lane 0's result is handed to all: a butterfly's would differ in the last bit.
template <class State>
__device__ __forceinline__ State merge_warp(State state) {
#pragma unroll
  for (int delta = kWarp / 2; delta > 0; delta /= 2) state.merge(shuffle_down(state, delta));
  return shuffle(state, 0);
}

// One State for each of kCount threads or warps; raw memory, as shared variables have no constructors.
template <class State, int kCount>
struct SharedStates {
  alignas(State) unsigned char bytes[kCount * sizeof(State)];
  __device__ __forceinline__ State& operator[](int i) { return reinterpret_cast<State*>(bytes)[i]; }
};

// How threads share rows. A block works on one unit at a time (each warp of WarpPerRow has its own), a thread of it on the row
// `row` of that unit and on the classes first(), first() + kStep, ...; merge() joins the states of all threads of a row and
// must be reached by all threads of the unit.

// Short rows: one row a warp.
struct WarpPerRow {
  static constexpr int kThreads = 128, kUnitsPerBlock = kThreads / kWarp, kRows = 1, kStep = kWarp;
  __device__ __forceinline__ static int unit() { return threadIdx.x / kWarp; }
  __device__ __forceinline__ static int row() { return 0; }
  __device__ __forceinline__ static int first() { return threadIdx.x % kWarp; }
  template <class State>
  __device__ __forceinline__ static State merge(State state) {
    return merge_warp(state);
  }
};

// Long rows: one row a block.
struct BlockPerRow {
  static constexpr int kThreads = 512, kUnitsPerBlock = 1, kRows = 1, kStep = kThreads;
  __device__ __forceinline__ static int unit() { return 0; }
  __device__ __forceinline__ static int row() { return 0; }
  __device__ __forceinline__ static int first() { return threadIdx.x; }
  template <class State>
  __device__ __forceinline__ static State merge(State state) {
    constexpr int kWarps = kThreads / kWarp;
    __shared__ SharedStates<State, kWarps> partial;
    const int lane = threadIdx.x % kWarp;
    state = merge_warp(state);
    __syncthreads();  // the previous row's have been read
    if (lane == 0) partial[threadIdx.x / kWarp] = state;
    __syncthreads();
    return merge_warp(lane < kWarps ? partial[lane] : State{});
  }
};

// Rows that lie side by side in memory: a lane has a row, so that a warp reads neighbouring addresses, and each warp of the
// block has its share of the classes.
struct LanePerRow {
  static constexpr int kThreads = 256, kUnitsPerBlock = 1, kRows = kWarp, kStep = kThreads / kWarp;
  __device__ __forceinline__ static int unit() { return 0; }
  __device__ __forceinline__ static int row() { return threadIdx.x % kWarp; }
  __device__ __forceinline__ static int first() { return threadIdx.x / kWarp; }
  template <class State>
  __device__ __forceinline__ static State merge(State state) {
    __shared__ SharedStates<State, kThreads> partial;
    __syncthreads();
    partial[threadIdx.x] = state;
    __syncthreads();
    State all{};
    for (int other = row(); other < kThreads; other += kWarp) all.merge(partial[other]);
    return all;
  }
};

// The rows of a problem, in `groups` of `run` neighbours: along inner, or along outer where inner is 1.
struct RowGrid {
  int64_t groups, run;
  __host__ __device__ explicit RowGrid(const RowProblem& problem)
      : groups(problem.inner == 1 ? 1 : problem.outer), run(problem.inner == 1 ? problem.outer : problem.inner) {}
  template <class Team>
  __host__ __device__ int64_t units() const {
    return groups * ((run + Team::kRows - 1) / Team::kRows);
  }
};

// Where a thread's row of a unit stands; past the end of its group there is none.
struct RowPlace {
  int64_t outer, inner;
  bool exists;
};
template <class Team>
__device__ __forceinline__ RowPlace place_of(const RowProblem& problem, const RowGrid& grid, int64_t unit) {
  const int64_t units_a_group = (grid.run + Team::kRows - 1) / Team::kRows;
  const int64_t group = unit / units_a_group, position = unit % units_a_group * Team::kRows + Team::row();
  if (problem.inner == 1) return {position, 0, position < grid.run};
  return {group, position, position < grid.run};
}

}  // namespace flash_online::cuda
