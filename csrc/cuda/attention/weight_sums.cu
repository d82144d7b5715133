// What the sums of weights need around a forward pass of the transposed problem (ops/attention/weight_sums.cpp): its mask, and
// the sums from its row statistics.
#include "../hw/launch.h"
#include "attention.h"
#include "common/scores.cuh"

namespace flash_online::cuda {

namespace {

template <class T>
struct Elements {
  const T *lse, *low;
  int64_t count;
  T* mask;
  float* sums;
};

template <class T, class F>
__device__ __forceinline__ void for_each_element(int64_t count, const F& f) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) f(i);
}
template <class T>
__global__ void mask_of_lse(const __grid_constant__ Elements<T> all) {
  for_each_element<T>(all.count, [&](int64_t i) { all.mask[i] = hidden_or_negative(all.lse[i]); });
}
template <class T>
__global__ void sums_of_lse(const __grid_constant__ Elements<T> all) {
  for_each_element<T>(all.count, [&](int64_t i) {
    const T sum = ::exp(all.lse[i]);
    all.sums[i] = static_cast<float>(::fma(sum, all.low[i], sum));
  });
}

constexpr int kThreads = 256;
unsigned ctas_of(int64_t count) { return grid_for(ceil_div(count, int64_t{kThreads}), 8); }

template <class F>
void visit_accumulator(DType dtype, const F& f) {
  dtype == DType::kFloat64 ? f(double{}) : f(float{});
}

}  // namespace

void weight_sums_mask(DType dtype, const void* lse, int64_t count, void* mask, CUstream_st* stream) {
  visit_accumulator(dtype, [&]<class T>(T) {
    launch<mask_of_lse<T>>(Elements<T>{static_cast<const T*>(lse), nullptr, count, static_cast<T*>(mask), nullptr},
                           ctas_of(count), kThreads, 0, stream);
  });
}

void weight_sums_of_lse(DType dtype, const void* lse, const void* low, int64_t count, float* sums, CUstream_st* stream) {
  visit_accumulator(dtype, [&]<class T>(T) {
    launch<sums_of_lse<T>>(Elements<T>{static_cast<const T*>(lse), static_cast<const T*>(low), count, nullptr, sums},
                           ctas_of(count), kThreads, 0, stream);
  });
}

}  // namespace flash_online::cuda
