"""The oracle of cached attention, compared with loops over single numbers, torch's scaled_dot_product_attention and complex
rotations; and the problems of cache_cases.py, which have to notice wrong functions."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from cache_cases import CachedProblem, random_cached
from cases import DTYPES

from flash_online import reference
from flash_online.testing import assert_close_to_float64

NAN, INF = math.nan, math.inf
NONE = (None, None)
PAGES = [None, 1, 3, 8]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def close(ours, expected, tolerance=1e-12):
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def by_hand(query, keys, values, *, causal=True, window=NONE, left=0, scale=None, softcap=0.0, slopes=None, sinks=None):
    """out [Hq, L, Ev] and lse [Hq, L] of query [Hq, L, E] over keys [Hkv, n, E] from `left` on: a loop over rows and keys."""
    (heads, queries, head_dim), count = query.shape, keys.shape[1]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    out = torch.zeros(heads, queries, values.shape[-1], dtype=torch.float64)
    lse = torch.full((heads, queries), -INF, dtype=torch.float64)
    for h, i in itertools.product(range(heads), range(queries)):
        own, p = h // (heads // keys.shape[0]), i + count - queries
        terms, total = [], 0.0 if sinks is None else math.exp(sinks[h])
        for j in range(left, count):
            low, high = window
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
    """Sequences of random keys, in caches with NaN in all other rows.

    keys, values [B, Hkv, capacity, width] are the sequences by position; caches and the options `table` say where they lie.
    """

    def __init__(self, lengths, *, queries=1, heads=(4, 2), widths=(8, 8), page=None, capacity=24, dtype=torch.float64, new=0):
        count, (query_heads, self.heads) = len(lengths), heads
        self.lengths, self.page, self.capacity = lengths, page, capacity
        self.query = torch.randn(count, query_heads, queries, widths[0], dtype=dtype)
        self.keys, self.values = (torch.full((count, self.heads, capacity, w), NAN, dtype=dtype) for w in widths)
        self.key, self.value = (torch.randn(count, self.heads, new, w, dtype=dtype) for w in widths)
        for n, length in enumerate(lengths):
            for held in (self.keys, self.values):
                held[n, :, :length] = torch.randn(self.heads, length, held.shape[-1], dtype=dtype)
        self.table, self.options = None, {}
        if page is not None:
            assert capacity % page == 0
            entries = capacity // page
            self.table = torch.randperm(count * entries + 2)[: count * entries].view(count, entries).to(torch.int32)
            self.options = {"block_table": self.table}
        self.caches = tuple(self.store(held) for held in (self.keys, self.values))
        self.seqlens = torch.tensor(lengths, dtype=torch.int32)

    def store(self, held):
        """The cache that holds keys or values [B, Hkv, capacity, width] by position."""
        if self.page is None:
            return held.clone()
        pool = held.new_full((self.table.numel() + 2, self.heads, self.page, held.shape[-1]), NAN)
        for n, entry in itertools.product(*map(range, self.table.shape)):
            pool[self.table[n, entry]] = held[n, :, entry * self.page : (entry + 1) * self.page]
        return pool

    def __call__(self, query=None, lengths="own", **options):
        lengths = self.seqlens if isinstance(lengths, str) else lengths
        query = self.query if query is None else query
        return reference.kvcache_attention(query, *self.caches, lengths, **(self.options | options), return_lse=True)

    def expected(self, ends=None, **options):
        """by_hand of each sequence; an option that is a list has an entry per sequence."""
        results = []
        for n, end in enumerate(self.lengths if ends is None else ends):
            own = {name: x[n] if isinstance(x, list) else x for name, x in options.items()}
            results.append(by_hand(self.query[n], self.keys[n, :, :end], self.values[n, :, :end], **own))
        return tuple(torch.stack(part) for part in zip(*results, strict=True))


def check(ours, expected):
    close(ours[0].double(), expected[0])
    close(ours[1].double(), expected[1])


def sdpa(query, keys, values, mask):
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


# --- visibility ---


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [1, 5])
def test_out_is_that_of_torch_over_the_keys_of_each_sequence(page, causal, queries):
    scene = Scene([7, 24, 5, 11], queries=queries, page=page)
    out, _ = scene(causal=causal)
    for n, length in enumerate(scene.lengths):
        mask = torch.ones(queries, length, dtype=torch.bool)
        mask = mask.tril(length - queries) if causal else mask
        expected = sdpa(scene.query[n : n + 1], scene.keys[n : n + 1, :, :length], scene.values[n : n + 1, :, :length], mask)
        close(out[n : n + 1], expected)


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
    scene = Scene([9, 3, 0, 12], queries=4, heads=heads, widths=widths, page=page, capacity=12)
    check(scene(**OPTIONS[name]), scene.expected(**OPTIONS[name]))


@pytest.mark.parametrize("name", ["plain", "all"])
def test_slopes_and_sinks(name):
    scene = Scene([9, 2, 0], queries=4)
    sinks, slopes = torch.randn(4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)
    out, lse = scene(sinks=sinks, alibi_slopes=slopes, **OPTIONS[name])
    check((out, lse), scene.expected(slopes=list(slopes), sinks=sinks, **OPTIONS[name]))
    check(scene(alibi_slopes=slopes[0], **OPTIONS[name]), scene.expected(slopes=slopes[0], **OPTIONS[name]))
    close(lse[2], sinks[:, None].expand(4, 4))  # nothing but the sink is seen
    assert (out[2] == 0).all()


def test_rows_before_the_first_key_see_nothing():
    scene = Scene([2], queries=5)
    out, lse = scene()
    assert (out[:, :, :3] == 0).all() and (lse[:, :, :3] == -INF).all()
    assert (lse[:, :, 3:] > -INF).all()
    check((out, lse), scene.expected())


@pytest.mark.parametrize("page", [None, 4])
def test_pages_behind_a_window_may_hold_anything(page):
    scene = Scene([16, 13], queries=2, page=page)
    expected = scene.expected(window=(3, None))
    for n, length in enumerate(scene.lengths):
        scene.keys[n, :, : length - 2 - 3] = NAN
        scene.values[n, :, : length - 2 - 3] = NAN
    scene.caches = scene.store(scene.keys), scene.store(scene.values)
    if page:
        scene.table[:, 0] = torch.tensor([-1, 2**31 - 1])
    check(scene(window=(3, None)), expected)


@pytest.mark.parametrize("page", [None, 3])
def test_leftpad(page):
    scene = Scene([9, 12, 5, 7], queries=3, page=page)
    for n, left in enumerate((4, 0, 5, 6)):
        scene.keys[n, :, :left] = NAN
    scene.caches = scene.store(scene.keys), scene.caches[1]
    leftpad = torch.tensor([4, -3, 5, 6], dtype=torch.int32)
    for options in ({}, {"window": (2, None)}, {"window": (30, 0), "causal": False}):
        check(scene(leftpad=leftpad, **options), scene.expected(left=[4, 0, 5, 6], **options))


def test_lengths_below_leftpad_and_leftpad_past_the_capacity():
    scene = Scene([24, 24, 24], queries=2)
    out, lse = scene(lengths=torch.tensor([3, -7, 24], dtype=torch.int32), leftpad=torch.tensor([5, 2, 99], dtype=torch.int32))
    assert (out == 0).all() and (lse == -INF).all()
    # New keys begin at the leftpad then.
    key, value = torch.randn(3, 2, 1, 8, dtype=torch.float64), torch.randn(3, 2, 1, 8, dtype=torch.float64)
    before = scene.caches[0].clone()
    out, _ = scene(lengths=3, leftpad=torch.tensor([5, 2, 99], dtype=torch.int32), key=key, value=value, causal=False)
    close(out[0], value[0].repeat_interleave(2, 0).expand(4, 2, 8))
    close(scene.caches[0][0, :, 5], key[0, :, 0])
    close(scene.caches[0][1, :, 3], key[1, :, 0])
    assert torch.equal(scene.caches[0][2], before[2])


@pytest.mark.parametrize("page", [None, 3])
def test_lengths_are_clamped(page):
    scene = Scene([24, 0, 0, 5], queries=2, page=page)
    check(scene(lengths=torch.tensor([1000, -1, -(2**31), 5], dtype=torch.int32)), scene.expected())


def test_an_int_and_none_as_lengths():
    scene = Scene([24, 24], queries=2)
    check(scene(lengths=7), scene.expected(ends=[7, 7]))
    check(scene(lengths=None), scene.expected())


def test_cache_batch_idx_picks_rows_of_the_cache():
    scene = Scene([5, 9, 7, 24])
    rows = torch.tensor([2, 0, 2], dtype=torch.int32)
    scene.query = scene.query[:3]
    scene.keys, scene.values = scene.keys[rows], scene.values[rows]
    scene.lengths = [7, 5, 6]
    check(scene(lengths=torch.tensor([7, 5, 6], dtype=torch.int32), cache_batch_idx=rows), scene.expected())


def test_cache_batch_idx_picks_rows_of_the_table_and_appends_there():
    scene = Scene([5, 9, 7], page=3, new=1)
    rows = torch.tensor([2, 0], dtype=torch.int32)
    new = scene.key[:2], scene.value[:2]
    scene.query, scene.keys, scene.values = scene.query[:2], scene.keys[rows], scene.values[rows]
    before = scene.caches[0].clone()
    ours = scene(lengths=torch.tensor([7, 5], dtype=torch.int32), cache_batch_idx=rows, key=new[0], value=new[1])
    for n, length in enumerate((7, 5)):
        scene.keys[n, :, length], scene.values[n, :, length] = new[0][n, :, 0], new[1][n, :, 0]
        block, row = scene.table[rows[n], length // 3], length % 3
        assert torch.equal(scene.caches[0][block, :, row], new[0][n, :, 0])
        before[block, :, row] = new[0][n, :, 0]
    assert torch.equal(scene.caches[0].nan_to_num(-99), before.nan_to_num(-99))
    check(ours, scene.expected(ends=[8, 6]))


def test_rows_outside_the_cache_read_as_zeros():
    scene = Scene([5, 5], new=1)
    before = scene.caches[0].clone()
    out, lse = scene(cache_batch_idx=torch.tensor([-1, 2], dtype=torch.int32), key=scene.key, value=scene.value)
    assert (out == 0).all()
    close(lse, torch.full((2, 4, 1), math.log(6), dtype=torch.float64))
    assert torch.equal(scene.caches[0].nan_to_num(-99), before.nan_to_num(-99))


@pytest.mark.parametrize("entry", [-1, 38, 2**31 - 1, -(2**31)])
def test_entries_outside_the_pool_read_as_zeros_and_are_never_written(entry):
    scene = Scene([11, 5, 8], page=2, queries=2, new=2)
    assert scene.caches[0].shape[0] == 38
    scene.table[0, 1] = scene.table[1, 2] = scene.table[2, 4] = entry
    scene.keys[0, :, 2:4] = scene.values[0, :, 2:4] = 0
    scene.keys[1, :, 4] = scene.values[1, :, 4] = 0
    before = scene.caches[0].clone()
    ours = scene(key=scene.key, value=scene.value)
    for n, length in enumerate(scene.lengths):
        scene.keys[n, :, length : length + 2], scene.values[n, :, length : length + 2] = scene.key[n], scene.value[n]
    scene.keys[1, :, 5] = scene.values[1, :, 5] = 0
    scene.keys[2, :, 8:10] = scene.values[2, :, 8:10] = 0
    check(ours, scene.expected(ends=[13, 7, 10]))
    for n, j in ((0, 11), (0, 12), (1, 6)):
        before[scene.table[n, j // 2], :, j % 2] = scene.keys[n, :, j]
    assert torch.equal(scene.caches[0].nan_to_num(-99), before.nan_to_num(-99))


# --- packed queries ---


@pytest.mark.parametrize("page", [None, 3])
def test_packed_queries_are_those_of_each_sequence(page):
    scene = Scene([9, 0, 5, 24], queries=4, page=page)
    counts = [4, 2, 0, 3]
    starts = torch.tensor([0, 4, 6, 6, 9], dtype=torch.int32)
    packed = torch.full((12, 4, 8), NAN, dtype=torch.float64)
    packed[:9] = torch.cat([scene.query[n, :, :count].transpose(0, 1) for n, count in enumerate(counts)])
    slopes = torch.rand(4, 4, dtype=torch.float64)
    sinks = torch.randn(4, dtype=torch.float64)
    for limit in (None, 4, 100):
        out, lse = scene(packed, cu_seqlens_q=starts, max_seqlen_q=limit, alibi_slopes=slopes, sinks=sinks, window=(4, 1))
        assert out.shape == (12, 4, 8) and lse.shape == (4, 12)
        for n, count in enumerate(counts):
            rows, length = slice(starts[n], starts[n + 1]), scene.lengths[n]
            own = scene.query[n, :, :count], scene.keys[n, :, :length], scene.values[n, :, :length]
            expected, expected_lse = by_hand(*own, window=(4, 1), slopes=slopes[n], sinks=sinks)
            close(out[rows].transpose(0, 1), expected)
            close(lse[:, rows], expected_lse)
        assert (out[9:] == 0).all() and (lse[:, 9:] == -INF).all()


def test_queries_past_max_seqlen_q_are_padding():
    scene = Scene([9, 9], queries=4)
    packed = scene.query.transpose(1, 2).reshape(8, 4, 8)
    out, lse = scene(packed, cu_seqlens_q=torch.tensor([0, 4, 8], dtype=torch.int32), max_seqlen_q=3)
    for n in range(2):
        expected, _ = by_hand(scene.query[n, :, :3], scene.keys[n, :, :9], scene.values[n, :, :9])
        close(out[4 * n : 4 * n + 3].transpose(0, 1), expected)
        assert (out[4 * n + 3] == 0).all() and (lse[:, 4 * n + 3] == -INF).all()


def test_starts_that_are_out_of_order_stay_inside():
    scene = Scene([9, 9, 9, 9], queries=4)
    starts = torch.tensor([-5, 2, 2, 1, 900], dtype=torch.int32)
    out, _ = scene(scene.query[0].transpose(0, 1), cu_seqlens_q=starts)
    for n, rows in ((0, slice(0, 1)), (3, slice(1, 4))):
        first = max(int(starts[n]), 0)
        expected, _ = by_hand(scene.query[0, :, first : (2, 2, 1, 4)[n]], scene.keys[n, :, :9], scene.values[n, :, :9])
        close(out[rows].transpose(0, 1), expected[:, : rows.stop - rows.start])


# --- append ---


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("packed", [False, True])
def test_new_keys_are_appended_in_place_and_seen(page, packed):
    scene = Scene([5, 0, 22, 24], queries=2, page=page, new=3)
    expected = [scene.keys.clone(), scene.values.clone()]
    options, ends = {"key": scene.key, "value": scene.value}, []
    counts = [3, 1, 3, 2] if packed else [3] * 4
    for n, (length, count) in enumerate(zip(scene.lengths, counts, strict=True)):
        ends.append(min(length + count, 24))
        for held, new in zip(expected, (scene.key, scene.value), strict=True):
            held[n, :, length : ends[-1]] = new[n, :, : ends[-1] - length]
    if packed:
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        for name, new in (("key", scene.key), ("value", scene.value)):
            rows = torch.cat([new[n, :, :count].transpose(0, 1) for n, count in enumerate(counts)])
            options[name] = torch.cat([rows, rows.new_full((2, *rows.shape[1:]), NAN)])
        options["cu_seqlens_new"] = starts
    ours = scene(**options)
    scene.keys, scene.values = expected
    for cache, held in zip(scene.caches, expected, strict=True):
        assert torch.equal(cache.nan_to_num(-99), scene.store(held).nan_to_num(-99))
    check(ours, scene.expected(ends=ends))


def test_new_keys_with_an_int_or_none_as_lengths():
    for lengths, length in ((3, 3), (None, 4)):
        scene = Scene([length], capacity=4, new=1)
        scene(lengths=lengths, key=scene.key, value=scene.value)
        assert torch.equal(scene.caches[0][0, :, 3], (scene.key[0, :, 0] if length == 3 else scene.keys[0, :, 3]))


@pytest.mark.parametrize("page", [None, 1, 5])
@pytest.mark.parametrize("rotary", [False, True])
def test_steps_of_decoding_are_one_prefill(page, rotary):
    length, dtype = 15, torch.float64
    one, steps = (Scene([0, 0], capacity=length, page=page) for _ in range(2))
    steps.table, steps.options = one.table, one.options
    tensors = [torch.randn(2, heads, length, 8, dtype=dtype) for heads in (4, 2, 2)]
    angles = torch.rand(length, 4, dtype=dtype)
    options = {"rotary": (angles.cos(), angles.sin())} if rotary else {}
    options |= {"window": (6, None), "softcap": 3.0, "alibi_slopes": torch.rand(4, dtype=dtype)}
    out, lse = one(tensors[0], lengths=0, key=tensors[1], value=tensors[2], **options)
    at = 0
    for step in (1, 1, 4, 1, 7, 1):
        query, key, value = (t[:, :, at : at + step] for t in tensors)
        part, part_lse = steps(query, lengths=at, key=key, value=value, **options)
        close(part, out[:, :, at : at + step])
        close(part_lse, lse[:, :, at : at + step])
        at += step
    assert at == length
    for n in range(2):
        for ours, theirs in zip(steps.caches, one.caches, strict=True):
            close(ours, theirs) if page is None else close(ours[one.table[n].long()], theirs[one.table[n].long()])


@pytest.mark.parametrize("page", [None, 3])
def test_cache_append_writes_what_kvcache_attention_does(page):
    scene, other = (Scene([5, 0, 22], page=page, new=3) for _ in range(2))
    other.table, other.options = scene.table, scene.options
    other.caches = tuple(cache.clone() for cache in scene.caches)
    scene(key=scene.key, value=scene.value)
    lengths = torch.tensor([5, -4, 22], dtype=torch.int32)
    assert reference.cache_append(scene.key, scene.value, *other.caches, cache_seqlens=lengths, **scene.options) is None
    for ours, theirs in zip(other.caches, scene.caches, strict=True):
        assert torch.equal(ours.nan_to_num(-99), theirs.nan_to_num(-99))
    assert lengths.tolist() == [5, -4, 22]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float8_e4m3fn])
def test_slots(dtype):
    key, value = torch.randn(7, 2, 8).to(torch.float16), torch.randn(7, 2, 5).to(torch.float16)
    caches = [torch.full((4, 2, 3, width), NAN).to(dtype) for width in (8, 5)]
    slots = torch.tensor([11, -1, 0, 12, 4, -(2**40), 7])
    reference.cache_append(key, value, *caches, slots=slots)
    for cache, rows in zip(caches, (key, value), strict=True):
        expected = torch.full(cache.shape, NAN)
        for t, (block, row) in {0: (3, 2), 2: (0, 0), 4: (1, 1), 6: (2, 1)}.items():
            expected[block, :, row] = rows[t].to(dtype).float()
        assert torch.equal(cache.float().nan_to_num(-99), expected.nan_to_num(-99))


# --- rotary ---


def rotated(rows, positions, cos, sin, interleaved):
    """Rows [..., rows, E] rotated as complex numbers, in float64."""
    width = 2 * cos.shape[-1]
    positions = torch.tensor(positions).clamp(0, len(cos) - 1)
    rotation = torch.complex(cos.double()[positions], sin.double()[positions])
    front = rows[..., :width].double()
    sizes = (width // 2, 2) if interleaved else (2, width // 2)
    pairs = front.unflatten(-1, sizes) if interleaved else front.unflatten(-1, sizes).transpose(-2, -1)
    rotated_query = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * rotation)
    front = rotated_query.flatten(-2) if interleaved else rotated_query.transpose(-2, -1).flatten(-2)
    return torch.cat([front, rows[..., width:].double()], -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("width", [2, 6, 8, 0])
@pytest.mark.parametrize("how", ["causal", "window", "neither", "offsets", "clamped", "leftpad"])
def test_rotary(how, width, interleaved):
    scene = Scene([5, 0, 11], queries=2, page=4, new=3)
    angles = torch.rand(4 if how == "clamped" else 30, width // 2, dtype=torch.float64) * 6
    rotary = (angles.cos(), angles.sin(), interleaved)
    options = {"causal": how not in ("window", "neither"), "window": (4, 0) if how == "window" else None}
    first, left = [5, 0, 11], [0, 0, 0]
    if how == "offsets":
        first = [2, 40, 0]
        rotary += (torch.tensor(first, dtype=torch.int32),)
    if how == "leftpad":
        left = [2, 3, 4]
        first = [5, 3, 11]
        options["leftpad"] = torch.tensor(left, dtype=torch.int32)
    ours = scene(key=scene.key, value=scene.value, rotary=rotary if interleaved or len(rotary) > 3 else rotary[:2], **options)
    options.pop("leftpad", None)
    for n, begin in enumerate([5, 3 if how == "leftpad" else 0, 11]):
        keys = rotated(scene.key[n], [first[n] + i for i in range(3)], *rotary[:3])
        scene.keys[n, :, begin : begin + 3], scene.values[n, :, begin : begin + 3] = keys, scene.value[n]
        at = [first[n] + i * (how != "neither") for i in range(2)]
        scene.query[n] = rotated(scene.query[n], at, *rotary[:3])
        scene.lengths[n] = begin + 3
    assert torch.allclose(scene.caches[0].nan_to_num(-99), scene.store(scene.keys).nan_to_num(-99), rtol=0, atol=1e-12)
    options["window"] = options["window"] or NONE
    check(ours, scene.expected(left=left, **options))


def test_rotary_without_new_keys_rotates_queries_alone():
    scene = Scene([5, 11], queries=2)
    angles = torch.rand(30, 4, dtype=torch.float64) * 6
    before = scene.caches[0].clone()
    ours = scene(rotary=(angles.cos(), angles.sin()))
    for n, length in enumerate(scene.lengths):
        scene.query[n] = rotated(scene.query[n], [length, length + 1], angles.cos(), angles.sin(), False)
    check(ours, scene.expected())
    assert torch.equal(scene.caches[0].nan_to_num(-99), before.nan_to_num(-99))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", ["own", torch.float32])
def test_rotated_rows_are_rounded_once(dtype, table_dtype):
    angles = torch.rand(40, 4) * 6
    cos, sin = (t.to(dtype if table_dtype == "own" else table_dtype) for t in (angles.cos(), angles.sin()))
    key, value, query = (torch.randn(2, heads, 6, 10).to(dtype) for heads in (2, 2, 4))
    caches = [torch.zeros(2, 2, 9, 10, dtype=dtype) for _ in range(2)]
    lengths = torch.tensor([1, 3], dtype=torch.int32)
    rotated_query = reference.cache_append(key, value, *caches, cache_seqlens=lengths, rotary=(cos, sin, True), query=query)
    assert rotated_query.dtype == dtype and rotated_query.shape == query.shape and rotated_query.data_ptr() != query.data_ptr()
    eps = torch.finfo(dtype).eps
    for n, length in enumerate(lengths.tolist()):
        for ours, rows in ((caches[0][n, :, length : length + 6], key[n]), (rotated_query[n], query[n])):
            expected = rotated(rows, range(length, length + 6), cos, sin, True)
            # Half an ulp of the result, and float32's errors of the terms.
            allowed = eps / 2 * expected.abs() + (1e-6 if dtype != torch.float64 else 1e-14) + torch.finfo(dtype).tiny
            assert ((ours.double() - expected).abs() <= allowed).all()
            assert torch.equal(ours[..., 8:], rows[..., 8:])


def test_a_rotated_query_of_slots_and_of_packed_rows():
    angles = torch.rand(20, 2, dtype=torch.float64) * 6
    key, value, query = (torch.randn(6, heads, 4, dtype=torch.float64) for heads in (2, 2, 6))
    caches = [torch.zeros(3, 2, 7, 4, dtype=torch.float64) for _ in range(2)]
    positions, table = [3, 0, 99, 7, 7, 1], (angles.cos(), angles.sin())
    slots, offsets = torch.arange(6) * 3, torch.tensor(positions, dtype=torch.int32)
    rotated_query = reference.cache_append(key, value, *caches, slots=slots, rotary=(*table, False, offsets), query=query)
    close(rotated_query.transpose(0, 1), rotated(query.transpose(0, 1), positions, *table, False))
    keys = rotated(key.transpose(0, 1), positions, *table, False)
    close(caches[0].transpose(1, 2).reshape(21, 2, 4)[slots], keys.transpose(0, 1))

    starts, lengths = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([4, 1, 0], dtype=torch.int32)
    options = {"cache_seqlens": lengths, "cu_seqlens_new": starts, "rotary": (*table, True)}
    rotated_query = reference.cache_append(key, value, *caches, query=query, **options)
    close(rotated_query[:5].transpose(0, 1), rotated(query[:5].transpose(0, 1), [4, 5, 0, 1, 2], *table, True))
    close(caches[0][0, :, 4:6], rotated(key[:2].transpose(0, 1), [4, 5], *table, True))
    assert (rotated_query[5] == 0).all()


# --- float8 ---


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


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("shape", [None, (), (2,), (3, 1), (3, 2)])
@pytest.mark.parametrize("page", [None, 3])
def test_float8_caches(dtype, shape, page):
    scene = Scene([7, 4, 0], queries=2, page=page, new=2)
    key_scale, value_scale = (torch.rand(shape) + 0.5 if shape is not None else None for _ in range(2))
    held = [scene.keys.to(dtype), scene.values.to(dtype)]
    scene.caches = tuple(scene.store(t.float()).to(dtype) for t in held)
    new = scene.key.to(torch.bfloat16), scene.value.to(torch.bfloat16)
    ours = scene(key=new[0], value=new[1], key_scale=key_scale, value_scale=value_scale)
    for i, (rows, scale) in enumerate(zip(new, (key_scale, value_scale), strict=True)):
        scale = torch.ones(3, 2) if scale is None else scale.expand(3, 2)
        for n, length in enumerate(scene.lengths):
            held[i][n, :, length : length + 2] = (rows[n].float() / scale[n, :, None, None]).to(dtype)
        assert torch.equal(scene.caches[i].float().nan_to_num(-99), scene.store(held[i].float()).nan_to_num(-99))
        held[i] = held[i].double() * scale[..., None, None].double()
    scene.keys, scene.values = held
    check(ours, scene.expected(ends=[9, 6, 2]))


def test_scales_are_not_rounded_to_the_dtype_of_the_query():
    held = torch.randn(3, 2, 1, 8).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2) + 0.5
    out = reference.kvcache_attention(torch.randn(3, 2, 1, 8).bfloat16(), held, held, 1, value_scale=scale)
    assert torch.equal(out, (held.float() * scale[..., None, None]).bfloat16())


# --- dtypes, sizes, other arguments ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [None, 7])
def test_dtypes(dtype, page):
    scene = Scene([35, 21], queries=3, page=page, capacity=35, widths=(16, 16), dtype=dtype)
    out, lse = scene(causal=False)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for n, length in enumerate(scene.lengths):
        own = scene.query[n : n + 1], scene.keys[n : n + 1, :, :length], scene.values[n : n + 1, :, :length]
        truth = sdpa(*(t.double() for t in own), None)
        assert_close_to_float64(out[n : n + 1], sdpa(*own, None), truth, dtype, magnitude=1.0)
    # A float64 query makes it the truth, whatever the cache's dtype.
    exact = scene(scene.query.double(), causal=False)
    check(exact, scene.expected(causal=False))


@pytest.mark.parametrize("page", [None, 2])
def test_sizes_of_zero(page):
    for shape in ((0, 4, 3, 8), (2, 4, 0, 8)):
        scene = Scene([4] * shape[0], queries=shape[2], page=page)
        out, lse = scene()
        assert out.shape == shape and lse.shape == shape[:-1]
    scene = Scene([0, 0], capacity=0, queries=3, page=page, new=2)
    out, lse = scene(key=scene.key, value=scene.value)
    assert (out == 0).all() and (lse == -INF).all()
    out, lse = scene(scene.query[:, :, 0], lengths=0, cu_seqlens_q=torch.tensor([0], dtype=torch.int32), **_rows_of_none(page))
    assert (out == 0).all() and (lse == -INF).all()
    scene = Scene([4], new=0, widths=(0, 5))
    out, lse = scene(key=scene.key, value=scene.value)
    close(out, scene.values[:, :, :4].mean(2, keepdim=True).repeat_interleave(2, 1))
    reference.cache_append(*(torch.zeros(0, 2, 8),) * 2, *Scene([1]).caches, slots=torch.zeros(0, dtype=torch.int64))


def _rows_of_none(page):
    return {"block_table": torch.zeros(0, 3, dtype=torch.int32)} if page else {}


def test_out_is_written_in_place():
    scene = Scene([5, 0], queries=2)
    expected, _ = scene()
    memory = torch.full((2, 2, 4, 9), NAN, dtype=torch.float64)
    given = memory[..., :8].transpose(1, 2)
    out, _ = scene(out=given)
    assert out.data_ptr() == given.data_ptr() and torch.equal(given, expected) and memory[..., 8].isnan().all()


def test_num_splits_changes_no_value():
    scene = Scene([5, 23], queries=2)
    expected = scene()
    for splits in (0, 1, 7, 10**6):
        assert all(torch.equal(*pair) for pair in zip(scene(num_splits=splits), expected, strict=True))


def test_a_value_cache_may_be_a_view_of_the_key_cache():
    scene = Scene([5, 9], queries=2, widths=(8, 8), page=3)
    keys = scene.caches[0]
    out, _ = reference.kvcache_attention(
        scene.query, keys, keys[..., :5], scene.seqlens, block_table=scene.table, return_lse=True
    )
    scene.values = scene.keys[..., :5]
    close(out, scene.expected()[0])


def test_nan_in_a_visible_key_is_not_hidden():
    scene = Scene([5, 5])
    scene.caches[1][0, 0, 4] = NAN
    out, _ = scene()
    assert out[0, :2].isnan().all() and not out[0, 2:].isnan().any() and not out[1].isnan().any()


def test_gradients_are_refused():
    scene = Scene([5])
    scene.query.requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        scene()
    with torch.no_grad():
        scene()
    with pytest.raises(RuntimeError, match="no gradient"):
        reference.cache_append(scene.key.requires_grad_(), scene.value, *scene.caches, cache_seqlens=0)


def test_arguments_that_do_not_fit():
    scene = Scene([5], page=3, new=1)
    angles = torch.rand(9, 8, dtype=torch.float64)
    slots = torch.zeros(1, dtype=torch.int64)
    rows = scene.key[:, :, 0], scene.value[:, :, 0]
    wrong = {
        "key, value": lambda: scene(key=scene.key),
        "key, value: expected four": lambda: scene(key=rows[0], value=rows[1]),
        "query: .*dimensions.*got 3": lambda: scene(scene.query[0]),
        "block_table: expected 2 rows.*got 1": lambda: scene(scene.query.repeat(2, 1, 1, 1), lengths=1),
        "rotary: expected .*got 16": lambda: scene(rotary=(angles, angles)),
        "cache_seqlens, slots: .*none": lambda: reference.cache_append(*rows, *scene.caches),
        "cache_seqlens, slots: .*both": lambda: reference.cache_append(*rows, *scene.caches, slots=slots, cache_seqlens=1),
        "^slots: expected no": lambda: reference.cache_append(*rows, *scene.caches, slots=slots, block_table=scene.table),
        "rotary: expected offsets": lambda: reference.cache_append(*rows, *scene.caches, slots=slots, rotary=(angles, angles)),
        "query: expected None without rotary": lambda: reference.cache_append(*rows, *scene.caches, slots=slots, query=rows[0]),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()


# --- varlen_attention over pages ---


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 1)}, {"causal": True, "alignment": "upper_left"}])
def test_varlen_attention_reads_pages(options):
    scene = Scene([9, 4, 12], queries=5, page=3)
    if "alignment" in options:  # no query sees these keys then
        scene.keys[0, :, 5:], scene.values[2, :, 5:] = NAN, NAN
        scene.caches = scene.store(scene.keys), scene.store(scene.values)
    pools = [cache.transpose(1, 2) for cache in scene.caches]
    starts, used = torch.tensor([0, 5, 10, 15], dtype=torch.int32), torch.tensor([5, 2, 99], dtype=torch.int32)
    packed = scene.query.transpose(1, 2).reshape(15, 4, 8).clone()
    packed[7:10] = NAN
    sizes = torch.tensor([0, 9, 13, 25], dtype=torch.int32)
    for seqused_k, cu_seqlens_k in ((scene.seqlens, None), (None, sizes)):
        out = torch.full((15, 4, 8), NAN, dtype=torch.float64)
        result, lse = reference.varlen_attention(
            *(packed, *pools, starts, cu_seqlens_k, 5, 24), block_table=scene.table, seqused_q=used, seqused_k=seqused_k,
            num_splits=3, out=out, return_lse=True, **options,
        )  # fmt: skip
        assert result is out
        for n, (length, count) in enumerate(zip(scene.lengths, (5, 2, 5), strict=True)):
            dense = scene.query[n, :, :count], scene.keys[n, :, :length].nan_to_num(), scene.values[n, :, :length].nan_to_num()
            expected = reference.attention(*dense, **({"alignment": "lower_right"} | options), return_lse=True)
            close(out[5 * n : 5 * n + count].transpose(0, 1), expected[0])
            close(lse[:, 5 * n : 5 * n + count], expected[1])
        assert (out[7:10] == 0).all() and (lse[:, 7:10] == -INF).all()


def test_varlen_attention_clamps_lengths_of_pages():
    scene = Scene([24, 24, 0], queries=2, page=4)
    scene.keys[1, :, 20:] = NAN
    scene.caches = scene.store(scene.keys), scene.caches[1]
    pools, packed = [cache.transpose(1, 2) for cache in scene.caches], scene.query.transpose(1, 2).reshape(6, 4, 8)
    starts = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    for lengths, longest, ends in (([900, 20, -3], 900, [24, 20, 0]), ([900, 25, 0], 20, [20, 20, 0])):
        used = torch.tensor(lengths, dtype=torch.int32)
        out = reference.varlen_attention(
            packed, *pools, starts, None, 2, longest, causal=True, seqused_k=used, block_table=scene.table
        )
        close(out.view(3, 2, 4, 8).transpose(1, 2), scene.expected(ends=ends)[0])


def test_varlen_attention_with_lengths_of_packed_keys():
    query, key, value = (torch.randn(12, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    starts = torch.tensor([0, 7, 12], dtype=torch.int32)
    key[4:7], value[4:7] = NAN, NAN
    out = reference.varlen_attention(
        query, key, value, starts, starts, 7, 7, causal=True, seqused_k=torch.tensor([4, 50], dtype=torch.int32)
    )
    for rows, end in ((slice(0, 7), 4), (slice(7, 12), 12)):
        dense = query[rows].transpose(0, 1), key[rows.start : end].transpose(0, 1), value[rows.start : end].transpose(0, 1)
        close(out[rows].transpose(0, 1), by_hand(*dense)[0])
    with pytest.raises(ValueError, match="dropout_p"):
        reference.varlen_attention(query, key, value, starts, starts, 7, 7, dropout_p=0.5, num_splits=1)


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
