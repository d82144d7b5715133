// Contiguous rows in shared memory, for operators with results as long as the row, until the shared memory of the largest
// cluster is full (3 MiB per row on an H100). cp.async copies a row there without passing through registers. A row has one CTA,
// or a cluster of CTAs that exchange their maxima and sums; choice.h chooses their size.
#pragma once

#include "../../hw/cp_async.cuh"
#include "../choice.h"
#include "staged_vectors.cuh"

namespace flash_online::cuda {

// One CTA (kCluster false) or all CTAs of a cluster share a row. A CTA has kThreads threads; a thread has up to kMaxVectors
// vectors, of all tensors that the operator reads, and kCtasPerSm such CTAs are resident per SM. How many vectors a thread has
// follows from the row's length, and with it the shared memory of a CTA.
//
// CTAs of a cluster exchange states by messages (cluster.cuh): each warp stores its state into every CTA's shared memory, and
// an mbarrier there, called a mailbox, counts the bytes that have arrived. A mailbox and the memory it counts serve one merge.
template <int kThreads_, int kMaxVectors_, int kCtasPerSm_, bool kCluster_>
struct SharedRowGroup {
  static constexpr int kThreads = kThreads_, kMaxVectors = kMaxVectors_, kCtasPerSm = kCtasPerSm_;
  static constexpr bool kCluster = kCluster_;
  static constexpr int kLanesPerRow = kWarpSize;
  static constexpr int kSlots = 4;  // merges per kernel, at most

  __device__ __forceinline__ static int cta_in_row() { return kCluster ? cluster_rank() : 0; }
  __device__ __forceinline__ static int ctas_per_row() { return kCluster ? cluster_size() : 1; }
  __device__ __forceinline__ static int thread_in_row() { return cta_in_row() * kThreads + threadIdx.x; }
  __device__ __forceinline__ static int threads_per_row() { return kThreads * ctas_per_row(); }

  // All threads call init_mailboxes() first, and wait_for_cluster() once before the first merge: a message must not be sent to
  // a CTA that has not started. The loads of the row go between the two calls.
  __device__ __forceinline__ static void init_mailboxes() {
    if constexpr (kCluster) {
      if (threadIdx.x == 0)
        for (int slot = 0; slot < kSlots; ++slot) open_mailbox(&mailboxes()[slot]);
      cluster_arrive_relaxed();
    }
  }
  __device__ __forceinline__ static void wait_for_cluster() {
    if constexpr (kCluster) cluster_wait();
  }

  // Merges the warps' states over the row; all lanes of a warp already have the same state. Each kSlot can be used once.
  template <int kSlot, class State>
  __device__ __forceinline__ static State merge_warps(State state) {
    static_assert(kSlot < kSlots);
    constexpr int kWarps = kThreads / kWarpSize;
    __shared__ SharedStates<State, kWarps*(kCluster ? kLargestCluster : 1)> partial;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    if constexpr (kCluster) {
      uint64_t* mailbox = &mailboxes()[kSlot];
      if (threadIdx.x == 0) expect_messages(mailbox, kWarps * ctas_per_row() * static_cast<unsigned>(sizeof(State)));
      if (lane < ctas_per_row()) send_message(&partial[cta_in_row() * kWarps + warp], state, mailbox, lane);
      wait_for_messages(mailbox);
    } else {
      if (lane == 0) partial[warp] = state;
      __syncthreads();
    }
    State all{};
    for (int i = lane; i < kWarps * ctas_per_row(); i += kWarpSize) all.merge(partial[i]);
    return merge_lanes<kWarpSize>(all);
  }

 private:
  __device__ __forceinline__ static uint64_t* mailboxes() {
    __shared__ uint64_t barriers[kSlots];
    return barriers;
  }
};

// A problem with rows in shared memory; vectors of one tensor per thread.
struct SharedRowProblem {
  RowProblem problem;
  int vectors;
};

// A thread's vectors of one of the operator's kTensors tensors, in shared memory, of rows of a whole number of vectors.
// RegisterVectors (register_row.cuh) has the same members.
template <class Group_, int kTensors, class T>
class SharedVectors {
 public:
  using Group = Group_;
  static constexpr int kElements = kPerVector<T>, kUnroll = sizeof(T) == 2 ? 2 : 4;

