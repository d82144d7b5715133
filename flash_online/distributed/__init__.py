"""Several GPUs, on torch.distributed's collectives: an output layer whose classes are cut over ranks, and DTensors."""

from ._dtensor import register_dtensor
from ._vocab import vocab_parallel_linear_cross_entropy

__all__ = ["register_dtensor", "vocab_parallel_linear_cross_entropy"]
