"""Checks the arguments of attention over cached keys, and converts them to the form that the operators take."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._canonicalize import autocasts
from ._checks import check_flag, check_floating, check_int, check_tensor, has_tangent, is_known
from ._ops import SIXTEEN_BITS, InvalidArgument, dense_strides_in_order
from ._plain import are_plain_numbers, is_compiling

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # dtypes that only caches have
CACHE_NAMES = ("key_cache", "value_cache")
MANY_KEYS = 1 << 31  # above the number of keys of any sequence


class Where(NamedTuple):
    """The location of each sequence's keys, as the operators take it: int32 tensors on the device, or None."""

    lengths: Tensor | None
    left: Tensor | None
    rows: Tensor | None
    table: Tensor | None

    @classmethod
    def of(cls, batch, like, key_cache, cache_seqlens, block_table, cache_batch_idx, leftpad) -> Where:
        """Checks the arguments of these names, which must be on the device of `like`."""
        if cache_seqlens is not None and not isinstance(cache_seqlens, Tensor):
            length = check_int("cache_seqlens", cache_seqlens, "an int, or an int32 tensor with a length per sequence")
            capacity = key_cache.shape[2] * (1 if block_table is None else block_table.shape[-1])
            if length > capacity:
                raise InvalidArgument(f"cache_seqlens: expected at most the capacity, {capacity}, got {length}")
            cache_seqlens = torch.full((batch,), max(length, 0), dtype=torch.int32, device=like.device)
        if block_table is not None:
            check_int32("block_table", block_table, like, 2)
            block_table = block_table if block_table.shape[1] <= 1 or block_table.stride(1) == 1 else block_table.contiguous()
        rows = key_cache.shape[0] if block_table is None else block_table.shape[0]
        if cache_batch_idx is None and rows != batch:
            name = "key_cache" if block_table is None else "block_table"
            raise InvalidArgument(f"{name}: expected {batch} rows, one per sequence without cache_batch_idx, got {rows}")
        numbers = {"cache_seqlens": cache_seqlens, "leftpad": leftpad, "cache_batch_idx": cache_batch_idx}
        for name, tensor in numbers.items():
            if tensor is not None:
                check_numbers(name, tensor, like, batch)
                numbers[name] = tensor.contiguous()
        return cls(*numbers.values(), block_table)


class Starts(NamedTuple):
    """The starts of packed rows, int32 [sequences + 1], or None if rows are not packed; `used` are the numbers of queries that
    take part, int32 [sequences], or None for all."""

    queries: Tensor | None
    used: Tensor | None
    new: Tensor | None


class Scales(NamedTuple):
    """The factors of cached keys and values, float32 [sequences, Hkv], or None."""

    key: Tensor | None
    value: Tensor | None


NO_SCALES = Scales(None, None)


class RotaryEmbedding(NamedTuple):
    """Rotary embedding as the operator takes it."""

    cosines: Tensor
    sines: Tensor
    interleaved: bool
    offsets: Tensor | None

    @classmethod
    def of(cls, rotary, like, batch) -> RotaryEmbedding | None:
        """Checks `rotary` against the dtype and device of `like`; `batch` is the number of offsets."""
        if rotary is None:
            return None
        if not isinstance(rotary, (tuple, list)) or not 2 <= len(rotary) <= 4:
            raise InvalidArgument(
                "rotary: expected a tuple (cos, sin[, interleaved[, offsets]]), got "
                f"{f'{len(rotary)} entries' if isinstance(rotary, (tuple, list)) else type(rotary).__name__}"
            )
        cosines, sines, interleaved, offsets = (*rotary, *(False, None)[len(rotary) - 2 :])
        check_tensor("rotary[0]", cosines), check_tensor("rotary[1]", sines), check_flag("rotary[2]", interleaved)
        check_no_gradient({"rotary[0]": cosines, "rotary[1]": sines})
        cosines, sines = (
            table.float() if table.dtype != like.dtype and autocasts(table) else table for table in (cosines, sines)
        )
        for n, table in enumerate((cosines, sines)):
            fits = table.dim() == 2 and table.shape == cosines.shape and table.dtype == cosines.dtype
            if not (fits and table.dtype in (torch.float32, like.dtype) and table.device == like.device):
                raise InvalidArgument(
                    f"rotary[{n}]: expected cos and sin of one shape [positions, width / 2], float32 or {like.dtype}, on "
                    f"{like.device}, got {list(table.shape)} {table.dtype} on {table.device}"
                )
        if 2 * cosines.shape[1] > like.shape[-1] or cosines.shape[0] == 0:
            raise InvalidArgument(
                f"rotary[0]: expected one position or more, at most {like.shape[-1]} / 2 pairs, got {list(cosines.shape)}"
            )
        if offsets is not None:
            check_numbers("rotary[3]", offsets, like, batch)
            offsets = offsets.contiguous()
        return cls(cosines.contiguous(), sines.contiguous(), interleaved, offsets)


