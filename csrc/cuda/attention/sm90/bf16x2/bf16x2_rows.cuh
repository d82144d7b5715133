// Cuts float tensors into bf16 digits in global memory, from where TMA copies them. The backward pass reads every row of
// queries once per tile of keys; here it is cut once, and not each time that it is read.
#pragma once

#include "../../../hw/launch.h"
#include "../../sm80/load.cuh"
#include "../tma_tensor.cuh"

namespace flash_online::cuda {

// A tensor of floats and its digits. A row has all leading digits, filled up with zeros to kHeadDim columns, then all low ones.
struct Bf16x2Tensor {
  ConstView4 from;
  int64_t batch, heads, rows, columns;
  __nv_bfloat16* digits = nullptr;  // [batch][heads][rows][2][kHeadDim]
  unsigned first_cta = 0, ctas_per_head = 0;
};

struct Bf16x2RowsArguments {
  static constexpr int kTensors = 4;
  Bf16x2Tensor tensor[kTensors];
};

template <int kHeadDim>
struct Bf16x2Rows {
  static constexpr int kDigits = Digits<Bf16x2Float>::kDigits, kThreads = 256, kVectorsPerThread = 4;
  static constexpr int kRowsPerCta = kThreads * kVectorsPerThread * 4 / kHeadDim;
  using Vectors =
      FloatsInRegisters<Bf16x2Float, TileCopy{.rows = kRowsPerCta, .width = kHeadDim, .threads = kThreads}, kVectorsPerThread>;

  static int64_t elements(const Bf16x2Tensor& tensor) { return tensor.batch * tensor.heads * tensor.rows * kDigits * kHeadDim; }

  // The digits as TMA reads them: boxes of 64 columns, the low digits' kHeadDim columns further. A tensor of one batch index
  // serves all of them (packed sequences).
  static TmaTensor tma_tensor(const Bf16x2Tensor& tensor, const AttentionProblem& problem, int box_rows) {
    const int64_t head = tensor.rows * kDigits * kHeadDim;
    const ConstView4 view{tensor.digits, {problem.query_starts ? 0 : tensor.heads * head, head, kDigits * kHeadDim, 1}};
    return make_tma_tensor(view, TmaElement::kBFloat16, problem.batch, problem.heads, tensor.heads, tensor.rows,
                           kDigits * kHeadDim, box_rows);
  }

  __device__ __forceinline__ static void run(const Bf16x2RowsArguments& arguments) {
    int n = Bf16x2RowsArguments::kTensors - 1;
    while (blockIdx.x < arguments.tensor[n].first_cta) --n;
    const Bf16x2Tensor& tensor = arguments.tensor[n];
    const unsigned index = blockIdx.x - tensor.first_cta, plane = index / tensor.ctas_per_head,
                   heads = static_cast<unsigned>(tensor.heads);
    const int row = static_cast<int>(index % tensor.ctas_per_head) * kRowsPerCta, rows = static_cast<int>(tensor.rows);
    const HeadRows<Bf16x2Float> from(tensor.from, plane / heads, plane % heads, 0, tensor.columns);
    Vectors vectors;
    if (Vectors::can_load(from))
      vectors.fetch(from, row, rows);
    else
      vectors.fetch_elements(from, row, rows);
    __nv_bfloat16* const to = tensor.digits + (int64_t{plane} * rows + row) * (kDigits * kHeadDim);
    vectors.for_each_digit([&](int r, int column, int digit, uint2 words) {
      if (row + r < rows) *reinterpret_cast<uint2*>(to + (r * kDigits + digit) * kHeadDim + column) = words;
    });
  }
};

template <int kHeadDim>
__global__ void __launch_bounds__(Bf16x2Rows<kHeadDim>::kThreads)
    bf16x2_rows(const __grid_constant__ Bf16x2RowsArguments arguments) {
  Bf16x2Rows<kHeadDim>::run(arguments);
}

// Cuts the four tensors into digits in one launch, and assigns its CTAs to them.
template <int kHeadDim>
void launch_bf16x2_rows(Bf16x2RowsArguments arguments, CUstream_st* stream) {
  using Rows = Bf16x2Rows<kHeadDim>;
  int64_t ctas = 0;
  for (Bf16x2Tensor& tensor : arguments.tensor) {
    tensor.first_cta = static_cast<unsigned>(ctas);
    tensor.ctas_per_head = static_cast<unsigned>(ceil_div(tensor.rows, int64_t{Rows::kRowsPerCta}));
    ctas += tensor.batch * tensor.heads * tensor.ctas_per_head;
  }
  launch<bf16x2_rows<kHeadDim>>(arguments, ctas, Rows::kThreads, 0, stream);
}

}  // namespace flash_online::cuda
