// The k largest probabilities of a softmax on CUDA. One pass over the row finds its maximum and sum and its k largest elements
// (Milakov and Gimelshein, arXiv 1805.02867, section 4).
//
//   k <= 32, contiguous rows   candidates above a threshold are collected in shared memory (topk_candidates.cuh)
//     up to 2048 vectors         topk_register_kernel: a CTA holds its row in registers
//     longer                     topk_pipelined_kernel: CTAs stream rows through a pipeline, long rows in slices;
//                                topk_merge_kernel merges the slices' results. The threshold is raised whenever the elements
//                                seen have doubled.
//   else                       topk_sort_kernel: a CTA collects keys in shared memory and sorts them when there are 4096. For
//                              k > 2048 it reads the row once for every 2048 of the k, and looks only for smaller keys than
//                              the last one found.
#include "../hw/pdl.cuh"
#include "dispatch.cuh"
#include "loops/pipeline.cuh"
#include "rows.h"
#include "topk_candidates.cuh"

namespace flash_online::cuda {

namespace {

// Writes the results of a row; each lane of a warp has one key.
template <class R>
__device__ __forceinline__ void write_topk(const RowProblem& problem, const RowCoord& coord, const RowState& state, Key key) {
  const int lane = threadIdx.x % kWarpSize;
  RowState denominator = state;
  const bool mine = lane < problem.k;
  if (problem.renormalize) {
    RowState own;
    if (mine) own.absorb(element_of(key));
    denominator = merge_lanes<kWarpSize>(own);
  }
  if (!mine) return;
  const float p = denominator.weight(element_of(key)) * denominator.inverse_sum();
  row_of<R>(problem.result, coord).set(lane, p);
  const View3<int64_t*>& indices = problem.indices;
  indices.data[coord.outer * indices.stride[0] + lane * indices.stride[1] + coord.inner * indices.stride[2]] = index_of(key);
}

// ---- k <= 32, rows in registers

// Leaves the k largest keys of a row in candidates.best, and returns the row's maximum and sum to the first warp. Each thread
// holds kVectors vectors.
template <int kThreads, int kVectors, class T>
__device__ __forceinline__ RowState search(Candidates<kThreads>& candidates, const T* row, int classes, int k) {
  constexpr int kElements = kPerVector<T>;
  const int thread = threadIdx.x, warp = thread / kWarpSize;
  if (thread == 0) candidates.count = 0;
  uint4 v[kVectors];
  load_row<T>(v, row, thread, kThreads, classes, lowest_vector<T>());
  float alternate_max[2] = {-INFINITY, -INFINITY};  // of the even and of the odd vectors: the groups, if there is one warp
#pragma unroll
  for (int i = 0; i < kVectors; ++i) alternate_max[i % 2] = fmaxf(alternate_max[i % 2], max_of<T>(v[i]));
  const float max = fmaxf(alternate_max[0], alternate_max[1]);
  if constexpr (kThreads == kWarpSize) {
    candidates.group_max[thread] = alternate_max[0];
    candidates.group_max[kWarpSize + thread] = alternate_max[1];
  } else {
    store_group_maxima(candidates, max);
  }
  __syncthreads();
  if (warp == 0) set_first_threshold(candidates, k);
  RowState state;
  state.raise_max(max);
  add_weights<T>(state, v);
  __syncthreads();
  const AboveThreshold above(candidates.threshold, k);
  const bool nan = state.sum != state.sum;  // a NaN does not show in a maximum
  const auto first_class_of = [&](int i) { return (thread + i * kThreads) * kElements; };
  unsigned with_candidates = 0;  // a bit per vector
  if (max > above.threshold || nan || first_class_of(0) < above.always) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      with_candidates |= max_of<T>(v[i]) > above.threshold || nan || first_class_of(i) < above.always ? 1u << i : 0;
  }
  for (; with_candidates != 0; with_candidates &= with_candidates - 1) {
    const int i = __ffs(static_cast<int>(with_candidates)) - 1;
    push_candidates<T>(candidates, select_vector(v, i), first_class_of(i), classes, 0, above);
  }
  __syncthreads();
  const int count = candidates.count;
  if (count <= Candidates<kThreads>::kCapacity) {
    rank_candidates(candidates, count, k);
  } else {
    __syncthreads();
    if (thread == 0) candidates.count = 0;
    __syncthreads();
    push_all_candidates(candidates, row, 0, classes, 0, above, k);
  }
  return merge_states(candidates, state);
}

// One CTA per row.
template <class T, class R, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads, (kVectors > 8 ? 576 : 1024) / kThreads)
    topk_register_kernel(const __grid_constant__ RowProblem problem) {
  __shared__ Candidates<kThreads> candidates;
  launch_dependents();
  grid_dependency_wait();
  const RowCoord coord = row_coord(problem, blockIdx.x);
  const T* row = row_of<const T>(problem.input, coord).data;
  const RowState state =
      search<kThreads, kVectors>(candidates, row, static_cast<int>(problem.classes), static_cast<int>(problem.k));
  if (threadIdx.x < kWarpSize) write_topk<R>(problem, coord, state, candidates.best[threadIdx.x]);
}

