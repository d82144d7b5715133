// Attention by e4m3 products on Hopper: S = Q K^T and O = P V by wgmma with elements of 8 bits, the softmax in float32.
//
// The tensor cores add products of 8 bits with few digits (about 14 bits), so that O += P V would lose what small weights add.
// Each block's P V is therefore a sum of its own, and O = f O + P V is computed in float32: that costs no more than the
// rescaling by f that a true running maximum needs anyway. The maximum is raised with each block, which kernels of 16 bits
// put off, since e4m3 ends at 448: weights are 2^(score - maximum + kWeightExponent), at most 2^kWeightExponent.
//
// A persistent CTA has a warp that loads tiles and math warpgroups with 64 queries each. While the tensor cores compute the
// products of one, the others compute exponentials.
#pragma once

#include "../../../hw/pdl.cuh"
#include "../../../hw/setmaxnreg.cuh"
#include "consumer.cuh"
#include "producer.cuh"

namespace flash_online::cuda {

template <class Out, class Variant>
__device__ void Float8Sm90Kernel<Out, Variant>::run(const Float8Arguments& a, Shared& shared) {
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kQueryStages; ++i) {
      mbarrier_init(&shared.query_full[i], 1);
      mbarrier_init(&shared.query_empty[i], 4 * kWarpgroups);
    }
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.key_full[i], 1);
      mbarrier_init(&shared.value_full[i], 1);
      mbarrier_init(&shared.key_empty[i], 4 * kWarpgroups);
      mbarrier_init(&shared.value_empty[i], 4 * kWarpgroups);
    }
    fence_barrier_init();
  }
  __syncthreads();
  grid_dependency_wait();
  if (warp < 4) {
    reg_dealloc<kProducerRegisters>();
    if (warp == 0) Loader{a, shared, lane(), {}, {}}.run();
  } else {
    reg_alloc<kRegisters>();
    const int warpgroup = warp / 4 - 1;
    MathWarpgroup{a, shared, warpgroup, warpgroup * kRowsPerWarpgroup + warp % 4 * 16, lane()}.run();
  }
}

template <class Out, class Variant>
__global__ void __launch_bounds__(Float8Sm90Kernel<Out, Variant>::kThreads, 1)
    attention_float8_sm90(const __grid_constant__ Float8Arguments arguments) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // in code for another GPU it is empty, and never launched
  using Kernel = Float8Sm90Kernel<Out, Variant>;
  extern __shared__ __align__(kBoxAlignment) char float8_boxes[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::Shared*>(float8_boxes));
#endif
}

}  // namespace flash_online::cuda
