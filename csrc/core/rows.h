// What a row kernel is asked to do: softmax, log-softmax, logsumexp, cross-entropy or the top k of a softmax over one
// dimension of a tensor. No torch, no CUDA runtime.
#pragma once

#include <cstdint>

#include "problem.h"

namespace flash_online {

// A tensor read as [outer, classes, inner]; the rows are its outer x inner vectors of `classes` elements.
template <class Pointer>
struct View3 {
  Pointer data = nullptr;
  int64_t stride[3] = {};
};
using ConstView3 = View3<const void*>;
using MutableView3 = View3<void*>;

// "One number a row" is [outer, inner], contiguous, in the accumulator type.
struct RowProblem {
  DType dtype = DType::kFloat32;         // of input, grad_input, target_probabilities and grad_target
  DType result_dtype = DType::kFloat32;  // of result, grad, output and reduced: dtype, or float32 beside a 16-bit dtype
  int64_t outer = 0, classes = 0, inner = 0;

  ConstView3 input;                      // [outer, classes, inner]
  MutableView3 result;                   // softmax: [outer, classes, inner]; top-k: [outer, k, inner]
  bool log = false;                      // softmax: the logarithm is wanted

  // softmax and top-k, backward
  ConstView3 grad;                       // like result
  ConstView3 output;                     // what the forward gave: softmax's result, top-k's probabilities
  MutableView3 grad_input;               // [outer, classes, inner], also of logsumexp and cross-entropy

  // logsumexp and cross-entropy
  void* lse = nullptr;                   // one number a row, like the next four
  void* loss = nullptr;
  void* row_weight = nullptr;
  const void* grad_loss = nullptr;
  const void* grad_lse = nullptr;        // null: zero
  const void* divisor = nullptr;  // on CUDA; not null: grad_loss is one number of result_dtype, and over this one, a float,
                                  // that of every row

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

  // One element, -1 before the call: receives the number of the first row that has a target, or an index of the top k, out of
  // range. Nothing is read or written there; the caller reports it.
  int64_t* bad_row = nullptr;

  void* workspace = nullptr;  // on CUDA: cuda::workspace_bytes(problem), aligned to 16 bytes
};

// How many elements of a tensor are worth a thread of their own.
constexpr int64_t kRowGrain = 16384;

}  // namespace flash_online
