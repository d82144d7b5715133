// Stores accumulators as rows of a tensor in global memory, and zeros as its padding rows.
#pragma once

#include "../../../core/problem.h"
#include "../../../core/sequence.h"
#include "../../hw/vector.cuh"
#include "../../mma/fragments.cuh"
#include "../../mma/shared_tile.cuh"

namespace flash_online::cuda {

// Stores a warp's 16 * kTiles rows of accumulators by way of shared memory: through rows [row, row + 16 * kTiles) and columns
// from `shared_column` on of `tile`, to where row_at(row) says. Rows from `row_count` on and columns from `width` on are left
// out. `aligned`: all rows begin at multiples of 16 bytes.
template <class Element, int kTiles, int kColumns, int kWidth, class RowAt>
  requires(std::is_invocable_v<RowAt, int>)
__device__ __forceinline__ void store_rows(const Accumulator<kTiles, kColumns>& d, SharedTile<Element, kWidth> tile,
                                           int shared_column, int row, RowAt&& row_at, bool aligned, int64_t column_stride,
                                           int row_count, int width) {
  static_assert(kColumns * 8 <= kWidth);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Element* const to = tile.elements(row + 16 * i + 8 * half + quad()) + shared_column + 8 * j + 2 * lane_in_quad();
        if constexpr (sizeof(Element) == 2)
          *reinterpret_cast<unsigned*>(to) = Fragments<Element>::pair(d[i][j][2 * half], d[i][j][2 * half + 1]);
        else
          *reinterpret_cast<float2*>(to) = {d[i][j][2 * half], d[i][j][2 * half + 1]};
      }
  __syncwarp();
  constexpr int kPer = kPerVector<Element>, kChunks = kColumns * 8 / kPer;
  const bool vectors = column_stride == 1 && width % kPer == 0 && aligned;
  for (int index = lane(); index < 16 * kTiles * kChunks; index += 32) {
    const int r = row + index / kChunks, c = index % kChunks * kPer;
    if (r >= row_count || c >= width) continue;
    Element* const to = row_at(r);
    if (vectors)
      *reinterpret_cast<uint4*>(to + c) = *reinterpret_cast<const uint4*>(tile.elements(r) + shared_column + c);
    else
      for (int n = 0; n < kPer && c + n < width; ++n) to[(c + n) * column_stride] = tile.elements(r)[shared_column + c + n];
  }
}

// The same to rows of `data`.
template <class Element, int kTiles, int kColumns, int kWidth>
__device__ __forceinline__ void store_rows(const Accumulator<kTiles, kColumns>& d, SharedTile<Element, kWidth> tile,
                                           int shared_column, int row, Element* data, int64_t row_stride, int64_t column_stride,
                                           int row_count, int width) {
  const bool aligned = misalignment(data) == 0 && row_stride * static_cast<int>(sizeof(Element)) % kVectorBytes == 0;
  store_rows<Element>(
      d, tile, shared_column, row, [&](int r) { return data + r * row_stride; }, aligned, column_stride, row_count, width);
}

// Stores 16 rows of accumulators, times `scale`, without shared memory: the four lanes of a quad hold pairs of columns of the
// same rows and exchange them, so that each lane writes eight columns. A caller within a loop may pass a lane that went through
// make_opaque(), so that values computed from it do not occupy registers throughout the loop.
template <class Element, int kColumns>
__device__ __forceinline__ void store_rows(const Accumulator<1, kColumns>& d, float scale, int row, Element* data,
                                           int64_t row_stride, int64_t column_stride, int row_count, int width,
                                           int lane = cuda::lane()) {
  static_assert(kColumns % 4 == 0);
  constexpr bool kWords = sizeof(Element) == 2;
  const bool vectors = kWords && column_stride == 1 && width % 8 == 0 && misalignment(data) == 0 &&
                       row_stride * static_cast<int>(sizeof(Element)) % kVectorBytes == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + half * 8 + lane / 4;
    Element* const at = data + r * row_stride;
#pragma unroll
    for (int first = 0; first < kColumns; first += 4) {
      if constexpr (kWords) {
        if (vectors) {
          unsigned words[4];
#pragma unroll
          for (int t = 0; t < 4; ++t)
            words[t] = Fragments<Element>::pair(scale * d[0][first + t][2 * half], scale * d[0][first + t][2 * half + 1]);
          transpose_quad(words, lane);
          const int column = (first + lane % 4) * 8;
          if (r < row_count && column < width)
            *reinterpret_cast<uint4*>(at + column) = make_uint4(words[0], words[1], words[2], words[3]);
          continue;
        }
      }
#pragma unroll
      for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = (first + t) * 8 + 2 * (lane % 4) + e;
          if (r < row_count && column < width)
            at[column * column_stride] = narrow<Element>(scale * d[0][first + t][2 * half + e]);
        }
    }
  }
}

// Zeros rows of one head, by the kThreads threads of a CTA.
template <class Element, int kThreads>
__device__ __forceinline__ void clear_rows(const MutableView4& to, int64_t head, int64_t width, Rows rows) {
  Element* const data = static_cast<Element*>(to.data) + head * to.stride[1];
  for (int64_t n = threadIdx.x; n < rows.count * width; n += kThreads)
    data[(rows.begin + n / width) * to.stride[2] + n % width * to.stride[3]] = narrow<Element>(0.0f);
}

// Zeros the padding rows of dK and dV before a packed sequence, and after the last one, in one head.
template <class Element, int kThreads>
__device__ __forceinline__ void clear_key_padding(const AttentionProblem& problem, const AttentionGradients& gradients,
                                                  int64_t batch, int64_t head) {
  const auto clear_before = [&](int64_t sequence) {
    const Rows rows = padding_rows(problem.key_starts, problem.batch, sequence, problem.keys, problem.total_keys);
    clear_rows<Element, kThreads>(gradients.grad_key, head, problem.head_dim, rows);
    clear_rows<Element, kThreads>(gradients.grad_value, head, problem.head_dim_v, rows);
  };
  clear_before(batch);
  if (batch == problem.batch - 1) clear_before(problem.batch);
}

}  // namespace flash_online::cuda
