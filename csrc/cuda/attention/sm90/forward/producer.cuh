// The warps of the Hopper forward kernel that the math warpgroups wait for: the scheduler warp, the producer warp, the warps
// that clear memory for packed sequences, the dropout warps.
#pragma once

#include <climits>

#include "../../../../core/philox.h"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/vector.cuh"
#include "../../masks/sparse_bits.cuh"
#include "config.cuh"

namespace flash_online::cuda {

// ---- the scheduler warp: what the next work tiles are, ahead of all other warps

// What sparsity says of the tiles of a head.
template <class T, class Variant>
__device__ __forceinline__ TileSparsity ForwardSm90Kernel<T, Variant>::sparsity_of(const Arguments& a, int batch, int head) {
  TileSparsity sparsity;
  if constexpr (kSparse) {
    const auto& [queries, keys] = a.sparsity.tables;
    sparsity.queries = queries.of(nullptr, 0, batch, head), sparsity.query_intervals = queries.intervals;
    sparsity.keys = keys.of(nullptr, 0, batch, head), sparsity.key_intervals = keys.intervals;
    sparsity.listed = ListedTiles(a.sparsity.tiles, a.sparsity.tile_keys, batch, head);
  }
  return sparsity;
}

// Narrows the range [begin, end) of blocks of keys to those that the spans of the queries [query, last_query), and those of far
// keys, leave of it.
template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::narrow_by_spans(const Arguments& a, const WorkTileCoord& tile,
                                                                               int query, int last_query, int& begin,
                                                                               int& end) {
  const TileSparsity sparsity = sparsity_of(a, tile.batch, tile.head);
  TileSparsity::narrow<kKeys>(sparsity.queries, sparsity.query_intervals, query, last_query, begin, end);
  a.sparsity.tables.keys.template narrow<kKeys>(tile.batch, tile.head, query, last_query, begin, end);
}

// Whether sparsity hides all of the blocks [block, end) from a warpgroup, and whether it hides nothing of any. What position
// hides does not count: apply_visibility() asks for itself.
template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::kinds_of_blocks(const Arguments& a, const ForwardWorkTile& tile,
                                                                               const TileSparsity& sparsity, int block, int end,
                                                                               bool (&hidden)[kRowBlocks],
                                                                               bool (&clear)[kRowBlocks]) {
  const auto first_query = [&](int i) {
    return min(tile.first_query / kMaskMapTile + i, (a.queries - 1) / kMaskMapTile) * kMaskMapTile;
  };
#pragma unroll
  for (int i = 0; i < kRowBlocks; ++i) hidden[i] = clear[i] = true;
#pragma unroll 1
  for (; block < end; ++block) {
    const int key = block * kKeys, last_key = min(key + kKeys, a.keys);
    bool all_hidden[kRowBlocks], any_clear[kRowBlocks];
    const auto begin_side = [&] {
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) all_hidden[i] = true, any_clear[i] = false;
    };
    bool block_hidden[kRowBlocks] = {};
    if (sparsity.listed.data) {
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
        const MaskKind kind = sparsity.listed.kind(first_query(i), key, last_key);
        block_hidden[i] = kind == MaskKind::kHidden, clear[i] &= kind == MaskKind::kClear;
      }
    }
    const auto end_side = [&] {
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) block_hidden[i] |= all_hidden[i], clear[i] &= any_clear[i];
    };
    if (sparsity.keys) {
      begin_side();
      for (int n = 0; n < sparsity.key_intervals; ++n) {
        const SpanBounds keys = TileSparsity::bounds_of<kKeys>(sparsity.keys, sparsity.key_intervals, n, key, last_key);
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) {
          const int query = first_query(i), last_query = min(query + kMaskMapTile, a.queries);
          all_hidden[i] &= keys.hides(query, last_query);
          any_clear[i] |= keys.clears(query, last_query);
        }
      }
      end_side();
    }
    if (sparsity.queries) {
      begin_side();
      for (int n = 0; n < sparsity.query_intervals; ++n)
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) {
          const int query = first_query(i);
          const SpanBounds rows =
              TileSparsity::bounds_of<kMaskMapTile>(sparsity.queries, sparsity.query_intervals, n, query, query + kMaskMapTile);
          all_hidden[i] &= rows.hides(key, last_key);
          any_clear[i] |= rows.clears(key, last_key);
        }
      end_side();
    }
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) hidden[i] &= block_hidden[i];
  }
}

