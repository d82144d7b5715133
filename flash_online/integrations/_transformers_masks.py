"""The mask function of the transformers integration: visibility as rules and padding, in memory linear in the lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor


class VisibleKeys:
    """The keys that the queries of a forward pass see, in O(B S) memory: the mask function returns it instead of a mask
    `[B, 1, L, S]`, and the attention function reads it.

    It holds everything that a dense mask of the same pass would, so the attention function ignores other causal and window
    arguments: some models pass neither, or pass others than their mask holds. Models pass it on unchanged; a model that
    computes with its masks gets an error with advice.

    Attributes:
        batch, queries, keys: B, L, S of the mask.
        causal: a query sees no key after its own position.
        window: (left, right) in keys, both >= 0, around the position of the query, or None; with `causal` only left counts.
        lower_right: the last query is at the last key that counts; otherwise the first query is at the first key.
        used_keys: the number of leading keys that count (the rest is unused room in a static cache), or None for all.
        padding: bool `[B, 1, 1, used_keys]`, True for keys that take part, or None where all do.
        starts: bool `[B, L]`, True where a document or chunk begins (queries see only their own), or None.
        chunked: `starts` has chunk starts too, not only documents.
        dense: makes the bool mask `[B, 1, L, S]` by the host's own function.
        is_plain: a causal rule and padding are all there is.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        causal: bool,
        window: tuple[int, int] | None,
        lower_right: bool,
        used_keys: int | None,
        padding: Tensor | None,
        starts: Tensor | None,
        chunked: bool,
        documents: bool,
        dense: Callable[[], Tensor],
    ) -> None:
        self.batch, self.queries, self.keys = sizes
        self.causal, self.window, self.lower_right, self.used_keys = causal, window, lower_right, used_keys
        self.padding, self.starts, self.chunked, self.documents, self.dense = padding, starts, chunked, documents, dense
        self.packed: tuple[Tensor, int] | None = None
        self.is_plain = window is used_keys is starts is None and not documents

    def cu_seqlens(self) -> tuple[Tensor, int]:
        """int32 `[documents + 1]`, the first row of each document among the B L tokens, and the longest document's length.
        Syncs once per forward pass."""
        if self.packed is None:
            assert self.starts is not None
            begins = self.starts.flatten().nonzero().flatten()
            bounds = torch.cat([begins, begins.new_tensor([self.starts.numel()])]).to(torch.int32)
            self.packed = bounds, int(bounds.diff().max())
        return self.packed

    # Mask attributes that models and their hooks use without reading elements.

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch, 1, 1, self.keys))

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def contiguous(self) -> VisibleKeys:
        return self

    def numel(self) -> int:
        """Number of allocated elements."""
        return sum(tensor.numel() for tensor in (self.padding, self.starts) if tensor is not None)

    def to(self, *arguments: Any, **options: Any) -> VisibleKeys:
        """Tensor.to for another device; the dtype does not change."""
        parts = [None if t is None else t.to(*arguments, **options).to(torch.bool) for t in (self.padding, self.starts)]
        if parts[0] is self.padding and parts[1] is self.starts:
            return self
        sizes = self.batch, self.queries, self.keys
        rule = self.causal, self.window, self.lower_right, self.used_keys
        moved = VisibleKeys(sizes, *rule, parts[0], parts[1], self.chunked, self.documents, self.dense)
        if self.packed is not None:
            moved.packed = self.packed[0].to(*arguments, **options).to(torch.int32), self.packed[1]
        return moved

    @staticmethod
    def _refuse(*arguments: Any) -> NoReturn:
        raise TypeError(
            "attention_mask: this model computes with its masks, but flash_online's mask has no elements. "
            'Load the model with attn_implementation="eager".'
        )

    __and__ = __rand__ = __or__ = __ror__ = __invert__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __getitem__ = __iter__ = __len__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        cls._refuse(args)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"attention_mask.{name}: this model computes with its masks, but flash_online's mask is not a Tensor. "
            'Load the model with attn_implementation="eager".'
        )


class _Rule(NamedTuple):
    """The meaning of one of the host's mask functions."""

    causal: bool
    window: tuple[int, int] | None = None
    chunk: int | None = None  # keys per chunk: a query sees no key before its own chunk
    documents: bool = False  # queries see only their own document

    def also(self, other: _Rule) -> _Rule:
        """Both at once."""
        window = other.window if self.window is None else self.window
        if self.window is not None and other.window is not None:
            window = (min(self.window[0], other.window[0]), min(self.window[1], other.window[1]))
        chunk = self.chunk if other.chunk is None else other.chunk if self.chunk is None else min(self.chunk, other.chunk)
        return _Rule(self.causal or other.causal, window, chunk, self.documents or other.documents)


_NO_BOUND = 2**31 - 1  # the right bound of a window under the causal rule


def _read(function: Callable[..., Tensor]) -> _Rule | None:
    """The rule of a mask function, from the names and closures of the host's factories; None for any other function."""
    name = getattr(function, "__qualname__", "")
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return None
    if name == "causal_mask_function":
        return _Rule(True)
    if name == "bidirectional_mask_function":
        return _Rule(False)
    cells = dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True))
    match name.partition(".")[0]:
        case "and_masks":
            whole = _Rule(False)
            for part in cells["mask_functions"]:
                rule = _read(part)
                if rule is None:
                    return None
                whole = whole.also(rule)
            return whole
        case "sliding_window_overlay":
            return _Rule(False, (cells["sliding_window"] - 1, _NO_BOUND))
        case "sliding_window_bidirectional_overlay":
            return _Rule(False, (cells["sliding_window"], cells["sliding_window"]))
        case "chunked_overlay":
            return _Rule(False, chunk=cells["chunk_size"])
        case "packed_sequence_mask_function":
            return _Rule(False, documents=True)
        case "remap_positions_for_packed_sequence":  # positions inside a document, at a constant offset from row positions
            return _read(cells["mask_function"])
    return None


