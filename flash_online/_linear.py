"""Raw operators of linear_cross_entropy, written in Python: chunks of logits by torch's matrix products (cuBLAS, oneDNN), and
over each chunk our cross-entropy kernels. The whole table of logits never exists.

A chunk holds some rows of input and all classes: its loss needs no second pass, and once its gradient has taken the logits'
place, grad_input's rows are one product and grad_linear_weight grows by another. Three products of 2 N H C multiply-adds with
the gradients made on the way forward, four where they are made on the way back. Chunks over rows with the gradient in the
forward pass are Liger Kernel's way (arXiv 2410.10989, section 3.2); that the logits need no memory is the observation of Cut
Cross-Entropy (arXiv 2411.09009), whose fused kernels make them twice.

Names: N rows of input, H its width, C classes, P positions (the K dimensions of torch's K-dimensional loss; else 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._ops import _fragment, _no_flops, _one_by_one, _register, accumulator_of, ops

# Bytes of a chunk of logits. On a GPU 2048 rows of a 128k vocabulary in 16 bits: long enough products for cuBLAS, and the
# gradient of linear_weight, which each chunk reads and writes once, costs less than a tenth of the product that makes it.
_CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
_ROW_UNIT = 128  # rows of a chunk are a multiple of a matrix kernel's tile
_PITCH_BYTES = {"cpu": 1, "cuda": 128}  # rows of logits start at a multiple: TMA and vector loads need 16, whatever C is
_MOST_ROUNDINGS = 8  # of a 16-bit gradient of linear_weight, one a chunk; see docs/decisions.md


def chunk_plan(rows: int, columns: int, width: int, dtype: torch.dtype, device: str, narrow_gradient: bool) -> tuple[int, bool]:
    """(rows of a chunk, whether the gradient of linear_weight needs a float32 accumulator of its own) for N x columns logits;
    narrow_gradient: that gradient is wanted, in 16 bits."""
    row_bytes = max(columns * dtype.itemsize, 1)
    most = max(_CHUNK_BYTES[device] // row_bytes // _ROW_UNIT, 1) * _ROW_UNIT
    chunks = -(-rows // most)
    wide = False
    if narrow_gradient and chunks > _MOST_ROUNDINGS:
        longer = _round_up(-(-rows // _MOST_ROUNDINGS), _ROW_UNIT)
        if (longer - most) * row_bytes <= 4 * columns * width:  # the lesser of two evils, by memory
            chunks = _MOST_ROUNDINGS
        else:
            wide = True
    even = _round_up(-(-rows // max(chunks, 1)), _ROW_UNIT)
    return max(min(even, rows), 1), wide


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def common_dtype(dtype: torch.dtype, target: Tensor) -> torch.dtype:
    """What logits in `dtype` are in beside this target: probabilities of another dtype promote them, as in torch."""
    return torch.promote_types(dtype, target.dtype) if target.is_floating_point() else dtype


def scratch_bytes(operator: str, arguments: tuple) -> int:
    """Bytes that a raw operator takes beside its results, without what the kernels themselves take."""
    input, linear_weight = arguments[:2]
    target, dtype = arguments[3], arguments[7]
    classes, positions, width = linear_weight.shape
    columns = classes * positions
    wanted = () if operator == "linear_cross_entropy_forward" else arguments[-1]
    narrow = bool(wanted) and wanted[1] and linear_weight.dtype.itemsize == 2
    rows, wide = chunk_plan(input.shape[0], columns, width, dtype, input.device.type, narrow)
    size = rows * _pitch(columns, dtype, input.device.type) * dtype.itemsize + 4 * columns * width * wide
    common = common_dtype(dtype, target)
    size += rows * columns * common.itemsize * (common != dtype)
    for tensor, times in ((input, rows / max(input.shape[0], 1)), (linear_weight, 1)):
        size += int(tensor.numel() * times) * dtype.itemsize * (tensor.dtype != dtype)
    return size


def _pitch(columns: int, dtype: torch.dtype, device: str) -> int:
    return _round_up(columns, max(_PITCH_BYTES[device] // dtype.itemsize, 1))


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a^T b, or total += a^T b. A total wider than a and b takes sums that were never rounded to their dtype on CUDA;
    elsewhere the product is."""
    if total.dtype == a.dtype:
        torch.mm(a.t(), b, out=total) if first else total.addmm_(a.t(), b)
    elif total.is_cuda and total.dtype == torch.float32:
        if first:
            torch.mm(a.t(), b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        product = torch.mm(a.t(), b)
        total.copy_(product) if first else total.add_(product)


def _empty_gradients(tensors, wanted):
    """Tensors for the wanted gradients, contiguous; without elements for the others."""

    def empty(tensor, want):
        return tensors[0].new_empty([0]) if tensor is None else tensor.new_empty(tensor.shape if want else [0])

    return tuple(empty(tensor, want) for tensor, want in zip(tensors, wanted, strict=True))


def _run(
    input, linear_weight, linear_bias, target, weight, ignore_index, label_smoothing, dtype, forward,
    grad_loss=None, grad_lse=None, lse_factor=None, wanted=(False,) * 4,
):  # fmt: skip
    """The loop over chunks behind the three operators: (loss, lse, row_weight, the four gradients); empty what is not asked
    for. The gradients are there if any of `wanted` is."""
    (rows, width), (classes, positions, _) = input.shape, linear_weight.shape
    columns, device = classes * positions, input.device.type
    accumulator = accumulator_of(common_dtype(dtype, target))
    gradients = any(wanted)
    narrow = wanted[1] and linear_weight.dtype.itemsize == 2
    step, wide = chunk_plan(rows, columns, width, dtype, device, narrow)

    numbers = [rows, positions] if forward else [0]
    loss, lse, row_weight = (input.new_empty(numbers, dtype=accumulator) for _ in range(3))
    grads = _empty_gradients((input, linear_weight, linear_bias, target), wanted)
    grad_input, grad_linear_weight, grad_linear_bias, grad_target = grads
    total = grad_linear_weight.view(columns, width) if wanted[1] else grad_linear_weight
    if wide:
        total = total.new_empty(total.shape, dtype=torch.float32)
    bias_total = input.new_zeros([columns] if wanted[2] else [0], dtype=accumulator_of(dtype))

    matrix = linear_weight.flatten(0, 1).to(dtype)
    bias = None if linear_bias is None else linear_bias.flatten().to(dtype)
    buffer = input.new_empty([min(step, rows), _pitch(columns, dtype, device)], dtype=dtype)
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        x, t = input[part].to(dtype), target[part]
        logits = buffer[: x.shape[0], :columns]
        if bias is None:
            torch.mm(x, matrix.t(), out=logits)
        else:
            torch.addmm(bias, x, matrix.t(), out=logits)
        scores = logits.unflatten(1, (classes, positions))
        if target.is_floating_point():
            common = common_dtype(dtype, target)
            scores, t = scores.to(common), t.to(common)
        options = (t, weight, ignore_index, label_smoothing)
        together = forward and gradients and lse_factor is None
        if forward and not together:
            chunk_rows = ops.cross_entropy_forward.default(scores, *options)
        if gradients:
            for_lse = None if grad_lse is None else grad_lse[part]
            if lse_factor is not None:  # masked where it is 0, since the lse of an ignored row may be NaN
                factor = lse_factor[part]
                chunk_lse = chunk_rows[1] if forward else ops.logsumexp_forward.default(scores, 1)
                along = (factor * chunk_lse).masked_fill(factor == 0, 0)
                for_lse = along if for_lse is None else for_lse + along
            *made, for_target = ops.cross_entropy_backward_.default(
                grad_loss[part], for_lse, scores, *options, wanted[3], together
            )
            chunk_rows = made if together else chunk_rows if forward else ()
            if scores.dtype != dtype:
                logits.copy_(scores.flatten(1))
            if wanted[0]:
                if input.dtype == dtype:
                    torch.mm(logits, matrix, out=grad_input[part])
                else:
                    grad_input[part] = torch.mm(logits, matrix)
            if wanted[1]:
                if not target.is_floating_point():
                    # An ignored row's gradient is 0 also where its input holds NaN: not 0 * NaN.
                    silent = t == ignore_index if for_lse is None else (t == ignore_index) & (for_lse == 0)
                    x = x.masked_fill(silent.all(1, keepdim=True), 0)
                _add_product(total, logits, x, begin == 0)
            if wanted[2]:
                bias_total += logits.sum(0, dtype=bias_total.dtype)
            if wanted[3]:
                grad_target[part] = for_target
        if forward:
            for whole, piece in zip((loss, lse, row_weight), chunk_rows, strict=True):
                whole[part] = piece
    if rows == 0:
        total.zero_()
    if wide:
        grad_linear_weight.view(columns, width).copy_(total)
    if wanted[2]:
        grad_linear_bias.copy_(bias_total.view(classes, positions))
    return loss, lse, row_weight, *grads


# --- the operators ----------------------------------------------------------------------------------------------------------
#
# input [N, H], linear_weight [C, P, H], linear_bias [C, P], target int64 [N, P] or probabilities [N, C, P], weight [C] of the
# accumulator type; input, linear_weight and linear_bias in any floating dtype, products in `dtype`. loss, lse, row_weight and
# what belongs to them: [N, P] of the accumulator type. wanted: which of the gradients of input, linear_weight, linear_bias and
# target, each in its tensor's dtype; the others come back without elements.
#
# Backward: grad_lse counts as grad_lse + lse_factor * lse, where the second is for losses with a term in lse^2. `step` does
# both: what the forward pass gives, and the gradients for cotangents that are known before it.

_ARGUMENTS = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? weight, int ignore_index, "
    "float label_smoothing, ScalarType dtype"
)
_GRADIENTS = "Tensor grad_input, Tensor grad_linear_weight, Tensor grad_linear_bias, Tensor grad_target"


