"""softmax and log_softmax on CUDA alone: any stream and device, CUDA graphs, rows without number and without end, more than
2^31 elements."""

from __future__ import annotations

import math

import pytest
import torch
from row_oracle import compare_softmaxes, gpu, softmax_and_gradient

import flash_online
import flash_online.functional

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]

GIB = 1 << 30


@pytest.mark.parametrize("shape, dim", [((4, 9), 1), ((3, 2000), 1), ((2, 11, 7), 1)], ids=str)
@pytest.mark.parametrize("log", [False, True])
def test_opcheck(log, shape, dim):
    ops = torch.ops.flash_online
    x = gpu(*shape, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        y = ops.softmax_forward(x, dim, log, dtype)
        torch.library.opcheck(ops.softmax_forward.default, (x, dim, log, dtype))
        torch.library.opcheck(ops.softmax_backward.default, (torch.randn_like(y), y, dim, log, torch.bfloat16))


def test_operators_refuse_what_they_cannot_do():
    ops = torch.ops.flash_online
    x = gpu(4, 5)
    with pytest.raises(RuntimeError, match="grad: expected the device of"):
        ops.softmax_backward(x.cpu(), x, 1, False, torch.float32)
    with pytest.raises(RuntimeError, match="dim: expected 0 to 1 "):
        ops.softmax_forward(x, 2, False, torch.float32)
    compare_softmaxes(x, 1)


def test_current_stream():
    """Work is queued on the current stream, after the work that is there already."""
    x, grad = gpu(64, 5000), gpu(64, 5000)
    expected = softmax_and_gradient(flash_online.functional.softmax, x, 1, grad)
    late, late_grad = torch.zeros_like(x), torch.zeros_like(grad)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        late_grad.copy_(grad)
        got = softmax_and_gradient(flash_online.functional.softmax, late, 1, late_grad)
        assert not side.query(), "the call waited for the stream"
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("shape, dim", [((16, 200), 1), ((16, 5000), 1), ((3, 70, 40), 1)], ids=str)
def test_cuda_graph(shape, dim):
    ops = torch.ops.flash_online
    x, grad = torch.zeros(shape, device="cuda"), torch.zeros(shape, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.softmax_forward(x, dim, False, torch.float32)
        z = ops.softmax_backward(grad, y, dim, False, torch.float32)
    for _ in range(3):
        x.copy_(gpu(*shape))
        grad.copy_(gpu(*shape))
        graph.replay()
        expected = softmax_and_gradient(flash_online.functional.softmax, x, dim, grad)
        assert torch.equal(y, expected[0]) and torch.equal(z, expected[1])


def test_compiled():
    x = gpu(4, 3, 130).requires_grad_()

    def function(x):
        return flash_online.functional.log_softmax(flash_online.functional.softmax(x * 2, -1) + 1, 1)

    compiled = torch.compile(function, fullgraph=True)
    ours, expected = compiled(x), function(x)
    torch.testing.assert_close(ours, expected)
    grad = torch.randn_like(ours)
    torch.testing.assert_close(torch.autograd.grad(ours, x, grad)[0], torch.autograd.grad(expected, x, grad)[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_tensor_on_another_device_than_the_current_one():
    for current in (0, 1):
        with torch.cuda.device(current):
            for other in (0, 1):
                x = torch.randn(40, 3000, device=f"cuda:{other}")
                compare_softmaxes(x, 1)
                compare_softmaxes(x.view(40, 60, 50), 1)
                assert torch.cuda.current_device() == current
    with pytest.raises(RuntimeError, match="grad: expected the device of"):
        torch.ops.flash_online.softmax_backward(x.to("cuda:0"), x, 1, False, torch.float32)


@pytest.mark.parametrize(
    "shape, dim", [((5_000_000, 3), 1), ((70_000, 40), 1), ((3, 5_000_000), 0), ((5_000_000, 2, 1), 1)], ids=str
)
def test_many_rows(shape, dim):
    """More rows than a grid may have CTAs in y or z, and more than the launch has threads."""
    compare_softmaxes(gpu(*shape, dtype=torch.float16), dim)


@pytest.mark.parametrize("classes", [1_000_003, 3_000_000])
def test_long_rows(classes):
    compare_softmaxes(gpu(2, classes), 1)
    compare_softmaxes(gpu(classes, 2), 0)


# More than 2^31 elements: many rows, two long ones, classes that lie far apart.
HUGE = {"rows": (((1 << 22) + 3, 513), 1), "long": ((2, (1 << 30) + 5), 1), "inner": ((2, 1030, (1 << 20) + 7), 1)}


@pytest.mark.parametrize("shape, dim", HUGE.values(), ids=HUGE)
def test_more_elements_than_31_bits_count(shape, dim):
    if torch.cuda.mem_get_info()[0] < 5 * math.prod(shape) * 2:
        pytest.skip(f"needs {5 * math.prod(shape) * 2 / GIB:.0f} GiB of free GPU memory")
    ops = torch.ops.flash_online
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    y = ops.softmax_forward(x, dim, False, torch.bfloat16)
    grad = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    z = ops.softmax_backward(grad, y, dim, False, torch.bfloat16)
    # The first and the last rows in full; of the others the sum of their probabilities.
    ends = (slice(-1, None),) if shape[1] > 1 << 20 else (slice(0, 2), slice(-2, None))
    for end in ends:
        pick = (end,) if dim == len(shape) - 1 else (end, slice(None), end)
        exact = torch.softmax(x[pick].float(), dim)
        torch.testing.assert_close(y[pick].float(), exact, atol=0, rtol=2**-7)
        rounded = y[pick].float()
        expected = (grad[pick].float() - (grad[pick].float() * rounded).sum(dim, keepdim=True)) * rounded
        torch.testing.assert_close(z[pick].float(), expected, atol=2**-8 * expected.abs().max().item(), rtol=2**-6)
    if shape[1] <= 1 << 20:
        total = y.sum(dim, dtype=torch.float32)
        assert (total - 1).abs().max().item() < 0.02


def test_offsets_past_31_bits():
    """A small view whose strides reach beyond 2^31 elements of its storage."""
    if torch.cuda.mem_get_info()[0] < 6 * GIB:
        pytest.skip("needs 6 GiB of free GPU memory")
    storage = torch.empty((1 << 31) + 4096, dtype=torch.float16, device="cuda")
    for size, stride, dim in (((3, 1000), (1 << 30, 1), 1), ((3, 1000), (1 << 30, 1), 0), ((40, 3), (1, 1 << 30), 1)):
        x = storage.as_strided(size, stride)
        x.copy_(gpu(*size, dtype=torch.float16))
        compare_softmaxes(x, dim)
