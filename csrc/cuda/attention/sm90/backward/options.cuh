// The main Hopper backward kernel with all options: an instance apart, since one head dim alone has a tile for it and narrower
// ones run in the same.
#pragma once

#include "launch.cuh"

namespace flash_online::cuda {

template <int kHeadDim>
void AttentionBackwardOptionsSm90<kHeadDim>::run(const BackwardSm90Call& call, CUstream_st* stream) {
  const auto start = [&]<class T>(Type<T>) {
    launch_backward_sm90<T, kHeadDim, kHeadDim, BackwardSm90Features::kAllOptions>(call, stream);
  };
  call.problem.dtype == DType::kFloat16 ? start(Type<__half>{}) : start(Type<__nv_bfloat16>{});
}

}  // namespace flash_online::cuda
