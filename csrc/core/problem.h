// The arguments of kernels: plain structs, filled by csrc/ops and read by csrc/cpu and csrc/cuda, without torch and without the
// CUDA runtime. Sizes count elements; strides count elements of the tensor they belong to.
#pragma once

#include <cmath>
#include <cstdint>

#include "config.h"

namespace flash_online {

enum class DType : int8_t { kBool, kFloat16, kBFloat16, kFloat32, kFloat64, kInt64, kFloat8E4M3, kFloat8E5M2 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: return 1;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kFloat32: return 4;
    case DType::kFloat64:
    case DType::kInt64: return 8;
  }
  return 0;
}

// A tensor of any strides, with the shape [batch, head, row, column]; a broadcast dimension has the stride 0.
template <class Pointer>
struct View4 {
  Pointer data = nullptr;
  int64_t stride[4] = {};
};
using ConstView4 = View4<const void*>;
using MutableView4 = View4<void*>;

// The keys that a query may see by position alone. The query of index i is at position p = i + offset and sees key j if p -
// left <= j <= p + right. A negative left or right means no bound.
struct Visibility {
  int64_t left = -1, right = -1, offset = 0;
};

// Intervals of keys that each query may see, or of queries that may see each key: int32 [batch, heads, rows, 2 * intervals],
// each row [begin, end) or two of them, of which one with end <= begin is empty. The array is on the device, where the host
// must not read it; bounds may lie outside of the sequence. No data: everything may be seen.
struct SpanView {
  const int32_t* data = nullptr;
  int64_t stride[3] = {};  // of batch, head and row; the bounds of a row are neighbours
  int intervals = 0;  // 1 or 2
};

// The cached keys of a problem. key and value are a pool of blocks, [blocks, heads, page, head_dim]. Entry e of a sequence's
// row of `table` is the block of its keys [e * page, (e + 1) * page). Without a table, block n has all keys of sequence n. All
// arrays are int32 in device memory: the host must not read them, and their values may be wrong (cache.h).
struct CacheView {
  int64_t page = 0;  // keys per block; 0: keys are not cached
  int64_t blocks = 0, entries = 1;  // of the pool; of a row of the table
  const int32_t* table = nullptr;  // [table_rows, entries]
  int64_t table_rows = 0, table_stride = 0;
  const int32_t* rows = nullptr;  // [batch]: the row of the table, or the block, of each sequence; null: its index
  const int32_t* lengths = nullptr;  // [batch]: keys before the new ones, those of `left` included; null: as many as fit
  const int32_t* left = nullptr;  // [batch]: keys at the beginning that no query sees; null: none
  const int32_t* new_starts = nullptr;  // [batch + 1]: new keys are the difference of two, at most new_keys; null: new_keys
  int64_t new_keys = 0;
  const int32_t* query_lengths = nullptr;  // [batch]: packed: how many of a sequence's queries count; null: all
  DType dtype = DType::kFloat32;  // of key and value: the query's, or float8
  bool is_dense = false;  // whether they are the tensors of a dense call (as_cached in cache.h)
  // float8: [batch, heads], what keys and values are multiplied by; null: 1
  const float *key_scale = nullptr, *value_scale = nullptr;
  int64_t key_scale_stride[2] = {}, value_scale_stride[2] = {};
  int64_t kv_splits = 0;  // that the keys of each sequence are cut into, at most; 0: the kernel's choice
};

// The modifications of scores by their names, one bit each: a kernel that lacks one refuses the problem.
enum ScoreMods : unsigned { kSoftcap = 1, kAlibi = 2, kScoreModsOfHead = kAlibi };  // OfHead: with a parameter per head

// softmax(g(scale * query key^T) + bias) value, with g the score modification: softcap, then ALiBi. Query head h uses key head
// h / (heads / key_heads) and value head h / (heads / value_heads).
//
// The sequences of a batch are dense or packed. Dense sequences have the size `queries` x `keys` each and lie stride[0] apart.
// Packed sequences have any lengths and follow one another along the rows of tensors [heads, total, head_dim]; stride[0] of
// these tensors is 0. sequence_of (sequence.h) returns the rows of a sequence. The shapes in comments are dense; packed tensors
// have no batch dimension.
struct AttentionProblem {
  DType dtype = DType::kFloat32;  // of query, key, value, out and their gradients
  DType mask_dtype = DType::kBool;
  bool tf32 = false;  // whether CUDA may multiply float32 with fewer digits, at least tf32's
  int64_t batch = 0, heads = 0, key_heads = 0, value_heads = 0;  // batch: the number of sequences
  int64_t queries = 0, keys = 0, head_dim = 0, head_dim_v = 0;  // packed: the maximum; longer sequences are cut
  int64_t batch_begin = 0;  // the index of batch 0 among the call's batches, which dropout's counter contains

