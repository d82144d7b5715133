// The k largest probabilities of a softmax on the CPU. One pass over the row keeps its maximum, its sum and the k largest
// elements so far (Milakov and Gimelshein, arXiv 1805.02867, section 4).
#include <algorithm>
#include <bit>
#include <limits>

#include "row_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

namespace {

template <class T>
struct Candidate {
  T value;
  int64_t index;
};

// NaN ranks first, as in torch.topk; of equal elements, the one with the lower index ranks first.
struct RanksBefore {
  template <class T>
  FLASH_ONLINE_INLINE bool operator()(const Candidate<T>& a, const Candidate<T>& b) const {
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan != b_nan) return a_nan;
    if (a.value != b.value && !a_nan) return a.value > b.value;
    return a.index < b.index;
  }
};

// The best `capacity` candidates pushed so far: a sorted list if they are few, else a heap with the worst of them in front.
template <class T>
class TopCandidates {
 public:
  TopCandidates() = default;
  TopCandidates(Candidate<T>* storage, int64_t capacity) : candidates_(storage), capacity_(capacity) {}

  // Pushes elements begin .. begin + count - 1 of the row. chunk_max is the largest of them; `nan` says whether a NaN may be
  // among them.
  template <class E>
  void push_chunk(const E* x, int64_t begin, int64_t count, T chunk_max, bool nan) {
    if (capacity_ == 0 || (size_ == capacity_ && !nan && chunk_max <= worst().value)) return;
    // No element below `threshold` is among the best: either there are enough candidates already, or the chunk itself holds
    // enough elements that are not below it.
    T threshold = size_ == capacity_ ? acceptance_threshold() : lower_bound(x, count);
    for (int64_t i = 0; i < count; i += kPair<E>) {
      const int64_t n = count - i < kPair<E> ? count - i : kPair<E>;
      for (uint32_t lanes = lanes_not_below(load_partial(x + i, n, lowest<T>()), threshold); lanes != 0; lanes &= lanes - 1) {
        const int64_t j = element_in_lane<E>(std::countr_zero(lanes));
        if (j < n) push({widen(x[i + j]), begin + i + j});
      }
      if (size_ == capacity_ && !(acceptance_threshold() <= threshold)) threshold = acceptance_threshold();
    }
  }
  void merge(const TopCandidates& other) {
    for (int64_t i = 0; i < other.size_; ++i) push(other.candidates_[i]);
  }
  // All candidates, the best first.
  const Candidate<T>* sorted() {
    if (!is_list()) std::sort_heap(candidates_, candidates_ + size_, RanksBefore{});
    return candidates_;
  }

 private:
  static constexpr int64_t kMaxListCapacity = 32;
  bool is_list() const { return capacity_ <= kMaxListCapacity; }
  const Candidate<T>& worst() const { return is_list() ? candidates_[size_ - 1] : candidates_[0]; }

  // The next number above the worst candidate: of equal elements the first is kept, and elements are pushed in ascending order.
  T acceptance_threshold() const { return std::nextafter(worst().value, std::numeric_limits<T>::infinity()); }

  void push(const Candidate<T>& candidate) {
    const bool full = size_ == capacity_;
    if (full && !RanksBefore{}(candidate, worst())) return;
    if (is_list()) {
      int64_t slot = full ? size_ - 1 : size_++;
      for (; slot > 0 && RanksBefore{}(candidate, candidates_[slot - 1]); --slot) candidates_[slot] = candidates_[slot - 1];
      candidates_[slot] = candidate;
      return;
    }
    if (full)
      std::pop_heap(candidates_, candidates_ + size_, RanksBefore{});
    else
      ++size_;
    candidates_[size_ - 1] = candidate;
    std::push_heap(candidates_, candidates_ + size_, RanksBefore{});
  }

