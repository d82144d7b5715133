// Every operator of the library, on one page. The implementations are in attention/, softmax.cpp, cross_entropy.cpp, topk.cpp
// and copy_blocks.cpp; fakes and flop formulas in flash_online/_ops.py, in this order. Derivatives are registered from Python
// (flash_online/_autograd.py), as the stable ABI does not offer autograd; operators.h says what `define` makes of a schema.
//
// Conventions: attention takes [..., heads, length, head_dim] tensors of one rank >= 4 with equal batch dimensions (broadcast
// by strides of 0), or packed ones; a mask has their rank and a size of 1 where it is broadcast; a window bound below 0 is no
// bound; a gradient that is not requested is returned without elements. "Accumulator type" is float64 for float64 inputs,
// float32 otherwise.
#include <torch/csrc/stable/library.h>

#include "operators.h"

using flash_online::ops::define;

STABLE_TORCH_LIBRARY(flash_online, m) {
  // softmax(g(scale query key^T) + mask) value -> out (strides in the query's order), lse and the part of it that rounding
  // dropped ([..., heads, queries], accumulator type). scale, here and below: None is 1 / sqrt(head_dim), for any head_dim that
  // a graph is run with. rng: int64[2] (seed, offset), needed if dropout_p > 0. tf32, here and below: float32 products on CUDA
  // may have fewer digits than float32, but no fewer than tf32; no effect elsewhere. deterministic: whether the derivative's
  // backward pass must be reproducible; None asks torch at this call. query_spans, key_spans: int32 [..., 1 or heads, queries
  // or keys, 2 or 4], the intervals of keys that a query may see, and of queries that may see a key. tiles: bool [..., 1 or
  // heads, tiles of 64 queries, tiles of 64 or 128 keys], where any query may see any key; how many there are says which. Their
  // batch dimensions may be 1.
  define(m,
         "attention_forward(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? alibi_slopes, Tensor? sinks, "
         "Tensor? rng, SymInt window_left, SymInt window_right, bool lower_right, float? scale, float softcap, "
         "float dropout_p, bool tf32=False, bool? deterministic=None, Tensor? query_spans=None, Tensor? key_spans=None, "
         "Tensor? tiles=None) -> (Tensor out, Tensor lse, Tensor lse_low)");
  // The same with max_logit, float32 [..., heads], without a gradient: the largest score that a query of the head sees; NaN if
  // one is NaN.
  define(m,
         "attention_forward_with_max_logit(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? alibi_slopes, "
         "Tensor? sinks, Tensor? rng, SymInt window_left, SymInt window_right, bool lower_right, float? scale, float softcap, "
         "float dropout_p, bool tf32=False, bool? deterministic=None, Tensor? query_spans=None, Tensor? key_spans=None, "
         "Tensor? tiles=None) -> (Tensor out, Tensor lse, Tensor lse_low, Tensor max_logit)");
  // attention_forward's out alone, for a call without gradients and options.
  define(
      m,
      "attention_inference(Tensor query, Tensor key, Tensor value, bool causal, float? scale, bool tf32=False) -> Tensor out");
  // attention_forward without gradients and dropout. lse has no elements unless it is wanted.
  define(m,
         "attention_inference_with_options(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? alibi_slopes, "
         "Tensor? sinks, SymInt window_left, SymInt window_right, bool lower_right, float? scale, float softcap, "
         "bool tf32=False, Tensor? query_spans=None, Tensor? key_spans=None, Tensor? tiles=None, bool return_lse=True) -> "
         "(Tensor out, Tensor lse)");
  // A call without options that has a backward pass. stats: lse, then lse_low, [2 batch, ..., heads, queries].
  define(
      m,
      "attention_training(Tensor query, Tensor key, Tensor value, bool causal, float? scale, bool tf32=False) -> (Tensor out, "
      "Tensor stats)");
  define(m,
         "attention_training_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor stats, "
         "bool causal, float? scale, bool deterministic, bool tf32=False) -> (Tensor grad_query, Tensor grad_key, "
         "Tensor grad_value)");
  define(m,
         "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor? mask, "
         "Tensor? alibi_slopes, Tensor? sinks, Tensor? rng, Tensor out, Tensor lse, Tensor lse_low, SymInt window_left, "
         "SymInt window_right, bool lower_right, float? scale, float softcap, float dropout_p, bool mask_grad, "
         "bool deterministic, bool tf32=False, Tensor? query_spans=None, Tensor? key_spans=None, Tensor? tiles=None) -> "
         "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_mask, Tensor grad_sinks)");
  // Packed sequences: query, out [total queries, heads, head_dim], key and value [total keys, heads, head_dim], lse [heads,
  // total queries]. cu_seqlens_*: int32 [sequences + 1], the first row of each sequence and the end of the last. Only the
  // device reads them: values out of order or out of range raise no error and touch no other memory. A sequence longer than
  // max_seqlen_* is cut. Spans [1 or heads, total, 2 or 4] count from a sequence's first query, or key. Padding rows have
  // results and gradients of 0, and lse -inf.
  define(m,
         "attention_varlen_forward(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
         "Tensor? alibi_slopes, Tensor? sinks, Tensor? rng, SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt window_left, "
         "SymInt window_right, bool lower_right, float? scale, float softcap, float dropout_p, bool tf32=False, "
         "bool? deterministic=None, Tensor? query_spans=None, Tensor? key_spans=None) -> (Tensor out, Tensor lse, "
         "Tensor lse_low)");
  // The same with max_logit, float32 [sequences, heads].
  define(m,
         "attention_varlen_forward_with_max_logit(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, "
         "Tensor cu_seqlens_k, Tensor? alibi_slopes, Tensor? sinks, Tensor? rng, SymInt max_seqlen_q, SymInt max_seqlen_k, "
         "SymInt window_left, SymInt window_right, bool lower_right, float? scale, float softcap, float dropout_p, "
         "bool tf32=False, bool? deterministic=None, Tensor? query_spans=None, Tensor? key_spans=None) -> (Tensor out, "
         "Tensor lse, Tensor lse_low, Tensor max_logit)");
  define(m,
         "attention_varlen_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
         "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? alibi_slopes, Tensor? sinks, Tensor? rng, Tensor out, Tensor lse, "
         "Tensor lse_low, SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt window_left, SymInt window_right, bool lower_right, "
         "float? scale, float softcap, float dropout_p, bool deterministic, bool tf32=False, Tensor? query_spans=None, "
         "Tensor? key_spans=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks)");
  // The sums of exp(score - lse) per key over the queries, float32 [batch, heads, keys]: query and key [batch, heads, length,
  // head_dim], lse [batch, heads, queries], as attention_forward returns it. Of the last `last` queries alone, or all if < 0.
  define(m,
         "attention_weight_sums(Tensor query, Tensor key, Tensor lse, SymInt window_left, SymInt window_right, "
         "bool lower_right, SymInt last, float? scale, float softcap) -> Tensor sums");
  // Attention with products in e4m3, without gradients: query [batch, heads, queries, head_dim], key and value [batch, key
  // heads, keys, width], all e4m3, with scales (float32 [batch, key heads], none: 1) that they are multiplied by; or all of one
  // 16-bit dtype, quantised by the largest finite magnitude of a batch and key head, and keys less their mean over the sequence
  // if smooth_keys. sinks: float32 [heads]. out: 16 bits, strides in the query's order; lse
  // [batch, heads, queries], float32, without elements unless it is wanted.
  define(
      m,
      "float8_attention(Tensor query, Tensor key, Tensor value, Tensor? query_scale, Tensor? key_scale, "
      "Tensor? value_scale, bool smooth_keys, SymInt window_left, SymInt window_right, bool lower_right, Tensor? query_spans, "
      "Tensor? key_spans, float softcap, Tensor? sinks, float? scale, ScalarType out_dtype, bool return_lse) -> "
      "(Tensor out, Tensor lse)");
  // The weights that dropout keeps: bool [batch, heads, queries, keys], from batch_begin and query_begin on.
  define(m,
         "attention_dropout_mask(Tensor rng, SymInt batch_begin, SymInt batch, SymInt heads, SymInt query_begin, "
         "SymInt queries, SymInt keys, float dropout_p) -> Tensor");
}

