// The operands of e4m3 attention: what the kernel of sm90/float8 reads, made of a call's tensors.
#pragma once

#include "../attention.h"

namespace flash_online::cuda {

// e4m3, [batch, heads, rows, columns], as TMA reads them: never without rows or columns.
struct Float8Rows {
  ConstView4 view;
  int64_t rows = 0, columns = 0;
};

struct Float8Operands {
  Float8Rows query, key;  // of a row per query and key; columns past the head dim are 0
  Float8Rows value;  // of a row per column of the values: keys in the order of float8_position(), and 0 after the last one
  // [batch, key heads], what the tensors are multiplied by; null: 1
  const float *query_scale = nullptr, *key_scale = nullptr, *value_scale = nullptr;
  int64_t query_scale_stride[2] = {}, key_scale_stride[2] = {}, value_scale_stride[2] = {};
  const float* row_terms = nullptr;  // [batch, heads, queries], contiguous: what is added to the scores of a row; null: 0
};

// The workspace that the operands of a problem need, in bytes.
int64_t float8_operand_bytes(const Float8Problem& problem);
// Queues the kernels that make them. The next kernel may be a dependent launch (pdl.cuh).
Float8Operands make_float8_operands(const Float8Problem& problem, void* workspace, CUstream_st* stream);

}  // namespace flash_online::cuda
