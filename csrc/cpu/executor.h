// Threads and memory for a CPU kernel. csrc/ops provides them, so that kernels need not know torch.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../core/scratch.h"

namespace flash_online::cpu {

// The bytes that a kernel needs, in multiples of 64: per worker, and in one block that all workers share.
struct Memory {
  int64_t scratch = 0, shared = 0;
};

struct Executor {
  int64_t workers = 1;  // run() calls body(context, worker) for 0 <= worker < workers, in parallel or one after another
  void (*run)(int64_t workers, void (*body)(void* context, int64_t worker), void* context) = nullptr;
  std::byte* scratch = nullptr;    // workers * scratch_bytes, aligned to 64 bytes
  int64_t scratch_bytes = 0;       // per worker, a multiple of 64
  std::byte* shared = nullptr;     // shared by all workers, aligned to 64 bytes
};

// Divides a worker's scratch, or the shared block, into pieces.
using ScratchAllocator = flash_online::ScratchAllocator<64, false>;

// Calls item(index, scratch) for every index below `items`, the number of work items. Each free worker takes the next index,
// which balances items of uneven size (causal rows). An item must not depend on other items, unless on ones of lower index,
// which have started before it: results must not depend on the number of threads. Items must not throw, as the exception would
// cross a thread of torch's pool.
template <class Item>
inline __attribute__((always_inline)) void for_each_item(const Executor& executor, int64_t items, const Item& item) {
  struct Context {
    const Executor* executor;
    const Item* item;
    int64_t items;
    std::atomic<int64_t> next{0};
  } context{&executor, &item, items};
  executor.run(
      executor.workers < items ? executor.workers : items,
      [](void* opaque, int64_t worker) {
        Context& shared = *static_cast<Context*>(opaque);
        std::byte* scratch = shared.executor->scratch + worker * shared.executor->scratch_bytes;
        for (int64_t i; (i = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.items;) (*shared.item)(i, scratch);
      },
      &context);
}

// The same for items that do not wait for others, in any order. Each worker has a range of its own, and takes items from other
// ranges when it is done: a call whose data a call before it has written or read, with as many workers, finds most of them in
// the caches of its own core.
template <class Item>
inline __attribute__((always_inline)) void for_each_independent_item(const Executor& executor, int64_t items,
                                                                     const Item& item) {
  constexpr int64_t kMostRanges = 64;
  struct Context {
    const Executor* executor;
    const Item* item;
    int64_t items, ranges;
    struct alignas(64) Range {
      std::atomic<int64_t> next{0};
    } range[kMostRanges];
  } context{&executor, &item, items, 0, {}};
  const int64_t workers = executor.workers < items ? executor.workers : items;
  context.ranges = workers < kMostRanges ? workers : kMostRanges;
  executor.run(
      workers,
      [](void* opaque, int64_t worker) {
        Context& shared = *static_cast<Context*>(opaque);
        std::byte* scratch = shared.executor->scratch + worker * shared.executor->scratch_bytes;
        for (int64_t n = 0; n < shared.ranges; ++n) {
          const int64_t r = (worker + n) % shared.ranges, first = shared.items * r / shared.ranges,
                        count = shared.items * (r + 1) / shared.ranges - first;
          for (int64_t i; (i = shared.range[r].next.fetch_add(1, std::memory_order_relaxed)) < count;)
            (*shared.item)(first + i, scratch);
        }
      },
      &context);
}

}  // namespace flash_online::cpu
