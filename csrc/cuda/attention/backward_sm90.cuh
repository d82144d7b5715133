// Attention backward on Hopper: TMA loads, wgmma products. docs/backward_sm90.md draws it.
//
// A block of threads owns 128 keys and values, 64 a warpgroup, and the queries of every head that shares them pass by in
// blocks, brought by a warp that does nothing else. Scores are made again, transposed: [key][query], so that weights and the
// scores' gradients are left operands of the products that are the gradients of values and keys, which stay in registers to the
// end. The scores' gradients also go through shared memory, for the gradients of queries: each warpgroup sums its half of a
// block's over all 128 keys, a block late, so that neither waits for the other, and has it added to sums in global memory.
//
// Over head dim 128 (kLine) that takes too many registers: a block of threads owns 64 keys, and three warpgroups stand in line.
// The first makes weights and the gradients of values, the second from these weights their scores' gradients and those of keys,
// the third the gradients of queries. What one hands to the next goes through shared memory. Where a mask shows one half of
// many a block of 128 keys (kAlone), a block of threads is one warpgroup with 64 keys, which makes all gradients of a block's
// queries.
#pragma once

#include <cmath>

#include "../../core/philox.h"
#include "../../core/visit.h"
#include "../hw/byte_signs.cuh"
#include "../hw/mbarrier.cuh"
#include "../hw/named_barrier.cuh"
#include "../hw/reduce.cuh"
#include "../hw/register_budget.cuh"
#include "../hw/store_matrix.cuh"
#include "../hw/stream_order.cuh"
#include "../hw/turns.cuh"
#include "attention.h"
#include "backward_short_sm90.cuh"
#include "block_map.cuh"
#include "boxes.cuh"
#include "delta.cuh"
#include "load.cuh"
#include "mask_gradient_sm90.cuh"
#include "products_sm90.cuh"
#include "refusal_sm90.h"
#include "scores.cuh"
#include "tiles_sm90.h"

namespace flash_online::cuda {

constexpr int kSumPieceSm90 = 64;  // columns of gradients of queries that a warpgroup sums at a time

// How a mask reaches the scores where it does not come by MaskBlock: not at all, by TurnedBits, or in boxes as it lies in
// memory.
enum class TurnedMask { kNone, kBits, kBoxes };

struct BackwardSm90Arguments {
  HeadBoxes query, key, value, grad_out, mask;
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardSpace space;
  TurnedMask turned_mask;
  TurnedBits bits;
  int section;  // heads whose blocks of keys run side by side
  bool halves;  // by_halves() decides
  bool batch_within;  // heads are counted with the batch inside, for a mask that the batch shares
  int* turns;  // of space.list's blocks, 0 at the start: how many have added to one's gradients; null: in any order
  unsigned* taken;  // of the list of keys' blocks, 0 at the start, where blocks of threads stay for several
  BlockList list;  // of keys; heads are units
  ScoreRule rule;
  float keep_scale;  // of dropout: 1 / (1 - p)
  float keep, keep_exponent;  // its inverse, and its logarithm to the base 2
  float added_scale;  // of what ALiBi and a mask add, for the units of products: 1 / scale
};

// kStays: a block of threads takes one block of keys after another: while the gradients of one's keys are stored, the next
// one's queries, keys and values are on their way.
template <class T, int kWidth, int kValueWidth, BackwardSm90With kWith, bool kStays>
struct BackwardOnSm90 {
  static constexpr BackwardSm90 kTile = backward_sm90_tile(kWidth, kValueWidth, kWith);
  static constexpr bool kEverything = kWith == BackwardSm90With::kEverything, kDrops = kWith == BackwardSm90With::kDropout;
  static constexpr bool kWalks = kWith != BackwardSm90With::kNothing;  // there may be a mask that hides blocks
  static constexpr bool kTurned = kWalks && !kEverything;  // masks come by TurnedMask, and not by MaskBlock
  static constexpr bool kFillsUp = kEverything || kDrops;  // takes head dims that have a narrower tile for less
  static constexpr int kKeys = kTile.keys, kQueries = kTile.queries, kStages = 2;
  static constexpr int kThreads = kTile.threads(), kMathThreads = 128 * kTile.warpgroups, kWarps = kMathThreads / kWarp;
  // What all warps take must be there: the block has what all threads were launched with, in eights, else they wait for good.
  static_assert(128 * (kTile.warpgroups * kTile.registers + kTile.loader_registers) +
                    (kThreads - 128 * (kTile.warpgroups + 1)) * kTile.others_registers <=
                65536 / (kThreads * kTile.blocks) / 8 * 8 * kThreads);
  static constexpr int kGroupKeys = 64;  // of a warpgroup
  static constexpr bool kLine = kTile.in_line(), kAlone = kTile.warpgroups == 1;
  static constexpr int boxes_of(int columns) { return (columns + kBoxColumns - 1) / kBoxColumns; }
  static constexpr int kBoxes = boxes_of(kWidth), kValueBoxes = boxes_of(kValueWidth), kQueryBoxes = kQueries / kBoxColumns;
  static constexpr int kQuerySteps = kQueries / 16, kKeySteps = kKeys / 16;
  static constexpr unsigned kRowBytes = kBoxColumns * sizeof(T);
  // The gradients of a block's queries are pieces of 64 x 64: one a warpgroup, side by side or one above the other; or all of
  // one's. Of the last there may be half.
  static constexpr bool kSideBySide = kQueries == 64;
  static constexpr int kPieces = kLine ? kBoxes : 1, kPiece = kAlone ? kWidth : kSumPieceSm90;
  static_assert(kSideBySide ? kLine || kBoxes == 2 : kQueries == 128 && kBoxes == 1);
  static_assert(kQueries % kRowBlock == 0 && (!kEverything || kQueries * 2 <= 128));
  static_assert(!kLine || (!kEverything && kSideBySide && kWidth % kBoxColumns == 0));
  static constexpr int kSummers = kLine ? 4 : kWarps;  // warps that sum gradients of queries
  // Gradients of queries leave through shared memory and the copy engine, where there is room for them.
  static constexpr bool kStaged = !kEverything && !kAlone;
  static_assert(!kStays || (kStaged && !kWalks && !kLine));
  static constexpr int kScoreBuffers = kAlone || (kLine && kWidth > 192) ? 1 : 2;  // of blocks
  static constexpr bool kLowAside = kTurned && kQueries == 128;  // boxes of a mask leave no room for lse's low part
  static constexpr int kRowsKept = kRowBlock * (kLowAside ? 2 : 3);

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
    alignas(16) float rows[kStages][kQueries / kRowBlock][kRowsKept];
    Place place[kStays ? 2 : 1];
    Job job[4];  // of the block at hand, the next, and the two before, whose gradients of queries are still on their way
    int sent, number;  // load_places: blocks so far, and places
    uint64_t key_full, value_full, keys_empty, query_full[kStages], grad_out_full[kStages], empty[kStages], scores_full[2],
        turn[2], added[2], scores_empty[2], grad_out_empty[kStages], weights_full, weights_empty;
    uint64_t mask_full, mask_empty, drawn_full[kStages];
  };
  // Behind that: a MaskBlock; or a mask's boxes, or its bits, and then dropout's.
  static constexpr int kMaskAlignment = kTurned ? kBoxAlignment : kVectorBytes;
  static constexpr int kMaskOffset = (sizeof(Shared) + kMaskAlignment - 1) / kMaskAlignment * kMaskAlignment;
  struct MaskBox {
    T value[kQueries][kBoxColumns];
  };
  struct WeightBits {  // as in TurnedBits
    unsigned word[kQueries / kRowBlock][kWarps][kWarp];
  };
  static_assert(!kTurned ||
                sizeof(WeightBits) == kQueries / kMapBlock * (kKeys / kMapBlock) * sizeof(unsigned) * TurnedBits::kWords);
  static_assert(!kTurned || kDrops || kAlone || kMaskOffset + 2 * sizeof(MaskBox) <= 227 << 10);
  static int shared_bytes(const AttentionProblem& problem, TurnedMask turned) {
    if (kTurned)
      return kMaskOffset + static_cast<int>((turned == TurnedMask::kBoxes ? 2 * sizeof(MaskBox) : 0) +
                                            (turned == TurnedMask::kBits ? kStages * sizeof(WeightBits) : 0) +
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
    return shown_bits(shared, stage + (a.turned_mask == TurnedMask::kBits ? kStages : 0));
  }

  template <int kColumns>
  using Sums = Accumulator<1, kColumns / 8>;
  using ScoreSums = Accumulator<1, kQueries / 8>;
  using Mask = MaskBlock<kQueries, kKeys, kMathThreads>;
  using OutTile = SharedTile<T, kWidth>;
  static_assert(OutTile::bytes(kKeys) <= static_cast<int>((kLine ? 1 : kStages) * sizeof(Stage)));

  static constexpr int kAllMath = 1, kTurn = 2;  // named barriers; kTurn + warpgroup

  // Gradients of keys that no sequence owns. Mostly there are none, which all threads find out together.
  __device__ static void clear_unowned(const BackwardSm90Arguments& a) {
    const AttentionProblem& problem = a.problem;
    const int64_t heads = a.list.heads, count = heads * (problem.batch + 1), step = gridDim.x;
    const auto rows_of = [&](int64_t n) {
      return unowned_rows(problem.key_starts, problem.batch, n / heads, problem.keys, problem.total_keys);
    };
    for (int64_t first = blockIdx.x; first < count; first += step * kThreads) {
      const int64_t mine = first + threadIdx.x * step;
      if (!__syncthreads_or(mine < count && rows_of(mine).count > 0)) continue;
      for (int64_t n = first; n < min(count, first + step * kThreads); n += step) {
        const Rows rows = rows_of(n);
        clear_rows<T, kThreads>(a.gradients.grad_key, n % heads, problem.width, rows);
        clear_rows<T, kThreads>(a.gradients.grad_value, n % heads, problem.value_width, rows);
      }
    }
  }

  // Columns that only the tile has are nobody's.
  __device__ static int sum_width(const BackwardSpace& space) { return kFillsUp ? static_cast<int>(space.width) : kWidth; }

  // ---- which blocks of queries there are

  // Of a head, those that the mask shows some of the block's keys to. A whole warp asks.
  class Walk {
   public:
    __device__ Walk(const BackwardSm90Arguments& a, const Place& place, int head)
        : next_(place.begin), end_(place.end), known_end_(place.begin), masked_(a.problem.mask.data) {
      const BlockMap& map = a.space.map;
      if (!map.data) return;
      kinds_ = map.row(place.batch, head, 0);
      row_step_ = map.size[2] == 1 ? 0 : static_cast<int>(map.size[3]);
      rows_ = (place.queries + kMapBlock - 1) / kMapBlock;
      first_column_ = map.size[3] == 1 ? 0 : place.key / kMapBlock;
      second_ = kAlone || place.key + kGroupKeys >= place.keys ? -1 : map.size[3] == 1 ? 0 : 1;
    }
    // The number of the next block, the end of all if there is none; its Job::sides.
    __device__ __forceinline__ int next(int& sides) {
      if (!kinds_) {
        sides = kAllSee | (masked_ ? kAnyAsks : 0);
        return next_ < end_ ? next_++ : end_;
      }
      while (next_ < end_) {
        if (next_ >= known_end_) look_ahead();
        const unsigned left = (seen_[0] | seen_[1]) >> (kWarp - (known_end_ - next_));
        next_ = left ? next_ + __ffs(left) - 1 : known_end_;
        if (next_ < known_end_) {
          const int bit = kWarp - (known_end_ - next_);
          sides = 0;
#pragma unroll
          for (int group = 0; group < 2; ++group)
            sides |= ((seen_[group] >> bit & 1) * kSees | (asked_[group] >> bit & 1) * kAsks) << group;
          return next_++;
        }
      }
      return end_;
    }

   private:
    // Of 32 blocks, one a lane.
    __device__ void look_ahead() {
      const int block = next_ + static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        bool seen = false, all = true;
        if (block < end_ && (group == 0 || second_ >= 0))
          for (int row = block * (kQueries / kMapBlock); row < min((block + 1) * (kQueries / kMapBlock), rows_); ++row) {
            const auto kind =
                static_cast<MaskKind>(kinds_[int64_t{row} * row_step_ + first_column_ + (group == 0 ? 0 : second_)]);
            seen |= kind != MaskKind::kHidden;
            all &= kind == MaskKind::kNothing;
          }
        seen_[group] = __ballot_sync(~0u, seen);
        asked_[group] = __ballot_sync(~0u, seen && !all);
      }
      known_end_ = next_ + kWarp;
    }

    const uint8_t* kinds_ = nullptr;  // null: no map
    int row_step_ = 0, rows_ = 0, first_column_ = 0, second_ = 0;  // the second warpgroup's column behind the first's; -1: none
    int next_, end_, known_end_;
    bool masked_;
    unsigned seen_[2] = {}, asked_[2] = {};  // bit n: block known_end_ - 32 + n
  };

