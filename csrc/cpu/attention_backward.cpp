// Attention on the CPU, backward: gradients of query, key and value, of the mask and of sinks. Scores are made again, a tile at
// a time. FlashAttention (arXiv 2205.14135, appendix B.4), keys in the outer loop.
//
// Work items: the heads that share keys and values; a tile of the mask. An item writes its own results alone.
#include <numeric>

#include "attention_tile.h"

namespace flash_online::cpu::FLASH_ONLINE_ISA {
namespace {

// The tiles that both backward passes recompute scores with.
template <class A>
struct GradientScratch : ScoreTile<A> {
  A *grad_out, *out, *value, *value_transposed, *weight, *grad_score, *slope, *delta;
  double *wide_grad_out, *wide_value_transposed, *wide_grad_weight, *wide_delta;

  GradientScratch(const AttentionProblem& problem, Carver& carver) : ScoreTile<A>(problem, carver) {
    const int64_t value_width = padded(problem.value_width);
    grad_out = carver.take<A>(kQueries * value_width);
    out = carver.take<A>(kQueries * value_width);
    value = carver.take<A>(kKeys * value_width);
    value_transposed = carver.take<A>(problem.value_width * kKeys);
    weight = carver.take<A>(kQueries * kKeys);
    grad_score = carver.take<A>(kQueries * kKeys);
    slope = carver.take<A>(kQueries * kKeys);
    delta = carver.take<A>(kQueries);
    const bool may_be_wide = problem.dtype == DType::kFloat32;
    wide_grad_out = carver.take<double>(may_be_wide ? kQueries * value_width : 0);
    wide_value_transposed = carver.take<double>(may_be_wide ? problem.value_width * kKeys : 0);
    wide_grad_weight = carver.take<double>(may_be_wide ? kQueries * kKeys : 0);
    wide_delta = carver.take<double>(kQueries);
  }
};

template <class E, class A>
void load_keys(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t begin, int64_t count,
               const GradientScratch<A>& tile) {
  load_rows<E>(problem.key, batch, head / (problem.heads / problem.key_heads), begin, count, problem.width, tile.key);
  transpose(tile.key, count, problem.width, tile.key_transposed);
  load_rows<E>(problem.value, batch, head / (problem.heads / problem.value_heads), begin, count, problem.value_width,
               tile.value);
  transpose(tile.value, count, problem.value_width, tile.value_transposed);
}

// Queries [first, first + rows) and the gradients of their results. delta is the part of a score's gradient that its whole row
// shares, the sum over keys of weight * grad_weight - grad_lse; see fill_delta.
template <class E, class A>
void load_queries(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t batch, int64_t head,
                  int64_t first, int64_t rows, const GradientScratch<A>& tile) {
  load_rows<E>(problem.query, batch, head, first, rows, problem.width, tile.query);
  load_rows<E>(gradients.grad_out, batch, head, first, rows, problem.value_width, tile.grad_out);
  const int64_t row = (batch * problem.heads + head) * problem.queries + first;
  std::copy_n(static_cast<const A*>(gradients.delta) + row, rows, tile.delta);
  if (gradients.wide_delta) std::copy_n(gradients.wide_delta + row, rows, tile.wide_delta);
}

// weight = the (dropped) attention weights of a tile; grad_score = the gradient of the scores that the exponential took, times,
// if `of_product`, that of query . key. weight_sum, if any, is increased by the sum of each query's weights before dropout.
template <class E, class A>
void score_gradients(const AttentionProblem& problem, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t begin,
                     int64_t count, bool of_product, const GradientScratch<A>& tile, double* weight_sum = nullptr) {
  const int64_t row = (batch * problem.heads + head) * problem.queries + first;
  const int64_t value_width = padded(problem.value_width), columns = padded(count);
  const bool any_wide = compute_scores<E, A>(problem, batch, head, first, rows, begin, count, tile, tile.weight, tile.slope);
  std::fill_n(tile.grad_score, rows * kKeys, A(0));
  multiply(rows, columns, problem.value_width, tile.grad_out, value_width, 1, tile.value_transposed, kKeys, tile.grad_score,
           kKeys);
  if (any_wide) {
    // Large scores mostly leave one weight near 1, whose gradient and delta nearly cancel: these, too, in double.
    std::copy_n(tile.grad_out, rows * value_width, tile.wide_grad_out);
    std::copy_n(tile.value_transposed, problem.value_width * kKeys, tile.wide_value_transposed);
    std::fill_n(tile.wide_grad_weight, rows * kKeys, 0.0);
    multiply(rows, columns, problem.value_width, tile.wide_grad_out, value_width, 1, tile.wide_value_transposed, kKeys,
             tile.wide_grad_weight, kKeys);
  }
  for (int64_t i = 0; i < rows; ++i) {
    A *weight = tile.weight + i * kKeys, *grad = tile.grad_score + i * kKeys;
    const A lse = pivot(static_cast<const A*>(problem.lse)[row + i]), low = static_cast<const A*>(problem.lse_low)[row + i];
    // score - lse is exact where it matters, near 0; lse_low then restores what rounding took from lse.
    if (tile.is_wide[i])
      for (int64_t j = 0; j < columns; ++j)
        weight[j] = FastNatural::exp(static_cast<A>((tile.wide_score[i * kKeys + j] - lse) - low));
    else
      for (int64_t j = 0; j < columns; ++j) weight[j] = FastNatural::exp((weight[j] - lse) - low);
    if (weight_sum) weight_sum[i] += reduce(columns, 0.0, SumOf<double, A>{weight});

    double* wide_grad_weight = tile.wide_grad_weight + i * kKeys;
    A kept[kKeys];
    if (problem.dropout > 0) {
      std::fill_n(kept, columns, A(1));
      drop<A>(problem, batch, head, first + i, begin, count, kept);
      if (tile.is_wide[i])
        for (int64_t j = 0; j < columns; ++j) wide_grad_weight[j] *= kept[j];
      else
        for (int64_t j = 0; j < columns; ++j) grad[j] *= kept[j];
    }
    if (tile.is_wide[i]) {
      const double delta = tile.wide_delta[i];
      for (int64_t j = 0; j < columns; ++j) grad[j] = weight[j] * static_cast<A>(wide_grad_weight[j] - delta);
    } else {
      const A delta = tile.delta[i];
      for (int64_t j = 0; j < columns; ++j) grad[j] = weight[j] * (grad[j] - delta);
    }
    if (problem.dropout > 0)
      for (int64_t j = 0; j < columns; ++j) weight[j] *= kept[j];
    if (!of_product) continue;
    const A scale = static_cast<A>(problem.scale);
    if (problem.softcap > 0)
      for (int64_t j = 0; j < count; ++j) grad[j] *= tile.slope[i * kKeys + j];
    for (int64_t j = 0; j < count; ++j) grad[j] *= scale;
  }
}

// The weight that a head's sink has among the scores of the query that `row` counts over batches, heads and queries.
template <class A>
A sink_weight(const AttentionProblem& problem, int64_t head, int64_t row) {
  const A lse = pivot(static_cast<const A*>(problem.lse)[row]), low = static_cast<const A*>(problem.lse_low)[row];
  return FastNatural::exp((static_cast<const A*>(problem.sinks)[head] - lse) - low);
}

bool meet(const Visibility& visible, int64_t first, int64_t last, int64_t begin, int64_t end, int64_t keys) {
  const KeyRange range = keys_of_any(visible, first, last, keys);
  return range.begin < end && begin < range.end;
}

// delta of a tile of queries, by grad_out . out, which equals the sum over keys but for the rounding of out. The gradients of a
// mask and of sinks add up whole rows, where that rounding does not average out (the sum over a row's scores is 0 without
// sinks): for them the sum is taken over the keys themselves, two matrix products more.
template <class E>
void fill_delta(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t batch, int64_t head,
                int64_t first, std::byte* scratch) {
  using A = Accumulator<E>;
  Carver carver(scratch);
  const GradientScratch<A> tile(problem, carver);
  const int64_t rows = std::min(kQueries, problem.queries - first), value_width = padded(problem.value_width);
  const int64_t row = (batch * problem.heads + head) * problem.queries + first;
  A* narrow_delta = static_cast<A*>(gradients.delta) + row;
  double delta[kQueries] = {}, weight_sum[kQueries] = {};
  // A delta of 0 makes score_gradients, below, give weight * grad_weight, the terms of delta.
  std::fill_n(narrow_delta, rows, A(0));
  if (gradients.wide_delta) std::fill_n(gradients.wide_delta + row, rows, 0.0);
  if (gradients.grad_mask.data || gradients.grad_sinks) {
    load_queries<E>(problem, gradients, batch, head, first, rows, tile);
    const KeyRange range = keys_of_any(problem.visible, first, first + rows, problem.keys);
    for (int64_t begin = range.begin / kKeys * kKeys; begin < range.end; begin += kKeys) {
      const int64_t count = std::min(kKeys, problem.keys - begin);
      load_keys<E>(problem, batch, head, begin, count, tile);
      score_gradients<E, A>(problem, batch, head, first, rows, begin, count, false, tile, weight_sum);
      for (int64_t i = 0; i < rows; ++i) delta[i] += reduce(padded(count), 0.0, SumOf<double, A>{tile.grad_score + i * kKeys});
    }
    for (int64_t i = 0; i < rows; ++i) {
      // The weights add up to 1 but for their rounding, which divides out.
      if (problem.sinks) weight_sum[i] += sink_weight<A>(problem, head, row + i);
      if (weight_sum[i] != 0) delta[i] /= weight_sum[i];
      narrow_delta[i] = static_cast<A>(delta[i]);
    }
  } else {
    load_rows<E>(gradients.grad_out, batch, head, first, rows, problem.value_width, tile.grad_out);
    load_rows<E>(problem.out, batch, head, first, rows, problem.value_width, tile.out);
    // In the order of multiply(): where a query sees one key alone, delta is then the gradient of its weight to the last bit,
    // and their difference 0.
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t e = 0; e < value_width; ++e) {
        const A grad = tile.grad_out[i * value_width + e], out = tile.out[i * value_width + e];
        narrow_delta[i] += grad * out;
        delta[i] += static_cast<double>(grad) * out;
      }
  }
  for (int64_t i = 0; i < rows; ++i) {
    const A grad_lse = gradients.grad_lse ? static_cast<const A*>(gradients.grad_lse)[row + i] : A(0);
    narrow_delta[i] -= grad_lse;
    if (gradients.wide_delta) gradients.wide_delta[row + i] = delta[i] - grad_lse;
  }
}

// The heads that share keys or values form a group: one work item, which owns the gradients of its keys and values.
int64_t groups_of(const AttentionProblem& problem) { return std::gcd(problem.key_heads, problem.value_heads); }

template <class A>
struct BackwardScratch : GradientScratch<A> {
  A *grad_query, *grad_key, *grad_value;  // [queries, width] of a head; [heads of the group, keys, width]

