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
// the third the gradients of queries. What one hands to the next goes through shared memory.
#pragma once

#include "../../core/visit.h"
#include "../hw/mbarrier.cuh"
#include "../hw/named_barrier.cuh"
#include "../hw/reduce.cuh"
#include "../hw/register_budget.cuh"
#include "../hw/store_matrix.cuh"
#include "../hw/turns.cuh"
#include "attention.h"
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

struct BackwardSm90Arguments {
  HeadBoxes query, key, value, grad_out;
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardSpace space;
  int section;  // heads whose blocks of keys run side by side
  int* turns;  // of space.list's blocks, 0 at the start: how many have added to one's gradients; null: in any order
  BlockList list;  // of keys; heads are units
  ScoreRule rule;
  float keep_scale;  // of dropout: 1 / (1 - p)
};

template <class T, int kWidth, int kValueWidth, bool kEverything>
struct BackwardOnSm90 {
  static constexpr BackwardSm90 kTile = backward_sm90_tile(kWidth, kValueWidth, kEverything);
  static constexpr int kKeys = kTile.keys, kQueries = kTile.queries, kStages = 2;
  static constexpr int kThreads = kTile.threads(), kMathThreads = 128 * kTile.kWarpgroups, kWarps = kMathThreads / kWarp;
  static constexpr int kGroupKeys = 64;  // of a warpgroup
  static constexpr bool kLine = kTile.in_line();
  static constexpr int boxes_of(int columns) { return (columns + kBoxColumns - 1) / kBoxColumns; }
  static constexpr int kBoxes = boxes_of(kWidth), kValueBoxes = boxes_of(kValueWidth), kQueryBoxes = kQueries / kBoxColumns;
  static constexpr int kQuerySteps = kQueries / 16, kKeySteps = kKeys / 16;
  static constexpr unsigned kRowBytes = kBoxColumns * sizeof(T);
  // The gradients of a block's queries are pieces of 64 x 64: one a warpgroup, side by side or one above the other; or all of
  // one's. Of the last there may be half.
  static constexpr bool kSideBySide = kQueries == 64;
  static constexpr int kPieces = kLine ? kBoxes : 1, kPiece = kSumPieceSm90;
  static_assert(kSideBySide ? kLine || kBoxes == 2 : kQueries == 128 && kBoxes == 1);
  static_assert(kQueries % kRowBlock == 0 && (!kEverything || kQueries * 2 <= 128));
  static_assert(!kLine || (!kEverything && kSideBySide && kWidth % kBoxColumns == 0));
  static constexpr int kSummers = kLine ? 4 : kWarps;  // warps that sum gradients of queries
  // Gradients of queries leave through shared memory and the copy engine, where there is room for them.
  static constexpr bool kStaged = !kEverything;
  static constexpr int kScoreBuffers = kLine && kWidth > 192 ? 1 : 2;  // of blocks

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
    Sequence sequence;
    int begin, end;  // blocks of queries
    int first_query, first_key;  // rows of the tensors
    int offset, left, right;  // of sequence.visible, in 32 bits; kFar: no bound
  };
  static constexpr int kFar = 4 * kLongestBackwardSm90;  // no query stands that far from a key
  // What passes by: a block of a head's queries.
  struct Job {
    int head, query;  // its first; -1: no more blocks
    bool whole;  // all queries see all keys by arithmetic, and all of both exist
    bool nothing_hidden;  // by the mask
    int64_t sums;  // its gradients' place in space.sums
  };
  struct Shared {
    Keys key;
    Values value;
    Stage stage[kStages];
    Scores scores[kScoreBuffers];  // their gradients
    uint4 weights[kLine ? 4 : 1][kLine ? 128 : 1];  // as a thread has them, for the one that has their gradients
    float sums[kStaged ? kSummers : 1][kStaged ? kPiece * 16 : 4];  // gradients of queries on their way
    alignas(16) float rows[kStages][kQueries / kRowBlock][kRowNumbers];
    Place place;
    Job job[4];  // of the block at hand, the next, and the two before, whose gradients of queries are still on their way
    uint64_t key_full, value_full, query_full[kStages], grad_out_full[kStages], empty[kStages], scores_full[2], turn[2],
        added[2], scores_empty[2], grad_out_empty[kStages], weights_full, weights_empty;
  };
  static constexpr int kMaskOffset = (sizeof(Shared) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  static int shared_bytes(const AttentionProblem& problem) {
    const int rows = !kEverything || !problem.mask.data ? 0 : problem.mask.stride[2] == 0 ? 1 : kQueries;
    return kMaskOffset + rows * mask_pitch(kKeys, static_cast<int>(size_of(problem.mask_dtype)));
  }

  template <int kColumns>
  using Sums = Accumulator<1, kColumns / 8>;
  using ScoreSums = Accumulator<1, kQueries / 8>;
  using Mask = MaskBlock<kQueries, kKeys, kMathThreads>;
  using OutTile = SharedTile<T, kWidth>;
  static_assert(OutTile::bytes(kKeys) <= static_cast<int>((kLine ? 1 : kStages) * sizeof(Stage)));

  static constexpr int kAllMath = 1, kTurn = 2;  // named barriers; kTurn + warpgroup

  __device__ static void clear_rows(const MutableView4& to, int64_t head, int64_t width, Rows rows) {
    T* const data = static_cast<T*>(to.data) + head * to.stride[1];
    for (int64_t n = threadIdx.x; n < rows.count * width; n += kThreads)
      data[(rows.begin + n / width) * to.stride[2] + n % width * to.stride[3]] = narrow<T>(0.0f);
  }

  // Columns that only the tile has are nobody's.
  __device__ static int sum_width(const BackwardSpace& space) { return kEverything ? static_cast<int>(space.width) : kWidth; }

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

  // The block of that number, `count` others having gone before.
  __device__ static void send(const BackwardSm90Arguments& a, Shared& shared, int count, int head, int block,
                              bool nothing_hidden) {
    const Place& place = shared.place;
    const int stage = count % 2, query = block * kQueries;
    wait(&shared.empty[stage], count / 2 % 2 ^ 1);
    const int first_rows = static_cast<int>(first_row_block(a.problem, a.space.list, place.batch, head));
    shared.job[count % 4] = {head, query, all_see_all(place, query), nothing_hidden,
                             (first_rows + int64_t{block} * (kQueries / kRowBlock)) * (kRowBlock * sum_width(a.space))};
    arrive_and_expect(&shared.query_full[stage], sizeof(Queries) + sizeof(shared.rows[stage]));
    load_queries(shared.stage[stage].query, a.query, place, head, query, &shared.query_full[stage]);
    // A block that does not exist is as good as the last that does: its queries are hidden.
#pragma unroll
    for (int n = 0; n < kQueries / kRowBlock; ++n)
      load_bytes(shared.rows[stage][n],
                 a.space.rows + int64_t{first_rows + min(query / kRowBlock + n, (place.queries - 1) / kRowBlock)} * kRowNumbers,
                 sizeof(shared.rows[stage][n]), &shared.query_full[stage]);
    if (count == 0) load_keys(shared.value, a.value, place, &shared.value_full);
    if constexpr (kLine) wait(&shared.grad_out_empty[stage], count / 2 % 2 ^ 1);
    arrive_and_expect(&shared.grad_out_full[stage], sizeof(OutGradients));
    load_queries(shared.stage[stage].grad_out, a.grad_out, place, head, query, &shared.grad_out_full[stage]);
  }

  __device__ static void load(const BackwardSm90Arguments& a, Shared& shared) {
    const Place& place = shared.place;
    const bool leads = threadIdx.x == 0;
    if (leads) load_keys(shared.key, a.key, place, &shared.key_full);
    int count = 0;
    for (int head = place.first_head; head < place.first_head + place.heads; ++head) {
      if constexpr (kEverything) {
        QueryBlocks<kQueries, kKeys> blocks(a.space.map, place.batch, head, place.key, place.keys, place.begin, place.end);
        bool nothing_hidden;
        for (int block; (block = blocks.next(nothing_hidden)) < place.end; ++count) {
          if (leads) send(a, shared, count, head, block, nothing_hidden);
          __syncwarp();
        }
      } else if (leads) {
        for (int block = place.begin; block < place.end; ++block, ++count) send(a, shared, count, head, block, true);
      }
    }
    if (leads) {
      wait(&shared.empty[count % 2], count / 2 % 2 ^ 1);
      shared.job[count % 4].query = -1;
      arrive(&shared.query_full[count % 2]);
    }
  }

  // ---- the warp that waits for other blocks of threads, by one thread

  // A block of queries gets what its last keys add to its gradients first, and so on down. These keys' block of threads
  // precedes those that wait for it in the grid; under a causal mask it also reaches the queries sooner.
  __device__ static void keep_turns(const BackwardSm90Arguments& a, Shared& shared) {
    const Place& place = shared.place;
    int count = 0;
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

  // ---- a computing warpgroup

  struct Group {
    const BackwardSm90Arguments& a;
    Shared& shared;
    int thread;  // of those that compute
    int warp = 0;  // of those that compute: in all lanes the same, as far as the compiler knows
    int count = 0;  // of blocks so far
    Sums<kWidth> grad_key;
    Sums<kValueWidth> grad_value;

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
    // The block before's gradients of queries, this warpgroup's piece of that number.
    __device__ __forceinline__ void start_queries(QuerySums& d, int before, int piece = 0) {
      if constexpr (!kLine) wait(&shared.scores_full[before], (count - 1) / 2 % 2);
      const uint64_t scores = rows_descriptor(shared_address(shared.scores[before].box[kSideBySide ? 0 : group()])),
                     keys = columns_descriptor(shared_address(shared.key.box[kLine         ? piece
                                                                             : kSideBySide ? group()
                                                                                           : 0]),
                                               kKeys * kRowBytes);
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
      const bool there = kSideBySide ? kLine || group() * kPiece < width : job.query + group() * kPiece < shared.place.queries;
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
      return *reinterpret_cast<const float2*>(
          &shared.rows[buffer<kBuffer>()][8 * j / kRowBlock][kind * kRowBlock + 8 * j % kRowBlock + lane() % 4 * 2]);
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
      const Place& place = shared.place;
      if (a.problem.query_starts && place.key + kKeys > place.keys) {
        wait(&shared.key_full, 0);
        wait(&shared.value_full, 0);
        clear_tail(shared.key.box, place.keys - place.key);
        clear_tail(shared.value.box, place.keys - place.key);
        publish_tail();
      }
    }
    template <int kBuffer>
    __device__ __forceinline__ void clear_query_tail() {
      const Place& place = shared.place;
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
      const Place& place = shared.place;
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
      const float scale = static_cast<float>(a.problem.scale);
#pragma unroll
      for (int j = 0; j < kWidth / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) grad_key[0][j][e] *= scale;
      store(grad_key, a.gradients.grad_key, a.problem.width);
    }
    __device__ __forceinline__ void store_values() {
      settle(flat(grad_value));
      if constexpr (kEverything)
#pragma unroll
        for (int j = 0; j < kValueWidth / 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) grad_value[0][j][e] *= a.keep_scale;
      store(grad_value, a.gradients.grad_value, a.problem.value_width);
    }
    __device__ __forceinline__ void store_sums() {
      settle(flat(grad_key));
      settle(flat(grad_value));
      sync_named(kAllMath, kMathThreads);  // all have done with the queries in shared memory
      store_keys();
      store_values();
    }

    template <int kCount>
    __device__ __forceinline__ void store(const Accumulator<1, kCount>& d, const MutableView4& view, int64_t width) {
      const Place& place = shared.place;
      T* const to = static_cast<T*>(view.data) + place.batch * view.stride[0] + place.unit * view.stride[1] +
                    (place.sequence.keys.begin + place.key) * view.stride[2];
      store_rows<T>(d, OutTile{reinterpret_cast<T*>(&shared.stage[kLine ? group() : 0])}, 0, score_row(), to, view.stride[2],
                    view.stride[3], place.last_key - place.key, static_cast<int>(width));
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
      bool whole, low;  // Job::whole; whether lse's low parts count
      float2 high[kHighs];
    };
    template <int kBuffer>
    __device__ __forceinline__ void look_ahead(Ahead& ahead, const Job& job) const {
      // Below it the float nearest to lse is off by 2^-17 at most: 16 times less than weights are rounded by.
      constexpr float kLarge = 256;
      ahead.whole = job.whole;
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
          const float2 high = kTile.lse_ahead ? ahead.high[j % Ahead::kHighs] : numbers<kBuffer>(0, j),
                       low = kLow ? numbers<kBuffer>(1, j) : make_float2(0, 0);
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
      if (ahead.low)
        with(std::true_type{});
      else
        with(std::false_type{});
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

    // A block; false: it was the last. The block before's gradients of queries are made amid it.
    template <bool kFirst, int kNow>
    __device__ __forceinline__ bool own_block(Ahead& ahead) {
      constexpr int kOther = kNow ^ 1;
      clear_query_tail<kNow>();
      int shift = 0;
      if constexpr (kFirst) forget(shift);
      Stage& stage = shared.stage[kNow];
      ScoreSums score, grad;
      begin_gradients<kNow>(grad);
      take_turn();
      start_scores<kWidth>(score, shared.key, stage.query, shift);
      if constexpr (kFirst) wait(&shared.value_full, 0);
      if constexpr (!kFirst && kTile.sends_late)
        if (count > 1 && !a.turns) {
          publish();
          send_queries(sums_of(job(2)));
        }
      wait(&shared.grad_out_full[kNow], parity());
      start_scores<kValueWidth, true>(grad, shared.value, stage.grad_out, shift);
      pass_turn();
      wait_for_products<1>();
      settle(flat(score));
      if (!ahead.whole) hide(score, job().query);

      Words weight;
      weigh<kNow>(score, ahead, weight);
      settle(weight);
      start_sums<kValueWidth>(grad_value, weight, stage.grad_out, shift);
      QuerySums query;
      if constexpr (!kFirst) start_queries(query, kOther);
      wait_for_products<kFirst ? 1 : 2>();
      settle(flat(grad));
      // Of the weights as they were rounded for the products: the scores' registers are others' by now.
      Words grad_score;
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int t = j / 2, n = j % 2 * 2 + half;
          const float2 x = unpair<T>(weight[t][n]);
          grad_score[t][n] = pair(x.x * grad[0][j][2 * half], x.y * grad[0][j][2 * half + 1]);
        }
      place_anew();
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
      const bool more = fetch<kOther>(1);
      if (more) look_ahead<kOther>(ahead, job(-1));
      if constexpr (kTile.sends_late) finish_queries();
      wait_for_products<0>();
      release(&shared.empty[kNow]);
      ++count;
      return more;
    }

    __device__ __forceinline__ void run_own() {
      place_anew();
      clear(grad_key);
      clear(grad_value);
      wait(&shared.key_full, 0);
      if (fetch<0>()) {
        clear_key_tail();
        Ahead ahead;
        look_ahead<0>(ahead, job());
        if (group() == 1) pass_turn();
        if (own_block<true, 0>(ahead))
          while (own_block<false, 1>(ahead) && own_block<false, 0>(ahead)) continue;
        place_anew();
        QuerySums query;
        start_queries(query, (count - 1) % 2);
        if (kTile.sends_late && count > 1 && !a.turns) {
          publish();
          send_queries(sums_of(job(2)));
        }
        wait_for_products<0>();
        settle(query);
        if (a.turns) {
          add_queries(sums_of(job(1)), query, (count - 1) % 2);
        } else {
          stage_queries(query);
          publish();
          send_queries(sums_of(job(1)));
          if (lane() == 0) wait_for_store_reads();
        }
      }
      store_sums();
    }

    // ---- with keys of its own and everything, which takes registers from what could be in flight

    // The block at hand's weights; the block before's gradients of queries meanwhile, and the gradients of the weights, less
    // delta.
    template <bool kFirst>
    __device__ __forceinline__ void weigh(ScoreSums& score, ScoreSums& grad, Words& weight) {
      const AttentionProblem& problem = a.problem;
      const Place& place = shared.place;
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
      const bool masked = mask.data && !job.nothing_hidden;
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
        draw_weights<true, 1, kQueries / 8>(score_row(), dropout, here(), [&](int, int j, unsigned kept) {
          dropped |= (~kept & 15) << (4 * j);
#pragma unroll
          for (int e = 0; e < 4; ++e) grad[0][j][e] = kept >> e & 1 ? grad[0][j][e] * a.keep_scale : 0;
        });
      }
      place_anew();
      subtract_delta<kEither>(grad);
      const ScoreRule rule = a.rule.of_head(problem, place.batch, job.head);
      if (rule.bends) bend_scores<true>(score, score_row(), rule, here(), place.sequence.visible, &grad);
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

  __device__ static void run(const BackwardSm90Arguments& a, Shared& shared) {
    const AttentionProblem& problem = a.problem;
    const BlockPlace at = place_of(problem, a.list, side_by_side(a.list, blockIdx.x, a.section), true, kKeys,
                                   a.turns || problem.visible.right < 0);
    Place place;
    place.batch = at.sequence;
    place.unit = at.head;
    place.sequence = sequence_of(problem, at.sequence);
    place.queries = static_cast<int>(place.sequence.queries.count);
    place.keys = static_cast<int>(place.sequence.keys.count);
    if (problem.query_starts && at.block == 0) {
      const auto clear = [&](int64_t n) {
        const Rows rows = unowned_rows(problem.key_starts, problem.batch, n, problem.keys, problem.total_keys);
        clear_rows(a.gradients.grad_key, place.unit, problem.width, rows);
        clear_rows(a.gradients.grad_value, place.unit, problem.value_width, rows);
      };
      clear(place.batch);
      if (place.batch == problem.batch - 1) clear(problem.batch);
    }
    if (at.block < 0 || at.block * kKeys >= place.keys) return;
    place.key = static_cast<int>(at.block) * kKeys;
    place.first_query = static_cast<int>(place.sequence.queries.begin);
    place.first_key = static_cast<int>(place.sequence.keys.begin) + place.key;
    place.last_key = min(place.key + kKeys, place.keys);
    place.heads = static_cast<int>(problem.heads) / static_cast<int>(a.list.heads);
    place.first_head = place.unit * place.heads;
    const QueryRange range = queries_of_any(place.sequence.visible, place.key, place.last_key, place.queries);
    place.begin = static_cast<int>(min(range.begin, int64_t{place.queries}) / kQueries);
    place.end = range.end > range.begin ? static_cast<int>((range.end + kQueries - 1) / kQueries) : 0;
    const auto bound = [](int64_t x) { return x < 0 ? kFar : static_cast<int>(min(x, int64_t{kFar})); };
    place.offset = static_cast<int>(place.sequence.visible.offset);
    place.left = bound(place.sequence.visible.left);
    place.right = bound(place.sequence.visible.right);

    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0);
    if (threadIdx.x == 0) {
      shared.place = place;
      init_barrier(&shared.key_full, 1);
      init_barrier(&shared.value_full, 1);
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
      }
      init_barrier(&shared.weights_full, 4);
      init_barrier(&shared.weights_empty, 4);
      publish_barriers();
    }
    __syncthreads();
    if (warp < 4) {
      shrink_registers<kTile.loader_registers>();
      if (warp == 0) load(a, shared);
      if (a.turns && threadIdx.x == kWarp) keep_turns(a, shared);
    } else if (kLine && warp >= 12) {
      if constexpr (kLine) {
        shrink_registers<kTile.summer_registers>();
        Group{a, shared, static_cast<int>(threadIdx.x) - 128}.run_queries();
      }
    } else {
      grow_registers<kTile.registers>();
      Group group{a, shared, static_cast<int>(threadIdx.x) - 128};
      if constexpr (kLine)
        warp < 8 ? group.run_values() : group.run_keys();
      else if constexpr (kEverything)
        group.run_everything();
      else
        group.run_own();
    }
  }
};

