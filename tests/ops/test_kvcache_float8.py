"""kvcache_attention with float8_products: the bits of float8_attention on each sequence's keys, gathered by hand, and near the
results of products in 16 bits. All memory that no query sees is NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import CachedProblem, random_cached, random_prefill
from float8_cases import E4M3, quantised, skip_without_kernel

import flash_online
from flash_online import InvalidArgument, cache_append, float8_attention, kvcache_attention
from flash_online._reference_cache import Cache, packed_rows


@pytest.fixture
def device8(cache_device):
    """The device of a test, where float8_attention has a kernel."""
    skip_without_kernel(cache_device)
    return cache_device


def taken(problem: CachedProblem, **changes) -> CachedProblem:
    """The problem with what float8_products takes."""
    dtype = problem.dtype if problem.dtype.itemsize == 2 else torch.bfloat16
    options = {n: x for n, x in problem.options.items() if n != "num_splits"}
    return replace(problem, dtype=dtype, cache_dtype=E4M3, alibi=0, options=options, give_longest=True, **changes)


def by_hand(problem: CachedProblem, made, query, device) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_attention of each sequence alone, over caches that have the new keys; the host gathers and says who sees what."""
    given, count = made.options, len(problem.lengths)
    left, _, ends = problem.clamped()
    cache = Cache.of(count, *made.caches, given.get("block_table"), given.get("cache_batch_idx"))
    packed = problem.packed[0]
    out = query.new_zeros(*query.shape[:-1], problem.head_dims[1])
    lse = torch.full(query.shape[1::-1] if packed else query.shape[:-1], -torch.inf, device=device)
    own_rows = packed_rows(given["cu_seqlens_q"], len(query), given["max_seqlen_q"]) if packed else range(count)
    for n, rows in enumerate(own_rows):
        own = query[rows].transpose(0, 1) if packed else query[n]
        operands = [held_by(cache, n, which, left[n], ends[n], device) for which in (0, 1)]
        seen = spans_by_hand(problem, given.get("query_spans"), n, rows, left[n], ends[n], own.shape[1])
        narrow, scale = quantised(own.float().unflatten(0, (problem.heads[1], -1)), 3)
        scales = {"query_scale": scale}
        for name in ("key_scale", "value_scale"):
            if name in given:
                scales[name] = given[name].expand(count, problem.heads[1])[n]
        options = {name: problem.options[name] for name in ("softcap", "scale") if name in problem.options}
        result = float8_attention(
            narrow.flatten(0, 1), *operands, query_spans=seen.to(device), sinks=given.get("sinks"),
            return_lse=True, out_dtype=query.dtype, **scales, **options,
        )  # fmt: skip
        if packed:
            out[rows], lse[:, rows] = result[0].transpose(0, 1), result[1]
        else:
            out[n], lse[n] = result
    return out, lse


def held_by(cache: Cache, n: int, which: int, left: int, end: int, device: str) -> torch.Tensor:
    """Keys or values [Hkv, end, width] of a sequence, without NaN: 0 before leftpad, and where a row has no page or a NaN."""
    pool = cache.pools[which]
    inside, blocks, rows = cache.places(n, torch.arange(end))
    held = torch.zeros(end, pool.shape[1], pool.shape[3], dtype=torch.uint8, device=device)
    held[inside.to(device)] = pool.view(torch.uint8)[blocks.to(device), :, rows.to(device)]
    held[:left] = 0
    held = held.view(E4M3)
    return torch.where(held.float().isnan(), 0, held.float()).to(E4M3).transpose(0, 1)


def spans_by_hand(problem, given, n, rows, left, end, queries) -> torch.Tensor:
    """int32 [1 or Hq, L, 2 or 4]."""
    before, after = problem.options.get("window") or (None, None)
    after = 0 if problem.options.get("causal", True) else after
    own = torch.zeros(queries, 2, dtype=torch.int64)
    for i in range(queries):
        p = i + end - queries
        own[i, 0] = left if before is None else max(left, p - before)
        own[i, 1] = end if after is None else min(end, p + after + 1)
    if given is None:
        return own[None].int()
    given = given.cpu().long()
    if problem.packed[0]:
        given = given[..., rows, :]
    elif given.dim() == 4:
        given = given[min(n, given.shape[0] - 1)]
    given = given if given.dim() == 3 else given[None]
    ends = [torch.maximum(given[..., 0::2], own[:, :1]), torch.minimum(given[..., 1::2], own[:, 1:])]
    return torch.stack(ends, -1).flatten(-2).int()


