// The arguments of a row kernel: softmax, log-softmax, logsumexp, cross-entropy or the top k of a softmax, over one
// dimension of a tensor. This header needs neither torch nor the CUDA runtime.
#pragma once

#include <cstdint>

#include "problem.h"

namespace flash_online {

// A tensor read as [outer, classes, inner]. Its rows are the outer x inner vectors of `classes` elements.
template <class Pointer>
struct View3 {
  Pointer data = nullptr;
  int64_t stride[3] = {};
};
using ConstView3 = View3<const void*>;
using MutableView3 = View3<void*>;

// A "row scalar" is one scalar per row: a contiguous array [outer, inner] in the accumulator type. For a 16-bit dtype,
// logsumexp's CUDA kernels have lse and grad_lse in result_dtype instead.
struct RowProblem {
  DType dtype = DType::kFloat32;         // of input, grad_input, target_probabilities and grad_target
  DType result_dtype = DType::kFloat32;  // of result, grad and output: dtype, or float32 for a 16-bit dtype
  int64_t outer = 0, classes = 0, inner = 0;

  ConstView3 input;                      // [outer, classes, inner]
  MutableView3 result;                   // softmax: [outer, classes, inner]; top-k: [outer, k, inner]
  bool log = false;                      // softmax: whether the logarithm is wanted

  // softmax and top-k, backward
  ConstView3 grad;                       // shape of result
  ConstView3 output;                     // what the forward pass returned: softmax's result, top-k's probabilities
  MutableView3 grad_input;               // [outer, classes, inner], also of logsumexp and cross-entropy

  // logsumexp and cross-entropy
  void* lse = nullptr;                   // a row scalar, as the next arrays
  void* loss = nullptr;
  void* row_weight = nullptr;
  void* entropy = nullptr;  // of each row's softmax; null: not wanted
  const void* grad_loss = nullptr;
  const void* grad_lse = nullptr;        // null: zero
  const void* grad_entropy = nullptr;  // null: zero; else row_entropy is what the forward pass returned
  const void* row_entropy = nullptr;
  // CUDA only. If not null, grad_loss is a single scalar of result_dtype, and the gradient of each row's loss is that scalar
  // divided by *divisor, a float.
  const void* divisor = nullptr;

  // cross-entropy
  const int64_t* target = nullptr;  // [outer, inner], contiguous; null: probabilities
  ConstView3 target_probabilities;  // [outer, classes, inner]
  MutableView3 grad_target;  // [outer, classes, inner]; no data: not wanted
  const void* weight = nullptr;  // [classes], accumulator type, contiguous; null: ones
  int64_t ignore_index = -100;
  double label_smoothing = 0;

  // top-k
  int64_t k = 0;
  bool renormalize = false;
  View3<int64_t*> indices;  // [outer, k, inner]; read by the backward pass

  // One element, -1 before the call. It receives the index of the first row with a target, or a top-k index, that is out of
  // range; such an index is never followed, and the caller reports the error.
  int64_t* bad_row = nullptr;

  void* workspace = nullptr;  // on CUDA: as much as cuda::<operator>_workspace(problem) says, aligned to 16 bytes

  // CUDA only, of cross-entropy: if not null, the row scalars are wanted as sums alone. Kernels that have a block of rows
  // then write a pair of floats per block here, the sums of loss and row_weight, instead of those; the launch sets
  // *loss_sum_count to the number of blocks. All other kernels write loss and row_weight. The three may share memory.
  void* loss_sums = nullptr;
  int64_t* loss_sum_count = nullptr;
};

// The number of elements from which a work item on the CPU, and a further thread, is worthwhile. Small tensors have smaller
// items, since they would have only one.
inline int64_t row_grain(const RowProblem& problem) {
  constexpr int64_t kLeast = 8192, kMost = 16384, kItems = 8;
  const int64_t share = problem.outer * problem.classes * problem.inner / kItems;
  return share < kLeast ? kLeast : share > kMost ? kMost : share;
}

}  // namespace flash_online
