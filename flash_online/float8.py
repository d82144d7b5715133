"""Attention with products in float8 (e4m3), for inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor

from . import _policy
from ._autograd import without_derivative
from ._cache_arguments import check_no_gradient, expand_scale
from ._canonicalize import (
    autocast,
    broadcast_heads,
    canonicalize,
    check_attention_options,
    check_types,
    expand_sinks,
    window_bounds,
)
from ._checks import check_float, none_as_zero
from ._ops import SIXTEEN_BITS, InvalidArgument, UnsupportedDtype, direct_call, ops, surfaced
from ._span_arguments import canonical_spans
from .attention import operator_scale

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["float8_attention"]

_float8_attention = direct_call(ops.float8_attention)
without_derivative(ops.float8_attention, "attention in float8 is for inference")
_E4M3 = torch.float8_e4m3fn


class _Keywords(TypedDict, total=False):
    """The keywords of float8_attention that do not change the type of the result, for type checkers."""

    query_scale: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None
    smooth_keys: bool
    causal: bool
    window: tuple[int | None, int | None] | None
    alignment: str
    query_spans: Tensor | None
    key_spans: Tensor | None
    softcap: float
    sinks: Tensor | None
    scale: float | None
    out_dtype: torch.dtype | None


@overload
def float8_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[_Keywords]
) -> Tensor: ...
@overload
def float8_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: Literal[True], **options: Unpack[_Keywords]
) -> tuple[Tensor, Tensor]: ...
@overload
def float8_attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **options: Unpack[_Keywords]
) -> Tensor | tuple[Tensor, Tensor]: ...
def float8_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    smooth_keys: bool = True,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "upper_left",
    query_spans: Tensor | None = None,
    key_spans: Tensor | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with products in float8 (e4m3), without gradients. Nothing else ever picks it.

    16-bit inputs are quantised: those of a batch and key head, query's over all query heads that share it, are divided by one
    float32 scale, their largest finite magnitude / 448, and rounded to the nearest, ties to even. Infinities saturate to 448
    scales; NaN stays NaN and, like infinities, does not enter the scale. Results of a row so depend on the scales of all. With
    e4m3 inputs they depend on the row, and the keys and values that it sees, alone.

    Args:
        query: `[..., Hq, L, E]`; float16, bfloat16 or float8_e4m3fn; any strides.
        key: `[..., Hkv, S, E]`, of query's dtype and device. Hkv divides Hq; query head h uses key head `h // (Hq / Hkv)`.
            Leading dimensions broadcast.
        value: `[..., Hkv, S, Ev]`, as key.
        query_scale: float32, broadcastable to `[..., Hkv]`: what an e4m3 query is multiplied by; None is 1. None with 16 bits.
        key_scale: the same for key.
        value_scale: the same for value.
        smooth_keys: quantise 16-bit keys less their mean over the sequence, and add the query's product with the mean to its
            scores, before softcap, sinks and lse: the scale then measures how keys differ. No effect with e4m3.
        causal: as in `attention`, and so are window, alignment, query_spans, key_spans, softcap and scale.
        sinks: `[Hq]`, one logit per head that joins the denominator only.
        return_lse: also return the logarithm of each query's denominator.
        out_dtype: float16 or bfloat16; None is the inputs' 16-bit dtype, or bfloat16 for e4m3.

    Returns:
        out `[..., Hq, L, Ev]` of out_dtype, in query's order of strides; a query that sees nothing gets 0. With `return_lse`
        also lse `[..., Hq, L]`, natural logarithm, float32; -inf where a query sees nothing.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above, or requires a gradient outside
            `torch.no_grad()`.
        NotImplementedError: the device has no kernel for this call, or query has another dtype.

    On CUDA the GPU must have compute capability 9.0. Source: FlashAttention-3 (arXiv 2407.08608); the keys' mean is
    SageAttention's (arXiv 2410.02367).
    """
    softcap = none_as_zero(softcap)
    scales = {"query_scale": query_scale, "key_scale": key_scale, "value_scale": value_scale}
    tensors = {"query": query, "key": key, "value": value}
    spans = {"query_spans": query_spans, "key_spans": key_spans}
    flags = {"smooth_keys": smooth_keys, "causal": causal, "return_lse": return_lse}
    check_types(tensors, scales | {"sinks": sinks} | spans, flags)
    heads = broadcast_heads(query, key, value)
    check_attention_options(query, -3, window, alignment, softcap, sinks, None, 0.0, heads)
    if scale is not None:
        check_float("scale", scale)
    check_no_gradient(tensors, scales | {"sinks": sinks}, function="float8 attention")
    if query.dtype != _E4M3:
        query, key, value = autocast(query, key, value)
    _check_kinds(query, key, value)
    _policy.require_kernel("float8_attention", query=query, key=key, value=value)
    out_dtype = _out_dtype(out_dtype, query)
    query, key, value, _, restore = canonicalize(query, key, value, None)
    batch, length, keys = query.shape[:-3], query.shape[-2], key.shape[-2]
    own = [_expanded_scale(name, tensor, key) for name, tensor in scales.items()]
    seen = [
        canonical_spans("query_spans", query_spans, query, query.shape[:-2], length),
        canonical_spans("key_spans", key_spans, query, query.shape[:-2], keys),
    ]
    if len(batch) > 1:
        query, key, value = query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4)
        own = [None if t is None else t.flatten(0, -2) for t in own]
        seen = [None if t is None else t.expand(*batch, *t.shape[-3:]).flatten(0, -4) for t in seen]
    left, right = window_bounds(window or (None, None))
    sinks = None if sinks is None else expand_sinks(sinks, query.shape[-3]).to(torch.float32).contiguous()
    visible = (left, 0 if causal else right, alignment == "lower_right", *seen)
    options = (float(softcap), sinks, operator_scale(query, scale), out_dtype, return_lse)
    try:
        out, lse = _float8_attention(query, key, value, *own, smooth_keys, *visible, *options)
    except RuntimeError as error:
        raise surfaced(error, query) from None
    if len(batch) > 1:
        out = out.unflatten(0, batch)
        lse = lse.unflatten(0, batch) if return_lse else lse
    return (restore(out), restore(lse)) if return_lse else restore(out)


