"""Decides whether our kernels or torch's own function run a call. The calls themselves and `explain` share this decision;
`strict` forbids torch's function.
"""

from __future__ import annotations

import inspect
import math
import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from ._linear_cross_entropy_ops import scratch_bytes
from ._ops import LIBRARY, InvalidArgument, accumulator_of, dense_strides_in_order

# The raw operator of each function; a function can run on the devices for which its operator has a kernel.
_OPERATORS = {
    "scaled_dot_product_attention": "attention_forward",
    "attention": "attention_forward",
    "varlen_attention": "attention_varlen_forward",
    "merge_attention": "attention_merge",
    "softmax": "softmax_forward",
    "log_softmax": "softmax_forward",
    "logsumexp": "logsumexp_forward",
    "topk_softmax": "topk_softmax_forward",
    "cross_entropy": "cross_entropy_forward",
    "linear_cross_entropy": "cross_entropy_forward",
}
_ON_CUDA = frozenset(
    name
    for name, operator in _OPERATORS.items()
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_online::{operator}", "CUDA")
)
_OLDEST_GPU = 8  # major number of the compute capability

_majors: dict[int, int] = {}  # major number of the compute capability per device index, as far as it was needed
_strict_depth = 0 if os.environ.get("FLASH_ONLINE_STRICT", "0") in ("", "0") else 1
_lock = threading.Lock()


def _major(index: int) -> int:
    major = _majors.get(index)
    if major is None:
        major = torch.cuda.get_device_properties(index).major
        if not torch.compiler.is_compiling():
            _majors[index] = major
    return major


def _subclass_refusal(kind: type) -> str | None:
    """Why our kernels do not take a subclass of Tensor; None where they do. Parameter and torch's internal subclasses (fake and
    functional tensors) disable __torch_function__, and are taken."""
    if kind.__torch_function__ is not torch._C._disabled_torch_function_impl:
        return f"{kind.__name__} is a tensor subclass with its own __torch_function__"
    if kind.__name__ == "DTensor":
        return "a DTensor: our operators have no sharding rules"
    return None


def refusal(function: str, *tensors: Tensor | None, dtype: torch.dtype | None = None) -> str | None:
    """Why our kernels do not take these tensors, with the result in `dtype`; None where they do."""
    for tensor in tensors:
        if tensor is None:
            continue
        kind = type(tensor)
        if kind is not Tensor and kind is not Parameter:
            reason = _subclass_refusal(kind)
            if reason is not None:
                return reason
        if tensor.is_nested:
            return "a nested tensor"
        if tensor.layout is not torch.strided:
            return f"a sparse tensor ({tensor.layout})"
        if tensor.is_quantized:
            return f"a quantized tensor ({tensor.dtype})"
        if tensor.is_complex() or (dtype is not None and dtype.is_complex):
            return f"a complex tensor ({dtype or tensor.dtype})"
        device = tensor.device.type
        if device == "cpu":
            continue
        if device != "cuda":
            return f"device {device}: kernels are for CPU and CUDA"
        if function not in _ON_CUDA:
            return f"no CUDA kernel for {function} in this build"
        if _major(tensor.device.index) < _OLDEST_GPU:
            return f"{tensor.device} is older than compute capability {_OLDEST_GPU}.0"
        if torch.float64 in (tensor.dtype, dtype):
            return "float64 on CUDA"
    return None


def require_kernel(function: str, *tensors: Tensor | None, dtype: torch.dtype | None = None) -> None:
    """Raises NotImplementedError with the reason where our kernels do not take these tensors; for functions not in torch."""
    reason = refusal(function, *tensors, dtype=dtype)
    if reason is not None:
        raise _no_kernel(function, reason)


def _no_kernel(function: str, reason: str) -> NotImplementedError:
    return NotImplementedError(f"flash_online.{function}: {reason}")


def forward_to_torch(function: str, reason: str, original: Callable, *args, **kwargs):
    """Calls torch's own function because our kernels refuse the call for `reason`; raises RuntimeError under strict()."""
    if _strict_depth > 0:
        raise RuntimeError(f"{function}: would be forwarded to torch, which strict() forbids: {reason}")
    return original(*args, **kwargs)


@contextmanager
def strict():
    """Inside the block a call that would be forwarded to torch raises RuntimeError with the reason.

    It holds for all threads, since any thread may make a call; blocks nest, also across threads. The environment variable
    FLASH_ONLINE_STRICT=1, which is read once on import, has the effect of a block around the whole program.
    """
    global _strict_depth
    with _lock:
        _strict_depth += 1
    try:
        yield
    finally:
        with _lock:
            _strict_depth -= 1


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


