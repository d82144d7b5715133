"""linear_cross_entropy: the cross-entropy of a linear layer's outputs, and its gradients, without a table of logits.

If a mean or a sum is to be differentiated, the forward pass computes its gradients for an incoming gradient of 1 along with the
loss, chunk by chunk, and the backward pass scales them: three matrix products in all. If the incoming gradient has one value
per row, the backward pass computes the chunks of logits again: four products. Second derivatives and torch.func go through
plain torch operations over our cross-entropy, and keep the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypedDict, overload

import torch
import torch.nn.functional as _torch
from torch import Tensor
from torch.autograd import Function

from . import _checked, _policy
from ._autograd import (
    composite,
    dispatch,
    dispatches,
    eager_transforms_active,
    is_differentiated,
    is_traced,
    traces_transforms,
    transforms_active,
    without_derivative,
)
from ._canonicalize import autocasts, check_types
from ._checks import (
    check_dtype,
    check_flag,
    check_flags,
    check_float,
    check_floating,
    check_index,
    check_int,
    check_softcap,
    differ,
    is_empty,
    none_as_zero,
)
from ._linear_cross_entropy_ops import (
    ARGUMENTS,
    CALL_ARGUMENTS,
    EXTRAS,
    chunk_plan,
    common_dtype,
    define,
    fake_of_rows,
    flops_of_rows,
    forward_of_rows,
    log_probs_of,
    top_logits,
    with_z_gradient,
)
from ._ops import InvalidArgument, accumulator_of, below_autograd, is_known, ops
from ._plain import is_compiling
from .cross_entropy import (
    autocast_result,
    check_cross_entropy,
    cross_entropy_rows,
    entropy_unless_ignored,
    reduce_rows,
    reduction_enum,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Shapes below are as in the raw operators: input [N, H], linear_weight [C, P, H], linear_bias [C, P], target [N, P] or [N, C,
# P], weight [C] in the accumulator's dtype, row_scale [N]. tensors = (input, linear_weight, linear_bias, target), constants =
# (weight, row_scale), and options = (ignore_index, label_smoothing, dtype of the products, scale, softcap).


class _RowExtras(NamedTuple):
    """What a call returns of each row in addition to loss, lse and row weight: the last arguments of the raw operators."""

    argmax: bool = False
    entropy: bool = False
    top: int = 0  # of how many of the most likely classes the log-probabilities are wanted


def _logits_in_chunks(
    input, linear_weight, linear_bias, target, weight, row_scale, ignore_index, label_smoothing, dtype, scale, softcap, extras
):  # fmt: skip
    """The results of the raw operator in differentiable operations, for derivatives of any order and for torch.func."""
    classes, positions, hidden = linear_weight.shape
    rows = input.shape[0]
    begins, step = [0], None  # a graph would unroll the loop, and so be specialised to one number of rows
    if not torch.compiler.is_compiling() and all(isinstance(size, int) for size in (rows, classes, positions, hidden)):
        step, _ = chunk_plan(rows, classes * positions, hidden, dtype, input.device.type, False)
        begins = range(0, max(rows, 1), max(step, 1))
    matrix = linear_weight.flatten(0, 1).to(dtype)
    bias = None if linear_bias is None else linear_bias.flatten().to(dtype)
    common = common_dtype(dtype, target)
    pieces = []
    for begin in begins:
        chunk = slice(begin, None if step is None else begin + step)
        logits = _torch.linear(input[chunk].to(dtype), matrix, bias).unflatten(1, (classes, positions)).to(common)
        if scale != 1:
            logits = logits * scale
        if row_scale is not None:
            logits = (logits * row_scale[chunk].view(-1, 1, 1)).to(common)
        t, indices = target[chunk], input.new_empty([0], dtype=torch.int64)
        if extras.argmax:
            indices = logits.detach().argmax(1)
        if softcap:
            ignored = None if t.is_floating_point() else (t == ignore_index).unsqueeze(1)
            logits = _capped(logits.to(accumulator_of(common)), softcap, ignored)
        t = t.to(logits.dtype) if t.is_floating_point() else t
        rows_here = cross_entropy_rows(logits, t, weight, ignore_index, label_smoothing, extras.entropy)
        top = top_logits(logits.detach(), extras.top)
        pieces.append((*rows_here, indices, *log_probs_of(top, rows_here[1].detach())))
    return pieces[0] if len(pieces) == 1 else tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


def _capped(logits: Tensor, softcap: float, ignored: Tensor | None) -> Tensor:
    """softcap * tanh(logits / softcap), with a derivative that keeps the gradient of an `ignored` row at 0 if it holds NaN."""
    if ignored is None:
        return softcap * torch.tanh(logits / softcap)
    lost = ignored & logits.isnan()
    capped = softcap * torch.tanh(logits.masked_fill(lost, 0) / softcap)
    return capped.masked_fill(lost, float("nan"))


def _call(operator, *arguments):
    """Calls a raw operator; a target out of range raises IndexError, as in torch."""
    if dispatches():
        return dispatch(operator.default, *arguments)
    try:
        return _BELOW_AUTOGRAD[operator](*arguments)
    except RuntimeError as error:
        if "out of bounds" in str(error):
            raise IndexError(str(error)) from None
        raise


_BELOW_AUTOGRAD = {op: below_autograd(op) for op in (ops.linear_cross_entropy_forward, ops.linear_cross_entropy_step)}


def _require_grad(tensors) -> list[bool]:
    return [t is not None and t.requires_grad for t in tensors]


class _RowLosses(Function):
    """(loss, lse, row_weight, entropy, argmax, top_log_probs, top_classes), each [N, P], the last two [N, P, k]; the backward
    pass computes the logits again."""

    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, target, weight, row_scale, options, wanted, extras):
        tensors = input, linear_weight, linear_bias, target, weight, row_scale
        rows = _call(ops.linear_cross_entropy_forward, *tensors, *options, *extras)
        ctx.save_for_backward(*tensors, rows[3] if extras.entropy else None)
        ctx.options, ctx.wanted = options, wanted
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # lse has a gradient in few calls, and autograd's zeros would be no DTensors
        return rows

    @staticmethod
    def backward(ctx, grad_loss, grad_lse, _, grad_entropy, *others):
        *tensors, entropy = ctx.saved_tensors
        if entropy is None:
            grad_entropy = None
        if grad_loss is None:
            given = grad_entropy if grad_lse is None else grad_lse
            if given is None:
                return (None,) * 9
            grad_loss = torch.zeros_like(given)
        grads = _gradients(tensors, ctx.options, ctx.wanted, grad_loss, grad_lse, None, grad_entropy, entropy)
        return *grads, None, None, None, None, None


class _ReducedLoss(Function):
    """_RowLosses' results with the mean or sum in the place of loss, and without row_weight; the forward pass computes the
    gradients for an incoming gradient of 1."""

    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, target, weight, row_scale, options, wanted, extras, reduction, z_loss):
        tensors = input, linear_weight, linear_bias, target, weight, row_scale
        grad_loss, lse_factor = _cotangents(1.0, linear_weight.shape[0], target, weight, options, reduction, z_loss)
        found = _call(ops.linear_cross_entropy_step, *tensors, *options, grad_loss, lse_factor, wanted, *extras)
        (loss, lse, row_weight, entropy, *others), grads = found[:7], found[7:]
        kept = (entropy if extras.entropy else None, *(grad if w else None for grad, w in zip(grads, wanted, strict=True)))
        ctx.save_for_backward(*tensors, *kept)
        ctx.options, ctx.wanted, ctx.reduction, ctx.z_loss = options, wanted, reduction, z_loss
        ctx.set_materialize_grads(False)  # so that grad_lse is None unless lse is differentiated
        classes, (ignore_index, *_) = linear_weight.shape[0], options
        loss = reduce_rows(loss, lse, row_weight, target, ignore_index, classes, reduction, z_loss)
        return loss, lse, entropy, *others

    @staticmethod
    def backward(ctx, grad, grad_lse, grad_entropy, *_):
        saved = ctx.saved_tensors  # read once, since under checkpointing a second read raises
        tensors, entropy, unit_grads = saved[:6], saved[6], saved[7:]  # unit_grads: for an incoming gradient of 1
        classes = tensors[1].shape[0]
        if entropy is None:
            grad_entropy = None
        if grad_lse is not None or grad_entropy is not None or torch.is_grad_enabled():  # with create_graph=True, too
            cotangents = _cotangents(
                0.0 if grad is None else grad, classes, *tensors[3:5], ctx.options, ctx.reduction, ctx.z_loss
            )
            of_rows = cotangents[0], grad_lse, cotangents[1], grad_entropy, entropy
            grads = _gradients(tensors, ctx.options, ctx.wanted, *of_rows)
        elif grad is None:
            grads = (None,) * 4
        else:
            # No later call reads unit_grads, unless the graph is kept for another backward pass.
            in_place = not torch._C._autograd._get_current_graph_task_keep_graph() and not is_traced()
            grads = tuple(None if g is None else _scaled(g, grad, in_place) for g in unit_grads)
        return *grads, None, None, None, None, None, None, None


def _gradients(tensors, options, wanted, grad_loss, grad_lse, lse_factor, grad_entropy=None, entropy=None):
    of_entropy = () if grad_entropy is None else (grad_entropy, entropy)
    cotangents = grad_loss, grad_lse, lse_factor, wanted, *of_entropy
    found = ops.linear_cross_entropy_backward.default(*tensors, *options, *cotangents)
    return tuple(grad if w else None for grad, w in zip(found, wanted, strict=True))


def _reduced_by(rows_of: Callable, arguments):
    """_ReducedLoss' results from the rows that `rows_of` computes, for arguments of linear_cross_entropy_reduced."""
    call, (reduction, z_loss, *extras) = arguments[:CALL_ARGUMENTS], arguments[CALL_ARGUMENTS:]
    loss, lse, row_weight, *others = rows_of(*call, *extras)
    return reduce_rows(loss, lse, row_weight, call[3], call[6], call[1].shape[0], reduction, z_loss), lse, *others


