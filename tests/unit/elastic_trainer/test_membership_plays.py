"""Random plays of a whole job on simulated nodes: four promises that no faults may break.

1. Never two epochs that both commit: what a newer one has not begun from does not count.
2. A committed step is lost only when all who held a part of it died within one step: before a
   newer one was committed, or the part was copied again. Those count as dead that faults kept
   from the others, and those that have left, once nobody remembers them.
3. No single machine ends the job, nor takes a committed step.
4. Once the faults stop, the job finishes.
"""

from __future__ import annotations

from dataclasses import replace

import membership_training
import pytest
from membership_plays import ALONE, SHARED, Fault, Play, fails, random_play, run, shrunk
from membership_training import SimTraining

from elastic_trainer.agent.membership.candidate import Candidate
from elastic_trainer.agent.membership.coordinator import Coordinator
from elastic_trainer.agent.membership.effects import Context
from elastic_trainer.board.state import BoardState
from elastic_trainer.state.manifest import with_commit

IN_TEST, IN_CHAOS = 300, 10_000
A_TIME_IN_TEST, A_TIME_IN_CHAOS = 50, 250


def play_seeds(first: int, count: int) -> None:
    """Play the plays of some seeds; of the first that fails, say the seed and a shorter play."""
    for seed in range(first, first + count):
        play = random_play(seed)
        try:
            run(play)
        except AssertionError as error:
            error.add_note(f"seed {seed}, shrunk: {shrunk(play, fails)}")
            raise


@pytest.mark.process
@pytest.mark.parametrize("first", range(0, IN_TEST, A_TIME_IN_TEST))
def test_random_plays(first):
    play_seeds(first, A_TIME_IN_TEST)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(IN_TEST, IN_TEST + IN_CHAOS, A_TIME_IN_CHAOS))
def test_many_random_plays(first):
    play_seeds(first, A_TIME_IN_CHAOS)


@pytest.mark.parametrize(
    "play",
    [
        pytest.param(
            Play(
                nodes=8,
                layout="hsdp",
                step_s=2.5,
                faults=(Fault(7.54, "worker", 2, 0.0), Fault(11.49, "rack", 6, 0.0)),
            ),
            id="uncommitted state is restored, then two replicas die before the next commit",
        ),
        pytest.param(
            Play(
                nodes=3,
                spares=1,
                layout="hsdp",
                step_s=2.5,
                seed=12161,
                faults=(Fault(10.05, "flap", 0, 0.0), Fault(10.67, "coordinator", 0, 5.66)),
            ),
            id="a replica is left with the copy that was made again before the next commit",
        ),
        pytest.param(
            Play(
                nodes=2,
                last_step=40,
                faults=(
                    Fault(3.16, "worker", 0, 0.74),
                    Fault(4.29, "coordinator", 0, 1.07),
                    Fault(7.42, "join", 1, 0.1),
                ),
            ),
            id="the coordinator's machine is back and leads a newcomer, the member watches",
        ),
        pytest.param(
            Play(
                nodes=7,
                spares=2,
                least=5,
                last_step=40,
                step_s=0.3,
                seed=254,
                faults=(
                    Fault(3.0, "coordinator", 6, 1.06),
                    Fault(4.55, "rack", 4, 1.19),
                    Fault(5.89, "board_slow", 5, 19.66),
                    Fault(18.31, "join", 4, 0.0),
                ),
            ),
            id="the same, and the looks at a slow board queue up",
        ),
        pytest.param(
            Play(
                nodes=2,
                last_step=10,
                faults=(Fault(3.87, "cut", 1, 19.17), Fault(10.08, "evict", 1, 15.6)),
            ),
            id="a coordinator is excluded while it is cut off",
        ),
        pytest.param(
            Play(
                nodes=10,
                least=5,
                layout="hsdp",
                last_step=10,
                step_s=2.5,
                seed=21950,
                faults=(
                    Fault(8.54, "rack", 7, 1.73),
                    Fault(9.73, "coordinator", 5, 0.0),
                    Fault(11.28, "rack", 2, 0.86),
                ),
            ),
            id="uncommitted state is restored, then all who hold a part of it die",
        ),
        pytest.param(
            Play(
                nodes=6,
                spares=3,
                least=3,
                last_step=40,
                seed=23409,
                faults=(
                    Fault(1.93, "join", 3, 0.99),
                    Fault(3.44, "rack", 0, 11.71),
                    Fault(22.41, "island", 1, 18.43),
                ),
            ),
            id="members come back to a newcomer that leads as many as the largest layout has",
        ),
        pytest.param(
            Play(
                nodes=4,
                spares=2,
                least=1,
                last_step=40,
                seed=5745,
                faults=(Fault(24.06, "drains", 1, 1.58),),
            ),
            id="who coordinates leaves with others while the next epoch is prepared",
        ),
        pytest.param(
            Play(
                nodes=3,
                least=3,
                last_step=10,
                seed=2327,
                faults=(
                    Fault(6.69, "one_way", 1, 18.45),
                    Fault(7.34, "drain", 0, 0.94),
                    Fault(13.29, "drain", 1, 1.95),
                ),
                prepares=False,
            ),
            id="two leave and serve, and the third was cut off when they did",
        ),
        pytest.param(
            Play(
                nodes=3,
                spares=1,
                layout="hsdp",
                last_step=40,
                step_s=2.5,
                faults=(Fault(11.53, "evictions", 1, 0.0), Fault(12.55, "kill", 0, 0.0)),
                prepares=False,
            ),
            id="uncommitted state is restored, its only member dies, one that has left has it too",
        ),
    ],
)
def test_kept_plays(play):
    run(play)


