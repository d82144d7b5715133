// Picks the kernels of the best instruction set that the processor has. No other file asks which instructions there are.
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
FLASH_ONLINE_DECLARE(avx512_bf16)
FLASH_ONLINE_DECLARE(amx)
#endif
#undef FLASH_ONLINE_DECLARE

#if defined(__x86_64__)
// Asks the processor itself, as GCC 12's __builtin_cpu_supports knows neither AVX512_BF16 nor AMX.
static bool has_bf16_instructions() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);
}

// Linux lets a process use the AMX tile registers after it has asked for permission, which then holds for all of its threads.
static bool has_matrix_tiles() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & (kBf16 | kTile)) == (kBf16 | kTile) &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

static Kernels choose() {
  const char* forced = std::getenv("FLASH_ONLINE_CPU");
  const auto allowed = [&](const char* name) { return forced == nullptr || std::strcmp(forced, name) == 0; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  // GCC's -march=x86-64-v4 and -v3 assume exactly the micro-architecture levels of the psABI that are tested here.
  const bool v4 = __builtin_cpu_supports("x86-64-v4");
  if (allowed("amx") && v4 && has_bf16_instructions() && has_matrix_tiles())
    return {"amx", amx::attention_kernels, amx::row_kernels};
  if (allowed("avx512_bf16") && v4 && has_bf16_instructions())
    return {"avx512_bf16", avx512_bf16::attention_kernels, avx512_bf16::row_kernels};
  if (allowed("avx512") && v4) return {"avx512", avx512::attention_kernels, avx512::row_kernels};
  if (allowed("avx2") && __builtin_cpu_supports("x86-64-v3")) return {"avx2", avx2::attention_kernels, avx2::row_kernels};
#endif
  return {"portable", portable::attention_kernels, portable::row_kernels};
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace flash_online::cpu
