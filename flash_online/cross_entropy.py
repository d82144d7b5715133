"""Cross-entropy with class weights, label smoothing, probability targets and z-loss, using online softmax: no table of
probabilities is stored, and first and second derivatives are in closed form. softmax.py explains the notation.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn import _reduction

from . import _checked, _policy
from ._autograd import (
    Description,
    composite,
    differentiable,
    dispatches,
    is_differentiated,
    lean,
    unwrap_if_dead,
    without_derivative,
)
from ._canonicalize import autocasts, check_types
from ._checks import check_dtype, check_flag, check_float, check_floating, check_index, differ, none_as_zero
from ._ops import InvalidArgument, accumulator_of, below_autograd, call_below, is_known, ops, surfaced
from ._plain import are_plain, are_plain_numbers, is_compiling, is_grad_enabled
from .softmax import inner_product, logsumexp_rows, softmax_rows


class CrossEntropy(Description):
    """(input [N, C, ...], target, weight, ignore_index, label_smoothing, return_entropy) -> (loss, lse, row_weight, entropy),
    each [N, ...], but entropy empty unless it is wanted.

    With a the target distribution of a row, smoothed and weighted by class, and A its sum: loss = A lse - <a, x>. With p the
    softmax: entropy = -<p, log p>, of ignored rows too.
    """

    operator = ops.cross_entropy_forward

    @staticmethod
    def inputs(*arguments):
        return (*arguments, False)[:6]

    @staticmethod
    def check(input, target, weight, *_):
        _check_weight_is_constant(weight)

    @staticmethod
    def save(ctx, inputs, outputs):
        input, target, weight, ctx.ignore_index, ctx.label_smoothing, ctx.return_entropy = inputs
        ctx.set_materialize_grads(False)  # lse and entropy have a gradient in few calls, and row_weight in none
        return input, target, weight, outputs[3] if ctx.return_entropy else None

    @staticmethod
    def backward(ctx, grad_loss, grad_lse, _, grad_entropy):
        input, target, weight, entropy = ctx.saved_tensors
        if not ctx.return_entropy:
            grad_entropy = None
        if grad_loss is None:
            given = grad_entropy if grad_lse is None else grad_lse
            if given is None:
                return (None,) * 6
            grad_loss = torch.zeros_like(given)
        grad_input, grad_target = _cross_entropy_backward(
            *(grad_loss, grad_lse, input, target, weight, ctx.ignore_index, ctx.label_smoothing, ctx.needs_input_grad[1]),
            *(grad_entropy, None if grad_entropy is None else entropy),
        )
        return grad_input, grad_target if ctx.needs_input_grad[1] else None, None, None, None, None

    @staticmethod
    def jvp(ctx, d_input, d_target, *_):
        input, target, weight, _ = ctx.saved_tensors
        row = _RowTerms(input, target, weight, ctx.ignore_index, ctx.label_smoothing)
        d_loss = d_lse = d_entropy = torch.zeros_like(row.total)
        if d_input is not None:
            d_x = d_input.to(row.p.dtype)
            d_lse = (row.p * d_x).sum(1)
            d_loss = row.unless_ignored(row.total * d_lse - (row.a * d_x).sum(1))
            if ctx.return_entropy:
                d_entropy = (row.entropy_gradient() * d_x).sum(1)
        if d_target is not None and target.is_floating_point():  # for class indices functorch passes zeros
            d_loss = d_loss - (d_target.to(row.p.dtype) * row.scale * row.log_p).sum(1)
        return d_loss, d_lse, torch.zeros_like(row.total), d_entropy if ctx.return_entropy else d_lse.new_zeros(0)


class CrossEntropyBackward(Description):
    """(grad_loss, grad_lse, input, target, weight, ignore_index, label_smoothing, target_grad, grad_entropy, entropy) ->
    (grad_input, grad_target).

    With g, h and e the gradients of loss, lse and entropy, grad_input = (g A + h) p - g a - e p s, where s = log p + entropy;
    for probability targets grad_target = -g log(p) times the derivative of a in a probability. The entropy is an argument only
    so that the kernel need not compute it again: it has no derivative.
    """

    operator = ops.cross_entropy_backward

    @staticmethod
    def inputs(*arguments):
        return (*arguments, None, None)[:10]

    @staticmethod
    def check(grad_loss, grad_lse, input, target, weight, *_):
        _check_weight_is_constant(weight)

    @staticmethod
    def save(ctx, inputs, outputs):
        *tensors, ctx.ignore_index, ctx.label_smoothing, ctx.target_grad, grad_entropy, _ = inputs
        return *tensors, grad_entropy

    @staticmethod
    def backward(ctx, v, target_v):
        g, h, input, target, weight, e = ctx.saved_tensors
        row = _RowTerms(input, target, weight, ctx.ignore_index, ctx.label_smoothing)
        no_h, h = h is None, torch.zeros_like(g) if h is None else h
        v = v.to(row.p.dtype)
        mean = (row.p * v).sum(1)
        grad_of_g, grad_of_h = row.unless_ignored(row.total * mean - (row.a * v).sum(1)), mean
        grad_of_input = row.times(row.unless_ignored(g * row.total) + h, row.p * (v - mean.unsqueeze(1)))
        grad_of_e = None
        if e is not None:
            grad_of_e, of_gradient = row.entropy_along(v)
            grad_of_input = grad_of_input + row.times(e, of_gradient)
        grad_of_target = None
        if ctx.needs_input_grad[3]:
            grad_of_target = (g.unsqueeze(1) * row.scale * (mean.unsqueeze(1) - v)).to(target.dtype)
        if ctx.target_grad:
            c = target_v.to(row.p.dtype) * row.scale
            grad_of_g = grad_of_g - (c * row.log_p).sum(1)
            grad_of_input = grad_of_input + g.unsqueeze(1) * (c.sum(1, keepdim=True) * row.p - c)
        grad_of_h = None if no_h else grad_of_h
        return grad_of_g, grad_of_h, grad_of_input.to(input.dtype), grad_of_target, None, None, None, None, grad_of_e, None

    @staticmethod
    def jvp(ctx, d_g, d_h, d_input, d_target, *others):
        *_, d_e, _ = others
        g, h, input, target, weight, e = ctx.saved_tensors
        row = _RowTerms(input, target, weight, ctx.ignore_index, ctx.label_smoothing)
        h = torch.zeros_like(g) if h is None else h
        d_grad_input = torch.zeros_like(row.p)
        d_grad_target = torch.zeros_like(row.p) if ctx.target_grad else None
        if d_g is not None:
            d_g = row.unless_ignored(d_g)
            d_grad_input = d_grad_input + row.times(d_g * row.total, row.p) - d_g.unsqueeze(1) * row.a
            if ctx.target_grad:
                d_grad_target = d_grad_target - d_g.unsqueeze(1) * row.scale * row.log_p
        if d_h is not None:
            d_grad_input = d_grad_input + row.times(d_h, row.p)
        if d_e is not None:
            d_grad_input = d_grad_input + row.times(d_e, row.entropy_gradient())
        if d_input is not None:
            d_x = d_input.to(row.p.dtype)
            centred = d_x - inner_product(row.p, d_x, 1)
            d_grad_input = d_grad_input + row.times(row.unless_ignored(g * row.total) + h, row.p * centred)
            if e is not None:
                d_grad_input = d_grad_input + row.times(e, row.entropy_along(d_x)[1])
            if ctx.target_grad:
                d_grad_target = d_grad_target - g.unsqueeze(1) * row.scale * centred
        if d_target is not None and target.is_floating_point():
            c = d_target.to(row.p.dtype) * row.scale
            d_grad_input = d_grad_input + g.unsqueeze(1) * (c.sum(1, keepdim=True) * row.p - c)
        return d_grad_input.to(input.dtype), d_grad_target.to(target.dtype) if ctx.target_grad else input.new_empty(0)


def _check_weight_is_constant(weight: Tensor | None) -> None:
    if is_differentiated(weight):
        raise NotImplementedError("weight: expected constant class weights, got differentiated ones")


class _RowTerms:
    """The terms of derivatives written in torch operations, in the accumulator's dtype: p and log_p [N, C, ...], the target
    distribution a [N, C, ...], its sum `total` [N, ...], and `scale` [C, 1...], the derivative of a in a probability."""

    def __init__(self, input, target, weight, ignore_index, label_smoothing):
        dtype, classes = accumulator_of(input.dtype), input.shape[1]
        self.log_p = softmax_rows(input, 1, True, dtype)
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

    def entropy_gradient(self) -> Tensor:
        """-p (log p + entropy) [N, C, ...], the gradient of the entropy in the logits; 0 where p is 0."""
        log_p = self.log_p.masked_fill(self.log_p == -float("inf"), 0)
        return self.p * (inner_product(self.p, log_p, 1) - log_p)

    def entropy_along(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        """The derivatives of the entropy [N, ...] and of its gradient [N, C, ...] along a direction of the logits."""
        gradient, centred = self.entropy_gradient(), direction - inner_product(self.p, direction, 1)
        slope = (gradient * direction).sum(1)
        return slope, gradient * centred - self.p * (centred + slope.unsqueeze(1))

    def unless_ignored(self, rows: Tensor) -> Tensor:
        return rows if self.ignored is None else rows.masked_fill(self.ignored, 0)

    def times(self, rows: Tensor, classes: Tensor) -> Tensor:
        """rows [N, ...] * classes [N, C, ...], but 0 where an ignored row is multiplied by 0: its logits may be inf or NaN."""
        product = rows.unsqueeze(1) * classes
        if self.ignored is None:
            return product
        return product.masked_fill((self.ignored & (rows == 0)).unsqueeze(1), 0)


_cross_entropy = differentiable(CrossEntropy)
_cross_entropy_backward = differentiable(CrossEntropyBackward)


@composite(ops.cross_entropy_loss)
def _loss(input, target, weight, ignore_index, label_smoothing, mean, dtype):
    """The reduced loss of differentiable rows."""
    loss, _, row_weight, _ = ops.cross_entropy_forward.default(input, target, weight, ignore_index, label_smoothing)
    # The values that the operator keeps for its backward pass; their shape depends on the device.
    _, numbers = call_below(ops.cross_entropy_loss, input, target, weight, ignore_index, label_smoothing, mean, dtype)
    total = loss.sum()
    if mean:
        total = total / (loss.numel() if target.is_floating_point() else row_weight.detach().sum())
    return total.to(dtype), numbers.detach()


@composite(ops.cross_entropy_loss_backward)
def _loss_backward(grad, numbers, input, target, weight, ignore_index, label_smoothing):
    """The gradient of the reduced loss's input, from the differentiable gradient of rows."""
    rows = (grad.to(numbers.dtype) / numbers[-1]).expand(input.shape[:1] + input.shape[2:])
    arguments = (rows, None, input, target, weight, ignore_index, label_smoothing, False)
    grad_input, _ = ops.cross_entropy_backward.default(*arguments)
    return grad_input