  // A mask may show one half of a block's keys alone to many a block of queries: then blocks of threads that own 64 keys, two a
  // multiprocessor, make what one that owns 128 leaves. Both ask the map, so that one of them returns at once.
  static constexpr bool kMayHalve = kAlone || (kWith == BackwardSm90With::kMasks && kQueries == 64);
  __device__ static bool by_halves(const BackwardSm90Arguments& a, int64_t batch, int first_head, int heads_of_unit, int key) {
    constexpr int kOneForBoth = 4;  // what a block costs in either way, roughly
    constexpr int kAtOnce = 4;  // loads under way: the time of one is most of what it takes to return
    const BlockMap& map = a.space.map;
    const int rows = static_cast<int>(map.size[2]), columns = static_cast<int>(map.size[3]),
              heads = map.size[1] == 1 ? 1 : heads_of_unit, column = key / kMapBlock / 2 * 2;
    int one = 0, both = 0;
    for (int head = first_head; head < first_head + heads; ++head) {
      const uint8_t* const kinds = map.row(batch, head, 0) + column;
      for (int first = 0; first < rows; first += kAtOnce * kWarp) {
        bool seen[kAtOnce][2];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const int row = first + i * kWarp + static_cast<int>(threadIdx.x) % kWarp;
            seen[i][n] = row < rows && column + n < columns &&
                         static_cast<MaskKind>(__ldg(kinds + int64_t{row} * columns + n)) != MaskKind::kHidden;
          }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const unsigned left = __ballot_sync(~0u, seen[i][0]), right = __ballot_sync(~0u, seen[i][1]);
          one += __popc(left ^ right);
          both += __popc(left & right);
        }
      }
    }
    return kOneForBoth * one > both;
  }

  // Calls f(count, head, block, sides) for each block that passes by; returns how many. By a whole warp.
  template <class F>
  __device__ __forceinline__ static int for_each_block(const BackwardSm90Arguments& a, const Place& place, F&& f) {
    int count = 0;
    for (int head = place.first_head; head < place.first_head + place.heads; ++head) {
      Walk walk(a, place, head);
      int sides = 0;
      for (int block; (block = walk.next(sides)) < place.end; ++count) f(count, head, block, sides);
    }
    return count;
  }

  // ---- the loading warp

  // Whether the queries [query, query + kQueries) see all of the block's keys by arithmetic, and all of both exist.
  __device__ static bool all_see_all(const Place& place, int query) {
    const int position = query + place.offset;
    return query + kQueries <= place.queries && place.key + kKeys <= place.keys &&
           position + kQueries - 1 - place.left <= place.key && place.key + kKeys - 1 <= position + place.right;
  }

  // By one thread.
  template <int kCount>
  __device__ static void load_keys(Boxes<kCount, kKeys>& to, const HeadBoxes& from, const Place& place, uint64_t* full) {
    arrive_and_expect(full, sizeof(to));
#pragma unroll
    for (int box = 0; box < kCount; ++box)
      load_box(to.box[box], from.map, from.at(place.batch, place.first_head, place.first_key, box), full);
  }
  template <int kCount>
  __device__ static void load_queries(Boxes<kCount, kQueries>& to, const HeadBoxes& from, const Place& place, int head,
                                      int query, uint64_t* full) {
#pragma unroll
    for (int box = 0; box < kCount; ++box)
      load_box(to.box[box], from.map, from.at(place.batch, head, place.first_query + query, box), full);
  }

  // Where a block of kRowBlock of a head's queries has its numbers. One that does not exist is as good as the last that does:
  // its queries are hidden.
  __device__ __forceinline__ static const float* row_numbers(const BackwardSm90Arguments& a, const Place& place, int first_rows,
                                                             int row_block) {
    return a.space.rows + int64_t{first_rows + min(row_block, (place.queries - 1) / kRowBlock)} * kRowNumbers;
  }

  __device__ static void load_bits(const BackwardSm90Arguments& a, Shared& shared, int stage, int head, int query) {
    const Place& place = shared.place[0];
    const TurnedBits& bits = a.bits;
    const auto of = [&](int i, int64_t n) { return bits.size[i] == 1 ? int64_t{0} : min(n, bits.size[i] - 1); };
    const int64_t first = of(0, place.batch) * bits.size[1] + of(1, head);
#pragma unroll
    for (int n = 0; n < kQueries / kMapBlock; ++n)
#pragma unroll
      for (int group = 0; group < kKeys / kMapBlock; ++group)
        load_bytes(shown_bits(shared, stage).word[n][4 * group],
                   bits.data + ((first * bits.size[2] + of(2, query / kMapBlock + n)) * bits.size[3] +
                                of(3, place.key / kMapBlock + group)) *
                                   TurnedBits::kWords,
                   TurnedBits::kWords * sizeof(unsigned), &shared.query_full[stage]);
  }
  __device__ static void load_boxes(const BackwardSm90Arguments& a, Shared& shared, int count, int head, int query, int sides) {
    const Place& place = shared.place[0];
    wait(&shared.mask_empty, count % 2 ^ 1);
    arrive_and_expect(&shared.mask_full, __popc(sides & kAnyAsks) * sizeof(MaskBox));
#pragma unroll
    for (int group = 0; group < 2; ++group)
      if (sides & kAsks << group) {
        BoxPlace at = a.mask.at(place.batch, head, query, 0);
        at.column = place.key + group * kGroupKeys;
        load_box(mask_box(shared, group).value, a.mask.map, at, &shared.mask_full);
      }
  }

  // The block of that number, `count` others having gone before.
  __device__ static void send(const BackwardSm90Arguments& a, Shared& shared, const Place& place, int count, int head,
                              int block, int sides, bool last = false, bool third = false) {
    const int stage = count % 2, query = block * kQueries;
    wait(&shared.empty[stage], count / 2 % 2 ^ 1);
    const int first_rows = static_cast<int>(first_row_block(a.problem, a.space.list, place.batch, head));
    Job& job = shared.job[count % 4];
    job.head = head;
    job.query = query;
    job.whole = all_see_all(place, query);
    job.sums = (first_rows + int64_t{block} * (kQueries / kRowBlock)) * (kRowBlock * sum_width(a.space));
    if constexpr (kWalks) job.sides = sides;
    if constexpr (kStays) job.last = last, job.third = third;
    unsigned bytes = sizeof(Queries) + sizeof(shared.rows[stage]);
    if constexpr (kTurned) {
      if (a.problem.alibi_slopes)
        job.slope = a.added_scale *
                    static_cast<const float*>(
                        a.problem.alibi_slopes)[place.batch * a.problem.alibi_stride[0] + head * a.problem.alibi_stride[1]];
      if (a.turned_mask == TurnedMask::kBits && (sides & kAnyAsks)) bytes += sizeof(WeightBits);
    }
    arrive_and_expect(&shared.query_full[stage], bytes);
    load_queries(shared.stage[stage].query, a.query, place, head, query, &shared.query_full[stage]);
#pragma unroll
    for (int n = 0; n < kQueries / kRowBlock; ++n) {
      const float* const numbers = row_numbers(a, place, first_rows, query / kRowBlock + n);
      constexpr int kPieces = kLowAside ? 2 : 1;  // lse, and delta
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        load_bytes(&shared.rows[stage][n][piece * kRowBlock], numbers + piece * 2 * kRowBlock,
                   sizeof(shared.rows[stage][n]) / kPieces, &shared.query_full[stage]);
    }
    if constexpr (kTurned)
      if (a.turned_mask == TurnedMask::kBits && (sides & kAnyAsks)) load_bits(a, shared, stage, head, query);
    if (!kStays && count == 0) load_keys(shared.value, a.value, place, &shared.value_full);
    if constexpr (kLine) wait(&shared.grad_out_empty[stage], count / 2 % 2 ^ 1);
    arrive_and_expect(&shared.grad_out_full[stage], sizeof(OutGradients));
    load_queries(shared.stage[stage].grad_out, a.grad_out, place, head, query, &shared.grad_out_full[stage]);
    if constexpr (kTurned)
      if (a.turned_mask == TurnedMask::kBoxes) load_boxes(a, shared, count, head, query, sides);
  }

  __device__ static void load(const BackwardSm90Arguments& a, Shared& shared) {
    const Place& place = shared.place[0];
    const bool leads = threadIdx.x == 0;
    if (leads) load_keys(shared.key, a.key, place, &shared.key_full);
    int count = 0;
    if constexpr (kWalks) {
      count = for_each_block(a, place, [&](int n, int head, int block, int sides) {
        if (leads) send(a, shared, place, n, head, block, sides);
        __syncwarp();
      });
    } else if (leads) {
      for (int head = place.first_head; head < place.first_head + place.heads; ++head)
        for (int block = place.begin; block < place.end; ++block, ++count) send(a, shared, place, count, head, block, kAllSee);
    }
    if (leads) {
      wait(&shared.empty[count % 2], count / 2 % 2 ^ 1);
      shared.job[count % 4].query = -1;
      arrive(&shared.query_full[count % 2]);
    }
  }

  // Where kStays: places one after another, by the whole warp. The blocks of one take an even number of turns of the two
  // buffers, and two at least: what is missing passes by empty. So a place begins with the first buffer, and its end, for which
  // the other is needed once more, is over before the place after next is written.
  __device__ static void load_places(const BackwardSm90Arguments& a, Shared& shared) {
    // In shared memory, as is what else can be: this warp has few registers.
    int &count = shared.sent, &number = shared.number;
    if (threadIdx.x == 0) count = number = 0;
    while (true) {
      __syncwarp();
      const bool more = take_place(a, shared);
      if (threadIdx.x != 0) {
        if (!more) return;
        continue;
      }
      const Place& place = shared.place[number % 2];
      const int blocks = more ? blocks_of(place) : 0;
      int n = 0;
      do {
        if (n < blocks) {
          int head = place.first_head, block = place.begin;
          if (n > 0) {
            const Job& before = shared.job[(count - 1) % 4];
            head = before.head, block = before.query / kQueries + 1;
            if (block == place.end) block = place.begin, ++head;
          }
          send(a, shared, place, count++, head, block, kAllSee, n == blocks - 1, n >= 2);
        }
        if (n == 0) {
          wait(&shared.keys_empty, number % 2 ^ 1);
          if (!more) {
            arrive(&shared.key_full);
            return;
          }
          load_keys(shared.key, a.key, place, &shared.key_full);
          load_keys(shared.value, a.value, place, &shared.value_full);
        }
      } while (++n < blocks);
      for (n = blocks; n < 2 || n % 2 != 0; ++n, ++count) {
        wait(&shared.empty[count % 2], count / 2 % 2 ^ 1);
        arrive(&shared.query_full[count % 2]);
        arrive(&shared.grad_out_full[count % 2]);
      }
      ++number;
    }
  }

  // ---- warps that draw what dropout keeps

  // A lane has eight keys that share draws, for an eighth of a block's queries: the even or the odd ones of a place among the
  // four of wgmma.cuh.
  __device__ static void draw(const BackwardSm90Arguments& a, Shared& shared, int quarter) {
    const Place& place = shared.place[0];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, odd = lane / 16, upper = lane % 2;
    // The same in all lanes, in the compiler's eyes too: what follows from these alone is made once for a warp.
    const auto shared_by_lanes = [](auto x) { return __shfl_sync(~0u, x, 0); };
    const Philox random(shared_by_lanes(a.problem.rng[0]), shared_by_lanes(a.problem.rng[1]));
    const int64_t batch = a.problem.batch_begin + shared_by_lanes(place.batch);
    // A word that is kept carries when this is added to it: two instructions a weight.
    const uint32_t above = 0u - drop_threshold(a.problem.dropout);
#pragma unroll 1
    for (int count = 0;; ++count) {
      const int stage = count % 2;
      wait(&shared.query_full[stage],
           count / 2 % 2);  // nor does anyone read what was drawn for the block before in this buffer
      const int first = shared_by_lanes(shared.job[count % 4].query), head = shared_by_lanes(shared.job[count % 4].head);
      if (first < 0) return;
      const Philox::OfGroup group = random.of_group(batch, head, place.key / Philox::kKeys + lane % 16);
      unsigned kept[Philox::kKeys] = {};
#pragma unroll 2
      for (int j = 0; j < kQueries / 8; ++j) {
        uint32_t words[Philox::kKeys / 2];
        random.words(random.of_query(batch, head, first + 8 * j + 2 * quarter + odd), group, words);
        const auto push = [&](unsigned& to, uint32_t word) {
          const uint64_t bits = uint64_t{to} << 32;
          to = static_cast<unsigned>(((bits | word) + (bits | above)) >> 32);
        };
#pragma unroll
        for (int i = 0; i < 4; ++i) push(kept[i], words[i]), push(kept[4 + i], Philox::again(words[i]));
      }
      // A word has two keys that are eight apart, of neighbouring lanes, and both parities: of these lanes each writes two
      // words.
      unsigned four[4], two[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned other = __shfl_xor_sync(~0u, odd ? kept[i] : kept[4 + i], 16);
        four[i] = odd ? other | kept[4 + i] << 16 : kept[i] | other << 16;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned other = __shfl_xor_sync(~0u, upper ? four[i] : four[2 + i], 1);
        two[i] = upper ? other | four[2 + i] << 8 : four[i] | other << 8;
      }
      unsigned (&words)[kWarp] = kept_bits(a, shared, stage).word[0][lane % 16 / 2];
#pragma unroll
      for (int i = 0; i < 2; ++i) words[(4 * odd + 2 * upper + i) * 4 + quarter] = two[i];
      __syncwarp();
      if (lane == 0) arrive(&shared.drawn_full[stage]);
    }
  }

  // ---- the warp that waits for other blocks of threads, by one thread

  // A block of queries gets what its last keys add to its gradients first, and so on down. These keys' block of threads
  // precedes those that wait for it in the grid; under a causal mask it also reaches the queries sooner.
  __device__ static void keep_turns(const BackwardSm90Arguments& a, Shared& shared, const Place& place, int& count) {
    for (int head = place.first_head; head < place.first_head + place.heads; ++head) {
      int* turn = a.turns + first_row_block(a.problem, a.space.list, place.batch, head) + place.begin * (kQueries / kRowBlock);
      for (int block = place.begin; block < place.end; ++block, ++count, turn += kQueries / kRowBlock) {
        const int last_query = min((block + 1) * kQueries, place.queries) - 1,
                  keys = min(place.keys, last_query + place.offset + place.right + 1),
                  mine = (keys - 1) / kKeys - place.key / kKeys;
        while (read_turn(turn) != mine) continue;
        arrive(&shared.turn[count % 2]);
        wait(&shared.added[count % 2], count / 2 % 2);
        pass_turn(turn, mine + 1);
      }
    }
  }

  __device__ static void keep_turns_of_places(const BackwardSm90Arguments& a, Shared& shared) {
    int count = 0;
    for (int number = 0;; ++number) {
      wait(&shared.key_full, number % 2);
      const Place& place = shared.place[number % 2];
      if (place.begin < 0) return;
      const int first = count;
      keep_turns(a, shared, place, count);
      for (; count < first + 2 || count % 2 != 0; ++count) arrive(&shared.turn[count % 2]);
      arrive(&shared.keys_empty);
    }
  }

  // ---- a computing warpgroup

  struct Group {
    const BackwardSm90Arguments& a;
    Shared& shared;
    int thread;  // of those that compute
    int warp = 0;  // of those that compute: in all lanes the same, as far as the compiler knows
    int count = 0;  // of blocks so far
    int number = 0;  // of places before this one
    Sums<kWidth> grad_key;
    Sums<kValueWidth> grad_value;

    __device__ __forceinline__ const Place& place() const { return shared.place[kStays ? number % 2 : 0]; }

    // What follows from the thread's number is computed anew, which takes fewer registers than to keep it.
    __device__ __forceinline__ void place_anew() {
      forget(thread);
      warp = __shfl_sync(~0u, static_cast<unsigned>(thread) / kWarp, 0);
    }
    __device__ __forceinline__ int group() const { return warp / 4; }
    __device__ __forceinline__ int lane() const { return static_cast<unsigned>(thread) % kWarp; }
    __device__ __forceinline__ int score_row() const { return (kLine ? warp % 4 : warp) * 16; }
    __device__ __forceinline__ void release(uint64_t* barrier) {
      if (lane() == 0) arrive(barrier);
    }
    __device__ __forceinline__ const Job& job(int before = 0) const { return shared.job[(count - before) % 4]; }
    // The blocks take the two buffers in turn. What depends on which is a template, so that addresses are constants; kEither
    // counts, and is for code that would be too long twice.
    static constexpr int kEither = 2;
    template <int kBuffer>
    __device__ __forceinline__ int buffer() const {
      return kBuffer == kEither ? count % 2 : kBuffer;
    }
    __device__ __forceinline__ unsigned parity() const { return count / 2 % 2; }

    // Waits for the block that is `ahead` further on; false: there is none.
    template <int kBuffer>
    __device__ __forceinline__ bool fetch(int ahead = 0) {
      wait(&shared.query_full[kBuffer == kEither ? (count + ahead) % 2 : kBuffer], (count + ahead) / 2 % 2);
      return job(-ahead).query >= 0;
    }

    // Scores, or weights' gradients: [this warpgroup's keys][its queries]; added to what is there, or not. `shift` is 0, but
    // the compiler does not know it of a block that stands before the loop: or it keeps that one's addresses for the loop.
    template <int kColumns, bool kAdd = false, int kCount>
    __device__ __forceinline__ void start_scores(ScoreSums& d, const Boxes<kCount, kKeys>& left,
                                                 const Boxes<kCount, kQueries>& right, unsigned shift = 0) {
      int first = kLine ? 0 : group() * kGroupKeys;
      // Or ptxas keeps the keys' addresses of all steps from before the loop, and finds no uniform registers for others.
      if constexpr (kLine) forget(first);
      start_row_products<T, kColumns / 16, kKeys, kQueries, kAdd>(d, shared_address(left.box) + first * kRowBytes + shift,
                                                                  shared_address(right.box) + shift);
    }

    using QuerySums = float[kPiece / 2];
    // The block before's gradients of queries, or where a warpgroup is alone this one's: this warpgroup's piece of that number.
    __device__ __forceinline__ void start_queries(QuerySums& d, int before, int piece = 0) {
      if constexpr (!kLine && !kAlone) wait(&shared.scores_full[before], (count - 1) / 2 % 2);
      const uint64_t scores = rows_descriptor(shared_address(shared.scores[before].box[kSideBySide ? 0 : group()])),
                     keys = columns_descriptor(shared_address(shared.key.box[kLine         ? piece
                                                                             : kSideBySide ? group()
                                                                                           : 0]),
                                               kKeys * kRowBytes);
      if constexpr (kTurned && !kAlone) {
        const int sides = job(1).sides & kAllSee;
        if (sides != kAllSee) {  // the other warpgroup's keys alone, or this one's
          const unsigned first = (sides >> 1) * kGroupKeys * kRowBytes;
          begin_products();
#pragma unroll
          for (int step = 0; step < kKeySteps / 2; ++step)
            WarpgroupProduct<T, kPiece>::template shared_shared<true, true>(
                d, moved(scores, first + step * 16 * kRowBytes), moved(keys, first + step * 16 * kRowBytes), step > 0);
          commit_products();
          return;
        }
      }
      begin_products();
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step)
        WarpgroupProduct<T, kPiece>::template shared_shared<true, true>(d, moved(scores, step * 16 * kRowBytes),
                                                                        moved(keys, step * 16 * kRowBytes), step > 0);
      commit_products();
    }

    // Where the gradients of a block's queries go, from this lane's first on; null: they are nobody's.
    __device__ __forceinline__ float* sums_of(const Job& job) const {
      const int width = sum_width(a.space);
      constexpr int kBelow = kSideBySide ? 0 : kPiece / 16, kBeside = kSideBySide && !kLine ? kPiece / 8 : 0;
      const bool there = kSideBySide ? kLine || group() * kPiece < width : job.query + group() * kPiece < place().queries;
      const int first = ((group() * kBelow + warp % 4) * (width / 8) + group() * kBeside) * 128;
      return there ? a.space.sums + job.sums + first + place_in_sum(lane(), 0) : nullptr;
    }
    // How many tiles of 16 x 8 of its piece are somebody's.
    __device__ __forceinline__ int piece_tiles() const {
      return kEverything || kLine || kWidth % kPiece == 0 || group() == 0 ? kPiece / 8 : kWidth % kPiece / 8;
    }
    __device__ __forceinline__ void add_queries(float* to, const QuerySums& d, int before, int piece = 0) {
      if (a.turns) wait(&shared.turn[before], (count - 1) / 2 % 2);
      if (to) {
        const int tiles = piece_tiles();
#pragma unroll
        for (int j = 0; j < kPiece / 8; ++j)
          if (j < tiles) add_to_sum(to + (piece * (kPiece / 8) + j) * 128, reinterpret_cast<const float (&)[4]>(d[4 * j]));
      }
      if (a.turns && piece == kPieces - 1) {
        __syncwarp();
        release(&shared.added[before]);
      }
    }

    // What the warp has written into shared memory becomes readable for the engines.
    __device__ __forceinline__ void publish() {
      publish_to_engines();
      __syncwarp();
    }
    // The same as add_queries by the copy engine, by way of shared memory: put there, published, and sent.
    __device__ __forceinline__ void stage_queries(const QuerySums& d) {
      if (lane() == 0) wait_for_store_reads();
      __syncwarp();
      float4* const to = reinterpret_cast<float4*>(shared.sums[kLine ? warp % 4 : warp]) + lane();
#pragma unroll
      for (int j = 0; j < kPiece / 8; ++j) to[j * kWarp] = make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
    }
    __device__ __forceinline__ void send_queries(float* to, int piece = 0) {
      if (to && lane() == 0) {
        add_floats(to + piece * (kPiece / 8) * 128, shared.sums[kLine ? warp % 4 : warp],
                   piece_tiles() * 128 * static_cast<int>(sizeof(float)));
        commit_stores();
      }
    }

    // A pair's two numbers of kind 0 (lse), 1 (lse, low part) or 2 (delta), of the queries 8 j + 2 place and the next.
    template <int kBuffer>
    __device__ __forceinline__ float2 numbers(int kind, int j) const {
      const int at = 8 * j % kRowBlock + lane() % 4 * 2;
      if constexpr (kLowAside) {
        if (kind == 1) return *reinterpret_cast<const float2*>(&shared.sums[warp][8 * j + lane() % 4 * 2]);
        kind /= 2;
      }
      return *reinterpret_cast<const float2*>(&shared.rows[buffer<kBuffer>()][8 * j / kRowBlock][kind * kRowBlock + at]);
    }

    // Where shared memory has no room for lse's low parts, which hardly ever count: into what gradients of queries leave by.
    __device__ __forceinline__ void bring_low() {
      if (lane() == 0) wait_for_store_reads();
      __syncwarp();
      const Job& job = this->job();
      const int n = 4 * lane() / kRowBlock, last = (place().queries - 1) / kRowBlock - job.query / kRowBlock;
      const int64_t row_block = job.sums / (kRowBlock * kWidth) + min(n, last);  // as in row_numbers
      reinterpret_cast<float4*>(shared.sums[warp])[lane()] =
          reinterpret_cast<const float4*>(a.space.rows + row_block * kRowNumbers + kRowBlock)[lane() % (kRowBlock / 4)];
      __syncwarp();
    }

    // In packed tensors, what follows a sequence is another's: rows from `from` on become zeros. All threads that compute.
    template <int kCount, int kRows>
    __device__ __forceinline__ void clear_tail(T (&box)[kCount][kRows][kBoxColumns], int from) {
      constexpr int kAcross = kRowBytes / kVectorBytes;
      for (int n = thread; n < kCount * (kRows - from) * kAcross; n += kMathThreads) {
        const int row = n / kAcross % (kRows - from) + from;
        reinterpret_cast<uint4*>(box[n / kAcross / (kRows - from)][row])[n % kAcross] = {0, 0, 0, 0};
      }
    }
    __device__ __forceinline__ void publish_tail() {
      publish_to_engines();
      sync_named(kAllMath, kMathThreads);
    }

    __device__ __forceinline__ static unsigned pair(float x, float y) { return Fragments<T>::pair(x, y); }
    using Words = unsigned[kQueries / 16][4];  // of 16-bit pairs: a left operand

    __device__ __forceinline__ void clear_key_tail() {
      const Place& place = this->place();
      if (a.problem.query_starts && place.key + kKeys > place.keys) {
        wait(&shared.key_full, number % 2);
        wait(&shared.value_full, number % 2);
        clear_tail(shared.key.box, place.keys - place.key);
        clear_tail(shared.value.box, place.keys - place.key);
        publish_tail();
      }
    }
    template <int kBuffer>
    __device__ __forceinline__ void clear_query_tail() {
      const Place& place = this->place();
      const int now = buffer<kBuffer>(), query = job().query;
      if (a.problem.query_starts && query + kQueries > place.queries) {
        wait(&shared.grad_out_full[now], parity());
        clear_tail(shared.stage[now].query.box, place.queries - query);
        clear_tail(shared.stage[now].grad_out.box, place.queries - query);
        publish_tail();
      }
    }

    // What hide_scores<true> does, in few registers.
    __device__ __forceinline__ void hide(ScoreSums& score, int query) const {
      const Place& place = this->place();
      const int first = query + lane() % 4 * 2, left_over = place.queries - first;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = place.key + score_row() + 8 * half + lane() / 4, at = key - place.offset - first;
        const int begin = at - place.right, end = key < place.keys ? min(at + place.left + 1, left_over) : -kQueries;
#pragma unroll
        for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = score[0][j][2 * half + e];
            x = 8 * j + e >= begin && 8 * j + e < end ? x : lowest<float>();
          }
      }
    }

    template <int kBuffer>
    __device__ __forceinline__ void subtract_delta(ScoreSums& d) const {
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float2 delta = numbers<kBuffer>(2, j);
        d[0][j][0] -= delta.x, d[0][j][1] -= delta.y;
        d[0][j][2] -= delta.x, d[0][j][3] -= delta.y;
      }
    }

    // The end: gradients of this warpgroup's keys and values.
    __device__ __forceinline__ void store_keys() {
      settle(flat(grad_key));
      store(grad_key, static_cast<float>(a.problem.scale), a.gradients.grad_key, a.problem.width);
    }
    __device__ __forceinline__ void store_values() {
      settle(flat(grad_value));
      store(grad_value, kEverything ? a.keep_scale : 1.0f, a.gradients.grad_value, a.problem.value_width);
    }
    __device__ __forceinline__ void store_sums() {
      settle(flat(grad_key));
      settle(flat(grad_value));
      if constexpr (!kStays) sync_named(kAllMath, kMathThreads);  // all have done with the queries in shared memory
      store_keys();
      store_values();
    }

    template <int kCount>
    __device__ __forceinline__ void store(Accumulator<1, kCount>& d, float scale, const MutableView4& view, int64_t width) {
      const Place& place = this->place();
      const int left = place.last_key - place.key, columns = static_cast<int>(width);
      T* const to = static_cast<T*>(view.data) + place.batch * view.stride[0] + place.unit * view.stride[1] +
                    place.first_key * view.stride[2];
      if constexpr (kStays) {  // the next place's queries arrive in shared memory
        store_rows(d, scale, score_row(), to, view.stride[2], view.stride[3], left, columns, lane());
      } else {
#pragma unroll
        for (float& x : flat(d)) x *= scale;
        store_rows<T>(d, OutTile{reinterpret_cast<T*>(&shared.stage[kLine ? group() : 0])}, 0, score_row(), to, view.stride[2],
                      view.stride[3], left, columns);
      }
    }

    // ---- with keys of its own

    // Sums over a block's queries: [this warpgroup's keys][columns]. `shift` is as that of start_scores.
    template <int kColumns, int kCount>
    __device__ __forceinline__ void start_sums(Sums<kColumns>& d, const Words& left, const Boxes<kCount, kQueries>& right,
                                               unsigned shift = 0) {
      // In a kernel of four warpgroups ptxas has no registers for one of 256 columns.
      constexpr int kParts = kColumns > 192 ? 2 : 1, kPart = kColumns / kParts;
      begin_products();
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint64_t columns =
            columns_descriptor(shared_address(right.box[part * (kPart / kBoxColumns)]) + shift, kQueries * kRowBytes);
#pragma unroll
        for (int step = 0; step < kQuerySteps; ++step)
          WarpgroupProduct<T, kPart>::template registers_shared<true>(
              reinterpret_cast<float (&)[kPart / 2]>(d[0][part * (kPart / 8)]), left[step],
              moved(columns, step * 16 * kRowBytes), true);
      }
      commit_products();
    }

    __device__ __forceinline__ void put(Scores& to, const Words& words) {
      const int r = score_row() + lane() % 16;
#pragma unroll
      for (int t = 0; t < kQueries / 16; ++t)
        store_matrices(words[t], shared_address(to.box[t / 4][r]) +
                                     ((t % 4 * 2 + lane() / 16) ^ (lane() % 8)) * static_cast<int>(kVectorBytes));
    }

    // What a block needs of its rows, read while the one before is at its end: shared memory answers late once it feeds the
    // products.
    struct Ahead {
      static constexpr int kHighs = kTile.lse_ahead ? kQueries / 8 : 1;
      bool whole, last, third, low;  // of Job; whether lse's low parts count
      int sides;  // Job::sides
      float2 high[kHighs];
    };
    template <int kBuffer>
    __device__ __forceinline__ void look_ahead(Ahead& ahead, const Job& job) const {
      // Below it the float nearest to lse is off by 2^-17 at most: 16 times less than weights are rounded by.
      constexpr float kLarge = 256;
      ahead.whole = job.whole;
      if constexpr (kStays) ahead.last = job.last, ahead.third = job.third;
      if constexpr (kTurned) ahead.sides = job.sides;
      bool low = false;
#pragma unroll
      for (int n = 0; n < kQueries / kRowBlock; ++n) {
        const float2 x = *reinterpret_cast<const float2*>(&shared.rows[kBuffer][n][2 * lane()]);
        const auto large = [](float y) { return fabsf(y) >= kLarge && y < -lowest<float>(); };
        low = low || large(x.x) || large(x.y);
      }
      ahead.low = __any_sync(~0u, low);
      if constexpr (kTile.lse_ahead)
#pragma unroll
        for (int j = 0; j < Ahead::kHighs; ++j) ahead.high[j] = numbers<kBuffer>(0, j);
    }

    // A block's scores into its weights.
    template <int kBuffer>
    __device__ __forceinline__ void weigh(ScoreSums& score, const Ahead& ahead, Words& weight) {
      const auto with = [&]<bool kLow>(std::bool_constant<kLow>) {
#pragma unroll
        for (int j = 0; j < kQueries / 8; ++j) {
          float2 high = kTile.lse_ahead ? ahead.high[j % Ahead::kHighs] : numbers<kBuffer>(0, j);
          const float2 low = kLow ? numbers<kBuffer>(1, j) : make_float2(0, 0);
          if constexpr (kDrops) high.x -= a.keep_exponent, high.y -= a.keep_exponent;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& x = score[0][j][e];
            x = FastBinary::exp(fmaf(x, a.rule.scale, e % 2 ? -high.y : -high.x) - (e % 2 ? low.y : low.x));
          }
#pragma unroll
          for (int half = 0; half < 2; ++half)
            weight[j / 2][j % 2 * 2 + half] = pair(score[0][j][2 * half], score[0][j][2 * half + 1]);
        }
      };
      if (ahead.low) {
        if constexpr (kLowAside) bring_low();
        with(std::true_type{});
      } else {
        with(std::false_type{});
      }
    }

    // What a block's gradients of weights are added to: -delta.
    template <int kBuffer>
    __device__ __forceinline__ void begin_gradients(ScoreSums& grad) {
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float2 delta = numbers<kBuffer>(2, j);
        grad[0][j][0] = grad[0][j][2] = -delta.x;
        grad[0][j][1] = grad[0][j][3] = -delta.y;
      }
      settle(flat(grad));
    }
    __device__ __forceinline__ void take_turn() {
      if constexpr (kTile.in_turn) sync_named(kTurn + group(), kMathThreads);
    }
    __device__ __forceinline__ void pass_turn() {
      if constexpr (kTile.in_turn) arrive_named(kTurn + (group() ^ 1), kMathThreads);
    }

    // What ALiBi and a mask of 16 bits add to the scores.
    __device__ __forceinline__ void add(ScoreSums& score, const Ahead& ahead) {
      if (a.problem.alibi_slopes) {
        const Job& job = this->job();
        const Place& place = this->place();
        const float distance =
            static_cast<float>(job.query + lane() % 4 * 2 + place.offset - place.key - score_row() - lane() / 4);
        const float slope = job.slope;
#pragma unroll
        for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& x = score[0][j][e];
            x = fmaf(-slope, fabsf(distance + static_cast<float>(8 * j + e % 2 - e / 2 * 8)), x);
          }
      }
      if constexpr (!kDrops) {
        if (a.turned_mask == TurnedMask::kBoxes) {
          wait(&shared.mask_full, count % 2);
          if (ahead.sides & kAsks << group()) {
            const int row = lane() % 16;
            const unsigned base = shared_address(mask_box(shared, group()).value[row]) +
                                  ((warp % 4 * 2 + lane() / 16) ^ (row % 8)) * static_cast<int>(kVectorBytes);
#pragma unroll
            for (int t = 0; t < kQueries / 16; ++t) {
              unsigned words[4];
              load_matrices_transposed(words, base + t * 16 * kRowBytes);
#pragma unroll
              for (int n = 0; n < 4; ++n) {
                float* const x = &score[0][2 * t + n % 2][n / 2 * 2];
                const float2 values = unpair<T>(words[n]);
                x[0] = fmaf(values.x, a.added_scale, x[0]);
                x[1] = fmaf(values.y, a.added_scale, x[1]);
              }
            }
          }
          settle(flat(score));  // the values have been read before the arrival says so
          release(&shared.mask_empty);
        }
      }
    }
    // Clears the weights of which `bits`, as in TurnedBits, has none.
    __device__ __forceinline__ static void keep(Words& to, const Words& from, const unsigned (&bits)[kQueries / kRowBlock]) {
#pragma unroll
      for (int t = 0; t < kQueries / 16; ++t)
#pragma unroll
        for (int n = 0; n < 4; ++n)
          to[t][n] = from[t][n] & signs_of_halves(bits[t / 4] << TurnedBits::place(t % 4 * 2 + n / 2, n % 2));
    }

    // A block of which this warpgroup sees nothing: it makes the block before's gradients of queries all the same.
    template <bool kFirst, int kNow>
    __device__ __forceinline__ bool skip_block(Ahead& ahead) {
      constexpr int kOther = kNow ^ 1;
      place_anew();
      if constexpr (kFirst) {
        wait(&shared.value_full, 0);
      } else {
        QuerySums query;
        start_queries(query, kOther);
        if constexpr (kTile.sends_late)
          if (count > 1) {
            publish();
            send_queries(sums_of(job(2)));
          }
        wait_for_products<0>();
        settle(query);
        release(&shared.scores_empty[kOther]);
        stage_queries(query);
        if constexpr (!kTile.sends_late) {
          publish();
          send_queries(sums_of(job(1)));
        }
      }
      release(&shared.scores_full[kNow]);
      if (a.turned_mask == TurnedMask::kBoxes) {
        wait(&shared.mask_full, count % 2);
        release(&shared.mask_empty);
      }
      const bool more = fetch<kOther>(1);
      if (more) look_ahead<kOther>(ahead, job(-1));
      __syncwarp();
      release(&shared.empty[kNow]);
      ++count;
      return more;
    }

    // A block; false: it was the last. The block before's gradients of queries are made amid it.
    template <bool kFirst, int kNow>
    __device__ __forceinline__ bool own_block(Ahead& ahead) {
      constexpr int kOther = kNow ^ 1;
      clear_query_tail<kNow>();
      int shift = 0;
      if constexpr (kFirst) forget(shift);
      Stage& stage = shared.stage[kNow];
      ScoreSums score, grad;
      if constexpr (!kDrops) begin_gradients<kNow>(grad);
      take_turn();
      start_scores<kWidth>(score, shared.key, stage.query, shift);
      if constexpr (kFirst) wait(&shared.value_full, number % 2);
      if constexpr (!kFirst && kTile.sends_late)
        if ((kStays ? ahead.third : count > 1) && !a.turns) {
          publish();
          send_queries(sums_of(job(2)));
        }
      wait(&shared.grad_out_full[kNow], parity());
      start_scores<kValueWidth, !kDrops>(grad, shared.value, stage.grad_out, shift);
      pass_turn();
      unsigned shown[kQueries / kRowBlock] = {};
      const bool hides = kTurned && a.turned_mask == TurnedMask::kBits && (ahead.sides & kAsks << group());
      if constexpr (kTurned)
        if (hides)
#pragma unroll
          for (int n = 0; n < kQueries / kRowBlock; ++n) shown[n] = shown_bits(shared, kNow).word[n][warp][lane()];
      wait_for_products<1>();
      settle(flat(score));
      if constexpr (kTurned) add(score, ahead);
      if (!ahead.whole) hide(score, job().query);

      Words weight;
      weigh<kNow>(score, ahead, weight);
      if constexpr (kTurned)
        if (hides) keep(weight, weight, shown);
      settle(weight);
      Words kept;
      if constexpr (kDrops) {
        wait(&shared.drawn_full[kNow], parity());
        const unsigned drawn[1] = {kept_bits(a, shared, kNow).word[0][warp][lane()]};
        keep(kept, weight, drawn);
        settle(kept);
      }
      start_sums<kValueWidth>(grad_value, kDrops ? kept : weight, stage.grad_out, shift);
      QuerySums query;
      if constexpr (!kFirst && !kDrops && !kAlone) start_queries(query, kOther);
      wait_for_products<kFirst || kDrops || kAlone ? 1 : 2>();
      settle(flat(grad));
      // Of the weights as they were rounded for the products: the scores' registers are others' by now.
      Words grad_score;
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        float2 delta;
        if constexpr (kDrops) {
          delta = numbers<kNow>(2, j);
          delta.x *= a.keep, delta.y *= a.keep;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int t = j / 2, n = j % 2 * 2 + half;
          const float2 x = unpair<T>(weight[t][n]);
          if constexpr (kDrops) {
            const float2 y = unpair<T>(kept[t][n]);
            grad_score[t][n] =
                pair(fmaf(y.x, grad[0][j][2 * half], -x.x * delta.x), fmaf(y.y, grad[0][j][2 * half + 1], -x.y * delta.y));
          } else {
            grad_score[t][n] = pair(x.x * grad[0][j][2 * half], x.y * grad[0][j][2 * half + 1]);
          }
        }
      }
      place_anew();
      if constexpr (kAlone) {
        settle(grad_score);
        wait_for_products<0>();
        sync_named(kAllMath, kMathThreads);  // all have made their gradients of the block before's queries
        put(shared.scores[0], grad_score);
        publish_to_engines();
        sync_named(kAllMath, kMathThreads);
        start_sums<kWidth>(grad_key, grad_score, stage.query, shift);
        float* const sums = sums_of(job());
        wait_for_products<0>();  // what it takes leaves no registers for dQ
        release(&shared.empty[kNow]);
        start_queries(query, 0);
        const bool more = fetch<kOther>(1);
        if (more) look_ahead<kOther>(ahead, job(-1));
        wait_for_products<0>();
        settle(query);
        add_queries(sums, query, kNow);
        ++count;
        return more;
      }
      if constexpr (!kFirst && kDrops) {
        settle(grad_score);
        wait_for_products<0>();  // dV's: what its left operand takes leaves no registers for dQ
        start_queries(query, kOther);
      }
      wait(&shared.scores_empty[kNow], parity() ^ 1);
      put(shared.scores[kNow], grad_score);
      start_sums<kWidth>(grad_key, grad_score, stage.query, shift);

      const auto finish_queries = [&] {
        if constexpr (!kFirst) {
          wait_for_products<1>();
          settle(query);
          release(&shared.scores_empty[kOther]);
          if (a.turns)
            add_queries(sums_of(job(1)), query, kOther);
          else
            stage_queries(query);
        }
      };
      if constexpr (!kTile.sends_late) finish_queries();
      publish();
      release(&shared.scores_full[kNow]);
      if constexpr (!kFirst && !kTile.sends_late)
        if (!a.turns) send_queries(sums_of(job(1)));
      const bool more = kStays ? !ahead.last : fetch<kOther>(1);
      if (more) {
        if constexpr (kStays) wait(&shared.query_full[kOther], (count + 1) / 2 % 2);
        look_ahead<kOther>(ahead, job(-1));
      }
      if constexpr (kTile.sends_late) finish_queries();
      wait_for_products<0>();
      // The second buffer also says that the place's end is over.
      if (!kStays || kNow == 0 || more) release(&shared.empty[kNow]);
      ++count;
      return more;
    }

    template <bool kFirst, int kNow>
    __device__ __forceinline__ bool own_step(Ahead& ahead) {
      if constexpr (kTurned && !kAlone)
        if (!(ahead.sides & kSees << group())) return skip_block<kFirst, kNow>(ahead);
      return own_block<kFirst, kNow>(ahead);
    }

    // A place's blocks, of which there is one.
    __device__ __forceinline__ void own_blocks() {
      clear_key_tail();
      Ahead ahead;
      look_ahead<0>(ahead, job());
      if (own_step<true, 0>(ahead))
        while (own_step<false, 1>(ahead) && own_step<false, 0>(ahead)) continue;
      if constexpr (kAlone) return;
      place_anew();
      QuerySums query;
      start_queries(query, (count - 1) % 2);
      if (kTile.sends_late && (kStays ? blocks_of(place()) : count) > 1 && !a.turns) {
        publish();
        send_queries(sums_of(job(2)));
      }
      wait_for_products<0>();
      settle(query);
      if constexpr (kStays) {
        release(&shared.scores_empty[(count - 1) % 2]);
        release(&shared.keys_empty);
      }
      if (a.turns) {
        add_queries(sums_of(job(1)), query, (count - 1) % 2);
      } else {
        stage_queries(query);
        publish();
        send_queries(sums_of(job(1)));
      }
    }

    __device__ __forceinline__ void own_place() {
      place_anew();
      clear(grad_key);
      clear(grad_value);
      if (blocks_of(place()) > 0) {
        wait(&shared.query_full[0], parity());
        own_blocks();
      } else {
        wait(&shared.value_full, number % 2);  // or the next place's values were asked for while these are on their way
        release(&shared.keys_empty);
      }
      for (int n = blocks_of(place()); n < 2 || n % 2 != 0; ++n, ++count) {  // what passes by empty
        const int buffer = count % 2;
        wait(&shared.query_full[buffer], parity());  // until all are done with the place before: arrivals for both would mix
        release(&shared.scores_full[buffer]);
        release(&shared.scores_empty[buffer]);
        if (a.turns) release(&shared.added[buffer]);
        if (buffer == 0) release(&shared.empty[0]);
      }
      place_anew();
      store_sums();
      release(&shared.empty[1]);
    }

    __device__ __forceinline__ void run_own() {
      place_anew();
      if (group() == 1) pass_turn();
      if constexpr (kStays) {
#pragma unroll 1
        for (;; ++number) {
          wait(&shared.key_full, number % 2);
          if (place().begin < 0) break;
          own_place();
        }
      } else {
        clear(grad_key);
        clear(grad_value);
        wait(&shared.key_full, 0);
        if (fetch<0>()) own_blocks();
        store_sums();
      }
      if (lane() == 0) wait_for_store_reads();
    }

    // ---- with keys of its own and everything, which takes registers from what could be in flight

    // The block at hand's weights; the block before's gradients of queries meanwhile, and the gradients of the weights, less
    // delta.
    template <bool kFirst>
    __device__ __forceinline__ void weigh(ScoreSums& score, ScoreSums& grad, Words& weight) {
      const AttentionProblem& problem = a.problem;
      const Place& place = this->place();
      const int now = count % 2;
      const Job& job = this->job();
      Stage& stage = shared.stage[now];
      const auto here = [&] { return ScoreBlock{job.query, place.key, place.queries, place.keys, job.whole}; };
      clear_query_tail<kEither>();
      // In registers that `grad` has.
      QuerySums& grad_query = reinterpret_cast<QuerySums&>(grad);
      start_scores<kWidth>(score, shared.key, stage.query);
      const bool whole = job.whole;
      if constexpr (!kFirst) {
        start_queries(grad_query, now ^ 1);
        float* const sums = sums_of(this->job(1));
        wait_for_products<1>();
        release(&shared.empty[now ^ 1]);
        settle(flat(score));
        wait_for_products<0>();
        settle(grad_query);
        add_queries(sums, grad_query, now ^ 1);
      } else {
        wait_for_products<0>();
        settle(flat(score));
        wait(&shared.value_full, 0);
      }
      wait(&shared.grad_out_full[now], parity());
      start_scores<kValueWidth>(grad, shared.value, stage.grad_out);
      const HeadMask mask(problem, place.batch, job.head);
      const bool masked = mask.data && job.sides != kAllSee;
      Mask mask_block(reinterpret_cast<char*>(&shared) + kMaskOffset, thread);
      if (masked) {
        mask_block.load(mask, job.query, place.queries, place.key, place.keys);
        commit_copies();
        wait_for_copies();
        sync_named(kAllMath, kMathThreads);
      }
      wait_for_products<0>();
      settle(flat(grad));
      const Dropout dropout(problem, place.batch, job.head);
      unsigned dropped = 0;  // a bit for each weight
      if (dropout) {
#pragma unroll
        for (int j = 0; j < kQueries / 8; j += 2)
          dropped |= (kept_weights<true>(score_row(), 8 * j, dropout, here()) ^ 0xff) << (4 * j);
#pragma unroll
        for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) grad[0][j][e] = dropped >> (4 * j + e) & 1 ? 0 : grad[0][j][e] * a.keep_scale;
      }
      place_anew();
      subtract_delta<kEither>(grad);
      const ScoreRule rule = a.rule.of_head(problem, place.batch, job.head);
      if (rule.bends) bend_scores<true>(score, score_row(), rule, here(), place.visible, &grad);
      if (masked) mask_scores<true>(score, score_row(), mask.dtype, mask_block);
      if (!whole) hide(score, job.query);
      const bool bends = a.rule.bends;
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float2 high = numbers<kEither>(0, j), low = numbers<kEither>(1, j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = score[0][j][e];
          const float h = e % 2 ? high.y : high.x, l = e % 2 ? low.y : low.x;
          x = FastBinary::exp((bends ? x - h : fmaf(x, a.rule.scale, -h)) - l);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto kept = [&](int e) { return dropped >> (4 * j + e) & 1 ? 0.0f : score[0][j][e]; };
          weight[j / 2][j % 2 * 2 + half] = pair(kept(2 * half), kept(2 * half + 1));
        }
      }
      settle(weight);
    }

    // What the weights add to the gradients of values, and of keys; the scores' gradients for those of queries.
    __device__ __forceinline__ void spread(ScoreSums& score, ScoreSums& grad, const Words& weight) {
      place_anew();
      const int now = count % 2;
      Stage& stage = shared.stage[now];
      start_sums<kValueWidth>(grad_value, weight, stage.grad_out);
      Words grad_score;
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          grad_score[j / 2][j % 2 * 2 + half] =
              pair(score[0][j][2 * half] * grad[0][j][2 * half], score[0][j][2 * half + 1] * grad[0][j][2 * half + 1]);
      put(shared.scores[now], grad_score);
      publish();
      release(&shared.scores_full[now]);
      start_sums<kWidth>(grad_key, grad_score, stage.query);
      ++count;
    }

    __device__ __forceinline__ void run_everything() {
      place_anew();
      clear(grad_key);
      clear(grad_value);
      wait(&shared.key_full, 0);
      if (fetch<kEither>()) {
        clear_key_tail();
        ScoreSums score, grad;
        Words weight;
        weigh<true>(score, grad, weight);
        while (true) {
          spread(score, grad, weight);
          place_anew();
          const bool more = fetch<kEither>();
          wait_for_products<0>();  // with products in flight here, ptxas finds no registers (C7512) and runs all in order
          if (!more) break;
          weigh<false>(score, grad, weight);
        }
        QuerySums grad_query;
        start_queries(grad_query, (count - 1) % 2);
        wait_for_products<0>();
        settle(grad_query);
        add_queries(sums_of(job(1)), grad_query, (count - 1) % 2);
      }
      store_sums();
    }

    // ---- in line

    // The first warpgroup: a block's scores, which are there, into weights, and what these add; meanwhile the next block's
    // scores. False: there is none.
    template <int kNow>
    __device__ __forceinline__ bool value_block(ScoreSums& score) {
      constexpr int kOther = kNow ^ 1;
      place_anew();
      Ahead ahead;
      look_ahead<kNow>(ahead, job());
      if (!ahead.whole) hide(score, job().query);
      Words weight;
      weigh<kNow>(score, ahead, weight);
      settle(weight);
      release_after(&shared.empty[kNow]);
      wait(&shared.weights_empty, count % 2 ^ 1);
#pragma unroll
      for (int t = 0; t < kQuerySteps; ++t)
        shared.weights[t][thread % 128] = make_uint4(weight[t][0], weight[t][1], weight[t][2], weight[t][3]);
      release_after(&shared.weights_full);
      const Stage& stage = shared.stage[kNow];
      wait(&shared.grad_out_full[kNow], parity());
      ++count;
      if (!fetch<kOther>()) {
        start_sums<kValueWidth>(grad_value, weight, stage.grad_out);
        wait_for_products<0>();
        return false;
      }
      clear_query_tail<kOther>();
      start_sums<kValueWidth>(grad_value, weight, stage.grad_out);
      start_scores<kWidth>(score, shared.key, shared.stage[kOther].query);
      wait_for_products<1>();
      release(&shared.grad_out_empty[kNow]);
      wait_for_products<0>();
      settle(flat(score));
      return true;
    }
    // Of a warp, all of whose lanes have done what it is about.
    __device__ __forceinline__ void release_after(uint64_t* barrier) {
      __syncwarp();
      release(barrier);
    }

    __device__ __forceinline__ void run_values() {
      place_anew();
      clear(grad_value);
      wait(&shared.key_full, 0);
      if (fetch<0>()) {
        clear_key_tail();
        clear_query_tail<0>();
        ScoreSums score;
        start_scores<kWidth>(score, shared.key, shared.stage[0].query);
        wait_for_products<0>();
        settle(flat(score));
        while (value_block<0>(score) && value_block<1>(score)) continue;
      }
      sync_named(kAllMath, kMathThreads);  // all have done with the queries in shared memory
      store_values();
    }

    // The second: a block's gradients of weights, which are there, into those of scores, and what these add; meanwhile the next
    // block's gradients of weights.
    template <int kNow>
    __device__ __forceinline__ bool key_block(ScoreSums& grad) {
      constexpr int kOther = kNow ^ 1;
      place_anew();
      wait(&shared.weights_full, count % 2);
      Words grad_score;
#pragma unroll
      for (int t = 0; t < kQuerySteps; ++t) {
        const uint4 four = shared.weights[t][thread % 128];
        const unsigned weight[] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float2 x = unpair<T>(weight[n]);
          const int j = 2 * t + n / 2, half = n % 2;
          grad_score[t][n] = pair(x.x * grad[0][j][2 * half], x.y * grad[0][j][2 * half + 1]);
        }
      }
      settle(grad_score);
      release_after(&shared.weights_empty);
      const int place = count % kScoreBuffers;
      wait(&shared.scores_empty[place], count / kScoreBuffers % 2 ^ 1);
      put(shared.scores[place], grad_score);
      publish();
      release(&shared.scores_full[place]);
      const Stage& stage = shared.stage[kNow];
      ++count;
      if (!fetch<kOther>()) {
        start_sums<kWidth>(grad_key, grad_score, stage.query);
        wait_for_products<0>();
        return false;
      }
      clear_query_tail<kOther>();
      begin_gradients<kOther>(grad);
      wait(&shared.grad_out_full[kOther], parity());
      start_sums<kWidth>(grad_key, grad_score, stage.query);
      start_scores<kValueWidth, true>(grad, shared.value, shared.stage[kOther].grad_out);
      wait_for_products<1>();
      release(&shared.empty[kNow]);
      wait_for_products<0>();
      settle(flat(grad));
      release(&shared.grad_out_empty[kOther]);
      return true;
    }

    __device__ __forceinline__ void run_keys() {
      place_anew();
      clear(grad_key);
      if (fetch<0>()) {
        wait(&shared.value_full, 0);
        clear_key_tail();
        clear_query_tail<0>();
        ScoreSums grad;
        begin_gradients<0>(grad);
        wait(&shared.grad_out_full[0], 0);
        start_scores<kValueWidth, true>(grad, shared.value, shared.stage[0].grad_out);
        wait_for_products<0>();
        settle(flat(grad));
        release(&shared.grad_out_empty[0]);
        while (key_block<0>(grad) && key_block<1>(grad)) continue;
      }
      // The third warpgroup learns here that there are no more.
      wait(&shared.scores_empty[count % kScoreBuffers], count / kScoreBuffers % 2 ^ 1);
      release(&shared.scores_full[count % kScoreBuffers]);
      sync_named(kAllMath, kMathThreads);
      store_keys();
    }

    // The third: gradients of queries.
    __device__ __forceinline__ void run_queries() {
      place_anew();
      wait(&shared.key_full, 0);
      while (true) {
        const int now = count % kScoreBuffers;
        wait(&shared.scores_full[now], count / kScoreBuffers % 2);
        if (job().query < 0) break;
        float* const sums = sums_of(job());
        ++count;
        place_anew();
        QuerySums d;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          start_queries(d, now, piece);
          wait_for_products<0>();
          settle(d);
          if (piece == kPieces - 1) release(&shared.scores_empty[now]);
          if (a.turns) {
            add_queries(sums, d, (count - 1) % 2, piece);
          } else {
            stage_queries(d);
            publish();
            send_queries(sums, piece);
          }
        }
      }
      if (lane() == 0) wait_for_store_reads();
    }
  };

  // The block of keys of that number, found by a warp or more and written by their first thread; false: there is none.
  __device__ static bool find_place(const BackwardSm90Arguments& a, unsigned index, Place& place) {
    const AttentionProblem& problem = a.problem;
    const BlockPlace at =
        place_of(problem, a.list, side_by_side(a.list, index, a.section), true, kKeys, a.turns || problem.visible.right < 0);
    int64_t batch = at.sequence;
    int unit = at.head;
    if (kTurned && a.batch_within) {
      const int n = static_cast<int>(at.sequence * a.list.heads) + at.head, sequences = static_cast<int>(a.list.sequences);
      batch = n % sequences;
      unit = n / sequences;
    }
    const Sequence sequence = sequence_of(problem, batch);
    const int key = static_cast<int>(at.block) * kKeys, keys = static_cast<int>(sequence.keys.count),
              queries = static_cast<int>(sequence.queries.count);
    if (at.block < 0 || key >= keys) return false;
    const int heads = static_cast<int>(problem.heads) / static_cast<int>(a.list.heads);
    if constexpr (kMayHalve)
      if (a.halves && by_halves(a, batch, unit * heads, heads, key) != kAlone) return false;
    if (threadIdx.x != 0) return true;
    place.batch = batch;
    place.unit = unit;
    place.queries = queries;
    place.keys = keys;
    place.key = key;
    place.first_query = static_cast<int>(sequence.queries.begin);
    place.first_key = static_cast<int>(sequence.keys.begin) + key;
    place.heads = heads;
    place.first_head = unit * heads;
    place.last_key = min(key + kKeys, keys);
    if (kEverything) place.visible = sequence.visible;
    const auto bound = [](int64_t x) { return x < 0 ? kFar : static_cast<int>(min(x, int64_t{kFar})); };
    const int offset = static_cast<int>(sequence.visible.offset), left = bound(problem.visible.left),
              right = bound(problem.visible.right);
    place.offset = offset;
    place.left = left;
    place.right = right;
    // queries_of_any, in 32 bits: the loading warp has few registers.
    const int from = key - offset, to = min(key + kKeys, keys) - offset;
    const int begin = right >= from ? 0 : min(from - right, queries), end = left >= queries - to ? queries : to + left;
    place.begin = begin / kQueries;
    place.end = end > begin ? (end + kQueries - 1) / kQueries : 0;
    return true;
  }

  // The next that nobody has taken, by a warp; false: there are no more. In this order they are started, too, on which `turns`
  // counts.
  __device__ static bool take_place(const BackwardSm90Arguments& a, Shared& shared) {
    while (true) {
      unsigned index = 0;
      if (threadIdx.x == 0) index = atomicAdd(a.taken, 1u);
      index = __shfl_sync(~0u, index, 0);
      if (index >= static_cast<unsigned>(a.list.count())) {
        if (threadIdx.x == 0) shared.place[shared.number % 2].begin = -1;
        return false;
      }
      if (find_place(a, index, shared.place[threadIdx.x == 0 && kStays ? shared.number % 2 : 0])) return true;
    }
  }

  __device__ static void run(const BackwardSm90Arguments& a, Shared& shared) {
    let_next_kernel_start();
    if (a.problem.query_starts) clear_unowned(a);
    if (!kStays && !find_place(a, blockIdx.x, shared.place[0])) {
      wait_for_kernel_before();  // the kernel behind waits for this one alone, and all blocks of it may come by here
      return;
    }
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0);
    if (threadIdx.x == 0) {
      init_barrier(&shared.key_full, 1);
      init_barrier(&shared.value_full, 1);
      init_barrier(&shared.keys_empty, kWarps + (a.turns ? 1 : 0));
      for (int i = 0; i < kStages; ++i) {
        init_barrier(&shared.query_full[i], 1);
        init_barrier(&shared.grad_out_full[i], 1);
        init_barrier(&shared.empty[i], kWarps);
        init_barrier(&shared.grad_out_empty[i], kWarps);
      }
      for (int i = 0; i < 2; ++i) {
        init_barrier(&shared.scores_full[i], kLine ? 4 : kWarps);
        init_barrier(&shared.scores_empty[i], kSummers);
        init_barrier(&shared.turn[i], 1);
        init_barrier(&shared.added[i], kSummers);
        if (kDrops) init_barrier(&shared.drawn_full[i], kTile.drawers);
      }
      init_barrier(&shared.weights_full, 4);
      init_barrier(&shared.weights_empty, 4);
      init_barrier(&shared.mask_full, 1);
      init_barrier(&shared.mask_empty, kWarps);
      publish_barriers();
    }
    wait_for_kernel_before();
    __syncthreads();
    if (warp < 4) {
      shrink_registers<kTile.loader_registers>();
      if constexpr (kStays) {
        if (warp == 0) load_places(a, shared);
        if (a.turns && threadIdx.x == kWarp) keep_turns_of_places(a, shared);
      } else {
        if (warp == 0) load(a, shared);
        int count = 0;
        if (a.turns && threadIdx.x == kWarp) keep_turns(a, shared, shared.place[0], count);
      }
    } else if (warp < 4 + kTile.drawers) {
      if constexpr (kDrops) {
        shrink_registers<kTile.others_registers>();
        draw(a, shared, warp - 4);
      }
    } else if (kLine && warp >= 12) {
      if constexpr (kLine) {
        shrink_registers<kTile.others_registers>();
        Group{a, shared, static_cast<int>(threadIdx.x) - 128}.run_queries();
      }
    } else {
      grow_registers<kTile.registers>();
      Group group{a, shared, static_cast<int>(threadIdx.x) - 128 - kWarp * kTile.drawers};
      if constexpr (kLine)
        warp < 8 ? group.run_values() : group.run_keys();
      else if constexpr (kEverything)
        group.run_everything();
      else
        group.run_own();
    }
  }
};

