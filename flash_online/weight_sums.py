"""Sums of attention's weights per key: what a cache that evicts keys ranks them by."""

from __future__ import annotations

from torch import Tensor

from ._autograd import without_derivative
from ._canonicalize import canonicalize, cast_and_check, check_attention_options, check_types, window_bounds
from ._checks import check_float, check_int, none_as_zero
from ._ops import InvalidArgument, accumulator_of, direct_call, ops
from .attention import operator_scale

__all__ = ["attention_weight_sums"]

_weight_sums = direct_call(ops.attention_weight_sums)
without_derivative(ops.attention_weight_sums, "sums of weights are statistics")


def attention_weight_sums(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "upper_left",
    softcap: float | None = 0.0,
    scale: float | None = None,
    last: int | None = None,
) -> Tensor:
    """The sum of each key's weights over the queries, or over the last of them, in memory linear in the lengths.

    The weight of a key for a query is exp(score - lse), as in `attention` with the same options. Heavy-hitter caches keep the
    keys with the largest sums (H2O), of the last queries alone (SnapKV).

    Args:
        query: `[..., Hq, L, E]`; float16, bfloat16, float32 or float64; any strides.
        key: `[..., Hk, S, E]`, of query's dtype and device. Hk divides Hq. Leading dimensions broadcast.
        lse: `[..., Hq, L]`, as `attention` returns it for these queries and keys: float32 (float64 for float64).
        causal: as in `attention`, and so are window, alignment, softcap and scale.
        last: sum over the last `last` queries alone, or over all if there are fewer; None: over all.

    Returns:
        float32 `[..., Hq, S]`, the same bits in every run, without a gradient. A key that no query sees has the sum 0.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above.
        NotImplementedError: the device has no kernel for this call.

    Source: H2O (arXiv 2306.14048), SnapKV (arXiv 2404.14469).
    """
    softcap = none_as_zero(softcap)
    check_types({"query": query, "key": key, "lse": lse}, {}, {"causal": causal})
    check_attention_options(query, -3, window, alignment, softcap, None, None, 0.0)
    if scale is not None:
        check_float("scale", scale)
    if last is not None and check_int("last", last) < 0:
        raise InvalidArgument(f"last: expected None or an int >= 0, got {last}")
    query, key, _, _ = cast_and_check("attention_weight_sums", query.detach(), key.detach(), key.detach(), None, 0.0)
    if not lse.is_floating_point():
        raise InvalidArgument(f"lse: expected a floating dtype, got {lse.dtype}")
    query, key, _, _, restore = canonicalize(query, key, key, None)
    rows = lse.detach()
    while rows.dim() < query.dim() - 1:
        rows = rows.unsqueeze(0)
    if rows.shape != query.shape[:-1]:
        raise InvalidArgument(f"lse: expected query's {list(query.shape[:-1])} rows, got {list(lse.shape)}")
    if lse.device != query.device:
        raise InvalidArgument(f"lse: expected query's device {query.device}, got {lse.device}")
    left, right = window_bounds(window or (None, None))
    batch = query.shape[:-3]
    if len(batch) > 1:
        query, key, rows = query.flatten(0, -4), key.flatten(0, -4), rows.flatten(0, -3)
    visible = (left, 0 if causal else right, alignment == "lower_right", -1 if last is None else last)
    options = (operator_scale(query, scale), float(softcap))
    sums = _weight_sums(query, key, rows.to(accumulator_of(query.dtype)), *visible, *options)
    return restore(sums.unflatten(0, batch) if len(batch) > 1 else sums)
