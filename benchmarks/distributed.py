"""torchrun --nproc-per-node N -m flash_online bench distributed: attention of a sequence over N ranks, compared with torch,
ring-flash-attn and yunchang.

A cell is forward and backward of causal attention, every rank with its rows. Results are compared, bit by bit, with one process
on the whole sequence; its time over N is the ideal. A sample is several steps in sequence, as in training, on the slowest rank.
A twin of each method computes the same but receives nothing: the difference in time is exposed communication.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flash_online
from flash_online.distributed import _context_parallel as chooser
from flash_online.distributed import (
    _gathered,
    _ulysses,
    _ulysses_eager,
    context_parallel_attention,
    context_parallel_varlen_attention,
    shard,
)
from flash_online.distributed._group import group_of
from flash_online.integrations import torch_sdpa

from . import distributed_peers, harness
from .case import Case
from .peers import PEER_TOLERANCE, Unavailable
from .summary import BY_REGISTRY, OURS

HEAD_DIM = 128
LENGTHS = (8192, 32768, 131072, 524288)
HOST_LENGTH = 512  # a GPU has next to nothing to compute there: the time is the host's
ONE_GPU_MOST = 131072  # beyond, one GPU takes many seconds, and the gradients much of its memory
GRADIENTS_MOST = 32768  # up to here gradients are compared with one process's too
GRAPHS_MOST = 32768  # beyond, launches overlap without a CUDA graph
SAMPLE = 0.02  # least seconds of a sample, with at most SAMPLE_STEPS steps
SAMPLE_STEPS = 20
TIMEOUT = 100  # seconds that a rank waits for other ranks
DOCUMENTS = (64, 16384)  # of packed streams, in tokens: lengths are spread evenly over their logarithms


@dataclass(frozen=True)
class Cell(Case):
    @property
    def kind(self) -> str:
        return "packed documents" if "packed" in self.options else "a window" if "window" in self.options else "causal"


def _cells() -> list[Cell]:
    cells = []
    for heads, key_heads in ((32, 8), (16, 16)):
        for length in (HOST_LENGTH, *LENGTHS):
            sizes = {"L": length, "heads": heads, "key heads": key_heads}
            cells.append(Cell("causal", sizes))
            if length in (HOST_LENGTH, 32768, 131072):
                window = {"window": min(4096, length // 4)}
                cells += [Cell("window", sizes, window), Cell("packed", sizes, {"packed": True})]
    return sorted(cells, key=lambda cell: cell.sizes["L"])  # an interrupted run has most of the cells


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
        self.layout = "contiguous" if self.packed else "zigzag"
        if "window" in cell.options:
            self.options["window"] = (cell.options["window"], None)
        if self.packed:
            self.starts = _documents(length).to(device)

    def part(self, layout: str) -> list[Tensor]:
        return [tensor.contiguous() for tensor in shard(self.whole, self.dim, layout=layout)]

    def attend(self, *tensors: Tensor, **more: object) -> Tensor:
        """Attention of the whole sequence in one process."""
        if not self.packed:
            return flash_online.attention(*tensors, **self.options, **more)
        length = self.cell.sizes["L"]
        return flash_online.varlen_attention(*tensors, self.starts, self.starts, length, length, **self.options, **more)

    def chosen(self) -> str:
        """The method that "auto" chooses."""
        rows = self.cell.sizes["L"] // dist.get_world_size()
        heads = [self.cell.sizes[name] for name in ("heads", "key heads", "key heads")]
        shapes = (torch.empty(rows, 1, h, HEAD_DIM, dtype=self.cell.dtype, device="meta") for h in heads)
        return chooser.choose(*shapes, group_of(None), self.layout, True, True)

    def ideal_bytes(self) -> int:
        """Bytes of a rank's queries, keys, values, output and their gradients."""
        return sum(2 * tensor.numel() * tensor.element_size() for tensor in self.whole) // dist.get_world_size()

    def attend_on_ranks(self, *tensors: Tensor, method: str, **more: object) -> Tensor:
        words = {"method": method, "layout": self.layout, **self.options, **more}
        if not self.packed:
            return context_parallel_attention(*tensors, **words)
        return context_parallel_varlen_attention(*tensors, self.starts, max_seqlen=self.cell.sizes["L"], **words)


