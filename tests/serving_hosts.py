"""Stand-ins for vLLM and SGLang, which are not installed here: modules with the classes, registries and signatures that a
backend meets, as recorded from the released packages (vllm 0.20.0, 0.25.1, 0.27.0, 0.29.0, 0.33.0; sglang 0.5.18, 0.5.23); and
`Requests`, sequences that grow step by step, with an oracle that knows nothing of pages.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import importlib
import itertools
import random
import types
from typing import Any

import torch

from flash_online import reference

VLLM = ("0.20.0", "0.25.1", "0.27.0", "0.29.0", "0.33.0")  # 0.27 moved keys and values side by side, 0.29 took layouts over


def modules(contents: dict[str, dict[str, Any]]) -> dict[str, types.ModuleType]:
    """Modules of these names and members, and all packages around them, for sys.modules."""
    made: dict[str, types.ModuleType] = {}
    for name, members in contents.items():
        for parent in itertools.accumulate(name.split("."), "{}.{}".format):
            made.setdefault(parent, types.ModuleType(parent)).__path__ = []
        vars(made[name]).update(members)
    return made


# --- vLLM -------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    mm_req_doc_ranges: dict | None = None  # from 0.25 on, as the next
    rswa_prefix_lens: torch.Tensor | None = None


def vllm_modules(version: str, cache_layout: str = "NHD") -> dict[str, types.ModuleType]:
    """The modules of a version, whose caches are of "NHD" or "HND"."""
    release = VLLM.index(version)

    class AttentionType(str, enum.Enum):
        DECODER = "decoder"
        ENCODER_ONLY = "encoder_only"

    @dataclasses.dataclass(frozen=True)
    class MultipleOf:
        base: int

    class AttentionCGSupport(enum.Enum):
        ALWAYS = 3
        NEVER = 0

    class AttentionBackend(abc.ABC):
        supported_dtypes = [torch.float16, torch.bfloat16]
        supported_kv_cache_dtypes = ["auto"]
        forward_includes_kv_cache_update = True

        @staticmethod
        @abc.abstractmethod
        def get_name(): ...

        get_impl_cls = get_builder_cls = get_name
        if release < VLLM.index("0.29.0"):
            get_kv_cache_shape = get_kv_cache_stride_order = get_name

        @classmethod
        def full_cls_name(cls):
            return cls.__module__, cls.__qualname__

        def _no(cls):
            return False

        is_mla = is_sparse = supports_sink = supports_mm_prefix = supports_per_head_quant_scales = classmethod(_no)
        supports_sliding_window = supports_non_causal = supports_batch_invariance = supports_rswa = classmethod(_no)

        @classmethod
        def supports_attn_type(cls, attn_type):
            return attn_type == AttentionType.DECODER

        @classmethod
        def supports_combination(cls, *_):
            return None

        @classmethod
        def validate_configuration(cls, *, dtype, kv_cache_dtype, block_size, head_size, device_capability, **asked):
            asked = {name: asked.get(name, False) for name in ASKED} | {"attn_type": asked.get("attn_type", "decoder")}
            reasons = [f"{n} not supported" for n, method in ASKED.items() if asked[n] and not getattr(cls, method)()]
            reasons += [] if cls.supports_attn_type(asked["attn_type"]) else ["attention type not supported"]
            reasons += [] if dtype in cls.supported_dtypes else ["dtype not supported"]
            reasons += [] if kv_cache_dtype in cls.supported_kv_cache_dtypes else ["kv_cache_dtype not supported"]
            sizes = [getattr(size, "base", size) for size in cls.get_supported_kernel_block_sizes()]
            fits = block_size is None or any(block_size % size == 0 for size in sizes)
            reasons += [] if fits else ["block_size not supported"]
            if not cls.supports_compute_capability(device_capability):
                reasons.append("compute capability not supported")
            flags = [asked["use_mla"], asked["has_sink"], asked["use_sparse"]]
            flags += [asked["use_mm_prefix"]] if release else []  # 0.20.0 does not pass it
            reason = cls.supports_combination(head_size, dtype, kv_cache_dtype, block_size, *flags, device_capability)
            return reasons + ([] if reason is None else [reason])

    class AttentionMetadataBuilder(abc.ABC):
        _cudagraph_support = AttentionCGSupport.NEVER
        reorder_batch_threshold = None
        supports_update_block_table = False

        @abc.abstractmethod
        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
            self.vllm_config, self.device = vllm_config, device

        @abc.abstractmethod
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

        def build_for_drafting(self, common_attn_metadata, draft_index):
            return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata, fast_build=True)

    class AttentionImpl(abc.ABC):
        ranks = (1, 1)  # of decode and of prefill context parallelism

        def __new__(cls, *args, **kwargs):
            self = super().__new__(cls)
            self.dcp_world_size, self.pcp_world_size = cls.ranks
            return self

        @abc.abstractmethod
        def __init__(self, num_heads, head_size, scale): ...

        @abc.abstractmethod
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output): ...

    class FlashAttentionBackend(AttentionBackend):
        """Up to 0.28 the one that says how caches lie."""

        @staticmethod
        def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
            page = (block_size, num_kv_heads, head_size)
            return {
                "0.20.0": (2, num_blocks, *page),
                "0.25.1": (num_blocks, 2, *page),
                "0.27.0": (num_blocks, num_kv_heads, block_size, 2 * head_size),
            }[version]

        @staticmethod
        def get_kv_cache_stride_order(include_num_layers_dimension=False):
            side_by_side = version == "0.27.0"
            if cache_layout == "NHD":
                return (0, 2, 1, 3) if side_by_side else (0, 1, 2, 3, 4)
            return (0, 1, 2, 3) if side_by_side else (0, 1, 3, 2, 4)

    if release >= VLLM.index("0.29.0"):
        del FlashAttentionBackend.get_kv_cache_shape, FlashAttentionBackend.get_kv_cache_stride_order

    class AttentionBackendEnum(enum.Enum):
        FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
        CUSTOM = None

        def is_overridden(self):
            return self in overrides

        def get_path(self):
            return overrides.get(self, self.value)

        def get_class(self):
            module, name = self.get_path().rsplit(".", 1)
            return getattr(importlib.import_module(module), name)

    overrides: dict[AttentionBackendEnum, str] = {}

    def register_backend(backend, class_path=None, is_mamba=False):
        overrides[backend] = class_path
        return lambda cls: cls

    return modules(
        {
            "vllm.v1.attention.backend": {
                kind.__name__: kind
                for kind in (
                    *(AttentionType, MultipleOf, AttentionCGSupport, AttentionBackend, AttentionMetadataBuilder),
                    *(AttentionImpl, CommonAttentionMetadata),
                )
            },
            "vllm.v1.attention.backends.registry": {
                "AttentionBackendEnum": AttentionBackendEnum,
                "register_backend": register_backend,
            },
            "vllm.v1.attention.backends.flash_attn": {"FlashAttentionBackend": FlashAttentionBackend},
        }
    )


ASKED = {
    "use_mla": "is_mla",
    "use_sparse": "is_sparse",
    "has_sink": "supports_sink",
    "use_mm_prefix": "supports_mm_prefix",
    "use_per_head_quant_scales": "supports_per_head_quant_scales",
    "has_sliding_window": "supports_sliding_window",
    "use_non_causal": "supports_non_causal",
    "use_batch_invariant": "supports_batch_invariance",
    "use_rswa": "supports_rswa",
}  # what validate_configuration is told of a model, and the method that answers


# --- SGLang -----------------------------------------------------------------------------------------------------------------


class ForwardMode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND_V2 = 6
    SPLIT_PREFILL = 8
    DLLM_EXTEND = 9

    def is_decode_or_idle(self):
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)


class AttentionType(enum.Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class MHATokenToKVPool:
    """Keys and values of all layers, [rows, heads, width] or with HND [pages, heads, page, width], of bytes where float8."""

    def __init__(self, rows, page, dtype, heads, widths, layers, layout, device):
        self.page_size, self.dtype = page, dtype
        stored = torch.uint8 if dtype.itemsize == 1 else dtype
        shapes = [(rows, heads, w) if layout == "nhd" else (rows // page, heads, page, w) for w in widths]
        self.buffers = [[_nan(shape, stored, device) for shape in shapes] for _ in range(layers)]

    def get_kv_buffer(self, layer_id):
        keys, values = (buffer.view(self.dtype) for buffer in self.buffers[layer_id])
        return keys, values


def _nan(shape, dtype, device):
    """Memory whose every bit is set, which is NaN in each of the dtypes."""
    elements = torch.Size(shape).numel()
    return torch.full((elements * dtype.itemsize,), 255, dtype=torch.uint8, device=device).view(dtype).view(shape)


def radix_attention(heads, widths, scaling, **others) -> types.SimpleNamespace:
    """What a backend reads of SGLang's RadixAttention."""
    values = {
        **{"tp_q_head_num": heads[0], "tp_k_head_num": heads[1], "tp_v_head_num": heads[1], "layer_id": 1},
        **{"head_dim": widths[0], "qk_head_dim": widths[0], "v_head_dim": widths[1], "scaling": scaling},
        **{"logit_cap": 0.0, "sliding_window_size": -1, "is_cross_attention": False, "use_irope": False},
        **{"k_scale": None, "v_scale": None, "attn_type": AttentionType.DECODER, "pos_encoding_mode": "NONE"},
        **{"logit_capping_method": "tanh", "xai_temperature_len": -1},
    }
    assert not others.keys() - values.keys()
    return types.SimpleNamespace(**(values | others))