// Marks the blocks of a work tile that each warpgroup visits, and the clear ones among them, a bit for 2^shift of them in
// `words` words. With sparsity the words before first_word are left out: they have no visible block, nor have those after
// last_word.
template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::mark_blocks(const Arguments& a, ForwardWorkTile& tile, int shift,
                                                                           int words, int lane, int& first_word,
                                                                           int& last_word) {
  const uint8_t* const kinds = a.mask.map.kinds + tile.batch * a.mask.map.batch_step + tile.head * a.mask.map.head_step;
  [[maybe_unused]] const TileSparsity sparsity = sparsity_of(a, tile.batch, tile.head);
#pragma unroll 1
  for (int word = 0; word < words; ++word) {
    const int block = tile.begin + ((word * 32 + lane) << shift);
    if constexpr (kSparse) {
      bool hidden[kRowBlocks], clear[kRowBlocks];
      kinds_of_blocks(a, tile, sparsity, block, min(block + (1 << shift), tile.end), hidden, clear);
      unsigned any_seen = 0;
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
        const bool reached = block < tile.row_block[i].end && block + (1 << shift) > tile.row_block[i].begin;
        const unsigned all_seen = __ballot_sync(~0u, reached && !hidden[i]), all_clear = __ballot_sync(~0u, clear[i]);
        any_seen |= all_seen;
        if (lane == 0) {
          tile.map.row_block[i].visited[word - first_word] = all_seen;
          tile.map.row_block[i].clear[word - first_word] = all_clear;
        }
      }
      if (any_seen)
        last_word = word;
      else if (first_word == word && word + 1 < words)
        ++first_word;
    } else {
#pragma unroll 1
      for (int i = 0; i < kRowBlocks; ++i) {
        const int begin = max(block, tile.row_block[i].begin), end = min(block + (1 << shift), tile.row_block[i].end);
        const int map_row = min(tile.first_query / kMaskMapTile + i, (a.queries - 1) / kMaskMapTile);
        const uint8_t* const row = kinds + int64_t{map_row} * a.mask.map.row_step;
        bool seen = false, clear = begin >= tile.row_block[i].whole_begin && end <= tile.row_block[i].whole_end &&
                                   (a.mask.map.kinds || a.mask_source == MaskSource::kNone);
#pragma unroll 1
        for (int n = begin; n < end; ++n) {
          const auto kind = a.mask.map.kinds ? static_cast<MaskKind>(row[n * a.mask.map.column_step]) : MaskKind::kMixed;
          seen |= kind != MaskKind::kHidden;
          if (a.mask.map.kinds) clear &= kind == MaskKind::kClear;
        }
        const unsigned all_seen = __ballot_sync(~0u, seen), all_clear = __ballot_sync(~0u, clear);
        if (lane == 0) {
          tile.map.row_block[i].visited[word] = all_seen;
          tile.map.row_block[i].clear[word] = all_clear;
        }
      }
    }
  }
}

