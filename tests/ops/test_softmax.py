"""softmax, log_softmax and logsumexp against the float64 reference and against torch's own, forward and backward."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import DTYPES, EMPTY_ROW_SHAPES, ROW_SHAPES
from instruction_sets import run_tests, skip_unless_lesser
from oracle import compare_with_reference
from row_oracle import compare_softmaxes, random_rows, softmax_and_gradient

import flash_online
import flash_online.functional
from flash_online.testing import LAYOUTS, lay_out, random_tensor

INF, NAN = math.inf, math.nan
NARROW_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SOFTMAXES = ["softmax", "log_softmax", "logsumexp"]


@pytest.mark.parametrize("shape, dim", ROW_SHAPES, ids=str)
@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(name, shape, dim, dtype, device):
    compare_with_reference(name, random_tensor(*shape, dtype=dtype, scale=3, requires_grad=True, device=device), dim)


@pytest.mark.parametrize("shape, dim", EMPTY_ROW_SHAPES, ids=str)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_sizes_of_zero(name, shape, dim, device):
    x = torch.randn(shape, requires_grad=True, device=device)
    result = getattr(flash_online, name)(x, dim)
    expected = getattr(torch, name)(x, dim)
    assert torch.equal(result, expected) and result.dtype == expected.dtype
    (grad,) = torch.autograd.grad(result.sum(), x)
    assert grad.shape == x.shape


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(layout, dim, dtype, device):
    x = random_tensor(5, 37, 18, dtype=dtype, layout=layout, requires_grad=True, device=device)
    for name in SOFTMAXES:
        compare_with_reference(name, x, dim)
    compare_with_reference("topk_softmax", x, 4, dim)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype(name, source, dtype, device):
    x = random_tensor(3, 50, dtype=source, scale=4, requires_grad=True, device=device)
    compare_with_reference(name, x, 1, dtype=dtype)


@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize("shift", [-1e4, -100.0, 89.0, 1e4, 3e38])
def test_shifted_rows(name, shift, device):
    """exp overflows past 88.7 in float32; at 3e38 a row's largest number is all that float32 can tell."""
    compare_with_reference(name, (torch.randn(4, 50, device=device) + shift).requires_grad_(), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logsumexp_of_infinities(dtype, device):
    x = torch.tensor([[-INF, -INF], [INF, 0.0], [math.nan, 0.0], [-INF, 3.0], [INF, -INF]], device=device).to(dtype)
    torch.testing.assert_close(flash_online.logsumexp(x, 1), torch.logsumexp(x, 1), equal_nan=True)
    assert flash_online.logsumexp(x, 1, keepdim=True).shape == (5, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_in_any_layout(layout, device):
    """The incoming gradient is strided too: expanded by sum(), sliced by what came after."""
    x = torch.randn(4, 9, 6, requires_grad=True, device=device)
    grad = lay_out(torch.randn(4, 9, 6, device=device), layout)
    for name in ("softmax", "log_softmax"):
        for dim in range(3):
            ours = torch.autograd.grad(getattr(flash_online, name)(x, dim), x, grad)[0]
            theirs = torch.autograd.grad(getattr(torch, name)(x, dim), x, grad.contiguous())[0]
            torch.testing.assert_close(ours, theirs)
    ours = torch.autograd.grad(flash_online.softmax(x, 1).sum(), x)[0]
    assert ours.abs().max() < 1e-6


@pytest.mark.parametrize("classes", [2, 3, 40, 300, 2049, 9000, 70_000])
@pytest.mark.parametrize("dim", [0, 1])
def test_gradient_of_a_peaked_row(classes, dim, device):
    """Where one class has nearly all, its gradient is a difference of numbers that agree in nearly all digits."""
    x = torch.randn(4, classes, device=device)
    x[:, 1] = 17 + math.log(classes)  # all others together have some 1e-7
    grad = torch.randn(4, classes, device=device)
    x, grad = (t.T.contiguous() if dim == 0 else t for t in (x, grad))
    y = flash_online.softmax(x.requires_grad_(), dim)
    (ours,) = torch.autograd.grad(y, x, grad)
    p, g = torch.softmax(x.detach().double(), dim), grad.double()
    truth = p * (g - (p * g).sum(dim, keepdim=True))
    # The gradients sum to 0; where p is nearly 1, float64 has no digits of the difference left either.
    truth.select(dim, 1).zero_().sub_(truth.sum(dim))
    assert ((ours - truth).abs().amax(dim) < 2e-6 * truth.abs().amax(dim)).all()


@pytest.mark.parametrize("classes", [2, 7, 16, 33, 64, 100, 300, 1000, 5000, 40_000])
@pytest.mark.parametrize("mean", [0.0, 0.5, 1.0, 2.0, 30.0, 1e4])
def test_gradient_where_grads_have_a_mean(classes, mean):
    """What is subtracted is exact to the last digits of the deviations from it, however large it is itself."""
    y = torch.softmax(torch.randn(max(64, 200_000 // classes), classes), 1)
    grad = torch.randn(y.shape) + mean
    subtracted = (grad.double() * y).sum(1, keepdim=True) / y.double().sum(1, keepdim=True)
    deviation = grad - subtracted
    allowed = 16 * 2**-24 * y * (deviation.abs() + (deviation.abs() * y).sum(1, keepdim=True))
    for dim in (1, 0):
        g, output = (t.T.contiguous() if dim == 0 else t for t in (grad, y))
        ours = torch.ops.flash_online.softmax_backward(g, output, dim, False, torch.float32)
        ours = ours.T if dim == 0 else ours
        assert ((ours - deviation * y).abs() <= allowed).all()


def test_rows_of_softmax_sum_to_one(device):
    x = torch.randn(64, 50257, device=device)
    sums = flash_online.softmax(x, 1).double().sum(1)
    assert (sums - 1).abs().max() < 1e-6


@pytest.mark.parametrize("name", [*SOFTMAXES, "topk_softmax"])
def test_same_bits_for_any_threads_and_any_batch(name):
    x = torch.randn(37, 5000)
    arguments = (3, 1) if name == "topk_softmax" else (1,)

    def call(rows):
        result = getattr(flash_online, name)(rows, *arguments)
        return result if isinstance(result, tuple) else (result,)

    together = call(x)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(call(x), together, strict=True))
    for row in (0, 17, 36):
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(call(x[row : row + 1]), together, strict=True))


# --- against torch's own functions --------------------------------------------------------------------------------------------


# Classes: 1; around a warp's step of 128 (each lane reads 4 at a time); around 1024, where a row group grows from a warp to a
# CTA; around a CTA's step of 2048; a vocabulary; more than 2^16.
CLASSES = [1, 2, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025, 2047, 2048, 2049, 50257, 70000]

# Dimensions after the rows: classes are far apart in memory, and each lane has a row of its own. Numbers of rows around the 32
# lanes of a warp, numbers of classes around the 8 warps of a CTA.
INNER = [
    ((2, 5, 3), 1),
    ((3, 7, 31), 1),
    ((2, 8, 32), 1),
    ((1, 9, 33), 1),
    ((2, 33, 64), 1),
    ((1025, 65), 0),
    ((2, 3, 1300, 5), 2),
]

EMPTY = [((0, 4), 1), ((3, 0), 1), ((0,), 0), ((2, 0, 3), 2), ((2, 0, 3), 1)]

ROWS_OF_EXTREMES = [
    [1.0, -INF, 2.0, -INF],
    [-INF, -INF, -INF, -INF],
    [INF, 1.0, -INF, 2.0],
    [INF, INF, 0.0, 0.0],
    [NAN, 0.0, 1.0, INF],
    [1e38, -1e38, 1e38, 0.0],
    [-1e38, -1e38, -1e38, -1.5e38],
    [88.8, 90.0, 87.0, -104.0],
    [0.0, -87.4, -103.0, -104.5],
]


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
@pytest.mark.parametrize("classes", CLASSES)
def test_lengths(classes, dtype, device):
    compare_softmaxes(random_rows(5, classes, dtype=dtype, device=device), -1)


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
@pytest.mark.parametrize("shape, dim", INNER, ids=str)
def test_dimensions_after_the_rows(shape, dim, dtype, device):
    compare_softmaxes(random_rows(*shape, dtype=dtype, device=device), dim)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape, dim", [((4, 33), 1), ((3, 1500), 1), ((2, 40, 6), 1)], ids=str)
def test_float32_result_of_16_bit_input(shape, dim, dtype, device):
    compare_softmaxes(random_rows(*shape, dtype=dtype, device=device), dim, dtype=torch.float32)


@pytest.mark.parametrize("shape, dim", EMPTY, ids=str)
def test_sizes_of_zero_as_torch(shape, dim, device):
    compare_softmaxes(random_rows(*shape, device=device), dim)


def test_scalar(device):
    compare_softmaxes(random_rows(device=device), 0)


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_as_torch(layout, dim, dtype, device):
    x = lay_out(random_rows(6, 35, 20, dtype=dtype, device=device), layout)
    compare_softmaxes(x, dim, grad=lay_out(random_rows(6, 35, 20, dtype=dtype, device=device), layout))
    compare_softmaxes(x, dim)


def test_rows_down_a_matrix(device):
    """One dimension besides dim, which lies closer in memory: the rows run along outer, not along inner."""
    compare_softmaxes(random_rows(700, 45, device=device).t(), 1)
    compare_softmaxes(random_rows(3, 1, device=device).t(), 1)


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_extremes(dim, dtype, device):
    """NaN, infinities and numbers at float32's ends, alone in a row and far from each other in a long one."""
    rows = torch.tensor(ROWS_OF_EXTREMES, device=device)
    long = torch.full((len(rows), 3000), -INF, device=device)
    long[:, [0, 700, 1999, 2999]] = rows
    for x in (rows, long):
        x = x.to(dtype)
        compare_softmaxes(x if dim == 1 else x.t().contiguous(), dim)


def test_large_scores(device):
    """Scores far from 0, where exp(x - lse) with a rounded lse would lose digits."""
    compare_softmaxes(random_rows(8, 300, device=device) + 3e4, 1)
    compare_softmaxes(random_rows(8, 3000, scale=1e4, device=device), 1)


@pytest.mark.parametrize("shape, dim", [((64, 1000), 1), ((8, 40000), 1), ((4, 3000, 33), 1)], ids=str)
def test_same_bits_in_every_run_and_any_batch(shape, dim, device):
    x, grad = random_rows(*shape, device=device), random_rows(*shape, device=device)
    for function in (flash_online.functional.softmax, flash_online.functional.log_softmax):
        first = softmax_and_gradient(function, x, dim, grad)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(first, softmax_and_gradient(function, x, dim, grad), strict=True))
        alone = softmax_and_gradient(function, x[1:2].contiguous(), dim, grad[1:2].contiguous())
        assert all(torch.equal(a[1:2], b) for a, b in zip(first, alone, strict=True))


def test_autocast_casts_as_torch(device):
    x = random_rows(4, 50, dtype=torch.float16, device=device)
    with torch.autocast(device, torch.float16):
        ours, theirs = flash_online.functional.softmax(x, 1), torch.softmax(x, 1)
    assert ours.dtype == theirs.dtype == {"cpu": torch.float16, "cuda": torch.float32}[device]
    torch.testing.assert_close(ours, theirs)


# --- a row depends on its elements alone -------------------------------------------------------------------------------------


def _every_function(rows, k=5):
    """All row functions of a [rows, classes] tensor and their gradients."""
    x = rows.detach().requires_grad_()
    weight = torch.linspace(-1, 1, x.shape[1], dtype=torch.float64).to(x.dtype)
    target = torch.arange(x.shape[0], device=x.device) * 7 % x.shape[1]
    results = []
    for name in SOFTMAXES:
        y = getattr(flash_online, name)(x, 1)
        grad = weight.expand_as(y) if y.dim() == 2 else torch.ones_like(y)
        results += [y, torch.autograd.grad(y, x, grad)[0]]
    loss = flash_online.cross_entropy(x, target, reduction="none")
    results += [loss, torch.autograd.grad(loss, x, torch.ones_like(loss))[0]]
    smooth = flash_online.cross_entropy(x, target, reduction="none", label_smoothing=0.1)
    results += [smooth, torch.autograd.grad(smooth, x, torch.ones_like(smooth))[0]]
    spread = weight.abs().expand(x.shape).clone().requires_grad_()
    soft = flash_online.cross_entropy(x, spread, reduction="none")
    results += [soft, *torch.autograd.grad(soft, (x, spread), torch.ones_like(soft))]
    probabilities, indices = flash_online.topk_softmax(x, min(k, x.shape[1]))
    results += [probabilities, indices, torch.autograd.grad(probabilities, x, torch.ones_like(probabilities))[0]]
    return [r.detach() for r in results]


@pytest.mark.parametrize("rows, classes", [(1, 200_003), (2, 70_001), (3, 32_769)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_that_share_a_row_change_no_bit(rows, classes, dtype):
    """Few long rows are cut up among the threads; one thread, or a batch that keeps them busy, takes each as a whole."""
    x = random_tensor(rows, classes, dtype=dtype, scale=4)
    torch.set_num_threads(1)
    alone = _every_function(x)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(_every_function(x), alone, strict=True)), threads
    torch.set_num_threads(2)
    if dtype == torch.float32:
        batch = torch.cat([torch.randn(9, classes), x])
        for name in ("softmax", "log_softmax", "logsumexp"):
            assert torch.equal(getattr(flash_online, name)(batch, 1)[9:], getattr(flash_online, name)(x, 1))


@pytest.mark.parametrize("classes", [1, 3, 16, 17, 24, 25, 32, 33, 100, 2047, 2049, 5000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_change_no_bit(classes, dtype):
    """A row's result depends on its elements alone: not on how they lie in memory, nor on the rows next to it."""
    x = random_tensor(19, classes, dtype=dtype, scale=3)
    expected = _every_function(x)
    for layout in ("columns", "strided", "unaligned"):
        assert all(torch.equal(a, b) for a, b in zip(_every_function(lay_out(x, layout)), expected, strict=True)), layout
    for name in SOFTMAXES:
        images = x.t().contiguous().view(1, classes, 19)  # the rows side by side
        result = getattr(flash_online, name)(images, 1)
        row = getattr(flash_online, name)(x, 1)
        assert torch.equal(result.reshape(-1, 19).t() if result.dim() == 3 else result.view(19), row)
    assert all(torch.equal(a, b[6:7]) for a, b in zip(_every_function(x[6:7])[:6], expected[:6], strict=True))


GRADIENT_TYPES = [(t, t) for t in DTYPES] + [(t, torch.float32) for t in (torch.float16, torch.bfloat16)]
GRADIENT_CLASSES = [2, 5, 10, 16, 24, 33, 64, 65, 100, 129, 256, 257, 1000, 2048, 2049, 6151, 16_384, 33_000]


def _gradients(rows, classes, log, result):
    """Gradients and outputs. Of some rows the gradients, or a third of them, are far from 0, of some one output is nearly 1."""
    grad, x = torch.randn(rows, classes), torch.randn(rows, classes)
    grad[::3] += 1000
    grad[1::5, : classes // 3] -= 200
    x[1::4, classes // 2] += 30
    return grad.to(result), (torch.log_softmax if log else torch.softmax)(x, 1).to(result)


@pytest.mark.parametrize("types", GRADIENT_TYPES, ids=str)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("classes", GRADIENT_CLASSES)
def test_gradient_strides_change_no_bit(classes, log, types):
    """Rows are taken in batches whose sums are made together; a row alone, or of other strides, goes another way."""
    dtype, result = types
    backward = torch.ops.flash_online.softmax_backward
    grad, y = _gradients(37, classes, log, result)
    expected = backward(grad, y, 1, log, dtype)
    for rows in (slice(0, 1), slice(5, 6), slice(3, 21), slice(20, 37)):
        assert torch.equal(backward(grad[rows], y[rows], 1, log, dtype), expected[rows]), rows
    assert torch.equal(backward(grad.t().contiguous().t(), y, 1, log, dtype), expected)
    assert torch.equal(backward(grad.t().contiguous(), y.t().contiguous(), 0, log, dtype), expected.t())
    for gap in (1, 40):  # the rows lie apart, and where vectors do not begin
        wide_grad, wide_y = (torch.full((37, classes + gap), math.nan, dtype=result) for _ in range(2))
        wide_grad[:, gap:], wide_y[:, :classes] = grad, y
        assert torch.equal(backward(wide_grad[:, gap:], wide_y[:, :classes], 1, log, dtype), expected), gap
    same = grad[:1].expand(37, classes)  # as of a sum over the rows
    assert torch.equal(backward(same, y, 1, log, dtype), backward(same.contiguous(), y, 1, log, dtype))


@pytest.mark.parametrize("types", GRADIENT_TYPES, ids=str)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("classes", [17, 21, 48, 64, 150, 1024, 1025, 2048])
def test_strips_of_rows_change_no_bit(classes, log, types):
    """The rows of an image lie side by side and are computed in strips; 2 images of 300 rows have whole strips and parts."""
    dtype, result = types
    forward, backward = torch.ops.flash_online.softmax_forward, torch.ops.flash_online.softmax_backward
    grad, y = (t.view(2, 300, classes) for t in _gradients(600, classes, log, result))
    x = random_tensor(2, 300, classes, dtype=dtype, scale=3)
    x[0, 5, 3], x[0, 6, 3], x[1, 290], x[1, 299, -1] = math.nan, math.inf, -math.inf, -math.inf
    images = [t.transpose(1, 2).contiguous() for t in (x, grad, y)]
    expected = forward(x, 2, log, result).transpose(1, 2)
    torch.testing.assert_close(forward(images[0], 1, log, result), expected, rtol=0, atol=0, equal_nan=True)
    expected = backward(grad, y, 2, log, dtype).transpose(1, 2)
    assert torch.equal(backward(images[1], images[2], 1, log, dtype), expected)
    assert torch.equal(backward(grad.transpose(1, 2), images[2], 1, log, dtype), expected)  # one of them lies otherwise


@pytest.mark.parametrize("classes", [16, 100, 1000, 1024, 3000, 200_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("log", [False, True])
def test_streamed_gradients(classes, dtype, log):
    """From 12 MiB on gradients are stored past the caches; their bits are those of the halves, which are not."""
    backward = torch.ops.flash_online.softmax_backward
    rows = -(-(13 << 20) // (dtype.itemsize * classes))
    grad, y = _gradients(rows, classes, log, dtype)
    whole, half = backward(grad, y, 1, log, dtype), rows // 2
    parts = [backward(grad[part], y[part], 1, log, dtype) for part in (slice(0, half), slice(half, rows))]
    assert whole.nbytes >= 12 << 20 > max(p.nbytes for p in parts)
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("classes", [2047, 2048, 2049, 4097, 16383, 16385, 70_000, 163_841])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_at_the_edges_of_chunks(classes, dtype, device):
    for name in ("softmax", "log_softmax", "logsumexp"):
        compare_with_reference(name, random_tensor(2, classes, dtype=dtype, scale=3, requires_grad=True, device=device), 1)
    target = torch.tensor([0, classes - 1], device=device)
    compare_with_reference(
        "cross_entropy",
        random_tensor(2, classes, dtype=dtype, scale=3, requires_grad=True, device=device),
        target,
        return_lse=True,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_chunks_of_very_different_size(dtype, device):
    """The maximum comes first, last, in steps, or far above or below zero; whole chunks have weight 0, or hold -inf."""
    base = random_tensor(1, 9000, dtype=torch.float32, device=device)
    rows = [base + 200 * (torch.arange(9000, device=device) // 2048 == chunk) for chunk in range(5)]
    rows += [base + torch.linspace(-300, 0, 9000, device=device), base - 3000, base + 3000, base * 1e4]
    rows += [torch.where(torch.arange(9000, device=device) // 2048 == chunk, -INF, base) for chunk in range(5)]
    x = torch.cat(rows).to(dtype).requires_grad_()
    for name in SOFTMAXES:
        compare_with_reference(name, x, 1)
    compare_with_reference("cross_entropy", x, torch.arange(len(x), device=device) + 8900)


def test_large_pages_change_nothing():
    """From 32 MiB on, the memory of a result is asked to come in large pages."""
    x = torch.randn(4099, 2049)
    for name in ("softmax", "log_softmax"):
        call = getattr(flash_online, name)
        assert torch.equal(call(x, 1), torch.cat([call(part, 1) for part in x.split(1000)]))


def test_exp_over_all_exponents():
    """p = e^v / (1 + e^v) from softmax([0, v]), for scores of every exponent: exp within 1 ulp (1.2 without FMA), and half an
    ulp each for the sum, its inverse and their product; in rows of a lane and in rows of a vector."""
    exponents, mantissas = np.arange(1, 255, dtype=np.uint32), np.arange(0, 1 << 23, 99991, dtype=np.uint32)
    scores = -(exponents[:, None] << 23 | mantissas).view(np.float32).ravel()
    scores = np.concatenate([scores, -np.linspace(0, 90, 50_001, dtype=np.float32)])
    weight = np.exp(scores.astype(np.float64))
    expected = weight / (1 + weight)
    for width in (2, 40):
        x = torch.full((len(scores), width), -INF)
        x[:, 0], x[:, 1] = 0, torch.from_numpy(scores)
        got = flash_online.softmax(x, 1)[:, 1].double().numpy()
        normal = expected > 2.0**-126
        assert np.abs(got / np.where(normal, expected, 1) - 1)[normal].max() < 2.7 * 2.0**-23
        # Below, a vector gives 0.
        assert ((got == 0) | (np.abs(got - expected) <= 2.0**-149))[~normal].all()
        assert (flash_online.softmax(x, 1)[:, 2:] == 0).all()
        lse = flash_online.logsumexp(x, 1).double().numpy()
        assert np.abs(lse - np.log1p(weight)).max() < 2.0**-23
        for dtype in (torch.float16, torch.bfloat16):
            half = x.to(dtype)
            exact = torch.softmax(half.double(), 1)
            error = (flash_online.softmax(half, 1).double() - exact).abs()
            assert (error <= 0.51 * torch.finfo(dtype).eps * exact + 2.0**-24).all()
    x = torch.tensor([[0.0, math.nan] + [0.0] * 38])
    assert flash_online.softmax(x, 1).isnan().all() and flash_online.softmax(x[:, :2], 1).isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512", "avx512_bf16"])
def test_lesser_instruction_sets(instruction_set):
    """Those of the tests above that the sets' own code decides."""
    skip_unless_lesser(instruction_set)
    tests = "(exponents or change_no_bit or streamed or chunks or topk) and not topk_lengths"
    files = [str(Path(__file__).with_name(name)) for name in ("test_softmax.py", "test_topk_softmax.py")]
    run_tests(instruction_set, "-m", "not gpu", *files, "-k", tests)
