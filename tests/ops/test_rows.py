"""softmax, log_softmax, logsumexp, topk_softmax and cross_entropy against the float64 reference, forward and backward."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import CLASSES, DTYPES, EMPTY_ROW_SHAPES, ROW_SHAPES
from oracle import compare_with_reference

import flash_online
from flash_online.testing import LAYOUTS, lay_out, random_tensor

INF = math.inf
TF = torch.nn.functional
SOFTMAXES = ["softmax", "log_softmax", "logsumexp"]


@pytest.mark.parametrize("shape, dim", ROW_SHAPES, ids=str)
@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(name, shape, dim, dtype):
    compare_with_reference(name, random_tensor(*shape, dtype=dtype, scale=3, requires_grad=True), dim)


@pytest.mark.parametrize("shape, dim", EMPTY_ROW_SHAPES, ids=str)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_sizes_of_zero(name, shape, dim):
    x = torch.randn(shape, requires_grad=True)
    result = getattr(flash_online, name)(x, dim)
    expected = getattr(torch, name)(x, dim)
    assert torch.equal(result, expected) and result.dtype == expected.dtype
    (grad,) = torch.autograd.grad(result.sum(), x)
    assert grad.shape == x.shape


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(layout, dim, dtype):
    x = random_tensor(5, 37, 18, dtype=dtype, layout=layout, requires_grad=True)
    for name in SOFTMAXES:
        compare_with_reference(name, x, dim)
    compare_with_reference("topk_softmax", x, 4, dim)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype(name, source, dtype):
    x = random_tensor(3, 50, dtype=source, scale=4, requires_grad=True)
    compare_with_reference(name, x, 1, dtype=dtype)


@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize("shift", [-1e4, -100.0, 89.0, 1e4, 3e38])
def test_shifted_rows(name, shift):
    """exp overflows past 88.7 in float32; at 3e38 a row's largest number is all that float32 can tell."""
    compare_with_reference(name, (torch.randn(4, 50) + shift).requires_grad_(), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logsumexp_of_infinities(dtype):
    x = torch.tensor([[-INF, -INF], [INF, 0.0], [math.nan, 0.0], [-INF, 3.0], [INF, -INF]]).to(dtype)
    torch.testing.assert_close(flash_online.logsumexp(x, 1), torch.logsumexp(x, 1), equal_nan=True)
    assert flash_online.logsumexp(x, 1, keepdim=True).shape == (5, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_in_any_layout(layout):
    """The incoming gradient is strided too: expanded by sum(), sliced by what came after."""
    x = torch.randn(4, 9, 6, requires_grad=True)
    grad = lay_out(torch.randn(4, 9, 6), layout)
    for name in ("softmax", "log_softmax"):
        for dim in range(3):
            ours = torch.autograd.grad(getattr(flash_online, name)(x, dim), x, grad)[0]
            theirs = torch.autograd.grad(getattr(torch, name)(x, dim), x, grad.contiguous())[0]
            torch.testing.assert_close(ours, theirs)
    ours = torch.autograd.grad(flash_online.softmax(x, 1).sum(), x)[0]
    assert ours.abs().max() < 1e-6


def test_rows_of_softmax_sum_to_one():
    x = torch.randn(64, 50257)
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


def _every_function(rows, k=5):
    """All row functions of a [rows, classes] tensor and their gradients."""
    x = rows.detach().requires_grad_()
    weight = torch.linspace(-1, 1, x.shape[1], dtype=torch.float64).to(x.dtype)
    target = torch.arange(x.shape[0]) * 7 % x.shape[1]
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
    """A row's result depends on its elements alone: not on how they lie in memory, nor on the rows beside it."""
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


@pytest.mark.parametrize("classes", [2047, 2048, 2049, 4097, 16383, 16385, 70_000, 163_841])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_at_the_edges_of_chunks(classes, dtype):
    for name in ("softmax", "log_softmax", "logsumexp"):
        compare_with_reference(name, random_tensor(2, classes, dtype=dtype, scale=3, requires_grad=True), 1)
    target = torch.tensor([0, classes - 1])
    compare_with_reference(
        "cross_entropy", random_tensor(2, classes, dtype=dtype, scale=3, requires_grad=True), target, return_lse=True
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_chunks_of_very_different_size(dtype):
    """The maximum comes first, last, in steps, or far above or below zero; whole chunks have weight 0, or hold -inf."""
    base = random_tensor(1, 9000, dtype=torch.float32)
    rows = [base + 200 * (torch.arange(9000) // 2048 == chunk) for chunk in range(5)]
    rows += [base + torch.linspace(-300, 0, 9000), base - 3000, base + 3000, base * 1e4]
    rows += [torch.where(torch.arange(9000) // 2048 == chunk, -INF, base) for chunk in range(5)]
    x = torch.cat(rows).to(dtype).requires_grad_()
    for name in SOFTMAXES:
        compare_with_reference(name, x, 1)
    compare_with_reference("cross_entropy", x, torch.arange(len(x)) + 8900)


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


@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512", "avx512_bf16", "amx"])
def test_every_instruction_set(instruction_set):
    """Those of the tests above that the sets' own code decides."""
    tests = "exp_over_all_exponents or strides_change_no_bit or chunks or share_a_row or topk"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__)), "-k", tests]
    environment = os.environ | {"FLASH_ONLINE_CPU": instruction_set}
    result = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert result.returncode == 0, f"FLASH_ONLINE_CPU={instruction_set}: {result.stdout[-3000:]}{result.stderr[-1000:]}"


# --- topk_softmax ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 2, 5, 16, 33])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topk(k, renormalize, dtype):
    for shape, dim in (((4, 33), -1), ((33, 3), 0), ((2, 40, 3), 1)):
        x = random_tensor(*shape, dtype=dtype, scale=2, requires_grad=True)
        compare_with_reference("topk_softmax", x, k, dim, renormalize=renormalize)


def test_topk_of_a_vocabulary():
    x = random_tensor(3, 50257, scale=2, requires_grad=True)
    for k in (1, 50, 1000):
        compare_with_reference("topk_softmax", x, k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_topk_ties_in_any_order(dtype):
    x = torch.randint(0, 3, (6, 100)).to(dtype)
    probabilities, indices = flash_online.topk_softmax(x, 60)
    expected = torch.softmax(x, -1)
    torch.testing.assert_close(probabilities, expected.topk(60).values)
    torch.testing.assert_close(expected.gather(1, indices), probabilities)
    assert all(len(set(row)) == 60 for row in indices.tolist())


@pytest.mark.parametrize("k", [1, 5, 16, 17, 32, 33, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topk_of_long_rows(k, dtype):
    """Rising, falling and level rows, and a NaN wherever it may lie: the k largest, whatever a lane or a chunk held before."""
    ramp = torch.arange(5000, dtype=torch.float64) / 700
    rows = [ramp, -ramp, ramp % 1, torch.zeros(5000), torch.randn(5000), torch.randn(5000) - 50]
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


def test_topk_dtype_and_order():
    x = torch.randn(5, 64).half()
    probabilities, indices = flash_online.topk_softmax(x, 7, dtype=torch.float32)
    assert probabilities.dtype == torch.float32 and indices.dtype == torch.int64
    assert (probabilities.diff(dim=-1) <= 0).all()
    torch.testing.assert_close(probabilities, torch.softmax(x.float(), 1).topk(7).values)


def test_topk_of_rows_that_are_not_finite():
    x = torch.tensor([[-INF, 2.0, -INF, 1.0], [-INF] * 4, [math.nan, 1.0, 2.0, 3.0], [INF, 1.0, 2.0, 3.0]])
    probabilities, indices = flash_online.topk_softmax(x, 3)
    torch.testing.assert_close(probabilities[0], torch.softmax(x[0], 0).topk(3).values)
    assert probabilities[1:].isnan().all()
    assert ((indices >= 0) & (indices < 4)).all() and all(len(set(row)) == 3 for row in indices.tolist())


# --- cross_entropy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_over_classes(classes, dtype):
    logits = random_tensor(6, classes, dtype=dtype, scale=3, requires_grad=True)
    target = torch.randint(0, classes, (6,))
    target[4] = -100
    for reduction in ("mean", "sum", "none"):
        compare_with_reference("cross_entropy", logits, target, reduction=reduction, return_lse=True)
    probabilities = torch.rand(6, classes).to(dtype).requires_grad_()
    compare_with_reference("cross_entropy", logits, probabilities, return_lse=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
def test_loss_options(reduction, z_loss, smoothing, weighted, kind):
    options = {"reduction": reduction, "z_loss": z_loss, "label_smoothing": smoothing, "return_lse": True}
    for shape in ((9, 13), (2, 13, 5), (13,)):
        logits = random_tensor(*shape, scale=2, requires_grad=True)
        if kind == "indices":
            target = torch.randint(0, 13, shape[:1] + shape[2:] if len(shape) > 1 else ())
            if len(shape) > 1:
                target.view(-1)[2] = -100
        else:
            target = torch.rand(shape, requires_grad=True)
        weight = torch.rand(13) if weighted else None
        compare_with_reference("cross_entropy", logits, target, weight=weight, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss_dtype", [None, torch.float32], ids=str)
def test_float32_beside_16_bit_logits(dtype, loss_dtype):
    """A float32 loss, and float32 class weights, from 16-bit logits: no copy of the logits, no rounding of the loss."""
    logits = random_tensor(7, 40, dtype=dtype, scale=3, requires_grad=True)
    target, weight = torch.randint(0, 40, (7,)), torch.rand(40)
    for w in (None, weight):
        loss, lse = flash_online.cross_entropy(logits, target, w, dtype=loss_dtype, return_lse=True, reduction="none")
        assert loss.dtype == (loss_dtype or dtype) and lse.dtype == torch.float32
        expected = TF.cross_entropy(logits.double(), target, None if w is None else w.double(), reduction="none")
        # The loss is a difference of numbers near lse.
        eps = torch.finfo(loss.dtype).eps
        torch.testing.assert_close(loss.double(), expected, rtol=4 * eps, atol=4 * eps if loss_dtype is None else 1e-6)
        torch.testing.assert_close(lse.double(), torch.logsumexp(logits.double(), 1), rtol=1e-6, atol=1e-6)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        assert grad.dtype == dtype


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
def test_loss_layouts(layout, kind):
    for shape in ((6, 11), (3, 11, 7), (3, 11, 2, 5)):
        logits = random_tensor(*shape, layout=layout, requires_grad=True)
        if kind == "indices":
            target = lay_out(torch.randint(0, 11, shape[:1] + shape[2:]), layout)
        else:
            target = lay_out(torch.rand(shape), layout).requires_grad_()
        weight = lay_out(torch.rand(11), layout)
        for reduction in ("mean", "none"):
            compare_with_reference(
                "cross_entropy", logits, target, weight=weight, reduction=reduction, return_lse=True, label_smoothing=0.1
            )


def test_ignored_rows_have_no_gradient_with_every_option():
    logits, target = torch.randn(5, 7), torch.tensor([1, -100, 2, -100, 6])
    logits[1], logits[3] = math.nan, INF
    logits.requires_grad_()
    loss = flash_online.cross_entropy(logits, target, torch.rand(7), label_smoothing=0.1, z_loss=0.1)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite() and (grad[[1, 3]] == 0).all() and grad.isfinite().all()


def test_lse_of_cross_entropy_is_differentiable():
    logits, target = torch.randn(5, 7, dtype=torch.float64, requires_grad=True), torch.tensor([1, 0, 2, 3, 6])
    _, lse = flash_online.cross_entropy(logits, target, return_lse=True)
    grad = torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(lse, logits, grad), torch.autograd.grad(torch.logsumexp(logits, 1), logits, grad)
    )


def test_losses_repeat_for_any_number_of_threads():
    logits, target = torch.randn(300, 1000, requires_grad=True), torch.randint(0, 1000, (300,))

    def call():
        loss = flash_online.cross_entropy(logits, target)
        return loss, torch.autograd.grad(loss, logits)[0]

    first = call()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(call(), first, strict=True))
