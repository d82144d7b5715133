// Attention forward for every GPU from compute capability 8.0 on, on mma.sync and cp.async: FlashAttention-2's organisation
// (arXiv 2307.08691). docs/design/attention_sm80.md draws it.
//
// A CTA takes a tile of one head's queries. Each warp takes 16 * row_tiles of them and has their scores, weights and outputs in
// registers. The mainloop passes over blocks of keys: the block's values and mask are loaded while its scores are computed, the
// next block's keys while weights and outputs are computed.
#pragma once

#include "../../hw/compiler.cuh"
#include "../../hw/launch.h"
#include "../../hw/named_barrier.cuh"
#include "../../hw/uniform.cuh"
#include "../../mma/gemm.cuh"
#include "../cache/kv_splits.cuh"
#include "../common/dropout.cuh"
#include "../common/max_logit.cuh"
#include "../common/scores.cuh"
#include "../common/store_rows.cuh"
#include "../common/tile_list.cuh"
#include "../kernels.h"
#include "../masks/visible_blocks.cuh"
#include "load.cuh"
#include "load_cached.cuh"
#include "tiles.h"
#include "variants.cuh"

namespace flash_online::cuda {

struct ForwardSm80Arguments {
  AttentionProblem problem;
  TileList list;
  TileTables tiles;
  ScoreMod score_mod;
  float keep_scale;  // 1 / (1 - dropout)
  KvSplits kv_splits;  // of cached keys
  int group = 1;  // heads per tile, over cached keys
  int heads_per_key_head = 1, heads_per_value_head = 1;
  int64_t query_step = 0, key_step = 0, value_step = 0;  // TileVectors::step
};

// A CTA's forward pass: run() calls the phases in the order in which they stand. kCached: over cached keys, which have neither
// masks nor dropout.
template <class Element, int kHeadDim, Variant kVariant, bool kCached = false>
class ForwardSm80Kernel {
 public:
  static constexpr bool kHasOptions = has_options(kVariant), kHasMask = kHasOptions && !kCached;
  // 16-bit elements without options: scores change by visibility alone, and weights are made during the product with the
  // values.
  static constexpr bool kIsSimple = !kHasOptions && !kCached && Fragments<Element>::kDigits == 1;
  static constexpr bool kHasVectors = kIsSimple && kVariant != Variant::kAnyRows;  // rows consist of whole vectors
  // Whether a warp skips the products of a block if its rows see none of the block's keys. One variant computes such blocks
  // too: if it skipped them, the compiler would spill registers, and every other block would reload them.
  static constexpr bool kSkipsBlocks = kVariant != Variant::kPlain163 || kHeadDim != 128;
  static constexpr ForwardSm80Tile kTile = forward_sm80_tile(kDigitsBytes<Element>, kHeadDim, kVariant);
  static constexpr int kThreads = kTile.threads(), kQueries = kTile.queries(), kKeys = kTile.keys;
  static constexpr int kHeadDimV = kTile.head_dim_v, kRowTiles = kTile.row_tiles, kStages = kTile.stages;
  static constexpr bool kSharesColumns = kTile.column_warps > 1;
  static_assert(!kSharesColumns || kIsSimple);
  static constexpr int kRowWarps = kTile.warps / kTile.sharing_warps();  // with different rows
  static constexpr int kWarpKeys = kKeys / kTile.sharing_warps();  // whose scores a warp computes, of a step
  static constexpr int kWarpColumns = kHeadDimV / kTile.column_warps;  // of the values, that a warp sums

  static int shared_bytes(const AttentionProblem& problem) {
    const int rows = !problem.mask.data ? 0 : problem.mask.stride[2] == 0 ? 1 : kQueries;
    const int staged_columns = kCached && is_float8(problem.cache.dtype) ? kHeadDim + kHeadDimV : 0;
    return kTile.shared_bytes() + (kCached ? cached_place_bytes(kKeys) : 0) + kKeys * staged_columns +
           rows * mask_pitch(kKeys, static_cast<int>(size_of(problem.mask_dtype)));
  }

  static constexpr TileCopy kQueryCopy{.rows = kQueries, .width = kHeadDim, .threads = kThreads},
      kKeyCopy{.rows = kKeys, .width = kHeadDim, .threads = kThreads},
      kValueCopy{.rows = kKeys, .width = kHeadDimV, .threads = kThreads};
  // TileVectors::step of the rows of `view`, where the kernel has TileVectors.
  template <TileCopy kCopy>
  static int64_t step_of(const ConstView4& view) {
    if constexpr (kHasVectors) return TileVectors<Element, kCopy>::step(view.stride[2]);
    return 0;
  }

  __device__ static void run(const ForwardSm80Arguments& arguments);

 private:
  using Digit = typename Digits<Element>::Digit;
  using QueryTile = SharedTile<Element, kHeadDim>;
  using ValueTile = SharedTile<Element, kHeadDimV>;
  using WeightTile = SharedTile<Element, kKeys>;
  using Outputs = Accumulator<kRowTiles, kWarpColumns / 8>;
  using Scores = Accumulator<kRowTiles, kWarpKeys / 8>;
  using Compensation = CompensatedAccumulator<Element, kRowTiles, kWarpKeys / 8>;
  using RowStates = ScoreState[kRowTiles][2];
  using TileRows = std::conditional_t<kCached, GroupRows, PlainRows>;
  using KeyRows = std::conditional_t<kCached, CachedRows<Element, kKeys, kThreads>, HeadRows<Element>>;
  template <TileCopy kCopy>
  using Prefetch = std::conditional_t<kCached, CachedPrefetch<Element, kCopy>, TilePrefetch<Element, kCopy>>;
  static constexpr int kQueryBytes = QueryTile::bytes(kQueries), kKeyBytes = QueryTile::bytes(kKeys),
                       kValueBytes = ValueTile::bytes(kKeys);
  static_assert(kQueryBytes % 16 == 0 && kKeyBytes % 16 == 0 && kValueBytes % 16 == 0);
  static constexpr int kStageBytes = kKeyBytes + kValueBytes, kTileBytes = kQueryBytes + kStages * kStageBytes;
  static_assert(kTileBytes + kTile.weight_bytes() == kTile.shared_bytes());
  static_assert(!kSharesColumns || WeightTile::bytes(kQueries) == kTile.weight_bytes());

  struct Stage {
    QueryTile keys;
    ValueTile values;
    __device__ __forceinline__ Stage(char* shared, int stage)
        : keys{reinterpret_cast<Digit*>(shared + kQueryBytes + stage * kStageBytes)},
          values{reinterpret_cast<Digit*>(shared + kQueryBytes + kKeyBytes + stage * kStageBytes)} {}
  };

