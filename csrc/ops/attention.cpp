// attention_forward, attention_backward, attention_merge and its backward: checks -> problem -> kernels.
#include "../cpu/kernels.h"
#include "tensor.h"

namespace flash_online::ops {
namespace {

// Any tensors of an attention call as [batch, heads, row, column] views. Batch dimensions that one stride can walk for every
// tensor are fused into one; the others are looped over, so that nothing is ever expanded or copied.
class Batches {
 public:
  // A mask's own sizes may be 1 in a batch dimension: its stride there is 0.
  void add(const Tensor& tensor, int64_t batch_dims) {
    std::vector<int64_t> strides;
    for (int64_t i = 0; i < batch_dims; ++i) strides.push_back(tensor.size(i) == 1 ? 0 : tensor.stride(i));
    strides_.push_back(strides);
  }

  void fuse(std::vector<int64_t> sizes) {
    sizes_ = std::move(sizes);
    for (int64_t i = static_cast<int64_t>(sizes_.size()) - 1; i > 0; --i) {
      const bool one = sizes_[i] == 1 || sizes_[i - 1] == 1;
      bool walkable = true;
      for (const auto& strides : strides_) walkable &= one || strides[i - 1] == strides[i] * sizes_[i];
      if (!walkable) continue;
      for (auto& strides : strides_) {
        strides[i - 1] = sizes_[i] == 1 ? strides[i - 1] : strides[i];
        strides.erase(strides.begin() + i);
      }
      sizes_[i - 1] *= sizes_[i];
      sizes_.erase(sizes_.begin() + i);
    }
    inner_ = static_cast<int64_t>(sizes_.size()) - 1;
  }

  int64_t inner_size() const { return sizes_[inner_]; }
  int64_t inner_stride(int64_t tensor) const { return strides_[tensor][inner_]; }
  int64_t outer_count() const {
    int64_t count = 1;
    for (int64_t i = 0; i < inner_; ++i) count *= sizes_[i];
    return count;
  }
  int64_t outer_offset(int64_t tensor, int64_t index) const {
    int64_t offset = 0;
    for (int64_t i = inner_ - 1; i >= 0; --i) {
      offset += index % sizes_[i] * strides_[tensor][i];
      index /= sizes_[i];
    }
    return offset;
  }
  // Whether this outer index is the first to touch the tensor's part of it: a gradient there is overwritten, later ones add.
  bool first_visit(int64_t tensor, int64_t index) const {
    for (int64_t i = inner_ - 1; i >= 0; --i) {
      if (strides_[tensor][i] == 0 && index % sizes_[i] != 0) return false;
      index /= sizes_[i];
    }
    return true;
  }

