// Calls of attention, dense and packed: checks, and the problems that kernels are given. The same for every device.
#pragma once

#include <array>
#include <span>

#include "tensor.h"

namespace flash_online::ops {

// Any tensors of an attention call as [batch, heads, row, column] views. Batch dimensions that one stride can walk for every
// tensor are fused into one; the others are looped over, so that nothing is ever expanded or copied.
class Batches {
 public:
  // Null: no tensor. A mask's own sizes may be 1 in a batch dimension: its stride there is 0.
  Batches(std::span<const Tensor* const> tensors, std::vector<int64_t> sizes)
      : sizes_(std::move(sizes)), dims_(sizes_.size()), strides_(tensors.size() * dims_) {
    for (size_t n = 0; n < tensors.size(); ++n)
      for (size_t i = 0; tensors[n] && i < dims_; ++i)
        if (tensors[n]->size(i) != 1) strides_[n * dims_ + i] = tensors[n]->stride(i);
    for (size_t i = sizes_.size() - 1; i > 0; --i) fuse(i);
    inner_ = static_cast<int64_t>(sizes_.size()) - 1;
  }

  int64_t inner_size() const { return sizes_[inner_]; }
  int64_t inner_stride(int64_t tensor) const { return strides_[tensor * dims_ + inner_]; }
  int64_t outer_count() const {
    int64_t count = 1;
    for (int64_t i = 0; i < inner_; ++i) count *= sizes_[i];
    return count;
  }
  int64_t outer_offset(int64_t tensor, int64_t index) const {
    int64_t offset = 0;
    for (int64_t i = inner_ - 1; i >= 0; --i) {
      offset += index % sizes_[i] * strides_[tensor * dims_ + i];
      index /= sizes_[i];
    }
    return offset;
  }
  // Whether this outer index is the first to touch the tensor's part of it: a gradient there is overwritten, later ones add.
  bool first_visit(int64_t tensor, int64_t index) const {
    for (int64_t i = inner_ - 1; i >= 0; --i) {
      if (strides_[tensor * dims_ + i] == 0 && index % sizes_[i] != 0) return false;
      index /= sizes_[i];
    }
    return true;
  }

 private:
  // Makes one of dimensions i - 1 and i, if every tensor can walk both with one stride.
  void fuse(size_t i) {
    const bool one = sizes_[i] == 1 || sizes_[i - 1] == 1;
    for (size_t at = i; at < strides_.size(); at += dims_)
      if (!one && strides_[at - 1] != strides_[at] * sizes_[i]) return;
    for (size_t at = i; at < strides_.size(); at += dims_) {
      if (sizes_[i] != 1) strides_[at - 1] = strides_[at];
      std::copy_n(&strides_[at] + 1, sizes_.size() - 1 - i, &strides_[at]);
    }
    sizes_[i - 1] *= sizes_[i];
    sizes_.erase(sizes_.begin() + i);
  }

  std::vector<int64_t> sizes_;
  size_t dims_;                   // before any was fused
  std::vector<int64_t> strides_;  // [tensor][dims_]
  int64_t inner_ = 0;
};

struct Options {
  int64_t window_left, window_right;
  bool lower_right = false;
  double scale, softcap = 0, dropout_p = 0;
  bool tf32 = false;
};

inline bool on_one_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.get_device_index() == b.get_device_index();
}

struct Inputs {
  const Tensor &query, &key, &value;
  const std::optional<Tensor>&mask, &alibi_slopes, &sinks, &rng;
};

// Where dimensions are: dense [batch..., heads, rows, width], or packed [rows, heads, width].
struct Dims {
  int64_t rank, heads, rows;
  int64_t head_dim() const { return rank - 1; }
  int64_t batch() const { return rank - 3; }  // how many there are
};

