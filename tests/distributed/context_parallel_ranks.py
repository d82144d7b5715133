"""What test_context_parallel.py runs on two and on four ranks: every case beside one process, and calls that must fail.

The arguments are names of the functions below that begin with `check_`; each prints "ok" and its name on every rank.
"""

from __future__ import annotations

import random
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import joined
from torch.utils.checkpoint import checkpoint

import flash_online
from flash_online.distributed import (
    _group,
    context_parallel_attention,
    context_parallel_varlen_attention,
    positions,
    shard,
    unshard,
)
from flash_online.testing import assert_close_to_float64

METHODS = ("ulysses", "gathered")
LAYOUTS = ("zigzag", "contiguous")
ROWS = 296  # of a sequence: chunks of 37 rows on four ranks, whose ends are no tile's


def slopes(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(7)) * 0.5


# (label, (query, key, value heads), (E, Ev), dtype, options); `sinks` and `alibi` stand for tensors.
DENSE = [
    ("plain", (4, 4, 4), (16, 16), torch.float32, {}),
    ("causal", (4, 4, 4), (16, 16), torch.float32, {"causal": True}),
    ("causal bfloat16", (4, 4, 4), (32, 32), torch.bfloat16, {"causal": True}),
    ("causal float16, 4:2", (4, 2, 2), (32, 32), torch.float16, {"causal": True}),
    ("causal float64, 8:1", (8, 1, 1), (8, 8), torch.float64, {"causal": True}),
    ("window", (4, 4, 4), (16, 16), torch.float32, {"window": (37, 0)}),
    ("window, one side", (4, 4, 4), (16, 16), torch.float32, {"window": (37, None)}),
    ("window both sides, wide", (4, 4, 4), (16, 16), torch.bfloat16, {"window": (5, 90)}),
    ("window to the right", (4, 2, 2), (16, 16), torch.float32, {"window": (None, 9)}),
    ("causal window, softcap", (4, 2, 2), (16, 16), torch.float32, {"causal": True, "window": (50, None), "softcap": 5.0}),
    ("softcap, scale", (4, 4, 4), (16, 16), torch.bfloat16, {"softcap": 3.0, "scale": 0.5}),
    ("causal ALiBi", (4, 4, 4), (16, 16), torch.float32, {"causal": True, "alibi": (4,)}),
    ("ALiBi per batch", (4, 2, 2), (16, 16), torch.float32, {"alibi": (2, 4)}),
    ("ALiBi, window", (4, 4, 4), (16, 16), torch.bfloat16, {"alibi": (4,), "window": (40, 11)}),
    ("causal sinks", (4, 2, 2), (16, 16), torch.float32, {"causal": True, "sinks": True}),
    ("sinks bfloat16, all options", (8, 2, 2), (16, 16), torch.bfloat16,
     {"causal": True, "sinks": True, "window": (64, None), "softcap": 4.0, "alibi": (8,)}),
    ("6:2", (6, 2, 2), (16, 16), torch.float32, {"causal": True}),
    ("6:3", (6, 3, 3), (16, 16), torch.float32, {"causal": True, "sinks": True, "alibi": (6,)}),
    ("6:3 bfloat16", (6, 3, 3), (16, 16), torch.bfloat16, {"causal": True}),
    ("6:3:2", (6, 3, 2), (16, 16), torch.float32, {"causal": True}),
    ("3:1", (3, 1, 1), (16, 16), torch.float32, {"causal": True, "sinks": True}),
    ("1:1, fewer heads than ranks", (1, 1, 1), (16, 16), torch.float32, {"causal": True}),
    ("E != Ev", (4, 2, 2), (24, 40), torch.float32, {"causal": True}),
    ("odd head dims", (4, 2, 2), (19, 7), torch.bfloat16, {"causal": True}),
    ("head dim 0", (4, 4, 4), (0, 16), torch.float32, {"causal": True}),
]  # fmt: skip

