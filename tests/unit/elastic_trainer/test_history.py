"""Whom a failure is blamed on, and what it costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.membership.cause import Culprit
from elastic_trainer.agent.membership.history import LONGEST_BACKOFF_S, History, Limits
from elastic_trainer.failures import Action, Kind

LIMITS = Limits(max_restarts=3, window_s=100.0, node_failures=2)
CRASH = (Kind.CRASH, "ZeroDivisionError: division by zero")


def blame(
    node: str | None,
    kind: Kind = Kind.KILLED,
    detail: str = "SIGKILL",
    step: int = 7,
    host: str | None = None,
) -> Culprit:
    return Culprit(node, kind, Action.RESTART, detail, step, host)


def history(*found: Culprit, apart_s: float = 1.0, progress=()) -> History:
    result = History()
    for i, item in enumerate(found):
        result = result.add(item, i * apart_s, progress[i] if progress else None)
    return result


def verdict_on(
    *found: Culprit, limits: Limits = LIMITS, barred=(), apart_s: float = 1.0, progress=()
):
    record = history(*found, apart_s=apart_s, progress=progress)
    return record.verdict(found[-1], limits, (len(found) - 1) * apart_s, barred)


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


def test_a_crash_that_follows_one_rank_puts_out_nobody():
    found = [blame("a", *CRASH), blame("a", *CRASH), blame("b", *CRASH)]
    assert verdict_on(*found[:2]).evict is None
    verdict = verdict_on(*found)
    assert (verdict.evict, verdict.stop_code) == (None, 93)
    assert "a, b" in verdict.reason


OF_THE_PROGRAM = [
    CRASH,
    (Kind.USER_ERROR, "ModuleNotFoundError: No module named 'wandb'"),
    (Kind.OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory"),
]
OF_A_MACHINE = [
    (Kind.KILLED, "SIGKILL"),
    (Kind.HANG, "no progress for 300 s"),
    (Kind.FAULT, "SIGSEGV"),
    (Kind.INFRASTRUCTURE, "OSError: [Errno 5] Input/output error"),
]
BY_CLASS = Limits(max_restarts=100, window_s=100.0, node_failures=2, max_crashes=5)


@pytest.mark.parametrize("error", OF_THE_PROGRAM)
def test_a_program_that_fails_on_one_node_only_costs_the_job_and_never_the_node(error):
    """With progress, budgets end it; without, `no_progress` does: nobody is put out."""
    found = [blame("a", *error, step=n) for n in range(6)]
    for n in range(1, 6):
        verdict = verdict_on(*found[:n], limits=BY_CLASS)
        assert (verdict.evict, verdict.stop_code) == (None, None)
    assert verdict_on(*found, limits=BY_CLASS).stop_code == 94
    stuck = verdict_on(*found[:3], limits=BY_CLASS, progress=[0, 0, 0])
    assert (stuck.evict, stuck.stop_code) == (None, 93)
    assert "all on a" in stuck.reason, "whoever reads it may look at that machine"


@pytest.mark.parametrize("error", OF_THE_PROGRAM)
@pytest.mark.parametrize("other", OF_A_MACHINE)
def test_what_a_machine_may_have_done_counts_against_it_alone(error, other):
    assert verdict_on(blame("a", *other), blame("a", *other), limits=BY_CLASS).evict == "a"
    mixed = [blame("a", *error), blame("a", *other), blame("a", *error)]
    assert [verdict_on(*mixed[:n], limits=BY_CLASS).evict for n in (1, 2, 3)] == [None] * 3
    assert verdict_on(*mixed, blame("a", *other), limits=BY_CLASS).evict == "a"


def test_a_service_that_one_rank_asks_for_all_costs_no_node():
    gone = [blame("a", Kind.SERVICE, "HTTPError: 503 Server Error", step=n) for n in range(9)]
    verdict = verdict_on(*gone, limits=BY_CLASS)
    assert (verdict.evict, verdict.stop_code) == (None, None)


def test_the_same_failure_wherever_a_rank_goes_costs_two_nodes_but_not_a_third():
    killed = [blame(node) for node in "aabb"]
    barred = {"a": "failed twice", "b": "failed twice"}
    assert verdict_on(*killed, progress=[7] * 4, barred={"a": ""}).evict == "b"
    third = verdict_on(*killed, blame("c"), progress=[7] * 5, barred=barred)
    assert third.stop_code == 93
    assert "a, b, c" in third.reason
    moved = verdict_on(*killed, blame("c"), progress=[7, 7, 7, 7, 8], barred=barred)
    assert moved.stop_code is None
    assert verdict_on(*killed, blame("c"), barred=barred).stop_code is None  # nobody knows
    other = verdict_on(*killed, blame("c", Kind.HANG, "x"), progress=[7] * 5, barred=barred)
    assert other.stop_code is None


# --- pods, which come and go on machines -------------------------------------------------


def test_a_machine_is_put_out_whatever_its_pods_are_called():
    found = [blame("p-0-a", host="m1"), blame("p-0-b", host="m1")]
    assert verdict_on(*found).evict == "m1"


def test_what_a_pod_did_elsewhere_does_not_count():
    moved = [blame("p-0", host="m1"), blame("p-0", host="m2")]
    assert verdict_on(*moved).evict is None
    assert verdict_on(*moved, blame("p-0", host="m1")).evict == "m1"


def test_a_pod_that_fails_alike_on_two_machines_has_a_bad_program():
    verdict = verdict_on(blame("p-0", *CRASH, host="m1"), blame("p-0", *CRASH, host="m2"))
    assert verdict.stop_code == 93
    assert "p-0 (m1), p-0 (m2)" in verdict.reason
    again = verdict_on(blame("p-0-a", *CRASH, host="m1"), blame("p-0-b", *CRASH, host="m1"))
    assert (again.stop_code, again.evict) == (None, None), "two pods, one machine"


# --- no progress -----------------------------------------------------------------------

HANG = (Kind.HANG, "no progress for 300 s")


@pytest.mark.parametrize(
    "found",
    [
        [blame(None, *CRASH)] * 3,
        [blame(None, *CRASH), blame("b", *HANG), blame("c", Kind.OUT_OF_MEMORY, "OOM")],
        [blame("a", Kind.CRASH, "KeyError: 1"), blame("b", *CRASH), blame("c", *HANG)],
        [blame(None, Kind.CORRUPTION, "x differs between ranks 0, 1")] * 3,
    ],
)
def test_failures_of_the_program_without_progress_end_with_93(found):
    assert verdict_on(*found[:2], progress=[40, 40]).stop_code is None
    stuck = verdict_on(*found, progress=[40] * 3)
    assert stuck.stop_code == 93
    assert "since step 40 was committed" in stuck.reason
    assert verdict_on(*found, progress=[40, 40, 41]).stop_code is None
    assert verdict_on(*found).stop_code is None  # a script that says nothing of its progress


def test_lost_nodes_and_kills_say_nothing_of_the_program():
    between = [blame(None, *CRASH), blame("a", Kind.NODE_LOST), blame(None, *CRASH)]
    assert verdict_on(*between, progress=[0] * 3).stop_code is None
    assert verdict_on(*between, blame(None, *CRASH), progress=[0] * 4).stop_code in (93, 94)
    assert verdict_on(*[blame(n) for n in "abc"], progress=[0] * 3).stop_code is None


def test_a_bad_node_at_the_start_leaves_and_does_not_stop_the_rest():
    found = [blame("a", Kind.FAULT, "SIGILL"), blame("a", Kind.FAULT, "SIGILL")]
    assert verdict_on(*found, progress=[0, 0]).evict == "a"
    later = [*found, blame("b", *CRASH)]
    verdict = verdict_on(*later, progress=[0] * 3, barred={"a": "failed 2 times"})
    assert (verdict.evict, verdict.stop_code) == (None, None)


# --- budgets by class ------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "key"), [(Kind.CRASH, "max_crashes"), (Kind.HANG, "max_hangs")])
def test_each_class_has_a_budget_of_its_own(kind, key):
    limits = Limits(max_restarts=100, window_s=100.0, node_failures=99, max_crashes=2, max_hangs=2)
    found = [blame(node, kind, f"{node} went wrong") for node in "abc"]
    progress = [1, 2, 3]
    assert verdict_on(*found[:2], limits=limits, progress=[1, 2]).stop_code is None
    over = verdict_on(*found, limits=limits, progress=progress)
    assert over.stop_code == 94
    assert f"elastic.{key} allows 2" in over.reason
    lost = [*found[:2], blame("c", Kind.NODE_LOST)]
    assert verdict_on(*lost, limits=limits, progress=progress).stop_code is None


def test_nodes_lost_at_one_moment_cost_one_restart():
    rack = History()
    for i in range(16):
        rack = rack.add(blame(f"n{i}", Kind.NODE_LOST), 5.0)
    assert rack.verdict(blame("n15", Kind.NODE_LOST), LIMITS, 5.0).stop_code is None


def test_what_all_nodes_share_is_given_time():
    gone = blame(None, Kind.INFRASTRUCTURE, "storage")
    waits = [history(*[gone] * n, progress=[5] * n).backoff_s() for n in range(1, 9)]
    assert waits == [0, 2, 4, 8, 16, 32, LONGEST_BACKOFF_S, LONGEST_BACKOFF_S]
    assert history(gone, gone, gone, progress=[5, 5, 6]).backoff_s() == 0
    assert history(gone, gone, blame("a"), progress=[5] * 3).backoff_s() == 0
    assert History().backoff_s() == 0


def test_a_mended_node_starts_afresh_and_old_failures_are_forgotten():
    record = history(blame("a"), blame("b"), apart_s=60.0)
    assert [e.node for _, e in record.without("a").entries] == ["b"]
    assert [e.node for _, e in record.within(100.0, 130.0).entries] == ["b"]


KINDS = st.sampled_from([k for k in Kind if k is not Kind.NODE_LOST])
STRIKES = {
    *(Kind.KILLED, Kind.HANG, Kind.FAULT, Kind.INFRASTRUCTURE),
    *(Kind.NODE_FAULT, Kind.CORRUPTION, Kind.COLLATERAL),
}
incidents = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), KINDS, st.integers(0, 3)), max_size=12
)


@given(incidents)
def test_no_node_fails_more_often_than_it_may_and_stays(found):
    """Whatever happens: node first, then the job, and never both at once."""
    record, barred = History(), {}
    for now, (node, kind, progress) in enumerate(found):
        if node in barred:
            continue
        item = blame(node, kind, f"{kind} {now}", step=progress)
        record = record.add(item, float(now), progress)
        verdict = record.verdict(item, LIMITS, float(now), barred)
        assert verdict.evict is None or verdict.stop_code is None
        if verdict.evict is not None:
            assert verdict.evict == node
            barred[node] = verdict.reason
        strikes = [e for _, e in record.entries if e.node == node and e.kind in STRIKES]
        if node is not None and kind in STRIKES and len(strikes) >= LIMITS.node_failures:
            assert verdict.evict == node or verdict.stop_code == 93
        assert kind in STRIKES or verdict.evict is None
        if verdict.stop_code is not None:
            return
        charged = {when for when, e in record.entries if e.node not in barred}
        assert len(charged) <= LIMITS.max_restarts


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
    assert there.progress == record.progress
    assert [entry.step for _, entry in there.entries] == [step for _, _, step in entries]
    for (when, _), (mine, _, _) in zip(there.entries, entries, strict=True):
        assert abs((now + offset - when) - (now - mine)) < 0.002


pods = st.lists(
    st.tuples(st.sampled_from(["p-0", "p-1", "p-2"]), st.sampled_from(["m1", "m2"]), KINDS),
    max_size=12,
)


@given(pods, st.permutations(["p-0", "p-1", "p-2"]))
def test_names_of_pods_decide_nothing(found, names):
    """Any renaming of the pods, as recreating them is, leaves every decision as it was."""
    other = dict(zip(["p-0", "p-1", "p-2"], names, strict=True))
    barred: dict[str, str] = {}
    one, two = History(), History()
    for now, (node, host, kind) in enumerate(found):
        if host in barred:
            continue
        item = blame(node, kind, f"{kind} {now}", host=host)
        renamed = blame(other[node], kind, f"{kind} {now}", host=host)
        one, two = one.add(item, float(now), now), two.add(renamed, float(now), now)
        verdict = one.verdict(item, LIMITS, float(now), barred)
        same = two.verdict(renamed, LIMITS, float(now), barred)
        assert (verdict.evict, verdict.stop_code) == (same.evict, same.stop_code)
        if verdict.stop_code is not None:
            return
        if verdict.evict is not None:
            assert verdict.evict == host
            barred[host] = verdict.reason
