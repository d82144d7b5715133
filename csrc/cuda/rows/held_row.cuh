// Rows whose classes lie side by side, held in registers: read once, in vectors of 16 bytes. A few lanes of a warp have a short
// row, a block or a cluster of blocks a long one. Which thread has which class depends on the row's length alone, not on where
// the row starts: a row that starts off a multiple of 16 bytes is read as aligned vectors and shifted.
#pragma once

#include "row_reduce.cuh"

namespace flash_online::cuda {

// The threads of a row: kLanes in a block of kThreads, in each block of a cluster if kCluster (then the block has one row).
// Results of several merges of a kernel are kept apart in shared memory by kSlot, so that each costs one barrier.
template <int kLanes_, int kThreads_, bool kCluster_>
struct HeldTeam {
  static constexpr int kLanes = kLanes_, kThreads = kThreads_, kRows = kThreads / kLanes;
  static constexpr bool kCluster = kCluster_;
  static constexpr int kBlocks = 1024 / kThreads;  // to be resident on a multiprocessor: 64 registers a thread
  static_assert(!kCluster || kRows == 1);

  __device__ __forceinline__ static int row() { return threadIdx.x / kLanes; }
  __device__ __forceinline__ static int rank() { return kCluster ? cluster_rank() : 0; }
  __device__ __forceinline__ static int blocks() { return kCluster ? cluster_size() : 1; }
  __device__ __forceinline__ static int lane() { return rank() * kLanes + threadIdx.x % kLanes; }
  __device__ __forceinline__ static int lanes() { return kLanes * blocks(); }

  // To be called first, by all threads.
  __device__ __forceinline__ static void begin() {
    if constexpr (kCluster) cluster_arrive();
  }

  // Joins what the lanes of each warp agree on (short rows: have agreed on, there is nothing left to do).
  template <int kSlot, class State>
  __device__ __forceinline__ static State merge_warps(State state) {
    if constexpr (kLanes <= kWarp) {
      return state;
    } else {
      constexpr int kWarps = kThreads / kWarp;
      __shared__ SharedStates<State, kWarps*(kCluster ? kLargestCluster : 1)> partial;
      const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
      if constexpr (kCluster) {
        if constexpr (kSlot == 0) cluster_wait();  // the others have begun
        if (lane < blocks()) *in_block(&partial[rank() * kWarps + warp], lane) = state;
        cluster_arrive();
        cluster_wait();
        State all{};
        for (int i = lane; i < kWarps * blocks(); i += kWarp) all.merge(partial[i]);
        return merge_lanes<kWarp>(all);
      } else {
        if (lane == 0) partial[warp] = state;
        __syncthreads();
        return merge_lanes<kWarp>(lane < kWarps ? partial[lane] : State{});
      }
    }
  }
};

// The number of a thread's row. There is a block, or a cluster, for each kRows rows.
template <class Team>
__device__ __forceinline__ RowPlace held_place(const RowProblem& problem) {
  const int64_t block = Team::kCluster ? blockIdx.x / Team::blocks() : blockIdx.x;
  const int64_t number = block * Team::kRows + Team::row();
  const bool exists = number < problem.outer * problem.inner;
  if (problem.inner == 1) return {number, 0, number, exists};
  return {number / problem.inner, number % problem.inner, number, exists};
}

// Vectors of a row: the ones of numbers first, first + step, ...; past its `classes` elements there are `filler`s. What is read
// are aligned vectors that hold at least one element of the row, so that none reaches into memory that is not there.
template <class T, int kVectors>
__device__ __forceinline__ void load_row(uint4 (&v)[kVectors], const T* row, int first, int step, int classes, uint4 filler) {
  constexpr int kElements = kPerVector<T>;
  const unsigned skip = misalignment(row);
  const char* aligned = reinterpret_cast<const char*>(row) - skip;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int c = (first + i * step) * kElements;
    v[i] = c < classes ? load_streaming(aligned + int64_t{c} * sizeof(T)) : filler;
  }
  if (skip != 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int c = (first + i * step) * kElements;
      if (c < classes) {
        const bool more = (classes - c) * static_cast<int>(sizeof(T)) > kVectorBytes - static_cast<int>(skip);
        v[i] = bytes_from(v[i], more ? load_streaming(aligned + int64_t{c} * sizeof(T) + kVectorBytes) : filler, skip);
      }
    }
  }
  if (classes % kElements != 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int c = (first + i * step) * kElements;
      if (c < classes && c + kElements > classes) v[i] = first_elements<T>(v[i], classes - c, filler);
    }
  }
}

