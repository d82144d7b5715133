// What the warps of the Hopper forward kernel (forward_sm90.cuh) share: its arguments, shared memory and named barriers, and
// the order of tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../../../../core/mask.h"
#include "../../../../core/problem.h"
#include "../../../hw/launch.h"
#include "../../../hw/math.cuh"
#include "../../../hw/tma.cuh"
#include "../../common/mask_map.cuh"
#include "../../common/tile_list.cuh"
#include "../tiles.h"
#include "varlen_tile_scheduler.cuh"

namespace flash_online::cuda {

// How a mask reaches the scores.
enum class MaskWay {
  kNone,
  kBits,  // bool: by MaskBits
  kHalves,  // 16-bit: in boxes, with the keys, into shared memory
  kBFloats,
};

struct ForwardSm90Arguments {
  CUtensorMap query, key, value, out_map, mask_boxes;
  // Boxes start at (0, row, head / heads_a_..., batch * ..._batch_step): a broadcast dimension has size 1 in its map.
  int heads_a_query, heads_a_key, heads_a_value;
  int query_batch_step, key_batch_step, value_batch_step, mask_batch_step, mask_head_step;
  int batch, heads, queries, keys, head_dim_v;
  int row_tiles;  // of a head
  int even_row_tiles;  // the last so many of them, which are the same work
  bool batch_within;  // heads are counted with the batch inside, for a mask that the batch shares
  int section_heads;  // heads whose other tiles run side by side, so that their keys and values stay in the L2 cache
  Visibility visible;
  float scale;  // of scores in the exponent, to the base 2: the problem's times log2(e); 1 behind a softcap
  float added_scale;  // what ALiBi and a mask add, in the scores' units: log2(e) / scale
  float softcap, softcap_scale;  // times log2(e); 2 log2(e) / softcap times the problem's scale
  // Softcap of small scores, of less than this sum of squares: the score times a polynomial in its square.
  float small_scores, softcap_term[kTanhTerms];
  const float* sinks;
  const float* alibi_slopes;
  int64_t alibi_stride[2];
  void* out;
  int64_t out_stride[3];
  MaskWay mask_way;
  bool has_score_mod;  // scores are more than products and a mask: adjust()
  int mask_rows;  // of a box: 64, or 1 that all queries share
  // Bytes from one block of the map to the next, 0 where it is broadcast.
  const uint8_t* map;
  int64_t map_batch_step, map_head_step;
  int map_row_step, map_column_step;
  // Words likewise.
  const unsigned* bits;
  int64_t bits_batch_step, bits_head_step, bits_row_step;
  int bits_last_row, bits_last_unit;
  const int64_t* rng;  // null: no dropout
  uint32_t drop_threshold;  // a weight is kept where its word is at least this
  int64_t batch_begin;  // of dropout's counter
  float keep_scale;  // of dropout: 1 / (1 - p)
  float *lse, *lse_low;
  int64_t lse_stride[2];
  // Packed: `batch` is 1, `queries` and `keys` are a sequence's at most.
  PackedList packed;
  bool lower_right;
};

// The tiles of a block of threads. First those of even work, of all heads, a head after another; behind them the others, a
// section of heads after another and within it the dearest first (under a causal mask the last rows see the most keys). They
// are dealt out in rounds, forwards and backwards in turn, so that the sums of work agree. The first section goes on in the
// round where the even tiles end, each other begins a round of its own: that keeps the pairs of rounds together.
struct TileWalk {
  int round = 0, section = 0, first = 0;  // `first` of this round in the section

