// The gradient of a float mask on Hopper: TMA loads, wgmma products. docs/design/backward_sm90_options.md draws it.
//
// The kernel is persistent. A work tile is 128 x 96 of the mask, 64 queries per math warpgroup. For one batch entry and head
// after another, the scores that the mask tile was added to are computed again, and dP. The sum of dS stays in registers and is
// written once. A producer warp loads queries, keys, grad_out and values; three other warps load the mask. They run ahead of
// the math warpgroups, also into the next tile.
#pragma once

#include <algorithm>

#include "../../hw/compiler.cuh"
#include "../../hw/launch.h"
#include "../../hw/mbarrier.cuh"
#include "../../hw/setmaxnreg.cuh"
#include "../common/dropout.cuh"
#include "../common/scores.cuh"
#include "../masks/mask_grad.h"
#include "gemm.cuh"
#include "tma_tensor.cuh"

namespace flash_online::cuda {

struct MaskGradSm90Arguments {
  TmaTensor query, key, value, grad_out;
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardWorkspace space;
  ScoreMod score_mod;
  float keep_scale;  // of dropout: 1 / (1 - p)
  int batches, heads;  // that share a tile of the mask
  int row_tiles, column_tiles, tiles;
};

// The tiles that a mask is cut into.
struct MaskGradTilesSm90 {
  static constexpr int kQueries = 128, kKeys = 96;
  int rows, columns;
  int64_t count;

  explicit MaskGradTilesSm90(const int64_t (&mask_size)[4])
      : rows(static_cast<int>((mask_size[2] + kQueries - 1) / kQueries)),
        columns(static_cast<int>((mask_size[3] + kKeys - 1) / kKeys)),
        count(mask_size[0] * mask_size[1] * rows * columns) {}
};

// The reason why mask_grad_sm90 leaves a problem that backward_sm90 takes to mask_gradient, or null.
inline const char* mask_grad_sm90_refusal(const AttentionGradients& gradients) {
  const int64_t (&size)[4] = gradients.mask_size;
  if (size[2] == 1 || size[3] == 1) return "the mask is broadcast along queries or keys: sums across lanes";
  if (MaskGradTilesSm90(size).count < sm_count()) return "the mask has too few tiles for the whole device";
  return nullptr;
}

template <class T, int kHeadDim>
struct MaskGradSm90Kernel {
  static constexpr int kQueries = MaskGradTilesSm90::kQueries, kKeys = MaskGradTilesSm90::kKeys,
                       kStages = kHeadDim > 64 ? 1 : 2;
  static constexpr int kThreads = 384, kMathWarps = 8, kMaskWarps = 3;
  static constexpr int kBoxes = kHeadDim / kBoxColumns;
  static constexpr int kMathRegisters = 224, kProducerRegisters = 56;

