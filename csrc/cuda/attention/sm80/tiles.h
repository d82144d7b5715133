// The general kernels' tiles by element and head dim. A head dim between two rows runs in the next larger tile, filled up with
// zeros in shared memory. A kernel without a row does not compile.
#pragma once

namespace flash_online::cuda {

enum class Variant : signed char {
  // Visibility by position alone, forward with rows of 16-bit elements that consist of whole 16-byte vectors: on GPUs whose
  // CTAs can have 227 KiB of shared memory (9.0, 10.0), and where that tile does not fit, 163 KiB (8.0) or 99 KiB (8.6, 8.9,
  // 12.x).
  kPlain,
  kPlain163,
  kPlain99,
  kAnyRows,     // of 16-bit elements forward: other rows, in tiles with one stage where there are some
  kAllOptions,  // also softcap, ALiBi, masks, dropout and any scale
  kSmallTile,   // all options, where kAllOptions takes more shared memory than the GPU has
};

inline constexpr Variant kPlain = Variant::kPlain, kPlain163 = Variant::kPlain163, kPlain99 = Variant::kPlain99,
                         kAll = Variant::kAllOptions, kSmall = Variant::kSmallTile;

constexpr bool has_options(Variant variant) { return variant == kAll || variant == kSmall; }

// Bytes of a row of a SharedTile with elements of `bytes` bytes.
constexpr int shared_row_bytes(int bytes, int width) { return bytes * (width + 8); }

// forward.cuh: a CTA takes queries() queries and passes over the keys, `keys` at a time.
struct ForwardSm80Tile {
  int bytes;  // per element in shared memory: 2 of 16 bits, 4 or 6 of a float in two or three bf16 digits (kDigitsBytes)
  int head_dim;  // of queries and keys
  Variant variant;
  int head_dim_v;  // columns of the values that one CTA sums
  int row_tiles;  // per warp, of 16 queries; all options take registers that leave one
  int warps;
  int keys;  // per step of the mainloop
  int ctas_per_sm;  // the compiler's bound on registers follows from it
  // Warps that share queries: each takes some keys of a step, and their results are merged at the end. Where shared
  // memory holds the queries of only four warps, each scheduler has two warps by this instead of one.
  int key_warps = 1;
  // Warps that share queries in another way: each computes the scores of its share of a step's keys, gives the others their
  // weights through shared memory, and sums its share of the columns. A warp with twice the rows reads as much of the queries
  // and half of the keys and values.
  int column_warps = 1;
  // Blocks of keys and values in shared memory. With two, the next block is copied during all of a block's work, and its
  // barrier is the only one.
  int stages = 1;
  constexpr int threads() const { return 32 * warps; }
  constexpr int sharing_warps() const { return key_warps * column_warps; }  // one of the two is 1
  constexpr int queries() const { return warps / sharing_warps() * row_tiles * 16; }
  constexpr int weight_bytes() const { return column_warps > 1 ? queries() * shared_row_bytes(bytes, keys) : 0; }
  constexpr int shared_bytes() const {  // without a mask
    return queries() * shared_row_bytes(bytes, head_dim) +
           stages * keys * (shared_row_bytes(bytes, head_dim) + shared_row_bytes(bytes, head_dim_v)) + weight_bytes();
  }
  constexpr bool is_valid() const {
    return head_dim % 16 == 0 && head_dim_v % (16 * column_warps) == 0 && head_dim_v <= head_dim &&
           keys % (16 * sharing_warps()) == 0 && row_tiles > 0 && warps % sharing_warps() == 0 &&
           (key_warps == 1 || column_warps == 1) && (sharing_warps() == 1 || (sharing_warps() == 2 && !has_options(variant))) &&
           (stages == 1 || (stages == 2 && bytes == 2 && !has_options(variant))) && threads() * ctas_per_sm <= 2048;
  }
};

// clang-format off
inline constexpr ForwardSm80Tile kForwardSm80Tiles[] = {
  // 16-bit elements
  {.bytes = 2, .head_dim = 32,  .variant = kPlain, .head_dim_v = 32,  .row_tiles = 2, .warps = 4, .keys = 64, .ctas_per_sm = 3, .stages = 2},
  {.bytes = 2, .head_dim = 64,  .variant = kPlain, .head_dim_v = 64,  .row_tiles = 2, .warps = 4, .keys = 48, .ctas_per_sm = 3, .stages = 2},
  {.bytes = 2, .head_dim = 96,  .variant = kPlain, .head_dim_v = 96,  .row_tiles = 2, .warps = 4, .keys = 64, .ctas_per_sm = 2, .stages = 2},
  {.bytes = 2, .head_dim = 128, .variant = kPlain, .head_dim_v = 128, .row_tiles = 2, .warps = 4, .keys = 64, .ctas_per_sm = 2, .stages = 2},
  {.bytes = 2, .head_dim = 192, .variant = kPlain, .head_dim_v = 192, .row_tiles = 2, .warps = 8, .keys = 64, .ctas_per_sm = 1, .column_warps = 2, .stages = 2},
  {.bytes = 2, .head_dim = 256, .variant = kPlain, .head_dim_v = 256, .row_tiles = 2, .warps = 8, .keys = 64, .ctas_per_sm = 1, .column_warps = 2, .stages = 2},
  {.bytes = 2, .head_dim = 512, .variant = kPlain, .head_dim_v = 256, .row_tiles = 1, .warps = 8, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 128, .variant = kPlain163, .head_dim_v = 128, .row_tiles = 2, .warps = 4, .keys = 64, .ctas_per_sm = 2},
  {.bytes = 2, .head_dim = 192, .variant = kPlain163, .head_dim_v = 192, .row_tiles = 2, .warps = 8, .keys = 64, .ctas_per_sm = 1, .column_warps = 2},
  {.bytes = 2, .head_dim = 256, .variant = kPlain163, .head_dim_v = 256, .row_tiles = 2, .warps = 8, .keys = 64, .ctas_per_sm = 1, .column_warps = 2},
  {.bytes = 2, .head_dim = 64,  .variant = kPlain99, .head_dim_v = 64, .row_tiles = 2, .warps = 4, .keys = 48, .ctas_per_sm = 3},
  {.bytes = 2, .head_dim = 96,  .variant = kPlain99, .head_dim_v = 96, .row_tiles = 2, .warps = 4, .keys = 48, .ctas_per_sm = 2},
  {.bytes = 2, .head_dim = 128, .variant = kPlain99, .head_dim_v = 128, .row_tiles = 2, .warps = 8, .keys = 48, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 192, .variant = kPlain99, .head_dim_v = 192, .row_tiles = 2, .warps = 8, .keys = 32, .ctas_per_sm = 1, .column_warps = 2},
  {.bytes = 2, .head_dim = 256, .variant = kPlain99, .head_dim_v = 256, .row_tiles = 2, .warps = 4, .keys = 32, .ctas_per_sm = 1, .column_warps = 2},
  {.bytes = 2, .head_dim = 32,  .variant = kAll,   .head_dim_v = 32,  .row_tiles = 1, .warps = 4, .keys = 64, .ctas_per_sm = 2},
  {.bytes = 2, .head_dim = 64,  .variant = kAll,   .head_dim_v = 64,  .row_tiles = 1, .warps = 4, .keys = 64, .ctas_per_sm = 2},
  {.bytes = 2, .head_dim = 96,  .variant = kAll,   .head_dim_v = 96,  .row_tiles = 1, .warps = 4, .keys = 64, .ctas_per_sm = 2},
  {.bytes = 2, .head_dim = 128, .variant = kAll,   .head_dim_v = 128, .row_tiles = 1, .warps = 4, .keys = 64, .ctas_per_sm = 2},
  {.bytes = 2, .head_dim = 192, .variant = kAll,   .head_dim_v = 192, .row_tiles = 1, .warps = 4, .keys = 64, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 256, .variant = kAll,   .head_dim_v = 256, .row_tiles = 1, .warps = 4, .keys = 64, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 512, .variant = kAll,   .head_dim_v = 256, .row_tiles = 1, .warps = 8, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 192, .variant = kSmall, .head_dim_v = 192, .row_tiles = 1, .warps = 2, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 256, .variant = kSmall, .head_dim_v = 256, .row_tiles = 1, .warps = 2, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 512, .variant = kSmall, .head_dim_v = 256, .row_tiles = 1, .warps = 4, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 576, .variant = kAll,   .head_dim_v = 256, .row_tiles = 1, .warps = 4, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 576, .variant = kSmall, .head_dim_v = 256, .row_tiles = 1, .warps = 2, .keys = 16, .ctas_per_sm = 1},
  // floats in two digits
  {.bytes = 4, .head_dim = 32,  .variant = kPlain, .head_dim_v = 32,  .row_tiles = 1, .warps = 4, .keys = 64, .ctas_per_sm = 2},
  {.bytes = 4, .head_dim = 64,  .variant = kPlain, .head_dim_v = 64,  .row_tiles = 1, .warps = 4, .keys = 64, .ctas_per_sm = 2},
  {.bytes = 4, .head_dim = 96,  .variant = kPlain, .head_dim_v = 96,  .row_tiles = 1, .warps = 8, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 4, .head_dim = 128, .variant = kPlain, .head_dim_v = 128, .row_tiles = 1, .warps = 8, .keys = 64, .ctas_per_sm = 1},
  {.bytes = 4, .head_dim = 192, .variant = kPlain, .head_dim_v = 192, .row_tiles = 1, .warps = 8, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 4, .head_dim = 256, .variant = kPlain, .head_dim_v = 256, .row_tiles = 1, .warps = 8, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 4, .head_dim = 32,  .variant = kAll,   .head_dim_v = 32,  .row_tiles = 1, .warps = 4, .keys = 64, .ctas_per_sm = 2},
  {.bytes = 4, .head_dim = 64,  .variant = kAll,   .head_dim_v = 64,  .row_tiles = 1, .warps = 4, .keys = 32, .ctas_per_sm = 2},
  {.bytes = 4, .head_dim = 96,  .variant = kAll,   .head_dim_v = 96,  .row_tiles = 1, .warps = 4, .keys = 32, .ctas_per_sm = 2},
  {.bytes = 4, .head_dim = 128, .variant = kAll,   .head_dim_v = 128, .row_tiles = 1, .warps = 8, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 4, .head_dim = 192, .variant = kAll,   .head_dim_v = 192, .row_tiles = 1, .warps = 4, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 4, .head_dim = 256, .variant = kAll,   .head_dim_v = 256, .row_tiles = 1, .warps = 4, .keys = 32, .ctas_per_sm = 1},
  // floats in three digits
  {.bytes = 6, .head_dim = 32,  .variant = kPlain, .head_dim_v = 32,  .row_tiles = 1, .warps = 4, .keys = 64, .ctas_per_sm = 2},
  {.bytes = 6, .head_dim = 64,  .variant = kPlain, .head_dim_v = 64,  .row_tiles = 1, .warps = 4, .keys = 64, .ctas_per_sm = 2},
  {.bytes = 6, .head_dim = 96,  .variant = kPlain, .head_dim_v = 96,  .row_tiles = 1, .warps = 8, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 128, .variant = kPlain, .head_dim_v = 128, .row_tiles = 1, .warps = 8, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 192, .variant = kPlain, .head_dim_v = 192, .row_tiles = 1, .warps = 8, .keys = 32, .ctas_per_sm = 1, .key_warps = 2},
  {.bytes = 6, .head_dim = 256, .variant = kPlain, .head_dim_v = 256, .row_tiles = 1, .warps = 8, .keys = 32, .ctas_per_sm = 1, .key_warps = 2},
  {.bytes = 6, .head_dim = 32,  .variant = kAll,   .head_dim_v = 32,  .row_tiles = 1, .warps = 4, .keys = 64, .ctas_per_sm = 2},
  {.bytes = 6, .head_dim = 64,  .variant = kAll,   .head_dim_v = 64,  .row_tiles = 1, .warps = 4, .keys = 32, .ctas_per_sm = 2},
  {.bytes = 6, .head_dim = 96,  .variant = kAll,   .head_dim_v = 96,  .row_tiles = 1, .warps = 4, .keys = 32, .ctas_per_sm = 2},
  {.bytes = 6, .head_dim = 128, .variant = kAll,   .head_dim_v = 128, .row_tiles = 1, .warps = 8, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 192, .variant = kAll,   .head_dim_v = 192, .row_tiles = 1, .warps = 4, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 256, .variant = kAll,   .head_dim_v = 256, .row_tiles = 1, .warps = 4, .keys = 32, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 512, .variant = kAll,   .head_dim_v = 256, .row_tiles = 1, .warps = 2, .keys = 16, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 576, .variant = kAll,   .head_dim_v = 256, .row_tiles = 1, .warps = 2, .keys = 16, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 128, .variant = kSmall, .head_dim_v = 128, .row_tiles = 1, .warps = 4, .keys = 16, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 256, .variant = kSmall, .head_dim_v = 256, .row_tiles = 1, .warps = 1, .keys = 16, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 512, .variant = kSmall, .head_dim_v = 256, .row_tiles = 1, .warps = 1, .keys = 16, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 192, .variant = kSmall, .head_dim_v = 192, .row_tiles = 1, .warps = 2, .keys = 16, .ctas_per_sm = 1},
};
// clang-format on

// backward.cuh: a CTA takes `keys` keys and passes over the queries, `queries` at a time. The warps divide the result of each
// product among them. Scores and gradients of weights, [key][query], are cut for score_key_warps * score_query_warps warps.
// The gradients of keys and values are cut for dkv_warps warps along their rows, the gradients of queries for dq_warps; the
// other factor of the number of warps divides their columns.
struct BackwardSm80Tile {
  int bytes, head_dim;  // as in ForwardSm80Tile
  Variant variant;
  int keys;  // per CTA
  int queries;  // per step of the mainloop
  int warps;
  int score_key_warps;  // warps that the scores are cut for, along the keys
  int score_query_warps;  // and along the queries; where these are fewer than all warps, the last warps have no scores
  // 0: weights stay with the warp that made them, which sums the gradients of its own keys, all columns, in registers (and
  // where score_query_warps > 1, over its own queries alone). Otherwise weights go through shared memory.
  int dkv_warps;
  int dq_warps;
  int stages;  // blocks of queries in shared memory
  int ctas_per_sm;  // the compiler's bound on registers follows from it
  // Half of the warps compute scores, the other half gradients of weights, each of twice the queries; then two warps exchange
  // halves. A warp with twice the queries reads as much of the keys or values, and so less per score.
  bool splits_products = false;
  constexpr int threads() const { return 32 * warps; }
  constexpr int shared_bytes() const {  // without a mask
    const int row_stats = (bytes == 6 ? 4 : 3) * queries * static_cast<int>(sizeof(float));
    return 2 * keys * shared_row_bytes(bytes, head_dim) +
           stages * (2 * queries * shared_row_bytes(bytes, head_dim) + row_stats) +
           (dkv_warps == 0 ? 1 : 2) * keys * shared_row_bytes(bytes, queries);
  }
  constexpr bool is_valid() const {
    const int dkv_rows = dkv_warps == 0 ? score_key_warps : dkv_warps, dkv_columns = dkv_warps == 0 ? 1 : warps / dkv_warps,
              score_warps = score_key_warps * score_query_warps;
    return keys % (16 * score_key_warps) == 0 && queries % (8 * score_query_warps) == 0 && keys % (16 * dkv_rows) == 0 &&
           head_dim % (16 * dkv_columns) == 0 && queries % (16 * dq_warps) == 0 && head_dim % (16 * (warps / dq_warps)) == 0 &&
           warps % dq_warps == 0 && (dkv_warps == 0 || warps % dkv_warps == 0) && score_warps <= warps &&
           (dkv_warps > 0 || score_warps == warps) &&
           (!splits_products || (score_warps == warps && score_query_warps % 2 == 0 && dkv_warps > 0 && bytes == 2 &&
                                 keys == 32 * score_key_warps && queries == 16 * score_query_warps)) &&
           (stages == 1 || stages == 2) && threads() * ctas_per_sm <= 2048;
  }
};

// clang-format off
inline constexpr BackwardSm80Tile kBackwardSm80Tiles[] = {
  // 16-bit elements
  {.bytes = 2, .head_dim = 32,  .variant = kPlain, .keys = 64,  .queries = 64, .warps = 4,
   .score_key_warps = 2, .score_query_warps = 2, .dkv_warps = 0, .dq_warps = 4, .stages = 2, .ctas_per_sm = 2},
  {.bytes = 2, .head_dim = 64,  .variant = kPlain, .keys = 64,  .queries = 64, .warps = 4,
   .score_key_warps = 2, .score_query_warps = 2, .dkv_warps = 0, .dq_warps = 2, .stages = 2, .ctas_per_sm = 2},
  {.bytes = 2, .head_dim = 96,  .variant = kPlain, .keys = 128, .queries = 64, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 4, .dq_warps = 4, .stages = 2, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 128, .variant = kPlain, .keys = 128, .queries = 64, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 4, .dq_warps = 2, .stages = 2, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 192, .variant = kPlain, .keys = 64,  .queries = 64, .warps = 8,
   .score_key_warps = 2, .score_query_warps = 4, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1, .splits_products = true},
  {.bytes = 2, .head_dim = 256, .variant = kPlain, .keys = 64,  .queries = 64, .warps = 8,
   .score_key_warps = 2, .score_query_warps = 4, .dkv_warps = 2, .dq_warps = 2, .stages = 2, .ctas_per_sm = 1, .splits_products = true},
  {.bytes = 2, .head_dim = 128, .variant = kPlain163, .keys = 128, .queries = 64, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 4, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 256, .variant = kPlain163, .keys = 64,  .queries = 64, .warps = 8,
   .score_key_warps = 2, .score_query_warps = 4, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1, .splits_products = true},
  {.bytes = 2, .head_dim = 64,  .variant = kPlain99, .keys = 128, .queries = 64, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 0, .dq_warps = 4, .stages = 2, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 96,  .variant = kPlain99, .keys = 64,  .queries = 64, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 4, .dq_warps = 4, .stages = 2, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 128, .variant = kPlain99, .keys = 64,  .queries = 64, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 192, .variant = kPlain99, .keys = 64,  .queries = 32, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 256, .variant = kPlain99, .keys = 64,  .queries = 16, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 2, .dq_warps = 1, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 32,  .variant = kAll,   .keys = 64,  .queries = 64, .warps = 4,
   .score_key_warps = 4, .score_query_warps = 1, .dkv_warps = 0, .dq_warps = 4, .stages = 1, .ctas_per_sm = 2},
  {.bytes = 2, .head_dim = 64,  .variant = kAll,   .keys = 64,  .queries = 64, .warps = 4,
   .score_key_warps = 4, .score_query_warps = 1, .dkv_warps = 0, .dq_warps = 4, .stages = 1, .ctas_per_sm = 2},
  {.bytes = 2, .head_dim = 96,  .variant = kAll,   .keys = 64,  .queries = 64, .warps = 4,
   .score_key_warps = 4, .score_query_warps = 1, .dkv_warps = 0, .dq_warps = 4, .stages = 1, .ctas_per_sm = 2},
  {.bytes = 2, .head_dim = 128, .variant = kAll,   .keys = 128, .queries = 64, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 4, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 192, .variant = kAll,   .keys = 64,  .queries = 32, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 256, .variant = kAll,   .keys = 64,  .queries = 32, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 512, .variant = kAll,   .keys = 32,  .queries = 32, .warps = 8,
   .score_key_warps = 2, .score_query_warps = 4, .dkv_warps = 1, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 256, .variant = kSmall, .keys = 64,  .queries = 16, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 2, .dq_warps = 1, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 2, .head_dim = 128, .variant = kSmall, .keys = 64,  .queries = 64, .warps = 4,
   .score_key_warps = 4, .score_query_warps = 1, .dkv_warps = 0, .dq_warps = 2, .stages = 1, .ctas_per_sm = 2},
  // floats in two digits
  {.bytes = 4, .head_dim = 32,  .variant = kPlain, .keys = 64,  .queries = 64, .warps = 4,
   .score_key_warps = 4, .score_query_warps = 1, .dkv_warps = 0, .dq_warps = 4, .stages = 1, .ctas_per_sm = 2},
  {.bytes = 4, .head_dim = 64,  .variant = kPlain, .keys = 64,  .queries = 32, .warps = 4,
   .score_key_warps = 4, .score_query_warps = 1, .dkv_warps = 0, .dq_warps = 2, .stages = 1, .ctas_per_sm = 2},
  {.bytes = 4, .head_dim = 96,  .variant = kPlain, .keys = 64,  .queries = 64, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 4, .dq_warps = 4, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 4, .head_dim = 128, .variant = kPlain, .keys = 64,  .queries = 32, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 4, .head_dim = 192, .variant = kPlain, .keys = 64,  .queries = 32, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 4, .head_dim = 256, .variant = kPlain, .keys = 64,  .queries = 32, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 4, .head_dim = 32,  .variant = kAll,   .keys = 64,  .queries = 64, .warps = 4,
   .score_key_warps = 4, .score_query_warps = 1, .dkv_warps = 0, .dq_warps = 4, .stages = 1, .ctas_per_sm = 2},
  {.bytes = 4, .head_dim = 64,  .variant = kAll,   .keys = 64,  .queries = 32, .warps = 4,
   .score_key_warps = 4, .score_query_warps = 1, .dkv_warps = 0, .dq_warps = 2, .stages = 1, .ctas_per_sm = 2},
  {.bytes = 4, .head_dim = 96,  .variant = kAll,   .keys = 64,  .queries = 64, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 4, .dq_warps = 4, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 4, .head_dim = 128, .variant = kAll,   .keys = 64,  .queries = 32, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 4, .head_dim = 192, .variant = kAll,   .keys = 32,  .queries = 32, .warps = 8,
   .score_key_warps = 2, .score_query_warps = 4, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 4, .head_dim = 256, .variant = kAll,   .keys = 32,  .queries = 32, .warps = 8,
   .score_key_warps = 2, .score_query_warps = 4, .dkv_warps = 1, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  // floats in three digits
  {.bytes = 6, .head_dim = 64,  .variant = kPlain, .keys = 64,  .queries = 32, .warps = 4,
   .score_key_warps = 4, .score_query_warps = 1, .dkv_warps = 0, .dq_warps = 2, .stages = 1, .ctas_per_sm = 2},
  {.bytes = 6, .head_dim = 96,  .variant = kPlain, .keys = 64,  .queries = 64, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 4, .dq_warps = 4, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 128, .variant = kPlain, .keys = 64,  .queries = 32, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 256, .variant = kPlain, .keys = 32,  .queries = 32, .warps = 8,
   .score_key_warps = 2, .score_query_warps = 4, .dkv_warps = 1, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 32,  .variant = kAll,   .keys = 64,  .queries = 64, .warps = 4,
   .score_key_warps = 4, .score_query_warps = 1, .dkv_warps = 0, .dq_warps = 4, .stages = 1, .ctas_per_sm = 2},
  {.bytes = 6, .head_dim = 64,  .variant = kAll,   .keys = 64,  .queries = 32, .warps = 4,
   .score_key_warps = 4, .score_query_warps = 1, .dkv_warps = 0, .dq_warps = 2, .stages = 1, .ctas_per_sm = 2},
  {.bytes = 6, .head_dim = 96,  .variant = kAll,   .keys = 64,  .queries = 64, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 4, .dq_warps = 4, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 128, .variant = kAll,   .keys = 64,  .queries = 32, .warps = 8,
   .score_key_warps = 4, .score_query_warps = 2, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 192, .variant = kAll,   .keys = 32,  .queries = 32, .warps = 8,
   .score_key_warps = 2, .score_query_warps = 4, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 256, .variant = kAll,   .keys = 32,  .queries = 32, .warps = 8,
   .score_key_warps = 2, .score_query_warps = 4, .dkv_warps = 1, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 512, .variant = kAll,   .keys = 16,  .queries = 16, .warps = 8,
   .score_key_warps = 1, .score_query_warps = 2, .dkv_warps = 1, .dq_warps = 1, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 32,  .variant = kSmall, .keys = 64,  .queries = 32, .warps = 4,
   .score_key_warps = 4, .score_query_warps = 1, .dkv_warps = 0, .dq_warps = 2, .stages = 1, .ctas_per_sm = 2},
  {.bytes = 6, .head_dim = 64,  .variant = kSmall, .keys = 32,  .queries = 32, .warps = 4,
   .score_key_warps = 2, .score_query_warps = 2, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 96,  .variant = kSmall, .keys = 32,  .queries = 32, .warps = 4,
   .score_key_warps = 2, .score_query_warps = 2, .dkv_warps = 2, .dq_warps = 2, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 128, .variant = kSmall, .keys = 32,  .queries = 16, .warps = 4,
   .score_key_warps = 2, .score_query_warps = 2, .dkv_warps = 1, .dq_warps = 1, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 192, .variant = kSmall, .keys = 16,  .queries = 16, .warps = 4,
   .score_key_warps = 1, .score_query_warps = 2, .dkv_warps = 1, .dq_warps = 1, .stages = 1, .ctas_per_sm = 1},
  {.bytes = 6, .head_dim = 256, .variant = kSmall, .keys = 16,  .queries = 16, .warps = 4,
   .score_key_warps = 1, .score_query_warps = 2, .dkv_warps = 1, .dq_warps = 1, .stages = 1, .ctas_per_sm = 1},
};
// clang-format on

// backward_dq.cuh: a CTA takes `warps` * 16 queries and sums `columns` columns of their gradients.
struct BackwardDqSm80Tile {
  int bytes, head_dim;  // as in ForwardSm80Tile
  Variant variant;  // kAllOptions or kSmallTile
  int columns;
  int warps;
  int keys;  // per step of the mainloop
  constexpr int threads() const { return 32 * warps; }
  constexpr int queries() const { return 16 * warps; }
  constexpr int shared_bytes() const { return 2 * (queries() + keys) * shared_row_bytes(bytes, head_dim); }  // without a mask
  constexpr bool is_valid() const {
    return head_dim % 16 == 0 && columns % 16 == 0 && columns <= head_dim && keys % 16 == 0 && warps > 0;
  }
};

// clang-format off
inline constexpr BackwardDqSm80Tile kBackwardDqSm80Tiles[] = {
  // 16-bit elements
  {.bytes = 2, .head_dim = 32,  .variant = kAll,   .columns = 32,  .warps = 4, .keys = 64},
  {.bytes = 2, .head_dim = 64,  .variant = kAll,   .columns = 64,  .warps = 4, .keys = 64},
  {.bytes = 2, .head_dim = 96,  .variant = kAll,   .columns = 96,  .warps = 4, .keys = 64},
  {.bytes = 2, .head_dim = 128, .variant = kAll,   .columns = 128, .warps = 4, .keys = 32},
  {.bytes = 2, .head_dim = 192, .variant = kAll,   .columns = 192, .warps = 4, .keys = 64},
  {.bytes = 2, .head_dim = 256, .variant = kAll,   .columns = 256, .warps = 4, .keys = 64},
  {.bytes = 2, .head_dim = 512, .variant = kAll,   .columns = 256, .warps = 2, .keys = 32},
  {.bytes = 2, .head_dim = 192, .variant = kSmall, .columns = 192, .warps = 4, .keys = 32},
  {.bytes = 2, .head_dim = 256, .variant = kSmall, .columns = 256, .warps = 2, .keys = 32},
  // floats in three digits
  {.bytes = 6, .head_dim = 32,  .variant = kAll,   .columns = 32,  .warps = 4, .keys = 64},
  {.bytes = 6, .head_dim = 64,  .variant = kAll,   .columns = 64,  .warps = 4, .keys = 32},
  {.bytes = 6, .head_dim = 96,  .variant = kAll,   .columns = 96,  .warps = 2, .keys = 32},
  {.bytes = 6, .head_dim = 128, .variant = kAll,   .columns = 128, .warps = 2, .keys = 16},
  {.bytes = 6, .head_dim = 192, .variant = kAll,   .columns = 192, .warps = 4, .keys = 16},
  {.bytes = 6, .head_dim = 256, .variant = kAll,   .columns = 256, .warps = 2, .keys = 32},
  {.bytes = 6, .head_dim = 512, .variant = kAll,   .columns = 256, .warps = 1, .keys = 16},
  {.bytes = 6, .head_dim = 192, .variant = kSmall, .columns = 192, .warps = 1, .keys = 16},
  {.bytes = 6, .head_dim = 256, .variant = kSmall, .columns = 256, .warps = 1, .keys = 16},
};
// clang-format on

template <class Tile, int kCount>
constexpr const Tile* find_tile(const Tile (&tiles)[kCount], int bytes, int head_dim, Variant variant) {
  for (const Tile& tile : tiles)
    if (tile.bytes == bytes && tile.head_dim == head_dim && tile.variant == variant) return &tile;
  return nullptr;
}

constexpr const ForwardSm80Tile* find_forward_sm80_tile(int bytes, int head_dim, Variant variant) {
  if (variant == Variant::kAnyRows) {
    if (bytes != 2) return nullptr;
    const ForwardSm80Tile* const plain = find_tile(kForwardSm80Tiles, bytes, head_dim, kPlain);
    for (const Variant variant : {kPlain163, kPlain99})  // in blocks of as many keys, or the bits would differ
      if (const ForwardSm80Tile* const tile = find_tile(kForwardSm80Tiles, bytes, head_dim, variant);
          tile && plain && tile->keys == plain->keys)
        return tile;
    return plain;
  }
  return find_tile(kForwardSm80Tiles, bytes, head_dim, variant);
}

constexpr bool has_forward_sm80_tile(int bytes, int head_dim, Variant variant) {
  return find_forward_sm80_tile(bytes, head_dim, variant) != nullptr;
}

consteval ForwardSm80Tile forward_sm80_tile(int bytes, int head_dim, Variant variant) {
  return *find_forward_sm80_tile(bytes, head_dim, variant);
}

constexpr bool has_backward_sm80_tile(int bytes, int head_dim, Variant variant) {
  return find_tile(kBackwardSm80Tiles, bytes, head_dim, variant) != nullptr;
}

consteval BackwardSm80Tile backward_sm80_tile(int bytes, int head_dim, Variant variant) {
  return *find_tile(kBackwardSm80Tiles, bytes, head_dim, variant);
}

constexpr bool has_backward_dq_sm80_tile(int bytes, int head_dim, Variant variant) {
  return find_tile(kBackwardDqSm80Tiles, bytes, head_dim, variant) != nullptr;
}

consteval BackwardDqSm80Tile backward_dq_sm80_tile(int bytes, int head_dim, Variant variant) {
  return *find_tile(kBackwardDqSm80Tiles, bytes, head_dim, variant);
}

// ---- what the tables promise ----

// What a CTA can have of the shared memory of the GPUs that have most. All CTAs of an SM share 1 KiB more, and each takes 1 KiB
// for the system.
inline constexpr int kMostSharedBytes = 227 * 1024;

template <class Tile, int kCount>
consteval bool are_valid(const Tile (&tiles)[kCount]) {
  for (const Tile& tile : tiles)
    if (!tile.is_valid() || tile.shared_bytes() > kMostSharedBytes) return false;
  return true;
}
static_assert(are_valid(kForwardSm80Tiles) && are_valid(kBackwardSm80Tiles) && are_valid(kBackwardDqSm80Tiles));

// Whether a GPU whose CTAs can have `room` bytes of shared memory runs as many of a tile's CTAs per SM as the tile asks for.
template <class Tile>
constexpr bool all_ctas_fit(const Tile& tile, int room) {
  return tile.ctas_per_sm * (tile.shared_bytes() + 1024) <= room + 1024;
}

// No row stands twice, as many CTAs as a row says fit into an SM, and a small tile takes less than the one that it stands for.
template <class Tile, int kCount>
consteval bool are_consistent(const Tile (&tiles)[kCount]) {
  for (const Tile& tile : tiles) {
    if (find_tile(tiles, tile.bytes, tile.head_dim, tile.variant) != &tile) return false;
    const int kibibytes = tile.variant == kPlain99 ? 99 : tile.variant == kPlain163 ? 163 : kMostSharedBytes / 1024;
    if (!all_ctas_fit(tile, kibibytes * 1024)) return false;
    const Tile* const stands_for = find_tile(tiles, tile.bytes, tile.head_dim, kAll);
    if (tile.variant == kSmall && (!stands_for || tile.shared_bytes() >= stands_for->shared_bytes())) return false;
  }
  return true;
}
static_assert(are_consistent(kForwardSm80Tiles) && are_consistent(kBackwardSm80Tiles));

// 16-bit elements and floats in three digits have a kernel with all options at every head dim of
// backward_dq.cuh. Floats in two digits fall back to three.
consteval bool has_all_options_everywhere() {
  for (const BackwardDqSm80Tile& tile : kBackwardDqSm80Tiles)
    if (!has_backward_dq_sm80_tile(tile.bytes, tile.head_dim, kAll) ||
        !has_forward_sm80_tile(tile.bytes, tile.head_dim, kAll) || !has_backward_sm80_tile(tile.bytes, tile.head_dim, kAll))
      return false;
  return true;
}
static_assert(has_all_options_everywhere());

}  // namespace flash_online::cuda
