"""vocab_parallel_linear_cross_entropy: the loss of an output layer with its classes sharded over ranks.

Each rank computes two numbers per row over its own classes, lse and the target's logit (and a third where the entropy is
wanted), in chunks of logits (_vocab_rows.py). They are gathered once, and every rank computes the same loss from all of them.
In the backward pass each rank recomputes the logits of its classes; the gradients of weight and bias stay local, the gradient
of the input is summed over the ranks.

The collectives are pairs of autograd Functions, each the other's derivative, so that derivatives of any order are exact. A
value is either whole (the same on every rank, like its gradient) or local to a rank.

Every rank must reach the same collectives in the same order, also in double backward. Autograd runs the nodes of a graph in the
reverse order of their creation, so it suffices that the ranks create the same Functions of this module in the same order, and
that each is needed on all ranks or on none, whatever the number of classes or chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from .. import _policy
from .._autograd import transforms_active
from .._checks import check_dtype, check_flags, check_float, check_floating, check_index, check_int, check_tensor, none_as_zero
from .._ops import InvalidArgument, accumulator_of
from ..cross_entropy import reduction_enum
from ..linear_cross_entropy import (
    check_linear_cross_entropy,
    check_logit_options,
    linear_cross_entropy_impl,
    product_dtype,
)
from ._agreement import checked_with_numbers
from ._group import Group, all_reduce_, group_of, start_all_gather, wait
from ._vocab_rows import ELSEWHERE, as_index, differentiable_rows, shard_gradients, shard_rows

_NAME = "distributed.vocab_parallel_linear_cross_entropy"


class _Gather(Function):
    """A rank's own tensor -> all ranks' [W, ...], whole."""

    @staticmethod
    def forward(ctx, own, group):
        ctx.group = group
        whole = wait(start_all_gather(own, group)) if own.numel() else own.new_empty(group.ranks * own.shape[0], *own.shape[1:])
        return whole.unflatten(0, (group.ranks, own.shape[0]))

    @staticmethod
    def backward(ctx, grad):
        return _Slice.apply(grad, ctx.group), None


class _Slice(Function):
    """A whole [W, ...] -> a rank's own part of it."""

    @staticmethod
    def forward(ctx, whole, group):
        ctx.group = group
        return whole[group.rank].clone()

    @staticmethod
    def backward(ctx, grad):
        return _Gather.apply(grad, ctx.group), None


class _Copy(Function):
    """A whole tensor -> the same tensor; its gradient on a rank is the rank's own part of a sum."""

    @staticmethod
    def forward(ctx, whole, group):
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, grad):
        return _Sum.apply(grad, ctx.group), None


