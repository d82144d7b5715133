// Cross-entropy on the CPU, one loss per row, against class indices or probabilities.
//
// In either case the loss is the sum over c of a_c * -log p_c, where a_c = weight_c t_c and t = (1 - e) s + e / classes is the
// target s smoothed by e. The gradient of the input is therefore grad_loss (A p_c - a_c) + grad_lse p_c, where A is the sum of
// all a_c. The entropy of a row's softmax adds -grad_entropy p_c (log p_c + entropy).
#include "short_rows.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

namespace {

template <class T>
struct ClassWeights {
  const T* weight;  // null: ones
  T target_factor, uniform_share;  // 1 - e and e / classes: the factor of the target, and the share of every class
  explicit ClassWeights(const RowProblem& problem)
      : weight(static_cast<const T*>(problem.weight)),
        target_factor(static_cast<T>(1 - problem.label_smoothing)),
        uniform_share(problem.label_smoothing == 0
                          ? T(0)
                          : static_cast<T>(problem.label_smoothing / static_cast<double>(problem.classes))) {}
  FLASH_ONLINE_INLINE T weight_of(int64_t c) const { return weight == nullptr ? T(1) : weight[c]; }
  // The weights of n classes from c on, in the lane order of E; 0 in the lanes after them.
  template <class E>
  FLASH_ONLINE_INLINE Pair<T> weights(int64_t c, int64_t n) const {
    if (weight != nullptr) return relayout_lanes<T, E>(load_partial(weight + c, n, T(0)));
    return first_lanes<E>({broadcast(T(1)), broadcast(T(1))}, n);
  }
  // a_c for n classes from c on, with the target probabilities t.
  template <class E>
  FLASH_ONLINE_INLINE Pair<T> weighted_targets(int64_t c, int64_t n, Pair<T> t) const {
    const Pair<T> w = weights<E>(c, n);
    return {rounded_product(w.a * (target_factor * t.a + uniform_share)),
            rounded_product(w.b * (target_factor * t.b + uniform_share))};
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

// The class of the row, or kIgnored. A class that is out of range is reported and ignored.
FLASH_ONLINE_INLINE int64_t class_of(const RowProblem& problem, int64_t row) {
  const int64_t target = problem.target[row];
  if (target == problem.ignore_index) return kIgnored;
  if (target >= 0 && target < problem.classes) return target;
  report_bad_row(problem, row);
  return kIgnored;
}

// The sums of a_c and of a_c (x_c - base); with class indices, of weight_c instead of a_c. The base is 0 or the row's largest
// score so far: a common offset of the scores may be too large for a double to hold their differences.
struct TargetSums {
  double sum = 0, score_sum = 0, base = lowest<double>();  // lowest: no score yet
  void add(const TargetSums& other) {
    if (other.base == lowest<double>()) return;
    if (base == lowest<double>()) {
      *this = other;
      return;
    }
    const double to = other.base > base ? other.base : base;
    score_sum += other.score_sum - rounded_product(sum * (to - base)) - rounded_product(other.sum * (to - other.base));
    sum += other.sum;
    base = to;
  }
  // The sum of a_c (max + log_sum - x_c).
  double negative_log_probability(double max, double log_sum) const {
    return rounded_product(sum * (log_sum + (max - base))) - score_sum;
  }
};

template <class T>
struct LossPartial {
  RowState<T> state;
  TargetSums shares;
  OnlineEntropy<double, FastNatural> entropy;  // if it is wanted
};

template <class E>
using EntropyOfLanes = OnlineEntropy<Vector<Accumulator<E>>, BaseFor<Accumulator<E>, E, ExpAccuracy::kExact>>;

template <class E>
FLASH_ONLINE_INLINE void add_to_entropy(EntropyOfLanes<E>& lanes, Vector<Accumulator<E>> score) {
  const auto weight = lanes.weight(score);
  lanes.add(weight, weight * lanes.distance(score));
}

// Adds a chunk of scores, whose largest is `max`. The loss has computed their weights, but not exactly, and an entropy may be
// as small as these errors. So the weights are computed again, while the chunk is in the cache.
template <class E>
void add_entropy(const E* x, int64_t count, double max, OnlineEntropy<double, FastNatural>& to) {
  using T = Accumulator<E>;
  EntropyOfLanes<E> a, b;
  a.max = b.max = broadcast(static_cast<T>(max));
  for (int64_t i = 0; i < count; i += kPair<E>) {
    const Pair<T> score = load_partial(x + i, count - i < kPair<E> ? count - i : kPair<E>, lowest<T>());
    add_to_entropy<E>(a, score.a);
    add_to_entropy<E>(b, score.b);
  }
  OnlineEntropy<double, FastNatural> chunk;
  chunk.max = max;
  chunk.add(sum_of_lanes<T>(a.sum + b.sum), sum_of_lanes<T>(a.products + b.products));
  to.merge(chunk);
}

// Adds the sums over a chunk of scores x, of which `max` is the largest; share(i, n) returns a pair of a_c.
template <bool kFar, class E, class Share>
FLASH_ONLINE_INLINE void add_target_sums_from(const E* x, int64_t count, double base, const Share& share, TargetSums& to) {
  DoubleSum shares, scores;
  const auto add = [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    const auto score = load_partial(x + i, n, Accumulator<E>(0)), a = share(i, n);
    shares.add(a.a);
    shares.add(a.b);
    if constexpr (kFar) {
      scores.add_product(a.a, score.a, base);
      scores.add_product(a.b, score.b, base);
    } else {
      scores.add_product(a.a, score.a);
      scores.add_product(a.b, score.b);
    }
  };
  int64_t i = 0;
  for (; i + kPair<E> <= count; i += kPair<E>) add(i, kPair<E>);
  if (i < count) add(i, count - i);
  to.add({shares.total(), scores.total(), base});
}

template <class E, class Share>
FLASH_ONLINE_INLINE void add_target_sums(const E* x, int64_t count, double max, const Share& share, TargetSums& to) {
  constexpr double kNear = 1024;  // a double has 12 digits after the point of such scores
  if (std::abs(max) > kNear && std::abs(max) < -lowest<double>())
    add_target_sums_from<true>(x, count, max, share, to);
  else
    add_target_sums_from<false>(x, count, 0, share, to);
}

template <class E>
struct ForwardOp : RowOp {
  using T = Accumulator<E>;
  using Partial = LossPartial<T>;

  const RowProblem& problem;
  const RowTile tile;
  const ClassWeights<T> classes;
  RowWeights<E, ExpAccuracy::kSum> weights;

  ForwardOp(const RowProblem& problem, const RowTile& tile, ScratchAllocator& allocator, bool)
      : problem(problem), tile(tile), classes(problem), weights(problem, tile, allocator, false) {}
  static void merge(Partial& partial, const Partial& other) {
    merge_states(partial.state, other.state);
    partial.shares.add(other.shares);
    partial.entropy.merge(other.entropy);
  }

 protected:
  // The sums over a segment, added by itself, as where threads share the row.
  struct SegmentSums {
    TargetSums shares[kMaxTileRows];
    OnlineEntropy<double, FastNatural> entropy[kMaxTileRows];
  };
  void add_segment(const SegmentSums& segment, Partial* partial) const {
    for (int64_t r = 0; r < tile.rows; ++r) {
      partial[r].shares.add(segment.shares[r]);
      if (problem.entropy != nullptr) partial[r].entropy.merge(segment.entropy[r]);
    }
  }
  void finish_row(int64_t r, Partial& partial, double loss, T weight) {
    const int64_t row = tile.first_row + r;
    if (problem.entropy != nullptr) static_cast<T*>(problem.entropy)[row] = static_cast<T>(partial.entropy.entropy());
    static_cast<T*>(problem.loss)[row] = static_cast<T>(loss);
    static_cast<T*>(problem.row_weight)[row] = weight;
    resolve_infinity<E>(problem, tile, r, partial.state);
    static_cast<T*>(problem.lse)[row] = partial.state.lse();
  }
};

template <class E>
struct IndexForwardOp : ForwardOp<E> {
  using Base = ForwardOp<E>;
  using Base::Base;
  using typename Base::Partial;
  using typename Base::T;

  void first_pass(int64_t begin, int64_t end, Partial* partial) {
    const bool smooth = this->classes.uniform_share != T(0);
    typename Base::SegmentSums segment;
    this->weights.absorb(
        begin, end, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r, const E* x, int64_t first, int64_t count, double max, T) {
          const auto weight = [&](int64_t i, int64_t n) { return this->classes.template weights<E>(first + i, n); };
          if (smooth) add_target_sums(x, count, max, weight, segment.shares[r]);
          if (this->problem.entropy != nullptr) add_entropy(x, count, max, segment.entropy[r]);
        },
        NoResult());
    this->add_segment(segment, partial);
  }
  void finish(Partial* partial) {
    for (int64_t r = 0; r < this->tile.rows; ++r) {
      const int64_t target = class_of(this->problem, this->tile.first_row + r);
      const RowState<T>& state = partial[r].state;
      double loss = 0;
      T weight = T(0);
      if (target != kIgnored) {
        weight = this->classes.weight_of(target);
        const T x = widen(element_of<E>(this->problem, this->problem.input, this->tile, r, target));
        const double log_sum = FastNatural::log(static_cast<double>(state.sum));
        loss = static_cast<double>(this->classes.target_factor) * weight * (log_sum - (x - pivot(state.max)));
        if (this->classes.uniform_share != T(0))
          loss += this->classes.uniform_share * partial[r].shares.negative_log_probability(state.max, log_sum);
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

  ProbabilityForwardOp(const RowProblem& problem, const RowTile& tile, ScratchAllocator& allocator, bool keep)
      : Base(problem, tile, allocator, keep), target(problem, problem.target_probabilities, tile, allocator) {}
  void first_pass(int64_t begin, int64_t end, Partial* partial) {
    typename Base::SegmentSums segment;
    this->weights.absorb(
        begin, end, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r, const E* x, int64_t first, int64_t count, double max, T) {
          target.read(first, count);
          const E* t = target.row(r);
          const auto share = [&](int64_t i, int64_t n) {
            return this->classes.template weighted_targets<E>(first + i, n, load_partial(t + i, n, T(0)));
          };
          add_target_sums(x, count, max, share, segment.shares[r]);
          if (this->problem.entropy != nullptr) add_entropy(x, count, max, segment.entropy[r]);
        },
        NoResult());
    this->add_segment(segment, partial);
  }
  void finish(Partial* partial) {
    for (int64_t r = 0; r < this->tile.rows; ++r) {
      const RowState<T>& state = partial[r].state;
      const double log_sum = FastNatural::log(static_cast<double>(state.sum));
      this->finish_row(r, partial[r], partial[r].shares.negative_log_probability(state.max, log_sum), T(1));
    }
  }
};

// The gradient of a row's input is scale p_c - (spread weight_c + target_grad at the target). The scale is grad_lse plus the
// sum of the parentheses over all classes: with one class that sum is the same expression, and the difference is 0.
template <class T>
struct RowGradient {
  T scale = T(0), spread = T(0), target_grad = T(0);
  int64_t target = kIgnored;
  bool zero = true;  // the gradient is 0, not 0 * p: the logits of an ignored row may hold anything
};

template <class T>
FLASH_ONLINE_INLINE T grad_lse_of(const RowProblem& problem, int64_t row) {
  return problem.grad_lse == nullptr ? T(0) : static_cast<const T*>(problem.grad_lse)[row];
}

// The gradient of a row's entropy as a factor of p_c: grad (mean - (x_c - max)), where mean is that of x - max under p.
template <class T>
struct EntropyGradient {
  T grad = T(0), mean = T(0), max = T(0);
  EntropyGradient() = default;
  EntropyGradient(const RowProblem& problem, int64_t row, const RowState<T>& state)
      : grad(static_cast<const T*>(problem.grad_entropy)[row]),
        mean(
            static_cast<T>(FastNatural::log(static_cast<double>(state.sum)) - static_cast<const T*>(problem.row_entropy)[row])),
        max(static_cast<T>(pivot(state.max))) {}
  FLASH_ONLINE_INLINE Vector<T> operator()(Vector<T> score) const { return grad * (mean - distance_below(score - max)); }
  FLASH_ONLINE_INLINE Pair<T> operator()(const Pair<T>& score) const { return {(*this)(score.a), (*this)(score.b)}; }
};

template <class T>
FLASH_ONLINE_INLINE T grad_entropy_of(const RowProblem& problem, int64_t row) {
  return problem.grad_entropy == nullptr ? T(0) : static_cast<const T*>(problem.grad_entropy)[row];
}

template <class E>
constexpr ExpAccuracy kGradientAccuracy = sizeof(E) == 2 ? ExpAccuracy::kRounded : ExpAccuracy::kExact;

template <class E>
struct IndexBackwardOp : RowOp {
  using T = Accumulator<E>;
  struct Partial {
    RowState<T> state;
  };
  static constexpr bool kHasSecondPass = true;

  const RowProblem& problem;
  const RowTile tile;
  const ClassWeights<T> classes;
  RowGradient<T> gradient[kMaxTileRows];
  bool zero = true;  // whether the gradients of all rows of the tile are 0
  RowWeights<E, kGradientAccuracy<E>> weights;
  Chunks<E, void*> grad_input;

  IndexBackwardOp(const RowProblem& problem, const RowTile& tile, ScratchAllocator& allocator, bool keep, double weight_sum)
      : problem(problem),
        tile(tile),
        classes(problem),
        weights(problem, tile, allocator, keep),
        grad_input(problem, problem.grad_input, tile, allocator) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      const int64_t row = tile.first_row + r, target = class_of(problem, row);
      RowGradient<T>& g = gradient[r];
      g.target = target;
      g.scale = grad_lse_of<T>(problem, row);
      if (target != kIgnored) {
        const T grad_loss = static_cast<const T*>(problem.grad_loss)[row];
        g.target_grad = grad_loss * (classes.target_factor * classes.weight_of(target));
        g.scale += g.target_grad;
        if (classes.uniform_share != T(0)) {  // an infinite grad_loss must not be multiplied by 0
          g.spread = grad_loss * classes.uniform_share;
          g.scale += g.spread * static_cast<T>(weight_sum);
        }
      }
      g.zero = target == kIgnored && g.scale == T(0) && grad_entropy_of<T>(problem, row) == T(0);
      zero &= g.zero;
      if (problem.classes == 1) {  // the loss is 0 whatever the logit: only the gradient of lse is left
        const T of_loss = g.target_grad + g.spread;
        g.scale = grad_lse_of<T>(problem, row) + (of_loss - of_loss);  // NaN if grad_loss is infinite
        g.target_grad = g.spread = T(0);
      }
    }
  }
  void first_pass(int64_t begin, int64_t end, Partial* partial) {
    if (!zero) weights.absorb(begin, end, [&](int64_t r) -> auto& { return partial[r].state; }, no_chunk_hook, grad_input);
  }
  static void merge(Partial& partial, const Partial& other) { merge_states(partial.state, other.state); }
  void finish(Partial*) {}
  void second_pass(int64_t begin, int64_t end, const Partial* partial) {
    if (zero) {
      for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
        grad_input.begin_write(first);
        for (int64_t r = 0; r < tile.rows; ++r) write_zeros(grad_input.row(r), count);
        grad_input.finish_write(count);
      });
      return;
    }
    const bool entropy = problem.grad_entropy != nullptr;
    EntropyGradient<T> of_entropy[kMaxTileRows];
    for (int64_t r = 0; entropy && r < tile.rows; ++r)
      of_entropy[r] = EntropyGradient<T>(problem, tile.first_row + r, partial[r].state);
    weights.write(
        begin, end, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r) { return (entropy ? T(1) : gradient[r].scale) * partial[r].state.inverse_sum(); },
        [&](int64_t first) {
          if (entropy) weights.input().read(first, end - first < kChunk ? end - first : kChunk);
          grad_input.begin_write(first);
        },
        [&](int64_t r, int64_t first, int64_t count, const auto& weight) {
          const RowGradient<T>& g = gradient[r];
          E* to = grad_input.row(r);
          if (g.zero) return write_zeros(to, count);
          if (entropy) {
            const E* x = weights.input().row(r);
            return write_row(to, first, count, g, [&](int64_t i, int64_t n, const Pair<T>& at_target) {
              const Pair<T> p = weight(i, n), w = classes.template weights<E>(first + i, n);
              const Pair<T> of = of_entropy[r](load_partial(x + i, n, T(0)));
              return Pair<T>{p.a * (g.scale + of.a) - (g.spread * w.a + at_target.a),
                             p.b * (g.scale + of.b) - (g.spread * w.b + at_target.b)};
            });
          }
          const auto plain = [&](int64_t i, int64_t n, const Pair<T>& at_target) __attribute__((always_inline)) {
            const Pair<T> pair = weight(i, n);
            return Pair<T>{pair.a - at_target.a, pair.b - at_target.b};
          };
          const auto smoothed = [&](int64_t i, int64_t n, const Pair<T>& at_target) __attribute__((always_inline)) {
            const Pair<T> pair = weight(i, n), w = classes.template weights<E>(first + i, n);
            return Pair<T>{pair.a - (g.spread * w.a + at_target.a), pair.b - (g.spread * w.b + at_target.b)};
          };
          if (g.spread == T(0))
            write_row(to, first, count, g, plain);
          else
            write_row(to, first, count, g, smoothed);
        },
        [&](int64_t count) { grad_input.finish_write(count); });
  }

 private:
  static void write_zeros(E* to, int64_t count) {
    for (int64_t c = 0; c < count; ++c) to[c] = E{};
  }
  // Writes the chunk, then the pair that holds the target once more; f(i, n, the target's gradient in its lane, else 0).
  template <class F>
  static FLASH_ONLINE_INLINE void write_row(E* to, int64_t first, int64_t count, const RowGradient<T>& g, const F& f) {
    write_chunk<E>(count, to, [&](int64_t i, int64_t n) __attribute__((always_inline)) { return f(i, n, Pair<T>{}); });
    const int64_t target = g.target - first;
    if (g.target == kIgnored || target < 0 || target >= count) return;
    const int64_t i = target / kPair<E> * kPair<E>, n = count - i < kPair<E> ? count - i : kPair<E>;
    const Pair<T> lane = lane_elements<E>();
    const T here = static_cast<T>(target - i);
    const Pair<T> at_target{lane.a == here ? broadcast(g.target_grad) : Vector<T>{},
                            lane.b == here ? broadcast(g.target_grad) : Vector<T>{}};
    store_partial(to + i, n, f(i, n, at_target));
  }
};