  BackwardScratch(const AttentionProblem& problem, Carver& carver) : GradientScratch<A>(problem, carver) {
    const int64_t groups = groups_of(problem);
    grad_query = carver.take<A>(problem.queries * padded(problem.width));
    grad_key = carver.take<A>(problem.key_heads / groups * problem.keys * padded(problem.width));
    grad_value = carver.take<A>(problem.value_heads / groups * problem.keys * padded(problem.value_width));
  }
};

template <class E>
void backward_group(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t batch, int64_t group,
                    std::byte* scratch) {
  using A = Accumulator<E>;
  Carver carver(scratch);
  const BackwardScratch<A> tile(problem, carver);
  const int64_t groups = groups_of(problem), heads = problem.heads / groups;
  const int64_t key_heads = problem.key_heads / groups, value_heads = problem.value_heads / groups;
  const int64_t width = padded(problem.width), value_width = padded(problem.value_width);
  std::fill_n(tile.grad_key, key_heads * problem.keys * width, A(0));
  std::fill_n(tile.grad_value, value_heads * problem.keys * value_width, A(0));

  for (int64_t member = 0; member < heads; ++member) {
    const int64_t head = group * heads + member;
    A* grad_key = tile.grad_key + member / (heads / key_heads) * problem.keys * width;
    A* grad_value = tile.grad_value + member / (heads / value_heads) * problem.keys * value_width;
    std::fill_n(tile.grad_query, problem.queries * width, A(0));
    for (int64_t begin = 0; begin < problem.keys; begin += kKeys) {
      const int64_t count = std::min(kKeys, problem.keys - begin);
      load_keys<E>(problem, batch, head, begin, count, tile);
      for (int64_t first = 0; first < problem.queries; first += kQueries) {
        const int64_t rows = std::min(kQueries, problem.queries - first);
        if (!meet(problem.visible, first, first + rows, begin, begin + count, problem.keys)) continue;
        load_queries<E>(problem, gradients, batch, head, first, rows, tile);
        score_gradients<E, A>(problem, batch, head, first, rows, begin, count, true, tile);
        multiply(count, value_width, rows, tile.weight, 1, kKeys, tile.grad_out, value_width, grad_value + begin * value_width,
                 value_width);
        multiply(count, width, rows, tile.grad_score, 1, kKeys, tile.query, width, grad_key + begin * width, width);
        multiply(rows, width, count, tile.grad_score, kKeys, 1, tile.key, width, tile.grad_query + first * width, width);
      }
    }
    store_rows<E>(tile.grad_query, gradients.grad_query, batch, head, 0, problem.queries, problem.width);
  }
  for (int64_t h = 0; h < key_heads; ++h)
    store_rows<E>(tile.grad_key + h * problem.keys * width, gradients.grad_key, batch, group * key_heads + h, 0, problem.keys,
                  problem.width);
  for (int64_t h = 0; h < value_heads; ++h)
    store_rows<E>(tile.grad_value + h * problem.keys * value_width, gradients.grad_value, batch, group * value_heads + h, 0,
                  problem.keys, problem.value_width);
}

// A sink joins the denominator alone: its gradient is the sum over queries of its weight times grad_lse - grad_out . out.
template <class A>
void sink_gradient(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t batch, int64_t head) {
  const int64_t row = (batch * problem.heads + head) * problem.queries;
  double sum = 0;
  for (int64_t i = row; i < row + problem.queries; ++i)
    sum -= sink_weight<A>(problem, head, i) *
           (gradients.wide_delta ? gradients.wide_delta[i] : static_cast<double>(static_cast<const A*>(gradients.delta)[i]));
  static_cast<A*>(gradients.grad_sinks)[batch * problem.heads + head] = static_cast<A>(sum);
}

// One tile of the mask's gradient: the gradients of all scores that its elements were added to, summed in registers' reach
// instead of in a tensor of all scores. Costs two matrix products more, needs no memory but the gradient itself.
template <class A>
struct MaskScratch : GradientScratch<A> {
  A* sum;