// Computes the mask map of a work tile. The other members of `tile` must be set.
template <class T, class Variant>
__device__ void ForwardSm90Kernel<T, Variant>::make_mask_map(const Arguments& a, ForwardWorkTile& tile, int lane) {
  int shift, words;
  bool again = false;
  do {
    shift = 0;
    while (tile.end - tile.begin > kMapBits << shift) ++shift;
    words = (((tile.end - tile.begin - 1) >> shift) + 32) / 32;
    int first_word = 0, last_word = 0;
    mark_blocks(a, tile, shift, words, lane, first_word, last_word);
    if constexpr (kSparse) {
      // Words without a visible block would cost all warps that walk through the map.
      last_word = max(last_word, first_word);
      words = last_word - first_word + 1;
      const int begin = tile.begin + (first_word * 32 << shift), end = min(begin + (words * 32 << shift), tile.end);
      __syncwarp();
      if (lane == 0) tile.begin = begin, tile.end = end;
      if (lane < kRowBlocks) {
        tile.row_block[lane].begin = min(max(tile.row_block[lane].begin, begin), end - 1);
        tile.row_block[lane].end = min(tile.row_block[lane].end, end);
      }
      __syncwarp();
      again = shift > 0 && end - begin <= kMapBits << (shift - 1);  // a bit may stand for fewer blocks
    }
  } while (again);
  if (lane == 0) tile.map.shift = shift;
  __syncwarp();
  // A warpgroup from which the mask hides everything visits one block all the same, so that it needs no code of its own.
  unsigned* const visited = tile.map.row_block[min(lane, kRowBlocks - 1)].visited;
  int last = -1;
  if (lane < kRowBlocks) {
    for (int word = 0; word < words; ++word)
      if (visited[word]) last = word * 32 + 31 - __clz(visited[word]);
    if (last < 0) {
      last = (tile.row_block[lane].begin - tile.begin) >> shift;
      visited[last / 32] |= 1u << last % 32;
    }
  }
  __syncwarp();
  for (int word = lane; word < words; word += kWarpSize) {
    unsigned loaded = 0;
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) loaded |= tile.map.row_block[i].visited[word];
    tile.map.loaded[word] = loaded;
  }
  __syncwarp();
  if constexpr (kSparse) {
    // The next tile is claimed before the last block of the warpgroup that ends first: that one waits for the next tile before
    // it releases what only others see. A map of many blocks takes a while.
    int ahead = kClaimAhead + words;
    const int first_to_end = __reduce_min_sync(~0u, lane < kRowBlocks ? last : INT_MAX);
    int word = first_to_end / 32;
    unsigned left = tile.map.loaded[word] & ~0u >> (31 - first_to_end % 32);
#pragma unroll 1
    for (; word > 0 && __popc(left) <= ahead; left = tile.map.loaded[--word]) ahead -= __popc(left);
#pragma unroll 1
    for (; ahead > 0 && left; --ahead) left &= ~(1u << (31 - __clz(left)));
    if (lane == 0) tile.claims.at = left ? tile.begin + ((word * 32 + 31 - __clz(left)) << shift) : tile.begin;
    if (lane < kRowBlocks) tile.claims.last_end[lane] = min(tile.begin + ((last + 1) << shift), tile.end);
  }
  // A warpgroup also visits a block if it would otherwise skip more blocks in a row than there are stages apart from the one
  // with the values that it holds: it would wait forever.
  if (lane < kRowBlocks) {
    int skipped = -1;  // -1: none is visited yet
#pragma unroll 1
    for (int word = 0; word <= last / 32; ++word) {
      unsigned left = tile.map.loaded[word], mine = visited[word];
      if (word == last / 32) left &= ~0u >> (31 - last % 32);
#pragma unroll 1
      for (; left; left &= left - 1) {
        const unsigned bit = left & -left;
        if (mine & bit) {
          skipped = 0;
        } else if (skipped >= 0 && (++skipped << shift) > kMaxSkips) {
          mine |= bit;
          skipped = 0;
        }
      }
      visited[word] = mine;
    }
  }
  __syncwarp();
}

template <class T, class Variant>
__device__ __forceinline__ auto ForwardSm90Kernel<T, Variant>::make_scheduler(const Arguments& a, Shared& shared) -> Scheduler {
  if constexpr (kKvSplit)
    return Scheduler(a.cached.problem, a.line);
  else if constexpr (kCached)
    return Scheduler(a.cached, shared.packed.scheduler);
  else if constexpr (kPacked)
    return Scheduler(a.packed, shared.packed.scheduler);
  else
    return Scheduler{};
}

template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::set_sequence(ForwardWorkTile& tile,
                                                                            const PackedSequence& sequence,
                                                                            const Visibility& visible) {
  const KeyRange seen = keys_of_any(visible, 0, sequence.queries, sequence.keys);
  tile.seen = {static_cast<int>(seen.begin), static_cast<int>(seen.end)};
  tile.sequence = sequence;
}

template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::rows_of_sequence(const Arguments& a, int sequence, Rows& queries,
                                                                                Rows& keys) {
  if constexpr (kCached) {
    const Sequence cached = cached_sequence(a.cached.problem, sequence);
    queries = cached.queries, keys = cached.keys;
  } else {
    queries = packed_rows(a.packed.query_starts, sequence, a.queries, a.packed.total_queries);
    keys = packed_rows(a.packed.key_starts, sequence, a.keys, a.packed.total_keys);
  }
}

