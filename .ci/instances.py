#!/usr/bin/env python3
"""Lists what a CUDA build consists of: per source its kernels, their instances, bytes of machine code and seconds to compile.

    .ci/instances.py BUILD        a build folder of CMake
    .ci/instances.py --kernels BUILD        a line per kernel of a source, not per source

Seconds are those of the last compilation in the folder's .ninja_log, one file per process. Bytes are those of all architectures
in the build, not compressed; the library holds them compressed.
"""

import argparse
import collections
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from machine_code import cuobjdump


def sections(cubin: bytes) -> list[tuple[str, int]]:
    """(name, bytes) of an ELF file's sections."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    rows = [struct.unpack_from("<IIQQQQ", cubin, headers + i * size) for i in range(count)]
    text = rows[names][4]
    return [(cubin[text + row[0] : cubin.index(b"\0", text + row[0])].decode(), row[5]) for row in rows]


def kernels_of(objects: list[Path]) -> dict[Path, list[tuple[str, int]]]:
    """(name, bytes) of the functions in each object's cubins."""
    found = {}
    for path in objects:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([cuobjdump(), "-xelf", "all", path.resolve()], cwd=folder, check=True, capture_output=True)
            cubins = [cubin.read_bytes() for cubin in Path(folder).iterdir()]
        found[path] = [(name[6:], size) for cubin in cubins for name, size in sections(cubin) if name.startswith(".text.")]
    names = sorted({name for functions in found.values() for name, _ in functions})
    plain = subprocess.run(["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True).stdout.split("\n")
    short = {
        name: re.match(r"(?:\w+(?: \w+)* )?((?:\w+|\(anonymous namespace\)|::)+)", full)
        for name, full in zip(names, plain, strict=False)
    }
    return {
        path: [(match[1].split("::")[-1] if (match := short[name]) else name, size) for name, size in functions]
        for path, functions in found.items()
    }


def seconds_of(build: Path) -> dict[str, float]:
    log = build / ".ninja_log"
    rows = [line.split("\t") for line in log.read_text().splitlines()[1:]] if log.is_file() else []
    return {name: (int(end) - int(begin)) / 1000 for begin, end, _, name, *_ in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true", help="a line per kernel of a source")
    parser.add_argument("build", type=Path)
    words = parser.parse_args()
    objects = sorted(words.build.glob("CMakeFiles/cuda.dir/**/*.cu.o"))
    if not objects:
        sys.exit(f"instances: {words.build} has no CUDA objects")
    seconds = seconds_of(words.build)
    rows = []
    for path, functions in kernels_of(objects).items():
        spent = seconds.get(str(path.relative_to(words.build)), 0)
        groups = collections.defaultdict(list)
        for name, size in functions:
            groups[name if words.kernels else ""].append(size)
        whole = sum(size for _, size in functions) or 1
        rows += [(path.name[:-5], name, len(sizes), sum(sizes), spent * sum(sizes) / whole) for name, sizes in groups.items()]
    rows.sort(key=lambda row: -row[3])
    width = max(len(row[0]) for row in rows) + 2
    print(f"{'source':{width}}{'kernel' if words.kernels else '':28}{'instances':>10}{'KiB':>10}{'seconds':>10}")
    rows.append(("all", "", *(sum(column) for column in list(zip(*rows, strict=True))[2:])))
    for source, name, instances, size, spent in rows:
        print(f"{source:{width}}{name:28}{instances:10}{size / 1024:10.0f}{spent:10.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
