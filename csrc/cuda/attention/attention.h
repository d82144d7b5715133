// What csrc/ops and csrc/introspect may call on CUDA, for float16, bfloat16 and float32. A call queues work on the stream,
// which belongs to the current device, and returns: no synchronisation, no allocation. An error of the launch is thrown as
// std::runtime_error.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "../../core/problem.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace flash_online::cuda {

// What the choice of a kernel depends on beside the problem.
struct Gpu {
  int major = 0, minor = 0;  // compute capability
  int shared_bytes = 0;      // that a block of threads may have
};

// The kernel families that a forward (backward) pass may run on, the best first, each with its reason not to; the first without
// one is taken. attention_forward and attention_backward choose by the same function.
using Candidates = std::vector<std::pair<std::string, std::string>>;
Candidates attention_candidates(const AttentionProblem& problem, const Gpu& gpu, bool backward);

// Bytes of workspace that the forward pass needs, aligned to 16; often 0.
int64_t attention_forward_workspace(const AttentionProblem& problem);
void attention_forward(const AttentionProblem& problem, void* workspace, CUstream_st* stream);

// How many heads the gradients of keys and values are to have (gradients.kv_grad_heads): a multiple of both numbers of heads,
// which the caller sums to these. More than that keep a GPU busy where keys and their heads are few.
int64_t attention_kv_grad_heads(const AttentionProblem& problem);
// As of the forward pass; gradients.kv_grad_heads is set.
int64_t attention_backward_workspace(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic);
void attention_backward(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic,
                        void* workspace, CUstream_st* stream);

// Which weights dropout keeps.
void attention_dropout_mask(const DropoutProblem& problem, CUstream_st* stream);

}  // namespace flash_online::cuda
