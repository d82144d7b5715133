// The k largest probabilities of a softmax on CUDA: one pass over the row keeps its maximum and sum, and the k largest elements
// so far (Milakov and Gimelshein, arXiv 1805.02867, section 4).
//
// Elements are ranked by keys: 64 bits, larger is better, the element above and its index, complemented, below: NaN first, as
// in torch.topk; equal elements in their order. No two keys of a row are equal, so results do not depend on who finds which
// first.
//   k <= 32   a warp keeps its best 32 keys in its lanes, sorted. A lane reads vectors and compares their maximum with the bar,
//   the
//             warp's k-th best; after the first few vectors hardly any is above. Those that are wait in shared memory until
//             there are enough to be sorted into the list. Lists of warps are merged in shared memory, those of a long row's
//             pieces through the workspace.
//   else      a block collects keys in shared memory and sorts them when it is full. Beyond 2048 it reads the row again for
//   each
//             2048, looking only at keys behind the last one found.
#include "../hw/check.cuh"
#include "dispatch.cuh"
#include "rows.h"

namespace flash_online::cuda {

namespace {

using Key = unsigned long long;
constexpr Key kNoKey = 0;  // behind every element's: indices are below 2^32 - 1

// Floats as integers of the same order, NaN above all.
__device__ __forceinline__ unsigned rank_of(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float element_of(Key key) {
  const unsigned rank = static_cast<unsigned>(key >> 32);
  return rank == 0xffffffffu ? __uint_as_float(0x7fffffffu) : __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
}
__device__ __forceinline__ Key key_of(float x, unsigned index) { return Key{rank_of(x)} << 32 | (0xffffffffu - index); }
__device__ __forceinline__ unsigned index_of(Key key) { return 0xffffffffu - static_cast<unsigned>(key); }

__device__ __forceinline__ Key larger(Key a, Key b) { return a > b ? a : b; }
__device__ __forceinline__ Key smaller(Key a, Key b) { return a < b ? a : b; }

// ---- a warp's best 32, one a lane, descending
// -----------------------------------------------------------------------------------

__device__ __forceinline__ Key exchange(Key key, int step, bool keep_larger) {
  const Key other = __shfl_xor_sync(~0u, key, step);
  return keep_larger ? larger(key, other) : smaller(key, other);
}

// Bitonic sort, descending.
__device__ __forceinline__ Key sort_warp(Key key) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int size = 2; size <= kWarp; size *= 2)
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) key = exchange(key, step, ((lane & size) == 0) == ((lane & step) == 0));
  return key;
}

// The best 32 of two sorted lists.
__device__ __forceinline__ Key merge_sorted(Key a, Key b) {
  const int lane = threadIdx.x % kWarp;
  Key key = larger(a, __shfl_sync(~0u, b, kWarp - 1 - lane));  // bitonic
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) key = exchange(key, step, (lane & step) == 0);
  return key;
}

__device__ __forceinline__ float sort_warp_descending(float x) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int size = 2; size <= kWarp; size *= 2)
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(~0u, x, step);
      x = ((lane & size) == 0) == ((lane & step) == 0) ? fmaxf(x, other) : fminf(x, other);
    }
  return x;
}

// The warp's list, and the candidates that wait to be sorted into it. All members are for all lanes together.
class Best {
 public:
  // `waiting`: room for 2 * kWarp keys, the warp's own.
  __device__ __forceinline__ Best(int k, Key* waiting) : last_(k - 1), waiting_(waiting) {}

  // Whether an element cannot be among the best k: false for NaN, and for all as long as there is no bar.
  __device__ __forceinline__ bool below(float x) const { return x <= bar_; }

  // A first bar, from the maximum of disjoint parts of what is to come, one a lane: k of them are as large as the k-th. One
  // step lower, as an element equal to the bar is no candidate.
  __device__ __forceinline__ void expect(float max) {
    const float bar = __shfl_sync(~0u, sort_warp_descending(max), last_);
    bar_ = bar > -INFINITY && bar < INFINITY ? nextafterf(bar, -INFINITY) : bar_;
  }

