"""A training step compared with torch's default and FlashAttention-3: python -m flash_online bench training

Forward and backward pass of 12 layers of a decoder in bfloat16 (16 heads of 128, a feed-forward layer of four times the hidden
size), 8192 tokens, causal. Ours is used through `flash_online.override()` and, a second time, through torch's registry
(`integrations.torch_sdpa`); FA3 replaces the same function as override(). CUDA events time the step, and its part from query,
key and value to attention's output and back.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

import flash_online

from . import harness
from .attention.peers import FA3_VARIABLE, FA3Attention, load_fa3, registered
from .attention.summary import FA3
from .attention_pages import training_page
from .case import Case
from .summary import BY_REGISTRY, OURS, TORCH

LAYERS, HEADS, HEAD_DIM, TOKENS, LENGTHS = 12, 16, 128, 8192, (1024, 2048, 4096, 8192)
MAX_DISTANCE = 0.02  # relative, of result and gradients from torch's, for bfloat16 in 12 layers


class Watch:
    """EventTimer at the boundaries of attention, in both directions; none on the CPU."""

    def __init__(self, device: str):
        self.device, self.events = device, []

    def record(self) -> None:
        if self.device != "cuda":
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)

    def milliseconds(self) -> float:
        """The time of a finished step: events come in pairs, begin and end."""
        begins, ends = self.events[::2], self.events[1::2]
        return sum(begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True))


class _Border(torch.autograd.Function):
    @staticmethod
    def forward(ctx, watch, *tensors):
        ctx.watch = watch
        watch.record()
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx, *grads):
        ctx.watch.record()
        return None, *grads


class Layer(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.before_attention, self.before_feed_forward = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.project, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden, 4 * hidden, bias=False), nn.GELU(), nn.Linear(4 * hidden, hidden, bias=False)
        )

    def forward(self, x: Tensor, watch: Watch) -> Tensor:
        heads = self.project(self.before_attention(x)).unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        query, key, value = _Border.apply(watch, *heads)
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        (out,) = _Border.apply(watch, out)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.before_feed_forward(x))


@contextmanager
def _fa3():
    load_fa3()

    def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        tensors = (t.transpose(1, 2) for t in (query, key, value))
        options = {"softmax_scale": query.shape[-1] ** -0.5, "is_causal": is_causal, "softcap": 0.0}
        return FA3Attention.apply(*tensors, options, False).transpose(1, 2)

    with mock.patch.object(nn.functional, "scaled_dot_product_attention", attend):
        yield


def providers() -> dict[str, Callable]:
    settings = {TORCH: nullcontext, OURS: flash_online.override}
    if torch.cuda.is_available():
        settings[BY_REGISTRY] = registered
    return settings | ({FA3: _fa3} if os.environ.get(FA3_VARIABLE) else {})


def step(layers: nn.ModuleList, x: Tensor, grad: Tensor, watch: Watch) -> Tensor:
    layers.zero_grad()
    out = x
    for layer in layers:
        out = layer(out, watch)
    out.backward(grad)
    return out.detach()


def measure(case: Case, layers: nn.ModuleList, rounds: int, device: str) -> dict:
    batch, length = case.sizes.values()
    x = torch.randn(batch, length, HEADS * HEAD_DIM, device=device, dtype=layers[0].out.weight.dtype)
    grad, expected, taken = torch.randn_like(x), None, {}
    for name, setting in providers().items():
        with setting():
            results = [step(layers, x, grad, Watch(device)), layers[0].project.weight.grad.clone()]
        expected = expected or results
        for found, wanted in zip(results, expected, strict=True):
            distance = ((found - wanted).float().norm() / wanted.float().norm()).item()
            assert distance <= MAX_DISTANCE, f"{name} at L {length}: {distance:.3g} from {TORCH}"
        taken[name] = {"step_ms": [], "attention_ms": []}
    for _ in range(rounds if device == "cuda" else 0):
        for name, setting in providers().items():
            with setting():
                step(layers, x, grad, Watch(device))
                watch, begin, end = Watch(device), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                step(layers, x, grad, watch)
                end.record()
                end.synchronize()
            taken[name]["step_ms"].append(begin.elapsed_time(end))
            taken[name]["attention_ms"].append(watch.milliseconds())
    medians = {n: {k: statistics.median(v) for k, v in of_one.items() if v} for n, of_one in taken.items()}
    return case.head() | {"rounds": rounds, "providers": medians}


def line(result: dict) -> str:
    parts = (f"{name} " + " ".join(f"{k} {ms:.3g}" for k, ms in e.items()) for name, e in result["providers"].items())
    return f"{result['case']}: {'; '.join(parts)}"


def run(device: str, facts: dict, path: Path) -> int:
    """Measures on a GPU; on the CPU it checks itself with one small float32 step, without times."""
    torch.manual_seed(0)
    dtype, count, tokens, lengths = (
        (torch.bfloat16, LAYERS, TOKENS, LENGTHS) if device == "cuda" else (torch.float32, 1, 64, (32,))
    )
    layers = nn.ModuleList(Layer(HEADS * HEAD_DIM) for _ in range(count)).to(device, dtype)
    facts = facts | {"layers": count, "heads": HEADS, "head_dim": HEAD_DIM, "tokens": tokens}
    cases = [Case("training", {"B": tokens // length, "L": length}, dtype=dtype) for length in lengths]
    return harness.run(
        "training", cases, lambda case: measure(case, layers, facts["rounds"], device), line, facts, path, summary=training_page
    )
