"""Attention with every option: the public function, its fast path, and its two autograd operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from torch import Tensor

from . import _policy
from ._attention_arguments import AttentionGradients, AttentionOptions, AttentionTensors, default_scale, given_sparsity
from ._attention_derivatives import gradient_jvp, in_strides_of
from ._autograd import (
    Description,
    composite,
    differentiable,
    dispatch,
    dispatches,
    lean,
    requires_grad,
    unwrap_if_dead,
)
from ._block_arguments import tiles_of_blocks, try_fast_tiles
from ._canonicalize import canonicalize, cast_and_check, check_attention, expand_sinks, expand_slopes, window_bounds
from ._checks import none_as_zero, unexpected_keyword, without_others
from ._ops import accumulator_of, below_autograd, ops, surfaced
from ._plain import NUMBERS, are_plain, is_grad_enabled
from ._span_arguments import canonical_spans
from .blocks import BlockList, check_blocks

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AttentionKeywords(TypedDict, total=False):
    """The keywords of attention and varlen_attention that do not change the type of the result, for type checkers."""

    causal: bool
    window: tuple[int | None, int | None] | None
    alignment: str
    softcap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    scale: float | None
    deterministic: bool | None


class SpanKeywords(TypedDict, total=False):
    """The keywords of attention and varlen_attention that context parallelism does not have."""

    query_spans: Tensor | None
    key_spans: Tensor | None


class _DenseKeywords(AttentionKeywords, SpanKeywords, total=False):
    """The keywords of attention."""

    mask: Tensor | None
    blocks: BlockList | None


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_DenseKeywords],
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_DenseKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_logit: Literal[True],
    **options: Unpack[_DenseKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[_DenseKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: bool,
    return_max_logit: Literal[False] = ...,
    **options: Unpack[_DenseKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: bool = ...,
    return_max_logit: bool,
    **options: Unpack[_DenseKeywords],
) -> Tensor | tuple[Tensor, ...]: ...
@without_others
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "upper_left",
    query_spans: Tensor | None = None,
    key_spans: Tensor | None = None,
    blocks: BlockList | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool | None = None,
    **others: object,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention, computed block by block in memory linear in the lengths.

    The position of query i is p = i (`alignment="upper_left"`) or p = i + S - L (`"lower_right"`). A score starts as
    `scale * query . key`; then `softcap * tanh(score / softcap)` is applied, ALiBi's `-slope * |p - j|` is added, and last the
    float mask. A query sees a key only if the causal rule, window, bool mask, spans and list of blocks all allow it.

    Args:
        query: `[..., Hq, L, E]`; float16, bfloat16, float32 or float64; any strides.
        key: `[..., Hk, S, E]`, of query's dtype and device. Hk divides Hq; query head h uses key head `h // (Hq / Hk)`. Leading
            dimensions broadcast.
        value: `[..., Hv, S, Ev]`, as key. Hv divides Hq too.
        mask: bool (True: takes part) or floating (added; float32 or query's dtype), broadcastable to `[..., Hq, L, S]`,
            never expanded or copied. A float mask gets its gradient in its own shape.
        causal: query sees keys j <= p.
        window: (left, right), each an int >= 0 or None (no bound): query sees p - left <= j <= p + right.
        alignment: "upper_left" or "lower_right".
        query_spans: int32 `[..., 1 or Hq, L, 2 or 4]`: one or two intervals [begin, end) of keys that each query may see;
            leading dimensions broadcast, bounds are clamped. `flash_online.spans` makes them.
        key_spans: int32 `[..., 1 or Hq, S, 2 or 4]`: the intervals of queries that may see each key, likewise.
        blocks: a `flash_online.BlockList`: a block of queries sees the listed blocks of keys alone.
        softcap: limits scores to (-softcap, softcap) with a tanh; 0 is none.
        alibi_slopes: `[Hq]` or `[..., Hq]`, positive slopes; no gradient.
        sinks: `[Hq]`, one logit per head that joins the denominator only; differentiable. Zeros add one to it: softmax1.
        dropout_p: probability that a weight is dropped, applied whenever > 0; draws one (seed, offset) from torch's default
            generator of the device.
        scale: 1 / sqrt(E) if None.
        return_lse: also return the logarithm of each query's denominator.
        return_max_logit: also return each head's largest score, as Muon's QK-clip asks for it (arXiv 2507.20534).
        deterministic: True makes the backward pass reproducible bit for bit; None follows
            `torch.are_deterministic_algorithms_enabled()`. On the CPU it always is.

    Returns:
        out `[..., Hq, L, Ev]` of query's dtype and order of strides; a query that sees nothing gets 0. With `return_lse`
        also lse `[..., Hq, L]`, natural logarithm, float32 (float64 for float64); -inf where a query sees nothing. With
        `return_max_logit` last max_logit `[..., Hq]`, float32, without a gradient: the largest score that a query of the head
        sees, after scale, softcap, ALiBi and mask, without sinks; -inf where none sees anything, NaN if a score is NaN.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above.
        NotImplementedError: the device has no kernel for this call.

    Float32 on CUDA has float32's precision, unless torch allows tf32 (`torch.backends.cuda.matmul.fp32_precision = "tf32"` or
    `allow_tf32 = True`) when the forward pass is called: products may then round their factors to 16 significant bits of 24.

    Source: FlashAttention (arXiv 2205.14135), FlashAttention-2 (arXiv 2307.08691); ALiBi, arXiv 2108.12409.
    """
    _check_keywords(blocks, others)
    softcap = none_as_zero(softcap)
    plain = window is alibi_slopes is sinks is deterministic is None and alignment == "upper_left"
    plain = plain and type(softcap) in NUMBERS and type(dropout_p) in NUMBERS and type(causal) is bool
    if plain and return_lse is return_max_logit is False and not (softcap or dropout_p):
        if query_spans is not None or key_spans is not None or blocks is not None:
            out = try_fast_sparse(query, key, value, query_spans, key_spans, blocks, causal, scale) if mask is None else None
        elif mask is None:
            out = try_fast_path(query, key, value, causal, scale, True)
        else:
            out = try_fast_masked(query, key, value, mask, causal, scale, True)
        if out is not None:
            return out
    check_attention(
        query, key, value, mask, -3, causal=causal, window=window, alignment=alignment, softcap=softcap, scale=scale,
        alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, return_lse=return_lse, deterministic=deterministic,
        query_spans=query_spans, key_spans=key_spans, return_max_logit=return_max_logit,
    )  # fmt: skip
    query, key, value, mask, restore = canonicalize(*cast_and_check("attention", query, key, value, mask, dropout_p))
    heads = query.shape[:-2]
    out, lse, max_logit = attention_impl(
        query, key, value, mask, alibi_slopes=None if alibi_slopes is None else expand_slopes(alibi_slopes, heads),
        sinks=expand_sinks(sinks, heads[-1]),
        causal=causal, window=window or (None, None), lower_right=alignment == "lower_right", scale=scale, softcap=softcap,
        dropout_p=dropout_p, deterministic=deterministic, return_lse=return_lse,
        query_spans=canonical_spans("query_spans", query_spans, query, heads, query.shape[-2]),
        key_spans=canonical_spans("key_spans", key_spans, query, heads, key.shape[-2]),
        tiles=tiles_of_blocks(blocks, query, heads, query.shape[-2], key.shape[-2]), return_max_logit=return_max_logit,
    )  # fmt: skip
    return results_of(
        restore(out), restore(lse) if return_lse else None, max_logit if max_logit is None else restore(max_logit)
    )


