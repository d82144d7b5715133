// The row operators in float64: rows of any strides and length, by one kind of row. A thread keeps its first elements in
// registers and reads the others again, from the caches mostly. The formulas are those of softmax.cu, logsumexp.cu,
// cross_entropy.cu and topk_backward.cu, without the care that float32's fewer digits take.
#include <algorithm>

#include "../../core/integer.h"
#include "../../core/online_softmax.h"
#include "../hw/check.cuh"
#include "../hw/launch.h"
#include "float64.h"

namespace flash_online::cuda::float64 {

namespace {

using State = OnlineSoftmax<double>;
constexpr double kRescaleThreshold = 4;  // how far above the running maximum a score may be before the sum is rescaled
constexpr int kKept = 4;  // elements that a thread keeps in registers
constexpr int64_t kLongRow = 512;  // classes from which a row gets a CTA

// ---- groups of threads that share a row ------------------------------------------------------------------------------------

struct Add {
  __device__ double operator()(double a, double b) const { return a + b; }
};
struct Max {
  __device__ double operator()(double a, double b) const { return ::fmax(a, b); }
};

// A butterfly: every lane gets the same bits, since both operations commute.
template <int kLanes = kWarpSize, class Op>
__device__ __forceinline__ double reduce_lanes(double x, Op op) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = op(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// A thread reads the row `row()` of its CTA's kRows, and of it the classes first(), first() + kStep, ... All threads of a CTA
// call reduce() together.
struct WarpPerRow {
  static constexpr int kThreads = 256, kRows = kThreads / kWarpSize, kStep = kWarpSize;
  __device__ static int row() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  __device__ static int first() { return static_cast<int>(threadIdx.x) % kWarpSize; }
  template <class Op>
  __device__ __forceinline__ static double reduce(double x, double, Op op) {
    return reduce_lanes(x, op);
  }
};

struct CtaPerRow {
  static constexpr int kThreads = 512, kRows = 1, kStep = kThreads;
  __device__ static int row() { return 0; }
  __device__ static int first() { return static_cast<int>(threadIdx.x); }
  template <class Op>
  __device__ __forceinline__ static double reduce(double x, double neutral, Op op) {
    constexpr int kWarps = kThreads / kWarpSize;
    __shared__ double partials[kWarps];
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    x = reduce_lanes(x, op);
    __syncthreads();  // the partials of the reduction before have been read
    if (lane == 0) partials[threadIdx.x / kWarpSize] = x;
    __syncthreads();
    return reduce_lanes(lane < kWarps ? partials[lane] : neutral, op);
  }
};

// Neighbouring rows are closer in memory than the classes of a row: a warp reads 32 rows side by side.
struct LanePerRow {
  static constexpr int kThreads = 256, kRows = kWarpSize, kStep = kThreads / kWarpSize;
  __device__ static int row() { return static_cast<int>(threadIdx.x) % kWarpSize; }
  __device__ static int first() { return static_cast<int>(threadIdx.x) / kWarpSize; }
  template <class Op>
  __device__ __forceinline__ static double reduce(double x, double, Op op) {
    __shared__ double partials[kThreads];
    __syncthreads();  // the partials of the reduction before have been read
    partials[threadIdx.x] = x;
    __syncthreads();
    x = partials[row()];
    for (int other = row() + kWarpSize; other < kThreads; other += kWarpSize) x = op(x, partials[other]);
    return x;
  }
};

// ---- rows ------------------------------------------------------------------------------------------------------------------

struct Coord {
  int64_t outer, inner, index;
  bool exists;
};

template <class T, class View>
__device__ __forceinline__ T* row_data(const View& view, const Coord& coord) {
  return static_cast<T*>(view.data) + coord.outer * view.stride[0] + coord.inner * view.stride[2];
}

template <class Group>
class Row {
 public:
  __device__ __forceinline__ Row(const RowProblem& problem, const ConstView3& view, const Coord& coord)
      : data_(row_data<const double>(view, coord)), stride_(view.stride[1]), classes_(coord.exists ? problem.classes : 0) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int64_t c = Group::first() + i * Group::kStep;
      kept_[i] = c < classes_ ? data_[c * stride_] : 0;
    }
  }
  // Calls f(class, element) for the thread's classes.
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) const {
#pragma unroll
    for (int i = 0; i < kKept; ++i)
      if (const int64_t c = Group::first() + i * Group::kStep; c < classes_) f(c, kept_[i]);
#pragma unroll 1
    for (int64_t c = Group::first() + kKept * Group::kStep; c < classes_; c += Group::kStep) f(c, data_[c * stride_]);
  }
  // The maximum and the sum of the whole row; every thread of the row gets them.
  __device__ __forceinline__ State state() const {
    State own;
    for_each([&](int64_t, double x) {
      if (x > own.max + kRescaleThreshold || own.max == lowest<double>()) own.raise_max(x == x ? x : own.max);
      own.add(own.weight(x));
    });
    State row;
    row.max = Group::reduce(own.max, lowest<double>(), Max{});
    row.sum = Group::reduce(own.sum * State::rescale(own.max, row.max), 0, Add{});
    return row;
  }
  // The sum of f(class, element).
  template <class F>
  __device__ __forceinline__ double sum(const F& f) const {
    double sum = 0;
    for_each([&](int64_t c, double x) { sum += f(c, x); });
    return Group::reduce(sum, 0, Add{});
  }
  // Writes f(class, element).
  template <class F>
  __device__ __forceinline__ void write(const MutableView3& view, const Coord& coord, const F& f) const {
    double* const to = row_data<double>(view, coord);
    for_each([&](int64_t c, double x) { to[c * view.stride[1]] = f(c, x); });
  }
  // The state for logsumexp: a row that holds +inf and no NaN has the lse +inf, though its sum is NaN.
  __device__ __forceinline__ State resolve_infinity(State state) const {
    const double nan = sum([](int64_t, double x) { return x != x ? 1.0 : 0.0; });
    if (state.max == -lowest<double>() && nan == 0) state.sum = 1;
    return state;
  }

