// Attention's forward pass on Hopper (compute capability 9.0): TMA loads and wgmma products; docs/forward_sm90.md draws it. A
// block of threads stays for the whole launch and takes one tile of queries after another: a warp plans them, a warp loads, two
// or three warpgroups compute, of 64 queries each or, where values are split, of the same 64.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "../../core/mask.h"
#include "../../core/online_softmax.h"
#include "../../core/philox.h"
#include "../../core/problem.h"
#include "../hw/launch.h"
#include "../hw/math.cuh"
#include "../hw/mbarrier.cuh"
#include "../hw/named_barrier.cuh"
#include "../hw/register_budget.cuh"
#include "../hw/store_matrix.cuh"
#include "../hw/tma.cuh"
#include "../hw/vector.cuh"
#include "../hw/wgmma.cuh"
#include "block_map.cuh"
#include "families.h"
#include "packed_walk.cuh"
#include "schedule.cuh"
#include "tiles_sm90.h"

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
  int batch, heads, queries, keys, value_width;
  int row_tiles;  // of a head
  bool uneven;  // tiles differ in work
  bool batch_within;  // heads are counted with the batch inside, for a mask that the batch shares
  int section_heads;  // heads that run side by side, so that their keys and values stay in the L2 cache
  Visibility visible;
  float scale;  // of scores in the exponent, to the base 2: the problem's times log2(e); 1 behind a softcap
  float added_scale;  // what ALiBi and a mask add, in the scores' units: log2(e) / scale
  float softcap, softcap_scale;  // times log2(e); 2 log2(e) / softcap times the problem's scale
  const float* sinks;
  const float* alibi_slopes;
  int64_t alibi_stride[2];
  void* out;
  int64_t out_stride[3];
  MaskWay mask_way;
  bool bends;  // scores are more than products and a mask: adjust()
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

// The tiles of a block of threads: a section of heads after another, within it either a head after another or, where tiles
// differ in work, the dearest first (under a causal mask the last rows see the most keys). They are dealt out in rounds,
// forwards and backwards in turn, so that the sums of work agree. A section begins with a round of its own: that keeps the
// pairs of rounds together.
struct TileWalk {
  int round = 0, section = 0, first = 0;  // `first` of this round in the section

