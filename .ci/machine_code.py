#!/usr/bin/env python3
"""Compares the machine code of two builds, function by function, whatever the functions are called.

    .ci/machine_code.py BEFORE AFTER        two build folders of CMake, or two files that --save wrote
    .ci/machine_code.py --all BEFORE AFTER        lists every function that differs, instead of a sum per object
    .ci/machine_code.py --save FILE BUILD

CUDA kernels are compared by cuobjdump: instructions with their encoding, registers, stack and shared memory. CPU functions are
compared by objdump: instructions without addresses and symbols, and the read-only data of each object. A change that only
renames or moves source must leave all of them the same. A kernel that holds a device assert carries the line number of the
assert as an immediate: it is listed apart when nothing but immediates of moves differ. Exit code 1: something else differs.
"""

import argparse
import collections
import concurrent.futures
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


def output(*command: str) -> str:
    path = f"{Path(command[0]).parent}:{os.environ['PATH']}"  # cuobjdump calls the nvdisasm next to it
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", env={**os.environ, "PATH": path})
    return run.stdout if run.returncode == 0 else sys.exit(f"machine_code: {' '.join(command)}: {run.stderr or run.stdout}")


@functools.cache
def cuobjdump() -> str:
    """PATH's, or that of the package nvidia-cuda-cuobjdump; the one that comes with a toolkit stands next to nvcc."""
    packaged = (Path(folder, "nvidia/cu13/bin/cuobjdump") for folder in sys.path)
    found = shutil.which("cuobjdump") or next((str(path) for path in packaged if path.is_file()), None)
    return found or sys.exit("machine_code: no cuobjdump in PATH: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:20]


def demangle(names: list[str]) -> dict[str, str]:
    text = subprocess.run(["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True).stdout
    return dict(zip(names, text.splitlines(), strict=True))


# A move of an immediate. As HFMA2 the compiler writes a 32-bit number as two halves, in decimal.
MOVE = re.compile(r"\b((?:U?MOV|IMAD\.MOV\.U32)\b.*?)-?0x[0-9a-f]+|\b(HFMA2(?:\.MMA)? \S+ -RZ, RZ, )\S+ \S+")


def kernels(path: Path) -> dict[str, dict]:
    """The kernels of one object: {name: {code, moves, resources, instructions}}."""
    resources = {}
    name = None
    for line in output(cuobjdump(), "-res-usage", str(path)).splitlines():
        if found := re.match(r"\s*Function (\S+):", line):
            name = found[1]
        elif name and "REG:" in line:
            resources[name] = " ".join(line.split())
            name = None
    found = {}
    lines: dict[str, list[str]] = {}
    for line in output(cuobjdump(), "-sass", str(path)).splitlines():
        if start := re.match(r"\s*Function : (\S+)", line):
            name = start[1]
            lines[name] = []
        elif name is not None and "/*" in line:
            lines[name].append(re.sub(r"^\s*/\*[0-9a-f]{4,}\*/\s*", "", line).strip())
    for name, code in lines.items():
        text = [re.sub(r"\s*/\*.*", "", line) for line in code]  # without the encoding, in which immediates show
        found[name] = {
            "code": digest(code),
            "moves": digest([MOVE.sub(r"\1\2_", line) for line in text if line]),
            "resources": resources.get(name, ""),
            "instructions": sum(1 for line in text if line),
        }
    return found


def functions(path: Path) -> dict[str, dict]:
    """The CPU functions of one object, likewise; its read-only data under one name."""
    found = {}
    name, code = None, []

    def close() -> None:
        if name is not None:
            while code and code[-1].startswith("nop"):  # alignment after the function
                code.pop()
            found[name] = {"code": digest(code), "moves": digest(code), "resources": "", "instructions": len(code)}

    for line in output("objdump", "-d", "-r", "--no-show-raw-insn", str(path)).splitlines():
        if start := re.match(r"[0-9a-f]+ <(\S+)>:", line):
            close()
            name, code = start[1], []
        elif body := re.match(r"\s+[0-9a-f]+:\s+(.*)", line):
            text = body[1].strip()
            if text.startswith("R_X86_64"):
                kind, _, symbol = text.partition("\t")
                code.append(kind + " " + (re.search(r"[+-]0x[0-9a-f]+$", symbol) or [""])[0])
            else:
                code.append(re.sub(r"\b[0-9a-f]+ <[^>+]*(\+0x[0-9a-f]+)?>", r"<\1>", text))
    close()
    data = [line for line in output("objdump", "-s", str(path)).split("Contents of section ") if line.startswith(".rodata")]
    constants = digest(sorted(digest([part.partition("\n")[2]]) for part in data))
    found["read-only data"] = {"code": constants, "moves": constants, "resources": "", "instructions": 0}
    return found


def read(folder: Path) -> dict[str, dict[str, dict]]:
    """{"cuda" or "cpu <instruction set>": {function: facts}} of a build folder."""
    cuda = sorted(folder.glob("**/cuda.dir/**/*.o"))
    cpu = sorted(folder.glob("**/cpu_*.dir/**/*.o"))
    if not cuda and not cpu:
        sys.exit(f"machine_code: {folder} holds no objects of cuda.dir or cpu_*.dir: is it a build folder of CMake?")
    code: dict[str, dict[str, dict]] = {}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for path, facts in zip(cuda, pool.map(kernels, cuda), strict=True):
            code.setdefault("cuda", {}).update({f"{path.name}: {name}": fact for name, fact in facts.items()})
        for path, facts in zip(cpu, pool.map(functions, cpu), strict=True):
            group = re.search(r"cpu_(\w+)\.dir", str(path))[1]
            code.setdefault(f"cpu {group}", {}).update({f"{path.name}: {name}": fact for name, fact in facts.items()})
    return code


def load(path: Path) -> dict[str, dict[str, dict]]:
    return json.loads(path.read_text()) if path.is_file() else read(path)


def compare(before: dict[str, dict], after: dict[str, dict], every: bool) -> tuple[str, bool]:
    """One group's verdict, and whether all of it is the same. What differs is summed up per object, or listed if `every`."""

    def key(fact: dict) -> tuple[str, str]:
        return fact["code"], fact["resources"]

    left = collections.Counter(key(fact) for fact in before.values())
    right = collections.Counter(key(fact) for fact in after.values())
    gone, come = left - right, right - left
    old = [(name, fact) for name, fact in before.items() if gone[key(fact)] > 0]
    new = [(name, fact) for name, fact in after.items() if come[key(fact)] > 0]
    moves = collections.Counter(fact["moves"] for _, fact in old) & collections.Counter(fact["moves"] for _, fact in new)
    immediates = sum(moves.values())
    symbols = [{name.partition(": ")[2] for name in group} for group in (before, after)]
    lines = [
        f"{len(before)} before, {len(after)} after; {len(after) - sum(come.values())} with identical machine code, "
        f"{len(symbols[1] - symbols[0])} under another name"
    ]
    if immediates:
        lines.append(f"  {immediates} differ in immediates of moves alone (the line of an assert)")
    differ = [
        (sign, name, fact) for sign, group in (("-", old), ("+", new)) for name, fact in group if fact["moves"] not in moves
    ]
    if every:
        names = demangle([name.partition(": ")[2] for _, name, _ in differ])
        for sign, name, fact in differ:
            where, _, symbol = name.partition(": ")
            lines.append(f"  {sign} {where}: {names[symbol][:150]}: {fact['instructions']} instructions {fact['resources']}")
    else:
        objects: dict[tuple[str, str], list[int]] = {}
        for sign, name, fact in differ:
            objects.setdefault((sign, name.partition(": ")[0]), []).append(fact["instructions"])
        for (sign, where), counts in objects.items():
            lines.append(f"  {sign} {where}: {len(counts)} functions differ, of {sum(counts)} instructions")
    return "\n".join(lines), sum(come.values()) + sum(gone.values()) == 2 * immediates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="FILE", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("builds", nargs="+", type=Path)
    arguments = parser.parse_args()
    if arguments.save:
        arguments.save.write_text(json.dumps(load(arguments.builds[0]), indent=1))
        return 0
    if len(arguments.builds) != 2:
        parser.error("two builds to compare, or --save and one")
    before, after = map(load, arguments.builds)
    same = True
    for group in sorted({*before, *after}):
        text, equal = compare(before.get(group, {}), after.get(group, {}), arguments.all)
        print(f"{group}: {text}")
        same &= equal
    print("the same machine code" if same else "machine code DIFFERS")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
