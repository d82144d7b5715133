// What csrc/ops may call on the CPU. Each instruction set fills one table from the same sources (cpu_sources in CMakeLists.txt,
// compiled once a set); dispatch.cpp picks the table, once a process.
#pragma once

#include "../core/problem.h"
#include "../core/rows.h"
#include "executor.h"

namespace flash_online::cpu {

struct AttentionKernels {
  Memory (*forward_memory)(const AttentionProblem&);
  Memory (*backward_memory)(const AttentionProblem&, const AttentionGradients&);
  void (*forward)(const AttentionProblem&, const Executor&);
  void (*backward)(const AttentionProblem&, const AttentionGradients&, const Executor&);
  void (*dropout_mask)(const DropoutProblem&, const Executor&);
  void (*merge)(const MergeProblem&, const Executor&);
  void (*merge_backward)(const MergeProblem&, const MergeGradients&, const Executor&);
};

struct RowKernels {
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

struct Kernels {
  const char* name;  // of the instruction set: "portable", "avx2", "avx512", "avx512_bf16", "amx"
  AttentionKernels attention;
  RowKernels rows;
};

// The kernels for this processor. FLASH_ONLINE_CPU=portable|avx2|avx512|avx512_bf16|amx, read once, takes a lesser set, for
// tests.
const Kernels& kernels();

}  // namespace flash_online::cpu
