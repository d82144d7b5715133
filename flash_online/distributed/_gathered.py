"""Gathered keys: queries stay; every rank gets all keys and values of the sequence (as in Llama 3, arXiv 2407.21783).

All tensors here are rows first: [rows, batch, heads, width]; lse is [rows, batch, heads].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .._attention_arguments import AttentionOptions
from .._ops import accumulator_of, dense_strides_in_order, ops, surfaced
from ._agreement import settle
from ._group import Group, start_all_gather, start_reduce_scatter, wait
from ._layout import by_rank, in_sequence, pieces_of

GROUP_BYTES = 64 << 20  # target size of the gathered keys and values of a group of key heads; two groups exist at a time


class GatheredCall(NamedTuple):
    """State shared by the forward and the backward pass."""

    group: Group
    layout: str
    options: AttentionOptions  # window_right is 0 under the causal rule
    deterministic: bool
    packed: bool
    longest: int  # sequence of a packed stream


class _Piece(NamedTuple):
    """A call of attention: adjacent rows of this rank, and the keys that they may see.

    `front` and `back` empty rows are added before and after the rows where no alignment gives the rows their positions.
    """

    begin: int  # of this rank's rows
    end: int
    first: int  # position of `begin` in the whole sequence
    keys: int  # number of leading keys of the sequence
    front: int
    back: int
    options: AttentionOptions

    @property
    def queries(self) -> int:
        return self.front + self.end - self.begin + self.back


def pieces(call: GatheredCall, rows: int, has_alibi: bool) -> list[_Piece]:
    """The calls of attention that compute this rank's rows.

    A piece [a, b) of the sequence sees keys up to t = min(b + right bound, L). Over the first t keys, aligned at the lower
    right, its rows stand t - b positions too low. Without a right bound beyond b (the causal rule) the shift is 0. Otherwise a
    window's bounds absorb the shift. ALiBi's distances cannot, and in a packed stream the shift differs per document: then
    t - b empty rows are added after the rows or, if a is less, a empty rows before them, aligned at the upper left.
    """
    length, options, found = rows * call.group.ranks, call.options, []
    left, right = options.window_left, options.window_right
    positions_count = has_alibi or left >= 0 or right >= 0
    if not positions_count and not call.packed:
        return [_Piece(0, rows, 0, length, 0, 0, options)]
    for row, (a, b) in _rows(pieces_of(rows, call.group.rank, call.group.ranks, call.layout)):
        if not positions_count:
            found.append(_Piece(row, row + b - a, a, length, 0, 0, options))
            continue
        keys = length if right < 0 else min(b + right, length)
        shift, own = keys - b, options._replace(lower_right=True)
        if shift and not has_alibi and not call.packed:
            bounds = {
                "window_left": left + shift if left >= 0 else left,
                "window_right": right - shift if right >= 0 else right,
            }
            found.append(_Piece(row, row + b - a, a, keys, 0, 0, own._replace(**bounds)))
        elif shift <= a:
            found.append(_Piece(row, row + b - a, a, keys, 0, shift, own))
        else:
            found.append(_Piece(row, row + b - a, a, keys, a, 0, options._replace(lower_right=False)))
    return found


def _rows(ranges):
    """(first row of this rank, range of the sequence) per range."""
    row = 0
    for a, b in ranges:
        yield row, (a, b)
        row += b - a


def groups_of(key: Tensor, value: Tensor, ranks: int) -> int:
    """Number of groups, of about GROUP_BYTES each, that the key heads are gathered in: a divisor of key's and value's heads."""
    size = ranks * (key.numel() + value.numel()) * key.element_size()
    counts = [n for n in range(1, key.shape[2] + 1) if key.shape[2] % n == value.shape[2] % n == 0]
    return next((n for n in counts if size <= n * GROUP_BYTES), counts[-1] if counts else 1)


class Gathered(Function):
    """(call, query, key, value, slopes or None, sinks or None, cu_seqlens or None) -> (out, lse) of this rank's rows. Slopes
    [batch or documents, heads] and sinks are in the accumulator's dtype."""

    @staticmethod
    def forward(ctx, call: GatheredCall, query, key, value, slopes, sinks, starts):
        count = groups_of(key, value, call.group.ranks)
        todo = pieces(call, query.shape[0], slopes is not None)
        outs, lses, lows = [], [], []
        for n, (k, v) in enumerate(_gathered(call, key, value, count)):
            q, alibi, logits = _group(query, n, count, 2), _group(slopes, n, count, -1), _group(sinks, n, count, 0)
            results = [_forward(call, piece, q, k, v, alibi, logits, starts) for piece in todo]
            for kept, parts in zip((outs, lses, lows), zip(*results, strict=True), strict=True):
                kept.append(_joined(parts, 0))
        out, lse, low = _like(_joined(outs, 2), query), _joined(lses, 2), _joined(lows, 2)
        ctx.save_for_backward(query, key, value, slopes, sinks, starts, out, lse, low)
        ctx.call, ctx.count = call, count
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "flash_online.distributed: method 'gathered' has no second derivatives (create_graph=True); use 'ulysses'"
            )
        settle(ctx.call.group)
        query, key, value, slopes, sinks, starts, out, lse, low = ctx.saved_tensors
        call, count = ctx.call, ctx.count
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        todo, wanted = pieces(call, query.shape[0], slopes is not None), any(ctx.needs_input_grad[2:4])
        grad_queries, grad_sinks, sums, pending = [], [], [], None
        for n, (k, v) in enumerate(_gathered(call, key, value, count)):
            by_row = [_group(tensor, n, count, 2) for tensor in (grad_out, grad_lse, query, out, lse, low)]
            alibi, logits = _group(slopes, n, count, -1), _group(sinks, n, count, 0)
            grad_query, grad_key_value, grad_logits = _backward_of_group(call, todo, by_row, k, v, alibi, logits, starts)
            grad_queries.append(grad_query)
            grad_sinks.append(grad_logits)
            if wanted:
                # The previous group's reduce-scatter runs while this group's gradients are computed.
                if pending is not None:
                    sums.append(wait(pending))
                pending = _start_sum(call, grad_key_value)
        grad_key = grad_value = None
        if wanted:
            sums.append(wait(pending) if pending.numel() else pending)
            grad_key, grad_value = _unpacked(sums, key, value, count)
        return (
            *(None, _joined(grad_queries, 2), grad_key if ctx.needs_input_grad[2] else None),
            *(grad_value if ctx.needs_input_grad[3] else None, None),
            *(None if sinks is None else torch.cat(grad_sinks), None),
        )


