"""What the batch script and its stand-ins decide."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.board.state import BoardState, Ended, Lease
from elastic_trainer.plan.config import ElasticSection
from launcher.node.attempt import Past
from launcher.node.decide import (
    STILL_READS,
    AttemptOutcome,
    BeatWatch,
    attempt_result,
    is_over,
    may_begin,
    near_limit,
    pause_s,
    what_now,
    within_restarts,
)

CODES = st.sampled_from([0, 91, 92, 93, 94])
BUDGET = ElasticSection(max_restarts=3, window_s=1000.0, no_progress=2)
NODES = st.dictionaries(
    st.sampled_from(["n1", "n2", "n3", "n4"]), st.sampled_from([0, 1, 91, 92, 93, 94])
)


def board(
    code: int | None = None, reason: str = "", *, ended: str | None = "7.0", **more
) -> BoardState:
    """A board on which attempt `ended` has ended, with `code`."""
    end = None if code is None or ended is None else Ended(job=ended, code=code, reason=reason)
    return BoardState(ended=end, **more)


def past(i: int, code: int | None = None, *, step: int = 0, failed: bool = False) -> Past:
    return Past(name=f"7.{i}", begun_unix=10.0 * i, step=step, code=code, failed=failed, reason="r")


def begin(**changes):
    facts = {
        "finished": False,
        "stop_asked": False,
        "live_job": None,
        "past": [],
        "step": 5,
        "now_unix": 100.0,
        "budget": BUDGET,
    }
    return may_begin(**{**facts, **changes})


@given(st.integers(0, 5), st.integers(0, 5), st.none() | st.just(5))
def test_attempts_that_start_no_agent_are_not_repeated_for_ever(trained, silent, step):
    pasts = [replace(past(i, 92, step=i), began=i < trained) for i in range(trained + silent)]
    budget = ElasticSection(max_restarts=100, window_s=1000.0, no_progress=2)
    found = begin(past=pasts, step=step, budget=budget)
    assert ("HF677" in found.reason) == (found.code == 93) == (silent >= 2)


def test_a_new_run_begins():
    assert begin(step=-1).code == 0


@given(st.booleans(), st.booleans(), st.sampled_from([None, "8.0"]))
def test_a_run_that_is_done_is_done_whatever_else_there_is(stop, failed, live):
    worn = [past(i, 92, failed=failed) for i in range(9)]
    assert begin(finished=True, stop_asked=stop, live_job=live, past=worn).code == 90


def test_a_cancelled_run_stays_saved_and_a_live_one_is_named():
    assert begin(stop_asked=True, live_job="8.0").code == 91
    found = begin(live_job="8.0")
    assert (found.code, "8.0" in found.reason) == (93, True)


def test_what_a_watchdog_wrote_down_ends_the_job_that_it_had_started_again():
    for code in (93, 94):
        assert begin(past=[past(0, code)], before="7.0").code == code
        assert begin(past=[past(0, code)], before="9.0").code == 0
    assert begin(past=[past(0, 92)], before="7.0").code == 0


@given(st.integers(0, 8), st.integers(0, 8))
def test_failed_attempts_use_the_budget_up_and_saved_ones_do_not(num_bad, num_saved):
    tries = [past(i, 92, step=i) for i in range(num_bad)]
    tries += [past(num_bad + i, 91, step=num_bad + i) for i in range(num_saved)]
    assert (begin(past=tries, step=99).code == 94) == (num_bad > BUDGET.max_restarts)


def test_attempts_from_before_the_window_are_forgotten():
    tries = [past(i, None, step=i) for i in range(9)]
    assert begin(past=tries, step=99).code == 94
    assert begin(past=tries, step=99, now_unix=2000.0).code == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=6), st.integers(0, 3))
def test_no_progress_stops_a_job_and_only_that(tries, last):
    steps, step = [], 0
    for _, gain in tries:
        steps.append(step)
        step += gain
    pasts = [
        past(i, 92, step=s, failed=f)
        for i, (s, (f, _)) in enumerate(zip(steps, tries, strict=True))
    ]
    budget = ElasticSection(max_restarts=100, window_s=1000.0, no_progress=2)
    trailing = 0
    for failed, gain in reversed(tries):
        if not failed or gain:
            break
        trailing += 1
    assert (begin(past=pasts, step=step, budget=budget).code == 93) == (trailing >= 2)


def test_of_a_script_that_shows_no_steps_only_the_budget_decides():
    stopped = [past(i, 91, step=-1, failed=True) for i in range(9)]
    assert begin(past=stopped, step=-1).code == 93
    assert begin(past=stopped, step=None).code == 0
    assert begin(past=[past(i, 92, step=-1, failed=True) for i in range(9)], step=None).code == 94


@given(NODES, st.booleans(), st.one_of(st.none(), st.integers(0, 143)))
def test_the_board_decides_over_all_exit_codes(exits, at_limit, step_code):
    facts = {"exits": exits, "at_limit": at_limit, "step_code": step_code}
    assert attempt_result(board(92, "x", finished=True), "7.0", **facts).code == 0
    assert attempt_result(board(92, ended="7.1"), "7.0", **facts) == attempt_result(
        board(), "7.0", **facts
    ), "another attempt's end is not this one's"
    for code in (0, 91, 92, 93, 94):
        found = attempt_result(board(code, "so it was"), "7.0", **facts)
        assert (found.code, found.reason) == (code, "so it was")
    failed = attempt_result(board(1, "not saved"), "7.0", **facts)
    assert (failed.code, failed.failed) == (92, True)


@given(NODES, st.one_of(st.none(), st.integers(0, 143)))
def test_without_the_board_the_exit_codes_give_a_code_of_the_contract(exits, step_code):
    found = attempt_result(board(), "7.0", exits=exits, step_code=step_code)
    assert found.code in {0, 91, 92, 93, 94}
    assert found.code in {*exits.values(), 92, *([] if exits else [91])}
    if found.code == 93:
        assert set(exits.values()) == {93}, "one node's bad set-up does not stop the others"
    if not exits:  # lost nodes are no failure of the program
        assert (found.code, found.failed) == (91 if step_code == 91 else 92, False)


def test_a_save_counts_as_a_failure_only_at_the_time_limit():
    for at_limit in (False, True):
        found = attempt_result(board(91, "saved"), "7.0", exits={}, at_limit=at_limit)
        assert found.failed == at_limit


@given(CODES, st.sampled_from(["requeue", "chain", "none"]), st.integers(0, 5), st.booleans())
def test_restarts_are_counted_only_where_there_would_be_one_more(code, restart, done, stop):
    found = AttemptOutcome(code=code, failed=False, reason="so it was")
    given = {"restart": restart, "done": done, "stop_asked": stop}
    assert within_restarts(found, most=None, **given) == found
    now = within_restarts(found, most=3, **given)
    over = code in {91, 92} and restart != "none" and not stop and done >= 3
    assert now.code == (94 if over else code)
    assert "so it was" in now.reason
    assert ("slurm.max_requeues" in now.reason) == over


def test_near_the_limit():
    assert not near_limit(None, 1e12)
    assert not near_limit(1000.0, 800.0)
    assert near_limit(1000.0, 940.0)


@given(st.lists(st.one_of(st.none(), st.integers(0, 2).map(str)), max_size=30))
def test_a_beat_is_lost_after_readings_of_the_same_value_and_never_by_failed_readings(values):
    watch = BeatWatch()
    for value in values:
        watch = watch.read(value)
    read = [value for value in values if value is not None]
    same = 0
    for before, value in zip(read[-2::-1], read[:0:-1], strict=True):
        if before != value:
            break
        same += 1
    assert watch.lost == (same >= STILL_READS)


@given(
    st.booleans(),
    st.sampled_from([None, "7.0", "7.1"]),
    st.sampled_from([None, "7.0", "7.1"]),
    st.booleans(),
)
def test_a_watchdog_acts_only_for_a_job_that_has_ended(finished, ended_job, lease_job, still):
    lease = lease_job and Lease(holder="a", node="n", job=lease_job, address="", port=1, term=1)
    seen = board(91, ended=ended_job, finished=finished, lease=lease)
    found = is_over(seen, "7.0", lease_still=still)
    if finished or ended_job == "7.0" or lease_job is None:
        assert found is True
    elif lease_job == "7.1":
        assert found is False
    else:
        assert found is (True if still else None)


@given(CODES, st.sampled_from(["requeue", "chain", "none"]), st.booleans(), st.booleans())
def test_a_job_without_its_batch_host_never_stays_running(code, restart, stop, has_next):
    acts = what_now(code, restart=restart, stop_asked=stop, has_next=has_next)
    assert acts[-1] in {"requeue", "cancel"}
    assert (acts == ("requeue",)) == (restart == "requeue" and not stop)
    if "cancel-next" in acts:
        assert has_next
        assert stop or code in {0, 93, 94}
    elif restart == "chain" and has_next:
        assert acts == ("keep-off", "cancel")
        assert code in {91, 92}
        assert not stop


@given(st.integers(-3, 10_000))
def test_pauses_grow_and_are_bounded(count):
    bounds = {"first_s": 10.0, "longest_s": 300.0}
    assert 0 <= pause_s(count, **bounds) <= pause_s(count + 1, **bounds) <= 300
    assert (pause_s(count, **bounds) == 0) == (count <= 0)
    assert [pause_s(n, **bounds) for n in (1, 2, 3)] == [10, 20, 40]