without_derivative(ops.cross_entropy_backward_, "it overwrites its input")


def _train(input, options):
    """The forward pass of `lean` for the mean or the sum of CrossEntropy's losses, a scalar of `dtype`: one operator in each
    direction instead of six. The target and the weight have no gradient here: they are options, not inputs for autograd."""
    target, weight, ignore_index, label_smoothing, _, _ = options
    loss, numbers = _run_loss(input, *options)
    return loss, (numbers, input, target, weight), (ignore_index, label_smoothing)


def _reduced_loss(input, target, weight, *options) -> Tensor:
    if weight is not None:
        weight = weight.to(accumulator_of(input.dtype)).contiguous()
    try:
        if input.requires_grad and is_grad_enabled():
            return _lean_loss(unwrap_if_dead(input), (target, weight, *options))
        return _run_loss(input, target, weight, *options)[0]
    except RuntimeError as error:
        check_index("ignore_index", options[0])  # the dispatcher's error for an int beyond 64 bits names no limit
        if "out of bounds" in str(error):
            raise IndexError(str(error)) from None
        raise surfaced(error, input) from None


_run_loss, _run_loss_backward = below_autograd(ops.cross_entropy_loss), below_autograd(ops.cross_entropy_loss_backward)
_lean_loss = lean("LeanLoss", _train, _run_loss_backward, _loss_backward)