// ---- k <= 32, longer rows

// Measured: CTAs of 64 threads with twice the vectors are 3 to 4 % slower; three stages and fewer CTAs are 2 % faster, but 26 %
// slower for ten rows of 10^6 classes.
constexpr int kPipelineThreads = 128, kPipelineVectors = 8, kPipelineStages = 2, kPipelineCtasPerSm = 6;
template <class T>
using TopkPipeline = PipelineShape<T, kPipelineThreads, kPipelineVectors, kPipelineStages>;

template <class T>
SlicedProblem topk_slices(const RowProblem& problem, Type<T>) {
  // Up to 8 chunks a row stays whole: to write a slice's keys and to merge them would take too much of the time of a short row.
  return cut_into_slices(problem, TopkPipeline<T>::kClasses, 8, 4, 128);
}
SlicedProblem topk_slices(const RowProblem& problem) {
  return problem.dtype == DType::kFloat32 ? topk_slices(problem, Type<float>{}) : topk_slices(problem, Type<__half>{});
}

// The workspace has 32 keys per slice, then a state per slice.
struct SliceState {
  float max, sum;
};
int64_t topk_workspace_bytes(int64_t slices) {
  return slices * static_cast<int64_t>(sizeof(SliceState) + kWarpSize * sizeof(Key));
}
__device__ __forceinline__ Key* slice_keys(const SlicedProblem& sliced) { return static_cast<Key*>(sliced.problem.workspace); }
__device__ __forceinline__ SliceState* slice_states(const SlicedProblem& sliced) {
  return reinterpret_cast<SliceState*>(slice_keys(sliced) + sliced.total_slices * kWarpSize);
}

// Called if a chunk has more candidates than there is room for, as with equal elements. Searches the chunk again, one element
// per thread at a time, and keeps the k largest. The candidates of earlier chunks are still stored, before this chunk's.
// The caller has barriers before and after.
template <class T>
__device__ __forceinline__ void search_chunk_again(Candidates<kPipelineThreads>& candidates, const Slice<T>& slice, int begin,
                                                   const AboveThreshold& above, int k) {
  constexpr int kCapacity = Candidates<kPipelineThreads>::kCapacity, kClasses = TopkPipeline<T>::kClasses;
  int before = 0;  // candidates of earlier chunks
  for (int i = threadIdx.x; i < kCapacity; i += kPipelineThreads)
    before +=
        __syncthreads_count(index_of(candidates.keys[i]) - static_cast<unsigned>(slice.first) < static_cast<unsigned>(begin));
  if (threadIdx.x == 0) candidates.count = before;
  __syncthreads();
  const int end = slice.classes - begin < kClasses ? slice.classes : begin + kClasses;
  push_all_candidates(candidates, slice.data, begin, end, static_cast<unsigned>(slice.first), above, k);
}

// Ranks the candidates after the `last` chunk of a slice; after another chunk, drops all but the k largest and raises the
// threshold. The caller has a barrier before.
template <class T>
__device__ __forceinline__ void reduce_candidates(Candidates<kPipelineThreads>& candidates, const Slice<T>& slice, int begin,
                                                  bool last, AboveThreshold& above, int k) {
  const int count = candidates.count;
  if (count > Candidates<kPipelineThreads>::kCapacity) {
    search_chunk_again(candidates, slice, begin, above, k);
    above = AboveThreshold(candidates.threshold, k);
  } else if (last) {
    rank_candidates(candidates, count, k);
  } else {
    select_best(candidates, count, k);
    __syncthreads();
    above = AboveThreshold(candidates.threshold, k);
  }
}

