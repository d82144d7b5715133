"""Code that the modules of this package share: checks FlashAttention's arguments under their own names and calls the kernels.

FlashAttention's tensors are [batch, length, heads, head dim], or packed [total length, heads, head dim]; ours have the heads
before the length, so conversions are views. FlashAttention aligns its causal rule and windows to the lower right.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checked, _policy, reference
from .._attention_arguments import AttentionOptions
from .._canonicalize import autocast, check_attention_options, check_packed, check_types, window_bounds
from .._checks import check_device, check_flag, check_float, check_floating, check_int, check_tensor
from .._ops import InvalidArgument, accumulator_of, ops
from ..attention import attention_impl, default_scale, draw_rng, tf32_for, try_fast_path
from ..varlen import sequence_rows, varlen_impl

Window = tuple[int | None, int | None]

# Arguments in the signatures that are not supported, with the reason or the alternative.
_REFUSED = {
    "attention_chunk": "there is no kernel for chunks; cut the sequences at chunk ends and call flash_attn_varlen_func",
    "aux_scalars": "they are arguments of score_mod and mask_mod",
    "aux_tensors": "they are arguments of score_mod and mask_mod",
    "block_sparse_tensors": "a bool mask of flash_online.attention skips the blocks that it hides",
    "block_sparse_tensors_bwd": "a bool mask of flash_online.attention skips the blocks that it hides",
    "block_mask": "a bool mask of flash_online.attention skips the blocks that it hides",
    "block_table": "the raw functions take no pages; use flash_attn_varlen_func",
    "fixed_seed_offset": "seeds are torch's: set torch.manual_seed before the call",
    "gather_bwd_recompute_p": "it belongs to gather_kv_indices",
    "gather_bwd_token_chunk": "it belongs to gather_kv_indices",
    "gather_kv_indices": "there is no kernel for keys chosen by index; hide the other keys by a bool mask of attention",
    "k_descale": "there are no float8 kernels; inputs of 16 bits have no scale",
    "leftpad_k": "left-padded keys are not supported yet; pass packed keys with cu_seqlens_k",
    "mask_mod": "use a bool mask of flash_online.attention, of any shape that broadcasts",
    "q_descale": "there are no float8 kernels; inputs of 16 bits have no scale",
    "qv": "join the two products into one: q=torch.cat([q, qv], -1), k=torch.cat([k, v], -1)",
    "return_seed_offset": "seeds are torch's, whose generator draws them",
    "rng_name": "seeds are torch's, whose generator draws them",
    "scheduler_metadata": "it belongs to FlashAttention's own scheduler; leave it out",
    "score_mod": "use softcap, alibi_slopes or a float mask of flash_online.attention",
    "score_mod_bwd": "use softcap, alibi_slopes or a float mask of flash_online.attention",
    "seqused_k": "pass the sequence ends as cu_seqlens_k",
    "v_descale": "there are no float8 kernels; inputs of 16 bits have no scale",
}


def refuse(function: str, **arguments: Any) -> None:
    """Raises NotImplementedError for the first argument that is neither None nor 0 nor False."""
    for name, value in arguments.items():
        if value is None or (isinstance(value, (bool, int)) and not value):
            continue
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise NotImplementedError(f"{function}: {name}: expected the default, got {got}: {_REFUSED[name]}")


class Options(NamedTuple):
    """The options of a call, parsed and checked."""

    scale: float
    causal: bool = False
    window: Window = (None, None)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    deterministic: bool | None = None  # None follows torch's setting

    @property
    def is_plain(self) -> bool:
        """Whether only causal, scale and deterministic are set."""
        return (
            self.window == (None, None) and self.alibi_slopes is self.sinks is None and not self.softcap and not self.dropout_p
        )

    def for_operators(self, query: Tensor) -> AttentionOptions:
        """The options in the raw operators' form, aligned to the lower right."""
        left, right = window_bounds(self.window)
        right = 0 if self.causal else right
        return AttentionOptions(left, right, True, self.scale, self.softcap, self.dropout_p, tf32_for(query))


def read_window(window_size: Any) -> Window:
    """(left, right), None for no bound; FlashAttention also writes a negative int for no bound."""
    if isinstance(window_size, Tensor):
        window_size = window_size.tolist()
    if window_size is None:
        return None, None
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise InvalidArgument(f"window_size: expected None or a pair (left, right), got {window_size!r}")
    left, right = (_bound(bound) for bound in window_size)
    return left, right


def _bound(bound: Any) -> int | None:
    if bound is not None and not isinstance(bound, (int, torch.SymInt)):
        if not hasattr(bound, "__index__"):
            raise InvalidArgument(f"window_size: expected bounds that are int or None, got {bound!r}")
        bound = operator.index(bound)
    return None if bound is None or bound < 0 else bound


