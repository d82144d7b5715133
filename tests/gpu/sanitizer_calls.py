"""Small calls that between them run every CUDA kernel family once: what `make sanitize` shows to compute-sanitizer.

`python tests/gpu/sanitizer_calls.py [--family sm80] [--calls PATTERN]` runs those of one family that match the regular
expression, and prints a line before and after each; a result that is not finite is an error. CALLS gives (family, callable)
by name. The family is "any" or that which FLASH_ONLINE_KERNEL has to name; it is read once per process.

Kernels read aligned vectors of 16 bytes of which at least one byte belongs to a tensor. CUDA's allocations are multiples of 256
bytes, so that such a read is never outside; memcheck counts to the byte. The tensors here are therefore multiples of 16 bytes,
though their rows are not.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import re
import sys

import torch

import flash_online


def randn(*shape, dtype=torch.bfloat16, grad=True):
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad)


def with_gradients(function, *inputs, **options):
    """All floating results, and the gradients of those of `inputs` and `options` that require one."""
    given = [t for one in [*inputs, *options.values()] for t in (one if isinstance(one, list) else [one])]
    tensors = [t for t in given if isinstance(t, torch.Tensor)]
    for t in tensors:
        assert t.dim() <= 1 or t.untyped_storage().nbytes() % 16 == 0, t.shape
    results = function(*inputs, **options)
    results = [t for t in (results if isinstance(results, tuple) else (results,)) if t.is_floating_point()]
    losses = [t.float().sum() for t in results if t.requires_grad]
    return [*results, *torch.autograd.grad(losses, [t for t in tensors if t.requires_grad])]


# --- attention -------------------------------------------------------------------------------------------------------------


def attention(heads=(2, 2, 2), lengths=(152, 210), head_dims=(64, 64), dtype=torch.bfloat16, tensors=None, **options):
    """Forward and backward. `tensors` makes options that lie on the device when the call is made."""
    rows = (lengths[0], lengths[1], lengths[1])
    widths = (head_dims[0], head_dims[0], head_dims[1])

    def call():
        inputs = [randn(2, h, n, e, dtype=dtype) for h, n, e in zip(heads, rows, widths, strict=True)]
        made = {name: make() for name, make in (tensors or {}).items()}
        return with_gradients(flash_online.attention, *inputs, **options, **made, return_lse=True)

    return call


@contextlib.contextmanager
def tf32():
    """Torch allows tf32; decorates a call."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def inference():
    with torch.no_grad():
        return [flash_online.attention(*(randn(2, 2, 150, 64) for _ in range(3)), causal=True)]


def packed(lengths, heads=(4, 2, 2), head_dim=64, dtype=torch.bfloat16, spare=0, **options):
    """Sequences of `lengths` keys and as many queries, with `spare` rows after the last."""

    def call():
        starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
        inputs = [randn(sum(lengths) + spare, h, head_dim, dtype=dtype) for h in heads]
        longest = max(lengths)
        return with_gradients(flash_online.varlen_attention, *inputs, starts, starts, longest, longest, **options)

    return call


def float_mask(*shape, dtype=torch.bfloat16, grad=False):
    return lambda: randn(*shape, dtype=dtype, grad=grad)


def bool_mask():
    mask = torch.rand(152, 210, device="cuda") > 0.4
    mask[:, :128] = False  # whole blocks that are passed over
    mask[:, 200] = True
    return mask


def query_spans():
    begin = torch.arange(152, device="cuda", dtype=torch.int32) // 3
    return torch.stack([begin, begin + 90], -1)


def key_spans():
    begin = torch.arange(210, device="cuda", dtype=torch.int32) // 7
    return torch.stack([begin, begin + 70, begin + 100, begin + 130], -1)


