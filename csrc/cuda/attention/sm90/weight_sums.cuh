// The sums of attention's weights per key on Hopper: S^T = K Q^T by wgmma, weights from the rows' lse, and their sums over the
// queries, in one pass that reads queries once per tile of keys.
//
// A CTA owns a tile of keys of one head: math warpgroups with 64 keys each, in registers, and a warp that loads blocks of
// queries and their lse. While the tensor cores compute the scores of one warpgroup, the others compute weights of theirs. No
// other CTA writes a key's sum, and it is added in the order of the queries.
#pragma once

#include "../../hw/compiler.cuh"
#include "../../hw/launch.h"
#include "../../hw/matrix_copy.cuh"
#include "../../hw/mbarrier.cuh"
#include "../../hw/setmaxnreg.cuh"
#include "../../hw/shared_memory.cuh"
#include "../common/scores.cuh"
#include "../common/tile_list.cuh"
#include "../kernels.h"
#include "gemm.cuh"
#include "tma_tensor.cuh"

namespace flash_online::cuda {

struct WeightSumsArguments {
  TmaTensor query, key;
  AttentionProblem problem;
  TileList list;  // of tiles of keys
  bool reversed;  // whether later keys are seen by more queries
  float scale;  // of scores, in base 2
  float* sums;  // [batch, heads, keys], contiguous
};

template <class T, int kHeadDim>
struct WeightSumsSm90Kernel {
  static constexpr int kWarpgroups = 3, kKeysPerWarpgroup = 64, kKeys = kWarpgroups * kKeysPerWarpgroup;
  // Queries of a block. The keys of head dims beyond 128 fill the registers that scores of 128 queries would take.
  static constexpr int kQueries = kHeadDim <= 128 ? 128 : 64;
  static constexpr int kBoxes = kHeadDim / kBoxColumns, kSteps = kHeadDim / 16;
  static constexpr unsigned kRowBytes = kBoxColumns * sizeof(T);
  static constexpr int kStages = kHeadDim <= 64 ? 6 : 4;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kRegisters = 160, kProducerRegisters = 24;

  using Scores = Accumulator<1, kQueries / 8>;
  struct alignas(kBoxAlignment) KeyBuffer {
    T box[kBoxes][kKeys][kBoxColumns];
  };
  struct alignas(kBoxAlignment) QueryBuffer {
    T box[kBoxes][kQueries][kBoxColumns];
  };
  struct Shared {
    KeyBuffer key;
    QueryBuffer query[kStages];
    alignas(float2) float lse[kStages][kQueries];  // in base 2; +inf for a row without weights
    uint64_t key_full, query_full[kStages], query_empty[kStages];
  };

  // The work of a CTA.
  struct Work {
    int batch, head, key;  // the first key
    int begin, end;  // blocks of queries
    __device__ Work(const WeightSumsArguments& a) {
      const TileCoord tile = tile_coord(a.problem, a.list, blockIdx.x, true, kKeys, a.reversed);
      batch = static_cast<int>(tile.sequence), head = tile.head, key = static_cast<int>(tile.block) * kKeys;
      const int64_t queries = a.problem.queries;
      const QueryRange range = queries_of_any(a.problem.visible, key, min(int64_t{key} + kKeys, a.problem.keys), queries);
      begin = static_cast<int>(min(range.begin, queries) / kQueries);
      end = range.end > range.begin ? static_cast<int>((min(range.end, queries) + kQueries - 1) / kQueries) : begin;
    }
  };

  // Loads the keys, and one block of queries after another with their lse.
  __device__ static void load(const WeightSumsArguments& a, Shared& shared, const Work& work, int lane) {
    if (lane == 0) {
      arrive_expect_tx(&shared.key_full, sizeof(KeyBuffer));
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
        tma_load(shared.key.box[box], a.key.map, a.key.at(work.batch, work.head, work.key, box), &shared.key_full);
    }
    const float* const lse =
        static_cast<const float*>(a.problem.lse) + work.batch * a.problem.lse_stride[0] + work.head * a.problem.lse_stride[1];
    PipelineState<kStages> state;
#pragma unroll 1
    for (int block = work.begin; block < work.end; ++block, state.advance()) {
      const int query = block * kQueries;
      float of_row[kQueries / kWarpSize];
#pragma unroll
      for (int n = 0; n < kQueries / kWarpSize; ++n) {
        const int row = query + n * kWarpSize + lane;
        of_row[n] = row < a.problem.queries ? lse[row] : -INFINITY;
      }
      wait(&shared.query_empty[state.stage], state.parity ^ 1);
#pragma unroll
      for (int n = 0; n < kQueries / kWarpSize; ++n)
        shared.lse[state.stage][n * kWarpSize + lane] = of_row[n] == -INFINITY ? INFINITY : of_row[n] * kLog2E;
      __syncwarp();
      if (lane == 0) {
        arrive_expect_tx(&shared.query_full[state.stage], sizeof(QueryBuffer));
#pragma unroll
        for (int box = 0; box < kBoxes; ++box)
          tma_load(shared.query[state.stage].box[box], a.query.map, a.query.at(work.batch, work.head, query, box),
                   &shared.query_full[state.stage]);
      }
    }
  }

