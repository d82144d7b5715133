// Rows on CUDA: who works on which row, and how the threads of a row join their results. The order of that is fixed and all
// threads get the same, so that a row's result is the same in every run and beside any other rows.
#pragma once

#include "../../../core/online_softmax.h"
#include "../../../core/rows.h"
#include "../../../core/visit.h"
#include "../../hw/cluster.cuh"
#include "../../hw/launch.h"
#include "../../hw/math.cuh"
#include "../../hw/vector.cuh"

namespace flash_online::cuda {

// Natural units in the chip's base: the difference of two scores is rounded once, then scaled, so that large scores lose
// nothing.
struct FastNatural {
  FLASH_ONLINE_HD static float exp(float x) {
#ifdef __CUDA_ARCH__
    return exp2_flushed(x * kLog2E);
#else
    return ::expf(x);
#endif
  }
  FLASH_ONLINE_HD static float log(float x) { return ::logf(x); }
};

using RowState = OnlineSoftmax<float, FastNatural>;

// Weights of many scores by a multiply-add and an exponential each, 2^(x log2(e) - c) with c = max log2(e), rounded once: all
// are off by one factor, which cancels in a quotient and is taken out of a sum. Only for a maximum that keeps it near 1.
class NearWeights {
 public:
  static constexpr float kLn2 = 0.693147181f;
  __device__ __forceinline__ static bool serve(float max) { return fabsf(pivot(max)) <= 4096; }
  __device__ __forceinline__ explicit NearWeights(float max) : point_(pivot(max)), c_(point_ * kLog2E) {}
  __device__ __forceinline__ float operator()(float x) const { return exp2_flushed(fmaf(x, kLog2E, -c_)); }
  // A sum of these weights as one of RowState::weight(); and the factor of a quotient with such a sum.
  __device__ __forceinline__ float exact(float sum) const { return fmaf(sum, -off(), sum); }

 private:
  __device__ __forceinline__ float off() const { return fmaf(point_, kLog2E, -c_) * kLn2; }
  float point_, c_;
};

// Calls f(w), where w(x) is a score's weight in a state, times `factor`.
template <class F>
__device__ __forceinline__ void visit_weights(const RowState& state, float factor, const F& f) {
  if (NearWeights::serve(state.max)) {
    const NearWeights weights(state.max);
    const float by = weights.exact(factor);
    f([&](float x) { return weights(x) * by; });
  } else {
    f([&](float x) { return state.weight(x) * factor; });
  }
}

// Calls f(p), where p(x) is a score's probability, for results of a type: where that has 16 bits, the sum may be taken into the
// exponent, whose rounding shows in its last bits.
template <class Result, class F>
__device__ __forceinline__ void visit_probabilities(const RowState& state, const F& f) {
  if constexpr (sizeof(Result) < sizeof(float)) {
    constexpr float kMost = 512;  // a difference of 2^-15 in the exponent
    const float c = fmaf(pivot(state.max), kLog2E, log2f(state.sum));
    if (fabsf(c) <= kMost) {
      f([&](float x) { return exp2_flushed(fmaf(x, kLog2E, -c)); });
      return;
    }
  }
  visit_weights(state, state.inverse_sum(), f);
}

// How far above its point of reference a thread lets scores be before it moves that: each move rounds the sum again, and in an
// ascending row there would be hundreds.
constexpr float kSlack = 4;

// One row of a tensor.
template <class T>
struct Row {
  T* data;
  int64_t stride;
  __device__ __forceinline__ float operator[](int64_t c) const { return widen(data[c * stride]); }
  __device__ __forceinline__ void set(int64_t c, float x) const { data[c * stride] = narrow<T>(x); }
};

// Where a thread's row stands; past the last one there is none. `number` counts rows as "one number a row" does.
struct RowPlace {
  int64_t outer, inner, number;
  bool exists;
};

__device__ __forceinline__ RowPlace place_at(const RowProblem& problem, int64_t number) {
  return {number / problem.inner, number % problem.inner, number, number < problem.outer * problem.inner};
}

template <class T, class Pointer>
__device__ __forceinline__ Row<T> row_of(const View3<Pointer>& view, const RowPlace& place) {
  return {static_cast<T*>(view.data) + place.outer * view.stride[0] + place.inner * view.stride[2], view.stride[1]};
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

// ---- joining the lanes of a warp, or an aligned part of it

template <int kLanes>
__device__ __forceinline__ unsigned lanes_mask() {
  if constexpr (kLanes == kWarpSize)
    return ~0u;
  else
    return ((1u << kLanes) - 1) << (threadIdx.x % kWarpSize / kLanes * kLanes);
}

// Butterflies, which give every lane the same bits: a maximum is exact, and a sum of two commutes.
template <int kLanes>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(lanes_mask<kLanes>(), x, step));
  return x;
}
template <int kLanes>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(lanes_mask<kLanes>(), x, step);
  return x;
}

