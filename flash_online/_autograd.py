"""Registers operators with autograd: one description becomes two `torch.autograd.Function` classes.

A Function whose `forward` takes `ctx` costs half as much per call as one with `setup_context`, and Dynamo traces it only if it
has no `jvp`. torch.func and forward-mode AD need `setup_context`, `jvp` and a vmap rule. `differentiable` makes both forms
from one class, and calls the raw operator directly where no gradient is needed.
"""

from __future__ import annotations

import torch
from torch.autograd import Function, forward_ad

from ._ops import surfaced


def transforms_active() -> bool:
    """Whether a torch.func transform or a forward-mode AD level is active. False while compiling: Dynamo handles its own."""
    return not torch.compiler.is_compiling() and eager_transforms_active()


def eager_transforms_active() -> bool:
    """`transforms_active` for a caller that knows that nothing is being compiled."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class _Leaf:
    """Holds a tuple of options that torch.func shall pass on whole: taken apart, as it takes apart every tuple among a
    Function's inputs, the options would be counted as inputs in the jvp of a vmapped Function, and be too many."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def _packed(inputs):
    return tuple(_Leaf(value) if isinstance(value, tuple) else value for value in inputs)


def _unpacked(inputs):
    return tuple(value.value if type(value) is _Leaf else value for value in inputs)


def differentiable(description):
    """Makes a callable `f(*inputs) -> outputs`, with tensors, numbers and tuples of numbers for inputs, from a class with four
    static methods:

    run(*inputs) -> outputs;
    save(ctx, inputs, outputs) -> the tensors (or None) that become `ctx.saved_tensors`; other values it may set on ctx;
    backward(ctx, *grads) -> one gradient per input;
    jvp(ctx, *tangents) -> one tangent per output.
    """

    def run(*inputs):
        try:
            return description.run(*inputs)
        except RuntimeError as error:
            raise surfaced(error, *inputs) from None

    class Eager(Function):
        @staticmethod
        def forward(ctx, *inputs):
            outputs = run(*inputs)
            ctx.save_for_backward(*description.save(ctx, inputs, outputs))
            return outputs

        backward = staticmethod(description.backward)

    class Transformable(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs):
            return run(*_unpacked(inputs))

        @staticmethod
        def setup_context(ctx, inputs, outputs):
            tensors = description.save(ctx, _unpacked(inputs), outputs)
            ctx.save_for_backward(*tensors)
            if not torch.compiler.is_compiling():
                ctx.save_for_forward(*tensors)

        backward = staticmethod(description.backward)
        jvp = staticmethod(description.jvp)

    Eager.__name__ = Eager.__qualname__ = description.__name__
    Transformable.__name__ = Transformable.__qualname__ = description.__name__ + "Transformable"

    def call(*inputs):
        if transforms_active():
            return Transformable.apply(*_packed(inputs))
        if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs):
            return Eager.apply(*(_distinct(inputs) if torch.compiler.is_compiling() else inputs))
        return run(*inputs)

    call.__doc__ = description.__doc__
    call.description = description
    return call


def plain_apply(function):
    """`function.apply` for calls outside torch.func and Dynamo of a Function whose `forward` takes ctx. It is torch's apply in
    C++, without the wrapper in Python around it; and autograd calls `backward` without the one around that. The wrappers look
    for what such a Function does not have, and cost some microseconds per call. The caller unwraps tensors that require a
    gradient (`unwrap_if_dead`)."""
    node = getattr(function, "_backward_cls", None)  # not a public name: without it `backward` is called as usual
    if node is not None:
        node.apply = function.backward
    return super(Function, function).apply


# The tensor itself, or what it wraps if it has outlived a transform of torch.func.
unwrap_if_dead = torch._C._functorch.unwrap_if_dead


def _distinct(inputs):
    """The inputs, with a view in place of each repeated tensor: Dynamo cannot trace a Function that gets one tensor twice."""
    distinct = []
    for i, value in enumerate(inputs):
        repeated = isinstance(value, torch.Tensor) and any(value is other for other in inputs[:i])
        distinct.append(value.view_as(value) if repeated else value)
    return distinct
