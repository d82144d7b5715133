// A warp takes a row, and its lanes the columns. The pieces are added in ascending order.
#include "../../../core/online_softmax.h"
#include "../../../core/visit.h"
#include "../../hw/launch.h"
#include "../../hw/math.cuh"
#include "../../hw/vector.cuh"
#include "../common/scores.cuh"
#include "pieces.cuh"

namespace flash_online::cuda {

namespace {

constexpr int kThreads = 128;

struct MergePiecesArguments {
  AttentionProblem problem;
  CachedPieces pieces;
};

template <class Element>
__device__ void merge_row(const MergePiecesArguments& arguments, int64_t n, int64_t head, int64_t query) {
  const AttentionProblem& problem = arguments.problem;
  const CachedPieces& pieces = arguments.pieces;
  const Sequence sequence = cached_sequence(problem, n);
  const int64_t count = pieces.count_of(sequence);
  if (query >= sequence.queries.count || count == 1) return;
  const int64_t row = sequence.queries.begin + query, index = n * problem.lse_stride[0] + head * problem.lse_stride[1] + row;

  ScoreState state;
  for (int64_t piece = 0; piece < count; ++piece) {
    const float2 part = pieces.state(pieces.part(index, piece));
    state.merge({part.x, part.y});
  }
  const bool is_empty = state.sum == 0;
  const float max = state.max;  // from which the parts' factors are measured; the sink's comes on top
  const float* const sinks = static_cast<const float*>(problem.sinks);
  const float factor = sinks ? state.absorb(sinks[head] * kLog2E) : 1.0f;
  const int64_t key_head = head / (problem.heads / problem.key_heads);
  const float scale =
      factor * state.inverse_sum_or_zero() * scale_of(problem.cache.value_scale, problem.cache.value_scale_stride, n, key_head);

  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (lane == 0) {
    const double lse = OnlineSoftmax<double, Binary>{state.max, state.sum}.lse() * kLn2;
    static_cast<float*>(problem.lse)[index] = sinks && is_empty ? sinks[head] : static_cast<float>(lse);
  }
  Element* const out = static_cast<Element*>(problem.out.data) + n * problem.out.stride[0] + head * problem.out.stride[1] +
                       row * problem.out.stride[2];
  for (int64_t column = lane; column < problem.head_dim_v; column += kWarpSize) {
    float sum = 0;
    for (int64_t piece = 0; piece < count; ++piece) {
      float* const part = pieces.part(index, piece);
      sum = fmaf(ScoreState::rescale(pieces.state(part).x, max), part[column], sum);
    }
    out[column * problem.out.stride[3]] = narrow<Element>(sum * scale);
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads) merge_all_pieces(const __grid_constant__ MergePiecesArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const int64_t rows = problem.batch * problem.heads * problem.queries;
  for (int64_t row = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / kWarpSize; row < rows;
       row += int64_t{gridDim.x} * kThreads / kWarpSize) {
    const int64_t query = row % problem.queries, plane = row / problem.queries;
    merge_row<Element>(arguments, plane / problem.heads, plane % problem.heads, query);
  }
}

}  // namespace

void merge_pieces(const AttentionProblem& problem, const CachedPieces& pieces, CUstream_st* stream) {
  const int64_t rows = problem.batch * problem.heads * problem.queries;
  if (pieces.most == 1 || rows == 0) return;
  const MergePiecesArguments arguments{problem, pieces};
  const unsigned ctas = grid_for(ceil_div(rows, int64_t{kThreads / kWarpSize}), 16);
  switch (problem.dtype) {
    case DType::kFloat16: return launch<merge_all_pieces<__half>>(arguments, ctas, kThreads, 0, stream);
    case DType::kBFloat16: return launch<merge_all_pieces<__nv_bfloat16>>(arguments, ctas, kThreads, 0, stream);
    default: return launch<merge_all_pieces<float>>(arguments, ctas, kThreads, 0, stream);
  }
}

}  // namespace flash_online::cuda