STABLE_TORCH_LIBRARY_FRAGMENT(flash_online, m) {
  // From lists of blocks, counts [..., blocks of queries] and indices [..., blocks of queries, capacity] (int32, any values),
  // to `tiles` of attention_forward, [..., tiles of queries, blocks of keys]. A block has `rows` queries and `columns` keys,
  // multiples of 64.
  define(m, "block_tiles(Tensor counts, Tensor indices, int rows, int columns, SymInt queries, SymInt keys) -> Tensor");
  // The mean query of each block of `rows` queries, 64 or 128, and the mean key of each block of `columns` keys, float32
  // [batch, heads, blocks, head_dim]. Query and key [batch, heads, length, head_dim]. The kernel for the CPU is in Python
  // (blocks.py).
  define(m, "block_means(Tensor query, Tensor key, int rows, int columns) -> (Tensor, Tensor)");
  // The largest score of each block of queries and block of keys, likewise, float32 [batch, heads, blocks of queries, blocks of
  // keys]; -inf where nothing is seen.
  define(m, "block_maxima(Tensor query, Tensor key, int rows, int columns, bool causal, float scale) -> Tensor");
  // The k blocks of keys with the largest scores (float32 [..., blocks of queries, blocks of keys]) as a list: counts and
  // ascending indices, int32 [...] and [..., k]. NaN and -inf are left out. causal: so are blocks of keys after the one with
  // the block's last query, which is always among them; a block has `rows` queries and `columns` keys.
  define(m, "block_topk(Tensor scores, SymInt k, bool causal, int rows, int columns) -> (Tensor counts, Tensor indices)");
}

