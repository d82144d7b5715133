// A tile of rows in shared memory, as ldmatrix reads it.
#pragma once

#include "../hw/shared_memory.cuh"
#include "split_float.cuh"

namespace flash_online::cuda {

// Rows of kWidth elements. A row holds all first pieces, then all second ones and so on; each run of pieces is 16 bytes longer
// than its data, so that the 16 bytes that eight rows have at one column lie in different banks.
template <class Element, int kWidth>
struct SharedTile {
  using Piece = typename Split<Element>::Piece;
  static constexpr int kPieces = Split<Element>::kPieces;
  static constexpr int kPiecePitch = kWidth + 8, kPitch = kPieces * kPiecePitch;  // in elements of Piece
  static constexpr int bytes(int rows) { return rows * kPitch * static_cast<int>(sizeof(Piece)); }
  static_assert(sizeof(Piece) == 2 && kWidth % 16 == 0);

  Piece* data;

  __device__ __forceinline__ Piece* row(int r, int piece = 0) const { return data + r * kPitch + piece * kPiecePitch; }
  __device__ __forceinline__ unsigned address(int row, int column, int piece = 0) const {
    return shared_address(data) + static_cast<unsigned>((row * kPitch + piece * kPiecePitch + column) * sizeof(Piece));
  }
  // The part of the tile that begins at a row and a column.
  __device__ __forceinline__ SharedTile from(int row, int column) const { return {data + row * kPitch + column}; }
  // A row's memory for whole elements.
  __device__ __forceinline__ Element* elements(int r) const { return reinterpret_cast<Element*>(row(r)); }
};

}  // namespace flash_online::cuda
