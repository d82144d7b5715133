// Dense attention of few rows over many keys, a step of generation: kernels over cached keys take it, since one row's keys are
// work for many SMs or threads. The tensors are a contiguous cache as they lie.
#pragma once

#include "cache.h"

namespace flash_online {

constexpr int64_t kFewRows = 64;  // of the query heads that share a key head, over all queries
constexpr int64_t kManyKeys = 512;

// Returns whether a forward pass has few rows over many keys. One that a backward pass follows has not: its rows have the bits
// that they have in a longer call (docs/api.md, row independence).
constexpr bool has_few_rows(const AttentionProblem& problem) {
  return !problem.query_starts && !problem.lse_low && problem.dropout == 0 && problem.key_heads > 0 &&
         problem.key_heads == problem.value_heads && problem.batch > 0 && problem.queries > 0 && problem.keys >= kManyKeys &&
         problem.heads / problem.key_heads * problem.queries <= kFewRows;
}

// The same problem over cached keys, which are cut into `kv_splits`; 0: as the kernel chooses.
constexpr AttentionProblem as_cached(AttentionProblem problem, int64_t kv_splits) {
  problem.cache = {};
  problem.cache.page = problem.keys;
  problem.cache.blocks = problem.batch;
  problem.cache.entries = 1;
  problem.cache.dtype = problem.dtype;
  problem.cache.kv_splits = kv_splits;
  return problem;
}

}  // namespace flash_online
