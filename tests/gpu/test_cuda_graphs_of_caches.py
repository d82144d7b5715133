"""CUDA graphs over cached keys: lengths, tables and offsets are read by the device, so that a graph serves every step."""

from __future__ import annotations

import pytest
import torch
from cache_cases import CachedProblem

import flash_online

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]
PROBLEM = CachedProblem(
    dtype=torch.bfloat16, head_dims=(64, 64), lengths=((1, 1, 1),) * 3, capacity=900, page=16, rotary="interleaved"
)


@pytest.mark.parametrize("splits", [None, 1, 4])
def test_a_graph_is_replayed_at_other_lengths_and_tables(splits):
    made = PROBLEM.make("cuda")
    table, caches = made.options["block_table"], [cache.nan_to_num() for cache in made.caches]
    options = {name: made.options[name] for name in ("key", "value", "rotary")} | {"num_splits": splits}
    lengths = torch.zeros(3, dtype=torch.int32, device="cuda")

    def step(caches):
        return flash_online.kvcache_attention(made.query, *caches, lengths, block_table=table, **options)

    step([cache.clone() for cache in caches])  # the allocator and the kernels are ready
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(caches)
    for seed, now in enumerate(((0, 0, 0), (5, 899, 300), (900, 17, 16), (-3, 2**31 - 1, 450))):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        pages = torch.randperm(table.numel(), generator=torch.Generator().manual_seed(seed)).view(table.shape)
        table.copy_(pages.to(torch.int32) % len(caches[0]))
        for cache in caches:
            cache.normal_()
        eager = [cache.clone() for cache in caches]
        wanted = step(eager)
        graph.replay()
        assert torch.equal(out, wanted) and all(map(torch.equal, caches, eager)), (now, splits)
