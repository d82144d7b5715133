"""FlashAttention's functions on flash_online's kernels, for programs that were written for FlashAttention, and FlashMask's.

from flash_online.compat.flash_attn import flash_attn_func             # FlashAttention-2's signatures and returns
from flash_online.compat.flash_attn_interface import flash_attn_func   # FlashAttention-3's
from flash_online.compat.flash_attn_cute import flash_attn_func        # FlashAttention-4's
from flash_online.compat import flashmask_attention                    # FlashMask's
flash_online.compat.install("flash_attn")                              # `import flash_attn` finds them, in this process
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from . import bert_padding, flash_attn, flash_attn_cute, flash_attn_interface
from .flashmask import flashmask_attention

__all__ = [
    "Installation",
    "bert_padding",
    "flash_attn",
    "flash_attn_cute",
    "flash_attn_interface",
    "flashmask_attention",
    "install",
]


class _Provided(NamedTuple):
    """A module that `install` puts into sys.modules: our module, and names that it exports in addition to __all__."""

    source: ModuleType
    more: Sequence[str] = ()


_FLASH_ATTN = {
    "flash_attn": _Provided(flash_attn, ["__version__"]),
    "flash_attn.flash_attn_interface": _Provided(flash_attn, flash_attn.PRIVATE),
    "flash_attn.bert_padding": _Provided(bert_padding),
}
_PROVIDED = {
    "flash_attn": _FLASH_ATTN,
    "flash_attn_interface": {"flash_attn_interface": _Provided(flash_attn_interface)},
    "flash_attn.cute": {
        **_FLASH_ATTN,
        "flash_attn.cute": _Provided(flash_attn_cute, ["__version__"]),
        "flash_attn.cute.interface": _Provided(flash_attn_cute),
    },
}
_lock = threading.Lock()
_installed: dict[str, ModuleType] = {}
_counts: dict[str, int] = {}  # installations that use each module


class Installation:
    """The modules that `install` added; `remove` undoes it. As a context manager, removed at the end of the block."""

    def __init__(self, names: tuple[str, ...]):
        self._names = names

    def remove(self) -> None:
        """Takes the modules out of sys.modules, unless another installation wants them. A second call does nothing. Programs
        that imported them keep what they imported."""
        with _lock:
            names, self._names = self._names, ()
            for name in reversed(names):
                _counts[name] -= 1
                if _counts[name]:
                    continue
                del _counts[name]
                module = _installed.pop(name)
                if sys.modules.get(name) is module:  # if it was replaced since, leave it
                    del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if parent and getattr(sys.modules.get(parent), child, None) is module:
                    delattr(sys.modules[parent], child)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def install(name: str = "flash_attn") -> Installation:
    """Puts modules of this package into sys.modules, so that programs which import FlashAttention get them, in this process.

    Call it before such a program is imported: many look for FlashAttention only then. Calls are counted: the modules stay
    until every installation is removed.

    | name | modules |
    |---|---|
    | "flash_attn" | flash_attn, flash_attn.flash_attn_interface, flash_attn.bert_padding: FlashAttention-2's |
    | "flash_attn_interface" | flash_attn_interface: FlashAttention-3's |
    | "flash_attn.cute" | all of "flash_attn", and flash_attn.cute and flash_attn.cute.interface: FlashAttention-4's |

    `flash_attn.__version__` is the interface's version with the local part "+flash.online"; `importlib.util.find_spec` finds
    the modules. No distribution is installed: `importlib.metadata.version("flash_attn")` still raises, so that programs that
    call it, such as transformers, do not take these modules for FlashAttention. Importing other submodules, such as
    flash_attn.layers, raises ModuleNotFoundError.

    Returns:
        an `Installation`; its `remove()` undoes this.

    Raises:
        ValueError: an unknown name.
        RuntimeError: the real package, or another one of that name, can be imported; it is never shadowed.
    """
    if name not in _PROVIDED:
        raise ValueError(f"install: name: expected one of {', '.join(map(repr, _PROVIDED))}, got {name!r}")
    provided = _PROVIDED[name]
    with _lock:
        for module in provided:
            _require_absent(module)
        for module, entry in provided.items():
            if module not in _installed:
                _installed[module] = _shown(module, entry, is_package=module in _packages())
            sys.modules[module] = _installed[module]
            parent, _, child = module.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, _installed[module])
            _counts[module] = _counts.get(module, 0) + 1
    return Installation(tuple(provided))


def _packages() -> set[str]:
    return {module.rpartition(".")[0] for modules in _PROVIDED.values() for module in modules}


def _require_absent(module: str) -> None:
    """Raises RuntimeError if a module of that name is loaded or can be imported, and is not ours."""
    advice = "use flash_online.compat's functions by their own names, or uninstall that package"
    if module in sys.modules:
        if module not in _installed or sys.modules[module] is not _installed[module]:
            where = getattr(sys.modules[module], "__file__", None) or repr(sys.modules[module])
            raise RuntimeError(f"install: sys.modules holds a {module} already, {where}: {advice}")
    elif "." not in module:  # a submodule can be imported only if its package can
        spec = importlib.util.find_spec(module)
        if spec is not None:
            where = spec.origin or list(spec.submodule_search_locations or [])
            raise RuntimeError(f"install: {module} can be imported, from {where}: {advice}")


def _shown(name: str, entry: _Provided, is_package: bool) -> ModuleType:
    """A module `name` with the names of our module."""
    source = entry.source
    module = ModuleType(name, source.__doc__)
    spec = importlib.machinery.ModuleSpec(name, None, origin=source.__file__, is_package=is_package)
    module.__spec__, module.__file__, module.__package__ = spec, source.__file__, spec.parent
    if is_package:
        module.__path__ = []  # other submodules are not found
    for shown in (*source.__all__, *entry.more):
        setattr(module, shown, getattr(source, shown))
    module.__all__ = list(source.__all__)
    return module
