// Rows of any strides. The threads of a row read its classes from global memory one by one, once per pass.
//
// A CTA works on one row set at a time, or each of its warps on one: the rows that its threads read side by side. Three groups
// of threads differ in how they share a row set; visit_strided_group (dispatch.cuh) chooses.
//   WarpPerRow   rows of up to 1023 classes: one row per warp
//   CtaPerRow    longer rows: one row per CTA
//   LanePerRow   neighbouring rows are closer in memory than the classes of a row: 32 rows per CTA, one per lane
#pragma once

#include "row_reduce.cuh"

namespace flash_online::cuda {

// A thread of a group reads the row `row_in_set()` of its row set, and of that row the classes first(), first() + kStep, ...
// merge() merges the states of all threads of a row; all threads of the row set must call it.

struct WarpPerRow {
  static constexpr int kThreads = 128, kRowSetsPerCta = kThreads / kWarpSize, kRows = 1, kStep = kWarpSize;
  __device__ __forceinline__ static int row_set() { return threadIdx.x / kWarpSize; }
  __device__ __forceinline__ static int row_in_set() { return 0; }
  __device__ __forceinline__ static int first() { return threadIdx.x % kWarpSize; }
  template <class State>
  __device__ __forceinline__ static State merge(State state) {
    return merge_lanes<kWarpSize>(state);
  }
};

struct CtaPerRow {
  static constexpr int kThreads = 512, kRowSetsPerCta = 1, kRows = 1, kStep = kThreads;
  __device__ __forceinline__ static int row_set() { return 0; }
  __device__ __forceinline__ static int row_in_set() { return 0; }
  __device__ __forceinline__ static int first() { return threadIdx.x; }
  template <class State>
  __device__ __forceinline__ static State merge(State state) {
    constexpr int kWarps = kThreads / kWarpSize;
    __shared__ SharedStates<State, kWarps> partial;
    const int lane = threadIdx.x % kWarpSize;
    state = merge_lanes<kWarpSize>(state);
    __syncthreads();  // all warps have read the states of the previous row
    if (lane == 0) partial[threadIdx.x / kWarpSize] = state;
    __syncthreads();
    return merge_lanes<kWarpSize>(lane < kWarps ? partial[lane] : State{});
  }
};

// A warp reads neighbouring addresses of 32 rows; the warps of the CTA share the classes.
struct LanePerRow {
  static constexpr int kThreads = 256, kRowSetsPerCta = 1, kRows = kWarpSize, kStep = kThreads / kWarpSize;
  __device__ __forceinline__ static int row_set() { return 0; }
  __device__ __forceinline__ static int row_in_set() { return threadIdx.x % kWarpSize; }
  __device__ __forceinline__ static int first() { return threadIdx.x / kWarpSize; }
  template <class State>
  __device__ __forceinline__ static State merge(State state) {
    __shared__ SharedStates<State, kThreads> partial;
    __syncthreads();
    partial[threadIdx.x] = state;
    __syncthreads();
    State all{};
    for (int other = row_in_set(); other < kThreads; other += kWarpSize) all.merge(partial[other]);
    return all;
  }
};

// The rows of a problem as `runs` of `run_length` neighbours: along inner, or along outer where inner is 1. A row set does not
// reach beyond its run.
struct RowGrid {
  int64_t runs, run_length;
  __host__ __device__ explicit RowGrid(const RowProblem& problem)
      : runs(problem.inner == 1 ? 1 : problem.outer), run_length(problem.inner == 1 ? problem.outer : problem.inner) {}
  template <class Group>
  __host__ __device__ int64_t row_sets_per_run() const {
    return ceil_div(run_length, Group::kRows);
  }
  template <class Group>
  __host__ __device__ int64_t row_sets() const {
    return runs * row_sets_per_run<Group>();
  }
};

template <class Group>
__device__ __forceinline__ RowCoord strided_row_coord(const RowProblem& problem, const RowGrid& grid, int64_t row_set) {
  const int64_t sets_per_run = grid.row_sets_per_run<Group>();
  const int64_t run = row_set / sets_per_run, position = row_set % sets_per_run * Group::kRows + Group::row_in_set();
  if (problem.inner == 1) return {position, 0, position, position < grid.run_length};
  return {run, position, run * grid.run_length + position, position < grid.run_length};
}

// Calls body(coord) for each row of this thread. All threads of a row set call it together.
template <class Group, class Body>
__device__ __forceinline__ void for_each_row(const RowProblem& problem, const Body& body) {
  const RowGrid grid(problem);
  const int64_t row_sets = grid.row_sets<Group>(), stride = int64_t{gridDim.x} * Group::kRowSetsPerCta;
  for (int64_t row_set = int64_t{blockIdx.x} * Group::kRowSetsPerCta + Group::row_set(); row_set < row_sets; row_set += stride)
    body(strided_row_coord<Group>(problem, grid, row_set));
}

// A row as the operators see it. OnChipRow (register_row.cuh) and MultiCtaRow (multi_cta_row.cuh) have the same members.
template <class Group, class T>
class StridedRow {
 public:
  __device__ __forceinline__ StridedRow(const RowProblem& problem, const ConstView3& view, const RowCoord& coord)
      : row_(row_of<const T>(view, coord)), coord_(coord), classes_(coord.exists ? problem.classes : 0) {}

