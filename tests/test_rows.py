"""softmax, log_softmax, logsumexp, topk_softmax and cross_entropy against the float64 reference, forward and backward."""

from __future__ import annotations

import math

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
