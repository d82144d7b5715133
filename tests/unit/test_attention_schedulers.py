"""The tile schedulers, tile lists, cut tiles, block lists and fused batches of the CUDA kernels, which are integer arithmetic,
on the host against brute force. device_on_host/ compiles the kernels' own headers and runs the 32 lanes of a warp."""

from __future__ import annotations

import ctypes
import heapq
import os
import shutil
import subprocess
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent / "device_on_host"
SOURCES = Path(__file__).parents[2] / "csrc"
if not SOURCES.is_dir():
    pytest.skip("the sources are part of a checkout", allow_module_level=True)

MIXED, HIDDEN, CLEAR = 0, 1, 2  # MaskKind
TILE_ROWS = 128  # of the packed forward kernel
CHUNK = 128  # sequences that are put in order together


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(name, *arguments, rows): the rows of four numbers that a function of schedulers.cpp writes, at most `rows`."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("device_on_host") / "schedulers.so"
    options = ["-std=c++20", "-O2", "-shared", "-fPIC", "-Wno-unknown-pragmas", f"-I{SOURCES}", "-include", HERE / "warp.h"]
    subprocess.run([*compiler.split(), *options, HERE / "schedulers.cpp", "-o", library], check=True)
    functions = ctypes.CDLL(str(library))
    functions.last_error.restype = ctypes.c_char_p

    def call(name, *arguments, rows):
        out = np.empty((rows, 4), np.int64)
        capacity = [] if name == "dense_schedule" else [ctypes.c_int64(rows)]
        kept, given = [], []
        for x in arguments:
            if isinstance(x, np.ndarray):
                kept.append(np.ascontiguousarray(x))
                given.append(ctypes.c_void_p(kept[-1].ctypes.data))
            else:
                given.append(None if x is None else ctypes.c_int64(x))
        function = getattr(functions, name)
        function.restype = ctypes.c_int64
        count = function(*given, ctypes.c_void_p(out.ctypes.data), *capacity)
        assert count >= 0, functions.last_error().decode()
        return [tuple(int(x) for x in row) for row in out[:count]]

    return call


def each_once(found, expected):
    assert Counter(found) == Counter(dict.fromkeys(expected, 1))


