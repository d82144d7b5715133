"""Checks of single arguments. Each error's message begins with the argument's name."""

from __future__ import annotations

import inspect
import math
import operator
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._ops import FLOATING, InvalidArgument, UnsupportedDtype, is_known
from ._policy import traced_by_jit

Function = TypeVar("Function")


def is_empty(sizes) -> bool:
    """Returns whether one of the sizes is known to be 0."""
    if not torch.compiler.is_compiling():
        return 0 in sizes
    return any(is_known(size == 0) for size in sizes)


def differ(sizes, others) -> bool:
    """Returns whether two lists of sizes are known to differ."""
    if not torch.compiler.is_compiling():
        return tuple(sizes) != tuple(others)
    return len(sizes) != len(others) or any(is_known(a != b) for a, b in zip(sizes, others, strict=True))


def check_tensor(name: str, tensor) -> None:
    """Raises TypeError unless `tensor` is a Tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(tensor).__name__}")


def check_tensors(name: str, tensors) -> list[Tensor]:
    """A sequence of tensors, or a tensor that is stacked along dimension 0, as a list. Raises TypeError."""
    if not isinstance(tensors, (list, tuple)) and not (isinstance(tensors, Tensor) and tensors.dim() > 0):
        got = "a tensor without dimensions" if isinstance(tensors, Tensor) else type(tensors).__name__
        raise TypeError(f"{name}: expected a sequence of Tensors, or one Tensor of them, got {got}")
    tensors = list(tensors)
    for n, tensor in enumerate(tensors):
        check_tensor(f"{name}[{n}]", tensor)
    return tensors


def check_flag(name: str, flag) -> None:
    """Raises TypeError unless `flag` is a bool."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name}: expected a bool, got {type(flag).__name__}")


def check_flags(**flags) -> dict[str, bool]:
    """The flags. Raises TypeError unless each is a bool."""
    for name, flag in flags.items():
        check_flag(name, flag)
    return flags


def check_device(name: str, tensor: Tensor | None, other_name: str, other: Tensor) -> None:
    """Raises InvalidArgument unless two tensors are on one device. Subclasses of Tensor are not checked."""
    if type(tensor) is Tensor and type(other) is Tensor and tensor.device != other.device:
        raise InvalidArgument(f"{name}: expected {other_name}'s device {other.device}, got {tensor.device}")


def check_floating(name: str, dtype: torch.dtype) -> None:
    """Raises UnsupportedDtype unless the kernels compute on `dtype`."""
    if dtype not in FLOATING:
        raise UnsupportedDtype(f"{name}: expected dtype float16, bfloat16, float32 or float64, got {dtype}")


def check_int(name: str, number, expected: str = "an int") -> int:
    """`number` as an int, or a tracer's symbolic one. Raises TypeError for a bool, a Tensor, and objects without __index__:
    `expected` is what else the argument may be."""
    if isinstance(number, (int, torch.SymInt)) and not isinstance(number, bool):  # first: __index__ would make it a constant
        return number
    if is_traced_size(number):
        raise TypeError(
            f"{name}: expected {expected}, got a size in a trace by torch.jit, which would keep its value: pass int(size)"
        )
    if isinstance(number, (bool, Tensor)) or not hasattr(number, "__index__"):
        raise TypeError(f"{name}: expected {expected}, got {type(number).__name__}")
    try:
        return operator.index(number)
    except TypeError:  # an array of several elements has __index__, which raises
        raise TypeError(f"{name}: expected {expected}, got {type(number).__name__}") from None


def is_traced_size(number) -> bool:
    """Returns whether this is a size in a trace by torch.jit: a tensor, which torch's functions follow. Operators of ours would
    keep its value."""
    return isinstance(number, Tensor) and number.dim() == 0 and traced_by_jit() is not None


def check_size(name: str, number) -> int:
    """`check_int` for a size that only torch's functions take: one in a trace by torch.jit stays a tensor."""
    return number if is_traced_size(number) else check_int(name, number)


