"""torchrun --nproc-per-node N -m flash_online bench distributed: attention of a sequence over N ranks, beside torch's.

A cell is forward and backward of causal attention, every rank with its rows. What one process computes on the whole sequence
is what outputs are compared with, bit by bit, and its time over N is what would be ideal. A sample is the slowest rank's.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flash_online
from flash_online.distributed import context_parallel_attention, context_parallel_varlen_attention, shard

from . import harness
from .case import Case
from .peers import PEER_TOLERANCE, Unavailable
from .summary import OURS

HEAD_DIM = 128
LENGTHS = (8192, 32768, 131072, 524288)
ONE_GPU_MOST = 131072  # beyond, one GPU takes many seconds, and the whole sequence's gradients much of its memory
DOCUMENTS = (64, 16384)  # of packed streams, in tokens: lengths are spread evenly over their logarithms


@dataclass(frozen=True)
class Cell(Case):
    @property
    def kind(self) -> str:
        return "packed documents" if "packed" in self.options else "a window" if "window" in self.options else "causal"


def _cells() -> list[Cell]:
    cells = []
    for heads, key_heads in ((32, 8), (16, 16)):
        for length in LENGTHS:
            sizes = {"L": length, "heads": heads, "key heads": key_heads}
            cells.append(Cell("causal", sizes))
            if length in (32768, 131072):
                cells += [Cell("window", sizes, {"window": 4096}), Cell("packed", sizes, {"packed": True})]
    return cells


CELLS = _cells()
QUICK = [
    Cell("causal", {"L": 256, "heads": 4, "key heads": 2}, dtype=torch.float32),
    Cell("window", {"L": 256, "heads": 4, "key heads": 2}, {"window": 64}, torch.float32),
    Cell("packed", {"L": 256, "heads": 4, "key heads": 2}, {"packed": True}, torch.float32),
]


class Inputs:
    """A cell's tensors on a rank: the whole sequence, the same on all ranks, and this rank's rows in a layout."""

    def __init__(self, cell: Cell, device: str):
        self.cell, self.device = cell, device
        length, heads, key_heads = (cell.sizes[name] for name in ("L", "heads", "key heads"))
        generator = torch.Generator(device).manual_seed(2017)
        self.packed = "packed" in cell.options
        of = [heads, key_heads, key_heads, heads]
        shapes = [(length, h, HEAD_DIM) if self.packed else (1, h, length, HEAD_DIM) for h in of]
        self.whole = [torch.randn(shape, generator=generator, device=device, dtype=cell.dtype) for shape in shapes]
        self.dim = 0 if self.packed else 2
        self.options: dict[str, object] = {"causal": True}
        if "window" in cell.options:
            self.options["window"] = (cell.options["window"], None)
        if self.packed:
            self.starts = _documents(length).to(device)

    def part(self, layout: str) -> list[Tensor]:
        return [tensor.contiguous() for tensor in shard(self.whole, self.dim, layout=layout)]

    def attend(self, *tensors: Tensor, **more: object) -> Tensor:
        """Of the whole sequence, by one process."""
        if not self.packed:
            return flash_online.attention(*tensors, **self.options, **more)
        length = self.cell.sizes["L"]
        return flash_online.varlen_attention(*tensors, self.starts, self.starts, length, length, **self.options, **more)

    def attend_on_ranks(self, *tensors: Tensor, method: str, layout: str) -> Tensor:
        words = {"method": method, "layout": layout, **self.options}
        if not self.packed:
            return context_parallel_attention(*tensors, **words)
        return context_parallel_varlen_attention(*tensors, self.starts, max_seqlen=self.cell.sizes["L"], **words)


def _documents(length: int) -> Tensor:
    """The starts of documents whose lengths are spread evenly over their logarithms, the last one cut."""
    generator, (least, most) = torch.Generator().manual_seed(64), DOCUMENTS
    starts = [0]
    while starts[-1] < length:
        size = least * (most / least) ** torch.rand((), generator=generator).item()
        starts.append(min(starts[-1] + round(size), length))
    return torch.tensor(starts, dtype=torch.int32)


# --- providers ---------------------------------------------------------------------------------------------------------------


@dataclass
class Provider:
    """`step` computes forward and backward of a rank's rows, and returns its output; `layout` is theirs."""

    step: Callable[[], Tensor]
    layout: str
    exact: bool = True  # whether the output must have the bits of one process


def _step(call: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], Tensor]:
    *inputs, grad = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]

    def step() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        out = call(*leaves)
        out.backward(grad)
        return out.detach()

    return step


def _ours(inputs: Inputs, method: str) -> Provider:
    layout = "contiguous" if inputs.packed else "zigzag"
    return Provider(
        _step(lambda *tensors: inputs.attend_on_ranks(*tensors, method=method, layout=layout), inputs.part(layout)), layout
    )


@contextlib.contextmanager
def _torchs(inputs: Inputs, backend: str, rotation: str) -> Iterator[Provider]:
    """torch's context_parallel, a ring, or keys gathered after one step. It takes no groups of heads: keys are repeated."""
    if inputs.device != "cuda" or inputs.packed or "window" in inputs.options:
        raise Unavailable("it takes plain causal attention on GPUs alone")
    from torch.distributed.tensor.experimental import _attention as private
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    private.set_rotate_method(rotation)
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    buffers = [tensor.clone() for tensor in inputs.whole]
    group = inputs.cell.sizes["heads"] // inputs.cell.sizes["key heads"]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if group > 1:
            key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    with (
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)),
        sdpa_kernel(getattr(SDPBackend, backend)),
    ):
        yield Provider(_step(attend, buffers), "zigzag", exact=False)


