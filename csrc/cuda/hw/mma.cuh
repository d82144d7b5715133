// The tensor cores as one warp drives them (mma.sync), and the loads that lay out their operands (ldmatrix).
//
// A lane is numbered 4 * group + place. An accumulator of 16 x 8 holds, of its lane, (group, 2 place), (group, 2 place + 1) and
// the same two of row group + 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace flash_online::cuda {

// d += a b, of 16 x 16 and 16 x 8.
template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b too, in two steps: the tensor cores cut off what a sum does not hold, the float adders round it.
__device__ __forceinline__ void mma_16x8x16_rounded(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  float x[4];
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
#pragma unroll
  for (int e = 0; e < 4; ++e) d[e] += x[e];
}

// Four matrices of 8 rows of 16 bytes; lane l names the address of row l % 8 of matrix l / 8, and receives of each matrix the
// word `place` of row `group`.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&words)[4], unsigned shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address)
               : "memory");
}

// The same of matrices of 16-bit elements, each transposed on the way.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&words)[4], unsigned shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address)
               : "memory");
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

}  // namespace flash_online::cuda
