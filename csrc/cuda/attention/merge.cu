// The merge of partial results of attention over disjoint keys, and its gradients: Milakov and Gimelshein, arXiv 1805.02867,
// section 3.1, applied to the output as well. csrc/cpu/attention/merge.cpp has the formulas.
//
// A group of 1 to 32 lanes takes a row. It reads the row's lse of every partial, and then passes over the partials' outputs
// once.
#include <algorithm>

#include "../../core/integer.h"
#include "../../core/online_softmax.h"
#include "../../core/visit.h"
#include "../hw/launch.h"
#include "../hw/vector.cuh"
#include "attention.h"

namespace flash_online::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kPartialsAtOnce = 4;  // a lane reads their outputs before it adds any

// Up to this many partials are kernel arguments. More would not fit, and a copy from the host could not be captured in a CUDA
// graph, since it would read the host's memory again whenever the graph runs: small kernels write a table of the partials
// instead.
constexpr int kPartialsPerLaunch = 32;

struct MergeArguments {
  MergeProblem problem;  // problem.partial: the table; null if the partials are in `partial`
  MergeGradients gradients;
  int lanes;  // per row, a power of two
  MergePartial partial[kPartialsPerLaunch];
};

struct TableArguments {
  MergePartial* table;
  int count;
  MergePartial partial[kPartialsPerLaunch];
};

__global__ void fill_merge_table(const __grid_constant__ TableArguments arguments) {
  if (static_cast<int>(threadIdx.x) < arguments.count) arguments.table[threadIdx.x] = arguments.partial[threadIdx.x];
}

// The type of sums, shares and lse.
template <class T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

// kWidth elements of a row in one access: a vector of 16 bytes, or one element.
template <class T, int kWidth>
__device__ __forceinline__ void load_columns(const T* from, Sum<T> (&x)[kWidth]) {
  if constexpr (std::is_same_v<T, double>)
    x[0] = *from;
  else if constexpr (kWidth == 1)
    x[0] = widen(*from);
  else
    unpack<T>(*reinterpret_cast<const uint4*>(from), x);
}
template <class T, int kWidth>
__device__ __forceinline__ void store_columns(T* to, const Sum<T> (&x)[kWidth]) {
  if constexpr (std::is_same_v<T, double>)
    *to = x[0];
  else if constexpr (kWidth == 1)
    *to = narrow<T>(x[0]);
  else
    *reinterpret_cast<uint4*>(to) = pack<T>(x);
}

// The state of a group of lanes for its row. share(n) is the share of partial n's row in the merged row: 0 for an empty
// partial, whatever its row holds.
template <class T>
struct MergeRow {
  const MergePartial* partial;
  int64_t partials, row, lse_at;
  OnlineSoftmax<Sum<T>> state;
  Sum<T> inverse_sum;

  __device__ __forceinline__ MergeRow(const MergeArguments& arguments, int64_t row_)
      : partial(arguments.problem.partial ? arguments.problem.partial : arguments.partial),
        partials(arguments.problem.partials),
        row(row_),
        lse_at(lse_row(arguments.problem, row_)) {
    for (int64_t n = 0; n < partials; ++n) state.absorb(lse(n));
    inverse_sum = state.inverse_sum_or_zero();
  }
  __device__ __forceinline__ Sum<T> lse(int64_t n) const { return static_cast<const Sum<T>*>(partial[n].lse)[lse_at]; }
  __device__ __forceinline__ Sum<T> share(int64_t n) const { return state.weight(lse(n)) * inverse_sum; }
  __device__ __forceinline__ const T* out(int64_t n) const {
    return static_cast<const T*>(partial[n].out) + row * partial[n].row_stride;
  }
};

