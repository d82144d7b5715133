// Attention's tensors as TMA reads them: in boxes of rows of one head, 64 columns of 16 bits wide or 128 of 8 bits. Elements
// outside a tensor are read as zeros.
#pragma once

#include "../../../core/problem.h"
#include "../../hw/tma.cuh"
#include "../../hw/vector.cuh"

namespace flash_online::cuda {

// True if TMA can address a tensor [batch, heads, rows, width] of 16-bit elements, or of others: `unit` is 16 bytes in
// elements.
inline bool is_tma_compatible(const void* data, const int64_t (&stride)[4], int64_t batch, int64_t heads, int64_t rows,
                              int64_t width, int64_t unit = 8) {
  constexpr int64_t kMaxStride = int64_t{1} << 39;  // elements: 2^40 bytes
  const auto compatible = [unit](int64_t step, int64_t size) {
    return size == 1 || (step % unit == 0 && step >= 0 && step < kMaxStride);
  };
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && compatible(stride[0], batch) && compatible(stride[1], heads) &&
         compatible(stride[2], rows) && (rows == 1 || stride[2] > 0) && (stride[3] == 1 || width == 1);
}

struct TmaTensor {
  CUtensorMap map;
  // From the call's head and batch index to the tensor's. A dimension that is broadcast has size 1 in the map.
  int q_heads_per_head, batch_step;

  __device__ __forceinline__ TmaCoord at(int64_t batch, int head, int row, int box) const {
    return {box * kBoxColumns, row, head / q_heads_per_head, static_cast<int>(batch) * batch_step};
  }
  // The coordinate without a division, for a tensor with the call's heads, or with one head that all share.
  __device__ __forceinline__ TmaCoord at_own_head(int batch, int head, int row, int box) const {
    return {box * kBoxColumns, row, q_heads_per_head == 1 ? head : 0, batch * batch_step};
  }
};

// A tensor of `heads` heads in a call of `batch` and `call_heads`. `rows` counts those of all packed sequences together.
template <class Pointer>
TmaTensor make_tma_tensor(const View4<Pointer>& view, TmaElement element, int64_t batch, int64_t call_heads, int64_t heads,
                          int64_t rows, int64_t width, int box_rows, int box_heads = 1) {
  constexpr uint64_t kAnyStride = 16;
  const uint64_t element_bytes = element == TmaElement::kByte ? 1 : 2;
  const auto size = [&](int i, int64_t n) { return static_cast<uint64_t>(view.stride[i] == 0 ? 1 : n); };
  const auto step = [&](int i, int64_t n) {
    return n == 1 || view.stride[i] == 0 ? kAnyStride : static_cast<uint64_t>(view.stride[i]) * element_bytes;
  };
  return {make_tensor_map(view.data, element,
                          {static_cast<uint64_t>(width), static_cast<uint64_t>(rows), size(1, heads), size(0, batch)},
                          {step(2, rows), step(1, heads), step(0, batch)}, static_cast<uint32_t>(box_rows),
                          static_cast<uint32_t>(box_heads)),
          static_cast<int>(view.stride[1] == 0 ? call_heads : call_heads / heads), view.stride[0] != 0};
}

// The TmaTensor of a problem's tensor with `heads` heads and a row per key or per query.
template <class T, class Pointer>
TmaTensor tma_tensor_of(const AttentionProblem& problem, const View4<Pointer>& view, bool over_keys, int64_t heads,
                        int64_t width, int box_rows) {
  constexpr TmaElement kElement = std::is_same_v<T, __half> ? TmaElement::kHalf : TmaElement::kBFloat16;
  const int64_t rows = over_keys ? (problem.key_starts ? problem.total_keys : problem.keys)
                                 : (problem.query_starts ? problem.total_queries : problem.queries);
  return make_tma_tensor(view, kElement, problem.batch, problem.heads, heads, rows, width, box_rows);
}

// Writes zeros into the rows from `from` on. kThreads threads call it, with their index as `thread`. In packed tensors these
// rows are the next sequence's and may hold infinities: 0 times infinity is NaN.
template <int kThreads, class T, int kCount, int kRows>
__device__ __forceinline__ void clear_tail(T (&box)[kCount][kRows][kBoxColumns], int from, int thread) {
  constexpr int kRowVectors = kBoxColumns / kPerVector<T>;
  static_assert(kThreads % kRowVectors == 0);
#pragma unroll 1  // keeps the code of the calling loops short
  for (int row = from + thread / kRowVectors; row < kRows; row += kThreads / kRowVectors)
#pragma unroll
    for (int n = 0; n < kCount; ++n) reinterpret_cast<uint4*>(box[n][row])[thread % kRowVectors] = {0, 0, 0, 0};
}

}  // namespace flash_online::cuda
