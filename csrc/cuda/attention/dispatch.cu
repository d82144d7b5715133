// Which kernel runs: candidates in order, each with its reasons to refuse. The one place that knows families and head dims.
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "../../core/philox.h"
#include "../hw/launch.h"
#include "attention.h"
#include "block_map.cuh"
#include "families.h"

namespace flash_online::cuda {

namespace {

constexpr int kBuilt[] = {FLASH_ONLINE_HEAD_DIMS};  // ascending

// Calls f(std::integral_constant) with the smallest head dim of this build that holds the problem's. False if there is none.
template <class F, size_t kIndex = 0>
bool visit_head_dim(const AttentionProblem& problem, F&& f) {
  if constexpr (kIndex < std::size(kBuilt)) {
    if (std::max(problem.width, problem.value_width) > kBuilt[kIndex]) return visit_head_dim<F, kIndex + 1>(problem, f);
    f(std::integral_constant<int, kBuilt[kIndex]>{});
    return true;
  }
  return false;
}

Gpu current_gpu() {
  return {device_attribute<cudaDevAttrComputeCapabilityMajor>(), device_attribute<cudaDevAttrComputeCapabilityMinor>(),
          device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>()};
}

const char* forward_sm80_refusal(const AttentionProblem& problem, const Gpu& gpu) {
  const char* reason = nullptr;
  if (!visit_head_dim(problem, [&]<int kWidth>(std::integral_constant<int, kWidth>) {
        reason = cuda::forward_sm80_refusal<kWidth>(problem, gpu);
      }))
    reason = "the head dim is larger than those of this build";
  return reason;
}

struct Candidate {
  const char* name;
  const char* (*refusal)(const AttentionProblem& problem, const Gpu& gpu);
};

constexpr Candidate kForward[] = {{"sm80", forward_sm80_refusal}};

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

Candidates attention_candidates(const AttentionProblem& problem, const Gpu& gpu, bool) {
  Candidates list;
  for (const Candidate& candidate : kForward) {
    const char* const reason = refusal(candidate, problem, gpu);
    list.emplace_back(candidate.name, reason ? reason : "");
  }
  return list;
}

int64_t attention_forward_workspace(const AttentionProblem& problem) { return block_map_of(problem).count(); }

void attention_forward(const AttentionProblem& problem, void* workspace, CUstream_st* stream) {
  if (problem.batch == 0 || problem.heads == 0 || (problem.query_starts ? problem.total_queries : problem.queries) == 0) return;
  choose(kForward, problem);
  BlockMap map = block_map_of(problem);
  if (map.count() > 0) map.data = static_cast<uint8_t*>(workspace);
  fill_block_map(problem, map, stream);
  visit_head_dim(problem, [&]<int kWidth>(std::integral_constant<int, kWidth>) { forward_sm80<kWidth>(problem, map, stream); });
}

void attention_dropout_mask(const DropoutProblem& problem, CUstream_st* stream) {
  constexpr int kThreads = 256;
  const int64_t count = problem.batch * problem.heads * problem.queries * ((problem.keys + 3) / 4);
  if (count > 0) launch<dropout_mask>(problem, grid_for((count + kThreads - 1) / kThreads, 8), kThreads, 0, stream);
}

}  // namespace flash_online::cuda