def _check_kinds(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises unless these are tensors of one dtype that is quantised or e4m3, on one device, and the heads of key and value are
    equal in number."""
    if query.dtype not in (*SIXTEEN_BITS, _E4M3):
        raise UnsupportedDtype(f"query: expected dtype float16, bfloat16 or float8_e4m3fn, got {query.dtype}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise InvalidArgument(f"{name}: expected query's dtype {query.dtype}, got {tensor.dtype}")
        if tensor.device != query.device:
            raise InvalidArgument(f"{name}: expected query's device {query.device}, got {tensor.device}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise InvalidArgument(f"{name}: expected [..., length, width], at least 2 dimensions, got {list(tensor.shape)}")
    key_heads, value_heads = (tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in (key, value))
    if key_heads != value_heads:
        raise InvalidArgument(f"value: expected key's {key_heads} heads (dimension -3), got {value_heads}")


def _out_dtype(out_dtype: torch.dtype | None, query: Tensor) -> torch.dtype:
    if out_dtype is None:
        return query.dtype if query.dtype in SIXTEEN_BITS else torch.bfloat16
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype: expected a torch.dtype or None, got {type(out_dtype).__name__}")
    if out_dtype not in SIXTEEN_BITS:
        raise InvalidArgument(f"out_dtype: expected float16 or bfloat16, got {out_dtype}")
    return out_dtype


def _expanded_scale(name: str, scale: Tensor | None, key: Tensor) -> Tensor | None:
    """The scale of an e4m3 operand, expanded to key's batch dimensions and heads."""
    if scale is None:
        return None
    if key.dtype != _E4M3:
        raise InvalidArgument(f"{name}: expected None with {key.dtype} inputs, which are quantised by their own, got a tensor")
    return expand_scale(name, scale, key.shape[:-2], key.device)
