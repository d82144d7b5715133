// softmax, log-softmax and logsumexp, with their backward passes.
#include "operators.h"
#include "row_call.h"

namespace flash_online::ops {
namespace {

struct SoftmaxCall {
  RowProblem problem;
  Tensor result;
};

template <class Device>
SoftmaxCall prepare_softmax(Tensor& input, int64_t dim, bool log, ScalarType dtype) {
  check_floating(input, "input");
  check_dim(input, dim);
  const ScalarType type = input.scalar_type();
  check_result_dtype("dtype", dtype, type);
  const std::vector<int64_t> sizes = sizes_of(input);
  SoftmaxCall call{row_problem(sizes, dim, type, dtype), Device::empty_rows(sizes, dtype, input)};
  call.problem.log = log;
  call.problem.input = view_of(input, dim);
  call.problem.result = view_of<MutableView3>(call.result, dim);
  return call;
}

template <class Device>
Tensor softmax_forward(Tensor input, int64_t dim, bool log, ScalarType dtype) {
  const SoftmaxCall call = prepare_softmax<Device>(input, dim, log, dtype);
  Device::run(Device::kernels().softmax, call.problem, input);
  return call.result;
}

template <class Device>
SoftmaxCall prepare_softmax_backward(Tensor& grad, Tensor& output, int64_t dim, bool log, ScalarType input_dtype) {
  check_floating(output, "output");
  check_dim(output, dim);
  const ScalarType type = output.scalar_type();
  check_result_dtype("output", type, input_dtype);
  const std::vector<int64_t> sizes = sizes_of(output);
  check_like(grad, "grad", sizes, type, output);
  SoftmaxCall call{row_problem(sizes, dim, input_dtype, type), Device::empty_rows(sizes, input_dtype, output)};
  call.problem.log = log;
  call.problem.grad = view_of(grad, dim);
  call.problem.output = view_of(output, dim);
  call.problem.grad_input = view_of<MutableView3>(call.result, dim);
  return call;
}

template <class Device>
Tensor softmax_backward(Tensor grad, Tensor output, int64_t dim, bool log, ScalarType input_dtype) {
  const SoftmaxCall call = prepare_softmax_backward<Device>(grad, output, dim, log, input_dtype);
  Device::run(Device::kernels().softmax_backward, call.problem, output);
  return call.result;
}

// Returns the tensor in a dtype; copies it only if its dtype differs.
Tensor as_type(const Tensor& tensor, ScalarType type) {
  if (tensor.scalar_type() == type) return tensor;
  Tensor converted = empty(sizes_of(tensor), type, tensor);
  torch::stable::copy_(converted, tensor);
  return converted;
}

template <class Device>
Tensor logsumexp_forward(Tensor input, int64_t dim, std::optional<ScalarType> dtype) {
  check_floating(input, "input");
  check_dim(input, dim);
  const ScalarType type = input.scalar_type(), accumulator = accumulator_of(type), wanted = dtype.value_or(accumulator);
  check_result_dtype("dtype", wanted, type);
  const ScalarType computed = Device::kNarrowRowScalars ? wanted : accumulator;
  Tensor lse = empty(without_dim(sizes_of(input), dim), computed, input);
  RowProblem problem = row_problem(sizes_of(input), dim, type, computed);
  problem.input = view_of(input, dim);
  problem.lse = lse.data_ptr();
  Device::run(Device::kernels().logsumexp, problem, input);
  return as_type(lse, wanted);
}

template <class Device>
Tensor logsumexp_backward(Tensor grad, Tensor input, int64_t dim) {
  check_floating(input, "input");
  check_dim(input, dim);
  const ScalarType type = input.scalar_type();
  check_result_dtype("grad", grad.scalar_type(), type);
  check_like(grad, "grad", without_dim(sizes_of(input), dim), grad.scalar_type(), input);
  grad = as_contiguous(Device::kNarrowRowScalars ? grad : as_type(grad, accumulator_of(type)));
  Tensor grad_input = Device::empty_rows(sizes_of(input), type, input);
  RowProblem problem = row_problem(sizes_of(input), dim, type, grad.scalar_type());
  problem.input = view_of(input, dim);
  problem.grad_lse = grad.data_ptr();
  problem.grad_input = view_of<MutableView3>(grad_input, dim);
  Device::run(Device::kernels().logsumexp_backward, problem, input);
  return grad_input;
}

template <class Device, class Library>
void add_softmax(Library& m) {
  implement(m, "softmax_forward", TORCH_BOX(&softmax_forward<Device>));
  implement(m, "softmax_backward", TORCH_BOX(&softmax_backward<Device>));
  implement(m, "logsumexp_forward", TORCH_BOX(&logsumexp_forward<Device>));
  implement(m, "logsumexp_backward", TORCH_BOX(&logsumexp_backward<Device>));
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) { flash_online::ops::add_softmax<flash_online::ops::RowsOnCpu>(m); }

STABLE_TORCH_LIBRARY_IMPL(flash_online, CUDA, m) {
  if constexpr (flash_online::ops::kBuiltWithCuda) flash_online::ops::add_softmax<flash_online::ops::RowsOnCuda>(m);
}
