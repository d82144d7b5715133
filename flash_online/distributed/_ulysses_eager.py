"""Ulysses of plain tensors in eager mode: one autograd Function, and one exchange in each direction.

It computes what `ulysses` computes where the ranks divide all heads and a rank's heads are one group, by the same operators on
tensors of the same strides. Query, key and value travel in one message, out and lse in another, and gradients likewise. What is
packed and unpacked depends on the signature alone: `_route` runs the views of `ulysses` on meta tensors, once, and keeps their
sizes, strides and offsets.

Tensors are in the callers' form: dense [B, H, n, E] with an lse [B, H, n], or rows of a packed stream [n, H, E] with [H, n].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .._attention_arguments import AttentionOptions
from .._autograd import plain_apply, requires_grad, unwrap_if_dead
from .._ops import below_autograd, ops, surfaced
from ._agreement import settle
from ._group import Group, all_to_all, is_traced
from ._ulysses import (
    PLAIN,
    WIDE,
    Exchange,
    FinishToHeads,
    FinishToRows,
    StartToHeads,
    StartToRows,
    arranged,
    chunked_order,
    joined,
    memory_order,
    widened,
)

ALIGNMENT = WIDE.itemsize  # bytes


class EagerCall(NamedTuple):
    """State shared by the forward and the backward pass."""

    group: Group
    layout: str
    options: AttentionOptions
    deterministic: bool
    packed: bool
    longest: int  # sequence of a packed stream
    return_lse: bool

    def own_heads(self, count: int) -> slice:
        """This rank's share of the heads of all ranks."""
        own = count // self.group.ranks
        return slice(self.group.rank * own, (self.group.rank + 1) * own)


def takes(group: Group, query: Tensor, key: Tensor, value: Tensor, *others: Tensor | None) -> bool:
    """Whether `ulysses_eager` takes a call, in one group of heads."""
    if group.ranks == 1 or is_traced():
        return False
    for tensor in (query, key, value):
        if type(tensor) not in PLAIN or tensor.shape[1] % group.ranks or not tensor.numel():
            return False
    return all(tensor is None or type(tensor) in PLAIN for tensor in others)


def ulysses_eager(call: EagerCall, query, key, value, slopes, sinks, starts) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None) of this rank's rows. Slopes [..., Hq] and sinks [Hq] are in the accumulator's dtype; `starts`:
    cu_seqlens of a packed stream, else None."""
    try:
        if requires_grad((query, key, value, sinks)):
            tensors = (tensor if tensor is None else unwrap_if_dead(tensor) for tensor in (query, key, value, slopes, sinks))
            out, lse, *_ = _apply(call, *tensors, starts)
        else:
            (out, lse), _ = _forward(call, query, key, value, slopes, sinks, starts)
        return out, lse
    except RuntimeError as error:
        raise surfaced(error, query) from None


def _forward(call: EagerCall, query, key, value, slopes, sinks, starts):
    """(out, lse or None) of this rank's rows; and of all rows and its heads query, key, value, slopes, out, lse and lse_low."""
    inputs, heads = (query, key, value), call.own_heads(query.shape[1])
    whole = _exchanged(call, "heads", inputs, inputs)
    slopes, sinks = None if slopes is None else slopes[..., heads], None if sinks is None else sinks[heads]
    if call.packed:
        tensors = (*whole, starts, starts, slopes, sinks, None, call.longest, call.longest)
        results = _run_varlen(*tensors, *call.options)
    else:
        results = _run_dense(*whole, None, slopes, sinks, None, *call.options)
    rows = _exchanged(call, "rows", results[: 1 + call.return_lse], (query, None))
    return (rows[0], rows[1] if call.return_lse else None), (*whole, slopes, *results)


_run_dense, _run_varlen = below_autograd(ops.attention_forward), below_autograd(ops.attention_varlen_forward)
_run_backward = below_autograd(ops.attention_backward), below_autograd(ops.attention_varlen_backward)