def check(problem: CachedProblem, device: str) -> None:
    """Bits, caches and shapes of a problem without rotary embedding."""
    made, plain = problem.make(device), problem.make(device)
    out, lse = kvcache_attention(
        made.query, *made.caches, made.cache_seqlens, **made.options, float8_products=True, return_lse=True
    )
    kvcache_attention(plain.query, *plain.caches, plain.cache_seqlens, **plain.options)
    for ours, theirs in zip(made.buffers, plain.buffers, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), f"the caches of {problem} differ"
    expected, expected_lse = by_hand(problem, made, made.query, device)
    assert out.dtype == problem.dtype and not out.isnan().any() and not lse.isnan().any(), repr(problem)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse), f"other bits in {problem}"
    if problem.give_out:
        assert out is made.options["out"]


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_problems(first, device8):
    """Pages, holes, leftpad, rows of the cache, packed queries, new keys, scales, sinks, softcap, windows, `out`."""
    for seed in range(first, first + 20):
        check(taken(random_cached(seed, device8), rotary=None, spans=seed % 3), device8)


@pytest.mark.parametrize("seed", range(8))
def test_many_queries(seed, device8):
    check(taken(random_prefill(seed), spans=seed % 3), device8)


PREFILL = CachedProblem(
    dtype=torch.bfloat16, heads=(8, 2), head_dims=(64, 64), lengths=((190, 64, 64), (0, 64, 64), (300, 64, 64)),
    capacity=400, scales="all",
)  # fmt: skip
NEAR = {
    "causal": {},
    "full": {"options": {"causal": False}},
    "window": {"options": {"window": (70, 0)}},
    "window to the right": {"options": {"causal": False, "window": (70, 9)}},
    "softcap and sinks": {"options": {"softcap": 3.0}, "sinks": True},
    "spans": {"spans": 1, "options": {"causal": False}},
    "two spans": {"spans": 2},
    "leftpad": {"leftpad": (40, 0, 299)},
    "rows of the cache": {"batch_idx": True},
    "rotary": {"rotary": "halves", "rotary_width": 64, "rotary_positions": 400},
    "rotary, full": {"rotary": "interleaved", "rotary_positions": 400, "options": {"causal": False}},
    "packed": {"packed": (True, True), "lengths": ((190, 64, 64), (0, 7, 7), (300, 33, 33))},
    "float16": {"dtype": torch.float16},
}


@pytest.mark.parametrize("page", [None, 16], ids=["dense", "paged"])
@pytest.mark.parametrize("name", NEAR)
def test_near_products_in_16_bits(name, page, device8):
    problem = taken(replace(PREFILL, page=page, **NEAR[name]))
    results = []
    for products in (True, False):
        made = problem.make(device8)
        results.append(
            kvcache_attention(
                made.query, *made.caches, made.cache_seqlens, **made.options, float8_products=products, return_lse=True
            )
        )
    (out, lse), (truth, true_lse) = results
    error = (out.float() - truth.float()).square().mean().sqrt() / truth.float().square().mean().sqrt()
    assert 0.001 < error <= 0.06, f"{name}: the error is {error:.3g}"
    assert torch.equal(lse.isfinite(), true_lse.isfinite())
    assert (lse - true_lse)[lse.isfinite()].abs().mean() < 0.05


def test_rotated_queries(device8):
    """They are quantised after the rotation."""
    problem = taken(replace(PREFILL, rotary="halves", rotary_width=32, rotary_positions=400))
    made, other = problem.make(device8), problem.make(device8)
    out = kvcache_attention(made.query, *made.caches, made.cache_seqlens, **made.options, float8_products=True)
    new = {n: other.options[n] for n in ("rotary", "key_scale", "value_scale")}
    tensors = (other.options["key"], other.options["value"], *other.caches)
    rotated = cache_append(*tensors, cache_seqlens=other.cache_seqlens, query=other.query, **new)
    scales = {n: other.options[n] for n in ("key_scale", "value_scale")}
    assert not torch.equal(rotated, other.query)
    lengths = other.cache_seqlens + 64
    assert torch.equal(out, kvcache_attention(rotated, *other.caches, lengths, **scales, float8_products=True))


