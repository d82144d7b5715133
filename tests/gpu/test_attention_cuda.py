"""attention, varlen_attention and scaled_dot_product_attention on CUDA: the CPU suite's cases, and what is CUDA's own.

FLASH_ONLINE_KERNEL=sm80 in the environment runs all of it on the general kernels, as on a GPU that no other is for.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import threading

import oracle
import pytest
import test_attention
import test_varlen
import torch
from oracle import Attention, Packed
from test_cuda import missing
from test_fuzz import attention as draw_attention
from test_fuzz import packed as draw_packed

import flash_online
import flash_online.functional as F
from flash_online.testing import assert_close_to_float64

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

# Collected here again, with this module's fixtures.
for name in (
    "options",
    "block_edges",
    "several_spans_of_keys",
    "windows_across_blocks",
    "widths",
    "heads_and_batches",
    "layouts",
):
    globals()[f"test_{name}"] = getattr(test_attention, f"test_{name}")
for name in (
    "mask_shapes",
    "float32_mask_beside_16_bit_query",
    "subsets_of_gradients",
    "empty_lengths",
    "other_empty_dimensions",
):
    globals()[f"test_{name}"] = getattr(test_attention, f"test_{name}")
for name in ("options", "lengths", "options_in_pairs", "widths", "heads", "layouts", "subsets_of_gradients"):
    globals()[f"test_packed_{name}"] = getattr(test_varlen, f"test_{name}")

INF = math.inf
DTYPES_16_BIT = [torch.float16, torch.bfloat16]
DTYPES = [*DTYPES_16_BIT, torch.float32]
COUNT, SEED = int(os.environ.get("FLASH_ONLINE_FUZZ", "300")), int(os.environ.get("FLASH_ONLINE_FUZZ_SEED", "0"))


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch):
    """Problems run on CUDA, by our kernels alone."""
    monkeypatch.setattr(oracle, "DEVICE", "cuda")
    with flash_online.strict():
        yield


def gpu(*shape, dtype=torch.bfloat16, scale=1.0, grad=False):
    return (torch.randn(shape, device="cuda") * scale).to(dtype).requires_grad_(grad)


def gradients(function, *inputs, **options):
    out = function(*inputs, **options)
    return out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))


# Whole tiles of every size, for the kernels that want aligned rows of many; ragged ends, and more than one tile of each.
@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 96, 128, 160, 192, 256, 264, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "alignment": "lower_right"}, {"window": (100, 20)}])
def test_head_dims(head_dim, dtype, options):
    for lengths in [(256, 256), (200, 333), (333, 130)]:
        Attention(
            dtype=dtype, batch=(2,), heads=(2, 1, 1), lengths=lengths, head_dims=(head_dim, head_dim), options=options
        ).check()


@pytest.mark.parametrize("head_dims", [(192, 128), (64, 256), (256, 64), (40, 72), (512, 264), (72, 400)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES_16_BIT, ids=str)
def test_wide_and_narrow_values(head_dims, dtype):
    Attention(dtype=dtype, heads=(4, 2, 2), lengths=(300, 270), head_dims=head_dims, options={"causal": True}).check()


# Options by pairs, on lengths of several tiles.
PAIRS = {
    "mask": {"mask": "bool"},
    "float mask": {"mask": "float"},
    "-inf mask": {"mask": "-inf", "mask_shape": (0, 0, 1, 1)},
    "padding": {"mask": "bool", "mask_shape": (1, 0, 0, 1)},
    "softcap": {"options": {"softcap": 4.0}},
    "alibi": {"alibi": 2},
    "sinks": {"sinks": True},
    "dropout": {"options": {"dropout_p": 0.3}},
    "causal": {"options": {"causal": True}},
    "window": {"options": {"window": (70, 40), "alignment": "lower_right"}},
    "groups": {"heads": (4, 2, 1)},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pair", [(a, b) for i, a in enumerate(PAIRS) for b in list(PAIRS)[i + 1 :]], ids="-".join)
def test_options_in_pairs(pair, dtype):
    first, second = (PAIRS[name] for name in pair)
    options = first.get("options", {}) | second.get("options", {})
    made = {"lengths": (150, 210), "head_dims": (64, 64)} | first | second | {"options": options}
    if "mask" in first and "mask" in second:
        pytest.skip("a call has one mask")
    Attention(dtype=dtype, **made).check()


LARGE_MASKS = {
    "alone": {},
    "-inf": {"mask": "-inf"},
    "unaligned": {"layouts": ("contiguous",) * 3 + ("unaligned",), "lengths": (600, 611)},
    "softcap": {"options": {"softcap": 4.0}},
    "alibi": {"alibi": 2},
    "dropout": {"options": {"dropout_p": 0.3}},
    "causal": {"options": {"causal": True}},
    "window": {"options": {"window": (70, 40), "alignment": "lower_right"}},
    "groups": {"heads": (8, 4, 1)},
    "narrow": {"head_dims": (40, 24)},
    "wide": {"head_dims": (128, 96)},
}


@pytest.mark.parametrize("made", LARGE_MASKS.values(), ids=LARGE_MASKS)
@pytest.mark.parametrize("mask_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_large_masks(made, mask_dtype):
    """The batch shares the masks of 8 heads. They have more tiles than a GPU has SMs, which a separate kernel runs."""
    made = {"mask": "float", "heads": (8, 2, 2), "lengths": (520, 616), "head_dims": (64, 64)} | made
    Attention(dtype=torch.bfloat16, batch=(3,), mask_shape=(0, 1, 1, 1), mask_dtype=mask_dtype, **made).check()


SPARSE_MASKS = {
    "alone": {},
    "of heads": {"mask_shape": (1, 1, 1, 1)},
    "ragged": {"lengths": (333, 715)},
    "few seen": {"lengths": (130, 1100), "mask_shape": (0, 1, 1, 1)},
    "values": {"mask": "bool"},
    "padding": {"mask": "bool", "mask_shape": (1, 0, 0, 1)},
    "16 bits": {"mask": "float"},
    "alibi": {"alibi": 2},
    "dropout": {"options": {"dropout_p": 0.3}},
    "causal": {"options": {"causal": True}},
    "groups": {"heads": (4, 2, 1)},
    "large": {"size": 4.0},
}


@pytest.mark.parametrize("made", SPARSE_MASKS.values(), ids=SPARSE_MASKS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES_16_BIT, ids=str)
def test_masks_of_blocks(dtype, head_dim, made):
    """Masks of whole 64 x 64 blocks, where a block of queries often sees only one half of a tile of keys, and all options that
    run on tiles of that size."""
    made = {"mask": "blocks", "mask_shape": (0, 0, 1, 1), "lengths": (576, 640), "head_dims": (head_dim, head_dim)} | made
    Attention(dtype=dtype, **made).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences_of_many_lengths(dtype):
    lengths = tuple((random.Random(n).choice([0, 1, 63, 64, 65, 128, 200, 513]),) * 2 for n in range(40))
    Packed(dtype=dtype, heads=(4, 2, 2), lengths=lengths, head_dims=(64, 64), options={"causal": True}).check()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences_of_unlike_lengths(head_dim):
    """Who has time takes the next tile; the last one of the longest sequence has rows for few of its threads."""
    lengths = tuple((n, n) for n in (3000, 1, 700, 64, 2000, 129))
    Packed(
        heads=(4, 2, 2), dtype=torch.bfloat16, lengths=lengths, head_dims=(head_dim, head_dim), options={"causal": True}
    ).check()


@pytest.mark.parametrize("longest", [64, 700])
def test_more_packed_sequences_than_are_ordered_together(longest):
    choose = random.Random(longest)
    lengths = tuple((choose.choice([0, 1, 33, 64, longest]), choose.choice([0, 1, 65, longest])) for _ in range(300))
    Packed(heads=(2, 1, 1), dtype=torch.float16, lengths=lengths, head_dims=(64, 64), options={"causal": True}).check()


# One block of keys: its backward kernel takes one head's block of queries, or one after another of several heads and blocks.
@pytest.mark.parametrize("dtype", DTYPES_16_BIT, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 1)], ids=str)
@pytest.mark.parametrize("longest", [64, 128])
def test_packed_sequences_of_one_block_of_keys(dtype, head_dim, heads, longest):
    choose = random.Random(head_dim)
    lengths = tuple((choose.choice([0, 1, 33, 64, longest]), choose.choice([0, 1, 5, 63, 64])) for _ in range(30))
    for options in ({"causal": True}, {"window": (9, 3)}):
        Packed(dtype=dtype, heads=heads, lengths=lengths, head_dims=(head_dim, head_dim), options=options).check()


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1), (63, 64), (64, 7), (128, 64)], ids=str)
def test_gradients_of_one_block_of_keys_repeat(lengths, options):
    """In both modes, since no kernel adds to sums in global memory."""
    queries, keys = lengths
    query, key, value = gpu(3, 4, queries, 64, grad=True), gpu(3, 2, keys, 64, grad=True), gpu(3, 2, keys, 64, grad=True)
    first, second = (gradients(flash_online.attention, query, key, value, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_packed_results_repeat(head_dim):
    """Short tiles follow each other closely: what is loaded for the next must not reach the one before."""
    choose = random.Random(head_dim)
    lengths = [choose.choice([0, 1, 5, 63, 64, 65, 128, 200, 513]) for _ in range(60)]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    query, key, value = (gpu(sum(lengths), heads, head_dim) for heads in (4, 2, 2))

    def call():
        return flash_online.varlen_attention(query, key, value, starts, starts, 513, 513, causal=True, return_lse=True)

    expected = call()
    for _ in range(100):
        assert all(torch.equal(got, first) for got, first in zip(call(), expected, strict=True))


def test_packed_lengths_are_not_read_by_the_host():
    """The host must read no lengths in a CUDA graph: one graph serves sequences of other lengths too."""
    query, key, value = (gpu(300, 2, 64) for _ in range(3))
    starts = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")

    def call(starts):
        return flash_online.varlen_attention(query, key, value, starts, starts, 300, 300, causal=True)

    call(starts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(starts)
    for ends in ([0, 100, 300], [0, 7, 299], [0, 0, 64]):
        starts.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, call(torch.tensor(ends, dtype=torch.int32, device="cuda")))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.2}], ids=str)
def test_cuda_graph_of_forward_and_backward(options):
    inputs = [gpu(2, 2, 200, 64, grad=True) for _ in range(3)]
    grad = gpu(2, 2, 200, 64)

    def step():
        out = flash_online.attention(*inputs, deterministic=True, **options)
        return out, *torch.autograd.grad(out, inputs, grad)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    if "dropout_p" not in options:
        for mine, theirs in zip(captured, step(), strict=True):
            assert torch.equal(mine, theirs)
    assert all(t.isfinite().all() for t in captured)


def test_the_first_cuda_call_of_a_thread():
    """Memory comes from torch's cache, so that the kernel's launch is the first CUDA call of that thread, and of autograd's."""
    query, key, value = (gpu(2, 4, 64, 64, grad=True) for _ in range(3))
    expected = flash_online.attention(query, key, value).detach()
    outs = []
    thread = threading.Thread(target=lambda: outs.append(flash_online.attention(query, key, value)))
    thread.start()
    thread.join()
    assert torch.equal(outs[0], expected)
    outs[0].sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))