template <class E>
struct ProbabilityBackwardOp : RowOp {
  using T = Accumulator<E>;
  struct Partial {
    RowState<T> state;
    double share = 0;
  };
  static constexpr bool kHasSecondPass = true;

  const RowProblem& problem;
  const RowTile tile;
  const ClassWeights<T> classes;
  RowWeights<E, kGradientAccuracy<E>> weights;
  Chunks<E, const void*> target;
  Chunks<E, void*> grad_input, grad_target;

  ProbabilityBackwardOp(const RowProblem& problem, const RowTile& tile, ScratchAllocator& allocator, bool keep, double)
      : problem(problem),
        tile(tile),
        classes(problem),
        weights(problem, tile, allocator, keep),
        target(problem, problem.target_probabilities, tile, allocator),
        grad_input(problem, problem.grad_input, tile, allocator),
        grad_target(problem, problem.grad_target, tile, allocator) {}
  void first_pass(int64_t begin, int64_t end, Partial* partial) {
    double shares[kMaxTileRows] = {};  // each segment is summed by itself
    weights.absorb(
        begin, end, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r, const E*, int64_t first, int64_t count, double, T) {
          target.read(first, count);
          const E* t = target.row(r);
          DoubleSum sum;
          for (int64_t i = 0; i < count; i += kPair<E>) {
            const int64_t n = count - i < kPair<E> ? count - i : kPair<E>;
            const Pair<T> share = classes.template weighted_targets<E>(first + i, n, load_partial(t + i, n, T(0)));
            sum.add(share.a);
            sum.add(share.b);
          }
          shares[r] += sum.total();
        },
        grad_input);
    for (int64_t r = 0; r < tile.rows; ++r) partial[r].share += shares[r];
  }
  static void merge(Partial& partial, const Partial& other) {
    merge_states(partial.state, other.state);
    partial.share += other.share;
  }
  void finish(Partial*) {}
  void second_pass(int64_t begin, int64_t end, const Partial* partial) {
    const auto grad_loss = [&](int64_t r) { return static_cast<const T*>(problem.grad_loss)[tile.first_row + r]; };
    const bool entropy = problem.grad_entropy != nullptr;
    weights.write(
        begin, end, [&](int64_t r) -> auto& { return partial[r].state; },
        [&](int64_t r) { return partial[r].state.inverse_sum(); },
        [&](int64_t first) {
          const int64_t count = problem.classes - first < kChunk ? problem.classes - first : kChunk;
          target.read(first, count);
          if (entropy) weights.input().read(first, count);
          grad_input.begin_write(first);
        },
        [&](int64_t r, int64_t first, int64_t count, const auto& weight) {
          const T grad = grad_loss(r), grad_lse = grad_lse_of<T>(problem, tile.first_row + r);
          const T sum = static_cast<T>(partial[r].share);  // of the shares
          const E* t = target.row(r);
          const E* x = entropy ? weights.input().row(r) : nullptr;
          const auto of_entropy =
              entropy ? EntropyGradient<T>(problem, tile.first_row + r, partial[r].state) : EntropyGradient<T>();
          write_chunk<E>(count, grad_input.row(r), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
            const Pair<T> p = weight(i, n);
            const Pair<T> share = classes.template weighted_targets<E>(first + i, n, load_partial(t + i, n, T(0)));
            Pair<T> z{grad * (sum * p.a - share.a) + grad_lse * p.a, grad * (sum * p.b - share.b) + grad_lse * p.b};
            if (entropy) {
              const Pair<T> of = of_entropy(load_partial(x + i, n, T(0)));
              z.a += of.a * p.a;
              z.b += of.b * p.b;
            }
            return z;
          });
        },
        [&](int64_t count) { grad_input.finish_write(count); });
    if (problem.grad_target.data != nullptr) write_grad_target(begin, end, partial);
  }

 private:
  // grad_target_c = grad_loss * target_factor * weight_c * -log p_c.
  void write_grad_target(int64_t begin, int64_t end, const Partial* partial) {
    for_each_chunk(begin, end, [&](int64_t first, int64_t count) {
      weights.input().read(first, count);
      grad_target.begin_write(first);
      for (int64_t r = 0; r < tile.rows; ++r) {
        const RowState<T>& state = partial[r].state;
        const T grad = static_cast<const T*>(problem.grad_loss)[tile.first_row + r];
        const T max = static_cast<T>(pivot(state.max));
        const T log_sum = static_cast<T>(FastNatural::log(static_cast<double>(state.sum)));
        const E* x = weights.input().row(r);
        write_chunk<E>(count, grad_target.row(r), [&](int64_t i, int64_t n) __attribute__((always_inline)) {
          const Pair<T> score = load_partial(x + i, n, T(0)), w = classes.template weights<E>(first + i, n);
          return Pair<T>{grad * (classes.target_factor * w.a) * (log_sum - (score.a - max)),
                         grad * (classes.target_factor * w.b) * (log_sum - (score.b - max))};
        });
      }
      grad_target.finish_write(count);
    });
  }
};

