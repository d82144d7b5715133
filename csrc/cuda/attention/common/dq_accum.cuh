// Sums in global memory that many blocks of threads add to.
#pragma once

namespace flash_online::cuda {

// Where number `n` of a lane's four lies among the 128 of its warp, so that a warp adds to whole sectors.
__device__ __forceinline__ int dq_accum_offset(int lane, int n) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return 4 * lane + n;  // four neighbours are added by one instruction
#else
  return 32 * n + lane;
#endif
}

// Adds a lane's four numbers of a warp's 128, which begin at a multiple of 16 bytes; `place` is that of the lane's first.
__device__ __forceinline__ void dq_accum_add(float* place, const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float4*>(place), make_float4(x[0], x[1], x[2], x[3]));
#else
#pragma unroll
  for (int n = 0; n < 4; ++n) atomicAdd(place + dq_accum_offset(0, n), x[n]);
#endif
}

// Reads them.
__device__ __forceinline__ void dq_accum_read(const float* place, float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const float4 four = *reinterpret_cast<const float4*>(place);
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
#else
#pragma unroll
  for (int n = 0; n < 4; ++n) x[n] = place[dq_accum_offset(0, n)];
#endif
}

}  // namespace flash_online::cuda