// Writes a vector's elements c, c + 1, ... of a row.
template <class Result, int kElements>
__device__ __forceinline__ void store_vector(Result* row, int c, int classes, const float (&y)[kElements]) {
  constexpr int kBytes = kElements * static_cast<int>(sizeof(Result));
  Result* at = row + c;
  if (c + kElements <= classes && misalignment(at) % (kBytes < kVectorBytes ? kBytes : kVectorBytes) == 0) {
    if constexpr (kBytes < kVectorBytes) {
      float padded[2 * kElements] = {};
#pragma unroll
      for (int e = 0; e < kElements; ++e) padded[e] = y[e];
      const uint4 low = pack<Result>(padded);
      __stcs(reinterpret_cast<uint2*>(at), make_uint2(low.x, low.y));
    } else {
#pragma unroll
      for (int part = 0; part < kBytes / kVectorBytes; ++part)
        store_streaming(at + part * kPerVector<Result>, pack<Result>(y + part * kPerVector<Result>));
    }
  } else {
#pragma unroll
    for (int e = 0; e < kElements; ++e)
      if (c + e < classes) at[e] = narrow<Result>(y[e]);
  }
}

template <class Team, int kVectors, class T>
class HeldRow {
 public:
  static constexpr int kElements = kPerVector<T>;

  __device__ __forceinline__ HeldRow(const RowProblem& problem, const ConstView3& view, const RowPlace& place,
                                     uint4 filler = lowest_vector<T>())
      : row_(row_of<const T>(view, place).data), place_(place), classes_(place.exists ? static_cast<int>(problem.classes) : 0) {
    load_row<T>(v_, row_, Team::lane(), Team::lanes(), classes_, filler);
  }

  __device__ __forceinline__ RowState state() {
    constexpr int kLanes = Team::kLanes < kWarp ? Team::kLanes : kWarp;
    float max = -INFINITY;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) max = fmaxf(max, max_of<T>(v_[i]));
    RowState state;
    state.raise(lanes_max<kLanes>(max));
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float x[kElements], part = 0;
      unpack<T>(v_[i], x);
#pragma unroll
      for (int e = 0; e < kElements; ++e) part += state.weight(x[e]);
      sum += part;
    }
    state.add(lanes_sum<kLanes>(sum));
    state = Team::template merge_warps<0>(state);
    zero_ = __float_as_uint(state.sum) >> 31;  // a sum of exponentials has no sign; if NaN's has, the row's results are NaN too
    return state;
  }

  // The sum over the row of f(class, element), for all of its threads.
  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum(const F& f) const {
    return sum_with<kSlot>(*this, [&](int c, float x, float) { return f(c, x); });
  }

  // Writes f(class, element) for the whole row.
  template <class Result, class F>
  __device__ __forceinline__ void write(const MutableView3& view, const F& f) const {
    write_with<Result>(*this, view, [&](int c, float x, float) { return f(c, x); });
  }

  // The same of f(class, element, the other row's element).
  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum_with(const HeldRow& other, const F& f) const {
    constexpr int kLanes = Team::kLanes < kWarp ? Team::kLanes : kWarp;
    float sum = 0;
    each_with(other, [&](int c, const float (&x)[kElements], const float (&y)[kElements]) {
      float part = 0;
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        if (c + e < classes_) part += f(c + e, x[e], y[e]);
      sum += part;
    });
    return Team::template merge_warps<kSlot>(Sum{lanes_sum<kLanes>(sum)}).value;
  }
  template <class Result, class F>
  __device__ __forceinline__ void write_with(const HeldRow& other, const MutableView3& view, const F& f) const {
    Result* result = row_of<Result>(view, place_).data;
    each_with(other, [&](int c, const float (&x)[kElements], const float (&y)[kElements]) {
      float z[kElements];
#pragma unroll
      for (int e = 0; e < kElements; ++e) z[e] = f(c + e, x[e], y[e]);
      store_vector(result, c, classes_, z);
    });
  }

  __device__ __forceinline__ float operator[](int64_t c) const { return widen(row_[c]); }
  __device__ __forceinline__ const RowPlace& place() const { return place_; }
  __device__ __forceinline__ bool leads() const { return place_.exists && Team::lane() == 0; }
  __device__ __forceinline__ float count_nan() const {
    return sum<3>([](int, float x) { return x != x ? 1.0f : 0.0f; });
  }
  __device__ __forceinline__ bool together(bool reason) const { return reason; }

 private:
  template <class F>
  __device__ __forceinline__ void each_with(const HeldRow& other, const F& f) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int c = (Team::lane() + i * Team::lanes()) * kElements;
      if (c >= classes_) continue;
      float x[kElements], y[kElements];
      unpack<T>(anew(v_[i]), x);
      unpack<T>(other.v_[i], y);
      f(c, x, y);
    }
  }

  // The vector, in a way that the compiler does not see: what state() unpacked is unpacked again, and does not stay in
  // registers meanwhile, of which 16-bit elements need twice as many unpacked.
  __device__ __forceinline__ uint4 anew(const uint4& v) const {
    if constexpr (sizeof(T) == sizeof(float)) return v;
    return {v.x ^ zero_, v.y ^ zero_, v.z ^ zero_, v.w ^ zero_};
  }

  uint4 v_[kVectors];
  unsigned zero_ = 0;
  const T* row_;
  RowPlace place_;
  int classes_;
};

