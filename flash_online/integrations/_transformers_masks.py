"""The mask function of the transformers integration: masks as rules, padding and spans, in memory linear in the lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._span_arguments import spans_of_key_mask
from ._transformers_rules import Rule, infer, interval, read, runs, starts_of

_LONG_SEQUENCE = 2048  # tokens from which spans of padding were seen to be faster than its mask


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
        query_spans: int32 `[B or 1, 1, L, 2]`, an argument of `attention` that holds all but the padding, or None.
        padding_spans: int32 `[B, 1, L, 2]`, query_spans that say what `padding` says, where these are faster, or None.
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
        query_spans: Tensor | None,
    ) -> None:
        self.batch, self.queries, self.keys = sizes
        self.causal, self.window, self.lower_right, self.used_keys = causal, window, lower_right, used_keys
        self.padding, self.starts, self.chunked, self.query_spans = padding, starts, chunked, query_spans
        self.padding_spans: Tensor | None = None
        self.packed: tuple[Tensor, int] | None = None
        self._made_spans: dict[str, Tensor] | None = None
        self.is_plain = window is used_keys is starts is query_spans is None

    def cu_seqlens(self) -> tuple[Tensor, int]:
        """int32 `[documents + 1]`, the first row of each document among the B L tokens, and the longest document's length.
        Syncs once per forward pass."""
        if self.packed is None:
            assert self.starts is not None
            begins = self.starts.flatten().nonzero().flatten()
            bounds = torch.cat([begins, begins.new_tensor([self.starts.numel()])]).to(torch.int32)
            self.packed = bounds, int(bounds.diff().max())
        return self.packed

    def spans(self) -> dict[str, Tensor]:
        """The arguments `query_spans` and `key_spans` of `attention` that hold the whole mask; none of them where the rule and
        the padding do. Made once for all layers, except in a trace, which would depend on whether they had been made."""
        if self.starts is self.query_spans is None:
            return {}
        if torch.compiler.is_compiling():
            return self._make_spans()
        if self._made_spans is None:
            self._made_spans = self._make_spans()
        return self._made_spans

    def _make_spans(self) -> dict[str, Tensor]:
        found = {"query_spans": self._spans_of_runs() if self.query_spans is None else self.query_spans}
        if self.padding is not None:
            found["key_spans"] = spans_of_key_mask(self.padding, self.padding.shape[-1])
        return found

    def _spans_of_runs(self) -> Tensor:
        assert self.starts is not None
        tokens = torch.arange(self.queries, device=self.starts.device)
        first, past = runs(self.starts)
        if self.causal:
            past = tokens + 1
        if self.window is not None:
            first, past = first.maximum(tokens - self.window[0]), past.minimum(tokens + self.window[1] + 1)
        return _as_spans(first, past, self.keys)

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
        return sum(tensor.numel() for tensor in (self.padding, self.starts, self.query_spans) if tensor is not None)

    def to(self, *arguments: Any, **options: Any) -> VisibleKeys:
        """Tensor.to for another device; the dtype does not change."""
        tensors = (self.padding, self.starts, self.query_spans)
        held = next((tensor for tensor in tensors if tensor is not None), None)
        if held is None:
            return self
        device = held.new_empty(0).to(*arguments, **options).device  # a dtype among the arguments would round the spans
        if device == held.device:
            return self
        padding, starts, spans = (None if tensor is None else tensor.to(device) for tensor in tensors)
        sizes = self.batch, self.queries, self.keys
        rule = self.causal, self.window, self.lower_right, self.used_keys
        moved = VisibleKeys(sizes, *rule, padding, starts, self.chunked, spans)
        moved.padding_spans = None if self.padding_spans is None else self.padding_spans.to(device)
        if self.packed is not None:
            moved.packed = self.packed[0].to(device), self.packed[1]
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


def _as_spans(first: Tensor, past: Tensor, keys: int) -> Tensor:
    """Query spans int32 `[B or 1, 1, L, 2]` of the intervals [first, past) of `keys` keys."""
    bounds = torch.stack(torch.broadcast_tensors(first, past), -1).clamp(0, keys).to(torch.int32)
    return bounds.reshape(-1, 1, first.shape[-1], 2)


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
        VisibleKeys for causal and bidirectional rules, windows, padding, documents found from position_ids, chunks, and blocks
        of tokens that see each other (images). Otherwise a dense bool mask `[B, 1, L, S]` from the host's `sdpa_mask`: for
        masks combined with the caller's own functions, blocks in several parts, blocks and caches that are traced, one query
        with chunks, and calls in which the host requires a mask.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask
    from transformers.utils.import_utils import is_tracing

    if isinstance(attention_mask, VisibleKeys):  # generate() made it before the forward pass
        return attention_mask
    mask_function = causal_mask_function if mask_function is None else mask_function
    tracing = is_tracing(attention_mask) or is_tracing(q_offset)

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

    if attention_mask is not None and attention_mask.ndim != 2:
        return dense()
    if torch.compiler.is_compiling():
        skips = allow_is_causal_skip, allow_is_bidirectional_skip
        rule = None if use_vmap else infer(mask_function, local_size, *skips, config)
    else:
        rule = read(mask_function)
    asked_for = not (allow_is_causal_skip or allow_is_bidirectional_skip)  # except for documents, the host requires a mask
    if rule is not None and asked_for and not rule.documents:
        return dense()
    if isinstance(q_offset, Tensor):  # from a static cache
        if tracing:
            return dense()
        q_offset = int(q_offset)
    tokens = _Tokens(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    visible = None if rule is None else _by_rule(rule, mask_function, attention_mask, tokens, tracing)
    if visible is None and not tracing and q_length > 1:  # one query: its mask is one row, which kernels for few queries read
        visible = _by_spans(mask_function, attention_mask, tokens)
    return dense() if visible is None else visible


class _Tokens(NamedTuple):
    """The queries and keys of a forward pass; offsets are the positions of the first ones in the sequence."""

    batch: int
    queries: int
    keys: int
    q_offset: int
    kv_offset: int
    device: torch.device | str


def _by_rule(
    rule: Rule,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None,
    tokens: _Tokens,
    tracing: bool,
) -> VisibleKeys | None:
    """The mask as the causal rule, the window, the padding and the starts of runs; None where these cannot say it."""
    first = tokens.q_offset - tokens.kv_offset  # the first query's position among the keys
    placed = _place(rule, first, tokens.queries, tokens.keys)
    if placed is None:
        return None
    lower_right, used_keys = placed
    padding = _padding(attention_mask, tokens.kv_offset, tokens.keys if used_keys is None else used_keys, tracing)
    chunked = rule.chunk is not None and tokens.kv_offset + tokens.keys > rule.chunk
    starts = None
    if rule.documents or chunked:
        alone = first == tokens.kv_offset == 0 and tokens.queries == tokens.keys > 0
        alone = alone and not (rule.documents and attention_mask is not None)
        if not alone or (padding is not None and not tracing and not _in_one_run(padding)):
            return None
        starts = starts_of(mask_function, tokens.batch, tokens.queries, tokens.device)
        if padding is not None and not tracing:  # a run of padding is a separate document
            starts[:, 1:] |= padding[:, 0, 0].diff()
            padding = None
    sizes = tokens.batch, tokens.queries, tokens.keys
    placement = lower_right, used_keys, padding, starts, chunked, None
    visible = VisibleKeys(sizes, rule.causal, rule.window, *placement)
    if starts is not None and not tracing:
        visible.cu_seqlens()  # now: generate() makes masks before a compiled forward pass, which cannot read the lengths
    if visible.is_plain and padding is not None and not tracing and _prefers_spans(tokens) and _in_one_run(padding):
        begin, end = _run(padding)
        visible.padding_spans = torch.stack([begin, end], -1).to(torch.int32)[:, None].expand(-1, 1, tokens.queries, 2)
    return visible


def _prefers_spans(tokens: _Tokens) -> bool:
    """Whether spans of padding are faster than its mask, as on Hopper for whole sequences that are long (docs/masks.md)."""
    device = torch.device(tokens.device)
    if device.type != "cuda" or not tokens.queries == tokens.keys >= _LONG_SEQUENCE:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def _by_spans(mask_function: Callable[..., Tensor], attention_mask: Tensor | None, tokens: _Tokens) -> VisibleKeys | None:
    """The mask as one interval of keys per query; None where some query sees no interval."""
    seen = interval(mask_function, torch.arange(tokens.q_offset, tokens.q_offset + tokens.queries, device=tokens.device))
    if seen is None:
        return None
    first, past = (bound - tokens.kv_offset for bound in seen)
    padding = _padding(attention_mask, tokens.kv_offset, tokens.keys, tracing=False)
    if padding is not None and _in_one_run(padding):
        begin, end = _run(padding)
        first, past, padding = first.maximum(begin), past.minimum(end), None
    spans = _as_spans(first, past, tokens.keys)
    sizes = tokens.batch, tokens.queries, tokens.keys
    return VisibleKeys(sizes, False, None, False, None, padding, None, False, spans)


def _place(rule: Rule, first: int, queries: int, keys: int) -> tuple[bool, int | None] | None:
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


def _run(padding: Tensor) -> tuple[Tensor, Tensor]:
    """The first key that takes part and the end of its run, `[B, 1]` each, of padding `_in_one_run`."""
    rows = padding[:, 0, 0].to(torch.int64)
    begin = rows.argmax(1, keepdim=True)
    return begin, begin + rows.sum(1, keepdim=True)


def _in_one_run(padding: Tensor) -> bool:
    """Whether the keys that take part are contiguous in every row."""
    rows = padding[:, 0, 0]
    begins = (rows[:, 1:] & ~rows[:, :-1]).sum(1) + rows[:, 0]
    return bool((begins <= 1).all())
