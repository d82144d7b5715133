// Vectors of 16 bytes, the widest access of all supported GPUs: loads, also from unaligned addresses, and conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash_online::cuda {

constexpr int kVectorBytes = 16;
template <class T>
constexpr int kPerVector = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
__device__ __forceinline__ float widen(T x) {
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(x);
  else
    return x;
}

template <class T>
__device__ __forceinline__ T narrow(float x) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(x);
  else
    return T{x};
}

// The number of bytes that a pointer is past a multiple of 16.
__host__ __device__ __forceinline__ unsigned misalignment(const void* pointer) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(pointer)) % kVectorBytes;
}

// Accesses to memory that is read or written only once: the caches evict it first.
__device__ __forceinline__ uint4 load_streaming(const void* at) { return __ldcs(static_cast<const uint4*>(at)); }
__device__ __forceinline__ void store_streaming(void* at, const uint4& v) { __stcs(static_cast<uint4*>(at), v); }

// Bytes [skip, skip + 16) of the 32 bytes of a and b, skip < 16.
__device__ __forceinline__ uint4 bytes_from(const uint4& a, const uint4& b, unsigned skip) {
  unsigned w[7] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z};
  const bool two = skip & 8, one = skip & 4;
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = two ? w[i + 2] : w[i];
  // The eighth word, b.w, is needed only if skip > 12.
  w[5] = two ? b.w : w[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = one ? w[i + 1] : w[i];
  const unsigned bits = skip % 4 * 8;
  return {__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits), __funnelshift_r(w[2], w[3], bits),
          __funnelshift_r(w[3], w[4], bits)};
}

// The first `count` elements of v; the others are the filler's.
template <class T>
__device__ __forceinline__ uint4 first_elements(const uint4& v, int count, const uint4& filler) {
  const auto word = [&](unsigned of_v, unsigned of_filler, int at) {
    const int bits = (count - at) * 8 * static_cast<int>(sizeof(T));
    return bits >= 32 ? of_v : bits <= 0 ? of_filler : __byte_perm(of_v, of_filler, 0x7610);
  };
  constexpr int k = 4 / sizeof(T);
  return {word(v.x, filler.x, 0), word(v.y, filler.y, k), word(v.z, filler.z, 2 * k), word(v.w, filler.w, 3 * k)};
}

// The two 16-bit elements of a word, as floats.
template <class T>
__device__ __forceinline__ float2 unpair(unsigned word) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  else
    return __half22float2(reinterpret_cast<const __half2&>(word));
}

template <class T>
__device__ __forceinline__ void unpack(const uint4& v, float (&x)[kPerVector<T>]) {
  const unsigned w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 2) {
      const float2 pair = unpair<T>(w[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    } else {
      x[i] = __uint_as_float(w[i]);
    }
  }
}

// Element e of a vector.
template <class T>
__device__ __forceinline__ float element(const uint4& v, int e) {
  constexpr int kEach = 4 / static_cast<int>(sizeof(T));
  const int at = e / kEach;
  const unsigned word = at < 2 ? (at == 0 ? v.x : v.y) : (at == 2 ? v.z : v.w);
  if constexpr (kEach == 1)
    return __uint_as_float(word);
  else
    return widen(__builtin_bit_cast(T, static_cast<unsigned short>(e % 2 == 0 ? word : word >> 16)));
}

// Two floats as a word of 16-bit elements, the first in the lower half.
template <class T>
__device__ __forceinline__ unsigned pair_of(float a, float b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<const unsigned&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(a, b);
    return reinterpret_cast<const unsigned&>(pair);
  }
}

template <class T>
__device__ __forceinline__ uint4 pack(const float* x) {
  unsigned w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 2)
      w[i] = pair_of<T>(x[2 * i], x[2 * i + 1]);
    else
      w[i] = __float_as_uint(x[i]);
  }
  return {w[0], w[1], w[2], w[3]};
}

// A vector of elements that are all -infinity.
template <class T>
__device__ __forceinline__ uint4 lowest_vector() {
  constexpr unsigned word = std::is_same_v<T, float> ? 0xff800000u : std::is_same_v<T, __half> ? 0xfc00fc00u : 0xff80ff80u;
  return {word, word, word, word};
}

// The largest element; NaN is ignored.
template <class T>
__device__ __forceinline__ float max_of(const uint4& v) {
  if constexpr (std::is_same_v<T, float>) {
    return fmaxf(fmaxf(__uint_as_float(v.x), __uint_as_float(v.y)), fmaxf(__uint_as_float(v.z), __uint_as_float(v.w)));
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const auto pair = [](const unsigned& w) { return reinterpret_cast<const Pair&>(w); };
    const Pair largest = __hmax2(__hmax2(pair(v.x), pair(v.y)), __hmax2(pair(v.z), pair(v.w)));
    return fmaxf(widen(largest.x), widen(largest.y));
  }
}

}  // namespace flash_online::cuda