 private:
  const double* data_;
  int64_t stride_, classes_;
  double kept_[kKept];
};

template <class Group>
__device__ __forceinline__ bool is_leader(const Coord& coord) {
  return coord.exists && Group::first() == 0;
}
__device__ __forceinline__ double row_value(const void* scalars, const Coord& coord) {
  return scalars && coord.exists ? static_cast<const double*>(scalars)[coord.index] : 0;
}

// ---- softmax ---------------------------------------------------------------------------------------------------------------

struct Softmax {
  template <class Group>
  __device__ static void run(const RowProblem& problem, const Coord& coord) {
    const Row<Group> row(problem, problem.input, coord);
    const State state = row.state();
    const double max = pivot(state.max), log_sum = ::log(state.sum), inverse = state.inverse_sum();
    row.write(problem.result, coord,
              [&](int64_t, double x) { return problem.log ? (x - max) - log_sum : state.weight(x) * inverse; });
  }
};

struct SoftmaxBackward {
  template <class Group>
  __device__ static void run(const RowProblem& problem, const Coord& coord) {
    const Row<Group> grad(problem, problem.grad, coord);
    const double* const output = row_data<const double>(problem.output, coord);
    const int64_t stride = problem.output.stride[1];
    const bool log = problem.log;
    const double sum = grad.sum([&](int64_t c, double g) { return log ? g : g * output[c * stride]; });
    grad.write(problem.grad_input, coord, [&](int64_t c, double g) {
      const double y = output[c * stride];
      return log ? g - ::exp(y) * sum : (g - sum) * y;
    });
  }
};

struct LogSumExp {
  template <class Group>
  __device__ static void run(const RowProblem& problem, const Coord& coord) {
    const Row<Group> row(problem, problem.input, coord);
    const State state = row.resolve_infinity(row.state());
    if (is_leader<Group>(coord)) static_cast<double*>(problem.lse)[coord.index] = state.lse();
  }
};

struct LogSumExpBackward {
  template <class Group>
  __device__ static void run(const RowProblem& problem, const Coord& coord) {
    const Row<Group> row(problem, problem.input, coord);
    const State state = row.resolve_infinity(row.state());
    const double factor = row_value(problem.grad_lse, coord) * state.inverse_sum();
    row.write(problem.grad_input, coord, [&](int64_t, double x) { return state.weight(x) * factor; });
  }
};