template <class T, int kWidth, int kValueWidth, bool kEverything>
__global__ void __launch_bounds__(backward_sm90_tile(kWidth, kValueWidth, kEverything).threads(), 1)
    attention_backward_sm90(const __grid_constant__ BackwardSm90Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Body = BackwardOnSm90<T, kWidth, kValueWidth, kEverything>;
  extern __shared__ __align__(kBoxAlignment) char shared_boxes[];
  Body::run(arguments, *reinterpret_cast<typename Body::Shared*>(shared_boxes));
#endif
}

template <int kNumber>
using Number = std::integral_constant<int, kNumber>;

// Calls f(Type<T>, bool_constant<kEverything>, Number<kTileWidth>, the same of the values' width) with what a
// problem needs. An instance of a width also has the tiles between it and the next smaller one's.
template <int kWidth, class F>
void visit_backward_sm90(const AttentionProblem& problem, F&& f) {
  const auto visit = [&]<class T>(Type<T> element) {
    if constexpr (kWidth <= kWidestEverythingBackwardSm90)  // refused where that tile is too narrow
      if (ScoreRule(problem).bends || problem.mask.data || problem.dropout != 0)
        return f(element, std::true_type{}, Number<kWidestEverythingBackwardSm90>{}, Number<kWidestEverythingBackwardSm90>{});
    const int64_t wider = std::max(problem.width, problem.value_width);
    if constexpr (kWidth == 128)
      if (wider <= 96) return f(element, std::false_type{}, Number<96>{}, Number<96>{});
    if constexpr (kWidth == 256) {
      if (wider <= 192 && problem.value_width <= 128) return f(element, std::false_type{}, Number<192>{}, Number<128>{});
      if (wider <= 192) return f(element, std::false_type{}, Number<192>{}, Number<192>{});
    }
    f(element, std::false_type{}, Number<kWidth>{}, Number<kWidth>{});
  };
  problem.dtype == DType::kFloat16 ? visit(Type<__half>{}) : visit(Type<__nv_bfloat16>{});
}

