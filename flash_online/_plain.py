"""Tests whether a call is plain, for the fast paths of the public functions, which call an operator directly.

These tests replace the full checks in a fraction of their time. They do not raise: the full checks find the errors of other
calls.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _policy
from ._ops import FLOATING

# Tensors that torch.export traces without Dynamo are not plain.
is_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_any_autocast_enabled, _any_transforms = torch._C._is_any_autocast_enabled, torch._C._are_functorch_transforms_active
_any_function_mode, _traced_by_jit = torch._C._is_torch_function_mode_enabled, _policy.traced_by_jit
_STRIDED = torch.strided
NUMBERS = (float, int)  # types of options that need no check


def are_plain(function: str, first, others: tuple = (), inference: bool = False) -> bool:
    """Returns whether kernels of `function` take these tensors unchanged: dense, of one floating dtype, on one device that has
    kernels for it; tracers, torch.func, forward mode, autocast and TorchFunctionModes are off.

    `inference` is for functions over cached keys. They refuse a tensor that requires a gradient. Autocast and
    TorchFunctionModes may be on: autocast casts to the cache's dtype, and torch has no such function that a mode could replace.
    """
    if type(first) is not Tensor or is_compiling() or _traced_by_jit() is not None:
        return False
    if _any_transforms() or forward_ad._current_level >= 0:  # eager_transforms_active, without its call
        return False
    if not inference and (_any_autocast_enabled() or _any_function_mode()):
        return False
    dtype, on_cpu, refuses_grad = first.dtype, first.is_cpu, inference and is_grad_enabled()
    if dtype not in FLOATING or first.layout is not _STRIDED or first.is_nested or refuses_grad and first.requires_grad:
        return False
    if not on_cpu:
        index = first.get_device()
        if not (first.is_cuda and _policy.has_cuda_kernel(function, index, dtype)):
            return False
    for tensor in others:
        if type(tensor) is not Tensor or tensor.dtype is not dtype or tensor.layout is not _STRIDED or tensor.is_nested:
            return False
        if not tensor.is_cpu if on_cpu else tensor.get_device() != index:
            return False
        if refuses_grad and tensor.requires_grad:
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
