"""The providers of the family, and the computed bytes that each organisation requests."""

from __future__ import annotations

from dataclasses import dataclass

from ..attention.summary import EFFICIENT, FA3, FLEX
from ..summary import FLASH, MATH, OURS

# Our own kernels, in the order of kernels.cu's Organisation.
V1, V1_STRIPED, V2_BY_KEYS, V2 = ORGANISATIONS = ("v1", "v1, striped", "v2, warps by keys", "v2")
TRITON = "Triton"
PROVIDERS = (*ORGANISATIONS, TRITON, FLEX, EFFICIENT, FLASH, FA3, OURS, MATH)
TILE_QUERIES, TILE_KEYS = 64, 128  # of kernels.cu
PROFILED_LENGTH = 4096
WIDTH, STATE = 2, 4  # bytes of an element (bfloat16), and of a stored element of O, m or l (float32)

# Queries of a CTA's tile, by head dim, where the peer's source fixes them: PyTorch's mem_eff_attention/kernels/cutlassF.h,
# FlashAttention's csrc/flash_attn/src/flash_fwd_launch_template.h (without dropout) and hopper/tile_size.h, and
# csrc/cuda/attention/sm90/forward/tiles.h here.
TILE_QUERIES_OF = {
    EFFICIENT: {64: 64, 128: 64},
    FLASH: {64: 128, 128: 128},
    FA3: {64: 192, 128: 128},
    OURS: {64: 192, 128: 128},
}
# The memory-efficient kernel loads its queries again for every block of this many keys (kernel_forward.h, next to cutlassF.h).
EFFICIENT_KEYS = {64: 64, 128: 128}


@dataclass(frozen=True)
class Bytes:
    read: int
    written: int


def blocks_of_tiles(length: int, queries: int, keys: int, causal: bool) -> list[int]:
    """Number of key blocks that each tile of queries sees."""
    ends = (min(first + queries, length) if causal else length for first in range(0, length, queries))
    return [-(-end // keys) for end in ends]


def least(sizes: dict[str, int]) -> Bytes:
    """Each tensor once."""
    tensor = WIDTH * sizes["B"] * sizes["H"] * sizes["L"] * sizes["E"]
    return Bytes(3 * tensor, tensor)


def asked(name: str, sizes: dict[str, int], causal: bool, entry: dict) -> Bytes | None:
    """The bytes that the SMs request from the L2 cache and send to it; None if the tile's height is unknown. `entry`, the
    provider's result, has `ctas_per_head` for the kernels with keys in the outer loop, and `tile` for Triton's."""
    heads, length, head_dim = sizes["B"] * sizes["H"], sizes["L"], sizes["E"]
    row, out = WIDTH * head_dim, WIDTH * heads * length * head_dim
    if name in (V1, V1_STRIPED):
        seen = blocks_of_tiles(length, TILE_QUERIES, TILE_KEYS, causal)
        stripes = [seen[n :: entry["ctas_per_head"]] for n in range(entry["ctas_per_head"])]
        loads = sum(max(stripe) for stripe in stripes)  # of blocks of keys and values
        kept = TILE_QUERIES * STATE * (head_dim + 2) * (sum(seen) - len(seen))  # O, m and l between two blocks
        read = row * (TILE_QUERIES * sum(seen) + 2 * TILE_KEYS * loads) + kept
        return Bytes(heads * read, heads * kept + out)
    queries = TILE_QUERIES if name in (V2_BY_KEYS, V2) else TILE_QUERIES_OF.get(name, {}).get(head_dim)
    if name == TRITON:
        queries = entry.get("tile", {}).get("queries")
    if queries is None:
        return None
    # Exact to the key, for any height of a block of keys: a tile's last block ends at its diagonal.
    keys = sum(min(first + queries, length) if causal else length for first in range(0, length, queries))
    rows = length  # of queries
    if name == EFFICIENT:
        rows = queries * sum(blocks_of_tiles(length, queries, EFFICIENT_KEYS[head_dim], causal))
    return Bytes(heads * row * (rows + 2 * keys), out)
