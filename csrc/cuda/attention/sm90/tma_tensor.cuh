// Tensors of attention as the copy engine reads them: in boxes of rows of one head, 64 columns wide. What the tensor does not
// have is read as zeros.
#pragma once

#include "../../../core/problem.h"
#include "../../hw/tma.cuh"
#include "../../hw/vector.cuh"

namespace flash_online::cuda {

struct TmaTensor {
  CUtensorMap map;
  // Of a call's head and batch, the tensor's; a dimension that is broadcast has size 1 there.
  int q_heads_per_head, batch_step;

  __device__ __forceinline__ TmaCoord at(int64_t batch, int head, int row, int box) const {
    return {box * kBoxColumns, row, head / q_heads_per_head, static_cast<int>(batch) * batch_step};
  }
};

// A call of `batch` and `call_heads`, of which the tensor has `heads`; rows of all packed sequences together.
inline TmaTensor make_tma_tensor(const ConstView4& view, TmaElement element, int64_t batch, int64_t call_heads, int64_t heads,
                                 int64_t rows, int64_t width, int box_rows) {
  constexpr uint64_t kAny = 16, kElementBytes = 2;
  const auto size = [&](int i, int64_t n) { return static_cast<uint64_t>(view.stride[i] == 0 ? 1 : n); };
  const auto step = [&](int i, int64_t n) {
    return n == 1 || view.stride[i] == 0 ? kAny : static_cast<uint64_t>(view.stride[i]) * kElementBytes;
  };
  return {make_tensor_map(view.data, element,
                          {static_cast<uint64_t>(width), static_cast<uint64_t>(rows), size(1, heads), size(0, batch)},
                          {step(2, rows), step(1, heads), step(0, batch)}, static_cast<uint32_t>(box_rows)),
          static_cast<int>(view.stride[1] == 0 ? call_heads : call_heads / heads), view.stride[0] != 0};
}

// Of a problem's tensor of `heads`, over its keys or its queries.
template <class T>
TmaTensor tma_tensor_of(const AttentionProblem& problem, const ConstView4& view, bool over_keys, int64_t heads, int64_t width,
                        int box_rows) {
  constexpr TmaElement kElement = std::is_same_v<T, __half> ? TmaElement::kHalf : TmaElement::kBFloat16;
  const int64_t rows = over_keys ? (problem.key_starts ? problem.total_keys : problem.keys)
                                 : (problem.query_starts ? problem.total_queries : problem.queries);
  return make_tma_tensor(view, kElement, problem.batch, problem.heads, heads, rows, width, box_rows);
}

// In packed tensors, what follows a sequence is another's: rows from `from` on become zeros, by kThreads threads of which this
// is number `thread`.
template <int kThreads, class T, int kCount, int kRows>
__device__ __forceinline__ void clear_tail(T (&box)[kCount][kRows][kBoxColumns], int from, int thread) {
  constexpr int kAcross = kBoxColumns / kPerVector<T>;
  for (int n = thread; n < kCount * (kRows - from) * kAcross; n += kThreads) {
    const int row = n / kAcross % (kRows - from) + from;
    reinterpret_cast<uint4*>(box[n / kAcross / (kRows - from)][row])[n % kAcross] = {0, 0, 0, 0};
  }
}

}  // namespace flash_online::cuda