def try_fast_cross_entropy(input, target, weight, ignore_index, reduction: str, label_smoothing) -> Tensor | None:
    """The mean or the sum of the losses of plain rows `[N, C]` and class indices: one operator call. None for any other call,
    which then runs all checks."""
    if weight is not None or type(ignore_index) is not int or type(label_smoothing) is not float:
        return None
    if reduction not in ("mean", "sum") or not 0 <= label_smoothing <= 1 or not are_plain("cross_entropy", input):
        return None
    if not are_plain_numbers(target, input, 1, torch.int64) or _checked.active:
        return None
    shape = input.shape
    if len(shape) != 2 or shape[0] != target.shape[0] or not input.numel():
        return None
    return _reduced_loss(input, target, None, ignore_index, label_smoothing, reduction == "mean", input.dtype)


def _reduces_at_once(input, target, weight, dtype) -> bool:
    """Returns whether `_lean_loss` can compute a reduced loss without z-loss."""
    return (
        not dispatches()
        and input.numel() > 0
        and not _policy.is_dtensor(input)  # each shard would have a separate mean
        and not target.requires_grad
        and (weight is None or not weight.requires_grad)
        and (dtype is input.dtype or dtype is accumulator_of(input.dtype))
    )


def cross_entropy_rows(input, target, weight, ignore_index: int, label_smoothing: float, return_entropy: bool = False):
    """(loss, lse, row_weight, entropy) of CrossEntropy, with torch's errors for a target out of range and for a weight that
    requires grad with class indices."""
    wants_grad = weight is not None and weight.requires_grad and torch.is_grad_enabled()
    if wants_grad and not target.is_floating_point():
        raise InvalidArgument("weight: expected requires_grad=False with class indices, got True: no gradient flows to it")
    if weight is not None and target.is_floating_point() and (wants_grad or dispatches()):
        return _weighted_probabilities_loss(input, target, weight, label_smoothing, return_entropy)
    if weight is not None:
        weight = weight.to(accumulator_of(input.dtype)).contiguous()
    if dispatches():
        return _cross_entropy(input, target, weight, ignore_index, label_smoothing, return_entropy)
    try:
        return _cross_entropy(input, target, weight, ignore_index, label_smoothing, return_entropy)
    except RuntimeError as error:
        if "out of bounds" in str(error):
            raise IndexError(str(error)) from None
        raise


