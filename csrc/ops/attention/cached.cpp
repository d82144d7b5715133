// attention_cached, attention_cached_ (writes into a given output), attention_decode (has few of its options), and
// cache_append_.
#include "cached.h"

#include "../operators.h"
#include "pass.h"

namespace flash_online::ops {
namespace {

struct CachedOnCpu : Cpu {
  static void attend(const AttentionProblem& problem, const Tensor& like) {
    const cpu::AttentionKernels& kernels = cpu::kernels().attention;
    const int64_t rows = problem.query_starts ? problem.total_queries : problem.batch * problem.queries;
    const int64_t most_items =
        std::max<int64_t>(rows, 1) * problem.heads * (capacity_of(problem.cache) / kKeysPerKvSplitBlock + 1);
    kernels.cached(problem, CpuExecutor(most_items, kernels.cached_memory(problem), like));
  }
  static void append(const AppendProblem& problem, const Tensor& like) {
    cpu::kernels().attention.append(problem, CpuExecutor(problem.rows * problem.heads, {}, like));
  }
};

struct CachedOnCuda : Cuda {
  static void attend(const AttentionProblem& problem, const Tensor& like) {
    CudaCall call(like);
    const cuda::Plan<cuda::ForwardPass> plan = cuda::plan_cached(problem);
    plan.run(call.workspace(plan.workspace_bytes), call.stream());
  }
  static void append(const AppendProblem& problem, const Tensor& like) { cuda::cache_append(problem, CudaCall(like).stream()); }
};

template <class Device>
void attend(const CachedInputs& in, const CachedOptions& options, const Tensor& out, const Tensor* lse) {
  const AttentionProblem problem = cached_problem<Device>(in, options, out, lse);
  if (problem.heads > 0 && (problem.batch > 0 || problem.query_starts)) Device::attend(problem, in.query);
}

template <class Device>
std::tuple<Tensor, Tensor> attention_cached(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                                            const std::optional<Tensor>& lengths, const std::optional<Tensor>& left,
                                            const std::optional<Tensor>& rows, const std::optional<Tensor>& block_table,
                                            const std::optional<Tensor>& query_starts,
                                            const std::optional<Tensor>& query_lengths, const std::optional<Tensor>& new_starts,
                                            const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks,
                                            const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale,
                                            int64_t new_keys, int64_t max_queries, int64_t window_left, int64_t window_right,
                                            bool lower_right, std::optional<double> scale, double softcap, int64_t splits,
                                            const std::optional<Tensor>& query_spans) {
  const CachedInputs in{query,        key_cache,   value_cache,  lengths,       left,
                        rows,         block_table, query_starts, query_lengths, new_starts,
                        alibi_slopes, sinks,       key_scale,    value_scale,   query_spans ? &*query_spans : nullptr};
  const CachedOptions options{new_keys, max_queries, window_left, window_right, lower_right, scale, softcap, splits};
  check_cached<Device>(in, options);
  const Tensor out = empty_in_order(cached_out_sizes(in), query.scalar_type(), query),
               lse = empty(cached_lse_sizes(in), accumulator_of(query.scalar_type()), query);
  attend<Device>(in, options, out, &lse);
  return {out, lse};
}

template <class Device>
Tensor attention_cached_(const Tensor& out, const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                         const std::optional<Tensor>& lengths, const std::optional<Tensor>& left,
                         const std::optional<Tensor>& rows, const std::optional<Tensor>& block_table,
                         const std::optional<Tensor>& query_starts, const std::optional<Tensor>& query_lengths,
                         const std::optional<Tensor>& new_starts, const std::optional<Tensor>& alibi_slopes,
                         const std::optional<Tensor>& sinks, const std::optional<Tensor>& key_scale,
                         const std::optional<Tensor>& value_scale, int64_t new_keys, int64_t max_queries, int64_t window_left,
                         int64_t window_right, bool lower_right, std::optional<double> scale, double softcap, int64_t splits,
                         const std::optional<Tensor>& query_spans) {
  const CachedInputs in{query,        key_cache,   value_cache,  lengths,       left,
                        rows,         block_table, query_starts, query_lengths, new_starts,
                        alibi_slopes, sinks,       key_scale,    value_scale,   query_spans ? &*query_spans : nullptr};
  const CachedOptions options{new_keys, max_queries, window_left, window_right, lower_right, scale, softcap, splits};
  check_cached<Device>(in, options);
  check(sizes_of(out) == cached_out_sizes(in), "out: expected query's shape with value_cache's width, got ", shape_of(out));
  check(out.scalar_type() == query.scalar_type(), "out: expected query's dtype, ", name_of(query.scalar_type()), ", got ",
        name_of(out.scalar_type()));
  check_device(out, "out", query, "query");
  const Tensor lse = empty(cached_lse_sizes(in), accumulator_of(query.scalar_type()), query);
  attend<Device>(in, options, out, &lse);
  return lse;
}

template <class Device>
Tensor attention_decode(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                        const std::optional<Tensor>& lengths, const std::optional<Tensor>& block_table, int64_t window_left,
                        std::optional<double> scale, int64_t splits) {
  const std::optional<Tensor> none;
  const CachedInputs in{query, key_cache, value_cache, lengths, none, none, block_table,
                        none,  none,      none,        none,    none, none, none};
  const CachedOptions options{.new_keys = 0,
                              .max_queries = 0,  // of packed queries
                              .window_left = window_left,
                              .window_right = 0,
                              .lower_right = true,
                              .scale = scale,
                              .softcap = 0,
                              .splits = splits};
  check_cached<Device>(in, options);
  const Tensor out = empty_in_order(cached_out_sizes(in), query.scalar_type(), query);
  attend<Device>(in, options, out, nullptr);
  return out;
}

template <class Device>
Tensor cache_append_(const Tensor& key_cache, const Tensor& value_cache, const std::optional<Tensor>& key,
                     const std::optional<Tensor>& value, const std::optional<Tensor>& query,
                     const std::optional<Tensor>& lengths, const std::optional<Tensor>& left, const std::optional<Tensor>& rows,
                     const std::optional<Tensor>& block_table, const std::optional<Tensor>& slots,
                     const std::optional<Tensor>& new_starts, const std::optional<Tensor>& query_starts,
                     const std::optional<Tensor>& cosines, const std::optional<Tensor>& sines,
                     const std::optional<Tensor>& offsets, const std::optional<Tensor>& key_scale,
                     const std::optional<Tensor>& value_scale, bool interleaved, bool queries_advance) {
  const AppendInputs in{key_cache, value_cache, key,          value,   query, lengths, left,      rows,       block_table,
                        slots,     new_starts,  query_starts, cosines, sines, offsets, key_scale, value_scale};
  check_append<Device>(in);
  const Tensor rotated = query ? empty_in_order(sizes_of(*query), query->scalar_type(), *query)
                               : empty({0}, key ? key->scalar_type() : key_cache.scalar_type(), key_cache);
  const AppendProblem problem = append_problem(in, interleaved, queries_advance, rotated);
  Device::append(problem, key_cache);
  return rotated;
}

template <class Device, class Library>
void add_cached(Library& m) {
  implement(m, "attention_cached", TORCH_BOX(&attention_cached<Device>));
  implement(m, "attention_cached_", TORCH_BOX(&attention_cached_<Device>));
  implement(m, "attention_decode", TORCH_BOX(&attention_decode<Device>));
  implement(m, "cache_append_", TORCH_BOX(&cache_append_<Device>));
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) { flash_online::ops::add_cached<flash_online::ops::CachedOnCpu>(m); }

STABLE_TORCH_LIBRARY_IMPL(flash_online, CUDA, m) {
  if constexpr (flash_online::ops::kBuiltWithCuda) flash_online::ops::add_cached<flash_online::ops::CachedOnCuda>(m);
}
