"""These tests ask whether a step of decoding on CUDA has the same bits whenever it runs: again, in another batch or other
pages, while another stream runs, as a replay of a graph, with lse or without, and right after other calls."""

from __future__ import annotations

import pytest
import torch
from decode_calls import BFLOAT16, DEVICE, E4M3, E5M2, attend, integers, randn

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]


@pytest.mark.parametrize("heads, queries", [((8, 2), 1), ((32, 8), 4), ((12, 1), 2), ((64, 1), 2)])
@pytest.mark.parametrize("lengths", [(20000,), (9000, 0, 12345), (100, 3000, 17, 7777, 1, 5000, 640)], ids=str)
def test_runs_repeat(lengths, heads, queries):
    query = randn(len(lengths), heads[0], queries, 128)
    caches, lengths = [randn(len(lengths), heads[1], max(lengths), 128) for _ in range(2)], integers(*lengths)
    out, lse = attend(query, *caches, lengths, return_lse=True)
    assert not out.isnan().any() and torch.equal(out, attend(query, *caches, lengths))
    for _ in range(20):
        again = attend(query, *caches, lengths, return_lse=True)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


def test_runs_over_latent_keys_repeat():
    key, lengths = randn(5, 1, 9000, 576), integers(9000, 0, 777, 4096, 64)
    for heads in (16, 128):
        query = randn(5, heads, 1, 576)
        out, lse = attend(query, key, key[..., :512], lengths, return_lse=True)
        assert not out.isnan().any()
        for _ in range(20):
            again = attend(query, key, key[..., :512], lengths, return_lse=True)
            assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("heads, queries", [((16, 2), 4), ((16, 2), 16), ((16, 2), 40)])
def test_runs_of_tiles_repeat_on_two_streams(heads, queries):
    calls = []
    for lengths in ((9000, 0, 12345), (100, 3000, 17, 7777, 1, 5000, 640)):
        caches = [randn(len(lengths), heads[1], max(lengths), 128) for _ in range(2)]
        calls.append((randn(len(lengths), heads[0], queries, 128), *caches, integers(*lengths)))
    wanted = [attend(*call, return_lse=True) for call in calls]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in calls], []
    for _ in range(20):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(attend(*call, return_lse=True))
    torch.cuda.synchronize()
    for n, result in enumerate(found):
        assert all(map(torch.equal, result, wanted[n % 2]))
    assert not any(tensor.isnan().any() for pair in wanted for tensor in pair)


