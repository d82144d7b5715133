"""Attention with every option, the merge of partial results, and their derivatives of first and second order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _shapes, plan
from ._autograd import differentiable, eager_transforms_active, transforms_active
from ._ops import InvalidArgument, accumulator_of, ops


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "upper_left",
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, block by block, in memory linear in the lengths.

    Query i stands at position p = i (`alignment="upper_left"`) or p = i + S - L (`"lower_right"`). A score is
    `scale * query . key`, then `softcap * tanh(score / softcap)`, then ALiBi's `-slope * |p - j|`, then the float mask;
    keys outside the causal rule, the window or a bool mask are hidden. The rules combine by "and".

    Args:
        query: `[..., Hq, L, E]`; float16, bfloat16, float32 or float64; any strides.
        key: `[..., Hk, S, E]`, value: `[..., Hv, S, Ev]`, of query's dtype and device. Hk and Hv divide Hq; query head h
            uses key head `h // (Hq / Hk)`. Leading dimensions broadcast.
        mask: bool (True: takes part) or floating (added; float32 or query's dtype), broadcastable to `[..., Hq, L, S]`,
            never expanded or copied. A float mask gets its gradient in its own shape.
        causal: query sees keys j <= p.
        window: (left, right), each an int >= 0 or None (no bound): query sees p - left <= j <= p + right.
        alignment: "upper_left" or "lower_right".
        softcap: bends scores to (-softcap, softcap); 0 is none.
        alibi_slopes: `[Hq]` or `[..., Hq]`, positive slopes; no gradient.
        sinks: `[Hq]`, a logit a head that joins the denominator only; differentiable.
        dropout_p: probability that a weight is dropped, applied whenever > 0; draws one (seed, offset) from torch's default
            generator of the device.
        scale: 1 / sqrt(E) if None.
        return_lse: also return the logarithm of each query's denominator.
        deterministic: None follows `torch.are_deterministic_algorithms_enabled()`; True makes the backward pass repeat bit for
            bit. On the CPU it always does.

    Returns:
        out `[..., Hq, L, Ev]` of query's dtype and order of strides; a query that sees nothing gets 0. With `return_lse`
        also lse `[..., Hq, L]`, natural logarithm, float32 (float64 for float64); -inf where a query sees nothing.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above.
        NotImplementedError: the device has no kernel for this call.

    float32 on CUDA has float32's digits, unless torch allows tf32 for matrix products
    (`torch.backends.cuda.matmul.fp32_precision = "tf32"` or `allow_tf32 = True`) when the forward pass is called: then products
    may be made of numbers of 16 digits, float32's being 24 and tf32's 11.

    Source: FlashAttention (arXiv 2205.14135), FlashAttention-2 (arXiv 2307.08691); ALiBi, arXiv 2108.12409.
    """
    if mask is window is alibi_slopes is sinks is deterministic is None and alignment == "upper_left":
        if not (softcap or dropout_p or return_lse):
            out = usual(query, key, value, bool(causal), scale, True)
            if out is not None:
                return out
    _check_options(query, -3, causal, window, alignment, softcap, sinks, alibi_slopes, dropout_p)
    query, key, value, mask = _shapes.autocast(query, key, value, mask)
    _shapes.check_kinds(query, key, value, mask)
    plan.require_kernel("attention", query, key, value, mask)
    query, key, value, mask, restore = _shapes.canonicalize(query, key, value, mask)
    if alibi_slopes is not None:
        if _shapes.broadcast("query, alibi_slopes", query.shape[:-2], alibi_slopes.shape) != query.shape[:-2]:
            raise InvalidArgument(
                f"alibi_slopes: got {list(alibi_slopes.shape)}; accepted are [Hq] and [..., Hq] of query's batch"
            )
        alibi_slopes = alibi_slopes.expand(query.shape[:-2])
    out, lse = _attend(
        query,
        key,
        value,
        mask,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        causal=causal,
        window=window or (None, None),
        lower_right=alignment == "lower_right",
        scale=scale,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=return_lse,
    )
    return (restore(out), restore(lse)) if return_lse else restore(out)


