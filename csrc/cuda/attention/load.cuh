// Blocks of a tensor's rows on their way into shared memory.
#pragma once

#include "../../core/problem.h"
#include "../hw/async_copy.cuh"
#include "../hw/fragment.cuh"

namespace flash_online::cuda {

// A head's rows in global memory. Strides in elements.
template <class Element>
struct HeadRows {
  const Element* data;
  int64_t row_stride, column_stride;
  int width;
  bool vectors;  // whether every row starts at a multiple of 16 bytes, its columns side by side

  __device__ HeadRows(const ConstView4& view, int64_t batch, int64_t head, int64_t first_row, int64_t columns,
                      int64_t first_column = 0)
      : data(static_cast<const Element*>(view.data) + batch * view.stride[0] + head * view.stride[1] +
             first_row * view.stride[2] + first_column * view.stride[3]),
        row_stride(view.stride[2]),
        column_stride(view.stride[3]),
        width(static_cast<int>(columns - first_column)),
        vectors((column_stride == 1 || columns <= 1) && misalignment(data) == 0 && row_stride * sizeof(Element) % 16 == 0) {}
};

// Starts copying the rows [row, row + kRows) into a tile; zeros stand for what is past `rows` or past the columns. Seen after
// commit_copies, wait_for_copies and a barrier.
template <int kRows, int kThreads, class Kind, int kWidth>
__device__ __forceinline__ void load(SharedTile<Kind, kWidth> tile, const HeadRows<typename ElementOf<Kind>::type>& from, int row,
                                     int rows) {
  using Element = typename ElementOf<Kind>::type;
  constexpr int kPer = kPerVector<Element>, kChunks = kWidth / kPer;
  const int thread = static_cast<int>(threadIdx.x), left = min(rows - row, kRows);
  const Element* const data = from.data + row * from.row_stride;
  if (from.vectors) {
    // A thread keeps to its column: one address, moved on by a constant number of rows.
    constexpr int kAcross = kChunks < kThreads ? kChunks : kThreads, kDown = kThreads / kAcross;
    constexpr bool kExact = kRows % kDown == 0 && kThreads % kAcross == 0 && kChunks % kAcross == 0;
    const int first = thread / kAcross;
    if (!kExact && first >= kDown) return;
    const int64_t step = kDown * from.row_stride;
    const bool whole = left >= kRows && from.width >= kWidth;
#pragma unroll(kExact ? kChunks / kAcross : 1)
    for (int c = thread % kAcross * kPer; c < kWidth; c += kAcross * kPer) {
      const Element* source = data + first * from.row_stride + c;
      if (whole) {
#pragma unroll
        for (int r = 0; r < kRows; r += kDown, source += step)
          if (kExact || first + r < kRows) copy_async(reinterpret_cast<uint4*>(tile.row(first + r) + c), source);
      } else {
        const int bytes = max(0, min(kVectorBytes, (from.width - c) * static_cast<int>(sizeof(Element))));
#pragma unroll 1
        for (int r = first; r < kRows; r += kDown, source += step)
          copy_async(reinterpret_cast<uint4*>(tile.row(r) + c), source, r < left ? bytes : 0);
      }
    }
  } else {
#pragma unroll 1
    for (int index = thread; index < kRows * kWidth; index += kThreads) {
      const int r = index / kWidth, c = index % kWidth;
      tile.row(r)[c] = r < left && c < from.width ? data[r * from.row_stride + c * from.column_stride] : narrow<Element>(0.0f);
    }
  }
}

// Writes a warp's 16 * kTiles rows of accumulators into a head's rows: `at` is the warp's place in shared memory, of which the
// warp uses as many rows; `row` counts there and in the tensor alike from the block's first.
template <class Kind, int kTiles, int kColumns, int kWidth>
__device__ __forceinline__ void store_rows(const Accumulator<kTiles, kColumns>& d, SharedTile<Kind, kWidth> at, int row,
                                           typename ElementOf<Kind>::type* data, int64_t row_stride, int64_t column_stride,
                                           int left, int width) {
  using Element = typename ElementOf<Kind>::type;
  static_assert(kColumns * 8 <= kWidth);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Element* const to = at.row(row + 16 * i + 8 * half + lane_group()) + 8 * j + 2 * lane_place();
        if constexpr (sizeof(Element) == 2)
          *reinterpret_cast<unsigned*>(to) = Fragments<Kind>::pair(d[i][j][2 * half], d[i][j][2 * half + 1]);
        else
          *reinterpret_cast<float2*>(to) = {d[i][j][2 * half], d[i][j][2 * half + 1]};
      }
  __syncwarp();
  constexpr int kPer = kPerVector<Element>, kChunks = kColumns * 8 / kPer;
  const bool vectors = column_stride == 1 && width % kPer == 0 && misalignment(data) == 0 &&
                       row_stride * static_cast<int>(sizeof(Element)) % kVectorBytes == 0;
  for (int index = lane(); index < 16 * kTiles * kChunks; index += 32) {
    const int r = row + index / kChunks, c = index % kChunks * kPer;
    if (r >= left || c >= width) continue;
    if (vectors)
      *reinterpret_cast<uint4*>(data + r * row_stride + c) = *reinterpret_cast<const uint4*>(at.row(r) + c);
    else
      for (int n = 0; n < kPer && c + n < width; ++n) data[r * row_stride + (c + n) * column_stride] = at.row(r)[c + n];
  }
}

}  // namespace flash_online::cuda
