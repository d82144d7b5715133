// Products of small matrices on the tensor cores, one warp at a time (mma.sync).
//
// Four lanes of a warp are a quad: lane l is lane l % 4 of quad l / 4. Of a 16 x 8 accumulator, a lane holds columns
// 2 * (l % 4) and the next of row l / 4 in d[0] and d[1], and the same columns of row l / 4 + 8 in d[2] and d[3].
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace flash_online::cuda {

// d += a b, where a is 16 x 16 and b is 16 x 8.
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

// d += a b in two steps, for bfloat16: the tensor cores truncate a sum to float, the float adders round it.
__device__ __forceinline__ void mma_16x8x16_rounded(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  float x[4];
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
#pragma unroll
  for (int e = 0; e < 4; ++e) d[e] += x[e];
}

// d += a b in double, where a is 16 x 8 and b is 8 x 8. Lane l holds of a the columns l % 4 (a[0], a[1]) and l % 4 + 4 (a[2],
// a[3]) of the rows l / 4 and l / 4 + 8, and of b the rows l % 4 and l % 4 + 4 of column l / 4.
__device__ __forceinline__ void mma_16x8x8(double (&d)[4], const double (&a)[4], double b0, double b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
#else
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int k_half = 0; k_half < 2; ++k_half)
      asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
          : "+d"(d[2 * half]), "+d"(d[2 * half + 1])
          : "d"(a[2 * k_half + half]), "d"(k_half == 0 ? b0 : b1));
#endif
}

}  // namespace flash_online::cuda
