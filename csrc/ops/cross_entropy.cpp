// Cross-entropy of classes or probabilities, with its backward passes. The classes are dimension 1.
#include <tuple>

#include "operators.h"
#include "row_call.h"

namespace flash_online::ops {
namespace {

// The arguments of every cross-entropy operator.
struct Arguments {
  Tensor input, target;
  std::optional<Tensor> weight;
  int64_t ignore_index;
  double label_smoothing;
};

// Checks the arguments and replaces tensors by copies where the kernels need them contiguous: the problem points into them.
template <class Device>
RowProblem prepare(Arguments& arguments) {
  auto& [input, target, weight, ignore_index, label_smoothing] = arguments;
  check_floating(input, "input");
  check(input.dim() >= 2, "input: expected shape [N, C, ...], got ", shape_of(input));
  check(label_smoothing >= 0 && label_smoothing <= 1, "label_smoothing: expected 0 to 1, got ", label_smoothing);
  const ScalarType type = input.scalar_type();
  const std::vector<int64_t> sizes = sizes_of(input);
  RowProblem problem = row_problem(sizes, 1, type, type);
  problem.input = view_of(input, 1);
  if (target.scalar_type() == ScalarType::Long) {
    check_like(target, "target", without_dim(sizes, 1), ScalarType::Long, input);
    target = as_contiguous(target);
    problem.target = static_cast<const int64_t*>(target.data_ptr());
  } else {
    check(target.scalar_type() == type, "target: expected dtype int64 (classes) or the input's, ", name_of(type),
          " (probabilities), got ", name_of(target.scalar_type()));
    check_like(target, "target", sizes, type, input);
    problem.target_probabilities = view_of(target, 1);
  }
  if (weight) {
    check_like(*weight, "weight", {problem.classes}, accumulator_of(type), input);
    weight = as_contiguous(*weight);
    problem.weight = weight->data_ptr();
  }
  problem.ignore_index = ignore_index;
  problem.label_smoothing = label_smoothing;
  return problem;
}

// Runs a cross-entropy kernel and reports a target out of range. On CUDA a device assert reports it, so that nothing waits for
// the device.
template <class Device>
void run_checked(const typename Device::Kernel& kernel, RowProblem& problem, const Tensor& input) {
  int64_t bad_row = -1;
  problem.bad_row = &bad_row;
  Device::run(kernel, problem, input);
  check(bad_row < 0, "target: expected 0 to ", problem.classes - 1, " or ignore_index, ", problem.ignore_index, ", got ",
        bad_row < 0 ? 0 : problem.target[bad_row], ", which is out of bounds");
}

// ---- One loss per row ------------------------------------------------------------------------------------------------------

// The forward pass's results, each with one element per row in the accumulator type; entropy without elements unless wanted.
struct RowLosses {
  Tensor loss, lse, row_weight, entropy;
};

RowLosses empty_losses(const std::vector<int64_t>& sizes, const Tensor& input, bool entropy) {
  const ScalarType type = accumulator_of(input.scalar_type());
  const auto row_scalars = [&](bool wanted) { return empty(wanted ? sizes : std::vector<int64_t>{0}, type, input); };
  return {row_scalars(true), row_scalars(true), row_scalars(true), row_scalars(entropy)};
}
// The results without elements.
RowLosses no_losses(const Tensor& input) { return empty_losses({0}, input, true); }

void set_losses(RowProblem& problem, const RowLosses& losses, bool entropy) {
  problem.loss = losses.loss.data_ptr();
  problem.lse = losses.lse.data_ptr();
  problem.row_weight = losses.row_weight.data_ptr();
  if (entropy) problem.entropy = losses.entropy.data_ptr();
}

// A row of no probabilities: its loss and its entropy are sums without a term, where a formula with lse, -inf, gives NaN.
bool has_no_terms(const RowProblem& problem) { return problem.classes == 0 && problem.target == nullptr; }

template <class Device>
RowLosses forward(Arguments arguments, bool entropy) {
  RowProblem problem = prepare<Device>(arguments);
  const Tensor& input = arguments.input;
  RowLosses losses = empty_losses(without_dim(sizes_of(input), 1), input, entropy);
  set_losses(problem, losses, entropy);
  run_checked<Device>(Device::kernels().cross_entropy, problem, input);
  if (has_no_terms(problem)) {
    torch::stable::zero_(losses.loss);
    torch::stable::zero_(losses.entropy);
  }
  return losses;
}

// The gradients of each row's loss and, if there is one, of its lse and of its entropy; with the latter, what the forward pass
// returned as entropy.
struct RowGrads {
  Tensor loss;
  std::optional<Tensor> lse, entropy, entropy_value;
};

struct BackwardCall {
  RowProblem problem;  // all set but grad_input
  Tensor grad_target;  // without elements if it is not wanted
};

// Checks the arguments of a backward pass; replaces tensors as prepare does.
template <class Device>
BackwardCall prepare_backward(Arguments& arguments, RowGrads& grads, bool target_grad) {
  BackwardCall call{prepare<Device>(arguments), empty({0}, arguments.input.scalar_type(), arguments.input)};
  const Tensor& input = arguments.input;
  const ScalarType type = input.scalar_type();
  const std::vector<int64_t> rows = without_dim(sizes_of(input), 1);
  check(!target_grad || arguments.target.scalar_type() == type,
        "target_grad: expected False for a target of classes, got True");
  const auto row_scalar = [&](Tensor& tensor, const char* name) -> const void* {
    check_like(tensor, name, rows, accumulator_of(type), input);
    tensor = as_contiguous(tensor);
    return tensor.data_ptr();
  };
  call.problem.grad_loss = row_scalar(grads.loss, "grad_loss");
  if (grads.lse) call.problem.grad_lse = row_scalar(*grads.lse, "grad_lse");
  if (grads.entropy) {
    check(grads.entropy_value.has_value(), "entropy: expected the forward's with grad_entropy, got None");
    call.problem.grad_entropy = row_scalar(*grads.entropy, "grad_entropy");
    call.problem.row_entropy = row_scalar(*grads.entropy_value, "entropy");
  }
  if (target_grad) {
    call.grad_target = Device::empty_rows(sizes_of(input), type, input);
    call.problem.grad_target = view_of<MutableView3>(call.grad_target, 1);
  }
  return call;
}

template <class Device>
void run_backward(RowProblem& problem, const Tensor& input) {
  run_checked<Device>(Device::kernels().cross_entropy_backward, problem, input);
}

// The gradients of input and target.
template <class Device>
std::tuple<Tensor, Tensor> backward(Arguments arguments, RowGrads grads, bool target_grad) {
  auto [problem, grad_target] = prepare_backward<Device>(arguments, grads, target_grad);
  const Tensor& input = arguments.input;
  Tensor grad_input = Device::empty_rows(sizes_of(input), input.scalar_type(), input);
  problem.grad_input = view_of<MutableView3>(grad_input, 1);
  run_backward<Device>(problem, input);
  return {grad_input, grad_target};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_forward(Tensor input, Tensor target, std::optional<Tensor> weight,
                                                                 int64_t ignore_index, double label_smoothing,
                                                                 bool return_entropy) {
  const RowLosses losses = forward<Device>({input, target, weight, ignore_index, label_smoothing}, return_entropy);
  return {losses.loss, losses.lse, losses.row_weight, losses.entropy};
}

template <class Device>
std::tuple<Tensor, Tensor> cross_entropy_backward(Tensor grad_loss, std::optional<Tensor> grad_lse, Tensor input, Tensor target,
                                                  std::optional<Tensor> weight, int64_t ignore_index, double label_smoothing,
                                                  bool target_grad, std::optional<Tensor> grad_entropy,
                                                  std::optional<Tensor> entropy) {
  return backward<Device>({input, target, weight, ignore_index, label_smoothing}, {grad_loss, grad_lse, grad_entropy, entropy},
                          target_grad);
}

// ---- The backward pass that overwrites its input ---------------------------------------------------------------------------

// loss, lse, row_weight, entropy, grad_target
using InPlaceResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
// What a call wants in addition to the gradient of the input.
struct Wanted {
  bool target_grad, forward, entropy;  // entropy: with `forward`
};

void copy_to(Tensor to, const Tensor& from) { torch::stable::copy_(to, from); }

// ---- One loss for all rows -------------------------------------------------------------------------------------------------

// The arguments of a reduced loss, and its results. `numbers` holds the arrays that the problem's loss, row_weight and lse
// point to, unless the device has separate memory for them, and last the divisor of the sum. It is one tensor, since an
// allocation costs as much as a row; the backward pass, which needs the divisor, then keeps a few bytes per row.
struct ReducedLoss {
  RowProblem problem;
  Tensor result, numbers;

  int64_t rows() const { return problem.outer * problem.inner; }
};

// The last scalar, in the accumulator type.
void* divisor_in(const Tensor& numbers) {
  return static_cast<std::byte*>(numbers.data_ptr()) + (numbers.numel() - 1) * size_of(dtype_of(numbers));
}

// Lays the arrays of row scalars into a tensor.
template <class Device>
void set_loss_arrays(RowProblem& problem, const Tensor& memory) {
  std::byte* const begin = static_cast<std::byte*>(memory.data_ptr());
  const int64_t bytes = problem.outer * problem.inner * (problem.dtype == DType::kFloat64 ? 8 : 4);
  problem.loss = begin;
  problem.row_weight = begin + bytes;
  if constexpr (Device::kLossArrays == 3) problem.lse = begin + 2 * bytes;
}

template <class Device>
ReducedLoss prepare_loss(Arguments& arguments, ScalarType dtype) {
  RowProblem problem = prepare<Device>(arguments);
  const Tensor& input = arguments.input;
  check_result_dtype("dtype", dtype, input.scalar_type());
  const ScalarType type = accumulator_of(input.scalar_type());
  const int64_t rows = problem.outer * problem.inner, kept = Device::keeps_losses(rows) ? rows : 0;
  ReducedLoss reduced{problem, empty({}, dtype, input), empty({Device::kLossArrays * kept + 1}, type, input)};
  if (kept != 0) set_loss_arrays<Device>(reduced.problem, reduced.numbers);
  reduced.problem.result_dtype = dtype_of(dtype);
  return reduced;
}

// Sets a scalar on the CPU, rounded to its dtype. torch's copy costs as much as a small loss.
void set_scalar(Tensor to, double value) {
  switch (to.scalar_type()) {
    case ScalarType::Double: *static_cast<double*>(to.data_ptr()) = value; return;
    case ScalarType::Float: *static_cast<float*>(to.data_ptr()) = static_cast<float>(value); return;
    default: break;
  }
  Tensor exact = empty({}, ScalarType::Double, to);
  *static_cast<double*>(exact.data_ptr()) = value;
  torch::stable::copy_(to, exact);
}

double scalar_of(const Tensor& from) {
  switch (from.scalar_type()) {
    case ScalarType::Double: return *static_cast<const double*>(from.data_ptr());
    case ScalarType::Float: return *static_cast<const float*>(from.data_ptr());
    default: break;
  }
  Tensor exact = empty({}, ScalarType::Double, from);
  torch::stable::copy_(exact, from);
  return *static_cast<const double*>(exact.data_ptr());
}

template <class T>
void reduce_losses(ReducedLoss& reduced, bool mean) {
  const auto sum = [&](const void* data) {
    const T* values = static_cast<const T*>(data);
    return std::accumulate(values, values + reduced.rows(), 0.0);
  };
  const double denominator = mean ? sum(reduced.problem.row_weight) : 1.0;
  set_scalar(reduced.result, sum(reduced.problem.loss) / denominator);
  *static_cast<T*>(divisor_in(reduced.numbers)) = static_cast<T>(denominator);
}

template <class T>
Tensor row_grads(const Tensor& grad, const Tensor& numbers, int64_t rows) {
  const Tensor grad_loss = empty({rows}, numbers.scalar_type(), grad);
  const double divisor = *static_cast<const T*>(divisor_in(numbers));
  std::fill_n(static_cast<T*>(grad_loss.data_ptr()), rows, static_cast<T>(scalar_of(grad) / divisor));
  return grad_loss;
}

// ---- Differences between the devices ---------------------------------------------------------------------------------------

// run_loss() makes a reduced loss; set_grad_loss() sets the gradient of each row's loss from the reduced loss's and returns the
// tensor that the problem then points into; backward_in_place() overwrites the input with its gradient.
struct LossOnCpu : RowsOnCpu {
  static constexpr int kLossArrays = 3;  // that the kernel writes: loss, row_weight, lse
  static bool keeps_losses(int64_t) { return true; }  // whether they are in ReducedLoss::numbers

  static void run_loss(ReducedLoss& reduced, bool mean, const Tensor& input) {
    run_checked<RowsOnCpu>(kernels().cross_entropy, reduced.problem, input);
    if (reduced.numbers.scalar_type() == ScalarType::Double)
      reduce_losses<double>(reduced, mean);
    else
      reduce_losses<float>(reduced, mean);
  }

  static Tensor set_grad_loss(RowProblem& problem, const Tensor& grad, const Tensor& numbers) {
    const int64_t rows = problem.outer * problem.inner;
    const Tensor grad_loss = numbers.scalar_type() == ScalarType::Double ? row_grads<double>(grad, numbers, rows)
                                                                         : row_grads<float>(grad, numbers, rows);
    problem.grad_loss = grad_loss.data_ptr();
    return grad_loss;
  }

  // The CPU kernels may read a row again while they write its gradient, so gradients are made in a buffer, some rows at a time,
  // and then copied over the rows.
  static InPlaceResults backward_in_place(const Arguments& arguments, const RowGrads& grads, const Wanted& wanted) {
    const auto& [input, target, weight, ignore_index, label_smoothing] = arguments;
    const int64_t rows = input.size(0);
    const ScalarType type = input.scalar_type();
    const RowLosses losses =
        wanted.forward ? empty_losses(without_dim(sizes_of(input), 1), input, wanted.entropy) : no_losses(input);
    const Tensor grad_target = empty(wanted.target_grad ? sizes_of(input) : std::vector<int64_t>{0}, type, input);

    constexpr int64_t kBufferBytes = int64_t{16} << 20;  // small enough to stay in the cache and to be recycled by malloc
    const int64_t row_bytes = std::max<int64_t>(input.numel() / std::max<int64_t>(rows, 1) * size_of(dtype_of(type)), 1);
    const int64_t buffer_rows = std::max<int64_t>(kBufferBytes / row_bytes, 1);
    for (int64_t begin = 0; begin < rows; begin += buffer_rows) {
      const int64_t count = std::min(buffer_rows, rows - begin);
      const auto rows_here = [&](const Tensor& tensor) { return narrow(tensor, 0, begin, count); };
      const auto rows_if = [&](const std::optional<Tensor>& tensor) {
        return tensor ? std::optional(rows_here(*tensor)) : std::nullopt;
      };
      const Arguments arguments_here{rows_here(input), rows_here(target), weight, ignore_index, label_smoothing};
      if (wanted.forward) {
        const auto [loss, lse, row_weight, entropy] = forward<RowsOnCpu>(arguments_here, wanted.entropy);
        copy_to(rows_here(losses.loss), loss);
        copy_to(rows_here(losses.lse), lse);
        copy_to(rows_here(losses.row_weight), row_weight);
        if (wanted.entropy) copy_to(rows_here(losses.entropy), entropy);
      }
      const RowGrads grads_here{rows_here(grads.loss), rows_if(grads.lse), rows_if(grads.entropy),
                                rows_if(grads.entropy_value)};
      const auto [grad_input_here, grad_target_here] = backward<RowsOnCpu>(arguments_here, grads_here, wanted.target_grad);
      copy_to(arguments_here.input, grad_input_here);
      if (wanted.target_grad) copy_to(rows_here(grad_target), grad_target_here);
    }
    return {losses.loss, losses.lse, losses.row_weight, losses.entropy, grad_target};
  }
};

struct LossOnCuda : RowsOnCuda {
  static constexpr int kLossArrays = 2;  // no lse
  static bool keeps_losses(int64_t rows) { return rows <= cuda::kFewLosses; }

  static void run_loss(ReducedLoss& reduced, bool mean, const Tensor& input) {
    void* const result = reduced.result.data_ptr();
    void* const divisor = divisor_in(reduced.numbers);
    CudaCall call(input);
    const int64_t rows = reduced.rows();
    std::optional<Tensor> memory;  // of many losses, and then of their reduction
    void* workspace = nullptr;
    int64_t sums = 0;
    if (!keeps_losses(rows)) {
      const int64_t bytes = kLossArrays * rows * size_of(dtype_of(reduced.numbers));
      memory = empty({bytes + cuda::reduce_losses_workspace(rows)}, ScalarType::Byte, input);
      set_loss_arrays<LossOnCuda>(reduced.problem, *memory);
      workspace = static_cast<std::byte*>(memory->data_ptr()) + bytes;
      reduced.problem.loss_sums = reduced.problem.loss;  // sums are fewer than losses, and overwrite them
      reduced.problem.loss_sum_count = &sums;
    }
    run(kernels().cross_entropy, reduced.problem, call);  // a target out of range is a device assert
    if (reduced.problem.dtype == DType::kFloat64)
      return cuda::float64::reduce_losses(reduced.problem, mean, result, divisor, call.stream());
    cuda::reduce_losses(reduced.problem, mean, result, divisor, workspace, call.stream());
  }

  static Tensor set_grad_loss(RowProblem& problem, const Tensor& grad, const Tensor& numbers) {
    problem.divisor = divisor_in(numbers);  // the kernel divides
    problem.result_dtype = dtype_of(grad);
    problem.grad_loss = grad.data_ptr();
    return grad;
  }

  // The CUDA kernels read an element for the last time just before they write its gradient, by the same thread, so that they
  // can write in place. For classes without smoothing the backward kernel makes the losses as well.
  static InPlaceResults backward_in_place(Arguments arguments, RowGrads grads, const Wanted& wanted) {
    const Tensor input = arguments.input;  // prepare may replace arguments.input by a copy
    const bool one_kernel = wanted.forward && !wanted.entropy && !grads.entropy && input.numel() > 0 &&
                            arguments.target.scalar_type() == ScalarType::Long && arguments.label_smoothing == 0;
    RowLosses losses = wanted.forward && !one_kernel ? forward<RowsOnCuda>(arguments, wanted.entropy) : no_losses(input);
    auto [problem, grad_target] = prepare_backward<RowsOnCuda>(arguments, grads, wanted.target_grad);
    if (one_kernel) {
      losses = empty_losses(without_dim(sizes_of(input), 1), input, false);
      set_losses(problem, losses, false);
    }
    problem.grad_input = view_of<MutableView3>(arguments.input, 1);
    run_backward<RowsOnCuda>(problem, input);
    if (arguments.input.data_ptr() != input.data_ptr()) copy_to(input, arguments.input);  // prepare had to copy
    return {losses.loss, losses.lse, losses.row_weight, losses.entropy, grad_target};
  }
};

// ---- Operators of these devices --------------------------------------------------------------------------------------------

template <class Device>
std::tuple<Tensor, Tensor> cross_entropy_loss(Tensor input, Tensor target, std::optional<Tensor> weight, int64_t ignore_index,
                                              double label_smoothing, bool mean, ScalarType dtype) {
  Arguments arguments{input, target, weight, ignore_index, label_smoothing};
  ReducedLoss reduced = prepare_loss<Device>(arguments, dtype);
  Device::run_loss(reduced, mean, input);
  if (has_no_terms(reduced.problem) && !mean) torch::stable::zero_(reduced.result);
  return {reduced.result, reduced.numbers};
}

template <class Device>
Tensor cross_entropy_loss_backward(Tensor grad, Tensor numbers, Tensor input, Tensor target, std::optional<Tensor> weight,
                                   int64_t ignore_index, double label_smoothing) {
  Arguments arguments{input, target, weight, ignore_index, label_smoothing};
  RowProblem problem = prepare<Device>(arguments);
  const ScalarType type = input.scalar_type();
  check_result_dtype("grad", grad.scalar_type(), type);
  check_like(grad, "grad", {}, grad.scalar_type(), input);
  check(numbers.dim() == 1 && numbers.numel() > 0 && numbers.is_contiguous(), "numbers: expected the forward's, got shape ",
        shape_of(numbers));
  check_like(numbers, "numbers", sizes_of(numbers), accumulator_of(type), input);
  const Tensor grad_loss = Device::set_grad_loss(problem, grad, numbers);
  Tensor grad_input = Device::empty_rows(sizes_of(input), type, input);
  problem.grad_input = view_of<MutableView3>(grad_input, 1);
  run_backward<Device>(problem, input);
  return grad_input;
}

template <class Device>
InPlaceResults cross_entropy_backward_in_place(Tensor grad_loss, std::optional<Tensor> grad_lse, Tensor input, Tensor target,
                                               std::optional<Tensor> weight, int64_t ignore_index, double label_smoothing,
                                               bool target_grad, bool want_forward, bool return_entropy,
                                               std::optional<Tensor> grad_entropy, std::optional<Tensor> entropy) {
  check_floating(input, "input");
  check(input.dim() >= 2, "input: expected shape [N, C, ...], got ", shape_of(input));
  const int64_t rows = input.size(0);
  check(target.dim() >= 1 && target.size(0) == rows, "target: expected ", rows, " rows, got shape ", shape_of(target));
  const auto check_rows = [&](const std::optional<Tensor>& tensor, const char* name) {
    if (tensor)
      check(tensor->dim() >= 1 && tensor->size(0) == rows, name, ": expected ", rows, " rows, got shape ", shape_of(*tensor));
  };
  check_rows(grad_loss, "grad_loss");
  check_rows(grad_lse, "grad_lse");
  check_rows(grad_entropy, "grad_entropy");
  check_rows(entropy, "entropy");
  check(want_forward || !return_entropy, "return_entropy: expected False without forward, got True");
  const Arguments arguments{input, target, weight, ignore_index, label_smoothing};
  return Device::backward_in_place(arguments, {grad_loss, grad_lse, grad_entropy, entropy},
                                   {target_grad, want_forward, return_entropy});
}

// ---- For linear_cross_entropy ----------------------------------------------------------------------------------------------

// tensor *= factor, on CUDA only. Its schema is in Python (flash_online/_linear_cross_entropy_ops.py), next to its only caller.
inline void scale_in_place(Tensor tensor, Tensor factor) {
  check_floating(tensor, "tensor");
  check(tensor.is_contiguous(), "tensor: expected a contiguous tensor, got a non-contiguous one");
  check_device(factor, "factor", tensor, "tensor");
  check(factor.numel() == 1 && factor.scalar_type() == accumulator_of(tensor.scalar_type()),
        "factor: expected one float32 number (float64 for float64), got shape ", shape_of(factor));
  const CudaCall call(tensor);
  if (tensor.scalar_type() == ScalarType::Double)
    return cuda::float64::scale(tensor.data_ptr(), tensor.numel(), factor.data_ptr(), call.stream());
  cuda::scale(dtype_of(tensor), tensor.data_ptr(), tensor.numel(), static_cast<const float*>(factor.data_ptr()), call.stream());
}

template <class Device, class Library>
void add_cross_entropy(Library& m) {
  implement(m, "cross_entropy_forward", TORCH_BOX(&cross_entropy_forward<Device>));
  implement(m, "cross_entropy_backward", TORCH_BOX(&cross_entropy_backward<Device>));
  implement(m, "cross_entropy_loss", TORCH_BOX(&cross_entropy_loss<Device>));
  implement(m, "cross_entropy_loss_backward", TORCH_BOX(&cross_entropy_loss_backward<Device>));
  implement(m, "cross_entropy_backward_", TORCH_BOX(&cross_entropy_backward_in_place<Device>));
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) { flash_online::ops::add_cross_entropy<flash_online::ops::LossOnCpu>(m); }

STABLE_TORCH_LIBRARY_IMPL(flash_online, CUDA, m) {
  if constexpr (flash_online::ops::kBuiltWithCuda) {
    flash_online::ops::add_cross_entropy<flash_online::ops::LossOnCuda>(m);
    flash_online::ops::implement(m, "scale_", TORCH_BOX(&flash_online::ops::scale_in_place));
  }
}