def listed(*size):
    """A list of every other block of keys, and a number that is no block's; for each of two heads."""

    def make():
        rows, columns = (-(-n // block) for n, block in zip((152, 210), size, strict=True))
        indices = torch.arange(-1, columns + 2, 2, device="cuda", dtype=torch.int32).expand(2, rows, -1).contiguous()
        return flash_online.BlockList(torch.full((2, rows), indices.shape[-1], device="cuda", dtype=torch.int32), indices, size)

    return make


def chosen_blocks():
    query, key = randn(2, 2, 152, 64, grad=False), randn(2, 2, 210, 64, grad=False)
    scores = flash_online.block_scores(query, key, (64, 64))
    blocks = flash_online.BlockList.topk(scores, 2, causal=True, size=(64, 64))
    return [scores, blocks.indices.float()]


def largest_scores(lengths=(152, 210), heads=(4, 2), head_dim=64, dtype=torch.bfloat16, **options):
    def call():
        query, key = (randn(2, h, n, head_dim, dtype=dtype, grad=False) for h, n in zip(heads, lengths, strict=True))
        return [flash_online.block_scores(query, key, size, reduce="max", **options) for size in ((64, 128), (128, 64))]

    return call


def weight_sums(lengths=(152, 210), heads=(2, 2), head_dim=64, dtype=torch.bfloat16, **options):
    """The sums of weights per key, from the lse of a call with the same options; `last` is no option of attention."""

    def call():
        query, key = (randn(2, h, n, head_dim, dtype=dtype, grad=False) for h, n in zip(heads, lengths, strict=True))
        seen = {name: value for name, value in options.items() if name != "last"}
        lse = flash_online.attention(query, key, key, return_lse=True, **seen)[1]
        return [flash_online.attention_weight_sums(query, key, lse, **options)]

    return call


def float8(lengths=(152, 210), heads=(2, 2), head_dim=64, dtype=torch.bfloat16, tensors=None, **options):
    """`tensors` makes options that lie on the device; e4m3 inputs have a scale of each kind."""

    def call():
        shapes = zip((heads[0], *heads[1:] * 2), (lengths[0], *lengths[1:] * 2), strict=True)
        inputs = [randn(2, h, n, head_dim, grad=False).to(dtype) for h, n in shapes]
        made = {name: make() for name, make in (tensors or {}).items()}
        if dtype == torch.float8_e4m3fn:
            made |= {f"{name}_scale": torch.rand(2, heads[1], device="cuda") for name in ("query", "key", "value")}
        return flash_online.float8_attention(*inputs, **options, **made, return_lse=True)

    return call


FLOAT8 = {
    **{f"head dim {e}": float8(head_dim=e) for e in (64, 96, 128, 192, 256)},
    **{f"e4m3, head dim {e}": float8(head_dim=e, dtype=torch.float8_e4m3fn) for e in (64, 96, 128, 192, 256)},
    "causal": float8(causal=True, heads=(4, 2), lengths=(300, 210), dtype=torch.float16),
    "causal, lower right": float8(causal=True, alignment="lower_right", head_dim=128),
    "window": float8(window=(100, 9), smooth_keys=False, head_dim=128),
    "softcap": float8(softcap=4.0),
    "sinks": float8(tensors={"sinks": lambda: randn(2, dtype=torch.float32, grad=False)}, head_dim=256),
    "spans": float8(tensors={"query_spans": query_spans, "key_spans": key_spans}),
    "e4m3, spans": float8(tensors={"key_spans": key_spans}, head_dim=128, dtype=torch.float8_e4m3fn),
    "few rows": float8(lengths=(5, 7)),
    "long": float8(lengths=(520, 1100), causal=True, alignment="lower_right", heads=(4, 1), head_dim=128),
}

ATTENTION = {
    **{f"maximum logit, head dim {e}": attention(return_max_logit=True, head_dims=(e, e)) for e in (64, 96, 128, 192, 256)},
    "maximum logit, causal": attention(return_max_logit=True, causal=True, heads=(4, 2, 2)),
    "maximum logit, options": attention(return_max_logit=True, softcap=4.0, tensors={"mask": float_mask(152, 210)}),
    "maximum logit, float32": attention(return_max_logit=True, dtype=torch.float32, lengths=(70, 90)),
    "maximum logit, packed": packed((70, 130, 1), return_max_logit=True, causal=True, spare=9),
    **{f"sums of weights, head dim {e}": weight_sums(head_dim=e) for e in (64, 96, 128, 192, 256)},
    "sums of weights, causal": weight_sums(causal=True, heads=(4, 2), lengths=(300, 210)),
    "sums of weights, last": weight_sums(window=(100, 9), alignment="lower_right", last=37),
    "sums of weights, softcap": weight_sums(softcap=4.0, head_dim=36, last=37),
    "sums of weights, float32": weight_sums(dtype=torch.float32, head_dim=36),
    **{f"largest scores, head dim {e}": largest_scores(head_dim=e) for e in (64, 128, 192, 256, 320)},
    "largest scores, causal": largest_scores(causal=True, lengths=(300, 210)),
    "largest scores, general": largest_scores(scale=-0.3, head_dim=36),
    "largest scores, float32": largest_scores(dtype=torch.float32, head_dim=36),
    "spans": attention(tensors={"query_spans": query_spans, "key_spans": key_spans}),
    "spans, float32": attention(tensors={"query_spans": query_spans}, dtype=torch.float32, head_dims=(36, 36)),
    **{f"spans, head dim {e}": attention(tensors={"key_spans": key_spans}, head_dims=(e, e)) for e in (128, 192, 256)},
    **{
        f"blocks of {n}, head dim {e}": attention(tensors={"blocks": listed(n, n)}, head_dims=(e, e))
        for n, e in ((64, 64), (128, 64), (64, 128), (128, 128), (64, 192), (64, 256))
    },
    "blocks and spans": attention(tensors={"blocks": listed(64, 128), "query_spans": query_spans}, causal=True),
    "chosen blocks": chosen_blocks,
    "plain": attention(),
    "causal": attention(causal=True),
    "causal, lower right": attention(causal=True, alignment="lower_right"),
    "window": attention(window=(40, 9)),
    "grouped heads": attention(heads=(4, 2, 2)),
    "key and value heads that differ": attention(heads=(4, 2, 1)),
    "sinks": attention(tensors={"sinks": lambda: randn(2, dtype=torch.float32)}),
    "softcap": attention(softcap=4.0),
    "softcap, head dim 256": attention(softcap=4.0, causal=True, head_dims=(256, 256)),
    "alibi": attention(tensors={"alibi_slopes": lambda: torch.rand(2, 2, device="cuda")}),
    "bool mask": attention(tensors={"mask": bool_mask}),
    "float mask": attention(tensors={"mask": float_mask(152, 210)}),
    "float32 mask": attention(tensors={"mask": float_mask(152, 210, dtype=torch.float32)}),
    "gradient of a shared mask": attention(tensors={"mask": float_mask(1, 2, 150, 208, grad=True)}, lengths=(150, 208)),
    "gradient of a full mask": attention(tensors={"mask": float_mask(2, 2, 152, 210, grad=True)}),
    "gradient of a padding mask": attention(tensors={"mask": float_mask(2, 1, 1, 212, grad=True)}, lengths=(152, 212)),
    "dropout": attention(dropout_p=0.3),
    "deterministic": attention(deterministic=True),
    "one block of keys": attention(lengths=(70, 33)),
    "few rows": attention(lengths=(5, 7), heads=(4, 2, 2)),
    "one query": attention(lengths=(1, 300), heads=(8, 2, 2)),
    "no keys": attention(lengths=(5, 0)),
    "large scores": attention(scale=3e6, lengths=(150, 208)),
    "large scores, head dim 256": attention(scale=3e6, head_dims=(256, 256), lengths=(70, 130), causal=True),
    "large scores, grouped heads": attention(scale=3e6, heads=(4, 2, 1), window=(40, 9), deterministic=True),
    "large scores, float32": attention(scale=3e8, dtype=torch.float32, lengths=(70, 90), dropout_p=0.1),
    "large scores, packed": packed((70, 0, 130, 1), scale=3e6, causal=True, spare=9),
    "large scores, gradient of a mask": attention(
        scale=3e6, tensors={"mask": float_mask(2, 1, 1, 212, grad=True)}, lengths=(152, 212)
    ),
    "inference": inference,
    "float16": attention(dtype=torch.float16),
    "float32": attention(dtype=torch.float32, lengths=(70, 90)),
    "float32, all options": attention(
        dtype=torch.float32, lengths=(70, 90), causal=True, window=(50, 9), softcap=3.0, dropout_p=0.1,
        tensors={"mask": float_mask(70, 90, dtype=torch.float32, grad=True), "sinks": lambda: randn(2, dtype=torch.float32)},
    ),
    "tf32": tf32()(attention(dtype=torch.float32, heads=(4, 2, 2), lengths=(2200, 210), causal=True)),
    "tf32, head dim 100": tf32()(attention(dtype=torch.float32, head_dims=(100, 36), window=(40, 9))),
    "tf32, packed": tf32()(packed((70, 0, 130, 1), dtype=torch.float32, causal=True, spare=9)),
    **{f"head dim {e}": attention(head_dims=(e, e), lengths=(70, 130), causal=True) for e in (40, 96, 128, 160, 192, 256, 512)},
    "head dims 192 and 128": attention(head_dims=(192, 128), lengths=(70, 130)),
    "grouped heads, head dim 192": attention(heads=(4, 2, 2), head_dims=(192, 192), lengths=(70, 130), causal=True),
    **{
        f"deterministic, head dim {e}": attention(head_dims=(e, e), lengths=(70, 130), deterministic=True) for e in (160, 256)
    },
    "two CTAs' parts of dQ": attention(head_dims=(200, 200), lengths=(150, 330)),
    "packed": packed((70, 0, 130, 1)),
    "packed causal": packed((70, 0, 130, 1), causal=True, spare=9),
    "packed short": packed((5, 64, 33, 1), causal=True),
    "packed head dim 128": packed((70, 130), head_dim=128, causal=True),
    **{f"packed head dim {e}": packed((70, 0, 130), head_dim=e) for e in (160, 256)},
    "packed dropout": packed((70, 130), dropout_p=0.3, window=(20, 0)),
    "packed deterministic": packed((70, 130), deterministic=True),
}  # fmt: skip


def cached(lengths=(300, 0, 77), head_dim=64, page=16, dtype=torch.bfloat16, cache_dtype=None, **options):
    """Two new keys per sequence, rotated, are appended to pages, and two queries attend to all of them."""

    def call():
        count, entries = len(lengths), (max(lengths) + 2) // page + 1
        pools = [randn(count * entries, 2, page, head_dim, dtype=dtype, grad=False).to(cache_dtype or dtype) for _ in range(2)]
        table = torch.randperm(count * entries, device="cuda").view(count, entries).to(torch.int32)
        query, key, value = (randn(count, h, 2, head_dim, dtype=dtype, grad=False) for h in (4, 2, 2))
        angles = torch.rand(400, head_dim // 4, device="cuda")
        with torch.no_grad():
            return flash_online.kvcache_attention(
                query, *pools, torch.tensor(lengths, dtype=torch.int32, device="cuda"), key=key, value=value,
                block_table=table, rotary=(angles.cos(), angles.sin()), return_lse=True, **options,
            )  # fmt: skip

    return call


def decode(page, **options):
    """A step of decoding alone, whose lse is not asked for."""

    def call():
        pools = [randn(60, 2, page, 64, grad=False) for _ in range(2)]
        table = torch.randperm(60, device="cuda").view(3, 20).to(torch.int32)
        lengths = torch.tensor((20 * page, 0, page + 1), dtype=torch.int32, device="cuda")
        query = randn(3, 8, 1, 64, grad=False)
        return [flash_online.kvcache_attention(query, *pools, lengths, block_table=table, **options)]

    return call


def dense_keys(batch, heads=(8, 2), keys=1200, head_dim=128, function=None, **options):
    """Few rows over dense keys; without a `function`, attention computes them."""

    def call():
        query = randn(batch, heads[0], 2, head_dim, grad=False)
        key, value = (randn(batch, heads[1], keys, head_dim, grad=False) for _ in range(2))
        made = {name: make() if callable(make) else make for name, make in options.items()}
        return (function or flash_online.attention)(query, key, value, return_lse=True, **made)

    return call


def few_queries(heads=(8, 2), queries=1, head_dim=128, lengths=(700, 0, 33), page=16, cache_dtype=None, starts=None, **options):
    """Queries over pages, dense or packed from `starts` on: the family for steps of decoding takes them where there are at most
    16 rows per key head or pages that Hopper does not take, but for num_splits with packed queries."""

    def call():
        entries = max(lengths) // page + 1
        shape = (len(lengths) * entries, heads[1], page, head_dim)
        pools = [randn(*shape, grad=False).to(cache_dtype or torch.bfloat16) for _ in range(2)]
        table = torch.randperm(shape[0], device="cuda").view(len(lengths), entries).to(torch.int32)
        counts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        made = {name: make() for name, make in options.items() if callable(make)}
        if starts is None:
            query = randn(len(lengths), heads[0], queries, head_dim, grad=False)
        else:
            query = randn(starts[-1] + 3, heads[0], head_dim, grad=False)
            made |= {"cu_seqlens_q": torch.tensor(starts, dtype=torch.int32, device="cuda"), "max_seqlen_q": queries}
        return flash_online.kvcache_attention(query, *pools, counts, block_table=table, return_lse=True, **(options | made))

    return call


def cascade():
    """One group of all queries, groups of two sizes, and each query's own keys; some have none."""
    pools = [randn(60, 2, 16, 64, grad=False) for _ in range(2)]
    pages = torch.randperm(60, device="cuda").to(torch.int32)

    def level(starts, lengths, first):
        entries, numbers = (
            max(lengths) // 16 + 1,
            (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (starts, lengths)),
        )
        rows = pages[first : first + entries * len(lengths)].view(len(lengths), entries)
        return flash_online.CascadeLevel(next(numbers), rows, next(numbers), max(b - a for a, b in itertools.pairwise(starts)))

    levels = [level((0, 9), (300,), 0), level((0, 4, 9), (70, 0), 20), level((0, 1, 3, 5, 9), (0, 40, 2, 17), 30)]
    sinks = torch.rand(8, device="cuda")
    return flash_online.cascade_attention(randn(11, 8, 64, grad=False), *pools, levels, sinks=sinks, return_lse=True)


def latent_keys(heads, **options):
    """A step over keys whose first columns are the values."""

    def call():
        pool = randn(14, 1, 64, 576, grad=False)
        table, lengths = torch.randperm(14, device="cuda").view(2, 7).to(torch.int32), (400, 65)
        query, counts = randn(2, heads, 1, 576, grad=False), torch.tensor(lengths, dtype=torch.int32, device="cuda")
        return flash_online.kvcache_attention(
            query, pool, pool[..., :512], counts, block_table=table, return_lse=True, **options
        )

    return call


def appended_at_slots():
    caches = [randn(5, 2, 16, 64, grad=False) for _ in range(2)]
    slots = torch.tensor([3, -1, 79, 80, 17, 2**40], device="cuda")
    flash_online.cache_append(*(randn(6, 2, 64, grad=False) for _ in range(2)), *caches, slots=slots)
    return caches


CACHED = {
    "pages": cached(),
    "pages of one key": cached(page=1, num_splits=1),
    "pieces": cached(num_splits=3),
    "float8": cached(dtype=torch.float16, cache_dtype=torch.float8_e4m3fn),
    "float32": cached(dtype=torch.float32, window=(100, 0)),
    "latent keys": cached(lengths=(70, 5), head_dim=576),
    "values that are columns of keys": latent_keys(16),
    "values that are columns of keys, 128 rows": latent_keys(128, window=(100, 0)),
    "slots": appended_at_slots,
    "decode": decode(1),
    "decode in pieces": decode(16, num_splits=3, window=(200, 0)),
    "decode, long": few_queries(lengths=(20000,)),
    "decode, 32 rows": few_queries(heads=(16, 1), queries=2, page=3),
    "decode, 72 rows": few_queries(queries=9, heads=(8, 1), head_dim=64, page=3),
    "decode, many sequences": few_queries(lengths=(5, 0, 40) * 25, head_dim=64),
    **{f"decode, head dim {e}": few_queries(head_dim=e) for e in (40, 96, 192, 256)},
    "decode, float8": few_queries(cache_dtype=torch.float8_e4m3fn),
    "decode, float8 with scales": few_queries(
        cache_dtype=torch.float8_e5m2,
        queries=5,
        **{f"{x}_scale": lambda: torch.rand(3, 2, device="cuda") for x in ("key", "value")},
    ),
    "decode, window": few_queries(queries=3, window=(100, 0), leftpad=lambda: torch.tensor((9, 1, 40), device="cuda").int()),
    "decode, all options": few_queries(
        queries=2,
        softcap=3.0,
        alibi_slopes=lambda: torch.rand(8, device="cuda"),
        sinks=lambda: torch.rand(8, device="cuda"),
        num_splits=4,
    ),
    "decode, packed": few_queries(queries=3, starts=(0, 3, 3, 5)),
    "decode, packed, float8": few_queries(heads=(12, 1), queries=3, starts=(0, 1, 3, 6), cache_dtype=torch.float8_e4m3fn),
    "shared": cascade,
    "decode, 64 pieces": few_queries(lengths=(9000, 70), num_splits=64),
    # On 132 SMs: 2, 64, 96, 128 and 256 items of 8 units of one step.
    "dense, one sequence": dense_keys(1, causal=True, window=(1100, 0), alignment="lower_right"),
    "dense, pairs of CTAs": dense_keys(8, heads=(16, 8), causal=True, window=(1100, 0), alignment="lower_right"),
    "dense, shares of the line": dense_keys(12, heads=(16, 8)),
    "dense, whole items by two teams": dense_keys(16, heads=(16, 8), sinks=lambda: torch.rand(16, device="cuda")),
    "dense, whole items": dense_keys(32, heads=(16, 8)),
    "dense, mask": dense_keys(2, mask=lambda: torch.rand(2, 1, 1, 1200, device="cuda") < 0.5),
    "dense, head dim 256": dense_keys(1, keys=4100, head_dim=256),
    "dense, full caches by pairs": dense_keys(
        33, keys=700, function=functools.partial(flash_online.kvcache_attention, cache_seqlens=None)
    ),
    "small tiles in shares": few_queries(heads=(16, 1), queries=3, sinks=lambda: torch.rand(16, device="cuda")),
    "small tiles in shares, packed": few_queries(heads=(12, 1), queries=5, starts=(0, 3, 3, 8), head_dim=64),
    "large tiles in shares": few_queries(queries=33, lengths=(9000, 40, 3000, 0)),
}


def merge(dtype):
    def call():
        outs = [randn(2, 3, 40, 64, dtype=dtype) for _ in range(3)]
        lses = [randn(2, 3, 40, dtype=torch.float32) for _ in range(3)]
        return with_gradients(flash_online.merge_attention, outs, lses)

    return call


# --- rows ------------------------------------------------------------------------------------------------------------------

# Numbers of classes for each kind of row (csrc/cuda/rows/loops): a few lanes, a warp and a CTA that keep a row in registers; a
# row in shared memory, in that of a cluster; one cut up among CTAs. Most are odd, so that rows start unaligned; those of whole
# vectors have kernels of their own.
WIDTHS = {"lanes": 17, "warp": 513, "CTA": 2049, "wide CTA": 4099, "shared": 16390, "cluster": 65537, "split": 1_000_003}
WIDTHS |= {"lane per vector": 16, "lanes, whole": 256, "warp, whole": 1000, "shared, whole": 3000, "cluster, whole": 10_000}
WIDTHS |= {"large cluster": 98_312, "largest cluster": 262_144}


def strided(classes):
    return randn(3, 2 * classes, dtype=torch.float32, grad=False)[:, ::2].requires_grad_()


def columns(classes):
    return randn(2, classes, 33, dtype=torch.float32)


INPUTS = {
    **{kind: lambda n=n: randn(4, n, dtype=torch.float32) for kind, n in WIDTHS.items()},
    "16 bits": lambda: randn(3, 1000),
    "16 bits, lane per row": lambda: randn(72, 8),
    "16 bits, lanes": lambda: randn(72, 64),
    "16 bits, CTA": lambda: randn(4, 2048),
    "16 bits, words": lambda: randn(72, 100),
    "16 bits, odd words": lambda: randn(64, 77),
    "16 bits, cluster of odd words": lambda: randn(8, 50_257),
    "lane per row": lambda: columns(40),
    "strided": lambda: strided(100),
    "long strided": lambda: strided(2000),
}


def row_calls():
    for kind, make in INPUTS.items():

        def targets(x):
            return torch.randint(0, x.shape[1], x.shape[:1] + x.shape[2:], device="cuda")

        def loss(make=make, targets=targets, soft=False, **options):
            x = make()
            target = torch.rand(x.shape, device="cuda").to(x.dtype).requires_grad_() if soft else targets(x)
            return with_gradients(flash_online.cross_entropy, x, target, **options)

        for name in ("softmax", "log_softmax", "logsumexp"):
            yield f"{name}, {kind}", lambda name=name, make=make: with_gradients(getattr(flash_online, name), make(), 1)
        for k in (5, 40):
            yield (
                f"top {k}, {kind}",
                lambda k=k, make=make: with_gradients(flash_online.topk_softmax, x := make(), min(k, x.shape[1]), 1),
            )
        yield f"cross_entropy, {kind}", lambda loss=loss: loss(reduction="none", return_lse=True, return_entropy=True)
        yield f"cross_entropy, reduced, {kind}", lambda loss=loss: loss(label_smoothing=0.1)
        yield f"cross_entropy, probabilities, {kind}", lambda loss=loss: loss(soft=True)
        yield f"cross_entropy, probabilities, entropy, {kind}", lambda loss=loss: loss(soft=True, return_entropy=True)


def linear_cross_entropy(dtype, reduction, **options):
    def call():
        target = torch.arange(200, device="cuda") % 1003
        return with_gradients(flash_online.linear_cross_entropy, randn(200, 64, dtype=dtype), randn(1003, 64, dtype=dtype),
                              target, reduction=reduction, **options)  # fmt: skip

    return call


CALLS = {
    **{f"attention, {name}": ("any", call) for name, call in ATTENTION.items()},
    **{f"sm80 attention, {name}": ("sm80", call) for name, call in ATTENTION.items()},
    **{f"float8, {name}": ("any", call) for name, call in FLOAT8.items()},
    **{f"cached keys, {name}": ("any", call) for name, call in CACHED.items()},
    "merge_attention": ("any", merge(torch.bfloat16)),
    "merge_attention, float32": ("any", merge(torch.float32)),
    **{name: ("any", call) for name, call in row_calls()},
    "linear_cross_entropy": ("any", linear_cross_entropy(torch.bfloat16, "mean")),
    "linear_cross_entropy, float32": ("any", linear_cross_entropy(torch.float32, "mean")),
    "linear_cross_entropy, no reduction": ("any", linear_cross_entropy(torch.bfloat16, "none")),
    "linear_cross_entropy, softcap": ("any", linear_cross_entropy(torch.bfloat16, "mean", softcap=5.0, scale=0.5)),
    "linear_cross_entropy, entropy": (
        "any",
        linear_cross_entropy(torch.bfloat16, "mean", return_entropy=True, top_log_probs=5),
    ),
    "dropout mask": (
        "any",
        lambda: [
            torch.ops.flash_online.attention_dropout_mask(torch.tensor([3, 4], device="cuda"), 0, 2, 2, 0, 40, 70, 0.5).float()
        ],
    ),
}


def chosen(pattern: str) -> list[str]:
    """Names of the calls that the regular expression finds something in, in the order of the table."""
    return [name for name in CALLS if re.search(pattern, name)]


def run(name: str) -> bool:
    """Makes the call, waits for it and says whether all of its results are finite; lse is -inf where no key is seen."""
    torch.manual_seed(0)
    results = CALLS[name][1]()
    torch.cuda.synchronize()
    assert results, name
    return not any(t.isnan().any() or t.isposinf().any() for t in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", default="", metavar="PATTERN")
    parser.add_argument("--family", default="any", choices=("any", "sm80"))
    options = parser.parse_args()
    if options.family != "any":
        os.environ["FLASH_ONLINE_KERNEL"] = options.family  # before the first call, which reads it
    wrong = 0
    with flash_online.strict():
        for name in chosen(options.calls):
            if CALLS[name][0] != options.family:
                continue
            print(f"call: {name}", flush=True)
            finite = run(name)
            print(f"done: {name}" if finite else f"not finite: {name}", flush=True)
            wrong += not finite
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
