// The results of a row over cached keys: what its partial results are merged to, and how it ends.
#pragma once

#include "../../../core/cache.h"
#include "../common/scores.cuh"
#include "../common/store_rows.cuh"

namespace flash_online::cuda {

// A row of a call: query `query` of batch index n, which with packed queries counts from the first one of all.
struct CachedRow {
  int64_t n, head, key_head, query;
};

__device__ __forceinline__ int64_t lse_index(const AttentionProblem& problem, int64_t n, int64_t head, int64_t row) {
  return n * problem.lse_stride[0] + head * problem.lse_stride[1] + row;
}

__device__ __forceinline__ int64_t lse_index(const AttentionProblem& problem, const CachedRow& row) {
  return lse_index(problem, row.n, row.head, row.query);
}
template <class Element>
__device__ __forceinline__ Element* out_of(const AttentionProblem& problem, const CachedRow& row) {
  const MutableView4& out = problem.out;
  return static_cast<Element*>(out.data) + row.n * out.stride[0] + row.head * out.stride[1] + row.query * out.stride[2];
}

// Finishes a row, given its state over all keys: adds the sink, and returns the factor for the outputs. Stores the logarithm of
// the denominator to `lse` unless it is null. The maximum and the logarithm are added in double, so that the product with ln 2
// loses nothing.
__device__ __forceinline__ float finish_row(const AttentionProblem& problem, const CachedRow& row, ScoreState state,
                                            float* lse) {
  const bool is_empty = state.sum == 0;
  const float* const sinks = static_cast<const float*>(problem.sinks);
  const float factor = sinks ? state.absorb(sinks[row.head] * kLog2E) : 1.0f;
  if (lse) {
    const double exact = OnlineSoftmax<double, Binary>{state.max, state.sum}.lse() * kLn2;
    *lse = sinks && is_empty ? sinks[row.head] : static_cast<float>(exact);
  }
  const CacheView& cache = problem.cache;
  return factor * state.inverse_sum_or_zero() * scale_of(cache.value_scale, cache.value_scale_stride, row.n, row.key_head);
}

// The factors of two partial results of a row in their sum. All kernels that fold partial results in the order of their keys
// round as written here, so that a row has the same bits however its keys are spread over CTAs (decode/dense.cuh).
struct FoldFactors {
  float total, part;
  __device__ __forceinline__ float of(float total_output, float part_output) const {
    return fmaf(part, part_output, __fmul_rn(total, total_output));
  }
};

// Adds a part, its maximum and sum, to the state of what was before.
__device__ __forceinline__ FoldFactors fold_state(ScoreState& total, const ScoreState& part) {
  const float max = fmaxf(total.max, part.max);
  const FoldFactors factors{ScoreState::rescale(total.max, max), ScoreState::rescale(part.max, max)};
  total = {max, factors.of(total.sum, part.sum)};
  return factors;
}

// The partial results of a row: `first`, then one every `step` floats from `others` on. Each holds its outputs, not yet divided
// by the sum, and at `state` its maximum (base 2) and its sum.
struct RowPartials {
  const float *first, *others;
  int64_t step;
  int state, count;
  __device__ __forceinline__ const float* partial(int i) const { return i == 0 ? first : others + (i - 1) * step; }
  __device__ __forceinline__ float2 state_of(int i) const { return *reinterpret_cast<const float2*>(partial(i) + state); }
};

// Merges the partials of rows, one row at a time, with a CTA of kNumWarps warps. Each warp merges a run of partials, with the
// columns spread over its lanes; then the warps' results are merged in ascending order.
template <class Element, int kNumWarps = 4>
class RowMerge {
 public:
  static constexpr int kWarps = kNumWarps, kThreads = kWarps * kWarpSize;
  static constexpr int kPairs = 2, kColumns = 2 * kPairs * kWarpSize;  // that a warp sums at a time; pairs of a lane
  static constexpr int kPartialsAtOnce = 4;  // that a lane reads before it merges any
  struct Shared {
    float2 states[kWarps], columns[kWarps][kPairs][kWarpSize];
  };

