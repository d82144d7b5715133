// Merges the partials of items that borders of shares cut: some CTAs per border; the borders that cut one item divide its rows
// among themselves. The CTAs find their work while the kernel before still runs.
#include "../../../core/visit.h"
#include "../../hw/launch.h"
#include "../../hw/pdl.cuh"
#include "dense.cuh"
#include "partials.cuh"

namespace flash_online::cuda {

namespace {

struct MergePartialsArguments {
  AttentionProblem problem;
  DecodeShape shape;
  DecodePartials partials;
  int ctas;
  int runs;  // of columns: separate CTAs merge each
};

template <class Merge>
__global__ void __launch_bounds__(Merge::kThreads, 1024 / Merge::kThreads)
    merge_shares(const __grid_constant__ MergePartialsArguments arguments) {
  __shared__ typename Merge::Shared shared;
  const AttentionProblem& problem = arguments.problem;
  const DecodeShape& shape = arguments.shape;
  const KvSplits whole{};
  const int cta = static_cast<int>(blockIdx.x) + 1;  // its share begins at the border
  launch_dependents();
  const DecodeShare share = find_share(problem, whole, shape, arguments.ctas, cta);
  DecodeSequence s{};
  int skip = 0, item = 0;  // units of the item before the border; the item's number in the sequence
  if (share.begin < share.end) {
    s = share.s;
    item = (share.begin - share.sequence_begin) / s.weight;
    skip = share.begin - share.sequence_begin - item * s.weight;
  }
  grid_dependency_wait();  // by every CTA: the next kernel may rely on all before this one having ended
  if (skip == 0) return;
  const int begin = share.begin - skip, first_cta = begin / share.size,
            borders = (begin + s.weight - 1) / share.size - first_cta;
  const int runs = arguments.runs, which = static_cast<int>(blockIdx.z / static_cast<unsigned>(runs)),
            run = static_cast<int>(blockIdx.z) - which * runs;  // which: of those that go abreast
  DecodePartials partials = arguments.partials;
  partials.data += which * int64_t{2 * arguments.ctas} * partials.size();
  const int2 tile_and_head = shape.of_abreast(s.tile_and_head(shape, item), which);
  const int first_row = tile_and_head.x * shape.tile_rows, rows = min(s.queries * shape.group - first_row, shape.tile_rows);
  // Few partials are merged by a warp per row, many by the whole CTA.
  const bool by_warp = borders < max(8, Merge::kWarps);
  const int turns = by_warp ? Merge::kWarps : 1, turn = by_warp ? static_cast<int>(threadIdx.x) / kWarpSize : 0;
#pragma unroll 1
  for (int r = cta - first_cta - 1 + borders * (static_cast<int>(blockIdx.y) * turns + turn); r < rows;
       r += borders * static_cast<int>(gridDim.y) * turns) {
    const int row = first_row + r, query = static_cast<int>(static_cast<unsigned>(row) / static_cast<unsigned>(shape.group));
    const RowPartials of_row{partials.partial(first_cta, true) + r * partials.pitch,
                             partials.partial(first_cta + 1, false) + r * partials.pitch, 2 * partials.size(),
                             partials.pitch - 2, borders + 1};
    const CachedRow place{share.sequence, tile_and_head.y * shape.group + row - query * shape.group, tile_and_head.y,
                          s.queries_begin + query};
    if (by_warp)
      Merge::merge_by_warp(problem, place, of_row, run, runs);
    else
      Merge::merge(problem, place, of_row, shared, run, runs);
  }
}

struct MergeDenseArguments {
  AttentionProblem problem;
  DensePartials partials;
  DecodeShape shape;
  int ctas;
};

template <class Merge>
__global__ void __launch_bounds__(Merge::kThreads) merge_dense_rows(const __grid_constant__ MergeDenseArguments arguments) {
  const AttentionProblem& problem = arguments.problem;
  const DecodeShape& shape = arguments.shape;
  const DensePartials& partials = arguments.partials;
  const int sequences = static_cast<int>(problem.batch), rows = static_cast<int>(problem.queries) * shape.group;
  const DecodeSequence s = decode_sequence(problem, KvSplits{}, shape, 0);  // all are alike
  launch_dependents();
  grid_dependency_wait();
#pragma unroll 1
  for (int index = static_cast<int>(blockIdx.x) * Merge::kWarps + static_cast<int>(threadIdx.x) / kWarpSize;
       index < sequences * shape.key_heads * shape.row_tiles * partials.rows;
       index += static_cast<int>(gridDim.x) * Merge::kWarps) {
    const int item = index / partials.rows, in_tile = index - item * partials.rows,
              first = DenseSplit::units_in_first_share(s, shape, sequences, arguments.ctas, item);
    if (first == s.weight) continue;  // one CTA had all
    const DenseRow row(shape, item, in_tile);
    if (row.row < rows) Merge::fold(problem, partials, row.place, item, in_tile, first, s.weight, static_cast<int>(blockIdx.y));
  }
}

}  // namespace

void merge_dense(const AttentionProblem& problem, const DensePartials& partials, const DecodeShape& shape, int ctas,
                 CUstream_st* stream) {
  const auto launch_with = [&]<class Merge>(Type<Merge>) {
    const int64_t rows = problem.batch * shape.key_heads * shape.row_tiles * partials.rows;
    const dim3 grid(grid_for(ceil_div(rows, int64_t{Merge::kWarps}), 16),
                    static_cast<unsigned>(ceil_div(std::max<int64_t>(problem.head_dim_v, 1), int64_t{Merge::kColumns})));
    launch_dependent(merge_dense_rows<Merge>, MergeDenseArguments{problem, partials, shape, ctas}, grid, Merge::kThreads,
                     stream);
  };
  problem.dtype == DType::kFloat16 ? launch_with(Type<DenseMerge<__half, 1, 16>>{})
                                   : launch_with(Type<DenseMerge<__nv_bfloat16, 1, 16>>{});
}

void merge_partials(const AttentionProblem& problem, const DecodeShape& shape, const DecodePartials& partials, int ctas,
                    CUstream_st* stream) {
  if (ctas < 2) return;
  const int runs = static_cast<int>(ceil_div(std::max<int64_t>(problem.head_dim_v, 1), int64_t{RowMerge<__half>::kColumns}));
  const MergePartialsArguments arguments{problem, shape, partials, ctas, runs};
  const int64_t rows = std::max<int64_t>(std::min<int64_t>(shape.group * problem.queries, shape.tile_rows), 1);
  const auto launch_with = [&]<int kWarps>(std::integral_constant<int, kWarps>) {
    // A warp has two rows where an item is cut once. More CTAs would wait for those of the kernel before to leave their SMs.
    const dim3 grid(ctas - 1, static_cast<unsigned>(ceil_div(rows, int64_t{2 * kWarps})),
                    static_cast<unsigned>(shape.abreast() * runs));
    const auto kernel = problem.dtype == DType::kFloat16 ? merge_shares<RowMerge<__half, kWarps>>
                                                         : merge_shares<RowMerge<__nv_bfloat16, kWarps>>;
    launch_dependent(kernel, arguments, grid, kWarps * kWarpSize, stream);
  };
  // Many rows come from tiles of the Hopper kernel. No CTA fits on an SM next to a CTA of that kernel, so CTAs may be large. If
  // rows are wide too, their runs of columns give enough CTAs.
  if (rows > 16 && shape.tile_rows > 32 && runs == 1)
    launch_with(std::integral_constant<int, 16>{});
  else
    launch_with(std::integral_constant<int, 4>{});
}

}  // namespace flash_online::cuda
