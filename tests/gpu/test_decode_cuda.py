"""These tests compare steps of decoding on CUDA with float64, at the sizes at which something in a kernel changes: for few
queries a tile of 16 or 32 keys or rows, a step of eight tiles, a share of a CTA, a chunk of 32 sequences; for more rows, on
Hopper, tiles whose keys the shares of CTAs cut. Whatever no query sees is NaN."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from cache_cases import CachedProblem
from decode_calls import BFLOAT16, DEVICE, E4M3, E5M2, HALF, attend, integers, randn

import flash_online
from flash_online import reference
from flash_online.testing import assert_close_to_float64

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]

EDGES = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 5000)  # lengths
FEW = (0, 1, 9, 130, 700)


def problem(lengths=FEW, queries=1, **options) -> CachedProblem:
    """Dense queries, unless `queries` says how many each sequence has; no new keys."""
    many = queries if isinstance(queries, tuple) else (queries,) * len(lengths)
    defaults = {
        "dtype": BFLOAT16,
        "heads": (8, 2),
        "head_dims": (64, 64),
        "lengths": tuple((n, 0, own) for n, own in zip(lengths, many, strict=True)),
        "capacity": max(lengths) + 3,
        "page": 16,
        "append": False,
        "packed": (isinstance(queries, tuple), False),
        "order": "NHD",
    }
    return CachedProblem(**(defaults | options))


def check(**options):
    problem(**options).check(flash_online.kvcache_attention, DEVICE)


def check_close(query, caches, lengths, **options):
    """out and lse of a call on dense tensors, against float64."""
    out, lse = attend(query, *caches, lengths, **options, return_lse=True)
    options.pop("num_splits", None)
    truth, plain, wide = (
        reference.kvcache_attention(q, *caches, lengths, **options, return_lse=True)
        for q in (query.double(), query, query.float())
    )
    assert_close_to_float64(out, plain[0], truth[0], query.dtype, name="out", magnitude=1.0)
    assert_close_to_float64(lse, wide[1], truth[1], torch.float32, name="lse", magnitude=1.0)


# --- few queries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("page", [None, 1, 3, 16, 48, 64, 256])
def test_lengths_at_every_edge(page, order):
    check(lengths=EDGES, page=page, order=order, dtype=HALF if page in (3, 64) else BFLOAT16)


@pytest.mark.parametrize("splits", [2, 3, 64])
@pytest.mark.parametrize("page", [None, 16])
def test_lengths_at_every_edge_in_pieces(page, splits):
    check(lengths=EDGES, page=page, options={"num_splits": splits})


@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_lengths_at_every_edge_in_wide_rows(head_dim):
    check(lengths=EDGES, heads=(6, 1), head_dims=(head_dim,) * 2, queries=3, page=48)


@pytest.mark.parametrize(
    "count, page", [(1, None), (2, 16), (31, 16), (32, None), (33, 16), (65, None), (129, 16), (129, None), (1025, 16)]
)
def test_numbers_of_sequences(count, page):
    choose = random.Random(count)
    lengths = tuple(choose.choice([0, 0, 1, 7, 16, 20, 40]) for _ in range(count - 1)) + (150 if count < 100 else 41,)
    check(lengths=lengths, page=page, heads=(4, 1), head_dims=(16, 16))


@pytest.mark.parametrize("count", [31, 33, 127, 128, 129, 257])
@pytest.mark.parametrize("window", [None, (100, None), (600, None)])
def test_many_sequences_of_long_and_short_items(count, window):
    """Chunks of 128 sequences; with the first window no share cuts an item, since an item is two steps at most."""
    choose = random.Random(count)
    lengths = tuple(choose.choice([0, 1, 40, 129, 500]) for _ in range(count - 1)) + (1500,)
    check(lengths=lengths, heads=(12, 2), head_dims=(16, 16), options={"window": window})


# Heads of query and key, queries: from 1 to 129 rows per key head, of which the last are too many for this kernel.
ROWS = [
    ((1, 1), 1), ((1, 1), 2), ((1, 1), 9), ((5, 1), 1), ((5, 1), 3), ((16, 1), 1), ((32, 8), 4), ((17, 1), 1), ((31, 1), 1),
    ((6, 2), 9), ((16, 1), 2), ((32, 8), 8), ((11, 1), 3), ((12, 3), 8), ((40, 8), 5), ((40, 8), 7), ((64, 1), 1),
    ((127, 1), 1), ((128, 1), 1), ((16, 1), 8), ((43, 1), 3),
]  # fmt: skip


@pytest.mark.parametrize("heads, queries", ROWS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_of_a_key_head(heads, queries, head_dim):
    """Sequences of fewer keys than queries among them."""
    page = {64: 16, 128: 3, 256: None}[head_dim]
    check(lengths=(0, 1, 5, 130, 300), queries=queries, heads=heads, head_dims=(head_dim,) * 2, page=page)


WIDTHS = [(e, e) for e in (8, 16, 24, 40, 64, 72, 80, 96, 104, 128, 136, 192, 200, 256)]
WIDTHS += [(192, 128), (64, 128), (128, 64), (24, 256), (200, 8)]


@pytest.mark.parametrize("head_dims", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16], ids=str)
def test_head_dims(dtype, head_dims):
    for heads, queries in (((8, 2), 1), ((10, 1), 2)):
        check(lengths=(0, 37, 300), queries=queries, heads=heads, head_dims=head_dims, dtype=dtype)


FLOAT8_WIDTHS = [(e, e) for e in (16, 24, 64, 80, 96, 128, 144, 192, 256)] + [(128, 64), (64, 192)]


@pytest.mark.parametrize("head_dims", FLOAT8_WIDTHS, ids=str)
@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2], ids=str)
def test_float8(cache_dtype, head_dims):
    """24 columns are no multiple of 16 bytes: another kernel's."""
    for dtype, scales, queries in ((BFLOAT16, "all", 1), (HALF, "head", 5), (HALF, None, 1), (BFLOAT16, "one", 9)):
        check(lengths=(0, 33, 300), queries=queries, dtype=dtype, cache_dtype=cache_dtype, scales=scales, head_dims=head_dims)


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2], ids=str)
def test_lengths_at_every_edge_of_float8(cache_dtype, splits):
    more = {"cache_dtype": cache_dtype, "scales": "batch", "options": {"num_splits": splits, "softcap": 5.0}}
    check(lengths=EDGES, head_dims=(128, 128), heads=(4, 1), page=16, **more)


