"""Cached keys on CUDA: graphs, whose lengths and tables the device reads, so that one serves every step; streams at once."""

from __future__ import annotations

import pytest
import torch
from cache_cases import random_prefill

import flash_online

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]


@pytest.mark.parametrize("splits", [None, 1, 4])
def test_a_graph_is_replayed_at_other_lengths_and_tables(splits):
    def randn(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    query, key, value, angles = randn(3, 4, 1, 64), randn(3, 2, 1, 64), randn(3, 2, 1, 64), randn(900, 32)
    caches = [randn(200, 2, 16, 64) for _ in range(2)]
    lengths, table = (torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in (3, (3, 57)))
    options = {"key": key, "value": value, "rotary": (angles.cos(), angles.sin(), True), "num_splits": splits}

    def step(caches):
        return flash_online.kvcache_attention(query, *caches, lengths, block_table=table, **options)

    step([cache.clone() for cache in caches])  # the allocator and the kernels are ready
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(caches)
    for now in ((0, 0, 0), (5, 899, 300), (900, 17, 16), (-3, 2**31 - 1, 450)):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        table.copy_(torch.randperm(200)[: table.numel()].view(table.shape))
        eager = [cache.clone() for cache in caches]
        wanted = step(eager)
        graph.replay()
        assert torch.equal(out, wanted) and all(map(torch.equal, caches, eager)), (now, splits)
        assert not out.isnan().any() and out.any()


@pytest.mark.parametrize("splits", [None, 1, 4])
@pytest.mark.parametrize("page", [None, 16])
def test_a_graph_of_a_step_alone(page, splits):
    """attention_decode, which writes no lse: the bits of the call that does, whatever the lengths are at the replay."""
    query = torch.randn(3, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    shape = (3, 2, 912, 64) if page is None else (200, 2, page, 64)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    lengths = torch.zeros(3, dtype=torch.int32, device="cuda")
    table = None if page is None else torch.zeros(3, 57, dtype=torch.int32, device="cuda")
    options = {"block_table": table, "num_splits": splits, "window": (500, 0)}

    def step(**more):
        return flash_online.kvcache_attention(query, *caches, lengths, **options, **more)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for now in ((0, 0, 0), (5, 911, 300), (912, 17, 16), (-3, 2**31 - 1, 450)):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        if table is not None:
            table.copy_(torch.randperm(200)[: table.numel()].view(table.shape))
        graph.replay()
        wanted, _ = step(return_lse=True)
        assert torch.equal(out, wanted) and torch.equal(out, step()), (now, splits)
        assert not out.isnan().any() and out.any() == any(n > 0 for n in now)


def test_two_streams_at_once():
    """Each call has a workspace of its own for the results of its pieces."""
    caches = [torch.randn(2, 2, 4000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    queries = [torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    wanted = [flash_online.kvcache_attention(query, *caches, 3990, num_splits=9, return_lse=True) for query in queries]
    streams = [torch.cuda.Stream() for _ in queries]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream, query in zip(streams, queries, strict=True):
            with torch.cuda.stream(stream):
                found.append(flash_online.kvcache_attention(query, *caches, 3990, num_splits=9, return_lse=True))
        torch.cuda.synchronize()
        for ours, expected in zip(found, wanted, strict=True):
            assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_random_prefills(first):
    for seed in range(first, first + 20):
        random_prefill(seed).check(flash_online.kvcache_attention, "cuda")


@pytest.mark.parametrize("options", [{}, {"window": (500, 0)}, {"softcap": 20.0}])
@pytest.mark.parametrize("dtype, head_dim", [(torch.bfloat16, 128), (torch.float16, 64)])
def test_rows_of_a_prefill_have_the_same_bits_alone_packed_and_in_pages(dtype, head_dim, options):
    """In one piece: however large the pages are and wherever they lie."""
    batch, queries, heads, key_heads, capacity = 3, 150, 8, 2, 1344

    def randn(*shape):
        return torch.randn(shape, device="cuda", dtype=dtype)

    query = randn(batch, queries, heads, head_dim).transpose(1, 2)
    caches = [randn(batch, key_heads, capacity, head_dim) for _ in range(2)]
    lengths = torch.tensor([1300, 640, 149], dtype=torch.int32, device="cuda")
    options = options | {"num_splits": 1, "return_lse": True}
    wanted = flash_online.kvcache_attention(query, *caches, lengths, **options)
    for n in range(batch):
        own = [tensor[n : n + 1] for tensor in (query, *caches, lengths)]
        alone = flash_online.kvcache_attention(*own, **options)
        assert all(torch.equal(found, of_all[n : n + 1]) for found, of_all in zip(alone, wanted, strict=True)), n
    for page in (8, 16, 64, 192, 448):
        entries = capacity // page
        order = torch.randperm(batch * entries, device="cuda")
        pools = [cache.view(batch, key_heads, entries, page, head_dim).transpose(1, 2).flatten(0, 1)[order] for cache in caches]
        table = order.argsort().view(batch, entries).int()
        found = flash_online.kvcache_attention(query, *pools, lengths, block_table=table, **options)
        assert all(map(torch.equal, found, wanted)), page
    packed = query.transpose(1, 2).flatten(0, 1)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * queries
    found = flash_online.kvcache_attention(packed, *caches, lengths, cu_seqlens_q=starts, max_seqlen_q=queries, **options)
    assert torch.equal(found[0].view(batch, queries, heads, head_dim).transpose(1, 2), wanted[0])


@pytest.mark.parametrize("options", [{}, {"window": (9, None)}, {"softcap": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_step_by_step_is_the_prefill_in_16_bits(dtype, options):
    query, key, value = (torch.randn(2, heads, 40, 64, device="cuda", dtype=dtype) for heads in (6, 2, 2))
    caches = [torch.full((2, 2, 56, 64), torch.nan, device="cuda", dtype=dtype) for _ in range(2)]
    options = options | {"num_splits": 1}
    whole = flash_online.kvcache_attention(query, *(c.clone() for c in caches), 0, key=key, value=value, **options)
    for i in range(40):
        new = {"key": key[:, :, i : i + 1], "value": value[:, :, i : i + 1]}
        step = flash_online.kvcache_attention(query[:, :, i : i + 1], *caches, i, **new, **options)
        assert torch.equal(step, whole[:, :, i : i + 1]), i


def test_a_graph_of_prefills_is_replayed_at_other_lengths():
    query = torch.randn(3, 8, 150, 64, device="cuda", dtype=torch.bfloat16)
    caches = [torch.randn(3, 2, 1344, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    lengths = torch.zeros(3, dtype=torch.int32, device="cuda")

    def step():
        return flash_online.kvcache_attention(query, *caches, lengths)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for now in ((0, 0, 0), (1344, 17, 700), (-3, 2**31 - 1, 450)):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, step()) and not out.isnan().any(), now
