// The gradient of a float mask on Hopper: TMA loads, wgmma products. docs/backward_sm90.md says how it is cut.
//
// Blocks of threads stay and take tiles of 128 x 96 of the mask in turn, 64 queries a warpgroup. The scores that a tile was
// added to are made again, of one batch entry and head after another, beside the weights' gradients; what their gradients sum
// to stays in registers and is written once. A warp brings queries, keys, gradients of outputs and values, three others the
// mask, ahead of what is worked on, be it of the next tile.
#pragma once

#include <algorithm>

#include "../../../hw/mbarrier.cuh"
#include "../../../hw/setmaxnreg.cuh"
#include "../../common/mask_grad.h"
#include "../../common/scores.cuh"
#include "../gemm.cuh"
#include "../tma_tensor.cuh"

namespace flash_online::cuda {

struct MaskGradientSm90Arguments {
  TmaTensor query, key, value, grad_out;
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardWorkspace space;
  ScoreMod rule;
  float keep_scale;  // of dropout: 1 / (1 - p)
  int batches, heads;  // that share a tile
  int row_tiles, column_tiles, tiles;
};

// How many tiles a mask is cut into.
struct MaskTilesSm90 {
  static constexpr int kQueries = 128, kKeys = 96;
  int rows, columns;
  int64_t count;

  explicit MaskTilesSm90(const int64_t (&mask_size)[4])
      : rows(static_cast<int>((mask_size[2] + kQueries - 1) / kQueries)),
        columns(static_cast<int>((mask_size[3] + kKeys - 1) / kKeys)),
        count(mask_size[0] * mask_size[1] * rows * columns) {}
};

// Why mask_gradient_sm90 does not take a problem that backward_sm90 takes, so that mask_gradient does; null: it does.
inline const char* mask_gradient_sm90_refusal(const AttentionGradients& gradients) {
  const int64_t (&size)[4] = gradients.mask_size;
  if (size[2] == 1 || size[3] == 1) return "the mask is broadcast along queries or keys: sums across lanes";
  if (MaskTilesSm90(size).count < sm_count()) return "the mask has too few tiles for the whole device";
  return nullptr;
}

template <class T, int kHeadDim>
struct MaskGradientOnSm90 {
  static constexpr int kQueries = MaskTilesSm90::kQueries, kKeys = MaskTilesSm90::kKeys, kStages = kHeadDim > 64 ? 1 : 2;
  static constexpr int kThreads = 384, kWarps = 8, kMaskWarps = 3;  // that compute; that bring the mask
  static constexpr int kBoxes = kHeadDim / kBoxColumns;
  static constexpr int kRegisters = 224, kLoaderRegisters = 56;

