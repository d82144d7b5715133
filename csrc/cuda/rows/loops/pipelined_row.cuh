// The maximum and sum of contiguous rows that are too long for registers, where the operator needs nothing else (logsumexp, a
// loss). Each warp streams slices of rows through a pipeline of its own and waits for no other warp. It leaves a Partial per
// slice, which finish_kernel (dispatch.cuh) merges.
#pragma once

#include "../../hw/pdl.cuh"
#include "multi_cta_row.cuh"
#include "pipeline.cuh"

namespace flash_online::cuda {

constexpr int kPipelinedWarps = 4, kPipelinedCtasPerSm = 4;
template <class T>
using WarpPipelineShape = PipelineShape<T, kWarpSize, 8, 3>;

// True if the current device has bulk copies, which a pipeline needs; kHasBulkCopy is the same in device code.
inline bool has_bulk_copy() { return device_attribute<cudaDevAttrComputeCapabilityMajor>() >= 9; }

template <class T>
SlicedProblem pipelined_row_slices(const RowProblem& problem, Type<T>) {
  return cut_into_slices(problem, WarpPipelineShape<T>::kClasses, 1, 4, 256);
}

// The pipeline of one warp: lane 0 is the producer, and all lanes are consumers.
template <class Shape>
class WarpPipeline {
  using T = typename Shape::T;

 public:
  __device__ __forceinline__ WarpPipeline(const SlicedProblem& sliced, uint4* stages, uint64_t* full, unsigned first,
                                          unsigned step)
      : stages_(stages), full_(full), loader_(sliced, stages, full, first, step) {
    if (threadIdx.x % kWarpSize == 0) {
      loader_.init_barriers();
      loader_.load_all_stages();
    }
    __syncwarp();
  }
  // Reads the next chunk and starts the copy of another. *data: its first element, `classes` before the end of its slice.
  __device__ __forceinline__ void read(uint4 (&v)[Shape::kVectors], const T* data, int classes) {
    const PipelineChunk<Shape> chunk{stages_ + state_.stage * Shape::kStageVectors, data, classes};
    wait(&full_[state_.stage], state_.parity);
    chunk.read(v);
    __syncwarp();  // all lanes have read the stage
    if (threadIdx.x % kWarpSize == 0) loader_.load(state_.stage);
    state_.advance();
  }

 private:
  uint4* stages_;
  uint64_t* full_;
  PipelineState<Shape::kStages> state_;
  ChunkLoader<Shape> loader_;
};

// Stores the Partial of each slice in the workspace; State is RowState or RowEntropyState.
template <class T, class State>
__global__ void __launch_bounds__(kPipelinedWarps* kWarpSize, kPipelinedCtasPerSm)
    pipelined_partial_kernel(const __grid_constant__ SlicedProblem sliced) {
  if constexpr (kHasBulkCopy) {
    using Shape = WarpPipelineShape<T>;
    extern __shared__ __align__(128) uint4 all_shared[];
    __shared__ uint64_t full[kPipelinedWarps][Shape::kStages];
    launch_dependents();
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const unsigned first = warp * gridDim.x + blockIdx.x, step = gridDim.x * kPipelinedWarps;
    WarpPipeline<Shape> pipeline(sliced, all_shared + warp * (Shape::kBytes / kVectorBytes), full[warp], first, step);
    const unsigned all = static_cast<unsigned>(sliced.total_slices);
    for (unsigned index = first; index < all; index += step) {
      const Slice<T> slice(sliced, index);
      State state;
#pragma unroll 1
      for (int begin = 0; begin < slice.classes; begin += Shape::kClasses) {
        uint4 v[Shape::kVectors];
        pipeline.read(v, slice.data + begin, slice.classes - begin);
        float max = -INFINITY;
#pragma unroll
        for (int i = 0; i < Shape::kVectors; ++i) max = fmaxf(max, max_of<T>(v[i]));
        state.raise_max_lazily(kRescaleThreshold, max);
        add_weights<T>(state, v);
      }
      state = merge_lanes<kWarpSize>(state);
      float nan = state.sum != state.sum ? 1.0f : 0.0f;
      if (state.max == INFINITY) {  // rare: resolve_infinity has to know whether there is a NaN as well
        nan = 0;
        for (int c = lane; c < slice.classes; c += kWarpSize) {
          const float x = widen(slice.data[c]);
          nan += x != x ? 1.0f : 0.0f;
        }
        nan = lanes_sum<kWarpSize>(nan);
      }
      float products = 0;
      if constexpr (std::is_same_v<State, RowEntropyState>) products = state.products;
      if (lane == 0) static_cast<Partial*>(sliced.problem.workspace)[index] = {state.max, state.sum, products, nan};
    }
  }
}

template <class T, class State>
void launch_pipelined_partial(const SlicedProblem& sliced, cudaStream_t stream) {
  static PersistentKernel kernel(pipelined_partial_kernel<T, State>, kPipelinedWarps * kWarpSize,
                                 kPipelinedWarps * WarpPipelineShape<T>::kBytes);
  kernel.launch_all(sliced, ceil_div(sliced.total_slices, kPipelinedWarps), false, stream);
}

}  // namespace flash_online::cuda
