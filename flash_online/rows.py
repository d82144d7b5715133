"""Softmax, its logarithm, logsumexp, the top k of a softmax and cross-entropy over one dimension of a tensor, each by one
read of its input through the online softmax, each with closed-form first and second derivatives.

Notation of the derivatives: p is the softmax of a row x, <a, b> a sum over the classes, g a cotangent, u a tangent, v the
cotangent of a gradient.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.nn import _reduction

from . import plan
from ._autograd import differentiable, save_tensors, transforms_active
from ._ops import FLOATING, InvalidArgument, UnsupportedDtype, accumulator_of, ops
from ._shapes import autocasts

__all__ = ["cross_entropy", "log_softmax", "logsumexp", "softmax", "topk_softmax"]

_HALVES = (torch.float16, torch.bfloat16)


def _inner(a: Tensor, b: Tensor, dim: int) -> Tensor:
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


def _check_floating(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATING:
        raise UnsupportedDtype(f"{name}: dtype {dtype}, expected float16, bfloat16, float32 or float64")


def _check_int(name: str, number) -> int:
    if isinstance(number, int) and not isinstance(number, bool):  # first, for Dynamo, to which it may be symbolic
        return number
    if isinstance(number, (bool, Tensor)) or not hasattr(number, "__index__"):
        raise TypeError(f"{name}: expected an int, got {type(number).__name__}")
    return operator.index(number)


def _check_float(name: str, number) -> float:
    if isinstance(number, float):
        return number
    if isinstance(number, str) or not hasattr(number, "__float__"):
        raise TypeError(f"{name}: expected a float, got {type(number).__name__}")
    return float(number)


def _check_dim(dim, rank: int) -> int:
    """dim as an index from 0; a scalar counts as one dimension, as everywhere in torch."""
    dim, rank = _check_int("dim", dim), max(rank, 1)
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
        save_tensors(ctx, outputs)

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
        return (u - _inner(output.to(dtype).exp(), u, ctx.dim)).to(output.dtype)


class SoftmaxBackward:
    """p (g - <p, g>), or for the logarithm y: g - exp(y) <1, g>: (grad, output, dim, log, dtype of the gradient)."""

    @staticmethod
    def run(grad, output, dim, log, input_dtype):
        return ops.softmax_backward.default(grad, output, dim, log, input_dtype)

    @staticmethod
    def save(ctx, inputs, outputs):
        grad, output, ctx.dim, ctx.log, ctx.input_dtype = inputs
        save_tensors(ctx, grad, output)

    @staticmethod
    def backward(ctx, v):
        grad, output = ctx.saved_tensors
        dim, dtype = ctx.dim, accumulator_of(output.dtype)
        v, g, y = v.to(dtype), grad.to(dtype), output.to(dtype)
        if ctx.log:
            p = y.exp()
            for_grad = v - _inner(p, v, dim)
            for_output = -v * p * g.sum(dim, keepdim=True)
        else:
            for_grad = y * (v - _inner(y, v, dim))
            for_output = v * (g - _inner(y, g, dim)) - g * _inner(y, v, dim)
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
            along_grad = du - p * du.sum(dim, keepdim=True) if ctx.log else y * (du - _inner(y, du, dim))
        if output_u is not None:
            du = output_u.to(dtype)
            if ctx.log:
                along_output = -p * du * g.sum(dim, keepdim=True)
            else:
                along_output = du * (g - _inner(y, g, dim)) - y * _inner(du, g, dim)
        result = _total(along_grad, along_output)
        return None if result is None else result.to(ctx.input_dtype)


_softmax = differentiable(Softmax)
_softmax_backward = differentiable(SoftmaxBackward)


def softmax_of(name: str, input, dim, dtype, log: bool) -> Tensor:
    """softmax or log_softmax after the decision that our kernel runs."""
    dim = _check_dim(dim, input.dim())
    if (
        dtype is None and input.is_cuda and autocasts(input)
    ):  # on CUDA softmax is on autocast's float32 list, on the CPU on none
        dtype = torch.float32
    if dtype is None:
        _check_floating(f"{name}: input", input.dtype)
        dtype = input.dtype
    else:
        _check_floating(f"{name}: result", dtype)
    if input.dtype != dtype and not (dtype == torch.float32 and input.dtype in _HALVES):  # that cast happens in the kernel
        input = input.to(dtype)
    if input.dim() == 0:
        return _softmax(input.unsqueeze(0), dim, log, dtype).squeeze(0)
    return _softmax(input, dim, log, dtype)


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
        save_tensors(ctx, input)

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
        save_tensors(ctx, grad, input)

    @staticmethod
    def backward(ctx, v):
        grad, input = ctx.saved_tensors
        p = _accumulated_softmax(input, ctx.dim)
        v = v.to(p.dtype)
        mean = _inner(p, v, ctx.dim)
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
            along_input = grad.unsqueeze(ctx.dim) * p * (u - _inner(p, u, ctx.dim))
        result = _total(along_grad, along_input)
        return None if result is None else result.to(input.dtype)


_logsumexp = differentiable(LogSumExp)
_logsumexp_backward = differentiable(LogSumExpBackward)


def _accumulated_softmax(input: Tensor, dim: int) -> Tensor:
    return _softmax(input, dim, False, accumulator_of(input.dtype))


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
    _check_floating("logsumexp: input", input.dtype)
    rank = input.dim()
    dims = [_check_dim(d, rank) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))]
    if not dims or len(set(dims)) != len(dims):
        raise InvalidArgument(f"dim: {dim}, expected one dimension or several different ones")
    if rank == 0:
        return _logsumexp(input.unsqueeze(0), 0).to(input.dtype)
    if len(dims) == 1:
        result = _logsumexp(input, dims[0])
    else:
        last = range(rank - len(dims), rank)
        result = _logsumexp(input.movedim(dims, tuple(last)).flatten(rank - len(dims)), rank - len(dims))
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
        save_tensors(ctx, input, *outputs)

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
        save_tensors(ctx, *tensors)

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
        return chosen - _inner(probabilities.to(dtype), chosen, dim), None
    p = _accumulated_softmax(input, dim)
    return chosen - _inner(p, u, dim), p


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
    inner = _inner(g, y, dim)
    h = g * centred
    hy = _inner(h, y, dim)
    if renormalize:
        at_indices = y * (h - hy) - inner * y * centred
        result = torch.zeros_like(input, dtype=y.dtype).scatter(dim, indices, at_indices)
    else:
        v = v.to(y.dtype)
        result = (-p * hy - inner * p * (v - _inner(p, v, dim))).scatter_add(dim, indices, y * h)
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
    _check_floating("topk_softmax: result" if input.is_floating_point() else "topk_softmax: input", dtype)
    k = _check_int("k", k)
    classes = input.shape[dim] if input.dim() else 1
    if k < 0 or k > classes:
        raise InvalidArgument(f"k: {k}, expected 0 to the {classes} elements of dimension {dim}")
    if input.dtype != dtype and not (dtype == torch.float32 and input.dtype in _HALVES):
        input = input.to(dtype)
    if input.dim() == 0:
        probabilities, indices = _topk_softmax(input.unsqueeze(0), k, dim, bool(renormalize), dtype)
        return (probabilities.squeeze(0), indices.squeeze(0)) if k else (probabilities, indices)
    return _topk_softmax(input, k, dim, bool(renormalize), dtype)


# --- cross-entropy ----------------------------------------------------------------------------------------------------------


class CrossEntropy:
    """(input [N, C, ...], target, weight, ignore_index, label_smoothing) -> (loss, lse, row_weight), a number a row.

    With a the row's target distribution, smoothed and weighted by class, and A its sum: loss = A lse - <a, x>.
    """

    @staticmethod
    def run(input, target, weight, ignore_index, label_smoothing):
        return ops.cross_entropy_forward.default(input, target, weight, ignore_index, label_smoothing)

    @staticmethod
    def save(ctx, inputs, outputs):
        input, target, weight, ctx.ignore_index, ctx.label_smoothing = inputs
        save_tensors(ctx, input, target, weight)

    @staticmethod
    def backward(ctx, grad_loss, grad_lse, _):
        input, target, weight = ctx.saved_tensors
        grad_input, grad_target = _cross_entropy_backward(
            grad_loss, grad_lse, input, target, weight, ctx.ignore_index, ctx.label_smoothing, ctx.needs_input_grad[1]
        )
        return grad_input, grad_target if ctx.needs_input_grad[1] else None, None, None, None

    @staticmethod
    def jvp(ctx, u, target_u, *_):
        input, target, weight = ctx.saved_tensors
        row = _Row(input, target, weight, ctx.ignore_index, ctx.label_smoothing)
        along_loss = along_lse = torch.zeros_like(row.total)
        if u is not None:
            u = u.to(row.p.dtype)
            along_lse = (row.p * u).sum(1)
            along_loss = row.unless_ignored(row.total * along_lse - (row.a * u).sum(1))
        if target_u is not None and target.is_floating_point():  # functorch hands down zeros for indices
            along_loss = along_loss - (target_u.to(row.p.dtype) * row.scale * row.log_p).sum(1)
        return along_loss, along_lse, torch.zeros_like(row.total)


class CrossEntropyBackward:
    """(g A + h) p - g a, with g and h the cotangents of loss and lse; and -g log(p), scaled, for probability targets:
    (grad_loss, grad_lse, input, target, weight, ignore_index, label_smoothing, target_grad)."""

    @staticmethod
    def run(grad_loss, grad_lse, input, target, weight, ignore_index, label_smoothing, target_grad):
        return ops.cross_entropy_backward.default(
            grad_loss, grad_lse, input, target, weight, ignore_index, label_smoothing, target_grad
        )

    @staticmethod
    def save(ctx, inputs, outputs):
        *tensors, ctx.ignore_index, ctx.label_smoothing, ctx.target_grad = inputs
        save_tensors(ctx, *tensors)

    @staticmethod
    def backward(ctx, v, target_v):
        g, h, input, target, weight = ctx.saved_tensors
        row = _Row(input, target, weight, ctx.ignore_index, ctx.label_smoothing)
        v = v.to(row.p.dtype)
        mean = (row.p * v).sum(1)
        for_g, for_h = row.unless_ignored(row.total * mean - (row.a * v).sum(1)), mean
        for_input = row.times(row.unless_ignored(g * row.total) + h, row.p * (v - mean.unsqueeze(1)))
        for_target = None
        if ctx.needs_input_grad[3]:
            for_target = (g.unsqueeze(1) * row.scale * (mean.unsqueeze(1) - v)).to(target.dtype)
        if ctx.target_grad:
            c = target_v.to(row.p.dtype) * row.scale
            for_g = for_g - (c * row.log_p).sum(1)
            for_input = for_input + g.unsqueeze(1) * (c.sum(1, keepdim=True) * row.p - c)
        return for_g, for_h, for_input.to(input.dtype), for_target, None, None, None, None

    @staticmethod
    def jvp(ctx, g_u, h_u, u, target_u, *_):
        g, h, input, target, weight = ctx.saved_tensors
        row = _Row(input, target, weight, ctx.ignore_index, ctx.label_smoothing)
        along_input = torch.zeros_like(row.p)
        along_target = torch.zeros_like(row.p) if ctx.target_grad else None
        if g_u is not None:
            g_u = row.unless_ignored(g_u)
            along_input = along_input + row.times(g_u * row.total, row.p) - g_u.unsqueeze(1) * row.a
            if ctx.target_grad:
                along_target = along_target - g_u.unsqueeze(1) * row.scale * row.log_p
        if h_u is not None:
            along_input = along_input + row.times(h_u, row.p)
        if u is not None:
            u = u.to(row.p.dtype)
            centred = u - _inner(row.p, u, 1)
            along_input = along_input + row.times(row.unless_ignored(g * row.total) + h, row.p * centred)
            if ctx.target_grad:
                along_target = along_target - g.unsqueeze(1) * row.scale * centred
        if target_u is not None and target.is_floating_point():
            c = target_u.to(row.p.dtype) * row.scale
            along_input = along_input + g.unsqueeze(1) * (c.sum(1, keepdim=True) * row.p - c)
        return along_input.to(input.dtype), along_target.to(target.dtype) if ctx.target_grad else input.new_empty(0)


class _Row:
    """What a derivative in plain torch needs, in the accumulator type: p and log p [N, C, ...], the target distribution a
    [N, C, ...] and its sum, and scale [C, 1...], what a's derivative in a probability is."""

    def __init__(self, input, target, weight, ignore_index, label_smoothing):
        dtype, classes = accumulator_of(input.dtype), input.shape[1]
        self.log_p = _softmax(input, 1, True, dtype)
        self.p = self.log_p.exp()
        column = [-1] + [1] * (input.dim() - 2)
        weights = 1.0 if weight is None else weight.reshape(column)
        uniform = label_smoothing / classes if classes else 0.0
        self.scale = weights * (1 - label_smoothing)
        self.ignored = None
        if target.is_floating_point():
            self.a = target.to(dtype) * self.scale + uniform * weights
        else:
            self.ignored = target == ignore_index
            hit = torch.arange(classes, device=input.device).reshape(column) == target.unsqueeze(1)
            smooth = hit.to(dtype) * self.scale + uniform * weights
            self.a = smooth.masked_fill(self.ignored.unsqueeze(1), 0)
        self.total = self.a.sum(1)

    def unless_ignored(self, rows: Tensor) -> Tensor:
        return rows if self.ignored is None else rows.masked_fill(self.ignored, 0)

    def times(self, rows: Tensor, classes: Tensor) -> Tensor:
        """rows * classes; but 0 where an ignored row is multiplied by 0, since its logits may hold anything."""
        product = rows.unsqueeze(1) * classes
        if self.ignored is None:
            return product
        return product.masked_fill((self.ignored & (rows == 0)).unsqueeze(1), 0)


