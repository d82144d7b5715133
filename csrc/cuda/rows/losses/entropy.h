// The launches of cross-entropy with an entropy per row, in a file of their own: it takes as long to compile as all others.
// `contiguous`: as of launch_rows.
#pragma once

#include "../../../core/row_problem.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace flash_online::cuda {

// Computes losses and entropies in one pass over the rows; false where the losses need a second sum of their own.
bool try_loss_and_entropy(const RowProblem& problem, bool contiguous, CUstream_st* stream);
// Computes the entropies alone.
void entropy(const RowProblem& problem, bool contiguous, CUstream_st* stream);
void loss_and_entropy_backward(const RowProblem& problem, bool contiguous, CUstream_st* stream);

}  // namespace flash_online::cuda
