"""The providers of attention over cached keys. Each is a function that returns the Call to time for a Problem, or raises
Unavailable."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as torch_functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_online
import flash_online.functional as functional

from ..attention.peers import load_fa3
from ..attention.summary import CUDNN, EFFICIENT, FA3
from ..peers import Unavailable
from ..summary import FLASH, OURS
from .cases import FLOAT8, SHARED, Problem, Tensors
from .summary import ANY_SPLITS, CONTIGUOUS, FA3_FULL, FLASHINFER, PLAIN, REPEATED, WIDE, WITH_LENGTHS

WORKSPACE = 128 << 20  # bytes for FlashInfer's wrappers
DECODE_ROWS = 128  # most rows of queries per key head of the kernel for few queries


@dataclass(frozen=True)
class Call:
    """`runs` has a call for each of the problem's sets; `view` converts an output to [B, H, L, Ev]. `setting` is entered around
    the first calls and the capture of the graph, so that a backend is chosen there."""

    problem: Problem
    runs: list[Callable[[], Tensor]]
    view: Callable[[Tensor], Tensor] = lambda t: t
    setting: Callable[[], AbstractContextManager] = nullcontext


# --- Ours --------------------------------------------------------------------------------------------------------------------


def ours(problem: Problem, lengths: bool | None = None) -> Call:
    """Under strict(), so that calls forwarded to torch are never timed as ours. `lengths`: whether the call gets them, as a
    tensor on the device. By default it does, except over full contiguous caches: torch's function gets none there either."""
    if "prefix" in problem.options:
        return ours_cascade(problem)
    if problem.cell.family == "drop-in":
        return torch_function(problem, functional.scaled_dot_product_attention, flash_online.strict)
    options = {"block_table": problem.table, "sinks": problem.sinks, "rotary": problem.rotary}
    options["num_splits"] = problem.options.get("num_splits")
    if window := problem.options.get("window"):
        options["window"] = (window - 1, 0)
    if problem.scales:
        options |= dict(zip(("key_scale", "value_scale"), problem.scales, strict=True))

    if lengths is None:
        lengths = problem.cell.family != "plain"

    def run(one: Tensors) -> Callable[[], Tensor]:
        caches = (one.query, one.key_cache, one.value_cache, problem.lengths if lengths else None)
        return functools.partial(flash_online.kvcache_attention, *caches, key=one.key, value=one.value, **options)

    return Call(problem, [run(one) for one in problem.sets], setting=flash_online.strict)


def ours_cascade(problem: Problem) -> Call:
    """The prefix as the keys of groups of sequences, of at most DECODE_ROWS rows each; each sequence's other keys
    separately."""
    batch, queries, prefix = problem.cell.sizes["B"], problem.cell.queries, problem.options["prefix"]
    pages, members = prefix // problem.options["page"], max(1, DECODE_ROWS // (problem.cell.group_size * queries))
    starts = torch.arange(batch + 1, dtype=torch.int32, device=problem.device) * queries
    groups = torch.cat([starts[:-1:members], starts[-1:]])
    count = len(groups) - 1
    first = groups, problem.table[:count, :pages].contiguous(), problem.lengths[:count].clone().fill_(prefix)
    own = starts, problem.table[:, pages:].contiguous(), problem.lengths - prefix, queries
    levels = [flash_online.CascadeLevel(*first, members * queries), flash_online.CascadeLevel(*own)]

    def run(one: Tensors) -> Callable[[], Tensor]:
        query = one.query.transpose(1, 2).flatten(0, 1).contiguous()
        return functools.partial(flash_online.cascade_attention, query, one.key_cache, one.value_cache, levels)

    runs = [run(one) for one in problem.sets]
    return Call(problem, runs, view=lambda out: out.unflatten(0, (batch, -1)).transpose(1, 2), setting=flash_online.strict)


def ours_repeated(problem: Problem) -> Call:
    return ours(problem.without("prefix"))


def ours_with_lengths(problem: Problem) -> Call:
    return ours(problem, lengths=True)