  // The work of a CTA: queries [query, last_query) of one or more heads; `sequence` has the keys of one kv_split.
  struct Work {
    int64_t batch, head;  // the first head
    int64_t kv_split, kv_splits;  // of cached keys
    int64_t value_panel;  // of the values' columns
    TileRows rows;
    Sequence sequence;
    int query, last_query;
  };

  // The copies of blocks to shared memory. With one stage, a step starts those of its values and, once the keys have been used,
  // those of the next block's keys; with two, all of the next block. Floats wait in registers until they are finished.
  struct BlockCopies {
    const KeyRows &key_rows, &value_rows;
    int all;  // keys
    Prefetch<kKeyCopy> keys;
    Prefetch<kValueCopy> values;
    int next_key = -1;
    static constexpr bool kWhole = false, kAmongProducts = false;

    __device__ __forceinline__ BlockCopies(const KeyRows& key_rows_, const KeyRows& value_rows_, int all_)
        : key_rows(key_rows_), value_rows(value_rows_), all(all_) {}
    __device__ __forceinline__ void start_values(ValueTile tile, int key) { values.start(tile, value_rows, key, all); }
    __device__ __forceinline__ void start_values_at(ValueTile, int) {}
    __device__ __forceinline__ void finish_values(ValueTile tile, int key) { values.finish(tile, value_rows, key, all); }
    __device__ __forceinline__ void start_keys(QueryTile tile, int key) { keys.start(tile, key_rows, key, all); }
    __device__ __forceinline__ void finish_keys(QueryTile tile, int key) { keys.finish(tile, key_rows, key, all); }
    // With two stages: the next block, whose keys and values start_next_at copies at each step of the product.
    __device__ __forceinline__ void start_next(int key, bool exists) { next_key = exists ? key : -1; }
    __device__ __forceinline__ void start_next_at(const Stage& tiles, int step) {
      if (step > 0 || next_key < 0) return;
      start_keys(tiles.keys, next_key);
      start_values(tiles.values, next_key);
    }
  };
  // The same for rows that consist of whole vectors. All addresses are made anew from the number of the thread: what was kept
  // from block to block would take the registers of fragments. kIsWhole: all queries see all keys of each block that is taken,
  // and all rows of the next one exist.
  template <bool kIsWhole>
  struct VectorCopies {
    using KeyVectors = TileVectors<Element, kKeyCopy>;
    using ValueVectors = TileVectors<Element, kValueCopy>;
    const ForwardSm80Arguments& arguments;
    const KeyRows &key_rows, &value_rows;
    int all;  // keys
    KeyVectors keys;  // of the next block
    ValueVectors values;  // of this block; with two stages, of the next one
    // Copies start between the steps of the product of queries and keys: many at once would delay the product's loads from
    // shared memory.
    static constexpr bool kWhole = kIsWhole, kAmongProducts = true;
    static constexpr int kProductSteps = kHeadDim / 16;

    __device__ __forceinline__ VectorCopies(const ForwardSm80Arguments& arguments_, const KeyRows& key_rows_,
                                            const KeyRows& value_rows_, int all_)
        : arguments(arguments_),
          key_rows(key_rows_),
          value_rows(value_rows_),
          all(all_),
          keys(key_rows_, 0),
          values(value_rows_, 0) {}
    template <class Vectors>
    __device__ __forceinline__ Vectors vectors(const KeyRows& rows, int key) const {
      const unsigned thread = opaque(threadIdx.x);
      return kWhole ? Vectors(rows, key, thread) : Vectors(rows, key, all, thread);
    }
    __device__ __forceinline__ void start_values(ValueTile, int key) { values = vectors<ValueVectors>(value_rows, key); }
    __device__ __forceinline__ void start_values_at(ValueTile tile, int step) {
      constexpr int kPerStep = (ValueVectors::kCount + kProductSteps - 1) / kProductSteps;
      values.load(tile, arguments.value_step, kPerStep * step, kPerStep * (step + 1));
    }
    __device__ __forceinline__ void finish_values(ValueTile, int) {}
    __device__ __forceinline__ void start_keys(QueryTile tile, int key) {
      vectors<KeyVectors>(key_rows, key).load(tile, arguments.key_step);
    }
    __device__ __forceinline__ void finish_keys(QueryTile, int) {}
    // A next block that does not exist becomes 0.
    __device__ __forceinline__ void start_next(int key, bool exists) {
      keys = vectors<KeyVectors>(key_rows, key);
      values = vectors<ValueVectors>(value_rows, key);
      if (!exists) keys.count = values.count = 0;
    }
    __device__ __forceinline__ void start_next_at(const Stage& tiles, int step) {
      constexpr int kCopies = KeyVectors::kCount + ValueVectors::kCount,
                    kPerStep = (kCopies + kProductSteps - 1) / kProductSteps;
#pragma unroll
      for (int n = step * kPerStep; n < min((step + 1) * kPerStep, kCopies); ++n)
        if (n < KeyVectors::kCount)
          keys.load(tiles.keys, arguments.key_step, n, n + 1);
        else
          values.load(tiles.values, arguments.value_step, n - KeyVectors::kCount, n - KeyVectors::kCount + 1);
    }
  };

  // The blocks of keys that a tile sees, and those that all of its queries see whole.
  struct BlockRange {
    KeyRange keys;
    int begin, end, whole_begin, whole_end;
    __device__ __forceinline__ explicit BlockRange(const Work& work) {
      const Visibility& visible = work.sequence.visible;
      const int64_t all = work.sequence.keys.count;
      keys = keys_of_any(visible, work.query, work.last_query, all);
      begin = static_cast<int>(keys.begin / kKeys);
      end = keys.end > keys.begin ? static_cast<int>((keys.end + kKeys - 1) / kKeys) : 0;
      whole_begin = static_cast<int>(ceil_div(keys_of(visible, work.last_query - 1, all).begin, int64_t{kKeys}));
      whole_end = static_cast<int>(keys_of(visible, work.query, all).end / kKeys);
    }
    __device__ __forceinline__ bool is_whole(int block) const { return block >= whole_begin && block < whole_end; }
  };
  __device__ __forceinline__ static auto key_blocks_of(const ForwardSm80Arguments& arguments, const Work& work,
                                                       const BlockRange& blocks) {
    if constexpr (kHasMask)
      return KeyBlocks<kKeys>(arguments.problem, &arguments.tiles, work.batch, work.head, work.query, work.last_query,
                              static_cast<int>(work.sequence.keys.count), blocks.begin, blocks.end);
    else
      return AllBlocks{blocks.begin};
  }

