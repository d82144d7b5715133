"""Plans for `copy_blocks`, which copies blocks of tensors of any strides into new tensors: in one launch what would take a
view and a copy for each block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ._autograd import without_derivative
from ._ops import below_autograd, ops

BYTES = -1  # of a result: the dtype is uint8

copied: Callable[[list[Tensor], list[int]], list[Tensor]] = below_autograd(ops.copy_blocks)
"""`copied(sources, plan)`: the results of a plan, without a derivative."""

without_derivative(ops.copy_blocks, "a plan of copies is for inference, or for a Function that has a derivative of its own")


class Copies:
    """A plan in the making. Views are tensors on meta that stand for memory alone: a source or a result, from its first element
    on, is what their storage offset counts from."""

    def __init__(self) -> None:
        self._results: list[list[int]] = []
        self._blocks: list[list[int]] = []

    def new(self, shape: Sequence[int], strides: Sequence[int], like: int) -> int:
        """The number of a new result, with the dtype of source `like`, or BYTES."""
        self._results.append([like, len(shape), *shape, *strides])
        return len(self._results) - 1

    def add(self, source: int, seen: Tensor, result: int, place: Tensor) -> None:
        """Copies the view `seen` of a source to the view `place` of a result, which has its shape and size of elements."""
        dims = _merged(seen.shape, seen.stride(), place.stride())
        begins = seen.storage_offset(), place.storage_offset()
        self._blocks.append(
            [source, result, seen.element_size(), *begins, len(dims), *(number for dim in dims for number in dim)]
        )

    def plan(self) -> list[int]:
        every = [len(self._results), *self._results, len(self._blocks), *self._blocks]
        return [number for part in every for number in (part if isinstance(part, list) else (part,))]


def _merged(sizes: Sequence[int], seen: Sequence[int], place: Sequence[int]) -> list[tuple[int, int, int]]:
    """The dimensions (size, stride of what is seen, stride of its place), outermost of the place first; neighbours that are one
    dimension of both memories are one."""
    dims = sorted((dim for dim in zip(sizes, seen, place, strict=True) if dim[0] != 1), key=lambda dim: -dim[2])
    merged: list[tuple[int, int, int]] = []
    for size, from_stride, to_stride in dims:
        if merged and merged[-1][1:] == (size * from_stride, size * to_stride):
            size *= merged.pop()[0]
        merged.append((size, from_stride, to_stride))
    return merged
