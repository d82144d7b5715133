// benchmarks/family/kernels.cu on the host, for ctypes. test_family_kernels.py compiles it with a copy of csrc in which hw/ has
// the headers of device_on_host/hw.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "warp.h"

// Further CUDA functions that the kernels' headers use, most of them in functions that these kernels do not call.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline unsigned __funnelshift_r(unsigned, unsigned, unsigned) { throw std::logic_error("__funnelshift_r"); }
inline unsigned __byte_perm(unsigned, unsigned, unsigned) { throw std::logic_error("__byte_perm"); }
inline uint4 __ldcs(const uint4* at) { return *at; }
inline void __stcs(uint4* at, const uint4& v) { *at = v; }
template <class T>
T __ldg(const T* at) {
  return *at;
}

namespace {
// The memory of the kernels' `extern __shared__`.
alignas(128) char memory[device_on_host::kSharedBytes];
[[maybe_unused]] const bool kIsSet = (device_on_host::shared_memory = memory, true);
}  // namespace

#include "kernels.cu"
