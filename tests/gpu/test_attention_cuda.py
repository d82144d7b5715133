"""attention, varlen_attention and scaled_dot_product_attention on CUDA alone: CUDA graphs, streams, threads, the order of work
tiles, beyond 2^31 elements, the memory of a bias's gradient.

FLASH_ONLINE_KERNEL=sm80 in the environment runs these and the tests of both devices on the general kernels, as on a GPU that no
other is for.
"""

from __future__ import annotations

import math
import os
import random
import threading

import pytest
import torch
from oracle import Attention, Packed, gradients_of_ones

import flash_online
from flash_online.testing import assert_close_to_float64

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]
INF = math.inf


def gpu(*shape, dtype=torch.bfloat16, scale=1.0, grad=False):
    return (torch.randn(shape, device="cuda") * scale).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences_of_unlike_lengths(head_dim):
    """Who has time takes the next tile; the last one of the longest sequence has rows for few of its threads."""
    lengths = tuple((n, n) for n in (3000, 1, 700, 64, 2000, 129))
    Packed(
        heads=(4, 2, 2), dtype=torch.bfloat16, lengths=lengths, head_dims=(head_dim, head_dim), options={"causal": True}
    ).check("cuda")


@pytest.mark.parametrize("longest", [64, 700])
def test_more_packed_sequences_than_are_ordered_together(longest):
    choose = random.Random(longest)
    lengths = tuple((choose.choice([0, 1, 33, 64, longest]), choose.choice([0, 1, 65, longest])) for _ in range(300))
    Packed(heads=(2, 1, 1), dtype=torch.float16, lengths=lengths, head_dims=(64, 64), options={"causal": True}).check("cuda")


@pytest.mark.parametrize("window", [(700, 0), (300, 40), (60, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_windows_of_more_tiles_than_sms(head_dim, window):
    """Tiles that see a whole window are scheduled first, those of the first rows after them."""
    size = {"heads": (16, 4, 4), "lengths": (1400, 1400), "head_dims": (head_dim, head_dim)}
    Attention(dtype=torch.bfloat16, batch=(3,), **size, options={"window": window}, wanted="").check("cuda")


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
    Attention(dtype=torch.bfloat16, batch=(3,), mask_shape=(0, 1, 1, 1), mask_dtype=mask_dtype, **made).check("cuda")


# More blocks of keys than a GPU has SMs: in the backward pass one CTA takes several. The queries make one block, two, three (an
# odd number), or do not see the last keys.
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 9)}], ids=str)
@pytest.mark.parametrize("lengths", [(40, 385), (128, 130), (333, 300)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_blocks_of_keys(head_dim, lengths, options):
    made = {"dtype": torch.bfloat16, "batch": (3,), "heads": (24, 24, 24), "head_dims": (head_dim, head_dim)}
    Attention(lengths=lengths, options=options, **made).check("cuda")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_packed_blocks_of_keys(head_dim):
    choose = random.Random(head_dim)
    lengths = tuple((choose.choice([0, 1, 64, 130, 300]), choose.choice([0, 1, 65, 129, 400])) for _ in range(30))
    made = {"dtype": torch.float16, "heads": (8, 4, 4), "head_dims": (head_dim, head_dim)}
    Packed(lengths=lengths, options={"causal": True}, **made).check("cuda")


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


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (30, 9)}], ids=str)
@pytest.mark.parametrize("lengths", [(40, 385), (333, 300)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_many_blocks_of_keys_in_turn(head_dim, lengths, options):
    queries, keys = lengths
    inputs = [gpu(5, heads, rows, head_dim, grad=True) for heads, rows in ((48, queries), (24, keys), (24, keys))]
    first, second = (gradients_of_ones(flash_online.attention, *inputs, deterministic=True, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # Floats in another order, rounded once.
    torch.testing.assert_close(first, gradients_of_ones(flash_online.attention, *inputs, **options), rtol=2**-7, atol=1e-4)


CUT = {  # work tiles of keys that the backward pass on Hopper cuts into parts, for 132 SMs or 114
    "few tiles": {"batch": (1,), "heads": (4, 4, 4), "lengths": (1000, 900)},
    "few keys": {"batch": (1,), "heads": (2, 2, 2), "lengths": (3000, 100)},
    "more heads of dK and dV": {"batch": (2,), "heads": (8, 2, 2), "lengths": (700, 1100)},
    "the last wave, groups": {"batch": (1,), "heads": (51, 17, 17), "lengths": (260, 1000)},
}


@pytest.mark.parametrize("made", CUT.values(), ids=CUT)
@pytest.mark.parametrize("head_dims", [(64, 64), (72, 96), (128, 104), (160, 160), (192, 128), (184, 192), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_work_tiles_in_parts(dtype, head_dims, made):
    Attention(dtype=dtype, head_dims=head_dims, **made, wanted="qkv").check("cuda")


# Tiles of 128 keys, 64 of them; and 200, of which 132 SMs leave 68, too many for two parts of each. Over head dim 128 two SMs
# take a tile: half as many tiles.
@pytest.mark.parametrize("heads, queries, tiles", [(4, 2048, 16), (25, 3072, 8)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_parts_of_work_tiles_are_added_in_order(head_dim, heads, queries, tiles):
    """So that dK and dV repeat bit for bit. Those of `deterministic`, whose tiles are never cut, are sums in another order: the
    same bits would mean that no tile was cut."""
    keys = tiles * (128 if head_dim <= 128 else 64)
    lengths = (queries, keys, keys, queries)
    *inputs, grad = (gpu(1, heads, n, head_dim, dtype=torch.float16, grad=i < 3) for i, n in enumerate(lengths))

    def gradients(**options):
        return torch.autograd.grad(flash_online.attention(*inputs, **options), inputs, grad)

    first, second, whole = gradients(), gradients(), gradients(deterministic=True)
    torch.testing.assert_close(first, whole, rtol=2**-9, atol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(first[1:], second[1:], strict=True))
    gpu_of_132 = torch.cuda.get_device_properties().multi_processor_count == 132
    if torch.cuda.get_device_capability()[0] == 9 and gpu_of_132 and not os.environ.get("FLASH_ONLINE_KERNEL"):
        assert not any(torch.equal(a, b) for a, b in zip(first[1:], whole[1:], strict=True))


def test_dropout_drops_what_the_cpu_drops():
    rng = torch.tensor([5, 7])
    masks = [torch.ops.flash_online.attention_dropout_mask(rng.to(d), 1, 2, 3, 4, 70, 131, 0.3).cpu() for d in ("cpu", "cuda")]
    assert torch.equal(*masks)


def test_more_than_65535_heads_and_batches():
    query = gpu(70000, 1, 1, 8)
    out = flash_online.attention(query, query, query)
    assert torch.equal(out, query)
    query = gpu(1, 70000, 1, 8)
    assert torch.equal(flash_online.attention(query, query, query), query)


def test_more_than_2_to_the_31_elements():
    if torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        pytest.skip("needs 60 GiB of GPU memory")
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


def test_explain_names_the_kernel_and_the_refusals():
    query = gpu(1, 2, 128, 64, dtype=torch.float32)
    plan = flash_online.explain(flash_online.attention, query, query, query)
    assert plan.ours and plan.kernel.endswith("(sm80)")
    assert all("sm80" not in name and reason for name, reason in plan.refused.items())
