// What a launch on CUDA needs of torch. The stream comes by a lookup at run time: one library serves CUDA and CPU-only builds
// of torch, so it may not depend on libtorch_cuda.so.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <memory>
#include <stdexcept>

#include "tensor.h"

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

// What launches need of torch, for as long as this lives: a tensor's device as the current one, its stream, and memory.
class CudaCall {
 public:
  explicit CudaCall(const Tensor& like) : like_(like), guard_(like.get_device_index()) {}
  CUstream_st* stream() const { return current_cuda_stream(like_.get_device_index()); }
  // Aligned to more than 16 bytes as all of torch's is; null for no bytes. In the place of what was there before.
  void* workspace(int64_t bytes) {
    workspace_.reset();
    if (bytes <= 0) return nullptr;
    workspace_ = std::make_unique<Tensor>(empty({bytes}, ScalarType::Byte, like_));
    return workspace_->data_ptr();
  }

 private:
  const Tensor& like_;
  torch::stable::accelerator::DeviceGuard guard_;
  std::unique_ptr<Tensor> workspace_;  // an optional one is 'maybe uninitialized' to GCC 12
};

}  // namespace flash_online::ops
