#!/usr/bin/env python3
"""The rules of the house that take more than a grep. Prints what breaks them; exit code 1 if anything does.

* No function over 100 lines in csrc, flash_online and benchmarks, lambdas included: tree-sitter reads C++ and CUDA, ast Python.
* No folder of csrc with more than 12 files, but for csrc/cuda/hw, which has one feature of the hardware per file.
* The map in docs/design/architecture.md, of at most 60 entries, names every folder, and all files of a folder or none.
* The words that docs/design/glossary.md gave up stand nowhere but there.
* No page of docs with more than 150 lines, or a line of more than 128 columns. The lines that a command writes do not count,
  nor do docs/lab and docs/design/decisions.md.
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
LONGEST_MAP = 60  # entries
LONGEST_PAGE, WIDEST_LINE = 150, 128  # lines and columns of a page of docs
MAP, GLOSSARY, DECISIONS = (Path("docs/design") / name for name in ("architecture.md", "glossary.md", "decisions.md"))
MACHINE_MADE = re.compile("<!-- python [^>]* writes from here -->.*?<!-- to here -->", re.DOTALL)
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


def part_of(page: Path, heading: str) -> list[str]:
    """The lines of a page after a heading, up to the next one of its rank."""
    return (ROOT / page).read_text().partition(f"\n{heading}\n")[2].partition("\n## ")[0].splitlines()


def map_entries() -> list[tuple[Path, list[str]]]:
    """Folder and names of files of each entry `- `folder` (`file` ...): what is there`, which may go on in indented lines."""
    text = "\n".join(part_of(MAP, "## 2. The map"))
    entries = re.findall(r"^- `([^`]+)`(?:\s+\(([^)]*)\))?:", text, re.MULTILINE)
    return [(Path(folder), re.findall(r"`([^`]+)`", names)) for folder, names in entries]


def wrong_map(files: list[Path]) -> list[str]:
    entries = map_entries()
    found = []
    if not entries:
        return [f"{MAP}: no entry under '## 2. The map'"]
    if len(entries) > LONGEST_MAP:
        found.append(f"{MAP}: the map has {len(entries)} entries, {LONGEST_MAP} are allowed")
    mapped: dict[Path, set[str]] = {}
    for folder, names in entries:
        mapped.setdefault(folder, set()).update(names)
    for folder, listed in mapped.items():
        present = {path.name for path in files if path.parent == folder}
        if not any(path.is_relative_to(folder) for path in files):
            found.append(f"{MAP}: {folder} is on the map, but not in the tree")
        if listed:
            found += [f"{MAP}: {folder}/{name} does not exist" for name in sorted(listed - present)]
            found += [f"{MAP}: {folder}/{name} is not on the map" for name in sorted(present - listed)]
    for folder in sorted({path.parent for path in files} - mapped.keys() - {Path(".")}):
        if folder.parts[0] in ("csrc", "flash_online", "benchmarks"):
            found.append(f"{MAP}: the folder {folder} is not on the map")
    return found


def old_words(files: list[Path]) -> list[str]:
    table = [line for line in part_of(GLOSSARY, "## Words that this code gave up") if line.startswith("|")][2:]
    words = [re.sub(r"^`|`$", "", re.split(r"(?<!\\)\|", line)[1].strip()).replace("\\|", "|") for line in table]
    if not words:
        return [f"{GLOSSARY}: no table under '## Words that this code gave up'"]
    pattern = re.compile("|".join(f"(?:{word})" for word in words))
    found = []
    for path in files:
        if path == GLOSSARY or path.suffix in (".json", ".png"):
            continue
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            if hit := pattern.search(line):
                found.append(f"{path}:{number}: '{hit[0]}' is a word that {GLOSSARY} gave up: {line.strip()[:100]}")
    return found


def long_pages(files: list[Path]) -> list[str]:
    found = []
    for path in files:
        if path.parts[0] != "docs" or path.suffix != ".md" or path == DECISIONS or path.is_relative_to("docs/lab"):
            continue
        lines = MACHINE_MADE.sub("", (ROOT / path).read_text()).splitlines()
        if len(lines) > LONGEST_PAGE:
            found.append(f"{path}: a page of {len(lines)} lines, {LONGEST_PAGE} are allowed")
        found += [
            f"{path}: a line of {len(line)} columns, {WIDEST_LINE} are allowed: {line[:60]}"
            for line in lines
            if len(line) > WIDEST_LINE
        ]
    return found


def main() -> int:
    files = tracked()
    broken = 0
    for rule in (long_functions, full_folders, wrong_map, old_words, long_pages):
        found = rule(files)
        broken += len(found)
        print("\n".join(found) if found else f"none: {rule.__name__.replace('_', ' ')}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
