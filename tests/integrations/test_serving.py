"""The attention backends of vLLM and SGLang against recorded interfaces (tests/serving_hosts.py): steps as the engines make
them, over caches that are NaN but for the keys of requests, against an oracle with contiguous caches. No engine runs."""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import math
import random
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from serving_hosts import (
    VLLM,
    AttentionType,
    CommonAttentionMetadata,
    ForwardMode,
    MHATokenToKVPool,
    Requests,
    modules,
    pages_for,
    radix_attention,
    sglang_modules,
    vllm_modules,
)

from flash_online import _policy
from flash_online.integrations import _vllm_layer, sglang, vllm
from flash_online.testing import assert_close_to_float64

# Request: new tokens. Prompts, whole and in chunks, with requests that decode, and then requests that decode alone.
STEPS = ({0: 7, 1: 33}, {1: 1, 0: 1, 2: 20}, {2: 13, 0: 1, 1: 4, 3: 1}, {3: 1, 1: 1, 0: 1, 2: 1}, {0: 1})
FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.fixture
def install(monkeypatch):
    """Puts stand-ins into sys.modules, for a test."""

    def install(stand_ins):
        for name, module in stand_ins.items():
            monkeypatch.setitem(sys.modules, name, module)
        forget()
        return stand_ins

    def forget():
        for cached in (vllm._classes, _vllm_layer._pair_dim, sglang._backend_class):
            cached.cache_clear()

    yield install
    forget()


def check(result, requests, scheduled, rows, **options):
    """Compares the results of a step's tokens, `[tokens, Hq, Ev]`, with the oracle's."""
    plain, truth = requests.expected(scheduled, *rows, **options)
    assert_close_to_float64(result[: len(truth)], plain, truth, requests.dtype, magnitude=1.0)


def test_importing_a_backend_imports_no_host():
    program = """
import sys
import flash_online.integrations.vllm, flash_online.integrations.sglang
assert not [name for name in sys.modules if name.split(".")[0] in ("vllm", "sglang")]
"""
    root = str(Path(vllm.__file__).parents[2])
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)


