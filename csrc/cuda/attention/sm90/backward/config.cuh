// Definitions that the warps of the Hopper backward kernel (kernel.cuh) share: the kernel's arguments, the constants that
// follow from its row of the tile table, the layout of shared memory, and the barriers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../../../../core/mask.h"
#include "../../../../core/problem.h"
#include "../../../hw/cluster.cuh"
#include "../../../hw/launch.h"
#include "../../../mma/fragments.cuh"
#include "../../common/backward_workspace.cuh"
#include "../../common/dropout.cuh"
#include "../../common/scores.cuh"
#include "../../common/tile_list.cuh"
#include "../../masks/mask_tile.cuh"
#include "../../masks/visible_blocks.cuh"
#include "../tma_tensor.cuh"
#include "supported.h"
#include "tiles.h"

namespace flash_online::cuda {

constexpr int kDqChunkColumnsSm90 = 64;  // columns of dQ that a warpgroup computes at a time

// The source of a mask that does not use MaskTile: none; bits, as in TransposedMaskBits, which a table has of a bool mask and
// which the bit warps make of sparsity; or TMA boxes of the mask as it is in memory.
enum class TransposedMask { kNone, kBits, kTma };

struct BackwardSm90Arguments {
  TmaTensor query, key, value, grad_out, mask;
  TmaTensor grad_key, grad_value;  // in boxes of a warp's keys
  bool sends_grads;  // by TMA; else from registers
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardWorkspace space;
  TransposedMask transposed_mask;
  TransposedMaskBits mask_bits;
  bool may_use_narrow_tile;  // use_narrow_tile() decides per work tile
  bool batch_innermost;      // heads are numbered with the batch inside, for a mask that the batch shares
  // Per block of space.list, 0 at the start: how many CTAs have added to its dQ. Null: they add in any order.
  int* dq_semaphore;
  unsigned* tile_counter;  // 0 at the start: how many work tiles the CTAs of a persistent kernel have taken
  TileList tile_list;  // of keys; its heads are the kv_grad_heads
  int q_heads_per_kv_grad_head;
  ScoreMod score_mod;
  float keep_scale;  // dropout: 1 / (1 - p)
  float bias_scale;  // from ALiBi and a mask to the units of the products: 1 / scale
  KvGradPartials kv_grad_partials;
};

// Config: a BackwardSm90Config.
template <class T, class Config>
struct BackwardSm90Kernel {
  static constexpr BackwardSm90Tile kTile = Config::kTile;
  static constexpr bool kPersistent = kTile.persistent;
  static constexpr int kHeadDim = kTile.head_dim, kHeadDimV = kTile.head_dim_v;
  static constexpr BackwardSm90Features kFeatures = kTile.features;
  static constexpr bool kAllOptions = kFeatures == BackwardSm90Features::kAllOptions,
                        kHasDropout = kFeatures == BackwardSm90Features::kDropout;
  static constexpr bool kHasMaskMap = kFeatures != BackwardSm90Features::kPlain;  // a mask map may hide whole blocks
  static constexpr bool kCutsTiles = !kHasMaskMap;  // work tiles may come in parts
  // Warps 2 and 3 make a mask's bits of sparsity.
  static constexpr bool kSparse = kFeatures == BackwardSm90Features::kSparse;
  static constexpr int kBitWarps = 2;
  // A warp finds the blocks of queries ahead of the one that loads them.
  static constexpr bool kHasScheduler = kSparse && kPersistent;
  // Masks come by TransposedMask, and not by MaskTile. With a scheduler, these bits are applied where position is.
  static constexpr bool kTransposed = kHasMaskMap && !kAllOptions && !kHasScheduler;
  static constexpr bool kPipelined = kTile.pipelined(), kSingleWarpgroup = kTile.warpgroups == 1;
  // Takes the head dims of narrower rows as well.
  static constexpr bool kPadsHeadDim = kAllOptions || (kPipelined && kHasMaskMap);

