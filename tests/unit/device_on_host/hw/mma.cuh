// csrc/cuda/hw/mma.cuh on the host. Sums are rounded, where tensor cores truncate them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "vector.cuh"

namespace flash_online::cuda {

// d += a b, where a is 16 x 16 and b is 16 x 8. A lane has the elements 2 * (l % 4) and the next of row l / 4 of a (+ 8 in
// words 1 and 3; columns from 8 on in words 2 and 3), and the same elements of column l / 4 of b (rows from 8 on in b1).
template <class T>
void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  using device_on_host::Cta;
  float left[16][16], right[8][16];
  const auto spread = [](unsigned low, unsigned high, auto&& f) {
    const uint64_t* const all = Cta::exchange(Cta::kMatrix, low | uint64_t{high} << 32);
    for (int lane = 0; lane < device_on_host::kLanes; ++lane)
      for (int n = 0; n < 4; ++n)
        f(n / 2, lane / 4, 2 * (lane % 4) + n % 2) = widen(__builtin_bit_cast(T, static_cast<uint16_t>(all[lane] >> 16 * n)));
  };
  for (int half = 0; half < 2; ++half)
    spread(a[2 * half], a[2 * half + 1],
           [&](int word, int row, int k) -> float& { return left[row + 8 * word][k + 8 * half]; });
  spread(b0, b1, [&](int word, int column, int k) -> float& { return right[column][k + 8 * word]; });
  for (int e = 0; e < 4; ++e)
    for (int k = 0; k < 16; ++k) d[e] += left[Cta::lane() / 4 + e / 2 * 8][k] * right[2 * (Cta::lane() % 4) + e % 2][k];
}

inline void mma_16x8x16_rounded(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  mma_16x8x16<__nv_bfloat16>(d, a, b0, b1);
}

}  // namespace flash_online::cuda
