// Launches the kernels of a row operator: from a problem to the kind of row (loops/row_reduce.cuh) that choice.h names for its
// length, or to rows of any strides. launch_rows, at the end, is what operators call.
//
// An operator is a struct that is written once for all kinds of row:
//   kTensors                 number of input tensors that it reads as rows
//   tensor(problem, i)       the i-th of these tensors
//   result(problem)          the tensor that it writes rows of; an operator that reduces has none
//   kRowScalars, scalars(problem)   true if it has an input of row scalars (row_scalar) that is worth staging in shared memory
//                            with the rows; that array
//   kTargets                 true if these scalars are int64 targets, as long as a short row: blocks are larger then
//   once(problem)            optional: a number that depends on the problem alone; some readers have it as reader.once
//   kSumsLosses              true if it adds to the losses of its reader when problem.loss_sums is set
//   kReduces                 true if it writes only scalars per row, so that a row need not be kept once it is summed
//   kRare                    true if it is seldom called: it then has kernels for fewer groups of lengths, and in block_row.cuh
//                            none for words of 16-bit elements alone
//   run<R>(problem, reader)  its work on one row; reader.read<i>(tensor i) gives the row, R is the element type of results
// For multi-CTA rows, which two kernels read:
//   store_partial(problem, reader)   what the first kernel stores in the workspace; the second calls run
// and if it reduces, a third kernel with one warp per row completes the row's results:
//   finish<T>(problem, coord, merged, sum)   from the merged slices; T is the element type of tensors
//   State                    RowState, or RowEntropyState: the merged slices then have its products as `extra`
//   kSecondSum               true if it needs a second sum of terms that depend on the row's maximum and sum. The second kernel
//                            stores it: run calls store_sum. Without a second sum there is no second kernel.
#pragma once

#include <initializer_list>
#include <iterator>
#include <utility>

#include "choice.h"
#include "loops/block_row.cuh"
#include "loops/multi_cta_row.cuh"
#include "loops/pipelined_row.cuh"
#include "loops/shared_row.cuh"
#include "loops/strided_row.cuh"

namespace flash_online::cuda {

// Base of operators that read rows of the input alone.
struct OneTensorOp {
  static constexpr int kTensors = 1;
  static constexpr bool kReduces = false, kSecondSum = false, kRare = false, kRowScalars = false;
  static constexpr bool kTargets = false, kSumsLosses = false;
  using State = RowState;
  __host__ __device__ static const ConstView3& tensor(const RowProblem& problem, int) { return problem.input; }
  __host__ __device__ static const MutableView3& result(const RowProblem& problem) { return problem.grad_input; }
  template <class Reader>
  __device__ static void store_partial(const RowProblem& problem, const Reader& reader) {
    reader.read(problem.input).store_partial(NoExtra{});
  }
};
// The same for an operator that reduces rows to their entropy too.
struct EntropyOp : OneTensorOp {
  using State = RowEntropyState;
  template <class Reader>
  __device__ static void store_partial(const RowProblem& problem, const Reader& reader) {
    reader.read(problem.input).template store_partial<RowEntropyState>(NoExtra{});
  }
};
template <class Op>
constexpr bool kHasEntropy = std::is_same_v<typename Op::State, RowEntropyState>;

// Logsumexp's result for a row that holds +inf: +inf, unless the row holds a NaN too. The sum is NaN in either case.
template <class Row>
__device__ __forceinline__ RowState resolve_infinity(const Row& row, RowState state) {
  const bool infinite = state.max == INFINITY;
  if (row.any_sharing_barrier(infinite) && row.count_nan() == 0 && infinite) state.sum = 1;
  return state;
}

static_assert(kRowVectorBytes == kVectorBytes);

// The operator as choice.h knows it.
template <class Op>
constexpr RowOperators row_operator() {
  if (Op::kReduces && Op::kRare) return kRareReduces;
  if (Op::kReduces) return Op::kTargets ? kReducesByTargets : kReduces;
  if (Op::kRare) return Op::kTargets ? kRareWritesByTargets : kRareWrites;
  if (Op::kTensors == 2) return kWritesFromTwo;
  if (Op::kTargets) return kWritesByTargets;
  return Op::kRowScalars ? kWritesByScalars : kWrites;
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
  static constexpr bool kMultiCta = false;
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
  static constexpr bool kMultiCta = false;
  const RowProblem& problem;
  RowCoord coord;
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3& view) const {
    return StridedRow<Group, T>(problem, view, coord);
  }
};
template <class T>
struct MultiCtaRowReader {
  using Element = T;
  static constexpr bool kMultiCta = true;
  const RowProblem& problem;
  RowCoord coord;
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3& view) const {
    return MultiCtaRow<T>(problem, view);
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

// The first and the second kernel of multi-CTA rows.
template <class Op, class T>
__global__ void __launch_bounds__(MultiCtaRowGroup::kThreads, kMultiCtaCtasPerSm)
    partial_kernel(const __grid_constant__ RowProblem problem) {
  Op::store_partial(problem, MultiCtaRowReader<T>{problem, multi_cta_row_coord(problem)});
}
template <class Op, class T, class R>
__global__ void __launch_bounds__(MultiCtaRowGroup::kThreads, kMultiCtaCtasPerSm)
    multi_cta_kernel(const __grid_constant__ RowProblem problem) {
  Op::template run<R>(problem, MultiCtaRowReader<T>{problem, multi_cta_row_coord(problem)});
}

constexpr int kFinishThreads = 128;

// Completes multi-CTA or pipelined rows from the Partials of their slices, one warp per row.
template <class Op, class T>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const __grid_constant__ SlicedProblem sliced) {
  const RowProblem& problem = sliced.problem;
  const int64_t rows = problem.outer * problem.inner, slices = sliced.slices_per_row;
  const int64_t index = (int64_t{blockIdx.x} * kFinishThreads + threadIdx.x) / kWarpSize;
  if (index >= rows) return;
  const Partial* partials = static_cast<const Partial*>(problem.workspace);
  grid_dependency_wait();
  const Partial* const own = partials + index * slices;
  const MergedSlices merged = kHasEntropy<Op> ? merge_entropy_slices(own, slices) : merge_slices(own, slices);
  const float sum = Op::kSecondSum ? merge_slices(partials + (rows + index) * slices, slices).extra : 0.0f;
  if (threadIdx.x % kWarpSize == 0)
    Op::template finish<T>(problem, RowCoord{index / problem.inner, index % problem.inner, index, true}, merged, sum);
}

