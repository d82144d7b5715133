// The choice of the kernel family for a pass: the families in order of preference, each with its reason to refuse.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "../../core/cache.h"
#include "../../core/integer.h"
#include "../../core/philox.h"
#include "../hw/launch.h"
#include "attention.h"
#include "head_dims.h"
#include "kernels.h"
#include "sm90/forward/cached/rows.h"

namespace flash_online::cuda {

namespace {

// Calls f(std::integral_constant) with the smallest of these head dims that holds both of the problem's. False: there is none.
template <int... kHeadDims, class F>
bool visit_head_dim(std::integer_sequence<int, kHeadDims...>, const AttentionProblem& problem, F&& f) {
  const int64_t larger = std::max(problem.head_dim, problem.head_dim_v);
  return ((larger <= kHeadDims && (f(std::integral_constant<int, kHeadDims>{}), true)) || ...);
}

Gpu current_gpu() {
  return {device_attribute<cudaDevAttrComputeCapabilityMajor>(), device_attribute<cudaDevAttrComputeCapabilityMinor>(),
          shared_bytes_per_cta()};
}

// The problem of a pass as attention's.
template <class Pass>
const AttentionProblem& attention_of(const Pass& pass) {
  return pass.problem;
}
const AttentionProblem& attention_of(const Float8Pass& pass) { return pass.problem.attention; }

// The functions of a kernel family's instance of one head dim (kernels.h).
template <class Pass>
struct Instance {
  const char* (*refusal)(const Pass& pass, const Gpu& gpu);
  int64_t (*workspace_bytes)(const Pass& pass);
  void (*run)(const Pass& pass, void* workspace, CUstream_st* stream);
};

// A kernel family over all head dims of the build.
template <class Pass>
struct Family {
  const char* name;
  bool is_built;  // whether the build has instances of it
  bool is_float64;  // whether it takes float64, and nothing else
  const Instance<Pass>* (*instance)(const AttentionProblem& problem);  // null: no head dim of the build holds the problem's
};

template <class Pass, template <int> class Kernels, class HeadDims, bool kFloat64 = false>
constexpr Family<Pass> family(const char* name) {
  return {
      .name = name,
      .is_built = HeadDims::size() > 0,
      .is_float64 = kFloat64,
      .instance =
          [](const AttentionProblem& problem) {
            const Instance<Pass>* found = nullptr;
            visit_head_dim(HeadDims{}, problem, [&](auto head_dim) {
              using Kernel = Kernels<head_dim()>;
              static constexpr Instance<Pass> kInstance{
                  .refusal = Kernel::refusal, .workspace_bytes = Kernel::workspace_bytes, .run = Kernel::run};
              found = &kInstance;
            });
            return found;
          },
  };
}

// In order of preference.
using HeadDimsFloat64 = std::integer_sequence<int, kFloat64HeadDim>;
constexpr Family<ForwardPass> kForward[] = {family<ForwardPass, AttentionForwardSm90, HeadDimsForwardSm90>("sm90"),
                                            family<ForwardPass, AttentionForwardSm80, HeadDims>("sm80"),
                                            family<ForwardPass, AttentionForwardFloat64, HeadDimsFloat64, true>("float64")};
constexpr Family<ForwardPass> kCached[] = {
    family<ForwardPass, AttentionDecode, HeadDimsDecode>("decode"),
    family<ForwardPass, AttentionDecodeLatentSm90, HeadDimsDecodeLatentSm90>("latent_sm90"),
    family<ForwardPass, AttentionDecodeLatent, HeadDimsDecodeLatent>("latent"),
    family<ForwardPass, AttentionCachedSm90, HeadDimsCachedSm90>("sm90"),
    family<ForwardPass, AttentionCachedSm80, HeadDimsCachedSm80>("sm80")};
constexpr Family<ForwardPass> kCachedTiles[] = {kCached[3], kCached[0], kCached[1], kCached[2], kCached[4]};  // sm90 first
constexpr Family<BackwardPass> kBackward[] = {
    family<BackwardPass, AttentionBackwardSm90, HeadDimsBackwardSm90>("sm90"),
    family<BackwardPass, AttentionBackwardBf16x2Sm90, HeadDimsBackwardBf16x2Sm90>("bf16x2_sm90"),
    family<BackwardPass, AttentionBackwardSm80, HeadDims>("sm80"),
    family<BackwardPass, AttentionBackwardFloat64, HeadDimsFloat64, true>("float64")};

constexpr Family<WeightSumsPass> kWeightSums[] = {
    family<WeightSumsPass, AttentionWeightSumsSm90, HeadDimsWeightSumsSm90>("sm90")};
constexpr Family<BlockMaximaPass> kBlockMaxima[] = {
    family<BlockMaximaPass, AttentionBlockMaximaSm90, HeadDimsBlockMaximaSm90>("sm90"),
    family<BlockMaximaPass, AttentionBlockMaximaSm80, std::integer_sequence<int, kAnyHeadDim>>("sm80")};
constexpr Family<Float8Pass> kFloat8[] = {family<Float8Pass, AttentionFloat8Sm90, HeadDimsFloat8Sm90>("sm90")};

// The reason why a family does not take a pass; null: it does. FLASH_ONLINE_KERNEL, read once per process, forces a family if
// there is a choice: float64 has only one.
template <class Pass>
const char* refusal(const Family<Pass>& family, const Instance<Pass>* instance, const Pass& pass, const Gpu& gpu) {
  const AttentionProblem& problem = attention_of(pass);
  if (family.is_float64 && problem.dtype != DType::kFloat64) return "it takes float64 alone";
  if (!family.is_float64 && problem.dtype == DType::kFloat64) return "it does not take float64";
  if (!family.is_float64 && problem.mask.data && problem.mask_dtype == DType::kFloat64)
    return "a mask in float64 goes with float64 inputs";
  static const char* const forced = std::getenv("FLASH_ONLINE_KERNEL");
  if (!family.is_float64 && forced && *forced && std::strcmp(forced, family.name) != 0)
    return "FLASH_ONLINE_KERNEL names another";
  if (!family.is_built) return "this build has none of its kernels";
  if (!instance) return "the head dim is larger than those of this build";
  return instance->refusal(pass, gpu);
}

// The first family's instance that takes the pass; null: none does. It ends there unless there is a list to fill, which then
// gets every family with its reason.
template <class Pass, size_t kCount>
const Instance<Pass>* choose(const Family<Pass> (&families)[kCount], const Pass& pass, const Gpu& gpu,
                             Candidates* candidates = nullptr) {
  const Instance<Pass>* chosen = nullptr;
  for (const Family<Pass>& family : families) {
    const Instance<Pass>* const instance = family.instance(attention_of(pass));
    const char* const reason = refusal(family, instance, pass, gpu);
    if (!reason && !chosen) chosen = instance;
    if (candidates)
      candidates->emplace_back(family.name, reason ? reason : "");
    else if (chosen)
      break;
  }
  return chosen;
}

std::atomic<int64_t> plan_count = 0;

template <class Pass>
Plan<Pass> plan(const Instance<Pass>& instance, const Pass& pass) {
  plan_count.fetch_add(1, std::memory_order_relaxed);
  return {.pass = pass, .workspace_bytes = instance.workspace_bytes(pass), .launch = instance.run};
}

template <class Pass, size_t kCount>
Plan<Pass> plan(const Family<Pass> (&families)[kCount], const Pass& pass) {
  const Gpu gpu = current_gpu();
  if (const Instance<Pass>* const instance = choose(families, pass, gpu)) return plan(*instance, pass);
  Candidates candidates;
  choose(families, pass, gpu, &candidates);
  std::string reasons;
  for (const auto& [name, reason] : candidates) reasons += (reasons.empty() ? "" : "; ") + name + ": " + reason;
  throw std::runtime_error("attention on CUDA: no kernel takes this call (" + reasons + ")");
}

// The number of kv_splits of few rows over dense keys. It depends on the keys and the head dim alone, so that a row's bits
// depend neither on the batch nor on other heads: many, so that one sequence fills the GPU, but of enough keys that their ends
// cost little (docs/lab/decode_dense.md). The fewest keys are two tiles for each of a CTA's four warps.
int64_t few_rows_kv_splits(const AttentionProblem& problem) {
  constexpr int64_t kLeast = 4, kFew = 8, kMany = 16, kMost = 32;
  const int64_t keys = problem.keys, few_keys = std::max(problem.head_dim, problem.head_dim_v) <= 64 ? 256 : 128;
  return std::clamp(std::max({std::min(keys / few_keys, kFew), std::min(keys / 256, kMany), keys / 512}), kLeast, kMost);
}

// Whether the decode family goes before those of kForward. It may only depend on what a row's bits may depend on, so that these
// limits are where it is ahead of Hopper's forward kernel for 1 to 32 sequences; with many sequences, more rows or fewer keys
// cost more than its kv_splits save (docs/lab/decode_dense.md).
bool prefers_few_rows(const AttentionProblem& problem) {
  if (!has_few_rows(problem)) return false;
  const int64_t rows = problem.heads / problem.key_heads * problem.queries;
  if (rows <= 8) return problem.keys >= 1024;
  return rows <= 16 && problem.keys >= 2048 && std::max(problem.head_dim, problem.head_dim_v) <= 128;
}

// What then takes a forward pass, and the pass in its form.
constexpr Family<ForwardPass> kFewRowsFamilies[] = {kCached[0]};
ForwardPass few_rows_pass(const AttentionProblem& problem) { return {as_cached(problem, few_rows_kv_splits(problem))}; }

// Packs the query heads of a key head into rows of one head: few queries of many heads would leave most rows of a tile empty.
// The heads of a group must see the same keys by the same rule and lie one step apart in memory; otherwise the problem is
// returned as it is.
AttentionProblem with_groups_as_rows(const AttentionProblem& problem) {
  constexpr int64_t kTileRows = 64;  // roughly a tile's
  AttentionProblem p = problem;
  if (p.key_heads == 0 || p.key_heads != p.value_heads || p.query_starts || p.queries == 0) return p;
  const int64_t group = p.heads / p.key_heads, rows = group * p.queries;
  if (ceil_div(rows, kTileRows) >= group * ceil_div(p.queries, kTileRows)) return p;
  if (p.mask.data || p.is_sparse() || p.max_logit || (score_mods(p) & kScoreModsOfHead) || p.sinks || p.dropout != 0) return p;
  const int64_t first = p.visible.offset, last = first + p.queries - 1;  // positions
  if ((p.visible.left >= 0 && last > p.visible.left) || (p.visible.right >= 0 && first + p.visible.right < p.keys - 1))
    return p;
  const auto is_contiguous = [&](const int64_t (&stride)[4]) { return p.queries == 1 || stride[1] == p.queries * stride[2]; };
  if (!is_contiguous(p.query.stride) || !is_contiguous(p.out.stride) || (p.lse && p.lse_stride[1] != p.queries)) return p;
  const auto pack = [&](int64_t (&stride)[4]) {
    if (p.queries == 1) stride[2] = stride[1];
    stride[1] *= group;
  };
  pack(p.query.stride);
  pack(p.out.stride);
  p.lse_stride[1] *= group;
  p.heads = p.key_heads;
  p.queries = rows;
  p.visible = {};
  return p;
}

bool has_no_queries(const AttentionProblem& problem) {
  return problem.heads == 0 || (problem.query_starts ? problem.total_queries : problem.batch * problem.queries) == 0;
}

// Whether Hopper's forward kernel goes before the decode kernel over cached keys: there are more rows than the latter's 16, and
// fewer than twice as many tiles read the same keys as in the latter, though each reads them faster. Where scores are modified,
// no shares cut the keys of the former's tiles, which then have to fill the SMs.
bool prefers_tiles(const AttentionProblem& problem) {
  constexpr int64_t kDecodeRows = 16;
  constexpr int kTileRows = 64;
  if (problem.key_heads == 0) return false;
  const int64_t rows = problem.heads / problem.key_heads * problem.queries, tiles = cached_tiles_per_key(problem, kTileRows);
  const int64_t rows_at_once = std::max(problem.head_dim, problem.head_dim_v) <= 128 ? 2 * kDecodeRows : kDecodeRows;
  if (rows <= kDecodeRows || tiles >= 2 * ceil_div(rows, rows_at_once)) return false;
  return score_mods(problem) == 0 || problem.batch * problem.key_heads * tiles * 4 >= int64_t{sm_count()} * 3;
}

// Under a causal mask tiles of keys see different numbers of queries, so that CTAs stand at different query heads of the group
// that shares their keys. What they read and add to is then all of these heads' queries, gradients of the output and float32
// dQ, for as many groups as are under way at once.
int64_t group_bytes_under_way(const AttentionProblem& problem, int64_t kv_grad_heads) {
  const int64_t tile = std::max(problem.head_dim, problem.head_dim_v) <= 128 ? 128 : 64,  // keys of a CTA on Hopper
      groups = std::clamp(sm_count() / std::max(ceil_div(problem.keys, tile), int64_t{1}), int64_t{1},
                          std::max(problem.batch * kv_grad_heads, int64_t{1}));
  return groups * (problem.heads / kv_grad_heads) * problem.queries *
         (problem.head_dim * (size_of(problem.dtype) + int64_t{sizeof(float)}) + problem.head_dim_v * size_of(problem.dtype));
}

// One thread per group of keys that share a draw.
__global__ void dropout_mask(const __grid_constant__ DropoutProblem problem) {
  const Philox random(problem.rng[0], problem.rng[1]);
  constexpr int kKeys = Philox::kKeys;
  const uint32_t threshold = drop_threshold(problem.dropout);
  const int64_t groups = (problem.keys + kKeys - 1) / kKeys, count = problem.batch * problem.heads * problem.queries * groups;
  for (int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; index < count;
       index += int64_t{gridDim.x} * blockDim.x) {
    const int64_t group = index % groups, row = index / groups, query = row % problem.queries, plane = row / problem.queries;
    const unsigned kept = random.kept(problem.batch_begin + plane / problem.heads, plane % problem.heads,
                                      problem.query_begin + query, group, threshold);
    for (int n = 0; n < kKeys && group * kKeys + n < problem.keys; ++n)
      problem.keep[row * problem.keys + group * kKeys + n] = problem.dropout < 1 && kept >> n & 1;
  }
}

}  // namespace

Plan<ForwardPass> plan_forward(const AttentionProblem& problem) {
  if (has_no_queries(problem)) return {};
  if (prefers_few_rows(problem)) {
    const ForwardPass pass = few_rows_pass(problem);
    if (const Instance<ForwardPass>* const instance = choose(kFewRowsFamilies, pass, current_gpu()))
      return plan(*instance, pass);
  }
  return plan(kForward, ForwardPass{with_groups_as_rows(problem)});
}

Plan<ForwardPass> plan_cached(const AttentionProblem& problem) {
  if (has_no_queries(problem)) return {};
  return prefers_tiles(problem) ? plan(kCachedTiles, ForwardPass{problem}) : plan(kCached, ForwardPass{problem});
}

Plan<BackwardPass> plan_backward(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic) {
  if (problem.batch == 0 && !problem.query_starts) return {};
  return plan(kBackward, BackwardPass{problem, gradients, deterministic});
}

Plan<Float8Pass> plan_float8(const Float8Problem& problem) {
  const Float8Pass pass{problem};
  if (has_no_queries(problem.attention)) return {.pass = pass};
  return plan(kFloat8, pass);
}

Plan<WeightSumsPass> plan_weight_sums(const AttentionProblem& problem, float* sums) {
  const WeightSumsPass pass{problem, sums};
  const Instance<WeightSumsPass>* const instance = choose(kWeightSums, pass, current_gpu());
  return instance ? plan(*instance, pass) : Plan<WeightSumsPass>{};
}

Plan<BlockMaximaPass> plan_block_maxima(const BlockMaximaPass& pass) { return plan(kBlockMaxima, pass); }

int64_t plans_made() { return plan_count.load(std::memory_order_relaxed); }

Candidates forward_candidates(const AttentionProblem& problem, const Gpu& gpu) {
  Candidates list;
  if (prefers_few_rows(problem)) choose(kFewRowsFamilies, few_rows_pass(problem), gpu, &list);
  choose(kForward, ForwardPass{with_groups_as_rows(problem)}, gpu, &list);
  return list;
}

Candidates backward_candidates(const BackwardPass& pass, const Gpu& gpu) {
  Candidates list;
  choose(kBackward, pass, gpu, &list);
  return list;
}

Candidates float8_candidates(const Float8Problem& problem, const Gpu& gpu) {
  Candidates list;
  choose(kFloat8, Float8Pass{problem}, gpu, &list);
  return list;
}

int64_t attention_kv_grad_heads(const AttentionProblem& problem, bool deterministic) {
  constexpr int64_t kKeys = 128;  // roughly the keys of a CTA
  const int64_t least = std::lcm(problem.key_heads, problem.value_heads);
  if (deterministic) return least;  // the number must not depend on the batch, nor on how many heads there are
  const int64_t tiles =
      problem.query_starts ? problem.total_keys / kKeys + problem.batch : problem.batch * ceil_div(problem.keys, kKeys);
  int64_t kv_grad_heads = least;
  for (int64_t more = least; kv_grad_heads * tiles < sm_count() && more <= problem.heads; more += least)
    if (problem.heads % more == 0) kv_grad_heads = more;
  // Smaller groups keep what is under way in the L2 cache (50 MB). Their sum costs a pass over dK and dV, which is worth it
  // where twice the cache would be under way.
  constexpr int64_t kTooMany = 96 << 20, kFew = 40 << 20, kLeastKeys = 1024;
  const bool one_sided = (problem.visible.left < 0) != (problem.visible.right < 0);
  if (one_sided && !problem.query_starts && problem.keys >= kLeastKeys && problem.dtype != DType::kFloat32 &&
      current_gpu().major == 9 && group_bytes_under_way(problem, kv_grad_heads) >= kTooMany)
    for (int64_t more = kv_grad_heads; group_bytes_under_way(problem, kv_grad_heads) > kFew && more <= problem.heads;
         more += least)
      if (problem.heads % more == 0) kv_grad_heads = more;
  return kv_grad_heads;
}

void attention_dropout_mask(const DropoutProblem& problem, CUstream_st* stream) {
  constexpr int kThreads = 256;
  const int64_t groups = problem.batch * problem.heads * problem.queries * ceil_div(problem.keys, int64_t{Philox::kKeys});
  if (groups > 0) launch<dropout_mask>(problem, grid_for(ceil_div(groups, int64_t{kThreads}), 8), kThreads, 0, stream);
}

}  // namespace flash_online::cuda