  // Takes the keys of the lanes that have a candidate.
  __device__ __forceinline__ void offer(bool has, Key key) {
    const unsigned who = __ballot_sync(~0u, has);
    if (who == 0) return;
    const int lane = threadIdx.x % kWarp;
    if (has) waiting_[count_ + __popc(who & ((1u << lane) - 1))] = key;
    count_ += __popc(who);
    __syncwarp();
    if (count_ < kWarp) return;
    merge(sort_warp(waiting_[lane]));
    count_ -= kWarp;
    const Key rest = waiting_[kWarp + lane];
    __syncwarp();
    waiting_[lane] = rest;
    __syncwarp();
    raise_bar();
  }
  __device__ __forceinline__ void merge(Key sorted) { list_ = merge_sorted(list_, sorted); }
  __device__ __forceinline__ Key finish() {
    if (count_ > 0) merge(sort_warp(static_cast<int>(threadIdx.x % kWarp) < count_ ? waiting_[threadIdx.x % kWarp] : kNoKey));
    count_ = 0;
    return list_;
  }

 private:
  __device__ __forceinline__ void raise_bar() {
    const Key last = __shfl_sync(~0u, list_, last_);
    if (last == kNoKey) return;
    const float bar = element_of(last);
    bar_ = bar != bar ? INFINITY : bar;
  }
  int last_;  // the lane that has the k-th
  Key* waiting_;
  int count_ = 0;
  Key list_ = kNoKey;
  float bar_ = NAN;  // nothing is below
};

constexpr int kListVectors = 4;  // of a lane at a time

// What a warp, or more of them, know of a row.
struct Found {
  RowState state;
  Key key;  // this lane's of the list
};

// The vectors first, first + step, ... of a row's classes [0, classes), whose indices count from `offset`, by one warp. The
// next vectors are on their way while these are looked at.
template <class T>
__device__ __forceinline__ Found search(const T* row, int first, int step, int classes, unsigned offset, int k, Key* waiting) {
  constexpr int kElements = kPerVector<T>;
  const int lane = threadIdx.x % kWarp;
  RowState state;
  Best best(k, waiting);
  uint4 next[kListVectors];
  load_row<T>(next, row, first + lane, step, classes, lowest_vector<T>());
  for (int begin = first; begin * kElements < classes; begin += step * kListVectors) {  // the same for all lanes
    uint4 v[kListVectors];
#pragma unroll
    for (int i = 0; i < kListVectors; ++i) v[i] = next[i];
    load_row<T>(next, row, begin + step * kListVectors + lane, step, classes, lowest_vector<T>());
    float max[kListVectors], most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kListVectors; ++i) max[i] = max_of<T>(v[i]), most = fmaxf(most, max[i]);
    state.raise(most);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kListVectors; ++i) {
      float x[kElements], part = 0;
      unpack<T>(v[i], x);
#pragma unroll
      for (int e = 0; e < kElements; ++e) part += state.weight(x[e]);
      sum += part;
    }
    state.add(sum);
    if (begin == first) best.expect(most);
    const bool nan = state.sum != state.sum;  // which is in no maximum
    if (!__any_sync(~0u, nan || !best.below(most))) continue;
#pragma unroll
    for (int i = 0; i < kListVectors; ++i) {
      if (!__any_sync(~0u, nan || !best.below(max[i]))) continue;
      const int c = (begin + lane + i * step) * kElements;
      float x[kElements];
      unpack<T>(v[i], x);
#pragma unroll
      for (int e = 0; e < kElements; ++e)
        best.offer(c + e < classes && !best.below(x[e]), key_of(x[e], offset + static_cast<unsigned>(c + e)));
    }
  }
  return {merge_lanes<kWarp>(state), best.finish()};
}

