"""FlashAttention-2's private functions, without autograd, which libraries for context parallelism call by name.

Such a library merges partial results over shards of the keys using their softmax_lse. In the backward pass it asks for the
gradients of one shard and passes the merged out and softmax_lse. Our backward kernels need that shard's own results, so its
forward pass is recomputed, and gradients_of_part converts the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._attention_derivatives import gradients_of_part
from .._canonicalize import check_packed
from .._checks import check_tensor
from .._ops import InvalidArgument, accumulator_of, ops
from ..attention import draw_rng
from ._call import (
    Options,
    Packing,
    check_packed_values,
    no_weights,
    read_inputs,
    read_options,
    read_packing,
    refuse,
    signed_weights,
    signed_weights_packed,
)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out `[B, L, H, Ev]`, softmax_lse `[B, H, L]`, S_dmask, rng_state) of q `[B, L, H, E]` and k, v `[B, S, Hk, ...]`;
    rng_state is the (seed, offset) of dropout, int64 `[2]`."""
    with torch.no_grad():
        q, k, v = read_inputs(q, k, v, packed=False)
        options = _read_options(
            q, q.shape[0], dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
        )
        query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
        rng = draw_rng(options.dropout_p, q.device)
        out, softmax_lse, _ = _forward(query, key, value, options, rng)
        weights = signed_weights(query, key, options, rng) if return_softmax else no_weights(q)
        return out.transpose(1, 2), softmax_lse, weights, _rng_state(q, rng)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out `[Tq, H, Ev]`, softmax_lse `[H, Tq]`, S_dmask, rng_state) of packed sequences. `zero_tensors` has no effect: out and
    softmax_lse are always written completely."""
    refuse("_flash_attn_varlen_forward", block_table=block_table, leftpad_k=leftpad_k, seqused_k=seqused_k)
    with torch.no_grad():
        q, k, v = read_inputs(q, k, v, packed=True)
        packing = read_packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        check_packed(q, k, v, *packing)
        check_packed_values(packing, q, k)
        batch = cu_seqlens_q.shape[0] - 1
        options = _read_options(
            q, batch, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
        )
        rng = draw_rng(options.dropout_p, q.device)
        out, softmax_lse, _ = _forward_packed(q, k, v, packing, options, rng)
        weights = signed_weights_packed(q, k, packing, options, rng) if return_softmax else no_weights(q)
        return out, softmax_lse, weights, _rng_state(q, rng)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes the gradients of q, k and v into dq, dk and dv where these are not None. out and softmax_lse may be merged over
    more keys; the forward pass over these keys is recomputed. Returns <dout, out>, `[B, H, L]`, without padding."""
    with torch.no_grad():
        q, k, v = read_inputs(q, k, v, packed=False)
        options = _read_options(
            q, q.shape[0], dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
        )
        rng = _read_rng(options, rng_state)
        query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
        _check_results(dout, out, softmax_lse, (*q.shape[:-1], v.shape[-1]), (q.shape[0], q.shape[2], q.shape[1]))
        results = _forward(query, key, value, options, rng)
        grad_out, grad_lse = gradients_of_part(dout.transpose(1, 2), out.transpose(1, 2), softmax_lse, *results[:2])
        slopes = _slopes(options, query, query.shape[:2])
        grads = ops.attention_backward.default(
            *(grad_out, grad_lse, query, key, value, None, slopes, None, rng, *results),
            *options.for_operators(query).for_backward(False, _is_deterministic(deterministic)),
        )
        for gradient, wanted in zip(grads[:3], (dq, dk, dv), strict=True):
            if wanted is not None:
                wanted.copy_(gradient.transpose(1, 2))
        return _delta(dout, out, softmax_lse).transpose(1, 2)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """`_flash_attn_backward` of packed sequences. Returns <dout, out>, `[H, Tq]`, without padding."""
    with torch.no_grad():
        q, k, v = read_inputs(q, k, v, packed=True)
        packing = read_packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        check_packed(q, k, v, *packing)
        check_packed_values(packing, q, k)
        batch = cu_seqlens_q.shape[0] - 1
        options = _read_options(
            q, batch, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes
        )
        rng = _read_rng(options, rng_state)
        _check_results(dout, out, softmax_lse, (*q.shape[:-1], v.shape[-1]), (q.shape[1], q.shape[0]))
        results = _forward_packed(q, k, v, packing, options, rng)
        grad_out, grad_lse = gradients_of_part(
            dout.transpose(0, 1), out.transpose(0, 1), softmax_lse, results[0].transpose(0, 1), results[1]
        )
        slopes = _slopes(options, q, (batch, q.shape[1]))
        grads = ops.attention_varlen_backward.default(
            *(grad_out.transpose(0, 1), grad_lse, q, k, v, packing.cu_seqlens_q, packing.cu_seqlens_k, slopes, None, rng),
            *(*results, packing.max_seqlen_q, packing.max_seqlen_k),
            *options.for_operators(q).for_backward(_is_deterministic(deterministic)),
        )
        for gradient, wanted in zip(grads[:3], (dq, dk, dv), strict=True):
            if wanted is not None:
                wanted.copy_(gradient)
        return _delta(dout, out, softmax_lse).transpose(0, 1)