  ConstView4 query;  // [batch, heads, queries, head_dim]
  ConstView4 key;  // [batch, key_heads, keys, head_dim]
  ConstView4 value;  // [batch, value_heads, keys, head_dim_v]
  ConstView4 mask;  // [batch, heads, queries, keys]; no data: no mask
  const void* alibi_slopes = nullptr;  // [batch, heads], accumulator type
  int64_t alibi_stride[2] = {};
  const void* sinks = nullptr;  // [heads], accumulator type, contiguous
  const int64_t* rng = nullptr;  // (seed, offset), on the device; null: no dropout

  // Packed: [batch + 1], contiguous: the first row of each sequence, and the end of the last one. The arrays are on the device,
  // where the host must not read them, and their values may be wrong. Null: dense.
  const int32_t *query_starts = nullptr, *key_starts = nullptr;
  int64_t total_queries = 0, total_keys = 0;  // packed: the rows of the tensors
  CacheView cache;  // with cached keys, packed queries have no key_starts

  Visibility visible;  // packed: without its offset
  bool lower_right = false;  // packed: the offset of a sequence is its keys - its queries
  double scale = 1, softcap = 0;  // softcap 0: none
  double dropout = 0;  // the probability that a weight is dropped

  MutableView4 out;  // [batch, heads, queries, head_dim_v]
  // [batch, heads, queries], accumulator type, strides lse_stride; the natural logarithm; null: not wanted
  void* lse = nullptr;
  // Shape and strides of lse; what rounding lse dropped. In a dense forward pass, and on CUDA, it may be null: not wanted, and
  // in CUDA's backward pass zeros, out and lse then being those of more keys, perhaps.
  void* lse_low = nullptr;
  int64_t lse_stride[2] = {};  // of batch and head, for all arrays with one scalar per query
  // [batch, heads], contiguous: raised to the largest score that a query of the head sees, or to NaN if a score is NaN; null:
  // not wanted
  float* max_logit = nullptr;

  // [batch, heads, tiles of 64 queries, tiles of tile_keys keys]: 0 where no query of a tile may see any of its keys; no data:
  // all may
  View4<const uint8_t*> tiles;
  int tile_keys = 64;  // or 128
  SpanView query_spans;  // [batch, heads, queries, ..]: the keys that a query may see
  SpanView key_spans;  // [batch, heads, keys, ..]: the queries that may see a key
  FLASH_ONLINE_HD constexpr bool has_spans() const { return query_spans.data || key_spans.data; }
  FLASH_ONLINE_HD constexpr bool is_sparse() const { return has_spans() || tiles.data; }
};

FLASH_ONLINE_HD unsigned score_mods(const AttentionProblem& problem) {
  return (problem.softcap > 0 ? kSoftcap : 0u) | (problem.alibi_slopes ? kAlibi : 0u);
}

// The backward pass of an AttentionProblem, in which out, lse and lse_low are inputs.
struct AttentionGradients {
  ConstView4 grad_out;  // [batch, heads, queries, head_dim_v]
  const void* grad_lse = nullptr;  // [batch, heads, queries], accumulator type, strides lse_stride; null: zero
  MutableView4 grad_query;  // grad_query, grad_key, grad_value: shapes of the forward's inputs; all elements are written
  MutableView4 grad_key;
  MutableView4 grad_value;
  MutableView4 grad_mask;  // no data: not wanted
  DType grad_mask_dtype = DType::kFloat32;
  bool add_to_grad_mask = false;  // whether to add to grad_mask instead of overwriting it
  int64_t mask_size[4] = {};  // the shape of the mask itself: 1 where it is broadcast
  // CUDA: the heads of grad_key and grad_value, which the caller sums to key_heads and value_heads
  int64_t kv_grad_heads = 0;
  void* grad_sinks = nullptr;  // [batch, heads], accumulator type, contiguous; null: no sinks
  void* delta = nullptr;  // workspace: [batch, heads, queries], accumulator type, strides lse_stride
  double* wide_delta = nullptr;  // workspace: delta in double, for float32; else null
  // The CPU's workspace for float32, like wide_delta: the maximum of each row with a large lse, and lse less that maximum
  double *row_max = nullptr, *row_log_sum = nullptr;
};