  // Returns a bound that at least `capacity` elements are not below: the capacity-th largest of the lanes' maxima. -inf if
  // there are too few lanes or elements.
  template <class E>
  T lower_bound(const E* x, int64_t count) const {
    if (capacity_ > kPair<E> / 2 || count < 2 * kPair<E>) return lowest<T>();
    Pair<T> lane_max = {lowest<Vector<T>>(), lowest<Vector<T>>()};
    for (int64_t i = 0; i + kPair<E> <= count; i += kPair<E>) {
      const Pair<T> pair = load_pair(x + i);
      lane_max = {vector_max(pair.a, lane_max.a), vector_max(pair.b, lane_max.b)};
    }
    T bound = lowest<T>();
    for (int64_t i = 0; i < capacity_; ++i) {
      bound = reduce(vector_max(lane_max.a, lane_max.b),
                     [](auto a, auto b) __attribute__((always_inline)) { return b > a ? b : a; });
      lane_max.a = lane_max.a == bound ? lowest<Vector<T>>() : lane_max.a;
      lane_max.b = lane_max.b == bound ? lowest<Vector<T>>() : lane_max.b;
    }
    return bound;
  }
  // Returns a bit for each lane, counted through both vectors: set if its element is not below `threshold`. NaN is not below.
  static FLASH_ONLINE_INLINE uint32_t lanes_not_below(Pair<T> pair, T threshold) {
    constexpr int kWidth = kLanes<T>;
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) {
      const __m512 bound = reinterpret_cast<__m512>(broadcast(threshold));
      return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(pair.a), bound, _CMP_NLT_UQ) |
             static_cast<uint32_t>(_mm512_cmp_ps_mask(reinterpret_cast<__m512>(pair.b), bound, _CMP_NLT_UQ)) << kWidth;
    }
#endif
    const auto below = (pair.a < threshold) & (pair.b < threshold);
    uint32_t lanes = 0;
    if (reduce(below, [](auto a, auto b) __attribute__((always_inline)) { return a & b; }) != 0) return lanes;
    for (int l = 0; l < kWidth; ++l)
      lanes |= static_cast<uint32_t>(!(pair.a[l] < threshold)) << l | static_cast<uint32_t>(!(pair.b[l] < threshold))
                                                                          << (kWidth + l);
    return lanes;
  }

  Candidate<T>* candidates_ = nullptr;
  int64_t capacity_ = 0, size_ = 0;
};

template <class T>
Softmax<T> state_of(const Candidate<T>* sorted, int64_t k) {
  Softmax<T> state;
  if (k > 0) state.raise_max(sorted[0].value);
  T sum = T(0);
  for (int64_t i = k - 1; i >= 0; --i) sum += state.weight(sorted[i].value);  // the smallest first, as many small ones add up
  state.add(sum);
  return state;
}

FLASH_ONLINE_INLINE int64_t& index_of(const RowProblem& problem, const RowTile& tile, int64_t r, int64_t j) {
  return problem.indices.data[tile.outer * problem.indices.stride[0] + tile.inner * problem.indices.stride[2] +
                              r * row_stride(problem, problem.indices) + j * problem.indices.stride[1]];
}

template <class E, class R>
struct ForwardOp : RowOp {
  using T = Accumulator<E>;
  struct Partial {
    RowState<T> state;
    TopCandidates<T> best;
  };

  const RowProblem& problem;
  const RowTile tile;
  RowWeights<E, ExpAccuracy::kSum> weights;

  ForwardOp(const RowProblem& problem, const RowTile& tile, ScratchAllocator& allocator, bool)
      : problem(problem), tile(tile), weights(problem, tile, allocator, false) {}
  static int64_t extra_bytes(const RowProblem& problem) { return topk_row_bytes(problem); }
  static void assign_extra(const RowProblem& problem, Partial& partial, std::byte* storage) {
    partial.best = TopCandidates<T>(reinterpret_cast<Candidate<T>*>(storage), problem.k);
  }
  void first_pass(int64_t begin, int64_t end, Partial* partial) {
    weights.absorb(
        begin, end, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r, const E* x, int64_t first, int64_t count, double max, T sum) {
          partial[r].best.push_chunk(x, first, count, static_cast<T>(max), sum != sum);
        },
        NoResult());
  }
  static void merge(Partial& partial, const Partial& other) {
    merge_states(partial.state, other.state);
    partial.best.merge(other.best);
  }
  void finish(Partial* partial) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      const Candidate<T>* sorted = partial[r].best.sorted();
      if (problem.renormalize)
        write_row(r, sorted, state_of(sorted, problem.k));
      else
        write_row(r, sorted, partial[r].state);
    }
  }

 private:
  template <class State>
  void write_row(int64_t r, const Candidate<T>* sorted, const State& denominator) {
    const T scale = denominator.inverse_sum();
    for (int64_t j = 0; j < problem.k; ++j) {
      index_of(problem, tile, r, j) = sorted[j].index;
      element_of<R>(problem, problem.result, tile, r, j) = narrow<R>(denominator.weight(sorted[j].value) * scale);
    }
  }
};

