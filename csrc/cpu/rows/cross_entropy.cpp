// Cross-entropy on the CPU, one loss a row, against class indices or probabilities.
//
// Both are the sum over c of a_c * -log p_c, with a_c = weight_c t_c and t the smoothed target, (1 - e) t + e / classes. Hence
// the gradient of the input is grad_loss (A p_c - a_c) with A the sum of a_c, and that of the lse is grad_lse p_c.
#include "short_rows.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

namespace {

template <class T>
struct Classes {
  const T* weight;   // null: ones
  T keep, spread;    // 1 - e and e / classes: how much of the target stays, and what every class gets
  explicit Classes(const RowProblem& problem)
      : weight(static_cast<const T*>(problem.weight)),
        keep(static_cast<T>(1 - problem.label_smoothing)),
        spread(problem.label_smoothing == 0 ? T(0)
                                            : static_cast<T>(problem.label_smoothing / static_cast<double>(problem.classes))) {}
  FLASH_ONLINE_INLINE T weight_of(int64_t c) const { return weight == nullptr ? T(1) : weight[c]; }
  // The weights of n classes from c on, in the lanes of E's elements; 0 past the n.
  template <class E>
  FLASH_ONLINE_INLINE Pair<T> weights(int64_t c, int64_t n) const {
    if (weight != nullptr) return relay<T, E>(load_some(weight + c, n, T(0)));
    return first_lanes<E>({broadcast(T(1)), broadcast(T(1))}, n);
  }
  // a_c of n classes from c on, of target probabilities t.
  template <class E>
  FLASH_ONLINE_INLINE Pair<T> shares(int64_t c, int64_t n, Pair<T> t) const {
    const Pair<T> w = weights<E>(c, n);
    return {w.a * (keep * t.a + spread), w.b * (keep * t.b + spread)};
  }
};

template <class T>
double sum_of_weights(const RowProblem& problem) {
  const T* weight = static_cast<const T*>(problem.weight);
  double sum = weight == nullptr ? static_cast<double>(problem.classes) : 0;
  for (int64_t c = 0; weight != nullptr && c < problem.classes; ++c) sum += weight[c];
  return sum;
}

constexpr int64_t kIgnored = -1;

// The row's class, or kIgnored, also for one that is out of range, which is reported.
FLASH_ONLINE_INLINE int64_t class_of(const RowProblem& problem, int64_t row) {
  const int64_t target = problem.target[row];
  if (target == problem.ignore_index) return kIgnored;
  if (target >= 0 && target < problem.classes) return target;
  report_bad_row(problem, row);
  return kIgnored;
}

struct Shares {
  double sum = 0, score_sum = 0;  // of a_c and of a_c x_c; with class indices, of weight_c and weight_c x_c
  void add(const Shares& other) {
    sum += other.sum;
    score_sum += other.score_sum;
  }
};

template <class T>
struct LossPartial {
  RowState<T> state;
  Shares shares;
};

// Adds what a chunk of scores x has; share(i, n) is a pair of the a_c.
template <class E, class Share>
FLASH_ONLINE_INLINE void add_shares(const E* x, int64_t count, const Share& share, Shares& to) {
  WideSum shares, scores;
  const auto add = [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const auto score = load_some(x + i, n, Accumulator<E>(0)), a = share(i, n);
    shares.add(a.a);
    shares.add(a.b);
    scores.add_product(a.a, score.a);
    scores.add_product(a.b, score.b);
  };
  int64_t i = 0;
  for (; i + kPair<E> <= count; i += kPair<E>) add(i, kPair<E>);
  if (i < count) add(i, count - i);
  to.add({shares.total(), scores.total()});
}

template <class E>
struct ForwardOp : RowOp {
  using T = Accumulator<E>;
  using Partial = LossPartial<T>;

  const RowProblem& problem;
  const Tile tile;
  const Classes<T> classes;
  Weights<E, Weighing::kSum> weights;

