"""Spans on CUDA: every kernel family against the reference, tiles that are never read, long sequences, graphs, memory.

FLASH_ONLINE_KERNEL=sm80 in the environment runs them on the general kernels."""

from __future__ import annotations

import pytest
import torch
from cases import SPARSE_HEAD_DIMS, SPARSE_OPTIONS
from oracle import Attention, Packed

import flash_online
from flash_online import reference, spans
from flash_online.testing import assert_close_to_float64

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]

KINDS = [(1, 0), (2, 0), (0, 1), (0, 2), (2, 2)]
OPTIONS = {"alone": {}} | SPARSE_OPTIONS


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("head_dims", SPARSE_HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_head_dims(dtype, head_dims, kinds):
    for seed, lengths in enumerate([(64, 128), (130, 257), (515, 700), (300, 65)]):
        for head_spans in (False, True):
            Attention(
                dtype=dtype,
                heads=(4, 2, 2),
                lengths=lengths,
                head_dims=head_dims,
                spans=kinds,
                head_spans=head_spans,
                seed=seed,
            ).check("cuda")


@pytest.mark.parametrize("made", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_options(dtype, kinds, made):
    for seed, head_dim in enumerate((64, 128)):
        Attention(
            dtype=dtype, heads=(2, 1, 1), lengths=(257, 330), head_dims=(head_dim,) * 2, spans=kinds, seed=seed, **made
        ).check("cuda")


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_packed_sequences(dtype, kinds):
    lengths = ((300, 257), (1, 5), (0, 40), (64, 64), (130, 700), (33, 0))
    for seed, head_dim in enumerate((64, 128)):
        for head_spans in (False, True):
            Packed(
                heads=(4, 2, 2), dtype=dtype, lengths=lengths, head_dims=(head_dim,) * 2, spans=kinds, head_spans=head_spans,
                options={"causal": seed == 1}, seed=seed,
            ).check("cuda")  # fmt: skip


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (1, 1), (1, 300), (65, 63), (200, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_odd_lengths(dtype, lengths):
    for kinds in KINDS:
        Attention(dtype=dtype, lengths=lengths, head_dims=(64, 64), spans=kinds).check("cuda")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_more_work_tiles_than_sms(head_dim):
    for kinds in KINDS:
        Attention(
            dtype=torch.bfloat16, batch=(3,), heads=(8, 4, 4), lengths=(1400, 1400), head_dims=(head_dim,) * 2, spans=kinds,
            head_spans=True, wanted="qkv",
        ).check("cuda")  # fmt: skip


def draw(length, heads=(2, 2), head_dim=128, dtype=torch.bfloat16, keys=None):
    g = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(1, h, n, head_dim, device="cuda", generator=g).to(dtype).requires_grad_()
        for h, n in ((heads[0], length), (heads[1], keys or length), (heads[1], keys or length))
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hidden_tiles_are_not_read(head_dim, dtype):
    """The product of a hidden key's weight, 0, and NaN would be NaN. Tiles have 64, 96 or 128 keys."""
    query, key, value = draw(1024, head_dim=head_dim, dtype=dtype)
    key.data[:, :, 384:768], value.data[:, :, 384:768] = float("nan"), float("nan")
    seen = torch.tensor([0, 384, 768, 1024], dtype=torch.int32, device="cuda").expand(1024, 4)
    for given in ({"query_spans": seen}, {"key_spans": spans_of_keys(1024, 384, 768)}):
        out, lse = flash_online.attention(query, key, value, **given, return_lse=True)
        assert out.isfinite().all() and lse.isfinite().all()
        grads = torch.autograd.grad(out.sum() + lse.sum(), (query, key, value))
        keep = [slice(0, 384), slice(768, 1024)]
        assert grads[0].isfinite().all()
        for grad in grads[1:]:
            assert all(grad[:, :, rows].isfinite().all() for rows in keep)
            assert not grad[:, :, 384:768].any()


def spans_of_keys(length, first, last):
    given = torch.tensor([0, length], dtype=torch.int32, device="cuda").repeat(length, 1)
    given[first:last] = 0
    return given


@pytest.mark.parametrize("side", ["query_spans", "key_spans"])
def test_very_many_keys(side):
    """A bit of a tile's mask map stands for several blocks."""
    query, key, value = draw(200, keys=140_000, heads=(1, 1))
    own, other = (200, 140_000) if side == "query_spans" else (140_000, 200)
    g = torch.Generator().manual_seed(1)
    ends = torch.randint(0, other + 1, (own, 2), generator=g).sort(-1).values
    if side == "key_spans":
        ends[20_000:120_000] = 0  # tiles without any visible pair
    else:
        ends.clamp_(60_000, 61_000)
    given = {side: ends.int().cuda()}
    ours = run(flash_online.attention, (query, key, value), given)
    plain, truth = (
        run(reference.attention, [t.to(d) for t in (query, key, value)], given) for d in (torch.float32, torch.float64)
    )
    for name, one, other, true in zip(("out", "lse", "dq", "dk", "dv"), ours, plain, truth, strict=True):
        assert_close_to_float64(one, other.to(one.dtype), true, name=name)


def run(function, tensors, given):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out, lse = function(*leaves, return_lse=True, **given)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype))
    return out.detach(), lse.detach(), *(t.grad for t in leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_far_rows_are_passed_over(head_dim, dtype):
    """Bounds of groups of 2,048 rows tell them; a bool mask has none."""
    length = 9000
    query, key, value = draw(length, (2, 1), head_dim, dtype)
    ends = torch.tensor([0, 2500, 2501, 6000, length], dtype=torch.int32, device="cuda")
    middle = torch.zeros(length, 2, dtype=torch.int32, device="cuda")
    middle[5000:5100, 1] = 3000
    masks = (
        spans.documents(cu_seqlens=ends, L=length),
        spans.sink_window(4, 700, length, "cuda"),
        {"query_spans": middle},
        {"key_spans": middle},
    )
    for given in masks:
        given = {name: what for name, what in given.items() if what is not None}
        causal = {"causal": given["causal"]} if "causal" in given else {}
        dense = spans.to_mask(length, length, **{name: t for name, t in given.items() if name != "causal"})
        ours = run(flash_online.attention, (query, key, value), given)
        theirs = run(flash_online.attention, (query, key, value), {"mask": dense, **causal})
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_documents_are_what_packed_sequences_are(head_dim):
    ends = torch.tensor([0, 700, 701, 1900, 2048], dtype=torch.int32, device="cuda")
    query, key, value = draw(2048, (4, 2), head_dim)
    ours = run(flash_online.attention, (query, key, value), spans.documents(cu_seqlens=ends, L=2048))
    flat = [t[0].transpose(0, 1).contiguous() for t in (query, key, value)]
    packed = lambda q, k, v, **o: flash_online.varlen_attention(q, k, v, ends, ends, 1199, 1199, causal=True, **o)  # noqa: E731
    leaves = [t.detach().requires_grad_() for t in flat]
    out, lse = packed(*leaves, return_lse=True)
    grad = torch.linspace(-1, 1, out.numel(), device="cuda").view(1, 4, 2048, head_dim).to(out.dtype)
    out.backward(grad[0].transpose(0, 1))
    theirs = out.transpose(0, 1)[None], lse[None], *(t.grad.transpose(0, 1)[None] for t in leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_gradients(head_dim):
    query, key, value = draw(1000, (4, 2), head_dim)
    ends = torch.tensor([0, 300, 700, 1000], dtype=torch.int32, device="cuda")
    for given in (spans.documents(cu_seqlens=ends, L=1000), spans.prefix(torch.tensor([500], device="cuda"), 1000)):
        first, again = (run(flash_online.attention, (query, key, value), given | {"deterministic": True}) for _ in range(2))
        other = run(flash_online.attention, (query, key, value), given)
        for one, two, three in zip(first, again, other, strict=True):
            assert torch.equal(one, two)
            torch.testing.assert_close(one, three, atol=2e-2, rtol=2e-2)


def test_graphs_and_other_spans():
    """A graph reads the spans that are there when it runs."""
    query, key, value = draw(600)
    given = spans.prefix(torch.tensor([100], device="cuda"), 600)["query_spans"].clone()
    step = lambda: flash_online.attention(query, key, value, query_spans=given)  # noqa: E731

    def grads():
        out = step()
        return out, *torch.autograd.grad(out, (query, key, value), torch.ones_like(out))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        grads()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = grads()
    for prefix in (100, 7, 480):
        given.copy_(spans.prefix(torch.tensor([prefix], device="cuda"), 600)["query_spans"])
        graph.replay()
        for one, other in zip([t.clone() for t in made], grads(), strict=True):
            torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)


def test_memory_is_linear():
    """Beyond the results a step takes what it takes without spans, and 32 bytes for 64 rows of spans."""
    extra = {}
    for length in (8192, 32768):
        query, key, value = draw(length, (1, 1))
        for name, given in (("plain", {"causal": True}), ("spans", spans.sink_window(4, 512, length, "cuda"))):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = flash_online.attention(query, key, value, **given)
            torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
            extra[name, length] = torch.cuda.max_memory_allocated() - before
    for length in (8192, 32768):
        assert extra["spans", length] <= extra["plain", length] + 64 * length + (1 << 20), extra


def test_no_synchronisation():
    query, key, value = draw(512)
    given = spans.sink_window(4, 100, 512, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_online.attention(query, key, value, **given).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