# What becomes of queries, and of the scale, which keeps scores small.
RANGES = {
    "2^-60 to 1": (lambda query: (query * 0.5 ** torch.randint(60, query.shape, device=DEVICE)).bfloat16(), 1),
    "1e-30": (lambda query: query * 1e-30, 1),
    "1e5": (lambda query: query * 1e5, 1e-5),
    "0": (torch.zeros_like, 1),
    "a column of 1e30": (lambda query: query.index_fill(-1, torch.tensor([3], device=DEVICE), 1e30), 1),
}


@pytest.mark.parametrize("change, scale", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("head_dim, queries", [(128, 1), (128, 9), (192, 1)])
@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2], ids=str)
def test_queries_of_any_range_beside_float8(cache_dtype, head_dim, queries, change, scale):
    """bfloat16 queries are multiplied as halves where these hold all of a tile. Those of other heads keep their bits."""
    query, caches = randn(3, 8, queries, head_dim), [randn(3, 2, 300, head_dim) for _ in range(2)]
    caches[0][..., 3] = 0
    caches, lengths, scale = [c.to(cache_dtype) for c in caches], integers(0, 33, 300), scale * head_dim**-0.5
    changed = change(query)
    check_close(changed, caches, lengths, scale=scale)
    mixed = torch.where(torch.arange(8, device=DEVICE)[:, None, None] % 4 == 1, changed, query)
    found, expected = (attend(q, *caches, lengths, scale=scale).unflatten(1, (2, 4)) for q in (mixed, query))
    for head in (0, 2, 3):
        assert torch.equal(found[:, :, head], expected[:, :, head]), head


@pytest.mark.parametrize("queries", [1, 60])
@pytest.mark.parametrize("scales", ["one", "head", "batch", "all"])
def test_scales_of_16_bits(scales, queries):
    """The contract does not tie scales to float8. 60 queries run in the kernel for many rows."""
    check(lengths=FEW, scales=scales, queries=queries)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(0, 0), (1, None), (127, None), (5000, None), (100, 30), (None, 3)], ids=str)
def test_windows(window, causal):
    options = {"window": window, "causal": causal}
    check(lengths=EDGES, heads=(4, 1), queries=3, page=16, options=options)
    check(lengths=FEW, heads=(8, 1), queries=9, page=None, options=options | {"num_splits": 3})


@pytest.mark.parametrize("page", [None, 16, 5])
@pytest.mark.parametrize("window", [None, (20, None)])
def test_padding_on_the_left_and_rows_of_the_cache(window, page):
    left = (0, 1, 3, 100, 17)
    options = {"window": window}
    check(lengths=FEW, leftpad=left, batch_idx=True, page=page, queries=2, options=options, alibi=2)
    check(lengths=FEW, leftpad=(0, 5, 9, 130, 701), page=page, options=options | {"num_splits": 3})