template <class T, int kWidth, int kValueWidth, BackwardSm90With kWith, bool kStays>
__global__ void __launch_bounds__(backward_sm90_tile(kWidth, kValueWidth, kWith).threads(),
                                  backward_sm90_tile(kWidth, kValueWidth, kWith).blocks)
    attention_backward_sm90(const __grid_constant__ BackwardSm90Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Body = BackwardOnSm90<T, kWidth, kValueWidth, kWith, kStays>;
  extern __shared__ __align__(kBoxAlignment) char shared_boxes[];
  Body::run(arguments, *reinterpret_cast<typename Body::Shared*>(shared_boxes));
#endif
}

// How a problem's mask reaches the scores where it needs no MaskBlock; kNone too for one that needs it.
inline TurnedMask turned_mask_of(const AttentionProblem& p) {
  if (!p.mask.data) return TurnedMask::kNone;
  if (p.mask_dtype == DType::kBool) return TurnedMask::kBits;
  return p.mask_dtype == p.dtype && p.dropout == 0 && p.mask.stride[2] > 0 && p.mask.stride[3] == 1 &&
                 is_copied_in_boxes(p.mask.data, p.mask.stride, p.batch, p.heads, p.queries, p.keys)
             ? TurnedMask::kBoxes
             : TurnedMask::kNone;
}

