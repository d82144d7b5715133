"""`explain` reports what a call would run, without running it. It uses `_policy`, as the call itself does, then makes the call
on tensors without data and records the raw operators that it reaches.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ParamSpec

import torch
from torch import Tensor

from . import functional
from ._block_arguments import tile_keys
from ._causal_bias import is_causal_bias
from ._linear_cross_entropy_ops import scratch_bytes
from ._ops import LIBRARY, InvalidArgument, dense_strides_in_order
from ._policy import is_dtensor, no_kernel, refusal, strict_is_active, why_forwarded
from .attention import attention
from .cascade import cascade_attention
from .cross_entropy import cross_entropy
from .float8 import float8_attention
from .kvcache import cache_append, kvcache_attention
from .linear_cross_entropy import linear_cross_entropy
from .merge import merge_attention
from .softmax import log_softmax, logsumexp, softmax, topk_softmax
from .varlen import varlen_attention
from .weight_sums import attention_weight_sums


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


@dataclass(frozen=True)
class Plan:
    """The kernel that a call would run, and why.

    Attributes:
        function: its name.
        device: where it runs.
        ours: whether our kernels run it.
        kernel: the kernel, or torch's function.
        operators: the raw operators of the forward pass, in order.
        refused: each candidate that would be preferred to `kernel`, and why it does not take the call.
        extra: what the forward pass allocates in addition to the results, in bytes per item; "scratch", the working memory of
            the threads, is an upper bound. None if torch's function runs.
    """

    function: str
    device: str
    ours: bool
    kernel: str
    operators: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    extra: dict[str, int] | None = None

    @property
    def extra_bytes(self) -> int | None:
        """The sum of `extra`, in bytes."""
        return None if self.extra is None else sum(self.extra.values())

    def __str__(self) -> str:
        lines = [f"{self.function} on {self.device}: {self.kernel}"]
        if self.operators:
            lines.append(f"  runs {', '.join(self.operators)}")
        lines += [f"  not {name}: {reason}" for name, reason in self.refused.items()]
        if self.extra is None:
            lines.append("  extra memory: whatever torch takes")
        else:
            parts = ", ".join(f"{name} {_bytes(size)}" for name, size in self.extra.items() if size)
            lines.append(f"  extra memory: {_bytes(self.extra_bytes)}" + (f" ({parts})" if parts else ""))
        return "\n".join(lines)


_P = ParamSpec("_P")


def explain(function: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> Plan:
    """Returns what `function(*args, **kwargs)` would run, without running it: a Plan. str(plan) is a readable text.

    Args:
        function: one of flash_online's (attention, varlen_attention, attention_weight_sums, float8_attention,
            kvcache_attention, cascade_attention, cache_append, merge_attention, softmax, log_softmax, logsumexp, topk_softmax,
            cross_entropy, linear_cross_entropy), of flash_online.functional's or of torch.nn.functional's
            (scaled_dot_product_attention, softmax, log_softmax, cross_entropy, linear_cross_entropy).
        *args: arguments of the call.
        **kwargs: keyword arguments of the call.

    Raises:
        InvalidArgument: another function. Otherwise the errors of the call, except for errors that depend on a tensor's values,
            such as a target out of range.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    name, title, ours, original = _known(function)
    bound = inspect.signature(ours).bind(*args, **kwargs).arguments
    tensors = [leaf for leaf in tree_leaves(bound) if isinstance(leaf, Tensor) and not is_causal_bias(leaf)]
    device = str(tensors[0].device) if tensors else "no device"
    decide = refusal if original is None else why_forwarded
    reason = decide(name, *tensors, dtype=bound.get("dtype"), dim=bound.get("dim"))
    if reason is not None and original is not None:
        if strict_is_active():
            reason += "; strict() forbids the call"
        return Plan(title, device, False, f"torch.nn.functional.{name}", refused={"flash_online": reason})
    if reason is not None:
        raise no_kernel(name, reason)

    # Make the call itself on tensors without data: it runs the operators that the real call would, and raises its errors.
    record = _record()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), fake:
        args, kwargs = tree_map_only(Tensor, lambda t: t.to_local() if is_dtensor(t) else t, (args, kwargs))
        args, kwargs = tree_map_only(Tensor, lambda t: t if is_causal_bias(t) else fake.from_tensor(t), (args, kwargs))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        with record:
            result = ours(*args, **kwargs)
    kept = {leaf.untyped_storage()._cdata for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
    extra: dict[str, int] = {}
    for label, tensor in record.outputs:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept | given:
            given.add(storage._cdata)
            extra[label] = extra.get(label, 0) + storage.nbytes()
    kernel, refused = _CUDA_KERNEL, {}
    if device not in ("cpu", "meta"):
        for operator, call in record.operators:
            if operator in _ATTENTION:
                kernel, refused = _cuda_kernel(operator, call)
            elif operator == "float8_attention":
                kernel, refused = _float8_kernel(call)
            elif operator == "attention_weight_sums":
                kernel = "flash_online's CUDA kernel (sm90, or one of the forward pass: the first that takes the call)"
            elif operator in _CACHED:  # over cached keys; a cascade runs several
                kernel = "flash_online's CUDA kernel (decode, latent, sm90 or sm80: the first that takes the call)"
    if device == "meta":
        kernel = "no kernel, as tensors on meta have no data"
    if device == "cpu":
        kernel, refused = _cpu_kernel()
        scratch = sum(_scratch(operator, call) for operator, call in record.operators)
        if scratch:
            extra["scratch"] = scratch
    for operator, call in record.operators:
        if operator.startswith("linear_cross_entropy"):
            extra["chunk of logits"] = scratch_bytes(call)
    return Plan(title, device, True, kernel, tuple(operator for operator, _ in record.operators), refused, extra)


def _known(function: Callable) -> tuple[str, str, Callable, Callable | None]:
    """(the name under which `refusal` knows a function, its title in a Plan, our function, torch's original or None)."""
    for name in functional.NAMES:
        ours, original = getattr(functional, name), functional.ORIGINALS.get(name)
        if function is ours or (original is not None and function is original):
            return name, f"flash_online.functional.{name}", ours, original
    attentions = (
        attention,
        varlen_attention,
        attention_weight_sums,
        float8_attention,
        kvcache_attention,
        cascade_attention,
        cache_append,
        merge_attention,
    )
    for ours in (*attentions, softmax, log_softmax, logsumexp, topk_softmax, cross_entropy, linear_cross_entropy):
        if function is ours:
            return ours.__name__, f"flash_online.{ours.__name__}", ours, None
    got = type(function).__name__ if isinstance(function, Tensor) else repr(getattr(function, "__name__", function))
    raise InvalidArgument(
        "function: expected a function of flash_online or of flash_online.functional, or one of torch.nn.functional's "
        f"{', '.join(functional.ORIGINALS)}, as in explain(flash_online.attention, query, key, value), got {got}"
    )


_ATTENTION = (
    "attention_forward",
    "attention_inference",
    "attention_inference_with_options",
    "attention_varlen_forward",
    "attention_forward_with_max_logit",
    "attention_varlen_forward_with_max_logit",
)
_CACHED = ("attention_cached", "attention_cached_", "attention_decode")


def _bind(schema, args, kwargs) -> SimpleNamespace:
    """An operator's arguments by the names that its schema gives them."""
    call = {argument.name: argument.default_value for argument in schema.arguments}
    call.update(zip(call, args, strict=False))
    return SimpleNamespace(**{**call, **kwargs})


def _attention_call(operator: str, call: SimpleNamespace) -> SimpleNamespace:
    """A call of one of _ATTENTION, with neutral values for the arguments that only the other operators have."""
    if operator == "attention_inference":
        call = SimpleNamespace(
            **vars(call), window_left=-1, window_right=0 if call.causal else -1, lower_right=False, softcap=0.0
        )
    absent = dict.fromkeys(("mask", "alibi_slopes", "sinks", "query_spans", "key_spans", "tiles"))
    return SimpleNamespace(**{**absent, "dropout_p": 0.0, **vars(call)})


def _has_lse_low(operator: str) -> bool:
    """Returns whether an operator of _ATTENTION computes what a backward pass needs."""
    return not operator.startswith("attention_inference")


def _record():
    """A dispatch mode that records the names and arguments of our operators, and the output tensors of every operator with
    their labels."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.operators: list[tuple[str, SimpleNamespace]] = []
            self.outputs: list[tuple[str, Tensor]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            results = func(*args, **kwargs)
            namespace, name = func._schema.name.split("::")
            if namespace == "flash_online":
                self.operators.append((name, _bind(func._schema, args, kwargs)))
            for result, returned in zip(
                results if isinstance(results, (tuple, list)) else (results,), func._schema.returns, strict=False
            ):
                if isinstance(result, Tensor):
                    self.outputs.append((returned.name or name, result))
            return results

    return Record()


def _introspection():
    """The introspection module; None if it was not built for this Python or for the loaded library."""
    try:
        from . import _introspect

        _introspect.build_info(str(LIBRARY))
    except (ImportError, RuntimeError):
        return None
    return _introspect


def _cpu_kernel() -> tuple[str, dict[str, str]]:
    """(the CPU kernels with their instruction set, why each better instruction set is not used)."""
    introspect = _introspection()
    if introspect is None:
        return "flash_online's CPU kernel", {}
    facts = introspect.build_info(str(LIBRARY))
    better = ("amx", "avx512_bf16", "avx512", "avx2", "portable")
    better = better[: better.index(facts["cpu"])]
    forced = os.environ.get("FLASH_ONLINE_CPU")
    refused = {}
    for name in better:
        if name not in facts["instruction_sets"]:
            reason = "not in this build"
        else:
            reason = f"FLASH_ONLINE_CPU={forced}" if forced else "the processor lacks its instructions"
        refused[f"flash_online's CPU kernel ({name})"] = reason
    return f"flash_online's CPU kernel ({facts['cpu']})", refused


def _cuda_kernel(operator: str, call: SimpleNamespace) -> tuple[str, dict[str, str]]:
    """(the CUDA kernel that runs attention's forward pass, why each kernel that would be preferred refuses the call)."""
    introspect, packed = _introspection(), operator.startswith("attention_varlen_forward")
    if introspect is None:
        return _CUDA_KERNEL, {}
    call = _attention_call(operator, call)

    def shape(tensor):  # packed: [rows, heads, head dim]
        return _shape_of(tensor.unsqueeze(0).transpose(1, 2) if packed else tensor)

    lines = introspect.attention_candidates(
        str(LIBRARY),
        _dtype_name(call.query),
        *(shape(tensor) for tensor in (call.query, call.key, call.value)),
        shape(_out_like_query(call)),
        None if call.mask is None else (_dtype_name(call.mask), shape(call.mask)),
        call.alibi_slopes is not None,
        call.sinks is not None,
        _has_lse_low(operator),
        (call.cu_seqlens_q.shape[0] - 1, call.max_seqlen_q, call.max_seqlen_k) if packed else None,
        call.window_left,
        call.window_right,
        call.lower_right,
        call.scale,
        call.softcap,
        call.dropout_p,
        call.tf32,
        _gpu_of(call),
        None,
        (
            call.query_spans is not None,
            call.key_spans is not None,
            0 if call.tiles is None else tile_keys(call.tiles, call.key.shape[-2]),
        ),
        operator.endswith("with_max_logit"),
    )
    return _first_of(lines)


def _float8_kernel(call: SimpleNamespace) -> tuple[str, dict[str, str]]:
    """The same for float8_attention."""
    introspect = _introspection()
    if introspect is None:
        return _CUDA_KERNEL, {}
    out = _out_like_query(call)
    lines = introspect.float8_candidates(
        str(LIBRARY),
        _dtype_name(call.query),
        str(call.out_dtype).removeprefix("torch."),
        *(_shape_of(tensor) for tensor in (call.query, call.key, call.value, out)),
        call.smooth_keys,
        call.window_left,
        call.window_right,
        call.key.shape[-2] - call.query.shape[-2] if call.lower_right else 0,
        tuple(0 if spans is None else spans.shape[-1] // 2 for spans in (call.query_spans, call.key_spans)),
        call.sinks is not None,
        call.scale,
        call.softcap,
        _gpu_of(call),
    )
    return _first_of(lines)


_CUDA_KERNEL = "flash_online's CUDA kernel"


def _shape_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """A tensor [..., heads, rows, head dim] as the introspection module takes it."""
    sizes, strides = tensor.shape, tensor.stride()
    batch = math.prod(sizes[:-3])
    return (batch, *sizes[-3:]), (strides[-4], *strides[-3:]), tensor.storage_offset() * tensor.element_size()


def _out_like_query(call: SimpleNamespace) -> Tensor:
    sizes = [*call.query.shape[:-1], call.value.shape[-1]]
    return call.query.new_empty_strided(sizes, dense_strides_in_order(sizes, call.query.stride()))


def _gpu_of(call: SimpleNamespace) -> tuple[int, int, int]:
    gpu = torch.cuda.get_device_properties(call.query.device.index)
    return gpu.major, gpu.minor, gpu.shared_memory_per_block_optin


def _first_of(lines: str) -> tuple[str, dict[str, str]]:
    """The first kernel without a reason to refuse, and the reasons of those before it."""
    refused: dict[str, str] = {}
    for line in lines.splitlines():
        name, reason = line.split(" ", 1)
        if not reason:
            return f"{_CUDA_KERNEL} ({name})", refused
        refused[f"{_CUDA_KERNEL} ({name})"] = reason
    return _CUDA_KERNEL, refused


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


_NO_SCRATCH = ("attention_merge", "cache_append_", "block_tiles", "block_topk")
_KEYS_PER_BLOCK = 64  # on the CPU; kKeys in csrc/cpu/attention/mask_tile.h


def _scratch(operator: str, call: SimpleNamespace) -> int:
    """An upper bound of the bytes that a forward operator allocates in addition to its results if every thread works; 0 if
    unknown: there is no introspection module, or it depends on values in tensors."""
    introspect = _introspection()
    # Over cached keys the number of partial results depends on the lengths, which only the device knows. The operators of
    # _NO_SCRATCH allocate their results alone. Sums of weights need as much as the forward pass of the transposed problem, and
    # products in float8 keys and values in float32.
    if introspect is None or operator in (*_CACHED, *_NO_SCRATCH, "attention_weight_sums", "float8_attention"):
        return 0
    threads = torch.get_num_threads()
    if operator not in _ATTENTION:
        double = call.input.dtype == torch.float64
        return introspect.row_scratch(str(LIBRARY), double, getattr(call, "k", 0)) * threads
    call = _attention_call(operator, call)
    shapes = [tuple(tensor.shape) for tensor in (call.query, call.key, call.value)]
    strides, tables = [tensor.stride() for tensor in (call.key, call.value)], 0
    if operator.startswith("attention_varlen_forward"):
        # This is the bound of one dense sequence that is long enough for any lengths of the packed ones: each of these may end
        # in a partial block of keys, and keys are copied if no length is a multiple of a block, hence the + 1. The tables
        # hold the index of each sequence's first tile, once for queries and once for keys.
        sequences = call.cu_seqlens_q.shape[0] - 1
        (queries, heads, head_dim), (keys, *key_sizes), (_, *value_sizes) = shapes
        keys = -(-(keys + (_KEYS_PER_BLOCK - 1) * sequences) // _KEYS_PER_BLOCK) * _KEYS_PER_BLOCK + 1
        shapes = [(heads, queries, head_dim), *((own, keys, size) for own, size in (key_sizes, value_sizes))]
        strides = [(head, row, column) for row, head, column in strides]
        tables = 2 * (((sequences + 1) * 8 + 63) // 64 * 64)
    mask_dtype = "" if call.mask is None else _dtype_name(call.mask)
    return tables + introspect.attention_memory(
        str(LIBRARY), _dtype_name(call.query), *shapes, *strides, mask_dtype, call.dropout_p, _has_lse_low(operator), threads
    )