  // The maximum and the sum of the whole row, for results of type Result; every thread of the row gets them.
  template <class Result = T, class State = RowState>
  __device__ __forceinline__ State state() const {
    constexpr int kUnroll = 4;  // classes that a thread reads before it raises its maximum
    State state;
    Compensation compensation;
    [[maybe_unused]] Compensation of_products;
    for (int64_t c = Group::first(); c < classes_; c += Group::kStep * kUnroll) {
      float x[kUnroll], max = -INFINITY, sum = 0;
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t at = c + i * Group::kStep;
        x[i] = at < classes_ ? row_[at] : -INFINITY;
        max = fmaxf(max, x[i]);
      }
      const float factor = state.raise_max_lazily(kRescaleThreshold, max);
      compensation.rescale(factor);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) sum += state.weight(x[i]);
      compensation.add(state, sum);
      if constexpr (std::is_same_v<State, RowEntropyState>) {
        float products = 0;
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) products = fmaf(state.weight(x[i]), state.distance(x[i]), products);
        of_products.rescale(factor);
        of_products.add_product(state, products);
      }
    }
    return Group::merge(state);
  }

  // The sum over the row of f(class, element); every thread of the row gets it. kSlot: see RegisterRowGroup.
  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum(const F& f) const {
    Sum sum;
    Compensation compensation;
    for (int64_t c = Group::first(); c < classes_; c += Group::kStep) compensation.add(sum, f(c, row_[c]));
    return Group::merge(sum).value;
  }
  // The sum of f(class, element, the other row's element).
  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum_with(const StridedRow& other, const F& f) const {
    return sum([&](int64_t c, float x) { return f(c, x, other.row_[c]); });
  }

  // The sum of f(class, element), which is a TwoFloats, in two floats.
  template <int kSlot = 1, class F>
  __device__ __forceinline__ TwoFloats precise_sum(const F& f) const {
    TwoFloats sum;
    for (int64_t c = Group::first(); c < classes_; c += Group::kStep) sum.merge(f(c, row_[c]));
    return Group::merge(sum);
  }
  // The mean over the row of its elements by the other row's as weights; every thread of the row gets it.
  template <int kSlot = 1>
  __device__ __forceinline__ WeightedMean mean_by(const StridedRow& other) const {
    WeightedMean mean;
    for (int64_t c = Group::first(); c < classes_; c += Group::kStep) mean.add(row_[c], other.row_[c]);
    return Group::merge(mean);
  }

  // Writes f(class, element) for every class of the row.
  template <class Result, class F>
  __device__ __forceinline__ void write(const MutableView3& view, const F& f) const {
    const Row<Result> result = row_of<Result>(view, coord_);
    for (int64_t c = Group::first(); c < classes_; c += Group::kStep) result.set(c, f(c, row_[c]));
  }
  // Writes exact(class, element), but special(element) in class `at`. f is exact but for its last digit, and faster: a kind of
  // row may take it for other classes.
  template <class Result, class F, class Exact, class Special>
  __device__ __forceinline__ void write_except(const MutableView3& view, int64_t at, const F&, const Exact& exact,
                                               const Special& special) const {
    write<Result>(view, [&](int64_t c, float x) { return c == at ? special(x) : exact(c, x); });
  }
  // Writes f(class, element, the other row's element).
  template <class Result, class F>
  __device__ __forceinline__ void write_with(const StridedRow& other, const MutableView3& view, const F& f) const {
    write<Result>(view, [&](int64_t c, float x) { return f(c, x, other.row_[c]); });
  }

  // True if this thread reads and writes class c. Only then may it ask for the element, and only before it is overwritten.
  __device__ __forceinline__ bool owns(int64_t c) const { return coord_.exists && c % Group::kStep == Group::first(); }
  __device__ __forceinline__ float operator[](int64_t c) const { return row_[c]; }
  __device__ __forceinline__ const RowCoord& coord() const { return coord_; }
  // True if this thread writes the row's scalars.
  __device__ __forceinline__ bool is_leader() const { return coord_.exists && Group::first() == 0; }
  __device__ __forceinline__ float count_nan() const {
    return sum([](int64_t, float x) { return x != x ? 1.0f : 0.0f; });
  }
  // True if any row that shares barriers with this one has a reason to call sum(): then all of them must.
  __device__ __forceinline__ bool any_sharing_barrier(bool reason) const {
    return std::is_same_v<Group, LanePerRow> ? __syncthreads_or(reason) : reason;
  }

 private:
  Row<const T> row_;
  RowCoord coord_;
  int64_t classes_;
};

}  // namespace flash_online::cuda
