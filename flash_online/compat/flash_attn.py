"""FlashAttention-2's functions on flash_online's kernels: signatures, layouts and returns of `flash_attn` 2.8.

What is beyond FlashAttention-2: the CPU, float32 and float64, any head dim, a head dim of the values' own, dropout beside
softcap, and a differentiable softmax_lse. What differs: the softmax_lse of a query that sees no key is -inf, as a merge of
partial results needs it, where FlashAttention-2 gives +inf; dropout drops other weights.

The functions are annotated to return Any, since what they return depends on an argument, as in FlashAttention.

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
"""Names of FlashAttention-2's module flash_attn_interface that other libraries import in spite of their underscores."""
__version__ = "2.8.3+flash.online"  # whose interface this is


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
        dropout_p: probability that a weight is dropped, whenever > 0: 0 outside of training.
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
        row's largest), negative where the weight is dropped. It takes quadratic memory, and is for tests.

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
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


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
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


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
    """Attention of packed sequences, which lie one after another: q `[Tq, H, E]`, k `[Tk, Hk, E]`, v `[Tk, Hk, Ev]`.

    Args:
        cu_seqlens_q: int32 `[sequences + 1]`, ascending from 0: where the queries of each sequence begin.
        cu_seqlens_k: the same of the keys.
        max_seqlen_q: the longest sequence's number of queries, or more.
        max_seqlen_k: the same of the keys.
        alibi_slopes: `[H]` or `[sequences, H]`.
        block_table: int32 `[sequences, entries]`: k `[pages, page, Hk, E]` and v lie in these pages, the lengths of their
            sequences are cu_seqlens_k's differences, and there are neither gradients nor dropout.

    The other arguments are those of `flash_attn_func`, with L and S the lengths of a sequence.

    Returns:
        out `[Tq, H, Ev]`; with `return_attn_probs` also softmax_lse `[H, Tq]` and S_dmask, which with dropout is `[sequences,
        H, max_seqlen_q, max_seqlen_k]`, rounded up to 128; the host then reads the lengths.

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
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        *packing,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


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
    packing = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        *packing,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


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

    cache_seqlens are the keys before that. Rotary embedding turns k and q where rotary_cos and rotary_sin are given. Returns
    out `[B, L, H, Ev]`, and with return_softmax_lse also softmax_lse `[B, H, L]`. No gradients. Pages are of any size. See
    `flash_online.kvcache_attention`, whose devices, num_splits and errors these are.
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
    """How many keys of S_dmask share one largest score: all keys of a row, since there S_dmask is not cut into blocks."""
    return 2**31 - 1