@pytest.mark.parametrize("page", [None, 48])
def test_a_prefill_in_chunks(page, device8):
    """Each chunk appends its keys. With queries of one largest magnitude the scales are equal, and so are the bits."""
    g = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, heads, 300, 64, generator=g).half() for heads in (4, 2, 2))
    query[:, ::2, ::50, 0] = 6.0  # beyond all others, in each chunk and key head
    query, key, value = (t.clamp(-6, 6).to(device8) for t in (query, key, value))
    shape = (2, 2, 320, 64) if page is None else (16, 2, page, 64)
    options = {} if page is None else {"block_table": torch.randperm(16).view(2, 8)[:, :7].int().to(device8)}
    options["key_scale"] = torch.tensor(0.02, device=device8)

    def prefill(*chunks):
        caches = [torch.full(shape, torch.nan, device=device8).to(E4M3) for _ in range(2)]
        results, begin = [], 0
        for n in chunks:
            part = slice(begin, begin + n)
            words = options | {"key": key[:, :, part], "value": value[:, :, part]}
            results.append(kvcache_attention(query[:, :, part], *caches, begin, float8_products=True, **words))
            begin += n
        return torch.cat(results, 2)

    whole = prefill(300)
    assert torch.equal(prefill(100, 200), whole) and torch.equal(prefill(50, 150, 100), whole)
    truth = flash_online.attention(query.float(), key.float(), value.float(), causal=True)
    assert (whole.float() - truth).square().mean().sqrt() <= 0.06 * truth.square().mean().sqrt()


@pytest.mark.parametrize("page", [None, 32])
def test_values_hidden_by_spans_may_be_nan(page, device8):
    """Also between two intervals, and in a key head whose query heads do not see them."""
    g = torch.Generator().manual_seed(4)
    query = torch.randn(2, 4, 40, 64, generator=g).bfloat16().to(device8)
    caches = [torch.randn(2, 2, 192, 64, generator=g).to(E4M3) for _ in range(2)]
    spans = torch.tensor([[[10, 70, 100, 150]], [[10, 70, 100, 150]], [[0, 192, 0, 0]], [[0, 192, 0, 0]]]).int()
    spans = spans.expand(4, 40, 4).to(device8)
    table = torch.arange(12).view(2, 6).int().to(device8)
    results = []
    for fill in (0.0, torch.nan):
        own = [cache.float() for cache in caches]
        for cache in own:
            cache[:, 0, :10] = cache[:, 0, 70:100] = cache[:, 0, 150:] = fill
        own = [cache.to(E4M3).to(device8) for cache in own]
        options = {}
        if page:
            own = [cache.unflatten(2, (6, 32)).transpose(1, 2).flatten(0, 1) for cache in own]
            options["block_table"] = table
        results.append(
            kvcache_attention(
                query, *own, None, causal=False, query_spans=spans, float8_products=True, return_lse=True, **options
            )
        )
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_sizes_of_0(device8):
    for count, queries, capacity, width in ((2, 0, 9, 64), (0, 3, 9, 64), (2, 3, 0, 64), (2, 3, 9, 0)):
        query = torch.randn(count, 4, queries, 64, device=device8).half()
        key, value = (torch.zeros(count, 2, capacity, n, device=device8).to(E4M3) for n in (64, width))
        out, lse = kvcache_attention(query, key, value, None, float8_products=True, return_lse=True)
        assert out.shape == (count, 4, queries, width) and lse.shape == out.shape[:-1]
        assert not out.any() and (capacity or (lse == -torch.inf).all())
    pool, table = torch.zeros(0, 2, 4, 64, device=device8).to(E4M3), torch.zeros(2, 3, dtype=torch.int32, device=device8)
    query = torch.randn(2, 4, 3, 64, device=device8).half()
    out, lse = kvcache_attention(query, pool, pool, None, block_table=table, float8_products=True, return_lse=True)
    assert not out.any() and torch.allclose(lse.exp(), torch.tensor([10.0, 11.0, 12.0], device=device8))  # keys of zeros
    starts = torch.zeros(3, dtype=torch.int32, device=device8)
    cache = torch.zeros(2, 2, 9, 64, device=device8).to(E4M3)
    options = {"cu_seqlens_q": starts, "max_seqlen_q": 4, "float8_products": True, "return_lse": True}
    for rows in (0, 5):
        out, lse = kvcache_attention(query.new_ones(rows, 4, 64), cache, cache, None, **options)
        assert out.shape == (rows, 4, 64) and lse.shape == (4, rows) and not out.any() and (lse == -torch.inf).all()