  ForwardOp(const RowProblem& problem, const Tile& tile, Arena& arena, bool)
      : problem(problem), tile(tile), classes(problem), weights(problem, tile, arena, false) {}
  static void merge(Partial& partial, const Partial& other) {
    join(partial.state, other.state);
    partial.shares.add(other.shares);
  }

 protected:
  void finish_row(int64_t r, Partial& partial, double loss, T weight) {
    const int64_t row = tile.number + r;
    static_cast<T*>(problem.loss)[row] = static_cast<T>(loss);
    static_cast<T*>(problem.row_weight)[row] = weight;
    settle_infinite<E>(problem, tile, r, partial.state);
    static_cast<T*>(problem.lse)[row] = partial.state.lse();
  }
};

template <class E>
struct IndexForwardOp : ForwardOp<E> {
  using Base = ForwardOp<E>;
  using Base::Base;
  using typename Base::Partial;
  using typename Base::T;

  void first(int64_t begin, int64_t end, Partial* partial) {
    const bool smooth = this->classes.spread != T(0);
    Shares shares[kTileRows];  // of this segment, summed apart as where threads share the row
    this->weights.absorb(
        begin, end, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r, const E* x, int64_t first, int64_t count, double, T) {
          const auto weight = [&](int64_t i, int64_t n) { return this->classes.template weights<E>(first + i, n); };
          if (smooth) add_shares(x, count, weight, shares[r]);
        },
        NoResult());
    for (int64_t r = 0; r < this->tile.rows; ++r) partial[r].shares.add(shares[r]);
  }
  void finish(Partial* partial) {
    for (int64_t r = 0; r < this->tile.rows; ++r) {
      const int64_t target = class_of(this->problem, this->tile.number + r);
      const RowState<T>& state = partial[r].state;
      double loss = 0;
      T weight = T(0);
      if (target != kIgnored) {
        weight = this->classes.weight_of(target);
        const T x = widen(element_of<E>(this->problem, this->problem.input, this->tile, r, target));
        const double log_sum = FastNatural::log(static_cast<double>(state.sum));
        loss = static_cast<double>(this->classes.keep) * weight * (log_sum - (x - pivot(state.max)));
        if (this->classes.spread != T(0))
          loss += this->classes.spread * (partial[r].shares.sum * (state.max + log_sum) - partial[r].shares.score_sum);
      }
      this->finish_row(r, partial[r], loss, weight);
    }
  }
};

template <class E>
struct ProbabilityForwardOp : ForwardOp<E> {
  using Base = ForwardOp<E>;
  using typename Base::Partial;
  using typename Base::T;

  Chunks<E, const void*> target;

  ProbabilityForwardOp(const RowProblem& problem, const Tile& tile, Arena& arena, bool keep)
      : Base(problem, tile, arena, keep), target(problem, problem.target_probabilities, tile, arena) {}
  void first(int64_t begin, int64_t end, Partial* partial) {
    Shares shares[kTileRows];  // of this segment, as above
    this->weights.absorb(
        begin, end, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r, const E* x, int64_t first, int64_t count, double, T) {
          target.read(first, count);
          const E* t = target.row(r);
          const auto share = [&](int64_t i, int64_t n) {
            return this->classes.template shares<E>(first + i, n, load_some(t + i, n, T(0)));
          };
          add_shares(x, count, share, shares[r]);
        },
        NoResult());
    for (int64_t r = 0; r < this->tile.rows; ++r) partial[r].shares.add(shares[r]);
  }
  void finish(Partial* partial) {
    for (int64_t r = 0; r < this->tile.rows; ++r) {
      const RowState<T>& state = partial[r].state;
      const double lse = state.max + FastNatural::log(static_cast<double>(state.sum));
      this->finish_row(r, partial[r], partial[r].shares.sum * lse - partial[r].shares.score_sum, T(1));
    }
  }
};

// What the gradient of a row's input is made of: grad_input_c = scale p_c - spread weight_c, and less `direct` at the target.
template <class T>
struct RowGradient {
  T scale = T(0), spread = T(0), direct = T(0);
  int64_t target = kIgnored;
  bool zero = true;  // not 0 * p: the logits of an ignored row may hold anything
};

