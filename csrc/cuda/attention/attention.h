// Attention on CUDA as csrc/ops and csrc/introspect call it, for float16, bfloat16 and float32. A call queues work on the
// stream, which belongs to the current device, and returns: it does not synchronise or allocate. A launch error is thrown as
// std::runtime_error.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "../../core/problem.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace flash_online::cuda {

// What the choice of a kernel depends on, besides the problem.
struct Gpu {
  int major = 0, minor = 0;  // compute capability
  int shared_bytes = 0;      // the most shared memory of a CTA
};

// The kernel families of a forward or backward pass in order of preference, each with its reason to refuse the problem. The
// first one without a reason runs: attention_forward and attention_backward choose by the same function.
using Candidates = std::vector<std::pair<std::string, std::string>>;
Candidates attention_candidates(const AttentionProblem& problem, const Gpu& gpu, bool backward);

// Bytes of workspace that the forward pass needs, aligned to 16; often 0.
int64_t attention_forward_workspace(const AttentionProblem& problem);
void attention_forward(const AttentionProblem& problem, void* workspace, CUstream_st* stream);

// The number of heads that dK and dV should have (gradients.kv_grad_heads): a multiple of the numbers of key and value heads,
// to which the caller sums them. More heads than necessary keep the GPU busy when there are few keys and few key heads.
int64_t attention_kv_grad_heads(const AttentionProblem& problem);
// Bytes of workspace that the backward pass needs, aligned to 16; gradients.kv_grad_heads must be set.
int64_t attention_backward_workspace(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic);
void attention_backward(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic,
                        void* workspace, CUstream_st* stream);

// Writes which weights dropout keeps.
void attention_dropout_mask(const DropoutProblem& problem, CUstream_st* stream);

}  // namespace flash_online::cuda