_cross_entropy = differentiable(CrossEntropy)
_cross_entropy_backward = differentiable(CrossEntropyBackward)


def _cross_entropy_rows(input, target, weight, ignore_index: int, label_smoothing: float):
    """CrossEntropy, with torch's errors for a target out of range and for a weight that wants a gradient."""
    wants_grad = weight is not None and weight.requires_grad and torch.is_grad_enabled()
    if wants_grad and not target.is_floating_point():
        raise InvalidArgument("weight: requires_grad is True, but beside class indices no gradient flows to it; detach it")
    if weight is not None and target.is_floating_point() and (wants_grad or transforms_active()):
        return _weighted_probabilities_loss(input, target, weight, label_smoothing)
    if weight is not None:
        weight = weight.to(accumulator_of(input.dtype)).contiguous()
    if torch.compiler.is_compiling():
        return _cross_entropy(input, target, weight, ignore_index, label_smoothing)
    try:
        return _cross_entropy(input, target, weight, ignore_index, label_smoothing)
    except RuntimeError as error:
        if "out of bounds" in str(error):
            raise IndexError(str(error)) from None
        raise


def _weighted_probabilities_loss(input, target, weight, label_smoothing: float):
    """CrossEntropy for probability targets in plain torch operations over our log_softmax: the one case where torch gives a
    gradient to the class weights."""
    dtype = accumulator_of(input.dtype)
    column = [-1] + [1] * (input.dim() - 2)
    uniform = label_smoothing / input.shape[1] if input.shape[1] else 0.0
    a = (target.to(dtype) * (1 - label_smoothing) + uniform) * weight.to(dtype).reshape(column)
    loss = -(a * _softmax(input, 1, True, dtype)).sum(1)
    return loss, _logsumexp(input, 1), torch.ones_like(loss)


