// Rows too long for registers, their classes side by side: held in shared memory, by a block alone or by a cluster, which takes
// several rows, one after the other. A vector that was used for the last time makes room for one of the next row, so that
// reading goes on while results are written, and few rows wait for a cluster to find its places.
#pragma once

#include "../hw/async_copy.cuh"
#include "held_row.cuh"

namespace flash_online::cuda {

// kThreads threads of each block of a cluster (if kCluster), kBlocks blocks on a multiprocessor. A thread holds kHeld vectors
// of a row, all its tensors counted.
template <int kThreads_, int kHeld_, int kBlocks_, bool kCluster_>
struct PipedTeam {
  static constexpr int kThreads = kThreads_, kLanes = kThreads_, kHeld = kHeld_, kBlocks = kBlocks_;
  static constexpr bool kCluster = kCluster_;
  static constexpr int kBlockVectors = kThreads * kHeld;
  static constexpr unsigned kSharedBytes = kBlockVectors * kVectorBytes;

  __device__ __forceinline__ static int rank() { return kCluster ? cluster_rank() : 0; }
  __device__ __forceinline__ static int blocks() { return kCluster ? cluster_size() : 1; }
  __device__ __forceinline__ static int lane() { return rank() * kThreads + threadIdx.x; }
  __device__ __forceinline__ static int lanes() { return kThreads * blocks(); }

  // To be called by all threads: first; and before anything is written into another block.
  __device__ __forceinline__ static void begin() {
    if constexpr (kCluster) cluster_arrive();
  }
  __device__ __forceinline__ static void others_have_begun() {
    if constexpr (kCluster) cluster_wait();
  }

  // `odd`: of the row's number in the block. Who is still reading one row's results has not arrived for the next one's yet, so
  // that those of the row after may take the same place.
  template <int kSlot, class State>
  __device__ __forceinline__ static State merge_warps(State state, int odd) {
    constexpr int kWarps = kThreads / kWarp, kAll = kWarps * (kCluster ? kLargestCluster : 1);
    __shared__ SharedStates<State, 2 * kAll> both;
    State* partial = &both[odd * kAll];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    if constexpr (kCluster) {
      if (lane < blocks()) *in_block(&partial[rank() * kWarps + warp], lane) = state;
      cluster_arrive();
      cluster_wait();
    } else {
      if (lane == 0) partial[warp] = state;
      __syncthreads();
    }
    State all{};
    for (int i = lane; i < kWarps * blocks(); i += kWarp) all.merge(partial[i]);
    return merge_lanes<kWarp>(all);
  }
};

// A thread's vectors of the rows that its block, or cluster, works on. Op: see dispatch.cuh.
template <class Op, class Team_, class T>
class Pipe {
 public:
  using Team = Team_;
  static constexpr int kTensors = Op::kTensors, kVectors = Team::kHeld / kTensors, kElements = kPerVector<T>;

  __device__ __forceinline__ explicit Pipe(const RowProblem& problem)
      : problem_(problem), classes_(static_cast<int>(problem.classes)), number_(blockIdx.x / Team::blocks()) {
    extern __shared__ __align__(128) uint4 all_shared[];
    slots_ = all_shared + threadIdx.x;
    next_ = source(number_);
#pragma unroll 4
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
      for (int t = 0; t < kTensors; ++t) release(i, t);
    begin();
    Team::others_have_begun();
  }

  __device__ __forceinline__ bool has_row() const { return number_ < problem_.outer * problem_.inner; }
  __device__ __forceinline__ void next() {
    odd_ ^= 1;
    number_ += step();
    begin();
  }

  __device__ __forceinline__ RowPlace place() const { return held_place(problem_, number_); }
  __device__ __forceinline__ int classes() const { return classes_; }
  __device__ __forceinline__ int odd() const { return odd_; }
  __device__ __forceinline__ void wait() const {  // a thread reads what it copied itself: no barrier
    commit_copies();
    wait_for_copies();
  }
  __device__ __forceinline__ uint4 held(int i, int tensor) const { return *slot(i, tensor); }
  // The next row's vector may take the place of this one's.
  __device__ __forceinline__ void release(int i, int tensor) const {
    if (!next_.ahead) return;
    const int c = (Team::lane() + i * Team::lanes()) * kElements;
    const T* at = next_.row[tensor] + c;
    uint4* to = slot(i, tensor);
    if (c + kElements <= classes_)
      copy_async(to, at);
    else
      *to = c < classes_ ? first_elements<T>(load_streaming(at), classes_ - c, lowest_vector<T>()) : lowest_vector<T>();
  }

 private:
  struct Source {
    const T* row[kTensors];
    bool ahead;  // whether it can be copied ahead of its time: if it exists and is aligned
  };
  __device__ __forceinline__ Source source(int64_t number) const {
    const RowPlace place = held_place(problem_, number);
    Source source;
    source.ahead = place.exists;
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      source.row[t] = row_of<const T>(Op::tensor(problem_, t), place).data;
      source.ahead &= misalignment(source.row[t]) == 0;
    }
    return source;
  }
  __device__ __forceinline__ static int64_t step() { return gridDim.x / Team::blocks(); }

