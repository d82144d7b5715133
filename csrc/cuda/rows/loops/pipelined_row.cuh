// The states of rows too long for a block's registers, their classes side by side, where nothing of a row's size is written:
// each warp takes piece after piece through a ring of its own, and waits for no other warp.
#pragma once

#include "../../hw/pdl.cuh"
#include "pipeline.cuh"
#include "split_row.cuh"

namespace flash_online::cuda {

constexpr int kRowRingWarps = 4, kRowRingBlocks = 4;
template <class T>
using RowShape = RingShape<T, kWarpSize, 8, 3>;

// Whether the current device has what a ring needs.
inline bool copies_bytes() { return device_attribute<cudaDevAttrComputeCapabilityMajor>() >= 9; }

template <class T>
PiecedRows row_pieces(const RowProblem& problem, Type<T>) {
  return pieced(problem, RowShape<T>::kClasses, 1, 4, 256);
}

// A warp's ring, from its own side.
template <class Shape>
class RowRing {
  using T = typename Shape::T;

 public:
  __device__ __forceinline__ RowRing(const PiecedRows& rows, uint4* stages, uint64_t* full, unsigned first, unsigned step)
      : stages_(stages), full_(full), loader_(rows, stages, full, first, step) {
    if (threadIdx.x % kWarpSize == 0) {
      loader_.begin();
      loader_.fill();
    }
    __syncwarp();
  }
  // The next chunk of a piece, of which so many classes are left.
  __device__ __forceinline__ void read(uint4 (&v)[Shape::kVectors], const T* data, int classes) {
    const RingChunk<Shape> chunk{stages_ + at_.stage * Shape::kStageVectors, data, classes};
    wait(&full_[at_.stage], at_.parity);
    chunk.read(v);
    __syncwarp();  // all have read
    if (threadIdx.x % kWarpSize == 0) loader_.load(at_.stage);
    at_.advance();
  }

 private:
  uint4* stages_;
  uint64_t* full_;
  PipelineState<Shape::kStages> at_;
  RingLoader<Shape> loader_;
};

// Leaves each piece's part of its row's state in the workspace.
template <class T>
__global__ void __launch_bounds__(kRowRingWarps* kWarpSize, kRowRingBlocks)
    ring_part_kernel(const __grid_constant__ PiecedRows rows) {
  if constexpr (kHasBulkCopy) {
    using Shape = RowShape<T>;
    extern __shared__ __align__(128) uint4 all_shared[];
    __shared__ uint64_t full[kRowRingWarps][Shape::kStages];
    launch_dependents();
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const unsigned first = warp * gridDim.x + blockIdx.x, step = gridDim.x * kRowRingWarps;
    RowRing<Shape> ring(rows, all_shared + warp * (Shape::kBytes / kVectorBytes), full[warp], first, step);
    const unsigned all = static_cast<unsigned>(rows.all_pieces);
    for (unsigned number = first; number < all; number += step) {
      const Piece<T> piece(rows, number);
      RowState state;
#pragma unroll 1
      for (int begin = 0; begin < piece.classes; begin += Shape::kClasses) {
        uint4 v[Shape::kVectors];
        ring.read(v, piece.data + begin, piece.classes - begin);
        float max = -INFINITY;
#pragma unroll
        for (int i = 0; i < Shape::kVectors; ++i) max = fmaxf(max, max_of<T>(v[i]));
        state.raise_max_lazily(kSlack, max);
        add_weights<T>(state, v);
      }
      state = merge_lanes<kWarpSize>(state);
      float nan = state.sum != state.sum ? 1.0f : 0.0f;
      if (state.max == INFINITY) {  // rare: see settled()
        nan = 0;
        for (int c = lane; c < piece.classes; c += kWarpSize) {
          const float x = widen(piece.data[c]);
          nan += x != x ? 1.0f : 0.0f;
        }
        nan = lanes_sum<kWarpSize>(nan);
      }
      if (lane == 0) static_cast<Partial*>(rows.problem.workspace)[number] = {state.max, state.sum, 0, nan};
    }
  }
}

template <class T>
void launch_ring_part(const PiecedRows& rows, cudaStream_t stream) {
  static PersistentKernel kernel(ring_part_kernel<T>, kRowRingWarps * kWarpSize, kRowRingWarps * RowShape<T>::kBytes);
  kernel.launch_all(rows, (rows.all_pieces + kRowRingWarps - 1) / kRowRingWarps, false, stream);
}

}  // namespace flash_online::cuda
