// Calls of attention, dense and packed: checks, and the problems for kernels. Nothing here depends on the device.
#pragma once

#include <array>
#include <cmath>
#include <span>

#include "../../core/batches.h"
#include "../tensor.h"

namespace flash_online::ops {

struct AttentionOptions {
  int64_t window_left, window_right;
  bool lower_right = false;
  std::optional<double> scale;  // none: 1 / sqrt(head_dim)
  double softcap = 0, dropout_p = 0;
  bool tf32 = false;
};

// 1 / sqrt(head_dim), unless the caller gives another. With head_dim 0 every score is 0 whatever the scale, as in torch.
inline double scale_of(std::optional<double> scale, int64_t head_dim) {
  return scale.value_or(head_dim > 0 ? 1 / std::sqrt(static_cast<double>(head_dim)) : 1);
}

struct AttentionInputs {
  const Tensor &query, &key, &value;
  const std::optional<Tensor>&mask, &alibi_slopes, &sinks, &rng;
  const Tensor *query_spans = nullptr, *key_spans = nullptr, *tiles = nullptr;
};

// The indices of dimensions: dense tensors are [batch..., heads, rows, head_dim], packed ones [rows, heads, head_dim].
struct Dims {
  int64_t rank, heads, rows;
  int64_t head_dim() const { return rank - 1; }
  int64_t batch_count() const { return rank - 3; }
};

inline void check_devices(const AttentionInputs& in) {
  check_device(in.key, "key", in.query, "query");
  check_device(in.value, "value", in.query, "query");
  check_device(in.mask, "mask", in.query, "query");
  check_device(in.alibi_slopes, "alibi_slopes", in.query, "query");
  check_device(in.sinks, "sinks", in.query, "query");
  check_device(in.rng, "rng", in.query, "query");
  if (in.query_spans) check_device(*in.query_spans, "query_spans", in.query, "query");
  if (in.key_spans) check_device(*in.key_spans, "key_spans", in.query, "query");
  if (in.tiles) check_device(*in.tiles, "tiles", in.query, "query");
}

// Checks spans [batch..., 1 or heads, rows, 2 or 4] for tensors with these batch dimensions and heads.
inline void check_spans(const Tensor* spans, const char* name, const std::vector<int64_t>& batch_and_heads, int64_t rows) {
  if (!spans) return;
  const auto leading = static_cast<int64_t>(batch_and_heads.size());
  check(spans->scalar_type() == ScalarType::Int, name, ": expected dtype int32, got ", name_of(spans->scalar_type()));
  check(spans->dim() == leading + 2, name, ": expected ", leading + 2, " dimensions, got ", shape_of(*spans));
  for (int64_t i = 0; i < leading; ++i)
    check(spans->size(i) == 1 || spans->size(i) == batch_and_heads[i], name, ": expected 1 or ", batch_and_heads[i],
          " in dimension ", i, ", got ", spans->size(i));
  check(spans->size(leading) == rows, name, ": expected ", rows, " rows, got ", shape_of(*spans));
  const int64_t bounds = spans->size(leading + 1);
  check((bounds == 2 || bounds == 4) && (spans->stride(leading + 1) == 1 || spans->numel() == 0), name,
        ": expected 2 or 4 bounds side by side in the last dimension, got ", shape_of(*spans));
}

// The keys of a tile, by the number of tiles; 0: it is not that of 64 or 128.
inline int tile_keys_of(const Tensor& tiles, int64_t keys) {
  const int64_t count = tiles.size(tiles.dim() - 1);
  return count == ceil_div(keys, 64) ? 64 : count == ceil_div(keys, 128) ? 128 : 0;
}

// Checks tiles [batch..., 1 or heads, tiles of queries, tiles of keys], likewise.
inline void check_tiles(const Tensor* tiles, const std::vector<int64_t>& batch_and_heads, int64_t queries, int64_t keys) {
  if (!tiles) return;
  const auto leading = static_cast<int64_t>(batch_and_heads.size());
  check(tiles->scalar_type() == ScalarType::Bool, "tiles: expected dtype bool, got ", name_of(tiles->scalar_type()));
  check(tiles->dim() == leading + 2, "tiles: expected ", leading + 2, " dimensions, got ", shape_of(*tiles));
  for (int64_t i = 0; i < leading; ++i)
    check(tiles->size(i) == 1 || tiles->size(i) == batch_and_heads[i], "tiles: expected 1 or ", batch_and_heads[i],
          " in dimension ", i, ", got ", tiles->size(i));
  const int64_t rows = ceil_div(queries, 64);
  check(tiles->size(leading) == rows && tile_keys_of(*tiles, keys) > 0, "tiles: expected ", rows, " x ", ceil_div(keys, 64),
        " or ", ceil_div(keys, 128), " tiles, got ", shape_of(*tiles));
}

// The view of spans but for its address and batch stride.
inline SpanView view_of_spans(const Tensor& spans) {
  const int64_t heads = spans.dim() - 3;
  SpanView view;
  view.stride[1] = spans.size(heads) == 1 ? 0 : spans.stride(heads);
  view.stride[2] = spans.stride(heads + 1);
  view.intervals = static_cast<int>(spans.size(heads + 2) / 2);
  return view;
}

// Checks all inputs except the slopes, as their shape depends on the layout.
inline void check_inputs(const AttentionInputs& in, const AttentionOptions& options, const Dims& dims) {
  const int64_t rank = dims.rank;
  check_floating(in.query, "query");
  const auto check_like_query = [&](const Tensor& tensor, const char* name) {
    check(tensor.dim() == rank, name, ": expected query's rank ", rank, ", got ", shape_of(tensor));
    check(tensor.scalar_type() == in.query.scalar_type(), name, ": expected query's dtype, ", name_of(in.query.scalar_type()),
          ", got ", name_of(tensor.scalar_type()));
    for (int64_t i = 0; i < dims.batch_count(); ++i)
      check(tensor.size(i) == in.query.size(i), name, ": expected query's size in batch dimension ", i, ", ", in.query.size(i),
            ", got ", tensor.size(i));
  };
  check_like_query(in.key, "key");
  check_like_query(in.value, "value");
  const int64_t heads = in.query.size(dims.heads), queries = in.query.size(dims.rows), keys = in.key.size(dims.rows);
  check(in.key.size(dims.head_dim()) == in.query.size(dims.head_dim()), "key: expected query's width, ",
        in.query.size(dims.head_dim()), ", got ", in.key.size(dims.head_dim()));
  check(in.value.size(dims.rows) == keys, "value: expected key's length, ", keys, ", got ", in.value.size(dims.rows));
  const auto check_heads = [&](const Tensor& tensor, const char* name) {
    const int64_t own = tensor.size(dims.heads);
    check(heads == 0 ? own == 0 : own > 0 && heads % own == 0, name, ": expected a number of heads that divides query's, ",
          heads, ", got ", own);
  };
  check_heads(in.key, "key");
  check_heads(in.value, "value");
  if (in.mask) {
    const Tensor& mask = *in.mask;
    check(mask.dim() == rank, "mask: expected query's rank ", rank, ", got ", shape_of(mask));
    const DType dtype = dtype_of(mask);
    check(dtype != DType::kInt64, "mask: expected dtype bool or floating, got int64");
    for (int64_t i = 0; i < rank; ++i) {
      const int64_t full = i < rank - 2 ? in.query.size(i) : i == rank - 2 ? queries : keys;
      check(mask.size(i) == 1 || mask.size(i) == full, "mask: expected 1 or ", full, " in dimension ", i, ", got ",
            mask.size(i));
    }
  }
  const ScalarType accumulator = accumulator_of(in.query.scalar_type());
  if (in.sinks) {
    check(in.sinks->scalar_type() == accumulator, "sinks: expected dtype float32 (float64 for float64 inputs), got ",
          NameOfDtype{*in.sinks});
    check(in.sinks->dim() == 1 && in.sinks->size(0) == heads && in.sinks->is_contiguous(), "sinks: expected [", heads,
          "], got ", shape_of(*in.sinks));
  }
  check(options.dropout_p >= 0 && options.dropout_p <= 1, "dropout_p: expected 0 to 1, got ", options.dropout_p);
  check(options.dropout_p == 0 || in.rng, "rng: expected a tensor with dropout_p > 0, got none");
  if (in.rng)
    check(in.rng->scalar_type() == ScalarType::Long && in.rng->numel() == 2 && in.rng->is_contiguous(),
          "rng: expected int64[2], got ", shape_of(*in.rng));
  check(options.softcap >= 0, "softcap: expected 0 (none) or more, got ", options.softcap);
}

inline void check_slopes(const AttentionInputs& in, const std::vector<int64_t>& sizes, const char* expected) {
  if (!in.alibi_slopes) return;
  check(in.alibi_slopes->scalar_type() == accumulator_of(in.query.scalar_type()),
        "alibi_slopes: expected dtype float32 (float64 for float64 inputs), got ", NameOfDtype{*in.alibi_slopes});
  check(sizes_of(*in.alibi_slopes) == sizes, "alibi_slopes: expected ", expected, ", got ", shape_of(*in.alibi_slopes));
}

// The tensors of a forward or backward pass in addition to the inputs. A null pointer: there is none, or it is not computed.
struct PassTensors {
  const Tensor& out;
  const Tensor* lse = nullptr;
  const Tensor* lse_low = nullptr;
  int64_t lse_low_begin = 0;  // index of its first element in the tensor: not 0 where lse comes first
  const Tensor* max_logit = nullptr;  // [batch..., heads] or [sequences, heads], float32
  const Tensor* grad_out = nullptr;
  const Tensor* grad_lse = nullptr;
  const Tensor* grad_query = nullptr;
  const Tensor* grad_key = nullptr;
  const Tensor* grad_value = nullptr;
  const Tensor* grad_mask = nullptr;
  const Tensor* grad_sinks = nullptr;  // [sequences..., heads]; the caller sums it over the sequences
  const Tensor* delta = nullptr;  // like lse
  const Tensor* wide_delta = nullptr;  // like lse, in float64
};

// What dense and packed calls have in common. A call refers to the tensors of its inputs.
class AttentionCall {
 public:
  const AttentionInputs& inputs() const { return in_; }
  // The problem without the views of tensors, which for_each_problem sets.
  const AttentionProblem& problem() const { return problem_; }
  const Dims& dims() const { return dims_; }
  std::vector<int64_t> out_sizes() const {
    std::vector<int64_t> sizes = sizes_of(in_.query);
    sizes.back() = problem_.head_dim_v;
    return sizes;
  }