// ---- cross-entropy ---------------------------------------------------------------------------------------------------------

// The coefficients a_c of -log p_c.
struct Coefficients {
  const double* weight;
  double confidence, smoothing;
  __device__ explicit Coefficients(const RowProblem& problem)
      : weight(static_cast<const double*>(problem.weight)),
        confidence(1 - problem.label_smoothing),
        smoothing(problem.label_smoothing == 0 ? 0 : problem.label_smoothing / static_cast<double>(problem.classes)) {}
  __device__ __forceinline__ double weight_of(int64_t c) const { return weight ? weight[c] : 1; }
  __device__ __forceinline__ double operator()(int64_t c, double t) const {
    return weight_of(c) * (confidence * t + smoothing);
  }
};

constexpr int64_t kIgnored = -1;

__device__ __forceinline__ int64_t target_of(const RowProblem& problem, const Coord& coord) {
  const int64_t target = coord.exists ? problem.target[coord.index] : problem.ignore_index;
  if (target == problem.ignore_index) return kIgnored;
  assert(target >= 0 && target < problem.classes && "cross_entropy: target is out of bounds");
  return target;
}

template <class Group>
__device__ __forceinline__ void write_loss(const RowProblem& problem, const Coord& coord, const Row<Group>& row, double loss,
                                           double weight, const State& state) {
  const State resolved = row.resolve_infinity(state);
  double products = 0;
  if (problem.entropy)
    products = row.sum([&](int64_t, double x) { return state.weight(x) * distance_below(x - pivot(state.max)); });
  if (!is_leader<Group>(coord)) return;
  if (problem.entropy) static_cast<double*>(problem.entropy)[coord.index] = ::log(state.sum) - products / state.sum;
  static_cast<double*>(problem.loss)[coord.index] = loss;
  static_cast<double*>(problem.row_weight)[coord.index] = weight;
  if (problem.lse) static_cast<double*>(problem.lse)[coord.index] = resolved.lse();
}

// The loss against an index; `score` is the target class's, read before the row may be overwritten.
template <class Group>
__device__ __forceinline__ void write_index_loss(const RowProblem& problem, const Coord& coord, const Row<Group>& row,
                                                 int64_t target, double score, const State& state) {
  const Coefficients a(problem);
  double smooth_sum = 0, loss = 0, weight = 0;
  if (a.smoothing != 0) smooth_sum = row.sum([&](int64_t c, double x) { return a.weight_of(c) * -state.log_probability(x); });
  if (target != kIgnored) {
    weight = a.weight_of(target);
    loss = a.confidence * (weight * -state.log_probability(score));
    if (a.smoothing != 0) loss += a.smoothing * smooth_sum;
  }
  write_loss(problem, coord, row, loss, weight, state);
}

__device__ __forceinline__ double score_of(const RowProblem& problem, const Coord& coord, int64_t target) {
  return target == kIgnored ? 0 : row_data<const double>(problem.input, coord)[target * problem.input.stride[1]];
}

struct IndexLoss {
  template <class Group>
  __device__ static void run(const RowProblem& problem, const Coord& coord) {
    const Row<Group> row(problem, problem.input, coord);
    const int64_t target = target_of(problem, coord);
    write_index_loss(problem, coord, row, target, score_of(problem, coord, target), row.state());
  }
};

struct ProbabilityLoss {
  template <class Group>
  __device__ static void run(const RowProblem& problem, const Coord& coord) {
    const Row<Group> row(problem, problem.input, coord);
    const double* const target = row_data<const double>(problem.target_probabilities, coord);
    const int64_t stride = problem.target_probabilities.stride[1];
    const State state = row.state();
    const Coefficients a(problem);
    const double loss = row.sum([&](int64_t c, double x) { return a(c, target[c * stride]) * -state.log_probability(x); });
    write_loss(problem, coord, row, loss, 1, state);
  }
};

