"""The measured cells, in ten families, and their tensors."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..case import Case

FLOAT8 = torch.float8_e4m3fn
SHARED = "in the keys"  # MLA's values: the first columns of the keys
LOG_UNIFORM = "log-uniform"
KEY_SCALE, VALUE_SCALE = 0.75, 1.25  # of float8 caches
POSITIONS = 10000.0  # the base of the rotary embedding


@dataclass(frozen=True)
class Cell(Case):
    """A problem of attention over cached keys; `kind` describes the example. `sizes` and `options` form the label.

    Sizes: B, H, Hkv, S (capacity of a sequence in keys), L (queries, if not 1), E, Ev (if not E). Options: `page`, without
    which a cache is contiguous; `window` W (a query sees itself and the W - 1 keys before it); `sinks`; `cache`, the name of
    its dtype; `values` SHARED (the value cache is a view of the key cache); `append` rows, with rotary embedding; `num_splits`;
    `prefix` keys, with pages shared by all sequences; `mask`, a bool mask [B, 1, 1, S]; `lengths`, how `lengths` were drawn.
    Caches are full unless `lengths` gives the number of keys of each sequence.

    `wanted_us` is the most that a call should take on an H200; `known_us` is the time of the fastest peer there in an earlier
    measurement, including a peer that can't run with ours today.
    """

    kind: str = ""
    lengths: tuple[int, ...] = ()
    wanted_us: float | None = None
    known_us: float | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.sizes["H"] // self.sizes["Hkv"]

    @property
    def queries(self) -> int:
        return self.sizes.get("L", 1)

    @property
    def keys(self) -> list[int]:
        """Number of keys of each sequence, appended keys included."""
        return list(self.lengths) or [self.sizes["S"]] * self.sizes["B"]

    @property
    def head_dim_v(self) -> int:
        return self.sizes.get("Ev", self.sizes["E"])

    @property
    def cache_dtype(self) -> torch.dtype:
        return getattr(torch, self.options["cache"]) if "cache" in self.options else self.dtype

    def visible(self, keys: int) -> list[int]:
        """Number of its sequence's keys that each query sees."""
        window = self.options.get("window", keys)
        return [max(0, min(keys - self.queries + 1 + n, window)) for n in range(self.queries)]

    def bytes_read(self) -> int:
        """Bytes of visible keys and values, each once; values that are views of the keys are not counted again."""
        window = self.options.get("window")
        rows = sum(keys if window is None else min(keys, window + self.queries - 1) for keys in self.keys)
        rows -= (len(self.keys) - 1) * self.options.get("prefix", 0)
        width = self.sizes["E"] + (0 if self.options.get("values") == SHARED else self.head_dim_v)
        return rows * self.sizes["Hkv"] * width * self.cache_dtype.itemsize

    def flops(self) -> int:
        """Floating-point operations of the two matrix products, over visible pairs of query and key."""
        pairs = sum(sum(self.visible(keys)) for keys in self.keys)
        return 2 * self.sizes["H"] * pairs * (self.sizes["E"] + self.head_dim_v)


