"""`torchrun --nproc-per-node N -m flash_online check distributed`: compares attention and the vocabulary-parallel loss over N
ranks with one process, on GPUs if there are N, else on the CPU. Without torchrun it checks a group of one rank.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import attention, linear_cross_entropy, varlen_attention
from . import (
    context_parallel_attention,
    context_parallel_varlen_attention,
    shard,
    vocab_parallel_linear_cross_entropy,
)

HEADS, KEY_HEADS, WIDTH = 4, 2, 32
ROWS = 48  # per rank
GRADIENTS = ("dquery", "dkey", "dvalue")
CLASSES = 101  # not divisible by any number of ranks above 1
ALLOWED = 0.02  # relative to the largest element, for 16-bit sums over ranks in another order


@contextlib.contextmanager
def _group(device: str) -> Iterator[None]:
    """The default group: the existing one, one made from torchrun's environment, or one of a single rank."""
    if dist.is_initialized():
        yield
        return
    backend = "nccl" if device == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _device() -> str:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not torch.cuda.is_available() or torch.cuda.device_count() < ranks:
        return "cpu"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return "cuda"


def _run(call: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor) -> list[Tensor]:
    """Out, lse and the gradients of query, key and value, from these and the gradient of out."""
    *inputs, grad = tensors
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out, lse = call(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]


def _is_close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= ALLOWED * other.abs().max())


def _wrong(ours: list[Tensor], wanted: list[Tensor], method: str) -> list[str]:
    """The names of the results that differ. All must be bit-equal, but for gradients that are summed over ranks. With gathered
    keys each row of dquery is summed too, over tiles of keys: on the CPU in the order of one process, on a GPU only if the
    tiles of queries hold the same rows."""
    sums = GRADIENTS if method == "gathered" else GRADIENTS[1:] if KEY_HEADS % dist.get_world_size() else ()
    named = zip(("out", "lse", *GRADIENTS), ours, wanted, strict=True)
    return [name for name, *pair in named if not (_is_close if name in sums else torch.equal)(*pair)]


def _wrong_loss(randn: Callable[..., Tensor], device: str) -> list[str]:
    """The names of the results that differ of the loss over sharded classes; its sums per row have another order."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    hidden, weight = randn(ROWS, WIDTH), randn(CLASSES, WIDTH)
    target = torch.arange(ROWS, device=device) * 7 % CLASSES
    count = -(-CLASSES // ranks)
    own = slice(min(rank * count, CLASSES), min((rank + 1) * count, CLASSES))
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, hidden, weight[own])]
    wanted = linear_cross_entropy(leaves[0], leaves[1], target)
    loss = vocab_parallel_linear_cross_entropy(leaves[2], leaves[3], target, first_class=own.start)
    grads = torch.autograd.grad(wanted + loss, leaves)
    pairs = {"loss": (loss, wanted), "dinput": (grads[2], grads[0]), "dweight": (grads[3], grads[1][own])}
    return [name for name, (one, other) in pairs.items() if one.numel() and not _is_close(one.detach(), other.detach())]


def _results(device: str) -> Iterator[tuple[str, list[str]]]:
    """The name of each case, and the names of its results that are wrong on this rank."""
    generator, length = torch.Generator().manual_seed(2017), ROWS * dist.get_world_size()

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    slopes, sinks = (torch.rand(HEADS, generator=generator).to(device) for _ in range(2))
    options: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"causal": True, "window": (37, None)},
        "softcap": {"softcap": 3.0},
        "ALiBi": {"causal": True, "alibi_slopes": slopes},
        "sinks": {"causal": True, "sinks": sinks},
    }
    both = {"deterministic": True, "return_lse": True}
    cases: list[tuple[str, Any, Any, int]] = [
        (name, partial(attention, **both, **own), partial(context_parallel_attention, **both, **own), 2)
        for name, own in options.items()
    ]
    starts = torch.tensor([0, 1, ROWS - 5, ROWS - 5, length - 2], dtype=torch.int32, device=device)
    packing = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
    one = partial(varlen_attention, causal=True, **both, **packing)
    several = partial(context_parallel_varlen_attention, cu_seqlens=starts, max_seqlen=length, causal=True, **both)
    for name, alone, together, dim in [*cases, ("packed documents", one, several, 0)]:
        tensors = [randn(1, heads, length, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]  # the last: grad
        tensors = tensors if dim else [tensor[0].transpose(0, 1).contiguous() for tensor in tensors]
        wanted = _run(alone, *tensors)
        for method, layout in itertools.product(("ulysses", "gathered"), ("zigzag", "contiguous") if dim else ("contiguous",)):
            ours = _run(partial(together, method=method, layout=layout), *shard(tensors, [dim] * 4, layout=layout))
            mine = shard(wanted, [dim, wanted[1].dim() - 1, dim, dim, dim], layout=layout)
            yield f"{name}, {method}, {layout}", _wrong(ours, mine, method)
    yield "classes over ranks", _wrong_loss(randn, device)


def check(say: Callable[[str], None]) -> bool:
    device, right = _device(), True
    with _group(device):
        ranks = dist.get_world_size()
        where = torch.cuda.get_device_name() if device == "cuda" else "CPU, gloo"
        say(f"{ranks} rank{'s' * (ranks > 1)}, {where}")
        for name, wrong in _results(device):
            verdicts: list[Any] = [None] * ranks
            dist.all_gather_object(verdicts, wrong)
            bad = "; ".join(f"rank {n}: {', '.join(names)}" for n, names in enumerate(verdicts) if names)
            say(f"{'WRONG' if bad else 'ok':6} {name}{': ' + bad if bad else ''}")
            right &= not bad
    return right