  struct Place {
    int batch, head, row_tile;  // batch -1: no more
  };
  __device__ Place next(const ForwardSm90Arguments& a) {
    const int blocks = static_cast<int>(gridDim.x), place = static_cast<int>(blockIdx.x);
    for (; section * a.section_heads < a.batch * a.heads; ++section, first = 0) {
      const int first_head = section * a.section_heads, heads = min(a.section_heads, a.batch * a.heads - first_head);
      while (first < heads * a.row_tiles) {
        const int index = first + (round % 2 ? blocks - 1 - place : place);
        ++round;
        first += blocks;
        if (index < heads * a.row_tiles) {
          const int level = a.uneven ? index / heads : index % a.row_tiles;
          const int head = first_head + (a.uneven ? index - level * heads : index / a.row_tiles);
          const int row_tile = a.row_tiles - 1 - level;
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
  static constexpr int kWidthBoxes = (kTile.width + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kValueBoxes = (kTile.value_width + kBoxColumns - 1) / kBoxColumns;
  static constexpr int kWidthSteps = kTile.width / 16, kKeySteps = kKeys / 16;
  static constexpr int kOutColumns = kTile.value_width / (kTile.warpgroups / kGroups);  // of a warpgroup
  static constexpr int kScores = kKeys / 2, kOuts = kOutColumns / 2;  // registers of a thread
  static constexpr int kKeyParts = kTile.key_parts(), kKeyStages = kTile.key_stages(), kKeyBoxes = kWidthBoxes / kKeyParts;
  static constexpr unsigned kRowBytes = kBoxColumns * sizeof(T);
  static constexpr int kOutRows = 16;  // of a warp: it stores its rows by itself
  // What the warpgroups take must be there: the block has what all threads were launched with, in eights, else they wait for
  // good.
  static_assert(kTile.warpgroups * kTile.registers + kTile.loader_registers + kTile.drawers / 4 * kTile.drawer_registers <=
                (65536 / (kTile.threads() * kTile.blocks) / 8 * 8) * (kTile.threads() / 128));
  static_assert(!kPacked || kTile.value_width <= kWarp * kPerVector<T>);
  static_assert(kTile.width % 16 == 0 && kTile.value_width % 16 == 0 && kKeys % 16 == 0);

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
  static_assert(!kEverything || (kKeys == kMapBlock && kRows == kMapBlock && kKeys == kBoxColumns));
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

  // ---- the planning warp: what comes next, off everybody's path

  // The mask's map of a tile whose other numbers are there.
  __device__ static void plan_mask(const ForwardSm90Arguments& a, Job& job, int lane) {
    const uint8_t* const kinds = a.map + job.batch * a.map_batch_step + job.head * a.map_head_step;
    int shift = 0;
    while (job.end - job.begin > kMapBits << shift) ++shift;
    if (lane == 0) job.map.shift = shift;
    const int words = (((job.end - job.begin - 1) >> shift) + 32) / 32;
#pragma unroll 1
    for (int word = 0; word < words; ++word) {
      const int block = job.begin + ((word * 32 + lane) << shift);
#pragma unroll 1
      for (int group = 0; group < kGroups; ++group) {
        const int begin = max(block, job.group[group].begin), end = min(block + (1 << shift), job.group[group].end);
        const int row_block = min(job.first_query / kMapBlock + group, (a.queries - 1) / kMapBlock);
        const uint8_t* const row = kinds + int64_t{row_block} * a.map_row_step;
        bool seen = false, plain = begin >= job.group[group].whole_begin && end <= job.group[group].whole_end &&
                                   (a.map || a.mask_way == MaskWay::kNone);
#pragma unroll 1
        for (int n = begin; n < end; ++n) {
          const auto kind = a.map ? static_cast<MaskKind>(row[n * a.map_column_step]) : MaskKind::kMixed;
          seen |= kind != MaskKind::kHidden;
          if (a.map) plain &= kind == MaskKind::kNothing;
        }
        const unsigned all_seen = __ballot_sync(~0u, seen), all_plain = __ballot_sync(~0u, plain);
        if (lane == 0) {
          job.map.group[group].taken[word] = all_seen;
          job.map.group[group].plain[word] = all_plain;
        }
      }
    }
    __syncwarp();
    // A warpgroup of which the mask hides all takes one block, for the sake of uniformity.
    unsigned* const taken = job.map.group[min(lane, kGroups - 1)].taken;
    int last = -1;
    if (lane < kGroups) {
      for (int word = 0; word < words; ++word)
        if (taken[word]) last = word * 32 + 31 - __clz(taken[word]);
      if (last < 0) {
        last = (job.group[lane].begin - job.begin) >> shift;
        taken[last / 32] |= 1u << last % 32;
      }
    }
    __syncwarp();
    for (int word = lane; word < words; word += kWarp) {
      unsigned read = 0;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) read |= job.map.group[group].taken[word];
      job.map.read[word] = read;
    }
    __syncwarp();
    // Nor does it skip more at a time than there are stages beside the one whose values it holds: it would wait for good.
    if (lane < kGroups) {
      int skipped = -1;  // -1: none is taken yet
#pragma unroll 1
      for (int word = 0; word <= last / 32; ++word) {
        unsigned left = job.map.read[word], mine = taken[word];
        if (word == last / 32) left &= ~0u >> (31 - last % 32);
#pragma unroll 1
        for (; left; left &= left - 1) {
          const unsigned bit = left & -left;
          if (mine & bit) {
            skipped = 0;
          } else if (skipped >= 0 && (++skipped << shift) > kSkips) {
            mine |= bit;
            skipped = 0;
          }
        }
        taken[word] = mine;
      }
    }
    __syncwarp();
  }

  __device__ static void plan(const ForwardSm90Arguments& a, Shared& shared, int lane) {
    RingPlace<kJobs> place;
    Walk walk = [&] {
      if constexpr (kPacked)
        return Walk(a.packed, shared.packed.walk);
      else
        return Walk{};
    }();
    int queries = a.queries, keys = a.keys;
    [[maybe_unused]] int query_begin = 0, key_begin = 0, sequence = -1;
    [[maybe_unused]] unsigned wanted = 0;
    for (bool more = true; more; place.advance()) {
      TileWalk::Place next;
      if constexpr (kPacked) {
        const typename Walk::Place of = walk.next();
        next = {of.sequence, of.head, of.row_tile};
        if (next.batch >= 0 && next.batch != sequence) {
          sequence = next.batch;
          const Rows query_rows = packed_rows(a.packed.query_starts, sequence, a.queries, a.packed.total_queries),
                     key_rows = packed_rows(a.packed.key_starts, sequence, a.keys, a.packed.total_keys);
          query_begin = static_cast<int>(query_rows.begin);
          queries = static_cast<int>(query_rows.count);
          key_begin = static_cast<int>(key_rows.begin);
          keys = static_cast<int>(key_rows.count);
        }
      } else {
        next = walk.next(a);
      }
      more = next.batch >= 0;
      Visibility visible = a.visible;
      if (kPacked && a.lower_right) visible.offset = keys - queries;
      const int first = next.row_tile * kTile.queries(), last = min(first + kTile.queries(), queries) - 1;
      const KeyRange band = band_of(visible, first, kFar);
      const int band_begin = static_cast<int>(band.begin), band_end = static_cast<int>(band.end);
      // Blocks that the queries between the tile's rows r and s see some of; the whole tile at least one, so that it has a
      // result.
      const auto begin_of = [&](int r) { return max(band_begin + r, 0) / kKeys; };
      const auto end_of = [&](int s) { return (min(band_end + s, keys) + kKeys - 1) / kKeys; };
      const int rows = last - first + 1;
      int begin = begin_of(0), end = end_of(rows - 1);
      if (end <= begin) begin = 0, end = 1;
      wait(&shared.job_empty[place.stage], place.parity ^ 1);
      Job& job = shared.job[place.stage];
      if (lane < kGroups) {
        // A warpgroup behind the last query takes one block, for the sake of uniformity.
        const int first_row = lane * kRows, last_row = min(first_row + kRows, rows) - 1;
        const int mine = first_row < rows ? min(begin_of(first_row), end - 1) : begin;
        job.group[lane].begin = mine;
        job.group[lane].end = first_row < rows ? min(max(end_of(last_row), mine + 1), end) : mine + 1;
        job.group[lane].whole_begin = (max(band_begin + last_row, 0) + kKeys - 1) / kKeys;
        job.group[lane].whole_end = min(band_end + first_row, keys) / kKeys;
      }
      if (lane == 0) {
        job.batch = next.batch;
        job.head = next.head;
        job.first_query = first;
        job.band_begin = band_begin;
        job.band_end = band_end;
        job.begin = begin;
        job.end = end;
        if constexpr (kPacked) job.of = {query_begin, key_begin, queries, keys, static_cast<int>(visible.offset)};
      }
      if constexpr (kEverything)
        if (more && lane == 0 && a.alibi_slopes)
          job.slope = a.alibi_slopes[next.batch * a.alibi_stride[0] + next.head * a.alibi_stride[1]] * a.added_scale;
      __syncwarp();
      if constexpr (kMasked)
        if (more) plan_mask(a, job, lane);
      if (lane == 0) arrive(&shared.job_full[place.stage]);
      if constexpr (kPacked) {
        // Who takes tiles takes them late: what is left is then shared out by who has time.
        if (more && a.packed.taken) wait(&shared.packed.tile_wanted, wanted), wanted ^= 1;
        walk.take();
      }
    }
  }

  // ---- the loading warp: one thread of it

  __device__ __forceinline__ static void load_value(const ForwardSm90Arguments& a, Value& to, int row, int head, int batch,
                                                    uint64_t* there) {
    arrive_and_expect(there, sizeof(Value));
#pragma unroll
    for (int box = 0; box < kValueBoxes; ++box) load_box(to.box[box], a.value, {box * kBoxColumns, row, head, batch}, there);
  }

  struct Loader {
    const ForwardSm90Arguments& a;
    Shared& shared;
    static constexpr bool kHoldsJob = kEverything || kPacked;  // to the end of its tile
    RingPlace<kJobs> next;
    RingPlace<kQueries> query;
    RingPlace<kKeyStages> place;
    int batch, head, first_query, begin, end, stage;  // of the tile whose queries are loaded or being loaded
    int group;  // the first whose queries are not

    __device__ void fetch() {
      wait(&shared.job_full[next.stage], next.parity);
      const Job& job = shared.job[next.stage];
      batch = job.batch;
      head = job.head;
      first_query = query_begin(job) + job.first_query;
      begin = job.begin;
      end = job.end;
      stage = next.stage;
      if (!kHoldsJob) arrive(&shared.job_empty[stage]);
      next.advance();
      group = batch < 0 ? kGroups : 0;
    }
    // The tile's queries, as far as their buffers are free, or all of them.
    __device__ void load_queries(bool all) {
#pragma unroll 1
      for (; group < kGroups; ++group) {
        if (!all && !is_over(&shared.query_empty[query.stage], query.parity ^ 1)) return;
        wait(&shared.query_empty[query.stage], query.parity ^ 1);
        arrive_and_expect(&shared.query_full[query.stage], sizeof(Query));
#pragma unroll
        for (int box = 0; box < kWidthBoxes; ++box)
          load_box(shared.query[query.stage].box[box], a.query,
                   {box * kBoxColumns, first_query + group * kRows, head / a.heads_a_query, batch * a.query_batch_step},
                   &shared.query_full[query.stage]);
        query.advance();
      }
    }
    __device__ void run() {
      fetch();
      while (batch >= 0) {
        const int key_head = head / a.heads_a_key, value_head = head / a.heads_a_value;
        const int key_batch = batch * a.key_batch_step, value_batch = batch * a.value_batch_step;
        const int end_block = end, tile = stage;
        const Job& job = shared.job[tile];
        const int first_block = next_read(job, begin, end), key_row = key_begin(job);
        [[maybe_unused]] const int mask_batch = batch * a.mask_batch_step, mask_head = head * a.mask_head_step,
                                   mask_query = first_query;
        // A warpgroup behind its last block waits for the next tile before it releases what others see.
        [[maybe_unused]] int want_at = end_block;
        if constexpr (kPacked) {
#pragma unroll
          for (int i = 0; i < kGroups; ++i) want_at = min(want_at, job.group[i].end);
          want_at = max(want_at - kWantAhead, first_block);
        }
#pragma unroll 1
        for (int block = first_block; block < end_block; block = next_read(job, block + 1, end_block)) {
          wait(&shared.key_empty[place.stage], place.parity ^ 1);
          if constexpr (kFloatMask) {
            unsigned bytes = sizeof(Key);
#pragma unroll 1
            for (int g = 0; g < kGroups; ++g) bytes += wants_mask(job, g, block) ? kRowBytes * a.mask_rows : 0;
            arrive_and_expect(&shared.key_full[place.stage], bytes);
#pragma unroll 1
            for (int g = 0; g < kGroups; ++g)
              if (wants_mask(job, g, block))
                load_box(shared.mask.stage[place.stage].box[g], a.mask_boxes,
                         {block * kKeys, a.mask_rows == 1 ? 0 : mask_query + g * kRows, mask_head, mask_batch},
                         &shared.key_full[place.stage]);
          } else {
            arrive_and_expect(&shared.key_full[place.stage], sizeof(Key));
          }
#pragma unroll
          for (int box = 0; box < kWidthBoxes; ++box) {
            if (box > 0 && box % kKeyBoxes == 0) {  // the next part
              place.advance();
              wait(&shared.key_empty[place.stage], place.parity ^ 1);
              arrive_and_expect(&shared.key_full[place.stage], sizeof(Key));
            }
            load_box(shared.key[place.stage].box[box % kKeyBoxes], a.key,
                     {box * kBoxColumns, key_row + block * kKeys, key_head, key_batch}, &shared.key_full[place.stage]);
          }
          // This tile's queries behind its first keys, the next tile's as early as they find a buffer.
          if (block == first_block) {
            load_queries(true);
            if constexpr (!kPacked) fetch();
          } else if (!kPacked || stage != tile) {
            load_queries(false);
          }
          if constexpr (kPacked)
            if (block == want_at) arrive(&shared.packed.tile_wanted);
          if constexpr (!kSplit) {
            wait(&shared.value_empty[place.stage], place.parity ^ 1);
            uint64_t* value_there = &shared.value_full[place.stage];
            if constexpr (kPacked)
              if ((block + 1) * kKeys > job.of.keys) value_there = &shared.packed.value_there[place.stage];
            load_value(a, shared.value[place.stage], key_row + block * kKeys, value_head, value_batch, value_there);
          }
          place.advance();
          if (kPacked && stage == tile && (block + 1 == end_block || is_over(&shared.job_full[next.stage], next.parity)))
            fetch();
        }
        if (kHoldsJob) arrive(&shared.job_empty[tile]);
      }
    }
  };

  // ---- warps that draw what dropout keeps: the bits come with the keys

  __device__ static void draw(const ForwardSm90Arguments& a, Shared& shared, int warp, int lane) {
    if (!a.rng) return;
    RingPlace<kJobs> next;
    RingPlace<kStages> place;
    // The same in all lanes, in the compiler's eyes too: what follows from these and the keys alone is made once for a warp.
    const auto shared_by_lanes = [](auto x) { return __shfl_sync(~0u, x, 0); };
    const Philox random(shared_by_lanes(a.rng[0]), shared_by_lanes(a.rng[1]));
    const int part = warp % kParts;
    const auto row = [&](int set) { return (warp / kParts + 2 * set) * kWarp + lane; };
    while (true) {
      wait(&shared.job_full[next.stage], next.parity);
      const Job& job = shared.job[next.stage];
      if (job.batch < 0) return;
      const int64_t batch = a.batch_begin + shared_by_lanes(job.batch);
      const int head = shared_by_lanes(job.head);
      Philox::OfQuery query[kGroups];
#pragma unroll
      for (int set = 0; set < kGroups; ++set) query[set] = random.of_query(head, job.first_query + row(set));
#pragma unroll 1
      for (int block = next_read(job, job.begin, job.end); block < job.end; block = next_read(job, block + 1, job.end)) {
        constexpr int kDraws = kPartKeys / 4, kAtOnce = 2;  // of a query; what the registers hold
        const int first = shared_by_lanes(block * (kKeys / 4)) + part * kDraws;
        unsigned kept[kGroups] = {};
#pragma unroll 1
        for (int n = 0; n < kDraws; n += kAtOnce) {
#pragma unroll
          for (int set = 0; set < kGroups; ++set) kept[set] >>= 4 * kAtOnce;
#pragma unroll
          for (int m = 0; m < kAtOnce; ++m) {
            const Philox::OfGroup group = random.of_group(batch, head, first + n + m);
#pragma unroll
            for (int set = 0; set < kGroups; ++set) {
              uint32_t words[4];
              random.words(query[set], group, words);
#pragma unroll
              for (int i = 0; i < 4; ++i)
                if (words[i] >= a.drop_threshold) kept[set] |= 1u << (32 - 4 * kAtOnce + 4 * m + i);
            }
          }
        }
        wait(&shared.key_empty[place.stage], place.parity ^ 1);
#pragma unroll
        for (int set = 0; set < kGroups; ++set) shared.drawn.kept[place.stage][row(set)][part] = kept[set] >> (32 - kPartKeys);
        __syncwarp();
        if (lane == 0) arrive(&shared.key_full[place.stage]);
        place.advance();
      }
      __syncwarp();
      if (lane == 0) arrive(&shared.job_empty[next.stage]);
      next.advance();
    }
  }

  // ---- values split: a thread of another warp loads them, whose one buffer becomes free out of turn with those of keys

  __device__ static void load_values(const ForwardSm90Arguments& a, Shared& shared) {
    RingPlace<kJobs> next;
    RingPlace<kStages> place;
    while (true) {
      wait(&shared.job_full[next.stage], next.parity);
      const Job& job = shared.job[next.stage];
      if (job.batch < 0) return;
      const int head = job.head / a.heads_a_value, batch = job.batch * a.value_batch_step, begin = job.begin, end = job.end;
      arrive(&shared.job_empty[next.stage]);
      next.advance();
#pragma unroll 1
      for (int block = begin; block < end; ++block) {
        wait(&shared.value_empty[place.stage], place.parity ^ 1);
        load_value(a, shared.value[place.stage], block * kKeys, head, batch, &shared.value_full[place.stage]);
        place.advance();
      }
    }
  }

  // ---- packed: a warp that clears the values behind a sequence's last key, whose weights are 0, but 0 times anything is not

  __device__ static void clear_tails(Shared& shared, int lane) {
    RingPlace<kJobs> next;
    int blocks = 0;  // loaded before this tile
    unsigned parities = 0;  // of value_there, a bit a stage
    while (true) {
      wait(&shared.job_full[next.stage], next.parity);
      const Job& job = shared.job[next.stage];
      if (job.batch < 0) return;
      blocks += job.end - job.begin;
      const int valid = job.of.keys - (job.end - 1) * kKeys;
      __syncwarp();
      if (lane == 0) arrive(&shared.job_empty[next.stage]);
      next.advance();
      if (valid >= kKeys) continue;
      const int stage = (blocks - 1) % kStages;
      wait(&shared.packed.value_there[stage], parities >> stage & 1);
      parities ^= 1u << stage;
      constexpr int kChunks = static_cast<int>(kRowBytes) / kVectorBytes;
      const int first = max(valid, 0) * kChunks;
#pragma unroll
      for (int box = 0; box < kValueBoxes; ++box) {
        uint4* const chunks = reinterpret_cast<uint4*>(shared.value[stage].box[box]);
        for (int n = first + lane; n < kKeys * kChunks; n += kWarp) chunks[n] = {};
      }
      publish_to_engines();
      __syncwarp();
      if (lane == 0) arrive(&shared.value_full[stage]);
    }
  }

  // ---- packed: a warp for the rows that no sequence owns: 0, and an lse of -inf

  __device__ static void clear_unowned(const ForwardSm90Arguments& a, int lane) {
#pragma unroll 1
    for (int n = static_cast<int>(blockIdx.x); n <= a.packed.sequences; n += static_cast<int>(gridDim.x)) {
      const Rows rows = unowned_rows(a.packed.query_starts, a.packed.sequences, n, a.queries, a.packed.total_queries);
      const int begin = static_cast<int>(rows.begin), end = begin + static_cast<int>(rows.count);
#pragma unroll 1
      for (int row = begin; row < end; ++row)
#pragma unroll 1
        for (int head = 0; head < a.heads; ++head) {
          T* const to = static_cast<T*>(a.out) + head * a.out_stride[1] + row * a.out_stride[2];
          const int column = lane * kPerVector<T>;
          if (column < a.value_width) *reinterpret_cast<uint4*>(to + column) = {};
          if (lane == 0 && a.lse) {
            const int64_t at = head * a.lse_stride[1] + row;
            a.lse[at] = -INFINITY;
            a.lse_low[at] = 0;
          }
        }
    }
  }

  // ---- a computing warpgroup

  using Row = OnlineSoftmax<float, Binary>;

  // Weights are measured from a maximum that is raised only where a thread's weights of a block sum to more than this: in
  // float16 a weight must stay below 65504, and float32 sums of rows and products must not overflow.
  static constexpr float kLargestSum = std::is_same_v<T, __half> ? 0x1p15f : 0x1p24f;
  static constexpr float kSlack = 8;  // where values are split: weights are up to 2^this before the maximum is raised

  struct Group {
    const ForwardSm90Arguments& a;
    Shared& shared;
    int group;  // which 64 of the tile's queries: the warpgroup's number, or 0 where values are split
    int part;  // which of the values' columns: 0, or the warpgroup's number
    int warp, lane;
    RingPlace<kJobs> next;
    RingPlace<kQueries> query;
    RingPlace<kKeyStages> key;
    RingPlace<kStages> value;
    int job;  // the tile's place among the jobs
    int block, end, whole_begin, whole_end;  // the block at hand, and this warpgroup's numbers in the job
    // Blocks that only other warpgroups see: before the next of this one's, and behind the tile's last.
    int skipped = 0, behind = 0;
    // What a mask does to a block: looked up a block ahead.
    struct Masked {
      unsigned shown;  // bits of a bool mask, as MaskBits has them
      bool plain;
    };
    struct Walk {
      int next_block, next_skipped;  // `block` of the next, and what is read before it for others
      Masked next, now;
      // Of 32 blocks, from `from` on, those behind the next: what the tile reads, what this warpgroup takes, its plain ones.
      unsigned read, taken, plain;
      int from;
      const unsigned* bits;  // of the lane's rows
    };
    [[no_unique_address]] std::conditional_t<kMasked, Walk, Nothing> walk;
    [[no_unique_address]] std::conditional_t<kEverything, unsigned, Nothing> kept;  // what dropout keeps: kept_bit()
    float out[kOuts];
    float score[kScores];
    unsigned weight[kScores / 2];  // of 16-bit pairs: the left operand of the second product
    unsigned held[kTile.held_query ? kWidthSteps : 1][4];
    Row row[2];  // rows lane / 4 and lane / 4 + 8 of the warp's 16; sums are a thread's own
    bool accumulate;  // whether `out` holds something of this tile

    __device__ __forceinline__ void take_turn() {
      if constexpr (kTile.in_turn) sync_named(kTurn + group + part, 256);
    }
    __device__ __forceinline__ void pass_turn() {
      if constexpr (kTile.in_turn) arrive_named(kTurn + (group + part + 1) % kTile.warpgroups, 256);
    }
    __device__ __forceinline__ void release(uint64_t* barrier) {
      if (lane == 0) arrive(barrier);
    }

    // Where lane's 16 bytes of a 16 x 16 matrix stand in a box, the one for load_matrices and store_matrices.
    __device__ __forceinline__ unsigned matrix_place(int box_row, int chunk) const {
      const int r = box_row + lane % 16;
      return r * kRowBytes + ((chunk + lane / 16) ^ (r % 8)) * 16;
    }

    __device__ __forceinline__ void hold_query() {
      const unsigned base = shared_address(shared.query[query.stage].box);
#pragma unroll
      for (int step = 0; step < kWidthSteps; ++step)
        load_matrices(held[step], base + step / 4 * kRows * kRowBytes + matrix_place(16 * warp, step % 4 * 2));
    }

    // In 64 bits there are three times the instructions between the first products; in 32 one more register is held.
    __device__ __forceinline__ static uint64_t further(uint64_t descriptor, unsigned bytes) {
      return kEverything ? moved(descriptor, bytes) : descriptor + bytes / kDescriptorStep;
    }

    // Where keys come in two parts, the first is done and released behind it.
    __device__ __forceinline__ void start_scores() {
      uint64_t keys = rows_descriptor(shared_address(shared.key[key.stage].box));
      begin_products();
      if constexpr (kTile.held_query) {
#pragma unroll
        for (int step = 0; step < kWidthSteps; ++step)
          WarpgroupProduct<T, kKeys>::template registers_shared<false>(
              score, held[step], further(keys, step / 4 * kKeys * kRowBytes + step % 4 * 32), step > 0);
      } else {
        uint64_t queries = rows_descriptor(shared_address(shared.query[query.stage].box));
        if constexpr (kSplit) queries = made_anew(queries);
        constexpr int kPartSteps = kWidthSteps / kKeyParts;
#pragma unroll
        for (int step = 0; step < kWidthSteps; ++step) {
          if (step > 0 && step % kPartSteps == 0) {
            commit_products();
            RingPlace<kKeyStages> next_part = key;
            next_part.advance();
            wait(&shared.key_full[next_part.stage], next_part.parity);
            keys = rows_descriptor(shared_address(shared.key[next_part.stage].box));
            begin_products();
          }
          WarpgroupProduct<T, kKeys>::template shared_shared<false>(
              score, further(queries, step / 4 * kRows * kRowBytes + step % 4 * 32),
              further(keys, step % kPartSteps / 4 * kKeys * kRowBytes + step % 4 * 32), step > 0);
        }
      }
      commit_products();
      if constexpr (kKeyParts == 2) {
        wait_for_products<1>();
        release_key();
      }
    }

    __device__ __forceinline__ void start_out() {
      const unsigned first_box = shared_address(shared.value[value.stage].box[part * kOutColumns / kBoxColumns]);
      uint64_t values = columns_descriptor(first_box, kKeys * kRowBytes);
      if constexpr (kSplit) values = made_anew(values);
      begin_products();
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        const unsigned left[4] = {weight[4 * step], weight[4 * step + 1], weight[4 * step + 2], weight[4 * step + 3]};
        WarpgroupProduct<T, kOutColumns>::template registers_shared<true>(out, left, further(values, step * 16 * kRowBytes),
                                                                          step > 0 || accumulate);
      }
      commit_products();
      accumulate = true;
    }

    // -inf for the keys that a row does not see, in a block that not all rows see all of.
    __device__ __forceinline__ void hide() {
      // Registers are too few to hold these with more to do.
      constexpr bool kLooksUp = kPacked || kEverything;
      const auto& mine_of_tile = shared.job[job].group[group];
      const bool left = block < (kLooksUp ? mine_of_tile.whole_begin : whole_begin),
                 right = block >= (kLooksUp ? mine_of_tile.whole_end : whole_end);
      if (!left && !right) [[likely]]
        return;
      const int first = block * kKeys, mine = first + lane % 4 * 2, row_of_tile = group * kRows + 16 * warp;
      const int band_begin = shared.job[job].band_begin + row_of_tile, band_end = shared.job[job].band_end + row_of_tile;
      const int keys = ForwardSm90Kernel::keys(a, shared.job[job]);
      const int all_from = band_begin + 15 - first, all_to = min(band_end, keys) - first;
      if (right) {
        const int to[2] = {min(band_end + lane / 4, keys) - mine, min(band_end + lane / 4 + 8, keys) - mine};
#pragma unroll
        for (int step = 0; step < kKeySteps; ++step) {
          if (16 * step + 16 <= all_to) continue;
#pragma unroll
          for (int i = 0; i < 8; ++i)
            if (16 * step + i / 4 * 8 + i % 2 >= to[i / 2 % 2]) score[8 * step + i] = -INFINITY;
        }
      }
      if (left) {
        const int from[2] = {band_begin + lane / 4 - mine, band_begin + lane / 4 + 8 - mine};
#pragma unroll
        for (int step = 0; step < kKeySteps; ++step) {
          if (16 * step >= all_from) continue;
#pragma unroll
          for (int i = 0; i < 8; ++i)
            if (16 * step + i / 4 * 8 + i % 2 < from[i / 2 % 2]) score[8 * step + i] = -INFINITY;
        }
      }
    }

    // Scores as they come from the product to scores in the units of `scale`: softcap and ALiBi.
    __device__ __forceinline__ void adjust() {
      if (a.softcap > 0) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) score[i] = a.softcap * tanh_of_exponent(score[i] * a.softcap_scale);
      }
      if (a.alibi_slopes) {
        const Job& tile = shared.job[job];
        const int row = tile.first_query + group * kRows + 16 * warp + lane / 4;
        int offset = static_cast<int>(a.visible.offset);
        if constexpr (kPacked) offset = tile.of.offset;
        const float distance = static_cast<float>(row + offset - block * kKeys - lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < kScores; ++i)
          score[i] = fmaf(-tile.slope, fabsf(distance + static_cast<float>(i / 2 % 2 * 8 - i / 4 * 8 - i % 2)), score[i]);
      }
    }

    // ---- masks and dropout

    // Beside the product of the block's scores.
    __device__ __forceinline__ void fetch_kept() {
      if constexpr (kEverything) {
        if (a.rng) {
          // Of a query's keys the lane has two of every eight.
          const auto* const rows = &shared.drawn.kept[key.stage][group * kRows + 16 * warp + lane / 4];
          const auto own = [&](const auto& of_row) {
            constexpr unsigned kTwo = 0x03030303;
            const uint2 keys = reinterpret_cast<const uint2&>(of_row);
            return (keys.x >> lane % 4 * 2 & kTwo) | (keys.y >> lane % 4 * 2 & kTwo) << 4;
          };
          kept = own(rows[0]) | own(rows[8]) << 2;
        }
      }
    }
    static constexpr unsigned kept_bit(int i) { return 1u << (i / 4 % 4 * 8 + i / 16 * 4 + i % 4); }

    // The next block of the walk, `end` or more if there is none: arithmetic for the weights' exponentials to hide.
    __device__ __forceinline__ void look_ahead() {
      if constexpr (kMasked) {
        const unsigned lowest = walk.taken & -walk.taken, below = lowest - 1;
        walk.next_block = walk.from + __popc(below);
        walk.next_skipped += __popc(walk.read & below);
        walk.next.plain = walk.plain & lowest;
        if (a.mask_way == MaskWay::kBits) walk.next.shown = __ldg(walk.bits + min(walk.next_block, a.bits_last_unit) * kWarp);
        walk.taken ^= lowest;
        walk.read &= ~(lowest | below);
      }
    }
    // Words of the map until one has a block for the next look_ahead(), or is the last.
    __device__ __forceinline__ void load_words() {
      const auto& map = shared.job[job].map;
      const int begin = shared.job[job].begin, shift = map.shift, n = walk.from - begin;
      walk.read = bits_of_blocks(map.read, shift, end - begin, n);
      walk.taken = bits_of_blocks(map.group[group].taken, shift, end - begin, n);
      walk.plain = bits_of_blocks(map.group[group].plain, shift, end - begin, n);
    }
    __device__ __forceinline__ void next_words() {
#pragma unroll 1
      while (walk.taken == 0 && walk.from + 32 < end) {
        walk.next_skipped += __popc(walk.read);
        walk.from += 32;
        load_words();
      }
    }

    template <class Element>
    __device__ __forceinline__ void add_boxes() {
      const unsigned base = shared_address(shared.mask.stage[key.stage].box[group]);
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        unsigned words[4];
        load_matrices(words, base + (a.mask_rows == 1 ? (2 * step + lane / 16) * 16 : matrix_place(16 * warp, 2 * step)));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 values = unpair<Element>(words[i]);
          score[8 * step + 2 * i] = fmaf(values.x, a.added_scale, score[8 * step + 2 * i]);
          score[8 * step + 2 * i + 1] = fmaf(values.y, a.added_scale, score[8 * step + 2 * i + 1]);
        }
      }
    }

