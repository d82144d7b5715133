// A step of decoding over latent keys on Hopper (compute capability 9.0): up to 64 rows per tile of keys, by wgmma. latent.cuh
// is the kernel for other GPUs; docs/design/decode.md draws both.
//
// A CTA takes its share of the line of work (line.cuh) in tiles of 64 keys. Shared memory holds two; one warpgroup loads them.
// Another makes scores and weights, and multiplies these by three eighths of the values' columns; a third one by the rest. A
// tile arrives in groups of columns and is released in two halves, so that the products of keys run while the tile arrives, and
// the next but one tile starts to arrive before all of this one's values are multiplied.
#pragma once

#include "../../hw/mbarrier.cuh"
#include "../../hw/named_barrier.cuh"
#include "../../hw/setmaxnreg.cuh"
#include "../../hw/tma.cuh"
#include "../sm90/gemm.cuh"
#include "latent.cuh"

namespace flash_online::cuda {

constexpr int kWarpgroupSize = 4 * kWarpSize, kLatentSm90Threads = 3 * kWarpgroupSize;
constexpr int kLatentSm90Tile = 64, kLatentSm90Rows = 64, kLatentSm90Stages = 2;
constexpr int kLatentSm90Boxes = 9, kLatentSm90BoxBytes = kLatentSm90Tile * 128;  // of 64 columns
constexpr int kWeightBox = 8;  // the last box has no values: weights lie there once its scores are made
constexpr int kFirstOthersBox = 3;  // of the values: those before it are multiplied where weights are made

// The groups of boxes of a tile that arrive together, in this order. The third group and what follows it are the half of the
// tile that is released last; of the other half each warpgroup multiplies two boxes.
constexpr int kLatentSm90Groups = 5, kLatentSm90FirstHalf = 2;
constexpr int latent_group_boxes(int group) { return group == 4 ? 1 : 2; }
constexpr int latent_group_box(int group, int n) {
  constexpr int kBoxes[kLatentSm90Groups][2] = {{0, 1}, {3, 4}, {2, 5}, {6, 7}, {8, 8}};
  return kBoxes[group][n];
}

// A warp's rows of an item, of the sixteen of a product: if there is room, its lanes have one row each, not two.
__device__ __forceinline__ int latent_rows_per_warp(const DecodeShape& shape) { return shape.tile_rows <= 32 ? 8 : 16; }

struct LatentSm90Shared {
  char stage[kLatentSm90Stages][kLatentSm90Boxes][kLatentSm90BoxBytes], query[kLatentSm90Boxes][kLatentSm90BoxBytes];
  float factor[kLatentSm90Stages][kLatentSm90Rows];  // of the outputs before a tile's are added
  float2 state[2][kLatentSm90Rows];  // at the end of a part: maximum and sum
  uint64_t full[kLatentSm90Stages][kLatentSm90Groups], empty[kLatentSm90Stages][2];
  uint64_t weights_full[kLatentSm90Stages];
  uint64_t query_full, query_empty;
};

// The warpgroup that loads queries and keys.
template <class Element>
class LatentSm90Loads : public DecodeTiles<kLatentSm90Tile, DecodeLoaders::kWarpgroup> {
 public:
  __device__ __forceinline__ LatentSm90Loads(const DecodeArguments& arguments, LatentSm90Shared& shared)
      : DecodeTiles(arguments.problem, arguments.kv_splits, arguments.shape, arguments.whole_items),
        keys_(arguments.keys),
        shared_(shared) {}

  // `walk` has reached the first part.
  __device__ __forceinline__ void run(const DecodeWalk& walk) {
    begin(walk);
    PipelineState<kLatentSm90Stages> tile;
    unsigned query_parity = 1;
    int part = -1;  // what was left of the share when it began
#pragma unroll 1
    while (!done()) {
      if (walk_.left != part) {
        part = walk_.left;
        wait(&shared_.query_empty, query_parity);
        query_parity ^= 1;
        load_queries();
      }
      load_keys(tile);
      tile.advance();
      next_tile();
    }
    cp_async_commit();
    cp_async_wait<0>();
  }

