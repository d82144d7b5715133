// Launches the kernels of a row operator: from a problem to the kind of row (loops/row_reduce.cuh) that suits its length and
// strides. launch_rows, at the end, makes the choice.
//
// An operator is a struct that is written once for all kinds of row:
//   kTensors                 number of input tensors that it reads as rows
//   tensor(problem, i)       the i-th of these tensors
//   result(problem)          the tensor that it writes rows of; an operator that reduces has none
//   kNumbers, numbers(problem)   true if it has a per-row scalar input (row_number) that is worth staging in shared memory with
//                            the rows; that array
//   kTargets                 true if these scalars are int64 targets, as long as a short row: blocks are larger then
//   once(problem)            optional: a number that depends on the problem alone; some readers have it as reader.once
//   kSumsLosses              true if it adds to the losses of its reader when problem.loss_sums is set
//   kReduces                 true if it writes only scalars per row, so that a row need not be kept once it is summed
//   kRare                    true if it is seldom called: it then has kernels for fewer groups of lengths, and in block_row.cuh
//                            none for words of 16-bit elements alone
//   run<R>(problem, reader)  its work on one row; reader.read<i>(tensor i) gives the row, R is the element type of results
// For split rows, which two kernels read:
//   part(problem, reader)    what the first kernel stores in the workspace; the second calls run
// and if it reduces, a third kernel with one warp per row completes the row's results:
//   finish<T>(problem, coord, merged, sum)   from the merged pieces; T is the element type of tensors
//   kSecondSum               true if it needs a second sum of terms that depend on the row's maximum and sum. The second kernel
//                            stores it: run calls store_sum. Without a second sum there is no second kernel.
#pragma once

#include <initializer_list>

#include "loops/block_row.cuh"
#include "loops/pipelined_row.cuh"
#include "loops/shared_row.cuh"
#include "loops/split_row.cuh"
#include "loops/strided_row.cuh"
#include "loops/vector_rows.cuh"

namespace flash_online::cuda {

// Base of operators that read rows of the input alone.
struct OneTensorOp {
  static constexpr int kTensors = 1;
  static constexpr bool kReduces = false, kSecondSum = false, kRare = false, kNumbers = false;
  static constexpr bool kTargets = false, kSumsLosses = false;
  __host__ __device__ static const ConstView3& tensor(const RowProblem& problem, int) { return problem.input; }
  __host__ __device__ static const MutableView3& result(const RowProblem& problem) { return problem.grad_input; }
  template <class Reader>
  __device__ static void part(const RowProblem& problem, const Reader& reader) {
    reader.read(problem.input).store_part(NoExtra{});
  }
};

// Logsumexp's result for a row that holds +inf: +inf, unless the row holds a NaN too. The sum is NaN in either case.
template <class Row>
__device__ __forceinline__ RowState resolve_infinity(const Row& row, RowState state) {
  const bool infinite = state.max == INFINITY;
  if (row.any_sharing_barrier(infinite) && row.count_nan() == 0 && infinite) state.sum = 1;
  return state;
}

// ---- types and strides of a problem

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

// Calls f(Type<T>) for operators with results of the input's type.
template <class F>
void visit_type(const RowProblem& problem, const char* what, const F& f) {
  if (!visit_floating<__half, __nv_bfloat16>(problem.dtype, [&]<class T>(Type<T> type) {
        if constexpr (!std::is_same_v<T, double>) f(type);
      }))
    throw std::runtime_error(std::string(what) + " on CUDA: dtype must be float16, bfloat16 or float32");
}

// True if a row's classes are contiguous in memory in all tensors, given each tensor's stride between classes.
inline bool classes_are_contiguous(const RowProblem& problem, std::initializer_list<int64_t> class_strides) {
  for (const int64_t stride : class_strides)
    if (stride != 1 && problem.classes > 1) return false;
  return true;
}

inline bool is_empty(const RowProblem& problem) { return problem.outer == 0 || problem.classes == 0 || problem.inner == 0; }

// ---- kernels, one per kind of row

// A reader gives an operator the rows of the tensors that it asks for. SharedRowReader is in shared_row.cuh. kWords: rows are
// dealt by words, else by vectors (staged_vectors.cuh).
template <class Group, int kVectors, class T, bool kWords>
struct RegisterRowReader {
  using Element = T;
  static constexpr bool kSplit = false;
  const RowProblem& problem;
  RowCoord coord;
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3& view) const {
    const T* row = row_of<const T>(view, coord).data;
    const int longest = static_cast<int>(problem.classes), classes = coord.exists ? longest : 0;
    if constexpr (kWords) {
      using Vectors = StagedVectors<GlobalSegments<Group, kVectors>, T, Deal::kWords, true>;
      return OnChipRow<Vectors, T>(coord, classes,
                                   Vectors({}, reinterpret_cast<const char*>(row), classes, longest, nullptr, nullptr));
    } else {
      return RegisterRow<Group, kVectors, T>(coord, classes, RegisterVectors<Group, kVectors, T>(row, classes));
    }
  }
};
template <class Group, class T>
struct StridedRowReader {
  using Element = T;
  static constexpr bool kSplit = false;
  const RowProblem& problem;
  RowCoord coord;
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3& view) const {
    return StridedRow<Group, T>(problem, view, coord);
  }
};
template <class T>
struct SplitRowReader {
  using Element = T;
  static constexpr bool kSplit = true;
  const RowProblem& problem;
  RowCoord coord;
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3& view) const {
    return SplitRow<T>(problem, view);
  }
};

