"""Ulysses of plain tensors in eager mode: one autograd Function, and one exchange in each direction.

It computes what `ulysses` computes where the ranks divide all heads and a rank's heads are one group, by the same operators on
tensors of the same strides. Query, key and value travel in one message, out and lse in another, and gradients likewise. What is
packed and unpacked depends on the signature alone: `_route` runs the views of `ulysses` on meta tensors, once, and makes plans
of them, by which one launch packs all messages and another one unpacks them.

Tensors are in the callers' form: dense [B, H, n, E] with an lse [B, H, n], or rows of a packed stream [n, H, E] with [H, n].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from .._attention_arguments import AttentionOptions, given_sparsity
from .._autograd import is_traced, plain_apply, requires_grad, unwrap_if_dead
from .._copies import BYTES, Copies, copied
from .._ops import below_autograd, dense_strides_in_order, ops, surfaced
from ._agreement import settle
from ._group import Group, all_to_all
from ._ulysses import (
    PLAIN,
    WIDE,
    Exchange,
    FinishToHeads,
    FinishToRows,
    PerHead,
    StartToHeads,
    StartToRows,
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


def ulysses_eager(call: EagerCall, query, key, value, others: PerHead, starts) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None) of this rank's rows. Slopes and sinks are in the accumulator's dtype; `starts`: cu_seqlens of a packed
    stream, else None."""
    slopes, sinks, *sparsity = others
    try:
        if requires_grad((query, key, value, sinks)):
            tensors = (tensor if tensor is None else unwrap_if_dead(tensor) for tensor in (query, key, value, slopes, sinks))
            out, lse, *_ = _apply(call, *tensors, starts, *sparsity)
        else:
            (out, lse), _ = _forward(call, query, key, value, others, starts)
        return out, lse
    except RuntimeError as error:
        raise surfaced(error, query) from None


def _forward(call: EagerCall, query, key, value, others: PerHead, starts):
    """(out, lse or None) of this rank's rows; and of all rows and its heads query, key, value, slopes, spans, tiles, out, lse
    and lse_low."""
    inputs = (query, key, value)
    whole = _exchanged(call, "heads", inputs, inputs)
    slopes, sinks, *sparsity = others.of(call.own_heads(query.shape[1]))
    if call.packed:
        tensors = (*whole, starts, starts, slopes, sinks, None, call.longest, call.longest)
        results = _run_varlen(*tensors, *call.options, *given_sparsity(*sparsity))
    else:
        results = _run_dense(*whole, None, slopes, sinks, None, *call.options, *given_sparsity(*sparsity))
    rows = _exchanged(call, "rows", results[: 1 + call.return_lse], (query, None))
    return (rows[0], rows[1] if call.return_lse else None), (*whole, slopes, *sparsity, *results)


_run_dense, _run_varlen = below_autograd(ops.attention_forward), below_autograd(ops.attention_varlen_forward)
_run_backward = below_autograd(ops.attention_backward), below_autograd(ops.attention_varlen_backward)


class _Ulysses(Function):
    """(call, query, key, value, slopes, sinks, starts, query_spans, key_spans, tiles) -> (out, lse or None; query, key and
    value of all rows and this rank's heads).

    The caller does not use the last three; the backward pass saves them as results. Where it is differentiated itself, their
    gradients come back to this Function, which exchanges them for those of the inputs: no input has to be saved."""

    @staticmethod
    def forward(ctx, call: EagerCall, query, key, value, slopes, sinks, starts, *sparsity):
        others = PerHead(slopes, sinks, *sparsity)
        rows, (*whole, slopes, query_spans, key_spans, tiles, out, lse, low) = _forward(call, query, key, value, others, starts)
        ctx.save_for_backward(*whole, slopes, sinks, starts, query_spans, key_spans, tiles, out, lse, low)
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
        return None, *grads, None, grad_sinks, None, None, None, None


_apply = plain_apply(_Ulysses)


def _backward(ctx, saved: list, grad_out, grad_lse) -> list[Tensor | None]:
    """The gradients of query, key, value and sinks, as far as they are needed. Empties `saved`."""
    call = ctx.call
    given = [(grad, like) for grad, like in zip((grad_out, grad_lse), saved[-3:-1], strict=True) if grad is not None]
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
    *whole, slopes, sinks, starts, query_spans, key_spans, tiles, out, lse, low = saved
    sparsity = given_sparsity(query_spans, key_spans, tiles)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    heads = call.own_heads(out.shape[1] * call.group.ranks)
    own_sinks = None if sinks is None else sinks[heads]
    if call.packed:
        tensors = (grad_out, grad_lse, *whole, starts, starts, slopes, own_sinks, None, out, lse, low)
        options = (call.longest, call.longest, *call.options.for_backward(call.deterministic))
        *grads, grad_sinks = varlen(*tensors, *options, *sparsity)
    else:
        tensors = (grad_out, grad_lse, *whole, None, slopes, own_sinks, None, out, lse, low)
        *grads, _, grad_sinks = dense(*tensors, *call.options.for_backward(False, call.deterministic), *sparsity)
    if sinks is None or not ctx.needs_input_grad[5]:
        return grads, None
    return grads, torch.nn.functional.pad(grad_sinks, (heads.start, sinks.shape[0] - heads.stop))