  template <int kRows>
  struct alignas(kBoxAlignment) TmaTile {
    T box[kBoxes][kRows][kBoxColumns];
  };
  struct Stage {
    TmaTile<kQueries> query, grad_out;
    TmaTile<kKeys> key, value;
  };
  // The start of a tile in the mask, and in the scores of the first batch entry and head that it was added to.
  struct MaskGradWorkTile {
    int batch = 0, head = 0, query = -1, key = 0;  // query -1: no more tiles
    bool visible = false;  // whether position and the mask map leave something visible
    bool all_visible = false;  // by position all queries see all keys, as far as both exist
  };
  using ScoreAccumulator = Accumulator<1, kKeys / 8>;
  using Mask = MaskTile<kQueries, kKeys, kMaskWarps * kWarpSize>;
  struct Shared {
    Stage stage[kStages];
    alignas(16) float row_stats[kStages][kQueries / kStatsRows][kRowStats];
    uint64_t scores_full[kStages], scores_empty[kStages], dp_full[kStages], dp_empty[kStages];
    MaskGradWorkTile tile[2];
    Mask mask[2];  // how the values of a tile lie in shared memory
    uint64_t tile_full[2], tile_empty[2];
  };
  static constexpr int kMaskOffset = (sizeof(Shared) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  static_assert(kMaskOffset + 2 * kQueries * mask_pitch(kKeys, sizeof(float)) <= 227 << 10);
  FLASH_ONLINE_HD static int mask_bytes(const AttentionProblem& problem) {
    return (problem.mask.stride[2] == 0 ? 1 : kQueries) * mask_pitch(kKeys, static_cast<int>(size_of(problem.mask_dtype)));
  }

  __device__ static char* mask_buffer(const MaskGradSm90Arguments& a, Shared& shared, int buffer) {
    return reinterpret_cast<char*>(&shared) + kMaskOffset + buffer * mask_bytes(a.problem);
  }

  // Computes MaskGradWorkTile::visible.
  __device__ static bool is_visible(const MaskGradSm90Arguments& a, const MaskGradWorkTile& tile, int last_query) {
    const KeyRange range = keys_of_any(a.problem.visible, tile.query, last_query, a.problem.keys);
    if (range.end <= range.begin || range.end <= tile.key || range.begin >= tile.key + kKeys) return false;
    const MaskMap& map = a.space.tiles.map;
    if (!map.data) return true;
    const auto last = [&](int i, int first) { return map.size[i] == 1 ? 0 : min(map.size[i] - 1, int64_t{first + 1}); };
    const int row = tile.query / kMaskMapTile, column = tile.key / kMaskMapTile;
    for (int64_t r = map.size[2] == 1 ? 0 : row; r <= last(2, row); ++r)
      for (int64_t c = map.size[3] == 1 ? 0 : column; c <= last(3, column); ++c)
        if (static_cast<MaskKind>(map.row(tile.batch, tile.head, r)[c]) != MaskKind::kHidden) return true;
    return false;
  }

  // Calls f(tile) for the tiles of this CTA, in the order in which all of its warps take them.
  template <class F>
  __device__ __forceinline__ static void for_each_tile(const MaskGradSm90Arguments& a, F&& f) {
    const int heads = static_cast<int>(a.gradients.mask_size[1]);
#pragma unroll 1
    for (int n = static_cast<int>(blockIdx.x); n < a.tiles; n += static_cast<int>(gridDim.x)) {
      int index = n / a.column_tiles;
      const int column = n - index * a.column_tiles, row = index % a.row_tiles;
      index /= a.row_tiles;
      MaskGradWorkTile tile{index / heads, index % heads, row * kQueries, column * kKeys};
      const int last_query = static_cast<int>(min(int64_t{tile.query + kQueries}, a.problem.queries)),
                last_key = static_cast<int>(min(int64_t{tile.key + kKeys}, a.problem.keys));
      tile.visible = is_visible(a, tile, last_query);
      tile.all_visible = all_see(a.problem.visible, tile.query, last_query, tile.key, last_key, a.problem.keys);
      f(tile);
    }
  }
  template <class F>
  __device__ __forceinline__ static void for_each_head(const MaskGradSm90Arguments& a, const MaskGradWorkTile& tile, F&& f) {
#pragma unroll 1
    for (int batch = tile.batch; batch < tile.batch + a.batches; ++batch)
#pragma unroll 1
      for (int head = tile.head; head < tile.head + a.heads; ++head) f(batch, head);
  }

  // ---- the producer warp, one thread of it

  __device__ static void produce(const MaskGradSm90Arguments& a, Shared& shared) {
    const auto load_tile = [](auto& to, const TmaTensor& from, int batch, int head, int row, uint64_t* full) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) tma_load(to.box[box], from.map, from.at(batch, head, row, box), full);
    };
    const int last_rows = static_cast<int>((a.problem.queries - 1) / kStatsRows);
    PipelineState<kStages> at;
    for_each_tile(a, [&](const MaskGradWorkTile& tile) {
      if (!tile.visible) return;
      for_each_head(a, tile, [&](int batch, int head) {
        Stage& stage = shared.stage[at.stage];
        uint64_t *const scores = &shared.scores_full[at.stage], *const dp = &shared.dp_full[at.stage];
        wait(&shared.scores_empty[at.stage], at.parity ^ 1);
        arrive_expect_tx(scores, sizeof(stage.query) + sizeof(stage.key));
        load_tile(stage.query, a.query, batch, head, tile.query, scores);
        load_tile(stage.key, a.key, batch, head, tile.key, scores);
        wait(&shared.dp_empty[at.stage], at.parity ^ 1);
        arrive_expect_tx(dp, sizeof(stage.grad_out) + sizeof(stage.value) + sizeof(shared.row_stats[0]));
        load_tile(stage.grad_out, a.grad_out, batch, head, tile.query, dp);
        load_tile(stage.value, a.value, batch, head, tile.key, dp);
        // For rows past the last block, the statistics of the last block will do: what they give is not stored.
        const float* const rows = a.space.row_stats + first_row_block(a.problem, a.space.list, batch, head) * kRowStats;
#pragma unroll
        for (int n = 0; n < kQueries / kStatsRows; ++n)
          bulk_load(shared.row_stats[at.stage][n], rows + int64_t{min(tile.query / kStatsRows + n, last_rows)} * kRowStats,
                    sizeof(shared.row_stats[at.stage][n]), dp);
        at.advance();
      });
    });
  }

