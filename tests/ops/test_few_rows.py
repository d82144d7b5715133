"""Few rows without gradients, as in a step of generation (csrc/core/cache.h): kernels over cached keys take these calls, on the
CPU for every option, dtype and stride, on CUDA where docs/design/decode_dense.md says.

"Few" is at most 64 rows per key head. Such a row does not depend on the batch, on other heads and on threads, but need not have
the bits of the same row in a longer call.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from cases import DTYPES
from devices import skip_without_room
from instruction_sets import run_tests, skip_unless_lesser
from oracle import Attention

import flash_online
from flash_online import reference
from flash_online.testing import LAYOUTS, assert_close_to_float64, lay_out, peak_extra_bytes

INF = math.inf
LOWEST = {dtype: torch.finfo(dtype).min for dtype in DTYPES}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "causal lower right": {"causal": True, "alignment": "lower_right"},
    "window": {"window": (100, 3), "alignment": "lower_right"},
    "window of early keys": {"window": (5, 530)},
    "softcap": {"softcap": 2.0},
    "negative scale": {"scale": -0.4},
    "scale 0": {"scale": 0.0},
    "alibi": {"alibi": 1, "causal": True, "alignment": "lower_right"},
    "alibi of each batch": {"alibi": 2},
    "sinks": {"sinks": True},
    "bool": {"mask": "bool"},
    "float": {"mask": "float"},
    "-inf": {"mask": "-inf", "causal": True, "alignment": "lower_right"},
    "all": {"mask": "-inf", "softcap": 2.0, "alibi": 1, "sinks": True, "window": (600, 2), "alignment": "lower_right"},
}
# Of the dimensions batch, heads, queries, keys: padding, for all batches; a bias of each head; a mask of each query; all.
MASK_SHAPES = [(1, 0, 0, 1), (0, 0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1), (1, 1, 1, 1), (0, 0, 1, 0)]


def check(device, **problem):
    Attention(
        **{"wanted": "", "grad_lse": False, "lengths": (1, 777), "heads": (4, 2, 2), "head_dims": (32, 32)} | problem
    ).check(device)


def run(query, key, value, **options):
    with torch.no_grad():
        return flash_online.attention(query, key, value, return_lse=True, **options)


@pytest.mark.parametrize("lengths", [(1, 513), (3, 777), (16, 2100)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.thin(3)
def test_options(dtype, name, lengths, device):
    problem = Attention.of(OPTIONS[name], dtype=dtype, lengths=lengths, heads=(4, 2, 2), head_dims=(64, 64))
    if problem.mask:
        problem.mask_shape = (1, 1, 1, 1)
    problem.wanted, problem.grad_lse = "", False
    problem.check(device)


@pytest.mark.parametrize("mask_shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("mask", ["bool", "blocks", "float", "-inf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.thin(2)
def test_shapes_of_masks(dtype, mask, mask_shape, device):
    check(device, dtype=dtype, lengths=(5, 1100), mask=mask, mask_shape=mask_shape, layouts=("contiguous",) * 3 + ("sliced",))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_layouts_of_masks(mask, layout, device):
    check(device, lengths=(4, 700), mask=mask, mask_shape=(1, 1, 1, 1), layouts=("contiguous",) * 3 + (layout,))


@pytest.mark.parametrize("mask_dtype", [torch.float32, None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes_of_masks(dtype, mask_dtype, device):
    check(device, dtype=dtype, mask="-inf", mask_shape=(1, 0, 0, 1), mask_dtype=mask_dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (33, 100), (100, 33)], ids=str)
@pytest.mark.thin(3)
def test_layouts(head_dims, dtype, layout, device):
    """Keys as they lie: [B, S, H, E] turned around, expanded batches, strided columns."""
    check(device, dtype=dtype, head_dims=head_dims, layouts=(layout,) * 3 + ("contiguous",), lengths=(2, 777))


@pytest.mark.parametrize("head_dims", [(0, 4), (1, 1), (3, 5), (33, 33), (64, 128), (100, 100), (128, 64), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.thin(2)
def test_head_dims(dtype, head_dims, device):
    check(device, dtype=dtype, head_dims=head_dims, mask="float", mask_shape=(1, 0, 0, 1))


@pytest.mark.parametrize(
    "heads, queries", [((1, 1, 1), 64), ((8, 1, 1), 8), ((8, 8, 8), 3), ((32, 4, 4), 2), ((6, 2, 3), 1)], ids=str
)
@pytest.mark.parametrize("batch", [(1,), (2, 3)], ids=str)
def test_heads_and_batches(heads, queries, batch, device):
    check(device, batch=batch, heads=heads, lengths=(queries, 600), mask="bool", mask_shape=(1, 1, 1, 1), seed=queries)


@pytest.mark.parametrize("keys", [1, 15, 16, 17, 63, 511, 512, 513, 1023, 1024, 1025, 4097, 33000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_lengths(dtype, keys, device):
    check(device, dtype=dtype, batch=(1,), heads=(2, 1, 1), lengths=(1, keys), head_dims=(16, 16))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_alone(dtype, options, device):
    """The call without options, which has an operator of its own."""
    skip_without_room(device, dtype, 64)
    for queries in (1, 7):
        query, key, value = (torch.randn(2, h, n, 64).to(device, dtype) for h, n in ((8, queries), (2, 900), (2, 900)))
        found = flash_online.attention(query, key, value, **options)
        truth = reference.attention(*(t.double() for t in (query, key, value)), **options)
        plain = reference.attention(query, key, value, **options)
        assert_close_to_float64(found, plain, truth, dtype, magnitude=1.0)


@pytest.mark.parametrize("level", [30.0, 3e3, 1e9])
@pytest.mark.parametrize("mask", [None, "float", "bool"])
def test_large_scores(mask, level, device):
    check(device, level=level, mask=mask, mask_shape=(1, 1, 1, 1), heads=(4, 2, 2), lengths=(4, 900), head_dims=(64, 64))


def with_lowest(dtype, mask_dtype, device, keys=1100):
    """Rows 0 and 1 have the mask's lowest number everywhere and -inf everywhere; it hides the first keys or the last ones of
    rows 2 and 3, which sees in row 4 -inf and lowest numbers alone."""
    query, key, value = (torch.randn(2, h, n, 64).to(device, dtype) for h, n in ((4, 6), (2, keys), (2, keys)))
    mask = torch.zeros(2, 1, 6, keys, dtype=mask_dtype)
    mask[..., 0, :] = LOWEST[mask_dtype]
    mask[..., 1, :] = -INF
    mask[..., 2, : keys // 2 + 3] = LOWEST[mask_dtype]
    mask[..., 3, keys // 2 :] = LOWEST[mask_dtype]
    mask[..., 4, : keys // 2] = -INF
    mask[..., 4, keys // 2 :] = LOWEST[mask_dtype]
    return query, key, value, mask.to(device)


@pytest.mark.parametrize("dtype, mask_dtype", [(d, m) for d in DTYPES[:3] for m in dict.fromkeys((d, torch.float32))], ids=str)
def test_mask_of_lowest_numbers(dtype, mask_dtype, device):
    query, key, value, mask = with_lowest(dtype, mask_dtype, device)
    out, lse = run(query, key, value, mask=mask)
    wide = [t.double() for t in (query, key, value, mask)]
    truth, truth_lse = reference.attention(*wide[:3], mask=wide[3], return_lse=True)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}[dtype]
    if mask_dtype != torch.float16:  # its lowest number leaves differences of scores, which the tolerance has no room for
        torch.testing.assert_close(out.double(), truth, atol=tolerance, rtol=tolerance)
        mean = value.double().mean(-2).repeat_interleave(2, 1)
        torch.testing.assert_close(out[..., 0, :].double(), mean, atol=tolerance, rtol=tolerance)
    assert not out[..., 1, :].any() and torch.equal(lse.isneginf(), truth_lse.isneginf())
    assert out.isfinite().all() and not lse.isnan().any()
    finite = ~lse.isneginf()
    atol = 2e-2 if mask_dtype == torch.float16 else 1e-3
    torch.testing.assert_close(lse.double()[finite], truth_lse[finite], atol=atol, rtol=1e-6)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing(dtype, kind, device):
    query, key, value = (torch.randn(1, 2, n, 40).to(device, dtype) for n in (3, 600, 600))
    seen = torch.ones(1, 1, 3, 600, dtype=torch.bool, device=device)
    seen[..., 1, :] = False
    mask = seen if kind == "bool" else torch.where(seen, 0.0, -INF).to(dtype)
    out, lse = run(query, key, value, mask=mask)
    assert not out[..., 1, :].any() and lse[..., 1].isneginf().all() and lse[..., ::2].isfinite().all()
    sinks = torch.tensor([0.7, -3.3], device=device)
    sinks = sinks.double() if dtype == torch.float64 else sinks
    out, lse = run(query, key, value, mask=mask, sinks=sinks)
    assert not out[..., 1, :].any() and torch.equal(lse[0, :, 1], sinks)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_that_no_row_sees_may_hold_anything(dtype, kind, device):
    """Padding on the left, by whole blocks."""
    query, key, value = (torch.randn(2, h, n, 64).to(device, dtype) for h, n in ((4, 1), (2, 1024), (2, 1024)))
    seen = (torch.arange(1024) >= 512).to(device)[None, None, None]
    mask = seen if kind == "bool" else torch.where(seen, 0.0, -INF).to(dtype)
    expected = run(query, key, value, mask=mask)
    for bad in (math.nan, INF):
        key[:, :, :512], value[:, :, :512] = bad, bad
        torch.testing.assert_close(run(query, key, value, mask=mask), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_reaches_its_rows(dtype, device):
    query, key, value = (torch.randn(2, h, n, 32).to(device, dtype) for h, n in ((4, 3), (2, 800), (2, 800)))
    mask = torch.zeros(2, 1, 3, 800, device=device, dtype=dtype)
    query[0, 1, 0] = math.nan
    mask[1, 0, 2, 700] = math.nan
    out, lse = run(query, key, value, mask=mask)
    bad = torch.zeros(2, 4, 3, dtype=torch.bool, device=device)
    bad[0, 1, 0] = bad[1, :, 2] = True
    assert torch.equal(out.isnan().all(-1), bad) and torch.equal(out.isnan().any(-1), bad)
    assert torch.equal(lse.isfinite(), ~bad)


BIT_OPTIONS = ["plain", "causal lower right", "window", "softcap", "alibi", "sinks", "bool", "-inf", "all"]


def assert_same_bits(found, expected, what):
    for name, a, b in zip(("out", "lse"), found, expected, strict=True):
        assert torch.equal(a, b), f"{what}: {name} differs by {(a.double() - b.double()).abs().nan_to_num().max().item():.3g}"


@pytest.mark.parametrize("heads, queries", [((8, 2, 2), 1), ((8, 2, 2), 6), ((4, 4, 4), 3)], ids=str)
@pytest.mark.parametrize("name", BIT_OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.thin(2)
def test_a_row_does_not_depend_on_batch_heads_strides_and_threads(dtype, name, heads, queries):
    problem = Attention.of(OPTIONS[name], dtype=dtype, batch=(3,), lengths=(queries, 1700), heads=heads, head_dims=(64, 32))
    problem.mask_shape = (1, 1, 1, 1)
    made = problem.inputs()
    tensors = [made.pop(n) for n in ("query", "key", "value")]
    whole = run(*tensors, **made, **problem.options)
    one = {n: t[1:2] if n == "mask" or t.dim() == 2 else t for n, t in made.items()}
    assert_same_bits(run(*(t[1:2] for t in tensors), **one, **problem.options), [t[1:2] for t in whole], "a batch alone")
    group = heads[0] // heads[1]
    first = {n: t[:, :group] if n == "mask" or t.dim() == 2 else t[:group] for n, t in made.items()}
    alone = run(tensors[0][:, :group], *(t[:, :1] for t in tensors[1:]), **first, **problem.options)
    assert_same_bits(alone, [t[:, :group] for t in whole], "the heads of one key head")
    head = {n: t[:, :1] if n == "mask" or t.dim() == 2 else t[:1] for n, t in made.items()}
    alone = run(*(t[:, :1] for t in tensors), **head, **problem.options)
    assert_same_bits(alone, [t[:, :1] for t in whole], "one head alone")
    for layout in ("transposed", "strided", "columns", "unaligned"):
        other = {n: lay_out(t, layout) if n == "mask" else t for n, t in made.items()}
        assert_same_bits(run(*(lay_out(t, layout) for t in tensors), **other, **problem.options), whole, layout)
    for threads in (2, 5):
        torch.set_num_threads(threads)
        assert_same_bits(run(*tensors, **made, **problem.options), whole, f"{threads} threads")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_calls_do_not_depend_on_batch_heads_and_threads(dtype):
    query, key, value = (torch.randn(3, h, n, 64).to(dtype) for h, n in ((16, 1), (2, 3000), (2, 3000)))
    whole = flash_online.attention(query, key, value)
    assert torch.equal(flash_online.attention(query[:1], key[:1], value[:1]), whole[:1])
    assert torch.equal(flash_online.attention(query[:, :8], key[:, :1], value[:, :1]), whole[:, :8])
    assert torch.equal(flash_online.attention(query[:, 8:9], key[:, 1:], value[:, 1:]), whole[:, 8:9])
    again = flash_online.attention(torch.cat([query] * 3, 2), key, value)  # more rows, still few
    assert all(torch.equal(again[:, :, i : i + 1], whole) for i in range(3))
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    assert torch.equal(flash_online.attention(*turned), whole)
    torch.set_num_threads(3)
    assert torch.equal(flash_online.attention(query, key, value), whole)


@pytest.mark.parametrize("heads", [(32, 8, 8), (4, 4, 4)], ids=str)
@pytest.mark.parametrize("queries, keys", [(1, 513), (1, 20000), (8, 3000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_explained_memory_is_a_bound(dtype, queries, keys, heads):
    pytest.importorskip("flash_online._introspect")
    query, key, value = (
        torch.randn(2, h, n, 64, dtype=dtype) for h, n in ((heads[0], queries), (heads[1], keys), (heads[1], keys))
    )
    mask = torch.ones(2, 1, 1, keys, dtype=torch.bool)
    for options in ({}, {"mask": mask}):
        call = functools.partial(flash_online.attention, query, key, value, **options)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            plan = flash_online.explain(flash_online.attention, query, key, value, **options)
            results = query.numel() * query.element_size()
            assert peak_extra_bytes(call) - results <= plan.extra_bytes + 64  # what aligns the scratch


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512"])
def test_lesser_instruction_sets(instruction_set):
    skip_unless_lesser(instruction_set)
    run_tests(instruction_set, "-x", "-m", "not slow", __file__)