// Calls f(row, is_row) in every lane of a warp as often as in the others. Where a group of lanes has no row left, is_row is
// false and `row` the last one.
template <class F>
__device__ __forceinline__ void for_each_row(const MergeArguments& arguments, F&& f) {
  const int64_t rows = arguments.problem.rows, rows_per_cta = kThreads / arguments.lanes,
                rows_per_warp = kWarpSize / arguments.lanes, group = threadIdx.x % kWarpSize / arguments.lanes;
  for (int64_t first = blockIdx.x * rows_per_cta + threadIdx.x / kWarpSize * rows_per_warp; first < rows;
       first += gridDim.x * rows_per_cta)
    f(min(first + group, rows - 1), first + group < rows);
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) merge(const __grid_constant__ MergeArguments arguments) {
  const MergeProblem& problem = arguments.problem;
  const int lane = static_cast<int>(threadIdx.x) % arguments.lanes;
  for_each_row(arguments, [&](int64_t index, bool is_row) {
    const MergeRow<T> row(arguments, index);
    if (!is_row) return;
    if (lane == 0) static_cast<Sum<T>*>(problem.lse)[index] = row.state.lse();
    for (int64_t column = lane * kWidth; column < problem.head_dim; column += arguments.lanes * kWidth) {
      Sum<T> sum[kWidth] = {};
      for (int64_t first = 0; first < row.partials; first += kPartialsAtOnce) {
        Sum<T> share[kPartialsAtOnce], x[kPartialsAtOnce][kWidth] = {};
#pragma unroll
        for (int n = 0; n < kPartialsAtOnce; ++n) {
          share[n] = first + n < row.partials ? row.share(first + n) : 0;
          if (share[n] != 0) load_columns<T>(row.out(first + n) + column, x[n]);
        }
#pragma unroll
        for (int n = 0; n < kPartialsAtOnce; ++n)
#pragma unroll
          for (int e = 0; e < kWidth; ++e) sum[e] = ::fma(share[n], x[n][e], sum[e]);
      }
      store_columns(static_cast<T*>(problem.out) + index * problem.head_dim + column, sum);
    }
  });
}

// One pass over the outputs: it leaves grad_out . out_n where the gradient of lse_n belongs, and that is completed once the sum
// of these products over all partials, grad_out . out, is known.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) merge_backward(const __grid_constant__ MergeArguments arguments) {
  const MergeProblem& problem = arguments.problem;
  const int lane = static_cast<int>(threadIdx.x) % arguments.lanes;
  for_each_row(arguments, [&](int64_t index, bool is_row) {
    const MergeRow<T> row(arguments, index);
    const T* const grad_out = static_cast<const T*>(arguments.gradients.grad_out) + index * problem.head_dim;
    Sum<T> dot_out = 0;
    for (int64_t n = 0; n < row.partials; ++n) {
      const Sum<T> share = row.share(n);
      Sum<T> dot = 0;
      for (int64_t column = lane * kWidth; column < problem.head_dim; column += arguments.lanes * kWidth) {
        Sum<T> x[kWidth] = {}, gradient[kWidth] = {};
        if (share != 0) {
          load_columns<T>(row.out(n) + column, x);
          load_columns<T>(grad_out + column, gradient);
        }
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          dot = ::fma(gradient[e], x[e], dot);
          gradient[e] *= share;
        }
        if (is_row) store_columns(static_cast<T*>(row.partial[n].grad_out) + index * problem.head_dim + column, gradient);
      }
      for (int step = arguments.lanes / 2; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
      if (share != 0) dot_out = ::fma(share, dot, dot_out);
      if (is_row && lane == 0) static_cast<Sum<T>*>(row.partial[n].grad_lse)[index] = dot;
    }
    __syncwarp();  // lane 0's products are there for the other lanes
    if (!is_row) return;
    const Sum<T> grad_lse = static_cast<const Sum<T>*>(arguments.gradients.grad_lse)[index];
    for (int64_t n = lane; n < row.partials; n += arguments.lanes) {
      const Sum<T> share = row.share(n);
      Sum<T>& to = static_cast<Sum<T>*>(row.partial[n].grad_lse)[index];
      to = share != 0 ? share * (to - dot_out + grad_lse) : 0;
    }
  });
}