// What a problem needs of a tile up to this wide.
inline BackwardSm90With backward_sm90_with(const AttentionProblem& p) {
  constexpr double kSmallestScale = 1e-6, kLargestScale = 1e29,
                   kMostDropped = 0.99;  // weights in 16 bits are scaled up by what it takes
  const bool scaled = static_cast<float>(p.scale) > 0 && p.scale < kLargestScale;
  if (scaled && p.softcap == 0 && !p.alibi_slopes && !p.mask.data && p.dropout == 0) return BackwardSm90With::kNothing;
  if (!scaled || p.softcap != 0 || p.scale < kSmallestScale || p.dropout > kMostDropped ||
      (p.mask.data && turned_mask_of(p) == TurnedMask::kNone))
    return BackwardSm90With::kEverything;
  return p.dropout != 0 ? BackwardSm90With::kDropout : BackwardSm90With::kMasks;
}

template <BackwardSm90With kWith>
using WithOnSm90 = std::integral_constant<BackwardSm90With, kWith>;
template <int kNumber>
using Number = std::integral_constant<int, kNumber>;

// Calls f(Type<T>, WithOnSm90<kWith>, Number<kTileWidth>, the same of the values' width) with what a problem needs. An instance
// of a width also has the tiles between it and the next smaller one's.
template <int kWidth, class F>
void visit_backward_sm90(const AttentionProblem& problem, F&& f) {
  using With = BackwardSm90With;
  const auto visit = [&]<class T>(Type<T> element) {
    const With with = backward_sm90_with(problem);
    if (with != With::kNothing) {  // refused where the widest of these tiles is too narrow
      constexpr Number<kWidth> kOwn{};
      constexpr Number<kWidestEverythingBackwardSm90> kWidest{};
      if constexpr (kWidth <= kWidest()) {
        if (with == With::kMasks) return f(element, WithOnSm90<With::kMasks>{}, kOwn, kOwn);
        if (with == With::kDropout) return f(element, WithOnSm90<With::kDropout>{}, kWidest, kWidest);
        f(element, WithOnSm90<With::kEverything>{}, kWidest, kWidest);
      }
      return;
    }
    constexpr WithOnSm90<With::kNothing> kPlain{};
    const int64_t wider = std::max(problem.width, problem.value_width);
    if constexpr (kWidth == 128)
      if (wider <= 96) return f(element, kPlain, Number<96>{}, Number<96>{});
    if constexpr (kWidth == 256) {
      if (wider <= 192 && problem.value_width <= 128) return f(element, kPlain, Number<192>{}, Number<128>{});
      if (wider <= 192) return f(element, kPlain, Number<192>{}, Number<192>{});
    }
    f(element, kPlain, Number<kWidth>{}, Number<kWidth>{});
  };
  problem.dtype == DType::kFloat16 ? visit(Type<__half>{}) : visit(Type<__nv_bfloat16>{});
}