def _reduced(*arguments):
    return _reduced_by(forward_of_rows, arguments)


def _reduced_fake(*arguments):
    call, (_, _, *extras) = arguments[:CALL_ARGUMENTS], arguments[CALL_ARGUMENTS:]
    loss, lse, _, *others = fake_of_rows(*call, *extras)
    return loss.new_empty([]), lse, *others


define(
    "linear_cross_entropy_reduced",
    f"({ARGUMENTS}, int reduction, float z_loss, {EXTRAS}) -> (Tensor loss, Tensor lse, Tensor entropy, Tensor argmax, "
    "Tensor top_log_probs, Tensor top_classes)",
    _reduced,
    _reduced_fake,
    flops_of_rows,
)


@composite(ops.linear_cross_entropy_reduced)
def _reduced_with_derivative(*arguments):
    call, (reduction, z_loss, *extras) = arguments[:CALL_ARGUMENTS], arguments[CALL_ARGUMENTS:]
    tensors, constants, options = call[:4], call[4:6], call[6:]
    if not (eager_transforms_active() or is_differentiated(constants[0])):
        wanted, extras = _require_grad(tensors), _RowExtras(*extras)
        return _ReducedLoss.apply(*tensors, *constants, options, wanted, extras, reduction, z_loss)
    return _reduced_by(_rows, arguments)


