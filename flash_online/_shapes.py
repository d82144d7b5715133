"""From the tensors that callers have to those that the raw operators take: the casts of torch.autocast, and for attention one
rank >= 4 and equal batch dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._ops import FLOATING, InvalidArgument, UnsupportedDtype


def _autocasting(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)


def autocasts(tensor: Tensor) -> bool:
    """Whether an active torch.autocast casts this tensor: floating, not float64, and on the device that autocast is for."""
    return _autocasting(tensor.device) and tensor.is_floating_point() and tensor.dtype != torch.float64


def autocast(query: Tensor, *others: Tensor | None):
    """Attention's tensors in the precision that torch.autocast gives scaled_dot_product_attention, which is on its list of
    operators in lower precision; a float mask is cast with the rest. Raw operators are on no list."""
    tensors = (query, *others)
    if not _autocasting(query.device):
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
    """The tensor with these sizes in front of its last dimensions; itself where it has them already."""
    if tuple(tensor.shape[: len(leading)]) == tuple(leading):
        return tensor
    return tensor.expand(*leading, *tensor.shape[len(leading) :])


def check_kinds(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, mask_name: str = "mask") -> None:
    """Raises unless dtypes, devices and ranks are ones that attention takes; in torch's order."""
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise InvalidArgument(f"{name}: dtype {tensor.dtype}, expected query's {query.dtype}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.device != query.device:
            raise InvalidArgument(f"{name}: on {tensor.device}, expected query's device {query.device}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise InvalidArgument(f"{name}: expected [..., length, width], at least 2 dimensions, got shape {_shape(tensor)}")
    if query.dtype not in FLOATING:
        raise UnsupportedDtype(f"query: dtype {query.dtype}, expected float16, bfloat16, float32 or float64")
    if mask is not None:
        if mask.dtype not in (torch.bool, torch.float32, query.dtype):
            raise InvalidArgument(f"{mask_name}: dtype {mask.dtype}, expected bool, float32 or query's {query.dtype}")
        if mask.device != query.device:
            raise InvalidArgument(f"{mask_name}: on {mask.device}, expected query's device {query.device}")


def check_lengths(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises unless the widths and lengths of [..., L, E], [..., S, E] and [..., S, Ev] agree."""
    if key.shape[-1] != query.shape[-1]:
        raise InvalidArgument(
            f"key: width (last dimension) is {key.shape[-1]}, expected query's {query.shape[-1]}; "
            f"got query {_shape(query)}, key {_shape(key)}"
        )
    if value.shape[-2] != key.shape[-2]:
        raise InvalidArgument(
            f"value: length (last dimension but one) is {value.shape[-2]}, expected key's {key.shape[-2]}; "
            f"got key {_shape(key)}, value {_shape(value)}"
        )


def check_packed(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> None:
    """Raises unless these are packed sequences: [total, heads, width], their starts and the longest lengths."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise InvalidArgument(f"{name}: expected packed sequences [total length, heads, width], got shape {_shape(tensor)}")
    if key.shape[-1] != query.shape[-1]:
        raise InvalidArgument(f"key: width (last dimension) is {key.shape[-1]}, expected query's {query.shape[-1]}")
    if value.shape[0] != key.shape[0]:
        raise InvalidArgument(f"value: total length (dimension 0) is {value.shape[0]}, expected key's {key.shape[0]}")
    heads = query.shape[1]
    for name, own in (("key", key.shape[1]), ("value", value.shape[1])):
        if own != heads and (own == 0 or heads % own != 0):
            raise InvalidArgument(f"{name}: {own} heads (dimension 1), expected a divisor of query's {heads}")
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(starts, Tensor) or starts.dtype != torch.int32 or starts.dim() != 1 or starts.shape[0] < 1:
            got = f"{starts.dtype} {_shape(starts)}" if isinstance(starts, Tensor) else repr(starts)
            raise InvalidArgument(f"{name}: got {got}, expected an int32 tensor [sequences + 1]")
        if starts.device != query.device:
            raise InvalidArgument(f"{name}: on {starts.device}, expected query's device {query.device}")
    if cu_seqlens_k.shape[0] != cu_seqlens_q.shape[0]:
        raise InvalidArgument(
            f"cu_seqlens_k: {cu_seqlens_k.shape[0]} starts, expected as many as cu_seqlens_q's {cu_seqlens_q.shape[0]}"
        )
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(longest, (int, torch.SymInt)) or isinstance(longest, bool) or longest < 0:
            raise InvalidArgument(f"{name}: got {longest!r}, expected an int >= 0 (nobody reads lengths off the device)")


def broadcast(names: str, *shapes) -> tuple:
    """The common shape of some shapes, or an error that names the tensors they are of."""
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError:
        raise InvalidArgument(f"{names}: leading dimensions {[list(s) for s in shapes]} do not broadcast") from None


def canonicalize(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
    """Views of attention's tensors as the raw operator takes them, and the way back.

    query [..., Hq, L, E], key [..., Hk, S, E], value [..., Hv, S, Ev], any ranks >= 2, their batch dimensions broadcastable;
    mask broadcastable to [..., Hq, L, S]. Returns (query, key, value, mask, restore): tensors of one rank >= 4, the batch
    dimensions expanded to be equal; Hk and Hv divide Hq and are left as they are, but a single query head beside several is
    expanded. The mask keeps size 1 where it is broadcast. restore(result) takes [batch..., Hq, ...] back to the rank that
    broadcasting the three gives. Copies nothing; raises InvalidArgument where shapes do not fit.
    """
    check_lengths(query, key, value)
    rank = max(query.dim(), key.dim(), value.dim())
    wide = max(rank, 4)
    query, key, value = _raise_rank(query, wide), _raise_rank(key, wide), _raise_rank(value, wide)

    batch = query.shape[:-3]
    if not (key.shape[:-3] == batch and value.shape[:-3] == batch):
        batch = broadcast("query, key, value", batch, key.shape[:-3], value.shape[:-3])
        key, value = _expand(key, batch), _expand(value, batch)
    heads = query.shape[-3]
    if heads == 1:
        heads = key.shape[-3] if value.shape[-3] <= key.shape[-3] else value.shape[-3]
    query = _expand(query, (*batch, heads))
    for name, own in (("key", key.shape[-3]), ("value", value.shape[-3])):
        if own != heads and (own == 0 or heads % own != 0):
            raise InvalidArgument(f"{name}: {own} heads (dimension -3), expected a divisor of query's {heads}")

    if mask is not None:
        full = (*batch, heads, query.shape[-2], key.shape[-2])
        if mask.dim() > rank or any(
            size != 1 and size != other for size, other in zip(reversed(mask.shape), reversed(full), strict=False)
        ):
            raise InvalidArgument(f"mask: shape {_shape(mask)} does not broadcast to {list(full[wide - rank :])}")
        mask = _raise_rank(mask, wide)

    def restore(result: Tensor) -> Tensor:
        for _ in range(wide - rank):
            result = result.squeeze(0)
        return result

    return query, key, value, mask, restore