def check_index(name: str, number, *, any_rank: bool = False) -> int:
    """`check_int` that also takes an integer in a tensor without dimensions, as torch does for a dim; with `any_rank` in any
    tensor of one element, as torch does for numbers that may be symbolic. Raises InvalidArgument beyond 64 bits."""
    if isinstance(number, Tensor):
        if number.dtype not in _INTEGERS or number.numel() != 1 or (number.dim() and not any_rank):
            raise TypeError(f"{name}: expected an int, got a tensor of shape {list(number.shape)} and {number.dtype}")
        return int(number)
    number = check_int(name, number)
    if not -_BEYOND_64_BITS <= number < _BEYOND_64_BITS:
        raise InvalidArgument(f"{name}: expected an int of 64 bits, got {number}")
    return number


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_BEYOND_64_BITS = 1 << 63


def check_float(name: str, number) -> float:
    """`number` as a float. Raises TypeError for a string and for objects without __float__; also, as torch does, for a tensor
    with dimensions, or with a derivative, which would be lost."""
    if isinstance(number, float):
        return number
    if isinstance(number, str) or not hasattr(number, "__float__"):
        raise TypeError(f"{name}: expected a float, got {type(number).__name__}")
    if isinstance(number, Tensor):
        if number.dim():
            raise TypeError(f"{name}: expected a float, got a tensor of shape {list(number.shape)}")
        if number.requires_grad or has_tangent(number):
            raise TypeError(f"{name}: expected a float, got a tensor with a derivative, which would be lost")
    try:
        return float(number)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a float, got {type(number).__name__}: {error}") from None


def has_tangent(tensor: Tensor) -> bool:
    """Returns whether the tensor has a tangent of forward-mode AD."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def none_as_zero(number):
    """The number, or 0 for None, with which a config turns an option off (final_logit_softcapping)."""
    return 0.0 if number is None else number


def check_softcap(softcap) -> float:
    """`softcap` as a float. Raises InvalidArgument unless it is 0 (none) or positive and finite."""
    softcap = check_float("softcap", none_as_zero(softcap))
    if not softcap >= 0 or softcap == math.inf:
        raise InvalidArgument(f"softcap: expected 0 (none) or a positive finite number, got {softcap}")
    return softcap


_PYTHON_TYPES = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}  # as torch reads them


def check_dtype(dtype) -> torch.dtype | None:
    """The dtype of a result. Python's types stand for dtypes, as in torch; None stays None. Raises TypeError."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, type) or dtype not in _PYTHON_TYPES:
        raise TypeError(f"dtype: expected a torch.dtype or None, got {type(dtype).__name__}")
    return _PYTHON_TYPES[dtype]


def check_dim(dim, rank: int) -> int:
    """`dim` counted from 0. A scalar (rank 0) counts as one dimension, as everywhere in torch. Raises IndexError."""
    dim, rank = check_index("dim", dim), max(rank, 1)
    if not -rank <= dim < rank:
        raise IndexError(f"dim: expected {-rank} to {rank - 1}, got {dim}")
    return dim % rank


def without_others(function: Function) -> Function:
    """A decorator: `inspect.signature` does not show `**others`, which `unexpected_keyword` turns into an error."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    shown = [p for p in signature.parameters.values() if p.name != "others"]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def unexpected_keyword(function: str, name: str) -> TypeError:
    """The error that Python raises, with the name of `attention`'s own argument for one of torch's or FlashAttention's."""
    ours = _OWN_NAMES.get(name)
    hint = f": the argument is `{ours}` here" if ours else ": grouped heads need no argument" if name == "enable_gqa" else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


_OWN_NAMES = {
    "is_causal": "causal",
    "attn_mask": "mask",
    "attn_bias": "mask",
    "attention_mask": "mask",
    "softmax_scale": "scale",
    "window_size": "window",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse",
    "learnable_sink": "sinks",
}
