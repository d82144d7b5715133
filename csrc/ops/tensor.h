// The shims between torch's stable ABI and the kernels: checks, dtypes, allocation, CPU threads.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../core/problem.h"
#include "../cpu/executor.h"

namespace flash_online::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws std::runtime_error, which surfaces in Python as RuntimeError, unless the condition holds.
template <class... Values>
void check(bool condition, const Values&... values) {
  if (condition) return;
  std::ostringstream message;
  ((message << values), ...);
  throw std::runtime_error(message.str());
}

inline std::vector<int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

// Sizes, and a tensor's shape, for an error message: their text is made only when the message is.
struct Sizes {
  const std::vector<int64_t>& sizes;
};
struct Shape {
  const Tensor& tensor;
};

inline Shape shape_of(const Tensor& tensor) { return {tensor}; }

inline std::ostream& operator<<(std::ostream& stream, const Sizes& of) {
  stream << '[';
  for (size_t i = 0; i < of.sizes.size(); ++i) stream << (i ? ", " : "") << of.sizes[i];
  return stream << ']';
}
inline std::ostream& operator<<(std::ostream& stream, const Shape& shape) { return stream << Sizes{sizes_of(shape.tensor)}; }

inline DType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Bool: return DType::kBool;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Double: return DType::kFloat64;
    case ScalarType::Long: return DType::kInt64;
    default:
      throw std::runtime_error(std::string("dtype: expected bool, float16, bfloat16, float32, float64 or int64, got ") +
                               torch::headeronly::toString(type));
  }
}
inline DType dtype_of(const Tensor& tensor) { return dtype_of(tensor.scalar_type()); }

// The accumulator type: the dtype of sums, lse, class weights, slopes and sinks.
inline ScalarType accumulator_of(ScalarType type) {
  return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Long: return "int64";
    default: return torch::headeronly::toString(type);
  }
}

// A tensor's size in a dimension, and its dtype, for an error message: as with Shape, a check that holds does not read them.
struct Size {
  const Tensor& tensor;
  int64_t dim;
};
struct NameOfDtype {
  const Tensor& tensor;
};

inline std::ostream& operator<<(std::ostream& stream, const Size& size) { return stream << size.tensor.size(size.dim); }
inline std::ostream& operator<<(std::ostream& stream, const NameOfDtype& name) {
  return stream << name_of(name.tensor.scalar_type());
}

// The devices. Every operator is a template over a struct that derives from one of these and runs its kernels there. It is
// registered once per dispatch key: the dispatcher chooses the device of a call.
struct Cpu {
  static constexpr bool kCachesFloat64 = true;
};
struct Cuda {
  static constexpr bool kCachesFloat64 = false;  // whether cached keys may be in float64
};

inline void check_floating(const Tensor& tensor, const char* name) {
  const ScalarType type = tensor.scalar_type();
  check(type == ScalarType::Half || type == ScalarType::BFloat16 || type == ScalarType::Float || type == ScalarType::Double,
        name, ": expected dtype float16, bfloat16, float32 or float64, got ", name_of(type));
}

// Checks the dtype of queries over cached keys, or of rows to write to a cache.
template <class Device>
void check_cached_dtype(const Tensor& tensor, const char* name) {
  check_floating(tensor, name);
  check(Device::kCachesFloat64 || tensor.scalar_type() != ScalarType::Double, name,
        ": expected dtype float16, bfloat16 or float32 over cached keys on CUDA, got float64");
}

struct DeviceOf {
  int32_t type = 0, index = 0;
  explicit DeviceOf(const Tensor& tensor) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &index));
  }
  bool operator==(const DeviceOf&) const = default;
};

// The dispatcher picks CUDA for mixed devices, so every operator compares each of its tensors with its first tensor before a
// kernel gets a pointer.
inline bool on_one_device(const Tensor& a, const Tensor& b) { return DeviceOf(a) == DeviceOf(b); }

inline void check_device(const Tensor& tensor, const char* name, const Tensor& first, const char* name_of_first) {
  check(on_one_device(tensor, first), name, ": expected the device of ", name_of_first, ", got another");
}
inline void check_device(const std::optional<Tensor>& tensor, const char* name, const Tensor& first,
                         const char* name_of_first) {
  if (tensor) check_device(*tensor, name, first, name_of_first);
}