@dataclass(frozen=True)
class Tensors:
    """One set of a cell's tensors: query [B, H, L, E], caches [B, Hkv, S, E] or pools [blocks, Hkv, page, E], and new rows
    [B, Hkv, new, E] if the cell appends."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    key: Tensor | None = None
    value: Tensor | None = None


class Problem:
    """A cell's tensors, the same numbers in every run: `sets`, enough to hold `distinct_bytes` of keys and values, so that a
    call finds none of its keys in the L2 cache; and shared tensors: `lengths` int32 [B], keys before the append; `table` int32
    [B, entries] in random order; `mask` [B, 1, 1, S]; `sinks` [H]; `rotary` (cos, sin); `scales` float32 [B, Hkv], of keys and
    of values.

    A pool's memory has the order [blocks, page, Hkv, E], as in serving engines; a contiguous cache is [B, Hkv, S, E].
    """

    def __init__(self, cell: Cell, device: str, distinct_bytes: int = 0):
        self.cell, self.device, self.options = cell, device, dict(cell.options)
        self._generator = torch.Generator(device).manual_seed(0)
        sizes, append = cell.sizes, cell.options.get("append", 0)
        self.lengths = torch.tensor([n - append for n in cell.keys], dtype=torch.int32, device=device)
        self.table, self.blocks = self._make_table() if "page" in self.options else (None, sizes["B"])
        shape = (sizes["B"], 1, 1, sizes["S"])
        self.mask = torch.ones(shape, dtype=torch.bool, device=device) if cell.options.get("mask") else None
        self.sinks = self._normal(sizes["H"]).float() if self.options.get("sinks") else None
        self.rotary = self._make_rotary() if append else None
        self.scales = None
        if cell.cache_dtype == FLOAT8:
            shape = (sizes["B"], sizes["Hkv"])
            self.scales = tuple(torch.full(shape, scale, device=device) for scale in (KEY_SCALE, VALUE_SCALE))
        count = max(1, math.ceil(distinct_bytes / max(1, cell.bytes_read())))
        self.sets = [self._make_set() for _ in range(count)]

    def _normal(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.cell.dtype, device=self.device).normal_(generator=self._generator)

    def _make_table(self) -> tuple[Tensor, int]:
        """The table, with entries 0 after a sequence's last page, and the number of blocks."""
        page = self.options["page"]
        shared = self.options.get("prefix", 0) // page
        counts = [shared, *(math.ceil(n / page) - shared for n in self.cell.keys)]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).int()
        table = torch.zeros(len(counts) - 1, math.ceil(self.cell.sizes["S"] / page), dtype=torch.int32)
        first, *others = order.split(counts)
        for row, own in zip(table, others, strict=True):
            row[: shared + len(own)] = torch.cat([first, own])
        return table.to(self.device), sum(counts)

    def _make_rotary(self) -> tuple[Tensor, Tensor]:
        width = self.cell.sizes["E"] // 2
        frequencies = POSITIONS ** -(torch.arange(width, device=self.device) / width)
        angles = torch.arange(self.cell.sizes["S"], device=self.device)[:, None] * frequencies
        return angles.cos().to(self.cell.dtype), angles.sin().to(self.cell.dtype)

    def _make_set(self) -> Tensors:
        cell, sizes, page = self.cell, self.cell.sizes, self.options.get("page")

        def cache(width: int) -> Tensor:
            heads, rows = sizes["Hkv"], page or sizes["S"]
            shape = (self.blocks, rows, heads, width) if page else (self.blocks, heads, rows, width)
            made = self._normal(*shape).to(cell.cache_dtype)
            return made.transpose(1, 2) if page else made

        query, keys = self._normal(sizes["B"], sizes["H"], cell.queries, sizes["E"]), cache(sizes["E"])
        values = keys[..., : cell.head_dim_v] if self.options.get("values") == SHARED else cache(cell.head_dim_v)
        if not (append := self.options.get("append")):
            return Tensors(query, keys, values)
        new = [self._normal(sizes["B"], sizes["Hkv"], append, width) for width in (sizes["E"], cell.head_dim_v)]
        return Tensors(query, keys, values, *new)

    # --- The same problem in another form ------------------------------------------------------------------------------------

    def without(self, *names: str) -> Problem:
        """The same tensors without these options. Without `append`, appended rows are part of the cache."""
        other = copy.copy(self)
        other.options = {name: value for name, value in self.options.items() if name not in names}
        if "append" in names:
            other.rotary, other.lengths = None, self.lengths + self.options.get("append", 0)
            other.sets = [replace(one, key=None, value=None) for one in self.sets]
        return other

    def widened(self) -> Problem:
        """With float8 caches dequantised to the query's dtype, each number times its scale."""
        other = self.without("cache")
        other.scales = None

        def wide(cache: Tensor, scale: float) -> Tensor:
            return cache.to(self.cell.dtype).mul_(scale)

        other.sets = [
            replace(one, key_cache=wide(one.key_cache, KEY_SCALE), value_cache=wide(one.value_cache, VALUE_SCALE))
            for one in self.sets
        ]
        return other

    def gathered(self) -> Problem:
        """With pages copied into contiguous caches."""
        other = self.without("page")
        other.table, rows = None, slice(0, self.cell.sizes["S"])

        def contiguous(pool: Tensor) -> Tensor:
            return pool[self.table.long()].transpose(1, 2).flatten(2, 3)[:, :, rows].contiguous()

        other.sets = [
            replace(one, key_cache=contiguous(one.key_cache), value_cache=contiguous(one.value_cache)) for one in self.sets
        ]
        return other

    # --- What is checked: the query heads of the first and the last key head, in three sequences of the first set ------------

    def pieces(self) -> list[tuple[int, int]]:
        """(sequence, key head): of the longest sequence, the first and the last."""
        keys, heads = self.cell.keys, self.cell.sizes["Hkv"]
        sequences = dict.fromkeys([keys.index(max(keys)), 0, len(keys) - 1])
        return [(n, head) for n in sequences for head in dict.fromkeys([0, heads - 1])]

    def part(self, out: Tensor, piece: tuple[int, int]) -> Tensor:
        """A checked piece of [B, H, L, Ev], as [1, group, L, Ev]."""
        (n, head), group = piece, self.cell.group_size
        return out[n : n + 1, head * group : (head + 1) * group]

    def keys_of(self, cache: Tensor, piece: tuple[int, int]) -> Tensor:
        """The keys, or values, of a piece: a new contiguous cache [1, 1, S, E]."""
        n, head = piece
        if self.table is None:
            return cache[n : n + 1, head : head + 1].clone()
        return cache[self.table[n].long(), head].flatten(0, 1)[None, None, : self.cell.sizes["S"]].clone()