def read_options(
    q: Tensor,
    batch: int,
    *,
    softmax_scale: float | None,
    causal: bool = False,
    window_size: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
) -> Options:
    """The options of a call with queries q [..., heads, head dim] in `batch` sequences. Raises TypeError or InvalidArgument."""
    check_types({}, {"alibi_slopes": alibi_slopes, "learnable_sink": learnable_sink}, {"causal": causal})
    check_flag("deterministic", deterministic)
    window = read_window(window_size)
    check_attention_options(q, -2, None, "lower_right", softcap, None, alibi_slopes, dropout_p)
    heads = q.shape[-2]
    if alibi_slopes is not None and tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
        raise InvalidArgument(
            f"alibi_slopes: expected [{heads}] (a slope per query head) or [{batch}, {heads}] (also per sequence), "
            f"got {list(alibi_slopes.shape)}"
        )
    if learnable_sink is not None:
        if tuple(learnable_sink.shape) != (heads,) or not learnable_sink.is_floating_point():
            raise InvalidArgument(
                f"learnable_sink: expected a floating [{heads}], one logit per query head, "
                f"got {list(learnable_sink.shape)} {learnable_sink.dtype}"
            )
        check_device("learnable_sink", learnable_sink, "q", q)
    scale = default_scale(q.shape[-1]) if softmax_scale is None else check_float("softmax_scale", softmax_scale)
    softcap, dropout_p = check_float("softcap", softcap), check_float("dropout_p", dropout_p)
    return Options(scale, causal, window, softcap, alibi_slopes, learnable_sink, dropout_p, deterministic or None)


def read_length(name: str, length: Any) -> int:
    """A length as an int: anything with an __index__, tensors included, as FlashAttention takes it."""
    return operator.index(length) if isinstance(length, Tensor) else check_int(name, length)


