"""Registers our kernels as one of torch's flash attention implementations: torch's own scaled_dot_product_attention and
varlen_attn then run them.

    from flash_online.integrations import torch_sdpa
    torch_sdpa.activate()

From then on torch's flash attention operators on CUDA are ours, registered from C++. Torch's choice of backend, its autograd,
its fake tensors and all that is built on these operators (torch.compile, selective checkpointing, DTensor, context_parallel,
callers that imported the function by name) remain torch's own and need no change. Torch sends flash attention the calls without
a mask, in 16-bit dtypes, with a head dim of at most 256; all other calls go where they went before.

Differences from torch's kernels: dropout uses our mask, which depends only on (seed, batch, head, query, key); the lse of a
query that sees no key is -inf. The backward pass is deterministic under torch.use_deterministic_algorithms. Packed queries over
pages (block_table with seqused_k, torch >= 2.12) run ours, without gradients; other calls with seqused_k, and calls with
return_debug_mask, run torch's own kernel, which is kept. e4m3 tensors, which torch's `quantized` overloads take, run
flash_online.float8_attention.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch

from .._ops import ops
from . import _torch_float8

NAME = "flash_online"
_INPLACE = "_flash_attention_forward_no_dropout_inplace"  # since torch 2.12
_KEPT = ("_scaled_dot_product_flash_attention", "_flash_attention_forward", _INPLACE)
_TENSORS = (0, 1, 6, 7, 8)  # of the first operator's results: output, logsumexp, rng_state, unused, debug_attn_mask

_prefer = False  # argument of the activate() in progress
_active: _Handle | None = None
_kept: torch.library.Library | None = None


class _Handle:
    """An activation; torch's registry undoes it with remove()."""

    def __init__(self, prefer: bool) -> None:
        _register_kernels(True)
        self._float8 = _torch_float8.register("CUDA")
        self._active = True
        self._switched_cudnn_off = prefer and torch.backends.cuda.cudnn_sdp_enabled()
        if self._switched_cudnn_off:
            torch.backends.cuda.enable_cudnn_sdp(False)

    def remove(self) -> None:
        """Restores torch's operators, and enables the cuDNN backend again if this activation disabled it. A second call does
        nothing."""
        if not self._active:
            return
        self._active = False
        self._float8._destroy()
        _register_kernels(False)
        if self._switched_cudnn_off:
            torch.backends.cuda.enable_cudnn_sdp(True)

    @property
    def active(self) -> bool:
        return self._active


def register(name: str = NAME) -> None:
    """Registers our kernels with torch.nn.attention under `name`: torch.nn.attention.activate_flash_attention_impl(name) makes
    them torch's flash attention, restore_flash_attention_impl() undoes it.

    The last registration of a name wins. A host that activates an implementation itself, as torchtitan activates "FA3", gets
    ours if it is registered under that name.
    """
    torch.nn.attention.register_flash_attention_impl(name, register_fn=_activated)


def activate(prefer: bool = True) -> None:
    """Makes torch's flash attention operators on CUDA ours, in the whole process, until restore() or until torch.nn.attention
    activates another implementation.

    prefer: until then, also disable torch's cuDNN backend, which torch prefers to flash attention on some GPUs.

    Raises:
        RuntimeError: torch has no CUDA, or this build of flash_online has no CUDA kernels.
    """
    global _prefer
    register()
    _prefer = prefer
    try:
        torch.nn.attention.activate_flash_attention_impl(NAME)
    finally:
        _prefer = False


def restore() -> None:
    """Undoes our activation, under any name; does nothing without one."""
    if _active is not None and _active.active:
        torch.nn.attention.restore_flash_attention_impl()


def _activated() -> _Handle:
    """Called by torch's registry, after it has undone the previous activation."""
    global _active
    if not torch.backends.cuda.is_built():
        raise RuntimeError(f"torch_sdpa: torch {torch.__version__} has no CUDA operators to replace")
    if not torch._C._dispatch_has_kernel_for_dispatch_key("flash_online::torch_sdpa_register", "CompositeExplicitAutograd"):
        raise RuntimeError(
            "torch_sdpa: this build of flash_online has no CUDA kernels; `python -m flash_online info` lists its kernels"
        )
    _keep_torch_kernels()
    _active = _Handle(_prefer)
    return _active


def _register_kernels(active: bool) -> None:
    if active:
        _silence_the_dispatcher()
    ops.torch_sdpa_register.default(active, hasattr(torch.ops.aten, _INPLACE))


@functools.cache
def _silence_the_dispatcher() -> None:
    """Consumes torch's once-per-process warning about a kernel registered over another. For a kernel registered from Python it
    can be filtered; for ours it would be printed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = torch.library.Library("aten", "IMPL", "CUDA")
        library.impl("_flash_attention_backward", lambda *args, **kwargs: None, "CUDA")
        library._destroy()


def _keep_torch_kernels() -> None:
    """Defines flash_online::kept_<name>, torch's own kernel of an operator, which our kernels call for unsupported cases.

    The schema is this torch's. For scaled_dot_product_flash_attention it omits non-tensor results: the stable ABI's operator
    call mixes up the types of such results.
    """
    global _kept
    if _kept is not None:
        return
    _kept = torch.library.Library("flash_online", "FRAGMENT")
    for name in filter(lambda name: hasattr(torch.ops.aten, name), _KEPT):
        operator = getattr(torch.ops.aten, name).default
        schema, which = str(operator._schema).replace(f"aten::{name}", f"kept{name}", 1), None
        if name == _KEPT[0]:
            schema, which = schema.split(" -> ")[0] + " -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _TENSORS
        _kept.define(schema)
        _kept.impl(f"kept{name}", _caller_of(torch.library.get_kernel(operator, "CUDA"), which), "CUDA", with_keyset=True)


def _caller_of(kernel, which: tuple[int, ...] | None) -> Callable:
    def call(keyset, *args, **kwargs):
        results = kernel.call_boxed(keyset, *args, **kwargs)
        return results if which is None else tuple(results[i] for i in which)

    return call
