// The gradient of a float mask, summed in the mask's own shape. It takes no workspace, except for small masks: these need a few
// copies of the mask's gradient.
#pragma once

#include "../common/backward_workspace.cuh"

namespace flash_online::cuda {

// The number of floats in space.mask_grad_partials: partial sums, for a mask that has too few tiles to occupy the device.
int64_t mask_gradient_partials(const AttentionProblem& problem, const AttentionGradients& gradients);
void mask_gradient(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                   CUstream_st* stream);

}  // namespace flash_online::cuda
