#include "cross_entropy.cuh"
#include "entropy.h"

namespace flash_online::cuda {

namespace {

template <class Op>
void launch(const RowProblem& problem, bool contiguous, cudaStream_t stream, const char* name) {
  visit_type(problem, name, [&]<class T>(Type<T>) { launch_rows<Op, T, T>(problem, contiguous, stream, name); });
}

}  // namespace

bool try_loss_and_entropy(const RowProblem& problem, bool contiguous, CUstream_st* stream) {
  if (problem.target == nullptr || problem.label_smoothing != 0) return false;
  launch<IndexLoss<false, true>>(problem, contiguous, stream, "cross_entropy");
  return true;
}

void entropy(const RowProblem& problem, bool contiguous, CUstream_st* stream) {
  launch<RowEntropy>(problem, contiguous, stream, "cross_entropy");
}

void loss_and_entropy_backward(const RowProblem& problem, bool contiguous, CUstream_st* stream) {
  constexpr const char* kName = "cross_entropy_backward";
  if (problem.target == nullptr)
    launch<ProbabilityLossBackward<true>>(problem, contiguous, stream, kName);
  else if (problem.label_smoothing == 0)
    launch<IndexLossBackward<false, true>>(problem, contiguous, stream, kName);
  else
    launch<IndexLossBackward<true, true>>(problem, contiguous, stream, kName);
}

}  // namespace flash_online::cuda