 protected:
  AttentionCall(const AttentionInputs& in, const AttentionOptions& options, const Dims& dims) : in_(in), dims_(dims) {
    check_devices(in);
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
    problem_.scale = scale_of(options.scale, problem_.head_dim);
    problem_.softcap = options.softcap;
    problem_.dropout = options.dropout_p;
    problem_.tf32 = options.tf32;
    if (in.rng && options.dropout_p > 0) problem_.rng = in.rng->const_data_ptr<int64_t>();
    if (in.mask) problem_.mask_dtype = dtype_of(*in.mask);
    if (in.sinks) problem_.sinks = in.sinks->data_ptr();
  }

  // Sets the strides of heads, rows and columns; 0 along a dimension of size 1, which a mask is broadcast along.
  template <class View>
  void set_strides(const Tensor& tensor, View& view) const {
    const int64_t dims[] = {dims_.heads, dims_.rows, dims_.head_dim()};
    for (int64_t i = 0; i < 3; ++i) view.stride[i + 1] = tensor.size(dims[i]) == 1 ? 0 : tensor.stride(dims[i]);
  }

  const AttentionInputs& in_;
  Dims dims_;
  AttentionProblem problem_;
};

// A call of [batch..., heads, length, head_dim] tensors of any number of batch dimensions. Each problem has one of them.
class DenseCall : public AttentionCall {
 public:
  DenseCall(const AttentionInputs& in, const AttentionOptions& options) : AttentionCall(in, options, dims_of(in.query)) {
    problem_.visible.offset = options.lower_right ? problem_.keys - problem_.queries : 0;
    problem_.lse_stride[0] = problem_.heads * problem_.queries;
    problem_.lse_stride[1] = problem_.queries;
    check_slopes(in, sink_sizes(), "[batch..., heads]");
    check_spans(in.query_spans, "query_spans", sink_sizes(), problem_.queries);
    check_spans(in.key_spans, "key_spans", sink_sizes(), problem_.keys);
    check_tiles(in.tiles, sink_sizes(), problem_.queries, problem_.keys);
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
  // The sizes of lse and lse_low in one tensor, lse first: it has twice the first batch dimension, so that its strides are
  // lse's.
  std::vector<int64_t> stats_sizes() const {
    std::vector<int64_t> sizes = lse_sizes();
    sizes.front() *= 2;
    return sizes;
  }

  // Calls run(problem, gradients) for each problem; `gradients` is set as far as `tensors` has gradients.
  template <class Run>
  void for_each_problem(const PassTensors& tensors, const Run& run) const {
    for (const int64_t size : sink_sizes())
      if (size == 0) return;
    std::array<const Tensor*, kTensorCount> all{};
    all[kQuery] = &in_.query;
    all[kKey] = &in_.key;
    all[kValue] = &in_.value;
    all[kMask] = in_.mask ? &*in_.mask : nullptr;
    all[kSlopes] = in_.alibi_slopes ? &*in_.alibi_slopes : nullptr;
    all[kOut] = &tensors.out;
    all[kLse] = tensors.lse;
    all[kLseLow] = tensors.lse_low;
    all[kMaxLogit] = tensors.max_logit;
    all[kGradOut] = tensors.grad_out;
    all[kGradLse] = tensors.grad_lse;
    all[kGradQuery] = tensors.grad_query;
    all[kGradKey] = tensors.grad_key;
    all[kGradValue] = tensors.grad_value;
    all[kGradMask] = tensors.grad_mask;
    all[kGradSinks] = tensors.grad_sinks;
    all[kDelta] = tensors.delta;
    all[kWideDelta] = tensors.wide_delta;
    all[kQuerySpans] = in_.query_spans;
    all[kKeySpans] = in_.key_spans;
    all[kTiles] = in_.tiles;
    std::vector<int64_t> sizes = sizes_of(in_.query);
    sizes.resize(dims_.batch_count());
    const Batches batches(std::span<const Tensor* const>(all), std::move(sizes));

    for (int64_t outer = 0; outer < batches.outer_count(); ++outer) {
      AttentionProblem problem = problem_;
      AttentionGradients gradients;
      problem.batch = batches.inner_size();
      problem.batch_begin = outer * problem.batch;
      const auto pointer = [&](TensorIndex index) -> void* {
        // A tensor without elements stays null in every problem: scratch is allocated once, for the first of them.
        const auto data = all[index] ? static_cast<std::byte*>(all[index]->data_ptr()) : nullptr;
        return data ? data + batches.outer_offset(index, outer) * size_of(dtype_of(*all[index])) : nullptr;
      };
      const auto set_view = [&](TensorIndex index, auto& view) {
        if (!all[index]) return;
        view.data = pointer(index);
        view.stride[0] = batches.inner_stride(index);
        set_strides(*all[index], view);
      };
      set_view(kQuery, problem.query);
      set_view(kKey, problem.key);
      set_view(kValue, problem.value);
      set_view(kMask, problem.mask);
      if (in_.alibi_slopes) {
        problem.alibi_slopes = pointer(kSlopes);
        problem.alibi_stride[0] = batches.inner_stride(kSlopes);
        problem.alibi_stride[1] = in_.alibi_slopes->stride(dims_.heads);
      }
      const auto set_spans = [&](TensorIndex index, SpanView& view) {
        if (!all[index]) return;
        view = view_of_spans(*all[index]);
        const int32_t* const data = all[index]->const_data_ptr<int32_t>();
        view.data = data ? data + batches.outer_offset(index, outer) : nullptr;
        view.stride[0] = batches.inner_stride(index);
      };
      set_spans(kQuerySpans, problem.query_spans);
      set_spans(kKeySpans, problem.key_spans);
      if (const Tensor* const tiles = all[kTiles]) {
        problem.tiles.data = static_cast<const uint8_t*>(pointer(kTiles));
        problem.tiles.stride[0] = batches.inner_stride(kTiles);
        problem.tiles.stride[1] = tiles->size(dims_.heads) == 1 ? 0 : tiles->stride(dims_.heads);
        problem.tiles.stride[2] = tiles->stride(dims_.rows), problem.tiles.stride[3] = tiles->stride(dims_.rows + 1);
        problem.tile_keys = tile_keys_of(*tiles, problem.keys);
      }
      set_view(kOut, problem.out);
      problem.lse = pointer(kLse);
      problem.lse_low = pointer(kLseLow);
      problem.max_logit = static_cast<float*>(pointer(kMaxLogit));
      if (problem.lse_low)
        problem.lse_low =
            static_cast<std::byte*>(problem.lse_low) + tensors.lse_low_begin * size_of(dtype_of(*tensors.lse_low));
      set_view(kGradOut, gradients.grad_out);
      gradients.grad_lse = pointer(kGradLse);
      set_view(kGradQuery, gradients.grad_query);
      set_view(kGradKey, gradients.grad_key);
      set_view(kGradValue, gradients.grad_value);
      set_view(kGradMask, gradients.grad_mask);
      if (tensors.grad_mask) {
        gradients.grad_mask_dtype = dtype_of(*tensors.grad_mask);
        gradients.add_to_grad_mask = !batches.first_visit(kGradMask, outer);
        gradients.mask_size[0] = batches.inner_stride(kGradMask) == 0 ? 1 : problem.batch;
        for (int64_t i = 1; i < 4; ++i) gradients.mask_size[i] = tensors.grad_mask->size(dims_.rank - 4 + i);
      }
      gradients.grad_sinks = pointer(kGradSinks);
      gradients.delta = pointer(kDelta);
      gradients.wide_delta = static_cast<double*>(pointer(kWideDelta));
      run(problem, gradients);
    }
  }

 private:
  enum TensorIndex {
    kQuery,
    kKey,
    kValue,
    kMask,
    kSlopes,
    kOut,
    kLse,
    kLseLow,
    kMaxLogit,
    kGradOut,
    kGradLse,
    kGradQuery,
    kGradKey,
    kGradValue,
    kGradMask,
    kGradSinks,
    kDelta,
    kWideDelta,
    kQuerySpans,
    kKeySpans,
    kTiles,
    kTensorCount
  };

  static Dims dims_of(const Tensor& query) {
    check(query.dim() >= 4, "query: expected [batch..., heads, length, width], got ", shape_of(query));
    return {query.dim(), query.dim() - 3, query.dim() - 2};
  }
};

// A call of packed [total, heads, head_dim] tensors: sequences one after another, in one problem.
class PackedCall : public AttentionCall {
 public:
  PackedCall(const AttentionInputs& in, const Tensor& query_starts, const Tensor& key_starts, int64_t longest_query,
             int64_t longest_key, const AttentionOptions& options)
      : AttentionCall(in, options, dims_of(in.query)) {
    check_starts(query_starts, "cu_seqlens_q");
    check_starts(key_starts, "cu_seqlens_k");
    check(query_starts.size(0) == key_starts.size(0), "cu_seqlens_k: expected as many starts as cu_seqlens_q, ",
          query_starts.size(0), ", got ", key_starts.size(0));
    check(longest_query >= 0, "max_seqlen_q: expected 0 or more, got ", longest_query);
    check(longest_key >= 0, "max_seqlen_k: expected 0 or more, got ", longest_key);
    problem_.batch = query_starts.size(0) - 1;
    problem_.query_starts = query_starts.const_data_ptr<int32_t>();
    problem_.key_starts = key_starts.const_data_ptr<int32_t>();
    problem_.total_queries = problem_.queries;
    problem_.total_keys = problem_.keys;
    problem_.queries = std::min(longest_query, problem_.total_queries);
    problem_.keys = std::min(longest_key, problem_.total_keys);
    problem_.lse_stride[1] = problem_.total_queries;
    check_slopes(in, sink_sizes(), "[sequences, heads]");
    check_spans(in.query_spans, "query_spans", {problem_.heads}, problem_.total_queries);
    check_spans(in.key_spans, "key_spans", {problem_.heads}, problem_.total_keys);
  }

