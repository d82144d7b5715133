"""What the integrations of float8_attention share: its name in their hosts, and what they refuse."""

from __future__ import annotations

from torch import Tensor

from .._cache_arguments import check_no_gradient

NAME = "online_attention_float8"


def check_inference(dropout_name: str, dropout: float, **tensors: Tensor | None) -> None:
    """Raises for a call that belongs to training."""
    check_no_gradient(tensors, function=NAME)
    if dropout:
        raise NotImplementedError(f"{dropout_name}: expected 0 with {NAME}, which is for inference, got {dropout}")
