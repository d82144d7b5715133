"""Second derivatives of attention: the JVP of its results and of its gradients, in differentiable torch operations.

The method is derived in docs/online_softmax_derivatives.md, section 12: with F = <out, grad_out> + <lse, grad_lse>, the
gradient of F contains both the forward and the backward pass, and its Jacobian is symmetric, so one function serves forward
mode, forward mode of the backward pass, and double backward.

Names: `d_x` is the tangent of x, and `grad_x` is the gradient of F with respect to x; None stands for a zero tangent. k, v and
other tensors of a chunk are in the accumulator's dtype, with the heads of keys and values repeated to the heads of queries:
[..., Hq, rows, E]. `scores` and tensors of their shape are [..., Hq, rows of the chunk, S].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._attention_arguments import AttentionGradients, AttentionOptions, AttentionTensors, default_scale
from ._block_arguments import LIST_TILE, tile_keys
from ._ops import accumulator_of, ops, without_autocast
from ._span_arguments import in_spans

_CHUNK_SCORES = 1 << 21  # scores that a second derivative holds at a time, over all batches and heads


class _Call(NamedTuple):
    """One call of attention: operands that all chunks share, and options as the raw operators take them."""

    k: Tensor
    v: Tensor
    mask: Tensor | None  # bool or floating, as given
    sink: Tensor | None  # [Hq, 1, 1]
    alibi_slopes: Tensor | None
    rng: Tensor | None
    options: AttentionOptions
    offset: int  # a query's position minus its index
    first_batch: int  # the batch index that the random bits of dropout start from
    query_spans: Tensor | None
    key_spans: Tensor | None
    tiles: Tensor | None


class _Tangents(NamedTuple):
    """Tangents of the operands that all chunks share."""

    k: Tensor | None
    v: Tensor | None
    mask: Tensor | None
    sink: Tensor | None


class _Chunk(NamedTuple):
    """Rows [begin, end) of the tensors that have a row per query."""

    begin: int
    end: int
    q: Tensor
    d_q: Tensor | None
    grad_out: Tensor | None
    d_grad_out: Tensor | None
    grad_lse: Tensor | None
    d_grad_lse: Tensor | None


class _ForwardChunk(NamedTuple):
    """The forward pass of a chunk with its derivative, as far as the backward pass needs it."""

    weights: Tensor
    d_weights: Tensor
    dropped: Tensor  # the weights after dropout
    d_dropped: Tensor
    dropout_scale: Tensor | None  # factor that dropout applies to each weight; None without dropout
    sink_weight: Tensor | None
    score_mod_first: Tensor | None  # derivatives of the score modification at scale * q k^T; None without softcap
    score_mod_second: Tensor | None
    d_products: Tensor  # of scale * q k^T
    d_out: Tensor
    d_lse: Tensor  # [..., Hq, rows, 1]


class _BackwardChunk(NamedTuple):
    """Tangents of a chunk's gradients. For keys, values and sinks they are this chunk's terms of a sum over chunks."""

    d_grad_query: Tensor
    d_grad_key: Tensor
    d_grad_value: Tensor
    d_grad_scores: Tensor
    d_grad_sinks: Tensor | None


@without_autocast  # keeps the products in the accumulator's dtype
def gradient_jvp(
    tensors: AttentionTensors,
    options: AttentionOptions,
    tangents: AttentionTensors,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    d_grad_out: Tensor | None = None,
    d_grad_lse: Tensor | None = None,
    first_batch: int = 0,
) -> tuple[Tensor, Tensor, AttentionGradients | None]:
    """The tangents of out and lse and, with grad_out, the tangents of the gradients of query, key, value, mask and sinks.

    The tensors have the canonical shapes. A tangent may be None for 0; tangents of alibi_slopes and rng are not read. Processes
    one chunk of queries at a time: memory is linear in the lengths, plus one chunk of _CHUNK_SCORES scores. `first_batch` is
    the batch index that the random bits of dropout start from.
    """
    query, key, value, mask, alibi_slopes, sinks, rng, query_spans, key_spans, tiles = tensors
    if options.scale is None:
        options = options._replace(scale=default_scale(query.shape[-1]))
    d_query, d_key, d_value, d_mask, _, d_sinks, *_ = tangents
    dtype = accumulator_of(query.dtype)
    heads, queries, keys = query.shape[-3], query.shape[-2], key.shape[-2]
    offset = keys - queries if options.lower_right else 0
    k, v, d_k, d_v = (
        None if tensor is None else tensor.to(dtype).repeat_interleave(heads // like.shape[-3], -3)
        for tensor, like in ((key, key), (value, value), (d_key, key), (d_value, value))
    )
    sink, d_sink = (None if tensor is None else tensor.to(dtype)[:, None, None] for tensor in (sinks, d_sinks))
    call = _Call(k, v, mask, sink, alibi_slopes, rng, options, offset, first_batch, query_spans, key_spans, tiles)
    shared = _Tangents(d_k, d_v, d_mask, d_sink)

    forward_chunks, backward_chunks = [], _BackwardSums(mask)
    for begin, end in _chunks(math.prod(query.shape[:-2]), queries, keys):
        by_row = ((query, -2), (d_query, -2), (grad_out, -2), (d_grad_out, -2), (grad_lse, -1), (d_grad_lse, -1))
        chunk = _Chunk(begin, end, *(_rows(tensor, dim, begin, end, dtype) for tensor, dim in by_row))
        forward = _forward_chunk(call, shared, chunk)
        forward_chunks.append((forward.d_out, forward.d_lse.squeeze(-1)))
        if grad_out is not None:
            backward_chunks.add(_backward_chunk(call, shared, chunk, forward))

    d_outs, d_lses = zip(*forward_chunks, strict=True)
    d_out, d_lse = torch.cat(d_outs, -2).to(query.dtype), torch.cat(d_lses, -1)
    return d_out, d_lse, None if grad_out is None else backward_chunks.results(query, key, value)


def _chunks(heads: int, queries: int, keys: int) -> list[tuple[int, int]]:
    """The rows of each chunk. With symbolic sizes there is one chunk, since a loop would specialize the graph to these
    sizes."""
    if not all(type(size) is int for size in (heads, queries, keys)):
        return [(0, queries)]
    rows = max(1, _CHUNK_SCORES // max(1, heads * keys))
    return [(begin, min(queries, begin + rows)) for begin in range(0, max(queries, 1), rows)]


def _rows(tensor: Tensor | None, dim: int, begin: int, end: int, dtype: torch.dtype) -> Tensor | None:
    """Rows [begin, end) of a tensor along its query dimension, in `dtype`; all of a tensor that is broadcast along it."""
    if tensor is None:
        return None
    return (tensor if tensor.shape[dim] == 1 else tensor.narrow(dim, begin, end - begin)).to(dtype)


def _scores(call: _Call, begin: int, end: int, products: Tensor):
    """(scores, visible, first and second derivative of the score modification) for products = scale * q k^T."""
    first = second = None
    scores = products
    if call.options.softcap > 0:
        tanh = torch.tanh(products / call.options.softcap)
        scores, first = call.options.softcap * tanh, 1 - tanh * tanh
        second = -2 / call.options.softcap * tanh * first
    position = torch.arange(begin, end, device=products.device).unsqueeze(-1) + call.offset
    columns = torch.arange(products.shape[-1], device=products.device)
    if call.alibi_slopes is not None:
        scores = scores - call.alibi_slopes[..., None, None] * (position - columns).abs()
    visible = torch.ones((), dtype=torch.bool, device=products.device)
    if call.options.window_left >= 0:
        visible = visible & (columns >= position - call.options.window_left)
    if call.options.window_right >= 0:
        visible = visible & (columns <= position + call.options.window_right)
    if call.query_spans is not None:
        visible = visible & in_spans(columns, call.query_spans.narrow(-2, begin, end - begin).unsqueeze(-2))
    if call.key_spans is not None:
        rows = torch.arange(begin, end, device=products.device).unsqueeze(-1)
        visible = visible & in_spans(rows, call.key_spans.unsqueeze(-3))
    if call.tiles is not None:
        rows = torch.arange(begin, end, device=products.device) // LIST_TILE
        visible = visible & call.tiles[..., rows, :][..., columns // tile_keys(call.tiles, call.k.shape[-2])]
    if call.mask is not None and call.mask.dtype == torch.bool:
        visible = visible & _rows(call.mask, -2, begin, end, torch.bool)
    elif call.mask is not None:
        scores = scores + _rows(call.mask, -2, begin, end, products.dtype)
    return scores.masked_fill(~visible, -math.inf), visible, first, second


def _softmax_with_sink(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The softmax of each row (0 for an empty row), and the weight of the sink, which counts as one more score of the row."""
    joined = scores if sink is None else torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
    if joined.shape[-1] == 0:
        pivot = joined.new_zeros(*joined.shape[:-1], 1)
    else:
        pivot = joined.detach().amax(-1, keepdim=True)
        pivot = pivot.masked_fill(pivot == -math.inf, 0)
    weights = torch.exp(joined - pivot)
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1)
    return weights[..., : scores.shape[-1]], None if sink is None else weights[..., -1:]