def test_numbers_out_of_range(device8):
    """Starts, rows and tables of any numbers read nothing outside of the tensors; a row outside is zeros."""
    query, cache = torch.randn(6, 4, 64, device=device8).half(), torch.randn(3, 2, 9, 64, device=device8).to(E4M3)
    numbers = torch.tensor([[-5, 2**31 - 1, 3], [4, -(2**31), 90]], dtype=torch.int32, device=device8)
    for starts in numbers:
        for rows in numbers:
            out = kvcache_attention(
                query, cache, cache, rows[:2].contiguous(), cache_batch_idx=rows[1:].contiguous(), leftpad=None,
                cu_seqlens_q=starts, max_seqlen_q=3, float8_products=True, block_table=None,
            )  # fmt: skip
            assert not out.isnan().any()
            table = numbers[:, :2].contiguous()
            paged = kvcache_attention(
                query, cache, cache, None, block_table=table, cu_seqlens_q=starts, max_seqlen_q=3, float8_products=True
            )
            assert not paged.isnan().any()


@pytest.mark.parametrize("longest", [0, 1, 2])
def test_queries_past_the_longest_are_left_out(longest, device8):
    problem = taken(CachedProblem(lengths=((9, 0, 3), (4, 0, 1)), append=False, packed=(True, False), spare_rows=(1, 0)))
    made = problem.make(device8)
    options = made.options | {"max_seqlen_q": longest, "return_lse": True}
    out, lse = kvcache_attention(made.query, *made.caches, made.cache_seqlens, **options, float8_products=True)
    made.options["max_seqlen_q"] = longest
    cut = replace(problem, lengths=((9, 0, min(3, longest)), (4, 0, min(1, longest))))
    expected, expected_lse = by_hand(cut, made, made.query, device8)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_infinity_nan_and_zero_in_queries(device8):
    """A row with NaN is NaN and alone; infinities are 448 scales; queries of zeros have a scale of 0."""
    problem = taken(replace(PREFILL, scales=None))
    made = problem.make(device8)
    made.query[0, 0, 3, 5], made.query[1, 4, 9, 1] = torch.nan, torch.inf
    made.query[2, :4] = 0
    out, lse = kvcache_attention(
        made.query, *made.caches, made.cache_seqlens, **made.options, float8_products=True, return_lse=True
    )
    expected, expected_lse = by_hand(problem, made, made.query, device8)
    assert out[0, 0, 3].isnan().all() and lse[0, 0, 3].isnan() and out.isnan().any(-1).sum() == 1
    assert torch.equal(out.nan_to_num(), expected.nan_to_num()) and torch.equal(lse.nan_to_num(), expected_lse.nan_to_num())


