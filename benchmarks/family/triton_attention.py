"""Fused attention in Triton, forward: FlashAttention-2's organisation, with tiles as the language's only unit. The compiler
decides the work of warps and threads, and when a block of keys is loaded. Importing this needs triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


@triton.jit
def absorb(q, o, total, m, key, value, first, rows, scale, HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, HIDES: tl.constexpr):
    """Processes a block of keys: returns (m, total, o) of the tile's rows, with the maximum raised and the weights added."""
    keys, columns = first + tl.arange(0, KEYS), tl.arange(0, HEAD_DIM)
    k = tl.load(key + keys[None, :] * HEAD_DIM + columns[:, None])
    s = tl.dot(q, k)
    if HIDES:
        s = tl.where(rows[:, None] >= keys[None, :], s, float("-inf"))
    raised = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - raised[:, None])
    factor = tl.exp2(m - raised)
    v = tl.load(value + keys[:, None] * HEAD_DIM + columns[None, :])
    o = tl.dot(p.to(v.dtype), v, o * factor[:, None])
    return o, total * factor + tl.sum(p, 1), raised


@triton.jit
def forward(
    query,
    key,
    value,
    out,
    length,
    scale,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Tensors [heads, length, HEAD_DIM], contiguous; QUERIES divides `length`, KEYS divides QUERIES. `scale` includes log2(e).
    The grid is (tiles of queries, heads)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # causal: the most work comes first
    head = tl.program_id(1).to(tl.int64) * length * HEAD_DIM
    rows, columns = tile * QUERIES + tl.arange(0, QUERIES), tl.arange(0, HEAD_DIM)
    at = head + rows[:, None] * HEAD_DIM + columns[None, :]
    q = tl.load(query + at)
    o = tl.zeros([QUERIES, HEAD_DIM], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    m = tl.full([QUERIES], float("-inf"), tl.float32)
    whole = tile * QUERIES if CAUSAL else length  # the keys that all rows see
    for first in range(0, whole, KEYS):
        o, total, m = absorb(q, o, total, m, key + head, value + head, first, rows, scale, HEAD_DIM, KEYS, False)
    if CAUSAL:
        for first in range(whole, whole + QUERIES, KEYS):
            o, total, m = absorb(q, o, total, m, key + head, value + head, first, rows, scale, HEAD_DIM, KEYS, True)
    tl.store(out + at, (o / total[:, None]).to(out.dtype.element_ty))


def config(queries: int, keys: int, warps: int, stages: int) -> triton.Config:
    return triton.Config({"QUERIES": queries, "KEYS": keys}, num_warps=warps, num_stages=stages)


CONFIGS = [config(128, 64, 4, 3), config(128, 64, 8, 3), config(128, 128, 8, 2), config(128, 128, 8, 3), config(64, 64, 4, 3)]
tuned = triton.autotune(CONFIGS, key=["length", "HEAD_DIM", "CAUSAL"])(forward)


def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, kernel=tuned, **tile: int) -> Tensor:
    """Contiguous tensors [B, H, L, E] of one shape, L a multiple of 128, E a power of two. Without `tile`, the first call with
    a shape tries all CONFIGS."""
    batch, heads, length, head_dim = query.shape
    out = torch.empty_like(query)
    kernel[lambda chosen: (length // chosen["QUERIES"], batch * heads)](
        query, key, value, out, length, head_dim**-0.5 * LOG2_E, HEAD_DIM=head_dim, CAUSAL=causal, **tile
    )
    return out


def chosen_tile() -> dict[str, int]:
    """The tile of the last call: queries, keys, warps and stages."""
    best = tuned.best_config
    return {
        "queries": best.kwargs["QUERIES"],
        "keys": best.kwargs["KEYS"],
        "warps": best.num_warps,
        "stages": best.num_stages,
    }
