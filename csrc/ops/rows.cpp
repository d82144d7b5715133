// The row operators: checks, RowProblem, then cpu:: or cuda::. A tensor of any strides is read as [outer, classes, inner]
// where it stands; it is copied only if the dimensions on one side of dim do not share one stride.
#include "../core/rows.h"

#include <array>
#include <functional>
#include <numeric>
#include <tuple>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "../cpu/kernels.h"
#include "tensor.h"

#ifdef FLASH_ONLINE_CUDA
#include "../cuda/rows/rows.h"
#include "cuda_call.h"
#else
struct CUstream_st;
#endif

namespace flash_online::ops {

namespace {

// The one stride that walks dimensions [begin, end) in row-major order, if there is one.
std::optional<int64_t> common_stride(const Tensor& tensor, int64_t begin, int64_t end) {
  int64_t stride = 0, next = 0;
  bool found = false;
  for (int64_t i = end - 1; i >= begin; --i) {
    const int64_t size = tensor.size(i);
    if (size == 1) continue;
    if (!found)
      stride = tensor.stride(i);
    else if (tensor.stride(i) != next)
      return std::nullopt;
    next = tensor.stride(i) * size;
    found = true;
  }
  return stride;
}

// Reads a tensor as [outer, classes, inner] around dim; replaces it by a contiguous copy where its strides forbid that.
template <class View = ConstView3>
View view_of(Tensor& tensor, int64_t dim) {
  std::optional<int64_t> outer = common_stride(tensor, 0, dim), inner = common_stride(tensor, dim + 1, tensor.dim());
  if (!outer || !inner) {
    tensor = torch::stable::contiguous(tensor);
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

std::string text_of(const std::vector<int64_t>& sizes) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << ']';
  return text.str();
}

void check_dim(const Tensor& input, int64_t dim) {
  check(input.dim() >= 1, "input: at least 1 dimension is needed, got a tensor of none");
  check(dim >= 0 && dim < input.dim(), "dim: must lie in [0, ", input.dim() - 1, "] for an input of shape ", shape_of(input),
        ", got ", dim);
}

void check_like(const Tensor& tensor, const char* name, const std::vector<int64_t>& sizes, ScalarType type,
                const Tensor& beside) {
  check(sizes_of(tensor) == sizes, name, ": the shape must be ", text_of(sizes), ", got ", shape_of(tensor));
  check(tensor.scalar_type() == type, name, ": the dtype must be ", name_of(type), ", got ", name_of(tensor.scalar_type()));
  check(tensor.is_cuda() == beside.is_cuda() && tensor.get_device_index() == beside.get_device_index(), name,
        ": must be on the device of the other tensors");
}

void check_result_dtype(const char* name, ScalarType result, ScalarType input) {
  const bool half = input == ScalarType::Half || input == ScalarType::BFloat16;
  check(result == input || (half && result == ScalarType::Float), name, ": got ", name_of(result),
        "; accepted are the input's, ", name_of(input), half ? ", and float32" : "");
}

std::vector<int64_t> without(std::vector<int64_t> sizes, int64_t dim) {
  sizes.erase(sizes.begin() + dim);
  return sizes;
}

std::vector<int64_t> with_size(std::vector<int64_t> sizes, int64_t dim, int64_t size) {
  sizes[dim] = size;
  return sizes;
}

RowProblem problem_of(const std::vector<int64_t>& sizes, int64_t dim, ScalarType type, ScalarType result_type) {
  RowProblem problem;
  problem.dtype = dtype_of(type);
  problem.result_dtype = dtype_of(result_type);
  const auto product = [](auto begin, auto end) { return std::accumulate(begin, end, int64_t{1}, std::multiplies<>()); };
  problem.outer = product(sizes.begin(), sizes.begin() + dim);
  problem.classes = sizes[dim];
  problem.inner = product(sizes.begin() + dim + 1, sizes.end());
  return problem;
}

// Asks for large pages under a large new result. From 32 MiB on the C library maps memory anew for every tensor, and to have it
// mapped 4 KiB at a time takes longer than the kernels do. Only advice: the kernel may not take it.
void use_large_pages([[maybe_unused]] const Tensor& result) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  const int64_t bytes = result.numel() * size_of(dtype_of(result));
  if (result.is_cuda() || bytes < int64_t{32} << 20) return;
  const uintptr_t data = reinterpret_cast<uintptr_t>(result.data_ptr());
  const uintptr_t begin = (data + kPage - 1) / kPage * kPage, end = (data + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

using RowKernel = void (*)(const RowProblem&, const cpu::Executor&);

void run_on_cpu(RowKernel kernel, const RowProblem& problem, const Tensor& like) {
  const int64_t elements = problem.outer * problem.classes * problem.inner;
  const cpu::Memory memory{.scratch = cpu::kernels().rows.scratch(problem)};
  kernel(problem, CpuExecutor((elements + kRowGrain - 1) / kRowGrain, memory, like));
}

// The CUDA kernels of a build that has them.
using CudaRowKernel = void (*)(const RowProblem&, CUstream_st*);
using CudaWorkspace = int64_t (*)(const RowProblem&);
struct CudaRows {
  struct Kernel {
    CudaRowKernel run = nullptr;
    CudaWorkspace workspace = nullptr;
  };
  Kernel softmax, softmax_backward, logsumexp, logsumexp_backward, cross_entropy, cross_entropy_backward, topk_softmax,
      topk_softmax_backward;
};
constexpr CudaRows kCudaRows = {
#ifdef FLASH_ONLINE_CUDA
    .softmax = {cuda::softmax, cuda::rows_workspace},
    .softmax_backward = {cuda::softmax_backward, cuda::softmax_backward_workspace},
    .logsumexp = {cuda::logsumexp, cuda::reduce_workspace},
    .logsumexp_backward = {cuda::logsumexp_backward, cuda::rows_workspace},
    .cross_entropy = {cuda::cross_entropy, cuda::reduce_workspace},
    .cross_entropy_backward = {cuda::cross_entropy_backward, cuda::rows_workspace},
    .topk_softmax = {cuda::topk_softmax, cuda::topk_workspace},
    .topk_softmax_backward = {cuda::topk_softmax_backward, cuda::rows_workspace},
#endif
};

// Where the tensors are.
void run(RowKernel on_cpu, [[maybe_unused]] const CudaRows::Kernel& on_cuda, RowProblem problem, const Tensor& like) {
  if (!like.is_cuda()) return run_on_cpu(on_cpu, problem, like);
#ifdef FLASH_ONLINE_CUDA
  CudaCall call(like);
  problem.workspace = call.workspace(on_cuda.workspace(problem));
  on_cuda.run(problem, call.stream());
#endif
}

void check_cuda_dtype(const Tensor& tensor, const char* name) {
  check(!tensor.is_cuda() || tensor.scalar_type() != ScalarType::Double, name,
        ": float64 is not supported on CUDA; accepted are float16, bfloat16 and float32");
}

// softmax, log-softmax

struct SoftmaxCall {
  RowProblem problem;
  Tensor result;
};

SoftmaxCall prepare_softmax(Tensor& input, int64_t dim, bool log, ScalarType dtype) {
  check_floating(input, "input");
  check_cuda_dtype(input, "input");
  check_dim(input, dim);
  check_result_dtype("dtype", dtype, input.scalar_type());
  SoftmaxCall call{problem_of(sizes_of(input), dim, input.scalar_type(), dtype), empty(sizes_of(input), dtype, input)};
  call.problem.log = log;
  call.problem.input = view_of(input, dim);
  call.problem.result = view_of<MutableView3>(call.result, dim);
  return call;
}

Tensor softmax_forward(Tensor input, int64_t dim, bool log, ScalarType dtype) {
  const SoftmaxCall call = prepare_softmax(input, dim, log, dtype);
  use_large_pages(call.result);
  run(cpu::kernels().rows.softmax, kCudaRows.softmax, call.problem, input);
  return call.result;
}

SoftmaxCall prepare_softmax_backward(Tensor& grad, Tensor& output, int64_t dim, bool log, ScalarType input_dtype) {
  check_floating(output, "output");
  check_cuda_dtype(output, "output");
  check_dim(output, dim);
  check_result_dtype("output", output.scalar_type(), input_dtype);
  check_like(grad, "grad", sizes_of(output), output.scalar_type(), output);
  SoftmaxCall call{problem_of(sizes_of(output), dim, input_dtype, output.scalar_type()),
                   empty(sizes_of(output), input_dtype, output)};
  call.problem.log = log;
  call.problem.grad = view_of(grad, dim);
  call.problem.output = view_of(output, dim);
  call.problem.grad_input = view_of<MutableView3>(call.result, dim);
  return call;
}

Tensor softmax_backward(Tensor grad, Tensor output, int64_t dim, bool log, ScalarType input_dtype) {
  const SoftmaxCall call = prepare_softmax_backward(grad, output, dim, log, input_dtype);
  use_large_pages(call.result);
  run(cpu::kernels().rows.softmax_backward, kCudaRows.softmax_backward, call.problem, output);
  return call.result;
}

// logsumexp

Tensor logsumexp_forward(Tensor input, int64_t dim) {
  check_floating(input, "input");
  check_cuda_dtype(input, "input");
  check_dim(input, dim);
  const ScalarType type = input.scalar_type();
  Tensor lse = empty(without(sizes_of(input), dim), accumulator_of(type), input);
  RowProblem problem = problem_of(sizes_of(input), dim, type, type);
  problem.input = view_of(input, dim);
  problem.lse = lse.data_ptr();
  run(cpu::kernels().rows.logsumexp, kCudaRows.logsumexp, problem, input);
  return lse;
}

Tensor logsumexp_backward(Tensor grad, Tensor input, int64_t dim) {
  check_floating(input, "input");
  check_cuda_dtype(input, "input");
  check_dim(input, dim);
  const ScalarType type = input.scalar_type();
  check_like(grad, "grad", without(sizes_of(input), dim), accumulator_of(type), input);
  grad = torch::stable::contiguous(grad);
  Tensor grad_input = empty(sizes_of(input), type, input);
  RowProblem problem = problem_of(sizes_of(input), dim, type, type);
  problem.input = view_of(input, dim);
  problem.grad_lse = grad.data_ptr();
  problem.grad_input = view_of<MutableView3>(grad_input, dim);
  use_large_pages(grad_input);
  run(cpu::kernels().rows.logsumexp_backward, kCudaRows.logsumexp_backward, problem, input);
  return grad_input;
}

// cross-entropy: the classes are dimension 1

// What both directions share. The tensors are replaced by copies where the kernels need them contiguous.
RowProblem prepare_cross_entropy(Tensor& input, Tensor& target, std::optional<Tensor>& weight, int64_t ignore_index,
                                 double label_smoothing) {
  check_floating(input, "input");
  check_cuda_dtype(input, "input");
  check(input.dim() >= 2, "input: the shape must be [N, C, ...], got ", shape_of(input));
  check(label_smoothing >= 0 && label_smoothing <= 1, "label_smoothing: must lie in [0, 1], got ", label_smoothing);
  const ScalarType type = input.scalar_type();
  RowProblem problem = problem_of(sizes_of(input), 1, type, type);
  problem.input = view_of(input, 1);
  if (target.scalar_type() == ScalarType::Long) {
    check_like(target, "target", without(sizes_of(input), 1), ScalarType::Long, input);
    target = torch::stable::contiguous(target);
    problem.target = static_cast<const int64_t*>(target.data_ptr());
  } else {
    check(target.scalar_type() == type, "target: the dtype must be int64 (classes) or the input's, ", name_of(type),
          " (probabilities); got ", name_of(target.scalar_type()));
    check_like(target, "target", sizes_of(input), type, input);
    problem.target_probabilities = view_of(target, 1);
  }
  if (weight) {
    check_like(*weight, "weight", {problem.classes}, accumulator_of(type), input);
    weight = torch::stable::contiguous(*weight);
    problem.weight = weight->data_ptr();
  }
  problem.ignore_index = ignore_index;
  problem.label_smoothing = label_smoothing;
  return problem;
}

// On CUDA a target out of range is a device assert: nothing waits for the device to look.
void run_cross_entropy(RowKernel on_cpu, const CudaRows::Kernel& on_cuda, RowProblem& problem, const Tensor& input) {
  int64_t bad_row = -1;
  problem.bad_row = &bad_row;
  run(on_cpu, on_cuda, problem, input);
  check(bad_row < 0, "target: ", bad_row < 0 ? 0 : problem.target[bad_row], " is out of bounds; accepted are 0 to ",
        problem.classes - 1, " and ignore_index, ", problem.ignore_index);
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy_forward(Tensor input, Tensor target, std::optional<Tensor> weight,
                                                         int64_t ignore_index, double label_smoothing) {
  RowProblem problem = prepare_cross_entropy(input, target, weight, ignore_index, label_smoothing);
  const std::vector<int64_t> rows = without(sizes_of(input), 1);
  const ScalarType type = accumulator_of(input.scalar_type());
  Tensor loss = empty(rows, type, input), lse = empty(rows, type, input), row_weight = empty(rows, type, input);
  problem.loss = loss.data_ptr();
  problem.lse = lse.data_ptr();
  problem.row_weight = row_weight.data_ptr();
  run_cross_entropy(cpu::kernels().rows.cross_entropy, kCudaRows.cross_entropy, problem, input);
  return {loss, lse, row_weight};
}

// On the CPU: the losses of rows as one number, and what their sum is divided by.
template <class T>
void reduce_losses(const RowProblem& problem, bool mean, Tensor& result, Tensor& divisor) {
  const int64_t rows = problem.outer * problem.inner;
  const auto sum = [&](const void* of_rows) {
    const T* numbers = static_cast<const T*>(of_rows);
    return std::accumulate(numbers, numbers + rows, 0.0);
  };
  const double over = mean ? sum(problem.row_weight) : 1.0;
  Tensor wide = empty({}, ScalarType::Double, result);
  *static_cast<double*>(wide.data_ptr()) = sum(problem.loss) / over;
  torch::stable::copy_(result, wide);
  *static_cast<T*>(divisor.data_ptr()) = static_cast<T>(over);
}

// And back: the gradient of each row's loss.
template <class T>
void share_grad(const Tensor& grad, const Tensor& divisor, Tensor& of_rows) {
  Tensor wide = empty({}, ScalarType::Double, grad);
  torch::stable::copy_(wide, grad);
  const double share = *static_cast<const double*>(wide.data_ptr()) / *static_cast<const T*>(divisor.data_ptr());
  std::fill_n(static_cast<T*>(of_rows.data_ptr()), of_rows.numel(), static_cast<T>(share));
}

std::tuple<Tensor, Tensor> cross_entropy_loss(Tensor input, Tensor target, std::optional<Tensor> weight, int64_t ignore_index,
                                              double label_smoothing, bool mean, ScalarType dtype) {
  RowProblem problem = prepare_cross_entropy(input, target, weight, ignore_index, label_smoothing);
  check_result_dtype("dtype", dtype, input.scalar_type());
  const ScalarType type = accumulator_of(input.scalar_type());
  const int64_t rows = problem.outer * problem.inner;
  Tensor result = empty({}, dtype, input), divisor = empty({}, type, input);
  Tensor loss = empty({rows}, type, input), row_weight = empty({rows}, type, input);
  problem.loss = loss.data_ptr();
  problem.row_weight = row_weight.data_ptr();
  problem.result_dtype = dtype_of(dtype);
  std::optional<Tensor> lse;
  if (!input.is_cuda()) problem.lse = lse.emplace(empty({rows}, type, input)).data_ptr();
  run_cross_entropy(cpu::kernels().rows.cross_entropy, kCudaRows.cross_entropy, problem, input);
  if (!input.is_cuda()) {
    if (type == ScalarType::Double)
      reduce_losses<double>(problem, mean, result, divisor);
    else
      reduce_losses<float>(problem, mean, result, divisor);
    return {result, divisor};
  }
#ifdef FLASH_ONLINE_CUDA
  CudaCall call(input);
  void* const workspace = call.workspace(cuda::reduce_losses_workspace(rows));
  cuda::reduce_losses(problem, mean, result.data_ptr(), divisor.data_ptr(), workspace, call.stream());
#endif
  return {result, divisor};
}

Tensor cross_entropy_loss_backward(Tensor grad, Tensor divisor, Tensor input, Tensor target, std::optional<Tensor> weight,
                                   int64_t ignore_index, double label_smoothing) {
  RowProblem problem = prepare_cross_entropy(input, target, weight, ignore_index, label_smoothing);
  const ScalarType type = input.scalar_type(), accumulator = accumulator_of(type);
  check_result_dtype("grad", grad.scalar_type(), type);
  check_like(grad, "grad", {}, grad.scalar_type(), input);
  check_like(divisor, "divisor", {}, accumulator, input);
  Tensor grad_input = empty(sizes_of(input), type, input), grad_loss = grad;
  if (input.is_cuda()) {
    problem.divisor = divisor.data_ptr();
    problem.result_dtype = dtype_of(grad);
  } else {
    grad_loss = empty({problem.outer * problem.inner}, accumulator, input);
    if (accumulator == ScalarType::Double)
      share_grad<double>(grad, divisor, grad_loss);
    else
      share_grad<float>(grad, divisor, grad_loss);
  }
  problem.grad_loss = grad_loss.data_ptr();
  problem.grad_input = view_of<MutableView3>(grad_input, 1);
  use_large_pages(grad_input);
  run_cross_entropy(cpu::kernels().rows.cross_entropy_backward, kCudaRows.cross_entropy_backward, problem, input);
  return grad_input;
}

std::tuple<Tensor, Tensor> cross_entropy_backward(Tensor grad_loss, std::optional<Tensor> grad_lse, Tensor input, Tensor target,
                                                  std::optional<Tensor> weight, int64_t ignore_index, double label_smoothing,
                                                  bool target_grad) {
  RowProblem problem = prepare_cross_entropy(input, target, weight, ignore_index, label_smoothing);
  const std::vector<int64_t> rows = without(sizes_of(input), 1);
  const ScalarType type = input.scalar_type();
  check(!target_grad || target.scalar_type() == type, "target_grad: a target of classes has no gradient");
  check_like(grad_loss, "grad_loss", rows, accumulator_of(type), input);
  grad_loss = torch::stable::contiguous(grad_loss);
  problem.grad_loss = grad_loss.data_ptr();
  if (grad_lse) {
    check_like(*grad_lse, "grad_lse", rows, accumulator_of(type), input);
    grad_lse = torch::stable::contiguous(*grad_lse);
    problem.grad_lse = grad_lse->data_ptr();
  }
  Tensor grad_input = empty(sizes_of(input), type, input);
  Tensor grad_target = empty(target_grad ? sizes_of(input) : std::vector<int64_t>{0}, type, input);
  problem.grad_input = view_of<MutableView3>(grad_input, 1);
  if (target_grad) problem.grad_target = view_of<MutableView3>(grad_target, 1);
  use_large_pages(grad_input);
  use_large_pages(grad_target);
  run_cross_entropy(cpu::kernels().rows.cross_entropy_backward, kCudaRows.cross_entropy_backward, problem, input);
  return {grad_input, grad_target};
}

// tensor[begin : begin + count], a view. Not torch::stable::narrow, whose symbol is none of the shims that promise to stay.
Tensor rows_of(const Tensor& tensor, int64_t begin, int64_t count) {
  using torch::stable::detail::from;
  std::array<StableIValue, 4> stack{from(tensor), from(int64_t{0}), from(begin), from(count)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::narrow", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// A kernel may read a row once more while it writes that row's gradient, so the gradient of some rows at a time is made beside
// them and then copied into their place. CUDA's kernels read an element for the last time just before they write its gradient,
// by the same thread, and write in place; for classes without smoothing one of them makes the loss as well.
std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_backward_in_place(Tensor grad_loss, std::optional<Tensor> grad_lse,
                                                                           Tensor input, Tensor target,
                                                                           std::optional<Tensor> weight, int64_t ignore_index,
                                                                           double label_smoothing, bool target_grad,
                                                                           bool forward) {
  using torch::stable::copy_;
  check_floating(input, "input");
  check(input.dim() >= 2, "input: the shape must be [N, C, ...], got ", shape_of(input));
  const int64_t rows = input.size(0);
  check(target.dim() >= 1 && target.size(0) == rows, "target: ", rows, " rows are expected, got ", shape_of(target));
  check(grad_loss.dim() >= 1 && grad_loss.size(0) == rows, "grad_loss: ", rows, " rows are expected, got ",
        shape_of(grad_loss));
  check(!grad_lse || (grad_lse->dim() >= 1 && grad_lse->size(0) == rows), "grad_lse: ", rows, " rows are expected");
  const ScalarType type = input.scalar_type(), accumulator = accumulator_of(type);
  const std::vector<int64_t> nothing{0}, &numbers = forward ? without(sizes_of(input), 1) : nothing;
  if (input.is_cuda()) {
    Tensor loss = empty({0}, accumulator, input), lse = loss, row_weight = loss, place = input;
    const bool at_once = forward && target.scalar_type() == ScalarType::Long && label_smoothing == 0 && input.numel() > 0;
    if (forward && !at_once)
      std::tie(loss, lse, row_weight) = cross_entropy_forward(input, target, weight, ignore_index, label_smoothing);
    RowProblem problem = prepare_cross_entropy(place, target, weight, ignore_index, label_smoothing);
    const std::vector<int64_t> each = without(sizes_of(input), 1);
    if (at_once) {
      loss = empty(each, accumulator, input), lse = empty(each, accumulator, input),
      row_weight = empty(each, accumulator, input);
      problem.loss = loss.data_ptr();
      problem.lse = lse.data_ptr();
      problem.row_weight = row_weight.data_ptr();
    }
    check(!target_grad || target.scalar_type() == type, "target_grad: a target of classes has no gradient");
    check_like(grad_loss, "grad_loss", each, accumulator, input);
    grad_loss = torch::stable::contiguous(grad_loss);
    problem.grad_loss = grad_loss.data_ptr();
    if (grad_lse) {
      check_like(*grad_lse, "grad_lse", each, accumulator, input);
      grad_lse = torch::stable::contiguous(*grad_lse);
      problem.grad_lse = grad_lse->data_ptr();
    }
    Tensor grad_target = empty(target_grad ? sizes_of(input) : nothing, type, input);
    if (target_grad) problem.grad_target = view_of<MutableView3>(grad_target, 1);
    problem.grad_input = view_of<MutableView3>(place, 1);
    run_cross_entropy(cpu::kernels().rows.cross_entropy_backward, kCudaRows.cross_entropy_backward, problem, input);
    if (place.data_ptr() != input.data_ptr()) copy_(input, place);  // of strides that no kernel takes
    return {loss, lse, row_weight, grad_target};
  }
  const std::vector<Tensor> results{empty(numbers, accumulator, input), empty(numbers, accumulator, input),
                                    empty(numbers, accumulator, input)};
  const Tensor grad_target = empty(target_grad ? sizes_of(input) : nothing, type, input);

  constexpr int64_t kBytes = int64_t{16} << 20;  // of the gradients beside: the cache holds them, and malloc keeps them
  const int64_t row_bytes = std::max<int64_t>(input.numel() / std::max<int64_t>(rows, 1) * size_of(dtype_of(type)), 1);
  const int64_t most = std::max<int64_t>(kBytes / row_bytes, 1);
  for (int64_t begin = 0; begin < rows; begin += most) {
    const int64_t count = std::min(most, rows - begin);
    const auto part = [&](const Tensor& tensor) { return rows_of(tensor, begin, count); };
    Tensor place = part(input);
    if (forward) {
      const auto [loss, lse, row_weight] = cross_entropy_forward(place, part(target), weight, ignore_index, label_smoothing);
      size_t i = 0;
      for (const Tensor& result : {loss, lse, row_weight}) {
        Tensor to = part(results[i++]);
        copy_(to, result);
      }
    }
    const auto [grad_input, grad_of_target] =
        cross_entropy_backward(part(grad_loss), grad_lse ? std::optional(part(*grad_lse)) : std::nullopt, place, part(target),
                               weight, ignore_index, label_smoothing, target_grad);
    copy_(place, grad_input);
    if (target_grad) {
      Tensor to = part(grad_target);
      copy_(to, grad_of_target);
    }
  }
  return {results[0], results[1], results[2], grad_target};
}

#ifdef FLASH_ONLINE_CUDA
// tensor *= factor; its schema is Python's (flash_online/_linear.py), as what needs it is.
void scale_in_place(Tensor tensor, Tensor factor) {
  check_floating(tensor, "tensor");
  check_cuda_dtype(tensor, "tensor");
  check(tensor.is_contiguous(), "tensor: must be contiguous");
  check(factor.numel() == 1 && factor.scalar_type() == ScalarType::Float && factor.is_cuda() &&
            factor.get_device_index() == tensor.get_device_index(),
        "factor: one float32 number on the tensor's device is expected, got shape ", shape_of(factor));
  const CudaCall call(tensor);
  cuda::scale(dtype_of(tensor), tensor.data_ptr(), tensor.numel(), static_cast<const float*>(factor.data_ptr()), call.stream());
}
#endif

// the k largest probabilities of a softmax

std::tuple<Tensor, Tensor> topk_softmax_forward(Tensor input, int64_t k, int64_t dim, bool renormalize, ScalarType dtype) {
  check_floating(input, "input");
  check_cuda_dtype(input, "input");
  check_dim(input, dim);
  check_result_dtype("dtype", dtype, input.scalar_type());
  check(!input.is_cuda() || input.size(dim) < 0xffffffff,
        "input: on CUDA at most 2^32 - 2 elements along dim are accepted, got ", input.size(dim));
  check(k >= 0 && k <= input.size(dim), "k: must lie in [0, ", input.size(dim), "], the input's size along dim ", dim, "; got ",
        k);
  const std::vector<int64_t> sizes = with_size(sizes_of(input), dim, k);
  Tensor probabilities = empty(sizes, dtype, input), indices = empty(sizes, ScalarType::Long, input);
  RowProblem problem = problem_of(sizes_of(input), dim, input.scalar_type(), dtype);
  problem.k = k;
  problem.renormalize = renormalize;
  problem.input = view_of(input, dim);
  problem.result = view_of<MutableView3>(probabilities, dim);
  problem.indices = view_of<View3<int64_t*>>(indices, dim);
  run(cpu::kernels().rows.topk_softmax, kCudaRows.topk_softmax, problem, input);
  return {probabilities, indices};
}

Tensor topk_softmax_backward(Tensor grad, Tensor probabilities, Tensor indices, Tensor input, int64_t dim, bool renormalize) {
  check_floating(input, "input");
  check_cuda_dtype(input, "input");
  check_dim(input, dim);
  check(probabilities.dim() == input.dim(), "probabilities: as many dimensions as the input's, ", input.dim(),
        ", are needed, got ", probabilities.dim());
  const int64_t k = probabilities.size(dim);
  check(k <= input.size(dim), "probabilities: at most ", input.size(dim), " along dim ", dim, " are accepted, got ", k);
  const std::vector<int64_t> sizes = with_size(sizes_of(input), dim, k);
  check_result_dtype("probabilities", probabilities.scalar_type(), input.scalar_type());
  check_like(probabilities, "probabilities", sizes, probabilities.scalar_type(), input);
  check_like(grad, "grad", sizes, probabilities.scalar_type(), input);
  check_like(indices, "indices", sizes, ScalarType::Long, input);
  Tensor grad_input = empty(sizes_of(input), input.scalar_type(), input);
  int64_t bad_row = -1;
  RowProblem problem = problem_of(sizes_of(input), dim, input.scalar_type(), probabilities.scalar_type());
  problem.k = k;
  problem.renormalize = renormalize;
  problem.input = view_of(input, dim);
  problem.grad = view_of(grad, dim);
  problem.output = view_of(probabilities, dim);
  problem.indices = view_of<View3<int64_t*>>(indices, dim);
  problem.grad_input = view_of<MutableView3>(grad_input, dim);
  problem.bad_row = &bad_row;
  use_large_pages(grad_input);
  run(cpu::kernels().rows.topk_softmax_backward, kCudaRows.topk_softmax_backward, problem, input);
  check(bad_row < 0, "indices: row ", bad_row, " has one out of bounds; accepted are 0 to ", problem.classes - 1);
  return grad_input;
}

}  // namespace

}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) {
  using namespace flash_online::ops;
  m.impl("softmax_forward", TORCH_BOX(&softmax_forward));
  m.impl("softmax_backward", TORCH_BOX(&softmax_backward));
  m.impl("logsumexp_forward", TORCH_BOX(&logsumexp_forward));
  m.impl("logsumexp_backward", TORCH_BOX(&logsumexp_backward));
  m.impl("cross_entropy_forward", TORCH_BOX(&cross_entropy_forward));
  m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  m.impl("cross_entropy_loss", TORCH_BOX(&cross_entropy_loss));
  m.impl("cross_entropy_loss_backward", TORCH_BOX(&cross_entropy_loss_backward));
  m.impl("cross_entropy_backward_", TORCH_BOX(&cross_entropy_backward_in_place));
  m.impl("topk_softmax_forward", TORCH_BOX(&topk_softmax_forward));
  m.impl("topk_softmax_backward", TORCH_BOX(&topk_softmax_backward));
}

#ifdef FLASH_ONLINE_CUDA
STABLE_TORCH_LIBRARY_IMPL(flash_online, CUDA, m) {
  using namespace flash_online::ops;
  m.impl("softmax_forward", TORCH_BOX(&softmax_forward));
  m.impl("softmax_backward", TORCH_BOX(&softmax_backward));
  m.impl("logsumexp_forward", TORCH_BOX(&logsumexp_forward));
  m.impl("logsumexp_backward", TORCH_BOX(&logsumexp_backward));
  m.impl("cross_entropy_forward", TORCH_BOX(&cross_entropy_forward));
  m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  m.impl("cross_entropy_loss", TORCH_BOX(&cross_entropy_loss));
  m.impl("cross_entropy_loss_backward", TORCH_BOX(&cross_entropy_loss_backward));
  m.impl("cross_entropy_backward_", TORCH_BOX(&cross_entropy_backward_in_place));
  m.impl("scale_", TORCH_BOX(&scale_in_place));
  m.impl("topk_softmax_forward", TORCH_BOX(&topk_softmax_forward));
  m.impl("topk_softmax_backward", TORCH_BOX(&topk_softmax_backward));
}
#endif
