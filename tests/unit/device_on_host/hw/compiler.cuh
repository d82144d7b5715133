// csrc/cuda/hw/compiler.cuh on the host, whose compiler may know everything.
#pragma once

#include <cstdint>

namespace flash_online::cuda {

template <class T>
void make_opaque(T&) {}
inline void keep(unsigned) {}
inline uint64_t opaque(uint64_t value) { return value; }
inline unsigned opaque(unsigned value) { return value; }

}  // namespace flash_online::cuda
