"""The launcher's only policies of retrying and polling.

    retried  after a temporary failure, with growing random waits, for a limited time
    insist   until it works, however long that takes
    polled   at a fixed rate until an answer is the wanted one, for a limited time

Waits within a process (signals, events, locks) do not belong here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from launcher.spec.errors import TemporaryError

if TYPE_CHECKING:
    import tenacity

_Result = TypeVar("_Result")

# tenacity takes 25 ms to import: those that need not ask again, as a node's start, do without.


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
    one busy controller do not come back together; their longest length doubles from 0.5 s to 10 s.
    An error with `retry_after_s` is waited for so long instead. Only errors of type `only` are
    repeated, and not those of `but_not`, such as after a call that may have taken effect.

    Raises:
        TemporaryError: the last one, when time was up.
    """
    import tenacity

    random = tenacity.wait_random_exponential(multiplier=0.5, max=10.0)

    def wait(state: tenacity.RetryCallState) -> float:
        asked_for: float | None = getattr(_error_of(state), "retry_after_s", None)
        return random(state) if asked_for is None else asked_for

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(
            lambda error: isinstance(error, only) and not isinstance(error, but_not)
        ),
        stop=tenacity.stop_after_delay(for_s),
        wait=wait,
        sleep=sleep,
        reraise=True,
    )
    return retrying(call)


def insist(
    call: Callable[[], _Result],
    *,
    first_wait_s: float,
    longest_wait_s: float,
    on_error: Callable[[BaseException], None],
    sleep: Callable[[float], None] = time.sleep,
) -> _Result:
    """Return what `call` returns, repeating it after each TemporaryError, for ever.

    The first wait doubles up to `longest_wait_s`. `on_error` is called before each.
    """
    import tenacity

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(TemporaryError),
        wait=tenacity.wait_exponential(multiplier=first_wait_s, max=longest_wait_s),
        before_sleep=lambda state: on_error(_error_of(state)),
        sleep=sleep,
        reraise=True,
    )
    return retrying(call)


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
    import tenacity

    deadline = mono() + for_s
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda seen: not until(seen)),
        stop=lambda _: mono() >= deadline,
        wait=tenacity.wait_fixed(every_s),
        sleep=sleep,
        retry_error_callback=_seen,
    )
    return retrying(look)


def _seen(state: tenacity.RetryCallState) -> object:
    assert state.outcome is not None, "a look has been taken"
    return state.outcome.result()


def _error_of(state: tenacity.RetryCallState) -> BaseException:
    assert state.outcome is not None, "a call has ended"
    error = state.outcome.exception()
    assert error is not None, "it has failed"
    return error
