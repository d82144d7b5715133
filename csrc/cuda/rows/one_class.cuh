// Rows of one class that lie side by side: vectors of independent elements. Even a lane per row (loops/few_classes_row.cuh)
// would spend too many instructions per byte. A result has the bits that the other kernels of its operator give.
#pragma once

#include "dispatch.cuh"

namespace flash_online::cuda {

// A tensor of rows of one class; or of one number per row, which lie side by side anyway.
template <class T>
struct OneClassRows {
  T* data;
  int64_t stride = 1;
  bool is_plain() const { return stride == 1 && misalignment(data) == 0; }
};
template <class T>
OneClassRows<const T> rows_of(const ConstView3& view) {
  return {static_cast<const T*>(view.data), view.stride[0]};
}
template <class T>
OneClassRows<T> rows_of(const MutableView3& view) {
  return {static_cast<T*>(view.data), view.stride[0]};
}

constexpr int kOneClassThreads = 256;
// Elements of a thread: a vector of the narrowest type.
template <class A, class B, class R>
constexpr int kOneClassElements = kVectorBytes / std::min({sizeof(A), sizeof(B), sizeof(R)});

template <class T, int kElements>
__device__ __forceinline__ void load_elements(const T* from, float (&x)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; i += kPerVector<T>) {
    float part[kPerVector<T>];
    unpack<T>(load_streaming(from + i), part);
#pragma unroll
    for (int e = 0; e < kPerVector<T>; ++e) x[i + e] = part[e];
  }
}

// result[i] = f(i, a[i], b[i])
template <class A, class B, class R, class F>
struct OneClassProblem {
  const A* a;
  const B* b;
  R* result;
  int64_t count;
  F f;
};

template <class A, class B, class R, class F>
__global__ void __launch_bounds__(kOneClassThreads)
    one_class_kernel(const __grid_constant__ OneClassProblem<A, B, R, F> problem) {
  const auto& [a, b, result, count, f] = problem;
  launch_dependents();
  grid_dependency_wait();
  constexpr int kElements = kOneClassElements<A, B, R>;
  const int64_t first = (int64_t{blockIdx.x} * kOneClassThreads + threadIdx.x) * kElements;
  if (first >= count) return;
  if (first + kElements > count) {
    for (int64_t i = first; i < count; ++i) result[i] = narrow<R>(f(i, widen(a[i]), widen(b[i])));
    return;
  }
  float x[kElements], y[kElements];
  load_elements(a + first, x);
  load_elements(b + first, y);
#pragma unroll
  for (int e = 0; e < kElements; ++e) x[e] = f(first + e, x[e], y[e]);
#pragma unroll
  for (int i = 0; i < kElements; i += kPerVector<R>) store_streaming(result + first + i, pack<R>(x + i));
}

// Queues the kernel for rows of one class; false if there are more, or if they do not lie side by side from 16 bytes on.
template <class A, class B, class R, class F>
bool launch_one_class(const RowProblem& problem, const OneClassRows<const A>& a, const OneClassRows<const B>& b,
                      const OneClassRows<R>& result, const F& f, cudaStream_t stream) {
  const int64_t ctas = ceil_div(problem.outer, int64_t{kOneClassThreads} * kOneClassElements<A, B, R>);
  if (problem.classes != 1 || problem.inner != 1 || ctas > 0x7fffffff) return false;
  if (!a.is_plain() || !b.is_plain() || !result.is_plain()) return false;
  launch_dependent(one_class_kernel<A, B, R, F>, OneClassProblem<A, B, R, F>{a.data, b.data, result.data, problem.outer, f},
                   static_cast<unsigned>(ctas), kOneClassThreads, stream);
  return true;
}

}  // namespace flash_online::cuda
