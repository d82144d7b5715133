// Softmax, log-softmax and logsumexp on the CPU, and the table of all row kernels of an instruction set. Each kernel reads a
// row once for its maximum and sum (online softmax, core/online_softmax.h), and once more for its result.
#include "kernels.h"
#include "row_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {

namespace {

int64_t scratch(const RowProblem& problem) {
  const int64_t number = problem.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  // Of the top k, an element and its index a place; a tile's rows share kChunk places or, if k is larger, there is one row.
  const int64_t places = problem.k > kChunk ? problem.k : problem.k > 0 ? kChunk : 0;
  return kBuffers * kTileRows * kChunk * number + places * 2 * static_cast<int64_t>(sizeof(int64_t));
}

template <class T>
void softmax_tile(const RowProblem& problem, const Tile& tile, T* buffer) {
  Reader<T> input(problem, problem.dtype, problem.input, tile, buffer);
  T* result = buffer + kTileRows * kChunk;
  Softmax<T> state[kTileRows];
  absorb_rows(problem, input, tile.rows, state);
  for_each_chunk(problem, [&](int64_t begin, int64_t count) {
    input.read(begin, count);
    for (int64_t r = 0; r < tile.rows; ++r) {
      const Softmax<T> row = state[r];
      const T* x = input.row(r);
      T* y = result + r * kChunk;
      if (problem.log) {
        const T max = pivot(row.max), log_sum = FastNatural::log(row.sum);
        for (int64_t c = 0; c < count; ++c) y[c] = (x[c] - max) - log_sum;
      } else {
        const T scale = row.inverse_sum();
        for (int64_t c = 0; c < count; ++c) y[c] = row.weight(x[c]) * scale;
      }
    }
    store(problem, problem.result_dtype, problem.result, tile, begin, count, result);
  });
}

// With s = sum(grad * y), grad_input = (grad - s) y; of the logarithm, with s = sum(grad), grad - s exp(y).
template <class T>
void softmax_backward_tile(const RowProblem& problem, const Tile& tile, T* buffer) {
  T* values = buffer + kTileRows * kChunk;
  Reader<T> grad(problem, problem.result_dtype, problem.grad, tile, buffer);
  Reader<T> output(problem, problem.result_dtype, problem.output, tile, values);
  double sum[kTileRows] = {};
  for_each_chunk(problem, [&](int64_t begin, int64_t count) {
    grad.read(begin, count);
    if (!problem.log) output.read(begin, count);
    for (int64_t r = 0; r < tile.rows; ++r) {
      const T *g = grad.row(r), *y = output.row(r);
      if (problem.log)
        sum[r] += sum_over<double>(count, [&](int64_t c) { return g[c]; });
      else
        sum[r] += sum_over<double>(count, [&](int64_t c) { return static_cast<double>(g[c]) * y[c]; });
    }
  });
  for_each_chunk(problem, [&](int64_t begin, int64_t count) {
    grad.read(begin, count);
    output.read(begin, count);
    for (int64_t r = 0; r < tile.rows; ++r) {
      const T* y = output.row(r);
      const T total = static_cast<T>(sum[r]);
      T* g = buffer + r * kChunk;  // written in place: no later pass reads this chunk
      if (problem.log)
        for (int64_t c = 0; c < count; ++c) g[c] -= FastNatural::exp(y[c]) * total;
      else
        for (int64_t c = 0; c < count; ++c) g[c] = (g[c] - total) * y[c];
    }
    store(problem, problem.dtype, problem.grad_input, tile, begin, count, buffer);
  });
}

template <class T>
void logsumexp_tile(const RowProblem& problem, const Tile& tile, T* buffer) {
  Reader<T> input(problem, problem.dtype, problem.input, tile, buffer);
  Softmax<T> state[kTileRows];
  absorb_rows(problem, input, tile.rows, state);
  for (int64_t r = 0; r < tile.rows; ++r) {
    settle_infinite(problem, input, r, state[r]);
    static_cast<T*>(problem.lse)[tile.number + r] = state[r].lse();
  }
}

template <class T>
void logsumexp_backward_tile(const RowProblem& problem, const Tile& tile, T* buffer) {
  Reader<T> input(problem, problem.dtype, problem.input, tile, buffer);
  T* result = buffer + kTileRows * kChunk;
  Softmax<T> state[kTileRows];
  absorb_rows(problem, input, tile.rows, state);
  for (int64_t r = 0; r < tile.rows; ++r) settle_infinite(problem, input, r, state[r]);
  for_each_chunk(problem, [&](int64_t begin, int64_t count) {
    input.read(begin, count);
    for (int64_t r = 0; r < tile.rows; ++r) {
      const Softmax<T> row = state[r];
      const T scale = row.inverse_sum(), grad = static_cast<const T*>(problem.grad_lse)[tile.number + r];
      for (int64_t c = 0; c < count; ++c) result[r * kChunk + c] = grad * (row.weight(input.row(r)[c]) * scale);
    }
    store(problem, problem.dtype, problem.grad_input, tile, begin, count, result);
  });
}

void softmax(const RowProblem& problem, const Executor& executor) {
  for_each_tile(problem, executor, [&](const Tile& tile, auto* buffer) { softmax_tile(problem, tile, buffer); });
}

void softmax_backward(const RowProblem& problem, const Executor& executor) {
  for_each_tile(problem, executor, [&](const Tile& tile, auto* buffer) { softmax_backward_tile(problem, tile, buffer); });
}

void logsumexp(const RowProblem& problem, const Executor& executor) {
  for_each_tile(problem, executor, [&](const Tile& tile, auto* buffer) { logsumexp_tile(problem, tile, buffer); });
}

void logsumexp_backward(const RowProblem& problem, const Executor& executor) {
  for_each_tile(problem, executor, [&](const Tile& tile, auto* buffer) { logsumexp_backward_tile(problem, tile, buffer); });
}

}  // namespace

extern const RowKernels row_kernels;
const RowKernels row_kernels = {
    .scratch = scratch,
    .softmax = softmax,
    .softmax_backward = softmax_backward,
    .logsumexp = logsumexp,
    .logsumexp_backward = logsumexp_backward,
    .cross_entropy = cross_entropy,
    .cross_entropy_backward = cross_entropy_backward,
    .topk_softmax = topk_softmax,
    .topk_softmax_backward = topk_softmax_backward,
};

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
