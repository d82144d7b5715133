"""softmax and log_softmax on CUDA: against float64, on any stream and device, in CUDA graphs, beyond 2^31 elements."""

from __future__ import annotations

import math

import pytest
import torch

import flash_online
import flash_online.functional
from flash_online.testing import LAYOUTS, assert_close_to_float64, lay_out

INF, NAN = math.inf, math.nan


def missing() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device, or a torch without CUDA"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"the GPU's compute capability is {torch.cuda.get_device_capability()}, below (8, 0)"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("flash_online::softmax_forward", "CUDA"):
        return "libflash_online.so was built without CUDA"
    return None


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
GIB = 1 << 30

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


def run(function, x, dim, grad, dtype=None):
    """The function's result, and the gradient of x for the result's gradient `grad`."""
    x = x.detach().requires_grad_()
    y = function(x, dim, dtype=dtype)
    return y.detach(), torch.autograd.grad(y, x, grad.to(y.dtype))[0]


def compare(x, dim, dtype=None, grad=None):
    """Both functions on x beside torch's and float64's, forward and backward."""
    grad = torch.randn(x.shape, device=x.device).to(dtype or x.dtype) if grad is None else grad
    for name in ("softmax", "log_softmax"):
        ours = run(getattr(flash_online.functional, name), x, dim, grad, dtype)
        torchs = run(getattr(torch.nn.functional, name), x, dim, grad, dtype)
        truth = run(getattr(torch, name), x.double(), dim, grad)
        assert ours[0].dtype == torchs[0].dtype and ours[1].dtype == x.dtype
        assert ours[0].is_contiguous() and ours[0].device == x.device
        # The gradient of a row is a difference of terms as large as grad, and 0 for a row of one class.
        magnitudes = (0.0, grad.abs().max().item() if grad.numel() else 0.0)
        for what, mine, theirs, exact, magnitude in zip(("result", "gradient"), ours, torchs, truth, magnitudes, strict=True):
            label = f"{what} of {name}({x.dtype}{list(x.shape)} strides {list(x.stride())}, {dim})"
            assert_close_to_float64(mine, theirs, exact, name=label, magnitude=magnitude)


def gpu(*shape, dtype=torch.float32, scale=3.0):
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


@pytest.fixture(autouse=True)
def ours_alone():
    """A call that fell back to torch would pass every comparison with torch."""
    with flash_online.strict():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", CLASSES)
def test_lengths(classes, dtype):
    compare(gpu(5, classes, dtype=dtype), -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, dim", INNER, ids=str)
def test_dimensions_after_the_rows(shape, dim, dtype):
    compare(gpu(*shape, dtype=dtype), dim)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape, dim", [((4, 33), 1), ((3, 1500), 1), ((2, 40, 6), 1)], ids=str)
def test_float32_result_of_16_bit_input(shape, dim, dtype):
    compare(gpu(*shape, dtype=dtype), dim, dtype=torch.float32)


@pytest.mark.parametrize("shape, dim", EMPTY, ids=str)
def test_sizes_of_zero(shape, dim):
    compare(gpu(*shape), dim)


def test_scalar():
    compare(gpu(), 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dim, dtype):
    x = lay_out(gpu(6, 35, 20, dtype=dtype), layout)
    compare(x, dim, grad=lay_out(gpu(6, 35, 20, dtype=dtype), layout))
    compare(x, dim)


def test_rows_down_a_matrix():
    """One dimension beside dim, which lies closer in memory: the rows run along outer, not along inner."""
    compare(gpu(700, 45).t(), 1)
    compare(gpu(3, 1).t(), 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_extremes(dim, dtype):
    """NaN, infinities and numbers at float32's ends, alone in a row and far from each other in a long one."""
    rows = torch.tensor(ROWS_OF_EXTREMES, device="cuda")
    long = torch.full((len(rows), 3000), -INF, device="cuda")
    long[:, [0, 700, 1999, 2999]] = rows
    for x in (rows, long):
        x = x.to(dtype)
        compare(x if dim == 1 else x.t().contiguous(), dim)


def test_large_scores():
    """Scores far from 0, where exp(x - lse) with a rounded lse would lose digits."""
    compare(gpu(8, 300) + 3e4, 1)
    compare(gpu(8, 3000, scale=1e4), 1)


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
    with pytest.raises(RuntimeError, match="input: float64 is not supported on CUDA"):
        ops.softmax_forward(x.double(), 1, False, torch.float64)
    with pytest.raises(RuntimeError, match="grad: must be on the device"):
        ops.softmax_backward(x.cpu(), x, 1, False, torch.float32)
    with pytest.raises(RuntimeError, match="dim: must lie in"):
        ops.softmax_forward(x, 2, False, torch.float32)
    compare(x, 1)


@pytest.mark.parametrize("shape, dim", [((64, 1000), 1), ((8, 40000), 1), ((4, 3000, 33), 1)], ids=str)
def test_same_bits_in_every_run_and_any_batch(shape, dim):
    x, grad = gpu(*shape), gpu(*shape)
    for function in (flash_online.functional.softmax, flash_online.functional.log_softmax):
        first = run(function, x, dim, grad)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(first, run(function, x, dim, grad), strict=True))
        alone = run(function, x[1:2].contiguous(), dim, grad[1:2].contiguous())
        assert all(torch.equal(a[1:2], b) for a, b in zip(first, alone, strict=True))


def test_current_stream():
    """Work is queued on the current stream, after the work that is there already."""
    x, grad = gpu(64, 5000), gpu(64, 5000)
    expected = run(flash_online.functional.softmax, x, 1, grad)
    late, late_grad = torch.zeros_like(x), torch.zeros_like(grad)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        late_grad.copy_(grad)
        got = run(flash_online.functional.softmax, late, 1, late_grad)
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
        expected = run(flash_online.functional.softmax, x, dim, grad)
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


def test_autocast_computes_in_float32():
    x = gpu(4, 50, dtype=torch.float16)
    with torch.autocast("cuda"):
        ours, theirs = flash_online.functional.softmax(x, 1), torch.softmax(x, 1)
    assert ours.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(ours, theirs)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_tensor_on_another_device_than_the_current_one():
    for current in (0, 1):
        with torch.cuda.device(current):
            for other in (0, 1):
                x = torch.randn(40, 3000, device=f"cuda:{other}")
                compare(x, 1)
                compare(x.view(40, 60, 50), 1)
                assert torch.cuda.current_device() == current
    with pytest.raises(RuntimeError, match="grad: must be on the device"):
        torch.ops.flash_online.softmax_backward(x.to("cuda:0"), x, 1, False, torch.float32)


@pytest.mark.parametrize(
    "shape, dim", [((5_000_000, 3), 1), ((70_000, 40), 1), ((3, 5_000_000), 0), ((5_000_000, 2, 1), 1)], ids=str
)
def test_many_rows(shape, dim):
    """More rows than a grid may have CTAs in y or z, and more than the launch has threads."""
    compare(gpu(*shape, dtype=torch.float16), dim)


@pytest.mark.parametrize("classes", [1_000_003, 3_000_000])
def test_long_rows(classes):
    compare(gpu(2, classes), 1)
    compare(gpu(classes, 2), 0)


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
        compare(x, dim)