@dataclass(frozen=True)
class Plan:
    """What a call would run, and why.

    function: its name. device: where it runs. ours: whether our kernels run it. kernel: the kernel, or torch's function.
    operators: the raw operators of the forward pass, in order. refused: each candidate that would be preferred to `kernel`, and
    why it does not take the call. extra: what the forward pass allocates beside the results, in bytes per item; "scratch", the
    working space of the threads, is an upper bound. extra is None where torch's function runs.
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


def explain(function: Callable, *args, **kwargs) -> Plan:
    """What `function(*args, **kwargs)` would run, without running it: a Plan, whose str() is a readable text.

    function: one of flash_online's (attention, varlen_attention, merge_attention, softmax, log_softmax, logsumexp,
    topk_softmax, cross_entropy, linear_cross_entropy), of flash_online.functional's or torch.nn.functional's
    (scaled_dot_product_attention, softmax, log_softmax, cross_entropy, linear_cross_entropy).
    Raises what the call would raise, except for errors that depend on a tensor's values, such as a target out of range;
    InvalidArgument for another function.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    name, title, ours, original = _known(function)
    bound = inspect.signature(ours).bind(*args, **kwargs).arguments
    tensors = [leaf for leaf in tree_leaves(bound) if isinstance(leaf, Tensor)]
    device = str(tensors[0].device) if tensors else "no device"
    reason = refusal(name, *tensors, dtype=bound.get("dtype"))
    if reason is not None and original is not None:
        if _strict_depth > 0:
            reason += "; strict() forbids the call"
        return Plan(title, device, False, f"torch.nn.functional.{name}", refused={"flash_online": reason})
    if reason is not None:
        raise _no_kernel(name, reason)

    # Make the call itself on tensors without data: it runs the operators that the real call would, and raises its errors.
    record = _record()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), fake:
        args, kwargs = tree_map_only(Tensor, fake.from_tensor, (args, kwargs))
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
    asked = [_with_options(name, arguments) for name, arguments in record.operators]
    kernel, refused = "flash_online's CUDA kernel", {}
    if device != "cpu":
        for name, arguments in asked:
            if name in ("attention_forward", "attention_varlen_forward"):
                kernel, refused = _cuda_kernel(name, arguments)
    if device == "cpu":
        kernel, refused = _cpu_kernel()
        scratch = sum(_scratch(name, arguments) for name, arguments in asked)
        if scratch:
            extra["scratch"] = scratch
    for operator, arguments in record.operators:
        if operator.startswith("linear_cross_entropy"):
            extra["chunk of logits"] = scratch_bytes(operator, arguments)
        elif operator == "cross_entropy_loss":  # the loss and the weight of each row and, on the CPU, its lse
            logits = arguments[0]
            rows = logits.numel() // logits.shape[1]
            extra["numbers of rows"] = (3 if device == "cpu" else 2) * rows * accumulator_of(logits.dtype).itemsize
    return Plan(title, device, True, kernel, tuple(name for name, _ in record.operators), refused, extra)


def _known(function: Callable) -> tuple[str, str, Callable, Callable | None]:
    """(the name under which `refusal` knows a function, its title in a Plan, our function, torch's original or None)."""
    from . import functional  # here, not at the top: all of these modules import this one
    from .attention import attention
    from .cross_entropy import cross_entropy
    from .linear_cross_entropy import linear_cross_entropy
    from .merge import merge_attention
    from .softmax import log_softmax, logsumexp, softmax, topk_softmax
    from .varlen import varlen_attention

    for name in functional.NAMES:
        ours, original = getattr(functional, name), functional.ORIGINALS.get(name)
        if function is ours or (original is not None and function is original):
            return name, f"flash_online.functional.{name}", ours, original
    attentions = (attention, varlen_attention, merge_attention)
    for ours in (*attentions, softmax, log_softmax, logsumexp, topk_softmax, cross_entropy, linear_cross_entropy):
        if function is ours:
            return ours.__name__, f"flash_online.{ours.__name__}", ours, None
    raise InvalidArgument(
        f"function: {getattr(function, '__name__', function)!r}, expected a function of flash_online or of "
        f"flash_online.functional, or one of torch.nn.functional's {', '.join(functional.ORIGINALS)}"
    )