STABLE_TORCH_LIBRARY_FRAGMENT(flash_online, m) {
  // Attention over cached keys, without gradients: query [sequences, heads, length, head_dim], or with query_starts (int32
  // [sequences + 1]) packed; caches [blocks, key heads, page, head_dim], any strides, query's dtype, or float8 with 16-bit
  // queries. Entry e of a sequence's row of block_table (int32, column stride 1) is the block of its keys e * page and on;
  // without a table a sequence has one block. rows[n] (cache_batch_idx) is the table's row, or the block, of sequence n. Its
  // keys are [left[n], lengths[n] + new), where new is new_keys or the difference of two new_starts, at most new_keys;
  // lower_right aligns the last query with the last key, else the first query is aligned with the first key. query_lengths: the
  // number of packed queries of a sequence that are used. All of these are int32, read on the device alone: any value is safe.
  // key_scale, value_scale: float32 [sequences, key heads]. splits: how many kv_splits each sequence's keys are cut into; 0:
  // the kernel chooses. query_spans: as in attention_forward, or [1 or heads, rows, 2 or 4] of packed queries; they count from
  // the cache's first key. Padding rows have results of 0 and lse -inf.
  define(m,
         "attention_cached(Tensor query, Tensor key_cache, Tensor value_cache, Tensor? lengths, Tensor? left, Tensor? rows, "
         "Tensor? block_table, Tensor? query_starts, Tensor? query_lengths, Tensor? new_starts, Tensor? alibi_slopes, "
         "Tensor? sinks, Tensor? key_scale, Tensor? value_scale, SymInt new_keys, SymInt max_queries, SymInt window_left, "
         "SymInt window_right, bool lower_right, float? scale, float softcap, SymInt splits, Tensor? query_spans=None) -> "
         "(Tensor out, Tensor lse)");
  define(m,
         "attention_cached_(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor? lengths, Tensor? left, "
         "Tensor? rows, Tensor? block_table, Tensor? query_starts, Tensor? query_lengths, Tensor? new_starts, "
         "Tensor? alibi_slopes, Tensor? sinks, Tensor? key_scale, Tensor? value_scale, SymInt new_keys, SymInt max_queries, "
         "SymInt window_left, SymInt window_right, bool lower_right, float? scale, float softcap, SymInt splits, "
         "Tensor? query_spans=None) -> Tensor lse");
  // attention_cached's out alone, for a step of decoding without new keys and options: causal, lower_right, each query
  // [sequences, heads, length, head_dim] over its sequence's keys [0, lengths[n]).
  define(m,
         "attention_decode(Tensor query, Tensor key_cache, Tensor value_cache, Tensor? lengths, Tensor? block_table, "
         "SymInt window_left, float? scale, SymInt splits) -> Tensor out");
  // Writes new keys and values into the caches of attention_cached, after each sequence's length, or at slots (int64, rows of
  // the pool): key [sequences, key heads, new, head_dim], or with new_starts or slots packed. Float8 caches hold rows divided
  // by their scale. cosines, sines [positions, width / 2]: keys and `query` are rotated (pairs of columns are halves, or
  // interleaved) to their positions, or to positions from offsets on (int32 per sequence, or per slot); all queries to the
  // first one unless queries_advance. Returns the rotated query, or a tensor without elements if there is no query.
  define(m,
         "cache_append_(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor? key, Tensor? value, Tensor? query, "
         "Tensor? lengths, Tensor? left, Tensor? rows, Tensor? block_table, Tensor? slots, Tensor? new_starts, "
         "Tensor? query_starts, Tensor? cosines, Tensor? sines, Tensor? offsets, Tensor? key_scale, Tensor? value_scale, "
         "bool interleaved, bool queries_advance) -> Tensor rotated");
  // Merges partial results over disjoint keys: outs[i] [..., head_dim] of one dtype, lses[i] [...] of the accumulator type.
  define(m, "attention_merge(Tensor[] outs, Tensor[] lses) -> (Tensor out, Tensor lse)");
  define(m,
         "attention_merge_backward(Tensor grad_out, Tensor grad_lse, Tensor[] outs, Tensor[] lses) -> "
         "(Tensor[] grad_outs, Tensor[] grad_lses)");
  // New tensors, on the device of sources[0], whose elements are blocks of the sources: the messages of a collective, and what
  // arrives in them. plan: the number of results; of each the index of the source whose dtype it has (-1: uint8), its rank,
  // sizes and strides; the number of blocks; of each the source, the result, bytes per unit, the first unit of both, and its
  // rank, with size, stride in the source and stride in the result of each dimension. What no block covers is undefined.
  define(m, "copy_blocks(Tensor[] sources, int[] plan) -> Tensor[]");
  // Replaces torch's flash attention operators on CUDA with ours (attention/torch_sdpa.cpp), or restores them.
  m.def("torch_sdpa_register(bool active, bool inplace) -> ()");
}