def _dropout_scale(call: _Call, begin: int, end: int, scores: Tensor) -> Tensor | None:
    if call.options.dropout_p <= 0:
        return None
    heads, keys = scores.shape[-3], scores.shape[-1]
    shape = (call.first_batch, math.prod(scores.shape[:-3]), heads, begin, end - begin, keys)
    keep = ops.attention_dropout_mask.default(call.rng, *shape, call.options.dropout_p)
    return keep.view(scores.shape).to(scores.dtype) * (1 / (1 - call.options.dropout_p) if call.options.dropout_p < 1 else 0.0)


def _forward_chunk(call: _Call, tangents: _Tangents, chunk: _Chunk) -> _ForwardChunk:
    """The forward pass of a chunk of queries, and its derivative line by line."""
    scores, visible, first, second = _scores(call, chunk.begin, chunk.end, (chunk.q @ call.k.mT) * call.options.scale)
    weights, sink_weight = _softmax_with_sink(scores, call.sink)
    dropout_scale = _dropout_scale(call, chunk.begin, chunk.end, scores)
    dropped = weights if dropout_scale is None else weights * dropout_scale

    d_products = torch.zeros_like(scores)
    if chunk.d_q is not None:
        d_products = d_products + chunk.d_q @ call.k.mT
    if tangents.k is not None:
        d_products = d_products + chunk.q @ tangents.k.mT
    d_products = d_products * call.options.scale
    d_scores = d_products if first is None else first * d_products
    if tangents.mask is not None:
        d_scores = d_scores + _rows(tangents.mask, -2, chunk.begin, chunk.end, scores.dtype)
    # A hidden score stays hidden: its tangent is 0, whatever the tangents of its query and key are.
    d_scores = torch.where(visible, d_scores, 0)
    d_lse = (weights * d_scores).sum(-1, keepdim=True)
    if call.sink is not None and tangents.sink is not None:
        d_lse = d_lse + sink_weight * tangents.sink
    d_weights = weights * (d_scores - d_lse)
    d_dropped = d_weights if dropout_scale is None else d_weights * dropout_scale
    d_out = d_dropped @ call.v
    if tangents.v is not None:
        d_out = d_out + dropped @ tangents.v
    return _ForwardChunk(
        weights=weights,
        d_weights=d_weights,
        dropped=dropped,
        d_dropped=d_dropped,
        dropout_scale=dropout_scale,
        sink_weight=sink_weight,
        score_mod_first=first,
        score_mod_second=second,
        d_products=d_products,
        d_out=d_out,
        d_lse=d_lse,
    )


