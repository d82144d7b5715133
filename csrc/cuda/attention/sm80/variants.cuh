// The choice between the variants of a head dim's general kernels.
#pragma once

#include "../../../core/problem.h"
#include "../../../core/visit.h"
#include "../../hw/launch.h"
#include "../../mma/bf16_digits.cuh"
#include "../common/scores.cuh"
#include "tiles.h"

namespace flash_online::cuda {

// Whether every row of queries, keys and values starts at a multiple of 16 bytes and consists of whole vectors of 16 bytes.
inline bool has_vector_rows(const AttentionProblem& problem) {
  constexpr int64_t kPer = kVectorBytes / 2;  // elements
  const auto has = [&](const ConstView4& view, int64_t columns) {
    return columns % kPer == 0 && misalignment(view.data) == 0 && view.stride[3] == 1 && view.stride[0] % kPer == 0 &&
           view.stride[1] % kPer == 0 && view.stride[2] % kPer == 0;
  };
  return has(problem.query, problem.head_dim) && has(problem.key, problem.head_dim) && has(problem.value, problem.head_dim_v);
}

template <Variant kVariant>
using VariantConstant = std::integral_constant<Variant, kVariant>;

// Calls f(Type<Element>, VariantConstant) with the first variant that has what a problem needs and fits into `room` bytes of
// shared memory per CTA; with the last one for a problem that nothing fits. Kernel<Element, kHeadDim, variant> is the kernel,
// kHasTile(bytes per element, head dim, variant) says whether it exists.
template <template <class, int, Variant> class Kernel, auto kHasTile, int kHeadDim, class F>
void visit_sm80(const AttentionProblem& problem, F&& f, int room = shared_bytes_per_cta()) {
  // A mask counts with all of its rows even if it is broadcast along the queries: else the variant, and so the bits of a row,
  // would depend on how a sequence is cut into calls.
  AttentionProblem with_rows = problem;
  if (problem.mask.data && problem.mask.stride[2] == 0) with_rows.mask.stride[2] = 1;
  const auto visit = [&]<class Element>(Type<Element> element) {
    constexpr auto kHas = [](Variant variant) { return kHasTile(kDigitsBytes<Element>, kHeadDim, variant); };
    // Calls f if the variant exists and fits into shared memory, with all of its CTAs per SM if `all_ctas`.
    const auto takes = [&]<Variant kVariant>(VariantConstant<kVariant> variant, bool all_ctas = false) {
      if constexpr (kHas(kVariant)) {
        using Instance = Kernel<Element, kHeadDim, kVariant>;
        if (Instance::shared_bytes(problem) > room || (all_ctas && !all_ctas_fit(Instance::kTile, room))) return false;
        f(element, variant);
        return true;
      }
      return false;
    };
    if (!ScoreMod(problem).has_score_mod && !problem.mask.data && !problem.is_sparse() && problem.dropout == 0 &&
        !problem.max_logit) {
      if (kHas(Variant::kAnyRows) && !has_vector_rows(problem)) {
        if (takes(VariantConstant<Variant::kAnyRows>{})) return true;
      } else if (takes(VariantConstant<kPlain>{}, true) || takes(VariantConstant<kPlain163>{}, true) ||
                 takes(VariantConstant<kPlain99>{}, true) || takes(VariantConstant<kPlain>{})) {
        return true;
      }
    }
    if constexpr (kHas(kSmall))
      if (Kernel<Element, kHeadDim, kAll>::shared_bytes(with_rows) > room) return f(element, VariantConstant<kSmall>{}), true;
    constexpr bool kLast = !std::is_same_v<Element, Bf16x2Float>;  // floats in two digits may yet fit as float's small tile
    if constexpr (kHas(kAll))
      if (kLast || Kernel<Element, kHeadDim, kAll>::shared_bytes(with_rows) <= room)
        return f(element, VariantConstant<kAll>{}), true;
    return false;
  };
  switch (problem.dtype) {
    case DType::kFloat16: visit(Type<__half>{}); break;
    case DType::kBFloat16: visit(Type<__nv_bfloat16>{}); break;
    default:
      if (!problem.tf32 || !visit(Type<Bf16x2Float>{})) visit(Type<float>{});
  }
}

}  // namespace flash_online::cuda
