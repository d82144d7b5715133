// The search for the k <= 32 largest elements of a row by the threads of a CTA.
//
// The threads take the maxima of 64 groups of the first elements. The k-th largest of these maxima is a lower bound on the k-th
// largest element of the row: the threshold. Elements above it are collected as candidates in shared memory; there are at
// least k of them, and rarely many more. At the end, or when there are too many, the rank of each candidate is found by
// comparing it with all the others.
#pragma once

#include "dispatch.cuh"

namespace flash_online::cuda {

// ---- keys

// An element and its index as one number. The larger number comes first in the result: the element in the upper 32 bits,
// the complement of its index in the lower ones. NaN comes first, as in torch.topk; equal elements keep their order. No two
// keys of a row are equal, so results do not depend on the order in which threads find them.
using Key = unsigned long long;
constexpr Key kNoKey = 0;  // smaller than any element's key, since indices are below 2^32 - 1
constexpr Key kAboveAllKeys = ~Key{0};
constexpr unsigned kRankOfNan = 0xff800001u;  // next above infinity's

// A float as an integer of the same order: NaN above all, -0 as 0.
__device__ __forceinline__ unsigned rank_of(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);
  return x != x ? kRankOfNan : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float element_of(Key key) {
  const unsigned rank = static_cast<unsigned>(key >> 32);
  return rank == kRankOfNan ? __uint_as_float(0x7fffffffu) : __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
}
__device__ __forceinline__ Key key_of(float x, unsigned index) { return Key{rank_of(x)} << 32 | (0xffffffffu - index); }
__device__ __forceinline__ unsigned index_of(Key key) { return 0xffffffffu - static_cast<unsigned>(key); }

constexpr int kMaxSelected = kWarpSize;  // the largest k that candidates serve

// ---- candidates

// Shared memory of a CTA that searches a row.
template <int kThreads>
struct Candidates {
  static constexpr int kGroups = 2 * kWarpSize, kWarps = kThreads / kWarpSize;
  // From kFullAt candidates on, there may not be room for one more of each thread.
  static constexpr int kCapacity = 512, kFullAt = kCapacity - kThreads;
  float group_max[kGroups];
  float threshold;  // an element that is not above it is not among the k largest
  int count;  // of candidates found; the ones beyond kCapacity are lost
  Key keys[kCapacity];
  Key best[kMaxSelected];  // the k largest keys, descending
  SharedStates<RowState, kWarps> states;
};

// ---- the first threshold

// A bitonic sort of one number per lane, descending. from_size kWarpSize: of numbers that are a bitonic sequence already.
__device__ __forceinline__ float sort_descending(float x, int from_size = 2) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int size = from_size; size <= kWarpSize; size *= 2)
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(~0u, x, step);
      x = ((lane & size) == 0) == ((lane & step) == 0) ? fmaxf(x, other) : fminf(x, other);
    }
  return x;
}

// Stores the maxima of groups of neighbouring threads, where `max` is this thread's.
template <int kThreads>
__device__ __forceinline__ void store_group_maxima(Candidates<kThreads>& candidates, float max) {
  constexpr int kGroup = kThreads / Candidates<kThreads>::kGroups;
#pragma unroll
  for (int with = 1; with < kGroup; with *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, with));
  if (threadIdx.x % kGroup == 0) candidates.group_max[threadIdx.x / kGroup] = max;
}

// Sets the threshold just below the k-th largest group maximum, so that at least k elements are above it. The first warp calls
// this.
template <int kThreads>
__device__ __forceinline__ void set_first_threshold(Candidates<kThreads>& candidates, int k) {
  constexpr int kFew = kWarpSize / 4;  // up to this k, 32 groups of twice the size give as good a threshold
  const int lane = threadIdx.x % kWarpSize;
  float a = candidates.group_max[lane], b = candidates.group_max[kWarpSize + lane];
  if (k <= kFew) {
    a = sort_descending(fmaxf(a, b));
  } else {
    a = sort_descending(a);
    b = sort_descending(b);
    a = sort_descending(fmaxf(a, __shfl_sync(~0u, b, kWarpSize - 1 - lane)), kWarpSize);
  }
  const float kth = __shfl_sync(~0u, a, k - 1);
  if (lane == 0) candidates.threshold = nextafterf(kth, -INFINITY);
}

// ---- finding candidates

// Whether element x of class c is a candidate.
struct AboveThreshold {
  float threshold;
  int always;  // classes below this one are candidates whatever their value; not 0 only if the threshold is -inf
  // With a threshold of -inf, elements that are -inf may be among the k largest, but only those of the first k classes, because
  // equal elements keep their order.
  __device__ __forceinline__ AboveThreshold(float threshold, int k)
      : threshold(threshold), always(threshold == -INFINITY ? k : 0) {}
  __device__ __forceinline__ bool operator()(float x, int c) const { return !(x <= threshold) || c < always; }
};

