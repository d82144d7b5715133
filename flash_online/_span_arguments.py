"""The arguments `query_spans` and `key_spans`: checks, the form that operators take, and what lies in an interval. Nothing
reads values on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import check_tensor
from ._ops import InvalidArgument, is_known


def check_span_rows(name: str, spans: Tensor, length: int) -> None:
    """Raises TypeError or InvalidArgument unless these are spans int32 `[..., length, 2 or 4]`."""
    check_tensor(name, spans)
    if spans.dtype != torch.int32:
        raise InvalidArgument(f"{name}: expected dtype int32, got {spans.dtype}")
    if spans.dim() < 2:
        raise InvalidArgument(f"{name}: expected [..., {length}, 2 or 4], at least 2 dimensions, got {list(spans.shape)}")
    if spans.shape[-1] not in (2, 4):
        raise InvalidArgument(f"{name}: expected 2 or 4 bounds (last dimension), got {spans.shape[-1]}")
    if is_known(spans.shape[-2] != length):
        raise InvalidArgument(f"{name}: expected the length {length} (last dimension but one), got {spans.shape[-2]}")


def check_spans(name: str, spans: Tensor, batch_and_heads: Sequence[int], length: int) -> None:
    """Raises TypeError or InvalidArgument unless these are spans int32 `[..., 1 or Hq, length, 2 or 4]` that broadcast to the
    sizes `batch_and_heads`, `[..., Hq]`. Spans that would enlarge them are an error."""
    check_span_rows(name, spans, length)
    expected, leading = list(batch_and_heads), list(spans.shape[:-2])
    heads = expected[-1] if expected else 1
    if leading and is_known(leading[-1] != 1) and is_known(leading[-1] != heads):
        raise InvalidArgument(f"{name}: expected 1 or query's {heads} heads (dimension -3), got {leading[-1]}")
    check_leading(name, spans, len(leading), expected)


def check_leading(name: str, tensor: Tensor, leading: int, batch_and_heads: Sequence[int]) -> None:
    """Raises InvalidArgument unless the first `leading` dimensions broadcast to the sizes `batch_and_heads`, and do not enlarge
    them."""
    sizes = zip(reversed(tensor.shape[:leading]), reversed(batch_and_heads), strict=False)
    if leading > len(batch_and_heads) or any(is_known(size != 1) and is_known(size != full) for size, full in sizes):
        raise InvalidArgument(
            f"{name}: expected leading dimensions that broadcast to {list(batch_and_heads)} (batch and heads), got "
            f"{list(tensor.shape)}"
        )


def canonical_spans(
    name: str, spans: Tensor | None, query: Tensor, batch_and_heads: Sequence[int], length: int
) -> Tensor | None:
    """Spans as the operators take them, with the dimensions `[..., 1 or Hq, length, 2 or 4]` of `batch_and_heads` and size 1
    where they broadcast. A view, unless bounds are not neighbours in memory. Raises as `check_spans`."""
    if spans is None:
        return None
    check_spans(name, spans, batch_and_heads, length)
    if spans.device != query.device:
        raise InvalidArgument(f"{name}: expected query's device {query.device}, got {spans.device}")
    while spans.dim() < len(batch_and_heads) + 2:
        spans = spans.unsqueeze(0)
    return spans if spans.stride(-1) == 1 else spans.contiguous()


def in_spans(numbers: Tensor, spans: Tensor) -> Tensor:
    """Whether numbers lie in one of the intervals of spans [..., 2 or 4], broadcast to spans without their last dimension."""
    inside = [(numbers >= spans[..., n]) & (numbers < spans[..., n + 1]) for n in range(0, spans.shape[-1], 2)]
    return inside[0] if len(inside) == 1 else inside[0] | inside[1]


def spans_of_key_mask(mask: Tensor, keys: int) -> Tensor:
    """The key_spans `[..., keys, 2]` of a bool mask `[..., 1, 1 or keys]` that all queries share: a key is seen by all of them
    or by none."""
    past = mask[..., 0, :].expand(*mask.shape[:-2], keys).to(torch.int32) * (2**31 - 1)  # clamped to the queries
    return torch.stack([torch.zeros_like(past), past], -1)
