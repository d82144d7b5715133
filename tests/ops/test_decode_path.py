"""A step of decoding, and an append, by the fast path: the bits of the long way, its errors, and each reason to go it."""

from __future__ import annotations

import importlib

import pytest
import torch
from oracle import Operators
from torch.autograd import forward_ad

import flash_online
from flash_online import _policy

kvcache = importlib.import_module("flash_online.kvcache")


def random_steps(device, count):
    """(arguments, keywords) of calls that take the fast path: contiguous and paged, any layout, rows of any length."""
    g = torch.Generator().manual_seed(0)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (), generator=g))]

    for _ in range(count):
        batch, key_heads, group, queries = draw(1, 2, 3), draw(1, 2), draw(1, 3, 8), draw(1, 1, 2, 5)
        width, width_v, page, entries = draw(8, 64, 65), draw(8, 64, 70), draw(1, 4, 16), draw(1, 3, 40)
        dtype, paged, options = draw(torch.float32, torch.float16, torch.bfloat16), draw(False, True), {}
        blocks, page = (batch * entries, page) if paged else (batch, page * entries)
        like = dict(generator=g, dtype=torch.float32)
        query = torch.randn(batch, queries, key_heads * group, width, **like).transpose(1, 2)
        caches = [torch.randn(blocks, page, key_heads, w, **like).transpose(1, 2) for w in (width, width_v)]
        if draw(False, True):
            query, caches = query.contiguous(), [cache.contiguous() for cache in caches]
        lengths = torch.randint(-1, page * entries + 2, (batch,), generator=g).to(torch.int32)
        if paged:
            table = torch.randint(-1, blocks + 1, (batch, entries + 1), generator=g).to(torch.int32)
            options["block_table"] = table[:, :entries].to(device)
        options["window"] = draw(None, (None, None), (3, None), (20, 0), (0, 4))
        options["scale"], options["num_splits"] = draw(None, 0.5), draw(None, 0, 1, 3)
        yield [tensor.to(device) for tensor in (query.to(dtype), *(c.to(dtype) for c in caches), lengths)], options


