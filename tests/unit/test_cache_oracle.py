"""The oracle of cached attention, compared with loops over single numbers and with complex rotations; and the problems of
cache_cases.py, which have to notice wrong functions. They check lengths, packed rows and appends of the oracle too."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from cache_cases import CachedProblem, random_cached

from flash_online import reference

NAN, INF = math.nan, math.inf
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def close(ours, expected, tolerance=1e-12):
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)


def by_hand(query, keys, values, *, causal=True, window=None, left=0, scale=None, softcap=0.0, slopes=None, sinks=None):
    """out [Hq, L, Ev] and lse [Hq, L] of query [Hq, L, E] over keys [Hkv, n, E] from `left` on: a loop over rows and keys."""
    (heads, queries, head_dim), count = query.shape, keys.shape[1]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    out = torch.zeros(heads, queries, values.shape[-1], dtype=torch.float64)
    lse = torch.full((heads, queries), -INF, dtype=torch.float64)
    low, high = window or (None, None)
    for h, i in itertools.product(range(heads), range(queries)):
        own, p = h // (heads // keys.shape[0]), i + count - queries
        terms, total = [], 0.0 if sinks is None else math.exp(sinks[h])
        for j in range(left, count):
            if (causal and j > p) or (low is not None and j < p - low) or (high is not None and j > p + high):
                continue
            score = scale * float(query[h, i].double() @ keys[own, j].double())
            score = softcap * math.tanh(score / softcap) if softcap else score
            score -= 0.0 if slopes is None else float(slopes[h]) * abs(p - j)
            terms.append((math.exp(score), values[own, j].double()))
        total += sum(weight for weight, _ in terms)
        for weight, value in terms:
            out[h, i] += weight / total * value
        lse[h, i] = math.log(total) if total else -INF
    return out, lse


class Scene:
    """Sequences of random keys by position, keys and values [B, Hkv, capacity, width], in caches with NaN in all other rows."""

    def __init__(self, lengths, *, queries=1, heads=(4, 2), widths=(8, 8), page=None, capacity=24, dtype=torch.float64):
        count, (query_heads, self.heads) = len(lengths), heads
        self.lengths, self.page = lengths, page
        self.query = torch.randn(count, query_heads, queries, widths[0], dtype=dtype)
        self.keys, self.values = (torch.full((count, self.heads, capacity, w), NAN, dtype=dtype) for w in widths)
        for n, length in enumerate(lengths):
            for held in (self.keys, self.values):
                held[n, :, :length] = torch.randn(self.heads, length, held.shape[-1], dtype=dtype)
        if page:
            entries = capacity // page
            self.table = torch.randperm(count * entries + 2)[: count * entries].view(count, entries).to(torch.int32)
        self.options = {"block_table": self.table} if page else {}
        self.seqlens = torch.tensor(lengths, dtype=torch.int32)

    def store(self, held):
        """The cache that holds keys or values [B, Hkv, capacity, width] by position."""
        if not self.page:
            return held.clone()
        pool = held.new_full((self.table.numel() + 2, self.heads, self.page, held.shape[-1]), NAN)
        for n, entry in itertools.product(*map(range, self.table.shape)):
            pool[self.table[n, entry]] = held[n, :, entry * self.page : (entry + 1) * self.page]
        return pool

    @property
    def caches(self):
        return self.store(self.keys), self.store(self.values)

    def check(self, options, **expected):
        """Compares the oracle's call with by_hand of each sequence; an expected option that is a list has an entry for each."""
        found = reference.kvcache_attention(self.query, *self.caches, self.seqlens, **self.options, **options, return_lse=True)
        for n, length in enumerate(self.lengths):
            own = {name: x[n] if isinstance(x, list) else x for name, x in expected.items()}
            wanted = by_hand(self.query[n], self.keys[n, :, :length], self.values[n, :, :length], **own)
            for ours, theirs in zip(found, wanted, strict=True):
                close(ours[n], theirs)


OPTIONS = {
    "plain": {},
    "all keys": {"causal": False},
    "window": {"causal": False, "window": (3, 2)},
    "window left": {"causal": False, "window": (4, None)},
    "window right": {"causal": False, "window": (None, 1)},
    "causal window": {"window": (2, 5)},
    "softcap": {"softcap": 0.7},
    "scale": {"scale": -0.4},
    "zero scale": {"scale": 0.0},
    "all": {"window": (6, None), "softcap": 1.5, "scale": 0.6},
}