  // Sets `work`; false where the CTA has none. CTAs are an outer list of panels of the values' columns, and of kv_splits of
  // cached keys, each with the list of tiles. The first CTA of a packed sequence's head also clears what has no result.
  __device__ __forceinline__ static bool find_work(const ForwardSm80Arguments& arguments, Work& work) {
    const AttentionProblem& problem = arguments.problem;
    unsigned tile_index = blockIdx.x;
    work.kv_split = work.value_panel = 0;
    if constexpr (kCached || kHeadDimV < kHeadDim) {
      const unsigned tiles = static_cast<unsigned>(arguments.list.count()),
                     most_kv_splits = kCached ? static_cast<unsigned>(arguments.kv_splits.most) : 1;
      work.kv_split = blockIdx.x / tiles % most_kv_splits;
      work.value_panel = blockIdx.x / tiles / most_kv_splits;
      tile_index %= tiles;
    }
    if constexpr (kCached) work.rows = {arguments.group};
    const int tile_queries = kQueries / work.rows.heads;
    const TileCoord tile = tile_coord(problem, arguments.list, tile_index, false, tile_queries, problem.visible.right >= 0);
    work.batch = uniform(static_cast<int>(tile.sequence));
    work.head = uniform(tile.head * work.rows.heads);
    if (problem.query_starts && tile.block == 0 && work.value_panel == 0 && work.kv_split == 0)
      for (int n = 0; n < work.rows.heads; ++n) clear_padding(problem, work.batch, work.head + n);
    work.sequence = kCached ? cached_sequence(problem, work.batch) : sequence_of(problem, work.batch);
    const int queries = static_cast<int>(work.sequence.queries.count);
    work.kv_splits = kCached ? arguments.kv_splits.count_of(work.sequence) : 1;
    if (work.kv_split >= work.kv_splits || tile.block < 0 || tile.block * tile_queries >= queries) return false;
    if (kCached) work.sequence = with_keys(work.sequence, kv_split_of(work.sequence.keys.count, work.kv_splits, work.kv_split));
    work.query = uniform(static_cast<int>(tile.block) * tile_queries);
    work.last_query = uniform(min(work.query + tile_queries, queries));
    return true;
  }

  __device__ __forceinline__ static auto score_block(const ScoreBlock& block, const TileRows& rows) {
    if constexpr (kCached)
      return GroupScoreBlock{block, rows.heads};
    else
      return block;
  }

  // `from`: the first head's rows.
  __device__ __forceinline__ static void load_queries(const ForwardSm80Arguments& arguments, QueryTile tile,
                                                      const HeadRows<Element>& from, const Work& work) {
    if constexpr (kHasVectors)
      return TileVectors<Element, kQueryCopy>(from, work.query, work.last_query, threadIdx.x).load(tile, arguments.query_step);
    if constexpr (kCached)
      load_group<kQueries, kThreads>(tile, from, arguments.problem.query.stride[1], work.rows, work.query, work.last_query);
    else
      load<kQueries, kThreads>(tile, from, work.query, static_cast<int>(work.sequence.queries.count));
  }

  // Starts copying the first block of keys or values.
  template <TileCopy kCopy, class Tile>
  __device__ __forceinline__ static void load_block(Tile tile, const KeyRows& from, int key, int keys, int64_t step) {
    if constexpr (kHasVectors)
      TileVectors<Element, kCopy>(from, key, keys, threadIdx.x).load(tile, step);
    else
      load<kKeys, kThreads>(tile, from, key, keys);
  }

  // What the mainloop reads of the tile's heads.
  struct Head {
    HeadRows<Element> query_rows;
    KeyRows key_rows, value_rows;
    HeadMask mask;
    HeadScoreMod<Element> score_mod;
    Dropout dropout;
    float scale;  // of scores, in their exponent

    __device__ __forceinline__ Head(const ForwardSm80Arguments& arguments, const Work& work)
        : Head(arguments.problem, arguments, work, static_cast<int>(work.head) / arguments.heads_per_key_head,
               static_cast<int>(work.head) / arguments.heads_per_value_head) {}
    __device__ __forceinline__ Head(const AttentionProblem& problem, const ForwardSm80Arguments& arguments, const Work& work,
                                    int key_head, int value_head)
        : query_rows(problem.query, work.batch, work.head, work.sequence.queries.begin, problem.head_dim),
          key_rows(rows_of(problem, problem.key, work.batch, work.sequence.keys, key_head, problem.head_dim, 0, 0)),
          value_rows(rows_of(problem, problem.value, work.batch, work.sequence.keys, value_head, problem.head_dim_v,
                             work.value_panel * kHeadDimV, kKeys * kHeadDim)),
          mask(problem, work.batch, work.head),
          score_mod(score_mod_of_head<Element>(arguments.score_mod, problem, work.batch, work.head)),
          dropout(problem, work.batch, work.head) {
      if (kCached) score_mod.multiply(scale_of(problem.cache.key_scale, problem.cache.key_scale_stride, work.batch, key_head));
      scale = kHasOptions ? score_mod.remaining_scale() : score_mod.scale;
    }
  };

  // Clears packed rows of one head that have no result: out is 0 there, lse is -inf.
  __device__ __forceinline__ static void clear_results(const AttentionProblem& problem, int64_t head, const Rows& rows) {
    clear_rows<Element, kThreads>(problem.out, head, problem.head_dim_v, rows);
    for (int64_t n = threadIdx.x; problem.lse && n < rows.count; n += kThreads) {
      const int64_t index = head * problem.lse_stride[1] + rows.begin + n;
      static_cast<float*>(problem.lse)[index] = lowest<float>();
      if (problem.lse_low) static_cast<float*>(problem.lse_low)[index] = 0;
    }
  }
  // Clears the padding rows of one head around a packed sequence, and the rows of a cached one that do not count.
  __device__ __forceinline__ static void clear_padding(const AttentionProblem& problem, int64_t sequence, int64_t head) {
    const auto clear_before = [&](int64_t n) {
      clear_results(problem, head,
                    padding_rows(problem.query_starts, problem.batch, n, problem.queries, problem.total_queries));
    };
    clear_before(sequence);
    if (sequence == problem.batch - 1) clear_before(problem.batch);
    if (kCached) clear_results(problem, head, unused_queries(problem, sequence));
  }

  // The rows of a head's keys or values, from column `first_column` on. For cached rows, shared memory has their places after
  // the tiles, and the staged rows `staging` bytes after the places.
  __device__ __forceinline__ static KeyRows rows_of(const AttentionProblem& problem, const ConstView4& view, int64_t batch,
                                                    const Rows& keys, int64_t head, int64_t columns, int64_t first_column,
                                                    int staging) {
    if constexpr (kCached) {
      extern __shared__ __align__(16) char shared[];
      char* const places = shared + kTile.shared_bytes();
      return KeyRows(view, problem.cache, batch, keys, head, columns, first_column, places,
                     places + cached_place_bytes(kKeys) + staging);
    } else {
      return KeyRows(view, batch, head, keys.begin, columns, first_column);
    }
  }

  // The least maximum so far of the lane's queries.
  __device__ __forceinline__ static float least_max(const RowStates& states) {
    float least = INFINITY;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) least = fminf(least, fminf(states[i][0].max, states[i][1].max));
    return least;
  }

