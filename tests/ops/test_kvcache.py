"""kvcache_attention, cache_append and varlen_attention over pools against the oracle. All memory that a call must not read is
NaN."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from cache_cases import CachedProblem, random_cached
from instruction_sets import run_tests, skip_unless_lesser

import flash_online
from flash_online import reference
from flash_online.testing import assert_close_to_float64

RAGGED = ((7, 1, 1), (0, 1, 1), (20, 1, 1), (33, 1, 1))


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_problems(cache_device, first):
    for seed in range(first, first + 20):
        problem = random_cached(seed, cache_device)
        problem.check(flash_online.kvcache_attention, cache_device)
        problem.check_append(flash_online.cache_append, cache_device)
        problem.check_append(flash_online.cache_append, cache_device, slots=True)


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512", "avx512_bf16"])
def test_lesser_instruction_sets(instruction_set):
    skip_unless_lesser(instruction_set)
    run_tests(instruction_set, f"{__file__}::test_random_problems", "-k", "cpu")


@pytest.mark.parametrize("splits", [None, 1, 2, 3, 64])
@pytest.mark.parametrize("page", [None, 1, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(cache_device, dtype, page, splits):
    """Whatever its neighbours and its pages are, and however many threads there are."""
    lengths = ((700, 1, 1), (30, 1, 1), (1030, 1, 1), (64, 1, 1))
    problem = CachedProblem(
        dtype=dtype, head_dims=(64, 64), lengths=lengths, capacity=1100, page=page, options={"num_splits": splits}
    )
    made = problem.make(cache_device)
    call = dict(made.options) | {"return_lse": True}
    torch.set_num_threads(3)
    out, lse = flash_online.kvcache_attention(made.query, *made.caches, made.cache_seqlens, **call)
    torch.set_num_threads(1)
    ends = torch.tensor(made.ends, dtype=torch.int32, device=cache_device)
    for n in range(len(lengths)):
        own = {"num_splits": splits, "return_lse": True}
        if page is None:
            caches = [cache[n : n + 1].clone() for cache in made.caches]
        else:
            own["block_table"] = made.options["block_table"][n : n + 1]
            caches = made.caches
        alone = flash_online.kvcache_attention(made.query[n : n + 1], *caches, ends[n : n + 1], **own)
        for found, wanted in zip(alone, (out[n : n + 1], lse[n : n + 1]), strict=True):
            assert torch.equal(found, wanted)


LONG = ((1500, 1, 1), (0, 1, 1), (257, 1, 1), (2999, 1, 1))  # several pieces, one, a piece of one key


@pytest.mark.slow
@pytest.mark.parametrize("splits", [None, 1, 5, 300])
@pytest.mark.parametrize(
    "problem",
    [
        CachedProblem(dtype=torch.float16, head_dims=(64, 64), page=16),
        CachedProblem(dtype=torch.bfloat16, head_dims=(128, 128), heads=(8, 1), page=1, leftpad=(700, 0, 5, 2990)),
        CachedProblem(
            dtype=torch.bfloat16, head_dims=(192, 128), heads=(2, 2), page=256, order="NHD", options={"window": (600, 0)}
        ),
        CachedProblem(dtype=torch.float16, head_dims=(256, 256), heads=(2, 1), sinks=True, alibi=2, rotary="halves"),
        CachedProblem(dtype=torch.bfloat16, head_dims=(512, 500), heads=(2, 1), page=64, options={"softcap": 3.0}),
        CachedProblem(dtype=torch.bfloat16, head_dims=(576, 512), heads=(16, 1), page=64, joined="latent"),
        CachedProblem(dtype=torch.float16, cache_dtype=torch.float8_e4m3fn, head_dims=(128, 96), page=16, scales="all"),
        CachedProblem(dtype=torch.bfloat16, cache_dtype=torch.float8_e5m2, head_dims=(96, 80), page=17, scales="head"),
        CachedProblem(dtype=torch.float32, head_dims=(128, 128), page=32, sinks=True),
        CachedProblem(dtype=torch.float32, head_dims=(576, 512), heads=(4, 1), joined="latent"),
    ],
    ids=lambda p: f"{p.dtype}-{p.cache_dtype}-{p.head_dims}",
)
def test_long_caches(cache_device, problem, splits):
    """Keys in several pieces, at every head dim that has a kernel of its own; then with several queries per sequence."""
    options = problem.options | {"num_splits": splits}
    problem = replace(problem, lengths=LONG, capacity=3000, options=options)
    problem.check(flash_online.kvcache_attention, cache_device)
    lengths = tuple((length, 3, queries) for (length, *_), queries in zip(LONG, (3, 70, 0, 5), strict=True))
    replace(problem, lengths=lengths, packed=(True, False)).check(flash_online.kvcache_attention, cache_device)


@pytest.mark.parametrize("options", [{}, {"window": (9, None)}, {"softcap": 2.0}])
def test_step_by_step_is_the_prefill(cache_device, options):
    """With one piece each row has the bits that it has among others."""
    query, key, value = (torch.randn(2, heads, 40, 64, device=cache_device) for heads in (6, 2, 2))
    caches = [torch.full((2, 2, 50, 64), torch.nan, device=cache_device) for _ in range(2)]
    whole = flash_online.kvcache_attention(
        query, *(c.clone() for c in caches), 0, key=key, value=value, num_splits=1, **options
    )
    for i in range(40):
        new = {"key": key[:, :, i : i + 1], "value": value[:, :, i : i + 1]}
        step = flash_online.kvcache_attention(query[:, :, i : i + 1], *caches, i, **new, num_splits=1, **options)
        assert torch.equal(step, whole[:, :, i : i + 1]), i
    truth = reference.attention(query.double(), key.double(), value.double(), causal=True, **options)
    plain = reference.attention(query, key, value, causal=True, **options)
    assert_close_to_float64(whole, plain, truth, torch.float32, name="out")


def varlen_case(cache_device, dtype=torch.float32, **changes):
    """Arguments of varlen_attention over a pool, and its keywords."""
    generator = torch.Generator().manual_seed(5)
    used, keys = [3, 0, 1, 5], [40, 7, 0, 33]
    starts = torch.tensor([0, 4, 4, 5, 10], dtype=torch.int32)
    query = torch.randn(12, 6, 24, generator=generator).to(dtype)
    pools = [torch.full((12, 16, 2, width), torch.nan, dtype=dtype) for width in (24, 16)]
    table = torch.tensor([[3, 1, 4, 99], [5, -1, 7, 7], [-1, -1, -1, -1], [9, 2, 6, -5]], dtype=torch.int32)
    for row, count in zip(table.tolist(), keys, strict=True):
        for key in range(count):
            for pool in pools:
                pool[row[key // 16], key % 16] = torch.randn(pool.shape[2:], generator=generator).to(dtype)
    options = {
        "block_table": table,
        "seqused_q": torch.tensor(used, dtype=torch.int32),
        "seqused_k": torch.tensor(keys, dtype=torch.int32),
        "causal": True,
    } | changes
    options = {name: option.to(cache_device) if torch.is_tensor(option) else option for name, option in options.items()}
    query, *pools, starts = (tensor.to(cache_device) for tensor in (query, *pools, starts))
    return [query, *pools, starts, None, 5, 64], options


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "changes",
    [{}, {"seqused_q": None}, {"window": (5, 0)}, {"alignment": "upper_left"}, {"num_splits": 2, "softcap": 2.0}],
    ids=["all", "no seqused_q", "window", "upper left", "splits"],
)
def test_varlen_over_pools(cache_device, dtype, changes):
    arguments, options = varlen_case(cache_device, dtype, **changes)
    found = flash_online.varlen_attention(*arguments, **options, return_lse=True)

    def oracle(query):
        host = [argument.cpu() if torch.is_tensor(argument) else argument for argument in (query, *arguments[1:])]
        kept = {name: option.cpu() if torch.is_tensor(option) else option for name, option in options.items()}
        return reference.varlen_attention(*host, **kept, return_lse=True)

    truth, plain = oracle(arguments[0].double()), oracle(arguments[0])
    for name, ours, theirs, right in zip(("out", "lse"), found, plain, truth, strict=True):
        assert_close_to_float64(ours.cpu(), theirs, right, ours.dtype, name=name)


@pytest.mark.parametrize("used", [None, [3, 9, 0]])
def test_varlen_with_seqused_k_or_out_over_packed_keys(cache_device, used):
    query, key, value = (torch.randn(rows, heads, 32, device=cache_device) for rows, heads in ((9, 4), (20, 2), (20, 2)))
    starts_q, starts_k = (torch.tensor(s, dtype=torch.int32, device=cache_device) for s in ([0, 2, 6, 9], [0, 5, 13, 20]))
    used = None if used is None else torch.tensor(used, dtype=torch.int32, device=cache_device)
    out = torch.empty_like(query)
    arguments = (query, key, value, starts_q, starts_k, 4, 8)
    found = flash_online.varlen_attention(*arguments, seqused_k=used, out=out, causal=True)
    assert found is out
    host = [argument.cpu() if torch.is_tensor(argument) else argument for argument in arguments]
    used = None if used is None else used.cpu()
    wanted = reference.varlen_attention(*host, seqused_k=used, causal=True)
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-5, atol=1e-6)


def refused(name: str, **changes):
    """A call of kvcache_attention that is an error about the argument `name`, by what it changes."""
    return pytest.param(name, changes, id=f"{name} {' '.join(changes)}")


@pytest.mark.parametrize(
    "name, changes",
    [
        refused("query", query=torch.zeros(4, 8, 16)),
        refused("query", query=torch.zeros(2, 4, 1, 12)),
        refused("query", query=torch.zeros(2, 4, 1, 16, dtype=torch.int64)),
        refused("key_cache", query=torch.zeros(2, 3, 1, 16)),
        refused("key_cache", query=torch.zeros(3, 4, 1, 16)),
        refused("key_cache", key_cache=torch.zeros(2, 2, 9, 16, dtype=torch.float16)),
        refused("key_cache", key_cache=torch.zeros(2, 2, 9, 16).to(torch.float8_e4m3fn)),
        refused("key_cache, value_cache", value_cache=torch.zeros(2, 2, 8, 16)),
        refused("cache_seqlens", cache_seqlens=torch.zeros(2, dtype=torch.int64)),
        refused("cache_seqlens", cache_seqlens=torch.zeros(3, dtype=torch.int32)),
        refused("block_table", block_table=torch.zeros(3, 4, dtype=torch.int32)),
        refused("block_table", block_table=torch.zeros(2, dtype=torch.int32)),
        refused("leftpad", leftpad=torch.zeros(2)),
        refused("cache_batch_idx", cache_batch_idx=torch.zeros(1, dtype=torch.int32)),
        refused("key, value", key=torch.zeros(2, 2, 1, 16)),
        refused("key", key=torch.zeros(2, 1, 1, 16), value=torch.zeros(2, 1, 1, 16)),
        refused("value", key=torch.zeros(2, 2, 1, 16), value=torch.zeros(2, 2, 2, 16)),
        refused("cu_seqlens_new", cu_seqlens_new=torch.zeros(3, dtype=torch.int32)),
        refused(
            "cu_seqlens_new",
            key=torch.zeros(3, 2, 16),
            value=torch.zeros(3, 2, 16),
            cu_seqlens_new=torch.tensor([0, 1, 3]),
        ),
        refused(
            "max_seqlen_q",
            query=torch.zeros(2, 4, 16),
            cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32),
            max_seqlen_q=-1,
        ),
        refused("rotary", rotary=(torch.zeros(9, 4),)),
        refused("rotary", rotary=(torch.zeros(9, 4), torch.zeros(9, 5))),
        refused("rotary", rotary=(torch.zeros(9, 9), torch.zeros(9, 9))),
        refused("rotary", rotary=(torch.zeros(9, 4), torch.zeros(9, 4), False, torch.zeros(3, dtype=torch.int32))),
        refused("key_scale", key_scale=torch.ones(3)),
        refused("value_scale", value_scale=torch.ones(2, dtype=torch.float64)),
        refused("window", window=(-1, 0)),
        refused("alibi_slopes", alibi_slopes=torch.ones(3, 4)),
        refused("sinks", sinks=torch.ones(2)),
        refused("num_splits", num_splits=-1),
        refused("out", out=torch.zeros(2, 4, 1, 15)),
        refused("query", query=torch.zeros(2, 4, 1, 16, requires_grad=True)),
    ],
)
def test_arguments_that_do_not_fit(name, changes):
    arguments = {
        "query": torch.zeros(2, 4, 1, 16),
        "key_cache": torch.zeros(2, 2, 9, 16),
        "value_cache": torch.zeros(2, 2, 9, 16),
        "cache_seqlens": 3,
    } | changes
    with pytest.raises(flash_online.InvalidArgument, match=f"^{name}"):
        flash_online.kvcache_attention(**arguments)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"cache_seqlens": [3, 3]}, "cache_seqlens: expected an int, or an int32 tensor with a length per sequence, got list"),
        (
            {"key": torch.zeros(3, 2, 16), "value": torch.zeros(3, 2, 16)},
            "or [rows, 2, 16] with cu_seqlens_new, got [3",
        ),
        ({"key_cache": torch.zeros(2, 9, 2, 16), "value_cache": torch.zeros(2, 9, 2, 16)}, "take transpose(1, 2)"),
        ({"query": torch.zeros(4, 4, 16)}, "or 3 with cu_seqlens_q"),
    ],
    ids=["lengths in a list", "packed keys without starts", "FlashAttention's layout", "packed queries without starts"],
)
def test_messages_say_what_to_write(changes, says):
    cache = torch.zeros(2, 2, 9, 16)
    arguments = {"query": torch.zeros(2, 4, 1, 16), "key_cache": cache, "value_cache": cache.clone(), "cache_seqlens": 3}
    with pytest.raises((TypeError, flash_online.InvalidArgument), match=re.escape(says)):
        flash_online.kvcache_attention(**(arguments | changes))


def test_a_length_that_the_host_knows_is_checked(cache_device):
    query, cache = torch.zeros(2, 2, 1, 8, device=cache_device), torch.zeros(2, 2, 9, 8, device=cache_device)
    table = torch.zeros(2, 3, dtype=torch.int32, device=cache_device)
    message = r"^cache_seqlens: expected at most the capacity, {}, got {}$"
    for most, options in ((9, {}), (27, {"block_table": table})):
        with torch.no_grad():
            flash_online.kvcache_attention(query, cache, cache, most, causal=False, **options)
            with pytest.raises(flash_online.InvalidArgument, match=message.format(most, most + 1)):
                flash_online.kvcache_attention(query, cache, cache, most + 1, **options)
    with pytest.raises(flash_online.InvalidArgument, match=message.format(9, 10)):
        flash_online.cache_append(query, query, cache, cache.clone(), cache_seqlens=10)


def test_appending_needs_one_place(cache_device):
    key, cache = torch.zeros(1, 2, 3, 8, device=cache_device), torch.zeros(1, 2, 9, 8, device=cache_device)
    slots = torch.arange(3, device=cache_device)
    for options in ({}, {"cache_seqlens": 0, "slots": slots}):
        with pytest.raises(flash_online.InvalidArgument, match=r"^cache_seqlens, slots"):
            flash_online.cache_append(key, key, cache, cache.clone(), **options)
    with pytest.raises(flash_online.InvalidArgument, match=r"^query"):
        flash_online.cache_append(key, key, cache, cache.clone(), cache_seqlens=0, query=key)
    with pytest.raises(flash_online.InvalidArgument, match=r"^rotary"):
        angles = torch.zeros(9, 4, device=cache_device)
        flash_online.cache_append(key[0].mT, key[0].mT, cache, cache, slots=slots, rotary=(angles, angles))


def raw_arguments(cache_device):
    problem = CachedProblem(lengths=RAGGED, capacity=40, page=16, head_dims=(16, 16), rotary="halves")
    made = problem.make(cache_device)
    caches = [cache.clone().nan_to_num() for cache in made.caches]
    lengths, table = made.cache_seqlens, made.options["block_table"]
    cos, sin = made.options["rotary"][:2]
    attend = (made.query, *caches, lengths, None, None, table, *(None,) * 7, 1, 1, -1, 0, True, 0.25, 0.0, 0)
    new = (made.options["key"], made.options["value"], made.query)
    append = (*caches, *new, lengths, None, None, table, None, None, None, cos, sin, None, None, None, False, True)
    return attend, append


@pytest.mark.parametrize("test", ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"])
def test_opcheck(cache_device, test):
    """The schema says what is written, and the fakes what comes back."""
    attend, append = raw_arguments(cache_device)
    ops = flash_online.ops
    for op, arguments in (
        (ops.attention_cached, attend),
        (ops.attention_cached_, (torch.empty_like(attend[0]), *attend)),
        (ops.attention_decode, (*attend[:4], attend[6], -1, 0.25, 0)),
        (ops.cache_append_, append),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=test)


def test_compiled_without_a_copy_of_the_cache(cache_device):
    """One graph, the cache written in place: no allocation is as large as it is."""
    key_cache, value_cache = (torch.zeros(1, 2, 100_000, 16, device=cache_device) for _ in range(2))
    query, new = torch.randn(1, 4, 1, 16, device=cache_device), torch.randn(1, 2, 1, 16, device=cache_device)
    lengths = torch.tensor([3], dtype=torch.int32, device=cache_device)

    def step(query, new, lengths):
        return flash_online.kvcache_attention(query, key_cache, value_cache, lengths, key=new, value=2 * new)

    expected = step(query, new, lengths)
    compiled = torch.compile(step, fullgraph=True)
    compiled(query, new, lengths)
    with torch.profiler.profile(profile_memory=True) as profile:
        found = compiled(query, new, lengths)
    assert torch.equal(found, expected)
    key = "self_device_memory_usage" if cache_device == "cuda" else "self_cpu_memory_usage"
    assert max(getattr(event, key) for event in profile.key_averages()) < key_cache.nbytes


def test_explain(cache_device):
    problem = CachedProblem(lengths=RAGGED, capacity=40, page=16)
    made = problem.make(cache_device)
    plan = flash_online.explain(flash_online.kvcache_attention, made.query, *made.caches, made.cache_seqlens, **made.options)
    assert plan.ours and plan.operators == ("cache_append_", "attention_cached") and "kernel" in plan.kernel
    assert cache_device == "cpu" or all(family in plan.kernel for family in ("decode", "sm90", "sm80"))
    untouched = problem.make(cache_device)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(made.buffers, untouched.buffers, strict=True)
    )


def test_cached_keys_have_no_gradient(cache_device):
    query = torch.randn(1, 4, 1, 16, device=cache_device, requires_grad=True)
    caches = [torch.randn(1, 2, 9, 16, device=cache_device) for _ in range(2)]
    with pytest.raises(flash_online.InvalidArgument, match=r"^query: expected .*without a gradient"):
        flash_online.kvcache_attention(query, *caches, 3)
    with torch.no_grad():
        assert flash_online.kvcache_attention(query, *caches, 3).shape == query.shape


@pytest.mark.parametrize("longest", [0, 1, 2])
def test_queries_past_the_longest_are_left_out(cache_device, longest):
    problem = replace(CachedProblem(lengths=((9, 0, 3), (4, 0, 1)), append=False, packed=(True, False)), spare_rows=(1, 0))
    made = problem.make(cache_device)
    options = made.options | {"max_seqlen_q": longest, "return_lse": True}
    out, lse = flash_online.kvcache_attention(made.query, *made.caches, made.cache_seqlens, **options)
    kept = [row for first, rows in ((0, 3), (3, 1)) for row in range(first, first + min(rows, longest))]
    rest = [row for row in range(len(out)) if row not in kept]
    assert not out[rest].any() and (lse[:, rest] == -torch.inf).all() and not out[kept].isnan().any()
    assert all(out[row].any() for row in kept)