  struct MathWarpgroup {
    const WeightSumsArguments& a;
    Shared& shared;
    const Work& work;
    int first_row;  // of the warp, in the tile of keys
    unsigned key[kSteps][4];  // the left operand
    float sum[2] = {0, 0};  // the lane's own, of rows quad() and quad() + 8
    int whole_begin, whole_end;  // blocks

    __device__ __forceinline__ void load_keys() {
      wait(&shared.key_full, 0);
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        ldmatrix_x4(key[step],
                    shared_address(shared.key.box[step / 4]) + swizzle128(first_row + lane() % 16, step % 4 * 2 + lane() / 16));
    }
    // Computes the scores of the block in a stage, once it is there.
    __device__ __forceinline__ void multiply(Scores& scores, const PipelineState<kStages>& at) {
      wait(&shared.query_full[at.stage], at.parity);
      const uint64_t queries = k_major_descriptor(shared_address(shared.query[at.stage].box));
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        Wgmma<T, kQueries>::template rs<false>(
            flat(scores), key[step], offset_descriptor(queries, step / 4 * kQueries * kRowBytes + step % 4 * 32), step > 0);
      wgmma_commit();
      wgmma_wait<0>();
      fence_registers(flat(scores));
    }
    // Adds the weights of a block's scores. kHides: a hidden score is -inf, and has no weight even where lse is NaN.
    template <bool kHides>
    __device__ __forceinline__ void add_weights(const Scores& scores, int stage) {
      float of_block[4] = {0, 0, 0, 0};  // several sums, so that no addition waits for the one before
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float2 lse = *reinterpret_cast<const float2*>(&shared.lse[stage][8 * j + 2 * lane_in_quad()]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float score = scores[0][j][e], weight = exp2_flushed(fmaf(score, a.scale, e % 2 ? -lse.y : -lse.x));
          of_block[e] += kHides && score == -INFINITY ? 0.0f : weight;
        }
      }
      sum[0] += of_block[0] + of_block[1];
      sum[1] += of_block[2] + of_block[3];
    }
    // The blocks whose queries see all of the warp's keys. Queries and keys that do not exist see and are seen: their weights
    // are 0, or are not stored.
    __device__ __forceinline__ void find_whole_blocks() {
      const int64_t first = min(int64_t{work.key} + first_row, a.problem.keys - 1), last = min(first + 16, a.problem.keys);
      const QueryRange all = queries_of_all(a.problem.visible, first, last, a.problem.queries);
      whole_begin = static_cast<int>((min(all.begin, a.problem.queries) + kQueries - 1) / kQueries);
      whole_end = all.end >= a.problem.queries ? work.end : static_cast<int>(all.end / kQueries);
    }
    // Adds the weights of a block's scores, and releases its stage.
    __device__ __forceinline__ void add(Scores& scores, int block, int stage) {
      if (block >= whole_begin && block < whole_end) [[likely]] {
        add_weights<false>(scores, stage);
      } else {
        const AttentionProblem& p = a.problem;
        const ScoreBlock here{block * kQueries, work.key, static_cast<int>(p.queries), static_cast<int>(p.keys), false};
        hide_scores<true>(scores, first_row, here, p.visible);
        add_weights<true>(scores, stage);
      }
      if (lane() == 0) arrive(&shared.query_empty[stage]);
    }
    __device__ __forceinline__ void store() {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[half] + __shfl_xor_sync(~0u, sum[half], 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const int row = work.key + first_row + 8 * half + quad();
        if (lane_in_quad() == 0 && row < a.problem.keys)
          a.sums[(work.batch * a.problem.heads + work.head) * a.problem.keys + row] = total;
      }
    }
    __device__ __forceinline__ void run() {
      load_keys();
      find_whole_blocks();
      PipelineState<kStages> at;
#pragma unroll 1
      for (int block = work.begin; block < work.end; ++block, at.advance()) {
        Scores scores;
        multiply(scores, at);
        add(scores, block, at.stage);
      }
      store();
    }
  };

