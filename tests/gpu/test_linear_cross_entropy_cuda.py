"""linear_cross_entropy on CUDA: against float64, without a sync, in a CUDA graph, at the size that its bars are set for."""

from __future__ import annotations

import pytest
import torch

import flash_online
import flash_online.functional as F
from flash_online import _linear_cross_entropy_ops
from flash_online.testing import assert_close_to_float64, error, peak_extra_bytes

TF = torch.nn.functional
MIB = 1 << 20


def missing() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device, or a torch without CUDA"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"the GPU's compute capability is {torch.cuda.get_device_capability()}, below (8, 0)"
    for operator in ("cross_entropy_forward", "cross_entropy_backward_"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_online::{operator}", "CUDA"):
            return f"no CUDA kernel for {operator} in this build"
    return None


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def leaf(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(dtype).requires_grad_()


def plain(x, w, target, linear_bias=None, **options):
    return TF.cross_entropy(TF.linear(x, w, linear_bias), target, **options)


def compare(x, w, target, linear_bias=None, **options):
    """Loss and gradients beside torch's in the same dtype, and in float64."""
    leaves = [t for t in (x, w, linear_bias, target) if t is not None and t.requires_grad]

    def run(function, convert):
        made = {id(t): convert(t.detach()).requires_grad_() for t in leaves}
        given = [made.get(id(t), t) for t in (x, w, target)]
        more = {k: convert(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        bias = None if linear_bias is None else made[id(linear_bias)]
        loss = function(*given, linear_bias=bias, **more)
        torch.manual_seed(7)
        cotangent = torch.randn(loss.shape, device="cuda").to(x.dtype).to(loss.dtype)
        return loss, *torch.autograd.grad(loss, list(made.values()), cotangent)

    ours, torchs = (run(f, lambda t: t.clone()) for f in (F.linear_cross_entropy, plain))
    truth = run(plain, lambda t: t.double())
    for i, (found, other, exact) in enumerate(zip(ours, torchs, truth, strict=True)):
        assert found.dtype == other.dtype
        assert_close_to_float64(found, other, exact, name=f"result {i}")


@pytest.fixture(params=["one chunk", "chunks of 128 rows"])
def chunks(request, monkeypatch):
    if request.param != "one chunk":
        monkeypatch.setattr(_linear_cross_entropy_ops, "_CHUNK_BYTES", {"cuda": 1})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [7, 1000, 50257])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_beside_torch(classes, reduction, dtype, chunks):
    """A class count that no alignment likes among them; ignored rows; a bias; class weights and smoothing."""
    for rows in (1, 128, 300):
        x, w, b = leaf(rows, 96, dtype=dtype), leaf(classes, 96, dtype=dtype, scale=0.1), leaf(classes, dtype=dtype)
        target = torch.randint(0, classes, (rows,), device="cuda")
        compare(x, w, target, reduction=reduction)
        target[rows // 2 :: 7] = -100
        weight = torch.rand(classes, device="cuda").to(dtype)
        compare(x, w, target, linear_bias=b, weight=weight, label_smoothing=0.1, reduction="none" if rows == 1 else reduction)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probabilities(dtype, chunks):
    x, w = leaf(300, 64, dtype=dtype), leaf(1003, 64, dtype=dtype, scale=0.1)
    target = torch.randn(300, 1003, device="cuda").softmax(1).to(dtype).requires_grad_()
    for reduction in ("mean", "none"):
        compare(x, w, target, reduction=reduction, label_smoothing=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions(dtype, chunks):
    """The K-dimensional loss, beside the reference."""
    x, w, b = leaf(260, 32, dtype=dtype), leaf(17, 3, 32, dtype=dtype), leaf(17, 3, dtype=dtype)
    target = torch.randint(0, 17, (260, 3), device="cuda")
    target[5, 1] = -100
    results = []
    for module in (flash_online, flash_online.reference):
        loss, lse = module.linear_cross_entropy(x, w, target, linear_bias=b, z_loss=0.01, return_lse=True)
        results.append((loss, lse, *torch.autograd.grad(loss, (x, w, b))))
    for ours, expected in zip(*results, strict=True):
        tolerance = 4 * torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(ours.float(), expected.float(), rtol=0, atol=tolerance)


def test_an_accumulator_in_float32(monkeypatch):
    """More chunks than a 16-bit gradient may be rounded over: products that add to a float32 one."""
    monkeypatch.setattr(_linear_cross_entropy_ops, "_CHUNK_BYTES", {"cuda": 1})
    for dtype in (torch.bfloat16, torch.float16):
        x, w, target = leaf(4096, 16, dtype=dtype), leaf(512, 16, dtype=dtype), torch.randint(0, 512, (4096,), device="cuda")
        assert _linear_cross_entropy_ops.chunk_plan(4096, 512, 16, dtype, "cuda", True) == (128, True)
        truth = torch.autograd.grad(plain(x.double(), w.double(), target, reduction="sum"), w)[0]
        torchs = torch.autograd.grad(plain(x, w, target, reduction="sum"), w)[0]
        ours = torch.autograd.grad(F.linear_cross_entropy(x, w, target, reduction="sum"), w)[0]
        assert_close_to_float64(ours, torchs, truth)
        assert error(ours, truth).rms < 1.5 * error(torchs, truth).rms


def test_autocast():
    """Gradients of float32 parameters grow in float32; products run in bfloat16."""
    x, w, target = leaf(600, 64), leaf(999, 64, scale=0.1), torch.randint(0, 999, (600,), device="cuda")
    results = []
    for function in (F.linear_cross_entropy, plain):
        with torch.autocast("cuda", torch.bfloat16):
            loss = function(x, w, target)
        results.append((loss, *torch.autograd.grad(loss, (x, w))))
    for ours, torchs in zip(*results, strict=True):
        assert ours.dtype == torchs.dtype == torch.float32
        torch.testing.assert_close(ours, torchs, rtol=0, atol=0.02 * torchs.abs().max().item())


def test_an_incoming_gradient_is_not_rounded():
    """0.3 is 0.26% off in bfloat16, and every gradient would be if it were rounded. With the graph kept, gradients repeat."""
    x, w, target = leaf(64, 64, dtype=torch.bfloat16), leaf(33, 64, dtype=torch.bfloat16), torch.arange(64, device="cuda") % 33
    truth = torch.autograd.grad(plain(x.double(), w.double(), target), (x, w))
    loss = flash_online.linear_cross_entropy(x, w, target, dtype=torch.float32)
    once = torch.autograd.grad(loss, (x, w), retain_graph=True)
    kept = [t.clone() for t in once]
    for keep in (True, False):
        for found, exact in zip(torch.autograd.grad(loss * 0.3, (x, w), retain_graph=keep), truth, strict=True):
            found, exact = found.double(), exact.double()
            assert abs((found * exact).sum() / exact.square().sum() - 0.3) < 0.3 * 0.001
    assert all(torch.equal(a, b) for a, b in zip(once, kept, strict=True))


def test_no_sync():
    x, w, target = leaf(256, 64, dtype=torch.bfloat16), leaf(1000, 64, dtype=torch.bfloat16), torch.arange(256, device="cuda")
    weight = torch.rand(1000, device="cuda")

    def step():
        for options in ({}, {"reduction": "none"}, {"z_loss": 0.1, "return_lse": True}, {"weight": weight}):
            result = flash_online.linear_cross_entropy(x, w, target, **options)
            loss = result[0] if isinstance(result, tuple) else result
            torch.autograd.grad(loss.float().sum() * 2, (x, w))

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cuda_graph(reduction):
    x, w, target = leaf(512, 64, dtype=torch.bfloat16), leaf(1000, 64, dtype=torch.bfloat16), torch.arange(512, device="cuda")

    def step():
        loss = F.linear_cross_entropy(x, w, target, reduction=reduction)
        return loss.detach(), *torch.autograd.grad(loss.sum(), (x, w))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        target.copy_(target.flip(0))
    graph.replay()
    for found, expected in zip(captured, step(), strict=True):
        assert torch.equal(found, expected)


def test_compiled():
    x, w, target = leaf(300, 64, dtype=torch.bfloat16), leaf(1000, 64, dtype=torch.bfloat16), torch.arange(300, device="cuda")
    torch._dynamo.reset()
    results = []
    for function in (torch.compile(F.linear_cross_entropy, fullgraph=True), F.linear_cross_entropy):
        loss = function(x, w, target)
        results.append((loss, *torch.autograd.grad(loss, (x, w))))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("rows", [4096, 16384])
def test_the_bar_of_memory(rows):
    """A vocabulary of 128256 at hidden size 4096 in bfloat16: at most 600 MiB beyond the gradients, forward and backward."""
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free GPU memory")
    x, w = leaf(rows, 4096, dtype=torch.bfloat16), leaf(128256, 4096, dtype=torch.bfloat16, scale=0.02)
    target = torch.randint(0, 128256, (rows,), device="cuda")

    def call():
        x.grad = w.grad = None
        F.linear_cross_entropy(x, w, target).backward()

    call()
    x.grad = w.grad = None
    extra = peak_extra_bytes(call, device="cuda") - 2 * (x.numel() + w.numel())
    assert extra <= 600 * MIB, f"{extra / MIB:.0f} MiB"
