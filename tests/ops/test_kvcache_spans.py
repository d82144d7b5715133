"""query_spans over cached keys on the CPU: kvcache_attention against the oracle, varlen_attention over pools, what determines
the bits, compiled calls, and errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import CachedProblem, random_cached, random_prefill
from instruction_sets import run_tests, skip_unless_lesser

import flash_online
from flash_online import reference
from flash_online.testing import assert_close_to_float64

CPU = pytest.mark.parametrize("device", ["cpu"])


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_problems(first, cache_device):
    """Pages, leftpad, packed queries, float8 caches, pieces, `out`: bounds of any order, some beyond the cache."""
    for seed in range(first, first + 20):
        problem = replace(random_cached(seed, cache_device), spans=1 + seed % 2)
        problem.check(flash_online.kvcache_attention, cache_device)


@pytest.mark.parametrize("seed", range(12))
def test_many_queries(seed, cache_device):
    replace(random_prefill(seed), spans=1 + seed % 2).check(flash_online.kvcache_attention, cache_device)


@CPU
@pytest.mark.parametrize("splits", [None, 1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_everything_and_nothing(dtype, splits, device):
    """Spans that hide nothing change no bit, and those that hide everything leave 0, and the sink."""
    problem = CachedProblem(
        dtype=dtype, heads=(4, 2), head_dims=(64, 40), lengths=((700, 2, 2), (30, 2, 2), (65, 2, 2)), capacity=710, page=16,
        options={"num_splits": splits}, sinks=True,
    )  # fmt: skip
    made = problem.make()
    run = lambda **words: flash_online.kvcache_attention(  # noqa: E731
        made.query, *made.caches, made.cache_seqlens, **made.options, return_lse=True, **words
    )
    plain = run()
    made = problem.make()
    for one, other in zip(run(query_spans=torch.tensor([[0, 2**31 - 1]] * 2, dtype=torch.int32)), plain, strict=True):
        assert torch.equal(one, other)
    made = problem.make()
    out, lse = run(query_spans=torch.zeros(2, 4, dtype=torch.int32))
    assert not out.any() and torch.equal(lse, made.options["sinks"][:, None].expand_as(lse))


@CPU
def test_a_tree_of_drafts_over_a_cache(device):
    """What the argument is for: tokens of a draft tree see the cache and their ancestors. Positions count from the cache's
    first key, leftpad included."""
    g = torch.Generator().manual_seed(0)
    parents = [-1, 0, 0, 1]  # rows of the draft; a row of depth d has d ancestors
    old, draft, heads, width = 90, 4, 4, 32
    query, key, value = (torch.randn(2, heads, draft, width, generator=g) for _ in range(3))
    caches = [torch.randn(2, heads, 128, width, generator=g) for _ in range(2)]
    ancestors = torch.eye(draft, dtype=torch.bool)
    for n, parent in enumerate(parents):
        if parent >= 0:
            ancestors[n] |= ancestors[parent]
    # Row 2 sees 0 and itself, and row 3 sees 0, 1 and itself: two intervals say both.
    own = torch.tensor([[0, 1, 0, 0], [0, 2, 0, 0], [0, 1, 2, 3], [0, 2, 3, 4]], dtype=torch.int32)
    left = torch.tensor([5, 0], dtype=torch.int32)
    given = own + torch.where(own[:, 1::2].repeat_interleave(2, -1) > 0, old, 0)
    given[:, 0] = 0
    given = given.to(torch.int32)
    out = flash_online.kvcache_attention(
        query, *caches, old, key=key, value=value, leftpad=left, causal=False, query_spans=given
    )
    mask = torch.ones(2, 1, draft, old + draft, dtype=torch.bool)
    mask[..., old:] = ancestors
    mask[0, :, :, :5] = False
    full = [cache[:, :, : old + draft] for cache in caches]
    expected = flash_online.attention(query, *full, mask=mask)
    assert_close_to_float64(out, expected, reference.attention(query.double(), *(t.double() for t in full), mask=mask))


@CPU
@pytest.mark.parametrize("paged", [False, True])
def test_varlen_over_pools(paged, device):
    """Positions are those inside the sequence; used queries and keys are fewer than the packed ones."""
    g = torch.Generator().manual_seed(1)
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 45, 52], [0, 40, 90, 100]))
    used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in ([5, 33, 7], [33, 50, 0]))
    query = torch.randn(60, 4, 16, generator=g)
    key, value = (torch.randn(*((10, 16) if paged else (100,)), 2, 16, generator=g) for _ in range(2))
    given = torch.randint(0, 50, (4, 60, 2), generator=g, dtype=torch.int32).sort(-1).values
    words = {"seqused_q": used_q, "seqused_k": used_k, "query_spans": given, "window": (30, 9), "return_lse": True}
    if paged:
        words["block_table"] = torch.randint(0, 10, (3, 4), generator=g, dtype=torch.int32)
    call = (starts_q, None if paged else starts_k, 40, 50)
    ours = flash_online.varlen_attention(query, key, value, *call, **words)
    plain, truth = (
        reference.varlen_attention(query.to(d), key.to(d), value.to(d), *call, **words) for d in (torch.float32, torch.float64)
    )
    for one, other, true in zip(ours, plain, truth, strict=True):
        assert_close_to_float64(one, other, true)


@CPU
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, device):
    problem = CachedProblem(lengths=((90, 3, 3), (7, 3, 3)), capacity=130, page=16, spans=2, head_dims=(32, 32), seed=3)
    made, other = problem.make(), problem.make()
    compiled = torch.compile(flash_online.kvcache_attention, fullgraph=True, dynamic=dynamic)
    given = (compiled(made.query, *made.caches, made.cache_seqlens, **made.options),)
    expected = flash_online.kvcache_attention(other.query, *other.caches, other.cache_seqlens, **other.options)
    assert torch.equal(given[0], expected)


@CPU
def test_errors_come_before_anything_is_written(device):
    made = CachedProblem(lengths=((7, 2, 2), (0, 2, 2)), heads=(4, 2)).make()
    before = [buffer.clone() for buffer in made.buffers]
    good = torch.zeros(2, 2, dtype=torch.int32)
    for given, error, message in [
        ([[0, 1]], TypeError, "query_spans: expected a Tensor"),
        (good.long(), flash_online.InvalidArgument, "query_spans: expected dtype int32"),
        (good[:1], flash_online.InvalidArgument, "query_spans: expected the length 2"),
        (good.expand(3, 2, 2), flash_online.InvalidArgument, "query_spans: expected 1 or query's 4 heads"),
        (good.expand(3, 1, 2, 2), flash_online.InvalidArgument, "query_spans: expected leading dimensions that broadcast"),
        (good.to("meta"), flash_online.InvalidArgument, "query_spans: expected query's device cpu, got meta"),
    ]:
        with pytest.raises(error, match=message):
            flash_online.kvcache_attention(made.query, *made.caches, made.cache_seqlens, query_spans=given, **made.options)
    for buffer, was in zip(made.buffers, before, strict=True):
        assert torch.equal(buffer.view(torch.uint8), was.view(torch.uint8))


@CPU
def test_errors_of_varlen_over_pools(device):
    rows, starts = torch.randn(6, 4, 8), torch.tensor([0, 6], dtype=torch.int32)
    pool, used = torch.randn(2, 4, 4, 8), torch.tensor([6], dtype=torch.int32)
    for words, message in [
        ({"key_spans": torch.zeros(6, 2, dtype=torch.int32)}, "key_spans: expected None over cached keys"),
        ({"query_spans": torch.zeros(5, 2, dtype=torch.int32)}, "query_spans: expected the length 6"),
    ]:
        with pytest.raises(flash_online.InvalidArgument, match=message):
            flash_online.varlen_attention(
                rows, pool, pool, starts, None, 6, 6, block_table=starts[None], seqused_k=used, **words
            )


@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512", "avx512_bf16"])
def test_lesser_instruction_sets(instruction_set):
    skip_unless_lesser(instruction_set)
    run_tests(instruction_set, __file__, "-k", "random_problems or many_queries or everything")
