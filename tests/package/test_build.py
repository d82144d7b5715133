"""What the built library promises: one file for every torch >= the target, with or without CUDA, that merges with nothing else
in the process."""

import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import flash_online
from flash_online import _introspect, _ops

LIBRARY = _ops.LIBRARY
REPOSITORY = Path(__file__).parents[2]


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def need(tool):
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed")


@pytest.fixture(scope="module")
def info():
    return _introspect.build_info(str(LIBRARY))


# ---- the ABI promise -------------------------------------------------------------------------------------------------------
@need("readelf")
def test_needs_torchs_two_umbrella_libraries_and_the_system_alone():
    dynamic = run("readelf", "-dW", LIBRARY)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    system = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    system |= {"libdl.so.2", "librt.so.1", "libpthread.so.0"}  # of their own before glibc 2.34
    assert needed - {"libtorch.so", "libtorch_cpu.so"} <= system
    assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic)  # torch is in the process already


@need("readelf")
def test_introspect_needs_no_torch():
    assert "torch" not in run("readelf", "-dW", _introspect.__file__)


@need("nm")
def test_exports_one_symbol():
    exported = [line.split()[-1] for line in run("nm", "-D", "--defined-only", LIBRARY).splitlines()]
    assert exported == ["flash_online_api"]


def undefined_symbols():
    return [line.split()[-1] for line in run("nm", "-D", "--undefined-only", LIBRARY).splitlines()]


@need("nm")
def test_every_cxx_symbol_that_it_wants_is_the_standard_librarys():
    """at::, c10:: and torch:: change with every release; the stable headers reach torch through C functions alone."""
    foreign = [s for s in undefined_symbols() if s.startswith("_Z") and not re.search(r"@(GLIBCXX|CXXABI|GCC)_", s)]
    assert foreign == []


