// Contiguous rows that are read once and stay on the chip until their results are written. OnChipRow computes on them wherever
// a thread's vectors are: in registers (RegisterVectors, below), in shared memory (SharedVectors, shared_row.cuh), or in runs
// that pass through shared memory (StagedVectors, staged_vectors.cuh).
//
// Registers serve rows of medium length (choice.h), each shared by a warp or a CTA.
#pragma once

#include "row_vectors.cuh"

namespace flash_online::cuda {

// kThreadsPerRow threads share a row, in a CTA of kThreads.
template <int kThreadsPerRow, int kThreads_>
struct RegisterRowGroup {
  static constexpr int kThreads = kThreads_, kRows = kThreads / kThreadsPerRow;
  static constexpr int kLanesPerRow = kThreadsPerRow < kWarpSize ? kThreadsPerRow : kWarpSize;  // lanes of one warp
  static constexpr int kCtasPerSm = 1024 / kThreads;  // resident at the same time: 64 registers per thread
  static_assert(kRows == 1 || kThreadsPerRow <= kWarpSize);

  __device__ __forceinline__ static int row_in_cta() { return threadIdx.x / kThreadsPerRow; }
  __device__ __forceinline__ static int thread_in_row() { return threadIdx.x % kThreadsPerRow; }
  __host__ __device__ __forceinline__ static constexpr int threads_per_row() { return kThreadsPerRow; }

  // Merges the warps' states over the row; within a warp, all lanes of the row already have the same state. Each merge of a
  // kernel has its own kSlot in shared memory, so that one barrier per merge is enough.
  template <int kSlot, class State>
  __device__ __forceinline__ static State merge_warps(State state) {
    if constexpr (kThreadsPerRow <= kWarpSize) {
      return state;
    } else {
      constexpr int kWarps = kThreads / kWarpSize;
      __shared__ SharedStates<State, kWarps> partial;
      const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
      if (lane == 0) partial[warp] = state;
      __syncthreads();
      return merge_lanes<kWarpSize>(lane < kWarps ? partial[lane] : State{});
    }
  }
};

// The row of this thread, where the grid has one CTA for every kRows rows.
template <class Group>
__device__ __forceinline__ RowCoord register_row_coord(const RowProblem& problem) {
  return row_coord(problem, int64_t{blockIdx.x} * Group::kRows + Group::row_in_cta());
}

// The classes of a vector of neighbouring elements of the row: (*this)(e) is the class of element e.
template <int kElements>
struct NeighborClasses {
  int first;
  __device__ __forceinline__ int operator()(int e) const { return first + e; }
  // True if element e is one of the row's `classes` elements, if element 0 is.
  __device__ __forceinline__ bool within(int e, int classes) const { return first + e < classes; }
  __device__ __forceinline__ bool contain(int c) const { return first <= c && c < first + kElements; }
};

// Writes vectors of a row to global memory. kWholeWarp is as for store_vector.
template <class Result, int kElements, bool kWholeWarp>
struct RowWriter {
  Result* row;
  int classes;
  __device__ __forceinline__ void operator()(const NeighborClasses<kElements>& c, int, const float (&z)[kElements]) const {
    store_vector<kWholeWarp>(row, c.first, classes, z);
  }
};

// Writes whole vectors to a row at a multiple of 16 bytes.
template <class Result, int kElements>
struct WholeVectorWriter {
  Result* row;
  int classes;
  __device__ __forceinline__ void operator()(const NeighborClasses<kElements>& c, int, const float (&z)[kElements]) const {
    if (c.first < classes) store_streaming(row + c.first, pack<Result>(z));
  }
};

// Calls f(writer) for a row of results.
template <class Result, int kElements, bool kWholeWarp, class F>
__device__ __forceinline__ void visit_row_writer(Result* row, int classes, const F& f) {
  if constexpr (kElements == kPerVector<Result>)
    if (classes % kElements == 0 && misalignment(row) == 0) return f(WholeVectorWriter<Result, kElements>{row, classes});
  f(RowWriter<Result, kElements, kWholeWarp>{row, classes});
}

// A thread's vectors of a row, in registers. SharedVectors has the same members.
template <class Group_, int kVectors_, class T>
class RegisterVectors {
 public:
  using Group = Group_;
  static constexpr int kUnroll = kVectors_, kElements = kPerVector<T>;  // kUnroll: of loops over vectors
  __device__ __forceinline__ RegisterVectors(const T* row, int classes) {
    load_row<T, Group::kLanesPerRow == kWarpSize>(v_, row, Group::thread_in_row(), Group::threads_per_row(), classes,
                                                  lowest_vector<T>());
  }
  __device__ __forceinline__ void wait() const {}  // until the vectors have arrived
  __device__ __forceinline__ static constexpr int count() { return kVectors_; }
  // True if any thread of the row has a vector i; uniform in a warp.
  __device__ __forceinline__ static constexpr bool has(int) { return true; }
  __device__ __forceinline__ uint4 operator[](int i) const { return v_[i]; }
  __device__ __forceinline__ NeighborClasses<kElements> classes_of(int i) const {
    return {(Group::thread_in_row() + i * Group::threads_per_row()) * kElements};
  }
  // Whether this thread has class c, and the element of a class that it has.
  __device__ __forceinline__ bool owns(int c) const {
    // threads_per_row() is a power of two
    return (c / kElements & (Group::threads_per_row() - 1)) == Group::thread_in_row();
  }
  __device__ __forceinline__ float element_of(int c) const {
    return element<T>(select_vector(v_, c / kElements / Group::threads_per_row()), c % kElements);
  }
  // Calls f with what writes a row of results: a function of a vector's classes, its number and its elements.
  template <class Result, class F>
  __device__ __forceinline__ void visit_writer(const MutableView3& view, const RowCoord& coord, int classes, const F& f) const {
    visit_row_writer<Result, kElements, Group::kLanesPerRow == kWarpSize>(row_of<Result>(view, coord).data, classes, f);
  }
  // The vector, opaque to the compiler (make_opaque, with `sum`), so that it is unpacked again and not kept unpacked.
  __device__ __forceinline__ uint4 reload(int i, float sum) const { return make_opaque<T>(v_[i], sum); }
  template <int kSlot, class State>
  __device__ __forceinline__ State merge_warps(State state) const {
    return Group::template merge_warps<kSlot>(state);
  }