__device__ __forceinline__ double grad_loss_of(const RowProblem& problem, const Coord& coord) {
  if (!problem.divisor) return row_value(problem.grad_loss, coord);
  return *static_cast<const double*>(problem.grad_loss) / *static_cast<const double*>(problem.divisor);
}

// The gradient of a row's entropy as a factor of p_c, as in cross_entropy.cu; 0 if there is none.
struct EntropyGradient {
  double grad = 0, mean = 0, max = 0;
  __device__ __forceinline__ EntropyGradient(const RowProblem& problem, const Coord& coord, const State& state) {
    if (!problem.grad_entropy) return;
    grad = row_value(problem.grad_entropy, coord);
    mean = ::log(state.sum) - row_value(problem.row_entropy, coord);
    max = pivot(state.max);
  }
  __device__ __forceinline__ double operator()(double x) const { return grad * (mean - distance_below(x - max)); }
};

struct IndexLossBackward {
  template <class Group>
  __device__ static void run(const RowProblem& problem, const Coord& coord) {
    const Row<Group> row(problem, problem.input, coord);
    const Coefficients a(problem);
    const int64_t target = target_of(problem, coord);
    const double score = score_of(problem, coord, target), grad_loss = grad_loss_of(problem, coord);
    const State state = row.state();
    if (problem.loss) write_index_loss(problem, coord, row, target, score, state);
    double scale = row_value(problem.grad_lse, coord), target_grad = 0, uniform_grad = 0;
    double weight_sum = static_cast<double>(problem.classes);
    if (a.smoothing != 0 && a.weight) weight_sum = row.sum([&](int64_t c, double) { return a.weight_of(c); });
    if (target != kIgnored && problem.classes == 1) {
      scale += grad_loss - grad_loss;  // NaN stays NaN
    } else if (target != kIgnored) {
      target_grad = grad_loss * (a.confidence * a.weight_of(target));
      uniform_grad = grad_loss * a.smoothing;
      scale += target_grad + uniform_grad * weight_sum;
    }
    const EntropyGradient of_entropy(problem, coord, state);
    // The logits of an ignored row may be inf or NaN.
    const bool is_zero = target == kIgnored && scale == 0 && of_entropy.grad == 0;
    const double inverse = state.inverse_sum();
    row.write(problem.grad_input, coord, [&](int64_t c, double x) {
      if (is_zero) return 0.0;
      const double amount = uniform_grad * (uniform_grad != 0 ? a.weight_of(c) : 0) + (c == target ? target_grad : 0);
      const double factor = problem.grad_entropy ? scale + of_entropy(x) : scale;
      return fma(-amount, state.sum, factor * state.weight(x)) * inverse;
    });
  }
};

struct ProbabilityLossBackward {
  template <class Group>
  __device__ static void run(const RowProblem& problem, const Coord& coord) {
    const Row<Group> row(problem, problem.input, coord);
    const double* const target = row_data<const double>(problem.target_probabilities, coord);
    const int64_t stride = problem.target_probabilities.stride[1];
    const Coefficients a(problem);
    const State state = row.state();
    const double a_sum = row.sum([&](int64_t c, double) { return a(c, target[c * stride]); });
    const double grad_loss = grad_loss_of(problem, coord);
    const double loss_scale = problem.classes == 1 ? grad_loss - grad_loss : grad_loss;  // the loss of one class is 0
    const double scale = loss_scale * a_sum + row_value(problem.grad_lse, coord), inverse = state.inverse_sum();
    const EntropyGradient of_entropy(problem, coord, state);
    if (problem.grad_target.data)
      row.write(problem.grad_target, coord,
                [&](int64_t c, double x) { return grad_loss * (a.confidence * a.weight_of(c)) * -state.log_probability(x); });
    row.write(problem.grad_input, coord, [&](int64_t c, double x) {
      // The product is rounded like the scale, which it cancels where p_c is 1 and a_c the whole sum.
      const double factor = problem.grad_entropy ? scale + of_entropy(x) : scale;
      return factor * (state.weight(x) * inverse) - __dmul_rn(loss_scale, a(c, target[c * stride]));
    });
  }
};

