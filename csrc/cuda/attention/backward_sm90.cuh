// Attention backward on Hopper: TMA loads, wgmma products. docs/backward_sm90.md draws it.
//
// A block of threads owns 128 keys and values, 64 a warpgroup, and the queries of every head that shares them pass by in
// blocks, brought by a warp that does nothing else. Scores are made again, transposed: [key][query], so that weights and the
// scores' gradients are left operands of the products that are the gradients of values and keys, which stay in registers to the
// end. The scores' gradients also go through shared memory, for the gradients of queries: each warpgroup sums its half of a
// block's over all 128 keys, a block late, so that neither waits for the other, and has it added to sums in global memory.
//
// At head dim 256 (kShared) that takes too many registers: a block of threads owns 64 keys, each warpgroup makes the scores of
// half of a block's queries and half of the columns of all gradients, and weights go through shared memory too.
#pragma once

#include "../../core/visit.h"
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

constexpr int kSumPieceSm90 = 64;  // columns of gradients of queries that a warpgroup sums

struct BackwardSm90Arguments {
  HeadBoxes query, key, value, grad_out;
  AttentionProblem problem;
  AttentionGradients gradients;
  BackwardSpace space;
  int section;  // heads whose blocks of keys run side by side
  int* turns;  // of space.list's blocks, 0 at the start: how many have added to one's gradients; null: in any order
  unsigned* taken;  // of the list of keys' blocks, 0 at the start, where blocks of threads stay for several
  BlockList list;  // of keys; heads are units
  ScoreRule rule;
  float keep_scale;  // of dropout: 1 / (1 - p)
};

// kStays: a block of threads takes one block of keys after another: while the gradients of one's keys are stored, the next
// one's queries, keys and values are on their way.
template <class T, int kWidth, bool kEverything, bool kStays>
struct BackwardOnSm90 {
  static constexpr BackwardSm90 kTile = backward_sm90_tile(kWidth, kEverything);
  static constexpr int kKeys = kTile.keys, kQueries = kTile.queries, kStages = 2;
  static constexpr int kThreads = kTile.kThreads, kMathThreads = kThreads - 128, kWarps = kMathThreads / kWarp;
  static constexpr int kGroupKeys = 64;  // of a warpgroup
  // Both warpgroups have the same keys: each makes the scores of half of a block's queries, and half of all gradients' columns.
  static constexpr bool kShared = kKeys == kGroupKeys;
  static constexpr int kScoreQueries = kShared ? kQueries / 2 : kQueries, kSumColumns = kShared ? kWidth / 2 : kWidth;
  static constexpr int kBoxes = kWidth / kBoxColumns, kQueryBoxes = kQueries / kBoxColumns;
  static constexpr int kWidthSteps = kWidth / 16, kQuerySteps = kQueries / 16, kKeySteps = kKeys / 16;
  static constexpr unsigned kRowBytes = kBoxColumns * sizeof(T);
  // The gradients of a block's queries are two or four pieces of 64 x 64: side by side, or one above the other.
  static constexpr bool kSideBySide = kQueries == 64;
  static constexpr int kPieces = kShared ? 2 : 1;
  static constexpr int kPiece = (kSideBySide ? kWidth / 2 : kWidth) / kPieces;  // columns
  static_assert(kSideBySide || kQueries == 128);
  static_assert(kQueries % kRowBlock == 0 && (!kEverything || (kQueries * 2 <= 128 && kPiece == kSumPieceSm90)));
  static_assert(!kShared || (!kEverything && kSideBySide));
  // Gradients of queries leave through shared memory and the copy engine, where there is room for them.
  static constexpr bool kStaged = !kShared && !kEverything;
  static_assert(!kStays || kStaged);

