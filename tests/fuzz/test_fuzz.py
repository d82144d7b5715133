"""A seeded differential fuzzer: random problems of every kind against the float64 reference, forward and backward.

FLASH_ONLINE_FUZZ is how many problems per device (300), FLASH_ONLINE_FUZZ_SEED where they start (0). Problem i of seed s is
problem 0 of seed s + i, so a failure is repeated alone by the line that it prints. `python tests/fuzz/run.py` runs many.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from block_cases import SIZES
from cache_cases import LARGE_SCORES, between, random_cached
from cases import DTYPES
from float8_cases import E4M3, Float8, skip_without_kernel
from instruction_sets import run_tests, skip_unless_lesser
from oracle import Attention, Packed, compare_with_reference

import flash_online
from flash_online.testing import LAYOUTS, lay_out, random_tensor

COUNT = int(os.environ.get("FLASH_ONLINE_FUZZ", "300"))
SEED = int(os.environ.get("FLASH_ONLINE_FUZZ_SEED", "0"))


def length(choose: random.Random) -> int:
    """Mostly short, sometimes past the edge of a block, rarely 0."""
    return choose.choice([0, 1, 2, 3, 7, *range(4, 40), 63, 64, 65, 100, 129, 160])


def attention(choose: random.Random, seed: int) -> Attention:
    groups = choose.choice([(1, 1, 1), (2, 2, 2), (3, 1, 1), (4, 2, 2), (4, 2, 1), (4, 4, 1), (6, 2, 3)])
    queries, keys = length(choose), length(choose)
    if queries * keys > 4000:
        groups = (1, 1, 1)
    layouts = tuple(choose.choice(LAYOUTS) if choose.random() < 0.5 else "contiguous" for _ in range(4))
    bound = [None, None, 0, 1, 2, 5, 30, 64, 200]
    options = {}
    if choose.random() < 0.35:
        options["causal"] = True
    if choose.random() < 0.3:
        options["window"] = (choose.choice(bound), choose.choice(bound))
    if choose.random() < 0.4:
        options["alignment"] = "lower_right"
    if choose.random() < 0.2:
        options["softcap"] = choose.choice([0.5, 2.0, 30.0])
    if choose.random() < 0.2:
        options["dropout_p"] = choose.choice([0.1, 0.5, 0.9])
    if choose.random() < 0.3:
        options["scale"] = choose.choice([0.0, -0.5, 0.1, 1.0, 4.0])
    dtype = choose.choice(DTYPES)
    head_dim = choose.choice([0, 1, 3, 8, 16, 24, 33, 64])
    problem = Attention(
        dtype=dtype,
        batch=choose.choice([(), (1,), (2,), (1, 2)]),
        heads=groups,
        lengths=(queries, keys),
        head_dims=(head_dim, choose.choice([head_dim, head_dim, 1, 5, 16, 40])),
        layouts=layouts,
        mask=choose.choice([None, None, None, "bool", "float", "-inf"]),
        mask_shape=tuple(choose.choice([0, 1, 1]) for _ in range(4)),
        mask_rank=choose.choice([9, 9, 3, 2, 1]),
        mask_dtype=choose.choice([None, torch.float32]) if dtype.itemsize == 2 else None,
        options=options,
        alibi=choose.choice([0, 0, 0, 1, 2]),
        sinks=choose.random() < 0.2,
        size=choose.choice([1.0, 1.0, 0.1, 4.0]),
        wanted=choose.choice(["qkvms", "qkvms", "qkvms", "q", "kv", "m", "s", ""]),
        grad_lse=choose.random() < 0.4,
        max_logit=choose.random() < 0.3,
        seed=seed,
    )
    return far_off(problem, choose)


def far_off(problem: Attention, choose: random.Random) -> Attention:
    """Of 10 problems 3 have a float mask far off 0, and 3 scores of another size."""
    kind = choose.random()
    if kind < 0.3:
        problem.mask = "float" if problem.mask in (None, "bool") else problem.mask
        problem.mask_offset = choose.choice([-1, 1]) * between(choose, -2, 4)
    elif kind < 0.6:
        score = between(choose, -3, 9)
        if score >= LARGE_SCORES:
            problem.whole, problem.size, problem.alibi = True, 1.0, 0
            problem.mask = "bool" if problem.mask else None
        spread = 2 if problem.whole else problem.size
        problem.options["scale"] = choose.choice([1, 1, -1]) * score / (spread**2 * max(problem.head_dims[0], 1) ** 0.5)
    return problem


def packed(choose: random.Random, seed: int) -> Packed:
    """The dense problem's options on sequences of lengths drawn anew."""
    dense = attention(choose, seed)
    lengths = tuple((length(choose), length(choose)) for _ in range(choose.choice([0, 1, 2, 3, 5])))
    return Packed(
        dtype=dense.dtype,
        heads=dense.heads if sum(q * k for q, k in lengths) <= 4000 else (1, 1, 1),
        lengths=lengths,
        head_dims=dense.head_dims,
        layouts=dense.layouts,
        spare=(choose.choice([0, 0, 1, 70]), choose.choice([0, 0, 1, 70])),
        options=dense.options,
        alibi=dense.alibi,
        sinks=dense.sinks,
        whole=dense.whole,
        size=dense.size,
        wanted=dense.wanted,
        grad_lse=dense.grad_lse,
        max_logit=dense.max_logit,
        seed=seed,
    )