def _check_keywords(blocks: object, others: dict[str, object]) -> None:
    if others:
        raise unexpected_keyword("attention", next(iter(others)))
    check_blocks(blocks)


def results_of(out: Tensor, lse: Tensor | None, max_logit: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """What a call returns: `out`, and with it the others that were asked for."""
    if lse is None and max_logit is None:
        return out
    return tuple(result for result in (out, lse, max_logit) if result is not None)


# A call takes the first of these paths that supports it. Each path is a few microseconds shorter than the next.
#
# | path                | tensors                    | options               | derivatives                            |
# |---------------------|----------------------------|-----------------------|----------------------------------------|
# | _run_inference      | plain (try_fast_path)      | causal, scale         | none                                   |
# | _infer              | plain (try_fast_masked)    | mask, causal, scale   | none                                   |
# | _infer              | plain (try_fast_sparse)    | sparse, causal, scale | none                                   |
# | _lean_attention     | plain (try_fast_path)      | causal, scale         | autograd, outside torch.func           |
# | attention_inference | canonicalized              | causal, scale         | none, or the dispatcher's              |
# | ..._with_options    | canonicalized              | all but dropout       | none, or the dispatcher's              |
# | _attention          | canonicalized              | all                   | all                                    |


def try_fast_path(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, groups: bool) -> Tensor | None:
    """Attention of plain tensors without options: one operator call, which takes 1 microsecond instead of 20 for all checks.

    It takes tensors that need no view and no cast: plain ones of one rank >= 4 with equal batch dimensions. It returns None for
    any other call: the caller then runs all checks, and broadcasts or raises. `groups`: key and value may have fewer heads than
    query.
    """
    # Under the drop-in's name float64 on CUDA is not plain: the drop-in forwards it, and `attention` runs all checks.
    if not are_plain("scaled_dot_product_attention", query, (key, value)):
        return None
    shape, key_shape, value_shape = query.shape, key.shape, value.shape
    if shape == key_shape == value_shape:
        if len(shape) < 4:
            return None
    elif not _shapes_fit(shape, key_shape, value_shape, groups):
        return None
    if scale is None:
        scale = default_scale(shape[-1])
    elif type(scale) is not float:
        return None
    tf32 = tf32_for(query)
    try:
        if is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            tensors = unwrap_if_dead(query), unwrap_if_dead(key), unwrap_if_dead(value)
            return _lean_attention(*tensors, (causal, scale, tf32))
        return _run_inference(query, key, value, causal, scale, tf32)
    except RuntimeError as error:
        raise surfaced(error, query) from None


def try_fast_masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, causal: bool, scale: float | None, groups: bool
) -> Tensor | None:
    """`try_fast_path` with a bool mask, or one of query's dtype, for calls without a gradient: steps of generation over padded
    or static caches. The mask has the scores' rank and broadcasts to them."""
    if type(mask) is not Tensor or mask.layout is not torch.strided or mask.is_nested:
        return None
    if not are_plain("scaled_dot_product_attention", query, (key, value)):
        return None
    if is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad or mask.requires_grad):
        return None
    shape, key_shape, value_shape, mask_shape, dtype = query.shape, key.shape, value.shape, mask.shape, mask.dtype
    if dtype is not torch.bool and dtype is not query.dtype:
        return None
    if mask.get_device() != query.get_device() or mask.is_cpu is not query.is_cpu:  # meta has the CPU's number
        return None
    if len(shape) != 4 or len(mask_shape) != 4 or not _shapes_fit(shape, key_shape, value_shape, groups):
        return None
    full = (*shape[:3], key_shape[2])
    if 0 in full or any(size != 1 and size != most for size, most in zip(mask_shape, full, strict=True)):
        return None
    if scale is None:
        scale = default_scale(shape[-1])
    elif type(scale) is not float:
        return None
    try:
        return _infer(query, key, value, mask, causal, scale, (None, None, None))
    except RuntimeError as error:
        raise surfaced(error, query) from None


