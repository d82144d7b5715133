// Short contiguous rows, a block of them per CTA; the lanes of a warp share rows. The block passes through shared memory
// (staged_vectors.cuh). Rows that are adjacent in memory are one run of bytes: one bulk copy in and one out. Other rows are a
// run each.
#pragma once

#include "../../hw/pdl.cuh"
#include "../choice.h"
#include "few_classes_row.cuh"
#include "staged_vectors.cuh"

namespace flash_online::cuda {

// kLanes lanes of a warp share a row. A lane has up to kVectors vectors; or rows have kClasses classes, and a lane has a row.
// kByVectors: for rows of a whole number of vectors only (is_whole), else for the others only.
template <int kLanes, int kVectors_, int kClasses_ = 0, bool kByVectors_ = false>
struct BlockRowGroup {
  static constexpr bool kByVectors = kByVectors_;
  static constexpr int kThreads = 128, kWarps = kThreads / kWarpSize, kCtasPerSm = 8;
  static constexpr int kLanesPerRow = kLanes, kVectors = kVectors_, kClasses = kClasses_;
  static constexpr int kRowsPerWarp = kWarpSize / kLanes, kRows = kWarps * kRowsPerWarp;  // at a time
  __device__ __forceinline__ static int thread_in_row() { return threadIdx.x % kLanes; }
};
// Where a lane's elements of a row are (see StagedVectors).
template <class Group_>
struct BlockSegments : AdjacentSegments<Group_, Group_::kLanesPerRow, Group_::kVectors> {
  static constexpr bool kStagesOtherSizes = true;
  template <int kSlot, class State>
  __device__ __forceinline__ static State merge_warps(State state) {
    return state;
  }
};

// ---- where a block's rows are

// One tensor's rows of a block in shared memory.
struct BlockTensor {
  bool adjacent;  // one after another, as in global memory; else each row begins at a multiple of 16 bytes
  bool shifted;  // unlike in global memory, the first row begins at a multiple of 16 bytes, or each one if not adjacent
  unsigned offset, pitch;  // of the first row, and from row to row, in bytes
};

// The rows that are computed at a time: row `of_lane` * (lane / lanes per row) + `of_warp` * warp + `of_step` * step. The lanes
// of a warp would meet in the same banks if neighbouring rows began in neighbouring ones, as rows of 127 16-bit classes do:
// those rows are taken from all over the block instead. No two warps have elements in one word: a warp takes rows by the pair.
struct BlockOrder {
  int of_lane, of_warp, of_step;
  bool has_conflicts;  // lanes meet in banks all the same
};

constexpr int kMaxBlockTensors = 2;

struct BlockProblem {
  RowProblem problem;
  int rows_per_block;
  BlockOrder order;
  unsigned shared_bytes;
  bool odd_words;  // rows may begin off a multiple of 4 bytes
  BlockTensor input[kMaxBlockTensors], result;  // the result may be in the place of input[0]
  RowScalars scalars;  // staged with the rows
  unsigned scalars_offset;  // where the block's first scalar is in shared memory

  // The scalars of rows [first, first + count).
  __device__ __forceinline__ Run<const char> scalars_of(char* shared, int64_t first, int count) const {
    return {static_cast<const char*>(scalars.data) + first * scalars.bytes, shared + scalars_offset, count * scalars.bytes};
  }
};

// Rows [first, first + count) of a tensor, in shared memory at `shared`.
template <class T>
struct BlockRows {
  const RowProblem& problem;
  const View3<std::conditional_t<std::is_const_v<T>, const void*, void*>>& view;
  const BlockTensor& tensor;
  char* shared;
  int64_t first;
  int count;

