"""`checked()`: inside it the host reads and checks values that otherwise only the device reads.

Off by default, so that no call waits for the device. Without checks, invalid starts, lengths, tables and targets cause no
invalid memory access, but wrong results. Callers test `_checked.active`, and that nothing is being compiled, before they call a
check. A check does nothing if there are no values to read: for tensors on meta, fake tensors and tensors of torch.vmap, in
torch.jit.trace and make_fx, and while a CUDA graph is captured. Each raises InvalidArgument with the argument's name.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from ._ops import InvalidArgument, OutOfRange

_depth = 0 if os.environ.get("FLASH_ONLINE_CHECKED", "0") in ("", "0") else 1
_lock = threading.Lock()
active = _depth > 0
"""True if calls are checked. A module attribute, so that the test costs a call one lookup."""


@contextmanager
def checked() -> Iterator[None]:
    """Inside the block the host checks values that otherwise only the device reads; an error names the invalid argument.

    It checks the starts of packed sequences (`cu_seqlens_*`: ascending from 0 to at most the number of rows, and no sequence
    longer than `max_seqlen_*`), `seqused_*`, lengths (`cache_seqlens`: 0 up to the capacity, new keys included), `leftpad`,
    `cache_batch_idx`, `slots` (rows of the pool, or -1 for a row that is skipped; no duplicates), the entries of `block_table`
    for a sequence's keys, positions beyond a rotary table, rows of the cache that two sequences would write, and the targets of
    the losses (on CUDA before the kernel's device assert). Padding rows after the last sequence are legal, unless the starts
    would also fit as lengths.

    Use it to find errors: each call waits for the device. Nothing is checked while a CUDA graph is captured, under
    torch.compile, or for tensors without data. It applies to all threads; blocks nest. The environment variable
    FLASH_ONLINE_CHECKED=1, read once on import, acts as a block around the whole program.
    """
    _change(1)
    try:
        yield
    finally:
        _change(-1)


def _change(by: int) -> None:
    global _depth, active
    with _lock:
        _depth += by
        active = _depth > 0


def _reading(check: Callable[..., None]) -> Callable[..., None]:
    """The check, hidden from torch's modes and transforms; it does nothing if values cannot be read."""

    @functools.wraps(check)
    def guarded(*args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        if any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS):
            return
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch(), torch.no_grad():
            check(*args, **kwargs)

    return guarded


_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "FUNCTIONAL", "PROXY"))


def _read(tensor: Tensor | None) -> Tensor | None:
    """The tensor's values on the CPU; None if they cannot be read now."""
    if type(tensor) not in (Tensor, Parameter):
        return None
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # under vmap it is many tensors
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return tensor.detach().cpu()


def _list(tensor: Tensor | None) -> list[int] | None:
    numbers = _read(tensor)
    return None if numbers is None else numbers.tolist()


def _shown(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:7]))}, ...]"


# --- packed sequences -------------------------------------------------------------------------------------------------------


def _lengths(name: str, starts: list[int], rows: int | None, longest: int | None = None, longest_name: str = "") -> list[int]:
    """The lengths of the sequences that begin at `starts`. Raises unless the starts ascend from 0 to at most `rows` (None:
    unknown), and no length exceeds `longest`. Padding rows may follow, unless the starts would fit as lengths: then the caller
    probably forgot the cumulative sum of ascending lengths."""
    lengths = [end - begin for begin, end in itertools.pairwise(starts)]
    disordered = starts[0] != 0 or any(length < 0 for length in lengths)
    are_lengths = sum(starts) == rows and (disordered or starts[-1] < rows and max(starts) == longest)
    if disordered or are_lengths or rows is not None and starts[-1] > rows:
        upto = "" if rows is None else f" up to the {rows} rows"
        may_be = are_lengths or disordered and min(starts) >= 0
        may_be = "; if these are lengths, their sums with a 0 before them are starts" if may_be else ""
        raise InvalidArgument(f"{name}: expected starts that ascend from 0{upto}, got {_shown(starts)}{may_be}")
    if longest is not None and lengths and max(lengths) > longest:
        raise InvalidArgument(
            f"{longest_name}: expected at least {max(lengths)}, the longest sequence of {name}, got {longest}"
        )
    return lengths


@_reading
def check_packed(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, queries: int, keys: int
) -> None:
    """Checks the starts of packed sequences with these total numbers of queries and keys."""
    sides = (("q", cu_seqlens_q, max_seqlen_q, queries), ("k", cu_seqlens_k, max_seqlen_k, keys))
    for side, tensor, longest, rows in sides:
        starts = _list(tensor)
        if starts is not None:
            _lengths(f"cu_seqlens_{side}", starts, rows, longest, f"max_seqlen_{side}")