  __device__ __forceinline__ uint4* slot(int i, int tensor) const { return slots_ + (i * kTensors + tensor) * Team::kThreads; }
  // A row's turn has come: next_ is it. If it starts off 16 bytes it is read now, and passes by the registers.
  __device__ __forceinline__ void begin() {
    if (has_row() && !next_.ahead) {
      constexpr int kAtOnce = 4;
#pragma unroll
      for (int t = 0; t < kTensors; ++t)
#pragma unroll 1
        for (int i = 0; i < kVectors; i += kAtOnce) {
          uint4 v[kAtOnce];
          load_row<T>(v, next_.row[t], Team::lane() + i * Team::lanes(), Team::lanes(), classes_, lowest_vector<T>());
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) *slot(i + j, t) = v[j];
        }
    }
    next_ = source(number_ + step());
  }

  const RowProblem& problem_;
  int classes_, odd_ = 0;
  int64_t number_;
  uint4* slots_;
  Source next_;
};

// What HeldRow asks of a thread's vectors.
template <class Pipe>
class OnPipe {
 public:
  using Team = typename Pipe::Team;
  static constexpr int kVectors = Pipe::kVectors, kUnroll = 4;
  __device__ __forceinline__ OnPipe(Pipe& pipe, int tensor) : pipe_(pipe), tensor_(tensor) {}
  __device__ __forceinline__ void wait() const { pipe_.wait(); }
  __device__ __forceinline__ void release(int i) const { pipe_.release(i, tensor_); }
  __device__ __forceinline__ uint4 operator[](int i) const { return pipe_.held(i, tensor_); }
  __device__ __forceinline__ uint4 any(int i) const { return pipe_.held(i, tensor_); }
  __device__ __forceinline__ uint4 anew(int i, float) const { return pipe_.held(i, tensor_); }
  template <int kSlot, class State>
  __device__ __forceinline__ State merge_warps(State state) const {
    return Team::template merge_warps<kSlot>(state, pipe_.odd());
  }

 private:
  Pipe& pipe_;
  int tensor_;
};

template <class Pipe, class T>
struct PipedRows {
  static constexpr bool kSplit = false;
  Pipe& pipe;
  RowPlace place;
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3&) const {
    return HeldRow<OnPipe<Pipe>, T>(place, pipe.classes(), OnPipe<Pipe>(pipe, kTensor));
  }
};

template <class Op, class Team, class T, class R>
__global__ void __launch_bounds__(Team::kThreads, Team::kBlocks) piped_kernel(const __grid_constant__ RowProblem problem) {
  Team::begin();
  using Rows = Pipe<Op, Team, T>;
  for (Rows pipe(problem); pipe.has_row(); pipe.next()) Op::template run<R>(problem, PipedRows<Rows, T>{pipe, pipe.place()});
}

// Queues a kernel for all rows, each of which takes `cluster` blocks; a cluster gets at most `rows` of them.
template <class Op, class Team, class T, class R>
void launch_piped(const RowProblem& problem, int cluster, int64_t rows, cudaStream_t stream) {
  static StayingKernel kernel(piped_kernel<Op, Team, T, R>, Team::kThreads, Team::kSharedBytes);
  kernel.launch(problem, problem.outer * problem.inner, cluster, rows, stream);
}

// ---- which team

// Measured: a block alone is ahead of a cluster as long as it can be, and where all of a multiprocessor's memory is needed for
// that, better for one row than for several. In clusters more threads pay where they have registers enough, which they have for
// the sums and products of two tensors and not for the exponentials of one.
using BlockAlone = PipedTeam<512, 8, 3, false>;
template <int kTensors>
using SmallTeam = std::conditional_t<kTensors == 1, PipedTeam<256, 16, 3, true>, PipedTeam<512, 8, 3, true>>;
template <bool kCluster>
using LargeTeam = PipedTeam<1024, 8, 1, kCluster>;

constexpr int64_t kSmallVectors = BlockAlone::kBlockVectors, kLargeVectors = LargeTeam<true>::kBlockVectors;  // of a block
static_assert(SmallTeam<1>::kBlockVectors == kSmallVectors && SmallTeam<2>::kBlockVectors == kSmallVectors);

inline bool has_large_team() {
  constexpr int kStatic = 16 << 10;  // shared memory beside the row, at most
  return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >=
         static_cast<int>(LargeTeam<true>::kSharedBytes) + kStatic;
}

// How many vectors of a row can be held at most, all its tensors counted.
inline int64_t most_held_vectors(bool reduces) {
  return reduces ? kMostInRegisters : (has_large_team() ? kLargeVectors : kSmallVectors) * largest_cluster();
}

// Calls f.operator()<Team>(blocks a row, rows for a cluster at most) with the team for rows of so many vectors of each of
// kTensors tensors, if there is one. Again the length alone decides.
template <int kTensors, class F>
void visit_piped(int64_t vectors, const F& f) {
  const int64_t all = vectors * kTensors;
  if (all <= kMostInRegisters || all > most_held_vectors(false)) return;
  if (all <= kSmallVectors) return f.template operator()<BlockAlone>(1, 1);
  if (all <= kLargeVectors && has_large_team()) return f.template operator()<LargeTeam<false>>(1, 1);
  int cluster = 2;
  while (cluster < largest_cluster() && all > cluster * kSmallVectors) cluster *= 2;
  if (all <= cluster * kSmallVectors)
    f.template operator()<SmallTeam<kTensors>>(cluster, cluster < kLargestCluster ? 2 : 4);
  else
    f.template operator()<LargeTeam<true>>(cluster, 4);
}

}  // namespace flash_online::cuda
