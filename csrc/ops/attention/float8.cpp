// float8_attention: attention with products in e4m3, without gradients.
#include "../operators.h"
#include "pass.h"

namespace flash_online::ops {
namespace {

struct Float8OnCpu : Cpu {
  static void run(const Float8Problem& problem, const Tensor& like) {
    const cpu::AttentionKernels& kernels = cpu::kernels().attention;
    const AttentionProblem& attention = problem.attention;
    kernels.float8(problem,
                   CpuExecutor(attention.batch * attention.heads * attention.queries, kernels.float8_memory(problem), like));
  }
};

struct Float8OnCuda : Cuda {
  static void run(const Float8Problem& problem, const Tensor& like) {
    CudaCall on_cuda(like);
    const auto plan = cuda::plan_float8(problem);
    plan.run(on_cuda.workspace(plan.workspace_bytes), on_cuda.stream());
  }
};

DType float8_input_of(const Tensor& query) {
  switch (query.scalar_type()) {
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Float8_e4m3fn: return DType::kFloat8E4M3;
    default:
      throw std::runtime_error(std::string("query: expected dtype float16, bfloat16 or float8_e4m3fn, got ") +
                               name_of(query.scalar_type()));
  }
}

void check_float8_tensors(const Tensor& query, const Tensor& key, const Tensor& value) {
  check_query_and_key(query, key);
  check(value.dim() == 4 && value.size(0) == key.size(0) && value.size(1) == key.size(1) && value.size(2) == key.size(2),
        "value: expected key's batch, heads and length, got ", shape_of(value), " for ", shape_of(key));
  check(value.scalar_type() == query.scalar_type(), "value: expected query's dtype, ", NameOfDtype{query}, ", got ",
        NameOfDtype{value});
}

void set_scale(const std::optional<Tensor>& scale, const char* name, const Tensor& key, bool takes_scales, const float*& data,
               int64_t (&stride)[2]) {
  if (!scale) return;
  check(takes_scales, name, ": expected none with 16-bit inputs, which are quantised by scales of their own, got one");
  check(scale->scalar_type() == ScalarType::Float && scale->dim() == 2 && scale->size(0) == key.size(0) &&
            scale->size(1) == key.size(1),
        name, ": expected float32 [batch, key heads], got ", NameOfDtype{*scale}, " ", shape_of(*scale));
  data = scale->const_data_ptr<float>();
  for (int i = 0; i < 2; ++i) stride[i] = scale->stride(i);
}

void set_spans(const std::optional<Tensor>& spans, const char* name, const Tensor& query, int64_t rows, SpanView& view) {
  if (!spans) return;
  check_spans(&*spans, name, {query.size(0), query.size(1)}, rows);
  view = view_of_spans(*spans);
  view.data = spans->const_data_ptr<int32_t>();
  view.stride[0] = spans->size(0) == 1 ? 0 : spans->stride(0);
}

template <class Device>
std::tuple<Tensor, Tensor> float8_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                            const std::optional<Tensor>& query_scale, const std::optional<Tensor>& key_scale,
                                            const std::optional<Tensor>& value_scale, bool smooth_keys, int64_t window_left,
                                            int64_t window_right, bool lower_right, const std::optional<Tensor>& query_spans,
                                            const std::optional<Tensor>& key_spans, double softcap,
                                            const std::optional<Tensor>& sinks, std::optional<double> scale,
                                            ScalarType out_dtype, bool return_lse) {
  Float8Problem problem;
  problem.input = float8_input_of(query);
  problem.smooth_keys = smooth_keys;
  const std::pair<const std::optional<Tensor>*, const char*> others[] = {
      {&query_scale, "query_scale"}, {&key_scale, "key_scale"}, {&value_scale, "value_scale"},
      {&query_spans, "query_spans"}, {&key_spans, "key_spans"}, {&sinks, "sinks"}};
  check_device(key, "key", query, "query");
  check_device(value, "value", query, "query");
  for (const auto& [tensor, name] : others) check_device(*tensor, name, query, "query");
  check_float8_tensors(query, key, value);
  check(softcap >= 0, "softcap: expected 0 (none) or more, got ", softcap);
  check(out_dtype == ScalarType::Half || out_dtype == ScalarType::BFloat16, "out_dtype: expected float16 or bfloat16, got ",
        name_of(out_dtype));
  const bool takes_scales = problem.input == DType::kFloat8E4M3;
  set_scale(query_scale, "query_scale", key, takes_scales, problem.query_scale, problem.query_scale_stride);
  set_scale(key_scale, "key_scale", key, takes_scales, problem.key_scale, problem.key_scale_stride);
  set_scale(value_scale, "value_scale", key, takes_scales, problem.value_scale, problem.value_scale_stride);

  AttentionProblem& attention = problem.attention;
  attention.dtype = dtype_of(out_dtype);
  attention.batch = query.size(0), attention.heads = query.size(1);
  attention.key_heads = attention.value_heads = key.size(1);
  attention.queries = query.size(2), attention.keys = key.size(2);
  attention.head_dim = query.size(3), attention.head_dim_v = value.size(3);
  attention.visible = {window_left, window_right, lower_right ? attention.keys - attention.queries : 0};
  attention.scale = scale_of(scale, attention.head_dim);
  attention.softcap = softcap;
  if (sinks) {
    check(sinks->scalar_type() == ScalarType::Float && sinks->dim() == 1 && sinks->size(0) == attention.heads &&
              sinks->is_contiguous(),
          "sinks: expected float32 [", attention.heads, "], got ", NameOfDtype{*sinks}, " ", shape_of(*sinks));
    attention.sinks = sinks->data_ptr();
  }
  set_spans(query_spans, "query_spans", query, attention.queries, attention.query_spans);
  set_spans(key_spans, "key_spans", query, attention.keys, attention.key_spans);

  const std::vector<int64_t> rows{attention.batch, attention.heads, attention.queries};
  Tensor out = empty_in_order({rows[0], rows[1], rows[2], attention.head_dim_v}, out_dtype, query);
  Tensor lse = empty(return_lse ? rows : std::vector<int64_t>{0}, ScalarType::Float, query);
  if (count_of(rows) == 0) return {out, lse};
  set_view(query, attention.query);
  set_view(key, attention.key);
  set_view(value, attention.value);
  set_view(out, attention.out);
  if (return_lse) attention.lse = lse.data_ptr();
  attention.lse_stride[0] = rows[1] * rows[2], attention.lse_stride[1] = rows[2];
  Device::run(problem, query);
  return {out, lse};
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) {
  using namespace flash_online::ops;
  implement(m, "float8_attention", TORCH_BOX(&float8_attention<Float8OnCpu>));
}

STABLE_TORCH_LIBRARY_IMPL(flash_online, CUDA, m) {
  using namespace flash_online::ops;
  if constexpr (kBuiltWithCuda) implement(m, "float8_attention", TORCH_BOX(&float8_attention<Float8OnCuda>));
}