    __device__ __forceinline__ void mask_scores() {
      if constexpr (kFloatMask) {
        a.mask_way == MaskWay::kHalves ? add_boxes<__half>() : add_boxes<__nv_bfloat16>();
      } else if (a.mask_way == MaskWay::kBits) {
#pragma unroll
        for (int i = 0; i < kScores; ++i)
          if (!(walk.now.shown >> i & 1)) score[i] = -INFINITY;
      }
    }

    __device__ __forceinline__ void settle_scores() {
      if constexpr (kEverything) {
        if (a.bends) [[unlikely]]
          adjust();
      }
      if constexpr (kMasked) {
        if (walk.now.plain) return;
        mask_scores();
      }
      hide();
    }

    // Raises the rows' maxima to the block's; returns in factor what was accumulated before must be multiplied by.
    __device__ __forceinline__ void raise(float (&factor)[2]) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float most[2] = {score[2 * r], score[2 * r + 1]};
#pragma unroll
        for (int i = 1; i < kScores / 4; ++i) {
          most[0] = fmaxf(most[0], score[4 * i + 2 * r]);
          most[1] = fmaxf(most[1], score[4 * i + 2 * r + 1]);
        }
        float all = fmaxf(most[0], most[1]);
        all = fmaxf(all, __shfl_xor_sync(~0u, all, 1));
        all = fmaxf(all, __shfl_xor_sync(~0u, all, 2));
        factor[r] = kSplit ? row[r].raise_beyond(kSlack, all * a.scale) : row[r].raise(all * a.scale);
      }
    }

    // What weights are measured from. Under a mask a row without a reference yet may stay so for many blocks: measured from
    // the lowest number, what it sees is infinite, and what it does not see is 0.
    __device__ __forceinline__ static float reference(float max) {
      if constexpr (kEverything) return max == -INFINITY ? -FLT_MAX : max;
      return pivot(max);
    }

    // Scores to weights, in place; sums of a thread's.
    __device__ __forceinline__ void weigh(float (&sum)[2]) {
      const float pivots[2] = {reference(row[0].max), reference(row[1].max)};
      sum[0] = sum[1] = 0;
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const int r = i / 2 % 2;
        score[i] = exp2_flushed(fmaf(score[i], a.scale, -pivots[r]));
        sum[r] += score[i];
      }
    }

    __device__ __forceinline__ void pack_weights() {
      if constexpr (kEverything) {
        if (a.rng) {
#pragma unroll
          for (int i = 0; i < kScores; ++i)
            if (!(kept & kept_bit(i))) score[i] = 0;
        }
      }
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) weight[i] = pair(score[2 * i], score[2 * i + 1]);
    }
    __device__ static unsigned pair(float x, float y) {
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 both = __floats2half2_rn(x, y);
        return reinterpret_cast<const unsigned&>(both);
      } else {
        const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
        return reinterpret_cast<const unsigned&>(both);
      }
    }

    // The block's weights measured from the maxima so far: no pass over the scores for their maximum, which hardly ever moves
    // far after the first block. Where it does, the scores are made again and everything is moved to the new maximum.
    __device__ __forceinline__ void next_weights() {
      look_ahead();
      float sum[2];
      weigh(sum);
      const bool astray = !(sum[0] < kLargestSum && sum[1] < kLargestSum) ||
                          (!kEverything && (row[0].max == -INFINITY || row[1].max == -INFINITY));
      // Asked before the wait, or the compiler puts the weights' work behind it.
      const bool any_astray = any_named(kVote + group, 128, astray);
      wait_for_products<0>();
      release_value();
      if (any_astray) [[unlikely]] {
        start_scores();
        wait_for_products<0>();
        settle_scores();
        float factor[2];
        raise(factor);
#pragma unroll
        for (int i = 0; i < kOuts; ++i) out[i] *= factor[i / 2 % 2];
        weigh(sum);
      }
      row[0].add(sum[0]);
      row[1].add(sum[1]);
    }

    // The same where values are split: from the block's maxima, so that its keys are not kept for a second product.
    __device__ __forceinline__ void raised_weights() {
      float factor[2], sum[2];
      raise(factor);
      weigh(sum);
      // Asked before the wait and of the weights too, or the compiler puts their work behind it.
      const bool moved =
          any_named(kVote + part, 128, factor[0] != 1 || factor[1] != 1 || !(sum[0] < kLargestSum && sum[1] < kLargestSum));
      wait_for_products<0>();
      release_value();
      if (moved) {
#pragma unroll
        for (int i = 0; i < kOuts; ++i) out[i] *= factor[i / 2 % 2];
      }
      row[0].add(sum[0]);
      row[1].add(sum[1]);
    }

    // The rows' lse, and what their results are to be multiplied by.
    __device__ __forceinline__ void finish_rows(int of_job, float (&inverse)[2]) {
      const Job& tile = shared.job[of_job];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row[r].sum += __shfl_xor_sync(~0u, row[r].sum, 1);
        row[r].sum += __shfl_xor_sync(~0u, row[r].sum, 2);
        float factor = 1;
        if (a.sinks) {
          const float sink = a.sinks[tile.head] * kLog2E;
          factor = row[r].raise(sink);
          row[r].add(row[r].weight(sink));
        }
        inverse[r] = row[r].sum == 0 ? 0 : factor * reciprocal(row[r].sum);
        if constexpr (kEverything) inverse[r] *= a.keep_scale;
      }
      // Two lanes of a row's four write its logarithm.
      const bool second = lane % 4 == 1;
      Row mine;
      mine.max = second ? row[1].max : row[0].max;
      mine.sum = second ? row[1].sum : row[0].sum;
      const int query_row = tile.first_query + group * kRows + 16 * warp + lane / 4 + (second ? 8 : 0);
      if (lane % 4 < 2 && part == 0 && query_row < queries(a, tile) && a.lse) {
        const int64_t at =
            (kPacked ? 0 : tile.batch * a.lse_stride[0]) + tile.head * a.lse_stride[1] + query_begin(tile) + query_row;
        // From the base 2, in two floats.
        constexpr float kLn2 = 0.693147182464599609375f, kLn2Low = -1.904654323148236017e-9f;
        const float high = mine.lse(), lse = high * kLn2;
        const float low = fmaf(high, kLn2, -lse) + fmaf(high, kLn2Low, mine.lse_low() * kLn2);
        a.lse[at] = lse;
        a.lse_low[at] = low - low == 0 ? low : 0;
      }
      __syncwarp();
    }

    __device__ __forceinline__ void store_out(int of_job, const float (&inverse)[2]) {
      const Job& tile = shared.job[of_job];
      const int first = tile.first_query + group * kRows + 16 * warp;
      if constexpr (kTile.staged_out) {
        if (lane == 0) wait_for_store_reads();
        __syncwarp();
#pragma unroll
        for (int step = 0; step < kOuts / 8; ++step) {
          unsigned words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            words[i] = pair(out[8 * step + 2 * i] * inverse[i % 2], out[8 * step + 2 * i + 1] * inverse[i % 2]);
          store_matrices(words, shared_address(shared.out.box[4 * group + warp][step / 4]) + matrix_place(0, step % 4 * 2));
        }
        if (const int rows = queries(a, tile) - first; kPacked && rows < kOutRows) {
          // The next rows are another sequence's.
          __syncwarp();
          const int chunks = a.value_width / kPerVector<T>;
          T* const to = static_cast<T*>(a.out) + tile.head * a.out_stride[1] + (query_begin(tile) + first) * a.out_stride[2];
          for (int n = lane; n < rows * chunks; n += kWarp) {
            const int r = n / chunks, chunk = n % chunks;
            *reinterpret_cast<uint4*>(to + r * a.out_stride[2] + chunk * kPerVector<T>) =
                reinterpret_cast<const uint4*>(shared.out.box[4 * group + warp][chunk / 8][r])[(chunk ^ r) % 8];
          }
        } else {
          publish_to_engines();
          __syncwarp();
          if (lane == 0) {
#pragma unroll
            for (int box = 0; box < kValueBoxes; ++box)
              store_box(a.out_map, {box * kBoxColumns, query_begin(tile) + first, tile.head, kPacked ? 0 : tile.batch},
                        shared.out.box[4 * group + warp][box]);
            commit_stores();
          }
        }
        __syncwarp();
      } else {
        // Four lanes hold 2 columns each of eight; turned, each holds all of eight and writes 16 bytes.
        static_assert(kOutColumns % 32 == 0);
        const bool odd = lane & 1, upper = lane & 2;
        const auto swap = [](bool high, unsigned& low_word, unsigned& high_word, int mask) {
          const unsigned got = __shfl_xor_sync(~0u, high ? low_word : high_word, mask);
          (high ? low_word : high_word) = got;
        };
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int at_row = first + lane / 4 + 8 * r;
          T* to = static_cast<T*>(a.out) + (kPacked ? 0 : tile.batch * a.out_stride[0]) + tile.head * a.out_stride[1] +
                  (query_begin(tile) + at_row) * a.out_stride[2];
#pragma unroll
          for (int i = 0; i < kOuts / 16; ++i) {
            unsigned words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const int at = 16 * i + 4 * j + 2 * r;
              words[j] = pair(out[at] * inverse[r], out[at + 1] * inverse[r]);
            }
            swap(odd, words[0], words[1], 1);
            swap(odd, words[2], words[3], 1);
            swap(upper, words[0], words[2], 2);
            swap(upper, words[1], words[3], 2);
            const int column = part * kOutColumns + 32 * i + lane % 4 * 8;
            if (at_row < queries(a, tile) && column < a.value_width)
              *reinterpret_cast<uint4*>(to + column) = {words[0], words[1], words[2], words[3]};
          }
        }
        __syncwarp();
      }
    }

    // The next tile, or false if there is none.
    __device__ __forceinline__ bool fetch() {
      wait(&shared.job_full[next.stage], next.parity);
      job = next.stage;
      next.advance();
      const Job& of = shared.job[job];
      if constexpr (!kMasked) skipped = behind;
      if (of.batch < 0) return false;
      if constexpr (kMasked) {
        if (a.mask_way == MaskWay::kBits)
          walk.bits = a.bits + of.batch * a.bits_batch_step + of.head * a.bits_head_step +
                      min((of.first_query + group * kRows) / kBitRows + warp, a.bits_last_row) * a.bits_row_step + lane;
        walk.from = of.begin;
        walk.next_skipped = skipped;  // behind the last tile's blocks
        end = of.end;
        load_words();
        next_words();
        look_ahead();
        step();
      } else {
        block = of.group[group].begin;
        end = of.group[group].end;
        skipped += block - of.begin;
        behind = of.end - end;
      }
      whole_begin = of.group[group].whole_begin;
      whole_end = of.group[group].whole_end;
      return true;
    }
    // The tile's next block.
    __device__ __forceinline__ void step() {
      if constexpr (kMasked) {
        block = walk.next_block;
        skipped = walk.next_skipped;
        walk.next_skipped = 0;
        walk.now = walk.next;
        if (walk.taken == 0) [[unlikely]]
          next_words();
      } else {
        ++block;
      }
    }
    __device__ __forceinline__ bool is_last() const {
      if constexpr (kMasked) return walk.next_block >= end;
      return block + 1 == end;
    }

    // A block at a time: under a mask the values of this warpgroup's last block may still be held.
    __device__ __forceinline__ void skip_blocks() {
#pragma unroll 1
      for (; kGroups > 1 && skipped > 0; --skipped) {
        wait(&shared.key_full[key.stage], key.parity);
        release(&shared.key_empty[key.stage]);
        wait(&shared.value_full[key.stage], key.parity);
        release(&shared.value_empty[key.stage]);
        key.advance();
        if constexpr (!kMasked) value.advance();
        take_turn();
        pass_turn();
      }
    }

    // The first block's scores: started here, turned into weights by first_weights().
    __device__ __forceinline__ void start_tile() {
      skip_blocks();  // first of all: others' last scores, and with them the queries' buffers, may wait for these releases
      wait(&shared.query_full[query.stage], query.parity);
      if constexpr (kTile.held_query) hold_query();
      wait(&shared.key_full[key.stage], key.parity);
      take_turn();
      start_scores();
      pass_turn();
      if constexpr (kMasked) value = key;
      fetch_kept();
    }

    __device__ __forceinline__ void first_weights() {
      // Not behind hold_query(): its loads take their time, and an arrival overtakes them. A product has waited for them.
      if constexpr (kTile.held_query) release(&shared.query_empty[query.stage]);
      row[0] = row[1] = Row{};
      accumulate = false;
      settle_scores();
      look_ahead();
      float unused[2], sum[2];
      raise(unused);
      weigh(sum);
      row[0].add(sum[0]);
      row[1].add(sum[1]);
      release_scores();
      pack_weights();
      step();
    }

    __device__ void run() {
      query.advance(group);
      if (kTile.in_turn && group + part == kTile.warpgroups - 1) pass_turn();
      if (!fetch()) return;
      start_tile();
      wait_for_products<0>();
      first_weights();
      while (true) {
#pragma unroll 1
        for (; block < end; step()) {
          if constexpr (kMasked)
            if (skipped > 0) [[unlikely]]
              skip_blocks();
          wait(&shared.key_full[key.stage], key.parity);
          take_turn();
          start_scores();
          wait(&shared.value_full[value.stage], value.parity);
          start_out();
          pass_turn();
          fetch_kept();
          wait_for_products<1>();
          if constexpr (kSplit) {
            release_scores();
            settle_scores();
            raised_weights();
          } else {
            settle_scores();
            next_weights();
            release_scores();
          }
          pack_weights();
        }
        query.advance(kGroups);
        const int last = job;
        const bool more = fetch();
        // The tile's last product, and the next tile's first, which runs while this tile is finished.
        wait(&shared.value_full[value.stage], value.parity);
        float inverse[2];
        if (!more) {
          start_out();
          finish_rows(last, inverse);
          wait_for_products<0>();
          store_out(last, inverse);
          release(&shared.value_empty[value.stage]);
          value.advance();
          skip_blocks();
          break;
        }
        start_out();
        finish_rows(last, inverse);
        uint64_t* const last_value = &shared.value_empty[value.stage];
        value.advance();
        const bool skips = skipped > kSkips;  // then others' values may need this one's buffer
        if (skips) {
          wait_for_products<0>();
          release(last_value);
        }
        start_tile();
        wait_for_products<1>();
        settle(out);
        if (!skips) release(last_value);
        store_out(last, inverse);
        release(&shared.job_empty[last]);
        wait_for_products<0>();
        first_weights();
      }
      if constexpr (kTile.staged_out)
        if (lane == 0) wait_for_stores();
    }

    __device__ __forceinline__ void release_key() {
      release(&shared.key_empty[key.stage]);
      key.advance();
    }
    __device__ __forceinline__ void release_value() {
      release(&shared.value_empty[value.stage]);
      if constexpr (kMasked)
        value = key;
      else
        value.advance();
    }
    // What the block's scores are made of: the keys, and behind the tile's last scores the queries.
    __device__ __forceinline__ void release_scores() {
      release_key();
      if (!kTile.held_query && is_last()) release(&shared.query_empty[query.stage]);
    }
  };

  __device__ static void run(const ForwardSm90Arguments& a, Shared& shared) {
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x == 0) {
      constexpr int kReaders = 4 * kTile.warpgroups;  // warps
      const int drawers = kEverything && a.rng ? kTile.drawers : 0;
      for (int i = 0; i < kJobs; ++i) {
        init_barrier(&shared.job_full[i], 1);
        init_barrier(&shared.job_empty[i], kReaders + drawers + (kPacked || kSplit ? 2 : 1));
      }
      for (int i = 0; i < kQueries; ++i) {
        init_barrier(&shared.query_full[i], 1);
        init_barrier(&shared.query_empty[i], kReaders / kGroups);
      }
      for (int i = 0; i < kKeyStages; ++i) {
        init_barrier(&shared.key_full[i], 1 + drawers);
        init_barrier(&shared.key_empty[i], kReaders);
      }
      for (int i = 0; i < kStages; ++i) {
        init_barrier(&shared.value_full[i], 1);
        init_barrier(&shared.value_empty[i], kReaders);
        if constexpr (kPacked) init_barrier(&shared.packed.value_there[i], 1);
      }
      if constexpr (kPacked) init_barrier(&shared.packed.tile_wanted, 1);
      publish_barriers();
    }
    __syncthreads();
    if (warp < 4) {
      shrink_registers<kTile.loader_registers>();
      if (threadIdx.x == 0) Loader{a, shared}.run();
      if (warp == 1) plan(a, shared, lane);
      if constexpr (kSplit)
        if (warp == 2 && lane == 0) load_values(a, shared);
      if constexpr (kPacked) {
        if (warp == 2) clear_tails(shared, lane);
        if (warp == 3) clear_unowned(a, lane);
      }
    } else if (warp < 4 * (1 + kTile.warpgroups)) {
      grow_registers<kTile.registers>();
      const int number = warp / 4 - 1;
      Group group{a, shared, kSplit ? 0 : number, kSplit ? number : 0, warp % 4, lane};
      group.run();
    } else if constexpr (kEverything) {
      shrink_registers<kTile.drawer_registers>();
      draw(a, shared, warp - 4 * (1 + kTile.warpgroups), lane);
    }
  }
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kTile.threads(), Tile::kTile.blocks)
    attention_forward_sm90(const __grid_constant__ ForwardSm90Arguments a) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)  // in code for another GPU it is empty, and never launched
  using Kernel = ForwardSm90Kernel<T, Tile>;
  extern __shared__ unsigned char dynamic[];
  const unsigned base = shared_address(dynamic), skip = (kBoxAlignment - base % kBoxAlignment) % kBoxAlignment;
  Kernel::run(a, *reinterpret_cast<typename Kernel::Shared*>(dynamic + skip));
