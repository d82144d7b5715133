// What the warps of the Hopper backward kernel (backward_sm90.cuh) share: its arguments, what a tile's row says of it, shared
// memory and named barriers.
#pragma once

#include <cstdint>

#include "../../../../core/mask.h"
#include "../../../../core/problem.h"
#include "../../../hw/launch.h"
#include "../../../mma/fragments.cuh"
#include "../../common/backward_workspace.cuh"
#include "../../common/mask_map.cuh"
#include "../../common/mask_tile.cuh"
#include "../../common/scores.cuh"
#include "../../common/tile_list.cuh"
#include "../supported.h"
#include "../tiles.h"
#include "../tma_tensor.cuh"

namespace flash_online::cuda {

constexpr int kSumPieceSm90 = 64;  // columns of gradients of queries that a warpgroup sums at a time

// How a mask reaches the scores where it does not come by MaskTile: not at all, by TransposedMaskBits, or in boxes as it lies
// in memory.
enum class TransposedMask { kNone, kBits, kBoxes };

struct BackwardSm90Arguments {
  TmaTensor query, key, value, grad_out, mask;
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardWorkspace space;
  TransposedMask transposed_mask;
  TransposedMaskBits bits;
  int section;  // heads whose blocks of keys run side by side
  bool halves;  // by_halves() decides
  bool batch_within;  // heads are counted with the batch inside, for a mask that the batch shares
  int* turns;  // of space.list's blocks, 0 at the start: how many have added to one's gradients; null: in any order
  unsigned* taken;  // of the list of keys' blocks, 0 at the start, where blocks of threads stay for several
  TileList list;  // of keys; its heads are the kv_grad_heads
  ScoreMod rule;
  float keep_scale;  // of dropout: 1 / (1 - p)
  float keep, keep_exponent;  // its inverse, and its logarithm to the base 2
  float added_scale;  // of what ALiBi and a mask add, for the units of products: 1 / scale
};

// Tile: a BackwardSm90Tile.
template <class T, class Tile>
struct BackwardOnSm90 {
  static constexpr BackwardSm90 kTile = Tile::kTile;
  static constexpr bool kStays = Tile::kStays;
  static constexpr int kHeadDim = kTile.head_dim, kHeadDimV = kTile.head_dim_v;
  static constexpr BackwardSm90Features kFeatures = kTile.with;
  static constexpr bool kEverything = kFeatures == BackwardSm90Features::kEverything,
                        kDrops = kFeatures == BackwardSm90Features::kDropout;
  static constexpr bool kWalks = kFeatures != BackwardSm90Features::kNothing;  // there may be a mask that hides blocks
  static constexpr bool kTransposed = kWalks && !kEverything;  // masks come by TransposedMask, and not by MaskTile
  static constexpr bool kFillsUp = kEverything || kDrops;  // takes head dims that have a narrower tile for less
  static constexpr int kKeys = kTile.keys, kQueries = kTile.queries, kStages = 2;
  static constexpr int kThreads = kTile.threads(), kMathThreads = 128 * kTile.warpgroups, kWarps = kMathThreads / kWarpSize;
  // What all warps take must be there: the block has what all threads were launched with, in eights, else they wait for good.
  static_assert(128 * (kTile.warpgroups * kTile.registers + kTile.loader_registers) +
                    (kThreads - 128 * (kTile.warpgroups + 1)) * kTile.others_registers <=
                65536 / (kThreads * kTile.blocks) / 8 * 8 * kThreads);
  static constexpr int kGroupKeys = 64;  // of a warpgroup
  static constexpr bool kLine = kTile.in_line(), kAlone = kTile.warpgroups == 1;
  static constexpr int boxes_of(int columns) { return (columns + kBoxColumns - 1) / kBoxColumns; }
  static constexpr int kBoxes = boxes_of(kHeadDim), kValueBoxes = boxes_of(kHeadDimV), kQueryBoxes = kQueries / kBoxColumns;
  static constexpr int kQuerySteps = kQueries / 16, kKeySteps = kKeys / 16;
  static constexpr unsigned kRowBytes = kBoxColumns * sizeof(T);
  // The gradients of a block's queries are pieces of 64 x 64: one a warpgroup, side by side or one above the other; or all of
  // one's. Of the last there may be half.
  static constexpr bool kSideBySide = kQueries == 64;
  static constexpr int kPieces = kLine ? kBoxes : 1, kPiece = kAlone ? kHeadDim : kSumPieceSm90;
  static_assert(kSideBySide ? kLine || kBoxes == 2 : kQueries == 128 && kBoxes == 1);
  static_assert(kQueries % kStatsRows == 0 && (!kEverything || kQueries * 2 <= 128));
  static_assert(!kLine || (!kEverything && kSideBySide && kHeadDim % kBoxColumns == 0));
  static constexpr int kSummers = kLine ? 4 : kWarps;  // warps that sum gradients of queries
  // Gradients of queries leave through shared memory and the copy engine, where there is room for them.
  static constexpr bool kStaged = !kEverything && !kAlone;
  static_assert(!kStays || (kStaged && !kWalks && !kLine));
  static constexpr int kScoreBuffers = kAlone || (kLine && kHeadDim > 192) ? 1 : 2;  // of blocks
  static constexpr bool kLowAside = kTransposed && kQueries == 128;  // boxes of a mask leave no room for lse's low part
  static constexpr int kRowsKept = kStatsRows * (kLowAside ? 2 : 3);

