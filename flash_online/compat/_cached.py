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

# FlashAttention's names of kvcache_attention's arguments.
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
    "rotary[0]": "rotary_cos",
    "rotary[1]": "rotary_sin",
    "rotary[2]": "rotary_interleaved",
    "rotary[3]": "rotary_seqlens",
    "rotary": "rotary_cos, rotary_sin",
    "window": "window_size",
    "scale": "softmax_scale",
}
_NAMES_OF_PAGED = {name: _NAMES[name] for name in ("query", "key", "value", "window", "scale")} | {"sinks": "learnable_sink"}
_NAME = re.compile(rf"\b({'|'.join(map(re.escape, (*_NAMES, 'sinks', 'block_table')))})(?=[,:'])")


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
    table_name: str = "block_table",
    **options: Any,
) -> Any:
    """out [B, L, H, Ev], or [Tq, H, Ev] with cu_seqlens_q; with return_softmax_lse (out, softmax_lse). The backward pass
    raises. `options` are `kvcache_attention`'s; error messages call block_table `table_name`."""
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, tensor)
    if k is not None and cache_seqlens is None:
        raise InvalidArgument("cache_seqlens: expected the current cache lengths (where k and v are appended), got None")
    if (rotary_cos is None) != (rotary_sin is None):
        raise InvalidArgument("rotary_cos, rotary_sin: expected both or neither, got one")
    if rotary_cos is not None and k is None:
        raise InvalidArgument("rotary_cos: expected k, which it rotates, got None")
    rotary = None if rotary_cos is None else (rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)

    def heads_first(tensor: Tensor | None) -> Tensor | None:
        return tensor.transpose(1, 2) if tensor is not None and tensor.dim() == 4 else tensor

    leaves = _leaves(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, *options.values())
    arguments = (*map(heads_first, (q, k_cache, v_cache)), cache_seqlens)
    options |= {"key": heads_first(k), "value": heads_first(v), "rotary": rotary, "window": read_window(window_size)}
    options |= {"cu_seqlens_q": cu_seqlens_q, "num_splits": num_splits}
    try:
        if max_seqlen_q is not None:
            options["max_seqlen_q"] = read_length("max_seqlen_q", max_seqlen_q)
        if leaves:
            with torch.no_grad():
                out, softmax_lse = kvcache_attention(*arguments, **options, return_lse=True)
            out, softmax_lse = _WithoutGradient.apply("flash_attn_with_kvcache: cached keys", out, softmax_lse, *leaves)
        else:
            out, softmax_lse = kvcache_attention(*arguments, **options, return_lse=True)
    except InvalidArgument as error:
        raise _renamed(error, _NAMES | {"block_table": table_name}) from None
    out = out if q.dim() == 3 else out.transpose(1, 2)
    return (out, softmax_lse) if return_softmax_lse else out


def _renamed(error: InvalidArgument, names: dict[str, str]) -> InvalidArgument:
    """The error, with FlashAttention's argument names."""
    return type(error)(_NAME.sub(lambda match: names.get(match[1], match[1]), str(error)))


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
    table_name: str = "block_table",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out [Tq, H, Ev], softmax_lse [H, Tq]) of packed q and paged keys [pages, page, Hk, E]. The backward pass raises.
    `options` are `varlen_attention`'s; error messages call block_table `table_name`."""
    if dropout_p:
        raise NotImplementedError(f"{function}: dropout_p: expected 0 with paged keys, got {dropout_p}")
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
        raise _renamed(error, _NAMES_OF_PAGED | {"block_table": table_name}) from None
    leaves = _leaves(q, k, v, *options.values())
    return _WithoutGradient.apply(f"{function}: paged keys", out, lse, *leaves) if leaves else (out, lse)


def _leaves(*values: Any) -> list[Tensor]:
    """The tensors that require grad; each once, since Dynamo does not trace duplicates."""
    leaves: list[Tensor] = []
    if torch.is_grad_enabled():
        for value in values:
            if isinstance(value, Tensor) and value.requires_grad and not any(value is leaf for leaf in leaves):
                leaves.append(value)
    return leaves


class _WithoutGradient(torch.autograd.Function):
    """Accepts tensors that require grad, as FlashAttention does, and raises in the backward pass."""

    @staticmethod
    def forward(ctx, what: str, out: Tensor, lse: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.what, ctx.shapes = what, [tensor.shape for tensor in inputs]
        ctx.mark_non_differentiable(lse)
        return out.view_as(out), lse

    @staticmethod
    def backward(ctx, grad: Tensor, _: Any) -> Any:
        wanted = zip(ctx.shapes, ctx.needs_input_grad[3:], strict=True)
        refuse = torch.ops.flash_online_compat.no_gradient.default
        refused = [refuse(grad, shape, ctx.what) if needs else None for shape, needs in wanted]
        return None, None, None, *refused


def _no_gradient(grad: Tensor, shape: list[int], what: str) -> Tensor:
    raise NotImplementedError(f"{what} have no gradient")


def _no_gradient_fake(grad: Tensor, shape: list[int], what: str) -> Tensor:
    return grad.new_empty(shape)


# The backward pass raises inside an operator, so that torch.compile can trace a backward pass that may never run.
_library = torch.library.Library("flash_online_compat", "FRAGMENT")
_library.define("no_gradient(Tensor grad, SymInt[] shape, str what) -> Tensor")
_library.impl("no_gradient", _no_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("flash_online_compat::no_gradient", _no_gradient_fake, lib=_library)
