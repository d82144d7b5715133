"""Decides whether our kernels or torch's own function run a call. Calls and `explain` share this decision, so that they cannot
disagree; `strict` forbids torch's function. This module refers to functions by name and imports none of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _ops  # noqa: F401  loads the library: its kernels decide what runs where

# The raw operator of each function; a function can run on the devices for which its operator has a kernel.
OPERATORS = {
    "scaled_dot_product_attention": "attention_forward",
    "attention": "attention_forward",
    "varlen_attention": "attention_varlen_forward",
    "kvcache_attention": "attention_cached",
    "cascade_attention": "attention_cached",
    "cache_append": "cache_append_",
    "merge_attention": "attention_merge",
    "attention_weight_sums": "attention_weight_sums",
    "float8_attention": "float8_attention",
    "softmax": "softmax_forward",
    "log_softmax": "softmax_forward",
    "logsumexp": "logsumexp_forward",
    "topk_softmax": "topk_softmax_forward",
    "cross_entropy": "cross_entropy_forward",
    "linear_cross_entropy": "cross_entropy_forward",
}
ON_CUDA = frozenset(
    name
    for name, operator in OPERATORS.items()
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_online::{operator}", "CUDA")
)
# Cached keys have no float64 kernels. For torch's function, torch's own backward pass is faster (attention_float64.md).
_NO_FLOAT64_ON_CUDA = frozenset({"kvcache_attention", "cascade_attention", "cache_append", "scaled_dot_product_attention"})
_OLDEST_GPU = 8  # major number of the compute capability

_majors: dict[int, int] = {}  # major number of the compute capability by device index, filled on demand
_strict_depth = 0 if os.environ.get("FLASH_ONLINE_STRICT", "0") in ("", "0") else 1
_lock = threading.Lock()


def _major(index: int) -> int:
    major = _majors.get(index)
    if major is None:
        major = torch.cuda.get_device_properties(index).major
        if not torch.compiler.is_compiling():
            _majors[index] = major
    return major


# Set by distributed.register_dtensor(): (function, index of the argument, DTensor, dim of the call) -> reason or None.
dtensor_refusal: Callable[[str, int, Tensor, Any], str | None] | None = None


def is_dtensor(tensor: Tensor) -> bool:
    """Returns whether this is a DTensor, by name: torch.distributed is slow to import, and may be missing."""
    return type(tensor).__name__ == "DTensor"


def dropout_refusal(tensor: Tensor, dropout_p: float) -> str | None:
    """Returns why attention does not take this query with dropout, or None if it does."""
    if dropout_p > 0 and is_dtensor(tensor):
        return f"dropout_p: expected 0 with DTensors, as all shards would draw the same bits, got {dropout_p}"
    return None


def _subclass_refusal(tensor: Tensor, function: str, position: int, dim) -> str | None:
    """Returns why our kernels do not take a subclass of Tensor, or None if they do. Parameter and torch's internal subclasses
    (fake and functional tensors) disable __torch_function__, and are taken."""
    kind = type(tensor)
    if kind.__torch_function__ is not torch._C._disabled_torch_function_impl:
        return f"{kind.__name__} is a tensor subclass with its own __torch_function__"
    if not is_dtensor(tensor):
        return None
    if dtensor_refusal is None:
        return "a DTensor: our operators have sharding rules only after flash_online.distributed.register_dtensor()"
    return dtensor_refusal(function, position, tensor, dim)


def layout_refusal(tensor: Tensor) -> str | None:
    """Returns why a tensor has no strides that kernels could read it by, or None if it has."""
    if tensor.is_nested:
        return "a nested tensor"
    return None if tensor.layout is torch.strided else f"a sparse tensor ({tensor.layout})"


def refusal(
    function: str, *tensors: Tensor | None, dtype: torch.dtype | None = None, dim: Any = None, first: int = 0
) -> str | None:
    """Returns why our kernels do not take these tensors, with the result in `dtype`, or None if they do. `dim` is the dimension
    that the function reduces, if the caller gives it, and `first` the index of the first tensor among the function's
    arguments."""
    for tensor in tensors:
        if tensor is None:
            continue
        kind = type(tensor)
        if kind is not Tensor and kind is not Parameter:
            position = first + next(i for i, other in enumerate(tensors) if other is tensor)
            reason = _subclass_refusal(tensor, function, position, dim)
            if reason is not None:
                return reason
        reason = layout_refusal(tensor)
        if reason is not None:
            return reason
        if tensor.is_quantized:
            return f"a quantized tensor ({tensor.dtype})"
        if tensor.is_complex():
            return f"a complex tensor ({tensor.dtype})"
        if dtype is not None and dtype.is_complex:
            return f"dtype: a complex result ({dtype})"
        if tensor.is_cpu or tensor.is_meta:  # on meta the operators' fakes run
            continue
        if not tensor.is_cuda:
            return f"device {tensor.device.type}: kernels are for CPU and CUDA"
        if not has_cuda_kernel(function, tensor.get_device(), tensor.dtype):
            if function not in ON_CUDA:
                return f"no CUDA kernel for {function} in this build"
            if _major(tensor.get_device()) >= _OLDEST_GPU:
                return "float64 on CUDA"
            return f"{tensor.device} is older than compute capability {_OLDEST_GPU}.0"
    return None


def why_forwarded(function: str, *tensors: Tensor | None, dtype: torch.dtype | None = None, dim: Any = None) -> str | None:
    """Returns why a function that torch has too forwards these tensors to torch's, or None if our kernels take them."""
    if in_onnx_export():
        return "torch.onnx.export is active: ONNX has torch's operators, and not ours"
    return refusal(function, *tensors, dtype=dtype, dim=dim)


