#!/usr/bin/env python3
"""What the general attention kernels take of GPUs of each kind: registers, spills and CTAs per SM, as Markdown on stdout.

    .ci/occupancy.py [--head-dim 64 ...] [--arch 80 86 89 120] [--jobs 2]

Needs nvcc and g++, and no GPU. Each kernel for bfloat16 is compiled alone, and the compiler's report gives its registers; tiles
come from csrc/cuda/attention/sm80/tiles.h. docs/design/attention_sm80_gpus.md has the output.
"""

import argparse
import concurrent.futures
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Compute capability: (GPUs, KiB of shared memory per SM, per CTA, warps per SM). Programming guide, "Compute capabilities".
GPUS = {
    "80": ("A100", 164, 163, 64),
    "86": ("RTX 30, A10", 100, 99, 48),
    "89": ("RTX 40, L40S", 100, 99, 48),
    "120": ("RTX 50", 100, 99, 48),
}
REGISTERS, PER_WARP, RESERVED = 65536, 256, 1  # of an SM; a warp's come in such steps; KiB of shared memory of a CTA
PASSES = {
    "forward": ("sm80/forward.cuh", "attention_forward_sm80", "ForwardSm80Arguments"),
    "backward": ("sm80/backward.cuh", "attention_backward_sm80", "BackwardSm80Arguments"),
}
VARIANTS = ("plain", "plain, 163 KiB", "plain, 99 KiB", "any rows", "options", "small")
TILES = """
#include <cstdio>
#include "cuda/attention/sm80/tiles.h"
using namespace flash_online::cuda;
void print(const char* pass, const auto& tile, int queries) {
  if (tile.bytes != 2) return;
  std::printf("%s %d %d %d %d ", pass, tile.head_dim, static_cast<int>(tile.variant), queries, tile.keys);
  std::printf("%d %d\\n", tile.threads(), tile.shared_bytes());
}
int main() {
  for (const auto& tile : kForwardSm80Tiles) print("forward", tile, tile.queries());
  for (const auto& tile : kBackwardSm80Tiles) print("backward", tile, tile.queries);
}
"""


def tiles(folder: Path) -> dict[tuple[str, int, int], tuple[int, int, int, int]]:
    """(queries, keys, threads, bytes of shared memory) by (pass, head dim, variant)."""
    (folder / "tiles.cpp").write_text(TILES)
    subprocess.run(["g++", "-std=c++20", f"-I{ROOT / 'csrc'}", folder / "tiles.cpp", "-o", folder / "tiles"], check=True)
    rows = subprocess.run([folder / "tiles"], check=True, capture_output=True, text=True).stdout.splitlines()
    return {(kind, int(e), int(v)): tuple(map(int, rest)) for kind, e, v, *rest in map(str.split, rows)}


def compiled(folder: Path, kind: str, head_dim: int, variant: int, arch: str) -> tuple[int, int]:
    """(registers per thread, bytes of spill stores) of a kernel."""
    header, name, arguments = PASSES[kind]
    source = folder / f"{kind}_{head_dim}_{variant}_{arch}.cu"
    template = (
        f"template __global__ void {name}<__nv_bfloat16, {head_dim}, Variant({variant})>(const __grid_constant__ {arguments});"
    )
    source.write_text(f'#include "{header}"\nnamespace flash_online::cuda {{\n{template}\n}}\n')
    includes = (ROOT / "csrc/cuda/attention", folder)
    options = ["-O3", "-DNDEBUG", "-std=c++20", f"-arch=sm_{arch}", "--expt-relaxed-constexpr", "-Xptxas=-v", "-cubin"]
    command = ["nvcc", *options, *(f"-I{path}" for path in includes), source, "-o", source.with_suffix(".cubin")]
    run = subprocess.run(command, capture_output=True, text=True)
    report = run.stdout + run.stderr
    if run.returncode != 0:
        sys.exit(f"occupancy: {report}")
    return int(re.search(r"Used (\d+) registers", report)[1]), int(re.search(r"(\d+) bytes spill stores", report)[1])


def ctas_per_sm(arch: str, registers: int, threads: int, shared_bytes: int) -> int:
    """As many as registers, shared memory and warps of an SM allow; 0 where a CTA has not room."""
    _, per_sm, per_cta, most_warps = GPUS[arch]
    warps = threads // 32
    of_warp = -(-registers * 32 // PER_WARP) * PER_WARP
    if shared_bytes > per_cta << 10:
        return 0
    return min(REGISTERS // of_warp // warps, (per_sm << 10) // (shared_bytes + (RESERVED << 10)), most_warps // warps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[32, 64, 96, 128, 192, 256])
    parser.add_argument("--arch", nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        folder = Path(name)
        (folder / "head_dims.h").write_text("#pragma once\n")
        rows = {key: tile for key, tile in tiles(folder).items() if key[1] in options.head_dim}
        reports = {(key, arch): pool.submit(compiled, folder, *key, arch) for key in rows for arch in options.arch}
        print("| | queries x keys | warps | KiB |" + "".join(f" {GPUS[a][0]} ({a[:-1]}.{a[-1]}) |" for a in options.arch))
        print("|---" * (4 + len(options.arch)) + "|")
        for key, (queries, keys, threads, shared) in rows.items():
            kind, head_dim, variant = key
            cells = []
            for arch in options.arch:
                registers, spills = reports[key, arch].result()
                ctas = ctas_per_sm(arch, registers, threads, shared)
                room = f"{ctas} ({ctas * threads // 32})" if ctas else "-"
                cells.append(f"{registers}{f' + {spills}' if spills else ''}; {room}")
            tile = f"{queries} x {keys} | {threads // 32} | {shared / 1024:.1f}"
            print(f"| {kind}, E {head_dim}, {VARIANTS[variant]} | {tile} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
