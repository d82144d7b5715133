"""An attention backend of SGLang, registered by `register()` as `--attention-backend flash_online`.

SGLang knows where the keys of each token are: `req_to_token[request, position]` is a row of the pool, and `out_cache_loc` are
the rows of a step's new tokens. A layer writes the new rows by cache_append and attends by kvcache_attention, in both kinds of
step: prompts (which may include decoding requests) and decoding. The class derives from SGLang's and is created when SGLang
requests the backend: importing this module does not import SGLang.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kvcache import cache_append, kvcache_attention

__all__ = ["register"]

NAME = "flash_online"
_OTHER = "Choose another --attention-backend for it."
_MODES = ("EXTEND", "DECODE", "MIXED", "SPLIT_PREFILL", "IDLE")  # of SGLang's ForwardMode
_log = logging.getLogger(__name__)


def register() -> bool:
    """Registers the backend with SGLang under the name "flash_online", for deterministic inference too. SGLang calls it in each
    of its processes, through the entry point group `sglang.srt.plugins`; a server that does not select the name is not changed.
    A second call changes nothing.

    Returns:
        Whether the name refers to this backend now. If not (SGLang is not installed, is older than 0.5.18, or has another
        package's backend of this name), nothing is changed, and this module logs the reason.
    """
    try:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
        from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds  # noqa: F401
        from sglang.srt.runtime_context import get_exec, get_parallel, get_spec  # noqa: F401
        from sglang.srt.server_args import add_attention_backend_choices, add_deterministic_attention_backend_choices

        AttentionBackend.init_forward_metadata_in_graph  # noqa: B018
    except (ImportError, AttributeError) as missing:
        _log.warning("sglang: no attention backends as in 0.5.18 to 0.5.23 (%s); %r is not registered", missing, NAME)
        return False
    if NAME in ATTENTION_BACKENDS:
        if ATTENTION_BACKENDS[NAME] is not make:
            _log.warning("sglang: the backend %r belongs to another package already and is kept", NAME)
        return ATTENTION_BACKENDS[NAME] is make
    register_attention_backend(NAME)(make)
    add_attention_backend_choices([NAME])
    add_deterministic_attention_backend_choices([NAME])
    return True


def make(runner: Any) -> Any:
    """The backend for SGLang's model runner, as passed to SGLang by `register`.

    Raises:
        NotImplementedError: the runner needs an unsupported feature.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.runtime_context import get_parallel, get_spec

    pool = runner.token_to_kv_pool
    parallel = get_parallel()
    refused = {
        "MLA": runner.use_mla_backend,
        "cross attention": runner.model_config.is_encoder_decoder,
        "attention_chunk_size": getattr(runner, "attention_chunk_size", None),
        "speculative_algorithm": get_spec().speculative_algorithm,
        "context parallelism": parallel.attn_cp_size > 1 or parallel.dcp_enabled,
        "quantized keys (kv_cache_dtype)": getattr(pool, "is_quantized_kv_cache", False),
    }
    for name, given in refused.items():
        if given:
            raise NotImplementedError(f"{name}: not supported by the attention backend {NAME!r}. {_OTHER}")
    if type(pool) is not MHATokenToKVPool:
        raise NotImplementedError(
            f"token_to_kv_pool: expected MHATokenToKVPool, got {type(pool).__name__}; for models with windows pass "
            "--disable-hybrid-swa-memory"
        )
    return _backend_class()(runner)


@functools.cache
def _backend_class() -> type:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    return type("Backend", (_BackendMethods, AttentionBackend), {"__module__": __name__})


class Step(NamedTuple):
    """Locations of the queries and keys of a forward pass, for all layers; only the device reads the tensors."""

    starts: Tensor  # int32 [requests + 1]
    longest: int | None  # most queries per request; None: the number of queries
    lengths: Tensor  # int32 [requests], the new keys included
    table: Tensor  # int32 [rows, entries] of pages
    rows: Tensor | None  # int32 [requests]: each request's row of the table; None: the request's index

    @classmethod
    def of(cls, batch: Any, req_to_token: Tensor, page: int) -> Step:
        """The step of SGLang's ForwardBatch. `req_to_token` int32 `[requests, positions]` has rows of a pool with pages of
        `page` rows."""
        lengths = batch.seq_lens.to(torch.int32)
        longest: int | None = 1
        if batch.forward_mode.is_decode_or_idle():
            starts = torch.arange(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
        else:
            starts = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            known = batch.extend_seq_lens_cpu
            longest = None if known is None or len(known) == 0 else int(max(known))
        if page == 1:
            return cls(starts, longest, lengths, req_to_token, batch.req_pool_indices.to(torch.int32))
        return cls(starts, longest, lengths, req_to_token[batch.req_pool_indices, ::page] // page, None)


class _BackendMethods:
    """Methods that SGLang calls; its base class has the rest."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        from sglang.srt.runtime_context import get_exec

        self.pool, self.page = runner.token_to_kv_pool, runner.page_size
        self.req_to_token = runner.req_to_token_pool.req_to_token
        # One piece per sequence: results do not depend on the batch.
        self.num_splits = 1 if get_exec().deterministic.enable_deterministic_inference else None
        self.forward_metadata: Any = None  # the Step

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Raises NotImplementedError for unsupported kinds of step; nothing else is needed outside a graph."""
        mode = forward_batch.forward_mode
        if mode.name not in _MODES or getattr(forward_batch, "spec_info", None) is not None:
            raise NotImplementedError(f"forward_mode: {mode.name} is not supported by {NAME!r}. {_OTHER}")
        if getattr(forward_batch, "multi_item_delimiter_indices", None) is not None:
            raise NotImplementedError(f"multi_item_delimiter_indices: expected None, got several items to score. {_OTHER}")
        if in_capture and not mode.is_decode_or_idle():
            raise NotImplementedError(
                "in_capture: expected no graph of a whole prompt (it would fix the longest request); use a graph without "
                "attention (--cuda-graph-backend-prefill=breakable) or none"
            )

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Finds the step's lengths and tables, with operations that a graph captures."""
        self.forward_metadata = Step.of(forward_batch, self.req_to_token, self.page)

    def shared_read_ends(self, fm: Any) -> Any:
        """The point until which SGLang may not change a step's inputs: with pages of one row, req_to_token up to the last
        layer."""
        from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

        ends = super().shared_read_ends(fm)  # type: ignore[misc]
        return SharedReadEnds.max_of([ends, SharedReadEnds.POST_REPLAY]) if self.page == 1 else ends

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """No state is kept between graphs."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Tensor:
        """Writes the new keys and attends.

        Args:
            q: `[tokens, Hq E]` or `[tokens, Hq, E]`; k: `[tokens, Hkv, E]` or `[tokens, Hkv E]`; v likewise with width Ev. k
                and v are None if the keys are in the pool already.
            layer: SGLang's RadixAttention; its window, softcap and scales are used.
            options: `sinks` `[Hq]`; other options are refused.

        Returns:
            out `[tokens, Hq Ev]`; 0 in padding rows.

        Raises:
            NotImplementedError: the layer or an option is not supported.
        """
        sinks = options.pop("sinks", None)
        _check_layer(layer, options)
        keys, values = self._pools(layer.layer_id)
        float8 = keys.dtype.itemsize == 1
        scales: dict[str, Any] = {"key_scale": layer.k_scale, "value_scale": layer.v_scale} if float8 else {}
        if k is not None and v is not None and save_kv_cache:
            rows = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            cache_append(*rows, keys, values, slots=forward_batch.out_cache_loc.to(torch.int64), **scales)
        step, query = self.forward_metadata, q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        given = getattr(forward_batch, "_attn_output", None)  # SGLang's output buffer, in some graphs
        out = kvcache_attention(
            *(query, keys, values, step.lengths),
            block_table=step.table,
            cache_batch_idx=step.rows,
            cu_seqlens_q=step.starts,
            max_seqlen_q=query.shape[0] if step.longest is None else step.longest,
            window=(layer.sliding_window_size, 0) if layer.sliding_window_size > -1 else None,
            softcap=float(layer.logit_cap or 0.0),
            sinks=sinks,
            scale=layer.scaling,
            num_splits=self.num_splits,
            out=None if given is None else given.view(-1, layer.tp_q_head_num, layer.v_head_dim),
            **scales,
        )
        return out.flatten(1)

    forward_decode = forward_extend

    def _pools(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as pools `[pages, Hkv, page, E]`. SGLang's pools have this shape, or `[rows, Hkv, E]`."""
        pools = self.pool.get_kv_buffer(layer_id)  # waits for a layer that is being copied from the host
        if pools[0].dim() == 3:
            pools = tuple(pool.unflatten(0, (-1, self.page)).transpose(1, 2) for pool in pools)
        if pools[0].dim() != 4:
            raise NotImplementedError(f"kv_cache_layout: expected NHD or HND, got pools of {pools[0].dim()} dimensions")
        return pools


def _check_layer(layer: Any, options: dict[str, Any]) -> None:
    """Raises for unsupported options that would change the result."""
    problem = None
    if layer.is_cross_attention or layer.attn_type.value != "decoder":
        problem = f"attn_type: expected decoder, got {layer.attn_type.value}, with cross attention: {layer.is_cross_attention}"
    elif layer.pos_encoding_mode != "NONE":
        problem = f"pos_encoding_mode: expected NONE, got {layer.pos_encoding_mode}"
    elif layer.logit_cap and layer.logit_capping_method != "tanh":
        problem = f"logit_capping_method: expected tanh, got {layer.logit_capping_method}"
    elif layer.xai_temperature_len > 0:
        problem = f"xai_temperature_len: expected none, got {layer.xai_temperature_len}"
    for name, value in options.items():
        if value is not None and value is not False:
            problem = f"{name}: expected None (this backend lacks this option), got a value"
    if problem is not None:
        raise NotImplementedError(f"{problem}. {_OTHER}")
