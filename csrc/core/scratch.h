// A bump allocator: divides one block of memory into aligned arrays, front to back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "integer.h"

namespace flash_online {

// The base must be aligned to kAlignment bytes. With a null base the allocator only counts, so that one function can both
// measure a workspace and lay it out.
//
// With kNullIfEmpty, an array without elements is null, and so is every array of an allocator that only counts. Without it,
// take() tests nothing, and such arrays are pointers that must not be used: for kernels that allocate once per work item.
template <int64_t kAlignment = 16, bool kNullIfEmpty = true>
class ScratchAllocator {
 public:
  FLASH_ONLINE_HD explicit ScratchAllocator(void* base) : base_(static_cast<std::byte*>(base)) {}

  // The next `count` elements, not initialised.
  template <class T>
  FLASH_ONLINE_HD T* take(int64_t count) {
    static_assert(alignof(T) <= kAlignment);
    T* const array = !kNullIfEmpty || (base_ && count > 0) ? reinterpret_cast<T*>(base_ + bytes_) : nullptr;
    bytes_ += bytes_of<T>(count);
    return array;
  }

  // Bytes of an array of `count` elements, with its padding.
  template <class T>
  FLASH_ONLINE_HD static constexpr int64_t bytes_of(int64_t count) {
    return round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
  }

  // Bytes of all arrays so far.
  FLASH_ONLINE_HD int64_t bytes() const { return bytes_; }
  FLASH_ONLINE_HD bool only_counts() const { return base_ == nullptr; }

 private:
  std::byte* base_;
  int64_t bytes_ = 0;
};

}  // namespace flash_online