template <int kWidth>
BackwardSpace backward_sm90_space(const AttentionProblem& problem, const AttentionGradients& gradients, void* workspace) {
  const int64_t pieces = (problem.width + kSumPieceSm90 - 1) / kSumPieceSm90;  // a tile may have more, filled up
  int64_t width = 0;
  visit_backward_sm90<kWidth>(problem, [&]<class T>(Type<T>, auto with, auto tile_width, auto value_width) {
    using Body = BackwardOnSm90<T, tile_width(), value_width(), with(), false>;
    width = Body::kFillsUp ? pieces * kSumPieceSm90 : int64_t{tile_width()};
  });
  return BackwardSpace(problem, gradients, width, true, mask_gradient_parts(problem, gradients), workspace);
}

template <class T, int kWidth, int kValueWidth, BackwardSm90With kWith, bool kStays>
void launch_backward_sm90(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardSpace& space,
                          const TurnedBits& bits, int* turns, unsigned* taken, CUstream_st* stream) {
  using With = BackwardSm90With;
  using Body = BackwardOnSm90<T, kWidth, kValueWidth, kWith, kStays>;
  const auto boxes = [&](const ConstView4& view, bool over_keys, int64_t heads, int64_t width) {
    return problem_boxes<T>(problem, view, over_keys, heads, width, over_keys ? Body::kKeys : Body::kQueries);
  };
  const BlockList list = BlockList::of(problem, true, gradients.units, Body::kKeys);
  const TurnedMask turned = Body::kTurned ? turned_mask_of(problem) : TurnedMask::kNone;
  const bool halves = Body::kMayHalve && turned == TurnedMask::kBits && space.map.size[2] > 1 && space.map.size[3] > 1;
  // A mask in boxes that the batch shares is read once for all of it.
  const bool batch_within = turned == TurnedMask::kBoxes && problem.mask.stride[0] == 0 && problem.mask.stride[1] != 0;
  // Where blocks of keys differ in what they see, those of as many heads as the device holds at a time go by length, and not
  // head by head: then the last ones to run are short.
  const bool bounded = problem.visible.left >= 0 || problem.visible.right >= 0;
  const int64_t at_once = bounded ? multiprocessors() / std::max(list.blocks, int64_t{1}) : 1;
  const int section = static_cast<int>(
      std::clamp(std::max(at_once, batch_within ? list.sequences : 1), int64_t{1}, list.heads * list.sequences));
  const BackwardSm90Arguments arguments{
      boxes(problem.query, false, problem.heads, problem.width),
      boxes(problem.key, true, problem.key_heads, problem.width),
      boxes(problem.value, true, problem.value_heads, problem.value_width),
      boxes(gradients.grad_out, false, problem.heads, problem.value_width),
      turned == TurnedMask::kBoxes ? boxes(problem.mask, false, problem.heads, problem.keys) : HeadBoxes{},
      problem,
      gradients,
      space,
      turned,
      bits,
      section,
      halves,
      batch_within,
      turns,
      taken,
      list,
      ScoreRule(problem),
      problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f,
      static_cast<float>(1 - problem.dropout),
      static_cast<float>(-std::log2(1 - problem.dropout)),
      static_cast<float>(1 / problem.scale)};
  const int64_t blocks = kStays ? std::min(list.count(), int64_t{multiprocessors()}) : list.count();
  launch<attention_backward_sm90<T, kWidth, kValueWidth, kWith, kStays>>(arguments, blocks, Body::kThreads,
                                                                         Body::shared_bytes(problem, turned), stream, true);
  if constexpr (Body::kMayHalve && !Body::kAlone)
    if (halves)
      launch_backward_sm90<T, kWidth, kValueWidth, With::kMaskHalves, false>(problem, gradients, space, bits, turns, taken,
                                                                             stream);
}