def _infer(
    function: Callable[..., Tensor], local_size: int | None, causal_skip: bool, bidirectional_skip: bool, config: Any
) -> _Rule | None:
    """`_read` while Dynamo traces and closures are hidden: uses the flags by which the host's own mask functions declare a
    plain rule."""
    name = function.__name__
    if name in ("causal_mask_function", "bidirectional_mask_function"):
        return _Rule(name == "causal_mask_function")
    if name != "and_mask":
        return None
    if bidirectional_skip:
        return None if local_size is None else _Rule(False, (local_size, local_size))
    documents = not causal_skip
    if local_size is None:
        return _Rule(True, documents=True) if documents else None
    if local_size == getattr(config, "attention_chunk_size", None):  # the config attribute tells a chunk from a window
        return None if local_size == getattr(config, "sliding_window", None) else _Rule(True, None, local_size, documents)
    return _Rule(True, (local_size - 1, _NO_BOUND), None, documents)


def visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **others: Any,
) -> VisibleKeys | Tensor:
    """The mask function that `register` gives to `transformers.AttentionMaskInterface`; arguments are the host's.

    Returns:
        VisibleKeys for causal and bidirectional rules, windows, padding, documents found from position_ids, and chunks that
        begin with the pass. Otherwise a dense bool mask `[B, 1, L, S]` from the host's `sdpa_mask`: for masks combined with the
        caller's own functions, blocks of images, chunks that continue a cache or have holes in their padding, and calls in
        which the host requires a mask.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask
    from transformers.utils.import_utils import is_tracing

    if isinstance(attention_mask, VisibleKeys):  # generate() made it before the forward pass
        return attention_mask
    mask_function = causal_mask_function if mask_function is None else mask_function
    tracing = is_tracing(attention_mask)

    def dense() -> Any:
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )

    if use_vmap or (attention_mask is not None and attention_mask.ndim != 2):
        return dense()
    if torch.compiler.is_compiling():
        rule = _infer(mask_function, local_size, allow_is_causal_skip, allow_is_bidirectional_skip, config)
    else:
        rule = _read(mask_function)
    asked_for = not (allow_is_causal_skip or allow_is_bidirectional_skip)  # except for documents, the host requires a mask
    if rule is None or (asked_for and not rule.documents):
        return dense()
    if isinstance(q_offset, Tensor):  # from a static cache
        if tracing or is_tracing(q_offset):
            return dense()
        q_offset = int(q_offset)

    first = q_offset - kv_offset  # the first query's position among the keys
    placed = _place(rule, first, q_length, kv_length)
    if placed is None:
        return dense()
    lower_right, used_keys = placed
    padding = _padding(attention_mask, kv_offset, kv_length if used_keys is None else used_keys, tracing)
    chunked = rule.chunk is not None and kv_offset + kv_length > rule.chunk
    starts = None
    if rule.documents or chunked:
        alone = first == kv_offset == 0 and q_length == kv_length > 0 and not (rule.documents and attention_mask is not None)
        if not alone or (tracing and chunked) or (padding is not None and not _in_one_run(padding)):
            return dense()
        if not tracing:
            starts = _starts(mask_function, batch_size, q_length, device)
            if padding is not None:  # a run of padding is a separate document
                starts[:, 1:] |= padding[:, 0, 0].diff()
                padding = None
    sizes = batch_size, q_length, kv_length
    fields = lower_right, used_keys, padding, starts, chunked, rule.documents, dense
    visible = VisibleKeys(sizes, rule.causal, rule.window, *fields)
    if starts is not None:
        visible.cu_seqlens()  # now: generate() makes masks before a compiled forward pass, which cannot read the lengths
    return visible


def _place(rule: _Rule, first: int, queries: int, keys: int) -> tuple[bool, int | None] | None:
    """(lower_right, used_keys) of VisibleKeys for queries that begin at position `first` of the keys; None if no alignment of
    `attention` gives these positions."""
    end = first + queries
    if rule.causal and 0 <= first and end <= keys:
        return first > 0, None if end == keys else end
    if first == 0 or (not rule.causal and rule.window is None):
        return False, None
    return (True, None) if end == keys else None


def _padding(attention_mask: Tensor | None, first: int, keys: int, tracing: bool) -> Tensor | None:
    """The padding of the keys from `first` on, bool `[B, 1, 1, keys]`. Keys past the end of `attention_mask` are hidden."""
    if attention_mask is None:
        return None
    padding = attention_mask[:, first : first + keys].to(torch.bool)
    if padding.shape[1] < keys:
        padding = torch.nn.functional.pad(padding, (0, keys - padding.shape[1]))
    if not tracing and bool(padding.all()):
        return None
    return padding[:, None, None, :]


def _in_one_run(padding: Tensor) -> bool:
    """Whether the keys that take part are contiguous in every row."""
    rows = padding[:, 0, 0]
    begins = (rows[:, 1:] & ~rows[:, :-1]).sum(1) + rows[:, 0]
    return bool((begins <= 1).all())


def _starts(mask_function: Callable[..., Tensor], batch: int, length: int, device: torch.device | str) -> Tensor:
    """bool `[B, L]`: True where a token does not see the previous token. Documents and chunks are runs of tokens, so these are
    their starts."""
    rows, head = torch.arange(batch, device=device)[:, None], torch.zeros(1, 1, dtype=torch.long, device=device)
    tokens = torch.arange(1, length, device=device)[None]
    together = mask_function(rows, head, tokens, tokens - 1).expand(batch, length - 1)
    return torch.cat([together.new_ones(batch, 1), ~together], 1)