def _forward(*arguments):
    return _run(*arguments, True)[:3]


def _backward(*arguments):
    *arguments, grad_loss, grad_lse, lse_factor, wanted = arguments
    return _run(*arguments, False, grad_loss, grad_lse, lse_factor, wanted)[3:]


def _step(*arguments):
    *arguments, grad_loss, lse_factor, wanted = arguments
    return _run(*arguments, True, grad_loss, None, lse_factor, wanted)


def _fake_rows(arguments):
    input, linear_weight, _, target, _, _, _, dtype = arguments
    sizes = [input.shape[0], linear_weight.shape[1]]
    return tuple(input.new_empty(sizes, dtype=accumulator_of(common_dtype(dtype, target))) for _ in range(3))


def _forward_fake(*arguments):
    return _fake_rows(arguments)


def _backward_fake(*arguments):
    *arguments, _, _, _, wanted = arguments
    return _empty_gradients(arguments[:4], wanted)


def _step_fake(*arguments):
    *arguments, _, _, wanted = arguments
    return *_fake_rows(arguments), *_empty_gradients(arguments[:4], wanted)


def _flops(*arguments, out_shape=None, **kwargs) -> int:
    (rows, width), (classes, positions, _) = arguments[:2]
    wanted = arguments[-1] if isinstance(arguments[-1], (list, tuple)) else (False, False)
    return 2 * rows * width * classes * positions * (1 + bool(wanted[0]) + bool(wanted[1]))