def try_fast_sparse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_spans: Tensor | None,
    key_spans: Tensor | None,
    blocks: BlockList | None,
    causal: bool,
    scale: float | None,
) -> Tensor | None:
    """`try_fast_path` with spans of two to four dimensions, and with a list as `try_fast_tiles` takes it. The operator checks
    what the spans are; where it refuses them, the full checks say why."""
    if not are_plain("scaled_dot_product_attention", query, (key, value)):
        return None
    shape, key_shape, value_shape = query.shape, key.shape, value.shape
    if len(shape) != 4 or 0 in shape or 0 in key_shape or not _shapes_fit(shape, key_shape, value_shape, True):
        return None
    whole = []
    for spans in (query_spans, key_spans):
        if spans is not None:
            if type(spans) is not Tensor or spans.layout is not torch.strided or spans.is_nested:
                return None
            if spans.get_device() != query.get_device() or spans.is_cpu is not query.is_cpu:  # meta has the CPU's number
                return None
            rank = spans.dim()
            if rank != 4:
                if not 2 <= rank < 4:
                    return None
                spans = spans[(None,) * (4 - rank)]
        whole.append(spans)
    if scale is None:
        scale = default_scale(shape[-1])
    elif type(scale) is not float:
        return None
    tiles = None if blocks is None else try_fast_tiles(blocks, query, shape, key_shape[2])
    if tiles is None and blocks is not None:
        return None
    try:
        if is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            options = plain_options(causal, scale, tf32_for(query))
            return _attention(query, key, value, None, None, None, None, *whole, tiles, options)[0]
        return _infer(query, key, value, None, causal, scale, (*whole, tiles))
    except RuntimeError as error:
        if str(error).startswith(("query_spans:", "key_spans:")):
            return None
        raise surfaced(error, query) from None