 private:
  // A warp copies four rows at once, 128 bytes of each: whole lines of memory.
  static constexpr int kRowsAtOnce = 4, kCopies = kLatentSm90Tile / 4 / kRowsAtOnce;
  __device__ __forceinline__ static int chunk() { return static_cast<int>(threadIdx.x) % 8; }
  __device__ __forceinline__ static int row_of_lane() { return lane() / 8; }
  __device__ __forceinline__ static int first_row() { return static_cast<int>(threadIdx.x) / kWarpSize % 4 * 16; }

  // The rows of queries that exist. The results of others are not looked at.
  __device__ __forceinline__ void load_queries() {
    const ConstView4& view = problem_.query;
    const int2 tile_and_head = walk_.s.tile_and_head(shape_, walk_.item);
    const int first = tile_and_head.x * shape_.tile_rows, group = shape_.group,
              rows = min(walk_.s.queries * group - first, shape_.tile_rows),
              bytes = static_cast<int>(problem_.head_dim) * 2 - chunk() * kVectorBytes;
    const Element* const data = static_cast<const Element*>(view.data) + walk_.n * view.stride[0] +
                                int64_t{tile_and_head.y * group} * view.stride[1] + walk_.s.queries_begin * view.stride[2];
    const int warp_rows = latent_rows_per_warp(shape_), begin = first_row() / 16 * warp_rows;
#pragma unroll 1
    for (int n = row_of_lane(); n < min(warp_rows, rows - begin); n += kRowsAtOnce) {
      const int row = begin + n;
      const int query = static_cast<int>(static_cast<unsigned>(first + row) / static_cast<unsigned>(group));
      const char* const from =
          reinterpret_cast<const char*>(data + query * view.stride[2] + (first + row - query * group) * view.stride[1]) +
          chunk() * kVectorBytes;
      char* const to = shared_.query[0] + box_offset(first_row() + n, chunk());
#pragma unroll
      for (int box = 0; box < kLatentSm90Boxes; ++box)
        cp_async(reinterpret_cast<uint4*>(to + box * kLatentSm90BoxBytes), bytes > box * 128 ? from + box * 128 : from,
                 bytes > box * 128 ? kVectorBytes : 0);
    }
    cp_async_arrive(&shared_.query_full);
  }

  __device__ __forceinline__ void load_keys(const PipelineState<kLatentSm90Stages>& tile) {
    check_block();
    const char* const data = keys_.data + key_head_ * keys_.head_bytes + chunk() * kVectorBytes;
    const unsigned vectors = vectors_before(keys_);
    const char* from[kCopies];
    int bytes[kCopies];
    unsigned to[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = i * kRowsAtOnce + row_of_lane();
      from[i] = data + uint64_t{__shfl_sync(~0u, vectors, row)} * kVectorBytes;
      bytes[i] = __shfl_sync(~0u, block_, row) < 0 ? 0 : keys_.row_bytes - chunk() * kVectorBytes;  // zeros follow
      to[i] = box_offset(first_row() + row, chunk());
    }
    char* const stage = shared_.stage[tile.stage][0];
#pragma unroll
    for (int group = 0; group < kLatentSm90Groups; ++group) {
      if (group % 2 == 0 && group < 4) wait(&shared_.empty[tile.stage][group / 2], tile.parity ^ 1);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (n >= latent_group_boxes(group)) continue;
        const int box = latent_group_box(group, n);
#pragma unroll
        for (int i = 0; i < kCopies; ++i)
          cp_async(reinterpret_cast<uint4*>(stage + box * kLatentSm90BoxBytes + to[i]), from[i] + box * 128,
                   bytes[i] > box * 128 ? kVectorBytes : 0);
      }
      cp_async_arrive(&shared_.full[tile.stage][group]);
    }
  }

  const DecodePool& keys_;
  LatentSm90Shared& shared_;
};

// A warpgroup that computes: with kMakesWeights the one that makes scores and weights, or else the one that takes these.
template <class Element, bool kMakesWeights>
class LatentSm90Warpgroup {
 public:
  __device__ __forceinline__ LatentSm90Warpgroup(const DecodeArguments& arguments, LatentSm90Shared& shared)
      : arguments_(arguments), shared_(shared), warp_(static_cast<int>(threadIdx.x) / kWarpSize % 4) {}

