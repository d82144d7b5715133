// The rows of a sequence, dense or packed, and the padding rows. The kernel itself reads the starts of packed sequences. They
// may hold any value; the rows returned lie inside the tensors nonetheless.
#pragma once

#include <cstdint>
#include <type_traits>

#include "config.h"
#include "problem.h"

namespace flash_online {

// Rows [begin, begin + count).
struct Rows {
  int64_t begin, count;
};

// `Int` is the type of the computation; kernels choose int if their numbers fit.
template <class Int = int64_t>
FLASH_ONLINE_HD Int clamp(std::type_identity_t<Int> x, std::type_identity_t<Int> low, std::type_identity_t<Int> high) {
  return x < low ? low : x > high ? high : x;
}

// The rows of packed sequence n, at most `longest`, in a tensor of `total` rows.
template <class Int = int64_t>
FLASH_ONLINE_HD Rows packed_rows(const int32_t* starts, int64_t n, int64_t longest, int64_t total) {
  const Int rows = static_cast<Int>(total), begin = clamp<Int>(starts[n], 0, rows),
            end = clamp<Int>(starts[n + 1], begin, rows);
  return {begin, clamp<Int>(end - begin, 0, static_cast<Int>(longest))};
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