@need("nm")
@need("c++")
def test_every_torch_symbol_that_it_wants_was_there_in_the_target_release(info):
    """torch's headers hide what is newer than TORCH_TARGET_VERSION: each symbol must be declared by them for that target."""
    wanted = {s for s in undefined_symbols() if re.match(r"(aoti_)?torch_", s)}
    assert wanted, "the operators call nothing of torch?"
    major, minor = map(int, info["torch_target"].split("."))
    shims = ["torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/stable/c/shim.h"]
    shims.append("torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h")  # of stable/ops.h: fill_, from torch 2.9 on
    source = "".join(f"#include <{shim}>\n" for shim in shims)
    headers = [f"-I{Path(torch.__file__).parent / 'include'}", f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#x}"]
    command = ["c++", "-std=c++20", "-E", "-P", "-x", "c++", *headers, "-"]
    declared = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    assert {s for s in wanted if not re.search(rf"\b{s}\b", declared)} == set()


@need("nm")
def test_no_function_of_ours_is_shared_between_instruction_sets(info):
    """A weak symbol that two sets' objects define is merged by the linker: one set's code would run for both."""
    definers = defaultdict(set)
    for instruction_set in info["instruction_sets"]:
        for item in (REPOSITORY / "build").glob(f"*/CMakeFiles/cpu_{instruction_set}.dir/csrc/cpu/**/*.o"):
            for line in run("nm", "--defined-only", item).splitlines():
                *_, kind, name = line.split()
                if kind in "WVuw" and "flash_online" in name:
                    definers[name].add(instruction_set)
    if not definers:
        pytest.skip("no object files: not a source build")
    assert {name: sets for name, sets in definers.items() if len(sets) > 1} == {}


@pytest.fixture
def setup_py(monkeypatch):
    """The functions of setup.py by name."""
    monkeypatch.setattr("setuptools.setup", lambda **options: None)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    return runpy.run_path(str(REPOSITORY / "setup.py"))


def test_a_compiler_that_is_not_there_is_named(setup_py, tmp_path, monkeypatch):
    check = setup_py["check_compiler"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SystemExit, match=r"expected a compiler of C\+\+20, such as GCC 12 .* got no c\+\+"):
        check()
    monkeypatch.setenv("CXX", "/nowhere/g++ -m64")
    with pytest.raises(SystemExit, match=r"got CXX=/nowhere/g\+\+"):
        check()
    (tmp_path / "c++").touch(0o755)
    monkeypatch.delenv("CXX")
    check()


def test_a_torch_that_is_too_old_is_named(setup_py, tmp_path, monkeypatch):
    """By setup.py, before a compiler sees its headers."""
    monkeypatch.delenv("FLASH_ONLINE_TORCH_DIR", raising=False)
    torch_dir = setup_py["torch_dir"]
    (tmp_path / "torch/include/torch/csrc/stable").mkdir(parents=True)
    (tmp_path / "torch/include/torch/csrc/stable/library.h").touch()
    monkeypatch.setitem(torch_dir.__globals__, "site_packages", lambda: [tmp_path])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for version, accepted in (("2.10.0+cu126", False), ("2.11.0", True), ("3.0.1", True)):
        (tmp_path / "torch/version.py").write_text(f"__version__ = '{version}'\n")
        if accepted:
            assert torch_dir() == tmp_path / "torch"
        else:
            with pytest.raises(SystemExit, match=r"expected torch >= 2\.11 .* got 2\.10 in "):
                torch_dir()


# ---- the facts of the build ------------------------------------------------------------------------------------------------
def test_build_info(info):
    assert info["version"] == flash_online.__version__
    assert info["torch_target"] == "2.11"
    assert info["cpu"] in info["instruction_sets"]
    assert "portable" in info["instruction_sets"]
    assert bool(info["cuda_compiler"]) == bool(info["architectures"])
    assert all(isinstance(head_dim, int) for head_dim in info["head_dims"])


def test_build_info_of_a_library_that_is_not_loaded(tmp_path):
    with pytest.raises(RuntimeError, match=r"^library: expected one loaded in this process, got .*none\.so"):
        _introspect.build_info(str(tmp_path / "none.so"))


# Module and name in Python, header and name in C++.
REPEATED_CONSTANTS = [
    ("_ops", "_FEW_LOSSES", "cuda/rows/rows.h", "kFewLosses"),
    ("explain", "_KEYS_PER_BLOCK", "cpu/attention/mask_tile.h", "kKeys"),
]


@pytest.mark.skipif(not (REPOSITORY / "csrc").is_dir(), reason="not a checkout")
@pytest.mark.parametrize("module, name, header, cpp_name", REPEATED_CONSTANTS)
def test_constants_that_python_repeats(module, name, header, cpp_name):
    (value,) = re.findall(rf"\b{cpp_name} = (\d+);", (REPOSITORY / "csrc" / header).read_text())
    assert int(value) == getattr(importlib.import_module(f"flash_online.{module}"), name)


# ---- it loads and works ----------------------------------------------------------------------------------------------------
PROGRAM = """
import json, torch
from flash_online import _introspect, _ops
import flash_online
x = torch.arange(6.0).reshape(2, 3)
assert torch.allclose(flash_online.softmax(x, -1), torch.softmax(x, -1))
q = torch.ones(1, 1, 3, 4)
assert torch.allclose(flash_online.attention(q, q, q), q)
print(json.dumps(_introspect.build_info(str(_ops.LIBRARY))))
"""


def run_program(tmp_path, **environment):
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=os.environ | environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_works_where_no_gpu_is_visible(tmp_path):
    run_program(tmp_path, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("instruction_set", ["portable", "avx2", "avx512", "avx512_bf16", "amx"])
def test_each_instruction_set_can_be_forced(tmp_path, info, instruction_set):
    sets = info["instruction_sets"]
    if instruction_set not in sets or sets.index(instruction_set) > sets.index(info["cpu"]):
        pytest.skip(f"{instruction_set} is not in this build or not in this processor")
    assert run_program(tmp_path, FLASH_ONLINE_CPU=instruction_set)["cpu"] == instruction_set
