// The tile table of the Hopper forward kernel, by head dim. A head dim between two entries runs in the next larger tile; TMA
// fills the missing columns with zeros.
#pragma once

#include <cstddef>

namespace flash_online::cuda {

// Features in addition to plain attention. kOptions: softcap, ALiBi, bool masks and, with dropout warps, dropout.
// kOptionsFloatMask: also 16-bit float masks, which need tiles in shared memory. kSparse: spans, lists of blocks, and nothing
// else. kSparseNarrow: as kSparse in blocks of 64 keys, for lists of such blocks. kMaxLogit: the maximum logit alone.
enum class ForwardSm90Features { kPlain, kOptions, kOptionsFloatMask, kSparse, kSparseNarrow, kMaxLogit };

struct ForwardSm90Tile {
  int head_dim, head_dim_v;
  int warpgroups;  // math warpgroups, of 64 queries each; with v_by_columns all of them have the same 64
  int keys;  // per block of the mainloop
  // Keys of a block that share one maximum and one partial sum of a row; 0: all keys. Entries that can replace each other have
  // the same value, so that the choice between them changes no bit of a row's result.
  int softmax_keys = 0;
  int stages;  // buffers of values, and of keys unless v_by_columns
  int query_stages;  // buffers of 64 queries each

  // Queries are the left operand of Q K^T in registers: their shared memory is free after the first product of a tile.
  bool query_in_registers = false;
  bool staged_out = false;  // results leave through shared memory of their own and TMA, not from registers
  bool ping_pong = false;  // warpgroups issue their products in turn
  // All warpgroups have the same 64 queries: each computes all of their scores, but only its share of the columns of the
  // results. A block of keys takes two stages, each with half of the head dim.
  bool v_by_columns = false;
  // Tiles that each CTA takes from the heads of a section, under a causal mask.
  int section_rounds = 1;
  int ctas_per_sm = 1;

  // An entry for little work takes sequences of at most max_queries queries, windows of at most max_window keys, and whatever
  // would leave half of the SMs without a tile of the next entry. 0: the entry takes everything.
  int max_queries = 0, max_window = 0;

  int dropout_warps = 0;  // they generate the bits of dropout
  int registers, producer_registers, dropout_registers = 0;  // per thread, claimed by setmaxnreg

