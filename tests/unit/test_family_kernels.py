"""The kernels of benchmarks/family, thread by thread on the host, against float64: results, the data of
each thread, and that a thread waits for its data. device_on_host/ has the fibers that stand for threads."""

from __future__ import annotations

import importlib

import kernels_on_host
import pytest
import torch
from kernels_on_host import ROOT

from flash_online import reference, testing

kernels_on_host.require_sources()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        build = importlib.import_module("benchmarks.family.build")
    folder = tmp_path_factory.mktemp("family")
    kernels_on_host.copy_sources(folder)
    library = kernels_on_host.compile_library(folder, "family.cpp", "family.so", f"-I{ROOT / 'benchmarks' / 'family'}")
    return build.Kernels(str(library))


def problem(heads: int, length: int, head_dim: int, large: float = 1.0):
    generator = torch.Generator().manual_seed(length + head_dim)
    query, key, value = (torch.randn(1, heads, length, head_dim, generator=generator).bfloat16() for _ in range(3))
    return query * large, key, value


@pytest.mark.thin(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, length, head_dim", [(2, 128, 64), (1, 384, 64), (1, 384, 128)])
@pytest.mark.parametrize("organisation", ["v1", "v1, striped", "v2, warps by keys", "v2"])
def test_an_organisation_computes_attention(kernels, organisation, heads, length, head_dim, causal):
    # Large scores, so that maxima go on rising and most of a row is in few keys.
    tensors = problem(heads, length, head_dim, large=4)
    out = kernels.attention(organisation, *tensors, causal)()
    plain, truth = (reference.attention(*(t.to(dtype) for t in tensors), causal=causal) for dtype in (out.dtype, torch.float64))
    testing.assert_close_to_float64(out, plain, truth, name=organisation)


def test_the_ctas_of_an_attention_head(kernels):
    """On the host's three SMs, each with one CTA: a stripe per CTA, and never more stripes than tiles."""
    query, _, _ = problem(1, 384, 64)
    assert [kernels.ctas_per_head(name, query) for name in ("v1", "v1, striped", "v2")] == [1, 3, 6]
    assert kernels.ctas_per_head("v1, striped", query[:, :, :128]) == 2
    assert kernels.ctas_per_head("v1, striped", query.expand(1, 5, -1, -1)) == 1


def test_what_the_attention_kernels_do_not_take(kernels):
    query, key, value = problem(1, 128, 64)
    with pytest.raises(ValueError, match="L 64, E 64"):
        kernels.attention("v2", *(t[:, :, :64].contiguous() for t in (query, key, value)), False)
    with pytest.raises(ValueError, match="E 32"):
        kernels.attention("v2", *(t[..., :32].contiguous() for t in (query, key, value)), False)
    with pytest.raises(ValueError, match="contiguous bfloat16"):
        kernels.attention("v2", query.float(), key, value, False)
    with pytest.raises(ValueError, match="contiguous bfloat16"):
        kernels.attention("v2", query.mT.contiguous().mT, key, value, False)
