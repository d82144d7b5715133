"""Raw operators of linear_cross_entropy, written in Python: torch's matrix products (cuBLAS, oneDNN) make chunks of logits, and
our cross-entropy kernels run over each chunk. The whole table of logits never exists.

A chunk holds some rows of input and all classes, so that its loss needs no second pass. Its gradient overwrites its logits;
from there one product makes the rows of grad_input, and another adds to grad_linear_weight. Gradients computed in the forward
pass take three products of 2 N H C floating point operations in all; gradients computed in the backward pass take four,
because the logits are computed again. Chunks of rows with the gradient in the forward pass follow Liger Kernel
(arXiv 2410.10989, section 3.2). That the logits need no memory is the observation of Cut Cross-Entropy (arXiv 2411.09009),
whose fused kernels compute them twice.

Names: N rows of input, H elements per row (the hidden size), C classes, P positions (the K dimensions of torch's K-dimensional
loss, flattened; 1 without them). columns = C * P is the number of logits per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._ops import _fragment, _no_flops, _one_by_one, _register, accumulator_of, ops

# Bytes of a chunk of logits. On a GPU a chunk has 2048 rows for a vocabulary of 128k in 16 bits: products long enough for
# cuBLAS. Each chunk also reads and writes the gradient of linear_weight, at less than a tenth of the cost of its product.
_CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
_ROW_UNIT = 128  # the rows of a chunk are a multiple of this, as matrix kernels have tiles of 128 rows
_PITCH_BYTES = {"cpu": 1, "cuda": 128}  # alignment of rows of logits, for any C: TMA and vector loads need 16 bytes
_NONE_WANTED = (False,) * 4  # of the gradients of input, linear_weight, linear_bias and target
_MAX_ROUNDINGS = 8  # of a 16-bit gradient of linear_weight, which each chunk rounds once; see docs/design/decisions.md


def chunk_plan(
    rows: int, columns: int, hidden: int, dtype: torch.dtype, device: str, grad_in_16_bits: bool
) -> tuple[int, bool]:
    """(rows per chunk, whether the gradient of linear_weight needs a float32 accumulator) for rows x columns logits in `dtype`.
    grad_in_16_bits: the gradient of linear_weight, [columns, hidden], is wanted and has a 16-bit dtype."""
    row_bytes = max(columns * dtype.itemsize, 1)
    max_rows = max(_CHUNK_BYTES[device] // row_bytes // _ROW_UNIT, 1) * _ROW_UNIT
    chunks = -(-rows // max_rows)
    accumulate = False
    if grad_in_16_bits and chunks > _MAX_ROUNDINGS:
        # Fewer, longer chunks keep the number of roundings in bounds, and so does an accumulator: take what needs less memory.
        longer = _round_up(-(-rows // _MAX_ROUNDINGS), _ROW_UNIT)
        if (longer - max_rows) * row_bytes <= 4 * columns * hidden:
            chunks = _MAX_ROUNDINGS
        else:
            accumulate = True
    even = _round_up(-(-rows // max(chunks, 1)), _ROW_UNIT)
    return max(min(even, rows), 1), accumulate


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def common_dtype(dtype: torch.dtype, target: Tensor) -> torch.dtype:
    """The dtype that logits in `dtype` are promoted to beside this target, as in torch: that of probabilities counts too."""
    return torch.promote_types(dtype, target.dtype) if target.is_floating_point() else dtype


def scratch_bytes(call) -> int:
    """Bytes that a raw operator allocates beside its results, without the scratch of the kernels it calls. `call` has the
    operator's arguments as attributes."""
    input, linear_weight, target, dtype = call.input, call.linear_weight, call.target, call.dtype
    classes, positions, hidden = linear_weight.shape
    columns = classes * positions
    _, wants_linear_weight, *_ = getattr(call, "wanted", _NONE_WANTED)
    grad_in_16_bits = wants_linear_weight and linear_weight.dtype.itemsize == 2
    rows, accumulate = chunk_plan(input.shape[0], columns, hidden, dtype, input.device.type, grad_in_16_bits)
    size = rows * _pitch(columns, dtype, input.device.type) * dtype.itemsize + 4 * columns * hidden * accumulate
    common = common_dtype(dtype, target)
    size += rows * columns * common.itemsize * (common != dtype)
    for tensor, share in ((input, rows / max(input.shape[0], 1)), (linear_weight, 1)):
        size += int(tensor.numel() * share) * dtype.itemsize * (tensor.dtype != dtype)
    return size