STABLE_TORCH_LIBRARY_FRAGMENT(flash_online, m) {
  // softmax or its logarithm along dim (0 <= dim < input.dim), contiguous, in dtype: the input's, or float32 for a 16-bit one.
  define(m, "softmax_forward(Tensor input, int dim, bool log, ScalarType dtype) -> Tensor");
  define(m, "softmax_backward(Tensor grad, Tensor output, int dim, bool log, ScalarType input_dtype) -> Tensor");
  // log(sum(exp(input))) along dim, which the result lacks, in dtype: the accumulator type (None), or the input's. The gradient
  // has either dtype.
  define(m, "logsumexp_forward(Tensor input, int dim, ScalarType? dtype=None) -> Tensor");
  define(m, "logsumexp_backward(Tensor grad, Tensor input, int dim) -> Tensor");
  // One loss per row, unreduced: input [N, C, ...]; target int64 [N, ...], or probabilities like the input; weight [C] of the
  // accumulator type. -> loss, lse and the row's weight (weight[target]; 0 for an ignored row, 1 for probabilities), each
  // [N, ...] in the accumulator type; and the entropy of the row's softmax, of ignored rows too, without elements unless it is
  // wanted. A target out of range is an error that says "out of bounds". The backward pass takes the forward's entropy where
  // grad_entropy is given.
  define(m,
         "cross_entropy_forward(Tensor input, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, "
         "bool return_entropy=False) -> (Tensor loss, Tensor lse, Tensor row_weight, Tensor entropy)");
  define(m,
         "cross_entropy_backward(Tensor grad_loss, Tensor? grad_lse, Tensor input, Tensor target, Tensor? weight, "
         "int ignore_index, float label_smoothing, bool target_grad, Tensor? grad_entropy=None, Tensor? entropy=None) -> "
         "(Tensor grad_input, Tensor grad_target)");
  // The losses of all rows reduced to one element of dtype (the input's, or float32 for a 16-bit one): their sum, divided by
  // the sum of the rows' weights if `mean`. numbers, in the accumulator type: the row scalars, if they are kept (on
  // CUDA, only of few rows), and last the divisor of the sum (1 without `mean`), the only one that the backward pass reads.
  define(m,
         "cross_entropy_loss(Tensor input, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, bool mean, "
         "ScalarType dtype) -> (Tensor loss, Tensor numbers)");
  define(m,
         "cross_entropy_loss_backward(Tensor grad, Tensor numbers, Tensor input, Tensor target, Tensor? weight, "
         "int ignore_index, float label_smoothing) -> Tensor grad_input");
  // cross_entropy_backward that overwrites input with grad_input, so that one tensor of logits is in memory instead of two.
  // With `forward` it also returns cross_entropy_forward's results, which otherwise have no elements.
  define(m,
         "cross_entropy_backward_(Tensor grad_loss, Tensor? grad_lse, Tensor(a!) input, Tensor target, Tensor? weight, "
         "int ignore_index, float label_smoothing, bool target_grad, bool forward, bool return_entropy=False, "
         "Tensor? grad_entropy=None, Tensor? entropy=None) -> "
         "(Tensor loss, Tensor lse, Tensor row_weight, Tensor entropy, Tensor grad_target)");
  // The k largest probabilities along dim, descending, and their indices (int64); k <= input.size(dim).
  define(m,
         "topk_softmax_forward(Tensor input, int k, int dim, bool renormalize, ScalarType dtype) -> "
         "(Tensor probabilities, Tensor indices)");
  define(m,
         "topk_softmax_backward(Tensor grad, Tensor probabilities, Tensor indices, Tensor input, int dim, bool renormalize) "
         "-> Tensor");
}