// Adds those elements of a vector that are above the threshold, if there is room. The vector holds the classes c, c + 1, ... of
// the slice that is searched; class 0 of the slice is class `offset` of the row. Returns the count of candidates, or 0 if it
// added none.
template <class T, int kThreads>
__device__ __forceinline__ int push_candidates(Candidates<kThreads>& candidates, const uint4& v, int c, int classes,
                                               unsigned offset, const AboveThreshold& above) {
  constexpr int kElements = kPerVector<T>;
  float x[kElements];
  unpack<T>(v, x);
  unsigned found = 0;  // a bit per element
#pragma unroll
  for (int e = 0; e < kElements; ++e) found |= c + e < classes && above(x[e], c + e) ? 1u << e : 0;
  if (found == 0) return 0;
  const int before = atomicAdd(&candidates.count, __popc(found)), after = before + __popc(found);
  for (int at = before; found != 0; found &= found - 1, ++at) {
    const int e = __ffs(static_cast<int>(found)) - 1;
    if (at < Candidates<kThreads>::kCapacity)
      candidates.keys[at] = key_of(element<T>(v, e), offset + static_cast<unsigned>(c + e));
  }
  return after;
}

// ---- ranking candidates

// Puts the k largest of `count` candidates into `best`, with kNoKey for what is missing. The caller has barriers before and
// after.
template <int kThreads>
__device__ __forceinline__ void rank_candidates(Candidates<kThreads>& candidates, int count, int k) {
  const int thread = threadIdx.x;
  if (thread < k && thread >= count) candidates.best[thread] = kNoKey;
  for (int at = thread; at < count; at += kThreads) {
    const Key mine = candidates.keys[at];
    int larger = 0;
#pragma unroll 8
    for (int i = 0; i < count; ++i) larger += candidates.keys[i] > mine;
    if (larger < k) candidates.best[larger] = mine;
  }
}

// Drops all candidates but the k largest, and raises the threshold to the k-th. The caller has barriers before and after.
template <int kThreads>
__device__ __forceinline__ void select_best(Candidates<kThreads>& candidates, int count, int k) {
  rank_candidates(candidates, count, k);
  __syncthreads();
  const int kept = count < k ? count : k;
  if (static_cast<int>(threadIdx.x) < kept) candidates.keys[threadIdx.x] = candidates.best[threadIdx.x];
  if (threadIdx.x == 0) {
    candidates.count = kept;
    if (kept == k) {
      const float kth = element_of(candidates.best[k - 1]);
      candidates.threshold = kth == kth ? kth : INFINITY;  // after k NaNs nothing else can be among the k largest
    }
  }
}

// Where more candidates were found than there is room for, as in a row of equal elements: searches the classes from `begin` on
// again, one element per thread at a time, and drops candidates whenever there are many. The k largest end up in `best`. The
// caller has barriers before and after.
template <class T, int kThreads>
__device__ __forceinline__ void push_all_candidates(Candidates<kThreads>& candidates, const T* row, int begin, int classes,
                                                    unsigned offset, AboveThreshold above, int k) {
  for (; begin < classes; begin += kThreads) {
    const int c = begin + static_cast<int>(threadIdx.x);
    const float x = c < classes ? widen(row[c]) : 0.0f;
    if (c < classes && above(x, c))
      candidates.keys[atomicAdd(&candidates.count, 1)] = key_of(x, offset + static_cast<unsigned>(c));
    __syncthreads();
    const int count = candidates.count;
    if (count > Candidates<kThreads>::kFullAt || begin + kThreads >= classes) {
      select_best(candidates, count, k);
      __syncthreads();
      above.threshold = candidates.threshold;
    }
    __syncthreads();
  }
}

// ---- the row's maximum and sum

// Merges the states of all threads; the first warp gets the result. After its barrier all threads see `best` as well.
template <int kThreads>
__device__ __forceinline__ RowState merge_states(Candidates<kThreads>& candidates, RowState state) {
  constexpr int kWarps = kThreads / kWarpSize;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  state = merge_lanes<kWarpSize>(state);
  if (kWarps > 1 && lane == 0) candidates.states[warp] = state;
  __syncthreads();
  if (kWarps > 1 && warp == 0) state = merge_lanes<kWarpSize>(lane < kWarps ? candidates.states[lane] : RowState{});
  return state;
}

}  // namespace flash_online::cuda