def _record():
    """A dispatch mode that records the names and arguments of our operators, and the output tensors of every operator with
    their labels."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Record(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.operators: list[tuple[str, tuple]] = []
            self.outputs: list[tuple[str, Tensor]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = func(*args, **(kwargs or {}))
            namespace, name = func._schema.name.split("::")
            if namespace == "flash_online":
                self.operators.append((name, args))
            for result, returned in zip(
                results if isinstance(results, (tuple, list)) else (results,), func._schema.returns, strict=False
            ):
                if isinstance(result, Tensor):
                    self.outputs.append((returned.name or name, result))
            return results

    return Record()


def _introspection():
    """The introspection module; None where it was not built for this Python or for the library that is loaded."""
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


def _cuda_kernel(operator: str, arguments: tuple) -> tuple[str, dict[str, str]]:
    """(the CUDA kernel that runs attention's forward pass, why each kernel that would be preferred refuses the call)."""
    introspect, packed = _introspection(), operator == "attention_varlen_forward"
    title = "flash_online's CUDA kernel"
    if introspect is None:
        return title, {}
    query, key, value = arguments[:3]
    mask = None if packed else arguments[3]
    alibi_slopes, sinks = arguments[5:7] if packed else arguments[4:6]
    left, right, lower_right, scale, softcap, dropout_p, *tf32 = arguments[10 if packed else 7 :]

    def shape(tensor):
        if packed:  # [rows, heads, head dim]
            tensor = tensor.unsqueeze(0).transpose(1, 2)
        sizes, strides = tensor.shape, tensor.stride()
        batch = math.prod(sizes[:-3])
        return (batch, *sizes[-3:]), (strides[-4], *strides[-3:]), tensor.storage_offset() * tensor.element_size()

    gpu = torch.cuda.get_device_properties(query.device.index)
    out_sizes = [*query.shape[:-1], value.shape[-1]]
    out = query.new_empty_strided(out_sizes, dense_strides_in_order(out_sizes, query.stride()))
    lines = introspect.attention_candidates(
        str(LIBRARY),
        str(query.dtype).removeprefix("torch."),
        *(shape(tensor) for tensor in (query, key, value)),
        shape(out),
        None if mask is None else (str(mask.dtype).removeprefix("torch."), shape(mask)),
        alibi_slopes is not None,
        sinks is not None,
        (arguments[3].shape[0] - 1, *arguments[8:10]) if packed else None,
        left,
        right,
        lower_right,
        scale,
        softcap,
        dropout_p,
        tf32 == [True],
        (gpu.major, gpu.minor, gpu.shared_memory_per_block_optin),
        None,
    ).splitlines()
    refused = {}
    for line in lines:
        name, reason = line.split(" ", 1)
        if not reason:
            return f"{title} ({name})", refused
        refused[f"{title} ({name})"] = reason
    return title, refused


def _with_options(operator: str, arguments: tuple) -> tuple[str, tuple]:
    """Rewrites a call of attention_inference as one of attention_forward; leaves other operators as they are."""
    if operator != "attention_inference":
        return operator, arguments
    query, key, value, causal, scale, *tf32 = arguments
    options = (-1, 0 if causal else -1, False, scale, 0.0, 0.0, *tf32)
    return "attention_forward", (query, key, value, None, None, None, None, *options)


def _scratch(operator: str, arguments: tuple) -> int:
    """An upper bound of the bytes that a forward operator allocates beside its results when every thread works; 0 where that is
    unknown, because there is no introspection module."""
    introspect = _introspection()
    if introspect is None or operator == "attention_merge":
        return 0
    first, threads = arguments[0], torch.get_num_threads()
    if operator.startswith("attention"):
        shapes, mask, tables = [tuple(tensor.shape) for tensor in arguments[:3]], None, 0
        dropout_p = arguments[12 if operator == "attention_forward" else 15]
        strides = [tensor.stride() for tensor in arguments[1:3]]
        if operator == "attention_forward":
            mask = arguments[3]
        else:
            # The bound is that of one dense sequence which is long enough for any lengths of the packed ones: each of these
            # may end in a partial block of 64 keys, and keys are copied if no length is a multiple of a block, hence the + 1.
            # The tables hold the index of each sequence's first tile, once for queries and once for keys.
            sequences = arguments[3].shape[0] - 1
            (queries, heads, head_dim), (keys, *key_sizes), (_, *value_sizes) = shapes
            keys = (keys + 63 * sequences + 63) // 64 * 64 + 1
            shapes = [(heads, queries, head_dim), *((own, keys, size) for own, size in (key_sizes, value_sizes))]
            strides = [(head, row, column) for row, head, column in strides]
            tables = 2 * (((sequences + 1) * 8 + 63) // 64 * 64)
        dtype, mask_dtype = (str(t.dtype).removeprefix("torch.") if t is not None else "" for t in (first, mask))
        return tables + introspect.attention_memory(str(LIBRARY), dtype, *shapes, *strides, mask_dtype, dropout_p, threads)
    bytes_per_thread = introspect.row_scratch(
        str(LIBRARY), first.dtype == torch.float64, arguments[1] if operator.startswith("topk") else 0
    )
    return bytes_per_thread * threads
