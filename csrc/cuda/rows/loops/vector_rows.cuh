// Rows of 2 classes that lie side by side from a multiple of 16 bytes on: a thread has vectors of whole rows, and nothing
// passes through shared memory. A row has the bits that a block of rows (block_row.cuh) gives it. Not for operators with
// targets, which are as long as 4 such rows.
#pragma once

#include "../../hw/pdl.cuh"
#include "block_row.cuh"

namespace flash_online::cuda {

constexpr int kVectorRowThreads = 256, kVectorRowClasses = 2;
template <class T>
constexpr int kRowsPerVector = kPerVector<T> / kVectorRowClasses;

template <class Op, class T>
struct VectorRowReader {
  using Element = T;
  static constexpr bool kSplit = false;
  const RowProblem& problem;
  RowCoord coord;
  const float (&x)[Op::kTensors][kPerVector<T>];
  float (&z)[kPerVector<T>];
  float (&numbers)[kRowsPerVector<T>];
  int row;  // of the vector
  template <int kTensor = 0>
  __device__ __forceinline__ auto read(const ConstView3&) const {
    const MutableView3* of_result = nullptr;
    if constexpr (!Op::kReduces) of_result = &Op::result(problem);
    using Place = PlaceInVector<kVectorRowClasses>;
    const int begin = row * kVectorRowClasses;
    return FewClassesRow<T, kVectorRowClasses, Place>(coord, Place{x[kTensor] + begin, of_result, z + begin});
  }
  // Takes the number that the operator computes of the row, if it reduces (Op::write_numbers).
  __device__ __forceinline__ void set_number(float number) const { numbers[row] = number; }
};

// Vectors per thread, kVectorRowThreads apart: two of four floats take as long as one of eight 16-bit numbers.
template <class Op, class T>
constexpr int kVectorRowVectors = Op::kReduces && sizeof(T) == sizeof(float) ? 2 : 1;

template <class T>
__device__ __forceinline__ void load_vector_of_rows(float (&x)[kPerVector<T>], const T* from, int64_t rows_left) {
  if (rows_left >= kRowsPerVector<T>)
    unpack<T>(load_streaming(from), x);
  else
#pragma unroll
    for (int e = 0; e < kPerVector<T>; ++e)
      if (e < rows_left * kVectorRowClasses) x[e] = widen(from[e]);
}

template <class Op, class T>
__global__ void __launch_bounds__(kVectorRowThreads) vector_row_kernel(const __grid_constant__ RowProblem problem) {
  constexpr int kElements = kPerVector<T>, kRows = kRowsPerVector<T>, kVectors = kVectorRowVectors<Op, T>;
  launch_dependents();
  grid_dependency_wait();
  const int64_t first = (int64_t{blockIdx.x} * kVectorRowThreads * kVectors + threadIdx.x) * kRows;
  const auto row_of_vector = [&](int v) { return first + v * kVectorRowThreads * kRows; };
  float x[kVectors][Op::kTensors][kElements] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
#pragma unroll
    for (int i = 0; i < Op::kTensors; ++i)
      load_vector_of_rows(x[v][i], static_cast<const T*>(Op::tensor(problem, i).data) + row_of_vector(v) * kVectorRowClasses,
                          problem.outer - row_of_vector(v));
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t row = row_of_vector(v), left = problem.outer - row;
    if (left <= 0) return;
    float z[kElements] = {}, numbers[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const RowCoord coord{row + r, 0, row + r, r < left};
      Op::template run<T>(problem, VectorRowReader<Op, T>{problem, coord, x[v], z, numbers, r});
    }
    if constexpr (Op::kReduces) {
      if (left >= kRows)
        Op::template write_numbers<T>(problem, row, numbers);
      else
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float number[1] = {numbers[r]};
          if (r < left) Op::template write_numbers<T>(problem, row + r, number);
        }
    } else {
      T* const to = static_cast<T*>(Op::result(problem).data) + row * kVectorRowClasses;
      if (left >= kRows)
        store_streaming(to, pack<T>(z));
      else
#pragma unroll
        for (int e = 0; e < kElements; ++e)
          if (e < left * kVectorRowClasses) to[e] = narrow<T>(z[e]);
    }
  }
}

// Queues the kernel; false if the rows are not of this kind.
template <class Op, class T, class R>
bool launch_vector_rows(const RowProblem& problem, cudaStream_t stream) {
  if constexpr (sizeof(R) == sizeof(T) && !Op::kRare && !Op::kTargets) {
    const auto is_plain = [&](const auto& view) {
      return (problem.outer == 1 || view.stride[0] == kVectorRowClasses) && misalignment(view.data) == 0;
    };
    const int64_t ctas = ceil_div(problem.outer, int64_t{kVectorRowThreads} * kVectorRowVectors<Op, T> * kRowsPerVector<T>);
    if (problem.classes != kVectorRowClasses || problem.inner != 1 || ctas > 0x7fffffff) return false;
    for (int i = 0; i < Op::kTensors; ++i)
      if (!is_plain(Op::tensor(problem, i))) return false;
    if constexpr (!Op::kReduces)
      if (!is_plain(Op::result(problem))) return false;
    launch_dependent(vector_row_kernel<Op, T>, problem, static_cast<unsigned>(ctas), kVectorRowThreads, stream);
    return true;
  }
  return false;
}

}  // namespace flash_online::cuda