class _Sum(Function):
    """A rank's own part of a sum -> the sum over the ranks, whole."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        return all_reduce_(part.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx, grad):
        return _Copy.apply(grad, ctx.group), None


class _Merge(Function):
    """logsumexp over the shards [W, N, P]. A row's gradient is 0 where its result's gradient is 0, even for non-finite rows."""

    @staticmethod
    def forward(ctx, shards):
        whole = torch.logsumexp(shards, 0)
        ctx.save_for_backward(shards, whole)
        return whole

    @staticmethod
    def backward(ctx, grad):
        shards, whole = ctx.saved_tensors
        return (grad * (shards - whole).exp()).masked_fill(grad == 0, 0)


class _ShardRows(Function):
    """`shard_rows` of (input, linear_weight, linear_bias). The gradient of input is summed over the ranks in the accumulator's
    dtype and rounded once."""

    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, target, row_scale, smooth, options, extras, group):
        rows = shard_rows((input, linear_weight, linear_bias), target, row_scale, smooth, options, *extras)
        differentiable = rows[: len(rows) - 2 * (extras.top + extras.argmax)]
        entropy = differentiable[-1] if extras.entropy else None
        ctx.save_for_backward(input, linear_weight, linear_bias, target, row_scale, smooth, entropy)
        ctx.options, ctx.group, ctx.differentiable = options, group, len(differentiable)
        return rows

    @staticmethod
    def backward(ctx, grad):
        *tensors, target, row_scale, smooth, entropy = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        grad = grad[: ctx.differentiable]  # argmax, the most likely classes and their logits have no gradient
        if torch.is_grad_enabled():
            with torch.enable_grad():
                leaves = [t for t, w in zip(tensors, wanted, strict=True) if w]
                input = tensors[0].to(accumulator_of(ctx.options[0]))
                tensors = _Copy.apply(input, ctx.group), *tensors[1:]
                rows = differentiable_rows(tensors, target, row_scale, smooth, ctx.options, entropy is not None)
                found = iter(torch.autograd.grad(rows, leaves, grad, create_graph=True))
            grads = [next(found) if w else None for w in wanted]
        else:
            grads = shard_gradients(tensors, target, row_scale, smooth, ctx.options, grad, wanted, entropy)
            if wanted[0]:
                grads[0] = all_reduce_(grads[0], ctx.group).to(tensors[0].dtype)
        return *grads, None, None, None, None, None, None


def _merged_entropy(entropies: Tensor, lse: Tensor, ignored: Tensor) -> Tensor:
    """The entropy over all shards, from theirs and their lse, [W, N, P] each: with q the share of a shard, the sum of q
    (entropy - log q), in float64, since terms cancel in its gradient. Ignored rows are left out, as their gradient would be
    0 * NaN."""
    log_q = torch.log_softmax(lse.masked_fill(ignored, 0).double(), 0)
    empty = log_q == float("-inf")
    terms = entropies.masked_fill(empty | ignored, 0) - log_q.masked_fill(empty, 0)
    return (log_q.exp() * terms).sum(0).to(lse.dtype)


class _Shard:
    """A rank's part of `classes` classes: `shards` has the first class and the number of classes of each rank."""

    def __init__(self, group: Group, shards: list[list[int]], classes: int):
        self.group, self.shards, self.classes = group, shards, classes
        self.firsts = [first for first, _ in shards]
        self.first, self.count = shards[group.rank]

    def row_losses(self, tensors, weight, row_scale, options, extras):
        """(loss, lse, row_weight, entropy, argmax, top_log_probs, top_classes) of the whole vocabulary, as in
        linear_cross_entropy."""
        *tensors, target = tensors
        ignore_index, label_smoothing, *options = options
        accumulator, ignored = accumulator_of(options[0]), target == ignore_index
        self._check_targets(target, ignored)
        here = ~ignored & (target >= self.first) & (target < self.first + self.count)
        local = torch.where(here, target - self.first, ELSEWHERE)
        weight = None if weight is None else weight.to(accumulator)
        smooth, total = None, self.classes  # class weights of this shard, and the sum of all class weights
        if label_smoothing:
            smooth = target.new_ones([self.count], dtype=accumulator)
            if weight is not None:
                smooth, total = weight[self.first : self.first + self.count].contiguous(), weight.sum()
        rows = _ShardRows.apply(*tensors, local, row_scale, smooth, tuple(options), extras, self.group)
        rows = _Gather.apply(rows, self.group)
        lse = _Merge.apply(rows[:, 0])
        loss = (lse - rows[:, 1].sum(0)).masked_fill(ignored, 0)
        if weight is None:
            row_weight = (~ignored).to(accumulator)
        elif self.classes:
            row_weight = weight[target.clamp(0, self.classes - 1)].masked_fill(ignored, 0)
        else:
            row_weight = torch.zeros_like(loss)
        if weight is not None:
            loss = loss * row_weight
        if smooth is not None:
            uniform = (total * lse - rows[:, 2].sum(0)).masked_fill(ignored, 0)
            loss = (1 - label_smoothing) * loss + label_smoothing / max(self.classes, 1) * uniform
        entropy, argmax, found, first = None, None, rows.detach(), 2 + (smooth is not None)
        if extras.entropy:
            entropy = _merged_entropy(rows[:, first], rows[:, 0], ignored)
        if extras.argmax:
            argmax = self._argmax(found)
        first += extras.entropy
        top = self._top(found[:, first : first + 2 * extras.top], lse.detach(), extras.top) if extras.top else ()
        return loss, lse, row_weight, entropy, argmax, *top

    def _top(self, rows: Tensor, lse: Tensor, top: int) -> tuple[Tensor, Tensor]:
        """The log-probabilities of the most likely classes of all shards, and these classes, [N, P, top] each."""
        logits, classes = rows[:, :top], as_index(rows[:, top:])
        classes = classes + torch.tensor(self.firsts, device=rows.device).view(-1, 1, 1, 1)
        # By class, without what a rank of fewer classes than `top` lacks.
        ranks = sorted(range(len(self.shards)), key=self.firsts.__getitem__)
        found = [rank * top + i for rank in ranks for i in range(min(top, self.shards[rank][1]))]
        logits, order = logits.flatten(0, 1)[found].sort(dim=0, descending=True, stable=True)
        classes = classes.flatten(0, 1)[found].gather(0, order)
        return (logits[:top] - lse).movedim(0, -1), classes[:top].movedim(0, -1)

    def _argmax(self, rows: Tensor) -> Tensor:
        largest, index = rows[:, -2], as_index(rows[:, -1])
        firsts = torch.tensor(self.firsts, device=rows.device)
        order = firsts.argsort(stable=True)  # ties go to the lowest class, for any order of the shards
        winner = order[largest[order].argmax(0)]
        return firsts[winner] + index.gather(0, winner.unsqueeze(0)).squeeze(0)

    def _check_targets(self, target: Tensor, ignored: Tensor) -> None:
        right = ignored | ((target >= 0) & (target < self.classes))
        if target.is_cuda:
            torch._assert_async(right.all(), "target: out of bounds")
        elif not right.all():
            wrong = int(target[~right][0])
            raise IndexError(f"target: expected 0 to {self.classes - 1} or ignore_index, got {wrong}, which is out of bounds")