def _infer(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, sparsity) -> Tensor:
    """The output alone of a plain call without a gradient. `sparsity`: query_spans, key_spans, tiles."""
    options = (mask, None, None, -1, 0 if causal else -1, False, scale, 0.0, tf32_for(query))
    return _run_inference_with_options(query, key, value, *options, *sparsity, False)[0]


def _shapes_fit(shape: torch.Size, key_shape: torch.Size, value_shape: torch.Size, groups: bool) -> bool:
    """Returns whether query, key and value of these shapes need no broadcasting, and their heads fit."""
    if not 4 <= len(shape) == len(key_shape) == len(value_shape):
        return False
    if len(shape) == 4:  # usual, and three lists shorter
        batch, heads, _, width = shape
        key_batch, key_heads, keys, key_width = key_shape
        value_batch, value_heads, values, _ = value_shape
    else:
        *batch, heads, _, width = shape
        *key_batch, key_heads, keys, key_width = key_shape
        *value_batch, value_heads, values, _ = value_shape
    if not (batch == key_batch == value_batch and width == key_width and keys == values):
        return False
    if heads == key_heads == value_heads:
        return True
    return groups and key_heads > 0 and value_heads > 0 and heads > 0 and heads % key_heads == heads % value_heads == 0


def _train(query, key, value, options):
    """The forward pass of `lean` for the calls of `try_fast_path`: `out` is its only output."""
    causal, scale, tf32 = options
    out, stats = _run_training(query, key, value, causal, scale, tf32)
    return out, (query, key, value, out, stats), (causal, scale, _is_deterministic(), tf32)


_is_deterministic = torch.are_deterministic_algorithms_enabled
_run_inference, _run_training = below_autograd(ops.attention_inference), below_autograd(ops.attention_training)
_run_inference_with_options = below_autograd(ops.attention_inference_with_options)
_run_training_backward = below_autograd(ops.attention_training_backward)


