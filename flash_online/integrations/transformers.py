"""The door to transformers."""

from __future__ import annotations

from ._fused_loss import fuse_loss

__all__ = ["fuse_loss"]
