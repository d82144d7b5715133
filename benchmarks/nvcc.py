"""Plain CUDA kernels used only by benchmarks: one file each, compiled with one nvcc command and called through ctypes."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-shared", "-Xcompiler=-fPIC"]


class Missing(Exception):
    """The kernels cannot be built or run here; the message says why."""


def build(name: str, sources: list[Path], architecture: str) -> Path:
    """The library of sources[0] for an architecture in nvcc's form (sm_90), in build/<name>. Recompiles if the sources changed,
    so `sources` lists every header of the repository that the first file includes."""
    text = b"".join(source.read_bytes() for source in sources) + " ".join([architecture, *FLAGS]).encode()
    folder = ROOT / "build" / name
    library = folder / f"lib{name}-{architecture}-{hashlib.sha256(text).hexdigest()[:12]}.so"
    if library.is_file():
        return library
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise Missing(f"the kernels of benchmarks/{name} need nvcc in the PATH")
    folder.mkdir(parents=True, exist_ok=True)
    part = library.with_suffix(".part")
    command = [nvcc, *FLAGS, f"-arch={architecture}", f"-I{ROOT / 'csrc'}", "-o", str(part), str(sources[0])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return part.rename(library)