def check_losses(input: Tensor, target: Tensor, weight: Tensor | None, ignore_index, label_smoothing) -> None:
    """Raises what torch raises for tensors and options that do not fit together."""
    for name, tensor in (("input", input), ("target", target), ("weight", weight)):
        if not (name == "weight" and tensor is None):
            check_tensor(name, tensor)
    ignore_index = _check_int("ignore_index", ignore_index)
    if _check_float("label_smoothing", label_smoothing) > 1:
        raise InvalidArgument(f"label_smoothing: {label_smoothing}, expected 0 to 1")
    _check_floating("cross_entropy: input", input.dtype)
    for name, tensor in (("target", target), ("weight", weight)):
        if tensor is not None and tensor.device != input.device:
            raise InvalidArgument(f"{name}: on {tensor.device}, expected input's device {input.device}")
    shape = list(input.shape)
    if target.shape == input.shape:
        if not target.is_floating_point():
            raise InvalidArgument(
                f"target: of input's shape {shape}, so class probabilities; dtype {target.dtype}, expected floating"
            )
        if ignore_index >= 0:
            raise InvalidArgument(
                f"ignore_index: {ignore_index}, but beside class probabilities nothing can be ignored; leave it out"
            )
        if input.dim() == 0:
            raise IndexError("input: a scalar has no class dimension; expected [C], [N, C] or [N, C, ...]")
    else:
        expected = [1] if input.dim() == 1 else shape[:1] + shape[2:]
        if input.dim() == 0 or (list(target.shape) != expected and not (input.dim() == 1 and target.dim() == 0)):
            raise InvalidArgument(
                f"target: shape {list(target.shape)}, expected beside an input of shape {shape} "
                f"{[] if input.dim() <= 1 else expected} for class indices or {shape} for class probabilities"
            )
        if target.dtype not in (torch.int64, torch.uint8):
            raise InvalidArgument(f"target: dtype {target.dtype}, expected int64 or uint8 for class indices")
    if weight is not None:
        classes = shape[0] if input.dim() == 1 else shape[1]
        if weight.dim() != 1 or weight.shape[0] != classes:
            raise InvalidArgument(f"weight: shape {list(weight.shape)}, expected one for each of the {classes} classes")
        if not weight.is_floating_point():
            raise InvalidArgument(f"weight: dtype {weight.dtype}, expected a floating one")


