// The largest score of a head (AttentionProblem::max_logit) or of a block (BlockMaximaPass): warps raise it to the largest of
// their own scores, in any order.
#pragma once

#include "../../hw/math.cuh"
#include "../../mma/fragments.cuh"
#include "../large_rows/score_levels.cuh"

namespace flash_online::cuda {

// A score in base 2, as a natural one; the one that `lowest` stands for, as the number that the mask added.
__device__ __forceinline__ float natural_score(float x, float lowest, DType mask_dtype) {
  constexpr float kLn2 = 0.693147182464599609375f, kLn2Low = -1.904654323148236017e-9f;
  if (x == lowest) return lowest_lse(mask_dtype);
  const float product = x * kLn2;
  return product - product == 0 ? fmaf(x, kLn2Low, product) : product;
}

// Raises *to to the largest x of the warp's lanes, or to NaN if one is NaN. -inf raises nothing.
__device__ __forceinline__ void raise_max_logit(float* to, float x) {
  x = max_or_nan(x, -INFINITY);  // the one NaN that integers order above infinity
  const auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };  // floats as integers of the same order
  const int most = ordered(__reduce_max_sync(~0u, ordered(__float_as_int(x))));
  if (lane() != 0) return;
  if (most >= 0)
    atomicMax(reinterpret_cast<int*>(to), most);
  else
    atomicMin(reinterpret_cast<unsigned*>(to), static_cast<unsigned>(most));
}

}  // namespace flash_online::cuda
