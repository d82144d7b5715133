// csrc/cuda/hw/named_barrier.cuh on the host.
#pragma once

namespace flash_online::cuda {

inline void sync_named(int barrier, int threads) { device_on_host::Cta::wait(barrier, threads, false); }
inline bool any_named(int barrier, int threads, bool value) { return device_on_host::Cta::wait(barrier, threads, value); }

}  // namespace flash_online::cuda
