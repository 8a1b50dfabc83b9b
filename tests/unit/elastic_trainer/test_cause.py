"""What ended an epoch: one node, the program, or what all nodes share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.membership.cause import causes, gather, settle_s
from elastic_trainer.agent.membership.notices import WorkersFailed
from elastic_trainer.failures import Action, Failure, Kind

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
    (found,) = causes(list(lost), list(reports), num_members)
    return found


# --- one node --------------------------------------------------------------------------


def test_the_first_failure_that_is_no_consequence_is_the_cause():
    reports = [("b", failed(*COLLATERAL)), ("a", failed(Kind.KILLED)), ("c", failed(Kind.HANG))]
    assert one_cause(4, *reports).node == "a"


def test_consequences_alone_are_nobodys_fault():
    found = one_cause(4, ("b", failed(*COLLATERAL)), ("a", failed(*COLLATERAL)))
    assert (found.node, found.kind) == (None, Kind.COLLATERAL)


def test_echoes_of_a_lost_node_are_no_failures():
    found = causes(["a", "a"], [("b", failed(*COLLATERAL))], 4)
    assert [str(c) for c in found] == ["lost a"]
    found = causes(["a"], [("b", failed(*CRASH))], 4)
    assert [str(c) for c in found] == ["lost a", f"worker failed on b: {CRASH[1]}"]
    assert causes([], [], 4) == []


def test_a_node_that_computes_wrong_leaves_and_two_that_differ_do_not():
    odd = Failure(kind=Kind.CORRUPTION, action=Action.EVICT, detail="differs")
    named = replace(failed(Kind.CORRUPTION), failure=odd)
    found = one_cause(4, ("b", failed(*CRASH)), ("c", named))
    assert (found.node, found.kind, found.action) == ("c", Kind.CORRUPTION, Action.EVICT)
    both = one_cause(4, ("b", failed(Kind.CORRUPTION, "x")), ("c", failed(Kind.CORRUPTION, "x")))
    assert (both.node, both.action) == (None, Action.RESTART)


def test_every_bad_node_leaves_and_is_believed_first():
    reports = [("b", failed(*CRASH)), ("a", failed(*STALE)), ("c", failed(Kind.NODE_FAULT, "Xid"))]
    found = causes([], reports, 9)
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
    assert "3 of 4 nodes at step 7" in found.detail


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
    found = causes(["e"], [(n, failed(*CRASH)) for n in "abcd"], 5)
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
    found = causes(sorted(lost), reports, 8)
    assert found
    assert {c.node for c in found if c.kind is Kind.NODE_LOST} == lost
    for item in found:
        assert item.node in {None, *lost, *(node for node, _, _ in said)}
        if item.action is Action.EVICT:
            assert item.node is not None
        if item.action is Action.STOP:
            assert item.kind in (Kind.CRASH, Kind.USER_ERROR, Kind.OUT_OF_MEMORY)
