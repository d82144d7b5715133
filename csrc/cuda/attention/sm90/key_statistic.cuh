// A statistic of the scores of each tile of keys on Hopper: S^T = K Q^T by wgmma, in one pass that reads queries once per tile
// of keys and writes no score.
//
// A CTA owns a tile of keys of one head: math warpgroups with 64 keys each, in registers, and a warp that loads blocks of
// queries, and their lse if the statistic reads it. While the tensor cores compute the scores of one warpgroup, the other
// warpgroups add theirs to the statistic.
//
// A statistic is a struct of parameters, which the arguments hold, with
//   kReadsLse      whether it reads the queries' lse
//   kMissingCount  whether queries that do not exist may be taken like others where they are not hidden
//   Sums<kQueries> what a warp accumulates for its sixteen keys: add<kHides>(statistic, scores, place) adds a block of
//                  scores, where a hidden score is -inf; store(statistic, place) writes the results after the last block.
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

template <class Statistic>
struct KeyStatisticArguments {
  TmaTensor query, key;
  AttentionProblem problem;
  TileList list;  // of tiles of keys
  bool reversed;  // whether later keys are seen by more queries
  Statistic statistic;
};

// Where a warp's scores stand.
struct KeyStatisticPlace {
  const AttentionProblem& problem;
  int batch, head;
  int key;  // the warp's first
  int query = 0;  // the block's first
  const float* lse = nullptr;  // of the block's queries, in base 2; +inf for a row without weights
};