  // Calls f(Run) for the runs number `begin`, begin + step, ...
  template <class F>
  __device__ __forceinline__ void for_each_run(int begin, int step, const F& f) const {
    const unsigned row_bytes = static_cast<unsigned>(problem.classes) * sizeof(T);
    const int runs = tensor.adjacent ? 1 : count;
#pragma unroll 1
    for (int run = begin; run < runs; run += step)
      f(Run<T>{row_of<T>(view, row_coord(problem, first + run)).data, shared + tensor.offset + run * tensor.pitch,
               tensor.adjacent ? count * row_bytes : row_bytes});
  }
  // Calls f(Run, thread of the team, threads) for the runs of one of the teams that kThreads threads form.
  template <int kThreads, class F>
  __device__ __forceinline__ void for_each_run_of_team(const F& f) const {
    constexpr int kTeam = 8;
    const int team = tensor.adjacent ? kThreads : kTeam, thread = static_cast<int>(threadIdx.x);
    for_each_run(thread / team, kThreads / team, [&](const Run<T>& run) { f(run, thread % team, team); });
  }
};

// The copies of a block. Not inlined: they are the same for all operators and lengths, and long.

// The copies to shared memory that the first warp starts. Returns the bytes that the lane has started.
template <class T>
__device__ __noinline__ unsigned load_block(const BlockRows<const T> rows, uint64_t* barrier) {
  unsigned all = 0;
  if constexpr (kHasBulkCopy)
    rows.for_each_run(threadIdx.x, kWarpSize, [&](const Run<const T>& run) { all += run.load(barrier); });
  return all;
}
// The copies to shared memory by all threads.
template <class T, int kThreads>
__device__ __noinline__ void load_block_by_threads(const BlockRows<const T> rows) {
  if (rows.tensor.shifted)
    rows.template for_each_run_of_team<kThreads>([](const auto& run, int i, int team) { run.load_shifted(i, team); });
  else
    rows.template for_each_run_of_team<kThreads>([](const auto& run, int i, int team) { run.load_by_threads(i, team); });
}
// All threads call this after a barrier.
template <class T, int kThreads>
__device__ __noinline__ void store_block(const BlockRows<T> rows) {
  if (rows.tensor.shifted) {
    rows.template for_each_run_of_team<kThreads>(
        [](const auto& run, int i, int team) { run.template store_by_threads<true>(i, team); });
  } else if constexpr (!kHasBulkCopy) {
    rows.template for_each_run_of_team<kThreads>(
        [](const auto& run, int i, int team) { run.template store_by_threads<false>(i, team); });
  } else if (threadIdx.x < kWarpSize) {
    rows.for_each_run(threadIdx.x, kWarpSize, [](const Run<T>& run) { run.store(); });
    tma_store_commit();
    tma_store_wait_read();
  }
}

// ---- the kernel

// Stores the sum over a CTA of what its threads have.
template <int kWarps>
__device__ __forceinline__ void store_loss_sums(const LossSums& mine, LossAndWeight* to) {
  __shared__ LossAndWeight of_warp[kWarps];
  const LossAndWeight sums{lanes_sum<kWarpSize>(mine.loss.value), lanes_sum<kWarpSize>(mine.weight.value)};
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = sums;
  __syncthreads();
  if (threadIdx.x != 0) return;
  LossAndWeight all = of_warp[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) {
    all.loss += of_warp[warp].loss;
    all.weight += of_warp[warp].weight;
  }
  *to = all;
}

// The most vectors, of all tensors, that a lane keeps in registers. Gradients of float32 rows sum in double, which leaves fewer
// registers.
template <class T>
constexpr int kMaxHeldVectors = sizeof(T) == sizeof(float) ? 4 : 8;

// The reader that gives an operator its rows (dispatch.cuh).
template <class Op, class Group, class T, class R, Deal kDeal>
struct BlockRowReader {
  using Element = T;
  static constexpr bool kMultiCta = false;
  static constexpr bool kHeld =
      (Group::kVectors <= 4 || Group::kLanesPerRow < kWarpSize) && Group::kVectors * Op::kTensors <= kMaxHeldVectors<T>;
  const BlockProblem& block;
  char* shared;
  int row;  // of the block
  RowCoord coord;
  LossSums& losses;  // of this thread's rows
  float once;  // what the operator computes once
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3&) const {
    const MutableView3* of_result = nullptr;
    char* result = nullptr;
    if constexpr (!Op::kReduces) {
      of_result = &Op::result(block.problem);
      result = row_in(block.result);
    }
    const char* const row_here = row_in(block.input[kTensor]);
    if constexpr (Group::kClasses != 0) {
      return FewClassesRow<T, Group::kClasses, kDeal != Deal::kOddWords>(coord, {row_here, of_result, result});
    } else {
      using Vectors = StagedVectors<BlockSegments<Group>, T, kDeal, kHeld>;
      const int longest = static_cast<int>(block.problem.classes), classes = coord.exists ? longest : 0;
      return OnChipRow<Vectors, T>(coord, classes, Vectors({}, row_here, classes, longest, of_result, result));
    }
  }
  template <class V>
  __device__ __forceinline__ V staged_scalar() const {
    return *reinterpret_cast<const V*>(shared + block.scalars_offset + row * static_cast<int>(sizeof(V)));
  }

