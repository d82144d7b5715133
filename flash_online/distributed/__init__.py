"""Several GPUs, using torch.distributed's collectives only: attention of sequences that do not fit on one GPU, an output layer
with its classes sharded over ranks, and DTensors.

from flash_online.distributed import context_parallel_attention, positions, shard
query, key, value = shard([query, key, value], 2, group)               # this rank's rows, in torch's head-tail layout
out = context_parallel_attention(query, key, value, group=group, causal=True)   # every option of attention, bit-exact
"""

from ._batch import shard_batch
from ._context_parallel import context_parallel_attention, context_parallel_varlen_attention
from ._dtensor import register_dtensor
from ._layout import positions, shard, unshard
from ._vocab import vocab_parallel_linear_cross_entropy

__all__ = [
    "context_parallel_attention",
    "context_parallel_varlen_attention",
    "positions",
    "register_dtensor",
    "shard",
    "shard_batch",
    "unshard",
    "vocab_parallel_linear_cross_entropy",
]