@composite(ops.linear_cross_entropy_forward)
def _rows(*arguments):
    call, extras = arguments[:CALL_ARGUMENTS], _RowExtras(*arguments[CALL_ARGUMENTS:])
    tensors, constants, options = call[:4], call[4:6], call[6:]
    if eager_transforms_active() or is_differentiated(constants[0]):
        return _logits_in_chunks(*tensors, *constants, *options, extras)
    return _RowLosses.apply(*tensors, *constants, options, _require_grad(tensors), extras)


@composite(ops.linear_cross_entropy_backward)
def _gradients_in_one_table(
    input, linear_weight, linear_bias, target, weight, row_scale, ignore_index, label_smoothing, dtype, scale, softcap,
    grad_loss, grad_lse, lse_factor, wanted, grad_entropy=None, entropy=None,
):  # fmt: skip
    classes, positions, _ = linear_weight.shape
    common = common_dtype(dtype, target)
    x, matrix = input.to(dtype), linear_weight.flatten(0, 1).to(dtype)
    logits = _torch.linear(x, matrix, None if linear_bias is None else linear_bias.flatten().to(dtype))
    if row_scale is not None:
        scale = scale * row_scale.view(-1, 1, 1)
    scores = (logits.unflatten(1, (classes, positions)).to(common) * scale).to(common)
    ignored = None if target.is_floating_point() else target == ignore_index
    tanh = None
    if softcap:
        scores = scores.to(accumulator_of(common))
        lost = torch.zeros_like(scores, dtype=torch.bool) if ignored is None else ignored.unsqueeze(1) & scores.isnan()
        tanh = torch.tanh(scores.masked_fill(lost, 0) / softcap)
        scores = (softcap * tanh).masked_fill(lost, float("nan"))
    if lse_factor is not None:
        lse = ops.logsumexp_forward.default(scores, 1, accumulator_of(scores.dtype))
        grad_lse = with_z_gradient(grad_lse, lse_factor, lse)
    arguments = (target.to(scores.dtype) if ignored is None else target, weight, ignore_index, label_smoothing)
    grad, grad_target = ops.cross_entropy_backward.default(
        grad_loss, grad_lse, scores, *arguments, wanted[3], grad_entropy, entropy
    )
    if tanh is not None:
        grad = grad * (1 - tanh * tanh)
    grad = (grad * scale).to(dtype).flatten(1)
    if ignored is not None:  # an ignored row may hold NaN
        no_grad = ignored
        for row_grad in (grad_lse, grad_entropy):
            no_grad = no_grad if row_grad is None else no_grad & (row_grad == 0)
        x = x.masked_fill(no_grad.all(1, keepdim=True), 0)
    none = input.new_empty([0])
    return (
        (grad @ matrix).to(input.dtype) if wanted[0] else none,
        (grad.mT @ x).view(linear_weight.shape).to(linear_weight.dtype) if wanted[1] else none,
        grad.sum(0, dtype=accumulator_of(dtype)).view(classes, positions).to(linear_bias.dtype) if wanted[2] else none,
        grad_target.to(target.dtype) if wanted[3] else none,
    )


