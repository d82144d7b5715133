"""These checks ask what a call of attention over several ranks takes, and how it fails: layouts of rows, shapes, groups of
ranks, calls that differ between ranks, and a rank that does not come."""

from __future__ import annotations

import functools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from context_parallel_cases import LAYOUTS, METHODS, small
from torch.fx.experimental.proxy_tensor import make_fx

import flash_online
from flash_online.distributed import (
    context_parallel_attention,
    context_parallel_varlen_attention,
    positions,
    shard,
    unshard,
)


def check_layouts(rank, ranks):
    """The rows are those of torch's load balancer; a whole tensor comes back, with the gradients of its parts."""
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer  # private; in torch 2.11 to 2.14

    length = 6 * ranks
    torchs = _load_balancer._HeadTailLoadBalancer(length, ranks, "cpu")._generate_indices().flatten()
    mine = torchs.chunk(ranks)[rank].long()
    assert torch.equal(positions(length), mine) and positions(length).dtype == torch.int64
    assert torch.equal(positions(length, layout="contiguous"), torch.arange(length).chunk(ranks)[rank])
    tensors = [torch.randn(length, 3), torch.arange(2 * length).view(2, length), torch.rand(2, length, 1) > 0.5]
    tensors.append(torch.randn(2, length).bfloat16())
    for layout in LAYOUTS:
        rows = positions(length, None, layout)
        shards = shard(tensors, [0, 1, -2, -1], layout=layout)
        for part, whole, dim in zip(shards, tensors, (0, 1, 1, 1), strict=True):
            assert torch.equal(part, whole.index_select(dim, rows)) and part.is_contiguous()
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
        for back, whole in zip(unshard(shards, [0, 1, -2, -1], layout=layout), tensors, strict=True):
            assert torch.equal(back, whole)
        part = torch.randn(2, 4, requires_grad=True)
        weights = torch.arange(8.0 * ranks).view(2, 4 * ranks)
        (whole,) = unshard([part], 1, None, layout)
        (whole * weights).sum().backward()
        assert torch.equal(part.grad, ranks * shard([weights], 1, None, layout)[0])
        whole = torch.randn(2 * ranks, requires_grad=True)
        shard([whole], 0, None, layout)[0].sum().backward()
        assert whole.grad.sum() == 2 and whole.grad[positions(2 * ranks, None, layout)].sum() == 2
    for empty in unshard(shard([torch.empty(0, 3), torch.empty(length, 0)], 0), 0):
        assert empty.numel() == 0
    with pytest.raises(ValueError, match=r"tensors\[1\]: dimension 0: expected .* in a zigzag layout of . ranks, got length 3"):
        shard([torch.ones(2 * ranks), torch.ones(3)], 0)
    with pytest.raises(ValueError, match="length: expected a multiple of .*, got length 7"):
        positions(7, None, "contiguous")
    with pytest.raises(ValueError, match="layout: expected .*, got 'zig'"):
        positions(8, None, "zig")
    with pytest.raises(ValueError, match="dims: expected .*, got 2"):
        shard([torch.ones(4)], [0, 0])
    with pytest.raises(IndexError, match=r"dims\[0\]: 1 is out of range"):
        shard([torch.ones(4)], 1)
    with pytest.raises(TypeError, match="tensors: expected a list"):
        shard(torch.ones(4), 0)
    with pytest.raises(ValueError, match=r"tensors\[0\]: expected an even number of rows .*, got 3"):
        unshard([torch.ones(3)], 0)


