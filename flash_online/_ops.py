"""Loads the library and registers with torch what each raw operator needs beyond its kernels: the shape, strides and dtype of
its results (fakes, for torch.compile and export), its rule under `torch.func.vmap`, and its count of floating point operations.
The operators are in the order of csrc/ops/library.cpp, which documents them.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ._attention_arguments import AttentionTensors

OLDEST_TORCH = (2, 11)  # the stable ABI that the library is built for
LIBRARY = Path(__file__).with_name("libflash_online.so")


class InvalidArgument(RuntimeError, ValueError):
    """An argument that a function of this package does not accept; the message begins with the argument's name."""


class OutOfRange(InvalidArgument, IndexError):
    """A class index that is out of range, for which torch raises IndexError."""


class UnsupportedDtype(InvalidArgument, NotImplementedError):
    """A dtype that no kernel takes. Also a NotImplementedError, which torch raises for most such dtypes."""


def load_library() -> None:
    """Loads libflash_online.so, once per process; its operators register themselves with torch's dispatcher. Raises ImportError
    if torch is too old or the library is missing."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise ImportError(f"flash_online: expected torch 2.11 or newer, got {torch.__version__}")
    if hasattr(torch.ops.flash_online, "attention_forward"):  # loaded by a C++ program, or by an import that failed later
        return
    if not LIBRARY.exists():
        raise ImportError(
            f"flash_online: {LIBRARY.name} is missing next to {Path(__file__).name}: the package is not built. In a checkout, "
            "build it with `pip install -e . --no-build-isolation` (or `pip install .`)"
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(f"flash_online: {LIBRARY} does not load with torch {torch.__version__}; build it again") from error


load_library()
ops = torch.ops.flash_online


def below_autograd(operator) -> Callable:
    """The operator without its derivative (csrc/ops/operators.h), as a callable that passes its arguments straight to torch's
    dispatcher. It skips the test for __torch_function__, which plain tensors do not have, and saves 0.5 to 1 microseconds."""
    return functools.partial(torch._C._dispatch_call_boxed, operator.below_autograd._handle)


def call_below(operator, *arguments):
    """Calls the overload that graphs hold, without a derivative at the current level of torch.func."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator.default(*arguments)


def direct_call(operator) -> Callable:
    """`below_autograd` for an operator that has no derivative. While Dynamo traces the call and under torch.func it calls the
    other overload, which has the vmap rule."""
    below, default = below_autograd(operator), operator.default

    def call(*arguments):
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return default(*arguments)
        try:
            return below(*arguments)
        except RuntimeError as error:
            raise surfaced(error, *arguments) from None

    return call


def without_autocast(function: Callable) -> Callable:
    """The function with autocast off on every device."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return call


def surfaced(error: RuntimeError, *inputs) -> RuntimeError:
    """The error to raise for an error of a raw operator with these inputs: torch.OutOfMemoryError if the GPU ran out of memory.
    The stable ABI that the operators use passes on neither the types nor the messages of torch's errors."""
    if isinstance(error, torch.OutOfMemoryError) or not _FAILED_ALLOCATION.search(str(error)):
        return error
    device = next((value.device for value in inputs if isinstance(value, Tensor) and value.is_cuda), None)
    return error if device is None else torch.OutOfMemoryError(f"CUDA out of memory on {device}: {error}")


_FAILED_ALLOCATION = re.compile(r"out of memory|\baoti_torch_empty\w*\(.* API call failed", re.DOTALL)
_fragment = torch.library.Library("flash_online", "FRAGMENT")  # registrations end when this object is freed


def implement(name: str, kernel: Callable, device: str) -> None:
    """Registers an operator's kernel in Python for "CPU" or "CUDA"."""
    for overload in (name, f"{name}.below_autograd"):
        _fragment.impl(overload, kernel, device)


FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # dtypes of the kernels' operands
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, lse, class weights, ALiBi slopes and sinks for operands of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_known(condition) -> bool:
    """Returns whether a condition on sizes is known to hold. It does not specialize sizes that a tracer keeps symbolic.

    Conditions on data-dependent sizes are unknown; the operators check these sizes when they run."""
    if not torch.compiler.is_compiling() and isinstance(condition, (bool, Tensor)):  # torch.jit.trace's sizes are tensors
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def dense_strides_in_order(sizes, strides) -> list[int]:
    """Strides of a dense tensor of these sizes, with its dimensions in memory in the order of `strides`, outermost first.
    Dimensions of stride 0 or of equal stride keep their order. The function of this name in csrc/ops/tensor.h has the same
    rule."""
    order = list(range(len(sizes)))
    for i in range(1, len(order)):
        for j in range(i, 0, -1):
            outer, inner = strides[order[j - 1]], strides[order[j]]
            if is_known(outer == 0) or is_known(inner == 0) or not is_known(outer < inner):
                break
            order[j - 1], order[j] = order[j], order[j - 1]
    dense = [1] * len(sizes)
    step = 1
    for dim in reversed(order):
        dense[dim] = step
        size = sizes[dim]  # torch 2.11 does not trace sym_max of numbers
        step = step * (max(size, 1) if isinstance(size, int) else torch.sym_max(size, 1))
    return dense


