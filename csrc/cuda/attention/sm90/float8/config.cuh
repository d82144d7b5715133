// Definitions that the warps of the Hopper kernel of e4m3 attention share: arguments, and the layout of shared memory with its
// barriers.
#pragma once

#include "../../../hw/launch.h"
#include "../../../hw/tma.cuh"
#include "../../../hw/vector.cuh"
#include "../../../hw/wgmma.cuh"
#include "../../float8/quantise.cuh"
#include "../../masks/sparsity.cuh"
#include "../forward/tile_scheduler.cuh"
#include "../tma_tensor.cuh"
#include "tiles.h"

namespace flash_online::cuda {

struct Float8Arguments {
  TmaTensor query, key, value;  // of bytes; value [batch, heads, columns, keys], the keys in the order of float8_position()
  AttentionProblem problem;
  int batch, heads;
  TileSchedule schedule;
  SpanTables tables;
  unsigned* tile_counter;  // with spans, 0 at the start: how many work tiles the CTAs have claimed
  Float8Operands operands;
  bool stores_vectors;  // whether eight columns of the results are one access
};

template <class Out, class Variant>
struct Float8Sm90Kernel {
  static constexpr Float8Tile kTile = Variant::kTile;
  // Whether position hides some keys, but for those after the last; and a softcap and spans.
  static constexpr bool kBounded = Variant::kBounded, kOptions = Variant::kOptions;
  static constexpr int kWarpgroups = kTile.warpgroups, kRowsPerWarpgroup = 64, kRows = kWarpgroups * kRowsPerWarpgroup;
  static constexpr int kKeys = 128, kBoxBytes = 128;  // a box of values has the keys of a block
  static constexpr int kBoxes = (kTile.head_dim + kBoxBytes - 1) / kBoxBytes;
  static constexpr int kHeadDimSteps = kTile.head_dim / 32, kKeySteps = kKeys / 32;  // of wgmma, which is 32 deep
  static constexpr int kPartColumns = kTile.head_dim / kTile.parts;
  static constexpr int kWords = kKeys / 8;  // of a lane, with four weights each
  static constexpr int kScoreRegisters = kKeys / 2, kOutRegisters = kTile.head_dim / 2, kPartRegisters = kPartColumns / 2;
  static constexpr int kStages = kTile.stages, kQueryStages = kTile.query_stages;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kRegisters = kWarpgroups == 2 ? 240 : 160, kProducerRegisters = kWarpgroups == 2 ? 24 : 32;
  static constexpr float kWeightExponent = 8;
  // Where scores can be beyond this, their maximum is subtracted before they are multiplied by their scale: rounding the
  // product of maximum and scale could move weights out of e4m3's range.
  static constexpr float kLargeScore = 0x1p23f, kMostOfProduct = 448.0f * 448.0f * kTile.head_dim;
  static constexpr int kTurnBarrier = 1;
  using Product = Wgmma<__nv_fp8_e4m3, kKeys>;
  using PartProduct = Wgmma<__nv_fp8_e4m3, kPartColumns>;

  struct WorkTile {
    int batch, head, first_query;  // batch -1: no more tiles
  };
  struct Block {
    int key;  // the first one; -1: the tile has no more blocks
    // A bit per warpgroup: whether position hides all of the block from its queries; whether any of its scores is hidden.
    uint8_t hidden_from, mixed_for;
  };
  struct alignas(kBoxAlignment) QueryBuffer {
    uint8_t box[kBoxes][kRows][kBoxBytes];
  };
  struct alignas(kBoxAlignment) KeyBuffer {
    uint8_t box[kBoxes][kKeys][kBoxBytes];
  };
  struct alignas(kBoxAlignment) ValueBuffer {
    uint8_t box[kTile.head_dim][kKeys];
  };
  struct Shared {
    QueryBuffer query[kQueryStages];
    KeyBuffer key[kStages];
    ValueBuffer value[kStages];
    WorkTile tile[kQueryStages];
    Block block[kStages];
    uint64_t query_full[kQueryStages], query_empty[kQueryStages];
    uint64_t key_full[kStages], key_empty[kStages], value_full[kStages], value_empty[kStages];
  };
  static_assert(sizeof(Shared) <= 227 << 10);

  __device__ __forceinline__ static int key_head(const Float8Arguments& a, int head) { return head / a.key.q_heads_per_head; }
  __device__ __forceinline__ static float scale_of(const float* scale, const int64_t (&stride)[2], int batch, int head) {
    return scale ? __ldg(scale + batch * stride[0] + head * stride[1]) : 1;
  }

  struct Loader;
  struct MathWarpgroup;
  __device__ static void run(const Float8Arguments& a, Shared& shared);
};

}  // namespace flash_online::cuda
