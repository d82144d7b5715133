// The kernel families of attention. A family is one struct template over the head dim of its tiles; CMake stamps an explicit
// instance per head dim (instance.cu.in), and dispatch.cu picks the smallest that holds a problem's head dims.
//
// All families have three functions: refusal() says why the family does not take a pass (null: it does), workspace_bytes() how
// much workspace the pass needs, aligned to 16 bytes, and run() queues the kernels. What a pass consists of is said once, in
// ForwardPass and BackwardPass of attention.h: a new parameter of the kernels is a new member there.
#pragma once

#include <climits>

#include "../../core/problem.h"
#include "attention.h"

namespace flash_online::cuda {

// Float64 has one instance for all head dims up to this one.
constexpr int kFloat64HeadDim = 512;
constexpr int kAnyHeadDim = INT_MAX;

struct BackwardSm90Call;
struct BackwardWorkspace;

// sm90/forward: TMA and wgmma, for compute capability 9.0.
template <int kHeadDim>
struct AttentionForwardSm90 {
  static const char* refusal(const ForwardPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const ForwardPass& pass);
  static void run(const ForwardPass& pass, void* workspace, CUstream_st* stream);
};

// sm90/forward/cached/cached.cuh: the same over cached keys, for many queries.
template <int kHeadDim>
struct AttentionCachedSm90 {
  static const char* refusal(const ForwardPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const ForwardPass& pass);
  static void run(const ForwardPass& pass, void* workspace, CUstream_st* stream);
};

// sm90/backward.
template <int kHeadDim>
struct AttentionBackwardSm90 {
  static const char* refusal(const BackwardPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const BackwardPass& pass);
  static void run(const BackwardPass& pass, void* workspace, CUstream_st* stream);
};

// sm90/backward/options.cuh: the main kernel of AttentionBackwardSm90 with all options. It is no family of its own: it exists
// for the largest head dim that has these options alone, and smaller head dims call it.
template <int kHeadDim>
struct AttentionBackwardOptionsSm90 {
  static void run(const BackwardSm90Call& call, CUstream_st* stream);
};

// sm90/weight_sums.cuh.
template <int kHeadDim>
struct AttentionWeightSumsSm90 {
  static const char* refusal(const WeightSumsPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const WeightSumsPass& pass);
  static void run(const WeightSumsPass& pass, void* workspace, CUstream_st* stream);
};

// sm90/block_maxima.cuh.
template <int kHeadDim>
struct AttentionBlockMaximaSm90 {
  static const char* refusal(const BlockMaximaPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const BlockMaximaPass& pass);
  static void run(const BlockMaximaPass& pass, void* workspace, CUstream_st* stream);
};

// sm80/block_maxima.cu: for compute capability 8.0 and above; one instance for all head dims.
template <int kHeadDim>
struct AttentionBlockMaximaSm80 {
  static const char* refusal(const BlockMaximaPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const BlockMaximaPass& pass);
  static void run(const BlockMaximaPass& pass, void* workspace, CUstream_st* stream);
};

// sm90/float8: e4m3 products, for compute capability 9.0.
template <int kHeadDim>
struct AttentionFloat8Sm90 {
  static const char* refusal(const Float8Pass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const Float8Pass& pass);
  static void run(const Float8Pass& pass, void* workspace, CUstream_st* stream);
};

// sm80/forward.cuh: mma.sync, every option, for compute capability 8.0 and above.
template <int kHeadDim>
struct AttentionForwardSm80 {
  static const char* refusal(const ForwardPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const ForwardPass& pass);
  static void run(const ForwardPass& pass, void* workspace, CUstream_st* stream);
};

// float64/forward.cu: float64 alone, every option.
template <int kHeadDim>
struct AttentionForwardFloat64 {
  static const char* refusal(const ForwardPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const ForwardPass& pass);
  static void run(const ForwardPass& pass, void* workspace, CUstream_st* stream);
};

// float64/backward.cu.
template <int kHeadDim>
struct AttentionBackwardFloat64 {
  static const char* refusal(const BackwardPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const BackwardPass& pass);
  static void run(const BackwardPass& pass, void* workspace, CUstream_st* stream);
};

// sm80/cached.cuh: the same over cached keys.
template <int kHeadDim>
struct AttentionCachedSm80 {
  static const char* refusal(const ForwardPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const ForwardPass& pass);
  static void run(const ForwardPass& pass, void* workspace, CUstream_st* stream);
};

// decode/decode.cuh: few queries over cached keys of 16 or 8 bits, at the speed of memory, for compute capability 8.0 and
// above.
template <int kHeadDim>
struct AttentionDecode {
  static const char* refusal(const ForwardPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const ForwardPass& pass);
  static void run(const ForwardPass& pass, void* workspace, CUstream_st* stream);
};

// decode/latent.cuh: the same where values are the first columns of wide keys (DeepSeek's MLA, absorbed).
template <int kHeadDim>
struct AttentionDecodeLatent {
  static const char* refusal(const ForwardPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const ForwardPass& pass);
  static void run(const ForwardPass& pass, void* workspace, CUstream_st* stream);
};

// decode/latent_sm90.cuh: the same for compute capability 9.0, by wgmma.
template <int kHeadDim>
struct AttentionDecodeLatentSm90 {
  static const char* refusal(const ForwardPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const ForwardPass& pass);
  static void run(const ForwardPass& pass, void* workspace, CUstream_st* stream);
};

// sm90/bf16x2/backward.cuh: floats in two bf16 digits, where torch allows tf32.
template <int kHeadDim>
struct AttentionBackwardBf16x2Sm90 {
  static const char* refusal(const BackwardPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const BackwardPass& pass);
  static void run(const BackwardPass& pass, void* workspace, CUstream_st* stream);
};

// sm80/backward.cuh.
template <int kHeadDim>
struct AttentionBackwardSm80 {
  static const char* refusal(const BackwardPass& pass, const Gpu& gpu);
  static int64_t workspace_bytes(const BackwardPass& pass);
  static void run(const BackwardPass& pass, void* workspace, CUstream_st* stream);
};

// sm80/backward_dq.cuh: the part of AttentionBackwardSm80 that computes dQ by itself, in deterministic mode. It is no family of
// its own, but an instance apart: half of the time that the compiler needs.
template <int kHeadDim>
struct AttentionBackwardDqSm80 {
  static bool fits(const AttentionProblem& problem, const Gpu& gpu);  // into the GPU's shared memory
  static void run(const BackwardPass& pass, const BackwardWorkspace& workspace, CUstream_st* stream);
};

}  // namespace flash_online::cuda
