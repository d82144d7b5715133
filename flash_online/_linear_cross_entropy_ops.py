"""Raw operators of linear_cross_entropy, written in Python: torch's matrix products (cuBLAS, oneDNN) make chunks of logits, and
our cross-entropy kernels run over each chunk. The whole table of logits never exists.

A chunk holds some rows of input and all classes, so that its loss needs no second pass. Its gradient overwrites its logits;
from there one product makes the rows of grad_input, and another adds to grad_linear_weight. Gradients computed in the forward
pass take three products of 2 N H C floating point operations in all; gradients computed in the backward pass take four,
because the logits are computed again. Chunks of rows with the gradient in the forward pass follow Liger Kernel
(arXiv 2410.10989, section 3.2). Cut Cross-Entropy (arXiv 2411.09009) observed that the logits need no memory; its fused kernels
compute them twice.

`scale` multiplies the logits and, in the backward pass, their gradient, inside the products (alpha of BLAS), without a separate
pass. `softcap` c replaces them with c tanh(logits / c). Plain torch operations compute the capped logits, their softmax and the
product with tanh's derivative in the accumulator's dtype, over a block of a chunk's rows at a time; only the last is rounded to
the dtype of the products. The block size also bounds the two tables that this needs.

Names: N rows of input, H elements per row (the hidden size), C classes, P positions (the K dimensions of torch's K-dimensional
loss, flattened; 1 without them). columns = C * P is the number of logits per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._ops import _fragment, _no_flops, _one_by_one, _register, accumulator_of, below_autograd, implement, ops

# Bytes of a chunk of logits. On a GPU a chunk has 2048 rows for a vocabulary of 128k in 16 bits: products long enough for
# cuBLAS. Each chunk also reads and writes the gradient of linear_weight, at less than a tenth of the cost of its product.
# Tensors on meta are cut as on a GPU.
_CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20, "meta": 512 << 20}
_ROW_UNIT = 128  # the rows of a chunk are a multiple of this, as matrix kernels have tiles of 128 rows
# Alignment of rows of logits, for any C: TMA and vector loads need 16 bytes.
_PITCH_BYTES = {"cpu": 1, "cuda": 128, "meta": 128}
_CAP_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20, "meta": 64 << 20}  # of a block of capped logits, in the accumulator's dtype
_CAP_ROWS = {"cpu": 1, "cuda": 128, "meta": 128}  # its minimum of rows: on a GPU about one row of cross-entropy per SM
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
        # Fewer, longer chunks and an accumulator both bound the number of roundings: take the one that needs less memory.
        longer = _round_up(-(-rows // _MAX_ROUNDINGS), _ROW_UNIT)
        if (longer - max_rows) * row_bytes <= 4 * columns * hidden:
            chunks = _MAX_ROUNDINGS
        else:
            accumulate = True
    even = _round_up(-(-rows // max(chunks, 1)), _ROW_UNIT)
    return max(min(even, rows), 1), accumulate


def _cap_rows(columns: int, dtype: torch.dtype, device: str) -> int:
    """Rows of a block of capped logits in `dtype`."""
    return max(_CAP_BYTES[device] // max(columns * dtype.itemsize, 1), _CAP_ROWS[device])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def common_dtype(dtype: torch.dtype, target: Tensor) -> torch.dtype:
    """The dtype that logits in `dtype` are promoted to with this target, as in torch: the dtype of probabilities counts too."""
    return torch.promote_types(dtype, target.dtype) if target.is_floating_point() else dtype


def scratch_bytes(call) -> int:
    """Bytes that a raw operator allocates in addition to its results, without the scratch memory of the kernels it calls.
    `call` has the operator's arguments as attributes."""
    input, linear_weight, target, dtype = call.input, call.linear_weight, call.target, call.dtype
    classes, positions, hidden = linear_weight.shape
    columns = classes * positions
    _, wants_linear_weight, *_ = getattr(call, "wanted", _NONE_WANTED)
    grad_in_16_bits = wants_linear_weight and linear_weight.dtype.itemsize == 2
    rows, accumulate = chunk_plan(input.shape[0], columns, hidden, dtype, input.device.type, grad_in_16_bits)
    size = rows * _pitch(columns, dtype, input.device.type) * dtype.itemsize + 4 * columns * hidden * accumulate
    common = common_dtype(dtype, target)
    if call.softcap:
        wide, device = accumulator_of(common), input.device.type
        table = min(_cap_rows(columns, wide, device), rows) * _pitch(columns, wide, device) * wide.itemsize
        size += table * (1 if wide == dtype else 2)
        size += table * (target.is_floating_point() and target.dtype != wide)
    else:
        size += rows * columns * common.itemsize * (common != dtype)
    for tensor, share in ((input, rows / max(input.shape[0], 1)), (linear_weight, 1)):
        size += int(tensor.numel() * share) * dtype.itemsize * (tensor.dtype != dtype)
    return size