@composite(ops.linear_cross_entropy_step)
def _step(*arguments):
    call, (grad_loss, lse_factor, wanted, *extras) = arguments[:CALL_ARGUMENTS], arguments[CALL_ARGUMENTS:]
    rows = ops.linear_cross_entropy_forward.default(*call, *extras)
    return *rows, *ops.linear_cross_entropy_backward.default(*call, grad_loss, None, lse_factor, wanted)


without_derivative(ops.scale_, "it writes in place")


def _cotangents(scale, classes, target, weight, options, reduction: int, z_loss: float):
    """(grad_loss, lse_factor), both [N, P]: the gradient of each row's loss, and the gradient of each row's lse divided by lse,
    for an incoming gradient `scale` of the reduced loss. lse_factor is None without a z-loss."""
    ignore_index, _, dtype, *_ = options
    accumulator = accumulator_of(common_dtype(dtype, target))
    if target.is_floating_point():
        shape, counted = target.shape[::2], None
        count = divisor = shape[0] * shape[1]
    else:
        shape, counted = target.shape, target != ignore_index
        count = divisor = counted.sum()
        if weight is not None and reduction == 1:
            divisor = weight[target.clamp(0, classes - 1)].masked_fill(~counted, 0).sum()
    if reduction == 2:
        count = divisor = 1
    one = torch.ones([], dtype=accumulator, device=target.device) * scale
    lse_factor = None
    if z_loss != 0:
        lse_factor = (one * (2 * z_loss) / count).expand(shape)
        if counted is not None:  # the mask matters if all rows are ignored: the factor is then infinite
            lse_factor = lse_factor.masked_fill(~counted, 0)
    return (one / divisor).expand(shape), lse_factor


def _scaled(unit_grad: Tensor, grad: Tensor, in_place: bool) -> Tensor:
    """unit_grad * grad, rounded once. `grad` is a scalar, in float32 where unit_grad has 16 bits."""
    if not in_place:
        return (unit_grad.to(grad.dtype) * grad).to(unit_grad.dtype)
    ops.scale_.default(unit_grad, grad)
    return unit_grad


def _class_weights(weight: Tensor | None, dtype: torch.dtype, target: Tensor) -> Tensor | None:
    return None if weight is None else weight.to(accumulator_of(common_dtype(dtype, target))).contiguous()


def _row_losses(tensors, weight, row_scale, options, extras: _RowExtras):
    """The raw operator's results, computed in the cheapest way with the derivatives that may be requested."""
    leaves = tensors if weight is None else (*tensors, weight)
    if transforms_active() or (torch.is_grad_enabled() and weight is not None and weight.requires_grad):
        return _logits_in_chunks(*tensors, weight, row_scale, *options, extras)
    (_, _, _, target), (_, _, dtype, *_) = tensors, options
    weight = _class_weights(weight, dtype, target)
    if torch.is_grad_enabled() and any(_require_grad(leaves)) and not dispatches():
        return _RowLosses.apply(*tensors, weight, row_scale, options, _require_grad(tensors), extras)
    return _call(ops.linear_cross_entropy_forward, *tensors, weight, row_scale, *options, *extras)


