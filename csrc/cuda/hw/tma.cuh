// The copy engine for boxes of tensors (TMA): a tensor's description is encoded on the host and passed to the kernel as a
// __grid_constant__; one thread starts a copy. What lies outside the tensor is read as 0 and not written.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "bulk_copy.cuh"
#include "launch.h"

namespace flash_online::cuda {

// Boxes of kBoxColumns 16-bit elements: 128 bytes a row, in shared memory with the 16-byte chunk c of row r at c ^ (r % 8). A
// box's place there is aligned to kBoxAlignment.
constexpr int kBoxColumns = 64, kBoxAlignment = 1024;

enum class TmaElement { kHalf, kBFloat16 };

// A tensor [size[3]][size[2]][size[1]][size[0]] of 16-bit elements, stride[i] bytes from one index of dimension i + 1 to the
// next, a multiple of 16 as `data` is, in boxes of [box_rows][kBoxColumns]. The function comes from the driver, so that the
// library does not link to it and loads where there is none.
inline CUtensorMap make_tensor_map(const void* data, TmaElement element, const uint64_t (&size)[4], const uint64_t (&stride)[3],
                                   uint32_t box_rows) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
          "cudaGetDriverEntryPointByVersion");
    if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("CUDA: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  CUtensorMap map;
  const cuuint64_t sizes[4] = {size[0], size[1], size[2], size[3]}, strides[3] = {stride[0], stride[1], stride[2]};
  const cuuint32_t box[4] = {kBoxColumns, box_rows, 1, 1}, step[4] = {1, 1, 1, 1};
  const auto type = element == TmaElement::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto make = [&] {
    return encode(&map, type, 4, const_cast<void*>(data), sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = make();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {  // the driver has none for a thread that has not called the runtime yet
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
    status = make();
  }
  if (status != CUDA_SUCCESS)
    throw std::runtime_error("CUDA: cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(status)));
  return map;
}

struct TmaCoord {
  int column, row, head, batch;
};

// The box from `at` on, into shared memory; its bytes, those outside the tensor too, count on the barrier.
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap& map, TmaCoord at, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
      : "memory");
}

// Shared memory that the thread's ordinary stores wrote becomes readable for the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void tma_store(const CUtensorMap& map, TmaCoord at, const void* shared) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared_address(shared)), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
               : "memory");
}
// Adds `bytes` of floats in a row, a multiple of 16 as both ends are, to those in global memory, likewise.
__device__ __forceinline__ void bulk_reduce_add(float* global, const void* shared, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}
// The thread's stores so far become a group.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// The thread's groups have read their shared memory, which may be written again.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// They are done.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace flash_online::cuda