def is_plain_place(lengths: Tensor | None, table: Tensor | None, like: Tensor, batch: int, rows: int) -> bool:
    """Returns whether the operators take the lengths of `batch` sequences, or None, and their table or a cache of `rows` rows,
    unchanged."""
    if lengths is not None and not (are_plain_numbers(lengths, like, 1) and lengths.shape[0] == batch):
        return False
    return rows == batch if table is None else are_plain_numbers(table, like, 2) and table.shape[0] == batch


def check_no_gradient(*groups: dict, function: str = "attention over cached keys") -> None:
    """Raises if one of these tensors, which may be None, would lose a derivative. `function`: what has none."""
    grads, tangents = torch.is_grad_enabled(), forward_ad._current_level >= 0 and not is_compiling()
    if not grads and not tangents:
        return
    for group in groups:
        for name, tensor in group.items():
            if tensor is None:
                continue
            if grads and tensor.requires_grad:
                raise InvalidArgument(
                    f"{name}: expected a tensor without a gradient, got requires_grad=True: {function} has no gradient; "
                    "call it under torch.no_grad()"
                )
            if tangents and has_tangent(tensor):  # compiled code rejects them itself
                raise InvalidArgument(
                    f"{name}: expected a tensor without a tangent, got one of forward-mode AD, which {function} does not "
                    "support"
                )


def check_writable(name: str, tensor: Tensor) -> None:
    """Raises unless this tensor can hold rows that are written to it."""
    if not is_compiling() and tensor.is_neg():
        raise InvalidArgument(f"{name}: expected a tensor that can be written to, got a view that negates its elements")
    strides = tensor.stride()
    if 0 in strides and tensor.numel() and any(step == 0 and n > 1 for step, n in zip(strides, tensor.shape, strict=True)):
        raise InvalidArgument(
            f"{name}: expected separate memory for each element, got strides {list(strides)} with sizes {list(tensor.shape)}: "
            "in an expanded tensor one written row overwrites another"
        )


def note_write(*tensors: Tensor) -> None:
    """Tells autograd that one of our operators wrote to these tensors, so that a backward pass that had saved one of them
    raises. Compiled code does so itself, and no backward pass saves tensors made in inference mode."""
    if is_compiling():
        return
    try:
        _increment_version(tensors)
    except RuntimeError:
        _increment_version([tensor for tensor in tensors if not tensor.is_inference()])


_increment_version = torch._C._increment_version