def test_side_stream_and_its_order():
    """Work goes to the current stream: after the work that is queued there, and without waiting for other streams."""
    query = torch.zeros(1, 8, 2048, 64, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        query.fill_(1)
        out = flash_online.attention(query, query, query)
    side.synchronize()
    assert (out == 1).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": True}, {"dropout_p": 0.1}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_runs_agree(head_dim, options):
    inputs = [gpu(2, 4, 1000, head_dim, grad=True) for _ in range(3)]
    options = dict(options)
    if "mask" in options:
        options["mask"] = gpu(1, 4, 1000, 1000)

    def run():
        torch.manual_seed(1)
        return gradients(flash_online.attention, *inputs, deterministic=True, **options)

    first = run()
    for _ in range(3):
        for a, b in zip(first, run(), strict=True):
            assert torch.equal(a, b)


# More blocks of keys than a GPU has SMs: in the backward pass one CTA takes several. The queries make one block, two, three (an
# odd number), or do not see the last keys.
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 9)}], ids=str)
@pytest.mark.parametrize("lengths", [(40, 385), (128, 130), (333, 300)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_blocks_of_keys(head_dim, lengths, options):
    made = {"dtype": torch.bfloat16, "batch": (3,), "heads": (24, 24, 24), "head_dims": (head_dim, head_dim)}
    Attention(lengths=lengths, options=options, **made).check()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_packed_blocks_of_keys(head_dim):
    choose = random.Random(head_dim)
    lengths = tuple((choose.choice([0, 1, 64, 130, 300]), choose.choice([0, 1, 65, 129, 400])) for _ in range(30))
    made = {"dtype": torch.float16, "heads": (8, 4, 4), "head_dims": (head_dim, head_dim)}
    Packed(lengths=lengths, options={"causal": True}, **made).check()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 9)}], ids=str)
