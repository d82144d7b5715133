"""torch.nn.attention.bias.CausalBias as an attn_mask: the causal rule, aligned to the upper left or the lower right, without a
mask of L x S. Torch builds a mask for most such calls.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._ops import InvalidArgument


def is_causal_bias(mask: object) -> bool:
    """Returns whether this is a CausalBias, by name: importing its module would import the compiler, which takes a second."""
    kind = type(mask)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"


class CausalRule(NamedTuple):
    """A mask as the arguments attn_mask and is_causal, and whether the causal rule is aligned to the lower right."""

    mask: Tensor | None
    is_causal: bool
    lower_right: bool

    @classmethod
    def of(cls, mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor) -> CausalRule:
        """The rule of an attn_mask of any kind. Raises InvalidArgument if a CausalBias does not fit the call, as torch does. As
        in torch, sizes do not matter for the upper-left alignment."""
        if mask is None or not is_causal_bias(mask):
            return cls(mask, is_causal, False)
        if is_causal:
            raise InvalidArgument("attn_mask: expected None with is_causal=True, got a CausalBias")
        if mask.variant.name == "UPPER_LEFT":
            return cls(None, True, False)
        queries, keys = query.shape[-2], key.shape[-2]
        if mask.seq_len_q == mask.seq_len_kv and queries == keys:
            return cls(None, True, False)
        if mask.seq_len_q != queries or mask.seq_len_kv != keys:
            raise InvalidArgument(
                f"attn_mask: expected a CausalBias of [{queries}, {keys}], the lengths of query and key, got "
                f"{[mask.seq_len_q, mask.seq_len_kv]}"
            )
        return cls(None, True, True)

    def for_torch(self, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool]:
        """attn_mask and is_causal for torch's function, for tensors that have no kernel here."""
        if not self.lower_right:
            return self.mask, self.is_causal
        queries, keys = query.shape[-2], key.shape[-2]
        return torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries), False