def _pitch(columns: int, dtype: torch.dtype, device: str) -> int:
    """Elements from one row of logits to the next."""
    return _round_up(columns, max(_PITCH_BYTES[device] // dtype.itemsize, 1))


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a^T b if `first`, else total += a^T b. Where total is float32 and a and b have 16 bits, CUDA adds the product
    unrounded; on the CPU the product is first rounded to the dtype of a and b."""
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
    """A contiguous tensor for each wanted gradient, and one without elements for each other."""

    def empty(tensor, want):
        return tensors[0].new_empty([0]) if tensor is None else tensor.new_empty(tensor.shape if want else [0])

    return tuple(empty(tensor, want) for tensor, want in zip(tensors, wanted, strict=True))


def _run(
    input, linear_weight, linear_bias, target, weight, ignore_index, label_smoothing, dtype, forward,
    grad_loss=None, grad_lse=None, lse_factor=None, wanted=_NONE_WANTED,
):  # fmt: skip
    """The loop over chunks that the three operators share: (loss, lse, row_weight, the four gradients). Results that are not
    asked for have no elements: the first three without `forward`, and each gradient that is not in `wanted`."""
    (rows, hidden), (classes, positions, _) = input.shape, linear_weight.shape
    columns, device = classes * positions, input.device.type
    accumulator = accumulator_of(common_dtype(dtype, target))
    gradients = any(wanted)
    grad_in_16_bits = wanted[1] and linear_weight.dtype.itemsize == 2
    step, accumulate = chunk_plan(rows, columns, hidden, dtype, device, grad_in_16_bits)

    sizes = [rows, positions] if forward else [0]
    loss, lse, row_weight = (input.new_empty(sizes, dtype=accumulator) for _ in range(3))
    grads = _empty_gradients((input, linear_weight, linear_bias, target), wanted)
    grad_input, grad_linear_weight, grad_linear_bias, grad_target = grads
    total = grad_linear_weight.view(columns, hidden) if wanted[1] else grad_linear_weight
    if accumulate:
        total = total.new_empty(total.shape, dtype=torch.float32)
    bias_total = input.new_zeros([columns] if wanted[2] else [0], dtype=accumulator_of(dtype))

    matrix = linear_weight.flatten(0, 1).to(dtype)
    bias = None if linear_bias is None else linear_bias.flatten().to(dtype)
    buffer = input.new_empty([min(step, rows), _pitch(columns, dtype, device)], dtype=dtype)
    for begin in range(0, rows, step):
        chunk = slice(begin, min(begin + step, rows))
        x, t = input[chunk].to(dtype), target[chunk]
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
        one_pass = forward and gradients and lse_factor is None  # one kernel gives losses and gradients
        if forward and not one_pass:
            chunk_rows = ops.cross_entropy_forward.default(scores, *options)
        if gradients:
            chunk_grad_lse = None if grad_lse is None else grad_lse[chunk]
            if lse_factor is not None:
                factor = lse_factor[chunk]
                chunk_lse = chunk_rows[1] if forward else ops.logsumexp_forward.default(scores, 1)
                # The mask is for ignored rows: their factor is 0, and their lse may be NaN.
                z_grad = (factor * chunk_lse).masked_fill(factor == 0, 0)
                chunk_grad_lse = z_grad if chunk_grad_lse is None else chunk_grad_lse + z_grad
            *row_results, chunk_grad_target = ops.cross_entropy_backward_.default(
                grad_loss[chunk], chunk_grad_lse, scores, *options, wanted[3], one_pass
            )
            chunk_rows = row_results if one_pass else chunk_rows if forward else ()
            if scores.dtype != dtype:
                logits.copy_(scores.flatten(1))
            if wanted[0]:
                if input.dtype == dtype:
                    torch.mm(logits, matrix, out=grad_input[chunk])
                else:
                    grad_input[chunk] = torch.mm(logits, matrix)
            if wanted[1]:
                if not target.is_floating_point():
                    # The gradient of an ignored row is 0 even where its input holds NaN: the product must not meet 0 * NaN.
                    ignored = t == ignore_index
                    no_grad = ignored if chunk_grad_lse is None else ignored & (chunk_grad_lse == 0)
                    x = x.masked_fill(no_grad.all(1, keepdim=True), 0)
                _add_product(total, logits, x, begin == 0)
            if wanted[2]:
                bias_total += logits.sum(0, dtype=bias_total.dtype)
            if wanted[3]:
                grad_target[chunk] = chunk_grad_target
        if forward:
            for whole, piece in zip((loss, lse, row_weight), chunk_rows, strict=True):
                whole[chunk] = piece
    if rows == 0:
        total.zero_()
    if accumulate:
        grad_linear_weight.view(columns, hidden).copy_(total)
    if wanted[2]:
        grad_linear_bias.copy_(bias_total.view(classes, positions))
    return loss, lse, row_weight, *grads


# --- the operators ----------------------------------------------------------------------------------------------------------
#
# input [N, H], linear_weight [C, P, H], linear_bias [C, P], target int64 [N, P] or probabilities [N, C, P], weight [C] in the
# accumulator's dtype; input, linear_weight and linear_bias in any floating dtype; the products run in `dtype`. loss, lse,
# row_weight, grad_loss, grad_lse and lse_factor: [N, P] in the accumulator's dtype. `wanted` says which gradients of (input,
# linear_weight, linear_bias, target) are computed, each in its tensor's dtype; the others have no elements.
#
# The backward operator adds lse_factor * lse to grad_lse: that is the gradient of a loss with a term in lse^2. The step
# operator does both passes at once, for a grad_loss and an lse_factor that are known beforehand.

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


def _backward_fake(input, linear_weight, linear_bias, target, *others):
    *_, wanted = others
    return _empty_gradients((input, linear_weight, linear_bias, target), wanted)


def _step_fake(*arguments):
    *call, _, _, wanted = arguments
    input, linear_weight, linear_bias, target, *_ = call
    return *_fake_rows(call), *_empty_gradients((input, linear_weight, linear_bias, target), wanted)


def _forward_flops(input, linear_weight, *others, wanted=_NONE_WANTED, out_shape=None, **kwargs) -> int:
    (rows, hidden), (classes, positions, _) = input, linear_weight
    wants_input, wants_linear_weight, *_ = wanted
    return 2 * rows * hidden * classes * positions * (1 + bool(wants_input) + bool(wants_linear_weight))


def _gradient_flops(*arguments, out_shape=None, **kwargs) -> int:
    *call, wanted = arguments
    return _forward_flops(*call, wanted=wanted)


def _define(name: str, schema: str, run, fake, flops) -> None:
    def kernel(input, *others):
        # Autocast is off: the products run in `dtype`.
        with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
            return run(input, *others)

    def vmap(info, in_dims, *arguments):
        return _one_by_one(getattr(ops, name).default, info, in_dims, arguments)

    _fragment.define(f"{name}{schema}")
    for device in ("CPU", "CUDA"):
        _fragment.impl(name, kernel, device)
    _register(name, fake, vmap, flops)


_define(
    "linear_cross_entropy_forward",
    f"({_ARGUMENTS}) -> (Tensor loss, Tensor lse, Tensor row_weight)",
    _forward,
    _forward_fake,
    _forward_flops,
)
_define(
    "linear_cross_entropy_backward",
    f"({_ARGUMENTS}, Tensor grad_loss, Tensor? grad_lse, Tensor? lse_factor, bool[] wanted) -> ({_GRADIENTS})",
    _backward,
    _backward_fake,
    _gradient_flops,
)
_define(
    "linear_cross_entropy_step",
    f"({_ARGUMENTS}, Tensor grad_loss, Tensor? lse_factor, bool[] wanted) -> "
    f"(Tensor loss, Tensor lse, Tensor row_weight, {_GRADIENTS})",
    _step,
    _step_fake,
    _gradient_flops,
)

# tensor *= factor, where factor is one number in float32 or wider: mul_ would round it to tensor's dtype first, which biases
# all elements alike. With a factor of 1, the usual case (loss.backward()), our CUDA kernel reads the factor and nothing else.
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
