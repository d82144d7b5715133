// The row operators of rows.h for problems in float64, which take no workspace.
#pragma once

#include "../../core/row_problem.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace flash_online::cuda::float64 {

void softmax(const RowProblem& problem, CUstream_st* stream);
void softmax_backward(const RowProblem& problem, CUstream_st* stream);
void logsumexp(const RowProblem& problem, CUstream_st* stream);
void logsumexp_backward(const RowProblem& problem, CUstream_st* stream);
void cross_entropy(const RowProblem& problem, CUstream_st* stream);
void cross_entropy_backward(const RowProblem& problem, CUstream_st* stream);
void reduce_losses(const RowProblem& problem, bool mean, void* result, void* divisor, CUstream_st* stream);
void topk_softmax(const RowProblem& problem, CUstream_st* stream);
void topk_softmax_backward(const RowProblem& problem, CUstream_st* stream);
void scale(void* data, int64_t count, const void* factor, CUstream_st* stream);

}  // namespace flash_online::cuda::float64
