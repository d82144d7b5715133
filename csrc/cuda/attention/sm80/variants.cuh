// Which of a head dim's general kernels a problem gets.
#pragma once

#include "../../../core/problem.h"
#include "../../../core/visit.h"
#include "../../hw/launch.h"
#include "../common/scores.cuh"
#include "tiles.h"

namespace flash_online::cuda {

// Calls f(Type<Element>, std::integral_constant<Variant>) with what a problem needs and a GPU with so much shared memory for a
// block has room for. For a problem that finds no room it is the last one. Body<Element, kHeadDim, variant> is the kernel,
// kHasTile(bytes of an element, width, variant) whether there is one.
template <template <class, int, Variant> class Body, auto kHasTile, int kHeadDim, class F>
void visit_sm80(const AttentionProblem& problem, F&& f,
                int room = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>()) {
  using Everything = std::integral_constant<Variant, Variant::kEverything>;
  const auto visit = [&]<class Element>(Type<Element> element) {
    using Plain = std::integral_constant<Variant, Variant::kPlain>;
    using Small = std::integral_constant<Variant, Variant::kSmall>;
    constexpr int kBytes = kSplitBytes<Element>;
    if constexpr (kHasTile(kBytes, kHeadDim, Plain::value))
      if (!ScoreMod(problem).has_score_mod && !problem.mask.data && problem.dropout == 0 &&
          Body<Element, kHeadDim, Plain::value>::shared_bytes(problem) <= room)
        return f(element, Plain{}), true;
    if constexpr (kHasTile(kBytes, kHeadDim, Small::value))
      if (Body<Element, kHeadDim, Everything::value>::shared_bytes(problem) > room) return f(element, Small{}), true;
    constexpr bool kLast = !std::is_same_v<Element, Bf16x2Float>;  // which may yet fit as float, by kSmall
    if constexpr (kHasTile(kBytes, kHeadDim, Everything::value))
      if (kLast || Body<Element, kHeadDim, Everything::value>::shared_bytes(problem) <= room)
        return f(element, Everything{}), true;
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
