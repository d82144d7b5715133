"""Options over head dim 128 on CUDA, as models like Gemma 2 have them (head dim 256, softcap, windows, grouped heads)."""

from __future__ import annotations

import pytest
import torch
from cases import POSITIONS
from gradients import run
from oracle import Attention, Packed

import flash_online
from flash_online import reference
from flash_online.testing import assert_close_to_float64

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]


@pytest.mark.parametrize("options", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("lengths", [(300, 300), (129, 577), (577, 65), (1, 200), (200, 1)], ids=str)
@pytest.mark.parametrize("head_dims", [(256, 256), (136, 136), (192, 128), (248, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_softcap(dtype, head_dims, lengths, options):
    """Some rows see no key, some blocks none of another; sinks and the gradient of lse as well."""
    made = {"heads": (4, 2, 2), "head_dims": head_dims, "lengths": lengths, "sinks": lengths[0] == 300}
    Attention(dtype=dtype, batch=(2,), options=options | {"softcap": 5.0}, **made).check("cuda")


@pytest.mark.parametrize("softcap, size", [(0.01, 1.0), (50.0, 8.0), (1000.0, 16.0)])
def test_softcap_of_extreme_scores(softcap, size):
    """Far over the cap its derivative is 0; where the cap is large, lse has a low part that counts."""
    made = {"dtype": torch.bfloat16, "heads": (2, 2, 2), "head_dims": (256, 256), "lengths": (200, 260), "size": size}
    Attention(options={"softcap": softcap, "causal": True}, **made).check("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_softcap_of_packed_sequences(dtype):
    lengths = ((300, 300), (1, 1), (0, 5), (64, 200), (129, 129))
    options = {"causal": True, "alignment": "lower_right", "softcap": 30.0}
    Packed(heads=(4, 2, 2), dtype=dtype, lengths=lengths, head_dims=(256, 256), options=options).check("cuda")


@pytest.mark.parametrize("causal", [False, True])
def test_softcap_is_deterministic_where_asked(causal):
    inputs = [torch.randn(2, 4, 700, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    grad = torch.randn_like(inputs[0])

    def step():
        out = flash_online.attention(*inputs, causal=causal, softcap=20.0, deterministic=True)
        return out, *torch.autograd.grad(out, inputs, grad)

    first = step()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))


MASKS = {
    "bool": {"mask": "bool"},
    "blocks": {"mask": "blocks"},
    "padding": {"mask": "bool", "mask_shape": (1, 0, 0, 1)},
    "per head": {"mask": "bool", "mask_shape": (0, 1, 1, 1)},
    "float": {"mask": "float"},
    "float of the batch": {"mask": "float", "mask_shape": (0, 1, 1, 1)},
    "-inf": {"mask": "-inf"},
    "alibi": {"alibi": 2},
    "bool, softcap": {"mask": "blocks", "options": {"softcap": 3.0}},
    "bool, causal": {"mask": "bool", "options": {"causal": True}},
    "alibi, window": {"alibi": 1, "options": {"window": (90, 20)}},
    "groups": {"mask": "blocks", "heads": (6, 2, 2)},
    "narrower": {"mask": "bool", "head_dims": (168, 200)},
    "bool, alibi, softcap": {"mask": "bool", "alibi": 1, "options": {"softcap": 3.0}},
}


@pytest.mark.parametrize("made", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("lengths", [(300, 304), (130, 584)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masks_and_alibi(dtype, lengths, made):
    made = {"heads": (4, 2, 2), "head_dims": (256, 256)} | made
    mask_dtype = dtype if made.get("mask") in ("float", "-inf") else None
    Attention(dtype=dtype, batch=(2,), lengths=lengths, mask_dtype=mask_dtype, **made).check("cuda")


@pytest.mark.parametrize("head_dim", [160, 192, 256])
def test_masks_of_hidden_clear_and_mixed_blocks(head_dim):
    """Two CTAs share a block of queries. Where it is hidden from one of them and clear for the other, the first needs its bits:
    those of a mixed block stand in shared memory."""
    g = torch.Generator().manual_seed(0)
    kinds = torch.randint(3, (1, 2, 12, 10), generator=g).repeat_interleave(64, -2).repeat_interleave(64, -1)
    mask = ((kinds == 1) | ((kinds == 2) & (torch.rand(kinds.shape, generator=g) < 0.5)))[..., :750, :600].cuda()
    tensors = [torch.randn(2, 2, n, head_dim, generator=g).cuda().bfloat16() for n in (750, 600, 600)]
    ours = run(flash_online.attention, tensors, mask=mask)
    plain, truth = (run(reference.attention, [t.to(d) for t in tensors], mask=mask) for d in (torch.bfloat16, torch.float64))
    for name, one, other, true in zip(("out", "lse", "dq", "dk", "dv"), ours, plain, truth, strict=True):
        assert_close_to_float64(one, other, true, name=name)