def merge_attention(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Merges partial attention results over disjoint keys, exactly: the result over all the keys.

    Args:
        outs: partial outputs `[..., Ev]` of one shape and dtype: a sequence, or stacked along dim 0.
        lses: their lse `[...]` = outs' shape without the last dimension, float32 (float64 for float64 outs), likewise.

    Returns:
        (out, lse) of one part's shapes, out in the parts' dtype. A row that is empty in every part (lse -inf) is 0 and -inf.
        Differentiable in all outs and lses.

    Source: Milakov and Gimelshein, arXiv 1805.02867, section 3.1: the merge of (m, d), with the output riding along.
    """
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise InvalidArgument(f"outs: got {len(outs)} partial results and {len(lses)} lses; accepted are as many, at least one")
    for n, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or out.dtype != outs[0].dtype or out.device != outs[0].device or out.dim() < 1:
            raise InvalidArgument(
                f"outs[{n}]: got {list(out.shape)} {out.dtype} on {out.device}; accepted is what outs[0] is: "
                f"{list(outs[0].shape)} {outs[0].dtype} on {outs[0].device}"
            )
        if lse.shape != out.shape[:-1] or lse.dtype != accumulator_of(out.dtype) or lse.device != out.device:
            raise InvalidArgument(
                f"lses[{n}]: got {list(lse.shape)} {lse.dtype} on {lse.device}; accepted is {list(out.shape[:-1])} "
                f"{accumulator_of(out.dtype)} on {out.device}"
            )
    plan.require_kernel("merge_attention", *outs)
    return _merge(*outs, *lses)


def _check_options(query, head_dim, causal, window, alignment, softcap, sinks, alibi_slopes, dropout_p) -> None:
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise InvalidArgument(f"window: got {window!r}; accepted are None and a pair (left, right)")
        for side, bound in zip(("left", "right"), window, strict=True):
            if bound is not None and (not isinstance(bound, (int, torch.SymInt)) or bound < 0):
                raise InvalidArgument(f"window: {side} is {bound}; accepted are None and integers >= 0")
    if alignment not in ("upper_left", "lower_right"):
        raise InvalidArgument(f"alignment: got {alignment!r}; accepted are 'upper_left' and 'lower_right'")
    if not softcap >= 0 or softcap == math.inf:
        raise InvalidArgument(f"softcap: got {softcap}; accepted are 0 (none) and finite numbers above")
    if not 0 <= dropout_p <= 1:
        raise InvalidArgument(f"dropout_p: got {dropout_p}; accepted are probabilities, 0 to 1")
    heads = query.shape[head_dim] if query.dim() >= -head_dim else 1
    if sinks is not None and (tuple(sinks.shape) != (heads,) or not sinks.is_floating_point() or sinks.device != query.device):
        raise InvalidArgument(
            f"sinks: got {list(sinks.shape)} {sinks.dtype} on {sinks.device}; accepted is a floating [{heads}], one logit a "
            f"query head, on {query.device}"
        )
    if alibi_slopes is not None:
        if alibi_slopes.dim() < 1 or alibi_slopes.shape[-1] != heads or not alibi_slopes.is_floating_point():
            raise InvalidArgument(
                f"alibi_slopes: got {list(alibi_slopes.shape)} {alibi_slopes.dtype}; accepted is a floating [{heads}] or "
                f"[..., {heads}], one slope a query head"
            )
        if alibi_slopes.device != query.device:
            raise InvalidArgument(f"alibi_slopes: is on {alibi_slopes.device}; accepted is query's device {query.device}")
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise InvalidArgument("alibi_slopes: requires grad; slopes have no gradient, a learned bias is a float mask")


def usual(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, groups: bool) -> Tensor | None:
    """attention's result for the calls that there are most of, which the operator alone looks at; None for another.

    Those are of plain tensors that it takes as they are; with `groups` key and value may have fewer heads. What it refuses
    gets its error, or is broadcast, on the whole way, which takes 20 microseconds where this one takes 1.
    """
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor:
        return None
    if torch.compiler.is_compiling() or eager_transforms_active() or torch._C._is_any_autocast_enabled():
        return None
    if query.is_meta or key.is_meta or value.is_meta:  # of which the operator makes more of the kind
        return None
    try:
        if not 4 <= query.dim() == key.dim() == value.dim() or not (groups or query.size(-3) == key.size(-3) == value.size(-3)):
            return None
        scale = _default_scale(query.size(-1)) if scale is None else float(scale)
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            return _Usual.apply(query, key, value, (-1, 0 if causal else -1, False, scale, 0.0, 0.0), tf32_for(query))
        return _run_inference(query, key, value, causal, scale, tf32_for(query))
    except RuntimeError:  # nested tensors have no sizes; and there may be no kernel
        return None


class _Usual(torch.autograd.Function):
    """_AttentionOp's output alone, of the call that `usual` takes: autograd looks at inputs and outputs one by one, and each
    step of `backward`, in a thread of its own, costs more than it does elsewhere."""

    @staticmethod
    def forward(ctx, query, key, value, options, tf32):
        out, lse, lse_low = _run(query, key, value, None, None, None, None, *options, tf32)
        ctx.save_for_backward(query, key, value, out, lse, lse_low)
        ctx.options = (*options, False, torch.are_deterministic_algorithms_enabled(), tf32)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, out, lse, lse_low = ctx.saved_tensors
        tensors = (grad_out, None, query, key, value, None, None, None, None, out, lse, lse_low)
        if torch.is_grad_enabled():
            *options, mask_grad, deterministic, tf32 = ctx.options
            grads = _attention_backward(*tensors, mask_grad, *options, deterministic, tf32)
        else:
            grads = _run_backward(*tensors, *ctx.options)
        grad_query, grad_key, grad_value, *_ = grads
        return grad_query, grad_key, grad_value, None, None


_run, _run_backward = ops.attention_forward.default._op, ops.attention_backward.default._op
_run_inference = ops.attention_inference.default._op


def _attend(
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
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of canonical tensors: equal rank >= 4, equal batch dimensions, heads that divide. Without `return_lse` there
    may be no lse."""
    accumulator = accumulator_of(query.dtype)
    left, right = (-1 if bound is None else bound for bound in window)
    scale = _default_scale(query.shape[-1]) if scale is None else float(scale)
    plain = mask is None and alibi_slopes is None and sinks is None and tuple(window) == (None, None)
    if plain and not (lower_right or softcap or dropout_p or return_lse or transforms_active()):
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))):
            return ops.attention_inference.default(query, key, value, causal, scale, tf32_for(query)), None
    out, lse, _ = _attention(
        query,
        key,
        value,
        mask,
        None if sinks is None else sinks.to(accumulator).contiguous(),
        None if alibi_slopes is None else alibi_slopes.to(accumulator),
        _draw(dropout_p, query.device),
        left,
        0 if causal else right,
        lower_right,
        scale,
        float(softcap),
        float(dropout_p),
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        tf32_for(query),
    )
    return out, lse