  MaskScratch(const AttentionProblem& problem, Carver& carver) : GradientScratch<A>(problem, carver) {
    sum = carver.take<A>(kQueries * kKeys);
  }
};

template <class E>
void mask_gradient_tile(const AttentionProblem& problem, const AttentionGradients& gradients, int64_t mask_batch,
                        int64_t mask_head, int64_t first_tile, int64_t first_block, std::byte* scratch) {
  using A = Accumulator<E>;
  Carver carver(scratch);
  const MaskScratch<A> tile(problem, carver);
  const int64_t* size = gradients.mask_size;
  const bool every_batch = size[0] == 1, every_head = size[1] == 1, every_query = size[2] == 1, every_key = size[3] == 1;
  std::fill_n(tile.sum, kQueries * kKeys, A(0));

  for (int64_t batch = every_batch ? 0 : mask_batch; batch < (every_batch ? problem.batch : mask_batch + 1); ++batch)
    for (int64_t head = every_head ? 0 : mask_head; head < (every_head ? problem.heads : mask_head + 1); ++head)
      for (int64_t begin = every_key ? 0 : first_block * kKeys;
           begin < (every_key ? problem.keys : std::min(problem.keys, (first_block + 1) * kKeys)); begin += kKeys) {
        const int64_t count = std::min(kKeys, problem.keys - begin);
        load_keys<E>(problem, batch, head, begin, count, tile);
        for (int64_t first = every_query ? 0 : first_tile * kQueries;
             first < (every_query ? problem.queries : std::min(problem.queries, (first_tile + 1) * kQueries));
             first += kQueries) {
          const int64_t rows = std::min(kQueries, problem.queries - first);
          if (!meet(problem.visible, first, first + rows, begin, begin + count, problem.keys)) continue;
          load_queries<E>(problem, gradients, batch, head, first, rows, tile);
          score_gradients<E, A>(problem, batch, head, first, rows, begin, count, false, tile);
          for (int64_t i = 0; i < rows; ++i) {
            A* sum = tile.sum + (every_query ? 0 : i * kKeys);
            const A* grad = tile.grad_score + i * kKeys;
            if (every_key)
              sum[0] += reduce(padded(count), A(0), SumOf<A>{grad});
            else
              for (int64_t j = 0; j < count; ++j) sum[j] += grad[j];
          }
        }
      }

  const MutableView4& to = gradients.grad_mask;
  const int64_t rows = every_query ? 1 : std::min(kQueries, problem.queries - first_tile * kQueries);
  const int64_t columns = every_key ? 1 : std::min(kKeys, problem.keys - first_block * kKeys);
  visit_floating<Float16, BFloat16>(gradients.grad_mask_dtype, [&]<class M>(Type<M>) {
    M* base = static_cast<M*>(to.data) + mask_batch * to.stride[0] + mask_head * to.stride[1] +
              first_tile * kQueries * to.stride[2] + first_block * kKeys * to.stride[3];
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        M& element = base[i * to.stride[2] + j * to.stride[3]];
        const auto before = gradients.add_to_grad_mask ? widen(element) : Accumulator<M>(0);
        element = narrow<M>(before + static_cast<Accumulator<M>>(tile.sum[i * kKeys + j]));
      }
  });
}

}  // namespace