  __device__ __forceinline__ SharedVectors(const T* row, int classes, int tensor, int vectors) : vectors_(vectors) {
    extern __shared__ __align__(128) uint4 all_shared[];
    slots_ = all_shared + tensor * vectors * Group::kThreads + threadIdx.x;
    if (misalignment(row) == 0) {
#pragma unroll 4
      for (int i = 0; i < count(); ++i) {
        if (!has(i)) break;
        const int c = classes_of(i).first;
        if (c < classes)
          cp_async(slot(i), row + c);
        else
          *slot(i) = lowest_vector<T>();
      }
    } else {
      constexpr int kAtOnce = 4;
#pragma unroll 1
      for (int i = 0; i < vectors; i += kAtOnce) {
        uint4 v[kAtOnce];
        load_row<T, true>(v, row, Group::thread_in_row() + i * Group::threads_per_row(), Group::threads_per_row(), classes,
                          lowest_vector<T>());
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          if (has(i + j)) *slot(i + j) = v[j];
      }
    }
  }
  __device__ __forceinline__ void wait() const {  // no barrier: a thread reads only what it copied itself
    cp_async_commit();
    cp_async_wait();
  }
  __device__ __forceinline__ static constexpr int count() { return Group::kMaxVectors / kTensors; }
  __device__ __forceinline__ bool has(int i) const { return i < vectors_; }
  __device__ __forceinline__ uint4 operator[](int i) const { return *slot(i); }
  __device__ __forceinline__ NeighborClasses<kElements> classes_of(int i) const {
    return {(Group::thread_in_row() + i * Group::threads_per_row()) * kElements};
  }
  __device__ __forceinline__ bool owns(int c) const {
    return (c / kElements & (Group::threads_per_row() - 1)) == Group::thread_in_row();
  }
  __device__ __forceinline__ float element_of(int c) const {
    return element<T>(*slot(c / kElements / Group::threads_per_row()), c % kElements);
  }
  template <class Result, class F>
  __device__ __forceinline__ void visit_writer(const MutableView3& view, const RowCoord& coord, int classes, const F& f) const {
    visit_row_writer<Result, kElements, true>(row_of<Result>(view, coord).data, classes, f);
  }
  __device__ __forceinline__ uint4 reload(int i, float) const { return *slot(i); }
  template <int kSlot, class State>
  __device__ __forceinline__ State merge_warps(State state) const {
    return Group::template merge_warps<kSlot>(state);
  }

 private:
  __device__ __forceinline__ uint4* slot(int i) const { return slots_ + i * Group::kThreads; }
  uint4* slots_;
  int vectors_;
};

template <class Group, int kTensors, class T>
using SharedRow = OnChipRow<SharedVectors<Group, kTensors, T>, T>;

// The reader that gives an operator its rows (dispatch.cuh). It must read its tensors in the order of their numbers.
template <class Op, class Group, class T>
struct SharedRowReader {
  using Element = T;
  static constexpr bool kMultiCta = false;
  const RowProblem& problem;
  RowCoord coord;
  int vectors;
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3& view) const {
    const int classes = static_cast<int>(problem.classes);
    const SharedVectors<Group, Op::kTensors, T> row(row_of<const T>(view, coord).data, classes, kTensor, vectors);
    if constexpr (kTensor + 1 == Op::kTensors) Group::wait_for_cluster();
    return SharedRow<Group, Op::kTensors, T>(coord, classes, row);
  }
};

template <class Op, class Group, class T, class R>
__global__ void __launch_bounds__(Group::kThreads, Group::kCtasPerSm)
    shared_kernel(const __grid_constant__ SharedRowProblem shared) {
  launch_dependents();
  Group::init_mailboxes();
  grid_dependency_wait();
  const RowProblem& problem = shared.problem;
  const RowCoord coord = row_coord(problem, blockIdx.x / Group::ctas_per_row());
  Op::template run<R>(problem, SharedRowReader<Op, Group, T>{problem, coord, shared.vectors});
}

// ---- rows that are not a whole number of vectors

