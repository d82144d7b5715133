// The tile table of the Hopper backward kernel, by head dim. A head dim between two rows runs in the next larger tile, which
// TMA fills up with zeros.
#pragma once

namespace flash_online::cuda {

inline constexpr int kMaxLengthBackwardSm90 = 1 << 28;  // of the queries and of the keys, that the kernels take

// Features in addition to plain attention.
enum class BackwardSm90Features {
  kPlain,
  // A bool mask, a 16-bit mask of the queries' dtype, ALiBi. In the pipeline: a bool mask, with ALiBi or a softcap.
  kMasks,
  kMasksNarrowTile,  // as kMasks, in CTAs of 64 keys: where a bool mask hides much
  kSparse,           // spans, lists of blocks
  kDropout,          // dropout, a bool mask, ALiBi
  kAllOptions,       // softcap, any mask, ALiBi, dropout, any scale
};

// A CTA owns `keys` keys and loops over blocks of `queries` queries. It has a producer warpgroup and math warpgroups of 64 keys
// each. A CTA of 64 keys has one math warpgroup, or three that form a pipeline.
struct BackwardSm90Tile {
  int head_dim, head_dim_v;
  BackwardSm90Features features;
  int keys, queries;

  // These five are for the schedule of schedule_own_keys.cuh, in which each warpgroup has its own keys.
  bool prefetch_lse = false;  // a block's lse is read into registers before its scores are complete
  bool ping_pong = false;  // the two warpgroups start their scores one after the other
  bool send_dq_late = false;  // dQ is stored during the next block, not at once
  bool ds_before_dv = false;  // dS is computed with the exponentials, before dV
  // A CTA takes one work tile after another. The epilogue of a tile overlaps the loads of the next tile.
  bool persistent = false;

  // For the pipeline: of the 16 x 8 tiles in a chunk of dQ, the number added from registers and not by bulk reductions.
  int dq_register_tiles = 0;

  int math_registers, producer_registers;  // per thread
  int aux_registers = 0;  // of the dropout warps, or of the pipeline's third warpgroup
  int dropout_warps = 0;  // each generates the bits for a quarter of a block
  int warpgroups = 2;  // math warpgroups with `math_registers`: all but the pipeline's third
  int ctas_per_sm = 1;

