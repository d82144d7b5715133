"""The decode kernel over dense keys, thread by thread on the host, against float64: every way to share the keys of a row among
CTAs, and that a row's bits do not depend on it. device_on_host/ has the fibers that stand for threads."""

from __future__ import annotations

import ctypes

import kernels_on_host
import pytest
import torch
from kernels_on_host import draw, moved, problem_of, seen_keys

from flash_online import reference, testing

kernels_on_host.require_sources()

LINE, WHOLE, PAIR = range(3)  # what attention_few_rows() returns


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """kernels(head dim): the library of its decode kernel."""
    return kernels_on_host.attention_kernels(tmp_path_factory.mktemp("decode"), "decode.cpp")


def run(library, query, key, value, *, splits, sms=3, lower_right=False, sinks=None, room=227, **given):
    """(out, lse, how CTAs share the keys) of problem_of's arguments, on a GPU of `sms` SMs with `room` KiB of shared memory."""
    out = torch.full((*query.shape[:-1], value.shape[-1]), torch.nan, dtype=query.dtype)
    lse = torch.full(query.shape[:-1], torch.nan)
    problem = problem_of(query, key, value, out, lse, **given)
    problem.lower_right = lower_right
    if sinks is not None:
        problem.sinks = sinks.data_ptr()
    library.set_shared_bytes(room << 10)
    library.set_sms(sms)
    share = library.attention_few_rows(ctypes.byref(problem), ctypes.c_int64(splits))
    assert share >= 0, library.last_error().decode()
    return out, lse, share


def check(got, inputs, **options):
    out, lse, _ = got
    plain, truth = (
        reference.attention(*(t.to(kind) for t in inputs), return_lse=True, **options) for kind in (out.dtype, torch.float64)
    )
    testing.assert_close_to_float64(out, plain[0], truth[0], name="out")
    torch.testing.assert_close(lse.double(), truth[1], rtol=2e-6, atol=2e-5)


HEAD_DIMS = [64, 128, *(pytest.param(e, marks=pytest.mark.slow) for e in (40, 96, 192, 256))]  # each takes seconds to compile


@pytest.mark.parametrize("keys", [1, 40, 300, 1100])
@pytest.mark.parametrize(("heads", "queries"), [((8, 2), 1), ((4, 2), 3), ((16, 1), 1), ((2, 2), 1)], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bits_do_not_depend_on_shares(kernels, head_dim, heads, queries, keys):
    """One to eight SMs: CTAs of one or two teams that take whole rows, pairs of CTAs that share one, and shares that cut a row
    anywhere between its units."""
    if heads == (16, 1) and head_dim > 128:
        pytest.skip("the results of 16 rows have no room, and dispatch.cu does not ask for them")
    dtype = torch.float16 if keys % 3 else torch.bfloat16
    inputs, library = draw((queries, keys), head_dim, heads, dtype, batch=2, size=3), kernels(kernels_on_host.tile_of(head_dim))
    runs = [run(library, *inputs, splits=4 + keys // 256, sms=sms) for sms in (1, 2, 3, 4, 5, 7, 8)]
    check(runs[0], inputs)
    for out, lse, _ in runs[1:]:
        assert torch.equal(out, runs[0][0]) and torch.equal(lse, runs[0][1])
    if keys > 1000:
        assert {share for *_, share in runs} == ({LINE, WHOLE, PAIR} if head_dim <= 128 else {LINE, WHOLE})
    alone = run(library, *(t[1:] for t in inputs), splits=4 + keys // 256, sms=5)
    assert torch.equal(alone[0], runs[0][0][1:]) and torch.equal(alone[1], runs[0][1][1:])


@pytest.mark.parametrize("keys", [1, 40, 300, 1100])
@pytest.mark.parametrize(("sms", "share"), [(4, WHOLE), (8, PAIR), (2, WHOLE)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_full_caches(kernels, head_dim, sms, share, keys):
    """Four rows of heads: two CTAs of four warps on each of two SMs, one of eight on each of four, or a pair for each row. A
    row of one tile of keys has nothing for the second CTA of a pair."""
    inputs = draw((2, keys), head_dim, (4, 2), torch.bfloat16, batch=2, size=3)
    for window in ((-1, 0), (-1, -1), (200, 0)):
        got = run(kernels(head_dim), *inputs, splits=0, sms=sms, window=window, lower_right=True)
        assert got[2] == share
        check(got, inputs, mask=seen_keys(2, keys, window, keys - 2))


@pytest.mark.parametrize("window", [(-1, 0), (100, 0), (30, 200), (-1, 5), (0, 0), (-1, -1)], ids=str)
@pytest.mark.parametrize("lower_right", [False, True], ids=["upper left", "lower right"])
@pytest.mark.parametrize("sms", [1, 3])
def test_windows(kernels, sms, lower_right, window):
    """With units that no query sees."""
    inputs = draw((2, 700), 64, (4, 2), torch.bfloat16, size=3)
    got = run(kernels(64), *inputs, splits=8, sms=sms, window=window, lower_right=lower_right)
    check(got, inputs, mask=seen_keys(2, 700, window, 698 if lower_right else 0))


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.bfloat16, "lowest"], ids=str)
@pytest.mark.parametrize("sms", [1, 3])
def test_masks_and_sinks(kernels, sms, kind):
    """Masks of one row, as padding makes them; hidden tiles hold NaN."""
    query, key, value = draw((1, 500), 64, (4, 2), torch.bfloat16, batch=2, size=2)
    hidden = torch.rand(2, 1, 1, 500) < 0.3
    hidden[:, :, :, 64:256] = True
    if kind == torch.bool:
        mask = ~hidden
    else:
        dtype = torch.float32 if kind == "lowest" else kind
        mask = torch.randn(2, 1, 1, 500).to(dtype)
        mask.masked_fill_(hidden, torch.finfo(dtype).min if kind == "lowest" else -torch.inf)
    if kind != "lowest":  # whose keys still count where nothing else is seen
        key[:, :, 64:256], value[:, :, 64:256] = torch.nan, torch.nan
    sinks = torch.randn(4)
    got = run(kernels(64), query, key, value, splits=4, sms=sms, mask=mask, sinks=sinks)
    inputs = query, key.nan_to_num(), value.nan_to_num()
    check(got, inputs, mask=mask, sinks=sinks)


@pytest.mark.parametrize("layout", ["rows of heads", "fused"])
def test_layouts(kernels, layout):
    inputs = draw((2, 300), 64, (4, 2), torch.float16)
    got = run(kernels(64), *(moved(t, layout) for t in inputs), splits=4)
    check(got, inputs)


@pytest.mark.parametrize("room", [163, 99])
def test_less_shared_memory(kernels, room):
    inputs = draw((1, 600), 128, (8, 2), torch.bfloat16, size=2)
    check(run(kernels(128), *inputs, splits=8, room=room), inputs)
