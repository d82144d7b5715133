"""torch.nn.attention.bias.CausalBias as an attn_mask: the causal rule, aligned to the upper left or the lower right, without a
mask of L x S. Torch computes most such calls by a mask that it makes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._ops import InvalidArgument


def is_causal_bias(mask: object) -> bool:
    """Whether this is a CausalBias. Its module imports the compiler, which takes a second, and is not imported here."""
    kind = type(mask)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"


class CausalRule(NamedTuple):
    """What a mask says: the arguments attn_mask and is_causal that stand for it, and whether the causal rule is aligned to the
    lower right."""

    mask: Tensor | None
    is_causal: bool
    lower_right: bool

    @classmethod
    def of(cls, mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor) -> CausalRule:
        """The rule of an attn_mask of any kind. Raises InvalidArgument where a CausalBias does not go with the call, as torch
        does; to the upper left its sizes do not count, there as here."""
        if mask is None or not is_causal_bias(mask):
            return cls(mask, is_causal, False)
        if is_causal:
            raise InvalidArgument("attn_mask: a CausalBias together with is_causal=True; accepted is one of them")
        if mask.variant.name == "UPPER_LEFT":
            return cls(None, True, False)
        queries, keys = query.shape[-2], key.shape[-2]
        if mask.seq_len_q == mask.seq_len_kv and queries == keys:
            return cls(None, True, False)
        if mask.seq_len_q != queries or mask.seq_len_kv != keys:
            raise InvalidArgument(
                f"attn_mask: a CausalBias of {[mask.seq_len_q, mask.seq_len_kv]}, expected [{queries}, {keys}], the lengths of "
                "query and key"
            )
        return cls(None, True, True)

    def for_torch(self, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool]:
        """attn_mask and is_causal for torch's function, of tensors that have no kernel here."""
        if not self.lower_right:
            return self.mask, self.is_causal
        queries, keys = query.shape[-2], key.shape[-2]
        return torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries), False
