// Cross-entropy of classes or probabilities, with its backward passes. The classes are dimension 1.
#include <array>
#include <tuple>

#include "row_call.h"

namespace flash_online::ops {
namespace {

// What every cross-entropy operator is given.
struct Arguments {
  Tensor input, target;
  std::optional<Tensor> weight;
  int64_t ignore_index;
  double label_smoothing;
};

// Checks the arguments and replaces tensors by copies where the kernels need them contiguous: the problem points into them.
RowProblem prepare(Arguments& arguments) {
  auto& [input, target, weight, ignore_index, label_smoothing] = arguments;
  check_floating(input, "input");
  check_cuda_dtype(input, "input");
  check(input.dim() >= 2, "input: the shape must be [N, C, ...], got ", shape_of(input));
  check(label_smoothing >= 0 && label_smoothing <= 1, "label_smoothing: must lie in [0, 1], got ", label_smoothing);
  const ScalarType type = input.scalar_type();
  RowProblem problem = row_problem(sizes_of(input), 1, type, type);
  problem.input = view_of(input, 1);
  if (target.scalar_type() == ScalarType::Long) {
    check_like(target, "target", without_dim(sizes_of(input), 1), ScalarType::Long, input);
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

// Runs a cross-entropy kernel and reports a target out of range. On CUDA that is a device assert, so that nothing waits for the
// device.
void run_checked(RowKernel on_cpu, const CudaRowKernel& on_cuda, RowProblem& problem, const Tensor& input) {
  int64_t bad_row = -1;
  problem.bad_row = &bad_row;
  run(on_cpu, on_cuda, problem, input);
  check(bad_row < 0, "target: ", bad_row < 0 ? 0 : problem.target[bad_row], " is out of bounds; accepted are 0 to ",
        problem.classes - 1, " and ignore_index, ", problem.ignore_index);
}

// ---- One loss per row ------------------------------------------------------------------------------------------------------

// The forward pass's results, each with one element per row in the accumulator type.
struct RowLosses {
  Tensor loss, lse, row_weight;
};

RowLosses empty_losses(const std::vector<int64_t>& sizes, const Tensor& input) {
  const ScalarType type = accumulator_of(input.scalar_type());
  return {empty(sizes, type, input), empty(sizes, type, input), empty(sizes, type, input)};
}

void set_losses(RowProblem& problem, const RowLosses& losses) {
  problem.loss = losses.loss.data_ptr();
  problem.lse = losses.lse.data_ptr();
  problem.row_weight = losses.row_weight.data_ptr();
}

RowLosses forward(Arguments arguments) {
  RowProblem problem = prepare(arguments);
  const Tensor& input = arguments.input;
  const RowLosses losses = empty_losses(without_dim(sizes_of(input), 1), input);
  set_losses(problem, losses);
  run_checked(cpu::kernels().rows.cross_entropy, kCudaRows.cross_entropy, problem, input);
  return losses;
}

// The gradients of each row's loss and, if there is one, of its lse.
struct RowGrads {
  Tensor loss;
  std::optional<Tensor> lse;
};

struct BackwardCall {
  RowProblem problem;  // all set but grad_input
  Tensor grad_target;  // without elements if it is not wanted
};

// Checks what a backward pass is given; tensors are replaced as by prepare.
BackwardCall prepare_backward(Arguments& arguments, RowGrads& grads, bool target_grad) {
  BackwardCall call{prepare(arguments), empty({0}, arguments.input.scalar_type(), arguments.input)};
  const Tensor& input = arguments.input;
  const ScalarType type = input.scalar_type();
  const std::vector<int64_t> rows = without_dim(sizes_of(input), 1);
  check(!target_grad || arguments.target.scalar_type() == type, "target_grad: a target of classes has no gradient");
  check_like(grads.loss, "grad_loss", rows, accumulator_of(type), input);
  grads.loss = torch::stable::contiguous(grads.loss);
  call.problem.grad_loss = grads.loss.data_ptr();
  if (grads.lse) {
    check_like(*grads.lse, "grad_lse", rows, accumulator_of(type), input);
    grads.lse = torch::stable::contiguous(*grads.lse);
    call.problem.grad_lse = grads.lse->data_ptr();
  }
  if (target_grad) {
    call.grad_target = empty(sizes_of(input), type, input);
    call.problem.grad_target = view_of<MutableView3>(call.grad_target, 1);
    use_large_pages(call.grad_target);
  }
  return call;
}

void run_backward(RowProblem& problem, const Tensor& input) {
  run_checked(cpu::kernels().rows.cross_entropy_backward, kCudaRows.cross_entropy_backward, problem, input);
}

// The gradients of input and target.
std::tuple<Tensor, Tensor> backward(Arguments arguments, RowGrads grads, bool target_grad) {
  auto [problem, grad_target] = prepare_backward(arguments, grads, target_grad);
  const Tensor& input = arguments.input;
  Tensor grad_input = empty(sizes_of(input), input.scalar_type(), input);
  problem.grad_input = view_of<MutableView3>(grad_input, 1);
  use_large_pages(grad_input);
  run_backward(problem, input);
  return {grad_input, grad_target};
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy_forward(Tensor input, Tensor target, std::optional<Tensor> weight,
                                                         int64_t ignore_index, double label_smoothing) {
  const RowLosses losses = forward({input, target, weight, ignore_index, label_smoothing});
  return {losses.loss, losses.lse, losses.row_weight};
}

std::tuple<Tensor, Tensor> cross_entropy_backward(Tensor grad_loss, std::optional<Tensor> grad_lse, Tensor input, Tensor target,
                                                  std::optional<Tensor> weight, int64_t ignore_index, double label_smoothing,
                                                  bool target_grad) {
  return backward({input, target, weight, ignore_index, label_smoothing}, {grad_loss, grad_lse}, target_grad);
}

// ---- The backward pass that overwrites its input ---------------------------------------------------------------------------

using InPlaceResults = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // loss, lse, row_weight, grad_target

// tensor[begin : begin + count], a view. torch::stable::narrow is no alternative: its symbol is none of the shims that promise
// to stay.
Tensor rows_of(const Tensor& tensor, int64_t begin, int64_t count) {
  using torch::stable::detail::from;
  std::array<StableIValue, 4> stack{from(tensor), from(int64_t{0}), from(begin), from(count)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::narrow", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

void copy_to(Tensor to, const Tensor& from) { torch::stable::copy_(to, from); }

// The CUDA kernels read an element for the last time just before they write its gradient, by the same thread, so that they can
// write in place. For classes without smoothing the backward kernel makes the losses as well.
InPlaceResults backward_in_place_on_cuda(Arguments arguments, RowGrads grads, bool target_grad, bool want_forward) {
  const Tensor input = arguments.input;  // prepare may replace arguments.input by a copy
  const bool one_kernel =
      want_forward && arguments.target.scalar_type() == ScalarType::Long && arguments.label_smoothing == 0 && input.numel() > 0;
  RowLosses losses = want_forward && !one_kernel ? forward(arguments) : empty_losses({0}, input);
  auto [problem, grad_target] = prepare_backward(arguments, grads, target_grad);
  if (one_kernel) {
    losses = empty_losses(without_dim(sizes_of(input), 1), input);
    set_losses(problem, losses);
  }
  problem.grad_input = view_of<MutableView3>(arguments.input, 1);
  run_backward(problem, input);
  if (arguments.input.data_ptr() != input.data_ptr()) copy_to(input, arguments.input);  // prepare had to copy
  return {losses.loss, losses.lse, losses.row_weight, grad_target};
}

// The CPU kernels may read a row again while they write its gradient, so the gradients of some rows at a time are made in a
// buffer and then copied to the rows' place.
InPlaceResults backward_in_place_on_cpu(const Arguments& arguments, const RowGrads& grads, bool target_grad,
                                        bool want_forward) {
  const auto& [input, target, weight, ignore_index, label_smoothing] = arguments;
  const int64_t rows = input.size(0);
  const ScalarType type = input.scalar_type();
  const RowLosses losses = empty_losses(want_forward ? without_dim(sizes_of(input), 1) : std::vector<int64_t>{0}, input);
  const Tensor grad_target = empty(target_grad ? sizes_of(input) : std::vector<int64_t>{0}, type, input);

  constexpr int64_t kBufferBytes = int64_t{16} << 20;  // small enough to stay in the cache and to be recycled by malloc
  const int64_t row_bytes = std::max<int64_t>(input.numel() / std::max<int64_t>(rows, 1) * size_of(dtype_of(type)), 1);
  const int64_t buffer_rows = std::max<int64_t>(kBufferBytes / row_bytes, 1);
  for (int64_t begin = 0; begin < rows; begin += buffer_rows) {
    const int64_t count = std::min(buffer_rows, rows - begin);
    const auto part = [&](const Tensor& tensor) { return rows_of(tensor, begin, count); };
    const Arguments part_arguments{part(input), part(target), weight, ignore_index, label_smoothing};
    if (want_forward) {
      const auto [loss, lse, row_weight] = forward(part_arguments);
      copy_to(part(losses.loss), loss);
      copy_to(part(losses.lse), lse);
      copy_to(part(losses.row_weight), row_weight);
    }
    const RowGrads part_grads{part(grads.loss), grads.lse ? std::optional(part(*grads.lse)) : std::nullopt};
    const auto [part_grad_input, part_grad_target] = backward(part_arguments, part_grads, target_grad);
    copy_to(part_arguments.input, part_grad_input);
    if (target_grad) copy_to(part(grad_target), part_grad_target);
  }
  return {losses.loss, losses.lse, losses.row_weight, grad_target};
}

InPlaceResults cross_entropy_backward_in_place(Tensor grad_loss, std::optional<Tensor> grad_lse, Tensor input, Tensor target,
                                               std::optional<Tensor> weight, int64_t ignore_index, double label_smoothing,
                                               bool target_grad, bool want_forward) {
  check_floating(input, "input");
  check(input.dim() >= 2, "input: the shape must be [N, C, ...], got ", shape_of(input));
  const int64_t rows = input.size(0);
  check(target.dim() >= 1 && target.size(0) == rows, "target: ", rows, " rows are expected, got ", shape_of(target));
  check(grad_loss.dim() >= 1 && grad_loss.size(0) == rows, "grad_loss: ", rows, " rows are expected, got ",
        shape_of(grad_loss));
  check(!grad_lse || (grad_lse->dim() >= 1 && grad_lse->size(0) == rows), "grad_lse: ", rows, " rows are expected");
  const Arguments arguments{input, target, weight, ignore_index, label_smoothing};
  const RowGrads grads{grad_loss, grad_lse};
  if (input.is_cuda()) return backward_in_place_on_cuda(arguments, grads, target_grad, want_forward);
  return backward_in_place_on_cpu(arguments, grads, target_grad, want_forward);
}

// ---- One loss for all rows -------------------------------------------------------------------------------------------------

// On the CPU: the rows' losses reduced to one result, and the divisor of their sum.
template <class T>
void reduce_losses(const RowProblem& problem, bool mean, Tensor& result, Tensor& divisor) {
  const int64_t rows = problem.outer * problem.inner;
  const auto sum = [&](const void* data) {
    const T* values = static_cast<const T*>(data);
    return std::accumulate(values, values + rows, 0.0);
  };
  const double denominator = mean ? sum(problem.row_weight) : 1.0;
  Tensor reduced = empty({}, ScalarType::Double, result);
  *static_cast<double*>(reduced.data_ptr()) = sum(problem.loss) / denominator;
  torch::stable::copy_(result, reduced);
  *static_cast<T*>(divisor.data_ptr()) = static_cast<T>(denominator);
}

// On the CPU: the gradient of each row's loss from that of the reduced loss.
template <class T>
void fill_grad_loss(const Tensor& grad, const Tensor& divisor, Tensor& grad_loss) {
  Tensor grad_double = empty({}, ScalarType::Double, grad);
  torch::stable::copy_(grad_double, grad);
  const double row_grad = *static_cast<const double*>(grad_double.data_ptr()) / *static_cast<const T*>(divisor.data_ptr());
  std::fill_n(static_cast<T*>(grad_loss.data_ptr()), grad_loss.numel(), static_cast<T>(row_grad));
}

std::tuple<Tensor, Tensor> cross_entropy_loss(Tensor input, Tensor target, std::optional<Tensor> weight, int64_t ignore_index,
                                              double label_smoothing, bool mean, ScalarType dtype) {
  Arguments arguments{input, target, weight, ignore_index, label_smoothing};
  RowProblem problem = prepare(arguments);
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
  run_checked(cpu::kernels().rows.cross_entropy, kCudaRows.cross_entropy, problem, input);
  if (!input.is_cuda()) {
    if (type == ScalarType::Double)
      reduce_losses<double>(problem, mean, result, divisor);
    else
      reduce_losses<float>(problem, mean, result, divisor);
  } else if constexpr (kBuiltWithCuda) {
    CudaCall call(input);
    void* const workspace = call.workspace(cuda::reduce_losses_workspace(rows));
    cuda::reduce_losses(problem, mean, result.data_ptr(), divisor.data_ptr(), workspace, call.stream());
  }
  return {result, divisor};
}

Tensor cross_entropy_loss_backward(Tensor grad, Tensor divisor, Tensor input, Tensor target, std::optional<Tensor> weight,
                                   int64_t ignore_index, double label_smoothing) {
  Arguments arguments{input, target, weight, ignore_index, label_smoothing};
  RowProblem problem = prepare(arguments);
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
      fill_grad_loss<double>(grad, divisor, grad_loss);
    else
      fill_grad_loss<float>(grad, divisor, grad_loss);
  }
  problem.grad_loss = grad_loss.data_ptr();
  problem.grad_input = view_of<MutableView3>(grad_input, 1);
  use_large_pages(grad_input);
  run_backward(problem, input);
  return grad_input;
}

// ---- For linear_cross_entropy ----------------------------------------------------------------------------------------------

// tensor *= factor, on CUDA alone. Its schema is in Python (flash_online/_linear.py), beside its only caller.
void scale_in_place(Tensor tensor, Tensor factor) {
  check_floating(tensor, "tensor");
  check_cuda_dtype(tensor, "tensor");
  check(tensor.is_contiguous(), "tensor: must be contiguous");
  check(factor.numel() == 1 && factor.scalar_type() == ScalarType::Float && factor.is_cuda() &&
            factor.get_device_index() == tensor.get_device_index(),
        "factor: one float32 number on the tensor's device is expected, got shape ", shape_of(factor));
  if constexpr (kBuiltWithCuda) {
    const CudaCall call(tensor);
    cuda::scale(dtype_of(tensor), tensor.data_ptr(), tensor.numel(), static_cast<const float*>(factor.data_ptr()),
                call.stream());
  }
}

// One implementation serves both devices: it runs where its tensors are.
template <class Library>
void add_cross_entropy(Library& m) {
  m.impl("cross_entropy_forward", TORCH_BOX(&cross_entropy_forward));
  m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  m.impl("cross_entropy_loss", TORCH_BOX(&cross_entropy_loss));
  m.impl("cross_entropy_loss_backward", TORCH_BOX(&cross_entropy_loss_backward));
  m.impl("cross_entropy_backward_", TORCH_BOX(&cross_entropy_backward_in_place));
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) { flash_online::ops::add_cross_entropy(m); }

STABLE_TORCH_LIBRARY_IMPL(flash_online, CUDA, m) {
  if constexpr (flash_online::ops::kBuiltWithCuda) {
    flash_online::ops::add_cross_entropy(m);
    m.impl("scale_", TORCH_BOX(&flash_online::ops::scale_in_place));
  }
}
