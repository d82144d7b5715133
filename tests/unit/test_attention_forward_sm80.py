"""The general forward kernels, for GPUs before Hopper, thread by thread on the host, against float64: results, the data of each
thread, and that a thread waits for its copies. device_on_host/ has the fibers that stand for threads."""

from __future__ import annotations

import ctypes
import itertools

import kernels_on_host
import pytest
import torch
from block_cases import random_tiles
from kernels_on_host import (
    ALL_OPTIONS,
    DTYPES,
    PLAIN,
    ROW_LAYOUTS,
    SMALL_TILE,
    AttentionProblem,
    SpanView,
    Visibility,
    apart,
    at_the_end_of_a_page,
    draw,
    moved,
    problem_of,
    seen_keys,
    tile_of,
    view,
)
from span_cases import far_spans, random_spans

from flash_online import reference, testing

kernels_on_host.require_sources()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """kernels(head dim): the library of its forward kernels."""
    return kernels_on_host.attention_kernels(tmp_path_factory.mktemp("forward_sm80"), "forward_sm80.cpp")


def run(library, query, key, value, *, starts=None, room=227, **given):
    """(out, lse, kind of kernel) of problem_of's arguments, with `room` KiB of shared memory."""
    packed = starts is not None
    out = torch.full((*query.shape[:-1], value.shape[-1]), torch.nan, dtype=query.dtype)
    lse = torch.full((1, query.shape[1], query.shape[0]) if packed else query.shape[:-1], torch.nan)
    begins = torch.tensor(starts, dtype=torch.int32) if packed else None
    problem = problem_of(query, key, value, out, lse, starts=begins, **given)
    library.set_shared_bytes(room << 10)
    kind = library.attention_forward(ctypes.byref(problem))
    assert kind >= 0, library.last_error().decode()
    return out, lse, kind


def check(got, inputs, name="out", **options):
    """Compares (out, lse, ...) with float64; `options` are the reference's."""
    out, lse, *_ = got
    plain, truth = (
        reference.attention(*(t.to(kind) for t in inputs), return_lse=True, **options) for kind in (out.dtype, torch.float64)
    )
    testing.assert_close_to_float64(out, plain[0], truth[0], name=name)
    torch.testing.assert_close(lse.double(), truth[1], rtol=2e-6, atol=2e-5)


def slow(*cell):
    return pytest.param(*cell, marks=pytest.mark.slow)  # the kernels of another head dim take five seconds to compile


LENGTHS = [(1, 1), (5, 7), (64, 48), (129, 65), (77, 300), (300, 77), (260, 200), (3, 0)]


@pytest.mark.thin(10)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("room", [227, 163, 99])
@pytest.mark.parametrize("head_dim", [64, 128, *map(slow, (32, 96, 192, 256))])
def test_plain(kernels, head_dim, room, causal, lengths):
    """With the shared memory of three kinds of GPU, where a wide head dim has smaller tiles."""
    dtype = torch.float16 if sum(lengths) % 2 else torch.bfloat16
    inputs = draw(lengths, head_dim, (4, 2), dtype, size=3)
    got = run(kernels(head_dim), *inputs, window=(-1, 0 if causal else -1), room=room)
    assert got[2] == PLAIN
    check(got, inputs, causal=causal)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "head_dim, head_dim_v",
    [(40, 40), (100, 36), slow(72, 72), slow(80, 64), slow(7, 7), slow(192, 128), slow(400, 392)],
    ids=str,
)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (50, 20)], ids=str)
def test_columns_within_a_tile(kernels, head_dim, head_dim_v, window):
    """Head dims that fill no tile, among them some whose rows are not whole vectors."""
    inputs = [apart(t) for t in draw((150, 170), head_dim, head_dim_v=head_dim_v, size=2)]
    got = run(kernels(tile_of(head_dim)), *inputs, window=window)
    check(got, inputs, window=tuple(None if w < 0 else w for w in window))


