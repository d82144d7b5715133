// Multiplies a tensor by a number in device memory. A loss may compute its gradients in the forward pass, for an incoming
// gradient of 1; its backward pass scales them by the true one.
#include "dispatch.cuh"
#include "rows.h"

namespace flash_online::cuda {

namespace {

constexpr int kThreads = 512;

template <class T>
__global__ void __launch_bounds__(kThreads) scale_kernel(T* data, int64_t count, const float* factor) {
  const float by = *factor;
  if (by == 1) return;
  constexpr int kElements = kPerVector<T>;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x, step = int64_t{gridDim.x} * kThreads;
  const int64_t vectors = misalignment(data) == 0 ? count / kElements : 0;
  for (int64_t i = first; i < vectors; i += step) {
    float x[kElements];
    unpack<T>(load_streaming(data + i * kElements), x);
#pragma unroll
    for (int e = 0; e < kElements; ++e) x[e] *= by;
    store_streaming(data + i * kElements, pack<T>(x));
  }
  for (int64_t i = vectors * kElements + first; i < count; i += step) data[i] = narrow<T>(widen(data[i]) * by);
}

}  // namespace

void scale(DType dtype, void* data, int64_t count, const float* factor, CUstream_st* stream) {
  if (count == 0) return;
  RowProblem problem;
  problem.dtype = dtype;
  visit_type(problem, "scale_", [&]<class T>(Type<T>) {
    constexpr int kCtasPerSm = 2048 / kThreads;
    const int64_t ctas = count / kPerVector<T> / kThreads + 1;
    scale_kernel<T><<<grid_for(ctas, 2 * kCtasPerSm), kThreads, 0, stream>>>(static_cast<T*>(data), count, factor);
    check_launch("scale_");
  });
}

}  // namespace flash_online::cuda
