// Calls over cached keys: checks, and the problems for kernels. Nothing here depends on the device.
#pragma once

#include "../../core/cache.h"
#include "../tensor.h"
#include "call.h"

namespace flash_online::ops {

// Caches are pools [blocks, heads, page, head_dim]; a contiguous cache has one block per sequence, and no table.
struct CachedInputs {
  const Tensor &query, &key_cache, &value_cache;
  const std::optional<Tensor>&lengths, &left, &rows, &block_table, &query_starts, &query_lengths, &new_starts, &alibi_slopes,
      &sinks, &key_scale, &value_scale;
  const Tensor* query_spans = nullptr;
};

struct CachedOptions {
  int64_t new_keys, max_queries, window_left, window_right;
  bool lower_right;
  std::optional<double> scale;  // as in AttentionOptions
  double softcap;
  int64_t splits;
};

struct AppendInputs {
  const Tensor &key_cache, &value_cache;
  const std::optional<Tensor>&key, &value, &query, &lengths, &left, &rows, &block_table, &slots, &new_starts, &query_starts,
      &cosines, &sines, &offsets, &key_scale, &value_scale;
};

// Checks an array that the device reads: `count` elements of `type`, one per sequence, or any count if `count` is below 0.
inline void check_array(const std::optional<Tensor>& tensor, const char* name, int64_t count, const Tensor& like,
                        ScalarType type = ScalarType::Int) {
  if (!tensor) return;
  check_device(*tensor, name, like, "the cache");
  check(tensor->scalar_type() == type, name, ": expected dtype ", torch::headeronly::toString(type), ", got ",
        NameOfDtype{*tensor});
  check(tensor->dim() == 1 && tensor->is_contiguous() && (count < 0 || tensor->size(0) == count), name, ": expected [", count,
        "], contiguous, got ", shape_of(*tensor));
}

inline const int32_t* array_of(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<int32_t>() : nullptr;
}

inline bool is_float8(ScalarType type) { return type == ScalarType::Float8_e4m3fn || type == ScalarType::Float8_e5m2; }

// The element type of a cache for queries or new rows of `type`.
inline DType cache_dtype_of(const Tensor& cache, ScalarType type) {
  const ScalarType cache_type = cache.scalar_type();
  if (cache_type == ScalarType::Float8_e4m3fn) return DType::kFloat8E4M3;
  if (cache_type == ScalarType::Float8_e5m2) return DType::kFloat8E5M2;
  return dtype_of(type);
}

// Checks the pool and the tensors that locate a sequence in it. `batch` is the number of sequences, or of rows that go to
// slots, unless `by_sequence`.
inline void check_pool(const Tensor& key, const Tensor& value, ScalarType type, int64_t batch, bool by_sequence,
                       const std::optional<Tensor>& lengths, const std::optional<Tensor>& left,
                       const std::optional<Tensor>& rows, const std::optional<Tensor>& table,
                       const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale) {
  check_device(value, "value_cache", key, "key_cache");
  check(key.dim() == 4, "key_cache: expected [blocks, heads, page, head_dim], got ", shape_of(key));
  check(value.dim() == 4, "value_cache: expected [blocks, heads, page, head_dim], got ", shape_of(value));
  for (int64_t i = 0; i < 3; ++i)
    check(value.size(i) == key.size(i), "value_cache: expected key_cache's size in dimension ", i, ", ", Size{key, i}, ", got ",
          Size{value, i});
  const ScalarType cache_type = key.scalar_type();
  check(value.scalar_type() == cache_type, "value_cache: expected key_cache's dtype, ", name_of(cache_type), ", got ",
        NameOfDtype{value});
  const bool narrow = type == ScalarType::Half || type == ScalarType::BFloat16;
  check(cache_type == type || (narrow && is_float8(cache_type)), "key_cache: expected query's dtype, ", name_of(type),
        ", or float8 if that has 16 bits, got ", name_of(cache_type));
  check_array(lengths, "cache_seqlens", batch, key);
  check_array(left, "leftpad", batch, key);
  check_array(rows, "cache_batch_idx", batch, key);
  if (table) {
    check_device(*table, "block_table", key, "key_cache");
    check(table->scalar_type() == ScalarType::Int && table->dim() == 2 && (table->size(1) <= 1 || table->stride(1) == 1),
          "block_table: expected int32 [sequences, entries] with a column stride of 1, got ", shape_of(*table));
    check(rows.has_value() || table->size(0) == batch, "block_table: expected ", batch, " rows, got ", Size{*table, 0});
  } else if (by_sequence) {
    check(rows.has_value() || key.size(0) == batch, "key_cache: expected ", batch, " sequences, got ", Size{key, 0});
  }
  for (const auto* scale : {&key_scale, &value_scale}) {
    if (!*scale) continue;
    const char* name = scale == &key_scale ? "key_scale" : "value_scale";
    check_device(**scale, name, key, "key_cache");
    check((*scale)->scalar_type() == ScalarType::Float && (*scale)->dim() == 2 && (*scale)->size(0) == batch &&
              (*scale)->size(1) == key.size(1),
          name, ": expected float32 [sequences, heads], got ", shape_of(**scale));
  }
}

inline CacheView cache_view_of(const Tensor& key, ScalarType type, const std::optional<Tensor>& lengths,
                               const std::optional<Tensor>& left, const std::optional<Tensor>& rows,
                               const std::optional<Tensor>& table, const std::optional<Tensor>& new_starts, int64_t new_keys,
                               const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale) {
  const bool empty = key.size(2) == 0;  // pages without rows: a cache without blocks, and a page that can be a divisor
  CacheView cache{.page = empty ? 1 : key.size(2),
                  .blocks = empty ? 0 : key.size(0),
                  .entries = empty   ? 0
                             : table ? table->size(1)
                                     : 1,
                  .table = array_of(table),
                  .table_rows = table ? table->size(0) : 0,
                  .table_stride = table ? table->stride(0) : 0,
                  .rows = array_of(rows),
                  .lengths = array_of(lengths),
                  .left = array_of(left),
                  .new_starts = array_of(new_starts),
                  .new_keys = new_keys,
                  .dtype = cache_dtype_of(key, type)};
  const auto set_scale = [](const std::optional<Tensor>& scale, const float*& data, int64_t (&stride)[2]) {
    if (!scale) return;
    data = scale->const_data_ptr<float>();
    for (int64_t i = 0; i < 2; ++i) stride[i] = scale->stride(i);
  };
  set_scale(key_scale, cache.key_scale, cache.key_scale_stride);
  set_scale(value_scale, cache.value_scale, cache.value_scale_stride);
  return cache;
}

// A view [batch, heads, rows, head_dim] of a dense tensor, or of packed [rows, heads, head_dim] with stride[0] of 0.
template <class View>
View view_of(const Tensor& tensor, bool packed) {
  View view;
  view.data = tensor.data_ptr();
  const auto strides = tensor.strides();
  if (packed) {
    const int64_t order[] = {1, 0, 2};
    for (int64_t i = 0; i < 3; ++i) view.stride[i + 1] = strides[order[i]];
  } else {
    for (int64_t i = 0; i < 4; ++i) view.stride[i] = strides[i];
  }
  return view;
}

inline std::vector<int64_t> cached_out_sizes(const CachedInputs& in) {
  std::vector<int64_t> sizes = sizes_of(in.query);
  sizes.back() = in.value_cache.size(3);
  return sizes;
}
inline std::vector<int64_t> cached_lse_sizes(const CachedInputs& in) {
  if (in.query_starts) return {in.query.size(1), in.query.size(0)};
  return {in.query.size(0), in.query.size(1), in.query.size(2)};
}

// The number of sequences of a call.
inline int64_t batch_of(const Tensor& rows, const std::optional<Tensor>& starts) {
  return starts ? starts->size(0) - 1 : rows.size(0);
}

inline void check_starts_of(const std::optional<Tensor>& starts, const char* name, const Tensor& like) {
  check_array(starts, name, -1, like);
  check(!starts || starts->size(0) > 0, name, ": expected [sequences + 1], got ", starts ? shape_of(*starts) : shape_of(like));
}

template <class Device>
void check_cached(const CachedInputs& in, const CachedOptions& options) {
  check_cached_dtype<Device>(in.query, "query");
  check_device(in.key_cache, "key_cache", in.query, "query");
  check_starts_of(in.query_starts, "cu_seqlens_q", in.query);
  const bool packed = in.query_starts.has_value();
  check(in.query.dim() == (packed ? 3 : 4), "query: expected ",
        packed ? "[rows, heads, head_dim]" : "[sequences, heads, length, head_dim]", ", got ", shape_of(in.query));
  const int64_t batch = batch_of(in.query, in.query_starts), heads = in.query.size(1);
  check_pool(in.key_cache, in.value_cache, in.query.scalar_type(), batch, true, in.lengths, in.left, in.rows, in.block_table,
             in.key_scale, in.value_scale);
  const int64_t key_heads = in.key_cache.size(1);
  check(in.key_cache.size(3) == in.query.size(packed ? 2 : 3), "key_cache: expected query's width, ",
        Size{in.query, packed ? 2 : 3}, ", got ", Size{in.key_cache, 3});
  check(heads == 0 ? key_heads == 0 : key_heads > 0 && heads % key_heads == 0,
        "key_cache: expected a number of heads that divides query's, ", heads, ", got ", key_heads);
  check_array(in.query_lengths, "seqused_q", batch, in.query);
  check_starts_of(in.new_starts, "cu_seqlens_new", in.query);
  check(!in.new_starts || in.new_starts->size(0) == batch + 1, "cu_seqlens_new: expected [", batch + 1, "], got ",
        in.new_starts ? shape_of(*in.new_starts) : shape_of(in.query));
  const ScalarType accumulator = accumulator_of(in.query.scalar_type());
  if (in.alibi_slopes) {
    check_device(*in.alibi_slopes, "alibi_slopes", in.query, "query");
    check(in.alibi_slopes->scalar_type() == accumulator && sizes_of(*in.alibi_slopes) == std::vector<int64_t>{batch, heads},
          "alibi_slopes: expected [", batch, ", ", heads, "] of float32 (float64 for float64 inputs), got ",
          shape_of(*in.alibi_slopes));
  }
  if (in.sinks) {
    check_device(*in.sinks, "sinks", in.query, "query");
    check(in.sinks->scalar_type() == accumulator && in.sinks->dim() == 1 && in.sinks->size(0) == heads &&
              in.sinks->is_contiguous(),
          "sinks: expected [", heads, "] of float32 (float64 for float64 inputs), got ", shape_of(*in.sinks));
  }
  if (in.query_spans) check_device(*in.query_spans, "query_spans", in.query, "query");
  check_spans(in.query_spans, "query_spans", packed ? std::vector<int64_t>{heads} : std::vector<int64_t>{batch, heads},
              in.query.size(packed ? 0 : 2));
  check(options.softcap >= 0, "softcap: expected 0 (none) or more, got ", options.softcap);
  check(options.new_keys >= 0 && options.max_queries >= 0 && options.splits >= 0,
        "new_keys, max_queries, splits: expected 0 or more, got ", options.new_keys, ", ", options.max_queries, ", ",
        options.splits);
}

// If `lse` is null, lse is not computed.
template <class Device>
AttentionProblem cached_problem(const CachedInputs& in, const CachedOptions& options, const Tensor& out, const Tensor* lse) {
  const bool packed = in.query_starts.has_value();
  AttentionProblem problem;
  problem.dtype = dtype_of(in.query);
  problem.batch = batch_of(in.query, in.query_starts);
  problem.heads = in.query.size(1);
  problem.key_heads = problem.value_heads = in.key_cache.size(1);
  problem.head_dim = in.key_cache.size(3);
  problem.head_dim_v = in.value_cache.size(3);
  problem.total_queries = packed ? in.query.size(0) : 0;
  problem.queries = packed ? std::min(options.max_queries, problem.total_queries) : in.query.size(2);
  problem.query = view_of<ConstView4>(in.query, packed);
  problem.key = view_of<ConstView4>(in.key_cache, false);
  problem.value = view_of<ConstView4>(in.value_cache, false);
  problem.out = view_of<MutableView4>(out, packed);
  if (lse) problem.lse = lse->data_ptr();
  problem.lse_stride[0] = packed ? 0 : problem.heads * problem.queries;
  problem.lse_stride[1] = packed ? problem.total_queries : problem.queries;
  problem.cache = cache_view_of(in.key_cache, in.query.scalar_type(), in.lengths, in.left, in.rows, in.block_table,
                                in.new_starts, options.new_keys, in.key_scale, in.value_scale);
  problem.cache.kv_splits = options.splits;
  problem.cache.query_lengths = array_of(in.query_lengths);
  problem.keys = capacity_of(problem.cache);
  problem.query_starts = array_of(in.query_starts);
  problem.visible = {options.window_left, options.window_right, 0};
  problem.lower_right = options.lower_right;
  problem.scale = scale_of(options.scale, problem.head_dim);
  problem.softcap = options.softcap;
  if (in.alibi_slopes) {
    problem.alibi_slopes = in.alibi_slopes->data_ptr();
    for (int64_t i = 0; i < 2; ++i) problem.alibi_stride[i] = in.alibi_slopes->stride(i);
  }
  if (in.sinks) problem.sinks = in.sinks->data_ptr();
  if (in.query_spans) {
    problem.query_spans = view_of_spans(*in.query_spans);
    problem.query_spans.data = in.query_spans->const_data_ptr<int32_t>();
    problem.query_spans.stride[0] = packed || in.query_spans->size(0) == 1 ? 0 : in.query_spans->stride(0);
  }
  return problem;
}

// ---- append ----------------------------------------------------------------------------------------------------------------

// Return whether new rows, or queries, are packed: [rows, heads, head_dim].
inline bool rows_are_packed(const AppendInputs& in) { return in.slots.has_value() || in.new_starts.has_value(); }
inline bool queries_are_packed(const AppendInputs& in) { return in.slots.has_value() || in.query_starts.has_value(); }

// The number of sequences; 0 where rows go to slots.
inline int64_t batch_of(const AppendInputs& in) {
  if (in.slots) return 0;
  if (in.new_starts) return in.new_starts->size(0) - 1;
  if (in.key) return in.key->size(0);
  return in.query ? batch_of(*in.query, in.query_starts) : 0;
}

template <class Device>
void check_append(const AppendInputs& in) {
  check(in.key.has_value() == in.value.has_value(), "key, value: expected both or neither, got one");
  check(in.key || in.query, "key, query: expected at least one, got neither");
  const Tensor& first = in.key ? *in.key : *in.query;
  const ScalarType type = first.scalar_type();
  check_cached_dtype<Device>(first, in.key ? "key" : "query");
  check_starts_of(in.new_starts, "cu_seqlens_new", in.key_cache);
  check_starts_of(in.query_starts, "cu_seqlens_q", in.key_cache);
  if (in.slots) check_array(in.slots, "slots", -1, in.key_cache, ScalarType::Long);
  check_pool(in.key_cache, in.value_cache, type, in.slots ? in.slots->size(0) : batch_of(in), !in.slots, in.lengths, in.left,
             in.rows, in.block_table, in.key_scale, in.value_scale);
  const int64_t batch = batch_of(in), head_dim = in.key_cache.size(3);
  const auto check_rows = [&](const Tensor& tensor, const char* name, bool packed, int64_t heads, int64_t width) {
    check_device(tensor, name, in.key_cache, "key_cache");
    check(tensor.scalar_type() == type, name, ": expected dtype ", name_of(type), ", got ", name_of(tensor.scalar_type()));
    check(tensor.dim() == (packed ? 3 : 4) && (packed || tensor.size(0) == batch) && (heads < 0 || tensor.size(1) == heads) &&
              tensor.size(tensor.dim() - 1) == width,
          name, ": expected a shape that fits the cache, got ", shape_of(tensor));
  };
  if (in.key) {
    check_rows(*in.key, "key", rows_are_packed(in), in.key_cache.size(1), head_dim);
    check_rows(*in.value, "value", rows_are_packed(in), in.key_cache.size(1), in.value_cache.size(3));
    const int64_t rows_dim = rows_are_packed(in) ? 0 : 2;
    check(in.value->size(rows_dim) == in.key->size(rows_dim), "value: expected key's length, ", in.key->size(rows_dim),
          ", got ", in.value->size(rows_dim));
    check(!in.slots || in.slots->size(0) == in.key->size(0), "slots: expected [", in.key->size(0), "], got ",
          in.slots ? shape_of(*in.slots) : shape_of(*in.key));
  }
  if (in.query) check_rows(*in.query, "query", queries_are_packed(in), -1, head_dim);
  if (in.slots) {
    check(!in.query_starts && !in.new_starts, "cu_seqlens_q, cu_seqlens_new: expected None with slots, got starts");
    check(!in.query || in.query->size(0) == in.slots->size(0), "query: expected ", in.slots->size(0),
          " rows, one per slot, got ", in.query ? shape_of(*in.query) : shape_of(first));
  } else if (in.query_starts) {
    check(in.query_starts->size(0) == batch + 1, "cu_seqlens_q: expected [", batch + 1, "], got ", shape_of(*in.query_starts));
  }
  check(in.cosines.has_value() == in.sines.has_value(), "rotary: expected cos and sin, got one of them");
  if (!in.cosines) return;
  check_device(*in.cosines, "rotary", in.key_cache, "key_cache");
  check_device(*in.sines, "rotary", in.key_cache, "key_cache");
  check(in.cosines->dim() == 2 && sizes_of(*in.cosines) == sizes_of(*in.sines) && in.cosines->size(0) > 0 &&
            2 * in.cosines->size(1) <= head_dim && in.cosines->scalar_type() == in.sines->scalar_type() &&
            in.cosines->stride(0) == in.sines->stride(0) && in.cosines->stride(1) == in.sines->stride(1),
        "rotary: expected cos and sin [positions, width / 2] of one dtype and layout, got ", shape_of(*in.cosines));
  check_floating(*in.cosines, "rotary");
  check_array(in.offsets, "rotary offsets", in.slots ? in.slots->size(0) : batch, in.key_cache);
}

inline AppendProblem append_problem(const AppendInputs& in, bool interleaved, bool queries_advance, const Tensor& rotated) {
  const Tensor& first = in.key ? *in.key : *in.query;
  AppendProblem problem;
  problem.dtype = dtype_of(first);
  problem.batch = batch_of(in);
  problem.heads = in.key_cache.size(1);
  problem.head_dim = in.key_cache.size(3);
  problem.head_dim_v = in.value_cache.size(3);
  const bool packed = rows_are_packed(in);
  const int64_t rows = in.key ? in.key->size(packed ? 0 : 2) : 0;
  problem.cache = cache_view_of(in.key_cache, first.scalar_type(), in.lengths, in.left, in.rows, in.block_table, in.new_starts,
                                rows, in.key_scale, in.value_scale);
  problem.key_cache = view_of<MutableView4>(in.key_cache, false);
  problem.value_cache = view_of<MutableView4>(in.value_cache, false);
  if (in.key) {
    problem.key = view_of<ConstView4>(*in.key, packed);
    problem.value = view_of<ConstView4>(*in.value, packed);
    problem.rows = rows;
  }
  if (in.slots) problem.slots = in.slots->const_data_ptr<int64_t>();
  if (in.cosines) {
    problem.cosines = in.cosines->data_ptr();
    problem.sines = in.sines->data_ptr();
    problem.rotary_dtype = dtype_of(*in.cosines);
    problem.positions = in.cosines->size(0);
    problem.pairs = in.cosines->size(1);
    for (int64_t i = 0; i < 2; ++i) problem.rotary_stride[i] = in.cosines->stride(i);
  }
  problem.offsets = array_of(in.offsets);
  problem.interleaved = interleaved;
  if (in.query) {
    const bool packed_queries = queries_are_packed(in);
    problem.query_heads = in.query->size(1);
    problem.queries = in.query->size(packed_queries ? 0 : 2);
    problem.total_queries = packed_queries ? in.query->size(0) : 0;
    problem.query = view_of<ConstView4>(*in.query, packed_queries);
    problem.rotated = view_of<MutableView4>(rotated, packed_queries);
    problem.query_starts = array_of(in.query_starts);
    problem.queries_advance = queries_advance;
  }
  return problem;
}

}  // namespace flash_online::ops