// Of all warps of a block, for the first.
template <int kWarps>
__device__ __forceinline__ Found merge_block(Found found) {
  __shared__ Key lists[kWarps][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  found.state = HeldTeam<kWarps * kWarp, kWarps * kWarp>::template merge_warps<0>(found.state);
#pragma unroll
  for (int half = kWarps / 2; half > 0; half /= 2) {
    if (warp >= half && warp < 2 * half) lists[warp][lane] = found.key;
    __syncthreads();
    if (warp < half) found.key = merge_sorted(found.key, lists[warp + half][lane]);
  }
  return found;
}

// The results of a row, by one warp.
template <class R>
__device__ __forceinline__ void write_list(const RowProblem& problem, const RowPlace& place, const Found& found) {
  const int lane = threadIdx.x % kWarp;
  RowState denominator = found.state;
  const bool mine = lane < problem.k;
  if (problem.renormalize) {
    RowState own;
    if (mine) own.absorb(element_of(found.key));
    denominator = merge_lanes<kWarp>(own);
  }
  if (!mine) return;
  const float p = denominator.weight(element_of(found.key)) * denominator.inverse_sum();
  row_of<R>(problem.result, place).set(lane, p);
  const View3<int64_t*>& indices = problem.indices;
  indices.data[place.outer * indices.stride[0] + lane * indices.stride[1] + place.inner * indices.stride[2]] =
      index_of(found.key);
}

__device__ __forceinline__ RowPlace place_at(const RowProblem& problem, int64_t number) {
  return {number / problem.inner, number % problem.inner, number, number < problem.outer * problem.inner};
}

constexpr int kListThreads = 256, kListWarps = kListThreads / kWarp;
constexpr int64_t kWarpRow = 2048;  // vectors up to which a row is one warp's
constexpr int64_t kPieceVectors = 4096;  // of a block's piece of a longer row

template <class T, class R>
__global__ void __launch_bounds__(kListThreads, 4) list_by_warp_kernel(const __grid_constant__ RowProblem problem) {
  const int64_t number = int64_t{blockIdx.x} * kListWarps + threadIdx.x / kWarp;
  if (number >= problem.outer * problem.inner) return;
  const RowPlace place = place_at(problem, number);
  __shared__ Key waiting[kListWarps][2 * kWarp];
  const Found found = search<T>(row_of<const T>(problem.input, place).data, 0, kWarp, static_cast<int>(problem.classes), 0,
                                static_cast<int>(problem.k), waiting[threadIdx.x / kWarp]);
  write_list<R>(problem, place, found);
}

struct ListPieces {
  int64_t classes, count;
  template <class T>
  __host__ __device__ static ListPieces of(int64_t classes, Type<T>) {
    constexpr int64_t piece = kPieceVectors * kPerVector<T>;
    return {piece, (classes + piece - 1) / piece};
  }
};
// In the workspace: a state a piece of each row, then the lists.
struct PieceState {
  float max, sum;
};
__host__ __device__ inline int64_t list_bytes(int64_t pieces) {
  return pieces * static_cast<int64_t>(sizeof(PieceState) + kWarp * sizeof(Key));
}

template <class T, class R>
__global__ void __launch_bounds__(kListThreads, 4) list_piece_kernel(const __grid_constant__ RowProblem problem) {
  const ListPieces pieces = ListPieces::of(problem.classes, Type<T>{});
  const int64_t number = blockIdx.x / pieces.count, begin = blockIdx.x % pieces.count * pieces.classes;
  const RowPlace place = place_at(problem, number);
  const int64_t left = problem.classes - begin;
  const int classes = static_cast<int>(left < pieces.classes ? left : pieces.classes);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  __shared__ Key waiting[kListWarps][2 * kWarp];
  const Found found =
      merge_block<kListWarps>(search<T>(row_of<const T>(problem.input, place).data + begin, warp * kWarp, kListThreads, classes,
                                        static_cast<unsigned>(begin), static_cast<int>(problem.k), waiting[warp]));
  if (warp != 0) return;
  if (pieces.count == 1) {
    write_list<R>(problem, place, found);
    return;
  }
  const int64_t all = problem.outer * problem.inner * pieces.count;
  auto* lists = static_cast<Key*>(problem.workspace);
  auto* states = reinterpret_cast<PieceState*>(lists + all * kWarp);
  lists[int64_t{blockIdx.x} * kWarp + lane] = found.key;
  if (lane == 0) states[blockIdx.x] = {found.state.max, found.state.sum};
}

// A block a row: merges its pieces.
template <class T, class R>
__global__ void __launch_bounds__(kListThreads) list_merge_kernel(const __grid_constant__ RowProblem problem) {
  const int64_t pieces = ListPieces::of(problem.classes, Type<T>{}).count, all = problem.outer * problem.inner * pieces;
  const auto* lists = static_cast<const Key*>(problem.workspace);
  const auto* states = reinterpret_cast<const PieceState*>(lists + all * kWarp);
  const int64_t number = blockIdx.x, first = number * pieces;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  RowState state;
  for (int64_t i = threadIdx.x; i < pieces; i += kListThreads)
    state.merge(RowState{states[first + i].max, states[first + i].sum});
  Key list = kNoKey;
  for (int64_t i = warp; i < pieces; i += kListWarps) list = merge_sorted(list, lists[(first + i) * kWarp + lane]);
  const Found found = merge_block<kListWarps>({merge_lanes<kWarp>(state), list});
  if (warp == 0) write_list<R>(problem, place_at(problem, number), found);
}

// ---- any k, any strides
// ---------------------------------------------------------------------------------------------------------

constexpr int kSortThreads = 512, kSortKeys = 4096, kSortKept = 2048;

// Sorts `keys` by a block, descending.
__device__ __forceinline__ void sort_block(Key* keys) {
  for (int size = 2; size <= kSortKeys; size *= 2)
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < kSortKeys / 2; i += kSortThreads) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const Key a = keys[low], b = keys[high];
        if ((a < b) == ((low & size) == 0)) keys[low] = b, keys[high] = a;
      }
    }
  __syncthreads();
}

