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

// Divides a worker's scratch, or the shared block, into arrays.
using ScratchAllocator = flash_online::ScratchAllocator<64, false>;

// Calls item(index, scratch) for every index below `items`, the number of work items. The indices are cut into as many ranges
// as there are workers, at most kMostRanges. A worker takes the next index of its own range and, once that is done, of other
// ranges.
template <int64_t kMostRanges, class Item>
inline __attribute__((always_inline)) void for_each_item_of_ranges(const Executor& executor, int64_t items, const Item& item) {
  struct Context {
    const Executor* executor;
    const Item* item;
    int64_t items, ranges;
    struct alignas(64) Range {
      int64_t next;  // accessed by atomic operations
    } range[kMostRanges];
  } context;
  const int64_t workers = executor.workers < items ? executor.workers : items;
  context.executor = &executor, context.item = &item, context.items = items;
  context.ranges = workers < kMostRanges ? workers : kMostRanges;
  for (int64_t r = 0; r < context.ranges; ++r) context.range[r].next = 0;  // of many ranges, few are in use
  executor.run(
      workers,
      [](void* opaque, int64_t worker) {
        Context& shared = *static_cast<Context*>(opaque);
        std::byte* scratch = shared.executor->scratch + worker * shared.executor->scratch_bytes;
        for (int64_t n = 0; n < shared.ranges; ++n) {
          const int64_t r = (worker + n) % shared.ranges, first = shared.items * r / shared.ranges,
                        count = shared.items * (r + 1) / shared.ranges - first;
          std::atomic_ref<int64_t> next(shared.range[r].next);
          for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) (*shared.item)(first + i, scratch);
        }
      },
      &context);
}

// Each free worker takes the next index, which balances items of uneven size (causal rows). An item may depend only on items of
// lower index, which have started before it: results must not depend on the number of threads. Items must not throw, as the
// exception would cross a thread of torch's pool.
template <class Item>
inline __attribute__((always_inline)) void for_each_item(const Executor& executor, int64_t items, const Item& item) {
  for_each_item_of_ranges<1>(executor, items, item);
}

// For items that do not wait for each other, in any order. Each worker begins with its own range: if a previous call with as
// many workers read or wrote the same data, a worker finds most of it in the caches of its core.
template <class Item>
inline __attribute__((always_inline)) void for_each_independent_item(const Executor& executor, int64_t items,
                                                                     const Item& item) {
  for_each_item_of_ranges<64>(executor, items, item);
}

}  // namespace flash_online::cpu