 private:
  uint4 v_[kVectors_];
};

// True if an element of a row of results can be replaced, as in shared memory. A concept, since in a member function nvcc 13.0
// takes a requires-expression that names members for false.
template <class Vectors, class Result>
concept ReplacesElements = requires(const Vectors& vectors, const MutableView3& view, const RowCoord& coord) {
  vectors.template write_element<Result>(view, coord, 0, 0.0f);
};

// A row as the operators see it; StridedRow (strided_row.cuh) says what the members do.
template <class Vectors, class T>
class OnChipRow {
  using Group = typename Vectors::Group;
  static constexpr int kLanesPerRow = Group::kLanesPerRow;

 public:
  static constexpr int kElements = kPerVector<T>;

  __device__ __forceinline__ OnChipRow(const RowCoord& coord, int classes, const Vectors& vectors)
      : vectors_(vectors), coord_(coord), classes_(classes) {}

  template <class Result = T, class State = RowState>
  __device__ __forceinline__ State state() {
    vectors_.wait();
    float max = -INFINITY;
#pragma unroll Vectors::kUnroll
    for (int i = 0; i < vectors_.count(); ++i)
      if (vectors_.has(i)) max = fmaxf(max, max_of<T>(vectors_[i]));
    State state;
    state.max = lanes_max<kLanesPerRow>(max);
    if constexpr (std::is_same_v<State, RowEntropyState>) {
      const EntropySums sums = entropy_sums<T>(state.max, [&](const auto& add) {
#pragma unroll Vectors::kUnroll
        for (int i = 0; i < vectors_.count(); ++i)
          if (vectors_.has(i)) add(vectors_[i]);
      });
      state.add(lanes_sum<kLanesPerRow>(sums.sum), lanes_sum<kLanesPerRow>(sums.products));
    } else {
      float sum = 0;
      if (kFusesWeights<Result> && FusedWeights::is_accurate_for(state.max)) {
        const FusedWeights weights(state.max);
        sum = weights.corrected(sum_of([&](float x) { return weights(x); }));
      } else {
        sum = sum_of([&](float x) { return state.weight(x); });
      }
      state.add(lanes_sum<kLanesPerRow>(sum));
    }
    state = vectors_.template merge_warps<0>(state);
    sum_ = state.sum;
    return state;
  }

  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum(const F& f) const {
    return sum_with<kSlot>(*this, [&](int c, float x, float) { return f(c, x); });
  }
  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum_with(const OnChipRow& other, const F& f) const {
    vectors_.wait();
    float sum = 0;
    for_each_vector(other, [&](const auto& c, const float (&x)[kElements], const float (&y)[kElements]) {
      float vector_sum = 0;
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        if (c.within(e, classes_)) vector_sum += f(c(e), x[e], y[e]);
      sum += vector_sum;
    });
    return vectors_.template merge_warps<kSlot>(Sum{lanes_sum<kLanesPerRow>(sum)}).value;
  }

  template <int kSlot = 1, class F>
  __device__ __forceinline__ TwoFloats precise_sum(const F& f) const {
    vectors_.wait();
    TwoFloats sum;
    for_each_vector(*this, [&](const auto& c, const float (&x)[kElements], const float (&)[kElements]) {
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        if (c.within(e, classes_)) sum.merge(f(c(e), x[e]));
    });
    return vectors_.template merge_warps<kSlot>(merge_lanes<kLanesPerRow>(sum));
  }
  template <int kSlot = 1>
  __device__ __forceinline__ WeightedMean mean_by(const OnChipRow& other) const {
    vectors_.wait();
    WeightedMean mean;
    for_each_vector(other, [&](const auto& c, const float (&x)[kElements], const float (&y)[kElements]) {
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        if (c.within(e, classes_)) mean.add(x[e], y[e]);
    });
    return vectors_.template merge_warps<kSlot>(merge_lanes<kLanesPerRow>(mean));
  }