// CTAs resident per SM. An operator that writes nothing of a row's size waits for reads alone: the more CTAs, the better. More
// than 4 vectors take more registers.
template <class Op, class Group, int kVectors>
constexpr int kRegisterCtasPerSm = kVectors > 4                      ? 640 / Group::kThreads
                                   : Op::kReduces && !Op::kSecondSum ? (Group::kThreads == 512 ? 3 : 1280 / Group::kThreads)
                                                                     : Group::kCtasPerSm;

template <class Op, class Group, int kVectors, class T, class R, bool kWords>
__global__ void __launch_bounds__(Group::kThreads, kRegisterCtasPerSm<Op, Group, kVectors>)
    register_kernel(const __grid_constant__ RowProblem problem) {
  launch_dependents();
  grid_dependency_wait();
  Op::template run<R>(problem, RegisterRowReader<Group, kVectors, T, kWords>{problem, register_row_coord<Group>(problem)});
}

template <class Op, class Group, class T, class R>
__global__ void __launch_bounds__(Group::kThreads) strided_kernel(const __grid_constant__ RowProblem problem) {
  for_each_row<Group>(problem,
                      [&](const RowCoord& coord) { Op::template run<R>(problem, StridedRowReader<Group, T>{problem, coord}); });
}

// The first and the second kernel of split rows.
template <class Op, class T>
__global__ void __launch_bounds__(SplitRowGroup::kThreads, kSplitCtasPerSm)
    part_kernel(const __grid_constant__ RowProblem problem) {
  Op::part(problem, SplitRowReader<T>{problem, split_row_coord(problem)});
}
template <class Op, class T, class R>
__global__ void __launch_bounds__(SplitRowGroup::kThreads, kSplitCtasPerSm)
    split_kernel(const __grid_constant__ RowProblem problem) {
  Op::template run<R>(problem, SplitRowReader<T>{problem, split_row_coord(problem)});
}

constexpr int kFinishThreads = 128;