template <class T, class R>
__global__ void __launch_bounds__(kSortThreads) sort_kernel(const __grid_constant__ RowProblem problem) {
  __shared__ Key keys[kSortKeys];
  __shared__ int count;
  for (int64_t number = blockIdx.x; number < problem.outer * problem.inner; number += gridDim.x) {
    const RowPlace place = place_at(problem, number);
    const StridedRow<BlockPerRow, T> reader(problem, problem.input, place);
    const Row<const T> row = row_of<const T>(problem.input, place);
    RowState denominator;
    if (!problem.renormalize) denominator = reader.state();
    Key before = ~Key{0};  // keys from here on were written by earlier passes
    const auto pass = [&](int64_t done, bool write) {
      const int64_t wanted = problem.k - done < kSortKept ? problem.k - done : kSortKept;
      Key bar = kNoKey;  // the wanted-th best so far
      __syncthreads();
      for (int i = threadIdx.x; i < kSortKeys; i += kSortThreads) keys[i] = kNoKey;
      if (threadIdx.x == 0) count = 0;
      __syncthreads();
      const auto settle = [&] {
        sort_block(keys);
        bar = keys[wanted - 1];
        __syncthreads();
        for (int i = threadIdx.x; i < kSortKeys; i += kSortThreads)
          if (i >= wanted) keys[i] = kNoKey;
        if (threadIdx.x == 0) count = static_cast<int>(wanted);
        __syncthreads();
      };
      for (int64_t begin = 0; begin < problem.classes; begin += kSortThreads) {
        const int64_t c = begin + threadIdx.x;
        const Key key = c < problem.classes ? key_of(row[c], static_cast<unsigned>(c)) : kNoKey;
        const bool has = key > bar && key < before;
        const int more = __syncthreads_count(has);
        if (more == 0) continue;
        if (count + more > kSortKeys) settle();  // all threads read the same count: it changes behind barriers alone
        __syncthreads();
        if (has) keys[atomicAdd(&count, 1)] = key;
        __syncthreads();
      }
      settle();
      before = keys[wanted - 1];
      if (problem.renormalize && !write) {
        RowState own;
        for (int64_t j = threadIdx.x; j < wanted; j += kSortThreads) own.absorb(element_of(keys[j]));
        denominator.merge(BlockPerRow::merge(own));
      }
      if (!write) return;
      const float scale = denominator.inverse_sum();
      const Row<R> result = row_of<R>(problem.result, place);
      const View3<int64_t*>& indices = problem.indices;
      int64_t* at = indices.data + place.outer * indices.stride[0] + place.inner * indices.stride[2];
      for (int64_t j = threadIdx.x; j < wanted; j += kSortThreads) {
        result.set(done + j, denominator.weight(element_of(keys[j])) * scale);
        at[(done + j) * indices.stride[1]] = index_of(keys[j]);
      }
    };
    if (problem.renormalize) {
      for (int64_t done = 0; done < problem.k; done += kSortKept) pass(done, false);
      before = ~Key{0};
    }
    for (int64_t done = 0; done < problem.k; done += kSortKept) pass(done, true);
  }
}

