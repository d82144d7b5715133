// The k largest probabilities of a softmax on the CPU: one pass over the row keeps its maximum and sum, and the k largest
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

// NaN is the largest, as in torch.topk; equal elements are taken in their order.
struct RanksBefore {
  template <class T>
  FLASH_ONLINE_INLINE bool operator()(const Candidate<T>& a, const Candidate<T>& b) const {
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan != b_nan) return a_nan;
    if (a.value != b.value && !a_nan) return a.value > b.value;
    return a.index < b.index;
  }
};

// The best `capacity` candidates offered: few of them in a sorted list, many in a heap whose front is the worst of them.
template <class T>
class Best {
 public:
  Best() = default;
  Best(Candidate<T>* places, int64_t capacity) : places_(places), capacity_(capacity) {}

  // Elements begin .. begin + count - 1 of the row, whose largest is chunk_max; `nan` if there may be a NaN among them.
  template <class E>
  void offer(const E* x, int64_t begin, int64_t count, T chunk_max, bool nan) {
    if (capacity_ == 0 || (size_ == capacity_ && !nan && chunk_max <= worst().value)) return;
    // Nothing below `least` is among the best, be it that enough are known already or that the chunk holds enough from there
    // on.
    T least = size_ == capacity_ ? above_worst() : lower_bound(x, count);
    for (int64_t i = 0; i < count; i += kPair<E>) {
      const int64_t n = count - i < kPair<E> ? count - i : kPair<E>;
      for (uint32_t lanes = not_below(load_some(x + i, n, lowest<T>()), least); lanes != 0; lanes &= lanes - 1) {
        const int64_t j = element_in_lane<E>(std::countr_zero(lanes));
        if (j < n) take({widen(x[i + j]), begin + i + j});
      }
      if (size_ == capacity_ && !(above_worst() <= least)) least = above_worst();
    }
  }
  void merge(const Best& other) {
    for (int64_t i = 0; i < other.size_; ++i) take(other.places_[i]);
  }
  // All of them, the best first.
  const Candidate<T>* sorted() {
    if (!is_list()) std::sort_heap(places_, places_ + size_, RanksBefore{});
    return places_;
  }

 private:
  static constexpr int64_t kMostInList = 32;
  bool is_list() const { return capacity_ <= kMostInList; }
  const Candidate<T>& worst() const { return is_list() ? places_[size_ - 1] : places_[0]; }

  // Of two equal elements the first is kept, which is the worst, as later ones are offered later.
  T above_worst() const { return std::nextafter(worst().value, std::numeric_limits<T>::infinity()); }

  void take(const Candidate<T>& candidate) {
    const bool full = size_ == capacity_;
    if (full && !RanksBefore{}(candidate, worst())) return;
    if (is_list()) {
      int64_t place = full ? size_ - 1 : size_++;
      for (; place > 0 && RanksBefore{}(candidate, places_[place - 1]); --place) places_[place] = places_[place - 1];
      places_[place] = candidate;
      return;
    }
    if (full)
      std::pop_heap(places_, places_ + size_, RanksBefore{});
    else
      ++size_;
    places_[size_ - 1] = candidate;
    std::push_heap(places_, places_ + size_, RanksBefore{});
  }

  // A number that at least `capacity` of the elements are not below: of the largest in each lane, the capacity-th, where lanes
  // suffice. -inf if there is none.
  template <class E>
  T lower_bound(const E* x, int64_t count) const {
    if (capacity_ > kPair<E> / 2 || count < 2 * kPair<E>) return lowest<T>();
    Pair<T> most = {lowest<Vector<T>>(), lowest<Vector<T>>()};
    for (int64_t i = 0; i + kPair<E> <= count; i += kPair<E>) {
      const Pair<T> pair = load_pair(x + i);
      most = {largest(pair.a, most.a), largest(pair.b, most.b)};
    }
    T bound = lowest<T>();
    for (int64_t i = 0; i < capacity_; ++i) {
      bound = reduce(largest(most.a, most.b), [](auto a, auto b) __attribute__((always_inline)) { return b > a ? b : a; });
      most.a = most.a == bound ? lowest<Vector<T>>() : most.a;
      most.b = most.b == bound ? lowest<Vector<T>>() : most.b;
    }
    return bound;
  }
  // The lanes of a pair, counted through both vectors, whose elements are not below `least`: NaN is not.
  static FLASH_ONLINE_INLINE uint32_t not_below(Pair<T> pair, T least) {
    constexpr int kWidth = kLanes<T>;
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) {
      const __m512 bound = reinterpret_cast<__m512>(broadcast(least));
      return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(pair.a), bound, _CMP_NLT_UQ) |
             static_cast<uint32_t>(_mm512_cmp_ps_mask(reinterpret_cast<__m512>(pair.b), bound, _CMP_NLT_UQ)) << kWidth;
    }
#endif
    const auto below = (pair.a < least) & (pair.b < least);
    uint32_t lanes = 0;
    if (reduce(below, [](auto a, auto b) __attribute__((always_inline)) { return a & b; }) != 0) return lanes;
    for (int l = 0; l < kWidth; ++l)
      lanes |= static_cast<uint32_t>(!(pair.a[l] < least)) << l | static_cast<uint32_t>(!(pair.b[l] < least)) << (kWidth + l);
    return lanes;
  }

  Candidate<T>* places_ = nullptr;
  int64_t capacity_ = 0, size_ = 0;
};

template <class T>
Softmax<T> state_of(const Candidate<T>* sorted, int64_t k) {
  Softmax<T> state;
  if (k > 0) state.raise_max(sorted[0].value);
  T sum = T(0);
  for (int64_t i = k - 1; i >= 0; --i) sum += state.weight(sorted[i].value);  // the least first: many small ones add up
  state.add(sum);
  return state;
}

