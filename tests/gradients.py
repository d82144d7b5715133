"""An attention function's results and gradients, for tests that compare two ways to say the same."""

from __future__ import annotations

import torch


def run(function, tensors, seed=0, **options):
    """(out, lse, the gradients of everything that has one)."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    extra = {name: options[name].detach().requires_grad_() for name in ("sinks", "mask") if is_floating(options.get(name))}
    torch.manual_seed(seed)
    out, lse = function(*leaves, return_lse=True, **options | extra)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    ((out.float() * weights).sum() + torch.where(lse.isinf(), 0, lse).sum()).backward()
    return out, lse, *(leaf.grad for leaf in (*leaves, *extra.values()))


def without_lse(function):
    """The function for `run`, of calls that return no lse."""
    return lambda *tensors, return_lse, **words: (function(*tensors, **words), torch.zeros(()))


def check_compiled(attend, tensors, given, mask, dynamic):
    """Asserts that a compiled call with the words `given` has the results and gradients of a plain one with the mask."""
    compiled = torch.compile(lambda q, k, v, **o: attend(q, k, v, **o), fullgraph=True, dynamic=dynamic)
    ours, theirs = without_lse(compiled), without_lse(attend)
    for one, other in zip(run(ours, tensors, **given), run(theirs, tensors, mask=mask), strict=True):
        assert torch.equal(one, other)


def check_transforms(attend, tensors, two):
    """Asserts that vmap over the tensors, over `two` further arguments and over both has the results of one call for all, and
    that it has the gradient of every sample."""
    whole = attend(*tensors, *two)
    assert torch.equal(torch.vmap(attend)(*tensors, *two), whole)
    one = [t[0] for t in two]
    only = torch.vmap(attend, in_dims=(0, 0, 0, None, None))(*tensors, *one)
    assert torch.equal(only, attend(*tensors, *one))
    alone = torch.vmap(attend, in_dims=(None, None, None, 0, 0))(*(t[0] for t in tensors), *two)
    assert torch.equal(alone[0], whole[0])
    grads = torch.vmap(torch.func.grad(lambda *x: attend(*x).square().sum()))(*tensors, *two)
    leaf = tensors[0].detach().requires_grad_()
    attend(leaf, *tensors[1:], *two).square().sum().backward()
    torch.testing.assert_close(grads, leaf.grad)


def is_floating(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()