@pytest.mark.parametrize("heads, queries", [((8, 2), 1), ((6, 1), 4)])
@pytest.mark.parametrize(
    "more",
    [
        {"options": {"softcap": 2.0}},
        {"options": {"softcap": 30.0}, "alibi": 1},
        {"alibi": 2},
        {"sinks": True},
        {"sinks": True, "alibi": 1, "options": {"softcap": 0.5, "window": (50, None), "num_splits": 2}},
        {"options": {"scale": 0.0}},
        {"options": {"scale": -0.5}},
        {"options": {"scale": 1.0, "causal": False}, "sinks": True},
    ],
    ids=str,
)
def test_options(more, heads, queries):
    check(lengths=FEW, heads=heads, queries=queries, **more)
    check(lengths=(2000, 3), heads=heads, queries=queries, head_dims=(128, 128), **more)


@pytest.mark.parametrize("splits", [None, 2, 64])
@pytest.mark.parametrize("give_longest", [True, False])
@pytest.mark.parametrize("heads", [(8, 2), (12, 1)])
def test_packed_queries(heads, give_longest, splits):
    """Sequences without queries, with more queries than keys, and rows of no sequence, whose results are 0."""
    more = {"give_longest": give_longest, "spare_rows": (5, 0), "options": {"num_splits": splits}, "head_dims": (128, 128)}
    check(lengths=(700, 0, 9, 130, 1, 40), queries=(1, 3, 0, 9, 4, 0), heads=heads, **more)
    check(lengths=(3, 600), queries=(0, 2), heads=heads, page=None, sinks=True, **more)


def test_queries_that_do_not_count():
    """seqused_q, and max_seqlen_q below what a sequence has."""
    caches = [randn(3, 2, 96, 64) for _ in range(2)]
    query, lengths, starts = randn(12, 8, 64), integers(90, 3, 17), integers(0, 4, 9, 11)
    pools, table = [cache.view(3, 2, 6, 16, 64).transpose(1, 2).flatten(0, 1) for cache in caches], integers(*range(18))
    longest = attend(query, *caches, lengths, cu_seqlens_q=starts, max_seqlen_q=5, return_lse=True)
    out, lse = attend(query, *caches, lengths, cu_seqlens_q=starts, max_seqlen_q=3, return_lse=True)
    assert not longest[0][11:].any() and (longest[1][:, 11:] == -torch.inf).all()
    rest = [3, 7, 8, 11]
    assert not out[rest].any() and (lse[:, rest] == -torch.inf).all() and not out.isnan().any()
    used = integers(2, 0, 1)
    found, lse = flash_online.varlen_attention(
        query, *(pool.transpose(1, 2) for pool in pools), starts, None, 5, 96,
        block_table=table.view(3, 6), seqused_k=lengths, seqused_q=used, causal=True, return_lse=True,
    )  # fmt: skip
    rest = [2, 3, 4, 5, 6, 7, 8, 10, 11]
    assert not found[rest].any() and (lse[:, rest] == -torch.inf).all()
    assert not found.isnan().any() and all(found[row].any() for row in (0, 1, 9))


@pytest.mark.parametrize("more", [
    {"joined": "side by side", "head_dims": (64, 128)},
    {"joined": "side by side", "order": "HND", "page": None},
    {"joined": "latent", "head_dims": (128, 64)},
    {"gap": 8},
    {"gap": 1},
    {"layouts": ("transposed", "contiguous", "contiguous")},
    {"layouts": ("sliced", "contiguous", "contiguous")},
    {"layouts": ("strided", "contiguous", "contiguous")},
    {"layouts": ("unaligned", "contiguous", "contiguous")},
    {"layouts": ("expanded", "contiguous", "contiguous")},
    {"give_out": True},
    {"holes": 0.3},
    {"shared_pages": True, "spare_blocks": 0},
    {"count": "none"},
    {"count": "int"},
], ids=str)  # fmt: skip
def test_strides_and_tables(more):
    """Some of them are other kernels': rows of 2 bytes more than a multiple of 16, columns that lie apart."""
    check(**({"lengths": (130, 0, 61), "queries": 2, "capacity": 160} | more))


@pytest.mark.parametrize("lengths", [(-3, 2**31 - 1, 40), (2**31 - 1, -(2**31), 0)])
def test_lengths_out_of_range(lengths):
    check(lengths=lengths, capacity=50)
    check(lengths=lengths, capacity=50, page=None, leftpad=(-9, 60, 2**31 - 1))