def _differentiable_backward(ctx, saved: list, grad_out, grad_lse, grads_whole) -> list[Tensor | None]:
    """`_backward` in the differentiable steps of `ulysses`, and from the gradients of query, key and value of all rows too."""
    call, (out, lse) = ctx.call, saved[-3:-1]

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


class _Route(NamedTuple):
    """Plans of `copied`: from this rank's tensors to the messages, and from these and what has arrived to the results."""

    pack: list[int]
    splits: list[int]  # bytes for each rank
    unpack: list[int]


def _exchanged(call: EagerCall, to: str, tensors: Sequence[Tensor], likes: Sequence) -> list[Tensor]:
    """The tensors of this rank's rows and all heads as tensors of all rows and its heads (to "heads"), or back (to "rows"). A
    result has its memory in the order of its `like`: a tensor, a pair (shape, strides), or None for that of its dimensions."""
    group = call.group
    forms = tuple((t.shape, t.stride(), t.dtype, t.data_ptr() % ALIGNMENT == 0) for t in tensors)
    orders = tuple((like.shape, like.stride()) if isinstance(like, Tensor) else like for like in likes)
    route = _route(to, group.rank, group.ranks, call.layout, call.packed, forms, orders)
    (messages,) = copied([*tensors], route.pack)
    with torch._C._AutoDispatchBelowAutograd():
        received = all_to_all(messages, route.splits, group)
    return copied([*tensors, received], route.unpack)


@functools.lru_cache(maxsize=512)
def _route(to: str, rank: int, ranks: int, layout: str, packed: bool, forms: tuple, orders: tuple) -> _Route:
    """`forms`: (shape, strides, dtype, whether it begins at a multiple of ALIGNMENT) of each tensor; `orders`: (shape, strides)
    of each result's like, or None. Views on meta stand for the memory of tensors and messages."""
    tensors = [_canonical(_meta(*form[:3]), packed) for form in forms]
    exchange = _exchange(Group("", rank, ranks), layout, [t.shape[1] * (ranks if to == "rows" else 1) for t in tensors])
    pack, unpack = Copies(), Copies()
    parts, begin = [], 0  # of a message: a part of each tensor in turn, alike on all ranks whatever their strides
    for n, (tensor, form, order) in enumerate(zip(tensors, forms, orders, strict=False)):
        like = None if order is None else _canonical(_meta(*order, torch.int8), packed).stride()
        view = widened([tensor], [like])[0] if form[3] else tensor
        take = functools.partial(exchange.heads_of, view, n) if to == "heads" else functools.partial(exchange.rows_of, view)
        parts.append((n, tensor, view, like, take, begin))
        begin -= take(rank).numel() * view.element_size() // -ALIGNMENT * ALIGNMENT
    message, others = begin, [r for r in range(ranks) if r != rank]
    messages = pack.new((message * len(others),), (1,), BYTES)
    for n, tensor, view, like, take, begin in parts:
        places = {rank: take(rank)}
        for at, other in enumerate(others):
            sent = take(other)
            first = (message * at + begin) // view.element_size()
            places[other] = view.new_empty(first + sent.numel())[first:].view(sent.shape)
            pack.add(n, sent, messages, places[other])
        heads = exchange.splits[n]
        if to == "heads":
            sizes = (tensor.shape[0], exchange.heads_count(n, rank), tensor.shape[2] * ranks, tensor.shape[3])
        else:
            sizes = (tensor.shape[0], heads[-1][1], tensor.shape[2] // ranks, tensor.shape[3])
        result = _meta(sizes, dense_strides_in_order(sizes, like or (4, 3, 2, 1)), tensor.dtype)
        given = _restored(result, packed, len(forms[n][0]) == (2 if packed else 3))
        number, units = unpack.new(given.shape, given.stride(), n), result.view(view.dtype)
        for source, seen, place in _pieces(exchange, to, n, places, units):
            unpack.add(n if source == rank else len(tensors), seen, number, place)
    return _Route(pack.plan(), [message * (r != rank) for r in range(ranks)], unpack.plan())


def _pieces(exchange: Exchange, to: str, n: int, places: dict[int, Tensor], whole: Tensor):
    """(rank that sends it, view of what it sends, its place in the result) of each piece of tensor n."""
    if to == "heads":
        rows = whole.shape[2] // len(exchange.sequence)
        for at, (rank, chunk) in enumerate(exchange.sequence):
            yield rank, places[rank][:, :, chunk], whole[:, :, at * rows : (at + 1) * rows]
    else:
        for rank, (begin, end) in enumerate(exchange.splits[n]):
            chunks = (exchange.chunks, whole.shape[2] // exchange.chunks)
            yield rank, places[rank], whole[:, begin:end].unflatten(2, chunks)


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