// True if rows of all of these begin at multiples of 16 bytes.
template <class T>
bool has_vectors(const MergeProblem& problem, const MergeGradients& gradients) {
  const auto is_aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0; };
  return problem.head_dim % kPerVector<T> == 0 && is_aligned(problem.out) && is_aligned(gradients.grad_out) &&
         std::all_of(problem.partial, problem.partial + problem.partials, [&](const MergePartial& partial) {
           return partial.column_stride == 1 && partial.row_stride % kPerVector<T> == 0 && is_aligned(partial.out) &&
                  is_aligned(partial.grad_out);
         });
}

// Calls launch(Type<T>, width of an access) for the problem's dtype.
template <class F>
void visit(const MergeProblem& problem, const MergeGradients& gradients, F&& launch) {
  const auto visit_width = [&]<class T>(Type<T> type) {
    if constexpr (!std::is_same_v<T, double>)
      if (has_vectors<T>(problem, gradients)) return launch(type, std::integral_constant<int, kPerVector<T>>{});
    launch(type, std::integral_constant<int, 1>{});
  };
  switch (problem.dtype) {
    case DType::kFloat16: return visit_width(Type<__half>{});
    case DType::kBFloat16: return visit_width(Type<__nv_bfloat16>{});
    case DType::kFloat64: return visit_width(Type<double>{});
    default: return visit_width(Type<float>{});
  }
}

MergeArguments arguments_of(const MergeProblem& problem, const MergeGradients& gradients, int width, void* workspace,
                            CUstream_st* stream) {
  MergeArguments arguments{.problem = problem, .gradients = gradients, .lanes = 1, .partial = {}};
  while (arguments.lanes < kWarpSize && arguments.lanes * width < problem.head_dim) arguments.lanes *= 2;
  arguments.problem.partial = nullptr;
  if (problem.partials <= kPartialsPerLaunch) {
    std::copy_n(problem.partial, problem.partials, arguments.partial);
    return arguments;
  }
  MergePartial* const table = static_cast<MergePartial*>(workspace);
  for (int64_t first = 0; first < problem.partials; first += kPartialsPerLaunch) {
    TableArguments some{.table = table + first,
                        .count = static_cast<int>(std::min<int64_t>(problem.partials - first, kPartialsPerLaunch)),
                        .partial = {}};
    std::copy_n(problem.partial + first, some.count, some.partial);
    launch<fill_merge_table>(some, 1, kPartialsPerLaunch, 0, stream);
  }
  arguments.problem.partial = table;
  return arguments;
}

unsigned ctas_of(const MergeArguments& arguments) {
  return grid_for(ceil_div(arguments.problem.rows, int64_t{kThreads / arguments.lanes}), 8);
}

}  // namespace

int64_t attention_merge_workspace(const MergeProblem& problem) {
  return problem.partials <= kPartialsPerLaunch ? 0 : problem.partials * static_cast<int64_t>(sizeof(MergePartial));
}

void attention_merge(const MergeProblem& problem, void* workspace, CUstream_st* stream) {
  if (problem.rows == 0) return;
  visit(problem, {}, [&]<class T>(Type<T>, auto width) {
    const MergeArguments arguments = arguments_of(problem, {}, width(), workspace, stream);
    launch<merge<T, width()>>(arguments, ctas_of(arguments), kThreads, 0, stream);
  });
}

void attention_merge_backward(const MergeProblem& problem, const MergeGradients& gradients, void* workspace,
                              CUstream_st* stream) {
  if (problem.rows == 0) return;
  visit(problem, gradients, [&]<class T>(Type<T>, auto width) {
    const MergeArguments arguments = arguments_of(problem, gradients, width(), workspace, stream);
    launch<merge_backward<T, width()>>(arguments, ctas_of(arguments), kThreads, 0, stream);
  });
}

}  // namespace flash_online::cuda