def autocast_cached(key_cache: Tensor, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Casts queries and new keys under torch.autocast: to the cache's dtype, or to autocast's if the cache is float8. A cache
    keeps its dtype."""
    if not is_compiling() and not torch._C._is_any_autocast_enabled():
        return tensors

    def cast(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not autocasts(tensor):
            return tensor
        float8 = key_cache.dtype in FLOAT8
        dtype = torch.get_autocast_dtype(tensor.device.type) if float8 else key_cache.dtype
        return tensor.to(dtype) if dtype in _CAST_TO else tensor

    return tuple(map(cast, tensors))


_CAST_TO = (torch.float16, torch.bfloat16, torch.float32)


def check_int32(name: str, tensor, like: Tensor, rank: int) -> None:
    check_tensor(name, tensor)
    if tensor.dim() != rank or tensor.dtype != torch.int32 or tensor.device != like.device:
        raise InvalidArgument(
            f"{name}: expected int32 of {rank} dimensions on {like.device}, got {list(tensor.shape)} {tensor.dtype} on "
            f"{tensor.device}"
        )


def check_numbers(name: str, tensor, like: Tensor, count: int) -> None:
    """Raises unless there is one int32 per sequence."""
    check_int32(name, tensor, like, 1)
    if tensor.shape[0] != count:
        raise InvalidArgument(f"{name}: expected {count} entries, one per sequence, got {tensor.shape[0]}")


def check_starts(name: str, starts, like: Tensor, batch: int | None = None) -> int:
    """Checks the starts of packed sequences, `batch` of them if given; returns the number of sequences."""
    check_int32(name, starts, like, 1)
    if starts.shape[0] == 0 or not starts.is_contiguous():
        raise InvalidArgument(f"{name}: expected contiguous [sequences + 1], got {list(starts.shape)}")
    if batch is not None and starts.shape[0] != batch + 1:
        raise InvalidArgument(f"{name}: expected {batch + 1} starts, got {starts.shape[0]}")
    return starts.shape[0] - 1


def check_pool(key_cache: Tensor, value_cache: Tensor, like: Tensor, like_name: str, names=CACHE_NAMES) -> None:
    check_floating(like_name, like.dtype)
    if key_cache.dim() != 4 or value_cache.dim() != 4 or key_cache.shape[:3] != value_cache.shape[:3]:
        raise InvalidArgument(
            f"{', '.join(names)}: expected four dimensions, equal except for the last, got {list(key_cache.shape)} and "
            f"{list(value_cache.shape)}"
        )
    for name, cache in zip(names, (key_cache, value_cache), strict=True):
        float8 = cache.dtype in FLOAT8 and like.dtype in SIXTEEN_BITS
        if cache.dtype != key_cache.dtype or not (cache.dtype == like.dtype or float8):
            raise InvalidArgument(
                f"{name}: expected one dtype for both, {like_name}'s {like.dtype} or float8 with 16 bits, got {cache.dtype}"
            )
        if cache.device != like.device:
            raise InvalidArgument(f"{name}: expected {like_name}'s device {like.device}, got {cache.device}")


def check_query(query: Tensor, key_cache: Tensor, starts: Tensor | None, key_name: str = "key_cache") -> None:
    if query.dim() != (4 if starts is None else 3):
        raise InvalidArgument(f"query: expected 4 dimensions, or 3 with cu_seqlens_q, got {query.dim()}")
    if query.shape[-1] != key_cache.shape[-1]:
        raise InvalidArgument(f"query: expected {key_name}'s width {key_cache.shape[-1]}, got {query.shape[-1]}")
    heads, key_heads = query.shape[1], key_cache.shape[1]
    if key_heads != heads and (key_heads == 0 or heads % key_heads):
        hint = "; of [rows, length, heads, width] take transpose(1, 2)" if key_name == "key_cache" else ""
        raise InvalidArgument(f"{key_name}: expected heads (dimension 1) that divide query's {heads}, got {key_heads}{hint}")


def check_call(query: Tensor, key_cache: Tensor, value_cache: Tensor, starts: Tensor | None, names) -> int:
    """Checks a query, packed if `starts` are given, and its caches, which errors call `names`; returns the number of
    sequences."""
    check_pool(key_cache, value_cache, query, "query", names)
    check_query(query, key_cache, starts, names[0])
    return query.shape[0] if starts is None else check_starts("cu_seqlens_q", starts, query)


def check_new(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, like: Tensor, batch: int | None) -> None:
    """Checks new keys and values: of `batch` sequences, or packed if it is None."""
    rank = 3 if batch is None else 4
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        shape, heads, width = rows.shape, cache.shape[1], cache.shape[-1]
        if len(shape) != rank or shape[1] != heads or shape[-1] != width or batch not in (None, shape[0]):
            packed = f"[rows, {heads}, {width}]"
            wanted = packed if batch is None else f"[{batch}, {heads}, new, {width}], or {packed} with cu_seqlens_new"
            raise InvalidArgument(f"{name}: expected {wanted}, got {list(shape)}")
        if shape != key.shape and shape[:-1] != key.shape[:-1]:
            raise InvalidArgument(f"{name}: expected as many rows as key {list(key.shape)}, got {list(shape)}")
        if rows.dtype != like.dtype or rows.device != like.device:
            raise InvalidArgument(f"{name}: expected {like.dtype} on {like.device}, got {rows.dtype} on {rows.device}")


def check_slots(slots, key: Tensor) -> None:
    check_tensor("slots", slots)
    if slots.dim() != 1 or slots.dtype != torch.int64 or slots.device != key.device:
        raise InvalidArgument(
            f"slots: expected int64 [T] on {key.device}, got {list(slots.shape)} {slots.dtype} on {slots.device}"
        )
    if slots.shape[0] != key.shape[0]:
        raise InvalidArgument(f"slots: expected {key.shape[0]}, one per row of key, got {slots.shape[0]}")


def expand_scales(key_scale, value_scale, batch: int, key_cache: Tensor) -> Scales:
    """The scales, expanded to [batch, Hkv]."""
    if key_scale is value_scale is None:
        return NO_SCALES
    shape = (batch, key_cache.shape[1])
    named = (("key_scale", key_scale), ("value_scale", value_scale))
    return Scales(*(None if scale is None else expand_scale(name, scale, shape, key_cache.device) for name, scale in named))


def expand_scale(name: str, scale: Tensor, shape, device: torch.device) -> Tensor:
    """A float32 scale on this device, expanded to a shape."""
    if scale.dtype != torch.float32 or scale.device != device:
        raise InvalidArgument(f"{name}: expected float32 on {device}, got {scale.dtype} on {scale.device}")
    try:
        return scale.expand(shape)
    except RuntimeError:
        raise InvalidArgument(f"{name}: expected what broadcasts to {list(shape)}, got {list(scale.shape)}") from None


def check_splits(num_splits) -> int:
    splits = 0 if num_splits is None else check_int("num_splits", num_splits)
    if splits < 0:
        raise InvalidArgument(f"num_splits: expected None or an int >= 0, got {splits}")
    return MANY_KEYS if is_known(splits > MANY_KEYS) else splits


def check_out(out: Tensor, query: Tensor, width: int) -> None:
    """Raises unless results can be written into `out` while a kernel reads query."""
    shape = (*query.shape[:-1], width)
    if tuple(out.shape) != shape or out.dtype != query.dtype or out.device != query.device:
        raise InvalidArgument(
            f"out: expected {list(shape)} {query.dtype} on {query.device}, got {list(out.shape)} {out.dtype} on {out.device}"
        )
    if 0 in out.stride() or not is_compiling() and out.is_neg():
        check_writable("out", out)
    if not is_compiling() and torch._C._is_alias_of(out, query) and _overlap(out, query):
        raise InvalidArgument("out: expected separate memory, got query's memory")


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Returns whether two dense views of one storage share an element. As in torch, False for other views, which may lie
    between each other's rows without sharing one."""
    spans = []
    for tensor in (one, other):
        shown = tensor.squeeze()
        if not tensor.numel() or list(shown.stride()) != dense_strides_in_order(shown.shape, shown.stride()):
            return False
        spans.append((tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()))
    (begin, length), (other_begin, other_length) = spans
    return begin < other_begin + other_length and other_begin < begin + length
