// The one place that asks which instructions the processor has.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace flash_online::cpu {

#define FLASH_ONLINE_DECLARE(isa)                  \
  namespace isa {                                  \
  extern const AttentionKernels attention_kernels; \
  extern const RowKernels row_kernels;             \
  }
FLASH_ONLINE_DECLARE(portable)
#if defined(__x86_64__)
FLASH_ONLINE_DECLARE(avx2)
FLASH_ONLINE_DECLARE(avx512)
#endif
#undef FLASH_ONLINE_DECLARE

static Kernels choose() {
  const char* forced = std::getenv("FLASH_ONLINE_CPU");
  const auto allowed = [&](const char* name) { return forced == nullptr || std::strcmp(forced, name) == 0; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  // The sets are those of the psABI's micro-architecture levels v4 and v3, which GCC's -march=x86-64-v4 and -v3 assume.
  if (allowed("avx512") && __builtin_cpu_supports("x86-64-v4"))
    return {"avx512", avx512::attention_kernels, avx512::row_kernels};
  if (allowed("avx2") && __builtin_cpu_supports("x86-64-v3")) return {"avx2", avx2::attention_kernels, avx2::row_kernels};
#endif
  return {"portable", portable::attention_kernels, portable::row_kernels};
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace flash_online::cpu