template <class T, class Variant>
__device__ void ForwardSm90Kernel<T, Variant>::schedule_tiles(const Arguments& a, Shared& shared, int lane) {
  PipelineState<kWorkTiles> state;
  Scheduler scheduler = make_scheduler(a, shared);
  int queries = a.queries, keys = a.keys;
  [[maybe_unused]] int query_begin = 0, key_begin = 0, sequence = -1;
  [[maybe_unused]] unsigned wanted_parity = 0;
  for (bool more = true; more; state.advance()) {
    WorkTileCoord next;
    if constexpr (kPacked) {
      next = scheduler.next();
      if constexpr (kKvSplit) {
        const DecodeSequence& s = scheduler.sequence();
        query_begin = s.queries_begin, queries = s.queries, key_begin = s.keys_begin, keys = s.keys;
      } else if (next.batch >= 0 && next.batch != sequence) {
        sequence = next.batch;
        Rows query_rows, key_rows;
        rows_of_sequence(a, sequence, query_rows, key_rows);
        query_begin = static_cast<int>(query_rows.begin), queries = static_cast<int>(query_rows.count);
        key_begin = static_cast<int>(key_rows.begin), keys = static_cast<int>(key_rows.count);
      }
    } else if constexpr (kSparse) {
      next = scheduler.next(a, a.sparsity.tile_counter, lane);
    } else {
      next = scheduler.next(a);
    }
    more = next.batch >= 0;
    Visibility visible = a.visible;
    if (kPacked && a.lower_right) visible.offset = keys - queries;
    constexpr int kBeyondKeys = 1 << 30;
    int all_rows = queries;
    if constexpr (kCached) all_rows <<= a.cached.group_shift;
    const int first = next.row_tile * kTile.queries(), last = min(first + kTile.queries(), all_rows) - 1;
    const KeyRange band = band_of(visible, query_of_row(a, first), kBeyondKeys);
    const int band_begin = static_cast<int>(band.begin), band_end = static_cast<int>(band.end);
    // The blocks in which the queries between rows r and s of the tile see some key. The whole tile has one block at least, so
    // that it has a result.
    const auto begin_of = [&](int r) { return max(band_begin + query_of_row(a, r), 0) / kKeys; };
    const auto end_of = [&](int s) { return (min(band_end + query_of_row(a, s), keys) + kKeys - 1) / kKeys; };
    const int rows = last - first + 1;
    int begin = begin_of(0), end = end_of(rows - 1), first_block = 0;
    if constexpr (kKvSplit) {
      // Clip to this CTA's share: the part may have been cut.
      first_block = scheduler.begin();
      begin = max(begin, first_block), end = min(end, scheduler.end());
    }
    if constexpr (kSparse)
      if (more) narrow_by_spans(a, next, first, last + 1, begin, end);
    if (end <= begin) begin = first_block, end = begin + 1;
    wait(&shared.tile_empty[state.stage], state.parity ^ 1);
    ForwardWorkTile& tile = shared.tile[state.stage];
    if constexpr (kCached) {
      // Right away: there are too few registers to keep all that a sequence is until the end.
      if (lane == 0) set_sequence(tile, {query_begin, key_begin, queries, keys, static_cast<int>(visible.offset)}, visible);
      if constexpr (kKvSplit)
        if (lane == 0) tile.partial = scheduler.partial();
    }
    if (lane < kRowBlocks) {
      // A warpgroup past the last query processes one block all the same, so that it needs no code of its own.
      const int first_row = lane * kRowsPerWarpgroup, last_row = min(first_row + kRowsPerWarpgroup, rows) - 1;
      const int own_begin = first_row < rows ? max(min(begin_of(first_row), end - 1), begin) : begin;
      tile.row_block[lane].begin = own_begin;
      tile.row_block[lane].end = first_row < rows ? min(max(end_of(last_row), own_begin + 1), end) : own_begin + 1;
      tile.row_block[lane].whole_begin = (max(band_begin + query_of_row(a, last_row), 0) + kKeys - 1) / kKeys;
      tile.row_block[lane].whole_end = min(band_end + query_of_row(a, first_row), keys) / kKeys;
    }
    if (lane == 0) {
      tile.batch = next.batch;
      tile.head = next.head;
      tile.first_query = query_of_row(a, first);
      tile.band_begin = band_begin;
      tile.band_end = band_end;
      tile.begin = begin;
      tile.end = end;
      if constexpr (kPacked && !kCached)
        tile.sequence = {.query_begin = query_begin,
                         .key_begin = key_begin,
                         .queries = queries,
                         .keys = keys,
                         .offset = static_cast<int>(visible.offset)};
    }
    if constexpr (kHasOptions)
      if (more && lane == 0 && a.scores.alibi_slopes)
        tile.slope = a.scores.alibi_slopes[next.batch * a.scores.alibi_stride[0] + next.head * a.scores.alibi_stride[1]] *
                     a.scores.bias_scale;
    __syncwarp();
    if constexpr (kMasked)
      if (more) make_mask_map(a, tile, lane);
    if (lane == 0) arrive(&shared.tile_full[state.stage]);
    if constexpr (kPacked) {
      // The next tile is claimed as late as possible, so that the last tiles go to CTAs that are idle.
      if (more && a.packed.tile_counter) wait(&shared.packed.tile_wanted, wanted_parity), wanted_parity ^= 1;
      scheduler.claim();
    }
    if constexpr (kSparse)
      if (more) wait(&shared.sparse.tile_wanted, wanted_parity), wanted_parity ^= 1;
  }
}

