"""The merge of partial attention results over disjoint keys, and its derivatives of first and second order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _policy
from ._autograd import Description, composite, differentiable
from ._checks import check_tensors
from ._ops import InvalidArgument, accumulator_of, ops


def merge_attention(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Merges partial attention results over disjoint sets of keys, exactly: the result over the union of the keys.

    Args:
        outs: partial outputs `[..., Ev]` of one shape and floating dtype: a sequence, or stacked along dim 0.
        lses: the lse of each, of its output's shape without the last dimension, float32 (float64 for float64 outs): a
            sequence, or stacked along dim 0.

    Returns:
        (out, lse) of the shapes of one part, out in the dtype of the parts. A row that is empty in every part (lse -inf) is 0
        and -inf. Differentiable in all outs and lses.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): no parts, or shapes, dtypes or devices that differ.
        NotImplementedError: the device has no kernel for this call.

    Source: Milakov and Gimelshein, arXiv 1805.02867, section 3.1: the merge of (m, d), extended to the output.
    """
    outs, lses = check_tensors("outs", outs), check_tensors("lses", lses)
    if not outs or len(outs) != len(lses):
        raise InvalidArgument(f"outs: expected as many as lses, at least one, got {len(outs)} outs and {len(lses)} lses")
    for n, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or out.dtype != outs[0].dtype or out.device != outs[0].device or out.dim() < 1:
            raise InvalidArgument(
                f"outs[{n}]: expected outs[0]'s {list(outs[0].shape)} {outs[0].dtype} on {outs[0].device}, got "
                f"{list(out.shape)} {out.dtype} on {out.device}"
            )
        if lse.shape != out.shape[:-1] or lse.dtype != accumulator_of(out.dtype) or lse.device != out.device:
            raise InvalidArgument(
                f"lses[{n}]: expected {list(out.shape[:-1])} {accumulator_of(out.dtype)} on {out.device}, got "
                f"{list(lse.shape)} {lse.dtype} on {lse.device}"
            )
    _policy.require_kernel("merge_attention", outs=outs[0])
    return _merge(*outs, *lses)


class _Merge(Description):
    """(*outs, *lses) -> (out, lse)."""

    operator = ops.attention_merge

    @staticmethod
    def inputs(outs, lses):
        return *outs, *lses

    @staticmethod
    def arguments(*parts):
        count = len(parts) // 2
        return list(parts[:count]), list(parts[count:])

    @staticmethod
    def save(ctx, inputs, outputs):
        return inputs

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        outs, lses = _Merge.arguments(*ctx.saved_tensors)
        if _policy.is_dtensor(outs[0]):  # autograd fills a missing gradient with zeros that are no DTensor
            grad_out = grad_out if _policy.is_dtensor(grad_out) else torch.zeros_like(outs[0])
            grad_lse = grad_lse if _policy.is_dtensor(grad_lse) else torch.zeros_like(lses[0])
        if (
            _policy.is_dtensor(grad_out)  # DTensor's rules do not support results that are lists
            # Under autograd's own batching (is_grads_batched) no operator that takes lists can be called.
            or any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in (grad_out, grad_lse))
        ):
            grad_outs, grad_lses = _merge_gradients(grad_out, grad_lse, outs, lses)
        else:
            grad_outs, grad_lses = ops.attention_merge_backward.default(grad_out, grad_lse, outs, lses)
        return (*grad_outs, *grad_lses)

    @staticmethod
    def jvp(ctx, *tangents):
        parts = ctx.saved_tensors
        count = len(parts) // 2
        shares, out = _merge_shares(parts[:count], parts[count:])
        d_outs, d_lses = tangents[:count], tangents[count:]
        d_lse = sum(share * d_part_lse for share, d_part_lse in zip(shares, d_lses, strict=True))
        d_out = sum(
            share.unsqueeze(-1) * (d_part + (part - out) * d_part_lse.unsqueeze(-1))
            for share, part, d_part, d_part_lse in zip(shares, parts[:count], d_outs, d_lses, strict=True)
        )
        return d_out.to(parts[0].dtype), d_lse


def _merge_shares(outs, lses):
    """The weight of each part, exp(its lse - merged lse), and the merged out in the dtype of lses; differentiable."""
    stacked = torch.stack(list(lses))
    empty = (stacked == -math.inf).all(0)
    shares = torch.softmax(stacked.masked_fill(empty, 0), 0).masked_fill(empty, 0).unbind(0)
    return shares, sum(share.unsqueeze(-1) * out for share, out in zip(shares, outs, strict=True))


@composite(ops.attention_merge_backward)
def _merge_gradients(grad_out, grad_lse, outs, lses):
    shares, out = _merge_shares(outs, lses)
    grad_outs = [(share.unsqueeze(-1) * grad_out).to(part.dtype) for share, part in zip(shares, outs, strict=True)]
    grad_lses = [share * ((grad_out * (part - out)).sum(-1) + grad_lse) for share, part in zip(shares, outs, strict=True)]
    return grad_outs, grad_lses


_merge = differentiable(_Merge)
