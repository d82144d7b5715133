// The k largest probabilities of a softmax, with their backward pass.
#include <tuple>

#include "operators.h"
#include "row_call.h"

namespace flash_online::ops {
namespace {

template <class Device>
std::tuple<Tensor, Tensor> topk_softmax_forward(Tensor input, int64_t k, int64_t dim, bool renormalize, ScalarType dtype) {
  check_floating(input, "input");
  check_dim(input, dim);
  check_result_dtype("dtype", dtype, input.scalar_type());
  check(input.size(dim) <= Device::kMostTopkClasses, "input: expected at most ", Device::kMostTopkClasses,
        " elements along dim on CUDA, got ", input.size(dim));
  check(k >= 0 && k <= input.size(dim), "k: expected 0 to ", input.size(dim), ", the input's size along dim ", dim, ", got ",
        k);
  const std::vector<int64_t> sizes = with_dim_size(sizes_of(input), dim, k);
  Tensor probabilities = empty(sizes, dtype, input), indices = empty(sizes, ScalarType::Long, input);
  RowProblem problem = row_problem(sizes_of(input), dim, input.scalar_type(), dtype);
  problem.k = k;
  problem.renormalize = renormalize;
  problem.input = view_of(input, dim);
  problem.result = view_of<MutableView3>(probabilities, dim);
  problem.indices = view_of<View3<int64_t*>>(indices, dim);
  Device::run(Device::kernels().topk_softmax, problem, input);
  return {probabilities, indices};
}

template <class Device>
Tensor topk_softmax_backward(Tensor grad, Tensor probabilities, Tensor indices, Tensor input, int64_t dim, bool renormalize) {
  check_floating(input, "input");
  check_dim(input, dim);
  check(probabilities.dim() == input.dim(), "probabilities: expected as many dimensions as the input's, ", input.dim(),
        ", got ", probabilities.dim());
  const int64_t k = probabilities.size(dim);
  check(k <= input.size(dim), "probabilities: expected at most ", input.size(dim), " along dim ", dim, ", got ", k);
  const std::vector<int64_t> sizes = with_dim_size(sizes_of(input), dim, k);
  check_result_dtype("probabilities", probabilities.scalar_type(), input.scalar_type());
  check_like(probabilities, "probabilities", sizes, probabilities.scalar_type(), input);
  check_like(grad, "grad", sizes, probabilities.scalar_type(), input);
  check_like(indices, "indices", sizes, ScalarType::Long, input);
  Tensor grad_input = Device::empty_rows(sizes_of(input), input.scalar_type(), input);
  int64_t bad_row = -1;
  RowProblem problem = row_problem(sizes_of(input), dim, input.scalar_type(), probabilities.scalar_type());
  problem.k = k;
  problem.renormalize = renormalize;
  problem.input = view_of(input, dim);
  problem.grad = view_of(grad, dim);
  problem.output = view_of(probabilities, dim);
  problem.indices = view_of<View3<int64_t*>>(indices, dim);
  problem.grad_input = view_of<MutableView3>(grad_input, dim);
  problem.bad_row = &bad_row;
  Device::run(Device::kernels().topk_softmax_backward, problem, input);
  check(bad_row < 0, "indices: expected 0 to ", problem.classes - 1, ", got one out of bounds in row ", bad_row);
  return grad_input;
}

template <class Device, class Library>
void add_topk(Library& m) {
  implement(m, "topk_softmax_forward", TORCH_BOX(&topk_softmax_forward<Device>));
  implement(m, "topk_softmax_backward", TORCH_BOX(&topk_softmax_backward<Device>));
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) { flash_online::ops::add_topk<flash_online::ops::RowsOnCpu>(m); }

STABLE_TORCH_LIBRARY_IMPL(flash_online, CUDA, m) {
  if constexpr (flash_online::ops::kBuiltWithCuda) flash_online::ops::add_topk<flash_online::ops::RowsOnCuda>(m);
}