// ---- the producer warp: one thread of it loads queries, keys, values and tiles of a float mask

template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::load_value_block(const Arguments& a, ValueBuffer& buffer,
                                                                                int row, int head, int batch,
                                                                                uint64_t* barrier) {
  arrive_expect_tx(barrier, sizeof(ValueBuffer));
#pragma unroll
  for (int box = 0; box < kHeadDimVBoxes; ++box)
    tma_load(buffer.box[box], a.value_tma, {box * kBoxColumns, row, head, batch}, barrier);
}

template <class T, class Variant>
struct ForwardSm90Kernel<T, Variant>::Producer {
  const Arguments& a;
  Shared& shared;
  // The next tile may come late where it is claimed from a counter: then it is fetched once it is there, or at the end.
  static constexpr bool kFetchesLate = kPacked || kSparse;
  static constexpr bool kHoldsTile = kMasked || kPacked;  // to the end of the tile, since its members are read until then
  PipelineState<kWorkTiles> next_tile;
  PipelineState<kQueryStages> query;
  PipelineState<kKeyStages> key;  // and values, unless kVByColumns
  // The tile of the queries that are loaded or being loaded:
  int batch, head, first_query, begin, end, tile_stage;
  int row_block;  // the first one without loaded queries

  __device__ void fetch_tile() {
    wait(&shared.tile_full[next_tile.stage], next_tile.parity);
    const ForwardWorkTile& tile = shared.tile[next_tile.stage];
    batch = tile.batch;
    head = tile.head;
    first_query = query_begin(tile) + tile.first_query;
    begin = tile.begin;
    end = tile.end;
    tile_stage = next_tile.stage;
    if (!kHoldsTile) arrive(&shared.tile_empty[tile_stage]);
    next_tile.advance();
    row_block = batch < 0 ? kRowBlocks : 0;
  }

  // Loads the queries of the tile: all of them, or as many as find a free buffer.
  __device__ void load_queries(bool all) {
#pragma unroll 1
    for (; row_block < kRowBlocks; ++row_block) {
      if (!all && !test_wait(&shared.query_empty[query.stage], query.parity ^ 1)) return;
      wait(&shared.query_empty[query.stage], query.parity ^ 1);
      arrive_expect_tx(&shared.query_full[query.stage], sizeof(QueryBuffer));
#pragma unroll
      for (int box = 0; box < kHeadDimBoxes; ++box)
        tma_load(shared.query[query.stage].box[box], a.query_tma,
                 {box * kBoxColumns, first_query + row_block * kRowsPerWarpgroup, head / a.q_heads_per_query_head,
                  batch * a.query_batch_step},
                 &shared.query_full[query.stage]);
      query.advance();
    }
  }

  // True if a warpgroup needs the float mask of a block.
  __device__ static bool needs_mask(const ForwardWorkTile& tile, int i, int block) {
    const int bit = (block - tile.begin) >> tile.map.shift;
    return tile.map.row_block[i].visited[bit / 32] >> bit % 32 & ~tile.map.row_block[i].clear[bit / 32] >> bit % 32 & 1;
  }

  // Announces the bytes of a stage of keys; the mask's tiles of the block count on the same barrier.
  __device__ __forceinline__ void begin_key_stage(const ForwardWorkTile& tile, int block, int mask_query, int mask_head,
                                                  int mask_batch) {
    if constexpr (kFloatMask) {
      unsigned bytes = sizeof(KeyBuffer);
#pragma unroll 1
      for (int i = 0; i < kRowBlocks; ++i) bytes += needs_mask(tile, i, block) ? kBoxRowBytes * a.mask.box_rows : 0;
      arrive_expect_tx(&shared.key_full[key.stage], bytes);
#pragma unroll 1
      for (int i = 0; i < kRowBlocks; ++i)
        if (needs_mask(tile, i, block))
          tma_load(shared.mask.stage[key.stage].box[i], a.mask_tma,
                   {block * kKeys, a.mask.box_rows == 1 ? 0 : mask_query + i * kRowsPerWarpgroup, mask_head, mask_batch},
                   &shared.key_full[key.stage]);
    } else {
      arrive_expect_tx(&shared.key_full[key.stage], sizeof(KeyBuffer));
    }
  }

