"""Ways to differentiate a function of tensors, and ways for it to reach what differentiates it: called, compiled, exported
and traced."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from flash_online._ops import accumulator_of

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def results_of(found) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [t for t in found if t is not None]


def scalar_of(function: Function) -> Callable[..., Tensor]:
    """A number that depends on every element of every result, and on a large one's rounding no more than on a small one's."""

    def scalar(*inputs):
        parts = [t.to(accumulator_of(t.dtype)).square().log1p().sum() for t in results_of(function(*inputs))]
        return functools.reduce(torch.add, parts)

    return scalar


def first_of(function: Function) -> Callable[..., Tensor]:
    return lambda *inputs: results_of(function(*inputs))[0]


def tangents_of(leaves) -> tuple[Tensor, ...]:
    return tuple((3 * leaf).cos() for leaf in leaves)


def cotangent_of(result: Tensor) -> Tensor:
    return 1 / (1 + result.square())


def samples_of(leaves) -> list[Tensor]:
    """Three samples of each leaf, along a new first dimension."""
    return [torch.stack([leaf, 0.5 * leaf, -leaf]) for leaf in leaves]


# --- transforms: (function of leaves, leaves) -> tensors ----------------------------------------------------------------------


def gradient(function, leaves):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(scalar_of(function)(*leaves), leaves)


def func_grad(function, leaves):
    return torch.func.grad(scalar_of(function), tuple(range(len(leaves))))(*leaves)


def func_vjp(function, leaves):
    results, pull = torch.func.vjp(function, *leaves)
    return pull(tuple(map(cotangent_of, results)) if isinstance(results, tuple) else cotangent_of(results))


def func_jvp(function, leaves):
    results, tangents = torch.func.jvp(function, tuple(leaves), tangents_of(leaves))
    return [*results_of(results), *results_of(tangents)]


def dual_numbers(function, leaves):
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(leaf, tangent) for leaf, tangent in zip(leaves, tangents_of(leaves), strict=True)]
        tangents = [forward_ad.unpack_dual(t).tangent for t in results_of(function(*duals))]
        assert all(tangent is not None for tangent in tangents), "a tangent is missing"
        return tangents


def vmapped(function, leaves):
    return results_of(torch.vmap(function)(*samples_of(leaves)))


def per_sample(function, leaves):
    return torch.vmap(torch.func.grad(scalar_of(function), tuple(range(len(leaves)))))(*samples_of(leaves))


def jacobian(function, leaves):
    return torch.func.jacrev(first_of(function), tuple(range(len(leaves))))(*leaves)


def forward_jacobian(function, leaves):
    return [torch.func.jacfwd(first_of(function))(*leaves)]


def hessian(function, leaves):
    return [torch.func.hessian(scalar_of(function))(*leaves)]


def double_backward(function, leaves):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    first = torch.autograd.grad(scalar_of(function)(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(functools.reduce(torch.add, [g.square().sum() for g in first]), leaves)


def vectorized_jacobian(function, leaves):
    """jacobian(vectorize=True, create_graph=True) in the first leaf, and its own derivatives in all of them."""
    first, *others = leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    found = torch.autograd.functional.jacobian(
        lambda x: first_of(function)(x, *others), first, vectorize=True, create_graph=True
    )
    second = torch.autograd.grad(found.square().sum(), leaves, allow_unused=True)  # the result may be linear in a leaf
    return [found, *(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(second, leaves, strict=True))]


TRANSFORMS = {
    "gradient": gradient,
    "func.grad": func_grad,
    "func.vjp": func_vjp,
    "func.jvp": func_jvp,
    "dual numbers": dual_numbers,
    "vmap": vmapped,
    "per-sample gradient": per_sample,
    "jacrev": jacobian,
    "jacfwd": forward_jacobian,
    "hessian": hessian,
    "double backward": double_backward,
    "vectorized jacobian": vectorized_jacobian,
}


# --- ways: a function as the graph that a tracer makes of it, a function again; `count` inputs are leaves --------------------


def eager(function, inputs, count):
    return function


def compiled(function, inputs, count):
    torch._dynamo.reset()
    graph = torch.compile(function, fullgraph=True, backend="aot_eager")

    def call(*given):
        with torch._dynamo.config.patch(trace_autograd_ops=True):  # torch.autograd.grad inside of what is compiled
            return graph(*given)

    return call


class Trained(torch.nn.Module):
    """A function as a module whose parameters are the leaves."""

    def __init__(self, function, inputs, count):
        super().__init__()
        self.function, self.names = function, [f"input{i}" for i in range(len(inputs))]
        for i, (name, tensor) in enumerate(zip(self.names, inputs, strict=True)):
            if i < count:
                self.register_parameter(name, torch.nn.Parameter(tensor.detach().clone()))
            else:
                self.register_buffer(name, tensor)

    def forward(self, one):
        first, *others = (getattr(self, name) for name in self.names)
        return self.function(first * one, *others)


def exported(function, inputs, count, strict):
    """An exported module's function of its parameters: what training it differentiates."""
    model = Trained(function, inputs, count)
    one = torch.ones((), device=inputs[0].device, dtype=inputs[0].dtype)
    program = torch.export.export(model, (one,), strict=strict).module()
    return lambda *given: torch.func.functional_call(program, dict(zip(model.names, given, strict=True)), (one,))


def made_fx(function, inputs, count, tracing_mode="real"):
    return make_fx(function, tracing_mode=tracing_mode)(*inputs)


def traced(function, inputs, count):
    """Traced by TorchScript on leaves that require grad, saved and loaded again."""
    example = tuple(t.detach().requires_grad_(i < count) for i, t in enumerate(inputs))
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(function, example), file)
    file.seek(0)
    return torch.jit.load(file)


WAYS = {
    "eager": eager,
    "compile": compiled,
    "export": functools.partial(exported, strict=False),
    "export strict": functools.partial(exported, strict=True),
    "make_fx": made_fx,
    "make_fx symbolic": functools.partial(made_fx, tracing_mode="symbolic"),
    "jit.trace": traced,
}

# Ways that a whole transformed function can go.
INSIDE = {
    "inside compile": compiled,
    "inside make_fx": made_fx,
    "inside make_fx symbolic": functools.partial(made_fx, tracing_mode="symbolic"),
}

# Ways whose graph holds for other sizes than those that it was made with.
OTHER_SIZES = {"make_fx symbolic", "inside make_fx symbolic", "jit.trace"}