// float8_attention: products in e4m3 (ops/attention/float8.cpp).
struct Float8Problem {
  AttentionProblem attention;  // its dtype is that of `out` alone; key_heads == value_heads
  DType input = DType::kBFloat16;  // of query, key and value: 16 bits, to be quantised, or kFloat8E4M3
  bool smooth_keys = true;  // 16-bit inputs: whether keys are quantised less their mean
  // e4m3: [batch, key_heads], what the tensors are multiplied by; null: 1
  const float *query_scale = nullptr, *key_scale = nullptr, *value_scale = nullptr;
  int64_t query_scale_stride[2] = {}, key_scale_stride[2] = {}, value_scale_stride[2] = {};
};

// New keys and values that are written into a cache, at the ends of its sequences or at given slots, and queries that are
// rotated alike. Rotary embedding (arXiv 2104.09864) turns pairs of columns by the angles of a position.
struct AppendProblem {
  DType dtype = DType::kFloat32;  // of the new rows
  int64_t batch = 0, heads = 0, head_dim = 0, head_dim_v = 0;
  CacheView cache;
  MutableView4 key_cache, value_cache;  // [blocks, heads, page, head_dim]
  ConstView4 key, value;  // [batch, heads, new_keys, head_dim]; packed: [heads, rows, head_dim]; no data: none
  int64_t rows = 0;  // packed, and with slots: of key and value
  const int64_t* slots = nullptr;  // [rows]: rows of the pool; one outside of it drops its row. Null: at the sequences' ends

  const void *cosines = nullptr, *sines = nullptr;  // [positions, pairs], of rotary_dtype; null: nothing is rotated
  DType rotary_dtype = DType::kFloat32;
  int64_t positions = 0, pairs = 0, rotary_stride[2] = {};  // of cosines; the same of sines
  const int32_t* offsets = nullptr;  // [batch]: the position of the first new row; with slots [rows]; null: its place
  bool interleaved = false;  // whether neighbours are a pair, or the columns of two halves

  int64_t query_heads = 0, queries = 0, total_queries = 0;
  ConstView4 query;  // [batch, query_heads, queries, head_dim]; packed: with query_starts; no data: none
  MutableView4 rotated;  // shape of query
  const int32_t* query_starts = nullptr;
  bool queries_advance = true;  // whether query i has the position of new row i, or all that of the first
};

// The mask of dropout alone, without attention.
struct DropoutProblem {
  const int64_t* rng = nullptr;
  int64_t batch_begin = 0, batch = 0, heads = 0, query_begin = 0, queries = 0, keys = 0;
  double dropout = 0;
  bool* keep = nullptr;  // [batch, heads, queries, keys], contiguous
};

// Partial results over disjoint keys, and their merge. csrc/ops flattens the leading dimensions to rows; element (row, column)
// of `out` is at row * row_stride + column * column_stride.
struct MergePartial {
  const void* out = nullptr;  // [rows, head_dim]
  int64_t row_stride = 0, column_stride = 0;
  const void* lse = nullptr;  // [rows], accumulator type, at lse_row()
  void* grad_out = nullptr;  // [rows, head_dim], contiguous
  void* grad_lse = nullptr;  // [rows], accumulator type, contiguous
};

struct MergeProblem {
  DType dtype = DType::kFloat32;
  int64_t rows = 0, head_dim = 0, partials = 0;
  // The partials' lses are [rows / inner_rows, inner_rows] with any strides. For packed queries they are [heads, queries],
  // while outputs are [queries, heads, head_dim]. inner_rows is 1 if there are 2^32 rows or more.
  int64_t inner_rows = 1, lse_stride[2] = {1, 0};
  const MergePartial* partial = nullptr;
  void* out = nullptr;  // [rows, head_dim], contiguous
  void* lse = nullptr;  // [rows], accumulator type, contiguous
};

