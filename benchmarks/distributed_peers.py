"""Peers of context parallelism: ring-flash-attn (zigzag ring, and llama3 for packed sequences) and yunchang (Ulysses).

They call flash_attn's kernels. Without flash_attn they get a module of that name which calls torch's copy of the same
FlashAttention-2 kernels. Its backward pass copies gradients into the peers' buffers, while flash_attn writes them directly.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from .peers import Unavailable

aten = torch.ops.aten


def _forward(q, k, v, starts_q, starts_k, longest_q, longest_k, options):
    lengths = (starts_q, starts_k, longest_q, longest_k)
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, options["causal"], False, scale=options["softmax_scale"]
    )
    return out, lse, None, None


def _backward(dout, q, k, v, out, lse, buffers, starts_q, starts_k, longest_q, longest_k, options):
    unused = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    call = (dout, q, k, v, out, lse, starts_q, starts_k, longest_q, longest_k, 0.0, options["causal"], *unused)
    grads = aten._flash_attention_backward(*call, scale=options["softmax_scale"])
    for buffer, grad in zip(buffers, grads, strict=True):
        buffer.copy_(grad)


# The parameters have flash_attn 2.7's names and order: the peers inspect both. Windows, softcap and dropout are not used here.


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax
):
    return _forward(q, k, v, None, None, q.shape[1], k.shape[1], locals())


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), None, None, q.shape[1], k.shape[1], locals())


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
):  # fmt: skip
    return _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, locals())


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), *lengths, locals())


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **_):
    return _forward(q, k, v, None, None, q.shape[1], k.shape[1], locals())[0]  # torch differentiates it


def _find_flash_attn() -> None:
    if importlib.util.find_spec("flash_attn") is not None:
        return
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.__version__, package.__path__, package.flash_attn_interface = "2.7.4", [], interface
    package.flash_attn_func = interface.flash_attn_func = flash_attn_func
    for function in (_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward):
        setattr(interface, function.__name__, function)
    for module in (package, interface):
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, None)
        sys.modules[module.__name__] = module


def _ring_flash_attn(module: str) -> ModuleType:
    """One of its modules, without the package's own __init__, which imports an adapter for certain transformers versions."""
    _find_flash_attn()
    if "ring_flash_attn" not in sys.modules:
        if (spec := importlib.util.find_spec("ring_flash_attn")) is None:
            raise Unavailable("ring-flash-attn is not installed")
        sys.modules["ring_flash_attn"] = package = ModuleType("ring_flash_attn")
        package.__path__ = list(spec.submodule_search_locations or [])
    return importlib.import_module(f"ring_flash_attn.{module}")


def zigzag(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """ring-flash-attn's zigzag ring. query, key, value [1, H, n, E], rows first in memory."""
    attend = _ring_flash_attn("zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
    rows_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return attend(*rows_first, causal=True, group=dist.group.WORLD).transpose(1, 2)


def llama3(starts: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """ring-flash-attn's gathered keys of packed documents, one key head at a time; query, key, value [n, H, E]."""
    module = _ring_flash_attn("llama3_flash_attn_varlen")
    made = module.llama3_flash_attn_prepare_cu_seqlens(starts, True, dist.get_rank(), dist.get_world_size())
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    words = dict(zip(names, made, strict=True)) | {"heads_k_stride": 1, "causal": True, "group": dist.group.WORLD}
    return lambda *tensors: module.llama3_flash_attn_varlen_func(*tensors, **words)


def ulysses() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """yunchang's Ulysses. query, key, value [1, H, n, E], rows first in memory, contiguous in the sequence."""
    _find_flash_attn()
    if importlib.util.find_spec("yunchang") is None:
        raise Unavailable("yunchang is not installed")
    attend = importlib.import_module("yunchang").UlyssesAttention(dist.group.WORLD)
    return lambda *tensors: attend(*(tensor.transpose(1, 2) for tensor in tensors), causal=True).transpose(1, 2)
