"""Rows whose results are exact in exact arithmetic: one class, or one score so far above the rest that their weights vanish."""

from __future__ import annotations

import pytest
import torch
from instruction_sets import run_tests, skip_unless_lesser

import flash_online

HALF, SINGLE = (torch.float16, torch.bfloat16), (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*SINGLE, torch.float64)
DISTANCE = {torch.float16: 400.0, torch.bfloat16: 1e4, torch.float32: 1e4, torch.float64: 1e4}  # where other weights are 0
# Rows of every kind. On CUDA: lanes of a warp, a warp, a CTA, shared memory, clusters, pieces; on the CPU: short rows, tiles,
# segments.
LENGTHS = (2, 5, 16, 33, 100, 700, 2500, 5000, 20_000, 70_001, 300_000)


def scores(shape, dtype, device, scale=300.0):
    return (torch.randn(shape, dtype=torch.float64) * scale).to(device, dtype)


def peaked(rows, classes, dtype, device, others):
    """Rows in which one score is far above the rest, which are `others`, random or -inf; and the classes of the maxima."""
    x = torch.randn(rows, classes, dtype=torch.float64)
    at = torch.randint(classes, (rows,))
    at[0], at[-1] = 0, classes - 1
    # Every number of the row is moved by a random amount: the product of a maximum and log2(e) then rounds either way.
    shift = torch.randn(rows, 1, dtype=torch.float64) * DISTANCE[dtype]
    x = x - DISTANCE[dtype] if others == "far" else torch.full_like(x, -torch.inf)
    x = x + shift
    x[torch.arange(rows), at] = shift[:, 0] + DISTANCE[dtype] / 3
    return x.to(device, dtype), at.to(device)


def strided(x):
    return x.t().contiguous().t()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (400, 1), (3, 1, 257)])
