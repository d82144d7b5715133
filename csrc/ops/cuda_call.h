// What of torch a launch on CUDA needs. The stream's getter is looked up at run time: one library serves CUDA and
// CPU-only builds of torch, so it must not depend on libtorch_cuda.so.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <memory>
#include <stdexcept>

#include "tensor.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace flash_online::ops {

// True in a build with CUDA kernels. Code that names one is in a branch of `if constexpr (kBuiltWithCuda)`, so that a build
// without CUDA compiles it but does not link it.
#ifdef FLASH_ONLINE_CUDA
inline constexpr bool kBuiltWithCuda = true;
#else
inline constexpr bool kBuiltWithCuda = false;
#endif

inline CUstream_st* current_cuda_stream(int32_t device) {
  using Getter = int32_t (*)(int32_t device, void** stream);
  static const Getter get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library == nullptr ? nullptr : reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  if (get == nullptr)
    throw std::runtime_error("CUDA: expected a CUDA build of torch, got no libtorch_cuda.so, or one without a stream getter");
  void* stream = nullptr;
  if (get(device, &stream) != 0) throw std::runtime_error("CUDA: expected torch's current stream for this device, got none");
  return static_cast<CUstream_st*>(stream);
}

// Makes a tensor's device current for the lifetime of this object, and gives launches a stream and memory.
class CudaCall {
 public:
  explicit CudaCall(const Tensor& like) : CudaCall(like, like.get_device_index()) {}
  CUstream_st* stream() const { return stream_; }
  // Memory that replaces the workspace of the call before; null for no bytes. torch's allocator aligns it to more than 16
  // bytes.
  void* workspace(int64_t bytes) {
    workspace_.reset();
    if (bytes <= 0) return nullptr;
    workspace_ = std::make_unique<Tensor>(empty({bytes}, ScalarType::Byte, like_));
    return workspace_->data_ptr();
  }

 private:
  CudaCall(const Tensor& like, int32_t device) : like_(like), guard_(device), stream_(current_cuda_stream(device)) {}

  const Tensor& like_;
  torch::stable::accelerator::DeviceGuard guard_;
  CUstream_st* stream_;
  std::unique_ptr<Tensor> workspace_;  // an optional one is 'maybe uninitialized' to GCC 12
};

}  // namespace flash_online::ops