class _Ulysses(Function):
    """(call, query, key, value, slopes, sinks, starts) -> (out, lse or None; query, key and value of all rows and this rank's
    heads).

    Nobody uses the last three, but the backward pass saves them as results. Where it is differentiated itself, their gradients
    come back to this Function, which exchanges them for those of the inputs: no input has to be saved."""

    @staticmethod
    def forward(ctx, call: EagerCall, query, key, value, slopes, sinks, starts):
        rows, (*whole, slopes, out, lse, low) = _forward(call, query, key, value, slopes, sinks, starts)
        ctx.save_for_backward(*whole, slopes, sinks, starts, out, lse, low)
        ctx.call, ctx.inputs = call, tuple((tensor.shape, tensor.stride()) for tensor in (query, key, value))
        ctx.set_materialize_grads(False)
        frozen = [tensor for tensor, needed in zip(whole, ctx.needs_input_grad[1:4], strict=True) if not needed]
        if frozen:
            ctx.mark_non_differentiable(*frozen)
        return *rows, *whole

    @staticmethod
    def backward(ctx, grad_out, grad_lse, *grads_whole):
        settle(ctx.call.group)
        saved = list(ctx.saved_tensors)  # once: a checkpoint refuses a second reading
        given = [grad for grad in (grad_out, grad_lse, *grads_whole) if grad is not None]
        traced = torch.is_grad_enabled() or is_traced() or any(type(grad) not in PLAIN for grad in given)
        if traced or any(grad is not None for grad in grads_whole):
            *grads, grad_sinks = _differentiable_backward(ctx, saved, grad_out, grad_lse, grads_whole)
        else:
            try:
                *grads, grad_sinks = _backward(ctx, saved, grad_out, grad_lse)
            except RuntimeError as error:
                raise surfaced(error, given[0]) from None
        return None, *grads, None, grad_sinks, None


_apply = plain_apply(_Ulysses)


def _backward(ctx, saved: list, grad_out, grad_lse) -> list[Tensor | None]:
    """The gradients of query, key, value and sinks, as far as they are needed. Empties `saved`."""
    call = ctx.call
    given = [(grad, like) for grad, like in zip((grad_out, grad_lse), saved[6:8], strict=True) if grad is not None]
    arrived = _exchanged(call, "heads", *zip(*given, strict=True))
    del given
    grad_lse = None if grad_lse is None else arrived.pop()
    grads_whole, grad_sinks = _of_heads(ctx, saved, *_run_backward, None if grad_out is None else arrived.pop(), grad_lse)
    saved.clear()
    ctx.maybe_clear_saved_tensors()  # unless the graph is retained: the exchange takes as much memory again
    grads: list[Tensor | None] = [None] * 3
    wanted = [n for n in range(3) if ctx.needs_input_grad[1 + n]]
    if wanted:
        rows = _exchanged(call, "rows", [grads_whole[n] for n in wanted], [ctx.inputs[n] for n in wanted])
        for n, grad in zip(wanted, rows, strict=True):
            grads[n] = grad
    return [*grads, grad_sinks]


def _of_heads(ctx, saved: list, dense: Callable, varlen: Callable, grad_out, grad_lse) -> tuple[list[Tensor], Tensor | None]:
    """The gradients of query, key and value of all rows and this rank's heads, by these operators, and that of sinks."""
    call = ctx.call
    *whole, slopes, sinks, starts, out, lse, low = saved
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    heads = call.own_heads(out.shape[1] * call.group.ranks)
    own_sinks = None if sinks is None else sinks[heads]
    if call.packed:
        tensors = (grad_out, grad_lse, *whole, starts, starts, slopes, own_sinks, None, out, lse, low)
        options = (call.longest, call.longest, *call.options.for_backward(call.deterministic))
        *grads, grad_sinks = varlen(*tensors, *options)
    else:
        tensors = (grad_out, grad_lse, *whole, None, slopes, own_sinks, None, out, lse, low)
        *grads, _, grad_sinks = dense(*tensors, *call.options.for_backward(False, call.deterministic))
    if sinks is None or not ctx.needs_input_grad[5]:
        return grads, None
    return grads, torch.nn.functional.pad(grad_sinks, (heads.start, sinks.shape[0] - heads.stop))


