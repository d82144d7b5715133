"""FlashMask's function on flash_online's kernels: signature, layouts and returns of its package `flashmask` for PyTorch.

Beyond FlashMask: every dtype and head dim of flash_online, dropout, values with another head dim, lengths that differ under
`causal`. Spans carry the mask, so the devices are those whose kernels take spans.

Source: the interface of PaddlePaddle's FlashMask (arXiv 2410.01359).
"""

from __future__ import annotations

from torch import Tensor

from .. import spans
from .._checks import check_flag, check_float, check_int, check_tensor
from .._ops import InvalidArgument
from ..attention import attention
from ._call import refuse

__all__ = ["flashmask_attention"]


def flashmask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    startend_row_indices: Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: int | tuple[int, int] | None = None,
    return_softmax_lse: bool = False,
    return_seed_offset: bool = False,
    fixed_seed_offset: Tensor | None = None,
    rng_name: str = "",
    training: bool = True,
    name: str | None = None,
    softmax_scale: float | None = None,
    block_mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of query `[B, L, H, E]` over key `[B, S, Hk, E]` and value `[B, S, Hk, Ev]`; Hk divides H.

    Args:
        startend_row_indices: int32 `[B, 1 or Hk or H, S, columns]`: the queries that do not see a key, as in
            `flash_online.spans.from_flashmask`. With 4 columns the host reads it once. None: no such mask.
        dropout: probability in [0, 1] of a dropped weight; 0 unless `training`.
        causal: query i sees keys j <= i + S - L.
        window_size: (left, right) or an int for both: query i sees keys i - left <= j <= i + right, with `causal` up to i. Only
            where L is S and without startend_row_indices.
        return_softmax_lse: return lse too.
        name: no effect.
        softmax_scale: 1 / sqrt(E) if None.

    Returns:
        out `[B, L, H, Ev]`, with rows of 0 where a query sees no key; with `return_softmax_lse` (out, lse), lse `[B, H, L]`
        float32, the natural logarithm of the denominators, -inf where a query sees no key.

    Raises:
        InvalidArgument (a RuntimeError and ValueError): a tensor or option is not as above.
        NotImplementedError: return_seed_offset, fixed_seed_offset, rng_name, block_mask, the device or the dtype.
    """
    refuse(
        "flashmask_attention",
        return_seed_offset=return_seed_offset,
        fixed_seed_offset=fixed_seed_offset,
        rng_name=rng_name or None,
        block_mask=block_mask,
    )
    check_flag("training", training), check_flag("return_softmax_lse", return_softmax_lse)
    for label, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(label, tensor)
        if tensor.dim() != 4:
            raise InvalidArgument(f"{label}: expected shape [batch, length, heads, head dim], got {list(tensor.shape)}")
    dropout = check_float("dropout", dropout)
    if not 0 <= dropout <= 1:
        raise InvalidArgument(f"dropout: expected a probability in [0, 1], got {dropout}")
    if softmax_scale is not None:
        check_float("softmax_scale", softmax_scale)
    words: spans.Spans = {"causal": causal}
    if startend_row_indices is not None:
        words = spans.from_flashmask(startend_row_indices, causal, L=query.shape[1])
        words["key_spans"] = _of_query_heads(words["key_spans"], query, key)
    window = _window(window_size, query, key, startend_row_indices)
    result = attention(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        window=window,
        alignment="lower_right",
        dropout_p=dropout if training else 0.0,
        scale=softmax_scale,
        return_lse=return_softmax_lse,
        **words,
    )
    if isinstance(result, tuple):
        out, lse = result
        return out.transpose(1, 2), lse
    return result.transpose(1, 2)


def _of_query_heads(key_spans: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The intervals of every query head, or of one for all: those per key head are repeated."""
    batch, heads, (length, key_heads) = query.shape[0], query.shape[2], key.shape[1:3]
    given = key_spans.shape[1]
    if key_spans.shape[0] not in (1, batch) or given not in (1, key_heads, heads) or key_spans.shape[2] != length:
        raise InvalidArgument(
            f"startend_row_indices: expected [{batch}, 1 or {key_heads} or {heads}, {length}, columns] (batch, heads of key or "
            f"query, keys), got {list(key_spans.shape[:3])} before the columns"
        )
    if given in (1, heads) or heads % given:  # attention says what is wrong with the heads
        return key_spans
    return key_spans.repeat_interleave(heads // given, 1)


def _window(
    window_size: int | tuple[int, int] | None, query: Tensor, key: Tensor, indices: Tensor | None
) -> tuple[int, int] | None:
    if window_size is None:
        return None
    if indices is not None:
        raise InvalidArgument("window_size: expected None with startend_row_indices, got a window")
    if query.shape[1] != key.shape[1]:
        raise InvalidArgument(
            f"window_size: expected as many queries as keys under a window, got {query.shape[1]} and {key.shape[1]}"
        )
    pair = window_size if isinstance(window_size, (tuple, list)) else (window_size, window_size)
    if len(pair) != 2:
        raise InvalidArgument(f"window_size: expected an int or a pair (left, right), got {window_size!r}")
    left, right = (check_int("window_size", bound) for bound in pair)
    if left < 0 or right < 0:
        raise InvalidArgument(f"window_size: expected bounds of 0 or more, got {window_size!r}")
    return left, right
