"""Attention backends of diffusers: `register()`, then `model.set_attention_backend("flash_online")`; and one in float8.

Without context parallelism a call runs flash_online.attention. With it, diffusers moves rows between the ranks and calls the
two functions here as its forward and backward operators: Ulysses once per call, with whole sequences and some of the heads; a
ring once per rank's keys, for partial results that diffusers merges using their lse.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _policy
from .._attention_arguments import AttentionOptions
from .._attention_derivatives import gradients_of_part
from .._canonicalize import autocast, canonicalize, check_kinds
from .._checks import check_float
from .._ops import InvalidArgument, ops
from .._span_arguments import spans_of_key_mask
from ..attention import attention, default_scale, tf32_for
from ..float8 import float8_attention
from . import _float8

if TYPE_CHECKING:
    from types import ModuleType

NAME = "flash_online"
_lock = threading.Lock()
_registrations: dict[str, Registration] = {}  # by the name of the backend


class Registration:
    """The registration of a backend in diffusers, until `remove()`."""

    def __init__(self, host: ModuleType, member: Any) -> None:
        self._host, self._member = host, member

    def remove(self) -> None:
        """Removes the backend from diffusers; a second call does nothing. Models that still use the backend cannot run: call
        their reset_attention_backend() first. If it is active, diffusers' default backend becomes active."""
        name, member_name = self._member.value, self._member.name
        with _lock:
            if _registrations.get(name) is not self:
                return
            enum, registry = self._host.AttentionBackendName, self._host._AttentionBackendRegistry
            if registry._active_backend == self._member:
                registry._active_backend = enum(self._host.DIFFUSERS_ATTN_BACKEND)
            for table in (registry._backends, registry._constraints, registry._supported_arg_names):
                del table[self._member]
            registry._supports_context_parallel.discard(name)
            type.__delattr__(enum, member_name)  # the enum's own __delattr__ forbids this
            del enum._member_map_[member_name], enum._value2member_map_[name]
            enum._member_names_.remove(member_name)
            del _registrations[name]


def register(name: str = NAME) -> Registration:
    """Makes "flash_online" an attention backend of diffusers, for `model.set_attention_backend`, `attention_backend` and
    `dispatch_attention_fn`. Further calls return the first registration.

    The backend takes bool and floating masks (`[B, S]`, or broadcastable to `[B, H, L, S]`), is_causal, scale, grouped heads
    with enable_gqa, dropout and return_lse. It supports diffusers' context parallelism (Ulysses, ring and both), without causal
    rule, grouped heads and dropout, and in a ring without masks. Queries, keys and values are `[B, L, H, E]`; float16,
    bfloat16, float32 or float64.

    Args:
        name: "flash_online"; or "online_attention_float8", a backend for inference that runs `flash_online.float8_attention`.
            It takes float16, bfloat16 and bool masks of keys (`[B, S]` or `[..., 1, S]`), and no dropout or context
            parallelism; other options are those above.

    Returns:
        A registration; its `remove()` undoes it.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): another name.
        ImportError: diffusers is not installed.
        NotImplementedError: this diffusers has no registry of backends of a known form.
        RuntimeError: another package has registered a backend of this name.
    """
    if name not in (NAME, _float8.NAME):
        raise InvalidArgument(f"name: expected {NAME!r} or {_float8.NAME!r}, got {name!r}")
    with _lock:
        if name not in _registrations:
            host = _host()
            _registrations[name] = Registration(host, _add_member(host, name))
        return _registrations[name]


def _host() -> ModuleType:
    """diffusers.models.attention_dispatch."""
    try:
        import diffusers
    except ImportError:
        raise ImportError("integrations.diffusers: diffusers is not installed; `pip install diffusers` installs it") from None
    try:
        from diffusers.models import attention_dispatch as host

        needed = (host.AttentionBackendName, host._templated_context_parallel_attention, host.DIFFUSERS_ATTN_BACKEND)
        registry = host._AttentionBackendRegistry
        needed += (
            registry._backends,
            registry._constraints,
            registry._supported_arg_names,
            registry._supports_context_parallel,
        )
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f"integrations.diffusers: diffusers {diffusers.__version__} has no registry of attention backends as in 0.42.1 "
            f"({error}); use flash_online.override() with its native backend"
        ) from None
    return host  # type: ignore[no-any-return]