def test_softmax_of_one_class(device, dtype, shape):
    dim = 1 if len(shape) > 1 else 0
    x = scores(shape, dtype, device).requires_grad_()
    g = torch.randn(shape, dtype=torch.float64).to(device, dtype)
    for function, expected in ((flash_online.softmax, 1), (flash_online.log_softmax, 0)):
        for result in (None, torch.float32) if dtype in HALF else (None,):
            y = function(x, dim, dtype=result)
            assert (y == expected).all()
            assert (torch.autograd.grad(y, x, g.to(y.dtype))[0] == 0).all()
    if shape:
        lse = flash_online.logsumexp(x, dim)
        assert torch.equal(lse, x.detach().squeeze(dim).to(lse.dtype))
        (grad,) = torch.autograd.grad(lse, x, g.squeeze(dim).to(lse.dtype))
        assert torch.equal(grad, g)
        for renormalize in (False, True):
            p, index = flash_online.topk_softmax(x, 1, dim, renormalize=renormalize)
            assert (p == 1).all() and (index == 0).all()
            assert (torch.autograd.grad(p, x, g.to(p.dtype))[0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("shape", [(400, 1), (3, 1, 257)])
def test_cross_entropy_of_one_class(device, dtype, smoothing, weighted, soft, shape):
    x = scores(shape, dtype, device).requires_grad_()
    positions = (shape[0], *shape[2:])
    target = torch.ones(shape, dtype=dtype) if soft else torch.zeros(positions, dtype=torch.long)
    weight = torch.tensor([0.7], dtype=dtype, device=device) if weighted else None
    options = {"weight": weight, "label_smoothing": smoothing, "target": target.to(device)}
    for reduction in ("none", "sum", "mean"):
        loss = flash_online.cross_entropy(x, **options, reduction=reduction)
        assert (loss == 0).all()
        g = torch.rand(loss.shape, dtype=torch.float64).to(device, loss.dtype) + 0.1
        assert (torch.autograd.grad(loss, x, g)[0] == 0).all()
        # With the loss's gradient, which is 0, that of lse is not rounded.
        loss, lse = flash_online.cross_entropy(x, **options, reduction=reduction, return_lse=True)
        g_lse = torch.randn(lse.shape, dtype=torch.float64).to(device, dtype) / 64
        (grad,) = torch.autograd.grad((loss, lse), x, (g, g_lse.to(lse.dtype)))
        assert torch.equal(grad.squeeze(1), g_lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("others", ["far", "-inf"])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("classes", LENGTHS)
def test_softmax_and_cross_entropy_of_peaked_rows(device, dtype, others, layout, classes):
    """One probability is 1 and the others are 0; losses against it and their gradients are 0."""
    x, at = peaked(33 if classes < 10_000 else 3, classes, dtype, device, others)
    top = x.gather(1, at[:, None])
    x = (strided(x) if layout == "strided" else x).requires_grad_()
    one_hot = torch.nn.functional.one_hot(at, classes)
    for result in (None, torch.float32) if dtype in HALF else (None,):
        y = flash_online.softmax(x, 1, dtype=result)
        assert torch.equal(y, one_hot.to(y.dtype))
        g = torch.randn_like(y)
        expected = torch.zeros_like(x)
        assert torch.equal(torch.autograd.grad(y, x, g)[0], expected)
        y = flash_online.log_softmax(x, 1, dtype=result)
        assert (y.gather(1, at[:, None]) == 0).all()
        p, index = flash_online.topk_softmax(x, 1, dtype=result)
        assert (p == 1).all() and torch.equal(index[:, 0], at)
        assert (torch.autograd.grad(p, x, torch.randn_like(p))[0] == 0).all()
    lse = flash_online.logsumexp(x, 1)
    assert torch.equal(lse, top[:, 0].to(lse.dtype))
    g = torch.randn_like(lse)
    assert torch.equal(torch.autograd.grad(lse, x, g)[0], (one_hot * g[:, None]).to(dtype))
    weight = torch.rand(classes, dtype=torch.float64).to(device, dtype)
    for target in (at, one_hot.to(dtype)) if others == "far" else (at,):  # 0 * inf is NaN, in torch as well
        for w in (None, weight):
            loss = flash_online.cross_entropy(x, target, w, reduction="none")
            assert (loss == 0).all()
            g = torch.rand(loss.shape, dtype=torch.float64).to(device, loss.dtype) + 0.1
            assert (torch.autograd.grad(loss, x, g)[0] == 0).all()


@pytest.mark.parametrize("dtype", SINGLE)
@pytest.mark.parametrize("classes", [2, 8, 64, 1024, 4096, 65_536])
def test_softmax_of_equal_scores(device, dtype, classes):
    """A power of 2 of equal scores: every probability is a power of 2 as well."""
    x = scores((9, 1), dtype, device).expand(9, classes).contiguous()
    assert (flash_online.softmax(x, 1, dtype=torch.float32) == 1 / classes).all()


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512", "avx512_bf16"])
def test_lesser_instruction_sets(instruction_set):
    """The tests above on the CPU."""
    skip_unless_lesser(instruction_set)
    run_tests(instruction_set, __file__, "-k", "cpu and not instruction_set")


def test_a_factor_and_its_inverse_multiply_to_1():
    """The arithmetic of FusedWeights (csrc/cuda/rows/loops/row_reduce.cuh), for every float within 2^-13.5 of 1."""
    ends = torch.tensor([1 - 2**-13.5, 1 + 2**-13.5]).view(torch.int32)
    factor = torch.arange(ends[0].item(), ends[1].item() + 1, dtype=torch.int32).view(torch.float32)
    d = (factor - 1).double()
    rounded = (1 - d).float()
    upwards = torch.where(rounded.double() < 1 - d, torch.nextafter(rounded, torch.tensor(2.0)), rounded)
    inverse = (d * d + upwards.double()).float()  # the sum is exact in float64, as in a fused multiply-add
    assert len(factor) > 2000 and (factor * inverse == 1).all()