  // The boxes of a block of keys, in one stage or in several.
  __device__ __forceinline__ void load_key_block(int row, int head, int batch) {
#pragma unroll
    for (int box = 0; box < kHeadDimBoxes; ++box) {
      if (box > 0 && box % kBoxesPerKeyStage == 0) {
        key.advance();
        wait(&shared.key_empty[key.stage], key.parity ^ 1);
        arrive_expect_tx(&shared.key_full[key.stage], sizeof(KeyBuffer));
      }
      tma_load(shared.key[key.stage].box[box % kBoxesPerKeyStage], a.key_tma, {box * kBoxColumns, row, head, batch},
               &shared.key_full[key.stage]);
    }
  }

  __device__ void run() {
    fetch_tile();
    while (batch >= 0) load_tile();
  }

  // The keys and values of the tile, and its queries; on the way the next tile is fetched, and its queries are loaded.
  __device__ __forceinline__ void load_tile() {
    const int key_head = head / a.q_heads_per_key_head, value_head = head / a.q_heads_per_value_head;
    const int key_batch = batch * a.key_batch_step, value_batch = batch * a.value_batch_step;
    const int end_block = end, stage = tile_stage;
    const ForwardWorkTile& tile = shared.tile[stage];
    const int first_block = next_loaded_block(tile, begin, end), key_row = key_begin(tile);
    [[maybe_unused]] const int mask_batch = batch * a.mask_batch_step, mask_head = head * a.mask_head_step,
                               mask_query = first_query;
    [[maybe_unused]] bool claims = kSparse;
    // A warpgroup after its last block waits for the next tile before it releases the blocks that only others see. The next
    // tile is therefore asked for before the first warpgroup's last block.
    [[maybe_unused]] int claim_at = end_block;
    if constexpr (kPacked) {
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) claim_at = min(claim_at, tile.row_block[i].end);
      claim_at = max(claim_at - kClaimAhead, first_block);
    }
#pragma unroll 1
    for (int block = first_block, next; block < end_block; block = next) {
      next = next_loaded_block(tile, block + 1, end_block);
      wait(&shared.key_empty[key.stage], key.parity ^ 1);
      begin_key_stage(tile, block, mask_query, mask_head, mask_batch);
      load_key_block(key_row + block * kKeys, key_head, key_batch);
      // The queries of this tile come after its first keys, those of the next tile as soon as they find a buffer.
      if (block == first_block) {
        load_queries(true);
        if constexpr (!kFetchesLate) fetch_tile();
      } else if (!kFetchesLate || tile_stage != stage) {
        load_queries(false);
      }
      if constexpr (kPacked)
        if (block == claim_at) arrive(&shared.packed.tile_wanted);
      if constexpr (kSparse)
        if (claims && block >= tile.claims.at) arrive(&shared.sparse.tile_wanted), claims = false;
      if constexpr (!kVByColumns) {
        wait(&shared.value_empty[key.stage], key.parity ^ 1);
        uint64_t* barrier = &shared.value_full[key.stage];
        if constexpr (kPacked)
          if ((block + 1) * kKeys > tile.sequence.keys) barrier = &shared.packed.value_loaded[key.stage];
        load_value_block(a, shared.value[key.stage], key_row + block * kKeys, value_head, value_batch, barrier);
      }
      key.advance();
      if (kFetchesLate && tile_stage == stage &&
          (next >= end_block || test_wait(&shared.tile_full[next_tile.stage], next_tile.parity)))
        fetch_tile();
    }
    if (kHoldsTile) arrive(&shared.tile_empty[stage]);
  }
};

// ---- with kVByColumns: a thread of another warp loads them. Their one buffer becomes free at other times than those of keys,
// and a thread that waits for the one would delay the other.

