"""Steps that all ranks do together: what one sends another gets, and a failure is everybody's.

Grids whose axes have two or three ranks show in a few processes what 32 do in thousands.
"""

from __future__ import annotations

import random
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from checkpoint_world import run_world

from elastic_trainer.state.collective import Collective, StepFailedError
from elastic_trainer.worker import rank_grid
from elastic_trainer.worker.rank_grid import RankGrid, grid_shape, lines

WAIT = timedelta(seconds=30)
WORLDS = [(4, 32), (8, 2), (7, 2), (5, 2), (7, 3)]
"""Ranks, and the most in a group: one group, a full grid, and grids with pairs."""


def collective(longest: int = 32) -> Collective:
    rank_grid.MAX_GROUP = longest
    return Collective(RankGrid(WAIT))


def message(sender: int, receiver: int, turn: int) -> bytes:
    """Nothing, a byte, or much, as all ranks can tell."""
    dice = random.Random(f"{sender} {receiver} {turn}")
    return dice.randbytes(dice.choice((0, 0, 1, 7, 5000, 300_000)))


def exchange(longest, num_turns):
    group = collective(longest)
    assert max((g.size() for g in group.grid.groups), default=1) <= longest
    ranks, me = range(group.world_size), group.rank
    for turn in range(num_turns):
        got = group.exchange({rank: message(me, rank, turn) for rank in ranks})
        assert got == {rank: raw for rank in ranks if (raw := message(rank, me, turn))}
        gathered = group.gather_bytes(message(me, 99, turn))
        assert gathered == [message(rank, 99, turn) for rank in ranks]
        assert group.maxima([me, -me, turn]) == [group.world_size - 1, 0, turn]
        assert group.gather(lambda: [me, "é"]) == ([[r, "é"] for r in ranks] if me == 0 else [])
        assert group.scatter(lambda: [{"for": rank} for rank in ranks]) == {"for": me}
        assert group.by_first(lambda: {"from": me}) == {"from": 0}
    assert group.exchange({}) == {}
    assert group.gather_bytes(b"") == [b""] * group.world_size
    only = group.exchange({0: b"x"} if me == group.world_size - 1 else {})
    assert only == ({group.world_size - 1: b"x"} if me == 0 else {})


@pytest.mark.parametrize(("num_ranks", "longest"), WORLDS)
def test_each_message_arrives_as_it_was_sent(tmp_path, num_ranks, longest):
    run_world(num_ranks, tmp_path, exchange, longest, 6)


def reduce_floats(longest):
    grid = collective(longest).grid
    mine = torch.tensor([0.1, 1e16, 1.0], dtype=torch.float64) * (grid.rank + 1)
    entered = []
    grid.all_reduce(mine, entered=lambda: entered.append(grid.rank))
    assert entered == [grid.rank]
    whole = torch.tensor([grid.rank, 7])
    grid.all_reduce(whole)
    grid.all_reduce(least := torch.tensor([grid.rank + 3.0]), dist.ReduceOp.MIN)
    return [[value.hex() for value in mine.tolist()], whole.tolist(), least.tolist()]


@pytest.mark.parametrize(("num_ranks", "longest"), WORLDS)
def test_every_rank_has_the_same_bits_of_a_sum(tmp_path, num_ranks, longest):
    answers = run_world(num_ranks, tmp_path, reduce_floats, longest)
    assert answers == [answers[0]] * num_ranks
    total = num_ranks * (num_ranks + 1) // 2
    sums, whole, least = answers[0]
    assert float.fromhex(sums[2]) == total
    assert (whole, least) == ([total - num_ranks, 7 * num_ranks], [3.0])


@pytest.mark.parametrize("num_ranks", [1, 2, 31, 32, 33, 63, 64, 1023, 1024, 2039, 16_312, 16_384])
def test_a_grid_of_any_size_reaches_every_rank_by_short_lines(num_ranks):
    shape = grid_shape(num_ranks, 32)
    assert max(shape) <= 32
    groups = list(lines(num_ranks, shape))
    assert max(map(len, groups), default=0) <= 32
    mine = [[] for _ in range(num_ranks)]
    for group in groups:
        for rank in group:
            mine[rank].append(group)
    assert max(map(len, mine)) <= len(shape) + 1
    reached, new = {0}, [0]
    while new:
        new = [r for rank in new for group in mine[rank] for r in group if r not in reached]
        reached.update(new)
    assert len(reached) == num_ranks


DEPTHS = 3


def fail_at(culprit, longest):
    """Steps within steps; rank `culprit` fails at each depth; return what is told each time."""
    group = collective(longest)
    return [_fail_at(group, culprit, depth) for depth in range(DEPTHS)]


def _fail_at(group, culprit, depth):
    reached = []

    def step(here):
        if group.rank == culprit and here == depth:
            raise OSError("injected")
        reached.append(here)
        if here + 1 < DEPTHS:
            group.together(lambda: step(here + 1))
            group.exchange({0: b"between"})

    try:
        group.together(lambda: step(0))
    except StepFailedError as error:
        told = str(error)
    else:
        told = None
    # The group is as good as before, on all ranks alike.
    assert group.gather_bytes(bytes([group.rank])) == [bytes([r]) for r in range(group.world_size)]
    return [told, reached]


@pytest.mark.parametrize(("num_ranks", "longest"), [(3, 32), (5, 2)])
def test_a_failure_at_any_depth_is_everybodys(tmp_path, num_ranks, longest):
    for answers in run_world(num_ranks, tmp_path, fail_at, 1, longest):
        assert {told for told, _ in answers} == {"rank 1: OSError: injected"}


def test_without_a_failure_nothing_is_told(tmp_path):
    assert run_world(2, tmp_path, fail_at, 7, 32) == [[[None, list(range(DEPTHS))]] * DEPTHS] * 2


def fail_in_each(_longest):
    group = collective(_longest)
    told = []
    steps = (
        lambda: group.by_first(lambda: 1 // 0),
        lambda: group.scatter(lambda: 1 // 0),
        lambda: group.gather(lambda: 1 // (group.rank % 2)),
    )
    for step in steps:
        try:
            step()
        except StepFailedError as error:
            told.append(str(error))
    return told


def test_all_are_told_how_many_failed(tmp_path):
    error = "ZeroDivisionError: integer division or modulo by zero"
    for told in run_world(5, tmp_path, fail_in_each, 2):
        assert told[:2] == [error, f"rank 0: {error}"]
        assert re.findall(r"\d+", told[2].removeprefix(told[1])) == ["2"]