// ---- backward
// -------------------------------------------------------------------------------------------------------------------

// Of the whole softmax, with s = sum over the k of grad_j p_j: grad_input_c = p_c (grad_c - s), where grad_c is 0 outside the
// k. Renormalised, the k are a softmax of their own and the other classes get 0; its p, rounded to the result's dtype, are
// made to add up to 1 again. The first kernel writes what all classes get, the second, behind it, what the k get.
template <class R>
struct TopK {
  const RowProblem& problem;
  Row<const R> grad, output;
  __device__ TopK(const RowProblem& p, const RowPlace& place)
      : problem(p), grad(row_of<const R>(p.grad, place)), output(row_of<const R>(p.output, place)) {}
  // Sums over the k, by a warp.
  __device__ __forceinline__ float sum(bool of_grad) const {
    Sum sum;
    Compensation compensation;
    for (int64_t j = threadIdx.x % kWarp; j < problem.k; j += kWarp)
      compensation.add(sum, of_grad ? grad[j] * output[j] : output[j]);
    return lanes_sum<kWarp>(sum.value);
  }
};

constexpr int kBackwardThreads = 256;

template <class T, class R>
__global__ void __launch_bounds__(kBackwardThreads) topk_backward_kernel(const __grid_constant__ RowProblem problem) {
  const int warp = threadIdx.x / kWarp, warps = kBackwardThreads / kWarp;
  for (int64_t number = int64_t{blockIdx.x} * warps + warp; number < problem.outer * problem.inner;
       number += int64_t{gridDim.x} * warps) {
    const RowPlace place = place_at(problem, number);
    const TopK<R> top(problem, place);
    const float dot = top.sum(true);
    const float norm = problem.renormalize && problem.k > 0 ? 1 / top.sum(false) : 1.0f;
    const float sum = problem.renormalize ? dot * norm : dot;
    const View3<int64_t*>& indices = problem.indices;
    const int64_t* at = indices.data + place.outer * indices.stride[0] + place.inner * indices.stride[2];
    const Row<T> grad_input = row_of<T>(problem.grad_input, place);
    for (int64_t j = threadIdx.x % kWarp; j < problem.k; j += kWarp) {
      const int64_t c = at[j * indices.stride[1]];
      assert(c >= 0 && c < problem.classes && "topk_softmax: an index is out of bounds");
      grad_input.set(c, (top.grad[j] - sum) * (top.output[j] * norm));
    }
  }
}

