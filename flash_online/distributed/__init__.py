"""Sequences that outgrow one GPU: attention over the ranks of a process group, on torch.distributed's collectives alone.

from flash_online.distributed import context_parallel_attention, positions, shard
query, key, value = shard([query, key, value], 2, group)               # each rank its rows, in torch's head-tail layout
out = context_parallel_attention(query, key, value, group=group, causal=True)   # every option of attention, exact to the bit
"""

from ._context_parallel import context_parallel_attention, context_parallel_varlen_attention
from ._layout import positions, shard, unshard

__all__ = [
    "context_parallel_attention",
    "context_parallel_varlen_attention",
    "positions",
    "shard",
    "unshard",
]
