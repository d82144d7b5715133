// Copies of 8 x 8 matrices of 16-bit elements between shared memory and a warp's registers (ldmatrix, stmatrix), in the layout
// of the tensor cores' operands and accumulators.
//
// All functions copy four matrices of 8 rows of 16 bytes. Lane l gives the address of row l % 8 of matrix l / 8, and holds of
// each matrix one word: of row l / 4, the two elements 2 * (l % 4) and the next.
#pragma once

namespace flash_online::cuda {

__device__ __forceinline__ void ldmatrix_x4(unsigned (&words)[4], unsigned shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address)
               : "memory");
}

// Transposes each matrix on the way: rows of shared memory become columns.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&words)[4], unsigned shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address)
               : "memory");
}

// Transposes a matrix of 8 x 8 elements in the registers of a warp.
__device__ __forceinline__ unsigned movmatrix_trans(unsigned word) {
  unsigned result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

// Compute capability 9.0 or newer.
__device__ __forceinline__ void stmatrix_x4(const unsigned (&words)[4], unsigned shared_address) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

}  // namespace flash_online::cuda