// Persistent CTAs take slice after slice. All threads consume a chunk together; one thread of the last warp is the producer,
// because the first warp writes results meanwhile.
template <class T, class R>
__global__ void __launch_bounds__(kPipelineThreads, kPipelineCtasPerSm)
    topk_pipelined_kernel(const __grid_constant__ SlicedProblem sliced) {
  using Shape = TopkPipeline<T>;
  using Chunk = PipelineChunk<Shape>;
  constexpr int kMany = Candidates<kPipelineThreads>::kCapacity / 2;  // candidates from which on the threshold is raised
  extern __shared__ __align__(128) uint4 all_shared[];
  __shared__ Candidates<kPipelineThreads> candidates;
  __shared__ uint64_t full[kPipelineStages];
  const RowProblem& problem = sliced.problem;
  const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize, k = static_cast<int>(problem.k);
  const bool is_producer = kHasBulkCopy && thread == kPipelineThreads - kWarpSize;
  ChunkLoader<Shape> loader(sliced, all_shared, full, blockIdx.x, gridDim.x);
  launch_dependents();
  grid_dependency_wait();
  if constexpr (kHasBulkCopy) {
    if (is_producer) {
      loader.init_barriers();
      loader.load_all_stages();
    }
    __syncthreads();
  }
  PipelineState<kPipelineStages> pipeline;
  const unsigned all = static_cast<unsigned>(sliced.total_slices);
  for (unsigned index = blockIdx.x; index < all; index += gridDim.x) {
    const Slice<T> slice(sliced, index);
    const unsigned offset = static_cast<unsigned>(slice.first);
    RowState state;
    AboveThreshold above(0, k);
#pragma unroll 1
    for (int begin = 0, n = 1; begin < slice.classes; begin += Shape::kClasses, ++n) {
      const Chunk chunk{all_shared + pipeline.stage * Shape::kStageVectors, slice.data + begin, slice.classes - begin};
      uint4 v[kPipelineVectors];
      if constexpr (kHasBulkCopy) wait(&full[pipeline.stage], pipeline.parity);
      chunk.read(v);
      float vector_max[kPipelineVectors], thread_max = -INFINITY;
#pragma unroll
      for (int i = 0; i < kPipelineVectors; ++i) vector_max[i] = max_of<T>(v[i]), thread_max = fmaxf(thread_max, vector_max[i]);
      // The first chunk sets the first threshold; meanwhile the other warps exponentiate.
      if (begin == 0) {
        if (thread == 0) candidates.count = 0;
        store_group_maxima(candidates, thread_max);
        __syncthreads();
        if (warp == 0) set_first_threshold(candidates, k);
      }
      state.raise_max_lazily(kRescaleThreshold, thread_max);
      add_weights<T>(state, v);
      if (begin == 0) {
        __syncthreads();
        above = AboveThreshold(candidates.threshold, k);
      }
      // Collect the chunk's candidates.
      const bool nan = state.sum != state.sum;  // a NaN does not show in a maximum
      unsigned with_candidates = 0;  // a bit per vector
      if (thread_max > above.threshold || nan || begin < above.always) {
#pragma unroll
        for (int i = 0; i < kPipelineVectors; ++i)
          with_candidates |=
              vector_max[i] > above.threshold || nan || begin + Chunk::first_class_of(i) < above.always ? 1u << i : 0;
      }
      int found = 0;
      for (; with_candidates != 0; with_candidates &= with_candidates - 1) {
        const int i = __ffs(static_cast<int>(with_candidates)) - 1, c = begin + Chunk::first_class_of(i);
        found = max(found, push_candidates<T>(candidates, chunk.select(v, i), c, slice.classes, offset, above));
      }
      // After this barrier the stage has been read and can be refilled.
      const bool many = __syncthreads_or(found > kMany);
      if constexpr (kHasBulkCopy) {
        if (is_producer) loader.load(pipeline.stage);
        pipeline.advance();
      }
      // Raise the threshold, or rank the slice's candidates at its end.
      const bool last = begin + Shape::kClasses >= slice.classes, doubled = n > 1 && (n & (n - 1)) == 0;
      if (!last && !many && !doubled) continue;
      reduce_candidates(candidates, slice, begin, last, above, k);
    }
    state = merge_states(candidates, state);
    if (warp != 0) continue;
    if (sliced.slices_per_row == 1) {
      write_topk<R>(problem, slice.coord, state, candidates.best[lane]);
    } else {
      slice_keys(sliced)[int64_t{index} * kWarpSize + lane] = lane < k ? candidates.best[lane] : kNoKey;
      if (lane == 0) slice_states(sliced)[index] = {state.max, state.sum};
    }
  }
}