template <int kLanes>
__device__ __forceinline__ RowState merge_lanes(RowState state) {
  state.raise_max(lanes_max<kLanes>(state.max));
  state.sum = lanes_sum<kLanes>(state.sum);
  return state;
}
template <int kLanes>
__device__ __forceinline__ Sum merge_lanes(Sum sum) {
  return {lanes_sum<kLanes>(sum.value)};
}

// One State for each of kCount threads or warps; raw memory, as shared variables have no constructors.
template <class State, int kCount>
struct SharedStates {
  alignas(State) unsigned char bytes[kCount * sizeof(State)];
  __device__ __forceinline__ State& operator[](int i) { return reinterpret_cast<State*>(bytes)[i]; }
};

// ---- rows of any strides: each thread reads its classes one by one, as often as they are needed

// A block works on one unit at a time (each warp of WarpPerRow has its own), a thread of it on the row `row` of that unit and
// on the classes first(), first() + kStep, ...; merge() joins the states of all threads of a row and must be reached by all
// threads of the unit.

// Short rows: one row a warp.
struct WarpPerRow {
  static constexpr int kThreads = 128, kUnitsPerBlock = kThreads / kWarpSize, kRows = 1, kStep = kWarpSize;
  __device__ __forceinline__ static int unit() { return threadIdx.x / kWarpSize; }
  __device__ __forceinline__ static int row() { return 0; }
  __device__ __forceinline__ static int first() { return threadIdx.x % kWarpSize; }
  template <class State>
  __device__ __forceinline__ static State merge(State state) {
    return merge_lanes<kWarpSize>(state);
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
    constexpr int kWarps = kThreads / kWarpSize;
    __shared__ SharedStates<State, kWarps> partial;
    const int lane = threadIdx.x % kWarpSize;
    state = merge_lanes<kWarpSize>(state);
    __syncthreads();  // the previous row's have been read
    if (lane == 0) partial[threadIdx.x / kWarpSize] = state;
    __syncthreads();
    return merge_lanes<kWarpSize>(lane < kWarps ? partial[lane] : State{});
  }
};

