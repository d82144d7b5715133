// Contiguous rows in shared memory, for operators whose results are as long as the row: 513 vectors and more, until the shared
// memory of the largest cluster is full (2 MiB per row on an H100). cp.async copies a row there without passing through
// registers. A row has one CTA, or a cluster of CTAs that exchange their maxima and sums.
//
// CTAs are small, so that an SM holds several rows at a time: while one is read, another is written. visit_shared_group at the
// end of this file chooses the size.
#pragma once

#include "../../hw/cp_async.cuh"
#include "register_row.cuh"

namespace flash_online::cuda {

// One CTA (kCluster false) or all CTAs of a cluster share a row. A CTA has kThreads threads, and kCtasPerSm are resident per
// SM. A thread has kVectorsPerThread vectors, of all tensors that the operator reads.
//
// CTAs of a cluster exchange states by messages (cluster.cuh): each warp stores its state into every CTA's shared memory, and
// an mbarrier there, called a mailbox, counts the bytes that have arrived. A mailbox and the memory it counts serve one merge.
template <int kThreads_, int kVectorsPerThread_, int kCtasPerSm_, bool kCluster_>
struct SharedRowGroup {
  static constexpr int kThreads = kThreads_, kVectorsPerThread = kVectorsPerThread_, kCtasPerSm = kCtasPerSm_;
  static constexpr bool kCluster = kCluster_;
  static constexpr int kLanesPerRow = kWarpSize;
  static constexpr int kVectorsPerCta = kThreads * kVectorsPerThread;
  static constexpr unsigned kSharedBytes = kVectorsPerCta * kVectorBytes;
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

// A thread's vectors of one of the operator's kTensors tensors, in shared memory. RegisterVectors (register_row.cuh) has the
// same members.
template <class Group_, int kTensors, class T>
class SharedVectors {
 public:
  using Group = Group_;
  static constexpr int kVectors = Group::kVectorsPerThread / kTensors, kUnroll = 4, kElements = kPerVector<T>;

  __device__ __forceinline__ SharedVectors(const T* row, int classes, int tensor) {
    extern __shared__ __align__(128) uint4 all_shared[];
    slots_ = all_shared + tensor * kVectors * Group::kThreads + threadIdx.x;
    if (misalignment(row) == 0) {
#pragma unroll 4
      for (int i = 0; i < kVectors; ++i) {
        const int c = (Group::thread_in_row() + i * Group::threads_per_row()) * kElements;
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
        load_row<T, true>(v, row, Group::thread_in_row() + i * Group::threads_per_row(), Group::threads_per_row(), classes,
                          lowest_vector<T>());
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) *slot(i + j) = v[j];
      }
    }
  }
  __device__ __forceinline__ void wait() const {  // no barrier: a thread reads only what it copied itself
    cp_async_commit();
    cp_async_wait();
  }
  __device__ __forceinline__ uint4 operator[](int i) const { return *slot(i); }
  __device__ __forceinline__ uint4 select(int i) const { return *slot(i); }
  __device__ __forceinline__ uint4 reload(int i, float) const { return *slot(i); }
  template <int kSlot, class State>
  __device__ __forceinline__ State merge_warps(State state) const {
    return Group::template merge_warps<kSlot>(state);
  }

 private:
  __device__ __forceinline__ uint4* slot(int i) const { return slots_ + i * Group::kThreads; }
  uint4* slots_;
};

template <class Group, int kTensors, class T>
using SharedRow = OnChipRow<SharedVectors<Group, kTensors, T>, T>;

// What an operator gets its rows from (dispatch.cuh). It must read its tensors in the order of their numbers.
template <class Op, class Group, class T>
struct SharedRowReader {
  using Element = T;
  static constexpr bool kSplit = false;
  const RowProblem& problem;
  RowCoord coord;
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3& view) const {
    const int classes = static_cast<int>(problem.classes);
    const SharedVectors<Group, Op::kTensors, T> vectors(row_of<const T>(view, coord).data, classes, kTensor);
    if constexpr (kTensor + 1 == Op::kTensors) Group::wait_for_cluster();
    return SharedRow<Group, Op::kTensors, T>(coord, classes, vectors);
  }
};

template <class Op, class Group, class T, class R>
__global__ void __launch_bounds__(Group::kThreads, Group::kCtasPerSm)
    shared_kernel(const __grid_constant__ RowProblem problem) {
  Group::init_mailboxes();
  const SharedRowReader<Op, Group, T> reader{problem, row_coord(problem, blockIdx.x / Group::ctas_per_row())};
  Op::template run<R>(problem, reader);
}

// Queues one CTA, or one cluster of `cluster` CTAs, per row.
template <class Op, class Group, class T, class R>
void launch_shared_rows(const RowProblem& problem, int cluster, cudaStream_t stream) {
  static PersistentKernel kernel(shared_kernel<Op, Group, T, R>, Group::kThreads, Group::kSharedBytes);
  kernel.launch(problem, problem.outer * problem.inner, cluster, 1, stream);
}

// ---- which row group

// Measured: the smaller the CTAs the better, and the more of them in a cluster the better; but rows that fit into one CTA are
// fastest without a cluster. LargeCta is for GPUs without clusters.
using SmallCta = SharedRowGroup<128, 8, 9, false>;
using MediumCta = SharedRowGroup<256, 8, 5, false>;
using LargeCta = SharedRowGroup<256, 16, 3, false>;
using SmallCluster = SharedRowGroup<256, 8, 5, true>;
using MediumCluster = SharedRowGroup<256, 16, 3, true>;
using LargeCluster = SharedRowGroup<1024, 8, 1, true>;

inline bool large_cluster_fits() {
  constexpr int kStatic = 20 << 10;  // bytes of shared memory beside the row, at most
  return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() >= static_cast<int>(LargeCluster::kSharedBytes) + kStatic;
}

// The longest row that stays on the chip, in vectors of all tensors that the operator reads.
inline int64_t max_on_chip_vectors(bool reduces) {
  if (reduces) return kMaxRegisterVectorsReadOnly;
  if (largest_cluster() == 1) return LargeCta::kVectorsPerCta;
  return (large_cluster_fits() ? LargeCluster::kVectorsPerCta : MediumCluster::kVectorsPerCta) * largest_cluster();
}

// Calls f.operator()<Group>(CTAs per row) with the row group for rows of `vectors` vectors, of all tensors; does nothing if the
// row belongs into registers or is too long. The length alone decides, as in visit_register_group.
template <class F>
void visit_shared_group(int64_t vectors, const F& f) {
  if (vectors <= kMaxRegisterVectorsReadWrite || vectors > max_on_chip_vectors(false)) return;
  if (vectors <= SmallCta::kVectorsPerCta) return f.template operator()<SmallCta>(1);
  if (vectors <= MediumCta::kVectorsPerCta) return f.template operator()<MediumCta>(1);
  const int max_cluster = largest_cluster();
  if (max_cluster == 1) return f.template operator()<LargeCta>(1);
  const auto smallest_cluster = [&](int vectors_per_cta) {
    int size = 2;
    while (size < max_cluster && vectors > int64_t{size} * vectors_per_cta) size *= 2;
    return size;
  };
  if (vectors <= SmallCluster::kVectorsPerCta * max_cluster)
    f.template operator()<SmallCluster>(smallest_cluster(SmallCluster::kVectorsPerCta));
  else if (vectors <= MediumCluster::kVectorsPerCta * max_cluster)
    f.template operator()<MediumCluster>(max_cluster);
  else
    f.template operator()<LargeCluster>(max_cluster);
}

}  // namespace flash_online::cuda
