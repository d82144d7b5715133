"""Attention of float32 with fewer digits on CUDA, where torch allows tf32."""

from __future__ import annotations

import math

import pytest
import torch
from devices import shared_kibibytes, skip_without_room

import flash_online

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]
INF = math.inf


def gpu(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


TF32_CALLS = {
    "plain": {},
    "causal, window": {"causal": True, "window": (100, None)},
    "softcap": {"softcap": 5.0},
    "mask": {"mask": True},
}


@pytest.mark.parametrize("name", TF32_CALLS)
@pytest.mark.parametrize("head_dim", [20, 32, 64, 96, 128, 192, 256, 300])
def test_tf32_where_torch_allows_it(head_dim, name):
    """Errors are within 2^-15 of the terms that results are summed from, where tf32 itself has 2^-11. After the setting is
    undone, results are exact again."""
    skip_without_room("cuda", torch.float32, head_dim)
    options = dict(TF32_CALLS[name])
    lengths, matmul = (200, 333), torch.backends.cuda.matmul
    shapes = [(2, heads, n, head_dim) for heads, n in zip((4, 2, 2), (lengths[0], *lengths[1:] * 2), strict=True)]
    leaves = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    if options.pop("mask", False):
        options["mask"] = torch.rand(lengths, device="cuda") > 0.3
    grad_out, grad_lse = torch.randn(2, 4, lengths[0], head_dim, device="cuda"), torch.randn(2, 4, lengths[0], device="cuda")

    def run(function, leaves, dtype=torch.float32):
        out, lse = function(*leaves, **options, return_lse=True)
        return out, lse, *torch.autograd.grad((out, lse), leaves, (grad_out.to(dtype), grad_lse.to(dtype)))

    exact = run(flash_online.attention, leaves)
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        coarse = run(flash_online.attention, leaves)
        with torch.no_grad():
            assert torch.equal(flash_online.attention(*leaves, **options), coarse[0])
    finally:
        matmul.fp32_precision = before
    assert all(map(torch.equal, run(flash_online.attention, leaves)[:2], exact[:2]))
    truth = run(flash_online.reference.attention, [t.detach().double().requires_grad_() for t in leaves], torch.float64)
    for ours, expected in zip(coarse, truth, strict=True):
        assert (ours - expected).abs().max() < 2**-15 * max(1, expected.abs().max().item())
    if shared_kibibytes() > 100:  # with less some have no room for it
        assert torch.equal(coarse[0], exact[0]) == (head_dim > 256)


@pytest.mark.parametrize("setting", ["the forward pass alone", "the backward pass alone"])
def test_tf32_is_as_it_was_in_the_forward_pass(setting):
    """Sums of gradients over blocks of keys come in any order: deterministic ones repeat."""
    leaves = [gpu(2, 2, 200, 64, dtype=torch.float32).requires_grad_() for _ in range(3)]
    grad_out, matmul = gpu(2, 2, 200, 64, dtype=torch.float32), torch.backends.cuda.matmul
    before = matmul.fp32_precision

    def gradients(forward, backward):
        try:
            matmul.fp32_precision = forward
            out = flash_online.attention(*leaves, deterministic=True)
            matmul.fp32_precision = backward
            return torch.autograd.grad(out, leaves, grad_out)
        finally:
            matmul.fp32_precision = before

    first = "tf32" if setting == "the forward pass alone" else "ieee"
    then = "ieee" if first == "tf32" else "tf32"
    assert all(map(torch.equal, gradients(first, then), gradients(first, first)))
    assert not torch.equal(gradients(first, then)[2], gradients(then, then)[2])


@pytest.mark.usefixtures("tf32")
def test_tf32_of_packed_sequences_and_infinities():
    lengths = torch.tensor([0, 70, 70, 331], dtype=torch.int32, device="cuda")
    query, key, value = (gpu(331, 2, 64, dtype=torch.float32) for _ in range(3))
    value[330, :, 7] = INF
    out = flash_online.varlen_attention(query, key, value, lengths, lengths, 261, 261)
    for begin, end in ((0, 70), (70, 331)):
        alone = flash_online.attention(*(t[begin:end].transpose(0, 1).unsqueeze(0) for t in (query, key, value)))
        torch.testing.assert_close(out[begin:end], alone[0].transpose(0, 1), rtol=2**-15, atol=2**-15)
    assert (out[70:, :, 7] == INF).all() and out[:70].isfinite().all() and out[70:, :, 8:].isfinite().all()


@pytest.fixture
def tf32():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def gradients_and_truth(leaves, grad_out, **options):
    """Gradients of attention with fewer digits, and of the reference in float64."""
    out = flash_online.attention(*leaves, **options)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    truth = flash_online.reference.attention(*wide, **options)
    return torch.autograd.grad(out, leaves, grad_out), torch.autograd.grad(truth, wide, grad_out.double())


def check(ours, truth, magnitude=1.0):
    """Errors are within 2^-15 of the result, or of `magnitude`, the size of the terms that it is summed from."""
    for mine, expected in zip(ours, truth, strict=True):
        assert mine.dtype == torch.float32 and mine.shape == expected.shape
        if expected.numel():
            assert (mine - expected).abs().max() < 2**-15 * max(magnitude, expected.abs().max().item())


BACKWARD_CALLS = {
    "full": {},
    "causal": {"causal": True},
    "causal, lower right": {"causal": True, "alignment": "lower_right"},
    "window": {"window": (70, 9)},
    "window to the left": {"window": (5, 0), "alignment": "lower_right"},
    "a scale of its own": {"scale": 0.3},
}


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("name", BACKWARD_CALLS)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (33, 33), (100, 36), (24, 120), (1, 1)])
@pytest.mark.parametrize("lengths", [(1, 1), (64, 128), (65, 129), (63, 300), (300, 63), (1, 200), (200, 1), (257, 257)])
def test_backward_at_any_size(lengths, head_dims, name):
    """Tiles of 128 keys, blocks of 64 queries: whole ones, one more, one less; head dims filled up with zeros."""
    (rows, keys), (e, ev) = lengths, head_dims
    leaves = [torch.randn(s, device="cuda", requires_grad=True) for s in ((2, 4, rows, e), (2, 2, keys, e), (2, 2, keys, ev))]
    grad_out = torch.randn(2, 4, rows, ev, device="cuda")
    # The gradient of the score of a query's only key is a difference of two equal sums of head_dim products; and errors grow
    # with scores, which are large where one column is not averaged with others.
    sums = grad_out @ leaves[2].detach().repeat_interleave(2, 1).mT
    magnitude = max(1 if e > 1 else 4, sums.abs().max().item() if 1 in lengths else 0)
    check(*gradients_and_truth(leaves, grad_out, **BACKWARD_CALLS[name]), magnitude)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_backward_of_long_sequences(head_dim, causal):
    """More queries than one sum of dK and dV takes (32 blocks of 64): errors do not grow with their number, as they would if
    the tensor cores added all, which cut off instead of rounding. Positive terms are the worst."""
    leaves = [torch.randn(1, 1, n, head_dim, device="cuda").requires_grad_() for n in (9000, 200, 200)]
    grad_out = torch.rand(1, 1, 9000, head_dim, device="cuda")
    ours, truth = gradients_and_truth(leaves, grad_out, causal=causal, alignment="lower_right")
    for mine, expected in zip(ours[1:], truth[1:], strict=True):
        assert (mine - expected).norm() < 2**-15 * expected.norm()
    assert (ours[0] - truth[0]).norm() < 2**-14 * truth[0].norm()


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("layout", ["rows of all heads", "columns apart", "odd distances", "broadcast keys"])
def test_backward_of_any_strides(layout):
    def leaf(*shape):
        if layout == "rows of all heads":
            t = torch.randn(shape[0], shape[2], shape[1], shape[3], device="cuda").transpose(1, 2)
        elif layout == "columns apart":
            t = torch.randn(*shape, 2, device="cuda")[..., 0]
        elif layout == "odd distances":
            t = torch.randn(*shape[:3], shape[3] + 3, device="cuda")[..., 1 : shape[3] + 1]
        else:
            t = torch.randn(1, 1, *shape[2:], device="cuda").expand(shape)
        return t.detach().requires_grad_()

    for e in (64, 100):
        leaves = [leaf(2, 4, 150, e), leaf(2, 4, 210, e), leaf(2, 4, 210, e)]
        grad_out = torch.randn(2, 150, 4, e, device="cuda").transpose(1, 2)
        check(*gradients_and_truth(leaves, grad_out, causal=True))


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_backward_of_packed_sequences_beside_infinities(head_dim):
    """What lies next to a sequence, in the same tiles, has no part in its gradients; padding rows have none."""
    starts = torch.tensor([3, 3, 73, 74, 331], dtype=torch.int32, device="cuda")
    total = 350
    leaves = [torch.randn(total, h, head_dim, device="cuda") for h in (4, 2, 2)]
    grad_out = torch.randn(total, 4, head_dim, device="cuda")
    for t in (*leaves, grad_out):
        t[:3], t[331:] = INF, math.nan
    leaves = [t.requires_grad_() for t in leaves]
    out = flash_online.varlen_attention(*leaves, starts, starts, 257, 257, causal=True)
    ours = torch.autograd.grad(out, leaves, grad_out)
    for begin, end in ((3, 73), (73, 74), (74, 331)):
        alone = [t.detach()[begin:end].transpose(0, 1).unsqueeze(0).requires_grad_() for t in leaves]
        truth = gradients_and_truth(alone, grad_out[begin:end].transpose(0, 1).unsqueeze(0), causal=True)[1]
        check([t[begin:end].transpose(0, 1).unsqueeze(0) for t in ours], truth)
    for t in ours:
        assert (t[:3] == 0).all() and (t[331:] == 0).all()