template <class T>
FLASH_ONLINE_INLINE T grad_lse_of(const RowProblem& problem, int64_t row) {
  return problem.grad_lse == nullptr ? T(0) : static_cast<const T*>(problem.grad_lse)[row];
}

template <class E>
constexpr Weighing kGradientWeighing = sizeof(E) == 2 ? Weighing::kRounded : Weighing::kExact;

template <class E>
struct IndexBackwardOp : RowOp {
  using T = Accumulator<E>;
  struct Partial {
    RowState<T> state;
  };
  static constexpr bool kSecond = true;

  const Tile tile;
  const Classes<T> classes;
  RowGradient<T> gradient[kTileRows];
  bool zero = true;  // all rows of the tile
  Weights<E, kGradientWeighing<E>> weights;
  Chunks<E, void*> grad_input;

  IndexBackwardOp(const RowProblem& problem, const Tile& tile, Arena& arena, bool keep, double weight_sum)
      : tile(tile),
        classes(problem),
        weights(problem, tile, arena, keep),
        grad_input(problem, problem.grad_input, tile, arena) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      const int64_t row = tile.number + r, target = class_of(problem, row);
      RowGradient<T>& g = gradient[r];
      g.target = target;
      g.scale = grad_lse_of<T>(problem, row);
      if (target != kIgnored) {
        const T grad_loss = static_cast<const T*>(problem.grad_loss)[row];
        g.direct = grad_loss * (classes.keep * classes.weight_of(target));
        g.scale += g.direct;
        if (classes.spread != T(0)) {  // not 0 * an infinite grad_loss
          g.spread = grad_loss * classes.spread;
          g.scale += g.spread * static_cast<T>(weight_sum);
        }
      }
      g.zero = target == kIgnored && g.scale == T(0);
      zero &= g.zero;
    }
  }
  void first(int64_t begin, int64_t end, Partial* partial) {
    if (!zero) weights.absorb(begin, end, [&](int64_t r) -> auto& { return partial[r].state; }, nothing_also, grad_input);
  }
  static void merge(Partial& partial, const Partial& other) { join(partial.state, other.state); }
  void finish(Partial*) {}
  void second(int64_t begin, int64_t end, const Partial* partial) {
    if (zero) {
      for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
        grad_input.start(first);
        for (int64_t r = 0; r < tile.rows; ++r) write_zeros(grad_input.row(r), count);
        grad_input.finish(count);
      });
      return;
    }
    weights.write(
        begin, end, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r) { return gradient[r].scale * partial[r].state.inverse_sum(); },
        [&](int64_t first) { grad_input.start(first); },
        [&](int64_t r, int64_t first, int64_t count, const auto& weight) {
          const RowGradient<T>& g = gradient[r];
          E* to = grad_input.row(r);
          if (g.zero) return write_zeros(to, count);
          if (g.spread == T(0)) return write_row(to, first, count, g, weight);
          const auto smoothed = [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            Pair<T> pair = weight(i, n);
            const Pair<T> w = classes.template weights<E>(first + i, n);
            pair.a -= g.spread * w.a;
            pair.b -= g.spread * w.b;
            return pair;
          };
          write_row(to, first, count, g, smoothed);
        },
        [&](int64_t count) { grad_input.finish(count); });
  }

 private:
  static void write_zeros(E* to, int64_t count) {
    for (int64_t c = 0; c < count; ++c) to[c] = E{};
  }
  // The chunk, then the pair that holds the target once more.
  template <class F>
  static FLASH_ONLINE_INLINE void write_row(E* to, int64_t first, int64_t count, const RowGradient<T>& g, const F& f) {
    write_chunk<E>(count, to, f);
    const int64_t target = g.target - first;
    if (g.target == kIgnored || target < 0 || target >= count) return;
    const int64_t i = target / kPair<E> * kPair<E>, n = count - i < kPair<E> ? count - i : kPair<E>;
    const Pair<T> lane = lane_numbers<E>();
    const T here = static_cast<T>(target - i);
    Pair<T> pair = f(i, n);
    pair.a -= lane.a == here ? broadcast(g.direct) : Vector<T>{};
    pair.b -= lane.b == here ? broadcast(g.direct) : Vector<T>{};
    store_some(to + i, n, pair);
  }
};

