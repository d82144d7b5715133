// Which rows belong to a sequence, dense or packed, and which are padding rows. The starts of packed sequences are read where
// the kernel runs and may hold any value; the rows returned lie inside the tensors nonetheless.
#pragma once

#include <cstdint>

#include "config.h"
#include "problem.h"

namespace flash_online {

// Rows [begin, begin + count).
struct Rows {
  int64_t begin, count;
};

FLASH_ONLINE_HD int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// The rows of packed sequence n, at most `longest`, in a tensor of `total` rows.
FLASH_ONLINE_HD Rows packed_rows(const int32_t* starts, int64_t n, int64_t longest, int64_t total) {
  const int64_t begin = clamp(starts[n], 0, total), end = clamp(starts[n + 1], begin, total);
  return {begin, clamp(end - begin, 0, longest)};
}

// The padding rows before packed sequence n, which belong to no sequence: those before the first sequence for n = 0, and those
// after the last for n = `sequences`. Their results are 0, and their lse is -inf.
FLASH_ONLINE_HD Rows padding_rows(const int32_t* starts, int64_t sequences, int64_t n, int64_t longest, int64_t total) {
  const Rows before = n > 0 ? packed_rows(starts, n - 1, longest, total) : Rows{0, 0};
  const int64_t begin = before.begin + before.count, end = n < sequences ? clamp(starts[n], begin, total) : total;
  return {begin, end - begin};
}

// One sequence of a problem. Its rows count from the first row of its batch index; packed sequences all have batch index 0.
// Positions, dropout's counter among them, count from the sequence's first query and key.
struct Sequence {
  Rows queries, keys;
  Visibility visible;
};

FLASH_ONLINE_HD Sequence sequence_of(const AttentionProblem& problem, int64_t batch) {
  if (!problem.query_starts) return {{0, problem.queries}, {0, problem.keys}, problem.visible};
  if (batch >= problem.batch) return {{0, 0}, {0, 0}, problem.visible};  // no sequences, only padding rows
  Sequence sequence{packed_rows(problem.query_starts, batch, problem.queries, problem.total_queries),
                    packed_rows(problem.key_starts, batch, problem.keys, problem.total_keys), problem.visible};
  if (problem.lower_right) sequence.visible.offset = sequence.keys.count - sequence.queries.count;
  return sequence;
}

}  // namespace flash_online
