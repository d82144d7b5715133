"""Rows of any width and at any alignment on CUDA: blocks of short rows, which pass through shared memory, and long rows that
are no whole number of vectors. A row has the same bits wherever it lies and whatever lies next to it."""

from __future__ import annotations

import pytest
import torch
from row_oracle import OPERATORS, compare_logsumexp, compare_loss, compare_softmaxes, forward_and_backward, gpu, random_targets

import flash_online

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# Both sides of every change of the number of lanes, in vectors of 8 or 4 elements, of vectors per lane, of registers and shared
# memory, of the CTAs of a cluster and of their vectors; and the longest rows that a cluster holds.
WIDTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 77, 100, 127, 130, 255, 257, 511, 513, 577, 1000, 1023, 1025]
WIDTHS += [2047, 2049, 3001, 4095, 4098, 8191, 50257]
WIDTHS += [12, 20, 24, 32, 40, 48, 56, 62, 96, 104, 128, 384, 388, 640, 768, 776, 1200, 1536, 1544, 1600, 2048]
WIDTHS += [3072, 3080, 6144, 6145, 8200, 12_296, 456, 896, 904, 1792, 1800, 10_248, 16_392, 20_488]
WIDTHS += [10_000, 24_577, 32_000, 49_160, 65_537, 98_312, 131_080, 151_936, 196_609, 393_216, 393_220, 786_433]


def all_results(x, target):
    """What every operator gives for x, forward and backward: tensors with rows first."""
    results = []
    for log in (False, True):
        y = torch.ops.flash_online.softmax_forward(x, 1, log, x.dtype)
        grad = torch.ops.flash_online.softmax_backward(y.flip(1).contiguous(), y, 1, log, x.dtype)
        results += [y, grad]
    ones = torch.arange(len(x), device="cuda") % 5 - 1.5
    results += [torch.ops.flash_online.logsumexp_forward(x, 1), torch.ops.flash_online.logsumexp_backward(ones, x, 1)]
    for smoothing in (0.0, 0.1):
        given = x, target, None, -100, smoothing
        *_, entropy = found = torch.ops.flash_online.cross_entropy_forward(*given, True)
        results += [*found, torch.ops.flash_online.cross_entropy_backward(ones, None, *given, False)[0]]
        results.append(torch.ops.flash_online.cross_entropy_backward(ones, None, *given, False, ones, entropy)[0])
    results.append(torch.ops.flash_online.logsumexp_forward(x, 1, x.dtype))
    results.append(torch.ops.flash_online.logsumexp_backward(torch.ones_like(ones).to(x.dtype) * 3, x, 1))
    return results


def assert_same_bits(got, expected, what):
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), f"result {i}, {what}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", WIDTHS)
def test_widths(classes, dtype):
    x = gpu(3 if classes > 5000 else 211, classes, dtype=dtype)
    compare_softmaxes(x, 1)
    compare_logsumexp(x, 1)
    compare_loss(x, random_targets(x), reduction="none")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", WIDTHS)
def test_same_bits_wherever_a_row_lies(classes, dtype):
    """Alone, in a part of the batch, at every offset from a multiple of 16 bytes, and in rows that have gaps between them."""
    rows = 5 if classes > 5000 else 301
    x, target = gpu(rows, classes, dtype=dtype), torch.randint(0, classes, (rows,), device="cuda")
    target[::7] = -100
    expected = all_results(x, target)
    for part in (slice(0, 1), slice(1, 4), slice(rows - 2, rows)):
        assert_same_bits(all_results(x[part].clone(), target[part].clone()), all_results(x[part], target[part]), f"{part}")
        only = [r[part] for r in all_results(x, target)]
        # grad_loss follows a row's index, so that only results without it are compared across batches
        keep = [i for i in range(20) if i not in (5, 10, 11, 16, 17)]
        alone = all_results(x[part].clone(), target[part].clone())
        assert_same_bits([alone[i] for i in keep], [only[i] for i in keep], f"rows {part} alone")
    for offset in range(1, 16 // dtype.itemsize):
        moved = torch.empty(rows * classes + offset, device="cuda", dtype=dtype)[offset:].view(rows, classes).copy_(x)
        assert_same_bits(all_results(moved, target), expected, f"{offset} elements past a multiple of 16 bytes")
    for gap in (1, 3, 8):
        apart = torch.empty(rows, classes + gap, device="cuda", dtype=dtype)[:, :classes].copy_(x)
        assert_same_bits(all_results(apart, target), expected, f"rows {gap} elements apart")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [1, 2, 3, 7, 77, 128, 577, 1000, 1023, 3001, 8191])