def reduction_number(reduction: str) -> int:
    """torch's number of a reduction: see reduction_number."""
    if reduction not in ("none", "mean", "sum", "elementwise_mean"):
        raise InvalidArgument(f"reduction: {reduction!r}, expected 'none', 'mean' or 'sum'")
    return _reduction.get_enum(reduction)


def cross_entropy_of(
    input, target, weight, ignore_index, reduction: int, label_smoothing, return_lse: bool, z_loss: float, dtype
) -> Tensor | tuple[Tensor, Tensor]:
    """cross_entropy after the checks and the decision that our kernel runs; reduction: see reduction_number."""
    probabilities = target.shape == input.shape
    ignore_index = _check_int("ignore_index", ignore_index)
    label_smoothing = float(label_smoothing) if label_smoothing > 0 else 0.0  # also for a negative one or a NaN, as in torch
    if dtype is None and autocasts(input):  # cross_entropy is on the float32 list of every device
        dtype = torch.float32
    result_dtype = input.dtype if dtype is None else dtype
    if probabilities:
        common = torch.promote_types(input.dtype, target.dtype)
        if dtype is None:
            result_dtype = common if weight is None else torch.promote_types(common, weight.dtype)
        input, target = input.to(common), target.to(common)
        rows = input.shape[:1] + input.shape[2:] if input.dim() > 1 else ()
    else:
        target = target.to(torch.int64)
        rows = target.shape
    alone = input.dim() == 1
    if alone:
        input, target = input.unsqueeze(0), target.unsqueeze(0) if probabilities else target.reshape(1)
    # No output is marked as without derivative, since a mark does not survive torch.func.vmap; row_weight's is dropped here.
    loss, lse, row_weight = _cross_entropy_rows(input, target, weight, ignore_index, label_smoothing)

    ignored, z_term = None, None
    if z_loss != 0:
        if not probabilities:  # masked before it is squared, so that an ignored row of NaN has the gradient 0 and not 0 * NaN
            ignored = target == ignore_index
        z_term = z_loss * (lse if ignored is None else lse.masked_fill(ignored, 0)).square()
    if reduction == 0:
        result = loss if z_term is None else loss + z_term
        if alone:
            result = result.squeeze(0)
    elif reduction == 2:
        result = loss.sum() if z_term is None else (loss + z_term).sum()
    else:
        count = loss.numel() if input.shape[1] != 0 else 0  # of a loss without classes torch's mean is NaN
        result = loss.sum() / (count if probabilities else row_weight.detach().sum())
        if z_term is not None:
            result = result + z_term.sum() / (count if ignored is None else loss.numel() - ignored.sum())
    result = result.to(result_dtype)
    return (result, lse.reshape(rows)) if return_lse else result


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    return_lse: bool = False,
    z_loss: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The cross-entropy of logits and targets, in one read of the logits and without a table of probabilities.

    input: logits [C], [N, C] or [N, C, ...], any strides; float16, bfloat16, float32 or float64. target: class indices (int64
    or uint8) of the shape without C, or class probabilities of input's shape. weight: [C], floating. `ignore_index`,
    `reduction` ("mean", "sum", "none"), `label_smoothing` and the deprecated `size_average`, `reduce` as in
    torch.nn.functional.cross_entropy. An ignored row has gradient 0 whatever its logits hold.

    z_loss: adds z_loss * lse^2 for each row that is not ignored; "mean" divides that term by the number of such rows, without
    class weights. dtype: the loss's; the input's if None. return_lse: also return lse, the logsumexp of each row's logits,
    of the shape of class indices, in float32 (float64 for float64 logits); differentiable.

    Raises IndexError for a target out of range, InvalidArgument for tensors and options that do not fit together,
    NotImplementedError for tensors that no kernel takes. Milakov and Gimelshein, arXiv 1805.02867; the z-loss is that of
    Chowdhery et al., arXiv 2204.02311, section 5.
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    reduction = reduction_number(reduction)
    check_losses(input, target, weight, ignore_index, label_smoothing)
    plan.require_kernel("cross_entropy", input, target, weight)
    if dtype is not None:
        _check_floating("cross_entropy: result", dtype)
    z_loss = _check_float("z_loss", z_loss)
    return cross_entropy_of(input, target, weight, ignore_index, reduction, label_smoothing, return_lse, z_loss, dtype)