 private:
  __device__ __forceinline__ char* row_in(const BlockTensor& tensor) const {
    return shared + tensor.offset + row * tensor.pitch;
  }
};

template <class Op, class Group, class T, class R, Deal kDeal>
__global__ void __launch_bounds__(Group::kThreads, Group::kCtasPerSm) block_kernel(const __grid_constant__ BlockProblem block) {
  extern __shared__ __align__(128) uint4 all_shared[];
  __shared__ uint64_t full;
  launch_dependents();
  grid_dependency_wait();
  const RowProblem& problem = block.problem;
  char* const shared = reinterpret_cast<char*>(all_shared);
  const int64_t first = int64_t{blockIdx.x} * block.rows_per_block, left = problem.outer * problem.inner - first;
  const int rows = left < block.rows_per_block ? static_cast<int>(left) : block.rows_per_block;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const auto inputs = [&](int i) {
    return BlockRows<const T>{problem, Op::tensor(problem, i), block.input[i], shared, first, rows};
  };
  if constexpr (kHasBulkCopy) {
    if (warp == 0) {
      if (lane == 0) {
        mbarrier_init(&full, kWarpSize);
        fence_barrier_init();
      }
      __syncwarp();
      unsigned bytes = 0;
#pragma unroll
      for (int i = 0; i < Op::kTensors; ++i)
        if (!block.input[i].shifted) bytes += load_block<T>(inputs(i), &full);
      if constexpr (Op::kRowScalars)
        if (lane == 0) bytes += block.scalars_of(shared, first, rows).load(&full);
      arrive_expect_tx(&full, bytes);
    }
  }
#pragma unroll
  for (int i = 0; i < Op::kTensors; ++i)
    if (!kHasBulkCopy || block.input[i].shifted) load_block_by_threads<T, Group::kThreads>(inputs(i));
  if constexpr (Op::kRowScalars && !kHasBulkCopy)
    block.scalars_of(shared, first, rows).load_by_threads(threadIdx.x, Group::kThreads);
  const float once = value_of_once<Op>(problem);
  cp_async_commit();
  cp_async_wait();
  __syncthreads();
  if constexpr (kHasBulkCopy) wait(&full, 0);
  const int begin = block.order.of_lane * (lane / Group::kLanesPerRow) + block.order.of_warp * warp;
  const int steps = block.rows_per_block / Group::kRows;
  LossSums losses;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int row = begin + block.order.of_step * step;
    RowCoord coord = row_coord(problem, first + row);
    coord.exists = row < rows;
    if (!__any_sync(~0u, coord.exists)) break;
    Op::template run<R>(problem, BlockRowReader<Op, Group, T, R, kDeal>{block, shared, row, coord, losses, once});
    __syncwarp();
  }
  if constexpr (Op::kSumsLosses)
    if (problem.loss_sums != nullptr)
      store_loss_sums<Group::kWarps>(losses, static_cast<LossAndWeight*>(problem.loss_sums) + blockIdx.x);
  if constexpr (!Op::kReduces) {
    if constexpr (kHasBulkCopy) fence_async_proxy();
    __syncthreads();
    store_block<R, Group::kThreads>(BlockRows<R>{problem, Op::result(problem), block.result, shared, first, rows});
  }
}

// ---- launches

