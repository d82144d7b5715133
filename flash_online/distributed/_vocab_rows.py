"""A rank's computation for a vocabulary sharded over ranks: per-row numbers over its own classes and their gradients, in chunks
of logits and without communication.

The numbers are what the ranks exchange: lse over the shard's classes, the target's logit if the shard has the target, with
label smoothing the sum of the logits times the class weights, and where it is wanted the entropy of the softmax. Their gradient
with respect to a row's logits x is

    grad_lse p + grad_logit onehot(target) + grad_sum weights - grad_entropy p (log p + entropy),

where p, softmax(x), is over the shard alone. Chunks, scale and softcap are as in _linear_cross_entropy_ops.py.

Names: N rows, H elements per row, C classes of the shard, P positions. input [N, H], linear_weight [C, P, H], linear_bias
[C, P]; target int64 [N, P], counted from the shard's first class, ELSEWHERE if another rank has the class or the row is
ignored; smooth [C] in the accumulator's dtype, the class weights, or None; the products run in `dtype`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as _torch
from torch import Tensor

from .._linear_cross_entropy_ops import _add_product, _Cap, _cap_rows, _pitch, _product, chunk_plan, scale_rows_, top_logits
from .._ops import accumulator_of, ops
from ..cross_entropy import cross_entropy_rows
from ..linear_cross_entropy import _capped

ELSEWHERE = -1  # the target of a row if the shard lacks its class
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}  # integers as wide as the accumulator


def as_number(index: Tensor, dtype: torch.dtype) -> Tensor:
    """Index bits as floating numbers, so that one tensor carries both."""
    return index.to(_INTEGERS[dtype]).view(dtype)


def as_index(number: Tensor) -> Tensor:
    """The inverse of `as_number`."""
    return number.contiguous().view(_INTEGERS[number.dtype]).to(torch.int64)


class _Logits:
    """The logits of a shard, a chunk of rows at a time. With softcap or label smoothing a chunk is read in blocks in the
    accumulator's dtype."""

    def __init__(self, tensors, row_scale, smooth, dtype, scale, softcap, step):
        input, linear_weight, linear_bias = tensors
        (self.rows, _), (self.classes, self.positions, _), device = input.shape, linear_weight.shape, input.device.type
        columns, accumulator = self.classes * self.positions, accumulator_of(dtype)
        self.input, self.dtype, self.accumulator, self.step = input, dtype, accumulator, step
        self.matrix = linear_weight.flatten(0, 1).to(dtype)
        self.bias = None if linear_bias is None else linear_bias.flatten().to(dtype)
        self.factor = scale / softcap if softcap else scale
        self.row_scale = row_scale
        self.buffer = input.new_empty([min(step, self.rows), _pitch(columns, dtype, device)], dtype=dtype)[:, :columns]
        self.wide = smooth is not None and dtype != accumulator
        self.block = min(_cap_rows(columns, accumulator, device), step) if softcap or self.wide else step
        self.cap = None
        if softcap:
            self.cap = _Cap(softcap, input, min(self.block, self.rows), columns, accumulator, dtype == accumulator)

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows, their input, their logits before the softcap [n, C * P])."""
        for begin in range(0, self.rows, self.step):
            chunk = slice(begin, min(begin + self.step, self.rows))
            x = self.input[chunk].to(self.dtype)
            logits = self.buffer[: x.shape[0]]
            _product(logits, x, self.matrix.t(), self.factor, self.bias)
            if self.row_scale is not None:
                scale_rows_(logits, self.row_scale[chunk])
            yield chunk, x, logits

    def blocks(self, chunk: slice, logits: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows, their logits in the chunk, these as the loss uses them [n, C, P])."""
        for begin in range(chunk.start, chunk.stop, self.block):
            part = slice(begin, min(begin + self.block, chunk.stop))
            plain = logits[begin - chunk.start : part.stop - chunk.start]
            scores = plain
            if self.cap is not None:
                scores = self.cap.apply(plain)
            elif self.wide:
                scores = plain.to(self.accumulator)
            yield part, plain, scores.unflatten(1, (self.classes, self.positions))

    def put_gradient(self, grad: Tensor, no_grad: Tensor, plain: Tensor) -> None:
        """Overwrites a block's logits with their gradient; `grad` is the gradient of the block's scores, in the same memory."""
        if self.cap is not None:
            self.cap.differentiate(grad, no_grad, plain)
        elif self.wide:
            plain.copy_(grad.flatten(1))