  template <int kCount, int kRows>
  struct alignas(kBoxAlignment) Boxes {
    T box[kCount][kRows][kBoxColumns];
  };
  using Keys = Boxes<kBoxes, kKeys>;
  using Values = Boxes<kValueBoxes, kKeys>;
  using Queries = Boxes<kBoxes, kQueries>;
  using OutGradients = Boxes<kValueBoxes, kQueries>;
  struct alignas(kBoxAlignment) Scores {
    T box[kQueryBoxes][kKeys][kBoxColumns];  // [key][query]
  };
  struct Stage {
    Queries query;
    OutGradients grad_out;
  };
  // What a block of threads works on.
  struct Place {
    int64_t batch;
    int unit, key, last_key, queries, keys, first_head, heads;
    Visibility visible;
    int begin, end;  // blocks of queries; begin < 0: there are no more places
    int first_query, first_key;  // rows of the tensors
    int offset, left, right;  // of sequence.visible, in 32 bits; kFar: no bound
  };
  static constexpr int kFar = 4 * kLongestBackwardSm90;  // no query stands that far from a key
  // Where no mask hides any.
  __device__ __forceinline__ static int blocks_of(const Place& place) { return place.heads * max(place.end - place.begin, 0); }
  // What passes by: a block of a head's queries.
  struct Job {
    int head, query;  // its first; -1: no more blocks
    bool whole;  // all queries see all keys by arithmetic, and all of both exist
    int sides;  // kSees, kAsks
    bool last, third;  // of its place; its third or a later one
    int64_t sums;  // its gradients' place in space.sums
    float slope;  // of ALiBi, in the units of products
  };
  // Of the mask's, for each warpgroup: whether it shows its keys to any of a block's queries, and then whether not all of them.
  static constexpr int kSees = 1, kAsks = 4;  // << warpgroup
  static constexpr int kAllSee = 3 * kSees, kAnyAsks = 3 * kAsks;
  struct Shared {
    Keys key;
    Values value;
    Stage stage[kStages];
    Scores scores[kScoreBuffers];  // their gradients
    uint4 weights[kLine ? 4 : 1][kLine ? 128 : 1];  // as a thread has them, for the one that has their gradients
    float sums[kStaged ? kSummers : 1][kStaged ? kPiece * 16 : 4];  // gradients of queries on their way
    alignas(16) float rows[kStages][kQueries / kStatsRows][kRowsKept];
    Place place[kStays ? 2 : 1];
    Job job[4];  // of the block at hand, the next, and the two before, whose gradients of queries are still on their way
    int sent, number;  // load_places: blocks so far, and places
    uint64_t key_full, value_full, keys_empty, query_full[kStages], grad_out_full[kStages], empty[kStages], scores_full[2],
        turn[2], added[2], scores_empty[2], grad_out_empty[kStages], weights_full, weights_empty;
    uint64_t mask_full, mask_empty, drawn_full[kStages];
  };
  // Behind that: a MaskTile; or a mask's boxes, or its bits, and then dropout's.
  static constexpr int kMaskAlignment = kTransposed ? kBoxAlignment : kVectorBytes;
  static constexpr int kMaskOffset = (sizeof(Shared) + kMaskAlignment - 1) / kMaskAlignment * kMaskAlignment;
  struct MaskBox {
    T value[kQueries][kBoxColumns];
  };
  struct WeightBits {  // as in TransposedMaskBits
    unsigned word[kQueries / kStatsRows][kWarps][kWarpSize];
  };
  static_assert(!kTransposed || sizeof(WeightBits) == kQueries / kMaskMapTile * (kKeys / kMaskMapTile) * sizeof(unsigned) *
                                                          TransposedMaskBits::kWords);
  static_assert(!kTransposed || kDrops || kAlone || kMaskOffset + 2 * sizeof(MaskBox) <= 227 << 10);
  static int shared_bytes(const AttentionProblem& problem, TransposedMask turned) {
    if (kTransposed)
      return kMaskOffset + static_cast<int>((turned == TransposedMask::kBoxes ? 2 * sizeof(MaskBox) : 0) +
                                            (turned == TransposedMask::kBits ? kStages * sizeof(WeightBits) : 0) +
                                            (kDrops ? kStages * sizeof(WeightBits) : 0));
    const int rows = !kEverything || !problem.mask.data ? 0 : problem.mask.stride[2] == 0 ? 1 : kQueries;
    return kMaskOffset + rows * mask_pitch(kKeys, static_cast<int>(size_of(problem.mask_dtype)));
  }
  // Of a warpgroup.
  __device__ __forceinline__ static MaskBox& mask_box(Shared& shared, int group) {
    return reinterpret_cast<MaskBox*>(reinterpret_cast<char*>(&shared) + kMaskOffset)[group];
  }
  __device__ __forceinline__ static WeightBits& shown_bits(Shared& shared, int stage) {
    return reinterpret_cast<WeightBits*>(reinterpret_cast<char*>(&shared) + kMaskOffset)[stage];
  }
  __device__ __forceinline__ static WeightBits& kept_bits(const BackwardSm90Arguments& a, Shared& shared, int stage) {
    return shown_bits(shared, stage + (a.transposed_mask == TransposedMask::kBits ? kStages : 0));
  }