def _weighted_probabilities_loss(input, target, weight, label_smoothing: float, return_entropy: bool):
    """CrossEntropy of probability targets in plain torch operations over our log_softmax, which gives class weights a gradient,
    as torch does with probability targets."""
    dtype = accumulator_of(input.dtype)
    column = [-1] + [1] * (input.dim() - 2)
    uniform = label_smoothing / input.shape[1] if input.shape[1] else 0.0
    a = (target.to(dtype) * (1 - label_smoothing) + uniform) * weight.to(dtype).reshape(column)
    loss = -(a * softmax_rows(input, 1, True, dtype)).sum(1)
    lse, one = logsumexp_rows(input, 1, dtype), torch.ones_like(loss)
    if not return_entropy:
        return loss, lse, one, loss.new_empty(0)
    return loss, lse, one, _cross_entropy(input, target.detach(), None, -100, 0.0, True)[3]


def entropy_unless_ignored(entropy: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """CrossEntropy's entropy, with 0 and no gradient for ignored rows."""
    return entropy if target.is_floating_point() else entropy.masked_fill(target == ignore_index, 0)


def check_cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None, ignore_index, label_smoothing) -> None:
    """Raises torch's exception types for tensors and options that do not fit together."""
    ignore_index = check_index("ignore_index", ignore_index, any_rank=True)
    if check_float("label_smoothing", label_smoothing) > 1:
        raise InvalidArgument(f"label_smoothing: expected 0 to 1, got {label_smoothing}")
    check_floating("cross_entropy: input", input.dtype)
    for name, tensor in (("target", target), ("weight", weight)):
        if tensor is not None and tensor.device != input.device:
            raise InvalidArgument(f"{name}: expected input's device {input.device}, got {tensor.device}")
    shape = list(input.shape)
    if not differ(target.shape, input.shape):
        if not target.is_floating_point():
            raise InvalidArgument(
                f"target: expected a floating dtype for class probabilities (of input's shape {shape}), got {target.dtype}"
            )
        if ignore_index >= 0:
            raise InvalidArgument(
                f"ignore_index: expected a negative one with class probabilities, got {ignore_index}; leave it out"
            )
        if input.dim() == 0:
            raise IndexError("input: expected [C], [N, C] or [N, C, ...], got a scalar")
    else:
        expected = [1] if input.dim() == 1 else shape[:1] + shape[2:]
        if input.dim() == 0:
            raise IndexError("input: expected [C], [N, C] or [N, C, ...], got a scalar")
        if differ(target.shape, expected) and not (input.dim() == 1 and target.dim() == 0):
            raise InvalidArgument(
                f"target: expected {[] if input.dim() <= 1 else expected} for class indices or {shape} "
                f"for class probabilities, got {list(target.shape)}"
            )
        if target.dtype not in (torch.int64, torch.uint8):
            raise InvalidArgument(f"target: expected dtype int64 or uint8 for class indices, got {target.dtype}")
    if weight is not None:
        classes = shape[0] if input.dim() == 1 else shape[1]
        if weight.dim() != 1 or is_known(weight.shape[0] != classes):
            raise InvalidArgument(f"weight: expected [{classes}], one for each class, got {list(weight.shape)}")
        if not weight.is_floating_point():
            raise InvalidArgument(f"weight: expected a floating dtype, got {weight.dtype}")


