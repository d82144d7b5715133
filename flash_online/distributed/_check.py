"""`torchrun --nproc-per-node N -m flash_online check distributed`: compares attention and the vocabulary-parallel loss over N
ranks with one process, on GPUs if there are N, else on the CPU. Without torchrun it checks a group of one rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
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
CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": (37, None)},
    "softcap": {"softcap": 3.0},
    "ALiBi": {"causal": True, "alibi_slopes": True},
    "sinks": {"causal": True, "sinks": True},
}
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


def _run(call: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Out, lse and the gradients of inputs."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out, lse = call(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]


def _differences(ours: list[Tensor], wanted: list[Tensor], sums: Sequence[str] = ()) -> list[str]:
    """The results that differ: they must be bit-equal, except `sums`, which are added in another order."""
    names = ("out", "lse", *GRADIENTS)
    equal = (_is_close if name in sums else torch.equal for name in names)
    return [name for name, same, *pair in zip(names, equal, ours, wanted, strict=True) if not same(*pair)]


def _sums(method: str, ranks: int) -> Sequence[str]:
    """The gradients that are summed over ranks. With gathered keys each row of dquery is summed too, over tiles of keys: on the
    CPU in the order of one process, on a GPU only if the tiles of queries hold the same rows."""
    if method == "gathered":
        return GRADIENTS
    return GRADIENTS[1:] if KEY_HEADS % ranks else ()


def _is_close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= ALLOWED * other.abs().max())


def _vocabulary(randn: Callable[..., Tensor], device: str) -> list[str]:
    """Checks the loss over sharded classes; the per-row results are sums in another order. Returns the names that are wrong."""
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


def check(say: Callable[[str], None]) -> bool:
    device = _device()
    with _group(device):
        ranks, right = dist.get_world_size(), True
        where = torch.cuda.get_device_name() if device == "cuda" else "CPU, gloo"
        say(f"{ranks} rank{'s' * (ranks > 1)}, {where}")
        generator = torch.Generator().manual_seed(2017)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

        def report(name: str, wrong: list[str]) -> None:
            nonlocal right
            verdicts: list[Any] = [None] * ranks
            dist.all_gather_object(verdicts, wrong)
            right &= not any(verdicts)
            bad = "; ".join(f"rank {n}: {', '.join(names)}" for n, names in enumerate(verdicts) if names)
            say(f"{'WRONG' if bad else 'ok':6} {name}{': ' + bad if bad else ''}")

        whole = [randn(1, heads, ROWS * ranks, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        grad = randn(1, HEADS, ROWS * ranks, WIDTH)
        more = {"alibi_slopes": torch.rand(HEADS, generator=generator), "sinks": torch.rand(HEADS, generator=generator)}
        for name, words in CASES.items():
            options = {key: more[key].to(device) if value is True and key in more else value for key, value in words.items()}
            options |= {"deterministic": True, "return_lse": True}
            wanted = _run(partial(attention, **options), whole, grad)
            for method in ("ulysses", "gathered"):
                for layout in ("zigzag", "contiguous"):
                    part = shard([*whole, grad], 2, layout=layout)
                    call = partial(context_parallel_attention, method=method, layout=layout, **options)
                    ours = _run(call, part[:3], part[3])
                    mine = shard(wanted, [2, 2, 2, 2, 2], layout=layout)
                    report(f"{name}, {method}, {layout}", _differences(ours, mine, _sums(method, ranks)))
        report("classes over ranks", _vocabulary(randn, device))
        ends = [0, 1, ROWS - 5, ROWS - 5, ROWS * ranks - 2]
        starts = torch.tensor(sorted(ends), dtype=torch.int32, device=device)
        packed = [tensor[0].transpose(0, 1).contiguous() for tensor in whole]
        options = {"causal": True, "deterministic": True, "return_lse": True}
        longest = ROWS * ranks
        grad = grad[0].transpose(0, 1)

        def one_process(*tensors: Tensor) -> Any:
            return varlen_attention(*tensors, starts, starts, longest, longest, **options)

        def on_ranks(*tensors: Tensor, method: str) -> Any:
            return context_parallel_varlen_attention(*tensors, starts, max_seqlen=longest, method=method, **options)

        wanted = _run(one_process, packed, grad)
        for method in ("ulysses", "gathered"):
            part = shard([*packed, grad], 0, layout="contiguous")
            ours = _run(partial(on_ranks, method=method), part[:3], part[3])
            mine = shard(wanted, [0, wanted[1].dim() - 1, 0, 0, 0], layout="contiguous")
            report(f"packed documents, {method}", _differences(ours, mine, _sums(method, ranks)))
        return right