def _differentiable_backward(ctx, saved: list, grad_out, grad_lse, grads_whole) -> list[Tensor | None]:
    """`_backward` in the differentiable steps of `ulysses`, and from the gradients of query, key and value of all rows too."""
    call, (out, lse) = ctx.call, saved[6:8]

    def whole(grad: Tensor | None, like: Tensor) -> Tensor | None:
        if grad is None:
            return None
        exchange = _exchange(call.group, call.layout, [out.shape[1] * call.group.ranks])
        started = StartToHeads.apply((exchange,), _canonical(grad, call.packed))
        (found,) = FinishToHeads.apply(exchange, (_canonical(like, call.packed).stride(),), *started)
        return _restored(found, call.packed, _is_lse(grad, call.packed))

    sums, grad_sinks = list(grads_whole), None
    if grad_out is not None or grad_lse is not None:
        operators = ops.attention_backward.default, ops.attention_varlen_backward.default
        own, grad_sinks = _of_heads(ctx, saved, *operators, whole(grad_out, out), whole(grad_lse, lse))
        sums = [new if grad is None else grad + new for grad, new in zip(sums, own, strict=True)]
    sent = [n for n in range(3) if ctx.needs_input_grad[1 + n] and sums[n] is not None]
    grads: list[Tensor | None] = [None] * 3
    if sent:
        likes = [_canonical(_meta(*ctx.inputs[n], sums[n].dtype), call.packed) for n in sent]
        exchange = _exchange(call.group, call.layout, [like.shape[1] for like in likes])
        started = StartToRows.apply(exchange, *(_canonical(sums[n], call.packed) for n in sent))
        rows = FinishToRows.apply((exchange,), tuple(like.stride() for like in likes), *started)
        for n, grad in zip(sent, rows, strict=True):
            grads[n] = _restored(grad, call.packed, False)
    return [*grads, grad_sinks]


# --- Routes: how tensors are packed, exchanged and unpacked -----------------------------------------------------------------


class _View(NamedTuple):
    """Arguments of as_strided: of this rank's tensor (`own`), or of the received messages."""

    own: bool
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class _Part(NamedTuple):
    """What becomes of one of the exchanged tensors."""

    dtype: torch.dtype
    unit: torch.dtype  # of the elements that are copied: WIDE, or dtype
    sent: list[tuple[_View, _View]]  # what is sent, and its place in the messages
    pieces: list[_View]  # of the result, joined along dimension `along`
    along: int
    sizes: tuple[int, ...]  # of the result
    strides: tuple[int, ...]


class _Route(NamedTuple):
    parts: list[_Part]
    blocks: list[tuple[int, _View]]  # (tensor, view), if one `cat` packs all messages; else empty
    dtype: torch.dtype  # of the messages
    splits: list[int]  # elements for each rank


def _exchanged(call: EagerCall, to: str, tensors: Sequence[Tensor], likes: Sequence) -> list[Tensor]:
    """The tensors of this rank's rows and all heads as tensors of all rows and its heads (to "heads"), or back (to "rows"). A
    result has its memory in the order of its `like`: a tensor, a pair (shape, strides), or None for that of its dimensions."""
    group = call.group
    forms = tuple(
        (t.shape, t.stride(), t.dtype, (t.data_ptr() | t.storage_offset() * t.element_size()) % ALIGNMENT == 0) for t in tensors
    )
    orders = tuple((like.shape, like.stride()) if isinstance(like, Tensor) else like for like in likes)
    route = _route(to, group.rank, group.ranks, call.layout, call.packed, forms, orders)
    with torch._C._AutoDispatchBelowAutograd():
        own = [t if part.unit is part.dtype else t.view(part.unit) for t, part in zip(tensors, route.parts, strict=True)]
        received = all_to_all(_packed(route, own), route.splits, group)
        return [_unpacked(part, tensor, received) for part, tensor in zip(route.parts, own, strict=True)]


def _packed(route: _Route, own: list[Tensor]) -> Tensor:
    if route.blocks:
        return torch.cat([_seen(view, own[n]) for n, view in route.blocks]).flatten().view(route.dtype)
    messages = own[0].new_empty(sum(route.splits), dtype=route.dtype)
    for part, tensor in zip(route.parts, own, strict=True):
        units = messages.view(part.unit)
        for view, place in part.sent:
            _seen(place, units).copy_(_seen(view, tensor))
    return messages


def _unpacked(part: _Part, own: Tensor, received: Tensor) -> Tensor:
    units = received.view(part.unit)
    whole = torch.cat([_seen(view, own if view.own else units) for view in part.pieces], part.along)
    if part.unit is not part.dtype:
        whole = whole.view(part.dtype)
    return whole.as_strided(part.sizes, part.strides)


def _seen(view: _View, tensor: Tensor) -> Tensor:
    return tensor.as_strided(view.sizes, view.strides, tensor.storage_offset() + view.offset)