def ours_plain(problem: Problem) -> Call:
    return ours(problem.without("append"))


def ours_with_any_splits(problem: Problem) -> Call:
    return ours(problem.without("num_splits"))


def ours_contiguous(problem: Problem) -> Call:
    return ours(problem.gathered())


def ours_wide(problem: Problem) -> Call:
    return ours(problem.widened())


# --- FlashAttention-3 --------------------------------------------------------------------------------------------------------


def fa3(problem: Problem, lengths: bool = True) -> Call:
    """Its registered operator with the arguments of its flash_attn_with_kvcache. Float8 caches require float8 queries. For MLA
    it takes the columns of queries and keys that hold no values as separate tensors."""
    if problem.sinks is not None:
        raise Unavailable("it has no sinks")
    if not lengths and (problem.table is not None or problem.cell.lengths or problem.options.get("append")):
        raise Unavailable("it is for contiguous caches that are full")
    load_fa3()
    options = {
        "softmax_scale": problem.cell.sizes["E"] ** -0.5,
        "is_causal": True,
        "window_size_left": problem.options.get("window", 0) - 1,
        "num_splits": 0,
    }
    if "window" in problem.options:
        options["window_size_right"] = 0
    if lengths:
        options["seqused_k"] = problem.lengths
    if problem.table is not None:
        options["page_table"] = problem.table
    if problem.rotary is not None:
        options |= dict(zip(("rotary_cos", "rotary_sin"), problem.rotary, strict=True)) | {"is_rotary_interleaved": False}
    if problem.scales is not None:
        options |= dict(zip(("k_descale", "v_descale"), problem.scales, strict=True))

    def run(one: Tensors) -> Callable[[], Tensor]:
        query, keys, values = (t.transpose(1, 2) for t in (one.query, one.key_cache, one.value_cache))
        own = dict(options)
        if one.key is not None:
            own |= {"k_new": one.key.transpose(1, 2).contiguous(), "v_new": one.value.transpose(1, 2).contiguous()}
        if problem.scales is not None:
            query = query.to(FLOAT8)
        elif problem.options.get("values") == SHARED:
            width = values.shape[-1]
            own["q_v"], query, keys = query[..., :width].contiguous(), query[..., width:], keys[..., width:]
        query = query.contiguous()
        return lambda: torch.ops.flash_attn_3.fwd(query, keys, values, **own)[0]

    return Call(problem, [run(one) for one in problem.sets], view=lambda out: out.transpose(1, 2))


def fa3_full(problem: Problem) -> Call:
    """The call for full caches, without lengths on the device."""
    return fa3(problem, lengths=False)


# --- torch -------------------------------------------------------------------------------------------------------------------


def sdpa(backend: SDPBackend) -> Callable[[Problem], Call]:
    """torch's function with one backend, for one query over full contiguous caches."""

    def provider(problem: Problem) -> Call:
        if problem.cell.queries > 1:
            raise Unavailable("torch's causal rule is aligned at the first key")
        if problem.table is not None or problem.scales is not None or problem.cell.lengths:
            raise Unavailable("torch's function has no pages, lengths or float8")
        return torch_function(problem, torch_functional.scaled_dot_product_attention, lambda: only(backend))

    return provider


def torch_function(problem: Problem, function: Callable, setting: Callable[[], AbstractContextManager]) -> Call:
    options = {"attn_mask": problem.mask, "enable_gqa": problem.cell.group_size > 1}
    runs = [functools.partial(function, one.query, one.key_cache, one.value_cache, **options) for one in problem.sets]
    return Call(problem, runs, setting=setting)


@contextmanager
def only(backend: SDPBackend):
    """Torch's function has this backend alone."""
    with warnings.catch_warnings(), sdpa_kernel(backend):
        warnings.simplefilter("ignore")  # torch warns of each reason for refusing
        yield


# --- FlashInfer --------------------------------------------------------------------------------------------------------------


