// The partial results of items that the shares of CTAs cut. A share has at most two of them: one of an item that began
// before it, and one of an item that ends after it. So the workspace grows with the number of CTAs, not with the problem.
#pragma once

#include "../cache/result.cuh"
#include "line.cuh"

namespace flash_online::cuda {

struct DecodePartials {
  float* data = nullptr;
  int rows = 0, pitch = 0;  // per partial; floats per row: its outputs and, in the last two, maximum and sum

  static DecodePartials of(const AttentionProblem& problem, const DecodeShape& shape) {
    return {nullptr, shape.tile_rows, round_up(static_cast<int>(problem.head_dim_v), 4) + 4};
  }
  int64_t bytes(int64_t ctas) const { return ctas * 2 * rows * pitch * static_cast<int64_t>(sizeof(float)); }

  __device__ __forceinline__ int size() const { return rows * pitch; }
  // The first row of the partial that `cta` leaves of an item that begins in its share, or that began before.
  __device__ __forceinline__ float* partial(int cta, bool begins_item) const {
    return data + int64_t{2 * cta + (begins_item ? 1 : 0)} * size();
  }
};

// Merges the partials that the shares of `ctas` CTAs, or as many for each of those that go abreast, cut items into. Partials
// of the first of these lie before those of the second one.
void merge_partials(const AttentionProblem& problem, const DecodeShape& shape, const DecodePartials& partials, int ctas,
                    CUstream_st* stream);

// Clears the packed rows that have no result: out is 0 there, lse is -inf. All CTAs take turns.
template <class Element>
__device__ __noinline__ void clear_rows_without_result(const AttentionProblem& problem) {
  const auto clear = [&](const Rows& rows) {
    const int64_t width = problem.head_dim_v, per_row = problem.heads * width;
#pragma unroll 1
    for (int64_t i = threadIdx.x; i < rows.count * per_row; i += blockDim.x) {
      const int64_t row = rows.begin + i / per_row, column = i % width, head = i % per_row / width;
      static_cast<Element*>(
          problem.out.data)[head * problem.out.stride[1] + row * problem.out.stride[2] + column * problem.out.stride[3]] =
          narrow<Element>(0.0f);
      if (column == 0 && problem.lse) static_cast<float*>(problem.lse)[lse_index(problem, 0, head, row)] = lowest<float>();
    }
  };
#pragma unroll 1
  for (int64_t turn = blockIdx.x; turn <= 2 * problem.batch; turn += gridDim.x) {
    const int64_t n = turn / 2;
    clear(turn % 2 == 0 ? padding_rows(problem.query_starts, problem.batch, n, problem.queries, problem.total_queries)
                        : unused_queries(problem, n));
  }
}

}  // namespace flash_online::cuda