inline Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType type,
                            const Tensor& like) {
  const DeviceOf device(like);
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                         torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
                                                         device.type, device.index, &handle));
  return Tensor(handle);
}

// Strides of a dense tensor of these sizes, with dimensions in memory in the order of `order_of`'s strides, outermost first;
// dimensions of stride 0 or equal stride keep their order. flash_online/_ops.py repeats this rule for fake tensors.
inline std::vector<int64_t> dense_strides_in_order(const std::vector<int64_t>& sizes, const Tensor& order_of) {
  const int64_t rank = static_cast<int64_t>(sizes.size());
  const auto given = order_of.strides();
  std::vector<int64_t> order(rank);
  for (int64_t i = 0; i < rank; ++i) order[i] = i;
  // This is an insertion sort because the comparison is not a strict weak order: stride 0 equals every other.
  for (int64_t i = 1; i < rank; ++i)
    for (int64_t j = i; j > 0; --j) {
      const int64_t outer = given[order[j - 1]], inner = given[order[j]];
      if (outer == 0 || inner == 0 || outer >= inner) break;
      std::swap(order[j - 1], order[j]);
    }
  std::vector<int64_t> strides(rank);
  int64_t next = 1;
  for (int64_t i = rank - 1; i >= 0; --i) {
    strides[order[i]] = next;
    next *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return strides;
}

inline Tensor empty_in_order(const std::vector<int64_t>& sizes, ScalarType type, const Tensor& order_of) {
  return empty_strided(sizes, dense_strides_in_order(sizes, order_of), type, order_of);
}

inline Tensor empty(const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like) {
  std::vector<int64_t> strides(sizes.size());
  int64_t next = 1;
  for (int64_t i = static_cast<int64_t>(sizes.size()) - 1; i >= 0; --i) {
    strides[i] = next;
    next *= std::max<int64_t>(sizes[i], 1);
  }
  return empty_strided(sizes, strides, type, like);
}

inline bool has_sizes(const Tensor& tensor, const std::vector<int64_t>& sizes) {
  return std::ranges::equal(tensor.sizes(), sizes);
}

// Returns the tensor, or a copy. torch's operator of this name goes through the dispatcher, which takes a microsecond even if
// there is nothing to copy.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// The elements [begin, begin + count) of a dimension, a view. torch::stable::narrow is no alternative: its symbol is not one of
// the shims with a stable ABI.
inline Tensor narrow(const Tensor& tensor, int64_t dim, int64_t begin, int64_t count) {
  using torch::stable::detail::from;
  std::array<StableIValue, 4> stack{from(tensor), from(dim), from(begin), from(count)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::narrow", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// An executor with threads of torch's pool, and its own memory or memory from torch's allocator. `items`, the number of work
// items, bounds the number of threads.
class __attribute__((visibility("hidden"))) CpuExecutor {
 public:
  CpuExecutor(int64_t items, cpu::Memory memory, const Tensor& like) {
    executor_.workers = std::clamp<int64_t>(items, 1, torch::stable::get_num_threads());
    executor_.scratch_bytes = (memory.scratch + 63) / 64 * 64;
    executor_.run = [](int64_t workers, void (*body)(void*, int64_t), void* context) {
      if (workers == 1) return body(context, 0);
      torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
        for (int64_t worker = begin; worker < end; ++worker) body(context, worker);
      });
    };
    const int64_t scratch = executor_.workers * executor_.scratch_bytes;
    if (scratch + memory.shared <= static_cast<int64_t>(sizeof small_memory_)) {
      executor_.scratch = small_memory_;
    } else {
      memory_ = empty({scratch + memory.shared + 64}, ScalarType::Byte, like);
      const auto address = reinterpret_cast<uintptr_t>(memory_->data_ptr());
      executor_.scratch = reinterpret_cast<std::byte*>((address + 63) / 64 * 64);
    }
    executor_.shared = executor_.scratch + scratch;
  }
  CpuExecutor(const CpuExecutor&) = delete;  // executor_ points into it
  operator const cpu::Executor&() const { return executor_; }

 private:
  cpu::Executor executor_;
  std::optional<Tensor> memory_;
  alignas(64) std::byte small_memory_[4096];  // an allocation takes as long as a small call's kernel
};

}  // namespace flash_online::ops