  struct alignas(kBoxAlignment) Keys {
    T box[kBoxes][kKeys][kBoxColumns];
  };
  struct alignas(kBoxAlignment) Queries {
    T box[kBoxes][kQueries][kBoxColumns];
  };
  struct alignas(kBoxAlignment) Scores {
    T box[kQueryBoxes][kKeys][kBoxColumns];  // [key][query]
  };
  struct Stage {
    Queries query, grad_out;
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
  __device__ __forceinline__ static int blocks_of(const Place& place) { return place.heads * max(place.end - place.begin, 0); }
  // What passes by: a block of a head's queries.
  struct Job {
    int head, query;  // its first; -1: no more blocks
    bool whole;  // all queries see all keys by arithmetic, and all of both exist
    bool nothing_hidden;  // by the mask
    bool last, third;  // of its place; its third or a later one
    int64_t sums;  // its gradients' place in space.sums
  };
  struct Shared {
    Keys key, value;
    Stage stage[kStages];
    Scores scores[kShared ? 4 : 2];  // their gradients, two blocks'; the weights of those, where others need them
    float sums[kStaged ? kWarps : 1][kStaged ? kPiece * 16 : 4];  // gradients of queries on their way
    alignas(16) float rows[kStages][kQueries / kRowBlock][kRowNumbers];
    Place place[kStays ? 2 : 1];
    Job job[4];  // of the block at hand, the next, and the two before, whose gradients of queries are still on their way
    int sent, number;  // load_places: blocks so far, and places
    uint64_t key_full, value_full, keys_empty, query_full[kStages], grad_out_full[kStages], empty[kStages], scores_full[2],
        turn[2], added[2], scores_empty[2];
  };
  static constexpr int kMaskOffset = (sizeof(Shared) + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
  static int shared_bytes(const AttentionProblem& problem) {
    const int rows = !kEverything || !problem.mask.data ? 0 : problem.mask.stride[2] == 0 ? 1 : kQueries;
    return kMaskOffset + rows * mask_pitch(kKeys, static_cast<int>(size_of(problem.mask_dtype)));
  }

  using Sums = Accumulator<1, kSumColumns / 8>;
  using ScoreSums = Accumulator<1, kScoreQueries / 8>;
  using Mask = MaskBlock<kQueries, kKeys, kMathThreads>;
  using OutTile = SharedTile<T, kWidth>;
  static_assert(OutTile::bytes(kKeys) <= static_cast<int>(kStages * sizeof(Stage)));

  static constexpr int kAllMath = 1, kTurn = 2;  // named barriers; kTurn + warpgroup

  __device__ static void clear_rows(const MutableView4& to, int64_t head, int64_t width, Rows rows) {
    T* const data = static_cast<T*>(to.data) + head * to.stride[1];
    for (int64_t n = threadIdx.x; n < rows.count * width; n += kThreads)
      data[(rows.begin + n / width) * to.stride[2] + n % width * to.stride[3]] = narrow<T>(0.0f);
  }

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
        clear_rows(a.gradients.grad_key, n % heads, problem.width, rows);
        clear_rows(a.gradients.grad_value, n % heads, problem.value_width, rows);
      }
    }
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
  __device__ static void load_keys(Keys& to, const HeadBoxes& from, const Place& place, uint64_t* full) {
    arrive_and_expect(full, sizeof(Keys));
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      load_box(to.box[box], from.map, from.at(place.batch, place.first_head, place.first_key, box), full);
  }
  __device__ static void load_queries(Queries& to, const HeadBoxes& from, const Place& place, int head, int query,
                                      uint64_t* full) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      load_box(to.box[box], from.map, from.at(place.batch, head, place.first_query + query, box), full);
  }

  // The block of that number, `count` others having gone before.
  __device__ static void send(const BackwardSm90Arguments& a, Shared& shared, const Place& place, int count, int head,
                              int block, bool nothing_hidden, bool last = false, bool third = false) {
    const int stage = count % 2, query = block * kQueries;
    wait(&shared.empty[stage], count / 2 % 2 ^ 1);
    const int first_rows = static_cast<int>(first_row_block(a.problem, a.space.list, place.batch, head));
    shared.job[count % 4] = {head,
                             query,
                             all_see_all(place, query),
                             nothing_hidden,
                             last,
                             third,
                             (first_rows + int64_t{block} * (kQueries / kRowBlock)) * (kRowBlock * sum_width(a.space))};
    arrive_and_expect(&shared.query_full[stage], sizeof(Queries) + sizeof(shared.rows[stage]));
    load_queries(shared.stage[stage].query, a.query, place, head, query, &shared.query_full[stage]);
    // A block that does not exist is as good as the last that does: its queries are hidden.
#pragma unroll
    for (int n = 0; n < kQueries / kRowBlock; ++n)
      load_bytes(shared.rows[stage][n],
                 a.space.rows + int64_t{first_rows + min(query / kRowBlock + n, (place.queries - 1) / kRowBlock)} * kRowNumbers,
                 sizeof(shared.rows[stage][n]), &shared.query_full[stage]);
    if (!kStays && count == 0) load_keys(shared.value, a.value, place, &shared.value_full);
    arrive_and_expect(&shared.grad_out_full[stage], sizeof(Queries));
    load_queries(shared.stage[stage].grad_out, a.grad_out, place, head, query, &shared.grad_out_full[stage]);
  }

  __device__ static void load(const BackwardSm90Arguments& a, Shared& shared) {
    const Place& place = shared.place[0];
    const bool leads = threadIdx.x == 0;
    if (leads) load_keys(shared.key, a.key, place, &shared.key_full);
    int count = 0;
    for (int head = place.first_head; head < place.first_head + place.heads; ++head) {
      if constexpr (kEverything) {
        QueryBlocks<kQueries, kKeys> blocks(a.space.map, place.batch, head, place.key, place.keys, place.begin, place.end);
        bool nothing_hidden;
        for (int block; (block = blocks.next(nothing_hidden)) < place.end; ++count) {
          if (leads) send(a, shared, place, count, head, block, nothing_hidden);
          __syncwarp();
        }
      } else if (leads) {
        for (int block = place.begin; block < place.end; ++block, ++count) send(a, shared, place, count, head, block, true);
      }
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
          send(a, shared, place, count++, head, block, true, n == blocks - 1, n >= 2);
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
    Sums grad_key, grad_value;

    __device__ __forceinline__ const Place& place() const { return shared.place[kStays ? number % 2 : 0]; }

    // What follows from the thread's number is computed anew, which takes fewer registers than to keep it.
    __device__ __forceinline__ void place_anew() {
      forget(thread);
      warp = __shfl_sync(~0u, static_cast<unsigned>(thread) / kWarp, 0);
    }
    __device__ __forceinline__ int group() const { return warp / 4; }
    __device__ __forceinline__ int lane() const { return static_cast<unsigned>(thread) % kWarp; }
    __device__ __forceinline__ int score_row() const { return (kShared ? warp % 4 : warp) * 16; }
    __device__ __forceinline__ int score_query() const { return kShared ? group() * kScoreQueries : 0; }
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
    template <bool kAdd = false>
    __device__ __forceinline__ void start_scores(ScoreSums& d, const Keys& left, const Queries& right, unsigned shift = 0) {
      int first = kShared ? 0 : group() * kGroupKeys;
      // Or ptxas keeps the keys' addresses of all steps from before the loop, and finds no uniform registers for others.
      if constexpr (kShared) forget(first);
      start_row_products<T, kWidthSteps, kKeys, kQueries, kAdd>(d, shared_address(left.box) + first * kRowBytes + shift,
                                                                shared_address(right.box) + score_query() * kRowBytes + shift);
    }

    using QuerySums = float[kPiece / 2];
    // The block before's gradients of queries, this warpgroup's piece of that number.
    __device__ __forceinline__ void start_queries(QuerySums& d, int before, int piece = 0) {
      wait(&shared.scores_full[before], (count - 1) / 2 % 2);
      const uint64_t scores = rows_descriptor(shared_address(shared.scores[before].box[kSideBySide ? 0 : group()])),
                     keys = columns_descriptor(
                         shared_address(shared.key.box[kSideBySide ? (group() * kPieces + piece) * (kPiece / kBoxColumns) : 0]),
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
      constexpr int kBelow = kSideBySide ? 0 : kPiece / 16, kBeside = kSideBySide ? kPieces * kPiece / 8 : 0;
      const bool there = kSideBySide ? kShared || group() * kPiece < width : job.query + group() * kPiece < place().queries;
      const int first = ((group() * kBelow + warp % 4) * (width / 8) + group() * kBeside) * 128;
      return there ? a.space.sums + job.sums + first + place_in_sum(lane(), 0) : nullptr;
    }
    __device__ __forceinline__ void add_queries(float* to, const QuerySums& d, int before, int piece = 0) {
      if (a.turns) wait(&shared.turn[before], (count - 1) / 2 % 2);
      if (to) {
#pragma unroll
        for (int j = 0; j < kPiece / 8; ++j)
          add_to_sum(to + (piece * (kPiece / 8) + j) * 128, reinterpret_cast<const float (&)[4]>(d[4 * j]));
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
      float4* const to = reinterpret_cast<float4*>(shared.sums[warp]) + lane();
#pragma unroll
      for (int j = 0; j < kPiece / 8; ++j) to[j * kWarp] = make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
    }
    __device__ __forceinline__ void send_queries(const Job& job) {
      float* const to = sums_of(job);
      if (to && lane() == 0) {
        add_floats(to, shared.sums[warp], sizeof(shared.sums[warp]));
        commit_stores();
      }
    }

    // A pair's two numbers of kind 0 (lse), 1 (lse, low part) or 2 (delta), of the queries 8 j + 2 place and the next.
    template <int kBuffer>
    __device__ __forceinline__ float2 numbers(int kind, int j) const {
      return *reinterpret_cast<const float2*>(
          &shared.rows[buffer<kBuffer>()][8 * j / kRowBlock]
                      [kind * kRowBlock + score_query() + 8 * j % kRowBlock + lane() % 4 * 2]);
    }

    // In packed tensors, what follows a sequence is another's: rows from `from` on become zeros. All threads that compute.
    template <int kRows>
    __device__ __forceinline__ void clear_tail(T (&box)[kBoxes][kRows][kBoxColumns], int from) {
      constexpr int kAcross = kRowBytes / kVectorBytes;
      for (int n = thread; n < kBoxes * (kRows - from) * kAcross; n += kMathThreads) {
        const int row = n / kAcross % (kRows - from) + from;
        reinterpret_cast<uint4*>(box[n / kAcross / (kRows - from)][row])[n % kAcross] = {0, 0, 0, 0};
      }
    }
    __device__ __forceinline__ void publish_tail() {
      publish_to_engines();
      sync_named(kAllMath, kMathThreads);
    }

    __device__ __forceinline__ static unsigned pair(float x, float y) { return Fragments<T>::pair(x, y); }
    using Words = unsigned[kScoreQueries / 16][4];  // of 16-bit pairs: a left operand

    __device__ __forceinline__ void clear_key_tail() {
      const Place& place = this->place();
      if (a.problem.query_starts && place.key + kKeys > place.keys) {
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
      const int first = query + score_query() + lane() % 4 * 2, left_over = place.queries - first;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = place.key + score_row() + 8 * half + lane() / 4, at = key - place.offset - first;
        const int begin = at - place.right, end = key < place.keys ? min(at + place.left + 1, left_over) : -kQueries;
#pragma unroll
        for (int j = 0; j < kScoreQueries / 8; ++j)
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
      for (int j = 0; j < kScoreQueries / 8; ++j) {
        const float2 delta = numbers<kBuffer>(2, j);
        d[0][j][0] -= delta.x, d[0][j][1] -= delta.y;
        d[0][j][2] -= delta.x, d[0][j][3] -= delta.y;
      }
    }

    // The end: gradients of this warpgroup's keys and values.
    __device__ __forceinline__ void store_sums() {
      settle(flat(grad_key));
      settle(flat(grad_value));
      if constexpr (!kStays) sync_named(kAllMath, kMathThreads);  // all have done with the queries in shared memory
      store(grad_key, static_cast<float>(a.problem.scale), a.gradients.grad_key, a.problem.width);
      store(grad_value, kEverything ? a.keep_scale : 1.0f, a.gradients.grad_value, a.problem.value_width);
    }

    __device__ __forceinline__ void store(Sums& d, float scale, const MutableView4& view, int64_t width) {
      const Place& place = this->place();
      const int column = kShared ? group() * kSumColumns : 0, left = place.last_key - place.key,
                columns = static_cast<int>(width) - column;
      T* const to = static_cast<T*>(view.data) + place.batch * view.stride[0] + place.unit * view.stride[1] +
                    place.first_key * view.stride[2] + column * view.stride[3];
      if constexpr (kStays) {  // the next place's queries arrive in shared memory
        store_rows(d, scale, score_row(), to, view.stride[2], view.stride[3], left, columns, lane());
      } else {
#pragma unroll
        for (float& x : flat(d)) x *= scale;
        store_rows<T>(d, OutTile{reinterpret_cast<T*>(shared.stage)}, column, score_row(), to, view.stride[2], view.stride[3],
                      left, columns);
      }
    }

    // ---- with keys of its own

    // Sums over a block's queries: [this warpgroup's keys][columns]. `shift` is as that of start_scores.
    __device__ __forceinline__ void start_sums(Sums& d, const Words& left, const Queries& right, unsigned shift = 0) {
      const uint64_t columns = columns_descriptor(shared_address(right.box) + shift, kQueries * kRowBytes);
      begin_products();
#pragma unroll
      for (int step = 0; step < kQuerySteps; ++step)
        WarpgroupProduct<T, kWidth>::template registers_shared<true>(flat(d), left[step], moved(columns, step * 16 * kRowBytes),
                                                                     true);
      commit_products();
    }

    __device__ __forceinline__ void put(Scores& to, const Words& words) {
      const int r = score_row() + lane() % 16;
#pragma unroll
      for (int t = 0; t < kScoreQueries / 16; ++t)
        store_matrices(words[t],
                       shared_address(to.box[t / 4][r]) +
                           ((score_query() / 8 + t % 4 * 2 + lane() / 16) ^ (lane() % 8)) * static_cast<int>(kVectorBytes));
    }

    // What a block needs of its rows, read while the one before is at its end: shared memory answers late once it feeds the
    // products.
    struct Ahead {
      static constexpr int kHighs = kTile.lse_ahead ? kScoreQueries / 8 : 1;
      bool whole, last, third, low;  // of Job; whether lse's low parts count
      float2 high[kHighs];
    };
    template <int kBuffer>
    __device__ __forceinline__ void look_ahead(Ahead& ahead, const Job& job) const {
      // Below it the float nearest to lse is off by 2^-17 at most: 16 times less than weights are rounded by.
      constexpr float kLarge = 256;
      ahead.whole = job.whole;
      ahead.last = kStays && job.last;
      ahead.third = kStays ? job.third : count > 0;
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
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float2 delta = numbers<kNow>(2, j);
        grad[0][j][0] = grad[0][j][2] = -delta.x;
        grad[0][j][1] = grad[0][j][3] = -delta.y;
      }
      settle(flat(grad));
      take_turn();
      start_scores(score, shared.key, stage.query, shift);
      if constexpr (kFirst) wait(&shared.value_full, number % 2);
      if constexpr (!kFirst && kTile.sends_late)
        if (ahead.third && !a.turns) {
          publish();
          send_queries(job(2));
        }
      wait(&shared.grad_out_full[kNow], parity());
      start_scores<true>(grad, shared.value, stage.grad_out, shift);
      pass_turn();
      wait_for_products<1>();
      settle(flat(score));
      if (!ahead.whole) hide(score, job().query);

      Words weight;
      const auto weigh = [&]<bool kLow>(std::bool_constant<kLow>) {
#pragma unroll
        for (int j = 0; j < kQueries / 8; ++j) {
          const float2 high = kTile.lse_ahead ? ahead.high[j % Ahead::kHighs] : numbers<kNow>(0, j),
                       low = kLow ? numbers<kNow>(1, j) : make_float2(0, 0);
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
        weigh(std::true_type{});
      else
        weigh(std::false_type{});
      settle(weight);
      start_sums(grad_value, weight, stage.grad_out, shift);
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
      start_sums(grad_key, grad_score, stage.query, shift);

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
        if (!a.turns) send_queries(job(1));
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

    // A place's blocks, of which there is one.
    __device__ __forceinline__ void own_blocks() {
      clear_key_tail();
      Ahead ahead;
      look_ahead<0>(ahead, job());
      if (own_block<true, 0>(ahead))
        while (own_block<false, 1>(ahead) && own_block<false, 0>(ahead)) continue;
      place_anew();
      QuerySums query;
      start_queries(query, (count - 1) % 2);
      if (kTile.sends_late && (kStays ? blocks_of(place()) : count) > 1 && !a.turns) {
        publish();
        send_queries(job(2));
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
        send_queries(job(1));
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
        release(&shared.keys_empty);
      }
      for (int n = blocks_of(place()); n < 2 || n % 2 != 0; ++n, ++count) {  // what passes by empty
        const int buffer = count % 2;
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
      start_scores(score, shared.key, stage.query);
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
      start_scores(grad, shared.value, stage.grad_out);
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
      start_sums(grad_value, weight, stage.grad_out);
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
      start_sums(grad_key, grad_score, stage.query);
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

    // ---- with keys that are the other's too: weights and their gradients go through shared memory, where each finds the
    // other's; what is made of them comes a block late, so that it is there

    // Sums over the block before's queries: [keys][this warpgroup's columns].
    __device__ __forceinline__ void start_sums(Sums& d, const Scores& left, const Queries& right) {
      const uint64_t scores = rows_descriptor(shared_address(left.box)),
                     columns = columns_descriptor(shared_address(right.box[group() * (kSumColumns / kBoxColumns)]),
                                                  kQueries * kRowBytes);
#pragma unroll
      for (int step = 0; step < kQuerySteps; ++step)
        WarpgroupProduct<T, kSumColumns>::template shared_shared<true>(flat(d), moved(scores, step * 32),
                                                                       moved(columns, step * 16 * kRowBytes), true);
    }
    // What the block before adds to the gradients of values and keys.
    __device__ __forceinline__ void start_spread(int before) {
      wait(&shared.scores_full[before], (count - 1) / 2 % 2);
      place_anew();
      const Stage& stage = shared.stage[before];
      begin_products();
      start_sums(grad_value, shared.scores[2 + before], stage.grad_out);
      start_sums(grad_key, shared.scores[before], stage.query);
      commit_products();
    }
    // What is left of the block before, once the first piece of its gradients of queries has been started.
    __device__ __forceinline__ void finish_spread(QuerySums& first, int before) {
      QuerySums second;
      place_anew();
      start_queries(second, before, 1);
      float* const sums = sums_of(job(1));
      wait_for_products<2>();
      release(&shared.empty[before]);
      wait_for_products<1>();
      settle(first);
      add_queries(sums, first, before);
      wait_for_products<0>();
      settle(second);
      release(&shared.scores_empty[before]);
      add_queries(sums, second, before, 1);
    }

    template <bool kFirst, int kNow>
    __device__ __forceinline__ void block() {
      constexpr int kBefore = kNow ^ 1;
      clear_query_tail<kNow>();
      place_anew();
      const Stage& stage = shared.stage[kNow];
      ScoreSums score, grad;
      start_scores(score, shared.key, stage.query);
      if constexpr (kFirst) wait(&shared.value_full, 0);
      wait(&shared.grad_out_full[kNow], parity());
      start_scores(grad, shared.value, stage.grad_out);
      QuerySums first;
      if constexpr (!kFirst) {
        start_spread(kBefore);
        start_queries(first, kBefore);
      }
      wait_for_products<kFirst ? 1 : 3>();
      settle(flat(score));
      if (!job().whole) hide(score, job().query);
      Words words;
#pragma unroll
      for (int j = 0; j < kScoreQueries / 8; ++j) {
        const float2 high = numbers<kNow>(0, j), low = numbers<kNow>(1, j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = score[0][j][e];
          x = FastBinary::exp(fmaf(x, a.rule.scale, e % 2 ? -high.y : -high.x) - (e % 2 ? low.y : low.x));
        }
#pragma unroll
        for (int half = 0; half < 2; ++half)
          words[j / 2][j % 2 * 2 + half] = pair(score[0][j][2 * half], score[0][j][2 * half + 1]);
      }
      wait(&shared.scores_empty[kNow], parity() ^ 1);
      put(shared.scores[2 + kNow], words);
      wait_for_products<kFirst ? 0 : 2>();
      settle(flat(grad));
      subtract_delta<kNow>(grad);
#pragma unroll
      for (int j = 0; j < kScoreQueries / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          words[j / 2][j % 2 * 2 + half] =
              pair(score[0][j][2 * half] * grad[0][j][2 * half], score[0][j][2 * half + 1] * grad[0][j][2 * half + 1]);
      put(shared.scores[kNow], words);
      publish();
      release(&shared.scores_full[kNow]);
      if constexpr (!kFirst) finish_spread(first, kBefore);
      ++count;
    }

    // A block, of which there is one; false: it was the last.
    template <int kNow>
    __device__ __forceinline__ bool shared_step() {
      block<false, kNow>();
      return fetch<kNow ^ 1>();
    }

    __device__ __forceinline__ void run_shared() {
      place_anew();
      clear(grad_key);
      clear(grad_value);
      wait(&shared.key_full, 0);
      if (fetch<0>()) {
        clear_key_tail();
        block<true, 0>();
        if (fetch<1>())
          while (shared_step<1>() && shared_step<0>()) continue;
        const int before = (count - 1) % 2;
        start_spread(before);
        QuerySums first;
        start_queries(first, before);
        finish_spread(first, before);
      }
      store_sums();
    }
  };

  // The block of keys of that number, found by a warp or more and written by their first thread; false: there is none.
  __device__ static bool find_place(const BackwardSm90Arguments& a, unsigned index, Place& place) {
    const AttentionProblem& problem = a.problem;
    const BlockPlace at =
        place_of(problem, a.list, side_by_side(a.list, index, a.section), true, kKeys, a.turns || problem.visible.right < 0);
    const Sequence sequence = sequence_of(problem, at.sequence);
    const int key = static_cast<int>(at.block) * kKeys, keys = static_cast<int>(sequence.keys.count),
              queries = static_cast<int>(sequence.queries.count);
    if (at.block < 0 || key >= keys) return false;
    if (threadIdx.x != 0) return true;
    place.batch = at.sequence;
    place.unit = at.head;
    place.queries = queries;
    place.keys = keys;
    place.key = key;
    place.first_query = static_cast<int>(sequence.queries.begin);
    place.first_key = static_cast<int>(sequence.keys.begin) + key;
    place.heads = static_cast<int>(problem.heads) / static_cast<int>(a.list.heads);
    place.first_head = at.head * place.heads;
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
    if (!kStays && !find_place(a, blockIdx.x, shared.place[0])) return;
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0);
    if (threadIdx.x == 0) {
      init_barrier(&shared.key_full, 1);
      init_barrier(&shared.value_full, 1);
      init_barrier(&shared.keys_empty, kWarps + (a.turns ? 1 : 0));
      for (int i = 0; i < kStages; ++i) {
        init_barrier(&shared.query_full[i], 1);
        init_barrier(&shared.grad_out_full[i], 1);
        init_barrier(&shared.empty[i], kWarps);
      }
      for (int i = 0; i < 2; ++i) {
        init_barrier(&shared.scores_full[i], kWarps);
        init_barrier(&shared.scores_empty[i], kWarps);
        init_barrier(&shared.turn[i], 1);
        init_barrier(&shared.added[i], kWarps);
      }
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
    } else {
      grow_registers<kTile.registers>();
      Group group{a, shared, static_cast<int>(threadIdx.x) - 128};
      if constexpr (kShared)
        group.run_shared();
      else if constexpr (kEverything)
        group.run_everything();
      else
        group.run_own();
    }
  }
};

template <class T, int kWidth, bool kEverything, bool kStays>
__global__ void __launch_bounds__(BackwardSm90::kThreads, 1)
    attention_backward_sm90(const __grid_constant__ BackwardSm90Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Body = BackwardOnSm90<T, kWidth, kEverything, kStays>;
  extern __shared__ __align__(kBoxAlignment) char shared_boxes[];
  Body::run(arguments, *reinterpret_cast<typename Body::Shared*>(shared_boxes));
#endif
}

// Whether scores are products times the scale, seen by ranges alone.
inline bool is_plain(const AttentionProblem& problem) {
  return !(ScoreRule(problem).bends || problem.mask.data || problem.dropout != 0);
}

// Calls f(Type<T>, bool_constant<kEverything>, integral_constant<int, kTileWidth>) with what a problem needs.
template <int kWidth, class F>
void visit_backward_sm90(const AttentionProblem& problem, F&& f) {
  const auto visit = [&]<class T>(Type<T> element) {
    if (!is_plain(problem))  // refused where that tile is too narrow
      f(element, std::true_type{}, std::integral_constant<int, kWidestEverythingBackwardSm90>{});
    else
      f(element, std::false_type{}, std::integral_constant<int, kWidth>{});
  };
  problem.dtype == DType::kFloat16 ? visit(Type<__half>{}) : visit(Type<__nv_bfloat16>{});
}

template <int kWidth>
BackwardSpace backward_sm90_space(const AttentionProblem& problem, const AttentionGradients& gradients, void* workspace) {
  const int64_t pieces = (problem.width + kSumPieceSm90 - 1) / kSumPieceSm90;  // a tile may have more, filled up
  int64_t width = 0;
  visit_backward_sm90<kWidth>(problem, [&](auto, auto everything, auto tile_width) {
    width = everything() ? pieces * kSumPieceSm90 : int64_t{tile_width()};
  });
  return BackwardSpace(problem, gradients, width, true, mask_gradient_parts(problem, gradients), workspace);
}

template <class T, int kWidth, bool kEverything, bool kStays>
void launch_backward_sm90(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardSpace& space,
                          int* turns, unsigned* taken, CUstream_st* stream) {
  using Body = BackwardOnSm90<T, kWidth, kEverything, kStays>;
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
                                        taken,
                                        list,
                                        ScoreRule(problem),
                                        problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f};
  const int64_t blocks = kStays ? std::min(list.count(), int64_t{multiprocessors()}) : list.count();
  launch<attention_backward_sm90<T, kWidth, kEverything, kStays>>(arguments, blocks, Body::kThreads,
                                                                  Body::shared_bytes(problem), stream, true);
}

// Behind the rest of the workspace: how many blocks of keys have been taken, and turns.
constexpr int64_t kTakenBytes = 16;
inline int64_t turn_bytes(const BackwardSpace& space, bool deterministic) {
  return deterministic ? (space.list.count() * static_cast<int64_t>(sizeof(int)) + 15) / 16 * 16 : 0;
}

template <int kWidth>
int64_t backward_sm90_workspace(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic) {
  if (is_short_backward_sm90(problem, gradients, is_plain(problem))) return 0;
  const BackwardSpace space = backward_sm90_space<kWidth>(problem, gradients, nullptr);
  return space.bytes + kTakenBytes + turn_bytes(space, deterministic);
}

template <int kWidth>
void backward_sm90(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic, void* workspace,
                   CUstream_st* stream) {
  if constexpr (kWidth <= 128)
    if (is_short_backward_sm90(problem, gradients, is_plain(problem)))
      return short_backward_sm90<kWidth>(problem, gradients, stream);
  const BackwardSpace space = backward_sm90_space<kWidth>(problem, gradients, workspace);
  char* const behind = static_cast<char*>(workspace) + space.bytes;
  unsigned* const taken = reinterpret_cast<unsigned*>(behind);
  int* const turns = deterministic ? reinterpret_cast<int*>(behind + kTakenBytes) : nullptr;
  if (turns) check(cudaMemsetAsync(turns, 0, turn_bytes(space, true), stream), "cudaMemsetAsync");
  fill_block_map(problem, space.map, stream);
  prepare_backward(problem, gradients, space, stream, taken);
  visit_backward_sm90<kWidth>(problem, [&]<class T, bool kEverything, int kTileWidth>(Type<T>, std::bool_constant<kEverything>,
                                                                                      std::integral_constant<int, kTileWidth>) {
    constexpr int kMostStaying = backward_sm90_tile(kTileWidth, kEverything).most_keys_staying;
    const auto start = [&]<bool kStays>(std::bool_constant<kStays>) {
      launch_backward_sm90<T, kTileWidth, kEverything, kStays>(problem, gradients, space, turns, taken, stream);
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
