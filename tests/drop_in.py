"""Functions of flash_online.functional against torch's own: values, gradients and exceptions."""

from __future__ import annotations

import contextlib
import math
import warnings

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import flash_online.functional as F
from flash_online.testing import assert_close_to_float64

TF = torch.nn.functional
WIDTH = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}


def in_math(function):
    """Torch's math backend with its arithmetic in the inputs' own dtype."""

    def call(*args, **kwargs):
        allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        try:
            with sdpa_kernel(SDPBackend.MATH):
                return function(*args, **kwargs)
        finally:
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)

    return call


def in_fused(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Torch's fused kernels, which run on four dimensions of equal batch and heads, on views that have them. They know no
    gradient of a mask, so that their results do not hang on the mask here."""
    if attn_mask is not None:
        attn_mask = attn_mask.detach()
    if not enable_gqa:
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        query, key, value = (t.expand(*lead, *t.shape[-2:]) for t in (query, key, value))
        if len(lead) < 2:
            query, key, value = (t.reshape(-1, 1, *t.shape[-2:]) for t in (query, key, value))
            attn_mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask[:, None]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        out = TF.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return out if enable_gqa else out.reshape(*lead, *out.shape[-2:])


def torchs_fused_kernels_fault(attn_mask=None, **_):
    """On CUDA they read whole vectors of a mask's rows, without looking whether these are there: an address is misaligned."""
    return attn_mask is not None and attn_mask.is_cuda and (attn_mask.shape[-1] % 8 != 0 or attn_mask.stride(-1) != 1)


def differentiable(t):
    return isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad


def run(function, args, kwargs, grads, convert):
    """Results of function(*args, **kwargs) and the gradients of its differentiable inputs for the output gradients `grads`."""

    def leaf(t):
        if not isinstance(t, torch.Tensor):
            return t
        made = convert(t.detach()) if t.is_floating_point() else t
        return made.requires_grad_(t.requires_grad and made.is_floating_point())

    args, kwargs = pytree.tree_map(leaf, (args, kwargs))
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if differentiable(t)]
    outputs = pytree.tree_leaves(function(*args, **kwargs))
    wanted = [(o, g) for o, g in zip(outputs, grads, strict=False) if o.requires_grad]
    if not inputs or not wanted:
        return outputs, []
    found = torch.autograd.grad([o for o, _ in wanted], inputs, [g.to(o.dtype) for o, g in wanted], allow_unused=True)
    return outputs, list(found)


def compare(ours, theirs, args, kwargs, *, seed=0, bare=False):
    """Values, dtypes, shapes and gradients of `ours` against torch's function, in its dtype and in float64; by the rule of the
    tolerance and nothing else where `bare`."""
    g = torch.Generator().manual_seed(seed)
    may_fuse = ours is F.scaled_dot_product_attention and not torchs_fused_kernels_fault(*args[3:4], **kwargs)
    if ours is F.scaled_dot_product_attention and not may_fuse:
        theirs = in_math(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sample = pytree.tree_leaves(theirs(*args, **kwargs))
        grads = [torch.randn(o.shape, generator=g, dtype=torch.float64) for o in sample if o.is_floating_point()]
        grads = [x.to(o.device, o.dtype) for x, o in zip(grads, sample, strict=False)]
        found, found_grads = run(ours, args, kwargs, grads, lambda t: t)
        plain = [run(f, args, kwargs, grads, lambda t: t.clone()) for f in (theirs, in_math(theirs))]
        if may_fuse:
            with contextlib.suppress(RuntimeError):  # no fused kernel for this call
                plain.append(run(in_fused, args, kwargs, grads, lambda t: t.clone()))
        wide = {k: torch.float64 if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
        truth, truth_grads = run(in_math(theirs), args, wide, grads, torch.Tensor.double)
    assert len(found) == len(sample)
    narrowest = min([t.dtype for t in found if t.is_floating_point()], key=WIDTH.get)
    for i, (result, expected) in enumerate(zip(found, sample, strict=True)):
        assert result.dtype == expected.dtype and result.shape == expected.shape
        assert_close_to_float64(result, [p[0][i] for p in plain], truth[i], name=f"result {i}", bare=bare)
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if differentiable(t)]
    for i, (result, expected) in enumerate(zip(found_grads, truth_grads, strict=True)):
        assert result is not None or expected is None, f"gradient {i} is None where torch has one"
        result, expected = (torch.zeros_like(inputs[i]) if g is None else g for g in (result, expected))
        others = [p[1][i] for p in plain if p[1] and p[1][i] is not None]
        assert result.dtype == inputs[i].dtype and result.shape == inputs[i].shape
        rounding = min(narrowest, result.dtype, key=WIDTH.get)
        assert_close_to_float64(
            result,
            others,
            expected,
            rounding,
            name=f"gradient {i}",
            magnitude=0.0 if bare else magnitude(args, inputs[i], grads),
            bare=bare,
        )


def magnitude(args, differentiated, grads):
    """How large the terms are that a gradient is summed from (see assert_close_to_float64)."""
    if len(args) < 3 or not isinstance(args[2], torch.Tensor) or differentiated.numel() == 0 or args[2].numel() == 0:
        return 1.0
    # Of attention: the products of an output's gradient and a value, and of those that share an element of a mask, their sum.
    query, key, value = (t.detach().double() for t in args[:3])
    terms = grads[0].double().square().mean().sqrt() * value.square().mean().sqrt() * value.shape[-1] ** 0.5
    if any(differentiated is t for t in args[:3]):
        return terms.item()
    return terms.item() * math.sqrt(grads[0].numel() // value.shape[-1] * key.shape[-2] / differentiated.numel())


def both_raise(name, *args, **kwargs):
    """Both functions raise, and ours an exception of torch's type."""
    with pytest.raises(Exception) as theirs:
        with sdpa_kernel(SDPBackend.MATH):
            getattr(TF, name)(*args, **kwargs)
    # A kernel that lacks a dtype raises a NotImplementedError on CUDA where the CPU's raises the RuntimeError that it is.
    with pytest.raises(RuntimeError if theirs.type is NotImplementedError else theirs.type) as ours:
        getattr(F, name)(*args, **kwargs)
    return str(ours.value)
