// Rows whose classes lie side by side, held on the chip: read once, in vectors of 16 bytes. A few lanes of a warp have a short
// row, a block a longer one, in registers; blocks that hold theirs in shared memory, alone or as a cluster, the longest. Which
// thread has which class depends on the row's length alone, not on where the row starts: a row that starts off a multiple of 16
// bytes is read as aligned vectors and shifted.
#pragma once

#include "../hw/async_copy.cuh"
#include "row_reduce.cuh"

namespace flash_online::cuda {

// The threads of a row: kLanes in a block of kThreads, in each block of a cluster if kCluster (then the block has one row),
// which keep it in shared memory if kShared. Results of several merges of a kernel are kept apart in shared memory by kSlot, so
// that each costs one barrier; slot 0 comes first.
template <int kLanes_, int kThreads_, bool kShared_ = false, bool kCluster_ = false>
struct HeldTeam {
  static constexpr int kLanes = kLanes_, kThreads = kThreads_, kRows = kThreads / kLanes;
  static constexpr bool kShared = kShared_, kCluster = kCluster_;
  // To be resident on a multiprocessor: 64 registers a thread, or 64 KiB of shared memory a block.
  static constexpr int kBlocks = kShared ? 3 : 1024 / kThreads;
  static_assert((kRows == 1 || kLanes <= kWarp) && (kShared || !kCluster));

  __device__ __forceinline__ static int row() { return threadIdx.x / kLanes; }
  __device__ __forceinline__ static int rank() { return kCluster ? cluster_rank() : 0; }
  __device__ __forceinline__ static int blocks() { return kCluster ? cluster_size() : 1; }
  __device__ __forceinline__ static int lane() { return rank() * kLanes + threadIdx.x % kLanes; }
  __device__ __forceinline__ static int lanes() { return kLanes * blocks(); }

  // To be called by all threads: first; and before anything is written into another block.
  __device__ __forceinline__ static void begin() {
    if constexpr (kCluster) cluster_arrive();
  }
  __device__ __forceinline__ static void others_have_begun() {
    if constexpr (kCluster) cluster_wait();
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

// `slot`: which of the rows that a team holds at once.
template <class Team, int kVectors, class T>
class HeldRow {
 public:
  static constexpr int kElements = kPerVector<T>;

  __device__ __forceinline__ HeldRow(const RowProblem& problem, const ConstView3& view, const RowPlace& place, uint4 filler,
                                     int slot)
      : row_(row_of<const T>(view, place).data), place_(place), classes_(place.exists ? static_cast<int>(problem.classes) : 0) {
    if constexpr (!Team::kShared) {
      load_row<T>(v_, row_, Team::lane(), Team::lanes(), classes_, filler);
    } else {
      extern __shared__ uint4 all_shared[];
      shared_ = all_shared + slot * kVectors * Team::kThreads + threadIdx.x;
      if (misalignment(row_) == 0) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const int c = class_of(i);
          uint4* to = shared_ + i * Team::kThreads;
          if (c + kElements <= classes_)
            copy_async(to, row_ + c);
          else
            *to = c < classes_ ? first_elements<T>(load_streaming(row_ + c), classes_ - c, filler) : filler;
        }
      } else {
        constexpr int kAtOnce = kVectors < 4 ? kVectors : 4;
#pragma unroll 1
        for (int i = 0; i < kVectors; i += kAtOnce) {
          uint4 v[kAtOnce];
          load_row<T>(v, row_, Team::lane() + i * Team::lanes(), Team::lanes(), classes_, filler);
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) shared_[(i + j) * Team::kThreads] = v[j];
        }
      }
      commit_copies();
    }
    if (slot == 0) Team::others_have_begun();
  }

  __device__ __forceinline__ RowState state() {
    constexpr int kLanes = Team::kLanes < kWarp ? Team::kLanes : kWarp;
    wait();
    float max = -INFINITY;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) max = fmaxf(max, max_of<T>(held(i)));
    RowState state;
    state.raise(lanes_max<kLanes>(max));
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float x[kElements], part = 0;
      unpack<T>(held(i), x);
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
    wait();
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

  // An element, read anew.
  __device__ __forceinline__ float operator[](int64_t c) const { return widen(row_[c]); }
  __device__ __forceinline__ const RowPlace& place() const { return place_; }
  __device__ __forceinline__ bool leads() const { return place_.exists && Team::lane() == 0; }
  __device__ __forceinline__ float count_nan() const {
    return sum<3>([](int, float x) { return x != x ? 1.0f : 0.0f; });
  }
  __device__ __forceinline__ bool together(bool reason) const { return reason; }