def check_shapes(rank, ranks):
    """Ranks of tensors, batch dimensions that broadcast, strides, autocast, sequences without rows, all options of a group."""
    n = 4 * ranks
    for shapes in (
        [(n, 5), (n, 5), (n, 3)],
        [(4, n, 5), (2, n, 5), (2, n, 3)],
        [(2, 3, 4, n, 5), (3, 2, n, 5), (1, 1, 4, n, 3)],
        [(1, n, 5), (2, n, 5), (2, n, 5)],  # one query head next to several
        [(2, 4, 0, 5), (2, 4, 0, 5), (2, 4, 0, 5)],
        [(0, 4, n, 5), (0, 4, n, 5), (0, 4, n, 5)],
        [(2, 0, n, 5), (2, 0, n, 5), (2, 0, n, 5)],
    ):
        wholes = [torch.randn(shape, requires_grad=True) for shape in shapes]
        expected = flash_online.attention(*wholes, causal=True, return_lse=True)
        theirs = torch.autograd.grad(expected[0].sum(), wholes)
        for method in METHODS:
            local = [t.detach().requires_grad_() for t in shard(wholes, -2)]
            results = context_parallel_attention(*local, causal=True, return_lse=True, method=method)
            for ours, whole, dim in zip(results, expected, (-2, -1), strict=True):
                assert torch.equal(ours, shard([whole], dim)[0]), (shapes, method)
            for ours, whole in zip(torch.autograd.grad(results[0].sum(), local), theirs, strict=True):
                torch.testing.assert_close(ours, shard([whole], -2)[0], rtol=0, atol=1e-5)
            assert torch.equal(context_parallel_attention(*local, causal=True, method=method), results[0])

    wholes = [torch.randn(1, n, 5), *torch.randn(2, 3, n, 5)]
    for sinks in (torch.randn(1), torch.randn(3)):  # of the query head, or of all heads that it becomes
        expected = flash_online.attention(*wholes, sinks=sinks)
        for method in METHODS:
            ours = context_parallel_attention(*shard(wholes, -2), sinks=sinks, method=method)
            assert torch.equal(ours, shard([expected], -2)[0]), (sinks.shape, method)

    storage = torch.randn(2, n, 4, 8)  # [batch, rows, heads, width], as projections leave it
    whole = storage.transpose(1, 2)
    (part,) = shard([storage], 1)
    part = part.transpose(1, 2)
    (expected,) = shard([flash_online.attention(whole, whole, whole)], 2)
    for method in METHODS:
        out = context_parallel_attention(part, part, part, method=method)
        assert torch.equal(out, expected) and out.stride() == part.stride()
        with torch.autocast("cpu", torch.bfloat16):
            low = context_parallel_attention(part, part, part, method=method)
            assert torch.equal(low, shard([flash_online.attention(whole, whole, whole)], 2)[0]) and low.dtype == torch.bfloat16

    wholes, local = small(ranks, dtype=torch.float32)
    for frozen in ((0,), (1,), (0, 1), (1, 2)):  # which of query, key and value want no gradient
        for n, pair in enumerate(zip(wholes, local, strict=True)):
            for tensor in pair:
                tensor.requires_grad_(n not in frozen).grad = None
        flash_online.attention(*wholes, causal=True).sum().backward()
        for method in METHODS:
            context_parallel_attention(*local, causal=True, method=method).sum().backward()
            for n, (whole, part) in enumerate(zip(wholes, local, strict=True)):
                if n in frozen:
                    assert part.grad is None
                else:
                    torch.testing.assert_close(part.grad, shard([whole.grad], 2)[0], rtol=0, atol=1e-5)
                    part.grad = None

    packed = torch.empty(0, 4, 8), torch.tensor([0, 0], dtype=torch.int32)
    for method in METHODS:
        assert context_parallel_varlen_attention(packed[0], packed[0], packed[0], packed[1], method=method).shape == (0, 4, 8)