  // ---- the warps that load the mask and announce the tiles, by threads numbered from 0

  __device__ static void produce_masks(const MaskGradSm90Arguments& a, Shared& shared, int thread) {
    int count = 0;
    const auto produce_tile = [&](const MaskGradWorkTile& tile) {
      const int buffer = count % 2;
      wait(&shared.tile_empty[buffer], count / 2 % 2 ^ 1);
      if (thread == 0) shared.tile[buffer] = tile;
      if (tile.visible) {
        Mask mask(mask_buffer(a, shared, buffer), thread);
        mask.load(HeadMask(a.problem, tile.batch, tile.head), tile.query, static_cast<int>(a.problem.queries), tile.key,
                  static_cast<int>(a.problem.keys));
        cp_async_commit();
        cp_async_wait();
        if (thread == 0) shared.mask[buffer] = mask;
      }
      __syncwarp();
      if (lane() == 0) arrive(&shared.tile_full[buffer]);
      ++count;
    };
    for_each_tile(a, produce_tile);
    produce_tile(MaskGradWorkTile{});
  }

  // ---- a math warpgroup

  __device__ __forceinline__ static void release(uint64_t* barrier) {
    if (lane() == 0) arrive(barrier);
  }

  // Adds dS of one batch entry and head to a tile's sum. `row`: this warp's first row of the tile.
  __device__ __forceinline__ static void add_head(const MaskGradSm90Arguments& a, Shared& shared, ScoreAccumulator& sum,
                                                  const MaskGradWorkTile& tile, const Mask& mask, int row, int batch, int head,
                                                  PipelineState<kStages> at) {
    const AttentionProblem& problem = a.problem;
    Stage& stage = shared.stage[at.stage];
    const unsigned first = row / 64 * 64 * kBoxColumns * sizeof(T);  // bytes to the warpgroup's queries
    ScoreAccumulator scores, dp;
    wait(&shared.scores_full[at.stage], at.parity);
    start_row_products<T, kHeadDim / 16, kQueries, kKeys>(scores, shared_address(stage.query.box) + first,
                                                          shared_address(stage.key.box));
    wait(&shared.dp_full[at.stage], at.parity);
    start_row_products<T, kHeadDim / 16, kQueries, kKeys>(dp, shared_address(stage.grad_out.box) + first,
                                                          shared_address(stage.value.box));
    wgmma_wait<1>();
    fence_registers(flat(scores));
    release(&shared.scores_empty[at.stage]);

    const float* const stats = shared.row_stats[at.stage][row / kStatsRows] + row % kStatsRows + quad();
    const float high[] = {stats[0], stats[8]}, low[] = {stats[kStatsRows], stats[kStatsRows + 8]},
                delta[] = {stats[2 * kStatsRows], stats[2 * kStatsRows + 8]};
    const ScoreBlock here{tile.query, tile.key, static_cast<int>(problem.queries), static_cast<int>(problem.keys),
                          tile.all_visible};
    const ScoreMod score_mod = a.score_mod.of_head(problem, batch, head);
    const bool has_score_mod = score_mods(problem) != 0;
    if (has_score_mod) apply_score_mod<false>(scores, row, score_mod, here, problem.visible, NoDerivative{});
    const float scale = has_score_mod ? 1.0f : score_mod.scale;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[0][j][e] *= scale;
    mask_scores<false>(scores, row, problem.mask_dtype, score_mod.lowest_score, mask, [&] { return fminf(high[0], high[1]); });
    if (!tile.all_visible) hide_scores<false>(scores, row, here, problem.visible);
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[0][j][e] = FastBinary::exp((scores[0][j][e] - high[e / 2]) - low[e / 2]);
    wgmma_wait<0>();
    fence_registers(flat(dp));
    __syncwarp();  // all lanes have read their row statistics
    release(&shared.dp_empty[at.stage]);
    const Dropout dropout(problem, batch, head);
    if (dropout) {
      draw_weights<false, 1, kKeys / 8>(row, dropout, here, [&](int, int j, unsigned kept) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[0][j][e] = kept >> e & 1 ? dp[0][j][e] * a.keep_scale : 0;
      });
    }
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[0][j][e] = fmaf(scores[0][j][e], dp[0][j][e] - delta[e / 2], sum[0][j][e]);
  }

  // Stores a tile's sum, in vectors of 16 bytes where the rows allow it. `row`: this warp's first row of the tile.
  template <class Value>
  __device__ __forceinline__ static void store(const AttentionGradients& gradients, ScoreAccumulator& sum,
                                               const MaskGradWorkTile& tile, int row) {
    const MutableView4& to = gradients.grad_mask;
    const int64_t row_stride = to.stride[2], column_stride = to.stride[3];
    const int rows = static_cast<int>(min(gradients.mask_size[2] - tile.query, int64_t{kQueries})),
              columns = static_cast<int>(min(gradients.mask_size[3] - tile.key, int64_t{kKeys}));
    Value* const data = static_cast<Value*>(to.data) + tile.batch * to.stride[0] + tile.head * to.stride[1] +
                        tile.query * row_stride + tile.key * column_stride;
    const bool vectors = !gradients.add_to_grad_mask && column_stride == 1 && columns == kKeys && misalignment(data) == 0 &&
                         row_stride % kPerVector<Value> == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 8 * half + quad();
      Value* line = data + r * row_stride;
      if (!vectors) {
        line += 2 * lane_in_quad() * column_stride;
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j, line += 8 * column_stride)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            Value& at = line[e * column_stride];
            if (r < rows && 8 * j + 2 * lane_in_quad() + e < columns)
              at = narrow<Value>(sum[0][j][2 * half + e] + (gradients.add_to_grad_mask ? widen(at) : 0));
          }
      } else if constexpr (sizeof(Value) == 4) {
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
          if (r < rows)
            *reinterpret_cast<float2*>(line + 8 * j + 2 * lane_in_quad()) =
                make_float2(sum[0][j][2 * half], sum[0][j][2 * half + 1]);
      } else {
#pragma unroll
        for (int j = 0; j < kKeys / 8; j += 4) {
          unsigned words[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) words[n] = Fragments<Value>::pair(sum[0][j + n][2 * half], sum[0][j + n][2 * half + 1]);
          transpose_quad(words);
          if (r < rows)
            *reinterpret_cast<uint4*>(line + 8 * (j + lane_in_quad())) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  __device__ static void compute(const MaskGradSm90Arguments& a, Shared& shared, int warp) {
    const int row = warp * 16;
    PipelineState<kStages> at;
#pragma unroll 1
    for (int count = 0;; ++count) {
      const int buffer = count % 2;
      wait(&shared.tile_full[buffer], count / 2 % 2);
      const MaskGradWorkTile tile = shared.tile[buffer];
      if (tile.query < 0) return;
      ScoreAccumulator sum;
      clear(sum);
      if (tile.visible) {
        // With an address that the compiler knows to be in shared memory.
        const Mask mask = shared.mask[buffer].moved_to(mask_buffer(a, shared, buffer));
        for_each_head(a, tile, [&](int batch, int head) {
          add_head(a, shared, sum, tile, mask, row, batch, head, at);
          at.advance();
        });
      }
      __syncwarp();
      release(&shared.tile_empty[buffer]);
      visit_mask(a.gradients.grad_mask_dtype, [&]<class Value>(Value) {
        if constexpr (!std::is_same_v<Value, bool>) store<Value>(a.gradients, sum, tile, row);
      });
    }
  }

  __device__ static void run(const MaskGradSm90Arguments& a, Shared& shared) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(&shared.scores_full[i], 1);
        mbarrier_init(&shared.scores_empty[i], kMathWarps);
        mbarrier_init(&shared.dp_full[i], 1);
        mbarrier_init(&shared.dp_empty[i], kMathWarps);
      }
      for (int i = 0; i < 2; ++i) {
        mbarrier_init(&shared.tile_full[i], kMaskWarps);
        mbarrier_init(&shared.tile_empty[i], kMathWarps);
      }
      fence_barrier_init();
    }
    __syncthreads();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpSize, 0);
    if (warp < 4) {
      reg_dealloc<kProducerRegisters>();
      if (threadIdx.x == 0) produce(a, shared);
      if (warp > 0) produce_masks(a, shared, static_cast<int>(threadIdx.x) - kWarpSize);
    } else {
      reg_alloc<kMathRegisters>();
      compute(a, shared, warp - 4);
    }
  }
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(MaskGradSm90Kernel<T, kHeadDim>::kThreads, 1)
    attention_mask_grad_sm90(const __grid_constant__ MaskGradSm90Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Kernel = MaskGradSm90Kernel<T, kHeadDim>;
  extern __shared__ __align__(kBoxAlignment) char shared_boxes[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::Shared*>(shared_boxes));
#endif
}

