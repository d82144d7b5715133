"""What test_agreement.py runs on two and four ranks: calls compared late, as over NCCL, which takes no CPU tensors."""

from __future__ import annotations

import gc
import os
import random
import string
import sys
import time
import warnings
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import joined
from torch.utils.checkpoint import checkpoint

from flash_online.distributed import (
    _agreement,
    context_parallel_attention,
    context_parallel_varlen_attention,
    shard,
    unshard,
    vocab_parallel_linear_cross_entropy,
)
from flash_online.distributed._group import group_of

SECONDS = 3  # a group's timeout


def late_group(seconds: float = 60):
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    assert _agreement._agreement_of(group_of(group)).late
    return group


def agree(group, **description):
    """A call that has a description, and exchanges nothing."""
    return _agreement.checked_on_all_ranks(group_of(group), lambda: (description, "done"))


def refuse(message):
    raise ValueError(message)


def attend(group, shape=(1, 4, 8, 6), **options):
    tensors = [torch.ones(shape, requires_grad=True) for _ in range(3)]
    return context_parallel_attention(*tensors, group=group, method="ulysses", **options)


def check_equal_calls(rank, ranks):
    """Many calls, dense, packed and unsharded, with the group's own collectives in between. Equal calls share a message."""
    group, starts = late_group(), torch.tensor([0, 5, 8 * ranks], dtype=torch.int32)
    whole = torch.randn(1, 4, 8 * ranks, 6)
    (part,) = shard([whole], 2, group)
    expected = attend(group, causal=True)
    for n in range(30):
        out = attend(group, causal=True)
        assert torch.equal(out, expected)
        if n % 3 == 0:
            out.sum().backward()
        elif n % 3 == 1:
            assert torch.equal(unshard([part], 2, group)[0], whole)
        else:
            stream = torch.ones(8, 4, 6)
            context_parallel_varlen_attention(stream, stream, stream, starts, group=group, max_seqlen=n)
            dist.all_reduce(torch.ones(3), group=group)
    made = _agreement._message.cache_info().misses
    agree(group, function="f", n=1), agree(group, function="f", n=1)
    assert _agreement._message.cache_info().misses == made + 1
    with torch.inference_mode():
        attend(group)
    agreement = _agreement._agreement_of(group_of(group))
    for layers in (1, 3):  # the call that a checkpoint repeats in the backward pass of the first one is not waited for
        x = torch.ones(1, 4, 8, 6, requires_grad=True)
        for _ in range(layers):
            x = checkpoint(lambda x: context_parallel_attention(x, x, x, group=group).sin(), x, use_reentrant=False)
        agree(group, n=1)
        calls = agreement.calls
        x.sum().backward()
        assert agreement.calls == calls + layers and agreement.pending is not None
    attend(group).sum().backward()
    with pytest.raises(ValueError, match="^dropout_p: expected 0"):  # refused on every rank, alike
        attend(group, dropout_p=0.5)
    attend(group)


def check_differences(rank, ranks):
    """A difference is an error of the next call, on every rank and with the same text; then the group stays refused."""
    last = rank == ranks - 1
    for words, call in (
        ("^causal: the ranks differ: False on rank 0.*True on rank .; expected the same", lambda g: attend(g, causal=last)),
        (r"^query: the ranks differ: \[1, 4, 8, 6\].*\[1, 4, 6, 8\]", lambda g: attend(g, (1, 4, 8 - 2 * last, 6 + 2 * last))),
        ("^n: the ranks differ: 5 on rank 0", lambda g: agree(g, function="f", n=6 if last else 5)),
        ("^m: the ranks differ: not there on rank 0", lambda g: agree(g, function="f", **({"m": 1} if last else {}))),
    ):
        group, other = late_group(), late_group()
        attend(group)
        call(group)
        said = [None] * ranks
        for later in (attend, lambda group: unshard([torch.ones(2)], 0, group), agree):
            with pytest.raises(ValueError, match=words) as error:
                later(group)
            dist.all_gather_object(said, str(error.value))
            assert said == said[:1] * ranks
        attend(other), attend(other)  # another group works


