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


def is_floating(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()
