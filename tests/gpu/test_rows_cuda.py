"""The row kernels on CUDA alone: rows of several CTAs, clusters that take one row after another, kernels that start early, CUDA
graphs, more than 2^31 elements."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from row_oracle import (
    OPERATORS,
    compare_logsumexp,
    compare_loss,
    forward_and_backward,
    gpu,
    gradients,
    leaf,
    random_targets,
    wide_as_possible,
)

import flash_online
from flash_online.testing import assert_close_to_float64

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TF = torch.nn.functional

LONG = [262143, 524288, 524299, 1_000_003]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", LONG)
def test_softmax_and_cross_entropy_of_long_rows(classes, dtype):
    x = gpu(2, classes, dtype=dtype)
    compare_logsumexp(x, 1)
    compare_loss(x, random_targets(x), reduction="none")
    compare_loss(x, random_targets(x), torch.rand(classes, device="cuda"), label_smoothing=0.1, reduction="none")
    compare_loss(x, torch.rand(x.shape, device="cuda").to(dtype) / classes, reduction="none")
    for function in (flash_online.softmax, flash_online.log_softmax):
        y = leaf(x, lambda t: t)
        out = function(y, 1)
        exact = getattr(torch, function.__name__)(x.double(), 1)
        theirs = getattr(torch, function.__name__)(x, 1)
        assert_close_to_float64(out, theirs, exact, name=function.__name__)
        grad = torch.randn_like(out)
        z = leaf(x, wide_as_possible)
        (exact,) = gradients([getattr(torch, function.__name__)(z, 1)], [z], [grad])
        w = leaf(x, lambda t: t)
        (theirs,) = gradients([getattr(torch, function.__name__)(w, 1)], [w], [grad])
        assert_close_to_float64(gradients([out], [y], [grad])[0], theirs, exact, name=f"gradient of {function.__name__}")


def test_cross_entropy_target_out_of_range_is_a_device_assert():
    program = (
        "import torch, flash_online\n"
        "x = torch.randn(4, 10, device='cuda')\n"
        "flash_online.cross_entropy(x, torch.tensor([0, 1, 10, 2], device='cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "out of bounds" in done.stderr and "device-side assert" in done.stderr, done.stderr[-500:]


@pytest.mark.parametrize("classes", [33, 4000, 20000])
def test_topk_zeros_are_equal(classes):
    """-0 and 0 are found in the order of their indices."""
    x = torch.full((1, classes), -1.0, device="cuda")
    x[0, 5:25] = torch.tensor([-0.0, 0.0], device="cuda").repeat(10)
    assert flash_online.topk_softmax(x, 20)[1].tolist() == [list(range(5, 25))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, classes", [(700, 40000), (500, 70001), (150, 200_000)], ids=str)
def test_softmax_and_cross_entropy_of_more_rows_than_room(rows, classes, dtype):
    """A cluster that takes several rows one after another gives each the result that it has alone; aligned and unaligned rows
    alternate."""
    x, grad, target = gpu(rows, classes, dtype=dtype), gpu(rows, classes, dtype=dtype), torch.arange(rows, device="cuda")

    def run(x, grad, target):
        y, z = leaf(x, lambda t: t), leaf(x, lambda t: t)
        out, loss = flash_online.softmax(y, 1), flash_online.cross_entropy(z, target, reduction="none")
        return out.detach(), *gradients([out], [y], [grad]), loss.detach(), *gradients([loss], [z], [torch.ones_like(loss)])

    few = 8
    parts = [run(*tensors) for tensors in zip(x.split(few), grad.split(few), target.split(few), strict=True)]
    for name, whole, pieces in zip(("y", "its", "loss", "its"), run(x, grad, target), zip(*parts, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(pieces)), name


@pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("classes", [200, 5000, 100_000, 1_200_000])
def test_cuda_graph(function, classes):
    x, target = torch.zeros(4, classes, device="cuda", requires_grad=True), torch.zeros(4, dtype=torch.int64, device="cuda")
    forward_and_backward(function, x, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [o for o in function(x, target) if o.is_floating_point()]
        (grad,) = torch.autograd.grad([o.sum() for o in outputs], x)
    for _ in range(2):
        with torch.no_grad():
            x.copy_(gpu(4, classes))
        target.copy_(random_targets(x, ignored=False))
        graph.replay()
        expected = forward_and_backward(function, x, target)
        assert all(torch.equal(a, b) for a, b in zip([*outputs, grad], expected, strict=True))


@pytest.mark.parametrize("shape", [(4, 9), (3, 2000), (9000, 3)], ids=str)
def test_cross_entropy_and_logsumexp_opcheck(shape):
    ops, x = torch.ops.flash_online, gpu(*shape, dtype=torch.bfloat16)
    target = random_targets(x)
    torch.library.opcheck(ops.logsumexp_forward.default, (x, 1))
    torch.library.opcheck(ops.logsumexp_forward.default, (x, 1, x.dtype))
    torch.library.opcheck(ops.logsumexp_backward.default, (torch.randn(shape[0], device="cuda"), x, 1))
    torch.library.opcheck(ops.logsumexp_backward.default, (torch.randn(shape[0], device="cuda", dtype=x.dtype), x, 1))
    torch.library.opcheck(ops.cross_entropy_forward.default, (x, target, None, -100, 0.1))
    grads = torch.randn(shape[0], device="cuda")
    torch.library.opcheck(ops.cross_entropy_backward.default, (grads, grads, x, target, None, -100, 0.1, False))
    torch.library.opcheck(ops.cross_entropy_loss.default, (x, target, None, -100, 0.1, True, torch.bfloat16))
    grad, numbers = torch.ones([], device="cuda"), torch.tensor([3.0], device="cuda")
    torch.library.opcheck(ops.cross_entropy_loss_backward.default, (grad, numbers, x, target, None, -100, 0.1))


def test_cross_entropy_of_more_elements_than_31_bits_count():
    shape = ((1 << 21) + 3, 1025)
    if torch.cuda.mem_get_info()[0] < 4 * math.prod(shape) * 2:
        pytest.skip("needs more free GPU memory")
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = random_targets(x, ignored=False)
    loss = flash_online.cross_entropy(x, target, reduction="none", dtype=torch.float32)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    for rows in (slice(0, 3), slice(-3, None)):
        y = x[rows].detach().float().requires_grad_()
        expected = TF.cross_entropy(y, target[rows], reduction="none")
        torch.testing.assert_close(loss[rows], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grad[rows].float(), torch.autograd.grad(expected.sum(), y)[0], rtol=1e-2, atol=1e-4)


# --- topk_softmax ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, classes", [(4000, 1700), (1500, 17001), (40, 300_003)], ids=str)
def test_topk_of_more_rows_than_room(rows, classes, dtype):
    """A CTA that takes several rows, or pieces of them, gives each the result that it has alone; aligned and unaligned rows
    alternate, and between others there are rows of equal elements, which have far too many candidates."""
    x = gpu(rows, classes, dtype=dtype)
    x[3::7, : classes // 2] = 2.0
    for k in (5, 31):
        whole = flash_online.topk_softmax(x, k)
        assert torch.equal(x.gather(1, whole[1]), x.topk(k, 1).values)
        assert (whole[1].sort(1).values.diff(dim=1) > 0).all()
        for some in (slice(0, 8), slice(rows // 2, rows // 2 + 8), slice(rows - 8, rows)):
            alone = flash_online.topk_softmax(x[some].clone(), k)
            assert all(torch.equal(a[some], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.parametrize("in_graph", [False, True])
def test_kernels_that_start_early_wait_for_what_they_read(in_graph):
    """One buffer, written and read again and again without a pause, by our kernels and by torch's."""
    for rows, classes in ((3000, 1000), (2000, 4000), (500, 40000)):
        x, target = gpu(rows, classes), torch.arange(rows, device="cuda") % classes

        def chain(x=x, target=target):
            y, results = x.clone(), []
            for _ in range(8):
                results += [*flash_online.topk_softmax(y, 5), flash_online.cross_entropy(y, target)]
                y.copy_(flash_online.log_softmax(y, 1) * 1.5)
                results += [flash_online.logsumexp(y, 1), flash_online.topk_softmax(y, 5)[0]]
                y = flash_online.softmax(flash_online.log_softmax(y, 1), 1).mul_(3)
            return [*results, y]

        with pytest.MonkeyPatch.context() as patch:
            for name in ("topk_softmax", "cross_entropy", "log_softmax", "logsumexp", "softmax"):
                function = getattr(flash_online, name)

                def waiting(*args, function=function):
                    torch.cuda.synchronize()
                    result = function(*args)
                    torch.cuda.synchronize()
                    return result

                patch.setattr(flash_online, name, waiting)
            expected = chain()
        got = chain()
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = chain()
            graph.replay()
            graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), (rows, classes)


def test_topk_in_a_graph_and_opcheck():
    ops, x = torch.ops.flash_online, gpu(4, 100_000)
    flash_online.topk_softmax(x, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = flash_online.topk_softmax(x, 5)
    for _ in range(2):
        x.copy_(gpu(4, 100_000))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(result, flash_online.topk_softmax(x, 5), strict=True))
    for k in (3, 40):
        x = gpu(4, 50, dtype=torch.bfloat16)
        torch.library.opcheck(ops.topk_softmax_forward.default, (x, k, 1, False, torch.float32))
        p, at = ops.topk_softmax_forward(x, k, 1, False, torch.float32)
        torch.library.opcheck(ops.topk_softmax_backward.default, (torch.randn_like(p), p, at, x, 1, False))