DOCUMENTS = {
    "cut anywhere": [0, 5, 90, 91, 200, ROWS],
    "empty ones": [0, 0, 100, 100, 100, ROWS, ROWS],
    "one": [0, ROWS],
    "padding": [0, 30, 150, 171],
    "all padding": [0, 0],
}
PACKED = [
    ("causal", "cut anywhere", (4, 2), torch.float32, {"causal": True}),
    ("plain", "cut anywhere", (4, 4), torch.float32, {}),
    ("bfloat16", "cut anywhere", (4, 4), torch.bfloat16, {"causal": True, "window": (40, None)}),
    ("both sides", "cut anywhere", (4, 4), torch.float32, {"window": (20, 33)}),
    ("ALiBi of documents", "cut anywhere", (4, 2), torch.float32, {"alibi": (5, 4)}),
    ("all options", "empty ones", (6, 3), torch.bfloat16,
     {"causal": True, "alibi": (6,), "sinks": True, "softcap": 5.0, "window": (64, None)}),
    ("one document", "one", (8, 1), torch.float32, {"causal": True, "sinks": True}),
    ("padding", "padding", (4, 2), torch.float32, {"causal": True, "max_seqlen": 125}),
    ("padding, plain", "padding", (4, 2), torch.float16, {}),
    ("nothing but padding", "all padding", (4, 2), torch.float32, {"causal": True}),
]  # fmt: skip


def made(options, heads):
    """The keywords of a call, and its sinks."""
    keywords = {name: value for name, value in options.items() if name not in ("sinks", "alibi")}
    if "alibi" in options:
        keywords["alibi_slopes"] = slopes(*options["alibi"])
    return keywords, torch.linspace(-1, 2, heads).requires_grad_() if "sinks" in options else None


def gradients(results, tensors, sinks, weights):
    """Those of query, key and value, and of sinks if there are any."""
    wanted = [*tensors, *([] if sinks is None else [sinks])]
    return torch.autograd.grad(results, wanted, [w.to(r.dtype) for w, r in zip(weights, results, strict=True)])


def compare(call, one_process, wholes, weights, dims, heads, sinks, ranks, methods=METHODS):
    """A call on the rows of every rank, by each method and layout, beside one process: out and lse bit for bit, and gradients
    as far as they are promised."""
    wide_sinks = None if sinks is None else sinks.detach().double().requires_grad_()
    expected = one_process(*wholes, sinks)
    grads = gradients(expected, wholes, sinks, weights)
    wide = [whole.detach().double().requires_grad_() for whole in wholes]
    truth = gradients(one_process(*wide, wide_sinks), wide, wide_sinks, weights)
    rows, lse_rows = dims
    for method in methods:
        for layout in LAYOUTS:
            what = f"{method}, {layout}"
            local = [t.detach().requires_grad_() for t in shard(list(wholes), rows, layout=layout)]
            results = call(*local, sinks, method=method, layout=layout)
            for name, ours, whole, dim in zip(("out", "lse"), results, expected, (rows, lse_rows), strict=True):
                (theirs,) = shard([whole], dim, layout=layout)
                assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, (what, name)
                assert torch.equal(ours, theirs), (what, name, (ours - theirs).abs().max().item())
            found = gradients(
                results, local, sinks, [shard([w], d, layout=layout)[0] for w, d in zip(weights, dims, strict=True)]
            )
            divide = all(count % ranks == 0 for count in heads[1:])
            for name, ours, theirs, exact in zip(("query", "key", "value"), found, grads, truth, strict=False):
                (whole,) = unshard([ours], rows, layout=layout)
                if method == "ulysses" and (divide or name == "query"):
                    assert torch.equal(whole, theirs), (what, name, (whole - theirs).abs().max().item())
                else:
                    assert_close_to_float64(whole, theirs, exact, name=f"{what}, gradient of {name}")
            if sinks is not None:
                total = found[3].clone()
                dist.all_reduce(total)
                torch.testing.assert_close(total, grads[3], rtol=1e-5, atol=2e-6 if wholes[0].dtype == torch.float32 else 2e-2)


def check_dense(rank, ranks):
    for label, heads, (width, width_v), dtype, options in DENSE:
        torch.manual_seed(len(label))
        shapes = [(2, heads[0], ROWS, width), (2, heads[1], ROWS, width), (2, heads[2], ROWS, width_v)]
        wholes = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
        weights = torch.randn(2, heads[0], ROWS, width_v).to(dtype), torch.randn(2, heads[0], ROWS)
        keywords, sinks = made(options, heads[0])

        def one_process(*tensors, keywords=keywords):
            *tensors, sinks = tensors
            return flash_online.attention(*tensors, sinks=sinks, return_lse=True, deterministic=True, **keywords)

        def call(*tensors, keywords=keywords, **how):
            *tensors, sinks = tensors
            return context_parallel_attention(*tensors, sinks=sinks, return_lse=True, deterministic=True, **keywords, **how)

        try:
            compare(call, one_process, wholes, weights, (2, 2), heads, sinks, ranks)
        except AssertionError as error:
            raise AssertionError(f"{label}: {error}") from error