template <class R>
struct Rest {
  static constexpr int kTensors = 1;
  static constexpr bool kReduces = false, kSumsAgain = false;
  static const ConstView3& first(const RowProblem& problem) { return problem.input; }
  template <class Rows>
  __device__ static void part(const RowProblem& problem, const Rows& rows) {
    rows.read(problem.input).leave_part(NoExtra{});
  }
  template <class T, class Rows>
  __device__ static void run(const RowProblem& problem, const Rows& rows) {
    auto row = rows.read(problem.input);
    const RowPlace place = row.place();
    float sum = 0;
    if (place.exists) {  // by each thread for itself: k is small
      const TopK<R> top(problem, place);
      float norm = 0;
      for (int64_t j = 0; j < problem.k; ++j) {
        sum += top.grad[j] * top.output[j];
        norm += top.output[j];
      }
      if (problem.renormalize && problem.k > 0) sum /= norm;
    }
    const RowState state = row.state();
    const float scale = state.inverse_sum();
    const bool zero = problem.renormalize;
    row.template write<T>(problem.grad_input, [&](int64_t, float x) {
      return zero ? sum - sum : -sum * (state.weight(x) * scale);  // 0, or NaN where the row's softmax is NaN
    });
  }
};

template <class T, class R>
void launch_topk(const RowProblem& problem, cudaStream_t stream) {
  const int64_t rows = problem.outer * problem.inner, vectors = (problem.classes + kPerVector<T> - 1) / kPerVector<T>;
  const char* name = "topk_softmax";
  if (problem.k > kWarp || !classes_together(problem, {problem.input.stride[1]})) {
    sort_kernel<T, R><<<grid_for(rows, 16), kSortThreads, 0, stream>>>(problem);
  } else if (vectors <= kWarpRow) {
    list_by_warp_kernel<T, R>
        <<<static_cast<unsigned>((rows + kListWarps - 1) / kListWarps), kListThreads, 0, stream>>>(problem);
  } else {
    const int64_t pieces = ListPieces::of(problem.classes, Type<T>{}).count;
    list_piece_kernel<T, R><<<static_cast<unsigned>(rows * pieces), kListThreads, 0, stream>>>(problem);
    check_launch(name);
    if (pieces > 1) list_merge_kernel<T, R><<<static_cast<unsigned>(rows), kListThreads, 0, stream>>>(problem);
  }
  check_launch(name);
}

}  // namespace

int64_t topk_workspace(const RowProblem& problem) {
  if (problem.k > kWarp || !classes_together(problem, {problem.input.stride[1]})) return 0;
  const int64_t pieces = (problem.dtype == DType::kFloat32 ? ListPieces::of(problem.classes, Type<float>{})
                                                           : ListPieces::of(problem.classes, Type<__half>{}))
                             .count;
  return pieces > 1 ? list_bytes(problem.outer * problem.inner * pieces) : 0;
}

void topk_softmax(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem) || problem.k == 0) return;
  visit_types(problem, "topk_softmax", [&]<class T, class R>(Type<T>, Type<R>) { launch_topk<T, R>(problem, stream); });
}

void topk_softmax_backward(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const char* name = "topk_softmax_backward";
  const bool together = classes_together(problem, {problem.input.stride[1], problem.grad_input.stride[1]});
  visit_types(problem, name, [&]<class T, class R>(Type<T>, Type<R>) {
    launch_rows<Rest<R>, T, T>(problem, together, stream, name);
    if (problem.k == 0) return;
    constexpr int kRows = kBackwardThreads / kWarp;
    topk_backward_kernel<T, R>
        <<<grid_for((problem.outer * problem.inner + kRows - 1) / kRows, 32), kBackwardThreads, 0, stream>>>(problem);
    check_launch(name);
  });
}

}  // namespace flash_online::cuda
