"""torch.nn.functional with scaled_dot_product_attention, softmax, log_softmax, cross_entropy and linear_cross_entropy using
online softmax:

    import flash_online.functional as F

The five have torch's signatures, results, errors and behaviour under autocast, autograd, torch.func and torch.compile. Every
other name of this module is torch's own. Tensors that our kernels do not take are forwarded to torch's function
(`flash_online.explain` says why).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as _torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from ._canonicalize import autocast, autocasts, canonicalize, check_kinds, check_types
from ._causal_bias import CausalRule
from ._checks import check_dtype, check_float, is_empty
from ._ops import InvalidArgument
from ._patches import describe, shards
from ._plain import NUMBERS
from ._policy import dropout_refusal, forward_to_torch, require_kernel, why_forwarded
from .attention import attention_impl, try_fast_masked, try_fast_path
from .cross_entropy import check_cross_entropy, cross_entropy_impl, reduction_enum, try_fast_cross_entropy
from .linear_cross_entropy import check_linear_cross_entropy, linear_cross_entropy_impl
from .softmax import softmax_impl, try_fast_softmax

if TYPE_CHECKING:
    from torch.nn.functional import *  # noqa: F403

NAMES = ("scaled_dot_product_attention", "softmax", "log_softmax", "cross_entropy", "linear_cross_entropy")

# Torch's functions, captured on the first import: later override() may replace them. Before 2.13 torch has no
# linear_cross_entropy. scaled_dot_product_attention comes from torch._C._nn, as torch's module may be patched: the import may
# be inside context_parallel.
if "ORIGINALS" not in globals():
    ORIGINALS = {name: getattr(_torch, name) for name in NAMES if hasattr(_torch, name)}
    ORIGINALS["scaled_dot_product_attention"] = torch._C._nn.scaled_dot_product_attention
    # The function that torch.nn.functional is expected to have under this name.
    _standing: object = ORIGINALS["scaled_dot_product_attention"]


def is_ours(name: str, function: object) -> bool:
    """Returns whether this is our function of that name, possibly from before a reload of this module."""
    return getattr(function, "__module__", None) == __name__ and getattr(function, "__qualname__", None) == name


def expect(function: object) -> None:
    """Notes that torch.nn.functional.scaled_dot_product_attention is now this function, which is not context_parallel's."""
    global _standing
    _standing = function


