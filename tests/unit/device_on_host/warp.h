// Device code on the host: the words of CUDA C++ that the tile schedulers use, and a warp of 32 lanes that run as fibers.
//
// A lane runs until it comes to a function that all lanes of the warp call together (a vote, a shuffle, a barrier). There it
// waits; when all lanes wait, they get their results and go on. Lanes that come to different functions, or of which some have
// ended, make the call fail: on a GPU it would hang or give any answer. So does a vote in which a lane is missing.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline

using std::max;
using std::min;

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};
inline Index3 threadIdx, blockIdx, gridDim;

namespace device_on_host {

constexpr int kLanes = 32;

class Warp {
 public:
  enum Function { kBallot, kShuffle, kShuffleUp, kMatch, kSync };

  // Calls lane(n) for every lane of the warp of this CTA.
  void run(unsigned cta, const std::function<void(int)>& lane) {
    current() = this;
    lane_ = &lane;
    blockIdx.x = cta;
    for (int n = 0; n < kLanes; ++n) {
      state_[n] = kRunning;
      if (!stack_[n]) make_fiber(n);
    }
    while (true) {
      for (int n = 0; n < kLanes; ++n)
        if (state_[n] == kRunning) {
          now_ = n;
          threadIdx.x = static_cast<unsigned>(n);
          if (!_setjmp(scheduler_)) _longjmp(fiber_[n], 1);
        }
      if (std::count(state_, state_ + kLanes, kEnded) == kLanes) return;
      if (std::count(state_, state_ + kLanes, kWaiting) != kLanes) throw std::runtime_error("some lanes of a warp have ended");
      for (int n = 1; n < kLanes; ++n)
        if (function_[n] != function_[0]) throw std::runtime_error("the lanes of a warp call different functions");
      for (int n = 0; n < kLanes; ++n) state_[n] = kRunning;
      std::copy_n(given_, kLanes, all_);
    }
  }

  // What the other lanes have given to the same function.
  static const uint64_t* exchange(Function function, uint64_t given) {
    Warp& warp = *current();
    const int n = warp.now_;
    warp.function_[n] = function;
    warp.given_[n] = given;
    warp.suspend(n, kWaiting);
    return warp.all_;
  }
  static int lane() { return current()->now_; }

 private:
  enum State { kRunning, kWaiting, kEnded };
  static constexpr int kStackBytes = 64 << 10;
  static Warp*& current() {
    static Warp* warp = nullptr;
    return warp;
  }
  // Contexts make the fibers; jumps, which make no system call, switch between them.
  void make_fiber(int n) {
    stack_[n] = std::make_unique<char[]>(kStackBytes);
    ucontext_t here, fiber;
    getcontext(&fiber);
    fiber.uc_stack.ss_sp = stack_[n].get();
    fiber.uc_stack.ss_size = kStackBytes;
    fiber.uc_link = nullptr;
    makecontext(&fiber, reinterpret_cast<void (*)()>(&Warp::begin), 1, n);
    if (!_setjmp(scheduler_)) swapcontext(&here, &fiber);
  }
  void suspend(int n, State state) {
    state_[n] = state;
    if (!_setjmp(fiber_[n])) _longjmp(scheduler_, 1);
  }
  static void begin(int n) {
    current()->suspend(n, kRunning);
    while (true) {
      (*current()->lane_)(n);
      current()->suspend(n, kEnded);
    }
  }

  const std::function<void(int)>* lane_ = nullptr;
  jmp_buf scheduler_, fiber_[kLanes];
  std::unique_ptr<char[]> stack_[kLanes];
  State state_[kLanes] = {};
  Function function_[kLanes] = {};
  uint64_t given_[kLanes] = {}, all_[kLanes] = {};
  int now_ = 0;
};

}  // namespace device_on_host

inline void require_whole_warp(unsigned mask) {
  if (mask != ~0u) throw std::runtime_error("a mask that leaves lanes out");
}
inline unsigned __ballot_sync(unsigned mask, bool value) {
  require_whole_warp(mask);
  const uint64_t* const all = device_on_host::Warp::exchange(device_on_host::Warp::kBallot, value);
  unsigned votes = 0;
  for (int n = 0; n < device_on_host::kLanes; ++n) votes |= all[n] ? 1u << n : 0;
  return votes;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
  require_whole_warp(mask);
  return static_cast<T>(
      device_on_host::Warp::exchange(device_on_host::Warp::kShuffle, static_cast<uint64_t>(value))[from % 32]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int step) {
  require_whole_warp(mask);
  const uint64_t* const all = device_on_host::Warp::exchange(device_on_host::Warp::kShuffleUp, static_cast<uint64_t>(value));
  const int from = device_on_host::Warp::lane() - step;
  return from < 0 ? value : static_cast<T>(all[from]);
}
inline unsigned __match_any_sync(unsigned mask, int value) {
  require_whole_warp(mask);
  const auto given = static_cast<uint64_t>(value);
  const uint64_t* const all = device_on_host::Warp::exchange(device_on_host::Warp::kMatch, given);
  unsigned same = 0;
  for (int n = 0; n < device_on_host::kLanes; ++n) same |= all[n] == given ? 1u << n : 0;
  return same;
}
inline void __syncwarp() { device_on_host::Warp::exchange(device_on_host::Warp::kSync, 0); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline unsigned atomicAdd(unsigned* to, unsigned x) {
  const unsigned before = *to;
  *to += x;
  return before;
}