def test_a_coordinator_that_is_drained_while_it_is_cut_off_does_not_end_the_job():
    faults = Fault(4.92, "cut", 0, 12.2), Fault(12.03, "drain", 0, 0.94)
    run(Play(nodes=2, last_step=40, step_s=0.3, seed=1373, faults=faults))


@pytest.mark.parametrize(
    "play",
    [
        pytest.param(
            Play(
                nodes=3,
                spares=1,
                step_s=2.5,
                faults=(Fault(14.15, "coordinator", 0, 9.21), Fault(14.31, "kill", 1, 0.77)),
            ),
            id="it begins alone while a member that has all looks for its coordinator",
        ),
        pytest.param(
            Play(
                nodes=2,
                step_s=2.5,
                faults=(
                    Fault(4.62, "join", 1, 1.46),
                    Fault(12.62, "cut", 0, 1.33),
                    Fault(22.6, "drain", 1, 0.0),
                    Fault(23.09, "drain", 0, 0.0),
                ),
            ),
            id="all members leave and serve, and it was never told who they are",
        ),
        pytest.param(
            Play(
                nodes=6,
                step_s=2.5,
                faults=(
                    Fault(13.67, "drains", 1, 17.84),
                    Fault(17.25, "coordinator", 4, 14.59),
                    Fault(19.27, "kill", 4, 1.0),
                ),
            ),
            id="the members of an epoch without a commit are lost, but one knows who serves",
        ),
        pytest.param(
            Play(
                nodes=2,
                step_s=2.5,
                last_step=40,
                faults=(
                    Fault(4.3, "halves", 1, 14.6),
                    Fault(12.19, "join", 0, 0.36),
                    Fault(14.17, "coordinator", 0, 0.0),
                ),
            ),
            id="a member that was cut off for long leads, another epoch has trained meanwhile",
        ),
        pytest.param(
            Play(
                nodes=3,
                last_step=40,
                faults=(
                    Fault(4.45, "board_slow", 2, 14.44),
                    Fault(11.67, "coordinator", 1, 0.0),
                    Fault(15.41, "board_stall", 0, 18.39),
                ),
            ),
            id="the board answers the successor before the other member can look who leads",
        ),
        pytest.param(
            Play(
                nodes=4,
                step_s=2.5,
                last_step=20,
                seed=18448,
                faults=(
                    Fault(14.26, "drains", 0, 4.73),
                    Fault(14.45, "board_stall", 3, 3.99),
                    Fault(17.22, "coordinator", 2, 0.95),
                ),
            ),
            id="two leave, and their coordinator dies before it forms an epoch",
        ),
        pytest.param(
            Play(
                nodes=3,
                least=2,
                step_s=1.0,
                faults=(
                    Fault(2.73, "flap", 2, 0.0),
                    Fault(4.37, "coordinator", 2, 17.48),
                    Fault(13.27, "drain", 1, 0.0),
                ),
            ),
            id="a member said that it leaves before the newcomer came",
        ),
    ],
)
def test_who_leads_without_knowing_all_begins_from_what_the_members_hold(play):
    assert run(play).training.lost == []


def test_nodes_that_leave_a_parked_job_take_no_committed_step():
    faults = Fault(5.35, "pause", 0, 12.51), Fault(17.29, "drains", 0, 0.86)
    assert run(Play(nodes=3, least=3, faults=faults)).training.lost == []


def test_a_seed_gives_the_same_play_and_the_same_course():
    assert random_play(7) == random_play(7) != random_play(8)
    play = replace(random_play(7), nodes=9)
    courses = [
        [(node.me.agent_id, *event) for node in run(play).nodes for event in node.events]
        for _ in range(2)
    ]
    assert courses[0] == courses[1]


