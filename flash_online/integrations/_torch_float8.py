"""torch's float8 attention, the overloads named `quantized` of its flash attention operators, run by float8_attention.

torch's own kernels of these overloads have no float8: it asks an implementation of flash attention for it. So e4m3 tensors run
our kernel or are an error, and tensors of other dtypes run torch's own kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._ops import InvalidArgument, UnsupportedDtype
from ..float8 import float8_attention

_OVERLOAD = "quantized"


def register(key: str) -> torch.library.Library:
    """Implements the overloads for a dispatch key, until the library's `_destroy()`."""
    library = torch.library.Library("aten", "IMPL", key)
    for name, run in (
        ("_scaled_dot_product_flash_attention", _scaled_dot_product_flash_attention),
        ("_flash_attention_forward", _flash_attention_forward),
    ):
        packet = getattr(torch.ops.aten, name)
        if _OVERLOAD not in packet.overloads():
            continue
        operator = getattr(packet, _OVERLOAD)
        present = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
        kept = torch.library.get_kernel(operator, key) if present else None
        library.impl(f"{name}.{_OVERLOAD}", partial(_ours_or_kept, run, kept), key, with_keyset=True)
    return library


def _ours_or_kept(run: Any, kept: Any, keyset: Any, query: Tensor, *args: Any, **kwargs: Any) -> tuple:
    if query.dtype == torch.float8_e4m3fn:
        with torch.no_grad():  # torch's autograd, which called this, gives the results a derivative that raises
            return run(query, *args, **kwargs)
    if kept is None:
        raise UnsupportedDtype(f"query: expected dtype float8_e4m3fn, got {query.dtype}")
    return kept.call_boxed(keyset, query, *args, **kwargs)


def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    """Tensors are [batch, heads, length, width]."""
    _refuse(query, value, dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    out, lse = _run(query, key, value, (q_descale, k_descale, v_descale), is_causal, scale, None)
    return out, lse, None, None, query.shape[2], key.shape[2], *_rest(out)


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple:
    """Tensors are [batch, length, heads, width]. `others`: seqused_k, alibi_slopes, and what later versions of torch add."""
    _refuse(query, value, cum_seq_q=cum_seq_q, dropout_p=dropout_p, return_debug_mask=return_debug_mask, **others)
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    left, right = (None if bound is None or bound < 0 else bound for bound in (window_size_left, window_size_right))
    out, lse = _run(query, key, value, (q_descale, k_descale, v_descale), is_causal, scale, (left, right))
    return out.transpose(1, 2), lse, *_rest(out)


def _refuse(query: Tensor, value: Tensor, **options: Any) -> None:
    for name, given in options.items():
        if given is not None and (isinstance(given, Tensor) or given):
            what = "a tensor" if isinstance(given, Tensor) else given
            raise NotImplementedError(f"{name}: expected none with float8 tensors, got {what}")
    if value.shape[-1] != query.shape[-1]:  # torch's fake results have query's shape
        raise InvalidArgument(f"value: expected query's width {query.shape[-1]}, got {value.shape[-1]}")


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    causal: bool,
    scale: float | None,
    window: tuple[int | None, int | None] | None,
) -> tuple[Tensor, Tensor]:
    return float8_attention(
        query,
        key,
        value,
        query_scale=scales[0],
        key_scale=scales[1],
        value_scale=scales[2],
        causal=causal,
        window=window,
        alignment="lower_right",
        scale=scale,
        return_lse=True,
    )


def _rest(out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and debug_attn_mask."""
    return out.new_zeros(2, dtype=torch.uint64), out.new_zeros((), dtype=torch.uint64), out.new_empty(0)
