"""Row independence on CUDA: out and lse of a query depend on its own row, the keys that it sees and the options alone, bit for
bit. Not on the other queries of its tile, on the batch, on the heads next to it, nor on where a sequence is cut into calls.

Keys grow along the sequence in most tests, so that a row's maximum has to be moved again and again; neighbours with scores many
times as large need that at other keys than the row does.
"""

from __future__ import annotations

import pytest
import torch
from devices import skip_without_room

import flash_online

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
HEAD_DIMS = [64, 96, 128, 192, 256]
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (100, 20)},
    "narrow_window": {"window": (60, 0)},
    "softcap": {"softcap": 3.0, "causal": True},
    "tiny_softcap": {"softcap": 1e-5},
    "alibi": {"alibi": True, "causal": True},
    "sinks": {"sinks": True, "causal": True},
    "bool_mask": {"mask": "bool"},
    "float_mask": {"mask": "float"},
}


@pytest.fixture(autouse=True)
def ours_alone():
    with flash_online.strict():
        yield


def inputs(head_dim, dtype, lengths=(384, 384), batch=1, heads=2, key_heads=2, growing=True):
    """Query, key and value. The scores of a row rise or fall by some ten standard deviations along the keys."""
    skip_without_room("cuda", dtype, head_dim, gradients=False)
    (queries, keys), g = lengths, torch.Generator().manual_seed(7)
    q = torch.randn(batch, heads, queries, head_dim, generator=g)
    k = torch.randn(batch, key_heads, keys, head_dim, generator=g)
    v = torch.randn(batch, key_heads, keys, head_dim, generator=g)
    if growing:
        k *= torch.linspace(0.2, 6, keys).square()[:, None]
        k += k.mean(-2, keepdim=True)
    return [x.to("cuda", dtype) for x in (q, k, v)]


def tensors_of(options, q, k):
    """The options of a line of OPTIONS, with their tensors: those of the whole problem."""
    options, g = dict(options), torch.Generator().manual_seed(8)
    shape, heads = (q.shape[0], q.shape[1], q.shape[2], k.shape[2]), q.shape[1]
    if options.pop("alibi", False):
        options["alibi_slopes"] = (torch.rand(heads, generator=g) * 0.2).cuda()
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(heads, generator=g).cuda()
    if "mask" in options:
        kind = options["mask"]
        options["mask"] = (torch.rand(shape, generator=g) > 0.3).cuda()
        options["mask"][..., 0] = True
        if kind == "float":
            options["mask"] = torch.where(options["mask"].cpu(), torch.randn(shape, generator=g), -torch.inf).to(
                "cuda", q.dtype
            )
    return options


def attend(q, k, v, **options):
    return flash_online.attention(q, k, v, **options, return_lse=True)


def assert_same(got, expected, what):
    for name, x, y in zip(("out", "lse"), got, expected, strict=True):
        assert x.isfinite().all(), f"{name} of {what}"
        farthest = (x.double() - y.double()).abs().max().item()
        assert torch.equal(x, y), f"{name} of {what}: {int((x != y).sum())} of {x.numel()} differ, by up to {farthest:.3g}"


def of_heads(options, heads):
    """The options' tensors for these heads alone."""
    return options | {
        name: options[name][:, heads] if name == "mask" else options[name][heads]
        for name in ("mask", "alibi_slopes", "sinks")
        if name in options
    }