def test_infinities_and_nan_stay_in_their_rows(classes, dtype):
    x = gpu(203, classes, dtype=dtype)
    target = torch.randint(0, classes, (203,), device="cuda")
    expected = all_results(x, target)
    touched = torch.zeros(203, dtype=torch.bool)
    for row, value in ((3, torch.nan), (4, torch.inf), (50, -torch.inf), (101, torch.nan), (202, torch.inf)):
        x[row, classes // 2] = value
        touched[row] = True
    x[77] = -torch.inf
    x[78, :1] = torch.inf
    touched[77:79] = True
    assert_same_bits([r[~touched] for r in all_results(x, target)], [r[~touched] for r in expected], "other rows")
    y = x.double()
    for mine, theirs in (
        (flash_online.softmax(x, 1), torch.softmax(y, 1)),
        (flash_online.log_softmax(x, 1), torch.log_softmax(y, 1)),
        (flash_online.logsumexp(x, 1), torch.logsumexp(y, 1)),
    ):
        assert torch.equal(mine.isnan(), theirs.isnan()) and torch.equal(mine.isinf(), theirs.to(mine.dtype).isinf())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [1, 2, 3, 4, 7, 16, 77, 577, 1000, 8191])
@pytest.mark.parametrize("rows", [1, 130, 40_003])
def test_sums_of_losses(rows, classes, dtype):
    """A mean or sum of losses is summed in blocks of rows where rows are short, and is the same in every call."""
    if rows * classes > 1 << 24:
        pytest.skip("as many blocks as of shorter rows")
    x, weight = gpu(rows, classes, dtype=dtype), torch.rand(classes, device="cuda") + 0.5
    target = torch.randint(0, classes, (rows,), device="cuda")
    target[1::5] = -100
    for options in ({}, {"weight": weight}, {"label_smoothing": 0.1}, {"reduction": "sum"}):
        y, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        loss = flash_online.cross_entropy(y, target, dtype=torch.float32, **options)
        wanted = options | ({"weight": weight.double()} if "weight" in options else {})
        expected = torch.nn.functional.cross_entropy(wide, target, **wanted)
        torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=1e-6)
        assert torch.equal(loss, flash_online.cross_entropy(y, target, dtype=torch.float32, **options))
        grad, expected_grad = torch.autograd.grad(loss, y)[0], torch.autograd.grad(expected, wide)[0]
        largest = max(expected_grad.abs().max().item(), 1 / rows)
        assert (grad.double() - expected_grad).abs().max() <= 2 * torch.finfo(dtype).eps * largest + 2e-6 * largest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_gradients_of_one_class(offset, dtype):
    """They are 0, and NaN where a number is not finite, unless the row is ignored."""
    x = torch.empty(1003 + offset, device="cuda", dtype=dtype)[offset:].view(1003, 1).copy_(gpu(1003, 1, dtype=dtype))
    target = torch.zeros(1003, dtype=torch.int64, device="cuda")
    x[5], x[6], x[7], x[1001], target[6], target[1001] = torch.nan, torch.nan, -torch.inf, torch.inf, -100, -100
    for grad_loss, nan in ((1.0, [5, 7]), (torch.nan, [i for i in range(1003) if i not in (6, 1001)])):
        grads = torch.full((1003,), grad_loss, device="cuda")
        grad, _ = torch.ops.flash_online.cross_entropy_backward(grads, None, x, target, None, -100, 0.0, False)
        wanted = torch.zeros(1003, 1, device="cuda", dtype=dtype)
        wanted[nan] = torch.nan
        assert torch.equal(grad.isnan(), wanted.isnan()) and torch.equal(grad.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("classes", [1, 3, 8, 77, 100, 577, 1000, 3001, 8191])
def test_float32_results_of_16_bit_rows(classes, dtype):
    x = gpu(67, classes, dtype=dtype)
    compare_softmaxes(x, 1, dtype=torch.float32)
    wide = flash_online.softmax(x, 1, dtype=torch.float32)
    moved = torch.empty(67 * classes + 1, device="cuda", dtype=dtype)[1:].view(67, classes).copy_(x)
    assert torch.equal(flash_online.softmax(moved, 1, dtype=torch.float32), wide)


@pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("rows, classes", [(1, 3), (7, 77), (0, 77), (0, 1), (4099, 31), (100_003, 3)], ids=str)
def test_tails(function, rows, classes):
    """Fewer rows than a block has, none, and a last block that is not full."""
    x, target = gpu(rows, classes).requires_grad_(), torch.zeros(rows, dtype=torch.int64, device="cuda")
    whole = forward_and_backward(function, x, target)
    for tensor in whole:
        assert not tensor.is_floating_point() or tensor.isfinite().all() or rows == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_layouts(dtype):
    """Classes that are contiguous in rows that are not: a batch expanded, transposed, or cut out of a larger one."""
    whole = gpu(9, 12, 80, dtype=dtype)
    for x in (whole[:, 2:7, 1:78], whole.transpose(0, 1)[1:, :, :77], whole[:1].expand(4, 12, 80)[..., 3:]):
        compare_softmaxes(x, 2)
        compare_logsumexp(x, 2)
        assert torch.equal(flash_online.softmax(x, 2), flash_online.softmax(x.contiguous(), 2))