  template <class F>
  __device__ __forceinline__ static void for_each_row(F&& f) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) f(i, half);
  }

  using RowFloats = float[kRowTiles][2];

  // Adds weights to a row's sum. An fma with the factor of the step before would round the rows of one half of a tile in
  // another way than those of the other.
  __device__ __forceinline__ static void add_sum(ScoreState& state, float weights) {
    state.sum = __fadd_rn(state.sum, weights);
  }

  // The rows and keys of a warp in the tiles of its CTA, and what warps that share queries exchange.
  struct WarpPlace {
    int row;  // the first of its rows
    int share;  // number among the warps that share queries
    int barrier;  // named: of these warps
    WeightTile weights;
    __device__ __forceinline__ int key() const { return share * kWarpKeys; }
    __device__ __forceinline__ int other_key() const { return kWarpKeys - key(); }
    __device__ __forceinline__ int column() const { return kSharesColumns ? share * kWarpColumns : 0; }
    __device__ __forceinline__ void sync() const { sync_named(barrier, kTile.sharing_warps() * kWarpSize); }
    __device__ __forceinline__ bool any(bool value) const {
      if constexpr (kSharesColumns) return any_named(barrier, kTile.sharing_warps() * kWarpSize, value);
      return __any_sync(~0u, value);
    }
    // Calls f(mine, the other warp's) for a number of each row, in place of the weights.
    template <class F>
    __device__ __forceinline__ void exchange(RowFloats& numbers, F&& f) const {
      float* const of_rows = reinterpret_cast<float*>(weights.row(row));
      for_each_row([&](int i, int half) __attribute__((always_inline)) {
        if (lane_in_quad() == 0) of_rows[(2 * i + half) * 16 + share * 8 + quad()] = numbers[i][half];
      });
      sync();
      for_each_row([&](int i, int half) __attribute__((always_inline)) {
        numbers[i][half] = f(numbers[i][half], of_rows[(2 * i + half) * 16 + (1 - share) * 8 + quad()]);
      });
      sync();  // the weights may be written
    }
  };

  __device__ __forceinline__ static WarpPlace place_of(int warp, char* weights) {
    if constexpr (kSharesColumns) {
      const int rows = warp / kTile.column_warps;
      return {rows * 16 * kRowTiles, warp % kTile.column_warps, 1 + rows, {reinterpret_cast<Digit*>(weights)}};
    }
    const int share = kTile.key_warps == 1 ? 0 : warp / kRowWarps;
    const int rows = warp - share * kRowWarps;
    return {rows * 16 * kRowTiles, share, 0, {}};
  }

  // The keys that the rows of a tile see by position: row r those from begin + r to before min(end + r, keys).
  struct Band {
    int begin, end, keys;
    __device__ __forceinline__ Band(const Visibility& visible, int query, int keys_) : keys(keys_) {
      constexpr int64_t kFar = 0x7fff0000;  // a row more, and an int holds it
      const KeyRange range = band_of(visible, query, kFar);
      begin = static_cast<int>(range.begin), end = static_cast<int>(range.end);
    }
    // The keys that any of a warp's rows sees: those from `row` on, up to `last`, the tile's last one.
    __device__ __forceinline__ KeyRange of_rows(int row, int last) const {
      return {max(begin + min(row, last), 0), max(min(end + min(row + 16 * kRowTiles - 1, last), keys), 0)};
    }
    // Hides scores of the rows from `row` on and of the keys from `key` on.
    __device__ __forceinline__ void hide(Scores& scores, int row, int key) const {
      const bool has_begin = begin + row + 16 * kRowTiles - 1 > key;
      for_each_row([&](int i, int half) __attribute__((always_inline)) {
        const int r = row + 16 * i + 8 * half + quad(), lane_key = key + 2 * lane_in_quad(),
                  last = min(end + r, keys) - lane_key, first = begin + r - lane_key;
#pragma unroll
        for (int j = 0; j < kWarpKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = scores[i][j][2 * half + e];
            x = 8 * j + e < last && (!has_begin || 8 * j + e >= first) ? x : lowest<float>();
          }
      });
    }
  };

  // The lane's maxima of its rows in a block of scores.
  __device__ __forceinline__ static void find_maxima(const Scores& scores, RowFloats& maxima) {
    for_each_row([&](int i, int half) __attribute__((always_inline)) {
      float block_max = lowest<float>();
#pragma unroll
      for (int j = 0; j < kWarpKeys / 8; ++j)
        block_max = fmaxf(block_max, fmaxf(scores[i][j][2 * half], scores[i][j][2 * half + 1]));
      maxima[i][half] = block_max;
    });
  }

  // Raises the rows' maxima to the block's, and rescales the outputs so far where one has risen by much, which few blocks do:
  // one vote says so. All rows go through each step together: a step of one row would wait for its own results. Returns whether
  // a row of the warp has large scores.
  __device__ __forceinline__ static bool raise_maxima(const Scores& scores, Outputs& out, RowStates& states, float scale,
                                                      const WarpPlace& place) {
    RowFloats maxima;
    find_maxima(scores, maxima);
    bool rises = false;
    for_each_row([&](int i, int half) __attribute__((always_inline)) {
      maxima[i][half] = __fmul_rn(maxima[i][half], scale);
      rises |= states[i][half].exceeds(kRescaleThreshold, maxima[i][half]) || is_large_row(states[i][half]);
    });
    if (!place.any(rises)) [[likely]]
      return false;
#pragma unroll
    for (int distance = 1; distance <= 2; ++distance)
      for_each_row([&](int i, int half) __attribute__((always_inline)) {
        maxima[i][half] = fmaxf(maxima[i][half], __shfl_xor_sync(~0u, maxima[i][half], distance));
      });
    if constexpr (kSharesColumns) place.exchange(maxima, [](float mine, float other) { return fmaxf(mine, other); });
    bool has_large = false;
    for_each_row([&](int i, int half) __attribute__((always_inline)) {
      const float factor = states[i][half].raise_max_lazily(kRescaleThreshold, maxima[i][half]);
      has_large |= is_large_row(states[i][half]);
#pragma unroll
      for (int j = 0; j < kWarpColumns / 8; ++j) {
        out[i][j][2 * half] *= factor;
        out[i][j][2 * half + 1] *= factor;
      }
    });
    return !Compensation::kCompensated && __any_sync(~0u, has_large);
  }
  // Whether scores are rounded before the maximum is subtracted (score_levels.cuh); floats in digits need it much later.
  __device__ __forceinline__ static bool is_large_row(const ScoreState& state) {
    return !Compensation::kCompensated && is_large_score(state.max);
  }

  // Adds weights times values to the outputs, and weights to the rows' sums. The weights of a step's keys are made while the
  // tensor cores multiply those of the step before. kLarge: some rows may have large scores.
  template <bool kLarge>
  __device__ __forceinline__ static void add_weighted_values(const Scores& scores, Outputs& out, RowStates& states, float scale,
                                                             ValueTile values, const WarpPlace& place) {
    using F = Fragments<Element>;
    RowFloats pivots, sums = {};
    for_each_row([&](int i, int half) __attribute__((always_inline)) { pivots[i][half] = pivot(states[i][half].max); });
    multiply_by_columns<kWarpKeys / F::kDepth>(
        out,
        [&](typename F::Left& a, int i, int step) __attribute__((always_inline)) {
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const int j = 2 * step + n / 2, half = n % 2;
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float score = scores[i][j][2 * half + e];
              x[e] = FastBinary::exp(kLarge ? exponent_below(score, scale, pivots[i][half])
                                            : fmaf(score, scale, -pivots[i][half]));
              sums[i][half] += x[e];
            }
            a.words[0][n] = F::pair(x[0], x[1]);
            if constexpr (kSharesColumns)
              *reinterpret_cast<unsigned*>(place.weights.row(place.row + 16 * i + 8 * half + quad()) + place.key() + 8 * j +
                                           2 * lane_in_quad()) = a.words[0][n];
          }
        },
        kSharesColumns ? values.from(place.key(), place.column()) : values, 0);
    if constexpr (kSharesColumns) {
      place.sync();  // the other warp's weights are there
      multiply_rows_by_columns<kWarpKeys>(out, place.weights.from(0, place.other_key()), place.row,
                                          values.from(place.other_key(), place.column()), 0);
    }
    for_each_row([&](int i, int half) __attribute__((always_inline)) { add_sum(states[i][half], sums[i][half]); });
  }

  // All of a block's softmax and its product with the values.
  __device__ __forceinline__ static void absorb_block(const Scores& scores, Outputs& out, RowStates& states, float scale,
                                                      ValueTile values, const WarpPlace& place) {
    if (!raise_maxima(scores, out, states, scale, place)) [[likely]]
      add_weighted_values<false>(scores, out, states, scale, values, place);
    else
      add_weighted_values<true>(scores, out, states, scale, values, place);
  }

  // Raises the maxima in the rows' states, replaces the scores by their weights and adds the weights to the states' sums.
  __device__ __forceinline__ static void softmax_step(Scores& scores, const Compensation& compensation, Outputs& out,
                                                      RowStates& states, float scale, const WarpPlace& place) {
    const bool has_large = raise_maxima(scores, out, states, scale, place);
    for_each_row([&](int i, int half) __attribute__((always_inline)) {
      ScoreState& state = states[i][half];
      if (has_large && __any_sync(~0u, is_large_row(state))) [[unlikely]]
        return add_sum(state, make_large_row_weights(scores, i, half, scale, state.max));
      const bool rounds_first = Compensation::kCompensated && is_rounding_large(state.max);
      const float sum = make_row_weights(scores, i, half, [&](float x, int j, int e) {
        if (rounds_first) [[unlikely]]
          return state.weight(__fmul_rn(x, scale));
        if constexpr (Compensation::kCompensated) return state.weight_of_product(x, compensation.low[i][j][e], scale);
        return state.weight_of_product(x, scale);
      });
      add_sum(state, sum);
    });
  }

  // Raises the warp's largest score, in the form that the exponential takes, to those of a block. Rows that do not exist have
  // scores too.
  template <class Block>
  __device__ __forceinline__ static void raise_largest_score(const Scores& scores, const Block& here, int row, float& largest) {
    for_each_row([&](int i, int half) __attribute__((always_inline)) {
      if (here.query_of(row + 16 * i + 8 * half + quad()) >= here.queries) return;
#pragma unroll
      for (int j = 0; j < kWarpKeys / 8; ++j)
        largest = max_or_nan(largest, max_or_nan(scores[i][j][2 * half], scores[i][j][2 * half + 1]));
    });
  }

  // Makes scores of a block's products (score modification, mask, visibility), and absorbs them.
  template <class Block>
  __device__ __forceinline__ static void absorb(const AttentionProblem& problem, const Head& head, const Work& work,
                                                const Band& band, const Block& here,
                                                const MaskTile<kQueries, kKeys, kThreads>& mask_tile, bool is_clear,
                                                Scores& scores, Compensation& compensation, Outputs& out, RowStates& states,
                                                float& largest, ValueTile values, const WarpPlace& place) {
    if constexpr (kIsSimple) {
      if (!here.whole) band.hide(scores, place.row, here.key);
      absorb_block(scores, out, states, head.scale, values, place);
    } else {
      const int row = place.row;
      const Visibility& visible = work.sequence.visible;
      if (kHasOptions && head.score_mod.has_score_mod)
        apply_score_mod<false>(scores, row, head.score_mod, here, visible, NoDerivative{}, &compensation);
      const auto least = [&] { return least_max(states); };
      if (kHasMask && head.mask.data && !is_clear)
        mask_scores<false>(scores, row, head.mask.dtype, head.score_mod.lowest_score, mask_tile, least, &compensation);
      if (kHasOptions && problem.is_sparse() && !is_clear)
        hide_by_sparsity<false>(scores, row, HeadSparsity(problem, work.sequence, work.batch, work.head), here,
                                kCached ? static_cast<int>(work.sequence.keys.begin) : 0);
      renormalize(scores, compensation);
      if (!here.whole) hide_scores<false>(scores, row, here, visible);
      if (kHasMask && problem.max_logit) raise_largest_score(scores, here, row, largest);
      softmax_step(scores, compensation, out, states, head.scale, place);
      if (kHasMask && head.dropout) drop_weights<false>(scores, row, head.dropout, here, [](float& x) { x = 0; });
      multiply_accumulators(out, scores, values.from(place.key(), 0));
    }
  }

  // Merges the results of the warps that share queries into those of the first warp, through shared memory not in use.
  __device__ __forceinline__ static void merge_key_warps(float4* memory, int warp, int key_warp, Outputs& out,
                                                         RowStates& states) {
    constexpr int kVectors = kRowTiles * (kHeadDimV / 8), kStates = kRowTiles;  // per lane
    static_assert(kRowWarps * (kVectors + kStates) * kWarpSize * 16 <= kTile.shared_bytes());
    float4* const from = memory + warp % kRowWarps * (kVectors + kStates) * kWarpSize + lane();
    if (key_warp == 1) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        from[i * kWarpSize] = {states[i][0].max, states[i][0].sum, states[i][1].max, states[i][1].sum};
#pragma unroll
        for (int j = 0; j < kHeadDimV / 8; ++j)
          from[(kStates + i * (kHeadDimV / 8) + j) * kWarpSize] = {out[i][j][0], out[i][j][1], out[i][j][2], out[i][j][3]};
      }
    }
    __syncthreads();
    if (key_warp == 1) return;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const float4 other = from[i * kWarpSize];
      float factors[2], others[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ScoreState& state = states[i][half];
        const ScoreState partial{half ? other.z : other.x, half ? other.w : other.y};
        factors[half] = state.raise_max(partial.max);
        others[half] = ScoreState::rescale(partial.max, state.max);
        state.add(partial.sum * others[half]);
      }
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j) {
        const float4 x = from[(kStates + i * (kHeadDimV / 8) + j) * kWarpSize];
        const float added[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][j][e] = out[i][j][e] * factors[e / 2] + added[e] * others[e / 2];
      }
    }
  }

  // Adds up the sums of the rows' weights that the lanes of a quad have, and warps that share columns.
  __device__ __forceinline__ static void join_sums(RowStates& states, const WarpPlace& place) {
    RowFloats sums;
    for_each_row([&](int i, int half) __attribute__((always_inline)) {
      float& sum = sums[i][half] = states[i][half].sum;
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
    });
    if constexpr (kSharesColumns) place.exchange(sums, [](float mine, float other) { return mine + other; });
    for_each_row([&](int i, int half) __attribute__((always_inline)) { states[i][half].sum = sums[i][half]; });
  }

  // Divides the outputs of row (i, half) by the sum of its weights and the sink's, and multiplies them by `scale`. Returns
  // whether the row sees no key.
  __device__ __forceinline__ static bool finish_row(const ForwardSm80Arguments& arguments, int64_t head, float scale,
                                                    Outputs& out, RowStates& states, int i, int half) {
    const AttentionProblem& problem = arguments.problem;
    ScoreState& state = states[i][half];
    const bool is_empty = state.sum == 0;
    const float factor = problem.sinks ? state.absorb(static_cast<const float*>(problem.sinks)[head] * kLog2E) : 1.0f;
    const float inverse = state.inverse_sum_or_zero(), last = factor * inverse * scale;
#pragma unroll
    for (int j = 0; j < kWarpColumns / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = out[i][j][2 * half + e];
        // A query that sees one key gets the multiple of that key's value that load_values has, to the last bit.
        if constexpr (Compensation::kCompensated)
          x = divide(x, factor, state.sum, inverse) * scale;
        else
          x *= last;
      }
    return is_empty;
  }

  // lse of a state as two floats, in base e; the state is in base 2.
  struct TwoPartLse {
    float high, low;
    __device__ __forceinline__ explicit TwoPartLse(const ScoreState& state) {
      if constexpr (Compensation::kCompensated) {
        // In double, so that the product with ln 2 loses nothing that the two floats would hold.
        const double lse = OnlineSoftmax<double, Binary>{state.max, state.sum}.lse() * kLn2;
        high = static_cast<float>(lse), low = static_cast<float>(lse - high);
      } else {
        // GPUs before Hopper with few units for double would take longer for it than for a block of keys.
        constexpr float kLn2High = static_cast<float>(kLn2), kLn2Low = static_cast<float>(kLn2 - kLn2High);
        float sum_low, product_low;
        const float sum = two_sum(state.max, log2f(state.sum), sum_low), product = two_product(sum, kLn2High, product_low);
        const float rest = fmaf(sum, kLn2Low, fmaf(sum_low, kLn2High, product_low));
        high = product - product == 0 ? product + rest : product;
        low = (product - high) + rest;
      }
    }
  };

  // Stores lse of the row as two floats: the sink's where the row is empty otherwise.
  __device__ __forceinline__ static void store_lse(const ForwardSm80Arguments& arguments, const ScoreState& state,
                                                   bool is_empty, int64_t head, int64_t index) {
    const AttentionProblem& problem = arguments.problem;
    auto [high, low] = TwoPartLse(state);
    if (problem.sinks && is_empty) high = static_cast<const float*>(problem.sinks)[head], low = 0;
    if (kHasMask && problem.mask.data && state.max == arguments.score_mod.lowest_score)
      high = lowest_lse(problem.mask_dtype), low = static_cast<float>(log2f(state.sum) * kLn2);
    static_cast<float*>(problem.lse)[index] = high;
    if (problem.lse_low) static_cast<float*>(problem.lse_low)[index] = low - low == 0 ? low : 0;
  }

  // The rows and columns of a warp's results.
  struct ResultTile {
    int64_t batch, head;
    TileRows rows;
    Rows queries;  // those of the CTA's tile
    int row;  // the warp's first in the tile
    int first_column, columns;  // of the values
    int tile_column;  // first_column's, in a tile of the values
    __device__ __forceinline__ int row_of(int i, int half) const { return row + 16 * i + 8 * half + quad(); }
    __device__ __forceinline__ int64_t head_of(int i, int half) const { return head + rows.head_of(row_of(i, half)); }
    // The row's number in lse, or -1 for one past the tile.
    __device__ __forceinline__ int64_t index_of(const AttentionProblem& problem, int i, int half) const {
      const int query = rows.query_of(row_of(i, half));
      if (query >= queries.count) return -1;
      return batch * problem.lse_stride[0] + head_of(i, half) * problem.lse_stride[1] + queries.begin + query;
    }
  };

  // Stores the partial results of a kv_split of the keys.
  __device__ __forceinline__ static void store_partial(const ForwardSm80Arguments& arguments, const ResultTile& results,
                                                       int64_t kv_split, const Outputs& out, RowStates& states) {
    const KvSplits& kv_splits = arguments.kv_splits;
    for_each_row([&](int i, int half) __attribute__((always_inline)) {
      const int64_t index = results.index_of(arguments.problem, i, half);
      if (index < 0) return;
      float* const to = kv_splits.partial(index, kv_split);
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j)
        if (const int column = 8 * j + 2 * lane_in_quad(); column < results.columns)
          *reinterpret_cast<float2*>(to + results.first_column + column) = {out[i][j][2 * half], out[i][j][2 * half + 1]};
      if (results.first_column == 0 && lane_in_quad() == 0) kv_splits.state(to) = {states[i][half].max, states[i][half].sum};
    });
  }

  // Stores out, by way of `tile`, and lse.
  __device__ __forceinline__ static void store_results(const ForwardSm80Arguments& arguments, const ResultTile& results,
                                                       ValueTile tile, Outputs& out, RowStates& states) {
    const AttentionProblem& problem = arguments.problem;
    const int64_t key_head = results.head / arguments.heads_per_key_head;
    const float scale = kCached ? scale_of(problem.cache.value_scale, problem.cache.value_scale_stride, results.batch, key_head)
                                : arguments.keep_scale;
    for_each_row([&](int i, int half) __attribute__((always_inline)) {
      const int64_t head = results.head_of(i, half), index = results.index_of(problem, i, half);
      const bool is_empty = finish_row(arguments, head, scale, out, states, i, half);
      if (results.first_column == 0 && lane_in_quad() == 0 && index >= 0 && problem.lse)
        store_lse(arguments, states[i][half], is_empty, head, index);
    });
    const MutableView4& view = problem.out;
    const int64_t row_stride = view.stride[2], head_stride = view.stride[1];
    Element* const to = static_cast<Element*>(view.data) + results.batch * view.stride[0] + results.head * head_stride +
                        results.queries.begin * row_stride + results.first_column * view.stride[3];
    const int rows = static_cast<int>(results.queries.count) * results.rows.heads;
    if constexpr (kCached)
      store_rows<Element>(
          out, tile, results.tile_column, results.row,
          [&](int r) { return to + results.rows.head_of(r) * head_stride + results.rows.query_of(r) * row_stride; },
          misalignment(to) == 0 && row_stride * sizeof(Element) % kVectorBytes == 0 &&
              head_stride * sizeof(Element) % kVectorBytes == 0,
          view.stride[3], rows, results.columns);
    else
      store_rows<Element>(out, tile, results.tile_column, results.row, to, row_stride, view.stride[3], rows, results.columns);
  }

  // Calls step(copies), which moves `block` on, until there are no more blocks.
  template <class Step>
  __device__ __forceinline__ static void take_blocks(const ForwardSm80Arguments& arguments, const KeyRows& key_rows,
                                                     const KeyRows& value_rows, const BlockRange& blocks, int keys,
                                                     const KeyRange& seen, int& block, const Step& step) {
    if constexpr (kHasVectors) {
      VectorCopies<true> whole(arguments, key_rows, value_rows, keys);
      VectorCopies<false> others(arguments, key_rows, value_rows, keys);
      // A step copies the next block, if there is one: one that ends with the keys' last rows must not be copied as a whole.
      const int whole_end = min(blocks.whole_end, blocks.end * kKeys <= keys ? blocks.end : blocks.end - 2);
      constexpr std::bool_constant<kSkipsBlocks> kSkips;
      constexpr std::false_type kComputes;
      const int begin = min(static_cast<int>(seen.begin / kKeys), blocks.end),
                end = static_cast<int>((seen.end + kKeys - 1) / kKeys);
#pragma unroll 1
      while (block < begin) step(others, kSkips);
      while (block < end) {
        if (block >= blocks.whole_begin && block < whole_end) {
#pragma unroll 1
          while (block < whole_end) step(whole, kComputes);
        } else {
          const int stop = block < blocks.whole_begin ? min(blocks.whole_begin, end) : end;
#pragma unroll 1
          while (block < stop) step(others, kComputes);
        }
      }
#pragma unroll 1
      while (block < blocks.end) step(others, kSkips);
    } else {
      BlockCopies copies(key_rows, value_rows, keys);
      while (block < blocks.end) step(copies, std::false_type{});
    }
  }

  // Raises the maximum logit of the tile's head to the warp's largest score. Without a score modification that is a product.
  __device__ __forceinline__ static void store_max_logit(const ForwardSm80Arguments& arguments, const Work& work,
                                                         const Head& head, float largest) {
    const AttentionProblem& problem = arguments.problem;
    const float logit = head.score_mod.has_score_mod ? natural_score(largest, head.score_mod.lowest_score, problem.mask_dtype)
                                                     : largest * static_cast<float>(problem.scale);
    raise_max_logit(problem.max_logit + work.batch * problem.heads + work.head, logit);
  }

  // Stores the results of a warp's rows, once the warps that share them have merged theirs.
  __device__ __forceinline__ static void finish(const ForwardSm80Arguments& arguments, const Work& work, char* shared, int warp,
                                                const WarpPlace& place, Outputs& out, RowStates& states) {
    if constexpr (kTile.key_warps > 1) {
      merge_key_warps(reinterpret_cast<float4*>(shared), warp, warp / kRowWarps, out, states);
      if (warp >= kRowWarps) return;
      sync_named(1, kRowWarps * kWarpSize);  // all have read what they merge
    }
    join_sums(states, place);
    const int first_column = static_cast<int>(work.value_panel) * kHeadDimV + place.column();
    const ResultTile results{work.batch,
                             work.head,
                             work.rows,
                             {work.sequence.queries.begin + work.query, work.last_query - work.query},
                             place.row,
                             first_column,
                             min(static_cast<int>(arguments.problem.head_dim_v) - first_column, kWarpColumns),
                             place.column()};
    if (kCached && work.kv_splits > 1)
      store_partial(arguments, results, work.kv_split, out, states);
    else
      store_results(arguments, results, ValueTile{reinterpret_cast<Digit*>(shared)}, out, states);
  }
};

