"""Softmax, log_softmax, logsumexp and top-k softmax over one dimension of a tensor. Each reads its input once, using online
softmax, and has first and second derivatives in closed form.

Notation of the derivatives: x is a row, p its softmax, <a, b> a sum over the classes. g is the gradient of a result, v the
gradient of a gradient (in double backward). `d_x` is the tangent of x, and `by_x` the part of a result's tangent that comes
from d_x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _policy
from ._autograd import Description, differentiable, lean, unwrap_if_dead
from ._canonicalize import autocasts
from ._checks import check_dim, check_dtype, check_flag, check_floating, check_index, check_tensor
from ._ops import SIXTEEN_BITS, InvalidArgument, accumulator_of, below_autograd, ops, surfaced
from ._plain import are_plain, is_grad_enabled

__all__ = ["log_softmax", "logsumexp", "softmax", "topk_softmax"]


def inner_product(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """<a, b> along `dim`, which stays with size 1."""
    return (a * b).sum(dim, keepdim=True)


def _sum_of_present(*terms):
    """The sum of the terms that are not None; None if all are."""
    present = [term for term in terms if term is not None]
    if not present:
        return None
    result = present[0]
    for term in present[1:]:
        result = result + term
    return result


# --- softmax and log_softmax ------------------------------------------------------------------------------------------------


class Softmax(Description):
    """(input, dim >= 0, log, dtype of the result) -> softmax, or with `log` its logarithm."""

    operator = ops.softmax_forward

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
    def jvp(ctx, d_input, *_):
        (output,) = ctx.saved_tensors
        if not ctx.log:  # the Jacobian is symmetric: p (d_input - <p, d_input>) is what the backward pass computes
            return _softmax_backward(d_input.to(output.dtype), output, ctx.dim, False, output.dtype)
        dtype = accumulator_of(output.dtype)
        d_input = d_input.to(dtype)
        return (d_input - inner_product(output.to(dtype).exp(), d_input, ctx.dim)).to(output.dtype)


class SoftmaxBackward(Description):
    """(grad, output, dim, log, dtype of the gradient) -> p (g - <p, g>), or for the logarithm y = log p: g - exp(y) <1, g>."""

    operator = ops.softmax_backward

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
            grad_of_grad = v - inner_product(p, v, dim)
            grad_of_output = -v * p * g.sum(dim, keepdim=True)
        else:
            grad_of_grad = y * (v - inner_product(y, v, dim))
            grad_of_output = v * (g - inner_product(y, g, dim)) - g * inner_product(y, v, dim)
        return grad_of_grad.to(grad.dtype), grad_of_output.to(output.dtype), None, None, None

    @staticmethod
    def jvp(ctx, d_grad, d_output, *_):
        grad, output = ctx.saved_tensors
        dim, dtype = ctx.dim, accumulator_of(output.dtype)
        g, y = grad.to(dtype), output.to(dtype)
        by_grad = by_output = None
        p = y.exp() if ctx.log else y
        if d_grad is not None:
            d_g = d_grad.to(dtype)
            by_grad = d_g - p * d_g.sum(dim, keepdim=True) if ctx.log else y * (d_g - inner_product(y, d_g, dim))
        if d_output is not None:
            d_y = d_output.to(dtype)
            if ctx.log:
                by_output = -p * d_y * g.sum(dim, keepdim=True)
            else:
                by_output = d_y * (g - inner_product(y, g, dim)) - y * inner_product(d_y, g, dim)
        d_grad_input = _sum_of_present(by_grad, by_output)
        return None if d_grad_input is None else d_grad_input.to(ctx.input_dtype)


softmax_rows = differentiable(Softmax)
_softmax_backward = differentiable(SoftmaxBackward)


def try_fast_softmax(name: str, input, dim, log: bool) -> Tensor | None:
    """softmax or log_softmax of a plain tensor in its own dtype: one operator call, which takes a third of the time of all
    checks and casts. None for any other call, which then runs these."""
    if type(dim) is not int or not are_plain(name, input):
        return None
    rank = input.dim()
    if dim < 0:
        dim += rank
    if not 0 <= dim < rank:
        return None
    options = (dim, log, input.dtype)
    try:
        if input.requires_grad and is_grad_enabled():
            return _lean_softmax(unwrap_if_dead(input), options)
        return _run(input, *options)
    except RuntimeError as error:
        raise surfaced(error, input) from None


def _train(input, options):
    output = _run(input, *options)
    return output, (output,), options


_run, _run_backward = below_autograd(ops.softmax_forward), below_autograd(ops.softmax_backward)
_lean_softmax = lean("LeanSoftmax", _train, _run_backward, _softmax_backward)


def softmax_impl(name: str, input, dim, dtype, log: bool) -> Tensor:
    """softmax or log_softmax of a tensor that our kernel takes; `name` is for error messages."""
    dim = check_dim(dim, input.dim())
    # Softmax is on autocast's list of float32 operators on CUDA, and on no list on the CPU.
    if dtype is None and input.is_cuda and autocasts(input):
        dtype = torch.float32
    if dtype is None:
        check_floating(f"{name}: input", input.dtype)
        dtype = input.dtype
    else:
        check_floating(f"{name}: result", dtype)
    if input.dtype != dtype and not (dtype == torch.float32 and input.dtype in SIXTEEN_BITS):  # the kernel makes that cast
        input = input.to(dtype)
    if input.dim() == 0:
        return softmax_rows(input.unsqueeze(0), dim, log, dtype).squeeze(0)
    return softmax_rows(input, dim, log, dtype)


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """exp(input) / sum(exp(input)) along `dim`.

    Args:
        input: any shape and strides; float16, bfloat16, float32 or float64.
        dim: the dimension along which the result sums to 1.
        dtype: dtype of the result; input's if None. If given, input may have any dtype that can be cast to it; a 16-bit input
            with a float32 result is read without a cast copy.

    Returns:
        The probabilities, contiguous and of input's shape. A row that is all -inf, or holds a NaN or +inf, gives NaN. Twice
        differentiable, also under torch.func and in forward mode.

    Raises:
        UnsupportedDtype: a dtype that is not above.
        IndexError: `dim` is out of range.
        TypeError: an argument of another type.
        NotImplementedError: tensors that no kernel takes.

    Source: the online softmax, which reads the input once; Milakov and Gimelshein, arXiv 1805.02867, section 3.
    """
    if dtype is None and (result := try_fast_softmax("softmax", input, dim, False)) is not None:
        return result
    check_tensor("input", input)
    if dtype is not None:
        dtype = check_dtype(dtype)
    _policy.require_kernel("softmax", input=input, dtype=dtype, dim=dim)
    return softmax_impl("softmax", input, dim, dtype, False)


def log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """input - log(sum(exp(input))) along `dim`: the logarithm of `softmax`, without the rounding of its result. Arguments,
    result, errors and source as for `softmax`."""
    if dtype is None and (result := try_fast_softmax("log_softmax", input, dim, True)) is not None:
        return result
    check_tensor("input", input)
    if dtype is not None:
        dtype = check_dtype(dtype)
    _policy.require_kernel("log_softmax", input=input, dtype=dtype, dim=dim)
    return softmax_impl("log_softmax", input, dim, dtype, True)


# --- logsumexp --------------------------------------------------------------------------------------------------------------


class LogSumExp(Description):
    """(input, dim >= 0, dtype) -> log(sum(exp(input))) along dim, which is removed, in dtype: the accumulator's, or the
    input's."""

    operator = ops.logsumexp_forward

    @staticmethod
    def save(ctx, inputs, outputs):
        input, ctx.dim, _ = inputs
        ctx.dtype = outputs.dtype
        return (input,)

    @staticmethod
    def backward(ctx, grad):
        (input,) = ctx.saved_tensors
        return _logsumexp_backward(grad, input, ctx.dim), None, None

    @staticmethod
    def jvp(ctx, d_input, *_):
        (input,) = ctx.saved_tensors
        p = _accumulated_softmax(input, ctx.dim)
        return (p * d_input.to(p.dtype)).sum(ctx.dim).to(ctx.dtype)


