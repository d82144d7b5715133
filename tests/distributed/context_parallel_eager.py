"""These checks ask whether Ulysses as one autograd Function gives what its separate Functions give, bit for bit, and works
inside what wraps a Function: checkpoints, hooks, autocast, modes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from context_parallel_cases import LAYOUTS, slopes
from torch.utils.checkpoint import checkpoint

from flash_online.distributed import (
    _context_parallel,
    _ulysses_eager,
    context_parallel_attention,
    context_parallel_varlen_attention,
)


@contextlib.contextmanager
def separate_functions():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_context_parallel, "takes", lambda *tensors: False)
        yield


def is_eager(tensor) -> bool:
    """Whether the one Function made a tensor, or a view of its result."""
    nodes = [tensor.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            if "_Ulysses" in node.name():
                return True
            nodes += [following for following, _ in node.next_functions]
    return False


def compare(call, local, others=(), *, second=False, frozen=()):
    """Results, gradients and second derivatives of both. Gradients of out alone and of lse alone too."""
    local = [t.detach().requires_grad_(n not in frozen) for n, t in enumerate(local)]
    wanted, found = [t for t in (*local, *others) if t.requires_grad], []
    for way in (contextlib.nullcontext, separate_functions):
        torch.manual_seed(5)
        with way():
            results = call(*local)
            results = results if isinstance(results, tuple) else (results,)
            eager = way is contextlib.nullcontext
            assert all(is_eager(result) == eager for result in results)
            weights = [torch.randn_like(result) for result in results]
            kept = [*results, *torch.autograd.grad(results, wanted, weights, retain_graph=True)]
            for result in results:
                kept += torch.autograd.grad(result.sum(), wanted, retain_graph=True, allow_unused=True)  # an expanded gradient
            if second:
                sums = sum((result.sin() * weight).sum() for result, weight in zip(results, weights, strict=True))
                grads = torch.autograd.grad(sums, wanted, create_graph=True)
                kept += grads
                kept += torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), wanted, retain_graph=True)
                (some,) = torch.autograd.grad(grads[0].sum(), wanted[:1], create_graph=True)
                kept += torch.autograd.grad(some.sin().sum(), wanted[:1])
            found.append(kept)
    for n, (ours, theirs) in enumerate(zip(*found, strict=True)):
        if theirs is None:
            assert ours is None, n
        else:
            strides = [[s for s, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in (ours, theirs)]
            assert strides[0] == strides[1] and ours.dtype == theirs.dtype, (n, strides)
            assert torch.equal(ours, theirs), (n, (ours - theirs).abs().max().item())


def laid_out(kind, heads, rows, width, dtype, batch=2):
    """A tensor [batch, heads, rows, width] of normal numbers, or [rows, heads, width] without a batch."""
    shape = (rows, heads, width) if batch is None else (batch, heads, rows, width)
    if kind == "projection":  # [batch, rows, heads, width] in memory
        return (
            torch.randn(shape).to(dtype) if batch is None else torch.randn(batch, rows, heads, width).to(dtype).transpose(1, 2)
        )
    if kind == "slice":  # not aligned, and rows apart
        return torch.randn(*shape[:-1], width + 5).to(dtype)[..., 3 : 3 + width]
    if kind == "columns":  # the last dimension is not the innermost
        return torch.randn(*shape[:-2], width, shape[-2]).to(dtype).mT
    return torch.randn(shape).to(dtype)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPTIONS = (
    {"causal": True},
    {"window": (5, 0), "softcap": 4.0},
    {"causal": True, "alibi": True, "sinks": True, "scale": 0.3},
    {"window": (None, 3), "return_lse": True},
    {"causal": True, "sinks": True, "return_lse": True, "softcap": 9.0},
)


def made(options, heads, dtype):
    words = {name: value for name, value in options.items() if name not in ("alibi", "sinks")} | {"deterministic": True}
    if options.get("alibi"):
        words["alibi_slopes"] = slopes(heads)
    if options.get("sinks"):
        words["sinks"] = torch.linspace(-1, 2, heads, dtype=torch.float64 if dtype == torch.float64 else None).requires_grad_()
    return words, [words["sinks"]] if options.get("sinks") else []


def check_one_function(rank, ranks):
    """All dtypes, layouts, options and strides, dense and packed."""
    heads = (4 * ranks, 2 * ranks, 2 * ranks)
    starts = torch.tensor([0, 3, 4, 4, 8 * ranks - 2], dtype=torch.int32)
    for n, dtype in enumerate(DTYPES):
        for m, options in enumerate(OPTIONS):
            torch.manual_seed(10 * n + m)
            words, sinks = made(options, heads[0], dtype)
            kind = ("plain", "projection", "slice", "columns")[(n + m) % 4]
            width, width_v = ((16, 16), (16, 16), (16, 24), (6, 6), (7, 16))[(2 * n + m) % 5]
            layout, batch, second = LAYOUTS[(n + m) % 2], 1 + n % 2, dtype is torch.float64 and m % 2 == 0
            widths = (width, width, width_v)
            local = [laid_out(kind, h, 8, w, dtype, batch) for h, w in zip(heads, widths, strict=True)]
            compare(
                lambda *tensors, words=words, layout=layout: context_parallel_attention(
                    *tensors, method="ulysses", layout=layout, **words
                ),
                *(local, sinks), second=second, frozen=((), (0,), (1, 2), (), (2,))[m],
            )  # fmt: skip
            local = [laid_out(kind, h, 8, w, dtype, None) for h, w in zip(heads, widths, strict=True)]
            compare(
                lambda *tensors, words=words, layout=layout: context_parallel_varlen_attention(
                    *tensors, starts, method="ulysses", layout=layout, **words
                ),
                *(local, sinks), second=second, frozen=((), (1,), (), (0,), (0, 1))[m],
            )  # fmt: skip
    # Sinks alone need a gradient; more dimensions of a batch; ranks whose tensors have other strides.
    words, sinks = made(OPTIONS[2], heads[0], torch.float32)
    local = [torch.randn(2, 3, h, 8, 16) for h in heads]
    compare(lambda *t: context_parallel_attention(*t, method="ulysses", **words), local, sinks, frozen=(0, 1, 2))
    compare(lambda *t: context_parallel_attention(*t, method="ulysses", **words), local, sinks)
    local = [laid_out(("plain", "projection", "slice", "columns")[rank % 4], h, 8, 16, torch.bfloat16) for h in heads]
    compare(lambda *t: context_parallel_attention(*t, method="ulysses", return_lse=True), local)


def check_wrapped(rank, ranks):
    """Checkpoints, hooks of saved tensors, autocast, modes, and what a call keeps for its backward pass."""
    heads, width = 2 * ranks, 16
    inputs = [torch.randn(1, heads, 8, width, requires_grad=True) for _ in range(3)]

    def call(*tensors):
        return context_parallel_attention(*tensors, causal=True, method="ulysses", deterministic=True)

    def grads(function):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        function(*leaves).sin().sum().backward()
        return [leaf.grad for leaf in leaves]

    def same(ours, theirs):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))

    expected, out = grads(call), call(*inputs)
    assert is_eager(out)
    for reentrant in (False, True):
        same(grads(lambda *t, reentrant=reentrant: checkpoint(call, *(x * 1 for x in t), use_reentrant=reentrant)), expected)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):  # as offloading does
        same(grads(call), expected)
        found = torch.autograd.grad(call(*inputs).sin().sum(), inputs, create_graph=True)
        same(found, expected)
        second = torch.autograd.grad(sum(grad.pow(2).sum() for grad in found), inputs)
    with separate_functions():
        found = torch.autograd.grad(call(*inputs).sin().sum(), inputs, create_graph=True)
        same(second, torch.autograd.grad(sum(grad.pow(2).sum() for grad in found), inputs))

    with torch.no_grad():
        assert torch.equal(call(*inputs), out) and not call(*inputs).requires_grad
    with torch.inference_mode():
        assert torch.equal(call(*inputs), out) and call(*inputs).is_inference()
        call(*(t.clone() for t in inputs))
    with torch.autocast("cpu", torch.bfloat16):
        low = call(*inputs)
        assert low.dtype == torch.bfloat16 and is_eager(low)
        with separate_functions():
            assert torch.equal(call(*inputs), low)
        same(grads(call), grads(call))
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()
    for made in (torch._C._len_torch_dispatch_stack, _ulysses_eager.is_traced):
        assert not made()
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert not is_eager(call(*inputs))

    def kept(way):
        """Bytes of the storages that a call keeps, but for its inputs."""
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with way(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            held = context_parallel_attention(*inputs, causal=True, method="ulysses", return_lse=True)
        del held
        for tensor in inputs:
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        return sum(storages.values())

    assert kept(contextlib.nullcontext) <= kept(separate_functions)
    for retain in (False, True):  # what a call keeps is freed before its gradients are exchanged, unless its graph is retained
        out, freed = call(*inputs), []

        def all_to_all(*arguments, node=out.grad_fn, freed=freed, run=_ulysses_eager.all_to_all):
            try:
                freed.append(node.saved_tensors is None)
            except RuntimeError:
                freed.append(True)
            return run(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_ulysses_eager, "all_to_all", all_to_all)
            out.backward(out.detach(), retain_graph=retain)
        assert freed == [False, not retain]
    routes = _ulysses_eager._route.cache_info()
    for _ in range(3):
        grads(call)
    assert _ulysses_eager._route.cache_info().misses == routes.misses
