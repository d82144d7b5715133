// What csrc/ops may call on CUDA, for float16, bfloat16 and float32. A call queues work on the stream, which belongs to the
// current device, and returns: no synchronisation, no allocation. An error of the launch is thrown as std::runtime_error.
#pragma once

#include "../../core/rows.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace flash_online::cuda {

// Bytes that problem.workspace must have, aligned to 16; often 0: of logsumexp and cross_entropy, of
// topk_softmax, of softmax_backward, and of the other kernels.
int64_t topk_workspace(const RowProblem& problem);
int64_t reduce_workspace(const RowProblem& problem);
int64_t rows_workspace(const RowProblem& problem);
int64_t softmax_backward_workspace(const RowProblem& problem);

void softmax(const RowProblem& problem, CUstream_st* stream);
void softmax_backward(const RowProblem& problem, CUstream_st* stream);
void logsumexp(const RowProblem& problem, CUstream_st* stream);
void logsumexp_backward(const RowProblem& problem, CUstream_st* stream);
// A target out of range stops the kernel with a device assert; problem.bad_row is not written.
void cross_entropy(const RowProblem& problem, CUstream_st* stream);
// With problem.loss, for classes without smoothing, also all that cross_entropy writes; grad_input may then, as ever, be input.
void cross_entropy_backward(const RowProblem& problem, CUstream_st* stream);
// The sum of problem.loss, over that of problem.row_weight if `mean`, as one number of result_dtype; *divisor, a float, is what
// it was divided by, 1 for a sum. The workspace, of so many bytes for so many rows, is aligned to 8.
int64_t reduce_losses_workspace(int64_t rows);
void reduce_losses(const RowProblem& problem, bool mean, void* result, void* divisor, void* workspace, CUstream_st* stream);
// Rows of fewer than 2^32 - 1 classes. An index out of range, in the backward pass, is a device assert too.
void topk_softmax(const RowProblem& problem, CUstream_st* stream);
void topk_softmax_backward(const RowProblem& problem, CUstream_st* stream);

// data *= *factor, in place; of a factor of 1 nothing but the factor is read.
void scale(DType dtype, void* data, int64_t count, const float* factor, CUstream_st* stream);

}  // namespace flash_online::cuda
