// Contiguous rows as vectors of 16 bytes, wherever a row starts. Which thread has which class depends on the row's length
// alone, not on its address: a row that does not start at a multiple of 16 bytes is read as aligned vectors, which are then
// shifted.
#pragma once

#include "row_reduce.cuh"

namespace flash_online::cuda {

// The vector of the lane kDistance after this one, or before it if kDistance is negative.
template <int kDistance>
__device__ __forceinline__ uint4 neighbor(const uint4& v) {
  const auto of = [](unsigned word) {
    return kDistance < 0 ? __shfl_up_sync(~0u, word, -kDistance) : __shfl_down_sync(~0u, word, kDistance);
  };
  return {of(v.x), of(v.y), of(v.z), of(v.w)};
}

// Reads a row's vectors first, first + step, ...; beyond the row's `classes` elements they are filled from `filler`. Only
// aligned vectors that hold at least one element of the row are read, so that no read leaves the allocation.
// kWholeWarp: all lanes of the warp call this, with neighbouring vectors of one row. A lane then gets the second half of a
// shifted vector from the next lane.
template <class T, bool kWholeWarp = false, int kVectors>
__device__ __forceinline__ void load_row(uint4 (&v)[kVectors], const T* row, int first, int step, int classes, uint4 filler) {
  constexpr int kElements = kPerVector<T>;
  const unsigned skip = misalignment(row);
  const char* aligned = reinterpret_cast<const char*>(row) - skip;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int c = (first + i * step) * kElements;
    v[i] = c < classes ? load_streaming(aligned + int64_t{c} * sizeof(T)) : filler;
  }
  if (skip != 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int c = (first + i * step) * kElements;
      uint4 next = filler;
      bool has_next = false;
      if constexpr (kWholeWarp) {
        next = neighbor<1>(v[i]);
        has_next = threadIdx.x % kWarpSize != kWarpSize - 1 && c + kElements < classes;
      }
      if (c < classes) {
        const bool more = (classes - c) * static_cast<int>(sizeof(T)) > kVectorBytes - static_cast<int>(skip);
        if (!has_next) next = more ? load_streaming(aligned + int64_t{c} * sizeof(T) + kVectorBytes) : filler;
        v[i] = bytes_from(v[i], next, skip);
      }
    }
  }
  if (classes % kElements != 0) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int c = (first + i * step) * kElements;
      if (c < classes && c + kElements > classes) v[i] = first_elements<T>(v[i], classes - c, filler);
    }
  }
}

// Writes a vector's elements as classes c, c + 1, ... of a row, up to its last class. kWholeWarp is as for load_row: a row that
// does not start at a multiple of 16 bytes is then written in aligned vectors as well, each joined from the end of the previous
// lane's elements and the beginning of this lane's.
template <bool kWholeWarp = false, class Result, int kElements>
__device__ __forceinline__ void store_vector(Result* row, int c, int classes, const float (&y)[kElements]) {
  constexpr int kBytes = kElements * static_cast<int>(sizeof(Result));
  Result* at = row + c;
  if constexpr (kWholeWarp && kBytes == kVectorBytes) {
    const unsigned skip = misalignment(row);
    if (skip != 0) {
      const uint4 own = pack<Result>(y), before = neighbor<-1>(own);
      const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
                boundary = kElements - static_cast<int>(skip / sizeof(Result));
      const bool joined = lane != 0 && c + kElements <= classes;
      const bool next_joins = lane != kWarpSize - 1 && c + 2 * kElements <= classes;
      if (joined) store_streaming(reinterpret_cast<char*>(at) - skip, bytes_from(before, own, kVectorBytes - skip));
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        if (c + e < classes && !(e < boundary ? joined : next_joins)) at[e] = narrow<Result>(y[e]);
      return;
    }
  }
  if (c + kElements <= classes && misalignment(at) % (kBytes < kVectorBytes ? kBytes : kVectorBytes) == 0) {
    if constexpr (kBytes < kVectorBytes) {
      float padded[2 * kElements] = {};
#pragma unroll
      for (int e = 0; e < kElements; ++e) padded[e] = y[e];
      const uint4 low = pack<Result>(padded);
      __stcs(reinterpret_cast<uint2*>(at), make_uint2(low.x, low.y));
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / kVectorBytes; ++i)
        store_streaming(at + i * kPerVector<Result>, pack<Result>(y + i * kPerVector<Result>));
    }
  } else {
#pragma unroll
    for (int e = 0; e < kElements; ++e)
      if (c + e < classes) at[e] = narrow<Result>(y[e]);
  }
}

// Returns v through an operation that is opaque to the compiler. The compiler then unpacks the vector a second time instead of
// keeping the unpacked elements in registers: unpacked 16-bit elements need twice as many. `sum` must be a sum of exponentials,
// so that its sign bit is 0. (A NaN may have its sign bit set, but then the row's results are NaN anyway.)
template <class T>
__device__ __forceinline__ uint4 make_opaque(const uint4& v, float sum) {
  if constexpr (sizeof(T) == sizeof(float)) return v;
  const unsigned zero = __float_as_uint(sum) >> 31;
  return {v.x ^ zero, v.y ^ zero, v.z ^ zero, v.w ^ zero};
}

// v[i] for an i that is not a compile-time constant, without moving the array from registers to local memory.
template <int kVectors>
__device__ __forceinline__ uint4 select_vector(const uint4 (&v)[kVectors], int i) {
  uint4 one = v[0];
#pragma unroll
  for (int j = 1; j < kVectors; ++j) one = i == j ? v[j] : one;
  return one;
}

}  // namespace flash_online::cuda