// ---- k <= 32, merging the slices of a row

__device__ __forceinline__ Key exchange(Key key, int step, bool keep_larger) {
  const Key other = __shfl_xor_sync(~0u, key, step);
  return (key > other) == keep_larger ? key : other;
}

// The 32 largest keys of two lists of 32. A list has one key per lane, descending.
__device__ __forceinline__ Key merge_sorted(Key a, Key b) {
  const int lane = threadIdx.x % kWarpSize;
  const Key reversed = __shfl_sync(~0u, b, kWarpSize - 1 - lane);
  Key key = a > reversed ? a : reversed;  // a bitonic sequence
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) key = exchange(key, step, (lane & step) == 0);
  return key;
}

constexpr int kMergeThreads = 256, kMergeWarps = kMergeThreads / kWarpSize;

// One CTA per row.
template <class R>
__global__ void __launch_bounds__(kMergeThreads) topk_merge_kernel(const __grid_constant__ SlicedProblem sliced) {
  __shared__ Key merged[kMergeWarps][kWarpSize];
  const int64_t first = int64_t{blockIdx.x} * sliced.slices_per_row;
  const Key* lists = slice_keys(sliced) + first * kWarpSize;
  const SliceState* states = slice_states(sliced) + first;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, slices = static_cast<int>(sliced.slices_per_row);
  grid_dependency_wait();
  RowState state;
  for (int i = threadIdx.x; i < slices; i += kMergeThreads) state.merge(RowState{states[i].max, states[i].sum});
  Key key = kNoKey;
#pragma unroll 4
  for (int i = warp; i < slices; i += kMergeWarps) key = merge_sorted(key, lists[i * kWarpSize + lane]);
  state = RegisterRowGroup<kMergeThreads, kMergeThreads>::merge_warps<0>(merge_lanes<kWarpSize>(state));
#pragma unroll
  for (int half = kMergeWarps / 2; half > 0; half /= 2) {
    if (warp >= half && warp < 2 * half) merged[warp][lane] = key;
    __syncthreads();
    if (warp < half) key = merge_sorted(key, merged[warp + half][lane]);
  }
  if (warp == 0) write_topk<R>(sliced.problem, row_coord(sliced.problem, blockIdx.x), state, key);
}

// ---- any k, any strides

constexpr int kSortThreads = 512, kSortKeys = 4096, kSortKept = 2048;

// Sorts kSortKeys keys in shared memory by a CTA, descending.
__device__ __forceinline__ void sort_keys(Key* keys) {
  for (int size = 2; size <= kSortKeys; size *= 2)
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < kSortKeys / 2; i += kSortThreads) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const Key a = keys[low], b = keys[high];
        if ((a < b) == ((low & size) == 0)) keys[low] = b, keys[high] = a;
      }
    }
  __syncthreads();
}

