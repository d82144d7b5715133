// The softmaxes of Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867, as plain as they are
// there: float32, one CTA per row, a thread takes every kThreads-th element, and each pass over the row reads it from memory
// again. Nothing is vectorized, kept on chip or split, so that what is measured is the passes. Only `run.py paper` uses them.
//
//   accesses per element        reads                    writes
//   naive softmax               sum, result              result
//   safe softmax                maximum, sum, result     result
//   online softmax              maximum and sum, result  result
//   top k of a vector           1                        -
//   safe softmax and top k      maximum, all else        -
//   online softmax and top k    1                        -
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "core/online_softmax.h"

namespace {

using flash_online::OnlineSoftmax;

constexpr int kWarp = 32;

struct FastNatural {
  __device__ static float exp(float x) { return __expf(x); }
};
using State = OnlineSoftmax<float, FastNatural>;

struct Problem {
  const float* input;
  float* result;  // softmax: [rows, classes]; top k: [rows, k]
  int* indices;
  int64_t classes;
};

// ---- the row of a CTA

template <int kThreads, class F>
__device__ __forceinline__ void for_each(const float* row, int64_t classes, const F& f) {
  // __ldg() says that the input is never written, so that loads may be issued before the previous result is stored.
  for (int64_t c = threadIdx.x; c < classes; c += kThreads) f(__ldg(row + c), c);
}

// All threads of the CTA get the result.
template <int kThreads, class Combine>
__device__ __forceinline__ float reduce(float x, float identity, const Combine& combine) {
  __shared__ float of_warp[kWarp];
  const int lane = threadIdx.x % kWarp;
  const auto over_lanes = [&](float value) {
    for (int step = kWarp / 2; step > 0; step /= 2) value = combine(value, __shfl_xor_sync(~0u, value, step));
    return value;
  };
  x = over_lanes(x);
  __syncthreads();  // the values of the previous reduction have been read
  if (lane == 0) of_warp[threadIdx.x / kWarp] = x;
  __syncthreads();
  return over_lanes(lane < kThreads / kWarp ? of_warp[lane] : identity);
}

template <int kThreads>
__device__ __forceinline__ float reduce_max(float x) {
  return reduce<kThreads>(x, -INFINITY, [](float a, float b) { return fmaxf(a, b); });
}
template <int kThreads>
__device__ __forceinline__ float reduce_sum(float x) {
  return reduce<kThreads>(x, 0, [](float a, float b) { return a + b; });
}

// Section 3.1: partial results are rescaled to the CTA's maximum and added.
template <int kThreads>
__device__ __forceinline__ State merge(State state) {
  state.raise_max(reduce_max<kThreads>(state.max));
  state.sum = reduce_sum<kThreads>(state.sum);
  return state;
}

// ---- the k largest

// A thread's own list in descending order: an element moves up from the end until it meets a larger one (algorithm 4).
template <int kCount>
struct Top {
  float value[kCount];
  int index[kCount];

  __device__ __forceinline__ Top() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = -INFINITY, index[i] = -1;
  }
  __device__ __forceinline__ void insert(float x, int at) {
    if (!(x > value[kCount - 1])) return;
#pragma unroll
    for (int i = kCount - 1; i > 0; --i)
      if (x > value[i - 1])
        value[i] = value[i - 1], index[i] = index[i - 1];
      else if (x > value[i])
        value[i] = x, index[i] = at;
    if (x > value[0]) value[0] = x, index[0] = at;
  }
  __device__ __forceinline__ void drop_first() {
#pragma unroll
    for (int i = 0; i + 1 < kCount; ++i) value[i] = value[i + 1], index[i] = index[i + 1];
    value[kCount - 1] = -INFINITY;
  }
};

struct Entry {
  float value;
  int index;
};