@pytest.mark.thin(3)
@pytest.mark.parametrize("window, offset", [((-1, 0), 90), ((-1, 0), -40), ((70, 20), 0), ((30, -1), 7), ((0, 0), 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_windows_and_offsets(kernels, head_dim, window, offset):
    inputs = draw((180, 260), head_dim, (4, 1), size=3)
    out, lse, _ = run(kernels(head_dim), *inputs, window=window, offset=offset)
    check((out, lse), inputs, mask=seen_keys(180, 260, window, offset))


@pytest.mark.thin(3)
@pytest.mark.parametrize("layout", ROW_LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_layouts(kernels, head_dim, layout):
    """The same bits wherever rows lie in memory."""
    inputs = draw((140, 200), head_dim)
    expected = run(kernels(head_dim), *inputs, window=(-1, 0))

    out, lse, _ = run(kernels(head_dim), *(moved(t, layout) for t in inputs), window=(-1, 0))
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.thin(4)
@pytest.mark.parametrize("head_dim", [64, *map(slow, (96, 192))])
@pytest.mark.parametrize("window", [(-1, 0), (60, 20)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_cuts_of_the_sequence(kernels, head_dim, window, dtype):
    """A row has the same bits wherever it is in a tile, and whatever rows are in its tile."""
    query, key, value = draw((230, 230), head_dim, dtype=dtype)
    key = (key.float() * torch.linspace(0.2, 6, 230).square()[:, None]).to(dtype)  # maxima rise along the keys
    expected = run(kernels(head_dim), query, key, value, window=window)
    for begin, end in [(0, 1), (4, 21), (100, 201)]:
        keys = min(end + window[1], 230)
        got = run(kernels(head_dim), query[:, :, begin:end], key[:, :, :keys], value[:, :, :keys], window=window, offset=begin)
        for one, whole in zip(got[:2], expected[:2], strict=True):
            assert torch.equal(one, whole[:, :, begin:end]), f"rows {begin} to {end}"


@pytest.mark.thin(4)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_packed(kernels, head_dim, causal):
    starts = [0, 70, 70, 71, 300]
    query, key, value = (t[0].transpose(0, 1).contiguous() for t in draw((310, 310), head_dim, (4, 2)))
    for t in (query, key, value):
        t[300:] = torch.nan
    out, lse, _ = run(kernels(head_dim), query, key, value, starts=starts, window=(-1, 0 if causal else -1))
    assert torch.equal(out[300:], torch.zeros_like(out[300:])) and (lse[:, :, 300:] == -torch.inf).all()
    for begin, end in itertools.pairwise(starts):
        if end > begin:
            inputs = [t[begin:end].transpose(0, 1)[None] for t in (query, key, value)]
            check((out[begin:end].transpose(0, 1)[None], lse[:, :, begin:end]), inputs, causal=causal)


@pytest.mark.thin(6)
@pytest.mark.parametrize("kind", ["bool", "float", "float32", "softcap", "alibi", "spans", "tiles of 64", "tiles of 128"])
@pytest.mark.parametrize("head_dim", [64, *map(slow, (96, 256))])
@pytest.mark.parametrize("room", [227, 99])
def test_options(kernels, head_dim, kind, room):
    """With a GPU's shared memory of 99 KiB too, where a wide head dim has a smaller tile."""
    inputs = draw((150, 170), head_dim, dtype=torch.bfloat16, size=2)
    g = torch.Generator().manual_seed(3)
    given, options = {"room": room}, {}
    if kind == "bool":
        given["mask"] = torch.rand(1, 1, 150, 170, generator=g) > 0.4
        given["mask"][..., 3] = True
    elif kind.startswith("float"):
        given["mask"] = torch.randn(1, 2, 150, 170, generator=g).to(torch.float32 if kind == "float32" else torch.bfloat16)
    elif kind == "softcap":
        given["softcap"] = options["softcap"] = 4.0
    else:
        given["slopes"] = options["alibi_slopes"] = torch.tensor([0.3, 0.02])
    if "mask" in given:
        options["mask"] = given["mask"]
    if kind == "spans":
        spans = {"query_spans": random_spans(g, (2,), 150, 170, 2), "key_spans": random_spans(g, (1,), 170, 150, 1)}
        given |= {name: t.expand(2, -1, -1) for name, t in spans.items()}
        options |= spans
    if kind.startswith("tiles"):
        tile_keys = int(kind.split()[-1])
        tiles, options["mask"] = random_tiles(g, 2, (150, 170), tile_keys)
        given["blocks"] = tiles, tile_keys
    got = run(kernels(head_dim), *inputs, window=(-1, 0), **given)
    assert got[2] == (SMALL_TILE if room == 99 and head_dim == 256 and "mask" in given else ALL_OPTIONS)
    if kind.startswith("float"):
        options["mask"] = options["mask"].double()
    check(got, inputs, causal=True, **options)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("intervals", [1, 2])
def test_far_keys(kernels, heads, intervals):
    """Groups of 32 tiles of keys before and after those that are seen are passed over."""
    inputs = draw((70, 4600), 64, size=2)
    spans = far_spans(torch.Generator().manual_seed(heads), (heads,), 4600, 70, intervals)
    check(run(kernels(64), *inputs, key_spans=spans.expand(2, -1, -1)), inputs, key_spans=spans)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_scores_in_some_rows(kernels, head_dim):
    """Scores past 2^26, where a maximum's rounding is more than one, in a warp whose other rows have small ones."""
    query, key, value = draw((100, 130), head_dim)
    query[:, :, 5] *= 1e8
    query[:, :, 40:44] *= 1e9
    check(run(kernels(head_dim), query, key, value), (query, key, value))
    check(run(kernels(head_dim), query, key, value, window=(-1, 0)), (query, key, value), causal=True)


def test_nan_stays_in_its_row(kernels):
    query, key, value = draw((70, 90), 64)
    query[:, :, 9, 3] = torch.nan
    out, lse, _ = run(kernels(64), query, key, value)
    assert out[:, :, 9].isnan().all() and lse[:, :, 9].isnan().all()
    rest = torch.arange(70) != 9
    check((out[:, :, rest], lse[:, :, rest]), (query[:, :, rest], key, value))


@pytest.mark.thin(4)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("page, head_dim", [(16, 64), (7, 64), (16, 40), (64, 128)], ids=str)
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("intervals", [0, 1, 2])
def test_cached_keys(kernels, cache_dtype, page, head_dim, queries, intervals):
    """Pages of a pool, float8 ones too, which wait in shared memory to be widened; with intervals of keys per query."""
    g = torch.Generator().manual_seed(1)
    lengths, heads, key_heads = (150, 0, 70), 4, 2
    entries = -(-max(lengths) // page)
    table = torch.randperm(entries * len(lengths), generator=g).to(torch.int32).view(len(lengths), entries)
    query = torch.randn(len(lengths), heads, queries, head_dim, generator=g).bfloat16()
    key, value = (
        torch.randn(table.numel(), key_heads, page, head_dim, generator=g).bfloat16().to(cache_dtype) for _ in range(2)
    )
    counts = torch.tensor(lengths, dtype=torch.int32)
    scales = [torch.rand(len(lengths), key_heads, generator=g) + 0.5 for _ in range(2)]
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:-1], torch.nan)
    problem = AttentionProblem(
        dtype=DTYPES[torch.bfloat16], batch=len(lengths), heads=heads, key_heads=key_heads, value_heads=key_heads,
        queries=queries, keys=entries * page, head_dim=head_dim, head_dim_v=head_dim, query=view(query), key=view(key),
        value=view(value), out=view(out), visible=Visibility(-1, -1, 0), scale=head_dim**-0.5, lse=lse.data_ptr(),
    )  # fmt: skip
    problem.lse_stride[0], problem.lse_stride[1] = lse.stride()[:2]
    cache = problem.cache
    cache.page, cache.blocks, cache.entries, cache.dtype, cache.kv_splits = page, table.numel(), entries, DTYPES[cache_dtype], 1
    cache.table, cache.table_rows, cache.table_stride = table.data_ptr(), len(lengths), entries
    cache.lengths = counts.data_ptr()
    if cache_dtype.itemsize == 1:
        cache.key_scale, cache.value_scale = (x.data_ptr() for x in scales)
        cache.key_scale_stride[:] = cache.value_scale_stride[:] = scales[0].stride()
    options = {}
    if intervals:
        options["query_spans"] = spans = random_spans(g, (heads,), queries, max(lengths), intervals)
        problem.query_spans = SpanView(spans.data_ptr(), (0, *spans.stride()[:2]), intervals)
    library = kernels(tile_of(head_dim))
    library.set_shared_bytes(227 << 10)
    assert library.attention_cached(ctypes.byref(problem)) == 0, library.last_error().decode()
    for n, length in enumerate(lengths):
        rows = []
        for pool, scale in zip((key, value), scales, strict=True):
            keys = pool[table[n].long()].float().transpose(0, 1).flatten(1, 2)[:, :length]
            rows.append((keys * scale[n, :, None, None] if cache_dtype.itemsize == 1 else keys)[None])
        inputs = (query[n : n + 1].float(), *rows)
        check((out[n : n + 1], lse[n : n + 1]), inputs, name=f"sequence {n}", **options)


@pytest.mark.parametrize(
    "head_dim, lengths", [(64, (130, 200)), (128, (70, 129)), slow(96, (300, 77)), slow(392, (64, 80))], ids=str
)
def test_reads_stay_within_the_tensors(kernels, head_dim, lengths):
    library, inputs = kernels(tile_of(head_dim)), draw(lengths, head_dim)
    kernels_on_host.assert_runs_in_a_child(lambda: run(library, *(at_the_end_of_a_page(t) for t in inputs)))