def shard_rows(tensors, target, row_scale, smooth, options, argmax: bool, entropy: bool, top: int) -> Tensor:
    """[K, N, P] in the accumulator's dtype: lse; the target's logit, or 0; with `smooth` the weighted sum of the logits; with
    `entropy` the softmax's, NaN where all logits are -inf; the `top` largest logits, -inf where the shard has fewer classes,
    and their classes in the shard (`as_number`); with `argmax` the largest logit before the softcap and its class in the shard.
    `options`: (dtype, scale, softcap)."""
    input, linear_weight, _ = tensors
    (rows, hidden), (classes, positions, _), dtype = input.shape, linear_weight.shape, options[0]
    differentiable = 2 + (smooth is not None) + entropy
    numbers = input.new_zeros([differentiable + 2 * (top + argmax), rows, positions], dtype=accumulator_of(dtype))
    numbers[0] = numbers[differentiable : differentiable + top] = float("-inf")
    if argmax:
        numbers[-2] = float("-inf")
    if rows == 0 or classes * positions == 0:
        return numbers
    step, _ = chunk_plan(rows, classes * positions, hidden, dtype, input.device.type, False)
    logits, top_here = _Logits(tensors, row_scale, smooth, *options, step), min(top, classes)
    for chunk, _, chunk_logits in logits.chunks():
        if argmax:  # before the softcap, which may create ties and overwrites the logits
            largest, index = chunk_logits.unflatten(1, (classes, positions)).max(1)
            numbers[-2, chunk], numbers[-1, chunk] = largest, as_number(index, numbers.dtype)
        for part, _, scores in logits.blocks(chunk, chunk_logits):
            t = target[part].unsqueeze(1)
            if top_here:
                values, indices = (found.movedim(-1, 0) for found in top_logits(scores, top_here))
                numbers[differentiable : differentiable + top_here, part] = values
                numbers[differentiable + top : differentiable + top + top_here, part] = as_number(indices, numbers.dtype)
            if entropy:
                _, lse, _, of_rows = ops.cross_entropy_forward.default(scores, target[part], None, ELSEWHERE, 0.0, True)
                numbers[0, part], numbers[differentiable - 1, part] = lse, of_rows
            else:
                numbers[0, part] = ops.logsumexp_forward.default(scores, 1)
            numbers[1, part] = scores.gather(1, t.clamp(min=0)).to(numbers.dtype).masked_fill(t == ELSEWHERE, 0).squeeze(1)
            if smooth is not None:
                numbers[2, part] = torch.tensordot(scores, smooth, dims=([1], [0]))
    return numbers


def _partial_product(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """out = scale * a b, where `out` may be float32 with 16-bit a and b. On the CPU the product is first rounded to the dtype
    of a and b."""
    if out.dtype == a.dtype:
        _product(out, a, b, scale)
        return
    if out.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.mm(a, b))
    if scale != 1:
        out.mul_(scale)