@pytest.mark.parametrize("new", [1, 4])
def test_new_keys_are_appended_first(new):
    old = (0, 15, 128, 700)
    made = problem(lengths=old, capacity=720, rotary="interleaved", rotary_width=32, rotary_positions=800)
    made = replace(made, append=True, lengths=tuple((n, new, new) for n in old))
    made.check(flash_online.kvcache_attention, DEVICE)


@pytest.mark.parametrize("size", [8.0, 30.0])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16], ids=str)
def test_large_scores(dtype, size):
    check(lengths=FEW, dtype=dtype, size=size)
    check(lengths=FEW, dtype=dtype, size=size, queries=9, head_dims=(128, 128), sinks=True)


@pytest.mark.parametrize("splits", [None, 5])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16], ids=str)
def test_scores_that_rise_and_fall_along_the_keys(dtype, splits):
    """The maximum moves in tile after tile: outputs are rescaled, and parts of an item differ by all of their weight."""
    for heads, queries in ((8, 1), (10, 2)):
        query, key, value = randn(2, heads, queries, 64), randn(2, 2, 3000, 64, dtype=torch.float32), randn(2, 2, 3000, 64)
        rise = torch.linspace(0.2, 4, 3000, device=DEVICE).square()[:, None]
        key = torch.stack([key[0] * rise, key[1] * rise.flip(0)])
        tensors = [t.to(dtype) for t in (query, key, value)]
        check_close(tensors[0], tensors[1:], integers(3000, 2777), num_splits=splits)


@pytest.mark.parametrize("heads, queries, head_dim", [(1, 1, 64), (16, 1, 128), (12, 2, 128), (32, 1, 64), (5, 3, 256)])
def test_one_item_cut_by_every_share(heads, queries, head_dim):
    """One sequence and one key head: all CTAs have a part of it, and a whole CTA merges a row."""
    query, caches = randn(1, heads, queries, head_dim), [randn(1, 1, 60000, head_dim) for _ in range(2)]
    for length in (60000, 40001):
        check_close(query, caches, integers(length))


# --- latent keys -----------------------------------------------------------------------------------------------------------


def check_latent(heads=16, width=576, values=512, key_heads=1, **options):
    check(heads=(heads * key_heads, key_heads), head_dims=(width, values), joined="latent", **options)


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("page", [None, 1, 7, 64])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_lengths_at_every_edge_of_latent_keys(heads, page, splits):
    check_latent(heads, lengths=EDGES, page=page, dtype=HALF if page == 7 else BFLOAT16, options={"num_splits": splits})


@pytest.mark.parametrize(
    "heads, queries",
    [(1, 1), (3, 3), (8, 4), (33, 1), (16, 3), (63, 1), (16, 4), (65, 1), (64, 2), (127, 1), (16, 8), (43, 3)],
)
def test_rows_of_latent_keys(heads, queries):
    """Up to 32 rows a warp of the Hopper kernel has 8 of them, up to 64 it has 16; after them another item begins."""
    check_latent(heads, lengths=(0, 1, 64, 200, 900), queries=queries)


@pytest.mark.parametrize("width, values", [(576, 512), (512, 512), (264, 256), (448, 72), (576, 8)])
def test_widths_of_latent_keys(width, values):
    check_latent(20, width, values, lengths=FEW, page=48)


