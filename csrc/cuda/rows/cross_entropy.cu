// Cross-entropy on CUDA, one loss a row, against class indices or probabilities; no table of probabilities is written.
//
// Both are the sum over c of a_c * -log p_c, with a_c = weight_c t_c and t the smoothed target, (1 - e) t + e / classes. Hence
// the gradient of the input is grad_loss (A p_c - a_c) with A the sum of a_c, and that of the lse is grad_lse p_c.
#include "../hw/check.cuh"
#include "dispatch.cuh"
#include "rows.h"

namespace flash_online::cuda {

namespace {

struct Classes {
  const float* weight;  // null: ones
  float keep, spread;   // 1 - e and e / classes: how much of the target stays, and what every class gets
  __device__ explicit Classes(const RowProblem& problem)
      : weight(static_cast<const float*>(problem.weight)), keep(static_cast<float>(1 - problem.label_smoothing)), spread(0) {
    if (problem.label_smoothing != 0)
      spread = static_cast<float>(problem.label_smoothing / static_cast<double>(problem.classes));
  }
  __device__ __forceinline__ float weight_of(int64_t c) const { return weight == nullptr ? 1.0f : weight[c]; }
  // a_c for a class of target probability t.
  __device__ __forceinline__ float share(int64_t c, float t) const { return weight_of(c) * (keep * t + spread); }
};

constexpr int64_t kIgnored = -1;

// A row's target as it stands, and as a class: kIgnored, or checked.
__device__ __forceinline__ int64_t target_of(const RowProblem& problem, const RowPlace& place) {
  return place.exists ? problem.target[place.number] : problem.ignore_index;
}
__device__ __forceinline__ int64_t class_of(const RowProblem& problem, int64_t target) {
  if (target == problem.ignore_index) return kIgnored;
  assert(target >= 0 && target < problem.classes && "cross_entropy: target is out of bounds");
  return target;
}

// Writes what is known of a row at its end. `settled`: see there.
__device__ __forceinline__ void write_row(const RowProblem& problem, int64_t row, float loss, float weight, RowState settled) {
  static_cast<float*>(problem.loss)[row] = loss;
  static_cast<float*>(problem.row_weight)[row] = weight;
  if (problem.lse != nullptr) static_cast<float*>(problem.lse)[row] = settled.lse();
}

// `score`: of the target. `smooth`: the sum of weight_c * -log p_c.
__device__ __forceinline__ void finish_indices(const RowProblem& problem, int64_t row, int64_t target, float score,
                                               const RowState& state, const RowState& settled, float smooth) {
  const Classes classes(problem);
  float loss = 0, weight = 0;
  if (target != kIgnored) {
    weight = classes.weight_of(target);
    loss = classes.keep * (weight * -state.log_probability(score));
    if (classes.spread != 0) loss += classes.spread * smooth;
  }
  write_row(problem, row, loss, weight, settled);
}

// The same, by the thread that has the target's score; to be called by all threads of the row.
template <class Row>
__device__ __forceinline__ void finish_row(const RowProblem& problem, const Row& row, int64_t target, const RowState& state,
                                           float smooth) {
  const RowState end = settled(row, state);
  if (row.owns(target == kIgnored ? 0 : target))
    finish_indices(problem, row.place().number, target, target == kIgnored ? 0.0f : row[target], state, end, smooth);
}

// -log p_c of a row.
struct Surprise {
  float max, log_sum;
  __device__ explicit Surprise(const RowState& state) : max(pivot(state.max)), log_sum(FastNatural::log(state.sum)) {}
  __device__ __forceinline__ float operator()(float x) const { return log_sum - (x - max); }
};

template <bool kSmooth>
struct Indices {
  static constexpr int kTensors = 1;
  static constexpr bool kReduces = true, kSumsAgain = kSmooth;
  __host__ __device__ static const ConstView3& tensor(const RowProblem& problem, int) { return problem.input; }
  template <class Rows>
  __device__ static void part(const RowProblem& problem, const Rows& rows) {
    rows.read(problem.input).leave_part(NoExtra{});
  }
  template <class Result, class Rows>
  __device__ static void run(const RowProblem& problem, const Rows& rows) {
    auto row = rows.read(problem.input);
    // Behind the row: measured, ahead of it cost 10 %. Nothing asks for it before the state is known.
    const int64_t given = target_of(problem, rows.place);
    const RowState state = row.state();
    const int64_t target = class_of(problem, given);
    float smooth = 0;
    if constexpr (kSmooth) {
      const Classes classes(problem);
      const Surprise surprise(state);
      const auto term = [&](int64_t c, float x) { return classes.weight_of(c) * surprise(x); };
      if constexpr (Rows::kSplit) {
        row.leave_sum(row, problem.outer * problem.inner * row.pieces(), [&](int64_t c, float x, float) { return term(c, x); });
        return;
      } else {
        smooth = row.sum(term);
      }
    }
    finish_row(problem, row, target, state, smooth);
  }
  template <class T>
  __device__ static void finish(const RowProblem& problem, const RowPlace& place, const Whole& whole, float sum) {
    const int64_t target = class_of(problem, target_of(problem, place));
    const float score = target == kIgnored ? 0.0f : row_of<const T>(problem.input, place)[target];
    finish_indices(problem, place.number, target, score, whole.state, whole.settled(), sum);
  }
};

struct Probabilities {
  static constexpr int kTensors = 1;
  static constexpr bool kReduces = true, kSumsAgain = true;
  __host__ __device__ static const ConstView3& tensor(const RowProblem& problem, int) { return problem.input; }
  template <class Rows>
  __device__ static void part(const RowProblem& problem, const Rows& rows) {
    rows.read(problem.input).leave_part(NoExtra{});
  }
  template <class T, class Rows>
  __device__ static void run(const RowProblem& problem, const Rows& rows) {
    auto row = rows.read(problem.input);
    const Row<const T> target = row_of<const T>(problem.target_probabilities, row.place());
    const RowState state = row.state();
    const Classes classes(problem);
    const Surprise surprise(state);
    const auto term = [&](int64_t c, float x) { return classes.share(c, target[c]) * surprise(x); };
    if constexpr (Rows::kSplit) {
      row.leave_sum(row, problem.outer * problem.inner * row.pieces(), [&](int64_t c, float x, float) { return term(c, x); });
    } else {
      const float loss = row.sum(term);
      const RowState end = settled(row, state);
      if (row.leads()) write_row(problem, row.place().number, loss, 1, end);
    }
  }
  template <class T>
  __device__ static void finish(const RowProblem& problem, const RowPlace& place, const Whole& whole, float sum) {
    write_row(problem, place.number, sum, 1, whole.settled());
  }
};

__device__ __forceinline__ float of_row(const void* numbers, const RowPlace& place) {
  return numbers == nullptr || !place.exists ? 0.0f : static_cast<const float*>(numbers)[place.number];
}
__device__ __forceinline__ float read_float(const void* number, DType dtype) {
  if (dtype == DType::kFloat16) return widen(*static_cast<const __half*>(number));
  if (dtype == DType::kBFloat16) return widen(*static_cast<const __nv_bfloat16*>(number));
  return *static_cast<const float*>(number);
}
// A row's grad_loss: its own, or all rows' share of the reduced loss's.
__device__ __forceinline__ float grad_loss_of(const RowProblem& problem, const RowPlace& place) {
  if (problem.divisor == nullptr) return of_row(problem.grad_loss, place);
  return read_float(problem.grad_loss, problem.result_dtype) / *static_cast<const float*>(problem.divisor);
}

// With problem.loss, which goes without smoothing, also what the forward kernels write: a row's gradient may take its place.
template <bool kSmooth>
struct IndicesBackward {
  static constexpr int kTensors = 1;
  static constexpr bool kReduces = false, kSumsAgain = false;
  __host__ __device__ static const ConstView3& tensor(const RowProblem& problem, int) { return problem.input; }
  __device__ static bool weights_matter(const RowProblem& problem) { return kSmooth && problem.weight != nullptr; }
  template <class Rows>
  __device__ static void part(const RowProblem& problem, const Rows& rows) {
    if (weights_matter(problem)) {
      const Classes classes(problem);
      rows.read(problem.input).leave_part([&](int64_t c, float) { return classes.weight_of(c); });
    } else {
      rows.read(problem.input).leave_part(NoExtra{});
    }
  }
  template <class T, class Rows>
  __device__ static void run(const RowProblem& problem, const Rows& rows) {
    const RowPlace place = rows.place;
    const Classes classes(problem);
    // Before the row: these would have to wait behind it.
    const int64_t given = target_of(problem, place);
    const float grad_lse = of_row(problem.grad_lse, place), grad_loss = grad_loss_of(problem, place);
    auto row = rows.read(problem.input);
    const int64_t target = class_of(problem, given);
    const RowState state = row.state();
    if constexpr (!kSmooth)
      if (problem.loss != nullptr) finish_row(problem, row, target, state, 0);
    float scale = grad_lse, direct = 0, spread = 0;
    float weight_sum = static_cast<float>(problem.classes);
    if (weights_matter(problem)) weight_sum = row.sum([&](int64_t c, float) { return classes.weight_of(c); });
    if (target != kIgnored) {
      direct = grad_loss * (classes.keep * classes.weight_of(target));
      scale += direct;
      if (kSmooth) {
        spread = grad_loss * classes.spread;
        scale += spread * weight_sum;
      }
    }
    if (target == kIgnored && scale == 0) {  // not 0 * p: the logits of an ignored row may hold anything
      row.template write<T>(problem.grad_input, [](int64_t, float) { return 0.0f; });
      return;
    }
    visit_weights(state, scale * state.inverse_sum(), [&](const auto& w) {
      if constexpr (!kSmooth)
        row.template write_less<T>(problem.grad_input, target, direct, [&](int64_t, float x) { return w(x); });
      else
        row.template write<T>(problem.grad_input, [&](int64_t c, float x) {
          return w(x) - (c == target ? direct : 0.0f) - (c < problem.classes ? spread * classes.weight_of(c) : 0);
        });
    });
  }
};

struct ProbabilitiesBackward {
  static constexpr int kTensors = 1;
  static constexpr bool kReduces = false, kSumsAgain = false;
  __host__ __device__ static const ConstView3& tensor(const RowProblem& problem, int) { return problem.input; }
  template <class T>
  struct Share {
    Classes classes;
    Row<const T> target;
    __device__ float operator()(int64_t c, float) const { return classes.share(c, target[c]); }
  };
  template <class Rows>
  __device__ static void part(const RowProblem& problem, const Rows& rows) {
    auto row = rows.read(problem.input);
    using T = typename decltype(row)::Element;
    row.leave_part(Share<T>{Classes(problem), row_of<const T>(problem.target_probabilities, row.place())});
  }
  template <class T, class Rows>
  __device__ static void run(const RowProblem& problem, const Rows& rows) {
    auto row = rows.read(problem.input);
    const RowPlace place = row.place();
    const Share<T> share{Classes(problem), row_of<const T>(problem.target_probabilities, place)};
    const RowState state = row.state();
    const float share_sum = row.sum(share);
    const float grad_loss = grad_loss_of(problem, place);
    const float scale = grad_loss * share_sum + of_row(problem.grad_lse, place), inverse = state.inverse_sum();
    if (problem.grad_target.data != nullptr) {
      const Surprise surprise(state);
      row.template write<T>(problem.grad_target, [&](int64_t c, float x) {
        return grad_loss * (share.classes.keep * (c < problem.classes ? share.classes.weight_of(c) : 0.0f)) * surprise(x);
      });
    }
    row.template write<T>(problem.grad_input, [&](int64_t c, float x) {
      return scale * (state.weight(x) * inverse) - (c < problem.classes ? grad_loss * share(c, x) : 0.0f);
    });
  }
};

constexpr int kReduceThreads = 512;
constexpr int64_t kReduceRows = 2048, kReduceBlocks = kReduceThreads;  // rows worth a block; the most blocks

struct Pair {
  float loss, weight;
};
struct Reduction {
  const float *loss, *weight;
  int64_t stride, rows, rows_a_block;
  Pair* partial;  // one a block; null: there is one block, which writes the results
  DType dtype;
  bool mean;
  void* result;
  float* divisor;
};

__global__ void __launch_bounds__(kReduceThreads) reduce_kernel(const __grid_constant__ Reduction reduction) {
  using Team = HeldTeam<kReduceThreads, kReduceThreads>;
  const int64_t begin = blockIdx.x * reduction.rows_a_block, end = min(begin + reduction.rows_a_block, reduction.rows);
  Sum loss, weight;
  launch_dependents();
  grid_dependency_wait();
  constexpr int kAtOnce = 8;
  for (int64_t i = begin + threadIdx.x; i < end; i += kAtOnce * kReduceThreads) {
    float of_loss[kAtOnce], of_weight[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int64_t at = i + n * kReduceThreads;
      of_loss[n] = at < end ? reduction.loss[at * reduction.stride] : 0.0f;
      of_weight[n] = at < end ? reduction.weight[at * reduction.stride] : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) loss.add(of_loss[n]), weight.add(of_weight[n]);
  }
  loss = Team::merge_warps<0>(merge_lanes<kWarpSize>(loss));
  weight = Team::merge_warps<1>(merge_lanes<kWarpSize>(weight));
  if (threadIdx.x != 0) return;
  if (reduction.partial != nullptr) {
    reduction.partial[blockIdx.x] = {loss.value, weight.value};
    return;
  }
  const float divisor = reduction.mean ? weight.value : 1.0f, result = loss.value / divisor;
  *reduction.divisor = divisor;
  if (reduction.dtype == DType::kFloat16)
    *static_cast<__half*>(reduction.result) = narrow<__half>(result);
  else if (reduction.dtype == DType::kBFloat16)
    *static_cast<__nv_bfloat16*>(reduction.result) = narrow<__nv_bfloat16>(result);
  else
    *static_cast<float*>(reduction.result) = result;
}

int64_t reduce_blocks(int64_t rows) { return std::clamp((rows + kReduceRows - 1) / kReduceRows, int64_t{1}, kReduceBlocks); }

template <template <bool> class OfIndices, class OfProbabilities, class T>
void launch(const RowProblem& problem, bool together, cudaStream_t stream, const char* name) {
  if (problem.target == nullptr)
    launch_rows<OfProbabilities, T, T>(problem, together, stream, name);
  else if (problem.label_smoothing == 0)
    launch_rows<OfIndices<false>, T, T>(problem, together, stream, name);
  else
    launch_rows<OfIndices<true>, T, T>(problem, together, stream, name);
}

}  // namespace

void cross_entropy(const RowProblem& problem, CUstream_st* stream) {
  if (problem.outer == 0 || problem.inner == 0) return;  // but rows of no classes have a loss
  visit_type(problem, "cross_entropy", [&]<class T>(Type<T>) {
    launch<Indices, Probabilities, T>(problem, classes_together(problem, {problem.input.stride[1]}), stream, "cross_entropy");
  });
}

int64_t reduce_losses_workspace(int64_t rows) {
  const int64_t blocks = reduce_blocks(rows);
  return blocks > 1 ? blocks * static_cast<int64_t>(sizeof(Pair)) : 0;
}

void reduce_losses(const RowProblem& problem, bool mean, void* result, void* divisor, void* workspace, CUstream_st* stream) {
  const int64_t rows = problem.outer * problem.inner, blocks = reduce_blocks(rows);
  Reduction reduction{static_cast<const float*>(problem.loss),
                      static_cast<const float*>(problem.row_weight),
                      1,
                      rows,
                      (rows + blocks - 1) / blocks,
                      blocks > 1 ? static_cast<Pair*>(workspace) : nullptr,
                      problem.result_dtype,
                      mean,
                      result,
                      static_cast<float*>(divisor)};
  launch_dependent(reduce_kernel, reduction, static_cast<unsigned>(blocks), kReduceThreads, stream);
  if (blocks == 1) return;
  const Pair* partial = reduction.partial;
  reduction.loss = &partial->loss;
  reduction.weight = &partial->weight;
  reduction.stride = sizeof(Pair) / sizeof(float);
  reduction.rows = reduction.rows_a_block = blocks;
  reduction.partial = nullptr;
  launch_dependent(reduce_kernel, reduction, 1, kReduceThreads, stream);
}

void cross_entropy_backward(const RowProblem& problem, CUstream_st* stream) {
  if (is_empty(problem)) return;
  const bool together = classes_together(problem, {problem.input.stride[1], problem.grad_input.stride[1],
                                                   problem.grad_target.data == nullptr ? 1 : problem.grad_target.stride[1]});
  visit_type(problem, "cross_entropy", [&]<class T>(Type<T>) {
    launch<IndicesBackward, ProbabilitiesBackward, T>(problem, together, stream, "cross_entropy_backward");
  });
}

}  // namespace flash_online::cuda
