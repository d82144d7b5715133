// Which kernel runs: candidates in order, each with its reasons to refuse. The one place that knows families and head dims.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "../../core/philox.h"
#include "../hw/launch.h"
#include "attention.h"
#include "common/mask_map.cuh"
#include "head_dims.h"
#include "kernels.h"
#include "sm90/supported.h"

namespace flash_online::cuda {

namespace {

// Calls f(std::integral_constant) with the smallest of these head dims that holds the problem's. False if there is none.
template <int... kHeadDims, class F>
bool visit_head_dim(std::integer_sequence<int, kHeadDims...>, const AttentionProblem& problem, F&& f) {
  const int64_t width = std::max(problem.head_dim, problem.head_dim_v);
  return ((width <= kHeadDims && (f(std::integral_constant<int, kHeadDims>{}), true)) || ...);
}

Gpu current_gpu() {
  return {device_attribute<cudaDevAttrComputeCapabilityMajor>(), device_attribute<cudaDevAttrComputeCapabilityMinor>(),
          device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>()};
}

constexpr const char* kTooWide = "the head dim is larger than those of this build";

// Forward and backward pass of a family: why it does not take a problem (null: it does), and its launch.
struct Forward {
  const char* name;
  const char* (*refusal)(const AttentionProblem& problem, const Gpu& gpu);
  void (*run)(const AttentionProblem& problem, void* workspace, CUstream_st* stream);
  int64_t (*workspace)(const AttentionProblem& problem);
};

constexpr Forward kForwardOnSm90{
    .name = "sm90",
    .refusal =
        [](const AttentionProblem& problem, const Gpu& gpu) {
          int head_dim = 0;
          const bool fits = visit_head_dim(HopperHeadDims{}, problem, [&](auto width) { head_dim = width(); });
          const char* const reason = forward_sm90_refusal(problem, gpu, head_dim);
          return reason || fits ? reason : kTooWide;
        },
    .run =
        [](const AttentionProblem& problem, void* workspace, CUstream_st* stream) {
          const MaskTables tables = mask_tables_of(problem, workspace);
          fill_mask_tables(problem, tables, stream);
          unsigned* const taken = forward_sm90_takes_tiles(problem) ? static_cast<unsigned*>(workspace) : nullptr;
          visit_head_dim(HopperHeadDims{}, problem, [&](auto width) { forward_sm90<width()>(problem, tables, taken, stream); });
        },
    .workspace =
        [](const AttentionProblem& problem) {
          return forward_sm90_takes_tiles(problem) ? int64_t{sizeof(unsigned)} : mask_tables_of(problem, nullptr).bytes();
        },
};

constexpr Forward kForwardOnSm80{
    .name = "sm80",
    .refusal =
        [](const AttentionProblem& problem, const Gpu& gpu) {
          const char* reason = kTooWide;
          visit_head_dim(HeadDims{}, problem, [&](auto width) { reason = forward_sm80_refusal<width()>(problem, gpu); });
          return reason;
        },
    .run =
        [](const AttentionProblem& problem, void* workspace, CUstream_st* stream) {
          MaskMap map = mask_map_of(problem);
          if (map.count() > 0) map.data = static_cast<uint8_t*>(workspace);
          fill_mask_map(problem, map, stream);
          visit_head_dim(HeadDims{}, problem, [&](auto width) { forward_sm80<width()>(problem, map, stream); });
        },
    .workspace = [](const AttentionProblem& problem) { return mask_map_of(problem).count(); },
};

struct Backward {
  const char* name;
  const char* (*refusal)(const AttentionProblem& problem, const Gpu& gpu, const AttentionGradients& gradients,
                         bool deterministic);
  void (*run)(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic, void* workspace,
              CUstream_st* stream);
  int64_t (*workspace)(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic);
};

constexpr Backward kBackwardOnSm80{
    .name = "sm80",
    .refusal =
        [](const AttentionProblem& problem, const Gpu& gpu, const AttentionGradients&, bool) {
          const char* reason = kTooWide;
          visit_head_dim(HeadDims{}, problem, [&](auto width) { reason = backward_sm80_refusal<width()>(problem, gpu); });
          return reason;
        },
    .run =
        [](const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic, void* workspace,
           CUstream_st* stream) {
          visit_head_dim(HeadDims{}, problem,
                         [&](auto width) { backward_sm80<width()>(problem, gradients, deterministic, workspace, stream); });
        },
    .workspace =
        [](const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic) {
          int64_t bytes = 0;
          visit_head_dim(HeadDims{}, problem,
                         [&](auto width) { bytes = backward_sm80_workspace<width()>(problem, gradients, deterministic); });
          return bytes;
        },
};

constexpr Backward kBackwardOnSm90{
    .name = "sm90",
    .refusal =
        [](const AttentionProblem& problem, const Gpu& gpu, const AttentionGradients& gradients, bool deterministic) {
          const bool fits = visit_head_dim(HopperBackwardHeadDims{}, problem, [](auto) {});
          const char* const reason = backward_sm90_refusal(problem, gpu, gradients, deterministic);
          return reason || fits ? reason : kTooWide;
        },
    .run =
        [](const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic, void* workspace,
           CUstream_st* stream) {
          visit_head_dim(HopperBackwardHeadDims{}, problem,
                         [&](auto width) { backward_sm90<width()>(problem, gradients, deterministic, workspace, stream); });
        },
    .workspace =
        [](const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic) {
          int64_t bytes = 0;
          visit_head_dim(HopperBackwardHeadDims{}, problem,
                         [&](auto width) { bytes = backward_sm90_workspace<width()>(problem, gradients, deterministic); });
          return bytes;
        },
};

// The best first.
constexpr Forward kForward[] = {kForwardOnSm90, kForwardOnSm80};
constexpr Backward kBackward[] = {kBackwardOnSm90, kBackwardOnSm80};

// The reason not to take a family; null: none. FLASH_ONLINE_KERNEL, read once, forces one.
template <class Family, class... More>
const char* refusal(const Family& family, const AttentionProblem& problem, const Gpu& gpu, const More&... more) {
  static const char* const forced = std::getenv("FLASH_ONLINE_KERNEL");
  if (forced && *forced && std::strcmp(forced, family.name) != 0) return "FLASH_ONLINE_KERNEL names another";
  return family.refusal(problem, gpu, more...);
}

template <class Family, size_t kCount, class... More>
const Family& choose(const Family (&families)[kCount], const AttentionProblem& problem, const More&... more) {
  const Gpu gpu = current_gpu();
  std::string reasons;
  for (const Family& family : families) {
    const char* const reason = refusal(family, problem, gpu, more...);
    if (!reason) return family;
    reasons += std::string(reasons.empty() ? "" : "; ") + family.name + ": " + reason;
  }
  throw std::runtime_error("attention on CUDA: no kernel takes this call (" + reasons + ")");
}

// Few queries of many heads leave most rows of a tile empty. Where a key head's query heads see the same keys by the same rule,
// and lie in memory one step behind another, they are as well more queries of one head: that problem, else the given one.
AttentionProblem with_groups_as_rows(const AttentionProblem& problem) {
  constexpr int64_t kRows = 64;  // about what a tile has
  AttentionProblem p = problem;
  if (p.key_heads == 0 || p.key_heads != p.value_heads || p.query_starts || p.queries == 0) return p;
  const int64_t group = p.heads / p.key_heads, rows = group * p.queries;
  const auto tiles = [](int64_t count) { return (count + kRows - 1) / kRows; };
  if (tiles(rows) >= group * tiles(p.queries)) return p;
  if (p.mask.data || p.alibi_slopes || p.sinks || p.dropout != 0) return p;
  const int64_t first = p.visible.offset, last = first + p.queries - 1;  // positions
  if ((p.visible.left >= 0 && last > p.visible.left) || (p.visible.right >= 0 && first + p.visible.right < p.keys - 1))
    return p;
  const auto is_run = [&](const int64_t (&stride)[4]) { return p.queries == 1 || stride[1] == p.queries * stride[2]; };
  if (!is_run(p.query.stride) || !is_run(p.out.stride) || (p.lse && p.lse_stride[1] != p.queries)) return p;
  const auto widen = [&](int64_t (&stride)[4]) {
    if (p.queries == 1) stride[2] = stride[1];
    stride[1] *= group;
  };
  widen(p.query.stride);
  widen(p.out.stride);
  p.lse_stride[1] *= group;
  p.heads = p.key_heads;
  p.queries = rows;
  p.visible = {};
  return p;
}

bool has_no_queries(const AttentionProblem& problem) {
  return problem.heads == 0 || (problem.query_starts ? problem.total_queries : problem.batch * problem.queries) == 0;
}

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

Candidates attention_candidates(const AttentionProblem& given, const Gpu& gpu, bool backward) {
  const AttentionProblem problem = backward ? given : with_groups_as_rows(given);
  Candidates list;
  const auto ask = [&](const auto& families, const auto&... more) {
    for (const auto& family : families) {
      const char* const reason = refusal(family, problem, gpu, more...);
      list.emplace_back(family.name, reason ? reason : "");
    }
  };
  backward ? ask(kBackward, AttentionGradients{}, false) : ask(kForward);
  return list;
}

int64_t attention_forward_workspace(const AttentionProblem& given) {
  const AttentionProblem problem = with_groups_as_rows(given);
  return has_no_queries(problem) ? 0 : choose(kForward, problem).workspace(problem);
}

void attention_forward(const AttentionProblem& given, void* workspace, CUstream_st* stream) {
  const AttentionProblem problem = with_groups_as_rows(given);
  if (!has_no_queries(problem)) choose(kForward, problem).run(problem, workspace, stream);
}

int64_t attention_kv_grad_heads(const AttentionProblem& problem) {
  constexpr int64_t kKeys = 128;  // about what a block of threads takes
  const int64_t least = std::lcm(problem.key_heads, problem.value_heads),
                blocks = problem.query_starts ? problem.total_keys / kKeys + problem.batch
                                              : problem.batch * ((problem.keys + kKeys - 1) / kKeys);
  int64_t kv_grad_heads = least;
  for (int64_t more = least; kv_grad_heads * blocks < sm_count() && more <= problem.heads; more += least)
    if (problem.heads % more == 0) kv_grad_heads = more;
  return kv_grad_heads;
}

int64_t attention_backward_workspace(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic) {
  return choose(kBackward, problem, gradients, deterministic).workspace(problem, gradients, deterministic);
}

void attention_backward(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic,
                        void* workspace, CUstream_st* stream) {
  if (problem.batch > 0 || problem.query_starts)
    choose(kBackward, problem, gradients, deterministic).run(problem, gradients, deterministic, workspace, stream);
}

void attention_dropout_mask(const DropoutProblem& problem, CUstream_st* stream) {
  constexpr int kThreads = 256;
  const int64_t count = problem.batch * problem.heads * problem.queries * ((problem.keys + 3) / 4);
  if (count > 0) launch<dropout_mask>(problem, grid_for((count + kThreads - 1) / kThreads, 8), kThreads, 0, stream);
}

}  // namespace flash_online::cuda
