"""These checks ask whether attention over several ranks gives what one process gives, under every option: dense and packed
cases, and random combinations."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

import flash_online
from flash_online.distributed import context_parallel_attention, context_parallel_varlen_attention, shard, unshard
from flash_online.testing import assert_close_to_float64

METHODS = ("ulysses", "gathered")
LAYOUTS = ("zigzag", "contiguous")
ROWS = 296  # of a sequence: chunks of 37 rows on four ranks, whose ends are no tile's


def slopes(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(7)) * 0.5


def small(ranks, *, heads=4, rows=8, dtype=torch.float64, requires_grad=True, batch=1):
    """Query, key and value of a whole sequence, and this rank's rows of them."""
    wholes = [torch.randn(batch, heads, rows * ranks, 6, dtype=dtype, requires_grad=requires_grad) for _ in range(3)]
    return wholes, [t.detach().requires_grad_(requires_grad) for t in shard(wholes, 2)]


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
    ("spans of queries", (4, 2, 2), (16, 16), torch.float32, {"spans": {"query_spans": (1, 1, 2)}}),
    ("spans of keys per head", (4, 4, 4), (32, 32), torch.bfloat16, {"spans": {"key_spans": (2, 4, 4)}}),
    ("spans of both, windows", (6, 3, 3), (16, 16), torch.float32,
     {"spans": {"query_spans": (6, 4), "key_spans": (2, 1, 2)}, "window": (200, 30)}),
    ("spans of both, all options", (8, 2, 2), (16, 16), torch.bfloat16,
     {"spans": {"query_spans": (1, 8, 2), "key_spans": (2,)}, "causal": True, "sinks": True, "softcap": 4.0, "alibi": (8,)}),
    ("spans, ALiBi, a window to the right", (4, 4, 4), (16, 16), torch.float32,
     {"spans": {"query_spans": (2,), "key_spans": (4,)}, "alibi": (4,), "window": (40, 11)}),
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
    ("spans of queries", "cut anywhere", (4, 2), torch.float32, {"spans": {"query_spans": (4,)}}),
    ("spans of keys", "empty ones", (4, 2), torch.float32, {"spans": {"key_spans": (1, 2)}, "causal": True}),
    ("spans of both per head", "padding", (4, 4), torch.bfloat16,
     {"spans": {"query_spans": (4, 2), "key_spans": (4, 4)}, "window": (60, 20)}),
    ("spans, ALiBi", "cut anywhere", (6, 3), torch.float32,
     {"spans": {"query_spans": (6, 2), "key_spans": (2,)}, "alibi": (6,), "window": (90, 40), "sinks": True}),
]  # fmt: skip


def made(options, heads, rows=ROWS):
    """The keywords of a call, and its sinks."""
    keywords = {name: value for name, value in options.items() if name not in ("sinks", "alibi", "spans")}
    g = torch.Generator().manual_seed(8)
    for name, (*leading, bounds) in options.get("spans", {}).items():  # some bounds are out of range, and some extreme
        made = torch.randint(-9, rows + 9, (*leading, rows, bounds), generator=g, dtype=torch.int32)
        made = made.sort(-1).values
        made[..., ::17, 0], made[..., ::23, -1] = -(2**31), 2**31 - 1
        keywords[name] = made
    if "alibi" in options:
        keywords["alibi_slopes"] = slopes(*options["alibi"])
    return keywords, torch.linspace(-1, 2, heads).requires_grad_() if "sinks" in options else None


def gradients(results, tensors, sinks, weights):
    """Those of query, key and value, and of sinks if there are any."""
    wanted = [*tensors, *([] if sinks is None else [sinks])]
    return torch.autograd.grad(results, wanted, [w.to(r.dtype) for w, r in zip(weights, results, strict=True)])


def compare(call, one_process, wholes, weights, dims, heads, sinks, ranks, methods=METHODS):
    """A call on the rows of every rank, by each method and layout, against one process: out and lse bit for bit, and gradients
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
    """Random combinations of options."""
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
        if draw.random() < 0.4:
            given = {"query_spans": draw.choice([(), (1,), (heads,)]), "key_spans": draw.choice([(), (1,), (heads,)])}
            names = draw.choice([["query_spans"], ["key_spans"], list(given)])
            options["spans"] = {name: (*given[name], draw.choice([2, 4])) for name in names}
        keywords, sinks = made(options, heads, rows)
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