def _documents(length: int) -> Tensor:
    """The starts of documents with lengths spread evenly over their logarithms, the last one cut."""
    generator, (least, most) = torch.Generator().manual_seed(64), DOCUMENTS
    starts = [0]
    while starts[-1] < length:
        size = least * (most / least) ** torch.rand((), generator=generator).item()
        starts.append(min(starts[-1] + round(size), length))
    return torch.tensor(starts, dtype=torch.int32)


# --- providers ---------------------------------------------------------------------------------------------------------------


class Provider:
    """Forward and backward of a rank's rows, in `layout`. `exact`: the output must be bit-equal to one process's."""

    def __init__(self, call: Callable[..., Tensor], tensors: list[Tensor], layout: str, exact: bool = True):
        self.call, self.layout, self.exact, self.out = call, layout, exact, None
        *inputs, self.grad = tensors
        self.leaves = [tensor.detach().requires_grad_() for tensor in inputs]

    def clear(self) -> None:
        self.out = None
        for leaf in self.leaves:
            leaf.grad = None

    def step(self) -> None:
        self.clear()
        out = self.call(*self.leaves)
        out.backward(self.grad)
        self.out = out.detach()

    def input_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.leaves, self.grad))


def _ours(inputs: Inputs, method: str) -> Provider:
    call = partial(inputs.attend_on_ranks, method=method)
    return Provider(call, inputs.part(inputs.layout), inputs.layout)


@contextlib.contextmanager
def _twin(inputs: Inputs, method: str) -> Iterator[Provider]:
    """Ours with collectives that return a tensor of the right shape at once, and without the comparison of the ranks' calls.
    Its results are wrong."""
    if dist.get_world_size() == 1:
        raise Unavailable("one rank communicates nothing")
    kept: dict[tuple, Tensor] = {}

    def received(like: Tensor, *shape: int) -> Tensor:
        """Normal numbers: a kernel may be faster on zeros."""
        key = (like.dtype, shape)
        if key not in kept:
            is_bytes = like.dtype == torch.uint8  # a message: of bfloat16 numbers, or of float32 ones between the same
            size, dtype = ((shape[0] // 2,), torch.bfloat16) if is_bytes else (shape, like.dtype)
            kept[key] = torch.randn(size, dtype=dtype, device=like.device).view(like.dtype)
        return kept[key].detach()  # several autograd Functions return it

    def all_gather(tensor, group):
        return received(tensor, group.ranks * tensor.shape[0], *tensor.shape[1:])

    def reduce_scatter(tensor, group):
        return received(tensor, tensor.shape[0] // group.ranks, *tensor.shape[1:])

    def all_to_all(messages, *_):
        return received(messages, *messages.shape)

    def exchange(messages, sent, to_receive, group):
        return received(messages, sum(to_receive))

    with contextlib.ExitStack() as stack:
        for module, name, instead in (
            (_gathered, "start_all_gather", all_gather),
            (_gathered, "start_exchange", exchange),
            (_gathered, "start_reduce_scatter", reduce_scatter),
            (_gathered, "wait", lambda tensor: tensor),
            (_ulysses, "start_all_to_all", all_to_all),
            (_ulysses_eager, "all_to_all", all_to_all),
            (_ulysses, "wait", lambda tensor: tensor),
            (chooser, "checked_on_all_ranks", lambda group, call: call()[1]),
        ):
            stack.enter_context(mock.patch.object(module, name, instead))
        yield _ours(inputs, method)


@contextlib.contextmanager
def _graph(inputs: Inputs, method: str) -> Iterator[Provider]:
    """A CUDA graph of ours, collectives included."""
    if inputs.device != "cuda" or inputs.cell.sizes["L"] > GRAPHS_MOST:
        raise Unavailable(f"on GPUs, up to {GRAPHS_MOST:,} tokens alone")
    provider = _ours(inputs, method)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            provider.step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        provider.step()
    provider.step = graph.replay
    provider.clear = lambda: None
    yield provider
    torch.cuda.synchronize()
    graph.reset()


@contextlib.contextmanager
def _torchs(inputs: Inputs, backend: str, rotation: str, ours: bool = False) -> Iterator[Provider]:
    """torch's context_parallel: a ring, or keys gathered after one step. It has no grouped heads: keys are repeated. `ours`:
    torch's flash attention runs this package's kernels."""
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

    with contextlib.ExitStack() as stack:
        if ours:
            torch_sdpa.activate()
            stack.callback(torch_sdpa.restore)
        stack.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)))
        stack.enter_context(sdpa_kernel(getattr(SDPBackend, backend)))
        yield Provider(attend, buffers, "zigzag", exact=False)


