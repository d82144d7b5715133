// The gradient of a float mask, in the mask's own shape: no memory but its own, or where that is little, a few times that.
#pragma once

#include "backward_workspace.cuh"

namespace flash_online::cuda {

// The floats of space.mask_parts: sums in parts, where the mask has too few tiles for the whole device.
int64_t mask_gradient_parts(const AttentionProblem& problem, const AttentionGradients& gradients);
void mask_gradient(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                   CUstream_st* stream);

}  // namespace flash_online::cuda
