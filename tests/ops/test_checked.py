"""flash_online.checked(): what only the device reads is read by the host inside it, and an error names the argument."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flash_online
import flash_online.functional as F
from flash_online import InvalidArgument, _checked
from flash_online.compat import flash_attn, flash_attn_cute, flash_attn_interface

ROWS, POOL = torch.randn(8, 2, 16), torch.randn(6, 4, 2, 16)
QUERY, CACHE, NEW = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 1, 16)
TABLE = torch.tensor([[0, 1, 7], [2, -1, 3]], dtype=torch.int32)  # entries of no block where no key is
PREFIX = torch.tensor([[0, 1]], dtype=torch.int32)
LOGITS, ANGLES = torch.randn(3, 5), torch.rand(8, 4)


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def moved(value, device):
    if isinstance(value, torch.Tensor):
        return value.clone().to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(moved(item, device) for item in value)
    return {name: moved(item, device) for name, item in value.items()} if isinstance(value, dict) else value


def packed(starts_q, starts_k=None, longest_q=8, longest_k=8, **options):
    starts_k = starts_q if starts_k is None else starts_k
    return flash_online.varlen_attention, (ROWS, ROWS, ROWS, starts_q, starts_k, longest_q, longest_k), options


def pages(lengths=None, starts_k=None, starts_q=None, longest_q=8, longest_k=12, **options):
    starts_q = ints(0, 3, 8) if starts_q is None else starts_q
    options |= {"block_table": TABLE, "seqused_k": lengths}
    return flash_online.varlen_attention, (ROWS, POOL, POOL, starts_q, starts_k, longest_q, longest_k), options


def cached(lengths, **options):
    return flash_online.kvcache_attention, (QUERY, CACHE, CACHE, lengths), options


def appended(lengths, **options):
    return cached(lengths, key=NEW, value=NEW, **options)


def over_table(table, lengths, **options):
    pool = POOL.transpose(1, 2)
    return flash_online.kvcache_attention, (QUERY, pool, pool, lengths), {"block_table": torch.tensor(table).int(), **options}


def queries(starts, **options):
    return flash_online.kvcache_attention, (ROWS, CACHE, CACHE, ints(3, 9)), {"cu_seqlens_q": starts, **options}


def ends(lengths, **options):
    return flash_online.cache_append, (NEW, NEW, CACHE, CACHE), {"cache_seqlens": lengths, **options}


def new_rows(starts, lengths=None):
    lengths = ints(3, 3) if lengths is None else lengths
    options = {"cache_seqlens": lengths, "cu_seqlens_new": starts}
    return flash_online.cache_append, (ROWS[:3], ROWS[:3], CACHE, CACHE), options


def slots(*places, **options):
    return flash_online.cache_append, (ROWS[:3], ROWS[:3], CACHE, CACHE), {"slots": torch.tensor(places), **options}


def cascade(first, last):
    pool = POOL.transpose(1, 2)
    return flash_online.cascade_attention, (ROWS, pool, pool, [first, last]), {}


def rotated(offsets=None):
    return (ANGLES, ANGLES) if offsets is None else (ANGLES, ANGLES, False, offsets)


def losses(*targets, **options):
    return flash_online.cross_entropy, (LOGITS, torch.tensor(targets)), options


def linear_losses(*targets, **options):
    return F.linear_cross_entropy, (LOGITS, torch.eye(5), torch.tensor(targets)), options


FIRST, LAST = (ints(0, 8), PREFIX, ints(8)), (ints(0, 3, 7), TABLE, ints(3, 4))

# The argument that the error begins with, and the call.
WRONG = {
    "lengths for starts": ("cu_seqlens_q", packed(ints(3, 5))),
    "lengths for starts, the first 0": ("cu_seqlens_q", packed(ints(0, 8, 0))),
    "lengths for the keys' starts": ("cu_seqlens_k", packed(ints(0, 3, 8), ints(3, 5, 8))),
    "starts that descend": ("cu_seqlens_k", packed(ints(0, 3, 8), ints(0, 9, 8))),
    "lengths after a 0": ("cu_seqlens_q", packed(ints(0, 4, 4), longest_q=4)),
    "keys' lengths after a 0": ("cu_seqlens_k", packed(ints(0, 3, 8), ints(0, 3, 5), longest_k=5)),
    "packed queries: lengths after a 0": ("cu_seqlens_q", queries(ints(0, 4, 4), max_seqlen_q=4)),
    "starts past the end": ("cu_seqlens_q", packed(ints(0, 3, 9))),
    "a longer sequence": ("max_seqlen_q", packed(ints(0, 3, 8), longest_q=4)),
    "a longer sequence of keys": ("max_seqlen_k", packed(ints(0, 3, 8), longest_k=4)),
    "more keys used than there are": ("seqused_k", packed(ints(0, 3, 8), seqused_k=ints(3, 6))),
    "queries used below 0": ("seqused_q", packed(ints(0, 3, 8), seqused_q=ints(-1, 5))),
    "pages: lengths for starts": ("cu_seqlens_q", pages(ints(8, 4), starts_q=ints(3, 5, 8))),
    "pages: an entry past the pool": ("block_table", pages(ints(9, 4))),
    "pages: an entry below 0": ("block_table", pages(ints(8, 5))),
    "pages: an entry by starts": ("block_table", pages(starts_k=ints(0, 9, 13))),
    "pages: more keys than entries": ("seqused_k", pages(ints(8, 13))),
    "pages: lengths for the keys' starts": ("cu_seqlens_k", pages(starts_k=ints(8, 4, 5))),
    "pages: a longer sequence": ("max_seqlen_q", pages(ints(8, 4), longest_q=4)),
    "pages: a longer sequence of keys": ("max_seqlen_k", pages(ints(8, 4), longest_k=7)),
    "pages: queries used": ("seqused_q", pages(ints(8, 4), seqused_q=ints(4, 5))),
    "pages: an entry inside a window": ("block_table", pages(ints(8, 8), window=(0, None))),
    "a length below 0": ("cache_seqlens", cached(ints(-1, 3))),
    "a length beyond the capacity": ("cache_seqlens", cached(ints(3, 10))),
    "no room for new keys": ("cache_seqlens", appended(ints(3, 9))),
    "no room where all is full": ("cache_seqlens", appended(None)),
    "a row that the cache lacks": ("cache_batch_idx", cached(ints(3, 9), cache_batch_idx=ints(0, 2))),
    "one row of two sequences": ("cache_batch_idx", appended(ints(3, 3), cache_batch_idx=ints(1, 1))),
    "padding beyond the capacity": ("leftpad", cached(ints(3, 9), leftpad=ints(0, 10))),
    "padding below 0": ("leftpad", cached(ints(3, 9), leftpad=ints(0, -1))),
    "positions past the table": ("rotary", appended(ints(3, 8), rotary=rotated())),
    "offsets past the table": ("rotary", appended(ints(3, 4), rotary=rotated(ints(0, 8)))),
    "offsets below 0": ("rotary", cached(ints(3, 4), rotary=rotated(ints(-1, 0)))),
    "an entry past the pool": ("block_table", over_table([[0, 6], [1, 2]], ints(5, 5))),
    "one page of two sequences": ("block_table", over_table([[0, 1], [0, 2]], ints(1, 1), key=NEW, value=NEW)),
    "packed queries: lengths": ("cu_seqlens_q", queries(ints(3, 5, 8))),
    "packed queries: past the end": ("cu_seqlens_q", queries(ints(0, 3, 9))),
    "packed queries: a longer sequence": ("max_seqlen_q", queries(ints(0, 3, 8), max_seqlen_q=4)),
    "append: no room": ("cache_seqlens", ends(ints(3, 9))),
    "append: below 0": ("cache_seqlens", ends(ints(3, -1))),
    "append: positions": ("rotary", ends(ints(3, 8), rotary=rotated(), query=NEW)),
    "append: lengths for starts": ("cu_seqlens_new", new_rows(ints(1, 2, 3))),
    "append: no room for packed rows": ("cache_seqlens", new_rows(ints(0, 1, 3), ints(3, 8))),
    "slots past the pool": ("slots", slots(0, 18, 1)),
    "slots below -1": ("slots", slots(0, -2, 1)),
    "slots twice": ("slots", slots(3, 1, 3)),
    "slots: positions": ("rotary", slots(0, 1, 2, rotary=rotated(ints(0, 7, 8)))),
    "cascade: starts": (r"levels\[1\].cu_seqlens_q", cascade(FIRST, (ints(3, 3, 7), *LAST[1:]))),
    "cascade: a length": (r"levels\[0\].cache_seqlens", cascade((*FIRST[:2], ints(9)), LAST)),
    "cascade: an entry": (r"levels\[1\].block_table", cascade(FIRST, (*LAST[:2], ints(9, 4)))),
    "cascade: a larger group": (r"levels\[0\].max_seqlen_q", cascade((*FIRST, 7), LAST)),
    "a target past the classes": ("target", losses(0, 5, 4)),
    "a target below 0": ("target", losses(0, -1, 4, reduction="none")),
    "a target with another ignore_index": ("target", losses(0, -100, 4, ignore_index=2)),
    "a target of a linear layer": ("target", linear_losses(0, 5, 4)),
}

# Calls that look alike, and are right.
RIGHT = {
    "sequences": packed(ints(0, 3, 8)),
    "an empty one": packed(ints(0, 0, 8)),
    "none": packed(ints(0)),
    "rows of no sequence after the last": packed(ints(0, 3, 5), longest_q=3, longest_k=3),
    "one short sequence": packed(ints(0, 5), longest_q=5, longest_k=5),
    "used": packed(ints(0, 3, 8), seqused_k=ints(3, 0), seqused_q=ints(0, 5)),
    "pages": pages(ints(8, 4)),
    "pages by starts": pages(starts_k=ints(0, 8, 12)),
    "pages outside a window": pages(ints(8, 12), starts_q=ints(0, 7, 8), window=(3, None)),
    "lengths": cached(ints(0, 9)),
    "room for one": appended(ints(0, 8)),
    "one row read twice": cached(ints(3, 9), cache_batch_idx=ints(1, 1)),
    "one page read twice": over_table([[0, 1], [0, 2]], ints(5, 5), key=NEW, value=NEW),
    "positions": appended(ints(0, 7), rotary=rotated()),
    "rows of no sequence": queries(ints(0, 3, 7)),
    "slots that are skipped": slots(0, -1, -1),
    "ends": ends(ints(0, 8)),
    "packed ends": new_rows(ints(0, 1, 3)),
    "a cascade": cascade(FIRST, LAST),
    "targets": losses(0, -100, 4),
    "another ignore_index": losses(0, 7, 4, ignore_index=7),
    "targets of a linear layer": linear_losses(4, 0, -100),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_error_names_the_argument(cache_device, name):
    argument, (function, arguments, options) = WRONG[name]
    arguments, options = moved(arguments, cache_device), moved(options, cache_device)
    if argument != "target":  # a device assert on CUDA, and an IndexError on the CPU
        function(*arguments, **options)
    with flash_online.checked(), pytest.raises(InvalidArgument, match=f"^{argument}: expected .*got "):
        function(*arguments, **options)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_has_the_bits_that_it_has_elsewhere(cache_device, name):
    function, arguments, options = moved(RIGHT[name], cache_device)
    wanted = function(*arguments, **options)
    function, arguments, options = moved(RIGHT[name], cache_device)
    with flash_online.checked():
        found = function(*arguments, **options)
    assert (found is wanted is None) or torch.equal(found, wanted)


def test_nothing_is_written_by_a_call_that_is_refused():
    caches = [CACHE.clone(), CACHE.clone()]
    with flash_online.checked(), pytest.raises(InvalidArgument, match="^cache_seqlens"):
        flash_online.kvcache_attention(QUERY, *caches, ints(3, 9), key=NEW, value=NEW)
    assert all(torch.equal(cache, CACHE) for cache in caches)


def test_cross_entropy_targets_are_an_index_error_as_in_torch():
    with flash_online.checked(), pytest.raises(IndexError, match="^target: .*got 5: 1 of 3 are out of bounds"):
        F.cross_entropy(LOGITS, torch.tensor([0, 5, 4]))


@pytest.mark.parametrize(
    "argument, call",
    [
        ("cu_seqlens_q", lambda: flash_attn.flash_attn_varlen_func(ROWS, ROWS, ROWS, ints(3, 5), ints(3, 5), 5, 5)),
        ("cu_seqlens_k", lambda: flash_attn.flash_attn_varlen_func(ROWS, ROWS, ROWS, ints(0, 8), ints(0, 9), 8, 9)),
        ("cu_seqlens_q", lambda: flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack([ROWS] * 3, 1), ints(3, 5), 5)),
        ("block_table", lambda: paged(flash_attn, cu_seqlens_k=ints(0, 9, 13), max_seqlen_k=12, block_table=TABLE)),
        ("page_table", lambda: paged(flash_attn_cute, seqused_k=ints(9, 4), page_table=TABLE)),
        ("seqused_k", lambda: used(flash_attn_interface, seqused_k=ints(4, 5))),
        ("max_seqlen_q", lambda: used(flash_attn_cute, max_seqlen_q=4)),
        ("cache_leftpad", lambda: stepped(flash_attn, cache_leftpad=ints(0, 10))),
        ("cache_seqlens", lambda: stepped(flash_attn_interface, cache_seqlens=ints(0, 10))),
        ("rotary_cos, rotary_sin", lambda: stepped(flash_attn, **NEW_KEYS, cache_seqlens=ints(3, 8))),
        (
            "cu_seqlens_q",
            lambda: flash_attn._flash_attn_varlen_forward(*[ROWS] * 3, ints(3, 5), ints(0, 8), 8, 8, 0.0, 0.3, False),
        ),
    ],
)
def test_flash_attentions_names(argument, call):
    call()
    with flash_online.checked(), pytest.raises(InvalidArgument, match=f"^{argument}: expected .*got "):
        call()


NEW_KEYS = {"k": NEW.transpose(1, 2), "v": NEW.transpose(1, 2), "rotary_cos": ANGLES, "rotary_sin": ANGLES}


def paged(module, **options):
    return module.flash_attn_varlen_func(ROWS, POOL, POOL, cu_seqlens_q=ints(0, 3, 8), max_seqlen_q=8, **options)


def used(module, **options):
    starts = {"cu_seqlens_q": ints(0, 3, 8), "cu_seqlens_k": ints(0, 3, 8), "max_seqlen_q": 5, "max_seqlen_k": 5}
    return module.flash_attn_varlen_func(ROWS, ROWS, ROWS, **(starts | options))


def stepped(module, **options):
    cache = CACHE.transpose(1, 2).clone()
    return module.flash_attn_with_kvcache(QUERY.transpose(1, 2), cache, cache, **({"cache_seqlens": ints(3, 9)} | options))


def test_blocks_nest_and_end():
    call = lambda: flash_online.varlen_attention(*packed(ints(3, 5))[1])  # noqa: E731
    with flash_online.checked():
        with pytest.raises(ValueError, match="inner"), flash_online.checked():
            raise ValueError("inner")
        with pytest.raises(InvalidArgument):
            call()
    assert not _checked.active
    call()


@pytest.mark.parametrize("value, raises", [("1", True), ("0", False), pytest.param("", False, marks=pytest.mark.slow)])
def test_the_environment_is_read_on_import(value, raises):
    program = (
        "import torch, flash_online\n"
        "starts, rows = torch.tensor([1, 2], dtype=torch.int32), torch.randn(3, 1, 8)\n"
        "flash_online.varlen_attention(rows, rows, rows, starts, starts, 3, 3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"FLASH_ONLINE_CHECKED": value}, capture_output=True, text=True
    )
    assert (done.returncode != 0) == raises and ("cu_seqlens_q: expected" in done.stderr) == raises, done.stderr


WRONG_STARTS = (ROWS, ROWS, ROWS, ints(3, 5), ints(3, 5), 8, 8)


def test_nothing_is_read_where_there_are_no_numbers():
    with flash_online.checked():
        assert flash_online.explain(flash_online.varlen_attention, *WRONG_STARTS).ours
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert flash_online.varlen_attention(*WRONG_STARTS).shape == ROWS.shape
        assert flash_online.varlen_attention(*(t.to("meta") if torch.is_tensor(t) else t for t in WRONG_STARTS)).is_meta
        graph = make_fx(lambda rows: flash_online.varlen_attention(rows, rows, rows, *WRONG_STARTS[3:]))(ROWS)
        assert not any("_local_scalar" in str(node.target) for node in graph.graph.nodes)


def test_nothing_is_read_while_compiling():
    """Nor does the switch belong to what a graph is guarded by."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(flash_online.varlen_attention, fullgraph=True, backend=backend)
    wanted = flash_online.varlen_attention(*WRONG_STARTS)
    with flash_online.checked():
        assert torch.equal(compiled(*WRONG_STARTS), wanted)
    assert torch.equal(compiled(*WRONG_STARTS), wanted) and len(graphs) == 1


