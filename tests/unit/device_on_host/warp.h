// Device code on the host: the CUDA functions that kernels use, and a CTA with fibers as threads.
//
// A thread runs until it comes to a function that all lanes of its warp, or all threads of the CTA, call together (a vote, a
// shuffle, a barrier). There it waits; when all of them wait, they get their results and go on. The call fails if lanes come to
// different functions, or if some have ended: on a GPU it would hang or give any answer. A vote with a lane missing fails, too.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <vector>

// If a test needs the types of CUDA's headers, these are included before and have other definitions.
#undef __device__
#undef __host__
#undef __global__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __forceinline__
#undef __noinline__
#define __device__
#define __host__
#define __global__
#define __shared__ thread_local  // static: one for all fibers, also within a function
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__

using std::max;
using std::min;

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};
inline Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace device_on_host {

constexpr int kLanes = 32, kSharedBytes = 227 << 10;

inline char* shared_memory = nullptr;  // kSharedBytes, where a test has kernels that use any
inline int room = kSharedBytes;  // that a CTA may have; 0: there is no GPU
inline int sms = 3;

class Cta {
 public:
  // A barrier's is kBarrier + its number.
  enum Function { kBallot, kShuffle, kShuffleUp, kShuffleXor, kMatch, kSync, kMatrix, kProduct, kBarrier };
  static constexpr int kBarriers = 16;

  explicit Cta(int threads = kLanes)
      : threads_(threads), lanes_(static_cast<size_t>(threads)), all_(lanes_.size()), all_operands_(lanes_.size()) {}

  // Calls thread(n) for every thread of the CTA of this index.
  void run(unsigned cta, const std::function<void(int)>& thread) {
    start({cta}, thread);
    if (!resume()) throw std::runtime_error("a barrier of a cluster, where there is none");
  }
  void start(Index3 cta, std::function<void(int)> thread) {
    current() = this;  // a new fiber looks for it
    index_ = cta;
    thread_ = std::move(thread);
    for (int n = 0; n < threads_; ++n) {
      lanes_[n].state = kRunning;
      if (!lanes_[n].stack) make_fiber(n);
    }
  }
  // Runs on to the end, and returns true; or to the cluster's barrier, after which the next call begins, and returns false.
  bool resume() {
    current() = this;
    blockIdx = index_;
    for (Lane& lane : lanes_)
      if (waits_for_cluster(lane)) lane.state = kRunning;
    // A warp runs as far as it can before the next one does, first and last in turn, so that a missing barrier shows.
    for (bool backwards = false; count(0, threads_, kEnded) < threads_; backwards = !backwards) {
      for (int n = 0; n < threads_; n += kLanes) {
        const int first = backwards ? threads_ - kLanes - n : n;
        do run_lanes(first);
        while (release_warp(first));
        if (thrown_) std::rethrow_exception(thrown_);
      }
      if (std::all_of(lanes_.begin(), lanes_.end(), waits_for_cluster)) return false;
      if (count(0, threads_, kEnded) < threads_ && !release_barriers())
        throw std::runtime_error("some threads have ended, and others wait for them");
    }
    return true;
  }

  // Returns the values that the lanes of the warp have given to the same function.
  static const uint64_t* exchange(Function function, uint64_t given) {
    Cta& cta = *current();
    const int n = cta.now_;
    cta.lanes_[n].function = function;
    cta.lanes_[n].given = given;
    cta.suspend(n, kWaiting);
    return &cta.all_[static_cast<size_t>(n / kLanes * kLanes)];
  }
  // The operands of a product of matrices: the words of the left one, and those of the right one.
  using Operands = std::array<uint64_t, 3>;
  static const Operands* exchange(const Operands& given) {
    Cta& cta = *current();
    cta.lanes_[cta.now_].operands = given;
    exchange(kProduct, 0);
    return &cta.all_operands_[static_cast<size_t>(cta.now_ / kLanes * kLanes)];
  }
  // Waits until `threads` threads, all of the CTA for 0, have come to a barrier. Returns whether any of them gave true.
  static bool wait(int barrier, int threads, bool value) {
    Cta& cta = *current();
    cta.lanes_[cta.now_].threads = threads == 0 ? cta.threads_ : threads;
    exchange(static_cast<Function>(kBarrier + barrier), value);
    return cta.any_[barrier];
  }
  static void wait_for_cluster() { exchange(static_cast<Function>(kBarrier + kBarriers), 0); }
  static int thread() { return current()->now_; }
  static int lane() { return thread() % kLanes; }

 private:
  enum State { kRunning, kWaiting, kEnded };
  struct Lane {
    jmp_buf fiber;
    std::unique_ptr<char[]> stack;
    State state = kRunning;
    Function function = kSync;
    uint64_t given = 0;
    Operands operands;
    int threads = 0;  // that the barrier waits for
  };
  static constexpr int kStackBytes = 512 << 10;
  static bool waits_for_cluster(const Lane& lane) { return lane.state == kWaiting && lane.function == kBarrier + kBarriers; }
  static Cta*& current() {
    static Cta* cta = nullptr;
    return cta;
  }
  void run_lanes(int first) {
    for (int n = first; n < first + kLanes; ++n)
      if (lanes_[n].state == kRunning) {
        now_ = n;
        threadIdx.x = static_cast<unsigned>(n);
        if (!_setjmp(scheduler_)) _longjmp(lanes_[n].fiber, 1);
      }
  }
  int count(int first, int threads, State state) const {
    return static_cast<int>(std::count_if(lanes_.begin() + first, lanes_.begin() + first + threads,
                                          [&](const Lane& lane) { return lane.state == state; }));
  }
  // Lets the lanes of a warp go on if all of them wait at a function of the warp.
  bool release_warp(int first) {
    if (count(first, kLanes, kWaiting) != kLanes) return false;
    const auto begin = lanes_.begin() + first, end = begin + kLanes;
    if (std::any_of(begin, end, [&](const Lane& lane) { return lane.function != begin->function; }))
      throw std::runtime_error("the lanes of a warp call different functions");
    if (begin->function >= kBarrier) return false;
    for (auto lane = begin; lane != end; ++lane) {
      lane->state = kRunning;
      const auto n = static_cast<size_t>(lane - lanes_.begin());
      all_[n] = lane->given;
      if (lane->function == kProduct) all_operands_[n] = lane->operands;
    }
    return true;
  }
  // Lets the threads at each barrier go on if as many wait there as it takes.
  bool release_barriers() {
    bool released = false;
    for (int barrier = 0; barrier < kBarriers; ++barrier) {
      const auto waits = [&](const Lane& lane) { return lane.state == kWaiting && lane.function == kBarrier + barrier; };
      const auto first = std::find_if(lanes_.begin(), lanes_.end(), waits);
      if (first == lanes_.end() || std::count_if(first, lanes_.end(), waits) < first->threads) continue;
      any_[barrier] = false;
      for (auto lane = first; lane != lanes_.end(); ++lane) {
        if (!waits(*lane)) continue;
        if (lane->threads != first->threads) throw std::runtime_error("threads at a barrier differ in how many it waits for");
        any_[barrier] |= lane->given != 0;
        lane->state = kRunning;
      }
      released = true;
    }
    return released;
  }
  // Contexts make the fibers; jumps, which make no system call, switch between them.
  void make_fiber(int n) {
    lanes_[n].stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
    ucontext_t here, fiber;
    getcontext(&fiber);
    fiber.uc_stack.ss_sp = lanes_[n].stack.get();
    fiber.uc_stack.ss_size = kStackBytes;
    fiber.uc_link = nullptr;
    makecontext(&fiber, reinterpret_cast<void (*)()>(&Cta::begin), 1, n);
    if (!_setjmp(scheduler_)) swapcontext(&here, &fiber);
  }
  void suspend(int n, State state) {
    lanes_[n].state = state;
    if (!_setjmp(lanes_[n].fiber)) _longjmp(scheduler_, 1);
  }
  static void begin(int n) {
    current()->suspend(n, kRunning);
    while (true) {
      try {
        current()->thread_(n);
      } catch (...) {
        if (!current()->thrown_) current()->thrown_ = std::current_exception();
      }
      current()->suspend(n, kEnded);
    }
  }

  const int threads_;
  Index3 index_;
  std::function<void(int)> thread_;
  std::exception_ptr thrown_;  // by a thread; the CTA runs no further
  jmp_buf scheduler_;
  std::vector<Lane> lanes_;
  std::vector<uint64_t> all_;
  std::vector<Operands> all_operands_;
  bool any_[kBarriers] = {};
  int now_ = 0;
};

}  // namespace device_on_host

