// Code shared by the row operators: checks, a RowProblem made from tensors, and the run of its kernel on each device. A tensor
// of any strides is read as [outer, classes, inner] in place; it is copied only if the dimensions on one side of dim do not
// share one stride.
#pragma once

#include <functional>
#include <limits>
#include <numeric>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "../core/row_problem.h"
#include "../cpu/kernels.h"
#include "../cuda/rows/float64.h"
#include "../cuda/rows/rows.h"
#include "cuda_call.h"
#include "tensor.h"

namespace flash_online::ops {

// The one stride that steps through dimensions [begin, end) in row-major order, if there is one.
inline std::optional<int64_t> common_stride(const Tensor& tensor, int64_t begin, int64_t end) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t stride = 0, next = 0;
  bool found = false;
  for (int64_t i = end - 1; i >= begin; --i) {
    if (sizes[i] == 1) continue;
    if (!found)
      stride = strides[i];
    else if (strides[i] != next)
      return std::nullopt;
    next = strides[i] * sizes[i];
    found = true;
  }
  return stride;
}

// Reads a tensor as [outer, classes, inner] around dim; replaces it by a contiguous copy where its strides forbid that.
template <class View = ConstView3>
View view_of(Tensor& tensor, int64_t dim) {
  std::optional<int64_t> outer = common_stride(tensor, 0, dim), inner = common_stride(tensor, dim + 1, tensor.dim());
  if (!outer || !inner) {
    tensor = as_contiguous(tensor);
    outer = common_stride(tensor, 0, dim);
    inner = common_stride(tensor, dim + 1, tensor.dim());
  }
  View view{};
  view.data = static_cast<decltype(view.data)>(tensor.data_ptr());
  view.stride[0] = *outer;
  view.stride[1] = tensor.stride(dim);
  view.stride[2] = *inner;
  return view;
}

inline void check_dim(const Tensor& input, int64_t dim) {
  check(input.dim() >= 1, "input: expected a tensor of at least 1 dimension, got 0");
  check(dim >= 0 && dim < input.dim(), "dim: expected 0 to ", input.dim() - 1, " for an input of shape ", shape_of(input),
        ", got ", dim);
}

inline void check_like(const Tensor& tensor, const char* name, const std::vector<int64_t>& sizes, ScalarType type,
                       const Tensor& other) {
  check(has_sizes(tensor, sizes), name, ": expected shape ", Sizes{sizes}, ", got ", shape_of(tensor));
  check(tensor.scalar_type() == type, name, ": expected dtype ", name_of(type), ", got ", name_of(tensor.scalar_type()));
  check_device(tensor, name, other, "the other tensors");
}

inline void check_result_dtype(const char* name, ScalarType result, ScalarType input) {
  const bool is_16_bit = input == ScalarType::Half || input == ScalarType::BFloat16;
  check(result == input || (is_16_bit && result == ScalarType::Float), name, ": expected the input's dtype, ", name_of(input),
        is_16_bit ? ", or float32" : "", ", got ", name_of(result));
}

inline std::vector<int64_t> without_dim(std::vector<int64_t> sizes, int64_t dim) {
  sizes.erase(sizes.begin() + dim);
  return sizes;
}

inline std::vector<int64_t> with_dim_size(std::vector<int64_t> sizes, int64_t dim, int64_t size) {
  sizes[dim] = size;
  return sizes;
}

inline RowProblem row_problem(const std::vector<int64_t>& sizes, int64_t dim, ScalarType type, ScalarType result_type) {
  RowProblem problem;
  problem.dtype = dtype_of(type);
  problem.result_dtype = dtype_of(result_type);
  const auto product = [](auto begin, auto end) { return std::accumulate(begin, end, int64_t{1}, std::multiplies<>()); };
  problem.outer = product(sizes.begin(), sizes.begin() + dim);
  problem.classes = sizes[dim];
  problem.inner = product(sizes.begin() + dim + 1, sizes.end());
  return problem;
}