  template <class Result, class F>
  __device__ __forceinline__ void write(const MutableView3& view, const F& f) const {
    write_with<Result>(*this, view, [&](int c, float x, float) { return f(c, x); });
  }
  template <class Result, class F, class Exact, class Special>
  __device__ __forceinline__ void write_except(const MutableView3& view, int64_t at, const F& f, const Exact& exact,
                                               const Special& special) const {
    const int except = static_cast<int>(at);
    if constexpr (ReplacesElements<Vectors, Result>) {
      // A branch would make a warp wait for all lanes' special elements.
      const bool special_here = at >= 0 && owns(at);
      const float z = special_here ? special((*this)[at]) : 0.0f;  // before the element is overwritten
      write<Result>(view, f);
      if (special_here) vectors_.template write_element<Result>(view, coord_, except, z);
      return;
    }
    write_vectors<Result>(*this, view,
                          [&](const auto& c, const float (&x)[kElements], const float (&)[kElements], float (&z)[kElements]) {
                            if (c.contain(except)) {  // one comparison per vector instead of one per element
#pragma unroll
                              for (int e = 0; e < kElements; ++e) z[e] = c(e) == except ? special(x[e]) : exact(c(e), x[e]);
                            } else {
#pragma unroll
                              for (int e = 0; e < kElements; ++e) z[e] = f(c(e), x[e]);
                            }
                          });
  }
  template <class Result, class F>
  __device__ __forceinline__ void write_with(const OnChipRow& other, const MutableView3& view, const F& f) const {
    write_vectors<Result>(other, view,
                          [&](const auto& c, const float (&x)[kElements], const float (&y)[kElements], float (&z)[kElements]) {
#pragma unroll
                            for (int e = 0; e < kElements; ++e) z[e] = f(c(e), x[e], y[e]);
                          });
  }

  __device__ __forceinline__ bool owns(int64_t c) const { return coord_.exists && vectors_.owns(static_cast<int>(c)); }
  __device__ __forceinline__ float operator[](int64_t c) const { return vectors_.element_of(static_cast<int>(c)); }
  __device__ __forceinline__ const RowCoord& coord() const { return coord_; }
  __device__ __forceinline__ bool is_leader() const { return coord_.exists && Group::thread_in_row() == 0; }
  __device__ __forceinline__ float count_nan() const {
    return sum<3>([](int, float x) { return x != x ? 1.0f : 0.0f; });
  }
  __device__ __forceinline__ bool any_sharing_barrier(bool reason) const {
    return kLanesPerRow < kWarpSize ? __any_sync(~0u, reason) : reason;
  }

 private:
  template <class F>
  __device__ __forceinline__ float sum_of(const F& weight) const {
    float sum = 0;
#pragma unroll Vectors::kUnroll
    for (int i = 0; i < vectors_.count(); ++i) {
      if (!vectors_.has(i)) continue;
      float x[kPerVector<T>], vector_sum = 0;
      unpack<T>(vectors_[i], x);
#pragma unroll
      for (int e = 0; e < kElements; ++e) vector_sum += weight(x[e]);
      sum += vector_sum;
    }
    return sum;
  }
  // Calls f(classes, elements, the other row's elements) for each of this thread's vectors.
  template <class F>
  __device__ __forceinline__ void for_each_vector(const OnChipRow& other, const F& f) const {
#pragma unroll Vectors::kUnroll
    for (int i = 0; i < vectors_.count(); ++i)
      if (vectors_.has(i)) visit_vector(i, other, f);
  }
  // Writes what f(classes, elements, the other row's elements, z) puts into z.
  template <class Result, class F>
  __device__ __forceinline__ void write_vectors(const OnChipRow& other, const MutableView3& view, const F& f) const {
    vectors_.template visit_writer<Result>(view, coord_, classes_, [&](const auto& write) {
#pragma unroll Vectors::kUnroll
      for (int i = 0; i < vectors_.count(); ++i) {
        if (!vectors_.has(i)) continue;
        float z[kElements] = {};
        visit_vector(i, other, [&](const auto& c, const float (&x)[kElements], const float (&y)[kElements]) { f(c, x, y, z); });
        write(vectors_.classes_of(i), i, z);
      }
    });
  }
  template <class F>
  __device__ __forceinline__ void visit_vector(int i, const OnChipRow& other, const F& f) const {
    const auto c = vectors_.classes_of(i);
    if (c(0) < classes_) {
      float x[kElements], y[kElements];
      unpack<T>(vectors_.reload(i, sum_), x);
      unpack<T>(other.vectors_[i], y);
      f(c, x, y);
    }
  }
  Vectors vectors_;
  float sum_ = 0;  // of the row's exponentials, for reload()
  RowCoord coord_;
  int classes_;
};

template <class Group, int kVectors, class T>
using RegisterRow = OnChipRow<RegisterVectors<Group, kVectors, T>, T>;

}  // namespace flash_online::cuda
