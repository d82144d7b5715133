"""The scripts that hold the house together: .ci/machine_code.py and .ci/house.py."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[2] / ".ci"
COMPILER = shutil.which("g++")


def build(folder: Path, source: str) -> Path:
    """A build folder with one object of CPU code, as CMake would leave it."""
    objects = folder / "cpu_portable.dir"
    objects.mkdir(parents=True)
    (folder / "source.cpp").write_text(source)
    subprocess.run([COMPILER, "-O2", "-c", folder / "source.cpp", "-o", objects / "source.cpp.o"], check=True)
    return folder


def compare(*arguments: Path | str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, CI / "machine_code.py", *arguments], capture_output=True, text=True)


@pytest.mark.skipif(COMPILER is None or shutil.which("objdump") is None, reason="needs g++ and objdump")
class TestMachineCode:
    SOURCE = "int other(int); int first(int x) { return 3 * other(x) + 1; } double second(double x) { return x * 2.5; }"

    def test_renamed_functions_are_the_same(self, tmp_path):
        renamed = self.SOURCE.replace("first", "a_longer_name").replace("other", "callee")
        done = compare(build(tmp_path / "before", self.SOURCE), build(tmp_path / "after", renamed))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "the same machine code" in done.stdout and "1 under another name" in done.stdout

    @pytest.mark.parametrize(("old", "new"), [("+ 1", "+ 2"), ("2.5", "3.5"), ("3 *", "5 *")])
    def test_another_number_is_seen(self, tmp_path, old, new):
        done = compare(build(tmp_path / "before", self.SOURCE), build(tmp_path / "after", self.SOURCE.replace(old, new)))
        assert done.returncode == 1 and "machine code DIFFERS" in done.stdout

    def test_a_missing_function_is_seen(self, tmp_path):
        shorter = self.SOURCE.partition(" double")[0]
        builds = build(tmp_path / "before", self.SOURCE), build(tmp_path / "after", shorter)
        assert "source.cpp.o: 2 functions differ" in compare(*builds).stdout  # the constant of `second` is gone as well
        done = compare("--all", *builds)
        assert done.returncode == 1 and "second" in done.stdout

    def test_a_folder_without_objects_is_an_error(self, tmp_path):
        done = compare(tmp_path, tmp_path)
        assert done.returncode != 0 and "no objects" in done.stderr


@pytest.fixture
def mainloops(monkeypatch):
    """The module .ci/mainloops.py."""
    monkeypatch.syspath_prepend(CI)
    return pytest.importorskip("mainloops")


class TestMainloops:
    # A loop of two products, with a wait that goes back and a rare case, by which the way round is longer.
    CODE = (
        ("MOV R1, R2", 1),
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4]", 2),
        ("@!P0 BRA 0x10", 5),
        ("@P1 BRA 0x80", 3),
        ("FADD R1, R2, R3", 4),
        ("FADD R1, R2, R3", 4),
        ("FADD R1, R2, R3", 4),
        ("FADD R1, R2, R3", 4),
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8]", 1),
        ("@P2 BRA 0x10", 6),
        ("EXIT", 5),
    )

    def listing(self) -> str:
        lines = []
        for n, (text, clocks) in enumerate(self.CODE):
            lines += [f"        /*{16 * n:04x}*/   {text} ;   /* 0x{0:016x} */", f"      /* 0x{clocks << 41:016x} */"]
        return "\n".join(lines)

    def test_the_hot_path_leaves_out_what_is_rare(self, mainloops):
        code = mainloops.instructions(self.listing())
        assert [(i.text, i.clocks) for i in code] == list(self.CODE)
        assert mainloops.mainloop(code, [2]) == mainloops.Loop(9 * 16 / 1024, 5, 2 + 5 + 3 + 1 + 6)

    def test_a_kernel_without_such_a_loop_is_an_error(self, mainloops):
        with pytest.raises(SystemExit, match="no loop"):
            mainloops.mainloop(mainloops.instructions(self.listing()), [2, 2])

    @pytest.mark.parametrize(
        ("head_dim", "products"),
        [(64, [34]), (96, [30]), (128, [34]), (160, [15, 15, 16]), (192, [17, 17, 16]), (256, [25, 25, 16])],
    )
    def test_products_of_a_block(self, mainloops, head_dim, products):
        assert mainloops.products_of(head_dim) == products


@pytest.fixture
def house(tmp_path, monkeypatch):
    """The module .ci/house.py, looking at an empty tree."""
    pytest.importorskip("tree_sitter_cuda")
    spec = importlib.util.spec_from_file_location("house", CI / "house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def write(root: Path, name: str, text: str) -> Path:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    return Path(name)


@pytest.mark.parametrize("lines", [100, 101])
def test_long_functions_are_found(house, tmp_path, lines):
    body = "  ++x;\n" * (lines - 2)
    method = f"template <class T>\n__device__ __forceinline__ void Kernel<T>::run(int x) {{\n{body}}}\n"
    nested = f"void outer(int x) {{\n  call([&](auto y) {{\n{body}  }});\n}}\n"
    python = f"def function(x):\n{'    x += 1' + chr(10)}{('    x += 1' + chr(10)) * (lines - 2)}"
    files = [
        write(tmp_path, "csrc/a.cuh", method),
        write(tmp_path, "csrc/b.cpp", nested),
        write(tmp_path, "flash_online/c.py", python),
        write(tmp_path, "tests/d.py", python * 2),
    ]
    found = house.long_functions(files)
    names = [line.partition(":")[0] for line in found]
    if lines == 101:
        assert set(names) == {"csrc/a.cuh", "csrc/b.cpp", "flash_online/c.py"}
    else:
        assert set(names) == {"csrc/b.cpp"}  # the function around the lambda


def test_full_folders_are_found(house):
    twelve = [Path(f"csrc/cpu/{n}.h") for n in range(12)]
    assert house.full_folders(twelve) == []
    assert house.full_folders([*twelve, Path("csrc/cpu/12.h")]) == ["csrc/cpu: 13 files, 12 are allowed"]
    assert house.full_folders([Path(f"csrc/cuda/hw/{n}.h") for n in range(30)]) == []


def test_the_map_is_held_against_the_tree(house, tmp_path):
    head = "# Map\n\n## 2. The map\n\n"
    entries = "- `csrc/core` (`a.h`\n  `gone.h`): `x`, (y).\n- `csrc/core` (`b.h`): y.\n- `csrc/core/all`: any.\n"
    write(tmp_path, "docs/design/architecture.md", head + entries + "\n## 3. More\n\n- `csrc/not` (`there.h`): x.\n")
    files = [
        Path("csrc/core/a.h"),
        Path("csrc/core/b.h"),
        Path("csrc/core/new.h"),
        Path("csrc/core/all/d.h"),
        Path("csrc/cpu/c.h"),
    ]
    assert house.wrong_map(files) == [
        "docs/design/architecture.md: csrc/core/gone.h does not exist",
        "docs/design/architecture.md: csrc/core/new.h is not on the map",
        "docs/design/architecture.md: the folder csrc/cpu is not on the map",
    ]


def test_words_that_were_given_up_are_found(house, tmp_path):
    rows = "| `[Bb]ig words?` | small |\n| `\\b(old\\|older)\\b` | new |\n"
    table = f"\n## Words that this code gave up\n\n| word | say |\n|---|---|\n{rows}"
    write(tmp_path, "docs/design/glossary.md", table)
    files = [
        write(tmp_path, "a.py", "# a big word\nx = 1\n"),
        write(tmp_path, "b.py", "# golden holder\n# older\n"),
        Path("docs/design/glossary.md"),
    ]
    assert [line.partition(" is ")[0] for line in house.old_words(files)] == ["a.py:1: 'big word'", "b.py:2: 'older'"]


def test_long_pages_are_found(house, tmp_path):
    begin, end = "<!-- python -m flash_online bench docs writes from here -->\n", "<!-- to here -->\n"
    files = [
        write(tmp_path, "docs/fits.md", ("x" * 128 + "\n") * 150),
        write(tmp_path, "docs/long.md", "x\n" * 151),
        write(tmp_path, "docs/design/wide.md", "x" * 129),
        write(tmp_path, "docs/table.md", begin + ("x" * 200 + "\n") * 200 + end),
        write(tmp_path, "docs/design/decisions.md", ("x" * 200 + "\n") * 200),
        write(tmp_path, "docs/lab/a.md", ("x" * 200 + "\n") * 200),
        write(tmp_path, "README.md", ("x" * 200 + "\n") * 200),
    ]
    names = [line.partition(",")[0] for line in house.long_pages(files)]
    assert names == ["docs/long.md: a page of 151 lines", "docs/design/wide.md: a line of 129 columns"]
