from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_views import find, view

from elastic_trainer.agent.membership.hang_diagnosis import (
    FORGET_S,
    RECHECK_S,
    SILENT_BEATS,
    HangDiagnosis,
    find_hung_worker,
)
from elastic_trainer.agent.membership.notices import WorkersSeen, WorkerView


def crowd(odd: tuple[str, WorkerView], size: int = 8) -> list[tuple[str, WorkerView]]:
    return [odd if rank == odd[1].rank else view(rank) for rank in range(size)]


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"part": "data", "place": 1}, ["data", "step 7"]),
        ({"part": "forward", "place": 4, "state": "R"}, ["forward"]),
        ({"part": "optimizer", "place": 21}, ["optimizer"]),  # alone ahead, but not waiting
        ({"part": "reduce", "place": 19}, ["reduce"]),  # a collective less than all others
        ({"part": "other", "step": 6, "place": 22}, ["other", "step 6"]),
        ({"state": "T"}, ["stopped"]),
        ({"state": "D"}, ["uninterruptible"]),
        ({"section": "saving", "part": "other", "idle_s": 31.0, "limit_s": 30.0}, ["saving"]),
    ],
)
def test_the_odd_one_is_blamed(fields: dict[str, object], values: list[str]) -> None:
    hung = find(crowd(view(5, **fields)))
    assert (hung.node, hung.view.rank) == ("node2", 5)
    missing = [value for value in ("node2", "rank 5", *values) if value not in hung.detail]
    assert missing == [], hung.detail


def test_a_stopped_worker_is_blamed_before_one_that_is_behind() -> None:
    views = crowd(view(5, state="T"))
    views[1] = view(1, part="forward", place=2)
    assert find(views).view.rank == 5


def test_whoever_is_at_work_within_its_limit_is_waited_for() -> None:
    assert find_hung_worker(crowd(view(5, section="saving", idle_s=29.0, limit_s=30.0))) is None
    assert find_hung_worker(crowd(view(5, part="data", idle_s=0.4))) is None


def test_who_makes_groups_waits_for_who_has_not_come() -> None:
    views = [view(rank, section="connecting", part="other", place=1) for rank in range(6)]
    assert find([*views, view(6, section="starting", part="other", place=0)]).view.rank == 6
    assert find(views).node is None


def test_places_compare_within_a_stage_of_the_pipeline_only() -> None:
    """Stage 1 makes other marks than stage 0, and waits for it."""
    views = [view(rank, lane=0, part="gather", place=12) for rank in range(4)]
    views += [view(rank, lane=1, part="pipeline", place=3) for rank in range(4, 8)]
    views[2] = view(2, lane=0, part="backward", place=11)
    assert find(views).view.rank == 2


def test_nobody_is_blamed_when_all_look_alike() -> None:
    hung = find([view(rank) for rank in range(8)])
    assert hung.node is None
    assert re.search(r"\b2\.2 s\b.*\breduce\b", hung.detail)


def test_of_peers_on_one_node_the_node_is_sure() -> None:
    views = [view(rank) for rank in range(8)]
    views[4:6] = [view(rank, part="forward", place=6) for rank in (4, 5)]
    assert find(views).node == "node2"


def test_a_busy_process_stands_out_among_those_that_sleep() -> None:
    views = [view(rank, part="forward", place=6) for rank in range(8)]
    views[3] = view(3, part="forward", place=6, state="R")
    assert find(views).view.rank == 3


def test_who_alone_is_busy_stands_out_though_it_says_that_it_waits() -> None:
    """It hangs right after a gather; the others have begun to compute, and wait inside."""
    views = [view(rank, part="forward", place=7) for rank in range(8)]
    views[3] = view(3, part="gather", place=6, state="R")
    assert find(views).view.rank == 3
    views[3] = view(3, part="gather", place=6, state="R", idle_s=1.9)
    assert find_hung_worker(views) is None, "not yet"
    views[4] = view(4, part="gather", place=6, state="R")
    assert find(views).node is None, "with two, it may be either"


def test_those_who_wait_are_not_blamed_for_one_who_is_not_seen() -> None:
    waiting = [view(rank) for rank in range(6)]
    assert find_hung_worker(waiting, complete=False) is None
    assert find([*waiting[:5], view(5, part="data", place=1)], complete=False).view.rank == 5


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
    odd = data.draw(st.integers(0, size - 1))
    hung = view(odd, part=part, place=place)
    views = crowd(hung, size)
    views = [
        item
        if item[1].rank == odd
        else (item[0], replace(item[1], place=place + data.draw(st.integers(1, 2)), part="gather"))
        for item in views
    ]
    hung = find(data.draw(st.permutations(views)))
    assert (hung.node, hung.view.rank) == (f"node{odd // 2}", odd)


def seen(idle_s: float) -> WorkersSeen:
    return WorkersSeen(epoch=1, stalled=True, workers=(view(0, idle_s=idle_s, part="data")[1],))


def test_it_waits_for_the_limit_then_for_those_that_are_silent_then_concludes() -> None:
    diagnosis = HangDiagnosis()
    assert diagnosis.open(seen(1.8), 10.0)
    diagnosis.heard("a", "node0", seen(1.8))
    assert diagnosis.missing(["a", "b"]) == ["b"]
    assert diagnosis.look_again_s(10.5, {"b": 9.9}, 1.0) == RECHECK_S  # nobody hangs yet
    diagnosis.heard("a", "node0", seen(2.2))
    assert 0 < diagnosis.look_again_s(10.6, {"b": 9.9}, 1.0) <= SILENT_BEATS
    assert diagnosis.silent({"b": 9.9, "c": 10.1}) == ["b"]
    assert diagnosis.look_again_s(9.9 + SILENT_BEATS + 0.1, {"b": 9.9}, 1.0) == 0.0
    found = diagnosis.conclude(["a", "b"])
    assert found is not None
    assert (found[0].node, found[1].failure.kind) == ("node0", "hang")


def test_a_question_asked_too_early_is_dropped_and_asked_again_a_little_later() -> None:
    diagnosis = HangDiagnosis()
    assert diagnosis.open(seen(1.8), 10.0)
    diagnosis.heard("a", "node0", seen(1.8))
    assert diagnosis.look_again_s(10.0 + FORGET_S, {}, 1.0) == 0.0
    assert diagnosis.asked is None
    assert not diagnosis.open(seen(1.8), 10.1 + FORGET_S)
    assert diagnosis.open(seen(1.8), 10.4 + FORGET_S)
