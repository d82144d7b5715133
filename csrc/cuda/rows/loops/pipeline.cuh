// Rows that pass through a ring in shared memory, chunk by chunk: while some threads work on one, the next ones are on their
// way, those of the next row too, so that the memory never waits for who is busy with the end of a row. One thread has the copy
// engine fill it. A row that starts off a multiple of 16 bytes comes as aligned vectors, and is shifted where it is read.
#pragma once

#include "../../hw/bulk_copy.cuh"
#include "register_row.cuh"

namespace flash_online::cuda {

// Rows cut into pieces, all but the last one of a row of one size, that follows from the row's length alone.
struct PiecedRows {
  RowProblem problem;
  int64_t piece_classes;
  unsigned pieces;  // of a row
  int64_t all_pieces;
  bool countable() const { return all_pieces <= 0x7fffffff; }  // which the kernels need
};

// Pieces of chunks of so many classes: a row of up to `whole` chunks is one; of a longer one they have at least `least` chunks,
// and there are at most `most`.
inline PiecedRows pieced(const RowProblem& problem, int64_t chunk, int64_t whole, int64_t least, int64_t most) {
  const int64_t chunks = (problem.classes + chunk - 1) / chunk;
  const int64_t piece = chunks <= whole ? std::max<int64_t>(chunks, 1) : std::max(least, (chunks + most - 1) / most);
  const int64_t pieces = chunks <= whole ? 1 : (chunks + piece - 1) / piece, rows = problem.outer * problem.inner;
  return {problem, piece * chunk, static_cast<unsigned>(pieces), rows * pieces};
}

template <class T>
struct Piece {
  RowPlace place;
  const T* data;
  int64_t first;  // class
  int classes;
  __device__ __forceinline__ Piece(const PiecedRows& rows, unsigned number) {
    const RowProblem& problem = rows.problem;
    const unsigned row = rows.pieces == 1 ? number : number / rows.pieces;
    first = int64_t{number - row * rows.pieces} * rows.piece_classes;
    place = held_place(problem, row);
    data = row_of<const T>(problem.input, place).data + first;
    classes = static_cast<int>(problem.classes - first < rows.piece_classes ? problem.classes - first : rows.piece_classes);
  }
};

// A ring of kThreads threads, a warp or a block, with kVectors vectors of a chunk each.
template <class T_, int kThreads_, int kVectors_, int kStages_>
struct RingShape {
  using T = T_;
  static constexpr int kThreads = kThreads_, kVectors = kVectors_, kStages = kStages_, kElements = kPerVector<T>;
  static constexpr int kClasses = kThreads * kVectors * kElements;  // of a chunk
  static constexpr int kStageVectors = kThreads * kVectors + 1;  // a chunk off a multiple of 16 bytes
  static constexpr int kBytes = kStages * kStageVectors * kVectorBytes;
};

// A thread's vectors of a chunk: the ones of numbers t, t + kThreads, ...
template <class Shape>
struct RingChunk {
  using T = typename Shape::T;
  static constexpr int kVectors = Shape::kVectors, kElements = Shape::kElements;
  const uint4* stage;
  const T* data;
  int classes;  // from here on; those behind the chunk may count