#endif
}

inline bool wants_everything(const AttentionProblem& p) {
  return p.softcap > 0 || p.alibi_slopes || p.mask.data || p.dropout != 0;
}

// Whether a row for little work is the better one; otherwise tiles are of `wide` queries.
inline bool has_little_work(const AttentionProblem& p, const ForwardSm90& tile, int wide) {
  if (p.queries <= tile.most_queries) return true;
  if (p.query_starts) return false;
  const Visibility& v = p.visible;
  const bool narrow = v.left >= 0 && v.right >= 0 && v.left + v.right <= tile.most_window;
  return narrow || 2 * p.batch * p.heads * ((p.queries + wide - 1) / wide) <= multiprocessors();
}

// How many heads' tiles are dealt out together, where tiles differ in work: what fills `least_rounds` rounds of `blocks` tiles,
// or some more if that fills them better. The keys and values of those at work together should stay in the L2 cache.
inline int64_t section_heads(int64_t heads, int64_t heads_a_key, int64_t row_tiles, int64_t head_bytes, int64_t blocks,
                             int64_t least_rounds) {
  constexpr int64_t kCacheBytes = 48 << 20;  // of an H200's 60 MiB
  const int64_t most = std::max(kCacheBytes / head_bytes, int64_t{1});
  int64_t best = 1, best_tiles = 0, best_places = 1;
  for (int64_t rounds = least_rounds; rounds < least_rounds + 8; ++rounds) {
    int64_t n = std::max(std::min({rounds * blocks / row_tiles, most, heads}), int64_t{1});
    if (n > heads_a_key) n -= n % heads_a_key;  // heads of the same keys together
    const int64_t tiles = n * row_tiles, places = (tiles + blocks - 1) / blocks * blocks;
    if (tiles * best_places * 100 <= best_tiles * places * 101) continue;
    best = n, best_tiles = tiles, best_places = places;
  }
  return best;
}

