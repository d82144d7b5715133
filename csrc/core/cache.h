// Cached keys: which keys a sequence has, and where in the pages of a pool each of them lies. A contiguous cache is a paged one
// with one page per sequence. Lengths and tables are read where the kernel runs and may hold any value: what is returned here
// lies inside the pool nonetheless.
#pragma once

#include "integer.h"
#include "sequence.h"

namespace flash_online {

// The keys that a sequence's table has room for.
FLASH_ONLINE_HD int64_t capacity_of(const CacheView& cache) { return cache.entries * cache.page; }

// The number of keys at the beginning of sequence n that no query sees.
template <class Int = int64_t>
FLASH_ONLINE_HD Int left_of(const CacheView& cache, int64_t n) {
  return cache.left ? clamp<Int>(cache.left[n], 0, static_cast<Int>(capacity_of(cache))) : 0;
}

// The number of keys of sequence n before the new ones, with its padding on the left.
template <class Int = int64_t>
FLASH_ONLINE_HD Int old_keys(const CacheView& cache, int64_t n) {
  const Int capacity = static_cast<Int>(capacity_of(cache));
  return cache.lengths ? clamp<Int>(cache.lengths[n], left_of<Int>(cache, n), capacity) : capacity;
}

// The keys of sequence n that a query may see, by their place in the cache: from the end of its padding on the left to its
// length, with its new keys. Twice the capacity must fit into Int.
template <class Int = int64_t>
FLASH_ONLINE_HD Rows cached_keys(const CacheView& cache, int64_t n) {
  const Int left = left_of<Int>(cache, n), capacity = static_cast<Int>(capacity_of(cache));
  const int64_t new_keys =
      cache.new_starts ? clamp(int64_t{cache.new_starts[n + 1]} - cache.new_starts[n], 0, cache.new_keys) : cache.new_keys;
  const Int added = static_cast<Int>(new_keys < capacity ? new_keys : capacity);
  return {left, clamp<Int>(old_keys<Int>(cache, n) + added, left, capacity) - left};
}

// The row of the table of sequence n, or without a table its block.
FLASH_ONLINE_HD int64_t cache_row(const CacheView& cache, int64_t n) { return cache.rows ? cache.rows[n] : n; }
// `block` if the pool has it, else -1: its keys and values count as 0.
FLASH_ONLINE_HD int64_t checked_block(const CacheView& cache, int64_t block) {
  return block >= 0 && block < cache.blocks ? block : -1;
}

// The block of the pool in which entry `entry` of sequence n lies; -1 where there is none.
FLASH_ONLINE_HD int64_t block_of(const CacheView& cache, int64_t n, int64_t entry) {
  const int64_t row = cache_row(cache, n);
  if (cache.table && (row < 0 || row >= cache.table_rows)) return -1;
  return checked_block(cache, cache.table ? cache.table[row * cache.table_stride + entry] : row);
}

// The scale of the keys, or values, of a head of sequence n. `scales` and their strides are the cache's.
FLASH_ONLINE_HD float scale_of(const float* scales, const int64_t (&stride)[2], int64_t n, int64_t head) {
  return scales ? scales[n * stride[0] + head * stride[1]] : 1.0f;
}

// The queries of sequence n, and its keys as cached_keys numbers them, counted from the first one that may be seen. The last
// query stands at the last key, or the first at the first.
template <class Int = int64_t>
FLASH_ONLINE_HD Sequence cached_sequence(const AttentionProblem& problem, int64_t n) {
  const CacheView& cache = problem.cache;
  if (n >= problem.batch) return {{0, 0}, {0, 0}, problem.visible};  // no sequences, only padding rows
  Sequence sequence{{0, problem.queries}, cached_keys<Int>(cache, n), problem.visible};
  if (problem.query_starts)
    sequence.queries = packed_rows<Int>(problem.query_starts, n, problem.queries, problem.total_queries);
  if (cache.query_lengths)
    sequence.queries.count = clamp<Int>(cache.query_lengths[n], 0, static_cast<Int>(sequence.queries.count));
  sequence.visible.offset = problem.lower_right ? sequence.keys.count - sequence.queries.count : 0;
  return sequence;
}

// The packed queries of sequence n that do not count, since `query_lengths` has fewer than there are.
FLASH_ONLINE_HD Rows unused_queries(const AttentionProblem& problem, int64_t n) {
  if (n >= problem.batch) return {0, 0};
  const Rows all = packed_rows(problem.query_starts, n, problem.queries, problem.total_queries);
  const int64_t used = cached_sequence(problem, n).queries.count;
  return {all.begin + used, all.count - used};
}

// The cut of the keys of a sequence into kv_splits, which merge in ascending order. It depends on the sequence alone.
constexpr int64_t kKeysPerKvSplitBlock = 64;

// The kv_splits of a sequence of `keys` keys: as many as are wanted, if `least` keys are there for each.
template <class Int = int64_t>
FLASH_ONLINE_HD Int kv_splits_of(std::type_identity_t<Int> keys, std::type_identity_t<Int> wanted,
                                 std::type_identity_t<Int> least = kKeysPerKvSplitBlock) {
  const Int most = ceil_div(keys, least);
  return clamp<Int>(wanted, 1, most > 1 ? most : 1);
}

// The kv_split `index` of `count`, of `keys` keys: whole blocks but for the last one. keys * count / 64 must fit into Int.
template <class Int = int64_t>
FLASH_ONLINE_HD Rows kv_split_of(std::type_identity_t<Int> keys, std::type_identity_t<Int> count,
                                 std::type_identity_t<Int> index) {
  constexpr Int kBlock = kKeysPerKvSplitBlock;
  const Int blocks = ceil_div(keys, kBlock);
  const Int begin = blocks * index / count * kBlock, end = clamp<Int>(blocks * (index + 1) / count * kBlock, 0, keys);
  return {begin, end - begin};
}

// The sequence with a range of its keys only.
FLASH_ONLINE_HD Sequence with_keys(Sequence sequence, const Rows& keys) {
  sequence.keys = {sequence.keys.begin + keys.begin, keys.count};
  sequence.visible.offset -= keys.begin;
  return sequence;
}

// ---- Dense keys ------------------------------------------------------------------------------------------------------------

// A dense call of few rows, as a step of generation makes it, may run over cached keys: the work of one row is then spread over
// many SMs or threads. The tensors are a contiguous cache as they lie. Each device says from how many keys on it is faster.
constexpr int64_t kFewRows = 64;  // of the query heads that share a key head, over all queries

// Returns whether a forward pass has few rows. One that a backward pass follows has not: its rows have the bits that they have
// in a longer call (docs/accuracy.md, row independence).
constexpr bool has_few_rows(const AttentionProblem& problem) {
  return !problem.query_starts && !problem.lse_low && !problem.is_sparse() && problem.dropout == 0 && problem.key_heads > 0 &&
         problem.key_heads == problem.value_heads && problem.batch > 0 && problem.queries > 0 && problem.keys > 0 &&
         problem.heads / problem.key_heads * problem.queries <= kFewRows;
}

// The same problem over cached keys, which are cut into `kv_splits`; 0: as the kernel chooses.
constexpr AttentionProblem as_cached(AttentionProblem problem, int64_t kv_splits) {
  problem.cache = {};
  problem.cache.page = problem.keys;
  problem.cache.blocks = problem.batch;
  problem.cache.entries = 1;
  problem.cache.dtype = problem.dtype;
  problem.cache.is_dense = true;
  problem.cache.kv_splits = kv_splits;
  return problem;
}

}  // namespace flash_online