  // Merges every `runs`-th run of kColumns columns of the row, from `run` on.
  __device__ __forceinline__ static void merge(const AttentionProblem& problem, const CachedRow& row,
                                               const RowPartials& partials, Shared& shared, int run = 0, int runs = 1) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpSize, lane = thread % kWarpSize;
    float* const lse = static_cast<float*>(problem.lse);
    Element* const out = out_of<Element>(problem, row);
    const int width = static_cast<int>(problem.head_dim_v);
    for (int first = run * kColumns; first == 0 || first < width; first += runs * kColumns) {
      float2 sum[kPairs] = {};
      const ScoreState own =
          merge_run(partials, partials.count * warp / kWarps, partials.count * (warp + 1) / kWarps, first, width, sum);
      __syncthreads();  // all have read what was there
      if (lane == 0) shared.states[warp] = {own.max, own.sum};
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) shared.columns[warp][pair][lane] = sum[pair];
      __syncthreads();
      ScoreState state;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) state.merge({shared.states[w].x, shared.states[w].y});
      const bool stores_lse = lse && first == 0 && thread == 0;
      const float scale = finish_row(problem, row, state, stores_lse ? lse + lse_index(problem, row) : nullptr);
      for (int c = thread; c < kColumns && first + c < width; c += kThreads) {
        float all = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w)
          all = fmaf(ScoreState::rescale(shared.states[w].x, state.max), reinterpret_cast<const float*>(shared.columns[w])[c],
                     all);
        out[(first + c) * problem.out.stride[3]] = narrow<Element>(all * scale);
      }
    }
  }

  // Merges the partials of one row with one warp, without a CTA barrier.
  __device__ __forceinline__ static void merge_by_warp(const AttentionProblem& problem, const CachedRow& row,
                                                       const RowPartials& partials, int run = 0, int runs = 1) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize, width = static_cast<int>(problem.head_dim_v);
    float* const lse = static_cast<float*>(problem.lse);
    Element* const out = out_of<Element>(problem, row);
    for (int first = run * kColumns; first == 0 || first < width; first += runs * kColumns) {
      float2 sum[kPairs] = {};
      const ScoreState state = merge_run(partials, 0, partials.count, first, width, sum);
      const bool stores_lse = lse && first == 0 && lane == 0;
      const float scale = finish_row(problem, row, state, stores_lse ? lse + lse_index(problem, row) : nullptr);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int column = first + 2 * (pair * kWarpSize + lane);
        if (column < width) out[column * problem.out.stride[3]] = narrow<Element>(sum[pair].x * scale);
        if (column + 1 < width) out[(column + 1) * problem.out.stride[3]] = narrow<Element>(sum[pair].y * scale);
      }
    }
  }

 private:
  // Parts [begin, end): the state of the row, and the sums of the lane's pairs of the columns from `first` on.
  __device__ __forceinline__ static ScoreState merge_run(const RowPartials& partials, int begin, int end, int first,
                                                         int columns, float2 (&sum)[kPairs]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    ScoreState state;
#pragma unroll 1
    for (int i = begin; i < end; i += kPartialsAtOnce) {
      float2 partial[kPartialsAtOnce], x[kPartialsAtOnce][kPairs] = {};
#pragma unroll
      for (int n = 0; n < kPartialsAtOnce; ++n) {
        if (i + n >= end) break;
        partial[n] = partials.state_of(i + n);
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair)
          if (const int column = first + 2 * (pair * kWarpSize + lane); column < columns)
            x[n][pair] = *reinterpret_cast<const float2*>(partials.partial(i + n) + column);
      }
#pragma unroll
      for (int n = 0; n < kPartialsAtOnce; ++n) {
        if (i + n >= end) break;
        const float before = state.raise_max(partial[n].x), factor = ScoreState::rescale(partial[n].x, state.max);
        state.add(partial[n].y * factor);
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair)
          sum[pair] = {fmaf(factor, x[n][pair].x, before * sum[pair].x), fmaf(factor, x[n][pair].y, before * sum[pair].y)};
      }
    }
    return state;
  }
};

}  // namespace flash_online::cuda