@functools.lru_cache(maxsize=512)
def _route(to: str, rank: int, ranks: int, layout: str, packed: bool, forms: tuple, orders: tuple) -> _Route:
    """`forms`: (shape, strides, dtype, whether it begins at a multiple of ALIGNMENT) of each tensor; `orders`: (shape, strides)
    of each result's like, or None."""
    tensors = [_canonical(_meta(*form[:3]), packed) for form in forms]
    likes = [None if order is None else _canonical(_meta(*order, torch.int8), packed).stride() for order in orders]
    likes = likes[: len(tensors)]
    exchange = _exchange(Group("", rank, ranks), layout, [t.shape[1] * (ranks if to == "rows" else 1) for t in tensors])
    alike = len({(tensor.shape[2:], tensor.dtype) for tensor in tensors}) == 1
    if alike:
        views = widened(tensors, likes) if all(form[3] for form in forms) else tensors
    else:
        every = zip(tensors, likes, forms, strict=True)
        views = [widened([tensor], [like])[0] if form[3] else tensor for tensor, like, form in every]

    def taken(n: int, other: int) -> Tensor:
        return exchange.heads_of(views[n], n, other) if to == "heads" else exchange.rows_of(views[n], other)

    # A message has a part of each tensor in turn, and is alike on all ranks, whatever their strides.
    others, step = [r for r in range(ranks) if r != rank], 1 if alike else ALIGNMENT
    begins = [0]  # bytes
    for n, view in enumerate(views):
        begins.append(begins[-1] - taken(n, rank).numel() * view.element_size() // -step * step)
    message, parts = begins[-1], []
    for n, (tensor, view) in enumerate(zip(tensors, views, strict=True)):
        places, size = {rank: taken(n, rank)}, view.element_size()
        units = view.new_empty(message * len(others) // size)
        for at, other in enumerate(others):
            shape = taken(n, other).shape
            places[other] = units[(message * at + begins[n]) // size :][: shape.numel()].view(shape)
        if to == "heads":
            order, dim = memory_order(likes[n]), 2
            by_rank = [(r, places[r][:, :, chunk]) for r, chunk in exchange.sequence]
        else:
            order, dim = chunked_order(likes[n]), 1
            by_rank = [(r, places[r]) for r in range(ranks)]
        pieces, along = arranged([piece for _, piece in by_rank], dim, order)
        result = joined([piece for _, piece in by_rank], dim, order)
        result = (result if to == "heads" else result.flatten(2, 3)).view(tensor.dtype)
        result = _restored(result, packed, len(forms[n][0]) == (2 if packed else 3))
        parts.append(
            _Part(
                *(tensor.dtype, view.dtype),
                [] if alike else [(_view_of(taken(n, other), True), _view_of(places[other], False)) for other in others],
                [_view_of(piece, r == rank) for (r, _), piece in zip(by_rank, pieces, strict=True)],
                *(along, tuple(result.shape), result.stride()),
            )
        )
    dtype = tensors[0].dtype if alike else torch.uint8
    blocks = [(n, _view_of(block, True)) for r in others for n in range(len(views)) for block in taken(n, r).unbind()]
    splits = [message // dtype.itemsize * (r != rank) for r in range(ranks)]
    return _Route(parts, blocks if alike else [], dtype, splits)


def _view_of(tensor: Tensor, own: bool) -> _View:
    return _View(own, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


def _meta(shape, strides, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _exchange(group: Group, layout: str, heads: Sequence[int]) -> Exchange:
    """An exchange of tensors of this many heads, which the ranks divide."""
    ranges = (tuple((r * count // group.ranks, (r + 1) * count // group.ranks) for r in range(group.ranks)) for count in heads)
    return Exchange(group, layout, tuple(ranges))


def _is_lse(tensor: Tensor, packed: bool) -> bool:
    return tensor.dim() == (2 if packed else 3)


def _canonical(tensor: Tensor, packed: bool) -> Tensor:
    """[B, H, n, E], the form of `ulysses`; E is 1 for an lse."""
    if _is_lse(tensor, packed):
        tensor = tensor.unsqueeze(-1)
        return tensor.unsqueeze(0) if packed else tensor
    return tensor.transpose(0, 1).unsqueeze(0) if packed else tensor


def _restored(tensor: Tensor, packed: bool, lse: bool) -> Tensor:
    """The inverse of `_canonical`."""
    if lse:
        tensor = tensor.squeeze(3)
        return tensor.squeeze(0) if packed else tensor
    return tensor.squeeze(0).transpose(0, 1) if packed else tensor
