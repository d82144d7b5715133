"""linear_cross_entropy, forward and backward: time and memory beside torch's and torch.compile's, then part by part.

    python benchmarks/linear_cross_entropy.py                      # rows 4096 and 16384, width 4096, 128256 classes, bfloat16
    python benchmarks/linear_cross_entropy.py --chunks 256,512,768  # other budgets of a chunk of logits, in MiB
    python benchmarks/linear_cross_entropy.py --device cpu --rows 2048 --width 1024 --classes 32000

Times are medians of calls that each wait for the device; memory is the peak of torch's allocator beyond the two gradients.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as torch_functional

import flash_online
import flash_online.functional as our_functional
from flash_online import _linear_cross_entropy_ops
from flash_online.testing import peak_extra_bytes, time_call

MIB = 1 << 20
OPS = torch.ops.flash_online


def plain(x, w, target):
    return torch_functional.cross_entropy(torch_functional.linear(x, w), target)


def providers(names: list[str]):
    every = {
        "flash_online": our_functional.linear_cross_entropy,
        "torch": plain,
        "torch.compile": torch.compile(plain),
        "flash_online, four products": lambda x, w, t: flash_online.linear_cross_entropy(x, w, t, reduction="none").mean(),
        "torch's linear, our cross_entropy": lambda x, w, t: our_functional.cross_entropy(torch_functional.linear(x, w), t),
    }
    return {name: every[name] for name in every if any(name.startswith(n) for n in names)}


def whole(x, w, target, function, seconds: float) -> str:
    products = 3 * 2 * x.shape[0] * x.shape[1] * w.shape[0]

    def step():
        x.grad = w.grad = None
        function(x, w, target).backward()

    def forward():
        with torch.no_grad():
            function(x, w, target)

    device = x.device.type
    alone, both = (time_call(call, seconds=seconds, device=device).median for call in (forward, step))
    x.grad = w.grad = None
    extra = peak_extra_bytes(step, device=device) - x.element_size() * (x.numel() + w.numel())
    return (
        f"forward {1e3 * alone:8.2f} ms, with backward {1e3 * both:8.2f} ms, {products / both / 1e12:6.1f} TFLOP/s, "
        f"beyond the gradients {extra / MIB:7.0f} MiB"
    )


def parts(x, w, target, seconds: float):
    """The time of each part of a step, for all chunks."""
    device, dtype = x.device.type, x.dtype
    with torch.no_grad():
        rows, _ = _linear_cross_entropy_ops.chunk_plan(x.shape[0], w.shape[0], x.shape[1], dtype, device, dtype.itemsize == 2)
        chunks = -(-x.shape[0] // rows)
        pitch = _linear_cross_entropy_ops._pitch(w.shape[0], dtype, device)
        logits = x.new_zeros(rows, pitch)[:, : w.shape[0]]
        chunk, t = x[:rows], target[:rows]
        ones = torch.ones(rows, device=x.device)
        grad_input, grad_weight = torch.zeros_like(chunk), torch.zeros_like(w)
        one, other = torch.tensor(1.0, device=x.device), torch.tensor(1.0001, device=x.device)
        options = (t, None, -100, 0.0, False)
        calls = {
            "logits": (chunks, lambda: torch.mm(chunk, w.t(), out=logits)),
            "grad_input": (chunks, lambda: torch.mm(logits, w, out=grad_input)),
            "grad_linear_weight, first chunk": (1, lambda: torch.mm(logits.t(), chunk, out=grad_weight)),
            "grad_linear_weight, the others": (chunks - 1, lambda: grad_weight.addmm_(logits.t(), chunk)),
            "loss alone": (chunks, lambda: OPS.cross_entropy_forward(logits, t, None, -100, 0.0)),
            "gradient alone, in place": (chunks, lambda: OPS.cross_entropy_backward_(ones, None, logits, *options, False)),
            "loss and gradient, in place": (chunks, lambda: OPS.cross_entropy_backward_(ones, None, logits, *options, True)),
            "scale by 1": (1, lambda: OPS.scale_(grad_weight, one)),
            "scale by another number": (1, lambda: OPS.scale_(grad_weight, other)),
        }
        torch.mm(chunk, w.t(), out=logits)
        yield f"{chunks} chunks of {rows} rows, {logits.element_size() * rows * pitch / MIB:.0f} MiB each"
        for name, (count, call) in calls.items():
            if count:
                yield f"{name:32} {count:3} x {1e3 * time_call(call, seconds=seconds, device=device).median:8.3f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", default="4096,16384")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--classes", type=int, default=128256)
    parser.add_argument("--chunks", default="", help="budgets of a chunk of logits to try, in MiB")
    parser.add_argument("--match", default="flash_online,torch", help="beginnings of providers' names")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    options = parser.parse_args()
    dtype, device = getattr(torch, options.dtype), options.device
    torch.manual_seed(0)
    w = (torch.randn(options.classes, options.width, device=device) * options.width**-0.5).to(dtype).requires_grad_()
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, width {options.width}, {options.classes} classes, {options.dtype}")
    for rows in map(int, options.rows.split(",")):
        x = torch.randn(rows, options.width, device=device).to(dtype).requires_grad_()
        target = torch.randint(0, options.classes, (rows,), device=device)
        for title, function in providers(options.match.split(",")).items():
            budgets = [b for b in options.chunks.split(",") if b] if title == "flash_online" else []
            for budget in budgets or [""]:
                if budget:
                    _linear_cross_entropy_ops._CHUNK_BYTES[device] = int(budget) * MIB
                label = title + (f", chunks of {budget} MiB" if budget else "")
                try:
                    print(f"rows {rows:6} {label:36} {whole(x, w, target, function, options.seconds)}", flush=True)
                except torch.OutOfMemoryError:
                    print(f"rows {rows:6} {label:36} out of memory", flush=True)
                x.grad = w.grad = None
        for line in parts(x, w, target, options.seconds / 4):
            print(f"rows {rows:6}   {line}", flush=True)


if __name__ == "__main__":
    main()
