// The k largest probabilities of a softmax on the CPU: one pass over the row keeps its maximum and sum, and the k largest
// elements so far (Milakov and Gimelshein, arXiv 1805.02867, section 4).
#include <algorithm>

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

// The best `capacity` candidates offered, in a heap whose front is the worst of them.
template <class T>
class Best {
 public:
  Best() = default;
  Best(Candidate<T>* heap, int64_t capacity) : heap_(heap), capacity_(capacity) {}

  // Elements begin .. begin + count - 1 of the row, whose largest is chunk_max; `nan` if there may be a NaN among them.
  void offer(const T* x, int64_t begin, int64_t count, T chunk_max, bool nan) {
    int64_t i = 0;
    for (; i < count && size_ < capacity_; ++i) {
      heap_[size_++] = {x[i], begin + i};
      std::push_heap(heap_, heap_ + size_, RanksBefore{});
    }
    if (capacity_ == 0 || (!nan && chunk_max <= heap_[0].value)) return;
    for (; i < count; ++i) {
      const Candidate<T> candidate{x[i], begin + i};
      if (x[i] <= heap_[0].value || !RanksBefore{}(candidate, heap_[0])) continue;
      std::pop_heap(heap_, heap_ + size_, RanksBefore{});
      heap_[size_ - 1] = candidate;
      std::push_heap(heap_, heap_ + size_, RanksBefore{});
    }
  }
  const Candidate<T>* sorted() {
    std::sort_heap(heap_, heap_ + size_, RanksBefore{});
    return heap_;
  }

 private:
  Candidate<T>* heap_ = nullptr;
  int64_t capacity_ = 0, size_ = 0;
};

template <class T>
Softmax<T> state_of(const Candidate<T>* sorted, int64_t k) {
  Softmax<T> state;
  if (k > 0) state.raise(sorted[0].value);
  const Softmax<T> raised = state;
  for (int64_t begin = 0; begin < k; begin += kChunk)
    state.add(sum_over<T>(k - begin < kChunk ? k - begin : kChunk,
                          [&](int64_t i) { return raised.weight(sorted[begin + i].value); }));
  return state;
}

FLASH_ONLINE_INLINE int64_t* indices_of_row(const RowProblem& problem, const Tile& tile, int64_t r) {
  return problem.indices.data + tile.outer * problem.indices.stride[0] + tile.inner * problem.indices.stride[2] +
         r * row_stride(problem, problem.indices);
}

template <class T>
void forward_tile(const RowProblem& problem, const Tile& tile, T* buffer) {
  auto* places = reinterpret_cast<Candidate<T>*>(buffer + kBuffers * kTileRows * kChunk);
  Reader<T> input(problem, problem.dtype, problem.input, tile, buffer);
  Softmax<T> state[kTileRows];
  Best<T> best[kTileRows];
  for (int64_t r = 0; r < tile.rows; ++r) best[r] = Best<T>(places + r * problem.k, problem.k);
  for_each_chunk(problem, [&](int64_t begin, int64_t count) {
    input.read(begin, count);
    for (int64_t r = 0; r < tile.rows; ++r) {
      const T chunk_max = absorb(state[r], input.row(r), count);
      best[r].offer(input.row(r), begin, count, chunk_max, state[r].sum != state[r].sum);
    }
  });
  for (int64_t r = 0; r < tile.rows; ++r) {
    const Candidate<T>* sorted = best[r].sorted();
    const Softmax<T> denominator = problem.renormalize ? state_of(sorted, problem.k) : state[r];
    const T scale = denominator.inverse_sum();
    int64_t* indices = indices_of_row(problem, tile, r);
    for (int64_t j = 0; j < problem.k; ++j) {
      indices[j * problem.indices.stride[1]] = sorted[j].index;
      store_one(problem, problem.result_dtype, problem.result, tile, r, j, denominator.weight(sorted[j].value) * scale);
    }
  }
}

// Of the whole softmax, with s = sum over the k of grad_j p_j: grad_input_c = p_c (grad_c - s), where grad_c is 0 outside the
// k. Renormalised, the k are a softmax of their own and the other classes get 0; its p, rounded to the result's dtype, are
// made to add up to 1 again.
template <class T>
void backward_tile(const RowProblem& problem, const Tile& tile, T* buffer) {
  const auto grad = [&](int64_t r, int64_t j) { return load_one<T>(problem, problem.result_dtype, problem.grad, tile, r, j); };
  const auto output = [&](int64_t r, int64_t j) {
    return load_one<T>(problem, problem.result_dtype, problem.output, tile, r, j);
  };
  Reader<T> input(problem, problem.dtype, problem.input, tile, buffer);
  T* result = buffer + kTileRows * kChunk;
  Softmax<T> state[kTileRows];
  if (!problem.renormalize) absorb_rows(problem, input, tile.rows, state);
  T sum[kTileRows], norm[kTileRows];
  for (int64_t r = 0; r < tile.rows; ++r) {
    const double dot = sum_over<double>(problem.k, [&](int64_t j) { return static_cast<double>(grad(r, j)) * output(r, j); });
    const double total = sum_over<double>(problem.k, [&](int64_t j) { return output(r, j); });
    norm[r] = problem.renormalize && problem.k > 0 ? static_cast<T>(1 / total) : T(1);
    sum[r] = static_cast<T>(problem.renormalize && problem.k > 0 ? dot / total : dot);
  }

  for_each_chunk(problem, [&](int64_t begin, int64_t count) {
    if (!problem.renormalize) input.read(begin, count);
    for (int64_t r = 0; r < tile.rows; ++r) {
      T* g = result + r * kChunk;
      const Softmax<T> row = state[r];
      const T scale = row.inverse_sum();
      if (problem.renormalize)
        for (int64_t c = 0; c < count; ++c) g[c] = sum[r] - sum[r];  // 0, or NaN where the row's softmax is NaN
      else
        for (int64_t c = 0; c < count; ++c) g[c] = -sum[r] * (row.weight(input.row(r)[c]) * scale);
    }
    store(problem, problem.dtype, problem.grad_input, tile, begin, count, result);
  });
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t* indices = indices_of_row(problem, tile, r);
    for (int64_t j = 0; j < problem.k; ++j) {
      const int64_t c = indices[j * problem.indices.stride[1]];
      if (c >= 0 && c < problem.classes)
        store_one(problem, problem.dtype, problem.grad_input, tile, r, c, (grad(r, j) - sum[r]) * (output(r, j) * norm[r]));
      else
        report_bad_row(problem, tile.number + r);
    }
  }
}

}  // namespace

void topk_softmax(const RowProblem& problem, const Executor& executor) {
  for_each_tile(problem, executor, [&](const Tile& tile, auto* buffer) { forward_tile(problem, tile, buffer); });
}

void topk_softmax_backward(const RowProblem& problem, const Executor& executor) {
  for_each_tile(problem, executor, [&](const Tile& tile, auto* buffer) { backward_tile(problem, tile, buffer); });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
