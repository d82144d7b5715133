// Copies of blocks on CUDA, as csrc/ops calls them.
#pragma once

#include <cstdint>

#include "../../core/problem.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace flash_online::cuda {

// Queues the copies, several blocks per launch.
void copy_blocks(const BlockCopy* blocks, int64_t count, CUstream_st* stream);

}  // namespace flash_online::cuda
