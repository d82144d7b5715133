// A mask's values for a block of scores, in shared memory: rows of any alignment are copied 16 bytes at a time from the
// multiple of 16 before their first value, and read from where that value then lies.
#pragma once

#include "../../../core/config.h"
#include "../../../core/problem.h"
#include "../../hw/cp_async.cuh"
#include "../../hw/mma.cuh"
#include "../../hw/vector.cuh"

namespace flash_online::cuda {

// Calls f with a value of the type that a mask's dtype stands for.
template <class F>
__device__ __forceinline__ void visit_mask(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBool: return f(bool{});
    case DType::kFloat16: return f(__half{});
    case DType::kBFloat16: return f(__nv_bfloat16{});
    default: return f(float{});
  }
}

// A head's mask, [queries, keys] of any strides, here in bytes.
struct HeadMask {
  const char* data = nullptr;  // null: there is none
  int64_t row_stride = 0, column_stride = 0;
  DType dtype = DType::kBool;
  int bytes = 1;               // of a value

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

// The bytes that a block takes in shared memory.
FLASH_ONLINE_HD constexpr int mask_pitch(int keys, int bytes) { return keys * bytes + kVectorBytes; }

template <int kQueries, int kKeys, int kThreads>
class MaskTile {
 public:
  __device__ explicit MaskTile(char* shared, int thread = static_cast<int>(threadIdx.x)) : shared_(shared), thread_(thread) {}

  // The same block elsewhere in shared memory.
  __device__ __forceinline__ MaskTile moved_to(char* shared) const {
    MaskTile moved = *this;
    moved.shared_ = shared;
    return moved;
  }

  // Starts copying the values of queries [query, queries) and keys [key, keys), as many as the block has. They are seen after
  // cp_async_commit, cp_async_wait and a barrier; what is past either end is unknown.
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
          const int before = static_cast<int>(misalignment(row));
          if (c < before + columns * static_cast<int>(sizeof(T)))
            cp_async(reinterpret_cast<uint4*>(shared_ + r * pitch + c), row - before + c);
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

  // The value of the block's query and key.
  template <class T>
  __device__ __forceinline__ T at(int query, int key) const {
    return *static_cast<const T*>(address<T>(query, key));
  }
  // That, and the next key's: of an even key, where two values are one word.
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
  // Whether every row begins at a multiple of 16 bytes.
  __device__ __forceinline__ bool has_vectors() const { return (first_ | step_) == 0; }
  // Then, of 16-bit values, sixteen queries by sixteen keys, transposed. Of the lane's words the first two are of the key
  // `group` and the queries 2 place, 2 place + 1 out of the first and the last eight, the others of the key `group` + 8.
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
  int thread_;  // of kThreads
  int pitch_ = 0;
  unsigned first_ = 0, step_ = 0;  // where the first row's first value lies; how much further the next row's
};

}  // namespace flash_online::cuda