def tf32_for(query: Tensor) -> bool:
    """Whether products may have fewer digits than query's dtype: of float32 on CUDA, by torch's setting for such products."""
    return query.is_cuda and query.dtype is torch.float32 and tf32_allowed()


def tf32_allowed() -> bool:
    """torch.backends.cuda.matmul's fp32_precision; allow_tf32 sets it too, but cannot be read where both were set."""
    return torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"


# What torch.compiler.assume_constant_result sets, without its import of the compiler: Dynamo calls the function while tracing
# and guards every graph by this setting.
tf32_allowed._dynamo_marked_constant = True


def _draw(dropout_p: float, device: torch.device) -> Tensor | None:
    """Dropout's (seed, offset), one draw a call."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device) if dropout_p > 0 else None


def _default_scale(width) -> float:
    return 1 / math.sqrt(width) if width else 1.0  # of no width every product is 0, and so is every score, as in torch


class _AttentionOp:
    """(out, lse, lse_low) of (query, key, value, mask, sinks, alibi_slopes, rng, *options); see library.cpp."""

    @staticmethod
    def run(query, key, value, mask, sinks, alibi_slopes, rng, *options):
        return ops.attention_forward.default(query, key, value, mask, alibi_slopes, sinks, rng, *options[:-2], options[-1])

    @staticmethod
    def save(ctx, inputs, outputs):
        *tensors, ctx.options = *inputs[:7], inputs[7:]
        ctx.set_materialize_grads(False)
        return *tensors, *outputs

    @staticmethod
    def backward(ctx, grad_out, grad_lse, _):
        query, key, value, mask, sinks, alibi_slopes, rng, out, lse, lse_low = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        mask_grad = ctx.needs_input_grad[3]
        gradients = _attention_backward(
            grad_out, grad_lse, query, key, value, mask, sinks, alibi_slopes, rng, out, lse, lse_low, mask_grad, *ctx.options
        )
        grad_query, grad_key, grad_value, grad_mask, grad_sinks = gradients
        return (
            *(grad_query, grad_key, grad_value),
            grad_mask if mask_grad else None,
            None if sinks is None else grad_sinks,
            *(None for _ in range(2 + len(ctx.options))),
        )

    @staticmethod
    def jvp(ctx, *tangents):
        inputs, directions = ctx.saved_tensors[:7], tangents[:5]
        tangent_out, tangent_lse, *_ = _directional_derivative(inputs, None, None, ctx.options, directions, None, None)
        # lse_low has none; but a mark_non_differentiable does not survive torch.func.vmap, and a None without it is an error.
        return tangent_out, tangent_lse, torch.zeros_like(tangent_lse)


class _AttentionBackwardOp:
    """The gradients of _AttentionOp's inputs, as a function of its inputs and the gradients of out and lse. out, lse and
    lse_low come along to spare recomputing; derivatives go through the inputs alone."""

    @staticmethod
    def run(grad_out, grad_lse, query, key, value, mask, sinks, alibi_slopes, rng, out, lse, lse_low, mask_grad, *options):
        tensors = (grad_out, grad_lse, query, key, value, mask, alibi_slopes, sinks, rng, out, lse, lse_low)
        return ops.attention_backward.default(*tensors, *options[:-2], mask_grad, *options[-2:])

    @staticmethod
    def save(ctx, inputs, outputs):
        ctx.mask_grad, ctx.options = inputs[12], inputs[13:]
        ctx.set_materialize_grads(False)
        return inputs[:9]

    @staticmethod
    def backward(ctx, *cotangents):
        # The map (inputs) -> gradients is the gradient of F = <out, grad_out> + <lse, grad_lse>; its Jacobian in the inputs is
        # F's Hessian, symmetric, so that the product with a cotangent is the derivative in its direction. Across to grad_out
        # and grad_lse the Jacobian is the transpose of (out, lse)'s, whose product is their derivative in that direction.
        grad_out, grad_lse, *inputs = ctx.saved_tensors
        directions = _wanted(ctx, inputs, cotangents)
        derivatives = _directional_derivative(inputs, grad_out, grad_lse, ctx.options, directions, None, None)
        along_out, along_lse, *along_inputs = derivatives
        return (along_out, None if grad_lse is None else along_lse, *along_inputs, *(None for _ in range(6 + len(ctx.options))))

    @staticmethod
    def jvp(ctx, tangent_grad_out, tangent_grad_lse, *tangents):
        grad_out, grad_lse, *inputs = ctx.saved_tensors
        derivatives = _directional_derivative(
            inputs, grad_out, grad_lse, ctx.options, tangents[:5], tangent_grad_out, tangent_grad_lse
        )
        empty = grad_out.new_empty(0)
        gradients = derivatives[2:]
        return (
            *gradients[:3],
            gradients[3] if ctx.mask_grad else empty,
            empty.to(accumulator_of(empty.dtype)) if gradients[4] is None else gradients[4],
        )


def _wanted(ctx, inputs, cotangents):
    """Cotangents of (query, key, value, mask, sinks); an unwanted gradient's has no elements."""
    sinks = inputs[4]
    return (*cotangents[:3], cotangents[3] if ctx.mask_grad else None, None if sinks is None else cotangents[4])


