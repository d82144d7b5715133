"""Padded batches to packed sequences and back: the functions of FlashAttention-2's `flash_attn.bert_padding`."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` (int64 `[n]`) of the first dimension; differentiable."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros `[first_axis_dim, ...]` with the rows of `values` at `indices` (int64 `[n]`, each at most once); differentiable."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(index_first_axis(input, indices), input): the unpadded input of a block, with its residual."""
    return index_first_axis(input, indices), input


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens of a padded batch; the host reads their number.

    Args:
        hidden_states: `[B, S, ...]`.
        attention_mask: `[B, S]`, bool or integers: nonzero where a token takes part.
        unused_mask: like attention_mask, for tokens that are packed but do not take part.

    Returns:
        (tokens `[T, ...]`, their indices int64 `[T]` in the flattened batch, cu_seqlens int32 `[B + 1]`, the longest length,
        the lengths without unused tokens int32 `[B]`).
    """
    taken = attention_mask != 0
    present = taken if unused_mask is None else taken | (unused_mask != 0)
    lengths = present.sum(-1, dtype=torch.int32)
    indices = present.flatten().nonzero().flatten()
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _starts(lengths), _largest(lengths), taken.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` of a batch with several sequences per row; the host reads the number of tokens.

    Args:
        hidden_states: `[B, S, ...]`.
        attention_mask_in_length: integers `[B, S]`: the lengths of a row's sequences, in order, and zeros after them.

    Returns:
        (tokens `[T, ...]`, their indices int64 `[T]` in the flattened batch, cu_seqlens int32 `[sequences + 1]`, the longest
        length).
    """
    filled = attention_mask_in_length.sum(-1, keepdim=True)
    position = torch.arange(attention_mask_in_length.shape[-1], device=filled.device)
    indices = (position < filled).flatten().nonzero().flatten()
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths != 0]
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _starts(lengths), _largest(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts the tokens `[T, ...]` back at `indices` of a batch `[batch, seqlen, ...]` of zeros; the inverse of `unpad_input`."""
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *hidden_states.shape[1:])


def _starts(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _largest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
