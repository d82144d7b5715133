"""Names of the package that are both a public function and the module that defines it: the package's attribute is the function.

On the first import of a submodule the import system sets the package's attribute of that name to the module. The package's own
`from .softmax import softmax` runs after that, so that the function wins; later imports of the submodule set nothing.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import types

import pytest
import torch

import flash_online

SHARED_NAMES = ["attention", "cross_entropy", "explain", "linear_cross_entropy", "override", "softmax"]

# First statements of a program.
ORDERS = [
    "import flash_online",
    "import flash_online.attention",
    "import flash_online.cross_entropy",
    "import flash_online.linear_cross_entropy",
    "import flash_online.override",
    "import flash_online.softmax",
    "import flash_online.functional",
    "import flash_online.explain",
    "import flash_online.testing",
    "import flash_online.varlen",
    "from flash_online.softmax import logsumexp",
    "from flash_online.cross_entropy import cross_entropy",
    "import importlib; importlib.import_module('flash_online.linear_cross_entropy')",
    "import flash_online.softmax, flash_online.attention, flash_online.cross_entropy, flash_online.linear_cross_entropy",
]

CHECK = """
import sys
import flash_online
for name in %r:
    function = getattr(flash_online, name)
    assert callable(function) and function is getattr(sys.modules["flash_online." + name], name), (name, function)
"""


def test_shared_names_are_functions_in_any_order_of_imports():
    """Each order in a process of its own, forked from one that has imported torch and nothing of the package."""
    program = f"""
import os, sys, torch
for order in {ORDERS!r}:
    process = os.fork()
    if process == 0:
        status = 1
        try:
            exec(order, {{}})
            exec({CHECK % SHARED_NAMES!r}, {{}})
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    assert os.waitpid(process, 0)[1] == 0, order
"""
    root = os.path.dirname(os.path.dirname(flash_online.__file__))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SHARED_NAMES)
def test_a_submodule_import_leaves_the_function(name):
    """`import a.b as c` binds the package's attribute, the function; import_module and `from a.b import` reach the module."""
    names = {}
    exec(
        f"import flash_online.{name}\nimport flash_online.{name} as bound\nfrom flash_online.{name} import {name} as found",
        names,
    )
    module = importlib.import_module(f"flash_online.{name}")
    function = getattr(flash_online, name)
    assert isinstance(function, types.FunctionType)
    assert isinstance(module, types.ModuleType) and module is sys.modules[f"flash_online.{name}"]
    assert names["bound"] is names["found"] is getattr(module, name) is function


def test_public_names_are_what_all_says():
    for name in flash_online.__all__:
        found = getattr(flash_online, name)
        assert isinstance(found, types.ModuleType) == (name in ("functional", "reference", "spans", "testing")), name
    assert {"explain", "functional", "reference", "testing"} <= {
        module.removeprefix("flash_online.") for module in sys.modules if module.startswith("flash_online.")
    }


FUNCTIONS = [name for name in flash_online.__all__ if isinstance(getattr(flash_online, name), types.FunctionType)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_pickle(name):
    function = getattr(flash_online, name)
    assert pickle.loads(pickle.dumps(function)) is function


def test_compiled_code_finds_functions_whose_modules_share_their_names():
    """Dynamo looks up a traced function's globals by the name of its module."""
    x, target = torch.randn(3, 5), torch.tensor([0, 4, 2])

    def call(x):
        probabilities = flash_online.softmax(x, -1)
        return flash_online.cross_entropy(probabilities, target) + flash_online.linear_cross_entropy(x, x, target % 3)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), call(x))
