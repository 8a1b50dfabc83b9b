from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.agent.hangs.hang import (
    CPU,
    CUDA,
    WINDOW_S,
    DeviceLimits,
    HangWatch,
    WorkerProgress,
    gap_limit_s,
)
from elastic_trainer.worker.heartbeat import (
    BUCKETS,
    Beat,
    Pace,
    Section,
    StepPart,
    bucket_of,
    edge_s,
)

FLOOR_S, CEILING_S, START_S = 2.0, 10.0, 100.0


def beat(
    step: int, section: Section = Section.STEP, counter: int = 0, part: StepPart = StepPart.OTHER
) -> Beat:
    return Beat(step, section, counter, 0, part)


def watch(device: DeviceLimits = CPU, **kwargs: bool) -> HangWatch:
    return HangWatch(hang_ceiling_s=CEILING_S, start_ceiling_s=START_S, device=device, **kwargs)


def hung(standing: list[WorkerProgress]) -> list[WorkerProgress]:
    return [one for one in standing if one.hangs]


def pace(gaps: dict[StepPart, list[float]]) -> Pace:
    counts = [[0] * BUCKETS for _ in StepPart]
    for part, seconds in gaps.items():
        for gap in seconds:
            counts[part][bucket_of(int(gap * 1e9))] += 1
    totals = tuple(sum(gaps.get(part, [])) for part in StepPart)
    return Pace(totals, tuple(map(tuple, counts)))


def steady(
    gaps: dict[StepPart, list[float]],
    *,
    steps: int = 100,
    seconds: float = 10.0,
    device: DeviceLimits = CPU,
) -> HangWatch:
    """Return a watch of one worker that has learned `gaps`; its last beat was at 20."""
    w = watch(device)
    w.observe(0, {0: beat(1)})
    w.observe(1, {0: beat(2)})
    w.learn(1, {0: pace({})})
    w.observe(20, {0: beat(2 + steps)})
    w.learn(1 + seconds, {0: pace(gaps)})
    return w


def test_the_long_ceiling_holds_until_the_second_step_is_done() -> None:
    w = watch()
    assert not hung(w.observe(0, {0: beat(0, Section.STARTING)}))
    assert not hung(w.observe(99, {0: beat(40, Section.FIRST_STEP, 1)}))
    assert not hung(w.observe(198, {0: beat(41, Section.STEP, 2)}))
    assert not hung(w.observe(297, {0: beat(41, Section.STEP, 2)}))
    (one,) = hung(w.observe(299, {0: beat(41, Section.STEP, 2)}))
    assert (one.local_rank, one.beat.step, one.idle_s, one.limit_s) == (0, 41, 101, 100)


def test_the_steady_loop_has_the_short_one_until_something_is_learned() -> None:
    w = watch()
    w.observe(0, {0: beat(1)})
    w.observe(1, {0: beat(2)})
    assert not hung(w.observe(11, {0: beat(2)}))
    (one,) = hung(w.observe(11.5, {0: beat(2)}))
    assert (one.beat.section, one.idle_s, one.limit_s) == (Section.STEP, 10.5, 10)


def test_tiny_steps_come_down_to_the_floor() -> None:
    w = steady({StepPart.FORWARD: [0.05] * 100})
    assert not hung(w.observe(22.0, {0: beat(102)}))
    (one,) = hung(w.observe(22.1, {0: beat(102)}))
    assert one.limit_s == FLOOR_S


def test_limits_are_learned_for_each_part_and_for_unknown_ones_from_the_others() -> None:
    w = steady({StepPart.FORWARD: [0.05] * 100, StepPart.DATA: [1.1] * 100})
    limits = {}
    for part in (StepPart.FORWARD, StepPart.DATA, StepPart.OPTIMIZER):
        (one,) = w.observe(20.5, {0: beat(102, part=part)})
        limits[part] = one.limit_s
    assert limits[StepPart.FORWARD] == FLOOR_S
    assert 4.4 <= limits[StepPart.DATA] <= 8.8
    assert limits[StepPart.OPTIMIZER] == limits[StepPart.DATA]


def test_the_ceiling_bounds_what_is_learned() -> None:
    w = steady({StepPart.DATA: [60.0] * 100})
    (one,) = w.observe(20.5, {0: beat(102, part=StepPart.DATA)})
    assert one.limit_s == one.ceiling_s == CEILING_S


def test_a_long_step_may_stand_for_two() -> None:
    w = steady({StepPart.FORWARD: [0.01] * 100}, steps=5, seconds=10.0)
    (one,) = w.observe(20.5, {0: beat(7, part=StepPart.FORWARD)})
    assert one.limit_s == pytest.approx(4.0)


