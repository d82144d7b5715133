// The dQ accumulator: float32 sums in global memory to which all CTAs of a head add their share of dQ. A warp adds a 16 x 8
// accumulator at a time, 128 floats in an order of their own.
#pragma once

namespace flash_online::cuda {

// The offset of element n of a lane's four among the 128 of its warp. The order makes a warp add to whole sectors.
__device__ __forceinline__ int dq_accum_offset(int lane, int n) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return 4 * lane + n;  // one instruction adds four neighbours
#else
  return 32 * n + lane;
#endif
}

// Adds a lane's four elements. `first` is the address of the lane's first one; the warp's 128 start at a multiple of 16 bytes.
__device__ __forceinline__ void dq_accum_add(float* first, const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float4*>(first), make_float4(x[0], x[1], x[2], x[3]));
#else
#pragma unroll
  for (int n = 0; n < 4; ++n) atomicAdd(first + dq_accum_offset(0, n), x[n]);
#endif
}

// Reads a lane's four elements, the first of them at `first`.
__device__ __forceinline__ void dq_accum_read(const float* first, float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const float4 four = *reinterpret_cast<const float4*>(first);
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
#else
#pragma unroll
  for (int n = 0; n < 4; ++n) x[n] = first[dq_accum_offset(0, n)];
#endif
}

}  // namespace flash_online::cuda
