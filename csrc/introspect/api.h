// The one symbol that libflash_online.so exports: what it can tell of itself without torch or Python. _introspect looks it up
// by name, so the table only ever grows at its end.
#pragma once

#include <cstdint>

#include "../core/problem.h"

namespace flash_online {

struct Api {
  const char* (*build_info)();  // JSON: what was built, by what, for what
  // Bytes that a CPU kernel's forward pass takes beside its results: attention's in all, with `workers` of them, one a thread
  // at most; a row function's for a worker. Of the problem, sizes, strides and what is not null count.
  int64_t (*attention_memory)(const AttentionProblem& problem, int64_t workers);
  int64_t (*row_scratch)(bool float64, int64_t k);  // k: of the top k, else 0
  // The CUDA kernels that attention may run on, the best first, a line each: its name, and after a space why it does not take the
  // problem (nothing: it does). The result lives until the thread's next call. Null in a build without CUDA.
  const char* (*attention_candidates)(const AttentionProblem& problem, int major, int minor, int shared_bytes, bool backward);
};

}  // namespace flash_online

extern "C" const flash_online::Api flash_online_api;
