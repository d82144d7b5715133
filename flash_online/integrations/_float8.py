"""What the integrations of float8_attention share: its name in their hosts, what they refuse, and masks of keys as spans."""

from __future__ import annotations

import torch
from torch import Tensor

from .._cache_arguments import check_no_gradient

NAME = "online_attention_float8"
_MOST = 2**31 - 1  # bounds are clamped to the number of queries


def check_inference(dropout_name: str, dropout: float, **tensors: Tensor | None) -> None:
    """Raises for a call that belongs to training."""
    check_no_gradient(tensors, function=NAME)
    if dropout:
        raise NotImplementedError(f"{dropout_name}: expected 0 with {NAME}, which is for inference, got {dropout}")


def spans_of_keys(mask: Tensor) -> Tensor:
    """The key_spans `[..., S, 2]` of a bool mask `[..., S]`: all queries see a key, or none does."""
    past = mask.to(torch.int32) * _MOST
    return torch.stack([torch.zeros_like(past), past], -1)
