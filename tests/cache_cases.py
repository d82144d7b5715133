"""Problems of attention over cached keys, drawn from a seed: a function with the signature of kvcache_attention or cache_append
runs on one, and its results and all memory around its tensors are compared with the oracle's."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, fields, replace

import torch
from oracle import to_device, whole_numbers

from flash_online import reference
from flash_online._reference_cache import FLOAT8, rotate
from flash_online.testing import LAYOUTS, assert_close_to_float64, lay_out, random_tensor

HUGE = 2**31 - 1


@dataclass
class Made:
    """The tensors of a problem on one device, and what they mean."""

    query: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]  # views of `buffers`
    cache_seqlens: torch.Tensor | int | None
    options: dict  # the keywords of kvcache_attention that are given
    buffers: list[torch.Tensor]  # one-dimensional: all memory that holds the caches
    old: list[int]  # keys of each sequence before the append, clamped
    ends: list[int]  # and after it
    first: list[int]  # the rotary position of each sequence's first new row
    appended: list[tuple[int, int, int, int]]  # sequence, new row, block, row of the block: what the append has to write

    def inputs(self) -> dict[str, torch.Tensor]:
        """All tensors that a call may only read."""
        named = {"query": self.query, "cache_seqlens": self.cache_seqlens, **self.options}
        named |= {f"rotary[{i}]": t for i, t in enumerate(named.pop("rotary", ()))}
        return {name: t for name, t in named.items() if isinstance(t, torch.Tensor) and name != "out"}


@dataclass
class CachedProblem:
    """A problem of kvcache_attention that is small enough to print: its repr() is all that is needed to reproduce a failure.

    All memory that no query may see is NaN: rows outside of leftpad, length and window, the rest of every page, pages of no
    sequence, the gaps between rows, padding rows. Table entries that no sequence needs are -1, huge, or another's page.
    """

    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # float8; None is dtype
    heads: tuple = (4, 2)  # of query; of key and value
    head_dims: tuple = (8, 8)  # of query and key, of value
    lengths: tuple = ((7, 1, 1), (0, 1, 1), (20, 1, 1))  # cache_seqlens, new rows and queries of each sequence
    capacity: int = 24  # keys; rounded up to whole pages
    page: int | None = None  # None is a contiguous cache
    append: bool = True
    packed: tuple = (False, False)  # queries, new rows; without it their numbers are those of the first sequence
    spare_rows: tuple = (2, 1)  # queries and new rows past the last sequence, where these are packed
    give_longest: bool = True  # whether max_seqlen_q is given
    count: str = "tensor"  # what cache_seqlens is; "int": that of the first sequence; "none": full
    leftpad: tuple | None = None
    batch_idx: bool = False
    spare_blocks: int = 2  # pages of no sequence; rows of the cache or the table, under batch_idx
    holes: float = 0.0  # the share of table entries outside [0, blocks) among those that are needed
    shared_pages: bool = False  # whether the first pages of sequences are the same where they are full
    order: str = "HND"  # of a block in memory: HND (head, row, width) or NHD
    joined: str = ""  # "side by side": keys and values in one row; "latent": values are the first columns of keys
    gap: int = 0  # elements after each row
    layouts: tuple = ("contiguous",) * 3  # of query, key, value
    rotary: str | None = None  # halves, interleaved
    rotary_width: int = 8
    rotary_positions: int = 64
    rotary_offsets: bool = False
    rotary_dtype: torch.dtype | None = None  # None is dtype
    scales: str | None = None  # the shape of key_scale and value_scale: "one", "head", "batch", "all"
    options: dict = field(default_factory=dict)  # causal, window, softcap, scale, num_splits
    alibi: int = 0  # the rank of the slopes, 0 for none
    sinks: bool = False
    spans: int = 0  # the intervals of query_spans, 0 for none; which dimensions they have depends on the seed
    give_out: bool = False
    size: float = 1.0  # standard deviation of query, key and value
    whole: bool = False  # query and key are small whole numbers, so that their products are exact however large the scale is
    seed: int = 0

    def __repr__(self):
        default = type(self)()
        said = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in said)})"

    # --- lengths ---

    @property
    def entries(self) -> int:
        return 1 if self.page is None else -(-self.capacity // self.page)

    @property
    def rows(self) -> int:
        """Keys that a sequence has room for."""
        return self.capacity if self.page is None else self.entries * self.page

    def new(self, n: int) -> int:
        return self.lengths[n if self.packed[1] else 0][1] if self.append else 0

    def queries(self, n: int) -> int:
        return self.lengths[n if self.packed[0] else 0][2]

    def clamped(self) -> tuple[list[int], list[int], list[int]]:
        """leftpad, n_old and n of each sequence, as the contract clamps them."""
        left, old, ends = [], [], []
        for n, (length, _, _) in enumerate(self.lengths):
            length = {"tensor": length, "int": min(self.lengths[0][0], self.rows), "none": self.rows}[self.count]
            left.append(min(max(self.leftpad[n], 0), self.rows) if self.leftpad else 0)
            old.append(min(max(length, left[-1]), self.rows))
            ends.append(min(old[-1] + self.new(n), self.rows))
        return left, old, ends

    def seen(self, n: int) -> list[int]:
        """The positions of the keys that at least one query of a sequence sees."""
        left, _, ends = self.clamped()
        before, after = self.options.get("window") or (None, None)
        causal, queries = self.options.get("causal", True), self.queries(n)
        standing = [i + ends[n] - queries for i in range(queries)]
        return [
            j
            for j in range(left[n], ends[n])
            if any(
                (not causal or j <= p) and (before is None or p - before <= j) and (after is None or j <= p + after)
                for p in standing
            )
        ]

    # --- tensors ---

    def make(self, device: str = "cpu") -> Made:
        """New tensors of the problem: equal numbers on every device."""
        if self.joined == "latent" and self.append and self.rotary:
            raise ValueError("rotated keys are no values: a latent cache takes no rotary with new rows")
        choose, g = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        _, old, ends = self.clamped()
        count = len(self.lengths)
        needed = [
            {j // (self.page or max(self.rows, 1)) for j in [*self.seen(n), *range(old[n], ends[n])]} for n in range(count)
        ]
        table, options, blocks = self._table(needed, old, choose)
        appended, filled = [], []
        page = self.page or self.rows
        for n in range(count):
            places = {j: (table[n][j // page], j % page) for j in {*self.seen(n), *range(old[n], ends[n])}}
            places = {j: place for j, place in places.items() if 0 <= place[0] < blocks}
            appended += [(n, j - old[n], *place) for j, place in sorted(places.items()) if j >= old[n]]
            filled += [places[j] for j in self.seen(n) if j < old[n] and j in places]
        caches, buffers = self._caches(blocks, sorted(set(filled)), device, g)
        first = old
        if self.rotary:
            options["rotary"] = self._rotary(count, choose, g)
            first = options["rotary"][3].tolist() if self.rotary_offsets else old
        query = self._rows(g, 0, self.heads[0], self.head_dims[0])
        options |= self._new_rows(g) | self._head_inputs(g, count) | self._query_spans(g, query.shape) | self.options
        lengths = {"int": min(self.lengths[0][0], self.rows) if self.lengths else 0, "none": None}
        if self.count == "tensor":
            lengths["tensor"] = torch.tensor([length for length, _, _ in self.lengths], dtype=torch.int32).to(device)
        if self.leftpad is not None:
            options["leftpad"] = torch.tensor(self.leftpad, dtype=torch.int32)
        if self.packed[0]:
            options["cu_seqlens_q"] = self._starts(self.queries)
            options["max_seqlen_q"] = max((self.queries(n) for n in range(count)), default=0) if self.give_longest else None
        if self.give_out:
            options["out"] = lay_out(query.new_full((*query.shape[:-1], self.head_dims[1]), math.nan), "sliced")

        def moved(x):
            return tuple(map(moved, x)) if isinstance(x, tuple) else to_device(x, device) if torch.is_tensor(x) else x

        options = {name: moved(x) for name, x in options.items()}
        return Made(moved(query), caches, lengths[self.count], options, buffers, old, ends, first, appended)

    def _starts(self, rows_of) -> torch.Tensor:
        return torch.tensor([0, *(rows_of(n) for n in range(len(self.lengths)))]).cumsum(0).to(torch.int32)

    def _table(self, needed, old, choose) -> tuple[list[list[int]], dict, int]:
        """The blocks of each sequence, the options that say so, and how many blocks there are."""
        count = len(self.lengths)
        table_rows = count + (self.spare_blocks if self.batch_idx else 0)
        picked = choose.sample(range(table_rows), count) if self.batch_idx else list(range(count))
        options = {"cache_batch_idx": torch.tensor(picked, dtype=torch.int32)} if self.batch_idx else {}
        if self.page is None:
            return [[row] for row in picked], options, table_rows
        blocks = sum(map(len, needed)) + self.spare_blocks
        free = choose.sample(range(blocks), blocks)
        outside = [-1, blocks, blocks + 1, HUGE, -HUGE - 1]
        table = [
            [choose.choice([*outside, choose.randrange(max(blocks, 1))]) for _ in range(self.entries)]
            for _ in range(table_rows)
        ]
        shared: dict[int, int] = {}
        for n, entries in enumerate(needed):
            for entry in sorted(entries):
                block = free.pop()
                if self.shared_pages and (entry + 1) * self.page <= old[n]:
                    block = shared.setdefault(entry, block)
                table[picked[n]][entry] = choose.choice(outside) if choose.random() < self.holes else block
        own = [table[row] for row in picked]
        shape = (table_rows, self.entries)
        return own, options | {"block_table": torch.tensor(table, dtype=torch.int32).reshape(shape)}, blocks

    def _caches(self, blocks, filled, device, g):
        """Views [blocks, Hkv, page, width] of buffers that are NaN but for the rows `filled`, pairs of block and row."""
        dtype, heads, page = self.cache_dtype or self.dtype, self.heads[1], self.page or self.rows
        starts = [0, self.head_dims[0]] if self.joined == "side by side" else [0, 0]
        widths = {"side by side": [sum(self.head_dims)], "latent": [self.head_dims[0]]}.get(self.joined, self.head_dims)
        buffers, views = [], []
        for width in widths:
            width += self.gap
            row, head = (width, page * width) if self.order == "HND" else (heads * width, width)
            # Every bit set is NaN in each of the dtypes.
            elements = blocks * heads * page * width + 16
            buffers.append(torch.full((elements * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype))
            views.append((heads * page * width, head, row, 1))

        def caches(buffers):
            shapes = [(blocks, heads, page, width) for width in self.head_dims]
            return tuple(
                buffers[i % len(buffers)].as_strided(shape, views[i % len(views)], start)
                for i, (shape, start) in enumerate(zip(shapes, starts, strict=True))
            )

        for which, cache in enumerate(caches(buffers)[: 1 if self.joined == "latent" else 2], 1):
            for block, row in filled:
                rows = torch.randn(heads, cache.shape[-1], generator=g) * self.size
                cache[block, :, row] = self._numbers(which, rows).to(dtype)
        buffers = [buffer.to(device) for buffer in buffers]
        return caches(buffers), buffers

    def _rows(self, g, which, heads, width) -> torch.Tensor:
        """Queries (0), new keys (1) or new values (2), dense or packed, NaN past the last sequence."""
        layout, side = self.layouts[which], min(which, 1)
        rows_of = (self.queries, self.new)[side]
        if not self.packed[side]:
            length = rows_of(0) if self.lengths else 1
            shape = (len(self.lengths), heads, length, width)
            rows = random_tensor(*shape, dtype=self.dtype, scale=self.size, generator=g)
            return lay_out(self._numbers(which, rows), layout)
        total = sum(rows_of(n) for n in range(len(self.lengths)))
        rows = random_tensor(total + self.spare_rows[side], heads, width, dtype=self.dtype, scale=self.size, generator=g)
        rows = self._numbers(which, rows)
        rows[total:] = math.nan
        # "expanded" expands the heads here: equal rows would be another problem, not another layout.
        swap = (0, 1) if layout == "expanded" else (0, 0)
        return lay_out(rows.transpose(*swap), layout).transpose(*swap)

    def _numbers(self, which: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows of queries (0), keys (1) or values (2), as `whole` says."""
        return whole_numbers(rows, 2 / self.size) if self.whole and which < 2 else rows

    def _new_rows(self, g) -> dict:
        if not self.append:
            return {}
        key, value = (self._rows(g, i, self.heads[1], width) for i, width in enumerate(self.head_dims, 1))
        if self.joined == "latent":
            value = lay_out(key[..., : self.head_dims[1]], "sliced")
        made = {"key": key, "value": value}
        return made | ({"cu_seqlens_new": self._starts(self.new)} if self.packed[1] else {})

    def _rotary(self, count, choose, g) -> tuple:
        angles = torch.rand(self.rotary_positions, self.rotary_width // 2, generator=g, dtype=torch.float64) * 2 * math.pi
        cos, sin = (t.to(self.rotary_dtype or self.dtype) for t in (angles.cos(), angles.sin()))
        interleaved = self.rotary == "interleaved"
        if not self.rotary_offsets:
            return (cos, sin, True) if interleaved else (cos, sin)
        offsets = [choose.randrange(self.rotary_positions + 3) for _ in range(count)]
        return cos, sin, interleaved, torch.tensor(offsets, dtype=torch.int32)

    def _head_inputs(self, g, count) -> dict:
        made, accumulator = {}, reference.accumulator_dtype(self.dtype)
        if self.alibi:
            shape = [self.heads[0]] if self.alibi == 1 else [count, self.heads[0]]
            made["alibi_slopes"] = torch.rand(shape, generator=g).to(accumulator) * 0.5
        if self.sinks:
            made["sinks"] = torch.randn(self.heads[0], generator=g).to(accumulator)
        if self.scales:
            shape = {"one": (), "head": (self.heads[1],), "batch": (count, 1), "all": (count, self.heads[1])}[self.scales]
            made |= {name: torch.rand(shape, generator=g) * 1.5 + 0.5 for name in ("key_scale", "value_scale")}
            if self.joined == "latent":
                made["value_scale"] = made["key_scale"].clone()
        return made

    def _query_spans(self, g, shape: torch.Size) -> dict:
        if not self.spans:
            return {}
        packed, bounds = self.packed[0], 2 * self.spans
        rows = shape[0] if packed else shape[2]
        leading = [(), (1,), (shape[1],)]
        if not packed:
            leading += [(shape[0], 1), (shape[0], shape[1]), (1, shape[1])]
        made = torch.randint(-3, self.rows + 4, (*leading[self.seed % len(leading)], rows, bounds), generator=g)
        if self.spans == 1:  # or rows would see little
            made = made.sort(-1).values
        made[..., 1:2, :] = torch.tensor([-HUGE - 1, HUGE] * self.spans)
        return {"query_spans": made.int()}

    # --- checks ---

    def check(self, function, device: str = "cpu") -> None:
        """Compares out, lse, the caches and all memory around the tensors of a call with the oracle's."""
        made, before = self.make(device), self.make()
        out, lse = function(made.query, *made.caches, made.cache_seqlens, **made.options, return_lse=True)
        self._check_memory(made, before)
        expected_shape = (*made.query.shape[:-1], self.head_dims[1])
        lse_shape = made.query.shape[1::-1] if self.packed[0] else made.query.shape[:-1]
        assert out.dtype == self.dtype and out.shape == expected_shape, f"out of {self}: {out.dtype} {list(out.shape)}"
        accumulator = reference.accumulator_dtype(self.dtype)
        assert lse.dtype == accumulator and lse.shape == lse_shape, f"lse of {self}: {lse.dtype} {list(lse.shape)}"
        if self.give_out:
            given = made.options["out"]
            assert out.data_ptr() == given.data_ptr() and out.stride() == given.stride(), f"out of {self} is another tensor"
            self._check_outside(given, before.options["out"])
        self._check_appended(made, before)
        self._check_results(out.cpu(), lse.cpu(), made, before)

    def check_append(self, function, device: str = "cpu", slots: bool = False) -> None:
        """Compares the caches after cache_append, and the query that it rotates, with the oracle's. A leftpad and
        cache_batch_idx, which it does not take, are left out; with `slots` the rows go where the lengths would put them."""
        packed = (self.packed[1] or slots,) * 2
        rotary = None if self.joined == "latent" else self.rotary
        problem = replace(self, append=True, leftpad=None, batch_idx=False, packed=packed, rotary=rotary)
        problem._check_append(function, device, slots)

    def _check_append(self, function, device: str, slots: bool) -> None:
        made, before = self.make(device), self.make()
        taken = ("block_table", "cu_seqlens_new", "rotary", "key_scale", "value_scale")
        options = {name: made.options[name] for name in taken if name in made.options}
        if slots:
            options = self._at_slots(made, options, device)
        else:
            options["cache_seqlens"] = self.rows if self.count == "none" else made.cache_seqlens
        queries = replace(self, lengths=tuple((length, new, new) for length, new, _ in self.lengths))
        queries = replace(queries, spare_rows=(self.spare_rows[1],) * 2)
        query = queries.make().query
        if self.rotary:
            options["query"] = to_device(query, device)
        rotated = function(made.options["key"], made.options["value"], *made.caches, **options)
        self._check_memory(made, before)
        self._check_appended(made, before)
        assert (rotated is not None) == (self.rotary is not None), f"rotated query of {self}: {rotated}"
        if rotated is None:
            return
        assert rotated.dtype == self.dtype and rotated.shape == query.shape, f"rotated query of {self}: {list(rotated.shape)}"
        starts, ours = self._starts(self.new).tolist(), rotated.cpu()
        for n, first in enumerate(made.first):
            rows, own = (t[starts[n] : starts[n + 1]].transpose(0, 1) if self.packed[1] else t[n] for t in (ours, query))
            exact = rotate(own.double(), first + torch.arange(own.shape[1]), before.options["rotary"])
            self._check_rounded(rows, exact, own, self.dtype, f"rotated query of sequence {n} of {self}")

    def _at_slots(self, made: Made, options: dict, device: str) -> dict:
        """The options of a call with slots that writes what the call with lengths would."""
        starts, rows = self._starts(self.new).tolist(), made.options["key"].shape[0]
        blocks, page = made.caches[0].shape[0], made.caches[0].shape[2]
        slots = [-1 if t % 2 else blocks * page + t for t in range(rows)]
        for n, i, block, row in made.appended:
            slots[starts[n] + i] = block * page + row
        chosen = {"slots": torch.tensor(slots, dtype=torch.int64).to(device)}
        owner = [n for n in range(len(self.lengths)) for _ in range(self.new(n))]
        if self.rotary:
            row = [made.first[n] + t - starts[n] for t, n in enumerate(owner)] + [0] * (rows - len(owner))
            cos, sin, *_ = options["rotary"]
            chosen["rotary"] = (cos, sin, self.rotary == "interleaved", torch.tensor(row, dtype=torch.int32).to(device))
        for name in ("key_scale", "value_scale"):
            if name in options:
                scale = options[name]
                if scale.dim() == 2:
                    per_row = scale.new_ones(rows, scale.shape[1])
                    per_row[: len(owner)] = scale[owner]
                    scale = per_row
                chosen[name] = scale
        return chosen

    def _check_memory(self, made: Made, before: Made) -> None:
        """No input has changed, nor the memory around it; of the caches, no byte that the append should not write."""
        untouched = before.inputs()
        for name, tensor in made.inputs().items():
            assert torch.equal(_bytes(tensor), _bytes(untouched[name])), f"{name} of {self} was written"
        size = (self.cache_dtype or self.dtype).itemsize
        for i, (buffer, was, writable) in enumerate(zip(made.buffers, before.buffers, self._written(before), strict=True)):
            changed = (_bytes(buffer) != _bytes(was)).view(-1, size).any(1) & ~writable
            assert not changed.any(), (
                f"buffer {i} of {self}: {int(changed.sum())} elements that are not of new rows were written"
            )

    def _check_outside(self, given: torch.Tensor, was: torch.Tensor) -> None:
        inside = torch.zeros(_bytes(was).numel() // was.element_size(), dtype=torch.bool)
        inside.as_strided(was.shape, was.stride(), was.storage_offset()).fill_(True)
        changed = (_bytes(given) != _bytes(was)).view(-1, was.element_size()).any(1)
        assert not (changed & ~inside).any(), f"memory around out of {self} was written"

    def _written(self, made: Made) -> list[torch.Tensor]:
        """A bool per element of each buffer: whether the append writes it."""
        masks = [torch.zeros(buffer.numel(), dtype=torch.bool) for buffer in made.buffers]
        for i, cache in enumerate(made.caches):
            mask = masks[i % len(masks)].as_strided(cache.shape, cache.stride(), cache.storage_offset())
            for _, _, block, row in made.appended:
                mask[block, :, row] = True
        return masks

    def _check_appended(self, made: Made, before: Made) -> None:
        """The rows that the call appended: those of the oracle bit for bit; within one rounding where they are rotated."""
        dtype, width = self.cache_dtype or self.dtype, self.rotary_width if self.rotary else 0
        starts = self._starts(self.new).tolist()
        for n, i, block, row in before.appended:
            for name, ours, rotated in zip(("key", "value"), made.caches, (width, 0), strict=True):
                new = before.options[name]
                own = new[starts[n] + i] if self.packed[1] else new[n, :, i]
                ours, scale = ours[block, :, row].cpu(), self._scale(before, name, n, torch.float32)
                label = f"{name} {i} of sequence {n} of {self}"
                rest = own[:, rotated:].to(reference.accumulator_dtype(self.dtype))
                rest = rest if scale is None else rest / scale
                assert _same(ours[:, rotated:], _saturated(rest, dtype).to(dtype)), f"{label}: not the row that was given"
                if rotated:
                    position = torch.tensor([before.first[n] + i])
                    exact = rotate(own[:, None].double(), position, before.options["rotary"])[:, 0, :rotated]
                    scale = 1.0 if scale is None else scale.double()
                    self._check_rounded(ours[:, :rotated], exact / scale, own[:, :rotated].double() / scale, dtype, label)

    def _check_rounded(self, ours, exact, terms, dtype, label) -> None:
        """A result rounded to `dtype` from arithmetic in float32 (float64 for float64) on terms of the given size."""
        info = torch.finfo(dtype)
        exact, ours = _saturated(exact, dtype), ours.double()
        size = terms.double().abs().amax(-1, keepdim=True).nan_to_num() if terms.numel() else 0.0
        allowed = info.eps / 2 * torch.maximum(exact.abs(), ours.abs()) + info.smallest_normal * info.eps / 2
        allowed = allowed + 8 * torch.finfo(reference.accumulator_dtype(self.dtype)).eps * size
        wrong = ((ours - exact).abs() > allowed) | (ours.isnan() != exact.isnan())
        assert not wrong.any(), f"{label}: {int(wrong.sum())} numbers are farther off than by one rounding"

    def _scale(self, made: Made, name: str, n: int, dtype) -> torch.Tensor | None:
        """The scale of a sequence's heads [Hkv, 1]."""
        scale = made.options.get(f"{name}_scale")
        return None if scale is None else scale.expand(len(self.lengths), self.heads[1])[n, :, None].to(dtype)

    def _check_results(self, out, lse, made: Made, before: Made) -> None:
        """Compares out and lse with the oracle on the caches that the call left: what was rounded there, it must see."""
        caches = tuple(
            buffer_view.as_strided(cache.shape, cache.stride(), cache.storage_offset())
            for cache, buffer_view in zip(made.caches, [b.cpu() for b in made.buffers] * 2, strict=False)
        )
        options = {n: x for n, x in before.options.items() if n not in ("key", "value", "cu_seqlens_new", "out", "num_splits")}
        ends = torch.tensor(made.ends, dtype=torch.int32)
        if self.rotary:
            cos, sin, interleaved = (*options["rotary"], False)[:3] if len(options["rotary"]) == 2 else options["rotary"][:3]
            options["rotary"] = (cos, sin, interleaved, torch.tensor(made.first, dtype=torch.int32))

        def run(query, **others):
            return reference.kvcache_attention(query, *caches, ends, **(options | others), return_lse=True)

        truth = run(before.query.double())
        plain = run(before.query)
        wide = [run(before.query.float())] if self.dtype.itemsize == 2 else [plain]
        if self.rotary and self.dtype.itemsize == 2:
            wide.append(run(self._rotated_query(before, options["rotary"]).float(), rotary=None))
        accumulator = reference.accumulator_dtype(self.dtype)
        assert_close_to_float64(out, plain[0], truth[0], self.dtype, name=f"out of {self}", magnitude=self.size)
        theirs = [w[1] for w in wide]
        assert_close_to_float64(lse, theirs, truth[1], accumulator, name=f"lse of {self}", magnitude=1.0)

    def _rotated_query(self, before: Made, rotary: tuple) -> torch.Tensor:
        """The query rotated and rounded to its dtype, as a kernel does that multiplies in this dtype."""
        moves = self.options.get("causal", True) or any(x is not None for x in self.options.get("window") or ())
        rotated, starts = before.query.clone(), self._starts(self.queries).tolist()
        for n, first in enumerate(before.first):
            own = rotated[starts[n] : starts[n + 1]].transpose(0, 1) if self.packed[0] else rotated[n]
            own.copy_(rotate(own, first + torch.arange(own.shape[1]) * moves, rotary))
        return rotated


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that a tensor lies in, on the host."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),)).cpu()


def _same(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits, but for those of NaN."""
    nan = expected.isnan()
    ours, expected = ours.double(), expected.double()
    same = (ours == expected) & (ours.signbit() == expected.signbit())
    return bool((same | nan).all() and (ours.isnan() == nan).all())


def _saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest) if dtype in FLOAT8 else x


# --- random problems ---


def random_cached(seed: int, device: str = "cpu") -> CachedProblem:
    """A random problem; equal seeds give equal problems on a device."""
    choose = random.Random(seed)
    dtypes = [torch.float16, torch.bfloat16, torch.float32] + ([torch.float64] if device == "cpu" else [])
    dtype = choose.choice(dtypes)
    count = choose.choice([0, 1, 1, 2, 3, 4, 7])
    page = choose.choice([None, None, 1, 2, 3, 5, 8, 16, 17, 64])
    capacity = choose.choice([0, 1, 5, 16, 33, 64, 100, 150]) if count < 4 else choose.choice([1, 9, 16, 40])
    packed = (choose.random() < 0.4, choose.random() < 0.3)
    group = choose.choice([(1, 1), (2, 2), (4, 2), (6, 2), (5, 1), (8, 1)])
    head_dim = choose.choice([1, 3, 8, 16, 24, 33, 64, 128])
    head_dims = (head_dim, choose.choice([head_dim, head_dim, 1, 5, 16, 40]))
    append = choose.random() < 0.6
    joined = choose.choice(["", "", "side by side", "latent"])
    rotary = choose.choice([None, None, "halves", "interleaved"]) if head_dim > 1 else None
    if joined == "latent" and (head_dims[1] > head_dim or (append and rotary)):
        joined = ""
    float8 = dtype.itemsize == 2 and choose.random() < 0.35
    lengths = [
        (choose.choice([0, 1, capacity, choose.randrange(capacity + 1), choose.randrange(capacity + 1), -3, capacity + 9]),
         choose.choice([0, 1, 1, 1, 2, 5, 17]), choose.choice([0, 1, 1, 1, 2, 3, 4, 9, 20]))
        for _ in range(count)
    ]  # fmt: skip
    leftpad = tuple(choose.choice([0, 1, 3, capacity // 2, -2, capacity + 1]) for _ in lengths)
    problem = CachedProblem(
        dtype=dtype,
        cache_dtype=choose.choice(FLOAT8) if float8 else None,
        heads=group,
        head_dims=head_dims,
        lengths=tuple(lengths),
        capacity=capacity,
        page=page,
        append=append,
        packed=packed,
        spare_rows=(choose.choice([0, 1, 5]), choose.choice([0, 1, 5])),
        give_longest=choose.random() < 0.8,
        count=choose.choice(["tensor"] * 6 + ["int", "none"]),
        leftpad=leftpad if choose.random() < 0.25 else None,
        batch_idx=choose.random() < 0.25,
        spare_blocks=choose.choice([0, 1, 4]),
        holes=choose.choice([0.0, 0.0, 0.2]),
        shared_pages=choose.random() < 0.3,
        order=choose.choice(["HND", "NHD"]),
        joined=joined,
        gap=choose.choice([0, 0, 1, 8]),
        layouts=tuple(choose.choice(LAYOUTS) if choose.random() < 0.4 else "contiguous" for _ in range(3)),
        rotary=rotary,
        rotary_width=choose.choice([head_dim // 2 * 2, max(head_dim // 4 * 2, 2), 2]),
        rotary_positions=choose.choice([1, capacity // 2 + 1, capacity + 30]),
        rotary_offsets=choose.random() < 0.3,
        rotary_dtype=choose.choice([None, torch.float32]) if dtype != torch.float64 else None,
        scales=choose.choice([None, "one", "head", "batch", "all"]) if float8 else None,
        options=_random_options(choose),
        alibi=choose.choice([0, 0, 0, 1, 2]),
        sinks=choose.random() < 0.25,
        give_out=choose.random() < 0.3,
        size=choose.choice([1.0, 1.0, 0.1, 3.0]),
        seed=seed,
    )
    return far_off(problem, choose)


def between(choose: random.Random, low: float, high: float) -> float:
    """A number between 10^low and 10^high, every power of ten as likely."""
    return 10 ** choose.uniform(low, high)


# Scores of this size and more are exact products of whole numbers, with nothing added to them: of others torch's float32 has no
# digit that could be compared, nor has ours.
LARGE_SCORES = 100.0


def far_off(problem: CachedProblem, choose: random.Random) -> CachedProblem:
    """Of 10 problems 3 have scores of another size. Those that are rotated or scaled are not exact, and stay below 100."""
    if choose.random() < 0.3:
        exact = problem.rotary is None and problem.scales is None
        score = between(choose, -3, 9 if exact else 2)
        if score >= LARGE_SCORES:
            problem.whole, problem.size, problem.alibi = True, 1.0, 0
        spread = 2 if problem.whole else problem.size
        problem.options["scale"] = choose.choice([1, 1, -1]) * score / (spread**2 * problem.head_dims[0] ** 0.5)
    return problem


def random_prefill(seed: int) -> CachedProblem:
    """A random problem with so many queries that kernels for many rows take it."""
    choose = random.Random(seed)
    count, page = choose.choice([1, 2, 3, 4]), choose.choice([None, 8, 16, 16, 24, 32, 48, 64, 128, 256])
    capacity = choose.choice([40, 130, 300, 700, 1500])
    group = choose.choice([(1, 1), (2, 2), (4, 2), (6, 2), (5, 1), (8, 1), (32, 1), (64, 1)])
    head_dim = choose.choice([8, 64, 64, 96, 128, 128, 128, 192, 256])
    head_dims = (head_dim, choose.choice([head_dim, head_dim, head_dim, 8, 64, 128]))
    joined = choose.choice(["", "", "side by side", "latent"] if head_dims[1] <= head_dim else ["", "side by side"])
    queries = [1, 7, 33, 64, 65, 130] + ([] if group[0] > 8 else [200, 300])
    lengths = [
        (choose.choice([0, 1, capacity, choose.randrange(capacity + 1), choose.randrange(capacity + 1), capacity + 9]),
         choose.choice([0, 1, 5, 17]), choose.choice(queries))
        for _ in range(count)
    ]  # fmt: skip
    lengths[0] = (*lengths[0][:2], max(lengths[0][2], 33))
    options: dict = {"num_splits": choose.choice([0, 1, 1, 1])}
    if choose.random() < 0.35:
        options["causal"] = False
    if choose.random() < 0.4:
        bounds = [None, 0, 1, 30, 100, 300]
        options["window"] = (choose.choice(bounds), choose.choice(bounds))
    if choose.random() < 0.25:
        options["softcap"] = choose.choice([0.5, 2.0, 30.0])
    leftpad = tuple(choose.choice([0, 1, 3, capacity // 2, capacity + 1]) for _ in lengths)
    return CachedProblem(
        dtype=choose.choice([torch.float16, torch.bfloat16]),
        heads=group,
        head_dims=head_dims,
        lengths=tuple(lengths),
        capacity=capacity,
        page=page,
        append=choose.random() < 0.3,
        packed=(choose.random() < 0.5, choose.random() < 0.3),
        spare_rows=(choose.choice([0, 1, 5, 100]), 0),
        give_longest=choose.random() < 0.8,
        count=choose.choice(["tensor"] * 5 + ["int", "none"]),
        leftpad=leftpad if page is None and choose.random() < 0.4 else None,
        batch_idx=choose.random() < 0.3,
        spare_blocks=choose.choice([0, 1, 4]),
        holes=choose.choice([0.0, 0.0, 0.2]),
        shared_pages=choose.random() < 0.3,
        order=choose.choice(["HND", "NHD"]),
        joined=joined,
        gap=choose.choice([0, 0, 8]),
        options=options,
        alibi=choose.choice([0, 0, 0, 1, 2]),
        sinks=choose.random() < 0.25,
        size=choose.choice([1.0, 1.0, 0.1, 3.0]),
        seed=seed,
    )


def _random_options(choose: random.Random) -> dict:
    options: dict = {}
    if choose.random() < 0.4:
        options["causal"] = False
    if choose.random() < 0.35:
        bounds = [None, 0, 1, 2, 5, 30]
        options["window"] = (choose.choice(bounds), choose.choice(bounds))
    if choose.random() < 0.2:
        options["softcap"] = choose.choice([0.5, 2.0, 30.0])
    if choose.random() < 0.3:
        options["scale"] = choose.choice([0.0, -0.5, 0.1, 1.0])
    if choose.random() < 0.4:
        options["num_splits"] = choose.choice([0, 1, 2, 3, 8])
    return options