def check_a_backward_pass(rank, ranks):
    """The backward pass of attention, by each method, and of unshard waits for the comparison."""

    def gathered(group, n):
        tensor = torch.ones(1, 4, 8, 6, requires_grad=True)
        return context_parallel_attention(tensor, tensor, tensor, group=group, method="gathered", scale=n)

    def unsharded(group, n):
        return unshard([torch.ones((2, 4) if n else (4, 2), requires_grad=True)], 0, group)[0]

    for call in (lambda group, n: attend(group, window=(n, 0)), gathered, unsharded):
        group = late_group()
        call(group, 0).sum().backward()
        out = call(group, rank)
        with pytest.raises(ValueError, match="the ranks differ: .* on rank 0"):
            out.sum().backward()
        with pytest.raises(ValueError, match="the ranks differ: .* on rank 0"):
            call(group, 0)


def check_a_refusal(rank, ranks):
    """A rank that refuses its call raises at once, the others at their next call."""
    last = rank == ranks - 1
    words = f"^group: rank {ranks - 1} refuses its call: InvalidArgument: dropout_p: .*, got 0.1. No rank continues"
    group = late_group()
    agree(group, n=1)
    if last:
        with pytest.raises(ValueError, match="^dropout_p: expected 0 .*, got 0.1"):
            attend(group, dropout_p=0.1)
    else:
        agree(group, n=2)  # in place of attention, which would wait for the last rank
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            attend(group)


def check_the_vocabulary(rank, ranks):
    """A call that needs the numbers of all ranks waits for what is pending, and then for its own gather."""
    group, other = late_group(), late_group()

    def loss(group, scale=1.0):
        own = torch.ones(3, 4), torch.ones(2, 4), torch.tensor([0, 1, 2])
        return vocab_parallel_linear_cross_entropy(*own, group=group, first_class=2 * rank, scale=scale)

    for _ in range(3):
        agree(group, n=1)
        assert torch.isfinite(loss(group))
    with pytest.raises(ValueError, match="^scale: the ranks differ: 0.0 on rank 0, 1.0 on rank 1"):
        loss(other, float(rank))
    agree(group, n=rank)
    with pytest.raises(ValueError, match="^n: the ranks differ: 0 on rank 0, 1 on rank 1"):
        loss(group)


def check_long_descriptions(rank, ranks):
    """A description that a message has no room for: the error names what it can."""
    noise = "".join(random.Random(0).choices(string.ascii_letters, k=5000))
    for words, description in (
        (r"^b: the ranks differ: 0 on rank 0, 1 on rank 1", {"a": noise, "b": rank}),
        (r"^a: the ranks differ: 0.*\.\.\. \(cut\) on rank 0, 1", {"a": f"{rank}{noise}", "b": 1}),
        ("^group: expected the same call on all ranks, got calls that differ in what 1024 bytes do not hold",
         {"a": f"{noise}{rank}", "b": 1}),
        ("^t0: the ranks differ", {f"t{n}": f"{rank} {noise[n:n + 40]}" for n in range(500)}),
    ):  # fmt: skip
        group = late_group()
        agree(group, **description)
        with pytest.raises(ValueError, match=words):
            agree(group)
    with pytest.raises(ValueError, match="^b: the ranks differ"):
        _agreement._is_for_cpu = lambda group: True
        agree(dist.new_group(), a=noise, b=rank)
    _agreement._is_for_cpu = lambda group: False


def check_groups_end(rank, ranks):
    """A group that is destroyed with a comparison pending is freed."""
    group = late_group()
    agree(group, n=1)
    gone = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert gone() is None and len(_agreement._agreements) < 40


def dead(rank, ranks):
    """The last rank does not come: ranks that wait for the comparison end by the timeout, and the group is refused."""
    group = late_group(SECONDS)
    agree(group, n=1)
    if rank == ranks - 1:
        time.sleep(SECONDS + 2)
        return
    agree(group, n=2)
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="^group: expected a call of every rank within the group's timeout, got an error"
        ):
            agree(group, n=3)
    assert time.monotonic() - start < SECONDS + 1.5


def pending(rank, ranks):
    """The process exits with a comparison pending."""
    group = late_group()
    agree(group, n=1)
    attend(group).sum().backward()
    agree(group, n=2)


if __name__ == "__main__":
    warnings.simplefilter("error")
    _agreement._is_for_cpu = lambda group: False
    if sys.argv[1:] == ["undestroyed"]:
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{os.environ['RANKS_STORE']}", rank=rank, world_size=ranks)
        pending(rank, ranks)
    else:
        with joined() as (rank, ranks):
            for name in sys.argv[1:]:
                torch.manual_seed(0)
                globals()[name](rank, ranks)
                print("ok", name, flush=True)