template <class Element, int kHeadDim, Variant kVariant, bool kCached>
__device__ __forceinline__ void ForwardSm80Kernel<Element, kHeadDim, kVariant, kCached>::run(
    const ForwardSm80Arguments& arguments) {
  extern __shared__ __align__(16) char shared[];
  Work work;
  if (!find_work(arguments, work)) return;
  const auto& [batch, head, kv_split, kv_splits, value_panel, rows, sequence, query, last_query] = work;
  const int queries = static_cast<int>(sequence.queries.count), keys = static_cast<int>(sequence.keys.count);

  // Shared memory holds queries, for each stage keys and values, and the mask, or the weights that warps exchange.
  const QueryTile query_tile{reinterpret_cast<Digit*>(shared)};
  MaskTile<kQueries, kKeys, kThreads> mask_tile(shared + kTileBytes);

  const Head heads(arguments, work);
  const KeyRows &key_rows = heads.key_rows, &value_rows = heads.value_rows;
  const int warp = uniform(static_cast<int>(threadIdx.x) / kWarpSize);
  const WarpPlace place = place_of(warp, shared + kTileBytes);
  const bool is_idle = kCached && place.row >= (last_query - query) * rows.heads;  // the warp loads for the others alone

  const BlockRange blocks(work);
  const Band band(sequence.visible, query, keys);
  auto key_blocks = key_blocks_of(arguments, work, blocks);
  bool mask_is_clear = false, next_mask_is_clear = false;
  int block = key_blocks.next(mask_is_clear);

  Outputs out;
  clear(out);
  RowStates states;
  float largest = -INFINITY;  // score of the lane, if the maximum logit is wanted
  load_queries(arguments, query_tile, heads.query_rows, work);
  if constexpr (kCached) key_rows.locate(block * kKeys, blocks.keys), __syncthreads();
  if (block < blocks.end) {
    load_block<kKeyCopy>(Stage(shared, 0).keys, key_rows, block * kKeys, keys, arguments.key_step);
    if (kStages > 1) load_block<kValueCopy>(Stage(shared, 0).values, value_rows, block * kKeys, keys, arguments.value_step);
  }
  cp_async_commit();

  int stage = 0;
  // Takes a block, and moves on to the next one. `skips`: the warp's rows see nothing of it.
  const auto step = [&](auto& copies, auto skips) __attribute__((always_inline)) {
    using Copies = std::remove_reference_t<decltype(copies)>;
    constexpr bool kSkips = decltype(skips)::value;
    const int key = block * kKeys;
    [[maybe_unused]] const bool masked = kHasMask && heads.mask.data && !mask_is_clear;
    const Stage tiles(shared, stage), next_tiles(shared, kStages > 1 ? stage ^ 1 : 0);
    cp_async_wait();
    // The keys are there, with two stages the values too, and all have done with the values and the mask of the block before.
    __syncthreads();
    int next = 0;
    if constexpr (kStages > 1) {
      next = key_blocks.next(next_mask_is_clear);
      copies.start_next(next * kKeys, next < blocks.end);
    } else {
      copies.start_values(tiles.values, key);
      if (masked) mask_tile.load(heads.mask, query, queries, key, keys);
      if (!Copies::kAmongProducts) cp_async_commit();
    }

    Scores scores;
    Compensation compensation;
    clear(scores);
    const auto start_copies_at = [&](int at) {
      if constexpr (kStages > 1)
        copies.start_next_at(next_tiles, at);
      else
        copies.start_values_at(tiles.values, at);
    };
    // Sums over a wide head dim lose several units in the last place to the tensor cores, and lse would show it.
    if constexpr (kSkips)
#pragma unroll
      for (int at = 0; at < kHeadDim / 16; ++at) start_copies_at(at);
    else if (!is_idle)
      multiply_rows<GemmOptions{.rounded = (kHeadDim > 128)}>(scores, compensation, query_tile, place.row,
                                                              tiles.keys.from(place.key(), 0), start_copies_at);
    if constexpr (kStages == 1) {
      next = key_blocks.next(next_mask_is_clear);
      copies.finish_values(tiles.values, key);
      if constexpr (kCached) key_rows.locate(next * kKeys, blocks.keys);
      if (Copies::kAmongProducts) cp_async_commit();
      cp_async_wait();
      __syncthreads();  // the values are there, and all have done with the keys
      if (next < blocks.end) copies.start_keys(tiles.keys, next * kKeys);
    }
    cp_async_commit();

    if (!kSkips && !is_idle) {
      const auto here = score_block({query, key + place.key(), queries, keys, Copies::kWhole || blocks.is_whole(block)}, rows);
      absorb(arguments.problem, heads, work, band, here, mask_tile, mask_is_clear, scores, compensation, out, states, largest,
             tiles.values, place);
    }
    if (kStages == 1 && next < blocks.end) copies.finish_keys(tiles.keys, next * kKeys);
    block = next, mask_is_clear = next_mask_is_clear;
    if (kStages > 1) stage ^= 1;
  };
  take_blocks(arguments, key_rows, value_rows, blocks, keys, band.of_rows(place.row, last_query - query - 1), block, step);
  if (kHasMask && arguments.problem.max_logit) store_max_logit(arguments, work, heads, largest);
  cp_async_wait();
  __syncthreads();  // the queries are there, if no key was, and have been read by all: the outputs take their place
  finish(arguments, work, shared, warp, place, out, states);
}

