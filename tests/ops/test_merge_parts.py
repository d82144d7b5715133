"""merge_attention on both devices: dtypes, widths, numbers of parts, empty parts, gradients; and its one decision on CUDA."""

from __future__ import annotations

import math

import pytest
import torch

import flash_online
from flash_online import reference
from flash_online.testing import LAYOUTS, assert_close_to_float64, lay_out

INF = math.inf
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def parts_of(count, shape, dtype, layout="contiguous", empty=0.2, seed=0):
    """`count` partial results of `shape`, some of whose rows are empty: their lse is -inf, and their output NaN."""
    g = torch.Generator().manual_seed(seed)
    outs = [torch.randn(shape, generator=g).to(dtype) for _ in range(count)]
    lses = [4 * torch.randn(shape[:-1], generator=g) for _ in range(count)]
    for out, lse in zip(outs, lses, strict=True):
        hidden = torch.rand(lse.shape, generator=g) < empty
        lse.masked_fill_(hidden, -INF)
        out.masked_fill_(hidden.unsqueeze(-1), math.nan)
    return [lay_out(out, layout) for out in outs], lses


def check(outs, lses, device, layout_grads="contiguous"):
    """Compares results and gradients with those of the reference in float64, and in the dtype of the parts."""
    g = torch.Generator().manual_seed(7)
    grad_out = lay_out(torch.randn(outs[0].shape, generator=g).to(outs[0].dtype), layout_grads)
    grad_lse = torch.randn(lses[0].shape, generator=g)

    def run(function, convert, hide_nan):
        clean = [
            torch.where(lse.isneginf().unsqueeze(-1), 0, out) if hide_nan else out for out, lse in zip(outs, lses, strict=True)
        ]
        leaves = [convert(t.to(device)).detach().requires_grad_() for t in (*clean, *lses)]
        out, lse = function(leaves[: len(outs)], leaves[len(outs) :])
        grads = (convert(grad_out.to(device)).to(out.dtype), convert(grad_lse.to(device)).to(lse.dtype))
        return out.detach(), lse.detach(), torch.autograd.grad((out, lse), leaves, grads)

    ours = run(flash_online.merge_attention, lambda t: t, False)
    truth = run(reference.merge_attention, lambda t: t.double(), True)
    plain = run(reference.merge_attention, lambda t: t.clone(), True)
    wide = run(reference.merge_attention, lambda t: t.float(), True)
    assert ours[0].dtype == outs[0].dtype and ours[1].dtype == torch.float32
    assert_close_to_float64(ours[0], plain[0], truth[0], name="out", magnitude=4.0)
    assert_close_to_float64(ours[1], wide[1], truth[1], name="lse", magnitude=8.0)
    for n, (a, p, t) in enumerate(zip(ours[2], plain[2], truth[2], strict=True)):
        t = torch.where(t.isnan(), 0, t)  # the reference's gradient of an empty part's lse
        p = torch.where(p.isnan(), 0, p)
        if n < len(outs):
            assert_close_to_float64(a, p, t, name=f"gradient of out {n}", magnitude=4.0)
        else:  # a difference of dot products, which the parts' own rounding limits
            scale = 4.0 * math.sqrt(outs[0].shape[-1] + 1)
            assert_close_to_float64(a, p, t, torch.float32, name=f"gradient of lse {n - len(outs)}", magnitude=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 5, 8, 64, 100, 128, 300])
def test_merge_widths(device, dtype, width):
    check(*parts_of(3, (2, 5, 9, width), dtype), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 4, 7, 32, 33, 70])
def test_merge_numbers_of_parts(device, dtype, count):
    check(*parts_of(count, (3, 17, 64), dtype), device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merge_layouts(device, layout):
    check(*parts_of(2, (2, 4, 6, 24), torch.bfloat16, layout, empty=0.0), device, layout)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0, 8), (4, 3, 0), (8,)])
def test_merge_of_sizes_0_and_single_rows(device, shape):
    outs, lses = parts_of(3, shape, torch.float32, empty=0.0)
    leaves = [t.to(device).requires_grad_() for t in (*outs, *lses)]
    out, lse = flash_online.merge_attention(leaves[:3], leaves[3:])
    assert out.shape == shape and lse.shape == shape[:-1]
    torch.testing.assert_close(lse.detach().cpu(), torch.logsumexp(torch.stack(lses), 0))
    (out.sum() + lse.sum()).backward()
    assert all(leaf.grad.shape == leaf.shape for leaf in leaves)


def test_merge_many_rows(device):
    """More rows than CTAs can hold at a time, and no multiple of anything."""
    outs, lses = parts_of(3, (300_003 if device == "cuda" else 30_003, 16), torch.float16)
    check(outs, lses, device)