class LogSumExpBackward(Description):
    """(grad, input, dim) -> g p."""

    operator = ops.logsumexp_backward

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
        return mean.squeeze(ctx.dim).to(grad.dtype), (grad.unsqueeze(ctx.dim) * p * (v - mean)).to(input.dtype), None

    @staticmethod
    def jvp(ctx, d_grad, d_input, _):
        grad, input = ctx.saved_tensors
        p = _accumulated_softmax(input, ctx.dim)
        by_grad = by_input = None
        if d_grad is not None:
            by_grad = d_grad.unsqueeze(ctx.dim) * p
        if d_input is not None:
            d_x = d_input.to(p.dtype)
            by_input = grad.unsqueeze(ctx.dim) * p * (d_x - inner_product(p, d_x, ctx.dim))
        d_grad_input = _sum_of_present(by_grad, by_input)
        return None if d_grad_input is None else d_grad_input.to(input.dtype)


logsumexp_rows = differentiable(LogSumExp)
_logsumexp_backward = differentiable(LogSumExpBackward)


def _accumulated_softmax(input: Tensor, dim: int) -> Tensor:
    """The softmax in the accumulator's dtype."""
    return softmax_rows(input, dim, False, accumulator_of(input.dtype))


def logsumexp(input: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """log(sum(exp(input))) along `dim`, one dimension or several, which stay with size 1 if `keepdim`.

    Args:
        input: any shape and strides; float16, bfloat16, float32 or float64; integers are cast to torch's default dtype.
        dim: an int, or several; with `keepdim`, and for a scalar, `()` stands for all dimensions, as in torch.
        keepdim: whether these dimensions stay, with size 1.

    Returns:
        The logarithms, of input's dtype after that cast. A row that is empty or all -inf gives -inf. Twice differentiable, also
        under torch.func and in forward mode.

    Raises:
        UnsupportedDtype: a dtype that is not above.
        IndexError: a `dim` is out of range.
        InvalidArgument: a dimension is repeated.
        NotImplementedError: tensors that no kernel takes.

    Source: arXiv 1805.02867, as `softmax`.
    """
    check_tensor("input", input)
    _policy.require_kernel("logsumexp", input=input, dim=dim)
    if not input.is_floating_point():
        input = input.to(torch.get_default_dtype())
    check_floating("logsumexp: input", input.dtype)
    check_flag("keepdim", keepdim)
    rank = input.dim()
    dims = [check_dim(d, rank) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))]
    if not dims and (rank == 0 or keepdim or input.numel() == 0):  # torch takes () for all dimensions here
        dims = list(range(max(rank, 1)))
    if not dims or len(set(dims)) != len(dims):
        raise InvalidArgument(f"dim: expected one dimension or several different ones, got {dim}")
    if rank == 0:
        return logsumexp_rows(input.unsqueeze(0), 0, input.dtype)
    if len(dims) == 1:
        result = logsumexp_rows(input, dims[0], input.dtype)
    else:
        last = range(rank - len(dims), rank)
        result = logsumexp_rows(input.movedim(dims, tuple(last)).flatten(rank - len(dims)), rank - len(dims), input.dtype)
    if keepdim:
        for d in sorted(dims):
            result = result.unsqueeze(d)
    return result


