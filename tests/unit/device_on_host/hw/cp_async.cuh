// csrc/cuda/hw/cp_async.cuh on the host: nothing arrives before the thread has committed the copy and waits for it; until then
// the destination holds NaN.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#include "shared_memory.cuh"

namespace flash_online::cuda {

struct PendingCopy {
  unsigned to;
  const void* from;
  int bytes;  // of 16; the others become 0
};
struct PendingCopies {
  std::vector<PendingCopy> started;
  std::deque<std::vector<PendingCopy>> committed;  // groups

  bool none() const {
    return started.empty() && std::all_of(committed.begin(), committed.end(), [](const auto& group) { return group.empty(); });
  }
};
inline std::map<int, PendingCopies> pending_copies;  // by thread

inline void start_copy(unsigned shared, const void* global, int bytes) {
  if (shared % 16 != 0 || (bytes > 0 && reinterpret_cast<uintptr_t>(global) % 16 != 0))
    throw std::runtime_error("cp.async: a misaligned address");
  if (bytes < 0 || bytes > 16) throw std::runtime_error("cp.async: a wrong number of bytes");
  pending_copies[device_on_host::Cta::thread()].started.push_back({shared, global, bytes});
  std::memset(device_on_host::shared_memory + shared, 0xff, 16);
}
inline void cp_async(uint4* shared, const void* global, int bytes) { start_copy(shared_address(shared), global, bytes); }
inline void cp_async(uint4* shared, const void* global) { cp_async(shared, global, 16); }
inline void cp_async_if(unsigned wanted, unsigned shared, const void* global) { start_copy(shared, global, wanted ? 16 : 0); }
inline void cp_async_if(unsigned active, unsigned wanted, unsigned shared, const void* global) {
  if (active) cp_async_if(wanted, shared, global);
}
inline void cp_async_commit() {
  PendingCopies& mine = pending_copies[device_on_host::Cta::thread()];
  mine.committed.push_back(std::move(mine.started));
  mine.started.clear();
}
template <int kPending = 0>
void cp_async_wait() {
  PendingCopies& mine = pending_copies[device_on_host::Cta::thread()];
  for (; mine.committed.size() > kPending; mine.committed.pop_front())
    for (const PendingCopy& copy : mine.committed.front()) {
      char* const to = device_on_host::shared_memory + copy.to;
      std::memset(to, 0, 16);
      if (copy.bytes > 0) std::memcpy(to, copy.from, static_cast<size_t>(copy.bytes));
    }
}
template <int kPending>
void cp_async_wait_if(bool active) {
  if (active) cp_async_wait<kPending>();
}

}  // namespace flash_online::cuda