def test_transforms_read_what_they_do_not_wrap():
    right = ints(0, 3, 8)
    with flash_online.checked():
        grad = torch.func.grad(lambda q, *rest: flash_online.varlen_attention(q, *rest).sum())
        assert grad(ROWS, ROWS, ROWS, right, right, 8, 8).shape == ROWS.shape
        with pytest.raises(InvalidArgument, match="^cu_seqlens_q"):
            grad(*WRONG_STARTS)
        targets = torch.tensor([[0, 1, 4], [2, 3, -100]])
        assert torch.func.vmap(lambda t: F.cross_entropy(LOGITS, t))(targets).shape == (2,)


def test_modes_do_not_see_what_is_read():
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    function, arguments, options = RIGHT["lengths"]
    with flash_online.checked(), Seen() as seen:
        function(*arguments, **options)
    assert seen.names == ["flash_online::attention_decode"]


@pytest.mark.gpu
def test_nothing_is_read_while_a_graph_is_captured():
    arguments = [t.cuda() if torch.is_tensor(t) else t for t in WRONG_STARTS]
    flash_online.varlen_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with flash_online.checked(), torch.cuda.graph(graph):
        flash_online.varlen_attention(*arguments)


@pytest.mark.gpu
def test_a_target_out_of_range_raises_before_the_device_assert():
    logits = LOGITS.cuda()
    with flash_online.checked(), pytest.raises(InvalidArgument, match="^target: expected 0 to 4"):
        F.cross_entropy(logits, torch.tensor([0, 9, 1], device="cuda"))
    torch.cuda.synchronize()
    assert F.cross_entropy(logits, torch.tensor([0, 4, 1], device="cuda")).isfinite()