// ---- which team
// ----------------------------------------------------------------------------------------------------------------

constexpr int64_t kBlockVectors = 4096;  // that a block of a cluster holds

// How many vectors of a row can be held at most, all its tensors counted.
inline int64_t most_held_vectors() { return kBlockVectors * largest_cluster(); }

// Calls f.operator()<Team, vectors>(blocks a row) with the team that holds rows of so many vectors of each of kTensors tensors;
// false if none does. The length alone decides, so that a row's result does not depend on how many rows there are.
template <int kTensors, class F>
bool visit_held(int64_t vectors, const F& f) {
  const int64_t all = vectors * kTensors;
  if (all <= 16)
    f.template operator()<HeldTeam<8, 128, false>, 2 / kTensors>(1);
  else if (all <= 32)
    f.template operator()<HeldTeam<8, 128, false>, 4 / kTensors>(1);
  else if (all <= 64)
    f.template operator()<HeldTeam<16, 128, false>, 4 / kTensors>(1);
  else if (all <= 128)
    f.template operator()<HeldTeam<32, 128, false>, 4 / kTensors>(1);
  else if (all <= 256)
    f.template operator()<HeldTeam<32, 128, false>, 8 / kTensors>(1);
  else if (all <= 512)
    f.template operator()<HeldTeam<128, 128, false>, 4 / kTensors>(1);
  else if (all <= 1024)
    f.template operator()<HeldTeam<128, 128, false>, 8 / kTensors>(1);
  else if (all <= 2048)
    f.template operator()<HeldTeam<256, 256, false>, 8 / kTensors>(1);
  else if (all <= kBlockVectors)
    f.template operator()<HeldTeam<512, 512, false>, 8 / kTensors>(1);
  else {
    if (all > most_held_vectors()) return false;
    int cluster = 2;
    while (all > cluster * kBlockVectors) cluster *= 2;
    f.template operator()<HeldTeam<512, 512, true>, 8 / kTensors>(cluster);
  }
  return true;
}

// Queues a kernel for all rows; false if a grid cannot hold them.
template <class Team>
bool launch_held(void (*kernel)(RowProblem), const RowProblem& problem, int cluster, cudaStream_t stream) {
  const int64_t blocks = (problem.outer * problem.inner + Team::kRows - 1) / Team::kRows * cluster;
  if (blocks > 0x7fffffff) return false;
  if (Team::kCluster)
    launch_clusters(kernel, problem, static_cast<unsigned>(blocks), Team::kThreads, cluster, stream);
  else
    kernel<<<static_cast<unsigned>(blocks), Team::kThreads, 0, stream>>>(problem);
  return true;
}

}  // namespace flash_online::cuda