@pytest.mark.parametrize("page", [None, 3])
@pytest.mark.parametrize("heads, widths", [((4, 2), (8, 8)), ((3, 1), (5, 3)), ((2, 2), (1, 7))])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, heads, widths, page):
    """Also of sequences with fewer keys than queries, and with none."""
    scene = Scene([9, 3, 0, 12], queries=4, heads=heads, widths=widths, page=page, capacity=12)
    scene.check(OPTIONS[name], **OPTIONS[name])


@pytest.mark.parametrize("name", ["plain", "all"])
def test_slopes_sinks_and_leftpad(name):
    scene, options = Scene([9, 2, 0], queries=4), OPTIONS[name]
    sinks, slopes = torch.randn(4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)
    scene.check({"sinks": sinks, "alibi_slopes": slopes, **options}, sinks=sinks, slopes=list(slopes), **options)
    scene.check({"alibi_slopes": slopes[0], **options}, slopes=slopes[0], **options)
    leftpad = torch.tensor([4, -3, 0], dtype=torch.int32)
    scene.keys[0, :, :4] = NAN
    scene.check({"leftpad": leftpad, **options}, left=[4, 0, 0], **options)


def test_a_float64_query_makes_the_truth_of_any_cache():
    scene = Scene([24, 11], queries=3, page=8, dtype=torch.bfloat16)
    scene.query = scene.query.double()
    scene.check({})


@pytest.mark.parametrize("entry", [-1, 38, 2**31 - 1, -(2**31)])
def test_entries_outside_the_pool_read_as_zeros(entry):
    scene = Scene([11, 5, 8], page=2, queries=2)
    assert scene.caches[0].shape[0] == 38
    caches = scene.caches
    scene.table[0, 1] = scene.table[1, 2] = entry
    scene.keys[0, :, 2:4] = scene.values[0, :, 2:4] = scene.keys[1, :, 4:6] = scene.values[1, :, 4:6] = 0
    out, lse = reference.kvcache_attention(scene.query, *caches, scene.seqlens, block_table=scene.table, return_lse=True)
    for n, length in enumerate(scene.lengths):
        wanted = by_hand(scene.query[n], scene.keys[n, :, :length], scene.values[n, :, :length])
        close(out[n], wanted[0]), close(lse[n], wanted[1])


@pytest.mark.parametrize(
    "starts, longest, sequences",
    [
        ([0, 4, 8], 3, [(0, 3), (4, 7)]),
        ([-5, 2, 900], None, [(0, 2), (2, 8)]),
        ([0, 3, 1], None, [(0, 3), (3, 3)]),
    ],
    ids=["longer than max_seqlen_q", "outside the tensor", "out of order"],
)
def test_packed_rows_of_no_sequence_are_padding(starts, longest, sequences):
    scene, starts = Scene([9, 9], queries=4), torch.tensor(starts, dtype=torch.int32)
    packed = scene.query.transpose(1, 2).flatten(0, 1)
    options = {"cu_seqlens_q": starts, "max_seqlen_q": longest, "return_lse": True}
    out, lse = reference.kvcache_attention(packed, *scene.caches, scene.seqlens, **options)
    padding = torch.ones(8, dtype=torch.bool)
    for n, (begin, end) in enumerate(sequences):
        padding[begin:end] = False
        wanted = by_hand(packed[begin:end].transpose(0, 1), scene.keys[n, :, :9], scene.values[n, :, :9])
        close(out[begin:end].transpose(0, 1), wanted[0]), close(lse[:, begin:end], wanted[1])
    assert not out[padding].any() and (lse[:, padding] == -INF).all()
    if longest is None:
        angles = torch.rand(30, 4, dtype=torch.float64)
        options = {"cu_seqlens_new": starts, "cache_seqlens": 0, "rotary": (angles.cos(), angles.sin()), "query": packed}
        turned = reference.cache_append(packed[:, :2], packed[:, :2], *scene.caches, **options)
        assert not turned[padding].any() and turned[~padding].any()


def test_rows_outside_the_cache_read_as_zeros():
    scene = Scene([6, 6])
    rows = torch.tensor([-1, 2], dtype=torch.int32)
    out, lse = reference.kvcache_attention(scene.query, *scene.caches, 6, cache_batch_idx=rows, return_lse=True)
    assert not out.any()
    close(lse, torch.full((2, 4, 1), math.log(6), dtype=torch.float64))