def flashinfer(problem: Problem) -> Call:
    """Its wrappers for pages, planned before timing. A contiguous cache would be pages as long as a sequence, which it does not
    split, so it is left out there."""
    if problem.table is None:
        raise Unavailable("it takes pages, and cuts sequences between them")
    if problem.sinks is not None or problem.options.get("append") or problem.options.get("values") == SHARED:
        raise Unavailable("its wrappers for pages have no such option")
    try:
        import flashinfer as library
    except ImportError:
        raise Unavailable("it is not installed") from None
    cell, page = problem.cell, problem.options["page"]
    keys = torch.tensor(cell.keys)
    counts = (keys + page - 1) // page
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int().to(problem.device)
    pages = torch.cat([row[:count] for row, count in zip(problem.table.cpu(), counts.tolist(), strict=True)])
    csr = (starts, pages.to(problem.device), ((keys - 1) % page + 1).int().to(problem.device))
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=problem.device)
    shape = (cell.sizes["H"], cell.sizes["Hkv"], cell.sizes["E"])
    options = {
        "window_left": problem.options.get("window", 0) - 1,
        "q_data_type": cell.dtype,
        "kv_data_type": cell.cache_dtype,
    }
    if cell.queries == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=cell.group_size >= 4)
        wrapper.plan(*csr, *shape, page, **options)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        queries = torch.arange(len(keys) + 1, dtype=torch.int32, device=problem.device) * cell.queries
        wrapper.plan(queries, *csr, *shape, page, causal=True, **options)

    def run(one: Tensors) -> Callable[[], Tensor]:
        query = one.query.transpose(1, 2).flatten(0, 1).contiguous()
        caches = tuple(t.transpose(1, 2) for t in (one.key_cache, one.value_cache))
        return lambda: wrapper.run(query, caches)

    batch = len(keys)
    return Call(problem, [run(one) for one in problem.sets], view=lambda out: out.unflatten(0, (batch, -1)).transpose(1, 2))


PROVIDERS: dict[str, Callable[[Problem], Call]] = {
    OURS: ours,
    WITH_LENGTHS: ours_with_lengths,
    PLAIN: ours_plain,
    ANY_SPLITS: ours_with_any_splits,
    CONTIGUOUS: ours_contiguous,
    WIDE: ours_wide,
    REPEATED: ours_repeated,
    FA3: fa3,
    FA3_FULL: fa3_full,
    CUDNN: sdpa(SDPBackend.CUDNN_ATTENTION),
    FLASH: sdpa(SDPBackend.FLASH_ATTENTION),
    EFFICIENT: sdpa(SDPBackend.EFFICIENT_ATTENTION),
    FLASHINFER: flashinfer,
}
_CONTIGUOUS = (FA3, FA3_FULL, CUDNN, FLASH)  # peers
IN_FAMILY = {
    "plain": (OURS, WITH_LENGTHS, *_CONTIGUOUS),
    "drop-in": (OURS, CUDNN, FLASH, EFFICIENT),
    "paged": (OURS, FA3, FLASHINFER),
    "options": (OURS, *_CONTIGUOUS, FLASHINFER),
    "float8": (OURS, WIDE, FA3, FA3_FULL),
    "MLA": (OURS, FA3),
    "prefill": (OURS, FA3, FLASHINFER),
    "append": (OURS, PLAIN, FA3),
    "prefix": (OURS, REPEATED, FA3, FLASHINFER),
    "splits": (OURS, ANY_SPLITS),
}
PEERS = [name for name in PROVIDERS if not name.startswith(OURS)]


def providers(cell, wanted: list[str] | None = None) -> dict[str, Callable[[Problem], Call]]:
    """The providers of a cell, ours first; if `wanted` names peers, only those."""
    names = list(IN_FAMILY[cell.family])
    if cell.family == "prefill":
        names.insert(1, CONTIGUOUS if "page" in cell.options else FA3_FULL)
    if cell.family == "options":  # the other variants are for contiguous caches
        names = [n for n in names if ("page" in cell.options) == (n == FLASHINFER) or n in (OURS, FA3)]
    return {n: PROVIDERS[n] for n in names if n not in PEERS or not wanted or n in wanted}
