// Attention on CUDA as csrc/ops and csrc/introspect call it, for float16, bfloat16, float32 and float64. A call queues
// work on the stream, which belongs to the current device, and returns: it does not synchronise or allocate. A launch error is
// thrown as std::runtime_error.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "../../core/integer.h"
#include "../../core/problem.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace flash_online::cuda {

// The properties of the GPU that the choice of a kernel depends on.
struct Gpu {
  int major = 0, minor = 0;  // compute capability
  int shared_bytes = 0;      // the most shared memory of a CTA
};

// The arguments of a forward or backward pass.
struct ForwardPass {
  AttentionProblem problem;
};

struct BackwardPass {
  AttentionProblem problem;
  AttentionGradients gradients;
  bool deterministic = false;
};

// The sums of weights per key: of problem, query, key, lse, visible, scale and softcap count. sums: [batch, heads, keys],
// contiguous.
struct WeightSumsPass {
  AttentionProblem problem;
  float* sums = nullptr;
};

// The largest score of each block of `rows` queries and `columns` keys, 64 or 128 each: of problem, query, key, visible and
// scale count. maxima: [batch, heads, blocks of queries, blocks of keys], contiguous; the pass raises what stands there.
struct BlockMaximaPass {
  AttentionProblem problem;
  int rows = 64, columns = 64;
  float* maxima = nullptr;

  FLASH_ONLINE_HD float* maximum(int64_t batch, int64_t head, int64_t query, int64_t key) const {
    const int64_t row = (batch * problem.heads + head) * ceil_div(problem.queries, int64_t{rows}) + query / rows;
    return maxima + row * ceil_div(problem.keys, int64_t{columns}) + key / columns;
  }
};

// The mean of each block of a tensor's rows, `size` rows each; the last one may have fewer.
struct BlockMeans {
  ConstView4 rows;  // [batch, heads, count, width]
  int64_t heads = 0, count = 0, size = 1;
  float* means = nullptr;  // [batch, heads, blocks, width], contiguous
};
struct BlockMeansProblem {
  DType dtype = DType::kBFloat16;
  int64_t batch = 0, width = 0;
  BlockMeans of[2];  // of queries and of keys
};

// Attention by products in e4m3.
struct Float8Pass {
  Float8Problem problem;
};

// A pass about which everything is decided: which kernels run it, on which form of the problem, in how much workspace.
template <class Pass>
struct Plan {
  Pass pass;  // in the form that the kernels take, which may not be the caller's
  int64_t workspace_bytes = 0;
  void (*launch)(const Pass& pass, void* workspace, CUstream_st* stream) = nullptr;  // null: there is nothing to launch

  // Queues the kernels. `workspace` has workspace_bytes bytes and is aligned to 16.
  void run(void* workspace, CUstream_st* stream) const {
    if (launch) launch(pass, workspace, stream);
  }
};

// Decides about a pass for the current device: once per pass. Throws std::runtime_error with the reason of each kernel family
// where none takes it.
Plan<ForwardPass> plan_forward(const AttentionProblem& problem);
// Plans a problem with cached keys.
Plan<ForwardPass> plan_cached(const AttentionProblem& problem);
// gradients.kv_grad_heads must be set.
Plan<BackwardPass> plan_backward(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic);

// Its `launch` is null if no kernel takes the problem.
Plan<WeightSumsPass> plan_weight_sums(const AttentionProblem& problem, float* sums);
// For such a problem: the mask that -lse is, of the accumulator's type, -inf for a row that sees nothing; and the sums from the
// two parts of the logarithms.
void weight_sums_mask(DType dtype, const void* lse, int64_t count, void* mask, CUstream_st* stream);
void weight_sums_of_lse(DType dtype, const void* lse, const void* low, int64_t count, float* sums, CUstream_st* stream);

// Both throw std::runtime_error with the reason where no kernel takes the problem.
Plan<BlockMaximaPass> plan_block_maxima(const BlockMaximaPass& pass);
Plan<Float8Pass> plan_float8(const Float8Problem& problem);

// The number of passes that this process has planned.
int64_t plans_made();

// The kernel families of a forward or backward pass in order of preference, each with its reason to refuse the problem, or an
// empty string. A plan takes the first one without a reason.
using Candidates = std::vector<std::pair<std::string, std::string>>;
Candidates forward_candidates(const AttentionProblem& problem, const Gpu& gpu);
Candidates backward_candidates(const BackwardPass& pass, const Gpu& gpu);
Candidates float8_candidates(const Float8Problem& problem, const Gpu& gpu);

// The number of heads that dK and dV should have (gradients.kv_grad_heads): a multiple of the numbers of key and value heads,
// to which the caller sums them. More heads than necessary keep the GPU busy when there are few keys and few key heads, and
// keep the working set in the L2 cache when many query heads share keys under a causal mask. With `deterministic` there are no
// additional heads, since a head's gradients must not depend on the batch and on other heads.
int64_t attention_kv_grad_heads(const AttentionProblem& problem, bool deterministic);

// Writes new keys and values into a cache, and rotates queries.
void cache_append(const AppendProblem& problem, CUstream_st* stream);

// Writes which weights dropout keeps.
void attention_dropout_mask(const DropoutProblem& problem, CUstream_st* stream);

// Writes the tiles that lists of blocks name; means of blocks, not of float64; and lists of the blocks with the largest scores.
void fill_block_tiles(const BlockListProblem& problem, CUstream_st* stream);
void block_means(const BlockMeansProblem& problem, CUstream_st* stream);
void block_topk(const BlockTopkProblem& problem, CUstream_st* stream);

// Merges partial results. problem.partial is the host's; `workspace` has attention_merge_workspace bytes, 0 for up to 32
// partials.
int64_t attention_merge_workspace(const MergeProblem& problem);
void attention_merge(const MergeProblem& problem, void* workspace, CUstream_st* stream);
void attention_merge_backward(const MergeProblem& problem, const MergeGradients& gradients, void* workspace,
                              CUstream_st* stream);

}  // namespace flash_online::cuda
