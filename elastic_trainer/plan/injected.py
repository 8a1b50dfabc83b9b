"""Faults inside a worker, injected on purpose: how a trainer comes to hang or to be slow.

A signal asks for one, and only workers whose environment names HOLDFAST_FAULTS listen: those of
the emulated cluster. Signals from outside strike a process whatever it is doing; here the
worker itself misbehaves, and to its heartbeat that looks like the real thing. Imports no torch:
the launcher takes the signals from here.
"""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn

VARIABLE = "HOLDFAST_FAULTS"
"""Any value: workers listen."""
FOR_EVER_S = 86_400.0
SLOW_S = 0.25
"""What a slow worker loses in its first block, each time."""


class Inside(enum.IntEnum):
    """A fault, by the signal that asks for it."""

    SPIN = signal.SIGRTMIN + 7
    """Computes for ever, in whatever it is doing; one processor is at 100 %."""
    WEDGE = signal.SIGRTMIN + 8
    """Never enters the next all-reduce that ends a step; the others wait in it."""
    STARVE = signal.SIGRTMIN + 9
    """Its data loader does not deliver any more."""
    SLOW = signal.SIGRTMIN + 10
    """Its forward takes `SLOW_S` longer, from now on."""


def listen(trainer: Any, environ: Mapping[str, str]) -> None:
    """Have `trainer` suffer what it is asked to, where the environment allows that.

    Call it in the main thread, before its loop begins.
    """
    if VARIABLE not in environ:
        return

    def strike(number: int, _frame: FrameType | None) -> None:
        _STRIKES[Inside(number)](trainer)

    for kind in Inside:
        signal.signal(kind, strike)


def _spin(_trainer: Any) -> None:
    while True:  # in Python: other threads of the worker continue, as beside a user's loop
        pass


def _wedge(trainer: Any) -> None:
    trainer.sum_over_ranks = _never


def _starve(trainer: Any) -> None:
    honest = trainer.feed.micro_batches

    def micro_batches(step: int) -> Iterator[Any]:
        time.sleep(FOR_EVER_S)
        yield from honest(step)

    trainer.feed.micro_batches = micro_batches


def _slow(trainer: Any) -> None:
    stage = next(iter(trainer.engine.stages), trainer.engine.model)
    first = next(iter(stage.blocks().values()))
    first.register_forward_pre_hook(lambda *_: time.sleep(SLOW_S))


def _never(*_: Any, **__: Any) -> NoReturn:
    while True:
        time.sleep(FOR_EVER_S)


_STRIKES = {Inside.SPIN: _spin, Inside.WEDGE: _wedge, Inside.STARVE: _starve, Inside.SLOW: _slow}
