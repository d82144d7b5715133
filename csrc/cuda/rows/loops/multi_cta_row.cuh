// Contiguous rows that are too long for the chip. A row is cut into up to 256 slices of one size, one CTA each, and read twice.
// The first kernel stores each slice's maximum and sum in the workspace, as a Partial. The second kernel merges the Partials of
// its row, every CTA in the same order, and reads its slice again to write results. Where slices end depends on the row's
// length alone.
#pragma once

#include "register_row.cuh"
#include "row_vectors.cuh"

namespace flash_online::cuda {

// A CTA's result for its slice of a row.
struct alignas(16) Partial {
  float max, sum;  // of a RowState
  float extra;  // a second sum, which the operator defines, or the products of a RowEntropyState
  float nan;  // the number of NaNs if max is +inf; else whether there is any
};

// For operators without a second sum.
struct NoExtra {
  __device__ __forceinline__ float operator()(int64_t, float) const { return 0.0f; }
};

struct MultiCtaRowGroup : RegisterRowGroup<256, 256> {};
constexpr int kMultiCtaCtasPerSm = 5;  // resident at the same time: 48 registers per thread
constexpr int kMultiCtaVectorsPerThread = 4;  // loaded at a time
constexpr int64_t kMaxSlices = 256;

template <class T>
constexpr int64_t kClassesPerChunk = MultiCtaRowGroup::kThreads * kMultiCtaVectorsPerThread * kPerVector<T>;

// Classes per slice of a row of so many classes; the last slice may have fewer.
template <class T>
__host__ __device__ int64_t classes_per_slice_of(int64_t classes) {
  return ceil_div(classes, kClassesPerChunk<T> * kMaxSlices) * kClassesPerChunk<T>;
}

struct RowSlices {
  int64_t classes_per_slice, slices_per_row;
  template <class T>
  static RowSlices of(int64_t classes, Type<T>) {
    const int64_t slice = classes_per_slice_of<T>(classes);
    return {slice, ceil_div(classes, slice)};
  }
};

// Bytes of workspace for multi-CTA rows: one Partial per slice, and one more for second sums that need the row's state.
inline int64_t multi_cta_workspace(int64_t rows, int64_t slices_per_row) {
  return 2 * rows * slices_per_row * static_cast<int64_t>(sizeof(Partial));
}

// The grid of multi-CTA rows is rows x slices.
__device__ __forceinline__ RowCoord multi_cta_row_coord(const RowProblem& problem) {
  const int64_t index = blockIdx.x;
  if (problem.inner == 1) return {index, 0, index, true};
  return {index / problem.inner, index % problem.inner, index, true};
}

// The Partials of a row's slices, merged. Every warp merges them for itself.
struct MergedSlices {
  RowState state;
  float extra, nan;
  // Does for multi-CTA and pipelined rows what the function resolve_infinity (dispatch.cuh) does for the other kinds.
  __device__ __forceinline__ RowState resolve_infinity() const {
    return state.max == INFINITY && nan == 0 ? RowState{state.max, 1} : state;
  }
};
__device__ __forceinline__ MergedSlices merge_slices(const Partial* partials, int64_t count) {
  MergedSlices merged{};
  for (int64_t i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) {
    const Partial partial = partials[i];
    merged.state.merge(RowState{partial.max, partial.sum});
    merged.extra += partial.extra;
    merged.nan += partial.nan;
  }
  return {merge_lanes<kWarpSize>(merged.state), lanes_sum<kWarpSize>(merged.extra), lanes_sum<kWarpSize>(merged.nan)};
}

// The same where `extra` is the products of a RowEntropyState.
__device__ __forceinline__ MergedSlices merge_entropy_slices(const Partial* partials, int64_t count) {
  RowEntropyState state;
  float nan = 0;
  for (int64_t i = threadIdx.x % kWarpSize; i < count; i += kWarpSize) {
    const Partial partial = partials[i];
    RowEntropyState slice;
    slice.max = partial.max, slice.sum = partial.sum, slice.products = partial.extra;
    state.merge(slice);
    nan += partial.nan;
  }
  state = merge_lanes<kWarpSize>(state);
  return {RowState{state.max, state.sum}, state.products, lanes_sum<kWarpSize>(nan)};
}

// This CTA's slice of a row. The first kernel calls store_partial or store_sum; the second one sees a row with the members of
// StridedRow (strided_row.cuh), which says what they do.
template <class T>
class MultiCtaRow {
 public:
  using Element = T;
  static constexpr int kElements = kPerVector<T>;

