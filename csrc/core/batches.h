// Batch dimensions of any number as a call's kernels see them: one dimension, and an offset for the others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace flash_online {

// The batch dimensions of an attention call's tensors, seen as an inner dimension and an outer index. Adjacent dimensions are
// fused where one stride steps through both in every tensor. The last dimension that remains is the inner one, and the outer
// index numbers the combinations of the others, so that nothing is ever expanded or copied.
class Batches {
 public:
  // A null pointer stands for a tensor that the call does not have; a Tensor has size(i) and stride(i). Where a tensor has size
  // 1 (a broadcast mask), its stride is 0.
  template <class Tensor>
  Batches(std::span<const Tensor* const> tensors, std::vector<int64_t> sizes)
      : sizes_(std::move(sizes)), dims_(sizes_.size()), strides_(tensors.size() * dims_) {
    for (size_t n = 0; n < tensors.size(); ++n)
      for (size_t i = 0; tensors[n] && i < dims_; ++i)
        if (tensors[n]->size(i) != 1) strides_[n * dims_ + i] = tensors[n]->stride(i);
    for (size_t i = sizes_.size() - 1; i > 0; --i) fuse(i);
    inner_ = static_cast<int64_t>(sizes_.size()) - 1;
  }

  int64_t inner_size() const { return sizes_[inner_]; }
  int64_t inner_stride(int64_t tensor) const { return strides_[tensor * dims_ + inner_]; }
  int64_t outer_count() const {
    int64_t count = 1;
    for (int64_t i = 0; i < inner_; ++i) count *= sizes_[i];
    return count;
  }
  int64_t outer_offset(int64_t tensor, int64_t index) const {
    int64_t offset = 0;
    for (int64_t i = inner_ - 1; i >= 0; --i) {
      offset += index % sizes_[i] * strides_[tensor * dims_ + i];
      index /= sizes_[i];
    }
    return offset;
  }
  // True if this outer index is the first one to touch its elements of the tensor. The first writes a gradient, later ones add
  // to it.
  bool first_visit(int64_t tensor, int64_t index) const {
    for (int64_t i = inner_ - 1; i >= 0; --i) {
      if (strides_[tensor * dims_ + i] == 0 && index % sizes_[i] != 0) return false;
      index /= sizes_[i];
    }
    return true;
  }

 private:
  // Fuses dimensions i - 1 and i if one stride steps through both in every tensor.
  void fuse(size_t i) {
    const bool has_size_1 = sizes_[i] == 1 || sizes_[i - 1] == 1;
    for (size_t at = i; at < strides_.size(); at += dims_)
      if (!has_size_1 && strides_[at - 1] != strides_[at] * sizes_[i]) return;
    for (size_t at = i; at < strides_.size(); at += dims_) {
      if (sizes_[i] != 1) strides_[at - 1] = strides_[at];
      std::copy_n(&strides_[at] + 1, sizes_.size() - 1 - i, &strides_[at]);
    }
    sizes_[i - 1] *= sizes_[i];
    sizes_.erase(sizes_.begin() + i);
  }

  std::vector<int64_t> sizes_;
  size_t dims_;  // the number before fusing
  std::vector<int64_t> strides_;  // [tensor][dims_]
  int64_t inner_ = 0;
};

}  // namespace flash_online