  __device__ static void run(const WeightSumsArguments& a, Shared& shared) {
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpSize, 0);
    if (threadIdx.x == 0) {
      mbarrier_init(&shared.key_full, 1);
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(&shared.query_full[i], 1);
        mbarrier_init(&shared.query_empty[i], 4 * kWarpgroups);
      }
      fence_barrier_init();
    }
    __syncthreads();
    const Work work(a);
    if (warp < 4) {
      reg_dealloc<kProducerRegisters>();
      if (warp == 0) load(a, shared, work, lane());
    } else {
      reg_alloc<kRegisters>();
      MathWarpgroup{a, shared, work, (warp / 4 - 1) * kKeysPerWarpgroup + warp % 4 * 16}.run();
    }
  }
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(WeightSumsSm90Kernel<T, kHeadDim>::kThreads, 1)
    attention_weight_sums_sm90(const __grid_constant__ WeightSumsArguments arguments) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // in code for another GPU it is empty, and never launched
  using Kernel = WeightSumsSm90Kernel<T, kHeadDim>;
  extern __shared__ __align__(kBoxAlignment) char weight_sums_boxes[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::Shared*>(weight_sums_boxes));
#endif
}

template <int kHeadDim>
const char* AttentionWeightSumsSm90<kHeadDim>::refusal(const WeightSumsPass& pass, const Gpu& gpu) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const AttentionProblem& p = pass.problem;
  if (gpu.major != 9) return "the GPU's compute capability is not 9.0";
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return "the dtype is not float16 or bfloat16";
  if (p.head_dim == 0 || p.head_dim % 8 != 0) return "a head dim that is no multiple of 8";
  if (p.softcap > 0) return "a softcap";
  if (!(p.scale > 1e-6 && p.scale < 1e30)) return "a scale that is not between 1e-6 and 1e30";
  if (p.queries == 0 || p.queries > kMost || p.keys > kMost || p.batch * p.heads * (p.keys / 64 + 1) > kMost)
    return "no queries, or a size beyond 32-bit indices";
  if (!is_tma_compatible(p.query.data, p.query.stride, p.batch, p.heads, p.queries, p.head_dim))
    return "query's rows are not whole multiples of 16 bytes apart";
  if (!is_tma_compatible(p.key.data, p.key.stride, p.batch, p.key_heads, p.keys, p.head_dim))
    return "key's rows are not whole multiples of 16 bytes apart";
  return nullptr;
}

template <int kHeadDim>
int64_t AttentionWeightSumsSm90<kHeadDim>::workspace_bytes(const WeightSumsPass&) {
  return 0;
}

template <int kHeadDim>
void AttentionWeightSumsSm90<kHeadDim>::run(const WeightSumsPass& pass, void*, CUstream_st* stream) {
  const AttentionProblem& p = pass.problem;
  const auto start = [&]<class T>(T) {
    using Kernel = WeightSumsSm90Kernel<T, kHeadDim>;
    const WeightSumsArguments arguments{.query = tma_tensor_of<T>(p, p.query, false, p.heads, p.head_dim, Kernel::kQueries),
                                        .key = tma_tensor_of<T>(p, p.key, true, p.key_heads, p.head_dim, Kernel::kKeys),
                                        .problem = p,
                                        .list = TileList::of(p, true, p.heads, Kernel::kKeys).by_length(p.visible, sm_count()),
                                        .reversed = p.visible.left >= 0 && p.visible.right < 0,
                                        .scale = static_cast<float>(p.scale * kLog2EInDouble),
                                        .sums = pass.sums};
    launch<attention_weight_sums_sm90<T, kHeadDim>>(arguments, arguments.list.count(), Kernel::kThreads,
                                                    static_cast<int>(sizeof(typename Kernel::Shared)), stream);
  };
  p.dtype == DType::kFloat16 ? start(__half{}) : start(__nv_bfloat16{});
}

}  // namespace flash_online::cuda
