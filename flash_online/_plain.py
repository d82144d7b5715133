"""Tests whether a call is plain, for the fast paths of the public functions, which call an operator directly.

These tests replace the full checks in a fraction of their time. They do not raise: the full checks find the errors of other
calls.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _policy
from ._autograd import eager_transforms_active
from ._ops import FLOATING

# Tensors that torch.export traces without Dynamo are not plain.
is_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_any_autocast_enabled, _any_transforms = torch._C._is_any_autocast_enabled, torch._C._are_functorch_transforms_active
_any_function_mode, _traced_by_jit = torch._C._is_torch_function_mode_enabled, _policy.traced_by_jit
_STRIDED, _FLOAT64 = torch.strided, torch.float64


def is_plain(function: str, tensor) -> bool:
    """Returns whether kernels of `function` take this tensor unchanged: dense, of a floating dtype, on a device with kernels;
    autocast, torch.func, tracers and TorchFunctionModes are off. It may require a gradient."""
    if type(tensor) is not Tensor or is_compiling() or _any_autocast_enabled() or _traced_by_jit() is not None:
        return False
    if _any_transforms() or forward_ad._current_level >= 0 or _any_function_mode():  # eager_transforms_active, without its call
        return False
    dtype = tensor.dtype
    if dtype not in FLOATING or tensor.layout is not _STRIDED or tensor.is_nested:
        return False
    if tensor.is_cpu:
        return True
    return tensor.is_cuda and _policy.has_cuda_kernel(function, tensor.get_device())


def are_plain(function: str, tensors: tuple) -> bool:
    """Returns whether kernels of `function` take these tensors unchanged: dense, of one floating dtype, on one device with
    kernels, without a gradient; torch.func and tracers are off. Autocast does not change these functions."""
    if is_compiling() or eager_transforms_active() or _traced_by_jit() is not None:
        return False
    first, grads = tensors[0], is_grad_enabled()
    if type(first) is not Tensor:
        return False
    dtype, index = first.dtype, first.get_device()  # -1: the CPU, or a device without indices
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.dtype is not dtype or tensor.layout is not _STRIDED or tensor.is_nested:
            return False
        if tensor.get_device() != index or grads and tensor.requires_grad:
            return False
    if dtype not in FLOATING:
        return False
    if index >= 0:
        return first.is_cuda and dtype is not _FLOAT64 and _policy.has_cuda_kernel(function, index)
    for tensor in tensors:
        if not tensor.is_cpu:
            return False
    return True


def are_plain_numbers(numbers, like: Tensor, rank: int, dtype: torch.dtype = torch.int32) -> bool:
    """Returns whether the operators take these integers unchanged: a dense tensor of `rank` dimensions with contiguous rows, on
    the device of `like`, a plain tensor."""
    if type(numbers) is not Tensor or numbers.dtype is not dtype or numbers.layout is not _STRIDED or numbers.is_nested:
        return False
    index = like.get_device()
    if numbers.get_device() != index or index < 0 and not numbers.is_cpu:
        return False
    return numbers.dim() == rank and (numbers.stride()[-1] == 1 or numbers.shape[-1] <= 1)
