// Attention's forward pass on Hopper (compute capability 9.0): TMA loads and wgmma products; docs/forward_sm90.md draws it. A
// block of threads stays for the whole launch and takes one tile of queries after another: a warp plans them, a warp loads, two
// or three warpgroups compute, of 64 queries each or, where values are split, of the same 64.
#pragma once

#include <algorithm>
#include <cmath>

#include "../../../../core/philox.h"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/setmaxnreg.cuh"
#include "../../kernels.h"
#include "consumer.cuh"
#include "producer.cuh"

namespace flash_online::cuda {

template <class T, class Tile>
__device__ void ForwardSm90Kernel<T, Tile>::run(const ForwardSm90Arguments& a, Shared& shared) {
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    constexpr int kReaders = 4 * kTile.warpgroups;  // warps
    const int drawers = kEverything && a.rng ? kTile.drawers : 0;
    for (int i = 0; i < kJobs; ++i) {
      mbarrier_init(&shared.job_full[i], 1);
      mbarrier_init(&shared.job_empty[i], kReaders + drawers + (kPacked || kSplit ? 2 : 1));
    }
    for (int i = 0; i < kQueries; ++i) {
      mbarrier_init(&shared.query_full[i], 1);
      mbarrier_init(&shared.query_empty[i], kReaders / kGroups);
    }
    for (int i = 0; i < kKeyStages; ++i) {
      mbarrier_init(&shared.key_full[i], 1 + drawers);
      mbarrier_init(&shared.key_empty[i], kReaders);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.value_full[i], 1);
      mbarrier_init(&shared.value_empty[i], kReaders);
      if constexpr (kPacked) mbarrier_init(&shared.packed.value_there[i], 1);
    }
    if constexpr (kPacked) mbarrier_init(&shared.packed.tile_wanted, 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (warp < 4) {
    reg_dealloc<kTile.loader_registers>();
    if (threadIdx.x == 0) Loader{a, shared}.run();
    if (warp == 1) plan(a, shared, lane);
    if constexpr (kSplit)
      if (warp == 2 && lane == 0) load_values(a, shared);
    if constexpr (kPacked) {
      if (warp == 2) clear_tails(shared, lane);
      if (warp == 3) clear_padding(a, lane);
    }
  } else if (warp < 4 * (1 + kTile.warpgroups)) {
    reg_alloc<kTile.registers>();
    const int number = warp / 4 - 1;
    Group group{a, shared, kSplit ? 0 : number, kSplit ? number : 0, warp % 4, lane};
    group.run();
  } else if constexpr (kEverything) {
    reg_dealloc<kTile.drawer_registers>();
    draw(a, shared, warp - 4 * (1 + kTile.warpgroups), lane);
  }
}

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

inline bool has_options(const AttentionProblem& p) { return p.softcap > 0 || p.alibi_slopes || p.mask.data || p.dropout != 0; }

// Whether a row for little work is the better one; otherwise tiles are of `wide` queries.
inline bool has_little_work(const AttentionProblem& p, const ForwardSm90& tile, int wide) {
  if (p.queries <= tile.most_queries) return true;
  if (p.query_starts) return false;
  const Visibility& v = p.visible;
  const bool narrow = v.left >= 0 && v.right >= 0 && v.left <= tile.most_window && v.left + v.right <= tile.most_window;
  return narrow || 2 * p.batch * p.heads * ((p.queries + wide - 1) / wide) <= sm_count();
}

// How many of a head's tiles, the last ones, are about the same work: all, or those whose window begins behind the first key.
inline int64_t even_row_tiles(const Visibility& v, int64_t row_tiles, int64_t tile_rows) {
  if (v.left < 0) return v.right < 0 ? row_tiles : 0;
  if (v.right < 0) return 0;
  const int64_t left = std::min(v.left, row_tiles * tile_rows + std::max(v.offset, int64_t{0}));
  return row_tiles - std::clamp((left - v.offset + tile_rows - 1) / tile_rows, int64_t{0}, row_tiles);
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
  constexpr TmaElement kElement = std::is_same_v<T, __half> ? TmaElement::kHalf : TmaElement::kBFloat16;
  // A dimension of stride 0 or size 1 gets size 1, and any stride.
  const auto map = [&](const void* data, const int64_t (&stride)[4], int64_t batch, int64_t heads, int64_t rows, int64_t width,
                       int box_rows) {
    const auto size = [&](int i, int64_t n) { return static_cast<uint64_t>(stride[i] == 0 ? 1 : n); };
    const auto step = [&](int i, int64_t n) {
      return n == 1 || stride[i] == 0 ? uint64_t{16} : uint64_t(stride[i]) * sizeof(T);
    };
    return make_tensor_map(data, kElement,
                           {static_cast<uint64_t>(width), static_cast<uint64_t>(rows), size(1, heads), size(0, batch)},
                           {step(2, rows), step(1, heads), step(0, batch)}, static_cast<uint32_t>(box_rows));
  };
  ForwardSm90Arguments a;
  constexpr bool kPacked = Tile::kPacked;
  const int64_t queries = kPacked ? p.total_queries : p.queries, keys = kPacked ? p.total_keys : p.keys;
  const int64_t batch = kPacked ? std::min(p.batch, int64_t{1}) : p.batch;  // 0: rows that no sequence owns, alone
  a.query = map(p.query.data, p.query.stride, batch, p.heads, queries, p.head_dim, Kernel::kRows);
  a.key = map(p.key.data, p.key.stride, batch, p.key_heads, keys, p.head_dim, Kernel::kKeys);
  a.value = map(p.value.data, p.value.stride, batch, p.value_heads, keys, p.head_dim_v, Kernel::kKeys);
  if constexpr (kTile.staged_out)
    a.out_map = map(p.out.data, p.out.stride, batch, p.heads, queries, p.head_dim_v, Kernel::kOutRows);
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
  a.head_dim_v = static_cast<int>(p.head_dim_v);
  a.row_tiles = static_cast<int>(TileList::of(p, false, p.heads, kTile.queries()).blocks);
  a.batch_within = false;
  const int64_t places = int64_t{sm_count()} * kTile.blocks;
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
                .level_keys = taken ? a.keys / kWarpSize + 1 : 0,
                .taken = taken};
    if (taken) check(cudaMemsetAsync(taken, 0, sizeof(*taken), stream), "cudaMemsetAsync");
  } else {
    const int64_t heads = batch * p.heads, even = even_row_tiles(p.visible, a.row_tiles, kTile.queries()),
                  uneven = a.row_tiles - even;
    a.even_row_tiles = static_cast<int>(even);
    a.section_heads = static_cast<int>(heads);
    if (uneven > 0) {
      const int64_t seen = even > 0 ? std::min(keys, p.visible.left + std::min(p.visible.right, keys) + kTile.queries()) : keys,
                    head_bytes = seen * (p.head_dim + p.head_dim_v) * int64_t{sizeof(T)};
      constexpr int kWindowRounds = 4;
      a.section_heads =
          static_cast<int>(section_heads(heads, a.heads_a_key, uneven, head_bytes / a.heads_a_key + 1, places,
                                         even > 0 ? std::max(kTile.section_rounds, kWindowRounds) : kTile.section_rounds));
    }
  }
  a.visible = p.visible;
  constexpr double kToBase2 = 1.4426950408889634;
  a.has_score_mod = p.softcap > 0 || p.alibi_slopes;
  a.scale = p.softcap > 0 ? 1 : static_cast<float>(p.scale * kToBase2);
  a.added_scale = static_cast<float>(p.softcap > 0 ? kToBase2 : 1 / p.scale);
  a.softcap = static_cast<float>(p.softcap * kToBase2);
  a.softcap_scale = p.softcap > 0 ? static_cast<float>(2 * kToBase2 * p.scale / p.softcap) : 0;
  if constexpr (Tile::kEverything) {
    const double step = double{a.softcap_scale} * a.softcap_scale;
    double term = double{a.softcap} * a.softcap_scale;
    for (int i = 0; i < kTanhTerms; ++i, term *= step) a.softcap_term[i] = static_cast<float>(kTanhTerm[i] * term);
    // A float takes what a softcap that is not tiny asks for.
    a.small_scores = p.softcap > 1e-3 * std::abs(p.scale) ? static_cast<float>(kToBase2 * kToBase2 / step) : 0.0f;
  }
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
    a.bits_row_step = bits_size[3] * kWarpSize;
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
    a.drop_threshold = drop_threshold(p.dropout);
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
  using With = ForwardSm90Features;
  if constexpr (kForwardSm90[kRow].most_queries == 0 && kForwardSm90[kRow].head_dim <= kWidestEverythingSm90) {
    if constexpr (!kPacked)
      if (problem.mask.data && problem.mask_dtype != DType::kBool)
        return launch_forward_sm90<T, ForwardSm90Tile<kRow, With::kFloatMask, false>>(problem, tables, taken, stream);
    if (has_options(problem))
      return launch_forward_sm90<T, ForwardSm90Tile<kRow, With::kEverything, kPacked>>(problem, tables, taken, stream);
  }
  launch_forward_sm90<T, ForwardSm90Tile<kRow, With::kNothing, kPacked>>(problem, tables, taken, stream);
}

