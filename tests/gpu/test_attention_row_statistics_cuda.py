"""The backward pass up to head dim 128 on Hopper, where the tensor cores subtract lse and delta, given as sums of bfloat16
numbers: large and small numbers, any scale, and numbers that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import Attention, Packed

import flash_online

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]

DTYPES = [torch.bfloat16, torch.float16]
HEAD_DIMS = [24, 64, 72, 96, 104, 128]  # in tiles of 64, 96 and 128


# Over a size of 16, the rounding of outputs to float16 is most of the error of a key's gradient.
SIZES = [(dtype, size) for dtype in DTYPES for size in (1e-3, 1.0, 8.0, 64.0) if size < 16 or dtype == torch.bfloat16]


@pytest.mark.parametrize("dtype, size", SIZES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_sizes_of_scores(head_dim, dtype, size):
    made = {"heads": (2, 2, 2), "head_dims": (head_dim, head_dim), "lengths": (200, 260), "size": size}
    Attention(dtype=dtype, options={"causal": True}, **made).check("cuda")


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1e-6, 2e-6, 1e-3, 1.0, 30.0, -0.2, 0.0])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales(dtype, head_dim, scale):
    """lse divided by the scale may be a large number; there are kernels of another kind for scales under 1e-6."""
    made = {"heads": (2, 2, 2), "head_dims": (head_dim, head_dim), "lengths": (150, 210)}
    Attention(dtype=dtype, options={"scale": scale}, **made).check("cuda")


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_of_different_sizes(dtype, head_dim):
    """Neighbouring queries, whose statistics are neighbours as well, have scores, outputs and gradients of different sizes."""
    generator = torch.Generator().manual_seed(1)
    sizes = 10 ** torch.empty(1, 2, 300, 1).uniform_(-3, 1, generator=generator)
    query, key, value, grad = (torch.randn(1, 2, n, head_dim, generator=generator) for n in (300, 400, 400, 300))
    query, grad = query * sizes, grad * sizes.flip(2)
    inputs = [x.to("cuda", dtype).requires_grad_() for x in (query, key, value)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = grad.to("cuda", dtype)
    ours = torch.autograd.grad(flash_online.attention(*inputs), inputs, grad)
    wanted = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(*exact), exact, grad.double())
    rounding = 2 * torch.finfo(dtype).eps
    rows = (ours[0].double() - wanted[0]).norm(dim=-1) / wanted[0].norm(dim=-1)
    assert rows.median() < rounding
    for x, y in zip(ours, wanted, strict=True):
        assert (x.double() - y).norm() < rounding * y.norm()


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_that_is_not_finite(dtype, head_dim, number):
    """A query's delta is then infinite or NaN, and reaches the query's own gradient and those of all keys, as with PyTorch; but
    of the values' gradients only the column that it stands in, and of other queries' none."""
    inputs = [torch.randn(1, 2, n, head_dim, device="cuda", dtype=dtype, requires_grad=True) for n in (150, 210, 210)]
    grad = torch.randn(1, 2, 150, head_dim, device="cuda", dtype=dtype)
    grad[0, 1, 77, 5] = number
    of_query, of_key, of_value = torch.autograd.grad(flash_online.attention(*inputs), inputs, grad)
    expected = torch.zeros_like(of_query, dtype=torch.bool)
    expected[0, 1, 77] = True
    assert torch.equal(~of_query.isfinite(), expected)
    assert not of_key[0, 1].isfinite().any() and of_key[0, 0].isfinite().all()
    expected = torch.zeros_like(of_value, dtype=torch.bool)
    expected[0, 1, :, 5] = True
    assert torch.equal(~of_value.isfinite(), expected)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_gradient_of_lse_that_is_not_finite(head_dim):
    inputs = [torch.randn(1, 1, 130, head_dim, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)]
    out, lse = flash_online.attention(*inputs, return_lse=True)
    grad_lse = torch.zeros_like(lse)
    grad_lse[0, 0, 64] = math.inf
    of_query, _, of_value = torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), grad_lse))
    assert of_query[0, 0].isfinite().all(dim=-1).sum() == 129 and not of_query[0, 0, 64].isfinite().any()
    assert of_value.isfinite().all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_that_see_no_key(dtype, head_dim, deterministic):
    """In the first sequence the first 90 queries see none, in the second all: they have neither lse nor delta."""
    lengths = ((300, 210), (65, 0), (1, 130), (129, 129))
    options = {"causal": True, "alignment": "lower_right"}
    torch.use_deterministic_algorithms(deterministic)
    Packed(dtype=dtype, lengths=lengths, heads=(2, 2, 2), head_dims=(head_dim, head_dim), options=options).check("cuda")
