"""The launcher's only policies of retrying and polling.

    retried  after a temporary failure, with growing random waits, for a limited time
    insist   until it works, however long that takes
    polled   at a fixed rate until an answer is the wanted one, for a limited time

Waits within a process (signals, events, locks) do not belong here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from launcher.spec.errors import TemporaryError

_Result = TypeVar("_Result")


def retried(
    call: Callable[[], _Result],
    *,
    for_s: float,
    only: type[TemporaryError] = TemporaryError,
    but_not: tuple[type[TemporaryError], ...] = (),
    sleep: Callable[[float], None] = time.sleep,
) -> _Result:
    """Return what `call` returns, repeating it after a TemporaryError.

    No new try begins `for_s` seconds after the first began. Waits are random, so that many users of
    one busy controller do not come back together; the longest possible one grows from 0.5 s to
    10 s. An error with `retry_after_s` is waited for so long instead. Only errors of type `only`
    are repeated, and not those of `but_not`, such as after a call that may have taken effect.

    Raises:
        TemporaryError: the last one, when time was up.
    """
    end, longest_s = time.monotonic() + for_s, 0.5
    while True:
        try:
            return call()
        except only as error:
            if isinstance(error, but_not) or time.monotonic() >= end:
                raise
            asked_for: float | None = getattr(error, "retry_after_s", None)
        sleep(random.uniform(0.0, longest_s) if asked_for is None else asked_for)
        longest_s = min(2 * longest_s, 10.0)


def insist(
    call: Callable[[], _Result],
    *,
    first_wait_s: float,
    longest_wait_s: float,
    on_error: Callable[[TemporaryError], None],
    sleep: Callable[[float], None] = time.sleep,
) -> _Result:
    """Return what `call` returns, repeating it after each TemporaryError, for ever.

    `on_error` is called before each wait. Waits double up to `longest_wait_s`.
    """
    wait_s = first_wait_s
    while True:
        try:
            return call()
        except TemporaryError as error:
            on_error(error)
        sleep(wait_s)
        wait_s = min(2 * wait_s, longest_wait_s)


def polled(
    look: Callable[[], _Result],
    until: Callable[[_Result], bool],
    *,
    for_s: float,
    every_s: float,
    sleep: Callable[[float], None] = time.sleep,
    mono: Callable[[], float] = time.monotonic,
) -> _Result:
    """Look again and again until `until(seen)`; return what was seen last.

    No new look begins `for_s` seconds after the first one began; infinity: no limit. Errors of
    `look` end the polling.
    """
    end = mono() + for_s
    while not until(seen := look()) and mono() < end:
        sleep(every_s)
    return seen