  constexpr int threads() const { return 128 * (warpgroups + 1) + 32 * dropout_warps; }
  constexpr int row_blocks() const { return v_by_columns ? 1 : warpgroups; }  // of 64 queries
  constexpr int queries() const { return 64 * row_blocks(); }
  constexpr int sub_block_keys() const { return softmax_keys > 0 ? softmax_keys : keys; }
  constexpr int key_stages_per_block() const { return v_by_columns ? 2 : 1; }
  constexpr int key_stages() const { return v_by_columns ? 3 : stages; }  // of half of the head dim with v_by_columns
};

// clang-format off

// Plain attention. For each head dim the entry for little work stands before the one that takes everything.
inline constexpr ForwardSm90Tile kForwardSm90Plain[] = {
    {.head_dim = 64, .head_dim_v = 64, .warpgroups = 1, .keys = 64, .softmax_keys = 32, .stages = 3, .query_stages = 2,
     .staged_out = true,
     .section_rounds = 8, .ctas_per_sm = 3, .max_queries = 256, .max_window = 512,
     .registers = 128, .producer_registers = 32},
    {.head_dim = 64, .head_dim_v = 64, .warpgroups = 3, .keys = 128, .softmax_keys = 32, .stages = 3, .query_stages = 6,
     .staged_out = true, .ping_pong = true,
     .section_rounds = 8,
     .registers = 160, .producer_registers = 32},
    {.head_dim = 96, .head_dim_v = 96, .warpgroups = 2, .keys = 128, .stages = 2, .query_stages = 2,
     .query_in_registers = true, .staged_out = true, .ping_pong = true,
     .registers = 232, .producer_registers = 40},
    {.head_dim = 128, .head_dim_v = 128, .warpgroups = 1, .keys = 64, .softmax_keys = 64, .stages = 2, .query_stages = 1,
     .query_in_registers = true, .staged_out = true,
     .ctas_per_sm = 2, .max_queries = 64, .max_window = 128,
     .registers = 208, .producer_registers = 40},
    {.head_dim = 128, .head_dim_v = 128, .warpgroups = 2, .keys = 128, .softmax_keys = 64, .stages = 2, .query_stages = 2,
     .query_in_registers = true, .staged_out = true, .ping_pong = true,
     .registers = 232, .producer_registers = 40},
    {.head_dim = 192, .head_dim_v = 128, .warpgroups = 2, .keys = 96, .stages = 2, .query_stages = 2,
     .query_in_registers = true, .staged_out = true, .ping_pong = true,
     .registers = 232, .producer_registers = 40},
    {.head_dim = 192, .head_dim_v = 192, .warpgroups = 2, .keys = 96, .stages = 2, .query_stages = 3,
     .ping_pong = true,
     .registers = 232, .producer_registers = 40},
    {.head_dim = 256, .head_dim_v = 256, .warpgroups = 2, .keys = 64, .stages = 2, .query_stages = 3,
     .ping_pong = true,
     .registers = 232, .producer_registers = 40},
    {.head_dim = 512, .head_dim_v = 512, .warpgroups = 2, .keys = 64, .stages = 1, .query_stages = 1,
     .v_by_columns = true,
     .registers = 232, .producer_registers = 40},
};

// Plain attention over packed sequences: there is more to schedule, so the producer warps need more registers.
inline constexpr ForwardSm90Tile kForwardSm90Packed[] = {
    {.head_dim = 64, .head_dim_v = 64, .warpgroups = 1, .keys = 64, .softmax_keys = 32, .stages = 3, .query_stages = 2,
     .staged_out = true,
     .section_rounds = 8, .ctas_per_sm = 2, .max_queries = 256, .max_window = 512,
     .registers = 200, .producer_registers = 56},
    {.head_dim = 64, .head_dim_v = 64, .warpgroups = 3, .keys = 96, .softmax_keys = 32, .stages = 3, .query_stages = 6,
     .staged_out = true, .ping_pong = true,
     .section_rounds = 8,
     .registers = 152, .producer_registers = 56},
    {.head_dim = 96, .head_dim_v = 96, .warpgroups = 2, .keys = 128, .stages = 2, .query_stages = 2,
     .query_in_registers = true, .staged_out = true, .ping_pong = true,
     .registers = 224, .producer_registers = 56},
    {.head_dim = 128, .head_dim_v = 128, .warpgroups = 1, .keys = 64, .softmax_keys = 64, .stages = 2, .query_stages = 1,
     .query_in_registers = true, .staged_out = true,
     .ctas_per_sm = 2, .max_queries = 64, .max_window = 128,
     .registers = 200, .producer_registers = 56},
    {.head_dim = 128, .head_dim_v = 128, .warpgroups = 2, .keys = 128, .softmax_keys = 64, .stages = 2, .query_stages = 2,
     .query_in_registers = true, .staged_out = true, .ping_pong = true,
     .registers = 224, .producer_registers = 56},
    {.head_dim = 192, .head_dim_v = 128, .warpgroups = 2, .keys = 96, .stages = 2, .query_stages = 2,
     .query_in_registers = true, .staged_out = true, .ping_pong = true,
     .registers = 224, .producer_registers = 56},
    {.head_dim = 192, .head_dim_v = 192, .warpgroups = 2, .keys = 96, .stages = 2, .query_stages = 3,
     .ping_pong = true,
     .registers = 224, .producer_registers = 56},
    {.head_dim = 256, .head_dim_v = 256, .warpgroups = 2, .keys = 64, .stages = 2, .query_stages = 3,
     .ping_pong = true,
     .registers = 232, .producer_registers = 40},
};

// kOptions, dense or packed. Blocks are the 64 keys of a tile of the mask map, so that a block is read or skipped as a whole.
inline constexpr ForwardSm90Tile kForwardSm90Options[] = {
    {.head_dim = 64, .head_dim_v = 64, .warpgroups = 3, .keys = 64, .stages = 6, .query_stages = 6,
     .staged_out = true,
     .section_rounds = 8,
     .dropout_warps = 8, .registers = 120, .producer_registers = 48, .dropout_registers = 32},
    {.head_dim = 96, .head_dim_v = 96, .warpgroups = 2, .keys = 64, .stages = 4, .query_stages = 2,
     .query_in_registers = true, .staged_out = true,
     .dropout_warps = 8, .registers = 184, .producer_registers = 48, .dropout_registers = 32},
    {.head_dim = 128, .head_dim_v = 128, .warpgroups = 2, .keys = 64, .stages = 4, .query_stages = 2,
     .query_in_registers = true, .staged_out = true,
     .dropout_warps = 8, .registers = 184, .producer_registers = 48, .dropout_registers = 32},
    {.head_dim = 192, .head_dim_v = 128, .warpgroups = 2, .keys = 64, .stages = 3, .query_stages = 2,
     .query_in_registers = true, .staged_out = true,
     .dropout_warps = 4, .registers = 216, .producer_registers = 40, .dropout_registers = 40},
    {.head_dim = 192, .head_dim_v = 192, .warpgroups = 2, .keys = 64, .stages = 3, .query_stages = 3,
     .dropout_warps = 4, .registers = 216, .producer_registers = 40, .dropout_registers = 40},
    // A warpgroup of dropout warps would leave too few registers at launch for products of 256 columns.
    {.head_dim = 256, .head_dim_v = 256, .warpgroups = 2, .keys = 64, .stages = 2, .query_stages = 3,
     .registers = 232, .producer_registers = 40},
};

// kOptionsFloatMask: tiles of the mask come with the keys, so that there is memory for fewer stages.
inline constexpr ForwardSm90Tile kForwardSm90FloatMask[] = {
    {.head_dim = 64, .head_dim_v = 64, .warpgroups = 3, .keys = 64, .stages = 3, .query_stages = 6,
     .staged_out = true,
     .section_rounds = 8,
     .dropout_warps = 4, .registers = 128, .producer_registers = 48, .dropout_registers = 48},
    {.head_dim = 96, .head_dim_v = 96, .warpgroups = 2, .keys = 64, .stages = 3, .query_stages = 2,
     .query_in_registers = true, .staged_out = true,
     .dropout_warps = 4, .registers = 208, .producer_registers = 48, .dropout_registers = 48},
    {.head_dim = 128, .head_dim_v = 128, .warpgroups = 2, .keys = 64, .stages = 3, .query_stages = 2,
     .query_in_registers = true, .staged_out = true,
     .dropout_warps = 4, .registers = 208, .producer_registers = 48, .dropout_registers = 48},
    {.head_dim = 192, .head_dim_v = 128, .warpgroups = 2, .keys = 64, .stages = 2, .query_stages = 2,
     .query_in_registers = true, .staged_out = true,
     .dropout_warps = 4, .registers = 216, .producer_registers = 40, .dropout_registers = 40},
    {.head_dim = 192, .head_dim_v = 192, .warpgroups = 2, .keys = 64, .stages = 2, .query_stages = 3,
     .dropout_warps = 4, .registers = 216, .producer_registers = 40, .dropout_registers = 40},
    {.head_dim = 256, .head_dim_v = 256, .warpgroups = 2, .keys = 64, .stages = 2, .query_stages = 2,
     .registers = 232, .producer_registers = 40},
};

// clang-format on

inline constexpr int kForwardSm90Entries = static_cast<int>(sizeof(kForwardSm90Plain) / sizeof(kForwardSm90Plain[0]));

// The largest head dims that run with options, with dropout, and over packed sequences.
inline constexpr int kForwardSm90MaxOptionsHeadDim = 256;
inline constexpr int kForwardSm90MaxDropoutHeadDim = 192;
inline constexpr int kForwardSm90MaxPackedHeadDim = 256;

// The entry of a table that stands for an entry of kForwardSm90Plain. Called at compile time: a missing entry is an error.
template <size_t kCount>
constexpr ForwardSm90Tile forward_sm90_variant(const ForwardSm90Tile (&table)[kCount], const ForwardSm90Tile& plain) {
  size_t n = 0;
  while (table[n].head_dim != plain.head_dim || table[n].head_dim_v != plain.head_dim_v ||
         table[n].max_queries != plain.max_queries)
    ++n;
  return table[n];
}

// A tile over cached keys, from that of packed sequences. There is no dropout: the registers of its warps go to the others.
constexpr ForwardSm90Tile forward_sm90_cached(ForwardSm90Tile packed) {
  if (packed.dropout_warps == 0) return packed;
  packed.dropout_warps = packed.dropout_registers = 0;
  packed.producer_registers = 56;
  const int launched = 65536 / packed.threads() / 8 * 8 * (packed.threads() / 128);
  packed.registers = (launched - packed.producer_registers) / packed.warpgroups / 8 * 8;
  return packed;
}

// The tile for sparsity. It is the tile of packed sequences, which leaves the producer warps more registers, and scheduling by
// tables needs them.
constexpr ForwardSm90Tile forward_sm90_sparse(ForwardSm90Tile packed, bool narrow) {
  constexpr int kNarrowKeys = 64;
  if (packed.head_dim_v > 128) packed.query_stages = packed.row_blocks();  // there is no room for more and the words of bits
  if (narrow && packed.keys > kNarrowKeys) {
    packed.stages = packed.stages * packed.keys / kNarrowKeys;
    packed.keys = kNarrowKeys;
  }
  return packed;
}

// The cut of tiles over cached keys by shares of CTAs (cached/line_scheduler.cuh).
enum class ForwardSm90KvSplit {
  kNone,
  kTiles,  // those of whole tiles
  kSmallTiles,  // of 64 rows, for calls that take as long as their keys take to arrive
};

// A tile that shares cut, from one over cached keys. Blocks are a power of two of keys.
constexpr ForwardSm90Tile forward_sm90_kv_split(ForwardSm90Tile cached, ForwardSm90KvSplit kv_split) {
  // Bytes in flight to an SM for small tiles: more are read no faster, and less evenly by the SMs.
  constexpr int kBytesAhead = 64 << 10, kElementBytes = 2, kKeys = 64;
  if (kv_split == ForwardSm90KvSplit::kNone) return cached;
  if (kv_split == ForwardSm90KvSplit::kSmallTiles) {
    const int columns = (cached.head_dim + 63) / 64 * 64 + (cached.head_dim_v + 63) / 64 * 64,
              stages = kBytesAhead / (columns * kKeys * kElementBytes);
    cached.warpgroups = 1;
    cached.query_stages = cached.query_in_registers ? 1 : 2;
    cached.keys = kKeys;
    cached.stages = stages < 2 ? 2 : stages;
    cached.ping_pong = false;
    cached.registers = 240;
    cached.producer_registers = 56;
  } else if (cached.keys == 96) {
    cached.stages = cached.stages * cached.keys / kKeys;
    cached.keys = kKeys;
  }
  return cached;
}

// The tile of a kernel: an entry of kForwardSm90Plain, by index, and what the kernel has.
template <int kEntry, ForwardSm90Features kFeatures, bool kOfPacked, bool kOfCached = false,
          ForwardSm90KvSplit kOfKvSplit = ForwardSm90KvSplit::kNone>
struct ForwardSm90Variant {
  static constexpr bool kIsNarrow = kFeatures == ForwardSm90Features::kSparseNarrow,
                        kSparse = kFeatures == ForwardSm90Features::kSparse || kIsNarrow,
                        kMaxLogit = kFeatures == ForwardSm90Features::kMaxLogit,
                        kHasOptions = kFeatures != ForwardSm90Features::kPlain && !kSparse && !kMaxLogit,
                        kFloatMask = kFeatures == ForwardSm90Features::kOptionsFloatMask, kPacked = kOfPacked || kOfCached,
                        kCached = kOfCached, kKvSplit = kOfKvSplit != ForwardSm90KvSplit::kNone;
  static constexpr ForwardSm90Tile kUncached =
      kFloatMask    ? forward_sm90_variant(kForwardSm90FloatMask, kForwardSm90Plain[kEntry])
      : kHasOptions ? forward_sm90_variant(kForwardSm90Options, kForwardSm90Plain[kEntry])
      : kSparse     ? forward_sm90_sparse(forward_sm90_variant(kForwardSm90Packed, kForwardSm90Plain[kEntry]), kIsNarrow)
      : kPacked     ? forward_sm90_variant(kForwardSm90Packed, kForwardSm90Plain[kEntry])
                    : kForwardSm90Plain[kEntry];
  static constexpr ForwardSm90Tile kWhole = kCached ? forward_sm90_cached(kUncached) : kUncached,
                                   kTile = forward_sm90_kv_split(kWhole, kOfKvSplit);
};

// The assumptions of the kernels about an entry.
constexpr bool forward_sm90_is_valid(const ForwardSm90Tile& t) {
  // wgmma is 16 deep. An accumulator has at most 256 columns.
  if (t.head_dim % 16 != 0 || t.head_dim_v % 16 != 0 || t.keys % 16 != 0 || t.keys > 256) return false;
  if (t.sub_block_keys() % 16 != 0 || t.keys % t.sub_block_keys() != 0) return false;
  if (t.head_dim_v / (t.warpgroups / t.row_blocks()) > 256) return false;
  if (t.stages < 1 || t.query_stages < t.row_blocks() || t.threads() > 1024) return false;
  if (t.ping_pong && t.warpgroups < 2) return false;
  if (t.v_by_columns && (t.query_in_registers || t.staged_out || t.dropout_warps > 0)) return false;
  // setmaxnreg takes multiples of 8 from 24 to 256, and a warpgroup as a whole.
  const auto is_budget = [](int registers) { return registers % 8 == 0 && registers >= 24 && registers <= 256; };
  if (!is_budget(t.registers) || !is_budget(t.producer_registers)) return false;
  if (t.dropout_warps % 4 != 0 || (t.dropout_warps > 0 && !is_budget(t.dropout_registers))) return false;
  // All registers that warps claim must exist, or they wait forever: a CTA has those of its launch, in multiples of eight.
  const int launched = 65536 / (t.threads() * t.ctas_per_sm) / 8 * 8 * (t.threads() / 128);
  return t.warpgroups * t.registers + t.producer_registers + t.dropout_warps / 4 * t.dropout_registers <= launched;
}

template <size_t kCount>
constexpr bool forward_sm90_are_valid(const ForwardSm90Tile (&table)[kCount], bool cached = false,
                                      ForwardSm90KvSplit kv_split = ForwardSm90KvSplit::kNone) {
  for (const ForwardSm90Tile& tile : table)
    if (!forward_sm90_is_valid(cached && tile.max_queries == 0 ? forward_sm90_kv_split(forward_sm90_cached(tile), kv_split)
                                                               : tile))
      return false;
  return true;
}
static_assert(forward_sm90_are_valid(kForwardSm90Plain) && forward_sm90_are_valid(kForwardSm90Packed) &&
              forward_sm90_are_valid(kForwardSm90Options) && forward_sm90_are_valid(kForwardSm90FloatMask) &&
              forward_sm90_are_valid(kForwardSm90Packed, true) && forward_sm90_are_valid(kForwardSm90Options, true) &&
              forward_sm90_are_valid(kForwardSm90Packed, true, ForwardSm90KvSplit::kTiles) &&
              forward_sm90_are_valid(kForwardSm90Packed, true, ForwardSm90KvSplit::kSmallTiles));

// Plain entries of the same head dims, dense or packed, give a row the same bits.
static_assert([] {
  for (const ForwardSm90Tile& tile : kForwardSm90Plain)
    for (const ForwardSm90Tile& packed : kForwardSm90Packed)
      if (tile.head_dim == packed.head_dim && tile.head_dim_v == packed.head_dim_v &&
          (tile.sub_block_keys() != packed.sub_block_keys() || tile.query_in_registers != packed.query_in_registers))
        return false;
  return true;
}());

// An entry for little work is followed by the one for the rest of its head dims.
static_assert([] {
  for (int n = 0; n < kForwardSm90Entries; ++n) {
    const ForwardSm90Tile &tile = kForwardSm90Plain[n], &next = kForwardSm90Plain[n + 1 < kForwardSm90Entries ? n + 1 : n];
    if (tile.max_queries > 0 && (next.max_queries > 0 || tile.head_dim != next.head_dim || tile.head_dim_v != next.head_dim_v))
      return false;
  }
  return true;
}());

}  // namespace flash_online::cuda