def check_packed(rank, ranks):
    for label, documents, (heads, key_heads), dtype, options in PACKED:
        torch.manual_seed(len(label))
        starts, longest = torch.tensor(DOCUMENTS[documents], dtype=torch.int32), options.get("max_seqlen", ROWS)
        shapes = [(ROWS, heads, 16), (ROWS, key_heads, 16), (ROWS, key_heads, 24)]
        wholes = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
        weights = torch.randn(ROWS, heads, 24).to(dtype), torch.randn(heads, ROWS)
        keywords, sinks = made(options, heads)
        shared = {name: value for name, value in keywords.items() if name != "max_seqlen"}

        def one_process(*tensors, keywords=shared, starts=starts, longest=longest):
            *tensors, sinks = tensors
            return flash_online.varlen_attention(
                *tensors, starts, starts, longest, longest, sinks=sinks, return_lse=True, deterministic=True, **keywords
            )

        def call(*tensors, keywords=keywords, starts=starts, **how):
            *tensors, sinks = tensors
            return context_parallel_varlen_attention(
                *tensors, starts, sinks=sinks, return_lse=True, deterministic=True, **keywords, **how
            )

        try:
            compare(call, one_process, wholes, weights, (0, 1), (heads, key_heads, key_heads), sinks, ranks)
        except AssertionError as error:
            raise AssertionError(f"{label}: {error}") from error


def check_random(rank, ranks):
    """Combinations that nobody thought of."""
    for seed in range(30):
        draw = random.Random(seed)
        rows = 2 * ranks * draw.choice([1, 2, 5, 11, 23])
        key_heads = draw.choice([1, 2, 3, 4])
        heads, value_heads = key_heads * draw.choice([1, 2, 3]), draw.choice([key_heads, 1])
        width, width_v = draw.choice([(8, 8), (13, 20), (32, 16)])
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
        cuts = sorted(draw.choices(range(rows + 1), k=draw.choice([1, 3, 6])))
        starts = torch.tensor([0, *cuts, draw.choice([rows, cuts[-1]])], dtype=torch.int32)
        options = {"causal": draw.random() < 0.5, "softcap": draw.choice([0.0, 0.0, 6.0])}
        if draw.random() < 0.6:
            options["window"] = draw.choice([None, 0, 3, 17, 50]), draw.choice([None, 0, 2, 19, 70])
        if draw.random() < 0.4:
            options["alibi"] = (heads,)
        if draw.random() < 0.3:
            options["sinks"] = True
        keywords, sinks = made(options, heads)
        keywords |= {"return_lse": True, "deterministic": True}
        torch.manual_seed(seed)
        counts = ((heads, width), (key_heads, width), (value_heads, width_v))
        packed = draw.random() < 0.5
        wholes = [torch.randn((rows, h, w) if packed else (2, h, rows, w)).to(dtype).requires_grad_() for h, w in counts]
        weights = torch.randn_like(wholes[0][..., :1].expand(*wholes[0].shape[:-1], width_v))
        lse_weights = torch.randn((heads, rows) if packed else (2, heads, rows))

        def one_process(*tensors, packed=packed, starts=starts, rows=rows, keywords=keywords):
            *tensors, sinks = tensors
            if packed:
                return flash_online.varlen_attention(*tensors, starts, starts, rows, rows, sinks=sinks, **keywords)
            return flash_online.attention(*tensors, sinks=sinks, **keywords)

        def call(*tensors, packed=packed, starts=starts, keywords=keywords, **how):
            *tensors, sinks = tensors
            if packed:
                return context_parallel_varlen_attention(*tensors, starts, sinks=sinks, **keywords, **how)
            return context_parallel_attention(*tensors, sinks=sinks, **keywords, **how)

        heads_of_all, dims = (heads, key_heads, value_heads), (0, 1) if packed else (2, 2)
        try:
            compare(call, one_process, wholes, (weights, lse_weights), dims, heads_of_all, sinks, ranks)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {rows} rows, {options}: {error}") from error