  __device__ __forceinline__ MultiCtaRow(const RowProblem& problem, const ConstView3& view)
      : coord_(multi_cta_row_coord(problem)),
        row_(row_of<const T>(view, coord_).data),
        begin_(blockIdx.y * classes_per_slice_of<T>(problem.classes)),
        end_(begin_ + classes_per_slice_of<T>(problem.classes)),
        partials_(static_cast<Partial*>(problem.workspace)) {
    if (end_ > problem.classes) end_ = problem.classes;
  }

  // ---- the first kernel

  // Stores this slice's state, and its sum of extra(class, element) unless that is NoExtra. A RowEntropyState has products in
  // the place of that sum.
  template <class State = RowState, class F>
  __device__ __forceinline__ void store_partial(const F& extra) const {
    constexpr bool kExtra = !std::is_same_v<F, NoExtra>, kEntropy = std::is_same_v<State, RowEntropyState>;
    static_assert(!kExtra || !kEntropy);
    State state;
    Sum extra_sum, nan;
    Compensation compensation, extra_compensation;
    for (int64_t at = begin_; at < end_; at += kClassesPerChunk<T>) {
      uint4 v[kMultiCtaVectorsPerThread];
      load(v, at, lowest_vector<T>());
      float max = -INFINITY;
#pragma unroll
      for (int i = 0; i < kMultiCtaVectorsPerThread; ++i) max = fmaxf(max, max_of<T>(v[i]));
      const float factor = state.raise_max_lazily(kRescaleThreshold, max);
      compensation.rescale(factor);
      if constexpr (kEntropy) extra_compensation.rescale(factor);
#pragma unroll
      for (int i = 0; i < kMultiCtaVectorsPerThread; ++i) {
        float x[kElements], vector_sum = 0, vector_extra = 0;
        unpack<T>(v[i], x);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const float weight = state.weight(x[e]);
          vector_sum += weight;
          if constexpr (kEntropy) vector_extra = fmaf(weight, state.distance(x[e]), vector_extra);
          if constexpr (kExtra) {
            const int64_t c = first_class_of(at, i) + e;
            if (c < end_) vector_extra += extra(c, x[e]);
          }
        }
        compensation.add(state, vector_sum);
        if constexpr (kEntropy) extra_compensation.add_product(state, vector_extra);
        if constexpr (kExtra) extra_compensation.add(extra_sum, vector_extra);
      }
    }
    state = MultiCtaRowGroup::merge_warps<0>(merge_lanes<kWarpSize>(state));
    if constexpr (kExtra) extra_sum = MultiCtaRowGroup::merge_warps<1>(merge_lanes<kWarpSize>(extra_sum));
    if constexpr (kEntropy) extra_sum.value = state.products;
    if (state.max == INFINITY) {  // rare: resolve_infinity has to know whether there is a NaN as well
      for_each_vector(*this, [&](int64_t c, const float (&x)[kElements], const float (&)[kElements]) {
#pragma unroll
        for (int e = 0; e < kElements; ++e)
          if (c + e < end_ && x[e] != x[e]) nan.add(1);
      });
      nan = MultiCtaRowGroup::merge_warps<2>(merge_lanes<kWarpSize>(nan));
    } else if (state.sum != state.sum) {
      nan.value = 1;
    }
    if (threadIdx.x == 0) partials_[partial_index()] = {state.max, state.sum, extra_sum.value, nan.value};
  }

  // Stores this slice's sum of f(class, element, the other row's element), `skipped` Partials into the workspace.
  template <class F>
  __device__ __forceinline__ void store_sum(const MultiCtaRow& other, int64_t skipped, const F& f) const {
    Sum sum;
    Compensation compensation;
    for_each_vector(other, [&](int64_t c, const float (&x)[kElements], const float (&y)[kElements]) {
      float vector_sum = 0;
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        if (c + e < end_) vector_sum += f(c + e, x[e], y[e]);
      compensation.add(sum, vector_sum);
    });
    sum = MultiCtaRowGroup::merge_warps<0>(merge_lanes<kWarpSize>(sum));
    if (threadIdx.x == 0) partials_[skipped + partial_index()] = {-INFINITY, 0, sum.value, 0};
  }

  // Stores this slice's mean_by(), in the place of a Partial.
  __device__ __forceinline__ void store_mean_by(const MultiCtaRow& other) const {
    WeightedMean mean;
    for_each_vector(other, [&](int64_t c, const float (&x)[kElements], const float (&y)[kElements]) {
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        if (c + e < end_) mean.add(x[e], y[e]);
    });
    mean = MultiCtaRowGroup::merge_warps<0>(merge_lanes<kWarpSize>(mean));
    if (threadIdx.x == 0) means()[partial_index()] = mean;
  }

  // ---- the second kernel

