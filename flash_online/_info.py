"""Describes this installation (versions, devices, kernels) for `python -m flash_online info`, the demo and the benchmarks."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from . import _policy
from ._ops import LIBRARY


def build_info() -> dict:
    """Facts about the build of the library: version, torch_target, compiler, cuda_compiler, architectures, head_dims,
    instruction_sets, and cpu, the instruction set chosen for this processor. Raises ImportError if the introspection module is
    not built for this Python."""
    from . import _introspect

    return _introspect.build_info(str(LIBRARY))


def version() -> str:
    """The version compiled into the library; if unknown, the version in the installation's metadata, which may be older."""
    try:
        return build_info()["version"]
    except ImportError:
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("flash_online")
        except PackageNotFoundError:
            return "of unknown version"


def processor() -> str:
    """The name of the CPU, or of its architecture if the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def why_not_on(capability: tuple[int, int], architectures: list[str]) -> str | None:
    """Returns why a GPU of this compute capability cannot run kernels built for these architectures, or None if it can."""
    if capability < (8, 0):
        return "older than compute capability 8.0"
    for architecture in architectures:
        number, _, ptx = architecture.partition("+")
        built = tuple(int(part) for part in number.rstrip("af").split("."))
        specific = number.endswith("a")
        if capability == built or (not specific and built[0] == capability[0] and built <= capability):
            return None
        if ptx and not specific and built <= capability:
            return None
    return f"this build has {', '.join(architectures) or 'no CUDA kernels'}; build again with TORCH_CUDA_ARCH_LIST"


def report() -> str:
    """The text of `python -m flash_online info`."""
    facts: dict = {}
    try:
        facts = build_info()
        built = f"built by {facts['compiler']}" + (f" and nvcc {facts['cuda_compiler']}" if facts["cuda_compiler"] else "")
        lines = [f"flash_online  {facts['version']}, {built}, for torch >= {facts['torch_target']}"]
    except ImportError:
        lines = [f"flash_online  {version()}; the introspection module is not built for this Python"]
    lines += [
        f"library       {LIBRARY}",
        f"python        {platform.python_version()}",
        f"torch         {torch.__version__}" + (f", CUDA {torch.version.cuda}" if torch.version.cuda else ", without CUDA"),
        f"CPU           {processor()}, {torch.get_num_threads()} threads",
    ]
    if facts:
        forced = os.environ.get("FLASH_ONLINE_CPU")
        lines.append(
            f"              kernels for {', '.join(facts['instruction_sets'])}; chosen: {facts['cpu']}"
            + (f" (FLASH_ONLINE_CPU={forced})" if forced else "")
        )
    if facts:
        built_for = ", ".join(facts["architectures"])
        lines.append(f"CUDA          kernels for {built_for}" if built_for else "CUDA          not in this build")
    else:
        lines.append(f"CUDA          {'in this build' if _policy.ON_CUDA else 'not in this build'}")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        line = f"  cuda:{index}      {gpu.name}, compute capability {gpu.major}.{gpu.minor}"
        if facts:
            reason = why_not_on((gpu.major, gpu.minor), facts["architectures"])
            line += ": runs this build's kernels" if reason is None else f": cannot run this build's kernels: {reason}"
        lines.append(line)
    if not torch.cuda.device_count():
        lines.append("              no GPU visible to torch")
    lines += ["", f"{'function':30} {'CPU':5} CUDA"]
    for name in _policy.OPERATORS:
        on_cuda = "yes" if name in _policy.ON_CUDA else "-"
        lines.append(f"{name:30} {'yes':5} {on_cuda}")
    lines.append(
        "CUDA '-': functional forwards to torch (strict() forbids it), flash_online's own functions raise NotImplementedError"
    )
    return "\n".join(lines)
