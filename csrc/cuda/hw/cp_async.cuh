// Asynchronous copies from global to shared memory that do not go through registers (cp.async).
#pragma once

#include <cstdint>

#include "shared_memory.cuh"

namespace flash_online::cuda {

// Copies 16 bytes; both addresses are multiples of 16.
__device__ __forceinline__ void cp_async(uint4* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
// Copies the first `bytes` of 16 and fills the others with zeros; only what is copied is read. (The intrinsic of
// cuda_pipeline.h becomes a tree of branches if `bytes` is not a constant.)
__device__ __forceinline__ void cp_async(uint4* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}
// Copies 8 bytes, or fills them with zeros and reads nothing if not `wanted`; both addresses are multiples of 8.
__device__ __forceinline__ void cp_async_8(double* shared, const double* global, bool wanted) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(wanted ? 8 : 0)
               : "memory");
}
// Copies 16 bytes, or fills them with zeros and reads nothing if `wanted` is 0. As a number of bytes it would be shifted first.
__device__ __forceinline__ void cp_async_if(unsigned wanted, unsigned shared, const void* global) {
  asm volatile(
      "{.reg .pred ignored; setp.eq.u32 ignored, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, ignored;}" ::"r"(shared),
      "l"(global), "r"(wanted)
      : "memory");
}
// The same where `active` is not 0; nothing otherwise. A branch around the copy would make its address conditional too.
__device__ __forceinline__ void cp_async_if(unsigned active, unsigned wanted, unsigned shared, const void* global) {
  asm volatile(
      "{.reg .pred active, ignored; setp.ne.u32 active, %3, 0; setp.eq.u32 ignored, %2, 0;\n"
      "@active cp.async.cg.shared.global [%0], [%1], 16, ignored;}" ::"r"(shared),
      "l"(global), "r"(wanted), "r"(active)
      : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Lets this thread arrive at an mbarrier, one of the arrivals that it counts, once all copies that it has started are there.
__device__ __forceinline__ void cp_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Waits until all but the last kPending groups that this thread has committed are complete.
template <int kPending = 0>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// The same if `active`, without a branch.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_if(bool active) {
  asm volatile("{.reg .pred active; setp.ne.u32 active, %0, 0; @active cp.async.wait_group %1;}" ::"r"(unsigned{active}),
               "n"(kPending)
               : "memory");
}

}  // namespace flash_online::cuda