  __device__ __forceinline__ MergedSlices merged() const {
    return merge_slices(partials_ + coord_.index * gridDim.y, gridDim.y);
  }
  template <class Result = T, class State = RowState>
  __device__ __forceinline__ State state() const {
    static_assert(std::is_same_v<State, RowState>);  // an entropy is written by finish_kernel
    return merged().state;
  }
  // The sum that the first kernel stored; f must be the function it was given.
  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum(const F&) const {
    return merged().extra;
  }
  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum_with(const MultiCtaRow&, const F&) const {
    return merged().extra;
  }

  template <int kSlot = 1>
  __device__ __forceinline__ WeightedMean mean_by(const MultiCtaRow&) const {
    WeightedMean mean;
    for (int64_t i = threadIdx.x % kWarpSize; i < gridDim.y; i += kWarpSize) mean.merge(means()[coord_.index * gridDim.y + i]);
    return merge_lanes<kWarpSize>(mean);
  }

  template <class Result, class F>
  __device__ __forceinline__ void write(const MutableView3& view, const F& f) const {
    write_with<Result>(*this, view, [&](int64_t c, float x, float) { return f(c, x); });
  }
  template <class Result, class F, class Exact, class Special>
  __device__ __forceinline__ void write_except(const MutableView3& view, int64_t at, const F&, const Exact& exact,
                                               const Special& special) const {
    write<Result>(view, [&](int64_t c, float x) { return c == at ? special(x) : exact(c, x); });
  }
  template <class Result, class F>
  __device__ __forceinline__ void write_with(const MultiCtaRow& other, const MutableView3& view, const F& f) const {
    Result* result = row_of<Result>(view, coord_).data + begin_;
    for_each_vector(other, [&](int64_t c, const float (&x)[kElements], const float (&y)[kElements]) {
      float z[kElements];
#pragma unroll
      for (int e = 0; e < kElements; ++e) z[e] = f(c + e, x[e], y[e]);
      store_vector(result + (c - begin_), 0, static_cast<int>(end_ - c < kElements ? end_ - c : kElements), z);
    });
  }

  __device__ __forceinline__ float count_nan() const { return merged().nan; }
  __device__ __forceinline__ bool any_sharing_barrier(bool reason) const { return reason; }
  __device__ __forceinline__ bool owns(int64_t c) const {
    return begin_ <= c && c < end_ && (c - begin_) / kElements % MultiCtaRowGroup::kThreads == threadIdx.x;
  }
  __device__ __forceinline__ float operator[](int64_t c) const { return widen(row_[c]); }
  __device__ __forceinline__ const RowCoord& coord() const { return coord_; }
  __device__ __forceinline__ int64_t slices_per_row() const { return gridDim.y; }
  __device__ __forceinline__ bool is_leader() const { return blockIdx.y == 0 && threadIdx.x == 0; }

 private:
  __device__ __forceinline__ static int64_t first_class_of(int64_t chunk, int i) {
    return chunk + (static_cast<int>(threadIdx.x) + i * MultiCtaRowGroup::kThreads) * kElements;
  }
  __device__ __forceinline__ void load(uint4 (&v)[kMultiCtaVectorsPerThread], int64_t at, uint4 filler) const {
    const int64_t left = end_ - at;
    load_row<T, true>(v, row_ + at, threadIdx.x, MultiCtaRowGroup::kThreads,
                      static_cast<int>(left < kClassesPerChunk<T> ? left : kClassesPerChunk<T>), filler);
  }
  // Calls f(first class, elements, the other row's elements) for each vector of this thread.
  template <class F>
  __device__ __forceinline__ void for_each_vector(const MultiCtaRow& other, const F& f) const {
    for (int64_t at = begin_; at < end_; at += kClassesPerChunk<T>) {
      uint4 v[kMultiCtaVectorsPerThread], w[kMultiCtaVectorsPerThread];
      load(v, at, uint4{});
      if (&other != this) other.load(w, at, uint4{});
#pragma unroll
      for (int i = 0; i < kMultiCtaVectorsPerThread; ++i) {
        const int64_t c = first_class_of(at, i);
        float x[kElements], y[kElements];
        unpack<T>(v[i], x);
        unpack<T>(&other != this ? w[i] : v[i], y);
        if (c < end_) f(c, x, y);
      }
    }
  }

  static_assert(sizeof(WeightedMean) == sizeof(Partial));
  __device__ __forceinline__ WeightedMean* means() const { return reinterpret_cast<WeightedMean*>(partials_); }
  __device__ __forceinline__ int64_t partial_index() const { return coord_.index * gridDim.y + blockIdx.y; }

  RowCoord coord_;
  const T* row_;
  int64_t begin_, end_;
  Partial* partials_;
};

}  // namespace flash_online::cuda
