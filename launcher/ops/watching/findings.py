"""What is wrong with a run that its platform calls running. Pure: facts and the time in.

The same rules on every platform. What is looked at: how the platform says it stands (suspended,
nodes lost, its batch host), the age of the newest step, and saves that failed.

**Silence.** A step counts as overdue after ten times the median of this epoch's, twice its longest,
and a minute, whichever is most: what is read here may be that far behind, by caches of shared
storage and by clocks that differ. Never later than a minute after the agents themselves would have
called it a hang (`elastic.hang_ceiling_s`). Where no pace can be known (until the third step of an
epoch is done) and where no step is expected (while a save is staged, in an evaluation that was
announced, while starting, saving or ending), `elastic.start_ceiling_s` counts, as for the agents.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from elastic_trainer.config import ElasticSection
from elastic_trainer.events import Event
from launcher.backends.base import JobState, JobStatus
from launcher.ops.record.newest import SAVE_ENDS, News
from launcher.ops.record.progress import Progress
from launcher.ops.record.timeline import node_names
from launcher.ops.record.verdict import this_attempt
from launcher.ops.watching.texts import names, seconds_text, span, times

BEHIND_S: Final = 60.0
"""What is read may be this far behind what has happened."""
STEPS: Final = 10.0
"""A step is overdue after so many of its median."""
LONGEST: Final = 2.0
"""And after so many of the longest of the epoch: evaluations, saves of a script's own."""
LEAST_BYTES: Final = 16 << 20
"""With less room than this a disk is full: not even the record has place for long."""

_STEP = ("step.completed", "step.skipped", "script.progress")
_BEGINS = ("checkpoint.started", "evaluation.started")
_STOPPED = (JobState.SAVED, JobState.FAILED, JobState.CANCELLED)
_NOT_LOST = ("agent.started", "member.joined", "member.evicted", "member.left")
"""It is back, or was put out or let go on purpose."""


class Kind(enum.StrEnum):
    """What is wrong, for programs."""

    SUSPENDED = "suspended"
    RECORD_AWAY = "record_away"
    NO_PROGRESS = "no_progress"
    BATCH_HOST_LOST = "batch_host_lost"
    NODES_LOST = "nodes_lost"
    DISK_FULL = "disk_full"
    SAVES_FAIL = "saves_fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    kind: Kind
    text: str
    way_out: str = ""
    """What to do about it; empty: nothing, it goes on by itself."""

    def __str__(self) -> str:
        """Return it for people."""
        return f"{self.text}; {self.way_out}" if self.way_out else self.text

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"kind": str(self.kind), "text": self.text, "way_out": self.way_out or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a file system that the run writes to has left."""

    path: str
    free_bytes: int
    has_files: bool = True
    """Whether it takes another file: inodes run out too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a run."""

    run: str
    """As the user calls it, for the way out."""
    status: JobStatus
    news: News | None
    problem: str = ""
    """Why what the run has written cannot be read, or is not the newest; empty: it can."""
    rooms: tuple[Room, ...] = ()
    """Of the run's directory and its checkpoints, where this machine sees them."""
    nodes_return: bool = True
    """A node that the platform holds for lost can take part again in the same job."""


def findings(facts: Facts, *, now_unix: float) -> list[Finding]:
    """Return what is wrong, the gravest first; empty: nothing that is known here.

    Args:
        facts: of a run. Of one that has ended before it was done only saves that failed are left to
            tell, of others that do not run nothing.
        now_unix: the time.
    """
    state = facts.status.state
    attempt = () if facts.news is None else this_attempt(facts.news.events)
    if state is not JobState.RUNNING:
        left = _saves(attempt, now_unix) if state in _STOPPED else None
        return [] if left is None else [left]
    lost, there = _nodes(facts, attempt)
    suspended = _suspended(facts.status)
    away = _away(facts.problem)
    found = [
        suspended,
        away,
        None if suspended or away else _silence(facts, attempt, now_unix),
        _batch_host(facts.status, lost),
        _lost(facts, lost, there),
        _full(facts.rooms),
        _saves(attempt, now_unix),
    ]
    return [finding for finding in found if finding is not None]


