"""Programs on several ranks: processes on this machine that talk by gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import flash_online

SECONDS = 240  # until a rank that waits for another is given up


def run_on_ranks(program: Path, *arguments: str, ranks: int = 2) -> list[str]:
    """What each rank of a Python program printed. AssertionError with a rank's output where one fails or none answers."""
    folders = [str(Path(flash_online.__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
        environment["RANKS_STORE"] = f"{folder}/store"
        command = [sys.executable, str(program), *arguments]
        processes = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "WORLD_SIZE": str(ranks)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        printed = []
        try:
            for process in processes:
                printed.append(process.communicate(timeout=SECONDS)[0])
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for rank, (process, said) in enumerate(zip(processes, printed, strict=True)):
        assert process.returncode == 0, f"rank {rank} of {ranks}:\n{said}"
    return printed


@contextmanager
def joined() -> Iterator[tuple[int, int]]:
    """In such a program: (rank, number of ranks), with the default process group, for a block."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{os.environ['RANKS_STORE']}", rank=rank, world_size=ranks)
    try:
        yield rank, ranks
    finally:
        dist.destroy_process_group()


def end_process() -> None:
    """The last call of such a program with a DeviceMesh, which keeps the group and its threads. torch aborts a process where a
    thread frees a tensor while the interpreter ends, and gloo's threads may still hold a collective's."""
    sys.stdout.flush()
    os._exit(0)