def ceil_div(a, b):
    return -(-a // b)


# --- the Hopper forward kernel, dense ----------------------------------------------------------------------------------------

WINDOWS = {"none": (-1, -1), "causal": (-1, 0), "left": (300, -1), "both": (300, 100), "one key": (0, 0), "wide": (5000, 5000)}


def schedule_of(run, *, batch, heads, queries, keys, window, offset, tile_rows, ctas, group=1, head_dim=64, rounds=8):
    left, right = WINDOWS[window]
    arguments = (batch, heads, queries, keys, head_dim, left, right, offset, tile_rows, rounds, group, ctas)
    return run("dense_schedule", *arguments, rows=1)[0]


@pytest.mark.thin(3)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("batch, heads, group", [(1, 1, 1), (3, 2, 1), (2, 12, 4), (1, 64, 8), (5, 6, 6)])
@pytest.mark.parametrize("queries, keys", [(1, 1), (129, 4000), (1000, 1000), (4096, 4097)])
def test_dense_tiles(window, batch, heads, group, queries, keys, run):
    for ctas, tile_rows, offset in product((1, 7, 132), (64, 128, 192), (0, keys - queries)):
        problem = dict(batch=batch, heads=heads, queries=queries, keys=keys, window=window, offset=offset)
        row_tiles, even, section, last = schedule_of(run, **problem, tile_rows=tile_rows, ctas=ctas, group=group)
        assert row_tiles == ceil_div(queries, tile_rows)
        assert 1 <= section <= batch * heads and (section <= group or section % group == 0)
        assert 0 <= last <= (batch * heads - 1) // section
        left, right = WINDOWS[window]
        # A tile is even if the window of its first row begins at or after the first key.
        in_window = [t * tile_rows + offset - left >= 0 for t in range(row_tiles)]
        assert even == (0 if (left < 0) != (right < 0) else row_tiles if left < 0 else sum(in_window))

        for inner_batch in (0, 1):
            schedule = (batch, heads, row_tiles, even, section, last, inner_batch, ctas)
            found = run("dense_tiles", *schedule, rows=batch * heads * row_tiles)
            each_once([tile[1:] for tile in found], product(range(batch), range(heads), range(row_tiles)))
            for cta in range(ctas):
                check_order_of_dense_tiles([tile[1:] for tile in found if tile[0] == cta], *schedule[:-1])


def check_order_of_dense_tiles(tiles, batch, heads, row_tiles, even, section, last, inner_batch):
    """The even tiles first, head by head; then section by section, and within a section the last rows first."""

    def key(tile):
        b, h, row = tile
        head = h * batch + b if inner_batch else b * heads + h
        if row >= row_tiles - even:
            return 0, head, row_tiles - row
        return 1, min(head // section, last), row_tiles - row, head

    assert tiles == sorted(tiles, key=key)


@pytest.mark.parametrize("heads, row_tiles, ctas", [(66, 8, 132), (8, 96, 128), (12, 11, 33), (10, 80, 80)])
def test_causal_work_is_even(heads, row_tiles, ctas, run):
    """Where tiles fill an even number of rounds, each CTA has as many of them, and nearly the same sum of keys."""
    rounds = heads * row_tiles // ctas
    assert rounds * ctas == heads * row_tiles and rounds % 2 == 0
    found = run("dense_tiles", 1, heads, row_tiles, 0, heads, 0, 0, ctas, rows=heads * row_tiles)
    assert set(Counter(cta for cta, *_ in found).values()) == {rounds}
    work = np.zeros(ctas)
    for cta, _, _, row in found:
        work[cta] += row + 1
    assert work.max() - work.min() <= rounds // 2


@pytest.mark.parametrize("batch, heads, length, head_dim, tile_rows", [(5, 9, 1536, 128, 128), (1, 13, 5555, 128, 128)])
def test_causal_work_of_odd_heads_is_even(batch, heads, length, head_dim, tile_rows, run):
    """The heads left over after whole sections do not wait for a separate round."""
    ctas, problem = 132, dict(batch=batch, heads=heads, queries=length, keys=length, window="causal", offset=0)
    row_tiles, even, section, last = schedule_of(run, **problem, tile_rows=tile_rows, ctas=ctas, head_dim=head_dim, rounds=1)
    planes, work = batch * heads, np.zeros(ctas)
    found = run("dense_tiles", batch, heads, row_tiles, even, section, last, 0, ctas, rows=planes * row_tiles)
    for cta, _, _, row in found:
        work[cta] += row + 1
    assert work.mean() / work.max() > 0.85  # 0.66 and 0.73 where a section of one head comes last


# --- the Hopper forward kernel, packed ---------------------------------------------------------------------------------------

LENGTHS = {
    "none": [],
    "empty": [0, 0, 0],
    "one query": [1],
    "odd": [0, 1, 127, 128, 129, 0, 255, 256, 257, 1000, 0],
    "one long": [5, 4000, 7],
    "many": None,  # more than one chunk
}


def starts_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def lengths_of(name, seed):
    random = np.random.default_rng(seed)
    if LENGTHS[name] is not None:
        return list(random.permutation(np.array(LENGTHS[name], int)))
    lengths = random.integers(0, 400, 200)
    lengths[random.integers(0, 200, 40)] = 0
    return list(lengths)


def packed_tiles_in_order(lengths, key_lengths, heads, group, level_keys, ctas):
    """All tiles in the order in which they are to be taken."""
    order = []
    for first in range(0, len(lengths), CHUNK):
        chunk = list(range(first, min(first + CHUNK, len(lengths))))
        if level_keys:
            chunk.sort(key=lambda n: -(key_lengths[n] // level_keys) if lengths[n] else 0)
        for n in chunk:
            tiles = ceil_div(lengths[n], TILE_ROWS)
            if tiles == 0:
                continue
            key_heads = heads // group
            parts = min(ceil_div(heads * tiles, ctas), key_heads)
            part_heads = ceil_div(key_heads, parts) * group
            for part in range(0, heads, part_heads):
                of_part = range(part, min(part + part_heads, heads))
                order += [(n, head, row) for row in reversed(range(tiles)) for head in of_part]
    return order


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [0, 1])
@pytest.mark.parametrize("levels", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_packed_tiles(name, levels, dynamic, run):
    for seed, (heads, group), ctas in product(range(2), [(1, 1), (6, 2), (4, 4)], [1, 6, 132]):
        lengths, key_lengths = lengths_of(name, seed), lengths_of(name, seed + 100)
        level_keys = ceil_div(max(key_lengths, default=1) + 1, 32) if levels else 0
        expected = packed_tiles_in_order(lengths, key_lengths, heads, group, level_keys, ctas)
        found = run(
            "varlen_tiles", starts_of(lengths), starts_of(key_lengths), len(lengths), int(sum(lengths)), int(sum(key_lengths)),
            int(max(lengths, default=0)), int(max(key_lengths, default=0)), heads, group, level_keys, dynamic, ctas, seed,
            rows=len(expected),
        )  # fmt: skip
        by_cta = [[tile[1:] for tile in found if tile[0] == cta] for cta in range(ctas)]
        if dynamic:
            each_once([tile[1:] for tile in found], expected)
            place = {tile: n for n, tile in enumerate(expected)}
            for cta, tiles in enumerate(by_cta):
                places = [place[tile] for tile in tiles]
                assert places == sorted(places) and places[:1] == [cta][: len(expected) > cta]
        else:
            assert by_cta == [expected[cta::ctas] for cta in range(ctas)]


def test_packed_lengths_are_cut_to_what_the_call_says(run):
    """Starts that the caller got wrong: no tile beyond max_queries or beyond the packed rows."""
    starts = np.array([0, 500, 400, 3000, -7, 10_000], np.int32)
    found = run("varlen_tiles", starts, starts, 5, 1000, 1000, 600, 600, 2, 1, 0, 0, 3, 0, rows=1000)
    clamped = np.clip(starts, 0, 1000)
    lengths = [min(max(int(b - a), 0), 600) for a, b in zip(clamped[:-1], clamped[1:], strict=True)]
    each_once(
        [tile[1:] for tile in found],
        [(n, h, t) for n, length in enumerate(lengths) for h in range(2) for t in range(ceil_div(length, TILE_ROWS))],
    )


# --- lists of tiles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reversed_order", [0, 1])
@pytest.mark.parametrize("batch, heads, rows, size", [(1, 1, 1, 64), (3, 4, 200, 64), (2, 5, 1024, 128), (7, 1, 63, 32)])
def test_listed_dense_tiles(batch, heads, rows, size, reversed_order, run):
    tiles = ceil_div(rows, size)
    blocks = range(tiles - 1, -1, -1) if reversed_order else range(tiles)
    expected = [(b, h, t) for b in range(batch) for h in range(heads) for t in blocks]
    found = run("listed_tiles", batch, heads, rows, None, 0, size, reversed_order, rows=len(expected))
    assert found == [(n, *tile) for n, tile in enumerate(expected)]


@pytest.mark.parametrize("reversed_order", [0, 1])
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("name", [name for name in LENGTHS if name != "none"])
def test_listed_packed_tiles(name, size, reversed_order, run):
    """Every tile of every sequence once; all other listed tiles lie past the end of their sequence."""
    for seed, heads, spare in product(range(3), (1, 3), (0, 1000)):
        lengths = lengths_of(name, seed)
        starts = starts_of(lengths)
        total = int(starts[-1]) + spare
        found = run(
            "listed_tiles",
            len(lengths),
            heads,
            0,
            starts,
            total,
            size,
            reversed_order,
            rows=heads * (total // size + len(lengths)),
        )
        assert all(0 <= n < len(lengths) and block >= 0 for _, n, _, block in found)
        within = [(n, h, block) for _, n, h, block in found if block * size < lengths[n]]
        each_once(
            within, [(n, h, t) for n, length in enumerate(lengths) for h in range(heads) for t in range(ceil_div(length, size))]
        )


@pytest.mark.parametrize(
    "blocks, sequences, heads, section, last",
    [(1, 1, 1, 1, 0), (5, 2, 3, 4, 1), (5, 2, 3, 4, 0), (7, 1, 12, 12, 0), (4, 3, 5, 100, 0), (9, 2, 8, 3, 5), (9, 2, 8, 3, 3)],
)
def test_tiles_in_sections(blocks, sequences, heads, section, last, run):
    planes = sequences * heads
    found = run("tiles_in_sections", blocks, sequences, heads, section, last, rows=planes * blocks)
    expected = [
        plane * blocks + block
        for first in range(0, (last + 1) * section, section)
        for block in range(blocks)
        for plane in range(first, first + section if first < last * section else planes)
    ]
    assert [index for _, index, _, _ in found] == expected
    firsts = [plane * blocks for plane in range(planes)]
    assert [index for _, _, index, _ in found] == firsts + [index for index in expected if index % blocks]


# --- tiles cut into parts ---------------------------------------------------------------------------------------------------

COSTS = {64: (2, 1, 80), 128: (3, 2, 20)}  # head dim: TileCosts


def cut_tiles(run, tiles, blocks, sms, head_dim):
    return run("tile_cuts", tiles, blocks, sms, *COSTS[head_dim], rows=tiles + 2 * sms)


def time_of(items, sms, tile_cost):
    """The time when the last SM is done; SMs take the items in order."""
    free_at = [0] * sms
    for _, _, blocks, _ in items:
        heapq.heapreplace(free_at, free_at[0] + blocks + tile_cost)
    return max(free_at)


@pytest.mark.parametrize("head_dim", COSTS)
@pytest.mark.parametrize("sms", [1, 7, 132])
@pytest.mark.parametrize("blocks", [1, 5, 64, 1000])
@pytest.mark.parametrize("tiles", [1, 2, 33, 64, 66, 68, 131, 132, 133, 240, 2048])
def test_parts_of_tiles(tiles, blocks, sms, head_dim, run):
    items = cut_tiles(run, tiles, blocks, sms, head_dim)
    tile_cost, least_part, _ = COSTS[head_dim]
    at = 0  # blocks before this one, of all tiles: each comes once, and a tile's parts follow each other
    for tile, first, count, _ in items:
        assert tile * blocks + first == at
        at += count
    assert at == tiles * blocks
    slots = [slot for _, _, _, slot in items if slot >= 0]
    assert slots == list(range(len(slots))) and len(slots) <= sms + sms // 4
    assert all(count >= least_part for _, _, count, slot in items if slot >= 0)
    whole = [(tile, 0, blocks, -1) for tile in range(tiles)]
    assert time_of(items, sms, tile_cost) < time_of(whole, sms, tile_cost) if slots else items == whole


@pytest.mark.parametrize(
    "tiles, blocks, head_dim, cut",
    [
        (2048, 64, 128, 68),  # half a wave is left over: nearly all of it in halves
        (4096, 32, 64, 4),
        (64, 16, 128, 64),  # fewer tiles than SMs
        (2048, 8, 128, 0),  # too short to gain anything
        (4096, 4, 64, 0),
        (128, 64, 128, 0),
        (264, 64, 128, 0),  # whole waves
    ],
)
def test_which_tiles_are_cut(tiles, blocks, head_dim, cut, run):
    items = cut_tiles(run, tiles, blocks, 132, head_dim)
    assert len({tile for tile, _, _, slot in items if slot >= 0}) == cut


# --- blocks that a mask shows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [(0.0, 1.0, 0.0), (0.3, 0.3, 0.4), (0.02, 0.96, 0.02), (1.0, 0.0, 0.0)], ids=str)
@pytest.mark.parametrize("size, across", [(64, 64), (64, 128), (32, 64), (32, 128), (16, 32)])
@pytest.mark.parametrize("along_keys", [0, 1])
@pytest.mark.parametrize("broadcast", [None, 0, 1])
def test_visible_blocks(along_keys, size, across, broadcast, shares, run):
    random = np.random.default_rng(size + across)
    for queries, keys in [(1, 1), (64, 4096), (700, 130), (1000, 5000), (64 * 33, 64 * 70)]:
        full = [ceil_div(queries, 64), ceil_div(keys, 64)]
        sizes = [1 if broadcast == n else tiles for n, tiles in enumerate(full)]
        kinds = random.choice([MIXED, HIDDEN, CLEAR], sizes, p=shares).astype(np.uint8)
        seen = np.broadcast_to(kinds, full)
        along, other = (keys, queries) if along_keys else (queries, keys)
        for _ in range(6):
            from_, blocks = int(random.integers(0, ceil_div(other, across))) * across, ceil_div(along, size)
            begin, end = sorted(int(x) for x in random.integers(0, blocks + 1, 2))
            lines = slice(from_ // 64, min(ceil_div(from_ + across, 64), ceil_div(other, 64)))
            expected = []
            for block in range(begin, end):
                tile = block * size // 64
                under = seen[lines, tile] if along_keys else seen[tile, lines]
                if not (under == HIDDEN).all():
                    expected.append((block, int((under == CLEAR).all()), 0, 0))
            last = min(from_ + across, other)
            found = run("visible_blocks", kinds, *sizes, along_keys, size, from_, last, begin, end, rows=end - begin + 1)
            assert found == expected


LEAST, MOST = -(2**31), 2**31 - 1


@pytest.mark.parametrize("size", [64, 96, 128])
@pytest.mark.parametrize("intervals", [1, 2])
def test_blocks_between_groups_of_bounds(intervals, size, run):
    """Far blocks are passed over by the bounds of whole groups of rows, and none that may be visible is."""
    random = np.random.default_rng(size + intervals)
    group_rows = 2048
    for _ in range(60):
        rows = int(random.integers(1, 80 * group_rows))
        groups, blocks = ceil_div(rows, group_rows), ceil_div(rows, size)
        begins = np.sort(random.integers(0, 1000, (groups, intervals, 2)), -1)
        bounds = np.stack([begins[..., 0], begins[..., 1], begins[..., 0], begins[..., 1]], -1).astype(np.int32)
        bounds[random.random(groups) < random.random()] = [MOST, MOST, LEAST, LEAST]  # empty intervals
        first, last = (int(x) for x in np.sort(random.choice(1001, 2, replace=False)))
        begin, end = (int(x) for x in np.sort(random.choice(blocks + 1, 2, replace=False))) if blocks else (0, 1)
        ((found_begin, found_end, _, _),) = run(
            "narrowed_blocks", bounds, groups, intervals, size, first, last, begin, end, rows=1
        )
        reaching = [
            g for g in range(begin * size // group_rows, (end * size - 1) // group_rows + 1)
            if g < groups and any(not (b[3] <= first or b[0] >= last) for b in bounds[g])
        ]  # fmt: skip
        if not reaching:
            assert found_begin == found_end
            continue
        assert found_begin == max(begin, reaching[0] * group_rows // size)
        assert found_end == min(end, ceil_div((reaching[-1] + 1) * group_rows, size))


@pytest.mark.parametrize("tile_keys", [0, 64, 128])
@pytest.mark.parametrize("query_intervals, key_intervals", [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("transposed", [0, 1])
def test_words_of_sparsity(transposed, query_intervals, key_intervals, tile_keys, run):
    """Every bit of the words that stand for a tile, bounds of any value among them. Blocks of 96 keys begin anywhere in the
    tiles of a list."""
    random = np.random.default_rng(query_intervals + 3 * key_intervals)
    for _ in range(40):
        queries, keys = (int(x) for x in random.integers(1, 300, 2))
        bounds = [random.integers(-3, most + 4, (n, max(i, 1), 2)) for n, i, most in (
            (queries, query_intervals, keys), (keys, key_intervals, queries))]  # fmt: skip
        for one in bounds:
            far = random.random(one.shape) < 0.03
            one[far] = random.choice([LEAST, MOST], far.sum())
        places = [np.arange(keys), np.arange(queries)]
        inside = [
            ((one[..., :1] <= p) & (p < one[..., 1:])).any(1) if i else np.ones((len(one), len(p)), bool)
            for one, p, i in zip(bounds, places, (query_intervals, key_intervals), strict=True)
        ]
        shown = inside[0] & inside[1].T
        query = int(random.integers(0, ceil_div(queries, 64))) * 64
        step = 64 if transposed else 32
        key = int(random.integers(0, ceil_div(keys, step))) * step
        tiles = None
        if tile_keys:
            tiles = random.integers(0, 2, (ceil_div(queries, 64), ceil_div(keys, tile_keys)), dtype=np.uint8)
            shown &= tiles.repeat(64, 0)[:queries].repeat(tile_keys, 1)[:, :keys].astype(bool)
        given = [one.astype(np.int32).reshape(len(one), -1) for one in bounds]
        found = run(
            "sparse_words", given[0], query_intervals, queries, given[1], key_intervals, keys, tiles, tile_keys, query, key,
            transposed, rows=128,
        )  # fmt: skip
        for group, lane, word, _ in found:
            for bit in range(32):
                q, k = place_of_bit(transposed, group, lane, bit)
                if query + q < queries and key + k < keys:
                    assert word >> bit & 1 == shown[query + q, key + k], (group, lane, bit)


def place_of_bit(transposed, group, lane, bit):
    """(query, key) within the tile, as MaskBits and TransposedMaskBits say."""
    if not transposed:
        return 16 * group + lane // 4 + bit // 2 % 2 * 8, bit // 4 * 8 + lane % 4 * 2 + bit % 2
    place = 15 - bit % 16
    return place % 8 * 8 + lane % 4 * 2 + bit // 16, 16 * group + (1 - place // 8) * 8 + lane // 4


@pytest.mark.thin(3)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("batch, heads, group", [(1, 1, 1), (3, 2, 1), (2, 12, 4), (1, 64, 8)])
@pytest.mark.parametrize("queries, keys", [(1, 1), (129, 4000), (4096, 4097)])
def test_claimed_tiles(window, batch, heads, group, queries, keys, run):
    for tile_rows, offset in product((64, 128, 192), (0, keys - queries)):
        problem = dict(batch=batch, heads=heads, queries=queries, keys=keys, window=window, offset=offset)
        row_tiles, even, section, last = schedule_of(run, **problem, tile_rows=tile_rows, ctas=132, group=group)
        found = run("claimed_tiles", batch, heads, row_tiles, even, section, last, rows=batch * heads * row_tiles)
        each_once([tile[:3] for tile in found], product(range(batch), range(heads), range(row_tiles)))
        check_order_of_dense_tiles([tile[:3] for tile in found], batch, heads, row_tiles, even, section, last, 0)


# --- batches -----------------------------------------------------------------------------------------------------------------


def addresses(sizes, tensor_sizes, strides):
    """The offset of every index of the batch dimensions, in order."""
    return [
        sum(i * stride for i, size, stride in zip(index, tensor_sizes, strides, strict=True) if size != 1)
        for index in product(*map(range, sizes))
    ]


def random_batch(random):
    sizes = [int(x) for x in random.choice([1, 1, 2, 3, 5], random.integers(1, 5))]
    of_tensors = []
    for _ in range(random.integers(1, 5)):
        tensor = [1 if random.random() < 0.2 else size for size in sizes]
        order = list(range(len(sizes))) if random.random() < 0.6 else list(random.permutation(len(sizes)))
        strides, step = [0] * len(sizes), int(random.integers(1, 4)) * 8
        for i in reversed(order):
            strides[i] = step
            step *= tensor[i] * (2 if random.random() < 0.1 else 1)
        strides = [0 if random.random() < 0.05 else stride for stride in strides]  # expanded
        of_tensors.append((tensor, strides))
    return sizes, of_tensors


def test_fused_batches(run):
    random, fused = np.random.default_rng(0), 0
    for _ in range(2000):
        sizes, of_tensors = random_batch(random)
        count, tensors = int(np.prod(sizes)), len(of_tensors)
        tensor_sizes, strides = (np.array([tensor[n] for tensor in of_tensors], np.int64) for n in (0, 1))
        found = run(
            "fused_batches",
            tensors,
            len(sizes),
            np.array(sizes, np.int64),
            tensor_sizes,
            strides,
            rows=1 + tensors + tensors * count,
        )
        inner, outer, _, _ = found[0]
        assert inner * outer == count
        fused += outer == 1 and len(sizes) > 1
        for n, (tensor, stride) in enumerate(of_tensors):
            step = found[1 + n][0]
            visits = [row for row in found[1 + tensors :] if row[1] == n]
            ours = [offset + i * step for _, _, offset, _ in visits for i in range(inner)]
            assert ours == addresses(sizes, tensor, stride)
            # Only the first visit of a part of a tensor is flagged as the first.
            seen = set()
            for _, _, offset, first in visits:
                part = frozenset(offset + i * step for i in range(inner))
                assert bool(first) == part.isdisjoint(seen)
                seen |= part
    assert fused > 200
