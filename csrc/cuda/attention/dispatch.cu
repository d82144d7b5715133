// Which kernel runs: candidates in order, each with its reasons to refuse. The one place that knows families and head dims.
#include <algorithm>
#include <array>
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

// Calls f(std::integral_constant) with the smallest head dim of kBuilt that holds the problem's. False if there is none.
template <const auto& kBuilt, size_t kIndex = 0, class F>
bool visit_head_dim(const AttentionProblem& problem, F&& f) {
  if constexpr (kIndex < std::size(kBuilt)) {
    if (std::max(problem.width, problem.value_width) > kBuilt[kIndex]) return visit_head_dim<kBuilt, kIndex + 1>(problem, f);
    f(std::integral_constant<int, kBuilt[kIndex]>{});
    return true;
  }
  return false;
}

Gpu current_gpu() {
  return {device_attribute<cudaDevAttrComputeCapabilityMajor>(), device_attribute<cudaDevAttrComputeCapabilityMinor>(),
          device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>()};
}

// The reason of the instance for the problem's head dim, as `refusal` finds it.
template <const auto& kBuilt, class F>
const char* refusal_by_head_dim(const AttentionProblem& problem, F&& refusal) {
  if (std::empty(kBuilt)) return "this build has no kernels for it";
  const char* reason = nullptr;
  const bool fits = visit_head_dim<kBuilt>(problem, [&](auto width) { reason = refusal(width); });
  return fits ? reason : "the head dim is larger than those of this build";
}

// A call, as far as the choice of a kernel depends on it.
struct Wanted {
  const AttentionProblem& problem;
  AttentionGradients gradients;
  bool deterministic;
};

const char* forward_sm80_refusal(const Wanted& wanted, const Gpu& gpu) {
  return refusal_by_head_dim<kBuiltHeadDims>(
      wanted.problem, [&](auto width) { return cuda::forward_sm80_refusal<width()>(wanted.problem, gpu); });
}

const char* backward_sm80_refusal(const Wanted& wanted, const Gpu& gpu) {
  return refusal_by_head_dim<kBuiltHeadDims>(
      wanted.problem, [&](auto width) { return cuda::backward_sm80_refusal<width()>(wanted.problem, gpu); });
}

const char* backward_sm90_refusal(const Wanted& wanted, const Gpu& gpu) {
  if (wanted.deterministic) return "deterministic: it sums gradients of queries in any order";
  return refusal_by_head_dim<kBuiltBackwardSm90>(
      wanted.problem, [&](auto width) { return cuda::backward_sm90_refusal<width()>(wanted.problem, wanted.gradients, gpu); });
}

int64_t backward_sm80_workspace(const Wanted& wanted) {
  int64_t bytes = 0;
  visit_head_dim<kBuiltHeadDims>(wanted.problem, [&](auto width) {
    bytes = cuda::backward_sm80_workspace<width()>(wanted.problem, wanted.gradients, wanted.deterministic);
  });
  return bytes;
}

int64_t backward_sm90_workspace(const Wanted& wanted) {
  int64_t bytes = 0;
  visit_head_dim<kBuiltBackwardSm90>(
      wanted.problem, [&](auto width) { bytes = cuda::backward_sm90_workspace<width()>(wanted.problem, wanted.gradients); });
  return bytes;
}

void backward_sm80(const Wanted& wanted, void* workspace, CUstream_st* stream) {
  visit_head_dim<kBuiltHeadDims>(wanted.problem, [&](auto width) {
    cuda::backward_sm80<width()>(wanted.problem, wanted.gradients, wanted.deterministic, workspace, stream);
  });
}

void backward_sm90(const Wanted& wanted, void* workspace, CUstream_st* stream) {
  visit_head_dim<kBuiltBackwardSm90>(
      wanted.problem, [&](auto width) { cuda::backward_sm90<width()>(wanted.problem, wanted.gradients, workspace, stream); });
}

struct Candidate {
  const char* name;
  const char* (*refusal)(const Wanted& wanted, const Gpu& gpu);
};

struct BackwardCandidate : Candidate {
  int64_t (*workspace)(const Wanted& wanted);
  void (*run)(const Wanted& wanted, void* workspace, CUstream_st* stream);
};