def _check_arguments(input, weight_shard, target, first_class, linear_bias, weight, ignore_index, label_smoothing) -> None:
    """Raises for errors on this rank alone."""
    named = {"input": input, "weight_shard": weight_shard, "target": target, "linear_bias": linear_bias, "weight": weight}
    for name, tensor in named.items():
        if tensor is not None or name in ("input", "weight_shard", "target"):
            check_tensor(name, tensor)
            reason = "a DTensor; pass this rank's shard, tensor.to_local()"
            if not _policy.is_dtensor(tensor):
                reason = _policy.refusal("linear_cross_entropy", tensor)
            if reason is not None:
                raise _policy.no_kernel(_NAME, f"{name}: {reason}")
    if target.is_floating_point():
        raise InvalidArgument(f"target: expected class indices (int64 or uint8), not probabilities, got {target.dtype}")
    check_linear_cross_entropy(
        input, weight_shard, target, linear_bias, None, ignore_index, label_smoothing, weight_name="weight_shard"
    )
    if check_int("first_class", first_class) < 0:
        raise InvalidArgument(f"first_class: expected 0 or more, got {first_class}")
    if weight is not None:
        if weight.dim() != 1 or not weight.is_floating_point() or weight.device != input.device:
            raise InvalidArgument(
                f"weight: expected a floating [classes of the whole vocabulary] on {input.device}, "
                f"got {list(weight.shape)} {weight.dtype} on {weight.device}"
            )
        if weight.requires_grad and torch.is_grad_enabled():
            raise InvalidArgument("weight: expected requires_grad=False with class indices, got True; detach it")


