"""The benchmarks' entry: python -m flash_online bench COMMAND; --help names the commands, COMMAND --help its flags."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
# A built checkout measures itself, even if another package is installed; other checkouts measure the installed package.
BUILT_HERE = (ROOT / "flash_online" / "libflash_online.so").is_file()
sys.path.insert(0 if BUILT_HERE else len(sys.path), str(ROOT))

from benchmarks import distributed, docs, float8_accuracy, linear, machine, models, rows, scaling, training  # noqa: E402
from benchmarks.attention import cases as attention_cases  # noqa: E402
from benchmarks.attention import float8 as attention_float8  # noqa: E402
from benchmarks.attention import measure as attention  # noqa: E402
from benchmarks.attention import peers as attention_peers  # noqa: E402
from benchmarks.cases import ODD, ODD_QUICK  # noqa: E402
from benchmarks.cuda_peers import CUDA_PEERS  # noqa: E402
from benchmarks.decode import cases as decode_cases  # noqa: E402
from benchmarks.decode import measure as decode  # noqa: E402
from benchmarks.decode import peers as decode_peers  # noqa: E402
from benchmarks.family import measure as family  # noqa: E402
from benchmarks.paper import measure as paper  # noqa: E402
from benchmarks.peers import PEERS  # noqa: E402
from benchmarks.summary import OURS, odd_targets  # noqa: E402


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def add_record(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that writes a record."""
    parser.add_argument("--out", type=Path, help="the record; none: the one in benchmarks/results that the docs show")
    parser.add_argument("--quick", action="store_true", help="a few small cases instead; needs --out")
    parser.add_argument("--note", help="a remark for the record, shown above its tables")


def add_measuring(parser: argparse.ArgumentParser, seconds: float | None) -> None:
    """The flags of every command that times; `seconds` is the least time to sample a case, None if only rounds count."""
    add_record(parser)
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help="least time to sample a case")
    parser.add_argument("--rounds", type=int, default=5, help="least rounds of a case")


def add_choice(parser: argparse.ArgumentParser, families: list[str], providers: list[str] | None = None) -> None:
    """The flags of a command with many cases, and with peers: a subset needs a separate record."""
    parser.add_argument("--cases", nargs="+", choices=families, help="only these families; needs --out")
    parser.add_argument("--match", help="only cases whose kind, label and dtype have this in them; needs --out")
    if providers is not None:
        parser.add_argument("--providers", nargs="+", choices=providers, help="only these, in addition to ours; needs --out")
    parser.add_argument("--list", action="store_true", help="print the cases, measure nothing")


def add_fa3(parser: argparse.ArgumentParser) -> None:
    variable = attention_peers.FA3_VARIABLE
    parser.add_argument("--fa3", help=f"FlashAttention-3's binary; default: the value of {variable}")