// Takes problems of head dims up to kHeadDim that mask_grad_sm90_refusal does not refuse.
template <class T, int kHeadDim>
void mask_grad_sm90(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                    CUstream_st* stream) {
  using Kernel = MaskGradSm90Kernel<T, kHeadDim>;
  const int64_t (&size)[4] = gradients.mask_size;
  const auto tensor = [&](const ConstView4& view, bool over_keys, int64_t heads, int64_t width) {
    return tma_tensor_of<T>(problem, view, over_keys, heads, width, over_keys ? Kernel::kKeys : Kernel::kQueries);
  };
  const MaskGradTilesSm90 tiles(size);
  const MaskGradSm90Arguments arguments{
      .query = tensor(problem.query, false, problem.heads, problem.head_dim),
      .key = tensor(problem.key, true, problem.key_heads, problem.head_dim),
      .value = tensor(problem.value, true, problem.value_heads, problem.head_dim_v),
      .grad_out = tensor(gradients.grad_out, false, problem.heads, problem.head_dim_v),
      .problem = problem,
      .gradients = gradients,
      .space = space,
      .score_mod = ScoreMod(problem),
      .keep_scale = problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f,
      .batches = size[0] == 1 ? static_cast<int>(problem.batch) : 1,
      .heads = size[1] == 1 ? static_cast<int>(problem.heads) : 1,
      .row_tiles = tiles.rows,
      .column_tiles = tiles.columns,
      .tiles = static_cast<int>(tiles.count)};
  launch<attention_mask_grad_sm90<T, kHeadDim>>(arguments, std::min(arguments.tiles, sm_count()), Kernel::kThreads,
                                                Kernel::kMaskOffset + 2 * Kernel::mask_bytes(problem), stream);
}

}  // namespace flash_online::cuda
