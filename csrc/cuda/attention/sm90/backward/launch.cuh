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

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "../../../../core/visit.h"
#include "../../../hw/mbarrier.cuh"
#include "../../../hw/pdl.cuh"
#include "../../../hw/setmaxnreg.cuh"
#include "../../attention.h"
#include "../../sm80/load.cuh"
#include "mask_grad.cuh"
#include "producer.cuh"
#include "schedules.cuh"
#include "short.cuh"

namespace flash_online::cuda {

// Gradients of keys that no sequence owns. Mostly there are none, which all threads find out together.
template <class T, class Tile>
__device__ void BackwardOnSm90<T, Tile>::clear_padding(const BackwardSm90Arguments& a) {
  const AttentionProblem& problem = a.problem;
  const int64_t heads = a.list.heads, count = heads * (problem.batch + 1), step = gridDim.x;
  const auto rows_of = [&](int64_t n) {
    return padding_rows(problem.key_starts, problem.batch, n / heads, problem.keys, problem.total_keys);
  };
  for (int64_t first = blockIdx.x; first < count; first += step * kThreads) {
    const int64_t mine = first + threadIdx.x * step;
    if (!__syncthreads_or(mine < count && rows_of(mine).count > 0)) continue;
    for (int64_t n = first; n < min(count, first + step * kThreads); n += step) {
      const Rows rows = rows_of(n);
      clear_rows<T, kThreads>(a.gradients.grad_key, n % heads, problem.head_dim, rows);
      clear_rows<T, kThreads>(a.gradients.grad_value, n % heads, problem.head_dim_v, rows);
    }
  }
}

// Whether blocks of threads that own 64 keys make these (kMayHalve). A whole warp asks.
template <class T, class Tile>
__device__ bool BackwardOnSm90<T, Tile>::by_halves(const BackwardSm90Arguments& a, int64_t batch, int first_head,
                                                   int heads_of_unit, int key) {
  constexpr int kOneForBoth = 4;  // what a block costs in either way, roughly
  constexpr int kAtOnce = 4;  // loads under way: the time of one is most of what it takes to return
  const MaskMap& map = a.space.map;
  const int rows = static_cast<int>(map.size[2]), columns = static_cast<int>(map.size[3]),
            heads = map.size[1] == 1 ? 1 : heads_of_unit, column = key / kMaskMapTile / 2 * 2;
  int one = 0, both = 0;
  for (int head = first_head; head < first_head + heads; ++head) {
    const uint8_t* const kinds = map.row(batch, head, 0) + column;
    for (int first = 0; first < rows; first += kAtOnce * kWarpSize) {
      bool seen[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int row = first + i * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize;
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

// The block of keys of that number, found by a warp or more and written by their first thread; false: there is none.
template <class T, class Tile>
__device__ bool BackwardOnSm90<T, Tile>::find_place(const BackwardSm90Arguments& a, unsigned index, Place& place) {
  const AttentionProblem& problem = a.problem;
  const TileCoord at =
      tile_coord(problem, a.list, side_by_side(a.list, index, a.section), true, kKeys, a.turns || problem.visible.right < 0);
  int64_t batch = at.sequence;
  int unit = at.head;
  if (kTransposed && a.batch_within) {
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
template <class T, class Tile>
__device__ bool BackwardOnSm90<T, Tile>::take_place(const BackwardSm90Arguments& a, Shared& shared) {
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

template <class T, class Tile>
__device__ void BackwardOnSm90<T, Tile>::run(const BackwardSm90Arguments& a, Shared& shared) {
  launch_dependents();
  if (a.problem.query_starts) clear_padding(a);
  if (!kStays && !find_place(a, blockIdx.x, shared.place[0])) {
    grid_dependency_wait();  // the kernel behind waits for this one alone, and all blocks of it may come by here
    return;
  }
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.key_full, 1);
    mbarrier_init(&shared.value_full, 1);
    mbarrier_init(&shared.keys_empty, kWarps + (a.turns ? 1 : 0));
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.query_full[i], 1);
      mbarrier_init(&shared.grad_out_full[i], 1);
      mbarrier_init(&shared.empty[i], kWarps);
      mbarrier_init(&shared.grad_out_empty[i], kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&shared.scores_full[i], kLine ? 4 : kWarps);
      mbarrier_init(&shared.scores_empty[i], kSummers);
      mbarrier_init(&shared.turn[i], 1);
      mbarrier_init(&shared.added[i], kSummers);
      if (kDrops) mbarrier_init(&shared.drawn_full[i], kTile.drawers);
    }
    mbarrier_init(&shared.weights_full, 4);
    mbarrier_init(&shared.weights_empty, 4);
    mbarrier_init(&shared.mask_full, 1);
    mbarrier_init(&shared.mask_empty, kWarps);
    fence_barrier_init();
  }
  grid_dependency_wait();
  __syncthreads();
  if (warp < 4) {
    reg_dealloc<kTile.loader_registers>();
    if constexpr (kStays) {
      if (warp == 0) Loader::load_places(a, shared);
      if (a.turns && threadIdx.x == kWarpSize) keep_turns_of_places(a, shared);
    } else {
      if (warp == 0) Loader::load(a, shared);
      int count = 0;
      if (a.turns && threadIdx.x == kWarpSize) keep_turns(a, shared, shared.place[0], count);
    }
  } else if (warp < 4 + kTile.drawers) {
    if constexpr (kDrops) {
      reg_dealloc<kTile.others_registers>();
      draw(a, shared, warp - 4);
    }
  } else if (kLine && warp >= 12) {
    if constexpr (kLine) {
      reg_dealloc<kTile.others_registers>();
      Group{a, shared, static_cast<int>(threadIdx.x) - 128}.run_queries();
    }
  } else {
    reg_alloc<kTile.registers>();
    Group group{a, shared, static_cast<int>(threadIdx.x) - 128 - kWarpSize * kTile.drawers};
    if constexpr (kLine)
      warp < 8 ? group.run_values() : group.run_keys();
    else if constexpr (kEverything)
      group.run_everything();
    else
      group.run_own();
  }
}

template <class T, int kHeadDim, int kHeadDimV, BackwardSm90Features kFeatures, bool kStays>
__global__ void __launch_bounds__(backward_sm90_tile(kHeadDim, kHeadDimV, kFeatures).threads(),
                                  backward_sm90_tile(kHeadDim, kHeadDimV, kFeatures).blocks)
    attention_backward_sm90(const __grid_constant__ BackwardSm90Arguments arguments) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Body = BackwardOnSm90<T, BackwardSm90Tile<kHeadDim, kHeadDimV, kFeatures, kStays>>;
  extern __shared__ __align__(kBoxAlignment) char shared_boxes[];
  Body::run(arguments, *reinterpret_cast<typename Body::Shared*>(shared_boxes));
#endif
}

// How a problem's mask reaches the scores where it needs no MaskTile; kNone too for one that needs it.
inline TransposedMask transposed_mask_of(const AttentionProblem& p) {
  if (!p.mask.data) return TransposedMask::kNone;
  if (p.mask_dtype == DType::kBool) return TransposedMask::kBits;
  return p.mask_dtype == p.dtype && p.dropout == 0 && p.mask.stride[2] > 0 && p.mask.stride[3] == 1 &&
                 is_tma_compatible(p.mask.data, p.mask.stride, p.batch, p.heads, p.queries, p.keys)
             ? TransposedMask::kBoxes
             : TransposedMask::kNone;
}

// What a problem needs of a tile up to this wide.
inline BackwardSm90Features backward_sm90_with(const AttentionProblem& p) {
  constexpr double kSmallestScale = 1e-6, kLargestScale = 1e29,
                   kMostDropped = 0.99;  // weights in 16 bits are scaled up by what it takes
  const bool scaled = static_cast<float>(p.scale) > 0 && p.scale < kLargestScale;
  if (scaled && p.softcap == 0 && !p.alibi_slopes && !p.mask.data && p.dropout == 0) return BackwardSm90Features::kNothing;
  if (!scaled || p.softcap != 0 || p.scale < kSmallestScale || p.dropout > kMostDropped ||
      (p.mask.data && transposed_mask_of(p) == TransposedMask::kNone))
    return BackwardSm90Features::kEverything;
  return p.dropout != 0 ? BackwardSm90Features::kDropout : BackwardSm90Features::kMasks;
}

template <BackwardSm90Features kFeatures>
using FeatureSet = std::integral_constant<BackwardSm90Features, kFeatures>;
template <int kNumber>
using Constant = std::integral_constant<int, kNumber>;

// Calls f(Type<T>, FeatureSet<kFeatures>, Constant<kTileWidth>, the same of the values' width) with what a problem needs. An
// instance of a width also has the tiles between it and the next smaller one's.
template <int kHeadDim, class F>
void visit_backward_sm90(const AttentionProblem& problem, F&& f) {
  using With = BackwardSm90Features;
  const auto visit = [&]<class T>(Type<T> element) {
    const With with = backward_sm90_with(problem);
    if (with != With::kNothing) {  // refused where the widest of these tiles is too narrow
      constexpr Constant<kHeadDim> kOwn{};
      constexpr Constant<kWidestEverythingBackwardSm90> kWidest{};
      if constexpr (kHeadDim <= kWidest()) {
        if (with == With::kMasks) return f(element, FeatureSet<With::kMasks>{}, kOwn, kOwn);
        if (with == With::kDropout) return f(element, FeatureSet<With::kDropout>{}, kWidest, kWidest);
        f(element, FeatureSet<With::kEverything>{}, kWidest, kWidest);
      }
      return;
    }
    constexpr FeatureSet<With::kNothing> kPlain{};
    const int64_t wider = std::max(problem.head_dim, problem.head_dim_v);
    if constexpr (kHeadDim == 128)
      if (wider <= 96) return f(element, kPlain, Constant<96>{}, Constant<96>{});
    if constexpr (kHeadDim == 256) {
      if (wider <= 192 && problem.head_dim_v <= 128) return f(element, kPlain, Constant<192>{}, Constant<128>{});
      if (wider <= 192) return f(element, kPlain, Constant<192>{}, Constant<192>{});
    }
    f(element, kPlain, Constant<kHeadDim>{}, Constant<kHeadDim>{});
  };
  problem.dtype == DType::kFloat16 ? visit(Type<__half>{}) : visit(Type<__nv_bfloat16>{});
}

template <int kHeadDim>
BackwardWorkspace backward_sm90_space(const AttentionProblem& problem, const AttentionGradients& gradients, void* workspace) {
  const int64_t pieces = (problem.head_dim + kSumPieceSm90 - 1) / kSumPieceSm90;  // a tile may have more, filled up
  int64_t width = 0;
  visit_backward_sm90<kHeadDim>(problem, [&]<class T>(Type<T>, auto with, auto tile_width, auto head_dim_v) {
    using Body = BackwardOnSm90<T, BackwardSm90Tile<tile_width(), head_dim_v(), with(), false>>;
    width = Body::kFillsUp ? pieces * kSumPieceSm90 : int64_t{tile_width()};
  });
  return BackwardWorkspace(problem, gradients, width, true, mask_gradient_parts(problem, gradients), workspace);
}

template <class T, int kHeadDim, int kHeadDimV, BackwardSm90Features kFeatures, bool kStays>
void launch_backward_sm90(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                          const TransposedMaskBits& bits, int* turns, unsigned* taken, CUstream_st* stream) {
  using With = BackwardSm90Features;
  using Body = BackwardOnSm90<T, BackwardSm90Tile<kHeadDim, kHeadDimV, kFeatures, kStays>>;
  const auto boxes = [&](const ConstView4& view, bool over_keys, int64_t heads, int64_t width) {
    return tma_tensor_of<T>(problem, view, over_keys, heads, width, over_keys ? Body::kKeys : Body::kQueries);
  };
  const TileList list = TileList::of(problem, true, gradients.kv_grad_heads, Body::kKeys);
  const TransposedMask turned = Body::kTransposed ? transposed_mask_of(problem) : TransposedMask::kNone;
  const bool halves = Body::kMayHalve && turned == TransposedMask::kBits && space.map.size[2] > 1 && space.map.size[3] > 1;
  // A mask in boxes that the batch shares is read once for all of it.
  const bool batch_within = turned == TransposedMask::kBoxes && problem.mask.stride[0] == 0 && problem.mask.stride[1] != 0;
  // Where blocks of keys differ in what they see, those of as many heads as the device holds at a time go by length, and not
  // head by head: then the last ones to run are short.
  const bool bounded = problem.visible.left >= 0 || problem.visible.right >= 0;
  const int64_t at_once = bounded ? sm_count() / std::max(list.blocks, int64_t{1}) : 1;
  const int section = static_cast<int>(
      std::clamp(std::max(at_once, batch_within ? list.sequences : 1), int64_t{1}, list.heads * list.sequences));
  const BackwardSm90Arguments arguments{
      boxes(problem.query, false, problem.heads, problem.head_dim),
      boxes(problem.key, true, problem.key_heads, problem.head_dim),
      boxes(problem.value, true, problem.value_heads, problem.head_dim_v),
      boxes(gradients.grad_out, false, problem.heads, problem.head_dim_v),
      turned == TransposedMask::kBoxes ? boxes(problem.mask, false, problem.heads, problem.keys) : TmaTensor{},
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
      ScoreMod(problem),
      problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f,
      static_cast<float>(1 - problem.dropout),
      static_cast<float>(-std::log2(1 - problem.dropout)),
      static_cast<float>(1 / problem.scale)};
  const int64_t blocks = kStays ? std::min(list.count(), int64_t{sm_count()}) : list.count();
  launch<attention_backward_sm90<T, kHeadDim, kHeadDimV, kFeatures, kStays>>(arguments, blocks, Body::kThreads,
                                                                             Body::shared_bytes(problem, turned), stream, true);
  if constexpr (Body::kMayHalve && !Body::kAlone)
    if (halves)
      launch_backward_sm90<T, kHeadDim, kHeadDimV, With::kMaskHalves, false>(problem, gradients, space, bits, turns, taken,
                                                                             stream);
}

// backward_sm90_128_only.cu has those that narrower tiles leave to this one.
extern template void launch_backward_sm90<__half, 128, 128, BackwardSm90Features::kDropout, false>(
    const AttentionProblem&, const AttentionGradients&, const BackwardWorkspace&, const TransposedMaskBits&, int*, unsigned*,
    CUstream_st*);
extern template void launch_backward_sm90<__nv_bfloat16, 128, 128, BackwardSm90Features::kDropout, false>(
    const AttentionProblem&, const AttentionGradients&, const BackwardWorkspace&, const TransposedMaskBits&, int*, unsigned*,
    CUstream_st*);
extern template void launch_backward_sm90<__half, 128, 128, BackwardSm90Features::kEverything, false>(
    const AttentionProblem&, const AttentionGradients&, const BackwardWorkspace&, const TransposedMaskBits&, int*, unsigned*,
    CUstream_st*);
extern template void launch_backward_sm90<__nv_bfloat16, 128, 128, BackwardSm90Features::kEverything, false>(
    const AttentionProblem&, const AttentionGradients&, const BackwardWorkspace&, const TransposedMaskBits&, int*, unsigned*,
    CUstream_st*);

// Behind the rest of the workspace: how many blocks of keys have been taken, turns, and a mask's bits.
constexpr int64_t kTakenBytes = 16;
inline int64_t turn_bytes(const BackwardWorkspace& space, bool deterministic) {
  return deterministic ? (space.list.count() * static_cast<int64_t>(sizeof(int)) + 15) / 16 * 16 : 0;
}

// What is to be made of a mask beside its map; no elements: nothing.
inline TransposedMaskBits backward_sm90_bits(const AttentionProblem& problem, void* workspace) {
  const BackwardSm90Features with = backward_sm90_with(problem);
  if ((with != BackwardSm90Features::kMasks && with != BackwardSm90Features::kDropout) ||
      transposed_mask_of(problem) != TransposedMask::kBits)
    return {};
  return transposed_mask_bits_of(problem, workspace);
}

// Whether one launch makes it all, without a workspace: backward_short_sm90.cuh.
inline bool is_short_backward_sm90(const AttentionProblem& problem, const AttentionGradients& gradients) {
  return is_short_backward_sm90(problem, gradients, backward_sm90_with(problem) == BackwardSm90Features::kNothing);
}

template <int kHeadDim>
int64_t backward_sm90_workspace(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic) {
  if (is_short_backward_sm90(problem, gradients)) return 0;
  const BackwardWorkspace space = backward_sm90_space<kHeadDim>(problem, gradients, nullptr);
  return space.bytes + kTakenBytes + turn_bytes(space, deterministic) +
         backward_sm90_bits(problem, nullptr).count() * static_cast<int64_t>(sizeof(unsigned));
}

template <int kHeadDim>
void backward_sm90(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic, void* workspace,
                   CUstream_st* stream) {
  if constexpr (kHeadDim <= 128)
    if (is_short_backward_sm90(problem, gradients)) return short_backward_sm90<kHeadDim>(problem, gradients, stream);
  const BackwardWorkspace space = backward_sm90_space<kHeadDim>(problem, gradients, workspace);
  char* const behind = static_cast<char*>(workspace) + space.bytes;
  unsigned* const taken = reinterpret_cast<unsigned*>(behind);
  int* const turns = deterministic ? reinterpret_cast<int*>(behind + kTakenBytes) : nullptr;
  if (turns) check(cudaMemsetAsync(turns, 0, turn_bytes(space, true), stream), "cudaMemsetAsync");
  const TransposedMaskBits bits = backward_sm90_bits(problem, behind + kTakenBytes + turn_bytes(space, deterministic));
  if (bits.count() > 0)
    fill_transposed_mask_bits(problem, space.map, bits, stream);
  else
    fill_mask_map(problem, space.map, stream);
  prepare_backward(problem, gradients, space, stream, taken);
  visit_backward_sm90<kHeadDim>(problem, [&]<class T>(Type<T>, auto with, auto width, auto head_dim_v) {
    constexpr int kMostStaying = backward_sm90_tile(width(), head_dim_v(), with()).most_keys_staying;
    const auto start = [&]<bool kStays>(std::bool_constant<kStays>) {
      launch_backward_sm90<T, width(), head_dim_v(), with(), kStays>(problem, gradients, space, bits, turns, taken, stream);
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
  if constexpr (kHeadDim <= 128)
    if (!mask_gradient_sm90_refusal(gradients))
      return problem.dtype == DType::kFloat16 ? mask_gradient_sm90<__half, kHeadDim>(problem, gradients, space, stream)
                                              : mask_gradient_sm90<__nv_bfloat16, kHeadDim>(problem, gradients, space, stream);
  mask_gradient(problem, gradients, space, stream);
}

}  // namespace flash_online::cuda
