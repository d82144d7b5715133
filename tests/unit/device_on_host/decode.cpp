// The decode kernel of one head dim over dense keys, for ctypes: test_attention_decode.py.
#include "sm80.h"
#define __maxnreg__(...)

using namespace flash_online;

#include "cuda/attention/decode/decode.cuh"
#include "cuda/attention/decode/merge.cu"

using namespace flash_online::cuda;

namespace flash_online::cuda {
void merge_kv_splits(const AttentionProblem&, const KvSplits&, CUstream_st*) { throw std::logic_error("not of a dense call"); }
}  // namespace flash_online::cuda

extern "C" {

void set_sms(int count) { device_on_host::sms = count; }

// The CTAs per cluster with which the call ran (0: shares of the line), or -1 after an error. `kv_splits`: into which the keys
// are cut by their number; 0: a cache whose keys the host knows.
int attention_few_rows(const AttentionProblem* given, int64_t kv_splits) {
  return guarded([&] {
    AttentionProblem problem = as_cached(*given, kv_splits);
    problem.cache.is_dense = kv_splits > 0;
    const auto run = [&](const auto& setup) {
      if (setup.calls != DecodeCalls::kDense) throw std::runtime_error("another instance takes the call");
      std::vector<char> workspace(static_cast<size_t>(setup.workspace_bytes(problem)) + 1, char{-1});
      problem.dtype == DType::kFloat16 ? launch_decode<__half>(setup, problem, workspace.data(), nullptr)
                                       : launch_decode<__nv_bfloat16>(setup, problem, workspace.data(), nullptr);
      return setup.split.cluster;
    };
    return decode_rows_of(problem) <= 8 ? run(DecodeSetup<HEAD_DIM, false, 8>(problem, shared_bytes_per_cta()))
                                        : run(DecodeSetup<HEAD_DIM, false, 16>(problem, shared_bytes_per_cta()));
  });
}
}
