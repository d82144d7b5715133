"""Gathered keys: queries stay; every rank gets all keys and values of the sequence (as in Llama 3, arXiv 2407.21783).

All tensors here are rows first: [rows, batch, heads, width]; lse is [rows, batch, heads].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .._attention_arguments import AttentionOptions, given_sparsity
from .._autograd import is_traced
from .._ops import accumulator_of, dense_strides_in_order, ops, surfaced
from ._agreement import settle
from ._group import Group, max_of_ranks, start_all_gather, start_exchange, start_reduce_scatter, wait
from ._layout import by_rank, in_sequence, pieces_of

# What a rank sees of the keys begins at a multiple of this. Kernels pass over blocks of 16, 32, 48, 64, 96 or 128 keys: a row's
# sums keep their order, and so their bits.
KEY_STEP = 384
GROUP_BYTES = 64 << 20  # target size of the gathered keys and values of a group of key heads; two groups exist at a time


class GatheredCall(NamedTuple):
    """State shared by the forward and the backward pass."""

    group: Group
    layout: str
    options: AttentionOptions  # window_right is 0 under the causal rule
    deterministic: bool
    packed: bool
    longest: int  # sequence of a packed stream
    has_spans: bool = False
    return_max_logit: bool = False


class _Piece(NamedTuple):
    """A call of attention: adjacent rows of this rank, and the keys that they may see.

    `front` and `back` empty rows are added before and after the rows where no alignment gives the rows their positions.
    """

    begin: int  # of this rank's rows
    end: int
    first: int  # position of `begin` in the whole sequence
    start: int  # position of its first key
    at: int  # its first key, counted in the keys that this rank gets
    keys: int  # number of its keys
    front: int
    back: int
    options: AttentionOptions

    @property
    def queries(self) -> int:
        return self.front + self.end - self.begin + self.back


class _Plan(NamedTuple):
    """What a rank computes, and what it exchanges. Of each rank: the parts of its rows that this rank sees, and the parts of
    this rank's rows that it sees; both are empty if every rank gets the whole sequence. A part is (place in what is seen, the
    owner's first row, rows), in the order of the sequence."""

    keys: int  # that a rank gets, at most
    pieces: list[_Piece]
    seen: list[list[tuple[int, int, int]]]
    shown: list[list[tuple[int, int, int]]]


def plan(call: GatheredCall, rows: int, has_alibi: bool) -> _Plan:
    """The plan of a rank with this many rows."""
    of = _plan.__wrapped__ if is_traced() else _plan
    return of(call._replace(group=Group("", call.group.rank, call.group.ranks)), rows, has_alibi)


@functools.lru_cache(maxsize=256)
def _plan(call: GatheredCall, rows: int, has_alibi: bool) -> _Plan:
    rank, ranks = call.group.rank, call.group.ranks
    found = _pieces(call, rows, rank, has_alibi)
    if not _receives_less(call, rows):
        return _Plan(rows * ranks, found, [], [])
    ranges = [_ranges(_pieces(call, rows, r, has_alibi)) for r in range(ranks)]
    chunks = [list(_rows(pieces_of(rows, r, ranks, call.layout))) for r in range(ranks)]
    found = [piece._replace(at=_place(ranges[rank], piece.start)) for piece in found]
    seen = [_parts(chunks[r], ranges[rank]) for r in range(ranks)]
    most = max(sum(end - begin for begin, end in of_rank) for of_rank in ranges)
    return _Plan(most, found, seen, [_parts(chunks[rank], ranges[r]) for r in range(ranks)])


