// The warps of the Hopper backward kernel that bring what its warpgroups compute with: queries, keys, values, masks, dropout's
// bits. And the one that waits until it is their turn to add to gradients of queries.
#pragma once

#include <cstdint>

#include "../../../../core/philox.h"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/semaphore.cuh"
#include "config.cuh"

namespace flash_online::cuda {

// ---- which blocks of queries there are

// Of a head, those that the mask shows some of the block's keys to. A whole warp asks.
template <class T, class Tile>
class BackwardOnSm90<T, Tile>::Walk {
 public:
  __device__ Walk(const BackwardSm90Arguments& a, const Place& place, int head)
      : next_(place.begin), end_(place.end), known_end_(place.begin), masked_(a.problem.mask.data) {
    const MaskMap& map = a.space.map;
    if (!map.data) return;
    kinds_ = map.row(place.batch, head, 0);
    row_step_ = map.size[2] == 1 ? 0 : static_cast<int>(map.size[3]);
    rows_ = (place.queries + kMaskMapTile - 1) / kMaskMapTile;
    first_column_ = map.size[3] == 1 ? 0 : place.key / kMaskMapTile;
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
      const unsigned left = (seen_[0] | seen_[1]) >> (kWarpSize - (known_end_ - next_));
      next_ = left ? next_ + __ffs(left) - 1 : known_end_;
      if (next_ < known_end_) {
        const int bit = kWarpSize - (known_end_ - next_);
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
    const int block = next_ + static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      bool seen = false, all = true;
      if (block < end_ && (group == 0 || second_ >= 0))
        for (int row = block * (kQueries / kMaskMapTile); row < min((block + 1) * (kQueries / kMaskMapTile), rows_); ++row) {
          const auto kind =
              static_cast<MaskKind>(kinds_[int64_t{row} * row_step_ + first_column_ + (group == 0 ? 0 : second_)]);
          seen |= kind != MaskKind::kHidden;
          all &= kind == MaskKind::kNothing;
        }
      seen_[group] = __ballot_sync(~0u, seen);
      asked_[group] = __ballot_sync(~0u, seen && !all);
    }
    known_end_ = next_ + kWarpSize;
  }

  const uint8_t* kinds_ = nullptr;  // null: no map
  int row_step_ = 0, rows_ = 0, first_column_ = 0, second_ = 0;  // the second warpgroup's column behind the first's; -1: none
  int next_, end_, known_end_;
  bool masked_;
  unsigned seen_[2] = {}, asked_[2] = {};  // bit n: block known_end_ - 32 + n
};

// ---- the loading warp

template <class T, class Tile>
struct BackwardOnSm90<T, Tile>::Loader {
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

  // Whether the queries [query, query + kQueries) see all of the block's keys by arithmetic, and all of both exist.
  __device__ static bool all_see_all(const Place& place, int query) {
    const int position = query + place.offset;
    return query + kQueries <= place.queries && place.key + kKeys <= place.keys &&
           position + kQueries - 1 - place.left <= place.key && place.key + kKeys - 1 <= position + place.right;
  }

  // By one thread.
  template <int kCount>
  __device__ static void load_keys(Boxes<kCount, kKeys>& to, const TmaTensor& from, const Place& place, uint64_t* full) {
    arrive_expect_tx(full, sizeof(to));
#pragma unroll
    for (int box = 0; box < kCount; ++box)
      tma_load(to.box[box], from.map, from.at(place.batch, place.first_head, place.first_key, box), full);
  }
  template <int kCount>
  __device__ static void load_queries(Boxes<kCount, kQueries>& to, const TmaTensor& from, const Place& place, int head,
                                      int query, uint64_t* full) {
#pragma unroll
    for (int box = 0; box < kCount; ++box)
      tma_load(to.box[box], from.map, from.at(place.batch, head, place.first_query + query, box), full);
  }

  // Where a block of kStatsRows of a head's queries has its numbers. One that does not exist is as good as the last that does:
  // its queries are hidden.
  __device__ __forceinline__ static const float* row_numbers(const BackwardSm90Arguments& a, const Place& place, int first_rows,
                                                             int row_block) {
    return a.space.rows + int64_t{first_rows + min(row_block, (place.queries - 1) / kStatsRows)} * kRowStats;
  }