def on_cuda(problem: Attention, choose: random.Random) -> Attention:
    """The problem as CUDA takes it, with head dims and lengths that fill whole tiles among them."""
    if type(problem) is Attention and choose.random() < 0.3:
        head_dim = choose.choice([64, 72, 96, 128, 136, 160, 192, 256])
        problem.head_dims = (head_dim, head_dim)
        problem.lengths = (choose.choice([64, 128, 192, 300]), choose.choice([128, 257, 400]))
    return problem


def rows(choose: random.Random, seed: int, device: str):
    torch.manual_seed(seed)
    rank = choose.choice([1, 2, 2, 3])
    shape = [choose.choice([1, 2, 3, 5, 8]) for _ in range(rank)]
    dim = choose.randrange(rank)
    shape[dim] = choose.choice([1, 2, 5, 8, 15, 16, 17, 33, 64, 100, 257, 1030])
    dtype, layout, scale = choose.choice(DTYPES), choose.choice(LAYOUTS), choose.choice([0.1, 1.0, 5.0, 30.0])
    x = random_tensor(*shape, dtype=dtype, layout=layout, scale=scale, device=device)
    kind = choose.random()
    if kind < 0.3:  # by an offset that the dtype has; from its last digit on all logits are equal
        offset = choose.choice([-1, 1]) * between(choose, -3, 30)
        x = lay_out(x + max(min(offset, torch.finfo(dtype).max / 2), -torch.finfo(dtype).max / 2), layout)
    elif kind < 0.5:
        x = lay_out(x / scale * min(between(choose, -3, 9), torch.finfo(dtype).max / 16), layout)
    x = x.requires_grad_()
    name = choose.choice(["softmax", "log_softmax", "logsumexp", "topk_softmax", "cross_entropy", "cross_entropy"])
    if name == "topk_softmax":
        return name, (x, choose.randint(1, min(shape[dim], 40)), dim), {"renormalize": choose.random() < 0.5}
    if name == "logsumexp":
        return name, (x, dim), {"keepdim": choose.random() < 0.5}
    if name != "cross_entropy":
        return name, (x, dim), {"dtype": torch.float32} if choose.random() < 0.2 else {}
    classes = shape[1] if rank > 1 else shape[0]
    options = {
        "reduction": choose.choice(["mean", "sum", "none"]),
        "label_smoothing": choose.choice([0.0, 0.0, 0.1, 1.0]),
        "z_loss": choose.choice([0.0, 0.0, 0.01]),
        "return_lse": choose.random() < 0.5,
    }
    if choose.random() < 0.3:
        options["weight"] = lay_out(torch.rand(classes).to(device, x.dtype) + 0.1, choose.choice(LAYOUTS))
    if choose.random() < 0.3:
        target = torch.rand(shape).to(device, x.dtype).requires_grad_(choose.random() < 0.5)
    else:
        target = torch.randint(0, classes, shape[:1] + shape[2:] if rank > 1 else ()).to(device)
        if target.dim() and target.numel() > 1 and choose.random() < 0.5:
            options["ignore_index"] = choose.choice([-100, -1, classes + 3])
            target[0] = options["ignore_index"]
    options["return_entropy"] = choose.random() < 0.4
    return name, (x, lay_out(target.detach(), choose.choice(LAYOUTS)).requires_grad_(target.requires_grad)), options