  static constexpr int kKeys = kTile.keys, kQueries = kTile.queries, kStages = 2;
  // In the pipeline the two CTAs of a cluster share dQ: each computes half of its columns, of the dS and the keys of both.
  static constexpr int kCluster = kTile.ctas_per_cluster(), kClusterKeys = kCluster * kKeys;
  // There is no room for a second buffer of grad_out at head dim 256.
  static constexpr int kGradOutStages = kHeadDim > 192 ? 1 : kStages;
  static constexpr int kWarpgroupKeys = 64, kWarpKeys = 16;
  static constexpr int kWarpgroupThreads = 128, kThreads = kTile.threads(), kMathThreads = kWarpgroupThreads * kTile.warpgroups,
                       kMathWarps = kMathThreads / kWarpSize;
  static constexpr int box_count(int columns) { return (columns + kBoxColumns - 1) / kBoxColumns; }
  static constexpr int kBoxes = box_count(kHeadDim), kValueBoxes = box_count(kHeadDimV), kQueryBoxes = kQueries / kBoxColumns;
  static constexpr int kQuerySteps = kQueries / 16, kKeySteps = kKeys / 16;  // of the products that sum over them
  static constexpr unsigned kRowBytes = kBoxColumns * sizeof(T);

  // dQ of a block is cut into chunks of 64 x 64. Two warpgroups take one chunk each, side by side where a block has 64 queries
  // and one above the other where it has 128; of the last chunk in a row there may be half. The pipeline's third warpgroup
  // takes one chunk after another, half of them in each CTA of a cluster, and a single warpgroup takes all columns at once.
  static constexpr bool kDqSideBySide = kQueries == 64;
  // Where a row has an odd number of boxes, each CTA of a cluster has half of the middle one too, as the end of its chunk.
  static constexpr int kDqNarrowColumns = kPipelined && kBoxes % 2 != 0 ? kBoxColumns / 2 : 0;
  static constexpr int kDqChunks = kPipelined ? kBoxes / kCluster : 1;
  static constexpr int kDqChunkColumns = kSingleWarpgroup ? kHeadDim : kDqChunkColumnsSm90 + kDqNarrowColumns;
  static constexpr int kDqWarps = kPipelined ? 4 : kMathWarps;
  // dQ leaves through shared memory and bulk copies where shared memory has room for it, else from registers.
  static constexpr bool kStagesDq = !kAllOptions && !kSingleWarpgroup;
  // Of a chunk's tiles of 16 x 8, the first kDqBulkTiles go that way; the last ones are added from registers all the same,
  // since both ways at once are faster than either.
  static constexpr int kDqBulkTiles = kDqChunkColumns / 8 - kTile.dq_register_tiles;
  static constexpr int kDqAlignment = kPersistent ? kBoxAlignment : kVectorBytes;
  static_assert(kDqNarrowColumns == 0 || kTile.dq_register_tiles * 8 == kDqNarrowColumns);
  // A persistent kernel needs a work tile's keys to the very end of it, for dQ: the next one's arrive in another buffer.
  // With sparsity there is no room for it.
  static constexpr int kKeyBuffers = kPersistent && !kSparse ? 2 : 1;
  static constexpr int kWorkTiles = kHasScheduler ? 4 : kPersistent ? 2 : 1;  // work tiles that are known at a time
  // In the pipeline, a block's weights lie where its dS is going to.
  static constexpr int kDsBuffers = kSingleWarpgroup ? 1 : 2;
  static constexpr int kQueryBlocks = kDsBuffers == 1 ? 4 : 8;  // a power of two
  // At head dim 64 a mask's boxes leave no room for lse's low part: it is read into dq_staging when it counts.
  static constexpr bool kLseLowInStaging = kTransposed && kQueries == 128 && !kHasDropout;
  // The tensor cores subtract lse and delta, as one more step of the products. Where scores are [key][query], all of a warp's
  // rows need the same numbers, but each lane has to read them: a clock of shared memory per register and warp.
  static constexpr bool kSubtractsByProducts = kFeatures == BackwardSm90Features::kPlain || kHasScheduler;
  using RowStats = std::conditional_t<kSubtractsByProducts, StatsOperand, float[kStatsRows * (kLseLowInStaging ? 2 : 3)]>;

