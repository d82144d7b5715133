"""Writes docs/api.md, every public name with its signature and docstring: `python docs/api_page.py`. A test compares the page
with the docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

import flash_online
from flash_online import compat, distributed, functional, reference, spans, testing
from flash_online.integrations import diffusers, torch_sdpa, transformers

PAGE = Path(__file__).with_name("api.md")
BEGIN, END = "<!-- python docs/api_page.py writes from here -->\n", "<!-- to here -->\n"
COLUMNS = 128

# (heading, a sentence or "", the module that holds the names, the names)
SECTIONS = (
    (
        "Attention",
        "",
        flash_online,
        ["attention", "varlen_attention", "merge_attention", "kvcache_attention", "cascade_attention", "CascadeLevel"]
        + ["cache_append"],
    ),
    (
        "Spans",
        "[Masks in linear memory](spans.md): functions of `flash_online.spans` that make arguments for attention.",
        spans,
        ["documents", "prefix", "tree", "shared_prefix", "padding", "sink_window", "from_flashmask", "to_mask", "Spans"],
    ),
    ("Statistics", "[What they are for](statistics.md).", flash_online, ["attention_weight_sums"]),
    ("Float8", "[Products in float8](float8.md), for inference.", flash_online, ["float8_attention"]),
    ("Blocks", "[Sparse attention](blocks.md) by lists of blocks.", flash_online, ["BlockList", "block_scores"]),
    ("Softmax and top k", "", flash_online, ["softmax", "log_softmax", "logsumexp", "topk_softmax"]),
    ("Losses", "", flash_online, ["cross_entropy", "linear_cross_entropy"]),
    (
        "Replacing PyTorch's functions",
        "Arguments and results of `flash_online.functional` are those of `torch.nn.functional`.",
        functional,
        list(functional.NAMES),
    ),
    ("Replacing them in models", "", flash_online, ["override", "enable", "disable"]),
    ("What runs", "", flash_online, ["explain", "Plan", "strict", "checked", "InvalidArgument", "SAC_SAVE_OPS"]),
    (
        "Several GPUs",
        "[Context parallelism](distributed.md) describes the methods; [classes over ranks, DTensor](distributed_vocab.md).",
        distributed,
        ["context_parallel_attention", "context_parallel_varlen_attention", "shard", "unshard", "positions", "shard_batch"]
        + ["vocab_parallel_linear_cross_entropy", "register_dtensor"],
    ),
    ("Integrations: transformers", "", transformers, ["register", "fuse_loss"]),
    ("Integrations: PyTorch's operators", "", torch_sdpa, ["register", "activate", "restore"]),
    ("Integrations: diffusers", "", diffusers, ["register"]),
    ("Integrations: callers of flash_attn and FlashMask", "", compat, ["install", "flashmask_attention"]),
    (
        "The references",
        "Plain PyTorch in any dtype: what tests compare with. Arguments are those of the functions above.",
        reference,
        ["attention", "varlen_attention", "merge_attention", "kvcache_attention", "cascade_attention", "cache_append"]
        + [
            "attention_weight_sums",
            "float8_attention",
            "block_scores",
            "softmax",
            "log_softmax",
            "logsumexp",
            "topk_softmax",
            "cross_entropy",
            "linear_cross_entropy",
        ]
        + ["dropout_keep"],
    ),
    (
        "Testing",
        "",
        testing,
        ["assert_close_to_float64", "allowed_error", "error", "unit_in_last_place", "random_tensor", "lay_out", "time_call"]
        + ["peak_extra_bytes", "peak_resident_bytes"],
    ),
)
TITLED = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$")


def signature_of(name: str, value) -> str:
    """The call of a function, or of a class, without annotations, wrapped at commas."""
    parameters, parts, starred = inspect.signature(value).parameters.values(), [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        plain = parameter.replace(annotation=parameter.empty)
        starred |= parameter.kind is parameter.VAR_POSITIONAL
        default = "..." if "factory" in repr(parameter.default) else repr(parameter.default)
        parts.append(str(plain).split("=")[0] + ("" if parameter.default is parameter.empty else f"={default}"))
    return fill(
        f"{name}({', '.join(parts)})", COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def markdown_of(docstring: str) -> Iterator[str]:
    """A docstring's lines as Markdown: the entries of its titled sections become lists."""
    section, entry = None, []

    def close() -> Iterator[str]:
        if entry:
            text, indent = " ".join(entry), "  "
            head = re.match(r"^(\*{0,2}[\w., *]+): (.*)$", text, re.DOTALL) if section != "Returns" else None
            text = f"- `{head[1]}`: {head[2]}" if head else f"- {text}"
            yield fill(text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
            entry.clear()

    for line in docstring.splitlines():
        if found := TITLED.match(line):
            yield from close()
            section = found[1]
            yield f"**{section}**"
            yield ""
        elif section and line.startswith("    "):
            if not line.startswith("     ") and (section != "Returns" or not entry):
                yield from close()
            entry.append(line.strip())
        else:
            yield from close()
            if line.strip():
                section = None
            yield line
    yield from close()


def entry_of(module, name: str) -> Iterator[str]:
    value = getattr(module, name)
    yield f"### {name}"
    yield ""
    if not isinstance(value, type) or value is flash_online.CascadeLevel:
        if callable(value):
            yield from ("```", signature_of(f"{module.__name__}.{name}", value), "```", "")
    yield from markdown_of(inspect.getdoc(value) if callable(value) else attribute_doc(module, name))
    yield ""


def attribute_doc(module, name: str) -> str:
    """The string after an assignment in a module's source."""
    return re.search(rf'^{name} = .*?^"""(.*?)"""', inspect.getsource(module), re.MULTILINE | re.DOTALL)[1]


def page() -> str:
    lines = []
    for title, sentence, module, names in SECTIONS:
        lines += [f"## {title}", ""] + ([sentence, ""] if sentence else [])
        for name in names:
            lines += entry_of(module, name)
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def written(text: str) -> str:
    """The text of docs/api.md with its marked block made anew."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin] + "\n" + page() + "\n" + text[end:]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