// The offset of a row in the partials' lses.
constexpr int64_t lse_row(const MergeProblem& problem, int64_t row) {
  if (problem.inner_rows <= 1) return row * problem.lse_stride[0];
  const uint32_t outer = static_cast<uint32_t>(row) / static_cast<uint32_t>(problem.inner_rows);
  return outer * problem.lse_stride[0] + (row - outer * problem.inner_rows) * problem.lse_stride[1];
}

struct MergeGradients {
  const void* grad_out = nullptr;  // [rows, head_dim], contiguous
  const void* grad_lse = nullptr;  // [rows], accumulator type, contiguous
};

// Lists of blocks of keys, one list per block of queries, and the tiles of AttentionProblem that they name. Tiles have the keys
// of a block.
struct BlockListProblem {
  static constexpr int64_t kTile = 64;  // queries of a tile
  const int32_t *counts = nullptr, *indices = nullptr;  // [lists], [lists, capacity]: any values
  int64_t lists = 0, capacity = 0;
  int64_t query_blocks = 0;  // of a head: so many lists, one after another
  int64_t rows = 1;  // of tiles in a block
  int64_t query_tiles = 0, key_tiles = 0;  // of a head; the last block may have fewer rows than the others
  uint8_t* tiles = nullptr;  // [lists / query_blocks, query_tiles, key_tiles]: 1 or 0

  // The tiles of a list's block of queries: `row_tiles(list)` rows of key_tiles.
  FLASH_ONLINE_HD constexpr uint8_t* tiles_of(int64_t list) const {
    return tiles + (list / query_blocks * query_tiles + list % query_blocks * rows) * key_tiles;
  }
  FLASH_ONLINE_HD constexpr int64_t row_tiles(int64_t list) const {
    const int64_t left = query_tiles - list % query_blocks * rows;
    return left < rows ? left : rows;
  }
  // What counts of a list's numbers.
  FLASH_ONLINE_HD constexpr int64_t length(int64_t list) const {
    const int64_t count = counts[list];
    return count < 0 ? 0 : count < capacity ? count : capacity;
  }
  // Sets the tiles of a list's n-th block; a number of no block sets none.
  FLASH_ONLINE_HD constexpr void set(int64_t list, int64_t n) const {
    const int64_t block = indices[list * capacity + n];
    if (block < 0 || block >= key_tiles) return;
    for (int64_t row = 0; row < row_tiles(list); ++row) tiles_of(list)[row * key_tiles + block] = 1;
  }
};

// The lists of the blocks of keys with the largest scores, one list per row of scores.
struct BlockTopkProblem {
  const float* scores = nullptr;  // [lists, key_blocks]; NaN and -inf are not chosen
  int64_t lists = 0, key_blocks = 0;
  int64_t k = 0;  // blocks in a list at most: from 1 to key_blocks
  // Under a causal mask: blocks of keys after the one with a block's last query are not chosen, and that one always is.
  bool causal = false;
  int64_t query_blocks = 0;  // of a head: so many lists, one after another
  int64_t rows = 1, columns = 1;  // of a block of queries and of a block of keys, in any unit
  int32_t *counts = nullptr, *indices = nullptr;  // [lists], [lists, k]; what follows a list's count is key_blocks

  // The block of keys with the last query of a list's block of queries. A last block that is not full has its last query
  // earlier: the scores of blocks after that query are -inf.
  FLASH_ONLINE_HD int64_t own(int64_t list) const {
    const int64_t of_full = ((list % query_blocks + 1) * rows - 1) / columns;
    const int64_t last = of_full < key_blocks ? of_full : key_blocks - 1;
    for (int64_t block = last; block >= 0; --block)
      if (scores[list * key_blocks + block] != -INFINITY) return block;
    return last;
  }
};

// A copy of a block of memory, of any strides: `unit` bytes (1, 2, 4, 8 or 16; addresses are multiples of it) at a time.
// Strides count units.
struct BlockCopy {
  static constexpr int kDims = 5;
  const char* from = nullptr;
  char* to = nullptr;
  int64_t size[kDims] = {1, 1, 1, 1, 1};  // at least 1 each
  int64_t from_stride[kDims] = {}, to_stride[kDims] = {};
  int unit = 1;

  constexpr int64_t units() const {
    int64_t product = 1;
    for (const int64_t n : size) product *= n;
    return product;
  }
};

}  // namespace flash_online