def _define(name: str, schema: str, run, fake) -> None:
    def kernel(*arguments):
        # The products run in `dtype`, whatever autocast would make of them.
        with torch.no_grad(), torch.autocast(arguments[0].device.type, enabled=False):
            return run(*arguments)

    def vmap(info, in_dims, *arguments):
        return _one_by_one(getattr(ops, name).default, info, in_dims, arguments)

    _fragment.define(f"{name}{schema}")
    for device in ("CPU", "CUDA"):
        _fragment.impl(name, kernel, device)
    _register(name, fake, vmap, _flops)


_define(
    "linear_cross_entropy_forward",
    f"({_ARGUMENTS}) -> (Tensor loss, Tensor lse, Tensor row_weight)",
    _forward,
    _forward_fake,
)
_define(
    "linear_cross_entropy_backward",
    f"({_ARGUMENTS}, Tensor grad_loss, Tensor? grad_lse, Tensor? lse_factor, bool[] wanted) -> ({_GRADIENTS})",
    _backward,
    _backward_fake,
)
_define(
    "linear_cross_entropy_step",
    f"({_ARGUMENTS}, Tensor grad_loss, Tensor? lse_factor, bool[] wanted) -> "
    f"(Tensor loss, Tensor lse, Tensor row_weight, {_GRADIENTS})",
    _step,
    _step_fake,
)

# tensor *= factor, one number in float32 or wider (mul_ would round it to tensor's dtype first, and so every element the same
# way). Of a factor of 1, which is what a loss that is differentiated itself has, a kernel of ours on CUDA reads that alone.
_fragment.define("scale_(Tensor(a!) tensor, Tensor factor) -> ()")


def _scale_on_cpu(tensor, factor):
    number = factor.item()
    if number != 1:
        tensor.mul_(number)


def _scale_on_cuda(tensor, factor):
    if tensor.dtype == factor.dtype:
        tensor.mul_(factor)
    else:
        torch._amp_foreach_non_finite_check_and_unscale_([tensor], torch.zeros_like(factor), factor)


def _scale_vmap(info, in_dims, tensor, factor):
    raise NotImplementedError("scale_: vmap over what is scaled in place")


_fragment.impl("scale_", _scale_on_cpu, "CPU")
if not torch._C._dispatch_has_kernel_for_dispatch_key("flash_online::scale_", "CUDA"):
    _fragment.impl("scale_", _scale_on_cuda, "CUDA")
_register("scale_", lambda tensor, factor: None, _scale_vmap, _no_flops)
