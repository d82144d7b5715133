// csrc/cuda/hw/matrix_copy.cuh on the host.
#pragma once

#include <cstring>

#include "shared_memory.cuh"

namespace flash_online::cuda {

// Lane l gives the address of row l % 8 of matrix l / 8, and gets two elements of each matrix: 2 * (l % 4) and the next of row
// l / 4, or, transposed, of column l / 4.
inline void load_matrices(unsigned (&words)[4], unsigned shared_address, bool transposed) {
  if (shared_address % 16 != 0) throw std::runtime_error("ldmatrix: a misaligned address");
  const uint64_t* const all = device_on_host::Cta::exchange(device_on_host::Cta::kMatrix, shared_address);
  const int lane = device_on_host::Cta::lane();
  for (int matrix = 0; matrix < 4; ++matrix) {
    words[matrix] = 0;
    for (int e = 0; e < 2; ++e) {
      const int along = 2 * (lane % 4) + e, row = transposed ? along : lane / 4, column = transposed ? lane / 4 : along;
      uint16_t element;
      std::memcpy(&element, device_on_host::shared_memory + all[8 * matrix + row] + 2 * column, sizeof element);
      words[matrix] |= static_cast<unsigned>(element) << 16 * e;
    }
  }
}
inline void ldmatrix_x4(unsigned (&words)[4], unsigned shared_address) { load_matrices(words, shared_address, false); }
inline void ldmatrix_x4_trans(unsigned (&words)[4], unsigned shared_address) { load_matrices(words, shared_address, true); }

inline unsigned movmatrix_trans(unsigned word) {
  const uint64_t* const all = device_on_host::Cta::exchange(device_on_host::Cta::kMatrix, word);
  const int lane = device_on_host::Cta::lane();
  unsigned result = 0;
  for (int e = 0; e < 2; ++e) {
    const int row = 2 * (lane % 4) + e, column = lane / 4;
    result |= static_cast<unsigned>(all[4 * row + column / 2] >> 16 * (column % 2) & 0xffff) << 16 * e;
  }
  return result;
}

}  // namespace flash_online::cuda