def _pitch(columns: int, dtype: torch.dtype, device: str) -> int:
    """Elements from one row of logits to the next."""
    return _round_up(columns, max(_PITCH_BYTES[device] // dtype.itemsize, 1))


def _product(out: Tensor, a: Tensor, b: Tensor, scale: float, bias: Tensor | None = None) -> None:
    """out = scale * (a b + bias)."""
    if bias is not None:
        torch.addmm(bias, a, b, beta=scale, alpha=scale, out=out)
    elif scale == 1:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, beta=0, alpha=scale, out=out)  # with beta=0 the old values are not read


def _add_product(total: Tensor, a: Tensor, b: Tensor, scale: float, first: bool) -> None:
    """total = scale * a^T b if `first`, else total += scale * a^T b. Where total is float32 and a and b have 16 bits, CUDA adds
    the product unrounded; on the CPU the product is first rounded to the dtype of a and b."""
    if total.dtype == a.dtype:
        _product(total, a.t(), b, scale) if first else total.addmm_(a.t(), b, alpha=scale)
    elif total.is_cuda and total.dtype == torch.float32:
        if first:
            torch.mm(a.t(), b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a.t(), b, out_dtype=total.dtype, alpha=scale, out=total)
    else:
        product = torch.mm(a.t(), b)
        total.copy_(product) if first else total.add_(product, alpha=scale)
    if first and scale != 1 and total.dtype != a.dtype:
        total.mul_(scale)


def _empty_rows(
    input: Tensor, positions: int, accumulator: torch.dtype, forward: bool, argmax: bool, entropy: bool, top: int
) -> tuple[Tensor, ...]:
    """loss, lse, row_weight, entropy and argmax, [N, P] each, top_log_probs and top_classes [N, P, top]; empty if not
    requested."""
    sizes = [input.shape[0], positions]
    rows = (input.new_empty(sizes if wanted else [0], dtype=accumulator) for wanted in (*[forward] * 3, entropy))
    top_sizes = [*sizes, top] if top else [0]
    indices = (input.new_empty(size, dtype=torch.int64) for size in (sizes if argmax else [0], top_sizes))
    return *rows, next(indices), input.new_empty(top_sizes, dtype=accumulator), next(indices)


def _empty_gradients(tensors, wanted):
    """A contiguous tensor for each wanted gradient, and an empty one for each unwanted gradient."""

    def empty(tensor, want):
        return tensors[0].new_empty([0]) if tensor is None else tensor.new_empty(tensor.shape if want else [0])

    return tuple(empty(tensor, want) for tensor, want in zip(tensors, wanted, strict=True))


# The kernel of an operator calls other operators without derivatives.
_cross_entropy, _logsumexp = below_autograd(ops.cross_entropy_forward), below_autograd(ops.logsumexp_forward)
_cross_entropy_backward_in_place = below_autograd(ops.cross_entropy_backward_)


def with_z_gradient(grad_lse: Tensor | None, lse_factor: Tensor, lse: Tensor) -> Tensor:
    """grad_lse + lse_factor * lse. The mask is for ignored rows: their factor is 0, and their lse may be NaN."""
    z_grad = (lse_factor * lse).masked_fill(lse_factor == 0, 0)
    return z_grad if grad_lse is None else grad_lse + z_grad


def _rows_in_place(scores, options, cotangents, forward, target_grad, entropy):
    """((loss, lse, row_weight, entropy) of the logits `scores` [n, C, P], the gradient of lse, the gradient of the targets),
    None for what is not requested. The gradient of the logits overwrites them, unless `cotangents` is None. `options` are the
    arguments of cross_entropy_forward after the first, `cotangents` grad_loss, grad_lse, lse_factor, grad_entropy and the
    entropy itself."""
    if cotangents is None:
        return _cross_entropy(scores, *options, entropy), None, None
    grad_loss, grad_lse, lse_factor, *of_entropy = cotangents
    one_pass = forward and lse_factor is None  # one kernel gives losses and gradients, unless there is an entropy
    rows = _cross_entropy(scores, *options, entropy) if forward and not one_pass else (None,) * 4
    if lse_factor is not None:
        lse = rows[1] if forward else _logsumexp(scores, 1, None)
        grad_lse = with_z_gradient(grad_lse, lse_factor, lse)
    *row_results, grad_target = _cross_entropy_backward_in_place(
        grad_loss, grad_lse, scores, *options, target_grad, one_pass, one_pass and entropy, *of_entropy
    )
    return (row_results if one_pass else rows), grad_lse, grad_target


def scale_rows_(logits: Tensor, factors: Tensor) -> None:
    """logits [n, columns] *= factors [n] in float32 or wider, rounded once."""
    rows = logits.shape[0]
    if logits.is_cpu and logits.dtype != factors.dtype:  # torch converts a whole operand there
        rows = _cap_rows(logits.shape[1], factors.dtype, "cpu")
    for part, of_part in zip(logits.split(max(rows, 1)), factors.unsqueeze(1).split(max(rows, 1)), strict=True):
        part.mul_(of_part)


def top_logits(scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """(the `top` largest logits in the accumulator's dtype, their classes), [n, P, top] each, of logits [n, C, P]; empty for
    0."""
    accumulator = accumulator_of(scores.dtype)
    if top == 0:
        return scores.new_empty([0], dtype=accumulator), scores.new_empty([0], dtype=torch.int64)
    _, classes = ops.topk_softmax_forward.default(scores, top, 1, False, accumulator)
    return scores.gather(1, classes).to(accumulator).movedim(1, -1), classes.movedim(1, -1)


def log_probs_of(top: tuple[Tensor, Tensor], lse: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, classes) of `top_logits`, with lse [n, P]."""
    logits, classes = top
    return logits - lse.unsqueeze(-1) if classes.dim() == 3 else logits, classes


class _Cap:
    """softcap * tanh(quotients) of a block of at most `rows` rows, and the gradient through it, in `dtype`. The quotients are
    logits / softcap, computed by the matrix product, so that no separate pass divides."""

    def __init__(self, softcap: float, input: Tensor, rows: int, columns: int, dtype: torch.dtype, in_place: bool):
        pitch = _pitch(columns, dtype, input.device.type)
        self.softcap, self.in_place = softcap, in_place  # in_place: `dtype` is the logits' dtype
        self.tanh, *self.scores = (input.new_empty([rows, pitch], dtype=dtype)[:, :columns] for _ in range(2 - in_place))

    def apply(self, quotients: Tensor) -> Tensor:
        """The capped logits [n, columns] of quotients, which they overwrite if in_place."""
        tanh = self.tanh[: quotients.shape[0]]
        torch.tanh(quotients, out=tanh) if self.in_place else tanh.copy_(quotients).tanh_()
        return torch.mul(tanh, self.softcap, out=quotients if self.in_place else self.scores[0][: quotients.shape[0]])

    def differentiate(self, grad: Tensor, no_grad: Tensor | None, logits: Tensor) -> None:
        """Overwrites the argument of the last `apply` with the gradient of the logits, not of the quotients. `grad` [n, C, P]
        is the gradient of the capped logits; no_grad [n, P] marks rows with gradient 0 whatever their logits hold."""
        tanh = self.tanh[: logits.shape[0]].unflatten(1, grad.shape[1:])
        if no_grad is not None:
            tanh.masked_fill_(no_grad.unsqueeze(1), 0)  # as 0 * NaN is NaN
        torch.ops.aten.tanh_backward.grad_input(grad, tanh, grad_input=grad)
        if not self.in_place:
            logits.copy_(grad.flatten(1))


def _run(
    input, linear_weight, linear_bias, target, weight, row_scale, ignore_index, label_smoothing, dtype, scale, softcap, forward,
    grad_loss=None, grad_lse=None, lse_factor=None, wanted=_NONE_WANTED, argmax=False, entropy=False, top=0,
    grad_entropy=None, entropy_value=None,
):  # fmt: skip
    """The loop over chunks that the three operators share: (loss, lse, row_weight, entropy, argmax, top_log_probs, top_classes,
    the four gradients). Results that are not requested are empty: the first three without `forward`, each gradient that is
    not in `wanted`."""
    (rows, hidden), (classes, positions, _) = input.shape, linear_weight.shape
    columns, device = classes * positions, input.device.type
    common, indexed = common_dtype(dtype, target), not target.is_floating_point()
    accumulator, gradients = accumulator_of(common), any(wanted)
    step, accumulate = chunk_plan(rows, columns, hidden, dtype, device, wanted[1] and linear_weight.dtype.itemsize == 2)

    results = _empty_rows(input, positions, accumulator, forward, argmax, entropy, top)
    cotangents_of_all = grad_loss, grad_lse, lse_factor, grad_entropy, entropy_value
    grads = _empty_gradients((input, linear_weight, linear_bias, target), wanted)
    grad_input, grad_linear_weight, grad_linear_bias, grad_target = grads
    total = grad_linear_weight.view(columns, hidden) if wanted[1] else grad_linear_weight
    if accumulate:
        total = total.new_empty(total.shape, dtype=torch.float32)
    bias_total = input.new_zeros([columns] if wanted[2] else [0], dtype=accumulator_of(dtype))

    matrix = linear_weight.flatten(0, 1).to(dtype)
    bias = None if linear_bias is None else linear_bias.flatten().to(dtype)
    buffer = input.new_empty([min(step, rows), _pitch(columns, dtype, device)], dtype=dtype)
    block = min(_cap_rows(columns, accumulator, device), step) if softcap else step
    cap = _Cap(softcap, input, min(block, rows), columns, accumulator, dtype == accumulator) if softcap else None
    for begin in range(0, rows, step):
        chunk = slice(begin, min(begin + step, rows))
        x = input[chunk].to(dtype)
        chunk_logits, chunk_no_grad = buffer[: x.shape[0], :columns], []
        _product(chunk_logits, x, matrix.t(), scale / softcap if softcap else scale, bias)
        if row_scale is not None:
            scale_rows_(chunk_logits, row_scale[chunk])
        for first in range(begin, chunk.stop, block):  # once, unless the logits are capped
            part = slice(first, min(first + block, chunk.stop))
            logits, t = chunk_logits[first - begin : part.stop - begin], target[part]
            if argmax:  # before a cap, which may make several logits equal
                results[4][part] = logits.unflatten(1, (classes, positions)).argmax(1)
            scores = (logits if cap is None else cap.apply(logits)).unflatten(1, (classes, positions))
            if not indexed:
                common = common if cap is None else accumulator
                scores, t = scores.to(common), t.to(common)
            options = (t, weight, ignore_index, label_smoothing)
            chosen = top_logits(scores, top) if top else None  # before their gradient overwrites them
            cotangents = tuple(g if g is None else g[part] for g in cotangents_of_all) if gradients else None
            pieces, part_grad_lse, part_grad_target = _rows_in_place(scores, options, cotangents, forward, wanted[3], entropy)
            if forward:
                for whole, piece in zip(results[: 3 + entropy], pieces, strict=False):
                    whole[part] = piece
                if chosen is not None:
                    results[5][part], results[6][part] = log_probs_of(chosen, pieces[1])
            if not gradients:
                continue
            if indexed:
                no_grad = t == ignore_index
                for part_grad in (part_grad_lse, cotangents[3]):
                    no_grad = no_grad if part_grad is None else no_grad & (part_grad == 0)
                chunk_no_grad.append(no_grad)
            if cap is not None:
                cap.differentiate(scores, chunk_no_grad[-1] if indexed else None, logits)
            elif scores.dtype != dtype:
                logits.copy_(scores.flatten(1))
            if wanted[3]:
                grad_target[part] = part_grad_target
        if gradients and row_scale is not None:
            scale_rows_(chunk_logits, row_scale[chunk])
        if wanted[0]:
            if input.dtype == dtype:
                _product(grad_input[chunk], chunk_logits, matrix, scale)
            else:
                grad_input[chunk] = torch.mm(chunk_logits, matrix)
                if scale != 1:
                    grad_input[chunk].mul_(scale)
        if wanted[1]:
            if indexed:
                # The gradient of an ignored row is 0 even where its input holds NaN: the product must not meet 0 * NaN.
                no_grad = chunk_no_grad[0] if len(chunk_no_grad) == 1 else torch.cat(chunk_no_grad)
                x = x.masked_fill(no_grad.all(1, keepdim=True), 0)
            _add_product(total, chunk_logits, x, scale, begin == 0)
        if wanted[2]:
            bias_total += chunk_logits.sum(0, dtype=bias_total.dtype)
    if rows == 0:
        total.zero_()
    if accumulate:
        grad_linear_weight.view(columns, hidden).copy_(total)
    if wanted[2]:
        grad_linear_bias.copy_((bias_total * scale if scale != 1 else bias_total).view(classes, positions))
    return *results, *grads


# --- the operators ----------------------------------------------------------------------------------------------------------
#
# input [N, H], linear_weight [C, P, H], linear_bias [C, P], target int64 [N, P] or probabilities [N, C, P], weight [C] in the
# accumulator's dtype; input, linear_weight and linear_bias in any floating dtype; the products run in `dtype`. loss, lse,
# row_weight, entropy, grad_loss, grad_lse, lse_factor and grad_entropy: [N, P] in the accumulator's dtype. `wanted` says which
# gradients of (input, linear_weight, linear_bias, target) are computed, each in its tensor's dtype; unwanted gradients are
# empty. row_scale [N], in the accumulator's dtype, multiplies a row's logits before the softcap.
#
# The backward operator adds lse_factor * lse to grad_lse: that is the gradient of a loss with a term in lse^2. The step
# operator does both passes at once, for a grad_loss and an lse_factor that are known beforehand. `scale` and `softcap` (0:
# none) make the logits softcap * tanh(scale * (input linear_weight^T + linear_bias) / softcap). argmax: int64 [N, P], the class
# of the largest logit, or empty. top_log_probs and top_classes: [N, P, top], or empty.

ARGUMENTS = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? weight, Tensor? row_scale, "
    "int ignore_index, float label_smoothing, ScalarType dtype, float scale, float softcap"
)
EXTRAS = "bool return_argmax=False, bool return_entropy=False, int top=0"
_ROWS = "Tensor loss, Tensor lse, Tensor row_weight, Tensor entropy, Tensor argmax, Tensor top_log_probs, Tensor top_classes"
_GRADIENTS = "Tensor grad_input, Tensor grad_linear_weight, Tensor grad_linear_bias, Tensor grad_target"
CALL_ARGUMENTS = 11  # that all three have: ARGUMENTS
_ROW_RESULTS = 7  # of a forward pass: _ROWS


def forward_of_rows(*arguments):
    argmax, entropy, top = (*arguments[CALL_ARGUMENTS:], *(False, False, 0)[len(arguments) - CALL_ARGUMENTS :])
    return _run(*arguments[:CALL_ARGUMENTS], True, argmax=argmax, entropy=entropy, top=top)[:_ROW_RESULTS]


def _backward(*arguments):
    grad_loss, grad_lse, lse_factor, wanted, *of_entropy = (*arguments[CALL_ARGUMENTS:], None, None)[:6]
    cotangents = grad_loss, grad_lse, lse_factor, wanted
    found = _run(*arguments[:CALL_ARGUMENTS], False, *cotangents, grad_entropy=of_entropy[0], entropy_value=of_entropy[1])
    return found[_ROW_RESULTS:]


def _step(*arguments):
    grad_loss, lse_factor, wanted, *extras = arguments[CALL_ARGUMENTS:]
    return _run(*arguments[:CALL_ARGUMENTS], True, grad_loss, None, lse_factor, wanted, *extras)


def fake_of_rows(input, linear_weight, linear_bias, target, weight, row_scale, *others):
    _, _, dtype, _, _, *extras = others
    extras = (*extras, *(False, False, 0)[len(extras) :])
    return _empty_rows(input, linear_weight.shape[1], accumulator_of(common_dtype(dtype, target)), True, *extras)


def _backward_fake(*arguments):
    return _empty_gradients(arguments[:4], arguments[CALL_ARGUMENTS + 3])


def _step_fake(*arguments):
    _, _, wanted, *extras = arguments[CALL_ARGUMENTS:]
    return *fake_of_rows(*arguments[:CALL_ARGUMENTS], *extras), *_empty_gradients(arguments[:4], wanted)


def flops_of_rows(input, linear_weight, *others, wanted=_NONE_WANTED, out_shape=None, **kwargs) -> int:
    (rows, hidden), (classes, positions, _) = input, linear_weight
    wants_input, wants_linear_weight, *_ = wanted
    return 2 * rows * hidden * classes * positions * (1 + bool(wants_input) + bool(wants_linear_weight))


def _backward_flops(*arguments, out_shape=None, **kwargs) -> int:
    return flops_of_rows(*arguments, wanted=arguments[CALL_ARGUMENTS + 3])


def _step_flops(*arguments, out_shape=None, **kwargs) -> int:
    return flops_of_rows(*arguments, wanted=arguments[CALL_ARGUMENTS + 2])


def define(name: str, schema: str, run, fake, flops) -> None:
    def kernel(input, *others):
        # Autocast is off: the products run in `dtype`.
        with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
            return run(input, *others)

    def vmap(info, in_dims, *arguments):
        return _one_by_one(getattr(ops, name).default, info, in_dims, arguments)

    _define_overloads(name, schema)
    for device in ("CPU", "CUDA"):
        implement(name, kernel, device)
    _register(name, fake, vmap, flops)


def _define_overloads(name: str, schema: str) -> None:
    """Defines an operator as csrc/ops/operators.h does: first the overload that has a derivative."""
    for overload in (name, f"{name}.below_autograd"):
        _fragment.define(f"{overload}{schema}")


define(
    "linear_cross_entropy_forward",
    f"({ARGUMENTS}, {EXTRAS}) -> ({_ROWS})",
    forward_of_rows,
    fake_of_rows,
    flops_of_rows,
)
define(
    "linear_cross_entropy_backward",
    f"({ARGUMENTS}, Tensor grad_loss, Tensor? grad_lse, Tensor? lse_factor, bool[] wanted, Tensor? grad_entropy=None, "
    f"Tensor? entropy=None) -> ({_GRADIENTS})",
    _backward,
    _backward_fake,
    _backward_flops,
)
define(
    "linear_cross_entropy_step",
    f"({ARGUMENTS}, Tensor grad_loss, Tensor? lse_factor, bool[] wanted, {EXTRAS}) -> ({_ROWS}, {_GRADIENTS})",
    _step,
    _step_fake,
    _step_flops,
)

# tensor *= factor, where factor is a scalar in float32 or wider: mul_ would round it to tensor's dtype first, which biases all
# elements alike. With a factor of 1, the usual case (loss.backward()), our CUDA kernel reads the factor and nothing else.
_define_overloads("scale_", "(Tensor(a!) tensor, Tensor factor) -> ()")


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
    raise NotImplementedError("scale_: expected a call outside vmap, as it writes in place, got one inside")


implement("scale_", _scale_on_cpu, "CPU")
if not torch._C._dispatch_has_kernel_for_dispatch_key("flash_online::scale_", "CUDA"):
    implement("scale_", _scale_on_cuda, "CUDA")
_register("scale_", lambda tensor, factor: None, _scale_vmap, _no_flops)