def small(ranks, *, heads=4, rows=8, dtype=torch.float64, requires_grad=True, batch=1):
    """Query, key and value of a whole sequence, and this rank's rows of them."""
    wholes = [torch.randn(batch, heads, rows * ranks, 6, dtype=dtype, requires_grad=requires_grad) for _ in range(3)]
    return wholes, [t.detach().requires_grad_(requires_grad) for t in shard(wholes, 2)]


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
    with pytest.raises(ValueError, match=r"tensors\[1\]: dimension 0: length 3; accepted in a zigzag layout of . ranks"):
        shard([torch.ones(2 * ranks), torch.ones(3)], 0)
    with pytest.raises(ValueError, match="length: length 7; accepted"):
        positions(7, None, "contiguous")
    with pytest.raises(ValueError, match="layout: got 'zig'"):
        positions(8, None, "zig")
    with pytest.raises(ValueError, match="dims: 2 of them"):
        shard([torch.ones(4)], [0, 0])
    with pytest.raises(IndexError, match=r"dims\[0\]: 1 is out of range"):
        shard([torch.ones(4)], 1)
    with pytest.raises(TypeError, match="tensors: expected a list"):
        shard(torch.ones(4), 0)
    with pytest.raises(ValueError, match=r"tensors\[0\]: 3 rows"):
        unshard([torch.ones(3)], 0)