  __device__ __forceinline__ void run(const DecodeShare& share);

 private:
  using Scores = Accumulator<1, kLatentSm90Tile / 8>;
  // The columns of a product. (One of 192 makes the compiler keep the accumulators in local memory.)
  static constexpr int kFirstColumns = 2 * 64, kNextColumns = 64, kLastColumns = kMakesWeights ? 0 : 2 * 64;
  using Rows = DecodeRows<1>;
  static constexpr int kSteps = kLatentSm90Tile / 16;  // of a product of values
  static constexpr int kFirstBox = kMakesWeights ? 0 : kFirstOthersBox;
  using Weights = unsigned[kSteps][4];
  enum NamedBarrier { kScoresBarrier = 1, kPartBarrier };

  __device__ __forceinline__ static void release(uint64_t* barrier) {
    if (lane() == 0) arrive(barrier);
  }
  __device__ __forceinline__ char* box(int n) const { return shared_.stage[at_.stage][n]; }

  __device__ __forceinline__ void rescale(int half, float factor) {
    rescale_rows(first_, 0, half, factor);
    rescale_rows(next_, 0, half, factor);
    if constexpr (kLastColumns > 0) rescale_rows(last_, 0, half, factor);
  }
  __device__ __forceinline__ void multiply_keys(Scores& scores) const;
  __device__ __forceinline__ void make_weights(Weights& weights, Scores& scores, const Rows& rows, int key);
  __device__ __forceinline__ void take_factors(const Rows& rows);
  __device__ __forceinline__ void fence_outputs() {
    fence_registers(flat(first_));
    fence_registers(flat(next_));
    if constexpr (kLastColumns > 0) fence_registers(flat(last_));
  }
  __device__ __forceinline__ void multiply_values(Weights& weights);
  template <int kColumns>
  __device__ __forceinline__ void multiply_columns(Accumulator<1, kColumns / 8>& out, const Weights& weights, int first_box);
  __device__ __forceinline__ void exchange_states(int buffer);

  const DecodeArguments& arguments_;
  LatentSm90Shared& shared_;
  int warp_;
  PipelineState<kLatentSm90Stages> at_;
  int whole_begin_, whole_end_;  // the keys that all rows of the warp see
  Accumulator<1, kFirstColumns / 8> first_;
  Accumulator<1, kNextColumns / 8> next_;
  Accumulator<1, kLastColumns == 0 ? 1 : kLastColumns / 8> last_;
  ScoreState states_[1][2];
};

// S = Q K^T, one group of columns after the other as they arrive. A product truncates what it adds to a sum: over 576 columns
// the error of one sum is twice that of two sums of half of them, which are added at last.
template <class Element, bool kMakesWeights>
__device__ __forceinline__ void LatentSm90Warpgroup<Element, kMakesWeights>::multiply_keys(Scores& scores) const {
  const uint64_t queries = opaque(k_major_descriptor(shared_address(shared_.query[0]))),
                 keys = opaque(k_major_descriptor(shared_address(box(0))));
  const auto multiply_group = [&](Scores& sums, int group, bool begins) {
    wait(&shared_.full[at_.stage][group], at_.parity);
    fence_async_proxy();  // the copies were ordinary writes
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      if (step >= 4 * latent_group_boxes(group)) continue;
      const unsigned offset = latent_group_box(group, step / 4) * kLatentSm90BoxBytes + step % 4 * 32;
      Wgmma<Element, kLatentSm90Tile>::template ss<false>(flat(sums), offset_descriptor(queries, offset),
                                                          offset_descriptor(keys, offset), !begins || step > 0);
    }
  };
  Scores others;
#pragma unroll
  for (int group = 0; group < kLatentSm90FirstHalf; ++group) multiply_group(scores, group, group == 0);
#pragma unroll
  for (int group = kLatentSm90FirstHalf; group < kLatentSm90Groups; ++group)
    multiply_group(others, group, group == kLatentSm90FirstHalf);
  wgmma_commit();
  wgmma_wait<0>();
  fence_registers(flat(scores));
  fence_registers(flat(others));
#pragma unroll
  for (int i = 0; i < kLatentSm90Tile / 2; ++i) flat(scores)[i] += flat(others)[i];
}

