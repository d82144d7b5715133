"""The modules of the package import each other in one direction: their graph has no cycle, counting imports in functions."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import flash_online

PACKAGE = Path(flash_online.__file__).parent
MODULES = {path.stem: path for path in PACKAGE.glob("*.py")}
FOLDERS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}  # of which __init__ names one for type checkers


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports at any depth; "__init__" where it imports the package itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "flash_online":
                    found.add(alias.name.removeprefix("flash_online").removeprefix(".") or "__init__")
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "") if node.level else (node.module or "").removeprefix("flash_online").removeprefix(".")
            if not node.level and (node.module or "").split(".")[0] != "flash_online":
                continue
            if module:
                found.add(module)
            else:
                names = {alias.name for alias in node.names} - (FOLDERS if path.stem == "__init__" else set())
                found |= {name if name in (*MODULES, "_introspect") else "__init__" for name in names}
    return found - {"_introspect"}  # the extension module, which imports nothing


GRAPH = {name: imported(path) for name, path in MODULES.items()}


def test_every_import_is_of_a_module_that_exists():
    assert not {name for names in GRAPH.values() for name in names} - set(MODULES)
    assert GRAPH["functional"] and GRAPH["attention"] and GRAPH["__init__"]


def test_imports_have_no_cycle():
    order = list(TopologicalSorter(GRAPH).static_order())  # raises CycleError, which lists the cycle
    assert set(order) == set(MODULES)


def test_the_policy_knows_no_function_and_explain_is_known_to_none():
    assert GRAPH["_policy"] == {"_ops"}
    assert {name for name, names in GRAPH.items() if "explain" in names} == {"__init__"}
