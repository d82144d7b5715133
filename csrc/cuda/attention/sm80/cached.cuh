// Attention over cached keys: the kernel of forward.cuh with keys and values from the pages of a pool. If queries are few, each
// CTA takes one kv_split of the keys.
#pragma once

#include "forward.cuh"

namespace flash_online::cuda {

template <class Element, int kHeadDim, Variant kVariant>
using CachedSm80Kernel = ForwardSm80Kernel<Element, kHeadDim, kVariant, true>;

// Float32 always has all of its digits, and every kernel has all options.
constexpr bool has_cached_sm80_tile(int bytes, int head_dim, Variant variant) {
  return bytes != 4 && has_options(variant) && has_forward_sm80_tile(bytes, head_dim, variant);
}

template <int kHeadDim, class F, class... SharedBytes>
void visit_cached_sm80(const AttentionProblem& problem, F&& f, SharedBytes... shared_bytes) {
  visit_sm80<CachedSm80Kernel, has_cached_sm80_tile, kHeadDim>(problem, f, shared_bytes...);
}

template <class Kernel>
int64_t value_panels_of(const AttentionProblem& problem) {
  return std::max<int64_t>(ceil_div(problem.head_dim_v, int64_t{Kernel::kHeadDimV}), 1);
}

// Heads per tile, of the heads that share keys: a divisor of their number. 1 with ALiBi, which differs between heads.
template <class Kernel>
int group_of(const AttentionProblem& problem) {
  const int64_t group = problem.heads / problem.key_heads;
  int64_t heads = score_mods(problem) & kScoreModsOfHead ? 1 : std::min<int64_t>(group, Kernel::kQueries);
  while (group % heads != 0) --heads;
  return static_cast<int>(heads);
}

template <class Kernel>
TileList cached_tiles_of(const AttentionProblem& problem) {
  const int group = group_of<Kernel>(problem);
  return TileList::of(problem, false, problem.heads / group, Kernel::kQueries / group);
}

template <class Kernel>
KvSplits cached_kv_splits_of(const AttentionProblem& problem) {
  const int64_t tiles = cached_tiles_of<Kernel>(problem).count();
  return KvSplits::of(problem, tiles * value_panels_of<Kernel>(problem), int64_t{sm_count()} * Kernel::kTile.ctas_per_sm);
}

template <int kHeadDim>
const char* AttentionCachedSm80<kHeadDim>::refusal(const ForwardPass& pass, const Gpu& gpu) {
  if (capacity_of(pass.problem.cache) >= int64_t{1} << 31) return "the cache has room for 2^31 keys per sequence or more";
  const char* reason = nullptr;
  visit_cached_sm80<kHeadDim>(
      pass.problem,
      [&]<class Element, Variant kVariant>(Type<Element>, VariantConstant<kVariant>) {
        if (CachedSm80Kernel<Element, kHeadDim, kVariant>::shared_bytes(pass.problem) > gpu.shared_bytes)
          reason = "the GPU has too little shared memory for this head dim";
      },
      gpu.shared_bytes);
  return reason;
}

template <int kHeadDim>
int64_t AttentionCachedSm80<kHeadDim>::workspace_bytes(const ForwardPass& pass) {
  int64_t bytes = 0;
  visit_cached_sm80<kHeadDim>(pass.problem, [&]<class Element, Variant kVariant>(Type<Element>, VariantConstant<kVariant>) {
    using Kernel = CachedSm80Kernel<Element, kHeadDim, kVariant>;
    bytes = cached_kv_splits_of<Kernel>(pass.problem).bytes(pass.problem);
  });
  return bytes;
}

template <class Element, int kHeadDim, Variant kVariant>
void launch_cached_sm80(const AttentionProblem& problem, void* workspace, CUstream_st* stream) {
  using Kernel = CachedSm80Kernel<Element, kHeadDim, kVariant>;
  ForwardSm80Arguments arguments{
      .problem = problem,
      .list = cached_tiles_of<Kernel>(problem),
      .tiles = {},
      .score_mod = ScoreMod(problem),
      .keep_scale = 1,
      .kv_splits = cached_kv_splits_of<Kernel>(problem),
      .group = group_of<Kernel>(problem),
      .heads_per_key_head = static_cast<int>(problem.heads / problem.key_heads),
      .heads_per_value_head = static_cast<int>(problem.heads / problem.value_heads),
  };
  arguments.score_mod.has_score_mod |= problem.cache.key_scale != nullptr;
  arguments.kv_splits.partials = static_cast<float*>(workspace);
  launch<attention_forward_sm80<Element, kHeadDim, kVariant, true>>(
      arguments, arguments.list.count() * arguments.kv_splits.most * value_panels_of<Kernel>(problem), Kernel::kThreads,
      Kernel::shared_bytes(problem), stream);
  merge_kv_splits(problem, arguments.kv_splits, stream);
}

template <int kHeadDim>
void AttentionCachedSm80<kHeadDim>::run(const ForwardPass& pass, void* workspace, CUstream_st* stream) {
  visit_cached_sm80<kHeadDim>(pass.problem, [&]<class Element, Variant kVariant>(Type<Element>, VariantConstant<kVariant>) {
    launch_cached_sm80<Element, kHeadDim, kVariant>(pass.problem, workspace, stream);
  });
}

}  // namespace flash_online::cuda