template <class T, class Variant>
__device__ void ForwardSm90Kernel<T, Variant>::load_values(const Arguments& a, Shared& shared) {
  PipelineState<kWorkTiles> next_tile;
  PipelineState<kStages> value;
  while (true) {
    wait(&shared.tile_full[next_tile.stage], next_tile.parity);
    const ForwardWorkTile& tile = shared.tile[next_tile.stage];
    if (tile.batch < 0) return;
    const int head = tile.head / a.q_heads_per_value_head, batch = tile.batch * a.value_batch_step, begin = tile.begin,
              end = tile.end;
    arrive(&shared.tile_empty[next_tile.stage]);
    next_tile.advance();
#pragma unroll 1
    for (int block = begin; block < end; ++block) {
      wait(&shared.value_empty[value.stage], value.parity ^ 1);
      load_value_block(a, shared.value[value.stage], block * kKeys, head, batch, &shared.value_full[value.stage]);
      value.advance();
    }
  }
}

// ---- packed sequences: two warps that clear memory

// Values after the last key of a sequence belong to another one. Their weights are 0, but 0 times infinity or NaN is not.
template <class T, class Variant>
__device__ void ForwardSm90Kernel<T, Variant>::clear_value_tails(Shared& shared, int lane) {
  PipelineState<kWorkTiles> next_tile;
  int blocks = 0;  // loaded so far, with this tile
  unsigned parities = 0;  // of value_loaded, one bit per stage
  while (true) {
    wait(&shared.tile_full[next_tile.stage], next_tile.parity);
    const ForwardWorkTile& tile = shared.tile[next_tile.stage];
    if (tile.batch < 0) return;
    blocks += tile.end - tile.begin;
    const int valid = tile.sequence.keys - (tile.end - 1) * kKeys;
    __syncwarp();
    if (lane == 0) arrive(&shared.tile_empty[next_tile.stage]);
    next_tile.advance();
    if (valid >= kKeys) continue;
    const int stage = (blocks - 1) % kStages;
    wait(&shared.packed.value_loaded[stage], parities >> stage & 1);
    parities ^= 1u << stage;
    constexpr int kChunks = static_cast<int>(kBoxRowBytes) / kVectorBytes;
    const int first = max(valid, 0) * kChunks;
#pragma unroll
    for (int box = 0; box < kHeadDimVBoxes; ++box) {
      uint4* const chunks = reinterpret_cast<uint4*>(shared.value[stage].box[box]);
      for (int n = first + lane; n < kKeys * kChunks; n += kWarpSize) chunks[n] = {};
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) arrive(&shared.value_full[stage]);
  }
}

// Rows that belong to no sequence get a result of 0 and an lse of -inf.
template <class T, class Variant>
__device__ __forceinline__ void ForwardSm90Kernel<T, Variant>::clear_rows(const Arguments& a, const Rows& rows, int lane) {
  const int begin = static_cast<int>(rows.begin), end = begin + static_cast<int>(rows.count);
#pragma unroll 1
  for (int row = begin; row < end; ++row)
#pragma unroll 1
    for (int head = 0; head < a.heads; ++head) {
      T* const out = static_cast<T*>(a.out) + head * a.out_stride[1] + row * a.out_stride[2];
      const int column = lane * kPerVector<T>;
      if (column < a.head_dim_v) *reinterpret_cast<uint4*>(out + column) = {};
      if (lane == 0 && a.lse) {
        const int64_t at = head * a.lse_stride[1] + row;
        a.lse[at] = -INFINITY;
        if (a.lse_low) a.lse_low[at] = 0;
      }
    }
}

// Padding rows.
template <class T, class Variant>
__device__ void ForwardSm90Kernel<T, Variant>::clear_padding_rows(const Arguments& a, int lane) {
#pragma unroll 1
  for (int n = static_cast<int>(blockIdx.x); n <= a.packed.sequences; n += static_cast<int>(gridDim.x))
    clear_rows(a, padding_rows(a.packed.query_starts, a.packed.sequences, n, a.queries, a.packed.total_queries), lane);
}

// ---- the bit warps: which keys of mixed blocks are shown. Their bits come with the keys.

