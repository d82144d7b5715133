// What a kernel is asked to do: plain structs, filled by csrc/ops and read by csrc/cpu and csrc/cuda, without torch and without
// the CUDA runtime. Sizes count elements; strides count elements of the tensor they belong to.
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

// A tensor of any strides, with the shape [batch, head, row, column]; a broadcast dimension has the stride 0.
template <class Pointer>
struct View4 {
  Pointer data = nullptr;
  int64_t stride[4] = {};
};
using ConstView4 = View4<const void*>;
using MutableView4 = View4<void*>;

// Which keys a query may see by position alone. The query of index i stands at position p = i + offset and sees key j where p -
// left <= j <= p + right. A negative left or right means no bound.
struct Visibility {
  int64_t left = -1, right = -1, offset = 0;
};

// softmax(g(scale * query key^T) + bias) value, with g the score modification: softcap, then ALiBi. Query head h uses key head
// h / (heads / key_heads) and value head h / (heads / value_heads).
//
// The sequences of a batch are dense or packed. Dense sequences have the size `queries` x `keys` each and lie stride[0] apart.
// Packed sequences have any lengths and follow one another along the rows of tensors [heads, total, head_dim], whose stride[0]
// is 0; sequence_of (sequence.h) says which rows belong to a sequence. The shapes in comments are dense; packed tensors have no
// batch dimension.
struct AttentionProblem {
  DType dtype = DType::kFloat32;  // of query, key, value, out and their gradients
  DType mask_dtype = DType::kBool;
  bool tf32 = false;  // whether CUDA may multiply float32 with fewer digits, at least tf32's
  int64_t batch = 0, heads = 0, key_heads = 0, value_heads = 0;  // batch: the number of sequences
  int64_t queries = 0, keys = 0, head_dim = 0, head_dim_v = 0;  // packed: the maximum; longer sequences are cut
  int64_t batch_begin = 0;  // the index of batch 0 among the call's batches, a part of dropout's counter

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

  Visibility visible;  // packed: without its offset
  bool lower_right = false;  // packed: the offset of a sequence is its keys - its queries
  double scale = 1, softcap = 0;  // softcap 0: none
  double dropout = 0;  // the probability that a weight is dropped

  MutableView4 out;  // [batch, heads, queries, head_dim_v]
  // [batch, heads, queries], accumulator type, strides lse_stride; the natural logarithm; null: not wanted
  void* lse = nullptr;
  // Shape and strides of lse; what rounding lse dropped. On CUDA it may be null: not wanted, and in the backward pass zeros, out
  // and lse then being those of more keys, perhaps.
  void* lse_low = nullptr;
  int64_t lse_stride[2] = {};  // of batch and head, for all arrays with one number per query
};

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
struct MergePart {
  const void* out = nullptr;  // [rows, head_dim]
  int64_t row_stride = 0, column_stride = 0;
  const void* lse = nullptr;  // [rows], accumulator type, contiguous
  void* grad_out = nullptr;  // [rows, head_dim], contiguous
  void* grad_lse = nullptr;  // [rows], accumulator type, contiguous
};

struct MergeProblem {
  DType dtype = DType::kFloat32;
  int64_t rows = 0, head_dim = 0, parts = 0;
  const MergePart* part = nullptr;
  void* out = nullptr;  // [rows, head_dim], contiguous
  void* lse = nullptr;  // [rows], accumulator type, contiguous
};

struct MergeGradients {
  const void* grad_out = nullptr;  // [rows, head_dim], contiguous
  const void* grad_lse = nullptr;  // [rows], accumulator type, contiguous
};

}  // namespace flash_online
