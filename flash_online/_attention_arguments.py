"""The arguments of the raw attention operators, in the order of csrc/ops/library.cpp. Fakes, vmap rules, autograd Functions and
derivatives share this order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class AttentionTensors(NamedTuple):
    """The tensors of attention_forward, their tangents, or a flag per tensor (mapped, needs a gradient)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    rng: Tensor | None
    query_spans: Tensor | None = None  # the operators' last arguments
    key_spans: Tensor | None = None
    tiles: Tensor | None = None


class VarlenTensors(NamedTuple):
    """The tensors of attention_varlen_forward, or their tangents."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    rng: Tensor | None
    query_spans: Tensor | None = None  # the operators' last arguments
    key_spans: Tensor | None = None


class AttentionOptions(NamedTuple):
    """The options of the forward pass, shared by the backward pass. A window bound of -1 is no bound."""

    window_left: int
    window_right: int
    lower_right: bool
    scale: float | None  # None: 1 / sqrt(head dim)
    softcap: float
    dropout_p: float
    tf32: bool
    deterministic: bool | None = None  # for the derivative alone; None asks torch when the operator is called

    def for_backward(self, *own):
        """The options of a backward operator. Its additional options `own` come before the last one: (mask_grad,
        deterministic), or (deterministic,) for packed sequences."""
        *shared, tf32, _ = self
        return *shared, *own, tf32


def given_sparsity(
    query_spans: Tensor | None, key_spans: Tensor | None, tiles: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Spans, and tiles of a list of blocks, as the last arguments of an operator; what is None at their end is left out."""
    if tiles is not None:
        return query_spans, key_spans, tiles
    return () if query_spans is key_spans is None else (query_spans, key_spans)


def default_scale(head_dim) -> float:
    """1 / sqrt(head_dim). With head_dim 0 every score is 0 whatever the scale, as in torch."""
    return 1 / math.sqrt(head_dim) if head_dim else 1.0


class AttentionGradients(NamedTuple):
    """The results of attention_backward, or their tangents; None or an empty tensor stands for a gradient that was not
    requested."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    sinks: Tensor | None