def _check_cover(shards: list[list[int]], weight: Tensor | None, return_argmax: bool, top_log_probs: int) -> int:
    """The number of all classes. `shards` has the first class and the number of classes of each rank. Raises InvalidArgument
    unless the shards are disjoint and cover all classes; empty shards are allowed. The input is the same on every rank."""
    classes = 0
    for first, count, rank in sorted((first, count, rank) for rank, (first, count) in enumerate(shards) if count):
        if first != classes:
            fault = f"begins before class {classes}, where another shard ends" if first < classes else "leaves out classes"
            held = ", ".join(f"[{f}, {f + c}) on rank {r}" for r, (f, c) in enumerate(shards))
            raise InvalidArgument(f"first_class: the shard of rank {rank} of the group {fault}; the ranks hold {held}")
        classes += count
    if weight is not None and weight.shape[0] != classes:
        raise InvalidArgument(f"weight: expected [{classes}], the classes of all ranks, got {list(weight.shape)}")
    if return_argmax and classes == 0:
        raise InvalidArgument("return_argmax: expected at least one class over all ranks, got none")
    if top_log_probs > classes:
        raise InvalidArgument(f"top_log_probs: expected 0 to the classes of all ranks, {classes}, got {top_log_probs}")
    return classes


def _described(arguments: dict, options: dict) -> dict:
    """The values that all ranks must agree on."""
    input, weight_shard, target = (arguments[name] for name in ("input", "weight_shard", "target"))
    linear_bias, weight, row_scale = arguments["linear_bias"], arguments["weight"], arguments["row_scale"]
    # The gradients that are needed decide which collectives the backward pass has.
    grads = torch.is_grad_enabled(), input.requires_grad, weight_shard.requires_grad
    values = ""
    if target.is_cpu:  # on CUDA, reading it would wait for the GPU
        flat = target.detach().flatten().to(torch.int64)
        values = f", values of checksum {(flat * (2 * torch.arange(flat.numel()) + 1)).sum()}"
    return {
        "function": _NAME,
        "input": f"{list(input.shape)} {input.dtype} on {input.device.type}",
        "weight_shard": f"[n, {', '.join(map(str, weight_shard.shape[1:]))}] {weight_shard.dtype}",
        "target": f"{list(target.shape)} {target.dtype}{values}",
        "linear_bias": "none" if linear_bias is None else f"{linear_bias.dtype}, requires_grad {linear_bias.requires_grad}",
        "weight": "none" if weight is None else f"{list(weight.shape)} {weight.dtype}",
        "scale per row": "none" if row_scale is None else f"{list(row_scale.shape)} {row_scale.dtype}",
        "dtype of the products": str(product_dtype(input)),
        "grad mode, requires_grad of input and of weight_shard": str(grads),
        **{name: repr(value) for name, value in options.items()},
    }


@torch.compiler.disable  # the host reads the classes of each rank
def _agreed_shard(group: Group, check: Callable[[], tuple[dict, dict]]) -> tuple[dict, Tensor | None, _Shard]:
    """(options, scales of rows, this rank's shard), after the ranks agreed. `check` returns (arguments, options) of this rank,
    or raises."""

    def call():
        arguments, options = check()
        own = (arguments["first_class"], arguments["weight_shard"].shape[0])
        return _described(arguments, options), own, (arguments, options)

    (arguments, options), shards = checked_with_numbers(group, call)
    classes = _check_cover(shards, arguments["weight"], options["return_argmax"], options["top_log_probs"])
    return options, arguments["row_scale"], _Shard(group, shards, classes)


