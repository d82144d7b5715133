// The kernels of backward_sm90.cuh that there are for head dim 128 alone, and that narrower ones run in.
#include "launch.cuh"

namespace flash_online::cuda {

template void launch_backward_sm90<__half, 128, 128, BackwardSm90Features::kDropout, false>(const AttentionProblem&,
                                                                                            const AttentionGradients&,
                                                                                            const BackwardWorkspace&,
                                                                                            const TransposedMaskBits&, int*,
                                                                                            unsigned*, CUstream_st*);
template void launch_backward_sm90<__nv_bfloat16, 128, 128, BackwardSm90Features::kDropout, false>(
    const AttentionProblem&, const AttentionGradients&, const BackwardWorkspace&, const TransposedMaskBits&, int*, unsigned*,
    CUstream_st*);
template void launch_backward_sm90<__half, 128, 128, BackwardSm90Features::kEverything, false>(const AttentionProblem&,
                                                                                               const AttentionGradients&,
                                                                                               const BackwardWorkspace&,
                                                                                               const TransposedMaskBits&, int*,
                                                                                               unsigned*, CUstream_st*);
template void launch_backward_sm90<__nv_bfloat16, 128, 128, BackwardSm90Features::kEverything, false>(
    const AttentionProblem&, const AttentionGradients&, const BackwardWorkspace&, const TransposedMaskBits&, int*, unsigned*,
    CUstream_st*);

}  // namespace flash_online::cuda