def _empty_in_order(sizes, like: Tensor) -> Tensor:
    return like.new_empty_strided(sizes, dense_strides_in_order(sizes, like.stride()))


def _accumulator(like: Tensor, sizes) -> Tensor:
    return like.new_empty(sizes, dtype=accumulator_of(like.dtype))


def _register(name: str, fake, vmap, flops, get_raw: bool = False) -> None:
    """Registers the fake, vmap and flops functions of an operator, and makes graphs and dispatch modes use the overload that
    has a derivative. get_raw: `flops` gets tensors rather than their shapes."""
    packet = getattr(ops, name)
    for overload in (name, f"{name}.below_autograd"):
        torch.library.register_fake(f"flash_online::{overload}", fake, lib=_fragment, allow_override=True)
    torch.library.register_vmap(f"flash_online::{name}", vmap, lib=_fragment)

    for key in ("Python", "PreDispatch", "Tracer"):  # dispatch modes and tensor subclasses, make_fx, torch.jit.trace
        _fragment.impl(f"{name}.below_autograd", functools.partial(call_below, packet), key)
    if packet not in flop_registry:
        register_flop_formula(packet, get_raw=get_raw)(flops)


def _no_flops(*args, out_shape=None, **kwargs) -> int:
    return 0  # torch counts only matrix products


# --- vmap -------------------------------------------------------------------------------------------------------------------


def _front(tensor: Tensor | None, dim: int | None, size: int, expand: bool = True) -> Tensor | None:
    """The tensor with the mapped dimension moved to the front. A tensor that is not mapped gets one there, of stride 0 and size
    `size`, or of size 1 without `expand`."""
    if tensor is None:
        return None
    if dim is not None:
        return tensor.movedim(dim, 0)
    tensor = tensor.unsqueeze(0)
    return tensor.expand(size, *tensor.shape[1:]) if expand else tensor


def _one_by_one(op, info, in_dims, args):
    """Calls the operator once per index of the mapped dimension and stacks the results: the vmap rule of operators without a
    batch dimension that could hold the mapped one."""

    def pick(arg, dim, index):
        if isinstance(arg, (list, tuple)):
            return [pick(a, d, index) for a, d in zip(arg, dim, strict=True)]
        return arg.select(dim, index) if isinstance(arg, Tensor) and dim is not None else arg

    dims = in_dims if isinstance(in_dims, tuple) else tuple(in_dims)
    if info.batch_size == 0:
        return _of_no_index(op, dims, args)
    results = [op(*(pick(a, d, i) for a, d in zip(args, dims, strict=True))) for i in range(info.batch_size)]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])


def _of_no_index(op, dims, args):
    """`_one_by_one` of a mapped dimension of size 0: the shapes and dtypes of the results are those on meta."""

    def on_meta(arg, dim):
        if isinstance(arg, (list, tuple)):
            return [on_meta(a, d) for a, d in zip(arg, dim, strict=True)]
        if not isinstance(arg, Tensor):
            return arg
        return arg.new_empty(_without(arg.shape, dim) if dim is not None else arg.shape, device="meta")

    like = next(arg for arg in tree_leaves(args) if isinstance(arg, Tensor))
    results = op(*(on_meta(arg, dim) for arg, dim in zip(args, dims, strict=True)))
    whole = tree_map(lambda result: like.new_empty((0, *result.shape), dtype=result.dtype), results)
    return whole, 0 if isinstance(results, Tensor) else (0,) * len(results)


# --- attention --------------------------------------------------------------------------------------------------------------


def _attention_forward_fake(
    query, key, value, mask, alibi_slopes, sinks, rng, window_left, window_right, lower_right, scale, softcap, dropout_p,
    tf32=False, deterministic=None, query_spans=None, key_spans=None, tiles=None,
):  # fmt: skip
    out = _empty_in_order([*query.shape[:-1], value.shape[-1]], query)
    return out, _accumulator(query, query.shape[:-1]), _accumulator(query, query.shape[:-1])


def _attention_forward_with_max_logit_fake(query, *args, **kwargs):
    return *_attention_forward_fake(query, *args, **kwargs), query.new_empty(query.shape[:-2], dtype=torch.float32)


def _attention_forward_vmap(info, in_dims, *args, operator=ops.attention_forward.default):
    query, key, value, mask, alibi_slopes, sinks, rng, *options = args
    dims = _tensor_dims(in_dims)
    if rng is not None or dims.sinks is not None:  # dropout depends on the batch index; sinks have no batch dimension
        return _one_by_one(operator, info, in_dims, args)
    size = info.batch_size
    results = operator(
        _front(query, dims.query, size),
        _front(key, dims.key, size),
        _front(value, dims.value, size),
        _front(mask, dims.mask, size, expand=False),
        _front(alibi_slopes, dims.alibi_slopes, size),
        sinks,
        rng,
        *_with_sparsity_in_front(options, in_dims[7:], size),
    )
    return results, (0,) * len(results)