def read_inputs(q: Tensor, k: Tensor, v: Tensor, *, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v after autocast's casts. Raises unless their shapes match and a kernel takes them; v may have another head
    dim."""
    layout = "[total length, heads, head dim]" if packed else "[batch, length, heads, head dim]"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        if tensor.dim() != (3 if packed else 4):
            raise InvalidArgument(f"{name}: expected shape {layout}, got {list(tensor.shape)}")
    q, k, v = autocast(q, k, v)
    _policy.require_kernel("varlen_attention" if packed else "attention", q=q, k=k, v=v)
    check_floating("q", q.dtype)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise InvalidArgument(f"{name}: expected q's dtype {q.dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise InvalidArgument(f"{name}: expected q's device {q.device}, got {tensor.device}")
    if not packed and k.shape[0] != q.shape[0]:
        raise InvalidArgument(f"k: expected q's batch {q.shape[0]} (dimension 0), got {k.shape[0]}")
    if k.shape[-1] != q.shape[-1]:
        raise InvalidArgument(f"k: expected q's head dim {q.shape[-1]} (last dimension), got {k.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise InvalidArgument(f"v: expected k's shape {list(k.shape)} in all but the head dim, got {list(v.shape)}")
    heads, key_heads = q.shape[-2], k.shape[-2]
    if key_heads != heads and (key_heads == 0 or heads % key_heads != 0):
        raise InvalidArgument(f"k: expected a divisor of q's {heads} heads (dimension -2), got {key_heads}")
    return q, k, v


def unpacked(name: str, tensor: Tensor, rank: int, count: int) -> tuple[Tensor, ...]:
    """Views of the `count` tensors [..., heads, head dim] stacked in dimension -3 of a tensor of this rank."""
    check_tensor(name, tensor)
    if tensor.dim() != rank or tensor.shape[-3] != count:
        layout = f"[{'batch, length' if rank == 5 else 'total length'}, {count}, heads, head dim]"
        raise InvalidArgument(f"{name}: expected shape {layout}, got {list(tensor.shape)}")
    return tensor.unbind(-3)


def _attend_plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    deterministic: bool,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor | None:
    """Fast path: out for a call with no option but causal and softmax_scale and tensors that `try_fast_path` takes; a fifth of
    the host time. None for any other call, which the slow path checks."""
    if not (window_size is None or (type(window_size) is tuple and window_size in _NO_WINDOW)):
        return None
    if not (alibi_slopes is learnable_sink is None and type(causal) is type(deterministic) is bool):
        return None
    if deterministic or type(softcap) not in _NUMBERS or softcap or type(dropout_p) not in _NUMBERS or dropout_p:
        return None
    if not (type(q) is type(k) is type(v) is Tensor and q.dim() == k.dim() == v.dim() == 4) or k.is_nested or v.is_nested:
        return None
    if q.is_nested or k.shape[:3] != v.shape[:3] or (causal and q.shape[1] != k.shape[1]):
        return None
    out = try_fast_path(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal, softmax_scale, True)
    return None if out is None else out.transpose(1, 2)


_NO_WINDOW, _NUMBERS = ((-1, -1), (None, None)), (int, float)


def attend(q: Tensor, k: Tensor, v: Tensor, *, lse: bool = False, probabilities: bool = False, **arguments: Any):
    """(out [B, L, H, Ev], softmax_lse [B, H, L] or None, S_dmask or None) of q [B, L, H, E] and k, v [B, S, Hk, ...];
    `arguments` are `read_options`'s."""
    if not lse:
        out = _attend_plainly(q, k, v, **arguments)
        if out is not None:
            return out, None, None
    q, k, v = read_inputs(q, k, v, packed=False)
    options = read_options(q, q.shape[0], **arguments)
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    # Both alignments agree for equal lengths; upper_left has a faster path for calls without options.
    lower_right = q.shape[1] != k.shape[1] and not (options.is_plain and not options.causal)
    rng = draw_rng(options.dropout_p, q.device)
    slopes = options.alibi_slopes
    out, softmax_lse, _ = attention_impl(
        query,
        key,
        value,
        None,
        alibi_slopes=None if slopes is None else slopes.expand(query.shape[:2]),
        sinks=options.sinks,
        causal=options.causal,
        window=options.window,
        lower_right=lower_right,
        scale=options.scale,
        softcap=options.softcap,
        dropout_p=options.dropout_p,
        deterministic=options.deterministic,
        return_lse=lse,
        rng=rng,
    )
    weights = signed_weights(query, key, options, rng) if probabilities else None
    return out.transpose(1, 2), softmax_lse if lse else None, weights


def read_packing(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any, max_seqlen_k: Any) -> Packing:
    return Packing(
        cu_seqlens_q, cu_seqlens_k, read_length("max_seqlen_q", max_seqlen_q), read_length("max_seqlen_k", max_seqlen_k)
    )


def check_packed_values(packing: Packing, q: Tensor, k: Tensor) -> None:
    """Inside checked() the host reads and checks the sequence boundaries."""
    if not torch.compiler.is_compiling() and _checked.active:
        _checked.check_packed(*packing, q.shape[0], k.shape[0])


class Packing(NamedTuple):
    """Boundaries of packed sequences, in the form that `check_packed` takes."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def attend_packed(q: Tensor, k: Tensor, v: Tensor, packing: Packing, *, probabilities: bool = False, **arguments: Any):
    """(out [Tq, H, Ev], softmax_lse [H, Tq], S_dmask or None) of packed q [Tq, H, E] and k, v [Tk, Hk, ...]; `arguments` are
    `read_options`'s."""
    q, k, v = read_inputs(q, k, v, packed=True)
    check_packed(q, k, v, *packing)
    check_packed_values(packing, q, k)
    options = read_options(q, packing.cu_seqlens_q.shape[0] - 1, **arguments)
    rng = draw_rng(options.dropout_p, q.device)
    out, softmax_lse, _ = varlen_impl(
        q,
        k,
        v,
        *packing,
        alibi_slopes=options.alibi_slopes,
        sinks=options.sinks,
        causal=options.causal,
        window=options.window,
        scale=options.scale,
        softcap=options.softcap,
        dropout_p=options.dropout_p,
        deterministic=options.deterministic,
        rng=rng,
    )
    return out, softmax_lse, signed_weights_packed(q, k, packing, options, rng) if probabilities else None


def without_unused(packing: Packing, seqused_q: Tensor | None, seqused_k: Tensor | None) -> Packing:
    """The packing with seqused_* `[sequences]` applied: only the first seqused_* rows of each sequence take part.

    Each sequence becomes three: its used queries and keys; its unused queries without keys, so that their results and gradients
    are 0; its unused keys without queries. The host reads no length.
    """
    if seqused_q is None and seqused_k is None:
        return packing
    starts = []
    for name, cu_seqlens, seqused in (
        ("seqused_q", packing.cu_seqlens_q, seqused_q),
        ("seqused_k", packing.cu_seqlens_k, seqused_k),
    ):
        check_tensor(f"cu_seqlens_{name[-1]}", cu_seqlens)
        first, last = cu_seqlens[:-1], cu_seqlens[1:]
        if seqused is None:
            starts.append((first, last, last))
            continue
        check_tensor(name, seqused)
        if seqused.shape != first.shape or seqused.dtype != torch.int32 or seqused.device != first.device:
            raise InvalidArgument(
                f"{name}: expected an int32 {list(first.shape)} on {first.device}, "
                f"got {list(seqused.shape)} {seqused.dtype} on {seqused.device}"
            )
        if not torch.compiler.is_compiling() and _checked.active:
            _checked.check_used(name, seqused, f"cu_seqlens_{name[-1]}", cu_seqlens)
        starts.append((first, torch.minimum(first + seqused.clamp(min=0), last), last))
    (first_q, used_q, last_q), (first_k, used_k, _) = starts
    end_q, end_k = packing.cu_seqlens_q[-1:], packing.cu_seqlens_k[-1:]
    cu_seqlens_q = torch.cat([torch.stack([first_q, used_q, last_q], 1).flatten(), end_q])
    cu_seqlens_k = torch.cat([torch.stack([first_k, used_k, used_k], 1).flatten(), end_k])
    return Packing(cu_seqlens_q, cu_seqlens_k, packing.max_seqlen_q, packing.max_seqlen_k)


# --- return_attn_probs ------------------------------------------------------------------------------------------------------

_ROUNDED = 128  # FlashAttention pads the rows and columns of S_dmask to a multiple of this


def _round_up(length: int) -> int:
    return -(-length // _ROUNDED) * _ROUNDED


def no_weights(q: Tensor) -> Tensor:
    """S_dmask without dropout: an empty tensor, as in FlashAttention."""
    return q.new_empty(0)


@torch.no_grad()
def signed_weights(query: Tensor, key: Tensor, options: Options, rng: Tensor | None) -> Tensor:
    """S_dmask `[B, H, L, S]`, lengths rounded up to 128 and padded with 0, of query `[B, H, L, E]` and key `[B, Hk, S, E]`."""
    if rng is None:
        return no_weights(query)
    weights = _signed_weights(query, key, options, options.alibi_slopes, rng, 0)
    queries, keys = weights.shape[-2:]
    padding = (0, _round_up(keys) - keys, 0, _round_up(queries) - queries)
    return torch.nn.functional.pad(weights, padding)


@torch.no_grad()
def signed_weights_packed(q: Tensor, k: Tensor, packing: Packing, options: Options, rng: Tensor | None) -> Tensor:
    """S_dmask `[sequences, H, max_seqlen_q, max_seqlen_k]`, lengths rounded up to 128; the host reads the lengths."""
    if rng is None:
        return no_weights(q)
    query_rows = sequence_rows(packing.cu_seqlens_q, packing.max_seqlen_q, q.shape[0])
    key_rows = sequence_rows(packing.cu_seqlens_k, packing.max_seqlen_k, k.shape[0])
    sizes = (len(query_rows), q.shape[1], _round_up(packing.max_seqlen_q), _round_up(packing.max_seqlen_k))
    weights = q.new_zeros(sizes)
    for n, (queries, keys) in enumerate(zip(query_rows, key_rows, strict=True)):
        slopes = options.alibi_slopes
        slopes = slopes[n] if slopes is not None and slopes.dim() == 2 else slopes
        query, key = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q[queries], k[keys]))
        part = _signed_weights(query, key, options, slopes, rng, n)
        weights[n, :, : part.shape[-2], : part.shape[-1]] = part[0]
    return weights


