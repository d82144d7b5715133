// The current CUDA stream of torch, by a lookup at run time: one library serves CUDA and CPU-only builds of torch, so it may
// not depend on libtorch_cuda.so.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>

struct CUstream_st;  // what a cudaStream_t points to

namespace flash_online::ops {

inline CUstream_st* current_cuda_stream(int32_t device) {
  using Getter = int32_t (*)(int32_t device, void** stream);
  static const Getter get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library == nullptr ? nullptr : reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  if (get == nullptr)
    throw std::runtime_error("CUDA: libtorch_cuda.so is not loaded or has no stream getter; a CUDA build of torch is needed");
  void* stream = nullptr;
  if (get(device, &stream) != 0) throw std::runtime_error("CUDA: torch has no current stream for this device");
  return static_cast<CUstream_st*>(stream);
}

}  // namespace flash_online::ops