  template <int kRows>
  struct alignas(kBoxAlignment) Block {
    T box[kBoxes][kRows][kBoxColumns];
  };
  struct Stage {
    Block<kQueries> query, grad_out;
    Block<kKeys> key, value;
  };
  // Of the mask, and the first of the scores that it was added to.
  struct Tile {
    int batch = 0, head = 0, query = -1, key = 0;  // query -1: no more tiles
    bool seen = false;  // whether arithmetic and the map leave something to see
    bool whole = false;  // all queries see all keys by arithmetic, as far as both exist
  };
  using Sums = Accumulator<1, kKeys / 8>;
  using Mask = MaskTile<kQueries, kKeys, kMaskWarps * kWarpSize>;
  struct Shared {
    Stage stage[kStages];
    alignas(16) float rows[kStages][kQueries / kStatsRows][kRowStats];
    uint64_t scores_full[kStages], scores_empty[kStages], grads_full[kStages], grads_empty[kStages];
    Tile tile[2];
    Mask mask[2];  // where the values of a tile lie
    uint64_t tile_full[2], tile_empty[2];
  };
  static constexpr int kMaskOffset = (sizeof(Shared) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  static_assert(kMaskOffset + 2 * kQueries * mask_pitch(kKeys, sizeof(float)) <= 227 << 10);
  FLASH_ONLINE_HD static int mask_bytes(const AttentionProblem& problem) {
    return (problem.mask.stride[2] == 0 ? 1 : kQueries) * mask_pitch(kKeys, static_cast<int>(size_of(problem.mask_dtype)));
  }

  __device__ static char* mask_buffer(const MaskGradientSm90Arguments& a, Shared& shared, int buffer) {
    return reinterpret_cast<char*>(&shared) + kMaskOffset + buffer * mask_bytes(a.problem);
  }

  // Whether arithmetic and the map leave something of a tile to see.
  __device__ static bool sees(const MaskGradientSm90Arguments& a, const Tile& tile, int last_query) {
    const KeyRange range = keys_of_any(a.problem.visible, tile.query, last_query, a.problem.keys);
    if (range.end <= range.begin || range.end <= tile.key || range.begin >= tile.key + kKeys) return false;
    const MaskMap& map = a.space.map;
    if (!map.data) return true;
    const auto last = [&](int i, int first) { return map.size[i] == 1 ? 0 : min(map.size[i] - 1, int64_t{first + 1}); };
    const int row = tile.query / kMaskMapTile, column = tile.key / kMaskMapTile;
    for (int64_t r = map.size[2] == 1 ? 0 : row; r <= last(2, row); ++r)
      for (int64_t c = map.size[3] == 1 ? 0 : column; c <= last(3, column); ++c)
        if (static_cast<MaskKind>(map.row(tile.batch, tile.head, r)[c]) != MaskKind::kHidden) return true;
    return false;
  }

  // The tiles of this block of threads, in the order that all of its warps take them.
  template <class F>
  __device__ __forceinline__ static void for_each_tile(const MaskGradientSm90Arguments& a, F&& f) {
    const int heads = static_cast<int>(a.gradients.mask_size[1]);
#pragma unroll 1
    for (int n = static_cast<int>(blockIdx.x); n < a.tiles; n += static_cast<int>(gridDim.x)) {
      int rest = n / a.column_tiles;
      const int column = n - rest * a.column_tiles, row = rest % a.row_tiles;
      rest /= a.row_tiles;
      Tile tile{rest / heads, rest % heads, row * kQueries, column * kKeys};
      const int last_query = static_cast<int>(min(int64_t{tile.query + kQueries}, a.problem.queries)),
                last_key = static_cast<int>(min(int64_t{tile.key + kKeys}, a.problem.keys));
      tile.seen = sees(a, tile, last_query);
      tile.whole = all_see(a.problem.visible, tile.query, last_query, tile.key, last_key, a.problem.keys);
      f(tile);
    }
  }
  template <class F>
  __device__ __forceinline__ static void for_each_head(const MaskGradientSm90Arguments& a, const Tile& tile, F&& f) {
#pragma unroll 1
    for (int batch = tile.batch; batch < tile.batch + a.batches; ++batch)
#pragma unroll 1
      for (int head = tile.head; head < tile.head + a.heads; ++head) f(batch, head);
  }

  // ---- the loading warp, by one thread

  __device__ static void load(const MaskGradientSm90Arguments& a, Shared& shared) {
    const auto load_block = [](auto& to, const TmaTensor& from, int batch, int head, int row, uint64_t* full) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) tma_load(to.box[box], from.map, from.at(batch, head, row, box), full);
    };
    const int last_rows = static_cast<int>((a.problem.queries - 1) / kStatsRows);
    PipelineState<kStages> at;
    for_each_tile(a, [&](const Tile& tile) {
      if (!tile.seen) return;
      for_each_head(a, tile, [&](int batch, int head) {
        Stage& stage = shared.stage[at.stage];
        uint64_t *const scores = &shared.scores_full[at.stage], *const grads = &shared.grads_full[at.stage];
        wait(&shared.scores_empty[at.stage], at.parity ^ 1);
        arrive_expect_tx(scores, sizeof(stage.query) + sizeof(stage.key));
        load_block(stage.query, a.query, batch, head, tile.query, scores);
        load_block(stage.key, a.key, batch, head, tile.key, scores);
        wait(&shared.grads_empty[at.stage], at.parity ^ 1);
        arrive_expect_tx(grads, sizeof(stage.grad_out) + sizeof(stage.value) + sizeof(shared.rows[0]));
        load_block(stage.grad_out, a.grad_out, batch, head, tile.query, grads);
        load_block(stage.value, a.value, batch, head, tile.key, grads);
        // Rows that do not exist are nobody's: those of a block that does will do.
        const float* const rows = a.space.rows + first_row_block(a.problem, a.space.list, batch, head) * kRowStats;
#pragma unroll
        for (int n = 0; n < kQueries / kStatsRows; ++n)
          bulk_load(shared.rows[at.stage][n], rows + int64_t{min(tile.query / kStatsRows + n, last_rows)} * kRowStats,
                    sizeof(shared.rows[at.stage][n]), grads);
        at.advance();
      });
    });
  }