def reduction_enum(reduction: str, size_average: bool | None, reduce: bool | None) -> int:
    """torch's enum of a reduction: 0 none, 1 mean, 2 sum. The deprecated flags, where given, take precedence."""
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if reduction not in ("none", "mean", "sum", "elementwise_mean"):
        raise InvalidArgument(f"reduction: expected 'none', 'mean' or 'sum', got {reduction!r}")
    return _reduction.get_enum(reduction)


def reduce_rows(loss, lse, row_weight, target, ignore_index, classes, reduction: int, z_loss: float) -> Tensor:
    """Adds the z-loss to the losses of rows and reduces them, in the accumulator's dtype. loss, lse and row_weight are the
    results of CrossEntropy; row_weight is treated as a constant."""
    probabilities, ignored, z_term = target.is_floating_point(), None, None
    if z_loss != 0:
        if not probabilities:  # masked before the square, so that an ignored row of NaN has the gradient 0 and not 0 * NaN
            ignored = target == ignore_index
        lse = lse if ignored is None else lse.masked_fill(ignored, 0)
        z_term = z_loss * lse * lse  # in this order: lse^2 may overflow
    if reduction == 0:
        return loss if z_term is None else loss + z_term
    if reduction == 2:
        return loss.sum() if z_term is None else (loss + z_term).sum()
    if is_known(classes == 0):  # torch's mean is then NaN
        return loss.sum() / 0
    result = _mean(loss) if probabilities else loss.sum() / row_weight.detach().sum()
    if z_term is not None:
        # Divided before the sum, which might overflow where the mean does not.
        result = result + (_mean(z_term) if ignored is None else (z_term / ignored.logical_not().sum()).sum())
    return result


def autocast_result(target: Tensor, weight: Tensor | None) -> torch.dtype:
    """The dtype of a loss under autocast: cross_entropy is on its float32 list on every device, and float64 is left alone."""
    wide = target.dtype == torch.float64 or weight is not None and target.is_floating_point() and weight.dtype == torch.float64
    return torch.float64 if wide else torch.float32


def _mean(rows: Tensor) -> Tensor:
    count = rows.numel()
    return rows.sum() / count if isinstance(count, int) else rows.mean()  # vmap has no rule for a tracer's sizes


