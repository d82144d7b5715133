// Rows too long for registers, their classes side by side: held in shared memory, copied there past the registers, by a cluster
// of blocks, or a block alone where there are no clusters. Blocks are small, so that several rows are on a multiprocessor at
// once: while one is read another is written.
#pragma once

#include "../../hw/cp_async.cuh"
#include "register_row.cuh"

namespace flash_online::cuda {

// kThreads threads of each block of a cluster (if kCluster), kBlocks blocks on a multiprocessor. A thread holds kHeld vectors
// of a row, all its tensors counted.
template <int kThreads_, int kHeld_, int kBlocks_, bool kCluster_>
struct SharedTeam {
  static constexpr int kThreads = kThreads_, kLanes = kThreads_, kHeld = kHeld_, kBlocks = kBlocks_;
  static constexpr bool kCluster = kCluster_;
  static constexpr int kBlockVectors = kThreads * kHeld;
  static constexpr unsigned kSharedBytes = kBlockVectors * kVectorBytes;
  static constexpr int kSlots = 4;  // of merge_warps()

  __device__ __forceinline__ static int rank() { return kCluster ? cluster_rank() : 0; }
  __device__ __forceinline__ static int blocks() { return kCluster ? cluster_size() : 1; }
  __device__ __forceinline__ static int lane() { return rank() * kThreads + threadIdx.x; }
  __device__ __forceinline__ static int lanes() { return kThreads * blocks(); }

  // To be called by all threads: first; and once, before the first merge.
  __device__ __forceinline__ static void begin() {
    if constexpr (kCluster) {
      if (threadIdx.x == 0)
        for (int slot = 0; slot < kSlots; ++slot) open_mailbox(&mailboxes()[slot]);
      cluster_arrive_relaxed();
    }
  }
  __device__ __forceinline__ static void others_have_begun() {
    if constexpr (kCluster) cluster_wait();
  }

  // Joins what the lanes of each warp agree on. Each slot serves once.
  template <int kSlot, class State>
  __device__ __forceinline__ static State merge_warps(State state) {
    static_assert(kSlot < kSlots);
    constexpr int kWarps = kThreads / kWarpSize;
    __shared__ SharedStates<State, kWarps*(kCluster ? kLargestCluster : 1)> partial;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    if constexpr (kCluster) {
      uint64_t* mailbox = &mailboxes()[kSlot];
      if (threadIdx.x == 0) expect_messages(mailbox, kWarps * blocks() * static_cast<unsigned>(sizeof(State)));
      if (lane < blocks()) send_message(&partial[rank() * kWarps + warp], state, mailbox, lane);
      wait_for_messages(mailbox);
    } else {
      if (lane == 0) partial[warp] = state;
      __syncthreads();
    }
    State all{};
    for (int i = lane; i < kWarps * blocks(); i += kWarpSize) all.merge(partial[i]);
    return merge_lanes<kWarpSize>(all);
  }

 private:
  __device__ __forceinline__ static uint64_t* mailboxes() {
    __shared__ uint64_t barriers[kSlots];
    return barriers;
  }
};

// A thread's vectors of one of a row's kTensors tensors, in shared memory.
template <class Team_, int kTensors, class T>
class InShared {
 public:
  using Team = Team_;
  static constexpr int kVectors = Team::kHeld / kTensors, kUnroll = 4, kElements = kPerVector<T>;

  __device__ __forceinline__ InShared(const T* row, int classes, int tensor) {
    extern __shared__ __align__(128) uint4 all_shared[];
    slots_ = all_shared + tensor * kVectors * Team::kThreads + threadIdx.x;
    if (misalignment(row) == 0) {
#pragma unroll 4
      for (int i = 0; i < kVectors; ++i) {
        const int c = (Team::lane() + i * Team::lanes()) * kElements;
        if (c + kElements <= classes)
          cp_async(slot(i), row + c);
        else
          *slot(i) =
              c < classes ? first_elements<T>(load_streaming(row + c), classes - c, lowest_vector<T>()) : lowest_vector<T>();
      }
    } else {
      constexpr int kAtOnce = 4;
      static_assert(kVectors % kAtOnce == 0);
#pragma unroll 1
      for (int i = 0; i < kVectors; i += kAtOnce) {
        uint4 v[kAtOnce];
        load_row<T, true>(v, row, Team::lane() + i * Team::lanes(), Team::lanes(), classes, lowest_vector<T>());
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) *slot(i + j) = v[j];
      }
    }
  }
  __device__ __forceinline__ void wait() const {  // a thread reads what it copied itself: no barrier
    cp_async_commit();
    cp_async_wait();
  }
  __device__ __forceinline__ uint4 operator[](int i) const { return *slot(i); }
  __device__ __forceinline__ uint4 any(int i) const { return *slot(i); }
  __device__ __forceinline__ uint4 anew(int i, float) const { return *slot(i); }
  template <int kSlot, class State>
  __device__ __forceinline__ State merge_warps(State state) const {
    return Team::template merge_warps<kSlot>(state);
  }