def shard_gradients(
    tensors, target, row_scale, smooth, options, grad: Tensor, wanted, entropy: Tensor | None
) -> list[Tensor | None]:
    """The gradients of input (in the accumulator's dtype, this shard's classes only), linear_weight and linear_bias, each where
    `wanted`; `grad` [K, N, P] is the gradient of the numbers of `shard_rows` that have one. `entropy` is `shard_rows`'."""
    input, linear_weight, linear_bias = tensors
    (rows, hidden), (classes, positions, _), (dtype, scale, _) = input.shape, linear_weight.shape, options
    columns, accumulator = classes * positions, accumulator_of(dtype)
    grad_input = input.new_zeros([rows, hidden], dtype=accumulator) if wanted[0] else None
    if rows == 0 or columns == 0:
        others = (torch.zeros_like(t) if w else None for t, w in zip(tensors[1:], wanted[1:], strict=True))
        return [grad_input, *others]
    in_16_bits = wanted[1] and linear_weight.dtype.itemsize == 2
    step, accumulate = chunk_plan(rows, columns, hidden, dtype, input.device.type, in_16_bits)
    if wanted[1]:
        total = input.new_empty([columns, hidden], dtype=torch.float32 if accumulate else linear_weight.dtype)
    bias_total = input.new_zeros([columns], dtype=accumulator) if wanted[2] else None

    grad_lse, grad_logit = grad[0], grad[1].masked_fill(target == ELSEWHERE, 0)
    # Losses of the shard alone: loss = lse - logit, 0 for a row without a target.
    grad_loss, grad_lse = -grad_logit, grad_lse + grad_logit
    no_grad = (grad_loss == 0) & (grad_lse == 0)
    if smooth is not None:
        no_grad &= grad[2] == 0
    if entropy is not None:
        no_grad &= grad[-1] == 0
    logits = _Logits(tensors, row_scale, smooth, *options, step)
    for chunk, x, chunk_logits in logits.chunks():
        for part, plain, scores in logits.blocks(chunk, chunk_logits):
            of_entropy = () if entropy is None else (False, grad[-1, part], entropy[part])
            ops.cross_entropy_backward_.default(
                *(grad_loss[part], grad_lse[part], scores, target[part], None, ELSEWHERE, 0.0, False, False), *of_entropy
            )
            if smooth is not None:
                scores.addcmul_(grad[2, part].unsqueeze(1), smooth.view(1, -1, 1))
            logits.put_gradient(scores, no_grad[part], plain)
        if row_scale is not None:
            scale_rows_(chunk_logits, row_scale[chunk])
        if wanted[0]:
            _partial_product(grad_input[chunk], chunk_logits, logits.matrix, scale)
        if wanted[1]:
            # The gradient of an ignored row is 0 even where its input holds NaN: the product must not meet 0 * NaN.
            x = x.masked_fill(no_grad[chunk].all(1, keepdim=True), 0)
            _add_product(total, chunk_logits, x, scale, chunk.start == 0)
        if wanted[2]:
            bias_total += chunk_logits.sum(0, dtype=bias_total.dtype)
    grad_weight = total.to(linear_weight.dtype).view(linear_weight.shape) if wanted[1] else None
    grad_bias = (bias_total * scale).to(linear_bias.dtype).view(linear_bias.shape) if wanted[2] else None
    return [grad_input, grad_weight, grad_bias]


def differentiable_rows(tensors, target, row_scale, smooth, options, entropy: bool) -> Tensor:
    """`shard_rows` without top and argmax, in differentiable operations, for derivatives of any order; stores the logits."""
    input, linear_weight, linear_bias = tensors
    (classes, positions, hidden), rows, (dtype, scale, softcap) = linear_weight.shape, input.shape[0], options
    accumulator = accumulator_of(dtype)
    matrix = linear_weight.flatten(0, 1).to(dtype)
    bias = None if linear_bias is None else linear_bias.flatten().to(dtype)
    step, _ = chunk_plan(rows, classes * positions, hidden, dtype, input.device.type, False)
    pieces = []
    for begin in range(0, max(rows, 1), step):
        t = target[begin : begin + step]
        logits = _torch.linear(input[begin : begin + step].to(dtype), matrix, bias).unflatten(1, (classes, positions))
        if scale != 1:
            logits = logits * scale
        if row_scale is not None:
            logits = (logits * row_scale[begin : begin + step].view(-1, 1, 1)).to(dtype)
        elsewhere = (t == ELSEWHERE).unsqueeze(1)
        if softcap:
            logits = _capped(logits.to(accumulator), softcap, elsewhere)
        if logits.numel() == 0:
            # Sums over no class are 0. They depend on the input through a sine, so that derivatives of every order do too: a
            # rank with a graph without the input would miss the collectives of the other ranks' backward passes.
            x = input[begin : begin + step].to(accumulator).nan_to_num(0, 0, 0)
            none = logits.sum(1).to(accumulator) + 0 * x.sin().sum(1, keepdim=True)
            found = [none - float("inf"), none, *[none] * ((smooth is not None) + entropy)]
        else:
            _, lse, _, of_rows = cross_entropy_rows(logits, t, None, ELSEWHERE, 0.0, entropy)
            logit = logits.gather(1, t.unsqueeze(1).clamp(min=0)).masked_fill(elsewhere, 0).squeeze(1).to(accumulator)
            found = [lse, logit]
            if smooth is not None:
                found.append(torch.tensordot(logits.to(accumulator), smooth, dims=([1], [0])))
            if entropy:
                found.append(of_rows)
        pieces.append(torch.stack(found))
    return torch.cat(pieces, 1)