template <class T, int kHeadDim, class Statistic>
struct KeyStatisticSm90Kernel {
  using Arguments = KeyStatisticArguments<Statistic>;
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
    alignas(float2) float lse[Statistic::kReadsLse ? kStages : 1][kQueries];  // KeyStatisticPlace::lse
    uint64_t key_full, query_full[kStages], query_empty[kStages];
  };

  // The work of a CTA.
  struct Work {
    int batch, head, key;  // the first key
    int begin, end;  // blocks of queries
    __device__ Work(const Arguments& a) {
      const TileCoord tile = tile_coord(a.problem, a.list, blockIdx.x, true, kKeys, a.reversed);
      batch = static_cast<int>(tile.sequence), head = tile.head, key = static_cast<int>(tile.block) * kKeys;
      const int64_t queries = a.problem.queries;
      const QueryRange range = queries_of_any(a.problem.visible, key, min(int64_t{key} + kKeys, a.problem.keys), queries);
      begin = static_cast<int>(min(range.begin, queries) / kQueries);
      end = range.end > range.begin ? static_cast<int>((min(range.end, queries) + kQueries - 1) / kQueries) : begin;
    }
  };

  // Loads the keys, and one block of queries after another.
  __device__ static void load(const Arguments& a, Shared& shared, const Work& work, int lane) {
    if (lane == 0) {
      arrive_expect_tx(&shared.key_full, sizeof(KeyBuffer));
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
        tma_load(shared.key.box[box], a.key.map, a.key.at(work.batch, work.head, work.key, box), &shared.key_full);
    }
    [[maybe_unused]] const float* const lse =
        static_cast<const float*>(a.problem.lse) + work.batch * a.problem.lse_stride[0] + work.head * a.problem.lse_stride[1];
    PipelineState<kStages> state;
#pragma unroll 1
    for (int block = work.begin; block < work.end; ++block, state.advance()) {
      const int query = block * kQueries;
      [[maybe_unused]] float of_row[kQueries / kWarpSize];
      if constexpr (Statistic::kReadsLse) {
#pragma unroll
        for (int n = 0; n < kQueries / kWarpSize; ++n) {
          const int row = query + n * kWarpSize + lane;
          of_row[n] = row < a.problem.queries ? lse[row] : -INFINITY;
        }
      }
      wait(&shared.query_empty[state.stage], state.parity ^ 1);
      if constexpr (Statistic::kReadsLse) {
#pragma unroll
        for (int n = 0; n < kQueries / kWarpSize; ++n)
          shared.lse[state.stage][n * kWarpSize + lane] = of_row[n] == -INFINITY ? INFINITY : of_row[n] * kLog2E;
        __syncwarp();
      }
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
    const Arguments& a;
    Shared& shared;
    const Work& work;
    int first_row;  // of the warp, in the tile of keys
    unsigned key[kSteps][4];  // the left operand
    typename Statistic::template Sums<kQueries> sums = {};
    int whole_begin = 0, whole_end = 0;  // blocks

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
    // The blocks whose queries see all of the warp's keys.
    __device__ __forceinline__ void find_whole_blocks() {
      const int64_t queries = a.problem.queries, keys = a.problem.keys;
      if (!Statistic::kMissingCount && work.key + first_row + 16 > keys) return;
      const int64_t first = min(int64_t{work.key} + first_row, keys - 1), last = min(first + 16, keys);
      const QueryRange all = queries_of_all(a.problem.visible, first, last, queries);
      whole_begin = static_cast<int>((min(all.begin, queries) + kQueries - 1) / kQueries);
      whole_end =
          Statistic::kMissingCount && all.end >= queries ? work.end : static_cast<int>(min(all.end, queries) / kQueries);
    }
    __device__ __forceinline__ KeyStatisticPlace place() const {
      return {a.problem, work.batch, work.head, work.key + first_row};
    }
    // Adds a block's scores to the statistic, and releases its stage.
    __device__ __forceinline__ void add(Scores& scores, int block, int stage) {
      KeyStatisticPlace at = place();
      at.query = block * kQueries;
      if constexpr (Statistic::kReadsLse) at.lse = shared.lse[stage];
      if (block >= whole_begin && block < whole_end) [[likely]] {
        sums.template add<false>(a.statistic, scores, at);
      } else {
        const AttentionProblem& p = a.problem;
        const ScoreBlock here{at.query, work.key, static_cast<int>(p.queries), static_cast<int>(p.keys), false};
        hide_scores<true>(scores, first_row, here, p.visible);
        sums.template add<true>(a.statistic, scores, at);
      }
      if (lane() == 0) arrive(&shared.query_empty[stage]);
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
      sums.store(a.statistic, place());
    }
  };

  __device__ static void run(const Arguments& a, Shared& shared) {
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

template <class T, int kHeadDim, class Statistic>
__global__ void __launch_bounds__(KeyStatisticSm90Kernel<T, kHeadDim, Statistic>::kThreads, 1)
    attention_key_statistic_sm90(const __grid_constant__ KeyStatisticArguments<Statistic> arguments) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // in code for another GPU it is empty, and never launched
  using Kernel = KeyStatisticSm90Kernel<T, kHeadDim, Statistic>;
  extern __shared__ __align__(kBoxAlignment) char key_statistic_boxes[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::Shared*>(key_statistic_boxes));
#endif
}

// Why the kernels do not take a problem; null: they do.
inline const char* key_statistic_refusal(const AttentionProblem& p, const Gpu& gpu) {
  constexpr int64_t kMost = int64_t{1} << 30;
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

template <int kHeadDim, class Statistic>
void run_key_statistic(const AttentionProblem& p, const Statistic& statistic, CUstream_st* stream) {
  const auto start = [&]<class T>(T) {
    using Kernel = KeyStatisticSm90Kernel<T, kHeadDim, Statistic>;
    const KeyStatisticArguments<Statistic> arguments{
        .query = tma_tensor_of<T>(p, p.query, false, p.heads, p.head_dim, Kernel::kQueries),
        .key = tma_tensor_of<T>(p, p.key, true, p.key_heads, p.head_dim, Kernel::kKeys),
        .problem = p,
        .list = TileList::of(p, true, p.heads, Kernel::kKeys).by_length(p.visible, sm_count()),
        .reversed = p.visible.left >= 0 && p.visible.right < 0,
        .statistic = statistic};
    launch<attention_key_statistic_sm90<T, kHeadDim, Statistic>>(arguments, arguments.list.count(), Kernel::kThreads,
                                                                 static_cast<int>(sizeof(typename Kernel::Shared)), stream);
  };
  p.dtype == DType::kFloat16 ? start(__half{}) : start(__nv_bfloat16{});
}

}  // namespace flash_online::cuda