def _pieces(call: GatheredCall, rows: int, rank: int, has_alibi: bool) -> list[_Piece]:
    """The calls of attention that compute a rank's rows.

    A piece [a, b) of the sequence sees keys from s, by the left bound, up to t = min(b + right bound, L). Over keys [s, t),
    aligned at the lower right, its rows stand t - b positions too low. Without a right bound beyond b (the causal rule) the
    shift is 0. Otherwise a window's bounds absorb the shift. ALiBi's distances cannot, and in a packed stream the shift differs
    per document: then t - b empty rows are added after the rows or, if a - s is less, a - s empty rows before them, aligned at
    the upper left. In a packed stream s is 0: a document's blocks of keys begin where it does, which only the device knows.
    """
    length, options, found = rows * call.group.ranks, call.options, []
    left, right = options.window_left, options.window_right
    positions_count = has_alibi or left >= 0 or right >= 0
    if not positions_count and not call.packed and not call.has_spans:
        return [_Piece(0, rows, 0, 0, 0, length, 0, 0, options)]
    for row, (a, b) in _rows(pieces_of(rows, rank, call.group.ranks, call.layout)):
        if not positions_count:
            found.append(_Piece(row, row + b - a, a, 0, 0, length, 0, 0, options))
            continue
        end = length if right < 0 else min(b + right, length)
        start = max(a - left, 0) // KEY_STEP * KEY_STEP if _receives_less(call, rows) else 0
        shift, keys, own = end - b, end - start, options._replace(lower_right=True)
        if shift and not has_alibi and not call.packed:
            bounds = {
                "window_left": left + shift if left >= 0 else left,
                "window_right": right - shift if right >= 0 else right,
            }
            found.append(_Piece(row, row + b - a, a, start, start, keys, 0, 0, own._replace(**bounds)))
        elif shift <= a - start:
            found.append(_Piece(row, row + b - a, a, start, start, keys, 0, shift, own))
        else:
            own = options._replace(lower_right=False)
            found.append(_Piece(row, row + b - a, a, start, start, keys, a - start, 0, own))
    return found


def _receives_less(call: GatheredCall, rows: int) -> bool:
    """Whether a rank receives only keys that its rows see: a window hides the first KEY_STEP keys from some rows."""
    if call.packed or call.options.window_left < 0:
        return False
    last = pieces_of(rows, 0, call.group.ranks, "zigzag")[-1][0] if call.layout == "zigzag" else (call.group.ranks - 1) * rows
    return last - call.options.window_left >= KEY_STEP


def _ranges(found: list[_Piece]) -> list[tuple[int, int]]:
    """The ranges of the sequence that pieces see, ascending and disjoint."""
    ranges: list[tuple[int, int]] = []
    for piece in found:
        begin, end = piece.start, piece.start + piece.keys
        if ranges and begin <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], end
        else:
            ranges.append((begin, end))
    return ranges


def _place(ranges: list[tuple[int, int]], position: int) -> int:
    """The place of a position in these ranges, one after another."""
    return sum(min(end, position) - begin for begin, end in ranges if begin < position)


