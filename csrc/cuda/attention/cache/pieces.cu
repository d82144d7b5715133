// A CTA takes a row and merges its pieces in ascending order. Nothing depends on other rows.
#include "../../hw/launch.h"
#include "../../hw/pdl.cuh"
#include "pieces.cuh"
#include "result.cuh"

namespace flash_online::cuda {

namespace {

struct MergePiecesArguments {
  AttentionProblem problem;
  CachedPieces pieces;
};

template <class Element, class Merge = RowMerge<Element>>
__global__ void __launch_bounds__(Merge::kThreads) merge_all_pieces(const __grid_constant__ MergePiecesArguments arguments) {
  __shared__ typename Merge::Shared shared;
  const AttentionProblem& problem = arguments.problem;
  const CachedPieces& pieces = arguments.pieces;
  const int64_t rows = problem.batch * problem.heads * problem.queries;
  grid_dependency_wait();
  for (int64_t index = blockIdx.x; index < rows; index += gridDim.x) {
    const int64_t query = index % problem.queries, plane = index / problem.queries, n = plane / problem.heads,
                  head = plane % problem.heads;
    const Sequence sequence = cached_sequence(problem, n);
    const int64_t count = pieces.count_of(sequence);
    if (query >= sequence.queries.count || count == 1) continue;
    const CachedRow row{n, head, head / (problem.heads / problem.key_heads), sequence.queries.begin + query};
    const int64_t number = lse_index(problem, row);
    const RowParts parts{pieces.part(number, 0), pieces.part(number, 1), pieces.pitch, static_cast<int>(pieces.pitch) - 2,
                         static_cast<int>(count)};
    Merge::merge(problem, row, parts, shared);
  }
}

}  // namespace

void merge_pieces(const AttentionProblem& problem, const CachedPieces& pieces, CUstream_st* stream) {
  const int64_t rows = problem.batch * problem.heads * problem.queries;
  if (pieces.most == 1 || rows == 0) return;
  const MergePiecesArguments arguments{problem, pieces};
  const unsigned ctas = grid_for(rows, 16);
  constexpr int kThreads = RowMerge<float>::kThreads;
  switch (problem.dtype) {
    case DType::kFloat16: return launch<merge_all_pieces<__half>>(arguments, ctas, kThreads, 0, stream, true);
    case DType::kBFloat16: return launch<merge_all_pieces<__nv_bfloat16>>(arguments, ctas, kThreads, 0, stream, true);
    default: return launch<merge_all_pieces<float>>(arguments, ctas, kThreads, 0, stream, true);
  }
}

}  // namespace flash_online::cuda