def _add_member(host: ModuleType, name: str) -> Any:
    """Adds our backend to the registry and a member to diffusers' closed enum of backends."""
    enum, member_name = host.AttentionBackendName, name.upper()
    if member_name in enum._member_map_ or name in enum._value2member_map_:
        raise RuntimeError(f"integrations.diffusers: diffusers has a backend {name!r} already, which is not this module's")
    member = str.__new__(enum, name)
    member._name_, member._value_ = member_name, name
    member.__objclass__, member._sort_order_ = enum, len(enum._member_names_)
    type.__setattr__(enum, member_name, member)  # the enum's own __setattr__ forbids this
    enum._member_map_[member_name] = enum._value2member_map_[name] = member
    enum._member_names_.append(member_name)
    constraints, parallel = [host._check_device, host._check_shape], name == NAME
    backend = host._AttentionBackendRegistry.register(member, constraints=constraints, supports_context_parallel=parallel)
    backend(_backend if name == NAME else _float8_backend)
    return member


def _backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """query [B, L, H, E], key [B, S, Hk, E], value [B, S, Hk, Ev] -> out [B, L, H, Ev], with return_lse also lse [B, L, H]."""
    parallel = None if _parallel_config is None else _parallel_config.context_parallel_config
    _check_heads(query, key, value, enable_gqa)
    mask = _with_queries(attn_mask, query, key, parallel)
    if parallel is None:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        options: dict[str, Any] = {"mask": mask, "causal": is_causal, "scale": scale, "dropout_p": dropout_p}
        if not return_lse:
            return attention(query, key, value, **options).transpose(1, 2)
        out, lse = attention(query, key, value, return_lse=True, **options)
        return out.transpose(1, 2), lse.transpose(1, 2)

    _refuse_in_parallel(parallel, query, key, value, mask, dropout_p)
    query, key, value, mask = autocast(query, key, value, mask)
    result = _host()._templated_context_parallel_attention(
        *(query, key, value, mask, 0.0, is_causal, scale, enable_gqa, return_lse),
        forward_op=_forward,
        backward_op=_backward,
        _parallel_config=_parallel_config,
    )
    # diffusers' merged lse has no gradient: without detach its gradient would silently be dropped from a sum.
    return (result[0], result[1].detach()) if return_lse else result


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    heads, key_heads = query.shape[2], {key.shape[2], value.shape[2]}
    if not enable_gqa and not key_heads <= {heads, 1}:
        raise InvalidArgument(
            f"key, value: expected query's {heads} heads (fewer need enable_gqa=True), got {sorted(key_heads)}"
        )


def _with_queries(mask: Tensor | None, query: Tensor, key: Tensor, parallel: Any) -> Tensor | None:
    """The mask, with dimensions for heads and queries if it is `[B, S]`."""
    if mask is None:
        return None
    if mask.dim() == 2 and mask.shape[0] == query.shape[0] and (parallel is not None or mask.shape[1] == key.shape[1]):
        return mask[:, None, None, :]
    if mask.dim() == 3 and mask.shape[0] != 1:
        raise InvalidArgument(
            f"attn_mask: expected [B, 1, L, S] or [1, H, L, S], got {list(mask.shape)}, which some backends "
            "of diffusers read as [B, L, S], other backends as [H, L, S]"
        )
    return mask