// Short rows in which every class has the same weight: one row per lane.
FLASH_ONLINE_INLINE bool is_short_and_plain(const RowProblem& problem) {
  return is_short(problem) && problem.target != nullptr && problem.weight == nullptr && problem.label_smoothing == 0;
}

template <class E>
void short_forward(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  for_each_row_block<T>(problem, executor, [&](const RowBlock& block) {
    Vector<T> x[kMaxShortClasses], loss = {}, weight = {};
    load_block<E>(problem, problem.input, block, x);
    const auto state = absorb_block<E, ExpAccuracy::kSum, false>(problem.classes, x);
    double logs[kLanes<T>];
    log_sums<T>(state.sum, logs);
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t target = class_of(problem, block.first_row + r);
      if (target == kIgnored) continue;
      loss[r] = static_cast<T>(logs[r] - (static_cast<double>(x[target][r]) - pivot(static_cast<double>(state.max[r]))));
      weight[r] = T(1);
    }
    store_per_row<T>(problem.loss, block, loss);
    store_per_row<T>(problem.row_weight, block, weight);
    store_per_row<T>(problem.lse, block, lse_of<T>(problem.classes, x, state.max, logs));
    if (problem.entropy == nullptr) return;
    EntropyOfLanes<E> lanes;
    lanes.max = state.max;
    for (int64_t c = 0; c < problem.classes; ++c) add_to_entropy<E>(lanes, x[c]);
    Vector<T> entropy = {};
    log_sums<T>(lanes.sum, logs);
    for (int64_t r = 0; r < block.rows; ++r) entropy[r] = static_cast<T>(logs[r] - lanes.products[r] / lanes.sum[r]);
    store_per_row<T>(problem.entropy, block, entropy);
  });
}