def test_what_happened_before_the_second_step_teaches_nothing() -> None:
    w = watch()
    w.observe(0, {0: beat(1)})
    w.observe(1, {0: beat(2)})
    compiled = {StepPart.FORWARD: [60.0]}
    w.learn(1, {0: pace(compiled)})
    w.observe(20, {0: beat(102)})
    w.learn(11, {0: pace({StepPart.FORWARD: [60.0] + [0.05] * 100})})
    (one,) = w.observe(21, {0: beat(102, part=StepPart.FORWARD)})
    assert one.limit_s == FLOOR_S


def test_a_pause_is_forgotten_in_the_end() -> None:
    w = steady({StepPart.FORWARD: [0.05] * 100 + [4.0]})
    (one,) = w.observe(21, {0: beat(102, part=StepPart.FORWARD)})
    assert one.limit_s > 8
    for minute in range(1, 2 * int(WINDOW_S) // 60 + 2):
        w.observe(11 + 60 * minute, {0: beat(102 + 100 * minute, part=StepPart.FORWARD)})
        w.learn(
            11 + 60 * minute, {0: pace({StepPart.FORWARD: [0.05] * 100 * (minute + 1) + [4.0]})}
        )
    (one,) = w.observe(12 + 60 * minute, {0: beat(102 + 100 * minute, part=StepPart.FORWARD)})
    assert one.limit_s == FLOOR_S


def test_on_gpus_an_adapter_may_try_again_before_a_worker_counts_as_hung() -> None:
    """NCCL_IB_TIMEOUT=22: 4.096 us x 2^22."""
    w = HangWatch(hang_ceiling_s=300.0, start_ceiling_s=1800.0, device=CUDA)
    assert CUDA.hang_floor_s >= 30 > 1.5 * 4.096e-6 * 2**22
    w.observe(0, {0: beat(1)})
    w.observe(1, {0: beat(2)})
    w.learn(1, {0: pace({})})
    w.observe(20, {0: beat(102)})
    w.learn(11, {0: pace({StepPart.GATHER: [0.05] * 100})})
    assert not hung(w.observe(20 + 30, {0: beat(102, part=StepPart.GATHER)}))
    assert hung(w.observe(50 + 30.1, {0: beat(102, part=StepPart.GATHER)}))


def test_compiling_again_has_the_long_one() -> None:
    w = steady({StepPart.FORWARD: [0.05] * 100})
    (one,) = w.observe(21, {0: beat(102, part=StepPart.COMPILE)})
    assert one.limit_s == one.ceiling_s == START_S
    (one,) = w.observe(22, {0: beat(102, part=StepPart.FORWARD)})
    assert (one.limit_s, one.ceiling_s) == (FLOOR_S, CEILING_S)


@pytest.mark.parametrize(("device", "limit_s"), [(CPU, FLOOR_S), (CUDA, CEILING_S)])
def test_the_first_snapshot_may_pin_memory(device: DeviceLimits, limit_s: float) -> None:
    device = replace(device, hang_floor_s=FLOOR_S)
    w = steady({StepPart.FORWARD: [0.05] * 100, StepPart.SNAPSHOT: [0.01] * 100}, device=device)
    (one,) = w.observe(21, {0: beat(102, part=StepPart.SNAPSHOT)})
    assert one.limit_s == limit_s
    committed = replace(beat(103, part=StepPart.SNAPSHOT), committed_step=102)
    (one,) = w.observe(22, {0: committed})
    assert one.limit_s == FLOOR_S


def test_who_waits_for_the_first_connection_is_asked_about_but_not_failed_before_its_ceiling() -> (
    None
):
    """Others may compile as long."""
    w = watch(replace(CUDA, connect_s=20.0))
    w.observe(0, {0: beat(40, Section.FIRST_STEP, part=StepPart.GATHER)})
    (one,) = hung(w.observe(20.1, {0: beat(40, Section.FIRST_STEP, part=StepPart.GATHER)}))
    assert (one.limit_s, one.ceiling_s) == (20.0, START_S)
    w.observe(21, {0: beat(40, Section.FIRST_STEP, part=StepPart.COMPILE)})
    assert not hung(w.observe(120, {0: beat(40, Section.FIRST_STEP, part=StepPart.COMPILE)}))


def test_making_groups_has_the_limit_of_connecting() -> None:
    w = watch(replace(CUDA, connect_s=20.0))
    w.observe(0, {0: beat(0, Section.CONNECTING)})
    (one,) = hung(w.observe(20.1, {0: beat(0, Section.CONNECTING)}))
    assert (one.limit_s, one.ceiling_s) == (20.0, START_S)
    w.observe(21, {0: beat(0, Section.STARTING)})
    assert not hung(w.observe(120, {0: beat(0, Section.STARTING)}))
    w = watch()  # on a CPU
    w.observe(0, {0: beat(0, Section.CONNECTING)})
    assert not hung(w.observe(START_S - 1, {0: beat(0, Section.CONNECTING)}))


def test_saving_and_evaluating_have_the_long_one() -> None:
    w = steady({StepPart.FORWARD: [0.05] * 100})
    for section in (Section.SAVING, Section.EVALUATING):
        w.observe(22, {0: beat(102, section)})
        assert not hung(w.observe(122, {0: beat(102, section)}))
        assert hung(w.observe(123, {0: beat(102, section)}))
        w.observe(124, {0: beat(102)})
    assert hung(w.observe(126.5, {0: beat(102)}))


def test_the_counter_is_progress() -> None:
    w = watch()
    for now in (0, 1):
        w.observe(now, {0: beat(now), 1: beat(now), 2: beat(now)})
    w.observe(5, {0: beat(1), 1: beat(1, counter=1), 2: beat(1)})
    assert not hung(w.observe(11, {0: beat(1), 1: beat(1, counter=1), 2: beat(1, counter=1)}))
    beats = {0: beat(1), 1: beat(1, counter=1), 2: beat(1, counter=1)}
    assert [one.local_rank for one in hung(w.observe(16, beats))] == [0, 1]


def test_scripts_without_heartbeats_are_not_watched() -> None:
    w = watch(only_beating=True)
    assert w.observe(0, {0: beat(0, Section.STARTING)}) == []
    assert w.observe(1e6, {0: beat(0, Section.STARTING)}) == []
    assert not hung(w.observe(1e6, {0: beat(0, Section.STARTING, 1)}))
    assert hung(w.observe(1e6 + 101, {0: beat(0, Section.STARTING, 1)}))


def test_a_stopped_process_has_no_excuse() -> None:
    w = watch()
    w.observe(0, {0: beat(5, Section.SAVING)}, states={0: "S"})
    assert not hung(w.observe(0.9, {0: beat(5, Section.SAVING)}, states={0: "T"}))
    assert hung(w.observe(1.1, {0: beat(5, Section.SAVING)}, states={0: "T"}))


def test_time_without_a_processor_extends_the_limit_up_to_the_ceiling() -> None:
    w = steady({StepPart.FORWARD: [0.05] * 100})
    now, held = 20.0, 0.0
    w.observe(now, {0: beat(102, counter=1)}, held={0: held})
    while now < 29.8:  # a spinning process among three on one processor: it runs a third of it
        now, held = now + 0.1, held + 0.1 * 2 / 3
        found = hung(w.observe(now, {0: beat(102, counter=1)}, held={0: held}))
        if abs(now - 20 - 3 * FLOOR_S) > 0.05:
            assert bool(found) == (now - 20 > 3 * FLOOR_S)
    w = steady({StepPart.FORWARD: [0.05] * 100})
    assert not hung(w.observe(29.9, {0: beat(102)}, held={0: 9.9}))
    assert hung(w.observe(30.1, {0: beat(102)}, held={0: 10.1}))  # starved for ever is no excuse


@given(st.lists(st.tuples(st.floats(0.01, 9.9), st.sampled_from(Section)), max_size=50))
def test_whoever_beats_within_the_ceilings_never_hangs_before_limits_are_learned(
    beats: list[tuple[float, Section]],
) -> None:
    w, now = watch(), 0.0
    for counter, (seconds, section) in enumerate(beats):
        now += seconds
        assert not hung(w.observe(now, {0: beat(counter // 3, section, counter)}))


@given(st.lists(st.integers(0, 2**42), min_size=1, max_size=300))
def test_a_learned_limit_lets_everything_seen_pass_twice_over(gaps_ns: list[int]) -> None:
    buckets = [0] * BUCKETS
    for gap in gaps_ns:
        buckets[bucket_of(gap)] += 1
    limit, longest = gap_limit_s(buckets), max(gaps_ns) / 1e9
    p99 = sorted(gaps_ns)[math.ceil(0.99 * len(gaps_ns)) - 1] / 1e9
    assert limit > 2 * longest or bucket_of(max(gaps_ns)) == BUCKETS - 1
    assert limit > 4 * p99 or bucket_of(max(gaps_ns)) == BUCKETS - 1
    assert limit <= max(8.1 * p99, 4.1 * longest, 0.01)


@given(st.integers(0, 2**60))
def test_buckets_hold_what_they_say(gap_ns: int) -> None:
    bucket = bucket_of(gap_ns)
    assert 0 <= bucket < BUCKETS
    if bucket < BUCKETS - 1:
        assert gap_ns / 1e9 < edge_s(bucket) <= max(2.0 * gap_ns / 1e9, 1.1e-3 * 2)


PARTS = (
    StepPart.DATA,
    StepPart.GATHER,
    StepPart.FORWARD,
    StepPart.GATHER,
    StepPart.BACKWARD,
    StepPart.REDUCE,
)


def _simulate(seed: int, steps: int, *, load: float, wedge_after: int | None) -> float | None:
    """Run one worker on an oversubscribed machine; return seconds to the alarm after a wedge.

    Parts of a step take 5 to 60 ms of processor time. Other processes, `load` for each
    processor, keep it waiting: mostly a little, at times for seconds, when the agent is
    late too. Without a wedge any alarm fails.
    """
    chance, w = random.Random(seed), watch()
    now = looked = held = paused = next_learn = 0.0
    counts, counter = [[0] * BUCKETS for _ in StepPart], 0
    state = beat(0, Section.FIRST_STEP)

    def until(end: float, starved_s: float, late: bool) -> bool:
        """Let the agent tick up to `end`."""
        nonlocal looked, held, paused, next_learn
        begin, span = now, max(end - now, 1e-9)
        while looked + 0.1 <= end:
            tick = looked + 0.1
            if late:  # everything stands, the agent too
                tick = end
                paused += max(0.0, tick - looked - 0.1)
            seen = held + starved_s * max(0.0, min(1.0, (tick - begin) / span))
            looked = tick
            if hung(w.observe(tick - paused, {0: state}, held={0: seen})):
                return True
            if tick >= next_learn:
                next_learn = tick + 1.0
                w.learn(tick - paused, {0: Pace((), tuple(map(tuple, counts)))})
        held += starved_s
        return False

    for step in range(1, steps + 1):
        for part in PARTS:
            counter += 1
            state = Beat(step - 1, state.section, counter, 0, part)
            cpu_s = chance.uniform(0.005, 0.06)
            starved_s = cpu_s * chance.expovariate(1 / load)
            late = chance.random() < 1e-4 * (load > 1)
            if late or chance.random() < 2e-4 * (load > 1):
                starved_s += chance.uniform(1.0, 8.0)
            end = now + cpu_s + starved_s
            assert not until(end, starved_s, late), (step, part, cpu_s, starved_s)
            counts[part][bucket_of(int((end - now) * 1e9))] += 1
            now = end
        state = Beat(step, Section.STEP, counter, 0, StepPart.OTHER)
        if wedge_after == step:
            begin = now
            while not until(now + 0.1, 0.0, False):
                now += 0.1
                assert now < begin + CEILING_S
            return now + 0.1 - begin
    return None


@pytest.mark.slow
@settings(max_examples=2)
@given(st.integers(0, 2**32))
def test_no_false_alarm_in_10_000_steps_with_both_cores_oversubscribed(seed: int) -> None:
    assert _simulate(seed, 10_000, load=3.0, wedge_after=None) is None


@given(st.integers(0, 2**32))
def test_a_wedge_is_seen_within_three_seconds_on_a_quiet_machine(seed: int) -> None:
    seconds = _simulate(seed, 60, load=0.2, wedge_after=50)
    assert seconds is not None
    assert seconds < 3.0


def test_a_script_that_is_faster_than_the_agent_looks_is_in_its_steady_loop_at_once() -> None:
    """It makes all of its steps between two looks and hangs: the counter has shown them."""
    for steps, limit_s in ((2, START_S), (50, CEILING_S)):
        w = watch(only_beating=True)
        assert w.observe(0, {0: beat(0, Section.STARTING)}) == []
        w.observe(0.1, {0: beat(steps, counter=steps)})
        (one,) = w.observe(5, {0: beat(steps, counter=steps)})
        assert (one.limit_s, one.ceiling_s) == (limit_s, limit_s)
        assert not hung(w.observe(limit_s, {0: beat(steps, counter=steps)}))
        assert hung(w.observe(limit_s + 0.2, {0: beat(steps, counter=steps)}))


def test_beats_before_the_first_step_are_no_steps() -> None:
    w = watch(only_beating=True)
    w.observe(0, {0: beat(1000, Section.RESTORING, counter=30)})
    (one,) = w.observe(1, {0: beat(1000, Section.RESTORING, counter=30)})
    assert one.limit_s == START_S