def _computes_gradients_forward(tensors, weight, dtype, reduction: int, returns_rows: bool) -> bool:
    """Returns whether the forward pass computes the gradients. `returns_rows`: whether the caller gets lse or entropy."""
    if not torch.is_grad_enabled() or not any(_require_grad(tensors)) or reduction == 0 or transforms_active():
        return False
    if weight is not None and weight.requires_grad:
        return False
    if _policy.is_dtensor(tensors[0]):  # the mean's divisor is a sum over ranks
        return False
    # In float16 the gradients of a mean underflow unless the loss scale is a factor from the start, not one applied later.
    if dtype == torch.float16 or is_empty((tensors[0].shape[0], *tensors[1].shape[:2])):
        return False
    # A compiled graph cannot tell whether these are differentiated, and an exported one may never be differentiated at all. A
    # trace by torch.jit holds neither Functions nor lists of flags, and Dynamo's Functions have no vmap and no forward mode.
    if _policy.traced_by_jit() is not None:
        return False
    if not torch.compiler.is_compiling():
        return True
    return not (returns_rows or torch.compiler.is_exporting() or traces_transforms())


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which torch's linear computes on this tensor: autocast's, if that is active for it."""
    return torch.get_autocast_dtype(tensor.device.type) if autocasts(tensor) else tensor.dtype


def check_linear_cross_entropy(
    input, linear_weight, target, linear_bias, weight, ignore_index, label_smoothing, max_dims=None, weight_name="linear_weight"
) -> None:
    """Raises torch's exception types for tensors and options that do not fit together. Messages call linear_weight
    `weight_name`."""
    if input.dim() < 1 or (max_dims is not None and input.dim() > max_dims):
        accepted = "[H] or [..., H]" if max_dims is None else "[H] or [N, H]"
        raise InvalidArgument(f"input: expected {accepted}, got {list(input.shape)}")
    if linear_weight.dim() < 2:
        raise InvalidArgument(f"{weight_name}: expected [C, H] or [C, d_1, ..., d_K, H], got {list(linear_weight.shape)}")
    (*batch, hidden), (classes, *positions, weight_hidden) = input.shape, linear_weight.shape
    shapes = f"with input {list(input.shape)} and {weight_name} {list(linear_weight.shape)}"
    if is_known(weight_hidden != hidden):
        raise InvalidArgument(f"{weight_name}: expected input's width (last dimension) {hidden}, got {weight_hidden}")
    if linear_bias is not None and differ(linear_bias.shape, [classes, *positions]):
        raise InvalidArgument(f"linear_bias: expected {[classes, *positions]} {shapes}, got {list(linear_bias.shape)}")
    if positions and not batch:
        raise InvalidArgument(
            f"input: expected [N, {hidden}] with {weight_name} {list(linear_weight.shape)}, got {list(input.shape)}"
        )
    table, rows = [*batch, classes, *positions], [*batch, *positions]
    probabilities = not differ(target.shape, table)
    if probabilities and ignore_index is not None:
        raise InvalidArgument(
            f"ignore_index: expected None with class probabilities, which are never ignored, got {ignore_index}"
        )
    for name, tensor in ((weight_name, linear_weight), ("linear_bias", linear_bias), ("target", target)):
        if tensor is not None and tensor.device != input.device:
            raise InvalidArgument(f"{name}: expected input's device {input.device}, got {tensor.device}")
    dtype = product_dtype(input)
    check_floating("linear_cross_entropy: input", dtype)
    for name, tensor in ((weight_name, linear_weight), ("linear_bias", linear_bias)):
        if tensor is not None and product_dtype(tensor) != dtype:
            raise InvalidArgument(f"{name}: expected input's dtype {input.dtype}, got {tensor.dtype}")
    if not probabilities and differ(target.shape, rows) and (batch or differ(target.shape, [1])):
        raise InvalidArgument(
            f"target: expected {rows} for class indices or {table} for class probabilities {shapes}, got {list(target.shape)}"
        )
    if probabilities and not target.is_floating_point():
        raise InvalidArgument(f"target: expected a floating dtype for class probabilities {table}, got {target.dtype}")
    # cross_entropy's own check does the rest, on expanded logits that take no memory.
    if batch:
        target = target.flatten(0, len(batch) - 1)
    leading = target.shape[:1] if batch else ()
    logits = input.new_empty([], dtype=dtype).expand([*leading, classes, *positions])
    check_cross_entropy(logits, target, weight, -100 if ignore_index is None else ignore_index, label_smoothing)


class LogitOptions(TypedDict):
    """Checked options of the logits, by their names in `linear_cross_entropy_impl`."""

    softcap: float
    scale: float
    row_scale: Tensor | None
    top_log_probs: int


def check_logit_options(input: Tensor, softcap, scale, top_log_probs, classes: int | None) -> LogitOptions:
    """Raises InvalidArgument or TypeError for invalid options. `classes` is None where their number is not known yet."""
    for name, number in (("softcap", softcap), ("scale", scale)):
        if isinstance(number, Tensor) and number.requires_grad:
            raise InvalidArgument(
                f"{name}: expected a number without a gradient, got requires_grad=True; multiply input by a learned scale"
            )
    row_scale = None
    if isinstance(scale, Tensor) and scale.dim() > 0:
        batch = input.shape[:-1]
        fits = not differ(scale.shape, batch) or not differ(scale.shape, [math.prod(batch)])
        if not fits or not scale.is_floating_point() or scale.device != input.device:
            raise InvalidArgument(
                f"scale: expected a number, or a floating {list(batch)} on {input.device}, one for each row of input, "
                f"got {list(scale.shape)} {scale.dtype} on {scale.device}"
            )
        scale, row_scale = 1.0, scale
    softcap, scale = check_softcap(softcap), check_float("scale", scale)
    if not abs(scale) < float("inf"):
        raise InvalidArgument(f"scale: expected a finite number, got {scale}")
    top = check_int("top_log_probs", top_log_probs)
    if top < 0 or (classes is not None and is_known(top > classes)):
        limit = "or more" if classes is None else f"to the number of classes, {classes}"
        raise InvalidArgument(f"top_log_probs: expected 0 {limit}, got {top}")
    return {"softcap": softcap, "scale": scale, "row_scale": row_scale, "top_log_probs": top}


def linear_cross_entropy_impl(
    input, linear_weight, target, linear_bias, weight, reduction: int, ignore_index, label_smoothing, return_lse, z_loss, dtype,
    softcap=0.0, scale=1.0, return_z_loss=False, return_argmax=False, return_entropy=False, row_scale=None, top_log_probs=0,
    shard=None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """linear_cross_entropy with checked arguments that our kernels take; `reduction` is a reduction_enum. If linear_weight and
    linear_bias are a shard of the classes, `shard` has the total number of `classes` and computes the `row_losses` over
    them."""
    (*batch, _), (classes, *positions, _) = input.shape, linear_weight.shape
    classes = classes if shard is None else shard.classes
    probabilities = target.dim() == len(batch) + 1 + len(positions) and target.is_floating_point()
    ignore_index = -100 if ignore_index is None else check_index("ignore_index", ignore_index, any_rank=True)
    label_smoothing = float(label_smoothing) if label_smoothing > 0 else 0.0  # 0 for a negative or NaN one, as in torch
    if not is_compiling() and _checked.active:
        _checked.check_targets(target, classes, ignore_index)
    products = product_dtype(input)
    rows = [*batch, *positions] if batch or probabilities else target.shape
    if dtype is None and autocasts(input):
        dtype = autocast_result(target, weight)
    if dtype is None:
        dtype = common_dtype(products, target)
        if probabilities and weight is not None:
            dtype = torch.promote_types(dtype, weight.dtype)

    input = input.flatten(0, -2) if batch else input.unsqueeze(0)
    linear_weight = linear_weight.flatten(1, -2) if positions else linear_weight.unsqueeze(1)
    if linear_bias is not None:
        linear_bias = linear_bias.flatten(1) if positions else linear_bias.unsqueeze(1)
    if probabilities:
        target = target.flatten(0, len(batch) - 1) if batch else target.unsqueeze(0)
        target = target.flatten(2) if positions else target.unsqueeze(2)
    else:
        target = target.to(torch.int64)
        target = target.flatten(0, len(batch) - 1) if batch else target.reshape(1)
        target = target.flatten(1) if positions else target.unsqueeze(1)

    if row_scale is not None:
        row_scale = row_scale.detach().flatten().to(accumulator_of(products))
    tensors, options = (input, linear_weight, linear_bias, target), (ignore_index, label_smoothing, products, scale, softcap)
    extras = _RowExtras(return_argmax, return_entropy, top_log_probs)
    if shard is None and _computes_gradients_forward(tensors, weight, products, reduction, return_lse or return_entropy):
        weight = _class_weights(weight, products, target)
        if is_compiling():  # a Function that Dynamo traces has no second derivative, that of an operator does
            arguments = (*tensors, weight, row_scale, *options, reduction, z_loss, *extras)
            result, lse, entropy, argmax, *top = ops.linear_cross_entropy_reduced.default(*arguments)
        else:
            result, lse, entropy, argmax, *top = _ReducedLoss.apply(
                *tensors, weight, row_scale, options, _require_grad(tensors), extras, reduction, z_loss
            )
    else:
        row_losses = _row_losses if shard is None else shard.row_losses
        loss, lse, row_weight, entropy, argmax, *top = row_losses(tensors, weight, row_scale, options, extras)
        result = reduce_rows(loss, lse, row_weight, target, ignore_index, classes, reduction, z_loss)
    results = [result]
    if return_z_loss:  # the loss of rows with cross-entropy 0
        lse_value = lse.detach()
        none, one = torch.zeros_like(lse_value), torch.ones_like(lse_value)
        results.append(reduce_rows(none, lse_value, one, target, ignore_index, classes, reduction, z_loss))
    if reduction == 0:
        results = [result.reshape([*batch, *positions]) for result in results]
    loss, *z_term = (result.to(dtype) for result in results)
    others = [lse.reshape(rows)] if return_lse else []
    others += [*z_term, argmax.reshape(rows)] if return_argmax else z_term
    if return_entropy:
        others.append(entropy_unless_ignored(entropy, target, ignore_index).reshape(rows))
    if top_log_probs:
        others += [part.detach().reshape([*rows, top_log_probs]) for part in top]
    return (loss, *others) if others else loss


class _Keywords(TypedDict, total=False):
    """The keywords of linear_cross_entropy that do not change the type of the result, for type checkers."""

    linear_bias: Tensor | None
    weight: Tensor | None
    reduction: str
    ignore_index: int | None
    label_smoothing: float
    options: object
    z_loss: float
    dtype: torch.dtype | None
    softcap: float
    scale: float | Tensor


_Yes: TypeAlias = Literal[True]
_No: TypeAlias = Literal[False]


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _No = ..., return_z_loss: _No = ...,
    return_argmax: _No = ..., return_entropy: _No = ..., **options: Unpack[_Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _No = ..., return_z_loss: _No = ...,
    return_argmax: _No = ..., return_entropy: _Yes, **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _No = ..., return_z_loss: _No = ...,
    return_argmax: _Yes, return_entropy: _No = ..., **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _No = ..., return_z_loss: _Yes,
    return_argmax: _No = ..., return_entropy: _No = ..., **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _Yes, return_z_loss: _No = ...,
    return_argmax: _No = ..., return_entropy: _No = ..., **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _No = ..., return_z_loss: _No = ...,
    return_argmax: _Yes, return_entropy: _Yes, **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _No = ..., return_z_loss: _Yes,
    return_argmax: _No = ..., return_entropy: _Yes, **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _No = ..., return_z_loss: _Yes,
    return_argmax: _Yes, return_entropy: _No = ..., **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _Yes, return_z_loss: _No = ...,
    return_argmax: _No = ..., return_entropy: _Yes, **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _Yes, return_z_loss: _No = ...,
    return_argmax: _Yes, return_entropy: _No = ..., **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _Yes, return_z_loss: _Yes,
    return_argmax: _No = ..., return_entropy: _No = ..., **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _No = ..., return_z_loss: _Yes,
    return_argmax: _Yes, return_entropy: _Yes, **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _Yes, return_z_loss: _No = ...,
    return_argmax: _Yes, return_entropy: _Yes, **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _Yes, return_z_loss: _Yes,
    return_argmax: _No = ..., return_entropy: _Yes, **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _Yes, return_z_loss: _Yes,
    return_argmax: _Yes, return_entropy: _No = ..., **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: _Yes, return_z_loss: _Yes,
    return_argmax: _Yes, return_entropy: _Yes, **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: bool = ..., return_z_loss: bool = ...,
    return_argmax: bool = ..., return_entropy: bool = ..., top_log_probs: int = ...,
    **options: Unpack[_Keywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: object = None,
    return_lse: bool = False,
    z_loss: float | None = 0.0,
    dtype: torch.dtype | None = None,
    softcap: float | None = 0.0,
    scale: float | Tensor = 1.0,
    return_z_loss: bool = False,
    return_argmax: bool = False,
    return_entropy: bool = False,
    top_log_probs: int = 0,
) -> Tensor | tuple[Tensor, ...]:
    """cross_entropy(linear(input, linear_weight, linear_bias), target), without the table of logits: one chunk of its rows
    exists at a time, 128 MiB on the CPU and 512 MiB on CUDA, also in the backward pass.

    Args:
        input: `[H]` or `[..., H]`; float16, bfloat16, float32 or float64. Under autocast the products run in its dtype and the
            loss is float32.
        linear_weight: `[C, H]`, of input's dtype, or for a loss with K dimensions of positions `[C, d_1, ..., d_K, H]`.
        target: class indices (int64 or uint8) `[..., d_1, ..., d_K]`, or class probabilities `[..., C, d_1, ..., d_K]`.
        linear_bias: `[C]` or `[C, d_1, ..., d_K]`.
        weight: as in `cross_entropy`, and so are `reduction`, `label_smoothing`, `return_lse`, `z_loss` and `dtype`.
        ignore_index: -100 if None; an error with probabilities.
        options: accepted for compatibility with torch and not used.
        softcap: limits logits to (-softcap, softcap), as softcap * tanh(logits / softcap); 0 is none.
        scale: multiplies the logits, bias included, before the softcap; a number, or a floating tensor of one for each row of
            input (1 / temperature), `[...]` or `[N]`, without a gradient.
        return_z_loss: also return the part of the loss that z_loss adds, of the loss's shape and dtype; no gradient flows
            through it.
        return_argmax: also return the class of the largest logit, int64, of the shape of class indices, for ignored rows too:
            `argmax == target` marks correct predictions. Ties give any of the classes.
        return_entropy: also return each row's entropy, as in `cross_entropy`.
        top_log_probs: k, to also return the log-probabilities of each row's k most likely classes, descending, in lse's dtype,
            and these classes, int64; both of the shape of class indices and k; of ignored rows too; without a gradient.

    Returns:
        The loss, a scalar, or with reduction="none" of the shape of class indices. If more is requested a tuple: the loss, then
        lse, z term, argmax, entropy, the k log-probabilities and their classes as requested, in this order.

    Products, losses and lse are summed in float32 (float64 for float64). The gradient of linear_weight is summed over chunks in
    its own dtype, but in float32 if a 16-bit one would be rounded for more than 8 chunks. An ignored row has gradient 0
    whatever its input holds. A mean or sum computes its gradients in the forward pass, so that `loss.backward()` takes three
    matrix products in all; float16, reduction="none" and a gradient of lse or entropy compute the logits again in the backward
    pass. Second derivatives, forward mode and torch.func go through plain torch operations, in memory for all logits.

    All results use the scaled and capped logits. A scale costs no extra time, a tensor of scales a pass over each chunk of
    logits in either direction. A softcap and its derivative are computed in float32 (float64 for float64), and take two more
    blocks of logits, of 16 MiB on the CPU, and on CUDA of 64 MiB and at least 128 rows.

    Raises:
        IndexError: a target is out of range (a device assert on CUDA).
        InvalidArgument: tensors and options that do not fit together.
        TypeError: an argument of another type.
        NotImplementedError: tensors that no kernel takes.

    Source: the chunks of Liger Kernel (arXiv 2410.10989), the aim of Cut Cross-Entropy (arXiv 2411.09009), and the online
    softmax (arXiv 1805.02867).
    """
    number = reduction_enum(reduction, None, None)
    tensors = {"input": input, "linear_weight": linear_weight, "target": target}
    optional = {"linear_bias": linear_bias, "weight": weight}
    check_types(tensors, optional, {})
    check_linear_cross_entropy(input, linear_weight, target, linear_bias, weight, ignore_index, label_smoothing)
    _policy.require_kernel("linear_cross_entropy", **tensors, **optional)
    dtype = check_dtype(dtype)
    if dtype is not None:
        check_floating("linear_cross_entropy: result", dtype)
    z_loss = check_float("z_loss", none_as_zero(z_loss))
    logit_options = check_logit_options(input, softcap, scale, top_log_probs, linear_weight.shape[0])
    check_flag("return_lse", return_lse)
    flags = check_flags(return_z_loss=return_z_loss, return_argmax=return_argmax, return_entropy=return_entropy)
    if return_argmax and linear_weight.shape[0] == 0:
        raise InvalidArgument(f"return_argmax: expected at least one class, got linear_weight {list(linear_weight.shape)}")
    return linear_cross_entropy_impl(
        *(input, linear_weight, target, linear_bias, weight, number, ignore_index, label_smoothing, return_lse, z_loss, dtype),
        **logit_options,
        **flags,
    )