template <class T, class Variant>
__device__ void ForwardSm90Kernel<T, Variant>::make_sparse_bits(const Arguments& a, Shared& shared, int part, int lane) {
  PipelineState<kWorkTiles> next_tile;
  PipelineState<kStages> key;
  while (true) {
    wait(&shared.tile_full[next_tile.stage], next_tile.parity);
    const ForwardWorkTile& tile = shared.tile[next_tile.stage];
    if (tile.batch < 0) return;
    const HeadSparsity sparsity(a.sparsity.queries, a.sparsity.keys, a.sparsity.tiles, a.sparsity.tile_keys,
                                {{0, a.queries}, {0, a.keys}, {}}, tile.batch, tile.head);
#pragma unroll 1
    for (int block = next_loaded_block(tile, tile.begin, tile.end); block < tile.end;
         block = next_loaded_block(tile, block + 1, tile.end)) {
      const int bit = (block - tile.begin) >> tile.map.shift;
#pragma unroll 1
      for (int tile_part = part; tile_part < kRowBlocks * kBitWords; tile_part += kBitWarps) {
        const int i = tile_part / kBitWords, n = tile_part % kBitWords;
        if (!is_bit_set(tile.map.row_block[i].visited, bit) || is_bit_set(tile.map.row_block[i].clear, bit)) continue;
        unsigned words[4];
        mask_bits_of(words, sparsity, tile.first_query + i * kRowsPerWarpgroup, a.queries, block * kKeys + n * kMaskMapTile,
                     a.keys, lane);
#pragma unroll
        for (int group = 0; group < 4; ++group)
          shared.sparse.word[key.parity][key.stage][4 * i + group][n][lane] = words[group];
      }
      wait(&shared.key_empty[key.stage], key.parity ^ 1);  // or the arrival would count for the block before in this stage
      __syncwarp();
      if (lane == 0) arrive(&shared.key_full[key.stage]);
      key.advance();
    }
    __syncwarp();
    if (lane == 0) arrive(&shared.tile_empty[next_tile.stage]);
    next_tile.advance();
  }
}

// ---- the dropout warps: which weights are kept. Their bits come with the keys.

template <class T, class Variant>
__device__ void ForwardSm90Kernel<T, Variant>::generate_dropout(const Arguments& a, Shared& shared, int warp, int lane) {
  if (!a.dropout.rng) return;
  PipelineState<kWorkTiles> next_tile;
  PipelineState<kStages> key;
  // Shows the compiler that a value is the same in all lanes: what follows from such values and from the keys alone is then
  // computed once per warp.
  const auto uniform = [](auto x) { return __shfl_sync(~0u, x, 0); };
  const Philox random(uniform(a.dropout.rng[0]), uniform(a.dropout.rng[1]));
  // A lane has kRowBlocks queries, and the warp some of the keys.
  const int key_warp = warp % kDropoutKeyWarps;
  const auto row = [&](int i) { return (warp / kDropoutKeyWarps + 2 * i) * kWarpSize + lane; };
  while (true) {
    wait(&shared.tile_full[next_tile.stage], next_tile.parity);
    const ForwardWorkTile& tile = shared.tile[next_tile.stage];
    if (tile.batch < 0) return;
    const int64_t batch = a.dropout.batch_begin + uniform(tile.batch);
    const int head = uniform(tile.head);
    Philox::OfQuery query[kRowBlocks];
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) query[i] = random.of_query(batch, head, tile.first_query + row(i));
#pragma unroll 1
    for (int block = next_loaded_block(tile, tile.begin, tile.end); block < tile.end;
         block = next_loaded_block(tile, block + 1, tile.end)) {
      // Draws per query, and how many of them the registers can hold at once.
      constexpr int kDraws = kDropoutKeys / Philox::kKeys, kAtOnce = kRowBlocks > 2 ? 1 : 2;
      const int first = uniform(block * (kKeys / Philox::kKeys)) + key_warp * kDraws;
      unsigned keep[kRowBlocks] = {};
#pragma unroll 1
      for (int n = 0; n < kDraws; n += kAtOnce) {
#pragma unroll
        for (int i = 0; i < kRowBlocks; ++i) keep[i] >>= Philox::kKeys * kAtOnce;
#pragma unroll
        for (int m = 0; m < kAtOnce; ++m) {
          const Philox::OfGroup group = random.of_group(batch, head, first + n + m);
#pragma unroll
          for (int i = 0; i < kRowBlocks; ++i)
            random.add_kept(query[i], group, a.dropout.threshold, 32 - Philox::kKeys * (kAtOnce - m), keep[i]);
        }
      }
      wait(&shared.key_empty[key.stage], key.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) shared.dropout.keep[key.stage][row(i)][key_warp] = keep[i] >> (32 - kDropoutKeys);
      __syncwarp();
      if (lane == 0) arrive(&shared.key_full[key.stage]);
      key.advance();
    }
    __syncwarp();
    if (lane == 0) arrive(&shared.tile_empty[next_tile.stage]);
    next_tile.advance();
  }
}

}  // namespace flash_online::cuda
