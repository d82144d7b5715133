// The pieces that the keys of cached sequences are cut into where queries are few (FlashDecoding), and the partial results of
// the sequences that are cut. A sequence's own length alone decides into how many of the most that a call has: `num_splits`, or
// what the GPU has room for.
#pragma once

#include "../../../core/cache.h"

namespace flash_online::cuda {

struct CachedPieces {
  int64_t most = 1, least_keys = kKeysPerSplitBlock;  // pieces per sequence; keys per piece
  // [rows, most, pitch]: the row's outputs, which still are to be divided by the sum, then maximum (base 2) and sum. Rows are
  // numbered as lse numbers them.
  float* parts = nullptr;
  int64_t pitch = 0;

  // `ctas`: how many there are without pieces; `room`: how many CTAs the GPU runs at a time.
  static CachedPieces of(const AttentionProblem& problem, int64_t ctas, int64_t room) {
    constexpr int64_t kLeastKeys = 256, kMost = 128;  // where the kernel chooses
    CachedPieces pieces;
    const int64_t capacity = capacity_of(problem.cache);
    if (problem.cache.splits > 0) {
      pieces.most = pieces_of(capacity, problem.cache.splits);
    } else {
      pieces.least_keys = kLeastKeys;
      pieces.most = pieces_of(capacity, clamp(room / (ctas > 0 ? ctas : 1), 1, kMost), kLeastKeys);
    }
    pieces.pitch = round_up(problem.head_dim_v, 2) + 2;  // pairs are stored at once
    return pieces;
  }
  static int64_t rows_of(const AttentionProblem& problem) {
    return problem.query_starts ? problem.heads * problem.total_queries : problem.batch * problem.heads * problem.queries;
  }
  int64_t bytes(const AttentionProblem& problem) const {
    return most > 1 ? rows_of(problem) * most * pitch * static_cast<int64_t>(sizeof(float)) : 0;
  }

  template <class Int = int64_t>
  FLASH_ONLINE_HD Int count_of(const Sequence& sequence) const {
    return pieces_of<Int>(static_cast<Int>(sequence.keys.count), static_cast<Int>(most), static_cast<Int>(least_keys));
  }
#ifdef __CUDACC__
  __device__ __forceinline__ float* part(int64_t row, int64_t piece) const { return parts + (row * most + piece) * pitch; }
  __device__ __forceinline__ float2& state(float* part) const { return *reinterpret_cast<float2*>(part + pitch - 2); }
  __device__ __forceinline__ const float2& state(const float* part) const {
    return *reinterpret_cast<const float2*>(part + pitch - 2);
  }
#endif
};

// Merges the partial results of the sequences that were cut, with their sinks, into out and lse.
void merge_pieces(const AttentionProblem& problem, const CachedPieces& pieces, CUstream_st* stream);

}  // namespace flash_online::cuda
