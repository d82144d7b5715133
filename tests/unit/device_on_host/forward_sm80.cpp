// The general forward kernels of one head dim on the host, for ctypes: test_attention_forward_sm80.py.
#include "sm80.h"

using namespace flash_online;

#include "cuda/attention/masks/span_bounds.cu"
#include "cuda/attention/sm80/cached.cuh"
#include "cuda/attention/sm80/forward.cuh"

using namespace flash_online::cuda;

namespace flash_online::cuda {
void merge_kv_splits(const AttentionProblem&, const KvSplits& splits, CUstream_st*) {
  if (splits.most > 1) throw std::logic_error("partial results are another kernel's");
}
}  // namespace flash_online::cuda

extern "C" {

// The kind of the variant that ran, or -1 after an error. Without a map every block of a mask is read.
int attention_forward(const AttentionProblem* problem) {
  return guarded([&] {
    int ran = -1;
    visit_forward_sm80<HEAD_DIM>(
        *problem, [&]<class Element, Variant kVariant>(Type<Element>, std::integral_constant<Variant, kVariant>) {
          if constexpr (sizeof(Element) == 2) {
            TileTables tiles;
            std::vector<SpanBounds> memory(span_tables_of(*problem, nullptr).bytes() / sizeof(SpanBounds));
            tiles.spans = span_tables_of(*problem, memory.data());
            fill_span_tables(*problem, tiles.spans, nullptr);
            launch_forward_sm80<Element, HEAD_DIM, kVariant>(*problem, tiles, nullptr);
            ran = kind_of(kVariant);
          }
        });
    return ran;
  });
}

// The same over cached keys, in one kv_split.
int attention_cached(const AttentionProblem* problem) {
  return guarded([&] {
    visit_cached_sm80<HEAD_DIM>(*problem,
                                [&]<class Element, Variant kVariant>(Type<Element>, std::integral_constant<Variant, kVariant>) {
                                  if constexpr (sizeof(Element) == 2)
                                    launch_cached_sm80<Element, HEAD_DIM, kVariant>(*problem, nullptr, nullptr);
                                });
    return 0;
  });
}
}
