"""Exact attention, softmax and cross-entropy using online softmax: blockwise, in linear memory, drop-in for torch.

import flash_online.functional as F    # torch.nn.functional with our kernels
with flash_online.override(): ...      # torch.nn.functional calls our kernels inside the block
flash_online.attention(query, key, value, window=(256, 0), sinks=sinks)   # all options of the kernels
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _copies as _copies  # says that copy_blocks has no derivative
from . import functional
from ._checked import checked
from ._ops import InvalidArgument, ops
from ._policy import strict
from .attention import attention
from .blocks import BlockList, block_scores
from .cascade import CascadeLevel, cascade_attention
from .cross_entropy import cross_entropy
from .explain import Plan, explain
from .float8 import float8_attention
from .kvcache import cache_append, kvcache_attention
from .linear_cross_entropy import linear_cross_entropy
from .merge import merge_attention
from .override import disable, enable, override
from .softmax import log_softmax, logsumexp, softmax, topk_softmax
from .varlen import varlen_attention
from .weight_sums import attention_weight_sums

if TYPE_CHECKING:  # __getattr__ imports them
    from . import distributed as distributed
    from . import reference, spans, testing

    __version__: str

SAC_SAVE_OPS = [
    ops.attention_forward.default,
    ops.attention_training.default,
    ops.attention_varlen_forward.default,
    ops.attention_forward_with_max_logit.default,
    ops.attention_varlen_forward_with_max_logit.default,
    ops.linear_cross_entropy_forward.default,
    ops.linear_cross_entropy_step.default,
]
"""Forward operators that selective activation checkpointing should save: repeating one costs matrix products."""

__all__ = [
    "BlockList",
    "CascadeLevel",
    "InvalidArgument",
    "Plan",
    "SAC_SAVE_OPS",
    "attention",
    "attention_weight_sums",
    "block_scores",
    "cache_append",
    "cascade_attention",
    "checked",
    "cross_entropy",
    "disable",
    "enable",
    "explain",
    "float8_attention",
    "functional",
    "kvcache_attention",
    "linear_cross_entropy",
    "log_softmax",
    "logsumexp",
    "merge_attention",
    "override",
    "reference",
    "softmax",
    "spans",
    "strict",
    "testing",
    "topk_softmax",
    "varlen_attention",
]


if not TYPE_CHECKING:  # a type checker would take every name for one of the module

    def __getattr__(name: str) -> Any:
        if name in ("distributed", "reference", "spans", "testing"):
            return importlib.import_module(f".{name}", __name__)
        if name == "__version__":
            from ._info import version

            return version()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
