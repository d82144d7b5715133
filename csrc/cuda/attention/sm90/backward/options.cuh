// The main Hopper backward kernel with dropout, or with all options: instances apart, since only these head dims have tiles for
// them and narrower ones run in the same.
#pragma once

#include "launch.cuh"

namespace flash_online::cuda {

template <int kHeadDim>
void AttentionBackwardOptionsSm90<kHeadDim>::run(BackwardSm90Features features, const BackwardSm90Call& call,
                                                 CUstream_st* stream) {
  using Features = BackwardSm90Features;
  const auto start = [&]<class T>(Type<T>) {
    if (features == Features::kDropout)
      launch_backward_sm90<T, kHeadDim, kHeadDim, Features::kDropout, false>(call, stream);
    else
      launch_backward_sm90<T, kHeadDim, kHeadDim, Features::kAllOptions, false>(call, stream);
  };
  call.problem.dtype == DType::kFloat16 ? start(Type<__half>{}) : start(Type<__nv_bfloat16>{});
}

}  // namespace flash_online::cuda