// ---- launches

// The kernel for a rule of choice.h. False if there are more CTAs than a grid can have.
template <class Op, class T, class R, RowShape kShape, bool kWhole>
bool launch_rule(const RowProblem& problem, cudaStream_t stream) {
  if constexpr (kShape.in_registers) {
    using Group = RegisterRowGroup<kShape.threads_per_row, kShape.threads>;
    constexpr bool kWords = sizeof(T) == sizeof(float) && !kWhole && !Op::kRare;
    const int64_t ctas = ceil_div(problem.outer * problem.inner, Group::kRows);
    if (ctas > 0x7fffffff) return false;
    launch_dependent(register_kernel<Op, Group, kShape.vectors, T, R, kWords>, problem, static_cast<unsigned>(ctas),
                     Group::kThreads, stream);
  } else {
    constexpr bool kByVectors = kWhole && kShape.classes == 0;
    launch_block<Op, BlockRowGroup<kShape.threads_per_row, kShape.vectors, kShape.classes, kByVectors>, T, R>(problem, stream);
  }
  return true;
}

// The kernel for the rule of this number, which is compiled where an operator's rows can come to the rule.
template <class Op, class T, class R>
bool launch_by_rule(int rule, const RowProblem& problem, cudaStream_t stream) {
  const bool whole = is_whole(sizeof(T), problem.classes);
  bool launched = false;
  const auto launch_if = [&]<int kRule>() {
    if (rule != kRule) return false;
    constexpr RowOperators kOp = row_operator<Op>();
    constexpr bool kFloats = sizeof(T) == sizeof(float);
    constexpr bool kWholeRows = is_chosen(kRule, kOp, kFloats ? k32Whole : k16Whole);
    constexpr bool kOtherRows =
        kFloats ? is_chosen(kRule, kOp, k32Words) : is_chosen(kRule, kOp, k16Even) || is_chosen(kRule, kOp, k16Odd);
    if constexpr (kWholeRows)
      if (whole) launched = launch_rule<Op, T, R, kRules[kRule].shape, true>(problem, stream);
    if constexpr (kOtherRows)
      if (!whole) launched = launch_rule<Op, T, R, kRules[kRule].shape, false>(problem, stream);
    return true;
  };
  [&]<int... kRule>(std::integer_sequence<int, kRule...>) {
    (launch_if.template operator()<kRule>() || ...);
  }(std::make_integer_sequence<int, kRuleCount>{});
  return launched;
}

// What choose_shared asks of the current device.
inline RowDevice row_device() { return {largest_cluster(), shared_bytes_per_cta()}; }