template <class E>
struct ProbabilityBackwardOp : RowOp {
  using T = Accumulator<E>;
  struct Partial {
    RowState<T> state;
    double share = 0;
  };
  static constexpr bool kSecond = true;

  const RowProblem& problem;
  const Tile tile;
  const Classes<T> classes;
  Weights<E, kGradientWeighing<E>> weights;
  Chunks<E, const void*> target;
  Chunks<E, void*> grad_input, grad_target;

  ProbabilityBackwardOp(const RowProblem& problem, const Tile& tile, Arena& arena, bool keep, double)
      : problem(problem),
        tile(tile),
        classes(problem),
        weights(problem, tile, arena, keep),
        target(problem, problem.target_probabilities, tile, arena),
        grad_input(problem, problem.grad_input, tile, arena),
        grad_target(problem, problem.grad_target, tile, arena) {}
  void first(int64_t begin, int64_t end, Partial* partial) {
    double shares[kTileRows] = {};  // of this segment, as above
    weights.absorb(
        begin, end, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r, const E*, int64_t first, int64_t count, double, T) {
          target.read(first, count);
          const E* t = target.row(r);
          WideSum sum;
          for (int64_t i = 0; i < count; i += kPair<E>) {
            const int64_t n = count - i < kPair<E> ? count - i : kPair<E>;
            const Pair<T> share = classes.template shares<E>(first + i, n, load_some(t + i, n, T(0)));
            sum.add(share.a);
            sum.add(share.b);
          }
          shares[r] += sum.total();
        },
        grad_input);
    for (int64_t r = 0; r < tile.rows; ++r) partial[r].share += shares[r];
  }
  static void merge(Partial& partial, const Partial& other) {
    join(partial.state, other.state);
    partial.share += other.share;
  }
  void finish(Partial*) {}
  void second(int64_t begin, int64_t end, const Partial* partial) {
    const auto grad_loss = [&](int64_t r) { return static_cast<const T*>(problem.grad_loss)[tile.number + r]; };
    weights.write(
        begin, end, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r) {
          const T scale = grad_loss(r) * static_cast<T>(partial[r].share) + grad_lse_of<T>(problem, tile.number + r);
          return scale * partial[r].state.inverse_sum();
        },
        [&](int64_t first) {
          target.read(first, problem.classes - first < kChunk ? problem.classes - first : kChunk);
          grad_input.start(first);
        },
        [&](int64_t r, int64_t first, int64_t count, const auto& weight) {
          const T grad = grad_loss(r);
          const E* t = target.row(r);
          write_chunk<E>(count, grad_input.row(r), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            Pair<T> pair = weight(i, n);
            const Pair<T> share = classes.template shares<E>(first + i, n, load_some(t + i, n, T(0)));
            pair.a -= grad * share.a;
            pair.b -= grad * share.b;
            return pair;
          });
        },
        [&](int64_t count) { grad_input.finish(count); });
    if (problem.grad_target.data != nullptr) write_grad_target(begin, end, partial);
  }

 private:
  // grad_target_c = grad_loss keep weight_c * -log p_c.
  void write_grad_target(int64_t begin, int64_t end, const Partial* partial) {
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      weights.input().read(first, count);
      grad_target.start(first);
      for (int64_t r = 0; r < tile.rows; ++r) {
        const RowState<T>& state = partial[r].state;
        const T grad = static_cast<const T*>(problem.grad_loss)[tile.number + r];
        const double log_sum = FastNatural::log(static_cast<double>(state.sum));
        const T max = static_cast<T>(pivot(state.max));
        // The weights' maximum may be no number of type T: what rounding it drops goes to the logarithm.
        const T low = static_cast<T>(log_sum + (pivot(state.max) - max));
        const E* x = weights.input().row(r);
        write_chunk<E>(count, grad_target.row(r), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
          const Pair<T> score = load_some(x + i, n, T(0)), w = classes.template weights<E>(first + i, n);
          return Pair<T>{grad * (classes.keep * w.a) * (low - (score.a - max)),
                         grad * (classes.keep * w.b) * (low - (score.b - max))};
        });
      }
      grad_target.finish(count);
    });
  }
};