 private:
  std::vector<int64_t> sizes_;
  std::vector<std::vector<int64_t>> strides_;  // [tensor][dimension]
  int64_t inner_ = 0;
};

struct Options {
  int64_t window_left, window_right;
  bool lower_right;
  double scale, softcap, dropout_p;
};

struct Inputs {
  const Tensor &query, &key, &value;
  const std::optional<Tensor>&mask, &alibi_slopes, &sinks, &rng;
};

void check_inputs(const Inputs& in, const Options& options) {
  const int64_t rank = in.query.dim();
  check(rank >= 4, "query: expected [batch..., heads, length, width], got ", shape_of(in.query));
  check_floating(in.query, "query");
  const auto same_kind = [&](const Tensor& tensor, const char* name) {
    check(tensor.dim() == rank, name, ": expected query's rank ", rank, ", got ", shape_of(tensor));
    check(tensor.scalar_type() == in.query.scalar_type(), name, ": dtype must be query's, ", name_of(in.query.scalar_type()),
          ", got ", name_of(tensor.scalar_type()));
    check(tensor.is_cpu() == in.query.is_cpu() && tensor.get_device_index() == in.query.get_device_index(), name,
          ": must be on query's device");
    for (int64_t i = 0; i < rank - 3; ++i)
      check(tensor.size(i) == in.query.size(i), name, ": batch dimension ", i, " is ", tensor.size(i), ", expected query's ",
            in.query.size(i));
  };
  same_kind(in.key, "key");
  same_kind(in.value, "value");
  const int64_t heads = in.query.size(rank - 3), queries = in.query.size(rank - 2), keys = in.key.size(rank - 2);
  check(in.key.size(rank - 1) == in.query.size(rank - 1), "key: width ", in.key.size(rank - 1), ", expected query's ",
        in.query.size(rank - 1));
  check(in.value.size(rank - 2) == keys, "value: length ", in.value.size(rank - 2), ", expected key's ", keys);
  const auto divides = [&](const Tensor& tensor, const char* name) {
    const int64_t own = tensor.size(rank - 3);
    check(heads == 0 ? own == 0 : own > 0 && heads % own == 0, name, ": ", own, " heads, which does not divide query's ",
          heads);
  };
  divides(in.key, "key");
  divides(in.value, "value");
  if (in.mask) {
    const Tensor& mask = *in.mask;
    check(mask.dim() == rank, "mask: expected query's rank ", rank, ", got ", shape_of(mask));
    const DType dtype = dtype_of(mask);
    check(dtype != DType::kInt64, "mask: dtype must be bool or floating");
    for (int64_t i = 0; i < rank; ++i) {
      const int64_t full = i < rank - 2 ? in.query.size(i) : i == rank - 2 ? queries : keys;
      check(mask.size(i) == 1 || mask.size(i) == full, "mask: dimension ", i, " is ", mask.size(i), ", expected 1 or ", full);
    }
  }
  const ScalarType accumulator = accumulator_of(in.query.scalar_type());
  if (in.alibi_slopes) {
    check(in.alibi_slopes->scalar_type() == accumulator, "alibi_slopes: dtype must be float32 (float64 for float64 inputs)");
    check(in.alibi_slopes->dim() == rank - 2, "alibi_slopes: expected [batch..., heads], got ", shape_of(*in.alibi_slopes));
    for (int64_t i = 0; i < rank - 2; ++i)
      check(in.alibi_slopes->size(i) == in.query.size(i), "alibi_slopes: expected [batch..., heads], got ",
            shape_of(*in.alibi_slopes));
  }
  if (in.sinks) {
    check(in.sinks->scalar_type() == accumulator, "sinks: dtype must be float32 (float64 for float64 inputs)");
    check(in.sinks->dim() == 1 && in.sinks->size(0) == heads && in.sinks->is_contiguous(), "sinks: expected [", heads,
          "], got ", shape_of(*in.sinks));
  }
  check(options.dropout_p >= 0 && options.dropout_p <= 1, "dropout_p: ", options.dropout_p, ", expected 0 to 1");
  check(options.dropout_p == 0 || in.rng, "rng: wanted where dropout_p > 0");
  if (in.rng)
    check(in.rng->scalar_type() == ScalarType::Long && in.rng->numel() == 2 && in.rng->is_contiguous(),
          "rng: expected int64[2], got ", shape_of(*in.rng));
  check(options.softcap >= 0, "softcap: ", options.softcap, ", expected 0 (none) or more");
}

// A call as problems over one batch dimension each. Tensors are numbered in the order they are added.
class Call {
 public:
  Call(const Inputs& in, const Options& options) : in_(in) {
    rank_ = in.query.dim();
    problem_.dtype = dtype_of(in.query);
    problem_.heads = in.query.size(rank_ - 3);
    problem_.key_heads = in.key.size(rank_ - 3);
    problem_.value_heads = in.value.size(rank_ - 3);
    problem_.queries = in.query.size(rank_ - 2);
    problem_.keys = in.key.size(rank_ - 2);
    problem_.width = in.query.size(rank_ - 1);
    problem_.value_width = in.value.size(rank_ - 1);
    problem_.visible = {options.window_left, options.window_right, options.lower_right ? problem_.keys - problem_.queries : 0};
    problem_.scale = options.scale;
    problem_.softcap = options.softcap;
    problem_.dropout = options.dropout_p;
    if (in.rng && options.dropout_p > 0) problem_.rng = in.rng->const_data_ptr<int64_t>();
    if (in.mask) problem_.mask_dtype = dtype_of(*in.mask);
    if (in.sinks) problem_.sinks = in.sinks->data_ptr();
  }

