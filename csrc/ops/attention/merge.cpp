// attention_merge and its backward pass: checks -> problem -> kernels.
#include "../../cpu/kernels.h"
#include "../../cuda/attention/attention.h"
#include "../cuda_call.h"
#include "../operators.h"
#include "../tensor.h"

namespace flash_online::ops {
namespace {

// The partial results that a merge is given, checked and flattened to rows.
template <class Device>
struct Partials {
  std::vector<Tensor> held;  // the tensors that `partial` points into
  std::vector<MergePartial> partial;
  MergeProblem problem;

  Partials(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses) {
    check(!outs.empty(), "outs: expected at least one partial result, got none");
    check(outs.size() == lses.size(), "lses: expected one for each of the ", outs.size(), " outs, got ", lses.size());
    const Tensor& first = outs[0];
    check_floating(first, "outs");
    check(first.dim() >= 1, "outs: expected [..., width], got ", shape_of(first));
    problem.dtype = dtype_of(first);
    problem.head_dim = first.size(first.dim() - 1);
    problem.rows = 1;
    for (int64_t i = 0; i + 1 < first.dim(); ++i) problem.rows *= first.size(i);
    problem.partials = static_cast<int64_t>(outs.size());
    std::vector<int64_t> leading = sizes_of(first);
    leading.pop_back();
    take_lse_strides(lses);
    for (size_t n = 0; n < outs.size(); ++n) {
      check(sizes_of(outs[n]) == sizes_of(first) && outs[n].scalar_type() == first.scalar_type(), "outs[", n,
            "]: expected shape ", shape_of(first), " and dtype of outs[0], got ", shape_of(outs[n]));
      check(on_one_device(outs[n], first), "outs[", n, "]: expected the device of outs[0], got another");
      check(on_one_device(lses[n], first), "lses[", n, "]: expected the device of outs[0], got another");
      check(sizes_of(lses[n]) == leading && lses[n].scalar_type() == accumulator_of(first.scalar_type()), "lses[", n,
            "]: expected outs' shape without its last dimension and float32 (float64 for float64 outs), got ",
            shape_of(lses[n]));
      held.push_back(as_contiguous(outs[n]));
      held.push_back(problem.inner_rows > 1 ? lses[n] : as_contiguous(lses[n]));
      partial.push_back({.out = held[2 * n].data_ptr(),
                         .row_stride = problem.head_dim,
                         .column_stride = 1,
                         .lse = held[2 * n + 1].data_ptr()});
    }
    problem.partial = partial.data();
  }

 private:
  // Lses [outer, inner] are read in place if all have equal strides; otherwise they are copied unless contiguous.
  void take_lse_strides(const std::vector<Tensor>& lses) {
    const Tensor& first = lses[0];
    const bool alike = first.dim() == 2 && std::all_of(lses.begin(), lses.end(), [&](const Tensor& lse) {
                         return lse.dim() == 2 && lse.stride(0) == first.stride(0) && lse.stride(1) == first.stride(1);
                       });
    if (!alike || problem.rows >= int64_t{1} << 32 || first.size(1) <= 1) return;
    problem.inner_rows = first.size(1);
    problem.lse_stride[0] = first.stride(0);
    problem.lse_stride[1] = first.stride(1);
  }
};

// The devices of a merge.
struct MergeOnCpu : Cpu {
  static void run(const MergeProblem& problem, const Tensor& like) {
    cpu::kernels().attention.merge(problem, CpuExecutor(problem.rows, {}, like));
  }
  static void run_backward(const MergeProblem& problem, const MergeGradients& gradients, const Tensor& like) {
    cpu::kernels().attention.merge_backward(problem, gradients, CpuExecutor(problem.rows, {}, like));
  }
};

struct MergeOnCuda : Cuda {
  static void run(const MergeProblem& problem, const Tensor& like) {
    CudaCall call(like);
    cuda::attention_merge(problem, call.workspace(cuda::attention_merge_workspace(problem)), call.stream());
  }
  static void run_backward(const MergeProblem& problem, const MergeGradients& gradients, const Tensor& like) {
    CudaCall call(like);
    cuda::attention_merge_backward(problem, gradients, call.workspace(cuda::attention_merge_workspace(problem)), call.stream());
  }
};

template <class Device>
std::tuple<Tensor, Tensor> attention_merge(std::vector<Tensor> outs, std::vector<Tensor> lses) {
  Partials<Device> partials(outs, lses);
  Tensor out = empty(sizes_of(outs[0]), outs[0].scalar_type(), outs[0]),
         lse = empty(sizes_of(lses[0]), lses[0].scalar_type(), lses[0]);
  partials.problem.out = out.data_ptr();
  partials.problem.lse = lse.data_ptr();
  Device::run(partials.problem, out);
  return {out, lse};
}

template <class Device>
std::tuple<std::vector<Tensor>, std::vector<Tensor>> attention_merge_backward(const Tensor& grad_out, const Tensor& grad_lse,
                                                                              std::vector<Tensor> outs,
                                                                              std::vector<Tensor> lses) {
  Partials<Device> partials(outs, lses);
  check_device(grad_out, "grad_out", outs[0], "outs[0]");
  check_device(grad_lse, "grad_lse", outs[0], "outs[0]");
  check(sizes_of(grad_out) == sizes_of(outs[0]) && grad_out.scalar_type() == outs[0].scalar_type(),
        "grad_out: expected outs' shape ", shape_of(outs[0]), " and dtype, got ", shape_of(grad_out));
  check(sizes_of(grad_lse) == sizes_of(lses[0]) && grad_lse.scalar_type() == lses[0].scalar_type(),
        "grad_lse: expected lses' shape ", shape_of(lses[0]), " and dtype, got ", shape_of(grad_lse));
  const Tensor grad_out_rows = as_contiguous(grad_out), grad_lse_rows = as_contiguous(grad_lse);
  std::vector<Tensor> grad_outs, grad_lses;
  for (size_t n = 0; n < outs.size(); ++n) {
    grad_outs.push_back(empty(sizes_of(outs[n]), outs[n].scalar_type(), outs[n]));
    grad_lses.push_back(empty(sizes_of(lses[n]), lses[n].scalar_type(), lses[n]));
    partials.partial[n].grad_out = grad_outs[n].data_ptr();
    partials.partial[n].grad_lse = grad_lses[n].data_ptr();
  }
  Device::run_backward(partials.problem, {.grad_out = grad_out_rows.data_ptr(), .grad_lse = grad_lse_rows.data_ptr()},
                       grad_out);
  return {grad_outs, grad_lses};
}

template <class Device, class Library>
void add_merge(Library& m) {
  implement(m, "attention_merge", TORCH_BOX(&attention_merge<Device>));
  implement(m, "attention_merge_backward", TORCH_BOX(&attention_merge_backward<Device>));
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) { flash_online::ops::add_merge<flash_online::ops::MergeOnCpu>(m); }

STABLE_TORCH_LIBRARY_IMPL(flash_online, CUDA, m) {
  if constexpr (flash_online::ops::kBuiltWithCuda) flash_online::ops::add_merge<flash_online::ops::MergeOnCuda>(m);
}
