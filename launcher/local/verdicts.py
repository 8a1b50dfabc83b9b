"""The failures of a rehearsal: what is injected when, and what must hold afterwards. Pure."""

from __future__ import annotations

import enum
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from elastic_trainer.plan.injected import SLOW_S
from elastic_trainer.plan.quantities import counted
from elastic_trainer.record.events import Event
from elastic_trainer.record.failures import EXIT_DONE, EXIT_SAVED, Kind
from launcher.plan.clock import Clock

LOSS_REL: Final = 1e-3
"""Relative difference of the last loss from the undisturbed run's: fewer ranks add up in another
order. A lost or repeated batch is found by the ledger, not by this."""
_RECORD_KIB: Final = 128
_SLOW_FOR_S: Final = 60.0
"""Agents compare ranks every 10 s (`pace_s`), and name one that is slow three times in a row."""


class Failing(enum.StrEnum):
    """What is rehearsed, in this order."""

    RANK = "rank-killed"
    HANG = "hang"
    NODE = "node-lost"
    COORDINATOR = "coordinator-lost"
    DISK = "disk-full"
    PREEMPTION = "preemption"
    SLOW = "slow-node"


class Level(enum.StrEnum):
    """How it ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    NOT_HERE = "not here"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowVerdict:
    """One row."""

    failing: Failing
    level: Level
    text: str
    faults: tuple[str, ...] = ()
    """As for `holdfast run --fault`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What the undisturbed run has shown, and what there is to strike."""

    summary: Mapping[str, Any]
    nodes: int
    smallest: int
    """Nodes of the smallest layout."""
    is_script: bool

    @property
    def steps(self) -> int:
        """The last one."""
        return int(self.summary["steps"])

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return float(self.summary["wall_s"] - (self.summary["startup_s"] or 0.0)) / self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """What one failure led to: an attempt, of a preemption two."""

    codes: Sequence[int]
    summary: Mapping[str, Any]
    """Of all attempts."""
    events: Sequence[Event]


def faults_of(failing: Failing, stage: Rehearsed) -> tuple[str, ...]:
    """Return the texts for `--fault`; the first strikes after a third of the steps."""
    first = max(1, stage.steps // 3)
    last = stage.nodes - 1
    peer = min(1, last)
    comes_back = () if stage.smallest < stage.nodes else (f"return-node@{first}",)
    full, free = _while_a_save_falls_due(stage, first)
    # The trainer's record says how far it is; a script's own files may be as small.
    left = "" if stage.is_script else f":{_RECORD_KIB}"
    return {
        Failing.RANK: (f"kill-worker:{peer}@{first}",),
        Failing.HANG: (f"pause-worker:{peer}@{first}",),
        Failing.NODE: (f"kill-node:{last}@{first}", *comes_back),
        Failing.COORDINATOR: (f"kill-coordinator@{first}", *comes_back),
        Failing.DISK: (f"fill-disk{left}@{full}", f"free-disk@{free}"),
        Failing.PREEMPTION: (f"preempt@{first}",),
        Failing.SLOW: (f"slow-worker:{peer}@{first}",),
    }[failing]


def sets_of(failing: Failing, stage: Rehearsed) -> tuple[str, ...]:
    """Return further `--set`s: a slow rank must be slow for a while before it is named."""
    if failing is not Failing.SLOW:
        return ()
    steps = stage.steps // 3 + math.ceil(_SLOW_FOR_S / (SLOW_S + stage.step_s))
    return (f"train.steps={max(stage.steps, steps)}",)


def _while_a_save_falls_due(stage: Rehearsed, first: int) -> tuple[int, int]:
    """Return the steps from and to which the disk is full: one save in between, and one after."""
    saved: list[int] = stage.summary["checkpoints_committed"]
    if len(saved) < 3:
        return first, min(stage.steps - 1, 2 * first)
    index = len(saved) // 3
    before, due, after = saved[index - 1 : index + 2] if index else saved[:3]
    return before, due + (after - due) // 2


def verdict(
    failing: Failing, stage: Rehearsed, found: Attempts, faults: Sequence[str]
) -> RowVerdict:
    """Return the row of a failure that was injected, as `faults`."""
    if problems := list(_problems(failing, stage, found)):
        level, text = Level.FAIL, "; ".join(problems)
    elif warning := _disk_warning(failing, stage, found) or _crash_warning(found):
        level, text = Level.WARN, warning
    else:
        level, text = Level.OK, _said(failing, stage, found)
    return RowVerdict(failing=failing, level=level, text=text, faults=tuple(faults))


def _problems(failing: Failing, stage: Rehearsed, found: Attempts) -> Iterator[str]:
    if _injected(found) is None:
        yield f"not injected: the {stage.steps} steps were over before; let the job run longer"
        return
    summary, code = found.summary, found.codes[-1]
    if failing is Failing.PREEMPTION:
        yield from _stop_problems(found)
    if code != EXIT_DONE:
        yield f"the job ended with code {code} after step {summary['steps']}"
        return
    if not stage.is_script and summary["steps"] < summary["steps_asked"]:
        yield f"it ended after step {summary['steps']} of {summary['steps_asked']}"
    for key in ("samples_lost", "samples_repeated"):
        if summary[key]:
            yield f"{summary[key]} {key.replace('_', ' ')}"
    if redone := summary["committed_steps_redone"]:
        yield f"{counted(redone, 'committed step')} redone"
    yield from _loss_problems(stage, found)
    yield from _PROBLEMS.get(failing, _recovery_problems)(stage, found)


def _loss_problems(stage: Rehearsed, found: Attempts) -> Iterator[str]:
    loss, usual = found.summary["final_loss"], stage.summary["final_loss"]
    # A script's batch may change with its nodes, and its loss is seen about once a second.
    comparable = found.summary["steps"] == stage.steps and not stage.is_script
    if comparable and None not in (loss, usual) and not math.isclose(loss, usual, rel_tol=LOSS_REL):
        yield f"the last loss is {loss:.6f}, undisturbed {usual:.6f}"


def _recovery_problems(_stage: Rehearsed, found: Attempts) -> Iterator[str]:
    if not any(each["recovered_s"] is not None for each in found.summary["failures"]):
        yield "the failure was not noticed: nothing was restarted"


def _hang_problems(stage: Rehearsed, found: Attempts) -> Iterator[str]:
    if not any(each["kind"] == Kind.HANG for each in found.summary["failures"]):
        yield "no hang was found"
    yield from _recovery_problems(stage, found)


def _disk_problems(stage: Rehearsed, found: Attempts) -> Iterator[str]:
    full = _injected(found)
    assert full is not None, "it was injected"
    saved: list[int] = found.summary["checkpoints_committed"]
    if not stage.is_script and max(saved, default=0) <= (full.step or 0):
        yield "no checkpoint was committed once there was space again"


def _slow_problems(_stage: Rehearsed, found: Attempts) -> Iterator[str]:
    struck = _injected(found)
    assert struck is not None, "it was injected"
    # Of ranks that share their tensors one is as slow as the other: the node counts.
    named = {e.fields["member"] for e in found.events if e.event == "worker.slow"}
    if struck.node not in named:
        yield f"{struck.node} is slow and was not named"
    if others := sorted(named - {struck.node}):
        yield f"{', '.join(others)} is not slow and was named"


def _stop_problems(found: Attempts) -> Iterator[str]:
    if left := _killed_for_lateness(found.events):
        yield (
            f"{counted(len(left), 'worker')} did not save within "
            f"{left[0]:g} s (elastic.stop_grace_s) and had to be killed"
        )
    elif found.codes[0] != EXIT_SAVED:
        yield f"asked to save and end, it ended with code {found.codes[0]}"


def _killed_for_lateness(events: Sequence[Event]) -> list[float]:
    """Return the seconds of grace of each worker of a script that stayed until their end.

    One without a handler of SIGTERM is killed at once: it would not save.
    """
    asked = {(e.node, e.fields["pid"]): e for e in events if e.event == "worker.signalled"}
    found = []
    for event in _exits(events, signal.SIGKILL):
        before = asked.get((event.node, event.fields["pid"]))
        if before is not None and event.t_mono - before.t_mono >= before.fields["grace_s"]:
            found.append(float(before.fields["grace_s"]))
    return found


def _exits(events: Sequence[Event], *signals: int) -> list[Event]:
    return [e for e in events if e.event == "worker.exit" and e.fields["signal"] in signals]


_CRASHES: Final = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)
_PROBLEMS: Final[Mapping[Failing, Callable[[Rehearsed, Attempts], Iterator[str]]]] = {
    Failing.HANG: _hang_problems,
    Failing.DISK: _disk_problems,
    Failing.SLOW: _slow_problems,
    Failing.PREEMPTION: lambda _stage, _found: iter(()),
}


def _disk_warning(failing: Failing, stage: Rehearsed, found: Attempts) -> str:
    if failing is not Failing.DISK or stage.is_script or found.summary["checkpoints_failed"]:
        return ""
    return "no checkpoint fell due while the disk was full; save more often"


def _crash_warning(found: Attempts) -> str:
    """Return which workers crashed: nothing that is injected does that, nor does a lost peer."""
    crashed = _exits(found.events, *_CRASHES)
    if not crashed:
        return ""
    name = signal.Signals(crashed[0].fields["signal"]).name
    where = f"{name} on {crashed[0].node} after step {crashed[0].step}"
    return f"{counted(len(crashed), 'worker')} crashed, which was not injected: {where}"


def _said(failing: Failing, stage: Rehearsed, found: Attempts) -> str:
    summary = found.summary
    if failing is Failing.PREEMPTION:
        asked = next(e.t_unix for e in found.events if e.event == "fault.injected")
        ends = (e.t_unix for e in found.events if e.event == "run.ended")
        stop_s = next(end for end in ends if end >= asked) - asked
        unsaved = ", without a save at the signal" if _exits(found.events, signal.SIGKILL) else ""
        return f"ended {stop_s:.1f} s after the signal, went on in a second job{unsaved}"
    if failing is Failing.SLOW:
        slow = next(event.fields for event in found.events if event.event == "worker.slow")
        return f"{slow['member']} named, {slow['ratio']:.1f} times its peers' time"
    if failing is Failing.DISK:
        failed = counted(summary["checkpoints_failed"], "save")
        return "it went on" if stage.is_script else f"{failed} failed, training went on"
    seconds = max(each["recovered_s"] or 0.0 for each in summary["failures"])
    redone = summary["steps_redone"]
    steps = "" if redone is None else f", {counted(redone, 'step')} redone"
    return f"back after {seconds:.1f} s on {counted(len(summary['nodes_at_end']), 'node')}{steps}"


def clocked(row: RowVerdict, clock: Clock, predicted_s: float, *, is_script: bool) -> RowVerdict:
    """Return the verdict on a preemption with what the job's own size makes of it.

    Args:
        row: of the scaled-down job.
        clock: the job's chain of times.
        predicted_s: predicted time of a save at the job's own size, in seconds.
        is_script: the state is the script's, of which only the rehearsal tells.
    """
    level, text = row.level, f"{row.text}; {clock}"
    if not is_script and predicted_s > clock.save_s:
        text = (
            f"{row.text}; slurm.save_s says {clock.save_s} s, a save of this size is predicted "
            f"to take {math.ceil(predicted_s)} s: measure one on the cluster"
        )
        level = max(level, Level.WARN, key=list(Level).index)
    return replace(row, level=level, text=text)


def _injected(found: Attempts) -> Event | None:
    return next((event for event in found.events if event.event == "fault.injected"), None)


def passed(rows: Sequence[RowVerdict]) -> bool:
    """Whether nothing failed, and something was rehearsed at all."""
    return all(row.level is not Level.FAIL for row in rows) and any(
        row.level in (Level.OK, Level.WARN) for row in rows
    )
