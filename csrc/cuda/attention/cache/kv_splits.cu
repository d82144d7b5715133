// A CTA takes a row and merges its kv_splits in ascending order. Nothing depends on other rows.
#include "../../hw/launch.h"
#include "../../hw/pdl.cuh"
#include "kv_splits.cuh"
#include "result.cuh"

namespace flash_online::cuda {

namespace {

struct MergeKvSplitsArguments {
  AttentionProblem problem;
  KvSplits kv_splits;
};

template <class Element, class Merge = RowMerge<Element>>
__global__ void __launch_bounds__(Merge::kThreads)
    merge_all_kv_splits(const __grid_constant__ MergeKvSplitsArguments arguments) {
  __shared__ typename Merge::Shared shared;
  const AttentionProblem& problem = arguments.problem;
  const KvSplits& kv_splits = arguments.kv_splits;
  const int64_t rows = problem.batch * problem.heads * problem.queries;
  grid_dependency_wait();
  for (int64_t index = blockIdx.x; index < rows; index += gridDim.x) {
    const int64_t query = index % problem.queries, plane = index / problem.queries, n = plane / problem.heads,
                  head = plane % problem.heads;
    const Sequence sequence = cached_sequence(problem, n);
    const int64_t count = kv_splits.count_of(sequence);
    if (query >= sequence.queries.count || count == 1) continue;
    const CachedRow row{n, head, head / (problem.heads / problem.key_heads), sequence.queries.begin + query};
    const int64_t number = lse_index(problem, row);
    const RowPartials partials{kv_splits.partial(number, 0), kv_splits.partial(number, 1), kv_splits.pitch,
                               static_cast<int>(kv_splits.pitch) - 2, static_cast<int>(count)};
    Merge::merge(problem, row, partials, shared);
  }
}

}  // namespace

void merge_kv_splits(const AttentionProblem& problem, const KvSplits& kv_splits, CUstream_st* stream) {
  const int64_t rows = problem.batch * problem.heads * problem.queries;
  if (kv_splits.most == 1 || rows == 0) return;
  const MergeKvSplitsArguments arguments{problem, kv_splits};
  const unsigned ctas = grid_for(rows, 16);
  constexpr int kThreads = RowMerge<float>::kThreads;
  switch (problem.dtype) {
    case DType::kFloat16: return launch<merge_all_kv_splits<__half>>(arguments, ctas, kThreads, 0, stream, true);
    case DType::kBFloat16: return launch<merge_all_kv_splits<__nv_bfloat16>>(arguments, ctas, kThreads, 0, stream, true);
    default: return launch<merge_all_kv_splits<float>>(arguments, ctas, kThreads, 0, stream, true);
  }
}

}  // namespace flash_online::cuda
