"""Attention over several ranks: processes on this machine that talk by gloo. A spawn runs all checks of one number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_on_ranks

import flash_online.distributed
from flash_online.distributed import _context_parallel, _layout, _ulysses

PROGRAM = Path(__file__).with_name("context_parallel_ranks.py")
CHECKS = [
    line[4 : line.index("(")]
    for path in sorted(PROGRAM.parent.glob("context_parallel_*.py"))
    for line in path.read_text().splitlines()
    if line.startswith("def check_")
]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)])
def test_checks_on(ranks):
    checks = [name for name in CHECKS if ranks == 2 or "compiled" not in name]  # which take the time of all others together
    for said in run_on_ranks(PROGRAM, *checks, ranks=ranks):
        assert [line for line in said.splitlines() if line.startswith("ok ")] == [f"ok {name}" for name in checks]


def test_two_ranks_agree_until_one_is_dead():
    """One start of two processes costs more than both checks."""
    run_on_ranks(PROGRAM, "check_shapes", "dead", ranks=2)


def test_without_a_process_group():
    with pytest.raises(ValueError, match="group: expected a call after init_process_group, got no process group"):
        flash_online.distributed.positions(8)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_head_is_once_in_the_plan(ranks):
    for heads, key_heads, value_heads in [
        (1, 1, 1),
        (4, 2, 2),
        (6, 2, 3),
        (6, 3, 2),
        (8, 1, 1),
        (12, 3, 4),
        (7, 7, 1),
        (0, 0, 0),
    ]:
        plans = [_ulysses.plan_heads(heads, key_heads, value_heads, rank, ranks) for rank in range(ranks)]
        for rank, plan in enumerate(plans):
            begin, end = plan.query[rank]
            assert end - begin in (heads // ranks, -(-heads // ranks))
            head = begin
            for count, keys, values in plan.runs:  # in a run, as in attention, head h has key head h // (count / keys)
                for name, own, total in (("key", keys, key_heads), ("value", values, value_heads)):
                    assert count % own == 0, name
                    first = head // (heads // total)
                    for h in range(head, head + count):
                        assert h // (heads // total) == first + (h - head) // (count // own)
                        assert getattr(plan, name)[rank][0] <= h // (heads // total) < getattr(plan, name)[rank][1]
                head += count
            assert head == end
        assert [h for begin, end in plans[0].query for h in range(begin, end)] == list(range(heads))
        if heads and key_heads % ranks == 0:
            assert len(plans[0].runs) == 1 or value_heads % ranks
            assert [h for begin, end in plans[0].key for h in range(begin, end)] == list(range(key_heads))


@pytest.mark.parametrize(
    ("heads", "ranks", "layout", "causal", "train", "method"),
    [
        ((32, 8), 2, "zigzag", True, True, "ulysses"),  # both measured over two H100s
        ((16, 16), 2, "zigzag", True, True, "ulysses"),
        ((32, 4), 2, "zigzag", True, True, "gathered"),
        ((32, 8), 8, "zigzag", True, True, "ulysses"),
        ((32, 8), 2, "contiguous", True, True, "ulysses"),
        ((32, 4), 2, "contiguous", False, True, "gathered"),
        ((6, 2), 4, "zigzag", True, True, "gathered"),
        ((1, 1), 2, "contiguous", True, False, "gathered"),
    ],
)
def test_the_choice_of_auto(heads, ranks, layout, causal, train, method):
    query, key = (torch.empty(4096, 1, count, 128, dtype=torch.bfloat16, device="meta") for count in heads)
    group = _context_parallel.Group("", 0, ranks)
    assert _context_parallel.choose(query, key, key, group, layout, causal, train) == method


@pytest.mark.parametrize(
    ("heads", "length", "bounds", "count"),
    [
        ((32, 8), 32768, (-1, 0), 2),  # over two H200s, all: docs/lab/distributed.md
        ((32, 8), 32768, (4096, 0), 1),
        ((32, 8), 131072, (4096, 0), 2),
        ((32, 8), 32768, (4096, 4096), 1),
        ((16, 16), 32768, (-1, 0), 1),
        ((16, 16), 32768, (-1, -1), 2),
        ((16, 2), 131072, (-1, -1), 1),  # a rank has one key head
    ],
)
def test_two_groups_of_heads_where_there_are_many_scores(heads, length, bounds, count):
    query, key = (torch.empty(1, h, length // 2, 128, dtype=torch.bfloat16, device="meta") for h in heads)
    keys = _context_parallel._mean_keys(length, *bounds)
    assert _context_parallel.head_groups(query, key, key, 2, keys) == count


@pytest.mark.parametrize("layout", _layout.LAYOUTS)
def test_pieces_are_the_sequence(layout):
    for ranks in (1, 2, 3, 8):
        rows = sorted(
            row for rank in range(ranks) for piece in _layout.pieces_of(6, rank, ranks, layout) for row in range(*piece)
        )
        assert rows == list(range(6 * ranks))
