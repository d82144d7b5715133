"""The methods that vLLM calls per step and per layer; `vllm` combines them with vLLM's base classes."""

from __future__ import annotations

import copy
import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kvcache import cache_append, kvcache_attention

FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_OTHER = "Leave out --attention-backend CUSTOM for this model."


@dataclass
class Metadata:
    """A step of vLLM, for all layers: names and meanings as in vLLM's CommonAttentionMetadata."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor  # int32 [requests + 1]
    seq_lens: Tensor  # int32 [requests], the new keys included
    block_table: Tensor  # int32 [requests, entries]
    slot_mapping: Tensor  # int64 [tokens]
    causal: bool


class BuilderMethods:
    """Builds Metadata from vLLM's description of a step."""

    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """The step's Metadata. A common prefix is not used; it changes no result.

        Raises:
            NotImplementedError: a causal rule per request, R-SWA, or bidirectional ranges of tokens.
        """
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise NotImplementedError(f"causal: expected a bool, got a tensor (a rule per request). {_OTHER}")
        for name in ("rswa_prefix_lens", "mm_req_doc_ranges"):
            if getattr(common, name, None) is not None:
                raise NotImplementedError(f"{name}: expected None, got windows or ranges that differ per token. {_OTHER}")
        return Metadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        metadata = copy.copy(metadata)
        metadata.block_table, metadata.slot_mapping = blk_table, slot_mapping
        return metadata


class ImplMethods:
    """One layer's attention."""

    supports_dcp = supports_pcp = False
    dcp_world_size = pcp_world_size = 1  # vLLM's __new__ sets the process's values

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        given = sorted(name for name, value in others.items() if value is not None)
        if given:
            raise NotImplementedError(f"{given[0]}: expected None (no such layer option here), got a value. {_OTHER}")
        if attn_type != "decoder":
            raise NotImplementedError(f"attn_type: expected 'decoder', got {str(attn_type)!r}. {_OTHER}")
        if self.dcp_world_size > 1 or self.pcp_world_size > 1:
            raise NotImplementedError(
                f"context parallelism: expected 1 rank each for decoding and prefill, got {self.dcp_world_size} and "
                f"{self.pcp_world_size}. {_OTHER}"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type, self.sinks = kv_cache_dtype, attn_type, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name  # if set, vLLM does not write
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.window = None if sliding_window is None else (sliding_window - 1, 0)
        self.softcap = float(logits_soft_cap or 0.0)
        # One piece per sequence: results do not depend on the batch.
        self.num_splits = 1 if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0") else None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attends to the keys in the cache, including the step's new ones, and writes `output`.

        Args:
            layer: has the scales `_k_scale` and `_v_scale`, float32, a scalar or one per head, for float8 caches.
            query: `[tokens, num_heads, head_size]`; the first num_actual_tokens rows count. key, value: not read.
            kv_cache: `[2, blocks, page, Hkv, D]`, `[blocks, 2, page, Hkv, D]` or `[blocks, Hkv, page, 2 D]`, of any strides.
            attn_metadata: None while vLLM measures memory; output is then zeros.
            output: `[tokens, num_heads, D]`, of query's dtype.

        Returns:
            output.

        Raises:
            NotImplementedError: a quantized output; a window without causal rule.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "output_scale: expected None (results are not quantized), got a value. Disable this fusion in vLLM's compiler."
            )
        if attn_metadata is None:
            return output.fill_(0)
        if self.window is not None and not attn_metadata.causal:
            raise NotImplementedError(f"sliding_window: expected None without causal rule, got {self.window[0] + 1}. {_OTHER}")
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        keys, values, scales = self._caches(layer, kv_cache)
        tokens = attn_metadata.num_actual_tokens
        kvcache_attention(
            *(query[:tokens], keys, values, attn_metadata.seq_lens),
            block_table=attn_metadata.block_table,
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len,
            causal=attn_metadata.causal,
            window=self.window,
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            scale=self.scale,
            num_splits=self.num_splits,
            out=output[:tokens],
            **scales,
        )
        return output

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Writes key and value `[tokens or more, Hkv, D]` at the slots, int64 `[tokens]`; -1 is skipped."""
        keys, values, scales = self._caches(layer, kv_cache)
        tokens = slot_mapping.shape[0]
        cache_append(key[:tokens], value[:tokens], keys, values, slots=slot_mapping, **scales)

    def _caches(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Keys and values as pools `[blocks, Hkv, page, D]`, and the scales of float8 caches."""
        if kv_cache.dim() == 5:
            keys, values = (pool.transpose(1, 2) for pool in kv_cache.unbind(_pair_dim()))
        else:
            keys, values = kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]
        float8 = FLOAT8.get(self.kv_cache_dtype)
        if float8 is None:
            return keys, values, {}
        scales = {"key_scale": layer._k_scale, "value_scale": layer._v_scale}
        return keys.view(float8), values.view(float8), scales  # vLLM's tensor has dtype uint8


@functools.cache
def _pair_dim() -> int:
    """The dimension of keys and values in a five-dimensional cache. The shape is ambiguous for two blocks."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    return FlashAttentionBackend.get_kv_cache_shape(3, 16, 1, 8).index(2)
