"""The backward pass of plain attention over head dim 128 on Hopper, where the two CTAs of a cluster share dQ."""

from __future__ import annotations

import pytest
import torch
from cases import POSITIONS
from oracle import Attention, Packed

import flash_online

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]

HEADS = {"heads": (2, 2, 2), "groups": (4, 2, 2), "values shared": (4, 4, 1)}
# Rows of two and a half, three and four boxes of 64 columns, values of one and more, and more than keys. Of the second CTA's
# half of dQ all columns exist, or some, or none; and widths that are no multiple of 8.
ODD_HEAD_DIMS = [(136, 136), (160, 64), (192, 40), (130, 191), (161, 8), (248, 200), (200, 256), (193, 40), (160, 225)]
HEAD_DIMS = [(192, 192), (192, 128), (160, 160), (256, 256)]
LENGTHS = [(300, 300), (129, 577), (577, 65), (2, 200), (200, 2), (64, 96), (65, 97)]


@pytest.mark.parametrize("options", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("head_dims", HEAD_DIMS + ODD_HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients(dtype, head_dims, lengths, options):
    """Some rows see no key, some blocks none of another; the second CTA of a cluster may have no keys. Sinks and the gradient
    of lse as well."""
    made = {"heads": (2, 2, 2), "head_dims": head_dims, "lengths": lengths, "sinks": lengths[0] == 300}
    Attention(dtype=dtype, batch=(2,), options=options, **made).check("cuda")


@pytest.mark.parametrize("options", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("head_dims", [(192, 192), (192, 128), (160, 144), (256, 208)], ids=str)
def test_groups(head_dims, heads, options):
    made = {"heads": heads, "head_dims": head_dims, "lengths": (250, 410)}
    Attention(dtype=torch.bfloat16, batch=(3,), options=options, **made).check("cuda")


@pytest.mark.parametrize("size", [1e-3, 8.0, 64.0])
@pytest.mark.parametrize("head_dims", [(192, 192), (160, 160), (256, 256)], ids=str)
def test_sizes_of_scores(head_dims, size):
    """Where scores are large, lse has a low part that counts."""
    made = {"heads": (2, 2, 2), "head_dims": head_dims, "lengths": (200, 260), "size": size}
    Attention(dtype=torch.bfloat16, options={"causal": True}, **made).check("cuda")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 2, 2)], ids=str)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_packed_sequences(dtype, head_dims, heads, causal):
    """Empty ones, and such as end within a block of queries or a tile of keys."""
    lengths = ((300, 300), (1, 1), (0, 5), (5, 0), (64, 96), (65, 97), (129, 400), (0, 0), (70, 33))
    options = {"causal": causal, "alignment": "lower_right"}
    Packed(heads=heads, dtype=dtype, lengths=lengths, head_dims=head_dims, options=options).check("cuda")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_deterministic(head_dims, causal):
    shapes = [(2, 6, 700, head_dims[0])] * 2 + [(2, 6, 700, head_dims[1])]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]

    def step():
        out = flash_online.attention(*inputs, causal=causal, deterministic=True)
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    first = step()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_infinities_stay_in_their_sequence(head_dims):
    """Infinities in one packed sequence reach no gradient of its neighbours: a tile's last rows become zeros in shared memory,
    and so do those of the keys that a CTA has from another one's tile."""
    lengths = (70, 64, 5, 190, 129)
    starts = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    total = int(starts[-1])
    shapes = [(total, 2, head_dims[0])] * 2 + [(total, 2, head_dims[1])]
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    grad = torch.randn(shapes[2], device="cuda", dtype=torch.bfloat16)

    def gradients(rows):
        inputs = [x[rows].detach().requires_grad_() for x in tensors]
        bounds = starts if rows == slice(None) else torch.tensor([0, rows.stop - rows.start], device="cuda", dtype=torch.int32)
        out = flash_online.varlen_attention(*inputs, bounds, bounds, 190, 190, deterministic=True)
        return torch.autograd.grad(out, inputs, grad[rows])

    alone = [gradients(slice(starts[n].item(), starts[n + 1].item())) for n in (0, 2, 4)]
    for n in (1, 3):
        for x in (*tensors, grad):
            x[starts[n] : starts[n + 1]] = torch.inf
    together = gradients(slice(None))
    for n, wanted in zip((0, 2, 4), alone, strict=True):
        for ours, theirs in zip(together, wanted, strict=True):
            assert torch.equal(ours[starts[n] : starts[n + 1]], theirs)


@pytest.mark.parametrize("head_dim", [160, 192, 256])
def test_dk_and_dv_repeat(head_dim):
    """Without `deterministic` only dQ is added in the order in which CTAs come."""
    inputs = [torch.randn(1, 3, n, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (4000, 300, 300)]
    grad = torch.randn_like(inputs[0])
    first = torch.autograd.grad(flash_online.attention(*inputs), inputs, grad)
    for _ in range(5):
        again = torch.autograd.grad(flash_online.attention(*inputs), inputs, grad)
        assert all(torch.equal(a, b) for a, b in zip(first[1:], again[1:], strict=True))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize("head_dims", [(192, 192), (160, 152), (150, 150), (256, 256), (230, 230)], ids=str)
def test_layouts(head_dims, layout):
    """dK and dV are written to where such inputs' gradients lie, 16 bytes at a time or one element."""
    layouts = (layout, layout, layout, "contiguous")
    Attention(
        dtype=torch.bfloat16, batch=(2,), heads=(3, 3, 3), lengths=(130, 200), head_dims=head_dims, layouts=layouts
    ).check("cuda")
