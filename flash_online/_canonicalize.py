"""Brings callers' tensors into the form that the raw operators take: the casts of torch.autocast, and the checks and the
canonical shapes of attention's tensors (one rank >= 4, equal batch dimensions).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import _policy
from ._checks import check_flag, check_float, check_softcap, check_tensor, is_traced_size
from ._ops import FLOATING, InvalidArgument, UnsupportedDtype, is_known


def _autocast_enabled(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)


def autocasts(tensor: Tensor) -> bool:
    """Returns whether an active torch.autocast casts this tensor: it is floating, not float64, and on a device that autocast
    covers."""
    return _autocast_enabled(tensor.device) and tensor.is_floating_point() and tensor.dtype != torch.float64


def autocast(query: Tensor, *others: Tensor | None):
    """Casts attention's tensors, a float mask included, as torch.autocast casts the arguments of scaled_dot_product_attention,
    an operator on its lower-precision list. Our raw operators are on no list of autocast."""
    tensors = (query, *others)
    if not _autocast_enabled(query.device):
        return tensors
    lower = torch.get_autocast_dtype(query.device.type)
    return tuple(t.to(lower) if t is not None and autocasts(t) else t for t in tensors)


def _shape(tensor: Tensor) -> list:
    return list(tensor.shape)


def _raise_rank(tensor: Tensor, rank: int) -> Tensor:
    while tensor.dim() < rank:
        tensor = tensor.unsqueeze(0)
    return tensor


def _expand(tensor: Tensor, leading) -> Tensor:
    """The tensor with its leading dimensions expanded to these sizes; the tensor itself if it already has them."""
    if tuple(tensor.shape[: len(leading)]) == tuple(leading):
        return tensor
    return tensor.expand(*leading, *tensor.shape[len(leading) :])


def check_kinds(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, mask_name: str = "mask") -> None:
    """Raises unless attention takes these dtypes, devices and ranks; the order of the checks is torch's."""
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise InvalidArgument(f"{name}: expected query's dtype {query.dtype}, got {tensor.dtype}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.device != query.device:
            raise InvalidArgument(f"{name}: expected query's device {query.device}, got {tensor.device}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise InvalidArgument(f"{name}: expected [..., length, width], at least 2 dimensions, got shape {_shape(tensor)}")
    if query.dtype not in FLOATING:
        raise UnsupportedDtype(f"query: expected dtype float16, bfloat16, float32 or float64, got {query.dtype}")
    if mask is not None:
        if mask.dtype not in (torch.bool, torch.float32, query.dtype):
            raise InvalidArgument(f"{mask_name}: expected dtype bool, float32 or query's {query.dtype}, got {mask.dtype}")
        if mask.device != query.device:
            raise InvalidArgument(f"{mask_name}: expected query's device {query.device}, got {mask.device}")


def check_types(tensors: dict, optional: dict, flags: dict) -> None:
    """Raises TypeError with the argument's name unless `tensors` are Tensors, `optional` Tensors or None, `flags` bools."""
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    for name, tensor in optional.items():
        if tensor is not None:
            check_tensor(name, tensor)
    for name, flag in flags.items():
        check_flag(name, flag)


def check_attention(
    query, key, value, mask, heads_dim, *,
    causal, window, alignment, softcap, alibi_slopes, sinks, dropout_p, scale, return_lse, deterministic, query_spans=None,
    key_spans=None, return_max_logit=False,
) -> None:  # fmt: skip
    """Raises TypeError or InvalidArgument unless these arguments of `attention` or `varlen_attention` have the right types, and
    the options are valid."""
    flags = {"causal": causal, "return_lse": return_lse, "return_max_logit": return_max_logit}
    if deterministic is not None:
        flags["deterministic"] = deterministic
    optional = {"mask": mask, "alibi_slopes": alibi_slopes, "sinks": sinks, "query_spans": query_spans, "key_spans": key_spans}
    check_types({"query": query, "key": key, "value": value}, optional, flags)
    heads = broadcast_heads(query, key, value) if heads_dim == -3 else None
    check_attention_options(query, heads_dim, window, alignment, softcap, sinks, alibi_slopes, dropout_p, heads)
    if scale is not None:
        check_float("scale", scale)


def cast_and_check(function: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p) -> tuple:
    """The tensors after autocast's casts. Raises unless kernels of `function` take them."""
    query, key, value, mask = autocast(query, key, value, mask)
    check_kinds(query, key, value, mask)
    _policy.require_kernel(function, query=query, key=key, value=value, mask=mask)
    _policy.require_no_dropout(function, query, dropout_p)
    return query, key, value, mask


def expand_slopes(alibi_slopes: Tensor, shape) -> Tensor:
    """The slopes, expanded to a shape [..., Hq]."""
    if alibi_slopes.dim() > len(shape) or broadcast("query, alibi_slopes", shape, alibi_slopes.shape) != tuple(shape):
        raise InvalidArgument(
            f"alibi_slopes: expected [{shape[-1]}], one slope per query head, or {list(shape)}, one for each sequence too, got "
            f"{list(alibi_slopes.shape)}"
        )
    return alibi_slopes.expand(shape)


def broadcast_heads(query: Tensor, key: Tensor, value: Tensor) -> int:
    """The number of query heads after `canonicalize`, which expands a single one to the heads of key and value."""
    heads, *others = (1 if t.is_nested or t.dim() < 3 else t.shape[-3] for t in (query, key, value))
    return max(others) if is_known(heads == 1) else heads


def expand_sinks(sinks: Tensor | None, heads: int) -> Tensor | None:
    """Sinks as [heads]: the sink of a single query head is broadcast with it."""
    return sinks if sinks is None or is_known(sinks.shape[0] == heads) else sinks.expand(heads)


def check_attention_options(
    query, heads_dim, window, alignment, softcap, sinks, alibi_slopes, dropout_p, heads: int | None = None
) -> None:
    """Raises InvalidArgument unless these options are valid; `heads_dim` is the dimension of query that counts its heads.
    `heads`: how many there are if a single one is broadcast; sinks and slopes may then have either number."""
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise InvalidArgument(f"window: expected None or a pair (left, right), got {window!r}")
        for side, bound in zip(("left", "right"), window, strict=True):
            if bound is not None and (not isinstance(bound, (int, torch.SymInt)) or isinstance(bound, bool) or bound < 0):
                got = bound if type(bound) is int else f"{type(bound).__name__} {bound}"
                raise InvalidArgument(f"window: expected None or an int >= 0 on the {side}, got {got}")
    if alignment not in ("upper_left", "lower_right"):
        raise InvalidArgument(f"alignment: expected 'upper_left' or 'lower_right', got {alignment!r}")
    check_softcap(softcap)
    dropout_p = check_float("dropout_p", dropout_p)
    if not 0 <= dropout_p <= 1:
        raise InvalidArgument(f"dropout_p: expected a probability, 0 to 1, got {dropout_p}")
    own = query.shape[heads_dim] if not query.is_nested and query.dim() >= -heads_dim else 1
    heads = own if heads is None else heads
    if sinks is not None and (
        sinks.dim() != 1
        or not (sinks.shape[0] == heads or sinks.shape[0] == own)
        or not sinks.is_floating_point()
        or sinks.device != query.device
    ):
        raise InvalidArgument(
            f"sinks: expected a floating [{heads}], one logit per query head, on {query.device}, got {list(sinks.shape)} "
            f"{sinks.dtype} on {sinks.device}"
        )
    if alibi_slopes is not None:
        if (
            alibi_slopes.dim() < 1
            or not (alibi_slopes.shape[-1] == heads or alibi_slopes.shape[-1] == own)
            or not alibi_slopes.is_floating_point()
        ):
            raise InvalidArgument(
                f"alibi_slopes: expected a floating [{heads}] or [..., {heads}], one slope per query head, got "
                f"{list(alibi_slopes.shape)} {alibi_slopes.dtype}"
            )
        if alibi_slopes.device != query.device:
            raise InvalidArgument(f"alibi_slopes: expected query's device {query.device}, got {alibi_slopes.device}")
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise InvalidArgument(
                "alibi_slopes: expected a tensor without a gradient, got requires_grad=True; a learned bias is a float mask"
            )


def window_bounds(window) -> tuple[int, int]:
    """(left, right) as the raw operators take them: -1 is no bound, and replaces bounds beyond any length."""
    left, right = window
    if left is None or is_known(left >= _UNBOUNDED):
        left = -1
    return left, -1 if right is None or is_known(right >= _UNBOUNDED) else right


_UNBOUNDED = 1 << 62  # operators take 64-bit integers, and add a position to a bound


def check_lengths(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises unless the head dims and lengths of [..., L, E], [..., S, E] and [..., S, Ev] agree."""
    if is_known(key.shape[-1] != query.shape[-1]):
        raise InvalidArgument(
            f"key: expected query's width (last dimension) {query.shape[-1]}, got {key.shape[-1]}; query is {_shape(query)}, "
            f"key {_shape(key)}"
        )
    if is_known(value.shape[-2] != key.shape[-2]):
        raise InvalidArgument(
            f"value: expected key's length (last dimension but one) {key.shape[-2]}, got {value.shape[-2]}; "
            f"key is {_shape(key)}, value {_shape(value)}"
        )


def check_packed(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> None:
    """Raises unless these are packed sequences: tensors [total, heads, head dim], their starts and their maximal lengths."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise InvalidArgument(f"{name}: expected packed sequences [total length, heads, width], got shape {_shape(tensor)}")
    if is_known(key.shape[-1] != query.shape[-1]):
        raise InvalidArgument(f"key: expected query's width (last dimension) {query.shape[-1]}, got {key.shape[-1]}")
    if is_known(value.shape[0] != key.shape[0]):
        raise InvalidArgument(f"value: expected key's total length (dimension 0) {key.shape[0]}, got {value.shape[0]}")
    heads = query.shape[1]
    for name, own in (("key", key.shape[1]), ("value", value.shape[1])):
        if own != heads and (own == 0 or heads % own != 0):
            raise InvalidArgument(f"{name}: expected heads (dimension 1) that divide query's {heads}, got {own}")
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(starts, Tensor) or starts.dtype != torch.int32 or starts.dim() != 1 or starts.shape[0] < 1:
            got = f"{starts.dtype} {_shape(starts)}" if isinstance(starts, Tensor) else repr(starts)
            raise InvalidArgument(f"{name}: expected an int32 tensor [sequences + 1], got {got}")
        if starts.device != query.device:
            raise InvalidArgument(f"{name}: expected query's device {query.device}, got {starts.device}")
    if is_known(cu_seqlens_k.shape[0] != cu_seqlens_q.shape[0]):
        raise InvalidArgument(
            f"cu_seqlens_k: expected as many starts as cu_seqlens_q, {cu_seqlens_q.shape[0]}, got {cu_seqlens_k.shape[0]}"
        )
    check_longest("max_seqlen_q", max_seqlen_q), check_longest("max_seqlen_k", max_seqlen_k)


def longest_of(longest):
    """A bound on the lengths of packed sequences as the operators take it. A size in a trace by torch.jit has the example's
    value: no bound gives the same results."""
    return _NO_LONGEST if is_traced_size(longest) else longest


_NO_LONGEST = 2**31 - 1  # operators take the number of packed rows where that is less


def check_longest(name: str, longest) -> None:
    """Raises unless `longest` can be the length of the longest packed sequence."""
    if not torch.compiler.is_compiling() and type(longest) is int and 0 <= longest < 1 << 63:
        return
    wrong = not isinstance(longest, (int, torch.SymInt)) or isinstance(longest, bool)
    if wrong or is_known(longest < 0) or is_known(longest >= 1 << 63):
        raise InvalidArgument(f"{name}: expected an int >= 0 of 64 bits (the host does not read the lengths), got {longest!r}")


def broadcast(names: str, *shapes) -> tuple:
    """The shape that `shapes` broadcast to. Errors call their tensors `names`."""
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise InvalidArgument(f"{names}: expected leading dimensions that broadcast, got {[list(s) for s in shapes]}") from None


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool | None) -> None:
    """Raises unless the numbers of heads (dimension -3) fit. enable_gqa None: the heads of key and value divide query's, and a
    single query head may broadcast to several. True: they divide, and each tensor has that dimension, as in torch. False: they
    are equal or 1, as in torch."""
    if enable_gqa is False:
        if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
            return
        heads = [tensor.shape[-3] for tensor in (query, key, value) if tensor.dim() > 2 and tensor.shape[-3] != 1]
        if any(count != heads[0] for count in heads):
            raise InvalidArgument(
                f"query, key, value: expected equal numbers of heads (dimension -3), or 1, got {', '.join(map(str, heads))}; "
                "with enable_gqa=True query may have a multiple of key's and value's"
            )
        return
    tensors = (("query", query), ("key", key), ("value", value))
    if enable_gqa:
        for name, tensor in tensors:
            if tensor.dim() < 3:
                raise IndexError(f"{name}: expected a head dimension (-3) with enable_gqa=True, got shape {_shape(tensor)}")
    heads, key_heads, value_heads = (tensor.shape[-3] if tensor.dim() > 2 else 1 for _, tensor in tensors)
    if enable_gqa is None and heads == 1:
        heads = max(key_heads, value_heads)
    for name, own in (("key", key_heads), ("value", value_heads)):
        divides = own > 0 and heads % own == 0
        if not divides and (enable_gqa or own != heads):
            raise InvalidArgument(f"{name}: expected heads (dimension -3) that divide query's {heads}, got {own}")


def _scores_shape_of_torch(query: Tensor, key: Tensor) -> list:
    """The shape that torch broadcasts a mask to, with the dimensions of query and key only."""
    rank = max(query.dim(), key.dim())
    sizes = ([1] * (rank - tensor.dim()) + list(tensor.shape[:-2]) for tensor in (query, key))
    leading = [query_size if key_size == 1 else key_size for query_size, key_size in zip(*sizes, strict=True)]
    if query.dim() > 2 and query.shape[-3] != 1:
        leading[-1] = query.shape[-3]  # under GQA key has fewer heads
    return [*leading, query.shape[-2], key.shape[-2]]


def _check_mask(name: str, mask: Tensor, scores: list) -> None:
    """Raises unless the mask broadcasts to the scores' shape; a mask that would enlarge that shape is an error."""
    if mask.dim() > len(scores) or any(
        size != 1 and size != full for size, full in zip(reversed(mask.shape), reversed(scores), strict=False)
    ):
        padding = len(scores) == 4 and _shape(mask) == [scores[0], scores[3]]
        hint = f"; a padding mask [batch, keys] is {name}[:, None, None, :]" if padding else ""
        raise InvalidArgument(f"{name}: expected a shape that broadcasts to the scores' {scores}, got {_shape(mask)}{hint}")


def canonicalize(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    mask_name: str = "mask",
    enable_gqa: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
    """Views of attention's tensors in the form that the raw operator takes, and a function that restores the callers' rank.

    query [..., Hq, L, E], key [..., Hk, S, E], value [..., Hv, S, Ev] have any ranks >= 2 and batch dimensions that broadcast;
    mask broadcasts to [..., Hq, L, S]. Returns (query, key, value, mask, restore): the tensors have one rank >= 4 and equal
    batch dimensions. Hk and Hv divide Hq and are not expanded; a single query head is expanded to several. The mask keeps size
    1 in broadcast dimensions. restore(result) brings [batch..., Hq, ...] to the rank that the callers' three tensors broadcast
    to. Nothing is copied. Raises InvalidArgument if shapes do not fit. enable_gqa: torch's argument, with torch's rules for
    heads and masks; None for ours. mask_name: the name of the caller's argument.
    """
    _check_heads(query, key, value, enable_gqa)
    if mask is not None and enable_gqa is not None:
        _check_mask(mask_name, mask, _scores_shape_of_torch(query, key))
    check_lengths(query, key, value)
    rank = max(query.dim(), key.dim(), value.dim())
    raised = max(rank, 4)
    query, key, value = _raise_rank(query, raised), _raise_rank(key, raised), _raise_rank(value, raised)

    batch = query.shape[:-3]
    if not (key.shape[:-3] == batch and value.shape[:-3] == batch):
        batch = broadcast("query, key, value", batch, key.shape[:-3], value.shape[:-3])
        key, value = _expand(key, batch), _expand(value, batch)
    heads = query.shape[-3]
    if heads == 1:
        heads = key.shape[-3] if value.shape[-3] <= key.shape[-3] else value.shape[-3]
    query = _expand(query, (*batch, heads))
    if mask is not None:
        if enable_gqa is None:
            scores = [*batch, heads, query.shape[-2], key.shape[-2]]
            _check_mask(mask_name, mask, scores[raised - rank :])
        mask = _raise_rank(mask, raised)

    def restore(result: Tensor) -> Tensor:
        for _ in range(raised - rank):
            result = result.squeeze(0)
        return result

    return query, key, value, mask, restore
