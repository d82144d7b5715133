// What a kernel is asked to do: plain structs, filled by csrc/ops and read by csrc/cpu and csrc/cuda. No torch, no CUDA
// runtime. Sizes count elements; strides count elements of the tensor they belong to.
#pragma once

#include <cstdint>

namespace flash_online {

enum class DType : int8_t { kBool, kFloat16, kBFloat16, kFloat32, kFloat64, kInt64 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBool: return 1;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kFloat32: return 4;
    case DType::kFloat64:
    case DType::kInt64: return 8;
  }
  return 0;
}

// A tensor of any strides, with the shape [batch, head, row, column]; a stride of 0 is a broadcast dimension.
template <class Pointer>
struct View4 {
  Pointer data = nullptr;
  int64_t stride[4] = {};
};
using ConstView4 = View4<const void*>;
using MutableView4 = View4<void*>;

// Which keys a query may see by arithmetic alone: the query of index i stands at position p = i + offset, and sees key j
// where p - left <= j <= p + right. A negative left or right is no bound.
struct Visibility {
  int64_t left = -1, right = -1, offset = 0;
};

// softmax(g(scale * query key^T) + bias) value, with g the softcap. Query head h uses key head h / (heads / key_heads) and
// value head h / (heads / value_heads).
//
// The sequences of a batch are dense, each `queries` x `keys`, one step of stride[0] after another; or packed, of any lengths
// and one behind the other along the rows, in tensors [heads, total, head_dim] with a stride[0] of 0. sequence_of (sequence.h)
// says which rows are a sequence's. Comments give the dense shapes; packed tensors of rows have no batch.
struct AttentionProblem {
  DType dtype = DType::kFloat32;     // of query, key, value, out and their gradients
  DType mask_dtype = DType::kBool;
  bool tf32 = false;                 // whether products of float32 on CUDA may be made of fewer digits, at least tf32's
  int64_t batch = 0, heads = 0, key_heads = 0, value_heads = 0;  // batch: the number of sequences
  int64_t queries = 0, keys = 0, head_dim = 0, head_dim_v = 0;     // packed: at most; longer sequences are cut
  int64_t batch_begin = 0;           // the index of batch 0 among the call's batches: a part of dropout's counter

  ConstView4 query;                  // [batch, heads, queries, head_dim]
  ConstView4 key;                    // [batch, key_heads, keys, head_dim]
  ConstView4 value;                  // [batch, value_heads, keys, head_dim_v]
  ConstView4 mask;                   // [batch, heads, queries, keys], no data: none
  const void* alibi_slopes = nullptr;  // [batch, heads], accumulator type
  int64_t alibi_stride[2] = {};
  const void* sinks = nullptr;       // [heads], accumulator type, contiguous
  const int64_t* rng = nullptr;      // (seed, offset), on the device; null without dropout

  // Packed: [batch + 1], contiguous, on the device, which the host must not read: a sequence's first row, and the end of the
  // last; not to be trusted. Null: dense.
  const int32_t *query_starts = nullptr, *key_starts = nullptr;
  int64_t total_queries = 0, total_keys = 0;  // packed: rows that the tensors have

  Visibility visible;                // packed: without its offset
  bool lower_right = false;          // packed: a sequence's offset is its keys - its queries
  double scale = 1, softcap = 0;     // softcap 0: none
  double dropout = 0;                // the probability that a weight is dropped

  MutableView4 out;                  // [batch, heads, queries, head_dim_v]
  void* lse = nullptr;  // [batch, heads, queries], accumulator type, strides lse_stride: natural logarithm; null: not wanted
  void* lse_low = nullptr;           // same: what rounding lse dropped
  int64_t lse_stride[2] = {};        // of batch and heads, for all that has a number a query; queries are neighbours
};

// The backward pass of an AttentionProblem, whose out, lse and lse_low are inputs here.
struct AttentionGradients {
  ConstView4 grad_out;               // [batch, heads, queries, head_dim_v]
  const void* grad_lse = nullptr;    // [batch, heads, queries], accumulator type, strides lse_stride; null: zero
  MutableView4 grad_query;           // shapes of the forward's inputs; every element is written
  MutableView4 grad_key;
  MutableView4 grad_value;
  MutableView4 grad_mask;            // no data: not wanted
  DType grad_mask_dtype = DType::kFloat32;
  bool add_to_grad_mask = false;     // to what is there, instead of overwriting it
  int64_t mask_size[4] = {};         // the mask's own shape: 1 where it is broadcast
  int64_t kv_grad_heads = 0;         // CUDA: heads that grad_key and grad_value have, for the caller to sum to their own
  void* grad_sinks = nullptr;        // [batch, heads], accumulator type, contiguous; null: no sinks
  void* delta = nullptr;             // workspace: [batch, heads, queries], accumulator type, strides lse_stride
  double* wide_delta = nullptr;      // workspace: the same in double, for float32; else null
};

// Dropout's mask by itself.
struct DropoutProblem {
  const int64_t* rng = nullptr;
  int64_t batch_begin = 0, batch = 0, heads = 0, query_begin = 0, queries = 0, keys = 0;
  double dropout = 0;
  bool* keep = nullptr;  // [batch, heads, queries, keys], contiguous
};

// Partial results over disjoint keys, and their merge: rows of any strides, read by (row, column) after ops/ has flattened
// the leading dimensions.
struct MergePart {
  const void* out = nullptr;   // [rows, head_dim]
  int64_t row_stride = 0, column_stride = 0;
  const void* lse = nullptr;   // [rows], accumulator type, contiguous
  void* grad_out = nullptr;    // [rows, head_dim], contiguous
  void* grad_lse = nullptr;    // [rows], accumulator type, contiguous
};

struct MergeProblem {
  DType dtype = DType::kFloat32;
  int64_t rows = 0, head_dim = 0, parts = 0;
  const MergePart* part = nullptr;
  void* out = nullptr;         // [rows, head_dim], contiguous
  void* lse = nullptr;         // [rows], accumulator type, contiguous
};

struct MergeGradients {
  const void* grad_out = nullptr;  // [rows, head_dim], contiguous
  const void* grad_lse = nullptr;  // [rows], accumulator type, contiguous
};

}  // namespace flash_online
