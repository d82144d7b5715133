"""These checks ask whether gathered keys under a window, of which a rank gets what its rows see, give what all keys give."""

from __future__ import annotations

import pytest
import torch
from context_parallel_cases import LAYOUTS, slopes

import flash_online
from flash_online.distributed import _gathered, context_parallel_attention, shard

WINDOWS = ((40, 0), (0, 0), (7, 90), (60, None), (100, 20), (3, 400))


def check_windows(rank, ranks):
    """Out and lse of one process, and gradients of all keys gathered, also in several groups of heads; fewer rows arrive."""
    for n, window in enumerate(WINDOWS):
        for layout in LAYOUTS:
            torch.manual_seed(n)
            dtype, length = (torch.float32, torch.bfloat16)[n % 2], 148 * ranks
            whole = [torch.randn(2, heads, length, 16).to(dtype) for heads in (6, 2, 2)]
            sinks = torch.linspace(-1, 1, 6, requires_grad=True)
            words = {"window": window, "sinks": sinks, "softcap": 5.0 * (n % 3 == 0), "deterministic": True, "return_lse": True}
            if n % 2:
                words["alibi_slopes"] = slopes(6)
            expected = shard(flash_online.attention(*whole, **words), 2, layout=layout)
            local = [t.requires_grad_() for t in shard(whole, 2, layout=layout)]
            weights, results, received = torch.randn(local[0].shape).to(dtype), [], []
            for step, size in ((1 << 40, 1), (64, 1 << 40), (64, 1)):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(_gathered, "KEY_STEP", step)  # 64: a block of keys of the CPU's kernels
                    patch.setattr(_gathered, "GROUP_BYTES", size)
                    _gathered._plan.cache_clear()

                    def counted(messages, sent, to_receive, group, run=_gathered.start_exchange, received=received):
                        received.append(sum(to_receive))
                        return run(messages, sent, to_receive, group)

                    patch.setattr(_gathered, "start_exchange", counted)
                    out, lse = context_parallel_attention(*local, method="gathered", layout=layout, **words)
                    assert all(torch.equal(*pair) for pair in zip((out, lse), expected, strict=True)), (window, layout)
                    results.append(
                        torch.autograd.grad([out, lse.nan_to_num()], [*local, sinks], [weights, torch.ones_like(lse)])
                    )
            _gathered._plan.cache_clear()
            for all_keys, ours, in_groups in zip(*results, strict=True):
                assert torch.equal(ours, in_groups)
                torch.testing.assert_close(ours, all_keys, rtol=0, atol=2e-5 if dtype == torch.float32 else 0.15)
            everything = (ranks - 1) * 148 * 2 * 2 * 2 * 16  # rows of other ranks, batch, key and value, heads, width
            if ranks == 2 and layout == "contiguous" and window[0] == 100:  # every row sees some of the first 64 keys
                assert not received
                continue
            assert len(received) == 9  # a call of one group gathers twice, and sums once
            assert received[0] <= everything * (0.7 if max(window[0], window[1] or 400) <= 40 else 1), (
                window,
                layout,
                received,
            )


def check_compiled_window(rank, ranks):
    """torch.compile makes one graph of it."""
    tensors = [torch.randn(1, 4, 8, 8, requires_grad=True) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gathered, "KEY_STEP", 2)
        _gathered._plan.cache_clear()

        def call(q, k, v):
            return context_parallel_attention(q, k, v, window=(5, 3), method="gathered")

        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for one, other in zip(
            *((out, *torch.autograd.grad(out.sum(), tensors)) for out in (call(*tensors), compiled(*tensors))), strict=True
        ):
            assert torch.equal(one, other)
    _gathered._plan.cache_clear()