template <class Element, int kHeadDim, Variant kVariant, bool kCached = false,
          class Kernel = ForwardSm80Kernel<Element, kHeadDim, kVariant, kCached>>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kTile.ctas_per_sm)
    attention_forward_sm80(const __grid_constant__ ForwardSm80Arguments arguments) {
  Kernel::run(arguments);
}

template <class Element, int kHeadDim, Variant kVariant>
using UncachedSm80Kernel = ForwardSm80Kernel<Element, kHeadDim, kVariant>;

template <int kHeadDim, class F, class... SharedBytes>
void visit_forward_sm80(const AttentionProblem& problem, F&& f, SharedBytes... shared_bytes) {
  visit_sm80<UncachedSm80Kernel, has_forward_sm80_tile, kHeadDim>(problem, f, shared_bytes...);
}

template <class Element, int kHeadDim, Variant kVariant>
void launch_forward_sm80(const AttentionProblem& problem, const TileTables& tiles, CUstream_st* stream) {
  using Kernel = ForwardSm80Kernel<Element, kHeadDim, kVariant>;
  const ForwardSm80Arguments arguments{
      .problem = problem,
      .list = TileList::of(problem, false, problem.heads, Kernel::kQueries)
                  .by_length(problem.visible, int64_t{sm_count()} * Kernel::kTile.ctas_per_sm),
      .tiles = tiles,
      .score_mod = ScoreMod(problem),
      .keep_scale = problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f,
      .kv_splits = {},
      .heads_per_key_head = static_cast<int>(problem.heads / std::max(problem.key_heads, int64_t{1})),
      .heads_per_value_head = static_cast<int>(problem.heads / std::max(problem.value_heads, int64_t{1})),
      .query_step = Kernel::template step_of<Kernel::kQueryCopy>(problem.query),
      .key_step = Kernel::template step_of<Kernel::kKeyCopy>(problem.key),
      .value_step = Kernel::template step_of<Kernel::kValueCopy>(problem.value),
  };
  const int64_t value_panels = (problem.head_dim_v + Kernel::kHeadDimV - 1) / Kernel::kHeadDimV;
  launch<attention_forward_sm80<Element, kHeadDim, kVariant>>(arguments,
                                                              arguments.list.count() * (value_panels > 0 ? value_panels : 1),
                                                              Kernel::kThreads, Kernel::shared_bytes(problem), stream);
}

