// The warps of the Hopper forward kernel that bring what its warpgroups compute with: plans, queries, keys, values and masks,
// dropout's bits.
#pragma once

#include "../../../../core/philox.h"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/vector.cuh"
#include "config.cuh"

namespace flash_online::cuda {

// ---- the planning warp: what comes next, off everybody's path

// The mask's map of a tile whose other numbers are there.
template <class T, class Tile>
__device__ void ForwardSm90Kernel<T, Tile>::plan_mask(const ForwardSm90Arguments& a, Job& job, int lane) {
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
      const int row_block = min(job.first_query / kMaskMapTile + group, (a.queries - 1) / kMaskMapTile);
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
  for (int word = lane; word < words; word += kWarpSize) {
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

template <class T, class Tile>
__device__ void ForwardSm90Kernel<T, Tile>::plan(const ForwardSm90Arguments& a, Shared& shared, int lane) {
  PipelineState<kJobs> place;
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

template <class T, class Tile>
struct ForwardSm90Kernel<T, Tile>::Loader {
  const ForwardSm90Arguments& a;
  Shared& shared;
  static constexpr bool kHoldsJob = kEverything || kPacked;  // to the end of its tile
  PipelineState<kJobs> next;
  PipelineState<kQueries> query;
  PipelineState<kKeyStages> place;
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
      if (!all && !test_wait(&shared.query_empty[query.stage], query.parity ^ 1)) return;
      wait(&shared.query_empty[query.stage], query.parity ^ 1);
      arrive_expect_tx(&shared.query_full[query.stage], sizeof(Query));
#pragma unroll
      for (int box = 0; box < kWidthBoxes; ++box)
        tma_load(shared.query[query.stage].box[box], a.query,
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
          arrive_expect_tx(&shared.key_full[place.stage], bytes);
#pragma unroll 1
          for (int g = 0; g < kGroups; ++g)
            if (wants_mask(job, g, block))
              tma_load(shared.mask.stage[place.stage].box[g], a.mask_boxes,
                       {block * kKeys, a.mask_rows == 1 ? 0 : mask_query + g * kRows, mask_head, mask_batch},
                       &shared.key_full[place.stage]);
        } else {
          arrive_expect_tx(&shared.key_full[place.stage], sizeof(Key));
        }
#pragma unroll
        for (int box = 0; box < kWidthBoxes; ++box) {
          if (box > 0 && box % kKeyBoxes == 0) {  // the next part
            place.advance();
            wait(&shared.key_empty[place.stage], place.parity ^ 1);
            arrive_expect_tx(&shared.key_full[place.stage], sizeof(Key));
          }
          tma_load(shared.key[place.stage].box[box % kKeyBoxes], a.key,
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
        if (kPacked && stage == tile && (block + 1 == end_block || test_wait(&shared.job_full[next.stage], next.parity)))
          fetch();
      }
      if (kHoldsJob) arrive(&shared.job_empty[tile]);
    }
  }
};

// ---- warps that draw what dropout keeps: the bits come with the keys

template <class T, class Tile>
__device__ void ForwardSm90Kernel<T, Tile>::draw(const ForwardSm90Arguments& a, Shared& shared, int warp, int lane) {
  if (!a.rng) return;
  PipelineState<kJobs> next;
  PipelineState<kStages> place;
  // The same in all lanes, in the compiler's eyes too: what follows from these and the keys alone is made once for a warp.
  const auto shared_by_lanes = [](auto x) { return __shfl_sync(~0u, x, 0); };
  const Philox random(shared_by_lanes(a.rng[0]), shared_by_lanes(a.rng[1]));
  const int part = warp % kParts;
  const auto row = [&](int set) { return (warp / kParts + 2 * set) * kWarpSize + lane; };
  while (true) {
    wait(&shared.job_full[next.stage], next.parity);
    const Job& job = shared.job[next.stage];
    if (job.batch < 0) return;
    const int64_t batch = a.batch_begin + shared_by_lanes(job.batch);
    const int head = shared_by_lanes(job.head);
    Philox::OfQuery query[kGroups];
#pragma unroll
    for (int set = 0; set < kGroups; ++set) query[set] = random.of_query(batch, head, job.first_query + row(set));
#pragma unroll 1
    for (int block = next_read(job, job.begin, job.end); block < job.end; block = next_read(job, block + 1, job.end)) {
      constexpr int kDraws = kPartKeys / Philox::kKeys, kAtOnce = kGroups > 2 ? 1 : 2;  // of a query; what the registers hold
      const int first = shared_by_lanes(block * (kKeys / Philox::kKeys)) + part * kDraws;
      unsigned kept[kGroups] = {};
#pragma unroll 1
      for (int n = 0; n < kDraws; n += kAtOnce) {
#pragma unroll
        for (int set = 0; set < kGroups; ++set) kept[set] >>= Philox::kKeys * kAtOnce;
#pragma unroll
        for (int m = 0; m < kAtOnce; ++m) {
          const Philox::OfGroup group = random.of_group(batch, head, first + n + m);
#pragma unroll
          for (int set = 0; set < kGroups; ++set)
            random.add_kept(query[set], group, a.drop_threshold, 32 - Philox::kKeys * (kAtOnce - m), kept[set]);
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

template <class T, class Tile>
__device__ void ForwardSm90Kernel<T, Tile>::load_values(const ForwardSm90Arguments& a, Shared& shared) {
  PipelineState<kJobs> next;
  PipelineState<kStages> place;
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

template <class T, class Tile>
__device__ void ForwardSm90Kernel<T, Tile>::clear_tails(Shared& shared, int lane) {
  PipelineState<kJobs> next;
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
      for (int n = first + lane; n < kKeys * kChunks; n += kWarpSize) chunks[n] = {};
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) arrive(&shared.value_full[stage]);
  }
}

// ---- packed: a warp for the rows that no sequence owns: 0, and an lse of -inf

template <class T, class Tile>
__device__ void ForwardSm90Kernel<T, Tile>::clear_padding(const ForwardSm90Arguments& a, int lane) {
#pragma unroll 1
  for (int n = static_cast<int>(blockIdx.x); n <= a.packed.sequences; n += static_cast<int>(gridDim.x)) {
    const Rows rows = padding_rows(a.packed.query_starts, a.packed.sequences, n, a.queries, a.packed.total_queries);
    const int begin = static_cast<int>(rows.begin), end = begin + static_cast<int>(rows.count);
#pragma unroll 1
    for (int row = begin; row < end; ++row)
#pragma unroll 1
      for (int head = 0; head < a.heads; ++head) {
        T* const to = static_cast<T*>(a.out) + head * a.out_stride[1] + row * a.out_stride[2];
        const int column = lane * kPerVector<T>;
        if (column < a.head_dim_v) *reinterpret_cast<uint4*>(to + column) = {};
        if (lane == 0 && a.lse) {
          const int64_t at = head * a.lse_stride[1] + row;
          a.lse[at] = -INFINITY;
          a.lse_low[at] = 0;
        }
      }
  }
}

}  // namespace flash_online::cuda