template <class E>
void short_backward(const RowProblem& problem, const Executor& executor) {
  using T = Accumulator<E>;
  for_each_row_block<T>(problem, executor, [&](const RowBlock& block) {
    Vector<T> x[kMaxShortClasses], target_grad = {}, scale = {}, target_class = {};
    const Vector<T> grad_loss = load_per_row<T>(problem.grad_loss, block);
    if (problem.grad_lse != nullptr) scale = load_per_row<T>(problem.grad_lse, block);
    for (int64_t r = 0; r < kLanes<T>; ++r) {
      const int64_t target = r < block.rows ? class_of(problem, block.first_row + r) : kIgnored;
      target_class[r] = static_cast<T>(target);
      if (target != kIgnored) target_grad[r] = grad_loss[r];
    }
    const Vector<T> grad_entropy = problem.grad_entropy == nullptr ? Vector<T>{} : load_per_row<T>(problem.grad_entropy, block);
    const auto zero =  // whatever the logits hold
        (target_class == static_cast<T>(kIgnored)) & (scale == T(0)) & (grad_entropy == T(0));
    if (problem.classes == 1) {  // as in IndexBackwardOp
      scale += target_grad - target_grad;
      target_grad = Vector<T>{};
    } else {
      scale += target_grad;
    }
    load_block<E>(problem, problem.input, block, x);
    Vector<T> scores[kMaxShortClasses];
    if (problem.grad_entropy != nullptr) std::copy_n(x, problem.classes, scores);
    const auto state = absorb_block<E, kGradientAccuracy<E>, true>(problem.classes, x);
    const Vector<T> factor = scale * state.inverse_sum();
    const auto write = [&](int64_t c, Vector<T> of_softmax) {
      const Vector<T> gradient = of_softmax - (target_class == static_cast<T>(c) ? target_grad : Vector<T>{});
      x[c] = zero ? Vector<T>{} : gradient;
    };
    if (problem.grad_entropy == nullptr) {
      for (int64_t c = 0; c < problem.classes; ++c) write(c, x[c] * factor);
    } else {
      double logs[kLanes<T>];
      log_sums<T>(state.sum, logs);
      Vector<T> mean = {};
      for (int64_t r = 0; r < block.rows; ++r)
        mean[r] = static_cast<T>(logs[r] - static_cast<const T*>(problem.row_entropy)[block.first_row + r]);
      for (int64_t c = 0; c < problem.classes; ++c) {
        const Vector<T> of_entropy = grad_entropy * (mean - distance_below(scores[c] - pivot(state.max)));
        write(c, x[c] * state.inverse_sum() * (scale + of_entropy));
      }
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
