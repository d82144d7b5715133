"""FlashAttention-3's functions on flash_online's kernels: signatures, layouts and returns of its module `flash_attn_interface`.

Beyond FlashAttention-3: every device, dtype and head dim of flash_online, and a differentiable softmax_lse. Arguments that only
tune its kernels (pack_gqa, sm_margin, and num_splits except for cached keys) are accepted and have no effect.

Source: the interface of FlashAttention-3 (arXiv 2407.08608).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import check_int, check_tensor
from .._ops import InvalidArgument
from ..merge import merge_attention
from ._cached import attend_cached
from ._call import Window, attend, attend_packed, read_packing, refuse, unpacked, without_unused

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q `[B, L, H, E]` over k `[B, S, Hk, E]` and v `[B, S, Hk, Ev]`; Hk divides H.

    Args:
        softmax_scale: 1 / sqrt(E) if None.
        causal: query i sees keys j <= i + S - L.
        window_size: (left, right): query i sees i + S - L - left <= j <= i + S - L + right; -1 and None are no bound.
        softcap: limits scores to (-softcap, softcap) by a tanh; 0 is none.
        deterministic: makes the gradients repeat bit for bit; False follows torch's own setting.
        return_attn_probs: also return softmax_lse (no probabilities, despite the name).

    Returns:
        out `[B, L, H, Ev]`, with rows of 0 where a query sees no key. With `return_attn_probs` also softmax_lse `[B, H, L]`,
        the natural logarithm of the denominators, float32, -inf where a query sees no key; differentiable.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above.
        NotImplementedError: qv, q_descale, k_descale, v_descale or attention_chunk; or no kernel takes the dtype or device.
    """
    refuse("flash_attn_func", qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse("flash_attn_func", attention_chunk=attention_chunk)
    out, softmax_lse, _ = attend(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        lse=return_attn_probs,
    )
    return (out, softmax_lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv `[B, L, 3, H, E]`, or `[B, L, H + 2 Hk, E]` with `num_heads_q` = H; one gradient for qkv."""
    refuse("flash_attn_qkvpacked_func", q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse("flash_attn_qkvpacked_func", attention_chunk=attention_chunk)
    check_tensor("qkv", qkv)
    if qkv.dim() == 4:
        heads = 0 if num_heads_q is None else check_int("num_heads_q", num_heads_q)
        key_heads, rest = divmod(qkv.shape[2] - heads, 2)
        if heads < 1 or key_heads < 1 or rest:
            raise InvalidArgument(
                "num_heads_q: expected the number of query heads, leaving as many key as value heads "
                f"in qkv {list(qkv.shape)}, got {num_heads_q}"
            )
        q, k, v = qkv.split([heads, key_heads, key_heads], -2)
    else:
        q, k, v = unpacked("qkv", qkv, 5, 3)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of packed sequences: q `[Tq, H, E]`, k `[Tk, Hk, E]`, v `[Tk, Hk, Ev]`.

    Args:
        cu_seqlens_q: int32 `[sequences + 1]`, ascending from 0: the first query of each sequence.
        cu_seqlens_k: like cu_seqlens_q, of the keys.
        max_seqlen_q: at least the number of queries of the longest sequence.
        max_seqlen_k: like max_seqlen_q, of the keys.
        seqused_q: int32 `[sequences]`: only the first seqused_q queries of each sequence take part; the results of unused
            queries are 0, and the causal rule and windows use the lengths that take part.
        seqused_k: like seqused_q, of the keys; unused keys never reach a result.

    The other arguments are as in `flash_attn_func`, with L and S the lengths of a sequence.

    Returns:
        out `[Tq, H, Ev]`; with `return_attn_probs` also softmax_lse `[H, Tq]`.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above.
        NotImplementedError: qv, q_descale, k_descale, v_descale or attention_chunk; or no kernel takes the dtype or device.
    """
    refuse("flash_attn_varlen_func", qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse("flash_attn_varlen_func", attention_chunk=attention_chunk)
    packing = read_packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, softmax_lse, _ = attend_packed(
        q,
        k,
        v,
        without_unused(packing, seqused_q, seqused_k),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
    )
    return (out, softmax_lse) if return_attn_probs else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Any:
    """Merges partial results over disjoint keys: out_partial `[parts, B, L, H, Ev]`, lse_partial `[parts, B, L, H]`, float32.

    Returns:
        (out `[B, L, H, Ev]`, in `out_dtype` or out_partial's dtype, written into `out` if given; softmax_lse `[B, L, H]`).
        Differentiable without `out`.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): shapes or dtypes that do not fit.
    """
    merged, softmax_lse = merge_attention(out_partial, lse_partial)
    merged = merged if out_dtype is None else merged.to(out_dtype)
    if out is None:
        return merged, softmax_lse
    if out.shape != merged.shape or out.dtype != merged.dtype:
        raise InvalidArgument(
            f"out: expected {list(merged.shape)} {merged.dtype} (out_dtype or out_partial's dtype), "
            f"got {list(out.shape)} {out.dtype}"
        )
    return out.copy_(merged), softmax_lse


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """FlashAttention-2's function of this name, also with packed queries (cu_seqlens_q) and packed new keys (cu_seqlens_k_new).

    rotary_seqlens are the positions of the first new rows, instead of cache_seqlens. Caches may be float8 with a 16-bit q;
    k_descale and v_descale `[B, Hk]` are then their scales. pack_gqa and sm_margin have no effect.
    """
    refuse(
        "flash_attn_with_kvcache", qv=qv, q_descale=q_descale, attention_chunk=attention_chunk,
        scheduler_metadata=scheduler_metadata,
    )  # fmt: skip
    return attend_cached(
        *(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin),
        rotary_interleaved=rotary_interleaved,
        rotary_seqlens=rotary_seqlens,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
        block_table=page_table,
        table_name="page_table",
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        key_scale=k_descale,
        value_scale=v_descale,
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
    )


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """None, which flash_attn_with_kvcache accepts as scheduler_metadata: calls need no plan."""
    return None