// backward_sm90_128_only.cu has those that narrower tiles leave to this one.
extern template void launch_backward_sm90<__half, 128, 128, BackwardSm90With::kDropout, false>(
    const AttentionProblem&, const AttentionGradients&, const BackwardSpace&, const TurnedBits&, int*, unsigned*, CUstream_st*);
extern template void launch_backward_sm90<__nv_bfloat16, 128, 128, BackwardSm90With::kDropout, false>(
    const AttentionProblem&, const AttentionGradients&, const BackwardSpace&, const TurnedBits&, int*, unsigned*, CUstream_st*);
extern template void launch_backward_sm90<__half, 128, 128, BackwardSm90With::kEverything, false>(
    const AttentionProblem&, const AttentionGradients&, const BackwardSpace&, const TurnedBits&, int*, unsigned*, CUstream_st*);
extern template void launch_backward_sm90<__nv_bfloat16, 128, 128, BackwardSm90With::kEverything, false>(
    const AttentionProblem&, const AttentionGradients&, const BackwardSpace&, const TurnedBits&, int*, unsigned*, CUstream_st*);

// Behind the rest of the workspace: how many blocks of keys have been taken, turns, and a mask's bits.
constexpr int64_t kTakenBytes = 16;
inline int64_t turn_bytes(const BackwardSpace& space, bool deterministic) {
  return deterministic ? (space.list.count() * static_cast<int64_t>(sizeof(int)) + 15) / 16 * 16 : 0;
}

