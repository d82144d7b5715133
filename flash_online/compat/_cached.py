"""Attention to a cache of keys, with FlashAttention's arguments and layouts."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from .._checks import check_flag, check_tensor
from .._ops import InvalidArgument
from ..kvcache import kvcache_attention
from ..varlen import varlen_attention
from ._call import Packing, read_length, read_window

# What FlashAttention calls the arguments of kvcache_attention.
_NAMES = {
    "query": "q",
    "key_cache": "k_cache",
    "value_cache": "v_cache",
    "key": "k",
    "value": "v",
    "leftpad": "cache_leftpad",
    "cu_seqlens_new": "cu_seqlens_k_new",
    "key_scale": "k_descale",
    "value_scale": "v_descale",
    "rotary": "rotary_cos, rotary_sin",
    "window": "window_size",
    "scale": "softmax_scale",
}
_NAMES_OF_PAGED = {name: _NAMES[name] for name in ("query", "key", "value", "window", "scale")} | {"sinks": "learnable_sink"}
_NAME = re.compile(rf"\b({'|'.join((*_NAMES, 'sinks'))})\b(?=[,:'])")


def attend_cached(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    *,
    cache_seqlens: int | Tensor | None,
    window_size: Any,
    num_splits: int,
    return_softmax_lse: bool,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: Any = None,
    rotary_interleaved: bool = True,
    rotary_seqlens: Tensor | None = None,
    **options: Any,
) -> Any:
    """out [B, L, H, Ev], or [Tq, H, Ev] with cu_seqlens_q; with return_softmax_lse (out, softmax_lse). `options` are those of
    `kvcache_attention`."""
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, tensor)
    if k is not None and cache_seqlens is None:
        raise InvalidArgument("cache_seqlens: None beside k, expected the lengths behind which new keys go")
    if (rotary_cos is None) != (rotary_sin is None):
        raise InvalidArgument("rotary_cos, rotary_sin: one of them is missing")
    if rotary_cos is not None and k is None:
        raise InvalidArgument("rotary_cos: given without k, which it rotates")
    rotary = None if rotary_cos is None else (rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)

    def heads_first(tensor: Tensor | None) -> Tensor | None:
        return tensor.transpose(1, 2) if tensor is not None and tensor.dim() == 4 else tensor

    try:
        results = kvcache_attention(
            *map(heads_first, (q, k_cache, v_cache)),
            cache_seqlens,
            key=heads_first(k),
            value=heads_first(v),
            rotary=rotary,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=None if max_seqlen_q is None else read_length("max_seqlen_q", max_seqlen_q),
            window=read_window(window_size),
            num_splits=num_splits,
            return_lse=True,
            **options,
        )
    except InvalidArgument as error:
        raise InvalidArgument(_NAME.sub(lambda match: _NAMES.get(match[1], match[1]), str(error))) from None
    out, softmax_lse = results[0] if q.dim() == 3 else results[0].transpose(1, 2), results[1]
    return (out, softmax_lse) if return_softmax_lse else out


def attend_paged(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    block_table: Tensor,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None,
    window_size: Any,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out [Tq, H, Ev], softmax_lse [H, Tq]) of packed q over keys in pages [pages, page, Hk, E], whose backward pass is an
    error. `options` are those of `varlen_attention`."""
    if dropout_p:
        raise NotImplementedError(f"{function}: dropout_p: got {dropout_p}, which keys in pages do not have")
    check_flag("deterministic", deterministic)
    try:
        with torch.no_grad():
            out, lse = varlen_attention(
                *(q, k, v, *packing),
                block_table=block_table,
                seqused_q=seqused_q,
                seqused_k=seqused_k,
                scale=softmax_scale,
                window=read_window(window_size),
                return_lse=True,
                **options,
            )
    except InvalidArgument as error:
        raise InvalidArgument(_NAME.sub(lambda match: _NAMES_OF_PAGED.get(match[1], match[1]), str(error))) from None
    return _WithoutGradient.apply(function, out, lse, q, k, v)


class _WithoutGradient(torch.autograd.Function):
    """out and lse as they are. FlashAttention too takes tensors that require a gradient here, and has none for them."""

    @staticmethod
    def forward(ctx, function: str, out: Tensor, lse: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.function = function
        ctx.mark_non_differentiable(lse)
        return out.view_as(out), lse

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Any:
        raise NotImplementedError(f"{ctx.function}: keys in pages have no gradient")