// Sums the losses of all rows, in one order, by one CTA.
struct Reduction {
  const double *loss, *weight;
  int64_t rows;
  bool mean;
  double *result, *divisor;
};
__global__ void __launch_bounds__(CtaPerRow::kThreads) reduce_kernel(const __grid_constant__ Reduction reduction) {
  double loss = 0, weight = 0;
  for (int64_t i = threadIdx.x; i < reduction.rows; i += CtaPerRow::kThreads)
    loss += reduction.loss[i], weight += reduction.weight[i];
  loss = CtaPerRow::reduce(loss, 0, Add{});
  weight = CtaPerRow::reduce(weight, 0, Add{});
  if (threadIdx.x > 0) return;
  const double divisor = reduction.mean ? weight : 1;
  *reduction.result = loss / divisor;
  *reduction.divisor = divisor;
}

// ---- the top k -------------------------------------------------------------------------------------------------------------

// An element as an integer of the same order: NaN above all, -0 as 0. No element's is 0.
__device__ __forceinline__ uint64_t rank_of(double x) {
  constexpr uint64_t kSign = uint64_t{1} << 63, kRankOfNan = 0xfff0000000000001u;
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(x + 0.0));
  return x != x ? kRankOfNan : bits & kSign ? ~bits : bits | kSign;
}
__device__ __forceinline__ double element_of(uint64_t rank) {
  constexpr uint64_t kSign = uint64_t{1} << 63;
  return __longlong_as_double(static_cast<int64_t>(rank & kSign ? rank & ~kSign : ~rank));
}

// The larger key comes first; of equal elements, the one of the smaller class.
struct Key {
  uint64_t rank;
  uint32_t index;
  __device__ __forceinline__ bool before(const Key& other) const {
    return rank > other.rank || (rank == other.rank && index < other.index);
  }
};

constexpr int kSortThreads = CtaPerRow::kThreads, kSortKeys = 2048, kSortKept = 1024;

struct Keys {
  uint64_t rank[kSortKeys];
  uint32_t index[kSortKeys];
  int count;
  __device__ __forceinline__ Key get(int i) const { return {rank[i], index[i]}; }
  __device__ __forceinline__ void set(int i, const Key& key) { rank[i] = key.rank, index[i] = key.index; }
  __device__ __forceinline__ void clear_from(int64_t first) {
    for (int i = threadIdx.x; i < kSortKeys; i += kSortThreads)
      if (i >= first) set(i, {0, 0xffffffffu});
  }
  // A bitonic sort by the CTA.
  __device__ __forceinline__ void sort() {
    for (int size = 2; size <= kSortKeys; size *= 2)
      for (int step = size / 2; step > 0; step /= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < kSortKeys / 2; i += kSortThreads) {
          const int low = 2 * i - (i & (step - 1)), high = low + step;
          const Key a = get(low), b = get(high);
          if (b.before(a) == ((low & size) == 0)) set(low, b), set(high, a);
        }
      }
    __syncthreads();
  }
};

// Leaves in `keys` the next `wanted` keys of a row after `last`, sorted.
__device__ __forceinline__ void find_keys(Keys& keys, const double* row, int64_t stride, int64_t classes, int64_t wanted,
                                          const Key& last, bool is_first) {
  Key threshold{0, 0xffffffffu};  // the wanted-th key so far
  __syncthreads();
  keys.clear_from(0);
  if (threadIdx.x == 0) keys.count = 0;
  __syncthreads();
  const auto keep_wanted = [&] {
    keys.sort();
    threshold = keys.get(static_cast<int>(wanted) - 1);
    __syncthreads();
    keys.clear_from(wanted);
    if (threadIdx.x == 0) keys.count = static_cast<int>(wanted);
    __syncthreads();
  };
  for (int64_t begin = 0; begin < classes; begin += kSortThreads) {
    const int64_t c = begin + threadIdx.x;
    const Key key{c < classes ? rank_of(row[c * stride]) : 0, static_cast<uint32_t>(c)};
    const bool has = c < classes && key.before(threshold) && (is_first || last.before(key));
    const int more = __syncthreads_count(has);
    if (more == 0) continue;
    if (keys.count + more > kSortKeys) keep_wanted();  // the count changes only between barriers
    __syncthreads();
    if (has) keys.set(atomicAdd(&keys.count, 1), key);
    __syncthreads();
  }
  keep_wanted();
}