// Asks for large pages under a large new result on the CPU. From 32 MiB on the C library maps fresh memory for every tensor,
// and page faults of 4 KiB each then take longer than the row kernels do. It is only advice, which the operating system may
// ignore.
inline void use_large_pages([[maybe_unused]] const Tensor& result) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  const int64_t bytes = result.numel() * size_of(dtype_of(result));
  if (bytes < int64_t{32} << 20) return;
  const uintptr_t data = reinterpret_cast<uintptr_t>(result.data_ptr());
  const uintptr_t begin = (data + kPage - 1) / kPage * kPage, end = (data + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// The devices of row operators: kernels() is the table of a device's kernels, run() runs one of them on the device of `like`,
// and empty_rows() makes a result as large as the input.
struct RowsOnCpu : Cpu {
  static constexpr bool kNarrowRowScalars = false;  // whether logsumexp has lse and its gradient in 16 bits too
  static constexpr int64_t kMostTopkClasses = std::numeric_limits<int64_t>::max();

  static const cpu::RowKernels& kernels() { return cpu::kernels().rows; }

  using Kernel = void (*)(const RowProblem&, const cpu::Executor&);
  static void run(Kernel kernel, const RowProblem& problem, const Tensor& like) {
    const int64_t elements = problem.outer * problem.classes * problem.inner, grain = row_grain(problem);
    const cpu::Memory memory{.scratch = kernels().scratch(problem)};
    kernel(problem, CpuExecutor((elements + grain - 1) / grain, memory, like));
  }

  static Tensor empty_rows(const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like) {
    const Tensor result = empty(sizes, type, like);
    use_large_pages(result);
    return result;
  }
};

struct RowsOnCuda : Cuda {
  static constexpr bool kNarrowRowScalars = true;
  static constexpr int64_t kMostTopkClasses = 0xfffffffe;  // of topk_softmax_forward: its keys hold a class in 32 bits

  struct Kernel {
    void (*run)(const RowProblem&, CUstream_st*);
    int64_t (*workspace)(const RowProblem&);  // in bytes
    void (*run_float64)(const RowProblem&, CUstream_st*);  // without a workspace
  };
  struct Kernels {
    Kernel softmax{cuda::softmax, cuda::rows_workspace, cuda::float64::softmax};
    Kernel softmax_backward{cuda::softmax_backward, cuda::softmax_backward_workspace, cuda::float64::softmax_backward};
    Kernel logsumexp{cuda::logsumexp, cuda::reduce_workspace, cuda::float64::logsumexp};
    Kernel logsumexp_backward{cuda::logsumexp_backward, cuda::rows_workspace, cuda::float64::logsumexp_backward};
    Kernel cross_entropy{cuda::cross_entropy, cuda::reduce_workspace, cuda::float64::cross_entropy};
    Kernel cross_entropy_backward{cuda::cross_entropy_backward, cuda::rows_workspace, cuda::float64::cross_entropy_backward};
    Kernel topk_softmax{cuda::topk_softmax, cuda::topk_workspace, cuda::float64::topk_softmax};
    Kernel topk_softmax_backward{cuda::topk_softmax_backward, cuda::rows_workspace, cuda::float64::topk_softmax_backward};
  };
  static constexpr Kernels kernels() { return {}; }

  static void run(const Kernel& kernel, const RowProblem& problem, const Tensor& like) {
    CudaCall call(like);
    run(kernel, problem, call);
  }
  static void run(const Kernel& kernel, RowProblem problem, CudaCall& call) {
    if (problem.dtype == DType::kFloat64) return kernel.run_float64(problem, call.stream());
    problem.workspace = call.workspace(kernel.workspace(problem));
    kernel.run(problem, call.stream());
  }

  static Tensor empty_rows(const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like) {
    return empty(sizes, type, like);
  }
};

}  // namespace flash_online::ops