def test_entry_points_lead_to_register():
    """They are those of a package of its own: the engines load none where flash_online alone is installed."""
    tomllib, root = pytest.importorskip("tomllib"), Path(vllm.__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        pytest.skip("pyproject.toml is part of a checkout")
    own, engines = (tomllib.loads((root / f / "pyproject.toml").read_text()) for f in (".", "examples/engine_plugins"))
    assert "entry-points" not in own["project"]
    groups = engines["project"]["entry-points"]
    found = {}
    for group, entries in groups.items():
        for name, value in entries.items():
            found[group] = importlib.metadata.EntryPoint(name, value, group).load()
    assert found == {"vllm.general_plugins": vllm.register, "sglang.srt.plugins": sglang.register}


@pytest.mark.parametrize("integration", [vllm, sglang], ids=["vllm", "sglang"])
@pytest.mark.parametrize("present", ["nothing", "another version"])
def test_register_is_harmless_where_the_host_lacks_what_it_needs(integration, present, install, caplog):
    if present == "nothing":
        install(dict.fromkeys(("vllm", "sglang")))  # None makes the import an ImportError
    else:
        install(
            modules({"vllm.v1.attention": {}, "sglang.srt.layers.attention.attention_registry": {"ATTENTION_BACKENDS": {}}})
        )
    with caplog.at_level(logging.WARNING):
        assert integration.register() is False
    assert "not registered" in caplog.text


# --- vLLM -------------------------------------------------------------------------------------------------------------------


def vllm_cache(host, version, layout, blocks, page, requests):
    """(the memory as NaN, a function that gives a cache on memory of as many elements), as the version allocates it."""
    (_, heads), width = requests.heads, requests.widths[0]
    if VLLM.index(version) < VLLM.index("0.29.0"):
        shape = vllm.Backend.get_kv_cache_shape(blocks, page, heads, width, cache_dtype_str="auto")
        order = vllm.Backend.get_kv_cache_stride_order()
        layer = None
    else:  # [layers, blocks, heads, page, content]; two layers, of which this one is the second
        shape = (2, blocks, heads, page, 2 * width)
        order = {"HND": (0, 1, 2, 3, 4), "NHD": (0, 1, 3, 2, 4), "layers inside": (1, 0, 3, 2, 4)}[layout]
        layer = 1
    inverse = [order.index(i) for i in range(len(order))]

    def view(memory):
        cache = memory.view([shape[i] for i in order]).permute(inverse)
        return cache if layer is None else cache[layer]

    nan = torch.full((math.prod(shape) * requests.cache_dtype.itemsize,), 255, dtype=torch.uint8, device=requests.device)
    stored = torch.uint8 if requests.cache_dtype.itemsize == 1 else requests.cache_dtype
    return nan.view(stored), view


def vllm_row(version, cache, block, row, width):
    """Key and value of a slot, `[heads, width]`, views of the cache."""
    if version == "0.20.0":
        return cache[0, block, row], cache[1, block, row]
    if version == "0.25.1":
        return cache[block, 0, row], cache[block, 1, row]
    return cache[block, :, row, :width], cache[block, :, row, width:]


class VllmEngine:
    """Steps as vLLM's runner and its Attention layer make them."""

    def __init__(self, version, layout, requests, page=16, blocks=24, kv_cache_dtype="auto", window=None, **options):
        self.version, self.requests, self.page = version, requests, page
        assert vllm.register()
        backend = sys.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum.CUSTOM.get_class()
        self.memory, self.view = vllm_cache(None, version, layout, blocks, page, requests)
        self.cache, self.blocks = self.view(self.memory), blocks
        self.builder = backend.get_builder_cls()(None, ["layer"], None, torch.device(requests.device))
        heads, width = requests.heads, requests.widths[0]
        arguments = (heads[0], width, width**-0.5, heads[1], options.pop("alibi_slopes", None), window, kv_cache_dtype)
        soft_cap = options.pop("softcap", None)
        self.impl = backend.get_impl_cls()(*arguments, soft_cap, "decoder", None, **options)
        key_scale, value_scale = requests.scales or (torch.ones(()), torch.ones(()))
        self.layer = types.SimpleNamespace(_k_scale=key_scale, _v_scale=value_scale)
        self.choose, self.free = random.Random(0), list(range(blocks))
        self.pages = [[] for _ in requests.lengths]

    def slots(self, request, begin, end):
        pages = self.pages[request]
        return [pages[i // self.page] * self.page + i % self.page for i in range(begin, end)]

    def step(self, scheduled, padding="none", causal=True):
        """The output and the rows of a step. `padding`: "none"; "eager": rows after the step's tokens, which no request counts;
        "graph": tokens and requests that count, of which slots and lengths say that they are none."""
        requests, spare = self.requests, 0 if padding == "none" else 5
        rows = requests.new(scheduled, spare)
        tokens = sum(scheduled.values())
        slots = []
        for request, count in scheduled.items():
            length = requests.lengths[request]
            pages_for(length, self.page, self.pages[request], self.free, self.choose)
            slots += self.slots(request, length - count, length)
        lengths = [requests.lengths[r] for r in scheduled]
        # Entries that no key needs are of earlier steps or -1.
        table = [self.pages[r] + [self.choose.choice([-1, 0, 5]) for _ in range(8 - len(self.pages[r]))] for r in scheduled]
        starts, longest = [0, *itertools.accumulate(scheduled.values())], max(scheduled.values())
        if padding == "graph":
            slots, tokens, longest = slots + [-1] * spare, tokens + spare, tokens + spare
            lengths, table, starts = lengths + [0, 0], table + [[-1] * 8, [3] * 8], starts + [starts[-1]] * 2
        device = requests.device

        def int32(numbers):
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        common = CommonAttentionMetadata(
            *(int32(starts), torch.tensor(starts), int32(lengths), len(lengths), tokens, longest, 8 * self.page),
            *(int32(table), torch.tensor(slots, dtype=torch.int64, device=device), causal),
        )
        metadata = self.builder.build(common_prefix_len=0, common_attn_metadata=common)
        query, key, value = rows
        output = torch.full((len(query), query.shape[1] * self.requests.widths[1]), math.nan, dtype=query.dtype, device=device)
        output = output.view(len(query), query.shape[1], -1)
        self.impl.do_kv_cache_update(self.layer, key, value, self.cache, metadata.slot_mapping)
        returned = self.impl.forward(
            *(self.layer, query, key, value, self.cache, metadata), output=output, output_scale=None, output_block_scale=None
        )
        assert returned is output
        return output, rows

    def check_memory(self):
        """The cache holds the oracle's keys in the slots of the requests, and all other memory is as it was."""
        requests, width = self.requests, self.requests.widths[0]
        free = torch.ones(self.memory.numel(), dtype=torch.bool, device=requests.device)
        stored = self.memory.dtype
        for request, length in enumerate(requests.lengths):
            for position, slot in enumerate(self.slots(request, 0, length)):
                at = (slot // self.page, slot % self.page, width)
                for ours, theirs in zip(vllm_row(self.version, self.cache, *at), requests.caches, strict=True):
                    assert torch.equal(ours, theirs[request, :, position].view(stored))
                for row in vllm_row(self.version, self.view(free), *at):
                    row.fill_(False)
        assert self.memory.view(requests.cache_dtype)[free].float().isnan().all()


LAYOUTS = [(v, layout) for v in VLLM for layout in ("NHD", "HND", "layers inside") if v >= "0.29" or layout != "layers inside"]


@pytest.mark.parametrize("padding", ["none", "eager", "graph"])
@pytest.mark.parametrize("version, layout", LAYOUTS)
def test_vllm_steps(version, layout, padding, install, cache_device):
    install(vllm_modules(version, layout))
    requests = Requests(4, cache_device)
    engine = VllmEngine(version, layout, requests)
    for scheduled in STEPS:
        output, rows = engine.step(scheduled, padding)
        check(output, requests, scheduled, rows)
        spare = output[sum(scheduled.values()) :]
        assert (spare == 0).all() if padding == "graph" else spare.isnan().all()
    engine.check_memory()


@pytest.mark.parametrize("version", ["0.20.0", "0.25.1"])
def test_vllm_tells_keys_and_values_from_two_blocks(version, install, cache_device):
    """The cache is [2, 2, ...], which says nothing of what is which."""
    install(vllm_modules(version))
    requests = Requests(1, cache_device)
    engine = VllmEngine(version, "NHD", requests, blocks=2)
    for scheduled in ({0: 20}, {0: 1}):
        output, rows = engine.step(scheduled)
        check(output, requests, scheduled, rows)
    engine.check_memory()


OPTIONS = {
    "window": {"window": 5},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.06]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("names", [*([name] for name in OPTIONS), list(OPTIONS)], ids="+".join)
def test_vllm_options_of_layers(names, install, cache_device):
    install(vllm_modules("0.33.0"))
    given = {key: value for name in names for key, value in OPTIONS[name].items()}
    if "sinks" in given:
        given["sinks"] = given["sinks"].to(cache_device)
    requests = Requests(4, cache_device)
    engine = VllmEngine("0.33.0", "NHD", requests, **given)
    expected = dict(given)
    if "window" in given:
        expected["window"] = (4, 0)  # vLLM counts the query's own key
    if "alibi_slopes" in given:
        expected["alibi_slopes"] = torch.tensor(given["alibi_slopes"], device=cache_device)
    for scheduled in STEPS:
        output, rows = engine.step(scheduled)
        check(output, requests, scheduled, rows, **expected)
    plain, truth = requests.expected(STEPS[-1], *rows)
    with pytest.raises(AssertionError):  # without the options the results are others
        assert_close_to_float64(output, plain, truth, magnitude=1.0)


def test_vllm_without_causal_rule(install, cache_device):
    install(vllm_modules("0.33.0"))
    requests = Requests(4, cache_device)
    engine = VllmEngine("0.33.0", "HND", requests)
    for scheduled in STEPS[:2]:
        output, rows = engine.step(scheduled, causal=False)
        check(output, requests, scheduled, rows, causal=False)


@pytest.mark.parametrize("version", ["0.20.0", "0.33.0"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_vllm_16_bits(version, dtype, install, cache_device):
    install(vllm_modules(version))
    requests = Requests(4, cache_device, dtype, heads=(6, 1), widths=(64, 64))
    engine = VllmEngine(version, "NHD", requests, page=32)
    for scheduled in STEPS:
        output, rows = engine.step(scheduled)
        check(output, requests, scheduled, rows)
    engine.check_memory()


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0"])
@pytest.mark.parametrize("per_head", [False, True], ids=["one scale", "scales per head"])
@pytest.mark.parametrize("kv_cache_dtype", FLOAT8)
def test_vllm_float8_caches(version, kv_cache_dtype, per_head, install, cache_device):
    install(vllm_modules(version))
    scales = (torch.tensor([0.03, 0.5]), torch.tensor([0.2, 0.01])) if per_head else (torch.tensor(0.03), torch.tensor(0.2))
    scales = tuple(scale.to(cache_device) for scale in scales)
    requests = Requests(4, cache_device, torch.bfloat16, FLOAT8[kv_cache_dtype], scales=scales)
    engine = VllmEngine(version, "HND", requests, kv_cache_dtype=kv_cache_dtype)
    assert engine.cache.dtype == torch.uint8
    for scheduled in STEPS:
        output, rows = engine.step(scheduled)
        check(output, requests, scheduled, rows)
    engine.check_memory()


def test_vllm_attends_to_keys_that_another_layer_has_written(install, cache_device):
    """Layers that share keys, and fused operations that write them: forward without key and value."""
    install(vllm_modules("0.33.0"))
    requests = Requests(4, cache_device)
    engine = VllmEngine("0.33.0", "NHD", requests)
    output, (query, key, value) = engine.step(STEPS[0])
    metadata = engine.builder.build_for_drafting(common_of(engine, STEPS[0]), 0)
    again = engine.impl.forward(engine.layer, query, None, None, engine.cache, metadata, output=torch.zeros_like(output))
    assert torch.equal(again, output)


def common_of(engine, scheduled):
    """The metadata of a step that has been made."""
    device, requests = engine.requests.device, engine.requests
    starts = torch.tensor([0, *itertools.accumulate(scheduled.values())], dtype=torch.int32, device=device)
    lengths = torch.tensor([requests.lengths[r] for r in scheduled], dtype=torch.int32, device=device)
    table = [engine.pages[r] + [-1] * (8 - len(engine.pages[r])) for r in scheduled]
    table = torch.tensor(table, dtype=torch.int32, device=device)
    tokens, longest = sum(scheduled.values()), max(scheduled.values())
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    return CommonAttentionMetadata(
        starts, starts.cpu(), lengths, len(scheduled), tokens, longest, 8 * engine.page, table, slots
    )


def test_vllm_metadata_of_another_group_of_caches(install):
    install(vllm_modules("0.33.0"))
    engine = VllmEngine("0.33.0", "NHD", Requests(4, "cpu"))
    engine.step(STEPS[0])
    first = engine.builder.build(0, common_of(engine, STEPS[0]))
    before, table, slots = first.block_table, torch.ones(2, 8, dtype=torch.int32), torch.zeros(40, dtype=torch.int64)
    second = engine.builder.update_block_table(first, table, slots)
    assert second.block_table is table and second.slot_mapping is slots and first.block_table is before
    assert second.seq_lens is first.seq_lens and second.query_start_loc is first.query_start_loc


def test_vllm_measures_memory_without_metadata(install):
    install(vllm_modules("0.33.0"))
    impl = vllm.Impl(4, 16, 0.25, 2)
    output = torch.full((3, 4, 16), math.nan)
    rows = torch.randn(3, 4, 16)
    returned = impl.forward(None, rows, rows[:, :2], rows[:, :2], torch.empty(0), None, output=output)
    assert returned is output and (output == 0).all()


@pytest.mark.parametrize("flag, splits", [("1", 1), ("0", None), (None, None)])
def test_vllm_batch_invariance_asks_for_one_piece(flag, splits, install, monkeypatch):
    install(vllm_modules("0.33.0"))
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if flag is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", flag)
    asked, attend = [], _vllm_layer.kvcache_attention
    monkeypatch.setattr(_vllm_layer, "kvcache_attention", lambda *a, **k: (asked.append(k["num_splits"]), attend(*a, **k))[1])
    VllmEngine("0.33.0", "NHD", Requests(4, "cpu")).step(STEPS[0])
    assert asked == [splits]


@pytest.mark.parametrize("version", VLLM)
def test_vllm_registration(version, install, caplog):
    stand_ins = install(vllm_modules(version))
    registry = stand_ins["vllm.v1.attention.backends.registry"]
    host = stand_ins["vllm.v1.attention.backend"]
    custom = registry.AttentionBackendEnum.CUSTOM
    assert vllm.register() and vllm.register() and not caplog.records
    assert custom.get_path() == "flash_online.integrations.vllm.Backend"
    backend = custom.get_class()
    assert issubclass(backend, host.AttentionBackend) and ".".join(backend.full_cls_name()) == custom.get_path()
    assert registry.AttentionBackendEnum[backend.get_name()] is custom
    assert issubclass(backend.get_impl_cls(), host.AttentionImpl)
    assert issubclass(backend.get_builder_cls(), host.AttentionMetadataBuilder)
    assert backend.get_builder_cls()._cudagraph_support is host.AttentionCGSupport.ALWAYS
    assert not backend.forward_includes_kv_cache_update
    with pytest.raises(AttributeError, match="Backends"):
        _ = vllm.Backends


def test_vllm_registration_leaves_another_package_its_place(install, caplog):
    stand_ins = install(vllm_modules("0.33.0"))
    registry = stand_ins["vllm.v1.attention.backends.registry"]
    custom = registry.AttentionBackendEnum.CUSTOM
    registry.register_backend(custom, "theirs.Backend")
    assert vllm.register() is False and custom.get_path() == "theirs.Backend"
    assert "theirs.Backend" in caplog.text


TAKEN = {"dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, "head_size": 128}


@pytest.mark.parametrize("version", VLLM)
@pytest.mark.parametrize(
    "asked, reasons",
    [
        ({}, []),
        ({"kv_cache_dtype": "fp8", "block_size": 64}, []),
        ({"dtype": torch.float32, "head_size": 40}, []),
        ({"has_sink": True, "has_sliding_window": True, "use_batch_invariant": True, "use_non_causal": True}, []),
        ({"use_per_head_quant_scales": True, "kv_cache_dtype": "fp8_e5m2"}, []),
        ({"block_size": 24}, ["block_size"]),
        ({"kv_cache_dtype": "nvfp4"}, ["kv_cache_dtype"]),
        ({"kv_cache_dtype": "fp8", "dtype": torch.float32}, ["with float32, got fp8"]),
        ({"kv_cache_dtype": "float16"}, ["with torch.bfloat16, got float16"]),
        ({"use_mla": True}, ["use_mla"]),
        ({"use_sparse": True}, ["use_sparse"]),
        ({"use_mm_prefix": True}, ["use_mm_prefix"]),
        ({"use_rswa": True}, ["use_rswa"]),
        ({"attn_type": "encoder_only"}, ["attention type"]),
        ({"device_capability": types.SimpleNamespace(major=7, minor=5)}, ["compute capability"]),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_vllm_hears_what_is_taken(version, asked, reasons, install, monkeypatch):
    install(vllm_modules(version))
    monkeypatch.setattr(_policy, "ON_CUDA", frozenset({"kvcache_attention", "cache_append"}))
    hopper = types.SimpleNamespace(major=9, minor=0)
    said = vllm.Backend.validate_configuration(**({"device_capability": hopper} | TAKEN | asked))
    assert len(said) == len(reasons) and all(reason in line for reason, line in zip(reasons, said, strict=True)), said


def test_vllm_hears_that_a_build_has_no_kernels(install, monkeypatch):
    install(vllm_modules("0.33.0"))
    monkeypatch.setattr(_policy, "ON_CUDA", frozenset({"attention"}))
    (said,) = vllm.Backend.validate_configuration(**TAKEN, device_capability=types.SimpleNamespace(major=9, minor=0))
    assert "no CUDA kernels for cached keys" in said


@pytest.mark.parametrize(
    "options, name",
    [({"attn_type": "encoder_only"}, "attn_type"), ({"chunk_lookback": 3}, "chunk_lookback")],
)
def test_vllm_layers_that_are_refused(options, name, install):
    install(vllm_modules("0.33.0"))
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        vllm.Impl(4, 16, 0.25, 2, **options)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_vllm_context_parallelism_is_refused(ranks, install):
    install(vllm_modules("0.33.0"))["vllm.v1.attention.backend"].AttentionImpl.ranks = ranks
    with pytest.raises(NotImplementedError, match="context parallelism"):
        vllm.Impl(4, 16, 0.25, 2)


@pytest.mark.parametrize(
    "change, name",
    [
        ({"causal": torch.ones(2, dtype=torch.int32)}, "causal"),
        ({"mm_req_doc_ranges": {0: [(1, 4)]}}, "mm_req_doc_ranges"),
        ({"rswa_prefix_lens": torch.ones(2, dtype=torch.int32)}, "rswa_prefix_lens"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_vllm_steps_that_are_refused(change, name, install):
    install(vllm_modules("0.33.0"))
    engine = VllmEngine("0.33.0", "NHD", Requests(4, "cpu"))
    engine.step(STEPS[0])
    common = common_of(engine, STEPS[0])
    vars(common).update(change)
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        engine.builder.build(0, common)


def test_vllm_calls_that_are_refused(install):
    install(vllm_modules("0.33.0"))
    engine = VllmEngine("0.33.0", "NHD", Requests(4, "cpu"), window=4)
    with pytest.raises(NotImplementedError, match="^sliding_window: expected .*, got 4"):
        engine.step(STEPS[0], causal=False)
    rows = torch.zeros(3, 4, 16)
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(NotImplementedError, match="^output_scale: "):
            engine.impl.forward(engine.layer, rows, rows, rows, engine.cache, None, rows, **{name: torch.ones(1)})


# --- SGLang -----------------------------------------------------------------------------------------------------------------


class SglangEngine:
    """Steps as SGLang's model runner and its RadixAttention make them. Page 0 is for padding."""

    def __init__(self, requests, page, layout="nhd", layer=None, **runner):
        self.requests, self.page, pages = requests, page, 20 if page > 1 else 130
        sizes = (pages * page, page, requests.cache_dtype, requests.heads[1], requests.widths, 2)
        self.pool = MHATokenToKVPool(*sizes, layout, requests.device)
        count = len(requests.lengths)
        self.req_to_token = torch.zeros(2 * count, 96, dtype=torch.int32, device=requests.device)
        self.rows = [2 * n + 1 for n in range(count)]  # of req_to_token
        self.runner = types.SimpleNamespace(
            **{"token_to_kv_pool": self.pool, "page_size": page, "use_mla_backend": False, "attention_chunk_size": None},
            req_to_token_pool=types.SimpleNamespace(req_to_token=self.req_to_token),
            model_config=types.SimpleNamespace(is_encoder_decoder=False),
        )
        vars(self.runner).update(runner)
        assert sglang.register()
        registry = sys.modules["sglang.srt.layers.attention.attention_registry"]
        self.backend = registry.ATTENTION_BACKENDS["flash_online"](self.runner)
        self.layer = radix_attention(requests.heads, requests.widths, requests.widths[0] ** -0.5, **(layer or {}))
        self.choose, self.free = random.Random(0), list(range(1, pages))
        self.pages = [[] for _ in range(count)]

    def batch(self, scheduled, mode=None, padded=0):
        """SGLang's ForwardBatch of a step whose lengths `Requests.new` has counted, with so many requests of padding."""
        requests, device, slots = self.requests, self.requests.device, []
        for request, count in scheduled.items():
            length, row = requests.lengths[request], self.rows[request]
            pages_for(length, self.page, self.pages[request], self.free, self.choose)
            own = [self.pages[request][i // self.page] * self.page + i % self.page for i in range(length)]
            self.req_to_token[row, :length] = torch.tensor(own, dtype=torch.int32)
            slots += own[length - count :]
        counts = list(scheduled.values())
        if mode is None:
            mode = ForwardMode.DECODE if set(counts) == {1} else ForwardMode.MIXED

        def int64(numbers):
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        return types.SimpleNamespace(
            **{"forward_mode": mode, "batch_size": len(counts) + padded, "spec_info": None, "_attn_output": None},
            req_pool_indices=int64([self.rows[r] for r in scheduled] + [0] * padded),
            seq_lens=int64([requests.lengths[r] for r in scheduled] + [1] * padded),
            out_cache_loc=int64(slots + [0] * padded),
            extend_seq_lens=None if mode is ForwardMode.DECODE else int64(counts).int(),
            extend_seq_lens_cpu=None if mode is ForwardMode.DECODE else counts,
            multi_item_delimiter_indices=None,
        )

    def run(self, rows, batch, layer=None, **options):
        query, key, value = rows
        query = query.flatten(1)
        out = self.backend.forward(query, key, value, layer or self.layer, batch, **options)
        assert out.shape == (len(query), self.requests.heads[0] * self.requests.widths[1])
        return out.view(len(query), self.requests.heads[0], self.requests.widths[1])

    def step(self, scheduled, spare=0, **options):
        """The output and the rows of a step; a step of decoding has `spare` requests of padding, another one rows that belong
        to no request."""
        decodes = set(scheduled.values()) == {1}
        rows = self.requests.new(scheduled, spare)
        batch = self.batch(scheduled, padded=spare if decodes else 0)
        self.backend.init_forward_metadata(batch)
        tokens = len(batch.out_cache_loc)
        return self.run((rows[0], rows[1][:tokens], rows[2][:tokens]), batch, **options), rows

    def check_memory(self, padding=False):
        """The pool holds the oracle's keys in the slots of the requests, and all other memory is as it was."""
        for pool, theirs in zip(self.pool.buffers[1], self.requests.caches, strict=True):
            rows = pool.transpose(1, 2).flatten(0, 1) if pool.dim() == 4 else pool
            free = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
            for request, length in enumerate(self.requests.lengths):
                own = self.req_to_token[self.rows[request], :length].long()
                assert torch.equal(rows[own], theirs[request, :, :length].transpose(0, 1).contiguous().view(rows.dtype))
                free[own] = False
            free[0] = not padding
            assert rows[free].contiguous().view(theirs.dtype).float().isnan().all()
        for pool in self.pool.buffers[0]:  # another layer's
            assert pool.view(self.requests.cache_dtype).float().isnan().all()


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("page, layout", [(1, "nhd"), (16, "nhd"), (16, "hnd"), (1, "hnd")])
def test_sglang_steps(page, layout, spare, install, cache_device):
    install(sglang_modules())
    requests = Requests(4, cache_device)
    engine = SglangEngine(requests, page, layout)
    for scheduled in STEPS:
        output, rows = engine.step(scheduled, spare)
        check(output, requests, scheduled, rows)
        if set(scheduled.values()) != {1}:
            assert (output[sum(scheduled.values()) :] == 0).all()
    engine.check_memory(padding=spare > 0)


def test_sglang_prompts_whose_lengths_the_host_does_not_know(install, cache_device):
    install(sglang_modules())
    requests = Requests(4, cache_device)
    engine = SglangEngine(requests, 16)
    rows, batch = requests.new(STEPS[0]), engine.batch(STEPS[0])
    batch.extend_seq_lens_cpu = None
    engine.backend.init_forward_metadata(batch)
    check(engine.run(rows, batch), requests, STEPS[0], rows)


@pytest.mark.parametrize("names", [["window"], ["softcap"], ["sinks"], ["window", "softcap", "sinks"]], ids="+".join)
def test_sglang_options_of_layers(names, install, cache_device):
    install(sglang_modules())
    layer = {"window": {"sliding_window_size": 4}, "softcap": {"logit_cap": 0.7}, "sinks": {}}
    expected = {"window": {"window": (4, 0)}, "softcap": {"softcap": 0.7}}
    expected["sinks"] = {"sinks": OPTIONS["sinks"]["sinks"].to(cache_device)}
    requests = Requests(4, cache_device, widths=(16, 24))
    engine = SglangEngine(requests, 1, layer={key: value for name in names for key, value in layer[name].items()})
    expected = {key: value for name in names for key, value in expected[name].items()}
    for scheduled in STEPS:
        output, rows = engine.step(scheduled, **({"sinks": expected["sinks"]} if "sinks" in expected else {}))
        check(output, requests, scheduled, rows, **expected)
    plain, truth = requests.expected(STEPS[-1], *rows)
    with pytest.raises(AssertionError):  # without the options the results are others
        assert_close_to_float64(output, plain, truth, magnitude=1.0)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("scaled", [False, True], ids=["no scales", "scales"])
def test_sglang_float8_caches(page, scaled, install, cache_device):
    install(sglang_modules())
    scales = tuple(torch.tensor(s, device=cache_device) for s in (0.03, 0.2)) if scaled else None
    requests = Requests(4, cache_device, torch.float16, torch.float8_e4m3fn, scales=scales)
    layer = {"k_scale": scales[0], "v_scale": scales[1]} if scaled else {}
    engine = SglangEngine(requests, page, layer=layer)
    for scheduled in STEPS:
        output, rows = engine.step(scheduled)
        check(output, requests, scheduled, rows)
    engine.check_memory()


def test_sglang_result_goes_where_the_batch_says(install, cache_device):
    """As in the graphs that leave attention out."""
    install(sglang_modules())
    requests = Requests(4, cache_device, torch.bfloat16)
    engine = SglangEngine(requests, 16)
    rows = requests.new(STEPS[0])
    batch = engine.batch(STEPS[0])
    batch._attn_output = torch.full((40, 64), math.nan, dtype=torch.bfloat16, device=cache_device)
    engine.backend.init_forward_metadata(batch)
    out = engine.run(rows, batch)
    assert out.data_ptr() == batch._attn_output.data_ptr()
    check(out, requests, STEPS[0], rows)


def test_sglang_keys_that_are_in_the_pool_already(install, cache_device):
    install(sglang_modules())
    requests = Requests(4, cache_device)
    engine = SglangEngine(requests, 1)
    first, (query, key, value) = engine.step(STEPS[0])
    batch = engine.batch(STEPS[0])
    assert torch.equal(engine.run((query, None, None), batch), first)
    assert torch.equal(engine.run((query, torch.zeros_like(key), torch.zeros_like(value)), batch, save_kv_cache=False), first)


@pytest.mark.parametrize("page", [1, 16])
def test_sglang_metadata_of_a_graph_follows_its_buffers(page, install, cache_device):
    """A graph is captured with buffers of ones; what the graph records is run again on the numbers of a step."""
    install(sglang_modules())
    requests = Requests(4, cache_device)
    engine = SglangEngine(requests, page)
    for scheduled in (STEPS[0], {2: 20}):
        output, rows = engine.step(scheduled)
        check(output, requests, scheduled, rows)
    scheduled = {2: 1, 0: 1, 1: 1}
    captured = engine.batch(scheduled)
    rows = requests.new(scheduled)
    live = engine.batch(scheduled)
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
        getattr(captured, name).fill_(1)
    backend = engine.backend
    backend.init_cuda_graph_state(8, 8)
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    backend.init_forward_metadata_in_graph(captured)
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
        getattr(captured, name).copy_(getattr(live, name))
    backend.init_forward_metadata_out_graph(captured)
    backend.init_forward_metadata_in_graph(captured)
    check(engine.run(rows, captured), requests, scheduled, rows)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


def test_sglang_idle_ranks(install):
    install(sglang_modules())
    requests = Requests(4, "cpu")
    engine = SglangEngine(requests, 16)
    batch = engine.batch({}, mode=ForwardMode.IDLE)
    engine.backend.init_forward_metadata(batch)
    assert engine.run(requests.new({}), batch).shape == (0, 4, 16)


def test_sglang_may_change_tables_when_the_last_layer_has_read_them(install):
    ends = install(sglang_modules())["sglang.srt.layers.attention.base_attn_backend"].SharedReadEnds
    reads = {page: SglangEngine(Requests(4, "cpu"), page).backend.shared_read_ends for page in (1, 16)}
    assert reads[1](ForwardMode.DECODE) is ends.POST_REPLAY and reads[16](ForwardMode.DECODE) is ends.IN_REPLAY
    assert reads[1](ForwardMode.EXTEND) is reads[16](ForwardMode.EXTEND) is ends.UNKNOWN


@pytest.mark.parametrize("deterministic, splits", [(True, 1), (False, None)])
def test_sglang_deterministic_inference_asks_for_one_piece(deterministic, splits, install, monkeypatch):
    install(sglang_modules(deterministic=deterministic))
    asked, attend = [], sglang.kvcache_attention
    monkeypatch.setattr(sglang, "kvcache_attention", lambda *a, **k: (asked.append(k["num_splits"]), attend(*a, **k))[1])
    SglangEngine(Requests(4, "cpu"), 16).step(STEPS[0])
    assert asked == [splits]


def test_sglang_registration(install, caplog):
    stand_ins = install(sglang_modules())
    arguments = stand_ins["sglang.srt.server_args"]
    assert sglang.register() and sglang.register() and not caplog.records
    assert arguments.ATTENTION_BACKEND_CHOICES == arguments.DETERMINISTIC_ATTENTION_BACKEND_CHOICES == ["fa3", "flash_online"]
    engine = SglangEngine(Requests(4, "cpu"), 16)
    host = stand_ins["sglang.srt.layers.attention.base_attn_backend"].AttentionBackend
    assert isinstance(engine.backend, host) and engine.backend.needs_cpu_seq_lens is False


def test_sglang_registration_leaves_another_package_its_name(install, caplog):
    stand_ins = install(sglang_modules())
    backends = stand_ins["sglang.srt.layers.attention.attention_registry"].ATTENTION_BACKENDS
    backends["flash_online"] = theirs = object()
    assert sglang.register() is False and backends["flash_online"] is theirs and "another package" in caplog.text
    assert stand_ins["sglang.srt.server_args"].ATTENTION_BACKEND_CHOICES == ["fa3"]


class SWAKVPool(MHATokenToKVPool):
    """A pool that translates rows."""


@pytest.mark.parametrize(
    "settings, runner, name",
    [
        ({"speculative_algorithm": "EAGLE"}, {}, "speculative_algorithm"),
        ({"attn_cp_size": 2}, {}, "context parallelism"),
        ({"dcp_enabled": True}, {}, "context parallelism"),
        ({}, {"use_mla_backend": True}, "MLA"),
        ({}, {"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({}, {"model_config": types.SimpleNamespace(is_encoder_decoder=True)}, "cross attention"),
        ({}, {"token_to_kv_pool": SWAKVPool(32, 1, torch.float32, 2, (16, 16), 2, "nhd", "cpu")}, "token_to_kv_pool"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_sglang_models_that_are_refused(settings, runner, name, install):
    install(sglang_modules(**settings))
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        SglangEngine(Requests(4, "cpu"), 16, **runner)


def test_sglang_quantized_pools_are_refused(install):
    install(sglang_modules())
    pool = MHATokenToKVPool(32, 1, torch.float32, 2, (16, 16), 2, "nhd", "cpu")
    pool.is_quantized_kv_cache = True
    with pytest.raises(NotImplementedError, match="^quantized keys"):
        SglangEngine(Requests(4, "cpu"), 16, token_to_kv_pool=pool)


@pytest.mark.parametrize(
    "change, name",
    [
        ({"forward_mode": ForwardMode.TARGET_VERIFY}, "forward_mode: TARGET_VERIFY"),
        ({"forward_mode": ForwardMode.DLLM_EXTEND}, "forward_mode: DLLM_EXTEND"),
        ({"spec_info": object()}, "forward_mode: "),
        ({"multi_item_delimiter_indices": [torch.tensor([3])]}, "multi_item_delimiter_indices: "),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_sglang_steps_that_are_refused(change, name, install):
    install(sglang_modules())
    engine = SglangEngine(Requests(4, "cpu"), 16)
    engine.requests.new(STEPS[0])
    batch = engine.batch(STEPS[0])
    vars(batch).update(change)
    with pytest.raises(NotImplementedError, match=f"^{name}"):
        engine.backend.init_forward_metadata(batch)


def test_sglang_graphs_of_whole_prompts_are_refused(install):
    install(sglang_modules())
    engine = SglangEngine(Requests(4, "cpu"), 16)
    engine.requests.new(STEPS[0])
    with pytest.raises(NotImplementedError, match="^in_capture: "):
        engine.backend.init_forward_metadata_out_graph(engine.batch(STEPS[0]), in_capture=True)


@pytest.mark.parametrize(
    "layer, options, name",
    [
        ({"attn_type": AttentionType.ENCODER_ONLY}, {}, "attn_type"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, {}, "attn_type"),
        ({"is_cross_attention": True}, {}, "attn_type"),
        ({"pos_encoding_mode": "ALIBI"}, {}, "pos_encoding_mode"),
        ({"logit_cap": 30.0, "logit_capping_method": "relu"}, {}, "logit_capping_method"),
        ({"xai_temperature_len": 1024}, {}, "xai_temperature_len"),
        ({}, {"return_lse": True}, "return_lse"),
        ({}, {"q_rope": torch.zeros(1)}, "q_rope"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_sglang_layers_that_are_refused(layer, options, name, install):
    install(sglang_modules())
    engine = SglangEngine(Requests(4, "cpu"), 16, layer=layer)
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        engine.step(STEPS[0], **options)


def test_sglang_pools_in_another_layout_are_refused(install):
    install(sglang_modules())
    engine = SglangEngine(Requests(4, "cpu"), 16)
    engine.pool.buffers[1] = [buffer.view(20, 16, 2, 4, 4) for buffer in engine.pool.buffers[1]]
    with pytest.raises(NotImplementedError, match="^kv_cache_layout: "):
        engine.step(STEPS[0])