def in_onnx_export() -> bool:
    """Returns whether torch.onnx.export is tracing this call."""
    # torch.onnx takes two microseconds to answer; its exporters trace by torch.export or, the old one, by torch.jit.
    return (torch.compiler.is_compiling() or traced_by_jit() is not None) and torch.onnx.is_in_onnx_export()


traced_by_jit = torch._C._get_tracing_state  # None outside torch.jit.trace


def has_cuda_kernel(function: str, index: int, dtype: torch.dtype) -> bool:
    """Returns whether our kernels run the function on the CUDA device of this index, in this dtype if the function takes it."""
    if function not in ON_CUDA or (_majors.get(index) or _major(index)) < _OLDEST_GPU:
        return False
    return dtype is not torch.float64 or function not in _NO_FLOAT64_ON_CUDA


def require_kernel(function: str, *, dtype: torch.dtype | None = None, dim: Any = None, **tensors: Tensor | None) -> None:
    """Raises NotImplementedError, with the argument's name and the reason, if our kernels do not take these tensors or results
    in `dtype`. For functions that torch does not have."""
    for position, (name, tensor) in enumerate(tensors.items()):
        reason = None if tensor is None else refusal(function, tensor, dtype=dtype, dim=dim, first=position)
        if reason is not None:
            raise no_kernel(function, reason if reason.startswith("dtype") else f"{name}: {reason}")


def require_no_dropout(function: str, query: Tensor, dropout_p: float) -> None:
    """Raises NotImplementedError if this query cannot have dropout."""
    reason = dropout_refusal(query, dropout_p)
    if reason is not None:
        raise no_kernel(function, reason)


def no_kernel(function: str, reason: str) -> NotImplementedError:
    """The error of a function that torch does not have, if our kernels reject its tensors for `reason`."""
    return NotImplementedError(f"flash_online.{function}: {reason}")


def forward_to_torch(function: str, reason: str, original: Callable, *args, **kwargs):
    """Calls torch's own function because our kernels reject the call for `reason`; raises RuntimeError under strict()."""
    if strict_is_active():
        raise RuntimeError(f"{function}: would be forwarded to torch, which strict() forbids: {reason}")
    return original(*args, **kwargs)


def strict_is_active() -> bool:
    """Returns whether a call that would be forwarded to torch is an error."""
    return _strict_depth > 0


class strict:
    """Inside the block a call that would be forwarded to torch raises RuntimeError with the reason.

    It applies to all threads; blocks nest, also across threads. The environment variable FLASH_ONLINE_STRICT=1, read once on
    import, acts as a block around the whole program.
    """

    def __enter__(self) -> None:
        _change_strict_depth(1)

    def __exit__(self, *error: object) -> None:
        _change_strict_depth(-1)


def _change_strict_depth(step: int) -> None:
    global _strict_depth
    if torch.compiler.is_compiling():  # Dynamo traces no lock, and one thread traces
        _strict_depth += step
        return
    with _lock:
        _strict_depth += step
