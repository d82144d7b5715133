"""These checks ask what spans over several ranks do beyond options (context_parallel_cases.py): shapes, groups of heads, second
derivatives, torch.compile, errors."""

from __future__ import annotations

import pytest
import torch
from context_parallel_cases import LAYOUTS, METHODS

import flash_online
from flash_online import spans
from flash_online.distributed import (
    _context_parallel,
    _gathered,
    _ulysses,
    context_parallel_attention,
    context_parallel_varlen_attention,
    shard,
)


def check_spans_of_builders(rank, ranks):
    """What flash_online.spans makes of the whole sequence is what a rank passes on."""
    length = 40 * ranks
    whole = [torch.randn(2, 4, length, 16) for _ in range(3)]
    for words in (
        spans.documents(torch.arange(length).expand(2, -1) // 23),
        spans.prefix(torch.tensor([30, length], dtype=torch.int32), length),
        spans.sink_window(3, 20, length),
        spans.padding(torch.tensor([length // 2, 7], dtype=torch.int32), length),
        spans.shared_prefix(torch.tensor([0, 20, 50, length - 3], dtype=torch.int32), length),
    ):
        for layout in LAYOUTS:
            (expected,) = shard([flash_online.attention(*whole, **words)], 2, layout=layout)
            for method in METHODS:
                ours = context_parallel_attention(*shard(whole, 2, layout=layout), method=method, layout=layout, **words)
                assert torch.equal(ours, expected), (sorted(words), method, layout)


def check_spans_of_shapes(rank, ranks):
    """Two batch dimensions, spans with and without them, and in one dimension of batch or none."""
    length, g = 8 * ranks, torch.Generator().manual_seed(0)
    for shape, leading in [
        ((2, 3, 4), (2, 3, 1)),
        ((2, 3, 4), (3, 4)),
        ((2, 3, 4), (2, 1, 1)),
        ((2, 3, 4), ()),
        ((4,), (4,)),
        ((), ()),
    ]:
        whole = [torch.randn(*shape, length, 6, generator=g) for _ in range(3)]
        given = torch.randint(0, length + 1, (*leading, length, 2), generator=g, dtype=torch.int32).sort(-1).values
        words = {"query_spans": given, "key_spans": given}
        (expected,) = shard([flash_online.attention(*whole, **words)], -2)
        for method in METHODS:
            assert torch.equal(context_parallel_attention(*shard(whole, -2), method=method, **words), expected), shape


def check_spans_in_groups_of_heads(rank, ranks):
    """Heads in several groups have their own intervals."""
    length, heads, g = 70 * ranks, 4 * ranks, torch.Generator().manual_seed(1)
    whole = [torch.randn(1, heads, length, 8, generator=g) for _ in range(3)]
    words = {
        name: torch.randint(0, length + 1, (heads, length, 4), generator=g, dtype=torch.int32).sort(-1).values
        for name in ("query_spans", "key_spans")
    }
    expected = shard(flash_online.attention(*whole, return_lse=True, **words), 2)
    for method in METHODS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_ulysses, "GROUPED_SCORES", 0)
            patch.setattr(_gathered, "GROUP_BYTES", 1)
            patch.setattr(_context_parallel, "_is_static", lambda query, left: True)  # Hopper's choice for plain calls
            ours = context_parallel_attention(*shard(whole, 2), method=method, return_lse=True, **words)
        for one, other in zip(ours, expected, strict=True):
            assert torch.equal(one, other), method


def check_lists_of_blocks(rank, ranks):
    """A list of the whole sequence, of all heads and of each head, in one group of heads and in two, eager and compiled: the
    bits of one process, gradients too."""
    length, heads, g = 130 * ranks, 4 * ranks, torch.Generator().manual_seed(3)
    query_blocks, key_blocks = -(-length // 128), -(-length // 64)
    for batch, leading in (((2,), (heads,)), ((1,), (1,)), ((2, 1), (2, 1, heads)), ((), (heads,))):
        whole = [torch.randn(*batch, h, length, 8, generator=g) for h in (heads, 2 * ranks, 2 * ranks)]
        seen = torch.rand(*leading, query_blocks, key_blocks, generator=g) < 0.6
        words = {"blocks": flash_online.BlockList.from_mask(seen, (128, 64)), "causal": True, "deterministic": True}
        words["query_spans"] = torch.randint(0, length + 1, (length, 2), generator=g, dtype=torch.int32).sort(-1).values
        whole = [tensor.requires_grad_() for tensor in whole]
        out, lse = flash_online.attention(*whole, return_lse=True, **words)
        grads = torch.autograd.grad(out.sin().sum(), whole)
        for layout in LAYOUTS:
            expected = shard([out.detach(), *grads], -2, layout=layout)
            for scores, compiled in ((_ulysses.GROUPED_SCORES, False), (0, False), (_ulysses.GROUPED_SCORES, batch == (1,))):
                local = [t.detach().requires_grad_() for t in shard(whole, -2, layout=layout)]
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(_ulysses, "GROUPED_SCORES", scores)

                    def call(*tensors, layout=layout, words=words):
                        return context_parallel_attention(*tensors, layout=layout, **words)

                    ours = (torch.compile(call, backend="aot_eager") if compiled else call)(*local)
                    found = [ours, *torch.autograd.grad(ours.sin().sum(), local)]
                for one, other in zip(found, expected, strict=True):
                    assert torch.equal(one, other), (batch, layout, scores, compiled)
    with pytest.raises(flash_online.InvalidArgument, match="blocks: expected None with method='gathered'"):
        context_parallel_attention(*local, method="gathered", **words)
    with pytest.raises(flash_online.InvalidArgument, match="blocks: expected counts of"):
        context_parallel_attention(*local, blocks=flash_online.BlockList.dense(length + 999, length))


def check_spans_second_derivatives(rank, ranks):
    """Ulysses, in one group of heads and in two, with one process's second derivatives."""
    length, heads, g = 6 * ranks, 2 * ranks, torch.Generator().manual_seed(2)
    whole = [torch.randn(1, heads, length, 5, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    given = torch.randint(0, length + 1, (heads, length, 2), generator=g, dtype=torch.int32).sort(-1).values

    def twice(call, tensors):
        first = torch.autograd.grad(call(*tensors).sin().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(grad.cos().sum() for grad in first), tensors)

    words = {"query_spans": given, "key_spans": given}
    expected = shard(list(twice(lambda *t: flash_online.attention(*t, **words), whole)), 2)
    for scores in (_ulysses.GROUPED_SCORES, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_ulysses, "GROUPED_SCORES", scores)
            local = [t.detach().requires_grad_() for t in shard(whole, 2)]
            ours = twice(lambda *t: context_parallel_attention(*t, method="ulysses", **words), local)
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other)


def check_compiled_spans(rank, ranks):
    """One graph of a call and its backward pass, dense and packed."""
    starts, g = torch.tensor([0, 5, 8 * ranks], dtype=torch.int32), torch.Generator().manual_seed(3)
    given = torch.randint(0, 8 * ranks + 1, (8 * ranks, 2), generator=g, dtype=torch.int32).sort(-1).values
    for method in METHODS:

        def dense(q, k, v, method=method):
            return context_parallel_attention(q, k, v, query_spans=given, key_spans=given, method=method)

        def packed(q, k, v, method=method):
            return context_parallel_varlen_attention(q, k, v, starts, query_spans=given, key_spans=given, method=method)

        for call, shape in ((dense, (1, 4, 8, 8)), (packed, (8, 4, 8))):
            tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
            torch._dynamo.reset()
            both = []
            for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
                out = run(*tensors)
                both.append((out, *torch.autograd.grad(out.sum(), tensors)))
            for one, other in zip(*both, strict=True):
                assert torch.equal(one, other), method


def check_errors_of_spans(rank, ranks):
    """All ranks raise, and the next call works."""
    query = torch.randn(1, 4, 8, 6)
    good = torch.zeros(8 * ranks, 2, dtype=torch.int32)
    for given, message in [
        (good[:8], f"expected the length {8 * ranks}"),
        (good.long(), "expected dtype int32"),
        (good.expand(3, -1, -1), "expected 1 or query's 4 heads"),
    ]:
        for name in ("query_spans", "key_spans"):
            for method in METHODS:
                with pytest.raises(flash_online.InvalidArgument, match=f"{name}: {message}"):
                    context_parallel_attention(query, query, query, method=method, **{name: given})
    rows = query[0].transpose(0, 1)
    with pytest.raises(flash_online.InvalidArgument, match="query_spans: expected the length"):
        context_parallel_varlen_attention(rows, rows, rows, torch.tensor([0, 8], dtype=torch.int32), query_spans=good[:3])
    if ranks > 1:  # shapes are compared
        one = good if rank == 0 else good.expand(4, -1, -1)
        with pytest.raises(flash_online.InvalidArgument, match="key_spans"):
            context_parallel_attention(query, query, query, key_spans=one)
    assert not context_parallel_attention(query, query, query, key_spans=good).any()
