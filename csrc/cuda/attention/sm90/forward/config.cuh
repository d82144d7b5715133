// Definitions that the warps of the Hopper forward kernel share: arguments, and the layout of shared memory with its barriers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../../../../core/cache.h"
#include "../../../../core/mask.h"
#include "../../../../core/problem.h"
#include "../../../hw/launch.h"
#include "../../../hw/math.cuh"
#include "../../../hw/tma.cuh"
#include "../../masks/visible_blocks.cuh"
#include "cached/line_scheduler.cuh"
#include "tile_scheduler.cuh"
#include "tiles.h"
#include "varlen_tile_scheduler.cuh"

namespace flash_online::cuda {

// The source of a mask.
enum class MaskSource {
  kNone,
  kBits,  // bool: as MaskBits, from global memory
  kTmaFloat16,  // 16-bit floats: by TMA into shared memory, with the keys
  kTmaBFloat16,
};

// Factors and bounds that turn a product into the exponent of a weight.
struct ScoreArguments {
  float scale;  // of scores in the exponent, to the base 2: the problem's times log2(e); 1 after a softcap
  float bias_scale;  // of what ALiBi and a mask add, in units of the scores: log2(e) / scale
  float lowest;  // in the same units, what lowest_product() says; of a bfloat16 mask
  float lowest_score;  // the same in base 2
  float softcap, softcap_scale;  // times log2(e); 2 log2(e) / softcap times the problem's scale
  // Scores with a sum of squares below this get their softcap by a polynomial: the score times softcap_term of its square.
  float small_squares = 0, softcap_term[kTanhTerms] = {};
  const float* sinks;
  const float* alibi_slopes;
  int64_t alibi_stride[2];
};

// Steps are 0 along dimensions in which the mask is broadcast.
struct MaskArguments {
  int box_rows;  // of a TMA box: 64, or 1 that all queries share
  struct {
    const uint8_t* kinds;  // null: nothing is known of the mask, or there is none
    int64_t batch_step, head_step;
    int row_step, column_step;
  } map;  // see MaskMap; steps count bytes
  struct {
    const unsigned* words;
    int64_t batch_step, head_step, row_step;
    int last_row, last_block;
  } bits;  // see MaskBits; steps count words
};

struct SparsityArguments {
  SpanView queries, keys;
  View4<const uint8_t*> tiles;
  int tile_keys;
  SpanTables tables;
  unsigned* tile_counter;  // 0 at the start: how many work tiles the CTAs have claimed
};

struct DropoutArguments {
  const int64_t* rng;  // null: no dropout
  uint32_t threshold;  // a weight is kept where its random word is at least this
  int64_t batch_begin;  // of the counter of random numbers
  float keep_scale;  // 1 / (1 - p)
};

struct ForwardSm90Arguments {
  CUtensorMap query_tma, key_tma, value_tma, out_tma = {}, mask_tma = {};
  // TMA boxes start at (column, row, head / q_heads_per_..., batch * ..._batch_step): a broadcast dimension has size 1 in its
  // tensor map.
  int q_heads_per_query_head, q_heads_per_key_head, q_heads_per_value_head;
  int query_batch_step, key_batch_step, value_batch_step, mask_batch_step = 0, mask_head_step = 0;
  int batch, heads, queries, keys, head_dim_v;  // packed: batch is at most 1, queries and keys are the most of any sequence
  TileSchedule schedule = {};
  Visibility visible;
  ScoreArguments scores;
  void* out;
  int64_t out_stride[3];
  MaskSource mask_source = MaskSource::kNone;
  bool has_score_mod;  // softcap or ALiBi: see apply_score_mod()
  MaskArguments mask = {};
  SparsityArguments sparsity = {};
  DropoutArguments dropout = {};
  float *lse, *lse_low;
  int64_t lse_stride[2];
  float* max_logit = nullptr;  // [batch, heads]
  float natural_scale;  // the problem's
  VarlenTileList packed = {};
  bool lower_right;  // packed: the Visibility of a sequence has the offset keys - queries
};

// Additional arguments of a kernel over cached keys. The maps of key and value are of a pool [blocks, heads, page, head_dim].
struct CachedSm90Arguments : ForwardSm90Arguments {
  CachedTileList cached;
};

// And one in which shares of CTAs cut the keys of tiles.
struct KvSplitSm90Arguments : CachedSm90Arguments {
  LineOfTiles line;
};

// Variant: a ForwardSm90Variant. What packed sequences have, cached keys have too.
template <class T, class Variant>
struct ForwardSm90Kernel {
  static constexpr ForwardSm90Tile kTile = Variant::kTile;
  static constexpr bool kHasOptions = Variant::kHasOptions, kFloatMask = Variant::kFloatMask, kPacked = Variant::kPacked,
                        kCached = Variant::kCached, kKvSplit = Variant::kKvSplit, kSparse = Variant::kSparse,
                        kMaxLogit = Variant::kMaxLogit;
  using Arguments = std::conditional_t<kKvSplit, KvSplitSm90Arguments,
                                       std::conditional_t<kCached, CachedSm90Arguments, ForwardSm90Arguments>>;
  static_assert(!kKvSplit || (kCached && !kHasOptions));
  static_assert(!kSparse || !kPacked);
  static constexpr bool kMasked = (kHasOptions || kSparse) && !kPacked;  // blocks may be hidden by more than position
  // A warpgroup takes runs of blocks that are alike, and else one block after another. Lists of narrow blocks have short runs.
  static constexpr bool kTakesRuns = kSparse && !Variant::kIsNarrow;
  static constexpr int kBitWarps = kSparse ? 2 : 0;  // they make the bits of mixed blocks
  static constexpr bool kHasDropout = kTile.dropout_warps > 0;
  static constexpr bool kVByColumns = kTile.v_by_columns;
  static_assert(!kVByColumns || (!kHasOptions && !kPacked));

