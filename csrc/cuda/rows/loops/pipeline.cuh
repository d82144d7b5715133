// A pipeline that streams contiguous rows through shared memory, chunk by chunk. While threads work on one chunk, bulk copies
// (cp.async.bulk, compute capability 9.0 and up) of the next ones are under way, also of the next row's, so that the memory
// stays busy while the end of a row is being computed.
//
// One thread, the producer, starts the copies (ChunkLoader). A stage has a full barrier, an mbarrier that counts the bytes that
// have arrived; the consumers wait for it and read the chunk into registers (PipelineChunk). The consumers synchronise before
// the producer refills a stage, so there are no empty barriers. A row that does not start at a multiple of 16 bytes is copied
// as aligned vectors and shifted when it is read.
//
// A row is one piece, or several if it is long. Pieces are the units of work that CTAs or warps take in turn.
#pragma once

#include "../../hw/bulk_copy.cuh"
#include "row_vectors.cuh"

namespace flash_online::cuda {

// ---- pieces

// A problem with rows cut into pieces. All pieces of a row but the last have one size, which depends only on the row's length.
struct PiecedProblem {
  RowProblem problem;
  int64_t classes_per_piece;
  unsigned pieces_per_row;
  int64_t total_pieces;
  bool is_countable() const { return total_pieces <= 0x7fffffff; }  // the kernels count pieces in 32 bits
};

// Cuts rows into pieces of whole chunks: one piece for a row of up to `max_whole` chunks; else pieces of at least `min_chunks`
// chunks, and at most `max_pieces` of them.
inline PiecedProblem cut_into_pieces(const RowProblem& problem, int64_t chunk, int64_t max_whole, int64_t min_chunks,
                                     int64_t max_pieces) {
  const int64_t chunks = ceil_div(problem.classes, chunk);
  const bool whole = chunks <= max_whole;
  const int64_t piece = whole ? std::max<int64_t>(chunks, 1) : std::max(min_chunks, ceil_div(chunks, max_pieces));
  const int64_t pieces = whole ? 1 : ceil_div(chunks, piece), rows = problem.outer * problem.inner;
  return {problem, piece * chunk, static_cast<unsigned>(pieces), rows * pieces};
}

template <class T>
struct Piece {
  RowCoord coord;
  const T* data;
  int64_t first;  // the class of the row at which the piece begins
  int classes;
  __device__ __forceinline__ Piece(const PiecedProblem& pieced, unsigned index) {
    const RowProblem& problem = pieced.problem;
    const unsigned row = pieced.pieces_per_row == 1 ? index : index / pieced.pieces_per_row;
    first = int64_t{index - row * pieced.pieces_per_row} * pieced.classes_per_piece;
    coord = row_coord(problem, row);
    data = row_of<const T>(problem.input, coord).data + first;
    classes = static_cast<int>(problem.classes - first < pieced.classes_per_piece ? problem.classes - first
                                                                                  : pieced.classes_per_piece);
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
  int classes;  // from the chunk's first class to the end of the piece: may exceed the chunk

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

// The producer thread's state. It copies the pieces first, first + step, ... chunk by chunk.
template <class Shape>
class ChunkLoader {
  using T = typename Shape::T;

 public:
  __device__ __forceinline__ ChunkLoader(const PiecedProblem& pieced, uint4* stages, uint64_t* full, unsigned first,
                                         unsigned step)
      : pieced_(pieced),
        stages_(stages),
        full_(full),
        next_(first),
        step_(step),
        end_(static_cast<unsigned>(pieced.total_pieces)) {}
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
      const Piece<T> piece(pieced_, next_);
      data_ = piece.data, left_ = piece.classes, next_ += step_;
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
  const PiecedProblem& pieced_;
  uint4* stages_;
  uint64_t* full_;
  unsigned next_, step_, end_;  // pieces
  const T* data_ = nullptr;  // the next chunk of the current piece
  int left_ = 0;  // classes of the current piece
};

}  // namespace flash_online::cuda