// Completes split or pipelined rows from the Partials of their pieces, one warp per row.
template <class Op, class T>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const __grid_constant__ PiecedProblem pieced) {
  const RowProblem& problem = pieced.problem;
  const int64_t rows = problem.outer * problem.inner, pieces = pieced.pieces_per_row;
  const int64_t index = (int64_t{blockIdx.x} * kFinishThreads + threadIdx.x) / kWarpSize;
  if (index >= rows) return;
  const Partial* partials = static_cast<const Partial*>(problem.workspace);
  grid_dependency_wait();
  const MergedPieces merged = merge_pieces(partials + index * pieces, pieces);
  const float sum = Op::kSecondSum ? merge_pieces(partials + (rows + index) * pieces, pieces).extra : 0.0f;
  if (threadIdx.x % kWarpSize == 0)
    Op::template finish<T>(problem, RowCoord{index / problem.inner, index % problem.inner, index, true}, merged, sum);
}

// ---- launches

// The kernel for rows of `vectors` vectors that are too long for blocks, but stay in registers or shared memory; false if they
// are too long for that too.
template <class Op, class T, class R>
bool launch_on_chip(const RowProblem& problem, int64_t vectors, cudaStream_t stream) {
  bool launched = false;
  const auto launch_in_registers = [&]<class Group, int kVectors, bool kWords>() {
    const int64_t ctas = ceil_div(problem.outer * problem.inner, Group::kRows);
    if (ctas > 0x7fffffff) return;
    launch_dependent(register_kernel<Op, Group, kVectors, T, R, kWords>, problem, static_cast<unsigned>(ctas), Group::kThreads,
                     stream);
    launched = true;
  };
  const auto launch_vectors = [&]<class Group, int kVectors>() {
    launch_in_registers.template operator()<Group, kVectors, false>();
  };
  const bool by_vectors = is_dealt_by_vectors<T>(problem.classes);
  if constexpr (Op::kTensors == 2) {
    if constexpr (sizeof(T) == 2)
      if (by_vectors) visit_two_tensor_group(vectors, launch_vectors);
  } else {
    constexpr bool kReadsWords = sizeof(T) == sizeof(float) && !Op::kRare && (Op::kReduces || !Op::kTargets);
    if (kReadsWords && !by_vectors) {
      if constexpr (kReadsWords)
        visit_register_group<kMostShortVectors + 1, kMaxRegisterVectorsReadOnly, Op::kRare>(
            vectors, [&]<class Group, int kVectors>() { launch_in_registers.template operator()<Group, kVectors, true>(); });
    } else if (Op::kReduces || by_vectors) {
      constexpr int64_t kMost = Op::kReduces ? kMaxRegisterVectorsReadOnly : kMaxRegisterVectorsReadWrite;
      visit_register_group<kLeastRegisterVectors<Op>, kMost, Op::kRare>(vectors, launch_vectors);
    }
  }
  if constexpr (!Op::kReduces)
    if (!launched)
      launched = visit_shared_group(vectors, Op::kTensors, [&]<class Group>(int cluster, int per_thread) {
        launch_shared_rows<Op, Group, T, R>(problem, cluster, per_thread, stream);
      });
  return launched;
}

template <class Op, class T>
void launch_finish(const PiecedProblem& pieced, cudaStream_t stream) {
  const int64_t ctas = ceil_div(pieced.problem.outer * pieced.problem.inner, kFinishThreads / kWarpSize);
  launch_dependent(finish_kernel<Op, T>, pieced, static_cast<unsigned>(ctas), kFinishThreads, stream);
}

// The kernels for rows that are reduced in one pass through a pipeline; false if the operator or the device is not fit for it.
template <class Op, class T>
bool launch_pipelined(const RowProblem& problem, cudaStream_t stream) {
  if constexpr (Op::kReduces && !Op::kSecondSum) {
    const PiecedProblem pieced = pipelined_row_pieces(problem, Type<T>{});
    if (!has_bulk_copy() || !pieced.is_countable()) return false;
    launch_pipelined_part<T>(pieced, stream);
    launch_finish<Op, T>(pieced, stream);
    return true;
  }
  return false;
}