_attention_forward_with_max_logit_vmap = functools.partial(
    _attention_forward_vmap, operator=ops.attention_forward_with_max_logit.default
)


def _with_sparsity_in_front(options, in_dims, size) -> list:
    """The arguments after an operator's tensors. Spans and tiles, the only ones of them that may be mapped, may have size 1 in
    batch dimensions."""
    return [
        _front(option, dim, size, expand=False) if isinstance(option, Tensor) else option
        for option, dim in zip(options, in_dims, strict=True)
    ]


def _tensor_dims(in_dims) -> AttentionTensors:
    """The mapped dimension of each tensor, or None."""
    query, key, value, mask, alibi_slopes, sinks, rng, *_ = in_dims
    return AttentionTensors(query, key, value, mask, alibi_slopes, sinks, rng)


def _products(query, key, value) -> tuple[int, int]:
    """Multiply-adds of query key^T and of weights times value, over all heads and all pairs of query and key, including pairs
    that a causal mask hides, as torch counts."""
    pairs = key[-2]
    for size in query[:-1]:
        pairs = pairs * size
    return pairs * query[-1], pairs * value[-1]


def _attention_forward_flops(query, key, value, *args, out_shape=None, **kwargs) -> int:
    scores, outputs = _products(query, key, value)
    return 2 * (scores + outputs)


_register("attention_forward", _attention_forward_fake, _attention_forward_vmap, _attention_forward_flops)
_register(
    "attention_forward_with_max_logit",
    _attention_forward_with_max_logit_fake,
    _attention_forward_with_max_logit_vmap,
    _attention_forward_flops,
)


def _attention_inference_fake(query, key, value, causal, scale, tf32=False):
    return _empty_in_order([*query.shape[:-1], value.shape[-1]], query)


def _attention_inference_vmap(info, in_dims, query, key, value, *options):
    tensors = (query, key, value)
    front = (_front(tensor, dim, info.batch_size) for tensor, dim in zip(tensors, in_dims, strict=False))
    return ops.attention_inference.default(*front, *options), 0


_register("attention_inference", _attention_inference_fake, _attention_inference_vmap, _attention_forward_flops)


def _attention_inference_with_options_fake(
    query, key, value, mask, alibi_slopes, sinks, window_left, window_right, lower_right, scale, softcap, tf32=False,
    query_spans=None, key_spans=None, tiles=None, return_lse=True,
):  # fmt: skip
    out = _attention_inference_fake(query, key, value, False, scale)
    return out, _accumulator(query, query.shape[:-1] if return_lse else [0])


def _attention_inference_with_options_vmap(info, in_dims, query, key, value, mask, alibi_slopes, sinks, *options):
    operator = ops.attention_inference_with_options.default
    query_dim, key_dim, value_dim, mask_dim, slopes_dim, sinks_dim, *_ = in_dims
    if sinks_dim is not None:  # sinks have no batch dimension
        return _one_by_one(operator, info, in_dims, (query, key, value, mask, alibi_slopes, sinks, *options))
    size = info.batch_size
    front = (_front(tensor, dim, size) for tensor, dim in ((query, query_dim), (key, key_dim), (value, value_dim)))
    mask, alibi_slopes = _front(mask, mask_dim, size, expand=False), _front(alibi_slopes, slopes_dim, size)
    out, lse = operator(*front, mask, alibi_slopes, sinks, *_with_sparsity_in_front(options, in_dims[6:], size))
    return (out, lse if lse.dim() > 1 else lse.expand(size, 0)), (0, 0)


_register(
    "attention_inference_with_options",
    _attention_inference_with_options_fake,
    _attention_inference_with_options_vmap,
    _attention_forward_flops,
)


def _attention_training_fake(query, key, value, causal, scale, tf32=False):
    batch, *rest, _ = query.shape
    return _attention_inference_fake(query, key, value, causal, scale, tf32), _accumulator(query, [2 * batch, *rest])


def _attention_training_vmap(info, in_dims, *args):
    return _one_by_one(ops.attention_training.default, info, in_dims, args)


_register("attention_training", _attention_training_fake, _attention_training_vmap, _attention_forward_flops)


def _attention_training_backward_fake(grad_out, query, key, value, out, stats, causal, scale, deterministic, tf32=False):
    return tuple(_empty_in_order(tensor.shape, tensor) for tensor in (query, key, value))


def _attention_training_backward_vmap(info, in_dims, *args):
    return _one_by_one(ops.attention_training_backward.default, info, in_dims, args)


def _attention_training_backward_flops(grad_out, query, key, value, *args, out_shape=None, **kwargs) -> int:
    return _attention_backward_flops(grad_out, None, query, key, value)


_register(
    "attention_training_backward",
    _attention_training_backward_fake,
    _attention_training_backward_vmap,
    _attention_training_backward_flops,
)