// A CTA per row. A pass finds up to kSortKept keys; with renormalize all passes run twice, first to sum the k weights.
struct Topk {
  template <class Group>
  __device__ static void run(const RowProblem& problem, const Coord& coord) {
    __shared__ Keys keys;
    const double* const row = row_data<const double>(problem.input, coord);
    State denominator;
    if (!problem.renormalize) denominator = Row<Group>(problem, problem.input, coord).state();
    for (int write = problem.renormalize ? 0 : 1; write < 2; ++write) {
      Key last{};
      for (int64_t done = 0; done < problem.k; done += kSortKept) {
        const int64_t wanted = min(problem.k - done, int64_t{kSortKept});
        find_keys(keys, row, problem.input.stride[1], problem.classes, wanted, last, done == 0);
        last = keys.get(static_cast<int>(wanted) - 1);
        if (!write) {
          // The first key of all is the largest: its element is the maximum.
          if (done == 0) denominator.max = element_of(keys.rank[0]);
          double sum = 0;
          for (int64_t j = threadIdx.x; j < wanted; j += kSortThreads) sum += denominator.weight(element_of(keys.rank[j]));
          denominator.add(Group::reduce(sum, 0, Add{}));
          continue;
        }
        const double scale = denominator.inverse_sum();
        double* const result = row_data<double>(problem.result, coord);
        int64_t* const indices =
            problem.indices.data + coord.outer * problem.indices.stride[0] + coord.inner * problem.indices.stride[2];
        for (int64_t j = threadIdx.x; j < wanted; j += kSortThreads) {
          result[(done + j) * problem.result.stride[1]] = denominator.weight(element_of(keys.rank[j])) * scale;
          indices[(done + j) * problem.indices.stride[1]] = keys.index[j];
        }
      }
    }
  }
};

// Every class as if it were not among the k; then the k, which the threads of the row write after all have done that.
struct TopkBackward {
  template <class Group>
  __device__ static void run(const RowProblem& problem, const Coord& coord) {
    const Row<Group> row(problem, problem.input, coord);
    const double *const grad = row_data<const double>(problem.grad, coord), *const output =
                                                                                row_data<const double>(problem.output, coord);
    const int64_t k = coord.exists ? problem.k : 0, grad_stride = problem.grad.stride[1], stride = problem.output.stride[1];
    double sum = 0, norm = 0;
    for (int64_t j = Group::first(); j < k; j += Group::kStep) {
      sum += grad[j * grad_stride] * output[j * stride];
      norm += output[j * stride];
    }
    sum = Group::reduce(sum, 0, Add{});
    norm = Group::reduce(norm, 0, Add{});
    norm = problem.renormalize && problem.k > 0 ? 1 / norm : 1;
    sum *= norm;
    const State state = row.state();
    const double scale = state.inverse_sum();
    row.write(problem.grad_input, coord, [&](int64_t, double x) {
      return problem.renormalize ? sum - sum : -sum * (state.weight(x) * scale);  // sum - sum: NaN where the softmax is NaN
    });
    Group::reduce(0, 0, Add{});  // a barrier of the row's threads, for CtaPerRow and LanePerRow
    __syncwarp();
    const int64_t* const indices =
        problem.indices.data + coord.outer * problem.indices.stride[0] + coord.inner * problem.indices.stride[2];
    double* const to = row_data<double>(problem.grad_input, coord);
    for (int64_t j = Group::first(); j < k; j += Group::kStep) {
      const int64_t c = indices[j * problem.indices.stride[1]];
      assert(c >= 0 && c < problem.classes && "topk_softmax: an index is out of bounds");
      to[c * problem.grad_input.stride[1]] = (grad[j * grad_stride] - sum) * (output[j * stride] * norm);
    }
  }
};

// ---- launches --------------------------------------------------------------------------------------------------------------