def _backward_chunk(call: _Call, tangents: _Tangents, chunk: _Chunk, forward: _ForwardChunk) -> _BackwardChunk:
    """The backward pass of a chunk of queries, and its derivative line by line."""
    weights, d_weights = forward.weights, forward.d_weights
    grad_out, d_grad_out = chunk.grad_out, chunk.d_grad_out
    grad_weights, d_grad_weights = grad_out @ call.v.mT, torch.zeros_like(weights)
    if d_grad_out is not None:
        d_grad_weights = d_grad_weights + d_grad_out @ call.v.mT
    if tangents.v is not None:
        d_grad_weights = d_grad_weights + grad_out @ tangents.v.mT
    if forward.dropout_scale is not None:
        grad_weights, d_grad_weights = grad_weights * forward.dropout_scale, d_grad_weights * forward.dropout_scale

    # -delta, where delta = <weights, grad_weights> - grad_lse is the term that all gradients of a row's scores share.
    minus_delta = -(weights * grad_weights).sum(-1, keepdim=True)
    d_minus_delta = -(d_weights * grad_weights + weights * d_grad_weights).sum(-1, keepdim=True)
    if chunk.grad_lse is not None:
        minus_delta = minus_delta + chunk.grad_lse.unsqueeze(-1)
    if chunk.d_grad_lse is not None:
        d_minus_delta = d_minus_delta + chunk.d_grad_lse.unsqueeze(-1)
    grad_scores = weights * (grad_weights + minus_delta)
    d_grad_scores = d_weights * (grad_weights + minus_delta) + weights * (d_grad_weights + d_minus_delta)
    grad_products, d_grad_products = grad_scores, d_grad_scores
    if forward.score_mod_first is not None:
        grad_products = grad_scores * forward.score_mod_first
        d_grad_products = d_grad_scores * forward.score_mod_first + grad_scores * forward.score_mod_second * forward.d_products
    grad_products, d_grad_products = grad_products * call.options.scale, d_grad_products * call.options.scale

    d_grad_query = d_grad_products @ call.k
    if tangents.k is not None:
        d_grad_query = d_grad_query + grad_products @ tangents.k
    d_grad_key = d_grad_products.mT @ chunk.q
    if chunk.d_q is not None:
        d_grad_key = d_grad_key + grad_products.mT @ chunk.d_q
    d_grad_value = forward.d_dropped.mT @ grad_out
    if d_grad_out is not None:
        d_grad_value = d_grad_value + forward.dropped.mT @ d_grad_out
    d_grad_sinks = None
    if call.sink is not None:
        d_sink_weight = -forward.sink_weight * forward.d_lse
        if tangents.sink is not None:
            d_sink_weight = d_sink_weight + forward.sink_weight * tangents.sink
        by_row = d_sink_weight * minus_delta + forward.sink_weight * d_minus_delta
        d_grad_sinks = by_row.sum([dim for dim in range(by_row.dim()) if dim != by_row.dim() - 3])
    return _BackwardChunk(d_grad_query, d_grad_key, d_grad_value, d_grad_scores, d_grad_sinks)