// All but the slopes, whose shape the layouts disagree on.
inline void check_inputs(const Inputs& in, const Options& options, const Dims& dims) {
  const int64_t rank = dims.rank;
  check_floating(in.query, "query");
  const auto same_kind = [&](const Tensor& tensor, const char* name) {
    check(tensor.dim() == rank, name, ": expected query's rank ", rank, ", got ", shape_of(tensor));
    check(tensor.scalar_type() == in.query.scalar_type(), name, ": dtype must be query's, ", name_of(in.query.scalar_type()),
          ", got ", name_of(tensor.scalar_type()));
    check(on_one_device(tensor, in.query), name, ": must be on query's device");
    for (int64_t i = 0; i < dims.batch(); ++i)
      check(tensor.size(i) == in.query.size(i), name, ": batch dimension ", i, " is ", tensor.size(i), ", expected query's ",
            in.query.size(i));
  };
  same_kind(in.key, "key");
  same_kind(in.value, "value");
  const int64_t heads = in.query.size(dims.heads), queries = in.query.size(dims.rows), keys = in.key.size(dims.rows);
  check(in.key.size(dims.head_dim()) == in.query.size(dims.head_dim()), "key: width ", in.key.size(dims.head_dim()),
        ", expected query's ", in.query.size(dims.head_dim()));
  check(in.value.size(dims.rows) == keys, "value: length ", in.value.size(dims.rows), ", expected key's ", keys);
  const auto divides = [&](const Tensor& tensor, const char* name) {
    const int64_t own = tensor.size(dims.heads);
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

// Slopes [sizes..., heads] of any strides.
inline void check_slopes(const Inputs& in, const std::vector<int64_t>& sizes, const char* expected) {
  if (!in.alibi_slopes) return;
  check(in.alibi_slopes->scalar_type() == accumulator_of(in.query.scalar_type()),
        "alibi_slopes: dtype must be float32 (float64 for float64 inputs)");
  check(sizes_of(*in.alibi_slopes) == sizes, "alibi_slopes: expected ", expected, ", got ", shape_of(*in.alibi_slopes));
}

// What a call reads and writes beside its inputs. Null: there is none.
struct Results {
  const Tensor& out;
  const Tensor* lse = nullptr;
  const Tensor* lse_low = nullptr;
  const Tensor* grad_out = nullptr;
  const Tensor* grad_lse = nullptr;
  const Tensor* grad_query = nullptr;
  const Tensor* grad_key = nullptr;
  const Tensor* grad_value = nullptr;
  const Tensor* grad_mask = nullptr;
  const Tensor* grad_sinks = nullptr;  // [sequences..., heads], to be summed over sequences
  const Tensor* delta = nullptr;       // like lse
  const Tensor* wide_delta = nullptr;  // likewise
};

// What dense and packed calls have in common.
class Call {
 public:
  const Inputs& inputs() const { return in_; }
  const AttentionProblem& shape() const { return problem_; }
  const Dims& dims() const { return dims_; }
  std::vector<int64_t> out_sizes() const {
    std::vector<int64_t> sizes = sizes_of(in_.query);
    sizes.back() = problem_.head_dim_v;
    return sizes;
  }

 protected:
  Call(const Inputs& in, const Options& options, const Dims& dims) : in_(in), dims_(dims) {
    check_inputs(in, options, dims);
    problem_.dtype = dtype_of(in.query);
    problem_.heads = in.query.size(dims.heads);
    problem_.key_heads = in.key.size(dims.heads);
    problem_.value_heads = in.value.size(dims.heads);
    problem_.queries = in.query.size(dims.rows);
    problem_.keys = in.key.size(dims.rows);
    problem_.head_dim = in.query.size(dims.head_dim());
    problem_.head_dim_v = in.value.size(dims.head_dim());
    problem_.visible = {options.window_left, options.window_right, 0};
    problem_.lower_right = options.lower_right;
    problem_.scale = options.scale;
    problem_.softcap = options.softcap;
    problem_.dropout = options.dropout_p;
    problem_.tf32 = options.tf32;
    if (in.rng && options.dropout_p > 0) problem_.rng = in.rng->const_data_ptr<int64_t>();
    if (in.mask) problem_.mask_dtype = dtype_of(*in.mask);
    if (in.sinks) problem_.sinks = in.sinks->data_ptr();
  }

  // The strides of heads, rows and width; 0 where there is one only, which a mask is broadcast along.
  template <class View>
  void place_strides(const Tensor& tensor, View& view) const {
    const int64_t dims[] = {dims_.heads, dims_.rows, dims_.head_dim()};
    for (int64_t i = 0; i < 3; ++i) view.stride[i + 1] = tensor.size(dims[i]) == 1 ? 0 : tensor.stride(dims[i]);
  }

  const Inputs& in_;
  Dims dims_;
  AttentionProblem problem_;
};

// [batch..., heads, length, width], of any number of batch dimensions: problems over one batch dimension each.
class DenseCall : public Call {
 public:
  DenseCall(const Inputs& in, const Options& options) : Call(in, options, dims_of(in.query)) {
    problem_.visible.offset = options.lower_right ? problem_.keys - problem_.queries : 0;
    problem_.lse_stride[0] = problem_.heads * problem_.queries;
    problem_.lse_stride[1] = problem_.queries;
    check_slopes(in, sink_sizes(), "[batch..., heads]");
  }

  std::vector<int64_t> sink_sizes() const {
    std::vector<int64_t> sizes = lse_sizes();
    sizes.pop_back();
    return sizes;
  }
  std::vector<int64_t> lse_sizes() const {
    std::vector<int64_t> sizes = sizes_of(in_.query);
    sizes.pop_back();
    return sizes;
  }

  // Calls run(problem, gradients) for each problem, `gradients` filled if there are any.
  template <class Run>
  void for_each_problem(const Results& results, const Run& run) const {
    for (const int64_t size : sink_sizes())
      if (size == 0) return;
    std::array<const Tensor*, kTensors> all{};
    all[kQuery] = &in_.query;
    all[kKey] = &in_.key;
    all[kValue] = &in_.value;
    all[kMask] = in_.mask ? &*in_.mask : nullptr;
    all[kSlopes] = in_.alibi_slopes ? &*in_.alibi_slopes : nullptr;
    all[kOut] = &results.out;
    all[kLse] = results.lse;
    all[kLseLow] = results.lse_low;
    all[kGradOut] = results.grad_out;
    all[kGradLse] = results.grad_lse;
    all[kGradQuery] = results.grad_query;
    all[kGradKey] = results.grad_key;
    all[kGradValue] = results.grad_value;
    all[kGradMask] = results.grad_mask;
    all[kGradSinks] = results.grad_sinks;
    all[kDelta] = results.delta;
    all[kWideDelta] = results.wide_delta;
    std::vector<int64_t> sizes = sizes_of(in_.query);
    sizes.resize(dims_.batch());
    const Batches batches(all, std::move(sizes));

    for (int64_t outer = 0; outer < batches.outer_count(); ++outer) {
      AttentionProblem problem = problem_;
      AttentionGradients gradients;
      problem.batch = batches.inner_size();
      problem.batch_begin = outer * problem.batch;
      const auto start = [&](Which which) -> void* {
        if (!all[which]) return nullptr;
        const int64_t offset = batches.outer_offset(which, outer) * size_of(dtype_of(*all[which]));
        return static_cast<std::byte*>(all[which]->data_ptr()) + offset;
      };
      const auto place = [&](Which which, auto& view) {
        if (!all[which]) return;
        view.data = start(which);
        view.stride[0] = batches.inner_stride(which);
        place_strides(*all[which], view);
      };
      place(kQuery, problem.query);
      place(kKey, problem.key);
      place(kValue, problem.value);
      place(kMask, problem.mask);
      if (in_.alibi_slopes) {
        problem.alibi_slopes = start(kSlopes);
        problem.alibi_stride[0] = batches.inner_stride(kSlopes);
        problem.alibi_stride[1] = in_.alibi_slopes->stride(dims_.heads);
      }
      place(kOut, problem.out);
      problem.lse = start(kLse);
      problem.lse_low = start(kLseLow);
      place(kGradOut, gradients.grad_out);
      gradients.grad_lse = start(kGradLse);
      place(kGradQuery, gradients.grad_query);
      place(kGradKey, gradients.grad_key);
      place(kGradValue, gradients.grad_value);
      place(kGradMask, gradients.grad_mask);
      if (results.grad_mask) {
        gradients.grad_mask_dtype = dtype_of(*results.grad_mask);
        gradients.add_to_grad_mask = !batches.first_visit(kGradMask, outer);
        gradients.mask_size[0] = batches.inner_stride(kGradMask) == 0 ? 1 : problem.batch;
        for (int64_t i = 1; i < 4; ++i) gradients.mask_size[i] = results.grad_mask->size(dims_.rank - 4 + i);
      }
      gradients.grad_sinks = start(kGradSinks);
      gradients.delta = start(kDelta);
      gradients.wide_delta = static_cast<double*>(start(kWideDelta));
      run(problem, gradients);
    }
  }

 private:
  enum Which {
    kQuery,
    kKey,
    kValue,
    kMask,
    kSlopes,
    kOut,
    kLse,
    kLseLow,
    kGradOut,
    kGradLse,
    kGradQuery,
    kGradKey,
    kGradValue,
    kGradMask,
    kGradSinks,
    kDelta,
    kWideDelta,
    kTensors
  };

  static Dims dims_of(const Tensor& query) {
    check(query.dim() >= 4, "query: expected [batch..., heads, length, width], got ", shape_of(query));
    return {query.dim(), query.dim() - 3, query.dim() - 2};
  }
};

// [total, heads, width]: sequences one behind the other, in one problem.
class PackedCall : public Call {
 public:
  PackedCall(const Inputs& in, const Tensor& query_starts, const Tensor& key_starts, int64_t longest_query, int64_t longest_key,
             const Options& options)
      : Call(in, options, dims_of(in.query)) {
    check_starts(query_starts, "cu_seqlens_q");
    check_starts(key_starts, "cu_seqlens_k");
    check(query_starts.size(0) == key_starts.size(0), "cu_seqlens_k: ", key_starts.size(0), " starts, expected cu_seqlens_q's ",
          query_starts.size(0));
    check(longest_query >= 0, "max_seqlen_q: ", longest_query, ", expected 0 or more");
    check(longest_key >= 0, "max_seqlen_k: ", longest_key, ", expected 0 or more");
    problem_.batch = query_starts.size(0) - 1;
    problem_.query_starts = query_starts.const_data_ptr<int32_t>();
    problem_.key_starts = key_starts.const_data_ptr<int32_t>();
    problem_.total_queries = problem_.queries;
    problem_.total_keys = problem_.keys;
    problem_.queries = std::min(longest_query, problem_.total_queries);
    problem_.keys = std::min(longest_key, problem_.total_keys);
    problem_.lse_stride[1] = problem_.total_queries;
    check_slopes(in, sink_sizes(), "[sequences, heads]");
  }

  std::vector<int64_t> sink_sizes() const { return {problem_.batch, problem_.heads}; }
  std::vector<int64_t> lse_sizes() const { return {problem_.heads, problem_.total_queries}; }

  // As of a dense call; there is one problem at most.
  template <class Run>
  void for_each_problem(const Results& results, const Run& run) const {
    if (problem_.heads == 0) return;
    AttentionProblem problem = problem_;
    AttentionGradients gradients;
    const auto start = [](const Tensor* tensor) { return tensor ? tensor->data_ptr() : nullptr; };
    const auto place = [&](const Tensor* tensor, auto& view) {
      if (!tensor) return;
      view.data = tensor->data_ptr();
      place_strides(*tensor, view);
    };
    place(&in_.query, problem.query);
    place(&in_.key, problem.key);
    place(&in_.value, problem.value);
    if (in_.alibi_slopes) {
      problem.alibi_slopes = in_.alibi_slopes->data_ptr();
      for (int64_t i = 0; i < 2; ++i) problem.alibi_stride[i] = in_.alibi_slopes->stride(i);
    }
    place(&results.out, problem.out);
    problem.lse = start(results.lse);
    problem.lse_low = start(results.lse_low);
    place(results.grad_out, gradients.grad_out);
    gradients.grad_lse = start(results.grad_lse);
    place(results.grad_query, gradients.grad_query);
    place(results.grad_key, gradients.grad_key);
    place(results.grad_value, gradients.grad_value);
    gradients.grad_sinks = start(results.grad_sinks);
    gradients.delta = start(results.delta);
    gradients.wide_delta = static_cast<double*>(start(results.wide_delta));
    run(problem, gradients);
  }

 private:
  static Dims dims_of(const Tensor& query) {
    check(query.dim() == 3, "query: expected [total, heads, width], got ", shape_of(query));
    return {3, 1, 0};
  }
  void check_starts(const Tensor& starts, const char* name) const {
    check(starts.scalar_type() == ScalarType::Int, name, ": dtype must be int32, got ", name_of(starts.scalar_type()));
    check(starts.dim() == 1 && starts.size(0) >= 1 && starts.is_contiguous(), name,
          ": expected [sequences + 1], contiguous, got ", shape_of(starts));
    check(on_one_device(starts, in_.query), name, ": must be on query's device");
  }
};

}  // namespace flash_online::ops