def _parts(chunks: list[tuple[int, tuple[int, int]]], ranges: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    found = []
    for row, (a, b) in chunks:
        for begin, end in ranges:
            first, last = max(a, begin), min(b, end)
            if first < last:
                found.append((_place(ranges, first), row + first - a, last - first))
    return found


def _rows(ranges):
    """(first row of this rank, range of the sequence) per range."""
    row = 0
    for a, b in ranges:
        yield row, (a, b)
        row += b - a


def groups_of(key: Tensor, value: Tensor, keys: int) -> int:
    """Number of groups, of about GROUP_BYTES each, that the key heads are gathered in, where a rank gets `keys` keys: a divisor
    of key's and value's heads."""
    size = keys * (key[:1].numel() + value[:1].numel()) * key.element_size()
    counts = [n for n in range(1, key.shape[2] + 1) if key.shape[2] % n == value.shape[2] % n == 0]
    return next((n for n in counts if size <= n * GROUP_BYTES), counts[-1] if counts else 1)


class Gathered(Function):
    """(call, query, key, value, slopes or None, sinks or None, cu_seqlens or None, query_spans or None, key_spans or None) ->
    (out and lse of this rank's rows, max_logit of all ranks' or None). Slopes [batch or documents, heads] and sinks are in the
    accumulator's dtype. Spans are those of the whole sequence."""

    @staticmethod
    def forward(ctx, call: GatheredCall, query, key, value, slopes, sinks, starts, query_spans, key_spans):
        own = plan(call, query.shape[0], slopes is not None)
        count = groups_of(key, value, own.keys)
        outs, lses, lows, max_logits = [], [], [], []
        for n, (k, v) in enumerate(_gathered(call, own, key, value, count)):
            q, alibi, logits = _group(query, n, count, 2), _group(slopes, n, count, -1), _group(sinks, n, count, 0)
            spans = [_of_heads(one, n, count) for one in (query_spans, key_spans)]
            results, of_pieces = zip(
                *(_forward(call, piece, q, k, v, alibi, logits, starts, spans) for piece in own.pieces), strict=True
            )
            max_logits.append(of_pieces)
            for kept, parts in zip((outs, lses, lows), zip(*results, strict=True), strict=True):
                kept.append(_joined(parts, 0))
        out, lse, low = _like(_joined(outs, 2), query), _joined(lses, 2), _joined(lows, 2)
        ctx.save_for_backward(query, key, value, slopes, sinks, starts, query_spans, key_spans, out, lse, low)
        ctx.call, ctx.count = call, count
        ctx.set_materialize_grads(False)
        max_logit = None
        if call.return_max_logit:
            own_rows = _joined([torch.stack(of_pieces).amax(0) for of_pieces in max_logits], -1)
            max_logit = max_of_ranks(own_rows, 0, query.shape[2], call.group)
            ctx.mark_non_differentiable(max_logit)
        return out, lse, max_logit

    @staticmethod
    def backward(ctx, grad_out, grad_lse, _):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "flash_online.distributed: method 'gathered' has no second derivatives (create_graph=True); use 'ulysses'"
            )
        settle(ctx.call.group)
        query, key, value, slopes, sinks, starts, query_spans, key_spans, out, lse, low = ctx.saved_tensors
        call, count = ctx.call, ctx.count
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        own, wanted = plan(call, query.shape[0], slopes is not None), any(ctx.needs_input_grad[2:4])
        grad_queries, grad_sinks, sums, pending = [], [], [], None
        for n, (k, v) in enumerate(_gathered(call, own, key, value, count)):
            by_row = [_group(tensor, n, count, 2) for tensor in (grad_out, grad_lse, query, out, lse, low)]
            alibi, logits = _group(slopes, n, count, -1), _group(sinks, n, count, 0)
            spans = [_of_heads(one, n, count) for one in (query_spans, key_spans)]
            grad_query, grad_key_value, grad_logits = _backward_of_group(
                call, own.pieces, by_row, k, v, alibi, logits, starts, spans
            )
            grad_queries.append(grad_query)
            grad_sinks.append(grad_logits)
            if wanted:
                # The previous group's reduce-scatter runs while this group's gradients are computed.
                if pending is not None:
                    sums.append(pending())
                pending = _start_sum(call, own, grad_key_value, query.shape[0])
        grad_key = grad_value = None
        if wanted:
            sums.append(pending())
            grad_key, grad_value = _unpacked(sums, key, value, count)
        return (
            *(None, _joined(grad_queries, 2), grad_key if ctx.needs_input_grad[2] else None),
            *(grad_value if ctx.needs_input_grad[3] else None, None),
            *(None if sinks is None else torch.cat(grad_sinks), None, None, None),
        )


def _group(tensor: Tensor | None, n: int, count: int, dim: int) -> Tensor | None:
    """Heads of group n of `count`."""
    if tensor is None or count == 1:
        return tensor
    heads = tensor.shape[dim] // count
    return tensor.narrow(dim, n * heads, heads)


def _of_heads(spans: Tensor | None, n: int, count: int) -> Tensor | None:
    """Spans of group n of `count`. All heads may share their intervals."""
    return spans if spans is None or spans.shape[-3] == 1 else _group(spans, n, count, -3)


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


