// The only symbol that libflash_online.so exports: a table of facts about the library, without torch or Python. _introspect
// looks it up by name; both files come from one build.
#pragma once

#include <cstdint>

#include "../core/problem.h"

namespace flash_online {

struct Api {
  const char* (*build_info)();  // JSON: version, compilers and targets of the build
  // Bytes that a CPU forward pass needs beyond its results: for attention in all, with this many workers (at most one per
  // thread); per worker for a row operator. They depend on the problem's sizes and strides and on which pointers are null.
  int64_t (*attention_memory)(const AttentionProblem& problem, int64_t workers);
  int64_t (*row_scratch)(bool float64, int64_t k);  // k: topk_softmax's, else 0
  // The CUDA kernels that attention may run on, the best first, one per line: its name, a space, and the reason why it does not
  // take the pass, or nothing if it does. Without gradients the pass is a forward pass, which ignores `deterministic`. The
  // result is valid until the thread's next call. Empty in a build without CUDA.
  const char* (*attention_candidates)(const AttentionProblem& problem, const AttentionGradients* gradients, bool deterministic,
                                      int major, int minor, int shared_bytes);
  // The same for float8_attention.
  const char* (*float8_candidates)(const Float8Problem& problem, int major, int minor, int shared_bytes);
  // The number of attention passes that this process has planned on CUDA.
  int64_t (*attention_plans)();
};

}  // namespace flash_online

extern "C" const flash_online::Api flash_online_api;
