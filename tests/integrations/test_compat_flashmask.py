"""compat.flashmask_attention compared with the dense mask that its interface defines: results, gradients, errors."""

from __future__ import annotations

import pytest
import torch

import flash_online
from flash_online.compat import flashmask_attention


def dense(indices, causal, length):
    """The bool mask [B, H, L, S] of startend_row_indices, by the definition in the FlashMask paper."""
    rows = torch.arange(length)[:, None]
    columns = indices.transpose(-2, -1).unsqueeze(-2)  # [B, H, columns, 1, S]
    start, *others = columns.unbind(-3)
    if causal:
        return ~((rows >= start) & (rows < others[0] if others else True))
    if len(others) == 1:
        return ~(rows >= start) & ~(rows < others[0])
    return ~((rows >= start) & (rows < others[0])) & ~((rows >= others[1]) & (rows < others[2]))


def draw(seed, columns, causal, heads=1, length=50, keys=50):
    g = torch.Generator().manual_seed(seed)
    bounds = torch.randint(0, length + 1, (2, heads, keys, columns), generator=g, dtype=torch.int32)
    if columns == 4:  # below: from some row to the end; above: from the beginning to some row
        bounds[..., 1], bounds[..., 2] = length, 0
    tensors = [torch.randn(2, n, count, 16, generator=g) for n, count in ((length, 4), (keys, 2), (keys, 2))]
    return bounds, tensors


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(("columns", "causal"), [(1, True), (2, True), (2, False), (4, False)])
def test_masks(columns, causal, heads):
    for seed, (length, keys) in enumerate([(50, 50), (33, 70)]):
        bounds, tensors = draw(seed, columns, causal, heads, length, keys)
        leaves = [t.requires_grad_() for t in tensors]
        out, lse = flashmask_attention(*leaves, bounds, causal=causal, return_softmax_lse=True)
        mask = dense(bounds, causal, length)
        mask = mask.repeat_interleave(4 // heads, 1) if heads > 1 else mask
        expected, wanted = flash_online.attention(
            *(t.transpose(1, 2) for t in leaves), mask=mask, causal=causal, alignment="lower_right", return_lse=True
        )
        torch.testing.assert_close(out, expected.transpose(1, 2))
        torch.testing.assert_close(lse, wanted)
        ours, theirs = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected))
        torch.testing.assert_close(ours, theirs)


def test_the_intervals_of_documents():
    """The paper's picture: the end of each key's document."""
    ends = torch.tensor([4, 4, 4, 4, 7, 7, 7, 10, 10, 10], dtype=torch.int32).view(1, 1, 10, 1)
    query, key, value = (torch.randn(1, 10, 2, 8) for _ in range(3))
    out = flashmask_attention(query, key, value, ends, causal=True)
    parts = [slice(0, 4), slice(4, 7), slice(7, 10)]
    for part in parts:
        alone = flashmask_attention(*(t[:, part] for t in (query, key, value)), causal=True)
        torch.testing.assert_close(out[:, part], alone)


@pytest.mark.parametrize("window", [0, 3, (5, 2), (0, 60)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows(window, causal):
    _, (query, key, value) = draw(3, 2, causal)
    left, right = window if isinstance(window, tuple) else (window, window)
    rows, keys = torch.arange(50)[:, None], torch.arange(50)
    mask = (rows - left <= keys) & (keys <= rows + (0 if causal else right))
    out = flashmask_attention(query, key, value, causal=causal, window_size=window)
    expected = flash_online.attention(*(t.transpose(1, 2) for t in (query, key, value)), mask=mask)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_options():
    bounds, (query, key, value) = draw(4, 1, True)
    plain = flashmask_attention(query, key, value, bounds, causal=True)
    assert torch.equal(flashmask_attention(query, key, value, bounds, causal=True, dropout=0.5, training=False), plain)
    assert not torch.equal(flashmask_attention(query, key, value, bounds, causal=True, dropout=0.5), plain)
    assert torch.equal(flashmask_attention(query, key, value, bounds, causal=True, softmax_scale=0.25, name="x"), plain)
    assert torch.equal(torch.compile(flashmask_attention, fullgraph=True)(query, key, value, bounds, causal=True), plain)
    empty = flashmask_attention(query, key[:, :0], value[:, :0], bounds[:, :, :0], causal=True)
    assert empty.shape == query.shape and not empty.any()


GOOD = torch.zeros(2, 1, 50, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ({"startend_row_indices": GOOD.long()}, flash_online.InvalidArgument, "startend_row_indices: expected int32"),
        ({"startend_row_indices": GOOD[0]}, flash_online.InvalidArgument, "startend_row_indices: expected int32"),
        ({"startend_row_indices": GOOD, "causal": False}, flash_online.InvalidArgument, "startend_row_indices: expected int32"),
        ({"startend_row_indices": GOOD[:, :, :7]}, flash_online.InvalidArgument, "startend_row_indices: expected [2, 1 or 2"),
        ({"startend_row_indices": GOOD.expand(2, 3, 50, 1)}, flash_online.InvalidArgument, "startend_row_indices: expected [2"),
        ({"startend_row_indices": GOOD, "window_size": 3}, flash_online.InvalidArgument, "window_size: expected None"),
        ({"window_size": (1, 2, 3)}, flash_online.InvalidArgument, "window_size: expected an int or a pair"),
        ({"window_size": (-1, 2)}, flash_online.InvalidArgument, "window_size: expected bounds of 0 or more"),
        ({"window_size": 1.5}, TypeError, "window_size: expected an int"),
        ({"dropout": 2.0}, flash_online.InvalidArgument, "dropout: expected a probability"),
        ({"training": 1}, TypeError, "training: expected"),
        ({"block_mask": GOOD}, NotImplementedError, "block_mask: expected the default"),
        ({"fixed_seed_offset": GOOD}, NotImplementedError, "fixed_seed_offset: expected the default"),
        ({"return_seed_offset": True}, NotImplementedError, "return_seed_offset: expected the default"),
        ({"rng_name": "x"}, NotImplementedError, "rng_name: expected the default"),
    ],
)
def test_errors(words, error, message):
    query, key = torch.randn(2, 50, 4, 16), torch.randn(2, 50, 2, 16)
    with pytest.raises(error) as raised:
        flashmask_attention(query, key, key, **({"causal": True} | words))
    assert message in str(raised.value)


def test_errors_of_shapes():
    query, key = torch.randn(2, 50, 4, 16), torch.randn(2, 50, 2, 16)
    with pytest.raises(flash_online.InvalidArgument, match="key: expected shape"):
        flashmask_attention(query, key[0], key)
    with pytest.raises(flash_online.InvalidArgument, match="window_size: expected as many queries as keys"):
        flashmask_attention(query[:, :9], key, key, window_size=3)
