// Matrix products (wgmma) of operands that TMA left in shared memory as boxes of 64 columns.
#pragma once

#include "../../hw/wgmma.cuh"
#include "../../mma/fragments.cuh"

namespace flash_online::cuda {

// An accumulator as the array that a wgmma instruction takes.
template <int kColumns>
__device__ __forceinline__ float (&flat(Accumulator<1, kColumns>& d))[4 * kColumns] {
  return reinterpret_cast<float (&)[4 * kColumns]>(d);
}

// Starts d[m][n] = sum over k of left[m][k] right[n][k], or += where kAdd. `left` is the address of the first of 64 rows in
// boxes of kLeftRows rows, `right` of 8 * kColumns rows in boxes of kRightRows rows; k counts to 16 * kSteps. kCommit: commits
// it as one wgmma group.
template <class T, int kSteps, int kLeftRows, int kRightRows, bool kAdd = false, bool kCommit = true, int kColumns>
__device__ __forceinline__ void start_row_products(Accumulator<1, kColumns>& d, unsigned left, unsigned right) {
  constexpr unsigned kRowBytes = 128, kStepBytes = 32, kBoxSteps = kRowBytes / kStepBytes;
  const uint64_t a = k_major_descriptor(left), b = k_major_descriptor(right);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    Wgmma<T, 8 * kColumns>::template ss<false>(
        flat(d), offset_descriptor(a, step / kBoxSteps * kLeftRows * kRowBytes + step % kBoxSteps * kStepBytes),
        offset_descriptor(b, step / kBoxSteps * kRightRows * kRowBytes + step % kBoxSteps * kStepBytes), kAdd || step > 0);
  if constexpr (kCommit) wgmma_commit();
}

}  // namespace flash_online::cuda
