// Sums in global memory that many blocks of threads add to.
#pragma once

namespace flash_online::cuda {

// Where number `n` of a lane's four lies among the 128 of its warp, so that a warp adds to whole sectors.
__device__ __forceinline__ int place_in_sum(int lane, int n) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return 4 * lane + n;  // four neighbours are added by one instruction
#else
  return 32 * n + lane;
#endif
}

// Adds a warp's four numbers a lane to 128 floats, which begin at a multiple of 16 bytes.
__device__ __forceinline__ void add_to_sum(float* sum, int lane, const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float4*>(sum) + lane, make_float4(x[0], x[1], x[2], x[3]));
#else
#pragma unroll
  for (int n = 0; n < 4; ++n) atomicAdd(sum + place_in_sum(lane, n), x[n]);
#endif
}

}  // namespace flash_online::cuda
