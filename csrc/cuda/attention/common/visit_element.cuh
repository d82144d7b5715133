// Turns the dtype of an attention problem into a type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../../core/visit.h"

namespace flash_online::cuda {

// Calls f(Type<Element>) with the element type of a problem that is not float64.
template <class F>
void visit_element(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16: return f(Type<__half>{});
    case DType::kBFloat16: return f(Type<__nv_bfloat16>{});
    default: return f(Type<float>{});
  }
}

}  // namespace flash_online::cuda
