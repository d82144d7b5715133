// The Hopper backward pass on the host: which kernel a problem runs in, its workspace, its arguments, and the order of
// launches.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "../../../../core/integer.h"
#include "../../../../core/visit.h"
#include "../../../hw/launch.h"
#include "../../attention.h"
#include "../../kernels.h"
#include "../mask_grad.cuh"
#include "../short_backward.cuh"
#include "kernel.cuh"

namespace flash_online::cuda {

// ---- which kernel

// True for a list of blocks of 64 keys that serves as a mask's map. Such lists need CTAs of 64 keys, which kSparse has not
// (BackwardSm90Kernel::use_narrow_tile).
inline bool takes_list_as_map(const AttentionProblem& p) {
  const int64_t wider = std::max(p.head_dim, p.head_dim_v);
  return p.tiles.data && !p.has_spans() && wider > 64 && wider <= kMaxOptionsHeadDimBackwardSm90 && map_of_list(p).data;
}

// The source of a problem's mask if it needs no MaskTile, else kNone.
inline TransposedMask transposed_mask_of(const AttentionProblem& p) {
  if (p.is_sparse()) return takes_list_as_map(p) ? TransposedMask::kNone : TransposedMask::kBits;
  if (!p.mask.data) return TransposedMask::kNone;
  if (p.mask_dtype == DType::kBool) return TransposedMask::kBits;
  return p.mask_dtype == p.dtype && p.dropout == 0 && p.mask.stride[2] > 0 && p.mask.stride[3] == 1 &&
                 is_tma_compatible(p.mask.data, p.mask.stride, p.batch, p.heads, p.queries, p.keys)
             ? TransposedMask::kTma
             : TransposedMask::kNone;
}

// The features that a problem needs in addition to plain attention.
inline BackwardSm90Features backward_sm90_features(const AttentionProblem& p) {
  constexpr double kMinScale = 1e-6, kMaxScale = 1e29, kMaxDropout = 0.99;  // 16-bit weights are scaled up by 1 / (1 - dropout)
  const bool scaled = static_cast<float>(p.scale) > 0 && p.scale < kMaxScale;
  const bool wide = std::max(p.head_dim, p.head_dim_v) > kMaxOptionsHeadDimBackwardSm90;
  if (scaled && p.scale >= kMinScale && score_mods(p) == 0 && !p.mask.data && !p.is_sparse() && p.dropout == 0)
    return BackwardSm90Features::kPlain;
  if (p.is_sparse()) return takes_list_as_map(p) ? BackwardSm90Features::kMasks : BackwardSm90Features::kSparse;
  if (wide) return BackwardSm90Features::kMasks;
  if (!scaled || (score_mods(p) & ~kAlibi) || p.scale < kMinScale || p.dropout > kMaxDropout ||
      (p.mask.data && transposed_mask_of(p) == TransposedMask::kNone))
    return BackwardSm90Features::kAllOptions;
  return p.dropout != 0 ? BackwardSm90Features::kDropout : BackwardSm90Features::kMasks;
}

template <BackwardSm90Features kFeatures>
using FeatureSet = std::integral_constant<BackwardSm90Features, kFeatures>;
template <int kNumber>
using Constant = std::integral_constant<int, kNumber>;

// Calls f(Type<T>, FeatureSet<kFeatures>, Constant<head dim of the tile>, Constant<head dim of the tile's values>) for a
// problem. An instance of a head dim also has the tiles between it and the next smaller one's.
template <int kHeadDim, class F>
void visit_backward_sm90(const AttentionProblem& problem, F&& f) {
  using Features = BackwardSm90Features;
  const auto visit = [&]<class T>(Type<T> element) {
    const Features features = backward_sm90_features(problem);
    if (features != Features::kPlain) {
      constexpr Constant<kHeadDim> kOwn{};
      [[maybe_unused]] constexpr Constant<kMaxOptionsHeadDimBackwardSm90> kWidest{};
      if (features == Features::kSparse) return f(element, FeatureSet<Features::kSparse>{}, kOwn, kOwn);
      if constexpr (kHeadDim <= kWidest()) {
        if (features == Features::kMasks) return f(element, FeatureSet<Features::kMasks>{}, kOwn, kOwn);
        if (features == Features::kDropout) return f(element, FeatureSet<Features::kDropout>{}, kOwn, kOwn);
        f(element, FeatureSet<Features::kAllOptions>{}, kWidest, kWidest);
      } else {
        f(element, FeatureSet<Features::kMasks>{}, kOwn, kOwn);  // whatever else there is, is refused
      }
      return;
    }
    constexpr FeatureSet<Features::kPlain> kPlain{};
    const int64_t wider = std::max(problem.head_dim, problem.head_dim_v);
    if constexpr (kHeadDim == 128)
      if (wider <= 96) return f(element, kPlain, Constant<96>{}, Constant<96>{});
    if constexpr (kHeadDim == 256) {
      if (wider <= 160) return f(element, kPlain, Constant<160>{}, Constant<160>{});
      if (wider <= 192 && problem.head_dim_v <= 128) return f(element, kPlain, Constant<192>{}, Constant<128>{});
      if (wider <= 192) return f(element, kPlain, Constant<192>{}, Constant<192>{});
    }
    f(element, kPlain, Constant<kHeadDim>{}, Constant<kHeadDim>{});
  };
  problem.dtype == DType::kFloat16 ? visit(Type<__half>{}) : visit(Type<__nv_bfloat16>{});
}

// True if one launch without a workspace is enough (short_backward.cuh).
inline bool is_short_backward_sm90(const AttentionProblem& problem, const AttentionGradients& gradients) {
  return is_short_backward_sm90(problem, gradients, backward_sm90_features(problem) == BackwardSm90Features::kPlain);
}

// ---- the main kernel

// A pass with its workspace laid out: what all launches of the main kernel share.
struct BackwardSm90Call {
  const AttentionProblem& problem;
  const AttentionGradients& gradients;
  BackwardWorkspace space;
  TransposedMaskBits mask_bits = {};
  int* dq_semaphore = nullptr;  // unless deterministic
  int64_t dq_semaphore_bytes = 0;
  unsigned* tile_counter = nullptr;
  KvGradPartials kv_grad_partials = {};
};

template <class T, int kHeadDim, int kHeadDimV, BackwardSm90Features kFeatures>
void launch_backward_sm90(const BackwardSm90Call& call, CUstream_st* stream) {
  using Kernel = BackwardSm90Kernel<T, BackwardSm90Config<kHeadDim, kHeadDimV, kFeatures>>;
  const auto& [problem, gradients, space, mask_bits, dq_semaphore, dq_semaphore_bytes, tile_counter, kv_grad_partials] = call;
  const auto tensor = [&](const ConstView4& view, bool over_keys, int64_t heads, int64_t width) {
    return tma_tensor_of<T>(problem, view, over_keys, heads, width, over_keys ? Kernel::kKeys : Kernel::kQueries);
  };
  // dK and dV of a persistent kernel leave by TMA, a warp's rows at a time, where TMA can address them.
  const int64_t key_rows = problem.key_starts ? problem.total_keys : problem.keys;
  const auto sendable = [&](const MutableView4& view, int64_t width) {
    return is_tma_compatible(view.data, view.stride, problem.batch, gradients.kv_grad_heads, key_rows, width);
  };
  const bool sends_grads = Kernel::kPersistent && sendable(gradients.grad_key, problem.head_dim) &&
                           sendable(gradients.grad_value, problem.head_dim_v);
  const auto grad_tensor = [&](const MutableView4& view, int64_t width) {
    return sends_grads ? tma_tensor_of<T>(problem, view, true, gradients.kv_grad_heads, width, Kernel::kWarpKeys) : TmaTensor{};
  };
  const TransposedMask transposed_mask =
      Kernel::kTransposed || Kernel::kSparse ? transposed_mask_of(problem) : TransposedMask::kNone;
  const bool may_use_narrow_tile = Kernel::kMayUseNarrowTile &&
                                   (transposed_mask == TransposedMask::kBits || space.tiles.map.is_list) &&
                                   space.tiles.map.size[2] > 1 && space.tiles.map.size[3] > 1;
  // A mask in TMA boxes that the batch shares is read once for the whole batch.
  const bool batch_innermost =
      transposed_mask == TransposedMask::kTma && problem.mask.stride[0] == 0 && problem.mask.stride[1] != 0;
  const TileList list = TileList::of(problem, true, gradients.kv_grad_heads, Kernel::kClusterKeys);
  const TileList tile_list =
      list.by_length(problem.visible, sm_count() / Kernel::kCluster, batch_innermost ? list.sequences : 1);
  const BackwardSm90Arguments arguments{
      .query = tensor(problem.query, false, problem.heads, problem.head_dim),
      .key = tensor(problem.key, true, problem.key_heads, problem.head_dim),
      .value = tensor(problem.value, true, problem.value_heads, problem.head_dim_v),
      .grad_out = tensor(gradients.grad_out, false, problem.heads, problem.head_dim_v),
      .mask = transposed_mask == TransposedMask::kTma ? tensor(problem.mask, false, problem.heads, problem.keys) : TmaTensor{},
      .grad_key = grad_tensor(gradients.grad_key, problem.head_dim),
      .grad_value = grad_tensor(gradients.grad_value, problem.head_dim_v),
      .sends_grads = sends_grads,
      .problem = problem,
      .gradients = gradients,
      .space = space,
      .transposed_mask = transposed_mask,
      .mask_bits = mask_bits,
      .may_use_narrow_tile = may_use_narrow_tile,
      .batch_innermost = batch_innermost,
      .dq_semaphore = dq_semaphore,
      .tile_counter = tile_counter,
      .tile_list = tile_list,
      .q_heads_per_kv_grad_head = static_cast<int>(problem.heads / gradients.kv_grad_heads),
      .score_mod = ScoreMod(problem),
      .keep_scale = problem.dropout < 1 ? static_cast<float>(1 / (1 - problem.dropout)) : 0.0f,
      .bias_scale = static_cast<float>(1 / problem.scale),
      .kv_grad_partials = kv_grad_partials};
  const int64_t items = Kernel::kCutsTiles ? kv_grad_partials.cuts.items() : tile_list.count(),
                ctas = Kernel::kPersistent ? std::min(items, int64_t{sm_count()}) : items * Kernel::kCluster;
  launch<attention_backward_sm90<T, kHeadDim, kHeadDimV, kFeatures>>(
      arguments, ctas, Kernel::kThreads, Kernel::shared_bytes(problem, transposed_mask), stream, true, Kernel::kCluster);
  if constexpr (Kernel::kMayUseNarrowTile && !Kernel::kSingleWarpgroup)
    if (may_use_narrow_tile) launch_backward_sm90<T, kHeadDim, kHeadDimV, BackwardSm90Features::kMasksNarrowTile>(call, stream);
}

// ---- the workspace: BackwardWorkspace, then the tile counter, the dQ semaphores, a mask's bits, and partials of dK and dV

constexpr int64_t kTileCounterBytes = 16;

template <int kHeadDim>
BackwardWorkspace backward_sm90_space(const AttentionProblem& problem, const AttentionGradients& gradients, void* workspace) {
  const int64_t chunks = ceil_div(problem.head_dim, kDqChunkColumnsSm90);
  int64_t width = 0;
  bool stats_as_operand = false;
  visit_backward_sm90<kHeadDim>(problem, [&]<class T>(Type<T>, auto features, auto head_dim, auto head_dim_v) {
    using Kernel = BackwardSm90Kernel<T, BackwardSm90Config<head_dim(), head_dim_v(), features()>>;
    width = Kernel::kPadsHeadDim ? chunks * kDqChunkColumnsSm90 : int64_t{head_dim()};
    stats_as_operand = Kernel::kSubtractsByProducts;
  });
  return BackwardWorkspace(problem, gradients, width, true, mask_gradient_partials(problem, gradients), workspace,
                           stats_as_operand);
}

// The bits that the pass makes of a bool mask; no elements: it makes none, and its tables alone.
inline TransposedMaskBits backward_sm90_mask_bits(const AttentionProblem& problem, void* workspace) {
  const BackwardSm90Features features = backward_sm90_features(problem);
  if ((features != BackwardSm90Features::kMasks && features != BackwardSm90Features::kDropout) ||
      transposed_mask_of(problem) != TransposedMask::kBits)
    return {};
  return transposed_mask_bits_of(problem, workspace);
}

// The partials of cut work tiles. Only tiles of plain dense attention in which all queries see all keys are cut, since such
// tiles are equally long. With `deterministic` no tile is cut, since the cuts depend on the number of tiles.
template <int kHeadDim>
KvGradPartials backward_sm90_kv_grad_partials(const BackwardPass& pass, void* workspace) {
  const AttentionProblem& problem = pass.problem;
  KvGradPartials partials;
  visit_backward_sm90<kHeadDim>(problem, [&]<class T>(Type<T>, auto features, auto head_dim, auto head_dim_v) {
    using Kernel = BackwardSm90Kernel<T, BackwardSm90Config<head_dim(), head_dim_v(), features()>>;
    partials.list = TileList::of(problem, true, pass.gradients.kv_grad_heads, Kernel::kClusterKeys);
    partials.reversed = pass.deterministic || problem.visible.right < 0;
    partials.keys = Kernel::kClusterKeys;
    partials.head_dim = Kernel::kHeadDim;
    partials.head_dim_v = Kernel::kHeadDimV;
    partials.data = static_cast<float*>(workspace);
    const int64_t blocks = problem.heads / pass.gradients.kv_grad_heads * ceil_div(problem.queries, int64_t{Kernel::kQueries});
    const bool cuts = Kernel::kCutsTiles && !pass.deterministic && !problem.query_starts && problem.visible.left < 0 &&
                      problem.visible.right < 0;
    partials.cuts = cuts ? TileCuts::choose(partials.list.count(), blocks, sm_count() / Kernel::kCluster, Kernel::kTileCosts)
                         : TileCuts{.whole = partials.list.count()};
  });
  return partials;
}

// The call in `workspace`, and in `bytes` what it takes; with a null workspace it only counts.
template <int kHeadDim>
BackwardSm90Call backward_sm90_call(const BackwardPass& pass, void* workspace, int64_t& bytes) {
  BackwardSm90Call call{.problem = pass.problem,
                        .gradients = pass.gradients,
                        .space = backward_sm90_space<kHeadDim>(pass.problem, pass.gradients, workspace)};
  if (takes_list_as_map(pass.problem)) call.space.tiles.map = map_of_list(pass.problem);
  char* const after_space = static_cast<char*>(workspace) + call.space.bytes;
  if (pass.deterministic)
    visit_backward_sm90<kHeadDim>(pass.problem, [&]<class T>(Type<T>, auto features, auto head_dim, auto head_dim_v) {
      using Kernel = BackwardSm90Kernel<T, BackwardSm90Config<head_dim(), head_dim_v(), features()>>;
      call.dq_semaphore_bytes = round_up(Kernel::kCluster * call.space.list.count() * static_cast<int64_t>(sizeof(int)), 16);
    });
  call.tile_counter = reinterpret_cast<unsigned*>(after_space);
  call.dq_semaphore = pass.deterministic ? reinterpret_cast<int*>(after_space + kTileCounterBytes) : nullptr;
  call.mask_bits = backward_sm90_mask_bits(pass.problem, after_space + kTileCounterBytes + call.dq_semaphore_bytes);
  bytes = call.space.bytes + kTileCounterBytes + call.dq_semaphore_bytes +
          call.mask_bits.count() * static_cast<int64_t>(sizeof(unsigned));
  call.kv_grad_partials = backward_sm90_kv_grad_partials<kHeadDim>(pass, static_cast<char*>(workspace) + bytes);
  bytes += call.kv_grad_partials.count() * static_cast<int64_t>(sizeof(float));
  return call;
}

// ---- the family

template <int kHeadDim>
const char* AttentionBackwardSm90<kHeadDim>::refusal(const BackwardPass& pass, const Gpu& gpu) {
  return backward_sm90_refusal(pass.problem, gpu, pass.gradients, pass.deterministic);
}

template <int kHeadDim>
int64_t AttentionBackwardSm90<kHeadDim>::workspace_bytes(const BackwardPass& pass) {
  int64_t bytes = 0;
  if (!is_short_backward_sm90(pass.problem, pass.gradients)) backward_sm90_call<kHeadDim>(pass, nullptr, bytes);
  return bytes;
}

template <int kHeadDim>
void backward_mask_sm90(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                        CUstream_st* stream) {
  // Over head dim 128, queries, keys and values of one tile leave no shared memory for the mask.
  if constexpr (kHeadDim <= 128)
    if (!mask_grad_sm90_refusal(gradients))
      return problem.dtype == DType::kFloat16 ? mask_grad_sm90<__half, kHeadDim>(problem, gradients, space, stream)
                                              : mask_grad_sm90<__nv_bfloat16, kHeadDim>(problem, gradients, space, stream);
  mask_gradient(problem, gradients, space, stream);
}

template <int kHeadDim>
void AttentionBackwardSm90<kHeadDim>::run(const BackwardPass& pass, void* workspace, CUstream_st* stream) {
  const AttentionProblem& problem = pass.problem;
  const AttentionGradients& gradients = pass.gradients;
  if constexpr (kHeadDim <= 128)
    if (is_short_backward_sm90(problem, gradients)) return short_backward_sm90<kHeadDim>(problem, gradients, stream);
  int64_t bytes = 0;
  const BackwardSm90Call call = backward_sm90_call<kHeadDim>(pass, workspace, bytes);
  const BackwardWorkspace& space = call.space;
  if (call.dq_semaphore) check(cudaMemsetAsync(call.dq_semaphore, 0, call.dq_semaphore_bytes, stream), "cudaMemsetAsync");
  if (call.mask_bits.count() > 0)
    fill_transposed_mask_bits(problem, space.tiles.map, call.mask_bits, stream);
  else
    fill_tile_tables(problem, space.tiles, stream);
  prepare_backward(problem, gradients, space, stream, call.tile_counter,
                   backward_sm90_features(problem) == BackwardSm90Features::kDropout);
  visit_backward_sm90<kHeadDim>(problem, [&]<class T>(Type<T>, auto features, auto head_dim, auto head_dim_v) {
    using Features = BackwardSm90Features;
    if constexpr (features() == Features::kAllOptions) {
      AttentionBackwardOptionsSm90<head_dim()>::run(call, stream);
    } else {
      launch_backward_sm90<T, head_dim(), head_dim_v(), features()>(call, stream);
    }
  });
  convert_dq_accum(problem, gradients, space, stream, call.kv_grad_partials);
  if (gradients.grad_sinks) reduce_sink_partials(problem, gradients, space, stream);
  if (gradients.grad_mask.data) backward_mask_sm90<kHeadDim>(problem, gradients, space, stream);
  add_large_rows(problem, gradients, space, stream);
}

}  // namespace flash_online::cuda
