"""The docs: their Python blocks and the README's run, in order, on the CPU; the page of the API is made of the docstrings; the
site builds. A block that cannot run stands after a comment `<!-- not run: reason -->`; these are counted, and should stay few.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import flash_online

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"<!-- not run: (?P<reason>.+?) -->")
MOST_NOT_RUN = 3  # in all pages together; a fragment or a GPU's code is worth one of them
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "integrations").glob("*.md"), ROOT / "README.md"])

if not (ROOT / "docs").is_dir():
    pytest.skip("the docs are part of a checkout", allow_module_level=True)


def python_blocks(page: Path) -> list[tuple[int, str, str | None]]:
    """(number of the first line, source, why it is not run or None) of each Python block."""
    blocks, lines, at = [], page.read_text().splitlines(), 0
    while at < len(lines):
        if re.match(r"```(python|py)\b", lines[at]):
            end = lines.index("```", at)
            mark = MARK.fullmatch(next((line for line in reversed(lines[:at]) if line.strip()), ""))
            blocks.append((at + 2, "\n".join(lines[at + 1 : end]), mark["reason"] if mark else None))
            at = end
        at += 1
    return blocks


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.stem)
def test_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    threads, originals = torch.get_num_threads(), dict(flash_online.functional.ORIGINALS)
    module = types.ModuleType(f"docs_of_{page.stem}")  # torch's tracers look a function's module up by its name
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for line, source, reason in python_blocks(page):
        if reason is None:
            # The blank lines make the numbers of a traceback those of the page.
            exec(compile("\n" * (line - 1) + source, page, "exec"), module.__dict__)
    assert torch.get_num_threads() == threads
    assert all(getattr(torch.nn.functional, name) is function for name, function in originals.items()), "an enable() was left"


def test_few_blocks_are_not_run():
    marked = [f"{page.name}:{line}: {why}" for page in PAGES for line, _, why in python_blocks(page) if why]
    assert len(marked) <= MOST_NOT_RUN, "\n".join(marked)


def test_marks_stand_before_a_block():
    for page in PAGES:
        assert len(MARK.findall(page.read_text())) == sum(why is not None for *_, why in python_blocks(page)), page.name


def test_blocks_and_their_marks_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n<!-- not run: a fragment -->\n```py\n...\n```\n```\nno python\n```\n")
    assert python_blocks(page) == [(2, "x = 1", None), (6, "...", "a fragment")]


def test_the_api_page_is_made_of_the_docstrings():
    """`python docs/api_page.py` writes it. It has every public name."""
    specification = importlib.util.spec_from_file_location("api_page", ROOT / "docs" / "api_page.py")
    api_page = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(api_page)
    text = (ROOT / "docs" / "api.md").read_text()
    assert api_page.written(text) == text, "docs/api.md is out of date: python docs/api_page.py"
    listed = {name for *_, module, names in api_page.SECTIONS for name in names if module is flash_online}
    assert listed == set(flash_online.__all__) - {"functional", "reference", "spans", "testing"}
    assert max(map(len, text.splitlines())) <= 128


MODULES = [flash_online, flash_online.functional, flash_online.reference, flash_online.spans, flash_online.testing]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(module):
    ours = module.__name__ + "."
    names = {flash_online: flash_online.__all__, flash_online.functional: flash_online.functional.NAMES}.get(module)
    for name in names or [
        n for n, o in vars(module).items() if not n.startswith("_") and getattr(o, "__module__", "") == ours[:-1]
    ]:
        value = getattr(module, name)
        assert not callable(value) or inspect.getdoc(value), ours + name


def test_the_site_builds(tmp_path):
    for needed in ("mkdocs", "material"):
        pytest.importorskip(needed)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # strict: of any warning
    assert (tmp_path / "api" / "index.html").is_file()


def test_links_lead_somewhere():
    """Those of all pages to files; the site's build also looks at those to headings, where mkdocs is installed."""
    dead = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in target and not (page.parent / target).exists():
                dead.append(f"{page.relative_to(ROOT)}: {target}")
    assert not dead, "\n".join(dead)


@pytest.mark.slow
def test_the_serving_loop_makes_the_texts_of_generate():
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, ROOT / "examples" / "serving_loop.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 texts are those of generate()" in done.stdout
