"""Faults at random times: `--chaos 7,15,5` -> when which node is killed and returns. Pure.

Kills come as a Poisson process: the gaps between them are exponential, whatever the job does
at that moment. The same seed gives the same times; which node it is depends on who is alive.
"""

from __future__ import annotations

import heapq
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import UserError

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_FORM = re.compile(
    rf"(?P<seed>[0-9]+),(?P<mean_s>{_NUMBER})(?:,(?P<return_s>{_NUMBER}))?",
)
VALID_FORM = "SEED,MEAN_S[,RETURN_S], as 7,15,5: kills every 15 s on average, back after 5 s"


@dataclass(frozen=True, slots=True)
class Chaos:
    """What `--chaos` asks for."""

    seed: int
    mean_s: float
    """Mean time between two kills, in seconds."""
    return_s: float | None = None
    """Seconds after which a killed node returns; None: never."""


def parse_chaos(text: str) -> Chaos:
    """Read `SEED,MEAN_S[,RETURN_S]`.

    Raises:
        UserError: HF604, it is of another form, or a time is 0.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise UserError("HF604", f"--chaos {text}: not of the form {VALID_FORM}")
    back = match["return_s"]
    chaos = Chaos(int(match["seed"]), float(match["mean_s"]), None if back is None else float(back))
    if not chaos.mean_s or chaos.return_s == 0.0:
        raise UserError("HF604", f"--chaos {text}: times must be more than 0 s; use {VALID_FORM}")
    return chaos


@dataclass(frozen=True, slots=True)
class Stroke:
    """One thing to be done now."""

    node: str
    kill: bool
    """Kill it; else it returns."""


class ChaosSchedule:
    """Says what to do when; the caller does it.

    Args:
        chaos: see there.
        now: when the first gap begins, in seconds of any clock.
    """

    def __init__(self, chaos: Chaos, now: float) -> None:
        self._chaos = chaos
        self._random = random.Random(chaos.seed)
        self._next_kill = now + self._gap()
        self._returns: list[tuple[float, str]] = []

    def due(self, now: float, alive: Sequence[str]) -> list[Stroke]:
        """Return what has become due by `now`; each is returned once.

        Args:
            now: by the clock of the beginning.
            alive: nodes that run; one of them is killed, but never the last.
        """
        strokes, up = [], sorted(alive)
        while self._returns and self._returns[0][0] <= now:
            _, node = heapq.heappop(self._returns)
            strokes.append(Stroke(node, kill=False))
        while self._next_kill <= now:
            choice = self._random.random()  # drawn in any case: the times stay those of the seed
            if len(up) > 1:
                node = up.pop(int(choice * len(up)))
                strokes.append(Stroke(node, kill=True))
                if self._chaos.return_s is not None:
                    heapq.heappush(self._returns, (now + self._chaos.return_s, node))
            self._next_kill += self._gap()
        return strokes

    def _gap(self) -> float:
        return self._random.expovariate(1.0 / self._chaos.mean_s)