@pytest.mark.parametrize(
    "more",
    [
        {"options": {"softcap": 2.0}},
        {"alibi": 2, "sinks": True},
        {"options": {"window": (70, None)}, "queries": 3},
        {"options": {"window": (63, None), "num_splits": 2}, "sinks": True},
        {"options": {"scale": -0.5}},
        {"options": {"causal": False}, "queries": 2},
        {"leftpad": (0, 1, 9, 64, 17), "batch_idx": True},
        {"order": "HND"},
        {"gap": 8},
        {"holes": 0.3},
        {"size": 8.0},
        {"layouts": ("unaligned", "contiguous", "contiguous")},
        {"layouts": ("strided", "contiguous", "contiguous")},
        {"key_heads": 2},
        {"queries": (1, 3, 0, 2, 4), "spare_rows": (5, 0)},
        {"queries": (1, 0, 0, 4, 1), "give_longest": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [16, 30])
def test_options_of_latent_keys(heads, more):
    """Rows of queries that are no multiples of 16 bytes apart are the other GPUs' kernel's."""
    check_latent(heads, lengths=FEW, **more)


@pytest.mark.parametrize("count, heads", [(33, 16), (200, 16), (70, 128)])
def test_numbers_of_sequences_of_latent_keys(count, heads):
    choose = random.Random(count)
    check_latent(heads, lengths=tuple(choose.choice([0, 1, 40, 64, 130]) for _ in range(count)), seed=count)


@pytest.mark.parametrize("heads", [16, 128])
def test_one_item_of_latent_keys_cut_by_every_share(heads):
    query, key = randn(1, heads, 1, 576), randn(1, 1, 40000, 576)
    for length in (40000, 20033):
        check_close(query, (key, key[..., :512]), integers(length))


# --- more than 16 rows: on Hopper, tiles that shares cut --------------------------------------------------------------------

BLOCKS = (0, 1, 63, 64, 65, 127, 129, 511, 513, 1500)  # lengths at the edges of blocks of keys and of the shortest share

# Groups that fill a tile of 64 rows in part and whole, two of them, one of 128, and several; groups that are no power of two.
TILES = [
    ((8, 1), 3), ((16, 1), 4), ((16, 2), 9), ((128, 1), 1), ((128, 1), 3), ((24, 1), 3), ((10, 2), 13), ((4, 4), 50),
    ((8, 2), 50), ((6, 2), 67),
]  # fmt: skip
# With room for so many keys they are too many to be read twice, and large tiles take more than 64 rows.
ROOM = 20000


@pytest.mark.parametrize("capacity", [1503, ROOM])
@pytest.mark.parametrize("heads, queries", TILES, ids=str)
def test_tiles_at_every_edge(heads, queries, capacity):
    check(lengths=BLOCKS, queries=queries, heads=heads, head_dims=(128, 128), capacity=capacity)


@pytest.mark.parametrize("capacity", [703, ROOM])
@pytest.mark.parametrize("heads, queries", [((8, 1), 5), ((8, 2), 50)])
@pytest.mark.parametrize("head_dims", [(64, 64), (72, 40), (96, 96), (192, 128), (192, 192), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16], ids=str)
def test_tiles_of_head_dims(dtype, head_dims, heads, queries, capacity):
    check(queries=queries, heads=heads, head_dims=head_dims, capacity=capacity, dtype=dtype)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("page", [None, 8, 24, 64, 256])
def test_tiles_in_pages(page, order):
    check(lengths=BLOCKS, queries=6, heads=(16, 2), head_dims=(128, 128), page=page, order=order)


@pytest.mark.parametrize("queries", [5, 30])
@pytest.mark.parametrize(
    "more",
    [
        {"options": {"window": (0, 0)}}, {"options": {"window": (200, None)}}, {"options": {"causal": False}},
        {"options": {"window": (70, 9), "causal": False}}, {"options": {"softcap": 2.0}}, {"alibi": 1}, {"alibi": 2},
        {"sinks": True}, {"sinks": True, "options": {"window": (3, None)}}, {"size": 8.0}, {"holes": 0.2},
        {"page": None, "leftpad": (0, 3, 90, 4000)}, {"page": None, "batch_idx": True}, {"shared_pages": True},
        {"layouts": ("transposed",) * 3},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_tiles(more, queries):
    check(**({"lengths": (0, 70, 1100, 2900), "queries": queries, "heads": (16, 2), "head_dims": (128, 128)} | more))


@pytest.mark.parametrize("capacity", [3003, ROOM])
@pytest.mark.parametrize("queries", [(3, 0, 4, 1), (60, 0, 7, 1), (1, 300, 2, 2)])
def test_tiles_of_packed_queries(queries, capacity):
    """Sequences of one tile with one of many: each has its own tiles on the line."""
    lengths = (3000, 500, 0, 1200)
    check(lengths=lengths, queries=queries, heads=(16, 2), head_dims=(128, 128), capacity=capacity, sinks=True)


@pytest.mark.parametrize("lengths", [(6000, 0, 40, 300, 1, 2500), (5,) * 40 + (4000,)], ids=str)
@pytest.mark.parametrize("queries", [4, 16])
def test_tiles_of_lengths_far_apart(queries, lengths):
    check(lengths=lengths, queries=queries, heads=(16, 2), head_dims=(64, 64), capacity=ROOM)


@pytest.mark.parametrize("heads, queries, head_dim", [(16, 2, 128), (32, 2, 64), (128, 1, 128), (5, 40, 128), (1, 300, 64)])
def test_one_tile_cut_by_every_share(heads, queries, head_dim):
    query, caches = randn(1, heads, queries, head_dim), [randn(1, 1, 70000, head_dim) for _ in range(2)]
    for length in (70000, 40001, 130):
        check_close(query, caches, integers(length))