  static_assert(kDqSideBySide ? kPipelined || kBoxes == 2 : kQueries == 128 && kBoxes == 1);
  static_assert(kQueries % kStatsRows == 0 && (!kAllOptions || kQueries * 2 <= 128));
  static_assert(!kPipelined || (!kAllOptions && kDqSideBySide));
  static_assert(!kPersistent || (kStagesDq && (!kHasMaskMap || kSparse) && !kPipelined));

  // ---- what a CTA works on

  template <class Member>
  struct Without {};  // in place of a member that a kernel does not have, without room

  // The keys that a CTA owns at a time, and the blocks of queries that it loops over.
  struct BackwardWorkTile {
    int batch, kv_grad_head, key, last_key, queries, keys, first_head, q_heads_per_kv_grad_head;
    [[no_unique_address]] std::conditional_t<kAllOptions, Visibility, Without<Visibility>> visible;
    int begin, end;  // blocks of queries of each head; begin < 0: there are no more work tiles
    int first_query, first_key;  // rows of the tensors
    int offset, left, right;  // those of Sequence::visible in 32 bits; kUnbounded: no bound
    // Where no mask hides any: the first block of first_head that counts, and how many there are from it on, head after head.
    int first_block, blocks;
    int slot;  // of a part: its slot in kv_grad_partials; -1: this is a whole tile
  };
  static constexpr int kUnbounded = 4 * kMaxLengthBackwardSm90;  // no query stands that far from a key

  // A block of a head's queries, as the producer announces it.
  struct PlainQueryBlock {
    int64_t dq_offset;  // of its dQ in space.dq_accum
    int head, query;  // query: its first; -1: there are no more blocks
    bool all_visible;  // by position alone all queries see all keys, and all of both exist
    bool last, third;  // whether it is the last of its work tile; whether two or more precede it there
  };
  struct MaskedQueryBlock : PlainQueryBlock {
    int mask_flags;  // kVisible and kMixed per warpgroup; in the pipeline kMixed alone, of this CTA
    float slope;  // of ALiBi, in the units of the products
  };
  struct ScheduledQueryBlock : PlainQueryBlock {
    int mask_flags;  // kMixed << w where sparsity hides something from warpgroup w
    int tile;  // the number of its work tile
  };
  using QueryBlock = std::conditional_t<kHasScheduler, ScheduledQueryBlock,
                                        std::conditional_t<kHasMaskMap, MaskedQueryBlock, PlainQueryBlock>>;
  static constexpr int kNoMoreBlocks = -1, kEmptyStage = -2;  // in place of a block's first query
  // kVisible << w: the mask shows some of warpgroup w's keys to some of the block's queries. kMixed << w: it also hides some or
  // adds something, and must be applied.
  static constexpr int kVisible = 1, kMixed = 4;
  static constexpr int kBothVisible = 3 * kVisible, kEitherMixed = 3 * kMixed;

  // ---- shared memory

