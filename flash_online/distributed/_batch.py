"""A language model's batch over ranks: what a trainer has before its step."""

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
    """This rank's part of a batch of a causal language model, as Hugging Face's collators make it. The sum over the ranks of
    `model(**shard_batch(batch)).loss` is the loss of the whole batch, where attention is over the ranks.

    Args:
        batch: the whole batch, the same on every rank, by the names of the model's arguments:

            - `input_ids` `[B, L]`, or `inputs_embeds` `[B, L, H]`; L is a multiple of the ranks (contiguous) or of twice as
              many (zigzag): pad it, for example by a collator's `pad_to_multiple_of`.
            - `labels` `[B, L]`, if any, not shifted, as for the model: label t + 1 belongs to row t. They are shifted here,
              before the cut, since the row after a rank's last one is another rank's.
            - `position_ids`, if any, `[..., L]`; else they are made. Those of packed documents begin anew at each.
            - `attention_mask` of ones alone: it is dropped. Padding at the end needs none under the causal rule; its labels are
              `ignore_index`.
            - Every other tensor of shape `[B, L, ...]` is cut too. All else is passed on: `cu_seq_lens_q` and its kin are those
              of the whole stream.
        group: as in `context_parallel_attention`, and so is layout: "contiguous" for packed documents.
        ignore_index: the label that counts for nothing.

    Returns:
        A new dict. Beside what is cut: `position_ids`; and with labels `shift_labels` (the shifted ones, which a model does not
        shift again), `labels` (the same, for models that ask whether there are any) and `num_items_in_batch`, an int64 tensor
        with the number of labels of the whole batch that count, by which a model divides the sum of its losses.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a mask has zeros, a length does not divide, or an argument is not as
            above. On this rank alone: nothing is communicated.
    """
    group_of(group)
    check_layout(layout)
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch: expected a mapping from names to tensors, got {type(batch).__name__}")
    known = {name: value for name, value in batch.items() if value is not None}
    first = next((name for name in ("input_ids", "inputs_embeds") if name in known), None)
    if first is None:
        raise InvalidArgument(f"batch: has {', '.join(known) or 'nothing'}; accepted has 'input_ids' or 'inputs_embeds'")
    check_tensor(first, known[first])
    if known[first].dim() < 2:
        raise InvalidArgument(f"{first}: got {list(known[first].shape)}; accepted is [batch, length] or [batch, length, width]")
    rows, length = known[first].shape[:2]
    mask = known.pop("attention_mask", None)
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == (rows, length) and bool((mask == 1).all())):
        raise InvalidArgument(
            "attention_mask: accepted over several ranks is [batch, length] of ones. Pack documents into one row and give "
            "cu_seq_lens_q, or pad at the end, without a mask, with labels of ignore_index"
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
        raise InvalidArgument(f"labels: got {list(labels.shape)}; accepted is input_ids' {list(shape)}, not shifted")
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)
    return {"labels": shifted, "shift_labels": shifted, "num_items_in_batch": (shifted != ignore_index).sum()}


def _has_rows(name: str, tensor: Tensor, shape: tuple[int, int]) -> bool:
    if name == "position_ids":
        if tensor.dim() == 0 or tensor.shape[-1] != shape[1]:
            raise InvalidArgument(
                f"position_ids: got {list(tensor.shape)}; accepted is [..., {shape[1]}], a position for each row"
            )
        return True
    return tensor.shape[:2] == shape
