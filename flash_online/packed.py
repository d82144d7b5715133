"""Attention of packed sequences, and its derivatives."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from . import _shapes, plan
from ._autograd import differentiable
from ._ops import InvalidArgument, accumulator_of, ops
from .attention import _check_options, _default_scale, _directional_derivative, _draw, tf32_for


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
    """Exact attention of packed sequences, which lie one behind the other in a batch without padding.

    Queries `cu_seqlens_q[n]` up to `cu_seqlens_q[n + 1]` attend to keys `cu_seqlens_k[n]` up to `cu_seqlens_k[n + 1]`: sequence
    n, for which the result is that of `attention`, bit for bit on the CPU. Positions count from the sequence's first query and
    key, and `alignment="lower_right"` goes by its own lengths. Any of them may be empty.

    Args:
        query: `[Tq, Hq, E]`; float16, bfloat16, float32 or float64; any strides.
        key: `[Tk, Hk, E]`, value: `[Tk, Hv, Ev]`, of query's dtype and device. Hk and Hv divide Hq.
        cu_seqlens_q, cu_seqlens_k: int32 `[sequences + 1]` on query's device, from 0 upwards. Only the device reads them:
            starts that are out of order or past the end raise nothing, and reach no other memory than the tensors'.
        max_seqlen_q, max_seqlen_k: ints, no less than the longest sequence's lengths. What is beyond them is left out.
        causal, window, alignment, softcap, sinks, scale, return_lse, deterministic: as in `attention`.
        alibi_slopes: `[Hq]` or `[sequences, Hq]`, positive slopes; no gradient.
        dropout_p: as in `attention`; the batch index of the draw is the sequence's.

    Returns:
        out `[Tq, Hq, Ev]` of query's dtype and order of strides. Queries that belong to no sequence, such as those past
        `cu_seqlens_q[-1]`, get 0, and keys and values past `cu_seqlens_k[-1]` reach nothing, whatever they hold. With
        `return_lse` also lse `[Hq, Tq]`, natural logarithm, float32 (float64 for float64); -inf where a query sees nothing.
        First derivatives are made by kernels; second ones and forward mode in torch, a sequence at a time, with the lengths
        read by the host.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above.
        NotImplementedError: the device has no kernel for this call.

    float32 on CUDA where torch allows tf32: as in `attention`.

    Source: FlashAttention-2 (arXiv 2307.08691), whose packed interface this is.
    """
    _check_options(query, -2, causal, window, alignment, softcap, sinks, alibi_slopes, dropout_p)
    query, key, value = _shapes.autocast(query, key, value)
    _shapes.check_kinds(query, key, value, None)
    plan.require_kernel("varlen_attention", query, key, value)
    _shapes.check_packed(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    accumulator = accumulator_of(query.dtype)
    if alibi_slopes is not None:
        shape = (cu_seqlens_q.shape[0] - 1, query.shape[1])
        if alibi_slopes.dim() > 2 or _shapes.broadcast("query, alibi_slopes", shape, alibi_slopes.shape) != shape:
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
        _draw(dropout_p, query.device),
        max_seqlen_q,
        max_seqlen_k,
        left,
        0 if causal else right,
        alignment == "lower_right",
        _default_scale(query.shape[-1]) if scale is None else float(scale),
        float(softcap),
        float(dropout_p),
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        tf32_for(query),
    )
    return (out, lse) if return_lse else out


class _VarlenOp:
    """(out, lse, lse_low) of (query, key, value, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, rng, *options)."""

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
        tangent_out, tangent_lse = _packed_derivative(ctx.saved_tensors[:8], None, None, ctx.options, tangents[:4], None, None)
        return tangent_out, tangent_lse, torch.zeros_like(tangent_lse)


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
        directions = (*cotangents[:3], None if inputs[3] is None else cotangents[3])
        derivatives = _packed_derivative(inputs, grad_out, grad_lse, ctx.options, directions, None, None)
        along_out, along_lse, *along_inputs = derivatives
        return (along_out, None if grad_lse is None else along_lse, *along_inputs, *(None for _ in range(7 + len(ctx.options))))

    @staticmethod
    def jvp(ctx, tangent_grad_out, tangent_grad_lse, *tangents):
        grad_out, grad_lse, *inputs = ctx.saved_tensors
        derivatives = _packed_derivative(
            inputs, grad_out, grad_lse, ctx.options, tangents[:4], tangent_grad_out, tangent_grad_lse
        )
        *gradients, grad_sinks = derivatives[2:]
        return *gradients, grad_out.new_empty(0, dtype=accumulator_of(grad_out.dtype)) if grad_sinks is None else grad_sinks


_varlen_attention = differentiable(_VarlenOp)
_varlen_backward = differentiable(_VarlenBackwardOp)


def _packed_derivative(inputs, grad_out, grad_lse, options, directions, along_grad_out, along_grad_lse):
    """_directional_derivative of packed sequences, one after another; of (query, key, value, sinks)."""
    query, key, value, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k, rng = inputs
    longest_query, longest_key, *options = options
    *directions, to_sinks = directions

    def dense(tensor, rows):
        """The rows of a packed tensor as [1, heads, rows, width]."""
        return None if tensor is None else tensor[rows].transpose(0, 1).unsqueeze(0)

    def dense_lse(tensor, rows):
        return None if tensor is None else tensor[:, rows].unsqueeze(0)

    query_rows = _packed_rows(cu_seqlens_q, longest_query, query.shape[0])
    key_rows = _packed_rows(cu_seqlens_k, longest_key, key.shape[0])
    parts, to_grad_sinks = [], None if sinks is None or grad_out is None else torch.zeros_like(sinks)
    for n, (rows, keys) in enumerate(zip(query_rows, key_rows, strict=True)):
        out, lse, *gradients = _directional_derivative(
            (
                *(dense(tensor, of) for tensor, of in ((query, rows), (key, keys), (value, keys))),
                *(None, sinks, None if alibi_slopes is None else alibi_slopes[n : n + 1], rng),
            ),
            dense(grad_out, rows),
            dense_lse(grad_lse, rows),
            options,
            (*(dense(tensor, of) for tensor, of in zip(directions, (rows, keys, keys), strict=True)), None, to_sinks),
            dense(along_grad_out, rows),
            dense_lse(along_grad_lse, rows),
            first_batch=n,
        )
        parts.append([part.squeeze(0).transpose(0, 1) for part in (out, lse.unsqueeze(-1), *gradients[:3])])
        if gradients and gradients[4] is not None:
            to_grad_sinks = to_grad_sinks + gradients[4]

    def whole(index, rows, length):
        """The sequences' parts in their places, and 0 between them."""
        pieces, end = [], 0
        width = value.shape[-1] if index in (0, 4) else 1 if index == 1 else query.shape[-1]
        heads = (query, query, query, key, value)[index].shape[1]
        dtype = accumulator_of(query.dtype) if index == 1 else query.dtype
        for of, part in zip((*rows, slice(length, length)), (*(part[index] for part in parts), None), strict=True):
            pieces.append(query.new_zeros(of.start - end, heads, width, dtype=dtype))
            pieces += [] if part is None else [part]
            end = of.stop
        return torch.cat(pieces)

    out = whole(0, query_rows, query.shape[0])
    lse = whole(1, query_rows, query.shape[0]).squeeze(-1).transpose(0, 1)
    if grad_out is None:
        return out, lse
    return (
        *(out, lse, whole(2, query_rows, query.shape[0])),
        *(whole(index, key_rows, key.shape[0]) for index in (3, 4)),
        to_grad_sinks,
    )


def _packed_rows(starts: Tensor, longest: int, total: int) -> list[slice]:
    """Each sequence's rows, read by the host; the same rule as the kernels'."""
    rows, end = [], 0
    bounds = [min(max(int(start), 0), total) for start in starts.unbind()]
    for first, last in itertools.pairwise(bounds):
        first = max(first, end)
        end = first + min(max(last - first, 0), longest)
        rows.append(slice(first, end))
    return rows
