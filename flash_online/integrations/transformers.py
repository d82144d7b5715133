"""The transformers integration: its models' attention and masks on our kernels, under an `attn_implementation` name; and the
loss without logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._ops import SIXTEEN_BITS
from .._plain import is_compiling
from .._span_arguments import spans_of_key_mask
from ..attention import attention, default_scale, try_fast_masked, try_fast_path, try_fast_sparse
from ..float8 import float8_attention
from ..kvcache import kvcache_attention
from ..varlen import varlen_attention
from . import _float8
from ._fused_loss import fuse_loss
from ._transformers_masks import VisibleKeys, visible_keys
from ._transformers_rules import NO_BOUND
from ._transformers_support import check_models_for

__all__ = ["fuse_loss", "register"]

_EAGER = 'Load the model with attn_implementation="eager" for it.'


def register(name: str = "online_attention") -> str:
    """Registers our attention with transformers: `from_pretrained(..., attn_implementation="online_attention")` and
    `model.set_attn_implementation("online_attention")`.

    Registers the attention function with `transformers.AttentionInterface` and the mask function, without which padding would
    be lost, with `transformers.AttentionMaskInterface`. A second call changes nothing. Models then pass windows, softcap,
    sinks, position bias, documents and padding to the kernels, without a mask of queries times keys;
    docs/integrations/transformers.md lists the cases that are still dense or refused. Loading a model with its own attention
    raises ValueError, as for "sdpa": PreTrainedModel.get_correct_attn_implementation checks our names with us first.

    Args:
        name: an identifier without "flash" (the host would load it as a FlashAttention package of that name), other than the
            host's own names. "online_attention_float8" registers `flash_online.float8_attention`, for inference; every other
            name, `flash_online.attention`.

    Returns:
        The name.

    Raises:
        TypeError: name is not a str.
        ValueError: the name is not as above, or already refers to another function.
        ImportError: transformers is not installed, or its mask functions have another form (tested: 5.20.2 and 5.23.0).
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, got {type(name).__name__}")
    if "flash" in name.lower():
        raise ValueError(
            f"name: expected an identifier without 'flash', such as 'online_attention', got {name!r}; transformers "
            "loads names with 'flash' as FlashAttention packages"
        )
    if not name.isidentifier() or any(word in name for word in ("eager", "sdpa", "flex_attention")):
        raise ValueError(f"name: expected an identifier without 'eager', 'sdpa' and 'flex_attention' in it, got {name!r}")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import create_bidirectional_sliding_window_mask  # noqa: F401 (the newest one required)
        from transformers.utils.import_utils import is_tracing  # noqa: F401
    except ImportError as missing:
        raise ImportError(f"transformers (5.20 or newer) is needed for this integration: {missing}") from missing
    attention_of_name = attend_in_float8 if name == _float8.NAME else attend
    for interface, function in ((AttentionInterface, attention_of_name), (AttentionMaskInterface, visible_keys)):
        present = interface._global_mapping.get(name)
        if present not in (None, function):
            raise ValueError(f"name: {name!r} already refers to {present.__module__}.{present.__qualname__} in transformers")
    AttentionInterface.register(name, attention_of_name)
    AttentionMaskInterface.register(name, visible_keys)
    check_models_for(name)
    return name


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    deterministic: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that `register` passes to `transformers.AttentionInterface`, for the host's modules.

    Args:
        module: the calling layer; its `training` switches dropout, as in the host's eager attention.
        query: `[B, Hq, L, E]`.
        key: `[B, Hk, S, E]`; Hk divides Hq.
        value: `[B, Hk, S, Ev]`.
        attention_mask: VisibleKeys; or a dense mask, bool (True: takes part) or floating (added), broadcastable to
            `[B, Hq, L, S]`, which overrides all else; or None: `is_causal` decides (the module's attribute if None).
        softcap, s_aux: as `softcap` and `sinks` of `flash_online.attention`.
        position_bias: floating, broadcastable to `[B, Hq, L, S]`, added to the scores; differentiable.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: the B L tokens are packed documents, as in
            `flash_online.varlen_attention`. All four or none.
        others: the host's other keywords; keywords that would change the result are refused.

    Returns:
        (out `[B, L, Hq, Ev]`, contiguous, None). A query that sees no key gets 0.

    Raises:
        NotImplementedError: attention weights, paged caches, sparse attention by indices, sinks in another form.
        ValueError: contradictory arguments, or a mask of another form.
    """
    if not (softcap or deterministic or (dropout and module.training)) and (
        s_aux is position_bias is cu_seq_lens_q is cu_seq_lens_k is max_length_q is max_length_k is None
    ):
        out = _attend_plainly(module, query, key, value, attention_mask, scaling, others)
        if out is not None:
            return out, None
    _refuse(module, query, s_aux, others)
    dropout = float(dropout) if module.training else 0.0
    options: dict[str, Any] = {"softcap": float(softcap or 0.0), "sinks": s_aux, "dropout_p": dropout, "scale": scaling}
    options["deterministic"] = True if deterministic else None
    lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    given = sum(length is not None for length in lengths)
    if given not in (0, 4):
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        missing = ", ".join(name for name, length in zip(names, lengths, strict=True) if length is None)
        raise ValueError(f"{missing}: expected all or none of the four arguments that describe documents, got None")

    visible = attention_mask
    if visible is None:
        visible = _without_mask(module, query, key, is_causal, sliding_window)
    is_rule = isinstance(visible, VisibleKeys)
    if given and not (is_rule and visible.query_spans is None):
        found = "blocks or chunks" if is_rule else "a dense mask"
        raise ValueError(
            f"attention_mask: expected None with cu_seq_lens_q, got {found}. Pass one of the two: attention_mask=None if the "
            "documents are the whole mask"
        )
    if is_rule:
        _check_lengths(visible, query, key)
        if given and not visible.chunked:
            if visible.padding is not None:
                raise ValueError(
                    "attention_mask: expected None with cu_seq_lens_q, which describes tokens without padding, got padding. "
                    "Pass attention_mask=None, or no cu_seq_lens"
                )
            return _attend_documents(query, key, value, visible, lengths, position_bias, options), None
        if visible.packed is not None and position_bias is None:
            bounds, longest = visible.cu_seqlens()
            return _attend_documents(query, key, value, visible, (bounds, bounds, longest, longest), None, options), None
        return _attend_rule(query, key, value, visible, position_bias, options), None
    mask = _with_bias(_check_dense(visible), position_bias)
    return attention(query, key, value, mask=mask, **options).transpose(1, 2).contiguous(), None


def attend_in_float8(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`attend` by `flash_online.float8_attention`, without gradients. Calls with one query per sequence, decoding steps, run
    `attend` itself: they read every key once, and quantising reads and writes it more often.

    Raises:
        InvalidArgument: a tensor requires a gradient outside `torch.no_grad()`.
        NotImplementedError: as in `attend`; dropout in training; documents by cu_seq_lens, a position bias, and dense masks,
            unless they are bool and the same for all queries.
        ValueError: as in `attend`.
    """
    _float8.check_inference("dropout", dropout if module.training else 0.0, query=query, key=key, value=value, s_aux=s_aux)
    if query.dim() == 4 and query.shape[2] == 1:
        placed = (module, query, key, value, attention_mask, dropout, scaling, is_causal, sliding_window, softcap, s_aux)
        return attend(*placed, **others)
    _refuse(module, query, s_aux, others)
    for name in ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        if others.get(name) is not None:
            raise NotImplementedError(f"{name}: expected None with {_float8.NAME}, got a value. {_SIXTEEN_BITS}")
    visible = attention_mask
    if visible is None:
        visible = _without_mask(module, query, key, is_causal, sliding_window)
    rule: dict[str, Any]
    if not isinstance(visible, VisibleKeys):
        mask = _check_dense(visible)
        if mask.dtype is not torch.bool or mask.shape[-2] != 1:
            raise NotImplementedError(
                f"attention_mask: expected a rule, spans or a bool mask of keys with {_float8.NAME}, got a dense mask, "
                f"{mask.dtype} {list(mask.shape)}. {_SIXTEEN_BITS}"
            )
        rule = {"key_spans": spans_of_key_mask(mask, key.shape[2])}
    else:
        _check_lengths(visible, query, key)
        rule = dict(visible.spans())
        if not rule:
            key, value = key[:, :, : visible.used_keys], value[:, :, : visible.used_keys]
            rule = _positions(visible, query.shape[2], key.shape[2])
            if visible.padding is not None:
                rule["key_spans"] = spans_of_key_mask(visible.padding, key.shape[2])
    options = {"softcap": float(softcap or 0.0), "sinks": s_aux, "scale": scaling}
    return float8_attention(query, key, value, **rule, **options).transpose(1, 2).contiguous(), None


_SIXTEEN_BITS = 'Load the model with attn_implementation="online_attention" for it.'
_REFUSED = frozenset(("output_attentions", "cache", "indices", "block_indices", "sinks"))


def _attend_plainly(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Any,
    scale: float | None,
    others: dict[str, Any],
) -> Tensor | None:
    """Attention of a call without options, in a third of the time that all checks take: `[B, L, Hq, Ev]`. None for any other
    call, and for the CPU's steps over few keys; `attend` finds the errors."""
    if is_compiling() or type(visible) is not VisibleKeys or not visible.is_plain or _has_sinks(module):
        return None
    if any(others[name] is not None and others[name] is not False for name in _REFUSED & others.keys()):
        return None
    shape, key_shape, padding = query.shape, key.shape, visible.padding
    if len(shape) != 4 or len(key_shape) != 4 or key_shape[2] != visible.keys:
        return None
    queries, keys = shape[2], visible.keys
    causal = visible.causal and not (queries == 1 and (visible.lower_right or keys == 1))
    if causal and not (queries == visible.queries == keys):
        return None
    if padding is None:
        if keys < _MANY_KEYS and _is_step(query, key):
            return None
        out = try_fast_path(query, key, value, causal, scale, True)
    elif visible.padding_spans is not None and query.dtype in SIXTEEN_BITS and not torch.are_deterministic_algorithms_enabled():
        out = try_fast_sparse(query, key, value, visible.padding_spans, None, None, causal, scale)
    else:
        out = try_fast_masked(query, key, value, padding, causal, scale, True)
    return None if out is None else out.transpose(1, 2).contiguous()


def _has_sinks(module: torch.nn.Module) -> bool:
    """Returns whether `module.sinks` is not None; a module looks for a name that it has not for a microsecond."""
    members = module.__dict__
    if "_parameters" not in members:
        return getattr(module, "sinks", None) is not None
    held = (members, members["_parameters"], members["_buffers"], members["_modules"])
    return any(place.get("sinks") is not None for place in held) or getattr(type(module), "sinks", None) is not None


def _refuse(module: torch.nn.Module, query: Tensor, s_aux: Tensor | None, others: dict[str, Any]) -> None:
    """Raises for unsupported arguments that would change the result."""
    if others.get("output_attentions"):
        raise NotImplementedError(f"output_attentions: expected False (weights are never computed), got True. {_EAGER}")
    if others.get("cache") is not None:
        raise NotImplementedError(
            f"cache: expected no paged cache (continuous batching), got {type(others['cache']).__name__}. Load the "
            'model with attn_implementation="paged|eager", or call generate() without continuous batching.'
        )
    for name in ("indices", "block_indices", "sinks"):
        if others.get(name) is not None:
            what = "sinks other than one number per head" if name == "sinks" else "sparse attention over chosen keys"
            raise NotImplementedError(f"{name}: {what} ({type(module).__name__}) is not supported. {_EAGER}")
    if s_aux is None and _has_sinks(module):
        raise NotImplementedError(f"s_aux: {type(module).__name__} has sinks but does not pass them. {_EAGER}")
    if query.dim() != 4:
        raise ValueError(f"query: expected [batch, heads, queries, width], got {list(query.shape)}")


def _without_mask(
    module: torch.nn.Module, query: Tensor, key: Tensor, is_causal: bool | None, sliding_window: int | None
) -> VisibleKeys:
    """The rule of a call without a mask, as in the host's sdpa attention: causal or not, all keys."""
    from transformers import AttentionMaskInterface

    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if name is not None and name not in AttentionMaskInterface._global_mapping:
        raise ValueError(
            f"attention_mask: transformers makes no masks for attn_implementation={name!r}, so padding would be lost. "
            "flash_online.integrations.transformers.register(name) registers the attention and the mask function together"
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    queries, keys = query.shape[2], key.shape[2]
    if queries == 1:
        causal = False  # a decoding step sees every key
    elif causal and queries != keys:
        raise ValueError(
            f"attention_mask: expected a mask, or is_causal=False, for {queries} queries and {keys} keys (their alignment is "
            "unknown), got None and is_causal=True"
        )
    if sliding_window is not None and keys > sliding_window:
        raise ValueError(
            f"attention_mask: expected the mask of the host's create_sliding_window_causal_mask with "
            f"sliding_window={sliding_window} and {keys} keys, got None"
        )
    sizes = (query.shape[0], queries, keys)
    return VisibleKeys(sizes, causal, None, False, None, None, None, False, None)


def _check_lengths(visible: VisibleKeys, query: Tensor, key: Tensor) -> None:
    by_position = visible.causal or visible.window is not None or visible.query_spans is not None
    if key.shape[2] != visible.keys or (by_position and query.shape[2] != visible.queries):
        raise ValueError(
            f"attention_mask: expected {visible.queries} queries and {visible.keys} keys, got {query.shape[2]} and "
            f"{key.shape[2]}. {_EAGER}"
        )


def _check_dense(mask: Any) -> Tensor:
    if not isinstance(mask, Tensor):
        raise ValueError(f"attention_mask: expected VisibleKeys, a Tensor or None, got {type(mask).__name__}")
    if mask.dim() == 2:
        raise ValueError(
            f"attention_mask: expected [batch, heads, queries, keys], got {list(mask.shape)}, a padding mask. "
            "The mask function makes one: flash_online.integrations.transformers.register(name) registers both functions"
        )
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise ValueError(f"attention_mask: expected bool (True: takes part) or floating (added), got {mask.dtype}")
    return mask


def _attend_rule(
    query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, bias: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Attention with causal rule, window and padding, or with spans, `[B, L, Hq, Ev]`."""
    spans = visible.spans()
    if spans:
        return attention(query, key, value, mask=bias, **spans, **options).transpose(1, 2).contiguous()
    if visible.used_keys is not None:
        key, value = key[:, :, : visible.used_keys], value[:, :, : visible.used_keys]
        bias = None if bias is None or bias.shape[-1] == 1 else bias[..., : visible.used_keys]
    queries, keys = query.shape[2], key.shape[2]
    positions = _positions(visible, queries, keys)
    causal, window = positions["causal"], positions["window"]
    mask = visible.padding
    if bias is not None:
        if mask is not None and not options["softcap"]:
            query, key, scale = _hide(query, key, mask, options["scale"])
            out = attention(query, key, value, mask=bias, **positions, **options | {"scale": scale}).transpose(1, 2)
            return out.masked_fill(_without_keys(mask, queries, **positions), 0).contiguous()
        else:
            mask = bias if mask is None else _with_bias(mask, bias)
    aligned = visible.lower_right or queries == keys or not (causal or window)
    if mask is None and aligned and not options["dropout_p"] and _is_step(query, key):
        kept = {name: options[name] for name in ("softcap", "sinks", "scale")}
        out = kvcache_attention(query, key, value, None, causal=causal, window=window, **kept)
        return out.transpose(1, 2).contiguous()
    return attention(query, key, value, mask=mask, **positions, **options).transpose(1, 2).contiguous()


def _positions(visible: VisibleKeys, queries: int, keys: int) -> dict[str, Any]:
    """The arguments causal, window and alignment of `attention` for a rule of positions."""
    lower_right = visible.lower_right and queries != keys  # `attention` is faster for upper_left
    causal = visible.causal and not (queries == 1 and visible.lower_right) and not (queries == keys == 1)
    alignment = "lower_right" if lower_right else "upper_left"
    return {"causal": causal, "window": _window(visible, max(queries, keys)), "alignment": alignment}


_FEW_ROWS = 16  # per key head
_MANY_KEYS = 256  # from here on `attention` itself runs in that kernel


def _is_step(query: Tensor, key: Tensor) -> bool:
    """Whether the CPU's kernel for few rows is faster: it reads keys in place, the general kernel copies them."""
    if query.device.type != "cpu" or torch.is_grad_enabled():
        return False
    heads, key_heads = query.shape[1], key.shape[1]
    return key_heads > 0 and query.shape[2] * heads <= _FEW_ROWS * key_heads


def _window(visible: VisibleKeys, length: int) -> tuple[int | None, int | None] | None:
    """The window as an argument of `attention`; None if it hides nothing for this many queries and keys, since calls without
    options are faster."""
    if visible.window is None:
        return None
    left, right = visible.window
    right_bound = None if visible.causal or right >= NO_BOUND else right
    if left >= length - 1 and (right_bound is None or right_bound >= length - 1):
        return None
    return left, right_bound


def _attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: VisibleKeys,
    lengths: tuple[Any, Any, Any, Any],
    bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention inside packed documents in the rows of the batch, `[B, L, Hq, Ev]`."""
    if bias is not None:
        raise NotImplementedError("position_bias: expected None with cu_seq_lens_q, got a bias. Use a dense attention_mask")
    begins_q, begins_k, longest_q, longest_k = lengths
    packed = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    begins = (begins_q.to(torch.int32), begins_k.to(torch.int32))
    longest = [length if isinstance(length, int) else int(length) for length in (longest_q, longest_k)]
    options = options | {"causal": visible.causal, "window": _window(visible, max(longest))}
    out = varlen_attention(*packed, *begins, *longest, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2])).contiguous()


_FAR_BELOW = -32768.0  # added to a score it makes the weight 0; representable in every floating dtype


def _without_keys(
    padding: Tensor, queries: int, causal: bool, window: tuple[int | None, int | None] | None, alignment: str
) -> Tensor:
    """Whether a query sees no key at all, `[B, 1 or L, 1, 1]`: a number that is added to all of its scores hides none."""
    seen = padding[:, 0, 0]
    left, right = window or (None, None)
    right = 0 if causal else right
    if left is right is None:
        return ~seen.any(-1)[:, None, None, None]
    keys = seen.shape[-1]
    place = torch.arange(queries, device=seen.device) + (keys - queries if alignment == "lower_right" else 0)
    begins = torch.zeros_like(place) if left is None else (place - left).clamp(0, keys)
    ends = torch.full_like(place, keys) if right is None else (place + right + 1).clamp(0, keys)
    before = torch.nn.functional.pad(seen.cumsum(-1), (1, 0))
    return (before[:, ends] <= before[:, begins]).view(len(seen), -1, 1, 1)


def _hide(query: Tensor, key: Tensor, padding: Tensor, scale: float | None) -> tuple[Tensor, Tensor, float]:
    """(query, key, scale) with products that hide padding keys, so that a position bias `[1, Hq, L, S]` can stay the mask
    without a copy per batch row: an added column is 1 / scale in the queries, and 0 or far below in the keys. Seven columns of
    zeros keep the rows of 16-bit tensors at addresses that TMA can load."""
    scale = default_scale(query.shape[-1]) if scale is None else float(scale)
    hidden = torch.where(padding[:, :, 0, :, None], 0.0, _FAR_BELOW).to(key.dtype)
    in_query = query.new_full((1, 1, 1, 1), 1.0 / scale).expand(*query.shape[:-1], 1)
    in_key = hidden.expand(*key.shape[:-1], 1)
    grow = torch.nn.functional.pad
    return torch.cat([query, grow(in_query, (0, 7))], -1), torch.cat([key, grow(in_key, (0, 7))], -1), scale


def _with_bias(mask: Tensor, bias: Tensor | None) -> Tensor:
    """A dense mask and a position bias as one float mask."""
    if bias is None:
        return mask
    return torch.where(mask, bias, float("-inf")) if mask.dtype is torch.bool else mask + bias
