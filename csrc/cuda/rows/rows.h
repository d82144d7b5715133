// What csrc/ops may call on CUDA. A call queues work on the stream, which belongs to the current device, and returns: no
// synchronisation, no allocation. An error of the launch is thrown as std::runtime_error.
#pragma once

#include "../../core/rows.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace flash_online::cuda {

void softmax(const RowProblem& problem, CUstream_st* stream);           // float16, bfloat16 and float32
void softmax_backward(const RowProblem& problem, CUstream_st* stream);

}  // namespace flash_online::cuda