def _attention_backward_fake(
    grad_out, grad_lse, query, key, value, mask, alibi_slopes, sinks, rng, out, lse, lse_low, window_left, window_right,
    lower_right, scale, softcap, dropout_p, mask_grad, deterministic, tf32=False, query_spans=None, key_spans=None,
    tiles=None,
):  # fmt: skip
    grads = [_empty_in_order(tensor.shape, tensor) for tensor in (query, key, value)]
    grad_mask = _empty_in_order(mask.shape, mask) if mask_grad else query.new_empty([0])
    return (*grads, grad_mask, _accumulator(query, [query.shape[-3]] if sinks is not None else [0]))


def _attention_backward_vmap(
    info, in_dims, grad_out, grad_lse, query, key, value, mask, alibi_slopes, sinks, rng, out, lse, lse_low, window_left,
    window_right, lower_right, scale, softcap, dropout_p, mask_grad, deterministic, *others
):  # fmt: skip
    tensors = (grad_out, grad_lse, query, key, value, mask, alibi_slopes, sinks, rng, out, lse, lse_low)
    options = (window_left, window_right, lower_right, scale, softcap, dropout_p, mask_grad, deterministic, *others)
    op, size = ops.attention_backward.default, info.batch_size
    if rng is not None or sinks is not None:  # the gradient of sinks would be summed over the mapped dimension
        return _one_by_one(op, info, in_dims, (*tensors, *options))
    grad_out_dim, grad_lse_dim, *tensor_dims = in_dims
    _, _, _, _, _, _, _, out_dim, lse_dim, lse_low_dim, *_ = tensor_dims
    dims = _tensor_dims(tensor_dims)
    results = op(
        _front(grad_out, grad_out_dim, size),
        _front(grad_lse, grad_lse_dim, size),
        _front(query, dims.query, size),
        _front(key, dims.key, size),
        _front(value, dims.value, size),
        # A mask that is not mapped still has one gradient per index of the mapped dimension, so it is expanded with stride 0.
        _front(mask, dims.mask, size, expand=mask_grad),
        _front(alibi_slopes, dims.alibi_slopes, size),
        sinks,
        rng,
        _front(out, out_dim, size),
        _front(lse, lse_dim, size).contiguous(),
        _front(lse_low, lse_low_dim, size).contiguous(),
        *_with_sparsity_in_front(options, in_dims[12:], size),
    )
    return results, (0, 0, 0, 0 if mask_grad else None, None)


def _attention_backward_flops(grad_out, grad_lse, query, key, value, *args, out_shape=None, **kwargs) -> int:
    scores, outputs = _products(query, key, value)
    return 2 * (3 * scores + 2 * outputs)  # scores, grad_query, grad_key; grad_scores, grad_value


_register("attention_backward", _attention_backward_fake, _attention_backward_vmap, _attention_backward_flops)


def _attention_varlen_forward_fake(query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng, *options):
    out = _empty_in_order([*query.shape[:-1], value.shape[-1]], query)
    lse_sizes = [query.shape[1], query.shape[0]]
    return out, _accumulator(query, lse_sizes), _accumulator(query, lse_sizes)


def _attention_varlen_forward_with_max_logit_fake(query, key, value, cu_seqlens_q, *args, **kwargs):
    results = _attention_varlen_forward_fake(query, key, value, cu_seqlens_q, *args, **kwargs)
    return *results, query.new_empty([cu_seqlens_q.shape[0] - 1, query.shape[1]], dtype=torch.float32)


def _attention_varlen_forward_vmap(info, in_dims, *args):
    return _one_by_one(ops.attention_varlen_forward.default, info, in_dims, args)


def _attention_varlen_forward_with_max_logit_vmap(info, in_dims, *args):
    return _one_by_one(ops.attention_varlen_forward_with_max_logit.default, info, in_dims, args)


def _varlen_lengths(cu_seqlens: Tensor, max_seqlen: int) -> list[int]:
    """The length of each sequence; max_seqlen for all if cu_seqlens has no data, e.g. while compiling, as torch counts."""
    if isinstance(cu_seqlens, FakeTensor) or cu_seqlens.device.type == "meta":
        return [max_seqlen] * (cu_seqlens.shape[0] - 1)
    return [min(max(length, 0), max_seqlen) for length in cu_seqlens.diff().tolist()]


