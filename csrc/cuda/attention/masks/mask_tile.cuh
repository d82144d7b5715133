// A mask's values for a block of scores, in shared memory. Rows of any alignment are copied 16 bytes at a time, from the
// multiple of 16 at or before their first value, so that the values of different rows start at different offsets in shared
// memory.
#pragma once

#include "../../../core/config.h"
#include "../../../core/problem.h"
#include "../../hw/cp_async.cuh"
#include "../../hw/matrix_copy.cuh"
#include "../../hw/shared_memory.cuh"
#include "../../hw/vector.cuh"

namespace flash_online::cuda {

// Calls f with a value of the C++ type of a mask's dtype.
template <class F>
__device__ __forceinline__ void visit_mask(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBool: return f(bool{});
    case DType::kFloat16: return f(__half{});
    case DType::kBFloat16: return f(__nv_bfloat16{});
    default: return f(float{});
  }
}

// Calls f with a value of the C++ type of a mask's dtype; in float64 problems it may also be float64.
template <class F>
__device__ __forceinline__ void visit_any_mask(DType dtype, F&& f) {
  if (dtype == DType::kFloat64) return f(double{});
  visit_mask(dtype, f);
}

// The mask of one head, [queries, keys] of any strides. Strides are in bytes.
struct HeadMask {
  const char* data = nullptr;  // null: there is no mask
  int64_t row_stride = 0, column_stride = 0;
  DType dtype = DType::kBool;
  int bytes = 1;               // per value

  __device__ HeadMask(const AttentionProblem& problem, int64_t batch, int64_t head) {
    const View4<const void*>& mask = problem.mask;
    if (!mask.data) return;
    dtype = problem.mask_dtype;
    bytes = static_cast<int>(size_of(dtype));
    row_stride = mask.stride[2] * bytes;
    column_stride = mask.stride[3] * bytes;
    data = static_cast<const char*>(mask.data) + (batch * mask.stride[0] + head * mask.stride[1]) * bytes;
  }
};

// The bytes of shared memory per row of a block.
FLASH_ONLINE_HD constexpr int mask_pitch(int keys, int bytes) { return keys * bytes + kVectorBytes; }

// A block of kQueries x kKeys values, copied by kThreads threads.
template <int kQueries, int kKeys, int kThreads>
class MaskTile {
 public:
  __device__ explicit MaskTile(char* shared, int thread = static_cast<int>(threadIdx.x)) : shared_(shared), thread_(thread) {}

  // This tile, but with its values at another address in shared memory.
  __device__ __forceinline__ MaskTile moved_to(char* shared) const {
    MaskTile moved = *this;
    moved.shared_ = shared;
    return moved;
  }

  // Starts copying the values of the block from `query` and `key` on. They may be read after cp_async_commit, cp_async_wait and
  // a barrier. Values past `queries` or `keys` are undefined. Only aligned vectors that hold a value of the block are read.
  __device__ __forceinline__ void load(const HeadMask& mask, int query, int queries, int key, int keys) {
    const int rows = mask.row_stride == 0 ? 1 : min(queries - query, kQueries);
    const int columns = min(keys - key, kKeys);
    const char* const data = mask.data + query * mask.row_stride + key * mask.column_stride;
    const int pitch = mask_pitch(kKeys, mask.bytes);
    pitch_ = mask.row_stride == 0 ? 0 : pitch;
    visit_mask(mask.dtype, [&]<class T>(T) {
      if (mask.column_stride == sizeof(T)) {
        constexpr int kChunks = mask_pitch(kKeys, sizeof(T)) / kVectorBytes;
        first_ = misalignment(data);
        step_ = static_cast<unsigned>(mask.row_stride) % kVectorBytes;
        for (int index = thread_; index < rows * kChunks; index += kThreads) {
          const int r = index / kChunks, c = index % kChunks * kVectorBytes;
          const char* const row = data + r * mask.row_stride;
          const int before = static_cast<int>(misalignment(row)), bytes = before + columns * static_cast<int>(sizeof(T)) - c;
          if (bytes > 0) cp_async(reinterpret_cast<uint4*>(shared_ + r * pitch + c), row - before + c);
        }
      } else {
        first_ = step_ = 0;
        for (int index = thread_; index < rows * kKeys; index += kThreads) {
          const int r = index / kKeys, c = index % kKeys;
          if (c < columns)
            reinterpret_cast<T*>(shared_ + r * pitch)[c] =
                *reinterpret_cast<const T*>(data + r * mask.row_stride + c * mask.column_stride);
        }
      }
    });
  }

  // The value at a query and a key of the block.
  template <class T>
  __device__ __forceinline__ T at(int query, int key) const {
    return *static_cast<const T*>(address<T>(query, key));
  }
  // True if pair_at() may be called: it reads the values of an even key and the next one at once.
  template <class T>
  __device__ __forceinline__ bool has_pairs() const {
    return (first_ | step_) % (2 * sizeof(T)) == 0;
  }
  template <class T>
  struct alignas(2 * sizeof(T)) Pair {
    T value[2];
  };
  template <class T>
  __device__ __forceinline__ Pair<T> pair_at(int query, int key) const {
    return *static_cast<const Pair<T>*>(address<T>(query, key));
  }
  // True if every row begins at a multiple of 16 bytes.
  __device__ __forceinline__ bool has_vectors() const { return (first_ | step_) == 0; }
  // Reads 16 queries by 16 keys of 16-bit values, transposed; only if has_vectors(). Lane l gets the queries 2 * (l % 4) and
  // the next, of the first eight queries and of the last eight: in words[0] and words[1] for key l / 4, in words[2] and
  // words[3] for key l / 4 + 8.
  __device__ __forceinline__ void transposed(unsigned (&words)[4], int query, int key) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    ldmatrix_x4_trans(words, shared_address(shared_ + (query + lane % 16) * pitch_ + (key + lane / 16 * 8) * 2));
  }

 private:
  template <class T>
  __device__ __forceinline__ const void* address(int query, int key) const {
    const unsigned skip = (first_ + static_cast<unsigned>(query) * step_) % kVectorBytes;
    return shared_ + query * pitch_ + skip + key * static_cast<int>(sizeof(T));
  }

  char* shared_;
  int thread_;  // 0 to kThreads - 1
  int pitch_ = 0;
  unsigned first_ = 0, step_ = 0;  // bytes by which the first row is shifted; by which each row is shifted further, modulo 16
};

}  // namespace flash_online::cuda
