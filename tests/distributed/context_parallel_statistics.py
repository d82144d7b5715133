"""These checks ask whether every rank gets the maximum logit of the whole sequence."""

from __future__ import annotations

import pytest
import torch
from context_parallel_cases import DENSE, DOCUMENTS, LAYOUTS, METHODS, PACKED, ROWS, made

import flash_online
from flash_online.distributed import (
    _gathered,
    _ulysses,
    context_parallel_attention,
    context_parallel_varlen_attention,
    shard,
)


def compare(call, one_process, wholes, dim, label):
    expected = one_process(*wholes)
    for method in METHODS:
        for layout in LAYOUTS:
            out, found = call(*shard(list(wholes), dim, layout=layout), method=method, layout=layout)
            assert torch.equal(out, shard([expected[0]], dim, layout=layout)[0]), (label, method, layout)
            assert torch.equal(found, expected[1]), (label, method, layout, found, expected[1])


def check_max_logit(rank, ranks):
    for label, heads, (width, width_v), dtype, options in DENSE:
        torch.manual_seed(len(label))
        widths = zip(heads, (width, width, width_v), strict=True)
        wholes = [torch.randn(2, h, ROWS, e).to(dtype) for h, e in widths]
        keywords, sinks = made(options, heads[0])
        keywords |= {"return_max_logit": True, "sinks": None if sinks is None else sinks.detach()}

        def one_process(*tensors, keywords=keywords):
            return flash_online.attention(*tensors, **keywords)

        def call(*tensors, keywords=keywords, **how):
            return context_parallel_attention(*tensors, **keywords, **how)

        compare(call, one_process, wholes, 2, label)


def check_max_logit_of_documents(rank, ranks):
    for label, documents, (heads, key_heads), dtype, options in PACKED:
        torch.manual_seed(len(label))
        starts, longest = torch.tensor(DOCUMENTS[documents], dtype=torch.int32), options.get("max_seqlen", ROWS)
        wholes = [torch.randn(ROWS, h, 16).to(dtype) for h in (heads, key_heads, key_heads)]
        keywords, sinks = made(options, heads)
        keywords |= {"return_max_logit": True, "sinks": None if sinks is None else sinks.detach()}
        shared = {name: value for name, value in keywords.items() if name != "max_seqlen"}

        def one_process(*tensors, keywords=shared, starts=starts, longest=longest):
            return flash_online.varlen_attention(*tensors, starts, starts, longest, longest, **keywords)

        def call(*tensors, keywords=keywords, starts=starts, **how):
            return context_parallel_varlen_attention(*tensors, starts, **keywords, **how)

        compare(call, one_process, wholes, 0, label)


def check_max_logit_with_gradients(rank, ranks):
    """In one group of heads and in several: gradients are those of a call without it, and it has none."""
    whole = [torch.randn(1, 4 * ranks, 70 * ranks, 8) for _ in range(3)]
    expected = flash_online.attention(*whole, causal=True, return_lse=True, return_max_logit=True)
    for method in METHODS:
        for scores, size in ((_ulysses.GROUPED_SCORES, _gathered.GROUP_BYTES), (0, 1)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_ulysses, "GROUPED_SCORES", scores)
                patch.setattr(_gathered, "GROUP_BYTES", size)
                found = []
                for more in ({}, {"return_lse": True, "return_max_logit": True}):
                    local = [t.detach().requires_grad_() for t in shard(whole, 2)]
                    results = context_parallel_attention(*local, causal=True, method=method, **more)
                    out, *others = results if more else (results,)
                    if more:
                        assert torch.equal(others[0], shard([expected[1]], 2)[0]), method
                        assert torch.equal(others[1], expected[2]) and not others[1].requires_grad, method
                    found.append(torch.autograd.grad(out.sin().sum(), local))
                for one, other in zip(*found, strict=True):
                    torch.testing.assert_close(one, other)


def check_compiled_max_logit(rank, ranks):
    starts = torch.tensor([0, 5, 8 * ranks], dtype=torch.int32)
    for method in METHODS:

        def dense(q, k, v, method=method):
            return context_parallel_attention(q, k, v, causal=True, return_max_logit=True, method=method)

        def packed(q, k, v, method=method):
            return context_parallel_varlen_attention(q, k, v, starts, return_max_logit=True, method=method)

        for call, shape in ((dense, (1, 4, 8, 8)), (packed, (8, 4, 8))):
            tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
            torch._dynamo.reset()
            both = []
            for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
                out, found = run(*tensors)
                both.append((out, found, *torch.autograd.grad(out.sum(), tensors)))
            for one, other in zip(*both, strict=True):
                assert torch.equal(one, other), method
