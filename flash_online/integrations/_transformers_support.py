"""Which models of transformers ask it for their attention: only those may be loaded with our name.

transformers looks at what a model supports for its own names alone; any other registered name is taken by every model. One that
computes its attention by itself would then ask for a mask by our name, and read it as the mask of eager attention, which it is
not: numbers that are wrong without a word. So the host's check of a name, which runs while a model is built and in
`set_attn_implementation`, refuses ours where it would refuse "sdpa".
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

_NAMES: set[str] = set()  # those that `register` has taken

# Types of the host's that go through the interface in all of their layers and do not say so; the tests compare each with eager.
_COMPARED = frozenset({"markuplm", "nllb-moe", "speech_to_text", "splinter", "switch_transformers"})

_ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\(", re.MULTILINE)
_TABLE_OF_CLASSES = re.compile(r"\b(\w+)\[\s*(?:self\.)?config\._attn_implementation\s*\]")  # one entry per name of the host's


def check_models_for(name: str) -> None:
    """Makes transformers refuse `name` for models that do not ask it for their attention. A second call changes nothing."""
    from transformers import PreTrainedModel

    _NAMES.add(name)
    host = PreTrainedModel.get_correct_attn_implementation
    if getattr(host, "_flash_online", False):
        return

    @functools.wraps(host)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **words: Any) -> str:
        if requested_attention in _NAMES:
            refuse_own_attention(type(self), requested_attention)
        return host(self, requested_attention, *args, **words)

    get_correct_attn_implementation._flash_online = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def refuse_own_attention(model: type, name: str) -> None:
    """Raises ValueError for a class of models with attention of its own."""
    if not _asks_for_attention(model):
        raise ValueError(
            f"attn_implementation: {model.__name__} does not ask transformers for its attention, or only in parts of it, so "
            f"that {name!r} could not compute it, and would give it masks that it reads otherwise. Load the model with "
            'attn_implementation="eager". A class of your own that goes through transformers.AttentionInterface in all of its '
            "layers says so by _supports_attention_backend = True"
        )


def _asks_for_attention(model: type) -> bool:
    """By what the class says of itself to the host; that can mean names of the host's alone, so that the source of its module
    has a say too, as in the host's own `_can_set_attn_implementation`. A class without any attention may have any name."""
    source = _source(model)
    if any(table != "ALL_ATTENTION_FUNCTIONS" for table in _TABLE_OF_CLASSES.findall(source)):
        return False
    if model._supports_attention_backend:  # type: ignore[attr-defined]
        return True
    # Sinks or a head width can be why a model has no "sdpa"; the other two names go through the interface as well.
    flags = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
    declared = any(getattr(model, flag, False) for flag in flags) or _is_compared(model)
    return model._can_set_attn_implementation() and (declared or not _ATTENTION_CLASS.search(source))  # type: ignore[attr-defined]


def _is_compared(model: type) -> bool:
    kind = getattr(getattr(model, "config_class", None), "model_type", None)
    return kind in _COMPARED and model.__module__.startswith("transformers.models.")


def _source(model: type) -> str:
    """The source of the class's module; empty where there is none, as for a class that was typed in."""
    module = sys.modules.get(model.__module__)
    try:
        return "" if module is None else inspect.getsource(module)
    except (OSError, TypeError):
        return ""
