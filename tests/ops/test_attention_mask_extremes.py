"""Float masks of the lowest finite numbers, by which callers hide keys; lse of a row that sees its sink alone."""

from __future__ import annotations

import math

import pytest
import torch
from devices import skip_without_room

import flash_online
import flash_online.functional as F

LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.bfloat16, torch.float16)}
# Of the 16-bit dtypes also the shapes that a kernel for whole tiles takes; odd ones go to the general kernel.
SHAPES = [
    (1, 2, 65, 80, 64),
    (2, 4, 130, 200, 128),
    (1, 3, 7, 9, 40),
    (1, 2, 200, 136, 96),
    (2, 2, 33, 65, 256),
    (1, 2, 200, 1032, 64),  # many blocks of keys
    (1, 1, 72, 520, 128),
]


def problem(shape, dtype, mask_dtype, device, rows=slice(3, 6)):
    """Some rows of the mask hold its lowest number throughout, and in others it hides half of the keys."""
    batch, heads, queries, keys, head_dim = shape
    g = torch.Generator().manual_seed(queries + keys)
    query, key, value = (
        torch.randn(batch, heads, n, head_dim, generator=g).to(device, dtype).requires_grad_() for n in (queries, keys, keys)
    )
    mask = torch.zeros(batch, 1, queries, keys, dtype=mask_dtype)
    mask[..., rows, :] = LOWEST[mask_dtype]
    mask[..., 0, keys // 2 :] = LOWEST[mask_dtype]
    mask[..., 1, :] = -math.inf
    mask[..., 2, : keys // 2 + 3] = LOWEST[mask_dtype]  # the first blocks show nothing
    mask[..., 6, : keys // 2] = -math.inf
    mask[..., 6, keys // 2 :] = LOWEST[mask_dtype]
    return query, key, value, mask.to(device)


def pairs():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for mask_dtype in {dtype, torch.float32}:
            yield dtype, mask_dtype


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, mask_dtype", sorted(pairs(), key=str), ids=str)
def test_mask_of_lowest_numbers_gives_the_mean(device, shape, dtype, mask_dtype):
    skip_without_room(device, dtype, shape[-1])
    query, key, value, mask = problem(shape, dtype, mask_dtype, device)
    mask.requires_grad_()
    out, lse = flash_online.attention(query, key, value, mask=mask, return_lse=True)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(device, dtype)
    grads = torch.autograd.grad(out, (query, key, value, mask), grad_out)
    wide = [t.detach().double().requires_grad_() for t in (query, key, value, mask)]
    scores = wide[0] @ wide[1].mT / math.sqrt(shape[-1]) + wide[3]
    # A row of -inf alone gives 0, with gradient 0.
    seen = scores.detach() > -math.inf
    weights = torch.softmax(torch.where(seen.any(-1, keepdim=True), scores, 0), -1) * seen
    truth = weights @ wide[2]
    expected = torch.autograd.grad(truth, wide, grad_out.double())
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}[dtype]
    if mask_dtype != torch.float16:  # its lowest number leaves differences of scores alone, which the tolerance has no room for
        torch.testing.assert_close(out.double(), truth, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(
            out[..., 3:6, :].double(),
            wide[2].mean(-2, keepdim=True).expand(*out.shape[:2], 3, -1),
            atol=tolerance,
            rtol=tolerance,
        )
        for name, got, want in zip(("query", "key", "value", "mask"), grads, expected, strict=True):
            scale = max(1.0, want.abs().max().item())
            torch.testing.assert_close(
                got.double(), want, atol=4 * tolerance * scale, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert all(torch.isfinite(t).all() for t in (out, *grads))
    expected_lse = torch.logsumexp(scores.detach(), -1)
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    finite = ~lse.isneginf()
    torch.testing.assert_close(
        lse.double()[finite], expected_lse[finite], atol=2e-2 if mask_dtype == torch.float16 else 1e-3, rtol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"scale": 3.0}, {"scale": 1e-3}, {"causal": True}, {"window": (20, 20)}], ids=str
)
def test_mask_of_lowest_numbers_beside_options(device, dtype, options):
    query, key, value, mask = problem((2, 2, 70, 70, 64), dtype, dtype, device)
    out = flash_online.attention(query, key, value, mask=mask, **options)
    at = torch.arange(70, device=device)
    seen = torch.ones(70, 70, dtype=torch.bool, device=device)
    if "causal" in options:
        seen = at[None, :] <= at[:, None]
    if "window" in options:
        seen = (at[None, :] - at[:, None]).abs() <= 20
    weights = (seen / seen.sum(-1, keepdim=True)).double()
    expected = (weights @ value.detach().double())[..., 3:6, :]
    torch.testing.assert_close(out[..., 3:6, :].double(), expected, atol=2e-2, rtol=2e-2)
    out.float().sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (query, key, value))


def test_mask_of_lowest_numbers_in_the_drop_in(device):
    query, key, value, mask = problem((2, 4, 64, 64, 64), torch.bfloat16, torch.bfloat16, device)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    mean = value.detach().float().mean(-2, keepdim=True).expand(2, 4, 3, 64)
    torch.testing.assert_close(out[..., 3:6, :].float(), mean, atol=1e-2, rtol=1e-2)


def test_nan_is_not_hidden_by_the_lowest_number(device):
    query, key, value, mask = problem((1, 2, 64, 64, 64), torch.bfloat16, torch.bfloat16, device)
    with torch.no_grad():
        query[0, 0, 4] = math.nan
        mask[0, 0, 10, 5] = math.nan
    out = flash_online.attention(query, key, value, mask=mask)
    assert out[0, 0, 4].isnan().all() and out[0, :, 10].isnan().all()
    assert not out[0, 1, 4].isnan().any() and not out[0, :, 11:].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [5, 64, 128, 256])
def test_lse_of_a_row_that_sees_its_sink_alone_is_the_sink(device, dtype, head_dim):
    query, key, value = (torch.randn(2, 3, n, head_dim).to(device, dtype) for n in (40, 20, 20))
    sinks = torch.tensor([0.1, -3.3, 77.7], device=device)
    out, lse = flash_online.attention(query, key, value, sinks=sinks, causal=True, alignment="lower_right", return_lse=True)
    assert torch.equal(lse[..., :20], sinks[:, None].expand(2, 3, 20))
    assert torch.equal(out[..., :20, :], torch.zeros_like(out[..., :20, :]))
    starts_q, starts_k = (torch.tensor([0, 40, 80], device=device, dtype=torch.int32) // d for d in (1, 2))
    packed = [t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)]
    _, packed_lse = flash_online.varlen_attention(
        *packed, starts_q, starts_k, 40, 20, sinks=sinks, causal=True, return_lse=True
    )
    assert torch.equal(packed_lse[:, :20], sinks[:, None].expand(3, 20))
