"""Runs many problems of the fuzzer and says which are over the tolerance, and how to repeat each:

    python tests/fuzz/run.py --count 20000 --device cpu --seconds 3600 --processes 2

A run that its time ends says with which --seed to go on. The exit code is 1 where more than one problem in 10,000 was over.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1]), str(Path(__file__).parent)]
import test_fuzz  # noqa: E402  the tests are no package

import flash_online  # noqa: E402

CHUNK = 50  # problems that a process takes at once
ALLOWED = 1e-4
CHECKS = {
    "": test_fuzz.check,
    "cached": test_fuzz.check_cached,
    "spans": test_fuzz.check_spans,
    "blocks": test_fuzz.check_blocks,
    "float8": test_fuzz.check_float8,
}


def kind_of(options: argparse.Namespace) -> str:
    return next((kind for kind in CHECKS if kind and getattr(options, kind)), "")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="how many problems (20,000)")
    parser.add_argument("--seed", type=int, default=0, help="the first problem's seed (0)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no problem after this time")
    parser.add_argument("--processes", type=int, default=1, help="how many run at once, each with one thread")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--cached", action="store_true", help="problems over cached keys, in place of all others")
    kinds.add_argument("--spans", action="store_true", help="problems with spans, in place of all others")
    kinds.add_argument("--blocks", action="store_true", help="problems with lists of blocks, in place of all others")
    kinds.add_argument("--float8", action="store_true", help="problems of float8_attention, in place of all others")
    return parser.parse_args()


def check_seed(seed: int, device: str, kind: str) -> str | None:
    """What is wrong with a problem, in one line; None where nothing is."""
    try:
        CHECKS[kind](seed, device)
    except pytest.skip.Exception:  # the GPU's shared memory has no room for it
        return None
    except Exception as failure:
        said = " ".join(str(failure).split())
        return f"{type(failure).__name__}: {said}" if not isinstance(failure, AssertionError) else said
    return None


def check_chunk(work: tuple[int, int, str, str, float]) -> tuple[int, list[tuple[int, str]], bool]:
    """(problems that ran, those over the tolerance, whether the time was up) of one chunk of seeds."""
    first, last, device, kind, end = work
    over = []
    with flash_online.strict():
        for seed in range(first, last):
            if time.time() > end:
                return seed - first, over, True
            said = check_seed(seed, device, kind)
            if said is not None:
                over.append((seed, said))
    return last - first, over, False


def one_thread() -> None:
    torch.set_num_threads(1)


def chunks(options: argparse.Namespace, end: float) -> Iterator[tuple[int, int, str, str, float]]:
    stop = options.seed + options.count
    for first in range(options.seed, stop, CHUNK):
        yield first, min(first + CHUNK, stop), options.device, kind_of(options), end


def main() -> int:
    options = arguments()
    ran, over, unfinished = 0, [], None
    start = time.time()
    work = list(chunks(options, start + options.seconds))
    pool = multiprocessing.get_context("spawn").Pool(options.processes, one_thread)
    with pool:
        for piece, (count, found, ended) in zip(work, pool.imap(check_chunk, work), strict=True):
            ran += count
            over += found
            if ended and unfinished is None:
                unfinished = piece[0] + count
            for seed, said in found:
                print(f"over: {said}\nalone: {repeat(seed, options)}", flush=True)
    kinds = Counter(said.split(" of ")[0] for _, said in over)
    print(f"{ran} problems on {options.device} in {time.time() - start:.0f} s: {len(over)} over the tolerance")
    for kind, number in kinds.most_common():
        print(f"  {number} x {kind}")
    if unfinished is not None:
        left = options.seed + options.count - unfinished
        print(f"the time is up; go on with --seed {unfinished} --count {left}, of which some have run")
    return int(len(over) > ALLOWED * max(ran, 1))


def repeat(seed: int, options: argparse.Namespace) -> str:
    kind = kind_of(options)
    return f"python tests/fuzz/run.py --seed {seed} --count 1 --device {options.device}{' --' * bool(kind)}{kind}"


if __name__ == "__main__":
    random.seed(0)
    sys.exit(main())
