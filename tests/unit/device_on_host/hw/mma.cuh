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
  const Cta::Operands* const all =
      Cta::exchange({a[0] | uint64_t{a[1]} << 32, a[2] | uint64_t{a[3]} << 32, b0 | uint64_t{b1} << 32});
  const auto element = [&](int lane, int operand, int n) {
    return widen(__builtin_bit_cast(T, static_cast<uint16_t>(all[lane][static_cast<size_t>(operand)] >> 16 * n)));
  };
  const int row = Cta::lane() / 4, column = 2 * (Cta::lane() % 4);
  float left[2][16], right[2][16];
  for (int n = 0; n < 2; ++n)
    for (int k = 0; k < 16; ++k) {
      left[n][k] = element(4 * row + k % 8 / 2, k / 8, 2 * n + k % 2);
      right[n][k] = element(4 * (column + n) + k % 8 / 2, 2, k / 8 * 2 + k % 2);
    }
  for (int e = 0; e < 4; ++e)
    for (int k = 0; k < 16; ++k) d[e] += left[e / 2][k] * right[e % 2][k];
}

inline void mma_16x8x16_rounded(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  mma_16x8x16<__nv_bfloat16>(d, a, b0, b1);
}

}  // namespace flash_online::cuda