// Without renormalisation grad_input_c = p_c (grad_c - s), where s is the sum over the k of grad_j p_j, and grad_c is 0 outside
// the k. With it, the k are a softmax by themselves and other classes get 0; its p, which were rounded to the result's dtype,
// are scaled to add up to 1 again.
template <class E, class R>
struct BackwardOp : RowOp {
  using T = Accumulator<E>;
  struct Partial {
    RowState<T> state;
  };
  static constexpr bool kHasSecondPass = true;

  const RowProblem& problem;
  const RowTile tile;
  T sum[kMaxTileRows], sum_rest[kMaxTileRows], norm[kMaxTileRows];
  RowWeights<E, sizeof(E) == 2 ? ExpAccuracy::kRounded : ExpAccuracy::kExact> weights;
  Chunks<E, void*> grad_input;

  BackwardOp(const RowProblem& problem, const RowTile& tile, ScratchAllocator& allocator, bool keep)
      : problem(problem),
        tile(tile),
        weights(problem, tile, allocator, keep),
        grad_input(problem, problem.grad_input, tile, allocator) {
    const bool renormalize = problem.renormalize && problem.k > 0;
    for (int64_t r = 0; r < tile.rows; ++r) {
      double dot = 0, total = 0;
      for (int64_t j = 0; j < problem.k; ++j) {
        dot += static_cast<double>(grad(r, j)) * output(r, j);
        total += output(r, j);
      }
      norm[r] = renormalize ? static_cast<T>(1 / total) : T(1);
      const TwoParts<T> parts(renormalize ? dot / total : dot);
      sum[r] = parts.high, sum_rest[r] = parts.low;
    }
  }
  void first_pass(int64_t begin, int64_t end, Partial* partial) {
    if (!problem.renormalize)
      weights.absorb(begin, end, [&](int64_t r) -> auto& { return partial[r].state; }, no_chunk_hook, grad_input);
  }
  static void merge(Partial& partial, const Partial& other) { merge_states(partial.state, other.state); }
  void finish(Partial*) {}
  void second_pass(int64_t begin, int64_t end, const Partial* partial) {
    if (problem.renormalize)
      for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
        grad_input.begin_write(first);
        for (int64_t r = 0; r < tile.rows; ++r) {
          const E zero = narrow<E>(sum[r] - sum[r]);  // 0, or NaN where the row's softmax is NaN
          for (int64_t c = 0; c < count; ++c) grad_input.row(r)[c] = zero;
        }
        grad_input.finish_write(count);
      });
    else
      weights.write(
          begin, end, [&](int64_t r) -> auto& { return partial[r].state; },
          [&](int64_t r) { return -sum[r] * partial[r].state.inverse_sum(); },
          [&](int64_t first) { grad_input.begin_write(first); },
          [&](int64_t r, int64_t, int64_t count, const auto& weight) { write_chunk<E>(count, grad_input.row(r), weight); },
          [&](int64_t count) { grad_input.finish_write(count); });
    for (int64_t r = 0; r < tile.rows; ++r)
      for (int64_t j = 0; j < problem.k; ++j) {
        const int64_t c = index_of(problem, tile, r, j);
        if (c >= begin && c < end)
          element_of<E>(problem, problem.grad_input, tile, r, c) =
              narrow<E>(((grad(r, j) - sum[r]) - sum_rest[r]) * (output(r, j) * norm[r]));
        else if (c < 0 || c >= problem.classes)
          report_bad_row(problem, tile.first_row + r);
      }
  }

 private:
  T grad(int64_t r, int64_t j) const { return widen(element_of<R>(problem, problem.grad, tile, r, j)); }
  T output(int64_t r, int64_t j) const { return widen(element_of<R>(problem, problem.output, tile, r, j)); }
};

}  // namespace

int64_t topk_row_bytes(const RowProblem& problem) {
  const bool forward = problem.k > 0 && problem.grad.data == nullptr;
  return forward ? ScratchAllocator::bytes_of<Candidate<double>>(problem.k) : 0;
}

void topk_softmax(const RowProblem& problem, const Executor& executor) {
  visit_row_types(problem, [&](auto e, auto r) { run_rows<ForwardOp<decltype(e), decltype(r)>>(problem, executor); });
}

void topk_softmax_backward(const RowProblem& problem, const Executor& executor) {
  visit_row_types(problem, [&](auto e, auto r) { run_rows<BackwardOp<decltype(e), decltype(r)>>(problem, executor); });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
