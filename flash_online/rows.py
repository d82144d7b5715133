"""Softmax, its logarithm, logsumexp and the top k of a softmax over one dimension of a tensor, each by one
read of its input through the online softmax, each with closed-form first and second derivatives.

Notation of the derivatives: p is the softmax of a row x, <a, b> a sum over the classes, g a cotangent, u a tangent, v the
cotangent of a gradient.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from . import plan
from ._autograd import differentiable
from ._ops import FLOATING, InvalidArgument, UnsupportedDtype, accumulator_of, ops
from ._shapes import autocasts

__all__ = ["log_softmax", "logsumexp", "softmax", "topk_softmax"]

_HALVES = (torch.float16, torch.bfloat16)


def inner_product(a: Tensor, b: Tensor, dim: int) -> Tensor:
    return (a * b).sum(dim, keepdim=True)


def _total(*terms):
    """The sum of the terms that are there, or None."""
    present = [term for term in terms if term is not None]
    if not present:
        return None
    result = present[0]
    for term in present[1:]:
        result = result + term
    return result


def check_tensor(name: str, tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(tensor).__name__}")


def check_floating(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATING:
        raise UnsupportedDtype(f"{name}: dtype {dtype}, expected float16, bfloat16, float32 or float64")


def check_int(name: str, number) -> int:
    if isinstance(number, int) and not isinstance(number, bool):  # first, for Dynamo, to which it may be symbolic
        return number
    if isinstance(number, (bool, Tensor)) or not hasattr(number, "__index__"):
        raise TypeError(f"{name}: expected an int, got {type(number).__name__}")
    return operator.index(number)


def check_float(name: str, number) -> float:
    if isinstance(number, float):
        return number
    if isinstance(number, str) or not hasattr(number, "__float__"):
        raise TypeError(f"{name}: expected a float, got {type(number).__name__}")
    return float(number)


def _check_dim(dim, rank: int) -> int:
    """dim as an index from 0; a scalar counts as one dimension, as everywhere in torch."""
    dim, rank = check_int("dim", dim), max(rank, 1)
    if not -rank <= dim < rank:
        raise IndexError(f"dim: {dim} is out of range, expected {-rank} to {rank - 1}")
    return dim % rank


# --- softmax and log_softmax ------------------------------------------------------------------------------------------------


class Softmax:
    """softmax or its logarithm: (input, dim >= 0, log, dtype of the result)."""

    @staticmethod
    def run(input, dim, log, dtype):
        return ops.softmax_forward.default(input, dim, log, dtype)

    @staticmethod
    def save(ctx, inputs, outputs):
        input, ctx.dim, ctx.log, _ = inputs
        ctx.input_dtype = input.dtype
        return (outputs,)

    @staticmethod
    def backward(ctx, grad):
        (output,) = ctx.saved_tensors
        return _softmax_backward(grad, output, ctx.dim, ctx.log, ctx.input_dtype), None, None, None

    @staticmethod
    def jvp(ctx, u, *_):
        (output,) = ctx.saved_tensors
        if not ctx.log:  # the Jacobian is symmetric: p (u - <p, u>) is what the backward pass computes
            return _softmax_backward(u.to(output.dtype), output, ctx.dim, False, output.dtype)
        dtype = accumulator_of(output.dtype)
        u = u.to(dtype)
        return (u - inner_product(output.to(dtype).exp(), u, ctx.dim)).to(output.dtype)


class SoftmaxBackward:
    """p (g - <p, g>), or for the logarithm y: g - exp(y) <1, g>: (grad, output, dim, log, dtype of the gradient)."""

    @staticmethod
    def run(grad, output, dim, log, input_dtype):
        return ops.softmax_backward.default(grad, output, dim, log, input_dtype)

    @staticmethod
    def save(ctx, inputs, outputs):
        grad, output, ctx.dim, ctx.log, ctx.input_dtype = inputs
        return grad, output

    @staticmethod
    def backward(ctx, v):
        grad, output = ctx.saved_tensors
        dim, dtype = ctx.dim, accumulator_of(output.dtype)
        v, g, y = v.to(dtype), grad.to(dtype), output.to(dtype)
        if ctx.log:
            p = y.exp()
            for_grad = v - inner_product(p, v, dim)
            for_output = -v * p * g.sum(dim, keepdim=True)
        else:
            for_grad = y * (v - inner_product(y, v, dim))
            for_output = v * (g - inner_product(y, g, dim)) - g * inner_product(y, v, dim)
        return for_grad.to(grad.dtype), for_output.to(output.dtype), None, None, None

    @staticmethod
    def jvp(ctx, grad_u, output_u, *_):
        grad, output = ctx.saved_tensors
        dim, dtype = ctx.dim, accumulator_of(output.dtype)
        g, y = grad.to(dtype), output.to(dtype)
        along_grad = along_output = None
        p = y.exp() if ctx.log else y
        if grad_u is not None:
            du = grad_u.to(dtype)
            along_grad = du - p * du.sum(dim, keepdim=True) if ctx.log else y * (du - inner_product(y, du, dim))
        if output_u is not None:
            du = output_u.to(dtype)
            if ctx.log:
                along_output = -p * du * g.sum(dim, keepdim=True)
            else:
                along_output = du * (g - inner_product(y, g, dim)) - y * inner_product(du, g, dim)
        result = _total(along_grad, along_output)
        return None if result is None else result.to(ctx.input_dtype)


softmax_rows = differentiable(Softmax)
_softmax_backward = differentiable(SoftmaxBackward)


def softmax_of(name: str, input, dim, dtype, log: bool) -> Tensor:
    """softmax or log_softmax after the decision that our kernel runs."""
    dim = _check_dim(dim, input.dim())
    if (
        dtype is None and input.is_cuda and autocasts(input)
    ):  # on CUDA softmax is on autocast's float32 list, on the CPU on none
        dtype = torch.float32
    if dtype is None:
        check_floating(f"{name}: input", input.dtype)
        dtype = input.dtype
    else:
        check_floating(f"{name}: result", dtype)
    if input.dtype != dtype and not (dtype == torch.float32 and input.dtype in _HALVES):  # that cast happens in the kernel
        input = input.to(dtype)
    if input.dim() == 0:
        return softmax_rows(input.unsqueeze(0), dim, log, dtype).squeeze(0)
    return softmax_rows(input, dim, log, dtype)


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """exp(input) / sum(exp(input)) along `dim`.

    input: any shape and strides; float16, bfloat16, float32 or float64, or with `dtype` (the result's) anything that casts to
    it: 16-bit inputs are read as they are for a float32 result. The result is contiguous. A row of all -inf, or with a NaN or
    +inf in it, gives NaN. Twice differentiable, in torch.func and forward mode too.

    Raises UnsupportedDtype for another dtype, IndexError for a `dim` out of range, NotImplementedError for tensors that no
    kernel takes. One read of the input by the online softmax: Milakov and Gimelshein, arXiv 1805.02867, section 3.
    """
    check_tensor("input", input)
    plan.require_kernel("softmax", input, dtype=dtype)
    return softmax_of("softmax", input, dim, dtype, False)


def log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """The logarithm of `softmax`, without its rounding; arguments, result and errors as there."""
    check_tensor("input", input)
    plan.require_kernel("log_softmax", input, dtype=dtype)
    return softmax_of("log_softmax", input, dim, dtype, True)


# --- logsumexp --------------------------------------------------------------------------------------------------------------


class LogSumExp:
    """log(sum(exp(input))) along dim, which it drops, in the accumulator type: (input, dim >= 0)."""

    @staticmethod
    def run(input, dim):
        return ops.logsumexp_forward.default(input, dim)

    @staticmethod
    def save(ctx, inputs, outputs):
        input, ctx.dim = inputs
        return (input,)

    @staticmethod
    def backward(ctx, grad):
        (input,) = ctx.saved_tensors
        return _logsumexp_backward(grad, input, ctx.dim), None

    @staticmethod
    def jvp(ctx, u, _):
        (input,) = ctx.saved_tensors
        p = _accumulated_softmax(input, ctx.dim)
        return (p * u.to(p.dtype)).sum(ctx.dim)


class LogSumExpBackward:
    """g p: (grad, input, dim)."""

    @staticmethod
    def run(grad, input, dim):
        return ops.logsumexp_backward.default(grad, input, dim)

    @staticmethod
    def save(ctx, inputs, outputs):
        grad, input, ctx.dim = inputs
        return grad, input

    @staticmethod
    def backward(ctx, v):
        grad, input = ctx.saved_tensors
        p = _accumulated_softmax(input, ctx.dim)
        v = v.to(p.dtype)
        mean = inner_product(p, v, ctx.dim)
        return mean.squeeze(ctx.dim), (grad.unsqueeze(ctx.dim) * p * (v - mean)).to(input.dtype), None

    @staticmethod
    def jvp(ctx, grad_u, input_u, _):
        grad, input = ctx.saved_tensors
        p = _accumulated_softmax(input, ctx.dim)
        along_grad = along_input = None
        if grad_u is not None:
            along_grad = grad_u.unsqueeze(ctx.dim) * p
        if input_u is not None:
            u = input_u.to(p.dtype)
            along_input = grad.unsqueeze(ctx.dim) * p * (u - inner_product(p, u, ctx.dim))
        result = _total(along_grad, along_input)
        return None if result is None else result.to(input.dtype)


logsumexp_rows = differentiable(LogSumExp)
_logsumexp_backward = differentiable(LogSumExpBackward)


def _accumulated_softmax(input: Tensor, dim: int) -> Tensor:
    return softmax_rows(input, dim, False, accumulator_of(input.dtype))


def logsumexp(input: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """log(sum(exp(input))) along `dim`, one dimension or several, which stay with size 1 if `keepdim`.

    input: any shape and strides; float16, bfloat16, float32 or float64, whose dtype the result has, or integers, which are
    taken as torch's default dtype. An empty or all -inf row gives -inf. Twice differentiable, in torch.func too.

    Raises UnsupportedDtype for another dtype, IndexError for a `dim` out of range.
    """
    check_tensor("input", input)
    plan.require_kernel("logsumexp", input)
    if not input.is_floating_point():
        input = input.to(torch.get_default_dtype())
    check_floating("logsumexp: input", input.dtype)
    rank = input.dim()
    dims = [_check_dim(d, rank) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))]
    if not dims or len(set(dims)) != len(dims):
        raise InvalidArgument(f"dim: {dim}, expected one dimension or several different ones")
    if rank == 0:
        return logsumexp_rows(input.unsqueeze(0), 0).to(input.dtype)
    if len(dims) == 1:
        result = logsumexp_rows(input, dims[0])
    else:
        last = range(rank - len(dims), rank)
        result = logsumexp_rows(input.movedim(dims, tuple(last)).flatten(rank - len(dims)), rank - len(dims))
    result = result.to(input.dtype)
    if keepdim:
        for d in sorted(dims):
            result = result.unsqueeze(d)
    return result


# --- the top k of a softmax -------------------------------------------------------------------------------------------------


class TopKSoftmax:
    """(input, k, dim >= 0, renormalize, dtype) -> (probabilities y, indices)."""

    @staticmethod
    def run(input, k, dim, renormalize, dtype):
        return ops.topk_softmax_forward.default(input, k, dim, renormalize, dtype)

    @staticmethod
    def save(ctx, inputs, outputs):
        input, _, ctx.dim, ctx.renormalize, _ = inputs
        ctx.mark_non_differentiable(outputs[1])
        return input, *outputs

    @staticmethod
    def backward(ctx, grad, _):
        input, probabilities, indices = ctx.saved_tensors
        grad_input = _topk_softmax_backward(grad, probabilities, indices, input, ctx.dim, ctx.renormalize)
        return grad_input, None, None, None, None

    @staticmethod
    def jvp(ctx, u, *_):
        input, probabilities, indices = ctx.saved_tensors
        return _topk_tangent(u, probabilities, indices, input, ctx.dim, ctx.renormalize).to(probabilities.dtype), None


class TopKSoftmaxBackward:
    """The gradient of TopKSoftmax: (grad, probabilities, indices, input, dim, renormalize).

    The probabilities are a function of the input: derivatives here are taken with respect to the input as a whole, and none
    with respect to the probabilities.
    """

    @staticmethod
    def run(grad, probabilities, indices, input, dim, renormalize):
        return ops.topk_softmax_backward.default(grad, probabilities, indices, input, dim, renormalize)

    @staticmethod
    def save(ctx, inputs, outputs):
        *tensors, ctx.dim, ctx.renormalize = inputs
        return tensors

    @staticmethod
    def backward(ctx, v):
        grad, probabilities, indices, input = ctx.saved_tensors
        for_grad = _topk_tangent(v, probabilities, indices, input, ctx.dim, ctx.renormalize).to(grad.dtype)
        for_input = _topk_second(grad, v, probabilities, indices, input, ctx.dim, ctx.renormalize)
        return for_grad, None, None, for_input, None, None

    @staticmethod
    def jvp(ctx, grad_u, probabilities_u, indices_u, input_u, *_):
        grad, probabilities, indices, input = ctx.saved_tensors
        along_grad = along_input = None
        if grad_u is not None:
            along_grad = _topk_softmax_backward(grad_u, probabilities, indices, input, ctx.dim, ctx.renormalize)
        if input_u is not None:  # the matrix of second derivatives is symmetric
            along_input = _topk_second(grad, input_u, probabilities, indices, input, ctx.dim, ctx.renormalize)
        return _total(along_grad, along_input)


_topk_softmax = differentiable(TopKSoftmax)
_topk_softmax_backward = differentiable(TopKSoftmaxBackward)


def _topk_parts(u, probabilities, indices, input, dim: int, renormalize: bool):
    """u at the indices, less its mean under p (under y, renormalized); and p, or None where only the top k matters."""
    dtype = accumulator_of(input.dtype)
    u = u.to(dtype)
    chosen = u.gather(dim, indices)
    if renormalize:
        return chosen - inner_product(probabilities.to(dtype), chosen, dim), None
    p = _accumulated_softmax(input, dim)
    return chosen - inner_product(p, u, dim), p


def _topk_tangent(u, probabilities, indices, input, dim: int, renormalize: bool) -> Tensor:
    centred, _ = _topk_parts(u, probabilities, indices, input, dim, renormalize)
    return probabilities.to(centred.dtype) * centred


def _topk_second(grad, v, probabilities, indices, input, dim: int, renormalize: bool) -> Tensor:
    """The derivative of <v, gradient> in the input.

    With c the centred v at the indices, <v, gradient> = sum_j y_j g_j c_j: once y moves, with the cotangent h = g c, and once
    the mean in c does.
    """
    centred, p = _topk_parts(v, probabilities, indices, input, dim, renormalize)
    g, y = grad.to(centred.dtype), probabilities.to(centred.dtype)
    inner = inner_product(g, y, dim)
    h = g * centred
    hy = inner_product(h, y, dim)
    if renormalize:
        at_indices = y * (h - hy) - inner * y * centred
        result = torch.zeros_like(input, dtype=y.dtype).scatter(dim, indices, at_indices)
    else:
        v = v.to(y.dtype)
        result = (-p * hy - inner * p * (v - inner_product(p, v, dim))).scatter_add(dim, indices, y * h)
    return result.to(input.dtype)


def topk_softmax(
    input: Tensor, k: int, dim: int = -1, *, renormalize: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The k largest probabilities of the softmax along `dim`, descending, and their indices (int64); ties in any order.

    input: any shape and strides, as for `softmax`, `dtype` too. Both results have size k along `dim`. `renormalize` divides
    the probabilities by their sum. One read of the input; the probabilities are twice differentiable.

    Raises InvalidArgument unless 0 <= k <= input.shape[dim], otherwise as `softmax`.
    """
    check_tensor("input", input)
    plan.require_kernel("topk_softmax", input, dtype=dtype)
    dim = _check_dim(dim, input.dim())
    if dtype is None:
        dtype = input.dtype
    check_floating("topk_softmax: result" if input.is_floating_point() else "topk_softmax: input", dtype)
    k = check_int("k", k)
    classes = input.shape[dim] if input.dim() else 1
    if k < 0 or k > classes:
        raise InvalidArgument(f"k: {k}, expected 0 to the {classes} elements of dimension {dim}")
    if input.dtype != dtype and not (dtype == torch.float32 and input.dtype in _HALVES):
        input = input.to(dtype)
    if input.dim() == 0:
        probabilities, indices = _topk_softmax(input.unsqueeze(0), k, dim, bool(renormalize), dtype)
        return (probabilities.squeeze(0), indices.squeeze(0)) if k else (probabilities, indices)
    return _topk_softmax(input, k, dim, bool(renormalize), dtype)