@pytest.mark.usefixtures("tf32")
def test_backward_with_sinks_and_a_gradient_of_lse():
    leaves = [torch.randn(2, h, n, 64, device="cuda", requires_grad=True) for h, n in ((4, 150), (2, 210), (2, 210))]
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    grads = torch.randn(2, 4, 150, 64, device="cuda"), torch.randn(2, 4, 150, device="cuda")

    def run(function, leaves, sinks, grads):
        return torch.autograd.grad(function(*leaves, sinks=sinks, causal=True, return_lse=True), (*leaves, sinks), grads)

    wide = [t.detach().double().requires_grad_() for t in (*leaves, sinks)]
    truth = run(flash_online.reference.attention, wide[:3], wide[3], [g.double() for g in grads])
    check(run(flash_online.attention, leaves, sinks, grads), truth, magnitude=2)


@pytest.mark.usefixtures("tf32")
def test_backward_of_queries_that_see_nothing():
    leaves = [torch.randn(1, 2, n, 64, device="cuda", requires_grad=True) for n in (200, 70, 70)]
    grad_out = torch.randn(1, 2, 200, 64, device="cuda")
    ours, truth = gradients_and_truth(leaves, grad_out, causal=True, alignment="lower_right")
    check(ours, truth)
    assert (ours[0][:, :, :130] == 0).all()