  int64_t rank() const { return rank_; }
  const AttentionProblem& shape() const { return problem_; }
  std::vector<int64_t> leading() const {  // [batch..., heads, queries]
    std::vector<int64_t> sizes = sizes_of(in_.query);
    sizes.pop_back();
    return sizes;
  }

  // Calls run(problem, gradients, outer_offset...) for each problem, `gradients` filled if there are any.
  struct Tensors {
    const Tensor &out, &lse, &lse_low;
    const Tensor* grad_out = nullptr;
    const Tensor* grad_lse = nullptr;
    const Tensor* grad_query = nullptr;
    const Tensor* grad_key = nullptr;
    const Tensor* grad_value = nullptr;
    const Tensor* grad_mask = nullptr;
    const Tensor* grad_sinks = nullptr;  // [batch..., heads]
    const Tensor* delta = nullptr;       // [batch..., heads, queries]
    const Tensor* wide_delta = nullptr;  // likewise
  };
  template <class Run>
  void for_each_problem(const Tensors& tensors, const Run& run) const {
    for (int64_t i = 0; i < rank_; ++i)
      if (i < rank_ - 2 && in_.query.size(i) == 0) return;
    std::vector<const Tensor*> all = {&in_.query,
                                      &in_.key,
                                      &in_.value,
                                      in_.mask ? &*in_.mask : nullptr,
                                      in_.alibi_slopes ? &*in_.alibi_slopes : nullptr,
                                      &tensors.out,
                                      &tensors.lse,
                                      &tensors.lse_low,
                                      tensors.grad_out,
                                      tensors.grad_lse,
                                      tensors.grad_query,
                                      tensors.grad_key,
                                      tensors.grad_value,
                                      tensors.grad_mask,
                                      tensors.grad_sinks,
                                      tensors.delta,
                                      tensors.wide_delta};
    Batches batches;
    for (const Tensor* tensor : all) batches.add(tensor ? *tensor : in_.query, rank_ - 3);
    std::vector<int64_t> sizes = sizes_of(in_.query);
    sizes.resize(rank_ - 3);
    batches.fuse(sizes);

    for (int64_t outer = 0; outer < batches.outer_count(); ++outer) {
      AttentionProblem problem = problem_;
      AttentionGradients gradients;
      problem.batch = batches.inner_size();
      problem.batch_begin = outer * problem.batch;
      const auto place = [&](int64_t index, auto& view) {
        const Tensor& tensor = *all[index];
        const int64_t offset = batches.outer_offset(index, outer) * size_of(dtype_of(tensor));
        view.data = static_cast<std::byte*>(tensor.data_ptr()) + offset;
        view.stride[0] = batches.inner_stride(index);
        for (int64_t i = 1; i < 4; ++i) view.stride[i] = tensor.size(rank_ - 4 + i) == 1 ? 0 : tensor.stride(rank_ - 4 + i);
      };
      const auto start = [&](int64_t index) -> void* {
        return static_cast<std::byte*>(all[index]->data_ptr()) +
               batches.outer_offset(index, outer) * size_of(dtype_of(*all[index]));
      };
      place(0, problem.query);
      place(1, problem.key);
      place(2, problem.value);
      if (all[3]) place(3, problem.mask);
      if (all[4]) {
        problem.alibi_slopes = start(4);
        problem.alibi_stride[0] = batches.inner_stride(4);
        problem.alibi_stride[1] = all[4]->stride(rank_ - 3);
      }
      place(5, problem.out);
      problem.lse = start(6);
      problem.lse_low = start(7);
      problem.lse_stride[0] = problem.heads * problem.queries;
      problem.lse_stride[1] = problem.queries;
      if (tensors.grad_out) {
        place(8, gradients.grad_out);
        if (all[9]) gradients.grad_lse = start(9);
        place(10, gradients.grad_query);
        place(11, gradients.grad_key);
        place(12, gradients.grad_value);
        if (all[13]) {
          place(13, gradients.grad_mask);
          gradients.grad_mask_dtype = dtype_of(*all[13]);
          gradients.add_to_grad_mask = !batches.first_visit(13, outer);
          gradients.mask_size[0] = batches.inner_stride(13) == 0 ? 1 : problem.batch;
          for (int64_t i = 1; i < 4; ++i) gradients.mask_size[i] = all[13]->size(rank_ - 4 + i);
        }
        if (all[14]) gradients.grad_sinks = start(14);
        gradients.delta = start(15);
        if (all[16]) gradients.wide_delta = static_cast<double*>(start(16));
      }
      run(problem, gradients);
    }
  }

