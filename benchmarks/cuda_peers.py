"""CUDA-only peers of the row functions: torch.compile, quack (CuTe DSL) and Liger (Triton), if installed.

quack and Liger have no logsumexp, no log_softmax and no top k of the whole row's softmax: quack's top k takes rows of up to
4096 classes, a power of two, and its softmax is over the k.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as torch_functional

from .peers import Provider, Unavailable


@dataclass(frozen=True)
class OptionalProvider(Provider):
    """A provider that may not be installed. If its first step, forward and backward, raises, the error is the reason."""

    prepare: Callable[[], None] = lambda: None

    def first_call(self, inputs, extras, options):
        try:
            self.prepare()
            out = self.call(inputs, extras, options)
            torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "")
            raise Unavailable(f"{type(error).__name__}: {first_line}") from None
        return out


def compiled(function) -> OptionalProvider:
    """torch.compile of a function, compiled again for each case: torch gives up compiling one function for many shapes."""
    made = []

    def prepare():
        torch.compiler.reset()
        # The timer reuses a step's graph for its next sample, so the graph must not donate its buffers.
        torch._functorch.config.donated_buffer = False
        made[:] = [torch.compile(function, dynamic=False)]

    return OptionalProvider(lambda x, extras, options: made[0](x[0], *extras, **options), nullcontext, prepare=prepare)


def _quack_softmax(x, _, options):
    from quack import softmax

    return softmax(x[0])


def _quack_cross_entropy(x, target, options):
    from quack import cross_entropy

    return cross_entropy(x[0], target[0])


def _liger_softmax(x, _, options):
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x[0])


class _StandIn(torch.autograd.Function):
    """Returns the values of `other`; the gradient goes to x."""

    @staticmethod
    def forward(ctx, x, other):
        return other[0].detach()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class LigerCrossEntropy:
    """Calls Liger on a copy of the input, since Liger overwrites its input with the gradient. The first call of a sample, which
    is a warm-up, renews the copy. Liger's forward pass also computes the gradient; its backward pass scales it."""

    def __init__(self):
        self.copy, self.fresh = [], False

    @contextmanager
    def setting(self):
        self.fresh = False
        yield

    def call(self, x, target, options):
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        return LigerCrossEntropyFunction.apply(self.stand_in(x[0]), target[0], None)[0]

    def stand_in(self, x):
        if not self.copy or self.copy[0].shape != x.shape or self.copy[0].dtype != x.dtype:
            self.copy = [torch.empty_like(x, requires_grad=False)]
        if not self.fresh:
            self.copy[0].data.copy_(x.detach())  # hidden from autograd, like Liger's write, so the timer can reuse the graph
            self.fresh = True
        return _StandIn.apply(x, self.copy)


_liger_cross_entropy = LigerCrossEntropy()

CUDA_PEERS = {
    "softmax": {
        "torch.compile": compiled(lambda x: torch_functional.softmax(x, -1)),
        "quack": OptionalProvider(_quack_softmax, nullcontext),
        "Liger": OptionalProvider(_liger_softmax, nullcontext),
    },
    "log_softmax": {"torch.compile": compiled(lambda x: torch_functional.log_softmax(x, -1))},
    "cross_entropy": {
        "torch.compile": compiled(lambda x, target: torch_functional.cross_entropy(x, target)),
        "quack": OptionalProvider(_quack_cross_entropy, nullcontext),
        "Liger": OptionalProvider(_liger_cross_entropy.call, _liger_cross_entropy.setting, waits=True),
    },
    "logsumexp": {"torch.compile": compiled(lambda x: torch.logsumexp(x, -1))},
    "topk_softmax": {"torch.compile": compiled(lambda x, k: torch.topk(torch.softmax(x, -1), k)[0])},
}