@contextlib.contextmanager
def _peer(inputs: Inputs, name: str) -> Iterator[Provider]:
    """ring-flash-attn or yunchang, on FlashAttention-2's kernels."""
    if inputs.device != "cuda" or "window" in inputs.options or inputs.packed != (name == "llama3"):
        raise Unavailable(f"it takes {'packed documents' if name == 'llama3' else 'plain causal attention'} on GPUs alone")
    layout = "zigzag" if name == "zigzag" else "contiguous"
    tensors = inputs.part(layout)
    if name == "llama3":
        call = distributed_peers.llama3(inputs.starts)
    else:
        call = distributed_peers.zigzag if name == "zigzag" else distributed_peers.ulysses()
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    yield Provider(call, tensors, layout, exact=False)


def _one(inputs: Inputs) -> Provider:
    if inputs.cell.sizes["L"] > ONE_GPU_MOST:
        raise Unavailable(f"over {ONE_GPU_MOST:,} tokens")
    return Provider(inputs.attend, inputs.whole, "whole")


ONE = "one rank alone"
METHODS = {"ulysses": f"{OURS}, Ulysses", "gathered": f"{OURS}, gathered keys"}
TWINS = {method: f"{name}, receiving nothing" for method, name in METHODS.items()}
GRAPHS = {f"{name}, CUDA graph": method for method, name in METHODS.items()}
PEERS = {"zigzag": "ring-flash-attn, zigzag", "llama3": "ring-flash-attn, llama3", "ulysses": "yunchang, Ulysses"}
Maker = Callable[[Inputs], contextlib.AbstractContextManager[Provider]]
MAKERS: dict[str, Maker] = {
    METHODS["ulysses"]: lambda inputs: contextlib.nullcontext(_ours(inputs, "ulysses")),
    METHODS["gathered"]: lambda inputs: contextlib.nullcontext(_ours(inputs, "gathered")),
    ONE: lambda inputs: contextlib.nullcontext(_one(inputs)),
    TWINS["ulysses"]: lambda inputs: _twin(inputs, "ulysses"),
    TWINS["gathered"]: lambda inputs: _twin(inputs, "gathered"),
    "torch, flash, allgather": lambda inputs: _torchs(inputs, "FLASH_ATTENTION", "allgather"),
    "torch, flash, alltoall": lambda inputs: _torchs(inputs, "FLASH_ATTENTION", "alltoall"),
    "torch, cuDNN, allgather": lambda inputs: _torchs(inputs, "CUDNN_ATTENTION", "allgather"),
    "torch, cuDNN, alltoall": lambda inputs: _torchs(inputs, "CUDNN_ATTENTION", "alltoall"),
    PEERS["zigzag"]: lambda inputs: _peer(inputs, "zigzag"),
    PEERS["llama3"]: lambda inputs: _peer(inputs, "llama3"),
    PEERS["ulysses"]: lambda inputs: _peer(inputs, "ulysses"),
    f"torch, {BY_REGISTRY}": lambda inputs: _torchs(inputs, "FLASH_ATTENTION", "allgather", ours=True),
}


