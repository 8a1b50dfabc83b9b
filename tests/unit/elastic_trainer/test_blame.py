from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.membership.blame import blame
from elastic_trainer.agent.membership.notices import WorkerView


def view(rank: int, **kwargs: object) -> tuple[str, WorkerView]:
    """Return a worker that waits in the all-reduce of step 8, two to a node."""
    fields = {
        "rank": rank,
        "local_rank": rank % 2,
        "step": 7,
        "section": "step",
        "part": "reduce",
        "place": 20,
        "lane": 0,
        "idle_s": 2.2,
        "limit_s": 2.0,
        "state": "S",
        **kwargs,
    }
    return f"node{rank // 2}", WorkerView(**fields)  # type: ignore[arg-type]


def crowd(culprit: tuple[str, WorkerView], size: int = 8) -> list[tuple[str, WorkerView]]:
    return [culprit if rank == culprit[1].rank else view(rank) for rank in range(size)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"part": "data", "place": 1}, "in data after step 7"),
        ({"part": "forward", "place": 4, "state": "R"}, "in forward"),
        ({"part": "optimizer", "place": 21}, "in optimizer"),  # alone ahead, but not waiting
        ({"part": "reduce", "place": 19}, "in reduce"),  # a collective less than all others
        ({"part": "other", "step": 6, "place": 22}, "in other after step 6"),
        ({"state": "T"}, "its process is stopped"),
        ({"state": "D"}, "uninterruptible"),
        ({"section": "saving", "part": "other", "idle_s": 31.0, "limit_s": 30.0}, "in saving"),
    ],
)
def test_the_odd_one_is_blamed(fields: dict[str, object], words: str) -> None:
    blamed = blame(crowd(view(5, **fields)))
    assert blamed is not None
    assert (blamed.node, blamed.view.rank) == ("node2", 5)
    assert blamed.detail.startswith("rank 5 on node2: no progress for ")
    assert words in blamed.detail


def test_a_stopped_worker_is_blamed_before_one_that_is_behind() -> None:
    views = crowd(view(5, state="T"))
    views[1] = view(1, part="forward", place=2)
    blamed = blame(views)
    assert blamed is not None
    assert blamed.view.rank == 5


def test_whoever_is_at_work_within_its_limit_is_waited_for() -> None:
    assert blame(crowd(view(5, section="saving", idle_s=29.0, limit_s=30.0))) is None
    assert blame(crowd(view(5, part="data", idle_s=0.4))) is None


def test_places_compare_within_a_stage_of_the_pipeline_only() -> None:
    """Stage 1 makes other marks than stage 0, and waits for it."""
    views = [view(rank, lane=0, part="gather", place=12) for rank in range(4)]
    views += [view(rank, lane=1, part="pipeline", place=3) for rank in range(4, 8)]
    views[2] = view(2, lane=0, part="backward", place=11)
    blamed = blame(views)
    assert blamed is not None
    assert blamed.view.rank == 2


def test_nobody_is_blamed_when_all_look_alike() -> None:
    blamed = blame([view(rank) for rank in range(8)])
    assert blamed is not None
    assert blamed.node is None
    assert blamed.detail.startswith("all ranks: no progress for 2.2 s in reduce")


def test_of_peers_on_one_node_the_node_is_sure() -> None:
    views = [view(rank) for rank in range(8)]
    views[4:6] = [view(rank, part="forward", place=6) for rank in (4, 5)]
    blamed = blame(views)
    assert blamed is not None
    assert blamed.node == "node2"


def test_a_busy_process_stands_out_among_those_that_sleep() -> None:
    views = [view(rank, part="forward", place=6) for rank in range(8)]
    views[3] = view(3, part="forward", place=6, state="R")
    blamed = blame(views)
    assert blamed is not None
    assert blamed.view.rank == 3


def test_who_alone_is_busy_stands_out_though_it_says_that_it_waits() -> None:
    """It hangs right after a gather; the others have begun to compute, and wait inside."""
    views = [view(rank, part="forward", place=7) for rank in range(8)]
    views[3] = view(3, part="gather", place=6, state="R")
    blamed = blame(views)
    assert blamed is not None
    assert blamed.view.rank == 3
    views[3] = view(3, part="gather", place=6, state="R", idle_s=1.9)
    assert blame(views) is None, "not yet"
    views[4] = view(4, part="gather", place=6, state="R")
    blamed = blame(views)
    assert blamed is not None
    assert blamed.node is None, "with two, it may be either"


def test_those_who_wait_are_not_blamed_for_one_who_is_not_seen() -> None:
    waiting = [view(rank) for rank in range(6)]
    assert blame(waiting, complete=False) is None
    blamed = blame([*waiting[:5], view(5, part="data", place=1)], complete=False)
    assert blamed is not None
    assert blamed.view.rank == 5


@given(
    st.integers(2, 12),
    st.data(),
    st.sampled_from(["data", "forward", "backward", "optimizer", "snapshot", "other"]),
    st.integers(1, 30),
)
def test_one_hung_rank_is_found_whatever_the_order(
    size: int, data: st.DataObject, part: str, place: int
) -> None:
    """All others wait, a collective or so ahead; some may already be past the reduce."""
    culprit = data.draw(st.integers(0, size - 1))
    hung = view(culprit, part=part, place=place)
    views = crowd(hung, size)
    views = [
        item
        if item[1].rank == culprit
        else (item[0], replace(item[1], place=place + data.draw(st.integers(1, 2)), part="gather"))
        for item in views
    ]
    blamed = blame(data.draw(st.permutations(views)))
    assert blamed is not None
    assert (blamed.node, blamed.view.rank) == (f"node{culprit // 2}", culprit)