def vocab_parallel_linear_cross_entropy(
    input: Tensor,
    weight_shard: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | dist.DeviceMesh | None = None,
    first_class: int,
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
    """`linear_cross_entropy` of an output layer with its classes sharded over the ranks of a group: each rank holds some rows
    of the weight. The loss covers the whole vocabulary and is the same on every rank; no rank stores more than a chunk of the
    logits of its own classes.

    Args:
        input: `[H]` or `[..., H]`, the same on every rank; float16, bfloat16, float32 or float64.
        weight_shard: `[n, H]` (or `[n, d_1, ..., d_K, H]`), the weights of the classes [first_class, first_class + n). Ranks
            may have different n, also 0.
        target: class indices (int64 or uint8) of the whole vocabulary, the same on every rank; no probabilities.
        group: the ranks that share the vocabulary: a ProcessGroup, a DeviceMesh of one dimension, or None for the default
            group. All of them make the call.
        first_class: this rank's first class. The ranks' shards cover every class once, in any order.
        linear_bias: `[n]` (or `[n, d_1, ..., d_K]`), this rank's shard.
        weight: `[C]`, the weights of all classes, whole on every rank.
        reduction: as in `linear_cross_entropy`, like all options below; equal on all ranks.
        ignore_index: -100 if None.
        label_smoothing: 0 to 1.
        options: accepted for compatibility with torch and not used.
        return_lse: also return lse over the whole vocabulary, in nats.
        z_loss: adds z_loss * lse^2 for each row that is not ignored.
        dtype: the dtype of the loss.
        softcap: of the logits; 0 is none.
        scale: of the logits, before the softcap; a tensor of one per row is the same on every rank.
        return_z_loss: also return the z_loss part of the loss.
        return_argmax: also return the class of the largest logit; ties go to the lowest class that the ranks found.
        return_entropy: also return the entropy of each row's softmax over the whole vocabulary, in nats.
        top_log_probs: k, to also return the k largest log-probabilities of each row, and their classes.

    Returns:
        As `linear_cross_entropy`, equal on every rank.

    A call exchanges a message of 1 KiB per rank between the hosts, then in one all-gather two numbers per row, in float32
    (float64 for float64): lse over the shard and the target's logit; one more with label smoothing, one with `return_entropy`,
    two with `return_argmax`, 2 k with `top_log_probs`. The backward pass recomputes the logits (four matrix products in all),
    and has one all-reduce, of the gradient of `input` in float32 (float64), unrounded on CUDA and rounded to the product dtype
    on the CPU.

    Operations on the loss must be the same on every rank: each rank takes the gradient of one loss, not of a sum over ranks.
    The gradient of `input` is whole on every rank, those of `weight_shard` and `linear_bias` are local. Second derivatives
    store all logits of the shard; torch.func and forward mode are refused. Under torch.compile the ranks' agreement is a graph
    break.

    Raises:
        InvalidArgument: on every rank, if shapes, dtypes, options or targets differ between ranks, classes overlap or are
            missing, or a rank refused its arguments; or the ranks' call before this one differed, as
            `context_parallel_attention` says. If all ranks refuse with the same message, each raises the error of
            `linear_cross_entropy`. Values of targets are compared on the CPU only.
        IndexError: a target is out of range (a device assert on CUDA).
        TypeError: an argument has a wrong type.
        NotImplementedError: no kernel takes the tensors.
        RuntimeError: torch.distributed is not initialised.

    Source: the vocabulary-parallel loss of Megatron-LM, Shoeybi et al., arXiv 1909.08053, section 3.
    """
    found = group_of(group)
    if transforms_active():  # raised early: collectives do not work inside transforms
        raise NotImplementedError(f"flash_online.{_NAME}: torch.func and forward-mode derivatives are not supported over ranks")

    def check():
        number = reduction_enum(reduction, None, None)
        _check_arguments(input, weight_shard, target, first_class, linear_bias, weight, ignore_index, label_smoothing)
        result = check_dtype(dtype)
        if result is not None:
            check_floating("linear_cross_entropy: result", result)
        arguments = {"input": input, "weight_shard": weight_shard, "target": target, "first_class": first_class}
        arguments |= {"linear_bias": linear_bias, "weight": weight}
        options = {"reduction": number, "label_smoothing": float(label_smoothing)}
        options["z_loss"] = check_float("z_loss", none_as_zero(z_loss))
        options["ignore_index"] = -100 if ignore_index is None else check_index("ignore_index", ignore_index, any_rank=True)
        options |= check_logit_options(input, softcap, scale, top_log_probs, None)
        arguments["row_scale"] = options.pop("row_scale")
        flags = check_flags(return_z_loss=return_z_loss, return_argmax=return_argmax, return_entropy=return_entropy)
        return arguments, options | {"return_lse": bool(return_lse), "dtype": result} | flags

    agreed, row_scale, shard = _agreed_shard(found, check)
    tensors = input, weight_shard, target, linear_bias, weight
    return linear_cross_entropy_impl(*tensors, row_scale=row_scale, shard=shard, **agreed)
