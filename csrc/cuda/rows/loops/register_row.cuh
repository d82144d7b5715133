// Rows whose classes lie side by side, held on the chip: read once, in vectors of 16 bytes. A few lanes of a warp have a short
// row, a block a longer one, in registers; longer ones are in shared memory (shared_row.cuh). Which thread has which class
// depends on the row's length alone, not on where the row starts: a row that starts off a multiple of 16 bytes is read as
// aligned vectors and shifted.
#pragma once

#include "row_reduce.cuh"

namespace flash_online::cuda {

// The threads of a row: kLanes in a block of kThreads. Results of several merges of a kernel are kept apart in shared memory by
// kSlot, so that each costs one barrier.
template <int kLanes_, int kThreads_>
struct HeldTeam {
  static constexpr int kLanes = kLanes_, kThreads = kThreads_, kRows = kThreads / kLanes;
  static constexpr int kBlocks = 1024 / kThreads;  // to be resident on a multiprocessor: 64 registers a thread
  static_assert(kRows == 1 || kLanes <= kWarpSize);

  __device__ __forceinline__ static int row() { return threadIdx.x / kLanes; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % kLanes; }
  __device__ __forceinline__ static int lanes() { return kLanes; }

  // Joins what the lanes of each warp agree on (short rows: have agreed on, there is nothing left to do).
  template <int kSlot, class State>
  __device__ __forceinline__ static State merge_warps(State state) {
    if constexpr (kLanes <= kWarpSize) {
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

// The same as place_at, without a division where there is nothing to divide.
__device__ __forceinline__ RowPlace held_place(const RowProblem& problem, int64_t number) {
  const bool exists = number < problem.outer * problem.inner;
  if (problem.inner == 1) return {number, 0, number, exists};
  return {number / problem.inner, number % problem.inner, number, exists};
}

// A thread's row. There is a block for each kRows rows.
template <class Team>
__device__ __forceinline__ RowPlace held_place(const RowProblem& problem) {
  return held_place(problem, int64_t{blockIdx.x} * Team::kRows + Team::row());
}

// The vector of the lane so far after this one, or before it if below 0.
template <int kDistance>
__device__ __forceinline__ uint4 neighbor(const uint4& v) {
  const auto of = [](unsigned word) {
    return kDistance < 0 ? __shfl_up_sync(~0u, word, -kDistance) : __shfl_down_sync(~0u, word, kDistance);
  };
  return {of(v.x), of(v.y), of(v.z), of(v.w)};
}

// Vectors of a row: the ones of numbers first, first + step, ...; past its `classes` elements there are `filler`s. What is read
// are aligned vectors that hold at least one element of the row, so that none reaches into memory that is not there.
// kTogether: the lanes of a warp have neighboring vectors of one row, and all of them are here.
template <class T, bool kTogether = false, int kVectors>
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
      uint4 next = filler;
      bool has_next = false;
      if constexpr (kTogether) {
        next = neighbor<1>(v[i]);
        has_next = threadIdx.x % kWarpSize != kWarpSize - 1 && c + kElements < classes;
      }
      if (c < classes) {
        const bool more = (classes - c) * static_cast<int>(sizeof(T)) > kVectorBytes - static_cast<int>(skip);
        if (!has_next) next = more ? load_streaming(aligned + int64_t{c} * sizeof(T) + kVectorBytes) : filler;
        v[i] = bytes_from(v[i], next, skip);
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

// Writes a vector's elements c, c + 1, ... of a row, as far as there are classes. kTogether as above: then a row that starts
// off a multiple of 16 bytes is written in aligned vectors too, of the end of the lane before's and the beginning of one's own.
template <bool kTogether = false, class Result, int kElements>
__device__ __forceinline__ void store_vector(Result* row, int c, int classes, const float (&y)[kElements]) {
  constexpr int kBytes = kElements * static_cast<int>(sizeof(Result));
  Result* at = row + c;
  if constexpr (kTogether && kBytes == kVectorBytes) {
    const unsigned skip = misalignment(row);
    if (skip != 0) {
      const uint4 own = pack<Result>(y), before = neighbor<-1>(own);
      const int lane = static_cast<int>(threadIdx.x) % kWarpSize, rest = kElements - static_cast<int>(skip / sizeof(Result));
      const bool joined = lane != 0 && c + kElements <= classes;
      const bool next_joins = lane != kWarpSize - 1 && c + 2 * kElements <= classes;
      if (joined) store_streaming(reinterpret_cast<char*>(at) - skip, bytes_from(before, own, kVectorBytes - skip));
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        if (c + e < classes && !(e < rest ? joined : next_joins)) at[e] = narrow<Result>(y[e]);
      return;
    }
  }
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

// The vector, in a way that the compiler does not see: what was unpacked is unpacked again, and does not stay in registers
// meanwhile, of which 16-bit elements need twice as many unpacked. A sum of exponentials has no sign; if NaN's has, the row's
// results are NaN too.
template <class T>
__device__ __forceinline__ uint4 hidden(const uint4& v, float sum) {
  if constexpr (sizeof(T) == sizeof(float)) return v;
  const unsigned zero = __float_as_uint(sum) >> 31;
  return {v.x ^ zero, v.y ^ zero, v.z ^ zero, v.w ^ zero};
}

// One of some vectors, in registers, where i is no constant.
template <int kVectors>
__device__ __forceinline__ uint4 any_of(const uint4 (&v)[kVectors], int i) {
  uint4 one = v[0];
#pragma unroll
  for (int j = 1; j < kVectors; ++j) one = i == j ? v[j] : one;
  return one;
}

// A thread's vectors of a row, in registers. What else may hold them has the same members.
template <class Team_, int kVectors_, class T>
class InRegisters {
 public:
  using Team = Team_;
  static constexpr int kVectors = kVectors_, kUnroll = kVectors;  // of loops over them
  __device__ __forceinline__ InRegisters(const T* row, int classes) {
    load_row<T, Team::kLanes >= kWarpSize>(v_, row, Team::lane(), Team::lanes(), classes, lowest_vector<T>());
  }
  __device__ __forceinline__ void wait() const {}  // until the vectors are there
  __device__ __forceinline__ uint4 operator[](int i) const { return v_[i]; }
  __device__ __forceinline__ uint4 any(int i) const { return any_of(v_, i); }
  template <int kSlot, class State>
  __device__ __forceinline__ State merge_warps(State state) const {
    return Team::template merge_warps<kSlot>(state);
  }
  // The vector once more, to be unpacked; `sum` as of hidden().
  __device__ __forceinline__ uint4 anew(int i, float sum) const { return hidden<T>(v_[i], sum); }

 private:
  uint4 v_[kVectors];
};

template <class Vectors, class T>
class HeldRow {
  using Team = typename Vectors::Team;
  static constexpr int kVectors = Vectors::kVectors;

 public:
  static constexpr int kElements = kPerVector<T>;

  __device__ __forceinline__ HeldRow(const RowPlace& place, int classes, const Vectors& vectors)
      : vectors_(vectors), place_(place), classes_(classes) {}

  __device__ __forceinline__ RowState state() {
    constexpr int kLanes = Team::kLanes < kWarpSize ? Team::kLanes : kWarpSize;
    vectors_.wait();
    float max = -INFINITY;
#pragma unroll Vectors::kUnroll
    for (int i = 0; i < kVectors; ++i) max = fmaxf(max, max_of<T>(vectors_[i]));
    RowState state;
    state.raise_max(lanes_max<kLanes>(max));
    float sum = 0;
    if (NearWeights::serve(state.max)) {
      const NearWeights weights(state.max);
      sum = weights.exact(sum_of([&](float x) { return weights(x); }));
    } else {
      sum = sum_of([&](float x) { return state.weight(x); });
    }
    state.add(lanes_sum<kLanes>(sum));
    state = vectors_.template merge_warps<0>(state);
    sum_ = state.sum;
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

  // The same, less `less` in one class.
  template <class Result, class F>
  __device__ __forceinline__ void write_less(const MutableView3& view, int64_t at, float less, const F& f) const {
    const int that = static_cast<int>(at);
    put<Result>(*this, view, [&](int c, const float (&x)[kElements], const float (&)[kElements], float (&z)[kElements]) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) z[e] = f(c + e, x[e]);
      if (c <= that && that < c + kElements) {  // not asked of every element
#pragma unroll
        for (int e = 0; e < kElements; ++e) z[e] -= c + e == that ? less : 0.0f;
      }
    });
  }

  // The same of f(class, element, the other row's element).
  template <int kSlot = 1, class F>
  __device__ __forceinline__ float sum_with(const HeldRow& other, const F& f) const {
    constexpr int kLanes = Team::kLanes < kWarpSize ? Team::kLanes : kWarpSize;
    vectors_.wait();
    float sum = 0;
    each_with(other, [&](int c, const float (&x)[kElements], const float (&y)[kElements]) {
      float part = 0;
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        if (c + e < classes_) part += f(c + e, x[e], y[e]);
      sum += part;
    });
    return vectors_.template merge_warps<kSlot>(Sum{lanes_sum<kLanes>(sum)}).value;
  }
  template <class Result, class F>
  __device__ __forceinline__ void write_with(const HeldRow& other, const MutableView3& view, const F& f) const {
    put<Result>(other, view, [&](int c, const float (&x)[kElements], const float (&y)[kElements], float (&z)[kElements]) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) z[e] = f(c + e, x[e], y[e]);
    });
  }

  // Whether this thread is the one that has, and writes, a class; and what that class has, for this thread.
  __device__ __forceinline__ bool owns(int64_t c) const {
    return place_.exists && (static_cast<int>(c) / kElements & (Team::lanes() - 1)) == Team::lane();
  }
  __device__ __forceinline__ float operator[](int64_t c) const {
    const int at = static_cast<int>(c);
    return element<T>(vectors_.any(at / kElements / Team::lanes()), at % kElements);
  }
  __device__ __forceinline__ const RowPlace& place() const { return place_; }
  __device__ __forceinline__ bool leads() const { return place_.exists && Team::lane() == 0; }
  __device__ __forceinline__ float count_nan() const {
    return sum<3>([](int, float x) { return x != x ? 1.0f : 0.0f; });
  }
  __device__ __forceinline__ bool together(bool reason) const { return reason; }

 private:
  __device__ __forceinline__ static int class_of(int i) { return (Team::lane() + i * Team::lanes()) * kElements; }
  template <class F>
  __device__ __forceinline__ float sum_of(const F& weight) const {
    float sum = 0;
#pragma unroll Vectors::kUnroll
    for (int i = 0; i < kVectors; ++i) {
      float x[kElements], part = 0;
      unpack<T>(vectors_[i], x);
#pragma unroll
      for (int e = 0; e < kElements; ++e) part += weight(x[e]);
      sum += part;
    }
    return sum;
  }
  template <class F>
  __device__ __forceinline__ void each_with(const HeldRow& other, const F& f) const {
#pragma unroll Vectors::kUnroll
    for (int i = 0; i < kVectors; ++i) with_vector(i, other, f);
  }
  // Writes z of f(class, elements, the other row's elements, z).
  template <class Result, class F>
  __device__ __forceinline__ void put(const HeldRow& other, const MutableView3& view, const F& f) const {
    Result* result = row_of<Result>(view, place_).data;
#pragma unroll Vectors::kUnroll
    for (int i = 0; i < kVectors; ++i) {
      float z[kElements] = {};
      with_vector(i, other, [&](int c, const float (&x)[kElements], const float (&y)[kElements]) { f(c, x, y, z); });
      store_vector<Team::kLanes >= kWarpSize>(result, class_of(i), classes_, z);
    }
  }
  template <class F>
  __device__ __forceinline__ void with_vector(int i, const HeldRow& other, const F& f) const {
    const int c = class_of(i);
    if (c < classes_) {
      float x[kElements], y[kElements];
      unpack<T>(vectors_.anew(i, sum_), x);
      unpack<T>(other.vectors_[i], y);
      f(c, x, y);
    }
  }

  Vectors vectors_;
  float sum_ = 0;
  RowPlace place_;
  int classes_;
};

// ---- which team

// Vectors of a row, all its tensors counted, that registers hold: of one that is read alone, and of one that is written too.
// Longer ones of those are in shared memory, where more of them are on their way at once than registers are.
constexpr int64_t kMostInRegisters = 2048, kMostInRegistersWritten = 512;

// Calls f.operator()<Team, vectors>() with the team that holds rows of so many vectors of each of kTensors tensors in
// registers; false if none does. The length alone decides, so that a row's result does not depend on how many rows there are.
template <int kTensors, int64_t kMost, class F>
bool visit_held(int64_t vectors, const F& f) {
  const int64_t all = vectors * kTensors;
  if (all > kMost) return false;
  if (all <= 16)
    f.template operator()<HeldTeam<8, 128>, 2 / kTensors>();
  else if (all <= 32)
    f.template operator()<HeldTeam<8, 128>, 4 / kTensors>();
  else if (all <= 64)
    f.template operator()<HeldTeam<16, 128>, 4 / kTensors>();
  else if (all <= 128)
    f.template operator()<HeldTeam<32, 128>, 4 / kTensors>();
  else if (all <= 256)
    f.template operator()<HeldTeam<64, 64>, 4 / kTensors>();
  else if (all <= kMostInRegistersWritten)
    f.template operator()<HeldTeam<128, 128>, 4 / kTensors>();
  else if constexpr (kMost > kMostInRegistersWritten) {
    if (all <= 1024)
      f.template operator()<HeldTeam<256, 256>, 4 / kTensors>();
    else
      f.template operator()<HeldTeam<512, 512>, 4 / kTensors>();
  }
  return true;
}

}  // namespace flash_online::cuda
