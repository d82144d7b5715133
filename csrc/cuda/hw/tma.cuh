// TMA copies of boxes of tensors. A tensor map is encoded on the host and passed to the kernel as a __grid_constant__; one
// thread starts a copy. What lies outside the tensor is read as 0 and not written.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "bulk_copy.cuh"
#include "launch.h"
#include "shared_memory.cuh"

namespace flash_online::cuda {

// A box has rows of kBoxColumns 16-bit elements or twice as many bytes, 128 bytes. It is swizzled in shared memory: the 16-byte
// chunk c of row r lies at chunk c ^ (r % 8). A box starts at a multiple of kBoxAlignment bytes.
constexpr int kBoxColumns = 64, kBoxAlignment = 1024;

// The byte offset of 16-byte chunk `chunk` of row `row` in a swizzled box. The chunk comes by reference: by value the compiler
// orders the operands of ^ before it inlines the call, and other registers follow.
__device__ __forceinline__ unsigned swizzle128(int row, const int& chunk) { return row * 128 + (chunk ^ (row % 8)) * 16; }

enum class TmaElement { kHalf, kBFloat16, kByte };

// The map of a tensor [size[3]][size[2]][size[1]][size[0]] that is copied in boxes of [box_planes][box_rows][128 bytes].
// stride[i] is the step of dimension i + 1 in bytes; strides and `data` are multiples of 16. The encoder is looked up in the
// driver at run time, so that the library also loads where there is no driver to link to.
inline CUtensorMap make_tensor_map(const void* data, TmaElement element, const uint64_t (&size)[4], const uint64_t (&stride)[3],
                                   uint32_t box_rows, uint32_t box_planes = 1) {
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
  const cuuint32_t columns = element == TmaElement::kByte ? 2 * kBoxColumns : kBoxColumns,
                   box[4] = {columns, box_rows, box_planes, 1}, step[4] = {1, 1, 1, 1};
  const auto type = element == TmaElement::kHalf       ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                    : element == TmaElement::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                       : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto make = [&] {
    return encode(&map, type, 4, const_cast<void*>(data), sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = make();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {  // a thread that has not called the runtime yet
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

// Fetches the map itself ahead of the first copy.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box that starts at `at` into shared memory. The mbarrier counts the bytes of the whole box, also of what lies
// outside the tensor.
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap& map, TmaCoord at, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
      : "memory");
}

// tma_load() of data that is read once: the L2 cache evicts it first.
__device__ __forceinline__ void tma_load_once(void* shared, const CUtensorMap& map, TmaCoord at, uint64_t* barrier) {
  constexpr uint64_t kEvictFirst = 0x12f0000000000000;  // what createpolicy makes of evict_first and a fraction of 1
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, "
      "%6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "l"(kEvictFirst)
      : "memory");
}

// Makes this thread's ordinary stores to shared memory visible to TMA and wgmma, which read through another proxy.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies the box from shared memory to `at`.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, TmaCoord at, const void* shared) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared_address(shared)), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
               : "memory");
}
// Puts this thread's stores and reductions since the last commit into a group.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all of this thread's groups have read their shared memory, which may then be overwritten.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Waits until all of this thread's groups are complete.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace flash_online::cuda