// Where a thread's elements of such a row are (see StagedVectors): segment i of a CTA has kThreads vectors, and the CTAs of a
// cluster take segments in turn.
template <class Group_, int kTensors>
struct SharedSegments {
  using Group = Group_;
  static constexpr int kThreads = Group::kThreads, kUnroll = 4;
  static constexpr int kSegmentWords = kThreads * kWordsPerVector;
  static constexpr int kPitch = 4 * kSegmentWords + 2 * kVectorBytes;  // a segment may begin late, and end as late
  static constexpr bool kStagesOtherSizes = false;
  uint64_t* full;
  __device__ __forceinline__ static constexpr int count() { return Group::kMaxVectors / kTensors; }
  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ static int first_word(int i) {
    return (i * Group::ctas_per_row() + Group::cta_in_row()) * kSegmentWords;
  }
  __device__ __forceinline__ static int offset(int i) { return i * kPitch; }
  __device__ __forceinline__ static int offset_of(int word) {
    return offset(word / kSegmentWords / Group::ctas_per_row()) + word % kSegmentWords * 4;
  }
  __device__ __forceinline__ static bool has(int word) {
    return word / kSegmentWords % Group::ctas_per_row() == Group::cta_in_row();
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (kHasBulkCopy) cuda::wait(full, 0);
  }
  template <int kSlot, class State>
  __device__ __forceinline__ static State merge_warps(State state) {
    return Group::template merge_warps<kSlot>(state);
  }
  // Segment i of a row at `row`, which begins in shared memory at `shared`; without bytes beyond the row's end.
  template <class T>
  __device__ __forceinline__ static Run<T> segment(T* row, char* shared, int classes, int i) {
    const int first = first_word(i) * 4, left = classes * static_cast<int>(sizeof(T)) - first;
    return {row + first / static_cast<int>(sizeof(T)), shared + offset(i),
            static_cast<unsigned>(left < 0                   ? 0
                                  : left < 4 * kSegmentWords ? left
                                                             : 4 * kSegmentWords)};
  }
};

template <class Op, class Group, class T, Deal kDeal>
struct StagedRowReader {
  using Element = T;
  using Segments = SharedSegments<Group, Op::kTensors>;
  static constexpr bool kMultiCta = false;
  const RowProblem& problem;
  RowCoord coord;
  int vectors;
  char* shared;
  uint64_t* full;
  bool results_here;

  template <int kTensor = 0>
  __device__ __forceinline__ const T* row() const {
    return row_of<const T>(Op::tensor(problem, kTensor), coord).data;
  }
  // The start of tensor kTensor's row in shared memory.
  template <int kTensor = 0>
  __device__ __forceinline__ char* staged() const {
    return shared + kTensor * vectors * Segments::kPitch + misalignment(row<kTensor>());
  }
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3&) const {
    using Vectors = StagedVectors<Segments, T, kDeal, false>;
    const int classes = static_cast<int>(problem.classes);
    if constexpr (kTensor + 1 == Op::kTensors) Group::wait_for_cluster();
    const MutableView3* const of_result = results_here ? &Op::result(problem) : nullptr;
    return OnChipRow<Vectors, T>(coord, classes, Vectors({full}, staged<kTensor>(), classes, classes, of_result, staged<0>()));
  }
  template <int kTensor, class F>
  __device__ __forceinline__ void for_each_segment(const F& f) const {
    for (int i = 0; i < vectors; ++i) {
      const Run<const T> run = Segments::segment(row<kTensor>(), staged<kTensor>(), static_cast<int>(problem.classes), i);
      if (run.bytes != 0) f(run);
    }
  }
  // The first thread starts the copies of all tensors, or all threads copy.
  __device__ __forceinline__ void load() const {
    if constexpr (kHasBulkCopy) {
      if (threadIdx.x != 0) return;
      mbarrier_init(full, 1);
      fence_barrier_init();
      unsigned bytes = 0;
      const auto start = [&](const Run<const T>& run) { bytes += run.load(full); };
      for_each_segment<0>(start);
      if constexpr (Op::kTensors == 2) for_each_segment<1>(start);
      arrive_expect_tx(full, bytes);
    } else {
      const auto copy = [&](const Run<const T>& run) { run.load_by_threads(threadIdx.x, Group::kThreads); };
      for_each_segment<0>(copy);
      if constexpr (Op::kTensors == 2) for_each_segment<1>(copy);
      cp_async_commit();
      cp_async_wait();
    }
  }
};