 private:
  __device__ __forceinline__ uint4* slot(int i) const { return slots_ + i * Team::kThreads; }
  uint4* slots_;
};

template <class Op, class Team, class T>
struct SharedRows {
  static constexpr bool kSplit = false;
  const RowProblem& problem;
  RowPlace place;
  // The operator's tensors are read in their order.
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3& view) const {
    using Vectors = InShared<Team, Op::kTensors, T>;
    const int classes = static_cast<int>(problem.classes);
    const Vectors vectors(row_of<const T>(view, place).data, classes, kTensor);
    if constexpr (kTensor + 1 == Op::kTensors) Team::others_have_begun();
    return HeldRow<Vectors, T>(place, classes, vectors);
  }
};

template <class Op, class Team, class T, class R>
__global__ void __launch_bounds__(Team::kThreads, Team::kBlocks) shared_kernel(const __grid_constant__ RowProblem problem) {
  Team::begin();
  Op::template run<R>(problem, SharedRows<Op, Team, T>{problem, held_place(problem, blockIdx.x / Team::blocks())});
}

// Queues a kernel for all rows, each of which takes `cluster` blocks.
template <class Op, class Team, class T, class R>
void launch_shared_rows(const RowProblem& problem, int cluster, cudaStream_t stream) {
  static PersistentKernel kernel(shared_kernel<Op, Team, T, R>, Team::kThreads, Team::kSharedBytes);
  kernel.launch(problem, problem.outer * problem.inner, cluster, 1, stream);
}

// ---- which team

// Measured: the smaller the blocks, the better, and most of them in a cluster; but rows that a block holds at once need none.
using ShortTeam = SharedTeam<128, 8, 9, false>;
using MediumTeam = SharedTeam<256, 8, 5, false>;
using BlockAlone = SharedTeam<256, 16, 3, false>;
using SmallTeam = SharedTeam<256, 8, 5, true>;
using MiddleTeam = SharedTeam<256, 16, 3, true>;
using LargeTeam = SharedTeam<1024, 8, 1, true>;

inline bool has_large_team() {
  constexpr int kStatic = 20 << 10;  // shared memory beside the row, at most
  return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >= static_cast<int>(LargeTeam::kSharedBytes) + kStatic;
}

// How many vectors of a row can be held at most, all its tensors counted.
inline int64_t most_held_vectors(bool reduces) {
  if (reduces) return kMostInRegisters;
  if (largest_cluster() == 1) return BlockAlone::kBlockVectors;
  return (has_large_team() ? LargeTeam::kBlockVectors : MiddleTeam::kBlockVectors) * largest_cluster();
}

// Calls f.operator()<Team>(blocks a row) with the team for rows of so many vectors, all tensors counted, if there is one. Again
// the length alone decides.
template <class F>
void visit_shared(int64_t vectors, const F& f) {
  if (vectors <= kMostInRegistersWritten || vectors > most_held_vectors(false)) return;
  if (vectors <= ShortTeam::kBlockVectors) return f.template operator()<ShortTeam>(1);
  if (vectors <= MediumTeam::kBlockVectors) return f.template operator()<MediumTeam>(1);
  const int most = largest_cluster();
  if (most == 1) return f.template operator()<BlockAlone>(1);
  const auto cluster = [&](int block) {
    int size = 2;
    while (size < most && vectors > int64_t{size} * block) size *= 2;
    return size;
  };
  if (vectors <= SmallTeam::kBlockVectors * most)
    f.template operator()<SmallTeam>(cluster(SmallTeam::kBlockVectors));
  else if (vectors <= MiddleTeam::kBlockVectors * most)
    f.template operator()<MiddleTeam>(most);
  else
    f.template operator()<LargeTeam>(most);
}

}  // namespace flash_online::cuda
