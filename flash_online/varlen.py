"""Attention of packed sequences of any lengths (varlen attention), and its derivatives of first and second order."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from . import _checked
from ._attention_arguments import AttentionOptions, AttentionTensors, VarlenTensors, given_sparsity
from ._attention_derivatives import gradient_jvp, in_strides_of
from ._autograd import Description, differentiable
from ._canonicalize import cast_and_check, check_attention, check_packed, expand_slopes, longest_of, window_bounds
from ._checks import none_as_zero
from ._ops import InvalidArgument, accumulator_of, ops
from ._plain import is_compiling
from ._span_arguments import canonical_spans
from .attention import (
    AttentionKeywords,
    SpanKeywords,
    draw_rng,
    is_deterministic,
    operator_scale,
    results_of,
    tf32_for,
    with_max_logit,
)
from .kvcache import varlen_over_pools

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _VarlenKeywords(AttentionKeywords, SpanKeywords, total=False):
    """The keywords of varlen_attention."""

    block_table: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    num_splits: int | None
    out: Tensor | None


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_VarlenKeywords],
) -> Tensor: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_VarlenKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **options: Unpack[_VarlenKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[_VarlenKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_VarlenKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool = ...,
    return_max_logit: bool,
    **options: Unpack[_VarlenKeywords],
) -> Tensor | tuple[Tensor, ...]: ...
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
    query_spans: Tensor | None = None,
    key_spans: Tensor | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool | None = None,
    block_table: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention of packed sequences, which lie one after another in one tensor without padding.

    Sequence n has the queries from `cu_seqlens_q[n]` up to `cu_seqlens_q[n + 1]`, and keys likewise. Its result equals
    `attention`'s, bit for bit on the CPU: positions, alignment and spans are relative to the sequence, which may be empty.

    Args:
        query: `[Tq, Hq, E]`; float16, bfloat16, float32 or float64; any strides.
        key: `[Tk, Hk, E]`, of query's dtype and device. Hk divides Hq.
        value: `[Tk, Hv, Ev]`, as key. Hv divides Hq too.
        cu_seqlens_q: int32 `[sequences + 1]` on query's device, ascending from 0: starts of each sequence's queries. Only the
            device reads them: starts that are out of order or past the end raise an error only inside `flash_online.checked()`,
            and no memory outside the tensors is read.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: at least the length of the longest sequence; queries beyond it are left out. max_seqlen_k: of keys.
        query_spans: as in `attention`, int32 `[Tq, 2 or 4]` or `[1 or Hq, Tq, 2 or 4]`; key_spans: the same with Tk.
        causal: as in `attention`; so are window, alignment, softcap, sinks, scale, deterministic and what is returned.
        alibi_slopes: `[Hq]` or `[sequences, Hq]`, positive slopes; no gradient.
        dropout_p: as in `attention`; the batch index of the random bits is the index of the sequence.
        block_table: int32 `[sequences, entries]`: key and value are pools of pages `[blocks, page, Hk, E]`, as in
            `kvcache_attention`, and so is num_splits. With it or one of the next four: no gradient, key_spans, max_logit.
        seqused_q: int32 `[sequences]`: number of used queries of each sequence; the rest get 0. seqused_k: number of used keys;
            with `block_table` cu_seqlens_k may then be None.
        out: a tensor for the result.

    Returns:
        out `[Tq, Hq, Ev]` of query's dtype and order of strides. Padding rows (queries that belong to no sequence, such as
        those past `cu_seqlens_q[-1]`) get 0, and no result depends on the keys and values past `cu_seqlens_k[-1]`, whatever
        they hold. With `return_lse` also lse `[Hq, Tq]`, natural logarithm, float32 (float64 for float64); -inf where a query
        sees nothing. With `return_max_logit` last max_logit `[sequences, Hq]`, float32. Kernels compute first derivatives.
        Second derivatives and forward mode run in torch, one sequence at a time, and the host reads the lengths.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above.
        NotImplementedError: the device has no kernel for this call.

    Precision of float32 on CUDA: as in `attention`. Source, also of the interface: FlashAttention-2 (arXiv 2307.08691).
    """
    softcap = none_as_zero(softcap)
    max_seqlen_q, max_seqlen_k = longest_of(max_seqlen_q), longest_of(max_seqlen_k)
    check_attention(
        query, key, value, None, -2, causal=causal, window=window, alignment=alignment, softcap=softcap, scale=scale,
        alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, return_lse=return_lse, deterministic=deterministic,
        query_spans=query_spans, key_spans=key_spans, return_max_logit=return_max_logit,
    )  # fmt: skip
    if not (block_table is seqused_q is seqused_k is num_splits is out is None):
        _check_over_pools(dropout_p, key_spans, return_max_logit)
        return varlen_over_pools(
            *(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_q, seqused_k),
            *(num_splits, out, alibi_slopes, sinks, return_lse, query_spans),
            **{"causal": causal, "window": window, "alignment": alignment, "softcap": softcap, "scale": scale},
        )
    query, key, value, _ = cast_and_check("varlen_attention", query, key, value, None, dropout_p)
    packing = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    check_packed(query, key, value, *packing)
    if not is_compiling() and _checked.active:
        _checked.check_packed(*packing, query.shape[0], key.shape[0])
    out, lse, max_logit = varlen_impl(
        *(query, key, value, *packing),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        causal=causal,
        window=window or (None, None),
        lower_right=alignment == "lower_right",
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        query_spans=canonical_spans("query_spans", query_spans, query, query.shape[1:2], query.shape[0]),
        key_spans=canonical_spans("key_spans", key_spans, query, query.shape[1:2], key.shape[0]),
        return_max_logit=return_max_logit,
    )
    return results_of(out, lse if return_lse else None, max_logit)


