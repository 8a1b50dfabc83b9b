from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.hang import HangWatch
from elastic_trainer.heartbeat import Beat, Section


def beat(step: int, section: Section = Section.STEP, counter: int = 0) -> Beat:
    return Beat(step, section, counter, 0)


def watch(**kwargs: bool) -> HangWatch:
    return HangWatch(hang_ceiling_s=10, start_ceiling_s=100, **kwargs)


def test_the_long_ceiling_holds_until_the_second_step_is_done() -> None:
    w = watch()
    assert w.observe(0, {0: beat(0, Section.STARTING)}) == []
    assert w.observe(99, {0: beat(40, Section.FIRST_STEP, 1)}) == []
    assert w.observe(198, {0: beat(41, Section.STEP, 2)}) == []
    assert w.observe(297, {0: beat(41, Section.STEP, 2)}) == []
    (hung,) = w.observe(299, {0: beat(41, Section.STEP, 2)})
    assert (hung.local_rank, hung.step, hung.idle_s, hung.ceiling_s) == (0, 41, 101, 100)


def test_the_steady_loop_has_the_short_one() -> None:
    w = watch()
    w.observe(0, {0: beat(1)})
    w.observe(1, {0: beat(2)})
    assert w.observe(11, {0: beat(2)}) == []
    (hung,) = w.observe(11.5, {0: beat(2)})
    assert (hung.section, hung.idle_s, hung.ceiling_s) == (Section.STEP, 10.5, 10)


def test_saving_and_evaluating_have_the_long_one() -> None:
    w = watch()
    w.observe(0, {0: beat(1)})
    w.observe(1, {0: beat(2)})
    for section in (Section.SAVING, Section.EVALUATING):
        w.observe(2, {0: beat(2, section)})
        assert w.observe(102, {0: beat(2, section)}) == []
        assert w.observe(103, {0: beat(2, section)})
        w.observe(104, {0: beat(2)})
    assert w.observe(115, {0: beat(2)})


def test_the_counter_is_progress_and_the_longest_idle_comes_first() -> None:
    w = watch()
    for now in (0, 1):
        w.observe(now, {0: beat(now), 1: beat(now), 2: beat(now)})
    w.observe(5, {0: beat(1), 1: beat(1, counter=1), 2: beat(1)})
    assert w.observe(11, {0: beat(1), 1: beat(1, counter=1), 2: beat(1, counter=1)}) == []
    beats = {0: beat(1), 1: beat(1, counter=1), 2: beat(1, counter=1)}
    assert [hung.local_rank for hung in w.observe(16, beats)] == [0, 1]


def test_scripts_without_heartbeats_are_not_watched() -> None:
    w = watch(only_beating=True)
    assert w.observe(0, {0: beat(0, Section.STARTING)}) == []
    assert w.observe(1e6, {0: beat(0, Section.STARTING)}) == []
    assert w.observe(1e6, {0: beat(0, Section.STARTING, 1)}) == []
    assert w.observe(1e6 + 101, {0: beat(0, Section.STARTING, 1)})


@given(st.lists(st.tuples(st.floats(0.01, 9.9), st.sampled_from(Section)), max_size=50))
def test_whoever_beats_in_time_never_hangs(beats: list[tuple[float, Section]]) -> None:
    w, now = watch(), 0.0
    for counter, (seconds, section) in enumerate(beats):
        now += seconds
        assert w.observe(now, {0: beat(counter // 3, section, counter)}) == []
