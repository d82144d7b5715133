// Products on the tensor cores by one warpgroup (wgmma). A product has 64 rows and a depth of 16, and runs asynchronously with
// the instructions that follow. The right operand is in shared memory as TMA leaves it, in swizzled boxes of [rows][64]
// elements; the left operand is in shared memory too, or in registers.
//
// Lane l of warp w holds, for every j < N / 8, the columns 8 j + 2 * (l % 4) + {0, 1} of a 64 x N accumulator: of row
// 16 w + l / 4 in d[4 j + {0, 1}], and of row 16 w + l / 4 + 8 in d[4 j + {2, 3}]. An accumulator becomes the left operand of
// another product without an exchange between lanes: its words of step t are the pairs (d[8 t], d[8 t + 1]),
// (d[8 t + 2], d[8 t + 3]), (d[8 t + 4], d[8 t + 5]) and (d[8 t + 6], d[8 t + 7]), each rounded to 16-bit elements.
//
// Elements of 8 bits have a depth of 32, and rows in shared memory run along k alone: boxes are [rows][128] elements. An
// accumulator becomes the left operand without an exchange too, if k is in another order (float8_position()).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace flash_online::cuda {

// To be called before the first of a sequence of products: orders it after writes of the registers that it reads or adds to.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Puts the products since the last commit into a group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all but the last kPending groups are complete. Their accumulators may then be read, after fence_registers()
// (compiler.cuh), and their operands overwritten.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// A descriptor names an operand in shared memory. Adding bytes / 16 to it moves the operand's start.

// The descriptor of an operand [row][k]: its rows are the boxes' rows, and k runs along them. A step of 16 in k is 32 bytes; a
// step of 64 is the next box.
__device__ __forceinline__ uint64_t k_major_descriptor(unsigned shared_address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32, kUnused = uint64_t{1} << 16;
  return kSwizzle128 | kEightRows | kUnused | ((shared_address & 0x3ffff) >> 4);
}
// The descriptor of an operand [k][row]: its rows (for a right operand: its columns) run along the boxes' rows, and a box has a
// row per k. Rows from 64 on are in the next box, `box_bytes` further. A step of 16 in k is 16 rows of a box, 2048 bytes.
__device__ __forceinline__ uint64_t mn_major_descriptor(unsigned shared_address, unsigned box_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kEightRows | uint64_t{box_bytes / 16} << 16 | ((shared_address & 0x3ffff) >> 4);
}
// The descriptor of a right operand without swizzling, in matrices of eight k by eight columns: eight rows of k of 16 bytes.
// `columns_stride`: bytes to the matrix of the next eight columns; `depth_stride`: to that of a step's other eight k.
__device__ __forceinline__ uint64_t unswizzled_descriptor(unsigned shared_address, unsigned columns_stride,
                                                          unsigned depth_stride) {
  return uint64_t{columns_stride / 16} << 32 | uint64_t{depth_stride / 16} << 16 | ((shared_address & 0x3ffff) >> 4);
}
constexpr uint64_t kDescriptorStep = 16;  // bytes
// The descriptor of an operand that starts `bytes` later. The start is in the descriptor's low word and does not overflow it,
// so 32 bits are added, not 64.
__device__ __forceinline__ uint64_t offset_descriptor(uint64_t descriptor, unsigned bytes) {
  const uint64_t high = descriptor >> 32 << 32;
  return high | (static_cast<unsigned>(descriptor) + bytes / static_cast<unsigned>(kDescriptorStep));
}

// Where a key lies along k, within 32, in the right operand of e4m3 products whose left operand is made of an accumulator with
// a column per key. Lane l holds its columns 8 j + 2 (l % 4) + {0, 1}; as words of the left operand, the numbers of two j side
// by side stand for the places 4 (l % 4) + {0, 1, 2, 3}, and those of the next two for places 16 higher.
__host__ __device__ __forceinline__ constexpr int float8_position(int key) {
  return key / 16 * 16 + key % 8 / 2 * 4 + key % 16 / 8 * 2 + key % 2;
}

// d = a b, or d += a b if `accumulate`, where a is 64 x 16 and b is 16 x kN: rs() takes a from registers, ss() from shared
// memory. kRightMnMajor and kLeftMnMajor say that an operand's descriptor is an mn_major_descriptor().
template <class T, int kN>
struct Wgmma;

// clang-format off
#define FO_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FO_R1 FO_R0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FO_R2 FO_R1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FO_R3 FO_R2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FO_R4 FO_R3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FO_R5 FO_R4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FO_R6 FO_R5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FO_R7 FO_R6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FO_R8 FO_R7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FO_R9 FO_R8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FO_R10 FO_R9 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FO_R11 FO_R10 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FO_R15 FO_R11 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FO_D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FO_D1 FO_D(0), FO_D(8)
#define FO_D2 FO_D1, FO_D(16)
#define FO_D3 FO_D1, FO_D(16), FO_D(24)
#define FO_D5 FO_D3, FO_D(32), FO_D(40)
#define FO_D7 FO_D5, FO_D(48), FO_D(56)
#define FO_D9 FO_D7, FO_D(64), FO_D(72)
#define FO_D11 FO_D9, FO_D(80), FO_D(88)
#define FO_D15 FO_D11, FO_D(96), FO_D(104), FO_D(112), FO_D(120)