// The kCount largest entries of the lists of a warp's lanes, entry i in lane i. `head()` returns the first entry of a lane's
// list, `drop()` removes it.
template <int kCount, class Head, class Drop>
__device__ __forceinline__ Entry merge_lists(const Head& head, const Drop& drop) {
  static_assert(kCount <= kWarp);
  const int lane = threadIdx.x % kWarp;
  Entry mine{};
  for (int i = 0; i < kCount; ++i) {
    const Entry first = head();
    float best = first.value;
    for (int step = kWarp / 2; step > 0; step /= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
    const int owner = __ffs(__ballot_sync(~0u, first.value == best)) - 1;
    const int index = __shfl_sync(~0u, first.index, owner);
    if (lane == i) mine = {best, index};
    if (lane == owner) drop();
  }
  return mine;
}

// Writes weight(element) and the index of the CTA's kCount largest elements.
template <int kThreads, int kCount, class Weight>
__device__ __forceinline__ void write_top(Top<kCount>& top, const Problem& problem, const Weight& weight) {
  __shared__ Entry of_warp[kThreads / kWarp][kCount];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  Entry entry = merge_lists<kCount>([&] { return Entry{top.value[0], top.index[0]}; }, [&] { top.drop_first(); });
  if (lane < kCount) of_warp[warp][lane] = entry;
  __syncthreads();
  if (warp > 0) return;
  int next = lane < kThreads / kWarp ? 0 : kCount;
  entry = merge_lists<kCount>([&] { return next < kCount ? of_warp[lane][next] : Entry{-INFINITY, -1}; }, [&] { ++next; });
  if (lane < kCount) {
    problem.result[blockIdx.x * int64_t{kCount} + lane] = weight(entry.value);
    problem.indices[blockIdx.x * int64_t{kCount} + lane] = entry.index;
  }
}

// ---- the functions: what a CTA does with its row

template <int kThreads, class Weight>
__device__ __forceinline__ void write_row(const float* row, const Problem& problem, const Weight& weight) {
  float* result = problem.result + blockIdx.x * problem.classes;
  for_each<kThreads>(row, problem.classes, [&](float x, int64_t c) { result[c] = weight(x); });
}

struct NaiveSoftmax {
  template <int kThreads>
  __device__ static void run(const float* row, const Problem& problem) {
    float sum = 0;
    for_each<kThreads>(row, problem.classes, [&](float x, int64_t) { sum += __expf(x); });
    const float scale = 1 / reduce_sum<kThreads>(sum);
    write_row<kThreads>(row, problem, [&](float x) { return __expf(x) * scale; });
  }
};

template <int kThreads>
__device__ __forceinline__ State safe_state(const float* row, int64_t classes) {
  State state;
  for_each<kThreads>(row, classes, [&](float x, int64_t) { state.max = fmaxf(state.max, x); });
  state.max = reduce_max<kThreads>(state.max);
  return state;
}

struct SafeSoftmax {
  template <int kThreads>
  __device__ static void run(const float* row, const Problem& problem) {
    State state = safe_state<kThreads>(row, problem.classes);
    for_each<kThreads>(row, problem.classes, [&](float x, int64_t) { state.add(state.weight(x)); });
    const float scale = 1 / reduce_sum<kThreads>(state.sum);
    write_row<kThreads>(row, problem, [&](float x) { return state.weight(x) * scale; });
  }
};

struct OnlineSoftmaxRow {
  template <int kThreads>
  __device__ static void run(const float* row, const Problem& problem) {
    State state;
    for_each<kThreads>(row, problem.classes, [&](float x, int64_t) { state.absorb(x); });
    state = merge<kThreads>(state);
    const float scale = state.inverse_sum();
    write_row<kThreads>(row, problem, [&](float x) { return state.weight(x) * scale; });
  }
};

template <int kCount>
struct TopK {
  template <int kThreads>
  __device__ static void run(const float* row, const Problem& problem) {
    Top<kCount> top;
    for_each<kThreads>(row, problem.classes, [&](float x, int64_t c) { top.insert(x, static_cast<int>(c)); });
    write_top<kThreads>(top, problem, [](float x) { return x; });
  }
};

template <int kCount>
struct SafeTopK {
  template <int kThreads>
  __device__ static void run(const float* row, const Problem& problem) {
    State state = safe_state<kThreads>(row, problem.classes);
    Top<kCount> top;
    for_each<kThreads>(row, problem.classes, [&](float x, int64_t c) {
      state.add(state.weight(x));
      top.insert(x, static_cast<int>(c));
    });
    const float scale = 1 / reduce_sum<kThreads>(state.sum);
    write_top<kThreads>(top, problem, [&](float x) { return state.weight(x) * scale; });
  }
};

template <int kCount>
struct OnlineTopK {
  template <int kThreads>
  __device__ static void run(const float* row, const Problem& problem) {
    State state;
    Top<kCount> top;
    for_each<kThreads>(row, problem.classes, [&](float x, int64_t c) {
      state.absorb(x);
      top.insert(x, static_cast<int>(c));
    });
    state = merge<kThreads>(state);
    const float scale = state.inverse_sum();
    write_top<kThreads>(top, problem, [&](float x) { return state.weight(x) * scale; });
  }
};

template <class Function, int kThreads>
__global__ void __launch_bounds__(kThreads) row_kernel(const __grid_constant__ Problem problem) {
  Function::template run<kThreads>(problem.input + blockIdx.x * problem.classes, problem);
}

// Launches a CTA per row, as in the authors' benchmark of up to 256 threads, of fewer where a thread would have less than
// eight elements. Returns a cudaError_t.
template <class Function>
int launch(const Problem& problem, int64_t rows, void* stream) {
  const auto run = [&]<int kThreads>() {
    row_kernel<Function, kThreads><<<static_cast<unsigned>(rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(problem);
    return static_cast<int>(cudaGetLastError());
  };
  if (problem.classes >= 8 * 256) return run.template operator()<256>();
  if (problem.classes >= 8 * 128) return run.template operator()<128>();
  if (problem.classes >= 8 * 64) return run.template operator()<64>();
  return run.template operator()<32>();
}

template <template <int> class Function>
int launch_top(const Problem& problem, int64_t rows, int k, void* stream) {
  switch (k) {
    case 5: return launch<Function<5>>(problem, rows, stream);
    case 10: return launch<Function<10>>(problem, rows, stream);
    case 15: return launch<Function<15>>(problem, rows, stream);
    case 30: return launch<Function<30>>(problem, rows, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

// What build.py calls. Pointers are to device memory; x [rows, classes] and the results are contiguous, and a top k has fewer
// than 2^31 classes. Each function returns what launch() returns.
extern "C" {

int naive_softmax(const float* x, float* y, int64_t rows, int64_t classes, void* stream) {
  return launch<NaiveSoftmax>({x, y, nullptr, classes}, rows, stream);
}
int safe_softmax(const float* x, float* y, int64_t rows, int64_t classes, void* stream) {
  return launch<SafeSoftmax>({x, y, nullptr, classes}, rows, stream);
}
int online_softmax(const float* x, float* y, int64_t rows, int64_t classes, void* stream) {
  return launch<OnlineSoftmaxRow>({x, y, nullptr, classes}, rows, stream);
}
int top_k(const float* x, float* values, int* indices, int64_t rows, int64_t classes, int k, void* stream) {
  return launch_top<TopK>({x, values, indices, classes}, rows, k, stream);
}
int safe_softmax_top_k(const float* x, float* values, int* indices, int64_t rows, int64_t classes, int k, void* stream) {
  return launch_top<SafeTopK>({x, values, indices, classes}, rows, k, stream);
}
int online_softmax_top_k(const float* x, float* values, int* indices, int64_t rows, int64_t classes, int k, void* stream) {
  return launch_top<OnlineTopK>({x, values, indices, classes}, rows, k, stream);
}

}  // extern "C"
