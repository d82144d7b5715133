// copy_blocks: packs the messages of a collective, and unpacks them. flash_online/distributed makes the plans.
#include "../cpu/exchange/copy_blocks.h"

#include "../cuda/exchange/copy_blocks.h"
#include "cuda_call.h"
#include "operators.h"
#include "tensor.h"

namespace flash_online::ops {
namespace {

// Reads a plan's numbers one after the other.
class PlanReader {
 public:
  explicit PlanReader(const std::vector<int64_t>& plan) : plan_(plan) {}

  int64_t next(int64_t least, int64_t most, const char* what) {
    check(at_ < plan_.size(), "plan: expected ", what, " next, got its end after ", plan_.size(), " numbers");
    const int64_t number = plan_[at_++];
    check(number >= least && number <= most, "plan: expected ", what, " from ", least, " to ", most, ", got ", number);
    return number;
  }
  int64_t next_size(const char* what) { return next(0, kMost, what); }
  bool done() const { return at_ == plan_.size(); }

 private:
  static constexpr int64_t kMost = int64_t{1} << 40;
  const std::vector<int64_t>& plan_;
  size_t at_ = 0;
};

constexpr int64_t kFar = int64_t{1} << 58;  // elements; times the bytes of one it does not overflow

// The bytes from a tensor's first element to its last; 0 without elements.
int64_t bytes_of(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 0) return 0;
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return (last + 1) * static_cast<int64_t>(tensor.element_size());
}

Tensor next_result(PlanReader& plan, const std::vector<Tensor>& sources) {
  const int64_t like = plan.next(-1, static_cast<int64_t>(sources.size()) - 1, "the source that a result has its dtype of"),
                dims = plan.next(0, 8, "a result's number of dimensions");
  std::vector<int64_t> sizes(dims), strides(dims);
  for (int64_t& size : sizes) size = plan.next_size("a result's size");
  for (int64_t& stride : strides) stride = plan.next_size("a result's stride");
  return empty_strided(sizes, strides, like < 0 ? ScalarType::Byte : sources[like].scalar_type(), sources[0]);
}

// Moves the end of a block by the elements of a dimension; one beyond all memory if that overflows.
void extend(int64_t& end, int64_t size, int64_t stride) {
  int64_t reach = 0;
  if (__builtin_mul_overflow(size - 1, stride, &reach) || __builtin_add_overflow(end, reach, &end) || end > kFar) end = kFar;
}

// An empty block has a size of 0.
BlockCopy next_block(PlanReader& plan, const std::vector<Tensor>& sources, const std::vector<Tensor>& results) {
  const Tensor& from = sources[plan.next(0, static_cast<int64_t>(sources.size()) - 1, "a block's source")];
  const Tensor& to = results[plan.next(0, static_cast<int64_t>(results.size()) - 1, "a block's result")];
  BlockCopy block;
  block.unit = static_cast<int>(plan.next(1, 16, "a block's bytes per unit"));
  check((block.unit & (block.unit - 1)) == 0, "plan: expected 1, 2, 4, 8 or 16 bytes per unit of a block, got ", block.unit);
  const int64_t from_begin = plan.next_size("a block's first unit of its source"),
                to_begin = plan.next_size("a block's first unit of its result"),
                dims = plan.next(0, BlockCopy::kDims, "a block's number of dimensions");
  int64_t from_end = from_begin + 1, to_end = to_begin + 1;
  bool is_empty = false;
  for (int64_t dim = BlockCopy::kDims - dims; dim < BlockCopy::kDims; ++dim) {
    block.size[dim] = plan.next_size("a block's size");
    block.from_stride[dim] = plan.next_size("a block's stride in its source");
    block.to_stride[dim] = plan.next_size("a block's stride in its result");
    is_empty |= block.size[dim] == 0;
    extend(from_end, block.size[dim], block.from_stride[dim]);
    extend(to_end, block.size[dim], block.to_stride[dim]);
  }
  if (is_empty) {
    block.size[0] = 0;
    return block;
  }
  check(from_end * block.unit <= bytes_of(from), "plan: expected a block within its source of ", bytes_of(from),
        " bytes, got one up to byte ", from_end * block.unit);
  check(to_end * block.unit <= bytes_of(to), "plan: expected a block within its result of ", bytes_of(to),
        " bytes, got one up to byte ", to_end * block.unit);
  block.from = static_cast<const char*>(from.data_ptr()) + from_begin * block.unit;
  block.to = static_cast<char*>(to.data_ptr()) + to_begin * block.unit;
  check(reinterpret_cast<uintptr_t>(block.from) % block.unit == 0 && reinterpret_cast<uintptr_t>(block.to) % block.unit == 0,
        "plan: expected addresses that are multiples of a block's ", block.unit, " bytes per unit, got others");
  return block;
}

struct CopyOnCpu : Cpu {
  static void run(const std::vector<BlockCopy>& blocks, const Tensor& like) {
    constexpr int64_t kBytesPerThread = 1 << 17;  // with fewer, starting a thread takes longer than the copy
    int64_t bytes = 0;
    for (const BlockCopy& block : blocks) bytes += block.units() * block.unit;
    cpu::copy_blocks(blocks.data(), static_cast<int64_t>(blocks.size()), CpuExecutor(bytes / kBytesPerThread, {}, like));
  }
};

struct CopyOnCuda : Cuda {
  static void run(const std::vector<BlockCopy>& blocks, const Tensor& like) {
    CudaCall call(like);
    cuda::copy_blocks(blocks.data(), static_cast<int64_t>(blocks.size()), call.stream());
  }
};

template <class Device>
std::vector<Tensor> copy_blocks(std::vector<Tensor> sources, std::vector<int64_t> plan) {
  for (size_t n = 1; n < sources.size(); ++n)
    check(on_one_device(sources[n], sources[0]), "sources[", n, "]: expected the device of sources[0], got another");
  PlanReader reader(plan);
  std::vector<Tensor> results;
  for (int64_t count = reader.next_size("the number of results"); count > 0; --count)
    results.push_back(next_result(reader, sources));
  std::vector<BlockCopy> blocks;
  for (int64_t count = reader.next_size("the number of blocks"); count > 0; --count)
    if (const BlockCopy block = next_block(reader, sources, results); block.units() > 0) blocks.push_back(block);
  check(reader.done(), "plan: expected its end after the last block, got more numbers");
  if (!blocks.empty()) Device::run(blocks, sources[0]);
  return results;
}

template <class Device, class Library>
void add_copy_blocks(Library& m) {
  implement(m, "copy_blocks", TORCH_BOX(&copy_blocks<Device>));
}

}  // namespace
}  // namespace flash_online::ops

STABLE_TORCH_LIBRARY_IMPL(flash_online, CPU, m) { flash_online::ops::add_copy_blocks<flash_online::ops::CopyOnCpu>(m); }

STABLE_TORCH_LIBRARY_IMPL(flash_online, CUDA, m) {
  if constexpr (flash_online::ops::kBuiltWithCuda) flash_online::ops::add_copy_blocks<flash_online::ops::CopyOnCuda>(m);
}