// i0 to i6: the numbers of the assembler operands that follow the accumulators.
#define FO_WGMMA(T, TYPE, N, LAST, i0, i1, i2, i3, i4, i5, i6)                                                                \
  template <>                                                                                                                 \
  struct Wgmma<T, N> {                                                                                                        \
    template <bool kRightMnMajor>                                                                                             \
    __device__ __forceinline__ static void rs(float (&d)[N / 2], const unsigned (&a)[4], uint64_t b, bool accumulate) {       \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i5 ", 0;\n"                                                             \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FO_R##LAST "}, "                      \
                   "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 ";}"                                  \
                   : FO_D##LAST                                                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}), "n"(int{kRightMnMajor}));      \
    }                                                                                                                         \
    template <bool kRightMnMajor, bool kLeftMnMajor = false>                                                                  \
    __device__ __forceinline__ static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {                   \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i2 ", 0;\n"                                                             \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FO_R##LAST "}, "                      \
                   "%" #i0 ", %" #i1 ", p, 1, 1, %" #i4 ", %" #i3 ";}"                                                        \
                   : FO_D##LAST                                                                                               \
                   : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{kRightMnMajor}), "n"(int{kLeftMnMajor}));                  \
    }                                                                                                                         \
  };
#define FO_WGMMAS(T, TYPE)                                             \
  FO_WGMMA(T, TYPE, 32, 1, 16, 17, 18, 19, 20, 21, 22)                 \
  FO_WGMMA(T, TYPE, 64, 3, 32, 33, 34, 35, 36, 37, 38)                 \
  FO_WGMMA(T, TYPE, 96, 5, 48, 49, 50, 51, 52, 53, 54)                 \
  FO_WGMMA(T, TYPE, 128, 7, 64, 65, 66, 67, 68, 69, 70)                \
  FO_WGMMA(T, TYPE, 160, 9, 80, 81, 82, 83, 84, 85, 86)                \
  FO_WGMMA(T, TYPE, 192, 11, 96, 97, 98, 99, 100, 101, 102)            \
  FO_WGMMA(T, TYPE, 256, 15, 128, 129, 130, 131, 132, 133, 134)
FO_WGMMAS(__nv_bfloat16, "bf16")
FO_WGMMAS(__half, "f16")

#define FO_WGMMA_E4M3(N, LAST, i0, i1, i2, i3, i4, i5)                                                                  \
  template <>                                                                                                           \
  struct Wgmma<__nv_fp8_e4m3, N> {                                                                                      \
    __device__ __forceinline__ static void rs(float (&d)[N / 2], const unsigned (&a)[4], uint64_t b, bool accumulate) { \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i5 ", 0;\n"                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FO_R##LAST "}, "                        \
                   "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1;}"                                      \
                   : FO_D##LAST                                                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}));                         \
    }                                                                                                                   \
    __device__ __forceinline__ static void ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {             \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i2 ", 0;\n"                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FO_R##LAST "}, "                        \
                   "%" #i0 ", %" #i1 ", p, 1, 1;}"                                                                      \
                   : FO_D##LAST                                                                                         \
                   : "l"(a), "l"(b), "r"(int{accumulate}));                                                             \
    }                                                                                                                   \
  };
FO_WGMMA_E4M3(48, 2, 24, 25, 26, 27, 28, 29)
FO_WGMMA_E4M3(64, 3, 32, 33, 34, 35, 36, 37)
FO_WGMMA_E4M3(96, 5, 48, 49, 50, 51, 52, 53)
FO_WGMMA_E4M3(128, 7, 64, 65, 66, 67, 68, 69)
FO_WGMMA_E4M3(192, 11, 96, 97, 98, 99, 100, 101)
#undef FO_WGMMA_E4M3
#undef FO_R0
#undef FO_R1
#undef FO_R2
#undef FO_R3
#undef FO_R4
#undef FO_R5
#undef FO_R6
#undef FO_R7
#undef FO_R8
#undef FO_R9
#undef FO_R10
#undef FO_R11
#undef FO_R15
#undef FO_D
#undef FO_D1
#undef FO_D2
#undef FO_D3
#undef FO_D5
#undef FO_D7
#undef FO_D9
#undef FO_D11
#undef FO_D15
#undef FO_WGMMA
#undef FO_WGMMAS
// clang-format on

}  // namespace flash_online::cuda