def rotated(rows, positions, cos, sin, interleaved):
    """Rows [..., rows, E] rotated as complex numbers, in float64."""
    width = 2 * cos.shape[-1]
    positions = torch.tensor(positions).clamp(0, len(cos) - 1)
    rotation = torch.complex(cos.double()[positions], sin.double()[positions])
    pairs = rows[..., :width].double().unflatten(-1, (width // 2, 2) if interleaved else (2, width // 2))
    pairs = pairs if interleaved else pairs.transpose(-2, -1)
    turned = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * rotation)
    turned = (turned if interleaved else turned.transpose(-2, -1)).flatten(-2)
    return torch.cat([turned, rows[..., width:].double()], -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("width", [2, 6, 8, 0])
@pytest.mark.parametrize("how", ["causal", "window", "neither", "offsets", "clamped"])
def test_rotary(how, width, interleaved):
    """New keys at n_old + i or offset + i; queries too, but all at n_old where neither causal nor window is given."""
    scene, lengths = Scene([8, 3, 14], queries=2, page=4), [5, 0, 11]
    angles = torch.rand(4 if how == "clamped" else 30, width // 2, dtype=torch.float64) * 6
    rotary, first = (angles.cos(), angles.sin(), interleaved), [2, 40, 0] if how == "offsets" else lengths
    options = {"causal": how not in ("window", "neither"), "window": (4, 0) if how == "window" else None}
    caches, starts = scene.caches, torch.tensor(lengths, dtype=torch.int32)
    rows = [torch.stack([held[n, :, n0 : n0 + 3] for n, n0 in enumerate(lengths)]) for held in (scene.keys, scene.values)]
    given = (*rotary, torch.tensor(first, dtype=torch.int32)) if how == "offsets" else rotary
    out, lse = reference.kvcache_attention(
        scene.query, *caches, starts, key=rows[0], value=rows[1], rotary=given, **scene.options, **options, return_lse=True
    )
    for n, n0 in enumerate(lengths):
        scene.keys[n, :, n0 : n0 + 3] = rotated(rows[0][n], [first[n] + i for i in range(3)], *rotary)
        query = rotated(scene.query[n], [first[n] + i * (how != "neither") for i in range(2)], *rotary)
        wanted = by_hand(query, scene.keys[n, :, : n0 + 3], scene.values[n, :, : n0 + 3], **options)
        close(out[n], wanted[0]), close(lse[n], wanted[1])
    close(caches[0].nan_to_num(-99), scene.store(scene.keys).nan_to_num(-99))


def nearest(x, dtype):
    """A float64 number as the nearest of dtype's finite numbers, of two the one with the even code."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(dtype).double()
    numbers = torch.where(numbers.isfinite(), numbers, INF)
    distance = (numbers - max(min(x, 1e6), -1e6)).abs()
    best = codes[distance == distance.min()]
    return float(best[best % 2 == 0][:1].view(dtype).double() if len(best) > 1 else best.view(dtype).double())


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_is_rounded_to_nearest_even_and_saturates(dtype):
    largest = torch.finfo(dtype).max
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].unique()
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, ties, ties * 1.0001, ties * 0.9999, torch.randn(50), torch.tensor([1e9, -1e9, INF, -INF])])
    x = torch.cat([x, torch.tensor([1.0, 1.03, 1.1]) * largest])
    for scale in (None, torch.tensor(3.0), torch.tensor(41.0)):  # 41 times the float32 nearest to 1 / 41 is not 1
        rows = (x if scale is None else x * scale).view(1, 1, -1, 1)
        caches = [torch.zeros(1, 1, len(x), 1, dtype=dtype) for _ in range(2)]
        reference.cache_append(rows, -rows, *caches, cache_seqlens=0, key_scale=scale, value_scale=scale)
        divided = rows.flatten() if scale is None else rows.flatten() / scale
        expected = torch.tensor([nearest(float(number), dtype) for number in divided])
        assert torch.equal(caches[0].flatten().float(), expected)
        assert torch.equal(caches[1].flatten().float(), -expected)
    rows = torch.tensor([NAN, 1.0, -NAN]).view(1, 1, 3, 1)
    reference.cache_append(rows, rows, *(caches := [torch.zeros(1, 1, 3, 1, dtype=dtype) for _ in range(2)]), cache_seqlens=0)
    assert caches[0].flatten().float().isnan().tolist() == [True, False, True]


def test_scales_are_not_rounded_to_the_dtype_of_the_query():
    held = torch.randn(3, 2, 1, 8).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2) + 0.5
    out = reference.kvcache_attention(torch.randn(3, 2, 1, 8).bfloat16(), held, held, 1, value_scale=scale)
    assert torch.equal(out, (held.float() * scale[..., None, None]).bfloat16())


@pytest.mark.parametrize("alignment", ["lower_right", "upper_left"])
def test_varlen_attention_reads_pages(alignment):
    """Of sequences with more and with fewer keys than queries, some queries unused."""
    scene, used = Scene([9, 4, 12], queries=5, page=3), [5, 2, 5]
    pools, packed = [cache.transpose(1, 2) for cache in scene.caches], scene.query.transpose(1, 2).flatten(0, 1)
    starts = torch.tensor([0, 5, 10, 15], dtype=torch.int32)
    options = {"causal": True, "alignment": alignment, "seqused_q": torch.tensor(used, dtype=torch.int32)}
    sizes = torch.tensor([0, 9, 13, 25], dtype=torch.int32)
    for lengths in ({"cu_seqlens_k": None, "seqused_k": scene.seqlens}, {"cu_seqlens_k": sizes}):
        out = reference.varlen_attention(
            *(packed, *pools, starts), **lengths, max_seqlen_q=5, max_seqlen_k=24, block_table=scene.table, **options
        )
        for n, (length, count) in enumerate(zip(scene.lengths, used, strict=True)):
            dense = (t[n, :, :end] for t, end in ((scene.query, count), (scene.keys, length), (scene.values, length)))
            close(out[5 * n : 5 * n + count].transpose(0, 1), reference.attention(*dense, causal=True, alignment=alignment))
        assert (out[7:10] == 0).all()


def test_arguments_that_do_not_fit():
    scene, slots, angles = Scene([5], page=3), torch.zeros(1, dtype=torch.int64), torch.rand(9, 8, dtype=torch.float64)
    key, caches, packed = torch.randn(1, 2, 1, 8, dtype=torch.float64), scene.caches, [torch.zeros(5, 2, 8)] * 3
    starts = torch.tensor([0, 5], dtype=torch.int32)

    def attend(query=scene.query, lengths=scene.seqlens, **options):
        return reference.kvcache_attention(query, *caches, lengths, **scene.options, **options)

    def append(rows=key[:, :, 0], **options):
        return reference.cache_append(rows, rows, *caches, **options)

    wrong = {
        "key, value": lambda: attend(key=key),
        "key, value: expected four": lambda: attend(key=key[:, :, 0], value=key[:, :, 0]),
        "query: .*dimensions.*got 3": lambda: attend(scene.query[0]),
        "block_table: expected 2 rows.*got 1": lambda: attend(scene.query.repeat(2, 1, 1, 1), 1),
        "rotary: expected .*got 16": lambda: attend(rotary=(angles, angles)),
        "cache_seqlens, slots: .*none": lambda: append(),
        "cache_seqlens, slots: .*both": lambda: append(slots=slots, cache_seqlens=1),
        "^slots: expected no": lambda: append(slots=slots, block_table=scene.table),
        "rotary: expected offsets": lambda: append(slots=slots, rotary=(angles, angles)),
        "query: expected None without rotary": lambda: append(slots=slots, query=key[:, :, 0]),
        "dropout_p": lambda: reference.varlen_attention(*packed, starts, starts, 5, 5, dropout_p=0.5, num_splits=1),
        "no gradient": lambda: attend(scene.query.clone().requires_grad_()),
        "has no gradient": lambda: append(key.requires_grad_(), cache_seqlens=0),
    }
    for message, call in wrong.items():
        with pytest.raises((ValueError, RuntimeError), match=message):
            call()


# --- the problems of cache_cases.py ---


def accurate(query, *caches_and_lengths, out=None, return_lse=False, **options):
    """A function that is right: the oracle, in float32 for 16-bit inputs."""
    wide = query.to(reference.accumulator_dtype(query.dtype))
    result, lse = reference.kvcache_attention(wide, *caches_and_lengths, return_lse=True, **options)
    result = result.to(query.dtype) if out is None else out.copy_(result)
    return (result, lse) if return_lse else result


def test_random_problems_of_a_right_function():
    for seed in range(100):
        problem = random_cached(seed)
        problem.check(accurate)
        problem.check_append(reference.cache_append)
        problem.check_append(reference.cache_append, slots=True)


def test_problems_are_repeated_by_their_seed_and_their_text():
    problem = random_cached(11)
    again = eval(repr(problem), {"CachedProblem": CachedProblem, "torch": torch})
    assert again == problem == random_cached(11) != random_cached(12)
    first, second = problem.make(), again.make()
    assert all(torch.equal(*(t.nan_to_num(-9) for t in pair)) for pair in zip(first.caches, second.caches, strict=True))


def test_unused_memory_of_a_problem_is_nan():
    problem = CachedProblem(page=4, options={"window": (2, None)})
    made = problem.make()
    keys = made.caches[0]
    assert keys.isnan().float().mean() > 0.5
    seen = sum(min(end, 3) - 1 for end in made.ends)  # of a window of 3 keys, all but the one that is appended
    assert int((~keys.isnan()).any(-1).any(1).sum()) == seen


PROBLEM = CachedProblem(
    dtype=torch.bfloat16, head_dims=(16, 8), page=4, lengths=((9, 2, 2), (3, 1, 1), (21, 2, 3)), packed=(True, True),
    leftpad=(2, 0, 7), batch_idx=True, rotary="halves", sinks=True, alibi=2, give_out=True, options={"softcap": 2.0},
)  # fmt: skip


def with_options(**changes):
    """accurate, with some options changed: by a function of their value, or to another value."""

    def wrong(*args, **options):
        for name, change in changes.items():
            options[name] = change(options[name]) if callable(change) else change
        return accurate(*args, **options)

    return wrong


def with_lengths(change):
    def wrong(query, key_cache, value_cache, lengths, **options):
        return accurate(query, key_cache, value_cache, change(lengths), **options)

    return wrong


def writes_a_row_more(query, key_cache, value_cache, lengths, **options):
    block = int(options["block_table"][options["cache_batch_idx"][0].item(), 0])
    key_cache[block, :, 0] = 0
    return accurate(query, key_cache, value_cache, lengths, **options)


def rounds_twice(query, key_cache, value_cache, lengths, **options):
    options["key"] = options["key"] * 1.01
    return accurate(query, key_cache, value_cache, lengths, **options)


def changes_a_result(part):
    def wrong(*args, **options):
        results = accurate(*args, **options)
        part(*results)
        return results

    return wrong


WRONG = {
    "leftpad ignored": with_options(leftpad=torch.zeros_like),
    "not causal": with_options(causal=False),
    "no softcap": with_options(softcap=0.0),
    "softcap off by a percent": with_options(softcap=2.05),
    "sinks left out": with_options(sinks=None),
    "slopes of another sequence": with_options(alibi_slopes=lambda t: t.flip(0)),
    "pairs interleaved": with_options(rotary=lambda r: (*r[:2], True)),
    "positions off by one": with_options(rotary=lambda r: (r[0].roll(1, 0), r[1].roll(1, 0))),
    "rows of the table ignored": with_options(cache_batch_idx=lambda t: torch.arange(len(t))),
    "out not written": with_options(out=None),
    "a key less": with_lengths(lambda t: t - 1),
    "a key more": with_lengths(lambda t: t + 1),
    "lengths written": with_lengths(lambda t: t.add_(0).clamp_(max=20)),
    "a row more written": writes_a_row_more,
    "keys rounded twice": rounds_twice,
    "padding not cleared": changes_a_result(lambda out, lse: out[-1].fill_(NAN)),
    "lse of padding": changes_a_result(lambda out, lse: lse[:, -1].fill_(0)),
    "lse without float32's digits": changes_a_result(lambda out, lse: lse.copy_(lse.bfloat16())),
    "out off by a tenth": changes_a_result(lambda out, lse: out.mul_(1.1)),
}


def test_a_right_function_passes():
    PROBLEM.check(accurate)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_is_noticed(name):
    with pytest.raises(AssertionError):
        PROBLEM.check(WRONG[name])


def test_a_wrong_float8_cache_is_noticed():
    problem = replace(PROBLEM, cache_dtype=torch.float8_e4m3fn, scales="all")
    problem.check(accurate)
    for wrong in (with_options(value_scale=None), with_options(key_scale=lambda t: t * 1.05), rounds_twice):
        with pytest.raises(AssertionError):
            problem.check(wrong)


def test_entries_that_are_clamped_are_noticed():
    problem = replace(PROBLEM, holes=0.5, seed=3)
    problem.check(accurate)
    with pytest.raises(AssertionError):
        problem.check(with_options(block_table=lambda t: t.clamp(min=0)))


def test_wrong_slots_are_noticed():
    def shifted(*args, slots, **options):
        return reference.cache_append(*args, slots=slots + 1, **options)

    def skips_none(*args, slots, **options):
        return reference.cache_append(*args, slots=slots.clamp(min=0), **options)

    PROBLEM.check_append(reference.cache_append, slots=True)
    for wrong in (shifted, skips_none):
        with pytest.raises(AssertionError):
            PROBLEM.check_append(wrong, slots=True)