@pytest.mark.parametrize("options", [{}, {"window": (300, None)}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("heads, queries", [((8, 2), 1), ((12, 1), 3)])
@pytest.mark.parametrize("splits", [2, 3, 64])
def test_a_sequence_in_pieces_has_its_bits_in_any_batch_and_pages(splits, heads, queries, options):
    lengths, capacity, head_dim = (1, 70, 4000, 640, 0, 1337, 12000), 12288, 64
    options = options | {"num_splits": splits, "return_lse": True}
    query = randn(len(lengths), heads[0], queries, head_dim)
    caches = [randn(len(lengths), heads[1], capacity, head_dim) for _ in range(2)]
    every, lengths = attend(query, *caches, integers(*lengths), **options), integers(*lengths)
    for n in range(len(lengths)):
        alone = attend(*(t[n : n + 1] for t in (query, *caches, lengths)), **options)
        assert all(torch.equal(own[0], of_all[n]) for own, of_all in zip(alone, every, strict=True)), n
    order = torch.randperm(len(lengths), device=DEVICE)
    moved = attend(*(t[order] for t in (query, *caches, lengths)), **options)
    assert all(torch.equal(own, of_all[order]) for own, of_all in zip(moved, every, strict=True))
    for page in (3, 16, 256):
        entries = capacity // page
        places = torch.randperm(len(lengths) * entries, device=DEVICE)
        pools = [c.view(len(lengths), heads[1], entries, page, -1).transpose(1, 2).flatten(0, 1)[places] for c in caches]
        table = places.argsort().view(len(lengths), entries).int()
        found = attend(query, *pools, lengths, block_table=table, **options)
        assert all(map(torch.equal, found, every)), page


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("cache_dtype", [BFLOAT16, E4M3], ids=str)
def test_lse_wanted_or_not(cache_dtype, splits):
    query, caches = randn(5, 8, 1, 128), [randn(5, 2, 3000, 128).to(cache_dtype) for _ in range(2)]
    for options in ({}, {"window": (100, None)}, {"softcap": 3.0}, {"sinks": torch.zeros(8, device=DEVICE)}):
        for now in ((3000, 1, 0, 2999, 64), (0, 0, 0, 0, 7)):
            arguments, options = (query, *caches, integers(*now)), options | {"num_splits": splits}
            assert torch.equal(attend(*arguments, **options), attend(*arguments, **options, return_lse=True)[0])


@pytest.mark.parametrize("cache_dtype", [BFLOAT16, E5M2], ids=str)
@pytest.mark.parametrize("heads, packed", [((40, 8), False), ((16, 1), True)])
@pytest.mark.parametrize("splits", [None, 4])
def test_a_graph_is_replayed_at_other_lengths(splits, heads, packed, cache_dtype):
    """Lengths, tables and the starts of packed queries: the shares of all CTAs move with them."""
    batch, entries, head_dim = 35, 40, 128
    caches = [randn(700, heads[1], 16, head_dim).to(cache_dtype) for _ in range(2)]
    lengths, table = (torch.zeros(shape, dtype=torch.int32, device=DEVICE) for shape in (batch, (batch, entries)))
    query = randn(batch, heads[0], head_dim) if packed else randn(batch, heads[0], 1, head_dim)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    options = {"cu_seqlens_q": starts, "max_seqlen_q": 3} if packed else {}

    def step():
        return attend(query, *caches, lengths, block_table=table, num_splits=splits, **options)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for most in (0, 1, 640, 16, 10**6, 300):
        lengths.copy_(torch.randint(-3, most + 1, (batch,)))
        table.copy_(torch.randint(0, 700, (batch, entries)))
        if packed and most != 1:
            starts.copy_(torch.randint(0, batch + 1, (batch + 1,)).sort().values)
        graph.replay()
        assert torch.equal(out, step()) and not out.isnan().any(), most


@pytest.mark.parametrize("queries", [3, 20])
@pytest.mark.parametrize("packed", [False, True])
def test_a_graph_of_tiles_is_replayed_at_other_lengths(packed, queries):
    batch, entries = 9, 200
    caches = [randn(700, 2, 16, 128) for _ in range(2)]
    lengths, table = (torch.zeros(shape, dtype=torch.int32, device=DEVICE) for shape in (batch, (batch, entries)))
    query = randn(batch * queries, 16, 128) if packed else randn(batch, 16, queries, 128)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * queries
    options = {"cu_seqlens_q": starts, "max_seqlen_q": queries} if packed else {}

    def step():
        return attend(query, *caches, lengths, block_table=table, **options)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for most in (0, 1, 3200, 64, 10**6, 700):
        lengths.copy_(torch.randint(-3, most + 1, (batch,)))
        table.copy_(torch.randint(0, 700, (batch, entries)))
        if packed and most != 1:
            starts.copy_(torch.randint(0, batch * queries + 1, (batch + 1,)).sort().values)
        graph.replay()
        assert torch.equal(out, step()) and not out.isnan().any(), most


def test_calls_chained_without_a_wait():
    """Each kernel may start before the one in front of it has ended: the last call's results are those of a call alone."""
    sizes = [((1, 8, 1), 30000), ((7, 8, 2), 900), ((1, 16, 2), 20000), ((3, 8, 1), 65)]
    calls = [
        (randn(*shape, 64), randn(shape[0], 1, keys, 64), randn(shape[0], 1, keys, 64), integers(*[keys - 1] * shape[0]))
        for shape, keys in sizes
    ]
    wanted = []
    for call in calls:
        wanted.append(attend(*call, return_lse=True))
        torch.cuda.synchronize()
    for _ in range(30):
        found = [attend(*call, return_lse=True) for call in calls]
        for ours, expected in zip(found, wanted, strict=True):
            assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("splits", [2, 16])
@pytest.mark.parametrize("heads, head_dim", [((8, 2), 64), ((4, 4), 256)], ids=str)
def test_full_caches_have_the_bits_that_they_have_with_lengths(heads, head_dim, splits):
    """Without a length, which the host could know, and in pages."""
    query, caches = randn(3, heads[0], 1, head_dim), [randn(3, heads[1], 2048, head_dim) for _ in range(2)]
    wanted = attend(query, *caches, None, num_splits=splits, return_lse=True)
    assert all(map(torch.equal, attend(query, *caches, integers(2048, 2048, 2048), num_splits=splits, return_lse=True), wanted))
    pools = [cache.unflatten(2, (8, 256)).transpose(1, 2).flatten(0, 1).contiguous() for cache in caches]
    table = torch.arange(24, dtype=torch.int32, device=DEVICE).view(3, 8)
    paged = attend(query, *pools, integers(2048, 2048, 2048), block_table=table, num_splits=splits, return_lse=True)
    assert all(map(torch.equal, paged, wanted))