@pytest.mark.parametrize("lengths", [(40, 385), (333, 300)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_blocks_of_keys_in_turn(head_dim, lengths, options):
    queries, keys = lengths
    inputs = [gpu(5, heads, rows, head_dim, grad=True) for heads, rows in ((48, queries), (24, keys), (24, keys))]
    first, second = (gradients(flash_online.attention, *inputs, deterministic=True, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # Floats in another order, rounded once.
    torch.testing.assert_close(first, gradients(flash_online.attention, *inputs, **options), rtol=2**-7, atol=1e-4)


def test_forward_and_key_gradients_repeat_anyway():
    inputs = [gpu(2, 4, 1000, 64, grad=True) for _ in range(3)]
    first, second = (gradients(flash_online.attention, *inputs) for _ in range(2))
    for at in (0, 2, 3):
        assert torch.equal(first[at], second[at])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(dtype):
    query, key, value = (gpu(5, 3, 200, 64, dtype=dtype) for _ in range(3))
    whole = flash_online.attention(query, key, value, causal=True)
    for b in range(5):
        alone = flash_online.attention(query[b : b + 1], key[b : b + 1], value[b : b + 1], causal=True)
        assert torch.equal(whole[b : b + 1], alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_drops_what_the_cpu_drops(dtype):
    rng = torch.tensor([5, 7])
    masks = [torch.ops.flash_online.attention_dropout_mask(rng.to(d), 1, 2, 3, 4, 70, 131, 0.3).cpu() for d in ("cpu", "cuda")]
    assert torch.equal(*masks)


def test_more_than_65535_heads_and_batches():
    query = gpu(70000, 1, 1, 8)
    out = flash_online.attention(query, query, query)
    assert torch.equal(out, query)
    query = gpu(1, 70000, 1, 8)
    assert torch.equal(flash_online.attention(query, query, query), query)


@pytest.mark.skipif(missing() is None and torch.cuda.get_device_properties(0).total_memory < 60 << 30, reason="needs 60 GiB")
def test_more_than_2_to_the_31_elements():
    query = torch.zeros(1, 2, 2**24 + 100, 128, device="cuda", dtype=torch.bfloat16)  # 2^32 elements
    key = gpu(1, 2, 64, 128)
    query[:, :, -3:] = gpu(1, 2, 3, 128)
    out = flash_online.attention(query, key, key)
    expected = flash_online.attention(query[:, :, -3:].clone(), key, key)
    assert torch.equal(out[:, :, -3:], expected)
    del out
    many = query.view(1, 2, -1, 128)
    out = flash_online.attention(query[:, :, -200:], many[:, :, : 2**24], many[:, :, : 2**24])
    assert (out[:, :, :197] == 0).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1000, 0)}], ids=str)
def test_a_sequence_over_64k(options):
    length = 70000
    query, key, value = (gpu(1, 1, length, 64) for _ in range(3))
    out = flash_online.attention(query, key, value, **options)
    rows = torch.tensor([0, 1, 127, 128, 40000, 65535, 65536, 65537, length - 1], device="cuda")
    scores = query[0, 0, rows].double() @ key[0, 0].double().T / 8
    p, j = rows[:, None], torch.arange(length, device="cuda")
    if "window" in options:
        scores = scores.masked_fill((j > p) | (j < p - 1000), -INF)
    if "causal" in options:
        scores = scores.masked_fill(j > p, -INF)
    truth = torch.softmax(scores, -1) @ value[0, 0].double()
    assert_close_to_float64(out[0, 0, rows], truth.to(out.dtype), truth)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("lengths", [(1, 300), (5, 300), (33, 65)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_queries_of_many_heads(dtype, lengths, layout):
    """Query heads that share a key head may share a tile if all of their rows see equal keys: causal rows of one query do, and
    other causal rows do not."""
    for options in ({}, {"causal": True, "alignment": "lower_right"}, {"softcap": 20.0}, {"window": (50, 300)}):
        Attention(
            dtype=dtype,
            heads=(12, 2, 2),
            lengths=lengths,
            head_dims=(64, 64),
            layouts=(layout, "contiguous", "contiguous", "contiguous"),
            options=options,
        ).check()


@pytest.mark.parametrize("window", [(700, 0), (300, 40), (60, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_windows_of_more_tiles_than_sms(head_dim, window):
    """Tiles that see a whole window are scheduled first, those of the first rows after them."""
    size = {"heads": (16, 4, 4), "lengths": (1400, 1400), "head_dims": (head_dim, head_dim)}
    Attention(dtype=torch.bfloat16, batch=(3,), **size, options={"window": window}, wanted="").check()


@pytest.mark.parametrize("hidden", ["bool", "-inf"])
def test_hidden_blocks_are_passed_over(hidden):
    """NaN in keys and values of blocks that a mask hides as a whole does not reach a result: they are not read."""
    query, (key, value) = gpu(1, 2, 512, 64), (gpu(1, 2, 1152, 64) for _ in range(2))
    whole = slice(384, 768)  # blocks of 64, 96 and 128 keys all begin and end there
    seen = torch.ones(512, 1152, dtype=torch.bool, device="cuda")
    seen[:, whole] = False
    mask = seen if hidden == "bool" else torch.where(seen, 0.0, -INF).to(torch.bfloat16)
    expected = flash_online.attention(query, key, value, mask=mask)
    key[:, :, whole], value[:, :, whole] = math.nan, math.nan
    assert torch.equal(flash_online.attention(query, key, value, mask=mask), expected)


def test_drop_in_under_autocast_and_layouts():
    query, key, value = (torch.randn(2, 100, 4, 64, device="cuda").transpose(1, 2) for _ in range(3))
    with torch.autocast("cuda", torch.bfloat16):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert out.dtype == torch.bfloat16 and out.stride() == query.stride()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


def test_bias_gradient_takes_no_table_of_its_own():
    """Beyond the gradient itself: no float32 copy of a bias that the batch shares."""
    query, key, value = (gpu(4, 8, 1024, 64, grad=True) for _ in range(3))
    bias = gpu(1, 8, 1024, 1024, grad=True)
    grad = gpu(4, 8, 1024, 64)
    out = flash_online.attention(query, key, value, mask=bias)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, (query, key, value, bias), grad)
    gradients = sum(t.numel() * t.element_size() for t in (query, key, value, bias))
    extra = torch.cuda.max_memory_allocated() - before - gradients
    assert extra <= 2 * query.numel() * 4, f"{extra / 2**20:.1f} MiB beyond the gradients"


def test_fuzz():
    """The fuzzer's problems of attention, with head dims and lengths that fill whole tiles among them."""
    for seed in range(SEED, SEED + COUNT):
        choose = random.Random(seed)
        problem = draw_attention(choose, seed) if choose.random() < 0.7 else draw_packed(choose, seed)
        if problem.dtype == torch.float64:
            problem.dtype = torch.bfloat16
        if type(problem) is Attention and choose.random() < 0.3:
            head_dim = choose.choice([64, 72, 128, 256])
            problem.head_dims, problem.lengths = (
                (head_dim, head_dim),
                (choose.choice([64, 128, 192, 300]), choose.choice([128, 257, 400])),
            )
        try:
            torch.manual_seed(seed)
            problem.check()
        except Exception as error:
            raise AssertionError(
                f"FLASH_ONLINE_FUZZ=1 FLASH_ONLINE_FUZZ_SEED={seed} repeats this alone: {problem}\n{error}"
            ) from error


def test_explain_names_the_kernel_and_the_refusals():
    query = gpu(1, 2, 128, 64, dtype=torch.float32)
    plan = flash_online.explain(flash_online.attention, query, query, query)
    assert plan.ours and plan.kernel.endswith("(sm80)")
    assert all("sm80" not in name and reason for name, reason in plan.refused.items())