def sglang_modules(**settings) -> dict[str, types.ModuleType]:
    """The modules, with a server's settings: speculative_algorithm, attn_cp_size, dcp_enabled, deterministic."""

    class SharedReadEnds(enum.Enum):
        IN_REPLAY = 2
        POST_REPLAY = 3
        UNKNOWN = 4

        @staticmethod
        def max_of(items):
            return max(items, key=lambda item: item.value)

    class AttentionBackend(abc.ABC):  # noqa: B024  as in SGLang
        needs_cpu_seq_lens = True

        def init_forward_metadata(self, forward_batch):
            self.init_forward_metadata_out_graph(forward_batch)
            self.init_forward_metadata_in_graph(forward_batch)

        def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
            return None

        def init_forward_metadata_in_graph(self, forward_batch):
            return None

        def init_cuda_graph_state(self, max_bs, max_num_tokens):
            raise NotImplementedError

        def get_cuda_graph_seq_len_fill_value(self):
            raise NotImplementedError

        def shared_read_ends(self, fm):
            return SharedReadEnds.IN_REPLAY if fm is ForwardMode.DECODE else SharedReadEnds.UNKNOWN

        def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
            if forward_batch.forward_mode is ForwardMode.IDLE:
                return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
            decodes = forward_batch.forward_mode is ForwardMode.DECODE
            call = self.forward_decode if decodes else self.forward_extend
            return call(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

        def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
            raise NotImplementedError

        forward_extend = forward_decode

    backends, choices, deterministic = {}, ["fa3"], ["fa3"]

    def register_attention_backend(name):
        return lambda function: backends.setdefault(name, function)

    space = types.SimpleNamespace
    parallel = space(attn_cp_size=settings.get("attn_cp_size", 1), dcp_enabled=settings.get("dcp_enabled", False))
    spec = space(speculative_algorithm=settings.get("speculative_algorithm"))
    execution = space(deterministic=space(enable_deterministic_inference=settings.get("deterministic", False)))
    attention = "sglang.srt.layers.attention"
    return modules(
        {
            f"{attention}.attention_registry": {
                "ATTENTION_BACKENDS": backends,
                "register_attention_backend": register_attention_backend,
            },
            f"{attention}.base_attn_backend": {"AttentionBackend": AttentionBackend, "SharedReadEnds": SharedReadEnds},
            "sglang.srt.runtime_context": {
                "get_exec": lambda: execution,
                "get_parallel": lambda: parallel,
                "get_spec": lambda: spec,
            },
            "sglang.srt.server_args": {
                "ATTENTION_BACKEND_CHOICES": choices,
                "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": deterministic,
                "add_attention_backend_choices": choices.extend,
                "add_deterministic_attention_backend_choices": deterministic.extend,
            },
            "sglang.srt.mem_cache.memory_pool": {"MHATokenToKVPool": MHATokenToKVPool},
        }
    )


# --- Requests ---------------------------------------------------------------------------------------------------------------


class Requests:
    """Sequences that grow step by step, and their keys in contiguous caches that the oracle alone reads and writes."""

    def __init__(self, count, device, dtype=torch.float32, cache_dtype=None, heads=(4, 2), widths=(16, 16), scales=None):
        self.device, self.dtype, self.heads, self.widths, self.scales = device, dtype, heads, widths, scales
        self.cache_dtype = cache_dtype or dtype
        self.lengths = [0] * count  # keys of each request
        self.caches = [torch.zeros(count, heads[1], 96, w, device=device).to(self.cache_dtype) for w in widths]
        self.generator = torch.Generator().manual_seed(0)

    def new(self, scheduled: dict[int, int], spare: int = 0):
        """query, key and value of a step, `[tokens, heads, width]` in one memory as of a fused projection, in the order of
        `scheduled` (request: new tokens), with `spare` rows of NaN after them; lengths grow."""
        tokens = sum(scheduled.values())
        (query_heads, key_heads), (width, value_width) = self.heads, self.widths
        sizes = [query_heads * width, key_heads * width, key_heads * value_width]
        rows = torch.randn(tokens, sum(sizes), generator=self.generator)
        rows = torch.cat([rows, torch.full((spare, sum(sizes)), float("nan"))]).to(self.device, self.dtype)
        query, key, value = rows.split(sizes, -1)
        self.old = [self.lengths[r] for r in scheduled]
        for request, count in scheduled.items():
            self.lengths[request] += count
        return query.unflatten(1, (query_heads, -1)), key.unflatten(1, (key_heads, -1)), value.unflatten(1, (key_heads, -1))

    def expected(self, scheduled, query, key, value, **options):
        """(results in the requests' dtype, in float64) of the step that `new` gave, by the oracle."""
        index = torch.tensor(list(scheduled), dtype=torch.int32, device=self.device)
        starts = torch.tensor([0, *itertools.accumulate(scheduled.values())], dtype=torch.int32, device=self.device)
        old = torch.tensor(self.old, dtype=torch.int32, device=self.device)
        key_scale, value_scale = self.scales or (None, None)
        tokens = sum(scheduled.values())

        def run(query):
            return reference.kvcache_attention(
                *(query, *self.caches, old),
                **{"key": key[:tokens], "value": value[:tokens], "cache_batch_idx": index, "cu_seqlens_q": starts},
                **{"cu_seqlens_new": starts, "key_scale": key_scale, "value_scale": value_scale, **options},
            )

        return run(query[:tokens]), run(query[:tokens].double())


def pages_for(length: int, page: int, taken: list[int], free: list[int], choose: random.Random) -> None:
    """Takes pages out of `free`, wherever they are, until `taken` has room for so many keys."""
    while len(taken) * page < length:
        taken.append(free.pop(choose.randrange(len(free))))