  // ---- the warps that bring the mask and say what to do, by threads numbered from 0

  __device__ static void load_masks(const MaskGradientSm90Arguments& a, Shared& shared, int thread) {
    int count = 0;
    const auto send = [&](const Tile& tile) {
      const int buffer = count % 2;
      wait(&shared.tile_empty[buffer], count / 2 % 2 ^ 1);
      if (thread == 0) shared.tile[buffer] = tile;
      if (tile.seen) {
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
    for_each_tile(a, send);
    send(Tile{});
  }

  // ---- a computing warpgroup

  __device__ __forceinline__ static void release(uint64_t* barrier) {
    if (lane() == 0) arrive(barrier);
  }

  // Adds a batch entry's and head's part to a tile's sums. `row`: this warp's first of the tile.
  __device__ __forceinline__ static void add_head(const MaskGradientSm90Arguments& a, Shared& shared, Sums& sum,
                                                  const Tile& tile, const Mask& mask, int row, int batch, int head,
                                                  PipelineState<kStages> at) {
    const AttentionProblem& problem = a.problem;
    Stage& stage = shared.stage[at.stage];
    const unsigned first = row / 64 * 64 * kBoxColumns * sizeof(T);  // of the warpgroup's queries
    Sums scores, grads;
    wait(&shared.scores_full[at.stage], at.parity);
    start_row_products<T, kHeadDim / 16, kQueries, kKeys>(scores, shared_address(stage.query.box) + first,
                                                          shared_address(stage.key.box));
    wait(&shared.grads_full[at.stage], at.parity);
    start_row_products<T, kHeadDim / 16, kQueries, kKeys>(grads, shared_address(stage.grad_out.box) + first,
                                                          shared_address(stage.value.box));
    wgmma_wait<1>();
    fence_registers(flat(scores));
    release(&shared.scores_empty[at.stage]);

    const float* const numbers = shared.rows[at.stage][row / kStatsRows] + row % kStatsRows + quad();
    const float high[] = {numbers[0], numbers[8]}, low[] = {numbers[kStatsRows], numbers[kStatsRows + 8]},
                delta[] = {numbers[2 * kStatsRows], numbers[2 * kStatsRows + 8]};
    const ScoreBlock here{tile.query, tile.key, static_cast<int>(problem.queries), static_cast<int>(problem.keys), tile.whole};
    const ScoreMod rule = a.rule.of_head(problem, batch, head);
    const bool bent = rule.cap > 0 || rule.slope != 0;
    if (bent) apply_score_mod<false>(scores, row, rule, here, problem.visible);
    const float scale = bent ? 1.0f : rule.scale;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[0][j][e] = fmaf(scores[0][j][e], scale, -high[e / 2]);
    mask_scores<false>(scores, row, problem.mask_dtype, mask);
    if (!tile.whole) hide_scores<false>(scores, row, here, problem.visible);
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[0][j][e] = FastBinary::exp(scores[0][j][e] - low[e / 2]);
    wgmma_wait<0>();
    fence_registers(flat(grads));
    __syncwarp();  // all lanes have read their numbers
    release(&shared.grads_empty[at.stage]);
    const Dropout dropout(problem, batch, head);
    if (dropout) {
      draw_weights<false, 1, kKeys / 8>(row, dropout, here, [&](int, int j, unsigned kept) {
#pragma unroll
        for (int e = 0; e < 4; ++e) grads[0][j][e] = kept >> e & 1 ? grads[0][j][e] * a.keep_scale : 0;
      });
    }
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[0][j][e] = fmaf(scores[0][j][e], grads[0][j][e] - delta[e / 2], sum[0][j][e]);
  }

  // What a tile's gradients sum to, whole vectors at a time where they lie so. `row`: this warp's first of the tile.
  template <class Value>
  __device__ __forceinline__ static void store(const AttentionGradients& gradients, Sums& sum, const Tile& tile, int row) {
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

  __device__ static void compute(const MaskGradientSm90Arguments& a, Shared& shared, int warp) {
    const int row = warp * 16;
    PipelineState<kStages> at;
#pragma unroll 1
    for (int count = 0;; ++count) {
      const int buffer = count % 2;
      wait(&shared.tile_full[buffer], count / 2 % 2);
      const Tile tile = shared.tile[buffer];
      if (tile.query < 0) return;
      Sums sum;
      clear(sum);
      if (tile.seen) {
        // The address anew, as one that the compiler knows to be of shared memory.
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

  __device__ static void run(const MaskGradientSm90Arguments& a, Shared& shared) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(&shared.scores_full[i], 1);
        mbarrier_init(&shared.scores_empty[i], kWarps);
        mbarrier_init(&shared.grads_full[i], 1);
        mbarrier_init(&shared.grads_empty[i], kWarps);
      }
      for (int i = 0; i < 2; ++i) {
        mbarrier_init(&shared.tile_full[i], kMaskWarps);
        mbarrier_init(&shared.tile_empty[i], kWarps);
      }
      fence_barrier_init();
    }
    __syncthreads();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpSize, 0);
    if (warp < 4) {
      reg_dealloc<kLoaderRegisters>();
      if (threadIdx.x == 0) load(a, shared);
      if (warp > 0) load_masks(a, shared, static_cast<int>(threadIdx.x) - kWarpSize);
    } else {
      reg_alloc<kRegisters>();
      compute(a, shared, warp - 4);
    }
  }
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(MaskGradientOnSm90<T, kHeadDim>::kThreads, 1)
    mask_gradient_tiles_sm90(const __grid_constant__ MaskGradientSm90Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Body = MaskGradientOnSm90<T, kHeadDim>;
  extern __shared__ __align__(kBoxAlignment) char shared_boxes[];
  Body::run(arguments, *reinterpret_cast<typename Body::Shared*>(shared_boxes));
#endif
}

// Head dims are at most kHeadDim; the refusal lets the problem pass.
template <class T, int kHeadDim>
void mask_gradient_sm90(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                        CUstream_st* stream) {
  using Body = MaskGradientOnSm90<T, kHeadDim>;
  const int64_t (&size)[4] = gradients.mask_size;
  const auto boxes = [&](const ConstView4& view, bool over_keys, int64_t heads, int64_t width) {
    return tma_tensor_of<T>(problem, view, over_keys, heads, width, over_keys ? Body::kKeys : Body::kQueries);
  };
  const MaskTilesSm90 tiles(size);
  const MaskGradientSm90Arguments arguments{boxes(problem.query, false, problem.heads, problem.head_dim),
                                            boxes(problem.key, true, problem.key_heads, problem.head_dim),
                                            boxes(problem.value, true, problem.value_heads, problem.head_dim_v),
                                            boxes(gradients.grad_out, false, problem.heads, problem.head_dim_v),
                                            problem,
                                            gradients,
                                            space,
                                            ScoreMod(problem),
                                            problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f,
                                            size[0] == 1 ? static_cast<int>(problem.batch) : 1,
                                            size[1] == 1 ? static_cast<int>(problem.heads) : 1,
                                            tiles.rows,
                                            tiles.columns,
                                            static_cast<int>(tiles.count)};
  launch<mask_gradient_tiles_sm90<T, kHeadDim>>(arguments, std::min(arguments.tiles, sm_count()), Body::kThreads,
                                                Body::kMaskOffset + 2 * Body::mask_bytes(problem), stream);
}

}  // namespace flash_online::cuda