def _suspended(status: JobStatus) -> Finding | None:
    if not status.suspended:
        return None
    text = "it is suspended: its processes are stopped where they are"
    return Finding(kind=Kind.SUSPENDED, text=text, way_out=status.words)


def _away(problem: str) -> Finding | None:
    if not problem:
        return None
    text = f"what it has written cannot be read now, so nothing is known of its progress: {problem}"
    return Finding(kind=Kind.RECORD_AWAY, text=text)


# --- silence ---------------------------------------------------------------------------------


def _silence(facts: Facts, attempt: Sequence[Event], now_unix: float) -> Finding | None:
    news, started = facts.news, facts.status.started
    if news is None:
        return None
    elastic = news.config.elastic
    if not attempt or (started is not None and attempt[-1].t_unix < started - BEHIND_S):
        return _nothing_yet(started, elastic, now_unix)
    if news.progress.parked is not None or news.code is not None:
        return None
    if news.progress.state == "training":
        since, limit_s, usual = _step_due(attempt, news.progress, elastic)
        what = f"no step for {{}}{usual}: {news.progress.step_text}"
    else:
        since, what = attempt[-1].t_unix, f"nothing was written for {{}} while {_doing(news)}"
        limit_s = elastic.start_ceiling_s
        if news.progress.state == "recovering":
            limit_s = BEHIND_S + _delay_s(attempt)
    if now_unix - since <= limit_s:
        return None
    return Finding(
        kind=Kind.NO_PROGRESS,
        text=what.format(span(now_unix - since)),
        way_out=f"`holdfast stacks {facts.run}` shows what each worker does",
    )


def _nothing_yet(started: float | None, elastic: ElasticSection, now_unix: float) -> Finding | None:
    if started is None or now_unix - started <= elastic.start_ceiling_s:
        return None
    text = f"its agents have written nothing since it started {span(now_unix - started)} ago"
    return Finding(kind=Kind.NO_PROGRESS, text=text, way_out="see the job's own output")


def _step_due(
    attempt: Sequence[Event], progress: Progress, elastic: ElasticSection
) -> tuple[float, float, str]:
    """Return when the newest step was done, how long the next may take, what steps took."""
    done = _steps(attempt, progress.epoch)
    since = done[-1][0] if done else attempt[-1].t_unix
    # The second step may compile again: its gap says nothing of what is usual.
    gaps = [after[0] - before[0] for before, after in pairwise(done)][1:]
    if not gaps:
        return since, elastic.start_ceiling_s, ""
    # A script's counter is looked at once a second: several steps may lie between.
    per_step = (done[-1][0] - done[0][0]) / max(1, done[-1][1] - done[0][1])
    usual = f" (steps take {seconds_text(min(statistics.median(gaps), per_step))})"
    paused = _paused(attempt, since)
    if paused is not None:
        return paused, elastic.start_ceiling_s, usual
    limit_s = max(BEHIND_S, STEPS * statistics.median(gaps), LONGEST * max(gaps))
    return since, min(limit_s, elastic.hang_ceiling_s + BEHIND_S), usual


def _steps(attempt: Iterable[Event], epoch: int) -> list[tuple[float, int]]:
    """Return (time, step) of the newest epoch's steps, each as it was first told."""
    found: list[tuple[float, int]] = []
    for event in attempt:
        if event.event not in _STEP or event.step is None or (event.epoch or 0) < epoch:
            continue
        if not found or event.step > found[-1][1]:
            found.append((event.t_unix, event.step))
    return found


def _paused(attempt: Sequence[Event], since: float) -> float | None:
    """Return when a pause began after the newest step in which none is expected; None: none has."""
    for event in reversed(attempt):
        if event.t_unix < since or event.event == "evaluation.ended":
            return None
        if event.event in _BEGINS:
            return event.t_unix
    return None


def _doing(news: News) -> str:
    return f"{news.progress.state}, epoch {news.progress.epoch}"


def _delay_s(attempt: Sequence[Event]) -> float:
    """Return how long the next epoch is held back on purpose."""
    newest = next((event for event in reversed(attempt) if event.event == "epoch.delayed"), None)
    seconds = None if newest is None else newest.fields.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) else 0.0


