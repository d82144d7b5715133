"""The forward pass while collectives run, by the kernels of packed sequences, has the bits of the dense one."""

import pytest
import torch

from flash_online.attention import attention_impl
from flash_online.distributed._context_parallel import _claimed_tiles, _is_static

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": True, "window": (700, None)}, {"window": (600, 600)}, {"causal": True, "softcap": 20.0},
    {"causal": True, "sinks": True}, {"causal": True, "alibi_slopes": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_bits_are_those_of_dense_tiles(head_dim, options):
    torch.manual_seed(head_dim)
    query, key, value, grad = (
        torch.randn(1, heads, 1280, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 4, 4, 8)
    )
    if not _is_static(query, options.get("window", (None, None))[0]):
        pytest.skip("such a GPU's dense kernels claim their tiles, too")
    numbers = torch.linspace(0.01, 1, 8, device="cuda")
    tensors = {name: numbers for name in ("sinks", "alibi_slopes") if name in options}
    options = options | {name: tensor.expand(1, 8) if name == "alibi_slopes" else tensor for name, tensor in tensors.items()}
    results = []
    for operator in (None, _claimed_tiles):
        out, lse, _ = attention_impl(query, key, value, None, return_lse=True, deterministic=True, operator=operator, **options)
        results.append([out, lse, *torch.autograd.grad([out, lse.sum()], [query, key, value], [grad, None])])
    for dense, claimed in zip(*results, strict=True):
        assert torch.equal(dense, claimed)