_attention = differentiable(_AttentionOp)
_attention_backward = differentiable(_AttentionBackwardOp)

_CHUNK_SCORES = 1 << 21  # scores that a second derivative holds at a time, over all batches and heads


def _directional_derivative(inputs, grad_out, grad_lse, options, directions, along_grad_out, along_grad_lse, first_batch=0):
    """The derivatives of (out, lse) and, with grad_out, of the gradients of (query, key, value, mask, sinks), in a direction.

    The direction is `directions` = (query, key, value, mask, sinks), `along_grad_out`, `along_grad_lse`, each None for 0. In
    plain differentiable torch, a chunk of queries at a time: O(length) memory plus a chunk. docs/online_softmax.md derives it.
    `first_batch` is the batch index that dropout's draws start from.
    """
    query, key, value, mask, sinks, alibi_slopes, rng = inputs
    left, right, lower_right, scale, softcap, dropout_p, *_ = options
    to_query, to_key, to_value, to_mask, to_sinks = directions
    dtype = accumulator_of(query.dtype)
    heads, queries, keys = query.shape[-3], query.shape[-2], key.shape[-2]
    planes = math.prod(query.shape[:-2])
    device = query.device

    def wide(tensor, group_of=None):
        """In the accumulator's dtype; key and value heads repeated to query's."""
        if tensor is None:
            return None
        tensor = tensor.to(dtype)
        return tensor if group_of is None else tensor.repeat_interleave(heads // group_of.shape[-3], -3)

    k, v, to_k, to_v = wide(key, key), wide(value, value), wide(to_key, key), wide(to_value, value)
    offset = keys - queries if lower_right else 0
    columns = torch.arange(keys, device=device)
    chunk = max(1, _CHUNK_SCORES // max(1, planes * keys))

    def rows(tensor, dim, begin, end):
        """A chunk of a tensor along its queries, or all of one that is broadcast along them."""
        if tensor is None or tensor.shape[dim] == 1:
            return wide(tensor)
        return wide(tensor.narrow(dim, begin, end - begin))

    def plus(total, part):
        return part if total is None else total + part

    outs, lses, grad_queries = [], [], []
    to_grad_key = to_grad_value = to_grad_mask = to_grad_sinks = None
    mask_pieces = []
    for begin in range(0, max(queries, 1), chunk):
        end = min(queries, begin + chunk)
        q, to_q = rows(query, -2, begin, end), rows(to_query, -2, begin, end)
        position = torch.arange(begin, end, device=device).unsqueeze(-1) + offset
        score = (q @ k.mT) * scale
        bend = bend_more = None
        if softcap > 0:
            tanh = torch.tanh(score / softcap)
            score, bend = softcap * tanh, 1 - tanh * tanh
            bend_more = -2 / softcap * tanh * bend
        if alibi_slopes is not None:
            score = score - alibi_slopes[..., None, None] * (position - columns).abs()
        visible = torch.ones((), dtype=torch.bool, device=device)
        if left >= 0:
            visible = visible & (columns >= position - left)
        if right >= 0:
            visible = visible & (columns <= position + right)
        if mask is not None and mask.dtype == torch.bool:
            visible = visible & (mask if mask.shape[-2] == 1 else mask.narrow(-2, begin, end - begin))
        elif mask is not None:
            score = score + rows(mask, -2, begin, end)
        score = score.masked_fill(~visible, -math.inf)
        sink = None if sinks is None else wide(sinks)[:, None, None]
        joined = score if sink is None else torch.cat([score, sink.expand(*score.shape[:-1], 1)], -1)
        if joined.shape[-1] == 0:
            top = joined.new_zeros(*joined.shape[:-1], 1)
        else:
            top = joined.detach().amax(-1, keepdim=True)
            top = top.masked_fill(top == -math.inf, 0)
        weight = torch.exp(joined - top)
        total = weight.sum(-1, keepdim=True)
        weight = weight / total.masked_fill(total == 0, 1)
        sink_weight = None if sink is None else weight[..., -1:]
        weight = weight[..., :keys]
        keep = None
        if dropout_p > 0:
            shape = (first_batch, planes // heads, heads, begin, end - begin, keys)
            keep = ops.attention_dropout_mask.default(rng, *shape, dropout_p)
            keep = keep.view(score.shape).to(dtype) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
        dropped = weight if keep is None else weight * keep

        # The direction of the scores, of the weights and of the results.
        to_product = torch.zeros_like(score)
        if to_q is not None:
            to_product = to_product + to_q @ k.mT
        if to_k is not None:
            to_product = to_product + q @ to_k.mT
        to_product = to_product * scale
        to_score = to_product if bend is None else bend * to_product
        if to_mask is not None:
            to_score = to_score + rows(to_mask, -2, begin, end)
        # A hidden score stays hidden: it has no direction, whatever its query and key do.
        to_score = torch.where(visible, to_score, 0)
        to_lse = (weight * to_score).sum(-1, keepdim=True)
        if sink is not None and to_sinks is not None:
            to_lse = to_lse + sink_weight * wide(to_sinks)[:, None, None]
        to_weight = weight * (to_score - to_lse)
        to_dropped = to_weight if keep is None else to_weight * keep
        along_out = to_dropped @ v
        if to_v is not None:
            along_out = along_out + dropped @ to_v
        outs.append(along_out)
        lses.append(to_lse.squeeze(-1))
        if grad_out is None:
            continue

        # The backward pass of the chunk, and its derivative line by line.
        g, to_g = rows(grad_out, -2, begin, end), rows(along_grad_out, -2, begin, end)
        h, to_h = rows(grad_lse, -1, begin, end), rows(along_grad_lse, -1, begin, end)
        grad_weight, to_grad_weight = g @ v.mT, torch.zeros_like(score)
        if to_g is not None:
            to_grad_weight = to_grad_weight + to_g @ v.mT
        if to_v is not None:
            to_grad_weight = to_grad_weight + g @ to_v.mT
        if keep is not None:
            grad_weight, to_grad_weight = grad_weight * keep, to_grad_weight * keep
        shared = -(weight * grad_weight).sum(-1, keepdim=True)  # grad_lse - delta
        to_shared = -(to_weight * grad_weight + weight * to_grad_weight).sum(-1, keepdim=True)
        if h is not None:
            shared = shared + h.unsqueeze(-1)
        if to_h is not None:
            to_shared = to_shared + to_h.unsqueeze(-1)
        grad_score = weight * (grad_weight + shared)
        to_grad_score = to_weight * (grad_weight + shared) + weight * (to_grad_weight + to_shared)
        grad_product, to_grad_product = grad_score, to_grad_score
        if bend is not None:
            grad_product = grad_score * bend
            to_grad_product = to_grad_score * bend + grad_score * bend_more * to_product
        grad_product, to_grad_product = grad_product * scale, to_grad_product * scale

        along = to_grad_product @ k
        if to_k is not None:
            along = along + grad_product @ to_k
        grad_queries.append(along)
        along = to_grad_product.mT @ q
        if to_q is not None:
            along = along + grad_product.mT @ to_q
        to_grad_key = plus(to_grad_key, along)
        along = to_dropped.mT @ g
        if to_g is not None:
            along = along + dropped.mT @ to_g
        to_grad_value = plus(to_grad_value, along)
        if mask is not None and mask.dtype != torch.bool:
            shape = list(mask.shape)
            if shape[-2] != 1:
                shape[-2] = end - begin
                mask_pieces.append(to_grad_score.sum_to_size(shape))
            else:
                to_grad_mask = plus(to_grad_mask, to_grad_score.sum_to_size(shape))
        if sink is not None:
            to_sink_weight = -sink_weight * to_lse
            if to_sinks is not None:
                to_sink_weight = to_sink_weight + sink_weight * wide(to_sinks)[:, None, None]
            along = to_sink_weight * shared + sink_weight * to_shared
            to_grad_sinks = plus(to_grad_sinks, along.sum([d for d in range(along.dim()) if d != along.dim() - 3]))

    def ungroup(tensor, like):
        """Sums the query heads that share a head of `like`."""
        shape = (*tensor.shape[:-3], like.shape[-3], heads // like.shape[-3], *tensor.shape[-2:])
        return tensor.reshape(shape).sum(-3).to(like.dtype)

    out, lse = torch.cat(outs, -2).to(query.dtype), torch.cat(lses, -1)
    if grad_out is None:
        return out, lse
    if mask_pieces:
        to_grad_mask = torch.cat(mask_pieces, -2)
    return (
        out,
        lse,
        torch.cat(grad_queries, -2).to(query.dtype),
        ungroup(to_grad_key, key),
        ungroup(to_grad_value, value),
        None if to_grad_mask is None else to_grad_mask.to(mask.dtype),
        to_grad_sinks,
    )


class _MergeOp:
    """(out, lse) of (*outs, *lses)."""

    @staticmethod
    def run(*parts):
        count = len(parts) // 2
        return ops.attention_merge.default(list(parts[:count]), list(parts[count:]))

    @staticmethod
    def save(ctx, inputs, outputs):
        return inputs

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        parts = ctx.saved_tensors
        count = len(parts) // 2
        outs, lses = list(parts[:count]), list(parts[count:])
        if not torch.compiler.is_compiling() and (
            torch.is_grad_enabled()
            # autograd's own batching (is_grads_batched), which knows no operators of lists
            or any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in (grad_out, grad_lse))
        ):
            return _merge_gradients(grad_out, grad_lse, outs, lses)
        grad_outs, grad_lses = ops.attention_merge_backward.default(grad_out, grad_lse, outs, lses)
        return (*grad_outs, *grad_lses)

    @staticmethod
    def jvp(ctx, *tangents):
        parts = ctx.saved_tensors
        count = len(parts) // 2
        shares, out = _merge_shares(parts[:count], parts[count:])
        to_lse = sum(share * tangent for share, tangent in zip(shares, tangents[count:], strict=True))
        to_out = sum(
            share.unsqueeze(-1) * (to_part + (part - out) * to_part_lse.unsqueeze(-1))
            for share, part, to_part, to_part_lse in zip(shares, parts[:count], tangents[:count], tangents[count:], strict=True)
        )
        return to_out.to(parts[0].dtype), to_lse


def _merge_shares(outs, lses):
    """What each part counts for, and the merged out in the lses' dtype; differentiable."""
    stacked = torch.stack(list(lses))
    empty = (stacked == -math.inf).all(0)
    shares = torch.softmax(stacked.masked_fill(empty, 0), 0).masked_fill(empty, 0).unbind(0)
    return shares, sum(share.unsqueeze(-1) * out for share, out in zip(shares, outs, strict=True))


def _merge_gradients(grad_out, grad_lse, outs, lses):
    """attention_merge_backward in differentiable torch, for second derivatives."""
    shares, out = _merge_shares(outs, lses)
    grad_outs = [(share.unsqueeze(-1) * grad_out).to(part.dtype) for share, part in zip(shares, outs, strict=True)]
    grad_lses = [share * ((grad_out * (part - out)).sum(-1) + grad_lse) for share, part in zip(shares, outs, strict=True)]
    return (*grad_outs, *grad_lses)


_merge = differentiable(_MergeOp)
