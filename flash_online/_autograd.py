"""How an operator meets autograd: one description, two `torch.autograd.Function` forms.

A Function whose `forward` takes `ctx` costs half of one with `setup_context`, and Dynamo traces it only without `jvp`;
torch.func and forward-mode AD need `setup_context`, `jvp` and a vmap rule. `differentiable` makes both from one class and
calls the raw operator itself where nothing wants a gradient.
"""

from __future__ import annotations

import torch
from torch.autograd import Function, forward_ad


def transforms_active() -> bool:
    """Whether a torch.func transform or a forward-mode AD level is active; never while compiling, where Dynamo has its own."""
    return not torch.compiler.is_compiling() and eager_transforms_active()


def eager_transforms_active() -> bool:
    """The same where nothing compiles."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def differentiable(description):
    """Makes the callable `f(*inputs)` from a class with the static methods

    run(*inputs) -> outputs; save(ctx, inputs, outputs) -> the tensors (or None) that become `ctx.saved_tensors`, beside what
    it keeps in ctx itself; backward(ctx, *grads) -> a gradient an input; jvp(ctx, *tangents) -> a tangent an output.
    """

    class Eager(Function):
        @staticmethod
        def forward(ctx, *inputs):
            outputs = description.run(*inputs)
            ctx.save_for_backward(*description.save(ctx, inputs, outputs))
            return outputs

        backward = staticmethod(description.backward)

    class Transformable(Function):
        generate_vmap_rule = True
        forward = staticmethod(description.run)

        @staticmethod
        def setup_context(ctx, inputs, outputs):
            tensors = description.save(ctx, inputs, outputs)
            ctx.save_for_backward(*tensors)
            if not torch.compiler.is_compiling():
                ctx.save_for_forward(*tensors)

        backward = staticmethod(description.backward)
        jvp = staticmethod(description.jvp)

    Eager.__name__ = Eager.__qualname__ = description.__name__
    Transformable.__name__ = Transformable.__qualname__ = description.__name__ + "Transformable"

    def call(*inputs):
        if transforms_active():
            return Transformable.apply(*inputs)
        if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs):
            return Eager.apply(*(_distinct(inputs) if torch.compiler.is_compiling() else inputs))
        return description.run(*inputs)

    call.__doc__ = description.__doc__
    call.description = description
    return call


def _distinct(inputs):
    """The inputs with a view in the place of a tensor that came before: Dynamo traces no Function with one tensor twice."""
    distinct = []
    for i, value in enumerate(inputs):
        again = isinstance(value, torch.Tensor) and any(value is other for other in inputs[:i])
        distinct.append(value.view_as(value) if again else value)
    return distinct