def attention_impl(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    lower_right: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    rng: Tensor | None = None,
    query_spans: Tensor | None = None,
    key_spans: Tensor | None = None,
    tiles: Tensor | None = None,
    return_max_logit: bool = False,
    operator: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(out, lse, max_logit) of tensors in the form that `canonicalize` returns. Without `return_lse`, lse may be None; without
    `return_max_logit`, max_logit is. `rng` is the result of `draw_rng`, drawn here if None; `operator` computes the result
    without max_logit: the differentiable `Attention` if None."""
    accumulator = accumulator_of(query.dtype)
    left, right = window_bounds(window)
    tf32 = tf32_for(query)
    scale = operator_scale(query, scale)
    alibi_slopes = None if alibi_slopes is None else alibi_slopes.to(accumulator)
    sinks = None if sinks is None else sinks.to(accumulator).contiguous()
    if operator is deterministic is None and not (dropout_p or return_max_logit):
        # A trace by torch.jit is compared with one of inputs that require no gradient.
        if _policy.traced_by_jit() is not None or not requires_grad((query, key, value, mask, sinks)):
            options = (mask, alibi_slopes, sinks, left, 0 if causal else right, lower_right, scale, float(softcap), tf32)
            options += (query_spans, key_spans, tiles)
            plain = mask is alibi_slopes is sinks is query_spans is key_spans is tiles is None
            if plain and tuple(window) == (None, None) and not (lower_right or softcap or return_lse):
                arguments = (query, key, value, causal, scale, tf32)
                return _without_gradient(ops.attention_inference, _run_inference, *arguments), None, None
            arguments = (query, key, value, *options)
            return *_without_gradient(ops.attention_inference_with_options, _run_inference_with_options, *arguments), None
    compute = _attention_with_max_logit if return_max_logit else operator or _attention
    out, lse, _, *max_logit = compute(
        query,
        key,
        value,
        mask,
        alibi_slopes,
        sinks,
        draw_rng(dropout_p, query.device) if rng is None else rng,
        query_spans,
        key_spans,
        tiles,
        AttentionOptions(
            left, 0 if causal else right, lower_right, scale, float(softcap), float(dropout_p), tf32, deterministic
        ),
    )
    return out, lse, max_logit[0] if max_logit else None


def _without_gradient(operator: torch._ops.OpOverloadPacket, run: Callable, query: Tensor, *arguments):
    if dispatches():
        return dispatch(operator.default, query, *arguments)
    try:
        return run(query, *arguments)
    except RuntimeError as error:
        raise surfaced(error, query) from None


def tf32_for(query: Tensor) -> bool:
    """Returns whether matrix products may round float32 further: only for float32 on CUDA, where torch's setting allows
    tf32."""
    return query.is_cuda and query.dtype is torch.float32 and tf32_allowed()


def tf32_allowed() -> bool:
    """Returns whether torch.backends.cuda.matmul.fp32_precision is "tf32". allow_tf32 sets it too, but reading allow_tf32
    raises if both were set."""
    return torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"


# torch.compiler.assume_constant_result would set this attribute too, but imports the compiler. With it, Dynamo calls the
# function while tracing and guards every graph by this setting.
tf32_allowed._dynamo_marked_constant = True


def operator_scale(query: Tensor, scale: float | None) -> float | None:
    """`scale` as the raw operators take it. A graph leaves the default to them, so that it is valid for any head dim."""
    if scale is not None:
        return float(scale)
    return None if torch.compiler.is_compiling() or _policy.traced_by_jit() is not None else default_scale(query.shape[-1])


def draw_rng(dropout_p: float, device: torch.device) -> Tensor | None:
    """The (seed, offset) of dropout, int64 [2]: one draw per call from torch's default generator of the device."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device) if dropout_p > 0 else None


class Attention(Description):
    """(*AttentionTensors, options) -> (out, lse, lse_low); csrc/ops/library.cpp documents the operator."""

    operator = ops.attention_forward

    @staticmethod
    def inputs(query, key, value, mask, alibi_slopes, sinks, rng, *options):
        count = len(AttentionOptions._fields)
        options, spans = options[:count], options[count:]
        return *AttentionTensors(query, key, value, mask, alibi_slopes, sinks, rng, *spans), AttentionOptions(*options)

    @staticmethod
    def arguments(*inputs):
        *tensors, query_spans, key_spans, tiles, options = inputs
        return *tensors, *options, *given_sparsity(query_spans, key_spans, tiles)

    @staticmethod
    def save(ctx, inputs, outputs):
        *tensors, ctx.options = inputs
        ctx.deterministic = is_deterministic(ctx.options.deterministic)
        ctx.set_materialize_grads(False)
        return *tensors, *outputs

    @staticmethod
    def backward(ctx, grad_out, grad_lse, _):
        *tensors, out, lse, lse_low = ctx.saved_tensors
        if grad_out is None:
            if grad_lse is None:
                return (None,) * 11
            grad_out = torch.zeros_like(out)
        _, _, _, mask_grad, *_ = ctx.needs_input_grad
        results = (out, lse, lse_low)
        grads = _attention_backward(grad_out, grad_lse, *tensors, *results, ctx.options, mask_grad, ctx.deterministic)
        grad_query, grad_key, grad_value, grad_mask, grad_sinks = grads
        sinks = AttentionTensors(*tensors).sinks
        grad_mask, grad_sinks = grad_mask if mask_grad else None, None if sinks is None else grad_sinks
        return grad_query, grad_key, grad_value, grad_mask, None, grad_sinks, None, None, None, None, None

    @staticmethod
    def jvp(ctx, *tangents):
        *tensors, out, _, _ = ctx.saved_tensors
        *tangents, _ = tangents
        d_out, d_lse, _ = gradient_jvp(AttentionTensors(*tensors), ctx.options, AttentionTensors(*tangents))
        return in_strides_of(out, d_out), d_lse, torch.zeros_like(d_lse)  # lse_low has no derivative


def with_max_logit(function: type, forward):
    """`function`, Attention or one like it, whose operator is `forward`: with max_logit, which has no derivative, as a further
    result."""

    class WithMaxLogit(function):
        operator = forward

        @staticmethod
        def save(ctx, inputs, outputs):
            *results, max_logit = outputs
            ctx.mark_non_differentiable(max_logit)
            return function.save(ctx, inputs, results)

        @staticmethod
        def backward(ctx, *grads):
            return function.backward(ctx, *grads[:-1])

        @staticmethod
        def jvp(ctx, *tangents):
            return *function.jvp(ctx, *tangents), None

    return differentiable(WithMaxLogit)


class _AttentionTraining(Description):
    """(query, key, value, causal, scale, tf32) -> (out, stats): Attention without options."""

    operator = ops.attention_training

    @staticmethod
    def save(ctx, inputs, outputs):
        *tensors, causal, scale, tf32 = inputs
        ctx.options, ctx.deterministic = plain_options(causal, scale, tf32), is_deterministic(None)
        ctx.set_materialize_grads(False)
        return *tensors, *outputs

    @staticmethod
    def backward(ctx, grad_out, grad_stats):
        query, key, value, out, stats = ctx.saved_tensors
        if grad_out is None:
            if grad_stats is None:
                return (None,) * 6
            grad_out = torch.zeros_like(out)
        options = ctx.options
        if grad_stats is None:
            arguments = (grad_out, query, key, value, out, stats, options.window_right == 0, options.scale, ctx.deterministic)
            return *_training_backward(*arguments, options.tf32), None, None, None
        grad_lse, _ = grad_stats.chunk(2)
        tensors = (grad_out, grad_lse, query, key, value, *(None,) * 7, out, *stats.chunk(2))
        grad_query, grad_key, grad_value, *_ = _attention_backward(*tensors, options, False, ctx.deterministic)
        return grad_query, grad_key, grad_value, None, None, None

    @staticmethod
    def jvp(ctx, d_query, d_key, d_value, *_):
        *tensors, out, _ = ctx.saved_tensors
        none = (None,) * 4
        tensors, tangents = AttentionTensors(*tensors, *none), AttentionTensors(d_query, d_key, d_value, *none)
        d_out, d_lse, _ = gradient_jvp(tensors, ctx.options, tangents)
        return in_strides_of(out, d_out), torch.cat([d_lse, torch.zeros_like(d_lse)])


def plain_options(causal: bool, scale: float | None, tf32: bool) -> AttentionOptions:
    """The options of a call that has only these."""
    return AttentionOptions(-1, 0 if causal else -1, False, scale, 0.0, 0.0, tf32)


def is_deterministic(asked: bool | None) -> bool:
    """Returns whether the backward pass must repeat bit for bit, given the caller's `deterministic`."""
    return torch.are_deterministic_algorithms_enabled() if asked is None else asked


class _AttentionBackward(Description):
    """The gradients of Attention's inputs, as a function of these inputs and of the gradients of out and lse:
    (grad_out, grad_lse, *AttentionTensors, out, lse, lse_low, options, mask_grad, deterministic) -> AttentionGradients.

    out, lse and lse_low are arguments only so that the kernel need not recompute them: they have no derivatives.
    """

    operator = ops.attention_backward

    @staticmethod
    def inputs(*arguments):
        (grad_out, grad_lse, *tensors), options, spans = arguments[:12], arguments[12:21], arguments[21:]
        spans = (*spans, None, None, None)[:3]
        left, right, lower_right, scale, softcap, dropout_p, mask_grad, deterministic, tf32 = options
        options = AttentionOptions(left, right, lower_right, scale, softcap, dropout_p, tf32)
        return grad_out, grad_lse, *tensors[:7], *spans, *tensors[7:], options, mask_grad, deterministic

    @staticmethod
    def arguments(*inputs):
        *tensors, query_spans, key_spans, tiles, out, lse, lse_low, options, mask_grad, deterministic = inputs
        options = options.for_backward(mask_grad, deterministic)
        return *tensors, out, lse, lse_low, *options, *given_sparsity(query_spans, key_spans, tiles)

    @staticmethod
    def save(ctx, inputs, outputs):
        *tensors, _, _, _, ctx.options, ctx.mask_grad, _ = inputs
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx, *cotangents):
        # The map from inputs to gradients is the gradient of F = <out, grad_out> + <lse, grad_lse>. Its Jacobian in the inputs
        # is the Hessian of F, which is symmetric, so that its product with cotangents is the derivative in their direction. The
        # Jacobian in grad_out and grad_lse is the transpose of the Jacobian of (out, lse): the products are d_out and d_lse.
        grad_out, grad_lse, *tensors = ctx.saved_tensors
        tensors, cotangents = AttentionTensors(*tensors), AttentionGradients(*cotangents)
        # The operator returns an empty tensor for an unwanted gradient; its tangent is None.
        tangents = AttentionTensors(
            cotangents.query,
            cotangents.key,
            cotangents.value,
            mask=cotangents.mask if ctx.mask_grad else None,
            alibi_slopes=None,
            sinks=None if tensors.sinks is None else cotangents.sinks,
            rng=None,
        )
        d_out, d_lse, d_grads = gradient_jvp(tensors, ctx.options, tangents, grad_out, grad_lse)
        return (
            *(d_out, None if grad_lse is None else d_lse),
            *(d_grads.query, d_grads.key, d_grads.value, d_grads.mask, None, d_grads.sinks, None),
            *(None,) * 9,  # spans, tiles; out, lse, lse_low; options, mask_grad, deterministic
        )

    @staticmethod
    def jvp(ctx, d_grad_out, d_grad_lse, *tangents):
        grad_out, grad_lse, *tensors = ctx.saved_tensors
        *tangents, _, _, _, _, _, _ = tangents
        _, _, d_grads = gradient_jvp(
            *(AttentionTensors(*tensors), ctx.options, AttentionTensors(*tangents)), grad_out, grad_lse, d_grad_out, d_grad_lse
        )
        empty = grad_out.new_empty(0)
        no_sinks = empty.to(accumulator_of(empty.dtype))
        return d_grads._replace(
            mask=d_grads.mask if ctx.mask_grad else empty, sinks=no_sinks if d_grads.sinks is None else d_grads.sinks
        )


