"""What ended an epoch, what that counts against, and what follows."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.membership.attribution import (
    LONGEST_BACKOFF_S,
    Attribution,
    EpochEnd,
    History,
    attribute,
    attribute_end,
    gather,
    settle_s,
)
from elastic_trainer.agent.membership.notices import Member, WorkersFailed
from elastic_trainer.agent.membership.table import Members
from elastic_trainer.plan.config import ElasticSection
from elastic_trainer.record.failures import Action, Failure, Kind

COLLATERAL = (Kind.COLLATERAL, "connection reset")
CRASH = (Kind.CRASH, "ZeroDivisionError: division by zero")
STORAGE = (Kind.INFRASTRUCTURE, "OSError: [Errno 5] Input/output error")
STALE = (Kind.NODE_FAULT, "OSError: [Errno 116] Stale file handle")
IMPORT = (Kind.USER_ERROR, "ImportError: libcuda.so.1: cannot open shared object file")
ACTIONS = {Kind.NODE_FAULT: Action.EVICT, Kind.USER_ERROR: Action.STOP}


def failed(
    kind: Kind, detail: str = "", *, step: int = 7, sure: bool = False, of: int = 1
) -> WorkersFailed:
    action = ACTIONS.get(kind, Action.RESTART)
    failure = Failure(kind=kind, action=action, detail=detail, sure=sure)
    return WorkersFailed(epoch=1, local_rank=0, rank=0, step=step, failure=failure, of=of)


def one_cause(num_members: int, *reports: tuple[str, WorkersFailed], lost=()):
    (found,) = attribute(list(lost), list(reports), num_members)
    return found


# --- one node --------------------------------------------------------------------------


def test_the_first_failure_that_is_no_consequence_is_the_cause():
    reports = [("b", failed(*COLLATERAL)), ("a", failed(Kind.KILLED)), ("c", failed(Kind.HANG))]
    assert one_cause(4, *reports).node == "a"


def test_consequences_alone_are_nobodys_fault():
    found = one_cause(4, ("b", failed(*COLLATERAL)), ("a", failed(*COLLATERAL)))
    assert (found.node, found.kind) == (None, Kind.COLLATERAL)


def test_echoes_of_a_lost_node_are_no_failures():
    found = attribute(["a", "a"], [("b", failed(*COLLATERAL))], 4)
    assert [(c.kind, c.node) for c in found] == [(Kind.NODE_LOST, "a")]
    found = attribute(["a"], [("b", failed(*CRASH))], 4)
    assert [(c.kind, c.node) for c in found] == [(Kind.NODE_LOST, "a"), (Kind.CRASH, "b")]
    assert CRASH[1] in str(found[1])
    assert attribute([], [], 4) == []


def test_a_node_that_computes_wrong_leaves_and_two_that_differ_do_not():
    odd = Failure(kind=Kind.CORRUPTION, action=Action.EVICT, detail="differs")
    named = replace(failed(Kind.CORRUPTION), failure=odd)
    found = one_cause(4, ("b", failed(*CRASH)), ("c", named))
    assert (found.node, found.kind, found.action) == ("c", Kind.CORRUPTION, Action.EVICT)
    both = one_cause(4, ("b", failed(Kind.CORRUPTION, "x")), ("c", failed(Kind.CORRUPTION, "x")))
    assert (both.node, both.action) == (None, Action.RESTART)


def test_every_bad_node_leaves_and_is_believed_first():
    reports = [("b", failed(*CRASH)), ("a", failed(*STALE)), ("c", failed(Kind.NODE_FAULT, "Xid"))]
    found = attribute([], reports, 9)
    assert [(c.node, c.action) for c in found] == [("a", Action.EVICT), ("c", Action.EVICT)]


def test_what_only_one_node_cannot_do_is_that_nodes_fault():
    found = one_cause(4, ("a", failed(*IMPORT)), ("b", failed(*COLLATERAL)))
    assert (found.node, found.action) == ("a", Action.RESTART)
    assert one_cause(1, ("a", failed(*IMPORT))).action is Action.STOP


def test_a_worker_that_says_so_is_believed_at_once():
    sure = failed(Kind.USER_ERROR, "HF304 the checkpoint is damaged", sure=True)
    found = one_cause(4, ("b", failed(Kind.KILLED)), ("a", sure))
    assert found.action is Action.STOP


# --- the program -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CRASH, IMPORT, (Kind.OUT_OF_MEMORY, "OutOfMemoryError: 2 GiB")])
def test_the_same_error_on_most_nodes_is_not_tried_again(kind):
    reports = [(node, failed(*kind)) for node in "abc"]
    found = one_cause(4, *reports, ("d", failed(*COLLATERAL)))
    assert (found.node, found.action) == (None, Action.STOP)
    assert found.detail.endswith(kind[1])
    assert re.findall(r"\d+", found.detail.removesuffix(kind[1])) == ["3", "4", "7"]


def test_numbers_of_the_ranks_do_not_make_errors_differ():
    index = "IndexError: index {} is out of range"
    reports = [(n, failed(Kind.CRASH, index.format(i))) for i, n in enumerate("abcd")]
    assert one_cause(4, *reports).action is Action.STOP


@pytest.mark.parametrize(
    "reports",
    [
        [("a", failed(*CRASH)), ("b", failed(*CRASH))],  # two of four
        [("a", failed(*CRASH)), ("b", failed(*CRASH)), ("c", failed(*CRASH, step=8))],
        [(n, failed(Kind.CRASH, "SIGSEGV")) for n in "abcd"],  # says nothing
        [(n, failed(Kind.CRASH, "loss 3.1 (exit code 1)")) for n in "abcd"],
        [*((n, failed(*CRASH)) for n in "abc"), ("d", failed(Kind.KILLED, "SIGKILL"))],
    ],
)
def test_what_is_not_clearly_the_programs_is_tried_again(reports):
    assert one_cause(4, *reports).action is Action.RESTART


def test_an_error_of_all_may_be_the_echo_of_a_lost_node():
    found = attribute(["e"], [(n, failed(*CRASH)) for n in "abcd"], 5)
    assert all(c.action is Action.RESTART for c in found)


def test_the_same_crash_on_two_nodes_is_no_nodes():
    assert one_cause(4, ("a", failed(*CRASH)), ("b", failed(*CRASH))).node is None
    assert one_cause(4, ("a", failed(*CRASH)), ("b", failed(Kind.CRASH, "KeyError"))).node == "a"


def test_of_one_node_all_workers_must_fail_alike():
    report = failed(*CRASH, of=4)
    assert one_cause(1, ("a", replace(report, alike=4))).action is Action.STOP
    some = one_cause(1, ("a", replace(report, alike=3)))
    assert (some.node, some.action) == (None, Action.RESTART)
    single = one_cause(1, ("a", failed(*CRASH)))  # nothing to compare it with
    assert (single.node, single.action) == (None, Action.RESTART)


# --- what all share --------------------------------------------------------------------


@pytest.mark.parametrize("kind", [STORAGE, STALE])
def test_what_most_nodes_lose_at_once_is_no_users_error_and_costs_no_node(kind):
    found = one_cause(4, *((n, failed(*kind, step=i)) for i, n in enumerate("abc")))
    assert (found.node, found.kind, found.action) == (None, Kind.INFRASTRUCTURE, Action.RESTART)


def test_what_one_node_loses_is_counted_against_it():
    assert one_cause(4, ("a", failed(*STORAGE))).node == "a"
    found = one_cause(4, ("a", failed(*STALE)), ("b", failed(*COLLATERAL)))
    assert (found.node, found.action) == ("a", Action.EVICT)


# --- waiting ---------------------------------------------------------------------------


def test_only_what_others_may_share_is_waited_for():
    assert settle_s(failed(Kind.KILLED).failure) == settle_s(failed(Kind.HANG).failure) == 0
    assert 0 < settle_s(failed(*COLLATERAL).failure) < settle_s(failed(*CRASH).failure) < 1
    assert settle_s(failed(*IMPORT).failure) > 0
    assert settle_s(failed(*IMPORT, sure=True).failure) == 0


def test_a_node_says_how_many_of_its_workers_failed_alike():
    held, waits = gather(None, failed(*COLLATERAL))
    assert waits
    held, waits = gather(held, failed(*CRASH))
    assert (held.failure.kind, held.alike, waits) == (Kind.CRASH, 1, True)
    held, _ = gather(held, failed(*CRASH))
    held, _ = gather(held, failed(*CRASH, step=8))
    held, _ = gather(held, failed(*COLLATERAL))
    assert held.alike == 2
    held, waits = gather(held, failed(Kind.KILLED, "SIGKILL"))
    assert (held.failure.kind, waits) == (Kind.CRASH, False)


kinds = st.sampled_from([*(k for k in Kind if k is not Kind.NODE_LOST)])
anything = st.lists(
    st.tuples(st.sampled_from("abcdef"), kinds, st.sampled_from(["XError: 1", "SIGSEGV"])),
    min_size=1,
    max_size=8,
)


@given(anything, st.sets(st.sampled_from("gh")))
def test_whatever_was_reported_there_is_a_cause(said, lost):
    reports = [(node, failed(kind, detail)) for node, kind, detail in said]
    found = attribute(sorted(lost), reports, 8)
    assert found
    assert {c.node for c in found if c.kind is Kind.NODE_LOST} == lost
    for item in found:
        assert item.node in {None, *lost, *(node for node, _, _ in said)}
        if item.action is Action.EVICT:
            assert item.node is not None
        if item.action is Action.STOP:
            assert item.kind in (Kind.CRASH, Kind.USER_ERROR, Kind.OUT_OF_MEMORY)


# --- what follows: budgets and exclusions ------------------------------------------------

LIMITS = ElasticSection(max_restarts=3, window_s=100.0, node_failures=2)


def failure(
    node: str | None,
    kind: Kind = Kind.KILLED,
    detail: str = "SIGKILL",
    step: int = 7,
    host: str | None = None,
) -> Attribution:
    return Attribution(node, kind, Action.RESTART, detail, step, host)


def history(*found: Attribution, apart_s: float = 1.0, progress=()) -> History:
    result = History()
    for i, item in enumerate(found):
        result = result.add(item, i * apart_s, progress[i] if progress else None)
    return result


def after(
    *found: Attribution,
    limits: ElasticSection = LIMITS,
    excluded=(),
    apart_s: float = 1.0,
    progress=(),
):
    record = history(*found, apart_s=apart_s, progress=progress)
    return record.consequence(found[-1], limits, (len(found) - 1) * apart_s, excluded)


# --- what follows ----------------------------------------------------------------------


def test_one_failure_restarts():
    then = after(failure("a"))
    assert (then.exclude, then.stop_code) == (None, None)


def test_a_users_mistake_ends_with_93():
    found = Attribution("a", Kind.USER_ERROR, Action.STOP, "ImportError: no module named x", 0)
    assert after(found).stop_code == 93


def test_a_bad_node_leaves_at_once():
    found = Attribution("a", Kind.NODE_FAULT, Action.EVICT, "Xid 79", 7)
    assert after(found).exclude == "a"


def test_a_node_that_fails_twice_leaves_also_when_the_budget_is_used_up():
    then = after(failure("b"), failure("c"), failure("a"), failure("a"))
    assert (then.exclude, then.stop_code) == ("a", None)


def test_failures_of_long_ago_count_no_more():
    assert after(failure("a"), failure("a"), apart_s=101.0).exclude is None
    tight = ElasticSection(max_restarts=0, window_s=100.0, node_failures=9)
    assert after(failure("a"), failure("b"), limits=tight, apart_s=101.0).stop_code == 94
    assert after(failure("a"), failure("b"), apart_s=101.0).stop_code is None


def test_a_node_that_is_lost_again_and_again_costs_itself_not_the_job():
    lost = [failure("a", Kind.NODE_LOST, "node lost", 0)] * 40
    then = after(*lost)
    assert (then.exclude, then.stop_code) == (None, None), "it is in quarantine"
    once = [failure(node, Kind.NODE_LOST, "node lost", 0) for node in "abcd"]
    assert after(*once[:3]).stop_code is None
    assert after(*once).stop_code == 94, "losses of several machines are the job's"
    assert after(*lost, *once[1:]).stop_code is None


def test_the_budget_says_how_much_was_used_and_what_came_last():
    then = after(*(failure(node, detail=f"in {node}") for node in "abcd"))
    assert then.stop_code == 94
    assert "4 restarts" in then.reason
    assert "max_restarts allows 3" in then.reason
    assert "in d" in then.reason


def test_failures_of_a_node_that_was_excluded_are_not_charged_to_the_job():
    found = [failure("a"), failure("a"), failure("b"), failure("c")]
    assert after(*found).stop_code == 94
    assert after(*found, excluded={"a": "failed twice"}).stop_code is None


def test_a_crash_that_comes_back_on_another_node_is_deterministic():
    assert after(failure("a", *CRASH), failure("b", *CRASH)).stop_code == 93
    assert after(failure("a", *CRASH), failure("b", *CRASH, step=8)).stop_code is None
    assert after(failure("a", *CRASH), failure("b", Kind.CRASH, "KeyError")).stop_code is None
    assert after(failure("a"), failure("b")).stop_code is None  # killed: nobody's program


def test_a_crash_that_follows_one_rank_excludes_nobody():
    found = [failure("a", *CRASH), failure("a", *CRASH), failure("b", *CRASH)]
    assert after(*found[:2]).exclude is None
    then = after(*found)
    assert (then.exclude, then.stop_code) == (None, 93)
    assert "a, b" in then.reason


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
BY_CLASS = ElasticSection(max_restarts=100, window_s=100.0, node_failures=2, max_crashes=5)


@pytest.mark.parametrize("error", OF_THE_PROGRAM)
def test_a_program_that_fails_on_one_node_only_costs_the_job_and_never_the_node(error):
    """With progress, budgets end it; without, `no_progress` does: nobody is excluded."""
    found = [failure("n7", *error, step=n) for n in range(6)]
    for n in range(1, 6):
        then = after(*found[:n], limits=BY_CLASS)
        assert (then.exclude, then.stop_code) == (None, None)
    assert after(*found, limits=BY_CLASS).stop_code == 94
    stuck = after(*found[:3], limits=BY_CLASS, progress=[0, 0, 0])
    assert (stuck.exclude, stuck.stop_code) == (None, 93)
    assert "n7" in stuck.reason, "whoever reads it may look at that machine"


@pytest.mark.parametrize("error", OF_THE_PROGRAM)
@pytest.mark.parametrize("other", OF_A_MACHINE)
def test_what_a_machine_may_have_done_counts_against_it_alone(error, other):
    assert after(failure("a", *other), failure("a", *other), limits=BY_CLASS).exclude == "a"
    mixed = [failure("a", *error), failure("a", *other), failure("a", *error)]
    assert [after(*mixed[:n], limits=BY_CLASS).exclude for n in (1, 2, 3)] == [None] * 3
    assert after(*mixed, failure("a", *other), limits=BY_CLASS).exclude == "a"


def test_a_service_that_one_rank_asks_for_all_costs_no_node():
    gone = [failure("a", Kind.SERVICE, "HTTPError: 503 Server Error", step=n) for n in range(9)]
    then = after(*gone, limits=BY_CLASS)
    assert (then.exclude, then.stop_code) == (None, None)


def test_the_same_failure_wherever_a_rank_goes_costs_two_nodes_but_not_a_third():
    killed = [failure(node) for node in "aabb"]
    excluded = {"a": "failed twice", "b": "failed twice"}
    assert after(*killed, progress=[7] * 4, excluded={"a": ""}).exclude == "b"
    third = after(*killed, failure("c"), progress=[7] * 5, excluded=excluded)
    assert third.stop_code == 93
    assert "a, b, c" in third.reason
    moved = after(*killed, failure("c"), progress=[7, 7, 7, 7, 8], excluded=excluded)
    assert moved.stop_code is None
    assert after(*killed, failure("c"), excluded=excluded).stop_code is None  # nobody knows
    other = after(*killed, failure("c", Kind.HANG, "x"), progress=[7] * 5, excluded=excluded)
    assert other.stop_code is None


# --- pods, which come and go on machines -------------------------------------------------


def test_a_machine_is_excluded_whatever_its_pods_are_called():
    found = [failure("p-0-a", host="m1"), failure("p-0-b", host="m1")]
    assert after(*found).exclude == "m1"


def test_what_a_pod_did_elsewhere_does_not_count():
    moved = [failure("p-0", host="m1"), failure("p-0", host="m2")]
    assert after(*moved).exclude is None
    assert after(*moved, failure("p-0", host="m1")).exclude == "m1"


def test_a_pod_that_fails_alike_on_two_machines_has_a_bad_program():
    then = after(failure("p-0", *CRASH, host="m1"), failure("p-0", *CRASH, host="m2"))
    assert then.stop_code == 93
    assert "p-0 (m1), p-0 (m2)" in then.reason
    again = after(failure("p-0-a", *CRASH, host="m1"), failure("p-0-b", *CRASH, host="m1"))
    assert (again.stop_code, again.exclude) == (None, None), "two pods, one machine"


# --- no progress -----------------------------------------------------------------------

HANG = (Kind.HANG, "no progress for 300 s")


@pytest.mark.parametrize(
    "found",
    [
        [failure(None, *CRASH)] * 3,
        [failure(None, *CRASH), failure("b", *HANG), failure("c", Kind.OUT_OF_MEMORY, "OOM")],
        [failure("a", Kind.CRASH, "KeyError: 1"), failure("b", *CRASH), failure("c", *HANG)],
        [failure(None, Kind.CORRUPTION, "x differs between ranks 0, 1")] * 3,
    ],
)
def test_failures_of_the_program_without_progress_end_with_93(found):
    assert after(*found[:2], progress=[40, 40]).stop_code is None
    stuck = after(*found, progress=[40] * 3)
    assert stuck.stop_code == 93
    assert "step 40" in stuck.reason
    assert after(*found, progress=[40, 40, 41]).stop_code is None
    assert after(*found).stop_code is None  # a script that says nothing of its progress


def test_lost_nodes_and_kills_say_nothing_of_the_program():
    between = [failure(None, *CRASH), failure("a", Kind.NODE_LOST), failure(None, *CRASH)]
    assert after(*between, progress=[0] * 3).stop_code is None
    assert after(*between, failure(None, *CRASH), progress=[0] * 4).stop_code in (93, 94)
    assert after(*[failure(n) for n in "abc"], progress=[0] * 3).stop_code is None


def test_a_bad_node_at_the_start_leaves_and_does_not_stop_the_rest():
    found = [failure("a", Kind.FAULT, "SIGILL"), failure("a", Kind.FAULT, "SIGILL")]
    assert after(*found, progress=[0, 0]).exclude == "a"
    later = [*found, failure("b", *CRASH)]
    then = after(*later, progress=[0] * 3, excluded={"a": "failed 2 times"})
    assert (then.exclude, then.stop_code) == (None, None)


# --- budgets by class ------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "key"), [(Kind.CRASH, "max_crashes"), (Kind.HANG, "max_hangs")])
def test_each_class_has_a_budget_of_its_own(kind, key):
    limits = ElasticSection(
        max_restarts=100, window_s=100.0, node_failures=99, max_crashes=2, max_hangs=2
    )
    found = [failure(node, kind, f"{node} went wrong") for node in "abc"]
    progress = [1, 2, 3]
    assert after(*found[:2], limits=limits, progress=[1, 2]).stop_code is None
    over = after(*found, limits=limits, progress=progress)
    assert over.stop_code == 94
    assert f"elastic.{key} allows 2" in over.reason
    lost = [*found[:2], failure("c", Kind.NODE_LOST)]
    assert after(*lost, limits=limits, progress=progress).stop_code is None


def test_nodes_lost_at_one_moment_cost_one_restart():
    rack = History()
    for i in range(16):
        rack = rack.add(failure(f"n{i}", Kind.NODE_LOST), 5.0)
    assert rack.consequence(failure("n15", Kind.NODE_LOST), LIMITS, 5.0).stop_code is None


def test_what_all_nodes_share_is_given_time():
    gone = failure(None, Kind.INFRASTRUCTURE, "storage")
    waits = [history(*[gone] * n, progress=[5] * n).backoff_s() for n in range(1, 9)]
    assert waits == [0, 2, 4, 8, 16, 32, LONGEST_BACKOFF_S, LONGEST_BACKOFF_S]
    assert history(gone, gone, gone, progress=[5, 5, 6]).backoff_s() == 0
    assert history(gone, gone, failure("a"), progress=[5] * 3).backoff_s() == 0
    assert History().backoff_s() == 0


def test_a_mended_node_starts_afresh_and_old_failures_are_forgotten():
    record = history(failure("a"), failure("b"), apart_s=60.0)
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
    record, excluded = History(), {}
    for now, (node, kind, progress) in enumerate(found):
        if node in excluded:
            continue
        item = failure(node, kind, f"{kind} {now}", step=progress)
        record = record.add(item, float(now), progress)
        then = record.consequence(item, LIMITS, float(now), excluded)
        assert then.exclude is None or then.stop_code is None
        if then.exclude is not None:
            assert then.exclude == node
            excluded[node] = then.reason
        strikes = [e for _, e in record.entries if e.node == node and e.kind in STRIKES]
        if node is not None and kind in STRIKES and len(strikes) >= LIMITS.node_failures:
            assert then.exclude == node or then.stop_code == 93
        assert kind in STRIKES or then.exclude is None
        if then.stop_code is not None:
            return
        charged = {when for when, e in record.entries if e.node not in excluded}
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
        record = record.add(failure(node, step=step), when)
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
    excluded: dict[str, str] = {}
    one, two = History(), History()
    for now, (node, host, kind) in enumerate(found):
        if host in excluded:
            continue
        item = failure(node, kind, f"{kind} {now}", host=host)
        renamed = failure(other[node], kind, f"{kind} {now}", host=host)
        one, two = one.add(item, float(now), now), two.add(renamed, float(now), now)
        then = one.consequence(item, LIMITS, float(now), excluded)
        same = two.consequence(renamed, LIMITS, float(now), excluded)
        assert (then.exclude, then.stop_code) == (same.exclude, same.stop_code)
        if then.stop_code is not None:
            return
        if then.exclude is not None:
            assert then.exclude == host
            excluded[host] = then.reason


# --- the end of an epoch ---------------------------------------------------------------


def member(node: str, host: str) -> Member:
    return Member(agent_id=node, node=node, host=host, address="10.0.0.1", port=1, workers=1)


def end_of(*reports, lost=(), left=(), hosts=("m0", "m1", "m2"), committed=(5,)) -> EpochEnd:
    everyone = Members.of(member(f"n{i}", host) for i, host in enumerate(hosts))
    return EpochEnd(
        members=everyone.ids,
        everyone=everyone,
        lost=list(lost),
        left=set(left),
        reports=list(reports),
        committed=committed,
    )


def rule(end: EpochEnd, record: History | None = None, excluded=()):
    return attribute_end(end, record or History(), LIMITS, 10.0, excluded)


def test_nothing_failed_is_nobodys_failure():
    assert rule(end_of()) is None


def test_a_lost_node_is_charged_by_its_machine_and_one_that_left_is_not():
    ruling = rule(end_of(lost=["n1", "n2"], left=["n2"]))
    assert ruling.reason == "lost n1, n2 left"
    (found,) = [item for item, _ in ruling.consequences]
    assert (found.machine, [e.host for _, e in ruling.history.entries]) == ("m1", ["m1"])


def test_where_all_pods_share_a_machine_an_error_is_nobodys():
    crash = ("n1", failed(Kind.KILLED))
    assert rule(end_of(crash)).consequences[0][0].node == "n1"
    assert rule(end_of(crash, hosts=("m0",) * 3)).consequences[0][0].node is None
    stale = ("n1", failed(*STALE))
    assert rule(end_of(stale, hosts=("m0",) * 3)).consequences[0][1].exclude == "m0"


def test_progress_is_the_newest_step_anybody_knows_of():
    told = replace(failed(Kind.KILLED), committed=7)
    ruling = rule(end_of(("n1", told), committed=(3, 6)))
    assert ruling.history.progress == 7
    assert rule(end_of(("n1", failed(Kind.KILLED)), committed=())).history.progress is None


def test_each_failure_counts_the_exclusions_of_those_before_it():
    """Two bad nodes at once: the second is judged as one of a job without the first."""
    ruling = rule(end_of(("n1", failed(*STALE)), ("n2", failed(Kind.NODE_FAULT, "Xid 79"))))
    assert [then.exclude for _, then in ruling.consequences] == ["m1", "m2"]