 private:
  __device__ __forceinline__ static int class_of(int i) { return (Team::lane() + i * Team::lanes()) * kElements; }
  __device__ __forceinline__ static void wait() {
    if constexpr (Team::kShared) wait_for_copies();  // a thread reads what it copied itself: no barrier
  }
  __device__ __forceinline__ uint4 held(int i) const {
    if constexpr (Team::kShared)
      return shared_[i * Team::kThreads];
    else
      return v_[i];
  }
  template <class F>
  __device__ __forceinline__ void each_with(const HeldRow& other, const F& f) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int c = class_of(i);
      if (c >= classes_) continue;
      float x[kElements], y[kElements];
      unpack<T>(anew(held(i)), x);
      unpack<T>(other.held(i), y);
      f(c, x, y);
    }
  }
  // The vector, in a way that the compiler does not see: what state() unpacked is unpacked again, and does not stay in
  // registers meanwhile, of which 16-bit elements need twice as many unpacked.
  __device__ __forceinline__ uint4 anew(const uint4& v) const {
    if constexpr (Team::kShared || sizeof(T) == sizeof(float)) return v;
    return {v.x ^ zero_, v.y ^ zero_, v.z ^ zero_, v.w ^ zero_};
  }

  uint4 v_[Team::kShared ? 1 : kVectors];
  uint4* shared_ = nullptr;
  unsigned zero_ = 0;
  const T* row_;
  RowPlace place_;
  int classes_;
};

// ---- which team

constexpr int64_t kMostInRegisters = 2048, kBlockVectors = 4096;  // vectors of a row, all its tensors counted: the most that a
                                                                  // block holds, in registers and in shared memory

// How many vectors of a row can be held at most, all its tensors counted.
inline int64_t most_held_vectors(bool reduces) { return reduces ? kMostInRegisters : kBlockVectors * largest_cluster(); }

// Calls f.operator()<Team, vectors>(blocks a row) with the team that holds rows of so many vectors of each of kTensors tensors;
// false if none does, or the kernel is better off with split rows since it only reduces. The length alone decides, so that a
// row's result does not depend on how many rows there are.
template <int kTensors, bool kReduces, class F>
bool visit_held(int64_t vectors, const F& f) {
  const int64_t all = vectors * kTensors;
  if (all <= 16)
    f.template operator()<HeldTeam<8, 128>, 2 / kTensors>(1);
  else if (all <= 32)
    f.template operator()<HeldTeam<8, 128>, 4 / kTensors>(1);
  else if (all <= 64)
    f.template operator()<HeldTeam<16, 128>, 4 / kTensors>(1);
  else if (all <= 128)
    f.template operator()<HeldTeam<32, 128>, 4 / kTensors>(1);
  else if (all <= 256)
    f.template operator()<HeldTeam<64, 64>, 4 / kTensors>(1);
  else if (all <= 512)
    f.template operator()<HeldTeam<128, 128>, 4 / kTensors>(1);
  else if (all <= 1024)
    f.template operator()<HeldTeam<256, 256>, 4 / kTensors>(1);
  else if (all <= kMostInRegisters)
    f.template operator()<HeldTeam<512, 512>, 4 / kTensors>(1);
  else if (all > most_held_vectors(kReduces))
    return false;
  else if constexpr (!kReduces) {
    int cluster = 1;
    while (all > cluster * kBlockVectors) cluster *= 2;
    if (cluster == 1)
      f.template operator()<HeldTeam<256, 256, true>, 16 / kTensors>(1);
    else
      f.template operator()<HeldTeam<256, 256, true, true>, 16 / kTensors>(cluster);
  }
  return true;
}

// Queues a kernel for all rows; false if a grid cannot hold them.
template <class Team>
bool launch_held(void (*kernel)(RowProblem), const RowProblem& problem, int cluster, cudaStream_t stream) {
  const int64_t blocks = (problem.outer * problem.inner + Team::kRows - 1) / Team::kRows * cluster;
  if (blocks > 0x7fffffff) return false;
  constexpr unsigned kSharedBytes = Team::kShared ? kBlockVectors * kVectorBytes : 0;
  if (Team::kShared)
    launch_shared(kernel, problem, static_cast<unsigned>(blocks), Team::kThreads, kSharedBytes, cluster, stream);
  else
    kernel<<<static_cast<unsigned>(blocks), Team::kThreads, 0, stream>>>(problem);
  return true;
}

}  // namespace flash_online::cuda