// Bytes of a tensor's rows per block, and rows per thread, at most (but a warp has at least one row). Small blocks are better,
// since few CTAs run with the last ones. Large blocks are better where a block has costs in addition to its bytes: targets,
// rows that take a warp each, and (medium blocks) rows shorter than a vector. They also allow more orders without conflicts.
constexpr int64_t kBlockBytes = 12 << 10, kMediumBlockBytes = 16 << 10, kLargeBlockBytes = 20 << 10, kMostRowsPerThread = 16;

template <class Op, class Group>
int64_t block_bytes(int64_t row_bytes) {
  if (Group::kLanesPerRow == kWarpSize || Op::kTargets) return kLargeBlockBytes;
  return Group::kClasses == 0 && row_bytes < kVectorBytes ? kMediumBlockBytes : kBlockBytes;
}

// The layout of a tensor's rows in a block, from `end` on; adds their bytes to `end`.
template <class T, class Pointer>
BlockTensor block_tensor(BlockProblem& block, const View3<Pointer>& view, bool by_vectors, unsigned& end) {
  const RowProblem& problem = block.problem;
  const int64_t row_bytes = problem.classes * static_cast<int64_t>(sizeof(T));
  const auto bits = [](auto x) { return static_cast<uintptr_t>(x); };
  const uintptr_t begin = reinterpret_cast<uintptr_t>(view.data);
  BlockTensor tensor{};
  tensor.adjacent = (problem.outer == 1 || view.stride[0] == problem.inner * problem.classes) &&
                    (problem.inner == 1 || view.stride[2] == problem.classes);
  uintptr_t steps = begin;
  if (problem.outer > 1) steps |= bits(view.stride[0]) * sizeof(T);
  if (problem.inner > 1) steps |= bits(view.stride[2]) * sizeof(T);
  tensor.shifted = (by_vectors || !tensor.adjacent) && steps % kVectorBytes != 0;
  constexpr int64_t kSpareBytes = 2 * kVectorBytes;  // the first row may begin late, and a row is read to the end of a vector
  tensor.pitch = static_cast<unsigned>(tensor.adjacent ? row_bytes : round_up(row_bytes, int64_t{kVectorBytes}));
  tensor.offset = end + (tensor.adjacent && !tensor.shifted ? begin % kVectorBytes : 0);
  end += static_cast<unsigned>(round_up(block.rows_per_block * tensor.pitch + kSpareBytes, int64_t{128}));
  if (tensor.adjacent && (tensor.offset | tensor.pitch) % 4 != 0) block.odd_words |= sizeof(T) == 2;
  return tensor;
}

template <class Op, class T, class R>
BlockProblem block_problem(const RowProblem& problem, int64_t rows) {
  BlockProblem block{};
  block.problem = problem;
  block.rows_per_block = static_cast<int>(rows);
  for (int i = 0; i < Op::kTensors; ++i)
    block.input[i] = block_tensor<T>(block, Op::tensor(problem, i), is_whole(sizeof(T), problem.classes), block.shared_bytes);
  if constexpr (!Op::kReduces) {
    const BlockTensor& input = block.input[0];
    unsigned end = 0;
    block.result = block_tensor<R>(block, Op::result(problem), is_whole(sizeof(R), problem.classes), end);
    // In the place of the first tensor's, if they lie alike.
    if (sizeof(R) == sizeof(T) && input.pitch == block.result.pitch && input.offset == block.result.offset) return block;
    block.result.offset += block.shared_bytes;
    block.shared_bytes += end;
  }
  return block;
}

// Allocates shared memory for the scalars that are staged with the rows, after all else. Their misalignment to 16 bytes is the
// same as in global memory.
inline void place_scalars(BlockProblem& block, const RowScalars& scalars) {
  constexpr unsigned kSpareBytes = 2 * kVectorBytes;
  block.scalars = scalars;
  block.scalars_offset = block.shared_bytes + misalignment(scalars.data);
  block.shared_bytes += round_up(block.rows_per_block * scalars.bytes + kSpareBytes, 128u);
}

// Rows per block: a multiple of `step`. Few rows are spread over the device.
inline int64_t rows_per_block(int64_t rows, int64_t row_bytes, int64_t step, int64_t most, int64_t bytes) {
  constexpr int64_t kBlocksPerSm = 4;
  const int64_t fitting = std::min(bytes / row_bytes, most);
  const int64_t wanted = std::min(fitting, ceil_div(rows, kBlocksPerSm * sm_count()));
  return std::max(wanted / step * step, step);
}