FLASH_ONLINE_INLINE int64_t& index_of(const RowProblem& problem, const Tile& tile, int64_t r, int64_t j) {
  return problem.indices.data[tile.outer * problem.indices.stride[0] + tile.inner * problem.indices.stride[2] +
                              r * row_stride(problem, problem.indices) + j * problem.indices.stride[1]];
}

template <class E, class R>
struct ForwardOp : RowOp {
  using T = Accumulator<E>;
  struct Partial {
    RowState<T> state;
    Best<T> best;
  };

  const RowProblem& problem;
  const Tile tile;
  Weights<E, Weighing::kSum> weights;

  ForwardOp(const RowProblem& problem, const Tile& tile, Arena& arena, bool)
      : problem(problem), tile(tile), weights(problem, tile, arena, false) {}
  static int64_t storage(const RowProblem& problem) { return topk_storage(problem); }
  static void place(const RowProblem& problem, Partial& partial, std::byte* storage) {
    partial.best = Best<T>(reinterpret_cast<Candidate<T>*>(storage), problem.k);
  }
  void first(int64_t begin, int64_t end, Partial* partial) {
    weights.absorb(
        begin, end, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r, const E* x, int64_t first, int64_t count, double max, T sum) {
          partial[r].best.offer(x, first, count, static_cast<T>(max), sum != sum);
        },
        NoResult());
  }
  static void merge(Partial& partial, const Partial& other) {
    join(partial.state, other.state);
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

// Of the whole softmax, with s = sum over the k of grad_j p_j: grad_input_c = p_c (grad_c - s), where grad_c is 0 outside the
// k. Renormalised, the k are a softmax of their own and the other classes get 0; its p, rounded to the result's dtype, are
// made to add up to 1 again.
template <class E, class R>
struct BackwardOp : RowOp {
  using T = Accumulator<E>;
  struct Partial {
    RowState<T> state;
  };
  static constexpr bool kSecond = true;

  const RowProblem& problem;
  const Tile tile;
  T sum[kTileRows], norm[kTileRows];
  Weights<E, sizeof(E) == 2 ? Weighing::kRounded : Weighing::kExact> weights;
  Chunks<E, void*> grad_input;

  BackwardOp(const RowProblem& problem, const Tile& tile, Arena& arena, bool keep)
      : problem(problem),
        tile(tile),
        weights(problem, tile, arena, keep),
        grad_input(problem, problem.grad_input, tile, arena) {
    const bool renormalize = problem.renormalize && problem.k > 0;
    for (int64_t r = 0; r < tile.rows; ++r) {
      double dot = 0, total = 0;
      for (int64_t j = 0; j < problem.k; ++j) {
        dot += static_cast<double>(grad(r, j)) * output(r, j);
        total += output(r, j);
      }
      norm[r] = renormalize ? static_cast<T>(1 / total) : T(1);
      sum[r] = static_cast<T>(renormalize ? dot / total : dot);
    }
  }
  void first(int64_t begin, int64_t end, Partial* partial) {
    if (!problem.renormalize)
      weights.absorb(begin, end, [&](int64_t r) -> auto& { return partial[r].state; }, nothing_also, grad_input);
  }
  static void merge(Partial& partial, const Partial& other) { join(partial.state, other.state); }
  void finish(Partial*) {}
  void second(int64_t begin, int64_t end, const Partial* partial) {
    if (problem.renormalize)
      for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
        grad_input.start(first);
        for (int64_t r = 0; r < tile.rows; ++r) {
          const E zero = narrow<E>(sum[r] - sum[r]);  // or NaN, where the row's softmax is NaN
          for (int64_t c = 0; c < count; ++c) grad_input.row(r)[c] = zero;
        }
        grad_input.finish(count);
      });
    else
      weights.write(
          begin, end, [&](int64_t r) -> auto& { return partial[r].state; },
          [&](int64_t r) { return -sum[r] * partial[r].state.inverse_sum(); }, [&](int64_t first) { grad_input.start(first); },
          [&](int64_t r, int64_t, int64_t count, const auto& weight) { write_chunk<E>(count, grad_input.row(r), weight); },
          [&](int64_t count) { grad_input.finish(count); });
    for (int64_t r = 0; r < tile.rows; ++r)
      for (int64_t j = 0; j < problem.k; ++j) {
        const int64_t c = index_of(problem, tile, r, j);
        if (c >= begin && c < end)
          element_of<E>(problem, problem.grad_input, tile, r, c) = narrow<E>((grad(r, j) - sum[r]) * (output(r, j) * norm[r]));
        else if (c < 0 || c >= problem.classes)
          report_bad_row(problem, tile.number + r);
      }
  }

 private:
  T grad(int64_t r, int64_t j) const { return widen(element_of<R>(problem, problem.grad, tile, r, j)); }
  T output(int64_t r, int64_t j) const { return widen(element_of<R>(problem, problem.output, tile, r, j)); }
};

}  // namespace

int64_t topk_storage(const RowProblem& problem) {
  const bool forward = problem.k > 0 && problem.grad.data == nullptr;
  return forward ? Arena::bytes<Candidate<double>>(problem.k) : 0;
}

void topk_softmax(const RowProblem& problem, const Executor& executor) {
  visit_row_types(problem, [&](auto e, auto r) { run_rows<ForwardOp<decltype(e), decltype(r)>>(problem, executor); });
}

void topk_softmax_backward(const RowProblem& problem, const Executor& executor) {
  visit_row_types(problem, [&](auto e, auto r) { run_rows<BackwardOp<decltype(e), decltype(r)>>(problem, executor); });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
