// Splits float tensors into bfloat16 pieces in global memory, from where TMA copies them. The backward pass reads every row of
// queries once per tile of keys; here it is split once, and not each time that it is read.
#pragma once

#include "../../../hw/launch.h"
#include "../../sm80/load.cuh"
#include "../tma_tensor.cuh"

namespace flash_online::cuda {

// A tensor of floats and its pieces. A row has all leading pieces, filled up with zeros to kHeadDim columns, then all low ones.
struct SplitTensor {
  ConstView4 from;
  int64_t batch, heads, rows, columns;
  __nv_bfloat16* pieces = nullptr;  // [batch][heads][rows][2][kHeadDim]
  unsigned first_cta = 0, ctas_per_head = 0;
};

struct SplitRowsArguments {
  static constexpr int kTensors = 4;
  SplitTensor tensor[kTensors];
};

template <int kHeadDim>
struct SplitRows {
  static constexpr int kPieces = Split<Bf16x2Float>::kPieces, kThreads = 256, kVectorsPerThread = 4;
  static constexpr int kRowsPerCta = kThreads * kVectorsPerThread * 4 / kHeadDim;
  using Vectors =
      FloatsInRegisters<Bf16x2Float, TileCopy{.rows = kRowsPerCta, .width = kHeadDim, .threads = kThreads}, kVectorsPerThread>;

  static int64_t elements(const SplitTensor& tensor) { return tensor.batch * tensor.heads * tensor.rows * kPieces * kHeadDim; }

  // The pieces as TMA reads them: boxes of 64 columns, the low pieces' kHeadDim columns further. A tensor of one batch index
  // serves all of them (packed sequences).
  static TmaTensor tma_tensor(const SplitTensor& tensor, const AttentionProblem& problem, int box_rows) {
    const int64_t head = tensor.rows * kPieces * kHeadDim;
    const ConstView4 view{tensor.pieces, {problem.query_starts ? 0 : tensor.heads * head, head, kPieces * kHeadDim, 1}};
    return make_tma_tensor(view, TmaElement::kBFloat16, problem.batch, problem.heads, tensor.heads, tensor.rows,
                           kPieces * kHeadDim, box_rows);
  }

  __device__ __forceinline__ static void run(const SplitRowsArguments& arguments) {
    int n = SplitRowsArguments::kTensors - 1;
    while (blockIdx.x < arguments.tensor[n].first_cta) --n;
    const SplitTensor& tensor = arguments.tensor[n];
    const unsigned index = blockIdx.x - tensor.first_cta, plane = index / tensor.ctas_per_head,
                   heads = static_cast<unsigned>(tensor.heads);
    const int row = static_cast<int>(index % tensor.ctas_per_head) * kRowsPerCta, rows = static_cast<int>(tensor.rows);
    const HeadRows<Bf16x2Float> from(tensor.from, plane / heads, plane % heads, 0, tensor.columns);
    Vectors vectors;
    if (Vectors::can_load(from))
      vectors.fetch(from, row, rows);
    else
      vectors.fetch_elements(from, row, rows);
    __nv_bfloat16* const to = tensor.pieces + (int64_t{plane} * rows + row) * (kPieces * kHeadDim);
    vectors.for_each_piece([&](int r, int column, int piece, uint2 words) {
      if (row + r < rows) *reinterpret_cast<uint2*>(to + (r * kPieces + piece) * kHeadDim + column) = words;
    });
  }
};

template <int kHeadDim>
__global__ void __launch_bounds__(SplitRows<kHeadDim>::kThreads)
    split_rows(const __grid_constant__ SplitRowsArguments arguments) {
  SplitRows<kHeadDim>::run(arguments);
}

// Splits the four tensors in one launch, and assigns its CTAs to them.
template <int kHeadDim>
void launch_split_rows(SplitRowsArguments arguments, CUstream_st* stream) {
  using Rows = SplitRows<kHeadDim>;
  int64_t ctas = 0;
  for (SplitTensor& tensor : arguments.tensor) {
    tensor.first_cta = static_cast<unsigned>(ctas);
    tensor.ctas_per_head = static_cast<unsigned>(ceil_div(tensor.rows, int64_t{Rows::kRowsPerCta}));
    ctas += tensor.batch * tensor.heads * tensor.ctas_per_head;
  }
  launch<split_rows<kHeadDim>>(arguments, ctas, Rows::kThreads, 0, stream);
}

}  // namespace flash_online::cuda