def check_groups(rank, ranks):
    """A part of the ranks, a mesh, and a group that this process is not in."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    pair = pairs[rank // 2]
    torch.manual_seed(rank // 2)
    whole = torch.randn(1, 4, 16, 8)
    (part,) = shard([whole], 2, pair)
    assert part.shape[2] == 8
    (expected,) = shard([flash_online.attention(whole, whole, whole, causal=True)], 2, pair)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "cp"))
    for group in (pair, mesh["cp"]):
        for method in METHODS:
            out = context_parallel_attention(part, part, part, group=group, causal=True, method=method)
            assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="group: expected a DeviceMesh of 1 dimension .*, got 2"):
        positions(16, mesh)
    with pytest.raises(TypeError, match="group: expected a ProcessGroup"):
        positions(16, "cp")
    if ranks > 2:
        with pytest.raises(ValueError, match="group: expected a group with this process in it"):
            positions(16, pairs[1 - rank // 2])
    alone = [dist.new_group([r]) for r in range(ranks)][rank]
    for method in METHODS:
        assert torch.equal(context_parallel_attention(whole, whole, whole, group=alone, method=method, causal=True),
                           flash_online.attention(whole, whole, whole, causal=True))  # fmt: skip

        call = functools.partial(context_parallel_attention, group=alone, method=method, window=(3, None))
        tensors = whole, whole.sin(), whole.cos()
        assert torch.equal(make_fx(call, tracing_mode="symbolic")(*tensors)(*tensors), call(*tensors))


def check_failures(rank, ranks):
    """Every rank raises the same error, and the group works on."""
    torch.manual_seed(rank)
    last = rank == ranks - 1

    def part(rows=8, heads=4, **kind):
        return torch.randn(1, heads, rows, 6, **kind)

    def attend(t, **options):
        return context_parallel_attention(t, t, t, **options)

    def stream(t, starts, **options):
        return context_parallel_varlen_attention(t, t, t, torch.tensor(starts, dtype=torch.int32), **options)

    end = ranks - 1
    for words, call in (
        (f"^query: the ranks differ: .* on rank 0.*on rank {end}; expected", lambda: attend(part(10 if last else 8))),
        ("^query: the ranks differ", lambda: attend(part(heads=2 if last else 4))),
        ("^query: the ranks differ: .*float32.*float64", lambda: attend(part(dtype=torch.float64 if last else torch.float32))),
        ("^query: the ranks differ: .*requires grad", lambda: attend(part(requires_grad=last))),
        ("^causal: the ranks differ: False on rank 0.*True", lambda: attend(part(), causal=last)),
        ("^method: the ranks differ", lambda: attend(part(), method="gathered" if last else "ulysses")),
        ("^layout: the ranks differ", lambda: attend(part(), layout="contiguous" if last else "zigzag")),
        ("^window: the ranks differ", lambda: attend(part(), window=(rank, 0))),
        ("^sinks: the ranks differ", lambda: attend(part(), sinks=torch.ones(4) if last else None)),
        (
            f"^group: rank {end} refuses its call: InvalidArgument: dropout_p: expected 0 .*, got 0.1",
            lambda: attend(part(), dropout_p=0.1 * last),
        ),
        (f"^group: rank {end} refuses its call: InvalidArgument: query: .*, got 7", lambda: attend(part(7 if last else 8))),
        (f"^group: rank {end} refuses its call: TypeError: query", lambda: attend(None if last else part())),
        ("^function: the ranks differ", lambda: stream(part()[0], [0, 4]) if last else attend(part())),
        ("^cu_seqlens: the ranks differ", lambda: stream(part()[0].mT.contiguous(), [0, 4 + last])),
        ("^dropout_p: expected 0 .*, got 0.5", lambda: attend(part(), dropout_p=0.5)),
        ("^query: expected an even number of rows .* zigzag layout, got 7", lambda: attend(part(7))),
        ("^key: expected query's 8 rows .*, got 4", lambda: context_parallel_attention(part(), part(4), part(4))),
        ("^method: expected .*, got 'ring'", lambda: attend(part(), method="ring")),
        ("^layout: expected .*, got 'striped'", lambda: attend(part(), layout="striped")),
        ("^cu_seqlens: expected", lambda: context_parallel_varlen_attention(part()[0], part()[0], part()[0], torch.ones(2))),
        ("^max_seqlen: expected .*got -1", lambda: stream(part()[0], [0, 4], max_seqlen=-1)),
        (r"^tensors\[0\]: the ranks differ", lambda: unshard([part(10 if last else 8)], 2)),
    ):
        with pytest.raises(ValueError, match=words) as error:
            call()
        said = [None] * ranks
        dist.all_gather_object(said, str(error.value))
        assert said == said[:1] * ranks
    if ranks == 2:
        with pytest.raises(TypeError, match="^query: expected a Tensor"):
            attend(None)
        with pytest.raises(NotImplementedError, match="flash_online.attention: query: a sparse tensor"):
            attend(part().to_sparse())
    attend(part())


def dead(rank, ranks):
    """The last rank does not come to a call: the others end by the group's timeout, or as soon as its connection is closed."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    tensor = torch.randn(1, 4, 8, 6)
    context_parallel_attention(tensor, tensor, tensor, group=group)
    if rank == ranks - 1:
        time.sleep(4)
        return
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        context_parallel_attention(tensor, tensor, tensor, group=group)
    assert time.monotonic() - start < 3.5