  struct Place {
    int batch, head, row_tile;  // batch -1: no more
  };
  __device__ Place next(const ForwardSm90Arguments& a) {
    const int blocks = static_cast<int>(gridDim.x), place = static_cast<int>(blockIdx.x), heads = a.batch * a.heads;
    for (; section * a.section_heads < heads; ++section, first = 0) {
      const int even = section == 0 ? heads * a.even_row_tiles : 0, uneven_row_tiles = a.row_tiles - a.even_row_tiles;
      const int first_head = section * a.section_heads, of_section = min(a.section_heads, heads - first_head);
      const int tiles = even + of_section * uneven_row_tiles;
      while (first < tiles) {
        const int index = first + (round % 2 ? blocks - 1 - place : place);
        ++round;
        first += blocks;
        if (index < tiles) {
          const bool is_even = index < even;
          const int n = is_even ? index : index - even, line = n / (is_even ? a.even_row_tiles : of_section),
                    in_line = n - line * (is_even ? a.even_row_tiles : of_section);
          const int head = is_even ? line : first_head + in_line;
          const int row_tile = is_even ? a.row_tiles - 1 - in_line : uneven_row_tiles - 1 - line;
          if (a.batch_within) return {head % a.batch, head / a.batch, row_tile};
          return {head / a.heads, head % a.heads, row_tile};
        }
      }
    }
    return {-1, 0, 0};
  }
};

// Tile: a ForwardSm90Tile.
template <class T, class Tile>
struct ForwardSm90Kernel {
  static constexpr ForwardSm90 kTile = Tile::kTile;
  static constexpr bool kEverything = Tile::kEverything, kFloatMask = Tile::kFloatMask, kPacked = Tile::kPacked;
  static constexpr bool kMasked = kEverything && !kPacked;  // whether there may be a mask, and then its map
  static constexpr int kGroups = kTile.row_groups(), kKeys = kTile.keys, kStages = kTile.stages;
  static constexpr bool kSplit = kTile.split_values;
  static_assert(!kSplit || (!kEverything && !kPacked && !kTile.held_query && !kTile.staged_out));
  static constexpr int kRows = 64;  // of a warpgroup
  static constexpr int kQueries = kTile.query_buffers;
  static constexpr int kWidthBoxes = (kTile.head_dim + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kValueBoxes = (kTile.head_dim_v + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kWidthSteps = kTile.head_dim / 16, kKeySteps = kKeys / 16;
  static constexpr int kOutColumns = kTile.head_dim_v / (kTile.warpgroups / kGroups);  // of a warpgroup
  static constexpr int kScores = kKeys / 2, kOuts = kOutColumns / 2;  // registers of a thread
  static constexpr int kKeyParts = kTile.key_parts(), kKeyStages = kTile.key_stages(), kKeyBoxes = kWidthBoxes / kKeyParts;
  static constexpr unsigned kRowBytes = kBoxColumns * sizeof(T);
  static constexpr int kOutRows = 16;  // of a warp: it stores its rows by itself
  // What the warpgroups take must be there: the block has what all threads were launched with, in eights, else they wait for
  // good.
  static_assert(kTile.warpgroups * kTile.registers + kTile.loader_registers + kTile.drawers / 4 * kTile.drawer_registers <=
                (65536 / (kTile.threads() * kTile.blocks) / 8 * 8) * (kTile.threads() / 128));
  static_assert(!kPacked || kTile.head_dim_v <= kWarpSize * kPerVector<T>);
  static_assert(kTile.head_dim % 16 == 0 && kTile.head_dim_v % 16 == 0 && kKeys % 16 == 0);

  struct alignas(kBoxAlignment) Query {
    T box[kWidthBoxes][kRows][kBoxColumns];
  };
  struct alignas(kBoxAlignment) Key {
    T box[kKeyBoxes][kKeys][kBoxColumns];
  };
  struct alignas(kBoxAlignment) Value {
    T box[kValueBoxes][kKeys][kBoxColumns];
  };
  struct alignas(kBoxAlignment) Out {
    T box[4 * kGroups][kValueBoxes][kOutRows][kBoxColumns];
  };
  static_assert(!kEverything || (kKeys == kMaskMapTile && kRows == kMaskMapTile && kKeys == kBoxColumns));
  struct alignas(kBoxAlignment) Mask {
    uint16_t box[kGroups][kRows][kBoxColumns];
  };
  using Walk = std::conditional_t<kPacked, PackedWalk<kTile.queries()>, TileWalk>;
  struct Packed {
    uint64_t value_there[kStages];  // of values that the tail is to be cleared of
    uint64_t tile_wanted;  // where tiles are taken: by the loading warp
    typename PackedWalk<kTile.queries()>::Shared walk;
  };
  // These come with the keys, by stages.
  struct Masks {
    Mask stage[kStages];
  };
  static constexpr int kParts = std::max(kTile.drawers / 2, 1), kPartKeys = kKeys / kParts;  // of a block, to draw
  struct Drawn {
    // A bit a key, of a query's.
    alignas(8) std::conditional_t<kPartKeys == 16, uint16_t, unsigned> kept[kStages][kTile.queries()][kParts];
  };
  struct Nothing {};
  // What a mask is to a tile: a bit for each 2^shift of its blocks.
  static constexpr int kMapWords = 16, kMapBits = 32 * kMapWords;
  struct Map {
    int shift;
    unsigned read[kMapWords];  // whether any warpgroup takes it
    struct {
      unsigned taken[kMapWords];
      unsigned plain[kMapWords];  // whether nothing is hidden or added
    } group[kGroups];
  };
  // Of a packed sequence: its first rows in the tensors, and how many there are.
  struct Lengths {
    int query_begin, key_begin, queries, keys;
    int offset;  // of its Visibility
  };
  // What a tile is to the warps that work on it. Keys are counted in blocks.
  struct Job {
    int batch, head, first_query;  // batch, or packed the sequence; -1: no more
    [[no_unique_address]] std::conditional_t<kPacked, Lengths, Nothing> of;
    int band_begin, band_end;  // band_of the first query
    int begin, end;  // blocks that any query sees
    struct {
      int begin, end;  // this warpgroup's: its rows may see fewer of the first and of the last
      int whole_begin, whole_end;  // blocks that all its rows see all of
    } group[kGroups];
    [[no_unique_address]] std::conditional_t<kEverything, float, Nothing> slope;  // of ALiBi, in the scores' units
    [[no_unique_address]] std::conditional_t<kMasked, Map, Nothing> map;
  };
  // The same of any tile.
  __device__ __forceinline__ static int query_begin(const Job& job) {
    if constexpr (kPacked) return job.of.query_begin;
    return 0;
  }
  __device__ __forceinline__ static int key_begin(const Job& job) {
    if constexpr (kPacked) return job.of.key_begin;
    return 0;
  }
  __device__ __forceinline__ static int queries(const ForwardSm90Arguments& a, const Job& job) {
    if constexpr (kPacked) return job.of.queries;
    return a.queries;
  }
  __device__ __forceinline__ static int keys(const ForwardSm90Arguments& a, const Job& job) {
    if constexpr (kPacked) return job.of.keys;
    return a.keys;
  }
  static constexpr int kJobs = 4;
  static constexpr int kFar = 1 << 30;  // behind the last key
  // Blocks of others that a warpgroup may pass over while it holds one's values: the rest of the ring.
  static constexpr int kSkips = kMasked ? kStages - 1 : 0;
  // Where tiles are taken, the loading of one asks for the next so many blocks before the first warpgroup's last.
  static constexpr int kWantAhead = 4;

  struct Shared {
    Query query[kQueries];
    Key key[kKeyStages];
    Value value[kStages];
    [[no_unique_address]] std::conditional_t<kFloatMask, Masks, Nothing> mask;
    [[no_unique_address]] std::conditional_t<kTile.staged_out, Out, Nothing> out;
    [[no_unique_address]] std::conditional_t<kEverything, Drawn, Nothing> drawn;
    Job job[kJobs];
    uint64_t job_full[kJobs], job_empty[kJobs];
    uint64_t query_full[kQueries], query_empty[kQueries];
    uint64_t key_full[kKeyStages], key_empty[kKeyStages], value_full[kStages], value_empty[kStages];
    [[no_unique_address]] std::conditional_t<kPacked, Packed, Nothing> packed;
  };
  static constexpr unsigned kSharedBytes = sizeof(Shared) + kBoxAlignment;  // dynamic shared memory is aligned to 16 alone
  // Of a multiprocessor's 228 KiB each block of threads takes 1 more.
  static_assert(kTile.blocks * (kSharedBytes + 1024) <= 228 << 10);

  // Named barriers.
  static constexpr int kVote = 1, kTurn = 1 + kTile.warpgroups;

  // The first block from `block` on that the tile reads; `end` if there is none.
  __device__ static int next_read(const Job& job, int block, int end) {
    if constexpr (kMasked) {
#pragma unroll 1
      while (block < end) {
        const int bit = (block - job.begin) >> job.map.shift;
        const unsigned rest = job.map.read[bit / 32] >> bit % 32;
        if (rest & 1) return block;
        block = job.begin + ((rest ? bit + __ffs(rest) - 1 : bit / 32 * 32 + 32) << job.map.shift);
      }
      return end;
    }
    return block;
  }
  // Of the map's words, which have a bit for each 2^shift blocks, the bits of the 32 blocks from the n-th on.
  __device__ static unsigned bits_of_blocks(const unsigned (&words)[kMapWords], int shift, int blocks, int n) {
    if (shift == 0) return words[n / 32];
    unsigned bits = 0;
#pragma unroll 1
    for (int i = 0; i < min(32, blocks - n); ++i) bits |= (words[(n + i) >> shift >> 5] >> ((n + i) >> shift) % 32 & 1) << i;
    return bits;
  }
  // Whether a block's float mask is wanted by a warpgroup.
  __device__ static bool wants_mask(const Job& job, int group, int block) {
    const int bit = (block - job.begin) >> job.map.shift;
    return job.map.group[group].taken[bit / 32] >> bit % 32 & ~job.map.group[group].plain[bit / 32] >> bit % 32 & 1;
  }

  __device__ __forceinline__ static void load_value(const ForwardSm90Arguments& a, Value& to, int row, int head, int batch,
                                                    uint64_t* there) {
    arrive_expect_tx(there, sizeof(Value));
#pragma unroll
    for (int box = 0; box < kValueBoxes; ++box) tma_load(to.box[box], a.value, {box * kBoxColumns, row, head, batch}, there);
  }

  // The warps that bring things (forward_sm90_producers.cuh).
  __device__ static void plan_mask(const ForwardSm90Arguments& a, Job& job, int lane);
  __device__ static void plan(const ForwardSm90Arguments& a, Shared& shared, int lane);
  struct Loader;
  __device__ static void draw(const ForwardSm90Arguments& a, Shared& shared, int warp, int lane);
  __device__ static void load_values(const ForwardSm90Arguments& a, Shared& shared);
  __device__ static void clear_tails(Shared& shared, int lane);
  __device__ static void clear_padding(const ForwardSm90Arguments& a, int lane);

  struct Group;  // a warpgroup that computes (forward_sm90_consumers.cuh)

  __device__ static void run(const ForwardSm90Arguments& a, Shared& shared);
};

}  // namespace flash_online::cuda