def _refuse_shards(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises RuntimeError if torch's context_parallel is active and these are plain tensors. Its wrapper calls us with
    DTensors, which go to torch."""
    standing = _torch.scaled_dot_product_attention
    if not shards(standing, ORIGINALS["scaled_dot_product_attention"], scaled_dot_product_attention):
        expect(standing)
        return
    if not any(type(tensor).__name__ == "DTensor" for tensor in (query, key, value)):
        raise RuntimeError(
            "scaled_dot_product_attention: called directly inside torch's context_parallel "
            f"(torch.nn.functional has {describe(standing)}), where a plain tensor is this rank's shard alone. Call "
            "torch.nn.functional.scaled_dot_product_attention there, or flash_online.attention to attend to the shard"
        )


# The names that `import *` takes from torch's module, and our functions.
__all__ = [name for name in {*dir(_torch), *NAMES} if not name.startswith("_")]

# torch.jit.script compiles the branch after `if not is_scripting()`, which calls torch's functions.
is_scripting = torch.jit.is_scripting
_torch_softmax, _torch_log_softmax = ORIGINALS["softmax"], ORIGINALS["log_softmax"]
_torch_cross_entropy = ORIGINALS["cross_entropy"]


def _is_passed_on(*arguments: object) -> bool:
    """Returns whether a call with these arguments, one of which has_torch_function, goes through torch's protocol: a
    TorchFunctionMode is active, or there is an object such as torch.fx's Proxy. Subclasses of Tensor are forwarded to torch's
    function instead, and their __torch_function__ handles it."""
    if torch._C._is_torch_function_mode_enabled():
        return True
    return any(hasattr(type(value), "__torch_function__") and not isinstance(value, Tensor) for value in arguments)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * query key^T + attn_mask) value, as torch.nn.functional.scaled_dot_product_attention documents it.

    Memory is linear in L and S.

    Args:
        query: `[..., Hq, L, E]`, two or more dimensions; float16, bfloat16, float32 or float64.
        key: `[..., Hk, S, E]`, of query's dtype and device. Leading dimensions broadcast.
        value: `[..., Hv, S, Ev]`, as key.
        attn_mask: bool (True: takes part), query's dtype or float32, broadcastable to the scores `[..., Hq, L, S]`; or torch's
            causal_upper_left or causal_lower_right, without building a mask.
        dropout_p: probability that a weight is dropped.
        is_causal: hides keys j > i; not together with a mask.
        scale: 1 / sqrt(E) if None.
        enable_gqa: Hk and Hv may be divisors of Hq.

    Returns:
        `[..., Hq, L, Ev]`, of query's dtype and order of strides; a query that sees no key gives 0.

    Raises:
        RuntimeError: in most cases; torch's exception types, with messages that name the argument. Also inside torch's
            context_parallel, where a direct call would attend to this rank's shard alone.

    Source: as `attention`.
    """
    if _torch.scaled_dot_product_attention is not _standing:
        _refuse_shards(query, key, value)
    plain = attn_mask is None and type(dropout_p) in NUMBERS and not dropout_p
    if plain and type(is_causal) is bool is type(enable_gqa):
        out = try_fast_path(query, key, value, is_causal, scale, enable_gqa)
        if out is not None:
            return out
    elif (
        attn_mask is not None
        and is_causal is False
        and type(enable_gqa) is bool
        and type(dropout_p) in NUMBERS
        and not dropout_p
    ):
        out = try_fast_masked(query, key, value, attn_mask, False, scale, enable_gqa)
        if out is not None:
            return out
    tensors = (query, key, value, attn_mask)
    if has_torch_function_variadic(*tensors) and _is_passed_on(*tensors):
        options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        options["enable_gqa"] = enable_gqa
        return handle_torch_function(scaled_dot_product_attention, tensors, query, key, value, **options)
    named, flags = {"query": query, "key": key, "value": value}, {"is_causal": is_causal, "enable_gqa": enable_gqa}
    check_types(named, {"attn_mask": attn_mask}, flags)
    dropout_p = check_float("dropout_p", dropout_p)
    if scale is not None:
        scale = check_float("scale", scale)
    rule = CausalRule.of(attn_mask, is_causal, query, key)
    attn_mask, is_causal, lower_right = rule
    reason = why_forwarded("scaled_dot_product_attention", query, key, value, attn_mask) or dropout_refusal(query, dropout_p)
    if reason is not None:
        attn_mask, is_causal = rule.for_torch(query, key)
        return forward_to_torch(
            *("scaled_dot_product_attention", reason, ORIGINALS["scaled_dot_product_attention"]),
            *(query, key, value, attn_mask, dropout_p, is_causal),
            scale=scale,
            enable_gqa=enable_gqa,
        )
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    check_kinds(query, key, value, attn_mask, "attn_mask")
    if is_empty(query.shape[-2:-1]) or is_empty(value.shape):  # torch too returns before it checks shapes, options or the mask
        return _zeros(query, key, value, attn_mask, query.shape[:-1])
    if attn_mask is not None and is_causal:
        raise InvalidArgument("attn_mask: expected None with is_causal=True, got a mask")
    if not 0 <= dropout_p <= 1:  # NaN too
        raise InvalidArgument(f"dropout_p: expected a probability, 0 to 1, got {dropout_p}")
    q, k, v, mask, restore = canonicalize(query, key, value, attn_mask, mask_name="attn_mask", enable_gqa=enable_gqa)
    if is_empty(q.shape[:-2]):
        return restore(_zeros(query, key, value, attn_mask, q.shape[:-1]))
    out, _, _ = attention_impl(
        *(q, k, v, mask),
        alibi_slopes=None,
        sinks=None,
        causal=is_causal,
        window=(None, None),
        lower_right=lower_right,
        scale=scale,
        softcap=0.0,
        dropout_p=dropout_p,
        deterministic=None,
    )
    return restore(out)


def _zeros(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, leading) -> Tensor:
    """The result without keys or without queries: zeros that depend on the inputs, so that these get gradients of 0, and NaN
    where query, key or value holds a NaN, as in torch."""
    zero = (query.sum() + key.sum() + value.sum()) * 0
    if mask is not None and mask.requires_grad:  # the sum of no elements: a mask may hold -inf, and -inf * 0 would be NaN
        zero = zero + mask.reshape(-1).narrow(0, 0, 0).sum().to(zero.dtype)
    return query.new_zeros(*leading, value.shape[-1]) + zero


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """torch.nn.functional.softmax: exp(input) / sum(exp(input)) along `dim`. flash_online.softmax documents shapes, dtypes and
    errors."""
    if not is_scripting():
        return _softmax("softmax", softmax, input, dim, _stacklevel, dtype)
    return _torch_softmax(input, dim, _stacklevel, dtype)


def log_softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """torch.nn.functional.log_softmax: the logarithm of softmax along `dim`. flash_online.log_softmax documents shapes, dtypes
    and errors."""
    if not is_scripting():
        return _softmax("log_softmax", log_softmax, input, dim, _stacklevel, dtype)
    return _torch_log_softmax(input, dim, _stacklevel, dtype)


def _softmax(name: str, public, input: Tensor, dim: int | None, stacklevel: int, dtype: torch.dtype | None) -> Tensor:
    """softmax or log_softmax, by name and as the `public` function."""
    if dtype is None:
        result = try_fast_softmax(name, input, dim, name == "log_softmax")
        if result is not None:
            return result
    if has_torch_function_variadic(input) and _is_passed_on(input):
        return handle_torch_function(public, (input,), input, dim=dim, _stacklevel=stacklevel, dtype=dtype)
    if not isinstance(input, Tensor):
        raise AttributeError(f"input: expected a Tensor, got {type(input).__name__}")  # torch's type of error
    if dtype is not None:
        dtype = check_dtype(dtype)
    reason = why_forwarded(name, input, dtype=dtype, dim=dim)
    if reason is not None:
        return forward_to_torch(name, reason, ORIGINALS[name], input, dim, stacklevel + 3, dtype)
    if dim is None:
        dim = _torch._get_softmax_dim(name, input.dim(), stacklevel + 1)
    return softmax_impl(name, input, dim, dtype, name == "log_softmax")


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """torch.nn.functional.cross_entropy, without a table of probabilities. flash_online.cross_entropy documents shapes, dtypes
    and errors. With class indices `weight` must have input's dtype, as in torch."""
    if not is_scripting():
        return _cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    return _torch_cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)