def _is_skipped(name: str, length: int) -> bool:
    """Where a step takes seconds, only the comparison providers run. torch's two rotations differ only in short cells."""
    if name.endswith("alltoall"):
        return length > GRADIENTS_MOST
    return length > ONE_GPU_MOST and (name in (*TWINS.values(), *PEERS.values()) or name.endswith(BY_REGISTRY))


# --- one cell ----------------------------------------------------------------------------------------------------------------


def _agreed(value: object) -> list[object]:
    """The values of all ranks."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class _Timer:
    """Seconds between construction and `stop`, on the device; `issued`: the host's seconds."""

    def __init__(self, device: str):
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else []
        dist.barrier()
        if self.events:
            torch.cuda.synchronize()
            self.events[0].record()
        self.start = time.perf_counter()

    def stop(self) -> float:
        self.issued = time.perf_counter() - self.start
        if not self.events:
            return self.issued
        self.events[1].record()
        self.events[1].synchronize()
        return 1e-3 * self.events[0].elapsed_time(self.events[1])


def _first(provider: Provider, device: str) -> tuple[float, int]:
    """Seconds of a step of the slowest rank, and the largest peak memory of a rank in bytes, inputs and results included."""
    provider.clear()
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - provider.input_bytes()
    timer = _Timer(device)
    provider.step()
    seconds = timer.stop()
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    every = _agreed((seconds, peak))
    return max(s for s, _ in every), max(p for _, p in every)


def _samples(provider: Provider, device: str, rounds: int, seconds: float) -> tuple[list[float], list[float]]:
    """`rounds` samples of seconds per step of the slowest rank, and of its host; `seconds` is the approximate step time."""
    steps = max(1, min(SAMPLE_STEPS, math.ceil(SAMPLE / seconds)))
    took, issued = [], []
    for _ in range(rounds):
        timer = _Timer(device)
        for _ in range(steps):
            provider.step()
        every = _agreed((timer.stop() / steps, timer.issued / steps))
        took.append(max(s for s, _ in every))
        issued.append(max(s for _, s in every))
    return took, issued


def _is_right(out: Tensor, truth: Tensor, provider: Provider) -> bool:
    if provider.exact:
        return torch.equal(out, truth)
    return bool((out - truth).abs().max() <= PEER_TOLERANCE[truth.dtype] * truth.abs().max())


def _gradients(inputs: Inputs) -> dict[str, dict[str, float]]:
    """For each method the largest difference of its gradients, with deterministic=True, from one process's, relative to their
    largest element: 0 if bit-equal on all ranks."""
    one = Provider(partial(inputs.attend, deterministic=True), inputs.whole, "whole")
    one.step()
    truths = shard([leaf.grad for leaf in one.leaves], inputs.dim, layout=inputs.layout)
    found = {}
    for method, name in METHODS.items():
        call = partial(inputs.attend_on_ranks, method=method, deterministic=True)
        ours = Provider(call, inputs.part(inputs.layout), inputs.layout)
        ours.step()
        apart = []
        for leaf, truth in zip(ours.leaves, truths, strict=True):
            difference = (leaf.grad.double() - truth.double()).abs().max() / truth.double().abs().max()
            apart.append(0.0 if torch.equal(leaf.grad, truth) else max(difference.item(), 1e-30))
        found[name] = dict(zip(("query", "key", "value"), map(max, zip(*_agreed(apart), strict=True)), strict=True))
    return found