template <int kWidth>
BackwardSpace backward_sm90_space(const AttentionProblem& problem, const AttentionGradients& gradients, void* workspace) {
  const int64_t pieces = (problem.width + kSumPieceSm90 - 1) / kSumPieceSm90;  // a tile may have more, filled up
  int64_t width = 0;
  visit_backward_sm90<kWidth>(problem, [&](auto, auto everything, auto tile_width, auto) {
    width = everything() ? pieces * kSumPieceSm90 : int64_t{tile_width()};
  });
  return BackwardSpace(problem, gradients, width, true, mask_gradient_parts(problem, gradients), workspace);
}

template <class T, int kWidth, int kValueWidth, bool kEverything>
void launch_backward_sm90(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardSpace& space,
                          int* turns, CUstream_st* stream) {
  using Body = BackwardOnSm90<T, kWidth, kValueWidth, kEverything>;
  const auto boxes = [&](const ConstView4& view, bool over_keys, int64_t heads, int64_t width) {
    return problem_boxes<T>(problem, view, over_keys, heads, width, over_keys ? Body::kKeys : Body::kQueries);
  };
  const BlockList list = BlockList::of(problem, true, gradients.units, Body::kKeys);
  // Where blocks of keys differ in what they see, those of as many heads as the device holds at a time go by length, and not
  // head by head: then the last ones to run are short.
  const bool bounded = problem.visible.left >= 0 || problem.visible.right >= 0;
  const int section = bounded ? static_cast<int>(std::clamp(int64_t{multiprocessors()} / std::max(list.blocks, int64_t{1}),
                                                            int64_t{1}, list.heads * list.sequences))
                              : 1;
  const BackwardSm90Arguments arguments{boxes(problem.query, false, problem.heads, problem.width),
                                        boxes(problem.key, true, problem.key_heads, problem.width),
                                        boxes(problem.value, true, problem.value_heads, problem.value_width),
                                        boxes(gradients.grad_out, false, problem.heads, problem.value_width),
                                        problem,
                                        gradients,
                                        space,
                                        section,
                                        turns,
                                        list,
                                        ScoreRule(problem),
                                        problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f};
  launch<attention_backward_sm90<T, kWidth, kValueWidth, kEverything>>(arguments, arguments.list.count(), Body::kThreads,
                                                                       Body::shared_bytes(problem), stream);
}

inline int64_t turn_bytes(const BackwardSpace& space, bool deterministic) {
  return deterministic ? (space.list.count() * static_cast<int64_t>(sizeof(int)) + 15) / 16 * 16 : 0;
}

template <int kWidth>
int64_t backward_sm90_workspace(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic) {
  const BackwardSpace space = backward_sm90_space<kWidth>(problem, gradients, nullptr);
  return space.bytes + turn_bytes(space, deterministic);
}

template <int kWidth>
void backward_sm90(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic, void* workspace,
                   CUstream_st* stream) {
  const BackwardSpace space = backward_sm90_space<kWidth>(problem, gradients, workspace);
  int* const turns = deterministic ? reinterpret_cast<int*>(static_cast<char*>(workspace) + space.bytes) : nullptr;
  if (turns) check(cudaMemsetAsync(turns, 0, turn_bytes(space, true), stream), "cudaMemsetAsync");
  fill_block_map(problem, space.map, stream);
  prepare_backward(problem, gradients, space, stream);
  visit_backward_sm90<kWidth>(problem, [&]<class T>(Type<T>, auto everything, auto width, auto value_width) {
    launch_backward_sm90<T, width(), value_width(), everything()>(problem, gradients, space, turns, stream);
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