constexpr Candidate kForward[] = {{"sm80", forward_sm80_refusal}};
// sm90 has not run on a device yet, and comes first once it has: until then FLASH_ONLINE_KERNEL alone gets at it.
constexpr BackwardCandidate kBackward[] = {{{"sm80", backward_sm80_refusal}, backward_sm80_workspace, backward_sm80},
                                           {{"sm90", backward_sm90_refusal}, backward_sm90_workspace, backward_sm90}};

// Calls f(candidate, reason not to take it; null: none) for each, until f returns true. FLASH_ONLINE_KERNEL, read once, forces
// a family where there is one of that name.
template <class Candidate, size_t kCount, class F>
void for_each_candidate(const Candidate (&candidates)[kCount], const Wanted& wanted, const Gpu& gpu, F&& f) {
  static const char* const forced = std::getenv("FLASH_ONLINE_KERNEL");
  const auto is_forced = [](const Candidate& candidate) { return forced && std::strcmp(forced, candidate.name) == 0; };
  const bool any_forced = std::any_of(std::begin(candidates), std::end(candidates), is_forced);
  for (const Candidate& candidate : candidates)
    if (f(candidate,
          any_forced && !is_forced(candidate) ? "FLASH_ONLINE_KERNEL names another" : candidate.refusal(wanted, gpu)))
      return;
}

// The candidate to take.
template <class Candidate, size_t kCount>
const Candidate& choose(const Candidate (&candidates)[kCount], const Wanted& wanted) {
  const Candidate* taken = nullptr;
  std::string reasons;
  for_each_candidate(candidates, wanted, current_gpu(), [&](const Candidate& candidate, const char* reason) {
    if (!reason)
      taken = &candidate;
    else
      reasons += std::string(reasons.empty() ? "" : "; ") + candidate.name + ": " + reason;
    return taken != nullptr;
  });
  if (!taken) throw std::runtime_error("attention on CUDA: no kernel takes this call (" + reasons + ")");
  return *taken;
}

__global__ void dropout_mask(const __grid_constant__ DropoutProblem problem) {
  const Philox random(problem.rng[0], problem.rng[1]);
  const uint64_t threshold = drop_threshold(problem.dropout);
  const int64_t groups = (problem.keys + 3) / 4, count = problem.batch * problem.heads * problem.queries * groups;
  for (int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; index < count;
       index += int64_t{gridDim.x} * blockDim.x) {
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
    for_each_candidate(candidates, {problem, {}, false}, gpu, [&](const Candidate& candidate, const char* reason) {
      list.emplace_back(candidate.name, reason ? reason : "");
      return false;
    });
  };
  backward ? ask(kBackward) : ask(kForward);
  return list;
}

int64_t attention_forward_workspace(const AttentionProblem& problem) { return block_map_of(problem).count(); }

void attention_forward(const AttentionProblem& problem, void* workspace, CUstream_st* stream) {
  if (problem.batch == 0 || problem.heads == 0 || (problem.query_starts ? problem.total_queries : problem.queries) == 0) return;
  choose(kForward, {problem, {}, false});
  BlockMap map = block_map_of(problem);
  if (map.count() > 0) map.data = static_cast<uint8_t*>(workspace);
  fill_block_map(problem, map, stream);
  visit_head_dim<kBuiltHeadDims>(problem, [&](auto width) { forward_sm80<width()>(problem, map, stream); });
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
  const Wanted wanted{problem, gradients, deterministic};
  return choose(kBackward, wanted).workspace(wanted);
}

void attention_backward(const AttentionProblem& problem, const AttentionGradients& gradients, bool deterministic,
                        void* workspace, CUstream_st* stream) {
  if (problem.batch == 0 && !problem.query_starts) return;
  const Wanted wanted{problem, gradients, deterministic};
  choose(kBackward, wanted).run(wanted, workspace, stream);
}

void attention_dropout_mask(const DropoutProblem& problem, CUstream_st* stream) {
  constexpr int kThreads = 256;
  const int64_t count = problem.batch * problem.heads * problem.queries * ((problem.keys + 3) / 4);
  if (count > 0) launch<dropout_mask>(problem, grid_for((count + kThreads - 1) / kThreads, 8), kThreads, 0, stream);
}

}  // namespace flash_online::cuda
