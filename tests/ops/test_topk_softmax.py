"""topk_softmax against the float64 reference and against torch's softmax and topk, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DTYPES
from oracle import compare_with_reference
from row_oracle import compare_topk, random_rows

import flash_online
from flash_online.testing import LAYOUTS, lay_out, random_tensor

INF, NAN = math.inf, math.nan
NARROW_DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("k", [0, 1, 2, 5, 16, 33])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topk(k, renormalize, dtype, device):
    for shape, dim in (((4, 33), -1), ((33, 3), 0), ((2, 40, 3), 1)):
        x = random_tensor(*shape, dtype=dtype, scale=2, requires_grad=True, device=device)
        compare_with_reference("topk_softmax", x, k, dim, renormalize=renormalize)


def test_topk_of_a_vocabulary(device):
    x = random_tensor(3, 50257, scale=2, requires_grad=True, device=device)
    for k in (1, 50, 1000):
        compare_with_reference("topk_softmax", x, k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_topk_ties_in_any_order(dtype, device):
    x = torch.randint(0, 3, (6, 100), device=device).to(dtype)
    probabilities, indices = flash_online.topk_softmax(x, 60)
    expected = torch.softmax(x, -1)
    torch.testing.assert_close(probabilities, expected.topk(60).values)
    torch.testing.assert_close(expected.gather(1, indices), probabilities)
    assert all(len(set(row)) == 60 for row in indices.tolist())


@pytest.mark.parametrize("k", [1, 5, 16, 17, 32, 33, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topk_of_long_rows(k, dtype, device):
    """Rising, falling and level rows, and a NaN wherever it may lie: the k largest, whatever a lane or a chunk held before."""
    ramp = torch.arange(5000, dtype=torch.float64, device=device) / 700
    rows = [
        ramp,
        -ramp,
        ramp % 1,
        torch.zeros(5000, device=device),
        torch.randn(5000, device=device),
        torch.randn(5000, device=device) - 50,
    ]
    x = torch.stack([r.double() for r in rows]).to(dtype)
    probabilities, indices = flash_online.topk_softmax(x, k)
    assert torch.equal(x.gather(1, indices), x.topk(k).values)
    torch.testing.assert_close(probabilities.double(), torch.softmax(x.double(), 1).topk(k).values, rtol=2e-2, atol=1e-7)
    assert all(len(set(row)) == k for row in indices.tolist())
    for index in (0, 1, 31, 2047, 2048, 4999):
        y = x.clone()
        y[:, index] = math.nan
        probabilities, indices = flash_online.topk_softmax(y, k)
        assert (indices[:, 0] == index).all() and probabilities.isnan().all()


def test_topk_dtype_and_order(device):
    x = torch.randn(5, 64, device=device).half()
    probabilities, indices = flash_online.topk_softmax(x, 7, dtype=torch.float32)
    assert probabilities.dtype == torch.float32 and indices.dtype == torch.int64
    assert (probabilities.diff(dim=-1) <= 0).all()
    torch.testing.assert_close(probabilities, torch.softmax(x.float(), 1).topk(7).values)


def test_topk_of_rows_that_are_not_finite(device):
    x = torch.tensor([[-INF, 2.0, -INF, 1.0], [-INF] * 4, [math.nan, 1.0, 2.0, 3.0], [INF, 1.0, 2.0, 3.0]], device=device)
    probabilities, indices = flash_online.topk_softmax(x, 3)
    torch.testing.assert_close(probabilities[0], torch.softmax(x[0], 0).topk(3).values)
    assert probabilities[1:].isnan().all()
    assert ((indices >= 0) & (indices < 4)).all() and all(len(set(row)) == 3 for row in indices.tolist())


# --- against torch's softmax and topk -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
@pytest.mark.parametrize(
    "classes", [1, 5, 33, 127, 1000, 4001, 8192, 8200, 16385, 50257, 100_000, pytest.param(1_000_003, marks=pytest.mark.slow)]
)
def test_topk_lengths(classes, dtype, device):
    x = random_rows(5, classes, dtype=dtype, device=device)
    for k in {1, min(5, classes), min(30, classes), min(32, classes)}:
        compare_topk(x, k)
    compare_topk(x, min(7, classes), renormalize=True)


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
@pytest.mark.parametrize("k", [0, 2, 33, 40])
@pytest.mark.parametrize("renormalize", [False, True])
def test_topk_as_torch(k, renormalize, dtype, device):
    for shape, dim in (((4, 40), -1), ((40, 3), 0), ((2, 40, 3), 1)):
        compare_topk(random_rows(*shape, dtype=dtype, device=device), k, dim, renormalize=renormalize)


@pytest.mark.parametrize("k", [50, 1000, 2048, 2049, 5000])
@pytest.mark.parametrize("renormalize", [False, True])
def test_topk_of_many(k, renormalize, device):
    compare_topk(random_rows(3, 50257, device=device), k, renormalize=renormalize)
    compare_topk(random_rows(3, 5000, device=device), k, renormalize=renormalize)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_topk_layouts(layout, device):
    x = lay_out(random_rows(6, 35, 20, device=device), layout)
    for dim in range(3):
        compare_topk(x, 4, dim)
    compare_topk(lay_out(random_rows(5, 3001, dtype=torch.float16, device=device), layout), 9, dtype=torch.float32)


@pytest.mark.parametrize("classes", [100, 3000, 40000])
def test_topk_of_awkward_orders(classes, device):
    """Ascending rows, where every element is a candidate; equal elements; all candidates in one lane, or in the last vector."""
    x = torch.arange(2 * classes, device=device, dtype=torch.float32).view(2, classes) / classes
    for k in (1, 5, 32, 60):
        compare_topk(x, k)
        compare_topk(x.flip(1), k)
        compare_topk(torch.zeros_like(x), k)
        compare_topk((x * 3).floor(), k)
        spikes = torch.zeros_like(x)
        spikes[:, :: classes // 60] += 3
        compare_topk(spikes, k)
        spikes[:, -3:] = torch.arange(3.0, 6.0, device=device)
        compare_topk(spikes, k)


@pytest.mark.parametrize("classes", [4, 300, 9000, 40000])
@pytest.mark.parametrize("k", [3, 4])
def test_topk_of_long_rows_that_are_not_finite(classes, k, device):
    x = torch.full((6, classes), -INF, device=device)
    x[0, 1], x[0, 3] = 2.0, 1.0
    x[2, 0], x[2, 1], x[2, 2] = NAN, 1.0, 2.0
    x[3, 0], x[3, 2] = INF, 5.0
    x[4] = NAN
    x[5] = INF
    probabilities, at = flash_online.topk_softmax(x, k)
    torch.testing.assert_close(probabilities[0], torch.softmax(x[0], 0).topk(k).values)
    assert probabilities[1:].isnan().all()
    assert ((at >= 0) & (at < classes)).all() and all(len(set(row)) == k for row in at.tolist())
    assert at[2, 0] == 0 and at[3, 0] == 0


@pytest.mark.parametrize("classes", [1000, 20000, 300_000])
def test_topk_same_bits_in_every_run_and_any_batch(classes, device):
    x = random_rows(5, classes, device=device)
    for k in (5, 32, 100):
        first = flash_online.topk_softmax(x, k)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(first, flash_online.topk_softmax(x, k), strict=True))
        for row in range(5):
            alone = flash_online.topk_softmax(x[row : row + 1].clone(), k)
            assert all(torch.equal(a[row : row + 1], b) for a, b in zip(first, alone, strict=True))


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
def test_topk_of_any_alignment(dtype, device):
    storage = random_rows(70000, dtype=dtype, device=device)
    for classes in (300, 3001, 17003, 34001):
        for start in range(17):
            x = storage[start : start + 2 * classes].view(2, classes)
            for a, b in zip(flash_online.topk_softmax(x, 9), flash_online.topk_softmax(x.clone(), 9), strict=True):
                assert torch.equal(a, b), (classes, start)
