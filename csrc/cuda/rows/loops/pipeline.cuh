// A pipeline that streams contiguous rows through shared memory, chunk by chunk. While threads work on one chunk, bulk copies
// (cp.async.bulk, compute capability 9.0 and up) of the next ones are under way, also of the next row's, so that the memory
// stays busy while the end of a row is being computed.
//
// One thread, the producer, starts the copies (ChunkLoader). A stage has a full barrier, an mbarrier that counts the bytes that
// have arrived; the consumers wait for it and read the chunk into registers (PipelineChunk). The consumers synchronise before
// the producer refills a stage, so there are no empty barriers. A row that does not start at a multiple of 16 bytes is copied
// as aligned vectors and shifted when it is read.
//
// A row is one slice, or several if it is long. Slices are the units of work that CTAs or warps take in turn.
#pragma once

#include "../../hw/bulk_copy.cuh"
#include "row_vectors.cuh"

namespace flash_online::cuda {

// ---- slices

// A problem with rows cut into slices. All slices of a row but the last have one size, which depends only on the row's length.
struct SlicedProblem {
  RowProblem problem;
  int64_t classes_per_slice;
  unsigned slices_per_row;
  int64_t total_slices;
  bool is_countable() const { return total_slices <= 0x7fffffff; }  // the kernels count slices in 32 bits
};

// Cuts rows into slices of whole chunks: one slice for a row of up to `max_whole` chunks; else slices of at least `min_chunks`
// chunks, and at most `max_slices` of them.
inline SlicedProblem cut_into_slices(const RowProblem& problem, int64_t chunk, int64_t max_whole, int64_t min_chunks,
                                     int64_t max_slices) {
  const int64_t chunks = ceil_div(problem.classes, chunk);
  const bool whole = chunks <= max_whole;
  const int64_t slice = whole ? std::max<int64_t>(chunks, 1) : std::max(min_chunks, ceil_div(chunks, max_slices));
  const int64_t slices = whole ? 1 : ceil_div(chunks, slice), rows = problem.outer * problem.inner;
  return {problem, slice * chunk, static_cast<unsigned>(slices), rows * slices};
}

template <class T>
struct Slice {
  RowCoord coord;
  const T* data;
  int64_t first;  // the class of the row at which the slice begins
  int classes;
  __device__ __forceinline__ Slice(const SlicedProblem& sliced, unsigned index) {
    const RowProblem& problem = sliced.problem;
    const unsigned row = sliced.slices_per_row == 1 ? index : index / sliced.slices_per_row;
    first = int64_t{index - row * sliced.slices_per_row} * sliced.classes_per_slice;
    coord = row_coord(problem, row);
    data = row_of<const T>(problem.input, coord).data + first;
    classes = static_cast<int>(problem.classes - first < sliced.classes_per_slice ? problem.classes - first
                                                                                  : sliced.classes_per_slice);
  }
};

// ---- the pipeline

// kThreads consumers, a warp or a CTA, read kVectors vectors each from a chunk; kStages chunks are in shared memory.
template <class T_, int kThreads_, int kVectors_, int kStages_>
struct PipelineShape {
  using T = T_;
  static constexpr int kThreads = kThreads_, kVectors = kVectors_, kStages = kStages_, kElements = kPerVector<T>;
  static constexpr int kClasses = kThreads * kVectors * kElements;  // per chunk
  static constexpr int kStageVectors = kThreads * kVectors + 1;  // one more for a chunk that does not start at 16 bytes
  static constexpr int kBytes = kStages * kStageVectors * kVectorBytes;
};

// A chunk in its stage. Consumer thread t has the vectors t, t + kThreads, ...
template <class Shape>
struct PipelineChunk {
  using T = typename Shape::T;
  static constexpr int kVectors = Shape::kVectors, kElements = Shape::kElements;
  const uint4* stage;
  const T* data;  // the chunk in global memory
  int classes;  // from the chunk's first class to the end of the slice: may exceed the chunk

  __device__ __forceinline__ static int thread() { return threadIdx.x % Shape::kThreads; }
  __device__ __forceinline__ static int first_class_of(int i) { return (thread() + i * Shape::kThreads) * kElements; }
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
      for (int i = 0; i < kVectors; ++i) v[i] = first_class_of(i) < classes ? at[i * Shape::kThreads] : lowest_vector<T>();
    }
    if (skip != 0) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        if (first_class_of(i) < classes) v[i] = bytes_from(v[i], at[i * Shape::kThreads + 1], skip);
    }
    if (classes < Shape::kClasses && classes % kElements != 0) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int left = classes - first_class_of(i);
        if (left > 0 && left < kElements) v[i] = first_elements<T>(v[i], left, lowest_vector<T>());
      }
    }
  }
  // Vector i once more, for an i that is not a constant; only until the stage is refilled.
  __device__ __forceinline__ uint4 select(const uint4 (&v)[kVectors], int i) const {
    if constexpr (kHasBulkCopy)
      return read_again(i);
    else
      return select_vector(v, i);
  }

 private:
  __device__ __forceinline__ uint4 read_again(int i) const {
    const int c = first_class_of(i);
    if (c >= classes) return lowest_vector<T>();
    const uint4* at = stage + thread() + i * Shape::kThreads;
    const unsigned skip = misalignment(data);
    const uint4 v = skip == 0 ? at[0] : bytes_from(at[0], at[1], skip);
    return c + kElements <= classes ? v : first_elements<T>(v, classes - c, lowest_vector<T>());
  }
};

// The producer thread's state. It copies the slices first, first + step, ... chunk by chunk.
template <class Shape>
class ChunkLoader {
  using T = typename Shape::T;

 public:
  __device__ __forceinline__ ChunkLoader(const SlicedProblem& sliced, uint4* stages, uint64_t* full, unsigned first,
                                         unsigned step)
      : sliced_(sliced),
        stages_(stages),
        full_(full),
        next_(first),
        step_(step),
        end_(static_cast<unsigned>(sliced.total_slices)) {}
  // Once, before the barrier after which consumers wait for chunks.
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < Shape::kStages; ++stage) mbarrier_init(&full_[stage], 1);
    fence_barrier_init();
  }
  __device__ __forceinline__ void load_all_stages() {
    for (int stage = 0; stage < Shape::kStages; ++stage) load(stage);
  }
  // Starts the copy of the next chunk, if there is one; full[stage] counts its bytes.
  __device__ __forceinline__ void load(int stage) {
    if (left_ <= 0) {
      if (next_ >= end_) return;
      const Slice<T> slice(sliced_, next_);
      data_ = slice.data, left_ = slice.classes, next_ += step_;
    }
    const int classes = left_ < Shape::kClasses ? left_ : Shape::kClasses;
    const unsigned skip = misalignment(data_);
    // Written out: with round_up the compiler schedules the kernels differently.
    const unsigned bytes = (skip + classes * sizeof(T) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
    arrive_expect_tx(&full_[stage], bytes);
    bulk_load(stages_ + stage * Shape::kStageVectors, reinterpret_cast<const char*>(data_) - skip, bytes, &full_[stage]);
    data_ += Shape::kClasses, left_ -= Shape::kClasses;
  }

 private:
  const SlicedProblem& sliced_;
  uint4* stages_;
  uint64_t* full_;
  unsigned next_, step_, end_;  // slices
  const T* data_ = nullptr;  // the next chunk of the current slice
  int left_ = 0;  // classes of the current slice
};

}  // namespace flash_online::cuda
