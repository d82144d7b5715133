// From a problem to the kernel that suits its rows. An operator is a struct with
//   kTensors               how many tensors it reads whole rows of
//   kReduces               whether it writes but numbers of a row: then nothing of a long row is held
//   tensor(problem, i)     which ones
//   run<R>(problem, rows)  its work on a row, of which rows.read<i>(tensor i) gets one; R is the element type of results
//   part(problem, rows)    of a split row: what the first kernel leaves for run
// and if it reduces, of split rows, which run only serves if
//   kSumsAgain             their sum needs the row's state: run leaves it for
//   finish<T>(problem, place, whole, sum)   which gets a row's parts merged
// The same code serves rows that are held, strided and split.
#pragma once

#include <initializer_list>

#include "loops/pipelined_row.cuh"
#include "loops/shared_row.cuh"
#include "loops/split_row.cuh"

namespace flash_online::cuda {

// Calls f(Type<Input>, Type<Result>).
template <class F>
void visit_types(const RowProblem& problem, const char* what, const F& f) {
  const bool same = problem.dtype == problem.result_dtype;
  if (problem.dtype == DType::kFloat32 && same)
    f(Type<float>{}, Type<float>{});
  else if (problem.dtype == DType::kFloat16)
    same ? f(Type<__half>{}, Type<__half>{}) : f(Type<__half>{}, Type<float>{});
  else if (problem.dtype == DType::kBFloat16)
    same ? f(Type<__nv_bfloat16>{}, Type<__nv_bfloat16>{}) : f(Type<__nv_bfloat16>{}, Type<float>{});
  else
    throw std::runtime_error(std::string(what) + " on CUDA: dtype must be float16, bfloat16 or float32");
}

// Calls f(Type<T>) where results have the input's type.
template <class F>
void visit_type(const RowProblem& problem, const char* what, const F& f) {
  if (!visit_floating<__half, __nv_bfloat16>(problem.dtype, [&]<class T>(Type<T> type) {
        if constexpr (!std::is_same_v<T, double>) f(type);
      }))
    throw std::runtime_error(std::string(what) + " on CUDA: dtype must be float16, bfloat16 or float32");
}

inline bool classes_together(const RowProblem& problem, std::initializer_list<int64_t> class_strides) {
  for (const int64_t stride : class_strides)
    if (stride != 1 && problem.classes > 1) return false;
  return true;
}

inline bool is_empty(const RowProblem& problem) { return problem.outer == 0 || problem.classes == 0 || problem.inner == 0; }

// Calls f(Team) with the team for rows of any strides, of which the first is read through `view`.
template <class F>
void visit_strided(const RowProblem& problem, const ConstView3& view, const F& f) {
  constexpr int64_t kLongRow = 1024;  // classes from which a row gets a block
  const int64_t run = RowGrid(problem).run, row_stride = problem.inner == 1 ? view.stride[0] : view.stride[2];
  if (run > 1 && row_stride < view.stride[1])
    f(LanePerRow{});
  else if (problem.classes < kLongRow)
    f(WarpPerRow{});
  else
    f(BlockPerRow{});
}

template <class Team>
unsigned strided_blocks(const RowProblem& problem) {
  constexpr int kWaves = 4, kResident = 2048 / Team::kThreads;
  const int64_t units = RowGrid(problem).units<Team>();
  return grid_for((units + Team::kUnitsPerBlock - 1) / Team::kUnitsPerBlock, kWaves * kResident);
}

// What logsumexp gives for a row that holds +inf: infinity, unless it holds a NaN too. The sum cannot tell these apart.
template <class Row>
__device__ __forceinline__ RowState settled(const Row& row, RowState state) {
  const bool infinite = state.max == INFINITY;
  if (row.together(infinite) && row.count_nan() == 0 && infinite) state.sum = 1;
  return state;
}

template <class Team, int kVectors, class T>
struct HeldRows {
  static constexpr bool kSplit = false;
  const RowProblem& problem;
  RowPlace place;
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3& view) const {
    using Vectors = InRegisters<Team, kVectors, T>;
    const T* row = row_of<const T>(view, place).data;
    const int classes = place.exists ? static_cast<int>(problem.classes) : 0;
    return HeldRow<Vectors, T>(place, classes, Vectors(row, classes));
  }
};
template <class Team, class T>
struct StridedRows {
  static constexpr bool kSplit = false;
  const RowProblem& problem;
  RowPlace place;
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3& view) const {
    return StridedRow<Team, T>(problem, view, place);
  }
};
template <class T>
struct SplitRows {
  static constexpr bool kSplit = true;
  const RowProblem& problem;
  RowPlace place;
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3& view) const {
    return SplitRow<T>(problem, view);
  }
};

// Blocks to be resident on a multiprocessor. What writes nothing of a row's size waits for reads alone: the more, the better.
template <class Op, class Team>
constexpr int kHeldBlocks =
    Op::kReduces && !Op::kSumsAgain ? (Team::kThreads == 512 ? 3 : 1280 / Team::kThreads) : Team::kBlocks;

template <class Op, class Team, int kVectors, class T, class R>
__global__ void __launch_bounds__(Team::kThreads, kHeldBlocks<Op, Team>)
    held_kernel(const __grid_constant__ RowProblem problem) {
  if constexpr (Op::kReduces) launch_dependents();  // the sum of what rows leave
  Op::template run<R>(problem, HeldRows<Team, kVectors, T>{problem, held_place<Team>(problem)});
}