  constexpr bool pipelined() const { return keys == 64 && warpgroups == 2; }
  constexpr int ctas_per_cluster() const { return pipelined() ? 2 : 1; }  // which have neighbouring keys and share dQ
  constexpr int threads() const { return 128 * (warpgroups + 1 + pipelined()) + 32 * dropout_warps; }
};

// clang-format off
inline constexpr BackwardSm90Tile kBackwardSm90Tiles[] = {
    {.head_dim = 64, .head_dim_v = 64, .features = BackwardSm90Features::kPlain, .keys = 128, .queries = 128,
     .ping_pong = true, .send_dq_late = true, .persistent = true, .math_registers = 240, .producer_registers = 24},
    {.head_dim = 64, .head_dim_v = 64, .features = BackwardSm90Features::kMasks, .keys = 128, .queries = 128,
     .send_dq_late = true, .math_registers = 232, .producer_registers = 40},
    {.head_dim = 64, .head_dim_v = 64, .features = BackwardSm90Features::kSparse, .keys = 128, .queries = 128,
     .ping_pong = true, .send_dq_late = true, .persistent = true, .math_registers = 240, .producer_registers = 24},
    {.head_dim = 64, .head_dim_v = 64, .features = BackwardSm90Features::kDropout, .keys = 128, .queries = 128,
     .send_dq_late = true, .math_registers = 224, .producer_registers = 24, .aux_registers = 40, .dropout_warps = 4},

    {.head_dim = 96, .head_dim_v = 96, .features = BackwardSm90Features::kPlain, .keys = 128, .queries = 64,
     .ping_pong = true, .ds_before_dv = true, .persistent = true, .math_registers = 240, .producer_registers = 24},

    {.head_dim = 128, .head_dim_v = 128, .features = BackwardSm90Features::kPlain, .keys = 128, .queries = 64,
     .ping_pong = true, .ds_before_dv = true, .persistent = true, .math_registers = 240, .producer_registers = 24},
    {.head_dim = 128, .head_dim_v = 128, .features = BackwardSm90Features::kMasks, .keys = 128, .queries = 64,
     .prefetch_lse = true, .math_registers = 240, .producer_registers = 24},
    {.head_dim = 128, .head_dim_v = 128, .features = BackwardSm90Features::kMasksNarrowTile, .keys = 64, .queries = 64,
     .math_registers = 232, .producer_registers = 24, .warpgroups = 1, .ctas_per_sm = 2},
    {.head_dim = 128, .head_dim_v = 128, .features = BackwardSm90Features::kSparse, .keys = 128, .queries = 64,
     .ping_pong = true, .ds_before_dv = true, .persistent = true, .math_registers = 240, .producer_registers = 24},
    {.head_dim = 128, .head_dim_v = 128, .features = BackwardSm90Features::kDropout, .keys = 128, .queries = 64,
     .math_registers = 224, .producer_registers = 24, .aux_registers = 40, .dropout_warps = 4},
    {.head_dim = 128, .head_dim_v = 128, .features = BackwardSm90Features::kAllOptions, .keys = 128, .queries = 64,
     .math_registers = 240, .producer_registers = 24},

    {.head_dim = 160, .head_dim_v = 160, .features = BackwardSm90Features::kPlain, .keys = 64, .queries = 64,
     .dq_register_tiles = 4, .math_registers = 192, .producer_registers = 24, .aux_registers = 104},
    {.head_dim = 192, .head_dim_v = 128, .features = BackwardSm90Features::kPlain, .keys = 64, .queries = 64,
     .dq_register_tiles = 4, .math_registers = 192, .producer_registers = 24, .aux_registers = 104},
    {.head_dim = 192, .head_dim_v = 192, .features = BackwardSm90Features::kPlain, .keys = 64, .queries = 64,
     .dq_register_tiles = 4, .math_registers = 192, .producer_registers = 24, .aux_registers = 104},
    {.head_dim = 256, .head_dim_v = 256, .features = BackwardSm90Features::kPlain, .keys = 64, .queries = 64,
     .dq_register_tiles = 2, .math_registers = 208, .producer_registers = 24, .aux_registers = 72},
    {.head_dim = 256, .head_dim_v = 256, .features = BackwardSm90Features::kMasks, .keys = 64, .queries = 64,
     .dq_register_tiles = 2, .math_registers = 208, .producer_registers = 24, .aux_registers = 72},
    {.head_dim = 256, .head_dim_v = 256, .features = BackwardSm90Features::kSparse, .keys = 64, .queries = 64,
     .dq_register_tiles = 2, .math_registers = 200, .producer_registers = 40, .aux_registers = 72},
};
// clang-format on

// The assumptions of the kernels about a row. config.cuh asserts how much shared memory a row takes.
constexpr bool is_valid(const BackwardSm90Tile& tile) {
  const auto is_register_count = [](int registers) { return registers % 8 == 0 && registers >= 24 && registers <= 240; };
  const int aux_threads = tile.threads() - 128 * (tile.warpgroups + 1);
  // A CTA has as many registers as its threads were launched with, a multiple of 8 each. Warps that ask for more than there are
  // (setmaxnreg) wait for ever.
  const int launch_registers = 65536 / (tile.threads() * tile.ctas_per_sm) / 8 * 8 * tile.threads();
  return tile.head_dim % 32 == 0 && tile.head_dim_v % 32 == 0 && tile.head_dim_v <= tile.head_dim &&
         (tile.keys == 64 * tile.warpgroups || tile.pipelined()) && (tile.queries == 64 || tile.queries == 128) &&
         tile.threads() <= 1024 && is_register_count(tile.math_registers) && is_register_count(tile.producer_registers) &&
         (aux_threads == 0 ? tile.aux_registers == 0 : is_register_count(tile.aux_registers)) &&
         tile.dropout_warps == (tile.features == BackwardSm90Features::kDropout ? 4 : 0) &&
         (!tile.persistent || tile.features == BackwardSm90Features::kPlain ||
          tile.features == BackwardSm90Features::kSparse) &&
         128 * (tile.warpgroups * tile.math_registers + tile.producer_registers) + aux_threads * tile.aux_registers <=
             launch_registers;
}
static_assert([] {
  for (const BackwardSm90Tile& tile : kBackwardSm90Tiles)
    if (!is_valid(tile)) return false;
  return true;
}());

// The largest head dim of the rows with dropout or all options; over it, rows with masks are of the pipeline.
inline constexpr int kMaxOptionsHeadDimBackwardSm90 = 128;

consteval BackwardSm90Tile backward_sm90_tile(int head_dim, int head_dim_v, BackwardSm90Features features) {
  for (const BackwardSm90Tile& tile : kBackwardSm90Tiles)
    if (tile.head_dim == head_dim && tile.head_dim_v == head_dim_v && tile.features == features) return tile;
  throw "no row in kBackwardSm90Tiles";
}

// A row of the table as a type.
template <int kHeadDim, int kHeadDimV, BackwardSm90Features kFeatures>
struct BackwardSm90Config {
  static constexpr BackwardSm90Tile kTile = backward_sm90_tile(kHeadDim, kHeadDimV, kFeatures);
};

}  // namespace flash_online::cuda
