"""The masks of the cells with spans: what each is for, its spans, and FlexAttention's function of the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_online import spans

DOCUMENTS, ANSWERS, FRAME = 16, 8, 256


@dataclass(frozen=True)
class Pattern:
    """`spans`: arguments of attention. `visible(b, h, i, j)`: a mask_mod of the same pairs. `starts`: int32, of documents,
    which packed sequences say too."""

    spans: dict
    visible: Callable[..., Tensor]
    starts: Tensor | None = None


def _documents(length: int, device: str) -> Pattern:
    """Causal documents of one length, as SFT packs them."""
    starts = (torch.arange(DOCUMENTS + 1, device=device) * length // DOCUMENTS).int()
    number = torch.searchsorted(starts, torch.arange(length, device=device, dtype=torch.int32), right=True)
    given = spans.documents(cu_seqlens=starts, L=length)
    return Pattern(given, lambda b, h, i, j: (i >= j) & (number[i] == number[j]), starts)


def _prefix(length: int, device: str) -> Pattern:
    """A quarter of the sequence is a prefix that all see."""
    first = length // 4
    return Pattern(spans.prefix(torch.tensor([first], device=device), length), lambda b, h, i, j: (j < first) | (i >= j))


def _shared(length: int, device: str) -> Pattern:
    """A question of a fifth of the row, and eight answers to it, as RL trainers sample them."""
    question = length // 5
    ends = [question + (length - question) * n // ANSWERS for n in range(ANSWERS + 1)]
    starts = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    number = torch.searchsorted(starts, torch.arange(length, device=device, dtype=torch.int32), right=True)
    given = spans.shared_prefix(starts, length)
    return Pattern(given, lambda b, h, i, j: (i >= j) & ((j < question) | (number[i] == number[j])))


def _tree(length: int, device: str) -> Pattern:
    """A trunk, four branches of it, and four branches of each."""
    parents = torch.arange(length) - 1
    trunk = length // 5
    branch = (length - trunk) // 4
    twig = branch // 5
    for n in range(4):
        first = trunk + n * branch
        parents[first] = trunk - 1
        for m in range(1, 5):
            parents[first + m * twig] = first + twig - 1
    given = spans.tree(parents[None].to(device))
    ends = given["key_spans"].flatten(0, 2)[:, 1]
    return Pattern(given, lambda b, h, i, j: (i >= j) & (i < ends[j]))


def _frames(length: int, device: str) -> Pattern:
    """Causal by frames, as video models are: a token sees its own frame and those before."""
    ends = (torch.arange(length, device=device) // FRAME + 1) * FRAME
    given = torch.stack([torch.zeros_like(ends), ends], -1).int()
    return Pattern({"query_spans": given}, lambda b, h, i, j: i // FRAME >= j // FRAME)


def _sink_window(sinks: int, left: int) -> Callable[[int, str], Pattern]:
    """First tokens that all see, and a causal window."""

    def make(length: int, device: str) -> Pattern:
        given = spans.sink_window(sinks, left, length, device)
        return Pattern(given, lambda b, h, i, j: (i >= j) & ((j < sinks) | (i - j <= left)))

    return make


PATTERNS: dict[str, Callable[[int, str], Pattern]] = {
    "documents": _documents,
    "prefix": _prefix,
    "shared question": _shared,
    "tree": _tree,
    "frames": _frames,
    "4 sinks, window 1024": _sink_window(4, 1024),
    "64 global, window 512": _sink_window(64, 512),
}


def count_pairs(
    length: int, *, query_spans: Tensor | None = None, key_spans: Tensor | None = None, causal: bool = False
) -> int:
    """Number of visible pairs of a head, for one interval per query or per key, in linear memory."""
    given = (key_spans if query_spans is None else query_spans).reshape(-1, length, 2)[0].long().clamp(0, length)
    begin, end = given.unbind(-1)
    own = torch.arange(length, device=given.device)
    if causal:
        begin, end = (begin.maximum(own), end) if query_spans is None else (begin, end.minimum(own + 1))
    return int((end - begin).clamp_min(0).sum())