template <class Op, class Team, class T, class R>
__global__ void __launch_bounds__(Team::kThreads) strided_kernel(const __grid_constant__ RowProblem problem) {
  for_each_row<Team>(problem,
                     [&](const RowPlace& place) { Op::template run<R>(problem, StridedRows<Team, T>{problem, place}); });
}

template <class Op, class T>
__global__ void __launch_bounds__(SplitTeam::kThreads, kSplitBlocks) part_kernel(const __grid_constant__ RowProblem problem) {
  Op::part(problem, SplitRows<T>{problem, split_place(problem)});
}

template <class Op, class T, class R>
__global__ void __launch_bounds__(SplitTeam::kThreads, kSplitBlocks) split_kernel(const __grid_constant__ RowProblem problem) {
  Op::template run<R>(problem, SplitRows<T>{problem, split_place(problem)});
}

constexpr int kFinishThreads = 128;

// A warp a row, whose pieces have left their parts.
template <class Op, class T>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const __grid_constant__ PiecedRows pieced) {
  const RowProblem& problem = pieced.problem;
  const int64_t rows = problem.outer * problem.inner, pieces = pieced.pieces;
  const int64_t number = (int64_t{blockIdx.x} * kFinishThreads + threadIdx.x) / kWarpSize;
  if (number >= rows) return;
  const Partial* partials = static_cast<const Partial*>(problem.workspace);
  grid_dependency_wait();
  const Whole whole = merge_pieces(partials + number * pieces, pieces);
  const float sum = Op::kSumsAgain ? merge_pieces(partials + (rows + number) * pieces, pieces).extra : 0.0f;
  if (threadIdx.x % kWarpSize == 0)
    Op::template finish<T>(problem, RowPlace{number / problem.inner, number % problem.inner, number, true}, whole, sum);
}

template <class Op, class T>
void launch_finish(const PiecedRows& pieced, cudaStream_t stream) {
  constexpr int kRows = kFinishThreads / kWarpSize;
  const int64_t rows = pieced.problem.outer * pieced.problem.inner;
  launch_dependent(finish_kernel<Op, T>, pieced, static_cast<unsigned>((rows + kRows - 1) / kRows), kFinishThreads, stream);
}

// Queues the kernels of rows that are only summed up, once, and that no block's registers hold; false if this is none of them.
template <class Op, class T>
bool launch_ringed(const RowProblem& problem, cudaStream_t stream) {
  if constexpr (Op::kReduces && !Op::kSumsAgain) {
    const PiecedRows pieced = row_pieces(problem, Type<T>{});
    if (!copies_bytes() || !pieced.countable()) return false;
    launch_ring_part<T>(pieced, stream);
    launch_finish<Op, T>(pieced, stream);
    return true;
  }
  return false;
}

// Queues the kernel that holds rows of so many vectors; false if there is none.
template <class Op, class T, class R>
bool launch_held(const RowProblem& problem, int64_t vectors, cudaStream_t stream) {
  bool launched = false;
  constexpr int64_t kMost = Op::kReduces ? kMostInRegisters : kMostInRegistersWritten;
  visit_held<Op::kTensors, kMost>(vectors, [&]<class Team, int kVectors>() {
    const int64_t blocks = (problem.outer * problem.inner + Team::kRows - 1) / Team::kRows;
    if (blocks > 0x7fffffff) return;
    held_kernel<Op, Team, kVectors, T, R><<<static_cast<unsigned>(blocks), Team::kThreads, 0, stream>>>(problem);
    launched = true;
  });
  if constexpr (!Op::kReduces)
    visit_shared(vectors * Op::kTensors, [&]<class Team>(int cluster) {
      launch_shared_rows<Op, Team, T, R>(problem, cluster, stream);
      launched = true;
    });
  return launched;
}

// Queues an operator's kernels. `classes_together`: in every tensor of the problem a row's classes lie side by side.
template <class Op, class T, class R>
void launch_rows(const RowProblem& problem, bool classes_together, cudaStream_t stream, const char* name) {
  const int64_t vectors = (problem.classes + kPerVector<T> - 1) / kPerVector<T>, rows = problem.outer * problem.inner;
  if (classes_together) {
    if (launch_held<Op, T, R>(problem, vectors, stream)) return check_launch(name);
    if (launch_ringed<Op, T>(problem, stream)) return check_launch(name);
    if (problem.workspace != nullptr) {
      const Pieces pieces = Pieces::of(problem.classes, Type<T>{});
      const dim3 blocks(static_cast<unsigned>(rows), static_cast<unsigned>(pieces.count));
      part_kernel<Op, T><<<blocks, SplitTeam::kThreads, 0, stream>>>(problem);
      check_launch(name);
      if constexpr (!Op::kReduces || Op::kSumsAgain) {
        split_kernel<Op, T, R><<<blocks, SplitTeam::kThreads, 0, stream>>>(problem);
        check_launch(name);
      }
      if constexpr (Op::kReduces)
        launch_finish<Op, T>({problem, pieces.classes, static_cast<unsigned>(pieces.count), rows * pieces.count}, stream);
      return;
    }
  }
  visit_strided(problem, Op::tensor(problem, 0), [&]<class Team>(Team) {
    strided_kernel<Op, Team, T, R><<<strided_blocks<Team>(problem), Team::kThreads, 0, stream>>>(problem);
  });
  check_launch(name);
}

}  // namespace flash_online::cuda