def _check_over_pools(dropout_p: float, key_spans: Tensor | None, return_max_logit: bool) -> None:
    """Raises if a call over cached keys has an option that these do not take."""
    if dropout_p > 0:
        raise InvalidArgument(f"dropout_p: expected 0 over cached keys, got {dropout_p}")
    if key_spans is not None:
        raise InvalidArgument("key_spans: expected None over cached keys, which take query_spans, got a tensor")
    if return_max_logit:
        raise InvalidArgument("return_max_logit: expected False over cached keys, got True")


def varlen_impl(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    lower_right: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    rng: Tensor | None = None,
    query_spans: Tensor | None = None,
    key_spans: Tensor | None = None,
    return_max_logit: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse, max_logit) of packed sequences that passed `check_packed`; max_logit is None unless wanted. `rng` is the
    result of `draw_rng`, drawn here if None."""
    accumulator = accumulator_of(query.dtype)
    if alibi_slopes is not None:
        alibi_slopes = expand_slopes(alibi_slopes, (cu_seqlens_q.shape[0] - 1, query.shape[1])).to(accumulator)
    left, right = window_bounds(window)
    scale = operator_scale(query, scale)
    out, lse, _, *max_logit = (_varlen_with_max_logit if return_max_logit else _varlen_attention)(
        query,
        key,
        value,
        cu_seqlens_q.contiguous(),
        cu_seqlens_k.contiguous(),
        alibi_slopes,
        None if sinks is None else sinks.to(accumulator).contiguous(),
        draw_rng(dropout_p, query.device) if rng is None else rng,
        query_spans,
        key_spans,
        max_seqlen_q,
        max_seqlen_k,
        AttentionOptions(
            left, 0 if causal else right, lower_right, scale, float(softcap), float(dropout_p), tf32_for(query), deterministic
        ),
    )
    return out, lse, max_logit[0] if max_logit else None


class _Varlen(Description):
    """(*VarlenTensors, max_seqlen_q, max_seqlen_k, options) -> (out, lse, lse_low)."""

    operator = ops.attention_varlen_forward

    @staticmethod
    def inputs(*arguments):
        tensors, lengths, options, spans = arguments[:8], arguments[8:10], arguments[10:18], arguments[18:]
        return *VarlenTensors(*tensors, *spans), *lengths, AttentionOptions(*options)

    @staticmethod
    def arguments(*inputs):
        *tensors, query_spans, key_spans, max_seqlen_q, max_seqlen_k, options = inputs
        return *tensors, max_seqlen_q, max_seqlen_k, *options, *given_sparsity(query_spans, key_spans)

    @staticmethod
    def save(ctx, inputs, outputs):
        *tensors, ctx.max_seqlen_q, ctx.max_seqlen_k, ctx.options = inputs
        ctx.deterministic = is_deterministic(ctx.options.deterministic)
        ctx.set_materialize_grads(False)
        return *tensors, *outputs

    @staticmethod
    def backward(ctx, grad_out, grad_lse, _):
        *tensors, out, lse, lse_low = ctx.saved_tensors
        if grad_out is None:
            if grad_lse is None:
                return (None,) * 13
            grad_out = torch.zeros_like(out)
        grad_query, grad_key, grad_value, grad_sinks = _varlen_backward(
            *(grad_out, grad_lse, *tensors, out, lse, lse_low),
            *(ctx.max_seqlen_q, ctx.max_seqlen_k, ctx.options, ctx.deterministic),
        )
        grad_sinks = None if VarlenTensors(*tensors).sinks is None else grad_sinks
        return grad_query, grad_key, grad_value, None, None, None, grad_sinks, *(None,) * 6

    @staticmethod
    def jvp(ctx, *tangents):
        *tensors, out, _, _ = ctx.saved_tensors
        *tangents, _, _, _ = tangents
        d_out, d_lse, _ = _varlen_gradient_jvp(ctx, VarlenTensors(*tensors), VarlenTensors(*tangents))
        return in_strides_of(out, d_out), d_lse, torch.zeros_like(d_lse)


class _VarlenBackward(Description):
    """The gradients of _Varlen's query, key, value and sinks, as in attention.py: (grad_out, grad_lse, *VarlenTensors, out,
    lse, lse_low, max_seqlen_q, max_seqlen_k, options, deterministic) -> these gradients."""

    operator = ops.attention_varlen_backward

    @staticmethod
    def inputs(*arguments):
        (grad_out, grad_lse, *tensors), others = arguments[:10], arguments[10:15]
        options, spans = arguments[15:23], arguments[23:]
        left, right, lower_right, scale, softcap, dropout_p, deterministic, tf32 = options
        options = AttentionOptions(left, right, lower_right, scale, softcap, dropout_p, tf32)
        return grad_out, grad_lse, *VarlenTensors(*tensors, *spans), *others, options, deterministic

    @staticmethod
    def arguments(*inputs):
        *tensors, query_spans, key_spans, out, lse, lse_low, max_seqlen_q, max_seqlen_k, options, deterministic = inputs
        others = (out, lse, lse_low, max_seqlen_q, max_seqlen_k)
        return *tensors, *others, *options.for_backward(deterministic), *given_sparsity(query_spans, key_spans)

    @staticmethod
    def save(ctx, inputs, outputs):
        *tensors, _, _, _, ctx.max_seqlen_q, ctx.max_seqlen_k, ctx.options, _ = inputs
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx, v_query, v_key, v_value, v_sinks):
        grad_out, grad_lse, *tensors = ctx.saved_tensors
        tensors = VarlenTensors(*tensors)
        v_sinks = None if tensors.sinks is None else v_sinks
        tangents = VarlenTensors(v_query, v_key, v_value, None, None, None, v_sinks, None)
        d_out, d_lse, d_grads = _varlen_gradient_jvp(ctx, tensors, tangents, grad_out, grad_lse)
        d_grad_query, d_grad_key, d_grad_value, d_grad_sinks = d_grads
        return (
            *(d_out, None if grad_lse is None else d_lse),
            *(d_grad_query, d_grad_key, d_grad_value, None, None, None, d_grad_sinks, None),
            *(None,) * 9,  # spans; out, lse, lse_low; max_seqlen_q, max_seqlen_k, options, deterministic
        )

    @staticmethod
    def jvp(ctx, d_grad_out, d_grad_lse, *tangents):
        grad_out, grad_lse, *tensors = ctx.saved_tensors
        *tangents, _, _, _, _, _, _, _ = tangents
        _, _, d_grads = _varlen_gradient_jvp(
            *(ctx, VarlenTensors(*tensors), VarlenTensors(*tangents), grad_out, grad_lse, d_grad_out, d_grad_lse)
        )
        d_grad_query, d_grad_key, d_grad_value, d_grad_sinks = d_grads
        if d_grad_sinks is None:
            d_grad_sinks = grad_out.new_empty(0, dtype=accumulator_of(grad_out.dtype))
        return d_grad_query, d_grad_key, d_grad_value, d_grad_sinks


_varlen_attention = differentiable(_Varlen)
_varlen_with_max_logit = with_max_logit(_Varlen, ops.attention_varlen_forward_with_max_logit)
_varlen_backward = differentiable(_VarlenBackward)


def _varlen_gradient_jvp(ctx, tensors, tangents, grad_out=None, grad_lse=None, d_grad_out=None, d_grad_lse=None):
    """`gradient_jvp` of packed sequences, one at a time: the tangents of out and lse and, with grad_out, a tuple of the
    tangents of the gradients of query, key, value and sinks. `ctx` has the lengths and options of the call."""
    query, key, value, sinks = tensors.query, tensors.key, tensors.value, tensors.sinks

    def dense(tensor, rows):
        """Rows of a packed tensor as [1, heads, rows, head dim]."""
        return None if tensor is None else tensor[rows].transpose(0, 1).unsqueeze(0)

    def dense_lse(tensor, rows):
        return None if tensor is None else tensor[:, rows].unsqueeze(0)

    def dense_tensors(packed, queries, keys, slopes, rng):
        own = (dense(packed.query, queries), dense(packed.key, keys), dense(packed.value, keys))
        spans = (
            None if given is None else given[:, rows].unsqueeze(0)
            for given, rows in ((packed.query_spans, queries), (packed.key_spans, keys))
        )
        return AttentionTensors(*own, None, slopes, packed.sinks, rng, *spans)

    def unpadded(part):
        return part.squeeze(0).transpose(0, 1)

    query_rows = sequence_rows(tensors.cu_seqlens_q, ctx.max_seqlen_q, query.shape[0])
    key_rows = sequence_rows(tensors.cu_seqlens_k, ctx.max_seqlen_k, key.shape[0])
    outs, lses, grad_queries, grad_keys, grad_values = [], [], [], [], []
    d_grad_sinks = None if sinks is None or grad_out is None else torch.zeros_like(sinks)
    for n, (queries, keys) in enumerate(zip(query_rows, key_rows, strict=True)):
        slopes = None if tensors.alibi_slopes is None else tensors.alibi_slopes[n : n + 1]
        d_out, d_lse, d_grads = gradient_jvp(
            dense_tensors(tensors, queries, keys, slopes, tensors.rng),
            ctx.options,
            dense_tensors(tangents, queries, keys, None, None),
            dense(grad_out, queries),
            dense_lse(grad_lse, queries),
            dense(d_grad_out, queries),
            dense_lse(d_grad_lse, queries),
            first_batch=n,
        )
        outs.append(unpadded(d_out))
        lses.append(unpadded(d_lse.unsqueeze(-1)))
        if d_grads is not None:
            grad_queries.append(unpadded(d_grads.query))
            grad_keys.append(unpadded(d_grads.key))
            grad_values.append(unpadded(d_grads.value))
            if d_grads.sinks is not None:
                d_grad_sinks = d_grad_sinks + d_grads.sinks

    def pack(parts, rows, like, heads, size, dtype=query.dtype):
        """The parts of all sequences as one packed tensor of `like`'s rows; padding rows are 0."""
        total = like.shape[0]
        pieces, end = [], 0
        for sequence, part in zip((*rows, slice(total, total)), (*parts, None), strict=True):
            pieces.append(query.new_zeros(sequence.start - end, heads, size, dtype=dtype))
            pieces += [] if part is None else [part]
            end = sequence.stop
        return torch.cat(pieces)

    (_, heads, width), (_, key_heads, _), (_, value_heads, value_width) = query.shape, key.shape, value.shape
    d_out = pack(outs, query_rows, query, heads, value_width)
    d_lse = pack(lses, query_rows, query, heads, 1, accumulator_of(query.dtype)).squeeze(-1).transpose(0, 1)
    if grad_out is None:
        return d_out, d_lse, None
    return (
        *(d_out, d_lse),
        (
            pack(grad_queries, query_rows, query, heads, width),
            pack(grad_keys, key_rows, key, key_heads, width),
            pack(grad_values, key_rows, value, value_heads, value_width),
            d_grad_sinks,
        ),
    )


def sequence_rows(cu_seqlens: Tensor, max_seqlen: int, total: int) -> list[slice]:
    """The rows of each sequence, read by the host. The kernels apply this rule too: a start is clamped to [0, total] and to the
    end of the sequence before it, and a sequence is cut off at max_seqlen rows."""
    try:
        starts = [int(start) for start in cu_seqlens.unbind()]
        bounds = [min(max(start, 0), total) for start in starts]
    except (RuntimeError, NotImplementedError) as error:  # a tracer has no values
        raise NotImplementedError(
            "cu_seqlens: expected values that Python can read, got a tracer's: forward mode and second derivatives of "
            "varlen_attention run one sequence at a time"
        ) from error
    rows, end = [], 0
    for first, last in itertools.pairwise(bounds):
        first = max(first, end)
        end = first + min(max(last - first, 0), max_seqlen)
        rows.append(slice(first, end))
    return rows