// What is to be made of a mask beside its map; no elements: nothing.
inline TurnedBits backward_sm90_bits(const AttentionProblem& problem, void* workspace) {
  const BackwardSm90With with = backward_sm90_with(problem);
  if ((with != BackwardSm90With::kMasks && with != BackwardSm90With::kDropout) || turned_mask_of(problem) != TurnedMask::kBits)
    return {};
  return turned_bits_of(problem, workspace);
}

template <int kWidth>
int64_t backward_sm90_workspace(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic) {
  if (is_short_backward_sm90(problem, gradients, backward_sm90_with(problem) == BackwardSm90With::kNothing)) return 0;
  const BackwardSpace space = backward_sm90_space<kWidth>(problem, gradients, nullptr);
  return space.bytes + kTakenBytes + turn_bytes(space, deterministic) +
         backward_sm90_bits(problem, nullptr).count() * static_cast<int64_t>(sizeof(unsigned));
}

template <int kWidth>
void backward_sm90(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic, void* workspace,
                   CUstream_st* stream) {
  if constexpr (kWidth <= 128)
    if (is_short_backward_sm90(problem, gradients, backward_sm90_with(problem) == BackwardSm90With::kNothing))
      return short_backward_sm90<kWidth>(problem, gradients, stream);
  const BackwardSpace space = backward_sm90_space<kWidth>(problem, gradients, workspace);
  char* const behind = static_cast<char*>(workspace) + space.bytes;
  unsigned* const taken = reinterpret_cast<unsigned*>(behind);
  int* const turns = deterministic ? reinterpret_cast<int*>(behind + kTakenBytes) : nullptr;
  if (turns) check(cudaMemsetAsync(turns, 0, turn_bytes(space, true), stream), "cudaMemsetAsync");
  const TurnedBits bits = backward_sm90_bits(problem, behind + kTakenBytes + turn_bytes(space, deterministic));
  if (bits.count() > 0)
    fill_turned_bits(problem, space.map, bits, stream);
  else
    fill_block_map(problem, space.map, stream);
  prepare_backward(problem, gradients, space, stream, taken);
  visit_backward_sm90<kWidth>(problem, [&]<class T>(Type<T>, auto with, auto width, auto value_width) {
    constexpr int kMostStaying = backward_sm90_tile(width(), value_width(), with()).most_keys_staying;
    const auto start = [&]<bool kStays>(std::bool_constant<kStays>) {
      launch_backward_sm90<T, width(), value_width(), with(), kStays>(problem, gradients, space, bits, turns, taken, stream);
    };
    if constexpr (kMostStaying >= kLongestBackwardSm90)
      start(std::true_type{});
    else if constexpr (kMostStaying > 0)
      problem.keys <= kMostStaying ? start(std::true_type{}) : start(std::false_type{});
    else
      start(std::false_type{});
  });
  finish_queries(problem, gradients, space, stream);
  if (gradients.grad_sinks) finish_sinks(problem, gradients, space, stream);
  if (!gradients.grad_mask.data) return;
  // A wider one's queries, keys and values of one tile leave no shared memory for the mask.
  if constexpr (kWidth <= 128)
    if (!mask_gradient_sm90_refusal(gradients))
      return problem.dtype == DType::kFloat16 ? mask_gradient_sm90<__half, kWidth>(problem, gradients, space, stream)
                                              : mask_gradient_sm90<__nv_bfloat16, kWidth>(problem, gradients, space, stream);
  mask_gradient(problem, gradients, space, stream);
}

}  // namespace flash_online::cuda