def _varlen_products(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> tuple[int, int]:
    """`_products` of packed sequences; query, key and value are sizes, cu_seqlens_q and cu_seqlens_k tensors."""
    lengths = zip(_varlen_lengths(cu_seqlens_q, max_seqlen_q), _varlen_lengths(cu_seqlens_k, max_seqlen_k), strict=True)
    pairs = query[1] * sum(queries * keys for queries, keys in lengths)
    return pairs * query[-1], pairs * value[-1]


def _attention_varlen_forward_flops(
    query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng, max_seqlen_q, max_seqlen_k, *options,
    out_val=None, **kwargs,
) -> int:  # fmt: skip
    shapes = (tensor.shape for tensor in (query, key, value))
    scores, outputs = _varlen_products(*shapes, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return 2 * (scores + outputs)


_register(
    "attention_varlen_forward",
    _attention_varlen_forward_fake,
    _attention_varlen_forward_vmap,
    _attention_varlen_forward_flops,
    get_raw=True,
)
_register(
    "attention_varlen_forward_with_max_logit",
    _attention_varlen_forward_with_max_logit_fake,
    _attention_varlen_forward_with_max_logit_vmap,
    _attention_varlen_forward_flops,
    get_raw=True,
)


def _attention_varlen_backward_fake(
    grad_out, grad_lse, query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, *rest
):
    grads = [_empty_in_order(tensor.shape, tensor) for tensor in (query, key, value)]
    return (*grads, _accumulator(query, [query.shape[1]] if sinks is not None else [0]))


def _attention_varlen_backward_vmap(info, in_dims, *args):
    return _one_by_one(ops.attention_varlen_backward.default, info, in_dims, args)


def _attention_varlen_backward_flops(
    grad_out, grad_lse, query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, rng, out, lse, lse_low,
    max_seqlen_q, max_seqlen_k, *options, out_val=None, **kwargs,
) -> int:  # fmt: skip
    shapes = (tensor.shape for tensor in (query, key, value))
    scores, outputs = _varlen_products(*shapes, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return 2 * (3 * scores + 2 * outputs)


_register(
    "attention_varlen_backward",
    _attention_varlen_backward_fake,
    _attention_varlen_backward_vmap,
    _attention_varlen_backward_flops,
    get_raw=True,
)


def _cached_lse(query, query_starts):
    return _accumulator(query, query.shape[:-1] if query_starts is None else [query.shape[1], query.shape[0]])


def _attention_cached_fake(query, key_cache, value_cache, lengths, left, rows, block_table, query_starts, *rest):
    return _empty_in_order([*query.shape[:-1], value_cache.shape[-1]], query), _cached_lse(query, query_starts)


def _attention_cached_in_place_fake(out, query, key_cache, value_cache, lengths, left, rows, block_table, query_starts, *rest):
    return _cached_lse(query, query_starts)


def _no_vmap(name: str):
    def refuse(info, in_dims, *args):
        raise NotImplementedError(f"flash_online::{name}: expected no vmap, as its batch is the cache's, got a call inside one")

    return refuse


def _attention_cached_flops(query, key_cache, value_cache, lengths, left, rows, block_table, *rest, out_shape=None, **kwargs):
    """Counts the cache's capacity, since only the device knows the lengths."""
    keys = key_cache[2] * (1 if block_table is None else block_table[1])
    rows = math.prod(query[:-1])
    return 2 * rows * keys * (query[-1] + value_cache[-1])


def _attention_cached_in_place_flops(out, *args, **kwargs):
    return _attention_cached_flops(*args, **kwargs)


_register("attention_cached", _attention_cached_fake, _no_vmap("attention_cached"), _attention_cached_flops)
_register("attention_cached_", _attention_cached_in_place_fake, _no_vmap("attention_cached_"), _attention_cached_in_place_flops)


def _attention_decode_fake(query, key_cache, value_cache, *rest):
    return _empty_in_order([*query.shape[:-1], value_cache.shape[-1]], query)


def _attention_decode_flops(query, key_cache, value_cache, lengths, block_table, *rest, **kwargs):
    return _attention_cached_flops(query, key_cache, value_cache, lengths, None, None, block_table)


_register("attention_decode", _attention_decode_fake, _no_vmap("attention_decode"), _attention_decode_flops)


def _cache_append_fake(key_cache, value_cache, key, value, query, *rest):
    if query is None:
        return key_cache.new_empty([0], dtype=(key if key is not None else key_cache).dtype)
    return _empty_in_order(query.shape, query)


_register("cache_append_", _cache_append_fake, _no_vmap("cache_append_"), _no_flops)


def _attention_weight_sums_fake(query, key, lse, window_left, window_right, lower_right, last, scale, softcap):
    return query.new_empty([*query.shape[:-2], key.shape[-2]], dtype=torch.float32)


def _with_batch(operator, count, info, in_dims, args):
    """The vmap rule of an operator whose first `count` arguments have a batch, into which it folds the mapped dimension."""
    tensors = [_front(tensor, dim, info.batch_size) for tensor, dim in zip(args[:count], in_dims[:count], strict=True)]
    results = operator(*(tensor.flatten(0, 1) for tensor in tensors), *args[count:])
    return tree_map(lambda result: result.unflatten(0, tensors[0].shape[:2]), results)


def _attention_weight_sums_vmap(info, in_dims, *args):
    return _with_batch(ops.attention_weight_sums.default, 3, info, in_dims, args), 0


def _attention_weight_sums_flops(query, key, *args, out_shape=None, **kwargs) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * query[-1]


_register("attention_weight_sums", _attention_weight_sums_fake, _attention_weight_sums_vmap, _attention_weight_sums_flops)


def _float8_attention_fake(
    query, key, value, query_scale, key_scale, value_scale, smooth_keys, window_left, window_right, lower_right,
    query_spans, key_spans, softcap, sinks, scale, out_dtype, return_lse,
):  # fmt: skip
    sizes = [*query.shape[:-1], value.shape[-1]]
    out = query.new_empty_strided(sizes, dense_strides_in_order(sizes, query.stride()), dtype=out_dtype)
    return out, query.new_empty(query.shape[:-1] if return_lse else [0], dtype=torch.float32)


def _float8_attention_vmap(info, in_dims, *args):
    sinks, size = 13, info.batch_size
    if in_dims[sinks] is not None:  # sinks have no batch dimension
        return _one_by_one(ops.float8_attention.default, info, in_dims, args)
    batch = _front(args[0], in_dims[0], size).shape[:2]

    def folded(tensor, dim):  # the mapped dimension and the batch in one; spans may have size 1 in the batch
        tensor = _front(tensor, dim, size)
        return tensor.expand(*batch, *tensor.shape[2:]).flatten(0, 1)

    given = [
        folded(argument, in_dims[n]) if isinstance(argument, Tensor) and n != sinks else argument
        for n, argument in enumerate(args)
    ]
    out, lse = ops.float8_attention.default(*given)
    return (out.unflatten(0, batch), lse.unflatten(0, batch) if args[-1] else lse.expand(size, 0)), (0, 0)


_register("float8_attention", _float8_attention_fake, _float8_attention_vmap, _attention_forward_flops)


def _attention_dropout_mask_fake(rng, batch_begin, batch, heads, query_begin, queries, keys, dropout_p):
    return rng.new_empty([batch, heads, queries, keys], dtype=torch.bool)


def _attention_dropout_mask_vmap(info, in_dims, rng, *options):
    return _one_by_one(ops.attention_dropout_mask.default, info, in_dims, (rng, *options))


_register("attention_dropout_mask", _attention_dropout_mask_fake, _attention_dropout_mask_vmap, _no_flops)


def _blocks(count, size):
    return (count + size - 1) // size


def _block_tiles_fake(counts, indices, rows, columns, queries, keys):
    return counts.new_empty([*counts.shape[:-1], _blocks(queries, 64), _blocks(keys, columns)], dtype=torch.bool)


def _block_tiles_vmap(info, in_dims, counts, indices, *options):
    lists = (_front(tensor, dim, info.batch_size) for tensor, dim in zip((counts, indices), in_dims[:2], strict=True))
    return ops.block_tiles.default(*lists, *options), 0


_register("block_tiles", _block_tiles_fake, _block_tiles_vmap, _no_flops)


def _block_means_fake(query, key, *sizes):
    counts = (_blocks(rows.shape[-2], size) for rows, size in zip((query, key), sizes, strict=True))
    shapes = ([*rows.shape[:-2], count, rows.shape[-1]] for rows, count in zip((query, key), counts, strict=True))
    return tuple(query.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _block_means_vmap(info, in_dims, *args):
    return _with_batch(ops.block_means.default, 2, info, in_dims, args), (0, 0)


_register("block_means", _block_means_fake, _block_means_vmap, _no_flops)


def _block_maxima_fake(query, key, rows, columns, causal, scale):
    counts = _blocks(query.shape[-2], rows), _blocks(key.shape[-2], columns)
    return query.new_empty([*query.shape[:-2], *counts], dtype=torch.float32)


def _block_maxima_vmap(info, in_dims, *args):
    return _with_batch(ops.block_maxima.default, 2, info, in_dims, args), 0


def _block_maxima_flops(query, key, *args, out_shape=None, **kwargs) -> int:
    return 2 * math.prod(query) * key[2]


_register("block_maxima", _block_maxima_fake, _block_maxima_vmap, _block_maxima_flops)


def _block_topk_fake(scores, k, causal, rows, columns):
    count = min(k, scores.shape[-1]) if isinstance(scores.shape[-1], int) else torch.sym_min(k, scores.shape[-1])
    lists = scores.shape[:-1]
    return scores.new_empty(lists, dtype=torch.int32), scores.new_empty([*lists, count], dtype=torch.int32)


def _block_topk_vmap(info, in_dims, scores, *options):
    return ops.block_topk.default(_front(scores, in_dims[0], info.batch_size), *options), (0, 0)


_register("block_topk", _block_topk_fake, _block_topk_vmap, _no_flops)


def _attention_merge_fake(outs, lses):
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


def _all_front(tensors, dims, size):
    return [_front(tensor, dim, size) for tensor, dim in zip(tensors, dims, strict=True)]


def _attention_merge_vmap(info, in_dims, outs, lses):
    outs, lses = _all_front(outs, in_dims[0], info.batch_size), _all_front(lses, in_dims[1], info.batch_size)
    return ops.attention_merge.default(outs, lses), (0, 0)


_register("attention_merge", _attention_merge_fake, _attention_merge_vmap, _no_flops)


def _attention_merge_backward_fake(grad_out, grad_lse, outs, lses):
    return [out.new_empty(out.shape) for out in outs], [lse.new_empty(lse.shape) for lse in lses]


def _attention_merge_backward_vmap(info, in_dims, grad_out, grad_lse, outs, lses):
    size = info.batch_size
    results = ops.attention_merge_backward.default(
        _front(grad_out, in_dims[0], size),
        _front(grad_lse, in_dims[1], size),
        _all_front(outs, in_dims[2], size),
        _all_front(lses, in_dims[3], size),
    )
    return results, ([0] * len(outs), [0] * len(lses))


_register("attention_merge_backward", _attention_merge_backward_fake, _attention_merge_backward_vmap, _no_flops)


def _copy_blocks_fake(sources, plan):
    numbers, results = iter(plan), []
    for _ in range(next(numbers)):
        like, rank = next(numbers), next(numbers)
        sizes, strides = ([next(numbers) for _ in range(rank)] for _ in range(2))
        dtype = torch.uint8 if like < 0 else sources[like].dtype
        results.append(torch.empty_strided(sizes, strides, dtype=dtype, device=sources[0].device))
    return results


def _copy_blocks_vmap(info, in_dims, sources, plan):
    results, dims = _one_by_one(ops.copy_blocks.default, info, (in_dims[0], None), (sources, plan))
    return list(results), list(dims)


_register("copy_blocks", _copy_blocks_fake, _copy_blocks_vmap, _no_flops)


# --- rows -------------------------------------------------------------------------------------------------------------------


def _softmax_forward_fake(input, dim, log, dtype):
    return input.new_empty(input.shape, dtype=dtype)


def _softmax_forward_vmap(info, in_dims, input, dim, log, dtype):
    return ops.softmax_forward.default(_front(input, in_dims[0], info.batch_size), dim + 1, log, dtype), 0


_register("softmax_forward", _softmax_forward_fake, _softmax_forward_vmap, _no_flops)


def _softmax_backward_fake(grad, output, dim, log, input_dtype):
    return output.new_empty(output.shape, dtype=input_dtype)


def _softmax_backward_vmap(info, in_dims, grad, output, dim, log, input_dtype):
    grad, output = _front(grad, in_dims[0], info.batch_size), _front(output, in_dims[1], info.batch_size)
    return ops.softmax_backward.default(grad, output, dim + 1, log, input_dtype), 0


_register("softmax_backward", _softmax_backward_fake, _softmax_backward_vmap, _no_flops)


def _without(sizes, dim: int) -> list[int]:
    return [size for i, size in enumerate(sizes) if i != dim]


def _logsumexp_forward_fake(input, dim, dtype=None):
    return input.new_empty(_without(input.shape, dim), dtype=dtype or accumulator_of(input.dtype))


def _logsumexp_forward_vmap(info, in_dims, input, dim, dtype=None):
    return ops.logsumexp_forward.default(_front(input, in_dims[0], info.batch_size), dim + 1, dtype), 0


_register("logsumexp_forward", _logsumexp_forward_fake, _logsumexp_forward_vmap, _no_flops)


def _logsumexp_backward_fake(grad, input, dim):
    return input.new_empty(input.shape)


def _logsumexp_backward_vmap(info, in_dims, grad, input, dim):
    grad, input = _front(grad, in_dims[0], info.batch_size), _front(input, in_dims[1], info.batch_size)
    return ops.logsumexp_backward.default(grad, input, dim + 1), 0


_register("logsumexp_backward", _logsumexp_backward_fake, _logsumexp_backward_vmap, _no_flops)


def _cross_entropy_forward_fake(input, target, weight, ignore_index, label_smoothing, return_entropy=False):
    rows = _without(input.shape, 1)
    return *(_accumulator(input, rows) for _ in range(3)), _accumulator(input, rows if return_entropy else [0])


def _fold(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Merges the mapped dimension with the batch dimension 0, so that classes stay dimension 1."""
    return None if tensor is None else _front(tensor, dim, size).flatten(0, 1)


def _unfold(tensor: Tensor, size: int, rows: int) -> Tensor:
    """Undoes `_fold`, with the mapped dimension in front of `rows`."""
    return tensor.unflatten(0, (size, rows))


def _cross_entropy_folds(input_dim, target_dim, weight_dim, target) -> bool:
    """Returns whether folding copies no large operand: an operand that is not mapped would be repeated."""
    return input_dim is not None and weight_dim is None and (target_dim is not None or not target.is_floating_point())


def _cross_entropy_forward_vmap(info, in_dims, input, target, weight, *options):
    if not _cross_entropy_folds(*in_dims[:3], target):
        return _one_by_one(ops.cross_entropy_forward.default, info, in_dims, (input, target, weight, *options))
    size, count = _front(input, in_dims[0], info.batch_size).shape[:2]
    input, target = _fold(input, in_dims[0], size), _fold(target, in_dims[1], size)
    *rows, entropy = ops.cross_entropy_forward.default(input, target, weight, *options)
    has_entropy = entropy.shape == rows[0].shape
    rows = [_unfold(row, size, count) for row in (*rows, *([entropy] if has_entropy else []))]
    return (*rows, entropy)[:4], (0, 0, 0, 0 if has_entropy else None)


_register("cross_entropy_forward", _cross_entropy_forward_fake, _cross_entropy_forward_vmap, _no_flops)


def _cross_entropy_backward_fake(
    grad_loss, grad_lse, input, target, weight, ignore_index, label_smoothing, target_grad, grad_entropy=None, entropy=None
):
    return input.new_empty(input.shape), target.new_empty(target.shape) if target_grad else input.new_empty([0])


def _cross_entropy_backward_vmap(
    info, in_dims, grad_loss, grad_lse, input, target, weight, ignore_index, label_smoothing, target_grad, *entropy
):
    size, options = info.batch_size, (weight, ignore_index, label_smoothing, target_grad)
    if not _cross_entropy_folds(*in_dims[2:5], target):
        args = (grad_loss, grad_lse, input, target, *options, *entropy)
        return _one_by_one(ops.cross_entropy_backward.default, info, in_dims, args)
    count = _front(input, in_dims[2], size).shape[1]
    folded = [_fold(tensor, dim, size) for tensor, dim in zip((grad_loss, grad_lse, input, target), in_dims, strict=False)]
    entropy = [_fold(tensor, dim, size) for tensor, dim in zip(entropy, in_dims[8:], strict=True)]
    grad_input, grad_target = ops.cross_entropy_backward.default(*folded, *options, *entropy)
    if target_grad:
        grad_target = _unfold(grad_target, size, count)
    return (_unfold(grad_input, size, count), grad_target), (0, 0 if target_grad else None)


_register("cross_entropy_backward", _cross_entropy_backward_fake, _cross_entropy_backward_vmap, _no_flops)


_FEW_LOSSES = 8192  # kFewLosses in csrc/cuda/rows/rows.h


def _cross_entropy_loss_fake(input, target, weight, ignore_index, label_smoothing, mean, dtype):
    rows = math.prod(_without(input.shape, 1))
    if input.device.type == "cpu":
        kept = 3 * rows  # per row: loss, weight and lse
    else:
        kept = 2 * rows if rows <= _FEW_LOSSES else 0
    return input.new_empty([], dtype=dtype), _accumulator(input, [kept + 1])


def _cross_entropy_loss_vmap(info, in_dims, *args):
    return _one_by_one(ops.cross_entropy_loss.default, info, in_dims, args)


_register("cross_entropy_loss", _cross_entropy_loss_fake, _cross_entropy_loss_vmap, _no_flops)


def _cross_entropy_loss_backward_fake(grad, numbers, input, target, weight, ignore_index, label_smoothing):
    return input.new_empty(input.shape)


def _cross_entropy_loss_backward_vmap(info, in_dims, *args):
    return _one_by_one(ops.cross_entropy_loss_backward.default, info, in_dims, args)


_register("cross_entropy_loss_backward", _cross_entropy_loss_backward_fake, _cross_entropy_loss_backward_vmap, _no_flops)


def _cross_entropy_backward_in_place_fake(
    grad_loss, grad_lse, input, target, weight, ignore_index, label_smoothing, target_grad, forward, return_entropy=False,
    grad_entropy=None, entropy=None,
):  # fmt: skip
    rows = _without(input.shape, 1) if forward else [0]
    grad_target = target.new_empty(target.shape) if target_grad else input.new_empty([0])
    losses = (_accumulator(input, rows) for _ in range(3))
    return *losses, _accumulator(input, rows if return_entropy else [0]), grad_target


def _cross_entropy_backward_in_place_vmap(info, in_dims, *args):
    if in_dims[2] is None:
        raise NotImplementedError("cross_entropy_backward_: expected vmap over input, which it overwrites, got one without it")
    return _one_by_one(ops.cross_entropy_backward_.default, info, in_dims, args)


_register("cross_entropy_backward_", _cross_entropy_backward_in_place_fake, _cross_entropy_backward_in_place_vmap, _no_flops)


def _topk_softmax_forward_fake(input, k, dim, renormalize, dtype):
    sizes = [k if i == dim else size for i, size in enumerate(input.shape)]
    return input.new_empty(sizes, dtype=dtype), input.new_empty(sizes, dtype=torch.int64)


def _topk_softmax_forward_vmap(info, in_dims, input, k, dim, renormalize, dtype):
    input = _front(input, in_dims[0], info.batch_size)
    return ops.topk_softmax_forward.default(input, k, dim + 1, renormalize, dtype), (0, 0)


_register("topk_softmax_forward", _topk_softmax_forward_fake, _topk_softmax_forward_vmap, _no_flops)


def _topk_softmax_backward_fake(grad, probabilities, indices, input, dim, renormalize):
    return input.new_empty(input.shape)


def _topk_softmax_backward_vmap(info, in_dims, grad, probabilities, indices, input, dim, renormalize):
    tensors = (grad, probabilities, indices, input)
    front = [_front(tensor, in_dim, info.batch_size) for tensor, in_dim in zip(tensors, in_dims, strict=False)]
    return ops.topk_softmax_backward.default(*front, dim + 1, renormalize), 0


_register("topk_softmax_backward", _topk_softmax_backward_fake, _topk_softmax_backward_vmap, _no_flops)
