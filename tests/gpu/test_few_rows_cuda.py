"""Few rows over dense keys on CUDA (docs/design/decode_dense.md): which kernel takes a call, and bits that depend neither on
the batch nor on other heads, whichever CTAs have the parts of a row. tests/ops/test_few_rows.py compares the numbers."""

from __future__ import annotations

import pytest
import torch

import flash_online
import flash_online.functional as functional

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]
DTYPES = [torch.float16, torch.bfloat16]
DECODE = "flash_online's CUDA kernel (decode)"


def inputs(dtype, heads, queries, keys, head_dim, batch, width=None):
    g = torch.Generator().manual_seed(keys)
    shapes = ((heads[0], queries, head_dim), (heads[1], keys, head_dim), (heads[1], keys, width or head_dim))
    return [torch.randn(batch, *shape, generator=g).to("cuda", dtype) for shape in shapes]


def options_of(name, batch, keys):
    if name == "bool mask":
        mask = torch.rand(batch, 1, 1, keys, device="cuda") < 0.6
        mask[0] = False
        return {"mask": mask}
    if name == "float mask":
        return {"mask": torch.randn(1, 1, 1, keys, device="cuda", dtype=torch.float32).expand(batch, 1, 1, keys)}
    return {"plain": {}, "window": {"window": (400, 0), "alignment": "lower_right"}, "softcap": {"softcap": 3.0}}[name]


def run(tensors, options):
    with torch.no_grad():
        return flash_online.attention(*tensors, **options, return_lse=True)


@pytest.mark.parametrize("name", ["plain", "bool mask", "float mask", "window", "softcap"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [513, 1100, 9000])
@pytest.mark.parametrize(
    "heads, queries", [((8, 2), 1), ((4, 4), 1), ((16, 1), 1), ((8, 2), 4), ((2, 1), 9), ((8, 1), 8)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_batch_and_heads(dtype, heads, queries, keys, head_dim, name):
    batch = 70  # one sequence is cut among CTAs; so many are not, or elsewhere
    tensors = inputs(dtype, heads, queries, keys, head_dim, batch)
    options = options_of(name, batch, keys)
    whole = run(tensors, options)
    assert all(t.isfinite().any() for t in whole)
    group = heads[0] // heads[1]
    for rows in (slice(0, 1), slice(69, 70), slice(2, 9), slice(5, 45)):
        part = {n: t[rows] if n == "mask" else t for n, t in options.items()}
        for found, expected in zip(run([t[rows] for t in tensors], part), whole, strict=True):
            assert torch.equal(found, expected[rows]), f"batches {rows}"
        first = [tensors[0][rows, :group], *(t[rows, :1] for t in tensors[1:])]
        for found, expected in zip(run(first, part), whole, strict=True):
            assert torch.equal(found, expected[rows, :group]), f"batches {rows}, one key head"


def test_strides_do_not_matter():
    """As long as rows are multiples of 16 bytes apart."""
    tensors = inputs(torch.bfloat16, (8, 2), 1, 2000, 128, 3)
    expected = run(tensors, {})
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    padded = [torch.nn.functional.pad(t, (8, 16))[..., 8:-16] for t in tensors]
    for others in (turned, padded):
        for found, one in zip(run(others, {}), expected, strict=True):
            assert torch.equal(found, one)


def kernel_of(*tensors, **options):
    pytest.importorskip("flash_online._introspect")
    return flash_online.explain(flash_online.attention, *tensors, **options).kernel


def test_which_calls_the_decoding_kernel_takes():
    def of(heads=(32, 8), queries=1, keys=4096, head_dim=128, dtype=torch.bfloat16, **options):
        return kernel_of(*inputs(dtype, heads, queries, keys, head_dim, 1), **options) == DECODE

    mask = torch.ones(1, 1, 1, 4096, dtype=torch.bool, device="cuda")
    assert of() and of(queries=4) and of(keys=1024) and of(mask=mask) and of(causal=True, softcap=2.0)
    assert of(head_dim=256, keys=1024) and not of(head_dim=256, keys=1023)
    assert not of(queries=5) and not of(keys=1023) and not of(queries=4, keys=2047)
    assert not of(head_dim=256, queries=4) and not of(head_dim=264) and not of(dtype=torch.float32)
    assert not of(dropout_p=0.1) and not of(queries=2, mask=mask.expand(1, 1, 2, 4096).contiguous())
    assert not of(deterministic=True)  # for a backward pass


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
def test_calls_with_gradients_have_the_bits_of_longer_ones(options):
    query, key, value = inputs(torch.bfloat16, (4, 2), 200, 700, 64, 2)
    key.requires_grad_()
    whole = flash_online.attention(query, key, value, **options)
    assert torch.equal(flash_online.attention(query[:, :, :3], key, value, **options), whole[:, :, :3])


@pytest.mark.parametrize("masked", [False, True])
def test_graphs_and_compiled_calls(masked):
    query, key, value = inputs(torch.float16, (8, 2), 1, 3000, 64, 2)
    mask = (torch.rand(2, 1, 1, 3000, device="cuda") < 0.5) if masked else None
    attend = lambda: functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)  # noqa: E731
    with torch.no_grad():
        expected = attend()
        compiled = torch.compile(attend, fullgraph=True)()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            attend()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = attend()
        captured.zero_()
        graph.replay()
    assert torch.equal(compiled, expected) and torch.equal(captured, expected)
