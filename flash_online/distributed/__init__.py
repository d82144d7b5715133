"""Several GPUs, on torch.distributed's collectives: an output layer whose classes are cut over ranks."""

from ._vocab import vocab_parallel_linear_cross_entropy

__all__ = ["vocab_parallel_linear_cross_entropy"]