  template <int kCount, int kRows>
  struct alignas(kBoxAlignment) TmaTile {
    T box[kCount][kRows][kBoxColumns];
  };
  using KeyTile = TmaTile<kBoxes, kKeys>;
  using ValueTile = TmaTile<kValueBoxes, kKeys>;
  using QueryTile = TmaTile<kBoxes, kQueries>;
  using GradOutTile = TmaTile<kValueBoxes, kQueries>;
  using DsTile = TmaTile<kQueryBoxes, kKeys>;  // [key][query]
  struct StageOfBoth {
    QueryTile query;
    GradOutTile grad_out;
  };
  struct StageOfQueries {
    QueryTile query;
  };
  using Stage = std::conditional_t<kGradOutStages == 1, StageOfQueries, StageOfBoth>;
  static constexpr int kPeerBoxes = 2;
  struct Peer {  // the cluster's other CTA: of its keys the columns that this CTA computes of dQ, and its dS
    TmaTile<kPeerBoxes, kKeys> key;
    DsTile ds[kDsBuffers];
    uint64_t ds_full[kDsBuffers];
  };
  struct HandOverBarriers {  // a stage's grad_out is released apart; the pipeline's weights
    uint64_t grad_out_empty[kGradOutStages], weights_full[kDsBuffers];
  };
  static constexpr bool kHasMaskBarriers = kHasMaskMap && !kPipelined && !kHasScheduler;
  struct MaskBarriers {  // of a mask's boxes; of dropout's bits
    uint64_t full, empty, dropout_full[kStages];
  };
  // A block is announced to the bit warps. The producer may be two blocks ahead of them. A scheduler announces it to the
  // producer too, and waits until all of these have taken the block kCount before it.
  struct SparseBarriers {
    static constexpr int kCount = 4;
    uint64_t announced[kCount], taken[kCount];
  };
  struct Shared {
    KeyTile key[kKeyBuffers];
    ValueTile value;
    Stage stage[kStages];
    [[no_unique_address]] std::conditional_t<kGradOutStages == 1, GradOutTile, Without<GradOutTile>> grad_out;
    DsTile ds[kDsBuffers];
    [[no_unique_address]] std::conditional_t<kPipelined, Peer, Without<Peer>> peer;

    // These members are not the last ones: compute-sanitizer takes row_stats for an operand without gaps between its matrices,
    // which would be longer, and would end outside of shared memory.
    alignas(16) RowStats row_stats[kStages][kQueries / kStatsRows];
    BackwardWorkTile tile[kWorkTiles];
    // The current block, the next one, the two before (their dQ is still being added), and the one after the next, which the
    // producer announces before its stage is free. With one buffer of dS, only the last dQ is still being added then.
    QueryBlock query_block[kQueryBlocks];
    int producer_blocks, producer_tiles;  // persistent kernels: how many the producer has sent

    // Barriers. "full": the producer's data have arrived; "empty": the consumers are done with them.
    uint64_t key_full[kKeyBuffers], key_empty[kKeyBuffers], value_full, value_empty;
    uint64_t query_full[kStages], grad_out_full[kStages];
    uint64_t stage_empty[kStages];  // the stage; of the pipeline its queries alone, as grad_out_empty exists
    uint64_t ds_full[2];  // all warps of the CTA have written their dS of a block
    uint64_t dq_may_add[2], dq_added[2];  // the dQ semaphore admits this CTA to a block; its warps have added their dQ
    uint64_t ds_empty[2];  // all warps that make dQ of it are done, of the cluster's other CTA too
    [[no_unique_address]] std::conditional_t<kPipelined, HandOverBarriers, Without<HandOverBarriers>> hand_over;
    [[no_unique_address]] std::conditional_t<kHasMaskBarriers, MaskBarriers, Without<MaskBarriers>> mask;
    [[no_unique_address]] std::conditional_t<kSparse, SparseBarriers, Without<SparseBarriers>> sparse;