# --- top-k softmax -----------------------------------------------------------------------------------------------------------


class TopKSoftmax(Description):
    """(input, k, dim >= 0, renormalize, dtype) -> (probabilities y, indices)."""

    operator = ops.topk_softmax_forward

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
    def jvp(ctx, d_input, *_):
        input, probabilities, indices = ctx.saved_tensors
        return _topk_jvp(d_input, probabilities, indices, input, ctx.dim, ctx.renormalize).to(probabilities.dtype), None


class TopKSoftmaxBackward(Description):
    """(grad, probabilities, indices, input, dim, renormalize) -> the gradient of TopKSoftmax's input.

    The probabilities are a function of the input: the derivative with respect to the input includes the path through them,
    and the probabilities themselves have none.
    """

    operator = ops.topk_softmax_backward

    @staticmethod
    def save(ctx, inputs, outputs):
        *tensors, ctx.dim, ctx.renormalize = inputs
        return tensors

    @staticmethod
    def backward(ctx, v):
        grad, probabilities, indices, input = ctx.saved_tensors
        grad_of_grad = _topk_jvp(v, probabilities, indices, input, ctx.dim, ctx.renormalize).to(grad.dtype)
        grad_of_input = _topk_hessian_product(grad, v, probabilities, indices, input, ctx.dim, ctx.renormalize)
        return grad_of_grad, None, None, grad_of_input, None, None

    @staticmethod
    def jvp(ctx, d_grad, d_probabilities, d_indices, d_input, *_):
        grad, probabilities, indices, input = ctx.saved_tensors
        by_grad = by_input = None
        if d_grad is not None:
            by_grad = _topk_softmax_backward(d_grad, probabilities, indices, input, ctx.dim, ctx.renormalize)
        if d_input is not None:
            by_input = _topk_hessian_product(grad, d_input, probabilities, indices, input, ctx.dim, ctx.renormalize)
        return _sum_of_present(by_grad, by_input)