def _group(tensor: Tensor | None, n: int, count: int, dim: int) -> Tensor | None:
    """Heads of group n of `count`."""
    if tensor is None or count == 1:
        return tensor
    heads = tensor.shape[dim] // count
    return tensor.narrow(dim, n * heads, heads)


def _joined(parts, dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _like(out: Tensor, query: Tensor) -> Tensor:
    """`out` with query's order of dimensions in memory, as attention returns it."""
    strides = dense_strides_in_order(out.shape, query.stride())
    if list(out.stride()) == strides:
        return out
    order = sorted(range(out.dim()), key=lambda dim: -strides[dim])
    # Not copy_ into an empty tensor: torch 2.11 loses its gradient under compile.
    dense = out.permute(order).clone(memory_format=torch.contiguous_format)
    return dense.permute([order.index(dim) for dim in range(out.dim())])


# --- Keys and values of all ranks -------------------------------------------------------------------------------------------


def _gathered(call: GatheredCall, key: Tensor, value: Tensor, count: int):
    """(key, value) of the whole sequence, one group of heads after another; the next group is gathered while one is in use."""

    def start(n):
        k, v = _group(key, n, count, 2), _group(value, n, count, 2)
        return _start_gather(torch.cat((k.flatten(2), v.flatten(2)), 2), call.group)

    pending = start(0)
    for n in range(count):
        rows = in_sequence(wait(pending) if pending.numel() else pending, call.group.ranks, call.layout)
        if n + 1 < count:
            pending = start(n + 1)
        keys = key.shape[2] // count * key.shape[3]
        yield (
            rows[..., :keys].unflatten(2, (key.shape[2] // count, key.shape[3])),
            rows[..., keys:].unflatten(2, (value.shape[2] // count, value.shape[3])),
        )


def _start_gather(rows: Tensor, group: Group) -> Tensor:
    if not rows.numel():  # on all ranks
        return rows.new_empty(rows.shape[0] * group.ranks, *rows.shape[1:])
    return start_all_gather(rows, group)


def _start_sum(call: GatheredCall, rows: Tensor) -> Tensor:
    """This rank's rows of the sum over ranks of the gradients of all keys and values."""
    if not rows.numel():
        return rows.new_zeros(rows.shape[0] // call.group.ranks, *rows.shape[1:])
    return start_reduce_scatter(by_rank(rows, call.group.ranks, call.layout), call.group)


def _unpacked(sums, key: Tensor, value: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The gradients of key and value, from the groups' packed sums."""
    keys = key.shape[2] // count * key.shape[3]
    grad_key = torch.cat([part[..., :keys] for part in sums], 2).to(key.dtype)
    grad_value = torch.cat([part[..., keys:] for part in sums], 2).to(value.dtype)
    return grad_key.unflatten(2, key.shape[2:]), grad_value.unflatten(2, value.shape[2:])


# --- One piece, one group of heads ------------------------------------------------------------------------------------------


def _starts(piece: _Piece, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Starts of the documents of a packed stream in a piece's rows and keys. Documents outside the piece have no rows."""
    first = piece.first - piece.front
    return starts.clamp(first, first + piece.queries) - first, starts.clamp(max=piece.keys)


def _padded(piece: _Piece, rows: Tensor, fill: float = 0.0) -> Tensor:
    own = rows[piece.begin : piece.end]
    if not (piece.front or piece.back):
        return own
    shape = own.shape[1:]
    return torch.cat((own.new_full((piece.front, *shape), fill), own, own.new_full((piece.back, *shape), fill)))


def _to_kernel(call: GatheredCall, rows: Tensor) -> Tensor:
    """[rows, batch, heads, width] in the kernels' layout: packed [rows, heads, width], dense [batch, heads, rows, width]. An
    lse [rows, batch, heads] gets its rows last."""
    if rows.dim() == 3:
        return rows.squeeze(1).transpose(0, 1) if call.packed else rows.permute(1, 2, 0)
    return rows.squeeze(1) if call.packed else rows.permute(1, 2, 0, 3)


def _from_kernel(call: GatheredCall, result: Tensor, lse: bool) -> Tensor:
    if lse:
        return result.transpose(0, 1).unsqueeze(1) if call.packed else result.permute(2, 0, 1)
    return result.unsqueeze(1) if call.packed else result.permute(2, 0, 1, 3)


def _longest(call: GatheredCall, piece: _Piece) -> tuple[int, int]:
    return min(call.longest, piece.queries), min(call.longest, piece.keys)


def _forward(call: GatheredCall, piece: _Piece, query, key, value, slopes, sinks, starts):
    """(out, lse, lse_low) of a piece's rows."""
    q, k, v = (_to_kernel(call, t) for t in (_padded(piece, query), key[: piece.keys], value[: piece.keys]))
    try:
        if call.packed:
            tensors = (q, k, v, *_starts(piece, starts), slopes, sinks, None)
            results = ops.attention_varlen_forward.default(*tensors, *_longest(call, piece), *piece.options)
        else:
            results = ops.attention_forward.default(q, k, v, None, slopes, sinks, None, *piece.options)
    except RuntimeError as error:
        raise surfaced(error, query) from None
    own = slice(piece.front, piece.queries - piece.back)
    return tuple(_from_kernel(call, result, lse=n > 0)[own] for n, result in enumerate(results))


def _backward(call: GatheredCall, piece: _Piece, by_row, key, value, slopes, sinks, starts):
    """The gradients of a piece's queries, keys and values, and of sinks. Empty rows have lse -inf, so their weights are 0."""
    fills = (0.0, 0.0, 0.0, 0.0, float("-inf"), 0.0)
    rows = (None if t is None else _to_kernel(call, _padded(piece, t, f)) for t, f in zip(by_row, fills, strict=True))
    grad_out, grad_lse, q, out, lse, low = rows
    k, v = (_to_kernel(call, t[: piece.keys]) for t in (key, value))
    kept = (out, lse.contiguous(), low.contiguous())
    try:
        if call.packed:
            tensors = (grad_out, grad_lse, q, k, v, *_starts(piece, starts), slopes, sinks, None, *kept)
            options = (*_longest(call, piece), *piece.options.for_backward(call.deterministic))
            grad_query, grad_key, grad_value, grad_sinks = ops.attention_varlen_backward.default(*tensors, *options)
        else:
            tensors = (grad_out, grad_lse, q, k, v, None, slopes, sinks, None, *kept)
            options = piece.options.for_backward(False, call.deterministic)
            grad_query, grad_key, grad_value, _, grad_sinks = ops.attention_backward.default(*tensors, *options)
    except RuntimeError as error:
        raise surfaced(error, q) from None
    grad_query, grad_key, grad_value = (_from_kernel(call, grad, lse=False) for grad in (grad_query, grad_key, grad_value))
    return grad_query[piece.front : piece.queries - piece.back], grad_key, grad_value, grad_sinks


def _backward_of_group(call: GatheredCall, todo, by_row, key, value, slopes, sinks, starts):
    """For one group of heads: the gradients of this rank's queries; the gradients of all keys and values, packed, summed over
    the pieces in float32; the gradients of sinks."""
    grad_queries, total, grad_sinks = [], None, None
    for piece in todo:  # each piece sees at least the keys of the previous one
        grad_query, grad_key, grad_value, own_sinks = _backward(call, piece, by_row, key, value, slopes, sinks, starts)
        grad_queries.append(grad_query)
        own = torch.cat((grad_key.flatten(2), grad_value.flatten(2)), 2).to(accumulator_of(key.dtype))
        # Not summed in slices of one tensor: the compiler takes minutes for it.
        total = own if total is None else torch.cat((total + own[: total.shape[0]], own[total.shape[0] :]))
        grad_sinks = own_sinks if grad_sinks is None else grad_sinks + own_sinks
    unseen = key.shape[0] - total.shape[0]
    if unseen:
        total = torch.cat((total, total.new_zeros(unseen, *total.shape[1:])))
    return _joined(grad_queries, 0), total, grad_sinks
