"""Registers the derivatives of the raw operators with torch's dispatcher, so that every use of an operator is differentiable:
eager calls, graphs of torch.compile, torch.export, make_fx and torch.jit.trace, torch.func, and forward mode.

Each operator `flash_online::name` has a Python kernel for the Autograd key. Without a request for a derivative it calls the
operator below that key; otherwise the autograd.Function that `differentiable` builds from a description, or the differentiable
operations registered with `composite`.

Eager calls take a shorter path: `differentiable` returns a callable that checks for a derivative before the dispatcher does,
and calls the same Function or `name.below_autograd`, the operator's second overload, which has no kernel for that key
(csrc/ops/operators.h). Under a tracer or a TorchDispatchMode the second overload calls the first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._guards import TracingContext
from torch.autograd import Function, forward_ad

from ._checks import has_tangent
from ._ops import _fragment, below_autograd, call_below, ops, surfaced, without_autocast
from ._policy import traced_by_jit

_any_transforms, _is_grad_enabled = torch._C._are_functorch_transforms_active, torch.is_grad_enabled
_is_key_included, _BATCHED_GRADIENTS = torch._C._dispatch_tls_is_dispatch_key_included, torch._C._parse_dispatch_key("VmapMode")


def transforms_active() -> bool:
    """Returns whether a torch.func transform or a forward-mode AD level is active. False while compiling, since the graph holds
    the operators, which have derivatives."""
    return not torch.compiler.is_compiling() and eager_transforms_active()


def eager_transforms_active() -> bool:
    """`transforms_active` for callers that know that nothing is being compiled."""
    return _any_transforms() or forward_ad._current_level >= 0


def traces_transforms() -> bool:
    """Returns whether the code being compiled is inside a torch.func transform of the same graph. Dynamo calls this while
    tracing."""
    return _any_transforms()


traces_transforms._dynamo_marked_constant = True


def dispatches() -> bool:
    """Returns whether a call must go through the dispatcher's Autograd key: while compiling or tracing with torch.jit, since
    the graph must hold the operator and no autograd.Function, and under transforms that only the dispatcher handles:
    torch.func, forward mode, and autograd.grad(is_grads_batched=True)."""
    if torch.compiler.is_compiling() or traced_by_jit() is not None or eager_transforms_active():
        return True
    return _is_key_included(_BATCHED_GRADIENTS)


def is_traced() -> bool:
    """Returns whether the compiler, another tracer, a transform or a mode sees this call. Sizes may then be symbolic, which no
    cache holds, and nothing that was saved may be written."""
    return dispatches() or torch._C._len_torch_dispatch_stack() > 0


def requires_grad(tensors) -> bool:
    """Returns whether autograd records a call with these arguments."""
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


class Description:
    """Describes an operator's derivative for `differentiable`.

    `operator` is the raw operator, which returns one or more tensors. `inputs` are its arguments in the form that the other
    methods take, by default unchanged; a list of tensors is flattened.
    """

    operator: torch._ops.OpOverloadPacket

    @staticmethod
    def inputs(*arguments):
        """The operator's arguments, all of them, as inputs."""
        return arguments

    @staticmethod
    def arguments(*inputs):
        """Inputs as the operator's arguments."""
        return inputs

    @staticmethod
    def check(*inputs) -> None:
        """Raises if an input requires a gradient that the operator does not have."""

    @staticmethod
    def save(ctx, inputs, outputs):
        """Returns the tensors (or None) for `ctx.saved_tensors`; may set other values on ctx."""
        raise NotImplementedError

    @staticmethod
    def backward(ctx, *grads):
        """One gradient per input."""
        raise NotImplementedError

    @staticmethod
    def jvp(ctx, *tangents):
        """One tangent per output; an input without a tangent passes None."""
        raise NotImplementedError


def differentiable(description: type[Description], compute=None):
    """Registers the derivative of `description.operator`, and returns a callable `f(*inputs) -> outputs`. If `compute` is
    given, `compute(*inputs)` computes eager calls, with outputs equal to the operator's, and nothing is registered."""
    operator = description.operator.default
    run_below = below_autograd(description.operator)

    def run(*inputs):
        return run_below(*description.arguments(*inputs))

    if compute is not None:
        run = compute

    class Derived(Function):
        @staticmethod
        def forward(ctx, *inputs):
            if eager_transforms_active():
                # This Function handles one level of torch.func. The operator goes on to the next level, so turn on the
                # derivatives that autograd turns off inside a Function. The overload without a derivative would drop the next
                # levels.
                with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                    outputs = operator(*description.arguments(*inputs))
                tensors = description.save(ctx, inputs, outputs)
                ctx.save_for_forward(*tensors)
            else:
                outputs = run(*inputs)
                tensors = description.save(ctx, inputs, outputs)
            ctx.save_for_backward(*tensors)
            return outputs

        backward = staticmethod(description.backward)
        jvp = staticmethod(description.jvp)

    Derived.__name__ = Derived.__qualname__ = description.__name__
    apply = plain_apply(Derived)

    def apply_at_level(*arguments):
        inputs = description.inputs(*arguments)
        description.check(*inputs)
        if not _any_transforms():
            return apply(*inputs)
        with enable_single_level_autograd_function():
            return apply(*inputs)

    if compute is None:
        _register_autograd(operator, apply_at_level)

    def call(*inputs):
        if dispatches():
            return dispatch(operator, *description.arguments(*inputs))
        try:
            if requires_grad(inputs):
                return apply(*(unwrap_if_dead(value) if isinstance(value, Tensor) else value for value in inputs))
            return run(*inputs)
        except RuntimeError as error:
            raise surfaced(error, *inputs) from None

    call.__doc__ = description.__doc__
    return call


