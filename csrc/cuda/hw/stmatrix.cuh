// The counterpart of ldmatrix_x4: accumulators' places back into rows of shared memory (stmatrix).
#pragma once

namespace flash_online::cuda {

// Four matrices of 8 rows of 16 bytes; lane l names the address of row l % 8 of matrix l / 8, and gives of each matrix the word
// l % 4 of row l / 4.
__device__ __forceinline__ void stmatrix_x4(const unsigned (&words)[4], unsigned shared_address) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

}  // namespace flash_online::cuda
