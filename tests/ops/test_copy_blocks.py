"""copy_blocks, which packs and unpacks the messages of collectives: plans with views of any strides, compared with torch's own
copies, and plans that it must refuse."""

from __future__ import annotations

import math
import random

import pytest
import torch

from flash_online._copies import BYTES, Copies, copied

DTYPES = [torch.float16, torch.float32, torch.float64, torch.complex128, torch.uint8]


def meta(shape, dtype, order=None, offset=0):
    """A dense view on meta; its dimensions have memory in `order`."""
    order, strides, next_stride = order or range(len(shape)), [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], next_stride = next_stride, next_stride * shape[dim]
    room = torch.empty(offset + math.prod(shape), dtype=dtype, device="meta")
    return room.as_strided(shape, strides, offset)


def seen(tensor, view):
    """The view that one on meta stands for."""
    return tensor.as_strided(view.shape, view.stride(), tensor.storage_offset() + view.storage_offset())


def numbered(view, device, step=1):
    """A tensor whose elements differ, with room for the view from its first element on."""
    last = view.storage_offset() + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    numbers = torch.arange(last + 1, device=device) * step
    return (numbers % 251).to(view.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_random_plans(dtype, seed, device):
    """One to five dimensions of which some are one of the memory, in any order, from two sources to three results."""
    g = random.Random(seed)
    plan, sources, expected, checks = Copies(), [], [], []
    for _ in range(2):
        shape = [g.choice([1, 1, 2, 3, 5, 16]) for _ in range(g.randint(1, 5))]
        orders = [g.sample(range(len(shape)), len(shape)) for _ in range(3)]
        view = meta(shape, dtype, orders[0], g.choice([0, 0, 4, 7]))
        sources.append(numbered(view, device, g.choice([1, 3, 7])))
        for order in orders[1:]:
            place = meta(shape, dtype, order, g.choice([0, 8]))
            whole = (place.storage_offset() + math.prod(shape),)
            result = plan.new(whole, (1,), len(sources) - 1)
            plan.add(len(sources) - 1, view, result, place)
            expected.append(seen(sources[-1], view))
            checks.append(place)
    results = copied(sources, plan.plan())
    for result, place, wanted in zip(results, checks, expected, strict=True):
        assert result.dtype == dtype and torch.equal(seen(result, place), wanted)


def test_blocks_of_one_result_with_other_units(device):
    """Bytes of a message: halves, then floats, then elements of 16 bytes."""
    halves, floats = torch.arange(6, dtype=torch.float16, device=device), torch.arange(8, dtype=torch.float32, device=device)
    plan = Copies()
    message = plan.new((12 + 4 + 16,), (1,), BYTES)
    plan.add(0, meta((6,), torch.float16), message, meta((6,), torch.float16))
    plan.add(1, meta((1,), torch.float32), message, meta((1,), torch.float32, offset=3))
    plan.add(1, meta((1,), torch.complex128, offset=1), message, meta((1,), torch.complex128, offset=1))
    (result,) = copied([halves, floats], plan.plan())
    assert torch.equal(result[:12].view(torch.float16), halves) and torch.equal(result[16:].view(torch.float32), floats[4:])
    assert torch.equal(result[12:16].view(torch.float32), floats[:1])


def test_a_source_with_an_offset(device):
    """Views count from a tensor's first element, not from that of its storage."""
    plan, source = Copies(), torch.arange(20, device=device)[3:]
    plan.add(0, meta((5,), torch.int64, offset=2), plan.new((5,), (1,), 0), meta((5,), torch.int64))
    assert torch.equal(copied([source], plan.plan())[0], torch.arange(5, 10, device=device))


def test_large_and_empty_blocks(device):
    """More rows than a thread takes by itself, and sizes of 0."""
    source, plan = torch.randn(3000, 70, device=device), Copies()
    plan.add(0, meta((70, 3000), torch.float32, (1, 0)), plan.new((70, 3000), (3000, 1), 0), meta((70, 3000), torch.float32))
    plan.add(0, meta((0, 4), torch.float32), plan.new((0, 4), (4, 1), 0), meta((0, 4), torch.float32))
    turned, empty = copied([source], plan.plan())
    assert torch.equal(turned, source.T) and empty.shape == (0, 4)
    assert copied([source], [0, 0]) == []


def test_what_neighbours_merge_to():
    """Dimensions that are one in both memories, sizes of 1, and an order other than that of the place."""
    plan = Copies()
    plan.add(0, meta((4, 1, 5, 6), torch.float16), plan.new((120,), (1,), 0), meta((4, 1, 5, 6), torch.float16))
    plan.add(0, meta((4, 5), torch.float16, (1, 0)), 0, meta((4, 5), torch.float16, (1, 0)))
    plan.add(0, meta((4, 5), torch.float16), 0, meta((4, 5), torch.float16, (1, 0)))
    assert plan.plan()[5:] == [
        3,
        *(0, 0, 2, 0, 0, 1, 120, 1, 1),
        *(0, 0, 2, 0, 0, 1, 20, 1, 1),
        *(0, 0, 2, 0, 0, 2, 5, 1, 4, 4, 5, 1),
    ]


RAW = torch.ops.flash_online.copy_blocks


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ([], "the number of results"),
        ([1, 1, 1, 6, 1, 0], "a result has its dtype of from -1 to 0, got 1"),
        ([1, 0, 9, 0], "number of dimensions from 0 to 8, got 9"),
        ([1, 0, 1, -1, 1, 0], "a result's size"),
        ([1, 0, 1, 6, 1, 1, 1, 0, 4, 0, 0, 0], "source from 0 to 0, got 1"),
        ([1, 0, 1, 6, 1, 1, 0, 1, 4, 0, 0, 0], "result from 0 to 0, got 1"),
        ([1, 0, 1, 6, 1, 1, 0, 0, 3, 0, 0, 0], "1, 2, 4, 8 or 16 bytes per unit"),
        ([1, 0, 1, 6, 1, 1, 0, 0, 4, 0, 0, 6, 1, 0, 0], "number of dimensions from 0 to 5, got 6"),
        ([1, 0, 1, 6, 1, 1, 0, 0, 4, 1, 0, 1, 6, 1, 1], "within its source of 24 bytes, got one up to byte 28"),
        ([1, 0, 1, 6, 1, 1, 0, 0, 4, 0, 1, 1, 6, 1, 1], "within its result of 24 bytes, got one up to byte 28"),
        ([1, 0, 1, 6, 1, 1, 0, 0, 4, 0, 0, 1, 3, 3, 1], "within its source of 24 bytes, got one up to byte 28"),
        ([1, 0, 1, 6, 1, 1, 0, 0, 4, 0, 0, 1, 6, 1], "its end after 14 numbers"),
        ([1, 0, 1, 6, 1, 1, 0, 0, 4, 0, 0, 1, 6, 1, 1, 0], "its end after the last block"),
        ([1, 0, 1, 6, 1, 1, 0, 0, 4, 0, 0, 1, 1 << 41, 0, 0], "a block's size"),
    ],
)
def test_refused_plans(plan, what, device):
    with pytest.raises(RuntimeError, match="plan: expected") as error:
        RAW(torch.arange(6.0, device=device).unsqueeze(0).unbind(), plan)
    assert what in str(error.value)


def test_refused_addresses(device):
    halves = torch.arange(20, dtype=torch.float16, device=device)[1:]
    with pytest.raises(RuntimeError, match="multiples of a block's 16 bytes per unit"):
        RAW([halves], [1, 0, 1, 16, 1, 1, 0, 0, 16, 0, 0, 1, 2, 1, 1])


@pytest.mark.parametrize("size, strides", [(2**32 + 1, (2**32, 2**32)), (2**24 + 1, (2**40, 2**40)), (2**40, (1, 1))])
def test_a_block_whose_end_overflows_is_refused(size, strides):
    source = torch.arange(16, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="plan: expected a block within its source"):
        torch.ops.flash_online.copy_blocks([source], [1, -1, 1, 16, 1, 1, 0, 0, 1, 0, 0, 1, size, *strides])