  __device__ __forceinline__ static int thread() { return threadIdx.x % Shape::kThreads; }
  __device__ __forceinline__ static int first_of(int i) { return (thread() + i * Shape::kThreads) * kElements; }
  __device__ __forceinline__ void read(uint4 (&v)[kVectors]) const {
    if constexpr (!kHasBulkCopy) {
      load_row<T, true>(v, data, thread(), Shape::kThreads, classes, lowest_vector<T>());
      return;
    }
    const uint4* at = stage + thread();
    const unsigned skip = misalignment(data);
    if (classes >= Shape::kClasses) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) v[i] = at[i * Shape::kThreads];
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) v[i] = first_of(i) < classes ? at[i * Shape::kThreads] : lowest_vector<T>();
    }
    if (skip != 0) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        if (first_of(i) < classes) v[i] = bytes_from(v[i], at[i * Shape::kThreads + 1], skip);
    }
    if (classes < Shape::kClasses && classes % kElements != 0) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int left = classes - first_of(i);
        if (left > 0 && left < kElements) v[i] = first_elements<T>(v[i], left, lowest_vector<T>());
      }
    }
  }
  // One of them again, as long as the stage is not filled anew.
  __device__ __forceinline__ uint4 any(const uint4 (&v)[kVectors], int i) const {
    if constexpr (kHasBulkCopy)
      return staged(i);
    else
      return any_of(v, i);
  }

 private:
  __device__ __forceinline__ uint4 staged(int i) const {
    const int c = first_of(i);
    if (c >= classes) return lowest_vector<T>();
    const uint4* at = stage + thread() + i * Shape::kThreads;
    const unsigned skip = misalignment(data);
    const uint4 v = skip == 0 ? at[0] : bytes_from(at[0], at[1], skip);
    return c + kElements <= classes ? v : first_elements<T>(v, classes - c, lowest_vector<T>());
  }
};

// What the ring's filling thread knows: how far it is. Of all pieces every `step`-th is taken.
template <class Shape>
class RingLoader {
  using T = typename Shape::T;

 public:
  __device__ __forceinline__ RingLoader(const PiecedRows& rows, uint4* stages, uint64_t* full, unsigned first, unsigned step)
      : rows_(rows), stages_(stages), full_(full), next_(first), step_(step), end_(static_cast<unsigned>(rows.all_pieces)) {}
  // Once, before the ring's threads wait for a chunk.
  __device__ __forceinline__ void begin() const {
    for (int stage = 0; stage < Shape::kStages; ++stage) mbarrier_init(&full_[stage], 1);
    fence_barrier_init();
  }
  __device__ __forceinline__ void fill() {
    for (int stage = 0; stage < Shape::kStages; ++stage) load(stage);
  }
  // Has the next chunk copied, if there is one. Its bytes count on full[stage].
  __device__ __forceinline__ void load(int stage) {
    if (left_ <= 0) {
      if (next_ >= end_) return;
      const Piece<T> piece(rows_, next_);
      data_ = piece.data, left_ = piece.classes, next_ += step_;
    }
    const int classes = left_ < Shape::kClasses ? left_ : Shape::kClasses;
    const unsigned skip = misalignment(data_);
    const unsigned bytes = (skip + classes * sizeof(T) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
    arrive_expect_tx(&full_[stage], bytes);
    bulk_load(stages_ + stage * Shape::kStageVectors, reinterpret_cast<const char*>(data_) - skip, bytes, &full_[stage]);
    data_ += Shape::kClasses, left_ -= Shape::kClasses;
  }

 private:
  const PiecedRows& rows_;
  uint4* stages_;
  uint64_t* full_;
  unsigned next_, step_, end_;
  const T* data_ = nullptr;
  int left_ = 0;
};

// The sum of f(element) over some vectors.
template <class T, int kVectors, class F>
__device__ __forceinline__ float sum_of(const uint4 (&v)[kVectors], const F& f) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float x[kPerVector<T>], part = 0;
    unpack<T>(v[i], x);
#pragma unroll
    for (int e = 0; e < kPerVector<T>; ++e) part += f(x[e]);
    sum += part;
  }
  return sum;
}

// Adds the weights of some vectors' elements to a state that knows their maximum, or nearly.
template <class T, int kVectors>
__device__ __forceinline__ void add_weights(RowState& state, const uint4 (&v)[kVectors]) {
  if (NearWeights::serve(state.max)) {
    const NearWeights weights(state.max);
    state.add(weights.exact(sum_of<T>(v, [&](float x) { return weights(x); })));
  } else {
    state.add(sum_of<T>(v, [&](float x) { return state.weight(x); }));
  }
}

}  // namespace flash_online::cuda