def test_merge_exact_cases(device):
    """One part stays what it is; empty parts change nothing, whatever they hold; only empty parts give 0 and -inf; NaN and
    +inf reach the row that they are in, and no other."""
    out, lse = torch.randn(6, 32, device=device), 30 * torch.randn(6, device=device)
    nothing, hole = torch.full_like(lse, -INF), torch.full_like(out, math.nan)
    for parts in (([out], [lse]), ([out, hole], [lse, nothing]), ([hole, out, hole], [nothing, lse, nothing])):
        assert all(map(torch.equal, flash_online.merge_attention(*parts), (out, lse)))
    merged, merged_lse = flash_online.merge_attention([hole, hole], [nothing, nothing])
    assert torch.equal(merged, torch.zeros_like(out)) and torch.equal(merged_lse, nothing)
    for value in (math.nan, INF):
        odd = lse.clone()
        odd[2] = value
        merged, merged_lse = flash_online.merge_attention([out, out], [odd, lse])
        assert merged[2].isnan().all() and not merged[[0, 1, 3, 4, 5]].isnan().any()
        assert merged_lse[2].isnan() and not merged_lse[[0, 1, 3, 4, 5]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_merge_float32_partials_of_16_bit_calls(device, dtype):
    """Partial results kept in float32 with 16-bit inputs lose nothing that the whole call keeps."""
    query, key, value = (torch.randn(2, 4, n, 64).to(device, dtype) for n in (65, 300, 300))
    cuts = [(0, 100), (100, 101), (101, 300)]
    parts = [
        flash_online.attention(query.float(), key[..., a:b, :].float(), value[..., a:b, :].float(), return_lse=True)
        for a, b in cuts
    ]
    out, lse = flash_online.merge_attention([out for out, _ in parts], [lse for _, lse in parts])
    assert out.dtype == torch.float32
    whole, whole_lse = reference.attention(query.double(), key.double(), value.double(), return_lse=True)
    torch.testing.assert_close(out.double(), whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), whole_lse, atol=1e-6, rtol=1e-6)


def test_merge_second_derivatives(device):
    outs, lses = parts_of(3, (4, 3), torch.float32, empty=0.0)
    leaves = [t.to(device).requires_grad_() for t in (*outs, *lses)]

    def gradients(function, convert=lambda t: t):
        of = [convert(t).detach().requires_grad_() for t in leaves]
        out, lse = function(of[:3], of[3:])
        first = torch.autograd.grad(out.square().sum() + lse.square().sum(), of, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), of)

    ours, truth = gradients(flash_online.merge_attention), gradients(reference.merge_attention, lambda t: t.double())
    for a, t in zip(ours, truth, strict=True):
        torch.testing.assert_close(a.double(), t, atol=1e-4, rtol=1e-4)


def test_merge_refuses_parts_of_two_devices(device):
    out, lse = torch.randn(3, 4, device=device), torch.randn(3, device=device)
    for outs, lses, name in (([out, out.to("meta")], [lse, lse], "outs"), ([out, out], [lse, lse.to("meta")], "lses")):
        with pytest.raises(flash_online.InvalidArgument, match=name):
            flash_online.merge_attention(outs, lses)


def test_merge_explained(device):
    out, lse = torch.randn(3, 4, device=device), torch.randn(3, device=device)
    plan = flash_online.explain(flash_online.merge_attention, [out, out], [lse, lse])
    assert plan.ours and plan.operators == ("attention_merge",) and device in plan.device


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 40])
def test_merge_in_a_cuda_graph(count):
    """A replay reads the parts anew, forward and backward: nothing of the host's memory is needed any more."""
    outs, lses = parts_of(count, (4, 50, 64), torch.bfloat16, empty=0.0)
    leaves = [t.cuda().requires_grad_() for t in (*outs, *lses)]
    grad_out, grad_lse = torch.randn_like(leaves[0]), torch.randn_like(leaves[-1])

    def step():
        out, lse = flash_online.merge_attention(leaves[:count], leaves[count:])
        return out, lse, torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    expected = step()
    for a, b in zip((*captured[:2], *captured[2]), (*expected[:2], *expected[2]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_merge_past_2_to_the_31_elements():
    rows, width = (1 << 25) + 3, 64
    outs = [torch.full((rows, width), value, device="cuda", dtype=torch.float16) for value in (1.0, 3.0)]
    lses = [torch.zeros(rows, device="cuda") for _ in range(2)]
    last = slice(-3, None)  # past 2^31 elements
    outs[0][last], outs[1][last], lses[1][last] = 5.0, 9.0, math.log(3.0)
    grad_out = torch.ones_like(outs[0])
    grad_out[last] = 2.0
    leaves = [tensor.requires_grad_() for tensor in (*outs, *lses)]
    out, lse = flash_online.merge_attention(leaves[:2], leaves[2:])
    results = out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out)
    # out, lse, and the gradients of outs and lses: weight * grad_out, and weight * grad_out . (out of the part - out)
    first_rows = (2.0, math.log(2.0), 0.5, 0.5, -32.0, 32.0)
    last_rows = (8.0, math.log(4.0), 0.5, 1.5, -96.0, 96.0)
    for result, first, end in zip(results, first_rows, last_rows, strict=True):
        for rows, expected in ((result[:-3], first), (result[last], end)):
            assert rows.min() == rows.max()
            assert rows.flatten()[0].item() == pytest.approx(expected, rel=1e-3 if result.dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_lses_of_packed_queries(device, dtype):
    """Lses [heads, queries] with outputs [queries, heads, width] are read as they lie, also where they lie differently."""
    outs, lses = parts_of(3, (7, 5, 24), dtype)
    turned = [lse.t().contiguous().t() for lse in lses]
    for given in (turned, [lses[0], *turned[1:]], [torch.stack([lse, -lse], -1)[..., 0] for lse in lses]):
        check(outs, given, device)
        found = flash_online.merge_attention([out.to(device) for out in outs], [lse.to(device) for lse in given])
        wanted = flash_online.merge_attention([out.to(device) for out in outs], [lse.to(device) for lse in lses])
        assert all(map(torch.equal, found, wanted))
