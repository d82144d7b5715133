// The general forward kernels of one head dim on the host, for ctypes. test_attention_forward_sm80.py compiles this file with a
// copy of csrc in which hw/ has the headers of device_on_host/hw, and with -DHEAD_DIM.
#include "cuda_on_host.h"

namespace flash_online::cuda {
alignas(128) char shared[device_on_host::kSharedBytes];  // the kernels' `extern __shared__`
}
[[maybe_unused]] const bool kIsSet = (device_on_host::shared_memory = flash_online::cuda::shared, true);

#include "cuda/attention/sm80/cached.cuh"
#include "cuda/attention/sm80/forward.cuh"

using namespace flash_online;
using namespace flash_online::cuda;

namespace {

std::string error;

}  // namespace

namespace flash_online::cuda {
void merge_kv_splits(const AttentionProblem&, const KvSplits& splits, CUstream_st*) {
  if (splits.most > 1) throw std::logic_error("partial results are another kernel's");
}
}  // namespace flash_online::cuda

extern "C" {

const char* last_error() { return error.c_str(); }
int64_t size_of_problem() { return sizeof(AttentionProblem); }
void set_shared_bytes(int bytes) { device_on_host::room = bytes; }

// The variant that ran, or -1 after an error. Without a map every block of a mask is read.
int attention_forward(const AttentionProblem* problem) {
  int ran = -1;
  try {
    visit_forward_sm80<HEAD_DIM>(
        *problem, [&]<class Element, Variant kVariant>(Type<Element>, std::integral_constant<Variant, kVariant>) {
          if constexpr (sizeof(Element) == 2) {
            launch_forward_sm80<Element, HEAD_DIM, kVariant>(*problem, MaskMap{}, nullptr);
            ran = static_cast<int>(kVariant);
          }
        });
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  return ran;
}

// The same over cached keys, in one kv_split.
int attention_cached(const AttentionProblem* problem) {
  try {
    visit_cached_sm80<HEAD_DIM>(*problem,
                                [&]<class Element, Variant kVariant>(Type<Element>, std::integral_constant<Variant, kVariant>) {
                                  if constexpr (sizeof(Element) == 2)
                                    launch_cached_sm80<Element, HEAD_DIM, kVariant>(*problem, nullptr, nullptr);
                                });
  } catch (const std::exception& thrown) {
    error = thrown.what();
    return -1;
  }
  return 0;
}
}