def run_rows(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    cases = rows.chosen(options.device, options.cases, options.match, options.quick)
    if options.list:
        print("\n".join(f"{c.family:13} {c.label:38} {str(c.dtype)[6:]:8} {c.reason}" for c in cases))
        return 0
    path = out_of(parser, options, options.device, len(cases))
    return rows.run(cases, options.device, facts_of(options, options.device), path, options.providers, options.keep_memory)


def run_odd(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    cases = rows.harness.chosen(ODD_QUICK if options.quick else ODD, options.cases, options.match)
    if options.list:
        print("\n".join(f"{c.family:13} {c.label:38} {str(c.dtype)[6:]}" for c in cases))
        return 0
    path, device = out_of(parser, options, "odd", len(cases)), gpu_unless_quick(parser, options)
    return rows.run(cases, device, facts_of(options, device), path, options.providers, judge=odd_targets)


def run_attention(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    cells = attention.chosen(options.cases, options.match, options.quick, options.kernel, options.sparse)
    if options.list:
        print("\n".join(f"{c.family:9} {c.kind:26} {c.label}, {str(c.dtype)[6:]}" for c in cells))
        return 0
    device, name = gpu_unless_quick(parser, options), "sparse" if options.sparse else "attention"
    if options.kernel and options.sparse and not options.out:
        parser.error("--kernel with --sparse needs --out: no page shows such a record")
    if options.kernel:  # a record per GPU: one must not replace another
        name = f"{name}_{options.kernel}_{machine.in_a_file_name(machine.device_name(device))}"
    path = out_of(parser, options, name, len(cells))
    return attention.run(cells, device, facts_of(options, device), path, options.providers)


def run_decode(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    cells = decode.chosen(options.cases, options.match, options.quick)
    if options.list:
        print("\n".join(f"{c.family:8} {c.kind:22} {c.label}, {str(c.dtype)[6:]}" for c in cells))
        return 0
    path, device = out_of(parser, options, "decode", len(cells)), gpu_unless_quick(parser, options)
    return decode.run(cells, device, facts_of(options, device), path, options.providers)


def run_accuracy(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    cases = float8_accuracy.harness.chosen(float8_accuracy.cases(options.quick), options.cases, options.match)
    if options.list:
        print("\n".join(f"{c.family:10} {c.label}" for c in cases))
        return 0
    path, device = out_of(parser, options, "accuracy", len(cases)), gpu_unless_quick(parser, options)
    return float8_accuracy.run(cases, device, facts_of(options, device), path)


def run_training(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    path, device = out_of(parser, options, "training"), gpu_unless_quick(parser, options)
    return training.run(device, facts_of(options, device), path)


def run_models(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    path, device = out_of(parser, options, "models"), gpu_unless_quick(parser, options)
    return models.run(device, facts_of(options, device), path)


def run_paper(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    path = out_of(parser, options, "paper")
    return paper.run(options.quick, facts_of(options, default_device()), path)


def run_family(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    path, profiler = out_of(parser, options, "family"), shutil.which(options.ncu)
    if not profiler and not options.without_traffic:
        parser.error(f"there is no {options.ncu} to count bytes with (--ncu names it); --without-traffic measures times alone")
    return family.run(options.quick, facts_of(options, default_device()), path, None if options.without_traffic else profiler)


def run_linear(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    cases = linear.cases(options.rows, options.width, options.classes, options.dtype, options.quick)
    path = out_of(parser, options, "linear")
    return linear.run(cases, options.device, facts_of(options, options.device), path, options.providers, options.chunks)


def run_distributed(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it on every rank: torchrun --nproc-per-node N -m flash_online bench distributed")
    path, device = out_of(parser, options, "distributed"), gpu_unless_quick(parser, options)
    return distributed.run(options.quick, options.match, options.rounds, options.graphs, facts_of(options, device), path)


def run_scaling(_: argparse.ArgumentParser, __: argparse.Namespace) -> int:
    return scaling.run()


def run_docs(_: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    return docs.run(options.check, options.figures)


def out_of(parser: argparse.ArgumentParser, options: argparse.Namespace, name: str, count: int = 1) -> Path:
    """The path of the record. The committed records hold every case and provider."""
    flags = ("quick", "cases", "match", "providers", "chunks", "without_traffic")
    partial = [flag for flag in flags if getattr(options, flag, None)]
    if partial and not options.out:
        parser.error(f"--{partial[0].replace('_', '-')} needs --out, since the committed records hold everything")
    if not count:
        parser.error("no case is chosen")
    return options.out or machine.RESULTS / f"{name}.json"


def gpu_unless_quick(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    if not torch.cuda.is_available() and not options.quick:
        parser.error(f"{options.command} needs a CUDA GPU; with --quick it runs without one")
    return default_device()


def facts_of(options: argparse.Namespace, device: str) -> dict:
    chosen = {
        name: getattr(options, name)
        for name in ("kernel", "seconds", "rounds", "note")
        if getattr(options, name, None) is not None
    }
    return machine.environment(device) | chosen


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    formatter = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    whole = argparse.ArgumentParser(prog="python -m flash_online bench", description=__doc__.splitlines()[0])
    commands = whole.add_subparsers(dest="command", required=True)
    by_name = {}

    def add(name: str, run, text: str) -> argparse.ArgumentParser:
        by_name[name] = commands.add_parser(name, help=text, description=text, **formatter)
        by_name[name].set_defaults(run=run)
        return by_name[name]

    command = add("rows", run_rows, "row functions, and attention on the CPU, against torch and, on CUDA, quack and Liger")
    command.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    add_measuring(command, 1.5)
    peers = dict.fromkeys(name for table in (PEERS, CUDA_PEERS) for of_one in table.values() for name in of_one)
    add_choice(command, sorted(PEERS), [name for name in peers if name != OURS])
    command.add_argument("--keep-memory", action="store_true", help="CPU: malloc keeps freed memory instead of returning it")
    command = add("odd", run_odd, "row functions on a GPU, of rows of any width, against torch, torch.compile, Liger and quack")
    add_measuring(command, 0.1)
    add_choice(command, sorted({case.family for case in ODD}), [name for name in peers if name != OURS])
    command = add(
        "attention", run_attention, "attention on a GPU, cell by cell, against FA3, FA4, cuDNN, torch and FlexAttention"
    )
    add_measuring(command, 0.3)
    groups = dict.fromkeys(cell.family for cell in attention_cases.GENERAL)
    named = attention_cases.CELLS | attention_cases.SPARSE | attention_cases.IN_FLOAT8 | groups
    add_choice(command, list(named), [*attention_peers.PEERS, *attention_float8.PEERS])
    add_fa3(command)
    general = (
        "only the general kernels, which every GPU but Hopper's runs anyway: cells of their own against FlashAttention-2, or "
        "those of --sparse against FlexAttention"
    )
    command.add_argument("--kernel", choices=("sm80",), help=general)
    command.add_argument("--sparse", action="store_true", help="the cells with spans and lists of blocks instead of all others")
    command = add("decode", run_decode, "attention over cached keys on a GPU, against FA3, cuDNN, torch and FlashInfer")
    add_measuring(command, 0.3)
    add_choice(command, list(decode_cases.CELLS), decode_peers.PEERS)
    add_fa3(command)
    text = "float8_attention's errors: by head dim, length and inputs; needles; a diffusion transformer's results"
    command = add("accuracy", run_accuracy, text)
    add_record(command)
    add_choice(command, list(float8_accuracy.MEASURES))
    command = add("training", run_training, "a training step of 12 layers, attention from each provider")
    add_measuring(command, None)
    add_fa3(command)
    command = add(
        "models", run_models, "models of transformers: prefill, training step, generation; each implementation of attention"
    )
    add_measuring(command, None)
    command = add("paper", run_paper, "the kernels of the online-softmax paper against ours; needs nvcc")
    add_measuring(command, 1.5)
    command = add("family", run_family, "the organisations of FlashAttention-1 and -2 against Triton, torch, ours; needs nvcc")
    add_measuring(command, 0.5)
    add_fa3(command)
    command.add_argument("--ncu", default="ncu", help="Nsight Compute's program, which counts the bytes that kernels move")
    command.add_argument("--without-traffic", action="store_true", help="times only, without a profiler; needs --out")
    command = add("linear", run_linear, "linear_cross_entropy against torch's and torch.compile's, then by its parts")
    command.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    add_measuring(command, 1.0)
    command.add_argument("--rows", nargs="+", type=int, default=[4096, 16384])
    command.add_argument("--width", type=int, default=4096)
    command.add_argument("--classes", type=int, default=128256)
    command.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    command.add_argument("--providers", nargs="+", choices=linear.PEERS, help="only these, in addition to ours; needs --out")
    command.add_argument("--chunks", nargs="+", type=int, default=[], help="other budgets of a chunk of logits, in MiB")
    command = add("distributed", run_distributed, "attention of a sequence over the ranks of torchrun, against torch's")
    add_measuring(command, None)
    command.add_argument("--match", help="only cases whose kind, label and dtype have this in them; needs --out")
    command.add_argument("--graphs", action="store_true", help="add CUDA graphs of ours to the record that is there")
    add("scaling", run_scaling, "context parallelism on paper: communication simulated against computation")
    command = add("docs", run_docs, "every table and figure of the docs, from the committed records")
    command.add_argument("--check", action="store_true", help="write nothing, say whether the tables are up to date")
    command.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures", help="the figures' folder")
    return whole, by_name


def main() -> int:
    whole, by_name = parsers()
    options = whole.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler for memory prints two lines per call
    if getattr(options, "fa3", None):
        os.environ[attention_peers.FA3_VARIABLE] = options.fa3
    if getattr(options, "kernel", None):
        os.environ[attention_peers.KERNEL_VARIABLE] = options.kernel
    return options.run(by_name[options.command], options)


if __name__ == "__main__":
    sys.exit(main())
