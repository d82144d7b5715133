// The only symbol that libflash_online.so exports: what the library can tell about itself without torch or Python. _introspect
// looks it up by name; both files are of one build.
#pragma once

#include <cstdint>

#include "../core/problem.h"

namespace flash_online {

struct Api {
  const char* (*build_info)();  // JSON: what was built, by what, for what
  // Bytes that a forward pass takes on the CPU beside its results: for attention in all, with this many workers (at most one
  // per thread); for a row operator per worker. They depend on the problem's sizes and strides and on which pointers are null.
  int64_t (*attention_memory)(const AttentionProblem& problem, int64_t workers);
  int64_t (*row_scratch)(bool float64, int64_t k);  // k: topk_softmax's, else 0
  // The CUDA kernels that attention may run on, the best first, one per line: its name, a space, and the reason why it does not
  // take the pass, or nothing if it does. Without gradients it is a forward pass, to which `deterministic` means nothing. The
  // result lives until the thread's next call. Empty in a build without CUDA.
  const char* (*attention_candidates)(const AttentionProblem& problem, const AttentionGradients* gradients, bool deterministic,
                                      int major, int minor, int shared_bytes);
  // How many passes of attention this process has planned on CUDA.
  int64_t (*attention_plans)();
};

}  // namespace flash_online

extern "C" const flash_online::Api flash_online_api;
