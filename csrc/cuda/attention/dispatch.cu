// Which kernel runs: candidates in order, each with its reasons to refuse. The one place that knows families and head dims.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <type_traits>

#include "../../core/philox.h"
#include "../hw/launch.h"
#include "attention.h"
#include "block_map.cuh"
#include "families.h"

namespace flash_online::cuda {

namespace {

#include "head_dims.h"

// Calls f(std::integral_constant) with the smallest head dim of this build that holds the problem's. False if there is none.
template <size_t kIndex = 0, class F>
bool visit_head_dim(const AttentionProblem& problem, F&& f) {
  if constexpr (kIndex < std::size(kBuiltHeadDims)) {
    if (std::max(problem.width, problem.value_width) > kBuiltHeadDims[kIndex]) return visit_head_dim<kIndex + 1>(problem, f);
    f(std::integral_constant<int, kBuiltHeadDims[kIndex]>{});
    return true;
  }
  return false;
}

Gpu current_gpu() {
  return {device_attribute<cudaDevAttrComputeCapabilityMajor>(), device_attribute<cudaDevAttrComputeCapabilityMinor>(),
          device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>()};
}

// The reason of the instance for the problem's head dim, as `refusal` finds it.
template <class F>
const char* refusal_by_head_dim(const AttentionProblem& problem, F&& refusal) {
  const char* reason = nullptr;
  const bool fits = visit_head_dim(problem, [&](auto width) { reason = refusal(width); });
  return fits ? reason : "the head dim is larger than those of this build";
}

const char* forward_sm80_refusal(const AttentionProblem& problem, const Gpu& gpu) {
  return refusal_by_head_dim(problem, [&](auto width) { return cuda::forward_sm80_refusal<width()>(problem, gpu); });
}

const char* backward_sm80_refusal(const AttentionProblem& problem, const Gpu& gpu) {
  return refusal_by_head_dim(problem, [&](auto width) { return cuda::backward_sm80_refusal<width()>(problem, gpu); });
}

struct Candidate {
  const char* name;
  const char* (*refusal)(const AttentionProblem& problem, const Gpu& gpu);
};

constexpr Candidate kForward[] = {{"sm80", forward_sm80_refusal}};
constexpr Candidate kBackward[] = {{"sm80", backward_sm80_refusal}};

// The reason not to take a candidate; null: none. FLASH_ONLINE_KERNEL, read once, forces a family.
const char* refusal(const Candidate& candidate, const AttentionProblem& problem, const Gpu& gpu) {
  static const char* const forced = std::getenv("FLASH_ONLINE_KERNEL");
  if (forced && *forced && std::strcmp(forced, candidate.name) != 0) return "FLASH_ONLINE_KERNEL names another";
  return candidate.refusal(problem, gpu);
}

// The index of the candidate to take.
template <size_t kCount>
size_t choose(const Candidate (&candidates)[kCount], const AttentionProblem& problem) {
  const Gpu gpu = current_gpu();
  std::string reasons;
  for (size_t i = 0; i < kCount; ++i) {
    const char* const reason = refusal(candidates[i], problem, gpu);
    if (!reason) return i;
    reasons += std::string(reasons.empty() ? "" : "; ") + candidates[i].name + ": " + reason;
  }
  throw std::runtime_error("attention on CUDA: no kernel takes this call (" + reasons + ")");
}

__global__ void dropout_mask(const __grid_constant__ DropoutProblem problem) {
  const Philox random(problem.rng[0], problem.rng[1]);
  const uint64_t threshold = drop_threshold(problem.dropout);
  const int64_t groups = (problem.keys + 3) / 4, count = problem.batch * problem.heads * problem.queries * groups;
  for (int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; index < count; index += int64_t{gridDim.x} * blockDim.x) {
    const int64_t group = index % groups, row = index / groups, query = row % problem.queries, plane = row / problem.queries;
    uint32_t words[4];
    random.words(problem.batch_begin + plane / problem.heads, plane % problem.heads, problem.query_begin + query, group, words);
    for (int n = 0; n < 4 && group * 4 + n < problem.keys; ++n)
      problem.keep[row * problem.keys + group * 4 + n] = words[n] >= threshold;
  }
}

}  // namespace

Candidates attention_candidates(const AttentionProblem& problem, const Gpu& gpu, bool backward) {
  Candidates list;
  const auto ask = [&](const auto& candidates) {
    for (const Candidate& candidate : candidates) {
      const char* const reason = refusal(candidate, problem, gpu);
      list.emplace_back(candidate.name, reason ? reason : "");
    }
  };
  backward ? ask(kBackward) : ask(kForward);
  return list;
}

int64_t attention_forward_workspace(const AttentionProblem& problem) { return block_map_of(problem).count(); }

void attention_forward(const AttentionProblem& problem, void* workspace, CUstream_st* stream) {
  if (problem.batch == 0 || problem.heads == 0 || (problem.query_starts ? problem.total_queries : problem.queries) == 0) return;
  choose(kForward, problem);
  BlockMap map = block_map_of(problem);
  if (map.count() > 0) map.data = static_cast<uint8_t*>(workspace);
  fill_block_map(problem, map, stream);
  visit_head_dim(problem, [&](auto width) { forward_sm80<width()>(problem, map, stream); });
}

int64_t attention_backward_units(const AttentionProblem& problem) {
  constexpr int64_t kKeys = 128;  // about what a block of threads takes
  const int64_t least = std::lcm(problem.key_heads, problem.value_heads),
                blocks = problem.query_starts ? problem.total_keys / kKeys + problem.batch
                                              : problem.batch * ((problem.keys + kKeys - 1) / kKeys);
  int64_t units = least;
  for (int64_t more = least; units * blocks < multiprocessors() && more <= problem.heads; more += least)
    if (problem.heads % more == 0) units = more;
  return units;
}

int64_t attention_backward_workspace(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic) {
  choose(kBackward, problem);
  int64_t bytes = 0;
  visit_head_dim(problem,
                 [&](auto width) { bytes = backward_sm80_workspace<width()>(problem, gradients, deterministic); });
  return bytes;
}

void attention_backward(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic, void* workspace,
                        CUstream_st* stream) {
  if (problem.batch == 0 && !problem.query_starts) return;
  choose(kBackward, problem);
  visit_head_dim(problem,
                 [&](auto width) { backward_sm80<width()>(problem, gradients, deterministic, workspace, stream); });
}

void attention_dropout_mask(const DropoutProblem& problem, CUstream_st* stream) {
  constexpr int kThreads = 256;
  const int64_t count = problem.batch * problem.heads * problem.queries * ((problem.keys + 3) / 4);
  if (count > 0) launch<dropout_mask>(problem, grid_for((count + kThreads - 1) / kThreads, 8), kThreads, 0, stream);
}

}  // namespace flash_online::cuda
