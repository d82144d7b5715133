// benchmarks/family/kernels.cu on the host, for ctypes. test_family_kernels.py compiles it with a copy of csrc in which hw/ has
// the headers of device_on_host/hw.
#include "cuda_on_host.h"

namespace {
// The memory of the kernels' `extern __shared__`.
alignas(128) thread_local char memory[device_on_host::kSharedBytes];
[[maybe_unused]] const bool kIsSet = (device_on_host::shared_memory = memory, true);
}  // namespace

#include "kernels.cu"
