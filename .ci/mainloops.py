#!/usr/bin/env python3
"""Measures the mainloops of the Hopper backward kernels in a built library, and holds them to limits.

    .ci/mainloops.py LIBRARY        flash_online/libflash_online.so, for instance

Of each kernel: how much memory the loop's code spans; and on its hot path, the way round that takes the fewest clocks, how many
instructions a warp issues and for how many clocks their control codes hold it back. Over head dim 128, where three warpgroups
have a loop each, the sums over these. The limits stand above what there is by a
few percent: a change of the source, or of the compiler, that makes a loop longer is seen here without a GPU. Needs cuobjdump
and nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm. Exit code 1: a loop exceeds a limit.
"""

import re
import sys
from dataclasses import dataclass

from machine_code import cuobjdump, output


@dataclass(frozen=True)
class Loop:
    kilobytes: float  # from the first to the last instruction
    instructions: int  # on the hot path
    clocks: int  # on the hot path, by control codes alone


# Per head dim; bfloat16, plain attention.
LIMITS = {
    64: Loop(16.8, 660, 1560),
    96: Loop(11.8, 450, 1080),
    128: Loop(12.2, 472, 1150),
    160: Loop(19.6, 685, 1670),
    192: Loop(20.0, 705, 1745),
    256: Loop(23.4, 780, 1880),
}


def products_of(head_dim: int) -> list[int]:
    """The wgmma instructions of a block, per loop. S and dP sum over the head dim, and have a step more, which subtracts lse or
    delta; dV and dK sum over the block's queries, dQ over the keys. Up to head dim 128 one loop has them all. Over it, one
    warpgroup makes S and dV, one dP and dK, one half of dQ's columns for two CTAs' keys; products of more than 192 columns
    come in two parts."""
    queries = 128 if head_dim == 64 else 64
    if head_dim <= 128:
        return [(2 * head_dim + 2 * queries + 128) // 16 + 2]
    scores_and_gradient = head_dim // 16 + 1 + queries // 16 * (2 if head_dim > 192 else 1)
    return [scores_and_gradient, scores_and_gradient, 2 * 128 // 16]


def symbol(head_dim: int) -> str:
    return (
        f"_ZN12flash_online4cuda23attention_backward_sm90I13__nv_bfloat16Li{head_dim}ELi{head_dim}E"
        "LNS0_20BackwardSm90FeaturesE0EEEvNS0_21BackwardSm90ArgumentsE"
    )


@dataclass
class Instruction:
    text: str
    clocks: int
    target: int | None = None  # of a branch: the index of an instruction


def instructions(listing: str) -> list[Instruction]:
    """Those of one kernel. Each is 128 bits, on two lines; bits 105 to 108 say for how many clocks the warp then waits."""
    found: list[Instruction] = []
    for line in listing.splitlines():
        if first := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);?\s*/\* 0x[0-9a-f]{16} \*/", line):
            found.append(Instruction(first[1].strip(" ;"), 1))
        elif second := re.match(r"\s*/\* 0x([0-9a-f]{16}) \*/", line):
            found[-1].clocks = max(1, int(second[1], 16) >> 41 & 15)
    for instruction in found:
        if branch := re.search(r"\bBRA(?:\.\S+)? (?:\S+, )?0x([0-9a-f]+)", instruction.text):
            instruction.target = int(branch[1], 16) // 16
    return found


def way_round(code: list[Instruction], start: int, end: int) -> tuple[int, int, int]:
    """(products, instructions, clocks) of the hot path from `start` to the branch at `end` that closes the loop: of all ways
    with the most products the one of the fewest clocks. No products: there is none. Branches that go back within the loop
    belong to waits."""
    best = {start: (0, 0, 0)}
    for n in range(start, end):
        if n not in best:
            continue
        instruction, (products, clocks, count) = code[n], best[n]
        way = (products - ("HGMMA" in instruction.text), clocks + instruction.clocks, count + 1)
        always = not instruction.text.startswith("@") and (instruction.target is not None or "EXIT" in instruction.text)
        following = [] if always else [n + 1]
        if instruction.target is not None and instruction.target > n:
            following.append(instruction.target)
        for after in following:
            best[after] = min(way, best.get(after, way))
    products, clocks, count = best.get(end, (0, 0, 0))
    return -products, count + 1, clocks + code[end].clocks


def mainloop(code: list[Instruction], products: list[int]) -> Loop:
    """The shortest loops with all products of a block, those with the most first; no two have code in common."""
    loops = sorted(
        ((i.target, n) for n, i in enumerate(code) if i.target is not None and i.target <= n),
        key=lambda loop: loop[1] - loop[0],
    )
    taken: list[tuple[int, int]] = []
    total = Loop(0, 0, 0)
    for wanted in sorted(products, reverse=True):
        for start, end in loops:
            found, count, clocks = way_round(code, start, end)
            if found >= wanted and all(end < first or last < start for first, last in taken):
                taken.append((start, end))
                kilobytes = (end - start + 1) * 16 / 1024
                total = Loop(total.kilobytes + kilobytes, total.instructions + count, total.clocks + clocks)
                break
        else:
            sys.exit("mainloops: no loop with the products of a block")
    return total


def main(library: str) -> int:
    exceeded = 0
    for head_dim, limit in LIMITS.items():
        code = instructions(output(cuobjdump(), "-sass", "-fun", symbol(head_dim), library))
        loop = mainloop(code, products_of(head_dim))
        facts = (
            ("KB", loop.kilobytes, limit.kilobytes),
            ("instructions", loop.instructions, limit.instructions),
            ("clocks", loop.clocks, limit.clocks),
        )
        print(f"head dim {head_dim:<6d}" + ", ".join(f"{value:.4g} {what} (at most {most:g})" for what, value, most in facts))
        exceeded += any(value > most for _, value, most in facts)
    if exceeded:
        print(f"{exceeded} mainloops exceed a limit: docs/lab/backward_sm90.md says what they took before, and what it cost")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else __doc__)
