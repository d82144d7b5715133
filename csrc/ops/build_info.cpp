// The facts of the build, which CMakeLists.txt passes as definitions, and the rest of the table that _introspect reads.
#include <algorithm>
#include <string>

#include "../core/cache.h"
#include "../cpu/kernels.h"
#include "../cuda/attention/attention.h"
#include "../introspect/api.h"
#include "cuda_call.h"

namespace flash_online::ops {

// A quoted JSON string. CMake passes neither quotes nor backslashes.
static std::string quoted(const std::string& text) { return '"' + text + '"'; }

// A JSON array of the words of `text`.
static std::string words(const std::string& text, bool quote) {
  std::string array = "[";
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    array += (array.size() > 1 ? ", " : "") + (quote ? quoted(word) : word);
    begin = end + 1;
  }
  return array + ']';
}

static const char* build_info() {
  static const std::string json = "{\"version\": " + quoted(FLASH_ONLINE_VERSION) +                     //
                                  ", \"torch_target\": " + quoted(FLASH_ONLINE_TORCH_TARGET) +         //
                                  ", \"compiler\": " + quoted(FLASH_ONLINE_COMPILER) +                 //
                                  ", \"cuda_compiler\": " + quoted(FLASH_ONLINE_CUDA_COMPILER) +       //
                                  ", \"architectures\": " + words(FLASH_ONLINE_ARCHITECTURES, true) +  //
                                  ", \"head_dims\": " + words(FLASH_ONLINE_HEAD_DIMS, false) +         //
                                  ", \"instruction_sets\": " + words(FLASH_ONLINE_INSTRUCTION_SETS, true) +
                                  ", \"cpu\": " + quoted(cpu::kernels().name) + "}";
  return json.c_str();
}

static int64_t attention_memory(const AttentionProblem& problem, int64_t workers) {
  const cpu::AttentionKernels& kernels = cpu::kernels().attention;
  const int64_t kv_splits = kernels.few_rows_kv_splits(problem);
  const cpu::Memory memory =
      kv_splits > 0 ? kernels.cached_memory(as_cached(problem, kv_splits)) : kernels.forward_memory(problem);
  return workers * memory.scratch + memory.shared;
}

static int64_t row_scratch(bool float64, int64_t k) {
  RowProblem problem;
  problem.dtype = float64 ? DType::kFloat64 : DType::kFloat32;
  problem.k = k;
  return cpu::kernels().rows.scratch(problem);
}

static const char* lines_of(const cuda::Candidates& candidates) {
  thread_local std::string lines;
  lines.clear();
  for (const auto& [name, reason] : candidates) lines += name + ' ' + reason + '\n';
  return lines.c_str();
}

static const char* attention_candidates(const AttentionProblem& problem, const AttentionGradients* gradients,
                                        bool deterministic, int major, int minor, int shared_bytes) {
  if constexpr (kBuiltWithCuda) {
    const cuda::Gpu gpu{major, minor, shared_bytes};
    return lines_of(gradients ? cuda::backward_candidates({problem, *gradients, deterministic}, gpu)
                              : cuda::forward_candidates(problem, gpu));
  }
  return lines_of({});
}

static const char* float8_candidates(const Float8Problem& problem, int major, int minor, int shared_bytes) {
  if constexpr (kBuiltWithCuda) return lines_of(cuda::float8_candidates(problem, {major, minor, shared_bytes}));
  return lines_of({});
}

static int64_t attention_plans() {
  if constexpr (kBuiltWithCuda) return cuda::plans_made();
  return 0;
}

}  // namespace flash_online::ops

extern "C" __attribute__((visibility("default"))) const flash_online::Api flash_online_api = {
    .build_info = flash_online::ops::build_info,
    .attention_memory = flash_online::ops::attention_memory,
    .row_scratch = flash_online::ops::row_scratch,
    .attention_candidates = flash_online::ops::attention_candidates,
    .float8_candidates = flash_online::ops::float8_candidates,
    .attention_plans = flash_online::ops::attention_plans,
};
