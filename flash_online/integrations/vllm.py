"""An attention backend of vLLM, registered by `register()` as vLLM's CUSTOM: `--attention-backend CUSTOM`.

vLLM first writes the new keys of a step (`do_kv_cache_update`, here cache_append with slots), then attends (`forward`, here
kvcache_attention of packed queries over pages, with lengths that include the new keys). `Backend`, `Builder` and `Impl` derive
from vLLM's classes and are created when vLLM first requests one of them: importing this module does not import vLLM.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from .. import _policy
from ._vllm_layer import FLOAT8, BuilderMethods, ImplMethods

__all__ = ["register"]

_16_BITS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_log = logging.getLogger(__name__)


def register() -> bool:
    """Makes this module vLLM's CUSTOM backend. vLLM calls it in each of its processes, through the entry point group
    `vllm.general_plugins`; a process that does not select CUSTOM is not changed. A second call changes nothing.

    Returns:
        Whether CUSTOM is this backend now. If not (vLLM is not installed, has no such registry, or CUSTOM is another package's
        backend), nothing is changed, and this module logs the reason.
    """
    try:
        from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport  # noqa: F401
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        custom = AttentionBackendEnum.CUSTOM
    except (ImportError, AttributeError) as missing:
        _log.warning("vllm: no registry of attention backends as in 0.20.0 to 0.33.0 (%s); CUSTOM is not registered", missing)
        return False
    path = f"{__name__}.Backend"
    if custom.is_overridden() and custom.get_path() != path:
        _log.warning("vllm: the backend CUSTOM is %s already and is kept; VLLM_PLUGINS selects plugins", custom.get_path())
        return False
    register_backend(custom, path)
    return True


def __getattr__(name: str) -> type:
    if name in ("Backend", "Builder", "Impl"):
        return _classes()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _classes() -> dict[str, type]:
    """The three classes by name."""
    from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder

    # Only the device reads lengths and tables, so that a graph serves every batch of its size.
    graphs = {"_cudagraph_support": AttentionCGSupport.ALWAYS}
    bases = {
        "Backend": ((_BackendMethods, AttentionBackend), {}),
        "Builder": ((BuilderMethods, AttentionMetadataBuilder), graphs),
        "Impl": ((ImplMethods, AttentionImpl), {}),
    }
    return {name: type(name, of, {"__module__": __name__, **members}) for name, (of, members) in bases.items()}


class _BackendMethods:
    """Methods that vLLM calls before there is a model; vLLM reports unsupported cases using their answers."""

    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", *_16_BITS, *FLOAT8]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks it up in its enum

    @staticmethod
    def get_impl_cls() -> type:
        return _classes()["Impl"]

    @staticmethod
    def get_builder_cls() -> type:
        return _classes()["Builder"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(16)]  # our kernels take any page; FLASH_ATTN's layout does not

    @staticmethod
    def get_kv_cache_shape(*args: Any, **named: Any) -> tuple[int, ...]:
        return _flash_attn().get_kv_cache_shape(*args, **named)

    @staticmethod
    def get_kv_cache_stride_order(*args: Any, **named: Any) -> tuple[int, ...]:
        return _flash_attn().get_kv_cache_stride_order(*args, **named)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **named: Any
    ) -> str | None:
        """Why a combination is not supported, or None."""
        if not {"kvcache_attention", "cache_append"} <= _policy.ON_CUDA:
            return "this build of flash_online has no CUDA kernels for cached keys"
        if kv_cache_dtype in FLOAT8 and dtype == torch.float32:
            return f"kv_cache_dtype: expected 'auto' with float32, got {kv_cache_dtype}"
        if _16_BITS.get(kv_cache_dtype or "", dtype) != dtype:
            return f"kv_cache_dtype: expected 'auto' or float8 with {dtype}, got {kv_cache_dtype}"
        return None

    @classmethod
    def _taken(cls) -> bool:
        return True

    supports_sink = supports_sliding_window = supports_non_causal = supports_batch_invariance = _taken
    supports_per_head_quant_scales = _taken


def _flash_attn() -> Any:
    """vLLM's FLASH_ATTN. Up to 0.28 every backend chooses the layout of its caches, and connectors know this one's."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    return FlashAttentionBackend
