// The choice between the variants of a head dim's general kernels.
#pragma once

#include "../../../core/problem.h"
#include "../../../core/visit.h"
#include "../../hw/launch.h"
#include "../../mma/bf16_digits.cuh"
#include "../common/scores.cuh"
#include "tiles.h"

namespace flash_online::cuda {

// Calls f(Type<Element>, std::integral_constant<Variant, ...>) with the first variant that has what a problem needs and fits
// into `room` bytes of shared memory per CTA; with the last one for a problem that nothing fits. Kernel<Element, kHeadDim,
// variant> is the kernel, kHasTile(bytes per element, head dim, variant) says whether it exists.
template <template <class, int, Variant> class Kernel, auto kHasTile, int kHeadDim, class F>
void visit_sm80(const AttentionProblem& problem, F&& f,
                int room = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>()) {
  using Plain = std::integral_constant<Variant, Variant::kPlain>;
  using AllOptions = std::integral_constant<Variant, Variant::kAllOptions>;
  using SmallTile = std::integral_constant<Variant, Variant::kSmallTile>;
  const auto visit = [&]<class Element>(Type<Element> element) {
    constexpr int kBytes = kDigitsBytes<Element>;
    if constexpr (kHasTile(kBytes, kHeadDim, Plain::value))
      if (!ScoreMod(problem).has_score_mod && !problem.mask.data && problem.dropout == 0 &&
          Kernel<Element, kHeadDim, Plain::value>::shared_bytes(problem) <= room)
        return f(element, Plain{}), true;
    if constexpr (kHasTile(kBytes, kHeadDim, SmallTile::value))
      if (Kernel<Element, kHeadDim, AllOptions::value>::shared_bytes(problem) > room) return f(element, SmallTile{}), true;
    constexpr bool kLast = !std::is_same_v<Element, Bf16x2Float>;  // floats in two digits may yet fit as float's small tile
    if constexpr (kHasTile(kBytes, kHeadDim, AllOptions::value))
      if (kLast || Kernel<Element, kHeadDim, AllOptions::value>::shared_bytes(problem) <= room)
        return f(element, AllOptions{}), true;
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