    // dQ on its way to global memory, and at the end of a persistent kernel's work tile dV of two boxes.
    alignas(kDqAlignment) float dq_staging[kStagesDq ? kDqWarps : 1][kStagesDq ? kDqBulkTiles * 128 : 4];
  };
  // After Shared there is a MaskTile; or a mask's boxes or its bits, and then the bits of dropout.
  static constexpr int kMaskAlignment = kTransposed && !kPipelined ? kBoxAlignment : kVectorBytes;
  static constexpr int kMaskOffset = (sizeof(Shared) + kMaskAlignment - 1) / kMaskAlignment * kMaskAlignment;
  // Bits that the bit warps make are there before their stage is free.
  static constexpr int kMaskBitsBuffers = kSparse ? 2 * kStages : kStages;
  struct MaskBox {
    T value[kQueries][kBoxColumns];
  };
  struct BlockBits {  // one bit per score, as in TransposedMaskBits
    unsigned word[kQueries / kStatsRows][kKeys / 16][kWarpSize];
  };
  static_assert(!kTransposed || sizeof(BlockBits) == kQueries / kMaskMapTile * (kKeys / kMaskMapTile) * sizeof(unsigned) *
                                                         TransposedMaskBits::kWords);
  static constexpr int shared_bytes(TransposedMask mask) {  // where kTransposed or kSparse
    return kMaskOffset + static_cast<int>((mask == TransposedMask::kTma ? 2 * sizeof(MaskBox) : 0) +
                                          (mask == TransposedMask::kBits ? kMaskBitsBuffers * sizeof(BlockBits) : 0) +
                                          (kHasDropout ? kStages * sizeof(BlockBits) : 0));
  }
  static int shared_bytes(const AttentionProblem& problem, TransposedMask mask) {
    if (kTransposed || kSparse) return shared_bytes(mask);
    const int rows = !kAllOptions || !problem.mask.data ? 0 : problem.mask.stride[2] == 0 ? 1 : kQueries;
    return kMaskOffset + rows * mask_pitch(kKeys, static_cast<int>(size_of(problem.mask_dtype)));
  }
  // The most shared memory of a row of the tile table.
  static constexpr int kMaxSharedBytes =
      kAllOptions                  ? kMaskOffset + kQueries * mask_pitch(kKeys, sizeof(float))
      : kHasScheduler              ? shared_bytes(TransposedMask::kBits)
      : !kTransposed               ? kMaskOffset
      : kHasDropout || kKeys == 64 ? shared_bytes(TransposedMask::kBits)
                                   : std::max(shared_bytes(TransposedMask::kBits), shared_bytes(TransposedMask::kTma));
  // An SM has 228 KiB; the system reserves 1 KiB of it per CTA.
  static_assert((kMaxSharedBytes + 1024) * kTile.ctas_per_sm <= 228 << 10);

  __device__ __forceinline__ static GradOutTile& grad_out_tile(Shared& shared, int stage) {
    if constexpr (kGradOutStages == 1)
      return shared.grad_out;
    else
      return shared.stage[stage].grad_out;
  }

  __device__ __forceinline__ static MaskBox& mask_box(Shared& shared, int warpgroup) {
    return reinterpret_cast<MaskBox*>(reinterpret_cast<char*>(&shared) + kMaskOffset)[warpgroup];
  }
  __device__ __forceinline__ static BlockBits& mask_bits(Shared& shared, int buffer) {
    return reinterpret_cast<BlockBits*>(reinterpret_cast<char*>(&shared) + kMaskOffset)[buffer];
  }
  __device__ __forceinline__ static BlockBits& dropout_bits(const BackwardSm90Arguments& a, Shared& shared, int stage) {
    return mask_bits(shared, stage + (a.transposed_mask == TransposedMask::kBits ? kStages : 0));
  }

  // Named barriers; kPingPongBarrier + warpgroup, kSyncBarrier + 2 * SyncPoint + warpgroup.
  static constexpr int kAllMathBarrier = 1, kPingPongBarrier = 2, kSyncBarrier = 4;
  // Where all math threads wait for each other.
  enum SyncPoint { kQueryTail, kKeyTail = 2, kEnd };  // kQueryTail + stage
  static_assert(kSyncBarrier + 2 * kEnd + 2 <= 16);

