// The gradient of a float mask, in the mask's own shape: no memory but its own, or where that is little, a few times that.
#pragma once

#include "../hw/fragment.cuh"
#include "delta.cuh"
#include "mask_block.cuh"

namespace flash_online::cuda {

// The floats of space.mask_parts: sums in parts, where the mask has too few tiles for the whole device.
int64_t mask_gradient_parts(const AttentionProblem& problem, const AttentionGradients& gradients);
void mask_gradient(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardSpace& space,
                   CUstream_st* stream);

// A warp's 16 rows of sums, the tile's from `row` on, into a tile of the gradient, of which `rows` and `columns` exist.
template <class T, int kColumns>
__device__ __forceinline__ void store_mask_sums(const Accumulator<1, kColumns>& sum, T* data, int64_t row_stride,
                                                int64_t column_stride, int row, int rows, int columns, bool add) {
  const bool pairs =
      !add && column_stride == 1 && row_stride % 2 == 0 && reinterpret_cast<uintptr_t>(data) % (2 * sizeof(T)) == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + 8 * half + lane_group();
    if (r >= rows) break;
    T* const to = data + r * row_stride;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int c = 8 * j + 2 * lane_place();
      const float x = sum[0][j][2 * half], y = sum[0][j][2 * half + 1];
      if (pairs && c + 1 < columns) {
        if constexpr (sizeof(T) == 2)
          *reinterpret_cast<unsigned*>(to + c) = Fragments<T>::pair(x, y);
        else
          *reinterpret_cast<float2*>(to + c) = make_float2(x, y);
      } else {
        if (c < columns) to[c * column_stride] = narrow<T>(add ? widen(to[c * column_stride]) + x : x);
        if (c + 1 < columns) to[(c + 1) * column_stride] = narrow<T>(add ? widen(to[(c + 1) * column_stride]) + y : y);
      }
    }
  }
}

// The same into the gradient's tile of `queries` x `keys` from there on.
template <int kColumns>
__device__ __forceinline__ void store_mask_gradient(const AttentionGradients& gradients, const Accumulator<1, kColumns>& sum,
                                                    int64_t batch, int64_t head, int64_t first_row, int64_t first_column,
                                                    int queries, int keys, int row) {
  const MutableView4& to = gradients.grad_mask;
  const int rows = static_cast<int>(min(gradients.mask_size[2] - first_row, int64_t{queries})),
            columns = static_cast<int>(min(gradients.mask_size[3] - first_column, int64_t{keys}));
  const int64_t offset = batch * to.stride[0] + head * to.stride[1] + first_row * to.stride[2] + first_column * to.stride[3];
  visit_mask(gradients.grad_mask_dtype, [&]<class T>(T) {
    if constexpr (!std::is_same_v<T, bool>)
      store_mask_sums(sum, static_cast<T*>(to.data) + offset, to.stride[2], to.stride[3], row, rows, columns,
                      gradients.add_to_grad_mask);
  });
}

}  // namespace flash_online::cuda
