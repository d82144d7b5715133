// The merge of partial results of attention over disjoint keys, on the CPU: Milakov and Gimelshein, arXiv 1805.02867, section
// 3.1, applied to the output as well.
#include "score_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {
namespace {

// Returns the merged state of the row with lses at `at`. The share of partial n is weight(lse_n) * inverse_sum_or_zero().
template <class A>
FLASH_ONLINE_INLINE Softmax<A> state_of(const MergeProblem& problem, int64_t at) {
  Softmax<A> state;
  for (int64_t n = 0; n < problem.partials; ++n) state.absorb(static_cast<const A*>(problem.partial[n].lse)[at]);
  return state;
}

}  // namespace

void merge(const MergeProblem& problem, const Executor& executor) {
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) {
    using A = Accumulator<E>;
    for_each_item(executor, problem.rows, [&](int64_t row, std::byte*) {
      const int64_t at = lse_row(problem, row);
      const Softmax<A> state = state_of<A>(problem, at);
      const A inverse = state.inverse_sum_or_zero();
      static_cast<A*>(problem.lse)[row] = state.lse();
      for (int64_t e = 0; e < problem.head_dim; ++e) {
        A sum = 0;
        for (int64_t n = 0; n < problem.partials; ++n) {
          const MergePartial& partial = problem.partial[n];
          const A share = state.weight(static_cast<const A*>(partial.lse)[at]) * inverse;
          // An empty partial has the share 0, whatever its row holds.
          const A value =
              static_cast<A>(widen(static_cast<const E*>(partial.out)[row * partial.row_stride + e * partial.column_stride]));
          if (share != A(0)) sum += share * value;
        }
        static_cast<E*>(problem.out)[row * problem.head_dim + e] = narrow<E>(sum);
      }
    });
  });
}

// With out = sum of s_n out_n, lse = log of the sum of exp(lse_n) and s_n = exp(lse_n - lse), the gradients are
// grad_out_n = s_n grad_out and grad_lse_n = s_n (grad_out . (out_n - out) + grad_lse).
void merge_backward(const MergeProblem& problem, const MergeGradients& gradients, const Executor& executor) {
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) {
    using A = Accumulator<E>;
    for_each_item(executor, problem.rows, [&](int64_t row, std::byte*) {
      const int64_t at = lse_row(problem, row);
      const Softmax<A> state = state_of<A>(problem, at);
      const auto share_of = [&, inverse = state.inverse_sum_or_zero()](const MergePartial& partial) {
        return state.weight(static_cast<const A*>(partial.lse)[at]) * inverse;
      };
      const E* grad_out = static_cast<const E*>(gradients.grad_out) + row * problem.head_dim;
      const auto dot_grad_out = [&](const MergePartial& partial) {
        A sum = 0;
        for (int64_t e = 0; e < problem.head_dim; ++e)
          sum +=
              static_cast<A>(widen(grad_out[e])) *
              static_cast<A>(widen(static_cast<const E*>(partial.out)[row * partial.row_stride + e * partial.column_stride]));
        return sum;
      };
      A dot_out = 0;  // grad_out . out
      for (int64_t n = 0; n < problem.partials; ++n) {
        const A share = share_of(problem.partial[n]);
        if (share != A(0)) dot_out += share * dot_grad_out(problem.partial[n]);
      }
      for (int64_t n = 0; n < problem.partials; ++n) {
        const MergePartial& partial = problem.partial[n];
        const A share = share_of(partial);
        for (int64_t e = 0; e < problem.head_dim; ++e)
          static_cast<E*>(partial.grad_out)[row * problem.head_dim + e] =
              narrow<E>(share != A(0) ? share * static_cast<A>(widen(grad_out[e])) : A(0));
        static_cast<A*>(partial.grad_lse)[row] =
            share != A(0) ? share * (dot_grad_out(partial) - dot_out + static_cast<const A*>(gradients.grad_lse)[row]) : A(0);
      }
    });
  });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