# --- The cells -------------------------------------------------------------------------------------------------------------


def _cell(family: str, kind: str, batch: int, heads: int, key_heads: int, length: int, head_dim: int = 128, **more) -> Cell:
    """L and Ev in `more` are sizes, `us` is (wanted, known from a peer), `drawn` the lengths; other entries are options."""
    sizes = {"B": batch, "H": heads, "Hkv": key_heads, "S": length, "E": head_dim}
    sizes |= {name: more.pop(name) for name in ("L", "Ev") if name in more}
    wanted, known = more.pop("us", (None, None))
    lengths = more.pop("drawn", ())
    return Cell(family, sizes, more, torch.bfloat16, kind, lengths, wanted, known)


def _plain() -> list[Cell]:
    def cell(*sizes: int, us: tuple, kind: str = "one query", **more) -> Cell:
        return _cell("plain", kind, *sizes, us=us, **more)

    return [
        cell(1, 32, 8, 4096, us=(9.5, 15)),
        cell(1, 32, 8, 8192, us=(13.5, 25)),
        cell(1, 32, 8, 32768, us=(37, 47)),
        cell(1, 32, 8, 131072, us=(130, 139)),
        cell(8, 32, 8, 8192, us=(68, 78)),
        cell(16, 32, 8, 8192, us=(131, 143)),
        cell(32, 32, 8, 8192, us=(250, 258)),
        cell(64, 64, 8, 8192, us=(490, 493)),
        cell(128, 32, 8, 2048, us=(252, 257)),
        cell(128, 32, 32, 2048, us=(950, 956)),
        cell(1, 128, 1, 32768, us=(12, 24), kind="128 heads on one"),
        cell(16, 64, 8, 16384, us=(250, 259), kind="4 queries", L=4),
    ]


def _paged() -> list[Cell]:
    def cell(*sizes: int, page: int, us: tuple) -> Cell:
        return _cell("paged", f"page {page}", *sizes, us=us, page=page)

    return [
        *(cell(1, 32, 8, 8192, page=page, us=(13.5, 25)) for page in (16, 64, 256)),
        cell(16, 32, 8, 8192, page=16, us=(131, 146)),
        cell(16, 32, 8, 8192, page=1, us=(140, None)),
        cell(64, 64, 8, 8192, page=16, us=(500, 547)),
        *(cell(64, 32, 8, 4096, page=page, us=(255, known)) for page, known in ((16, 278), (64, 277), (256, 273))),
    ]