_topk_softmax = differentiable(TopKSoftmax)
_topk_softmax_backward = differentiable(TopKSoftmaxBackward)


def _topk_centred(v, probabilities, indices, input, dim: int, renormalize: bool):
    """(v at the indices less the mean of v, p). The mean is weighted by p; with `renormalize` it is the mean of the k elements,
    weighted by y, and p is None, as it is not needed."""
    dtype = accumulator_of(input.dtype)
    v = v.to(dtype)
    chosen = v.gather(dim, indices)
    if renormalize:
        return chosen - inner_product(probabilities.to(dtype), chosen, dim), None
    p = _accumulated_softmax(input, dim)
    return chosen - inner_product(p, v, dim), p


def _topk_jvp(d_input, probabilities, indices, input, dim: int, renormalize: bool) -> Tensor:
    """The tangent of the probabilities, in the accumulator's dtype."""
    centred, _ = _topk_centred(d_input, probabilities, indices, input, dim, renormalize)
    return probabilities.to(centred.dtype) * centred


def _topk_hessian_product(grad, v, probabilities, indices, input, dim: int, renormalize: bool) -> Tensor:
    """The Hessian of <grad, probabilities> in the input, times v; the Hessian is symmetric, so that v may be a tangent too.

    It is the derivative of <v, gradient> = sum_j y_j g_j c_j, with c the centred v at the indices. One term comes from y, with
    cotangent h = g c, the other from the mean in c.
    """
    centred, p = _topk_centred(v, probabilities, indices, input, dim, renormalize)
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

    Args:
        input: as for `softmax`.
        k: number of probabilities, 0 to input.shape[dim].
        dim: the dimension of the softmax.
        renormalize: divides the k probabilities by their sum.
        dtype: dtype of the probabilities, as for `softmax`.

    Returns:
        (probabilities, indices), of size k along `dim`. The probabilities are twice differentiable, also under torch.func
        and in forward mode.

    Raises:
        InvalidArgument: k is out of range. Otherwise the errors of `softmax`.

    Source: arXiv 1805.02867, section 4: softmax and top k in one read of the input.
    """
    check_tensor("input", input)
    if dtype is not None:
        dtype = check_dtype(dtype)
    _policy.require_kernel("topk_softmax", input=input, dtype=dtype, dim=dim)
    dim = check_dim(dim, input.dim())
    if dtype is None:
        dtype = input.dtype
    check_floating("topk_softmax: result" if input.is_floating_point() else "topk_softmax: input", dtype)
    k = check_index("k", k, any_rank=True)
    check_flag("renormalize", renormalize)
    classes = input.shape[dim] if input.dim() else 1
    if k < 0 or k > classes:
        raise InvalidArgument(f"k: expected 0 to the {classes} elements of dimension {dim}, got {k}")
    if input.dtype != dtype and not (dtype == torch.float32 and input.dtype in SIXTEEN_BITS):
        input = input.to(dtype)
    if input.dim() == 0:
        probabilities, indices = _topk_softmax(input.unsqueeze(0), k, dim, renormalize, dtype)
        return (probabilities.squeeze(0), indices.squeeze(0)) if k else (probabilities, indices)
    return _topk_softmax(input, k, dim, renormalize, dtype)
