"""How a wrapped batch script ends: what it asks sbatch for, and what that leaves for a save. Pure.

Slurm signals the processes of the steps, as with `--signal=USR1@600`, or with B: the batch script
alone. We have it signal the batch script, which hands the signal on: the user's signal goes to the
workers where it had no B:, and stays the batch script's where it had one.
"""

from __future__ import annotations

import math
import re
import shlex
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from launcher.plan.clock import LATE_SIGNAL_S, MAX_LEAD_S, REQUEUE_S, limit_seconds
from launcher.spec.errors import UserError
from launcher.spec.sections import STOP_SIGNALS

LEAD_S: Final = 180
"""Least time from the signal to the time limit."""
AROUND_SHUTDOWN_S: Final = int(LATE_SIGNAL_S + REQUEUE_S)
"""Part of the lead for a signal that comes late, and for the requeue."""
KILL_S: Final = 10
"""Time for an agent to end once it has killed its workers."""
OURS: Final = "USR2"
"""The batch script's signal; `holdfast cancel --save` sends it too."""
_SIGNAL: Final = re.compile(r"(?:(?P<flags>[RB]{1,2}):)?(?P<name>\w+)(?:@(?P<lead>\d{1,5}))?")
_SBATCH_LEAD_S: Final = 60
"""Lead of a --signal without a time (man sbatch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a wrapped job ends at its time limit, and how long that takes."""

    lead_s: int = LEAD_S
    """Time from the signal to the limit."""
    workers: str = "TERM"
    """Signal that workers get, without SIG."""
    batch: str = OURS
    """Signal that Slurm sends the batch script."""
    requeue: bool = True
    """Whether the job is put back into the queue to continue."""
    open_mode: str = ""
    """The user's own --open-mode, which sruns of the script have too."""
    notes: tuple[str, ...] = ()
    """What of the user's is not kept, a line each."""

    def grace_s(self, wish_s: float | None) -> float:
        """Return the seconds from the workers' signal to SIGKILL; see `grace_within`."""
        return grace_within(float(self.lead_s - AROUND_SHUTDOWN_S - KILL_S), wish_s)

    def said(self, wish_s: float | None) -> list[str]:
        """Return what becomes of the user's signal and times, a line each."""
        grace = f"have {self.grace_s(wish_s):g} s to save"
        said = [f"{self.lead_s} s before the time limit workers get SIG{self.workers} and {grace}"]
        if self.batch != OURS:
            said.append(
                f"the script gets SIG{self.batch} then; its own trap runs after the workers' end"
            )
        if not self.requeue:
            said.append("--no-requeue stays: after the time limit, or with too few nodes, it ends")
        return [*said, *self.notes]

    def of_sbatch(self) -> list[str]:
        """Return the options of #SBATCH that the job needs."""
        requeue = "requeue" if self.requeue else "no-requeue"
        ours = ("no-kill", requeue, "open-mode=append", f"signal=B:{self.batch}@{self.lead_s}")
        return [f"#SBATCH --{option}" for option in ours]

    def of_batch(self) -> list[str]:
        """Return the options of `holdfast batch` that say so; none where all is as usual."""
        name = self.workers if self.batch == OURS else f"B:{self.batch}"
        asked = f"{name}@{self.lead_s}"
        signal_ = [] if asked == f"TERM@{LEAD_S}" else [f"--signal={asked}"]
        opens = [f"--open-mode={self.open_mode}"] if self.open_mode else []
        return [*signal_, *opens, *([] if self.requeue else ["--no-requeue"])]


USUAL_ENDING: Final = Ending()


def grace_within(most_s: float, wish_s: float | None) -> float:
    """Return the seconds from the workers' signal to SIGKILL, of `most_s` that the platform leaves.

    `wish_s` is torchrun's --shutdown-timeout; None: it has none.
    """
    return most_s if wish_s is None else min(max(wish_s, 1.0), most_s)


def ending_of(lines: Sequence[str], shutdown_timeout_s: float | None) -> Ending:
    """Return how the batch script is to end that begins with `lines`, with all of its #SBATCH.

    Raises:
        UserError: HF160, the time limit is too short.
    """
    given = {"signal": "", "time": "", "open-mode": ""}
    requeue = True
    for name, value in _options(lines):
        given[name] = value
        if name in ("requeue", "no-requeue"):
            requeue = name == "requeue"
    time = given["time"]
    found = signalled(given["signal"], requeue=requeue)
    needed_s = min((shutdown_timeout_s or 0) + AROUND_SHUTDOWN_S + KILL_S, MAX_LEAD_S)
    lead_s = max(found.lead_s, math.ceil(needed_s))
    found = replace(found, lead_s=lead_s, open_mode=given["open-mode"][:1])
    limit_s = limit_seconds(time)
    if limit_s is not None and found.lead_s >= limit_s:
        message = (
            f"--time={time} is {limit_s} s, but {found.lead_s} s before its end the job must save "
            f"already: ask for --time={found.lead_s // 60 + 2} or more"
        )
        raise UserError("HF160", message)
    return found


def signalled(value: str, *, requeue: bool) -> Ending:
    """Return how a job ends with this --signal, [[R][B]:]SIGNAL[@SECONDS]; empty: without one."""
    if not (parts := _SIGNAL.fullmatch(value)):
        notes = (f"--signal={value} cannot be read, and is not used",) if value else ()
        return Ending(requeue=requeue, notes=notes)
    notes, flags = (), parts["flags"] or ""
    if "R" in flags:
        notes = ("R: of --signal is dropped: a reservation's end is not announced",)
    lead_s = max(LEAD_S, int(parts["lead"] or _SBATCH_LEAD_S))
    found = Ending(lead_s=lead_s, requeue=requeue, notes=notes)
    name = _name(parts["name"])
    if name not in STOP_SIGNALS:
        note = f"--signal={value}: workers get SIGTERM, not {parts['name']}"
        return replace(found, notes=(*notes, note))
    return replace(found, batch=name) if "B" in flags else replace(found, workers=name)


def _name(text: str) -> str:
    if text.isdecimal():
        known = int(text) in [each.value for each in signal.Signals]
        text = signal.Signals(int(text)).name if known else text
    return text.upper().removeprefix("SIG")


def _options(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the long options of #SBATCH lines, and -t, with their values."""
    for line in lines:
        if not line.startswith("#SBATCH"):
            continue
        try:
            left = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError:
            continue  # sbatch itself refuses it
        while left:
            word = left.pop(0)
            name, equals, value = word.partition("=")
            if word[:2] == "-t":
                name, value, equals = "--time", word[2:], word[2:]
            takes = name in ("--signal", "--time", "--open-mode") and not equals and left
            if name.startswith("--"):
                yield name[2:], left.pop(0) if takes else value