# --- nodes -----------------------------------------------------------------------------------


def _nodes(facts: Facts, attempt: Sequence[Event]) -> tuple[list[str], list[str]]:
    """Return the nodes that are lost, by the platform or the run's record, and those there.

    Nodes are called as the run calls them; the platform may name the machine (on Kubernetes).
    """
    progress = None if facts.news is None else facts.news.progress
    known = [] if progress is None else [*progress.members, *progress.spares]
    lost, hosts = _lost_on_record(attempt)
    away = set(facts.status.nodes_lost)
    lost += [name for name in known if {name, hosts.get(name)} & away and name not in lost]
    told = {*lost, *(hosts.get(name, name) for name in lost)}
    lost += [name for name in facts.status.nodes_lost if name not in told]
    return lost, [name for name in known or facts.status.nodes if name not in lost]


def _lost_on_record(attempt: Iterable[Event]) -> tuple[list[str], dict[str, str]]:
    """Return the nodes that were lost and have not come back, and the machine of each node."""
    hosts: dict[str, str] = {}
    lost: dict[str, None] = {}
    for event in attempt:
        fields = event.fields
        member = event.node if event.event == "agent.started" else fields.get("member")
        if isinstance(member, str) and isinstance(fields.get("host"), str):
            hosts[member] = fields["host"]
        if event.event == "epoch.formed":
            back = [*node_names(fields.get("members")), *node_names(fields.get("spares"))]
        elif event.event == "member.lost":
            lost[str(member)] = None
            continue
        else:
            back = [str(member)] if event.event in _NOT_LOST else []
        for name in back:
            lost.pop(name, None)
    return list(lost), hosts


def _batch_host(status: JobStatus, lost: Sequence[str]) -> Finding | None:
    if status.batch_host not in lost:
        return None
    text = (
        f"the batch host {status.batch_host} is lost, and the batch script with it: the nodes that "
        "are left save before the time limit and put the job back in its place"
    )
    return Finding(kind=Kind.BATCH_HOST_LOST, text=text)


def _lost(facts: Facts, lost: Sequence[str], there: Sequence[str]) -> Finding | None:
    if not lost:
        return None
    verb = "is" if len(lost) == 1 else "are"
    text = f"{len(there)} of {len(there) + len(lost)} nodes: {names(lost)} {verb} lost"
    way_out = ""
    if facts.status.nodes_lost and not facts.nodes_return:
        way_out = (
            "a node that comes back cannot rejoin this job; a requeue restores it: "
            f"holdfast restart {facts.run}"
        )
    return Finding(kind=Kind.NODES_LOST, text=text, way_out=way_out)


# --- storage ---------------------------------------------------------------------------------


def _full(rooms: Iterable[Room]) -> Finding | None:
    full = [room for room in rooms if room.free_bytes < LEAST_BYTES or not room.has_files]
    if not full:
        return None
    left = min(room.free_bytes for room in full)
    what = f"{left / 2**20:.1f} MiB are left" if left < LEAST_BYTES else "no file can be added"
    paths = " and ".join(dict.fromkeys(room.path for room in full))
    return Finding(
        kind=Kind.DISK_FULL,
        text=f"the disk of {paths} is full ({what}): saves and the record of the run fail there",
        way_out="make room; the next save tries again",
    )


def _saves(attempt: Sequence[Event], now_unix: float) -> Finding | None:
    """Return what is wrong where the newest save failed."""
    ended = [event for event in attempt if event.event in SAVE_ENDS]
    failed = 0
    for event in reversed(ended):
        if event.event == "checkpoint.committed":
            break
        failed += 1
    if not failed:
        return None
    good = ended[-failed - 1] if failed < len(ended) else None
    newest = "none has succeeded in this attempt"
    if good is not None:
        newest = f"the newest is of step {good.step}, {span(now_unix - good.t_unix)} old"
    reason = str(ended[-1].fields.get("reason") or "no reason was written")
    how_often = "" if failed == 1 else f" {times(failed)} in a row"
    return Finding(
        kind=Kind.SAVES_FAIL,
        text=f"saving failed{how_often}, last at step {ended[-1].step} ({reason}); {newest}",
    )