// One CTA per row. A pass finds the next `wanted` <= kSortKept keys; with renormalize, all passes run twice, first to sum the
// weights of the k and then to write.
template <class T, class R>
__global__ void __launch_bounds__(kSortThreads, 2) topk_sort_kernel(const __grid_constant__ RowProblem problem) {
  __shared__ Key keys[kSortKeys];
  __shared__ int count;
  for (int64_t index = blockIdx.x; index < problem.outer * problem.inner; index += gridDim.x) {
    const RowCoord coord = row_coord_by_division(problem, index);
    const StridedRow<CtaPerRow, T> reader(problem, problem.input, coord);
    const Row<const T> row = row_of<const T>(problem.input, coord);
    RowState denominator;
    if (!problem.renormalize) denominator = reader.state();
    Key last_found = kAboveAllKeys;  // keys from this one on were found by earlier passes
    const auto pass = [&](int64_t done, bool write) {
      const int64_t wanted = problem.k - done < kSortKept ? problem.k - done : kSortKept;
      Key threshold = kNoKey;  // the wanted-th largest key so far
      __syncthreads();
      for (int i = threadIdx.x; i < kSortKeys; i += kSortThreads) keys[i] = kNoKey;
      if (threadIdx.x == 0) count = 0;
      __syncthreads();
      const auto keep_wanted = [&] {
        sort_keys(keys);
        threshold = keys[wanted - 1];
        __syncthreads();
        for (int i = threadIdx.x; i < kSortKeys; i += kSortThreads)
          if (i >= wanted) keys[i] = kNoKey;
        if (threadIdx.x == 0) count = static_cast<int>(wanted);
        __syncthreads();
      };
      for (int64_t begin = 0; begin < problem.classes; begin += kSortThreads) {
        const int64_t c = begin + threadIdx.x;
        const Key key = c < problem.classes ? key_of(row[c], static_cast<unsigned>(c)) : kNoKey;
        const bool has = key > threshold && key < last_found;
        const int more = __syncthreads_count(has);
        if (more == 0) continue;
        if (count + more > kSortKeys) keep_wanted();  // all threads read the same count: it changes only between barriers
        __syncthreads();
        if (has) keys[atomicAdd(&count, 1)] = key;
        __syncthreads();
      }
      keep_wanted();
      last_found = keys[wanted - 1];
      if (problem.renormalize && !write) {
        RowState own;
        for (int64_t j = threadIdx.x; j < wanted; j += kSortThreads) own.absorb(element_of(keys[j]));
        denominator.merge(CtaPerRow::merge(own));
      }
      if (!write) return;
      const float scale = denominator.inverse_sum();
      const Row<R> result = row_of<R>(problem.result, coord);
      const View3<int64_t*>& indices = problem.indices;
      int64_t* row_indices = indices.data + coord.outer * indices.stride[0] + coord.inner * indices.stride[2];
      for (int64_t j = threadIdx.x; j < wanted; j += kSortThreads) {
        result.set(done + j, denominator.weight(element_of(keys[j])) * scale);
        row_indices[(done + j) * indices.stride[1]] = index_of(keys[j]);
      }
    };
    if (problem.renormalize) {
      for (int64_t done = 0; done < problem.k; done += kSortKept) pass(done, false);
      last_found = kAboveAllKeys;
    }
    for (int64_t done = 0; done < problem.k; done += kSortKept) pass(done, true);
  }
}

// ---- launches

// True if a problem can be searched by candidates.
bool uses_candidates(const RowProblem& problem) {
  return problem.k <= kMaxSelected && classes_are_contiguous(problem, {problem.input.stride[1]}) &&
         topk_slices(problem).is_countable();
}

template <class T, class R>
void launch_topk(const RowProblem& problem, cudaStream_t stream) {
  const int64_t rows = problem.outer * problem.inner, vectors = ceil_div(problem.classes, kPerVector<T>);
  const auto launch = [&]<int kThreads, int kVectors>() {
    launch_dependent(topk_register_kernel<T, R, kThreads, kVectors>, problem, static_cast<unsigned>(rows), kThreads, stream);
  };
  if (!uses_candidates(problem)) {
    topk_sort_kernel<T, R><<<grid_for(rows, 16), kSortThreads, 0, stream>>>(problem);
  } else if (vectors <= 32 * 4) {
    launch.template operator()<32, 4>();
  } else if (vectors <= 32 * 8) {
    launch.template operator()<32, 8>();
  } else if (vectors <= 32 * 16) {
    launch.template operator()<32, 16>();
  } else if (vectors <= 64 * 16) {
    launch.template operator()<64, 16>();
  } else if (vectors <= 128 * 16) {
    launch.template operator()<128, 16>();
  } else {
    static PersistentKernel kernel(topk_pipelined_kernel<T, R>, kPipelineThreads, TopkPipeline<T>::kBytes);
    const SlicedProblem sliced = topk_slices(problem);
    kernel.launch_all(sliced, sliced.total_slices, true, stream);
    if (sliced.slices_per_row > 1)
      launch_dependent(topk_merge_kernel<R>, sliced, static_cast<unsigned>(rows), kMergeThreads, stream);
  }
  check_launch("topk_softmax");
}

}  // namespace

int64_t topk_workspace(const RowProblem& problem) {
  if (!uses_candidates(problem)) return 0;
  const SlicedProblem sliced = topk_slices(problem);
  return sliced.slices_per_row > 1 ? topk_workspace_bytes(sliced.total_slices) : 0;
}

void topk_softmax(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem) || problem.k == 0) return;
  visit_types(problem, "topk_softmax", [&]<class T, class R>(Type<T>, Type<R>) { launch_topk<T, R>(problem, stream); });
}

}  // namespace flash_online::cuda