template <int kHeadDim>
const char* AttentionForwardSm80<kHeadDim>::refusal(const ForwardPass& pass, const Gpu& gpu) {
  const char* reason = nullptr;
  visit_forward_sm80<kHeadDim>(
      pass.problem,
      [&]<class Element, Variant kVariant>(Type<Element>, VariantConstant<kVariant>) {
        if (ForwardSm80Kernel<Element, kHeadDim, kVariant>::shared_bytes(pass.problem) > gpu.shared_bytes)
          reason = "the GPU has too little shared memory for this head dim";
      },
      gpu.shared_bytes);
  return reason;
}

template <int kHeadDim>
int64_t AttentionForwardSm80<kHeadDim>::workspace_bytes(const ForwardPass& pass) {
  return tile_tables_of(pass.problem, nullptr).bytes();
}

template <int kHeadDim>
void AttentionForwardSm80<kHeadDim>::run(const ForwardPass& pass, void* workspace, CUstream_st* stream) {
  const TileTables tiles = tile_tables_of(pass.problem, workspace);
  fill_tile_tables(pass.problem, tiles, stream);
  visit_forward_sm80<kHeadDim>(pass.problem, [&]<class Element, Variant kVariant>(Type<Element>, VariantConstant<kVariant>) {
    launch_forward_sm80<Element, kHeadDim, kVariant>(pass.problem, tiles, stream);
  });
}

}  // namespace flash_online::cuda