// The kernel for rows in shared memory.
template <class Op, class T, class R>
void launch_by_shape(const SharedChoice& choice, const RowProblem& problem, cudaStream_t stream) {
  const auto launch_if = [&]<int kIndex>() {
    if (choice.shape != kIndex) return false;
    constexpr SharedShape kShape = kSharedShapes[kIndex];
    using Group = SharedRowGroup<kShape.threads, kShape.vectors, kShape.ctas_per_sm, kShape.cluster>;
    launch_shared_rows<Op, Group, T, R>(problem, choice.cluster, choice.vectors, stream);
    return true;
  };
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (launch_if.template operator()<kIndex>() || ...);
  }(std::make_integer_sequence<int, std::size(kSharedShapes)>{});
}

template <class Op, class T>
void launch_finish(const SlicedProblem& sliced, cudaStream_t stream) {
  const int64_t ctas = ceil_div(sliced.problem.outer * sliced.problem.inner, kFinishThreads / kWarpSize);
  launch_dependent(finish_kernel<Op, T>, sliced, static_cast<unsigned>(ctas), kFinishThreads, stream);
}

// The kernels for rows that are reduced in one pass through a pipeline; false if the operator or the device is not fit for it.
template <class Op, class T>
bool launch_pipelined(const RowProblem& problem, cudaStream_t stream) {
  if constexpr (Op::kReduces && !Op::kSecondSum) {
    const SlicedProblem sliced = pipelined_row_slices(problem, Type<T>{});
    if (!has_bulk_copy() || !sliced.is_countable()) return false;
    launch_pipelined_partial<T, typename Op::State>(sliced, stream);
    launch_finish<Op, T>(sliced, stream);
    return true;
  }
  return false;
}

// The kernels for multi-CTA rows, which need a workspace.
template <class Op, class T, class R>
void launch_multi_cta(const RowProblem& problem, cudaStream_t stream, const char* name) {
  const int64_t rows = problem.outer * problem.inner;
  const RowSlices slices = RowSlices::of(problem.classes, Type<T>{});
  const dim3 ctas(static_cast<unsigned>(rows), static_cast<unsigned>(slices.slices_per_row));
  partial_kernel<Op, T><<<ctas, MultiCtaRowGroup::kThreads, 0, stream>>>(problem);
  check_launch(name);
  if constexpr (!Op::kReduces || Op::kSecondSum) {
    multi_cta_kernel<Op, T, R><<<ctas, MultiCtaRowGroup::kThreads, 0, stream>>>(problem);
    check_launch(name);
  }
  if constexpr (Op::kReduces)
    launch_finish<Op, T>({.problem = problem,
                          .classes_per_slice = slices.classes_per_slice,
                          .slices_per_row = static_cast<unsigned>(slices.slices_per_row),
                          .total_slices = rows * slices.slices_per_row},
                         stream);
}

// Bytes of workspace for the multi-CTA rows of an operator that reads `tensors` tensors of a dtype; 0 for rows that stay on
// the chip.
inline int64_t workspace_of_rows(const RowProblem& problem, DType dtype, int tensors, bool reduces) {
  const int64_t bytes = size_of(dtype), vectors = ceil_div(problem.classes, kVectorBytes / bytes);
  const bool on_chip = reduces ? vectors <= kMostRuledVectors : choose_shared(vectors, tensors, row_device()).shape >= 0;
  if (on_chip) return 0;
  const RowSlices slices =
      dtype == DType::kFloat32 ? RowSlices::of(problem.classes, Type<float>{}) : RowSlices::of(problem.classes, Type<__half>{});
  return multi_cta_workspace(problem.outer * problem.inner, slices.slices_per_row);
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

// The kernels for rows of contiguous classes; false if there are none for this problem.
template <class Op, class T, class R>
bool launch_contiguous(const RowProblem& problem, cudaStream_t stream, const char* name) {
  const int64_t vectors = ceil_div(problem.classes, kPerVector<T>);
  const int rule = choose_rule(row_operator<Op>(), deal_of(sizeof(T), problem.classes), problem.classes, vectors);
  if (rule >= 0 && launch_by_rule<Op, T, R>(rule, problem, stream)) return true;
  if constexpr (!Op::kReduces) {
    const SharedChoice choice = choose_shared(vectors, Op::kTensors, row_device());
    if (choice.shape >= 0) return launch_by_shape<Op, T, R>(choice, problem, stream), true;
  }
  if (launch_pipelined<Op, T>(problem, stream)) return true;
  if (problem.workspace == nullptr) return false;
  launch_multi_cta<Op, T, R>(problem, stream, name);
  return true;
}

// Queues an operator's kernels. `contiguous`: the classes of a row are neighbours in memory in every tensor of the problem.
template <class Op, class T, class R>
void launch_rows(const RowProblem& problem, bool contiguous, cudaStream_t stream, const char* name) {
  if (contiguous && problem.classes != 0 && launch_contiguous<Op, T, R>(problem, stream, name)) return check_launch(name);
  launch_strided<Op, T, R>(problem, stream, name);
}

}  // namespace flash_online::cuda