def of_rows(options, rows, keys):
    return options | {"mask": options["mask"][:, :, rows, keys]} if "mask" in options else options


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_queries_of_the_tile(dtype, head_dim, name):
    q, k, v = inputs(head_dim, dtype)
    options = tensors_of(OPTIONS[name], q, k)
    expected = attend(q, k, v, **options)
    kept = torch.zeros(q.shape[2], dtype=torch.bool, device="cuda")
    kept[[0, 3, 8, 17, 64, 130, 200, 383]] = True
    for factor in (0.0, -1.0, 40.0):
        others = torch.where(kept[:, None], q, q * factor)
        got = attend(others, k, v, **options)
        assert_same([x[:, :, kept] for x in got], [x[:, :, kept] for x in expected], f"rows next to others times {factor}")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_and_heads(dtype, head_dim, name):
    # 40 entries of 4 heads fill the GPU; one of one group of heads is work for few of its SMs, which other tiles take.
    q, k, v = inputs(head_dim, dtype, (200, 200), batch=40, heads=4, key_heads=2)
    options = tensors_of(OPTIONS[name], q, k)
    expected = attend(q, k, v, **options)
    for batch, heads, key_heads in [(slice(0, 1), slice(2, 4), slice(1, 2)), (slice(7, 12), slice(0, 4), slice(0, 2))]:
        few = of_heads(options, heads)
        if "mask" in few:
            few["mask"] = few["mask"][batch]
        got = attend(q[batch, heads], k[batch, key_heads], v[batch, key_heads], **few)
        assert_same(got, [x[batch, heads] for x in expected], f"batch {batch}, heads {heads}")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuts_of_the_sequence(dtype, head_dim, name):
    # Long and short calls run in different tiles, and a row is another one of its tile.
    # Without a gradient the keys of the short ones would be cut by their number (tests/ops/test_few_rows.py).
    length = 1024
    q, k, v = inputs(head_dim, dtype, (length, length))
    q.requires_grad_()
    options = tensors_of(OPTIONS[name], q, k)
    expected = attend(q, k, v, **options)
    left, right = options.get("window", (None, 0 if options.get("causal") else None))
    for begin, end in [(0, 1), (0, 128), (1, 18), (128, 384), (100, 401), (640, 1000), (1000, length)]:
        keys = slice(0, length if right is None else min(end + right, length))
        part = of_rows(options, slice(begin, end), keys)
        if right:
            # Aligned to the lower right, queries are at the last keys; the window's left part grows by what they moved.
            moved = keys.stop - end
            part |= {"window": (left + moved, right - moved)}
        got = attend(q[:, :, begin:end], k[:, :, keys], v[:, :, keys], **part, alignment="lower_right")
        assert_same(got, [x[:, :, begin:end] for x in expected], f"rows {begin} to {end}")


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (60, 0)}, {"softcap": 3.0, "causal": True}], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(130, 1, 77, 200, 30), (900, 3, 129, 64)], ids=["short", "long"])
def test_packed_and_dense(dtype, head_dim, options, lengths):
    heads, key_heads = 4, 2
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = inputs(head_dim, dtype, (sum(lengths), sum(lengths)), heads=heads, key_heads=key_heads)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    longest = max(lengths)
    got = flash_online.varlen_attention(q, k, v, starts, starts, longest, longest, **options, return_lse=True)
    for n in range(len(lengths)):
        rows = slice(int(starts[n]), int(starts[n + 1]))
        alone = [x[rows].transpose(0, 1)[None] for x in (q, k, v)]
        out, lse = attend(*alone, **options)
        assert_same((got[0][rows].transpose(0, 1)[None], got[1][None, :, rows]), (out, lse), f"sequence {n} of {lengths[n]}")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(dtype, head_dim):
    q, k, v = inputs(head_dim, dtype, batch=2)
    expected = attend(q, k, v, causal=True)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    fused = torch.stack([q, k, v], 3).unbind(3)
    for what, tensors in {"[B, L, H, E]": swapped, "fused": fused}.items():
        assert_same(attend(*tensors, causal=True), expected, what)


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_of_heads_as_rows(dtype, head_dim, queries):
    # Few queries of many heads become more rows of fewer heads; a single head of them does not.
    q, k, v = inputs(head_dim, dtype, (queries, 700), batch=3, heads=16, key_heads=2)
    expected = attend(q, k, v)
    for head in (0, 5, 15):
        group = slice(head // 8, head // 8 + 1)
        got = attend(q[:, head : head + 1], k[:, group], v[:, group])
        assert_same(got, [x[:, head : head + 1] for x in expected], f"head {head}")


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (60, 0)}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [60, 300])
def test_gradients_of_a_head_under_determinism(dtype, head_dim, options, length):
    skip_without_room("cuda", dtype, head_dim)
    q, k, v = inputs(head_dim, dtype, (length, length), batch=10, heads=8, key_heads=2, growing=False)
    seed = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).to("cuda", dtype)

    def gradients(batch, heads, key_heads):
        leaves = [x.detach().requires_grad_() for x in (q[batch, heads], k[batch, key_heads], v[batch, key_heads])]
        out = flash_online.attention(*leaves, **options, deterministic=True)
        return torch.autograd.grad(out, leaves, seed[batch, heads])

    everything = slice(None)
    expected = gradients(everything, everything, everything)
    for batch, heads, key_heads in [(slice(3, 4), slice(4, 8), slice(1, 2)), (slice(0, 5), everything, everything)]:
        got = gradients(batch, heads, key_heads)
        parts = (expected[0][batch, heads], expected[1][batch, key_heads], expected[2][batch, key_heads])
        for name, x, y in zip("qkv", got, parts, strict=True):
            assert torch.equal(x, y), f"grad {name} of batch {batch}, heads {heads}: {int((x != y).sum())} differ"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_maxima_that_move_stay_right(dtype, head_dim):
    # Every part of every block moves some row's maximum, also within the first block, and not those of its neighbours.
    length = 384
    q, k, v = inputs(head_dim, dtype, (length, length), growing=False)
    steps = torch.arange(length, device="cuda")[:, None] // 16
    for rows in (slice(0, None, 2), slice(0, None, 7), slice(5, 6)):
        direction = torch.zeros_like(q)
        direction[:, :, rows, 0] = head_dim**0.5
        jump = torch.zeros_like(k)
        jump[..., :1] = (steps * 12.0).to(dtype)
        x, y = q * 0.5 + direction, k * 0.5 + jump
        out, lse = attend(x, y, v)
        exact = (x.double() @ y.double().transpose(-1, -2)) / head_dim**0.5
        truth = exact.softmax(-1) @ v.double()
        assert (lse.double() - exact.logsumexp(-1)).abs().max() <= 2e-5 * exact.abs().max()
        assert (out.double() - truth).abs().max() <= 8 * torch.finfo(dtype).eps * v.double().abs().max() + 1e-4