template <class Op, class Group, class T, class R, Deal kDeal>
__global__ void __launch_bounds__(Group::kThreads, Group::kCtasPerSm)
    staged_kernel(const __grid_constant__ SharedRowProblem shared_problem) {
  using Segments = SharedSegments<Group, Op::kTensors>;
  const RowProblem& problem = shared_problem.problem;
  extern __shared__ __align__(128) uint4 all_shared[];
  __shared__ uint64_t full;
  launch_dependents();
  Group::init_mailboxes();
  grid_dependency_wait();
  const RowCoord coord = row_coord(problem, blockIdx.x / Group::ctas_per_row());
  R* const result = row_of<R>(Op::result(problem), coord).data;
  StagedRowReader<Op, Group, T, kDeal> reader{problem, coord, shared_problem.vectors, reinterpret_cast<char*>(all_shared),
                                              &full,   false};
  // Words of 4-byte elements go to global memory as they are computed: a cluster's CTAs need not wait for their results then.
  constexpr bool kStagesResults = sizeof(T) == 2 || !Group::kCluster;
  reader.results_here = kStagesResults && sizeof(R) == sizeof(T) && misalignment(result) == misalignment(reader.row());
  reader.load();
  __syncthreads();
  Op::template run<R>(problem, reader);
  if (!reader.results_here) return;
  if constexpr (kHasBulkCopy) fence_async_proxy();
  __syncthreads();
  const auto segment = [&](int i) { return Segments::segment(result, reader.staged(), static_cast<int>(problem.classes), i); };
  if constexpr (kHasBulkCopy) {
    if (threadIdx.x < reader.vectors) {
      segment(threadIdx.x).store();
      tma_store_commit();
      tma_store_wait_read();
    }
  } else {
    for (int i = 0; i < reader.vectors; ++i) segment(i).template store_by_threads<false>(threadIdx.x, Group::kThreads);
  }
}

// True if words of a tensor's rows may lie off a multiple of 4 bytes.
template <class T>
bool has_odd_words(const RowProblem& problem, const ConstView3& view) {
  return (reinterpret_cast<uintptr_t>(view.data) |
          (problem.outer > 1 ? static_cast<uintptr_t>(view.stride[0]) * sizeof(T) : 0) |
          (problem.inner > 1 ? static_cast<uintptr_t>(view.stride[2]) * sizeof(T) : 0)) %
             4 !=
         0;
}

// Launches one CTA, or one cluster of `cluster` CTAs, per row. A thread has `vectors` vectors of each tensor.
template <class Op, class Group, class T, class R>
void launch_shared_rows(const RowProblem& problem, int cluster, int vectors, cudaStream_t stream) {
  const SharedRowProblem shared{problem, vectors};
  const int64_t ctas = problem.outer * problem.inner * cluster;
  const auto launch_as = [&]<auto kKernel>(int segment_bytes) {
    launch<kKernel>(shared, ctas, Group::kThreads, vectors * Op::kTensors * segment_bytes, stream, true, cluster);
  };
  if (is_whole(sizeof(T), problem.classes))
    return launch_as.template operator()<shared_kernel<Op, Group, T, R>>(Group::kThreads * kVectorBytes);
  if constexpr (sizeof(T) == 2) {
    bool odd_words = false;
    for (int i = 0; i < Op::kTensors; ++i) odd_words |= has_odd_words<T>(problem, Op::tensor(problem, i));
    if (odd_words)
      return launch_as.template operator()<staged_kernel<Op, Group, T, R, Deal::kOddWords>>(
          SharedSegments<Group, Op::kTensors>::kPitch);
  }
  launch_as.template operator()<staged_kernel<Op, Group, T, R, Deal::kWords>>(SharedSegments<Group, Op::kTensors>::kPitch);
}

}  // namespace flash_online::cuda