// Makes weights of scores, rescales the outputs, and leaves both weights and factors to the other warpgroup.
template <class Element, bool kMakesWeights>
__device__ __forceinline__ void LatentSm90Warpgroup<Element, kMakesWeights>::make_weights(Weights& weights, Scores& scores,
                                                                                          const Rows& rows, int key) {
  const ScoreMod& score_mod = arguments_.score_mod;
  float factors[2] = {1, 1};
  if (rows.count > 0) {
    if (score_mod.has_score_mod) [[unlikely]]
      apply_mod(arguments_.problem, score_mod, scores, rows, key);
    if (key < whole_begin_ || key + kLatentSm90Tile > whole_end_) [[unlikely]]
      hide(scores, arguments_.shape, rows, key);
    softmax_step(scores, states_, score_mod.remaining_scale(), rows.count, [&](int, int half, float factor) {
      factors[half] = factor;
      rescale(half, factor);
    });
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const float (&x)[4] = scores[0][2 * step + word / 2];
      weights[step][word] = Fragments<Element>::pair(x[word % 2 * 2], x[word % 2 * 2 + 1]);
    }
  sync_named(kScoresBarrier, kWarpgroupSize);  // all warps' products have read the box where weights go
  if (rows.count > 0) {
    const unsigned base = shared_address(box(kWeightBox));
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      stmatrix_x4(weights[step], base + box_offset(16 * warp_ + lane() % 16, 2 * step + lane() / 16));
    if (lane_in_quad() == 0) {
      shared_.factor[at_.stage][16 * warp_ + quad()] = factors[0];
      shared_.factor[at_.stage][16 * warp_ + 8 + quad()] = factors[1];
    }
  }
  fence_async_proxy();
  __syncwarp();
  release(&shared_.weights_full[at_.stage]);
}

// Waits for the weights of a tile, and rescales the outputs.
template <class Element, bool kMakesWeights>
__device__ __forceinline__ void LatentSm90Warpgroup<Element, kMakesWeights>::take_factors(const Rows& rows) {
  wait(&shared_.weights_full[at_.stage], at_.parity);
  fence_async_proxy();
  if (rows.count == 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = shared_.factor[at_.stage][16 * warp_ + 8 * half + quad()];
    if (__any_sync(~0u, factor != 1)) rescale(half, factor);
  }
}

// O += P V in the columns from a box on. Weights are in registers where they were made, else in the tile.
template <class Element, bool kMakesWeights>
template <int kColumns>
__device__ __forceinline__ void LatentSm90Warpgroup<Element, kMakesWeights>::multiply_columns(Accumulator<1, kColumns / 8>& out,
                                                                                              const Weights& weights,
                                                                                              int first_box) {
  const uint64_t left = opaque(k_major_descriptor(shared_address(box(kWeightBox)))),
                 values = opaque(mn_major_descriptor(shared_address(box(first_box)), kLatentSm90BoxBytes));
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint64_t right = offset_descriptor(values, step * 16 * 128);
    if constexpr (kMakesWeights)
      Wgmma<Element, kColumns>::template rs<true>(flat(out), weights[step], right, true);
    else
      Wgmma<Element, kColumns>::template ss<true>(flat(out), offset_descriptor(left, step * 32), right, true);
  }
}

// O += P V, and releases the tile.
template <class Element, bool kMakesWeights>
__device__ __forceinline__ void LatentSm90Warpgroup<Element, kMakesWeights>::multiply_values(Weights& weights) {
  fence_outputs();
  if constexpr (kMakesWeights) fence_registers(weights);
  wgmma_fence();
  multiply_columns<kFirstColumns>(first_, weights, kFirstBox);
  wgmma_commit();
  multiply_columns<kNextColumns>(next_, weights, kFirstBox + 2);
  if constexpr (kLastColumns > 0) multiply_columns<kLastColumns>(last_, weights, kFirstBox + 3);
  wgmma_commit();
  wgmma_wait<1>();
  release(&shared_.empty[at_.stage][0]);
  wgmma_wait<0>();
  release(&shared_.empty[at_.stage][1]);
  fence_outputs();
}

