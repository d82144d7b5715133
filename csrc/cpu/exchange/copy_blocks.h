// Copies of blocks on the CPU. They compute nothing, so that one build serves all instruction sets.
#pragma once

#include <cstring>

#include "../../core/problem.h"
#include "../executor.h"

namespace flash_online::cpu {

// The rows of a block: all of its dimensions but the last.
constexpr int64_t rows_of(const BlockCopy& block) { return block.units() / block.size[BlockCopy::kDims - 1]; }

inline void copy_row(const BlockCopy& block, int64_t row) {
  constexpr int kLast = BlockCopy::kDims - 1;
  int64_t from_units = 0, to_units = 0;
  for (int dim = kLast - 1; dim >= 0; --dim) {
    const int64_t index = row % block.size[dim];
    row /= block.size[dim];
    from_units += index * block.from_stride[dim];
    to_units += index * block.to_stride[dim];
  }
  const char* from = block.from + from_units * block.unit;
  char* to = block.to + to_units * block.unit;
  if (block.from_stride[kLast] == 1 && block.to_stride[kLast] == 1) {
    std::memcpy(to, from, static_cast<size_t>(block.size[kLast] * block.unit));
    return;
  }
  for (int64_t n = 0; n < block.size[kLast]; ++n)
    std::memcpy(to + n * block.to_stride[kLast] * block.unit, from + n * block.from_stride[kLast] * block.unit,
                static_cast<size_t>(block.unit));
}

inline void copy_blocks(const BlockCopy* blocks, int64_t count, const Executor& executor) {
  for (int64_t n = 0; n < count; ++n)
    for_each_item(executor, rows_of(blocks[n]), [&](int64_t row, std::byte*) { copy_row(blocks[n], row); });
}

}  // namespace flash_online::cpu
