"""Finds the transformers models that use its attention interface: only these may be loaded under our name.

transformers checks a model's support only for its own attention names; every model accepts any other registered name. A model
with its own attention code would then request a mask under our name and read it as an eager mask, which it is not: silently
wrong results. So the host's check of a name, which runs while a model is built and in `set_attn_implementation`, rejects our
names wherever it would reject "sdpa".
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

_NAMES: set[str] = set()  # names registered by `register`

# Host classes that use the interface in all of their layers without declaring it; tests compare each with eager attention.
_COMPARED = frozenset({"markuplm", "nllb-moe", "speech_to_text", "splinter", "switch_transformers"})

_ATTENTION_CLASS = re.compile(r"^class \w*Attention\w*\(", re.MULTILINE)
_TABLE_OF_CLASSES = re.compile(r"\b(\w+)\[\s*(?:self\.)?config\._attn_implementation\s*\]")  # one entry per host name


def check_models_for(name: str) -> None:
    """Makes transformers reject `name` for models that do not use its attention interface. A second call does nothing."""
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
    """Raises ValueError for a model class with its own attention code."""
    if not _asks_for_attention(model):
        raise ValueError(
            f"attn_implementation: expected 'eager' for {model.__name__}, got {name!r}: all or some of its layers do not use "
            "transformers' attention interface and would misread these masks. Load the model with "
            'attn_implementation="eager". A class of your own that uses transformers.AttentionInterface in all of its layers '
            "declares it by _supports_attention_backend = True"
        )


def _asks_for_attention(model: type) -> bool:
    """Based on what the class declares to the host. The declaration may cover only the host's names, so the module's source is
    checked too, as in the host's own `_can_set_attn_implementation`. A class without attention accepts any name."""
    source = _source(model)
    if any(table != "ALL_ATTENTION_FUNCTIONS" for table in _TABLE_OF_CLASSES.findall(source)):
        return False
    if model._supports_attention_backend:  # type: ignore[attr-defined]
        return True
    # A model may lack "sdpa" because of sinks or a head width; the other two names use the interface as well.
    flags = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
    declared = any(getattr(model, flag, False) for flag in flags) or _is_compared(model)
    return model._can_set_attn_implementation() and (declared or not _ATTENTION_CLASS.search(source))  # type: ignore[attr-defined]


def _is_compared(model: type) -> bool:
    kind = getattr(getattr(model, "config_class", None), "model_type", None)
    return kind in _COMPARED and model.__module__.startswith("transformers.models.")


def _source(model: type) -> str:
    """The source of the class's module; empty without one, for example for an interactively defined class."""
    module = sys.modules.get(model.__module__)
    try:
        return "" if module is None else inspect.getsource(module)
    except (OSError, TypeError):
        return ""