// Short rows, where every class counts the same: a row a lane.
FLASH_ONLINE_INLINE bool is_short_and_plain(const RowProblem& problem) {
  return is_short(problem) && problem.target != nullptr && problem.weight == nullptr && problem.label_smoothing == 0;
}

template <class E>
void short_forward(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  for_each_block<T>(problem, executor, [&](const Block& block) {
    Vector<T> x[kShort], loss = {}, weight = {};
    load_block<E>(problem, problem.input, block, x);
    const auto state = absorb_block<E, Weighing::kSum, false>(problem.classes, x);
    double logs[kLanes<T>];
    log_sums<T>(state.sum, logs);
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t target = class_of(problem, block.number + r);
      if (target == kIgnored) continue;
      loss[r] = static_cast<T>(logs[r] - (static_cast<double>(x[target][r]) - pivot(static_cast<double>(state.max[r]))));
      weight[r] = T(1);
    }
    store_numbers<T>(problem.loss, block, loss);
    store_numbers<T>(problem.row_weight, block, weight);
    store_numbers<T>(problem.lse, block, lse_of<T>(problem.classes, x, state.max, logs));
  });
}

template <class E>
void short_backward(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  for_each_block<T>(problem, executor, [&](const Block& block) {
    Vector<T> x[kShort], direct = {}, scale = {}, target_class = {};
    const Vector<T> grad_loss = load_numbers<T>(problem.grad_loss, block);
    if (problem.grad_lse != nullptr) scale = load_numbers<T>(problem.grad_lse, block);
    for (int64_t r = 0; r < kLanes<T>; ++r) {
      const int64_t target = r < block.rows ? class_of(problem, block.number + r) : kIgnored;
      target_class[r] = static_cast<T>(target);
      if (target != kIgnored) direct[r] = grad_loss[r];
    }
    scale += direct;
    const auto zero = (target_class == static_cast<T>(kIgnored)) & (scale == T(0));  // whatever the logits hold
    load_block<E>(problem, problem.input, block, x);
    const Vector<T> factor = scale * absorb_block<E, kGradientWeighing<E>, true>(problem.classes, x).inverse_sum();
    for (int64_t c = 0; c < problem.classes; ++c) {
      const Vector<T> gradient = x[c] * factor - (target_class == static_cast<T>(c) ? direct : Vector<T>{});
      x[c] = zero ? Vector<T>{} : gradient;
    }
    store_block<E>(problem, problem.grad_input, block, x);
  });
}

}  // namespace

void cross_entropy(const RowProblem& problem, const Executor& executor) {
  visit_floating<Float16, BFloat16>(problem.dtype, [&](auto type) {
    using E = typename decltype(type)::type;
    if (is_short_and_plain(problem)) return short_forward<E>(problem, executor);
    if (problem.target != nullptr)
      run_rows<IndexForwardOp<E>>(problem, executor);
    else
      run_rows<ProbabilityForwardOp<E>>(problem, executor);
  });
}

void cross_entropy_backward(const RowProblem& problem, const Executor& executor) {
  const double weight_sum = problem.dtype == DType::kFloat64 ? sum_of_weights<double>(problem) : sum_of_weights<float>(problem);
  visit_floating<Float16, BFloat16>(problem.dtype, [&](auto type) {
    using E = typename decltype(type)::type;
    if (is_short_and_plain(problem)) return short_backward<E>(problem, executor);
    if (problem.target != nullptr)
      run_rows<IndexBackwardOp<E>>(problem, executor, weight_sum);
    else
      run_rows<ProbabilityBackwardOp<E>>(problem, executor, weight_sum);
  });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