 private:
  const Inputs& in_;
  int64_t rank_;
  AttentionProblem problem_;
};

std::tuple<Tensor, Tensor, Tensor> attention_forward_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                                         const std::optional<Tensor>& mask,
                                                         const std::optional<Tensor>& alibi_slopes,
                                                         const std::optional<Tensor>& sinks, const std::optional<Tensor>& rng,
                                                         int64_t window_left, int64_t window_right, bool lower_right,
                                                         double scale, double softcap, double dropout_p) {
  const Inputs in{query, key, value, mask, alibi_slopes, sinks, rng};
  const Options options{window_left, window_right, lower_right, scale, softcap, dropout_p};
  check_inputs(in, options);
  const Call call(in, options);
  const AttentionProblem& shape = call.shape();

  std::vector<int64_t> out_sizes = sizes_of(query);
  out_sizes.back() = shape.value_width;
  const ScalarType accumulator = accumulator_of(query.scalar_type());
  Tensor out = empty_in_order(out_sizes, query.scalar_type(), query);
  Tensor lse = empty(call.leading(), accumulator, query), lse_low = empty(call.leading(), accumulator, query);
  const cpu::AttentionKernels& kernels = cpu::kernels().attention;
  std::optional<CpuExecutor> executor;  // one for all problems, which differ in their pointers alone
  call.for_each_problem({out, lse, lse_low}, [&](const AttentionProblem& problem, const AttentionGradients&) {
    if (!executor) executor.emplace(lse.numel(), kernels.forward_memory(problem), query);
    kernels.forward(problem, *executor);
  });
  return {out, lse, lse_low};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward_cpu(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& rng, const Tensor& out, const Tensor& lse, const Tensor& lse_low, int64_t window_left,
    int64_t window_right, bool lower_right, double scale, double softcap, double dropout_p, bool mask_grad,
    bool /*deterministic: every CPU kernel is*/) {
  const Inputs in{query, key, value, mask, alibi_slopes, sinks, rng};
  const Options options{window_left, window_right, lower_right, scale, softcap, dropout_p};
  check_inputs(in, options);
  const Call call(in, options);
  const ScalarType type = query.scalar_type(), accumulator = accumulator_of(type);
  check(sizes_of(grad_out) == sizes_of(out) && grad_out.scalar_type() == type, "grad_out: expected out's shape ", shape_of(out),
        " and dtype, got ", shape_of(grad_out));
  check(sizes_of(lse) == call.leading() && sizes_of(lse_low) == call.leading() && lse.is_contiguous() &&
            lse_low.is_contiguous() && lse.scalar_type() == accumulator && lse_low.scalar_type() == accumulator,
        "lse: expected the forward's, got ", shape_of(lse));
  std::optional<Tensor> lse_cotangent;
  if (grad_lse) {
    check(sizes_of(*grad_lse) == call.leading() && grad_lse->scalar_type() == accumulator, "grad_lse: expected lse's shape ",
          shape_of(lse), " and dtype, got ", shape_of(*grad_lse));
    lse_cotangent = torch::stable::contiguous(*grad_lse);
  }
  check(!mask_grad || (mask && mask->scalar_type() != ScalarType::Bool), "mask_grad: wanted, but there is no float mask");

  Tensor grad_query = empty_in_order(sizes_of(query), type, query);
  Tensor grad_key = empty_in_order(sizes_of(key), type, key);
  Tensor grad_value = empty_in_order(sizes_of(value), type, value);
  Tensor grad_mask = mask_grad ? empty_in_order(sizes_of(*mask), mask->scalar_type(), *mask) : empty({0}, type, query);
  std::vector<int64_t> heads_sizes = call.leading();
  heads_sizes.pop_back();
  Tensor head_sinks = empty(sinks ? heads_sizes : std::vector<int64_t>{0}, accumulator, query);

  const Tensor delta = empty(call.leading(), accumulator, query);
  std::optional<Tensor> wide_delta;
  if (type == ScalarType::Float) wide_delta = empty(call.leading(), ScalarType::Double, query);
  int64_t planes = 1;
  for (const int64_t size : heads_sizes) planes *= size;
  if (planes == 0 && mask_grad) torch::stable::zero_(grad_mask);  // the one gradient with elements that no work item reaches
  const cpu::AttentionKernels& kernels = cpu::kernels().attention;
  const int64_t tiles_at_most = std::max(lse.numel(), grad_mask.numel());
  std::optional<CpuExecutor> executor;
  call.for_each_problem({.out = out,
                         .lse = lse,
                         .lse_low = lse_low,
                         .grad_out = &grad_out,
                         .grad_lse = lse_cotangent ? &*lse_cotangent : nullptr,
                         .grad_query = &grad_query,
                         .grad_key = &grad_key,
                         .grad_value = &grad_value,
                         .grad_mask = mask_grad ? &grad_mask : nullptr,
                         .grad_sinks = sinks ? &head_sinks : nullptr,
                         .delta = &delta,
                         .wide_delta = wide_delta ? &*wide_delta : nullptr},
                        [&](const AttentionProblem& problem, const AttentionGradients& gradients) {
                          if (!executor) executor.emplace(tiles_at_most, kernels.backward_memory(problem, gradients), query);
                          kernels.backward(problem, gradients, *executor);
                        });
  if (!sinks) return {grad_query, grad_key, grad_value, grad_mask, head_sinks};
  std::vector<int64_t> batch_dims;
  for (int64_t i = 0; i < call.rank() - 3; ++i) batch_dims.push_back(i);
  return {grad_query, grad_key, grad_value, grad_mask, torch::stable::sum(head_sinks, batch_dims)};
}

Tensor attention_dropout_mask_cpu(const Tensor& rng, int64_t batch, int64_t heads, int64_t query_begin, int64_t queries,
                                  int64_t keys, double dropout_p) {
  check(rng.scalar_type() == ScalarType::Long && rng.numel() == 2 && rng.is_contiguous(), "rng: expected int64[2], got ",
        shape_of(rng));
  Tensor keep = empty({batch, heads, queries, keys}, ScalarType::Bool, rng);
  const DropoutProblem problem{.rng = rng.const_data_ptr<int64_t>(),
                               .batch = batch,
                               .heads = heads,
                               .query_begin = query_begin,
                               .queries = queries,
                               .keys = keys,
                               .dropout = dropout_p,
                               .keep = keep.mutable_data_ptr<bool>()};
  cpu::kernels().attention.dropout_mask(problem, CpuExecutor(batch * heads * queries, {}, rng));
  return keep;
}

// The parts of a merge, checked and flattened; `rows` and `width` come with them.
struct Parts {
  std::vector<Tensor> keep;  // what the pointers point into
  std::vector<MergePart> part;
  MergeProblem problem;

  Parts(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses) {
    check(!outs.empty(), "outs: expected at least one partial result, got none");
    check(outs.size() == lses.size(), "lses: ", lses.size(), " tensors, expected one for each of the ", outs.size(), " outs");
    const Tensor& first = outs[0];
    check_floating(first, "outs");
    check(first.dim() >= 1, "outs: expected [..., width], got ", shape_of(first));
    problem.dtype = dtype_of(first);
    problem.width = first.size(first.dim() - 1);
    problem.rows = 1;
    for (int64_t i = 0; i + 1 < first.dim(); ++i) problem.rows *= first.size(i);
    problem.parts = static_cast<int64_t>(outs.size());
    std::vector<int64_t> leading = sizes_of(first);
    leading.pop_back();
    for (size_t n = 0; n < outs.size(); ++n) {
      check(sizes_of(outs[n]) == sizes_of(first) && outs[n].scalar_type() == first.scalar_type(), "outs[", n,
            "]: expected shape ", shape_of(first), " and dtype of outs[0], got ", shape_of(outs[n]));
      check(sizes_of(lses[n]) == leading && lses[n].scalar_type() == accumulator_of(first.scalar_type()), "lses[", n,
            "]: expected outs' shape without its last dimension and float32 (float64 for float64 outs), got ",
            shape_of(lses[n]));
      keep.push_back(torch::stable::contiguous(outs[n]));
      keep.push_back(torch::stable::contiguous(lses[n]));
      part.push_back(
          {.out = keep[2 * n].data_ptr(), .row_stride = problem.width, .column_stride = 1, .lse = keep[2 * n + 1].data_ptr()});
    }
    problem.part = part.data();
  }
};

std::tuple<Tensor, Tensor> attention_merge_cpu(std::vector<Tensor> outs, std::vector<Tensor> lses) {
  Parts parts(outs, lses);
  Tensor out = empty(sizes_of(outs[0]), outs[0].scalar_type(), outs[0]),
         lse = empty(sizes_of(lses[0]), lses[0].scalar_type(), lses[0]);
  parts.problem.out = out.data_ptr();
  parts.problem.lse = lse.data_ptr();
  cpu::kernels().attention.merge(parts.problem, CpuExecutor(parts.problem.rows, {}, out));
  return {out, lse};
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>> attention_merge_backward_cpu(const Tensor& grad_out,
                                                                                  const Tensor& grad_lse,
                                                                                  std::vector<Tensor> outs,
                                                                                  std::vector<Tensor> lses) {
  Parts parts(outs, lses);
  check(sizes_of(grad_out) == sizes_of(outs[0]) && grad_out.scalar_type() == outs[0].scalar_type(),
        "grad_out: expected outs' shape ", shape_of(outs[0]), " and dtype, got ", shape_of(grad_out));
  check(sizes_of(grad_lse) == sizes_of(lses[0]) && grad_lse.scalar_type() == lses[0].scalar_type(),
        "grad_lse: expected lses' shape ", shape_of(lses[0]), " and dtype, got ", shape_of(grad_lse));
  const Tensor out_cotangent = torch::stable::contiguous(grad_out), lse_cotangent = torch::stable::contiguous(grad_lse);
  std::vector<Tensor> grad_outs, grad_lses;
  for (size_t n = 0; n < outs.size(); ++n) {
    grad_outs.push_back(empty(sizes_of(outs[n]), outs[n].scalar_type(), outs[n]));
    grad_lses.push_back(empty(sizes_of(lses[n]), lses[n].scalar_type(), lses[n]));
    parts.part[n].grad_out = grad_outs[n].data_ptr();
    parts.part[n].grad_lse = grad_lses[n].data_ptr();
  }
  cpu::kernels().attention.merge_backward(parts.problem,
                                          {.grad_out = out_cotangent.data_ptr(), .grad_lse = lse_cotangent.data_ptr()},
                                          CpuExecutor(parts.problem.rows, {}, grad_out));
  return {grad_outs, grad_lses};
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&flash_online::ops::attention_forward_cpu));
  m.impl("attention_backward", TORCH_BOX(&flash_online::ops::attention_backward_cpu));
  m.impl("attention_dropout_mask", TORCH_BOX(&flash_online::ops::attention_dropout_mask_cpu));
  m.impl("attention_merge", TORCH_BOX(&flash_online::ops::attention_merge_cpu));
  m.impl("attention_merge_backward", TORCH_BOX(&flash_online::ops::attention_merge_backward_cpu));
}