def cross_entropy_impl(
    input, target, weight, ignore_index, reduction: int, label_smoothing, return_lse: bool, z_loss: float, dtype,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """cross_entropy with checked arguments that our kernel takes; `reduction` is a reduction_enum."""
    probabilities = not differ(target.shape, input.shape)
    ignore_index = check_index("ignore_index", ignore_index, any_rank=True)
    label_smoothing = float(label_smoothing) if label_smoothing > 0 else 0.0  # 0 for a negative or NaN one, as in torch
    if dtype is None and autocasts(input):
        dtype = autocast_result(target, weight)
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
    if not is_compiling() and _checked.active:
        _checked.check_targets(target, input.shape[1] if input.dim() > 1 else input.shape[0], ignore_index)
    single_row = input.dim() == 1
    if single_row:
        input, target = input.unsqueeze(0), target.unsqueeze(0) if probabilities else target.reshape(1)
    rows_wanted = reduction == 0 or z_loss != 0 or return_lse or return_entropy
    if not rows_wanted and _reduces_at_once(input, target, weight, result_dtype):
        return _reduced_loss(input, target, weight, ignore_index, label_smoothing, reduction == 1, result_dtype)
    # row_weight has no derivative, but mark_non_differentiable does not survive torch.func.vmap: reduce_rows detaches it.
    loss, lse, row_weight, entropy = cross_entropy_rows(input, target, weight, ignore_index, label_smoothing, return_entropy)
    result = reduce_rows(loss, lse, row_weight, target, ignore_index, input.shape[1], reduction, z_loss)
    if single_row and reduction == 0:
        result = result.squeeze(0)
    more = [lse] if return_lse else []
    if return_entropy:
        more.append(entropy_unless_ignored(entropy, target, ignore_index))
    if single_row:
        more = [row.reshape(rows) for row in more]
    result = result.to(result_dtype)
    return (result, *more) if more else result


@overload
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = ..., size_average: bool | None = ..., ignore_index: int = ...,
    reduce: bool | None = ..., reduction: str = ..., label_smoothing: float = ..., *, return_lse: Literal[False] = ...,
    return_entropy: Literal[False] = ..., z_loss: float | None = ..., dtype: torch.dtype | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = ..., size_average: bool | None = ..., ignore_index: int = ...,
    reduce: bool | None = ..., reduction: str = ..., label_smoothing: float = ..., *, return_lse: Literal[True],
    return_entropy: Literal[False] = ..., z_loss: float | None = ..., dtype: torch.dtype | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = ..., size_average: bool | None = ..., ignore_index: int = ...,
    reduce: bool | None = ..., reduction: str = ..., label_smoothing: float = ..., *, return_lse: Literal[False] = ...,
    return_entropy: Literal[True], z_loss: float | None = ..., dtype: torch.dtype | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = ..., size_average: bool | None = ..., ignore_index: int = ...,
    reduce: bool | None = ..., reduction: str = ..., label_smoothing: float = ..., *, return_lse: Literal[True],
    return_entropy: Literal[True], z_loss: float | None = ..., dtype: torch.dtype | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = ..., size_average: bool | None = ..., ignore_index: int = ...,
    reduce: bool | None = ..., reduction: str = ..., label_smoothing: float = ..., *, return_lse: bool = ...,
    return_entropy: bool = ..., z_loss: float | None = ..., dtype: torch.dtype | None = ...,
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
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
    return_entropy: bool = False,
    z_loss: float | None = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """The cross-entropy of logits and targets, in one read of the logits and without a table of probabilities.

    Args:
        input: logits `[C]`, `[N, C]` or `[N, C, ...]`, any strides; float16, bfloat16, float32 or float64.
        target: class indices (int64 or uint8) of the shape without C, or class probabilities of input's shape.
        weight: `[C]`, floating: the weights of the classes.
        size_average: deprecated, as in torch.nn.functional.cross_entropy.
        ignore_index: rows with this index have no loss, and gradient 0 whatever their logits hold.
        reduce: deprecated, as in torch.nn.functional.cross_entropy.
        reduction: "mean", "sum" or "none", as in torch.nn.functional.cross_entropy.
        label_smoothing: 0 to 1, as in torch.nn.functional.cross_entropy.
        return_lse: also return lse, the logsumexp of each row's logits in nats, of the shape of class indices, in float32
            (float64 for float64 logits); differentiable.
        return_entropy: also return the entropy of each row's softmax in nats, of lse's shape and dtype; differentiable; 0 with
            gradient 0 for ignored rows. Logits of -inf have probability 0; class weights, smoothing and z_loss do not enter.
        z_loss: adds z_loss * lse^2 for each row that is not ignored; "mean" divides that term by the number of such rows,
            without class weights.
        dtype: dtype of the loss; input's if None.

    Returns:
        The loss, a scalar, or with reduction="none" of the shape of class indices; with `return_lse` or `return_entropy` a
        tuple: the loss, then lse and entropy as requested, in this order.
        The backward pass reads the logits again, and raises RuntimeError if they were changed in place (torch keeps a table of
        log-probabilities and does not).

    Raises:
        IndexError: a target is out of range (a device assert on CUDA).
        InvalidArgument: tensors and options that do not fit together.
        TypeError: an argument of another type.
        NotImplementedError: tensors that no kernel takes.

    Source: the online softmax, Milakov and Gimelshein, arXiv 1805.02867; the z-loss, Chowdhery et al., arXiv 2204.02311,
    section 5.
    """
    z_loss = none_as_zero(z_loss)
    if size_average is reduce is dtype is None and return_lse is return_entropy is False and z_loss == 0:
        result = try_fast_cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing)
        if result is not None:
            return result
    reduction = reduction_enum(reduction, size_average, reduce)
    check_types({"input": input, "target": target}, {"weight": weight}, {})
    check_cross_entropy(input, target, weight, ignore_index, label_smoothing)
    _policy.require_kernel("cross_entropy", input=input, target=target, weight=weight)
    dtype = check_dtype(dtype)
    if dtype is not None:
        check_floating("cross_entropy: result", dtype)
    z_loss = check_float("z_loss", z_loss)
    check_flag("return_lse", return_lse), check_flag("return_entropy", return_entropy)
    return cross_entropy_impl(
        input, target, weight, ignore_index, reduction, label_smoothing, return_lse, z_loss, dtype, return_entropy
    )