def _cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing) -> Tensor:
    if size_average is reduce is None:
        result = try_fast_cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing)
        if result is not None:
            return result
    tensors = (input, target, weight)
    if has_torch_function_variadic(*tensors) and _is_passed_on(*tensors):
        options = {"weight": weight, "size_average": size_average, "ignore_index": ignore_index, "reduce": reduce}
        options |= {"reduction": reduction, "label_smoothing": label_smoothing}
        return handle_torch_function(cross_entropy, tensors, input, target, **options)
    check_types({"input": input, "target": target}, {"weight": weight}, {})
    reason = why_forwarded("cross_entropy", input, target, weight)
    if reason is not None:
        return forward_to_torch(
            *("cross_entropy", reason, ORIGINALS["cross_entropy"]),
            *(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing),
        )
    reduction = reduction_enum(reduction, size_average, reduce)
    check_cross_entropy(input, target, weight, ignore_index, label_smoothing)
    if input.dim() > 2 and target.dtype == torch.uint8:
        raise InvalidArgument(f"target: expected dtype int64 for an input of {input.dim()} dimensions, got torch.uint8")
    _check_weight_dtype(input, target, weight)
    return cross_entropy_impl(input, target, weight, ignore_index, reduction, label_smoothing, False, 0.0, None)


def _check_weight_dtype(input: Tensor, target: Tensor, weight: Tensor | None) -> None:
    if weight is not None and not target.is_floating_point():
        weight_dtype, input_dtype = (torch.float32 if autocasts(t) else t.dtype for t in (weight, input))
        if weight_dtype != input_dtype:
            raise InvalidArgument(f"weight: expected input's dtype {input.dtype} with class indices, got {weight.dtype}")


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: object = None,
) -> Tensor:
    """torch.nn.functional.linear_cross_entropy, as in torch 2.13: cross_entropy(linear(input, linear_weight, linear_bias),
    target) without a table of logits. flash_online.linear_cross_entropy documents shapes, dtypes and errors. Here input is [H]
    or [N, H], `options` is accepted and not used (every kind of target and reduction has our own chunks), and with class
    indices `weight` must have input's dtype.
    """
    tensors = (input, linear_weight, target, linear_bias, weight)
    if has_torch_function_variadic(*tensors) and _is_passed_on(*tensors):
        keywords = {"linear_bias": linear_bias, "weight": weight, "reduction": reduction, "ignore_index": ignore_index}
        keywords |= {"label_smoothing": label_smoothing, "options": options}
        return handle_torch_function(linear_cross_entropy, tensors, input, linear_weight, target, **keywords)
    named = {"input": input, "linear_weight": linear_weight, "target": target}
    optional = {"linear_bias": linear_bias, "weight": weight}
    check_types(named, optional, {})
    if "linear_cross_entropy" not in ORIGINALS:
        require_kernel("linear_cross_entropy", **named, **optional)
    reason = why_forwarded("linear_cross_entropy", *tensors)
    if reason is not None:
        return forward_to_torch(
            *("linear_cross_entropy", reason, ORIGINALS["linear_cross_entropy"]),
            *(input, linear_weight, target),
            linear_bias=linear_bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            options=options,
        )
    check_linear_cross_entropy(input, linear_weight, target, linear_bias, weight, ignore_index, label_smoothing, max_dims=2)
    number = reduction_enum(reduction, None, None)
    _check_weight_dtype(input, target, weight)
    return linear_cross_entropy_impl(
        *(input, linear_weight, target, linear_bias, weight, number, ignore_index, label_smoothing, False, 0.0, None)
    )


# torch.jit.script compiles a call of our function to the operator that torch's function is: it has no Python source.
torch.jit._builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")


def __getattr__(name: str) -> Any:
    return getattr(_torch, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torch)})
