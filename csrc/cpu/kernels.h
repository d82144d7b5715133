// The CPU functions that csrc/ops may call: one table per operator family. Each instruction set fills its tables from the same
// sources (cpu_sources in CMakeLists.txt, compiled once per set); dispatch.cpp picks a set once per process.
//
// All functions take a filled problem struct (core/problem.h, core/row_problem.h) with pointers to CPU memory, and an Executor
// with threads and scratch. They assume that the problem is valid, allocate nothing and throw nothing.
#pragma once

#include "../core/problem.h"
#include "../core/row_problem.h"
#include "executor.h"

namespace flash_online::cpu {

// Attention, dropout's mask, and the merge of partial results over disjoint keys.
struct AttentionKernels {
  // The memory that `forward` and `backward` need. These functions read only the shapes, strides and options of a problem and
  // whether a pointer is null; for packed sequences they also read the starts.
  Memory (*forward_memory)(const AttentionProblem&);
  Memory (*backward_memory)(const AttentionProblem&, const AttentionGradients&);
  void (*forward)(const AttentionProblem&, const Executor&);
  void (*backward)(const AttentionProblem&, const AttentionGradients&, const Executor&);

  // Attention over cached keys (AttentionProblem::cache); cached_memory reads the lengths, too.
  Memory (*cached_memory)(const AttentionProblem&);
  void (*cached)(const AttentionProblem&, const Executor&);
  // The kv_splits with which `cached` computes a forward pass of few rows over many keys (as_cached in core/cache.h); 0
  // where `forward` computes it.
  int64_t (*few_rows_kv_splits)(const AttentionProblem&);

  // float8_attention.
  Memory (*float8_memory)(const Float8Problem&);
  void (*float8)(const Float8Problem&, const Executor&);

  // These functions need no memory.
  void (*append)(const AppendProblem&, const Executor&);
  void (*dropout_mask)(const DropoutProblem&, const Executor&);
  void (*merge)(const MergeProblem&, const Executor&);
  void (*merge_backward)(const MergeProblem&, const MergeGradients&, const Executor&);
};

// Softmax and log-softmax (RowProblem::log), logsumexp, cross-entropy, and the top k of a softmax, over one dimension of a
// tensor.
struct RowKernels {
  // Bytes of scratch per worker that a call with this problem needs. A problem without `input` and `grad` asks for the upper
  // bound over all shapes and strides with its dtype and k.
  int64_t (*scratch)(const RowProblem&);
  void (*softmax)(const RowProblem&, const Executor&);
  void (*softmax_backward)(const RowProblem&, const Executor&);
  void (*logsumexp)(const RowProblem&, const Executor&);
  void (*logsumexp_backward)(const RowProblem&, const Executor&);
  void (*cross_entropy)(const RowProblem&, const Executor&);
  void (*cross_entropy_backward)(const RowProblem&, const Executor&);
  void (*topk_softmax)(const RowProblem&, const Executor&);
  void (*topk_softmax_backward)(const RowProblem&, const Executor&);
};

// All kernels of one instruction set.
struct Kernels {
  const char* name;  // of the instruction set: "portable", "avx2", "avx512", "avx512_bf16", "amx"
  AttentionKernels attention;
  RowKernels rows;
};

// The kernels for this processor. The environment variable FLASH_ONLINE_CPU=portable|avx2|avx512|avx512_bf16|amx, read once,
// selects a set by name, for tests.
const Kernels& kernels();

}  // namespace flash_online::cpu