def _gathered(call: GatheredCall, own: _Plan, key: Tensor, value: Tensor, count: int):
    """(key, value) of the whole sequence, or of what this rank's rows see, one group of heads after another; the next group is
    gathered while one is in use."""

    def start(n):
        k, v = _group(key, n, count, 2), _group(value, n, count, 2)
        return _start_gather(call, own, torch.cat((k.flatten(2), v.flatten(2)), 2))

    pending = start(0)
    for n in range(count):
        rows = pending()
        if n + 1 < count:
            pending = start(n + 1)
        keys = key.shape[2] // count * key.shape[3]
        yield (
            rows[..., :keys].unflatten(2, (key.shape[2] // count, key.shape[3])),
            rows[..., keys:].unflatten(2, (value.shape[2] // count, value.shape[3])),
        )


def _start_gather(call: GatheredCall, own: _Plan, rows: Tensor) -> Callable[[], Tensor]:
    """Starts the exchange of all ranks' rows. Returns a function that waits for it and returns what this rank sees of them, in
    the order of the sequence."""
    group, width = call.group, rows.shape[1:]
    if not rows.numel():  # on all ranks
        return lambda: rows.new_empty(rows.shape[0] * group.ranks, *width)
    if not own.seen:
        pending = start_all_gather(rows, group)
        return lambda: in_sequence(wait(pending), group.ranks, call.layout)
    messages = [rows[row : row + n] for r, parts in enumerate(own.shown) if r != group.rank for _, row, n in parts]
    started = _start_exchange(group, messages, rows, own.shown, own.seen)

    def finish() -> Tensor:
        arrived, found = started(), []
        for r, parts in enumerate(own.seen):
            for at, row, n in parts:
                found.append((at, rows[row : row + n] if r == group.rank else arrived.pop(0)))
        return torch.cat([part for _, part in sorted(found, key=lambda pair: pair[0])])

    return finish


def _start_sum(call: GatheredCall, own: _Plan, grads: Tensor, count: int) -> Callable[[], Tensor]:
    """Starts the exchange of the gradients of what `_start_gather` returned. Returns a function that waits for it and returns
    the sum over the ranks for this rank's `count` rows."""
    group, width = call.group, grads.shape[1:]
    if not grads.numel():
        return lambda: grads.new_zeros(count, *width)
    if not own.seen:
        pending = start_reduce_scatter(by_rank(grads, group.ranks, call.layout), group)
        return lambda: wait(pending)
    messages = [grads[at : at + n] for r, parts in enumerate(own.seen) if r != group.rank for at, _, n in parts]
    started = _start_exchange(group, messages, grads, own.seen, own.shown)

    def finish() -> Tensor:
        arrived, total = started(), None
        for r, parts in enumerate(own.shown):
            found, end = [], 0
            for at, row, n in parts:
                found += [grads.new_zeros(row - end, *width), grads[at : at + n] if r == group.rank else arrived.pop(0)]
                end = row + n
            if parts:
                whole = torch.cat([*found, grads.new_zeros(count - end, *width)])
                total = whole if total is None else total + whole
        return total

    return finish


def _start_exchange(group: Group, messages: list[Tensor], like: Tensor, sent, received) -> Callable[[], list[Tensor]]:
    """Sends each other rank its parts of rows. Returns a function that waits for the received parts, in order of ranks."""
    size, others = like[0].numel(), [r for r in range(group.ranks) if r != group.rank]
    sizes = [
        [size * sum(n for _, _, n in parts[r]) * (r != group.rank) for r in range(group.ranks)] for parts in (sent, received)
    ]
    pending = start_exchange(torch.cat(messages).flatten() if messages else like.new_empty(0), *sizes, group)
    lengths = [n for r in others for _, _, n in received[r]]
    return lambda: list(wait(pending).view(-1, *like.shape[1:]).split(lengths))


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
    return starts.clamp(first, first + piece.queries) - first, starts.clamp(max=piece.keys)  # packed: `at` is 0


def _spans_of(call: GatheredCall, piece: _Piece, starts: Tensor | None, spans: list[Tensor | None]) -> tuple:
    """query_spans and key_spans of a piece, as an operator's last arguments. Bounds are clamped before they are moved, as the
    difference of two int32 may be none."""
    query_spans, key_spans = spans
    first = piece.first - piece.front
    if query_spans is not None:
        query_spans = query_spans[..., piece.first : piece.first + piece.end - piece.begin, :]
        query_spans = torch.nn.functional.pad(query_spans, (0, 0, piece.front, piece.back))  # empty rows see nothing
        if not call.packed:  # positions in documents do not change: their keys are here from the first one on
            query_spans = query_spans.clamp(piece.start, piece.start + piece.keys) - piece.start
    if key_spans is not None:
        key_spans = key_spans[..., piece.start : piece.start + piece.keys, :]
        if not call.packed:
            key_spans = key_spans.clamp(first, first + piece.queries) - first
        else:  # a document that begins before the piece has lost its queries up to `first`
            keys = torch.arange(piece.keys, dtype=starts.dtype, device=starts.device)
            document = torch.searchsorted(starts, keys, right=True).sub(1).clamp(min=0)
            lost = (first - starts[document]).clamp(min=0)[:, None]
            key_spans = torch.maximum(key_spans, lost) - lost
    return given_sparsity(query_spans, key_spans)


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


def _keys_of(piece: _Piece, *rows: Tensor) -> tuple[Tensor, ...]:
    return tuple(t[piece.at : piece.at + piece.keys] for t in rows)


def _longest(call: GatheredCall, piece: _Piece) -> tuple[int, int]:
    return min(call.longest, piece.queries), min(call.longest, piece.keys)


def _forward(call: GatheredCall, piece: _Piece, query, key, value, slopes, sinks, starts, spans):
    """(out, lse, lse_low) of a piece's rows, and their maximum logit or None."""
    q, k, v = (_to_kernel(call, t) for t in (_padded(piece, query), *_keys_of(piece, key, value)))
    own = slice(piece.front, piece.queries - piece.back)
    dense, packed = ops.attention_forward, ops.attention_varlen_forward
    if call.return_max_logit:
        dense, packed = ops.attention_forward_with_max_logit, ops.attention_varlen_forward_with_max_logit
        if spans[0] is None and (piece.front or piece.back):  # the scores of empty rows do not count
            everything = torch.arange(2, dtype=torch.int32, device=query.device) * (2**31 - 1)  # no copy from the host
            whole = everything.expand(1, piece.first + piece.end - piece.begin, 2)
            spans = [whole if call.packed else whole.unsqueeze(0), spans[1]]
    options = *piece.options, *_spans_of(call, piece, starts, spans)
    try:
        if call.packed:
            tensors = (q, k, v, *_starts(piece, starts), slopes, sinks, None)
            results = packed.default(*tensors, *_longest(call, piece), *options)
        else:
            results = dense.default(q, k, v, None, slopes, sinks, None, *options)
    except RuntimeError as error:
        raise surfaced(error, query) from None
    *results, max_logit = results if call.return_max_logit else (*results, None)
    return tuple(_from_kernel(call, result, lse=n > 0)[own] for n, result in enumerate(results)), max_logit


def _backward(call: GatheredCall, piece: _Piece, by_row, key, value, slopes, sinks, starts, spans):
    """The gradients of a piece's queries, keys and values, and of sinks. Empty rows have lse -inf, so their weights are 0."""
    fills = (0.0, 0.0, 0.0, 0.0, float("-inf"), 0.0)
    rows = (None if t is None else _to_kernel(call, _padded(piece, t, f)) for t, f in zip(by_row, fills, strict=True))
    grad_out, grad_lse, q, out, lse, low = rows
    k, v = (_to_kernel(call, t) for t in _keys_of(piece, key, value))
    kept, own_spans = (out, lse.contiguous(), low.contiguous()), _spans_of(call, piece, starts, spans)
    try:
        if call.packed:
            tensors = (grad_out, grad_lse, q, k, v, *_starts(piece, starts), slopes, sinks, None, *kept)
            options = (*_longest(call, piece), *piece.options.for_backward(call.deterministic))
            grad_query, grad_key, grad_value, grad_sinks = ops.attention_varlen_backward.default(*tensors, *options, *own_spans)
        else:
            tensors = (grad_out, grad_lse, q, k, v, None, slopes, sinks, None, *kept)
            options = piece.options.for_backward(False, call.deterministic)
            grad_query, grad_key, grad_value, _, grad_sinks = ops.attention_backward.default(*tensors, *options, *own_spans)
    except RuntimeError as error:
        raise surfaced(error, q) from None
    grad_query, grad_key, grad_value = (_from_kernel(call, grad, lse=False) for grad in (grad_query, grad_key, grad_value))
    return grad_query[piece.front : piece.queries - piece.back], grad_key, grad_value, grad_sinks


def _backward_of_group(call: GatheredCall, todo, by_row, key, value, slopes, sinks, starts, spans):
    """For one group of heads: the gradients of this rank's queries; the gradients of all keys and values, packed, summed over
    the pieces in float32; the gradients of sinks."""
    grad_queries, total, grad_sinks = [], None, None
    for piece in todo:
        grad_query, grad_key, grad_value, own_sinks = _backward(call, piece, by_row, key, value, slopes, sinks, starts, spans)
        grad_queries.append(grad_query)
        own = torch.cat((grad_key.flatten(2), grad_value.flatten(2)), 2).to(accumulator_of(key.dtype))
        # Not summed in slices of one tensor: the compiler takes minutes for it. A piece's keys begin in those of the pieces
        # before it, or where these end, and end after them.
        if total is None:
            total = own
        else:
            both = total.shape[0] - piece.at
            total = torch.cat((total[: piece.at], total[piece.at :] + own[:both], own[both:]))
        grad_sinks = own_sinks if grad_sinks is None else grad_sinks + own_sinks
    unseen = key.shape[0] - total.shape[0]
    if unseen:
        total = torch.cat((total, total.new_zeros(unseen, *total.shape[1:])))
    return _joined(grad_queries, 0), total, grad_sinks