  __device__ static void load_bits(const BackwardSm90Arguments& a, Shared& shared, int stage, int head, int query) {
    const Place& place = shared.place[0];
    const TransposedMaskBits& bits = a.bits;
    const auto of = [&](int i, int64_t n) { return bits.size[i] == 1 ? int64_t{0} : min(n, bits.size[i] - 1); };
    const int64_t first = of(0, place.batch) * bits.size[1] + of(1, head);
#pragma unroll
    for (int n = 0; n < kQueries / kMaskMapTile; ++n)
#pragma unroll
      for (int group = 0; group < kKeys / kMaskMapTile; ++group)
        bulk_load(shown_bits(shared, stage).word[n][4 * group],
                  bits.data + ((first * bits.size[2] + of(2, query / kMaskMapTile + n)) * bits.size[3] +
                               of(3, place.key / kMaskMapTile + group)) *
                                  TransposedMaskBits::kWords,
                  TransposedMaskBits::kWords * sizeof(unsigned), &shared.query_full[stage]);
  }
  __device__ static void load_boxes(const BackwardSm90Arguments& a, Shared& shared, int count, int head, int query, int sides) {
    const Place& place = shared.place[0];
    wait(&shared.mask_empty, count % 2 ^ 1);
    arrive_expect_tx(&shared.mask_full, __popc(sides & kAnyAsks) * sizeof(MaskBox));
#pragma unroll
    for (int group = 0; group < 2; ++group)
      if (sides & kAsks << group) {
        TmaCoord at = a.mask.at(place.batch, head, query, 0);
        at.column = place.key + group * kGroupKeys;
        tma_load(mask_box(shared, group).value, a.mask.map, at, &shared.mask_full);
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
    job.sums = (first_rows + int64_t{block} * (kQueries / kStatsRows)) * (kStatsRows * sum_width(a.space));
    if constexpr (kWalks) job.sides = sides;
    if constexpr (kStays) job.last = last, job.third = third;
    unsigned bytes = sizeof(Queries) + sizeof(shared.rows[stage]);
    if constexpr (kTransposed) {
      if (a.problem.alibi_slopes)
        job.slope = a.added_scale *
                    static_cast<const float*>(
                        a.problem.alibi_slopes)[place.batch * a.problem.alibi_stride[0] + head * a.problem.alibi_stride[1]];
      if (a.transposed_mask == TransposedMask::kBits && (sides & kAnyAsks)) bytes += sizeof(WeightBits);
    }
    arrive_expect_tx(&shared.query_full[stage], bytes);
    load_queries(shared.stage[stage].query, a.query, place, head, query, &shared.query_full[stage]);
#pragma unroll
    for (int n = 0; n < kQueries / kStatsRows; ++n) {
      const float* const numbers = row_numbers(a, place, first_rows, query / kStatsRows + n);
      constexpr int kPieces = kLowAside ? 2 : 1;  // lse, and delta
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        bulk_load(&shared.rows[stage][n][piece * kStatsRows], numbers + piece * 2 * kStatsRows,
                  sizeof(shared.rows[stage][n]) / kPieces, &shared.query_full[stage]);
    }
    if constexpr (kTransposed)
      if (a.transposed_mask == TransposedMask::kBits && (sides & kAnyAsks)) load_bits(a, shared, stage, head, query);
    if (!kStays && count == 0) load_keys(shared.value, a.value, place, &shared.value_full);
    if constexpr (kLine) wait(&shared.grad_out_empty[stage], count / 2 % 2 ^ 1);
    arrive_expect_tx(&shared.grad_out_full[stage], sizeof(OutGradients));
    load_queries(shared.stage[stage].grad_out, a.grad_out, place, head, query, &shared.grad_out_full[stage]);
    if constexpr (kTransposed)
      if (a.transposed_mask == TransposedMask::kBoxes) load_boxes(a, shared, count, head, query, sides);
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
};

// ---- warps that draw what dropout keeps

// A lane has eight keys that share draws, for an eighth of a block's queries: the even or the odd ones of a place among the
// four of wgmma.cuh.
template <class T, class Tile>
__device__ void BackwardOnSm90<T, Tile>::draw(const BackwardSm90Arguments& a, Shared& shared, int quarter) {
  const Place& place = shared.place[0];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, odd = lane / 16, upper = lane % 2;
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
    unsigned (&words)[kWarpSize] = kept_bits(a, shared, stage).word[0][lane % 16 / 2];
#pragma unroll
    for (int i = 0; i < 2; ++i) words[(4 * odd + 2 * upper + i) * 4 + quarter] = two[i];
    __syncwarp();
    if (lane == 0) arrive(&shared.drawn_full[stage]);
  }
}

// ---- the warp that waits for other blocks of threads, by one thread

// A block of queries gets what its last keys add to its gradients first, and so on down. These keys' block of threads
// precedes those that wait for it in the grid; under a causal mask it also reaches the queries sooner.
template <class T, class Tile>
__device__ void BackwardOnSm90<T, Tile>::keep_turns(const BackwardSm90Arguments& a, Shared& shared, const Place& place,
                                                    int& count) {
  for (int head = place.first_head; head < place.first_head + place.heads; ++head) {
    int* turn = a.turns + first_row_block(a.problem, a.space.list, place.batch, head) + place.begin * (kQueries / kStatsRows);
    for (int block = place.begin; block < place.end; ++block, ++count, turn += kQueries / kStatsRows) {
      const int last_query = min((block + 1) * kQueries, place.queries) - 1,
                keys = min(place.keys, last_query + place.offset + place.right + 1),
                mine = (keys - 1) / kKeys - place.key / kKeys;
      while (semaphore_read(turn) != mine) continue;
      arrive(&shared.turn[count % 2]);
      wait(&shared.added[count % 2], count / 2 % 2);
      semaphore_release(turn, mine + 1);
    }
  }
}

template <class T, class Tile>
__device__ void BackwardOnSm90<T, Tile>::keep_turns_of_places(const BackwardSm90Arguments& a, Shared& shared) {
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

}  // namespace flash_online::cuda