def measure(cell: Cell, device: str, rounds: int, makers: dict[str, Maker]) -> dict:
    result, inputs = cell.head(), Inputs(cell, device)
    long = cell.sizes["L"] > ONE_GPU_MOST
    with torch.no_grad():
        whole = inputs.attend(*inputs.whole[:3])
    truths = {layout: shard([whole], inputs.dim, layout=layout)[0] for layout in ("zigzag", "contiguous")} | {"whole": whole}
    # One at a time: torch's context manager replaces scaled_dot_product_attention, and buffers are large.
    for name, make in makers.items():
        if _is_skipped(name, cell.sizes["L"]):
            continue
        try:
            with make(inputs) as provider:
                if not long:  # exclude a first step's allocation and compilation
                    provider.step()
                seconds, peak = _first(provider, device)
                right = _agreed(_is_right(provider.out, truths[provider.layout], provider))
                if name not in TWINS.values() and not all(right):
                    if name.startswith(OURS):
                        raise AssertionError(f"{cell.kind} ({cell.label}), {name}: wrong on ranks {right}")
                    raise Unavailable("wrong here")
                took, issued = _samples(provider, device, 1 if long else rounds, seconds)
        except Unavailable as why:
            result["unavailable"][name] = str(why)
            continue
        except (RuntimeError, ImportError) as error:
            if name.startswith(OURS) and name not in GRAPHS:
                raise
            result["unavailable"][name] = (str(error).splitlines() or [type(error).__name__])[0][:200]
            continue
        result["providers"][name] = {"ms": 1e3 * statistics.median(took), "best_ms": 1e3 * min(took), "rounds": len(took)}
        if name in TWINS.values():
            continue
        result["providers"][name] |= {"host_ms": 1e3 * statistics.median(issued)}
        if device == "cuda" and name not in GRAPHS:
            result["providers"][name] |= {"peak_bytes": peak, "share_of_least_bytes": peak / inputs.ideal_bytes()}
    if METHODS["ulysses"] in makers:
        result["auto"] = inputs.chosen()
        if cell.sizes["L"] <= GRADIENTS_MOST:
            result["gradients"] = _gradients(inputs)
    return result


def shares(result: dict) -> dict:
    """The result with the share of ideal scaling for each provider that ran over the ranks."""
    if one := result["providers"].get(ONE):
        for name, entry in result["providers"].items():
            if name != ONE:
                entry["share_of_ideal"] = one["ms"] / dist.get_world_size() / entry["ms"]
    return result


# --- the run -----------------------------------------------------------------------------------------------------------------


def line(result: dict) -> str:
    parts = []
    for name, entry in result["providers"].items():
        share = f" ({entry['share_of_ideal']:.2f})" if "share_of_ideal" in entry else ""
        parts.append(f"{name} {entry['ms']:.2f}{share}")
    parts += [f"{name} unavailable ({why[:60]})" for name, why in result["unavailable"].items()]
    parts += [f"{name} gradients {apart}" for name, apart in result.get("gradients", {}).items()]
    return f"{result['kind']:18} {result['case']:44} {'; '.join(parts)}"


def run(quick: bool, match: str | None, rounds: int, graphs: bool, facts: dict, path: Path) -> int:
    """Runs on every rank; the first rank writes the record and prints. Returns 1 if a result was wrong. `graphs`: measure only
    CUDA graphs of ours and add their times to the existing record."""
    device = "cuda" if torch.cuda.is_available() and not quick else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
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
            if graphs:
                return _add_graphs(cells, device, rounds, facts, path)
            return harness.run(
                "distributed", cells, lambda cell: shares(measure(cell, device, rounds, MAKERS)), line, facts, path
            )
    finally:
        dist.destroy_process_group()


def _add_graphs(cells: list[Cell], device: str, rounds: int, facts: dict, path: Path) -> int:
    cells = [cell for cell in cells if cell.sizes["L"] <= GRAPHS_MOST]
    makers = {name: partial(_graph, method=method) for name, method in GRAPHS.items()}
    before = facts | {"results": []} if dist.get_rank() else json.loads(path.read_text())
    known = {(result["kind"], result["case"]): result for result in before["results"]}

    def add(cell: Cell) -> dict:
        result = measure(cell, device, rounds, makers)
        whole = known.get((cell.kind, cell.label), result)
        for what in ("providers", "unavailable"):
            whole[what] |= result[what]
        return shares(whole)

    return harness.run("distributed", cells, add, line, facts, path, lambda record, done: before)
