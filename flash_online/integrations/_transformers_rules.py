"""What the mask functions of transformers mean: a rule of positions, runs of tokens, or one interval of keys per query."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """The meaning of one of the host's mask functions."""

    causal: bool
    window: tuple[int, int] | None = None
    chunk: int | None = None  # keys per chunk: a query sees no key before its own chunk
    documents: bool = False  # queries see only their own document

    def also(self, other: Rule) -> Rule:
        """Both at once."""
        window = other.window if self.window is None else self.window
        if self.window is not None and other.window is not None:
            window = (min(self.window[0], other.window[0]), min(self.window[1], other.window[1]))
        chunk = self.chunk if other.chunk is None else other.chunk if self.chunk is None else min(self.chunk, other.chunk)
        return Rule(self.causal or other.causal, window, chunk, self.documents or other.documents)


NO_BOUND = 2**31 - 1  # the right bound of a window under the causal rule


def _open(function: Callable[..., Tensor]) -> tuple[str, dict[str, Any]] | None:
    """The name of the host's factory that made a mask function (or of the function itself), and what it was given; None for
    any other function."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return None
    cells = zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True)
    return getattr(function, "__qualname__", "").partition(".")[0], dict(cells)


def read(function: Callable[..., Tensor]) -> Rule | None:
    """The rule of a mask function, from the names and closures of the host's factories; None for any other function."""
    name, given = _open(function) or ("", {})
    match name:
        case "causal_mask_function":
            return Rule(True)
        case "bidirectional_mask_function":
            return Rule(False)
        case "and_masks":
            whole = Rule(False)
            for part in given["mask_functions"]:
                rule = read(part)
                if rule is None:
                    return None
                whole = whole.also(rule)
            return whole
        case "sliding_window_overlay":
            return Rule(False, (given["sliding_window"] - 1, NO_BOUND))
        case "sliding_window_bidirectional_overlay":
            return Rule(False, (given["sliding_window"], given["sliding_window"]))
        case "chunked_overlay":
            return Rule(False, chunk=given["chunk_size"])
        case "packed_sequence_mask_function":
            return Rule(False, documents=True)
        case "remap_positions_for_packed_sequence":  # positions inside a document, at a constant offset from row positions
            return read(given["mask_function"])
    return None


def interval(function: Callable[..., Tensor], tokens: Tensor) -> tuple[Tensor, Tensor] | None:
    """The interval of keys that a mask function shows to each of the queries `tokens` (their positions, int64 `[L]`).

    Args:
        function: made of the host's functions for rules, chunks, documents and blocks. All but blocks show a query itself, and
            a block is either around the query or empty, so unions are intervals too.

    Returns:
        (first, past): the first key and the one after the last, int64, broadcastable to `[B, L]`. None for other functions,
        and for blocks or documents in several parts. Syncs for them.
    """
    name, given = _open(function) or ("", {})
    zero, no_bound = torch.zeros_like(tokens), torch.full_like(tokens, NO_BOUND)
    match name:
        case "causal_mask_function":
            return zero, tokens + 1
        case "bidirectional_mask_function":
            return zero, no_bound
        case "sliding_window_overlay":
            return tokens - given["sliding_window"] + 1, no_bound
        case "sliding_window_bidirectional_overlay":
            return tokens - given["sliding_window"], tokens + given["sliding_window"] + 1
        case "chunked_overlay":
            left, size = given["left_padding"].to(tokens)[:, None], given["chunk_size"]
            first = (tokens - left) // size * size + left
            return first, first + size
        case "packed_sequence_mask_function":
            return _block(given["packed_sequence_mask"], tokens)
        case "blockwise_overlay":
            return _block(given["block_sequence_ids"], tokens)
        case "and_masks" | "or_masks":
            parts = [interval(part, tokens) for part in given["mask_functions"]]
            if not all(parts):
                return None
            firsts, pasts = zip(*(part for part in parts if part is not None), strict=True)
            least, most = (torch.maximum, torch.minimum) if name == "and_masks" else (torch.minimum, torch.maximum)
            return reduce(least, firsts), reduce(most, pasts)
    return None


def _block(ids: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
    """The tokens with the same id as each of `tokens`, as `interval`; none for ids below 0. None if they are no run."""
    in_block = ids >= 0
    starts = torch.cat([in_block.new_ones(ids.shape[0], 1), ids.diff() != 0], 1)
    heads = torch.where(starts & in_block, ids, -1).sort(1).values
    if bool(((heads.diff() == 0) & (heads[:, 1:] >= 0)).any()):
        return None
    index, (first, past) = torch.arange(ids.shape[1], device=ids.device), runs(starts)
    return torch.where(in_block, first, index)[:, tokens], torch.where(in_block, past, index)[:, tokens]


def runs(starts: Tensor) -> tuple[Tensor, Tensor]:
    """The first token of the run around each token, and the one after its last: int64 `[B, L]`, from `starts`, True where a run
    begins."""
    length = starts.shape[1]
    tokens = torch.arange(length, device=starts.device)
    following = torch.nn.functional.pad(torch.where(starts, tokens, length)[:, 1:], (0, 1), value=length)
    return torch.where(starts, tokens, 0).cummax(1).values, following.flip(1).cummin(1).values.flip(1)


def infer(
    function: Callable[..., Tensor], local_size: int | None, causal_skip: bool, bidirectional_skip: bool, config: Any
) -> Rule | None:
    """`read` while Dynamo traces and closures are hidden: uses the flags by which the host's own mask functions declare a
    plain rule."""
    name = function.__name__
    if name in ("causal_mask_function", "bidirectional_mask_function"):
        return Rule(name == "causal_mask_function")
    if name != "and_mask":
        return None
    if bidirectional_skip:
        return None if local_size is None else Rule(False, (local_size, local_size))
    documents = not causal_skip
    if local_size is None:
        return Rule(True, documents=True) if documents else None
    if local_size == getattr(config, "attention_chunk_size", None):  # the config attribute tells a chunk from a window
        return None if local_size == getattr(config, "sliding_window", None) else Rule(True, None, local_size, documents)
    return Rule(True, (local_size - 1, NO_BOUND), None, documents)


def starts_of(mask_function: Callable[..., Tensor], batch: int, length: int, device: torch.device | str) -> Tensor:
    """bool `[B, L]`: True where a token does not see the previous token. Documents and chunks are runs of tokens, so these are
    their starts."""
    rows, head = torch.arange(batch, device=device)[:, None], torch.zeros(1, 1, dtype=torch.long, device=device)
    tokens = torch.arange(1, length, device=device)[None]
    together = mask_function(rows, head, tokens, tokens - 1).expand(batch, length - 1)
    return torch.cat([together.new_ones(batch, 1), ~together], 1)
