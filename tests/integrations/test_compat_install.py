"""flash_online.compat.install: what `import flash_attn` finds then, what it never hides, and that it undoes all of it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import pickle
import subprocess
import sys
import types

import pytest
import torch

import flash_online
from flash_online import compat

if importlib.util.find_spec("flash_attn") or importlib.util.find_spec("flash_attn_interface"):
    pytest.skip("FlashAttention itself is installed", allow_module_level=True)


def theirs() -> list[str]:
    return sorted(name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface"))


@pytest.fixture(autouse=True)
def nothing_left():
    assert not theirs()
    yield
    assert not theirs(), "an installation was left"


def test_imports_of_flash_attention_2():
    with compat.install("flash_attn"):
        import flash_attn
        import flash_attn.bert_padding as padding
        from flash_attn import flash_attn_func, flash_attn_with_kvcache
        from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward, flash_attn_varlen_func

        assert flash_attn.bert_padding is padding and sys.modules["flash_attn.bert_padding"] is padding
        assert flash_attn_func is compat.flash_attn.flash_attn_func
        assert flash_attn_varlen_func is flash_attn.flash_attn_interface.flash_attn_varlen_func
        assert flash_attn_with_kvcache is compat.flash_attn.flash_attn_with_kvcache
        assert _flash_attn_forward.__name__ == "_flash_attn_forward" and callable(_flash_attn_backward)
        assert not hasattr(flash_attn, "_flash_attn_forward") and not hasattr(flash_attn, "cute")
        assert set(flash_attn.__all__) < set(dir(flash_attn))
        q = torch.randn(1, 5, 2, 8)
        assert flash_attn_func(q, q, q, causal=True).shape == q.shape
        assert pickle.loads(pickle.dumps(flash_attn_func)) is flash_attn_func
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn")


def test_what_callers_ask_about_the_package():
    from packaging.version import Version

    with compat.install():
        import flash_attn

        assert Version("2.8.3") <= Version(flash_attn.__version__) < Version("2.9")
        spec = importlib.util.find_spec("flash_attn")
        assert spec is flash_attn.__spec__ and spec.name == "flash_attn" and spec.origin == compat.flash_attn.__file__
        assert importlib.util.find_spec("flash_attn.bert_padding").parent == "flash_attn"
        assert importlib.util.find_spec("flash_attn.layers") is None
        with pytest.raises(ModuleNotFoundError, match=r"No module named 'flash_attn\.layers'"):
            importlib.import_module("flash_attn.layers.rotary")
        for name in ("flash_attn", "flash-attn"):
            with pytest.raises(importlib.metadata.PackageNotFoundError):
                importlib.metadata.version(name)
    assert importlib.util.find_spec("flash_attn") is None


def test_the_other_names():
    with compat.install("flash_attn_interface"):
        from flash_attn_interface import flash_attn_combine, flash_attn_func

        assert flash_attn_func is compat.flash_attn_interface.flash_attn_func and callable(flash_attn_combine)
        assert theirs() == ["flash_attn_interface"]
    with compat.install("flash_attn.cute"):
        import flash_attn
        from flash_attn.cute import flash_attn_func
        from flash_attn.cute.interface import flash_attn_varlen_func

        assert flash_attn_func is compat.flash_attn_cute.flash_attn_func is flash_attn.cute.flash_attn_func
        assert flash_attn_varlen_func is compat.flash_attn_cute.flash_attn_varlen_func
        assert flash_attn.flash_attn_func is compat.flash_attn.flash_attn_func


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_installations_count(order):
    """Several installations, removed in any order and twice: the modules stay as long as one of them wants them."""
    names = ["flash_attn", "flash_attn", "flash_attn.cute"]
    installations = [compat.install(name) for name in names]
    module, wanted = sys.modules["flash_attn"], {0, 1, 2}
    for n in order:
        installations[n].remove()
        installations[n].remove()
        wanted.remove(n)
        assert (sys.modules.get("flash_attn") is module) == bool(wanted)
        assert ("flash_attn.cute" in sys.modules) == hasattr(module, "cute") == (2 in wanted)
    again = compat.install()
    assert sys.modules["flash_attn"] is not module
    again.remove()


def test_the_real_package_is_never_hidden(tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flash_attn", "flash_attn.cute"):
        with pytest.raises(RuntimeError, match=r"install: flash_attn can be imported, from .*flash_attn/__init__\.py"):
            compat.install(name)
    compat.install("flash_attn_interface").remove()  # another package
    import flash_attn

    with pytest.raises(RuntimeError, match="install: sys.modules holds a flash_attn already"):
        compat.install()
    assert flash_attn.real and sys.modules.pop("flash_attn") is flash_attn


@pytest.mark.parametrize("standing", [types.ModuleType("flash_attn"), None])
def test_other_modules_in_sys_modules_stay(standing):
    sys.modules["flash_attn"] = standing
    with pytest.raises(RuntimeError, match="install: sys.modules holds a flash_attn already"):
        compat.install()
    assert sys.modules.pop("flash_attn") is standing and not theirs()


def test_a_module_put_in_our_place_stays():
    installation = compat.install()
    other = sys.modules["flash_attn"] = types.ModuleType("flash_attn")
    installation.remove()
    assert sys.modules.pop("flash_attn") is other and not theirs()


def test_a_module_that_was_taken_away_comes_back():
    installation = compat.install()
    module = sys.modules.pop("flash_attn")
    with compat.install():
        assert sys.modules["flash_attn"] is module
    installation.remove()


def test_unknown_names():
    with pytest.raises(ValueError, match="install: name: expected one of 'flash_attn', .*, got 'flash_attn_3'"):
        compat.install("flash_attn_3")


def test_an_error_in_the_block_removes_too():
    with pytest.raises(KeyError), compat.install():
        raise KeyError


def test_imports_install_nothing():
    """In a process of its own: import flash_online does not import compat, and import flash_online.compat installs nothing."""
    program = """
import sys, flash_online
assert not any(name.startswith("flash_online.compat") for name in sys.modules)
import flash_online.compat
assert not any(name.split(".")[0] in ("flash_attn", "flash_attn_interface") for name in sys.modules)
assert flash_online.compat.flash_attn.flash_attn_func
"""
    root = os.path.dirname(os.path.dirname(flash_online.__file__))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