int64_t backward_scratch(const AttentionProblem& problem) {
  int64_t bytes = 0;
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) {
    Carver backward(nullptr), mask(nullptr);
    BackwardScratch<Accumulator<E>>(problem, backward);
    MaskScratch<Accumulator<E>>(problem, mask);
    bytes = std::max(backward.used(), mask.used());
  });
  return bytes;
}

void backward(const AttentionProblem& problem, const AttentionGradients& gradients, const Executor& executor) {
  const int64_t groups = groups_of(problem), planes = problem.batch * problem.heads,
                query_tiles = tiles_of(problem.queries, kQueries);
  visit_floating<Float16, BFloat16>(problem.dtype, [&]<class E>(Type<E>) {
    for_each_item(executor, planes * query_tiles, [&](int64_t item, std::byte* scratch) {
      const int64_t plane = item / query_tiles;
      fill_delta<E>(problem, gradients, plane / problem.heads, plane % problem.heads, item % query_tiles * kQueries, scratch);
    });
    for_each_item(executor, problem.batch * groups, [&](int64_t item, std::byte* scratch) {
      backward_group<E>(problem, gradients, item / groups, item % groups, scratch);
    });
    if (gradients.grad_sinks)
      for_each_item(executor, planes, [&](int64_t item, std::byte*) {
        sink_gradient<Accumulator<E>>(problem, gradients, item / problem.heads, item % problem.heads);
      });
    if (gradients.grad_mask.data) {
      const int64_t* size = gradients.mask_size;
      const int64_t tiles = size[2] == 1 ? 1 : tiles_of(size[2], kQueries),
                    blocks = size[3] == 1 ? 1 : tiles_of(size[3], kKeys);
      for_each_item(executor, size[0] * size[1] * tiles * blocks, [&](int64_t item, std::byte* scratch) {
        const int64_t plane = item / (tiles * blocks), rest = item % (tiles * blocks);
        mask_gradient_tile<E>(problem, gradients, plane / size[1], plane % size[1], rest / blocks, rest % blocks, scratch);
      });
    }
  });
}

}  // namespace flash_online::cpu::FLASH_ONLINE_ISA
