// Rows of a backward pass with a large lse (kLargeLse): a separate pass computes their gradients in double.
// docs/design/large_scores.md says why.
#pragma once

#include <cstdint>

#include "../../../core/problem.h"
#include "../../../core/scratch.h"

namespace flash_online::cuda {

struct BackwardWorkspace;

// Their memory of the workspace. The pre-pass marks them, and gives them the statistics of rows that see no key, so that the
// kernels of all families leave them out. add_large_rows() takes the marks of rows without a gradient away.
struct LargeRows {
  static constexpr int kWords = 2;  // per tile of kStatsRows queries

  // State that the CTAs of add_large_rows() share. `token` is the call's if a row is marked, and otherwise arbitrary: of an
  // earlier call, or any old data of the memory.
  struct Progress {
    uint64_t token;
    unsigned next, queries_done;  // the next item; how many items of queries are done
  };
  struct Stats {
    double max, log_sum, delta;  // lse is max + log_sum; a single double would lose digits
  };
  uint32_t* marks = nullptr;  // [tiles][kWords]: bit n of word w is set for query 32 * w + n
  Stats* stats = nullptr;  // [tiles][32 * kWords]; of marked rows
  Progress* progress = nullptr;
  uint64_t token = 0;

  LargeRows() = default;
  LargeRows(ScratchAllocator<>& scratch, int64_t tiles);
};

// The last launch of a backward pass: adds the contribution of the marked rows to all gradients.
void add_large_rows(const AttentionProblem& problem, const AttentionGradients& gradients, const BackwardWorkspace& space,
                    CUstream_st* stream);

}  // namespace flash_online::cuda
