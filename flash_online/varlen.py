"""Attention of packed sequences of any lengths (varlen attention), and its derivatives of first and second order."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from . import _policy
from ._attention_derivatives import gradient_jvp
from ._autograd import differentiable
from ._canonicalize import autocast, broadcast, check_attention_options, check_kinds, check_packed
from ._ops import InvalidArgument, accumulator_of, ops
from .attention import default_scale, draw_rng, tf32_for


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "lower_right",
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of packed sequences, which lie one after another in one tensor without padding.

    Sequence n has the queries from `cu_seqlens_q[n]` up to `cu_seqlens_q[n + 1]` and the keys from `cu_seqlens_k[n]` up to
    `cu_seqlens_k[n + 1]`. Its result is that of `attention`, bit for bit on the CPU: positions count from the first query and
    key of the sequence, and `alignment="lower_right"` uses the lengths of the sequence. Any sequence may be empty.

    Args:
        query: `[Tq, Hq, E]`; float16, bfloat16, float32 or float64; any strides.
        key: `[Tk, Hk, E]`, value: `[Tk, Hv, Ev]`, of query's dtype and device. Hk and Hv divide Hq.
        cu_seqlens_q, cu_seqlens_k: int32 `[sequences + 1]` on query's device, ascending from 0. Only the device reads them:
            starts that are out of order or past the end raise no error, and no memory outside the tensors is read.
        max_seqlen_q, max_seqlen_k: ints, at least the lengths of the longest sequence. Rows of a sequence beyond them are
            left out.
        causal, window, alignment, softcap, sinks, scale, return_lse, deterministic: as in `attention`.
        alibi_slopes: `[Hq]` or `[sequences, Hq]`, positive slopes; no gradient.
        dropout_p: as in `attention`; the batch index of the random bits is the index of the sequence.

    Returns:
        out `[Tq, Hq, Ev]` of query's dtype and order of strides. Padding rows (queries that belong to no sequence, such as
        those past `cu_seqlens_q[-1]`) get 0, and no result depends on the keys and values past `cu_seqlens_k[-1]`, whatever
        they hold. With `return_lse` also lse `[Hq, Tq]`, natural logarithm, float32 (float64 for float64); -inf where a query
        sees nothing. Kernels compute first derivatives. Second derivatives and forward mode run in torch, one sequence at a
        time, and the host reads the lengths.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above.
        NotImplementedError: the device has no kernel for this call.

    The precision of float32 on CUDA: as in `attention`.

    Source: FlashAttention-2 (arXiv 2307.08691), whose packed interface this is.
    """
    check_attention_options(query, -2, causal, window, alignment, softcap, sinks, alibi_slopes, dropout_p)
    query, key, value = autocast(query, key, value)
    check_kinds(query, key, value, None)
    _policy.require_kernel("varlen_attention", query, key, value)
    check_packed(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    accumulator = accumulator_of(query.dtype)
    if alibi_slopes is not None:
        shape = (cu_seqlens_q.shape[0] - 1, query.shape[1])
        if alibi_slopes.dim() > 2 or broadcast("query, alibi_slopes", shape, alibi_slopes.shape) != shape:
            raise InvalidArgument(
                f"alibi_slopes: got {list(alibi_slopes.shape)}; accepted are [{shape[1]}], one slope a query head, and "
                f"{list(shape)}, one for each sequence too"
            )
        alibi_slopes = alibi_slopes.to(accumulator).expand(shape)
    left, right = (-1 if bound is None else bound for bound in window or (None, None))
    out, lse, _ = _varlen_attention(
        query,
        key,
        value,
        None if sinks is None else sinks.to(accumulator).contiguous(),
        alibi_slopes,
        cu_seqlens_q.contiguous(),
        cu_seqlens_k.contiguous(),
        draw_rng(dropout_p, query.device),
        max_seqlen_q,
        max_seqlen_k,
        left,
        0 if causal else right,
        alignment == "lower_right",
        default_scale(query.shape[-1]) if scale is None else float(scale),
        float(softcap),
        float(dropout_p),
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        tf32_for(query),
    )
    return (out, lse) if return_lse else out


class _VarlenOp:
    """(query, key, value, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, rng, *options) -> (out, lse, lse_low)."""

    @staticmethod
    def run(query, key, value, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, rng, *options):
        tensors = (query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng)
        return ops.attention_varlen_forward.default(*tensors, *options[:-2], options[-1])

    @staticmethod
    def save(ctx, inputs, outputs):
        ctx.options = inputs[8:]
        ctx.set_materialize_grads(False)
        return *inputs[:8], *outputs

    @staticmethod
    def backward(ctx, grad_out, grad_lse, _):
        *inputs, out, lse, lse_low = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        gradients = _varlen_backward(grad_out, grad_lse, *inputs, out, lse, lse_low, *ctx.options)
        return *gradients[:3], None if inputs[3] is None else gradients[3], *(None for _ in range(4 + len(ctx.options)))

    @staticmethod
    def jvp(ctx, *tangents):
        d_out, d_lse = _varlen_gradient_jvp(ctx.saved_tensors[:8], None, None, ctx.options, tangents[:4], None, None)
        return d_out, d_lse, torch.zeros_like(d_lse)


class _VarlenBackwardOp:
    """The gradients of _VarlenOp's query, key, value and sinks; see _AttentionBackwardOp."""

    @staticmethod
    def run(
        grad_out, grad_lse, query, key, value, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, rng, out, lse, lse_low, *options
    ):
        tensors = (query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng, out, lse, lse_low)
        return ops.attention_varlen_backward.default(grad_out, grad_lse, *tensors, *options)

    @staticmethod
    def save(ctx, inputs, outputs):
        ctx.options = inputs[13:]
        ctx.set_materialize_grads(False)
        return inputs[:10]

    @staticmethod
    def backward(ctx, *cotangents):
        grad_out, grad_lse, *inputs = ctx.saved_tensors
        tangents = (*cotangents[:3], None if inputs[3] is None else cotangents[3])
        d_out, d_lse, *d_gradients = _varlen_gradient_jvp(inputs, grad_out, grad_lse, ctx.options, tangents, None, None)
        return (d_out, None if grad_lse is None else d_lse, *d_gradients, *(None for _ in range(7 + len(ctx.options))))

    @staticmethod
    def jvp(ctx, d_grad_out, d_grad_lse, *tangents):
        grad_out, grad_lse, *inputs = ctx.saved_tensors
        d_results = _varlen_gradient_jvp(inputs, grad_out, grad_lse, ctx.options, tangents[:4], d_grad_out, d_grad_lse)
        _, _, *d_gradients, d_grad_sinks = d_results
        if d_grad_sinks is None:
            d_grad_sinks = grad_out.new_empty(0, dtype=accumulator_of(grad_out.dtype))
        return *d_gradients, d_grad_sinks


_varlen_attention = differentiable(_VarlenOp)
_varlen_backward = differentiable(_VarlenBackwardOp)


def _varlen_gradient_jvp(inputs, grad_out, grad_lse, options, tangents, d_grad_out, d_grad_lse):
    """`gradient_jvp` of packed sequences, one sequence after another: the tangents of (out, lse) and, with grad_out, those of
    the gradients of (query, key, value, sinks)."""
    query, key, value, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, rng = inputs
    max_seqlen_q, max_seqlen_k, *options = options
    *tangents, d_sinks = tangents

    def dense(tensor, rows):
        """Rows of a packed tensor as [1, heads, rows, head dim]."""
        return None if tensor is None else tensor[rows].transpose(0, 1).unsqueeze(0)

    def dense_lse(tensor, rows):
        return None if tensor is None else tensor[:, rows].unsqueeze(0)

    query_rows = _sequence_rows(cu_seqlens_q, max_seqlen_q, query.shape[0])
    key_rows = _sequence_rows(cu_seqlens_k, max_seqlen_k, key.shape[0])
    parts, d_grad_sinks = [], None if sinks is None or grad_out is None else torch.zeros_like(sinks)
    for n, (queries, keys) in enumerate(zip(query_rows, key_rows, strict=True)):
        d_out, d_lse, *d_gradients = gradient_jvp(
            (
                *(dense(query, queries), dense(key, keys), dense(value, keys)),
                *(None, sinks, None if alibi_slopes is None else alibi_slopes[n : n + 1], rng),
            ),
            dense(grad_out, queries),
            dense_lse(grad_lse, queries),
            options,
            (*(dense(tensor, rows) for tensor, rows in zip(tangents, (queries, keys, keys), strict=True)), None, d_sinks),
            dense(d_grad_out, queries),
            dense_lse(d_grad_lse, queries),
            first_batch=n,
        )
        parts.append([part.squeeze(0).transpose(0, 1) for part in (d_out, d_lse.unsqueeze(-1), *d_gradients[:3])])
        if d_gradients and d_gradients[4] is not None:
            d_grad_sinks = d_grad_sinks + d_gradients[4]

    def pack(index, rows, total):
        """Result `index` of all sequences as one packed tensor; padding rows are 0."""
        pieces, end = [], 0
        last_size = value.shape[-1] if index in (0, 4) else 1 if index == 1 else query.shape[-1]
        heads = (query, query, query, key, value)[index].shape[1]
        dtype = accumulator_of(query.dtype) if index == 1 else query.dtype
        for sequence, part in zip((*rows, slice(total, total)), (*(part[index] for part in parts), None), strict=True):
            pieces.append(query.new_zeros(sequence.start - end, heads, last_size, dtype=dtype))
            pieces += [] if part is None else [part]
            end = sequence.stop
        return torch.cat(pieces)

    d_out = pack(0, query_rows, query.shape[0])
    d_lse = pack(1, query_rows, query.shape[0]).squeeze(-1).transpose(0, 1)
    if grad_out is None:
        return d_out, d_lse
    return (
        *(d_out, d_lse, pack(2, query_rows, query.shape[0])),
        *(pack(index, key_rows, key.shape[0]) for index in (3, 4)),
        d_grad_sinks,
    )


def _sequence_rows(cu_seqlens: Tensor, max_seqlen: int, total: int) -> list[slice]:
    """The rows of each sequence, read by the host. The kernels apply this rule too: a start is clamped to [0, total] and to the
    end of the sequence before it, and a sequence is cut off at max_seqlen rows."""
    rows, end = [], 0
    bounds = [min(max(int(start), 0), total) for start in cu_seqlens.unbind()]
    for first, last in itertools.pairwise(bounds):
        first = max(first, end)
        end = first + min(max(last - first, 0), max_seqlen)
        rows.append(slice(first, end))
    return rows
