"""Shards a language model's batch over ranks, before the training step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._checks import check_index, check_tensor
from .._ops import InvalidArgument
from ._group import group_of
from ._layout import check_layout, positions, shard


def shard_batch(
    batch: Mapping[str, Any],
    group: dist.ProcessGroup | dist.DeviceMesh | None = None,
    layout: str = "zigzag",
    *,
    ignore_index: int = -100,
) -> dict[str, Any]:
    """This rank's shard of a batch of a causal language model, as Hugging Face's collators make it. With attention over the
    ranks, the sum over ranks of `model(**shard_batch(batch)).loss` is the loss of the whole batch.

    Args:
        batch: the whole batch, the same on every rank, keyed by the model's argument names:

            - `input_ids` `[B, L]`, or `inputs_embeds` `[B, L, H]`; L is a multiple of the ranks (contiguous) or of twice the
              ranks (zigzag): pad it, for example with a collator's `pad_to_multiple_of`.
            - `labels` `[B, L]`, optional, not shifted, as for the model: label t + 1 belongs to row t. They are shifted here,
              before the cut, since the label of a rank's last row is on another rank.
            - `position_ids`, optional, `[..., L]`; made here if missing. For packed documents they restart at each document.
            - `attention_mask` of ones only: it is dropped. Under the causal rule padding at the end needs no mask; its labels
              are `ignore_index`.
            - Every other tensor of shape `[B, L, ...]` is sharded too. All else is passed on: `cu_seq_lens_q` and related
              arguments describe the whole stream.
        group: as in `context_parallel_attention`, like layout ("contiguous" for packed documents).
        ignore_index: the label that is ignored.

    Returns:
        A new dict with the sharded tensors and `position_ids`; with labels also `shift_labels` (already shifted; a model does
        not shift them again), `labels` (the same, for models that check for labels) and `num_items_in_batch`, an int64 tensor
        with the number of labels of the whole batch that are not ignored, by which a model divides its summed loss.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a mask has zeros, a length does not divide, or an argument is invalid.
            Raised on this rank only: nothing is communicated.
    """
    group_of(group)
    check_layout(layout)
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch: expected a mapping of names to tensors, got {type(batch).__name__}")
    known = {name: value for name, value in batch.items() if value is not None}
    first = next((name for name in ("input_ids", "inputs_embeds") if name in known), None)
    if first is None:
        raise InvalidArgument(f"batch: expected 'input_ids' or 'inputs_embeds', got {', '.join(known) or 'nothing'}")
    check_tensor(first, known[first])
    if known[first].dim() < 2:
        raise InvalidArgument(f"{first}: expected [batch, length] or [batch, length, width], got {list(known[first].shape)}")
    rows, length = known[first].shape[:2]
    mask = known.pop("attention_mask", None)
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == (rows, length) and bool((mask == 1).all())):
        raise InvalidArgument(
            "attention_mask: expected [batch, length] of ones over several ranks, got another mask. Pack documents "
            "into one row and pass cu_seq_lens_q, or pad at the end without a mask and give padding the label ignore_index"
        )
    if "labels" in known:
        known |= _shifted(known["labels"], (rows, length), check_index("ignore_index", ignore_index, any_rank=True))
    dims = {
        name: -1 if name == "position_ids" else 1
        for name, value in known.items()
        if isinstance(value, Tensor) and _has_rows(name, value, (rows, length))
    }
    cut = dict(zip(dims, shard([known[name] for name in dims], list(dims.values()), group, layout), strict=True))
    if "position_ids" not in known:
        cut["position_ids"] = positions(length, group, layout, device=known[first].device).expand(rows, -1)
    return known | cut


def _shifted(labels: Any, shape: tuple[int, int], ignore_index: int) -> dict[str, Tensor]:
    check_tensor("labels", labels)
    if labels.shape != shape:
        raise InvalidArgument(f"labels: expected input_ids' {list(shape)}, not shifted, got {list(labels.shape)}")
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)
    return {"labels": shifted, "shift_labels": shifted, "num_items_in_batch": (shifted != ignore_index).sum()}


def _has_rows(name: str, tensor: Tensor, shape: tuple[int, int]) -> bool:
    if name == "position_ids":
        if tensor.dim() == 0 or tensor.shape[-1] != shape[1]:
            raise InvalidArgument(f"position_ids: expected [..., {shape[1]}], a position per row, got {list(tensor.shape)}")
        return True
    return tensor.shape[:2] == shape
