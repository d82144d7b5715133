"""FlashAttention-4's functions on flash_online's kernels: signatures, layouts and returns of its package `flash_attn.cute`.

Beyond FlashAttention-4: every device, dtype and head dim of flash_online. Arguments that only tune its kernels (num_splits,
pack_gqa, min_seqlen_k, seqlen_k_per_split, disable_scheduler_metadata) are accepted and have no effect.

Source: the interface of FlashAttention-4, `flash-attn-4` 4.0.0b36.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._checks import check_device, check_flag, check_tensor
from .._ops import InvalidArgument
from ._cached import attend_paged
from ._call import Packing, Window, attend, attend_packed, read_length, refuse, without_unused

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
__version__ = "4.0.0b36+flash.online"  # the version of this interface


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of q `[B, L, H, E]` over k `[B, S, Hk, E]` and v `[B, S, Hk, Ev]`; Hk divides H.

    Args:
        softmax_scale: 1 / sqrt(E) if None.
        causal: query i sees keys j <= i + S - L.
        window_size: (left, right): query i sees i + S - L - left <= j <= i + S - L + right; None and -1 are no bound.
        learnable_sink: `[H]`, one logit per head that joins the denominator only; differentiable.
        softcap: limits scores to (-softcap, softcap) by a tanh; 0 is none.
        deterministic: makes the gradients repeat bit for bit; False follows torch's own setting.
        return_lse: return lse, with its derivative.

    Returns:
        (out, lse): out `[B, L, H, Ev]`, with rows of 0 where a query sees no key; lse `[B, H, L]`, the natural logarithm of the
        denominators, float32, -inf where a query sees no key. Without `return_lse`, lse is detached, and None if no input
        requires grad.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above.
        NotImplementedError: an argument that is not described above; or no kernel takes the tensors' dtype or device.
    """
    refuse(
        "flash_attn_func",
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
        gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    check_flag("return_lse", return_lse)
    out, lse, _ = attend(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        learnable_sink=learnable_sink,
        softcap=softcap,
        deterministic=deterministic,
        lse=return_lse or _needs_gradient(q, k, v, learnable_sink),
    )
    return out, lse if return_lse or lse is None else lse.detach()


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of sequences of several lengths. Queries are packed, q `[Tq, H, E]` with cu_seqlens_q, or padded, q
    `[B, L, H, E]` without it; likewise k `[Tk, Hk, E]` with cu_seqlens_k, or `[B, S, Hk, E]`, and v.

    Args:
        cu_seqlens_q: int32 `[B + 1]`, ascending from 0: the first query of each sequence.
        cu_seqlens_k: like cu_seqlens_q, of the keys.
        max_seqlen_q: at least the number of queries of the longest sequence; None is safe.
        max_seqlen_k: like max_seqlen_q, of the keys.
        seqused_q: int32 `[B]`: only the first seqused_q queries of each sequence take part; the results of unused queries are
            0, and the causal rule and windows use the lengths that take part.
        seqused_k: like seqused_q, of the keys; unused keys never reach a result.
        page_table: int32 `[B, entries]`: page indices of k `[pages, page, Hk, E]` and v; the lengths of the sequences come from
            cu_seqlens_k or seqused_k; no gradients.

    The other arguments are as in `flash_attn_func`, with L and S the lengths of a sequence.

    Returns:
        (out, lse), out in the layout of q; lse `[H, Tq]`, or `[B, H, L]`, under the conditions of `flash_attn_func`.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above.
        NotImplementedError: an argument that is not described above; or no kernel takes the tensors' dtype or device.
    """
    refuse(
        "flash_attn_varlen_func",
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        scheduler_metadata=scheduler_metadata,
        gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )
    check_flag("return_lse", return_lse)
    padded = q.shape[:2] if cu_seqlens_q is None and isinstance(q, Tensor) else None
    (q,), starts_q, longest_q = _packed("q", (q,), cu_seqlens_q, max_seqlen_q)
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    if page_table is not None:
        check_tensor("page_table", page_table), check_tensor("k", k)
        longest_k = page_table.shape[-1] * k.shape[1] if max_seqlen_k is None else read_length("max_seqlen_k", max_seqlen_k)
        out, lse = attend_paged(
            *("flash_attn_varlen_func", q, k, v, Packing(starts_q, cu_seqlens_k, longest_q, longest_k), page_table),
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            sinks=learnable_sink,
            num_splits=num_splits,
            deterministic=deterministic,
            table_name="page_table",
            **options,
        )
    else:
        (k, v), starts_k, longest_k = _packed("k", (k, v), cu_seqlens_k, max_seqlen_k)
        packing = without_unused(Packing(starts_q, starts_k, longest_q, longest_k), seqused_q, seqused_k)
        out, lse, _ = attend_packed(q, k, v, packing, learnable_sink=learnable_sink, deterministic=deterministic, **options)
    if padded is not None:
        out, lse = out.unflatten(0, padded), lse.unflatten(1, padded).transpose(0, 1)
    if return_lse:
        return out, lse
    return out, lse.detach() if _needs_gradient(q, k, v, learnable_sink) else None


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def _packed(side: str, tensors: tuple[Tensor, ...], starts: Tensor | None, longest: Any) -> tuple[list[Tensor], Tensor, int]:
    """The tensors (queries, or keys and values) as packed ones, with cu_seqlens and the longest length."""
    for name, tensor in zip((side, "v"), tensors, strict=False):
        check_tensor(name, tensor)
    first = tensors[0]
    if starts is not None:
        check_tensor(f"cu_seqlens_{side}", starts)
        check_device(f"cu_seqlens_{side}", starts, side, first)
        return list(tensors), starts, first.shape[0] if longest is None else read_length(f"max_seqlen_{side}", longest)
    for name, tensor in zip((side, "v"), tensors, strict=False):
        if tensor.dim() != 4 or tensor.shape[:2] != first.shape[:2]:
            raise InvalidArgument(
                f"{name}: expected shape [batch, length, heads, head dim] without cu_seqlens_{side}, got {list(tensor.shape)}"
            )
    batch, length = first.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=first.device) * length
    return [tensor.flatten(0, 1) for tensor in tensors], starts, length