def lean(name: str, run, run_backward, derived_backward):
    """Returns `apply(*tensors, options) -> result`, the short form of `differentiable` for eager calls outside torch.func and
    forward mode. Each input and output of a Function costs time, and so does each line of its `backward`, which on CUDA runs in
    a thread of autograd's own.

    `run(*tensors, options)` returns (result, saved tensors, options of the backward pass). `run_backward(grad, *saved,
    *options)` is an operator and returns the gradients of `tensors`. `derived_backward` is its differentiable form, for
    create_graph=True. `name` is the Function's.
    """

    def forward(ctx, *inputs):
        result, saved, ctx.options = run(*inputs)
        ctx.save_for_backward(*saved)
        return result

    def backward(ctx, grad):
        saved = ctx.saved_tensors
        if _is_grad_enabled():
            grads = derived_backward(grad, *saved, *ctx.options)
        else:
            try:
                grads = run_backward(grad, *saved, *ctx.options)
            except RuntimeError as error:
                raise surfaced(error, grad) from None
        return (*grads, None) if type(grads) is tuple else (grads, None)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return plain_apply(type(Function)(name, (Function,), members))  # grad_fn has the name that the class is created with


def composite(operator: torch._ops.OpOverloadPacket):
    """Registers the decorated function to compute the operator if a derivative is requested: it has the operator's arguments
    and results, and uses differentiable operations."""

    def decorate(function):
        _register_autograd(operator.default, function)
        return function

    return decorate


def without_derivative(operator: torch._ops.OpOverloadPacket, reason: str) -> None:
    """Makes a derivative of this operator an error, which gives `reason`."""

    def refuse(*arguments):
        tensors = (one for given in arguments for one in (given if isinstance(given, (list, tuple)) else (given,)))
        if any(map(is_differentiated, tensors)):
            raise NotImplementedError(
                f"{operator._qualified_op_name}: expected inputs without a derivative, got one with a derivative; {reason}"
            )
        return call_below(operator, *arguments)

    _register_autograd(operator.default, refuse)


def is_differentiated(value) -> bool:
    """Returns whether this is a tensor that the call is differentiated with respect to, by autograd or in forward mode."""
    return isinstance(value, Tensor) and (has_tangent(value) or value.requires_grad and torch.is_grad_enabled())


def _register_autograd(operator: torch._ops.OpOverload, derived) -> None:
    """Registers the kernel of the Autograd key: `derived(*arguments)` if a derivative may be requested, else the operator below
    that key."""
    defaults = [argument.default_value for argument in operator._schema.arguments if argument.has_default_value()]
    count, name = len(operator._schema.arguments), operator._schema.name.removeprefix("flash_online::")
    run_below = below_autograd(getattr(ops, name))

    def kernel(*arguments):
        if eager_transforms_active() or torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            missing = count - len(arguments)  # the dispatcher leaves out arguments at the end that are equal to their defaults
            return derived(*arguments, *(defaults[-missing:] if missing else ()))
        if TracingContext.try_get() is not None and _level_is_open():  # an operator that the user calls; see dispatch
            return _in_dual_level(operator, *arguments)
        return run_below(*arguments)

    _fragment.impl(name, kernel, "Autograd")


def _level_is_open() -> bool:
    """Returns whether a level of forward-mode AD is open. Torch has no query for this, but refuses to open a second level.
    Levels are global to the process, so only the compiler, which uses one thread, may call this."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level=level)
    return False


def dispatch(operator: torch._ops.OpOverload, *arguments):
    """Calls `operator(*arguments)` with autocast off: torch.func would turn it on again inside a derivative.

    Dynamo traces forward_ad.dual_level into a graph that enters the level without setting forward_ad._current_level, which the
    kernels above read. `_in_dual_level` sets it in such a graph."""
    if torch.compiler.is_compiling():
        return _in_dual_level(operator, *arguments) if _traces_dual_level() else operator(*arguments)
    with torch._C._DisableAutocast():
        return operator(*arguments)


@without_autocast
def _in_dual_level(operator: torch._ops.OpOverload, *arguments):
    level, forward_ad._current_level = forward_ad._current_level, 0  # there is one level at most
    try:
        return operator(*arguments)
    finally:
        forward_ad._current_level = level


def _traces_dual_level() -> bool:
    active = forward_ad._current_level >= 0
    if active:
        torch._dynamo.allow_in_graph(_in_dual_level)  # here, since the compiler takes a second to import
    return active


_traces_dual_level._dynamo_marked_constant = True  # Dynamo calls it while tracing; it guards every graph by the level


def plain_apply(function):
    """`function.apply`, for use outside Dynamo, of a Function with a `forward` that takes ctx: torch's apply in C++ without its
    Python wrapper. Autograd calls `backward` without a wrapper too. The wrappers handle features that such a Function does not
    use, and cost a few microseconds per call. The caller unwraps tensors that require a gradient (`unwrap_if_dead`)."""
    node = getattr(function, "_backward_cls", None)  # not a public name: without it `backward` is called as usual
    if node is not None:
        node.apply = function.backward
    return super(Function, function).apply


# The tensor itself, or the tensor inside if a wrapper has outlived its torch.func transform.
unwrap_if_dead = torch._C._functorch.unwrap_if_dead