@_reading
def check_used(name: str, used: Tensor | None, starts_name: str, starts: Tensor) -> None:
    """Checks the number of used rows of each packed sequence."""
    counts, begins = _list(used), _list(starts)
    if counts is not None and begins is not None:
        _in_range(name, counts, 0, _lengths(starts_name, begins, None), f"the sequence's rows in {starts_name}")


def _in_range(name: str, numbers: list[int], low: int, high: int | list[int], what: str) -> None:
    """Raises unless every number is from `low` up to `high`, which is `what`."""
    highs = high if isinstance(high, list) else [high] * len(numbers)
    for n, (number, most) in enumerate(zip(numbers, highs, strict=True)):
        if not low <= number <= most:
            raise InvalidArgument(f"{name}: expected {low} to {most}, {what}, got {number} for sequence {n}")


# --- cached keys ------------------------------------------------------------------------------------------------------------


@_reading
def check_pools(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, query: Tensor,
    table: Tensor, seqused_k: Tensor | None, key_pool: Tensor, window_left: int | None,
) -> None:  # fmt: skip
    """Checks varlen_attention's arguments over pages. The lengths of the keys are seqused_k, else the differences of
    cu_seqlens_k."""
    counts = _counts("cu_seqlens_q", query, cu_seqlens_q, table.shape[0], max_seqlen_q)
    keys, name = _list(seqused_k), "seqused_k"
    if seqused_k is None:
        starts, name = _list(cu_seqlens_k), "cu_seqlens_k"
        keys = None if starts is None else _lengths(name, starts, None)
    if keys is None or counts is None:
        return
    capacity = table.shape[1] * key_pool.shape[2]
    _in_range(name, keys, 0, capacity, "the capacity of block_table's row")
    if keys and max(keys) > max_seqlen_k:
        raise InvalidArgument(
            f"max_seqlen_k: expected at least {max(keys)}, the longest sequence of {name}, got {max_seqlen_k}"
        )
    begins = [0] * len(keys)
    if window_left is not None:
        begins = [max(0, length - count - window_left) for length, count in zip(keys, counts, strict=True)]
    _check_entries(table, range(len(keys)), begins, keys, key_pool)