  std::vector<int64_t> sink_sizes() const { return {problem_.batch, problem_.heads}; }
  std::vector<int64_t> lse_sizes() const { return {problem_.heads, problem_.total_queries}; }

  // Calls run(problem, gradients) for the one problem, or not at all if there are no heads.
  template <class Run>
  void for_each_problem(const PassTensors& tensors, const Run& run) const {
    if (problem_.heads == 0) return;
    AttentionProblem problem = problem_;
    AttentionGradients gradients;
    const auto pointer = [](const Tensor* tensor) { return tensor ? tensor->data_ptr() : nullptr; };
    const auto set_view = [&](const Tensor* tensor, auto& view) {
      if (!tensor) return;
      view.data = tensor->data_ptr();
      set_strides(*tensor, view);
    };
    set_view(&in_.query, problem.query);
    set_view(&in_.key, problem.key);
    set_view(&in_.value, problem.value);
    const auto set_spans = [](const Tensor* tensor, SpanView& spans) {
      if (!tensor) return;
      spans = view_of_spans(*tensor);
      spans.data = tensor->const_data_ptr<int32_t>();
    };
    set_spans(in_.query_spans, problem.query_spans);
    set_spans(in_.key_spans, problem.key_spans);
    if (in_.alibi_slopes) {
      problem.alibi_slopes = in_.alibi_slopes->data_ptr();
      for (int64_t i = 0; i < 2; ++i) problem.alibi_stride[i] = in_.alibi_slopes->stride(i);
    }
    set_view(&tensors.out, problem.out);
    problem.lse = pointer(tensors.lse);
    problem.lse_low = pointer(tensors.lse_low);
    problem.max_logit = static_cast<float*>(pointer(tensors.max_logit));
    set_view(tensors.grad_out, gradients.grad_out);
    gradients.grad_lse = pointer(tensors.grad_lse);
    set_view(tensors.grad_query, gradients.grad_query);
    set_view(tensors.grad_key, gradients.grad_key);
    set_view(tensors.grad_value, gradients.grad_value);
    gradients.grad_sinks = pointer(tensors.grad_sinks);
    gradients.delta = pointer(tensors.delta);
    gradients.wide_delta = static_cast<double*>(pointer(tensors.wide_delta));
    run(problem, gradients);
  }

 private:
  static Dims dims_of(const Tensor& query) {
    check(query.dim() == 3, "query: expected [total, heads, width], got ", shape_of(query));
    return {3, 1, 0};
  }
  void check_starts(const Tensor& starts, const char* name) const {
    check(starts.scalar_type() == ScalarType::Int, name, ": expected dtype int32, got ", name_of(starts.scalar_type()));
    check(starts.dim() == 1 && starts.size(0) >= 1 && starts.is_contiguous(), name,
          ": expected [sequences + 1], contiguous, got ", shape_of(starts));
    check_device(starts, name, in_.query, "query");
  }
};

}  // namespace flash_online::ops