// At the end of a part both warpgroups get the states of all rows. The other one has read those of the part before the last
// one, which were in the same buffer, since it has come to the end of the last one.
template <class Element, bool kMakesWeights>
__device__ __forceinline__ void LatentSm90Warpgroup<Element, kMakesWeights>::exchange_states(int buffer) {
  float2* const to = &shared_.state[buffer][16 * warp_ + quad()];
  if constexpr (kMakesWeights) {
    sum_states(states_);
    if (lane_in_quad() == 0) {
      to[0] = {states_[0][0].max, states_[0][0].sum};
      to[8] = {states_[0][1].max, states_[0][1].sum};
    }
  }
  sync_named(kPartBarrier, 2 * kWarpgroupSize);
  if constexpr (!kMakesWeights) {
    states_[0][0] = {to[0].x, to[0].y};
    states_[0][1] = {to[8].x, to[8].y};
  }
}

template <class Element, bool kMakesWeights>
__device__ __forceinline__ void LatentSm90Warpgroup<Element, kMakesWeights>::run(const DecodeShare& share) {
  const DecodeShape& shape = arguments_.shape;
  const int warp_rows = latent_rows_per_warp(shape), skipped = warp_rows * warp_;
  unsigned query_parity = 0;
  int state_buffer = 0;
  DecodeWalk walk(share);
#pragma unroll 1
  for (;;) {
    walk.next(arguments_.problem, arguments_.kv_splits, shape, arguments_.whole_items);
    if (walk.done()) break;
    const Rows rows(shape, walk, kLatentSm90Rows, skipped, warp_rows);
    whole_begin_ = shape.begin_of(rows.query_of(max(rows.count - 1, 0)) + rows.offset);
    whole_end_ = shape.end_of(rows.query_of(0) + rows.offset, rows.keys);
    const bool has_rows = rows.first - skipped < walk.s.queries * shape.group;  // a warp may have no rows of the part
    clear(first_);
    clear(next_);
    if constexpr (kLastColumns > 0) clear(last_);
    states_[0][0] = states_[0][1] = {};
    const int end = has_rows ? walk.end : 0;
#pragma unroll 1
    for (int tile = walk.tile; tile < end; ++tile) {
      Weights weights;
      if constexpr (kMakesWeights) {
        if (tile == walk.tile) {
          wait(&shared_.query_full, query_parity);
          query_parity ^= 1;
        }
        Scores scores;
        multiply_keys(scores);
        if (tile + 1 == end) release(&shared_.query_empty);
        make_weights(weights, scores, rows, kLatentSm90Tile * tile);
      } else {
        take_factors(rows);
      }
      multiply_values(weights);
      at_.advance();
    }
    exchange_states(state_buffer);
    state_buffer ^= 1;
    constexpr int kFirstColumn = 64 * kFirstBox;
    store_latent_rows<Element>(arguments_, walk, rows, first_, states_, kFirstColumn, kMakesWeights, skipped);
    store_latent_rows<Element>(arguments_, walk, rows, next_, states_, kFirstColumn + kFirstColumns, false, skipped);
    if constexpr (kLastColumns > 0)
      store_latent_rows<Element>(arguments_, walk, rows, last_, states_, kFirstColumn + kFirstColumns + kNextColumns, false,
                                 skipped);
  }
}

template <class Element>
__device__ __forceinline__ void run_latent_sm90(const DecodeArguments& arguments, LatentSm90Shared& shared) {
  const AttentionProblem& problem = arguments.problem;
  constexpr int kComputeWarps = 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kLatentSm90Stages; ++i) {
      for (int group = 0; group < kLatentSm90Groups; ++group) mbarrier_init(&shared.full[i][group], kWarpgroupSize);
      for (int half = 0; half < 2; ++half) mbarrier_init(&shared.empty[i][half], kComputeWarps);
      mbarrier_init(&shared.weights_full[i], kComputeWarps / 2);
    }
    mbarrier_init(&shared.query_full, kWarpgroupSize);
    mbarrier_init(&shared.query_empty, kComputeWarps / 2);
    fence_barrier_init();
  }
  touch_constants(arguments);
  grid_dependency_wait();
  launch_dependents();  // what follows may rely on all before this kernel having ended
  if (problem.query_starts) clear_rows_without_result<Element>(problem);
  const DecodeShare share =
      find_share(problem, arguments.kv_splits, arguments.shape, static_cast<int>(gridDim.x), static_cast<int>(blockIdx.x));
  if (share.begin == share.end) return;
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroupSize, 0);
  if (warpgroup == 0) {
    reg_dealloc<48>();
    DecodeWalk walk(share);
    walk.next(problem, arguments.kv_splits, arguments.shape, arguments.whole_items);
    LatentSm90Loads<Element>(arguments, shared).run(walk);
  } else if (warpgroup == 1) {
    reg_alloc<240>();
    LatentSm90Warpgroup<Element, true>(arguments, shared).run(share);
  } else {
    reg_alloc<216>();
    LatentSm90Warpgroup<Element, false>(arguments, shared).run(share);
  }
}