  template <int kColumns>
  using Sums = Accumulator<1, kColumns / 8>;
  using ScoreSums = Accumulator<1, kQueries / 8>;
  using Mask = MaskTile<kQueries, kKeys, kMathThreads>;
  using OutTile = SharedTile<T, kHeadDim>;
  static_assert(OutTile::bytes(kKeys) <= static_cast<int>((kLine ? 1 : kStages) * sizeof(Stage)));

  static constexpr int kAllMath = 1, kTurn = 2;  // named barriers; kTurn + warpgroup

  // Columns that only the tile has are nobody's.
  __device__ static int sum_width(const BackwardWorkspace& space) {
    return kFillsUp ? static_cast<int>(space.head_dim) : kHeadDim;
  }

  // A mask may show one half of a block's keys alone to many a block of queries: then blocks of threads that own 64 keys, two a
  // multiprocessor, make what one that owns 128 leaves. Both ask the map, so that one of them returns at once.
  static constexpr bool kMayHalve = kAlone || (kFeatures == BackwardSm90Features::kMasks && kQueries == 64);

  // Which keys a block of threads has, and what each of its warps is (backward_sm90.cuh).
  __device__ static void clear_padding(const BackwardSm90Arguments& a);
  __device__ static bool by_halves(const BackwardSm90Arguments& a, int64_t batch, int first_head, int heads_of_unit, int key);
  __device__ static bool find_place(const BackwardSm90Arguments& a, unsigned index, Place& place);
  __device__ static bool take_place(const BackwardSm90Arguments& a, Shared& shared);
  __device__ static void run(const BackwardSm90Arguments& a, Shared& shared);

  // The warps that bring things, and the one that waits its turn (backward_sm90_producers.cuh).
  class Walk;
  struct Loader;
  __device__ static void draw(const BackwardSm90Arguments& a, Shared& shared, int quarter);
  __device__ static void keep_turns(const BackwardSm90Arguments& a, Shared& shared, const Place& place, int& count);
  __device__ static void keep_turns_of_places(const BackwardSm90Arguments& a, Shared& shared);

  // A warpgroup that computes (backward_sm90_group.cuh, backward_sm90_consumers.cuh).
  struct Group;
};

}  // namespace flash_online::cuda