// The kernels for split rows, which need a workspace.
template <class Op, class T, class R>
void launch_split(const RowProblem& problem, cudaStream_t stream, const char* name) {
  const int64_t rows = problem.outer * problem.inner;
  const SplitPieces pieces = SplitPieces::of(problem.classes, Type<T>{});
  const dim3 ctas(static_cast<unsigned>(rows), static_cast<unsigned>(pieces.pieces_per_row));
  part_kernel<Op, T><<<ctas, SplitRowGroup::kThreads, 0, stream>>>(problem);
  check_launch(name);
  if constexpr (!Op::kReduces || Op::kSecondSum) {
    split_kernel<Op, T, R><<<ctas, SplitRowGroup::kThreads, 0, stream>>>(problem);
    check_launch(name);
  }
  if constexpr (Op::kReduces)
    launch_finish<Op, T>({.problem = problem,
                          .classes_per_piece = pieces.classes_per_piece,
                          .pieces_per_row = static_cast<unsigned>(pieces.pieces_per_row),
                          .total_pieces = rows * pieces.pieces_per_row},
                         stream);
}

// Bytes of workspace for the split rows of an operator that reads `tensors` tensors of a dtype; 0 for rows that stay on the
// chip.
inline int64_t workspace_of_rows(const RowProblem& problem, DType dtype, int tensors, bool reduces) {
  if (ceil_div(problem.classes, kVectorBytes / size_of(dtype)) * tensors <= max_on_chip_vectors(reduces)) return 0;
  const SplitPieces pieces = dtype == DType::kFloat32 ? SplitPieces::of(problem.classes, Type<float>{})
                                                      : SplitPieces::of(problem.classes, Type<__half>{});
  return split_workspace(problem.outer * problem.inner, pieces.pieces_per_row);
}

// Calls f(group) with the row group for rows of any strides; `view` is the first tensor that is read.
template <class F>
void visit_strided_group(const RowProblem& problem, const ConstView3& view, const F& f) {
  constexpr int64_t kLongRow = 1024;  // classes from which a row gets a CTA
  const int64_t run_length = RowGrid(problem).run_length, row_stride = problem.inner == 1 ? view.stride[0] : view.stride[2];
  if (run_length > 1 && row_stride < view.stride[1])
    f(LanePerRow{});
  else if (problem.classes < kLongRow)
    f(WarpPerRow{});
  else
    f(CtaPerRow{});
}

template <class Op, class T, class R>
void launch_strided(const RowProblem& problem, cudaStream_t stream, const char* name) {
  visit_strided_group(problem, Op::tensor(problem, 0), [&]<class Group>(Group) {
    constexpr int kWaves = 4, kCtasPerSm = 2048 / Group::kThreads;
    const int64_t ctas = ceil_div(RowGrid(problem).row_sets<Group>(), Group::kRowSetsPerCta);
    strided_kernel<Op, Group, T, R><<<grid_for(ctas, kWaves * kCtasPerSm), Group::kThreads, 0, stream>>>(problem);
  });
  check_launch(name);
}

// Queues an operator's kernels. `contiguous`: the classes of a row are neighbours in memory in every tensor of the problem.
template <class Op, class T, class R>
void launch_rows(const RowProblem& problem, bool contiguous, cudaStream_t stream, const char* name) {
  if (contiguous) {
    const int64_t vectors = ceil_div(problem.classes, kPerVector<T>);
    if (launch_vector_rows<Op, T, R>(problem, stream)) return check_launch(name);
    if (launch_block<Op, T, R>(problem, stream)) return check_launch(name);
    if (launch_on_chip<Op, T, R>(problem, vectors, stream)) return check_launch(name);
    if (launch_pipelined<Op, T>(problem, stream)) return check_launch(name);
    if (problem.workspace != nullptr) return launch_split<Op, T, R>(problem, stream, name);
  }
  launch_strided<Op, T, R>(problem, stream, name);
}

}  // namespace flash_online::cuda