template <class Op, class Group>
__global__ void __launch_bounds__(Group::kThreads) row_kernel(const __grid_constant__ RowProblem problem) {
  const int64_t index = int64_t{blockIdx.x} * Group::kRows + Group::row(), rows = problem.outer * problem.inner,
                at = index < rows ? index : rows - 1;
  Op::template run<Group>(problem, Coord{at / problem.inner, at % problem.inner, at, index < rows});
}

template <class Op, class Group>
void launch_group(const RowProblem& problem, CUstream_st* stream) {
  launch<row_kernel<Op, Group>>(problem, ceil_div(problem.outer * problem.inner, int64_t{Group::kRows}), Group::kThreads, 0,
                                stream);
}

// The length of a row and the strides of `view` alone decide who shares it.
template <class Op>
void launch_rows(const RowProblem& problem, const ConstView3& view, CUstream_st* stream) {
  if (problem.outer == 0 || problem.inner == 0) return;
  const int64_t neighbour = problem.inner == 1 ? view.stride[0] : view.stride[2];
  if (problem.outer * problem.inner > 1 && neighbour < view.stride[1])
    launch_group<Op, LanePerRow>(problem, stream);
  else if (problem.classes < kLongRow)
    launch_group<Op, WarpPerRow>(problem, stream);
  else
    launch_group<Op, CtaPerRow>(problem, stream);
}

__global__ void __launch_bounds__(512) scale_kernel(double* data, int64_t count, const double* factor) {
  const double by = *factor;
  if (by == 1) return;
  for (int64_t i = int64_t{blockIdx.x} * 512 + threadIdx.x; i < count; i += int64_t{gridDim.x} * 512) data[i] *= by;
}

}  // namespace

void softmax(const RowProblem& problem, CUstream_st* stream) {
  if (problem.classes > 0) launch_rows<Softmax>(problem, problem.input, stream);
}
void softmax_backward(const RowProblem& problem, CUstream_st* stream) {
  if (problem.classes > 0) launch_rows<SoftmaxBackward>(problem, problem.grad, stream);
}
void logsumexp(const RowProblem& problem, CUstream_st* stream) { launch_rows<LogSumExp>(problem, problem.input, stream); }
void logsumexp_backward(const RowProblem& problem, CUstream_st* stream) {
  if (problem.classes > 0) launch_rows<LogSumExpBackward>(problem, problem.input, stream);
}
void cross_entropy(const RowProblem& problem, CUstream_st* stream) {
  if (problem.target)
    launch_rows<IndexLoss>(problem, problem.input, stream);
  else
    launch_rows<ProbabilityLoss>(problem, problem.input, stream);
}
void cross_entropy_backward(const RowProblem& problem, CUstream_st* stream) {
  if (problem.classes == 0) return;
  if (problem.target)
    launch_rows<IndexLossBackward>(problem, problem.input, stream);
  else
    launch_rows<ProbabilityLossBackward>(problem, problem.input, stream);
}
void reduce_losses(const RowProblem& problem, bool mean, void* result, void* divisor, CUstream_st* stream) {
  launch<reduce_kernel>(Reduction{.loss = static_cast<const double*>(problem.loss),
                                  .weight = static_cast<const double*>(problem.row_weight),
                                  .rows = problem.outer * problem.inner,
                                  .mean = mean,
                                  .result = static_cast<double*>(result),
                                  .divisor = static_cast<double*>(divisor)},
                        1, CtaPerRow::kThreads, 0, stream);
}
void topk_softmax(const RowProblem& problem, CUstream_st* stream) {
  if (problem.outer > 0 && problem.inner > 0 && problem.k > 0) launch_group<Topk, CtaPerRow>(problem, stream);
}
void topk_softmax_backward(const RowProblem& problem, CUstream_st* stream) {
  if (problem.classes > 0) launch_rows<TopkBackward>(problem, problem.input, stream);
}
void scale(void* data, int64_t count, const void* factor, CUstream_st* stream) {
  if (count == 0) return;
  scale_kernel<<<grid_for(ceil_div(count, int64_t{512}), 8), 512, 0, stream>>>(static_cast<double*>(data), count,
                                                                               static_cast<const double*>(factor));
  check_launch("scale_");
}

}  // namespace flash_online::cuda::float64
