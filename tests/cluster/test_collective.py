"""Steps that all ranks do together: what one sends another gets, and a failure is everybody's."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist
from checkpoint_world import run_world

from elastic_trainer.checkpoint.collective import Collective, StepFailedError


def message(sender: int, receiver: int, turn: int) -> bytes:
    """Nothing, a byte, or much, as all ranks can tell."""
    dice = random.Random(f"{sender} {receiver} {turn}")
    return dice.randbytes(dice.choice((0, 0, 1, 7, 5000, 300_000)))


def exchange(num_turns):
    group = Collective(dist.group.WORLD)
    ranks, me = range(group.world_size), group.rank
    for turn in range(num_turns):
        got = group.exchange({rank: message(me, rank, turn) for rank in ranks})
        assert got == {rank: raw for rank in ranks if (raw := message(rank, me, turn))}
        gathered = group.gather_bytes(message(me, 99, turn))
        assert gathered == [message(rank, 99, turn) for rank in ranks]
        assert group.maxima([me, -me, turn]) == [group.world_size - 1, 0, turn]
        assert group.gather_numbers([me, turn]) == [[rank, turn] for rank in ranks]
    assert group.exchange({}) == {}
    assert group.gather_bytes(b"") == [b""] * group.world_size
    only = group.exchange({0: b"x"} if me == group.world_size - 1 else {})
    assert only == ({group.world_size - 1: b"x"} if me == 0 else {})


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_message_arrives_as_it_was_sent(world, tmp_path):
    run_world(world, tmp_path, exchange, 12)


DEPTHS = 3


def fail_at(culprit, depth):
    """Steps within steps; rank `culprit` fails at one depth, or not at all; return what is told."""
    group = Collective(dist.group.WORLD)
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


@pytest.mark.parametrize("depth", range(DEPTHS))
def test_a_failure_at_any_depth_is_everybodys(depth, tmp_path):
    answers = run_world(3, tmp_path, fail_at, 1, depth)
    assert {told for told, _ in answers} == {"rank 1: OSError: injected"}
    assert run_world(2, tmp_path, fail_at, 7, depth) == [[None, list(range(DEPTHS))]] * 2