def check_shapes(rank, ranks):
    """Ranks of tensors, batch dimensions that broadcast, strides, autocast, sequences without rows, all options of a group."""
    n = 4 * ranks
    for shapes in (
        [(n, 5), (n, 5), (n, 3)],
        [(4, n, 5), (2, n, 5), (2, n, 3)],
        [(2, 3, 4, n, 5), (3, 2, n, 5), (1, 1, 4, n, 3)],
        [(1, n, 5), (2, n, 5), (2, n, 5)],  # one query head beside several
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
    with pytest.raises(ValueError, match="group: a DeviceMesh of 2 dimensions"):
        positions(16, mesh)
    with pytest.raises(TypeError, match="group: expected a ProcessGroup"):
        positions(16, "cp")
    if ranks > 2:
        with pytest.raises(ValueError, match="group: this process is not in it"):
            positions(16, pairs[1 - rank // 2])
    # As over NCCL, which takes no CPU tensors: the ranks' calls are compared in a group of their own.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_group, "_takes_cpu_tensors", lambda group: False)
        patch.setattr(_group, "_hosts", {})
        assert _group._cpu_group(_group.group_of(pair)) != pair.group_name
        assert _group._cpu_group(_group.group_of(pair)) == _group._hosts[pair]
        with pytest.raises(ValueError, match="^causal: the ranks differ"):
            context_parallel_attention(part, part, part, group=pair, causal=bool(rank % 2))
    alone = [dist.new_group([r]) for r in range(ranks)][rank]
    for method in METHODS:
        assert torch.equal(context_parallel_attention(whole, whole, whole, group=alone, method=method, causal=True),
                           flash_online.attention(whole, whole, whole, causal=True))  # fmt: skip


def check_derivatives(rank, ranks):
    """gradcheck in float64: a rank's rows are inputs and results of a function of the whole, whose other parts stay."""
    torch.manual_seed(0)
    starts = torch.tensor([0, 3, 3, 2 * ranks], dtype=torch.int32)
    for method in METHODS:
        wholes = [torch.randn(2, 2 * ranks, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

        def dense(*tensors, method=method):
            # Each rank gives its rows of the same whole, and gets those of the result: gradients summed over the ranks.
            q, k, v, sinks = (_Same.apply(tensor) for tensor in tensors)
            results = context_parallel_attention(
                *shard([q, k, v], 1), causal=True, sinks=sinks, softcap=2.0, return_lse=True, method=method
            )
            return tuple(unshard(results, 1))

        def packed(*tensors, method=method):
            q, k, v, sinks = (_Same.apply(tensor) for tensor in tensors)
            q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
            parts = shard([q, k, v], 0, None, "contiguous")
            results = context_parallel_varlen_attention(
                *parts, starts, window=(2, 1), sinks=sinks, return_lse=True, method=method
            )
            return tuple(unshard(results, [0, 1], None, "contiguous"))

        for function in (dense, packed):
            torch.autograd.gradcheck(function, (*wholes, sinks), fast_mode=True)

    # Second derivatives: by Ulysses those of one process, by gathered keys an error that names the other method.
    wholes, local = small(ranks)

    def second(attend, tensors):
        out = attend(*tensors, causal=True)
        grads = torch.autograd.grad(out.pow(3).sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), tensors)

    def ours(*tensors, **options):
        return context_parallel_attention(*tensors, method="ulysses", **options)

    for found, whole in zip(second(ours, local), second(flash_online.attention, wholes), strict=True):
        torch.testing.assert_close(found, shard([whole], 2)[0], rtol=1e-9, atol=1e-9)
    with pytest.raises(NotImplementedError, match="'gathered' has no second derivatives.*'ulysses'"):
        second(lambda *tensors, **options: context_parallel_attention(*tensors, method="gathered", **options), local)


class _Same(torch.autograd.Function):
    """A tensor that all ranks have alike, as a loss that all have alike: the gradient is the mean of what each rank finds."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()


def check_groups_of_heads(rank, ranks):
    """Keys gathered in several groups of heads give the same as in one."""
    from flash_online.distributed import _gathered

    wholes, local = small(ranks, heads=6, dtype=torch.float32, batch=2)
    sinks, alibi = torch.randn(6, requires_grad=True), slopes(2, 6)
    options = {"causal": True, "sinks": sinks, "alibi_slopes": alibi, "method": "gathered", "return_lse": True}
    kept, results = _gathered.GROUP_BYTES, []
    for size in (kept, wholes[0].numel() * 4, 1):
        _gathered.GROUP_BYTES = size
        out = context_parallel_attention(*local, **options)
        results.append([*out, *torch.autograd.grad([out[0].sin().sum(), out[1].sum()], [*local, sinks])])
    _gathered.GROUP_BYTES = kept
    assert _gathered.groups_of(local[1], local[2], ranks) == 1
    for one, two, six in zip(*results, strict=True):
        assert torch.equal(one, two) and torch.equal(one, six)


def check_groups_of_heads_by_ulysses(rank, ranks):
    """A rank's heads exchanged and computed in two groups, also by the kernels of packed sequences, give what one gives: out,
    lse, gradients, second derivatives, and those of some of the tensors alone."""
    from flash_online.distributed import _context_parallel, _ulysses

    for dtype, width, batch in ((torch.float64, 6, 1), (torch.bfloat16, 16, 1), (torch.float32, 16, 2)):
        shapes = [(batch, heads, 8 * ranks, width) for heads in (4 * ranks, 2 * ranks, 2 * ranks)]
        whole = [torch.randn(shape).to(dtype) for shape in shapes]
        options = {"causal": True, "sinks": torch.randn(4 * ranks, requires_grad=True), "alibi_slopes": slopes(4 * ranks)}
        options |= {"softcap": 9.0, "return_lse": True, "deterministic": True}
        for layout in LAYOUTS:
            for frozen in ((), (0,), (1, 2)):
                local = [t.requires_grad_(n not in frozen) for n, t in enumerate(shard(whole, 2, layout=layout))]
                wanted, results = [*(t for t in local if t.requires_grad), options["sinks"]], []
                for rows, claimed in ((_ulysses.GROUPED_ROWS, False), (0, False), (0, batch == 1)):
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(_ulysses, "GROUPED_ROWS", rows)
                        patch.setattr(_context_parallel, "_is_static", lambda query, left, claimed=claimed: claimed)
                        out, lse = context_parallel_attention(*local, method="ulysses", layout=layout, **options)
                        grads = torch.autograd.grad([out.sin().sum(), lse.sum()], wanted, create_graph=dtype is torch.float64)
                        results.append([out, lse, *grads])
                        if dtype is torch.float64:
                            results[-1] += torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), wanted)
                for one, two, claimed in zip(*results, strict=True):
                    assert torch.equal(one, two) and torch.equal(one, claimed), (dtype, layout, frozen)


def check_model(rank, ranks):
    """20 steps of a model of two layers with the losses of one process, also under activation checkpointing."""

    class Layer(torch.nn.Module):
        def __init__(self, method):
            super().__init__()
            self.method = method
            self.qkv, self.out = torch.nn.Linear(32, 32 + 2 * 16), torch.nn.Linear(32, 32)
            self.sinks = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x):
            q, k, v = self.qkv(x).split([32, 16, 16], -1)
            q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
            options = {"causal": True, "window": (40, None), "sinks": self.sinks}
            if self.method == "one process":
                out = flash_online.attention(q, k, v, **options)
            else:
                out = context_parallel_attention(q, k, v, method=self.method, **options)
            return x + self.out(out.transpose(1, 2).flatten(2))

    def losses(method, checkpointed=False):
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Embedding(50, 32), Layer(method), Layer(method), torch.nn.Linear(32, 50)])
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.3), []
        tokens = torch.randint(0, 50, (1, 16 * ranks + 1), generator=torch.Generator().manual_seed(3))
        batch = tokens[:, :-1], tokens[:, 1:]  # labels are shifted before they are cut
        if method != "one process":
            batch = shard(batch, 1)
        for _ in range(20):
            optimizer.zero_grad()
            x = model[0](batch[0])
            for layer in list(model)[1:3]:
                x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            loss = torch.nn.functional.cross_entropy(model[3](x).flatten(0, 1), batch[1].flatten(), reduction="sum")
            loss = loss / (16 * ranks)
            loss.backward()
            total = loss.detach().clone()
            if method != "one process":
                dist.all_reduce(total)
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            found.append(total.item())
        return found

    expected = losses("one process")
    assert expected[-1] < 0.8 * expected[0]
    for method in ("auto", *METHODS):
        assert losses(method) == pytest.approx(expected, abs=2e-5)
    for method in METHODS:
        assert losses(method, checkpointed=True) == losses(method)


def check_compiled(rank, ranks):
    """torch.compile makes one graph of a call and its backward pass, whose results are those without it."""
    from flash_online.distributed import _ulysses

    starts = torch.tensor([0, 5, 8 * ranks], dtype=torch.int32)
    for method in METHODS:

        def dense(q, k, v, method=method):
            return context_parallel_attention(q, k, v, causal=True, window=(9, None), method=method)

        def packed(q, k, v, method=method):
            return context_parallel_varlen_attention(q, k, v, starts, causal=True, method=method)

        for call, shape in ((dense, (1, 4, 8, 8)), (packed, (8, 4, 8))):
            tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
            torch._dynamo.reset()
            _ulysses.GROUPED_ROWS = 0  # two groups of heads
            for one, other in zip(
                *((out, *torch.autograd.grad(out.sum(), tensors)) for out in (
                    call(*tensors), torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors))),
                strict=True,
            ):  # fmt: skip
                assert torch.equal(one, other), method


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
        (f"^query: the ranks differ: .* on rank 0.*on rank {end}; accepted", lambda: attend(part(10 if last else 8))),
        ("^query: the ranks differ", lambda: attend(part(heads=2 if last else 4))),
        ("^query: the ranks differ: .*float32.*float64", lambda: attend(part(dtype=torch.float64 if last else torch.float32))),
        ("^query: the ranks differ: .*requires grad", lambda: attend(part(requires_grad=last))),
        ("^causal: the ranks differ: False on rank 0.*True", lambda: attend(part(), causal=last)),
        ("^method: the ranks differ", lambda: attend(part(), method="gathered" if last else "ulysses")),
        ("^layout: the ranks differ", lambda: attend(part(), layout="contiguous" if last else "zigzag")),
        ("^window: the ranks differ", lambda: attend(part(), window=(rank, 0))),
        ("^sinks: the ranks differ", lambda: attend(part(), sinks=torch.ones(4) if last else None)),
        (
            f"^group: rank {end} refuses its call: InvalidArgument: dropout_p: got 0.1",
            lambda: attend(part(), dropout_p=0.1 * last),
        ),
        (f"^group: rank {end} refuses its call: InvalidArgument: query: 7 rows", lambda: attend(part(7 if last else 8))),
        (f"^group: rank {end} refuses its call: TypeError: query", lambda: attend(None if last else part())),
        ("^function: the ranks differ", lambda: stream(part()[0], [0, 4]) if last else attend(part())),
        ("^cu_seqlens: the ranks differ", lambda: stream(part()[0].mT.contiguous(), [0, 4 + last])),
        ("^dropout_p: got 0.5; accepted", lambda: attend(part(), dropout_p=0.5)),
        ("^query: 7 rows on a rank; accepted in a zigzag", lambda: attend(part(7))),
        ("^key: 4 rows; accepted.*query's 8", lambda: context_parallel_attention(part(), part(4), part(4))),
        ("^method: got 'ring'", lambda: attend(part(), method="ring")),
        ("^layout: got 'striped'", lambda: attend(part(), layout="striped")),
        ("^cu_seqlens: got", lambda: context_parallel_varlen_attention(part()[0], part()[0], part()[0], torch.ones(2))),
        ("^max_seqlen: got -1", lambda: stream(part()[0], [0, 4], max_seqlen=-1)),
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


CHECKS = {name: function for name, function in globals().items() if name.startswith("check_")}


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


if __name__ == "__main__":
    with joined() as (rank, ranks):
        for name in sys.argv[1:]:
            torch.manual_seed(0)
            dead(rank, ranks) if name == "dead" else CHECKS[name](rank, ranks)
            print("ok", name, flush=True)