def outcome(function, *args, **kwargs):
    """What a call returns, or the type and text of its error."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


def by_the_long_way(monkeypatch, function, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(kvcache, "try_fast_path", lambda *args: None)
        patch.setattr(kvcache, "_try_fast_append", lambda *args: False)
        return outcome(function, *args, **kwargs)


@pytest.fixture
def taken(monkeypatch):
    """What the fast paths answer, call by call."""
    answers = []

    def noting(original):
        def noted(*args):
            answers.append(original(*args))
            return answers[-1]

        return noted

    for name in ("try_fast_path", "_try_fast_append"):
        monkeypatch.setattr(kvcache, name, noting(getattr(kvcache, name)))
    return answers


def test_the_bits_of_the_long_way(cache_device, taken, monkeypatch):
    for arguments, options in random_steps(cache_device, 60):
        found = flash_online.kvcache_attention(*arguments, **options)
        assert taken.pop() is found, (arguments[0].shape, options)
        wanted = by_the_long_way(monkeypatch, flash_online.kvcache_attention, *arguments, **options)
        with_lse, _ = flash_online.kvcache_attention(*arguments, **options, return_lse=True)
        assert found.stride() == wanted.stride() == with_lse.stride() and found.dtype == wanted.dtype
        assert torch.equal(found, wanted) and torch.equal(found, with_lse), options


@pytest.mark.parametrize("keys", [None, 0, 1, 70, 300])
def test_lengths_that_the_host_knows(cache_device, taken, keys):
    """One number for all sequences, or none: the results of a tensor of these lengths."""
    query, caches = torch.randn(2, 8, 1, 64), [torch.randn(2, 2, 300, 64) for _ in range(2)]
    tensors = [tensor.to(cache_device, torch.bfloat16) for tensor in (query, *caches)]
    lengths = torch.full((2,), 300 if keys is None else keys, dtype=torch.int32, device=cache_device)
    for options in ({}, {"num_splits": 2}, {"window": (40, None), "num_splits": 1}):
        found = flash_online.kvcache_attention(*tensors, keys, **options)
        assert taken.pop() is found
        out, lse = flash_online.kvcache_attention(*tensors, keys, **options, return_lse=True)
        expected, expected_lse = flash_online.kvcache_attention(*tensors, lengths, **options, return_lse=True)
        assert torch.equal(lse, expected_lse) and torch.equal(out, expected)
        # Without num_splits CUDA cuts keys by the room that there is, which the fast path knows to be less.
        torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
        assert torch.equal(found, expected) or (cache_device != "cpu" and "num_splits" not in options)


def test_both_ways_have_the_plan_of_explain(cache_device, monkeypatch):
    arguments, options = next(random_steps(cache_device, 1))
    plan = flash_online.explain(flash_online.kvcache_attention, *arguments, **options)
    with Operators() as fast:
        flash_online.kvcache_attention(*arguments, **options)
    with Operators() as long:
        by_the_long_way(monkeypatch, flash_online.kvcache_attention, *arguments, **options)
    assert fast.names == long.names == list(plan.operators) == ["attention_decode"]
    if cache_device == "cpu":
        assert plan.extra_bytes == 0


Q, K, V = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 6)
N, TABLE = torch.tensor([5, 9], dtype=torch.int32), torch.tensor([[1, 0], [0, 7]], dtype=torch.int32)


class Subclass(torch.Tensor):
    pass


class Quiet(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


LONG_WAY = {
    "an int over the capacity": {"cache_seqlens": 10},
    "an int below 0": {"cache_seqlens": -1},
    "an int for pages": {"cache_seqlens": 3, "block_table": TABLE},
    "True for all": {"cache_seqlens": True},
    "not causal": {"causal": False},
    "causal is 1": {"causal": 1},
    "lse": {"return_lse": True},
    "lse is 0": {"return_lse": 0},
    "softcap": {"softcap": 2.0},
    "softcap in a string": {"softcap": "0"},
    "softcap in a tensor": {"softcap": torch.tensor(0.0)},
    "sinks": {"sinks": torch.zeros(4)},
    "slopes": {"alibi_slopes": torch.ones(4)},
    "out": {"out": torch.empty(2, 4, 1, 6)},
    "scales": {"key_scale": torch.ones(1)},
    "leftpad": {"leftpad": N - 4},
    "rows": {"cache_batch_idx": N % 2},
    "new keys": {"key": torch.randn(2, 2, 1, 8), "value": torch.randn(2, 2, 1, 6)},
    "a key alone": {"key": torch.randn(2, 2, 1, 8)},
    "rotary": {"rotary": (torch.ones(9, 4), torch.ones(9, 4))},
    "packed": {"query": Q[:, :, 0], "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32)},
    "the longest": {"max_seqlen_q": 1},
    "starts of nothing new": {"cu_seqlens_new": N},
    "window in a list": {"window": [3, 0]},
    "window of one": {"window": (3,)},
    "window below 0": {"window": (-1, 0)},
    "window's right below 0": {"window": (1, -1)},
    "window of floats": {"window": (1.0, 0)},
    "a vast window": {"window": (2**40, 0)},
    "scale is an int": {"scale": 1},
    "scale in a tensor": {"scale": torch.tensor(0.5)},
    "scale in a string": {"scale": "1"},
    "splits below 0": {"num_splits": -1},
    "splits of True": {"num_splits": True},
    "splits of a float": {"num_splits": 2.0},
    "a parameter": {"query": torch.nn.Parameter(Q, requires_grad=False)},
    "a gradient": {"query": Q.clone().requires_grad_()},
    "a cache's gradient": {"value_cache": V.clone().requires_grad_()},
    "a subclass": {"key_cache": K.as_subclass(Subclass)},
    "a subclass without a function": {"query": Q.as_subclass(Quiet)},
    "lengths of a subclass": {"cache_seqlens": N.as_subclass(Quiet)},
    "a list": {"query": Q.tolist()},
    "rank 3": {"query": Q[0]},
    "a cache of rank 3": {"key_cache": K[0]},
    "widths": {"query": Q[..., :5]},
    "pages": {"value_cache": V[:, :, :8]},
    "heads": {"query": Q[:, :3]},
    "no heads": {"query": Q[:, :0]},
    "no heads at all": {"query": Q[:, :0], "key_cache": K[:, :0], "value_cache": V[:, :0]},
    "sequences": {"query": Q[:1], "cache_seqlens": N[:1]},
    "lengths of others": {"cache_seqlens": N[:1]},
    "wide lengths": {"cache_seqlens": N.long()},
    "a table of lengths": {"cache_seqlens": N[None]},
    "lengths that lie apart": {"cache_seqlens": torch.stack([N, N], 1)[:, 0]},
    "a table of others": {"block_table": TABLE[:1]},
    "a wide table": {"block_table": TABLE.long()},
    "a table of rank 1": {"block_table": N},
    "a table's columns apart": {"block_table": TABLE.t().contiguous().t()},
    "dtypes": {"query": Q.double()},
    "a float8 cache": {"query": Q.half(), **{n: t.to(torch.float8_e5m2) for n, t in (("key_cache", K), ("value_cache", V))}},
    "integers": {"query": Q.long(), "key_cache": K.long(), "value_cache": V.long()},
    "complex": {"query": Q.cfloat(), "key_cache": K.cfloat(), "value_cache": V.cfloat()},
    "sparse": {"query": Q.to_sparse()},
    "sparse lengths": {"cache_seqlens": N.to_sparse()},
    "nested": {"query": torch.nested.nested_tensor(list(Q))},
    "meta": {"query": Q.to("meta"), "key_cache": K.to("meta"), "value_cache": V.to("meta")},
    "a cache on meta": {"key_cache": K.to("meta")},
    "lengths on meta": {"cache_seqlens": N.to("meta")},
    "a table on meta": {"block_table": TABLE.to("meta")},
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", LONG_WAY)
def test_every_reason_to_go_the_long_way(name, taken, monkeypatch):
    changes = LONG_WAY[name]
    call = {"query": Q, "key_cache": K, "value_cache": V, "cache_seqlens": N} | changes
    copies = [{k: t.clone() if k.endswith("_cache") and type(t) is torch.Tensor else t for k, t in call.items()} for _ in "ab"]
    found = outcome(flash_online.kvcache_attention, **copies[0])
    assert all(answer is None for answer in taken)
    wanted = by_the_long_way(monkeypatch, flash_online.kvcache_attention, **copies[1])
    if isinstance(found, torch.Tensor) and found.device.type != "meta":
        assert torch.equal(found, wanted)
    elif not isinstance(found, torch.Tensor) and not isinstance(found[0], torch.Tensor):
        assert found == wanted


@pytest.mark.parametrize("mode", ["forward-mode AD", "vmap", "an older GPU", "float64 on CUDA"])
def test_modes_go_the_long_way(mode, taken, monkeypatch):
    call = (Q, K, V, N)
    if mode == "forward-mode AD":
        long_way = by_the_long_way(monkeypatch, flash_online.kvcache_attention, *call)
        with forward_ad.dual_level():
            assert torch.equal(flash_online.kvcache_attention(*call), long_way)
    elif mode == "vmap":
        with pytest.raises(NotImplementedError, match="vmap"):
            torch.func.vmap(lambda q: flash_online.kvcache_attention(q, K, V, N))(Q[None])
    elif not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    elif mode == "an older GPU":
        monkeypatch.setattr(_policy, "_majors", {0: 7})
        with pytest.raises(NotImplementedError, match="older"):
            flash_online.kvcache_attention(*(t.cuda() for t in call))
    else:
        with pytest.raises(NotImplementedError, match="float64"):
            flash_online.kvcache_attention(*(t.cuda().double() for t in call[:3]), N.cuda())
    assert all(answer is None for answer in taken)


def test_without_gradients_what_could_have_one_takes_it(taken):
    query = Q.clone().requires_grad_()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert flash_online.kvcache_attention(query, K, V, N) is taken.pop()
    with flash_online.strict(), torch.autocast("cpu", torch.bfloat16):  # there is nothing that autocast casts, or torch runs
        assert flash_online.kvcache_attention(Q, K, V, N) is taken.pop()


def append_call(**changes):
    new = {"key": torch.randn(2, 2, 3, 8), "value": torch.randn(2, 2, 3, 6), "cache_seqlens": N - 3}
    return new | {"key_cache": torch.zeros_like(K), "value_cache": torch.zeros_like(V)} | changes


ROWS = {"key": torch.randn(3, 2, 8), "value": torch.randn(3, 2, 6), "cache_seqlens": None, "slots": torch.tensor([4, -1, 17])}
APPENDS = {
    "ends": ({}, True),
    "pages": ({"block_table": TABLE}, True),
    "slots": (ROWS, True),
    "both": ({"slots": torch.tensor([1])}, False),
    "neither": ({"cache_seqlens": None}, False),
    "slots and a table": (ROWS | {"block_table": TABLE}, False),
    "slots that are short": (ROWS | {"slots": torch.tensor([4])}, False),
    "slots of int32": (ROWS | {"slots": torch.tensor([4, 1, 2], dtype=torch.int32)}, False),
    "slots apart": (ROWS | {"slots": torch.arange(6)[::2]}, False),
    "an int": ({"cache_seqlens": 2}, False),
    "scales": ({"key_scale": torch.full((1,), 2.0)}, False),
    "starts": (ROWS | {"slots": None, "cache_seqlens": N - 3, "cu_seqlens_new": N.new_tensor([0, 1, 3])}, False),
    "heads": ({"key": torch.randn(2, 1, 3, 8), "value": torch.randn(2, 1, 3, 6)}, False),
    "lengths": ({"value": torch.randn(2, 2, 2, 6)}, False),
    "widths": ({"value": torch.randn(2, 2, 3, 5)}, False),
    "a query": ({"query": Q}, False),
    "a gradient": ({"key": torch.randn(2, 2, 3, 8, requires_grad=True)}, False),
    "dtypes": ({"key": torch.randn(2, 2, 3, 8).double()}, False),
    "rank 3": ({"key": torch.randn(2, 3, 8)}, False),
}


@pytest.mark.parametrize("name", APPENDS)
def test_appends(name, taken, monkeypatch):
    changes, fast = APPENDS[name]
    torch.manual_seed(3)
    ours = append_call(**changes)
    theirs = {k: t.clone() if k.endswith("_cache") else t for k, t in ours.items()}
    found = outcome(flash_online.cache_append, **ours)
    assert not taken or taken == [fast]
    assert bool(taken and taken[0]) == fast
    assert found == by_the_long_way(monkeypatch, flash_online.cache_append, **theirs)
    caches = ("key_cache", "value_cache")
    assert all(torch.equal(ours[k], theirs[k]) for k in caches) and (not fast or all(ours[k].any() for k in caches))


@pytest.mark.parametrize("way", ["_run_decode", "_run_append"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("a launch failed")], ids=repr)
def test_an_error_of_the_operator_surfaces_once(way, error, monkeypatch):
    calls = []

    def fail(*args):
        calls.append(args)
        raise error

    monkeypatch.setattr(kvcache, way, fail)
    with pytest.raises(type(error), match=str(error)):
        flash_online.kvcache_attention(Q, K, V, N) if way == "_run_decode" else flash_online.cache_append(**append_call())
    assert len(calls) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(cache_device, dynamic):
    """One graph, of the operator alone: no allocation is as large as a cache."""
    key_cache, value_cache = (torch.randn(2, 2, 50_000, 16, device=cache_device) for _ in range(2))
    query, lengths = torch.randn(2, 4, 1, 16, device=cache_device), N.to(cache_device)

    def step(query, lengths):
        return flash_online.kvcache_attention(query, key_cache, value_cache, lengths, window=(4, 0), num_splits=2)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    expected = step(query, lengths)
    assert torch.equal(compiled(query, lengths), expected)
    with torch.profiler.profile(profile_memory=True) as profile:
        found = compiled(query, lengths)
    assert torch.equal(found, expected)
    events = profile.key_averages()
    key = "self_device_memory_usage" if cache_device == "cuda" else "self_cpu_memory_usage"
    assert max(getattr(event, key) for event in events) < key_cache.nbytes
    assert {e.key for e in events if e.key.startswith("flash_online::")} == {"flash_online::attention_decode"}