def _float8_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Tensors as in _backend."""
    _float8.check_inference("dropout_p", dropout_p, query=query, key=key, value=value)
    if _parallel_config is not None and _parallel_config.context_parallel_config is not None:
        raise NotImplementedError(f"{_float8.NAME}: expected one process, got context parallelism; use {NAME!r}")
    _check_heads(query, key, value, enable_gqa)
    spans, mask = None, _with_queries(attn_mask, query, key, None)
    if mask is not None:
        if mask.dtype is not torch.bool or (mask.dim() > 1 and mask.shape[-2] != 1):
            raise NotImplementedError(
                f"attn_mask: expected a bool mask of keys, [B, S] or [..., 1, S], with {_float8.NAME}, got {mask.dtype} "
                f"{list(mask.shape)}; use {NAME!r}"
            )
        spans = spans_of_key_mask(mask[(None,) * (4 - mask.dim())], key.shape[1])
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    options: dict[str, Any] = {"causal": is_causal, "key_spans": spans, "scale": scale}
    if not return_lse:
        return float8_attention(query, key, value, **options).transpose(1, 2)
    out, lse = float8_attention(query, key, value, return_lse=True, **options)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _refuse_in_parallel(
    parallel: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float
) -> None:
    """Raises where diffusers' context parallelism would differ from one process, or fail with an unclear error."""
    said = f"under context parallelism (ring_degree {parallel.ring_degree}, ulysses_degree {parallel.ulysses_degree})"
    ulysses_alone = parallel.ring_degree == 1 and not parallel.ulysses_anything
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    problem = None
    if dropout_p:
        problem = f"dropout_p: expected 0 {said} (ranks would draw the same mask), got {dropout_p}"
    elif mask is not None and parallel.ring_degree > 1:
        problem = f"attn_mask: expected None {said}: the ring does not shard it; use ulysses_degree alone"
    elif mask is not None and mask.requires_grad and torch.is_grad_enabled():
        problem = f"attn_mask: expected requires_grad=False {said}, got True: diffusers has no gradient for it"
    elif not query.shape[2] == key.shape[2] == value.shape[2]:
        problem = f"key, value: expected query's {query.shape[2]} heads {said}, got {key.shape[2]} and {value.shape[2]}"
    elif ulysses_alone and query.shape[2] % parallel.ulysses_degree != 0:
        problem = f"query: expected a multiple of ulysses_degree heads, or ulysses_anything=True, {said}, got {query.shape[2]}"
    elif value.shape[3] != query.shape[3] and (ulysses_alone or trains):
        problem = f"value: expected query's width {query.shape[3]} {said}, got {value.shape[3]}"
    elif ulysses_alone and trains and key.shape[1] != query.shape[1]:
        problem = f"key: expected query's length {query.shape[1]} {said} (for diffusers' gradients), got {key.shape[1]}"
    if problem is not None:
        raise NotImplementedError(problem)


def _forward(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A rank's results: all rows of its heads (Ulysses), or its own rows and one rank's keys (a ring). Tensors as in
    _backend."""
    parallel = _parallel_config.context_parallel_config
    if attn_mask is not None and attn_mask.dim() > 2 and attn_mask.shape[-3] != 1:
        all_heads = attn_mask.shape[-3]  # diffusers sharded the heads of query over the ranks, but not the heads of a mask
        first = parallel._ulysses_local_rank * -(-all_heads // parallel.ulysses_degree)
        attn_mask = attn_mask[..., first : first + query.shape[2], :, :]
    tensors = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    check_kinds(*tensors, attn_mask, "attn_mask")
    _policy.require_kernel("attention", query=query, key=key, value=value, attn_mask=attn_mask)
    *tensors, mask, _ = canonicalize(*tensors, attn_mask, mask_name="attn_mask")
    scale = default_scale(query.shape[-1]) if scale is None else check_float("scale", scale)
    options = AttentionOptions(-1, 0 if is_causal else -1, False, scale, 0.0, 0.0, tf32_for(query))
    out, lse, lse_low = ops.attention_forward.default(*tensors, mask, None, None, None, *options)
    if _save_ctx:
        # A ring's backward pass passes the merged out and lse, and takes the first three of these as the rank's own.
        rest = () if parallel.ring_degree > 1 else (mask, out, lse, lse_low)
        ctx.save_for_backward(query, key, value, *rest)
        ctx.options, ctx.deterministic = options, torch.are_deterministic_algorithms_enabled()
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return (out, lse) if return_lse else out


def _backward(
    ctx: Any,
    grad_out: Tensor,
    *_: Any,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of _forward's query, key, value. A ring calls it once per rank's keys, with the merged out and lse."""
    if torch.is_grad_enabled():
        raise NotImplementedError("no second derivatives under diffusers' context parallelism: its operators have none")
    if query is None:
        query, key, value, mask, *results = ctx.saved_tensors
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        grad_out, grad_lse = grad_out.transpose(1, 2), None
    else:
        query, key, value, out, lse, grad_out = (t.transpose(1, 2) for t in (query, key, value, out, lse, grad_out))
        mask = None
        results = ops.attention_forward.default(query, key, value, None, None, None, None, *ctx.options)
        grad_out, grad_lse = gradients_of_part(grad_out, out, lse, *results[:2])
    grads = ops.attention_backward.default(
        *(grad_out, grad_lse, query, key, value, mask, None, None, None, *results),
        *ctx.options.for_backward(False, ctx.deterministic),
    )
    grad_query, grad_key, grad_value = (grad.transpose(1, 2) for grad in grads[:3])
    return grad_query, grad_key, grad_value