template <class Element>
__global__ void __launch_bounds__(kLatentSm90Threads, 1)
    attention_latent_sm90(const __grid_constant__ DecodeArguments arguments) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // in code for another GPU it is empty, and never launched
  extern __shared__ __align__(128) char shared[];
  const unsigned skip = -shared_address(shared) % kBoxAlignment;
  run_latent_sm90<Element>(arguments, *reinterpret_cast<LatentSm90Shared*>(shared + skip));
#endif
}

// ---- the family

struct LatentSm90Setup {
  static constexpr int kSharedBytes = static_cast<int>(sizeof(LatentSm90Shared)) + kBoxAlignment;
  DecodeShape shape;
  int ctas;

  explicit LatentSm90Setup(const AttentionProblem& problem)
      : shape(decode_shape(problem, static_cast<int>(std::clamp<int64_t>(decode_rows_of(problem), 1, kLatentSm90Rows)),
                           kLatentSm90Tile, 1)) {
    ctas = static_cast<int>(std::clamp<int64_t>(shape.most_units(problem), 1, sm_count()));
  }
};

template <int kHeadDim>
const char* AttentionDecodeLatentSm90<kHeadDim>::refusal(const ForwardPass& pass, const Gpu& gpu) {
  static_assert(kHeadDim == 64 * kLatentSm90Boxes);
  const AttentionProblem& p = pass.problem;
  if (gpu.major != 9) return "the GPU's compute capability is not 9.0";
  if (const char* const reason = latent_refusal(p)) return reason;
  const ConstView4& query = p.query;
  if ((reinterpret_cast<uintptr_t>(query.data) | static_cast<uintptr_t>(query.stride[0] * 2) |
       static_cast<uintptr_t>(query.stride[1] * 2) | static_cast<uintptr_t>(query.stride[2] * 2)) %
          kVectorBytes !=
      0)
    return "the rows of the queries are not multiples of 16 bytes";
  if (LatentSm90Setup(p).shape.most_units(p) >= int64_t{1} << 30)
    return "the caches of all sequences have room for too many keys";
  return nullptr;
}

template <int kHeadDim>
int64_t AttentionDecodeLatentSm90<kHeadDim>::workspace_bytes(const ForwardPass& pass) {
  const AttentionProblem& problem = pass.problem;
  if (problem.cache.kv_splits > 0) return decode_kv_splits(problem).bytes(problem);
  const LatentSm90Setup setup(problem);
  return DecodePartials::of(problem, setup.shape).bytes(setup.ctas);
}

template <int kHeadDim>
void AttentionDecodeLatentSm90<kHeadDim>::run(const ForwardPass& pass, void* workspace, CUstream_st* stream) {
  const AttentionProblem& problem = pass.problem;
  const LatentSm90Setup setup(problem);
  const DecodePool keys = decode_pool(problem, problem.key, problem.head_dim);
  const DecodeArguments arguments = decode_arguments(problem, setup.shape, keys, keys, kLatentSm90Stages, workspace);
  const auto launch_kernel = [&]<class Element>(Type<Element>) {
    launch<attention_latent_sm90<Element>>(arguments, setup.ctas, kLatentSm90Threads, LatentSm90Setup::kSharedBytes, stream,
                                           true);
  };
  problem.dtype == DType::kFloat16 ? launch_kernel(Type<__half>{}) : launch_kernel(Type<__nv_bfloat16>{});
  merge_results(arguments, setup.ctas, stream);
}

}  // namespace flash_online::cuda