def _signed_weights(query, key, options: Options, slopes: Tensor | None, rng: Tensor, first_batch: int) -> Tensor:
    """exp(score - the row's largest), negative where dropout drops the weight, in query's dtype."""
    dtype = accumulator_of(query.dtype)
    (batch, heads, queries, _), keys = query.shape, key.shape[-2]
    repeats = heads // key.shape[1] if key.shape[1] else 1
    scores = query.to(dtype) @ key.to(dtype).repeat_interleave(repeats, 1).mT * options.scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if slopes is not None:
        position = torch.arange(queries, device=query.device).unsqueeze(1) + keys - queries
        distance = (position - torch.arange(keys, device=query.device)).abs()
        scores = scores - slopes.to(dtype)[..., None, None] * distance
    rules = {"causal": options.causal, "window": options.window, "alignment": "lower_right", "device": query.device}
    scores = scores.masked_fill(~reference.visible(queries, keys, **rules), -torch.inf)
    if keys:
        largest = scores.amax(-1, keepdim=True)
        scores = scores - largest.masked_fill(largest == -torch.inf, 0)
    weights = scores.exp()
    kept = ops.attention_dropout_mask.default(rng, first_batch, batch, heads, 0, queries, keys, options.dropout_p)
    return torch.where(kept.view(weights.shape), weights, -weights).to(query.dtype)