// In the first row of this width that is made for the problem, from kRow on.
template <int kHeadDim, int kRow = 0>
void forward_sm90_in_row(const AttentionProblem& problem, const MaskTables& tables, unsigned* taken, cudaStream_t stream) {
  static_assert(kRow < kForwardSm90Rows, "no row in kForwardSm90");
  constexpr ForwardSm90 kTile = kForwardSm90[kRow];
  if constexpr (kTile.head_dim != kHeadDim) {
    forward_sm90_in_row<kHeadDim, kRow + 1>(problem, tables, taken, stream);
  } else {
    if constexpr (kTile.head_dim_v < kHeadDim)
      if (problem.head_dim_v > kTile.head_dim_v) return forward_sm90_in_row<kHeadDim, kRow + 1>(problem, tables, taken, stream);
    if constexpr (kTile.most_queries > 0)
      if (has_options(problem) || !has_little_work(problem, kTile, kForwardSm90[kRow + 1].queries()))
        return forward_sm90_in_row<kHeadDim, kRow + 1>(problem, tables, taken, stream);
    const auto visit = [&]<class T>(T) {
      if constexpr (kHeadDim <= kWidestPackedSm90)
        if (problem.query_starts) return launch_forward_sm90_row<T, kRow, true>(problem, tables, taken, stream);
      launch_forward_sm90_row<T, kRow, false>(problem, tables, taken, stream);
    };
    problem.dtype == DType::kFloat16 ? visit(__half{}) : visit(__nv_bfloat16{});
  }
}

template <int kHeadDim>
void forward_sm90(const AttentionProblem& problem, const MaskTables& tables, unsigned* taken, CUstream_st* stream) {
  forward_sm90_in_row<kHeadDim>(problem, tables, taken, stream);
}

}  // namespace flash_online::cuda