def _one(inputs: Inputs) -> Provider:
    if inputs.cell.sizes["L"] > ONE_GPU_MOST:
        raise Unavailable(f"over {ONE_GPU_MOST:,} tokens")
    return Provider(_step(inputs.attend, inputs.whole), "whole")


ONE = "one rank alone"
MAKERS: dict[str, Callable[[Inputs], contextlib.AbstractContextManager[Provider]]] = {
    OURS: lambda inputs: contextlib.nullcontext(_ours(inputs, "auto")),
    f"{OURS}, Ulysses": lambda inputs: contextlib.nullcontext(_ours(inputs, "ulysses")),
    f"{OURS}, gathered keys": lambda inputs: contextlib.nullcontext(_ours(inputs, "gathered")),
    "torch, flash, allgather": lambda inputs: _torchs(inputs, "FLASH_ATTENTION", "allgather"),
    "torch, flash, alltoall": lambda inputs: _torchs(inputs, "FLASH_ATTENTION", "alltoall"),
    "torch, cuDNN, allgather": lambda inputs: _torchs(inputs, "CUDNN_ATTENTION", "allgather"),
    "torch, cuDNN, alltoall": lambda inputs: _torchs(inputs, "CUDNN_ATTENTION", "alltoall"),
    ONE: lambda inputs: contextlib.nullcontext(_one(inputs)),
}

# --- one cell ----------------------------------------------------------------------------------------------------------------


def _agreed(value: object) -> list[object]:
    """What each rank has."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _sample(step: Callable[[], Tensor], device: str) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        took = 1e-3 * begin.elapsed_time(end)
    else:
        start = time.perf_counter()
        step()
        took = time.perf_counter() - start
    return max(_agreed(took))


def _peak(step: Callable[[], Tensor], device: str) -> int:
    """Bytes that a step holds at its peak beyond what was there before, on the rank that holds most."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return max(_agreed(torch.cuda.max_memory_allocated() - before))


def _is_right(out: Tensor, truth: Tensor, provider: Provider) -> bool:
    if provider.exact:
        return torch.equal(out, truth)
    return bool((out - truth).abs().max() <= PEER_TOLERANCE[truth.dtype] * truth.abs().max())


def measure(cell: Cell, device: str, rounds: int) -> dict:
    result, inputs, times = cell.head(), Inputs(cell, device), {}
    with torch.no_grad():
        whole = inputs.attend(*inputs.whole[:3])
    truths = {layout: shard([whole], inputs.dim, layout=layout)[0] for layout in ("zigzag", "contiguous")} | {"whole": whole}
    # One after the other: torch's context manager changes what scaled_dot_product_attention is, and buffers are large.
    for name, make in MAKERS.items():
        try:
            with make(inputs) as provider:
                right = _agreed(_is_right(provider.step(), truths[provider.layout], provider))
                if not all(right):
                    if name.startswith(OURS):
                        raise AssertionError(f"{cell.kind} ({cell.label}), {name}: wrong on ranks {right}")
                    raise Unavailable("wrong here")
                peak = _peak(provider.step, device)
                times[name] = [_sample(provider.step, device) for _ in range(rounds)]
        except Unavailable as why:
            result["unavailable"][name] = str(why)
            continue
        except (RuntimeError, ImportError) as error:
            if name.startswith(OURS):
                raise
            result["unavailable"][name] = str(error).splitlines()[0][:200]
            continue
        result["providers"][name] = {"ms": 1e3 * statistics.median(times[name]), "best_ms": 1e3 * min(times[name])}
        result["providers"][name] |= {"peak_bytes": peak, "rounds": rounds}
    if one := result["providers"].get(ONE):
        for entry in (entry for name, entry in result["providers"].items() if name != ONE):
            entry["share_of_ideal"] = one["ms"] / dist.get_world_size() / entry["ms"]
    return result


# --- the run -----------------------------------------------------------------------------------------------------------------


def line(result: dict) -> str:
    parts = []
    for name, entry in result["providers"].items():
        share = f" ({entry['share_of_ideal']:.2f})" if "share_of_ideal" in entry else ""
        parts.append(f"{name} {entry['ms']:.2f}{share}")
    parts += [f"{name} unavailable ({why[:60]})" for name, why in result["unavailable"].items()]
    return f"{result['kind']:18} {result['case']:44} {'; '.join(parts)}"


def run(quick: bool, match: str | None, rounds: int, facts: dict, path: Path) -> int:
    """On every rank; the first one writes the record and speaks. Returns 1 if a result was wrong."""
    device = "cuda" if torch.cuda.is_available() and not quick else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    facts = facts | {"ranks": dist.get_world_size()}
    if device == "cuda":
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        with contextlib.ExitStack() as stack:
            if dist.get_rank():
                path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "record.json"
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
                stack.enter_context(contextlib.redirect_stderr(sys.stdout))
            cells = harness.chosen(QUICK if quick else CELLS, None, match)
            return harness.run("distributed", cells, lambda cell: measure(cell, device, rounds), line, facts, path)
    finally:
        dist.destroy_process_group()