def _check_entries(table: Tensor, rows, begins: list[int], ends: list[int], key_pool: Tensor) -> None:
    """Raises unless the table's entries for each sequence's keys from begin up to end are blocks of the pool."""
    numbers, page = _read(table), key_pool.shape[2]
    if numbers is None:
        return
    for n, (row, begin, end) in enumerate(zip(rows, begins, ends, strict=True)):
        if begin >= end:
            continue
        first = begin // page
        entries = numbers[row, first : -(-end // page)]
        wrong = ((entries < 0) | (entries >= key_pool.shape[0])).nonzero()
        if wrong.numel():
            at = int(wrong[0])
            raise InvalidArgument(
                f"block_table: expected blocks 0 to {key_pool.shape[0] - 1} for the {end} keys of sequence {n}, got "
                f"{int(entries[at])} in entry {first + at} of row {row}"
            )


@_reading
def check_cached(
    where, key_cache: Tensor, query: Tensor | None, key: Tensor | None, query_starts: Tensor | None, longest: int | None,
    new_starts: Tensor | None, embedding, advance: bool = True, window_left: int | None = None,
) -> None:  # fmt: skip
    """Checks the arguments of kvcache_attention, and of cache_append at the ends of sequences. Packed queries and packed new
    keys come with their starts. `where` is a Where, `embedding` a RotaryEmbedding; `advance`: query i is i positions after the
    first. With window_left, pages before every query's window are not checked."""
    lengths = _list(where.lengths)
    batch = _sequences(where, query, query_starts, key, new_starts)
    new = _counts("cu_seqlens_new", key, new_starts, batch)
    queries = _counts("cu_seqlens_q", query, query_starts, batch, longest)
    page, paged = key_cache.shape[2], where.table is not None
    capacity = page * where.table.shape[1] if paged else page
    if where.lengths is not None and lengths is None or queries is None or new is None:
        return
    lengths = [capacity] * batch if lengths is None else lengths
    _in_range("cache_seqlens", lengths, 0, capacity, f"the capacity of {'block_table' if paged else 'the cache'}'s row")
    for n, (length, more) in enumerate(zip(lengths, new, strict=True)):
        if length + more > capacity:
            raise InvalidArgument(
                f"cache_seqlens: expected at most {capacity - more}, which leaves room for {more} new keys, got {length} for "
                f"sequence {n}"
            )
    left = _list(where.left) or [0] * batch
    _in_range("leftpad", left, 0, capacity, "the capacity")
    rows = _list(where.rows)
    if rows is None:
        if where.rows is not None:
            return
        rows = list(range(batch))
    _in_range("cache_batch_idx", rows, 0, (where.table if paged else key_cache).shape[0] - 1, "a row of the cache or its table")
    old = [min(max(length, first), capacity) for length, first in zip(lengths, left, strict=True)]
    ends = [min(begin + more, capacity) for begin, more in zip(old, new, strict=True)]
    if paged:
        begins = left
        if window_left is not None and query is not None:
            seen = [end - count - window_left for end, count in zip(ends, queries, strict=True)]
            begins = [max(first, min(at, begin)) for first, at, begin in zip(left, seen, old, strict=True)]
        _check_entries(where.table, rows, begins, ends, key_cache)
    if key is not None:
        _check_written_once(where.table, rows, old, ends, page)
    if embedding is not None:
        steps = [max(more, count if advance else min(count, 1)) for more, count in zip(new, queries, strict=True)]
        _check_positions(embedding, old, steps)


def _sequences(where, query, query_starts, key, new_starts) -> int:
    """The number of sequences."""
    for starts in (query_starts, new_starts):
        if starts is not None:
            return starts.shape[0] - 1
    for rows in (where.lengths, query, key):
        if rows is not None:
            return rows.shape[0]
    return 0


def _counts(name: str, rows: Tensor | None, starts: Tensor | None, batch: int, longest: int | None = None):
    """The number of these rows in each sequence; None if the starts cannot be read."""
    if rows is None:
        return [0] * batch
    if starts is None:
        return [rows.shape[2]] * batch
    numbers = _list(starts)
    return None if numbers is None else _lengths(name, numbers, rows.shape[0], longest, "max_seqlen_q")


def _check_written_once(table: Tensor | None, rows: list[int], begins: list[int], ends: list[int], page: int) -> None:
    """Raises if two sequences would write their new keys to one row of the cache."""
    numbers, seen = _list(table), {}
    for n, (row, begin, end) in enumerate(zip(rows, begins, ends, strict=True)):
        for position in range(begin, end):
            place = (row, position) if numbers is None else (numbers[row][position // page], position % page)
            other = seen.setdefault(place, n)
            if other != n:
                name = "cache_batch_idx" if rows[other] == row else "block_table"
                raise InvalidArgument(
                    f"{name}: expected a separate row for each new key, got block {place[0]}, row {place[1]} for "
                    f"sequences {other} and {n}"
                )


def _check_positions(embedding, old: list[int], steps: list[int]) -> None:
    """Raises if rows are rotated by positions outside the table."""
    firsts = old if embedding.offsets is None else _list(embedding.offsets)
    for n, (first, count) in enumerate(zip(firsts or [], steps, strict=False)):
        last, most = first + count - 1, embedding.cosines.shape[0] - 1
        if count and not 0 <= first <= last <= most:
            raise InvalidArgument(
                f"rotary: expected positions 0 to {most}, as in its table, got {first} to {last} for sequence {n}"
            )


@_reading
def check_slots(slots: Tensor, key_cache: Tensor, embedding) -> None:
    """Checks cache_append's rows in the pool."""
    numbers = _list(slots)
    if numbers is None:
        return
    rows, seen = key_cache.shape[0] * key_cache.shape[2], {}
    for n, slot in enumerate(numbers):
        if not -1 <= slot < rows:
            raise InvalidArgument(f"slots: expected 0 to {rows - 1}, a row of the pool, or -1, got {slot} for row {n}")
        other = seen.setdefault(slot, n)
        if slot >= 0 and other != n:
            raise InvalidArgument(f"slots: expected a separate slot for each row, got {slot} for rows {other} and {n}")
    if embedding is not None:
        _check_positions(embedding, [], [int(slot >= 0) for slot in numbers])


# --- losses -----------------------------------------------------------------------------------------------------------------


@_reading
def check_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """Checks class indices; a floating target holds none."""
    if target.is_floating_point():
        return
    numbers = _read(target)
    if numbers is None:
        return
    wrong = ((numbers < 0) | (numbers >= classes)) & (numbers != ignore_index)
    if wrong.any():
        got = int(numbers[wrong].flatten()[0])
        raise OutOfRange(
            f"target: expected 0 to {classes - 1}, the classes, or ignore_index {ignore_index}, got {got}: "
            f"{int(wrong.sum())} of {numbers.numel()} are out of bounds"
        )
