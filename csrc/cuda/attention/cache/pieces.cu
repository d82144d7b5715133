// A CTA takes a row: its warps the pieces, a run of them each, and their lanes the columns. What the warps have is added in
// ascending order. Nothing depends on other rows.
#include "../../../core/online_softmax.h"
#include "../../../core/visit.h"
#include "../../hw/launch.h"
#include "../../hw/math.cuh"
#include "../../hw/pdl.cuh"
#include "../../hw/vector.cuh"
#include "../common/scores.cuh"
#include "pieces.cuh"

namespace flash_online::cuda {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarpSize;
constexpr int kPairs = 2, kColumns = 2 * kPairs * kWarpSize;  // that a warp sums at a time; a lane has kPairs pairs of them
constexpr int kPiecesAtOnce = 4;  // whose outputs a lane reads before it adds any

struct MergePiecesArguments {
  AttentionProblem problem;
  CachedPieces pieces;
};

// The maximum and the sum over all pieces of a row; the same in all lanes.
__device__ ScoreState state_of_row(const CachedPieces& pieces, int64_t row, int64_t count) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  ScoreState state;
  for (int64_t piece = lane; piece < count; piece += kWarpSize) {
    const float2 part = pieces.state(pieces.part(row, piece));
    state.merge({part.x, part.y});
  }
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2)
    state.merge({__shfl_down_sync(~0u, state.max, step), __shfl_down_sync(~0u, state.sum, step)});
  return {__shfl_sync(~0u, state.max, 0), __shfl_sync(~0u, state.sum, 0)};
}

// The sums of columns [first, first + kColumns) over pieces [begin, end), measured from `max`: the lane's pairs.
__device__ __forceinline__ void sum_columns(const CachedPieces& pieces, int64_t row, int64_t begin, int64_t end, float max,
                                            int64_t first, int64_t columns, float2 (&sum)[kPairs]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int64_t piece = begin; piece < end; piece += kPiecesAtOnce) {
    float share[kPiecesAtOnce];
    float2 x[kPiecesAtOnce][kPairs] = {};
#pragma unroll
    for (int n = 0; n < kPiecesAtOnce; ++n) {
      if (piece + n >= end) break;
      const float* const part = pieces.part(row, piece + n);
      share[n] = pieces.state(part).x;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair)
        if (const int64_t column = first + 2 * (pair * kWarpSize + lane); column < columns)
          x[n][pair] = *reinterpret_cast<const float2*>(part + column);
    }
#pragma unroll
    for (int n = 0; n < kPiecesAtOnce; ++n) {
      if (piece + n >= end) break;
      const float factor = ScoreState::rescale(share[n], max);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair)
        sum[pair] = {fmaf(factor, x[n][pair].x, sum[pair].x), fmaf(factor, x[n][pair].y, sum[pair].y)};
    }
  }
}

template <class Element>
__device__ void merge_row(const MergePiecesArguments& arguments, int64_t n, int64_t head, int64_t query,
                          float2 (&shared)[kWarps][kPairs][kWarpSize]) {
  const AttentionProblem& problem = arguments.problem;
  const CachedPieces& pieces = arguments.pieces;
  const Sequence sequence = cached_sequence(problem, n);
  const int64_t count = pieces.count_of(sequence);
  if (query >= sequence.queries.count || count == 1) return;
  const int64_t row = sequence.queries.begin + query, index = n * problem.lse_stride[0] + head * problem.lse_stride[1] + row;
  ScoreState state = state_of_row(pieces, index, count);
  const bool is_empty = state.sum == 0;
  const float max = state.max;  // from which the pieces' shares are measured; the sink's comes on top
  const float* const sinks = static_cast<const float*>(problem.sinks);
  const float factor = sinks ? state.absorb(sinks[head] * kLog2E) : 1.0f;
  const int64_t key_head = head / (problem.heads / problem.key_heads);
  const float scale =
      factor * state.inverse_sum_or_zero() * scale_of(problem.cache.value_scale, problem.cache.value_scale_stride, n, key_head);
  if (threadIdx.x == 0 && problem.lse) {
    const double lse = OnlineSoftmax<double, Binary>{state.max, state.sum}.lse() * kLn2;
    static_cast<float*>(problem.lse)[index] = sinks && is_empty ? sinks[head] : static_cast<float>(lse);
  }

  const int warp = static_cast<int>(threadIdx.x) / kWarpSize, lane = static_cast<int>(threadIdx.x) % kWarpSize;
  Element* const out = static_cast<Element*>(problem.out.data) + n * problem.out.stride[0] + head * problem.out.stride[1] +
                       row * problem.out.stride[2];
  for (int64_t first = 0; first < problem.head_dim_v; first += kColumns) {
    float2 sum[kPairs] = {};
    sum_columns(pieces, index, count * warp / kWarps, count * (warp + 1) / kWarps, max, first, problem.head_dim_v, sum);
    __syncthreads();  // all have read what was there
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) shared[warp][pair][lane] = sum[pair];
    __syncthreads();
    const auto columns = [&](int w) { return reinterpret_cast<const float*>(shared[w]); };
    for (int c = static_cast<int>(threadIdx.x); c < kColumns && first + c < problem.head_dim_v; c += kThreads) {
      float all = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) all += columns(w)[c];
      out[(first + c) * problem.out.stride[3]] = narrow<Element>(all * scale);
    }
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads) merge_all_pieces(const __grid_constant__ MergePiecesArguments arguments) {
  __shared__ float2 shared[kWarps][kPairs][kWarpSize];
  const AttentionProblem& problem = arguments.problem;
  const int64_t rows = problem.batch * problem.heads * problem.queries;
  grid_dependency_wait();
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t query = row % problem.queries, plane = row / problem.queries;
    merge_row<Element>(arguments, plane / problem.heads, plane % problem.heads, query, shared);
  }
}

}  // namespace

void merge_pieces(const AttentionProblem& problem, const CachedPieces& pieces, CUstream_st* stream) {
  const int64_t rows = problem.batch * problem.heads * problem.queries;
  if (pieces.most == 1 || rows == 0) return;
  const MergePiecesArguments arguments{problem, pieces};
  const unsigned ctas = grid_for(rows, 16);
  switch (problem.dtype) {
    case DType::kFloat16: return launch<merge_all_pieces<__half>>(arguments, ctas, kThreads, 0, stream, true);
    case DType::kBFloat16: return launch<merge_all_pieces<__nv_bfloat16>>(arguments, ctas, kThreads, 0, stream, true);
    default: return launch<merge_all_pieces<float>>(arguments, ctas, kThreads, 0, stream, true);
  }
}

}  // namespace flash_online::cuda
