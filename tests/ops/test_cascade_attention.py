"""cascade_attention on both devices: levels of shared keys against the oracle, which attends once to all keys of a query."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
import torch

import flash_online
from flash_online import CascadeLevel, reference
from flash_online.testing import assert_close_to_float64

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
HUGE = 2**31 - 1


def ints(*numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def on(device, value):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, CascadeLevel):
        return CascadeLevel(*(on(device, x) for x in value))
    return [on(device, x) for x in value] if isinstance(value, list) else value


@dataclass
class Problem:
    """`levels` has for each level the rows and the keys of its groups. What no query may see is NaN, and table entries after
    a group's last page are garbage."""

    levels: list = field(default_factory=lambda: [((3,), (37,)), ((1, 1, 1), (5, 0, 16))])
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # float8; None is dtype
    heads: tuple = (4, 2)
    head_dims: tuple = (16, 16)
    page: int = 8
    spare_rows: int = 0
    give_longest: bool = True
    sinks: bool = False
    scales: bool = False
    options: dict = field(default_factory=dict)
    seed: int = 0

    def make(self, device: str = "cpu"):
        """query, caches, levels, options."""
        choose, g = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        counts = [[-(-keys // self.page) for keys in level[1]] for level in self.levels]
        blocks = sum(map(sum, counts)) + 2
        free, filled, levels = choose.sample(range(blocks), blocks), [], []
        for (rows, keys), own in zip(self.levels, counts, strict=True):
            entries = max([*own, 0]) + 1
            outside = [-1, blocks, HUGE, -HUGE - 1]
            table = [[choose.choice(outside) for _ in range(entries)] for _ in rows]
            for line, count, length in zip(table, own, keys, strict=True):
                line[:count] = [free.pop() for _ in range(count)]
                filled += [(line[j // self.page], j % self.page) for j in range(length)]
            longest = max(rows, default=0) if self.give_longest else None
            starts = ints(*itertools.accumulate(rows, initial=0))
            levels.append(CascadeLevel(starts, ints(*table).view(-1, entries), ints(*keys), longest))
        total = max(sum(level[0]) for level in self.levels) + self.spare_rows
        query = torch.randn(total, self.heads[0], self.head_dims[0], generator=g).to(self.dtype)
        caches = []
        for width in self.head_dims:
            held = torch.full((blocks, self.heads[1], self.page, width), math.nan)
            for block, row in filled:
                held[block, :, row] = torch.randn(self.heads[1], width, generator=g)
            caches.append(held.to(self.cache_dtype or self.dtype))
        options = dict(self.options)
        if self.sinks:
            options["sinks"] = torch.randn(self.heads[0], generator=g)
        if self.scales:
            options |= {"key_scale": torch.rand(self.heads[1], generator=g) + 0.5, "value_scale": torch.tensor(0.75)}
        return query, *caches, levels, options

    def check(self, device: str) -> None:
        *arguments, options = self.make()
        moved = {name: on(device, value) for name, value in options.items()}
        out, lse = flash_online.cascade_attention(*(on(device, x) for x in arguments), **moved, return_lse=True)
        query, *rest = arguments

        def expected(dtype):
            return reference.cascade_attention(query.to(dtype), *rest, **options, return_lse=True)

        truth, plain, wide = (
            expected(torch.float64),
            expected(self.dtype),
            expected(torch.promote_types(self.dtype, torch.float32)),
        )
        assert out.dtype == self.dtype and out.shape == truth[0].shape and lse.shape == truth[1].shape
        assert_close_to_float64(out.cpu(), plain[0], truth[0], self.dtype, name=f"out of {self}", magnitude=1.0)
        assert_close_to_float64(lse.cpu(), wide[1], truth[1], lse.dtype, name=f"lse of {self}", magnitude=1.0)


DECODING = [((5,), (37,)), ((1,) * 5, (9, 1, 0, 24, 3))]
THREE = [((7,), (64,)), ((4, 3), (23, 8)), ((1, 2, 1, 3), (1, 7, 20, 3))]
CASES = {
    "a step of decoding": Problem(DECODING),
    "three levels": Problem(THREE),
    "four queries per sequence": Problem([((12,), (50,)), ((4, 4, 4), (4, 11, 30))]),
    "groups of one": Problem([((1, 1, 1), (20, 3, 9)), ((1, 1, 1), (2, 17, 1))]),
    "an empty prefix": Problem([((3,), (0,)), ((1, 2), (8, 13))]),
    "no own keys": Problem([((3,), (19,)), ((1, 2), (0, 0))]),
    "more queries than own keys": Problem([((5,), (19,)), ((2, 3), (1, 2))]),
    "no keys": Problem([((3,), (0,)), ((1, 2), (0, 0))]),
    "no keys but sinks": Problem([((3,), (0,)), ((1, 2), (0, 0))], sinks=True),
    "some without a prefix": Problem([((2, 0, 1), (19, 5, 0)), ((1,) * 5, (3, 4, 5, 6, 0))], spare_rows=2, sinks=True),
    "some of no last group": Problem([((5,), (19,)), ((2, 1), (3, 4))], sinks=True),
    "empty groups": Problem([((0, 4, 0), (9, 30, 0)), ((1, 0, 3), (6, 2, 9))]),
    "one level": Problem([((2, 3), (8, 41))], sinks=True),
    "MQA": Problem(DECODING, heads=(8, 1)),
    "MHA": Problem(DECODING, heads=(3, 3)),
    "odd sizes": Problem(THREE, heads=(6, 2), head_dims=(20, 12), page=5),
    "pages of one": Problem(DECODING, page=1),
    "head dim 128, long": Problem(
        [((17,), (700,)), ((1,) * 17, tuple(range(17)))], heads=(8, 2), head_dims=(128, 128), page=16
    ),
    "many rows": Problem([((150,), (130,)), ((1, 149), (40, 160))], head_dims=(64, 64), page=16),
    "sinks": Problem(DECODING, sinks=True),
    "sinks, three levels": Problem(THREE, sinks=True),
    "softcap and scale": Problem(THREE, options={"softcap": 5.0, "scale": 0.5}),
    "not causal": Problem(THREE, options={"causal": False}),
    "num_splits": Problem([((5,), (300,)), DECODING[1]], options={"num_splits": 3}),
    "no bounds of groups": Problem(THREE, give_longest=False, spare_rows=3),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_cases(cache_device, name, dtype):
    problem = CASES[name]
    Problem(**{**vars(problem), "dtype": dtype}).check(cache_device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_caches(cache_device, dtype, cache_dtype):
    Problem(THREE, dtype, cache_dtype, scales=True, sinks=True).check(cache_device)


def random_problem(seed: int) -> Problem:
    choose = random.Random(seed)
    own = [choose.choice((0, 1, 1, 1, 2, 5)) for _ in range(choose.randint(1, 6))]
    levels, counts = [], own
    for _ in range(choose.randint(1, 3)):
        levels.insert(0, (tuple(counts), tuple(choose.choice((0, 1, 7, 8, 30, choose.randint(0, 90))) for _ in counts)))
        cuts = sorted({0, len(counts), *choose.sample(range(len(counts) + 1), choose.randint(0, len(counts)))})
        counts = [sum(counts[a:b]) for a, b in itertools.pairwise(cuts)]
    key_heads, width = choose.choice((1, 2, 3)), choose.choice((8, 16, 40, 64))
    options = {"causal": choose.random() < 0.8} | ({"softcap": 10.0} if choose.random() < 0.2 else {})
    return Problem(
        levels,
        choose.choice(DTYPES[:3]),
        heads=(key_heads * choose.choice((1, 2, 4, 7)), key_heads),
        head_dims=(width, choose.choice((width, 24))),
        page=choose.choice((1, 3, 8, 16)),
        spare_rows=choose.choice((0, 3)),
        give_longest=choose.random() < 0.8,
        sinks=choose.random() < 0.4,
        options=options | ({"num_splits": choose.randint(1, 4)} if choose.random() < 0.3 else {}),
        seed=seed,
    )


def test_random_problems(cache_device):
    for seed in range(60):
        random_problem(seed).check(cache_device)


def repeated(levels, page):
    """Table and lengths of one call over the keys of both levels, whose first is one group of full pages."""
    prefix, own = levels
    pages = int(prefix.cache_seqlens[0]) // page
    table = torch.cat([prefix.block_table[:, :pages].expand(len(own.block_table), -1), own.block_table], 1)
    return table, own.cache_seqlens + prefix.cache_seqlens


@pytest.mark.parametrize("queries", [1, 3])
def test_it_is_the_call_over_repeated_pages(cache_device, queries):
    own = (queries,) * 4, (3, 8, 21, 4)
    query, *caches, levels, _ = on(cache_device, list(Problem([((4 * queries,), (40,)), own]).make()))
    out, lse = flash_online.cascade_attention(query, *caches, levels, return_lse=True)
    table, lengths = repeated(levels, 8)
    starts = {"cu_seqlens_q": levels[1].cu_seqlens_q, "max_seqlen_q": queries}
    whole = flash_online.kvcache_attention(query, *caches, lengths, block_table=table, return_lse=True, **starts)
    torch.testing.assert_close((out, lse), whole, atol=1e-5, rtol=1e-5)


def test_one_level_is_one_call(cache_device):
    query, *caches, levels, _ = on(cache_device, list(Problem([((2, 3), (8, 41))]).make()))
    starts, table, lengths, longest = levels[0]
    found = flash_online.cascade_attention(query, *caches, [tuple(levels[0])], return_lse=True)
    options = {"block_table": table, "cu_seqlens_q": starts, "max_seqlen_q": longest, "return_lse": True}
    assert all(map(torch.equal, found, flash_online.kvcache_attention(query, *caches, lengths, **options)))
    assert torch.equal(flash_online.cascade_attention(query, *caches, [levels[0][:3]]), found[0])  # without max_seqlen_q


def test_lengths_of_any_value(cache_device):
    """Negative ones are 0, and those past the table's room are full; an int is the length of all groups."""
    query, *caches, levels, _ = on(cache_device, list(Problem(page=8).make()))
    caches = [cache.nan_to_num(1.0) for cache in caches]
    results = [
        flash_online.cascade_attention(query, *caches, [levels[0]._replace(cache_seqlens=length), levels[1]])
        for prefix, other in ((-7, 0), (HUGE, 8 * levels[0].block_table.shape[1]))
        for length in (ints(prefix).to(cache_device), ints(other).to(cache_device), other)
    ]
    assert all(torch.equal(results[3 * n], results[3 * n + m]) for n in (0, 1) for m in (1, 2))
    assert not torch.equal(results[0], results[3])


def test_sizes_of_0(cache_device):
    query, *caches, levels, _ = on(cache_device, list(Problem([((0,), (0,)), ((), ())]).make()))
    out, lse = flash_online.cascade_attention(query, *caches, levels, return_lse=True)
    assert out.shape == (0, 4, 16) and lse.shape == (4, 0)
    query, *caches, levels, _ = on(cache_device, list(Problem([((), ()), ((), ())], spare_rows=3).make()))
    out, lse = flash_online.cascade_attention(query, *(cache[:0] for cache in caches), levels, return_lse=True)
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(cache_device, dynamic):
    problem = Problem(THREE, sinks=True)
    query, *caches, levels, options = on(cache_device, list(problem.make()))
    options = {name: on(cache_device, value) for name, value in options.items()}

    def step(query, levels):
        return flash_online.cascade_attention(2 * query, *caches, levels, **options, return_lse=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    shorter = [level._replace(cache_seqlens=level.cache_seqlens // 2) for level in levels]
    for given in (levels, shorter):
        assert all(map(torch.equal, compiled(query, given), step(query, given)))


def test_explained(cache_device):
    query, *caches, levels, _ = on(cache_device, list(Problem().make()))
    plan = flash_online.explain(flash_online.cascade_attention, query, *caches, levels)
    assert plan.ours and plan.operators == ("attention_cached", "attention_cached", "attention_merge")
    assert cache_device == "cpu" or plan.kernel.count("sm90") == 1


def test_errors():
    query, *caches, levels, _ = Problem().make()
    first, last = levels
    attend = flash_online.cascade_attention
    cases = [
        (lambda: attend(query, *caches, []), "levels: .*none"),
        (lambda: attend(query, *caches, first.cu_seqlens_q), "levels: .*Tensor"),
        (lambda: attend(query, *caches, [first, first.block_table]), r"levels\[1\]: .*Tensor"),
        (lambda: attend(query, *caches, [first, last[:2]]), r"levels\[1\]: .*3 or 4"),
        (lambda: attend(query, *caches, [first._replace(block_table=None), last]), r"levels\[0\].block_table: .*None"),
        (lambda: attend(query, *caches, [first, last._replace(cu_seqlens_q=None)]), r"levels\[1\].cu_seqlens_q: .*None"),
        (lambda: attend(query, *caches, [first, last._replace(cache_seqlens=None)]), r"levels\[1\].cache_seqlens: .*None"),
        (lambda: attend(query, *caches, [first, last._replace(cache_seqlens=ints(1))]), r"levels\[1\].cache_seqlens: .*got 1"),
        (lambda: attend(query, *caches, [first, last._replace(cu_seqlens_q=ints(0, 3))]), r"levels\[1\].block_table: .*got 3"),
        (
            lambda: attend(query, *caches, [first._replace(cu_seqlens_q=torch.arange(2)), last]),
            r"levels\[0\].cu_seqlens_q: .*64",
        ),
        (lambda: attend(query, *caches, [first._replace(max_seqlen_q=-1), last]), r"levels\[0\].max_seqlen_q"),
        (lambda: attend(query[None], *caches, levels), "query: .*dimensions.*got 4"),
        (lambda: attend(query, caches[0], caches[1][:1], levels), "key_cache, value_cache"),
        (lambda: attend(query, *caches, levels, key_scale=torch.ones(3, 2)), r"key_scale: .*\[Hkv\]"),
        (lambda: attend(query, *caches, levels, sinks=torch.ones(3)), "sinks"),
        (lambda: attend(query.requires_grad_(), *caches, levels), "query: expected .*without a gradient"),
        (lambda: attend(query, *caches, levels, window=(3, 0)), "window"),
    ]
    for call, message in cases:
        with pytest.raises((flash_online.InvalidArgument, TypeError), match=message):
            call()
        query.requires_grad_(False)


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [DECODING, THREE], ids=["two", "three"])
def test_in_a_cuda_graph_at_other_lengths_and_tables(levels):
    """Nothing is read by the host: a replay sees lengths, tables, groups and queries as they are then."""
    problem = Problem(levels, torch.bfloat16, head_dims=(64, 64), page=16, sinks=True)
    query, *caches, levels, options = on("cuda", list(problem.make()))
    caches = [torch.randn_like(cache) for cache in caches]
    options = {name: on("cuda", value) for name, value in options.items()}
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda.set_sync_debug_mode("error")
        try:
            flash_online.cascade_attention(query, *caches, levels, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flash_online.cascade_attention(query, *caches, levels, **options, return_lse=True)
    for seed in range(3):
        torch.manual_seed(seed)
        for level in levels:
            level.cache_seqlens.random_(0, 16 * level.block_table.shape[1] + 1)
            level.block_table.random_(0, len(caches[0]))
            level.cu_seqlens_q[1:-1].sub_(seed % 2)
        query.normal_()
        graph.replay()
        expected = flash_online.cascade_attention(query, *caches, levels, **options, return_lse=True)
        assert all(map(torch.equal, found, expected))
