#!/usr/bin/env python3
"""The rules of the house that take more than a grep. Prints what breaks them; exit code 1 if anything does.

* No function over 100 lines in csrc, flash_online and benchmarks, lambdas included: tree-sitter reads C++ and CUDA, ast Python.
* No folder of csrc with more than 12 files, but for csrc/cuda/hw, which has one feature of the hardware per file.
* The table of docs/architecture.md, of at most 60 rows, names every folder, and every file where it names any file of a folder.
* The words that docs/glossary.md gave up stand nowhere but there.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import tree_sitter
import tree_sitter_cuda

LONGEST_FUNCTION = 100  # lines
MOST_FILES = 12  # per folder of csrc
LONGEST_MAP = 60  # rows
ROOT = Path(__file__).resolve().parent.parent
SOURCES = {".h", ".cuh", ".cu", ".cpp"}


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return sorted(Path(name) for name in set(listed.stdout.split("\n")) if name and (ROOT / name).is_file())


def long_functions(files: list[Path]) -> list[str]:
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_cuda.language()))
    found = []

    def report(path: Path, first: int, last: int) -> None:
        if last - first + 1 > LONGEST_FUNCTION:
            found.append(f"{path}:{first}: a function of {last - first + 1} lines, {LONGEST_FUNCTION} are allowed")

    for path in files:
        if path.parts[0] not in ("csrc", "flash_online", "benchmarks"):
            continue
        source = (ROOT / path).read_bytes()
        if path.suffix in SOURCES:
            nodes = [parser.parse(source).root_node]
            while nodes:
                node = nodes.pop()
                nodes += node.children
                if node.type in ("function_definition", "lambda_expression"):
                    report(path, node.start_point[0] + 1, node.end_point[0] + 1)
        elif path.suffix == ".py":
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    report(path, node.lineno, node.end_lineno)
    return found


def full_folders(files: list[Path]) -> list[str]:
    folders: dict[Path, int] = {}
    for path in files:
        if path.parts[0] == "csrc" and path.parent != Path("csrc/cuda/hw"):
            folders[path.parent] = folders.get(path.parent, 0) + 1
    return [f"{f}: {n} files, {MOST_FILES} are allowed" for f, n in sorted(folders.items()) if n > MOST_FILES]


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading of a page of docs."""
    text = (ROOT / "docs" / page).read_text().partition(f"\n{heading}\n")[2]
    table = []
    for line in text.splitlines():
        if line.startswith("|"):
            table.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif table:
            break
    return table[2:]  # without the head and the rule


def wrong_map(files: list[Path]) -> list[str]:
    rows = rows_of("architecture.md", "## 2. The rooms")
    found = []
    if not rows:
        return ["docs/architecture.md: no table under '## 2. The rooms'"]
    if len(rows) > LONGEST_MAP:
        found.append(f"docs/architecture.md: the map has {len(rows)} rows, {LONGEST_MAP} are allowed")
    mapped: dict[Path, set[str]] = {}
    for folder, names, _ in rows:
        mapped.setdefault(Path(folder.strip("`")), set()).update(re.findall(r"`([^`]+)`", names))
    for folder, listed in mapped.items():
        present = {path.name for path in files if path.parent == folder}
        if not any(path.is_relative_to(folder) for path in files):
            found.append(f"docs/architecture.md: {folder} is on the map, but not in the tree")
        if listed:
            found += [f"docs/architecture.md: {folder}/{name} does not exist" for name in sorted(listed - present)]
            found += [f"docs/architecture.md: {folder}/{name} is not on the map" for name in sorted(present - listed)]
    for folder in sorted({path.parent for path in files} - mapped.keys() - {Path(".")}):
        if folder.parts[0] in ("csrc", "flash_online", "benchmarks"):
            found.append(f"docs/architecture.md: the folder {folder} is not on the map")
    return found


def old_words(files: list[Path]) -> list[str]:
    words = [re.sub(r"^`|`$", "", row[0]) for row in rows_of("glossary.md", "## Words that this code gave up")]
    if not words:
        return ["docs/glossary.md: no table under '## Words that this code gave up'"]
    pattern = re.compile("|".join(f"(?:{word})" for word in words))
    found = []
    for path in files:
        if path == Path("docs/glossary.md") or path.suffix in (".json", ".png"):
            continue
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            if hit := pattern.search(line):
                found.append(f"{path}:{number}: '{hit[0]}' is a word that docs/glossary.md gave up: {line.strip()[:100]}")
    return found


def main() -> int:
    files = tracked()
    broken = 0
    for rule in (long_functions, full_folders, wrong_map, old_words):
        found = rule(files)
        broken += len(found)
        print("\n".join(found) if found else f"none: {rule.__name__.replace('_', ' ')}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
