// The map of a mask, made before scores are computed: for each 64 x 64 tile, whether it hides all keys, some, or none.
// Kernels skip hidden tiles without reading their keys and values, and do not read the mask of clear tiles again.
#pragma once

#include "../../../core/config.h"
#include "../../../core/problem.h"
#include "../../hw/warp.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace flash_online::cuda {

constexpr int kMaskMapTile = 64;  // queries, and keys

enum class MaskKind : uint8_t {
  kMixed = 0,
  kHidden = 1,  // hides every key from every query
  kClear = 2,   // hides and adds nothing
};

// One MaskKind per tile, [batch, heads, queries / 64, keys / 64]; a size is 1 where the mask is broadcast.
struct MaskMap {
  uint8_t* data = nullptr;  // null: there is no map, so every tile counts as mixed
  int64_t size[4] = {};
  bool is_list = false;  // AttentionProblem::tiles, which are only read: 0 is hidden, 1 is clear
  int64_t count() const { return size[0] * size[1] * size[2] * size[3]; }

  __device__ __forceinline__ MaskKind kind(uint8_t number) const {
    if (is_list) return number ? MaskKind::kClear : MaskKind::kHidden;
    return static_cast<MaskKind>(number);
  }
  __device__ const uint8_t* row(int64_t batch, int64_t head, int64_t query_tile) const {
    return data +
           (((size[0] == 1 ? 0 : batch) * size[1] + (size[1] == 1 ? 0 : head)) * size[2] + (size[2] == 1 ? 0 : query_tile)) *
               size[3];
  }
};

// The sizes of a problem's map; count() is 0 if a map is not worth its cost. The caller provides count() bytes as `data`.
MaskMap mask_map_of(const AttentionProblem& problem);
// The map that a list of blocks of 64 keys is, if it lies in memory as a map does; else one without data.
MaskMap map_of_list(const AttentionProblem& problem);
void fill_mask_map(const AttentionProblem& problem, const MaskMap& map, CUstream_st* stream);

// A bool mask as a warp holds the scores of 16 queries by 64 keys, one word per lane: bit 4 j + e belongs to the lane's
// accumulator e of columns 8 j to 8 j + 7 (wgmma.cuh), and is set if the mask shows the key. [batch, heads, queries / 16,
// keys / 64, 32]; a size is 1 where the mask is broadcast.
constexpr int kBitRows = 16;
struct MaskBits {
  unsigned* data = nullptr;
  int64_t size[4] = {};
  int64_t count() const { return size[0] * size[1] * size[2] * size[3] * kWarpSize; }
};

// A bool mask as a warp of the Hopper backward kernel holds the transposed scores of 16 keys by 64 queries, one word per lane.
// For j < 8, half < 2 and n = place(j, half), lane l has the key l / 4 + 8 * half: bit 15 - n for query 8 j + 2 * (l % 4), bit
// 31 - n for the query after it. [batch, heads, queries / 64, keys / 64, 4, 32]; a size is 1 where the mask is broadcast.
struct TransposedMaskBits {
  unsigned* data = nullptr;
  int64_t size[4] = {};
  static constexpr int kWords = kMaskMapTile / 16 * kWarpSize;  // per tile of the map
  FLASH_ONLINE_HD static constexpr int place(int j, int half) { return 8 * (1 - half) + j; }
  int64_t count() const { return size[0] * size[1] * size[2] * size[3] * kWords; }
};
// The bits of a problem in a workspace of count() words, or their sizes alone if it is null.
TransposedMaskBits transposed_mask_bits_of(const AttentionProblem& problem, void* workspace);
// Fills the bits, and the map.
void fill_transposed_mask_bits(const AttentionProblem& problem, const MaskMap& map, const TransposedMaskBits& bits,
                               CUstream_st* stream);

// Tables that the Hopper forward kernel reads in addition to the mask, or instead of it.
struct MaskTables {
  MaskBits bits;
  MaskMap map;
  int64_t bytes() const { return bits.count() * static_cast<int64_t>(sizeof(unsigned)) + map.count(); }
};

// The tables of a problem in a workspace of bytes() bytes, or their sizes alone if it is null.
MaskTables mask_tables_of(const AttentionProblem& problem, void* workspace);
void fill_mask_tables(const AttentionProblem& problem, const MaskTables& tables, CUstream_st* stream);

}  // namespace flash_online::cuda