  // Tile shapes.
  static constexpr int kRowBlocks = kTile.row_blocks();  // of queries, in a work tile: one per math warpgroup, or one for all
  static constexpr int kRowsPerWarpgroup = 64;
  static constexpr int kRowsPerWarp = 16;  // a warp stores its rows by itself
  static constexpr int kKeys = kTile.keys;
  static constexpr int kHeadDimBoxes = (kTile.head_dim + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kHeadDimVBoxes = (kTile.head_dim_v + kBoxColumns - 1) / kBoxColumns;
  static constexpr unsigned kBoxRowBytes = kBoxColumns * sizeof(T);
  static constexpr int kHeadDimSteps = kTile.head_dim / 16, kKeySteps = kKeys / 16;  // of wgmma, which is 16 deep
  static constexpr int kOutColumns = kTile.head_dim_v / (kTile.warpgroups / kRowBlocks);  // per warpgroup
  static constexpr int kScoreRegisters = kKeys / 2, kOutRegisters = kOutColumns / 2;  // accumulators per thread
  static_assert(!kHasOptions || (kKeys == kMaskMapTile && kRowsPerWarpgroup == kMaskMapTile && kKeys == kBoxColumns));
  static_assert(!kPacked || kTile.head_dim_v <= kWarpSize * kPerVector<T>);  // clear_padding_rows(): a row is a vector per lane

  // Pipelines.
  static constexpr int kStages = kTile.stages, kQueryStages = kTile.query_stages;
  static constexpr int kKeyStagesPerBlock = kTile.key_stages_per_block(), kKeyStages = kTile.key_stages();
  static constexpr int kBoxesPerKeyStage = kHeadDimBoxes / kKeyStagesPerBlock;
  static constexpr int kWorkTiles = 4;  // that the scheduler warp is ahead at most
  // While a warpgroup holds a stage of values, it may pass over as many blocks of other warpgroups as there are other stages.
  static constexpr int kMaxSkips = kMasked ? kStages - 1 : 0;
  // If tiles are claimed from a counter: the next tile is claimed when the first warpgroup is this many blocks before its last;
  // with sparsity at a block of tile.claims.at.
  static constexpr int kClaimAhead = 4;
  static_assert(kHeadDimBoxes % kKeyStagesPerBlock == 0 && kHeadDimSteps % kKeyStagesPerBlock == 0);
  static_assert(!kMasked || kKeyStages == kStages);  // one PipelineState serves both

  struct alignas(kBoxAlignment) QueryBuffer {
    T box[kHeadDimBoxes][kRowsPerWarpgroup][kBoxColumns];
  };
  struct alignas(kBoxAlignment) KeyBuffer {
    T box[kBoxesPerKeyStage][kKeys][kBoxColumns];
  };
  struct alignas(kBoxAlignment) ValueBuffer {
    T box[kHeadDimVBoxes][kKeys][kBoxColumns];
  };
  struct alignas(kBoxAlignment) OutBuffer {
    T box[4 * kRowBlocks][kHeadDimVBoxes][kRowsPerWarp][kBoxColumns];  // by warp
  };
  struct alignas(kBoxAlignment) MaskBuffer {
    uint16_t box[kRowBlocks][kRowsPerWarpgroup][kBoxColumns];
  };
  struct MaskBuffers {
    MaskBuffer stage[kStages];  // they come with the keys
  };

  // The bits of dropout come with the keys: one bit per key of each query, which is set where the weight is kept. Several warps
  // share the keys of a block.
  static constexpr int kDropoutKeyWarps = std::max(kTile.dropout_warps / 2, 1), kDropoutKeys = kKeys / kDropoutKeyWarps;
  struct DropoutBits {
    alignas(8) std::conditional_t<kDropoutKeys == 16, uint16_t, unsigned> keep[kStages][kTile.queries()][kDropoutKeyWarps];
  };

  // The bits of mixed blocks, as in MaskBits. There are twice as many buffers as stages, by the parity of the keys' pipeline: a
  // block's bits are made while its stage is not yet free.
  static constexpr int kBitWords = (kKeys + kMaskMapTile - 1) / kMaskMapTile;
  struct SparseShared {
    unsigned word[2][kStages][4 * kRowBlocks][kBitWords][kWarpSize];
    uint64_t tile_wanted;  // barrier of the producer warp's request for the next tile
  };

  struct Empty {};
  struct Nothing {};  // a second type: two members of type Empty could not share an address
  struct NoPartial {};

  using TileListOfVariant = std::conditional_t<kCached, CachedTileList, VarlenTileList>;
  using VarlenScheduler = std::conditional_t<kKvSplit, LineScheduler, VarlenTileScheduler<kTile.queries(), TileListOfVariant>>;
  using DenseScheduler = std::conditional_t<kSparse, ClaimingTileScheduler, TileScheduler>;
  using Scheduler = std::conditional_t<kPacked, VarlenScheduler, DenseScheduler>;
  struct VarlenShared {
    uint64_t value_loaded[kStages];  // barriers of values before their tail is cleared
    uint64_t tile_wanted;  // barrier of the producer warp's request for the next tile, if tiles are claimed
    typename VarlenScheduler::Shared scheduler;
  };

  // The mask map of a work tile: one bit for each 2^shift blocks.
  static constexpr int kMapWords = 16, kMapBits = 32 * kMapWords;
  struct TileMaskMap {
    int shift;
    unsigned loaded[kMapWords];  // some warpgroup visits it
    struct {
      unsigned visited[kMapWords];
      unsigned clear[kMapWords];  // nothing is hidden or added
    } row_block[kRowBlocks];
  };
  struct PackedSequence {
    int query_begin, key_begin;  // its first rows in the tensors
    int queries, keys;
    int offset;  // of its Visibility
  };
  struct SeenKeys {
    int begin, end;  // keys outside of these no query of the sequence sees: nothing of them may be read
  };
  struct Claims {
    int at;  // the block at which the next tile is claimed
    int last_end[kRowBlocks];  // after the last block that the warpgroup visits
  };
  // A CTA's work at a time. Ranges of keys count blocks.
  struct ForwardWorkTile {
    int batch, head, first_query;  // packed: batch is the sequence, first_query counts within it; batch -1: no more tiles
    [[no_unique_address]] std::conditional_t<kPacked, PackedSequence, Empty> sequence;
    [[no_unique_address]] std::conditional_t<kCached, SeenKeys, Nothing> seen;
    // kKvSplit: where the partial results of the tile's rows go; null: they are final.
    [[no_unique_address]] std::conditional_t<kKvSplit, float*, NoPartial> partial;
    int band_begin, band_end;  // band_of the first query, in keys
    int begin, end;  // blocks that any query sees
    struct {
      int begin, end;  // blocks that this warpgroup processes: its rows may see fewer of the first and of the last ones
      int whole_begin, whole_end;  // blocks with all keys visible to all its rows
    } row_block[kRowBlocks];
    [[no_unique_address]] std::conditional_t<kHasOptions, float, Empty> slope;  // of ALiBi, in units of the scores
    [[no_unique_address]] std::conditional_t<kMasked, TileMaskMap, Empty> map;
    [[no_unique_address]] std::conditional_t<kSparse, Claims, Nothing> claims;
  };

  struct Shared {
    QueryBuffer query[kQueryStages];
    KeyBuffer key[kKeyStages];
    ValueBuffer value[kStages];
    [[no_unique_address]] std::conditional_t<kFloatMask, MaskBuffers, Empty> mask;
    [[no_unique_address]] std::conditional_t<kTile.staged_out, OutBuffer, Empty> out;
    [[no_unique_address]] std::conditional_t<kHasDropout, DropoutBits, Empty> dropout;
    [[no_unique_address]] std::conditional_t<kSparse, SparseShared, Nothing> sparse;
    ForwardWorkTile tile[kWorkTiles];
    uint64_t tile_full[kWorkTiles], tile_empty[kWorkTiles];
    uint64_t query_full[kQueryStages], query_empty[kQueryStages];
    uint64_t key_full[kKeyStages], key_empty[kKeyStages], value_full[kStages], value_empty[kStages];
    [[no_unique_address]] std::conditional_t<kPacked, VarlenShared, Empty> packed;
  };
  static constexpr unsigned kSharedBytes = sizeof(Shared) + kBoxAlignment;  // dynamic shared memory is aligned to 16 only
  // An SM has 228 KiB; the system reserves 1 KiB of it per CTA.
  static_assert(kTile.ctas_per_sm * (kSharedBytes + 1024) <= 228 << 10);

  // Named barriers, one of each kind per math warpgroup; 0 is __syncthreads.
  static constexpr int kVoteBarrier = 1, kPingPongBarrier = 1 + kTile.warpgroups;
  static_assert(kPingPongBarrier + kTile.warpgroups <= 16);

  // The query of row `row` of a tile: over cached keys the queries of several heads are interleaved.
  __device__ __forceinline__ static int query_of_row(const Arguments& a, int row) {
    if constexpr (kCached) return row >> a.cached.group_shift;
    return row;
  }
  __device__ __forceinline__ static int first_head(const Arguments& a, const ForwardWorkTile& tile) {
    if constexpr (kCached) return tile.head << a.cached.group_shift;
    return tile.head;
  }
  // Counted from the tile's first head.
  __device__ __forceinline__ static int head_in_group(const Arguments& a, int row) {
    return row & ((1 << a.cached.group_shift) - 1);
  }
  __device__ __forceinline__ static int head_of_row(const Arguments& a, const ForwardWorkTile& tile, int row) {
    if constexpr (kCached) return first_head(a, tile) + head_in_group(a, row);
    return tile.head;
  }
  // Over cached keys the maps of queries and results have the dimensions [batch, query, head, column], so that a box is as many
  // rows of a tile. Packed rows have batch index 0.
  __device__ __forceinline__ static TmaCoord cached_row_at(int box, int head, int query, int batch) {
    return {box * kBoxColumns, head, query, batch};
  }
  __device__ __forceinline__ static int out_batch(const Arguments& a, const ForwardWorkTile& tile) {
    return a.cached.problem.query_starts ? 0 : tile.batch;
  }

  // The sequence's first rows and sizes: from the tile if packed; 0 and from the arguments if dense.
  __device__ __forceinline__ static int query_begin(const ForwardWorkTile& tile) {
    if constexpr (kPacked) return tile.sequence.query_begin;
    return 0;
  }
  __device__ __forceinline__ static int key_begin(const ForwardWorkTile& tile) {
    if constexpr (kPacked) return tile.sequence.key_begin;
    return 0;
  }
  __device__ __forceinline__ static int queries(const Arguments& a, const ForwardWorkTile& tile) {
    if constexpr (kPacked) return tile.sequence.queries;
    return a.queries;
  }
  __device__ __forceinline__ static int keys(const Arguments& a, const ForwardWorkTile& tile) {
    if constexpr (kPacked) return tile.sequence.keys;
    return a.keys;
  }
  // True if a block has keys that no query of the sequence sees.
  __device__ __forceinline__ static bool has_unseen_keys(const SeenKeys& seen, int block) {
    return block * kKeys < seen.begin || (block + 1) * kKeys > seen.end;
  }

  // The first block from `block` on that is loaded; `end` if there is none.
  __device__ static int next_loaded_block(const ForwardWorkTile& tile, int block, int end) {
    if constexpr (kMasked) {
#pragma unroll 1
      while (block < end) {
        const int bit = (block - tile.begin) >> tile.map.shift;
        const unsigned rest = tile.map.loaded[bit / 32] >> bit % 32;
        if (rest & 1) return block;
        block = tile.begin + ((rest ? bit + __ffs(rest) - 1 : bit / 32 * 32 + 32) << tile.map.shift);
      }
      return end;
    }
    return block;
  }

  __device__ __forceinline__ static void init_barriers(const Arguments& a, Shared& shared);
  // The warps of a CTA: see run().
  __device__ static void run(const Arguments& a, Shared& shared);
  struct Producer;
  __device__ static void schedule_tiles(const Arguments& a, Shared& shared, int lane);
  __device__ static void load_values(const Arguments& a, Shared& shared);
  __device__ static void clear_value_tails(Shared& shared, int lane);
  __device__ static void clear_padding_rows(const Arguments& a, int lane);
  struct CachedBlocks;
  struct CachedProducer;
  __device__ static void load_cached_values(const Arguments& a, Shared& shared, int lane);
  __device__ static void clear_unseen_values(Shared& shared, int lane);
  __device__ static void clear_unused_rows(const Arguments& a, int lane);
  __device__ static void generate_dropout(const Arguments& a, Shared& shared, int warp, int lane);
  __device__ static void make_sparse_bits(const Arguments& a, Shared& shared, int part, int lane);
  struct MathWarpgroup;

  // Functions of the above.
  __device__ __forceinline__ static Scheduler make_scheduler(const Arguments& a, Shared& shared);
  __device__ __forceinline__ static void set_sequence(ForwardWorkTile& tile, const PackedSequence& sequence,
                                                      const Visibility& visible);
  __device__ __forceinline__ static void rows_of_sequence(const Arguments& a, int sequence, Rows& queries, Rows& keys);
  __device__ __forceinline__ static void clear_rows(const Arguments& a, const Rows& rows, int lane);
  __device__ __forceinline__ static TileSparsity sparsity_of(const Arguments& a, int batch, int head);
  __device__ __forceinline__ static void narrow_by_spans(const Arguments& a, const WorkTileCoord& tile, int query,
                                                         int last_query, int& begin, int& end);
  __device__ __forceinline__ static void kinds_of_blocks(const Arguments& a, const ForwardWorkTile& tile,
                                                         const TileSparsity& sparsity, int block, int end,
                                                         bool (&hidden)[kRowBlocks], bool (&clear)[kRowBlocks]);
  __device__ __forceinline__ static void mark_blocks(const Arguments& a, ForwardWorkTile& tile, int shift, int words, int lane,
                                                     int& first_word, int& last_word);
  __device__ static void make_mask_map(const Arguments& a, ForwardWorkTile& tile, int lane);
  __device__ __forceinline__ static bool is_bit_set(const unsigned (&words)[kMapWords], int bit) {
    return words[bit / 32] >> bit % 32 & 1;
  }
  __device__ __forceinline__ static void load_value_block(const Arguments& a, ValueBuffer& buffer, int row, int head, int batch,
                                                          uint64_t* barrier);
};

}  // namespace flash_online::cuda
