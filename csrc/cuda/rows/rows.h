// The row operators that csrc/ops may call on CUDA, for float16, bfloat16 and float32. A call queues work on the stream, which
// belongs to the current device, and returns: it does not synchronise and does not allocate. An error of the launch is thrown
// as std::runtime_error.
#pragma once

#include "../../core/row_problem.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace flash_online::cuda {

// Bytes that problem.workspace must have, aligned to 16; often 0. Respectively for topk_softmax, for logsumexp and
// cross_entropy, for the other kernels, and for softmax_backward.
int64_t topk_workspace(const RowProblem& problem);
int64_t reduce_workspace(const RowProblem& problem);
int64_t rows_workspace(const RowProblem& problem);
int64_t softmax_backward_workspace(const RowProblem& problem);

void softmax(const RowProblem& problem, CUstream_st* stream);
void softmax_backward(const RowProblem& problem, CUstream_st* stream);
void logsumexp(const RowProblem& problem, CUstream_st* stream);
void logsumexp_backward(const RowProblem& problem, CUstream_st* stream);
// A target out of range stops the kernel with a device assert; problem.bad_row is not written. In the backward pass that is
// so for targets that are read: rows of one class read them only where a number is not finite.
void cross_entropy(const RowProblem& problem, CUstream_st* stream);
// With problem.loss, which is for class indices without smoothing, this also writes all that cross_entropy writes. grad_input
// may be the same tensor as input in either case.
void cross_entropy_backward(const RowProblem& problem, CUstream_st* stream);
// Writes the sum of problem.loss, divided by the sum of problem.row_weight if `mean`, to *result, one number of result_dtype;
// and what it divided by, 1 for a sum, to *divisor, a float. It comes after cross_entropy of the same problem, and reads the
// sums that this has left, if it has. The workspace has reduce_losses_workspace(rows) bytes, aligned to 8: none for few losses.
constexpr int64_t kFewLosses = 8192;
int64_t reduce_losses_workspace(int64_t rows);
void reduce_losses(const RowProblem& problem, bool mean, void* result, void* divisor, void* workspace, CUstream_st* stream);
// Rows must have fewer than 2^32 - 1 classes. In the backward pass, an index out of range stops the kernel with a device
// assert.
void topk_softmax(const RowProblem& problem, CUstream_st* stream);
void topk_softmax_backward(const RowProblem& problem, CUstream_st* stream);

// data *= *factor, in place. If the factor is 1, the data are neither read nor written.
void scale(DType dtype, void* data, int64_t count, const float* factor, CUstream_st* stream);

}  // namespace flash_online::cuda
