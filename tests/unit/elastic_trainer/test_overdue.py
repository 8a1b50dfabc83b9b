from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.state.manager import unsaved_s


@pytest.mark.parametrize(
    ("committed", "since", "unsaved"),
    [
        (None, None, 0.0),
        (940.0, None, 60.0),
        (None, 480.0, 20.0),
        (940.0, 480.0, 20.0),  # the job did not run for the rest of the time
        (995.0, 100.0, 5.0),
        (1300.0, 100.0, 0.0),  # written by a clock that is ahead
        (1300.0, None, 0.0),
    ],
)
def test_the_shorter_time_holds(committed, since, unsaved):
    assert unsaved_s(1000.0, 500.0, committed_unix=committed, since_mono=since) == unsaved


@given(
    every_s=st.floats(1.0, 1000.0),
    lives=st.lists(st.floats(0.1, 500.0), min_size=1, max_size=60),
    skew_s=st.floats(-3600.0, 3600.0),
)
def test_a_job_that_fails_all_the_time_still_saves(every_s, lives, skew_s):
    """Epochs of `lives` seconds on one node: never is more than `every_s` and a step lost."""
    now, committed, worst = 0.0, None, 0.0
    for life in lives:
        saved_at = now - unsaved_s(
            now + skew_s, now, committed_unix=committed and committed + skew_s, since_mono=0.0
        )
        end = now + life
        while saved_at + every_s <= end:
            now = max(now, saved_at + every_s)
            saved_at = committed = now
        now = end
        worst = max(worst, now - (committed or 0.0))
    assert worst <= every_s + 1e-6
