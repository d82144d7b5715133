"""FlashAttention-2's functions on flash_online's kernels: signatures, layouts and returns of `flash_attn` 2.8.

Beyond FlashAttention-2: the CPU, float32 and float64, any head dim, a separate head dim of the values, dropout with softcap,
and a differentiable softmax_lse. Differences: the softmax_lse of a query that sees no key is -inf, which merging partial
results needs, and not FlashAttention-2's +inf; dropout drops other weights.

As in FlashAttention, the return type depends on an argument, so the functions are annotated to return Any.

Source: the interface of FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._cached import attend_cached, attend_paged
from ._call import Window, attend, attend_packed, read_packing, unpacked
from ._raw import _flash_attn_backward, _flash_attn_forward, _flash_attn_varlen_backward, _flash_attn_varlen_forward

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
PRIVATE = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
]
"""Names of FlashAttention-2's module flash_attn_interface that other libraries import despite their underscores."""
__version__ = "2.8.3+flash.online"  # the version of this interface


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q `[B, L, H, E]` over k `[B, S, Hk, E]` and v `[B, S, Hk, Ev]`; Hk divides H.

    Args:
        dropout_p: probability that a weight is dropped. Applied whenever > 0: pass 0 in eval.
        softmax_scale: 1 / sqrt(E) if None.
        causal: query i sees keys j <= i + S - L.
        window_size: (left, right): query i sees i + S - L - left <= j <= i + S - L + right; -1 and None are no bound.
        softcap: limits scores to (-softcap, softcap) by a tanh; 0 is none.
        alibi_slopes: `[H]` or `[B, H]`: -slope * |i + S - L - j| is added to a score; no gradient.
        deterministic: makes the gradients repeat bit for bit; False follows torch's own setting.
        return_attn_probs: see Returns.

    Returns:
        out `[B, L, H, Ev]`, with rows of 0 where a query sees no key. With `return_attn_probs` the tuple (out, softmax_lse,
        S_dmask): softmax_lse `[B, H, L]`, the natural logarithm of the denominators, float32, -inf where a query sees no key,
        differentiable; S_dmask without elements, or with dropout `[B, H, L, S]`, lengths rounded up to 128: exp(score - the
        row's largest), negative where the weight is dropped. It takes quadratic memory and is meant for tests.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above.
        NotImplementedError: no kernel takes the tensors' dtype or device.
    """
    out, softmax_lse, weights = attend(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        lse=return_attn_probs,
        probabilities=return_attn_probs,
    )
    return (out, softmax_lse, weights) if return_attn_probs else out


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q `[B, L, H, E]` and kv `[B, S, 2, Hk, E]`, keys before values; one gradient for kv."""
    k, v = unpacked("kv", kv, 5, 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv `[B, L, 3, H, E]`: queries, keys, values; one gradient for qkv."""
    q, k, v = unpacked("qkv", qkv, 5, 3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of packed sequences: q `[Tq, H, E]`, k `[Tk, Hk, E]`, v `[Tk, Hk, Ev]`.

    Args:
        cu_seqlens_q: int32 `[sequences + 1]`, ascending from 0: the first query of each sequence.
        cu_seqlens_k: like cu_seqlens_q, of the keys.
        max_seqlen_q: at least the number of queries of the longest sequence.
        max_seqlen_k: like max_seqlen_q, of the keys.
        alibi_slopes: `[H]` or `[sequences, H]`.
        block_table: int32 `[sequences, entries]`: page indices of k `[pages, page, Hk, E]` and v; the lengths of the sequences
            are the differences of cu_seqlens_k; no gradients, no dropout.

    The other arguments are as in `flash_attn_func`, with L and S the lengths of a sequence.

    Returns:
        out `[Tq, H, Ev]`; with `return_attn_probs` also softmax_lse `[H, Tq]` and S_dmask, with dropout `[sequences, H,
        max_seqlen_q, max_seqlen_k]`, lengths rounded up to 128; the host then reads the lengths.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above.
        NotImplementedError: dropout_p with block_table; or no kernel takes the tensors' dtype or device.
    """
    packing = read_packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if block_table is not None:
        out, softmax_lse = attend_paged(
            "flash_attn_varlen_func",
            *(q, k, v, packing, block_table),
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            deterministic=deterministic,
        )
        return (out, softmax_lse, None) if return_attn_probs else out
    out, softmax_lse, weights = attend_packed(
        q,
        k,
        v,
        packing,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        probabilities=return_attn_probs,
    )
    return (out, softmax_lse, weights) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q `[Tq, H, E]` and kv `[Tk, 2, Hk, E]`, keys before values; one gradient for kv."""
    k, v = unpacked("kv", kv, 4, 2)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of qkv `[T, 3, H, E]`: queries, keys, values; one gradient for qkv."""
    q, k, v = unpacked("qkv", qkv, 4, 3)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q `[B, L, H, E]` to a cache k_cache `[B, S, Hk, E]`, v_cache `[B, S, Hk, Ev]`, or with block_table
    `[blocks, page, Hk, E]`, to which k `[B, new, Hk, E]` and v are appended first, in place.

    cache_seqlens are the lengths before the append. With rotary_cos and rotary_sin, k and q are rotated. Returns out
    `[B, L, H, Ev]`, and with return_softmax_lse also softmax_lse `[B, H, L]`. No gradients. Pages may have any size. Devices,
    num_splits and errors are as in `flash_online.kvcache_attention`.
    """
    return attend_cached(
        *(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin),
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
        block_table=block_table,
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
    )


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Number of keys of S_dmask that share a row maximum: all keys, since S_dmask is not computed in blocks here."""
    return 2**31 - 1