def check(seed: int, device: str) -> None:
    """A problem of 2 in 10 is of packed sequences, of 3 in 10 of rows. AssertionError where one is over the tolerance."""
    choose = random.Random(seed)
    kind = choose.random()
    if kind < 0.7:
        problem = attention(choose, seed) if kind < 0.5 else packed(choose, seed)
        problem = problem if device == "cpu" else on_cuda(problem, choose)
        torch.manual_seed(seed)
        problem.check(device)
    else:
        name, args, options = rows(choose, seed, device)
        compare_with_reference(name, *args, **options)


def check_spans(seed: int, device: str) -> None:
    """A problem of attention, one of 3 of packed sequences, with intervals of keys per query, of queries per key, or both."""
    choose = random.Random(seed)
    problem = attention(choose, seed) if seed % 3 else packed(choose, seed)
    problem = problem if device == "cpu" else on_cuda(problem, choose)
    problem.spans = choose.choice([(1, 0), (2, 0), (0, 1), (0, 2), (1, 1), (2, 2)])
    problem.head_spans = choose.random() < 0.4
    torch.manual_seed(seed)
    problem.check(device)


def check_blocks(seed: int, device: str) -> None:
    """A problem of attention with a list of blocks, one of three with spans too."""
    choose = random.Random(seed)
    problem = attention(choose, seed)
    problem = problem if device == "cpu" else on_cuda(problem, choose)
    if choose.random() < 0.5:  # several blocks
        problem.lengths = choose.choice([64, 65, 129, 200, 300]), choose.choice([63, 128, 257, 400])
    problem.blocks = choose.choice(SIZES)
    problem.spans = choose.choice([(0, 0), (0, 0), (1, 0), (0, 2)])
    problem.head_spans = choose.random() < 0.5
    torch.manual_seed(seed)
    problem.check(device)


def check_cached(seed: int, device: str) -> None:
    """Attention over cached keys, and the same new keys appended at the ends of sequences and at slots."""
    problem = random_cached(seed, device)
    problem.check(flash_online.kvcache_attention, device)
    problem.check_append(flash_online.cache_append, device)
    problem.check_append(flash_online.cache_append, device, slots=True)


def check_float8(seed: int, device: str) -> None:
    """A problem of float8_attention, from the shapes and options of one of attention."""
    choose = random.Random(seed)
    like = attention(choose, seed)
    bound = [0, 5, 127, 128, 129, 255, 256, 300]
    heads, widths = like.heads, [8, 16, 40, 64, 64, 72, 96, 128, 128, 192, 256]
    problem = Float8(
        dtype=choose.choice([torch.float16, torch.bfloat16, E4M3]),
        batch=like.batch,
        heads=(heads[0], heads[1]),
        lengths=tuple(choose.choice([n, n, choose.choice(bound)]) for n in like.lengths),
        head_dims=tuple(choose.choice([n, choose.choice(widths)]) for n in like.head_dims),
        layouts=like.layouts[:3],
        options={n: value for n, value in like.options.items() if n not in ("dropout_p", "deterministic")},
        smooth_keys=choose.random() < 0.6,
        scales=choose.random() < 0.7,
        sinks=like.sinks,
        spans=choose.choice([(0, 0), (0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (1, 2)]),
        head_spans=choose.random() < 0.4,
        out_dtype=choose.choice([torch.float16, torch.bfloat16, None]),
        size=like.size,
        mean=choose.choice([0.0, 0.0, 1.0, 10.0]),
        seed=seed,
    )
    problem.check(device)


def check_all(check_one, device: str, cached: str = "") -> None:
    assert COUNT > 0
    for seed in range(SEED, SEED + COUNT):
        try:
            check_one(seed, device)
        except Exception as failure:
            again = f"python tests/fuzz/run.py --seed {seed} --count 1 --device {device}{cached}"
            raise AssertionError(f"problem {seed - SEED} of {COUNT}: {failure}\nalone: {again}") from failure


def test_fuzz(device):
    check_all(check, device)


def test_fuzz_spans(device):
    check_all(check_spans, device, " --spans")


def test_fuzz_blocks(device):
    check_all(check_blocks, device, " --blocks")


def test_fuzz_cached_keys(cache_device):
    check_all(check_cached, cache_device, " --cached")


def test_fuzz_float8(device):
    skip_without_kernel(device)
    check_all(check_float8, device, " --float8")


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512", "avx512_bf16"])
def test_fuzz_on_a_lesser_instruction_set(instruction_set):
    """The kernels compiled for another processor have other vectors and sum in another order; the tolerance is equal."""
    skip_unless_lesser(instruction_set)
    run_tests(instruction_set, f"{__file__}::test_fuzz[cpu]", FLASH_ONLINE_FUZZ=str(COUNT // 5))
