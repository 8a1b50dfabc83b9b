"""The policies by which the outside world is asked again."""

from __future__ import annotations

import math

import pytest

from launcher.platforms.retries import insist, polled, retried
from launcher.spec.errors import PermanentError, TemporaryError


class AskedForError(TemporaryError):
    retry_after_s = 7.0


class Clock:
    """Sleeps without waiting."""

    def __init__(self):
        self.now, self.waits = 100.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.now += seconds


def failing(*errors):
    """Return a function that raises these, one a call, and then returns "done"."""
    left = list(errors)

    def call():
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_only_temporary_failures_are_tried_again():
    clock = Clock()
    call = failing(TemporaryError("busy"), TemporaryError("busy"))
    assert retried(call, for_s=60.0, sleep=clock.sleep) == "done"
    assert len(clock.waits) == 2
    assert all(0.0 <= wait <= 10.0 for wait in clock.waits)
    with pytest.raises(PermanentError):
        retried(failing(PermanentError("no")), for_s=60.0, sleep=clock.sleep)
    call = failing(AskedForError("unsure"))
    with pytest.raises(AskedForError):
        retried(call, for_s=60.0, but_not=(AskedForError,), sleep=clock.sleep)
    assert len(clock.waits) == 2


def test_an_error_may_say_how_long_to_wait():
    clock = Clock()
    assert retried(failing(AskedForError("later")), for_s=60.0, sleep=clock.sleep) == "done"
    assert clock.waits == [7.0]


def test_after_its_time_the_last_failure_is_told():
    clock = Clock()
    with pytest.raises(TemporaryError, match="busy"):
        retried(failing(TemporaryError("busy")), for_s=0.0, sleep=clock.sleep)
    assert clock.waits == []


def test_insisting_has_no_end_but_growing_waits():
    clock, told = Clock(), []
    errors = [TemporaryError(str(count)) for count in range(8)]
    done = insist(
        failing(*errors),
        first_wait_s=2.0,
        longest_wait_s=60.0,
        on_error=told.append,
        sleep=clock.sleep,
    )
    assert done == "done"
    assert clock.waits == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert told == errors


@pytest.mark.parametrize(("for_s", "seen"), [(10.0, 11), (math.inf, 42), (0.0, 1)])
def test_polling_ends_with_the_answer_or_the_time(for_s, seen):
    clock, looks = Clock(), []

    def look():
        looks.append(clock.now)
        return len(looks)

    found = polled(
        look,
        lambda count: count == 42,
        for_s=for_s,
        every_s=1.0,
        sleep=clock.sleep,
        mono=clock,
    )
    assert found == seen == len(looks)


def test_what_a_look_raises_ends_the_polling():
    with pytest.raises(PermanentError):
        polled(failing(PermanentError("no")), bool, for_s=9.0, every_s=1.0, sleep=Clock().sleep)