  // Measured at head dim 128 (docs/lab/backward_sm90.md): a tile's start and end take as long as three blocks of 64 queries,
  // and 20 parts of 32768 floats as long as one.
  static constexpr TileCosts kTileCosts{
      .tile = kQueries == 64 ? 3 : 2,
      .least_part = 128 / kQueries,
      .parts_per_block = 20 * 32768 / (kClusterKeys * (kHeadDim + kHeadDimV)) * kQueries / 64};

  // ---- registers

  template <int kColumns>
  using GradAccumulator = Accumulator<1, kColumns / 8>;  // of dK or dV: [this warpgroup's keys][columns]
  using ScoreAccumulator = Accumulator<1, kQueries / 8>;  // S or dP: [this warpgroup's keys][the block's queries]
  using DqAccumulator = float[kDqChunkColumns / 2];  // a chunk of dQ
  using PackedScores = unsigned[kQueries / 16][4];  // weights or dS, in pairs of 16 bits: a product's left operand
  using Mask = MaskTile<kQueries, kKeys, kMathThreads>;
  using OutTile = SharedTile<T, kHeadDim>;
  static_assert((kPipelined ? 2 : 1) * OutTile::bytes(kKeys) <=
                static_cast<int>(kStages * sizeof(Stage) + (kGradOutStages == 1 ? sizeof(GradOutTile) : 0)));

  // Columns of the dQ accumulator: those of the tile that exceed the problem's are not stored.
  __device__ static int dq_accum_width(const BackwardWorkspace& space) {
    return kPadsHeadDim ? static_cast<int>(space.head_dim) : kHeadDim;
  }

  // A mask may show only one half of a tile's keys to many blocks of queries. Then CTAs that own 64 keys, two per SM, do the
  // work that a CTA of 128 keys leaves to them. Both kernels are launched and ask the map, so that one of the two returns at
  // once.
  static constexpr bool kMayUseNarrowTile =
      kSingleWarpgroup || (kFeatures == BackwardSm90Features::kMasks && kQueries == 64 && !kPipelined);

  // ---- the kernel

  // This CTA's number in its cluster.
  __device__ __forceinline__ static int rank() { return kPipelined ? cluster_rank() : 0; }
  // The first box of the other CTA's keys that this CTA has.
  __device__ __forceinline__ static int first_peer_box() { return rank() * (kBoxes - kPeerBoxes); }

  // The keys that a CTA owns, and the role of each of its warps (kernel.cuh).
  __device__ static void clear_padding(const BackwardSm90Arguments& a);
  __device__ static bool use_narrow_tile(const BackwardSm90Arguments& a, int64_t batch, int first_head,
                                         int q_heads_per_kv_grad_head, int key);
  __device__ static bool find_work_tile(const BackwardSm90Arguments& a, unsigned index, BackwardWorkTile& tile);
  __device__ static bool take_work_tile(const BackwardSm90Arguments& a, Shared& shared);
  __device__ static void init_barriers(const BackwardSm90Arguments& a, Shared& shared);
  __device__ static void run(const BackwardSm90Arguments& a, Shared& shared);

  // The producer warp, the bit warps, the dropout warps, and the warp that waits for the dQ semaphore (producer.cuh).
  class MaskedBlockIterator;
  struct Producer;
  struct BlockScheduler;
  __device__ static void make_sparse_bits(const BackwardSm90Arguments& a, Shared& shared, int part);
  __device__ static void generate_dropout(const BackwardSm90Arguments& a, Shared& shared, int quarter);
  __device__ static void order_dq_adds(const BackwardSm90Arguments& a, Shared& shared, const BackwardWorkTile& tile,
                                       int& count);
  __device__ static void order_dq_adds_of_all_tiles(const BackwardSm90Arguments& a, Shared& shared);

  // A math warpgroup: what all schedules have in common (warpgroup.cuh), and the schedules (schedule_*.cuh).
  struct MathWarpgroup;
};

}  // namespace flash_online::cuda