template <class T, class Tile>
void launch_forward_sm90(const AttentionProblem& p, const MaskTables& tables, unsigned* taken, cudaStream_t stream) {
  using Kernel = ForwardSm90Kernel<T, Tile>;
  constexpr ForwardSm90 kTile = Tile::kTile;
  constexpr BoxElement kElement = std::is_same_v<T, __half> ? BoxElement::kHalf : BoxElement::kBFloat16;
  // A dimension of stride 0 or size 1 gets size 1, and any stride.
  const auto map = [&](const void* data, const int64_t (&stride)[4], int64_t batch, int64_t heads, int64_t rows, int64_t width,
                       int box_rows) {
    const auto size = [&](int i, int64_t n) { return static_cast<uint64_t>(stride[i] == 0 ? 1 : n); };
    const auto step = [&](int i, int64_t n) {
      return n == 1 || stride[i] == 0 ? uint64_t{16} : uint64_t(stride[i]) * sizeof(T);
    };
    return tensor_map(data, kElement,
                      {static_cast<uint64_t>(width), static_cast<uint64_t>(rows), size(1, heads), size(0, batch)},
                      {step(2, rows), step(1, heads), step(0, batch)}, static_cast<uint32_t>(box_rows));
  };
  ForwardSm90Arguments a;
  constexpr bool kPacked = Tile::kPacked;
  const int64_t queries = kPacked ? p.total_queries : p.queries, keys = kPacked ? p.total_keys : p.keys;
  const int64_t batch = kPacked ? std::min(p.batch, int64_t{1}) : p.batch;  // 0: rows that no sequence owns, alone
  a.query = map(p.query.data, p.query.stride, batch, p.heads, queries, p.width, Kernel::kRows);
  a.key = map(p.key.data, p.key.stride, batch, p.key_heads, keys, p.width, Kernel::kKeys);
  a.value = map(p.value.data, p.value.stride, batch, p.value_heads, keys, p.value_width, Kernel::kKeys);
  if constexpr (kTile.staged_out)
    a.out_map = map(p.out.data, p.out.stride, batch, p.heads, queries, p.value_width, Kernel::kOutRows);
  const auto group = [&](const int64_t (&stride)[4], int64_t heads) {
    return static_cast<int>(stride[1] == 0 ? p.heads : p.heads / heads);
  };
  a.heads_a_query = group(p.query.stride, p.heads);
  a.heads_a_key = group(p.key.stride, p.key_heads);
  a.heads_a_value = group(p.value.stride, p.value_heads);
  a.query_batch_step = !kPacked && p.query.stride[0] != 0;
  a.key_batch_step = !kPacked && p.key.stride[0] != 0;
  a.value_batch_step = !kPacked && p.value.stride[0] != 0;
  a.batch = static_cast<int>(batch);
  a.heads = static_cast<int>(p.heads);
  a.queries = static_cast<int>(p.queries);
  a.keys = static_cast<int>(p.keys);
  a.value_width = static_cast<int>(p.value_width);
  a.row_tiles = static_cast<int>(BlockList::of(p, false, p.heads, kTile.queries()).blocks);
  a.uneven = p.visible.left >= 0 || p.visible.right >= 0;
  a.batch_within = false;
  const int64_t places = int64_t{multiprocessors()} * kTile.blocks;
  if constexpr (kPacked) {
    a.lower_right = p.lower_right;
    a.packed = {.query_starts = p.query_starts,
                .key_starts = p.key_starts,
                .sequences = static_cast<int>(p.batch),
                .total_queries = static_cast<int>(p.total_queries),
                .total_keys = static_cast<int>(p.total_keys),
                .queries = a.queries,
                .keys = a.keys,
                .heads = a.heads,
                .heads_a_key = a.heads_a_key,
                .level_keys = taken ? a.keys / kWarp + 1 : 0,
                .taken = taken};
    if (taken) check(cudaMemsetAsync(taken, 0, sizeof(*taken), stream), "cudaMemsetAsync");
  } else {
    const int64_t heads = batch * p.heads, head_bytes = keys * (p.width + p.value_width) * int64_t{sizeof(T)};
    a.section_heads = static_cast<int>(a.uneven ? section_heads(heads, a.heads_a_key, a.row_tiles,
                                                                head_bytes / a.heads_a_key + 1, places, kTile.section_rounds)
                                                : heads);
  }
  a.visible = p.visible;
  constexpr double kToBase2 = 1.4426950408889634;
  a.bends = p.softcap > 0 || p.alibi_slopes;
  a.scale = p.softcap > 0 ? 1 : static_cast<float>(p.scale * kToBase2);
  a.added_scale = static_cast<float>(p.softcap > 0 ? kToBase2 : 1 / p.scale);
  a.softcap = static_cast<float>(p.softcap * kToBase2);
  a.softcap_scale = p.softcap > 0 ? static_cast<float>(2 * kToBase2 * p.scale / p.softcap) : 0;
  a.sinks = static_cast<const float*>(p.sinks);
  a.alibi_slopes = static_cast<const float*>(p.alibi_slopes);
  a.alibi_stride[0] = p.alibi_stride[0];
  a.alibi_stride[1] = p.alibi_stride[1];
  if constexpr (Tile::kEverything) {
    const auto step = [](const int64_t (&size)[4], int i, int64_t of_size) { return size[i] == 1 ? int64_t{0} : of_size; };
    const auto& map_size = tables.map.size;
    a.map = tables.map.data;
    a.map_batch_step = step(map_size, 0, map_size[1] * map_size[2] * map_size[3]);
    a.map_head_step = step(map_size, 1, map_size[2] * map_size[3]);
    a.map_row_step = static_cast<int>(step(map_size, 2, map_size[3]));
    a.map_column_step = static_cast<int>(step(map_size, 3, 1));
    const auto& bits_size = tables.bits.size;
    a.bits = tables.bits.data;
    a.bits_row_step = bits_size[3] * kWarp;
    a.bits_batch_step = step(bits_size, 0, bits_size[1] * bits_size[2] * a.bits_row_step);
    a.bits_head_step = step(bits_size, 1, bits_size[2] * a.bits_row_step);
    a.bits_last_row = static_cast<int>(bits_size[2]) - 1;
    a.bits_last_unit = static_cast<int>(bits_size[3]) - 1;
    a.mask_way = MaskWay::kNone;
    if (p.mask.data && p.mask_dtype == DType::kBool) {
      a.mask_way = MaskWay::kBits;
    } else if (p.mask.data) {
      a.mask_way = p.mask_dtype == DType::kFloat16 ? MaskWay::kHalves : MaskWay::kBFloats;
      a.batch_within = p.mask.stride[0] == 0 && p.mask.stride[1] != 0;
      a.mask_batch_step = p.mask.stride[0] != 0;
      a.mask_head_step = p.mask.stride[1] != 0;
      a.mask_rows = p.mask.stride[2] == 0 ? 1 : Kernel::kRows;
      a.mask_boxes =
          map(p.mask.data, p.mask.stride, p.batch, p.heads, p.mask.stride[2] == 0 ? 1 : p.queries, p.keys, a.mask_rows);
    }
    a.rng = p.dropout > 0 ? p.rng : nullptr;
    a.drop_threshold = static_cast<uint32_t>(std::min(drop_threshold(p.dropout), uint64_t{0xffffffff}));
    a.batch_begin = p.batch_begin;
    a.keep_scale = p.dropout < 1 ? static_cast<float>(1 / (1 - p.dropout)) : 0.0f;  // the weights of 1 are all dropped
  }
  a.out = p.out.data;
  for (int i = 0; i < 3; ++i) a.out_stride[i] = p.out.stride[i];
  a.lse = static_cast<float*>(p.lse);
  a.lse_low = static_cast<float*>(p.lse_low);
  for (int i = 0; i < 2; ++i) a.lse_stride[i] = p.lse_stride[i];
  const int64_t blocks = std::clamp(batch * p.heads * a.row_tiles, int64_t{1}, places);
  launch<attention_forward_sm90<T, Tile>>(a, blocks, kTile.threads(), Kernel::kSharedBytes, stream);
}