_attention, _training = differentiable(Attention), differentiable(_AttentionTraining)
_attention_with_max_logit = with_max_logit(Attention, ops.attention_forward_with_max_logit)
_attention_backward = differentiable(_AttentionBackward)


@composite(ops.attention_inference)
def _inference(query, key, value, causal, scale, tf32):
    out, _ = ops.attention_training.default(query, key, value, causal, scale, tf32)
    return out


@composite(ops.attention_inference_with_options)
def _inference_with_options(
    query, key, value, mask, alibi_slopes, sinks, left, right, lower_right, scale, softcap, tf32, *sparsity_and_return_lse
):  # fmt: skip
    tensors, (*sparsity, return_lse) = (query, key, value, mask, alibi_slopes, sinks, None), sparsity_and_return_lse
    options = (left, right, lower_right, scale, softcap, 0.0, tf32, None, *sparsity)
    out, lse, _ = ops.attention_forward.default(*tensors, *options)
    return out, lse if return_lse else lse.new_empty(0)


@composite(ops.attention_training_backward)
def _training_backward(grad_out, query, key, value, out, stats, causal, scale, deterministic, tf32):
    tensors = (grad_out, None, query, key, value, None, None, None, None, out, *stats.chunk(2))
    options = plain_options(causal, scale, tf32)
    grads = ops.attention_backward.default(*tensors, *options.for_backward(False, deterministic))
    return grads[:3]


_lean_attention = lean("LeanAttention", _train, _run_training_backward, _training_backward)