@pytest.mark.parametrize("packed", [False, True])
def test_compiled(packed, device8):
    lengths = ((90, 5, 5), (7, 3, 3) if packed else (7, 5, 5))
    problem = taken(CachedProblem(lengths=lengths, capacity=130, page=16, spans=2, packed=(packed,) * 2, sinks=True, seed=3))

    def call(query, caches, lengths, options):
        return kvcache_attention(query, *caches, lengths, **options, float8_products=True, return_lse=True)

    results = []
    for dynamic in (None, False, True):
        made = problem.make(device8)
        run = call if dynamic is None else torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        results.append((*run(made.query, made.caches, made.cache_seqlens, made.options), *made.buffers))
    for result in results[1:]:
        for ours, theirs in zip(result, results[0], strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_inference_mode_gradients_and_autocast(device8):
    problem = taken(replace(PREFILL, append=False))
    made = problem.make(device8)
    words = {"float8_products": True, **made.options}
    expected = kvcache_attention(made.query, *made.caches, made.cache_seqlens, **words)
    asking = made.query.clone().requires_grad_()
    with pytest.raises(InvalidArgument, match="query: expected a tensor without a gradient"):
        kvcache_attention(asking, *made.caches, made.cache_seqlens, **words)
    with torch.no_grad():
        assert torch.equal(kvcache_attention(asking, *made.caches, made.cache_seqlens, **words), expected)
    with torch.inference_mode():
        assert torch.equal(kvcache_attention(made.query, *made.caches, made.cache_seqlens, **words), expected)
    with torch.autocast(device8, torch.bfloat16):
        assert torch.equal(kvcache_attention(made.query.float(), *made.caches, made.cache_seqlens, **words), expected)


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_lengths(device8):
    if device8 == "cpu":
        pytest.skip("graphs are CUDA's")
    problem = taken(replace(PREFILL, page=16, packed=(True, False), append=False, capacity=300, leftpad=(3, 0, 9)))
    made = problem.make(device8)
    words = {"float8_products": True, **made.options}
    kvcache_attention(made.query, *made.caches, made.cache_seqlens, **words)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kvcache_attention(made.query, *made.caches, made.cache_seqlens, **words)
    made.cache_seqlens -= 9
    graph.replay()
    assert torch.equal(out, kvcache_attention(made.query, *made.caches, made.cache_seqlens, **words))


def test_explain(device8):
    made = taken(PREFILL).make(device8)
    plan = flash_online.explain(
        kvcache_attention, made.query, *made.caches, made.cache_seqlens, **made.options, float8_products=True
    )
    assert plan.ours and plan.operators == ("cache_append_", "float8_attention") and "kernel" in plan.kernel, str(plan)


def test_errors_come_before_anything_is_written(device8):
    problem = taken(replace(PREFILL, scales=None))
    made = problem.make(device8)
    before = [buffer.clone() for buffer in made.buffers]
    wide = [cache.bfloat16() for cache in made.caches]
    e5m2 = [cache.to(torch.float8_e5m2) for cache in wide]
    packed = {"query": made.query[0].transpose(0, 1), "cu_seqlens_q": torch.tensor([0, 9, 20, 64]).int().to(device8)}
    for changes, message in (
        ({"caches": wide}, "key_cache: expected torch.float8_e4m3fn with float8_products, got torch.bfloat16"),
        ({"caches": e5m2}, "key_cache: expected torch.float8_e4m3fn with float8_products, got torch.float8_e5m2"),
        ({"alibi_slopes": torch.ones(8, device=device8)}, "alibi_slopes: expected None with float8_products, got a tensor"),
        ({"num_splits": 2}, "num_splits: expected None with float8_products, got 2"),
        (packed, r"float8_products: expected queries \[B, Hq, L, E\], or max_seqlen_q, got packed queries without"),
        ({"out": torch.zeros(3, 8, 64, 63, device=device8)}, r"out: expected \[3, 8, 64, 64\]"),
        ({"out": made.query}, "out: expected separate memory"),
    ):
        words = {"query": made.query, "caches": made.caches, **made.options, **changes}
        query, caches = words.pop("query"), words.pop("caches")
        with pytest.raises(InvalidArgument, match=f"^{message}"):
            kvcache_attention(query, *caches, made.cache_seqlens, **words, float8_products=True)
    with pytest.raises(TypeError, match="float8_products: expected"):
        kvcache_attention(made.query, *made.caches, made.cache_seqlens, float8_products=1)
    with pytest.raises(InvalidArgument, match="key_cache: expected torch.float8_e4m3fn"):  # no fast path takes it
        kvcache_attention(made.query, *wide, made.cache_seqlens, float8_products=True)
    for buffer, was in zip(made.buffers, before, strict=True):
        assert torch.equal(buffer.view(torch.uint8), was.view(torch.uint8))
    out = kvcache_attention(made.query, *made.caches, made.cache_seqlens, num_splits=0, float8_products=True)
    assert not out.isnan().any()