def test_plays_are_of_all_sizes_and_kinds():
    plays = [random_play(seed) for seed in range(IN_TEST)]
    assert {play.layout for play in plays} == {"dp", "hsdp", "tp"}
    assert (min(play.nodes for play in plays), max(play.nodes for play in plays)) == (2, 64)
    assert {fault.kind for play in plays for fault in play.faults} == {*ALONE, *SHARED}
    assert 0.1 < sum(play.alone for play in plays) / len(plays) < 0.4


ISLAND = Play(
    nodes=4,
    spares=2,
    last_step=90,
    step_s=0.3,
    faults=(
        Fault(5.0, "island", 0, 14.0),
        *(Fault(24.0, "worker", node, 0.0) for node in range(4)),
    ),
)
"""Spares continue from storage; the members come back with newer state that does not count."""


def broken(play: Play) -> str:
    """Return the assertion that fails in a play."""
    with pytest.raises(AssertionError) as caught:
        run(play)
    return str(caught.traceback[-1].statement).strip()


@pytest.mark.parametrize("kind", ["drains", "evictions"])
def test_nodes_that_left_and_are_not_asked_are_noticed(kind, monkeypatch):
    play = Play(nodes=6, faults=(Fault(5.0, kind, 2, 0.0),))
    assert run(play).training.lost == []
    for name in ("has_left", "_note_lost"):
        monkeypatch.setattr(Context, name, lambda *_: None)
    assert broken(play).startswith("assert not cluster.training.unexcused")


def test_copies_that_are_not_made_are_noticed(monkeypatch):
    monkeypatch.setattr(membership_training, "copy_node", lambda *_: None)
    assert broken(Play(nodes=3)).startswith("assert len(hosts) > 1")


def test_a_loss_of_what_an_epoch_began_from_is_noticed(monkeypatch):
    """Also of a state that was whole, but that no epoch had committed."""
    faults = Fault(2.0, "worker", 0, 0.0), Fault(3.5, "worker", 1, 0.0)
    play = Play(nodes=3, step_s=2.5, faults=faults)
    assert run(play).training.adopted.keys() == {(1, 1), (2, 2)}
    whole, found = SimTraining._whole, []

    def once(*args):
        found.append(whole(*args))
        return found[-1] if [state for state in found if state] == [(1, 1)] else None

    monkeypatch.setattr(SimTraining, "_whole", staticmethod(once))
    with pytest.raises(AssertionError, match=r"\(1, 1\)"):
        run(play)


def test_a_line_that_is_not_followed_is_noticed(monkeypatch):
    run(ISLAND)
    monkeypatch.setattr(BoardState, "allows", lambda *_: True)
    assert broken(ISLAND).startswith("assert on_line,")


def test_a_commit_that_is_not_fenced_is_noticed(monkeypatch):
    def late(board, commit, keep, origin):
        newer = replace(board, epoch=max(board.epoch, commit.epoch))
        return with_commit(replace(newer, epoch=commit.epoch), commit, keep, origin)

    play = Play(nodes=4, spares=2, faults=(Fault(2.0, "coordinator", 0, 0.0),))
    cluster = run(play)
    group = cluster.training._groups[1]
    group.begun = True
    assert not cluster.training._save(group)
    monkeypatch.setattr(membership_training, "with_commit", late)
    with pytest.raises(AssertionError, match=r"commit|is over"):
        cluster.training._save(group)


def test_a_job_that_a_lost_node_ends_is_noticed(monkeypatch):
    def lost(self, peer, reason):
        return self._stop(94, reason)

    monkeypatch.setattr(Coordinator, "_lost", lost)
    play = Play(nodes=3, faults=(Fault(5.0, "kill", 0, 0.0), Fault(6.0, "kill", 1, 0.0)))
    assert broken(play).startswith("assert end.code in allowed")


def test_a_job_that_does_not_go_on_is_noticed(monkeypatch):
    monkeypatch.setattr(Candidate, "_campaign", lambda _: None)
    play = Play(nodes=3, least=2, faults=(Fault(5.0, "coordinator", 0, 0.0),))
    assert broken(play).startswith("assert cluster.now < ends_at")


def test_a_play_shrinks_to_what_it_takes():
    faults = tuple(Fault(float(i), kind, i, 1.0) for i, kind in enumerate(ALONE))
    play = Play(nodes=40, spares=1, layout="tp", rack=4, seed=9, faults=faults)
    kinds = {"pause", "evict"}
    found = shrunk(play, lambda one: kinds <= {fault.kind for fault in one.faults})
    assert {fault.kind for fault in found.faults} == kinds
    assert len(found.faults) == 2
    node = max(fault.node for fault in found.faults)
    assert replace(found, faults=()) == Play(nodes=node + 1)
