"""`python -m flash_online demo`: compares error, time and memory of attention, softmax and cross-entropy with torch's, and
trains a small transformer with both.

Writes training.png (two loss curves, memory over length) and demo.json (every number printed) into the output folder.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_online.functional as our_functional

from . import _info, testing
from ._policy import strict

# Modules of the standard library that are a single file in every Python since 3.10: about 1.3 million characters.
CORPUS = (
    "argparse ast configparser difflib fractions heapq inspect pickle random shutil statistics subprocess tarfile textwrap "
    "threading typing"
).split()

# Allowed relative difference of the two final losses, each averaged over the last steps. The runs differ by rounding only,
# which training may amplify; 5e-8 was seen on CPUs after 300 steps.
LOSS_TOLERANCE = 1e-3
AVERAGED_STEPS = 20


def require_extras():
    try:
        import matplotlib
        import tqdm
    except ImportError as missing:
        raise SystemExit(f"the demo needs matplotlib and tqdm ({missing}): pip install matplotlib tqdm") from None
    matplotlib.use("Agg")
    # In a log file the bar prints a line every 15 seconds; in a terminal it moves.
    return functools.partial(tqdm.tqdm, mininterval=0.1 if sys.stderr.isatty() else 15, dynamic_ncols=True)


class Steps:
    """Prints a line for every step of the demo when it begins: its number, the time since the start, and what is done."""

    def __init__(self, count: int):
        self.count, self.begun, self.start = count, 0, time.perf_counter()

    def __call__(self, what: str) -> None:
        self.begun += 1
        minutes, seconds = divmod(int(self.seconds()), 60)
        print(f"[{self.begun:{len(str(self.count))}}/{self.count}] {minutes}:{seconds:02}  {what}", flush=True)

    def seconds(self) -> float:
        return time.perf_counter() - self.start


# --- Part one: error, time and memory --------------------------------------------------------------------------------------


@dataclass
class Measurement:
    function: str
    size: str
    length: int
    device: str
    provider: str
    error: float  # the largest of (max|result - truth| / max|truth|) over the output and the gradients; truth in float64
    seconds: float  # forward and backward, median
    extra_bytes: int  # peak of torch's allocator beyond the inputs; output and gradients included


@dataclass
class Problem:
    """Inputs that require grad, a gradient for the output, and the providers that map the inputs to the output."""

    function: str
    size: str
    length: int
    inputs: list[Tensor]
    grad: Tensor
    providers: dict[str, Callable[..., Tensor]]
    truth: Callable[[list[Tensor], Tensor], list[Tensor]]  # float64 (inputs, grad) -> output and gradients

    def run(self, provider: str) -> list[Tensor]:
        out = self.providers[provider](*self.inputs)
        return [out.detach(), *torch.autograd.grad(out, self.inputs, self.grad)]


def attention_truth(inputs: list[Tensor], grad: Tensor, chunk: int = 512) -> list[Tensor]:
    """Causal attention and its gradients, computed one chunk of queries at a time so that a long sequence fits in memory."""
    query, key, value = inputs
    length, head_dim = query.shape[-2:]
    outs, positions = [], torch.arange(length, device=query.device)
    grads = [torch.zeros_like(t) for t in inputs]
    for begin in range(0, length, chunk):
        rows = slice(begin, begin + chunk)
        leaves = [t.detach().requires_grad_() for t in (query[..., rows, :], key, value)]
        scores = leaves[0] @ leaves[1].mT / head_dim**0.5
        hidden = positions[None, :] > positions[rows, None]
        out = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ leaves[2]
        chunk_grads = torch.autograd.grad(out, leaves, grad[..., rows, :])
        outs.append(out.detach())
        grads[0][..., rows, :] = chunk_grads[0]
        grads[1] += chunk_grads[1]
        grads[2] += chunk_grads[2]
    return [torch.cat(outs, -2), *grads]


def attention_problem(length: int, device: str, generator: torch.Generator) -> Problem:
    batch, heads, head_dim = 1, 4, 64
    query, key, value, grad = (torch.randn(batch, heads, length, head_dim, generator=generator).to(device) for _ in range(4))

    def torch_math(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return torch_functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Problem(
        "attention",
        f"B {batch}  H {heads}  L {length}  E {head_dim}  causal",
        length,
        [t.requires_grad_() for t in (query, key, value)],
        grad,
        {
            "torch, math": torch_math,
            "torch, default": lambda q, k, v: torch_functional.scaled_dot_product_attention(q, k, v, is_causal=True),
            "flash_online": lambda q, k, v: our_functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        },
        attention_truth,
    )


def by_autograd(function):
    """A function (inputs, grad) -> [output, *gradients], using torch's autograd."""

    def truth(inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    return truth


def softmax_problem(length: int, device: str, generator: torch.Generator) -> Problem:
    rows = max(1, 2**21 // length)
    x, grad = (torch.randn(rows, length, generator=generator).to(device) for _ in range(2))
    return Problem(
        "softmax",
        f"{rows} rows of {length}",
        length,
        [(4 * x).requires_grad_()],
        grad,
        {
            "torch": lambda x: torch_functional.softmax(x, -1),
            "flash_online": lambda x: our_functional.softmax(x, -1),
        },
        by_autograd(lambda x: torch.softmax(x, -1)),
    )


def cross_entropy_problem(classes: int, device: str, generator: torch.Generator) -> Problem:
    rows = max(1, 2**22 // classes)
    x = torch.randn(rows, classes, generator=generator).to(device)
    target = torch.randint(classes, (rows,), generator=generator).to(device)
    return Problem(
        "cross_entropy",
        f"{rows} rows of {classes}",
        classes,
        [(4 * x).requires_grad_()],
        torch.ones((), device=device),
        {
            "torch": lambda x: torch_functional.cross_entropy(x, target),
            "flash_online": lambda x: our_functional.cross_entropy(x, target),
        },
        by_autograd(lambda x: torch_functional.cross_entropy(x, target)),
    )


def best_device(problem_of, asked: str) -> str:
    """CUDA if there is a device and this build has kernels for the function of this problem, else the CPU."""
    if asked != "auto":
        return asked
    if not torch.cuda.is_available():
        return "cpu"
    try:
        with strict():
            problem_of(64, "cuda", torch.Generator().manual_seed(0)).run("flash_online")
    except (RuntimeError, NotImplementedError):
        return "cpu"
    return "cuda"


def measure(problem: Problem, provider: str, truth: list[Tensor], seconds: float) -> Measurement:
    device = problem.grad.device.type
    extra_bytes = testing.peak_extra_bytes(lambda: problem.run(provider), device=device)
    error = max(testing.error(r, t).max / t.abs().max().item() for r, t in zip(problem.run(provider), truth, strict=True))
    timing = testing.time_call(lambda: problem.run(provider), seconds=seconds, least_runs=3, device=device)
    return Measurement(problem.function, problem.size, problem.length, device, provider, error, timing.median, extra_bytes)


def plan_measurements(lengths: Sequence[int]) -> list[tuple[Callable[..., Problem], int]]:
    """The problems to measure, as functions that make them and their lengths."""
    return [
        *((attention_problem, n) for n in lengths),
        *((softmax_problem, n) for n in (128, 4096, 131072)),
        *((cross_entropy_problem, n) for n in (1024, 32768, 131072)),
    ]


def measure_all(plan, asked_device: str, seed: int, seconds: float, step: Steps) -> list[Measurement]:
    devices = {problem_of: best_device(problem_of, asked_device) for problem_of, _ in plan}
    results = []
    for problem_of, length in plan:
        problem = problem_of(length, devices[problem_of], torch.Generator().manual_seed(seed))
        step(f"measuring {problem.function} on {devices[problem_of]}: {problem.size}")
        truth = problem.truth([t.detach().double() for t in problem.inputs], problem.grad.double())
        results += [measure(problem, provider, truth, seconds) for provider in problem.providers]
    return results


def human_time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def human_bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"


def print_table(results: list[Measurement]) -> None:
    print(
        "\nfloat32, forward and backward together. Error: against float64, the worst of output and gradients, relative to the"
    )
    print("largest entry. Memory: the peak that torch's allocator held beyond the inputs, output and gradients included.\n")
    print(f"{'':52} {'':15} {'error':>9} {'time':>10} {'memory':>11}")
    last = None
    for r in results:
        label = f"{r.function} on {r.device}:  {r.size}"
        print(
            f"{label if label != last else '':52} {r.provider:15} {r.error:9.1e} {human_time(r.seconds):>10} "
            f"{human_bytes(r.extra_bytes):>11}"
        )
        last = label


# --- Part two: a transformer on the standard library -----------------------------------------------------------------------


class CharacterTransformer(nn.Module):
    """A decoder-only transformer that takes all its functions from the module `functional`: torch's or ours."""

    def __init__(self, functional, characters: int, context: int, width: int = 96, heads: int = 3, layers: int = 3):
        super().__init__()
        self.functional, self.heads = functional, heads

        def weight(*shape):
            return nn.Parameter(torch.randn(*shape) * 0.5 / shape[-1] ** 0.5)

        self.embedding, self.position = weight(characters, width), weight(context, width)
        self.layers = nn.ModuleList(
            nn.ParameterDict(
                {
                    "qkv": weight(3 * width, width),
                    "project": weight(width, width),
                    "up": weight(4 * width, width),
                    "down": weight(width, 4 * width),
                }
            )
            for _ in range(layers)
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets int64 [batch, length] -> the mean cross-entropy, a scalar, in nats per character."""
        F = self.functional
        batch, length = tokens.shape
        x = F.embedding(tokens, self.embedding) + self.position[:length]
        width = x.shape[-1]
        for layer in self.layers:
            qkv = F.linear(F.layer_norm(x, (width,)), layer["qkv"]).view(batch, length, 3, self.heads, -1)
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + F.linear(mixed.transpose(1, 2).reshape(batch, length, width), layer["project"])
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,)), layer["up"])), layer["down"])
        logits = F.linear(F.layer_norm(x, (width,)), self.embedding)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_corpus() -> tuple[Tensor, list[str], int]:
    """(the text as int64 indices into its characters, the characters, the number of modules that the text consists of)."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text(encoding="utf-8") for name in CORPUS if (path := folder / f"{name}.py").is_file()]
    if not texts:
        raise SystemExit(
            f"the demo trains on the standard library's own source, but {folder} holds none of: {' '.join(CORPUS)}"
        )
    # Characters outside ASCII (a few names) become '?', so that the alphabet is equal in every version.
    text = "".join(texts).encode("ascii", "replace").decode()
    characters = sorted(set(text))
    index = {c: i for i, c in enumerate(characters)}
    return torch.tensor([index[c] for c in text]), characters, len(texts)


def train(
    functional, name: str, text: Tensor, characters: int, options, device: str, progress, steps: int
) -> tuple[list[float], float]:
    """(the loss of each step, the seconds of all steps). Weights and batches depend on the seed only. There are at most `steps`
    steps, and none begins once options.training_seconds are over."""
    torch.manual_seed(options.seed)
    model = CharacterTransformer(functional, characters, options.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.01)
    warm_up = max(1, options.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 1 - 0.9 * max(0, step - warm_up) / max(1, options.steps - warm_up))
    )
    generator = torch.Generator().manual_seed(options.seed)
    window = torch.arange(options.context + 1)
    losses, start = [], time.perf_counter()
    with progress(range(steps), desc=f"{name:23}", unit="step") as bar:
        for _ in bar:
            begin = torch.randint(len(text) - options.context, (options.batch, 1), generator=generator)
            batch = text[begin + window].to(device)
            loss = model(batch[:, :-1], batch[:, 1:])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            if time.perf_counter() - start > options.training_seconds:
                break
    return losses, time.perf_counter() - start


def final_loss(losses: list[float]) -> float:
    last = losses[-AVERAGED_STEPS:]
    return sum(last) / len(last)


def draw(losses: dict[str, list[float]], results: list[Measurement], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.3), layout="constrained")
    torchs, ours = losses["torch"], losses["flash_online"]
    left.plot(torchs, color="#e08214", lw=5, alpha=0.45, label=f"torch.nn.functional: {final_loss(torchs):.3f} at the end")
    left.plot(ours, color="#1f4e8c", lw=1.2, label=f"flash_online.functional: {final_loss(ours):.3f} at the end")
    left.set(xlabel="step", ylabel="loss, nats per character", title="one seed, trained twice")
    left.legend(frameon=False)
    styles = {"torch, math": ("#b5342b", "s"), "torch, default": ("#e08214", "o"), "flash_online": ("#1f4e8c", "^")}
    attention = [r for r in results if r.function == "attention"]
    for name, (color, marker) in styles.items():
        points = [(r.length, r.extra_bytes / 2**20) for r in attention if r.provider == name]
        right.loglog(*zip(*points, strict=True), color=color, marker=marker, label=name)
    lengths = sorted({r.length for r in attention})
    right.set_xticks(lengths, [str(n) for n in lengths])
    right.set_yscale("log", base=4)
    right.yaxis.set_major_formatter("{x:g}")
    right.minorticks_off()
    right.set(xlabel="length of the sequence", ylabel="MiB", title="attention forward and backward, peak memory")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] = ()) -> int:
    """Runs the demo. Returns the exit code of the process: 1 if the two trainings end with different losses."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_online demo",
        description=" ".join(__doc__.split("\n\n")[0].split()),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for training.png and demo.json")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA if it has kernels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096], help="for attention")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each measurement, three calls at least")
    parser.add_argument("--steps", type=int, default=300, help="steps of each training")
    parser.add_argument(
        "--training-seconds", type=float, default=240, help="the most for torch's training; ours takes as many steps"
    )
    parser.add_argument("--quick", action="store_true", help="a short look: lengths up to 1024, 40 steps")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=256, help="characters per sample")
    options = parser.parse_args(arguments)
    if options.quick:
        options.lengths, options.steps, options.seconds = [n for n in options.lengths if n <= 1024], min(options.steps, 40), 0.1
    progress = require_extras()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler that measures memory writes two lines per call
    options.out.mkdir(parents=True, exist_ok=True)
    plan = plan_measurements(options.lengths)
    step = Steps(len(plan) + 3)

    devices = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    devices += [f"{_info.processor()}, {torch.get_num_threads()} threads"]
    print(f"flash_online {_info.version()}, torch {torch.__version__}, {'; '.join(devices)}")
    print(f"{step.count} steps: about three minutes on two idle cores, less with --quick, and under ten on busy ones.\n")
    results = measure_all(plan, options.device, options.seed, options.seconds, step)
    print_table(results)

    text, characters, modules = read_corpus()
    training_device = best_device(attention_problem, options.device)
    print(
        f"\nA transformer learns {len(text):,} characters of {modules} modules of the standard library, on {training_device}:"
    )
    losses, seconds = {}, {}
    for name, functional in (("torch", torch_functional), ("flash_online", our_functional)):
        label = f"{name}{'.nn' if name == 'torch' else ''}.functional"
        steps = len(losses["torch"]) if losses else options.steps
        step(f"training through {label}, {steps} steps or {options.training_seconds:g} seconds")
        losses[name], seconds[name] = train(functional, label, text, len(characters), options, training_device, progress, steps)
    common = min(map(len, losses.values()))
    if common < options.steps:
        print(f"Time was up: the first {common} steps are compared. The seconds below are those of every step that was made.")
    losses = {name: values[:common] for name, values in losses.items()}

    picture = options.out / "training.png"
    step(f"drawing {picture}")
    draw(losses, results, picture)
    torch_loss, our_loss = (final_loss(losses[name]) for name in ("torch", "flash_online"))
    apart = abs(our_loss - torch_loss) / torch_loss
    agree = apart <= LOSS_TOLERANCE  # False for NaN
    averaged = min(AVERAGED_STEPS, len(losses["torch"]))
    print(
        f"\nfinal loss (mean of the last {averaged} steps): torch {torch_loss:.4f} in {seconds['torch']:.0f} s, "
        f"flash_online {our_loss:.4f} in {seconds['flash_online']:.0f} s: {apart:.0e} of it apart, "
        f"{'they agree' if agree else 'THEY DO NOT AGREE'} (tolerance {LOSS_TOLERANCE:g})"
    )
    numbers = {
        "versions": {"flash_online": _info.version(), "torch": torch.__version__, "python": platform.python_version()},
        "measurements": [asdict(r) for r in results],
        "losses": losses,
        "training_seconds": seconds,
        "final_losses_apart": apart,
    }
    (options.out / "demo.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"every number: {(options.out / 'demo.json').resolve()}")
    print(f"the figure:   {picture.resolve()} ({step.seconds():.0f} s in all)")
    print(f"try next:     {python_command()} -m flash_online {'trace 1 3 2 --plot walk.png' if agree else 'check'}")
    return 0 if agree else 1


def python_command() -> str:
    """The command for this Python: a relative path if it lies below the current folder."""
    python, here = Path(sys.executable), Path.cwd()
    return str(python.relative_to(here) if python.is_relative_to(here) else python)
