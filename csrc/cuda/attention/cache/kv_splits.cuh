// The kv_splits that the keys of cached sequences are cut into where queries are few (FlashDecoding), and the partial results
// of the sequences that are cut. A sequence's own length alone decides into how many of the most that a call has: `num_splits`,
// or what the GPU has room for.
#pragma once

#include "../../../core/cache.h"

namespace flash_online::cuda {

struct KvSplits {
  int64_t most = 1, least_keys = kKeysPerKvSplitBlock;  // kv_splits per sequence; keys per kv_split
  // [rows, most, pitch]: the row's outputs, which still are to be divided by the sum, then maximum (base 2) and sum. Rows are
  // numbered as lse numbers them.
  float* partials = nullptr;
  int64_t pitch = 0;

  // `ctas`: how many there are without kv_splits; `room`: how many CTAs the GPU runs at a time.
  static KvSplits of(const AttentionProblem& problem, int64_t ctas, int64_t room) {
    constexpr int64_t kLeastKeys = 256, kMost = 128;  // where the kernel chooses
    KvSplits kv_splits;
    const int64_t capacity = capacity_of(problem.cache);
    if (problem.cache.kv_splits > 0) {
      kv_splits.most = kv_splits_of(capacity, problem.cache.kv_splits);
    } else {
      kv_splits.least_keys = kLeastKeys;
      kv_splits.most = kv_splits_of(capacity, clamp(room / (ctas > 0 ? ctas : 1), 1, kMost), kLeastKeys);
    }
    kv_splits.pitch = round_up(problem.head_dim_v, 2) + 2;  // pairs are stored at once
    return kv_splits;
  }
  static int64_t rows_of(const AttentionProblem& problem) {
    return problem.query_starts ? problem.heads * problem.total_queries : problem.batch * problem.heads * problem.queries;
  }
  int64_t bytes(const AttentionProblem& problem) const {
    return most > 1 ? rows_of(problem) * most * pitch * static_cast<int64_t>(sizeof(float)) : 0;
  }

  template <class Int = int64_t>
  FLASH_ONLINE_HD Int count_of(const Sequence& sequence) const {
    return kv_splits_of<Int>(static_cast<Int>(sequence.keys.count), static_cast<Int>(most), static_cast<Int>(least_keys));
  }
#ifdef __CUDACC__
  __device__ __forceinline__ float* partial(int64_t row, int64_t kv_split) const {
    return partials + (row * most + kv_split) * pitch;
  }
  __device__ __forceinline__ float2& state(float* partial) const { return *reinterpret_cast<float2*>(partial + pitch - 2); }
  __device__ __forceinline__ const float2& state(const float* partial) const {
    return *reinterpret_cast<const float2*>(partial + pitch - 2);
  }
#endif
};

// Merges the partial results of the sequences that were cut, with their sinks, into out and lse.
void merge_kv_splits(const AttentionProblem& problem, const KvSplits& kv_splits, CUstream_st* stream);

}  // namespace flash_online::cuda
