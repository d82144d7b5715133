"""linear_cross_entropy on CUDA: without a sync, in a CUDA graph, compiled, at the size that its memory target is set for."""

from __future__ import annotations

import pytest
import torch

import flash_online
import flash_online.functional as F
from flash_online.testing import peak_extra_bytes

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def leaf(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(dtype).requires_grad_()


def test_no_sync():
    x, w, target = leaf(256, 64, dtype=torch.bfloat16), leaf(1000, 64, dtype=torch.bfloat16), torch.arange(256, device="cuda")
    weight = torch.rand(1000, device="cuda")

    def step():
        capped = {"softcap": 5.0, "scale": 0.5, "return_argmax": True, "return_z_loss": True, "z_loss": 0.1}
        for options in ({}, {"reduction": "none"}, {"z_loss": 0.1, "return_lse": True}, {"weight": weight}, capped):
            result = flash_online.linear_cross_entropy(x, w, target, **options)
            loss = result[0] if isinstance(result, tuple) else result
            torch.autograd.grad(loss.float().sum() * 2, (x, w))

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "scale": 0.5}], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cuda_graph(reduction, options):
    x, w, target = leaf(512, 64, dtype=torch.bfloat16), leaf(1000, 64, dtype=torch.bfloat16), torch.arange(512, device="cuda")

    def step():
        loss = flash_online.linear_cross_entropy(x, w, target, reduction=reduction, **options)
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


@pytest.mark.parametrize("softcap, bar", [(0.0, 600), (30.0, 730)])
@pytest.mark.parametrize("rows", [4096, 16384])
def test_the_bar_of_memory(rows, softcap, bar):
    """A vocabulary of 128256 at hidden size 4096 in bfloat16: at most 600 MiB beyond the gradients, forward and backward, and
    two blocks of 64 MiB for a softcap."""
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of free GPU memory")
    x, w = leaf(rows, 4096, dtype=torch.bfloat16), leaf(128256, 4096, dtype=torch.bfloat16, scale=0.02)
    target = torch.randint(0, 128256, (rows,), device="cuda")

    def call():
        x.grad = w.grad = None
        flash_online.linear_cross_entropy(x, w, target, softcap=softcap).backward()

    call()
    x.grad = w.grad = None
    extra = peak_extra_bytes(call, device="cuda") - 2 * (x.numel() + w.numel())
    assert extra <= bar * MIB, f"{extra / MIB:.0f} MiB"
