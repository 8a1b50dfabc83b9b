"""Whom a failure is blamed on, and what it costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.history import Culprit, History, Limits, causes, culprit
from elastic_trainer.agent.notices import WorkersFailed
from elastic_trainer.failures import Action, Failure, Kind

LIMITS = Limits(max_restarts=3, window_s=100.0, node_failures=2)
COLLATERAL = (Kind.COLLATERAL, "connection reset")
CRASH = (Kind.CRASH, "ZeroDivisionError: division by zero")


def failed(
    kind: Kind, detail: str = "", *, step: int = 7, action: Action = Action.RESTART
) -> WorkersFailed:
    failure = Failure(kind=kind, action=action, detail=detail)
    return WorkersFailed(epoch=1, local_rank=0, rank=0, step=step, failure=failure)


def blame(
    node: str | None, kind: Kind = Kind.KILLED, detail: str = "SIGKILL", step: int = 7
) -> Culprit:
    return Culprit(node, kind, Action.RESTART, detail, step)


def history(*found: Culprit, now: float = 0.0, apart_s: float = 1.0) -> History:
    result = History()
    for i, item in enumerate(found):
        result = result.add(item, now + i * apart_s)
    return result


def verdict_on(*found: Culprit, limits: Limits = LIMITS, barred=(), apart_s: float = 1.0):
    record = history(*found, apart_s=apart_s)
    return record.verdict(found[-1], limits, (len(found) - 1) * apart_s, barred)


# --- the cause -------------------------------------------------------------------------


def test_the_first_failure_that_is_no_consequence_is_the_cause():
    reports = [("b", failed(*COLLATERAL)), ("a", failed(Kind.KILLED)), ("c", failed(Kind.HANG))]
    assert culprit(reports).node == "a"


def test_consequences_alone_are_nobodys_fault():
    found = culprit([("b", failed(*COLLATERAL)), ("a", failed(*COLLATERAL))])
    assert (found.node, found.kind) == (None, Kind.COLLATERAL)


def test_the_same_crash_on_two_nodes_is_the_programs():
    assert culprit([("a", failed(*CRASH)), ("b", failed(*CRASH))]).node is None
    assert culprit([("a", failed(*CRASH)), ("a", failed(*CRASH))]).node == "a"
    assert culprit([("a", failed(*CRASH)), ("b", failed(Kind.CRASH, "KeyError: 3"))]).node == "a"


def test_echoes_of_a_lost_node_are_no_failures():
    (found,) = causes(["a", "a"], [("b", failed(*COLLATERAL))])
    assert str(found) == "lost a"
    assert [str(c) for c in causes(["a"], [("b", failed(*CRASH))])] == [
        "lost a",
        f"worker failed on b: {CRASH[1]}",
    ]
    assert [str(c) for c in causes([], [("b", failed(*COLLATERAL))])] == [
        "worker failed: connection reset"
    ]
    assert causes([], []) == []


# --- what follows ----------------------------------------------------------------------


def test_one_failure_restarts():
    verdict = verdict_on(blame("a"))
    assert (verdict.evict, verdict.stop_code) == (None, None)


def test_a_users_mistake_ends_with_93():
    found = Culprit("a", Kind.USER_ERROR, Action.STOP, "ImportError: no module named x", 0)
    assert verdict_on(found).stop_code == 93


def test_a_bad_node_leaves_at_once():
    found = Culprit("a", Kind.NODE_FAULT, Action.EVICT, "Xid 79", 7)
    assert verdict_on(found).evict == "a"


def test_a_node_that_fails_twice_leaves_also_when_the_budget_is_used_up():
    verdict = verdict_on(blame("b"), blame("c"), blame("a"), blame("a"))
    assert (verdict.evict, verdict.stop_code) == ("a", None)


def test_failures_of_long_ago_count_no_more():
    assert verdict_on(blame("a"), blame("a"), apart_s=101.0).evict is None
    tight = Limits(max_restarts=0, window_s=100.0, node_failures=9)
    assert verdict_on(blame("a"), blame("b"), limits=tight, apart_s=101.0).stop_code == 94
    assert verdict_on(blame("a"), blame("b"), apart_s=101.0).stop_code is None


def test_a_node_that_is_lost_again_and_again_costs_the_job_not_itself():
    lost = [blame("a", Kind.NODE_LOST, "node lost", 0)] * 4
    verdict = verdict_on(*lost)
    assert (verdict.evict, verdict.stop_code) == (None, 94)
    assert verdict_on(*lost[:3]).stop_code is None


def test_the_budget_says_how_much_was_used_and_what_came_last():
    verdict = verdict_on(*(blame(node, detail=f"in {node}") for node in "abcd"))
    assert verdict.stop_code == 94
    assert "4 restarts" in verdict.reason
    assert "max_restarts allows 3" in verdict.reason
    assert "in d" in verdict.reason


def test_failures_of_a_node_that_was_put_out_are_not_charged_to_the_job():
    found = [blame("a"), blame("a"), blame("b"), blame("c")]
    assert verdict_on(*found).stop_code == 94
    assert verdict_on(*found, barred={"a": "failed twice"}).stop_code is None


def test_a_crash_that_comes_back_on_another_node_is_deterministic():
    assert verdict_on(blame("a", *CRASH), blame("b", *CRASH)).stop_code == 93
    assert verdict_on(blame("a", *CRASH), blame("b", *CRASH, step=8)).stop_code is None
    assert verdict_on(blame("a", *CRASH), blame("b", Kind.CRASH, "KeyError")).stop_code is None
    assert verdict_on(blame("a"), blame("b")).stop_code is None  # killed: nobody's program


def test_a_crash_that_follows_one_rank_does_not_put_out_one_node_after_the_other():
    found = [blame("a", *CRASH), blame("a", *CRASH), blame("b", *CRASH)]
    assert verdict_on(*found[:2]).evict == "a"
    verdict = verdict_on(*found, barred={"a": "failed twice"})
    assert verdict.stop_code == 93
    assert "a, b" in verdict.reason


def test_crashes_of_all_without_progress_end_with_93():
    assert verdict_on(*[blame(None, *CRASH)] * 2).stop_code is None
    assert verdict_on(*[blame(None, *CRASH)] * 3).stop_code == 93
    moving = [blame(None, *CRASH, step=step) for step in (7, 7, 8)]
    assert verdict_on(*moving).stop_code is None
    between = [blame(None, *CRASH), blame("a", Kind.NODE_LOST), blame(None, *CRASH)]
    assert verdict_on(*between).stop_code is None


# --- on the wire -----------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.sampled_from("abc"), st.integers(0, 9)), max_size=5),
    st.floats(-1e6, 1e6),
    st.floats(1e5, 2e5),
)
def test_another_machines_clock_changes_nothing(entries, offset, now):
    record = History()
    for when, node, step in entries:
        record = record.add(blame(node, step=step), when)
    there = History.from_wire(record.to_wire(now), now + offset)
    assert [entry.node for _, entry in there.entries] == [node for _, node, _ in entries]
    assert [entry.step for _, entry in there.entries] == [step for _, _, step in entries]
    for (when, _), (mine, _, _) in zip(there.entries, entries, strict=True):
        assert abs((now + offset - when) - (now - mine)) < 0.002
