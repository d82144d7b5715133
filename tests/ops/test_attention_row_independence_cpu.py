"""Row independence on the CPU: out and lse of a query are bit-equal whatever is computed with it.

They depend on the query's own row, on the keys and values that it sees, and on the options: not on the other queries of the
call, on the batch, on other heads, on strides or on threads. The gradients of a head do not depend on other heads or sequences.
Each test compares bits, for every instruction set that this processor has.
"""

from __future__ import annotations

import pytest
import torch
from instruction_sets import run_tests, skip_unless_lesser

import flash_online
from flash_online.testing import lay_out

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (70, 3)},
    "causal window": {"causal": True, "window": (40, None)},
    "softcap": {"causal": True, "softcap": 3.0},
    "alibi": {"alibi": True},
    "causal alibi": {"causal": True, "alibi": True},
    "sinks": {"causal": True, "sinks": True},
    "negative scale": {"causal": True, "scale": -0.7},
    "scale 0": {"causal": True, "scale": 0.0},
    "large scores": {"causal": True, "scale": 6.0},
    "bool mask": {"mask": "bool"},
    "float mask": {"mask": "float"},
}
HEAD_DIMS = [(64, 64), (33, 5)]
HEADS = (4, 2)  # of query; of key and value


def inputs(dtype, queries, keys, head_dims=(64, 64), batch=1, heads=HEADS):
    shapes = [
        (batch, h, n, e)
        for h, n, e in zip((heads[0], *heads[1:] * 2), (queries, keys, keys), (*head_dims[:1] * 2, head_dims[1]), strict=True)
    ]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def tensors_of(options, dtype, queries, keys, heads=HEADS[0]):
    """The options, with tensors made for those that name one: the masks have a row for each query of each head."""
    options = dict(options)
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.rand(heads, dtype=accumulator) * 0.3
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(heads, dtype=accumulator)
    if "mask" in options:
        seen = torch.rand(heads, queries, keys) > 0.4
        options["mask"] = (
            seen if options["mask"] == "bool" else torch.randn(heads, queries, keys).to(dtype).masked_fill(~seen, -torch.inf)
        )
    return options


def run(q, k, v, **options):
    return flash_online.attention(q, k, v, return_lse=True, **options)


def assert_equal(found, expected, what):
    for name, a, b in zip(("out", "lse"), found, expected, strict=True):
        assert torch.equal(a, b), f"{what}: {name} differs by {(a.double() - b.double()).abs().nan_to_num().max().item():.3g}"


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_a_query_alone_has_the_bits_it_has_among_others(dtype, name, head_dims):
    """Rows [first, last) alone, with the keys up to the last one that they see where the visibility is lower-right causal."""
    queries = keys = 150
    q, k, v = inputs(dtype, queries, keys, head_dims)
    options = tensors_of(OPTIONS[name], dtype, queries, keys)
    whole = run(q, k, v, alignment="lower_right", **options)
    cut_keys = "mask" not in options and (options.get("causal") or "window" in options)
    for first, last in [(0, 1), (31, 32), (64, 65), (149, 150), (5, 70), (63, 129), (100, 150), (0, 97)]:
        part = dict(options)
        if "mask" in part:
            part["mask"] = part["mask"][:, first:last]
            found = run(q[:, :, first:last], k, v, **part)
        elif cut_keys and options.get("causal"):
            found = run(q[:, :, first:last], k[:, :, :last], v[:, :, :last], alignment="lower_right", **part)
        elif last == queries or not (cut_keys or "alibi_slopes" in options):
            found = run(q[:, :, first:last], k, v, alignment="lower_right", **part)
        else:
            continue  # such a cut has no alignment that gives its queries their positions
        assert_equal(found, [t[:, :, first:last] for t in whole], f"queries {first} to {last}")


@pytest.mark.parametrize("name", ["plain", "causal", "alibi", "window"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_first_queries_alone_upper_left(dtype, name):
    q, k, v = inputs(dtype, 150, 170)
    options = tensors_of(OPTIONS[name], dtype, 150, 170)
    whole = run(q, k, v, **options)
    for last in (1, 15, 64, 65, 100):
        assert_equal(run(q[:, :, :last], k, v, **options), [t[:, :, :last] for t in whole], f"queries up to {last}")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_keys_that_a_query_does_not_see_do_not_matter(dtype):
    """Also if their scores are so large that they would be computed in double."""
    q, k, v = inputs(dtype, 100, 100)
    whole = run(q, k, v, causal=True)
    k[:, :, 70:] *= 100
    assert_equal([t[:, :, :70] for t in run(q, k, v, causal=True)], [t[:, :, :70] for t in whole], "queries before large keys")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_batch_heads_strides_threads_and_packing(dtype, name):
    q, k, v = inputs(dtype, 97, 130, batch=3)
    options = tensors_of(OPTIONS[name], dtype, 97, 130)
    whole = run(q, k, v, **options)
    assert_equal(run(q[1:2], k[1:2], v[1:2], **options), [t[1:2] for t in whole], "a batch alone")
    two = {n: t[:2] if isinstance(t, torch.Tensor) else t for n, t in options.items()}
    assert_equal(run(q[:, :2], k[:, :1], v[:, :1], **two), [t[:, :2] for t in whole], "two heads of four")
    for layout in ("transposed", "strided", "columns", "unaligned"):
        assert_equal(run(*(lay_out(t, layout) for t in (q, k, v)), **options), whole, layout)
    torch.set_num_threads(2)
    assert_equal(run(q, k, v, **options), whole, "two threads")
    if "mask" in options:
        return
    packed = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    starts = [torch.arange(4, dtype=torch.int32) * n for n in (97, 130)]
    out, lse = flash_online.varlen_attention(*packed, *starts, 97, 130, alignment="upper_left", return_lse=True, **options)
    unpacked = out.unflatten(0, (3, 97)).transpose(1, 2), lse.unflatten(1, (3, 97)).transpose(0, 1)
    assert_equal(unpacked, whole, "packed")


@pytest.mark.parametrize("lengths", [(70, 40), (100, 250), (80, 700)], ids=str)
@pytest.mark.parametrize("name", ["plain", "causal", "alibi", "softcap"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_gradients_of_a_head_do_not_depend_on_other_heads_or_sequences(dtype, name, lengths):
    q, k, v = inputs(dtype, *lengths, batch=2, heads=(8, 4))
    options = tensors_of(OPTIONS[name], dtype, *lengths, heads=8)
    grad_out = torch.randn(2, 8, lengths[0], 64).to(dtype)

    def gradients(q, k, v, grad_out, options):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(flash_online.attention(*leaves, **options), leaves, grad_out)

    whole = gradients(q, k, v, grad_out, options)
    few = {n: t[:2] if isinstance(t, torch.Tensor) else t for n, t in options.items()}
    alone = gradients(q[:1, :2], k[:1, :1], v[:1, :1], grad_out[:1, :2], few)
    for which, a, b in zip("qkv", alone, whole, strict=True):
        b = b[:1, : a.shape[1]]
        assert torch.equal(a, b), f"gradient of {which} differs by {(a.double() - b.double()).abs().max().item():.3g}"


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512"])
def test_lesser_instruction_sets(instruction_set):
    skip_unless_lesser(instruction_set)
    run_tests(instruction_set, "-x", __file__)