def _options() -> list[Cell]:
    numbers, batch, least, most = random.Random(0), 64, 64, 32768
    drawn = tuple(round(math.exp(numbers.uniform(math.log(least), math.log(most)))) for _ in range(batch))
    return [
        _cell("options", "gpt-oss", 64, 64, 8, 8192, 64, window=128, sinks=True, page=16, us=(10, None)),
        _cell("options", "lengths", batch, 32, 8, most, lengths=LOG_UNIFORM, page=16, drawn=drawn),
        _cell("options", "head dim 64", 16, 32, 8, 4096, 64, page=16, us=(38, None)),
        _cell("options", "head dim 256", 8, 16, 8, 16384, 256, page=64, us=(256, None)),
        _cell("options", "head dims 192 and 128", 8, 16, 16, 8192, 192, Ev=128),
    ]


def _drop_in() -> list[Cell]:
    """Calls of torch's function, as a model makes them while it generates text: all keys of the cache count."""
    most = 16 << 30  # bytes of keys and values
    cells = [
        _cell("drop-in", f"E {head_dim}", batch, *heads, length, head_dim)
        for head_dim in (64, 128, 256)
        for heads in ((32, 8), (32, 32), (64, 8))
        for batch in (1, 8, 32)
        for length in (1024, 8192, 32768, 131072)
    ]
    cells = [cell for cell in cells if cell.bytes_read() <= most]
    masked = [replace(cell, kind="a mask", options={"mask": True}) for cell in cells if cell.sizes["E"] == 128]
    return cells + masked


def _others() -> dict[str, list[Cell]]:
    float8, prefill = {"cache": str(FLOAT8)[6:]}, {"L": 256}
    of_float8 = [
        _cell("float8", "one sequence", 1, 32, 4, length, **float8, us=us)
        for length, us in ((4096, (8, 46)), (16384, (10, 48)), (65536, (23, 58)))
    ]
    return {
        "prefill": [
            _cell("prefill", "in chunks, contiguous", 16, 32, 8, 8192, **prefill),
            _cell("prefill", "in chunks, paged", 16, 32, 8, 8192, page=16, **prefill),
        ],
        "append": [_cell("append", "one row", batch, 32, 8, 8192, page=16, append=1) for batch in (1, 64)],
        "prefix": [
            _cell("prefix", "one prompt", batch, 32, 8, prefix + 512, page=16, prefix=prefix)
            for batch, prefix in ((8, 1024), (64, 1024), (8, 8192), (64, 8192))
        ],
        "splits": [
            _cell("splits", "a number given", 32, 32, 8, 8192, num_splits=4),
            _cell("splits", "a number given", 1, 32, 8, 32768, num_splits=16),
        ],
        "float8": [*of_float8, _cell("float8", "many sequences", 64, 32, 8, 8192, **float8)],
        "MLA": [_cell("MLA", "16 heads", 64, 16, 1, 4096, 576, Ev=512, page=64, values=SHARED, us=(80, None))],
    }


CELLS = {"plain": _plain(), "drop-in": _drop_in(), "paged": _paged(), "options": _options()} | _others()


def _quick(family: str, kind: str, heads: int, key_heads: int, dtype: torch.dtype = torch.float32, **more) -> Cell:
    return replace(_cell(family, kind, 3, heads, key_heads, 80, more.pop("E", 32), **more), dtype=dtype)


# A check of the benchmark itself: seconds in total, on any device.
QUICK = [
    _quick("plain", "one query", 8, 2, us=(100000.0, 200000.0)),
    _quick("plain", "4 queries", 8, 2, L=4),
    _quick("drop-in", "E 32", 8, 2),
    _quick("drop-in", "a mask", 8, 2, mask=True),
    _quick("paged", "page 16", 8, 2, page=16),
    _quick("options", "gpt-oss", 8, 2, window=9, sinks=True, page=16),
    _quick("options", "lengths", 8, 2, lengths=LOG_UNIFORM, page=16, drawn=(80, 1, 33)),
    _quick("float8", "many sequences", 8, 2, torch.bfloat16, cache=str(FLOAT8)[6:]),
    _quick("MLA", "16 heads", 4, 1, E=40, Ev=32, page=16, values=SHARED),
    _quick("prefill", "in chunks, paged", 8, 2, page=16, L=20),
    _quick("append", "one row", 8, 2, page=16, append=1),
    _quick("prefix", "one prompt", 8, 2, page=16, prefix=32),
    _quick("splits", "a number given", 8, 2, num_splits=2),
]