class _BackwardSums:
    """Collects _BackwardChunks: rows of queries are joined, everything else is summed."""

    def __init__(self, mask: Tensor | None):
        self.mask = None if mask is None or mask.dtype == torch.bool else mask
        self.query_rows: list[Tensor] = []
        self.mask_rows: list[Tensor] = []
        self.key = self.value = self.mask_sum = self.sinks = None

    def add(self, chunk: _BackwardChunk) -> None:
        def plus(total, term):
            return term if total is None else total + term

        self.query_rows.append(chunk.d_grad_query)
        self.key, self.value = plus(self.key, chunk.d_grad_key), plus(self.value, chunk.d_grad_value)
        if self.mask is not None:
            shape = list(self.mask.shape)
            if shape[-2] != 1:
                shape[-2] = chunk.d_grad_scores.shape[-2]
                self.mask_rows.append(chunk.d_grad_scores.sum_to_size(shape))
            else:
                self.mask_sum = plus(self.mask_sum, chunk.d_grad_scores.sum_to_size(shape))
        if chunk.d_grad_sinks is not None:
            self.sinks = plus(self.sinks, chunk.d_grad_sinks)

    def results(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionGradients:
        """The tangents of the gradients of (query, key, value, mask, sinks), each in its tensor's dtype except for sinks."""

        def sum_groups(tensor, like):
            """Sums over the query heads that share a head of `like`."""
            shape = (*tensor.shape[:-3], like.shape[-3], query.shape[-3] // like.shape[-3], *tensor.shape[-2:])
            return tensor.reshape(shape).sum(-3).to(like.dtype)

        mask = torch.cat(self.mask_rows, -2) if self.mask_rows else self.mask_sum
        return AttentionGradients(
            torch.cat(self.query_rows, -2).to(query.dtype),
            sum_groups(self.key, key),
            sum_groups(self.value, value),
            None if mask is None else mask.to(self.mask.dtype),
            self.sinks,
        )


def gradients_of_part(grad_out: Tensor, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of part_out and part_lse, the results over one shard of the keys, which were merged with the results over
    other shards into out and lse. grad_out is the gradient of out. All tensors are [..., queries(, head dim)].

    Ring attention passes the merged out and lse and asks for the gradients of one shard. Our backward kernels need that shard's
    own out and lse, since they rely on weights that sum to 1. The merge is out = sum of share * part_out and lse = logsumexp of
    the part_lse, with share = exp(part_lse - lse).
    """
    share = (part_lse - lse.to(part_lse.dtype)).exp().masked_fill(part_lse == -torch.inf, 0)
    wide = grad_out.to(share.dtype)
    grad_lse = share * (wide * (part_out.to(share.dtype) - out.to(share.dtype))).sum(-1)
    return (wide * share.unsqueeze(-1)).to(part_out.dtype), grad_lse.contiguous()


def in_strides_of(out: Tensor, tangent: Tensor) -> Tensor:
    """The tangent of `out` in its order of strides. For another one torch makes a tangent that reads the storage offset, which
    a tensor with symbolic sizes does not have."""
    return torch.zeros_like(out) + tangent