def _read_options(q, batch, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes) -> Options:
    return read_options(
        q,
        batch,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(left, right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
    )


def _is_deterministic(deterministic: bool) -> bool:
    return deterministic or torch.are_deterministic_algorithms_enabled()


def _rng_state(q: Tensor, rng: Tensor | None) -> Tensor:
    return q.new_zeros(2, dtype=torch.int64) if rng is None else rng


def _read_rng(options: Options, rng_state: Tensor | None) -> Tensor | None:
    """The (seed, offset) that the forward pass drew."""
    if not options.dropout_p:
        return None
    if not isinstance(rng_state, Tensor) or rng_state.dtype != torch.int64 or tuple(rng_state.shape) != (2,):
        got = f"{list(rng_state.shape)} {rng_state.dtype}" if isinstance(rng_state, Tensor) else repr(rng_state)
        raise InvalidArgument(f"rng_state: expected the forward pass's int64 [2] with dropout_p > 0, got {got}")
    return rng_state


def _check_results(dout: Tensor, out: Tensor, softmax_lse: Tensor, out_shape: tuple, lse_shape: tuple) -> None:
    for name, tensor, shape in (("dout", dout, out_shape), ("out", out, out_shape), ("softmax_lse", softmax_lse, lse_shape)):
        check_tensor(name, tensor)
        if tuple(tensor.shape) != tuple(shape):
            raise InvalidArgument(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")


def _slopes(options: Options, query: Tensor, shape) -> Tensor | None:
    slopes = options.alibi_slopes
    return None if slopes is None else slopes.to(accumulator_of(query.dtype)).expand(shape)


def _forward(query: Tensor, key: Tensor, value: Tensor, options: Options, rng: Tensor | None):
    slopes = _slopes(options, query, query.shape[:2])
    return ops.attention_forward.default(query, key, value, None, slopes, None, rng, *options.for_operators(query))


def _forward_packed(q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: Options, rng: Tensor | None):
    slopes = _slopes(options, q, (packing.cu_seqlens_q.shape[0] - 1, q.shape[1]))
    return ops.attention_varlen_forward.default(
        *(q, k, v, packing.cu_seqlens_q, packing.cu_seqlens_k, slopes, None, rng),
        *(packing.max_seqlen_q, packing.max_seqlen_k, *options.for_operators(q)),
    )


def _delta(dout: Tensor, out: Tensor, softmax_lse: Tensor) -> Tensor:
    """<dout, out> of each row, in the dtype of softmax_lse."""
    return (dout.to(softmax_lse.dtype) * out).sum(-1)