inline void require_whole_warp(unsigned mask) {
  if (mask != ~0u) throw std::runtime_error("a mask that leaves lanes out");
}
inline unsigned __ballot_sync(unsigned mask, bool value) {
  require_whole_warp(mask);
  const uint64_t* const all = device_on_host::Cta::exchange(device_on_host::Cta::kBallot, value);
  unsigned votes = 0;
  for (int n = 0; n < device_on_host::kLanes; ++n) votes |= all[n] ? 1u << n : 0;
  return votes;
}
template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
  require_whole_warp(mask);
  using device_on_host::Cta;
  return __builtin_bit_cast(
      T, static_cast<BitsOf<T>>(Cta::exchange(Cta::kShuffle, __builtin_bit_cast(BitsOf<T>, value))[from % 32]));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int step) {
  require_whole_warp(mask);
  using device_on_host::Cta;
  const uint64_t* const all = Cta::exchange(Cta::kShuffleUp, __builtin_bit_cast(BitsOf<T>, value));
  const int from = Cta::lane() - step;
  return from < 0 ? value : __builtin_bit_cast(T, static_cast<BitsOf<T>>(all[from]));
}
inline unsigned __match_any_sync(unsigned mask, int value) {
  require_whole_warp(mask);
  const auto given = static_cast<uint64_t>(value);
  const uint64_t* const all = device_on_host::Cta::exchange(device_on_host::Cta::kMatch, given);
  unsigned same = 0;
  for (int n = 0; n < device_on_host::kLanes; ++n) same |= all[n] == given ? 1u << n : 0;
  return same;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  require_whole_warp(mask);
  using device_on_host::Cta;
  return __builtin_bit_cast(
      T, static_cast<BitsOf<T>>(Cta::exchange(Cta::kShuffleXor, __builtin_bit_cast(BitsOf<T>, value))[Cta::lane() ^ step]));
}
template <class T>
T __ldg(const T* at) {
  return *at;
}
inline int __reduce_min_sync(unsigned mask, int value) {
  for (int step = 16; step > 0; step /= 2) value = std::min(value, __shfl_xor_sync(mask, value, step));
  return value;
}
inline int __reduce_max_sync(unsigned mask, int value) {
  for (int step = 16; step > 0; step /= 2) value = std::max(value, __shfl_xor_sync(mask, value, step));
  return value;
}
inline void __syncthreads() { device_on_host::Cta::wait(0, 0, false); }
inline int __syncthreads_and(int value) { return !device_on_host::Cta::wait(0, 0, value == 0); }
inline void __syncwarp() { device_on_host::Cta::exchange(device_on_host::Cta::kSync, 0); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
template <class T>
T atomicMax(T* to, T x) {
  const T before = *to;
  *to = std::max(before, x);
  return before;
}
template <class T>
T atomicMin(T* to, T x) {
  const T before = *to;
  *to = std::min(before, x);
  return before;
}
template <class T>
T atomicAdd(T* to, T x) {
  const T before = *to;
  *to += x;
  return before;
}
