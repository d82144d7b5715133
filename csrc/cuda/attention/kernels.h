// The kernel families as dispatch.cu knows them: function templates, of which CMake stamps an instance for each head dim
// out of instance.cu.in.
#pragma once

#include "../../core/problem.h"
#include "attention.h"

namespace flash_online::cuda {

struct MaskMap;
struct MaskTables;

// forward_sm90.cuh, for compute capability 9.0: a problem that its refusal lets pass. taken: a word of workspace for
// forward_sm90_takes_tiles() (refusal_sm90.h), else null.
template <int kHeadDim>
void forward_sm90(const AttentionProblem& problem, const MaskTables& tables, unsigned* taken, CUstream_st* stream);

// forward_sm80.cuh. Head dims are at most kHeadDim; there are queries and heads.
template <int kHeadDim>
void forward_sm80(const AttentionProblem& problem, const MaskMap& map, CUstream_st* stream);
// Why this kernel does not take a problem; null: it does.
template <int kHeadDim>
const char* forward_sm80_refusal(const AttentionProblem& problem, const Gpu& gpu);

// backward_sm80.cuh, likewise.
template <int kHeadDim>
int64_t backward_sm80_workspace(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic);
template <int kHeadDim>
void backward_sm80(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic, void* workspace,
                   CUstream_st* stream);
template <int kHeadDim>
const char* backward_sm80_refusal(const AttentionProblem& problem, const Gpu& gpu);

// backward_sm90.cuh, for compute capability 9.0: a problem that its refusal lets pass.
template <int kHeadDim>
int64_t backward_sm90_workspace(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic);
template <int kHeadDim>
void backward_sm90(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic, void* workspace,
                   CUstream_st* stream);

}  // namespace flash_online::cuda