template <class T, int kRow, bool kPacked>
void launch_forward_sm90_row(const AttentionProblem& problem, const MaskTables& tables, unsigned* taken, cudaStream_t stream) {
  using With = ForwardSm90With;
  if constexpr (kForwardSm90[kRow].most_queries == 0 && kForwardSm90[kRow].width <= kWidestEverythingSm90) {
    if constexpr (!kPacked)
      if (problem.mask.data && problem.mask_dtype != DType::kBool)
        return launch_forward_sm90<T, ForwardSm90Tile<kRow, With::kFloatMask, false>>(problem, tables, taken, stream);
    if (wants_everything(problem))
      return launch_forward_sm90<T, ForwardSm90Tile<kRow, With::kEverything, kPacked>>(problem, tables, taken, stream);
  }
  launch_forward_sm90<T, ForwardSm90Tile<kRow, With::kNothing, kPacked>>(problem, tables, taken, stream);
}

// In the first row of this width that is made for the problem, from kRow on.
template <int kWidth, int kRow = 0>
void forward_sm90_in_row(const AttentionProblem& problem, const MaskTables& tables, unsigned* taken, cudaStream_t stream) {
  static_assert(kRow < kForwardSm90Rows, "no row in kForwardSm90");
  constexpr ForwardSm90 kTile = kForwardSm90[kRow];
  if constexpr (kTile.width != kWidth) {
    forward_sm90_in_row<kWidth, kRow + 1>(problem, tables, taken, stream);
  } else {
    if constexpr (kTile.value_width < kWidth)
      if (problem.value_width > kTile.value_width) return forward_sm90_in_row<kWidth, kRow + 1>(problem, tables, taken, stream);
    if constexpr (kTile.most_queries > 0)
      if (wants_everything(problem) || !has_little_work(problem, kTile, kForwardSm90[kRow + 1].queries()))
        return forward_sm90_in_row<kWidth, kRow + 1>(problem, tables, taken, stream);
    const auto visit = [&]<class T>(T) {
      if constexpr (kWidth <= kWidestPackedSm90)
        if (problem.query_starts) return launch_forward_sm90_row<T, kRow, true>(problem, tables, taken, stream);
      launch_forward_sm90_row<T, kRow, false>(problem, tables, taken, stream);
    };
    problem.dtype == DType::kFloat16 ? visit(__half{}) : visit(__nv_bfloat16{});
  }
}

template <int kWidth>
void forward_sm90(const AttentionProblem& problem, const MaskTables& tables, unsigned* taken, CUstream_st* stream) {
  forward_sm90_in_row<kWidth>(problem, tables, taken, stream);
}

}  // namespace flash_online::cuda
