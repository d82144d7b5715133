"""Peers of the row functions on CUDA alone: torch.compile, quack (CuTe DSL) and Liger (Triton), where they are installed.

quack and Liger have no logsumexp, no log_softmax and no top k of a whole row's softmax: quack's top k takes rows of up to 4096
classes, a power of two, and its softmax is over the k.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as torch_functional
from peers import Absent, Contestant


@dataclass(frozen=True)
class Guest(Contestant):
    """Whatever it raises in its first step, forward and backward, makes it absent, with that for a reason."""

    prepare: Callable[[], None] = lambda: None

    def first_call(self, inputs, extras, options):
        try:
            self.prepare()
            out = self.call(inputs, extras, options)
            torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "")
            raise Absent(f"{type(error).__name__}: {first_line}") from None
        return out


def compiled(function) -> Guest:
    """torch.compile of a function, made anew for each case: one function compiled for many shapes ends up uncompiled."""
    made = []

    def prepare():
        torch.compiler.reset()
        # A step's graph is kept for the next turn, and such a graph may not hand out its buffers.
        torch._functorch.config.donated_buffer = False
        made[:] = [torch.compile(function, dynamic=False)]

    return Guest(lambda x, extras, options: made[0](x[0], *extras, **options), nullcontext, prepare=prepare)


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
    """Another tensor's values under this one's name: the gradient goes to x."""

    @staticmethod
    def forward(ctx, x, other):
        return other[0].detach()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class LigerCrossEntropy:
    """Works on a copy, as Liger writes the gradient over its input, which the others need as it was. The copy is renewed by
    the first call of a turn, which only warms up. Liger's forward pass makes the gradient too; its backward pass scales it."""

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
            self.copy[0].data.copy_(x.detach())  # unseen by autograd, as is Liger's writing: a kept graph stays usable
            self.fresh = True
        return _StandIn.apply(x, self.copy)


_liger_cross_entropy = LigerCrossEntropy()

CUDA_PEERS = {
    "softmax": {
        "torch.compile": compiled(lambda x: torch_functional.softmax(x, -1)),
        "quack": Guest(_quack_softmax, nullcontext),
        "Liger": Guest(_liger_softmax, nullcontext),
    },
    "log_softmax": {"torch.compile": compiled(lambda x: torch_functional.log_softmax(x, -1))},
    "cross_entropy": {
        "torch.compile": compiled(lambda x, target: torch_functional.cross_entropy(x, target)),
        "quack": Guest(_quack_cross_entropy, nullcontext),
        "Liger": Guest(_liger_cross_entropy.call, _liger_cross_entropy.setting, waits=True),
    },
    "logsumexp": {"torch.compile": compiled(lambda x: torch.logsumexp(x, -1))},
    "topk_softmax": {"torch.compile": compiled(lambda x, k: torch.topk(torch.softmax(x, -1), k)[0])},
}
