// Reads a buffer once and keeps nothing of it: what attention over cached keys would take if it did nothing but read them.
// NVRTC compiles this file, so that it needs no compiler besides torch.

constexpr int kAtOnce = 8; // loads of 16 bytes that a thread has on their way

extern "C" __global__ void __launch_bounds__(512) read_only(const uint4* buffer, unsigned* never_written, int vectors) {
  const int step = gridDim.x * blockDim.x;
  unsigned bits = 0;
  for (int begin = blockIdx.x * blockDim.x + threadIdx.x; begin < vectors; begin += kAtOnce * step) {
    uint4 loaded[kAtOnce] = {};
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
      if (begin + n * step < vectors) loaded[n] = __ldcs(buffer + begin + n * step);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) bits |= loaded[n].x | loaded[n].y | loaded[n].z | loaded[n].w;
  }
  // The buffer holds zeros. The compiler does not know it, and so has to load them.
  if (bits != 0) *never_written = bits;
}