// The most lanes of a warp with words in one bank, if `lanes` lanes share a row and rows begin `bytes` apart.
inline int bank_conflicts(int64_t bytes, int lanes) {
  int in_bank[kWarpSize] = {}, most = 0;
  for (int lane = 0; lane < kWarpSize; ++lane)
    most = std::max(most, ++in_bank[(lane / lanes * bytes / 4 + lane % lanes) % kWarpSize]);
  return most;
}

// Chooses the order of a block's rows, for which it may get fewer of them, but at least half as many.
template <class Group>
BlockOrder block_order(int64_t row_bytes, int64_t& rows) {
  constexpr int kNone = 2;  // lanes per bank that cost nothing to speak of
  BlockOrder order{1, static_cast<int>(rows) / Group::kWarps, Group::kRowsPerWarp, false};
  if constexpr (Group::kRowsPerWarp > 1) {
    constexpr int64_t kPairs = 2 * Group::kRows;  // a pair of rows for every lane that has rows of its own
    int least = row_bytes % kVectorBytes == 0 ? kNone : bank_conflicts(row_bytes, Group::kLanesPerRow);
    const int64_t most = rows;
    for (int64_t fewer = most / kPairs * kPairs; least > kNone && fewer > 0 && 2 * fewer >= most; fewer -= kPairs) {
      const int apart = static_cast<int>(fewer) / Group::kRowsPerWarp;
      const int conflicts = bank_conflicts(apart * row_bytes, Group::kLanesPerRow);
      if (conflicts < least) least = conflicts, rows = fewer, order = {apart, apart / Group::kWarps, 1, false};
    }
    order.has_conflicts = least > kNone;
  }
  return order;
}

// Queues the kernel for short rows.
template <class Op, class Group, class T, class R>
void launch_block(const RowProblem& problem, cudaStream_t stream) {
  const int64_t row_bytes = problem.classes * static_cast<int64_t>(sizeof(T)), rows = problem.outer * problem.inner;
  RowScalars scalars{};
  if constexpr (Op::kRowScalars) scalars = Op::scalars(problem);
  // As many rows as are a whole number of vectors, so that all blocks of adjacent rows begin alike.
  constexpr int64_t kStep = std::max<int64_t>({Group::kRows, kPerVector<T>, kPerVector<R>});
  int64_t per_block = 0;
  const auto order_in = [&](int64_t bytes) {
    const int64_t target_bytes = Op::kTargets ? scalars.bytes : 0;
    per_block = rows_per_block(rows, row_bytes + target_bytes, kStep, kMostRowsPerThread * Group::kRows, bytes);
    return block_order<Group>(row_bytes, per_block);
  };
  BlockOrder order = order_in(block_bytes<Op, Group>(row_bytes));
  if (order.has_conflicts) order = order_in(kLargeBlockBytes);
  BlockProblem block = block_problem<Op, T, R>(problem, per_block);
  block.order = order;
  if constexpr (Op::kRowScalars) place_scalars(block, scalars);
  if constexpr (Op::kSumsLosses)
    if (problem.loss_sums != nullptr) *problem.loss_sum_count = ceil_div(rows, per_block);
  const auto launch_as = [&]<Deal kDeal>() {
    launch<block_kernel<Op, Group, T, R, kDeal>>(block, ceil_div(rows, per_block), Group::kThreads,
                                                 static_cast<int>(block.shared_bytes), stream, true);
  };
  if constexpr (Group::kByVectors) {
    launch_as.template operator()<Deal::kVectors>();
  } else if constexpr (sizeof(T) == 4) {
    launch_as.template operator()<Deal::kWords>();
  } else {
    constexpr bool kWords = !Op::kRare && (Group::kClasses == 0 || Group::kClasses % 2 == 0);
    if constexpr (kWords)
      if (!block.odd_words) return launch_as.template operator()<Deal::kWords>();
    launch_as.template operator()<Deal::kOddWords>();
  }
}

}  // namespace flash_online::cuda