// Rows that lie side by side in memory: a lane has a row, so that a warp reads neighbouring addresses, and each warp of the
// block has its share of the classes.
struct LanePerRow {
  static constexpr int kThreads = 256, kUnitsPerBlock = 1, kRows = kWarpSize, kStep = kThreads / kWarpSize;
  __device__ __forceinline__ static int unit() { return 0; }
  __device__ __forceinline__ static int row() { return threadIdx.x % kWarpSize; }
  __device__ __forceinline__ static int first() { return threadIdx.x / kWarpSize; }
  template <class State>
  __device__ __forceinline__ static State merge(State state) {
    __shared__ SharedStates<State, kThreads> partial;
    __syncthreads();
    partial[threadIdx.x] = state;
    __syncthreads();
    State all{};
    for (int other = row(); other < kThreads; other += kWarpSize) all.merge(partial[other]);
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

template <class Team>
__device__ __forceinline__ RowPlace place_of(const RowProblem& problem, const RowGrid& grid, int64_t unit) {
  const int64_t units_a_group = (grid.run + Team::kRows - 1) / Team::kRows;
  const int64_t group = unit / units_a_group, position = unit % units_a_group * Team::kRows + Team::row();
  if (problem.inner == 1) return {position, 0, position, position < grid.run};
  return {group, position, group * grid.run + position, position < grid.run};
}

// Calls body(place) for each row of this thread, all threads of a unit together.
template <class Team, class Body>
__device__ __forceinline__ void for_each_row(const RowProblem& problem, const Body& body) {
  const RowGrid grid(problem);
  const int64_t units = grid.units<Team>(), stride = int64_t{gridDim.x} * Team::kUnitsPerBlock;
  for (int64_t unit = int64_t{blockIdx.x} * Team::kUnitsPerBlock + Team::unit(); unit < units; unit += stride)
    body(place_of<Team>(problem, grid, unit));
}

// A row as the operators see it; HeldRow in held_row.cuh and SplitRow in split_row.cuh have the same members.
template <class Team, class T>
class StridedRow {
 public:
  __device__ __forceinline__ StridedRow(const RowProblem& problem, const ConstView3& view, const RowPlace& place)
      : row_(row_of<const T>(view, place)), place_(place), classes_(place.exists ? problem.classes : 0) {}

  // The maximum and the sum of the whole row, for all of its threads.
  __device__ __forceinline__ RowState state() const {
    constexpr int kUnroll = 4;  // classes that a thread reads before it raises its maximum
    RowState state;
    Compensation compensation;
    for (int64_t c = Team::first(); c < classes_; c += Team::kStep * kUnroll) {
      float x[kUnroll], max = -INFINITY, sum = 0;
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t at = c + i * Team::kStep;
        x[i] = at < classes_ ? row_[at] : -INFINITY;
        max = fmaxf(max, x[i]);
      }
      compensation.rescale(state.raise_max_lazily(kSlack, max));
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) sum += state.weight(x[i]);
      compensation.add(state, sum);
    }
    return Team::merge(state);
  }

  // The sum over the row of f(class, element), for all of its threads.
  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum(const F& f) const {
    Sum sum;
    Compensation compensation;
    for (int64_t c = Team::first(); c < classes_; c += Team::kStep) compensation.add(sum, f(c, row_[c]));
    return Team::merge(sum).value;
  }

  // Writes f(class, element) for the whole row.
  template <class Result, class F>
  __device__ __forceinline__ void write(const MutableView3& view, const F& f) const {
    const Row<Result> result = row_of<Result>(view, place_);
    for (int64_t c = Team::first(); c < classes_; c += Team::kStep) result.set(c, f(c, row_[c]));
  }

  // The same, less `less` in one class.
  template <class Result, class F>
  __device__ __forceinline__ void write_less(const MutableView3& view, int64_t at, float less, const F& f) const {
    write<Result>(view, [&](int64_t c, float x) { return f(c, x) - (c == at ? less : 0.0f); });
  }

  // The same of f(class, element, the other row's element).
  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum_with(const StridedRow& other, const F& f) const {
    return sum([&](int64_t c, float x) { return f(c, x, other.row_[c]); });
  }
  template <class Result, class F>
  __device__ __forceinline__ void write_with(const StridedRow& other, const MutableView3& view, const F& f) const {
    write<Result>(view, [&](int64_t c, float x) { return f(c, x, other.row_[c]); });
  }

  // Whether this thread is the one that has, and writes, a class; and what that class has, for this thread, before it is
  // written.
  __device__ __forceinline__ bool owns(int64_t c) const { return place_.exists && c % Team::kStep == Team::first(); }
  __device__ __forceinline__ float operator[](int64_t c) const { return row_[c]; }
  __device__ __forceinline__ const RowPlace& place() const { return place_; }
  __device__ __forceinline__ bool leads() const { return place_.exists && Team::first() == 0; }
  __device__ __forceinline__ float count_nan() const {
    return sum([](int64_t, float x) { return x != x ? 1.0f : 0.0f; });
  }
  // Whether to do what asks for sum(), if this row has a reason: all rows that share a barrier must.
  __device__ __forceinline__ bool together(bool reason) const {
    return std::is_same_v<Team, LanePerRow> ? __syncthreads_or(reason) : reason;
  }

 private:
  Row<const T> row_;
  RowPlace place_;
  int64_t classes_;
};

}  // namespace flash_online::cuda
